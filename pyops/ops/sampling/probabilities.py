"""softmax and log_softmax over a vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32
from ..._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["log_softmax", "softmax"]

_softmax = Kernel("sampling/softmax.cu")
# (threads of a block, vectors of a thread) if pieces of that size fill the device, and if they do not. Not tuned;
# docs/performance/sampling.md has times of the op.
_MANY, _FEW = (512, 4), (256, 1)


@op(out="out", in_place={"out": "logits"})
def softmax(out: Tensor, logits: Tensor, temperature: Tensor | None = None) -> None:
    """Probabilities: ``out = exp(d) / sum exp(d), d = (x - max x) / t``, over the last dimension.

    float32 arithmetic, rounded once. A row with a NaN or inf in it, or with -inf alone, becomes NaN.

    Args:
        out: [..., vocab_size], float32, float16 or bfloat16, written; constant row stride. May be `logits`.
        logits: the same shape, float32, float16 or bfloat16; constant row stride.
        temperature: t of each row, float32, contiguous; or None for 1. A t below the smallest normal number, such as
            0, counts as that number, so that the largest logits share all probability. With inf, all finite logits
            are equally likely.
    """
    out.copy_(_cooled(logits, temperature).softmax(-1))


@op(out="out", in_place={"out": "logits"})
def log_softmax(out: Tensor, logits: Tensor, temperature: Tensor | None = None) -> None:
    """Logarithms of probabilities: ``out = d - log(sum exp(d)), d = (x - max x) / t``, over the last dimension.

    float32 arithmetic, rounded once. A row with a NaN or inf in it, or with -inf alone, becomes NaN.

    Args:
        out: [..., vocab_size], float32, float16 or bfloat16, written; constant row stride. May be `logits`.
        logits: the same shape, float32, float16 or bfloat16; constant row stride.
        temperature: t of each row, float32, contiguous; or None for 1. A t below the smallest normal number, such as
            0, counts as that number, so that the largest logits share all probability. With inf, all finite logits
            are equally likely.
    """
    out.copy_(_cooled(logits, temperature).log_softmax(-1))


def _cooled(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """The logits divided by the temperature of their row, in float64."""
    x = logits.double()
    if temperature is None:
        return x
    smallest = torch.finfo(torch.float32).tiny
    t = temperature.double().clamp(min=smallest).reshape(*logits.shape[:-1], 1)
    return torch.where(x == -torch.inf, x, x / t)  # -inf / inf would be NaN


def _launches(out: TensorArg, logits: TensorArg, temperature: TensorArg | None, logarithm: bool) -> list[Launch]:
    """The launch of softmax.cu for rows that fit into a block, else one for partial sums and one for results."""
    for arg in (out, logits):
        check.floating(arg)
    check.same_shape(out, logits)
    vocab_size, num_rows = check.row_size(logits), check.num_rows(logits)
    check.row_size(out)
    check.per_row(temperature, float32, num_rows)
    strides = {"out_stride": check.row_stride(out), "logits_stride": check.row_stride(logits)}
    vec_size = check.vector_width(vocab_size, out, logits)
    row_vecs = -(-vocab_size // vec_size)
    num_threads, batch = _MANY
    if tuning.pinned(num_rows) * -(-row_vecs // (num_threads * batch)) < logits.device.num_sms:
        num_threads, batch = _FEW
    pieces = -(-row_vecs // (num_threads * batch))
    if pieces == 1:
        num_threads = check.threads(-(-row_vecs // batch))
    partial = [Scratch(4 * num_rows * pieces if pieces > 1 else 0) for _ in range(2)]

    def launch(part: int) -> Launch:
        return _softmax(
            in_t=logits.dtype,
            out_t=out.dtype,
            VEC_SIZE=vec_size,
            BATCH=batch,
            NUM_THREADS=num_threads,
            PART=part,
            LOGARITHM=logarithm,
            HAS_TEMPERATURE=temperature is not None,
        ).launch(
            grid=num_rows * pieces,
            block=num_threads,
            maxima=partial[0] if pieces > 1 else 0,
            sums=partial[1] if pieces > 1 else 0,
            vocab_size=vocab_size,
            pieces=pieces,
            **strides,
            **({} if temperature else {"temperature": 0}),
        )

    return [launch(1), launch(2)] if pieces > 1 else [launch(0)]


@softmax.plan
def plan_softmax(out: TensorArg, logits: TensorArg, temperature: TensorArg | None) -> list[Launch]:
    return _launches(out, logits, temperature, logarithm=False)


@log_softmax.plan
def plan_log_softmax(out: TensorArg, logits: TensorArg, temperature: TensorArg | None) -> list[Launch]:
    return _launches(out, logits, temperature, logarithm=True)


def _example(
    make: Any, *, num_tokens: int = 16, vocab_size: int = 4000, dtype: str = "bfloat16", with_temperature: bool = False
) -> tuple[Any, ...]:
    logits = make.randn(num_tokens, vocab_size, dtype=dtype, scale=4.0)
    temperature = make.full(num_tokens, value=0.7, dtype="float32") if with_temperature else None
    return make.empty(num_tokens, vocab_size, dtype=dtype), logits, temperature


softmax.example(_example)
log_softmax.example(_example)
