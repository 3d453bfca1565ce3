"""Prefill with e4m3 queries: prefill_sm90_fp8.cu under the Hopper emulation of the host, and its fallbacks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch

import pyops
from pyops import offline, tuning
from pyops._core import config
from pyops._core.system import device
from pyops.example import ArgMaker
from pyops.ops.attention import prefill_sm90
from pyops.ops.attention.arguments import Options, PagedKV
from pyops.ops.attention.prefill_mma import PrefillMmaConfig
from pyops.ops.attention.prefill_plan import choose, launch
from pyops.ops.attention.prefill_problem import PrefillProblem, check_varlen
from pyops.ops.attention.prefill_sm90 import PrefillSm90Config
from pyops.ops.attention.prefill_sm90_fp8 import GEOMETRIES, E4m3Config
from pyops.testing import SCHEDULES, assert_matches_reference, same_bits, scheduled
from tests.every_op.test_nvrtc import MISSING
from tests.ops.attention.test_varlen import VARLEN, reference
from tests.ops.attention.test_varlen import _call as varlen_call
from tests.support.calls import KERNELS
from tests.support.profiles import few

pytestmark = pytest.mark.rotates

HOPPER = device.model("sm_90")
FP8 = torch.float8_e4m3fn
BITS = 2.0**-8  # rounding to bfloat16 changes a result by at most this factor
# Query tokens and lengths around multiples of the tile, 64 rows and 128 keys; a single key in its own tile.
COUNTS, LENGTHS = [65, 129, 1], [165, 257, 129]
_ALL = [(size, E4m3Config(*one)) for size, found in GEOMETRIES.items() for one in found]
_CONFIGS = dict(reversed(_ALL))  # the first of each head size


@pytest.fixture(params=KERNELS)
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The host backend and, on Hopper, the GPU, by name. The host gets few SMs, so that a CTA has several work
    items."""
    if request.param == "cuda" and not device.get(0).supports("wgmma"):
        pytest.skip("no Hopper")
    monkeypatch.setitem(device._HOST, 32, replace(device.host(), num_sms=2))
    with config.cpu("kernels"):
        yield str(request.param)


def _call(counts: list[int], lengths: list[int], heads: tuple[int, int] = (4, 2), **more: Any) -> dict[str, Any]:
    """Random e4m3 queries, keys and values; slots without a token hold NaN."""
    call = varlen_call(counts, lengths, heads, dtype=torch.bfloat16, **more)
    call["plain"] = [[x.to(FP8).double() * f for x, f in zip(pair, (0.5, 3.0), strict=True)] for pair in call["plain"]]
    call |= {name: call[name].to(FP8) for name in ("key_cache", "value_cache", "query")}
    scale = torch.tensor([0.75], device=call["out"].device)
    return call | {"kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 3.0, "q_scale": scale}


def _in_powers_of_two(call: dict[str, Any]) -> dict[str, Any]:
    """Keys that give the weights 1, 1/2, 1/4 and 1/8, and values 0 and 9/8: their sums are exact in a 14-bit
    accumulator. A logit is the first element of a key times log 2.
    """
    generator = torch.Generator().manual_seed(5)
    call["query"] = torch.zeros_like(call["query"].float())
    call["query"][..., 0] = 1.0
    for table, pair in zip(call["block_tables"].long(), call["plain"], strict=True):
        pair[0][:] = 0.0
        pair[0][..., 0] = -torch.randint(0, 4, pair[0].shape[:2], generator=generator).double()
        pair[1][:] = torch.randint(0, 2, pair[1].shape, generator=generator) * 1.125
        for name, x in zip(("key_cache", "value_cache"), pair, strict=True):
            cache = call[name]
            size = cache.shape[1]
            for begin in range(0, len(x), size):
                part = x[begin : begin + size].to(cache.device, torch.float32)
                cache[table[begin // size], : len(part)] = part.to(FP8)
    return call | {"query": call["query"].to(FP8), "scale": log(2.0), "k_scale": 1.0, "v_scale": 1.0, "q_scale": None}


def _run(one: E4m3Config, call: dict[str, Any], schedules: Any = SCHEDULES[:1]) -> None:
    """Make the calls; all these schedules give the same bits."""
    first: Any = None
    VARLEN.forget()
    with tuning.forced(VARLEN.name, one):
        for schedule in [scheduled(one) for one in schedules] if call["out"].device.type == "cpu" else [nullcontext()]:
            with schedule:
                VARLEN.wrapper(**{name: value for name, value in call.items() if name != "plain"})
            result = [call[name].clone() for name in ("out", "lse") if call.get(name) is not None]
            first = first or result
            assert all(same_bits(*pair) for pair in zip(first, result, strict=True))
    VARLEN.forget()


def _truths(call: dict[str, Any]) -> Any:
    """The rows, the result and the log-sum-exp of each sequence, in float64."""
    starts, scale = call["cu_seqlens_q"].tolist(), call.get("q_scale")
    for s, (keys, values) in enumerate(call["plain"]):
        rows = slice(starts[s], starts[s + 1])
        query = call["query"][rows].double().cpu() * (1.0 if scale is None else scale.double().cpu())
        yield rows, query, keys, values, *reference(query, keys, values, call)


@pytest.mark.parametrize(
    ("head_size", "block_size", "has_lse", "window"),
    [(128, 16, False, 0), (256, 8, True, 100), *few([(64, 64, True, 100), (128, 256, True, 150)], 0)],
)
def test_exact_accumulation(on: str, head_size: int, block_size: int, has_lse: bool, window: int) -> None:
    """Weights and values with exact sums."""
    call = _call(COUNTS, LENGTHS, head_size=head_size, block_size=block_size, on=on) | {"sliding_window": window}
    call = _in_powers_of_two(call)
    call["lse"] = torch.zeros(4, 195, device=on) if has_lse else None
    _run(_CONFIGS[head_size], call, SCHEDULES if head_size == 128 else SCHEDULES[:1])
    for rows, *_, right, log_sum in _truths(call):
        torch.testing.assert_close(call["out"][rows].double().cpu(), right, rtol=BITS, atol=0)
        if has_lse:
            torch.testing.assert_close(call["lse"][:, rows].double().cpu(), log_sum, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("head_size", "one"), few([(128, E4m3Config(128, 2)), *_ALL], 1))
@pytest.mark.parametrize("ping_pong", few([False, True], 1))
def test_other_geometries(on: str, head_size: int, one: E4m3Config, ping_pong: bool) -> None:
    """Exact accumulation in tiles with parts of 128, 64 and 32 keys, and without overlap."""
    call = _in_powers_of_two(_call([66, 1], [290, 225], (2, 1), head_size=head_size, on=on))
    _run(replace(one, ping_pong=ping_pong), call)
    for rows, *_, right, _ in _truths(call):
        torch.testing.assert_close(call["out"][rows].double().cpu(), right, rtol=BITS, atol=0)


@pytest.mark.parametrize(("head_size", "has_lse"), [(128, True), *few([(64, False), (256, False)], 0)])
def test_splits(on: str, head_size: int, has_lse: bool) -> None:
    """Exact accumulation in items of several splits, of one, and of one where others have several; with a window, items
    of a sequence begin in different tiles."""
    call = _call([66, 3, 5], [1185, 1100, 40], (4, 2), head_size=head_size, on=on) | {"sliding_window": 1090}
    call = _in_powers_of_two(call)
    call["lse"] = torch.zeros(4, 74, device=on) if has_lse else None
    _run(replace(_CONFIGS[head_size], max_splits=3), call, SCHEDULES[:2])
    for rows, *_, right, log_sum in _truths(call):
        torch.testing.assert_close(call["out"][rows].double().cpu(), right, rtol=BITS, atol=0)
        if has_lse:
            torch.testing.assert_close(call["lse"][:, rows].double().cpu(), log_sum, rtol=1e-6, atol=1e-6)


def test_long_accumulation_is_exact(on: str) -> None:
    """Over 32 KV tiles, where a 14-bit accumulator would lose each next value; so tiles are promoted to float32."""
    call = _in_powers_of_two(_call([1], [4096], on=on, head_size=128))
    _run(_CONFIGS[128], call)
    for rows, *_, right, _ in _truths(call):
        torch.testing.assert_close(call["out"][rows].double().cpu(), right, rtol=BITS, atol=0)


@pytest.mark.parametrize(("head_size", "heads"), [(128, (4, 2)), *few([(64, (7, 1)), (256, (3, 3))], 0)])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_rounded_probabilities(on: str, head_size: int, heads: tuple[int, int], factor: float) -> None:
    """Rounding to e4m3 changes a weight by at most 2^-4 of itself or 2^-18 of the largest weight; the row sum uses the
    rounded weights. A tile's accumulator is truncated to 14 bits four times.
    """
    call = _call(COUNTS, LENGTHS, heads, head_size=head_size, on=on)
    call["scale"] *= factor
    _run(_CONFIGS[head_size], call)
    for rows, query, keys, values, right, _ in _truths(call):
        k, v = (x.cpu().repeat_interleave(heads[0] // heads[1], 1) for x in (keys, values))
        logits = torch.einsum("nhd,jhd->hnj", query, k) * call["scale"]
        at = len(keys) - len(query) + torch.arange(len(query))[:, None]
        weights = logits.masked_fill(torch.arange(len(keys)) > at, -torch.inf).softmax(-1)
        size = torch.einsum("hnj,jhd->nhd", weights, v.abs())
        spread = [(weights[h, :, :, None] * (v[:, h] - right[:, h, None]).abs()).sum(1) for h in range(heads[0])]
        error, bound = (call["out"][rows].double().cpu() - right).abs(), 2.0**-4 * torch.stack(spread, 1)
        assert (error <= 1.07 * bound + (2.0**-7 + BITS) * size).all()
        assert error.square().mean() <= (0.4 * bound).square().mean()


def test_head_scales_and_hostile_indices(on: str) -> None:
    """Indices out of range contribute nothing; rows of no sequence are left alone, and queries without keys give
    zeros."""
    call = _call([20, 70, 8], [20, 150, 33], (6, 3), head_size=128, on=on)
    call.pop("plain")
    for name in ("key_cache", "value_cache"):
        call[name] = call[name].float().nan_to_num(nan=0.5).to(FP8)
    call["block_tables"][:, 1] = torch.tensor([-1, 10**9, -(2**31)], device=on)
    of_heads = torch.tensor([4.0, 0.5, 1.0], device=on)
    scales = {"k_scale": [0.25, 1.0, 0.5], "v_scale": [3.0, -0.5, 1.0], "sinks": [0.0, 2.0, -40.0, 9.0, 1.0, -1.0]}
    call |= {name: torch.tensor(values, device=on) for name, values in scales.items()} | {"causal": False}
    call["lse"], found = torch.empty(6, 98, device=on), []
    VARLEN.forget()
    with tuning.forced(VARLEN.name, _CONFIGS[128]):
        for lengths, starts in (
            ([20, 2**31 - 1, -5], [0, 20, 90, 98]),
            ([10, 40, 33], [-7, 3, 73, 2**31 - 1]),
            ([20, 150, 33], [0, 20, 90, 95]),
        ):
            call["seq_lens"] = torch.tensor(lengths, dtype=torch.int32, device=on)
            call["cu_seqlens_q"] = torch.tensor(starts, dtype=torch.int32, device=on)
            assert_matches_reference(VARLEN, schedules=few(SCHEDULES, 3), **call | {"q_scale": of_heads})
        for q_scale, k_scale in ((of_heads, call["k_scale"]), (None, of_heads * call["k_scale"])):
            VARLEN.wrapper(**call | {"q_scale": q_scale, "k_scale": k_scale})
            found.append(call["out"].clone())
    assert same_bits(*found)
    VARLEN.forget()


@pytest.mark.parametrize("is_whole", [True, False])
def test_fallback_kernels_take_upcast_queries(on: str, is_whole: bool) -> None:
    """The bits are those of a call with queries of out's dtype, and of one scale in place of two."""
    for head_size, more in ((80, {}), (128, {"logits_soft_cap": 3.0}), (20, {"k_scale": torch.tensor([0.5, 2.0])})):
        call = _call([20, 3], [31, 3], head_size=head_size, on=on) | more
        call.pop("plain")
        call["query"] = call["query"] if is_whole else call["query"].repeat(1, 2, 1)[:, :4]
        if "k_scale" in more:
            call |= {name: more["k_scale"].to(on) for name in ("k_scale", "v_scale")}
        VARLEN.wrapper(**call)
        assert not isinstance(tuning.last[VARLEN.name], E4m3Config)
        found = call["out"].clone()
        k_scale = float(call["q_scale"]) * call["k_scale"]
        with tuning.forced(VARLEN.name, tuning.last[VARLEN.name]):  # queries of 16 bits have more kernels
            VARLEN.wrapper(**call | {"query": call["query"].bfloat16(), "k_scale": k_scale, "q_scale": None})
        VARLEN.forget()
        assert same_bits(found, call["out"])


def test_refused() -> None:
    call = _call([20], [31])
    call.pop("plain")
    codes = call["query"]
    wide = {"key_cache": call["key_cache"].bfloat16(), "value_cache": call["value_cache"].bfloat16()}
    for changes, argument in (
        (wide | {"kv_cache_dtype": "auto"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8_e5m2", **{name: call[name].view(torch.uint8) for name in wide}}, "kv_cache_dtype"),
        ({"out": call["out"].to(FP8)}, "out"),
        ({"q_scale": torch.ones(2)}, "q_scale"),
        ({"query": codes.bfloat16()}, "q_scale"),
        ({"q_scale": torch.ones(4), "k_scale": torch.ones(2), "v_scale": torch.ones(2)}, "q_scale"),
    ):
        with pytest.raises(pyops.OpError, match=f"paged_attention_varlen: {argument}"):
            VARLEN.wrapper(**call | changes)


def _problem(
    num_tokens: int, head_size: int, arch: str = "sm_90", *, block: int = 16, **options: Any
) -> PrefillProblem:
    """Four sequences, and four query heads per each of two key-value heads."""
    make = ArgMaker(device.model(arch))
    cache, scale = make.empty(99, block, 2, head_size, dtype="uint8"), make.empty(1, dtype="float32")
    tables, lengths, starts = (make.empty(*shape, dtype="int32") for shape in ((4, 64), (4,), (5,)))
    out, query = (make.empty(num_tokens, 8, head_size, dtype=dtype) for dtype in ("bfloat16", "float8_e4m3fn"))
    kv = PagedKV(cache, cache, 2, tables, lengths, block, "fp8", scale, scale)
    return check_varlen(out, query, kv, Options(**options), starts)


def test_choice_of_kernel() -> None:
    """Tiles by head size; other kernels for small M, few work items, and unsupported arguments."""
    for head_size, expected in _CONFIGS.items():
        problem = _problem(4096, head_size)
        chosen = choose(problem, HOPPER)
        assert chosen == expected
        for one in (chosen, *chosen.candidates(problem, HOPPER)):
            (found,) = launch(problem, one)
            assert found.shared + prefill_sm90._STATIC_BYTES <= HOPPER.shared_memory
            assert found.specialisation.constants["STAGES"] >= 2
    for problem, kind, count in (
        (_problem(64, 128), PrefillSm90Config, 3),
        (_problem(128, 128), E4m3Config, 2),
        (_problem(1025, 128), E4m3Config, 2),
        (_problem(4096, 192), PrefillSm90Config, 2),
        (_problem(4096, 128, logits_soft_cap=9.0), PrefillSm90Config, 2),
        (_problem(4096, 128, block=20), PrefillMmaConfig, 2),
        (_problem(4096, 128, "sm_100"), PrefillMmaConfig, 2),
    ):
        chosen = choose(problem, problem.query.device)
        assert isinstance(chosen, kind)
        assert len(launch(problem, chosen)) == count
    with pytest.raises(ValueError, match="no geometry"):
        E4m3Config(100, 2)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("head_size", "has_lse", "one"),
    few(
        [
            (128, False, replace(_CONFIGS[128], max_splits=2)),
            *((size, has, replace(one, max_splits=1 + has)) for has in (False, True) for size, one in _ALL),
            *((size, False, replace(one, max_splits=2)) for size, one in _CONFIGS.items()),
        ],
        1,
    ),
)
def test_compiles_without_spills_and_advice(head_size: int, has_lse: bool, one: E4m3Config) -> None:
    lse = ArgMaker(HOPPER).empty(8, 4096, dtype="float32") if has_lse else None
    made = launch(_problem(4096, head_size, lse=lse), one)[0].specialisation
    report = offline.compile(made.kernel.file, str(made), made.text, "sm_90a")
    assert (report.spill_bytes, report.stack_bytes, report.advice) == (0, 0, ())
    assert report.shared_bytes <= prefill_sm90._STATIC_BYTES
