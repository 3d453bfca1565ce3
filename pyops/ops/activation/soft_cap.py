"""The soft cap of logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32
from ..._core.tensors.tensor import TensorArg
from .._shared import chunks

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["muse_spark_mul_tanh_soft_cap"]

_soft_cap = Kernel("activation/muse_spark_mul_tanh_soft_cap.cu")


@op(out="out")
def muse_spark_mul_tanh_soft_cap(out: Tensor, input: Tensor, multiplier: float, soft_cap_temp: float) -> None:
    """Multiply logits and cap them softly: ``out = c * tanh(input * multiplier / c)`` in float32, with c soft_cap_temp.

    Args:
        out: [...] float32, written; constant row stride.
        input: the same shape, float32, float16 or bfloat16; constant row stride.
        multiplier: the factor of logits.
        soft_cap_temp: the cap. Numbers are 0 or NaN under a cap of 0.
    """
    # float32 tensors of one element, as the kernel rounds both numbers before it multiplies
    factor, cap = (torch.full((), one, dtype=torch.float32, device=input.device) for one in (multiplier, soft_cap_temp))
    out.copy_(cap * torch.tanh(input.float() * factor / cap))


@muse_spark_mul_tanh_soft_cap.result
def result_muse_spark_mul_tanh_soft_cap(input: TensorArg) -> Result:
    return Result(input.shape, float32)


@muse_spark_mul_tanh_soft_cap.plan
def plan_muse_spark_mul_tanh_soft_cap(out: TensorArg, input: TensorArg) -> Launch:
    check.floating(input)
    check.row_size(input)
    check.dtype(out, float32)
    check.same_shape(out, input)
    check.row_size(out)
    if check.row_stride(input) == check.row_stride(out) == input.shape[-1]:  # contiguous: one long row, in wide vectors
        out, input = (replace(arg, shape=(arg.numel,), strides=(1,)) for arg in (out, input))
    return chunks.launch(_soft_cap, out, input)


@muse_spark_mul_tanh_soft_cap.example
def example_muse_spark_mul_tanh_soft_cap(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 32000, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    logits = make.randn(num_tokens, hidden_size, dtype=dtype)
    return make.empty(num_tokens, hidden_size, dtype="float32"), logits, 0.25, 30.0
