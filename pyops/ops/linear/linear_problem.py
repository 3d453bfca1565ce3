"""What a linear layer computes: the result and the checks of `linear` and `skinny_linear`."""

from __future__ import annotations

from dataclasses import replace

from ... import check
from ..._core.op.planner import Result
from ..._core.tensors.tensor import TensorArg
from .gemm_problem import ACTIVATIONS, Epilogue, GemmProblem, Operand, column_bias


def linear_result(input: TensorArg, weight: TensorArg, activation: str) -> Result:
    """The result of a linear layer and its activation."""
    check.sizes(weight, output_size=None, hidden_size=check.row_size(input))
    output_size = weight.shape[0] // (2 if activation == "silu_and_mul" else 1)
    return Result((*input.shape[:-1], output_size), input.dtype)


def check_linear(
    out: TensorArg,
    input: TensorArg,
    weight: TensorArg,
    bias: TensorArg | None,
    activation: str = "none",
    constant_weight: bool = False,
    norm_weight: TensorArg | None = None,
    takes_matrix: bool = False,
) -> GemmProblem:
    """The problem of a linear layer with tensors of one dtype; OpError for one that no kernel supports.

    Args:
        takes_matrix: whether `bias` may have a row for each row of `input`.
    """
    check.floating(input)
    if activation not in ACTIVATIONS:
        raise check.refuse(out, "activation", f"expected {' or '.join(ACTIVATIONS)}, got {activation}")
    hidden_size, columns = check.row_size(input), check.row_size(out)
    output_size = columns * 2 if activation == "silu_and_mul" else columns
    check.dtype(out, input.dtype)
    if out.shape[:-1] != input.shape[:-1]:
        raise out.error(f"expected the leading dimensions of input, {input.shape[:-1]}, got shape {out.shape}")
    check.sizes(weight, output_size=output_size, hidden_size=hidden_size)
    check.dtype(weight, input.dtype)
    check.row_stride(out)
    rows = check.num_rows(input)
    if takes_matrix and bias is not None and rows > 1 and bias.numel == rows * output_size:
        check.elements(bias, input.dtype, rows * output_size)
        bias = replace(bias, shape=(rows, output_size), strides=(output_size, 1))
    else:
        bias = column_bias(bias, input.dtype, output_size)
    epilogue = Epilogue(out, bias=bias, activation=activation)
    check.elements(norm_weight, input.dtype, hidden_size)
    operands = Operand.of_rows(input), Operand.of_rows(weight)
    return GemmProblem(*operands, hidden_size, epilogue, constant_weight, norm_weight)
