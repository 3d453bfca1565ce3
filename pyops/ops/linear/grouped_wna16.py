"""vLLM's grouped GEMM of 16-bit rows with weights of 4 or 8 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import bfloat16, float16, float32
from ..._core.tensors.tensor import TensorArg
from .grouped import grouped_gemm
from .grouped_problem import ExpertLists
from .quantized_experts import check_quants, dequantized
from .wq_grouped_engines import plan
from .wq_grouped_problem import WqGroupedProblem

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["moe_wna16_gemm"]

_zero_rows = Kernel("linear/zero_rows.cu")
_NUM_THREADS, _PER_THREAD = 256, 8  # zero_rows.cu: threads of a block, elements of a thread
_PLACES = 16  # kernels take block sizes that are a multiple of this number of slots


@op(out="output", atol=2.0**-18)
def moe_wna16_gemm(
    input: Tensor,
    output: Tensor,
    b_qweight: Tensor,
    b_scales: Tensor,
    b_qzeros: Tensor | None,
    topk_weights: Tensor | None,
    sorted_token_ids: Tensor,
    experts_ids: Tensor,
    num_tokens_post_pad: Tensor,
    top_k: int,
    BLOCK_SIZE_M: int,
    BLOCK_SIZE_N: int,
    BLOCK_SIZE_K: int,
    bit: int,
) -> None:
    """Grouped GEMM with 4- or 8-bit weights: ``output[t] = weight[t] * (input[t // top_k] @ W[e].T)``.

    e is the expert of row t. ``W = (quant - zero) * scale``, rounded to the dtype of input; as in
    `grouped_gemm_packed`. Rows that the lists do not name, and rows of experts that do not exist, become 0. Modelled on
    vLLM's op of this name.

    Args:
        input: [num_tokens, K] float16 or bfloat16; constant row stride.
        output: [..., N] of the same dtype, num_tokens * top_k constant row stride, written.
        b_qweight: [num_experts, N, K * bit / 8] uint8, contiguous; with 4 bits the first of two quants is in the lower
            half of a byte.
        b_scales: [num_experts, N, K / group size] of the dtype of input, contiguous.
        b_qzeros: uint8, contiguous; with 4 bits [num_experts, N / 2, K / group size], the zero point of the first of
            two rows in the lower half; with 8 bits [num_experts, N, K / group size]. None: all are 8 (4 bits) or 128 (8
            bits).
        topk_weights: float32, contiguous, a weight for each row of output; or None.
        sorted_token_ids, experts_ids, num_tokens_post_pad: as `moe_align_block_size` writes them for blocks of
            BLOCK_SIZE_M.
        top_k: rows of output that share a row of input.
        BLOCK_SIZE_M: slots of a block, any number; multiples of 16 need no second lists.
        BLOCK_SIZE_N, BLOCK_SIZE_K: tiles of vLLM's kernel; not used.
        bit: bits of a quant, 4 or 8.
    """
    weights = dequantized(b_qweight, b_scales, b_qzeros, f"uint{bit}", input.dtype)
    rows = torch.zeros(len(input) * top_k, weights.shape[1], dtype=output.dtype, device=output.device)
    lists = sorted_token_ids, experts_ids, num_tokens_post_pad
    grouped_gemm.reference(rows, input, weights, *lists, topk_weights, top_k=top_k, block_size=BLOCK_SIZE_M)
    output.copy_(rows.view(output.shape))


@moe_wna16_gemm.result
def result_moe_wna16_gemm(input: TensorArg, b_qweight: TensorArg, top_k: int) -> Result:
    """Rows of `input`, each `top_k` times.

    Returns:
        output: [num_tokens * top_k, N] of the same dtype.
    """
    check.sizes(input, num_tokens=None, K=None)
    check.sizes(b_qweight, num_experts=None, N=None, bytes=None)
    return Result((input.shape[0] * top_k, b_qweight.shape[1]), input.dtype)


@moe_wna16_gemm.plan
def plan_moe_wna16_gemm(
    input: TensorArg,
    output: TensorArg,
    b_qweight: TensorArg,
    b_scales: TensorArg,
    b_qzeros: TensorArg | None,
    topk_weights: TensorArg | None,
    sorted_token_ids: TensorArg,
    experts_ids: TensorArg,
    num_tokens_post_pad: TensorArg,
    top_k: int,
    BLOCK_SIZE_M: int,
    BLOCK_SIZE_N: int,
    BLOCK_SIZE_K: int,
    bit: int,
) -> list[Launch]:
    check.dtype(input, float16, bfloat16)
    check.sizes(input, num_tokens=None, K=None)
    check.row_size(input)
    k, num_rows, n = input.shape[1], input.shape[0] * top_k, check.row_size(output)
    check.dtype(output, input.dtype)
    for name, value, known in (("bit", bit, bit in (4, 8)), ("top_k", top_k, 1 <= top_k <= 1024)):
        if not known:
            raise check.refuse(output, name, f"expected {'4 or 8' if name == 'bit' else '1 to 1024'}, got {value}")
    if check.num_rows(output) != num_rows:
        raise output.error(f"expected {num_rows} rows, top_k for each of input, got shape {output.shape}")
    weight = check_quants(b_qweight, b_scales, b_qzeros, f"uint{bit}", input.dtype, n, k)
    check.per_row(topk_weights, float32, num_rows)
    lists = ExpertLists.of(sorted_token_ids, experts_ids, num_tokens_post_pad, BLOCK_SIZE_M, "BLOCK_SIZE_M", multiple=1)
    out = replace(output, shape=(num_rows, n), strides=(check.row_stride(output), 1))
    cleared, lists = _cleared(out, lists)
    return [cleared, *plan(WqGroupedProblem.of(out, input, weight, lists, topk_weights, top_k=top_k))]


def _cleared(out: TensorArg, lists: ExpertLists) -> tuple[Launch, ExpertLists]:
    """The launch that writes zeros to out, and lists with a block size that kernels take."""
    (num_rows, n), size = out.shape, -(-lists.block_size // _PLACES) * _PLACES
    ids, count, places = None, None, lists.num_blocks * size
    padded = lists
    if size != lists.block_size:
        ids, count = Scratch(4 * places or 4), Scratch(4)
        padded = replace(lists, sorted_token_ids=ids, num_tokens_post_pad=count, block_size=size)
    threads = max(-(-num_rows * n // _PER_THREAD), places if ids else 0)
    launch = _zero_rows.renamed(rows=out.name)(scalar_t=out.dtype, NUM_THREADS=_NUM_THREADS).launch(
        -(-threads // _NUM_THREADS) if num_rows * n else 0,
        _NUM_THREADS,
        num_rows=num_rows,
        n=n,
        stride=out.strides[0],
        num_blocks=lists.num_blocks,
        block_size=lists.block_size,
        padded_size=size,
        padded_ids=ids or 0,
        padded_count=count or 0,
    )
    return launch, padded


@moe_wna16_gemm.bad_indices
def bad_indices_moe_wna16_gemm(
    input: Tensor, b_qweight: Tensor, sorted_token_ids: Tensor, experts_ids: Tensor, top_k: int
) -> dict[str, Tensor]:
    return {
        "sorted_token_ids": (sorted_token_ids < 0) | (sorted_token_ids > len(input) * top_k),
        "experts_ids": (experts_ids < -1) | (experts_ids >= len(b_qweight)),
    }


@moe_wna16_gemm.example
def example_moe_wna16_gemm(
    make: Any,
    *,
    num_tokens: int = 16,
    bit: Literal[4, 8] = 4,
    with_zeros: bool = False,
    block_size: Literal[16, 5] = 16,
) -> tuple[Any, ...]:
    num_experts, top_k, n, k, groups, dtype = 3, 2, 40, 128, 2, "bfloat16"
    num_blocks = -(-num_tokens * top_k // block_size)
    return (
        make.randn(num_tokens, k, dtype=dtype),
        make.empty(num_tokens, top_k, n, dtype=dtype),
        make.randint(0, 256, num_experts, n, k * bit // 8, dtype="uint8"),
        make.full(num_experts, n, groups, value=2.0**-8, dtype=dtype),
        make.randint(0, 256, num_experts, n * bit // 8, groups, dtype="uint8") if with_zeros else None,
        make.randn(num_tokens, top_k, dtype="float32"),
        make.permutation(num_blocks * block_size, num_blocks * block_size, dtype="int32"),
        make.randint(0, num_experts, num_blocks, dtype="int32"),
        make.full(1, value=num_blocks * block_size, dtype="int32"),
        top_k,
        block_size,
        64,
        64,
        bit,
    )
