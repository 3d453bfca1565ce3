"""The cost model of the prefill kernels: the work of a call, its time, and split-KV with the least time."""

from __future__ import annotations

from typing import NamedTuple

from .prefill_problem import PrefillProblem

_MAX_SPLITS = 128  # most splits of a work item if all have as many
_MOST_OF_MEAN = 4  # most splits of an item, as a multiple of the mean
_MIN_SPLIT_TILES = 4  # fewest KV tiles of a split: MIN_SPLIT_TILES of tile_splits.cuh
# In times of a KV tile: per work item, per combine, per empty work slot: docs/performance/prefill.md, "A work tile
# costs 3.2 us" and "An empty work slot costs 1.5 us".
ITEM_TILES, _JOIN_TILES, _NUMBER_TILES = 2, 2, 0.75
_TILES_OF_A_SPLIT = 0.025  # the combine of one more split: eight are loaded at once, in 0.35 us
_MOST_OF_UNSPLIT = 0.9  # most time with splits, as a part of that without, where lengths are a guess
_NO_WINDOW = 2**31 - 1  # sliding_window of kernels without a window


class Work(NamedTuple):
    """The work items of a call as the plan expects them: the lengths of the sequences are on the device.

    Attributes:
        items: work items, without splits.
        empty_items: numbers of work items without work.
        tiles: KV tiles of an item of the longest sequence.
        slots: CTAs that run at once.
        mean: KV tiles of an item on average; 0: all items have as many as the longest.
    """

    items: int
    empty_items: int
    tiles: int
    slots: int
    mean: float = 0.0

    def time(self, splits: int, tile: float = 1.0, unit: float = 1.0) -> float:
        """The time with `splits` splits of each item, if a KV tile takes `tile`, and other costs are in `unit`."""
        rounds, empty_rounds = (-(-count * splits // self.slots) for count in (self.items, self.empty_items))
        item_time = -(-self.tiles // splits) * tile + ITEM_TILES * unit
        all_time = rounds * item_time
        if self.mean:
            # The kernel rounds the splits of each item up, which adds half a split. No item has more than `splits` if
            # the longest split is that part of the longest item.
            part = min(self.mean / (splits - 0.5), self.tiles / splits)
            longest = self.tiles if splits == 1 else max(part, _MIN_SPLIT_TILES)
            mean_rounds = max(1.0, self.items * splits / self.slots)
            all_time = max(
                mean_rounds * (self.mean / splits * tile + ITEM_TILES * unit), longest * tile + ITEM_TILES * unit
            )
        join_time = (_JOIN_TILES + splits * _TILES_OF_A_SPLIT) * unit if splits > 1 else 0
        return all_time + join_time + empty_rounds * _NUMBER_TILES * unit

    def fastest_splits(self) -> int:
        """The number of splits of an item with the least time, at most those that the kernels make."""
        fastest = min(range(1, min(_MAX_SPLITS, self.most_splits) + 1), key=self.time)
        return fastest if not self.mean or self.time(fastest) < _MOST_OF_UNSPLIT * self.time(1) else 1

    def whole_waves(self, splits: int) -> int:
        """Splits of all items in as many waves as `splits` of each take."""
        return -(-self.items * splits // self.slots) * self.slots

    @property
    def most_splits(self) -> int:
        """The most splits of an item that the kernels make."""
        return max(1, self.tiles // _MIN_SPLIT_TILES)

    def splits_of_longest(self, splits: int) -> int:
        """The most splits of an item where items have `splits` on average, in proportion to their lengths."""
        return min(_MOST_OF_MEAN * splits, self.most_splits) if splits > 1 else 1


class ShortItems(NamedTuple):
    """The work items of sequences of unknown lengths, with at most as many keys as their block tables.

    Attributes:
        items: work items without those that are empty.
        keys: keys of an item, on average.
        part_tiles: KV tiles of an item on top of those that its keys fill, on average. A window begins and ends within
            a tile. Of sequences of one length, each has a last tile that is half full; most of mixed lengths have one
            tile.
    """

    items: float
    keys: float
    part_tiles: float

    @classmethod
    def of(cls, problem: PrefillProblem, item_rows: int, longest: bool = False) -> ShortItems:
        """The items of `item_rows` rows.

        The plan takes the geometric mean of new tokens and slots of the block table for the keys of a sequence, or all
        slots if `longest`.
        """
        tokens = problem.query.shape[0] / max(1, problem.num_seqs)
        most = problem.likely_tokens
        new = min(tokens, most)
        of_item = item_rows / problem.group
        seen = min(most, most_keys(problem, -(-item_rows // problem.group)))
        of_sequence = 1.0 if tokens <= of_item else tokens / of_item + 0.5  # the last item is half full on average
        keys = (new * most) ** 0.5 - (new - min(new, of_item)) / 2
        items = problem.num_seqs * problem.layout.num_kv_heads * of_sequence
        part_tiles = new / max(1, most) / 2 if keys <= seen else 1.0
        return cls(items, seen if longest else min(keys, seen), part_tiles)

    def us(self, slots: int, item_us: float, tile_us: float, tile_tokens: int) -> float:
        """The time if an item takes `item_us`, and `tile_us` for each KV tile; so many items run at once."""
        tiles = max(1.0, self.keys / tile_tokens + self.part_tiles)
        return max(1.0, self.items / slots) * (item_us + tiles * tile_us)


def most_keys(problem: PrefillProblem, item_tokens: int) -> int:
    """Keys that a work item of so many query tokens of the longest sequence attends to."""
    window, max_tokens = problem.options.sliding_window, problem.expected_tokens
    return min(max_tokens, window + item_tokens) if window > 0 else max_tokens


def count_kv_tiles(problem: PrefillProblem, item_tokens: int, tile_tokens: int) -> int:
    """KV tiles of a work item of the longest sequence."""
    return -(-most_keys(problem, item_tokens) // tile_tokens)


def count_tiles(problem: PrefillProblem, item_tokens: int) -> int:
    """Numbers of tiles of query tokens in prefill_scheduler.cuh. Each sequence may add one without tokens."""
    return problem.num_seqs + (problem.query.shape[0] // item_tokens if problem.cu_seqlens_q else 0)


def window_of(problem: PrefillProblem) -> int:
    """The sliding window as kernels take it."""
    return min(problem.options.sliding_window, _NO_WINDOW) or _NO_WINDOW
