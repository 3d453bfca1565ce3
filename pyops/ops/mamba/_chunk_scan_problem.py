"""A call of the chunked state-space scan: what its kernels depend on, and its checks."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from ... import check, tuning
from ..._core.tensors.dtypes import FLOATS, float32
from ..._core.tensors.tensor import TensorArg
from .._shared.products import multiplies

_MAX_TOKENS = 2**31 - 64  # kernels count tokens in 32 bits
MAX_ROWS = 128  # most rows of a block of chunk_scan.cu and chunk_scan_states.cu; a row is an element of a head
_MAX_STATE_OF_TWO_TILES = 128  # most elements of a state with which a warp holds two row tiles in registers
_CHUNK_PARTS, _MANY_CHUNKS = 4, 16  # parts of a chunk if a segment has fewer than _MANY_CHUNKS chunks
_MAX_SEGMENTS = 64  # most segments: chunk_scan_pass.cu combines their states sequentially
BLOCKS, _SIMT_BLOCKS = 2, 8  # resident blocks per SM: of the kernels with MMAs, and of chunk_scan_simt.cu
_WIDE = 64  # elements of a row of a tile in shared memory of chunk_scan_states.cu


@dataclass(frozen=True, slots=True, eq=False)
class ChunkScanProblem:
    """A call of `mamba_chunk_scan_varlen`: the arguments that its plan depends on."""

    x: TensorArg
    dt: TensorArg
    A: TensorArg
    B: TensorArg
    C: TensorArg
    chunk_size: int
    cu_seqlens: TensorArg
    cu_chunk_seqlens: TensorArg
    last_chunk_indices: TensorArg
    seq_idx: TensorArg
    out: TensorArg
    D: TensorArg | None
    z: TensorArg | None
    dt_bias: TensorArg | None
    initial_states: TensorArg | None
    dt_softplus: bool
    return_intermediate_states: bool
    states: TensorArg

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(heads, elements of a head, groups, elements of a state)."""
        (_, num_heads, head_size), (_, num_groups, state_size) = self.x.shape, self.B.shape
        return num_heads, head_size, num_groups, state_size

    @property
    def num_chunks(self) -> int:
        return int(self.seq_idx.shape[0])

    def segments(self, row_blocks: int) -> tuple[int, int, int]:
        """(segments that fill the device once, parts of a chunk that divide them evenly, tokens of a part)."""
        device, num_tokens = self.x.device, self.x.shape[0]
        blocks = (BLOCKS if self.uses_products else _SIMT_BLOCKS) * device.num_sms
        wanted = 1 if tuning.batch_invariant() else max(1, min(blocks // row_blocks, _MAX_SEGMENTS))
        chunk_parts, part_tokens = 1, min(self.chunk_size, max(1, num_tokens))
        long = 2 * num_tokens >= self.num_chunks * part_tokens  # else most parts would be empty
        if wanted > 1 and long and self.num_chunks < _MANY_CHUNKS * wanted:
            chunk_tokens = part_tokens
            tile = self.tile_tokens
            part_tokens = -(-chunk_tokens // (_CHUNK_PARTS * tile)) * tile
            chunk_parts = -(-chunk_tokens // part_tokens)
        return max(1, min(wanted, self.num_chunks * chunk_parts)), chunk_parts, part_tokens

    @property
    def head_tile(self) -> int:
        """Elements of a head per block of chunk_scan.cu."""
        _, head_size, _, state_size = self.sizes
        return gcd(head_size, MAX_ROWS if state_size <= _MAX_STATE_OF_TWO_TILES else MAX_ROWS // 2)

    @property
    def heads(self) -> int:
        """Heads per block of chunk_scan.cu; they share B and C."""
        num_heads, head_size, num_groups, state_size = self.sizes
        rows = MAX_ROWS if state_size <= _MAX_STATE_OF_TWO_TILES else MAX_ROWS // 2
        return gcd(num_heads // num_groups, rows // self.head_tile) if self.head_tile == head_size else 1

    @property
    def row_blocks(self) -> int:
        """Blocks of chunk_scan.cu for the rows of all heads."""
        num_heads, head_size, _, _ = self.sizes
        return num_heads // self.heads * (head_size // self.head_tile)

    @property
    def uses_products(self) -> bool:
        """Whether chunk_scan.cu serves the call; chunk_scan_simt.cu serves every call."""
        x, out, initial = self.x, self.out, self.initial_states
        state_size = self.sizes[3]
        return (
            multiplies(x.dtype, x.device)
            and state_size % 16 == 0
            and 16 <= state_size <= self._max_state
            and self.head_tile % 16 == 0
            and self.heads * self.head_tile >= 32
            and all(arg.alignment == 16 and arg.strides[0] % 8 == 0 for arg in (x, self.B, self.C))
            and out.alignment >= 8
            and out.strides[0] % 4 == 0
            and (initial is None or initial.alignment >= 2 * initial.dtype.itemsize)
            and self.states.alignment >= 2 * self.states.dtype.itemsize
        )

    @property
    def _max_state(self) -> int:
        """Elements of a state for which the registers of chunk_scan.cu suffice."""
        device = self.x.device
        if device.supports("mma") or device.warp_size == 64:
            return 256
        # With WMMA a lane holds twice as much of the state as with MFMA, and the fewer rows share the loads, the more
        # loads it has in flight. The gates z are loaded early and take registers, too.
        rows = self.heads * self.head_tile
        return rows if self.z is None else min(rows, 64)

    @property
    def uses_wgmma(self) -> bool:
        """Whether chunk_scan_states.cu can compute the states of segments."""
        state_size = self.sizes[3]
        wide = self.head_tile % _WIDE == 0 and state_size in (_WIDE, 2 * _WIDE)
        return wide and self.uses_products and self.x.device.supports("wgmma")

    @property
    def tile_tokens(self) -> int:
        """Tokens of the larger tile: 64 in chunk_scan_states.cu, 32 in chunk_scan.cu."""
        return 64 if self.uses_wgmma else 32

    def bucket(self) -> str:
        num_heads, head_size, num_groups, state_size = self.sizes
        kind = "wgmma" if self.uses_wgmma else "mma" if self.uses_products else "simt"
        return (
            f"{kind} {self.x.dtype.name} heads={num_heads}/{num_groups}"
            f"x{head_size} state={state_size} chunks={tuning.power_of_two(self.num_chunks)}"
        )


def check_scan(problem: ChunkScanProblem) -> None:
    """OpError for a call that no kernel serves."""
    x, dt, B, D, z = problem.x, problem.dt, problem.B, problem.D, problem.z
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
    for arg, like in ((problem.C, B), (problem.out, x), (z, x)):
        check.like(arg, like)
    for arg in (x, B, problem.C, problem.out, z):
        if arg is not None:
            check_heads(arg)
    check.floating(dt)
    check.sizes(dt, num_tokens=num_tokens, num_heads=num_heads)
    check.shape(problem.A, float32, num_heads=num_heads)
    check.dtype(problem.dt_bias, *FLOATS)
    check.shape(problem.dt_bias, num_heads=num_heads)
    if D is not None:
        check.floating(D)
        check.sizes(D, num_heads=num_heads, **({"head_size": head_size} if len(D.shape) > 1 else {}))
    if problem.chunk_size < 1:
        raise check.refuse(x, "chunk_size", f"expected at least 1, got {problem.chunk_size}")
    _check_indices(problem)
    for states in (problem.initial_states, problem.states):
        check.dtype(states, *FLOATS)
    num_seqs, num_chunks = problem.last_chunk_indices.shape[0], problem.seq_idx.shape[0]
    rest = {"num_heads": num_heads, "head_size": head_size, "state_size": state_size}
    check.shape(problem.initial_states, num_seqs=num_seqs, **rest)
    count = {"num_chunks": num_chunks} if problem.return_intermediate_states else {"num_seqs": num_seqs}
    check.shape(problem.states, **count, **rest)


def check_heads(arg: TensorArg) -> None:
    """Check that the last two dimensions (heads of a token) are contiguous; tokens may have any stride."""
    (heads, size), (head_stride, step) = arg.shape[-2:], arg.strides[-2:]
    if arg.numel and ((size > 1 and step != 1) or (heads > 1 and head_stride != size)):
        raise arg.error(f"expected contiguous heads, got shape {arg.shape} with strides {arg.strides}")


def _check_indices(problem: ChunkScanProblem) -> None:
    seq_idx, last = problem.seq_idx, problem.last_chunk_indices
    check.index(seq_idx, num_chunks=None)
    check.index(last, num_seqs=None)
    check.index(problem.cu_seqlens, num_seqs_and_one=last.shape[0] + 1)
    check.index(problem.cu_chunk_seqlens, num_chunks_and_one=seq_idx.shape[0] + 1)
    for arg in (problem.cu_seqlens, problem.cu_chunk_seqlens, last, seq_idx):
        check.dtype(arg, seq_idx.dtype)
        check.contiguous(arg)
