"""Block-scaled matrices: NVFP4, MXFP4 and MXFP8. A kernel dequantizes them to bfloat16 for a GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import DType, bfloat16, float8_e4m3fn, float8_e8m0fnu, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared.fp4_tiles import MX_BLOCK, TILE_ROWS, tile_sizes, untiled
from .._shared.scalar_type import E2M1_NUMBERS, ScalarType, float4_e2m1f
from .._shared.scalar_type import float8_e4m3fn as e4m3

if TYPE_CHECKING:
    from torch import Tensor

_block_scaled_to_bf16 = Kernel("linear/block_scaled_to_bf16.cu")
_MAX_THREADS = 256  # most threads of a block of block_scaled_to_bf16.cu
# Most blocks along the rows of a matrix: they fill a GPU, and cost little where most matrices are skipped.
_MAX_ROW_BLOCKS = 1024
_MAX_PLANES = 65535  # largest grid dimension z
_ELEMENTS = 16  # elements of a thread of block_scaled_to_bf16.cu
_EXPONENT_BIAS = 127  # exponent bias of e8m0; the value 255 is NaN


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Quantized values with block scales: a scale is for adjacent elements of a row; scales are in tiles
    (`_shared/fp4_tiles.py`).

    Attributes:
        code_bits: 4 for e2m1, two values to a byte of uint8, the first in its lower half; 8 for e4m3.
        scale_size: elements under one scale.
        scale_dtype: float8_e4m3fn, or float8_e8m0fnu for powers of two; a tensor of scales may be uint8 as well.
    """

    code_bits: int
    scale_size: int
    scale_dtype: DType

    @property
    def code_dtype(self) -> DType:
        return uint8 if self.code_bits == 4 else float8_e4m3fn

    @property
    def scalar_type(self) -> ScalarType:
        return float4_e2m1f if self.code_bits == 4 else e4m3

    @property
    def stored_scale(self) -> DType:
        """The type by which kernels read a scale."""
        return uint8 if self.scale_dtype is float8_e8m0fnu else self.scale_dtype

    def size(self, codes: TensorArg) -> int:
        """Elements of a row of quantized values; OpError unless it is a multiple of the elements under one scale."""
        check.dtype(codes, self.code_dtype)
        size = check.row_size(codes) * 8 // self.code_bits
        if size % self.scale_size:
            unit = "bytes" if self.code_bits == 4 else "elements"
            multiple = self.scale_size * self.code_bits // 8
            raise codes.error(f"expected rows of a multiple of {multiple} {unit}, got shape {codes.shape}")
        return size

    def scale_sizes(self, num_rows: int, size: int) -> tuple[int, int]:
        """(rows, columns) of the scales of a matrix, rounded up to whole tiles."""
        columns, rows = tile_sizes(num_rows, size // self.scale_size)
        return rows, columns

    def check_scales(self, scales: TensorArg, **sizes: int | None) -> None:
        """Check scales in tiles: contiguous, and of these sizes; None stands for any size."""
        check.dtype(scales, self.scale_dtype, uint8)
        check.sizes(scales, **sizes)
        check.contiguous(scales)
        if scales.shape[-2] % TILE_ROWS:
            raise scales.error(f"expected a multiple of {TILE_ROWS} rows, got shape {scales.shape}")

    def values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """float64 values times scales, rounded to bfloat16: [rows, size], from codes [rows, ...] and scales in
        tiles."""
        if self.code_bits == 4:
            each = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
            values = torch.tensor(E2M1_NUMBERS, dtype=torch.float64, device=codes.device)[each]
        else:
            values = codes.double()
        of_blocks = untiled(scales, len(codes), values.shape[1] // self.scale_size).contiguous()
        factors = self._factors(of_blocks).repeat_interleave(self.scale_size, 1)
        return (values * factors).to(torch.bfloat16).double()

    def _factors(self, scales: Tensor) -> Tensor:
        if self.scale_dtype is float8_e4m3fn:
            return scales.view(torch.float8_e4m3fn).double()
        powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float64), scales.long() - _EXPONENT_BIAS)
        return powers.masked_fill(scales == 255, float("nan"))

    def expand(
        self,
        dense: Scratch,
        codes: TensorArg,
        scales: TensorArg,
        rows_of_matrix: int,
        scale_rows: Scratch | None = None,
        problem_sizes: TensorArg | None = None,
    ) -> Launch:
        """The launch that dequantizes to `dense` matrices of `rows_of_matrix` rows, each with its own tiles of scales.

        `scale_rows` gives the row of `scales` for each matrix row; None if they are equal. An expert's weight matrix is
        skipped if `problem_sizes` says that the expert has no rows.
        """
        num_rows, size = check.num_rows(codes), codes.shape[-1] * 8 // self.code_bits
        rows, columns = self.scale_sizes(rows_of_matrix, size)
        kernel = _block_scaled_to_bf16.renamed(quants=codes.name, scales=scales.name)
        parts, num_matrices = size // _ELEMENTS, num_rows // max(1, rows_of_matrix)
        num_threads = min(_MAX_THREADS, check.threads(parts))
        return kernel(
            scale_t=self.stored_scale,
            QUANT_BITS=self.code_bits,
            SCALE_SIZE=self.scale_size,
            QUANT_ACCESS=check.vector_width(_ELEMENTS * self.code_bits // 8, codes),
            HAS_SCALE_ROWS=scale_rows is not None,
            HAS_SIZES=problem_sizes is not None,
            NUM_THREADS=num_threads,
        ).launch(
            (-(-parts // num_threads), min(_MAX_ROW_BLOCKS, rows_of_matrix), min(_MAX_PLANES, num_matrices)),
            num_threads,
            dense=dense,
            scale_rows=scale_rows or 0,
            **({} if problem_sizes is not None else {"problem_sizes": 0}),
            num_matrices=num_matrices,
            parts=parts,
            columns=columns,
            rows_of_matrix=max(1, rows_of_matrix),
            padded_rows=rows,
            num_scale_rows=scales.numel // max(1, columns),
            quants_stride=check.row_stride(codes),
        )


def dense_bytes(num_rows: int, size: int) -> int:
    """Bytes of the workspace for a matrix in bfloat16."""
    return max(1, num_rows * size * bfloat16.itemsize)


NVFP4 = BlockFormat(4, 16, float8_e4m3fn)
MXFP4 = BlockFormat(4, MX_BLOCK, float8_e8m0fnu)
MXFP8 = BlockFormat(8, MX_BLOCK, float8_e8m0fnu)
