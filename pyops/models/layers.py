"""The layers of a decoder: a token mixer, an MLP or a mixture of experts, and their norms, as the config says."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._core.system.lazy import torch
from .attention import MLP, Attention
from .batch import Batch
from .compressed_attention import CompressedAttention
from .config import Config
from .experts import Experts
from .hyper_connections import HyperConnection
from .latent_attention import LatentAttention
from .linear import Place
from .mamba import AttentionBesideStates, StateSpaceLayer
from .norm import Norm
from .parts import BOTH, MLP_ALONE, Names
from .rope import Rope

if TYPE_CHECKING:
    from torch import Tensor


class MlpAlone:
    """An MLP, or a mixture of experts, in a layer without attention. It caches nothing."""

    token_size, slot_bytes, scales = 0, 0, None

    def __init__(self, mlp: MLP | Experts) -> None:
        self.mlp, self.tensors = mlp, mlp.tensors

    def new_cache(self, num_blocks: int, block_size: int, num_slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return ()

    def __call__(self, hidden: Tensor, batch: Batch, cache: tuple[Tensor, ...], tables: dict[Rope, Tensor]) -> Tensor:
        return self.mlp(hidden)


Mixer = Attention | LatentAttention | CompressedAttention | StateSpaceLayer | AttentionBesideStates | MlpAlone


class Layer(NamedTuple):
    """A layer: a token mixer, such as attention, and an MLP if the architecture has one.

    Attributes:
        input_norm, mlp_norm: norms of the inputs; None if an input is not normalised, or shares the other's norm.
        mixer_out_norm, mlp_out_norm: norms of the outputs; None if an output is not normalised.
        connections: hyper-connections of the mixer and of the MLP; () where the residual is one stream.
    """

    mixer: Mixer
    mlp: MLP | Experts | None
    input_norm: Norm | None
    mixer_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp_out_norm: Norm | None
    connections: tuple[HyperConnection, ...] = ()

    def tensors(self, names: Names) -> dict[str, Tensor]:
        """{name in a checkpoint, within the layer: the weights, or a view of them}."""
        mixers: list[tuple[str, Attention | LatentAttention | CompressedAttention | StateSpaceLayer | MlpAlone]]
        if isinstance(self.mixer, AttentionBesideStates):
            mixers = [(names.attention, self.mixer.attention), (names.state_space, self.mixer.states)]
        else:
            at = names.state_space if isinstance(self.mixer, StateSpaceLayer) else names.attention
            mixers = [(at, self.mixer)]
        parts = (
            (names.input_norm, self.input_norm),
            *mixers,
            (names.attention_out_norm, self.mixer_out_norm),
            (names.mlp_norm, self.mlp_norm),
            (names.mlp_of(isinstance(self.mlp, Experts)), self.mlp),
            (names.mlp_out_norm, self.mlp_out_norm),
        )
        owned = [(at, part.tensors()) for at, part in parts if part is not None]
        owned += [("", one.tensors()) for one in self.connections]
        return {f"{at}.{name}" if at else name: tensor for at, tensors in owned for name, tensor in tensors.items()}


def new_layer(config: Config, i: int, place: Place) -> Layer:
    """Layer number `i`, with uninitialised weights. The type of the layer selects its token mixer and its cache."""
    at, norms = f"{config.names.layers}.{i}", config.norms
    has_mlp = config.intermediate_size > 0 and MLP_ALONE not in config.layer_types
    is_before, is_after = norms.place != "after", norms.place != "before"
    own_norm = has_mlp and not config.shares_norm
    has_norm = is_before, is_after, is_before and own_norm, is_after and own_norm
    input_norm, mixer_out_norm, mlp_norm, mlp_out_norm = (
        Norm(norms, config.rms_norm_eps, place, config.hidden_size) if one else None for one in has_norm
    )
    mlp_name = config.names.mlp_of(config.mixture is not None and config.mixture.layers[i])
    mlp = _mlp(config, i, place._replace(module=f"{at}.{mlp_name}")) if has_mlp else None
    mixer = _mixer(config, i, place._replace(module=f"{at}.{config.names.attention}"))
    connections = HyperConnection.of_layer(config, place.device)
    return Layer(mixer, mlp, input_norm, mixer_out_norm, mlp_norm, mlp_out_norm, connections)


def _mixer(config: Config, i: int, place: Place) -> Mixer:
    kind = config.layer_types[i]
    if kind == MLP_ALONE:
        return MlpAlone(_mlp(config, i, place))
    if kind not in ("attention", BOTH):
        return StateSpaceLayer(config, place)
    rope = config.rope_of(i)
    if config.latent is not None:
        shares = config.latent.indexer is not None and config.latent.indexer.shares_at(i)
        return LatentAttention(config, config.latent, rope, place, shares)
    if config.compressed is not None and rope is not None:
        return CompressedAttention(config, config.compressed, config.compressed.layers[i], rope, place)
    attention = Attention(config, config.sliding_windows[i], rope, place)
    return AttentionBesideStates(attention, StateSpaceLayer(config, place)) if kind == BOTH else attention


def _mlp(config: Config, i: int, place: Place) -> MLP | Experts:
    mixture = config.mixture
    if mixture is None or not mixture.layers[i]:
        return MLP(config, place)
    return Experts(config, mixture.of_layer(i), place)
