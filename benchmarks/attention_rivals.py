"""Attention of other libraries, called with the arguments of pyops' ops by name.

A rival is a function from these arguments to a call without arguments, which returns the result or writes `out`.
It raises Unavailable where the library is absent, or cannot compute the same. What the library needs once for a batch,
such as a schedule, contiguous keys or queries in fp8, is prepared before the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from .installed import Unavailable, module, vllm_op
from .latent_rivals import flash_infer_mla, flash_mla, pages_of, sparse_flash_mla, workspace
from .timing import Call

Arguments = dict[str, Any]
Rival = Callable[[Arguments], Call]

_MAX_FLASH_HEAD = 256  # elements of a head in FlashAttention
_SEGMENTS, _SPLIT_BELOW = 16, 128  # parts of a split row in vLLM's Triton kernel, and the grid below which it splits


def _without(call: Arguments, *options: str) -> None:
    """Unavailable if the call has one of these options."""
    found = [name for name in options if torch.is_tensor(value := call.get(name)) or value]
    if found:
        raise Unavailable(f"attends without {', '.join(found)}")


def _of_floats(call: Arguments) -> None:
    if call.get("kv_cache_dtype", "auto") != "auto":
        raise Unavailable("attends to a cache of floats")


def _unscaled(call: Arguments) -> None:
    if call["kv_cache_dtype"] != "auto" and (call["k_scale"], call["v_scale"]) != (1.0, 1.0):
        raise Unavailable("reads fp8 without scales here")


def _window(call: Arguments) -> int:
    """The last tokens that are attended to, 0 for all."""
    return int(call.get("sliding_window", 0))


def _new(call: Arguments) -> list[int]:
    """Query tokens of each sequence."""
    starts = call.get("cu_seqlens_q")
    return [1] * len(call["seq_lens"]) if starts is None else starts.diff().tolist()


def _equal(lengths: list[int]) -> int:
    if len(set(lengths)) > 1:
        raise Unavailable("attends to sequences of one length")
    return lengths[0]


def _in_cache(call: Arguments) -> tuple[Any, Any]:
    """(keys, values) [num_seqs, kv_heads, tokens, head_size], gathered; sequences are padded to the longest."""
    tables, longest = call["block_tables"].long(), int(call["seq_lens"].max())
    keys, values = call["key_cache"], call["value_cache"]
    if keys.ndim == 5:  # [num_blocks, num_kv_heads, head_size / x, block_size, x]
        keys = keys[tables].permute(0, 2, 1, 4, 3, 5).flatten(4).flatten(2, 3)
        values = values[tables].permute(0, 2, 1, 4, 3).flatten(2, 3)
    else:
        keys, values = (cache[tables].flatten(1, 2).transpose(1, 2) for cache in (keys, values))
    return keys[:, :, :longest].contiguous(), values[:, :, :longest].contiguous()


def of_one_token(call: Arguments) -> Call:
    """torch's attention for decode. The query heads of a KV head become query rows of one head."""
    _of_floats(call)
    _without(call, "logits_soft_cap", "sinks", "alibi_slopes", "lse")
    keys, values = _in_cache(call)
    query = call["query"].unflatten(1, (keys.shape[1], -1))
    lengths, window = call["seq_lens"], _window(call)
    positions = torch.arange(keys.shape[2], device=query.device)
    attended = (positions < lengths[:, None]) & (positions >= (lengths[:, None] - window if window else 0))
    mask = None if bool(attended.all()) else attended[:, None, None]
    return lambda: F.scaled_dot_product_attention(query, keys, values, mask, scale=call["scale"]).flatten(1, 2)


def _whole(call: Arguments) -> tuple[Any, Any, Any, int]:
    """(queries, keys, values, tokens of a sequence) of sequences with equal numbers of tokens and of query tokens."""
    _of_floats(call)
    _without(call, "logits_soft_cap", "sinks", "alibi_slopes", "sliding_window", "lse")
    new = _equal(_new(call))
    if "key" in call:
        keys, values = (call[name].unflatten(0, (-1, new)).transpose(1, 2) for name in ("key", "value"))
    else:
        _equal(call["seq_lens"].tolist())
        keys, values = _in_cache(call)
    query = call["query"].unflatten(0, (-1, new)).transpose(1, 2)
    return query.contiguous(), keys.contiguous(), values.contiguous(), keys.shape[2]


def _as_rows(x: Any) -> Any:
    """[num_seqs, heads, tokens, size] as the ops have it, [num_tokens, heads, size]."""
    return x.transpose(1, 2).flatten(0, 1)


def of_equal_lengths(backend: SDPBackend, call: Arguments) -> Call:
    """One of torch's backends for whole prompts."""
    query, keys, values, tokens = _whole(call)
    if tokens != query.shape[2]:
        raise Unavailable("attends to whole prompts here")
    causal = call.get("causal", True)

    def attend() -> Any:
        with sdpa_kernel([backend]):
            found = F.scaled_dot_product_attention(
                query, keys, values, is_causal=causal, enable_gqa=True, scale=call["scale"]
            )
        return _as_rows(found)

    return attend


def after_cached(call: Arguments) -> Call:
    """torch's attention for new tokens after cached ones."""
    query, keys, values, tokens = _whole(call)
    if tokens == query.shape[2]:
        raise Unavailable("cuDNN and FlashAttention attend to whole prompts")
    mask = causal_lower_right(query.shape[2], tokens)
    return lambda: _as_rows(
        F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True, scale=call["scale"])
    )


def of_any_lengths(call: Arguments) -> Call:
    """FlashAttention as torch has it, with sequences of any lengths; keys and values are gathered."""
    _of_floats(call)
    _without(call, "logits_soft_cap", "sinks", "alibi_slopes", "lse")
    query, window = call["query"], _window(call)
    if query.shape[-1] > _MAX_FLASH_HEAD:
        raise Unavailable(f"has heads of at most {_MAX_FLASH_HEAD} elements")
    lengths, new, block = call["seq_lens"].tolist(), _new(call), call["block_size"]
    pairs = list(zip(call["block_tables"].long(), lengths, strict=True))
    keys, values = (
        torch.cat([cache[table[: -(-length // block)]].flatten(0, 1)[:length] for table, length in pairs])
        for cache in (call["key_cache"], call["value_cache"])
    )
    ends = F.pad(call["seq_lens"].cumsum(0), (1, 0)).int()
    options = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    attend = partial(
        torch.ops.aten._flash_attention_forward,
        *(query, keys, values, call["cu_seqlens_q"], ends, max(new), max(lengths), 0.0, True, False),
        scale=call["scale"],
        **options,
    )
    return lambda: attend()[0]


def flash_attention_3(call: Arguments) -> Call:
    """FlashAttention-3 of vLLM's wheel, scheduled before the call. With an fp8 cache it takes queries of e4m3."""
    forward, schedule = (
        vllm_op("_vllm_fa3_C", name, "vllm.vllm_flash_attn") for name in ("fwd", "get_scheduler_metadata")
    )
    _without(call, "alibi_slopes", "lse")
    _unscaled(call)
    query, sinks, window = call["query"], call.get("sinks"), _window(call)
    if query.shape[-1] > _MAX_FLASH_HEAD:
        raise Unavailable(f"has heads of at most {_MAX_FLASH_HEAD} elements")
    new, given, device = _new(call), {}, query.device
    if call["kv_cache_dtype"] != "auto":
        query = query.to(call["key_cache"].dtype)
        one = torch.ones(len(new), call["num_kv_heads"], device=device)
        given = dict.fromkeys(("q_descale", "k_descale", "v_descale"), one)
    given |= {
        "q": query,
        "k": call["key_cache"],
        "v": call["value_cache"],
        "out": call["out"],
        "cu_seqlens_q": call.get("cu_seqlens_q", torch.arange(len(new) + 1, dtype=torch.int32, device=device)),
        "seqused_k": call["seq_lens"],
        "max_seqlen_q": max(new),
        "max_seqlen_k": int(call["seq_lens"].max()),
        "page_table": call["block_tables"],
        "softmax_scale": call["scale"],
        "is_causal": True,
        "window_size_left": window - 1 if window else -1,
        "window_size_right": 0 if window else -1,
        "softcap": call.get("logits_soft_cap", 0.0),
        "is_rotary_interleaved": True,
        "num_splits": 0,
        "sm_margin": 0,
        "s_aux": None if sinks is None else sinks.bfloat16(),
        "cp_world_size": 1,
        "cp_rank": 0,
    }
    sizes = {
        "batch_size": len(new),
        "num_heads": query.shape[1],
        "num_heads_k": call["num_kv_heads"],
        "headdim": query.shape[2],
        "headdim_v": query.shape[2],
        "qkv_dtype": query.dtype,
        "page_size": call["block_size"],
        "max_seqlen_k_new": 0,
        "has_softcap": given["softcap"] > 0,
    }
    given["scheduler_metadata"] = _named(schedule, given | sizes)()
    return _named(forward, given)


def _named(op: Any, given: Arguments) -> Call:
    """A call of a torch op without defaults of arguments. Those not given are None."""
    return partial(op, *(given.get(one.name) for one in op.default._schema.arguments))


def vllm_triton(call: Arguments) -> Call:
    """vLLM's attention in Triton."""
    attend = module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    _without(call, "alibi_slopes", "lse")
    _unscaled(call)
    query, keys, window, new = call["query"], call["key_cache"], _window(call), _new(call)
    if keys.ndim == 5 or query.dtype.itemsize == 1:
        raise Unavailable("takes a flash cache, and queries of 16 bits, here")
    heads, size = query.shape[1:]
    seqs, device = _SPLIT_BELOW // call["num_kv_heads"], query.device
    part = torch.empty(seqs, heads, _SEGMENTS, 1 << (size - 1).bit_length(), device=device)
    modes = module("vllm.v1.kv_cache_interface").KVQuantMode
    one = torch.ones(len(new), call["num_kv_heads"], device=device)
    return partial(
        attend,
        q=query,
        k=keys,
        v=call["value_cache"],
        out=call["out"],
        cu_seqlens_q=call.get("cu_seqlens_q", torch.arange(len(new) + 1, dtype=torch.int32, device=device)),
        max_seqlen_q=max(new),
        seqused_k=call["seq_lens"],
        max_seqlen_k=int(call["seq_lens"].max()),
        softmax_scale=call["scale"],
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        block_table=call["block_tables"],
        softcap=call.get("logits_soft_cap", 0.0),
        q_descale=None,
        k_descale=one,
        v_descale=one,
        seq_threshold_3D=seqs,
        num_par_softmax_segments=_SEGMENTS,
        softmax_segm_output=part,
        softmax_segm_max=torch.empty_like(part[..., 0]),
        softmax_segm_expsum=torch.empty_like(part[..., 0]),
        sinks=call.get("sinks"),
        kv_quant_mode=modes.NONE if call["kv_cache_dtype"] == "auto" else modes.FP8_PER_TENSOR,
    )


def flash_infer(call: Arguments) -> Call:
    """FlashInfer's decode, or prefill if there are several query tokens."""
    _without(call, "sinks", "alibi_slopes", "lse")
    _unscaled(call)
    keys, query, window = call["key_cache"], call["query"], _window(call)
    if keys.ndim == 5 or query.dtype.itemsize == 1:
        raise Unavailable("takes a flash cache, and queries of 16 bits, here")
    is_prefill = "cu_seqlens_q" in call
    module_, name = ("flashinfer.prefill", "Prefill") if is_prefill else ("flashinfer.decode", "Decode")
    options = {} if is_prefill else {"use_tensor_cores": True}
    wrapper = getattr(module(module_), f"Batch{name}WithPagedKVCacheWrapper")(workspace(query.device), "NHD", **options)
    sizes = (query.shape[1], call["num_kv_heads"], query.shape[2], call["block_size"])
    wrapper.plan(
        *([call["cu_seqlens_q"]] if is_prefill else []),
        *pages_of(call, call["block_tables"], call["block_size"]),
        *sizes,
        q_data_type=query.dtype,
        kv_data_type=keys.dtype,
        sm_scale=call["scale"],
        window_left=window - 1 if window else -1,
        logits_soft_cap=call.get("logits_soft_cap", 0.0),
        **({"causal": True} if is_prefill else {}),
    )
    return partial(wrapper.run, query, (keys, call["value_cache"]), out=call["out"])


# {op: {rival: function}}
RIVALS: dict[str, dict[str, Rival]] = {
    "paged_attention_v1": {
        "SDPA": of_one_token,
        "FA3": flash_attention_3,
        "FlashInfer": flash_infer,
        "vLLM, Triton": vllm_triton,
    },
    "paged_attention_varlen": {
        "cuDNN": partial(of_equal_lengths, SDPBackend.CUDNN_ATTENTION),
        "FlashAttention": partial(of_equal_lengths, SDPBackend.FLASH_ATTENTION),
        "SDPA": after_cached,
        "FlashAttention, ragged": of_any_lengths,
        "FA3": flash_attention_3,
        "FlashInfer": flash_infer,
        "vLLM, Triton": vllm_triton,
    },
    "attention_varlen": {
        "cuDNN": partial(of_equal_lengths, SDPBackend.CUDNN_ATTENTION),
        "FlashAttention": partial(of_equal_lengths, SDPBackend.FLASH_ATTENTION),
    },
    "sm100_cutlass_mla_decode": {"FlashMLA": flash_mla, "FlashInfer": flash_infer_mla},
    "sparse_mla_attention": {"FlashMLA": sparse_flash_mla},
}
