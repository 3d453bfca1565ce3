"""A linear layer for any number of rows, with an activation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.tensors.tensor import TensorArg
from .gemm_plan import plan
from .gemm_problem import activated
from .linear_problem import check_linear, linear_result

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["linear"]


@op(out="out", atol=2.0**-18)
def linear(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    constant_weight: bool = False,
) -> None:
    """A linear layer and its activation: ``out = f(input @ weight.T + bias)``, accumulated in float32 and rounded once.

    With "silu_and_mul" the first half of the weight's rows are gates, the second half ups: ``out = silu(gate) * up``
    for ``[gate, up] = input @ weight.T + bias``; neither is rounded before.

    Args:
        out: [..., output_size], written; constant row stride.
        input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        weight: [output_size, hidden_size] of the same dtype, or [2 * output_size, hidden_size] with "silu_and_mul";
            constant row stride.
        bias: of the same dtype, contiguous: an element for each row of weight, or for each element of
            ``input @ weight.T``; or None.
        activation: "none"; "gelu", by the error function; or "silu_and_mul".
        constant_weight: the promise of `skinny_linear`. A kernel for few rows then loads `weight` early.
    """
    x = input.double() @ weight.double().T
    if bias is not None:
        x = x + (bias.reshape(-1) if bias.numel() == x.shape[-1] else bias.reshape(x.shape)).double()
    out.copy_(activated(x, activation))


linear.result(linear_result)


@linear.plan
def plan_linear(
    out: TensorArg,
    input: TensorArg,
    weight: TensorArg,
    bias: TensorArg | None,
    activation: str,
    constant_weight: bool,
) -> list[Launch]:
    return plan(check_linear(out, input, weight, bias, activation, constant_weight, takes_matrix=True))


@linear.example
def example_linear(
    make: Any,
    *,
    num_tokens: int = 16,
    input_size: Literal[160, 51] = 160,
    dtype: str = "bfloat16",
    activation: Literal["none", "gelu", "silu_and_mul"] = "none",
    with_bias: bool = False,
    constant_weight: bool = False,
) -> tuple[Any, ...]:
    output_size = 40
    rows = output_size * (2 if activation == "silu_and_mul" else 1)
    return (
        make.empty(num_tokens, output_size, dtype=dtype),
        make.randn(num_tokens, input_size, dtype=dtype),
        make.randn(rows, input_size, dtype=dtype, scale=input_size**-0.5),
        make.randn(rows, dtype=dtype) if with_bias else None,
        activation,
        constant_weight,
    )
