"""Paged attention of many query tokens against torch's attention in float64, causal or not, and its own options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import pyops
from pyops import tuning
from pyops._core import config
from pyops._core.system import device
from pyops.ops.attention import decode_plan
from pyops.ops.attention.prefill_mma import PrefillMmaConfig
from pyops.testing import SCHEDULES, assert_matches_reference, scheduled
from tests.ops.attention.test_attention import in_codes_of_heads, paged_call
from tests.support.calls import DEVICES, Host
from tests.support.profiles import few

pytestmark = pytest.mark.rotates

VARLEN = pyops.registry["paged_attention_varlen"]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(params=DEVICES)
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each device by name; the host runs the prefill kernels for compute capability 8.0."""
    monkeypatch.setattr(decode_plan, "_columns_are_faster", lambda *_: False)  # test_few_tokens.py tests the others
    monkeypatch.setitem(device._HOST, 32, replace(device.host(), arch="sm_80", num_sms=108, cluster=1))
    with config.cpu("kernels" if isinstance(request.param, Host) else "reference"):
        yield str(request.param)


def _call(counts: list[int], lengths: list[int], heads: tuple[int, int] = (4, 2), **more: Any) -> dict[str, Any]:
    """`counts` query tokens at the end of sequences of these lengths."""
    call = paged_call(lengths, heads, **more)
    on, query = call["out"].device, call["query"]
    for name in ("max_seq_len", "alibi_slopes"):
        call.pop(name)
    generator = torch.Generator().manual_seed(len(counts))
    query = torch.randn(sum(counts), heads[0], query.shape[2], generator=generator).to(query.dtype).to(on)
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(on)
    out = query.new_full((*query.shape[:2], call["value_cache"].shape[2 if more.get("packed") else 3]), 7.0)
    return call | {"query": query, "out": out, "cu_seqlens_q": starts}


def reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: dict[str, Any], bias: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """([count, num_heads, head_size], [num_heads, count]) of one sequence in float64: result and log-sum-exp."""
    count, length = len(query), len(keys)
    at = length - count + torch.arange(count)[:, None]
    seen = torch.arange(length) <= at if call.get("causal", True) else torch.ones(count, length, dtype=torch.bool)
    if window := call.get("sliding_window", 0):
        seen &= torch.arange(length) > (at if call.get("causal", True) else length - 1) - window
    group = query.shape[1] // keys.shape[1]
    q, k, v = (x.double().cpu() for x in (query, keys, values))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("nhd,jhd->hnj", q, k) * call["scale"]
    if cap := call.get("logits_soft_cap", 0.0):
        logits = cap * torch.tanh(logits / cap)
    if bias is not None:
        logits = logits + bias[:, None, None] * (torch.arange(length) - at)
    logits = logits.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(logits, -1).nan_to_num(nan=0.0)
    return torch.einsum("hnj,jhd->nhd", weights, v), logits.logsumexp(-1)


def _assert_is_attention(call: dict[str, Any], bias: Any = None) -> None:
    plain = call.pop("plain")
    VARLEN.wrapper(**call)
    starts = call["cu_seqlens_q"].tolist()
    tolerance = TOLERANCE[call["query"].dtype]
    for s, (keys, values) in enumerate(plain):
        rows = slice(starts[s], starts[s + 1])
        right, log_sum = reference(call["query"][rows], keys, values, call, bias)
        torch.testing.assert_close(call["out"][rows].double().cpu(), right, rtol=tolerance, atol=tolerance)
        if call.get("lse") is not None:
            torch.testing.assert_close(call["lse"][:, rows].double().cpu(), log_sum, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_matches_torch_attention(on: str, dtype: torch.dtype, packed: bool, causal: bool) -> None:
    """Whole prompts, the ends of prompts, single tokens, and sequences without a token in this batch."""
    call = _call([70, 0, 1, 33, 5], [70, 9, 40, 90, 5], dtype=dtype, packed=packed, on=on)
    _assert_is_attention(call | {"causal": causal, "lse": torch.empty(4, 109, device=on)})


def test_single_tokens_go_to_decode_attention(on: str) -> None:
    """Many single-token sequences among sequences of more tokens and of none."""
    counts = [*[1] * 40, 0, 9, *[1] * 30, 2]
    call = _call(counts, [count and count + s * 7 % 40 for s, count in enumerate(counts)], dtype=torch.bfloat16, on=on)
    _assert_is_attention(call | {"sliding_window": 25, "lse": torch.empty(4, sum(counts), device=on)})


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (8, 1), (40, 2), (9, 1)])
def test_any_number_of_heads(on: str, heads: tuple[int, int]) -> None:
    _assert_is_attention(_call([20, 3], [31, 3], heads, dtype=torch.bfloat16, on=on))


@pytest.mark.parametrize(
    ("one", "is_fp8"),
    few([(PrefillMmaConfig(4, 2, 48, 2, stages=1), False), (PrefillMmaConfig(2, 2, 32, 2), True)], 1),
    ids=str,
)
def test_one_tile_in_shared_memory(on: str, one: PrefillMmaConfig, is_fp8: bool) -> None:
    """The next tile comes into the memory of the last: by asynchronous copies during the MMAs, or from registers."""
    call = _call([70, 1, 9], [170, 9, 48], head_size=80 if is_fp8 else 72, dtype=torch.bfloat16, on=on)
    call = in_codes_of_heads(call, [0.5, 0.25], [3.0, -0.5]) if is_fp8 else call
    call |= {"sliding_window": 90, "lse": torch.empty(4, 80, device=on)}
    for schedule in SCHEDULES if on == "cpu" else SCHEDULES[:1]:
        VARLEN.forget()
        with tuning.forced(VARLEN.name, one), scheduled(schedule):
            _assert_is_attention(dict(call))
        assert on != "cpu" or tuning.last[VARLEN.name] == one
    VARLEN.forget()


@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
@pytest.mark.parametrize("head_size", [8, 16, 80, 96, 128, 192, 256, 264, 512])
def test_any_head_size(on: str, head_size: int, packed: bool) -> None:
    _assert_is_attention(_call([18, 2], [90, 2], head_size=head_size, dtype=torch.float16, packed=packed, on=on))


@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
@pytest.mark.parametrize(("head_size", "value_size"), [(192, 128), (80, 16), (72, 41)])
def test_values_narrower_than_keys(on: str, head_size: int, value_size: int, packed: bool) -> None:
    """MLA has keys of 192 elements and values of 128."""
    call = _call(
        [18, 2], [90, 2], head_size=head_size, value_size=value_size, dtype=torch.float16, packed=packed, on=on
    )
    _assert_is_attention(call | {"lse": torch.empty(4, 20, device=on), "sliding_window": 40})


def test_refused_value_sizes() -> None:
    call = _call([3], [3], head_size=32)
    call.pop("plain")
    for name, size, message in (
        ("value_cache", 33, "value_cache: expected values of at most 32 elements like keys"),
        ("value_cache", 0, "value_cache: expected values of at most 32 elements like keys"),
        ("value_cache", 16, r"out: expected shape \(num_tokens=3, num_heads=4, value_size=16\)"),
        ("out", 16, r"out: expected shape \(num_tokens=3, num_heads=4, value_size=32\)"),
    ):
        with pytest.raises(pyops.OpError, match=message):
            VARLEN.wrapper(**call | {name: call[name].new_zeros(*call[name].shape[:-1], size)})
    decode = {name: x for name, x in call.items() if name != "cu_seqlens_q"}
    decode |= {"max_seq_len": 3, "alibi_slopes": None, "query": call["query"][:1], "out": call["out"][:1]}
    with pytest.raises(pyops.OpError, match="value_cache: expected values of 32 elements like keys"):
        pyops.paged_attention_v1(**decode | {"value_cache": call["value_cache"][..., :16]})


@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
@pytest.mark.parametrize("block_size", [1, 5, 8, 32, 256])
def test_any_block_size(on: str, block_size: int, packed: bool) -> None:
    _assert_is_attention(_call([25, 4], [70, 4], block_size=block_size, dtype=torch.bfloat16, packed=packed, on=on))


@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
@pytest.mark.parametrize("window", [1, 9, 64, 500])
def test_sliding_window(on: str, window: int, packed: bool) -> None:
    """Slots before every window may hold anything, because another sequence may own their block."""
    for dtype in (torch.float32, torch.bfloat16):
        call = _call([50, 1], [190, 130], dtype=dtype, packed=packed, on=on) | {"sliding_window": window}
        if window < 100:
            free = call["block_tables"][1, : (130 - window) // 16]
            call["key_cache"][free.long()] = torch.nan
            call["value_cache"][free.long()] = torch.nan
            call["plain"][1] = [x.nan_to_num(nan=0.0) for x in call["plain"][1]]
        _assert_is_attention(call)


def test_options(on: str) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.0, -0.125])
    for dtype in (torch.float32, torch.bfloat16):
        call = _call([30, 2], [45, 20], dtype=dtype, on=on) | {"logits_soft_cap": 1.5, "alibi_slopes": slopes.to(on)}
        _assert_is_attention(call | {"lse": torch.empty(4, 32, device=on)}, slopes.double())


def test_sinks(on: str) -> None:
    """A sink is one more logit in the softmax."""
    sinks = torch.tensor([0.0, 2.0, -40.0, 9.0])
    for dtype in (torch.float32, torch.float16):
        call = _call([20], [40], dtype=dtype, on=on)
        keys, values = call.pop("plain")[0]
        VARLEN.wrapper(**call, sinks=sinks.to(on))
        right, log_sum = reference(call["query"], keys, values, call)
        share = torch.exp(log_sum - torch.logaddexp(log_sum, sinks.double()[:, None])).T[..., None]
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(call["out"].double().cpu(), right * share, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2])
@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
def test_fp8_cache(on: str, code: torch.dtype, packed: bool) -> None:
    kind = "fp8_e5m2" if code == torch.float8_e5m2 else "fp8"
    for dtype in (torch.float32, torch.bfloat16):
        call = _call([20, 1], [50, 30], dtype=dtype, on=on)
        call["plain"] = [
            [x.to(code).double() * f for x, f in zip(pair, (0.5, 3.0), strict=True)] for pair in call["plain"]
        ]
        for name in ("key_cache", "value_cache"):
            codes = call[name].nan_to_num(nan=0.25).to(code).view(torch.uint8)
            if packed:
                blocks, slots, heads, size = codes.shape
                codes = codes.permute(0, 2, 3, 1)
                if name == "key_cache":
                    codes = codes.reshape(blocks, heads, size // 16, 16, slots).transpose(3, 4)
            call[name] = codes.contiguous().view(code if code == torch.float8_e4m3fnuz else torch.uint8)
        _assert_is_attention(call | {"kv_cache_dtype": kind, "k_scale": 0.5, "v_scale": 3.0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_scales_per_head(on: str, dtype: torch.dtype) -> None:
    call = in_codes_of_heads(_call([20, 1], [50, 30], (6, 3), dtype=dtype, on=on), [0.25, 1.0, 0.5], [3.0, -0.5, 1.0])
    _assert_is_attention(call | {"lse": torch.empty(6, 21, device=on)})


def test_single_tokens_equal_decode(on: str) -> None:
    call = _call([1, 1, 1], [40, 1, 130], dtype=torch.float32, on=on)
    call.pop("plain")
    decoded = torch.empty_like(call["out"])
    VARLEN.wrapper(**call)
    more = {"max_seq_len": 130, "alibi_slopes": None, "out": decoded}
    pyops.paged_attention_v1(**{name: x for name, x in call.items() if name != "cu_seqlens_q"} | more)
    torch.testing.assert_close(call["out"], decoded, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_queries_than_tokens(on: str, dtype: torch.dtype) -> None:
    """The first queries have no key: the result is 0, and its log-sum-exp -inf."""
    call = _call([9], [5], dtype=dtype, on=on) | {"lse": torch.empty(4, 9, device=on)}
    keys, values = call.pop("plain")[0]
    VARLEN.wrapper(**call)
    right, _ = reference(call["query"][4:], keys, values, call)
    torch.testing.assert_close(call["out"][4:].double().cpu(), right, rtol=2e-2, atol=1e-2)
    assert (call["out"][:4] == 0).all()
    assert (call["lse"][:, :4] == -torch.inf).all()


def hostile_call(**more: Any) -> dict[str, Any]:
    """A call with block tables that have numbers of no block of the cache, also the first one after its last."""
    call = _call([20, 5, 8], [20, 40, 33], **more)
    call.pop("plain")
    call["block_tables"] = torch.tensor([[0, -1, 2], [10**9, 1, -(2**31)], [12, 11, 2**31 - 1]], dtype=torch.int32)
    for name in ("key_cache", "value_cache"):
        call[name] = call[name].nan_to_num(nan=0.5)
    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
def test_hostile_indices(dtype: torch.dtype, packed: bool) -> None:
    """Indices out of range contribute nothing; rows of no sequence are left alone."""
    call = hostile_call(dtype=dtype, packed=packed)
    for lengths, starts in (
        ([20, 2**31 - 1, -5], [0, 20, 25, 33]),
        ([20, 30, 33], [-7, 3, 9, 2**31 - 1]),
        ([20, 30, 33], [0, 20, 25, 30]),
    ):
        call["seq_lens"] = torch.tensor(lengths, dtype=torch.int32)
        call["cu_seqlens_q"] = torch.tensor(starts, dtype=torch.int32)
        assert_matches_reference(VARLEN, **call, warp_sizes=(32, 64))
    # With unsorted starts the owner of a row is undefined, but no row outside is touched.
    call["cu_seqlens_q"] = torch.tensor([30, 20, 10, 20], dtype=torch.int32)
    with config.cpu("kernels"):
        VARLEN.wrapper(**call)


@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
def test_missing_blocks(packed: bool) -> None:
    """Blocks that do not exist, in tiles without a mask."""
    call = _call([3, 2], [200, 150], dtype=torch.bfloat16, packed=packed)
    call.pop("plain")
    call["block_tables"][0, 2] = call["block_tables"][1, 5] = -1
    assert_matches_reference(VARLEN, **call)


def test_sliced_tensors(on: str) -> None:
    """Queries inside a fused QKV, caches inside one buffer, strided 64-bit lengths."""
    call = _call([30, 7], [40, 7], dtype=torch.bfloat16, on=on)
    fused = torch.full((37, 8, 64), torch.nan, dtype=torch.bfloat16, device=on)
    fused[:, :4] = call["query"]
    joint = torch.stack((call["key_cache"], call["value_cache"]), 1)
    apart = {
        name: torch.stack((call[name].long(),) * 2, -1)[..., 0] for name in ("seq_lens", "cu_seqlens_q", "block_tables")
    }
    _assert_is_attention(call | apart | {"query": fused[:, :4], "key_cache": joint[:, 0], "value_cache": joint[:, 1]})


@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
@pytest.mark.parametrize("count", [64, 65, 128, 129])
def test_prompts_around_the_tile_size(on: str, count: int, packed: bool) -> None:
    """The last tile of keys is full, or holds a single token with a weight far from zero."""
    _assert_is_attention(_call([count], [count], dtype=torch.bfloat16, packed=packed, on=on))
    _assert_is_attention(_call([count, 3], [count, count], (2, 2), dtype=torch.float16, packed=packed, on=on))
