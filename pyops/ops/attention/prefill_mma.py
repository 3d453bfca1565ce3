"""Prefill attention by prefill_mma.cu: the geometry, its choice, and the launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from .decode_launch import workspace
from .layout import heads_stride
from .prefill_problem import PrefillProblem, count_slices, shares_rows
from .prefill_work import ShortItems, Work, count_kv_tiles

_prefill_mma = Kernel("attention/prefill_mma.cu")

_NUM_WARPS = 4  # warps of a block
_TILE_ROWS = 16  # rows of an MMA; a row is a query token and one of the heads that share a key-value head
# Most bytes of static shared memory of a block: slots of 64 keys and values of two tiles, and flags of missing tokens.
_STATIC_SHARED_MEMORY = 2176
# docs/performance/prefill.md, "Two tiles of 16 rows to a warp".
_MIN_ROWS_FOR_TWO_TILES = 256  # fewest rows of a sequence, on average
# The model of CTAs with rows that warps share ("Warps that share rows"). In a cycle: bytes that an SM reads from shared
# memory, multiplications of its mma.sync, bytes that all SMs and one copy from L2. Cycles of the latency of a copy, and
# half of those of a CTA outside KV tiles.
_SHARED_BYTES_PER_CYCLE, _MULTIPLICATIONS_PER_CYCLE, _L2_BYTES_PER_CYCLE, _SM_BYTES_PER_CYCLE = 128, 1024, 3300, 64
_COPY_CYCLES, _ITEM_CYCLES = 800, 2700
_CTA_RESERVE = 1024  # bytes of an SM's shared memory reserved for each CTA
# Microseconds of a work item of the geometry for short sequences, and of a KV tile of heads of 128 elements, fitted to
# an H200 ("Short sequences"): where SMs are full of CTAs, and of a CTA alone on an SM.
_SHORT_ITEM_US, _SHORT_TILE_US = 3.6, 3.4
_SHORT_ITEM_US_ALONE, _SHORT_TILE_US_ALONE = 3.0, 1.0
# The same of a CTA alone with p_hi_lo, of any head size: latencies ("Many heads of short sequences" of decode.md).
_EXACT_TILE_US_ALONE = 1.3
# Times of a KV tile of 16 bits that one of an fp8 cache takes where SMs are full: the conversion takes issue slots. A
# CTA alone waits for latencies ("Short calls over fp8").
_FP8_TILE = 1.3
_MAX_HEAD_SIZE_OF_SHORT = 128  # largest head size with 128 registers; above, heads are wide
_MAX_WIDE_HEAD_SIZE = {False: 256, True: 192}  # {an fp8 cache: largest wide head}


@dataclass(frozen=True, slots=True)
class PrefillMmaConfig:
    """The geometry of prefill_mma.cu.

    Attributes:
        num_warps: warps of a block.
        row_tiles: tiles of 16 rows per warp.
        step_tokens: tokens of a KV tile: its keys and values are in shared memory at once.
        min_blocks: blocks per SM; bounds the registers.
        max_splits: split-KV: most splits of a tile of rows; a block takes one split.
        stages: KV tiles in shared memory, where asynchronous copies bring them there.
        column_warps: warps that share rows, and split the keys of Q K^T and the columns of P V.
    """

    num_warps: int
    row_tiles: int
    step_tokens: int
    min_blocks: int
    max_splits: int = 1
    stages: int = 2
    column_warps: int = 1

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.num_warps // self.column_warps * _TILE_ROWS * self.row_tiles

    def candidates(self, problem: PrefillProblem, device: Device) -> list[PrefillMmaConfig]:
        """Other warps, tiles, steps and registers."""
        if not problem.uses_mma:
            return tuning.varied(self, num_warps=tuning.beside(self.num_warps, 2, 8))
        found = tuning.varied(
            self,
            num_warps=tuning.beside(self.num_warps, self.step_tokens // 16, 8),
            row_tiles=(1, 2),
            step_tokens=tuning.beside(self.step_tokens, 16 * self.column_warps, 16 * self.num_warps),
            min_blocks=(1, 2, 3),
            stages=(1, 2) if device.supports("async_copies") and not problem.is_fp8 else (),
        )
        found += [replace(one, stages=1) for one in _SHARED_ROWS] if shares_rows(problem) else []
        return [config for config in found if shared_memory(problem, config) <= device.shared_memory]


# The geometry for short sequences on Hopper: many CTAs on an SM, because all of an item is latency. Three of them have
# the registers for two stages with heads of up to 128 elements, and two of them with wide heads.
_SHORT = PrefillMmaConfig(num_warps=4, row_tiles=1, step_tokens=32, min_blocks=4, stages=1)
_FEW_SHORT = replace(_SHORT, min_blocks=3, stages=2)
_WIDE_SHORT = replace(_FEW_SHORT, min_blocks=2)
_MAX_HEAD_SIZE_OF_TWO_STAGES = 64  # largest head size with two stages and four CTAs
_MAX_SHORT_TOKENS = 4 * _SHORT.step_tokens  # most tokens of a sequence: each KV tile adds its whole latency


# Geometries of warps that share rows.
_SHARED_ROWS = (
    PrefillMmaConfig(num_warps=8, row_tiles=2, step_tokens=64, min_blocks=1, column_warps=4),
    PrefillMmaConfig(num_warps=8, row_tiles=1, step_tokens=64, min_blocks=1, column_warps=4),
    PrefillMmaConfig(num_warps=4, row_tiles=1, step_tokens=64, min_blocks=1, column_warps=4),
    PrefillMmaConfig(num_warps=8, row_tiles=1, step_tokens=32, min_blocks=1, column_warps=2),
)


def choose(problem: PrefillProblem, device: Device) -> PrefillMmaConfig:
    """The geometry of prefill_mma.cu, and split-KV of few query rows."""
    row_tiles = _row_tiles(problem, device)
    config = PrefillMmaConfig(
        num_warps=_NUM_WARPS,
        row_tiles=row_tiles,
        step_tokens=_step_tokens(problem, device, row_tiles),
        min_blocks=2,
    )
    if problem.uses_mma and shares_rows(problem):
        config = _choose_shared_rows(problem, device)
    elif problem.uses_mma and problem.query.shape[2] > 256:
        config = _choose_wide(problem, config, device)
    config = replace(config, stages=_choose_stages(problem, config, device))
    fits = not problem.uses_mma or _ctas(problem, config, device)
    config = config if fits else replace(config, num_warps=_NUM_WARPS // 2)
    return replace(config, max_splits=_choose_splits(problem, config, device))


def choose_short(problem: PrefillProblem, device: Device) -> PrefillMmaConfig | None:
    """The geometry for short sequences on Hopper, if it takes the call: a CTA for each tile and head, without a launch
    for sequences of one token."""
    head_size = problem.query.shape[2]
    if problem.expected_tokens > _MAX_SHORT_TOKENS or problem.layout.ragged or tuning.batch_invariant():
        return None
    if head_size > _MAX_HEAD_SIZE_OF_SHORT:
        fits = head_size <= _MAX_WIDE_HEAD_SIZE[problem.is_fp8] and problem.has_plain_logits
        return _WIDE_SHORT if fits else None
    # Values of an fp8 cache, and addresses where a thread's chunks are of different columns, need more registers.
    has_registers = not problem.is_fp8 and problem.has_plain_logits and _repeats_columns(problem, device)
    if has_registers and head_size <= _MAX_HEAD_SIZE_OF_TWO_STAGES:
        return replace(_SHORT, stages=2)
    run_at_once = ShortItems.of(problem, _FEW_SHORT.rows).items <= _FEW_SHORT.min_blocks * device.num_sms
    return _FEW_SHORT if run_at_once or problem.p_hi_lo or not has_registers else _SHORT


def us_of_short(problem: PrefillProblem, config: PrefillMmaConfig, device: Device, longest: bool = False) -> float:
    """The time of `choose_short`: "Short sequences" of docs/performance/prefill.md.

    With `longest`, sequences have as many keys as their block tables hold.
    """
    width = (problem.query.shape[2] + problem.value_size) / 256
    items = ShortItems.of(problem, config.rows, longest)
    # CTAs beyond the first one of an SM, as a part of those that fit.
    crowd = min(1.0, max(0.0, items.items / device.num_sms - 1) / (config.min_blocks - 1))
    item_us = _SHORT_ITEM_US_ALONE + crowd * (_SHORT_ITEM_US - _SHORT_ITEM_US_ALONE)
    alone_us = _EXACT_TILE_US_ALONE if problem.p_hi_lo else _SHORT_TILE_US_ALONE * width
    full_us = _SHORT_TILE_US * width * (_FP8_TILE if problem.is_fp8 else 1.0)
    tile_us = alone_us + crowd * max(0.0, full_us - alone_us)
    return items.us(config.min_blocks * device.num_sms, item_us, tile_us, config.step_tokens)


def _choose_shared_rows(problem: PrefillProblem, device: Device) -> PrefillMmaConfig:
    """The geometry of warps that share rows with the least time, by the model of "Warps that share rows"."""

    def cycles(config: PrefillMmaConfig) -> float:
        work = work_of(problem, config, device)
        return work.time(1, _kv_tile_cycles(problem, config, min(work.items, work.slots)), _ITEM_CYCLES)

    fitting = [one for one in _SHARED_ROWS if _ctas(problem, replace(one, stages=1), device)]
    if problem.is_fp8:  # registers hold the next keys or values, too
        fitting = [one for one in fitting if one.row_tiles == 1 and one.num_warps > _NUM_WARPS]
    return fitting[0] if tuning.batch_invariant() else min(fitting, key=cycles)


def _kv_tile_cycles(problem: PrefillProblem, config: PrefillMmaConfig, ctas: int) -> float:
    """Cycles of a KV tile if so many CTAs run at once: those of MMAs and of what they read from shared memory, or those
    of the copies of keys and of values, one after the other, if these take longer.

    Each warp reads the queries and P of its rows, a part of the keys, and columns of the values.
    """
    head_size, rows, tokens = problem.query.shape[2], config.rows, config.step_tokens
    width, warp_groups = head_size + problem.value_size, config.num_warps // config.column_warps
    nbytes = 2 * (config.column_warps * rows * (head_size + tokens) + warp_groups * tokens * width)
    multiplied = rows * tokens * width / _MULTIPLICATIONS_PER_CYCLE
    rate = min(_L2_BYTES_PER_CYCLE / max(1, ctas), _SM_BYTES_PER_CYCLE)
    copied = tokens * width * problem.layout.dtype.itemsize / rate + 2 * _COPY_CYCLES
    return max(nbytes / _SHARED_BYTES_PER_CYCLE + multiplied, copied)


def _choose_wide(problem: PrefillProblem, config: PrefillMmaConfig, device: Device) -> PrefillMmaConfig:
    """The geometry for heads above 256 elements, which shared memory bounds.

    Where CTAs of four warps are more than the SMs, an SM has eight warps: a CTA of eight if a sequence has the rows,
    because it reads keys and values once, else two CTAs with short KV tiles.
    """
    one = replace(config, min_blocks=1)
    short, eight = replace(config, step_tokens=16), replace(one, num_warps=2 * _NUM_WARPS)
    geometries = [one, short]
    if tuning.batch_invariant() or work_of(problem, one, device).items > device.num_sms:
        many_rows = tuning.batch_invariant() or problem.num_rows >= eight.rows * problem.num_seqs
        geometries = [eight, replace(eight, step_tokens=16), short] if many_rows else [short]
    geometries.append(replace(short, num_warps=_NUM_WARPS // 2))
    ctas = [_ctas(problem, replace(found, stages=1), device) for found in geometries]
    return next((replace(one, min_blocks=most) for one, most in zip(geometries, ctas, strict=True) if most), short)


def _row_tiles(problem: PrefillProblem, device: Device) -> int:
    """Tiles of 16 rows per warp: two, which halve what MMAs read from shared memory, where there are the rows and the
    registers. Two tiles of heads above 64 elements leave none for soft caps and ALiBi slopes.
    """
    many_rows = problem.num_rows >= _MIN_ROWS_FOR_TWO_TILES * problem.num_seqs
    # Few rows that need two tiles per warp to read the cache once.
    many_rows |= problem.few_rows > _NUM_WARPS * _TILE_ROWS or tuning.batch_invariant()
    copies = device.supports("async_copies")
    max_head_size = 128 if copies and problem.has_plain_logits and not problem.p_hi_lo else 64
    has_registers = copies or device.warp_size == 64  # also for loads held in registers
    return 2 if many_rows and has_registers and problem.query.shape[2] <= max_head_size else 1


def _choose_stages(problem: PrefillProblem, config: PrefillMmaConfig, device: Device) -> int:
    """One stage if more CTAs then fit on an SM: they hide more of a latency than a second stage does."""
    one, two = (_ctas(problem, replace(config, stages=stages), device) for stages in (1, 2))
    return 2 if two >= one else 1


def _ctas(problem: PrefillProblem, config: PrefillMmaConfig, device: Device) -> int:
    """CTAs that fit on an SM at once."""
    own = shared_memory(problem, config) + _STATIC_SHARED_MEMORY + _CTA_RESERVE
    return min(config.min_blocks, (device.shared_memory + _CTA_RESERVE) // own)


def _choose_splits(problem: PrefillProblem, config: PrefillMmaConfig, device: Device) -> int:
    """The splits of sequences of few query rows, which read the cache once."""
    rows = problem.few_rows
    if not (rows and problem.has_aligned_out and problem.uses_mma and device.supports("mma")):
        return 1
    return work_of(problem, config, device).fastest_splits()


def work_of(problem: PrefillProblem, config: PrefillMmaConfig, device: Device) -> Work:
    """The work of prefill_mma.cu: an item is a tile of rows."""
    tokens = problem.tokens_of_each
    if tokens:
        tiles = problem.num_seqs * -(-tokens * problem.group // config.rows)
    else:
        tiles = -(-problem.num_rows // config.rows)
    empty_tiles = max(0, problem.count_tiles(config.rows) - tiles)
    item_tokens = tokens or -(-config.rows // problem.group)
    kv_tiles = count_kv_tiles(problem, item_tokens, config.step_tokens)
    slices = problem.layout.num_kv_heads * count_slices(problem, config.column_warps)
    return Work(tiles * slices, empty_tiles * slices, kv_tiles, config.min_blocks * device.num_sms)


def _step_tokens(problem: PrefillProblem, device: Device, row_tiles: int) -> int:
    """Tokens of a KV tile, as registers allow. The next fp8 values of a cache are in registers, too, and ptxas
    spills more on sm_100 and later. A thread has more
    addresses where values are packed, or where the 16-byte chunks of a row do not divide the threads.

    With WMMA a lane has twice the accumulators that it has with MFMA, and on gfx11 each lane holds a whole operand row.
    On sm_75 a lane also holds its part of the next keys and values.
    """
    head_size = problem.query.shape[2]
    if row_tiles == 2 and head_size > 64:
        repeats = _repeats_columns(problem, device) and device.arch.startswith("sm_8")
        return 48 if repeats and not problem.is_fp8 and not problem.layout.packed else 32
    if device.supports("async_copies") or device.warp_size == 64:
        is_crowded = problem.p_hi_lo or (problem.is_fp8 and head_size > 192)
        return 64 if head_size <= 128 else 16 if is_crowded else 32
    if device.supports("mma"):
        return 64 if head_size <= 64 else 16 if head_size > 128 and problem.layout.packed else 32
    is_crowded = head_size > 64 or problem.is_fp8
    return 16 if is_crowded and device.arch.startswith("gfx11") else 32


def _repeats_columns(problem: PrefillProblem, device: Device) -> bool:
    """Whether a thread copies the same columns of all its rows: the 16-byte chunks of a row divide the threads."""
    return _NUM_WARPS * device.warp_size % (-(-problem.query.shape[2] // 16) * 2) == 0


def shared_memory(problem: PrefillProblem, config: PrefillMmaConfig) -> int:
    """Bytes of dynamic shared memory of a block, as prefill_mma.cu counts them.

    Queries, and two stages of keys and values; one stage where registers hold the next KV tile. Rows are padded to 128
    bytes. Warps that share rows exchange P and row max.
    """
    device, head_size, tokens = problem.query.device, problem.query.shape[2], config.step_tokens
    head_bytes, step_bytes = _row_bytes(head_size), tokens * 2
    on_matrix_cores = not device.supports("mma")
    by_dim = problem.layout.packed or on_matrix_cores
    dim_bytes = step_bytes + 16 if on_matrix_cores and tokens < 64 else max(128, step_bytes)
    slice_size, column_warps = problem.value_size // count_slices(problem, config.column_warps), config.column_warps
    slice_size = -(-slice_size // (16 * column_warps)) * 16 * column_warps  # a warp has a multiple of 16 columns
    value_bytes = slice_size * dim_bytes if by_dim else tokens * _row_bytes(slice_size)
    row_bytes = head_bytes + (_row_bytes(tokens) + 4 * column_warps if column_warps > 1 else 0)  # Q; P and row max
    return config.rows * row_bytes + _stages(problem, config) * (tokens * head_bytes + value_bytes)


def _stages(problem: PrefillProblem, config: PrefillMmaConfig) -> int:
    """KV tiles in shared memory. One where registers hold the next tile: without asynchronous copies, and for fp8."""
    return config.stages if problem.query.device.supports("async_copies") and not problem.is_fp8 else 1


def _row_bytes(elements: int) -> int:
    """Bytes of a row of 16-bit elements in shared memory."""
    return -(-elements // 64) * 128


def launch(
    problem: PrefillProblem, config: PrefillMmaConfig, constants: dict[str, Any], arguments: dict[str, Any]
) -> Launch:
    (num_tokens, num_heads, _), out, splits = problem.query.shape, problem.out, config.max_splits
    slices = count_slices(problem, config.column_warps)
    slice_size = problem.value_size // slices
    pairs = out.alignment >= 2 * out.dtype.itemsize and heads_stride(out) % 2 == 0
    kernel = _prefill_mma(
        **constants | {"VALUE_SIZE": slice_size},
        SLICES=slices,
        TOKENS=config.step_tokens,
        ROW_TILES=config.row_tiles,
        COLUMN_WARPS=config.column_warps,
        STAGES=_stages(problem, config),
        MIN_BLOCKS=config.min_blocks,
        OUT_ACCESS=2 if pairs else 1,
        HAS_SPLITS=splits > 1,
        HAS_STARTS=problem.cu_seqlens_q is not None,
        P_HI_LO=problem.p_hi_lo,
    )
    tiles, grid_y = problem.count_tiles(config.rows) if num_tokens else 0, problem.layout.num_kv_heads * slices
    return kernel.launch(
        (tiles, grid_y, splits),
        config.num_warps * out.device.warp_size,
        shared_memory(problem, config),
        num_tokens=num_tokens,
        max_splits=splits,
        arrived=Scratch(4 * tiles * grid_y, zeroed=True) if splits > 1 else 0,
        **workspace(num_tokens * num_heads * slices * splits if splits > 1 else 0, slice_size),
        **arguments,
    )
