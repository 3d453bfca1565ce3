"""GEMMs by mma.sync with block scales on compute capability 12.0 and 12.1: geometry and launches of gemm_sm120.cu.

No GPU has run this kernel. It is compiled for sm_120a and sm_121a, and run by the host backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import uint8
from .block_scaled_problem import BlockScaledProblem
from .gemm_problem import Operand
from .gemm_shape import K_TILE_BYTES
from .grouped_problem import GROUP
from .wq_grouped_problem import WqGroupedProblem

_dense = Kernel("linear/gemm_sm120.cu", entry="gemm_sm120")
_grouped = Kernel("linear/gemm_sm120.cu", entry="grouped_gemm_sm120")

_ACCESS = 16  # bytes of one access to a and b
_WORD = 4  # scales of a word
_MAX_STAGES = 6  # most stages
_MAX_SPLITS = 8  # split-K: most CTAs that share a tile
_MIN_SPLIT_STEPS = 4  # split-K: fewest k-tiles of each CTA
_MAX_ACCUMULATORS = 128  # most accumulators of a thread: half of its registers
_MAX_TILE = 128  # most rows and columns of a tile
_GROUP_ROWS = 8  # row tiles that run together for each column tile
_OTHER_BYTES = 1024  # bytes of shared memory of a CTA that are no stages: static, and reserved by the driver
# Multiplications of 8-bit elements of an SM per microsecond, and half of those of 4-bit elements: an RTX 5090's data
# sheet, 1676 TFLOP/s of e2m1 on 170 SMs. Estimate: microseconds of a tile without its k-tiles.
_MACS_PER_US, _TILE_US = 2.46e6, 0.65
# Tiles and their warps, TILE_M, TILE_N, WARPS_M, WARPS_N, and CTAs per SM.
_TILES = ((16, 64, 1, 4, 2), (32, 64, 1, 2, 2), (64, 64, 2, 2, 2), (64, 128, 2, 4, 1), (128, 128, 2, 4, 1))


@dataclass(frozen=True, slots=True)
class ScaledMmaConfig:
    """The geometry of gemm_sm120; the attributes are constants of the kernel.

    Attributes:
        tile_m, tile_n: rows and columns of a CTA's tile.
        warps_m, warps_n: warps along M and N.
        stages: k-tiles in shared memory or in flight.
        min_blocks: CTAs per SM; bounds the registers.
        splits: CTAs that share a tile (split-K).
    """

    tile_m: int
    tile_n: int
    warps_m: int
    warps_n: int
    stages: int
    min_blocks: int
    splits: int = 1

    def __post_init__(self) -> None:
        columns, rest = divmod(self.tile_n, self.warps_n)
        whole = not rest and (columns == 16 or columns % 32 == 0) and self.tile_m % (16 * self.warps_m) == 0
        held = self.tile_m * self.tile_n // self.num_threads
        fits = max(self.tile_m, self.tile_n) <= _MAX_TILE and held <= _MAX_ACCUMULATORS and self.num_threads % 64 == 0
        if not (whole and fits and self.stages >= 2 and 1 <= self.splits <= _MAX_SPLITS):
            raise ValueError(f"no geometry of gemm_sm120.cu: {self}")

    @property
    def num_threads(self) -> int:
        return self.warps_m * self.warps_n * 32

    def shared_memory(self, bits: int, block: int) -> int:
        """Bytes of the stages, for values of `bits` bits and `block` of them under one scale."""
        return self.stages * stage_bytes(self.tile_m, self.tile_n, bits, block)

    def candidates(self, problem: BlockScaledProblem, device: Device) -> list[ScaledMmaConfig]:
        """Other tiles, stages and splits."""
        found = self._varied(splits=(self.splits // 2, self.splits * 2))
        one = problem.format
        return [each for each in found if each.shared_memory(one.code_bits, one.scale_size) < device.shared_memory]

    def launches(self, problem: BlockScaledProblem) -> list[Launch]:
        """One launch. With split-K each CTA writes its accumulators to a workspace, and the last one adds them up."""
        product = problem.product
        tiles = -(-product.m // self.tile_m) * -(-product.n // self.tile_n)
        splits = self.splits if tiles * self.splits <= 2**31 - 1 else 1
        partial: dict[str, Any] = {"partial": 0, "arrived": 0}
        if splits > 1 and tiles:
            partial["partial"] = Scratch(tiles * splits * self.tile_m * self.tile_n * 4)
            partial["arrived"] = Scratch(tiles * 4, zeroed=True)
        alpha, form = product.epilogue.a_scales, problem.format
        kernel = _dense.for_arch(product.device.arch_feature).renamed(
            out=product.epilogue.out.name,
            a=problem.a.name,
            b=problem.b.name,
            a_block_scales=problem.a_scales.name,
            b_block_scales=problem.b_scales.name,
            **({} if alpha is None else {"a_scales": alpha.name}),
        )
        a, b = Operand.of_rows(problem.a), Operand.of_rows(problem.b)
        launch = kernel(
            **product.constants() | self._constants(form.code_bits, form.scale_size, product.k),
            OUT_ACCESS=product.out_access,
            SPLITS=splits,
            GROUP_ROWS=_GROUP_ROWS,
        ).launch(
            (tiles, splits),
            self.num_threads,
            self.shared_memory(form.code_bits, form.scale_size),
            m=product.m,
            n=product.n,
            k=product.k * form.code_bits // 8,
            blocks=product.k // form.scale_size,
            a_stride=a.stride,
            b_stride=b.stride,
            out_stride=product.epilogue.arguments()["out_stride"],
            **partial,
            **({"a_scales": 0} if alpha is None else {}),
        )
        return [] if launch.empty else [launch]

    def _varied(self, **others: tuple[int, ...]) -> list[Any]:
        """Other tiles and stages, as far as the kernel has the geometry."""
        halves = {name: (size // 2, size * 2) for name, size in (("tile_m", self.tile_m), ("tile_n", self.tile_n))}
        return tuning.varied(self, **halves, stages=(self.stages - 1, self.stages + 1), **others)

    def _constants(self, bits: int, block: int, k: int) -> dict[str, Any]:
        return {
            "scalar_t": uint8,
            "QUANT_BITS": bits,
            "BLOCK": block,
            "WHOLE_WORDS": k % (_WORD * block) == 0,
            "VEC_SIZE": _ACCESS,
            "TILE_M": self.tile_m,
            "TILE_N": self.tile_n,
            "WARPS_M": self.warps_m,
            "WARPS_N": self.warps_n,
            "STAGES": self.stages,
            "MIN_BLOCKS": self.min_blocks,
        }


@dataclass(frozen=True, slots=True)
class GroupedScaledMmaConfig(ScaledMmaConfig):
    """The geometry of grouped_gemm_sm120, without split-K; tile_m is slots of the sorted token ids."""

    def candidates(self, problem: Any, device: Device) -> list[Any]:
        """Other tiles and stages."""
        weight, block_size = problem.weight, problem.product.lists.block_size
        return [
            one
            for one in self._varied()
            if block_size % one.tile_m == 0
            and one.shared_memory(weight.bits, weight.group_size) + 4 * one.tile_m <= device.shared_memory
        ]

    def launches(self, problem: Any) -> list[Launch]:
        """One CTA for each possible tile."""
        assert isinstance(problem, WqGroupedProblem)
        product, weight, rows = problem.product, problem.weight, problem.rows
        assert rows is not None
        row_bytes = product.k * weight.bits // 8
        tensors = {"a_block_scales": rows.scales, "b_block_scales": weight.scales, "scale_rows": rows.scale_rows}
        quantized = {"a": rows.quants, "b": weight.quants}
        kernel = product.kernel(_grouped.for_arch(problem.device.arch_feature), **quantized, **tensors)
        arguments = product.arguments(kernel, self.tile_m, **quantized, **tensors)
        launch = kernel(
            **product.constants() | self._constants(weight.bits, weight.group_size, product.k), GROUP=GROUP
        ).launch(
            product.max_tiles(self.tile_m) * -(-product.b_rows // self.tile_n),
            self.num_threads,
            self.shared_memory(weight.bits, weight.group_size),
            **arguments
            | {
                "k": row_bytes,
                "blocks": weight.groups,
                "num_scale_rows": rows.scales.shape[0],
                "a_stride": Operand.of_rows(rows.quants).stride,
                "b_stride": row_bytes,
            },
        )
        return [launch]


def stage_bytes(tile_m: int, tile_n: int, bits: int, block: int) -> int:
    """Bytes of a stage: k-tiles of both operands, and their scales."""
    return (tile_m + tile_n) * (K_TILE_BYTES + K_TILE_BYTES * 8 // bits // block)


def refusal(device: Device, is_aligned: bool) -> str | None:
    """Why gemm_sm120.cu does not multiply block-scaled operands."""
    if not device.supports("block_scaled_products"):
        return "the device has no mma.sync with block scales"
    return None if is_aligned else "rows of a or b not at multiples of 16 bytes, or scales not at multiples of 4"


def configs(m: int, n: int, k: int, bits: int, block: int, device: Device) -> Iterator[ScaledMmaConfig]:
    """Tiles that shared memory allows, each whole and with split-K while SMs would idle."""
    for tile_m, tile_n, warps_m, warps_n, blocks in _TILES:
        if tile_m > 16 and 2 * m <= tile_m:
            continue  # half of the tile would be padding
        most = (device.shared_memory // blocks - _OTHER_BYTES) // stage_bytes(tile_m, tile_n, bits, block)
        tiles, splits = -(-m // tile_m) * -(-n // tile_n), 1
        k_tiles = -(-k * bits // (8 * K_TILE_BYTES))
        while most >= 2:
            yield ScaledMmaConfig(tile_m, tile_n, warps_m, warps_n, min(_MAX_STAGES, most), blocks, splits)
            splits *= 2
            if splits > min(_MAX_SPLITS, k_tiles // _MIN_SPLIT_STEPS) or splits * tiles > 2 * device.num_sms:
                break


def grouped_configs(bits: int, block: int, block_size: int, device: Device) -> Iterator[GroupedScaledMmaConfig]:
    """The tiles that divide the blocks of the sorted lists, with as many stages as fit."""
    for tile_m, tile_n, warps_m, warps_n, blocks in _TILES:
        most = (device.shared_memory // blocks - _OTHER_BYTES) // stage_bytes(tile_m, tile_n, bits, block)
        if block_size % tile_m == 0 and most >= 2:
            yield GroupedScaledMmaConfig(tile_m, tile_n, warps_m, warps_n, min(_MAX_STAGES, most), blocks)


def loop_us(config: ScaledMmaConfig, tiles: int, k: int, bits: int, device: Device) -> float:
    """Microseconds of the busiest SM."""
    of_sm = -(-tiles * config.splits // device.num_sms)
    macs = config.tile_m * config.tile_n * -(-k // config.splits) * bits / 8
    return of_sm * (macs / _MACS_PER_US + _TILE_US)
