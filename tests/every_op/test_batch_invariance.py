"""PYOPS_BATCH_INVARIANT: a row has the same bits alone and in any batch.

Two proofs. The plans of every op launch kernels of the same text for any number of rows, but for ops that add up
nothing across threads (`ANY_ORDER`). And kernels on the host backend compute rows, and sequences, in batches of
different sizes and at different positions; the device has so few SMs that a batch would get other kernels, tiles and
splits than a row without the switch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import pyops
from pyops._core import config
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops.example import ArgMaker
from pyops.host.toolchain import toolchains
from pyops.ops.attention import decode_choose, mla_plan
from pyops.testing import same_bits
from pyops.testing.calls import clones, written
from tests.support import axes
from tests.support.calls import example

# Ops that choose by the number of rows, and reduce nothing that depends on an order: they copy, compute element by
# element, take maxima or count. In ops of GGUF weights only the bound of the registers differs, in routing and the
# state update only the rows of a block, and in inserts with norms of heads only the heads of a group of lanes. Sampling
# adds up weights that are integers.
ANY_ORDER = {
    *("ggml_moe_a8", "ggml_moe_a8_vec", "ggml_mul_mat_a8", "ggml_mul_mat_vec_a8"),
    *("grouped_topk", "topk_sigmoid", "topk_softmax", "topk_softplus_sqrt", "moe_prepare_scatter"),
    *("cp_gather_and_upconvert_nvfp4_kv_cache", "fused_qknorm_rope_cache", "fused_muse_spark_qknorm_rope_kv_insert"),
    *("fused_minimax_m3_qknorm_rope_kv_insert", "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert"),
    *("fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert", "fused_qk_rope_cache"),
    *("get_cutlass_batched_moe_mm_data", "get_cutlass_pplx_moe_mm_data"),
    *("get_cutlass_moe_mm_data", "get_cutlass_moe_mm_problem_sizes", "moe_align_block_size"),
    *("moe_lora_align_block_size", "moe_permute", "shuffle_rows", "permute_cols", "vocab_parallel_embedding"),
    *("dynamic_scaled_fp8_quant", "static_scaled_fp8_quant", "scaled_fp4_quant", "silu_and_mul_nvfp4_quant"),
    *("per_token_group_fp8_quant", "per_token_group_fp8_quant_packed", "per_token_group_quant_int8"),
    *("concat_and_cache_mla", "concat_and_cache_mla_rope_fused", "concat_mla_q", "cp_gather_cache"),
    "mla_norm_rope_cache",
    *("cp_gather_and_upconvert_fp8_kv_cache", "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"),
    *("gather_and_maybe_dequant_cache", "reshape_and_cache", "reshape_and_cache_flash"),
    *("apply_rotary_emb", "dual_chunk_rotary_embedding", "flashinfer_rotary_embedding", "multimodal_rotary_embedding"),
    *("rotary_embedding", "apply_penalties_", "apply_repetition_penalties_", "apply_token_bitmask_"),
    "top_k_top_p_sampling_from_logits",
    *("causal_conv1d_decode", "selective_scan_fwd", "selective_state_update"),
}
COUNTS = 1, 2, 33, 700, 5000  # rows of a call that is only planned
ROWS = 19  # rows, or sequences, of a call that runs
PARTS = (0, 1), (18, 19), (5, 8), (1, 18)  # rows of the other calls
NUM_SMS = 2
LENGTHS = 3, 40, 1, 70, 17  # tokens of the sequences of a batch
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0)
# Tensors that all sequences share, and the outputs that hold numbers of rows.
SHARED = ("conv_state", "key_cache", "kv_c_and_k_pe_cache", "state", "token_expert_indices", "value_cache")
# The ops of a decoder that take rows, or one token of each sequence.
DECODER: dict[str, axes.Axes] = {
    "causal_conv1d_decode": {},
    "cutlass_scaled_mm": {},
    "dsv3_router_gemm": {},
    "dynamic_per_token_scaled_fp8_quant": {"hidden_size": 1024},
    "fused_add_rms_norm": {"hidden_size": 2048, "dtype": "float32"},
    "fused_qk_norm_rope": {},
    "gated_delta_rule_update": {},
    "ggml_mul_mat_a8": {},
    "grouped_topk": {},
    "layer_norm": {"hidden_size": 1000, "dtype": "float32"},
    "machete_mm": {},
    "marlin_gemm": {},
    "moe_sum": {"hidden_size": 511},
    "paged_attention_rocm": {},
    "paged_attention_v1": {"max_seq_len": 200, "num_heads": 4, "head_size": 64},
    "rms_norm": {"hidden_size": 2048, "dtype": "float32"},
    "rms_norm_gated": {"hidden_size": 2048, "dtype": "float32"},
    "rotary_embedding": {},
    "selective_state_update": {"with_heads": True},
    "silu_and_mul": {"hidden_size": 512},
    "skinny_linear": {},
    "sm100_cutlass_mla_decode": {"num_heads": 12, "max_pages": 200},
    "softmax": {"dtype": "float32", "vocab_size": 9000},
    "top_k_top_p_sampling_from_logits": {},
    "topk_softmax": {},
}


@pytest.fixture(autouse=True)
def _invariant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYOPS_BATCH_INVARIANT", "1")
    _forget()
    yield
    monkeypatch.delenv("PYOPS_BATCH_INVARIANT")
    _forget()


def _forget() -> None:
    for op in pyops.registry.values():
        op.forget()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_no_choice_depends_on_the_rows(arch: str) -> None:
    differ = set()
    for name, op in pyops.registry.items():
        if op.example is None or "num_tokens" not in inspect.signature(op.example).parameters:
            continue
        options = {axis: value for axis, value in axes.fullest(op).items() if value is True}  # rows stay long
        for case in ({}, options):
            texts = {_texts(op, ArgMaker(device.model(arch)), **case | {"num_tokens": count}) for count in COUNTS}
            differ |= {name} if len(texts) > 1 else set()
    assert differ <= ANY_ORDER


def _texts(op: Op, make: ArgMaker, **case: Any) -> tuple[str, ...]:
    """The kernels of a call and their constants."""
    assert op.example is not None
    launches = op.launches(*op.example(make, **case))
    return tuple(f"{one.specialisation.kernel.file} {one.specialisation}" for one in launches if not one.empty)


def _host(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Few SMs, and splits of few tokens."""
    for module in (decode_choose, mla_plan):
        monkeypatch.setattr(module, "PINNED_SPLIT", 64)
    monkeypatch.setitem(device._HOST, 32, replace(device.host(), num_sms=NUM_SMS, **changes))


@pytest.mark.rotates
@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize("name", DECODER)
def test_rows_have_the_same_bits_in_any_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _host(monkeypatch)
    op = pyops.registry[name]
    args = example(op, **{"num_tokens": ROWS, **DECODER[name]})
    whole = _run(op, args, 0, ROWS)
    assert whole
    for begin, end in PARTS:
        for output, rows in _run(op, args, begin, end).items():
            assert same_bits(rows, whole[output][begin:end]), (output, begin, end)


def _run(op: Op, args: list[Any], begin: int, end: int) -> dict[str, Tensor]:
    """The outputs of a call with these rows."""
    given = []
    for parameter, arg in zip(op.parameters, clones(args), strict=True):
        if isinstance(arg, Tensor) and arg.shape[:1] == (ROWS,) and parameter.name not in SHARED:
            arg = arg[begin:end].clone()
        elif parameter.name == "token_expert_indices":
            arg = arg[: end - begin].clone()
        elif parameter.name == "size_m":
            arg = end - begin
        elif parameter.name == "state_batch_indices":
            arg = torch.arange(begin, end, dtype=torch.int32)
        given.append(arg)
    with config.cpu("kernels"):
        op(*given)
    return {name: out for name, out in written(op, given).items() if name not in SHARED}


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_projections_have_the_same_bits_in_any_batch(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the switch, K is split for a few rows alone. TMA stores one row of 43 columns, but not several."""
    _host(monkeypatch, arch=arch)
    for n, k in ((64, 1024), (43, 512)):
        weight = (torch.randn(n, k) * k**-0.5).bfloat16()
        _assert_same_rows(partial(pyops.linear.new, weight=weight), torch.randn(ROWS, k).bfloat16())


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_experts_have_the_same_bits_in_any_batch(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _host(monkeypatch, arch=arch)
    experts, hidden, width = 4, 128, 64
    w1, w2 = torch.randn(experts, 2 * width, hidden).bfloat16(), torch.randn(experts, hidden, width).bfloat16()
    weights, ids = torch.rand(ROWS, 2), torch.randint(0, experts, (ROWS, 2), dtype=torch.int32)
    _assert_same_rows(
        lambda x, weights, ids: pyops.fused_experts(x, w1, w2, weights, ids),
        torch.randn(ROWS, hidden).bfloat16(),
        weights,
        ids,
    )


def _assert_same_rows(function: Any, *tensors: Tensor) -> None:
    with config.cpu("kernels"):
        whole = function(*tensors)
        for begin, end in PARTS:
            part = function(*(one[begin:end].clone() for one in tensors))
            assert same_bits(part, whole[begin:end]), (begin, end)


class Sequences:
    """The sequences of a batch: their tokens in a tensor, one after the other."""

    def __init__(self, chosen: Sequence[int]) -> None:
        self.lengths = [LENGTHS[one] for one in chosen]
        self.chosen = torch.tensor(chosen)
        self.starts = torch.tensor([0, *self.lengths]).cumsum(0).int()
        self.rows = torch.cat([torch.arange(STARTS[one], STARTS[one + 1]) for one in chosen])

    def randn(self, *sizes: int, seed: int = 0) -> Tensor:
        """A row for each token; a token has the same values in every batch."""
        tokens = torch.randn(sum(LENGTHS), *sizes, generator=torch.Generator().manual_seed(seed))
        return tokens[self.rows].bfloat16()


def _paged(batch: Sequences) -> Tensor:
    """The newest tokens of sequences of 150 and more. The block table of a batch is wider than that of a sequence."""
    caches = (torch.randn(80, 16, 2, 32, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    table = torch.arange(80).int().reshape(len(LENGTHS), 16)[batch.chosen, : 14 + len(batch.chosen) // 2]
    lengths = torch.tensor(batch.lengths).int() + 150
    query = batch.randn(4, 32)
    return pyops.paged_attention_varlen.new(query, *caches, 2, 0.2, table, lengths, batch.starts, 16, "auto", 1.0, 1.0)


def _ragged(batch: Sequences) -> Tensor:
    query, key, value = batch.randn(4, 64), batch.randn(2, 64, seed=1), batch.randn(2, 64, seed=2)
    return pyops.attention_varlen.new(query, key, value, batch.starts, batch.starts, 0.125)


def _delta_rule(batch: Sequences) -> Tensor:
    q, k, v = (batch.randn(heads, 32, seed=seed)[None] for seed, heads in enumerate((2, 2, 4)))
    g, beta = -batch.randn(4, seed=5).float().abs()[None], batch.randn(4, seed=6).sigmoid()[None]
    o = torch.empty_like(v)
    pyops.gated_delta_rule(q, k, v, g, beta, 0.2, None, batch.starts, True, o=o)
    return o[0]


def _selective_scan(batch: Sequences) -> Tensor:
    u, delta = (batch.randn(24, seed=seed).T.contiguous() for seed in (1, 2))
    b, c = (batch.randn(32, seed=seed).T.reshape(2, 16, -1).contiguous() for seed in (3, 4))
    states, a = torch.zeros(len(batch.lengths), 24, 16), -torch.arange(1.0, 17).expand(24, 16).contiguous()
    return pyops.selective_scan_fn(u, states, delta, a, b, c, delta_softplus=True, query_start_loc=batch.starts).T


def _chunk_scan(batch: Sequences) -> Tensor:
    chunks = [(s, min(16, length - at)) for s, length in enumerate(batch.lengths) for at in range(0, length, 16)]
    owners = torch.tensor([s for s, _ in chunks]).int()
    ends = torch.tensor([0, *(size for _, size in chunks)]).cumsum(0).int()
    last = owners.bincount().cumsum(0).int() - 1
    x, dt, b, c = (
        batch.randn(4, 16),
        batch.randn(4, seed=1).sigmoid(),
        batch.randn(2, 16, seed=2),
        batch.randn(2, 16, seed=3),
    )
    out = torch.empty_like(x)
    pyops.mamba_chunk_scan_varlen(
        x, dt, -torch.ones(4), b, c, 16, batch.starts, ends, last, owners, out, states=torch.empty(len(last), 4, 16, 16)
    )
    return out


def _convolution(batch: Sequences) -> Tensor:
    x, weight = batch.randn(64), torch.linspace(-1, 1, 256).reshape(64, 4).bfloat16()
    states = torch.zeros(len(batch.lengths), 3, 64).bfloat16()
    return pyops.causal_conv1d_prefill.new(states, x, weight, None, batch.starts)


@pytest.mark.rotates
@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize("of", [_paged, _ragged, _delta_rule, _selective_scan, _chunk_scan, _convolution])
def test_sequences_have_the_same_bits_in_any_batch(
    of: Callable[[Sequences], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    _host(monkeypatch)
    with config.cpu("kernels"):
        whole = of(Sequences(range(len(LENGTHS)))).split(LENGTHS)
        for chosen in ((1,), (2,), (4, 0), (3, 2, 1)):
            batch = Sequences(chosen)
            for one, part in zip(chosen, of(batch).split(batch.lengths), strict=True):
                assert same_bits(part, whole[one]), (one, chosen)
