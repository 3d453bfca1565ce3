"""SwiGLU of padded batches of experts, quantized to fp8 in groups of 128."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import bfloat16, float8_e4m3fn, float32, int32, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["persistent_masked_m_silu_mul_quant"]

_masked_silu_mul_quant = Kernel("quantize/masked_silu_mul_quant.cu")
_GROUP_SIZE = 128
_VEC_SIZE = 8
_NUM_THREADS, _MIN_BLOCKS = 256, 8  # threads per block, resident blocks per SM; not yet measured


@op(partial=("y_q", "y_s"), ulps=0)
def persistent_masked_m_silu_mul_quant(
    input: Tensor, counts: Tensor, y_q: Tensor, y_s: Tensor, use_ue8m0: bool
) -> None:
    """SwiGLU of the first ``counts[e]`` tokens of each expert, quantized to fp8 in groups of 128.

    ``y = b(b(silu(gate)) * up)`` for the halves ``input = [gate, up]``; b rounds to bfloat16, and so does every step:
    ``s = b(max(max|y|, b(1e-10)) * b(1/448))`` over a group, with `use_ue8m0` then ``s = 2^ceil(b(log2 s))``; ``y_q =
    fp8(clamp(b(y * b(1 / s)), -448, 448))``. The maximum ignores NaN; a NaN becomes -448. An infinity makes the scale
    infinite: it becomes -448, and finite elements become 0. Results of other tokens are left unchanged.

    Args:
        input: [num_experts, num_tokens, 2 * hidden_size] bfloat16, hidden_size a multiple of 128; the last stride is 1.
        counts: [num_experts] int32, contiguous; clamped to 0 ... num_tokens.
        y_q: [num_experts, num_tokens, hidden_size], float8_e4m3fn or uint8, written; the last stride is 1.
        y_s: written; any strides. [num_experts, num_tokens, hidden_size / 128] float32; or with `use_ue8m0`
            [num_experts, num_tokens, hidden_size / 512 rounded up] int32: byte ``g % 4`` (little-endian) of word
            ``g // 4`` is the biased exponent of the scale of group g. Bytes after the last group are left unchanged.
        use_ue8m0: whether scales are powers of two.
    """
    gate, up = input.chunk(2, dim=-1)
    y = (torch.nn.functional.silu(gate.float()).to(input.dtype) * up).unflatten(-1, (-1, _GROUP_SIZE))

    def rounded(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.bfloat16, device=y.device)

    s = torch.maximum(fp8.absmax(y), rounded(1e-10)) * rounded(1 / 448)
    if use_ue8m0:
        s = torch.where(s.isinf(), s, torch.exp2(s.double().log2().float().bfloat16().ceil().double()).bfloat16())
    quantized = (y * (1 / s)).nan_to_num(nan=-448.0).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2)
    s = s.squeeze(-1)
    tokens = torch.arange(input.shape[1], dtype=torch.int64, device=y.device)
    counted = (tokens < counts.clamp(min=0)[:, None])[:, :, None]
    y_q.copy_(torch.where(counted, quantized.view(torch.uint8), y_q.view(torch.uint8)).view(y_q.dtype))
    if y_s.dtype == torch.float32:
        y_s.copy_(torch.where(counted, s.float(), y_s))
        return
    exponents, words = s.view(torch.int16).long() >> 7, y_s.long()
    for group in range(s.shape[-1]):
        shift, word = group % 4 * 8, words[..., group // 4]
        words[..., group // 4] = word & ~(255 << shift) | exponents[..., group] << shift
    signed = (words & 0xFFFFFFFF ^ 2**31) - 2**31
    y_s.copy_(torch.where(counted, signed.int(), y_s))


@persistent_masked_m_silu_mul_quant.result
def result_persistent_masked_m_silu_mul_quant(input: TensorArg, use_ue8m0: bool) -> tuple[Result, Result]:
    """Quantized values and scales of `input`.

    Returns:
        y_q: [num_experts, num_tokens, hidden_size] float8_e4m3fn; zeros where there are no tokens.
        y_s: [num_experts, num_tokens, hidden_size / 128] float32; or with `use_ue8m0` [num_experts, num_tokens,
            hidden_size / 512 rounded up] int32: byte ``g % 4`` (little-endian) of word ``g // 4`` is the biased
            exponent of the scale of group g. Zeros elsewhere.
    """
    check.sizes(input, num_experts=None, num_tokens=None, columns=None)
    *tokens, columns = input.shape
    groups = columns // (2 * _GROUP_SIZE)
    scales = Result((*tokens, -(-groups // 4)), int32) if use_ue8m0 else Result((*tokens, groups), float32)
    return Result((*tokens, columns // 2), float8_e4m3fn), scales


@persistent_masked_m_silu_mul_quant.plan
def plan_persistent_masked_m_silu_mul_quant(
    input: TensorArg, counts: TensorArg, y_q: TensorArg, y_s: TensorArg, use_ue8m0: bool
) -> Launch:
    check.dtype(input, bfloat16)
    check.sizes(input, num_experts=None, num_tokens=None, columns=None)
    num_experts, num_tokens, columns = input.shape
    if check.row_size(input) % (2 * _GROUP_SIZE):
        raise input.error(f"expected a last dimension of multiples of {2 * _GROUP_SIZE}, got shape {input.shape}")
    check.narrow(input)
    groups = columns // (2 * _GROUP_SIZE)
    check.shape(counts, int32, num_experts=num_experts)
    check.dtype(y_q, float8_e4m3fn, uint8)
    check.sizes(y_q, num_experts=num_experts, num_tokens=num_tokens, hidden_size=columns // 2)
    check.row_size(y_q)
    check.dtype(y_s, float32, *([int32] if use_ue8m0 else []))
    words = -(-groups // 4) if y_s.dtype is int32 else groups
    check.sizes(y_s, num_experts=num_experts, num_tokens=num_tokens, groups=words)
    warp_groups = input.device.warp_size // (_GROUP_SIZE // _VEC_SIZE)
    max_items = num_experts * num_tokens * -(-groups // warp_groups)  # an item is the work of one warp
    warps = _NUM_THREADS // input.device.warp_size
    return _masked_silu_mul_quant(
        scale_t=y_s.dtype,
        POWER_OF_TWO=bool(use_ue8m0),
        ACCESS=check.vector_width(_VEC_SIZE, input),
        CODE_ACCESS=check.vector_width(_VEC_SIZE, replace(y_q, dtype=float8_e4m3fn)),
        NUM_THREADS=_NUM_THREADS,
        MIN_BLOCKS=_MIN_BLOCKS,
    ).launch(
        grid=min(_MIN_BLOCKS * input.device.num_sms, -(-max_items // warps)),
        block=_NUM_THREADS,
        num_experts=num_experts,
        num_tokens=num_tokens,
        groups=groups,
        input_expert_stride=input.strides[0],
        input_stride=input.strides[1],
        code_expert_stride=y_q.strides[0],
        code_stride=y_q.strides[1],
        scale_expert_stride=y_s.strides[0],
        scale_stride=y_s.strides[1],
        scale_column_stride=y_s.strides[2],
    )


@persistent_masked_m_silu_mul_quant.bad_indices
def bad_indices_persistent_masked_m_silu_mul_quant(input: Tensor, counts: Tensor) -> dict[str, Tensor]:
    return {"counts": (counts < 0) | (counts > input.shape[1])}


@persistent_masked_m_silu_mul_quant.traffic
def traffic_persistent_masked_m_silu_mul_quant(
    input: TensorArg, counts: TensorArg, y_q: TensorArg, y_s: TensorArg
) -> int:
    """The bytes if `counts` is num_tokens for every expert."""
    return input.nbytes + counts.nbytes + y_q.nbytes + y_s.nbytes


@persistent_masked_m_silu_mul_quant.example
def example_persistent_masked_m_silu_mul_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 128, 896] = 4096,
    scales: Literal["float", "power", "packed"] = "float",
) -> tuple[Any, ...]:
    """Eight experts."""
    num_experts, groups = 8, hidden_size // _GROUP_SIZE
    columns = -(-groups // 4) if scales == "packed" else groups
    return (
        make.randn(num_experts, num_tokens, 2 * hidden_size, dtype="bfloat16"),
        make.randint(0, num_tokens + 1, num_experts, dtype="int32"),
        make.empty(num_experts, num_tokens, hidden_size, dtype="float8_e4m3fn"),
        make.empty(num_experts, num_tokens, columns, dtype="int32" if scales == "packed" else "float32"),
        scales != "float",
    )
