"""Prefill attention by WGMMA on compute capability 9.0: the geometry of prefill_sm90.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from .decode_launch import workspace
from .prefill_panels import Panels, map_of_codes
from .prefill_problem import PrefillProblem
from .prefill_work import ITEM_TILES, ShortItems, Work, count_kv_tiles, count_tiles, most_keys, window_of

_hopper = Kernel("attention/prefill_sm90.cu")
_combine = Kernel("attention/prefill_combine.cu")

_BARRIER_BYTES = 8  # bytes of an mbarrier
_RESERVED_BYTES = 1024  # bytes of shared memory that the system reserves in each CTA
_STATIC_BYTES = 1024  # most bytes of static shared memory, aligned: work items and missing tokens
_MAX_STAGES = 4  # most stages of the K/V ring, and of the ring of fp8 tiles
MIN_CODE_STAGES = 2  # fewest stages of the ring of fp8 tiles
_ANY_SPLITS = 2**31 - 1  # splits without a limit
_JOIN_WARPS = 8  # warps of a block of prefill_combine.cu; each combines one row
_LONG_PROMPT = 1 << 20  # query tokens of a sequence that counts as long
# Bytes of keys and values of the heads with work items that run at once: docs/performance/prefill.md, "Sections of
# heads".
_SECTION_BYTES = 24 << 20
_FEW_ROWS_TILE_BYTES = 32 << 10  # bytes of a KV tile for few query rows: memory bounds them, so stages come first
_REGISTERS = {1: 168, 2: 192, 3: 120}  # {consumers: registers of a thread for logits, probabilities, accumulators}
_REGISTERS_ALONE = 192  # the same for one consumer warpgroup alone on an SM
_MAX_VALUE_SIZE_OF_TWO_CTAS = 192  # largest value size with two CTAs per SM: a WGMMA takes at most 128 registers there

# The model of short sequences: docs/performance/prefill.md, "Short sequences in small work items". Microseconds of a
# KV tile of 128 keys and 128 rows of 128 elements, and of a combine kernel; bytes that L2 gives an SM in a microsecond;
# the most time of small items next to that of large ones, which are measured for more batches.
_TILE_US, COMBINE_US, _L2_BYTES_PER_US, _LEAST_GAIN = 1.83, 3.7, 40e3, 0.9
_MAX_VALUE_SIZE_OF_SHORT = 128  # largest value size with small work items
# Microseconds of a call before its first items, and of the launch of decode attention for sequences of one token.
_CALL_US, _SINGLE_ROWS_US = 1.0, 4.0


@dataclass(frozen=True, slots=True)
class PrefillSm90Config:
    """The geometry of prefill_sm90.cu; the attributes are constants of the kernel.

    Attributes:
        tokens: keys of a KV tile.
        consumers: consumer warpgroups, each with 64 rows of queries. With one, an SM has two CTAs, unless `alone`.
        max_splits: split-KV: most splits of a work item; a CTA takes one split.
        splits: splits of all work items that the kernel aims at; it gives each item splits in proportion to its keys.
        alone: the CTA of one warpgroup has all registers of an SM.
    """

    tokens: int
    consumers: int
    max_splits: int = 1
    splits: int = _ANY_SPLITS
    alone: bool = False

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
        has_rows = problem.group <= 64 * self.consumers
        has_registers = registers <= (_REGISTERS_ALONE if self.alone else _REGISTERS[self.consumers])
        has_registers &= self.min_blocks == 1 or problem.value_size <= _MAX_VALUE_SIZE_OF_TWO_CTAS
        return has_rows and self._stages(problem, device)[0] >= 2 and has_registers and boxes <= 32

    def launch(self, problem: PrefillProblem, constants: dict[str, Any], arguments: dict[str, Any]) -> list[Launch]:
        """A persistent grid: one or two CTAs per SM take work items from a counter. With split-KV a second kernel
        combines the splits."""
        device, query, layout = problem.query.device, problem.query, problem.layout
        num_tokens, num_heads, _ = query.shape
        heads = packed_heads(problem, 64 * self.consumers, self.tokens)
        item_tokens = 64 * self.consumers // heads
        stages, query_stages, code_stages, shared = self._stages(problem, device)
        box_tokens = problem.box_tokens(self.tokens)
        caches = problem.keys_and_values
        is_fp8 = problem.is_fp8
        panels = panels_of(problem)
        map_cache = map_of_codes if is_fp8 else panels.map_of_cache
        kernel = _hopper.for_arch(device.arch_feature)
        num_tiles = count_tiles(problem, item_tokens)
        num_items = num_tiles * (num_heads // heads)
        has_splits = self.max_splits > 1
        arguments = arguments | {
            **workspace(num_tokens * num_heads * self.max_splits if has_splits else 0, problem.value_size),
            "split_counts": Scratch(4 * num_tokens * num_heads, zeroed=True) if has_splits else 0,
            "max_splits": self.max_splits,
            "num_tokens": num_tokens,
            "num_kv_heads": layout.num_kv_heads,
            "section_heads": section_heads(problem, device, num_tiles) * problem.group // heads,
            "sliding_window": window_of(problem),
        }
        attend = kernel(
            **{name: value for name, value in constants.items() if name not in ("PACKED", "X")},
            HAS_SPLITS=has_splits or problem.p_hi_lo,
            HAS_STARTS=problem.cu_seqlens_q is not None,
            TOKENS=self.tokens,
            CONSUMERS=self.consumers,
            PACKED_HEADS=heads,
            BOX_TOKENS=box_tokens,
            WHOLE_HEADS=panels.whole_heads,
            STAGES=stages,
            QUERY_STAGES=query_stages,
            CODE_STAGES=code_stages,
            MIN_BLOCKS=self.min_blocks,
            P_HI_LO=problem.p_hi_lo,
        ).launch(
            min(num_items * self.max_splits, self.min_blocks * device.num_sms),
            128 * (self.consumers + 1),
            shared,
            **kernel.taken(arguments),
            query_map=panels.map_of_queries(query, heads, item_tokens),
            key_map=map_cache(caches[0], box_tokens),
            value_map=map_cache(caches[1], box_tokens),
            key_head_pitch=panels.head_pitch(caches[0]),
            value_head_pitch=panels.head_pitch(caches[1]),
            num_items=min(num_items * self.max_splits, self.splits),
            items_taken=Scratch(4, zeroed=True),
        )
        if not has_splits:
            return [attend]
        combine = _combine(**{name: constants[name] for name in ("scalar_t", "VALUE_SIZE", "HAS_SINKS", "HAS_LSE")})
        grid = -(-num_tokens * num_heads // _JOIN_WARPS)
        taken = _combine.taken(arguments | {"num_heads": num_heads})
        return [attend, combine.launch(grid, 32 * _JOIN_WARPS, **taken)]

    def _stages(self, problem: PrefillProblem, device: Device) -> tuple[int, int, int, int]:
        """(stages of KV tiles, stages of queries, stages of fp8 tiles, bytes) of shared memory."""
        head_size, panels = problem.query.shape[2], panels_of(problem)
        key_bytes, value_bytes = panels.token_bytes(head_size), panels.token_bytes(problem.value_size)
        return stages_of(
            device,
            64 * self.consumers * key_bytes,
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
    """The largest KV tile that fits; split-KV where there are fewer work items than SMs, and to fill the last wave of
    sequences of few query rows."""
    one = _fitting(problem, device)
    splits = choose_splits(problem, 64 * one.consumers, one.tokens, device, one.min_blocks)
    if (splits > 1 or problem.p_hi_lo) and problem.value_size > 192 and not one.alone:
        # Split-KV scheduling costs the consumers registers: with a value size of 256, larger KV tiles would spill.
        has_registers = problem.has_plain_logits and problem.cu_seqlens_q is not None
        one = replace(one, tokens=min(one.tokens, 64 if has_registers else 48))
    if splits == 1:
        return one
    work = work_of(problem, 64 * one.consumers, one.tokens, device, one.min_blocks)
    most = work.splits_of_longest(splits) if problem.num_seqs > 1 else splits
    return replace(one, max_splits=most, splits=splits * work.items)


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
    return _SHORT if _time(problem, _SHORT, device) < _LEAST_GAIN * _time(problem, many, device) else many


def _tile_of_many_rows(problem: PrefillProblem) -> PrefillSm90Config:
    """The largest KV tile, and as many rows as registers allow."""
    head_size, value_size, is_plain = problem.query.shape[2], problem.value_size, problem.has_plain_logits
    if head_size <= 64:
        return PrefillSm90Config(tokens=112 if is_plain else 96, consumers=2 if problem.few_rows else 3)
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
    rows, width, keys = 64 * config.consumers, head_size + problem.value_size, float(problem.expected_tokens)
    tokens = min(keys, num_tokens / max(1, problem.num_seqs))  # query tokens of a sequence
    keys -= tokens / 2 if problem.causal else 0
    # The last item of a sequence is half full on average, and so is its last tile. A window ends within two tiles.
    seen = most_keys(problem, rows // packed_heads(problem, rows, config.tokens))
    keys, part_tiles = (seen, 1.0) if seen < keys else (keys, 0.5)
    work = work_of(problem, rows, config.tokens, device, config.min_blocks)
    items = problem.num_seqs * problem.layout.num_kv_heads * max(1.0, tokens * problem.group / rows + 0.5)
    if problem.tokens_of_each and not problem.single_rows:
        items = work.items
    splits = choose_splits(problem, rows, config.tokens, device, config.min_blocks)
    tile_us = _tile_us(config, width)

    def item_us(tiles: float) -> float:
        return ITEM_TILES * _TILE_US + max(1.0, tiles / splits) * tile_us

    l2_us = config.min_blocks * keys / splits * width * problem.layout.dtype.itemsize / _L2_BYTES_PER_US
    rounds = max(1.0, items * splits / work.slots)
    average_us = max(item_us(keys / config.tokens + part_tiles), l2_us)
    return max(rounds * average_us, item_us(work.tiles)) + (COMBINE_US if splits > 1 else 0.0)


def us_of_short(problem: PrefillProblem, device: Device) -> float:
    """The time of short sequences in small work items, next to that of `prefill_mma.us_of_short`; in large items where
    small ones do not fit."""
    one = _SHORT if _SHORT.fits(problem, device) else _fitting(problem, device)
    rows, width = 64 * one.consumers, problem.query.shape[2] + problem.value_size
    items, slots = ShortItems.of(problem, rows), one.min_blocks * device.num_sms
    found = items.us(slots, ITEM_TILES * _TILE_US, _tile_us(one, width), one.tokens)
    return found + _CALL_US + (_SINGLE_ROWS_US if problem.single_rows else 0.0)


def _tile_us(config: PrefillSm90Config, width: int) -> float:
    """Microseconds of the MMAs of a KV tile, in all CTAs of an SM, with so many elements of a key and a value."""
    return _TILE_US * config.min_blocks * 64 * config.consumers * config.tokens * width / (128 * 128 * 256)


def section_heads(problem: PrefillProblem, device: Device, num_tiles: int) -> int:
    """Key-value heads of a section of work items: as many as fit into the L2 cache if a sequence is as long as its
    block table allows, but at least two waves of items, so that long items start before short ones."""
    layout, elements = problem.layout, problem.query.shape[2] + problem.value_size
    head_bytes = problem.expected_tokens * elements * layout.dtype.itemsize
    heads = max(_SECTION_BYTES // max(1, head_bytes), -(-2 * device.num_sms // max(1, num_tiles)))
    return max(1, min(layout.num_kv_heads, heads))


def packed_heads(problem: PrefillProblem, item_rows: int, tile_tokens: int) -> int:
    """Query heads of a work item: the divisor of the heads of a KV head with the least time by the cost model.

    All heads share the keys of few tokens, but may leave rows of a work item unused: 2 tokens of 71 heads are 142 of
    192 rows. Fewer heads mean more tokens, and more masked keys beyond the diagonal.
    """
    group, num_tokens = problem.group, problem.query.shape[0]
    if problem.few_rows or problem.p_hi_lo:
        return group
    # The lengths are on the device. If results may not depend on the other sequences, each counts as long.
    tokens = _LONG_PROMPT if tuning.batch_invariant() else num_tokens / max(1, problem.num_seqs)

    def time(heads: int) -> float:
        item_tokens = item_rows // heads
        items = group // heads * (tokens / item_tokens + 0.5)  # the last item of a sequence is half full on average
        keys = (tokens + item_tokens) / 2 if problem.causal else tokens
        return items * (keys / tile_tokens + ITEM_TILES)

    divisors = [heads for heads in range(group, 0, -1) if group % heads == 0 and heads <= item_rows]
    return min(divisors, key=time)


def choose_splits(
    problem: PrefillProblem, item_rows: int, tile_tokens: int, device: Device, min_blocks: int = 1
) -> int:
    """The number of splits of a work item with the least time by the cost model. An SM has `min_blocks` CTAs."""
    work = work_of(problem, item_rows, tile_tokens, device, min_blocks)
    is_full = min_blocks == 1 and work.items >= work.slots and not problem.few_rows
    return 1 if is_full or tuning.batch_invariant() else work.fastest_splits()


def work_of(problem: PrefillProblem, item_rows: int, tile_tokens: int, device: Device, min_blocks: int) -> Work:
    """The work of a persistent grid with `min_blocks` CTAs per SM. Each sequence may add one item that is empty."""
    heads, (num_tokens, num_heads, _) = packed_heads(problem, item_rows, tile_tokens), problem.query.shape
    item_tokens, num_groups = item_rows // heads, num_heads // heads
    if problem.single_rows:
        num_tokens = max(0, num_tokens - problem.num_seqs)
    items, empty_items = -(-num_tokens // item_tokens) * num_groups, problem.num_seqs * num_groups
    if problem.tokens_of_each and not problem.single_rows:
        items = problem.num_seqs * -(-problem.tokens_of_each // item_tokens) * num_groups
        empty_items = max(0, count_tiles(problem, item_tokens) * num_groups - items)
    kv_tiles = count_kv_tiles(problem, item_tokens, tile_tokens)
    return Work(items, empty_items, kv_tiles, min_blocks * device.num_sms)
