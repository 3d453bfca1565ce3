"""GEMMs by tcgen05 on compute capability 10.0 and 10.3: geometry and launch of gemm_sm100.cu, in CUDA Tile C++.

No GPU has run this kernel. It is compiled for sm_100 and sm_103, and run by the host backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import DType, bfloat16, float16, float32, int8, int32
from ...tuning import engines
from .gemm_problem import GemmProblem
from .gemm_rates import GemmRates
from .gemm_shape import FP8, K_TILE_BYTES, GemmShape

_gemm_sm100 = Kernel("linear/gemm_sm100.cu")

DTYPES = bfloat16, float16, *FP8, int8
MIN_MMA_ROWS = 64  # least rows of tcgen05's MMA with one CTA
_GROUP_BYTES = 32 << 20  # bytes of a that the tiles of a group share; they stay in the L2 cache
_MAX_GROUP = 64  # most row tiles of a group
# Rates of a B200 by its data sheet: multiplications of 16-bit elements of an SM per microsecond, bytes of device memory
# per microsecond. Estimates: microseconds of a launch with its first loads, and of the epilogue for each element of a
# tile. Bytes from the L2 cache are at the rate of the device, or of an H200.
_MACS_PER_US, _BYTES_PER_US, _LAUNCH_US, _STORE_US = 7.6e6, 7.2e6, 4.0, 4e-5


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The geometry of gemm_sm100.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m, tile_n: rows and columns of a tile.
        wide: a CTA takes two tiles of adjacent columns.
        group: row tiles that run together for each column tile.
    """

    tile_m: int
    tile_n: int
    wide: bool = False
    group: int = 8

    def __post_init__(self) -> None:
        if any(size & (size - 1) or not 0 < size <= 256 for size in (self.tile_m, self.tile_n)):
            raise ValueError(f"no geometry of gemm_sm100.cu: {self}")

    def blocks(self, m: int, n: int) -> int:
        """CTAs of the grid."""
        return -(-m // self.tile_m) * -(-n // (self.tile_n * (1 + self.wide)))

    def candidates(self, problem: GemmProblem, device: Device) -> list[TileConfig]:
        """All tiles."""
        return list(configs(GemmShape.of(problem), device))

    def launch(self, problem: GemmProblem) -> Launch:
        """A tile, or two, for each CTA."""
        constants = problem.constants()
        del constants["COLUMN_ORDER"]
        kernel = problem.kernel(_gemm_sm100)
        return kernel(
            **constants,
            sum_t=int32 if problem.dtype is int8 else float32,
            SWAP=self.tile_m < MIN_MMA_ROWS,
            WIDE=self.wide,
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            TILE_K=K_TILE_BYTES // problem.dtype.itemsize,
        ).launch(
            self.blocks(problem.m, problem.n),
            1,
            group_rows=self.group,
            **kernel.taken(problem.arguments()),
        )


def refusal_of(dtype: DType, out_dtype: DType, device: Device) -> str | None:
    """Why tcgen05 does not multiply operands of a dtype."""
    if not device.supports("tcgen05"):
        return "the device has no tcgen05, or NVRTC and the driver are older than CUDA 13.4"
    if dtype not in DTYPES or out_dtype.itemsize != 2:
        return f"no tcgen05 MMA of {dtype} with {out_dtype} results"
    if dtype is int8 and device.arch == "sm_103":
        return "tcgen05 of sm_103 multiplies no integers"
    return None


def refusal(shape: GemmShape, device: Device) -> str | None:
    """Why gemm_sm100.cu does not serve a shape."""
    if (why := refusal_of(shape.dtype, shape.out_dtype, device)) is not None:
        return why
    if 0 in (shape.m, shape.n, shape.k):
        return "an empty operand"
    if not shape.has_tiles:
        return "gelu, or columns of b in another order"
    if shape.block_scaled and (shape.dtype not in FP8 or shape.is_gated):
        return "block scales are for fp8 operands without a gated activation"
    columns = shape.n // (1 + shape.is_gated)
    if shape.vec_size * shape.dtype.itemsize != 16 or not shape.out_is_aligned or columns % 8:
        return "TMA loads and stores rows that begin and end at multiples of 16 bytes"
    return None


def configs(shape: GemmShape, device: Device) -> Iterator[TileConfig]:
    """Tiles of the fewest rows that a has, and those of 64 and 128 rows."""
    row_bytes = shape.k * shape.dtype.itemsize
    for tile_m in (16, 32, 64, 128):
        if tile_m < min(128, shape.m) and tile_m < MIN_MMA_ROWS:
            continue
        group = max(1, min(_MAX_GROUP, _GROUP_BYTES // (tile_m * row_bytes)))
        for tile_n in (64, 128):
            yield TileConfig(tile_m, tile_n, group=group)
            if not (shape.block_scaled or shape.is_gated):
                yield TileConfig(tile_m, tile_n, wide=True, group=group)


def time_us(config: TileConfig, shape: GemmShape, device: Device, rates: GemmRates) -> float:
    """Of the tiles of out, and of the bytes of operands and results."""
    tiles, blocks = 1 + (config.wide or shape.is_gated), config.blocks(shape.m, shape.n // (1 + shape.is_gated))
    sizes = config.tile_m, config.tile_n, tiles, shape.k * shape.dtype.itemsize
    return time_of_tiles(blocks, *sizes, shape.nbytes, device, rates)


def time_of_tiles(
    blocks: int, tile_m: int, tile_n: int, tiles: int, row_bytes: int, nbytes: float, device: Device, rates: GemmRates
) -> float:
    """Waves of blocks with as many tiles, and bytes from device memory and from the L2 cache.

    An MMA takes the time of 128 rows, of b with tiles of fewer than 64 rows of a; 8-bit elements take half of it.
    """
    rows, columns = (tile_n, tile_m) if tile_m < MIN_MMA_ROWS else (tile_m, tile_n)
    macs = max(128, rows) * columns * tiles * row_bytes / 2
    waves = -(-blocks // device.num_sms)
    l2_bytes = blocks * (tile_m + tile_n * tiles) * row_bytes
    loop = engines.overlapped(waves * macs / _MACS_PER_US, nbytes / _BYTES_PER_US, l2_bytes / rates.l2_bytes_per_us)
    return _LAUNCH_US + loop + waves * _STORE_US * tile_m * tile_n * tiles
