"""Code shared by the quantizing ops: conversions for references, checks of matrices, the launch of static_quant.cu."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import E4M3, DType, float8_e4m3fn, int8, uint8
from ..._core.tensors.tensor import TensorArg, contiguous
from .._shared import chunks, fp8

if TYPE_CHECKING:
    from torch import Tensor

_static_quant = Kernel("quantize/static_quant.cu")
_MIN_BLOCKS = 8  # resident blocks of 256 threads per SM: 2048 threads, the maximum


def as_fp8(x: Tensor) -> Tensor:
    """`x` with a float8 dtype: uint8 is viewed as float8_e4m3fn, and any other dtype is kept."""
    return x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x


def saturated(x: Tensor) -> Tensor:
    """Converts integers, held as float32 or int64, to int8; they saturate, and NaN becomes 0."""
    return x.nan_to_num(nan=0.0).clamp(-128, 127).to(torch.int8)


def shifted(product: Tensor, azp: Tensor) -> Tensor:
    """``round(product) + azp`` as int8, where `product` is the scaled input and `azp` the zero point.

    The rounded product saturates as int32, the sum as int8; NaN counts as 0.
    """
    return saturated(integers(product) + azp.long())


def integers(x: Tensor) -> Tensor:
    """float32 values rounded to nearest even, as int64 within the limits of int32; NaN becomes 0."""
    return x.double().nan_to_num(nan=0.0).round().clamp(-(2**31), 2**31 - 1).long()


def matrices(result: TensorArg, input: TensorArg, *code_types: DType) -> int:
    """Check `input` and its quantized `result` of one of `code_types`; returns the size of a row.

    Each of them must have a constant row stride.
    """
    check.floating(input)
    hidden_size = check.row_size(input)
    check.same_shape(result, input)
    check.dtype(result, *code_types)
    check.row_size(result)
    for arg in (result, input):
        check.row_stride(arg)
    return hidden_size


def fp8_matrices(result: TensorArg, input: TensorArg) -> tuple[int, TensorArg]:
    """`matrices` for fp8 results; returns the size of a row, and `result` with an fp8 dtype in place of uint8."""
    hidden_size = matrices(result, input, *E4M3, uint8)
    return hidden_size, replace(result, dtype=float8_e4m3fn) if result.dtype is uint8 else result


def one_row(*args: TensorArg) -> tuple[TensorArg, ...]:
    """The tensors flattened to one row if all are contiguous, else unchanged; for ops without per-row scales."""
    if all(check.row_stride(arg) == arg.shape[-1] for arg in args):
        return tuple(replace(arg, shape=(arg.numel,), strides=(1,)) for arg in args)
    return args


def static(
    result: TensorArg,
    input: TensorArg,
    *,
    azp: bool = False,
    group_rows: int = 1,
    group_columns: int = 0,
    grouped_rows: bool = False,
    strides: tuple[int, int] = (0, 0),
) -> Launch:
    """The launch of static_quant.cu.

    Args:
        result, input: matrices, as `matrices` checks them.
        azp: whether the op has a tensor azp, a zero point.
        group_rows, group_columns: rows and columns that share a scale; 0 columns: a whole row.
        grouped_rows: whether group_rows may be other than 1, a compile-time constant.
        strides: elements from one scale to the next, along rows and along columns.
    """
    fixed: dict[str, Any] = {
        "group_rows": group_rows,
        "scale_row_stride": strides[0],
        "scale_column_stride": strides[1],
    }
    # A device without instructions that convert to fp8 emulates them with integers, which takes more registers.
    has_instructions = fp8.converts_to(result)
    return chunks.launch(
        _static_quant,
        result,
        input,
        "result_stride",
        min_blocks=_MIN_BLOCKS if has_instructions else 1,
        # docs/performance/quantize.md: 16 values per thread, unless narrower groups would take registers for scales.
        twice=has_instructions and result.dtype is not int8 and group_columns % 16 == 0,
        fixed=fixed if azp else fixed | {"azp": 0},
        code_t=result.dtype,
        GROUP_COLUMNS=group_columns,
        GROUPED_ROWS=grouped_rows,
        HAS_AZP=azp,
    )


def with_dense_rows(value: Any) -> Any:
    """`value`, or a contiguous copy of it unless it is a torch tensor with a last stride of 1."""
    return value if hasattr(value, "contiguous") and value.stride(-1) == 1 else contiguous(value)
