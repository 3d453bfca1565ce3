"""Prefill attention: the problem, the choice of a Config, and the launch."""

from __future__ import annotations

from typing import Any

from ... import tuning
from ..._core.launch.kernel import Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import float32, int32
from . import decode_choose, decode_launch, prefill_mma, prefill_sm90, prefill_sm90_fp8, prefill_sm100
from .arguments import Sparse
from .decode_launch import NO_STARTS, decode_simt, kv_arguments, kv_constants, lengths_of
from .layout import absent, heads_stride, max_tokens_of
from .prefill_mma import PrefillMmaConfig
from .prefill_problem import PrefillProblem
from .prefill_sm90 import PrefillSm90Config
from .prefill_sm90_fp8 import E4m3Config
from .prefill_sm100 import PrefillTileConfig

AnyConfig = PrefillMmaConfig | PrefillSm90Config | E4m3Config | PrefillTileConfig


def choose(problem: PrefillProblem, device: Device) -> AnyConfig:
    """The Config for this problem."""
    if of_codes := prefill_sm90_fp8.choose(problem, device):
        return of_codes
    if prefill_sm100.refusal(problem) is None:
        return prefill_sm100.choose(problem)
    if not problem.uses_wgmma:
        return prefill_mma.choose(problem, device)
    short = prefill_mma.choose_short(problem, device) if problem.cu_seqlens_q else None
    if short and prefill_mma.us_of_short(problem, short, device) < prefill_sm90.us_of_short(problem, device):
        return short
    return prefill_sm90.choose(problem, device)


def launch(problem: PrefillProblem, config: AnyConfig) -> list[Launch]:
    """The launches of decode attention for sequences of one query token, where they may be many, and those of the
    prefill kernel for all other sequences.

    e4m3 queries are upcast for kernels without fp8 MMAs.
    """
    single_rows = problem.single_rows
    # On Hopper, prefill_mma.cu is for short sequences, which take less time than a launch.
    if single_rows is None or (problem.uses_wgmma and isinstance(config, PrefillMmaConfig)):
        launches = _launch_rows(problem, config, min_tokens=1)
        return launches if isinstance(config, E4m3Config) else prefill_sm90_fp8.upcast(problem, launches)
    device = problem.query.device
    decode_config = tuning.config("paged_attention_v1", single_rows, device, decode_choose.choose)
    return [*decode_launch.launch(single_rows, decode_config), *_launch_rows(problem, config, min_tokens=2)]


def _launch_rows(problem: PrefillProblem, config: AnyConfig, min_tokens: int) -> list[Launch]:
    """The prefill kernel for sequences of at least min_tokens query tokens, and the combine kernel for the splits of a
    PrefillSm90Config. Other kernels do not split the keys."""
    options, starts = problem.options, problem.cu_seqlens_q
    constants = {
        **kv_constants(problem.query, problem.kv, problem.layout, options),
        "starts_t": starts.dtype if starts else int32,
        "VALUE_SIZE": problem.value_size,
        "X": problem.layout.x,
        "CAUSAL": problem.causal,
        "RAGGED": problem.layout.ragged,
    }
    arguments = {
        **absent(sinks=options.sinks, lse=options.lse, cu_seqlens_q=starts),
        **kv_arguments(problem.query, problem.kv, problem.layout, options),
        "num_seqs": problem.num_seqs,
        "max_tokens": max_tokens_of(problem.kv),
        "out_stride": heads_stride(problem.out),
        "length_step": lengths_of(problem.kv).strides[0],
        "starts_step": starts.strides[0] if starts else 1,
    }
    if isinstance(config, PrefillSm90Config | E4m3Config | PrefillTileConfig):
        return config.launch(problem, constants, arguments | {"min_tokens": min_tokens})
    constants["NUM_WARPS"] = config.num_warps
    if problem.uses_mma:
        return [prefill_mma.launch(problem, config, constants, arguments | {"min_tokens": min_tokens})]
    return [_launch_simt(problem, config, constants, arguments)]


def _launch_simt(
    problem: PrefillProblem, config: PrefillMmaConfig, constants: dict[str, Any], arguments: dict[str, Any]
) -> Launch:
    num_tokens, num_heads, _ = problem.query.shape
    kernel = decode_simt(
        **NO_STARTS
        | constants
        | {
            "NUM_KV_HEADS": problem.layout.num_kv_heads,
            "PARTITION": 0,
            "DIRECT": True,
            "VARLEN": True,
            "SPARSE": False,
            "partial_t": float32,
        }
    )
    sparse = Sparse().named() | {"first_step": 0}
    del sparse["tp_rank"]
    arguments |= dict.fromkeys((*sparse, "tmp_out", "max_logits", "exp_sums", "query_start_loc"), 0)
    arguments |= {"num_rows": num_tokens, "max_splits": 1, "min_split": 64}
    return kernel.launch((num_tokens * num_heads if problem.num_seqs else 0, 1), config.num_warps * 32, **arguments)
