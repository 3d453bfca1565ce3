"""Decode attention: the choice of a Config.

Every number below was measured on one H200. A quoted phrase is the name of the measurement in
docs/performance/decode.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ... import tuning
from ..._core.system.device import Device
from .combine import CombineConfig, choose_combine, lanes_of
from .decode_blocks import (
    FEW_BLOCKS,
    MAX_CLUSTER_STEPS,
    MAX_WIDE_ELEMENTS,
    NUM_WARPS,
    SPLIT_BLOCKS,
    STEP_US,
    STEP_US_OF_8,
    STEPS_OF_SPLITTING,
    BlockWork,
    blocks_at_once,
    call_us,
    choose_cluster,
    choose_num_warps,
    choose_short_warps,
    most_cluster_steps,
    share_of_wave,
    warps_of_few,
    whole_is_faster,
)
from .decode_problem import DecodeProblem
from .decode_step import TILE_TOKENS, can_step, choose_pieces, choose_step, has_memory, is_ahead
from .decode_waves import Waves

_MIN_SPLIT = 64  # fewest tokens of a split: one KV tile for each warp of a block
_MAX_SPLITS = 128  # most splits of a sequence
# Batch invariance: fewest tokens of a split. A sequence has as many splits as its own length fills, up to _MAX_SPLITS:
# then 128 K tokens have 128, and the size grows with the length.
PINNED_SPLIT = 1024
_MIN_WANTED_SPLITS = 4  # fewest splits planned per sequence, in case one sequence of the batch is much longer
# Warps of an SM that saturate memory. "Half of the resident warps saturate memory": one sequence takes 40.4 us with 33
# splits, eight warps per SM, and 42.3 us with the 49 splits of a full wave of twelve.
_SATURATING_WARPS = 8
# Waves of splits from which sequences have so many that a combine kernel takes less time than the last CTA of a row.
_WAVES_OF_COMBINE = 8
_MAX_WAVES_OF_SIMT = 2  # most waves of splits of attention_decode_simt.cu
# Waves of unsplit sequences from which split-KV is off: a long sequence then hardly extends the last wave.
_WAVES_WITHOUT_SPLITS = 4

# Most splits for which the last CTA of a row combines them, instead of a combine kernel. "The last CTA of a row
# combines its splits": it is faster for up to 49 planned splits of 8 sequences (six of them have tokens), and slower
# for 64 splits of 3 sequences and for one sequence.
MAX_SPLITS_OF_LAST_BLOCK = 50
# Splits of a head that a warp of the last block loads at once: MANY_SPLITS of decode_combine.cuh for heads of up to 128
# elements. Microseconds of such a batch: "Sixteen splits at once".
_BATCH_SPLITS, _BATCH_US = 16, 0.95

MIN_WHOLE_HEAD = 128  # elements; MIN_WHOLE_HEAD of splits.cuh

# Values that tuning tries.
_CANDIDATE_WARPS = 1, 2, 3, 4, 8
_CANDIDATE_MIN_BLOCKS = 1, 2, 3, 4
_MAX_CANDIDATE_SPLIT = 512  # largest min_split that tuning tries, in tokens


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The geometry and the splits of one call of decode attention.

    Attributes:
        num_warps: warps of a block.
        heads_per_block: query heads of a block that share a key-value head: columns of an MMA.
        tiles_per_step: KV tiles of TILE_TOKENS tokens that a warp loads at once.
        min_blocks: blocks of four warps per SM; bounds the registers.
        one_at_a_time: registers hold keys or values, not both.
        cluster_size: blocks that share a sequence and combine their results in distributed shared memory; 1: no
            cluster.
        max_splits: most splits of a sequence; a block takes one split.
        min_split: fewest tokens of a split.
        combine: the kernel that combines the splits; None: the last block of a row combines its splits.
        pieces: parts of the keys or values, one in registers at a time; 1 unless one_at_a_time.
        slices: warps that share a step, each with a slice of the head; divides num_warps.
        ahead: a warp loads all keys and values of its next step before the softmax of this one, and holds the values
            of two steps.
    """

    num_warps: int
    heads_per_block: int
    tiles_per_step: int
    min_blocks: int
    one_at_a_time: bool
    cluster_size: int
    max_splits: int
    min_split: int
    combine: CombineConfig | None
    pieces: int = 1
    ahead: bool = False
    slices: int = 1

    def __post_init__(self) -> None:
        min_warps = NUM_WARPS if self.cluster_size > 1 else self.slices
        if not min_warps <= self.num_warps <= self.max_warps or self.num_warps % self.slices:
            raise ValueError(
                f"{self}: expected num_warps from {min_warps} to {self.max_warps}, which the kernel has room for, and "
                "whole steps of as many warps as slices"
            )

    @property
    def max_warps(self) -> int:
        """The most warps of a block of this kernel."""
        if self.cluster_size > 1:
            return min(8, NUM_WARPS * self.min_blocks)
        return NUM_WARPS if self.num_warps <= NUM_WARPS else NUM_WARPS * self.min_blocks

    @property
    def num_steps(self) -> int:
        """Steps that the warps of a block take at the same time."""
        return self.num_warps // self.slices

    @property
    def round_tokens(self) -> int:
        """Tokens of the steps that the warps of a block take at the same time."""
        return self.num_steps * TILE_TOKENS * self.tiles_per_step

    def candidates(self, problem: DecodeProblem, device: Device) -> list[DecodeConfig]:
        """Other warps, steps, registers, clusters and splits. The combine kernel stays: a tuning table cannot hold
        it."""
        num_warps = [count for count in _CANDIDATE_WARPS if 32 * count % device.warp_size == 0]
        found = tuning.varied(self, num_warps=num_warps)
        if self.cluster_size == 1 and not problem.partials:  # the caller's workspace fixes the number of partitions
            found += tuning.varied(self, max_splits=tuning.beside(self.max_splits, 1, _MAX_SPLITS))
            if self.max_splits > 1:
                min_splits = tuning.beside(self.min_split, TILE_TOKENS, _MAX_CANDIDATE_SPLIT)
                found += tuning.varied(self, min_split=min_splits)
        if not problem.uses_mma:
            return found
        found += tuning.varied(
            self,
            heads_per_block=(8, 16)
            if device.supports("mma") and problem.cta_heads > 8 and not problem.any_tokens
            else (),
            tiles_per_step=[tiles for tiles in (1, 2, 4) if can_step(problem, tiles, device)],
            min_blocks=_CANDIDATE_MIN_BLOCKS,
            one_at_a_time=(not self.one_at_a_time,) if self.pieces == 1 and not self.ahead else (),
            ahead=(not self.ahead,) if device.supports("mma") and not self.one_at_a_time else (),
        )
        if not problem.partials:
            for size in tuning.beside(self.cluster_size, 1, device.cluster):
                fitting = NUM_WARPS if 1 in (size, self.cluster_size) else self.num_warps
                found.append(replace(self, cluster_size=size, num_warps=fitting))
        return found


def choose(problem: DecodeProblem, device: Device) -> DecodeConfig:
    """The Config for this problem."""
    heads = problem.cta_heads
    tiles, min_blocks = choose_step(problem, device, heads)
    slices, step = problem.slices, TILE_TOKENS * tiles
    blocks = blocks_of_one_split(problem, heads) + problem.other_tiles * problem.kv.num_kv_heads
    num_warps, cluster_size, is_pinned = NUM_WARPS, 1, tuning.batch_invariant()
    work = work_of(problem, heads, tiles)
    share, steps = share_of_wave(blocks, min_blocks, device), work.steps(NUM_WARPS)
    is_short = steps <= STEPS_OF_SPLITTING or (not problem.partials and whole_is_faster(share, steps, work.step_us))
    is_short &= problem.uses_mma and not is_pinned
    if problem.uses_mma:
        if is_short:
            num_warps = choose_short_warps(blocks, min_blocks, device, min(heads, problem.columns), work)
        elif not is_pinned:
            num_warps = _choose_num_warps(problem, device, blocks, heads, min_blocks, work)
        while not has_memory(problem, device, num_warps, heads, tiles):
            num_warps -= slices
    wave = _waves(problem, device, num_warps, heads, min_blocks).splits
    rounds = problem.attended_tokens / (num_warps // slices * step)  # steps of a warp without splits
    heads_of_warp = -(-min(heads, problem.used_columns) // num_warps)
    max_splits = problem.num_partitions or (
        1 if is_short else choose_max_splits(problem, wave, rounds, min_blocks, heads_of_warp)
    )
    combine = _choose_combine(problem, max_splits, device)
    if problem.uses_mma and not problem.partials and not is_pinned:
        may_be_wide = min(heads, problem.columns) * problem.head_size <= MAX_WIDE_ELEMENTS
        steps = (
            MAX_CLUSTER_STEPS if combine else most_cluster_steps(min(heads, problem.used_columns), problem.slice_size)
        )
        cluster_size, cluster_warps = choose_cluster(
            blocks, problem.max_tokens, step // slices, may_be_wide, device, steps
        )
        if cluster_size > 1:
            num_warps, max_splits, combine = cluster_warps, 1, None
        elif few := _choose_few(problem, device):
            (heads, tiles, num_warps), min_blocks, max_splits, combine = few, FEW_BLOCKS, 1, None
    pieces = choose_pieces(problem, device)
    return DecodeConfig(
        num_warps,
        heads,
        tiles,
        min_blocks,
        pieces > 1,
        cluster_size,
        max_splits,
        PINNED_SPLIT if is_pinned else _MIN_SPLIT,
        combine,
        pieces,
        is_ahead(problem, device, heads, tiles, min_blocks),
        slices,
    )


def _choose_few(problem: DecodeProblem, device: Device) -> tuple[int, int, int] | None:
    """(columns, KV tiles, warps) of few blocks that take whole sequences; None if splits take less time.

    Blocks have eight columns where the last one of 16 would have no more than eight.
    """
    if not device.supports("mma"):
        return None
    heads = 8 if -(-problem.columns // 8) % 2 else 16
    tiles, _ = choose_step(problem, device, heads)
    blocks = blocks_of_one_split(problem, heads) + problem.max_other_tiles * problem.kv.num_kv_heads
    num_warps = warps_of_few(blocks, device, min(heads, problem.columns), work_of(problem, heads, tiles))
    return (heads, tiles, num_warps) if num_warps and has_memory(problem, device, num_warps, heads, tiles) else None


def work_of(problem: DecodeProblem, heads: int, tiles: int) -> BlockWork:
    """The work of a block with `heads` columns, and steps of `tiles` KV tiles."""
    step_us = STEP_US if heads > 8 else STEP_US_OF_8
    return BlockWork(problem.attended_tokens, problem.token_bytes, TILE_TOKENS * tiles, step_us, problem.slices)


def _choose_num_warps(
    problem: DecodeProblem, device: Device, blocks: int, heads: int, min_blocks: int, work: BlockWork
) -> int:
    """Warps per block with the least time, of sequences that may have splits.

    With 16 columns, also NUM_WARPS where Balance of splits.cuh fills waves: fewer warps leave less of the last wave
    idle, but combine splits in more time. "Four warps for 16 columns", fitted to heads of 128 elements.
    """
    num_warps = choose_num_warps(blocks, min_blocks, device, problem.slices)
    wave = _waves(problem, device, NUM_WARPS, heads, min_blocks).splits
    may_split = wave < problem.num_seqs <= _WAVES_WITHOUT_SPLITS * wave and not problem.partials
    has_16_columns = device.supports("mma") and min(heads, problem.columns) > 8 and not problem.any_tokens
    if not may_split or not has_16_columns or problem.head_size < MIN_WHOLE_HEAD:
        return num_warps

    def time(warps: int) -> float:
        return call_us(blocks, blocks_at_once(warps, min_blocks, device), warps, work)

    return min(NUM_WARPS, num_warps, key=time)


def _choose_combine(problem: DecodeProblem, max_splits: int, device: Device) -> CombineConfig | None:
    """The kernel that combines the splits; None if the last block of a row does it."""
    combines_itself = problem.uses_mma and problem.num_seqs > 1 and max_splits <= MAX_SPLITS_OF_LAST_BLOCK
    combines_itself |= problem.any_tokens  # decode_combine.cu has one row for each sequence
    combines_itself &= not tuning.batch_invariant()
    if not problem.partials and (max_splits == 1 or combines_itself):
        return None
    lanes = lanes_of(problem.head_size, problem.combine_vector_width, device)
    return choose_combine(problem.num_seqs, problem.num_heads, max_splits, lanes, device)


def blocks_of_one_split(problem: DecodeProblem, heads_per_block: int) -> int:
    """Blocks of a grid with one split per sequence."""
    if not problem.uses_mma:
        return problem.num_seqs * problem.num_heads
    return problem.num_seqs * problem.kv.num_kv_heads * -(-problem.columns // heads_per_block)


def waves_of(problem: DecodeProblem, device: Device, config: DecodeConfig) -> Waves:
    """The waves of splits of this geometry."""
    return _waves(problem, device, config.num_warps, config.heads_per_block, config.min_blocks)


def equal_splits(problem: DecodeProblem, config: DecodeConfig, device: Device) -> int:
    """The splits of each sequence, if all are as long as the block table allows."""
    waves, tokens = waves_of(problem, device, config), problem.attended_tokens
    return min(waves.equal_splits(waves.equal_from.waves(tokens)), -(-tokens // config.min_split))


def _waves(problem: DecodeProblem, device: Device, num_warps: int, heads_per_block: int, min_blocks: int) -> Waves:
    at_once = blocks_at_once(num_warps, min(min_blocks, SPLIT_BLOCKS), device)
    splits = at_once * problem.num_seqs / max(1, blocks_of_one_split(problem, heads_per_block))
    return Waves.of(problem.num_seqs, splits, at_once, device.num_sms, problem.token_bytes)


def _fastest_splits(rounds: float, heads: int) -> int:
    """The splits with the least time where the last block combines them, and a warp those of so many heads."""

    def us(splits: int) -> float:
        return rounds / splits * STEP_US_OF_8 + heads * splits / _BATCH_SPLITS * _BATCH_US

    return min(range(_BATCH_SPLITS, _MAX_SPLITS + 1, _BATCH_SPLITS), key=us)


def choose_max_splits(problem: DecodeProblem, wave: float, rounds: float, min_blocks: int, heads_of_warp: int) -> int:
    """The most splits of a sequence, where `wave` splits of all sequences run at once, and a warp takes `rounds` steps
    of an unsplit sequence.

    Those of the longest sequence may be many more than the mean.
    """
    num_seqs = problem.num_seqs
    if tuning.batch_invariant():
        return max(1, min(-(-problem.max_tokens // PINNED_SPLIT), _MAX_SPLITS))
    if _WAVES_WITHOUT_SPLITS * wave < num_seqs:
        return 1
    if num_seqs <= 1:
        most = int(wave * min(1.0, _SATURATING_WARPS / (min(min_blocks, SPLIT_BLOCKS) * NUM_WARPS)))
    elif not problem.uses_mma:
        most = int(max(_MIN_WANTED_SPLITS, _MAX_WAVES_OF_SIMT * wave / num_seqs))
    elif problem.any_tokens or num_seqs * MAX_SPLITS_OF_LAST_BLOCK > _WAVES_OF_COMBINE * wave:
        most = _fastest_splits(rounds, heads_of_warp)
        most = most if problem.any_tokens else min(most, MAX_SPLITS_OF_LAST_BLOCK)
    else:
        most = _MAX_SPLITS
    return max(1, min(-(-problem.max_tokens // _MIN_SPLIT), _MAX_SPLITS, most))
