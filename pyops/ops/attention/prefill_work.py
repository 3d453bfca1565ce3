"""The cost model of the prefill kernels: the work of a call, its time, and split-KV with the least time."""

from __future__ import annotations

from typing import NamedTuple

from .prefill_problem import PrefillProblem

_MAX_SPLITS = 32  # most splits of a work item
_MIN_SPLIT_TILES = 4  # fewest KV tiles of a split: MIN_SPLIT_TILES of tile_splits.cuh
# In times of a KV tile: per work item, per combine, per empty work slot: docs/performance/prefill.md, "A work tile
# costs 3.2 us" and "An empty work slot costs 1.5 us".
ITEM_TILES, _JOIN_TILES, _NUMBER_TILES = 2, 2, 0.75


class Work(NamedTuple):
    """The work items of a call as the plan expects them: the lengths of the sequences are on the device.

    Attributes:
        items: work items, without splits.
        empty_items: numbers of work items without work.
        tiles: KV tiles of an item of the longest sequence.
        slots: CTAs that run at once.
    """

    items: int
    empty_items: int
    tiles: int
    slots: int

    def time(self, splits: int, tile: float = 1.0, unit: float = 1.0) -> float:
        """The time with `splits` splits of each item, if a KV tile takes `tile`, and other costs are in `unit`."""
        rounds, empty_rounds = (-(-count * splits // self.slots) for count in (self.items, self.empty_items))
        item_time = -(-self.tiles // splits) * tile + ITEM_TILES * unit
        join_time = _JOIN_TILES * unit if splits > 1 else 0
        return rounds * item_time + join_time + empty_rounds * _NUMBER_TILES * unit

    def fastest_splits(self) -> int:
        """The number of splits of an item with the least time, at most those that the kernels make."""
        most = max(1, min(_MAX_SPLITS, self.tiles // _MIN_SPLIT_TILES))
        return min(range(1, most + 1), key=self.time)


def count_kv_tiles(problem: PrefillProblem, item_tokens: int, tile_tokens: int) -> int:
    """KV tiles of a work item of the longest sequence."""
    window, max_tokens = problem.options.sliding_window, problem.expected_tokens
    attended = min(max_tokens, window + item_tokens) if window > 0 else max_tokens
    return -(-attended // tile_tokens)
