"""GEMMs of NVFP4, MXFP4 and MXFP8 by tcgen05, which applies block scales: the launch of gemm_sm100_scaled.cu.

No GPU has run this kernel. It is compiled for sm_100 and sm_103, and run by the host backend.
"""

from __future__ import annotations

from typing import Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.tensors.dtypes import float8_e4m3fn, float8_e8m0fnu, int32
from ..._core.tensors.tensor import TensorArg
from .block_scaled import BlockFormat
from .grouped_problem import ExpertLists

_gemm_sm100_scaled = Kernel("linear/gemm_sm100_scaled.cu")

TILE_M = 128  # rows of a tile of out: those of tcgen05 with block scales
_TILES_N = 128, 64, 32  # columns of a tile: the most that leave no SM without a tile
_K_TILE_BYTES = 128
_ACCESS = 16  # bytes of an access: TMA loads and stores rows at multiples of it


def refusal(
    format: BlockFormat, out: TensorArg, a: TensorArg, b: TensorArg, a_scales: TensorArg, b_scales: TensorArg
) -> str | None:
    """Why gemm_sm100_scaled.cu does not serve matrices that their op has checked."""
    if not out.device.supports("tcgen05"):
        return "the device has no tcgen05, or NVRTC and the driver are older than CUDA 13.4"
    if (row_bytes := a.shape[-1]) == 0 or 0 in out.shape:
        return "an empty operand"
    if a_scales.shape[-1] * format.scale_size * format.code_bits != 8 * row_bytes:
        return "K is not a multiple of four scales"
    aligned = all(one.alignment >= _ACCESS for one in (out, a, b, a_scales, b_scales))
    strides = check.row_stride(a), check.row_stride(b), check.row_stride(out) * out.dtype.itemsize, row_bytes
    if not aligned or any(stride % _ACCESS for stride in strides) or out.shape[-1] % (_ACCESS // out.dtype.itemsize):
        return "TMA loads and stores rows that begin and end at multiples of 16 bytes"
    return None


def launch(
    format: BlockFormat,
    out: TensorArg,
    a: TensorArg,
    b: TensorArg,
    a_scales: TensorArg,
    b_scales: TensorArg,
    alpha: TensorArg | None,
    lists: ExpertLists | None = None,
    problem_sizes: TensorArg | None = None,
    expert_offsets: TensorArg | None = None,
    scale_rows: Scratch | None = None,
) -> Launch:
    """A tile of out for each CTA. With `lists`, of blocks of `TILE_M` slots, rows belong to experts."""
    m, n = out.shape
    row_tiles = -(-m // TILE_M) if lists is None else lists.num_blocks
    filling = (one for one in _TILES_N if row_tiles * -(-n // one) >= out.device.num_sms)
    tile_n = next(filling, _TILES_N[-1])
    others: dict[str, Any] = {"alpha": alpha, "problem_sizes": problem_sizes, "expert_offsets": expert_offsets}
    tensors = {"out": out, "a": a, "b": b, "a_scales": a_scales, "b_scales": b_scales}
    tensors |= {name: one for name, one in others.items() if one is not None}
    absent = {name: 0 for name, one in others.items() if one is None}
    listed: dict[str, Any] = dict.fromkeys(("sorted_token_ids", "expert_ids", "num_tokens_post_pad"), 0)
    if lists is not None:
        listed = {name: getattr(lists, name) for name in listed}
    return _gemm_sm100_scaled.renamed(**{name: one.name for name, one in tensors.items()})(
        quant_t="e2m1_t" if format.code_bits == 4 else float8_e4m3fn,
        scale_t="e8m0_t" if format.scale_dtype is float8_e8m0fnu else format.scale_dtype,
        offset_t=int32 if expert_offsets is None else expert_offsets.dtype,
        out_t=out.dtype,
        QUANT_BITS=format.code_bits,
        SCALE_SIZE=format.scale_size,
        ALPHA=alpha is not None,
        GROUPED=lists is not None,
        TILE_M=TILE_M,
        TILE_N=tile_n,
        TILE_K=_K_TILE_BYTES,
    ).launch(
        row_tiles * -(-n // tile_n),
        1,
        m=m,
        n=n,
        row_bytes=a.shape[-1],
        a_stride=check.row_stride(a),
        b_stride=check.row_stride(b),
        out_stride=check.row_stride(out),
        a_scale_rows=a_scales.shape[-2],
        scale_columns=a_scales.shape[-1],
        row_tiles=row_tiles,
        scale_rows=scale_rows or 0,
        **listed,
        **absent,
    )
