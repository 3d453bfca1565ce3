"""Decode attention: the warps of a block, the blocks that run at once, and clusters.

Every number below was measured on one H200. A quoted phrase is the name of the measurement in
docs/performance/decode.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..._core.system.device import Device
from .decode_waves import MOST_WAVES

NUM_WARPS = 4  # warps of a block by default

# Warps of a block if all blocks fit into one wave. "Three warps per CTA make one wave of 512 CTAs": 136 us with four,
# 129 us with three.
_WARPS_OF_ONE_WAVE = (4, 3)
# Warps of a block for several waves, preferred first: fewer warps can leave less of the last wave idle ("A partial wave
# costs at least half a wave"). Trying three warps before two was faster: 254.6 to 251.7 us for 256 sequences of 1024
# tokens, 215.8 to 207.0 us for 100 of 2048 ("The last CTA of a row combines its splits").
_WARPS_OF_MANY_WAVES = (4, 3, 2, 1)
_MIN_TAIL = 0.5  # least cost of a partial wave, as a part of a full wave; MIN_TAIL of splits.cuh
_MOST_TAIL_SPLITS = 8  # MOST_TAIL_SPLITS of splits.cuh
# The cost model of blocks with 16 columns, "Four warps for 16 columns": us of a step of a warp, bytes per us of DRAM,
# us of a block without its steps, and of one that leaves a partial result, times its warps: each combines some heads.
STEP_US, BYTES_PER_US, BLOCK_US, _SPLIT_WARPS_US = 1.69, 4.35e6, 5.5, 28.0
STEP_US_OF_8 = 1.1  # us of a step of a warp with 8 columns: "What a short call waits for"
CTA_US = 3.0  # us of a block before its first loads and after its last: "fixed cost of a CTA"
# Heads for which a warp loads queries, and combines results, at the same time, and us of the next ones: a latency of
# 0.5 us, and 450 cycles ("What a short call waits for").
_HEADS_OF_WARP, _HEADS_US = 4, 0.75
# us that a block with eight columns and a step takes of the issue slots of an SM; us of an fp8 cache on top of CTA_US:
# "Short calls".
_CROWD_US, FP8_US = 0.425, 0.8
# Steps of a warp that take as long as finding the splits of all sequences and combining them. "What a short call
# waits for": 4.4 us for 44 sequences of 1 to 103 tokens, and 1.1 us for a step.
STEPS_OF_SPLITTING = 4
# Most blocks of NUM_WARPS warps per SM that splits fill; another takes whole sequences: "Four blocks of small heads".
SPLIT_BLOCKS = 3
FEW_BLOCKS = 2  # blocks of NUM_WARPS warps per SM if few blocks have all its registers: "Few CTAs"

# Cluster sizes. "Clusters for short sequences": with eight CTAs of eight warps 7.2 to 5.5 us.
_CLUSTER_SIZES = (2, 4, 8)
_WIDE_CLUSTER_WARPS = 8  # warps of a CTA of a wide cluster
# Most accumulators of a warp in a wide cluster: eight warps then fit into 48 KB of shared memory.
MAX_WIDE_ELEMENTS = 1024
# Most cluster CTAs per SM. "Clusters lose on larger batches": 16 sequences of 1024 tokens take 25.1 us with clusters
# and 23.1 us without.
_MAX_BLOCKS_PER_SM = 2
# Fewest and most KV steps of a warp in a cluster: for one sequence of 4096 tokens clusters are as fast as split-KV, for
# 8192 they are slower. The most is that of steps of _STEP_ELEMENTS accumulators and of one head that a warp of the last
# block combines: a warp combines its heads one after the other, a step's time each ("A chain for each head").
_MIN_CLUSTER_STEPS, MAX_CLUSTER_STEPS, _STEP_ELEMENTS = 2, 4, 1024


def blocks_at_once(num_warps: int, min_blocks: int, device: Device) -> int:
    """Blocks of `num_warps` warps that run at once. An SM has the registers of `min_blocks` blocks of four warps: eight
    warps are two blocks of three ("Whole CTAs of three warps")."""
    return min_blocks * NUM_WARPS // num_warps * device.num_sms


def share_of_wave(blocks: int, min_blocks: int, device: Device) -> float:
    """The part of a wave of NUM_WARPS warps that these blocks fill: at most 1 if they all run at once."""
    of_splits = blocks / blocks_at_once(NUM_WARPS, min(min_blocks, SPLIT_BLOCKS), device)
    return max(min(of_splits, 1.0), blocks / blocks_at_once(NUM_WARPS, min_blocks, device))


@dataclass(frozen=True, slots=True)
class BlockWork:
    """The work of a block that takes a whole sequence, as long as the page table allows.

    Attributes:
        tokens: keys of the sequence. token_bytes: bytes of a key and its value.
        step: tokens of a step of a warp. step_us: its time. slices: warps that share a step.
    """

    tokens: int
    token_bytes: int
    step: int
    step_us: float
    slices: int = 1

    def steps(self, num_warps: int) -> int:
        """Steps of each warp."""
        return -(-self.tokens // (num_warps // self.slices * self.step))

    @property
    def nbytes(self) -> int:
        return self.tokens * self.token_bytes


def _waves(blocks: int, num_warps: int, min_blocks: int, device: Device) -> float:
    """Waves of blocks; the last one may be partly idle."""
    waves = blocks / blocks_at_once(num_warps, min_blocks, device)
    tail = waves % 1.0
    return waves - tail + (max(tail, _MIN_TAIL) if tail else 0.0)


def choose_num_warps(blocks: int, min_blocks: int, device: Device, slices: int = 1) -> int:
    """Warps per block, a multiple of `slices`, with the fullest waves.

    If all blocks are one wave, large blocks also keep the next kernel from starting early next to them: "A single round
    of blocks is spread unevenly where a kernel starts early".
    """
    of_splits = min(min_blocks, SPLIT_BLOCKS)
    of_one_wave = [n for n in _WARPS_OF_ONE_WAVE if blocks <= blocks_at_once(n, of_splits, device)]
    of_many_waves = sorted(_WARPS_OF_MANY_WAVES, key=lambda n: _waves(blocks, n, of_splits, device) / n)
    num_warps = next(n for n in (*of_one_wave, *of_many_waves) if n % slices == 0)
    # Four blocks of an SM, which it has registers for, may as well have four warps each.
    return NUM_WARPS if num_warps == 3 and min_blocks > SPLIT_BLOCKS else num_warps


def crowd_us(blocks: int, at_once: int, columns: int, device: Device) -> float:
    """What the blocks of an SM beyond the first one add to the time of a wave."""
    return _CROWD_US * columns / 8 * max(0.0, min(blocks, at_once) / device.num_sms - 1)


def block_us(num_warps: int, heads: int, work: BlockWork) -> float:
    """Microseconds of a block that takes few steps for so many heads, without others on its SM."""
    batches = -(-heads // (_HEADS_OF_WARP * num_warps))
    return CTA_US + _HEADS_US * (batches - 1) + work.steps(num_warps) * work.step_us


def choose_short_warps(blocks: int, min_blocks: int, device: Device, heads: int, work: BlockWork) -> int:
    """Warps per block with the least time where a block has few steps.

    Each wave also takes what a block takes without its steps, so that fewer warps with more steps each may be faster.
    Only blocks of a single wave have warps without a step.
    """
    is_one_wave = blocks <= blocks_at_once(NUM_WARPS, min(min_blocks, SPLIT_BLOCKS), device)
    most = NUM_WARPS if is_one_wave else work.steps(work.slices) * work.slices

    def time(num_warps: int) -> tuple[float, float]:
        waves = _waves(blocks, num_warps, min_blocks, device)
        one_us = block_us(num_warps, heads, work)
        return max(max(1.0, waves) * one_us, blocks * work.nbytes / BYTES_PER_US), waves / num_warps

    return min((n for n in _WARPS_OF_MANY_WAVES if n % work.slices == 0 and n <= max(most, work.slices)), key=time)


def whole_is_faster(share: float, steps: int, step_us: float) -> bool:
    """Whether blocks that take whole sequences, which are `share` of a wave, take less time than one wave of splits or
    several.

    The plan takes sequences to have half of the longest one's steps on average. Rounding up adds half a split to each,
    and half a step.
    """
    if share > 1:
        return False

    def steps_of_splits(waves: int) -> float:
        return (waves - 1) * CTA_US / step_us + steps * waves * share / 2 / (waves - share / 2)

    return steps <= STEPS_OF_SPLITTING + 0.5 + min(map(steps_of_splits, range(1, MOST_WAVES + 1)))


def warps_of_few(blocks: int, device: Device, heads: int, work: BlockWork) -> int:
    """Warps per block where few blocks take whole sequences: FEW_BLOCKS of an SM run at once, or one with all their
    warps. 0 if they are more, or splits take less time.

    Splits have all SMs. The plan takes sequences to have half of the longest one's steps on average, and a last step
    that is half empty.
    """
    if blocks <= blocks_at_once(NUM_WARPS, FEW_BLOCKS, device) and work.steps(NUM_WARPS) <= STEPS_OF_SPLITTING:
        return choose_short_warps(blocks, FEW_BLOCKS, device, heads, work)
    for num_warps in (FEW_BLOCKS * NUM_WARPS, NUM_WARPS):
        share, steps = blocks / blocks_at_once(num_warps, FEW_BLOCKS, device), work.steps(num_warps)
        if share <= 1 and steps <= STEPS_OF_SPLITTING + steps * share / 2 + 0.5:
            return num_warps
    return 0


def call_us(blocks: int, at_once: int, num_warps: int, work: BlockWork) -> float:
    """The time of `blocks` blocks, `at_once` at a time, in us, by the cost model of blocks with 16 columns.

    All sequences are as long as the page table allows. Splits fill the last wave as Balance of splits.cuh fills it.
    """
    steps = work.steps(num_warps)

    def wave(of: int, splits: int) -> float:
        block_us = BLOCK_US if splits == 1 else _SPLIT_WARPS_US / num_warps
        return max(steps / splits * work.step_us, of * work.nbytes / BYTES_PER_US) + block_us

    waves, last = divmod(blocks, at_once)
    if not last:
        return waves * wave(at_once, 1)
    is_split = waves > 0 and last < _MIN_TAIL * at_once
    return waves * wave(at_once, 1) + wave(last, min(at_once // last, _MOST_TAIL_SPLITS) if is_split else 1)


def most_cluster_steps(heads: int, head_size: int) -> int:
    """The most KV steps of a warp in a cluster, if otherwise the last block combines the splits of so many heads."""
    heads_of_warp = -(-heads // NUM_WARPS)
    return MAX_CLUSTER_STEPS * heads_of_warp * _STEP_ELEMENTS // max(_STEP_ELEMENTS, heads * head_size)


def choose_cluster(
    blocks: int, max_tokens: int, step: int, may_be_wide: bool, device: Device, most_steps: int = MAX_CLUSTER_STEPS
) -> tuple[int, int]:
    """(CTAs of a cluster, warps of a CTA) for a grid of `blocks` clusters; 1 CTA means no cluster.

    A cluster needs no combine kernel, but its idle CTAs cannot help another sequence. So clusters are for batches that
    would leave half of the SMs idle with one CTA per sequence, and for sequences with at most `most_steps` steps of
    `step` tokens per warp. Five CTAs with a step each are a cluster of eight, not one of four with a second step. CTAs
    have twice the warps if there are enough tokens for all warps, and if the clusters leave half of the SMs free for
    the next kernel, which may start early.
    """
    largest, num_warps = _CLUSTER_SIZES[-1], NUM_WARPS
    if may_be_wide and max_tokens > largest * num_warps * step and 2 * largest * blocks <= device.num_sms:
        num_warps = _WIDE_CLUSTER_WARPS
    if 2 * blocks > device.num_sms:
        return 1, num_warps
    room = _MAX_BLOCKS_PER_SM * device.num_sms // max(1, blocks)
    useful = -(-max_tokens // (num_warps * step))
    fitting = [size for size in _CLUSTER_SIZES if size <= min(device.cluster, room)]
    if useful <= 1 or not fitting:
        return 1, num_warps
    cluster_size = next((size for size in fitting if size >= useful), fitting[-1])
    steps = min(most_steps, max(_MIN_CLUSTER_STEPS, blocks))  # few CTAs cannot saturate memory
    return (cluster_size if max_tokens <= steps * cluster_size * num_warps * step else 1), num_warps
