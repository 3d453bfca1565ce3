"""A decoder on the ops of this library: layers of attention, of state-space mixers, or of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .._core.lazy import torch
from .._model_error import ModelError
from ..ops.norm import fused_add_rms_norm, rms_norm
from .attention import MLP, Attention
from .batch import Batch
from .config import Config, Names
from .experts import Experts
from .gguf_linear import BlockMatrix, GgufLinear
from .latent_attention import LatentAttention
from .linear import Linear, Place
from .mamba import StateSpaceLayer
from .packed_linear import check_written
from .quantization import GgufTypes, Mxfp4Experts, PackedQuantization, Quantization

if TYPE_CHECKING:
    from torch import Tensor

Cache = list[tuple["Tensor", ...]]  # what each layer keeps of texts
_RANDOM_CODE, _MAX_RANDOM_CODE = 32.0, 127.0  # deviation and bound of random 8-bit weights
_RANDOM_INPUT = 8.0  # what is 127 under a random static scale


class Layer(NamedTuple):
    """A layer: a norm and what mixes tokens; then, if the architecture has it, a norm and an MLP."""

    input_norm: Tensor
    mixer: Attention | LatentAttention | StateSpaceLayer
    mlp_norm: Tensor | None
    mlp: MLP | Experts | None

    def tensors(self, names: Names) -> dict[str, Tensor]:
        """{name in a checkpoint, within the layer: the weights, or a view of them}."""
        mixer = names.state_space if isinstance(self.mixer, StateSpaceLayer) else names.attention
        found = {f"{names.input_norm}.weight": self.input_norm}
        found |= {f"{mixer}.{name}": tensor for name, tensor in self.mixer.tensors().items()}
        if self.mlp is not None and self.mlp_norm is not None:
            found[f"{names.mlp_norm}.weight"] = self.mlp_norm
            found |= {f"{names.mlp}.{name}": tensor for name, tensor in self.mlp.tensors().items()}
        return found


class Decoder:
    """The decoder. Its weights are not set: `tensors` says which there are, `write` and `randomise` set them.

    Args:
        config: sizes and options.
        dtype: name of the dtype of weights, activations, keys and values; None for the dtype of `config`.
        device: device of the weights; on "meta" they take no memory.

    Attributes:
        token_bytes: memory that a token takes in the blocks of a cache.
        slot_bytes: memory that a slot takes, which is all that a text keeps beside its blocks.
    """

    def __init__(self, config: Config, dtype: str | None = None, device: Any = "cpu") -> None:
        self.config = config
        self.device, self.dtype = torch.device(device), getattr(torch, dtype or config.dtype)
        if isinstance(config.quantization, Quantization | PackedQuantization) and self.dtype == torch.float32:
            raise ModelError("dtype", "expected float16 or bfloat16 with quantised weights, got float32")
        place = Place(self.dtype, self.device, config.quantization)
        sizes = config.vocab_size, config.hidden_size
        self.embedding = place.matrix(config.names.embedding, *sizes)
        self.layers = [self._layer(i, place) for i in range(config.num_hidden_layers)]
        self.norm = place.empty(config.hidden_size)
        head = self.embedding if config.tie_word_embeddings else place.matrix("lm_head", *sizes)
        rows = {"lm_head": config.vocab_size}
        self.head = GgufLinear((head,), None, rows) if isinstance(head, BlockMatrix) else Linear(head, None, rows)
        self.token_bytes = sum(layer.mixer.token_bytes for layer in self.layers)
        self.slot_bytes = sum(layer.mixer.slot_bytes for layer in self.layers)
        self._tensors = self._named()

    def _layer(self, i: int, place: Place) -> Layer:
        """Layer number `i`, whose type decides what mixes tokens and what is kept of them."""
        config, hidden_size = self.config, self.config.hidden_size
        at = f"{config.names.layers}.{i}"
        mixer: Attention | LatentAttention | StateSpaceLayer
        if config.layer_types[i] == "attention":
            attention = place._replace(module=f"{at}.{config.names.attention}")
            if config.latent is not None:
                mixer = LatentAttention(config, config.latent, attention)
            else:
                mixer = Attention(config, config.sliding_windows[i], attention)
        else:
            mixer = StateSpaceLayer(config, place)
        if not config.intermediate_size:
            return Layer(place.empty(hidden_size), mixer, None, None)
        place, mixture = place._replace(module=f"{at}.{config.names.mlp}"), config.mixture
        mlp = Experts(config, mixture, place) if mixture is not None and mixture.layers[i] else MLP(config, place)
        return Layer(place.empty(hidden_size), mixer, place.empty(hidden_size), mlp)

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: the weights, or a view of them}. `write` sets them.

        Under ``A_log`` are the decays ``A = -exp(A_log)``. Packed weights of experts are there until `prepare`.
        """
        return self._tensors

    def _named(self) -> dict[str, Tensor]:
        names = self.config.names
        embedding = self.embedding.weight if isinstance(self.embedding, BlockMatrix) else self.embedding
        found = {f"{names.embedding}.weight": embedding, f"{names.norm}.weight": self.norm}
        if not self.config.tie_word_embeddings:
            found |= self.head.tensors()
        for i, layer in enumerate(self.layers):
            found |= {f"{names.layers}.{i}.{name}": tensor for name, tensor in layer.tensors(names).items()}
        return found

    def write(self, name: str, tensor: Tensor) -> None:
        """Set the weights that a checkpoint calls `name` to what it has under this name.

        Raises:
            ModelError: groups or zero points of a packed weight are not what ``config.json`` says.
        """
        weights, packed = self._tensors[name], self.config.quantization
        if isinstance(packed, PackedQuantization):
            check_written(packed, name, tensor)
        if name.endswith(".input_scale"):  # which projections of one input share: nothing saturates under the largest
            tensor = torch.maximum(weights, tensor.to(weights).reshape(weights.shape))
        weights.copy_(tensor)
        if name.endswith(".A_log"):  # mixers hold the decays A themselves
            weights.exp_().neg_()

    def prepare(self, checked: bool = True) -> None:
        """Once all tensors of a checkpoint are written: make of packed weights of experts what is multiplied.

        Args:
            checked: whether it is checked first that they can be, which tensors without data cannot.

        Raises:
            ModelError: such weights cannot be multiplied.
        """
        experts = [layer.mlp.weights for layer in self.layers if isinstance(layer.mlp, Experts)]
        for weights in experts if checked else ():
            weights.check()
        for weights in experts:
            weights.prepare()

    def randomise(self, seed: int, scale: float = 1.0) -> Decoder:
        """Set the weights of norms to 1, all others to normal noise with deviation ``scale / sqrt(columns)``.

        8-bit weights are such noise but for what of it is rounded, and cut off at four deviations.

        Raises:
            ModelError: weights are packed.
        """
        if isinstance(self.config.quantization, PackedQuantization | Mxfp4Experts | GgufTypes):
            raise ModelError("randomise", "expected weights that are neither packed nor of mxfp4 nor of GGUF's types")
        generator = torch.Generator(self.device).manual_seed(seed)
        for name, tensor in self._tensors.items():
            if "norm" in name.split(".")[-2]:
                tensor.fill_(1.0)
            elif name.endswith(".input_scale"):
                tensor.fill_(_RANDOM_INPUT / _MAX_RANDOM_CODE)
            elif name.endswith(".weight_scale"):
                columns = self._tensors[name.removesuffix("_scale")].shape[1]
                tensor.fill_(scale * columns**-0.5 / _RANDOM_CODE)
            elif tensor.itemsize == 1:
                codes = torch.empty(tensor.shape, device=self.device).normal_(0.0, _RANDOM_CODE, generator=generator)
                tensor.copy_(codes.round_().clamp_(-_MAX_RANDOM_CODE, _MAX_RANDOM_CODE))
            else:
                self.write(name, tensor.normal_(0.0, scale * tensor.shape[-1] ** -0.5, generator=generator))
        return self

    def new_cache(self, num_blocks: int, block_size: int, num_slots: int) -> Cache:
        """What each layer keeps of texts: keys and values in blocks of tokens, or states in slots."""
        return [layer.mixer.new_cache(num_blocks, block_size, num_slots) for layer in self.layers]

    def new_cos_sin(self, num_positions: int) -> Tensor:
        """The table of the rotary embedding for texts of up to `num_positions` tokens: [num_positions, rotary_dim]."""
        if not self.config.has_attention:
            return torch.empty(0, 0, dtype=self.dtype, device=self.device)
        return self.config.rope.cos_sin(self.config.head_dim, num_positions, self.device).to(self.dtype)

    def agreed(self, blocks: int) -> int:
        """The blocks of a cache for which every process has room that has a part of the model."""
        return blocks

    def forward(self, batch: Batch, cache: Cache, cos_sin: Tensor) -> Tensor:
        """Hidden states of the tokens after the last norm: [num_tokens, hidden_size]. Writes `cache`."""
        residual = self.embedding[batch.tokens]
        hidden = torch.empty_like(residual)
        rms_norm(hidden, residual, self.layers[0].input_norm, self.config.rms_norm_eps)
        if self.config.residual_in_float32:
            residual = residual.float()
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer, kept, next_norm in zip(self.layers, cache, next_norms, strict=True):
            hidden = layer.mixer(hidden, batch, kept, cos_sin)
            if layer.mlp is not None:
                self._add_norm(hidden, residual, layer.mlp_norm)
                hidden = layer.mlp(hidden)
            self._add_norm(hidden, residual, next_norm)
        return hidden

    def _add_norm(self, hidden: Tensor, residual: Tensor, weight: Tensor | None) -> None:
        """Add `hidden` to `residual`, and write the norm of the sum to `hidden`."""
        epsilon = self.config.rms_norm_eps
        if residual.dtype == hidden.dtype:
            fused_add_rms_norm(hidden, residual, weight, epsilon)
        else:
            residual += hidden
            rms_norm(hidden, residual.to(hidden.dtype), weight, epsilon)
