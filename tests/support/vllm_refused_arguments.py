"""A call for each refusal of an argument that vLLM 0.33 has and the op here has not: the op's example, and a value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import pyops
from pyops.integrations.vllm import table
from tests.support.calls import example


def _refused(name: str, *trailing: Any, op: str = "", order: tuple[int, ...] | None = None) -> object:
    """The kernel of vLLM's op `name` with the example of the op here, in vLLM's order, and `trailing` arguments."""
    kernel, op = table("0.33")[name].kernel, op or name
    assert kernel is not None
    args = example(pyops.registry[op])[: pyops.registry[op].declaration.positional]
    return kernel(*(args if order is None else [args[i] for i in order]), *trailing)


_GATHER = "cp_gather_and_upconvert_fp8_kv_cache"
_CHOICES, _IDS = torch.ones(4, 8, 32), torch.zeros(8, 4, dtype=torch.int32).t()


def _nvfp4_cache() -> object:
    name = "fused_minimax_m3_qknorm_rope_kv_insert"
    args = example(pyops.registry[name])
    args[19] = "nvfp4"
    return pyops.fused_minimax_m3_qknorm_rope_kv_insert(*args)


CALLS: dict[tuple[str, str], Callable[[], object]] = {
    ("reshape_and_cache", "interleaved_v"): partial(_refused, "reshape_and_cache", True),
    ("paged_attention", "use_interleaved_v_cache"): partial(
        _refused, "paged_attention", True, op="paged_attention_rocm", order=tuple(range(20))
    ),
    (_GATHER, "host_cache"): partial(_refused, _GATHER, None, torch.zeros(1), order=(0, 1, 2, 4, 5)),
    ("topk_softplus_sqrt", "bias_vl"): partial(_refused, "topk_softplus_sqrt", torch.zeros(256), 5),
    ("fused_minimax_m3_qknorm_rope_kv_insert", "kv_cache_dtype"): _nvfp4_cache,
    ("moe_sum", "topk_ids"): partial(_refused, "moe_sum", _CHOICES, torch.zeros(4, 32), _IDS, order=()),
}
