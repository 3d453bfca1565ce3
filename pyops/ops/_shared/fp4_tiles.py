"""NVFP4: block sizes, and the tiled layout of block scales that GEMMs read.

A tile has 128 rows and 4 columns of scales; partial tiles are padded with zeros. In a matrix of c columns, a multiple
of 4, row m, column k is byte ``(m // 128 * (c // 4) + k // 4) * 512 + m % 32 * 16 + m // 32 % 4 * 4 + k % 4``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._core.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 16  # NVFP4: elements under one scale
MX_BLOCK = 32  # MXFP4 and MXFP8: elements under one scale; the scales have the same tiles
TILE_ROWS, TILE_COLUMNS = 128, 4  # rows and columns of a tile of scales


def rounded_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def tile_sizes(num_rows: int, blocks: int) -> tuple[int, int]:
    """(columns, rows) of the scales of a matrix, rounded up to whole tiles."""
    return rounded_up(blocks, TILE_COLUMNS), rounded_up(num_rows, TILE_ROWS)


def tiled(scales: Tensor) -> Tensor:
    """Scales [rows, columns], as bytes, rearranged into tiles and padded with zeros."""
    rows, columns = (rounded_up(*sizes) for sizes in zip(scales.shape, (TILE_ROWS, TILE_COLUMNS), strict=True))
    filled = torch.zeros(rows, columns, dtype=torch.uint8, device=scales.device)
    filled[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    return filled.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, columns)


def untiled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `tiled`: the bytes of the first `rows` x `columns` scales."""
    padded_rows, padded_columns = scales.shape
    tiles = scales.view(torch.uint8).view(padded_rows // 128, padded_columns // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_columns)[:rows, :columns]
