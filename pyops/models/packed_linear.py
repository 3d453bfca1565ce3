"""Projections of packed weights: those of AWQ, GPTQ and compressed-tensors' pack-quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._core.lazy import torch
from .._packed_linear import PackedProduct
from .config_values import refuse
from .quantization import PackedQuantization

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = {  # of tensors in a checkpoint: words of codes, words of zero points, scales, groups of rows
    "awq": ("qweight", "qzeros", "scales", "g_idx"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "pack-quantized": ("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx"),
}
_MIDDLE = {4: -0x77777778, 8: -0x7F7F7F80}  # words of zero points in the middle of codes: 8 and 128


class PackedLinear(NamedTuple):
    """A projection, or several of the same input stacked.

    Attributes:
        products: one of all that are stacked; or, where each has groups of its own, one of each.
        bias: [out] of the dtype of activations, or None.
        sizes: names of the projections, and their rows.
        quantization: how they are packed.
        orders: [in] int32, the groups of rows as a checkpoint lists them; () where it does not.
    """

    products: tuple[PackedProduct, ...]
    bias: Tensor | None
    sizes: dict[str, int]
    quantization: PackedQuantization
    orders: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """The projection of `x`. A bias is added to what is rounded."""
        rows = [product.scales.shape[1] for product in self.products]
        out = x.new_empty(x.shape[0], sum(rows))
        for product, part in zip(self.products, out.split(rows, 1), strict=True):
            product(x, part)
        if self.bias is not None:
            out += self.bias
        return out

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights}, of all in `sizes`."""
        found: dict[str, Tensor] = {}
        own, rows = self.quantization, list(self.sizes.values())
        codes, zeros, scales, order = _NAMES[own.format]
        words = [row * own.bits // 32 for row in rows]
        kinds = [(codes, "qweight", words if own.format == "awq" else rows), (scales, "scales", rows)]
        kinds += [(zeros, "qzeros", words)] if own.has_zeros else []
        for kind, field, widths in kinds:
            whole = [getattr(product, field) for product in self.products]
            parts = whole if len(whole) > 1 else whole[0].split(widths, 1)
            for name, part in zip(self.sizes, parts, strict=True):
                # compressed-tensors has rows of outputs where GPTQ has columns.
                found[f"{name}.{kind}"] = part.T if own.format == "pack-quantized" else part
        found |= {f"{name}.{order}": each for name, each in zip(self.sizes, self.orders, strict=False)}
        if self.bias is not None:
            parts = self.bias.split(rows)
            found |= {f"{name}.bias": part for name, part in zip(self.sizes, parts, strict=True)}
        return found


def packed_linear(
    quantization: PackedQuantization,
    sizes: dict[str, int],
    columns: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> PackedLinear:
    """Projections of `columns` elements, stacked, whose weights are not set: {name in the module: rows}.

    Raises:
        ModelError: groups do not divide the columns, or words do not hold whole rows or columns.
    """
    bits, per_word = quantization.bits, 32 if quantization.bits == 3 else 32 // quantization.bits
    size = columns if quantization.group_size == -1 else quantization.group_size
    if columns % size:
        raise refuse("quantization_config.group_size", f"a number that divides {columns}", size)
    for name, count in {"columns": columns, **sizes}.items():
        if count % per_word:
            raise refuse(name, f"a multiple of {per_word} for {bits} bits", count)

    def product(rows: int, g_idx: Tensor | None) -> PackedProduct:
        is_awq = quantization.format == "awq"
        codes = (columns, rows * bits // 32) if is_awq else (columns * bits // 32, rows)
        zeros = torch.empty(columns // size, rows * bits // 32, dtype=torch.int32, device=device)
        if not quantization.has_zeros:
            zeros.fill_(_MIDDLE[bits])
        return PackedProduct(
            torch.empty(codes, dtype=torch.int32, device=device),
            zeros,
            torch.empty(columns // size, rows, dtype=dtype, device=device),
            g_idx,
            0 if is_awq else bits,
            quantization.is_v2,
        )

    orders = tuple(torch.empty(columns, dtype=torch.int32, device=device) for _ in sizes)
    orders = orders if quantization.lists_groups else ()
    if quantization.has_order:
        products = tuple(product(rows, order) for rows, order in zip(sizes.values(), orders, strict=True))
    else:
        products = (product(sum(sizes.values()), None),)
    return PackedLinear(products, bias, sizes, quantization, orders)
