"""Manifold-constrained hyper-connections: the checks and launches that their ops share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch, Specialisation
from ..._core.launch.scratch import Scratch
from ..._core.tensors.dtypes import DType, bfloat16, float32
from ..._core.tensors.tensor import TensorArg

_simt, _mma = Kernel("norm/mhc_logits_simt.cu"), Kernel("norm/mhc_logits_mma.cu")
_post_mma = Kernel("norm/mhc_logits_mma.cu", entry="mhc_post_logits_mma")
_pre = Kernel("norm/mhc_pre.cu")
_STREAMS = 1, 2, 4  # numbers of streams: the coefficients of a token and its sum of squares fit in 32 lanes
_SIMT_THREADS = 128  # threads of a CTA of mhc_logits_simt.cu
_SIMT_BLOCKS = 2  # CTAs of mhc_logits_simt.cu on an SM: with up to 255 registers of a thread
_MMA_WARPS = 8  # warps of a CTA of mhc_logits_mma.cu
_MMA_BLOCKS = 2  # CTAs of mhc_logits_mma.cu on an SM: with up to 128 registers of a thread
_MMA_STEP = 32  # elements of K of a step of a warp of mhc_logits_mma.cu
_MMA_TILES = 2  # most 16-row tiles of tokens of a warp of mhc_logits_mma.cu; mhc_post_logits_mma has one
_MMA_BATCH = 2  # most steps that a warp of mhc_logits_mma.cu loads at a time: the elements of a cache line
_MMA_TOKENS = 128  # most tokens of a CTA of mhc_logits_mma.cu
_M_WARP_TOKENS = 64  # tokens of the call for each warp of a CTA of mhc_logits_mma.cu along its tokens
_SIMT_TOKENS = 4  # most tokens of a CTA of mhc_logits_simt.cu: 100 accumulators
_SIMT_BYTES = 16  # bytes of an access of mhc_logits_simt.cu to the projection
_THREAD_VECS = 2  # vectors of a stream of a thread of mhc_pre.cu
_MAX_ROW_THREADS = 448  # most threads of mhc_pre.cu that have a part of the row
_COMB_THREADS = 64  # threads of mhc_pre.cu that compute the other coefficients; a CTA has a multiple of 64
_MIN_BLOCKS = 2  # CTAs of mhc_pre.cu per SM if there are more than SMs, so that one loads while the other iterates
_HELD_VECS = 8  # most vectors of streams of a thread that mhc_pre.cu holds: 32 registers


@dataclass(frozen=True)
class Logits:
    """A launch of the dot products of tokens with the projection."""

    launch: Launch
    partials: Scratch
    splits: int


def streams_of(residual: TensorArg) -> tuple[int, int, int]:
    """The checked sizes of the streams: tokens, streams, elements of a stream."""
    check.floating(residual)
    check.sizes(residual, num_tokens=None, hc_mult=None, hidden_size=None)
    check.row_size(residual)
    num_tokens, streams, hidden_size = residual.shape
    if streams not in _STREAMS:
        raise residual.error(f"expected 1, 2 or 4 streams, got shape {residual.shape}")
    if not 0 < streams * hidden_size <= 2**24:
        raise residual.error(f"expected 1 to 2^24 elements of a token, got shape {residual.shape}")
    return num_tokens, streams, hidden_size


def strides_of(residual: TensorArg) -> dict[str, int]:
    return {"token_stride": residual.strides[0], "stream_stride": residual.strides[1]}


def check_rows(arg: TensorArg, dtype: DType, **sizes: int) -> None:
    """`arg` has these sizes and this dtype; its rows may have gaps."""
    check.sizes(arg, **sizes)
    check.dtype(arg, dtype)
    check.row_size(arg)


def has_mma(residual: TensorArg, fn: TensorArg, *others: TensorArg) -> bool:
    """Whether mhc_logits_mma.cu takes the streams, the projection, and other rows of the streams' dtype."""
    hidden_size, device = residual.shape[2], fn.device
    mma = device.supports("bfloat16_products") and not device.supports("matrix_cores") and residual.dtype is bfloat16
    aligned = check.vector_width(hidden_size, residual, *others) == 8 and check.vector_width(hidden_size, fn) == 4
    return mma and aligned


def _m_warps(pinned: int, tiles: int) -> int:
    """Warps of a CTA of mhc_logits_mma.cu along its tokens."""
    return min(_MMA_TOKENS // (16 * tiles), tuning.power_of_two(-(-pinned // _M_WARP_TOKENS)))


def _launch(
    one: Specialisation,
    fn: TensorArg,
    num_tokens: int,
    tokens: int,
    size: int,
    step: int,
    blocks: int,
    **arguments: Any,
) -> Logits:
    """The launch of CTAs with `tokens` tokens and a split of `size`, of whole steps: `blocks` CTAs for each SM.

    A batch-invariant call splits as a call with many tokens does.
    """
    steps, tiles = -(-size // step), -(-max(1, tuning.pinned(num_tokens)) // tokens)
    split_steps = -(-steps // max(1, fn.device.num_sms * blocks // tiles))
    splits = -(-steps // split_steps)
    partials = Scratch(4 * splits * num_tokens * (fn.shape[0] + 1))
    launch = one.launch(
        grid=(-(-num_tokens // tokens), splits),
        block=one.constants["NUM_THREADS"],
        partials=partials,
        num_tokens=num_tokens,
        split_size=split_steps * step,
        **arguments,
    )
    return Logits(launch, partials, splits)


def _logits(residual: TensorArg, fn: TensorArg) -> Logits:
    """The dot products of streams with the projection."""
    num_tokens, streams, hidden_size = residual.shape
    size, pinned = streams * hidden_size, max(1, tuning.pinned(num_tokens))
    constants: dict[str, Any] = {"HC": streams, "HIDDEN_SIZE": hidden_size, "COLUMNS": fn.shape[0]}
    if has_mma(residual, fn):
        tiles = min(_MMA_TILES, -(-pinned // 16))
        m_warps = _m_warps(pinned, tiles)
        tokens, step = 16 * tiles * m_warps, _MMA_STEP * _MMA_WARPS // m_warps
        batch = min(_MMA_BATCH, -(-(-(-size // step) * -(-pinned // tokens)) // fn.device.num_sms))
        kernel, step, blocks = _mma, step * batch, _MMA_BLOCKS
        constants |= {"TILES_M": tiles, "M_WARPS": m_warps, "BATCH": batch}
        constants |= {"NUM_THREADS": 32 * _MMA_WARPS, "MIN_BLOCKS": blocks}
    else:
        vec_size = check.vector_width(hidden_size, residual, fn, widest=_SIMT_BYTES)
        kernel, step, blocks = _simt, _SIMT_THREADS * vec_size, _SIMT_BLOCKS
        tokens = tuning.power_of_two(min(_SIMT_TOKENS, pinned))
        constants |= {"scalar_t": residual.dtype, "TOKENS": tokens, "VEC_SIZE": vec_size, "NUM_THREADS": _SIMT_THREADS}
    one = kernel.renamed(residual=residual.name, fn=fn.name)(**constants)
    return _launch(one, fn, num_tokens, tokens, size, step, blocks, **strides_of(residual))


def post_logits(residual: TensorArg, fn: TensorArg, residual_cur: TensorArg, strides: dict[str, int]) -> Logits:
    """`mhc_post`, and the dot products of its result with the projection, where `has_mma`.

    Few tokens are too few tiles for the SMs, so their CTAs have fewer warps and more splits.
    """
    num_tokens, streams, hidden_size = residual.shape
    pinned = max(1, tuning.pinned(num_tokens))
    m_warps, warps = _m_warps(pinned, 1), _MMA_WARPS
    tiles, steps = -(-pinned // (16 * m_warps)), -(-hidden_size // _MMA_STEP)
    while warps > max(2, m_warps) and tiles * steps * m_warps // warps < fn.device.num_sms // 2:
        warps //= 2
    one = _post_mma.renamed(out=residual_cur.name, fn=fn.name)(
        HC=streams,
        HIDDEN_SIZE=hidden_size,
        COLUMNS=fn.shape[0],
        TILES_M=1,
        M_WARPS=m_warps,
        NUM_THREADS=32 * warps,
        MIN_BLOCKS=_MMA_BLOCKS,
    )
    step = _MMA_STEP * warps // m_warps
    return _launch(one, fn, num_tokens, 16 * m_warps, hidden_size, step, _MMA_BLOCKS, **strides)


def launches(
    kernel: Kernel,
    residual: TensorArg,
    fn: TensorArg,
    out: TensorArg,
    weight: TensorArg | None,
    logits: Logits | None = None,
    **arguments: Any,
) -> list[Launch]:
    """The launches of the logits, by default of the streams alone, and of an entry of mhc_pre.cu."""
    logits = logits or _logits(residual, fn)
    num_tokens, streams, hidden_size = residual.shape
    rows = [arg for arg in (residual, out, weight) if arg is not None]
    vec_size = check.vector_width(hidden_size, *rows)
    row_threads = check.threads(-(-hidden_size // (vec_size * _THREAD_VECS)), max_threads=_MAX_ROW_THREADS)
    vecs = -(-hidden_size // (vec_size * row_threads))
    specialised = kernel(
        scalar_t=residual.dtype,
        HC=streams,
        COLUMNS=fn.shape[0],
        HIDDEN_SIZE=hidden_size,
        VEC_SIZE=vec_size,
        ROW_THREADS=row_threads,
        NUM_THREADS=row_threads + _COMB_THREADS,
        MIN_BLOCKS=1 if tuning.pinned(num_tokens) <= residual.device.num_sms else _MIN_BLOCKS,
        HOLDS=vecs * streams <= _HELD_VECS,
        HAS_NORM=weight is not None,
    )
    arguments |= {"partials": logits.partials, "splits": logits.splits, "out_stride": out.strides[0]}
    arguments |= strides_of(residual)
    return [logits.launch, specialised.launch(grid=num_tokens, block=row_threads + _COMB_THREADS, **arguments)]


def plan_mhc_pre(
    residual: TensorArg,
    fn: TensorArg,
    hc_scale: TensorArg,
    hc_base: TensorArg,
    sinkhorn_repeat: int,
    norm_weight: TensorArg | None,
    post_mix: TensorArg,
    comb_mix: TensorArg,
    layer_input: TensorArg,
) -> list[Launch]:
    check_mhc_pre(residual, fn, hc_scale, hc_base, sinkhorn_repeat, norm_weight, post_mix, comb_mix, layer_input)
    return pre_launches(residual, fn, norm_weight, post_mix, comb_mix, layer_input)


def check_mhc_pre(
    residual: TensorArg,
    fn: TensorArg,
    hc_scale: TensorArg,
    hc_base: TensorArg,
    sinkhorn_repeat: int,
    norm_weight: TensorArg | None,
    post_mix: TensorArg,
    comb_mix: TensorArg,
    layer_input: TensorArg,
) -> None:
    """OpError unless the arguments fit together."""
    num_tokens, n, hidden_size = streams_of(residual)
    columns = n * (n + 2)
    check.shape(fn, float32, columns=columns, size=n * hidden_size)
    check.shape(hc_scale, float32, parts=3)
    check.shape(hc_base, float32, columns=columns)
    if sinkhorn_repeat < 1:
        raise check.refuse(residual, "sinkhorn_repeat", f"expected at least 1, got {sinkhorn_repeat}")
    check.shape(norm_weight, residual.dtype, hidden_size=hidden_size)
    check.shape(post_mix, float32, num_tokens=num_tokens, hc_mult=n, one=1)
    check_rows(comb_mix, float32, num_tokens=num_tokens, hc_mult=n, streams=n)
    check_rows(layer_input, residual.dtype, num_tokens=num_tokens, hidden_size=hidden_size)


def pre_launches(
    residual: TensorArg,
    fn: TensorArg,
    norm_weight: TensorArg | None,
    post_mix: TensorArg,
    comb_mix: TensorArg,
    layer_input: TensorArg,
    logits: Logits | None = None,
) -> list[Launch]:
    """The launches of `mhc_pre`, with its own logits by default."""
    named = {"residual": residual, "post_mix": post_mix, "comb_mix": comb_mix, "layer_input": layer_input}
    kernel = _pre.renamed(**{name: arg.name for name, arg in named.items()})
    strides = {"comb_token_stride": comb_mix.strides[0], "comb_row_stride": comb_mix.strides[1]}
    absent = {"norm_weight": 0} if norm_weight is None else {}
    return launches(kernel, residual, fn, layer_input, norm_weight, logits, **strides, **absent)
