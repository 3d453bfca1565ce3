"""The decode step of a state-space model: its recurrence over the newest token, or a few tokens, of each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32, int32
from ..._core.tensors.tensor import TensorArg
from ._common import MAX_STATES, PAD_SLOT_ID
from ._step_geometry import StepProblem, choose

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["selective_state_update"]

_selective_state_update = Kernel("mamba/selective_state_update.cu")
_ACCESS = 16  # bytes of the widest access


@op(out="out", inout="state", atol=2.0**-18)
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    dst_state_batch_indices: Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID,
    out: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    is_blackwell: bool = False,
) -> None:
    """The recurrence of Mamba for the newest token of each sequence, or for a few tokens (Gu and Dao 2023).

    For each row p of a head, with the sequence's state h, and over its tokens t in order::

        d = dt[t, p] + dt_bias[p], then softplus(d) if dt_softplus
        h[n] = exp(d * A[p, n]) * h[n] + d * x[t, p] * B[t, n]
        y = sum(h * C[t]) + D[p] * x[t, p]
        out[t, p] = y * silu(z[t, p])

    computed in float32. The dimensions `heads` and `groups` may be missing, from all tensors. Without `cu_seqlens`
    sequence i has one token, number i.

    The state is read from slot ``state_batch_indices[i]``, and the state after the last token is written to slot
    ``dst_state_batch_indices[i]``. If the indices have several columns, the first one is used. With
    `num_accepted_tokens` the tokens are drafts: the state is read from column ``max(num_accepted_tokens[i] - 1, 0)`` of
    the sequence's slots, and the state after its token t is written to column t.

    A slot that is `pad_slot_id` or does not exist is not written. Nothing is written of a sequence that would read such
    a slot, or that has tokens that do not exist.

    Args:
        state: [num_slots, heads, head_size, state_size], float32, float16 or bfloat16; states contiguous, any
            other strides; state_size is at most 256. Written. No sequence may read or write a slot that another writes.
        x: [num_tokens, heads, head_size], float32, float16 or bfloat16, any strides.
        dt: the same, of any of these types.
        A: [heads, head_size, state_size] float32; states contiguous, or expanded from one number for each row;
            any other strides.
        B, C: [num_tokens, groups, state_size] of the dtype of `x`; states contiguous. ``heads / groups`` adjacent
            heads share a group.
        D, dt_bias: [heads, head_size], of any floating type and any strides; or None for 0.
        z: as `x`; or None: out is y.
        dt_softplus: whether time steps are softplus(dt + dt_bias).
        state_batch_indices: [batch] or [batch, columns] int32; or None: sequence i has slot i.
        dst_state_batch_indices: likewise; or None: states are written to the slots from which they were read.
        pad_slot_id: the slot of a padding sequence.
        out: as `x`, written. It must be given.
        num_accepted_tokens: [batch] int32, contiguous; needs `state_batch_indices` of two dimensions.
        cu_seqlens: [batch + 1] int32, contiguous: the first token of each sequence, and the end of the last. Sequences
            may not overlap.
        is_blackwell: for compatibility with vLLM; no effect.
    """
    assert out is not None
    if state.ndim == 3:
        state, A = state.unsqueeze(1), A.unsqueeze(0)
        x, dt, B, C, out = (each.unsqueeze(1) for each in (x, dt, B, C, out))
        z = None if z is None else z.unsqueeze(1)
        D, dt_bias = (None if each is None else each.unsqueeze(0) for each in (D, dt_bias))
    batch = len(x) if cu_seqlens is None else len(cu_seqlens) - 1

    def slot_of(indices: Tensor | None, sequence: int, column: int) -> int:
        if indices is None:
            return sequence
        row = indices[sequence].reshape(-1)
        slot = int(row[column]) if column < len(row) else -1
        return slot if slot != pad_slot_id and 0 <= slot < len(state) else -1

    targets = state_batch_indices if dst_state_batch_indices is None else dst_state_batch_indices
    share = A.shape[0] // B.shape[1]
    for i in range(batch):
        begin, end = (i, i + 1) if cu_seqlens is None else cu_seqlens[i : i + 2].tolist()
        accepted = 1 if num_accepted_tokens is None else int(num_accepted_tokens[i])
        source = slot_of(state_batch_indices, i, max(accepted - 1, 0))
        if source < 0 or not 0 <= begin < end <= len(x):
            continue
        h = state[source].float()
        for t in range(begin, end):
            d = dt[t].float() + (0 if dt_bias is None else dt_bias.float())
            d = torch.nn.functional.softplus(d) if dt_softplus else d
            b, c = (each[t].float().repeat_interleave(share, 0)[:, None] for each in (B, C))
            h = torch.exp(d[..., None] * A) * h + (d * x[t].float())[..., None] * b
            y = (h * c).sum(-1) + (0 if D is None else D.float() * x[t].float())
            out[t] = (y if z is None else y * torch.nn.functional.silu(z[t].float())).to(out.dtype)
            target = slot_of(targets, i, 0 if num_accepted_tokens is None else t - begin)
            if target >= 0 and (num_accepted_tokens is not None or t == end - 1):
                state[target] = h.to(state.dtype)


@selective_state_update.result
def result_selective_state_update(x: TensorArg) -> Result:
    return Result(x.shape, x.dtype)


@selective_state_update.plan
def plan_selective_state_update(
    state: TensorArg,
    x: TensorArg,
    dt: TensorArg,
    A: TensorArg,
    B: TensorArg,
    C: TensorArg,
    D: TensorArg | None,
    z: TensorArg | None,
    dt_bias: TensorArg | None,
    state_batch_indices: TensorArg | None,
    dst_state_batch_indices: TensorArg | None,
    out: TensorArg | None,
    num_accepted_tokens: TensorArg | None,
    cu_seqlens: TensorArg | None,
) -> Launch:
    if out is None:
        raise check.refuse(state, "out", "expected a tensor, got None")
    check.floating(state)
    check.floating(x)
    has_heads = len(state.shape) != 3
    heads_of = {"heads": state.shape[1]} if len(state.shape) == 4 else {}
    check.sizes(state, num_slots=None, **dict.fromkeys(["heads"] * has_heads), head_size=None, state_size=None)
    num_slots, head_size, state_size = state.shape[0], *state.shape[-2:]
    if not 1 <= state_size <= MAX_STATES:
        raise state.error(f"expected 1 to {MAX_STATES} states, got shape {state.shape}")
    rows = {**heads_of, "head_size": head_size}
    check.sizes(x, num_tokens=None, **rows)
    num_tokens = x.shape[0]
    for arg in (dt, z, out):
        if arg:
            check.sizes(arg, num_tokens=num_tokens, **rows)
    check.floating(dt)
    for each in (z, out):
        check.dtype(each, x.dtype)
    check.sizes(A, **rows, state_size=state_size)
    check.dtype(A, float32)
    num_groups = B.shape[1] if has_heads and len(B.shape) == 3 else 1
    heads = heads_of.get("heads", 1)
    if num_groups < 1 or heads % num_groups:
        raise B.error(f"expected groups that divide the {heads} heads of state, got shape {B.shape}")
    for vector in (B, C):
        groups_of = {"groups": num_groups} if has_heads else {}
        check.sizes(vector, num_tokens=num_tokens, **groups_of, state_size=state_size)
        check.dtype(vector, x.dtype)
    for row in (D, dt_bias):
        if row:
            check.sizes(row, **rows)
            check.floating(row)
    tied = A.strides[-1] == 0 or state_size == 1
    vectors = [state, B, C] if tied else [state, A, B, C]
    for vector in vectors:
        check.row_size(vector)
    batch = num_tokens
    if cu_seqlens:
        check.sizes(cu_seqlens, **{"batch + 1": None})
        batch = cu_seqlens.shape[0] - 1
        if batch < 0:
            raise cu_seqlens.error("expected at least one element, got none")
        check.shape(cu_seqlens, int32, **{"batch + 1": batch + 1})
    check.shape(num_accepted_tokens, int32, batch=batch)
    if num_accepted_tokens and (state_batch_indices is None or len(state_batch_indices.shape) != 2):
        raise check.refuse(state, "state_batch_indices", "expected [batch, columns], as num_accepted_tokens is given")
    columns, slots_stride = _columns(state_batch_indices, batch)
    dst_columns, dst_stride = _columns(dst_state_batch_indices, batch)
    if state_batch_indices is None and num_slots < batch:
        raise state.error(f"expected a slot for each of {batch} sequences, got shape {state.shape}")

    # Tensors with aligned 16-byte accesses serve any vector width, by several accesses: only the others limit it.
    widths = [check.vector_width(state_size, arg) for arg in vectors]
    narrow = [width for width, arg in zip(widths, vectors, strict=True) if width * arg.dtype.itemsize < _ACCESS]
    vec_size = min([widths[0], *narrow])
    problem = StepProblem(batch, heads, head_size, state_size, state.dtype, vec_size, tied, cu_seqlens is not None)
    config = tuning.config(state.op, problem, state.device, choose)
    head_blocks = config.head_blocks(problem)

    def strides(name: str, arg: TensorArg | None, *dims: str) -> dict[str, int]:
        """Kernel arguments for the strides of `dims`; a missing head dimension gets stride 0."""
        steps = list(arg.strides[: len(arg.shape)]) if arg else [0] * len(dims)
        if arg and not has_heads:
            steps.insert(len(dims) - 2, 0)
        return {f"{name}_{dim}stride": step for dim, step in zip(dims, steps, strict=False)}

    token_strides: dict[str, int] = {}
    for name, arg in (("x", x), ("dt", dt), ("z", z), ("out", out)):
        token_strides |= strides(name, arg, "", "head_", "row_")
    for name, arg in (("B", B), ("C", C)):
        token_strides |= {f"{name}_stride": arg.strides[0], f"{name}_group_stride": arg.strides[1] if has_heads else 0}
    for name, arg in (("A", A), ("D", D), ("bias", dt_bias)):
        token_strides |= strides(name, arg, "head_", "row_")
    return _selective_state_update(
        scalar_t=x.dtype,
        state_t=state.dtype,
        dt_t=dt.dtype,
        D_t=(D or x).dtype,
        bias_t=(dt_bias or x).dtype,
        STATE_SIZE=state_size,
        LANES=problem.lanes,
        VEC_SIZE=problem.vec_size,
        ROWS=config.rows,
        SEQUENCES=config.sequences,
        HAS_STARTS=cu_seqlens is not None,
        DRAFTS=num_accepted_tokens is not None,
        TIED=tied,
        NUM_THREADS=config.num_threads,
        MIN_BLOCKS=config.min_blocks,
    ).launch(
        grid=config.num_blocks(problem) if num_tokens and num_slots else 0,
        block=config.num_threads,
        num_slots=num_slots,
        num_tokens=num_tokens,
        columns=columns,
        dst_columns=dst_columns,
        slots_stride=slots_stride,
        dst_stride=dst_stride,
        batch=batch,
        heads=heads,
        head_size=head_size,
        head_blocks=head_blocks,
        group_heads=heads // num_groups,
        slot_stride=state.strides[0],
        state_head_stride=state.strides[1] if has_heads else 0,
        state_row_stride=state.strides[-2],
        **token_strides,
    )


def _columns(indices: TensorArg | None, batch: int) -> tuple[int, int]:
    """(slots of each sequence, or -1 where sequence i has slot i; elements from one sequence to the next)."""
    if indices is None:
        return -1, 0
    check.dtype(indices, int32)
    if len(indices.shape) == 1:
        check.sizes(indices, batch=batch)
        return 1, indices.strides[0]
    check.sizes(indices, batch=batch, columns=None)
    check.row_size(indices)
    return indices.shape[1], indices.strides[0]


@selective_state_update.bad_indices
def bad_indices_selective_state_update(
    state: Tensor,
    x: Tensor,
    state_batch_indices: Tensor | None,
    dst_state_batch_indices: Tensor | None,
    pad_slot_id: int,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor | None,
) -> dict[str, Tensor]:
    found = {}
    slots = {"state_batch_indices": state_batch_indices, "dst_state_batch_indices": dst_state_batch_indices}
    for name, indices in slots.items():
        if indices is not None:
            found[name] = ((indices < 0) | (indices >= len(state))) & (indices != pad_slot_id)
    if num_accepted_tokens is not None and state_batch_indices is not None:
        found["num_accepted_tokens"] = num_accepted_tokens > state_batch_indices.shape[1]
    if cu_seqlens is not None:
        wrong = (cu_seqlens < 0) | (cu_seqlens > len(x))
        wrong[1:] |= cu_seqlens.diff() < 0
        found["cu_seqlens"] = wrong
    return found


@selective_state_update.traffic
def traffic_selective_state_update(
    state: TensorArg, x: TensorArg, A: TensorArg, num_accepted_tokens: TensorArg | None, cu_seqlens: TensorArg | None
) -> int:
    batch = cu_seqlens.shape[0] - 1 if cu_seqlens else x.shape[0]
    writes = x.shape[0] if num_accepted_tokens else batch
    return (batch + writes) * A.numel * state.dtype.itemsize + 3 * x.nbytes


@selective_state_update.example
def example_selective_state_update(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    with_heads: bool = False,
    with_options: bool = False,
    with_drafts: bool = False,
) -> tuple[Any, ...]:
    heads, groups, head_size, state_size, columns = 4, 2, 20, 32, 3
    rows = (heads, head_size) if with_heads else (head_size,)
    starts = [*range(0, num_tokens, columns - 1), num_tokens]
    batch = len(starts) - 1 if with_drafts else num_tokens
    num_slots = columns * batch + 1
    decays = [[-0.1 * (1 + (n + p) % 16) for n in range(state_size)] for p in range(head_size)]

    def of_groups() -> Any:
        return make.randn(num_tokens, *((groups,) if with_heads else ()), state_size, dtype=dtype)

    return (
        make.randn(num_slots, *rows, state_size, dtype=dtype if with_heads else "float32"),
        make.randn(num_tokens, *rows, dtype=dtype),
        make.randn(num_tokens, *rows, dtype=dtype, scale=0.1, shift=0.5),
        make.values([decays] * heads if with_heads else decays, dtype="float32"),
        of_groups(),
        of_groups(),
        make.randn(*rows, dtype="float32") if with_options else None,
        make.randn(num_tokens, *rows, dtype=dtype) if with_options else None,
        make.randn(*rows, dtype=dtype) if with_options else None,
        with_options,
        make.permutation(num_slots, batch, columns, dtype="int32") if with_drafts else None,
        None,
        PAD_SLOT_ID,
        make.empty(num_tokens, *rows, dtype=dtype),
        make.values([i % (columns + 1) for i in range(batch)], dtype="int32") if with_drafts else None,
        make.values(starts, dtype="int32") if with_drafts else None,
        False,
    )
