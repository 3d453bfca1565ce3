"""A batch of small GEMMs for few tokens, without tensor cores (GEMV)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.tensor import TensorArg
from ...tuning import batch_invariant
from .._shared.columns import NUM_THREADS, batch_strides, check_batch, column_blocks, column_constants
from .prefetch import prefetch_arguments
from .skinny_linear import config_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["skinny_bmm"]

_gemv_batch = Kernel("linear/gemv_batch.cu")
_gemv_batch_columns = Kernel("linear/gemv_batch_columns.cu")


@op(out="out", atol=2.0**-18)
def skinny_bmm(
    out: Tensor, input: Tensor, mat2: Tensor, constant_weight: bool = False, prefetched: Tensor | None = None
) -> None:
    """A batch of small GEMMs for few tokens: ``out[b] = input[b] @ mat2[b]``, accumulated in float32, rounded once.

    It is meant for the decode step of one sequence, where each head of multi-head latent attention has a matrix. Each
    row of `input` reads its matrix: with several rows, GEMMs on tensor cores (`torch.bmm`) are faster.

    Args:
        out: [B, M, N], written; elements of a row contiguous, any strides else.
        input: [B, M, K], float32, float16 or bfloat16; elements of a row contiguous, any strides else.
        mat2: [B, K, N] of the same dtype, contiguous along N or along K, any strides else.
        constant_weight: a promise that no kernel which may still run when this one starts writes `mat2`, as is so for
            the weights of a model. The kernel then loads it while the previous kernel runs.
        prefetched: as of `skinny_linear`.
    """
    out.copy_(input.double() @ mat2.double())


def bmm_into(out: Tensor, input: Tensor, mat2: Tensor, factor: float = 1.0, prefetched: Tensor | None = None) -> Tensor:
    """``out[b] = factor * input[b] @ mat2[b]`` with weights of a model: `skinny_bmm` for one row, else torch's GEMM.

    Returns:
        `out`.
    """
    if input.shape[1] == 1 and factor == 1 and not batch_invariant():
        skinny_bmm(out, input, mat2, constant_weight=True, prefetched=prefetched)
        return out
    return out.baddbmm_(input, mat2, beta=0, alpha=factor)


@skinny_bmm.result
def result_skinny_bmm(input: TensorArg, mat2: TensorArg) -> Result:
    check.sizes(input, B=None, M=None, K=None)
    check.sizes(mat2, B=input.shape[0], K=input.shape[2], N=None)
    return Result((*input.shape[:2], mat2.shape[2]), input.dtype)


@skinny_bmm.plan
def plan_skinny_bmm(
    out: TensorArg, input: TensorArg, mat2: TensorArg, constant_weight: bool, prefetched: TensorArg | None
) -> Launch | list[Launch]:
    check_batch(out, input, mat2)
    batch, rows, k = input.shape
    columns = mat2.shape[2]
    if not out.numel:
        return []
    weight = replace(mat2, shape=(batch, columns, k), strides=(mat2.strides[0], mat2.strides[2], mat2.strides[1]))
    sizes = batch_strides(out, input, mat2) | prefetch_arguments(prefetched, mat2.dtype)
    constants = {"scalar_t": input.dtype, "CONSTANT_WEIGHT": constant_weight}
    if columns == 1 or mat2.strides[2] == 1:
        vec_size = check.vector_width(columns, mat2)
        return _gemv_batch_columns.renamed(weight="mat2")(**constants, **column_constants(k, vec_size)).launch(
            grid=(column_blocks(columns, vec_size), rows, batch),
            block=NUM_THREADS,
            weight_stride=mat2.strides[1],
            **sizes,
        )
    if k > 1 and mat2.strides[1] != 1:
        raise mat2.error(f"expected columns or rows of stride 1, got strides {mat2.strides}")
    config = config_of(k, check.vector_width(k, input, weight), several=False, warp_size=input.device.warp_size)
    return _gemv_batch.renamed(weight="mat2")(
        **constants,
        input_t=input.dtype,
        HIDDEN_SIZE=k,
        **config.constants,
    ).launch(
        grid=(config.num_blocks(columns, input.device, batch * rows), rows, batch),
        block=config.num_threads,
        weight_stride=mat2.strides[2],
        **sizes,
    )


@skinny_bmm.example
def example_skinny_bmm(
    make: Any,
    *,
    num_heads: int = 16,
    num_tokens: int = 1,
    input_size: Literal[128, 512, 35] = 128,
    output_size: Literal[512, 37] = 512,
    dtype: str = "bfloat16",
    constant_weight: bool = False,
    by_columns: bool = True,
    with_prefetch: bool = False,
) -> tuple[Any, ...]:
    sizes = (input_size, output_size) if by_columns else (output_size, input_size)
    mat2 = make.randn(num_heads, *sizes, dtype=dtype, scale=input_size**-0.5)
    return (
        make.empty(num_heads, num_tokens, output_size, dtype=dtype),
        make.randn(num_heads, num_tokens, input_size, dtype=dtype),
        mat2 if by_columns else make.transposed(mat2),
        constant_weight,
        make.randn(5, 100, dtype=dtype) if with_prefetch else None,
    )
