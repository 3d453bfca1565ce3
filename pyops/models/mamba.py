"""State-space layers of a decoder: the mixers of `pyops.nn`, with their states in slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .._core.system.lazy import torch
from .attention import Attention
from .batch import Batch
from .config import Config
from .linear import Place
from .rope import Rope
from .state_space import StateSpace

if TYPE_CHECKING:
    from torch import Tensor


class StateSpaceLayer:
    """A mixer of Mamba, Mamba-2, the gated delta rule or Kimi Delta Attention.

    Its cache holds the last inputs of the convolution and the state of the scan, in slots.

    A slot belongs to one sequence at a time; its size does not depend on the sequence's length. The state that a former
    sequence left in a slot is never read: a new sequence starts without a state, see `Batch`.

    Args:
        config: sizes and options; `state_space` is given.
        place: dtype and device of the weights. Decays and states of scans are always float32.
    """

    token_size, scales = 0, None

    def __init__(self, config: Config, place: Place) -> None:
        assert config.state_space is not None
        self.place, self.sizes = place, config.state_space
        with _made_at(place):
            self.mixer = _mixer(config, self.sizes).requires_grad_(False)
        channels, _, taps = self.mixer.conv1d.weight.shape
        self._conv_shape, self._ssm_shape = (taps - 1, channels), self.mixer.state_shape
        self.slot_bytes = prod(self._conv_shape) * place.dtype.itemsize + prod(self._ssm_shape) * torch.float32.itemsize

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: the weights, or a view of them}.

        If the mixer holds decays, the entry ``A_log`` is the tensor in which `Decoder.write` stores ``-exp(A_log)``.
        """
        found = {"A_log" if name == "A" else name: weight for name, weight in self.mixer.named_parameters()}
        if self.sizes.kind == "kda":
            convolutions = found.pop("conv1d.weight").chunk(3)
            return found | {f"{name}_conv1d.weight": part for name, part in zip("qkv", convolutions, strict=True)}
        if self.sizes.kind != "delta_rule" or self.sizes.is_by_group:
            return found
        qkvz, ba = found.pop("in_proj_qkvz.weight"), found.pop("in_proj_ba.weight")
        heads, values = self.sizes.num_heads, self.sizes.intermediate_size
        parts = dict(zip(("qkv", "z"), qkvz.split([len(qkvz) - values, values]), strict=True))
        parts |= zip(("b", "a"), ba.split(heads), strict=True)
        return found | {f"in_proj_{name}.weight": part for name, part in parts.items()}

    def new_cache(self, num_blocks: int, block_size: int, num_slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """States of the convolution, [num_slots, channels, conv_kernel - 1], and of the scan, [num_slots, ...]."""
        # The convolution ops are fastest if the channels of a token are contiguous.
        conv = self.place.empty(num_slots, *self._conv_shape).transpose(1, 2)
        return conv, torch.empty(num_slots, *self._ssm_shape, dtype=torch.float32, device=self.place.device)

    def __call__(self, hidden: Tensor, batch: Batch, cache: tuple[Tensor, ...], tables: dict[Rope, Tensor]) -> Tensor:
        where = batch.cu_seqlens_q, batch.state_slots, batch.has_states
        mixed: Tensor = self.mixer(hidden, *cache, *where, num_decodes=batch.num_decodes)
        return mixed


class AttentionBesideStates:
    """Attention and a state-space mixer in parallel on the same input; the outputs are added.

    Args:
        attention, states: the two mixers.
    """

    def __init__(self, attention: Attention, states: StateSpaceLayer) -> None:
        self.attention, self.states = attention, states
        self.scales, self.token_size, self.slot_bytes = attention.scales, attention.token_size, states.slot_bytes

    def new_cache(self, num_blocks: int, block_size: int, num_slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Keys and values in blocks, then states in slots."""
        sizes = num_blocks, block_size, num_slots, dtype
        return *self.attention.new_cache(*sizes), *self.states.new_cache(*sizes)

    def __call__(self, hidden: Tensor, batch: Batch, cache: tuple[Tensor, ...], tables: dict[Rope, Tensor]) -> Tensor:
        mixed = self.states(hidden, batch, cache[2:], tables)
        return mixed.add_(self.attention(hidden, batch, cache[:2], tables))


def _mixer(config: Config, sizes: StateSpace) -> Any:
    from ..nn import KimiGatedDeltaNetAttention, MambaMixer, MambaMixer2, QwenGatedDeltaNetAttention

    if sizes.kind == "kda":
        said = SimpleNamespace(
            hidden_size=config.hidden_size,
            rms_norm_eps=config.rms_norm_eps,
            linear_attn_config={
                "num_heads": sizes.num_heads,
                "head_dim": sizes.head_dim,
                "short_conv_kernel_size": sizes.conv_kernel,
            },
        )
        return KimiGatedDeltaNetAttention(said, None)
    if sizes.kind == "delta_rule":
        said = SimpleNamespace(
            hidden_size=config.hidden_size,
            hidden_act=config.hidden_act,
            rms_norm_eps=config.rms_norm_eps,
            linear_num_key_heads=sizes.n_groups,
            linear_num_value_heads=sizes.num_heads,
            linear_key_head_dim=sizes.state_size,
            linear_value_head_dim=sizes.head_dim,
            linear_conv_kernel_dim=sizes.conv_kernel,
        )
        return QwenGatedDeltaNetAttention(said, None, gqa_interleaved_layout=sizes.is_by_group)
    common = (config.hidden_size, sizes.state_size, sizes.conv_kernel, sizes.intermediate_size)
    biases = sizes.conv_bias, sizes.proj_bias
    if sizes.kind == "mamba":
        return MambaMixer(*common, sizes.time_step_rank, *biases, use_rms_norm=False)
    heads = sizes.n_groups, sizes.num_heads, sizes.head_dim
    return MambaMixer2(*common, *biases, *heads, config.rms_norm_eps, use_rms_norm=sizes.has_norm)


@contextmanager
def _made_at(place: Place) -> Iterator[None]:
    """Within this context, new layers of `pyops.nn` allocate weights as `place` says and compute by the ops."""
    from ..nn import set_custom_ops

    before = torch.get_default_dtype()
    torch.set_default_dtype(place.dtype)
    try:
        with torch.device(place.device), set_custom_ops("all", platform="cuda"):
            yield
    finally:
        torch.set_default_dtype(before)
