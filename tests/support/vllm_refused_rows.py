"""A call for every refusal of `pyops.integrations.vllm.refusals.rows`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import pyops
from tests.support.calls import example

Change = Callable[[Any], Any]


def _changed(name: str, changes: dict[str, Change], axes: dict[str, Any]) -> object:
    """An op's example with some of its arguments replaced by functions of the original ones."""
    op = pyops.registry[name]
    args = dict(zip((p.name for p in op.parameters), example(op, num_tokens=4, **axes), strict=True))
    args |= {argument: change(args[argument]) for argument, change in changes.items()}
    return getattr(pyops, name)(**args)


def _call(name: str, /, axes: dict[str, Any] | None = None, **changes: Change) -> Callable[[], object]:
    return partial(_changed, name, changes, axes or {})


def _value(value: Any) -> Change:
    return lambda _: value


def _two(_: Any) -> torch.Tensor:
    return torch.ones(2)


def _regrouped(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(2, x.shape[0] // 2, *x.shape[1:], dtype=x.dtype)


def _longer(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape[0] + 1, *x.shape[1:], dtype=x.dtype)


def _apart(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, x), -1)[..., 0]


def _of(dtype: torch.dtype) -> Change:
    return lambda x: torch.zeros(x.shape, dtype=dtype)


_FLOAT8 = torch.float8_e4m3fn
_GROUPED = {
    "silu_and_mul": "out",
    "mul_and_silu": "out",
    "gelu_and_mul": "out",
    "gelu_tanh_and_mul": "out",
    "fatrelu_and_mul": "out",
    "swigluoai_and_mul": "out",
    "silu_and_mul_with_clamp": "result",
    "gelu_new": "out",
    "gelu_fast": "out",
    "gelu_quick": "out",
    "silu_and_mul_quant": "result",
    "silu_and_mul_per_block_quant": "out",
    "rms_norm": "out",
    "fused_add_rms_norm": "residual",
    "rms_norm_static_fp8_quant": "result",
    "fused_add_rms_norm_static_fp8_quant": "result",
    "rms_norm_dynamic_per_token_quant": "result",
    "rms_norm_per_block_quant": "result",
    "static_scaled_fp8_quant": "result",
    "dynamic_scaled_fp8_quant": "result",
    "dynamic_per_token_scaled_fp8_quant": "result",
    "static_scaled_int8_quant": "result",
    "dynamic_scaled_int8_quant": "result",
}
_OF_ONE_ELEMENT = (
    ("silu_and_mul_quant", "scale"),
    ("silu_and_mul_per_block_quant", "scale_ub"),
    ("silu_and_mul_nvfp4_quant", "input_global_scale"),
    ("rms_norm_static_fp8_quant", "scale"),
    ("fused_add_rms_norm_static_fp8_quant", "scale"),
    ("rms_norm_dynamic_per_token_quant", "scale_ub"),
    ("rms_norm_per_block_quant", "scale_ub"),
    ("dynamic_per_token_scaled_fp8_quant", "scale_ub"),
    ("scaled_fp4_quant", "input_scale"),
    ("reshape_and_cache", "k_scale"),
    ("reshape_and_cache", "v_scale"),
    ("concat_and_cache_mla", "scale"),
    ("gather_and_maybe_dequant_cache", "scale"),
)


def _group_range(name: str, least: str, largest: str) -> dict[tuple[str, str], Any]:
    return {
        (name, "group_size"): _call(name, group_size=_value(96)),
        (name, "eps"): _call(name, eps=_value(0.0)),
        (name, least): _call(name, **{least: _value(1.0)}),
        (name, largest): _call(name, **{largest: _value(0.5)}),
    }


def _scaled_fp4_quant_out() -> object:
    from pyops.integrations.vllm import table

    outputs = {"output": torch.empty(4, 16, dtype=torch.uint8), "output_scale": torch.empty(4, 2, dtype=_FLOAT8)}
    kernel = table("0.22")["scaled_fp4_quant.out"].kernel
    assert kernel is not None
    return kernel(torch.ones(4, 32, dtype=torch.bfloat16), torch.ones(2), False, **outputs)


def _slashes(*counts: Any) -> object:
    from pyops.integrations.vllm import table

    name = "convert_vertical_slash_indexes" + "_mergehead" * bool(counts)
    kernel = table("0.22")[name].kernel
    assert kernel is not None
    lists = torch.zeros(1, 2, 2, 3, dtype=torch.int32)
    lengths, indices = torch.ones(1, dtype=torch.int32), torch.zeros(1, 2, 3, dtype=torch.int32)
    blocks = lists[..., 0].contiguous(), lists, lists[..., 1].contiguous(), lists.clone()
    return kernel(*blocks, lengths, lengths, indices, indices, *counts, 128, 64, 32, True)


def _minimax(name: str) -> Callable[[], object]:
    x, weight, workspace = torch.ones(2, 16), torch.ones(16), torch.zeros(64, dtype=torch.int64)
    if name == "minimax_allreduce_rms":
        return lambda: pyops.minimax_allreduce_rms(x, weight, workspace, 0, 16, 1e-6)
    return lambda: pyops.minimax_allreduce_rms_qk(x, weight[:8], weight[:4], workspace, 8, 4, 0, 16, 1e-6)


_LSE = {
    name: _call("merge_attn_states", **{name: torch.flatten}) for name in ("prefix_lse", "suffix_lse", "output_lse")
}
_LONG_TABLE = {
    "query": lambda x: torch.ones(4, 4096, dtype=x.dtype),
    "key": _value(None),
    "head_size": _value(4096),
    "cos_sin_cache": lambda x: torch.ones(8, 4096, dtype=x.dtype),
}
_TOP_K = ("top_k_per_row_prefill", "top_k_per_row_decode")

# {(op, argument): the call that is refused, or one for each refusal of the argument in their order}
CALLS: dict[tuple[str, str], Callable[[], object] | tuple[Callable[[], object], ...]] = {
    **{(name, argument): _call(name, **{argument: _regrouped}) for name, argument in _GROUPED.items()},
    **{(name, argument): _call(name, **{argument: _two}) for name, argument in _OF_ONE_ELEMENT},
    **{("merge_attn_states", argument): call for argument, call in _LSE.items()},
    **_group_range("per_token_group_fp8_quant", "fp8_min", "fp8_max"),
    **_group_range("per_token_group_fp8_quant_packed", "fp8_min", "fp8_max"),
    **_group_range("per_token_group_quant_int8", "int8_min", "int8_max"),
    **{(name, "logits"): _call(name, stride0=lambda stride: 2 * stride) for name in _TOP_K},
    **{(name, "indices"): _call(name, indices=_longer) for name in _TOP_K},
    **{(name, "rank"): _minimax(name) for name in ("minimax_allreduce_rms", "minimax_allreduce_rms_qk")},
    ("per_token_group_fp8_quant", "output_q"): (
        _call("per_token_group_fp8_quant", output_q=_regrouped),
        _call("per_token_group_fp8_quant", output_q=_of(torch.int8)),
    ),
    ("per_token_group_fp8_quant_packed", "output_q"): _call(
        "per_token_group_fp8_quant_packed", output_q=_of(torch.int8)
    ),
    ("per_token_group_quant_int8", "output_q"): (
        _call("per_token_group_quant_int8", output_q=_regrouped),
        _call("per_token_group_quant_int8", output_q=_of(_FLOAT8)),
    ),
    ("persistent_masked_m_silu_mul_quant", "y_q"): _call(
        "persistent_masked_m_silu_mul_quant", y_q=_of(torch.float8_e4m3fnuz)
    ),
    ("persistent_masked_m_silu_mul_quant", "counts"): _call("persistent_masked_m_silu_mul_quant", counts=_apart),
    ("convert_vertical_slash_indexes", "block_size_M"): _slashes,
    ("convert_vertical_slash_indexes_mergehead", "block_size_M"): partial(
        _slashes, *(torch.ones(2, dtype=torch.int32) for _ in range(2))
    ),
    ("swap_blocks", "src"): lambda: pyops.swap_blocks(torch.ones(4, 4)[:, :2], torch.ones(4, 2), 8, [(0, 1)]),
    ("reshape_and_cache_flash", "kv_cache_dtype"): _call("reshape_and_cache_flash", kv_cache_dtype=_value("nvfp4")),
    ("concat_and_cache_mla", "kv_cache"): _call(
        "concat_and_cache_mla", {"kv_cache_dtype": "fp8_ds_mla"}, kv_cache=_of(_FLOAT8)
    ),
    ("convert_fp8", "output"): _call("convert_fp8", output=lambda x: x.t().contiguous().t()),
    ("cp_gather_and_upconvert_fp8_kv_cache", "src_cache"): _call(
        "cp_gather_and_upconvert_fp8_kv_cache", src_cache=_of(_FLOAT8)
    ),
    ("indexer_k_quant_and_cache", "kv_cache"): _call("indexer_k_quant_and_cache", kv_cache=_of(_FLOAT8)),
    ("cp_gather_indexer_k_quant_cache", "kv_cache"): _call("cp_gather_indexer_k_quant_cache", kv_cache=_of(_FLOAT8)),
    ("get_cuda_view_from_cpu_tensor", "cpu_tensor"): lambda: pyops.get_cuda_view_from_cpu_tensor(torch.ones(2)),
    ("rms_norm_dynamic_per_token_quant", "scale"): _call("rms_norm_dynamic_per_token_quant", scale=_longer),
    ("rms_norm_per_block_quant", "scale"): _call("rms_norm_per_block_quant", scale=_longer),
    ("dynamic_scaled_int8_quant", "scale"): _call("dynamic_scaled_int8_quant", scale=_longer),
    ("dynamic_scaled_int8_quant", "azp"): _call(
        "dynamic_scaled_int8_quant", azp=_value(torch.zeros(5, dtype=torch.int32))
    ),
    ("scaled_fp4_quant.out", "input_scale"): _scaled_fp4_quant_out,
    ("rotary_embedding", "cos_sin_cache"): (
        _call("rotary_embedding", {"dtype": "bfloat16"}, cos_sin_cache=_of(torch.float16)),
        _call("rotary_embedding", **_LONG_TABLE),
    ),
}
