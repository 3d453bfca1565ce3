"""Speculative decoding: which drafted tokens are accepted, and the token that follows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32, int32, int64
from ..._core.tensors.tensor import TensorArg
from ._random import philox

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rejection_sample"]

_rejection_sample = Kernel("sampling/rejection_sample.cu")
_MAX_TOKENS = 2**22  # the sum of all weights must fit into 63 bits
# Threads and pieces are not tuned.
_NUM_THREADS = 256
_PIECE, _SMALL_PIECE = 4096, 1024  # probabilities per block: if such blocks fill the device, and if not


@op(out="output_token_ids", ulps=0)
def rejection_sample(
    output_token_ids: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    bonus_token_ids: Tensor,
    seeds: Tensor,
    offsets: Tensor | None = None,
) -> None:
    """Rejection sampling of drafted tokens by the target's distribution: the accepted drafts and one more token.

    Draft i of a request, a token of probability q in `draft_probs` and p in `target_probs`, is accepted if q > 0 and
    ``u_i * q < p``. The first rejected draft is replaced by a token drawn by the weights ``max(P - Q, 0)`` of all
    tokens, or by P if these weights are 0, and the drafts after it are dropped. If all drafts are accepted, the bonus
    token follows (Leviathan et al. 2023, arXiv:2211.17192). Weights are integers, ``floor(2^40 w)``; the token drawn is
    the first one at which their running sum exceeds ``r_i / 2^64`` of their sum.

    ``u_i`` are the upper 32 of the first 64 bits of Philox4x32-10 under the request's seed for the counter (offset, i,
    1), ``r_i`` the first 64 bits for (offset, i, 2). `top_k_top_p_sampling_from_logits` uses neither counter: under the
    same seed and offset it may draw a draft or the bonus token. Two tokens need different offsets.

    Args:
        output_token_ids: [batch, max_spec_len + 1] int32, contiguous, written; -1 after the last token, and in place
            of a rejected draft if all weights are 0.
        draft_token_ids: [num_tokens] int32, contiguous: the drafts of one request after another. Numbers that are no
            token are rejected.
        cu_num_draft_tokens: [batch] int32, contiguous: the number of drafts up to the end of each request. Drafts of a
            request beyond max_spec_len are ignored.
        draft_probs: [num_tokens, vocab_size] float32, any row stride; or None: the drafted token has probability 1.
        target_probs: [num_tokens, vocab_size] float32, any row stride; one-hot rows make it greedy.
        bonus_token_ids: [batch] or [batch, 1] int32, contiguous.
        seeds: [batch] int64, contiguous.
        offsets: [batch] int64, contiguous; or None for 0.
    """
    num_tokens, vocab_size = target_probs.shape
    batch, max_drafts = output_token_ids.shape[0], output_token_ids.shape[1] - 1
    output_token_ids.fill_(-1)
    ends = [0, *cu_num_draft_tokens.clamp(0, num_tokens).tolist()]
    bonus = bonus_token_ids.reshape(-1)
    for request in range(batch):
        begin = ends[request]
        count = max(0, min(int(cu_num_draft_tokens[request]) - begin, max_drafts, num_tokens - begin))
        key = int(seeds[request]), 0 if offsets is None else int(offsets[request])
        for i in range(count):
            row, token = begin + i, int(draft_token_ids[begin + i])
            is_token = 0 <= token < vocab_size
            q = 0.0 if not is_token else 1.0 if draft_probs is None else float(draft_probs[row, token])
            if q > 0 and (philox(*key, i, 1) >> 32) * 2.0**-32 * q < float(target_probs[row, token]):
                output_token_ids[request, i] = token
                continue
            output_token_ids[request, i] = _replacement(target_probs[row], draft_probs, row, token, philox(*key, i, 2))
            break
        else:
            output_token_ids[request, count] = bonus[request]


def _replacement(target: Tensor, draft_probs: Tensor | None, row: int, token: int, bits: int) -> Tensor | int:
    """The token that replaces a rejected draft; -1 if all weights are 0."""
    if draft_probs is None:
        left = target.clone()
        if 0 <= token < len(left):
            left[token] = 0.0
    else:
        left = target - draft_probs[row]
    for probabilities in (left, target):
        weights = (probabilities.nan_to_num(nan=0.0).clamp(0, 1).double() * 2.0**40).long()
        if total := int(weights.sum()):
            return torch.searchsorted(weights.cumsum(0), bits * total >> 64, right=True)
    return -1


@rejection_sample.result
def result_rejection_sample(cu_num_draft_tokens: TensorArg, *, max_spec_len: int) -> Result:
    """As many columns as the longest draft, and one for the token after it.

    Args:
        max_spec_len: the most draft tokens that a request has.
    """
    check.sizes(cu_num_draft_tokens, batch=None)
    return Result((cu_num_draft_tokens.shape[0], max_spec_len + 1), int32)


@rejection_sample.plan
def plan_rejection_sample(
    output_token_ids: TensorArg,
    draft_token_ids: TensorArg,
    cu_num_draft_tokens: TensorArg,
    draft_probs: TensorArg | None,
    target_probs: TensorArg,
    bonus_token_ids: TensorArg,
    seeds: TensorArg,
    offsets: TensorArg | None,
) -> list[Launch]:
    check.sizes(output_token_ids, batch=None, max_spec_len_and_one=None)
    batch, num_columns = output_token_ids.shape
    if num_columns < 1:
        raise output_token_ids.error(f"expected at least one column, got shape {output_token_ids.shape}")
    check.shape(output_token_ids, int32, batch=batch, max_spec_len_and_one=num_columns)
    check.sizes(target_probs, num_tokens=None, vocab_size=None)
    num_tokens, vocab_size = target_probs.shape
    if vocab_size > _MAX_TOKENS:
        raise target_probs.error(f"expected at most {_MAX_TOKENS} tokens, got {vocab_size}")
    probs = [arg for arg in (target_probs, draft_probs) if arg]
    for arg in probs:
        check.sizes(arg, num_tokens=num_tokens, vocab_size=vocab_size)
        check.dtype(arg, float32)
        check.row_size(arg)
    check.shape(draft_token_ids, int32, num_tokens=num_tokens)
    check.shape(cu_num_draft_tokens, int32, batch=batch)
    check.per_row(bonus_token_ids, int32, batch)
    check.shape(seeds, int64, batch=batch)
    check.shape(offsets, int64, batch=batch)

    vec_size = check.vector_width(vocab_size, *probs)
    fills_device = batch * vocab_size > _PIECE * output_token_ids.device.num_sms
    piece_size = _PIECE if fills_device else _SMALL_PIECE
    pieces = -(-vocab_size // piece_size)
    sums = Scratch(16 * batch * pieces)

    def launch(part: int) -> Launch:
        return _rejection_sample(
            VEC_SIZE=vec_size,
            PART=part,
            HAS_DRAFT_PROBS=draft_probs is not None,
            HAS_OFFSETS=offsets is not None,
            NUM_THREADS=_NUM_THREADS,
        ).launch(
            grid=batch * pieces if part == 1 else batch,
            block=_NUM_THREADS,
            sums=sums,
            num_tokens=num_tokens,
            vocab_size=vocab_size,
            max_drafts=num_columns - 1,
            pieces=pieces,
            piece_size=piece_size,
            draft_stride=check.row_stride(draft_probs) if draft_probs else 0,
            target_stride=check.row_stride(target_probs),
            **({} if draft_probs else {"draft_probs": 0}),
            **({} if offsets else {"offsets": 0}),
        )

    return [launch(1), launch(2)]


@rejection_sample.bad_indices
def bad_indices_rejection_sample(
    draft_token_ids: Tensor, cu_num_draft_tokens: Tensor, target_probs: Tensor
) -> dict[str, Tensor]:
    num_tokens, vocab_size = target_probs.shape
    return {
        "draft_token_ids": (draft_token_ids < 0) | (draft_token_ids >= vocab_size),
        "cu_num_draft_tokens": (cu_num_draft_tokens < 0) | (cu_num_draft_tokens > num_tokens),
    }


@rejection_sample.example
def example_rejection_sample(
    make: Any,
    *,
    num_tokens: int = 16,
    vocab_size: int = 4000,
    with_draft_probs: bool = True,
    with_offsets: bool = False,
) -> tuple[Any, ...]:
    drafts = 3  # drafts of each request
    probs = [make.randn(num_tokens * drafts, vocab_size, dtype="float32", scale=0.01, shift=0.02) for _ in range(2)]
    return (
        make.empty(num_tokens, drafts + 1, dtype="int32"),
        make.randint(0, vocab_size, num_tokens * drafts, dtype="int32"),
        make.values([drafts * (i + 1) for i in range(num_tokens)], dtype="int32"),
        probs[0] if with_draft_probs else None,
        probs[1],
        make.randint(0, vocab_size, num_tokens, dtype="int32"),
        make.randint(-(2**62), 2**62, num_tokens, dtype="int64"),
        make.randint(0, 1000, num_tokens, dtype="int64") if with_offsets else None,
    )
