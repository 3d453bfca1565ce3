"""Decode attention, and paged attention of any number of query tokens: the choice between attention_decode.cu and the
prefill kernels, and the launches of either.

A CTA of attention_decode.cu has up to 16 columns, the query heads of a key-value head times query tokens, so that more
of them read the cache several times. A CTA of the prefill kernels has up to 128 (GQA packing).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Launch
from ..._core.system.device import Device
from . import decode_blocks, decode_choose, decode_launch, prefill_mma, prefill_plan, prefill_sm90, prefill_sm90_fp8
from .arguments import PagedKV
from .decode_blocks import CTA_US, STEP_US, STEP_US_OF_8
from .decode_choose import DecodeConfig
from .decode_problem import DecodeProblem
from .prefill_items import ItemConfig
from .prefill_problem import PrefillProblem, shares_rows
from .prefill_sm90 import COMBINE_US, PrefillSm90Config

# Bytes per microsecond of an H200 at which the CTAs of attention_decode.cu with 16 heads read, most of them from L2,
# and at which prefill kernels read for few query rows: docs/performance/decode.md, "Many heads per KV head".
_READ_RATE_OF_DECODE, _READ_RATE_OF_ROWS = 2.5e6, 2.9e6
# The rate of kernels that read the cache once, and with the MMAs of 16-bit operands and probabilities: decode.md,
# "Several query tokens".
_READ_RATE = 4.2e6
# Microseconds of prefill kernels for few query rows without their loads: they find work and fill stages of shared
# memory (decode.md, "Several query tokens").
_ROWS_US = 7.0
_LAUNCH_US = 2.2  # us of one more kernel in a graph
_SEARCH_US = 1.0  # us in which CTAs find tiles of query tokens that are not the first ones: prefill.md, "Few CTAs"
# Splits that the last CTA combines in the time of a step. It was set with the times of "Splits", and stands for what
# else splits cost, too: the combine alone takes two thirds of that ("Sixteen splits at once").
_SPLITS_OF_A_STEP = 12
_MAX_COLUMNS = 16  # most columns of a CTA of attention_decode.cu


def launch(name: str, problem: DecodeProblem) -> list[Launch]:
    """The launches of the op `name`."""
    device, rows = problem.query.device, _as_rows(problem)
    config: Any
    choose_short: Any = prefill_mma.choose_short
    if rows and _short_rows_are_faster(problem, exact := replace(rows, p_hi_lo=True), device):
        rows = exact
        config = tuning.config(name, rows, device, choose_short)
    elif rows and _is_faster(problem, rows, device) and not tuning.batch_invariant():
        config = tuning.config(name, rows, device, prefill_plan.choose)
    else:
        config = tuning.config(name, problem, device, decode_choose.choose)
    if rows and not isinstance(config, DecodeConfig):
        return prefill_plan.launch(rows, config)
    return decode_launch.launch(problem, config)


def launch_varlen(name: str, rows: PrefillProblem) -> list[Launch]:
    """The launches of the op `name`, for any number of query tokens of each sequence."""
    device, problem = rows.query.device, _as_columns(rows)
    config: Any
    if problem and _columns_are_faster(problem, rows, device):
        config = tuning.config(name, problem, device, decode_choose.choose)
    else:
        config = tuning.config(name, rows, device, prefill_plan.choose)
    if problem and isinstance(config, DecodeConfig):
        return prefill_sm90_fp8.upcast(rows, decode_launch.launch(problem, config))
    return prefill_plan.launch(rows, config)


def _as_columns(rows: PrefillProblem) -> DecodeProblem | None:
    """The problem for attention_decode.cu; None if it does not support the call with a query token per CTA."""
    query = rows.query
    if not isinstance(rows.kv, PagedKV) or not rows.causal or not query.device.supports("mma"):
        return None
    if tuning.batch_invariant() or rows.value_size != query.shape[2] or query.numel * rows.kv.block_tables.numel == 0:
        return None
    # Half of the columns have fewer accumulators: three CTAs per SM.
    has_few = 0 < rows.tokens_of_each * rows.group <= _MAX_COLUMNS // 2
    problem = rows.as_decode((_MAX_COLUMNS // 2 if has_few else _MAX_COLUMNS) // rows.group)
    return problem if problem.any_tokens and problem.uses_mma else None


def _columns_are_faster(problem: DecodeProblem, rows: PrefillProblem, device: Device) -> bool:
    """Whether attention_decode.cu is faster than the prefill kernels, by the bytes that CTAs read.

    Every tile of query tokens reads the sequence, those after the first one without splits: their CTAs share the rate
    of all that run at once, and take at least the latency of their steps. Few long sequences have splits that take a
    combine kernel, which attention_decode.cu has for one query token alone.
    """
    nbytes, others = _cache_bytes(problem), problem.other_tiles
    config = decode_choose.choose(problem, device)
    slots = decode_blocks.blocks_at_once(config.num_warps, config.min_blocks, device)
    ctas = (problem.num_seqs + others) * problem.layout.num_kv_heads
    short = prefill_mma.choose_short(rows, device) if rows.uses_wgmma and rows.codes is None else None
    if short:
        own_us = _short_us(problem, config, ctas, device) + _SEARCH_US * (others > 0)
        # Few query tokens come after cached ones. attention_decode.cu takes about as long for many of these as for few.
        mma_us = prefill_mma.us_of_short(rows, short, device, longest=others == 0)
        return own_us <= min(mma_us, prefill_sm90.us_of_short(rows, device))
    may_split = rows.few_rows > 0 and rows.uses_wgmma and not rows.is_fp8
    if may_split and config.max_splits > decode_choose.MAX_SPLITS_OF_LAST_BLOCK:
        return False
    seq_bytes = nbytes / problem.num_seqs
    us = CTA_US + _combine_us(problem, config, rows.few_rows or problem.cta_heads, device)
    us += max(nbytes / _READ_RATE, (ctas / slots - 1) * _block_us(problem, config))
    if others:
        steps = -(-problem.attended_tokens // config.round_tokens)
        share = _READ_RATE_OF_DECODE / min(ctas, slots)
        of_one_cta = max(seq_bytes / problem.layout.num_kv_heads / share, steps * STEP_US)
        us = max((nbytes + others * seq_bytes) / _READ_RATE_OF_DECODE, of_one_cta) + CTA_US * max(1.0, ctas / slots)
    if prefill_sm90_fp8.choose(rows, device):
        us += _LAUNCH_US  # the prefill kernel takes e4m3 queries as they are
    return us <= _rows_us(rows, nbytes, device)


def _combine_us(problem: DecodeProblem, config: DecodeConfig, heads: int, device: Device) -> float:
    """The time in which the last CTA of a sequence combines its splits: each warp those of one head after another.
    Slices of a head have not been measured."""
    splits = min(config.max_splits, decode_choose.equal_splits(problem, config, device))
    if splits == 1 or config.combine or config.slices > 1:
        return 0.0
    return -(-heads // config.num_warps) * splits / _SPLITS_OF_A_STEP * STEP_US_OF_8


def _short_us(problem: DecodeProblem, config: DecodeConfig, ctas: int, device: Device) -> float:
    """The time of so many CTAs of attention_decode.cu that take whole short sequences."""
    at_once = decode_blocks.blocks_at_once(config.num_warps, config.min_blocks, device)
    us = _block_us(problem, config) + decode_blocks.crowd_us(ctas, at_once, config.heads_per_block, device)
    is_fp8 = problem.layout.dtype is not problem.query.dtype
    return -(-ctas // at_once) * (us + decode_blocks.FP8_US * is_fp8)


def _block_us(problem: DecodeProblem, config: DecodeConfig) -> float:
    """The time of a CTA of attention_decode.cu that takes a whole sequence, or of a cluster of them."""
    work = decode_choose.work_of(problem, config.heads_per_block, config.tiles_per_step)
    work = replace(work, tokens=-(-work.tokens // config.cluster_size))
    return decode_blocks.block_us(config.num_warps, config.heads_per_block, work)


def _as_rows(problem: DecodeProblem) -> PrefillProblem | None:
    """The problem for the prefill kernels; None if they do not support the call."""
    query, layout = problem.query, problem.layout
    if not problem.uses_mma or not query.device.supports("mma"):
        return None
    rows = PrefillProblem(problem.out, query, problem.kv, layout, problem.options, None, causal=True)
    # With an fp8 cache, prefill_sm90.cu rounds probabilities to float16, as attention_decode.cu does.
    if layout.dtype is query.dtype or not rows.uses_wgmma:
        rows = replace(rows, p_hi_lo=True)
    # The rate of the prefill kernels is that of heads with which a warp has all accumulators of 16 rows.
    is_served = rows.uses_mma and rows.slices == 1 and not shares_rows(rows)
    return rows if is_served and rows.has_aligned_out and rows.few_rows else None


def _short_rows_are_faster(problem: DecodeProblem, rows: PrefillProblem, device: Device) -> bool:
    """Whether CTAs of prefill_mma.cu with all heads of a short sequence are faster: they read the cache once."""
    short = prefill_mma.choose_short(rows, device) if rows.uses_wgmma and problem.reads > 1 else None
    if not short:
        return False
    config = decode_choose.choose(problem, device)
    blocks = decode_choose.blocks_of_one_split(problem, config.heads_per_block) * config.cluster_size
    own_us = _short_us(problem, config, blocks, device)
    return prefill_mma.us_of_short(rows, short, device, longest=True) < own_us


def _is_faster(problem: DecodeProblem, rows: PrefillProblem, device: Device) -> bool:
    """Whether the prefill kernels are faster, by the bytes that CTAs read."""
    nbytes, reads = _cache_bytes(problem), problem.reads
    return reads > 1 and _rows_us(rows, nbytes, device) < reads * nbytes / _READ_RATE_OF_DECODE + CTA_US


def _rows_us(rows: PrefillProblem, nbytes: float, device: Device) -> float:
    """The time of the prefill kernels: they read the cache once, but the keys once per slice of the values, and on
    Hopper another kernel combines the splits."""
    config = prefill_plan.choose(rows, device)
    own_us = _ROWS_US + (COMBINE_US if isinstance(config, ItemConfig) and config.max_splits > 1 else 0.0)
    if isinstance(config, PrefillSm90Config) and not rows.p_hi_lo and not rows.is_fp8:
        return nbytes / _READ_RATE + own_us
    return nbytes * (rows.slices + 1) / 2 / _READ_RATE_OF_ROWS + own_us


def _cache_bytes(problem: DecodeProblem) -> float:
    """Bytes of the cache that the sequences attend to, if each is as long as its block table allows."""
    layout, tokens = problem.layout, problem.num_seqs * problem.attended_tokens
    return float(tokens * layout.num_kv_heads * 2 * problem.head_size * layout.dtype.itemsize)
