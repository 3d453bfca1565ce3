"""The chunked state-space scan: the choice of a Config, and the launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import float32
from ._chunk_scan_problem import BLOCKS, MAX_ROWS, ChunkScanProblem

_chunk_scan = Kernel("mamba/chunk_scan.cu")
_chunk_scan_states = Kernel("mamba/chunk_scan_states.cu")
_chunk_scan_simt = Kernel("mamba/chunk_scan_simt.cu")
_chunk_scan_pass = Kernel("mamba/chunk_scan_pass.cu")

_TOKENS, _SEGMENT_TOKENS = 32, (32, 64)  # tokens of a tile of chunk_scan.cu: for results, for states of segments
_STAGES, _WGMMA_STAGES = 2, 3  # stages: most of chunk_scan.cu, and those of chunk_scan_states.cu
_PITCH = 8  # AMD: padding of rows of tokens in shared memory of chunk_scan.cu, in elements
# Constants of chunk_scan_states.cu.
_OF_STATES = (
    *("scalar_t", "dt_t", "bias_t", "initial_t", "index_t"),
    *("HEAD_SIZE", "STATE_SIZE", "SOFTPLUS", "HEADS", "HEAD_TILE"),
)
_WIDE_SHARED = 150 * 1024  # bytes of shared memory of an SM into which two blocks with tiles of 64 tokens fit
_FIRST_SPILLING_ARCH = 100  # compute capability from which two row tiles with a state of 128 elements spill
_SIMT_THREADS = 128  # threads of a block of chunk_scan_simt.cu
_MAX_ITEMS = 16  # most elements of the state in registers of a thread of chunk_scan_simt.cu
_PASS_THREADS, _PASS_BATCH = 128, 8  # chunk_scan_pass.cu: threads of a block, segments that a thread loads at once


@dataclass(frozen=True, slots=True)
class ChunkScanConfig:
    """The geometry of the kernels of one call.

    Attributes:
        row_tiles: tiles of 16 rows per warp of chunk_scan.cu.
        min_blocks: resident blocks per SM for which the compiler bounds registers.
        segment_row_tiles, segment_min_blocks: the same for the launch of chunk_scan.cu that computes only the states of
            segments.
        segment_tokens: tokens of a tile of that launch.
        segment_wgmma: whether chunk_scan_states.cu computes these states instead.
    """

    row_tiles: int
    min_blocks: int
    segment_row_tiles: int = 1
    segment_min_blocks: int = 1
    segment_tokens: int = _TOKENS
    segment_wgmma: bool = False

    def candidates(self, problem: ChunkScanProblem, device: Device) -> list[ChunkScanConfig]:
        """Other row tiles per warp, register bounds, and kernels for the states of segments."""
        row_tiles = (1, 2) if problem.uses_products and _may_have_two_tiles(problem) else ()
        several = problem.uses_products and problem.segments(problem.row_blocks)[0] > 1
        return tuning.varied(
            self,
            row_tiles=row_tiles,
            min_blocks=(1, 2),
            segment_row_tiles=row_tiles if several else (),
            segment_min_blocks=(1, 2) if several else (),
            segment_tokens=_SEGMENT_TOKENS if several else (),
            segment_wgmma=(False, True) if several and problem.uses_wgmma else (),
        )


def choose(problem: ChunkScanProblem, device: Device) -> ChunkScanConfig:
    """Two row tiles per warp unless they spill, so that B and C are read less often. Where registers hold copies it is
    one: on AMD for more waves, on sm_75 because two would spill."""
    if not device.supports("async_copies"):
        return ChunkScanConfig(1, 1)
    two_tiles = problem.uses_products and _may_have_two_tiles(problem) and int(device.arch[3:]) < _FIRST_SPILLING_ARCH
    row_tiles = 2 if two_tiles else 1
    wide = problem.uses_products and device.shared_memory >= _WIDE_SHARED
    return ChunkScanConfig(
        row_tiles, 1, 1 if wide else row_tiles, 2 if wide else 1, _SEGMENT_TOKENS[wide], problem.uses_wgmma
    )


def _may_have_two_tiles(problem: ChunkScanProblem) -> bool:
    return problem.heads * problem.head_tile == MAX_ROWS


def launches(problem: ChunkScanProblem, config: ChunkScanConfig) -> list[Launch]:
    """The scan; before it, if there are several segments, the states that these begin with."""
    num_heads, head_size, num_groups, state_size = problem.sizes
    if not num_heads or not head_size:
        return []
    named = {
        "dt_t": problem.dt,
        "bias_t": problem.dt_bias,
        "skip_t": problem.D,
        "initial_t": problem.initial_states,
    }
    constants = {
        "scalar_t": problem.x.dtype,
        **{name: float32 if arg is None else arg.dtype for name, arg in named.items()},
        "state_t": problem.states.dtype,
        "index_t": problem.seq_idx.dtype,
        "HEAD_SIZE": head_size,
        "STATE_SIZE": state_size,
        "SOFTPLUS": problem.dt_softplus,
    }
    arguments = {name: 0 for name in ("D", "z", "dt_bias", "initial_states") if getattr(problem, name) is None}
    arguments |= {f"{name}_stride": getattr(problem, name).strides[0] for name in ("out", "x", "B", "C")}
    D, z = problem.D, problem.z
    arguments |= {
        "num_tokens": problem.x.shape[0],
        "num_chunks": problem.num_chunks,
        "num_seqs": problem.last_chunk_indices.shape[0],
        "num_heads": num_heads,
        "heads_per_group": num_heads // num_groups,
        "z_stride": 0 if z is None else z.strides[0],
        "dt_stride": problem.dt.strides[0],
        "dt_step": problem.dt.strides[1],
        "D_stride": 0 if D is None else D.strides[0],
        "D_step": 0 if D is None or len(D.shape) == 1 else D.strides[1],
    }
    return (_launches_products if problem.uses_products else _launches_simt)(problem, config, constants, arguments)


class Geometry(NamedTuple):
    """A launch's kernel and constants, threads of a block, and bytes of shared memory."""

    kernel: Kernel
    constants: dict[str, Any]
    num_threads: int
    shared: int


def _launches_products(
    problem: ChunkScanProblem, config: ChunkScanConfig, constants: dict[str, Any], arguments: dict[str, Any]
) -> list[Launch]:
    heads, rows, state_size = problem.heads, problem.heads * problem.head_tile, problem.sizes[3]
    device, out = problem.x.device, problem.out
    constants |= {"HEADS": heads, "HEAD_TILE": problem.head_tile}
    out_vec = 8 if out.alignment == 16 and out.strides[0] % 8 == 0 else 4

    def geometry(of_segments: bool) -> Geometry:
        if of_segments and config.segment_wgmma:
            tokens = problem.tile_tokens
            decays = 2 * 4 * heads * tokens * float32.itemsize
            shared_bytes = _WGMMA_STAGES * tokens * 2 * (rows + state_size) + -(-decays // 1024) * 1024
            kernel = _chunk_scan_states.for_arch(device.arch_feature)
            return Geometry(kernel, {name: constants[name] for name in _OF_STATES}, 2 * rows, shared_bytes)
        tokens, row_tiles, min_blocks = _TOKENS, config.row_tiles, config.min_blocks
        if of_segments:
            tokens, row_tiles, min_blocks = config.segment_tokens, config.segment_row_tiles, config.segment_min_blocks
        stages, shared = _shared_memory(problem, tokens, of_segments)
        own = {"TOKENS": tokens, "ROW_TILES": row_tiles, "STAGES": stages, "MIN_BLOCKS": min_blocks, "OUT_VEC": out_vec}
        own |= constants | _options(problem, of_segments)
        return Geometry(_chunk_scan, own, rows // (16 * row_tiles) * device.warp_size, shared)

    return _both(problem, arguments, problem.row_blocks, geometry)


def _shared_memory(problem: ChunkScanProblem, tokens: int, of_segments: bool) -> tuple[int, int]:
    """Stages of chunk_scan.cu, and bytes of dynamic shared memory: x, B and C of each stage, and weights of each head.

    Where registers hold copies, stages are given up so that BLOCKS blocks fit on an SM.
    """
    heads, state_size, device = problem.heads, problem.sizes[3], problem.x.device
    # Rows of 64 elements or a multiple.
    state_bytes, x_bytes, square_bytes = (
        tokens * -(-size // 64) * 128 for size in (state_size, heads * problem.head_tile, tokens)
    )
    transposed_bytes = state_bytes
    if not device.supports("mma"):
        transposed_bytes, square_bytes = (2 * rows * (tokens + _PITCH) for rows in (state_size, tokens))
    stage_bytes = x_bytes + transposed_bytes + (0 if of_segments else state_bytes)
    weight_bytes = 0 if of_segments else heads * square_bytes
    stages = _STAGES
    if not device.supports("async_copies"):
        decays = 2 * 4 * heads * tokens * float32.itemsize  # decays of two tiles, in static shared memory
        choices = [(blocks, n) for blocks in (BLOCKS, 1) for n in (_STAGES, 1)]
        fixed, memory = weight_bytes + decays, device.shared_memory
        stages = next((n for blocks, n in choices if blocks * (n * stage_bytes + fixed) <= memory), 1)
    return stages, stages * stage_bytes + weight_bytes


def _options(problem: ChunkScanProblem, of_segments: bool) -> dict[str, bool]:
    return {
        "SEGMENT_STATES": of_segments,
        "HAS_Z": problem.z is not None and not of_segments,
        "CHUNK_STATES": problem.return_intermediate_states and not of_segments,
    }


def _launches_simt(
    problem: ChunkScanProblem, config: ChunkScanConfig, constants: dict[str, Any], arguments: dict[str, Any]
) -> list[Launch]:
    num_heads, head_size, _, state_size = problem.sizes
    lanes = min(32, tuning.power_of_two(-(-state_size // _MAX_ITEMS)))
    rows = _SIMT_THREADS // lanes
    constants |= {"LANES": lanes, "ROWS": rows, "MIN_BLOCKS": config.min_blocks}

    def geometry(of_segments: bool) -> Geometry:
        return Geometry(_chunk_scan_simt, constants | _options(problem, of_segments), _SIMT_THREADS, 0)

    return _both(problem, arguments, num_heads * -(-head_size // rows), geometry)


def _both(
    problem: ChunkScanProblem, arguments: dict[str, Any], row_blocks: int, geometry: Callable[[bool], Geometry]
) -> list[Launch]:
    """With several segments, the launches for their states (geometry(True)); then the launch for the results."""
    num_heads, head_size, _, state_size = problem.sizes
    num_segments, chunk_parts, part_tokens = problem.segments(row_blocks)
    arguments |= {"num_segments": num_segments, "chunk_parts": chunk_parts, "part_tokens": part_tokens}
    states: int | Scratch = 0
    decays: int | Scratch = 0
    if num_segments > 1:
        decays = Scratch((num_segments - 1) * num_heads * 4)
        states = Scratch((num_segments - 1) * num_heads * head_size * state_size * 4)

    def launch(segment_states: bool) -> Launch:
        kernel, constants, num_threads, shared = geometry(segment_states)
        return kernel(**constants).launch(
            (row_blocks, num_segments - segment_states),
            num_threads,
            shared,
            segment_states=states,
            segment_decays=decays,
            **kernel.taken(arguments),
        )

    if num_segments == 1:
        return [launch(False)]
    vec_size = 4 if head_size * state_size % 4 == 0 else 1
    add_up = _chunk_scan_pass(
        STATE_SIZE=head_size * state_size, VEC_SIZE=vec_size, BATCH=_PASS_BATCH, NUM_THREADS=_PASS_THREADS
    ).launch(
        -(-num_heads * head_size * state_size // (vec_size * _PASS_THREADS)),
        _PASS_THREADS,
        segment_states=states,
        segment_decays=decays,
        num_states=num_segments - 1,
        num_heads=num_heads,
    )
    return [launch(True), *([add_up] if num_segments > 2 else []), launch(False)]
