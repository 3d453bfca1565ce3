"""Prefill attention against ragged keys and values, without a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check, tuning
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.tensor import TensorArg
from .arguments import Options, RaggedKV
from .examples import example_options, in_order
from .prefill_plan import choose, launch
from .prefill_problem import check_ragged
from .reference import float32_logits, masked_logits, write_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attention_varlen"]


def _absolute_error(query: Tensor, key: Tensor, scale: float) -> float:
    """The rounding errors of a softmax weight, which is rounded to the query dtype before it multiplies values, and of
    its logit."""
    return float(torch.finfo(query.dtype).eps) + float32_logits(query, key, scale)


@op(partial="out", inout="lse", keyed="logits_soft_cap", atol=_absolute_error)
def attention_varlen(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    causal: bool = True,
    *,
    alibi_slopes: Tensor | None = None,
    sliding_window: int = 0,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """Attention within each of several sequences, with queries, keys and values in ragged tensors.

    Sequence s has the rows ``cu_seqlens_q[s]`` up to ``cu_seqlens_q[s + 1]`` of `query`, m of them, and the rows
    ``cu_seqlens_k[s]`` up to ``cu_seqlens_k[s + 1]`` of `key` and `value`, n of them. If `causal`, its query tokens are
    the last of its n tokens, and token i attends to the keys ``j <= n - m + i``; otherwise it attends to all n keys.
    The formula and its rounding are those of `paged_attention_varlen`, which takes keys and values from a cache.

    A query without keys gives zeros; rows of `out` that belong to no sequence are left unchanged. NaN or infinity
    among the values that one query of a sequence attends to may reach the sequence's other queries, and no others.

    Args:
        out: [num_tokens, num_heads, value_size] of the queries' dtype, written; heads contiguous.
        query: [num_tokens, num_heads, head_size], float32, float16 or bfloat16; heads contiguous, any row stride.
        key: [num_keys, num_kv_heads, head_size] of the queries' dtype; any row and head strides. num_heads is a
            multiple of num_kv_heads.
        value: [num_keys, num_kv_heads, value_size] with value_size <= head_size, likewise.
        cu_seqlens_q: [num_seqs + 1] int32 or int64, ascending; where it is not, rows of any sequence may be left
            unchanged.
        cu_seqlens_k: [num_seqs + 1] int32 or int64, ascending; a sequence has no keys if its rows are not in `key`.
        scale: factor of the logits.
        causal: whether a token attends to no later token.
        alibi_slopes: [num_heads] float32, or None: ``slope * (j - the last token it attends to)`` is added.
        sliding_window: if `causal`, a token attends only to the last sliding_window of its tokens; 0 for all.
        logits_soft_cap, sinks: as in `paged_attention_v1`.
        lse: [num_heads, num_tokens] float32, written: the logarithm of the sum of exponentials, -inf without keys.
    """
    options = Options(alibi_slopes, sliding_window, logits_soft_cap, sinks, lse)
    starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for s in range(len(starts) - 1):
        (begin, end), (first, behind) = starts[s : s + 2], key_starts[s : s + 2]
        if not 0 <= begin < end <= len(query):
            continue
        rows = slice(first, behind) if 0 <= first <= behind <= len(key) else slice(0)
        keys, values = key[rows].double(), value[rows].double()
        tokens = torch.arange(len(keys), dtype=torch.int64, device=key.device)
        logits = masked_logits(query[begin:end], keys, scale, tokens, len(keys), options, causal)
        write_rows(out, begin, end, logits, values, options)


@attention_varlen.result
def result_attention_varlen(query: TensorArg, value: TensorArg) -> Result:
    check.sizes(query, num_tokens=None, num_heads=None, head_size=None)
    check.sizes(value, num_keys=None, num_kv_heads=None, value_size=None)
    return Result((*query.shape[:2], value.shape[2]), query.dtype)


@attention_varlen.plan
def plan_attention_varlen(
    out: TensorArg, query: TensorArg, kv: RaggedKV, options: Options, cu_seqlens_q: TensorArg, causal: bool
) -> list[Launch]:
    problem = check_ragged(out, query, kv, options, cu_seqlens_q, causal)
    return launch(problem, tuning.config("attention_varlen", problem, problem.query.device, choose))


@attention_varlen.bad_indices
def bad_indices_attention_varlen(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> dict[str, Tensor]:
    found = {}
    for name, starts, rows in (("cu_seqlens_q", cu_seqlens_q, query), ("cu_seqlens_k", cu_seqlens_k, key)):
        found[name] = (starts < 0) | (starts > rows.shape[0])
        found[name][1:] |= starts.diff() < 0
    return found


@attention_varlen.example
def example_attention_varlen(
    make: Any,
    *,
    num_tokens: int = 16,
    head_size: int = 128,
    dtype: str = "bfloat16",
    value_size: Literal[0, 48] = 0,
    causal: bool = True,
    options: bool = False,
) -> tuple[Any, ...]:
    values, num_kv_heads, num_heads = value_size or head_size, 2, 6
    # Three sequences: two thirds of the query tokens, with five earlier keys; no query tokens, only keys; one third.
    starts = [0, num_tokens * 2 // 3, num_tokens * 2 // 3, num_tokens]
    key_starts = [0, starts[1] + 5, starts[1] + 12, num_tokens + 12]
    call = {
        "out": make.empty(num_tokens, num_heads, values, dtype=dtype),
        "query": make.randn(num_tokens, num_heads, head_size, dtype=dtype),
        "key": make.randn(num_tokens + 12, num_kv_heads, head_size, dtype=dtype),
        "value": make.randn(num_tokens + 12, num_kv_heads, values, dtype=dtype),
        "cu_seqlens_q": make.values(starts, dtype="int32"),
        "cu_seqlens_k": make.values(key_starts, dtype="int32"),
        "scale": head_size**-0.5,
        "causal": causal,
        **example_options(make, num_heads, num_tokens, options).named(),
    }
    return in_order(attention_varlen.op, call | ({} if causal else {"sliding_window": 0}))
