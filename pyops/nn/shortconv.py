"""The gated short convolution of the LFM2 models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..ops.mamba import causal_conv1d_prefill
from ..ops.mamba._convolution import MAX_WIDTH
from .custom_op import CustomOp
from .linear import ColumnParallelLinear, RowParallelLinear, new_parameter
from .merged import MergedColumnParallelLinear
from .states import read_slots, write_slots

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ShortConv"]


@CustomOp.register("short_conv")
class ShortConv(CustomOp):
    """Short convolution between two gates: ``out_proj(C * conv(B * x))`` for ``[B, C, x] = in_proj(hidden_states)``.

    The convolution is causal and depthwise, over the last `conv_L_cache` tokens of a sequence (the LFM2 models, Liquid
    AI 2025). ``forward(hidden_states, conv_state=None, query_start_loc=None, state_indices_tensor=None,
    has_initial_states=None)`` takes:

    - hidden_states: [num_tokens, dim], one sequence after another.
    - conv_state: [num_slots, dim / ranks, conv_L_cache - 1] of the dtype of hidden_states, read and written: the last
      inputs of the convolution of each sequence, the newest last; None to keep none.
    - query_start_loc: [num_seqs + 1] integers, the first token of each sequence and num_tokens; None for one sequence.
    - state_indices_tensor: [num_seqs] integers, the slot of each sequence; negative for no slot. None for slots 0, 1,
      2, ...
    - has_initial_states: [num_seqs] bool, whether a sequence continues from its slot; None if none does.

    It returns [num_tokens, dim]. A sequence without tokens leaves its slot as it is. No lengths are read on the host,
    so the layer can be captured into a CUDA graph. Both methods write conv_state. `forward_cuda` convolves by
    `pyops.causal_conv1d_prefill`, which is fastest if the channels of conv_state are contiguous in memory. If
    conv_L_cache exceeds the op's limit of 8 taps, `forward_cuda` runs `forward_native`.

    Args:
        config: has `conv_L_cache`, the taps of the convolution, at least 2, and `conv_bias`, whether the convolution
            and both projections have a bias.
        dim: elements of a hidden state.
        layer_idx: the number of the layer in its model.
        model_config, cache_config: accepted because vLLM has them; caches are arguments of `forward` here.
        prefix: the name of the layer in its model.

    Examples:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(conv_L_cache=3, conv_bias=False)  # or transformers.Lfm2Config
        >>> conv, conv_state = ShortConv(config, dim=64, layer_idx=0), torch.zeros(4, 64, 2)
        >>> slots = torch.tensor([3])  # of one sequence, which continues from slot 3 after its prompt
        >>> prompt = conv(torch.randn(5, 64), conv_state, state_indices_tensor=slots)
        >>> there = torch.tensor([True])
        >>> conv(torch.randn(1, 64), conv_state, state_indices_tensor=slots, has_initial_states=there).shape
        torch.Size([1, 64])
    """

    def __init__(
        self,
        config: Any,
        dim: int,
        layer_idx: int,
        model_config: Any = None,
        cache_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.config, self.layer_idx, self.conv_dim, self.prefix = config, layer_idx, dim, prefix
        self.model_config, self.cache_config = model_config, cache_config
        self.L_cache, self.bias = config.conv_L_cache, config.conv_bias
        if self.L_cache < 2:
            raise ValueError(f"ShortConv: config.conv_L_cache: expected at least 2, got {self.L_cache}")
        self.conv = ColumnParallelLinear(self.L_cache, dim, bias=self.bias, prefix=f"{prefix}.conv1d")
        channels = self.conv.output_size_per_partition
        self.conv.weight = new_parameter((channels, 1, self.L_cache), self.conv.params_dtype, self.conv.weight_loader)
        self.in_proj = MergedColumnParallelLinear(dim, [dim] * 3, bias=self.bias, prefix=f"{prefix}.in_proj")
        self.out_proj = RowParallelLinear(dim, dim, bias=self.bias, prefix=f"{prefix}.out_proj")

    def forward_native(
        self,
        hidden_states: Tensor,
        conv_state: Tensor | None = None,
        query_start_loc: Tensor | None = None,
        state_indices_tensor: Tensor | None = None,
        has_initial_states: Tensor | None = None,
    ) -> Tensor:
        x, gate_out, query_start_loc = self._inputs_of(hidden_states, conv_state, query_start_loc)
        device, num_tokens = x.device, x.shape[0]
        starts, ends = query_start_loc[:-1].long(), query_start_loc[1:].long()
        past = self._past(x, conv_state, len(starts), state_indices_tensor, has_initial_states)
        token = torch.arange(num_tokens, dtype=torch.int64, device=device)
        sequence = torch.searchsorted(ends, token, right=True).clamp(max=len(starts) - 1)
        before = self.L_cache - 1
        y = x.new_zeros(x.shape, dtype=torch.float32)
        for tap in range(self.L_cache):
            inputs = _inputs(x, past, sequence, token - starts[sequence] - (before - tap), starts)
            y = y + inputs.float() * self.conv.weight[:, 0, tap].float()
        if self.conv.bias is not None:
            y = y + self.conv.bias.float()
        if conv_state is not None:
            self._keep(conv_state, x, past, starts, ends, state_indices_tensor)
        output: Tensor = self.out_proj(gate_out * y.to(x.dtype))[0]
        return output

    def forward_cuda(
        self,
        hidden_states: Tensor,
        conv_state: Tensor | None = None,
        query_start_loc: Tensor | None = None,
        state_indices_tensor: Tensor | None = None,
        has_initial_states: Tensor | None = None,
    ) -> Tensor:
        slots = state_indices_tensor
        if self.L_cache > MAX_WIDTH:
            return self.forward_native(hidden_states, conv_state, query_start_loc, slots, has_initial_states)
        x, gate_out, query_start_loc = self._inputs_of(hidden_states, conv_state, query_start_loc)
        y = causal_conv1d_prefill.new(
            None if conv_state is None else conv_state.transpose(1, 2),
            x,
            self.conv.weight[:, 0],
            self.conv.bias,
            query_start_loc,
            None if slots is None else slots.to(query_start_loc.dtype),
            has_initial_states,
            activation=None,
        )
        output: Tensor = self.out_proj(gate_out * y)[0]
        return output

    def _inputs_of(
        self, hidden_states: Tensor, conv_state: Tensor | None, query_start_loc: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(inputs of the convolution, gate of its outputs, first token of each sequence)."""
        gate_in, gate_out, x = self.in_proj(hidden_states)[0].chunk(3, -1)
        x = gate_in * x
        if conv_state is not None:
            self._check(conv_state, x)
        if query_start_loc is None:
            query_start_loc = torch.arange(2, dtype=torch.int64, device=x.device) * x.shape[0]
        return x, gate_out, query_start_loc

    def _past(
        self, x: Tensor, conv_state: Tensor | None, num_seqs: int, slots: Tensor | None, has_initial: Tensor | None
    ) -> Tensor:
        """The inputs that precede each sequence's first token: [num_seqs, L_cache - 1, channels], the newest last."""
        if conv_state is None:
            return x.new_zeros(num_seqs, self.L_cache - 1, x.shape[1])
        return read_slots(conv_state, num_seqs, slots, has_initial).mT

    def _keep(
        self, conv_state: Tensor, x: Tensor, past: Tensor, starts: Tensor, ends: Tensor, slots: Tensor | None
    ) -> None:
        """Write the last inputs of each sequence to its slot."""
        before, num_seqs = self.L_cache - 1, len(starts)
        place = (ends - starts)[:, None] - before + torch.arange(before, dtype=torch.int64, device=x.device)
        sequence = torch.arange(num_seqs, dtype=torch.int64, device=x.device)[:, None].expand_as(place)
        kept = _inputs(x, past, sequence, place, starts).mT
        write_slots(conv_state, kept, torch.cat((starts, ends[-1:])), slots)

    def _check(self, conv_state: Tensor, x: Tensor) -> None:
        expected = (x.shape[1], self.L_cache - 1)
        if conv_state.ndim != 3 or conv_state.shape[1:] != expected or conv_state.dtype != x.dtype:
            raise ValueError(
                f"ShortConv: conv_state: expected shape (num_slots, {expected[0]}, {expected[1]}) of {x.dtype}, got "
                f"{tuple(conv_state.shape)} of {conv_state.dtype}"
            )


def _inputs(x: Tensor, past: Tensor, sequence: Tensor, place: Tensor, starts: Tensor) -> Tensor:
    """The inputs at positions `place` of `sequence`, tensors of one shape. Negative positions are in `past`."""
    if not x.shape[0]:
        x = past.new_zeros(1, past.shape[2])
    inside = x[(starts[sequence] + place).clamp(0, x.shape[0] - 1)]
    earlier = past[sequence, (place + past.shape[1]).clamp(0, past.shape[1] - 1)]
    return torch.where((place >= 0)[..., None], inside, earlier)
