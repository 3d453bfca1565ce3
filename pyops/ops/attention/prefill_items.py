"""The work items of prefill_sm90.cu and prefill_sm90_fp8.cu: their heads, their splits, and the launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.launch.tensor_map import TensorMap
from ..._core.system.device import Device
from ..._core.tensors.tensor import TensorArg
from .decode_launch import workspace
from .prefill_panels import Panels
from .prefill_problem import PrefillProblem
from .prefill_work import ITEM_TILES, Work, count_kv_tiles, count_tiles, window_of

_combine = Kernel("attention/prefill_combine.cu")

# Microseconds of a KV tile of 128 keys and 128 rows of 128 elements: docs/performance/prefill.md, "A work tile costs
# 3.2 us".
TILE_US = 1.83
_ANY_SPLITS = 2**31 - 1  # splits without a limit
_JOIN_WARPS = 8  # warps of a block of prefill_combine.cu; each combines one row
_LONG_PROMPT = 1 << 20  # query tokens of a sequence that counts as long
# Bytes of keys and values of the heads with work items that run at once: docs/performance/prefill.md, "Sections of
# heads".
_SECTION_BYTES = 24 << 20


@dataclass(frozen=True, slots=True)
class ItemConfig:
    """The geometry of the work items of a persistent grid.

    Attributes:
        tokens: keys of a KV tile.
        consumers: consumer warpgroups, each with 64 rows of queries.
        max_splits: split-KV: most splits of a work item; a CTA takes one split.
        splits: the most splits of all work items; the kernel gives each item splits in proportion to its keys.
    """

    tokens: int
    consumers: int
    max_splits: int = field(default=1, kw_only=True)
    splits: int = field(default=_ANY_SPLITS, kw_only=True)

    @property
    def rows(self) -> int:
        """Rows of a work item: query tokens times heads."""
        return 64 * self.consumers

    @property
    def min_blocks(self) -> int:
        """CTAs of an SM."""
        return 1

    @property
    def rate(self) -> float:
        """The rate of the MMAs as a multiple of that of 16-bit operands."""
        return 1.0

    def tile_us(self, problem: PrefillProblem) -> float:
        """Microseconds of the MMAs of a KV tile, in all CTAs of an SM."""
        width = problem.query.shape[2] + problem.value_size
        return TILE_US * self.min_blocks * self.rows * self.tokens * width / (128 * 128 * 256) / self.rate

    def us(self, problem: PrefillProblem, device: Device) -> float:
        """The time of a call by the cost model of split-KV."""
        work = self.work(problem, device)
        splits = min(self.max_splits, max(1, self.splits // work.items))
        return work.time(splits, self.tile_us(problem), TILE_US)

    def work(self, problem: PrefillProblem, device: Device) -> Work:
        """The work of the grid, without splits. Each sequence may add one item that is empty."""
        heads, (num_tokens, num_heads, _) = packed_heads(problem, self), problem.query.shape
        item_tokens, num_groups = self.rows // heads, num_heads // heads
        if problem.single_rows:
            num_tokens = max(0, num_tokens - problem.num_seqs)
        items, empty_items = -(-num_tokens // item_tokens) * num_groups, problem.num_seqs * num_groups
        if problem.tokens_of_each and not problem.single_rows:
            items = problem.num_seqs * -(-problem.tokens_of_each // item_tokens) * num_groups
            empty_items = max(0, count_tiles(problem, item_tokens) * num_groups - items)
        kv_tiles = count_kv_tiles(problem, item_tokens, self.tokens)
        mean = kv_tiles / 2 if problem.is_mixed else 0.0
        return Work(items, empty_items, kv_tiles, self.min_blocks * device.num_sms, mean)

    def fastest_splits(self, problem: PrefillProblem, work: Work) -> int:
        """The splits of a work item with the least time by the cost model: more than one where there are fewer items
        than CTAs, and to fill the last wave of sequences of few query rows."""
        is_full = self.min_blocks == 1 and work.items >= work.slots and not problem.few_rows
        return 1 if is_full or tuning.batch_invariant() else work.fastest_splits()

    def split(self, problem: PrefillProblem, device: Device, splits: int) -> Self:
        """The geometry with so many splits of a work item on average."""
        if splits == 1:
            return self
        work = self.work(problem, device)
        most = work.splits_of_longest(splits) if problem.num_seqs > 1 else splits
        return replace(self, max_splits=most, splits=work.whole_waves(splits))

    def launch_items(
        self,
        problem: PrefillProblem,
        kernel: Kernel,
        queries: TensorArg,
        panels: Panels,
        map_of_cache: Callable[[TensorArg, int], TensorMap],
        stages: tuple[int, int, int, int],
        constants: dict[str, Any],
        arguments: dict[str, Any],
    ) -> list[Launch]:
        """A persistent grid: one or two CTAs per SM take work items from a counter. With split-KV a second kernel
        combines the splits.

        Args:
            stages: those of KV tiles, queries and fp8 tiles, and the bytes of shared memory.
            constants: those of the kernel, without the ones that all such kernels have.
        """
        device, (num_tokens, num_heads, _) = queries.device, queries.shape
        heads, caches = packed_heads(problem, self), problem.keys_and_values
        item_tokens, box_tokens = self.rows // heads, problem.box_tokens(self.tokens)
        num_tiles, has_splits = count_tiles(problem, item_tokens), self.max_splits > 1
        num_items = num_tiles * (num_heads // heads) * self.max_splits
        num_stages, query_stages, code_stages, shared = stages
        arguments = arguments | {
            **workspace(num_tokens * num_heads * self.max_splits if has_splits else 0, problem.value_size),
            "split_counts": Scratch(4 * num_tokens * num_heads, zeroed=True) if has_splits else 0,
            "max_splits": self.max_splits,
            "num_tokens": num_tokens,
            "num_heads": num_heads,
            "num_kv_heads": problem.layout.num_kv_heads,
            "section_heads": section_heads(problem, device, num_tiles) * problem.group // heads,
            "sliding_window": window_of(problem),
        }
        of_items = {
            "HAS_SPLITS": has_splits,
            "TOKENS": self.tokens,
            "CONSUMERS": self.consumers,
            "PACKED_HEADS": heads,
            "BOX_TOKENS": box_tokens,
            "WHOLE_HEADS": panels.whole_heads,
            "STAGES": num_stages,
            "QUERY_STAGES": query_stages,
            "CODE_STAGES": code_stages,
        }
        attend = kernel(**of_items | constants).launch(
            min(num_items, self.min_blocks * device.num_sms),
            128 * (self.consumers + 1),
            shared,
            **kernel.taken(arguments),
            query_map=panels.map_of_queries(queries, heads, item_tokens),
            key_map=map_of_cache(caches[0], box_tokens),
            value_map=map_of_cache(caches[1], box_tokens),
            key_head_pitch=panels.head_pitch(caches[0]),
            value_head_pitch=panels.head_pitch(caches[1]),
            num_items=min(num_items, self.splits),
            items_taken=Scratch(4, zeroed=True),
        )
        if not has_splits:
            return [attend]
        combine = _combine(**{name: constants[name] for name in ("scalar_t", "VALUE_SIZE", "HAS_SINKS", "HAS_LSE")})
        grid = -(-num_tokens * num_heads // _JOIN_WARPS)
        return [attend, combine.launch(grid, 32 * _JOIN_WARPS, **_combine.taken(arguments))]


def section_heads(problem: PrefillProblem, device: Device, num_tiles: int) -> int:
    """Key-value heads of a section of work items: as many as fit into the L2 cache if a sequence is as long as its
    block table allows, but at least two waves of items, so that long items start before short ones."""
    layout, elements = problem.layout, problem.query.shape[2] + problem.value_size
    head_bytes = problem.expected_tokens * elements * layout.dtype.itemsize
    heads = max(_SECTION_BYTES // max(1, head_bytes), -(-2 * device.num_sms // max(1, num_tiles)))
    return max(1, min(layout.num_kv_heads, heads))


def packed_heads(problem: PrefillProblem, config: ItemConfig) -> int:
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
        item_tokens = config.rows // heads
        items = group // heads * (tokens / item_tokens + 0.5)  # the last item of a sequence is half full on average
        keys = (tokens + item_tokens) / 2 if problem.causal else tokens
        return items * (keys / config.tokens + ITEM_TILES)

    divisors = [heads for heads in range(group, 0, -1) if group % heads == 0 and heads <= config.rows]
    return min(divisors, key=time)
