"""Drawing tokens from logits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ... import check, tuning
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32, int32, int64
from ..._core.tensors.tensor import TensorArg
from ._draw_plan import DrawProblem, choose, launches
from ._random import philox

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["top_k_top_p_sampling_from_logits"]

_WHOLE = 2**35  # weight of the most likely token
_MIN_TEMPERATURE = 2.0**-98  # as in probability.cuh; below it, sampling is greedy
_MAX_TOKENS = 2**28  # the sum of all weights must fit into 63 bits


@op(out="samples", ulps=0)
def top_k_top_p_sampling_from_logits(
    samples: Tensor,
    logits: Tensor,
    seeds: Tensor,
    offsets: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    temperature: Tensor | None = None,
) -> None:
    """Draw a token from each row: the first one at which the running sum of weights exceeds ``r / 2^64`` of their sum.

    Weights are integers, ``w = floor(2^35 exp((x - max x) / t))``, so that their addition is exact and a token depends
    only on its row. Three filters set weights to 0, in this order: `top_k` those of tokens less likely than top_k
    others; `min_p` those below min_p times the largest weight; `top_p` those of all but the most likely tokens that
    together reach top_p of the remaining sum (Holtzman et al. 2019, arXiv:1904.09751; Nguyen et al.
    2024, arXiv:2407.01082). Tokens as likely as the last one that a filter keeps are kept, too. ``r`` is the
    first 64 bits of Philox4x32-10 (Salmon et al. 2011) under the row's seed at its offset: rows of one seed need
    different offsets, and so do the tokens of a sequence.

    A logit of NaN or -inf is never drawn; inf counts as the largest number.

    Args:
        samples: [num_rows] int32, contiguous, written; -1 for a row without a token that can be drawn.
        logits: [num_rows, vocab_size], float32, float16 or bfloat16; any row stride; one token at least.
        seeds: [num_rows] int64, contiguous.
        offsets: [num_rows] int64, contiguous; or None for 0.
        top_k: [num_rows] int32, contiguous; 0 or less, or vocab_size or more, keeps all tokens. Or None.
        top_p: [num_rows] float32, contiguous; 1 or more, or NaN, keeps all tokens. Or None.
        min_p: [num_rows] float32, contiguous; 0 or less, or NaN, keeps all tokens. Or None.
        temperature: t, [num_rows] float32, contiguous; or None for 1. NaN and numbers below 2^-98, including 0 and
            negative ones, take the first of the most likely tokens; inf makes all finite logits equally likely.
    """
    rows, vocab_size = logits.shape
    x = logits.float()
    x = torch.where(x.isnan(), -torch.inf, x).clamp(max=torch.finfo(torch.float32).max)
    largest = x.amax(-1, keepdim=True)

    t = torch.ones_like(largest) if temperature is None else temperature[:, None]
    greedy = ~(t >= _MIN_TEMPERATURE)
    shrink = 2.0**-28  # scaled by it, the largest float and its negative have a finite difference
    share = torch.exp((x * shrink - largest * shrink) * (1.0 / (t * shrink))).nan_to_num(nan=0.0)
    share = torch.where(greedy, (x == largest).float(), share).masked_fill(x == -torch.inf, 0.0)
    weights = (share.double() * _WHOLE).long()
    if min_p is not None:
        min_weight = (min_p.nan_to_num(nan=0.0).clamp(0, 1).double() * _WHOLE).ceil()
        weights = weights.masked_fill(weights < min_weight[:, None], 0)
    likeliest, order = x.sort(dim=-1, descending=True)
    if top_k is not None:
        k = torch.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)
        weights = weights.masked_fill(x < likeliest.gather(-1, k.long()[:, None] - 1), 0)
    for row in range(rows):
        w = weights[row]
        if top_p is not None and top_p[row] < 1 and w.any():
            wanted = max(1, math.ceil(max(0.0, float(top_p[row])) * float(w.sum())))
            place = torch.searchsorted(w[order[row]].cumsum(0), min(wanted, int(w.sum())))
            w = w.masked_fill(x[row] < likeliest[row, place], 0)
        total = int(w.sum())
        bits = 0 if greedy[row] else philox(int(seeds[row]), 0 if offsets is None else int(offsets[row]))
        samples[row] = torch.searchsorted(w.cumsum(0), bits * total >> 64, right=True) if total else -1


@top_k_top_p_sampling_from_logits.result
def result_top_k_top_p_sampling_from_logits(logits: TensorArg) -> Result:
    check.sizes(logits, num_rows=None, vocab_size=None)
    return Result(logits.shape[:1], int32)


@top_k_top_p_sampling_from_logits.plan
def plan_top_k_top_p_sampling_from_logits(
    samples: TensorArg,
    logits: TensorArg,
    seeds: TensorArg,
    offsets: TensorArg | None,
    top_k: TensorArg | None,
    top_p: TensorArg | None,
    min_p: TensorArg | None,
    temperature: TensorArg | None,
) -> list[Launch]:
    check.floating(logits)
    check.sizes(logits, num_rows=None, vocab_size=None)
    num_rows, vocab_size = logits.shape
    check.row_size(logits)
    check.shape(samples, int32, num_rows=num_rows)
    check.shape(seeds, int64, num_rows=num_rows)
    check.shape(offsets, int64, num_rows=num_rows)
    check.shape(top_k, int32, num_rows=num_rows)
    for arg in (top_p, min_p, temperature):
        check.shape(arg, float32, num_rows=num_rows)
    if not 1 <= vocab_size <= _MAX_TOKENS:
        raise logits.error(f"expected 1 to {_MAX_TOKENS} tokens, got {vocab_size}")

    given = {"offsets": offsets, "top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    problem = DrawProblem.of(logits, has_top_k=top_k is not None, has_top_p=top_p is not None)
    return launches(tuning.config(logits.op, problem, logits.device, choose), problem, logits, given)


@top_k_top_p_sampling_from_logits.example
def example_top_k_top_p_sampling_from_logits(
    make: Any,
    *,
    num_tokens: int = 16,
    vocab_size: int = 4000,
    dtype: str = "bfloat16",
    with_top_k: bool = True,
    with_top_p: bool = True,
    with_others: bool = False,
) -> tuple[Any, ...]:
    def numbers(is_given: bool, value: float, dtype: str = "float32") -> Any:
        return make.full(num_tokens, value=value, dtype=dtype) if is_given else None

    return (
        make.empty(num_tokens, dtype="int32"),
        make.randn(num_tokens, vocab_size, dtype=dtype, scale=2.0),
        make.randint(-(2**62), 2**62, num_tokens, dtype="int64"),
        make.randint(0, 1000, num_tokens, dtype="int64") if with_others else None,
        numbers(with_top_k, 50, "int32"),
        numbers(with_top_p, 0.9),
        numbers(with_others, 0.01),
        numbers(with_others, 0.7),
    )
