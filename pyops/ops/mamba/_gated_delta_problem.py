"""The gated delta rule: the arguments of its ops, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from ... import check, tuning
from ..._core.tensors.tensor import TensorArg
from ._chunk_scan_problem import check_heads

_MAX_SIZE = 256  # largest key size


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The arguments that the ops of the gated delta rule have in common."""

    q: TensorArg
    k: TensorArg
    v: TensorArg
    g: TensorArg
    beta: TensorArg | None
    cu_seqlens: TensorArg | None
    use_qk_l2norm_in_kernel: bool
    state_v_first: bool
    o: TensorArg


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The states of `gated_delta_rule_update`, and the arguments by which a sequence finds its own."""

    state: TensorArg
    ssm_state_indices: TensorArg | None
    num_accepted_tokens: TensorArg | None


@dataclass(frozen=True, slots=True, eq=False)
class Gates:
    """The arguments by which the ops of Kimi Delta Attention make decays, and strengths of updates, from logits."""

    A_log: TensorArg | None
    dt_bias: TensorArg | None
    lower_bound: float | None
    use_beta_sigmoid_in_kernel: bool


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoints:
    """States that `kda` writes after some of the tokens of a sequence."""

    checkpoint_state: TensorArg | None
    checkpoint_offsets: TensorArg | None


@dataclass(frozen=True, slots=True, eq=False)
class DeltaProblem:
    """A call of an op of the gated delta rule.

    Attributes:
        state: the states that sequences begin with, or None; result: gets the states, or is None.
        slots: of the update, where both are the same; else None.
        gates: of Kimi Delta Attention, where each key channel has a decay; None for one decay for each value head.
    """

    tokens: Tokens
    state: TensorArg | None
    result: TensorArg | None
    slots: Slots | None = None
    gates: Gates | None = None
    checkpoints: Checkpoints | None = None

    @property
    def num_seqs(self) -> int:
        cu_seqlens = self.tokens.cu_seqlens
        return int(self.tokens.q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)

    @property
    def states(self) -> list[TensorArg]:
        """All states that the call reads or writes."""
        checkpoint = self.checkpoints.checkpoint_state if self.checkpoints else None
        return [arg for arg in (self.state, self.result, checkpoint) if arg is not None]

    @property
    def uses_products(self) -> bool:
        """Whether kernels with MMAs serve the call; gated_delta_recurrent.cu serves every call."""
        raise NotImplementedError

    @property
    def uses_wgmma(self) -> bool:
        """Whether these kernels are those of Hopper."""
        return False

    def bucket(self) -> str:
        q, v = self.tokens.q, self.tokens.v
        kind = "wgmma" if self.uses_wgmma else "mma" if self.uses_products else "simt"
        return (
            f"{kind} {q.dtype.name} heads={v.shape[2]}/{q.shape[2]} "
            f"{q.shape[3]}x{v.shape[3]} tokens={tuning.power_of_two(q.shape[0] * q.shape[1])} "
            f"seqs={tuning.power_of_two(self.num_seqs)}"
        )


def check_rule(problem: DeltaProblem) -> None:
    """OpError for a call that no kernel serves."""
    tokens = problem.tokens
    q, v, o, cu_seqlens = tokens.q, tokens.v, tokens.o, tokens.cu_seqlens
    check.floating(q)
    check.sizes(q, batch=None, num_tokens=None, key_heads=None, key_size=None)
    batch, num_tokens, key_heads, key_size = q.shape
    check.like(tokens.k, q)
    check.sizes(v, batch=batch, num_tokens=num_tokens, value_heads=None, value_size=None)
    value_heads, value_size = v.shape[2:]
    if not key_heads or value_heads % key_heads:
        raise v.error(f"expected a multiple of {key_heads} heads, those of q, got {value_heads}")
    if not 1 <= key_size <= _MAX_SIZE:
        raise q.error(f"expected heads of 1 to {_MAX_SIZE} elements, got {key_size}")
    check.dtype(v, q.dtype)
    check.like(o, v)
    for arg in (q, tokens.k, v, o):
        check_heads(arg)
        token_stride(arg)
    per_head = {"batch": batch, "num_tokens": num_tokens, "value_heads": value_heads}
    for factor in (tokens.g, tokens.beta):
        if factor is not None:
            check.floating(factor)
            of_channels = problem.gates is not None and factor is tokens.g
            check.sizes(factor, **per_head, **({"key_size": key_size} if of_channels else {}))
            token_stride(factor)
    check.index(cu_seqlens, num_seqs_and_one=None)
    if cu_seqlens is not None:
        check.contiguous(cu_seqlens)
        if batch != 1:
            raise q.error(f"expected a batch of 1 beside cu_seqlens, got {batch}")
        if not cu_seqlens.shape[0]:
            raise cu_seqlens.error("expected at least one entry, got none")
    last = (value_size, key_size) if tokens.state_v_first else (key_size, value_size)
    for state in problem.states:
        check.floating(state)
        check.sizes(state, count=None, value_heads=value_heads, **dict(zip(("rows", "columns"), last, strict=True)))
    if problem.gates is not None:
        _check_gates(problem.gates, tokens)
    if problem.checkpoints is not None:
        _check_checkpoints(problem.checkpoints, problem.num_seqs)
    if problem.slots is None:
        _check_states(problem)
    else:
        _check_slots(problem.slots, problem.num_seqs)


def token_stride(arg: TensorArg) -> int:
    """Token stride in elements; OpError unless one stride fits the tokens of all rows of the batch."""
    batch, num_tokens = arg.shape[:2]
    if batch > 1 and num_tokens > 1 and arg.strides[0] != num_tokens * arg.strides[1]:
        raise arg.error(f"expected tokens of one stride, got shape {arg.shape} with strides {arg.strides}")
    return arg.strides[1] if num_tokens > 1 else arg.strides[0]


def _check_states(problem: DeltaProblem) -> None:
    """The states of ops without slots: one for each sequence, contiguous."""
    for arg in problem.states:
        if arg.shape[0] != problem.num_seqs:
            raise arg.error(f"expected a state for each of {problem.num_seqs} sequences, got shape {arg.shape}")
        check.contiguous(arg)


def _check_gates(gates: Gates, tokens: Tokens) -> None:
    """The parameters of the gate, and the heads of g."""
    (_, _, value_heads, key_size), A_log, dt_bias = tokens.g.shape, gates.A_log, gates.dt_bias
    check_heads(tokens.g)
    if A_log is None:
        for argument, value in (("dt_bias", dt_bias), ("lower_bound", gates.lower_bound)):
            if value is not None:
                raise check.refuse(tokens.q, argument, "expected None without A_log")
        return
    check.floating(A_log)
    check.shape(A_log, value_heads=value_heads)
    if dt_bias is not None:
        check.floating(dt_bias)
        if len(dt_bias.shape) == 1:
            check.shape(dt_bias, value_heads_by_key_size=value_heads * key_size)
        else:
            check.shape(dt_bias, value_heads=value_heads, key_size=key_size)
    if gates.lower_bound is not None:
        check_lower_bound(tokens.q, gates.lower_bound)


def check_lower_bound(arg: TensorArg, lower_bound: float) -> None:
    """The least logarithm of a decay, of the call that `arg` belongs to, is at most 0."""
    if not lower_bound <= 0:
        raise check.refuse(arg, "lower_bound", f"expected a number up to 0 or None, got {lower_bound}")


def _check_checkpoints(checkpoints: Checkpoints, num_seqs: int) -> None:
    """The states of checkpoints and their tokens: both, or neither."""
    state, offsets = checkpoints.checkpoint_state, checkpoints.checkpoint_offsets
    if offsets is not None:
        check.index(offsets, num_seqs=num_seqs)
        check.contiguous(offsets)
    given = state if offsets is None else offsets
    if given is not None and (state is None or offsets is None):
        raise given.error("expected checkpoint_state and checkpoint_offsets, or neither")


def check_contiguous_slots(state: TensorArg) -> None:
    """Each slot of a state is contiguous; slots may have any stride."""
    inner = 1
    for size, stride in zip(reversed(state.shape[1:]), reversed(state.strides[1:]), strict=True):
        if size > 1 and stride != inner and state.numel:
            raise state.error(f"expected contiguous slots, got shape {state.shape} with strides {state.strides}")
        inner *= size


def _check_slots(slots: Slots, num_seqs: int) -> None:
    """The state and the slots of `gated_delta_rule_update`."""
    indices, accepted = slots.ssm_state_indices, slots.num_accepted_tokens
    check_contiguous_slots(slots.state)
    if indices is not None:
        check.index(indices, **{"num_seqs": num_seqs, **({"tokens": None} if len(indices.shape) == 2 else {})})
        if len(indices.shape) == 2 and indices.shape[1] > 1 and indices.strides[1] != 1:
            raise indices.error(f"expected rows of neighbouring slots, got strides {indices.strides}")
    check.index(accepted, num_seqs=num_seqs)
    if accepted is not None:
        check.contiguous(accepted)
        if indices is None or len(indices.shape) != 2:
            raise accepted.error("expected ssm_state_indices of shape (num_seqs, tokens) beside it")
