"""A decode step of Kimi Delta Attention in one kernel: convolution, gates, state and the norm of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32
from ..._core.tensors.tensor import TensorArg
from ._chunk_scan_problem import check_heads
from ._gated_delta_problem import check_contiguous_slots, check_lower_bound
from ._gated_delta_reference import Rows, log_decays, update_slots

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["fused_kda_decode"]

_kernel = Kernel("mamba/fused_kda_decode.cu")

# Threads of a block, and blocks of an SM: a head of 128 elements has 64 elements of the state in a thread.
_NUM_THREADS, _MIN_BLOCKS = 256, 2
_MAX_KEYS = 16  # most columns of a row of the state in registers of a thread
_MAX_SIZE = 128  # largest head: with more, the state of a head exceeds the registers of a block
_MAX_WIDTH = 8  # most taps of the convolution


@op(inout=("conv_state", "state"), partial="out", keyed="lower_bound", atol=2.0**-16)
def fused_kda_decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_indices: Tensor,
    state: Tensor,
    out: Tensor,
    lower_bound: float | None = None,
    output_gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
) -> None:
    """One token of Kimi Delta Attention for each sequence: causal convolution, gates, delta rule, gated RMS norm.

    ``q, k, v = silu(bias + sum_w weight[:, w] * (conv_state, x)[w])``; then `kda_update` with normalised q and k, the
    scale ``head_size**-0.5``, the gate of A_log, dt_bias and lower_bound, and ``sigmoid(raw_beta)``; then ``norm(o) *
    norm_weight * sigmoid(output_gate)`` for each head. All is float32, and rounded once. A sequence with a slot out of
    range (-1 for a padded one) is skipped: its outputs are left unchanged. The slots of sequences differ (Kimi Team
    2025, arXiv:2510.26692, with vLLM's arguments).

    Args:
        x: [num_seqs, 3 * num_heads * head_size], float32, float16 or bfloat16: q, k and v of all heads; constant row
            stride. head_size is at most 128.
        weight: [3, width, num_heads * head_size], contiguous, float32, float16 or bfloat16, width 2 to 8.
        bias: [3 * num_heads * head_size] of the dtype of `weight`, contiguous; or None for zeros.
        conv_state: [num_slots, 3 * num_heads * head_size, width - 1] of the dtype of x, any strides, updated.
        raw_g: [1, num_seqs, num_heads, head_size], float32, float16 or bfloat16, contiguous: logits of decays.
        raw_beta: [1, num_seqs, num_heads], of any of these dtypes; heads contiguous.
        A_log: [num_heads], of any of these dtypes, contiguous.
        dt_bias: [num_heads * head_size] or [num_heads, head_size], of any of these dtypes, contiguous.
        state_indices: [num_seqs] int32 or int64, contiguous: the slot of both states.
        state: [num_slots, num_heads, head_size, head_size], float32, float16 or bfloat16, values before keys, updated;
            slots contiguous, any slot stride.
        out: [1, num_seqs, num_heads, head_size] of the dtype of x, contiguous, written where sequences are not skipped.
        lower_bound: as in `kda`.
        output_gate: [num_seqs, num_heads, head_size] or [1, num_seqs, num_heads, head_size] of the dtype of x, heads
            contiguous; or None for no norm.
        norm_weight: [head_size], float32, float16 or bfloat16, contiguous; given if and only if `output_gate` is.
        norm_eps: added to the mean of squares.
    """
    num_seqs, (num_heads, head_size) = len(x), raw_g.shape[2:]
    inputs = torch.zeros(num_seqs, x.shape[1], weight.shape[1], dtype=torch.float64, device=x.device)
    inputs[:, :, -1] = x
    used = [seq for seq, slot in enumerate(state_indices.tolist()) if 0 <= slot < len(state)]
    slots = state_indices[used].long()
    inputs[used, :, :-1] = conv_state[slots].double()
    conv_state[slots] = inputs[used, :, 1:].to(conv_state.dtype)
    taps = weight.double().transpose(1, 2).flatten(0, 1)
    convolved = (inputs * taps).sum(-1) + (0.0 if bias is None else bias.double())
    q, k, v = torch.nn.functional.silu(convolved).view(num_seqs, 1, 3, num_heads, head_size).unbind(2)
    o = torch.zeros(num_seqs, 1, num_heads, head_size, dtype=torch.float64, device=x.device)
    logs = log_decays(raw_g, A_log, dt_bias, lower_bound).view_as(o)
    beta = torch.sigmoid(raw_beta.double()).view(num_seqs, 1, num_heads)
    rows = Rows(q, k, v, logs, beta, head_size**-0.5, True, o)
    update_slots(rows, [(i, i + 1) for i in range(num_seqs)], state, state_indices, None, True)
    if output_gate is not None and norm_weight is not None:
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.double()
        o = o * torch.sigmoid(output_gate.double()).view_as(o)
    out[0, used] = o[used, 0].to(out.dtype)


@fused_kda_decode.result
def result_fused_kda_decode(x: TensorArg, raw_g: TensorArg) -> Result:
    return Result(raw_g.shape, x.dtype)


@fused_kda_decode.plan
def plan_fused_kda_decode(
    x: TensorArg,
    weight: TensorArg,
    bias: TensorArg | None,
    conv_state: TensorArg,
    raw_g: TensorArg,
    raw_beta: TensorArg,
    A_log: TensorArg,
    dt_bias: TensorArg,
    state_indices: TensorArg,
    state: TensorArg,
    out: TensorArg,
    lower_bound: float | None,
    output_gate: TensorArg | None,
    norm_weight: TensorArg | None,
) -> Launch:
    check.sizes(raw_g, one=1, num_seqs=None, num_heads=None, head_size=None)
    _, num_seqs, num_heads, head_size = raw_g.shape
    size = num_heads * head_size
    if not 1 <= head_size <= _MAX_SIZE:
        raise raw_g.error(f"expected heads of 1 to {_MAX_SIZE} elements, got {head_size}")
    for arg in (x, weight, raw_g, raw_beta, A_log, dt_bias, state):
        check.floating(arg)
    check.sizes(x, num_seqs=num_seqs, channels=3 * size)
    check.sizes(weight, three=3, width=None, channels=size)
    width = weight.shape[1]
    if not 2 <= width <= _MAX_WIDTH:
        raise weight.error(f"expected 2 to {_MAX_WIDTH} taps, got {width}")
    check.shape(bias, weight.dtype, channels=3 * size)
    check.dtype(conv_state, x.dtype)
    check.sizes(conv_state, num_slots=None, channels=3 * size, taps=width - 1)
    check.sizes(raw_beta, one=1, num_seqs=num_seqs, num_heads=num_heads)
    check.shape(A_log, num_heads=num_heads)
    if len(dt_bias.shape) == 1:
        check.shape(dt_bias, num_heads_by_head_size=size)
    else:
        check.shape(dt_bias, num_heads=num_heads, head_size=head_size)
    check.index(state_indices, num_seqs=num_seqs)
    check.sizes(state, num_slots=conv_state.shape[0], num_heads=num_heads, values=head_size, keys=head_size)
    check_contiguous_slots(state)
    check.shape(out, x.dtype, one=1, num_seqs=num_seqs, num_heads=num_heads, head_size=head_size)
    for arg in (weight, raw_g, state_indices):
        check.contiguous(arg)
    for arg in (x, raw_beta):
        if arg.shape[-1] > 1 and arg.strides[-1] != 1 and arg.numel:
            raise arg.error(f"expected contiguous rows, got strides {arg.strides}")
    given = output_gate if norm_weight is None else norm_weight
    if given is not None and (output_gate is None or norm_weight is None):
        raise given.error("expected output_gate and norm_weight, or neither")
    if output_gate is not None:
        check.dtype(output_gate, x.dtype)
        leading = {"one": 1} if len(output_gate.shape) == 4 else {}
        check.sizes(output_gate, **leading, num_seqs=num_seqs, num_heads=num_heads, head_size=head_size)
        check_heads(output_gate)
    if norm_weight is not None:
        check.floating(norm_weight)
        check.shape(norm_weight, head_size=head_size)
    if lower_bound is not None:
        check_lower_bound(x, lower_bound)
    wide = head_size % 4 == 0 and state.strides[0] % 4 == 0 and state.alignment >= 4 * state.dtype.itemsize
    kernel = _kernel(
        scalar_t=x.dtype,
        weight_t=weight.dtype,
        g_t=raw_g.dtype,
        beta_t=raw_beta.dtype,
        A_t=A_log.dtype,
        bias_t=dt_bias.dtype,
        norm_t=float32 if norm_weight is None else norm_weight.dtype,
        state_t=state.dtype,
        index_t=state_indices.dtype,
        HEAD_SIZE=head_size,
        WIDTH=width,
        LANES=min(32, tuning.power_of_two(-(-head_size // _MAX_KEYS))),
        STATE_VEC=4 if wide else 1,
        HAS_NORM=norm_weight is not None,
        HAS_GATE=True,
        BOUNDED=lower_bound is not None,
        BETA_SIGMOID=True,
        NUM_THREADS=_NUM_THREADS,
        MIN_BLOCKS=_MIN_BLOCKS,
    )
    optional = {"bias": bias, "output_gate": output_gate, "norm_weight": norm_weight, "lower_bound": lower_bound}
    return kernel.launch(
        num_seqs * num_heads,
        _NUM_THREADS,
        **{name: 0 for name, value in optional.items() if value is None},
        num_heads=num_heads,
        num_slots=state.shape[0],
        x_stride=x.strides[0],
        beta_stride=raw_beta.strides[1],
        gate_stride=0 if output_gate is None else output_gate.strides[-3],
        state_stride=state.strides[0],
        conv_stride=conv_state.strides[0],
        channel_stride=conv_state.strides[1],
        tap_stride=conv_state.strides[2],
        scale=head_size**-0.5,
    )


@fused_kda_decode.bad_indices
def bad_indices_fused_kda_decode(state_indices: Tensor, state: Tensor) -> dict[str, Tensor]:
    return {"state_indices": (state_indices < -1) | (state_indices >= state.shape[0])}


@fused_kda_decode.example
def example_fused_kda_decode(
    make: Any,
    *,
    num_tokens: int = 16,
    num_heads: int = 3,
    head_dim: Literal[128, 32, 7] = 128,
    dtype: str = "bfloat16",
    options: bool = False,
) -> tuple[Any, ...]:
    slots, size = num_tokens + 2, num_heads * head_dim
    return (
        make.randn(num_tokens, 3 * size, dtype=dtype),
        make.randn(3, 4, size, dtype="float32", scale=0.5),
        make.randn(3 * size, dtype="float32") if options else None,
        make.randn(slots, 3 * size, 3, dtype=dtype),
        make.randn(1, num_tokens, num_heads, head_dim, dtype=dtype, shift=-2.0),
        make.randn(1, num_tokens, num_heads, dtype=dtype),
        make.randn(num_heads, dtype="float32", scale=0.5),
        make.randn(size, dtype="float32"),
        make.permutation(slots, num_tokens, dtype="int32"),
        make.randn(slots, num_heads, head_dim, head_dim, dtype="float32"),
        make.empty(1, num_tokens, num_heads, head_dim, dtype=dtype),
        -5.0 if options else None,
        make.randn(num_tokens, num_heads, head_dim, dtype=dtype) if options else None,
        make.randn(head_dim, dtype="float32") if options else None,
        1e-5,
    )
