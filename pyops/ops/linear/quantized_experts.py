"""K-major quantized weights of experts in the layouts of checkpoints: description, checks and dequantization."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import DType, float8_e8m0fnu, float32, int8, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared.fp4_tiles import TILE_COLUMNS
from .._shared.scalar_type import E2M1_NUMBERS, SCALAR_TYPES, ScalarType
from .pointers import fed

if TYPE_CHECKING:
    from torch import Tensor

_wna16_to_dense, _untile_scales = Kernel("linear/wna16_to_dense.cu"), Kernel("linear/untile_scales.cu")
# wna16_to_dense.cu: threads of a block, and weight rows of a thread; not yet measured.
_NUM_THREADS, _WRITTEN_ROWS = 256, 4
_UNTILING_THREADS = 256  # threads of a block of untile_scales.cu; a thread has four scales; not yet measured
_QUANT_DTYPES: dict[str, DType] = {"uint4": uint8, "uint8": uint8, "int8": int8, "float4_e2m1f": uint8}
TYPES = tuple(_QUANT_DTYPES)
MX_BLOCK = 32  # quants of float4_e2m1f under one scale


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedExperts:
    """Weights [num_experts, rows, K]: ``scale * (quant - zero)``, rounded once to 16 bits.

    Attributes:
        quants: [num_experts, rows, K * bits / 8], contiguous; with 4 bits the first of two quants is in the
            lower half of a byte.
        type: type of a quant.
        num_experts, rows, k: sizes.
        groups: groups of K, each under one scale; 1 without `scales`.
        scales: [num_experts, rows, groups], contiguous, or in tiles; possibly in a workspace; None if the epilogue
            applies a per-row scale, and the weight is the quant.
        scale_dtype: 16-bit floats, e4m3, or e8m0 exponents, as uint8 or float8_e8m0fnu.
        zeros: [num_experts, rows * bits / 8, groups] uint8, contiguous; with 4 bits the zero point of the first of two
            rows is in the lower half. None: the zero point is the middle of the range, or 0 for signed quants.
        tiled: whether scales are in tiles (`_shared/fp4_tiles.py`) for each expert.
    """

    quants: TensorArg
    type: ScalarType
    num_experts: int
    rows: int
    k: int
    groups: int
    scales: TensorArg | Scratch | None
    scale_dtype: DType
    zeros: TensorArg | None
    tiled: bool = False

    @property
    def bits(self) -> int:
        """Bits of a quant."""
        return self.type.size_bits

    @property
    def group_size(self) -> int:
        """Elements of K under one scale."""
        return self.k // max(1, self.groups)

    def constants(self) -> dict[str, Any]:
        """Compile-time constants of kernels that read these weights, except the group size."""
        return {
            "BITS": self.bits,
            "EXPONENT": self.type.exponent,
            "HAS_SCALES": self.scales is not None,
            "scale_t": self.scale_dtype,
            "SCALE": "scale_e8m0" if self.scale_dtype in (uint8, float8_e8m0fnu) else "scale_float",
            "HAS_ZEROS": self.zeros is not None,
        }

    def tensors(self) -> dict[str, TensorArg | Scratch | None]:
        """Pointers of these kernels by parameter."""
        return {"quants": self.quants, "scales": self.scales, "zeros": self.zeros}

    def written(self, dense: Scratch, dtype: DType) -> Launch:
        """The launch that dequantizes the weights to `dense`, [num_experts, rows, K] of `dtype`."""
        words = self.k * self.bits // 32
        kernel, others = fed(_wna16_to_dense, **self.tensors())
        access = check.vector_width(4, self.quants)
        return kernel(
            scalar_t=dtype,
            **self.constants(),
            GROUP_SIZE=max(1, self.group_size),
            ROWS=_WRITTEN_ROWS,
            QUANT_ACCESS=access,
            NUM_THREADS=_NUM_THREADS,
        ).launch(
            (-(-self.num_experts * self.rows // _WRITTEN_ROWS), -(-words // _NUM_THREADS)),
            _NUM_THREADS,
            dense=dense,
            rows=self.num_experts * self.rows,
            words=words,
            groups=self.groups,
            **others,
        )

    def untiled(self) -> tuple[list[Launch], QuantizedExperts]:
        """The launch that writes scales in tiles in row-major order, if they are, and the weights with these scales."""
        if not self.tiled:
            return [], self
        assert isinstance(self.scales, TensorArg)
        _, padded_rows, columns = self.scales.shape
        scales = Scratch(max(1, self.num_experts * self.rows * self.groups))
        launch = _untile_scales.renamed(tiled=self.scales.name)(
            ACCESS=check.vector_width(TILE_COLUMNS, self.scales), NUM_THREADS=_UNTILING_THREADS
        ).launch(
            -(-self.num_experts * self.rows * (columns // TILE_COLUMNS) // _UNTILING_THREADS),
            _UNTILING_THREADS,
            scales=scales,
            num_experts=self.num_experts,
            n=self.rows,
            groups=self.groups,
            columns=columns,
            padded_rows=padded_rows,
        )
        return [launch], replace(self, scales=scales, tiled=False)


def check_quants(
    quants: TensorArg, scales: TensorArg, zeros: TensorArg | None, kind: str, dtype: DType, rows: int, k: int
) -> QuantizedExperts:
    """Check quantized weights [num_experts, rows, k] of type `kind` and their scales; `dtype` is that of the
    activations."""
    type_ = SCALAR_TYPES[kind]
    bits = type_.size_bits
    if k * bits % 32:
        raise quants.error(f"expected rows of a multiple of {32 // bits} quants, got {k}")
    check.sizes(quants, num_experts=None, N=rows, bytes=k * bits // 8)
    num_experts = quants.shape[0]
    check.shape(quants, _QUANT_DTYPES[kind], num_experts=num_experts, N=rows, bytes=k * bits // 8)
    if zeros is not None and kind not in ("uint4", "uint8"):
        raise zeros.error(f"expected None with quants of {kind}")
    if kind == "int8":
        if scales.shape not in ((num_experts, rows), (num_experts, rows, 1)):
            raise scales.error(f"expected shape ({num_experts}, {rows}), got {scales.shape}")
        check.dtype(scales, float32)
        check.contiguous(scales)
        return QuantizedExperts(quants, type_, num_experts, rows, k, 1, None, float32, None)
    check.sizes(scales, num_experts=num_experts, N=rows, groups=None)
    groups = scales.shape[2]
    if not groups or k % groups or (kind == "float4_e2m1f" and k // groups != MX_BLOCK):
        size = f"{MX_BLOCK} quants" if kind == "float4_e2m1f" else "equal size"
        raise scales.error(f"expected groups of {size} of {k} elements, got shape {scales.shape}")
    check.dtype(scales, *((uint8, float8_e8m0fnu) if kind == "float4_e2m1f" else (dtype,)))
    check.contiguous(scales)
    if zeros is not None and rows * bits % 8:
        raise zeros.error(f"expected two rows for each zero point of 4 bits, got {rows} rows")
    check.shape(zeros, uint8, num_experts=num_experts, rows=rows * bits // 8, groups=groups)
    return QuantizedExperts(quants, type_, num_experts, rows, k, groups, scales, scales.dtype, zeros)


def dequantized(quants: Tensor, scales: Tensor, zeros: Tensor | None, kind: str, dtype: torch.dtype) -> Tensor:
    """The dequantized weights [num_experts, rows, K] of `dtype`; for "int8" the quants, because the epilogue applies
    the scales."""
    if kind == "int8":
        return quants.to(dtype)
    bits = SCALAR_TYPES[kind].size_bits
    if bits == 4:
        quants = torch.stack((quants & 15, quants >> 4), -1).flatten(2)
        zeros = None if zeros is None else torch.stack((zeros & 15, zeros >> 4), 2).flatten(1, 2)
    size = quants.shape[2] // scales.shape[2]
    if kind == "float4_e2m1f":
        numbers = torch.tensor(E2M1_NUMBERS, dtype=torch.float32, device=quants.device)[quants.long()]
        exponents = scales.view(torch.uint8).int()
        factors = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float32, device=quants.device), exponents - 127)
        factors = factors.masked_fill(exponents == 255, torch.nan)
    else:
        middle = 2.0 ** (bits - 1) if zeros is None else zeros.repeat_interleave(size, 2).float()
        numbers, factors = quants.float() - middle, scales.float()
    return (numbers * factors.repeat_interleave(size, 2)).to(dtype)
