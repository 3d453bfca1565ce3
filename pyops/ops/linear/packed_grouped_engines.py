"""The kernels for grouped GEMMs with packed quantized weights: which shapes each of them serves, and their times.

They are those of `packed_engines` over the sorted lists of experts, and the times of their main loops are those of
`wq_grouped_engines`: a tile dequantizes its weights and multiplies them, in the one layout as in the other. The last
engine dequantizes the weights of all experts first and multiplies them by the grouped GEMM that `grouped_engines`
chooses; it serves every shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ...tuning.engines import Choice, Engine, overlapped
from . import dequantize_packed, grouped_engines, packed_large, packed_mma, packed_tile, wq_grouped_engines
from .expert_rows import gathered
from .gemm_problem import Operand
from .gemm_rates import num_clusters
from .grouped_problem import GroupedProblem
from .grouped_shape import GroupedShape
from .packed_engines import (
    cdna_refusal,
    hopper_refusal,
    large_experts_us,
    large_refusal,
    mma_refusal,
    written_us,
)
from .packed_hopper import PackedConfig, max_boxes
from .packed_large import PackedLargeConfig
from .packed_mma import TILE_N, PackedMmaConfig, choose_mma, fitting
from .packed_problem import PackedProblem
from .packed_shape import PackedShape
from .packed_tile import PackedTileConfig
from .wq_grouped_configs import SM90_TILES
from .wq_grouped_engines import NARROW, WqGroupedRates, k_tiles_us, padding_us

# Fewest warps of a block of wq_gemm_sm80.cu: one token of Mixtral takes 38.5 us, and with 2 warps 45.1 us.
_MIN_WARPS = 4
_MAX_PROMOTED_ROWS = 64  # W4A8 with float16 results: most rows of a tile, which holds its accumulators twice
_BLOCK_SIZES = 8, 16, 32, 48, 64, 96, 128, 160  # slots of a block of the sorted lists
# Block size if experts have rows for several blocks: 1700 us on an H200, against 1755 us with 160 slots.
_MANY_ROWS_BLOCK = 96
_FULL = 0.9  # a block is large enough if the mean rows of an expert fill at most this part of it


def block_size_of_packed(num_rows: int, num_experts: int, most: int = _BLOCK_SIZES[-1]) -> int:
    """The block size, up to `most`, with which `moe_align_block_size` should sort `num_rows` rows for packed weights.

    It is the smallest size that holds all rows of most experts, if there is one.
    """
    fits = (size for size in _BLOCK_SIZES if size <= most and num_rows < _FULL * size * max(1, num_experts))
    return next(fits, min(most, _MANY_ROWS_BLOCK))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedGroupedShape(GroupedShape):
    """The shape of the grouped GEMM with dequantized weights, and that of a GEMM with the weight of an expert.

    Attributes:
        weight: layout and format of the weight, and the epilogue.
    """

    weight: PackedShape

    @classmethod
    def of_problem(cls, problem: PackedProblem) -> PackedGroupedShape:
        dense = GroupedShape.of(_product(problem))
        return cls(**{one.name: getattr(dense, one.name) for one in fields(dense)}, weight=PackedShape.of(problem))

    def of_rows(self, rows: int) -> PackedGroupedShape:
        return replace(self, rows=rows * self.top_k, weight=self.weight.of_rows(rows))

    @property
    def mean_rows(self) -> int:
        """The expected rows of an expert that has any, a power of two."""
        return tuning.power_of_two(-(-self.rows // max(1, round(self.chosen_experts))))

    @property
    def nbytes(self) -> float:
        """Bytes of a, of the packed weights of experts that have rows, and of out."""
        rows = self.rows / self.top_k * self.k * self.weight.dense.dtype.itemsize
        out = self.rows * self.columns * self.out_dtype.itemsize
        return rows + self.chosen_experts * self.weight.weight_bytes + out


# wq_gemm_sm80.cu


def _sm80_refusal(shape: PackedGroupedShape, device: Device) -> str | None:
    return mma_refusal(shape.weight, device)


def _sm80_configs(shape: PackedGroupedShape, device: Device) -> Iterator[PackedMmaConfig]:
    """The tile has the expected number of rows of an expert."""
    weight, step = shape.weight, packed_mma.step_rows(shape.weight, TILE_N)
    steps, several = -(-shape.k // step), weight.groups_of(step) > 1
    experts, most = max(1, round(shape.chosen_experts)), 8 if shape.block_size % 16 else 16
    rows = max(8, shape.mean_rows)
    config = choose_mma(rows, TILE_N, shape.n, steps, device, several, experts, most, _MIN_WARPS)
    yield fitting(config, weight, device)


def _sm80_us(config: PackedMmaConfig, shape: PackedGroupedShape, device: Device, rates: WqGroupedRates) -> float:
    """A CTA for each tile; those of padding alone end at once, and wait for their first loads."""
    columns = shape.n // config.tile_n * config.splits
    tiles = round(shape.row_tiles(config.tile_m)) * columns
    of_sm = -(-tiles // (max(1, num_clusters(config.splits, device)) * config.splits))  # CTAs of the busiest SM
    code = rates.mma_marlin * rates.mma(shape.weight.type)
    if shape.weight.groups_of(packed_mma.step_rows(shape.weight, config.tile_n)) > 1:
        code *= rates.mma_groups
    loop = of_sm * config.tile_n * shape.k / config.splits * (code + rates.mma_row * config.tile_m)
    loop += padding_us(shape, device, rates, config.tile_m, columns, config.min_blocks)
    return rates.launch + overlapped(loop, shape.nbytes / rates.bytes_per_us)


# wq_gemm_sm80_large_m.cu


def _large_refusal(shape: PackedGroupedShape, device: Device) -> str | None:
    if shape.block_size % 16:
        return f"tiles of 16 rows do not divide {shape.block_size} slots of a block of the lists"
    return large_refusal(shape.weight, device)


def _large_configs(shape: PackedGroupedShape, device: Device) -> Iterator[PackedLargeConfig]:
    return packed_large.expert_configs(shape.weight, shape.block_size, device)


def _large_us(config: PackedLargeConfig, shape: PackedGroupedShape, device: Device, rates: WqGroupedRates) -> float:
    loop = large_experts_us(config, shape, shape.weight.weight_bytes / (shape.n * shape.k), device)
    return rates.launch + overlapped(loop, shape.nbytes / rates.bytes_per_us)


# wq_gemm_sm90.cu


def _sm90_refusal(shape: PackedGroupedShape, device: Device) -> str | None:
    if not shape.weight.format.of_experts:
        return f"experts in layout {shape.weight.layout}"
    if shape.block_size % 16:
        return f"tiles of 16 rows do not divide {shape.block_size} slots of a block of the lists"
    return hopper_refusal(shape.weight, device, whole=True)


def _sm90_configs(shape: PackedGroupedShape, device: Device) -> Iterator[PackedConfig]:
    """The tiles that divide blocks of the lists."""
    most = _MAX_PROMOTED_ROWS if shape.weight.promoted else max(SM90_TILES)
    for tile_m, tile_n in SM90_TILES.items():
        if shape.block_size % tile_m == 0 and tile_m <= most:
            yield PackedConfig(tile_m, tile_n, chunk=2, splits=1, min_blocks=1, boxes=max_boxes(shape.weight))


def _sm90_us(config: PackedConfig, shape: PackedGroupedShape, device: Device, rates: WqGroupedRates) -> float:
    """A launch gathers the rows. Every tile of a block of the lists is multiplied, also without rows."""
    weight = shape.weight
    # Values of 8 bits take as many instructions as those of 4.
    code = rates.wgmma_e2m1 if weight.is_e2m1 else rates.wgmma_uint4
    code *= rates.narrow if config.tile_n == NARROW else 1.0
    code = rates.wgmma_table if weight.is_table else code
    mma = (rates.wgmma_eight_bits if weight.is_table else 1.0) * rates.wgmma
    mma += rates.wgmma_promote if weight.promoted else 0.0
    is_short = config.boxes < weight.format.most_boxes
    return k_tiles_us(shape, device, rates, config.tile_m, config.tile_n, code, mma, is_short=is_short)


# wq_gemm_cdna.cu


def _cdna_refusal(shape: PackedGroupedShape, device: Device) -> str | None:
    if shape.block_size % 8:
        return f"tiles of 8 rows do not divide {shape.block_size} slots of a block of the lists"
    return cdna_refusal(shape.weight, device)


def _cdna_configs(shape: PackedGroupedShape, device: Device) -> Iterator[PackedTileConfig]:
    experts = max(1, round(shape.chosen_experts))
    yield packed_tile.choose(shape.mean_rows, shape.k, shape.n, device, experts, shape.block_size)


def _cdna_us(config: PackedTileConfig, shape: PackedGroupedShape, device: Device, rates: WqGroupedRates) -> float:
    return wq_grouped_engines.cdna_us(config, shape, device, rates, config.splits)


# dequantize_packed.cu, and a grouped GEMM


@dataclass(frozen=True, slots=True)
class DequantizePackedExpertsConfig:
    """The weights are dequantized to a workspace.

    Attributes:
        gemm: the Config of the grouped GEMM that follows.
    """

    gemm: Any

    def candidates(self, problem: PackedProblem, device: Device) -> list[DequantizePackedExpertsConfig]:
        """Other grouped GEMMs."""
        return [DequantizePackedExpertsConfig(one) for one in self.gemm.candidates(_product(problem), device)]

    def launches(self, problem: PackedProblem) -> list[Launch]:
        """The launches that dequantize the weights and upcast 8-bit activations, and the grouped GEMM."""
        upcast, a = dequantize_packed.activations(problem)
        product, weight = replace(_product(problem), a=a), problem.weight
        assert isinstance(product.b.source, Scratch)
        scales, exponent = _weight_scales(problem), problem.epilogue.scale_exponent
        if weight.scales is None:
            weight = replace(weight, scales=problem.epilogue.b_scales, scale_exponent=exponent)
        else:  # a_scales, one per weight or per row, take the exponent
            weight = replace(weight, scale_exponent=weight.scale_exponent + exponent)
        written = dequantize_packed.written(product.b.source, product.dtype, weight, product.num_experts, scales)
        return [*([written] if weight.k and product.b.rows else []), *upcast, self.gemm.launch(product)]


def _weight_scales(problem: PackedProblem) -> Any:
    """The scales of whole weights that are written into them; those of 8-bit activations are of rows."""
    return None if problem.a.dtype.itemsize == 1 else problem.epilogue.a_scales


def _product(problem: PackedProblem) -> GroupedProblem:
    """The grouped GEMM of dequantized weights, which hold all scales except those of the activations, and W4A8's of
    columns."""
    w, e, dtype, experts = problem.weight, problem.epilogue, problem.compute_dtype, problem.experts
    assert experts is not None
    rows = experts.num_experts * w.n
    return GroupedProblem(
        e.out,
        dequantize_packed.operand(problem),
        Operand.of_scratch(Scratch(max(1, rows * w.k) * dtype.itemsize), dtype, rows, w.k),
        experts.num_experts,
        w.k,
        experts.lists,
        experts.topk_weights,
        e.a_scales if problem.a.dtype.itemsize == 1 else None,
        e.b_scales if w.scale_kind == "products" else None,
        e.bias,
        experts.top_k,
        column_order=e.column_order,
    )


def _dequantize_configs(shape: PackedGroupedShape, device: Device) -> Iterator[DequantizePackedExpertsConfig]:
    yield DequantizePackedExpertsConfig(grouped_engines.choose.best(shape.dense, device).config)


def _dequantize_us(
    config: DequantizePackedExpertsConfig, shape: PackedGroupedShape, device: Device, rates: WqGroupedRates
) -> float:
    return written_us(shape.weight, device, shape.num_experts) + grouped_engines.choose.fastest(shape.dense, device).us


choose: Choice[PackedGroupedShape, WqGroupedRates] = Choice(
    PackedGroupedShape.of_problem,
    wq_grouped_engines.rates_of,
    Engine("wq_gemm_sm80.cu", _sm80_refusal, _sm80_configs, _sm80_us),
    Engine("wq_gemm_sm80_large_m.cu", _large_refusal, _large_configs, _large_us),
    Engine("wq_gemm_sm90.cu", _sm90_refusal, _sm90_configs, _sm90_us),
    Engine("wq_gemm_cdna.cu", _cdna_refusal, _cdna_configs, _cdna_us),
    Engine("dequantize_packed.cu", lambda shape, device: None, _dequantize_configs, _dequantize_us),
)


def plan(problem: PackedProblem) -> list[Launch]:
    """The launches of the kernel that is chosen, or forced by `tuning`, after the one that gathers activations."""
    weight, experts = problem.weight, problem.experts
    assert experts is not None
    if 0 in (problem.m, weight.n, experts.num_experts, experts.lists.num_blocks):
        return []
    if weight.k == 0:
        problem = replace(problem, weight=replace(weight, perm=None))
    config = tuning.config(problem.op, problem, problem.device, choose)
    launches, problem = _gathered(problem, by_place=isinstance(config, PackedConfig))
    return [*launches, *config.launches(problem)]


def _gathered(problem: PackedProblem, by_place: bool) -> tuple[list[Launch], PackedProblem]:
    """The launch that permutes the columns of the activations by `perm`, and the problem with these activations.

    Without `perm` there is no launch, unless the rows are to be gathered in the order of the sorted lists (`by_place`).
    """
    w, a, experts = problem.weight, problem.a, problem.experts
    assert experts is not None
    if w.perm is None and not by_place:
        return [], problem
    sizes = experts.num_experts, problem.m, experts.top_k, w.k
    gather, operand = gathered(a, experts.lists, *sizes, perm=w.perm, by_place=by_place)
    return [gather], replace(problem, a=operand, weight=replace(w, perm=None), experts=replace(experts, top_k=1))
