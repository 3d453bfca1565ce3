"""Linear modules of any package with packed AWQ or GPTQ weights, recognised by their tensors and a trial."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._core.errors import OpError
from ...fused.packed_linear import PackedProduct
from .replacement import Replacement
from .trial import Unknown, tried

_BITS = ("bits", "w_bit", "wbits")  # attributes that hold the bits of a quantized weight, by package
_DTYPES = (torch.float16, torch.bfloat16)
# Tolerance of a trial, relative to the largest result: both sides round a few times to 16 bits. Zero points that are
# off by one change the results of positive activations by far more.
_CLOSE = 2.0**-7
_TRIAL_ROWS = 3


class _Format(NamedTuple):
    """A format of a module's weight, as `PackedProduct` takes it.

    Attributes:
        bits: bits of a GPTQ weight; 0 for AWQ.
        is_v2: whether GPTQ's zero points are used as they are stored.
        columns: elements of an activation row, the K of the GEMM.
        has_order: act-order: whether g_idx gives the group of each column; otherwise groups are contiguous.
    """

    bits: int
    is_v2: bool
    columns: int
    has_order: bool


class PackedProjection(Replacement):
    """A linear module with a packed weight that the kernel reads as it is.

    Args:
        module: a module for which `is_packed` is true.
        dtype: dtype of the activations.

    Raises:
        Unknown: the ops do not agree with the module.
    """

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        super().__init__(module, dtype)
        if dtype not in _DTYPES:
            raise Unknown(f"its activations are {str(dtype).removeprefix('torch.')}, not float16 or bfloat16")
        if getattr(module, "adapter", None) is not None:
            raise Unknown("it has an adapter")
        self._format = _known(module, dtype)
        self.op = "gptq_gemm" if self._format.bits else "awq_gemm"

    def forward(self, x: Tensor) -> Tensor:
        if not self.serves(x):
            return self.original(x)
        return _multiplied(self.module, x, self._format)


def is_packed(module: Any) -> bool:
    """Whether a module has the tensors of a packed linear module: weights, zero points, scales, and their bits."""
    words = [getattr(module, name, None) for name in ("qweight", "qzeros")]
    has_words = all(isinstance(one, Tensor) and one.dtype == torch.int32 and one.ndim == 2 for one in words)
    scales = getattr(module, "scales", None)
    has_scales = isinstance(scales, Tensor) and scales.is_floating_point() and scales.ndim == 2
    return has_words and has_scales and _bits(module) > 0


def _bits(module: Any) -> int:
    return next((value for name in _BITS if isinstance(value := getattr(module, name, None), int)), 0)


def _formats(module: Any) -> list[_Format]:
    """Candidate formats of the module's weight, by the shapes of its tensors."""
    bits, (groups, out) = _bits(module), module.scales.shape
    rows, width = module.qweight.shape
    if bits not in (2, 3, 4, 8) or not groups or tuple(module.qzeros.shape) != (groups, out * bits // 32):
        return []
    if bits == 4 and width == out // 8:
        return [_Format(0, True, rows, False)] if rows % groups == 0 else []
    columns, order = rows * 32 // bits, getattr(module, "g_idx", None)
    if width != out or columns % groups:
        return []
    has_order = False
    if isinstance(order, Tensor) and order.numel():
        if order.dtype != torch.int32 or tuple(order.shape) != (columns,):
            return []
        has_order = bool(
            (order.cpu() != torch.arange(columns, dtype=torch.int64, device="cpu") // (columns // groups)).any()
        )
    return [_Format(bits, is_v2, columns, has_order) for is_v2 in (False, True)]


def _known(module: Any, dtype: torch.dtype) -> _Format:
    """The format with which the op agrees with the module's own forward.

    Shapes alone do not determine it: some packages add 1 to stored zero points, or permute the packed weights.

    Raises:
        Unknown: no format agrees.
    """
    formats = _formats(module)
    if not formats:
        shapes = ", ".join(f"{name} {tuple(getattr(module, name).shape)}" for name in ("qweight", "qzeros", "scales"))
        raise Unknown(f"its tensors are neither AWQ's nor GPTQ's of {_bits(module)} bits: {shapes}")
    numbers = torch.rand(
        _TRIAL_ROWS,
        formats[0].columns,
        generator=torch.Generator("cpu").manual_seed(0),
        dtype=torch.float32,
        device="cpu",
    )
    x = numbers.to(module.scales.device, dtype)
    theirs = tried(lambda: module.forward(x)).double()
    errors = []
    for format in formats:
        try:
            ours = _multiplied(module, x, format).double()
        except OpError as error:
            raise Unknown(f"the op refuses it: {error}") from error
        if ours.shape == theirs.shape:
            errors.append((float((ours - theirs).abs().max() / theirs.abs().max()), format))
    if not errors or not min(errors)[0] <= _CLOSE:
        raise Unknown("it computes something else than awq_gemm or gptq_gemm of its tensors")
    return min(errors)[1]


def _multiplied(module: Any, x: Tensor, format: _Format) -> Tensor:
    """The op's result for `x`, with the module's current tensors read in `format`."""
    scales, order = module.scales.to(x.dtype), module.g_idx if format.has_order else None
    weight = PackedProduct(module.qweight, module.qzeros, scales, order, format.bits, format.is_v2)
    rows = x.reshape(-1, format.columns)
    out = rows.new_empty(rows.shape[0], scales.shape[1])
    weight(rows, out)
    if module.bias is not None:
        out += module.bias
    return out.view(*x.shape[:-1], -1)
