"""Kimi Delta Attention: the gated delta rule with a decay for each channel of the key (Kimi Linear)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors import tensor
from ..._core.tensors.tensor import TensorArg
from ._gated_delta_problem import Checkpoints, Gates, Slots, Tokens
from ._gated_delta_reference import Rows, log_decays, spans_of, update_slots, v_first
from ._kda_plan import KdaProblem, plan
from .gated_delta_rule import absolute_error, bad_slots, bad_starts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["chunk_kda", "fused_recurrent_kda", "kda", "kda_update"]


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, final_state) of `kda` for prefill, with the arguments of flash-linear-attention.

    `scale` is ``key_size**-0.5`` if None; the final state is float32, or None without `output_final_state`. `A_log`,
    `dt_bias` and `lower_bound` have no effect without `use_gate_in_kernel`.

    Args:
        output_final_state: whether the final state is returned.
        use_gate_in_kernel: whether g are logits of the gate, which needs `A_log`; otherwise logarithms of decays.
    """
    if use_gate_in_kernel and A_log is None:
        raise ValueError("chunk_kda: A_log: expected a tensor with use_gate_in_kernel, got None")
    final_state = None
    if output_final_state:
        num_seqs = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        sizes = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
        final_state = tensor.new(v, (num_seqs, v.shape[2], *sizes), "float32")
    o = kda(
        *(q, k, v, g, beta, q.shape[3] ** -0.5 if scale is None else scale),
        *((A_log, dt_bias, lower_bound) if use_gate_in_kernel else (None, None, None)),
        *(initial_state, cu_seqlens, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, state_v_first, final_state),
    )
    return o, final_state


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """(o, final_state) of `kda_update`, with vLLM's arguments: the state in slots is updated in place.

    With `inplace_final_state` False, the result is that of `chunk_kda`: new states, one for each sequence.

    Args:
        initial_state: the states in slots, `state` of `kda_update`.
        inplace_final_state: whether these states are updated.
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if not inplace_final_state:
        return chunk_kda(
            *(q, k, v, g, beta, scale, initial_state, True, use_qk_l2norm_in_kernel),
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
        )
    o = kda_update(
        *(initial_state, q, k, v, g, beta, scale, None, None, None, cu_seqlens, ssm_state_indices),
        *(num_accepted_tokens, use_qk_l2norm_in_kernel, False, state_v_first),
    )
    return o, initial_state


@op(out="final_state", partial="checkpoint_state", returns="o", keyed="lower_bound", atol=absolute_error)
def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    scale: float,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    state_v_first: bool = False,
    final_state: Tensor | None = None,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    *,
    o: Tensor,
) -> None:
    """Kimi Delta Attention: `gated_delta_rule` with decays ``exp(g)`` for each key channel of each value head.

    With `A_log`, g are logits of the gate, and the logarithms of decays are ``lower_bound * sigmoid(exp(A_log) * (g +
    dt_bias))``, or without `lower_bound` ``-exp(A_log) * softplus(g + dt_bias)``. Accumulators and the state are
    float32. From sm_80 on, float16 and bfloat16 use MMAs where possible, 32 tokens at a time, with operands that are
    rounded to the element type: those of `gated_delta_rule`, and keys and queries times decays. This takes a workspace
    of about 0.9 KB for each token and value head with keys of 128 elements (Kimi Team 2025, arXiv:2510.26692, as
    flash-linear-attention and FlashKDA compute it).

    Args:
        q, k: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
            contiguous, constant token stride, as in o and the other inputs.
        v: [batch, num_tokens, value_heads, value_size] of the same dtype; key_heads divides value_heads.
        g: [batch, num_tokens, value_heads, key_size], float32, float16 or bfloat16: logarithms of decays, or logits.
        beta: [batch, num_tokens, value_heads], of any of these dtypes, or None for ones: how much of the error is
            corrected.
        scale: factor of the outputs.
        A_log: [value_heads] float32, float16 or bfloat16, contiguous, or None.
        dt_bias: [value_heads, key_size] or [value_heads * key_size], of any of these dtypes, contiguous, or None for
            zeros; only with A_log.
        lower_bound: the least logarithm of a decay, at most 0, or None; only with A_log.
        initial_state: [num_seqs, value_heads, key_size, value_size], float32, float16 or bfloat16, contiguous; or None
            for zeros.
        cu_seqlens: as in `gated_delta_rule`.
        use_qk_l2norm_in_kernel: as in `gated_delta_rule`.
        use_beta_sigmoid_in_kernel: whether beta is replaced by its sigmoid.
        state_v_first: whether states are [..., value_size, key_size].
        final_state: as `initial_state`, written: the state of each sequence after its last token; or None.
        checkpoint_state: as `initial_state`, written: the state of sequence s after its first
            ``checkpoint_offsets[s]`` tokens. It is left unchanged if the sequence has fewer tokens, or the offset is
            not positive.
        checkpoint_offsets: [num_seqs] int32 or int64, contiguous; given if and only if `checkpoint_state` is.
        o: as `v`, written where sequences have tokens, and returned; new unless given.
    """
    logs = log_decays(g, A_log, dt_bias, lower_bound)
    strengths = torch.sigmoid(beta.double()) if use_beta_sigmoid_in_kernel and beta is not None else beta
    rows = Rows(q, k, v, logs, strengths, scale, use_qk_l2norm_in_kernel, o)
    for seq, (begin, end) in enumerate(spans_of(q, cu_seqlens)):
        state = rows.zeros if initial_state is None else v_first(initial_state[seq], state_v_first).double()
        cut = 0 if checkpoint_offsets is None else int(checkpoint_offsets[seq])
        for token in range(begin, end):
            state = rows.step(state, token)
            if checkpoint_state is not None and token + 1 - begin == cut:
                v_first(checkpoint_state[seq], state_v_first).copy_(state)
        if final_state is not None:
            v_first(final_state[seq], state_v_first).copy_(state)


@op(inout="state", returns="o", keyed="lower_bound", atol=2.0**-16)
def kda_update(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    scale: float,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    state_v_first: bool = False,
    *,
    o: Tensor,
) -> None:
    """`kda` for a few tokens of each sequence, with states in slots that are updated in place.

    Everything is computed in float32. The slots of sequences, also of several speculative tokens, are those of
    `gated_delta_rule_update`.

    Args:
        state: [num_slots, value_heads, key_size, value_size], float32, float16 or bfloat16, updated; slots contiguous,
            any slot stride.
        q, k, v, g, beta, scale, A_log, dt_bias, lower_bound: as in `kda`.
        cu_seqlens, ssm_state_indices, num_accepted_tokens: as in `gated_delta_rule_update`.
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, state_v_first: as in `kda`.
        o: as `v`, written where sequences are not skipped, and returned; new unless given.
    """
    logs = log_decays(g, A_log, dt_bias, lower_bound)
    strengths = torch.sigmoid(beta.double()) if use_beta_sigmoid_in_kernel and beta is not None else beta
    rows = Rows(q, k, v, logs, strengths, scale, use_qk_l2norm_in_kernel, o)
    update_slots(rows, spans_of(q, cu_seqlens), state, ssm_state_indices, num_accepted_tokens, state_v_first)


@kda.result
def result_kda(v: TensorArg) -> Result:
    return Result(v.shape, v.dtype)


@kda_update.result
def result_kda_update(v: TensorArg) -> Result:
    return Result(v.shape, v.dtype)


@kda.plan
def plan_kda(
    tokens: Tokens,
    gates: Gates,
    initial_state: TensorArg | None,
    final_state: TensorArg | None,
    checkpoints: Checkpoints,
) -> list[Launch]:
    return plan("kda", KdaProblem(tokens, initial_state, final_state, None, gates, checkpoints))


@kda_update.plan
def plan_kda_update(tokens: Tokens, gates: Gates, slots: Slots) -> list[Launch]:
    return plan("kda_update", KdaProblem(tokens, slots.state, slots.state, slots, gates))


@kda.bad_indices
def bad_indices_kda(q: Tensor, cu_seqlens: Tensor | None, checkpoint_offsets: Tensor | None) -> dict[str, Tensor]:
    found = bad_starts(q, cu_seqlens)
    if checkpoint_offsets is not None:
        found["checkpoint_offsets"] = (checkpoint_offsets < 0) | (checkpoint_offsets > q.shape[1])
    return found


@kda_update.bad_indices
def bad_indices_kda_update(
    state: Tensor,
    q: Tensor,
    cu_seqlens: Tensor | None,
    ssm_state_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
) -> dict[str, Tensor]:
    return bad_starts(q, cu_seqlens) | bad_slots(state, ssm_state_indices, num_accepted_tokens)


def _example_tokens(make: Any, batch: int, num_tokens: int, num_heads: int, head_dim: int, dtype: str) -> list[Any]:
    """[q, k, v, g, beta] with two heads of v to a head of k; logits of gates and strengths."""
    keys, values = (batch, num_tokens, num_heads // 2, head_dim), (batch, num_tokens, num_heads, head_dim)
    return [
        make.randn(*keys, dtype=dtype),
        make.randn(*keys, dtype=dtype),
        make.randn(*values, dtype=dtype),
        make.randn(*values, dtype=dtype, shift=-2.0),
        make.randn(*values[:3], dtype=dtype),
    ]


@kda.example
def example_kda(
    make: Any,
    *,
    num_tokens: int = 64,
    num_heads: int = 4,
    head_dim: Literal[32, 128, 7] = 32,
    dtype: str = "bfloat16",
    options: bool = False,
) -> tuple[Any, ...]:
    # Three sequences with two thirds of the tokens, none, and one third; with options, a batch of two with a state
    # after a third of the tokens; without tokens, no sequence.
    starts = [0, num_tokens * 2 // 3, num_tokens * 2 // 3, num_tokens] if num_tokens else [0]
    batch = min(num_tokens, 2) if options else 1
    states = (batch, num_heads, head_dim, head_dim)
    return (
        *_example_tokens(make, batch, num_tokens, num_heads, head_dim, dtype),
        head_dim**-0.5,
        make.randn(num_heads, dtype="float32", scale=0.5),
        make.randn(num_heads, head_dim, dtype="float32"),
        None if options else -5.0,
        make.randn(*states, dtype="float32") if options else None,
        None if options else make.values(starts, dtype="int32"),
        True,
        True,
        options,
        make.empty(*states, dtype="float32") if options else None,
        make.empty(*states, dtype="float32") if options else None,
        make.values([max(1, num_tokens // 3)] * batch, dtype="int32") if options else None,
        make.empty(batch, num_tokens, num_heads, head_dim, dtype=dtype),
    )


@kda_update.example
def example_kda_update(
    make: Any,
    *,
    num_tokens: int = 64,
    num_heads: int = 4,
    head_dim: Literal[32, 128, 7] = 32,
    dtype: str = "bfloat16",
    options: bool = False,
) -> tuple[Any, ...]:
    # Every token is a sequence of its own; with options, sequences of equal length as a batch, with a slot per token.
    draft = 1 + num_tokens % 3 if options else 1
    slots = make.permutation(num_tokens * draft + 2, num_tokens, draft, dtype="int32")
    return (
        make.randn(num_tokens * draft + 2, num_heads, head_dim, head_dim, dtype="float32"),
        *_example_tokens(make, num_tokens, draft, num_heads, head_dim, dtype),
        head_dim**-0.5,
        make.randn(num_heads, dtype="float32", scale=0.5),
        make.randn(num_heads, head_dim, dtype="float32"),
        None if options else -5.0,
        None,
        slots if options else make.permutation(num_tokens + 2, num_tokens, dtype="int32"),
        make.randint(1, draft + 1, num_tokens, dtype="int32") if options else None,
        True,
        True,
        options,
        make.empty(num_tokens, draft, num_heads, head_dim, dtype=dtype),
    )
