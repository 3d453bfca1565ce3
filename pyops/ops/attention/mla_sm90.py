"""MLA decode by WGMMA on compute capability 9.0: the geometry of mla_decode_sm90.cu."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.tensor_map import TensorMap
from ..._core.system.device import Device
from ..._core.tensors.tensor import TensorArg
from .combine import CombineConfig, choose_combine, lanes_of
from .mla_problem import ENTRY_SIZE, LATENT_SIZE, MlaProblem

_decode = Kernel("attention/mla_decode_sm90.cu")

_HEADS = 64  # query heads of a block
_TOKENS = 64  # tokens of a KV tile
_PANEL_SIZE, _ROW_BYTES = 64, 128  # elements and bytes of a row of a panel: the 128-byte swizzle
_MAX_SPLITS = 128  # most splits of a sequence
_SHARED_BYTES = 3 * _TOKENS * ENTRY_SIZE * 2  # bytes: the queries and two KV tiles
# The cost model: us per pair of KV tiles, us per combine kernel, and bytes per us of partial results.
_PAIR_US, _JOIN_US, _BYTES_PER_US = 3.0, 3.0, 4.3e6


@dataclass(frozen=True, slots=True)
class MlaSm90Config:
    """The geometry of mla_decode_sm90.cu.

    Attributes:
        cluster: CTAs that share the dequantization of a KV tile: 1, or 2 for an "fp8_ds_mla" cache.
        max_splits: most splits of a sequence; a block takes one split.
        min_split: fewest tokens of a split; a multiple of SPLIT_UNIT.
        combine: the kernel that combines the splits.
    """

    cluster: int
    max_splits: int
    min_split: int
    combine: CombineConfig

    SPLIT_UNIT = _TOKENS

    def candidates(self, problem: MlaProblem, device: Device) -> list[MlaSm90Config]:
        """Other clusters and splits. The combine kernel stays: a tuning table cannot hold it."""
        found = tuning.varied(self, cluster=(1, 2) if _may_share(problem) else (1,))
        if problem.num_kv_splits <= 0:
            found += tuning.varied(self, max_splits=tuning.beside(self.max_splits, 1, _MAX_SPLITS))
        return found

    def launch(self, problem: MlaProblem, arguments: dict[str, Any]) -> Launch:
        """A block for each 64 heads of each split of each sequence."""
        cache, page_table, device = problem.cache, problem.page_table, problem.cache.device
        num_pages, page_size, _ = cache.shape
        box_tokens = 8 if problem.is_fp8 else gcd(page_size, _TOKENS)
        has_half_boxes = box_tokens < _TOKENS and not problem.is_fp8
        panels = _map(problem.q_pe if problem.is_fp8 else cache, box_tokens)  # fp8 latent KV is loaded without TMA
        kernel = _decode.for_arch(device.arch_feature)(
            query_t=problem.q_nope.dtype,
            cache_t=problem.cache_dtype,
            out_t=problem.out.dtype,
            length_t=problem.seq_lens.dtype,
            table_t=page_table.dtype,
            PAGE_SIZE=page_size,
            BOX_TOKENS=box_tokens,
            CLUSTER=self.cluster,
            HALF_BOXES=has_half_boxes,
            HAS_LSE=problem.lse is not None,
            IS_DS_MLA=problem.is_ds_mla,
        )
        grid = (problem.num_seqs * _groups(problem) // self.cluster, self.max_splits * self.cluster)
        return kernel.launch(
            grid,
            384,
            _SHARED_BYTES,
            nope_map=_map(problem.q_nope, _HEADS),
            pe_map=_map(problem.q_pe, _HEADS),
            cache_map=panels,
            half_map=_map_of_halves(cache, box_tokens) if has_half_boxes else panels,
            num_heads=problem.num_heads,
            num_pages=num_pages,
            page_stride=cache.strides[0],
            slot_stride=cache.strides[1],
            table_stride=page_table.strides[0],
            table_step=page_table.strides[1],
            **arguments,
        )


def _groups(problem: MlaProblem) -> int:
    """Blocks that share the heads of a sequence."""
    return -(-problem.num_heads // _HEADS)


def _may_share(problem: MlaProblem) -> bool:
    """Whether two CTAs of a cluster may each dequantize half of a KV tile: with an "fp8_ds_mla" cache."""
    return _groups(problem) % 2 == 0 and problem.is_ds_mla


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
    """The number of splits with the least time by the cost model; clusters where two CTAs may share dequantization."""
    blocks = problem.num_seqs * _groups(problem)
    tiles = -(-problem.max_tokens // _TOKENS)

    split_bytes = 2 * 4 * problem.num_seqs * problem.num_heads * LATENT_SIZE  # partials, written and read

    def time(splits: int) -> float:
        pairs = -(-tiles // splits // 2) + 1
        alone = -(-blocks * splits // device.num_sms) * pairs * _PAIR_US
        return alone + (_JOIN_US + splits * split_bytes / _BYTES_PER_US if splits > 1 else 0.0)

    wanted = problem.num_kv_splits
    max_splits = wanted if wanted > 0 else min(range(1, _MAX_SPLITS + 1), key=time)
    max_splits = max(1, min(max_splits, tiles))
    lanes = lanes_of(LATENT_SIZE, problem.combine_width, device)
    combine = choose_combine(problem.num_seqs, problem.num_heads, max_splits, lanes, device)
    return MlaSm90Config(2 if _may_share(problem) else 1, max_splits, _TOKENS, combine)
