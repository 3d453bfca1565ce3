"""GEMMs of e4m3 activations with signed 4-bit weights that have e4m3 scales.

`cutlass_encode_and_reorder_int4b` returns a weight in its own tiles (`w4a8` of packed_layouts.py), contiguous and in
the shape of its argument. `cutlass_w4a8_mm` refuses any other strides: a column-major weight that was not reordered is
refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors import dtypes
from ..._core.tensors.dtypes import bfloat16, float8_e4m3fn, float16, int32
from ..._core.tensors.tensor import TensorArg, new
from .._shared.fp8_accumulation import absolute_error
from .._shared.scalar_type import int4
from .gemm_problem import Epilogue, Operand
from .packed_plan import plan
from .packed_problem import PackedProblem, PackedWeight
from .packed_reference import multiply, values
from .repack import repack, repacked
from .scaled_mm import check_scales

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "cutlass_encode_and_reorder_int4b",
    "cutlass_encode_and_reorder_int4b_experts",
    "cutlass_encode_and_reorder_int4b_grouped",
    "cutlass_pack_scale_fp8",
    "cutlass_w4a8_mm",
]

_pack_scale = Kernel("linear/cutlass_pack_scale_fp8.cu")
_NUM_THREADS = 256  # threads of a block of this kernel; a thread has one scale
PRODUCTS = 8  # entries of the lookup table of a scale: its products with -8 ... -1
TILE_ROWS, HALF_TILE = 32, 16  # rows of a tile, and columns of half a tile
_SCHEDULES = tuple(f"{m}x{n}_{c}x1x1" for m in (128, 256) for n in (16, 32, 64, 128, 256) for c in (1, 2))


@op(returns="out", ulps=0)
def cutlass_encode_and_reorder_int4b(B: Tensor, *, out: Tensor) -> None:
    """A signed 4-bit weight as `cutlass_w4a8_mm` takes it.

    Args:
        B: [K / 8, N] int32, any strides; K a multiple of 32, N of 16. Each column has consecutive quants, starting
            at the lowest bits of its first word.
        out: of the shape of B, int32, contiguous, returned; new unless given.
    """
    size = B.shape[0] * 8, B.shape[1]
    out.copy_(repacked(B, ("gptq", "w4a8"), 4, size).view(out.shape))


@cutlass_encode_and_reorder_int4b.result
def result_cutlass_encode_and_reorder_int4b(B: TensorArg) -> Result:
    return Result(B.shape, int32)


@cutlass_encode_and_reorder_int4b.plan
def plan_cutlass_encode_and_reorder_int4b(B: TensorArg, out: TensorArg) -> Launch:
    check.dtype(B, int32)
    check.sizes(B, words=None, N=None)
    words, n = B.shape
    check_tiles(B, words * 8, n)
    check.shape(out, int32, words=words, N=n)
    stride, step = B.strides
    return repack(out, B, ("gptq", "w4a8"), 4, (words * 8, n), strides=(stride, step))


def check_tiles(weight: TensorArg, k: int, n: int) -> None:
    """Check that K and N of a weight [K, N] are multiples of tiles; the last tile may be half."""
    if k % TILE_ROWS or n % HALF_TILE:
        raise weight.error(f"expected K a multiple of {TILE_ROWS} and N of {HALF_TILE}, got {k} and {n}")


@cutlass_encode_and_reorder_int4b.example
def example_cutlass_encode_and_reorder_int4b(
    make: Any, *, num_tokens: int = 16, row_major: bool = False
) -> tuple[Any, ...]:
    words, n = 4 * num_tokens, 96
    shape = (words, n) if row_major else (n, words)
    weight = make.randint(-(2**31), 2**31, *shape, dtype="int32")
    return weight if row_major else make.transposed(weight), make.empty(words, n, dtype="int32")


@op(returns="out", ulps=0)
def cutlass_encode_and_reorder_int4b_experts(b_tensors: Tensor, *, out: Tensor) -> None:
    """`cutlass_encode_and_reorder_int4b` of the weights of all experts.

    Args:
        b_tensors: [num_experts, N, K / 8] int32, contiguous; K a multiple of 32, N of 16.
        out: of the same shape, int32, contiguous, returned; new unless given.
    """
    for expert, packed in zip(b_tensors, out, strict=True):
        n, words = expert.shape
        packed.copy_(repacked(expert.t(), ("gptq", "w4a8"), 4, (words * 8, n)).view(packed.shape))


@cutlass_encode_and_reorder_int4b_experts.result
def result_cutlass_encode_and_reorder_int4b_experts(b_tensors: TensorArg) -> Result:
    return Result(b_tensors.shape, int32)


@cutlass_encode_and_reorder_int4b_experts.plan
def plan_cutlass_encode_and_reorder_int4b_experts(b_tensors: TensorArg, out: TensorArg) -> Launch:
    check.dtype(b_tensors, int32)
    check.sizes(b_tensors, num_experts=None, N=None, words=None)
    check.contiguous(b_tensors)
    experts, n, words = b_tensors.shape
    check_tiles(b_tensors, words * 8, n)
    check.shape(out, int32, num_experts=experts, N=n, words=words)
    layouts: Any = ("gptq", "w4a8")
    return repack(out, b_tensors, layouts, 4, (words * 8, n), experts=experts, strides=(1, words))


@cutlass_encode_and_reorder_int4b_experts.example
def example_cutlass_encode_and_reorder_int4b_experts(make: Any, *, num_tokens: int = 4) -> tuple[Any, ...]:
    shape = 3, 64, 4 * num_tokens
    return make.randint(-(2**31), 2**31, *shape, dtype="int32"), make.empty(*shape, dtype="int32")


def cutlass_encode_and_reorder_int4b_grouped(b_tensors: Tensor) -> tuple[Tensor, Tensor]:
    """(`cutlass_encode_and_reorder_int4b_experts` of `b_tensors`, a description of each expert's layout).

    All experts have the same layout: the description is [num_experts, 0] int32.
    """
    packed = cutlass_encode_and_reorder_int4b_experts(b_tensors)
    return packed, new(b_tensors, (b_tensors.shape[0], 0), "int32")


@op(returns="out", ulps=0)
def cutlass_pack_scale_fp8(scales: Tensor, *, out: Tensor) -> None:
    """The products of scales with -8 ... -1, for `cutlass_w4a8_mm`: ``out[8 i + j] = e4m3((j - 8) * scales[i])``.

    Args:
        scales: [groups, N] float8_e4m3fn, contiguous.
        out: [8 * groups * N] float8_e4m3fn, contiguous, returned; new unless given.
    """
    factors = torch.arange(-PRODUCTS, 0, device=scales.device, dtype=torch.float32)
    products = scales.reshape(-1, 1).float() * factors
    out.copy_(products.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(-1))


@cutlass_pack_scale_fp8.result
def result_cutlass_pack_scale_fp8(scales: TensorArg) -> Result:
    return Result((scales.numel * PRODUCTS,), float8_e4m3fn)


@cutlass_pack_scale_fp8.plan
def plan_cutlass_pack_scale_fp8(scales: TensorArg, out: TensorArg) -> Launch:
    check.dtype(scales, float8_e4m3fn)
    check.contiguous(scales)
    check.shape(out, float8_e4m3fn, products=scales.numel * PRODUCTS)
    kernel = _pack_scale.renamed(packed=out.name)
    return kernel(ACCESS=check.vector_width(PRODUCTS, out), NUM_THREADS=_NUM_THREADS).launch(
        -(-scales.numel // _NUM_THREADS), _NUM_THREADS, numel=scales.numel
    )


@cutlass_pack_scale_fp8.example
def example_cutlass_pack_scale_fp8(make: Any, *, num_tokens: int = 16) -> tuple[Any, ...]:
    n = 72
    scales = make.randn(num_tokens, n, dtype="float8_e4m3fn")
    return scales, make.empty(num_tokens * n * PRODUCTS, dtype="float8_e4m3fn")


def _absolute_error(A: Tensor, B: Tensor, group_scales: Tensor, group_size: int) -> float:
    return absolute_error(A, values(weight_of(B, B.shape[1], A.shape[1], group_scales, group_size)))


@op(returns="out", atol=_absolute_error)
def cutlass_w4a8_mm(
    A: Tensor,
    B: Tensor,
    group_scales: Tensor,
    group_size: int,
    channel_scales: Tensor,
    token_scales: Tensor,
    out_type: torch.dtype | None = None,
    maybe_schedule: str | None = None,
    *,
    out: Tensor,
) -> None:
    """A GEMM with a signed 4-bit weight: ``out = token_scales * (channel_scales * (A @ e4m3(quant * scale)))``.

    ``group_scales`` is a lookup table of scale * q for q = -8 ... -1; positive q use the negated entry.

    Accumulation is that of fp8 tensor cores (`fp8_accumulation.py`); the result is rounded once.

    Args:
        A: [M, K] float8_e4m3fn; constant row stride.
        B: [K / 8, N] int32, contiguous, as `cutlass_encode_and_reorder_int4b` returns it.
        group_scales: [K / group_size, N, 8] float8_e4m3fn, in any shape, contiguous, as `cutlass_pack_scale_fp8`
            returns them.
        group_size: rows under one scale; divides K.
        channel_scales: float32, contiguous, N or 1 elements; token_scales: likewise, M or 1.
        out_type: dtype of a new out: bfloat16 or float16, with a slower accumulation (`fp8_accumulation.py`); None for
            bfloat16.
        maybe_schedule: None, or a name of for compatibility with vLLM; no effect.
        out: [M, N] bfloat16 or float16, returned; elements of a row are contiguous; new unless given.
    """
    multiply(out, A, weight_of(B, B.shape[1], A.shape[1], group_scales, group_size), token_scales, channel_scales)


def weight_of(B: Any, n: int, k: int, group_scales: Any, group_size: int) -> PackedWeight:
    """The weight [K, N], of tensors or their descriptors."""
    return PackedWeight(B, "w4a8", int4, k, n, k // group_size, group_size, group_scales, scale_kind="products")


@cutlass_w4a8_mm.result
def result_cutlass_w4a8_mm(A: TensorArg, B: TensorArg, out_type: Any) -> Result:
    check.sizes(A, M=None, K=None)
    check.sizes(B, words=None, N=None)
    dtype = bfloat16 if out_type is None else dtypes.of(out_type)
    if dtype not in (bfloat16, float16):
        raise check.refuse(A, "out_type", f"expected bfloat16 or float16, got {out_type}")
    return Result((A.shape[0], B.shape[1]), dtype)


@cutlass_w4a8_mm.plan
def plan_cutlass_w4a8_mm(
    A: TensorArg,
    B: TensorArg,
    group_scales: TensorArg,
    group_size: int,
    channel_scales: TensorArg,
    token_scales: TensorArg,
    out_type: Any,
    maybe_schedule: str | None,
    out: TensorArg,
) -> list[Launch]:
    check.dtype(A, float8_e4m3fn)
    result = result_cutlass_w4a8_mm(A, B, out_type)
    (m, k), n = A.shape, B.shape[1]
    check.dtype(B, int32)
    check.sizes(B, words=k // 8, N=n)
    check_tiles(B, k, n)
    if B.strides != (n, 1):
        raise B.error(f"expected a contiguous tensor, as cutlass_encode_and_reorder_int4b returns it, got {B.strides}")
    if group_size < 1 or k % group_size:
        raise check.refuse(A, "group_size", f"expected a number that divides K, {k}, got {group_size}")
    if maybe_schedule not in (None, *_SCHEDULES):
        raise check.refuse(A, "maybe_schedule", f"expected None or one of {_SCHEDULES}, got {maybe_schedule!r}")
    check.elements(group_scales, float8_e4m3fn, PRODUCTS * (k // group_size) * n)
    check_scales(n, channel_scales)
    check_scales(m, token_scales)
    check.dtype(out, *((result.dtype,) if out_type is not None else (bfloat16, float16)))
    check.sizes(out, M=m, N=n)
    check.row_size(out)
    weight = weight_of(B, B.shape[1], A.shape[1], group_scales, group_size)
    return plan(PackedProblem(Operand.of_rows(A), weight, Epilogue(out, token_scales, channel_scales)))


@cutlass_w4a8_mm.example
def example_cutlass_w4a8_mm(make: Any, *, num_tokens: int = 16, group_size: Literal[32, 128] = 32) -> tuple[Any, ...]:
    k, n = 128, 96
    return (
        make.randn(num_tokens, k, dtype="float8_e4m3fn"),
        make.randint(-(2**31), 2**31, k // 8, n, dtype="int32"),
        make.randn(PRODUCTS * (k // group_size) * n, dtype="float8_e4m3fn"),
        group_size,
        make.full(n, value=2.0**-4, dtype="float32"),
        make.full(num_tokens, 1, value=0.05, dtype="float32"),
        None,
        None,
        make.empty(num_tokens, n, dtype="bfloat16"),
    )
