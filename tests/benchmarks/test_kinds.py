"""Kinds of `benchmarks.models` with attention, scans and rows, without a GPU: what is drawn, planned and computed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pyops
from benchmarks import (
    attention,
    attention_batches,
    drawn,
    indexer,
    installed,
    models,
    products,
    rivals,
    row_layers,
    scan_layers,
)
from benchmarks.accuracy import Check
from benchmarks.attention_batches import Heads
from benchmarks.installed import Unavailable
from benchmarks.shapes import Case
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops._core.tensors.tensor import TensorArg
from pyops.testing import cpu

HOPPER = device.model("sm_90")
MODULES = attention_batches, scan_layers, row_layers
KINDS = [kind for module in MODULES for kind in module.KINDS]


def described(op: str, value: Any, is_tensor: bool) -> Any:
    """The descriptor of a tensor without data, as of one on a GPU."""
    if is_tensor and isinstance(value, float):
        value = torch.empty(1, device="meta")
    if not isinstance(value, torch.Tensor):
        return value
    kind = dtypes.of(value.dtype)
    assert kind is not None
    return TensorArg(op, "", kind, tuple(value.shape), value.stride(), 16, HOPPER)


def planned(call: partial[Any]) -> Any:
    """The launches of a call of an op, of tensors without data."""
    op = pyops.registry[call.func.__name__]
    bound = inspect.signature(call.func).bind(*call.args, **call.keywords)
    bound.apply_defaults()
    return op.launches(*(described(op.name, bound.arguments[one.name], one.is_tensor) for one in op.parameters))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_follow_from_the_seed(kind: str) -> None:
    draw = partial(models.module(kind).draw, kind)
    rows = draw(30, seed=3)
    assert len({str(row) for row in rows}) == 30
    assert all(row.kind == kind for row in rows)
    assert rows == draw(30, seed=3)
    assert rows != draw(30, seed=4)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_rows_have_a_plan(kind: str) -> None:
    """pyops takes every row: its arguments, made without data, are accepted for a Hopper GPU."""
    module = models.module(kind)
    for row in module.draw(kind, 12, seed=5):
        if module is row_layers:
            op = row.case.op
            assert op.launches(*row.case.described), row
            continue
        with torch.device("meta"):
            call = module.contenders(row)["pyops"](module.operands(row))
        assert planned(call), row


# Attention: pyops and every rival compute the formula. Rivals that are not installed are replaced by functions with
# their signatures, so that what they are given is tested.


def attend(q: Any, k: Any, v: Any, scale: float, left: int = -1, cap: float = 0.0, sinks: Any = None) -> Any:
    """Queries [n, heads, size], the last of the tokens [t, kv_heads, size]; `left` earlier tokens, -1 for all."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    n, t = len(q), len(k)
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    logits = cap * torch.tanh(logits / cap) if cap else logits
    last, token = torch.arange(t - n, t)[:, None], torch.arange(t)
    masked = (token > last) | ((token < last - left) if left >= 0 else token < 0)
    logits = logits.masked_fill(masked, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[:, None, None].expand(-1, n, 1)), 2)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., :t], v)


def gathered(cache: Any, pages: Any, length: int) -> Any:
    return cache[pages.long()].flatten(0, 1)[:length].to(torch.float64)


def fa3(*args: Any) -> list[Any]:
    """FlashAttention-3 of vLLM: windows count the tokens on each side of the last one."""
    a = SimpleNamespace(**dict(zip(FA3, args, strict=True)))
    assert (a.is_causal, a.cp_world_size) == (True, 1)
    assert a.window_size_right == (0 if a.window_size_left >= 0 else -1)
    sizes = [len(a.seqused_k), a.max_seqlen_q, a.max_seqlen_k, a.q.shape[1], a.window_size_left, a.softcap > 0]
    assert a.scheduler_metadata.tolist() == sizes
    for seq, (begin, end) in enumerate(pairwise(a.cu_seqlens_q.tolist())):
        length = int(a.seqused_k[seq])
        assert end - begin <= a.max_seqlen_q
        assert length <= a.max_seqlen_k
        keys, values = (gathered(cache, a.page_table[seq], length) for cache in (a.k, a.v))
        options = a.softmax_scale, a.window_size_left, a.softcap, a.s_aux
        a.out[begin:end] = attend(a.q[begin:end], keys, values, *options)
    return []


_INDICES = "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k"
_ROTARY = "rotary_cos", "rotary_sin", "seqlens_rotary"
# {argument of `_vllm_fa3_C.fwd`, in its order: its type}
FA3 = {
    **dict.fromkeys(("q", "k", "v", "k_new", "v_new", "q_v"), "Tensor?"),
    "out": "Tensor(a!)?",
    **dict.fromkeys(_INDICES, "Tensor?"),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "int?"),
    **dict.fromkeys(("page_table", "kv_batch_idx", "leftpad_k", *_ROTARY), "Tensor?"),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), "Tensor?"),
    "softmax_scale": "float",
    "is_causal": "bool",
    **dict.fromkeys(("window_size_left", "window_size_right"), "int"),
    "softcap": "float",
    "is_rotary_interleaved": "bool",
    "scheduler_metadata": "Tensor?",
    "num_splits": "int",
    "pack_gqa": "bool?",
    "sm_margin": "int",
    "s_aux": "Tensor?",
    **dict.fromkeys(("cp_world_size", "cp_rank"), "int"),
    "cp_tot_seqused_k": "Tensor?",
}


# {argument of `_vllm_fa3_C.get_scheduler_metadata`, in its order: its type}
FA3_SCHEDULE = {
    **dict.fromkeys(("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads", "num_heads_k"), "int"),
    **dict.fromkeys(("headdim", "headdim_v"), "int"),
    "qkv_dtype": "ScalarType",
    "seqused_k": "Tensor",
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "leftpad_k"), "Tensor?"),
    "page_size": "int?",
    "max_seqlen_k_new": "int",
    "is_causal": "bool",
    **dict.fromkeys(("window_size_left", "window_size_right"), "int"),
    "has_softcap": "bool",
    "num_splits": "int",
    "pack_gqa": "bool?",
    "sm_margin": "int",
}


def fa3_schedule(*args: Any) -> Any:
    a = SimpleNamespace(**dict(zip(FA3_SCHEDULE, args, strict=True)))
    assert (a.is_causal, a.num_splits, a.page_size) == (True, 0, 16)
    return torch.tensor([a.batch_size, a.max_seqlen_q, a.max_seqlen_k, a.num_heads, a.window_size_left, a.has_softcap])


def unified_attention(**call: Any) -> None:
    """vLLM's attention in Triton: windows as in FlashAttention."""
    a = SimpleNamespace(**call)
    assert (a.causal, a.q_descale, a.max_seqlen_q) == (True, None, int(a.cu_seqlens_q.diff().max()))
    assert (a.k_descale == 1).all()
    assert a.softmax_segm_output.shape == (a.seq_threshold_3D, a.q.shape[1], a.num_par_softmax_segments, 64)
    assert a.kv_quant_mode == ("NONE" if a.k.dtype.itemsize == 2 else "FP8_PER_TENSOR")
    for seq, (begin, end) in enumerate(pairwise(a.cu_seqlens_q.tolist())):
        keys, values = (gathered(cache, a.block_table[seq], int(a.seqused_k[seq])) for cache in (a.k, a.v))
        options = a.softmax_scale, a.window_size[0], a.softcap, a.sinks
        a.out[begin:end] = attend(a.q[begin:end], keys, values, *options)


class FlashInfer:
    """FlashInfer's wrappers for paged caches, of decode and of prefill."""

    def __init__(self, workspace: Any, layout: str = "NHD", use_tensor_cores: bool = False) -> None:
        assert layout == "NHD"

    def plan(self, *args: Any, sm_scale: float, window_left: int, logits_soft_cap: float, **rest: Any) -> None:
        *starts, self.ends, self.pages, self.last, _, _, _, self.block = args
        self.starts = starts[0] if starts else torch.arange(len(self.last) + 1)
        self.options = sm_scale, window_left, logits_soft_cap

    def run(self, query: Any, caches: Any, out: Any) -> None:
        for seq, (begin, end) in enumerate(pairwise(self.starts.tolist())):
            first, stop = self.ends[seq : seq + 2].tolist()
            length = (stop - first - 1) * self.block + int(self.last[seq])
            keys, values = (gathered(cache, self.pages[first:stop], length) for cache in caches)
            out[begin:end] = attend(query[begin:end], keys, values, *self.options)


class LatentFlashInfer(FlashInfer):
    def plan(self, *args: Any, **_: Any) -> None:
        starts, self.ends, self.pages, self.lengths, _, _, _, self.block, causal, self.scale, *_ = args
        assert starts.tolist() == list(range(len(self.lengths) + 1))
        assert not causal

    def run(self, q_nope: Any, q_pe: Any, latents: Any, ropes: Any, out: Any) -> None:
        for seq, length in enumerate(self.lengths.tolist()):
            pages = self.pages[slice(*self.ends[seq : seq + 2].tolist())]
            values = gathered(latents, pages, length)[:, None]
            keys = torch.cat((values, gathered(ropes, pages, length)[:, None]), -1)
            out[seq] = attend(torch.cat((q_nope[seq], q_pe[seq]), -1)[None], keys, values, self.scale)[0]


def flash_mla(q: Any, cache: Any, size: int, lengths: Any, table: Any, scale: float, *_: Any) -> Any:
    """FlashMLA's dense kernels, which also return a schedule."""
    assert cache.shape[1] == 64
    out = torch.empty(*q.shape[:3], size, dtype=torch.bfloat16)
    for seq, length in enumerate(lengths.tolist()):
        keys = gathered(cache.to(torch.float64), table[seq], length)
        out[seq] = attend(q[seq], keys, keys[..., :size], scale)
    return out, lengths, None, None


def sparse_flash_mla(q: Any, cache: Any, indices: Any, *rest: Any) -> Any:
    """FlashMLA's kernel for 656 bytes, given slots; -1 is none."""
    *_, size, scale, out = rest
    assert out is None
    assert indices.shape[-1] % 64 == 0
    rows = cache.reshape(-1, 656)
    latents = rows[:, :512].view(torch.float8_e4m3fn).double().unflatten(1, (4, 128))
    latents = (latents * rows[:, 512:528].contiguous().view(torch.float32).double()[..., None]).flatten(1)
    keys = torch.cat((latents, rows[:, 528:].contiguous().view(torch.bfloat16).double()), 1)[:, None]
    out = torch.empty(*q.shape[:3], size, dtype=torch.bfloat16)
    for seq, slots in enumerate(indices[:, 0]):
        used = keys[slots[slots >= 0].long()]
        out[seq] = attend(q[seq], used, used[..., :size], scale)
    return out, q, None, None


def prefill_flash_mla(q: Any, entries: Any, indices: Any, scale: float, size: int, *_: Any) -> Any:
    """FlashMLA's kernel for lists of slots of a bf16 cache."""
    assert indices.shape[-1] % 128 == 0
    out = torch.empty(*q.shape[:2], size, dtype=torch.bfloat16)
    for token, slots in enumerate(indices[:, 0].long()):
        used = entries[slots].double()
        out[token] = attend(q[token, None], used, used[..., :size], scale)[0]
    return out, None, None


def of_schema(function: Any, schema: Any) -> Any:
    """A function that looks like a torch op. It takes as many arguments as the schema has."""

    def op(*args: Any) -> Any:
        assert len(args) == len(schema.arguments)
        return function(*args)

    op.default = SimpleNamespace(_schema=schema)  # type: ignore[attr-defined]
    return op


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions with the signatures of the libraries."""
    installed._import.cache_clear()
    for module in (installed, rivals):
        monkeypatch.setattr(module, "load_vllm", lambda paths: "")
    wrappers = {f"Batch{name}WithPagedKVCacheWrapper": FlashInfer for name in ("Decode", "Prefill")}
    for name in ("decode", "prefill"):
        monkeypatch.setitem(sys.modules, f"flashinfer.{name}", SimpleNamespace(**wrappers))
    latent = SimpleNamespace(BatchMLAPagedAttentionWrapper=LatentFlashInfer)
    delta = SimpleNamespace(chunk_gated_delta_rule=flashinfer_delta_rule)
    fla = SimpleNamespace(chunk_gated_delta_rule=rule, fused_recurrent_gated_delta_rule=rule)
    kda = SimpleNamespace(chunk_kda=rule, fused_recurrent_kda=rule)
    steps = "fused_recurrent_gated_delta_rule", "fused_recurrent_kda"
    vllm_steps = dict.fromkeys(steps, partial(rule, v_first=True, with_slots=True))
    chunked = dict.fromkeys(("chunk_gated_delta_rule", "chunk_kda"), partial(rule, v_first=True))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", latent)
    monkeypatch.setitem(sys.modules, "flashinfer.gdn_prefill", delta)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", fla)
    monkeypatch.setitem(sys.modules, "fla.ops.kda", kda)
    for name in ("", ".kda"):
        functions = SimpleNamespace(**chunked, **vllm_steps)
        monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fla.ops" + name, functions)
    paged = SimpleNamespace(unified_attention=unified_attention)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.triton_unified_attention", paged)
    modes = SimpleNamespace(NONE="NONE", FP8_PER_TENSOR="FP8_PER_TENSOR")
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_interface", SimpleNamespace(KVQuantMode=modes))
    convolution_schedule = SimpleNamespace(compute_causal_conv1d_metadata=vllm_conv_schedule)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.utils", convolution_schedule)
    triton = "vllm.model_executor.layers.mamba.ops."
    ssd = SimpleNamespace(mamba_chunk_scan_combined_varlen=vllm_ssd)
    monkeypatch.setitem(sys.modules, triton + "ssd_combined", ssd)
    monkeypatch.setitem(sys.modules, triton + "causal_conv1d", SimpleNamespace(causal_conv1d_fn=vllm_conv))
    ten = SimpleNamespace(arguments=[SimpleNamespace(type="Tensor?", has_default_value=lambda: False)] * 10)
    more = SimpleNamespace(arguments=ten.arguments + ten.arguments[:3])
    mla = SimpleNamespace(
        dense_decode_fwd=of_schema(flash_mla, ten),
        sparse_decode_fwd=of_schema(sparse_flash_mla, more),
        sparse_prefill_fwd=of_schema(prefill_flash_mla, SimpleNamespace(arguments=ten.arguments[:8])),
    )
    schedule = lambda *_: (None, None)  # noqa: E731
    dense = SimpleNamespace(fwd_kvcache_mla_fp8=flash_mla, get_mla_decoding_metadata_dense_fp8=schedule)
    monkeypatch.setattr(torch.ops, "_flashmla_C", mla, raising=False)
    monkeypatch.setattr(torch.ops, "_flashmla_extension_C", dense, raising=False)
    with torch.library._scoped_library("_vllm_fa3_C", "FRAGMENT") as library:
        schema = ", ".join(f"{kind} {name}" for name, kind in FA3.items())
        library.define(f"fwd({schema}) -> Tensor[]")
        library.impl("fwd", fa3, "CPU")
        schema = ", ".join(f"{kind} {name}" for name, kind in FA3_SCHEDULE.items())
        library.define(f"get_scheduler_metadata({schema}) -> Tensor")
        library.impl("get_scheduler_metadata", fa3_schedule, "CPU")
        with torch.library._scoped_library("_C", "FRAGMENT") as compiled:
            compiled.define(f"selective_scan_fwd({SELECTIVE_SCAN}) -> ()")
            compiled.impl("selective_scan_fwd", vllm_selective_scan, "CPU")
            yield
    installed._import.cache_clear()


def agreeing(row: Any, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The contenders that compute the same as pyops. Others say that they are not available, not that they fail."""
    module: Any = models.module(row.kind)
    call = module.operands(row)
    out = "out" if module is attention_batches else scan_layers.OPS[row.kind][1]
    allowed = 0.02 if getattr(row, "cache", "bf16") == "bf16" else 0.1
    with cpu("reference"):
        found = set(drawn.agreeing(row, module.contenders(row), call, out, allowed))
    of_gpus = "cuDNN:", "FlashAttention:", "FlashAttention, ragged:"
    for line in capsys.readouterr().err.splitlines():
        assert any(name in line for name in of_gpus) or not ("Error" in line or "differs" in line), line
    return found - {"FlashAttention"}


def attention_row(kind: str, options: bool, mixed: bool = True) -> Any:
    heads = Heads(4, 2, 64, 4, 5.0, True) if options else Heads(4, 2, 64)
    lengths, new = ((5, 70, 1), (2, 70, 1)) if mixed else ((9, 9), (3, 3))
    if not kind.startswith("prefill"):
        new = (1,) * len(lengths)
    heads = Heads(4, 1, 576) if kind.startswith("mla") else heads
    return attention_batches.Row(kind, "", heads, 64 if kind.startswith("mla") else 16, lengths, new)


# {kind: rivals of batches without options}. FlashAttention of torch, and cuDNN, need a GPU.
ATTENTION = {
    "decode": {"SDPA", "FA3", "FlashInfer", "vLLM, Triton"},
    "decode_fp8": {"FA3", "FlashInfer", "vLLM, Triton"},
    "prefill": {"FA3", "FlashInfer", "vLLM, Triton"},
    "prefill_fp8": {"FA3", "FlashInfer", "vLLM, Triton"},
    "prefill_e4m3": {"FA3"},
    "mla": {"FlashMLA", "FlashInfer"},
    "mla_fp8": {"FlashMLA"},
    "mla_e4m3": {"FlashMLA"},
    "mla_656": {"FlashMLA"},
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_rivals_of_attention_compute_the_same(kind: str, libraries: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert agreeing(attention_row(kind, options=False), capsys) == {"pyops", *ATTENTION[kind]}
    if kind.startswith("mla"):
        return
    with_options = {"pyops", "FA3", *ATTENTION[kind]} - {"SDPA", "FlashInfer"}
    assert agreeing(attention_row(kind, options=True), capsys) == with_options
    same = agreeing(attention_row(kind, options=False, mixed=False), capsys)
    assert ("SDPA" in same) == (kind in ("decode", "prefill"))


@pytest.mark.parametrize("cache", ["bf16", "ds_mla"])
def test_sparse_flash_mla_computes_the_same(cache: str, libraries: None) -> None:
    kind, *_, sizes, _ = attention.parse(f"sparse:{cache}:3x128:4:200")
    call = attention._MAKERS[kind](cache, *sizes)
    contenders = attention.contenders(kind)
    theirs = contenders["FlashMLA"](call)()
    with cpu("reference"):
        contenders["pyops"](call)()
    torch.testing.assert_close(theirs.view_as(call["out"]), call["out"], rtol=0.02, atol=0.01)


def indexer_logits(q: Any, keys: Any, scales: Any, weights: Any) -> Any:
    """[rows, keys] of queries [rows, heads, size]."""
    products = torch.einsum("rhd,nd->rhn", q.float(), keys.float()).relu()
    return torch.einsum("rh,rhn->rn", weights, products) * scales


class DeepGemm:
    """DeepGEMM: logits of whole pages, where a row has none, too."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def get_num_sms(self) -> int:
        return 132

    def get_paged_mqa_logits_metadata(self, lengths: Any, page: int, num_sms: int) -> Any:
        assert lengths.ndim == 2
        return torch.tensor([page, num_sms])

    def fp8_paged_mqa_logits(
        self, q: Any, cache: Any, weights: Any, lengths: Any, tables: Any, schedule: Any, columns: int, clean: bool
    ) -> Any:
        assert schedule.tolist() == [64, 132]
        assert (cache.ndim, cache.shape[1:], clean) == (4, (64, 1, 132), False)
        found = torch.full((len(weights), columns), torch.nan)
        for s, length in enumerate(lengths.amax(1).tolist()):
            pages = cache[tables[s].long()].flatten(1)
            keys = pages[:, : 64 * 128].contiguous().view(torch.float8_e4m3fn).view(-1, 128)[:length]
            scales = pages[:, 64 * 128 :].contiguous().view(torch.float32).flatten()[:length]
            rows = slice(s * q.shape[1], (s + 1) * q.shape[1])
            found[rows, :length] = indexer_logits(q[s], keys, scales, weights[rows]) * self.factor
        return found

    def fp8_mqa_logits(self, q: Any, kv: Any, weights: Any, starts: Any, ends: Any, clean_logits: bool) -> Any:
        assert (starts == 0).all()
        assert not clean_logits
        return indexer_logits(q, *kv, weights) * self.factor


@pytest.mark.parametrize("row", ["decode:3x1-200:4:2", "decode:2x70:32", "prompt:5x100:4"])
def test_rivals_of_the_indexer_compute_the_same(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "TOP_K", 20)
    of_vllm = {name: getattr(pyops, name) for name in ("top_k_per_row_decode", "top_k_per_row_prefill")}

    def persistent(logits: Any, lengths: Any, indices: Any, workspace: Any, k: int, longest: int) -> None:
        assert (workspace.nbytes, longest) == (2**20, lengths.max())
        strides = logits.stride()
        pyops.top_k_per_row_decode(logits, lengths.shape[1], lengths, indices, len(indices), *strides, k)

    monkeypatch.setattr(indexer, "vllm_op", lambda _, name: (of_vllm | {"persistent_topk": persistent})[name])
    kind, call = indexer.operands(row, seed=1)
    rivals_of = {"logits": {"DeepGEMM"}, "top-k": {"vLLM"}, "both": {"DeepGEMM + vLLM"}}
    if kind == "decode":
        rivals_of["top-k"] |= {"vLLM, persistent"}
        rivals_of["both"] |= {"DeepGEMM + vLLM, persistent"}
    with cpu("reference"):
        indexer._ours(call)()
        for factor in (1.0, 1.02):
            monkeypatch.setattr(indexer, "deep_gemm", partial(DeepGemm, factor))
            for stage, names in rivals_of.items():
                # The order of logits that are all 2 % larger is the same.
                right = {"pyops", *(names if stage != "logits" or factor == 1.0 else ())}
                assert set(indexer.agreeing(row, kind, stage, call)) == right
        of_vllm |= dict.fromkeys(of_vllm, lambda *args: None)
        assert "vLLM" not in indexer.agreeing(row, kind, "top-k", call)


def test_products_that_differ_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepGEMM is given rows of b, and scales in its own layout; it is named if it computes something else."""
    (a, a_scales), (b, b_scales) = (products._in_blocks(torch.randn(n, 256), min(n, 128)) for n in (1, 128))
    out = torch.zeros(1, 128, dtype=torch.bfloat16)
    scales = torch.repeat_interleave

    def gemm(left: Any, right: Any, out: Any, factor: float, disable_ue8m0_cast: bool) -> None:
        wide = [scales(x[1], 128, 1) * x[0].float() for x in (left, (right[0], scales(right[1], 128, 0)))]
        out.copy_(wide[0] @ wide[1].T * factor)

    def library(factor: float) -> Any:
        aligned = lambda x: x.t().contiguous().t()  # noqa: E731
        return SimpleNamespace(fp8_gemm_nt=partial(gemm, factor=factor), get_mn_major_tma_aligned_tensor=aligned)

    operands = out, a, b.t(), a_scales, b_scales.t()
    ours = lambda *args: partial(pyops.cutlass_scaled_mm, *args, None)  # noqa: E731
    for factor, found in ((1.0, {"pyops", "DeepGEMM"}), (1.1, {"pyops"})):
        with cpu("reference"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(products, "deep_gemm", partial(library, factor))
            contenders = {"pyops": ours, "DeepGEMM": products._deep_gemm}
            assert set(products.agreeing("row", contenders, operands)) == found
    assert "row: DeepGEMM: differs from pyops" in capsys.readouterr().err


def test_deep_gemm_is_named_if_it_is_absent(capsys: pytest.CaptureFixture[str]) -> None:
    _, call = indexer.operands("prompt:2x9:4", seed=1)
    with cpu("reference"):
        indexer._ours(call)()
        assert set(indexer.agreeing("prompt", "prompt", "logits", call)) == {"pyops"}
    assert "DeepGEMM: import deep_gemm: ModuleNotFoundError: No module named 'deep_gemm'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("options", [False, True])
def test_attention_is_the_formula(kind: str, options: bool) -> None:
    row = attention_row(kind, options)
    call = attention_batches.operands(row)
    with cpu("reference"):
        attention_batches.contenders(row)["pyops"](call)()
    begin, of = 0, row.heads
    for seq, (length, new) in enumerate(zip(row.lengths, row.new, strict=True)):
        keys, values = (gathered(call[f"{name}_cache"], call["block_tables"][seq], length) for name in ("key", "value"))
        rows = slice(begin, begin + new)
        window = of.window - 1 if of.window else -1
        expected = attend(call["query"][rows], keys, values, call["scale"], window, of.soft_cap, call.get("sinks"))
        torch.testing.assert_close(call["out"][rows].double(), expected, rtol=0.02, atol=0.01)
        begin += new


# Scans: formulas token by token in float64.


def delta_rule(q: Any, k: Any, v: Any, decay: Any, beta: Any, scale: float, starts: Any, first: Any = None) -> Any:
    """[tokens, heads, size], with as many heads of q and k; they are normalised.

    Decays are one for each head, or one for each of its keys. `first` are states, zeros unless given.
    """
    q, k = (x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    out = torch.empty(v.shape, dtype=torch.float64)
    decay = decay[..., None, None] if decay.ndim == 2 else decay[..., None]
    for seq, (begin, end) in enumerate(pairwise(starts.tolist())):
        state = torch.zeros(v.shape[1], q.shape[2], v.shape[2]).double() if first is None else first[seq].double()
        for t in range(begin, end):
            state = state * decay[t].double()
            missing = v[t].double() - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t].double()[:, None] * missing)
            out[t] = scale * torch.einsum("hkv,hk->hv", state, q[t])
    return out.to(v.dtype)


def rule(
    *, q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, initial_state: Any, cu_seqlens: Any, **rest: Any
) -> Any:
    """A rule of FLA or, with states of values before keys and slots of states, of vLLM, where slot 0 is of none."""
    assert rest.get("cu_seqlens_cpu", cu_seqlens) is cu_seqlens  # one tensor for all calls of a batch
    assert rest["use_qk_l2norm_in_kernel"]
    repeats, slots = v.shape[2] // q.shape[2], rest.get("ssm_state_indices")
    state = initial_state.transpose(2, 3) if rest.get("v_first") else initial_state
    assert (slots is not None) == rest.get("with_slots", False)
    assert slots is None or (slots > 0).all()
    state = state if slots is None else state[slots.long()]
    q, k = (x[0].repeat_interleave(repeats, 1) for x in (q, k))
    return delta_rule(q, k, v[0], g[0].exp(), beta[0], scale, cu_seqlens, state)[None], None


def flashinfer_delta_rule(
    q: Any, k: Any, v: Any, decay: Any, beta: Any, scale: float, *, cu_seqlens: Any, max_seqlen: int, **_: Any
) -> Any:
    assert max_seqlen == int(cu_seqlens.diff().max())
    repeats = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(repeats, 1) for x in (q, k))
    return delta_rule(q, k, v, decay, beta, scale, cu_seqlens), None


def recurrence(x: Any, dt: Any, a: Any, b: Any, c: Any, starts: Any) -> Any:
    """``h = exp(dt a) h + dt x b``, ``h . c``, for x, dt [tokens, channels], a [channels, states], b, c likewise."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for begin, end in pairwise(starts.tolist()):
        h = torch.zeros(x.shape[1], b.shape[-1], dtype=torch.float64)
        for t in range(begin, end):
            h = (dt[t][:, None] * a).exp() * h + (dt[t] * x[t])[:, None] * b[t]
            out[t] = (h * c[t]).sum(-1)
    return out


def vllm_ssd(**call: Any) -> None:
    a = SimpleNamespace(**call)
    heads, size = a.x.shape[1:]
    x = a.x.double()
    dt = torch.nn.functional.softplus(a.dt.double() + a.dt_bias.double())
    b, c = (y.double().repeat_interleave(heads // y.shape[1], 1).repeat_interleave(size, 1) for y in (a.B, a.C))
    decays = a.A.double().repeat_interleave(size)[:, None]
    found = recurrence(x.flatten(1), dt.repeat_interleave(size, 1), decays, b, c, a.cu_seqlens).view_as(x)
    a.out.copy_(found + a.D.double()[:, None] * x)


def selective_scan(call: dict[str, Any]) -> Any:
    a = SimpleNamespace(**call)
    u, z = a.u.double().t(), a.z_.double().t()
    dt = torch.nn.functional.softplus(a.delta.double().t() + a.delta_bias_.double())
    b, c = (y[0].double().t()[:, None] for y in (a.B, a.C))
    found = recurrence(u, dt, a.A.double(), b, c, a.query_start_loc) + a.D_.double() * u
    return (found * torch.nn.functional.silu(z)).t()


SELECTIVE_SCAN = (
    "Tensor(a!) u, Tensor(b!) delta, Tensor A, Tensor B, Tensor C, Tensor? D_, Tensor(c!)? z_, Tensor? delta_bias_, "
    "bool delta_softplus, Tensor? query_start_loc, Tensor? cache_indices, Tensor? has_initial_state, "
    "Tensor(d!) ssm_states, int pad_slot_id, int block_size, Tensor? first, Tensor? last, Tensor? initial"
)


def vllm_selective_scan(*args: Any) -> None:
    names = [words.split()[-1] for words in SELECTIVE_SCAN.split(", ")]
    call = dict(zip(names, args, strict=True))
    assert (call["delta_softplus"], call["first"]) == (True, None)
    assert not call["has_initial_state"].any()
    call["z_"].copy_(selective_scan(call))


def convolution(x: Any, weight: Any, bias: Any, starts: Any) -> Any:
    """[tokens, channels], causal in each sequence, then silu."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for begin, end in pairwise(starts.tolist()):
        rows = torch.cat((torch.zeros(weight.shape[1] - 1, x.shape[1]), x[begin:end])).double()
        out[begin:end] = (
            sum(rows[i : i + end - begin] * weight[:, i].double() for i in range(weight.shape[1])) + bias.double()
        )
    return torch.nn.functional.silu(out)


def vllm_conv(
    x: Any, weight: Any, bias: Any, states: Any, *, query_start_loc: Any, activation: str, **rest: Any
) -> Any:
    assert activation == "silu"
    assert rest["null_block_id"] is None
    assert rest["metadata"].nums_dict == query_start_loc.tolist()
    assert states.shape[1:] == (x.shape[0], 3)
    return convolution(x.t(), weight, bias, query_start_loc).to(x.dtype).t()


def vllm_conv_schedule(starts: Any, *, device: Any) -> tuple[Any, ...]:
    return starts.tolist(), None, None


TINY = {
    **dict.fromkeys(("delta_rule", "kda", "delta_rule_step", "kda_step"), scan_layers.Layer(4, 2, 16, 16)),
    "ssd": scan_layers.Layer(4, 2, 8, 16),
    "selective_scan": scan_layers.Layer(12, 1, 1, 16),
    "conv": scan_layers.Layer(4, 2, 8, 16),
}
SCANS = {
    "delta_rule": {"FLA", "vLLM", "FlashInfer"},
    **{kind: {"FLA", "vLLM"} for kind in ("kda", "delta_rule_step", "kda_step")},
    **{kind: {"vLLM"} for kind in ("ssd", "selective_scan")},
    "conv": {"vLLM", "torch"},
}


def scan_row(kind: str) -> Any:
    return scan_layers.Row(kind, "", TINY[kind], (1, 1, 1) if kind.endswith("_step") else (5, 17, 1))


@pytest.mark.parametrize("kind", SCANS)
def test_rivals_of_scans_compute_the_same(kind: str, libraries: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert agreeing(scan_row(kind), capsys) == {"pyops", *SCANS[kind]}


@pytest.mark.parametrize("kind", SCANS)
def test_scans_are_the_formula(kind: str) -> None:
    row = scan_row(kind)
    call = scan_layers.operands(row)
    given = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    with cpu("reference"):
        scan_layers.contenders(row)["pyops"](call)()
    if "o" in given:
        q, k = (given[name][0].repeat_interleave(2, 1) for name in ("q", "k"))
        rest = given["g"][0].exp(), given["beta"][0], given["scale"], given["cu_seqlens"]
        slots = given.get("ssm_state_indices")
        state = given["initial_state"] if slots is None else given["state"][slots.long()]
        expected = delta_rule(q, k, given["v"][0].double(), *rest, state)[None]
    elif kind == "ssd":
        vllm_ssd(**given | {"out": (expected := torch.empty(given["out"].shape, dtype=torch.float64))})
    elif kind == "selective_scan":
        expected = selective_scan(given)
    else:
        expected = convolution(given["x"], given["weight"], given["bias"], given["query_start_loc"])
    torch.testing.assert_close(call[scan_layers.OPS[kind][1]].double(), expected, rtol=0.02, atol=0.02)


def test_a_rival_that_differs_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    row = scan_row("conv")
    call = scan_layers.operands(row)
    wrong = {
        "zeros": lambda call: lambda: torch.zeros_like(call["out"]),
        "nothing": lambda call: lambda: call["out"].fill_(torch.nan),
    }
    with cpu("reference"):
        found = drawn.agreeing(row, {"pyops": scan_layers.contenders(row)["pyops"], **wrong}, call, "out", 0.02)
    assert set(found) == {"pyops"}
    assert "zeros: differs from pyops by 1 " in capsys.readouterr().err


@pytest.mark.parametrize("older", [False, True])
def test_flashinfer_is_told_the_largest_top_k(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its newer versions then sort the tokens that top-k keeps; older ones have no such argument."""
    told = []

    def draw(logits: Any, top_k: Any, top_p: Any, *, seed: int, offset: int) -> Any:
        return logits.argmax(1).int()

    def draw_newer(*args: Any, top_k_max: int | None = None, **named: Any) -> Any:
        told.append(top_k_max)
        return draw(*args, **named)

    installed._import.cache_clear()
    for name in ("norm", "activation"):
        monkeypatch.setitem(sys.modules, f"flashinfer.{name}", SimpleNamespace())
    sampling = SimpleNamespace(top_k_top_p_sampling_from_logits=draw if older else draw_newer)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", sampling)
    op = pyops.registry["top_k_top_p_sampling_from_logits"]
    check = Check(Case(op, {"num_tokens": 5, "vocab_size": 1000, "dtype": "float32"}), "cpu")
    try:
        assert check(rivals.builders(op, ["flashinfer"])[0]["flashinfer"], any_order=True) == 0
    finally:
        installed._import.cache_clear()
    assert told == ([] if older else [50])


def test_rivals_may_draw_other_tokens() -> None:
    """Those that top-k keeps, which is 50 of them."""
    axes = {"num_tokens": 5, "vocab_size": 1000, "dtype": "float32"}
    check = Check(Case(pyops.registry["top_k_top_p_sampling_from_logits"], axes), "cpu")

    def rank(place: int) -> Any:
        return lambda samples, logits, *_: lambda: logits.sort(descending=True).indices[:, place].int()

    assert check(rank(49), any_order=True) == 0
    with pytest.raises(Unavailable, match="top-k"):
        check(rank(50), any_order=True)
    with pytest.raises(Unavailable, match="beyond the vocabulary"):
        check(lambda samples, *_: lambda: torch.full_like(samples, 1000), any_order=True)
    with pytest.raises(Unavailable, match="disagrees"):
        check(rank(49))
