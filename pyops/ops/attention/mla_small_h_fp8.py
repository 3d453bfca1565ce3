"""MLA decode of at most 16 heads with an fp8 cache: the geometry of mla_decode_small_h_fp8.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from .combine import CombineConfig, choose_combine, lanes_of
from .mla_problem import ENTRY_SIZE, LATENT_SIZE, MlaProblem, arguments_of, constants_of

_decode = Kernel("attention/mla_decode_small_h_fp8.cu")

_HEADS, _TOKENS = 16, 64  # query heads of a block, tokens of a KV tile
_NUM_THREADS, _BLOCKS = 128, 2  # threads of a block, blocks per SM
_MAX_SPLITS = 128  # most splits of a sequence
SHARED_MEMORY = _HEADS * ENTRY_SIZE * 2 + _HEADS * (_TOKENS * 2 + 16) + 2 * _TOKENS * ENTRY_SIZE  # bytes of a block
# The cost model: us per KV tile, us per block, us per combine kernel, and bytes per us of partial results.
_TILE_US, _START_US, _JOIN_US, _BYTES_PER_US = 2.2, 4.0, 3.0, 4.3e6


@dataclass(frozen=True, slots=True)
class CodesConfig:
    """The geometry of mla_decode_small_h_fp8.cu.

    Attributes:
        max_splits: most splits of a sequence; a block takes one split.
        min_split: fewest tokens of a split; a multiple of SPLIT_UNIT.
        combine: the kernel that combines the splits.
    """

    max_splits: int
    min_split: int
    combine: CombineConfig

    SPLIT_UNIT = _TOKENS

    def candidates(self, problem: MlaProblem, device: Device) -> list[CodesConfig]:
        """Other splits. The combine kernel stays: a tuning table cannot hold it."""
        del device
        if problem.num_kv_splits > 0:
            return []
        return tuning.varied(self, max_splits=tuning.beside(self.max_splits, 1, _MAX_SPLITS))

    def launch(self, problem: MlaProblem, arguments: dict[str, Any]) -> Launch:
        """A block for each split of each sequence."""
        kernel = _decode(
            **constants_of(problem),
            IS_DS_MLA=False,
        )
        return kernel.launch(
            (problem.num_seqs, self.max_splits),
            _NUM_THREADS,
            SHARED_MEMORY,
            **arguments_of(problem),
            **arguments,
        )


def choose(problem: MlaProblem, device: Device) -> CodesConfig:
    """The number of splits with the least time by the cost model."""
    tiles = -(-problem.max_tokens // _TOKENS)
    split_bytes = 2 * 4 * problem.num_seqs * problem.num_heads * LATENT_SIZE  # partials, written and read

    def time(splits: int) -> float:
        rounds = -(-problem.num_seqs * splits // (_BLOCKS * device.num_sms))
        alone = rounds * (-(-tiles // splits) * _TILE_US + _START_US)
        return alone + (_JOIN_US + splits * split_bytes / _BYTES_PER_US if splits > 1 else 0.0)

    wanted = problem.num_kv_splits
    max_splits = wanted if wanted > 0 else min(range(1, _MAX_SPLITS + 1), key=time)
    max_splits = max(1, min(max_splits, tiles))
    lanes = lanes_of(LATENT_SIZE, problem.combine_width, device)
    combine = choose_combine(problem.num_seqs, problem.num_heads, max_splits, lanes, device)
    return CodesConfig(max_splits, _TOKENS, combine)
