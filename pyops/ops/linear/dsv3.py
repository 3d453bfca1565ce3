"""The small-M GEMMs of DeepSeek-V3's layers and other routers, by vLLM's names; of any size, on every platform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check, tuning
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import bfloat16, float32
from ..._core.tensors.tensor import TensorArg
from .gemm_plan import plan
from .gemm_problem import Epilogue, GemmProblem, Operand
from .rocm_skinny import example_tensors, plan_product, weight_product
from .scaled_mm import check_product
from .skinny_linear import choose

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["dsv3_fused_a_gemm", "dsv3_router_gemm", "fp32_router_gemm"]


_MAX_ROUTER_TOKENS = 2**18  # most bfloat16 rows of fp32_router_gemm: blockIdx.y counts groups of four


@op(out="output", atol=2.0**-18)
def dsv3_fused_a_gemm(output: Tensor, mat_a: Tensor, mat_b: Tensor) -> None:
    """DeepSeek-V3's first projections of queries and latents: ``output = mat_a @ mat_b``, accumulated in float32.

    Args:
        output: [tokens, outputs] bfloat16, written; elements of a row are contiguous.
        mat_a: the tokens, [tokens, K] bfloat16, any strides; row-major is fast.
        mat_b: the weight, [K, outputs] bfloat16, any strides; column-major is fast.
    """
    output.copy_(mat_a.double() @ mat_b.double())


@dsv3_fused_a_gemm.result
def result_dsv3_fused_a_gemm(mat_a: TensorArg, mat_b: TensorArg) -> Result:
    check.sizes(mat_a, tokens=None, K=None)
    check.sizes(mat_b, K=None, outputs=None)
    return Result((mat_a.shape[0], mat_b.shape[1]), bfloat16)


@dsv3_fused_a_gemm.plan
def plan_dsv3_fused_a_gemm(output: TensorArg, mat_a: TensorArg, mat_b: TensorArg) -> list[Launch]:
    rows, columns = check_product(output, mat_a, mat_b, bfloat16)
    check.dtype(output, bfloat16)
    return plan(GemmProblem(rows, columns, mat_a.shape[1], Epilogue(output)))


@dsv3_fused_a_gemm.example
def example_dsv3_fused_a_gemm(make: Any, *, num_tokens: int = 4) -> tuple[Any, ...]:
    weight, tokens, _ = example_tensors(make, num_tokens, "bfloat16", with_bias=False)
    return (make.empty(num_tokens, 40, dtype="bfloat16"), tokens, make.transposed(weight))


@op(out="output", atol=2.0**-18)
def dsv3_router_gemm(output: Tensor, mat_a: Tensor, mat_b: Tensor) -> None:
    """DeepSeek-V3's router: ``output = mat_a @ mat_b.T``, accumulated in float32 and rounded once, if at all.

    Args:
        output: [tokens, experts] float32 or bfloat16, written; elements of a row are contiguous.
        mat_a: the tokens, [tokens, K] bfloat16, any strides; row-major is fast.
        mat_b: the weight, [experts, K] bfloat16, likewise.
    """
    output.copy_(weight_product(mat_b, mat_a))


@dsv3_router_gemm.result
def result_dsv3_router_gemm(mat_a: TensorArg, mat_b: TensorArg, *, out_dtype: torch.dtype | None = None) -> Result:
    """Rows of `mat_a`.

    Args:
        out_dtype: of the output; None for float32.
    """
    check.sizes(mat_a, tokens=None, K=None)
    check.sizes(mat_b, experts=None, K=None)
    return Result((mat_a.shape[0], mat_b.shape[0]), check.chosen(mat_a, "out_dtype", out_dtype, float32))


@dsv3_router_gemm.plan
def plan_dsv3_router_gemm(output: TensorArg, mat_a: TensorArg, mat_b: TensorArg) -> list[Launch]:
    check.dtype(mat_a, bfloat16)
    check.dtype(output, float32, bfloat16)
    return plan_product(output, mat_b, mat_a)


@dsv3_router_gemm.example
def example_dsv3_router_gemm(
    make: Any, *, num_tokens: int = 4, out_dtype: Literal["float32", "bfloat16"] = "float32"
) -> tuple[Any, ...]:
    weight, tokens, _ = example_tensors(make, num_tokens, "bfloat16", with_bias=False)
    return (make.empty(num_tokens, 40, dtype=out_dtype), tokens, weight)


@op(out="output", atol=2.0**-18)
def fp32_router_gemm(output: Tensor, mat_a: Tensor, mat_b: Tensor) -> None:
    """A router with a float32 weight: ``output = mat_a @ mat_b.T``, multiplied and accumulated in float32.

    For the decode step, as the routers of MiniMax-M2 need it. With bfloat16 tokens the weight is read once for every
    four of them, so for many tokens a conversion to float32 and `linear` is faster. Modelled on vLLM's op of this name,
    which has a list of sizes and at most 48 tokens.

    Args:
        output: [tokens, experts] float32, written; constant row stride.
        mat_a: the tokens, [tokens, K], bfloat16 or float32; at most 2^18 tokens if bfloat16; constant row stride.
        mat_b: the weight, [experts, K] float32; constant row stride.
    """
    output.copy_(weight_product(mat_b, mat_a))


@fp32_router_gemm.result
def result_fp32_router_gemm(mat_a: TensorArg, mat_b: TensorArg) -> Result:
    return Result(result_dsv3_router_gemm(mat_a, mat_b).shape, float32)


@fp32_router_gemm.plan
def plan_fp32_router_gemm(output: TensorArg, mat_a: TensorArg, mat_b: TensorArg) -> list[Launch]:
    check.dtype(mat_a, bfloat16, float32)
    check.dtype(mat_b, float32)
    check.sizes(mat_a, tokens=None, K=None)
    check.sizes(mat_b, experts=None, K=mat_a.shape[1])
    check.dtype(output, float32)
    check.sizes(output, tokens=mat_a.shape[0], experts=mat_b.shape[0])
    for arg in (output, mat_a, mat_b):
        check.row_size(arg)
    problem = GemmProblem(Operand.of_rows(mat_a), Operand.of_rows(mat_b), mat_a.shape[1], Epilogue(output))
    if mat_a.dtype is float32:
        return plan(problem)
    if not problem.k:
        raise mat_a.error(f"expected rows of at least one element, got shape {mat_a.shape}")
    if problem.m > _MAX_ROUTER_TOKENS:
        raise mat_a.error(f"expected at most 2^18 rows of bfloat16, got shape {mat_a.shape}")
    return [tuning.config(problem.op, problem, problem.device, choose).launch(problem)]


@fp32_router_gemm.example
def example_fp32_router_gemm(
    make: Any,
    *,
    num_tokens: int = 4,
    input_size: Literal[3072, 160] = 3072,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
) -> tuple[Any, ...]:
    num_experts = 256 if input_size == 3072 else 40
    return (
        make.empty(num_tokens, num_experts, dtype="float32"),
        make.randn(num_tokens, input_size, dtype=dtype),
        make.randn(num_experts, input_size, dtype="float32", scale=input_size**-0.5),
    )
