"""Drawing tokens from logits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..._core import check
from ..._core.dtypes import float32, int32, int64
from ..._core.kernel import Kernel, Launch, Scratch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg
from ._random import philox

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["top_k_top_p_sampling_from_logits"]

_sampling_row = Kernel("sampling/sampling_row.cu")
_sampling_max = Kernel("sampling/sampling_max.cu")
_sampling_filter = Kernel("sampling/sampling_filter.cu")
_sampling_pick = Kernel("sampling/sampling_pick.cu")
_NUM_THREADS = 256
_WHOLE = 2**35  # the weight of the likeliest token
_MAX_PIECE = 2**14  # of which the sum of weights fits
_MAX_TOKENS = 2**28  # so that sums of weights have 63 bits
_BINS, _STATE = 2048, 24  # of a row: bins of eight bytes, and bytes

# Rows that the shared memory of a cluster holds.
_PIECE = 2**14  # logits of a block, if a cluster has so many blocks: two blocks find room on a multiprocessor
_MIN_PIECE = 2**12  # of which a block is left, where there are multiprocessors for more
_MAX_PER_BLOCK = 2**17 - 1  # whose sums of weights fit
_BITS = 9  # of a key, looked at together: bins of 16 bytes
_BLOCKS = 3  # of a multiprocessor, of 512 threads: what one waits for, the others use
_OWN_SHARED = (16 << _BITS) + 3 * 1024  # bytes of the kernel's own
_VECTOR = 4  # logits
_MAX_THREADS = 512  # of a block
_PER_THREAD = 32  # logits, as many as a word has bits


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
    """Draw a token from each row: the first at which the running sum of weights exceeds ``r / 2^64`` of all.

    Weights are integers, ``w = floor(2^35 exp((x - max x) / t))``, so that sums are exact and a token depends on
    nothing but its row. In this order, tokens lose their weight that are less likely than `top_k` others, that have
    less than `min_p` of the largest weight, and that are not among the likeliest whose weights reach `top_p` of those
    left (Holtzman et al. 2019, arXiv:1904.09751; Nguyen et al. 2024, arXiv:2407.01082). Tokens as likely as the last
    one that stays all stay. ``r`` are the first 64 bits of Philox4x32-10 (Salmon et al. 2011) under the row's seed at
    its offset: rows with one seed want different offsets, as does every token of a sequence.

    A logit of NaN or -inf is never drawn; inf counts as the largest number.

    Args:
        samples: [num_rows] int32, contiguous, written; -1 for a row in which nothing can be drawn.
        logits: [num_rows, vocab_size], float32, float16 or bfloat16; rows of any stride; one token at least.
        seeds: [num_rows] int64, contiguous.
        offsets: the same; or None for 0.
        top_k: [num_rows] int32, contiguous; 0 or less, or vocab_size or more, for all. Or None.
        top_p: [num_rows] float32, contiguous; 1 or more, or NaN, for all. Or None.
        min_p: [num_rows] float32, contiguous; 0 or less, or NaN, for all. Or None.
        temperature: t, [num_rows] float32, contiguous; 0, or what has no finite positive inverse, takes the first of
            the likeliest. Or None for 1.
    """
    rows, vocab_size = logits.shape
    x = logits.float()
    x = torch.where(x.isnan(), -torch.inf, x).clamp(max=torch.finfo(torch.float32).max)
    largest = x.amax(-1, keepdim=True)

    t = torch.ones_like(largest) if temperature is None else temperature[:, None]
    inverse = 1.0 / t
    greedy = ~((inverse >= 0) & inverse.isfinite() & (t > 0))
    share = torch.exp((x - largest) * inverse).nan_to_num(nan=0.0)
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
    if top_k is not None or top_p is not None:  # else the row is read no more than twice in any case
        whole = _whole_row(logits, given)
        if whole is not None:
            return [whole]

    share = vocab_size * num_rows // (8 * logits.device.multiprocessors)
    piece_size = min(_MAX_PIECE, max(4 * _NUM_THREADS, 1 << max(0, share - 1).bit_length()))
    pieces = -(-vocab_size // piece_size)
    maxima, sums = Scratch(4 * num_rows * pieces), Scratch(8 * num_rows * pieces)
    bins, states = Scratch(8 * num_rows * _BINS), Scratch(_STATE * num_rows)
    has = {"HAS_MIN_P": min_p is not None, "HAS_TEMPERATURE": temperature is not None}

    launches: list[Launch] = []

    def launch(kernel: Kernel, constants: dict[str, Any], *names: str, **scratch: Any) -> None:
        # Each goes the other way than the one before: it begins with what L2 still holds.
        constants = {**constants, "BACKWARDS": len(launches) % 2 == 1, "NUM_THREADS": _NUM_THREADS}
        one = kernel(scalar_t=logits.dtype, **constants).launch(
            grid=num_rows * pieces,
            block=_NUM_THREADS,
            vocab_size=vocab_size,
            logits_stride=check.row_stride(logits),
            pieces=pieces,
            piece_size=piece_size,
            maxima=maxima,
            states=states,
            **scratch,
            **{name: 0 for name in names if given[name] is None},
        )
        launches.append(one)

    filtered = {"FILTERED": top_k is not None or top_p is not None}
    launch(_sampling_max, filtered, bins=bins)
    digits = 3 if logits.dtype is float32 else 2  # 22 bits hold all that a logit of 16 bits has
    for is_top_p, wanted in ((False, top_k), (True, top_p)):
        for number in range(digits if wanted is not None else 0):
            constants = {"TOP_P": is_top_p, "DIGIT": number, **has}
            launch(_sampling_filter, constants, "top_k", "top_p", "min_p", "temperature", bins=bins)
    has = {**has, **filtered, "HAS_OFFSETS": offsets is not None}
    launch(_sampling_pick, has, "offsets", "min_p", "temperature", sums=sums)
    return launches


def _whole_row(logits: TensorArg, given: dict[str, TensorArg | None]) -> Launch | None:
    """The one launch for rows that fit into the shared memory of a cluster of blocks, if these do."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    cluster = 1
    while cluster < device.cluster and (
        cluster * _PIECE < vocab_size
        or (2 * cluster * num_rows <= device.multiprocessors and cluster * _MIN_PIECE < vocab_size)
    ):
        cluster *= 2
    vectors = -(-vocab_size // (cluster * _VECTOR))
    # Or a piece begins within a vector, and ends within one.
    is_aligned = check.vector_width(_VECTOR, logits) == _VECTOR
    num_threads = min(_MAX_THREADS, max(128, 1 << (vectors * _VECTOR // _PER_THREAD - 1).bit_length()))
    of_thread = -(-(vectors + (not is_aligned)) // num_threads)
    nbytes = _VECTOR * logits.dtype.itemsize * of_thread * num_threads
    fitting = (device.shared_memory + 1024) // (nbytes + _OWN_SHARED)  # a KiB of each block's is the driver's
    if fitting == 0 or of_thread * num_threads * _VECTOR > _MAX_PER_BLOCK:
        return None
    return _sampling_row(
        scalar_t=logits.dtype,
        **{f"HAS_{name.upper()}": arg is not None for name, arg in given.items()},
        CLUSTER=cluster,
        VECTORS=of_thread,
        BITS=_BITS,
        MIN_BLOCKS=min(fitting, _BLOCKS * 512 // num_threads),
        NUM_THREADS=num_threads,
    ).launch(
        grid=(num_rows, cluster),
        block=num_threads,
        shared=nbytes,
        vocab_size=vocab_size,
        logits_stride=check.row_stride(logits),
        piece_size=vectors * _VECTOR,
        **{name: 0 for name, arg in given.items() if arg is None},
    )


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
