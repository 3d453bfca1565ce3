"""Prefill attention by WGMMA on compute capability 9.0: the geometry of prefill_sm90.cu."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from .prefill_items import TILE_US, ItemConfig, packed_heads
from .prefill_panels import Panels, map_of_codes
from .prefill_problem import PrefillProblem
from .prefill_work import ITEM_TILES, ShortItems, most_keys

_hopper = Kernel("attention/prefill_sm90.cu")

_BARRIER_BYTES = 8  # bytes of an mbarrier
_RESERVED_BYTES = 1024  # bytes of shared memory that the system reserves in each CTA
_STATIC_BYTES = 1024  # most bytes of static shared memory, aligned: work items and missing tokens
_MAX_STAGES = 4  # most stages of the K/V ring, and of the ring of fp8 tiles
MIN_CODE_STAGES = 2  # fewest stages of the ring of fp8 tiles
_FEW_ROWS_TILE_BYTES = 32 << 10  # bytes of a KV tile for few query rows: memory bounds them, so stages come first
_REGISTERS = {1: 168, 2: 192, 3: 120}  # {consumers: registers of a thread for logits, probabilities, accumulators}
_REGISTERS_ALONE = 192  # the same for one consumer warpgroup alone on an SM
_MAX_VALUE_SIZE_OF_TWO_CTAS = 192  # largest value size with two CTAs per SM: a WGMMA takes at most 128 registers there

# The model of short sequences: docs/performance/prefill.md, "Short sequences in small work items". Microseconds of a
# combine kernel; bytes that L2 gives an SM in a microsecond; the most time of small items next to that of large ones,
# which are measured for more batches.
COMBINE_US, _L2_BYTES_PER_US, _MOST_OF_LARGE = 3.7, 40e3, 0.9
_FP8_TILE = 2.4  # times of a KV tile of 16 bits that one of an fp8 cache takes in small work items
_MAX_VALUE_SIZE_OF_SHORT = 128  # largest value size with small work items
# Microseconds of a call before its first items, and of the launch of decode attention for sequences of one token.
_CALL_US, _SINGLE_ROWS_US = 1.0, 4.0


@dataclass(frozen=True, slots=True)
class PrefillSm90Config(ItemConfig):
    """The geometry of prefill_sm90.cu; the attributes are constants of the kernel. With one consumer warpgroup an SM
    has two CTAs, unless `alone`.

    Attributes:
        alone: the CTA of one warpgroup has all registers of an SM.
    """

    alone: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        has_consumers = self.consumers == 1 if self.alone else self.consumers in _REGISTERS
        if self.tokens % 16 or not 0 < self.tokens <= 256 or not has_consumers or self.max_splits < 1:
            raise ValueError(f"no geometry of prefill_sm90.cu: {self}")

    @property
    def min_blocks(self) -> int:
        """CTAs of an SM."""
        return 2 if self.consumers == 1 and not self.alone else 1

    def candidates(self, problem: PrefillProblem, device: Device) -> list[PrefillSm90Config]:
        """Other KV tiles and numbers of consumer warpgroups, as far as shared memory and registers suffice."""
        found = tuning.varied(self, tokens=(64, 80, 96, 112, 128, 160, 176, 192), consumers=_REGISTERS)
        return [one for one in found if one.fits(problem, device)]

    def fits(self, problem: PrefillProblem, device: Device) -> bool:
        """Whether two stages of keys and values fit into shared memory, and logits and accumulators into registers."""
        columns = panels_of(problem).value_columns(problem.value_size)
        registers = columns // 2 + self.tokens * (4 if problem.p_hi_lo else 3) // 4
        boxes = self.tokens // problem.box_tokens(self.tokens)
        has_rows = problem.group <= self.rows
        has_registers = registers <= (_REGISTERS_ALONE if self.alone else _REGISTERS[self.consumers])
        has_registers &= self.min_blocks == 1 or problem.value_size <= _MAX_VALUE_SIZE_OF_TWO_CTAS
        return has_rows and self._stages(problem, device)[0] >= 2 and has_registers and boxes <= 32

    def launch(self, problem: PrefillProblem, constants: dict[str, Any], arguments: dict[str, Any]) -> list[Launch]:
        """The grid, and the combine kernel of split-KV."""
        panels, device = panels_of(problem), problem.query.device
        own = {
            "HAS_SPLITS": self.max_splits > 1 or problem.p_hi_lo,
            "HAS_STARTS": problem.cu_seqlens_q is not None,
            "MIN_BLOCKS": self.min_blocks,
            "P_HI_LO": problem.p_hi_lo,
        }
        return self.launch_items(
            problem,
            _hopper.for_arch(device.arch_feature),
            problem.query,
            panels,
            map_of_codes if problem.is_fp8 else panels.map_of_cache,
            self._stages(problem, device),
            {name: value for name, value in constants.items() if name not in ("PACKED", "X")} | own,
            arguments,
        )

    def _stages(self, problem: PrefillProblem, device: Device) -> tuple[int, int, int, int]:
        """(stages of KV tiles, stages of queries, stages of fp8 tiles, bytes) of shared memory."""
        head_size, panels = problem.query.shape[2], panels_of(problem)
        key_bytes, value_bytes = panels.token_bytes(head_size), panels.token_bytes(problem.value_size)
        return stages_of(
            device,
            self.rows * key_bytes,
            self.tokens * (key_bytes + value_bytes),
            self.tokens * head_size * problem.is_fp8,
            _MAX_STAGES if problem.is_fp8 else MIN_CODE_STAGES,
            self.min_blocks,
        )


_SHORT = PrefillSm90Config(tokens=64, consumers=1)  # small work items


def stages_of(
    device: Device, query_bytes: int, tile_bytes: int, code_bytes: int, max_code_stages: int, min_blocks: int = 1
) -> tuple[int, int, int, int]:
    """(stages of KV tiles, stages of queries, stages of fp8 tiles, bytes) of shared memory.

    `query_bytes` are for the queries of a work item, `tile_bytes` for a tile of keys and one of values, `code_bytes`
    for one tile of fp8 values. An SM has `min_blocks` CTAs.
    """
    query, stage = query_bytes + 2 * _BARRIER_BYTES, tile_bytes + 4 * _BARRIER_BYTES
    code, fixed = code_bytes + 2 * _BARRIER_BYTES, 4 * _BARRIER_BYTES
    left = (device.shared_memory + _RESERVED_BYTES) // min_blocks - _RESERVED_BYTES
    left -= _STATIC_BYTES + fixed + query + MIN_CODE_STAGES * code
    # KV stages come first: docs/performance/prefill.md, "Three tiles and the queries of one item".
    stages = min(_MAX_STAGES, left // stage)
    left -= stages * stage
    code_stages = min(max_code_stages, MIN_CODE_STAGES + left // code)
    left -= (code_stages - MIN_CODE_STAGES) * code
    query_stages = 2 if query <= left else 1
    return stages, query_stages, code_stages, query_stages * query + stages * stage + code_stages * code + fixed


def panels_of(problem: PrefillProblem) -> Panels:
    """The panels of queries, keys and values. Those of an fp8 cache are converted in shared memory."""
    return Panels() if problem.is_fp8 or problem.layout.ragged else Panels.of(*problem.keys_and_values)


def choose(problem: PrefillProblem, device: Device) -> PrefillSm90Config:
    """The largest KV tile that fits, with split-KV."""
    one = _fitting(problem, device)
    splits = one.fastest_splits(problem, one.work(problem, device))
    if (splits > 1 or problem.p_hi_lo) and problem.value_size > 192 and not one.alone:
        # Split-KV scheduling costs the consumers registers: with a value size of 256, larger KV tiles would spill.
        has_registers = problem.has_plain_logits and problem.cu_seqlens_q is not None
        one = replace(one, tokens=min(one.tokens, 64 if has_registers else 48))
    return one.split(problem, device, splits)


def _fitting(problem: PrefillProblem, device: Device) -> PrefillSm90Config:
    """The largest KV tile that fits into registers and shared memory, without split-KV."""
    one = _choose_tile(problem, device)
    while not one.fits(problem, device):
        one = replace(one, tokens=one.tokens - 16)
    return one


def _choose_tile(problem: PrefillProblem, device: Device) -> PrefillSm90Config:
    """The largest KV tile that fits into registers next to the accumulators; more rows for small heads.

    Sequences of few query rows read the cache once whatever the geometry, so the one with the fewest MMAs is best.
    Those of one warpgroup are bound by memory. Short sequences leave rows of large work items unused, and each item has
    a fixed cost: two CTAs with small items on an SM may take less time.
    """
    head_size, value_size = problem.query.shape[2], problem.value_size
    if 0 < problem.few_rows <= 64:
        token_bytes = sum(map(panels_of(problem).token_bytes, (head_size, value_size)))
        alone = value_size > _MAX_VALUE_SIZE_OF_TWO_CTAS  # and has the shared memory of two CTAs
        tokens = (_FEW_ROWS_TILE_BYTES << alone) // token_bytes // 16 * 16
        few = PrefillSm90Config(min(128, tokens), 1, alone=alone)
        if few.fits(problem, device):
            return few
    many = _tile_of_many_rows(problem)
    may_be_short = value_size <= _MAX_VALUE_SIZE_OF_SHORT and not problem.few_rows and not tuning.batch_invariant()
    if not may_be_short or not _SHORT.fits(problem, device):
        return many
    return _SHORT if _time(problem, _SHORT, device) < _MOST_OF_LARGE * _time(problem, many, device) else many


def _tile_of_many_rows(problem: PrefillProblem) -> PrefillSm90Config:
    """The largest KV tile, and as many rows as registers allow."""
    head_size, value_size, is_plain = problem.query.shape[2], problem.value_size, problem.has_plain_logits
    if head_size <= 64:
        # Over an fp8 cache, whole rounds of the converting warps.
        tokens = 112 if is_plain and not problem.is_fp8 else 96
        return PrefillSm90Config(tokens=tokens, consumers=2 if problem.few_rows else 3)
    if value_size <= 128:
        if value_size == 96 and is_plain and not problem.few_rows:
            return PrefillSm90Config(tokens=96, consumers=3)
        # In tiles of half of a short sequence fewer keys are masked.
        half = 128 if tuning.batch_invariant() else -(-problem.expected_tokens // 32) * 16
        return PrefillSm90Config(tokens=min(128, max(64, half)), consumers=2)
    if value_size <= 192:
        return PrefillSm90Config(tokens=112 if is_plain else 96, consumers=2)
    if not panels_of(problem).whole_heads:
        return PrefillSm90Config(tokens=64 if is_plain else 48, consumers=2)
    return PrefillSm90Config(tokens=80 if is_plain else 64, consumers=2)


def _time(problem: PrefillProblem, config: PrefillSm90Config, device: Device) -> float:
    """The time of a call in microseconds: that of the longest work item, or of rounds of average ones.

    An item has a fixed cost and the MMAs of its KV tiles, or the bytes of its keys and values if L2 takes longer for
    those of all CTAs of an SM.
    """
    num_tokens, _, head_size = problem.query.shape
    rows, width, keys = config.rows, head_size + problem.value_size, float(problem.expected_tokens)
    tokens = min(keys, num_tokens / max(1, problem.num_seqs))  # query tokens of a sequence
    keys -= tokens / 2 if problem.causal else 0
    # The last item of a sequence is half full on average, and so is its last tile. A window ends within two tiles.
    seen = most_keys(problem, rows // packed_heads(problem, config))
    keys, part_tiles = (seen, 1.0) if seen < keys else (keys, 0.5)
    work = config.work(problem, device)._replace(mean=0.0)
    items = problem.num_seqs * problem.layout.num_kv_heads * max(1.0, tokens * problem.group / rows + 0.5)
    if problem.tokens_of_each and not problem.single_rows:
        items = work.items
    splits = config.fastest_splits(problem, work)
    tile_us = config.tile_us(problem)

    def item_us(tiles: float) -> float:
        return ITEM_TILES * TILE_US + max(1.0, tiles / splits) * tile_us

    l2_us = config.min_blocks * keys / splits * width * problem.layout.dtype.itemsize / _L2_BYTES_PER_US
    rounds = max(1.0, items * splits / work.slots)
    average_us = max(item_us(keys / config.tokens + part_tiles), l2_us)
    return max(rounds * average_us, item_us(work.tiles)) + (COMBINE_US if splits > 1 else 0.0)


def us_of_short(problem: PrefillProblem, device: Device) -> float:
    """The time of short sequences in small work items, next to that of `prefill_mma.us_of_short`; in large items where
    small ones do not fit."""
    one = _SHORT if _SHORT.fits(problem, device) else _fitting(problem, device)
    items, slots = ShortItems.of(problem, one.rows), one.min_blocks * device.num_sms
    tile_us = one.tile_us(problem) * (_FP8_TILE if problem.is_fp8 else 1.0)
    found = items.us(slots, ITEM_TILES * TILE_US, tile_us, one.tokens)
    return found + _CALL_US + (_SINGLE_ROWS_US if problem.single_rows else 0.0)
