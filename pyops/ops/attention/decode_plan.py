"""Decode attention: the choice between attention_decode.cu and the prefill kernels, and the launches of either.

A CTA of attention_decode.cu has up to 16 query heads of a key-value head, so that more heads read the cache several
times. A CTA of the prefill kernels has up to 128 (GQA packing).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Launch
from . import decode_choose, decode_launch, prefill_plan
from .decode_choose import DecodeConfig
from .decode_problem import DecodeProblem
from .prefill_problem import PrefillProblem

# Bytes per microsecond of an H200 at which the CTAs of attention_decode.cu with 16 heads read, most of them from L2,
# and at which prefill_sm90.cu reads for few query rows: docs/performance/decode.md, "Many heads per KV head".
_READ_RATE_OF_DECODE, _READ_RATE_OF_ROWS = 2.5e6, 2.9e6
# Microseconds that prefill kernels take longer than attention_decode.cu, whatever the size of the cache: they find
# work, fill stages of shared memory, and combine splits. An estimate, not yet measured.
_ROWS_TAKE_LONGER = 4.0


def launch(name: str, problem: DecodeProblem) -> list[Launch]:
    """The launches of the op `name`."""
    device, rows = problem.query.device, _as_rows(problem)
    config: Any
    if rows and _is_faster(problem) and not tuning.batch_invariant():
        config = tuning.config(name, rows, device, prefill_plan.choose)
    else:
        config = tuning.config(name, problem, device, decode_choose.choose)
    if rows and not isinstance(config, DecodeConfig):
        return prefill_plan.launch(rows, config)
    return decode_launch.launch(problem, config)


def _as_rows(problem: DecodeProblem) -> PrefillProblem | None:
    """The problem for the prefill kernels; None if they do not support the call."""
    query, layout = problem.query, problem.layout
    if not problem.uses_mma or not query.device.supports("mma"):
        return None
    rows = PrefillProblem(problem.out, query, problem.kv, layout, problem.options, None, causal=True)
    # With an fp8 cache, prefill_sm90.cu rounds probabilities to float16, as attention_decode.cu does.
    if layout.dtype is query.dtype or not rows.uses_wgmma:
        rows = replace(rows, p_hi_lo=True)
    return rows if rows.uses_mma and rows.has_aligned_out and rows.few_rows else None


def _is_faster(problem: DecodeProblem) -> bool:
    """Whether the prefill kernels are faster, by the bytes that CTAs read."""
    layout = problem.layout
    token_bytes = layout.num_kv_heads * 2 * problem.head_size * layout.dtype.itemsize
    nbytes = problem.num_seqs * problem.attended_tokens * token_bytes
    rows_us = nbytes / _READ_RATE_OF_ROWS + _ROWS_TAKE_LONGER
    return problem.reads > 1 and rows_us < problem.reads * nbytes / _READ_RATE_OF_DECODE
