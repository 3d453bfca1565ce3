"""In-place edits of logits before sampling: penalties for earlier tokens, and grammar bitmasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import boolean, float32, int32
from ..._core.tensors.tensor import TensorArg
from . import _masked_edit as masked_edit

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["apply_penalties_", "apply_repetition_penalties_", "apply_token_bitmask_"]

_apply_repetition_penalties = Kernel("sampling/apply_repetition_penalties.cu")
_apply_penalties = Kernel("sampling/apply_penalties.cu")
_apply_token_bitmask = Kernel("sampling/apply_token_bitmask.cu")


def _packed_vec_size(*args: TensorArg) -> int:
    """Elements of a vector for contiguous matrices of the same shape. A vector may span two rows."""
    widest = max(arg.dtype.itemsize for arg in args)
    return min(16 // widest, *(max(1, arg.alignment // arg.dtype.itemsize) for arg in args))


def _matrix(logits: TensorArg) -> tuple[int, int]:
    """Check that `logits` is a matrix of floats; returns its sizes."""
    check.floating(logits)
    check.sizes(logits, num_seqs=None, vocab_size=None)
    return logits.shape[0], logits.shape[1]


@op(inout="logits", ulps=0)
def apply_repetition_penalties_(
    logits: Tensor, prompt_mask: Tensor, output_mask: Tensor, repetition_penalties: Tensor
) -> None:
    """Make tokens that occurred before less likely: ``l = T(l / p) if l > 0 else T(l * p)`` where a mask is set.

    Logits are edited in place, and once where both masks are set (Keskar et al. 2019, arXiv:1909.05858, but by the sign
    of the logit). 0, negative values and NaN are multiplied. Float32 arithmetic, rounded once. Logits without a set
    mask are left unchanged.

    Args:
        logits: [num_seqs, vocab_size], float32, float16 or bfloat16, contiguous, edited in place.
        prompt_mask, output_mask: [num_seqs, vocab_size] bool, contiguous: tokens of the prompt and those that followed.
        repetition_penalties: [num_seqs], dtype of logits, contiguous.
    """
    x, penalty = logits.float(), repetition_penalties.float()[:, None]
    lowered = torch.where(x > 0, x / penalty, x * penalty).to(logits.dtype)
    logits.copy_(torch.where(prompt_mask | output_mask, lowered, logits))


@apply_repetition_penalties_.plan
def plan_apply_repetition_penalties_(
    logits: TensorArg, prompt_mask: TensorArg, output_mask: TensorArg, repetition_penalties: TensorArg
) -> Launch:
    num_seqs, vocab_size = _matrix(logits)
    check.contiguous(logits)
    for mask in (prompt_mask, output_mask):
        check.shape(mask, boolean, num_seqs=num_seqs, vocab_size=vocab_size)
    check.shape(repetition_penalties, logits.dtype, num_seqs=num_seqs)
    return masked_edit.launch(_apply_repetition_penalties, logits, _packed_vec_size(logits, prompt_mask, output_mask))


@apply_repetition_penalties_.example
def example_apply_repetition_penalties_(
    make: Any, *, num_tokens: int = 16, vocab_size: int = 4000, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    prompt, output = (make.randint(0, 2, num_tokens, vocab_size, dtype="bool") for _ in range(2))
    logits = make.randn(num_tokens, vocab_size, dtype=dtype, scale=4.0)
    return logits, prompt, output, make.randn(num_tokens, dtype=dtype, scale=0.1, shift=1.2)


@op(inout="logits", ulps=0)
def apply_penalties_(
    logits: Tensor, output_bin_counts: Tensor, frequency_penalties: Tensor, presence_penalties: Tensor
) -> None:
    """Lower the logits of tokens by their counts c: ``l = T(l - (frequency * c + presence))`` where c > 0.

    Logits are edited in place. Every step is rounded to float32, the result to T. (These are the penalties of OpenAI's
    API for completions.) Logits with a count of 0 or less are left unchanged.

    Args:
        logits: [num_seqs, vocab_size], float32, float16 or bfloat16, contiguous, edited in place.
        output_bin_counts: [num_seqs, vocab_size] int32, contiguous: how often each token is in the output so far.
        frequency_penalties, presence_penalties: [num_seqs] float32, contiguous.
    """
    all_counts = output_bin_counts.float()
    penalty = frequency_penalties[:, None] * all_counts + presence_penalties[:, None]
    logits.copy_(torch.where(output_bin_counts > 0, (logits.float() - penalty).to(logits.dtype), logits))


@apply_penalties_.plan
def plan_apply_penalties_(
    logits: TensorArg, output_bin_counts: TensorArg, frequency_penalties: TensorArg, presence_penalties: TensorArg
) -> Launch:
    num_seqs, vocab_size = _matrix(logits)
    check.contiguous(logits)
    check.shape(output_bin_counts, int32, num_seqs=num_seqs, vocab_size=vocab_size)
    for penalties in (frequency_penalties, presence_penalties):
        check.shape(penalties, float32, num_seqs=num_seqs)
    return masked_edit.launch(_apply_penalties, logits, _packed_vec_size(logits, output_bin_counts))


@apply_penalties_.example
def example_apply_penalties_(
    make: Any, *, num_tokens: int = 16, vocab_size: int = 4000, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    logits = make.randn(num_tokens, vocab_size, dtype=dtype, scale=4.0)
    counts = make.randint(-1, 4, num_tokens, vocab_size, dtype="int32")
    return logits, counts, *(make.randn(num_tokens, dtype="float32", shift=0.5) for _ in range(2))


@op(inout="logits", ulps=0)
def apply_token_bitmask_(logits: Tensor, bitmask: Tensor, indices: Tensor | None = None) -> None:
    """Forbid tokens: ``logits[r, t] = -inf`` where bit t % 32 of ``bitmask[r, t // 32]`` is 0, in place.

    Grammar-constrained decoding uses such bitmasks (Dong et al. 2024, arXiv:2411.15100). Other logits are left
    unchanged.

    Args:
        logits: [num_rows, vocab_size], float32, float16 or bfloat16, edited in place; any row stride.
        bitmask: [num_rows, ceil(vocab_size / 32)] int32, a set bit for each allowed token; any row stride. Bits
            after the last token are ignored.
        indices: [n] int32, contiguous: the rows of logits and bitmask to edit, in any order. Other rows are left
            unchanged; indices of no row are ignored. None: every row.
    """
    tokens = torch.arange(logits.shape[-1], dtype=torch.int64, device=logits.device)
    allowed = (bitmask[:, tokens // 32] >> (tokens % 32)) & 1
    if indices is None:
        logits.masked_fill_(allowed == 0, -torch.inf)
        return
    edited = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    edited[indices[(indices >= 0) & (indices < logits.shape[0])].long()] = True
    logits.masked_fill_((allowed == 0) & edited[:, None], -torch.inf)


@apply_token_bitmask_.plan
def plan_apply_token_bitmask_(logits: TensorArg, bitmask: TensorArg, indices: TensorArg | None) -> Launch:
    num_rows, vocab_size = _matrix(logits)
    check.row_size(logits)
    check.sizes(bitmask, num_rows=num_rows, num_words=-(-vocab_size // 32))
    check.dtype(bitmask, int32)
    check.row_size(bitmask)
    if indices:
        check.sizes(indices, num_indices=None)
        check.dtype(indices, int32)
        check.contiguous(indices)
    fixed = {
        "num_indices": indices.shape[0] if indices else 0,
        "logits_stride": check.row_stride(logits),
        "bitmask_stride": check.row_stride(bitmask),
    }
    if indices is None:
        fixed["indices"] = 0
    vec_size = check.vector_width(vocab_size, logits)
    return masked_edit.launch(_apply_token_bitmask, logits, vec_size, fixed=fixed, HAS_INDICES=indices is not None)


@apply_token_bitmask_.bad_indices
def bad_indices_apply_token_bitmask_(logits: Tensor, bitmask: Tensor, indices: Tensor | None) -> dict[str, Tensor]:
    return {} if indices is None else {"indices": (indices < 0) | (indices >= logits.shape[0])}


@apply_token_bitmask_.example
def example_apply_token_bitmask_(
    make: Any, *, num_tokens: int = 16, vocab_size: int = 4000, dtype: str = "bfloat16", with_indices: bool = False
) -> tuple[Any, ...]:
    logits = make.randn(num_tokens, vocab_size, dtype=dtype)
    bitmask = make.randint(-(2**31), 2**31, num_tokens, -(-vocab_size // 32), dtype="int32")
    return logits, bitmask, make.permutation(num_tokens, num_tokens, dtype="int32") if with_indices else None
