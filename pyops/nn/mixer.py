"""The base of state-space mixers: convolution and scan over prefills and decodes, with their states in slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..ops.mamba import (
    causal_conv1d_decode,
    causal_conv1d_prefill,
    gated_delta_rule,
    gated_delta_rule_update,
    kda,
    kda_update,
    mamba_chunk_scan_varlen,
    selective_scan_fwd,
    selective_state_update,
)
from ..ops.mamba._convolution import MAX_WIDTH
from .custom_op import CustomOp
from .linear import copy_weight, new_parameter
from .parallel import divide, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .linear import ColumnParallelLinear

__all__: list[str] = []


class Ops(NamedTuple):
    """The functions that a mixer calls: ops, or their references."""

    convolve: Callable[..., None]
    convolve_step: Callable[..., None]
    scan: Callable[..., None]
    scan_chunks: Callable[..., Any]
    step: Callable[..., None]
    delta_rule: Callable[..., Any]
    delta_rule_step: Callable[..., Any]
    kda: Callable[..., Any]
    kda_step: Callable[..., Any]


_OPS = (
    causal_conv1d_prefill,
    causal_conv1d_decode,
    selective_scan_fwd,
    mamba_chunk_scan_varlen,
    selective_state_update,
    gated_delta_rule,
    gated_delta_rule_update,
    kda,
    kda_update,
)
OPS = Ops(*_OPS)
REFERENCES = Ops(*(op.reference for op in _OPS))


class Prompts(NamedTuple):
    """The prefills of a batch: cu_seqlens [num_seqs + 1] int32; slots [num_seqs] int32; whether each has a state."""

    starts: Tensor
    slots: Tensor | None
    has_initial: Tensor | None


class Mixer(CustomOp):
    """The base of mixers: a convolution, then a scan, both with states in slots.

    A subclass makes `conv1d` by `depthwise`, sets `state_shape`, and has `_project`, `_scan`, `_step` and `_output`.
    """

    conv1d: ColumnParallelLinear
    activation: str
    state_shape: tuple[int, ...]
    """Shape of the state of a sequence on this rank."""

    def forward_native(
        self,
        hidden_states: Tensor,
        conv_state: Tensor | None = None,
        ssm_state: Tensor | None = None,
        query_start_loc: Tensor | None = None,
        state_indices_tensor: Tensor | None = None,
        has_initial_states: Tensor | None = None,
        num_decodes: int = 0,
    ) -> Tensor:
        states, slots = (conv_state, ssm_state), state_indices_tensor
        return self._mix(REFERENCES, hidden_states, *states, query_start_loc, slots, has_initial_states, num_decodes)

    def forward_cuda(
        self,
        hidden_states: Tensor,
        conv_state: Tensor | None = None,
        ssm_state: Tensor | None = None,
        query_start_loc: Tensor | None = None,
        state_indices_tensor: Tensor | None = None,
        has_initial_states: Tensor | None = None,
        num_decodes: int = 0,
    ) -> Tensor:
        states, slots = (conv_state, ssm_state), state_indices_tensor
        return self._mix(OPS, hidden_states, *states, query_start_loc, slots, has_initial_states, num_decodes)

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Project the tokens: inputs of the convolution, then further arguments of `_scan`, `_step` and `_output`."""
        raise NotImplementedError

    def _scan(
        self, ops: Ops, x: Tensor, rest: tuple[Tensor, ...], prompts: Prompts, ssm_state: Tensor | None
    ) -> Tensor:
        """The scan for prefill: [num_tokens, channels] from the convolution's result `x`."""
        raise NotImplementedError

    def _step(self, ops: Ops, x: Tensor, rest: tuple[Tensor, ...], slots: Tensor | None, ssm_state: Tensor) -> Tensor:
        """One decode step: the results for one token of each sequence, [num_seqs, channels]."""
        raise NotImplementedError

    def _output(self, y: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        """The output of the layer, from the results `y` of the scan."""
        raise NotImplementedError

    def _mix(
        self,
        ops: Ops,
        hidden_states: Tensor,
        conv_state: Tensor | None,
        ssm_state: Tensor | None,
        query_start_loc: Tensor | None,
        slots: Tensor | None,
        has_initial: Tensor | None,
        num_decodes: int,
    ) -> Tensor:
        if query_start_loc is None:
            query_start_loc = torch.arange(2, dtype=torch.int64, device=hidden_states.device) * hidden_states.shape[0]
        num_seqs = len(query_start_loc) - 1
        self._check(hidden_states, conv_state, ssm_state, num_seqs, num_decodes)
        x, *others = self._project(hidden_states)
        slots = None if slots is None else slots.int()
        if slots is None and num_decodes:
            slots = torch.arange(num_seqs, dtype=torch.int32, device=x.device)
        weight, bias = self.conv1d.weight[:, 0], self.conv1d.bias
        conv_state = None if conv_state is None else conv_state.transpose(1, 2)
        results = []
        if num_decodes:
            assert conv_state is not None
            assert ssm_state is not None
            assert slots is not None
            tokens = x[:num_decodes].contiguous()
            first = slots[:num_decodes]
            ops.convolve_step(tokens.unsqueeze(1), conv_state, weight, bias, self.activation, first)
            rest = tuple(rows[:num_decodes] for rows in others)
            results.append(self._step(ops, tokens, rest, first, ssm_state))
        if num_decodes < num_seqs:
            prompts = Prompts(
                (query_start_loc[num_decodes:] - num_decodes).int(),
                None if slots is None else slots[num_decodes:],
                None if has_initial is None else has_initial[num_decodes:],
            )
            convolved = torch.empty_like(x[num_decodes:], memory_format=torch.contiguous_format)
            ops.convolve(convolved, conv_state, x[num_decodes:], weight, bias, *prompts, self.activation)
            rest = tuple(rows[num_decodes:] for rows in others)
            results.append(self._scan(ops, convolved, rest, prompts, ssm_state))
        y = results[0] if len(results) == 1 else torch.cat(results)
        return self._output(y, tuple(others))

    def _check(
        self,
        hidden_states: Tensor,
        conv_state: Tensor | None,
        ssm_state: Tensor | None,
        num_seqs: int,
        num_decodes: int,
    ) -> None:
        name = type(self).__name__
        if not 0 <= num_decodes <= num_seqs or (num_decodes == num_seqs and len(hidden_states) != num_seqs):
            raise ValueError(
                f"{name}: num_decodes: expected 0 to {num_seqs} sequences of one token each, got {num_decodes} for "
                f"{len(hidden_states)} tokens"
            )
        if num_seqs < 1:
            raise ValueError(f"{name}: query_start_loc: expected at least one sequence, got none")
        channels, _, width = self.conv1d.weight.shape
        floats = (hidden_states.dtype, torch.float32)
        for argument, state, shape, dtypes in (
            ("conv_state", conv_state, (channels, width - 1), floats[:1]),
            ("ssm_state", ssm_state, self.state_shape, floats),
        ):
            if state is None:
                if num_decodes:
                    raise ValueError(f"{name}: {argument}: expected a tensor where num_decodes is not 0, got None")
            elif state.shape[1:] != shape or state.ndim != len(shape) + 1 or state.dtype not in dtypes:
                sizes, kinds = ", ".join(map(str, shape)), " or ".join(dict.fromkeys(map(str, dtypes)))
                raise ValueError(
                    f"{name}: {argument}: expected shape (num_slots, {sizes}) of {kinds}, got {tuple(state.shape)} of "
                    f"{state.dtype}"
                )

    def _per_channel(self, dtype: torch.dtype | None, *sizes: int) -> nn.Parameter:
        """An uninitialised parameter that is divided among ranks along dimension 0."""
        return new_parameter((self._local(sizes[0]), *sizes[1:]), dtype, self._load_part)

    def _decay(self, *sizes: int) -> nn.Parameter:
        """The parameter A in float32, from ``A_log`` of a checkpoint: ``A = -exp(A_log)``."""
        return new_parameter((self._local(sizes[0]), *sizes[1:]), torch.float32, self._load_decay)

    def _local(self, size: int) -> int:
        return divide(type(self).__name__, "channels or heads", size, get_tensor_model_parallel_world_size())

    def _load_part(self, param: Tensor, loaded_weight: Tensor) -> None:
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        copy_weight(self, param, loaded_weight, 0, rank * param.shape[0], ranks * param.shape[0])

    def _load_decay(self, param: Tensor, loaded_weight: Tensor) -> None:
        self._load_part(param, -torch.exp(loaded_weight.float()))


def depthwise(projection: ColumnParallelLinear) -> ColumnParallelLinear:
    """The parameters of a causal depthwise convolution, with a weight [channels, 1, taps] as in checkpoints."""
    channels, taps = projection.weight.shape
    if not 2 <= taps <= MAX_WIDTH:
        raise ValueError(f"{projection.prefix}: conv_kernel_size: expected 2 to {MAX_WIDTH}, got {taps}")
    projection.weight = new_parameter((channels, 1, taps), projection.params_dtype, projection.weight_loader)
    return projection
