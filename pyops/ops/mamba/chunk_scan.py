"""The prefill scan of Mamba-2: structured state-space duality (SSD)."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Literal

from ... import tuning
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors import dtypes
from ..._core.tensors.tensor import TensorArg
from ._chunk_scan_plan import choose, launches
from ._chunk_scan_problem import ChunkScanProblem, check_scan

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["mamba_chunk_scan_combined_varlen", "mamba_chunk_scan_varlen"]

_MAX_STEP = 2.0**127  # stands for no limit of the time step, because torch schemas cannot express infinity


def mamba_chunk_scan_combined_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor,
    cu_chunk_seqlens: Tensor,
    last_chunk_indices: Tensor,
    seq_idx: Tensor,
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf),
    return_intermediate_states: bool = False,
    state_dtype: Any = None,
) -> Tensor:
    """`mamba_chunk_scan_varlen` with vLLM's arguments: `dt_limit` is (dt_min, dt_max). Returns the states.

    Args:
        dt_limit: (dt_min, dt_max).
    """
    dt_min, dt_max = dt_limit
    return mamba_chunk_scan_varlen(
        x,
        dt,
        A,
        B,
        C,
        chunk_size,
        cu_seqlens,
        cu_chunk_seqlens,
        last_chunk_indices,
        seq_idx,
        out,
        D,
        z,
        dt_bias,
        initial_states,
        dt_softplus,
        dt_min,
        dt_max,
        return_intermediate_states,
        state_dtype,
    )


def _absolute_error(x: Tensor) -> float:
    """16-bit MMA operands are rounded once: the state, the weighted inputs and the weights of tokens."""
    return 2.0**-18 if x.dtype == torch.float32 else float(torch.finfo(x.dtype).eps)


@op(inout="out", returns="states", atol=_absolute_error)
def mamba_chunk_scan_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor,
    cu_chunk_seqlens: Tensor,
    last_chunk_indices: Tensor,
    seq_idx: Tensor,
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float = _MAX_STEP,
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
    *,
    states: Tensor,
) -> None:
    """The prefill scan of Mamba-2: ``h = exp(A dt) h + dt x B^T``, ``out = h C + D x``, token by token.

    `dt` is first ``clamp(softplus(dt + dt_bias), dt_min, dt_max)``, softplus only with `dt_softplus`; `out` is
    multiplied by ``silu(z)`` at the end. Accumulators and the state h are float32. float16 and bfloat16 use MMAs where
    possible, with operands that are rounded to the element type: the state that is multiplied by C, x weighted by its
    decay, and the decayed ``C . B``. In float16 the three must stay below 65520. (Dao and Gu 2024,
    arXiv:2405.21060)

    Chunk c holds the tokens ``cu_chunk_seqlens[c]`` up to ``cu_chunk_seqlens[c + 1]`` of sequence ``seq_idx[c]``, and
    begins where the chunk before it ended if that is of the same sequence, else with the initial state. A chunk without
    tokens leaves the state unchanged. So does an invalid chunk: one longer than `chunk_size`, or not within the tokens
    ``cu_seqlens[s]`` to ``cu_seqlens[s + 1]`` of its sequence s. If the last chunk of a sequence belongs to another
    sequence, the result is the initial state. The division of a sequence into chunks and calls affects only rounding.

    Args:
        x: [num_tokens, num_heads, head_size], float32, float16 or bfloat16. In x, B, C, z and out, heads are
            contiguous, and tokens have any stride.
        dt: [num_tokens, num_heads], float32, float16 or bfloat16, any strides.
        A: [num_heads] float32, negative.
        B, C: [num_tokens, num_groups, state_size] of the dtype of `x`, state_size up to 256; num_groups divides
            num_heads, and heads of a group are adjacent.
        chunk_size: tokens of a chunk, at most.
        cu_seqlens: [num_seqs + 1] int32 or int64, first token of each sequence. The four index tensors have one dtype.
        cu_chunk_seqlens: [num_chunks + 1], first token of each chunk, ascending.
        last_chunk_indices: [num_seqs], the last chunk of each sequence.
        seq_idx: [num_chunks], the sequence of each chunk.
        out: as `x`, written where chunks have tokens.
        D: [num_heads] or [num_heads, head_size], or None.
        z: as `x`, or None.
        dt_bias: [num_heads], or None.
        initial_states: [num_seqs, num_heads, head_size, state_size], contiguous, or None for zeros.
        dt_softplus, dt_min, dt_max: how `dt` is changed.
        return_intermediate_states: whether `states` has the state after every chunk, instead of every sequence.
        state_dtype: of new `states`; None is the dtype of `C`.
        states: [num_seqs or num_chunks, num_heads, head_size, state_size], float32, float16 or bfloat16, contiguous,
            written and returned; new unless given.
    """
    num_seqs, num_chunks = len(last_chunk_indices), len(seq_idx)
    starts, bounds = cu_seqlens.tolist(), cu_chunk_seqlens.tolist()
    last, seqs = last_chunk_indices.tolist(), seq_idx.tolist()
    zeros = torch.zeros(x.shape[1:] + B.shape[2:], dtype=torch.float64, device=x.device)

    def initial(seq: int) -> Tensor:
        return initial_states[seq].double() if initial_states is not None and 0 <= seq < num_seqs else zeros

    step = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    step = (torch.nn.functional.softplus(step) if dt_softplus else step).clamp(dt_min, dt_max)
    skip = None if D is None else D.double().reshape(x.shape[1], -1)
    h = zeros
    for c, seq in enumerate(seqs):
        if c == 0 or seqs[c - 1] != seq:
            h = initial(seq)
        begin, end = bounds[c : c + 2]
        known = 0 <= seq < num_seqs and 0 <= begin < end <= len(x) and end - begin <= chunk_size
        if known and starts[seq] <= begin and end <= starts[seq + 1]:
            h = _scan(out, h, slice(begin, end), x, step, A.double(), B, C, skip, z)
        if return_intermediate_states:
            states[c] = h
        elif 0 <= seq < num_seqs and last[seq] == c:
            states[seq] = h
    if not return_intermediate_states:
        for seq in range(num_seqs):
            if not 0 <= last[seq] < num_chunks or seqs[last[seq]] != seq:
                states[seq] = initial(seq)


def _scan(
    out: Tensor,
    h: Tensor,
    tokens: slice,
    x: Tensor,
    step: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    skip: Tensor | None,
    z: Tensor | None,
) -> Tensor:
    """Writes the outputs of these tokens. Returns the state after them."""
    heads_per_group = x.shape[1] // B.shape[1]
    rows = []
    kept, inputs = torch.exp(A * step[tokens]), x[tokens].double() * step[tokens, :, None]
    b, c = (value[tokens].double().repeat_interleave(heads_per_group, 1) for value in (B, C))
    for i in range(len(kept)):
        h = h * kept[i, :, None, None] + inputs[i, :, :, None] * b[i, :, None]
        rows.append((h * c[i, :, None]).sum(-1))
    y = torch.stack(rows)
    if skip is not None:
        y = y + skip * x[tokens].double()
    out[tokens] = y if z is None else y * torch.nn.functional.silu(z[tokens].double())
    return h


@mamba_chunk_scan_varlen.result
def result_mamba_chunk_scan_varlen(
    x: TensorArg,
    B: TensorArg,
    C: TensorArg,
    last_chunk_indices: TensorArg,
    seq_idx: TensorArg,
    return_intermediate_states: bool,
    state_dtype: Any,
) -> Result:
    for arg, rank in ((x, 3), (B, 3), (last_chunk_indices, 1), (seq_idx, 1)):
        if len(arg.shape) != rank:
            raise arg.error(f"expected {rank} dimensions, got shape {arg.shape}")
    count = (seq_idx if return_intermediate_states else last_chunk_indices).shape[0]
    dtype = C.dtype if state_dtype is None else dtypes.of(state_dtype)
    if dtype not in dtypes.FLOATS:
        raise x.error(f"expected a state_dtype of float32, float16 or bfloat16, got {state_dtype}")
    return Result((count, *x.shape[1:], B.shape[2]), dtype)


@mamba_chunk_scan_varlen.plan
def plan_mamba_chunk_scan_varlen(problem: ChunkScanProblem) -> list[Launch]:
    check_scan(problem)
    config = tuning.config("mamba_chunk_scan_varlen", problem, problem.x.device, choose)
    return launches(problem, config)


@mamba_chunk_scan_varlen.bad_indices
def bad_indices_mamba_chunk_scan_varlen(
    x: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor,
    cu_chunk_seqlens: Tensor,
    last_chunk_indices: Tensor,
    seq_idx: Tensor,
) -> dict[str, Tensor]:
    num_tokens, num_seqs, num_chunks = len(x), len(last_chunk_indices), len(seq_idx)
    found = {"cu_seqlens": cu_seqlens, "cu_chunk_seqlens": cu_chunk_seqlens}
    found = {name: (starts < 0) | (starts > num_tokens) for name, starts in found.items()}
    found["cu_seqlens"][1:] |= cu_seqlens.diff() < 0
    lengths = cu_chunk_seqlens.diff()
    found["cu_chunk_seqlens"][1:] |= (lengths < 0) | (lengths > chunk_size)
    found["last_chunk_indices"] = (last_chunk_indices < 0) | (last_chunk_indices >= num_chunks)
    found["seq_idx"] = (seq_idx < 0) | (seq_idx >= num_seqs)
    return found


@mamba_chunk_scan_varlen.example
def example_mamba_chunk_scan_varlen(
    make: Any,
    *,
    num_tokens: int = 512,
    num_heads: int = 6,
    head_dim: Literal[16, 64, 5] = 16,
    dtype: str = "bfloat16",
    options: bool = False,
) -> tuple[Any, ...]:
    # Three sequences with two thirds of the tokens, none, and one third.
    num_groups, chunk_size = 3 if num_heads == 6 else 1, 64 if num_tokens < 4096 else 256
    state_size = {16: 16, 64: 128}.get(head_dim, 40)
    starts = [0, num_tokens * 2 // 3, num_tokens * 2 // 3, num_tokens]
    bounds, seqs, last = [0], list[int](), list[int]()
    for seq in range(3):
        while bounds[-1] < starts[seq + 1]:
            bounds.append(min(bounds[-1] + chunk_size, starts[seq + 1]))
            seqs.append(seq)
        last.append(len(seqs) - 1)
    tokens = (num_tokens, num_heads, head_dim)
    return (
        make.randn(*tokens, dtype=dtype),
        make.randn(num_tokens, num_heads, dtype=dtype, shift=-1.0),
        make.randn(num_heads, dtype="float32", scale=0.2, shift=-1.0),
        make.randn(num_tokens, num_groups, state_size, dtype=dtype, scale=state_size**-0.25),
        make.randn(num_tokens, num_groups, state_size, dtype=dtype, scale=state_size**-0.25),
        chunk_size,
        make.values(starts, dtype="int32"),
        make.values(bounds, dtype="int32"),
        make.values(last, dtype="int32"),
        make.values(seqs, dtype="int32"),
        make.empty(*tokens, dtype=dtype),
        make.randn(num_heads, dtype="float32") if options else None,
        make.randn(*tokens, dtype=dtype) if options else None,
        make.randn(num_heads, dtype="float32"),
        make.randn(3, num_heads, head_dim, state_size, dtype="float32") if options else None,
        True,
        0.001,
        100.0,
        options,
        None,
        make.empty(len(seqs) if options else 3, num_heads, head_dim, state_size, dtype=dtype),
    )
