"""The part `jit_warmup`: kernels for any number of tokens are compiled before vLLM 0.33 serves.

vLLM warms up with its largest batch and with those of its CUDA graphs. Plans of this library choose kernels by the
number of tokens, so a batch of another size can need one that is not compiled yet. After vLLM's own warm-up of
kernels, the model therefore runs on dummy batches of many sizes. Whatever is in the cache folder is not compiled again,
and ``--kernel-config.enable_jit_warmup=False`` leaves both warm-ups out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

from ._replaced import Replaced

_WARMUP = "vllm.model_executor.warmup.kernel_warmup"
# Between two batches of a list: tokens, on which GEMMs and rows depend; sequences, and tokens of these, on which
# attention depends.
_TOKENS_RATIO, _SEQS_RATIO, _PROMPTS_RATIO = 2**0.25, 4.0, 2.0
_replaced = Replaced()


def install() -> str:
    """Extend vLLM's warm-up of kernels.

    Returns:
        One line for the log; "" for a vLLM without the warm-up that a user can leave out, or if it is extended already.
    """
    try:
        fields = importlib.import_module("vllm.config.kernel").KernelConfig.__dataclass_fields__
    except (ImportError, AttributeError):
        return ""
    if _replaced or "enable_jit_warmup" not in fields:
        return ""
    _replaced.function(_WARMUP, "kernel_warmup", _extended)
    return "batches of all sizes belong to the warm-up"


def uninstall() -> None:
    """Leave the warm-up to vLLM."""
    _replaced.undo()


def _extended(warmup: Callable[..., None]) -> Callable[..., None]:
    def with_all_sizes(worker: Any, *args: Any, **kwargs: Any) -> None:
        warmup(worker, *args, **kwargs)
        if worker.vllm_config.kernel_config.enable_jit_warmup:
            _run_batches(worker.model_runner, worker.vllm_config, worker.use_v2_model_runner)

    return with_all_sizes


def _run_batches(runner: Any, config: Any, has_attention: bool) -> None:
    """Run dummy batches: of tokens in as many sequences as vLLM allows and in fewer, and of decode steps.

    vLLM's older runner leaves attention out of dummy batches, which then differ by their number of tokens alone.
    """
    most_tokens, most_seqs = config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs
    for count in _counts(most_tokens, _TOKENS_RATIO):
        runner._dummy_run(count, skip_eplb=True)
    if not has_attention:
        return
    for count in _counts(min(most_seqs, most_tokens // runner.decode_query_len), _TOKENS_RATIO):
        runner._dummy_run(count * runner.decode_query_len, skip_eplb=True, uniform_decode=True)
    try:
        for seqs in _counts(most_seqs, _SEQS_RATIO):
            runner.max_num_reqs = seqs  # the most sequences of a dummy batch
            for count in _counts(min(seqs * config.model_config.max_model_len, most_tokens), _PROMPTS_RATIO):
                runner._dummy_run(count, skip_eplb=True)
                if 1 < seqs < most_seqs and count > seqs:  # sequences of different lengths, as in the first list
                    runner._dummy_run(count - 1, skip_eplb=True)
    finally:
        runner.max_num_reqs = most_seqs


def _counts(most: int, ratio: float) -> Iterator[int]:
    """Numbers from `most` down to 1: neighbours differ by the ratio, or by one."""
    count = most
    while count > 0:
        yield count
        count = min(count - 1, ceil(count / ratio))
