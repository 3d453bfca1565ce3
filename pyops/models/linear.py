"""Projections with plain, 8-bit, packed or GGUF weights, and `Place`, which makes them."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from .._core.op import torch_library
from .._core.system import device
from .._core.system.lazy import torch
from ..fused.quantized_linear import QuantisedLinear, num_blocks
from ..ops._shared.ggml_formats import FORMATS
from ..ops.linear.dense import linear
from ..ops.linear.gemm_problem import SCALE_BLOCK
from ..ops.linear.skinny_linear import skinny_linear
from ..tuning import batch_invariant
from .config_values import refuse
from .gguf_linear import BlockMatrix, GgufLinear
from .packed_format import PackedQuantization
from .packed_linear import PackedLinear, packed_linear
from .quantization import GgufTypes, Mxfp4Experts, QuantizedWeights

if TYPE_CHECKING:
    from torch import Tensor

    from .._core.system.device import Device

# The largest M at which skinny_linear is faster than cuBLAS (docs/performance/products.md).
MAX_SKINNY_ROWS = 1
# The largest M for which Hopper takes `linear`, which starts early and prefetches a constant weight, and not cuBLAS.
# With 256 rows cuBLAS is faster (docs/performance/engine.md).
_MAX_FEW_ROWS = 64


def gpu_of(x: Tensor) -> Device | None:
    """The GPU that `x` is on, or that fake tensors stand for; None on the CPU."""
    planned = torch_library.observed_device()
    return planned or (device.get(x.device.index) if x.is_cuda else None)


class Linear(NamedTuple):
    """A projection, or several of the same input stacked.

    Attributes:
        weight: [out, in].
        bias: [out] or None.
        sizes: {name in the module: rows}.
        prefetched: rows that a later kernel reads, which `add_to` of one token prefetches; or None.
    """

    weight: Tensor
    bias: Tensor | None
    sizes: dict[str, int]
    prefetched: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``."""
        if (gpu := gpu_of(x)) is not None:
            is_pinned = batch_invariant()
            if x.shape[0] <= MAX_SKINNY_ROWS and not is_pinned:
                return skinny_linear.new(x, self.weight, self.bias, constant_weight=True)
            if is_pinned or self._are_few(x, gpu):
                return linear.new(x, self.weight, self.bias, constant_weight=True)
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def of_norm(self, x: Tensor, norm_weight: Tensor, epsilon: float, activation: str = "none") -> Tensor:
        """The activation of the projection of the RMS norm of `x`, one row on a GPU: one kernel."""
        normalised = {"norm_weight": norm_weight, "epsilon": epsilon}
        return skinny_linear.new(x, self.weight, self.bias, constant_weight=True, activation=activation, **normalised)

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """``total + x @ weight.T``, in the memory of `total` or in new memory. In the epilogue of the GEMM, which is
        cuBLAS for many rows and thus not batch-invariant."""
        if (gpu := gpu_of(x)) is not None:
            if x.shape[0] == 1:
                addend = total.view(-1)
                return skinny_linear.new(x, self.weight, addend, constant_weight=True, prefetched=self.prefetched)
            if self._are_few(x, gpu):
                return linear.new(x, self.weight, total, constant_weight=True)
        return total.addmm_(x, self.weight.t())

    @staticmethod
    def _are_few(x: Tensor, gpu: Device) -> bool:
        return x.shape[0] <= _MAX_FEW_ROWS and x.element_size() == 2 and gpu.supports("wgmma")

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights} of the projections in `sizes`, {name: rows}."""
        rows = list(self.sizes.values())
        return _named(self.sizes, "weight", self.weight.split(rows)) | _biases(self.sizes, self.bias)


class ScaledLinear(NamedTuple):
    """As `Linear`, with 8-bit weights and activations. Stacked projections share one `input_scale`."""

    product: QuantisedLinear
    sizes: dict[str, int]

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)

    def dequantised(self) -> Tensor:
        """The weights: [out, in] float32."""
        product = self.product
        if not product.block_rows:
            return product.weight.float() * product.weight_scale
        parts = product.weight.split(list(product.block_rows))
        scales = product.weight_scale.split([num_blocks(rows) for rows in product.block_rows])
        return torch.cat([_expanded(part, of_blocks) for part, of_blocks in zip(parts, scales, strict=True)])

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of `Linear.tensors`, and the scales."""
        product, rows = self.product, list(self.sizes.values())
        scale_rows = [num_blocks(size) for size in rows] if product.block_rows else rows
        found = _named(self.sizes, "weight", product.weight.split(rows))
        found |= _named(self.sizes, "weight_scale", product.weight_scale.split(scale_rows))
        if product.input_scale is not None:
            found |= _named(self.sizes, "input_scale", [product.input_scale] * len(rows))
        return found | _biases(self.sizes, product.bias)


class Place(NamedTuple):
    """The dtype, device and quantization of a module's weights.

    Attributes:
        quantization: None where no projection is quantised.
        module: the module's name in a checkpoint.
    """

    dtype: torch.dtype
    device: torch.device
    quantization: QuantizedWeights | None = None
    module: str = ""

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def matrix(self, name: str, rows: int, columns: int) -> Tensor | BlockMatrix:
        """An uninitialised weight of the module `name`; a `BlockMatrix` if a GGUF file has it quantised."""
        quant_type = self.quantization.of(name) if isinstance(self.quantization, GgufTypes) else None
        if quant_type is None:
            return self.empty(rows, columns)
        format = FORMATS[quant_type]
        if columns % format.length:
            raise refuse(name, f"rows of whole blocks of {format.length} elements of {format.name}", columns)
        weight = torch.empty(rows, columns // format.length * format.nbytes, dtype=torch.uint8, device=self.device)
        return BlockMatrix(weight, quant_type, columns, self.dtype)

    def _of_types(self, types: GgufTypes, sizes: dict[str, int], columns: int, bias: Tensor | None) -> GgufLinear:
        """Stacked projections of a GGUF file: adjacent projections of one type share a matrix."""
        rows = {f"{self.module}.{name}": size for name, size in sizes.items()}
        groups = [list(group) for _, group in groupby(rows, types.of)]
        matrices = [self.matrix(group[0], sum(rows[name] for name in group), columns) for group in groups]
        return GgufLinear(tuple(matrices), bias, sizes)

    def linear(
        self, sizes: dict[str, int], columns: int, bias: bool
    ) -> Linear | ScaledLinear | PackedLinear | GgufLinear:
        """Stacked projections of `columns` elements, uninitialised; `sizes` is {name in the module: rows}.

        Raises:
            ModelError: one of them is quantised and another is not.
        """
        rows, quantization = sum(sizes.values()), self.quantization
        own_bias = self.empty(rows) if bias else None
        if isinstance(quantization, GgufTypes):
            return self._of_types(quantization, sizes, columns, own_bias)
        quantised = {quantization is not None and quantization.covers(f"{self.module}.{name}") for name in sizes}
        if len(quantised) > 1:
            names = ", ".join(f"{self.module}.{name}" for name in sizes)
            raise refuse("quantization_config", f"all or none of {names} to be quantised", "some")
        if quantization is None or isinstance(quantization, Mxfp4Experts) or not quantised.pop():
            return Linear(self.empty(rows, columns), own_bias, sizes)
        if isinstance(quantization, PackedQuantization):
            return packed_linear(quantization, sizes, columns, own_bias, self.dtype, self.device)
        block_rows = _joined_rows(sizes) if quantization.weights == "block" else ()
        scales = [sum(map(num_blocks, block_rows)), num_blocks(columns)] if block_rows else [rows, 1]
        product = QuantisedLinear(
            weight=torch.empty(rows, columns, dtype=getattr(torch, quantization.dtype), device=self.device),
            weight_scale=torch.empty(scales, dtype=torch.float32, device=self.device),
            # `Decoder.write` takes the maximum over the stacked projections.
            input_scale=torch.zeros(1, dtype=torch.float32, device=self.device)
            if quantization.activations == "static"
            else None,
            bias=own_bias,
            block_rows=block_rows,
        )
        return ScaledLinear(product, sizes)


def plain_weight(projection: Linear | ScaledLinear | PackedLinear | GgufLinear, columns: int, like: Tensor) -> Tensor:
    """The weight [rows, columns] of a projection, dequantised to the dtype of `like` if it is quantised."""
    if isinstance(projection, Linear):
        return projection.weight
    if isinstance(projection, ScaledLinear | PackedLinear):
        return projection.dequantised().to(like.dtype)
    return projection(torch.eye(columns, dtype=like.dtype, device=like.device)).T


def _expanded(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantize blockwise-scaled weights to float32."""
    rows, columns = codes.shape
    of_rows = scales.repeat_interleave(SCALE_BLOCK, 0)[:rows]
    return codes.float() * of_rows.repeat_interleave(SCALE_BLOCK, 1)[:, :columns]


def _joined_rows(sizes: dict[str, int]) -> tuple[int, ...]:
    """Rows of each GEMM of stacked projections. Adjacent ones merge if the first ends at a scale block's boundary."""
    found: list[int] = []
    for size in sizes.values():
        if found and found[-1] % SCALE_BLOCK == 0:
            found[-1] += size
        else:
            found.append(size)
    return tuple(found)


def _named(sizes: dict[str, int], kind: str, parts: list[Tensor] | tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {f"{name}.{kind}": part for name, part in zip(sizes, parts, strict=True)}


def _biases(sizes: dict[str, int], bias: Tensor | None) -> dict[str, Tensor]:
    return {} if bias is None else _named(sizes, "bias", bias.split(list(sizes.values())))
