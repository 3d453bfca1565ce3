"""The gated delta rule: linear attention with an error-correcting state update (Qwen3-Next)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import tuning
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors import tensor
from ..._core.tensors.tensor import TensorArg
from . import _gated_delta_sm90_plan as sm90
from ._gated_delta_plan import GatedDeltaConfig, GatedDeltaProblem, choose, launch
from ._gated_delta_problem import Slots, Tokens, check_rule
from ._gated_delta_reference import Rows, spans_of, update_slots, v_first

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "gated_delta_rule",
    "gated_delta_rule_update",
]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """(o, final_state) of `gated_delta_rule` for prefill, with the arguments of flash-linear-attention and vLLM.

    `scale` is ``key_size**-0.5`` if None; the final state is float32, or None without `output_final_state`. Tensors
    are [batch, tokens, heads, ...]: `head_first` must be False.

    Args:
        output_final_state: whether the final state is returned.
        head_first: False.
    """
    if head_first:
        raise ValueError("chunk_gated_delta_rule: head_first: expected False")
    final_state = None
    if output_final_state:
        num_seqs = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        sizes = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
        final_state = tensor.new(v, (num_seqs, v.shape[2], *sizes), "float32")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    o = gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, state_v_first, final_state
    )
    return o, final_state


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """(o, final_state) of `gated_delta_rule_update`, with vLLM's arguments: the state in slots is updated in place.

    With `inplace_final_state` False, the result is that of `chunk_gated_delta_rule`: new states, one for each sequence.

    Args:
        initial_state: the states in slots, `state` of `gated_delta_rule_update`.
        inplace_final_state: whether these states are updated.
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if not inplace_final_state:
        return chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            scale,
            initial_state,
            True,
            cu_seqlens,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            state_v_first=state_v_first,
        )
    o = gated_delta_rule_update(
        initial_state,
        q,
        k,
        v,
        g,
        beta,
        scale,
        cu_seqlens,
        ssm_state_indices,
        num_accepted_tokens,
        use_qk_l2norm_in_kernel,
        state_v_first,
    )
    return o, initial_state


def absolute_error(q: Tensor) -> float:
    """16-bit MMA operands are rounded once: the state, the errors and updates, and the products of token pairs."""
    return 2.0**-16 if q.dtype == torch.float32 else float(torch.finfo(q.dtype).eps)


@op(out="final_state", returns="o", atol=absolute_error)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    final_state: Tensor | None = None,
    *,
    o: Tensor,
) -> None:
    """The gated delta rule: ``S = exp(g) S; S += beta k (v - S^T k)^T; o = scale * S^T q``, token by token.

    With `use_qk_l2norm_in_kernel`, q and k are divided by the root of their sum of squares plus 1e-6 first. Heads of q
    and k are shared by groups of adjacent heads of v. Accumulators and the state are float32. float16 and bfloat16 use
    MMAs where possible, 32 tokens at a time, with operands that are rounded to the element type: the
    state, the errors ``v - S^T k``, the updates ``beta (v - S^T k)`` and the dot products of token pairs (Yang et al.
    2024, arXiv:2412.06464, as flash-linear-attention computes it). Hopper takes 64 tokens at a time, with a workspace
    of about 0.19 KB for each token and value head. Where heads would leave SMs idle, it walks up to 16 segments of a
    sequence in parallel, with 128 KB for each one and value head of 128.

    Args:
        q, k: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
            contiguous, constant token stride, as in o and the other inputs.
        v: [batch, num_tokens, value_heads, value_size] of the same dtype; key_heads divides value_heads.
        g: [batch, num_tokens, value_heads], float32, float16 or bfloat16: logarithms of decays.
        beta: as `g`, of any of its dtypes, or None for ones: how much of the error is corrected.
        scale: factor of the outputs.
        initial_state: [num_seqs, value_heads, key_size, value_size], float32, float16 or bfloat16, contiguous; or None
            for zeros.
        cu_seqlens: [num_seqs + 1] int32 or int64: sequence s has the tokens ``cu_seqlens[s]`` up to
            ``cu_seqlens[s + 1]``, and batch is 1. None: every row of the batch is a sequence. If the two numbers are
            not a valid range, the sequence has no tokens. Sequences may not overlap.
        use_qk_l2norm_in_kernel: whether q and k are normalised. Any finite q and k are then safe; without it, and for
            v, intermediate results that overflow float32 become infinite or NaN.
        state_v_first: whether states are [..., value_size, key_size].
        final_state: as `initial_state`, written: the state of each sequence after its last token; or None.
        o: as `v`, written where sequences have tokens, and returned; new unless given.
    """
    rows = Rows(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, o)
    for seq, (begin, end) in enumerate(spans_of(q, cu_seqlens)):
        state = rows.zeros if initial_state is None else v_first(initial_state[seq], state_v_first).double()
        for token in range(begin, end):
            state = rows.step(state, token)
        if final_state is not None:
            v_first(final_state[seq], state_v_first).copy_(state)


@op(inout="state", returns="o", atol=2.0**-16)
def gated_delta_rule_update(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    *,
    o: Tensor,
) -> None:
    """`gated_delta_rule` for a few tokens of each sequence, with states in slots that are updated in place.

    Everything is computed in float32. Sequence s begins with the state in slot ``ssm_state_indices[s]`` and leaves its
    last state there. With two dimensions (speculative decoding), it begins with slot
    ``[s, max(num_accepted_tokens[s], 1) - 1]`` and leaves the state after its token t in slot ``[s, t]``. A sequence
    without tokens, or with its first slot out of range (-1 for a padded one), is skipped: its outputs are left
    unchanged. A state with a slot out of range is not stored. The slots of sequences differ, and a sequence names no
    slot twice.

    Args:
        state: [num_slots, value_heads, key_size, value_size], float32, float16 or bfloat16, updated; slots contiguous,
            any slot stride.
        q, k, v, g, beta, scale, cu_seqlens, use_qk_l2norm_in_kernel, state_v_first: as in `gated_delta_rule`.
        ssm_state_indices: [num_seqs] or [num_seqs, tokens] int32 or int64, or None: sequence s has slot s.
        num_accepted_tokens: [num_seqs] int32 or int64, or None for ones; only with two dimensions of slots.
        o: as `v`, written where sequences are not skipped, and returned; new unless given.
    """
    rows = Rows(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, o)
    update_slots(rows, spans_of(q, cu_seqlens), state, ssm_state_indices, num_accepted_tokens, state_v_first)


@gated_delta_rule.result
def result_gated_delta_rule(v: TensorArg) -> Result:
    return Result(v.shape, v.dtype)


@gated_delta_rule_update.result
def result_gated_delta_rule_update(v: TensorArg) -> Result:
    return Result(v.shape, v.dtype)


@gated_delta_rule.plan
def plan_gated_delta_rule(
    tokens: Tokens, initial_state: TensorArg | None, final_state: TensorArg | None
) -> list[Launch]:
    return _launches("gated_delta_rule", GatedDeltaProblem(tokens, initial_state, final_state))


@gated_delta_rule_update.plan
def plan_gated_delta_rule_update(tokens: Tokens, slots: Slots) -> list[Launch]:
    return _launches("gated_delta_rule_update", GatedDeltaProblem(tokens, slots.state, slots.state, slots))


def _launches(op: str, problem: GatedDeltaProblem) -> list[Launch]:
    check_rule(problem)
    choice: Any = sm90.choose if problem.uses_wgmma else choose
    config: GatedDeltaConfig | sm90.GatedDeltaSm90Config
    config = tuning.config(op, problem, problem.tokens.q.device, choice)
    if isinstance(config, GatedDeltaConfig):
        return [launch(problem, config)]
    return sm90.launches(problem, config)


def bad_starts(q: Tensor, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    """Which starts of sequences are no valid ones."""
    if cu_seqlens is None:
        return {}
    outside = (cu_seqlens < 0) | (cu_seqlens > q.shape[1])
    outside[1:] |= cu_seqlens.diff() < 0
    return {"cu_seqlens": outside}


@gated_delta_rule.bad_indices
def bad_indices_gated_delta_rule(q: Tensor, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    return bad_starts(q, cu_seqlens)


@gated_delta_rule_update.bad_indices
def bad_indices_gated_delta_rule_update(
    state: Tensor,
    q: Tensor,
    cu_seqlens: Tensor | None,
    ssm_state_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
) -> dict[str, Tensor]:
    return bad_starts(q, cu_seqlens) | bad_slots(state, ssm_state_indices, num_accepted_tokens)


def bad_slots(state: Tensor, ssm_state_indices: Tensor | None, num_accepted_tokens: Tensor | None) -> dict[str, Tensor]:
    """Which slots, and numbers of accepted tokens, do not exist."""
    found = {}
    if ssm_state_indices is not None:
        found["ssm_state_indices"] = (ssm_state_indices < -1) | (ssm_state_indices >= state.shape[0])
    if num_accepted_tokens is not None and ssm_state_indices is not None:
        outside = (num_accepted_tokens < 0) | (num_accepted_tokens > ssm_state_indices.shape[-1])
        found["num_accepted_tokens"] = outside
    return found


def _example_tokens(make: Any, batch: int, num_tokens: int, num_heads: int, head_dim: int, dtype: str) -> list[Any]:
    """[q, k, v, g, beta] with two heads of v to a head of k."""
    keys, values = (batch, num_tokens, num_heads // 2, head_dim), (batch, num_tokens, num_heads, head_dim)
    return [
        make.randn(*keys, dtype=dtype),
        make.randn(*keys, dtype=dtype),
        make.randn(*values, dtype=dtype),
        make.randn(*values[:3], dtype="float32", scale=0.1, shift=-0.5),
        make.randn(*values[:3], dtype=dtype, scale=0.1, shift=0.5),
    ]


@gated_delta_rule.example
def example_gated_delta_rule(
    make: Any,
    *,
    num_tokens: int = 64,
    num_heads: int = 4,
    head_dim: Literal[32, 128, 7] = 32,
    dtype: str = "bfloat16",
    options: bool = False,
) -> tuple[Any, ...]:
    # Three sequences with two thirds of the tokens, none, and one third; with options, a batch of two; without tokens,
    # no sequence.
    starts = [0, num_tokens * 2 // 3, num_tokens * 2 // 3, num_tokens] if num_tokens else [0]
    batch = min(num_tokens, 2) if options else 1
    states = (batch, num_heads, head_dim, head_dim)
    return (
        *_example_tokens(make, batch, num_tokens, num_heads, head_dim, dtype),
        head_dim**-0.5,
        make.randn(*states, dtype="float32") if options else None,
        None if options else make.values(starts, dtype="int32"),
        True,
        options,
        make.empty(*states, dtype="float32") if options else None,
        make.empty(batch, num_tokens, num_heads, head_dim, dtype=dtype),
    )


@gated_delta_rule_update.example
def example_gated_delta_rule_update(
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
        None,
        slots if options else make.permutation(num_tokens + 2, num_tokens, dtype="int32"),
        make.randint(1, draft + 1, num_tokens, dtype="int32") if options else None,
        True,
        options,
        make.empty(num_tokens, draft, num_heads, head_dim, dtype=dtype),
    )
