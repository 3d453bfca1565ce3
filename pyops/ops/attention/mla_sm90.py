"""MLA decode by WGMMA on compute capability 9.0: the geometry of mla_decode_sm90.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.tensor_map import TensorMap
from ..._core.system.device import Device
from ..._core.tensors.tensor import TensorArg
from .mla_problem import ENTRY_SIZE, LATENT_SIZE, MlaProblem, arguments_of, constants_of
from .mla_schedule import MAX_SHARES, SM_BYTES_PER_US, choose_shares, head_groups

_decode = Kernel("attention/mla_decode_sm90.cu")

_HEADS = 64  # query heads of a block
_TOKENS = 64  # tokens of a KV tile
_PANEL_SIZE, _ROW_BYTES = 64, 128  # elements and bytes of a row of a panel: the 128-byte swizzle
_SHARED_BYTES = 3 * _TOKENS * ENTRY_SIZE * 2  # bytes: the queries and two KV tiles
# The cost model: us per pair of KV tiles. docs/performance/mla.md: 6500 cycles; entry by entry 7600; with conversion of
# fp8 7900.
_PAIR_US, _ROW_PAIR_US, _FP8_PAIR_US = 3.7, 4.3, 4.5
# The cost model: us of a block without its pairs of tiles, for a 16-bit cache, and for an fp8 cache in clusters of one
# and of two; bytes per us of partial results, which leave by bulk stores (docs/performance/mla.md, "Clock stamps").
_BLOCK_US, _FP8_BLOCK_US, _PARTIAL_RATE = 3.9, {1: 8.5, 2: 11.5}, 3.6e6


@dataclass(frozen=True, slots=True)
class MlaSm90Config:
    """The geometry of mla_decode_sm90.cu.

    Attributes:
        cluster: CTAs that share the dequantization of a KV tile: 1, or 2 for an "fp8_ds_mla" cache.
        num_shares: shares of the tokens of all sequences; a block for each, and for each 64 heads.
        combines: whether blocks combine the pieces of a sequence; otherwise mla_combine.cu does.
    """

    cluster: int
    num_shares: int
    combines: bool

    HEADS, BLOCKS, UNIT, split_ctas = _HEADS, 1, 2 * _TOKENS, 1
    WARPS, PARTIALS, PARTIAL_RATE, TREE_RATE = 8, LATENT_SIZE // 4 + 4, _PARTIAL_RATE, SM_BYTES_PER_US

    def candidates(self, problem: MlaProblem, device: Device) -> list[MlaSm90Config]:
        """Other clusters and numbers of shares."""
        del device
        found = tuning.varied(self, cluster=(1, 2) if _may_share(problem) else (1,))
        found += tuning.varied(self, combines=(False, True))
        return found + tuning.varied(self, num_shares=tuning.beside(self.num_shares, 1, MAX_SHARES))

    def block_us(self, problem: MlaProblem) -> float:
        """The time of a block without its units, in us."""
        return _FP8_BLOCK_US[self.cluster] if problem.is_fp8 else _BLOCK_US

    def unit_us(self, problem: MlaProblem, device: Device) -> float:
        """The time of a block for a pair of KV tiles, in us."""
        del device
        if problem.is_fp8:
            return _FP8_PAIR_US
        return _PAIR_US if _box_tokens(problem) > 1 else _ROW_PAIR_US

    def launch(self, problem: MlaProblem, arguments: dict[str, Any]) -> Launch:
        """A block for each share and each 64 heads."""
        cache, device = problem.cache, problem.cache.device
        box_tokens = _box_tokens(problem)
        has_half_boxes = 1 < box_tokens < _TOKENS
        pe_map = _map(problem.q_pe, _HEADS)
        panels = _map(cache, box_tokens) if box_tokens > 1 else pe_map  # without boxes nothing is loaded by it
        kernel = _decode.for_arch(device.arch_feature)(
            **constants_of(problem),
            BOX_TOKENS=box_tokens,
            CLUSTER=self.cluster,
            HALF_BOXES=has_half_boxes,
            COMBINES=self.combines,
        )
        grid = (head_groups(problem, self) // self.cluster, self.num_shares * self.cluster)
        return kernel.launch(
            grid,
            384,
            _SHARED_BYTES,
            nope_map=_map(problem.q_nope, _HEADS),
            pe_map=pe_map,
            cache_map=panels,
            half_map=_map_of_halves(cache, box_tokens) if has_half_boxes else panels,
            **arguments_of(problem),
            **arguments,
        )


def _box_tokens(problem: MlaProblem) -> int:
    """Tokens of a TMA box of latent KV; 1 where a warpgroup loads one token after another: from an fp8 cache, for lists
    of slots, and from pages that no box divides."""
    box_tokens = gcd(problem.cache.shape[1], _TOKENS)
    return 1 if problem.is_fp8 or problem.lists_slots or box_tokens % 8 else box_tokens


def _may_share(problem: MlaProblem) -> bool:
    """Whether two CTAs of a cluster may each dequantize half of a KV tile: with an "fp8_ds_mla" cache."""
    return -(-problem.num_heads // _HEADS) % 2 == 0 and problem.is_ds_mla


def _map(arg: TensorArg, rows: int) -> TensorMap:
    """The tensor map of a tensor with three dimensions; a box is `rows` rows and one panel."""
    return TensorMap.of(arg, (_PANEL_SIZE, rows, 1), _ROW_BYTES)


def _map_of_halves(cache: TensorArg, tokens: int) -> TensorMap:
    """The tensor map with boxes of half a latent vector (four panels) of some tokens. A box in shared memory is
    [tokens / 8, panels, 8 tokens, 64 elements]."""
    (num_pages, page_size, _), (page, slot, _), itemsize = cache.shape, cache.strides, cache.dtype.itemsize
    slot_bytes = slot * itemsize if page_size > 1 else ENTRY_SIZE * itemsize
    page_bytes = page * itemsize if num_pages > 1 else page_size * slot_bytes
    sizes = (_PANEL_SIZE, 8, ENTRY_SIZE // _PANEL_SIZE, page_size // 8, num_pages)
    strides = (slot_bytes, _ROW_BYTES, 8 * slot_bytes, page_bytes)
    box = (_PANEL_SIZE, 8, LATENT_SIZE // _PANEL_SIZE // 2, tokens // 8, 1)
    return TensorMap(cache, cache.dtype, sizes, strides, box, _ROW_BYTES)


def choose(problem: MlaProblem, device: Device) -> MlaSm90Config:
    """A block on every SM; clusters where two CTAs may share dequantization."""
    config = MlaSm90Config(2 if _may_share(problem) else 1, 1, combines=False)
    num_shares, combines = choose_shares(problem, config, device)
    return replace(config, num_shares=num_shares, combines=combines)
