"""Decode attention against torch's attention in float64: layouts, lengths, block tables, options."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyops
from pyops._core import config
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops.example import ArgMaker
from pyops.ops.attention import combine, decode_choose
from pyops.testing import SCHEDULES, assert_matches_reference, same_bits
from pyops.testing.calls import assert_results, clones, expected, named, replaced, run, written
from tests.support.calls import DEVICES, Host, example, refusal

pytestmark = pytest.mark.rotates

V1, V2 = pyops.registry["paged_attention_v1"], pyops.registry["paged_attention_v2"]
FP8, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def paged_call(
    lengths: list[int],
    heads: tuple[int, int] = (4, 2),
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
    on: str = "cpu",
    value_size: int = 0,
) -> dict[str, Any]:
    """The arguments of a call, and the keys and values of each sequence as plain tensors."""
    generator = torch.Generator().manual_seed(sum(lengths) + head_size)
    num_heads, num_kv_heads = heads
    max_blocks = max(1, *(-(-length // block_size) for length in lengths))
    num_blocks = len(lengths) * max_blocks + 3
    table = torch.randperm(num_blocks, generator=generator)[: len(lengths) * max_blocks].view(len(lengths), max_blocks)
    query = torch.randn(len(lengths), num_heads, head_size, generator=generator).to(dtype)
    slots = [
        torch.randn(num_blocks, block_size, num_kv_heads, size, generator=generator).to(dtype)
        for size in (head_size, value_size or head_size)
    ]
    plain = []
    for s, length in enumerate(lengths):
        plain.append([cache[table[s]].flatten(0, 1)[:length] for cache in slots])
    used = torch.zeros(num_blocks * block_size, dtype=torch.bool)
    for s, length in enumerate(lengths):
        for i in range(length):
            used[int(table[s, i // block_size]) * block_size + i % block_size] = True
    for cache in slots:  # slots without a token hold NaN
        cache.view(len(used), num_kv_heads, -1)[~used] = torch.nan
    key_cache, value_cache = slots
    if packed:
        x = 16 // key_cache.element_size()
        key_cache = key_cache.view(num_blocks, block_size, num_kv_heads, head_size // x, x).permute(0, 2, 3, 1, 4)
        key_cache, value_cache = key_cache.contiguous(), value_cache.permute(0, 2, 3, 1).contiguous()
    call = {
        "out": torch.full_like(query, torch.nan),
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "num_kv_heads": num_kv_heads,
        "scale": head_size**-0.5,
        "block_tables": table.int(),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "block_size": block_size,
        "max_seq_len": max(lengths),
        "alibi_slopes": None,
        "kv_cache_dtype": "auto",
        "k_scale": 1.0,
        "v_scale": 1.0,
    }
    call = {name: value.to(on) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    return call | {"plain": plain}


def truth(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Any = None) -> torch.Tensor:
    """torch's attention of [num_heads, head_size] over [tokens, num_kv_heads, head_size], in float64."""
    q, k, v = (x.double().cpu() for x in (query[:, None], keys.transpose(0, 1), values.transpose(0, 1)))
    result = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], mask, enable_gqa=True)
    return result[0, :, 0]


def _assert_is_attention(call: dict[str, Any], atol: float | None = None, mask: Any = None) -> torch.Tensor:
    """Make the call, and compare its result with torch's attention over the plain keys and values."""
    plain = call.pop("plain")
    V1.wrapper(**call)
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[call["query"].dtype]
    for s, (keys, values) in enumerate(plain):
        right = truth(call["query"][s], keys, values, mask) if len(keys) else torch.zeros_like(call["out"][s]).double()
        torch.testing.assert_close(
            call["out"][s].double().cpu(), right.cpu(), rtol=tolerance, atol=atol or tolerance / 2
        )
    out: torch.Tensor = call["out"]
    return out


@pytest.fixture(params=DEVICES)
def on(request: pytest.FixtureRequest) -> Any:
    """Each device by name; the host runs the kernels."""
    with config.cpu("kernels" if isinstance(request.param, Host) else "reference"):
        yield str(request.param)


LENGTHS = [0, 1, 15, 16, 17, 100]


@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_decode_matches_torch_attention(on: str, dtype: torch.dtype, packed: bool) -> None:
    """Lengths of 0, of 1, and ending inside a block; the unused slots of the block hold NaN."""
    _assert_is_attention(paged_call(LENGTHS, dtype=dtype, packed=packed, on=on))


@pytest.mark.parametrize("heads", [(40, 2), (9, 1), (3, 3), (16, 2), (16, 1), (32, 1), (1, 1)])
def test_any_number_of_heads(on: str, heads: tuple[int, int]) -> None:
    """One query head per key-value head, a full MMA tile of them, and more than one CTA takes."""
    for dtype in (torch.bfloat16, torch.float32):
        _assert_is_attention(paged_call([1, 37], heads, dtype=dtype, on=on))


@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
@pytest.mark.parametrize("head_size", [8, 32, 80, 96, 112, 120, 192, 256, 264, 512, 576])
def test_any_head_size(on: str, head_size: int, packed: bool) -> None:
    _assert_is_attention(paged_call([33, 5], head_size=head_size, dtype=torch.bfloat16, packed=packed, on=on))


@pytest.mark.parametrize("head_size", [128, 256])
def test_large_heads_of_float32(on: str, head_size: int) -> None:
    _assert_is_attention(paged_call([33, 5], head_size=head_size, on=on))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
@pytest.mark.parametrize("num_seqs", [4, 5, 7, 10])
def test_many_sequences(on: str, num_seqs: int, packed: bool) -> None:
    """Blocks of four, three, two and one warps, for waves that are full and waves that are not."""
    lengths = [(0, 1, 90, 31, 200)[s % 5] for s in range(num_seqs)]
    _assert_is_attention(paged_call(lengths, (4, 1), 128, dtype=torch.bfloat16, packed=packed, on=on))


@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
@pytest.mark.parametrize("block_size", [1, 3, 4, 5, 8, 12, 32, 256])
def test_any_block_size(on: str, block_size: int, packed: bool) -> None:
    _assert_is_attention(paged_call([47, 6], block_size=block_size, dtype=torch.float16, packed=packed, on=on))


def test_documented_example(on: str) -> None:
    """float32 tensors, the flash layout, int64 tables, the scale as a scalar in host memory, expanded lengths."""
    call = paged_call([20, 20], (8, 8), on=on)
    call["block_tables"] = call["block_tables"].long()
    call["seq_lens"] = torch.tensor(20, device=on).expand(2)
    call["k_scale"] = call["v_scale"] = torch.tensor(1.0)
    _assert_is_attention(call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sliced_tensors(on: str, dtype: torch.dtype) -> None:
    """Queries inside a fused QKV, caches inside one buffer, every second column of a table."""
    call = paged_call([30, 7], dtype=dtype, on=on)
    fused = torch.full((2, 8, 64), torch.nan, dtype=dtype, device=on)
    fused[:, :4] = call["query"]
    joint = torch.stack((call["key_cache"], call["value_cache"]), 1)
    table = torch.stack((call["block_tables"], torch.full_like(call["block_tables"], 10**9)), -1)
    call |= {"query": fused[:, :4], "key_cache": joint[:, 0], "value_cache": joint[:, 1], "block_tables": table[..., 0]}
    _assert_is_attention(call)


def test_misaligned_tensors(on: str) -> None:
    """Addresses that are no multiple of 16 bytes."""
    call = paged_call([30, 7], dtype=torch.bfloat16, on=on)
    for name in ("query", "key_cache", "value_cache"):
        value = call[name]
        call[name] = torch.empty(value.numel() + 1, dtype=value.dtype, device=on)[1:].view(value.shape).copy_(value)
    _assert_is_attention(call)


@pytest.mark.usefixtures("no_clusters")
@pytest.mark.parametrize("max_groups", [0, 8, 1])
def test_split_kv_of_long_and_short_sequences(max_groups: int, on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long sequence with many splits and short ones: splits of unequal length, and splits without a token.

    The splits are combined by the last block, by several groups of threads of decode_combine, or by one group. All but
    several groups take the splits in batches, and a later batch has a larger row max.
    """
    if max_groups:
        monkeypatch.setattr(decode_choose, "MAX_SPLITS_OF_LAST_BLOCK", 0)
        monkeypatch.setattr(combine, "_MAX_GROUPS", max_groups)
    V1.forget()
    _assert_is_attention(paged_call([2000, 3, 0, 64], (2, 1), dtype=torch.bfloat16, on=on))
    _assert_is_attention(paged_call([2000, 3, 0, 64], (2, 1), head_size=16, on=on))
    V1.forget()


@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
@pytest.mark.parametrize("lengths", [[1024], [700, 130], [0, 1, 513]], ids=str)
def test_few_sequences_use_clusters(on: str, lengths: list[int], packed: bool) -> None:
    """A cluster shares a sequence, where the device has clusters: blocks with many steps, one and none, and windows."""
    call = paged_call(lengths, (8, 2), head_size=128, dtype=torch.bfloat16, packed=packed, on=on)
    whole = _assert_is_attention(call.copy()).clone()
    lse = torch.empty(8, len(lengths), device=on)
    assert torch.equal(_assert_is_attention(call | {"lse": lse}), whole)
    assert lse.isfinite().all(0).tolist() == [length > 0 for length in lengths]
    early = call | {"constant_past": True}  # steps without the last token are loaded first
    assert torch.equal(_assert_is_attention(early.copy()), whole)
    call["plain"] = early["plain"] = [[x[max(0, len(x) - 200) :] for x in pair] for pair in call["plain"]]
    assert torch.equal(
        _assert_is_attention(call | {"sliding_window": 200}).clone(),
        _assert_is_attention(early | {"sliding_window": 200}),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sliding_window(on: str, dtype: torch.dtype) -> None:
    for window in (1, 17, 100, 300):
        call = paged_call([250, 18, 1], dtype=dtype, on=on) | {"sliding_window": window}
        call["plain"] = [[x[max(0, len(x) - window) :] for x in pair] for pair in call["plain"]]
        _assert_is_attention(call)


def test_alibi(on: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        call = paged_call([70], dtype=dtype, on=on)
        slopes = torch.tensor([0.5, 0.25, 0.0, -0.125])
        call["alibi_slopes"] = slopes.to(on)
        _assert_is_attention(call, mask=(slopes.double()[:, None] * (torch.arange(70) - 69))[None, :, None])


def _logits(call: dict[str, Any], s: int) -> torch.Tensor:
    keys, _ = call["plain"][s]
    query = call["query"][s].double().cpu()
    return torch.stack([keys.double()[:, h // 2] @ query[h] for h in range(4)]) * call["scale"]


def test_log_sum_exp_and_sinks(on: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        call = paged_call([600, 3], dtype=dtype, on=on)
        right = torch.stack([_logits(call, s).logsumexp(-1) for s in range(2)], 1)
        lse = torch.empty(4, 2, device=on)
        plain = _assert_is_attention(call | {"lse": lse}).clone()
        torch.testing.assert_close(lse.double().cpu(), right, rtol=1e-5, atol=1e-5)
        sinks = torch.tensor([0.0, 1.0, -50.0, 7.0])
        call.pop("plain")
        V1.wrapper(**call, sinks=sinks.to(on), lse=lse)
        with_sinks = torch.logaddexp(right, sinks.double()[:, None])
        torch.testing.assert_close(lse.double().cpu(), with_sinks, rtol=1e-5, atol=1e-5)
        shrunk = plain.double().cpu() * torch.exp(right - with_sinks).T[..., None]
        torch.testing.assert_close(
            call["out"].double().cpu(), shrunk, rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=1e-4
        )


def test_soft_cap(on: str) -> None:
    call = paged_call([40], on=on) | {"logits_soft_cap": 0.5, "scale": 1.0}
    weights = torch.softmax(0.5 * torch.tanh(_logits(call, 0) / 0.5), -1)
    values = call.pop("plain")[0][1].double()
    V1.wrapper(**call)
    right = torch.stack([weights[h] @ values[:, h // 2] for h in range(4)])
    torch.testing.assert_close(call["out"][0].double().cpu(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "code"), [("fp8", FP8), ("fp8_e4m3", FP8), ("fp8_e5m2", torch.float8_e5m2), ("fp8", FNUZ)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fp8_cache(on: str, dtype: torch.dtype, kind: str, code: torch.dtype) -> None:
    """fp8 values times the scales, for small and large queries."""
    nan = torch.tensor(0x80 if code == FNUZ else 0x7F, dtype=torch.uint8, device=on)
    for size, head_size in ((1.0, 64), (1e-3, 128), (1e4, 128)):
        call = paged_call([50, 9], head_size=head_size, dtype=dtype, on=on)
        call["query"] = (call["query"].float() * size).to(dtype)
        held = {name: call[name].float().nan_to_num(nan=0.0).to(code) for name in ("key_cache", "value_cache")}
        held = {name: torch.where(call[name].isnan(), nan, x.view(torch.uint8)) for name, x in held.items()}
        if code == FNUZ:
            held = {name: x.view(code) for name, x in held.items()}
        scales = {"k_scale": 0.25, "v_scale": 3.0}
        call["scale"] /= size
        plain = []
        for keys, values in call["plain"]:
            plain.append([(keys.float().to(code).double() * 0.25), values.float().to(code).double() * 3.0])
        call |= held | scales | {"kv_cache_dtype": kind, "plain": plain}
        query = call["query"].double() * call["scale"] * head_size**0.5
        for s, (keys, values) in enumerate(call.pop("plain")):
            if s == 0:
                V1.wrapper(**call)
            right = truth(query[s], keys, values)
            tolerance = 3e-5 if dtype == torch.float32 else 4e-3 if dtype == torch.float16 else 1.6e-2
            torch.testing.assert_close(call["out"][s].double().cpu(), right, rtol=tolerance, atol=tolerance)


def in_codes_of_heads(call: dict[str, Any], keys: list[float], values: list[float]) -> dict[str, Any]:
    """The call with an fp8 cache in which each key-value head has its own key scale and value scale."""
    on, scales = call["query"].device, [torch.tensor(one) for one in (keys, values)]
    found = dict(zip(("k_scale", "v_scale"), (one.to(on) for one in scales), strict=True))
    found |= {name: call[name].to(FP8).view(torch.uint8) for name in ("key_cache", "value_cache")}  # NaN stays NaN
    plain = [[x.to(FP8).double() * one[:, None] for x, one in zip(p, scales, strict=True)] for p in call["plain"]]
    return call | found | {"kv_cache_dtype": "fp8", "plain": plain}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_scales_per_head(on: str, dtype: torch.dtype) -> None:
    call = in_codes_of_heads(paged_call([70, 9], (6, 3), dtype=dtype, on=on), [0.25, 1.0, 0.5], [3.0, -0.5, 1.0])
    _assert_is_attention(call)


# (head size, block size, packed): a warp's step of tokens is longer than a block, equal and shorter.
_BLOCKS_OF_CODES = [
    *((64, block_size, False) for block_size in (1, 12, 32, 64)),
    *((128, block_size, False) for block_size in (4, 32)),
    *((64, block_size, True) for block_size in (24, 64)),
    (128, 32, True),
    (32, 8, True),
]


@pytest.mark.usefixtures("no_clusters")
@pytest.mark.parametrize(("head_size", "block_size", "packed"), _BLOCKS_OF_CODES)
def test_fp8_cache_with_any_block_size(on: str, head_size: int, block_size: int, packed: bool) -> None:
    """Splits and windows begin at any multiple of 16 tokens, block boundaries or not; nothing outside the cache is
    read.
    """
    lengths = [9000] if (head_size, block_size) == (128, 32) else [70, 100]
    call = paged_call(lengths, head_size=head_size, block_size=block_size, dtype=torch.float16, on=on)
    for name in ("key_cache", "value_cache"):
        codes = call[name].to(FP8).view(torch.uint8)  # NaN stays NaN
        if packed and name == "key_cache":
            codes = codes.unflatten(-1, (head_size // 16, 16)).permute(0, 2, 3, 1, 4)
        elif packed:
            codes = codes.permute(0, 2, 3, 1)
        call[name] = codes.contiguous()
    pairs = [[x.to(FP8).double() for x in pair] for pair in call.pop("plain")]
    for window in (0, 20, 70):
        V1.wrapper(**call | {"kv_cache_dtype": "fp8", "sliding_window": window})
        for s, pair in enumerate(pairs):
            keys, values = (x[max(0, len(x) - window) :] if window else x for x in pair)
            right = truth(call["query"][s], keys, values)
            torch.testing.assert_close(call["out"][s].double().cpu(), right, rtol=4e-3, atol=4e-3)


@settings(max_examples=min(50, max(1, settings().max_examples // 5)))
@given(data=st.data())
def test_any_combination_of_options(data: st.DataObject) -> None:
    """The options of the other tests together: kernels agree with the reference and stay inside their memory."""

    def one(name: str, *values: Any) -> Any:
        return data.draw(st.sampled_from(values), label=name)

    packed, kind = one("packed", False, True), one("kv_cache_dtype", "fp8", "auto")
    num_kv_heads, longest = one("num_kv_heads", 1, 2), one("max_seq_len", 100, 300, 2000)
    head_size = one("head_size", 16, 32, 64, 80, 96, 128, 192, 256)
    call = example(
        V1,
        num_tokens=one("num_seqs", 1, 3) if longest < 2000 else 1,
        min_seq_len=longest // one("shortest", 1, 2, 10),
        max_seq_len=longest,
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * one("group", 1, 3, 4, 8, 9),
        head_size=head_size,
        block_size=one("block_size", 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128),
        dtype=one("dtype", "bfloat16", "float16"),
        kv_cache_dtype=kind,
        packed=packed,
        options=one("options", False, True),
    )
    call = replaced(V1, call, sliding_window=one("sliding_window", 0, 1, 20, 70, 150))
    with pytest.MonkeyPatch.context() as patch:
        on_host = replace(device.host(), cluster=one("cluster", 1, 8))
        patch.setattr(device, "_HOST", {32: on_host, 64: device.host(64)})
        V1.forget()
        V1.applied(partial(assert_matches_reference, V1), call)(schedules=SCHEDULES[:1])
    V1.forget()


@pytest.mark.parametrize("step", [0, 1, -1, 3])
def test_block_sparse(on: str, step: int) -> None:
    """Each head attends to one of `vert_stride` distant pages, at an offset of its own."""
    call = paged_call([130, 20], block_size=8, on=on)
    call |= {"tp_rank": 1, "blocksparse_local_blocks": 2, "blocksparse_vert_stride": 3, "blocksparse_block_size": 16}
    call["blocksparse_head_sliding_step"] = step
    plain = call.pop("plain")
    V1.wrapper(**call)
    for s, (keys, values) in enumerate(plain):
        for h in range(4):
            offset = (4 + h) * step + 1 if step >= 0 else (2 + h // 2) * -step + 1
            blocks = torch.arange(len(keys)) // 8 * 8 // 16
            seen = ((blocks + offset) % 3 == 0) | (blocks > (len(keys) - 1) // 16 - 2)
            right = truth(call["query"][s, h : h + 1], keys[seen, h // 2 :][:, :1], values[seen, h // 2 :][:, :1])
            torch.testing.assert_close(call["out"][s, h : h + 1].double().cpu(), right, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
def test_hostile_block_tables(dtype: torch.dtype, packed: bool) -> None:
    """Block numbers and lengths out of range contribute nothing, under every schedule."""
    call = paged_call([20, 40, 33], dtype=dtype, packed=packed)
    call.pop("plain")
    call["block_tables"] = torch.tensor([[0, -1, 2], [10**9, 1, -(2**31)], [11, 12, 2**31 - 1]], dtype=torch.int32)
    call["seq_lens"] = torch.tensor([20, 2**31 - 1, -5], dtype=torch.int32)
    for name in ("key_cache", "value_cache"):
        call[name] = call[name].nan_to_num(nan=0.5)
    assert_matches_reference(V1, **call, warp_sizes=(32, 64))
    call["block_tables"] = call["block_tables"].long() * 2**20
    assert_matches_reference(V1, **call)


@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
def test_block_strides_of_keys_and_values_differ(on: str, packed: bool) -> None:
    """Blocks of values have a larger stride than blocks of keys."""
    call = paged_call([1, 70, 33], dtype=torch.bfloat16, packed=packed, on=on)
    values = call["value_cache"]
    wide = torch.full((len(values), 2, *values.shape[1:]), torch.nan, dtype=values.dtype, device=on)
    wide[:, 0] = values
    _assert_is_attention(call | {"value_cache": wide[:, 0]})


@pytest.mark.parametrize("empty", [("key_cache", "value_cache"), ("block_tables",)], ids=["blocks", "tables"])
@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_cache(on: str, dtype: torch.dtype, packed: bool, empty: tuple[str, ...]) -> None:
    """A cache without a block and tables without a column hold no token, so results are zeros."""
    call = paged_call([20, 40], dtype=dtype, packed=packed, on=on)
    call.pop("plain")
    call |= {name: call[name][:, :0] if name == "block_tables" else call[name][:0] for name in empty}
    lse = torch.zeros(4, 2, device=on)
    V1.wrapper(**call, lse=lse)
    assert (call["out"] == 0).all()
    assert (lse == -torch.inf).all()
    V1.wrapper(**call, lse=lse, sinks=torch.tensor([-torch.inf, 0.0, 1.0, -2.0], device=on))
    assert (call["out"] == 0).all()
    torch.testing.assert_close(lse[:, 1].cpu(), torch.tensor([-torch.inf, 0.0, 1.0, -2.0]))


def test_indices_out_of_range_are_named(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_CHECK", "1")
    V1.forget()
    call = paged_call([20, 40], on=on)
    call.pop("plain")
    V1.wrapper(**call)
    call["block_tables"][1, 1] = 77
    call["block_tables"][0, 2] = 77  # after the sequence
    with pytest.raises(
        pyops.OpError, match=r"block_tables: 1 of 6 indices are out of range, the first at \(1, 1\): 77"
    ):
        V1.wrapper(**call)
    # Table entries before the window are not read; a length beyond the table is clamped.
    call["block_tables"][1, :2] = -1
    V1.wrapper(**call | {"sliding_window": 5})
    call["seq_lens"][0] = 49
    with pytest.raises(pyops.OpError, match=r"block_tables: 1 of 6 .* \(0, 2\): 77; seq_lens: 1 of 2 .* \(0,\): 49"):
        V1.wrapper(**call | {"sliding_window": 5})
    V1.forget()


def test_v2_leaves_partitions_after_the_end_alone(on: str) -> None:
    call = paged_call([513, 512, 1, 0], (2, 1), head_size=32, dtype=torch.bfloat16, on=on)
    plain = call.pop("plain")
    partials = {
        "exp_sums": torch.full((4, 2, 3), 7.0, device=on),
        "max_logits": torch.full((4, 2, 3), 7.0, device=on),
        "tmp_out": torch.full((4, 2, 3, 32), 7.0, dtype=torch.bfloat16, device=on),
    }
    V2.wrapper(**call, **partials)
    for count, s in ((2, 0), (1, 1), (1, 2), (0, 3)):
        for value in partials.values():
            assert (value[s, :, count:] == 7.0).all()
        for p in range(count):
            keys, values = (x[512 * p : 512 * (p + 1)] for x in plain[s])
            right = truth(call["query"][s], keys, values)
            torch.testing.assert_close(partials["tmp_out"][s, :, p].double().cpu(), right, rtol=1.6e-2, atol=1e-2)
            logits = torch.stack([keys.double()[:, 0] @ call["query"][s, h].double().cpu() for h in range(2)])
            max_logit = (logits * call["scale"]).amax(-1)
            torch.testing.assert_close(partials["max_logits"][s, :, p].double().cpu(), max_logit, rtol=1e-4, atol=1e-5)
        if count:
            right = truth(call["query"][s], *plain[s])
            torch.testing.assert_close(call["out"][s].double().cpu(), right, rtol=1.6e-2, atol=1e-2)
        else:
            assert (call["out"][s] == 0).all()


@pytest.mark.parametrize("window", [0, 300, 512, 700])
@pytest.mark.parametrize("name", ["paged_attention_v2", "paged_attention_rocm"])
def test_v2_partitions_with_options(on: str, name: str, window: int) -> None:
    """Window, soft cap, sinks and log-sum-exp; partitions before the window are left alone."""
    op, lengths, size = pyops.registry[name], [1100, 512, 3, 0], 512 if name.endswith("v2") else 256
    dtypes_of = [torch.bfloat16] if name.endswith("rocm") else [torch.bfloat16, torch.float32]
    for dtype in dtypes_of:
        call = paged_call(lengths, (2, 1), head_size=32, dtype=dtype, on=on)
        plain, count = call.pop("plain"), -(-1100 // size)
        rocm = {"query_start_loc": None} if name.endswith("rocm") else {}
        sinks, lse = torch.tensor([0.5, -3.0]), torch.empty(2, 4, device=on)
        sums = torch.full((4, 2, count), 7.0, device=on)
        op.wrapper(
            **call | rocm,
            exp_sums=sums,
            max_logits=torch.empty_like(sums),
            tmp_out=torch.empty(4, 2, count, 32, dtype=dtype, device=on),
            sliding_window=window,
            logits_soft_cap=1.5,
            sinks=sinks.to(on),
            lse=lse,
        )
        for s, pair in enumerate(plain):
            first = max(0, lengths[s] - window) if window else 0
            touched = [first < (p + 1) * size and p * size < lengths[s] for p in range(count)]
            assert (sums[s] != 7.0).all(0).tolist() == touched
            keys, values = (x[first:, 0].double() for x in pair)
            logits = call["query"][s].double().cpu() @ keys.T * call["scale"]
            logits = torch.cat([1.5 * torch.tanh(logits / 1.5), sinks.double()[:, None]], 1)
            right = torch.softmax(logits, -1)[:, :-1] @ values
            tolerance = 1e-5 if dtype == torch.float32 else 1.6e-2
            torch.testing.assert_close(call["out"][s].double().cpu(), right, rtol=tolerance, atol=tolerance / 2)
            torch.testing.assert_close(lse[:, s].double().cpu(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_partitions_match_the_reference(kind: str, packed: bool) -> None:
    """Each partition's own results, and nothing else is written."""
    for longest, options in ((1100, False), (200, True)):
        call = example(V2, num_tokens=2, max_seq_len=longest, kv_cache_dtype=kind, packed=packed, options=options)
        V2.applied(partial(assert_matches_reference, V2), call)(schedules=SCHEDULES[:1])


def test_rocm_serves_single_tokens_of_a_mixed_batch(on: str) -> None:
    """Only sequences of one query token are served, at their row; rows after the last are left alone."""
    op = pyops.registry["paged_attention_rocm"]
    call = paged_call([20, 30, 300, 5], head_size=64, dtype=torch.float16, on=on)
    plain = call.pop("plain")
    starts = torch.tensor([3, 4, 6, 7, 8], dtype=torch.int32, device=on)
    query = torch.randn(7, 4, 64, dtype=torch.float16, device=on)
    rows = torch.full((8, 4, 64), 7.0, dtype=torch.float16, device=on)
    out = rows[:7]
    sums, max_logit = torch.empty(4, 4, 2, device=on), torch.empty(4, 4, 2, device=on)
    partials = {
        "exp_sums": sums,
        "max_logits": max_logit,
        "tmp_out": torch.empty(4, 4, 2, 64, dtype=torch.float16, device=on),
    }
    call |= partials | {"query": query, "out": out}
    apart = torch.stack([starts.long(), torch.full_like(starts, 2**40, dtype=torch.int64)], 1)[:, 0]
    lse = torch.full((4, 7), 7.0, device=on)
    for each in (starts, apart):
        rows.fill_(7.0)
        op.wrapper(**call | {"query_start_loc": each}, lse=lse)
        for row, s in ((3, 0), (6, 2)):  # sequence 1 has two tokens, sequence 3 a row that does not exist
            torch.testing.assert_close(out[row].double().cpu(), truth(query[row], *plain[s]), rtol=4e-3, atol=2e-3)
        assert (rows[[0, 1, 2, 4, 5, 7]] == 7.0).all()
        assert (lse != 7.0).all(0).tolist() == [row in (3, 6) for row in range(7)]
    rows.fill_(7.0)
    op.wrapper(**call | {"query_start_loc": None}, lse=lse)
    torch.testing.assert_close(out[3].double().cpu(), truth(query[3], *plain[3]), rtol=4e-3, atol=2e-3)
    assert (rows[4:] == 7.0).all()
    assert (lse != 7.0).all(0).tolist() == [row in (0, 1, 2, 3, 6) for row in range(7)]


def test_million_tokens(on: str) -> None:
    """One block of the cache repeated: with equal keys, the result is the mean of its values."""
    length = 1_000_000 if on == "cuda" else 100_001  # which takes the host three seconds
    key = torch.zeros(2, 256, 1, 8, dtype=torch.bfloat16, device=on)
    value = torch.randn(2, 256, 1, 8, device=on).to(torch.bfloat16)
    table = torch.ones(1, 4000, dtype=torch.int32, device=on)
    query, out = (
        torch.ones(1, 1, 8, dtype=torch.bfloat16, device=on),
        torch.empty(1, 1, 8, dtype=torch.bfloat16, device=on),
    )
    lengths = torch.tensor([length], device=on)
    V1.wrapper(out, query, key, value, 1, 1.0, table, lengths, 256, length, None, "auto", 1.0, 1.0)
    weights = torch.full((256,), length // 256, dtype=torch.double)
    weights[: length % 256] += 1
    right = (weights[:, None] * value[1, :, 0].double().cpu()).sum(0) / length
    torch.testing.assert_close(out[0, 0].double().cpu(), right, rtol=8e-3, atol=1e-4)


def test_tensor_core_kernel_is_chosen_where_possible() -> None:
    """The plan chooses the MMA kernel unless an argument rules it out."""

    def kernels(**axes: Any) -> list[str]:
        on = device.model(axes.pop("arch", "sm_90"))
        launches = V1.launches(*V1.example(ArgMaker(on), **axes))  # type: ignore[misc]
        return [launch.specialisation.kernel.file.split("/")[1] for launch in launches]

    assert kernels(num_tokens=4096) == ["attention_decode.cu"]
    assert kernels(num_tokens=1) == ["attention_decode.cu"]
    assert kernels(num_tokens=1, arch="sm_80") == ["attention_decode.cu"]
    assert kernels(num_tokens=1, max_seq_len=2**16, arch="sm_80") == ["attention_decode.cu", "decode_combine.cu"]
    assert kernels(num_tokens=1, max_seq_len=2**16) == ["attention_decode.cu", "decode_combine.cu"]
    assert kernels(num_tokens=4096, kv_cache_dtype="fp8", packed=True) == ["attention_decode.cu"]
    assert kernels(num_tokens=4096, dtype="float32") == ["attention_decode_simt.cu"]
    assert kernels(num_tokens=4096, arch="gfx942") == ["attention_decode.cu"]
    assert kernels(num_tokens=4096, arch="gfx1100", head_size=256) == ["attention_decode_simt.cu"]


CODES = torch.zeros(4, 16, 2, 64, dtype=torch.uint8)  # a cache for paged_call([5])
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("num_kv_heads", {"num_kv_heads": 4}, "num_kv_heads: expected 2"),
    ("block_size", {"block_size": 8}, "block_size: expected 16"),
    (
        "kv_cache_dtype",
        {"kv_cache_dtype": "int8"},
        "kv_cache_dtype: expected auto or fp8 or fp8_e4m3 or fp8_e5m2, got int8",
    ),
    ("sliding_window", {"sliding_window": -1}, "sliding_window: expected 0 or more, got -1"),
    ("logits_soft_cap", {"logits_soft_cap": -1.0}, "logits_soft_cap: expected 0 or more, finite, got -1.0"),
    (
        "sparse block",
        {"blocksparse_vert_stride": 2, "blocksparse_block_size": 0},
        "blocksparse_block_size: expected 1 or",
    ),
    (
        "scales of heads and of all",
        {"kv_cache_dtype": "fp8", "key_cache": CODES, "value_cache": CODES, "v_scale": torch.ones(2)},
        r"k_scale: expected shape \(num_kv_heads=2,\), got \(\)",
    ),
    ("fp8 cache of floats", {"kv_cache_dtype": "fp8"}, "key_cache: expected dtype uint8 or float8_e4m3fn, got float32"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_refused(change: dict[str, Any], message: str) -> None:
    call = paged_call([5]) | change
    call.pop("plain")
    with pytest.raises(pyops.OpError, match=f"^paged_attention_v1: {message}"):
        V1.wrapper(**call)


def test_keys_and_values_have_one_fp8_type() -> None:
    call = paged_call([5], dtype=torch.bfloat16) | {"kv_cache_dtype": "fp8"}
    call.pop("plain")
    key_cache, value_cache = (torch.zeros(call[name].shape).to(FNUZ) for name in ("key_cache", "value_cache"))
    call |= {"key_cache": key_cache, "value_cache": value_cache}
    V1.wrapper(**call)
    with pytest.raises(pyops.OpError, match="value_cache: expected float8_e4m3fnuz like key_cache, got uint8"):
        V1.wrapper(**call | {"value_cache": value_cache.view(torch.uint8)})
    with pytest.raises(pyops.OpError, match="key_cache: expected dtype uint8 or float8_e5m2, got float8_e4m3fnuz"):
        V1.wrapper(**call | {"kv_cache_dtype": "fp8_e5m2"})


def test_integer_fp8_conversion_gets_more_registers() -> None:
    assert V1.example is not None
    args = V1.example(ArgMaker(device.model()), num_tokens=200, kv_cache_dtype="fp8", packed=True)
    by_name = dict(zip([p.name for p in V1.parameters], args, strict=True))
    for kind, blocks in ((dtypes.float8_e4m3fn, 3), (dtypes.float8_e4m3fnuz, 2)):
        caches = {name: replace(by_name[name], dtype=kind) for name in ("key_cache", "value_cache")}
        launch = V1.launches(*replaced(V1, args, **caches))[0]
        assert launch.specialisation.constants["MIN_BLOCKS"] == blocks


def test_packed_fp8_needs_whole_words() -> None:
    """A head size of 120 has no packed fp8 cache."""
    call = paged_call([5], head_size=120, dtype=torch.bfloat16, packed=True)
    call.pop("plain")
    codes = {name: torch.zeros(call[name].shape, dtype=torch.uint8) for name in ("key_cache", "value_cache")}
    with pytest.raises(
        pyops.OpError, match=r"key_cache: a packed cache of float8_e4m3fn takes head sizes that are multiples"
    ):
        V1.wrapper(**call | codes | {"kv_cache_dtype": "fp8"})


def test_reference_and_example_agree_with_every_option(on: str) -> None:
    """The generic example runs the kernels with every option at once."""
    args = example(V1, on, num_tokens=3, options=True)
    assert_results(V1, expected(V1, args), run(V1, args))


@pytest.mark.usefixtures("no_clusters")
@pytest.mark.parametrize("lengths", [[700, 3, 130], [700, 690, 680]], ids=["uneven", "alike"])
def test_idle_blocks_touch_nothing(lengths: list[int]) -> None:
    """A balanced grid has more blocks than splits."""
    call = paged_call(lengths, (2, 1), dtype=torch.bfloat16)
    call.pop("plain")
    one = torch.ones(1)
    call |= {"k_scale": one, "v_scale": one}
    with config.cpu("kernels"):
        _, (launch,) = V1.check(*(call.get(p.name, p.default) for p in V1.parameters))
        assert launch.fixed["wave_splits"] > 0
        V1.wrapper(**call)


@pytest.mark.usefixtures("no_clusters")
@pytest.mark.parametrize(
    ("heads", "head_size", "lengths"),
    [
        ((2, 1), 64, [1, 286, 571, 857, 1143, 1429, 1714, 2000]),
        ((2, 1), 128, [1, 286, 571, 857, 1143, 1429, 1714, 2000]),
        ((2, 1), 128, [20] * 8 + [500, 520, 540, 560]),
        ((2, 1), 128, [700] * 7),
        ((12, 1), 128, [700, 3, 130]),
    ],
    ids=["64", "128", "late", "alike", "three heads of a warp"],
)
def test_splits_of_mixed_lengths_fit_the_grid(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], head_size: int, lengths: list[int]
) -> None:
    """Two waves are 16 splits. Splits in proportion to lengths, rounded up, would be 20 for heads of 64. Twelve
    sequences are more than a wave of six splits, and the last four have most of the 18 splits of three waves. Seven of
    one length are a wave and a sixth; the last one has six splits.
    """
    monkeypatch.setitem(device._HOST, 32, replace(device.host(), num_sms=2))
    V1.forget()
    with config.cpu("kernels"):
        _assert_is_attention(paged_call(lengths, heads, head_size, dtype=torch.bfloat16))
    V1.forget()


def test_rocm_refuses_a_table_without_rows() -> None:
    op = pyops.registry["paged_attention_rocm"]
    for table in (torch.tensor(0, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)):
        error = refusal(op, replaced(op, example(op), block_tables=table))
        assert error.argument == "block_tables"


@pytest.mark.parametrize(
    ("name", "table", "room"),
    [
        ("paged_attention_v1", "block_tables", None),
        ("paged_attention_v2", "block_tables", 512),
        ("paged_attention_rocm", "block_tables", 256),
        ("paged_attention_varlen", "block_tables", None),
        ("sm100_cutlass_mla_decode", "page_table", None),
    ],
)
def test_length_at_and_above_capacity(name: str, table: str, room: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token beyond the capacity is ignored, and PYOPS_CHECK reports it. The example of partitions has one such
    token."""
    op = pyops.registry[name]
    monkeypatch.setenv("PYOPS_CHECK", "1")
    op.forget()
    try:
        args = example(op, num_tokens=4)
        tensors = named(op, args)
        cache = tensors.get("key_cache", tensors.get("kv_c_and_k_pe_cache"))
        assert cache is not None
        block_size = dict(zip([p.name for p in op.parameters], args, strict=True)).get("block_size", cache.shape[1])
        tokens = tensors[table].shape[1] * block_size
        full = torch.full_like(tensors["seq_lens"], min(tokens, room or tokens))
        beyond = full.clone()
        beyond[-1] += 1
        results = []
        for seq_lens in (full, beyond):
            call = replaced(op, clones(args), seq_lens=seq_lens)
            if seq_lens is full:
                op(*call)
            else:
                what = rf"1 of {len(full)} indices are cut to the room for {full[0]} tokens, .*: {beyond[-1]}$"
                with pytest.raises(pyops.OpError, match=f"^{name}: seq_lens: {what}"):
                    op(*call)
            results.append(written(op, call))
        for result, cut in results[0].items():
            assert same_bits(results[1][result], cut), result
    finally:
        op.forget()
