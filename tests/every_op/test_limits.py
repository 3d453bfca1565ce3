"""Calls that plans refuse and test_every_op_refuses.py cannot make: sizes beyond any memory, and odd pairs of
arguments.

Plans see no data, so these calls pass descriptors alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import pyops
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops._core.tensors.tensor import TensorArg, describe_new
from pyops.example import ArgMaker
from tests.support import axes

Change = Callable[[TensorArg], TensorArg]
MAKE = ArgMaker(device.model())


def of(*shape: int, dtype: str | None = None) -> Change:
    """A contiguous tensor of this shape, and of the same dtype unless one is given."""

    def change(arg: TensorArg) -> TensorArg:
        return describe_new(arg.op, arg.name, shape, (dtype and dtypes.of(dtype)) or arg.dtype, arg.device)

    return change


def apart(*strides: int) -> Change:
    """The same tensor with other strides."""
    return lambda arg: replace(arg, strides=strides)


def apart_of(*shape: int) -> Change:
    """A tensor of this shape, in which the leading dimensions have no common stride."""
    return lambda arg: apart(2**20, shape[-1], 1)(of(*shape)(arg))


def kind(dtype: str) -> Change:
    """The same tensor of another dtype."""
    return lambda arg: replace(arg, dtype=dtypes.of(dtype))


def index(*shape: int, dtype: str = "int32") -> TensorArg:
    """A tensor for an optional argument that the example leaves out."""
    return MAKE.empty(*shape, dtype=dtype)


V1: axes.Axes = {"head_size": 128, "packed": True}
DS_MLA: axes.Axes = {"kv_cache_dtype": "fp8_ds_mla"}
SPECULATIVE: axes.Axes = {"varlen": False, "mode": "speculative"}
FLAT: axes.Axes = {"with_starts": False, "with_blocks": False}
BLOCKED: axes.Axes = {"scales": "block", "with_bias": False}
# (op, axes of its example, changes by parameter, the argument that is refused, the start of the message)
CASES: list[tuple[str, axes.Axes, dict[str, Any], str, str]] = [
    ("rms_norm", {"hidden_size": 2**30 + 8}, {}, "input", "expected rows of at most 2^30 elements"),
    (
        "persistent_masked_m_silu_mul_quant",
        {"hidden_size": 2**30},
        {},
        "input",
        "expected rows of at most 2^30 elements",
    ),
    # Attention
    ("paged_attention_v1", V1, {"block_tables": of(15, 8), "seq_lens": of(15)}, "block_tables", "expected shape (num_"),
    ("paged_attention_v1", V1, {"query": of(16, 5, 128)}, "query", "expected heads that are a multiple of num_kv_h"),
    (
        "paged_attention_v1",
        V1,
        {"num_kv_heads": 0, "key_cache": of(128, 0, 16, 16, 8), "value_cache": of(128, 0, 128, 16)},
        "query",
        "expected heads that are a multiple of num_kv_heads=0",
    ),
    (
        "paged_attention_v1",
        V1,
        {"block_size": 0, "key_cache": of(128, 2, 16, 0, 8), "value_cache": of(128, 2, 128, 0)},
        "query",
        "expected heads that are a multiple of num_kv_heads=2",
    ),
    (
        "paged_attention_v1",
        V1,
        {"query": of(16, 6, 0), "key_cache": of(128, 2, 0, 16, 8), "value_cache": of(128, 2, 0, 16)},
        "query",
        "expected heads that are a multiple of num_kv_heads=2",
    ),
    (
        "paged_attention_v1",
        V1,
        {"query": of(16, 6, 1032), "key_cache": of(128, 2, 129, 16, 8), "value_cache": of(128, 2, 1032, 16)},
        "query",
        "expected a head_size of at most 1024",
    ),
    ("paged_attention_v1", V1, {"query": apart(6 * 136, 136, 1)}, "query", "expected the last two dimensions contig"),
    # Caches
    ("cp_gather_cache", {}, {"src_cache": of(9, 64)}, "src_cache", "expected at least 3 dimensions"),
    (
        "cp_gather_cache",
        {},
        {"src_cache": kind("int64"), "dst": kind("int64")},
        "src_cache",
        "expected elements of 1, 2 or 4 bytes",
    ),
    ("cp_gather_indexer_k_quant_cache", {}, {"cu_seq_lens": of(0)}, "cu_seq_lens", "expected at least num_seqs + 1"),
    (
        "cp_gather_indexer_k_quant_cache",
        {},
        {"dst_scale": of(16, 12), "kv_cache": of(6, 64, 140)},
        "dst_scale",
        "expected 4 bytes for each group",
    ),
    (
        "cp_gather_indexer_k_quant_cache",
        {},
        {"kv_cache": of(6, 2**23, 132)},
        "kv_cache",
        "expected blocks of at most 2^30 bytes",
    ),
    ("copy_cache_blocks", {"with_values": False}, {"key_cache": of(33)}, "key_cache", "expected at least 2 dimensions"),
    (
        "concat_and_cache_mla",
        DS_MLA,
        {"kv_c": kind("float32"), "k_pe": kind("float32")},
        "kv_c",
        "expected dtype float16 or bfloat16, got float32",
    ),
    ("concat_and_cache_mla", DS_MLA, {"kv_c": of(16, 256)}, "kv_c", "expected shape (num_tokens, latent_size=512)"),
    ("concat_and_cache_mla", DS_MLA, {"k_pe": of(16, 32)}, "k_pe", "expected shape (num_tokens, rope_size=64)"),
    ("concat_and_cache_mla", DS_MLA, {"kv_cache": kind("int8")}, "kv_cache", "expected dtype uint8, got int8"),
    ("concat_and_cache_mla", DS_MLA, {"kv_cache": of(3, 64, 655)}, "kv_cache", "expected shape (num_blocks, block_siz"),
    ("concat_and_cache_mla_rope_fused", {}, {"q_pe": of(16, 16, 0)}, "q_pe", "expected an even rope_size"),
    (
        "reshape_and_cache",
        {"kv_cache_dtype": "fp8"},
        {"value_cache": kind("float8_e4m3fn")},
        "value_cache",
        "expected dtype uint8, got float8_e4m3fn",
    ),
    ("reshape_and_cache", {}, {"key": apart(8 * 136, 136, 1)}, "key", "expected a contiguous tensor"),
    (
        "reshape_and_cache_flash",
        {"kv_cache_dtype": "fp8"},
        {"value_cache": kind("float8_e4m3fn")},
        "value_cache",
        "expected dtype uint8, got float8_e4m3fn",
    ),
    # GEMM
    (
        "linear",
        {},
        {"input": of(2, 8, 160), "out": apart_of(2, 8, 40)},
        "out",
        "expected leading dimensions that merge into 1",
    ),
    ("cutlass_scaled_mm", BLOCKED, {"a_scales": kind("float16")}, "a_scales", "expected dtype float32, got float16"),
    # State-space models
    ("mamba_chunk_scan_varlen", {}, {"x": of(2**31, 6, 16)}, "x", "expected at most 2147483584 tokens"),
    ("mamba_chunk_scan_varlen", {}, {"B": of(512, 0, 16)}, "B", "expected a number of groups that divides num_heads=6"),
    (
        "gated_delta_rule",
        {},
        {"q": of(2, 64, 0, 32), "k": of(2, 64, 0, 32)},
        "v",
        "expected a multiple of 0 heads, those of q",
    ),
    ("gated_delta_rule", {}, {"q": of(2, 64, 2, 0), "k": of(2, 64, 2, 0)}, "q", "expected heads of 1 to 256 elements"),
    ("gated_delta_rule", {}, {"q": of(2, 64, 2, 257), "k": of(2, 64, 2, 257)}, "q", "expected heads of 1 to 256"),
    (
        "gated_delta_rule",
        {},
        {"cu_seqlens": index(3, dtype="float32")},
        "cu_seqlens",
        "expected dtype int32 or int64, got float32",
    ),
    ("gated_delta_rule", {}, {"cu_seqlens": apart(2)(index(3))}, "cu_seqlens", "expected a contiguous tensor"),
    ("gated_delta_rule", {}, {"v": apart(2**20, 4 * 32, 32, 1)}, "v", "expected tokens of one stride"),
    (
        "gated_delta_rule_update",
        {"options": True},
        {"ssm_state_indices": of(64)},
        "num_accepted_tokens",
        "expected ssm_state_indices of shape (num_seqs, tokens)",
    ),
    ("causal_conv1d_decode", {"varlen": False}, {"x": of(16, 64)}, "x", "expected shape (num_seqs, seq_len, dim)"),
    ("causal_conv1d_decode", SPECULATIVE, {"num_accepted_tokens": of(15)}, "num_accepted_tokens", "expected shape (nu"),
    ("selective_scan_fwd", FLAT, {"u": of(24, 16)}, "u", "expected shape (batch, dim, num_tokens)"),
    (
        "selective_scan_fwd",
        {"with_starts": True},
        {"B": of(0, 16, 16), "C": of(0, 16, 16)},
        "B",
        "expected groups that divide the 24 channels",
    ),
    (
        "selective_scan_fwd",
        {"with_starts": True, "with_blocks": True},
        {"initial_state_idx": None},
        "initial_state_idx",
        "expected a tensor, as other indices of blocks are given",
    ),
    (
        "selective_scan_fwd",
        {"with_starts": True, "with_blocks": False},
        {"cache_indices": index(2)},
        "cache_indices",
        "expected shape (batch=3,)",
    ),
    # Experts
    ("moe_align_block_size", {}, {"topk_ids": of(2**28, 8)}, "topk_ids", "expected at most 2^30 elements"),
    (
        "topk_softmax",
        {"num_tokens": 2**28, "with_padding": False},
        {},
        "topk_weights",
        "expected fewer than 2^31 elements",
    ),
    # Norms and quantisation
    ("gemma_rms_norm", {"with_residual": True}, {"residual_out": None}, "residual", "is given without residual_out"),
    ("gemma_rms_norm", {"with_residual": True}, {"residual": None}, "residual_out", "is given without residual"),
    *(
        (op, {}, {codes: of(2, 8, columns), "input": of(2, 8, 4096), far: gapped}, far, "expected leading dimensions t")
        for op, codes, columns in (("static_scaled_int8_quant", "result", 4096), ("scaled_fp4_quant", "output", 2048))
        for far, gapped in ((codes, apart_of(2, 8, columns)), ("input", apart_of(2, 8, 4096)))
    ),
    ("static_scaled_fp8_quant", {}, {"scale": of(3, 1)}, "scale", "expected divisors of 16 rows and 4096 columns"),
    ("static_scaled_fp8_quant", {}, {"scale": of(2, 3)}, "scale", "expected divisors of 16 rows and 4096 columns"),
    ("ggml_dequantize", {}, {"dtype": "int8"}, "dtype", "expected float32 or float16 or bfloat16, got int8"),
    ("ggml_dequantize", {}, {"dtype": "number"}, "dtype", "expected float32 or float16 or bfloat16, got number"),
    # Rotary embedding and sampling
    ("rotary_embedding", {}, {"query": of(16, 0, 128)}, "query", "expected heads of head_size=128"),
    ("apply_rotary_emb", {}, {"x": of(16, 128)}, "x", "expected shape ([batch,] seq_len, num_heads, head_size)"),
    (
        "top_k_per_row_decode",
        {},
        {"logits": of(16, 2**30 + 1), "stride0": 2**30 + 1},
        "logits",
        "expected at most 1073741824 columns",
    ),
]


@pytest.mark.parametrize(
    ("op", "case", "changes", "argument", "message"),
    [pytest.param(*case, id=f"{case[0]}-{i}") for i, case in enumerate(CASES)],
)
def test_refused(op: str, case: axes.Axes, changes: dict[str, Any], argument: str, message: str) -> None:
    one = pyops.registry[op]
    assert one.example is not None
    args = dict(zip((p.name for p in one.parameters), one.example(MAKE, **axes.fullest(one) | case), strict=True))
    for name, change in changes.items():
        args[name] = change(args[name]) if callable(change) else change
    named = {name: replace(arg, op=op, name=name) if isinstance(arg, TensorArg) else arg for name, arg in args.items()}
    with pytest.raises(pyops.OpError) as caught:
        one.launches(*named.values())
    assert caught.value.argument == argument
    assert caught.value.message.startswith(message)
