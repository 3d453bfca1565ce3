"""Projections with packed weights in the formats AWQ, GPTQ and compressed-tensors' pack-quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._core.system.lazy import torch
from ..errors import ModelError
from ..fused.packed_linear import PackedProduct
from .config_values import refuse
from .packed_format import PackedQuantization

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = {  # names of tensors in a checkpoint: packed weights, packed zero points, scales, g_idx
    "awq": ("qweight", "qzeros", "scales", "g_idx"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "pack-quantized": ("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx"),
}


class PackedLinear(NamedTuple):
    """A projection, or several of the same input stacked.

    Attributes:
        products: the GEMMs: one for all stacked projections, or one for each if each has its own act-order.
        bias: [out] of the dtype of activations, or None.
        sizes: names of the projections, and their rows.
        quantization: the format of the packed weights.
        orders: g_idx of the checkpoint, [in] int32 each; () if it has none.
    """

    products: tuple[PackedProduct, ...]
    bias: Tensor | None
    sizes: dict[str, int]
    quantization: PackedQuantization
    orders: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """The projection of `x`. The bias is added after the result is rounded."""
        rows = [product.scales.shape[1] for product in self.products]
        out = x.new_empty(x.shape[0], sum(rows))
        for product, part in zip(self.products, out.split(rows, 1), strict=True):
            product(x, part)
        if self.bias is not None:
            out += self.bias
        return out

    def dequantised(self) -> Tensor:
        """The weights: [out, in] of the dtype of activations, each rounded once."""
        own, product = self.quantization, self.products[0]
        columns = product.qweight.shape[0] * (1 if own.format == "awq" else 32 / own.bits)
        return self(torch.eye(int(columns), dtype=product.scales.dtype, device=product.scales.device)).T

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
                # compressed-tensors stores [out, in], GPTQ [in, out].
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
    memory: Tensor | None = None,
) -> PackedLinear:
    """Stacked projections of `columns` elements, with uninitialised weights: {name in the module: rows}.

    Args:
        memory: contiguous memory for the packed weights, which begin at its first byte; None to allocate it.

    Raises:
        ModelError: groups do not divide the columns, or words do not hold whole rows or columns.
    """
    bits, per_word = quantization.bits, 32 if quantization.bits == 3 else 32 // quantization.bits
    size = quantization.columns_of_group(columns)
    for name, count in {"columns": columns, **sizes}.items():
        if count % per_word:
            raise refuse(name, f"a multiple of {per_word} for {bits} bits", count)

    words = [row * columns * bits // 32 for row in sizes.values()]
    if memory is None:
        memory = torch.empty(sum(words), dtype=torch.int32, device=device)
    memory = memory.flatten().view(torch.int32)[: sum(words)]
    places = iter(memory.split(words if quantization.has_order else [sum(words)]))

    def product(rows: int, g_idx: Tensor | None) -> PackedProduct:
        is_awq = quantization.format == "awq"
        codes = (columns, rows * bits // 32) if is_awq else (columns * bits // 32, rows)
        zeros = torch.empty(columns // size, rows * bits // 32, dtype=torch.int32, device=device)
        if not quantization.has_zeros:
            zeros.fill_(_middle(quantization))
        return PackedProduct(
            next(places).view(codes),
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


def check_written(quantization: PackedQuantization, name: str, tensor: Tensor) -> None:
    """Check redundant tensors of a checkpoint against ``config.json``; no kernel reads them.

    Raises:
        ModelError: groups are not consecutive, or zero points of an expert are not symmetric.
    """
    if name.endswith(".g_idx") and not quantization.has_order:
        size = quantization.columns_of_group(len(tensor))
        if (tensor.cpu() != torch.arange(len(tensor), dtype=torch.int64, device="cpu") // size).any():
            raise ModelError(name, f"expected groups of {size} neighbours, as without desc_act")
    keeps_zeros = not quantization.is_symmetric or quantization.bits not in (4, 8) or ".experts." not in name
    if name.endswith(".qzeros") and not keeps_zeros and (tensor != _middle(quantization)).any():
        raise ModelError(name, "expected zero points in the middle of the quantized range, as with sym")


def _middle(quantization: PackedQuantization) -> int:
    """The int32 word of symmetric zero points as a checkpoint stores them, for 4 or 8 bits."""
    bits, stored = quantization.bits, (1 << quantization.bits - 1) - (not quantization.is_v2)
    word = sum(stored << place for place in range(0, 32, bits))
    return word - (word >> 31 << 32)
