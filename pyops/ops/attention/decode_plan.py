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
from . import decode_blocks, decode_choose, decode_launch, prefill_mma, prefill_plan, prefill_sm90_fp8
from .arguments import PagedKV
from .decode_blocks import CTA_US, STEP_US
from .decode_choose import DecodeConfig
from .decode_problem import DecodeProblem
from .prefill_items import ItemConfig
from .prefill_problem import PrefillProblem, shares_rows
from .prefill_sm90 import COMBINE_US

# Bytes per microsecond of an H200 at which the CTAs of attention_decode.cu with 16 heads read, most of them from L2,
# and at which prefill_sm90.cu reads for few query rows: docs/performance/decode.md, "Many heads per KV head".
_READ_RATE_OF_DECODE, _READ_RATE_OF_ROWS = 2.5e6, 2.9e6
# The rates of attention_decode.cu where it reads the cache once, with up to 8 columns and with 16: 64 x 2048 takes 125
# us with 4 heads per KV head (docs/performance/decode.md, "Times"), and 42.5 us with 16, a quarter of the bytes ("One
# scoreboard for all loads of the next step").
_RATES_OF_COLUMNS = {8: 4.3e6, 16: 3.4e6}
# Microseconds that prefill kernels take longer than attention_decode.cu, whatever the size of the cache: they find
# work and fill stages of shared memory. An estimate: short sequences take the former 7 to 14 us
# (docs/performance/prefill.md, "Short sequences"), and 1 x 1024 takes the latter 5.2 us.
_ROWS_TAKE_LONGER = 4.0
_LAUNCH_US = 2.2  # us of one more kernel in a graph
_MAX_COLUMNS = 16  # most columns of a CTA of attention_decode.cu


def launch(name: str, problem: DecodeProblem) -> list[Launch]:
    """The launches of the op `name`."""
    device, rows = problem.query.device, _as_rows(problem)
    config: Any
    if rows and _is_faster(problem, rows, device) and not tuning.batch_invariant():
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
    if others and rows.codes is None and rows.uses_wgmma and prefill_mma.is_alone(rows, device):
        return False  # finding the other tiles takes longer: prefill.md, "Few CTAs"
    may_split = rows.few_rows > 0 and rows.uses_wgmma and not rows.is_fp8
    if may_split and config.max_splits > decode_choose.MAX_SPLITS_OF_LAST_BLOCK:
        return False
    slots = decode_blocks.blocks_at_once(config.num_warps, config.min_blocks, device)
    seq_bytes = nbytes / problem.num_seqs
    ctas = (problem.num_seqs + others) * problem.layout.num_kv_heads
    us = nbytes / _RATES_OF_COLUMNS[problem.cta_heads]
    if others:
        steps = -(-problem.attended_tokens // config.round_tokens)
        share = _READ_RATE_OF_DECODE / min(ctas, slots)
        of_one_cta = max(seq_bytes / problem.layout.num_kv_heads / share, steps * STEP_US)
        us = max((nbytes + others * seq_bytes) / _READ_RATE_OF_DECODE, of_one_cta)
    us += CTA_US * max(0.0, ctas / slots - 1)
    if prefill_sm90_fp8.choose(rows, device):
        us += _LAUNCH_US  # the prefill kernel takes e4m3 queries as they are
    return us <= _rows_us(rows, nbytes, device)


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


def _is_faster(problem: DecodeProblem, rows: PrefillProblem, device: Device) -> bool:
    """Whether the prefill kernels are faster, by the bytes that CTAs read."""
    nbytes, reads = _cache_bytes(problem), problem.reads
    return reads > 1 and _rows_us(rows, nbytes, device) < reads * nbytes / _READ_RATE_OF_DECODE


def _rows_us(rows: PrefillProblem, nbytes: float, device: Device) -> float:
    """The time of the prefill kernels: they read the cache once, but the keys once per slice of the values, and on
    Hopper another kernel combines the splits."""
    config = prefill_plan.choose(rows, device)
    has_combine = isinstance(config, ItemConfig) and config.max_splits > 1
    read_us = nbytes * (rows.slices + 1) / 2 / _READ_RATE_OF_ROWS
    return read_us + _ROWS_TAKE_LONGER + (COMBINE_US if has_combine else 0.0)


def _cache_bytes(problem: DecodeProblem) -> float:
    """Bytes of the cache that the sequences attend to, if each is as long as its block table allows."""
    layout, tokens = problem.layout, problem.num_seqs * problem.attended_tokens
    return float(tokens * layout.num_kv_heads * 2 * problem.head_size * layout.dtype.itemsize)
