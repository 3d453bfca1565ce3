"""Decode attention: the step of a warp: its KV tiles, the registers for them, and the shared memory of a block.

A quoted phrase is the name of a measurement in docs/performance/decode.md.
"""

from __future__ import annotations

from ... import tuning
from ..._core.system.device import Device
from ..._core.tensors.dtypes import float8_e4m3fnuz
from .decode_blocks import NUM_WARPS
from .decode_problem import DecodeProblem, run_tokens

TILE_TOKENS = 16  # tokens of an MMA's KV tile; splits begin at multiples of it (splits.cuh)
# Registers of a thread with one block of four warps per SM, and those for all but keys, values and accumulators, as
# ptxas counts them for sm_90: what it takes, and with a cache of 16 bits the fewest that it needs.
_REGISTERS_OF_ONE_BLOCK, _OTHER_REGISTERS, _FEWEST_OTHER_REGISTERS = 512, 84, 52
_MOST_BLOCKS = 4

# AMD (docs/performance/amd.md): blocks per compute unit that keep enough loads in flight.
_MATRIX_CORE_BLOCKS = 2
# Most bytes of static shared memory of a block: queries of 16 heads, for every 256 elements, and the row sums of warps.
_STATIC_SHARED_MEMORY = 10 * 1024


def choose_step(problem: DecodeProblem, device: Device, heads: int) -> tuple[int, int]:
    """(KV tiles that a warp loads at once, blocks of four warps per SM) with `heads` columns.

    More tiles at once mean more loads in flight, which take registers. Large heads, many heads, small cache blocks, and
    fp8 conversion by integer arithmetic leave fewer registers for them.
    """
    layout, head_size = problem.layout, problem.slice_size
    is_16_bit, is_large = layout.x == 8, head_size > 128
    if problem.uses_mma and not device.supports("mma"):
        has_registers = device.warp_size == 64 and not is_16_bit and not is_large and layout.block_size % 8 == 0
        block_bytes = shared_memory(problem, NUM_WARPS, heads, 1) + _STATIC_SHARED_MEMORY
        min_blocks = max(1, min(device.shared_memory // block_bytes, _MATRIX_CORE_BLOCKS))
        return 2 if has_registers else 1, min_blocks
    is_small = head_size <= 64 and layout.block_size % TILE_TOKENS == 0
    has_registers_for_four = heads <= 8 or device.arch == "sm_90"  # 220 to 300 bytes spilled on sm_80
    has_registers_for_four &= not problem.any_tokens  # 8 bytes spilled
    tiles = 1 if is_16_bit or is_large else 4 if is_small and has_registers_for_four else 2
    needs_registers = (
        is_large
        or heads > 8
        or problem.slices > 1
        or layout.dtype is float8_e4m3fnuz
        or layout.block_size % 8
        or (tiles == 4 and not layout.packed)
    )
    if needs_registers:
        return tiles, 2
    registers = _registers_ahead(problem, heads, tiles) + _FEWEST_OTHER_REGISTERS
    has_registers_for_all = is_16_bit and registers <= _REGISTERS_OF_ONE_BLOCK // _MOST_BLOCKS
    # The splits of one sequence are two blocks of an SM at most, and slower with fewer registers.
    return tiles, _MOST_BLOCKS if has_registers_for_all and tuning.pinned(problem.num_seqs) > 1 else 3


def _registers_ahead(problem: DecodeProblem, heads: int, tiles: int) -> int:
    """Registers for keys, values of two steps and accumulators."""
    head_bytes = problem.slice_size * problem.layout.dtype.itemsize
    keys = tiles * 2 * -(-head_bytes // 64) * 4
    values = tiles * 4 * -(-head_bytes // 128) * 4
    return keys + 2 * values + heads * -(-problem.slice_size // 16) // 2


def is_ahead(problem: DecodeProblem, device: Device, heads: int, tiles: int, min_blocks: int) -> bool:
    """Whether registers hold the values of two steps, next to keys and accumulators.

    "One scoreboard for all loads of the next step": otherwise a warp waits for a whole memory latency in each step.
    """
    if not device.supports("mma") or not problem.uses_mma:  # AMD's counters tell older loads from newer ones
        return False
    registers = _registers_ahead(problem, heads, tiles) + _OTHER_REGISTERS
    return min_blocks == _MOST_BLOCKS or registers <= _REGISTERS_OF_ONE_BLOCK // max(2, min_blocks)


def choose_pieces(problem: DecodeProblem, device: Device) -> int:
    """Parts in which keys and values are loaded, so that one part fits into registers.

    With WMMA a lane has twice the accumulators that it has with MFMA, and on gfx11 each lane holds a whole operand row.
    """
    if not problem.uses_mma or device.supports("mma") or device.warp_size == 64:
        return 1
    if problem.head_size > 128:
        return 4
    if problem.head_size <= 64 or not device.arch.startswith("gfx11"):
        return 1
    return 4 if problem.layout.x == 8 else 2


def can_step(problem: DecodeProblem, tiles: int, device: Device) -> bool:
    """Whether a warp can load `tiles` KV tiles at once: in a packed cache, a lane's tokens must lie in one block."""
    layout, lane_tokens = problem.layout, run_tokens(device) * tiles
    if layout.packed:
        return layout.block_size % lane_tokens == 0 and lane_tokens * layout.dtype.itemsize <= 16
    return layout.block_size % 8 == 0 or tiles <= 2


def has_memory(problem: DecodeProblem, device: Device, num_warps: int, heads: int, tiles: int) -> bool:
    """Whether a block has the shared memory for so many warps."""
    static = _STATIC_SHARED_MEMORY * -(-problem.head_size // 256)
    return shared_memory(problem, num_warps, heads, tiles) + static <= device.shared_memory


def shared_memory(problem: DecodeProblem, num_warps: int, heads_per_block: int, tiles_per_step: int) -> int:
    """Bytes of dynamic shared memory of a block, as attention_decode.cu counts them.

    The warps of each step write their accumulators of each head, padded so that stores meet different banks; before
    that, those of several slices have two buffers of scores, of 16 bytes for each lane, KV tile and eight columns.
    """
    padding = 4 if problem.layout.packed or problem.layout.dtype.itemsize == 1 else 8
    row_bytes = min(heads_per_block, problem.columns) * (problem.head_size + padding) * 4
    scores = 2 * 512 * tiles_per_step * heads_per_block // 8 if problem.slices > 1 else 0
    return num_warps * max(row_bytes // problem.slices, scores)
