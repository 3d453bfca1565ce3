"""The chunked state-space scan: the problem, the choice of a Config, and the launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

from ..._core import check, tuning
from ..._core.device import Device
from ..._core.dtypes import FLOATS, float32
from ..._core.kernel import Kernel, Launch, Scratch
from ..._core.tensor import TensorArg

_chunk_scan = Kernel("mamba/chunk_scan.cu")
_chunk_scan_simt = Kernel("mamba/chunk_scan_simt.cu")
_chunk_scan_pass = Kernel("mamba/chunk_scan_pass.cu")

_MAX_TOKENS = 2**31 - 64  # kernels count tokens in 32 bits
_TOKENS, _SEGMENT_TOKENS = 32, (32, 64)  # of a tile of chunk_scan.cu; where it finds the states of segments alone
_STAGES = 2  # tiles in shared memory
_WIDE_SHARED = 150 * 1024  # bytes of shared memory in which two blocks with tiles of 64 tokens fit
_MAX_ROWS = 128  # rows of a block of chunk_scan.cu: dimensions of its heads
_MAX_STATE_OF_TWO_TILES = 128  # elements of a state: of two rows, a thread holds as many in registers
_FIRST_SPILLING_ARCH = 100  # from this compute capability on, two tiles of rows and 128 elements spill registers
_SIMT_THREADS = 128
_MAX_ITEMS = 16  # elements of a state in the registers of a thread of chunk_scan_simt.cu
_CHUNK_PARTS, _MANY_CHUNKS = 4, 16  # parts of a chunk where a segment has fewer chunks than this many
_MAX_SEGMENTS = 64  # whose states chunk_scan_pass.cu adds up, one after another
_PASS_THREADS, _PASS_BATCH = 128, 8  # of chunk_scan_pass.cu: threads of a block, segments that a thread loads at once
_RESIDENT_BLOCKS = {True: 2, False: 8}  # of a multiprocessor: of chunk_scan.cu, and of chunk_scan_simt.cu


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A call of `mamba_chunk_scan_varlen`, its arguments by name."""

    call: Mapping[str, Any]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(heads, elements of a head, groups, elements of a state)."""
        (_, num_heads, head_size), (_, num_groups, state_size) = self.call["x"].shape, self.call["B"].shape
        return num_heads, head_size, num_groups, state_size

    @property
    def num_chunks(self) -> int:
        return int(self.call["seq_idx"].shape[0])

    def segments(self, row_blocks: int) -> tuple[int, int, int]:
        """(segments that fill the device once, parts of a chunk that divide them evenly, tokens of a part)."""
        device, num_tokens = self.call["x"].device, self.call["x"].shape[0]
        blocks = _RESIDENT_BLOCKS[self.uses_mma] * device.multiprocessors
        wanted = max(1, min(blocks // row_blocks, _MAX_SEGMENTS))
        chunk_parts, part_tokens = 1, min(self.call["chunk_size"], max(1, num_tokens))
        long = 2 * num_tokens >= self.num_chunks * part_tokens  # else most parts would be empty
        if wanted > 1 and long and self.num_chunks < _MANY_CHUNKS * wanted:
            chunk_tokens = part_tokens
            part_tokens = -(-chunk_tokens // (_CHUNK_PARTS * _TOKENS)) * _TOKENS
            chunk_parts = -(-chunk_tokens // part_tokens)
        return max(1, min(wanted, self.num_chunks * chunk_parts)), chunk_parts, part_tokens

    @property
    def head_tile(self) -> int:
        """Dimensions of a head that a block of chunk_scan.cu takes."""
        _, head_size, _, state_size = self.sizes
        return gcd(head_size, _MAX_ROWS if state_size <= _MAX_STATE_OF_TWO_TILES else _MAX_ROWS // 2)

    @property
    def heads(self) -> int:
        """Heads of a block of chunk_scan.cu, which share B and C."""
        num_heads, head_size, num_groups, state_size = self.sizes
        rows = _MAX_ROWS if state_size <= _MAX_STATE_OF_TWO_TILES else _MAX_ROWS // 2
        return gcd(num_heads // num_groups, rows // self.head_tile) if self.head_tile == head_size else 1

    @property
    def row_blocks(self) -> int:
        """Blocks of chunk_scan.cu for the rows of all heads."""
        num_heads, head_size, _, _ = self.sizes
        return num_heads // self.heads * (head_size // self.head_tile)

    @property
    def uses_mma(self) -> bool:
        """Whether chunk_scan.cu serves the call; chunk_scan_simt.cu serves every call."""
        x, out, initial = self.call["x"], self.call["out"], self.call["initial_states"]
        state_size = self.sizes[3]
        read = [self.call[name] for name in ("x", "B", "C")]
        return (
            x.dtype is not float32
            and x.device.supports("mma")
            and state_size % 16 == 0
            and 16 <= state_size <= 256
            and self.head_tile % 16 == 0
            and self.heads * self.head_tile >= 32
            and all(arg.alignment == 16 and arg.strides[0] % 8 == 0 for arg in read)
            and out.alignment >= 8
            and out.strides[0] % 4 == 0
            and (initial is None or initial.alignment >= 2 * initial.dtype.itemsize)
            and self.call["states"].alignment >= 2 * self.call["states"].dtype.itemsize
        )

    def bucket(self) -> str:
        num_heads, head_size, num_groups, state_size = self.sizes
        return (
            f"{'mma' if self.uses_mma else 'simt'} {self.call['x'].dtype.name} heads={num_heads}/{num_groups}"
            f"x{head_size} state={state_size} chunks={tuning.power_of_two(self.num_chunks)}"
        )


@dataclass(frozen=True, slots=True)
class Config:
    """How one call runs.

    Attributes:
        row_tiles: tiles of 16 rows of a warp of chunk_scan.cu.
        min_blocks: of a multiprocessor that the compiler makes room for, by bounding registers.
        segment_row_tiles, segment_min_blocks: likewise, where chunk_scan.cu finds the states of segments alone.
        segment_tokens: of a tile there.
    """

    row_tiles: int
    min_blocks: int
    segment_row_tiles: int = 1
    segment_min_blocks: int = 1
    segment_tokens: int = _TOKENS

    def candidates(self, problem: Problem, device: Device) -> list[Config]:
        """Other warps, where both kinds have whole ones, and registers."""
        row_tiles = (1, 2) if problem.uses_mma and _may_have_two_tiles(problem) else ()
        several = problem.uses_mma and problem.segments(problem.row_blocks)[0] > 1
        return tuning.varied(
            self,
            row_tiles=row_tiles,
            min_blocks=(1, 2),
            segment_row_tiles=row_tiles if several else (),
            segment_min_blocks=(1, 2) if several else (),
            segment_tokens=_SEGMENT_TOKENS if several else (),
        )


def choose(problem: Problem, device: Device) -> Config:
    """The warps that read B and C least often, if their registers do not spill."""
    two_tiles = problem.uses_mma and _may_have_two_tiles(problem) and int(device.arch[3:]) < _FIRST_SPILLING_ARCH
    row_tiles = 2 if two_tiles else 1
    wide = problem.uses_mma and device.shared_memory >= _WIDE_SHARED
    return Config(row_tiles, 1, 1 if wide else row_tiles, 2 if wide else 1, _SEGMENT_TOKENS[wide])


def _may_have_two_tiles(problem: Problem) -> bool:
    return problem.heads * problem.head_tile == _MAX_ROWS


def check_scan(call: Mapping[str, Any]) -> Problem:
    """The problem of a call; OpError for a call that no kernel serves."""
    x, dt, B, C, out, D, z = (call[name] for name in ("x", "dt", "B", "C", "out", "D", "z"))
    check.floating(x)
    check.sizes(x, num_tokens=None, num_heads=None, head_size=None)
    num_tokens, num_heads, head_size = x.shape
    if num_tokens > _MAX_TOKENS:
        raise x.error(f"expected at most {_MAX_TOKENS} tokens, got {num_tokens}")
    check.sizes(B, num_tokens=num_tokens, num_groups=None, state_size=None)
    num_groups, state_size = B.shape[1:]
    if not num_groups or num_heads % num_groups:
        raise B.error(f"expected a number of groups that divides num_heads={num_heads}, got {num_groups}")
    if not 1 <= state_size <= 256:
        raise B.error(f"expected states of 1 to 256 elements, got {state_size}")
    check.dtype(B, x.dtype)
    for arg, like in ((C, B), (out, x), (z, x)):
        check.like(arg, like)
    for arg in (x, B, C, out, z):
        if arg is not None:
            check_heads(arg)
    check.floating(dt)
    check.sizes(dt, num_tokens=num_tokens, num_heads=num_heads)
    check.shape(call["A"], float32, num_heads=num_heads)
    check.dtype(call["dt_bias"], *FLOATS)
    check.shape(call["dt_bias"], num_heads=num_heads)
    if D is not None:
        check.floating(D)
        check.sizes(D, num_heads=num_heads, **({"head_size": head_size} if len(D.shape) > 1 else {}))
    if call["chunk_size"] < 1:
        raise check.refuse(x, "chunk_size", f"expected at least 1, got {call['chunk_size']}")
    _check_indices(call)
    for name in ("initial_states", "states"):
        check.dtype(call[name], *FLOATS)
    num_seqs, num_chunks = call["last_chunk_indices"].shape[0], call["seq_idx"].shape[0]
    rest = {"num_heads": num_heads, "head_size": head_size, "state_size": state_size}
    check.shape(call["initial_states"], num_seqs=num_seqs, **rest)
    count = {"num_chunks": num_chunks} if call["return_intermediate_states"] else {"num_seqs": num_seqs}
    check.shape(call["states"], **count, **rest)
    return Problem(call)


def check_heads(arg: TensorArg) -> None:
    """The last two dimensions, heads of a token, lie one after another; tokens may have any stride."""
    (heads, size), (head_stride, step) = arg.shape[-2:], arg.strides[-2:]
    if arg.numel and ((size > 1 and step != 1) or (heads > 1 and head_stride != size)):
        raise arg.error(f"expected contiguous heads, got shape {arg.shape} with strides {arg.strides}")


def _check_indices(call: Mapping[str, Any]) -> None:
    seq_idx, last = call["seq_idx"], call["last_chunk_indices"]
    check.index(seq_idx, num_chunks=None)
    check.index(last, num_seqs=None)
    check.index(call["cu_seqlens"], num_seqs_and_one=last.shape[0] + 1)
    check.index(call["cu_chunk_seqlens"], num_chunks_and_one=seq_idx.shape[0] + 1)
    for name in ("cu_seqlens", "cu_chunk_seqlens", "last_chunk_indices", "seq_idx"):
        check.dtype(call[name], seq_idx.dtype)
        check.contiguous(call[name])


def launches(problem: Problem, config: Config) -> list[Launch]:
    """The scan; before it, if there are several segments, the states that these begin with."""
    call = problem.call
    num_heads, head_size, num_groups, state_size = problem.sizes
    if not num_heads or not head_size:
        return []
    named = {
        "dt_t": call["dt"],
        "bias_t": call["dt_bias"],
        "skip_t": call["D"],
        "initial_t": call["initial_states"],
    }
    constants = {
        "scalar_t": call["x"].dtype,
        **{name: float32 if arg is None else arg.dtype for name, arg in named.items()},
        "state_t": call["states"].dtype,
        "index_t": call["seq_idx"].dtype,
        "HEAD_SIZE": head_size,
        "STATE_SIZE": state_size,
        "SOFTPLUS": call["dt_softplus"],
    }
    arguments = {name: 0 for name in ("D", "z", "dt_bias", "initial_states") if call[name] is None}
    arguments |= {f"{name}_stride": call[name].strides[0] for name in ("out", "x", "B", "C")}
    D, z = call["D"], call["z"]
    arguments |= {
        "num_tokens": call["x"].shape[0],
        "num_chunks": problem.num_chunks,
        "num_seqs": call["last_chunk_indices"].shape[0],
        "num_heads": num_heads,
        "heads_per_group": num_heads // num_groups,
        "z_stride": 0 if z is None else z.strides[0],
        "dt_stride": call["dt"].strides[0],
        "dt_step": call["dt"].strides[1],
        "D_stride": 0 if D is None else D.strides[0],
        "D_step": 0 if D is None or len(D.shape) == 1 else D.strides[1],
    }
    return (_launches_mma if problem.uses_mma else _launches_simt)(problem, config, constants, arguments)


class Geometry(NamedTuple):
    """Constants of a launch that are its own, threads of a block, and bytes of shared memory."""

    constants: dict[str, Any]
    num_threads: int
    shared: int


def _launches_mma(
    problem: Problem, config: Config, constants: dict[str, Any], arguments: dict[str, Any]
) -> list[Launch]:
    state_size = problem.sizes[3]
    heads, head_tile = problem.heads, problem.head_tile
    rows = heads * head_tile
    out = problem.call["out"]
    constants |= {
        "HEADS": heads,
        "HEAD_TILE": head_tile,
        "OUT_VEC": 8 if out.alignment == 16 and out.strides[0] % 8 == 0 else 4,
    }
    # Rows of 64 elements or a multiple; stages of x, B and C; weights of each head.
    state_bytes, x_bytes = (_TOKENS * -(-size // 64) * 128 for size in (state_size, rows))
    shared = {
        False: _STAGES * (2 * state_bytes + x_bytes) + heads * _TOKENS * 128,
        True: _STAGES * config.segment_tokens // _TOKENS * (state_bytes + x_bytes),
    }

    def geometry(of_segments: bool) -> Geometry:
        tokens, row_tiles, min_blocks = _TOKENS, config.row_tiles, config.min_blocks
        if of_segments:
            tokens, row_tiles, min_blocks = config.segment_tokens, config.segment_row_tiles, config.segment_min_blocks
        own = {"TOKENS": tokens, "ROW_TILES": row_tiles, "MIN_BLOCKS": min_blocks}
        return Geometry(own, 2 * rows // row_tiles, shared[of_segments])

    return _both(_chunk_scan, problem, constants, arguments, problem.row_blocks, geometry)


def _launches_simt(
    problem: Problem, config: Config, constants: dict[str, Any], arguments: dict[str, Any]
) -> list[Launch]:
    num_heads, head_size, _, state_size = problem.sizes
    lanes = min(32, tuning.power_of_two(-(-state_size // _MAX_ITEMS)))
    rows = _SIMT_THREADS // lanes
    constants |= {"LANES": lanes, "ROWS": rows, "MIN_BLOCKS": config.min_blocks}
    row_blocks = num_heads * -(-head_size // rows)
    return _both(_chunk_scan_simt, problem, constants, arguments, row_blocks, lambda _: Geometry({}, _SIMT_THREADS, 0))


def _both(
    kernel: Kernel,
    problem: Problem,
    constants: dict[str, Any],
    arguments: dict[str, Any],
    row_blocks: int,
    geometry: Callable[[bool], Geometry],
) -> list[Launch]:
    """The launches: those of the states of segments (geometry(True)), if there are several, and that of the results."""
    call = problem.call
    num_heads, head_size, _, state_size = problem.sizes
    num_segments, chunk_parts, part_tokens = problem.segments(row_blocks)
    arguments |= {"num_segments": num_segments, "chunk_parts": chunk_parts, "part_tokens": part_tokens}
    states: int | Scratch = 0
    decays: int | Scratch = 0
    if num_segments > 1:
        decays = Scratch((num_segments - 1) * num_heads * 4)
        states = Scratch((num_segments - 1) * num_heads * head_size * state_size * 4)

    def launch(segment_states: bool) -> Launch:
        own, num_threads, shared = geometry(segment_states)
        own |= constants | {
            "SEGMENT_STATES": segment_states,
            "HAS_Z": call["z"] is not None and not segment_states,
            "CHUNK_STATES": call["return_intermediate_states"] and not segment_states,
        }
        grid = (row_blocks, num_segments - segment_states)
        return kernel(**own).launch(
            grid,
            num_threads,
            shared,
            segment_states=states,
            segment_decays=decays,
            **arguments,
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
