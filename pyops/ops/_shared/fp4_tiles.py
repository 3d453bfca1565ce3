"""NVFP4: sizes of its blocks, and the tiles in which GEMMs read its scales.

Tiles have 128 rows and 4 columns, and are filled up with zeros. In a matrix of c columns, a multiple of 4, row m,
column k is byte ``(m // 128 * (c // 4) + k // 4) * 512 + m % 32 * 16 + m // 32 % 4 * 4 + k % 4``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._core.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 16  # elements under one scale
MX_BLOCK = 32  # elements under one scale of MXFP4 and MXFP8; their scales have the same tiles
TILE_ROWS, TILE_COLUMNS = 128, 4


def rounded_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def tile_sizes(num_rows: int, blocks: int) -> tuple[int, int]:
    """(columns, rows) of the scales of a matrix, rounded up to whole tiles."""
    return rounded_up(blocks, TILE_COLUMNS), rounded_up(num_rows, TILE_ROWS)


def tiled(scales: Tensor) -> Tensor:
    """The bytes of scales [rows, columns], in tiles that are filled up with zeros."""
    rows, columns = (rounded_up(*sizes) for sizes in zip(scales.shape, (TILE_ROWS, TILE_COLUMNS), strict=True))
    filled = torch.zeros(rows, columns, dtype=torch.uint8, device=scales.device)
    filled[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    return filled.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, columns)


def untiled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """The first `rows` and `columns` of the bytes of scales that lie in tiles, as `tiled` lays them."""
    padded_rows, padded_columns = scales.shape
    tiles = scales.view(torch.uint8).view(padded_rows // 128, padded_columns // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_columns)[:rows, :columns]
