"""Code shared by the activations: the check of gated inputs, the register bound of SiLU, the example of gated ops."""

from __future__ import annotations

from typing import Any

from ... import check
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import float16
from ..._core.tensors.tensor import TensorArg


def min_blocks_of_silu(input: TensorArg) -> int:
    """Resident blocks of 256 threads per SM for which a kernel with SiLU of `input` has registers.

    float16 uses the accurate exponential, in 48 registers; the other dtypes need 32 (docs/performance/rows.md).
    """
    return 5 if input.dtype is float16 else 8


def check_halves(out: TensorArg, input: TensorArg) -> None:
    """Check that `input` has rows of floats that are twice as long as those of `out`."""
    check.floating(input)
    if check.row_size(input) % 2:
        raise input.error(f"expected a last dimension of even size, got shape {input.shape}")
    expected = (*input.shape[:-1], input.shape[-1] // 2)
    if out.shape != expected:
        raise out.error(f"expected shape {expected} for an input of shape {input.shape}, got {out.shape}")
    check.row_size(out)


def result_gated(input: TensorArg) -> Result:
    """The new output of a gated activation."""
    return Result((*input.shape[:-1], check.row_size(input) // 2), input.dtype)


def example_gated(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 14336, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    """The output and input of a gated activation."""
    return make.empty(num_tokens, hidden_size, dtype=dtype), make.randn(num_tokens, 2 * hidden_size, dtype=dtype)
