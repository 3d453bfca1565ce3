"""Decode attention: the warps of a block, the blocks that run at once, and clusters.

Every number below was measured on one H200. A quoted phrase is the name of the measurement in
docs/performance/decode.md.
"""

from __future__ import annotations

from ..._core.system.device import Device

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
STEP_US, _BYTES_PER_US, _BLOCK_US, _SPLIT_WARPS_US = 1.69, 4.35e6, 5.5, 28.0

# Cluster sizes, preferred first. "Clusters for short sequences": with eight CTAs of eight warps 7.2 to 5.5 us.
_CLUSTER_SIZES = (8, 4, 2)
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


def choose_num_warps(blocks: int, min_blocks: int, device: Device, slices: int = 1) -> int:
    """Warps per block, a multiple of `slices`, with the least time, where the last wave may be partly idle.

    If all blocks are one wave, large blocks also keep the next kernel from starting early next to them: "A single round
    of blocks is spread unevenly where a kernel starts early".
    """

    def waves(num_warps: int) -> float:
        return blocks / blocks_at_once(num_warps, min_blocks, device)

    of_one_wave = [num_warps for num_warps in _WARPS_OF_ONE_WAVE if num_warps % slices == 0 and waves(num_warps) <= 1]
    if of_one_wave:
        return of_one_wave[0]

    def time(num_warps: int) -> float:
        tail = waves(num_warps) % 1.0
        return (waves(num_warps) - tail + (max(tail, _MIN_TAIL) if tail else 0.0)) / num_warps

    return min((num_warps for num_warps in _WARPS_OF_MANY_WAVES if num_warps % slices == 0), key=time)


def call_us(blocks: int, at_once: int, num_warps: int, steps: int, block_bytes: int) -> float:
    """The time of `blocks` blocks, `at_once` at a time, in us, by the cost model of blocks with 16 columns.

    All sequences are as long as the page table allows: a warp of an unsplit block takes `steps` steps, a block
    `block_bytes` bytes. Splits fill the last wave as Balance of splits.cuh fills it.
    """

    def wave(of: int, splits: int) -> float:
        block_us = _BLOCK_US if splits == 1 else _SPLIT_WARPS_US / num_warps
        return max(steps / splits * STEP_US, of * block_bytes / _BYTES_PER_US) + block_us

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
    `step` tokens per warp. CTAs have twice the warps if there are enough tokens for all warps, and if the clusters
    leave half of the SMs free for the next kernel, which may start early.
    """
    largest, num_warps = _CLUSTER_SIZES[0], NUM_WARPS
    if may_be_wide and max_tokens > largest * num_warps * step and 2 * largest * blocks <= device.num_sms:
        num_warps = _WIDE_CLUSTER_WARPS
    if 2 * blocks > device.num_sms:
        return 1, num_warps
    room = _MAX_BLOCKS_PER_SM * device.num_sms // max(1, blocks)
    useful = min(device.cluster, room, -(-max_tokens // (num_warps * step)))
    cluster_size = next((size for size in _CLUSTER_SIZES if size <= useful), 1)
    steps = min(most_steps, max(_MIN_CLUSTER_STEPS, blocks))  # few CTAs cannot saturate memory
    return (cluster_size if max_tokens <= steps * cluster_size * num_warps * step else 1), num_warps
