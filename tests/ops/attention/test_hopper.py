"""prefill_sm90.cu, mla_decode_sm90.cu and mla_decode_small_h.cu: correct under every schedule of the Hopper emulation
of the host; which config is chosen.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch

from pyops import offline, tuning
from pyops._core import config
from pyops._core.launch.kernel import Kernel
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops.example import ArgMaker
from pyops.ops.attention import (
    mla_problem,
    mla_schedule,
    mla_sm90,
    mla_sm90_fp8,
    mla_small_h,
    mla_small_h_fp8,
    prefill_items,
    prefill_sm90,
)
from pyops.ops.attention.arguments import Options, PagedKV
from pyops.ops.attention.prefill_mma import PrefillMmaConfig
from pyops.ops.attention.prefill_plan import choose, launch
from pyops.ops.attention.prefill_problem import PrefillProblem, check_varlen
from pyops.ops.attention.prefill_sm90 import PrefillSm90Config
from pyops.testing import SCHEDULES, assert_matches_reference, same_bits, scheduled
from tests.every_op.test_nvrtc import MISSING
from tests.ops.attention.test_attention import in_codes_of_heads
from tests.ops.attention.test_mla import MLA
from tests.ops.attention.test_mla import _assert_is_attention as assert_is_mla
from tests.ops.attention.test_mla import _call as mla_call
from tests.ops.attention.test_mla import _with_tokens as with_tokens
from tests.ops.attention.test_varlen import VARLEN
from tests.ops.attention.test_varlen import _assert_is_attention as assert_is_attention
from tests.ops.attention.test_varlen import _call as varlen_call
from tests.support.calls import KERNELS
from tests.support.kernels import launched
from tests.support.profiles import few

pytestmark = pytest.mark.rotates

HOPPER = device.model("sm_90")
FP8 = torch.float8_e4m3fn
NAME = "paged_attention_varlen"
# Query tokens and lengths around multiples of the tile, 64 rows and 128 keys; a single key in its own tile.
COUNTS, LENGTHS = [65, 129, 1], [165, 257, 129]


@pytest.fixture(params=KERNELS)
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The host backend and, on Hopper, the GPU, by name. The host gets few SMs, so that a CTA has several work
    items."""
    if request.param == "cuda" and not device.get(0).supports("wgmma"):
        pytest.skip("no Hopper")
    monkeypatch.setitem(device._HOST, 32, replace(device.host(), num_sms=2))
    with config.cpu("kernels"):
        yield str(request.param)


@pytest.fixture
def without_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLA decode of few short sequences by the other kernels: a GPU has SMs for a cluster of each sequence."""
    monkeypatch.setattr(mla_schedule, "_CLUSTER_SIZES", ())


def _schedules(on: str, schedules: Any) -> Any:
    """A context for each schedule of the host; a single one for a GPU."""
    return [scheduled(one) for one in schedules] if on == "cpu" else [nullcontext()]


def _varlen(
    one: PrefillSm90Config, schedules: Any = SCHEDULES[:1], bias: Any = None, *, has_lse: bool = True, **call: Any
) -> None:
    """The call matches float64 attention, with the same bits under these schedules."""
    first: Any = None
    device = call["out"].device
    call["lse"] = torch.zeros(call["out"].shape[1::-1], device=device) if has_lse else None
    VARLEN.forget()
    with tuning.forced(NAME, one):
        for schedule in _schedules(device.type, schedules):
            with schedule:
                assert_is_attention(dict(call), bias)
            result = [call[name].clone() for name in ("out", "lse") if call[name] is not None]
            first = first or result
            assert all(same_bits(*pair) for pair in zip(first, result, strict=True))
    VARLEN.forget()


def _in_codes(call: dict[str, Any]) -> dict[str, Any]:
    """The call with fp8 caches."""
    plain = [[x.to(FP8).double() * f for x, f in zip(pair, (0.5, 3.0), strict=True)] for pair in call["plain"]]
    codes = {name: call[name].to(FP8) for name in ("key_cache", "value_cache")}
    return call | codes | {"plain": plain, "kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 3.0}


@pytest.mark.parametrize(("block_size", "head_size", "has_lse"), [(16, 64, False), (64, 128, True)])
def test_every_schedule(on: str, block_size: int, head_size: int, has_lse: bool) -> None:
    """Without a log-sum-exp, the kernel computes row sums on the tensor cores."""
    call = varlen_call(COUNTS, LENGTHS, dtype=torch.bfloat16, block_size=block_size, head_size=head_size, on=on)
    _varlen(PrefillSm90Config(128, 2), SCHEDULES, has_lse=has_lse, **call)


@pytest.mark.parametrize("dtype", few([torch.bfloat16, torch.float16], 2))
def test_rising_row_max(on: str, dtype: torch.dtype) -> None:
    """The row max rises from tile to tile, by less and by more than the slack below which there is no rescale, until
    only the first tokens count; and it starts far below 0, so that the row max is negative.
    """
    call = varlen_call([65], [450], dtype=dtype, on=on)
    keys, table = call["plain"][0][0], call["block_tables"][0].long()
    for begin in range(0, 450, 16):
        factor = 2.0 ** (5 - begin // 64)
        keys[begin : begin + 16] *= factor
        call["key_cache"][table[begin // 16]] *= factor
    _varlen(PrefillSm90Config(64, 2), SCHEDULES[:2], **call | {"scale": 1.5 * call["scale"]})
    _varlen(PrefillSm90Config(64, 2), has_lse=False, **call | {"scale": 1.5 * call["scale"]})
    call = varlen_call([65], [450], dtype=dtype, on=on)
    keys, query = call["plain"][0][0], call["query"][:1, :1]
    row = query[0, 0].double().cpu()
    for begin in range(0, 450, 16):  # in each row every second logit is further from 0, for a while below every row max
        pair = torch.tensor([1.0, 40.0 if 64 <= begin < 192 else 1.4])
        logits = pair.repeat(8) * (12.0 if begin < 64 else -20.0 if begin < 192 else -310.0)
        units = row * (logits / float(row @ row) / call["scale"])[:, None, None]
        keys[begin : begin + 16] = units[: len(keys) - begin]
        call["key_cache"][call["block_tables"][0, begin // 16].long()] = units.to(on, dtype)
    keys[:] = keys.to(dtype).double()
    call["query"] = query.expand(65, 4, -1).contiguous()
    _varlen(PrefillSm90Config(64, 2), has_lse=False, **call)


# Parameters of the geometry: head size, block size, heads of a group, tile, warpgroups.
GEOMETRIES = [
    (PrefillSm90Config(64, 2), (4, 2), 16, 8),
    (PrefillSm90Config(128, 2), (2, 2), 80, 16),
    (PrefillSm90Config(176, 2), (4, 2), 112, 16),
    (PrefillSm90Config(112, 2), (7, 1), 192, 32),
    (PrefillSm90Config(80, 2), (2, 1), 256, 16),
    (PrefillSm90Config(96, 3), (4, 2), 64, 256),
]


@pytest.mark.parametrize(("one", "heads", "head_size", "block_size"), few(GEOMETRIES, 3), ids=str)
def test_geometries(on: str, one: PrefillSm90Config, heads: tuple[int, int], head_size: int, block_size: int) -> None:
    call = varlen_call(
        [65, 129], [65, 200], heads, dtype=torch.float16, head_size=head_size, block_size=block_size, on=on
    )
    _varlen(one, **call)


# Keys and values of MLA; heads of values that fill a panel in part, with splits and with fp8.
SHORT_VALUES = [
    (PrefillSm90Config(128, 2), (192, 128), 16, False),
    (PrefillSm90Config(48, 3, max_splits=3), (128, 48), 64, False),
    (PrefillSm90Config(48, 2), (256, 80), 8, True),
]


@pytest.mark.parametrize(("one", "sizes", "block_size", "codes"), SHORT_VALUES, ids=str)
def test_values_narrower_than_keys(
    on: str, one: PrefillSm90Config, sizes: tuple[int, int], block_size: int, codes: bool
) -> None:
    """Slots without a token hold NaN. A window begins inside a tile."""
    options = {"dtype": torch.bfloat16, "block_size": block_size, "head_size": sizes[0], "value_size": sizes[1]}
    call = varlen_call(COUNTS, [600, 257, 129], (2, 2), on=on, **options) | {"sliding_window": 400}
    if codes:
        call = _in_codes(call)
    _varlen(one, **call)


# Panels of 64 bytes; two panels that overlap, and splits.
WHOLE_HEADS = [
    (PrefillSm90Config(96, 3), (96, 96)),
    (PrefillSm90Config(64, 2, max_splits=3), (112, 80)),
    (PrefillSm90Config(48, 2), (160, 96)),
]


@pytest.mark.parametrize(("one", "sizes"), few(WHOLE_HEADS, 2), ids=str)
def test_panels_of_whole_heads(on: str, one: PrefillSm90Config, sizes: tuple[int, int]) -> None:
    """Heads have a stride. Slots without a token, and elements between heads, hold NaN."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "head_size": sizes[0], "value_size": sizes[1]}
    call = varlen_call([65, 9], [600, 9], (4, 2), on=on, **options) | {"sliding_window": 500}
    strided = [torch.full_like(call[name], torch.nan).repeat(1, 1, 1, 2) for name in ("key_cache", "value_cache")]
    for name, twice in zip(("key_cache", "value_cache"), strided, strict=True):
        call[name] = twice[..., : call[name].shape[3]].copy_(call[name])
    _varlen(one, SCHEDULES[:2], **call)


@pytest.mark.parametrize("section", [1, 2])
def test_sections_of_heads(on: str, section: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work items of one key-value head after another; of two heads, and then of the remaining one."""
    monkeypatch.setattr(prefill_items, "section_heads", lambda *_: section)
    _varlen(PrefillSm90Config(64, 2), **varlen_call([65, 9, 129], [130, 9, 129], (6, 3), dtype=torch.bfloat16, on=on))


@pytest.mark.parametrize("max_splits", [1, 3])
def test_items_of_some_heads(on: str, max_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work items of two of the six query heads that share a KV head, in sections of a KV head, and what depends on the
    head.
    """
    monkeypatch.setattr(prefill_items, "packed_heads", lambda *_: 2)
    monkeypatch.setattr(prefill_items, "section_heads", lambda *_: 1)
    call = varlen_call([65, 9, 129], [560, 9, 129], (12, 2), dtype=torch.bfloat16, head_size=32, on=on)
    slopes = torch.linspace(0.01, 0.2, 12, device=on)
    config = PrefillSm90Config(64, 2, max_splits=max_splits)
    _varlen(config, SCHEDULES[:2], slopes.double().cpu(), **call | {"alibi_slopes": slopes})


# Sequences with one tile per split, one tile too few for two splits, and the maximum of splits.
SPLITS = [
    ([129, 65], [1185, 511], PrefillSm90Config(64, 2, max_splits=3), False),
    ([65], [520], PrefillSm90Config(64, 2, max_splits=32), True),
]


@pytest.mark.parametrize(("counts", "lengths", "one", "has_lse"), SPLITS, ids=str)
def test_splits(on: str, counts: list[int], lengths: list[int], one: PrefillSm90Config, has_lse: bool) -> None:
    """Without a log-sum-exp, splits have the row sum on the tensor cores and the fast path for interior tiles."""
    call = varlen_call(counts, lengths, dtype=torch.bfloat16, head_size=32, on=on)
    _varlen(one, SCHEDULES[:2], has_lse=has_lse, **call)


def test_splits_with_options(on: str) -> None:
    """Windows, sinks, fp8, missing blocks, and rows that belong to no sequence, which are left alone."""
    call = varlen_call([65, 9, 3], [700, 90, 0], dtype=torch.bfloat16, head_size=80, on=on)
    call.pop("plain")
    call |= {"sinks": torch.tensor([0.0, 2.0, -40.0, 9.0], device=on), "lse": torch.empty(4, 77, device=on)}
    call["cu_seqlens_q"] = torch.tensor([0, 65, 73, 76], dtype=torch.int32, device=on)
    for name in ("key_cache", "value_cache"):
        call[name] = call[name].nan_to_num(nan=0.5).to(FP8)
    call["block_tables"][0, 1:9] = -1
    call |= {"kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 3.0}
    VARLEN.forget()
    with tuning.forced(NAME, PrefillSm90Config(64, 2, max_splits=3)):
        for window, causal, count in ((0, True, 2), (600, True, 1), (0, False, 1)):
            options = {"sliding_window": window, "causal": causal}
            assert_matches_reference(VARLEN, schedules=SCHEDULES[:count], **call | options)
    VARLEN.forget()


@pytest.mark.parametrize(
    ("one", "head_size", "block_size", "dtype"),
    [
        (PrefillSm90Config(48, 2), 128, 16, torch.bfloat16),
        (PrefillSm90Config(64, 2), 80, 8, torch.float16),  # eight boxes of a tile, issued at once
        (PrefillSm90Config(112, 3), 64, 64, torch.bfloat16),
    ],
    ids=str,
)
def test_fp8_caches(on: str, one: PrefillSm90Config, head_size: int, block_size: int, dtype: torch.dtype) -> None:
    """Slots without a token and blocks before a window, which another sequence may own, hold NaN."""
    call = varlen_call([65, 129], [65, 200], dtype=dtype, head_size=head_size, block_size=block_size, on=on)
    call = _in_codes(call) | {"sliding_window": 150}
    _varlen(one, SCHEDULES[:2] if block_size == 16 else SCHEDULES[:1], **call)


@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_extreme_queries_with_fp8_cache(on: str, cap: float) -> None:
    """Rows outside the range of float16, large and small, next to rows with decisive logits; rows of zeros; rows with
    parts that are negligible compared with others.
    """
    call = varlen_call([70, 3], [70, 200], dtype=torch.bfloat16, on=on)
    call["plain"] = [[x.to(FP8).double() for x in pair] for pair in call["plain"]]
    call |= {name: call[name].to(FP8) for name in ("key_cache", "value_cache")} | {"kv_cache_dtype": "fp8"}
    powers = torch.tensor([4, 24, -26, 25, -122, 23, 64, -129, 44], device=on)[torch.arange(73 * 4, device=on) % 9]
    call["query"] *= 2.0 ** powers.double().view(73, 4, 1)
    call["query"][5], call["query"][6, :, 3:] = 0.0, 0.0
    call["query"][7, :, 5:] *= 2.0**-60
    _varlen(PrefillSm90Config(64, 2), **call | {"scale": 2.0**-24 * call["scale"], "logits_soft_cap": cap})
    call["query"] = call["query"][:, :1].expand(-1, 4, -1).sign() * 3e38  # every logit is beyond 2^24, and finite
    _varlen(PrefillSm90Config(64, 2), has_lse=False, **call | {"scale": 2.0**-36})
    call["query"][..., 1:], call["key_cache"][..., 0] = 0.0, 0.0  # and every logit is 0 times a huge element
    for keys, _ in call["plain"]:
        keys[..., 0] = 0.0
    _varlen(PrefillSm90Config(64, 2), has_lse=False, **call | {"scale": 8.0})


def test_fp8_scales_per_head(on: str) -> None:
    """With one work item after another, in one split and in several."""
    call = varlen_call([65, 70], [700, 200], (6, 3), dtype=torch.bfloat16, on=on)
    call = in_codes_of_heads(call, [0.25, 1.0, 0.5], [3.0, -0.5, 1.0])
    for max_splits in (1, 3):
        _varlen(PrefillSm90Config(64, 2, max_splits=max_splits), **call)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_fp8_value(on: str, dtype: torch.dtype) -> None:
    """All 256 of them, NaN included, as values of a single token."""
    call = varlen_call([1], [1], (1, 1), dtype=dtype, head_size=256, on=on)
    call.pop("plain")
    codes = torch.arange(256, dtype=torch.uint8, device=on).view(FP8)
    call |= {name: call[name].nan_to_num(nan=0.0).to(FP8) for name in ("key_cache", "value_cache")}
    call["value_cache"][call["block_tables"][0, 0].long(), 0, 0] = codes
    VARLEN.forget()
    with tuning.forced(NAME, PrefillSm90Config(48, 2)):
        VARLEN.wrapper(**call | {"kv_cache_dtype": "fp8"})
    VARLEN.forget()
    torch.testing.assert_close(call["out"][0, 0].float(), codes.float(), rtol=2e-6, atol=0, equal_nan=True)


def test_options(on: str) -> None:
    """A window that begins inside a tile, with NaN in blocks before it; every option of the logits."""
    one, slopes = PrefillSm90Config(64, 2), torch.tensor([0.5, 0.25, 0.0, -0.125], device=on)
    for causal in (True, False):
        call = varlen_call([65, 130], [190, 130], dtype=torch.bfloat16, on=on) | {
            "sliding_window": 40,
            "causal": causal,
        }
        free = call["block_tables"][0, : (190 - 64 - 40) // 16].long()
        call["key_cache"][free] = call["value_cache"][free] = torch.nan
        call["plain"][0] = [x.nan_to_num(nan=0.0) for x in call["plain"][0]]
        _varlen(one, SCHEDULES[:2], **call)
    call = varlen_call([65, 3], [90, 130], dtype=torch.bfloat16, on=on)
    _varlen(one, bias=slopes.double().cpu(), **call | {"logits_soft_cap": 1.5, "alibi_slopes": slopes})
    _varlen(one, **varlen_call([70], [70], dtype=torch.float16, on=on) | {"scale": -0.1})


@pytest.mark.parametrize(
    ("one", "head_size", "dtype"),
    few([(PrefillSm90Config(96, 3), 64, torch.bfloat16), (PrefillSm90Config(128, 2), 128, torch.float16)], 1),
    ids=str,
)
def test_soft_caps(on: str, one: PrefillSm90Config, head_size: int, dtype: torch.dtype) -> None:
    """Logits inside the limit of the polynomial, beyond it, and both in one tile; any tile ends; logits more than an
    integer apart.
    """
    call = varlen_call([65, 1], [193, 129], dtype=dtype, head_size=head_size, on=on)
    scale, rows = call["scale"], torch.linspace(0.0, 1.0, 66, device=on)[:, None, None]
    for factor, cap, causal in ((1.0, 30.0, True), (9.0, 30.0, False), (40.0, 50.0, True)):
        call |= {"query": (call["query"] * rows).to(dtype), "scale": factor * scale}
        schedules = SCHEDULES[:2] if factor == 1.0 else SCHEDULES[:1]
        _varlen(one, schedules, **call | {"logits_soft_cap": cap, "causal": causal})
        if dtype == torch.bfloat16:  # two terms of the polynomial, unless a log-sum-exp is returned
            options = {"logits_soft_cap": cap, "causal": True, "sliding_window": 150}
            _varlen(one, has_lse=False, **call | options)
    _varlen(one, **call | {"logits_soft_cap": 1e12, "scale": 1e10})
    _varlen(one, **call | {"logits_soft_cap": 30.0, "scale": -scale})
    # All logits of a row are negative, down to -9 and -90.
    call["query"] = -call["plain"][0][0][:1, :1].to(on, dtype).repeat(66, 4, 1) * (rows * 9.0 / head_size**0.5)
    keys = call["plain"][0][0][:1, :1]
    for s, blocks in enumerate(call["block_tables"]):
        call["key_cache"][blocks.long()] = keys[0, 0].to(on, dtype)
        call["plain"][s][0] = keys.expand_as(call["plain"][s][0])
    call["query"] = call["query"].to(dtype)
    for cap, factor in ((50.0, 1.0), (400.0, 10.0)):
        _varlen(one, **call | {"logits_soft_cap": cap, "scale": factor * scale})
    for s, blocks in enumerate(call["block_tables"]):  # and those of the first 96 keys, the last tile, are 0
        call["key_cache"][blocks[:6].long()] = 0.0
        call["plain"][s][0] = call["plain"][s][0].clone()
        call["plain"][s][0][:96] = 0.0
    _varlen(one, has_lse=False, **call | {"logits_soft_cap": 400.0, "scale": 30.0 * scale})


POLYNOMIALS = """#include "attention/attention.cuh"
extern "C" __global__ void polynomials(float* logits, float* limits, const float* shares, float scale, float cap) {
    const CapSeries<2> two(scale, cap);
    const CapSeries<3> three(scale, cap);
    const CapSeries<5> five(scale, cap);
    const int i = blockIdx.x * 128 + threadIdx.x, n = gridDim.x * 128;
    logits[i] = two.logit(shares[i] * two.limit);
    logits[n + i] = three.logit(shares[i] * three.limit);
    logits[2 * n + i] = five.logit(shares[i] * five.limit);
    if (i == 0) limits[0] = two.limit, limits[1] = three.limit, limits[2] = five.limit;
}
"""


@pytest.mark.parametrize(("scale", "cap"), [(0.0884, 30.0), (-0.0625, 50.0), (3.0, 1.0), (0.5, 300.0)])
def test_soft_cap_polynomials(scale: float, cap: float) -> None:
    """Within their limits the polynomials satisfy the error bounds that attention.cuh derives, with logits rounded to
    float32.
    """
    shares = numpy.linspace(-1.0, 1.0, 1024, dtype=numpy.float32)
    logits, limits = numpy.empty((3, 1024), numpy.float32), numpy.empty(3, numpy.float32)
    launched(POLYNOMIALS, grid=8, block=128, logits=logits, limits=limits, shares=shares, scale=scale, cap=cap)
    products = shares * limits[:, None].astype(float)
    right = cap * numpy.tanh(products * scale / cap)
    errors = abs(logits * numpy.log(2.0) - right)
    assert errors[0].max() <= 2.0**-13 + 2.0**-22 * abs(right[0]).max()
    assert (errors[1:] <= 2.0**-19 * abs(right[1:])).all()
    # And the bounds are tight.
    assert (abs(limits * scale / cap)[1:] > (0.31, 0.79)).all()
    assert errors[0].max() > 2.0**-14 or abs(limits[0] * scale / cap) > 0.31


@pytest.mark.parametrize("block_size", few([16, 64], 1))
def test_hostile_indices(on: str, block_size: int) -> None:
    """Indices out of range contribute nothing; rows of no sequence are left alone, and queries without keys give
    zeros."""
    call = varlen_call([20, 70, 8], [20, 150, 33], dtype=torch.bfloat16, block_size=block_size, head_size=128, on=on)
    call.pop("plain")
    for name in ("key_cache", "value_cache"):
        call[name] = call[name].nan_to_num(nan=0.5)
    call["block_tables"][:, 1] = torch.tensor([-1, 10**9, -(2**31)], device=on)
    call |= {"sinks": torch.tensor([0.0, 2.0, -40.0, 9.0], device=on), "lse": torch.empty(4, 98, device=on)}
    VARLEN.forget()
    with tuning.forced(NAME, PrefillSm90Config(128, 2)):
        for lengths, starts in (
            ([20, 2**31 - 1, -5], [0, 20, 90, 98]),
            ([10, 40, 33], [-7, 3, 73, 2**31 - 1]),
            ([20, 150, 33], [0, 20, 90, 95]),
        ):
            call["seq_lens"] = torch.tensor(lengths, dtype=torch.int32, device=on)
            call["cu_seqlens_q"] = torch.tensor(starts, dtype=torch.int32, device=on)
            assert_matches_reference(VARLEN, **call)
        # With unsorted starts the owner of a row is undefined, but no row outside is touched.
        call["cu_seqlens_q"] = torch.tensor([90, 20, 10, 20], dtype=torch.int32, device=on)
        VARLEN.wrapper(**call)
    VARLEN.forget()


def test_sliced_tensors(on: str) -> None:
    """Queries inside a fused QKV, caches inside one buffer, strided 64-bit indices, heads with a stride."""
    call = varlen_call([70, 7], [80, 7], dtype=torch.bfloat16, on=on)
    fused = torch.full((77, 8, 64), torch.nan, dtype=torch.bfloat16, device=on)
    fused[:, :4] = call["query"]
    joint = torch.stack((call["key_cache"], call["value_cache"]), 1)
    apart = {
        name: torch.stack((call[name].long(),) * 2, -1)[..., 0] for name in ("seq_lens", "cu_seqlens_q", "block_tables")
    }
    call |= apart | {"query": fused[:, :4], "key_cache": joint[:, 0], "value_cache": joint[:, 1]}
    _varlen(PrefillSm90Config(128, 2), **call)
    heads_apart = torch.stack((call["key_cache"], call["value_cache"]), 3)
    _varlen(
        PrefillSm90Config(64, 2), **call | {"key_cache": heads_apart[..., 0, :], "value_cache": heads_apart[..., 1, :]}
    )


def _problem(num_tokens: int, head_size: int, arch: str = "sm_90", **changes: Any) -> PrefillProblem:
    """`num_seqs` sequences, four by default, and eight query heads per each of two key-value heads."""
    num_seqs = changes.get("num_seqs", 4)
    make = ArgMaker(device.model(arch))
    dtype, block_size = changes.get("dtype", "bfloat16"), changes.get("block_size", 16)
    value_size, cache_dtype = changes.get("value_size", head_size), changes.get("cache_dtype", dtype)
    caches = [make.empty(99, block_size, 2, size, dtype=cache_dtype) for size in (head_size, value_size)]
    if apart := changes.get("heads_apart"):  # elements
        caches = [replace(cache, strides=(block_size * 2 * apart, 2 * apart, apart, 1)) for cache in caches]
    index = {"dtype": "int32"}
    kv = PagedKV(
        *caches,
        2,
        make.empty(num_seqs, 64, **index),
        make.empty(num_seqs, **index),
        block_size,
        "auto" if "cache_dtype" not in changes else "fp8",
        make.empty(changes.get("scales", 1), dtype="float32"),
        make.empty(changes.get("scales", 1), dtype="float32"),
    )
    slopes = make.empty(16, dtype="float32") if changes.get("options") else None
    query = make.empty(num_tokens, 16, head_size, dtype=dtype)
    out = make.empty(num_tokens, 16, value_size, dtype=dtype)
    options = Options(alibi_slopes=slopes, logits_soft_cap=20.0 if slopes else 0.0)
    return check_varlen(out, query, kv, options, make.empty(num_seqs + 1, **index))


def test_choice_of_kernel() -> None:
    """Tiles by head sizes; the other kernels for arguments that no tensor map describes."""
    for head_size, value_size, options, expected in (
        (64, 64, False, PrefillSm90Config(112, 3)),
        (80, 80, True, PrefillSm90Config(128, 2)),
        (128, 128, False, PrefillSm90Config(128, 2)),
        (192, 192, False, PrefillSm90Config(112, 2)),
        (192, 128, False, PrefillSm90Config(128, 2)),
        (256, 128, False, PrefillSm90Config(96, 2)),
        (64, 64, True, PrefillSm90Config(96, 3)),
        (192, 192, True, PrefillSm90Config(96, 2)),
        (256, 256, False, PrefillSm90Config(80, 2)),
        (256, 256, True, PrefillSm90Config(64, 2)),
    ):
        sizes = {"head_size": head_size, "value_size": value_size, "options": options}
        problem = _problem(4096, **sizes)
        assert choose(problem, HOPPER) == expected
        of_codes = _problem(4096, **sizes, cache_dtype="uint8")
        for served in (problem, of_codes) if of_codes.uses_wgmma else (problem,):
            chosen = choose(served, HOPPER)
            assert isinstance(chosen, PrefillSm90Config)
            for one in (chosen, *chosen.candidates(served, HOPPER)):
                found = launch(served, one)[0]
                assert found.shared + prefill_sm90._STATIC_BYTES <= HOPPER.shared_memory
                assert found.specialisation.constants["STAGES"] >= 2
    # A wave of splits of at least four KV tiles where there are fewer work items than SMs: 8 items of 16 tokens and one
    # key-value head, and 1024 keys.
    assert choose(_problem(64, 128), HOPPER) == PrefillSm90Config(128, 2, max_splits=2, splits=132)
    assert prefill_sm90.choose(_problem(64, 256), HOPPER) == PrefillSm90Config(64, 2, max_splits=4, splits=132)
    assert choose(_problem(1040, 128), HOPPER) == PrefillSm90Config(128, 2, max_splits=1)
    assert choose(_problem(4096, 128, cache_dtype="uint8", scales=2), HOPPER) == PrefillSm90Config(128, 2)
    # Decode attention takes all 70 sequences of one token, because empty work items cost time, too.
    assert choose(_problem(70, 128, num_seqs=70), HOPPER) == PrefillSm90Config(128, 2)
    for problem in (
        _problem(0, 128),
        _problem(4096, 124),
        _problem(4096, 264),
        _problem(4096, 128, block_size=20),
        _problem(4096, 128, dtype="float32"),
        _problem(4096, 128, cache_dtype="float8_e4m3fnuz"),
        _problem(4096, 256, cache_dtype="uint8", options=True),
        _problem(4096, 128, cache_dtype="uint8", options=True, scales=2),
        _problem(4096, 128, "sm_100"),
    ):
        assert isinstance(choose(problem, problem.query.device), PrefillMmaConfig)
    # TMA boxes of whole heads: head size and head stride are multiples of a panel, or two panels overlap.
    for head_size, apart, whole, row_bytes, pitch in (
        (128, 256, True, 128, 4),
        (128, 136, False, 128, 2),
        (96, 160, True, 64, 5),
        (96, 104, False, 128, 1),
        (80, 88, True, 128, 88),
        (72, 72, False, 128, 1),
        (144, 144, False, 128, 2),
    ):
        problem = _problem(4096, head_size, heads_apart=apart)
        found = launch(problem, choose(problem, HOPPER))[0]
        assert found.specialisation.constants["WHOLE_HEADS"] == whole
        assert found.fixed["key_map"].swizzle == found.fixed["query_map"].swizzle == row_bytes
        assert not whole or found.fixed["key_head_pitch"] == pitch
    # Sequences of five tokens leave most of 128 rows unused; those of 256 fill them.
    for num_tokens, blocks, tokens, consumers in ((1001, 9, 64, 1), (51200, 16, 128, 2)):
        problem = _problem(num_tokens, 128, num_seqs=200)
        tables = replace(problem.kv.block_tables, shape=(200, blocks), strides=(blocks, 1))
        problem = replace(problem, kv=replace(problem.kv, block_tables=tables))
        assert choose(problem, HOPPER) == PrefillSm90Config(tokens, consumers)
    # L2 fetches what a head has in one piece.
    for head_size, num_bytes in ((128, 256), (64, 128), (96, 64)):
        problem = _problem(4096, head_size)
        assert launch(problem, choose(problem, HOPPER))[0].fixed["key_map"].promotion == num_bytes
    # Sections of heads that fit in the L2 cache, but of at least two waves of work items.
    for tokens, slots, expected in ((8192, 1 << 20, 1), (8192, 32, 2), (256, 1 << 20, 2)):
        problem = _problem(tokens, 128, block_size=slots * 8)
        assert launch(problem, choose(problem, HOPPER))[0].fixed["section_heads"] == expected
    for wrong in (
        lambda: PrefillSm90Config(100, 2),
        lambda: PrefillSm90Config(272, 2),
        lambda: PrefillSm90Config(128, 4),
    ):
        with pytest.raises(ValueError, match="no geometry"):
            wrong()


def test_short_sequences_take_mma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows over few keys are one launch of prefill_mma.cu, also where there are sequences of one token; but not
    many rows, longer sequences, or where the batch must not matter.
    """

    def files(count: int, num_seqs: int, blocks: int, head_size: int = 128, **changes: Any) -> list[str]:
        problem = _problem(count, head_size, num_seqs=num_seqs, **changes)
        tables = replace(problem.kv.block_tables, shape=(num_seqs, blocks), strides=(blocks, 1))
        problem = replace(problem, kv=replace(problem.kv, block_tables=tables))
        launches = launch(problem, choose(problem, HOPPER))
        return [one.specialisation.kernel.file.removeprefix("attention/") for one in launches]

    for count, num_seqs, blocks, is_fp8 in ((1101, 100, 3, False), (555, 84, 2, True)):
        changes = {"cache_dtype": "uint8"} if is_fp8 else {}
        assert files(count, num_seqs, blocks, **changes) == ["prefill_mma.cu"]
        with monkeypatch.context() as patch:
            patch.setenv("PYOPS_BATCH_INVARIANT", "1")
            assert "prefill_mma.cu" not in files(count, num_seqs, blocks, **changes)
        assert "prefill_mma.cu" not in files(count, num_seqs, 9, **changes)
        assert "prefill_mma.cu" not in files(128 * num_seqs, num_seqs, 8, **changes)
    # Wide heads: where CTAs are few.
    for head_size in (192, 256):
        assert files(174, 38, 8, head_size) == ["prefill_mma.cu"]
        assert files(30 * 380, 380, 8, head_size) == ["prefill_sm90.cu"]


def test_choice_of_decode_attention() -> None:
    """Decode attention for the single-token sequences of a mixed batch, which prefill then skips; values are as long as
    keys there.
    """
    for num_tokens, changes, files in (
        (70 * 128 - 1, {"num_seqs": 70}, ["attention_decode.cu", "prefill_sm90.cu"]),
        (70, {"num_seqs": 70, "block_size": 20}, ["attention_decode.cu", "prefill_mma.cu"]),
        (70 * 128, {"num_seqs": 70}, ["prefill_sm90.cu"]),
        (65 * 100, {"num_seqs": 65}, ["prefill_sm90.cu"]),
        (70 * 100, {"num_seqs": 70, "value_size": 64}, ["prefill_sm90.cu"]),
        (70, {"num_seqs": 70, "dtype": "float32"}, ["attention_decode_simt.cu"]),
    ):
        problem = _problem(num_tokens, 128, **changes)
        launches = launch(problem, choose(problem, HOPPER))
        assert [one.specialisation.kernel.file for one in launches] == [f"attention/{name}" for name in files]
        assert len(files) == 1 or launches[-1].fixed["min_tokens"] == 2


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("sizes", "options", "codes", "splits"),
    few(
        [
            ((64, 64), False, True, False),
            ((128, 128), False, False, False),
            ((64, 64), True, True, True),
            ((128, 128), True, False, False),
            ((192, 192), True, False, False),
            ((256, 256), True, False, False),
            ((256, 256), True, False, True),
            ((256, 256), False, False, False),
            ((256, 256), False, True, False),
            ((256, 256), False, True, True),
            ((128, 128), False, False, True),
            ((256, 256), False, False, True),
            ((192, 128), False, False, False),
            ((192, 128), False, True, False),
            ((192, 128), False, False, True),
        ],
        2,
    ),
)
def test_compiles_without_spills_and_advice(sizes: tuple[int, int], options: bool, codes: bool, splits: bool) -> None:
    changes = {"cache_dtype": "uint8"} if codes else {}
    problem = _problem(64 if splits else 4096, sizes[0], value_size=sizes[1], options=options, **changes)
    one = launch(problem, prefill_sm90.choose(problem, HOPPER))[0].specialisation
    assert one.constants["HAS_SPLITS"] == splits
    report = offline.compile(one.kernel.file, str(one), one.text, "sm_90a")
    assert (report.spill_bytes, report.stack_bytes, report.advice) == (0, 0, ())
    assert report.shared_bytes <= prefill_sm90._STATIC_BYTES


@pytest.mark.parametrize(
    ("lengths", "num_heads", "page_size", "splits", "dtype"),
    few(
        [
            ([70, 129], 24, 16, 1, torch.bfloat16),
            ([65, 129], 20, 8, 1, torch.bfloat16),
            ([300, 129], 24, 5, 1, torch.bfloat16),
            ([65, 129], 128, 64, 1, torch.bfloat16),
            ([450, 65], 40, 48, 3, torch.bfloat16),
            ([330, 65, 0], 100, 128, 2, torch.float16),
        ],
        3,
    ),
)
def test_mla_decode(
    on: str, lengths: list[int], num_heads: int, page_size: int, splits: int, dtype: torch.dtype
) -> None:
    """TMA boxes of half a latent vector and of one panel, and no boxes; tiles and pairs of tiles with any end; direct
    results and combined ones."""
    first: Any = None
    one = mla_sm90.MlaSm90Config(1, max(len(lengths), splits), combines=False)
    MLA.forget()
    for schedule in _schedules(on, SCHEDULES if splits == 1 else SCHEDULES[:1]):
        call = mla_call(lengths, num_heads, page_size, dtype=dtype, num_kv_splits=splits, device=on)
        with schedule, tuning.forced(MLA.name, one):
            assert_is_mla(call)
        result = call["out"], call["lse"]
        first = first or result
        assert same_bits(first[0], result[0])
        assert same_bits(first[1], result[1])
    MLA.forget()


@pytest.mark.usefixtures("without_clusters")
@pytest.mark.parametrize(
    ("lengths", "num_heads", "page_size", "splits", "dtype", "kind"),
    [
        ([65, 129, 0], 70, 16, 1, torch.bfloat16, FP8),
        ([450], 70, 5, 3, torch.float16, FP8),
        ([65, 200, 0], 30, 8, 1, torch.bfloat16, FP8),
        ([450, 1], 17, 48, 3, torch.float16, FP8),
        ([65, 129, 0], 70, 64, 1, torch.bfloat16, torch.uint8),
        ([330], 40, 5, 2, torch.float16, torch.uint8),
        ([65, 129, 0], 16, 20, 1, torch.bfloat16, FP8),
        ([330], 11, 5, 2, torch.bfloat16, torch.uint8),
        ([193, 1], 7, 64, 1, torch.float16, torch.uint8),
        ([65, 130, 0], 16, 24, 1, torch.bfloat16, None),
    ],
)
def test_mla_decode_fp8(
    on: str,
    lengths: list[int],
    num_heads: int,
    page_size: int,
    splits: int,
    dtype: torch.dtype,
    kind: torch.dtype | None,
) -> None:
    """Slots without a token hold NaN. Queries of a head are 0, below float16's smallest number, or large; their scale
    varies within a query and between heads.
    """
    MLA.forget()
    for schedule in _schedules(on, SCHEDULES if splits == 1 else SCHEDULES[:1]):
        call = mla_call(lengths, num_heads, page_size, dtype=dtype, kind=kind, num_kv_splits=splits, device=on)
        for head, (of_nope, of_pe) in enumerate([(0.0, 0.0), (2.0**-14, 2.0**-14), (2.0**-9, 4.0), (1.0, 2.0**-12)]):
            call["q_nope"][:, head] *= of_nope
            call["q_pe"][:, head] *= of_pe
        if dtype == torch.bfloat16:
            call["q_nope"][:, 4:6] *= 2.0**-40
            call["q_pe"][:, 4] *= 2.0**-100
            call["q_nope"][:, 6], call["scale"] = 0.0, call["scale"] * 2.0**-4
            call["q_nope"][:, 6, 500] = 3e5
        shares = max(len(lengths), splits)
        one: mla_schedule.SharesConfig | None = None
        if num_heads > 16 and kind == FP8 and page_size % 8 == 0 and num_heads <= 32:
            one = mla_sm90_fp8.MlaSm90Fp8Config(32, shares, combines=False)
        elif num_heads > 16:  # two CTAs of heads share conversions of scaled fp8
            one = mla_sm90.MlaSm90Config(2 if kind == torch.uint8 and num_heads > 64 else 1, shares, combines=False)
        with schedule, tuning.forced(MLA.name, one) if one else nullcontext():
            assert_is_mla(call)
        if not one:
            few_heads = mla_small_h_fp8.CodesConfig if kind == FP8 else mla_small_h.FewHeadsConfig
            assert isinstance(tuning.last[MLA.name], few_heads)
    MLA.forget()


@pytest.mark.usefixtures("without_clusters")
@pytest.mark.parametrize(
    ("num_heads", "page_size", "dtype", "kind"),
    few(
        [
            (16, 16, torch.bfloat16, None),
            (7, 64, torch.float16, torch.uint8),
            (11, 5, torch.bfloat16, FP8),
            (20, 64, torch.bfloat16, None),
            (24, 8, torch.float16, None),
            (20, 20, torch.bfloat16, FP8),
            (70, 64, torch.bfloat16, torch.uint8),
        ],
        2,
    ),
)
@pytest.mark.parametrize(("num_shares", "combines"), [(3, False), (2, True), (3, True), (16, True)])
def test_mla_shares_of_mixed_lengths(
    on: str,
    num_heads: int,
    page_size: int,
    dtype: torch.dtype,
    kind: torch.dtype | None,
    num_shares: int,
    combines: bool,
) -> None:
    """Shares with several sequences, sequences of several shares, empty sequences at the ends of a share. Pieces are
    combined by another kernel, or by the kernel itself in any order of its blocks."""
    lengths = [0, 1, 300, 64, 129, 0, 520, 64, 0]
    call = mla_call(lengths, num_heads, page_size, dtype=dtype, kind=kind, device=on)
    MLA.forget()
    MLA.wrapper(**{name: value for name, value in call.items() if name != "plain"})
    forced = replace(tuning.last[MLA.name], num_shares=num_shares, combines=combines)
    schedules = SCHEDULES if num_shares == 3 and combines else SCHEDULES[:1]
    _assert_shares(on, call, forced, schedules)


@pytest.mark.parametrize(
    ("dtype", "num_heads", "num_shares", "combines", "factor"),
    [
        (torch.bfloat16, 20, 5, False, 20.0),
        (torch.bfloat16, 20, 12, True, 1.0),
        (FP8, 70, 5, False, 4.0),
        (FP8, 40, 12, True, 1.0),
        (FP8, 9, 4, True, 4.0),
    ],
    ids=str,
)
def test_mla_fp8_shares_of_mixed_lengths(
    on: str, dtype: torch.dtype, num_heads: int, num_shares: int, combines: bool, factor: float
) -> None:
    """Of the kernel with tokens as rows, which has pages that 8 divides: equal shares, and aligned ones. Large logits
    raise the row maxima in later tiles, too; small ones exceed the row max of the first tile."""
    kind = None if dtype == FP8 else FP8
    call = mla_call([0, 1, 300, 64, 129, 0, 520, 64, 0], num_heads, 16, dtype=dtype, kind=kind, device=on)
    call["scale"] *= factor
    one = mla_sm90_fp8.MlaSm90Fp8Config(64 if num_heads > 32 else 32, num_shares, combines)
    _assert_shares(on, call, one, few(SCHEDULES, 3))


@pytest.mark.parametrize(
    ("lengths", "num_heads", "page_size", "query_tokens"),
    [([65, 129, 0], 64, 64, 1), ([450, 3], 17, 8, 1), ([0, 1, 66, 130], 20, 48, 4), ([128], 130, 16, 1)],
    ids=str,
)
def test_mla_queries_of_fp8(
    on: str, lengths: list[int], num_heads: int, page_size: int, query_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MMAs of fp8, as the plan takes them for longer sequences: heads that fill a block and others, several query
    tokens."""
    monkeypatch.setattr(mla_problem, "_MAX_FEW_BLOCKS", 0)
    MLA.forget()
    call = mla_call(lengths, num_heads, page_size, dtype=FP8, device=on)
    call = with_tokens(call, query_tokens) if query_tokens > 1 else call
    assert_is_mla(call)
    assert isinstance(tuning.last[MLA.name], mla_sm90_fp8.MlaSm90Fp8Config)
    MLA.forget()


def test_mla_queries_of_fp8_and_other_caches(on: str) -> None:
    """Pages that 8 does not divide, and unaligned queries: kernels that convert queries to float16."""
    MLA.forget()
    call = mla_call([20, 70], 20, 5, dtype=FP8, device=on)
    assert_is_mla(dict(call))
    assert not isinstance(tuning.last[MLA.name], mla_sm90_fp8.MlaSm90Fp8Config)
    call = mla_call([20, 70], 20, 16, dtype=FP8, device=on)
    shifted = call["q_nope"].new_empty(call["q_nope"].numel() + 1)[1:].view(call["q_nope"].shape)
    assert_is_mla(call | {"q_nope": shifted.copy_(call["q_nope"])})
    assert not isinstance(tuning.last[MLA.name], mla_sm90_fp8.MlaSm90Fp8Config)
    MLA.forget()


@pytest.mark.parametrize(
    ("num_heads", "kind", "config"),
    [
        (10, None, mla_small_h.FewHeadsConfig(4, 2, False, 16, HEADS=4)),
        (20, torch.uint8, mla_small_h.FewHeadsConfig(2, 3, False, 2)),
        (20, FP8, mla_small_h_fp8.CodesConfig(2, False, 8)),
    ],
    ids=str,
)
def test_mla_clusters(on: str, num_heads: int, kind: torch.dtype | None, config: Any) -> None:
    """CTAs of a cluster split several sequences, also short ones that do not give each CTA a tile."""
    lengths = [0, 1, 300, 64, 530] if config.split_ctas < 16 else [1, 530]
    call = mla_call(lengths, num_heads, 8, dtype=torch.bfloat16, kind=kind, device=on)
    _assert_shares(on, call, config, few(SCHEDULES, 3))


def _assert_shares(on: str, call: dict[str, Any], forced: Any, schedules: Any) -> None:
    """The result is right, and has the same bits under all schedules."""
    first: Any = None
    for schedule in _schedules(on, schedules):
        for name in ("out", "lse"):
            call[name].fill_(torch.nan)
        MLA.forget()
        with tuning.forced(MLA.name, forced), schedule:
            assert_is_mla(dict(call))
        result = call["out"].clone(), call["lse"].clone()
        first = first or result
        assert same_bits(first[0], result[0])
        assert same_bits(first[1], result[1])
    MLA.forget()


def test_mla_shares_of_many_sequences(on: str) -> None:
    """More sequences than lanes of a warp; one is longer than the others together."""
    lengths = [(37 * i) % 29 for i in range(70)]
    lengths[37], lengths[38], lengths[69] = 1300, 0, 300
    MLA.forget()
    assert_is_mla(mla_call(lengths, 2, 64, kind=FP8, device=on))
    MLA.forget()


DIVISION = """
#include "attention/prefill_scheduler.cuh"
extern "C" __global__ void LAUNCH_BOUNDS(128, 1)
divide(int* found,                        // [most, 7]
       const length_t* seq_lens,          // [num_seqs]
       const starts_t* cu_seqlens_q,      // [num_seqs + 1]
       int64_t num_seqs, int64_t num_tokens, int64_t num_items, int64_t max_splits, int64_t sliding_window) {
    await_previous_kernel();
    __shared__ Division division;
    const Window window{int(sliding_window)};
    const Sequences sequences{cu_seqlens_q, seq_lens,  1,     1, num_seqs, num_tokens, 1, 100000, 2, 1,
                              max_splits,   num_items, &division};
    sequences.divide<1>(window);
    if (threadIdx.x >= WARP_SIZE) return;
    for (int number = 0; number < sequences.count(); ++number) {
        Work work;
        int origin, length;
        if (!sequences.find(number, window, work, origin, length) || threadIdx.x > 0) continue;
        int* const to = found + number * 7;
        to[0] = work.token;
        to[1] = work.head;
        to[2] = work.first_tile;
        to[3] = work.last_tile;
        to[4] = work.split;
        to[5] = work.splits;
        to[6] = division.split_tiles;
    }
}
"""


@pytest.mark.parametrize(
    ("new", "lengths", "splits", "max_splits", "window"),
    [
        ([3] * 10, [12759, 68543, 15107, 20092, 16442, 60000, 72072, 19675, 38896, 49913], 260, 52, 0),
        ([3] * 10, [50000] * 10, 260, 52, 0),
        ([3] * 10, [50000] * 10, 260, 9, 0),
        ([1] * 70, [(i * 7919) % 3000 + 1 for i in range(70)], 400, 99, 0),  # more sequences than lanes
        ([500, 1, 40], [2000, 70000, 9000], 64, 16, 0),  # several items of a sequence
        ([500, 1, 40], [2000, 70000, 9000], 64, 16, 4000),
        ([3000], [3000], 264, 16, 0),  # whole prompts: later items have more keys
        ([2000, 1, 0, 700, 90, 16], [2000, 900, 7, 700, 3000, 11], 528, 128, 0),
        ([2000, 700], [2000, 700], 300, 128, 300),
        ([90] * 20, [300] * 20, 10, 8, 0),  # more items than splits
        ([3, 3], [0, 5], 64, 16, 0),
    ],
)
def test_splits_are_of_equal_size(
    new: list[int], lengths: list[int], splits: int, max_splits: int, window: int
) -> None:
    """Every KV tile of every item is in one split; splits are as many as asked for or a few less, none is much longer,
    and without a window each number has one."""
    starts = numpy.concatenate([[0], numpy.cumsum(new)]).astype(numpy.int32)
    item_tokens, tile, heads = 16, 64, 2
    found = numpy.full((4 * splits + 2 * starts[-1] + 99, 7), -1, numpy.int32)
    launched(
        DIVISION,
        1,
        128,
        found=found,
        seq_lens=numpy.array(lengths, numpy.int32),
        cu_seqlens_q=starts,
        num_seqs=len(new),
        num_tokens=int(starts[-1]),
        num_items=splits,
        max_splits=max_splits,
        sliding_window=window or 2**31 - 1,
        length_t=dtypes.int32,
        starts_t=dtypes.int32,
        GROUP=4,
        PACKED_HEADS=4,
        CONSUMERS=1,
        TOKENS=tile,
        CAUSAL=True,
        RAGGED=False,
        HAS_SPLITS=True,
        HAS_STARTS=True,
    )
    works = [one for one in found.tolist() if one[0] >= 0]
    size, whole = works[0][6], []
    for count, length, start in zip(new, lengths, starts, strict=False):
        for token in range(0, count, item_tokens):
            limit = length - count + token
            last = max(limit + min(item_tokens, count - token) - 1, 0) // tile
            first = max(limit - window + 1, 0) // tile if window else 0
            whole.append(last - first + 1)
            for head in range(heads):
                own = [one for one in works if one[:2] == [start + token, 4 * head]]
                assert [one[4] for one in own] == list(range(len(own)))
                assert {one[5] for one in own} == {len(own)}
                assert len(own) <= max_splits
                assert [t for one in own for t in range(one[2], one[3] + 1)] == list(range(first, last + 1))
                sizes = [one[3] - one[2] + 1 for one in own]
                assert max(sizes) - min(sizes) <= 1
                assert max(sizes) <= max(size, 2 * 4 - 1) or len(own) == max_splits
    assert window or [one[0] >= 0 for one in found.tolist()] == [True] * len(works) + [False] * (
        len(found) - len(works)
    )
    assert len(works) <= max(splits, heads * len(whole))
    if size > 4 and max(whole) <= max_splits * size and len(whole) == len(new):
        assert 0.9 * splits < len(works)


MLA_ITEMS = """
#include "attention/mla_schedule.cuh"
extern "C" __global__ void LAUNCH_BOUNDS(32, 1)
items(int* found,           // [num_shares, 64, 5]
      const int64_t* seq_lens,  // [num_seqs]
      int64_t num_seqs, int64_t max_tokens, int64_t max_splits, float join_units, float level_units,
      int64_t item_units) {
    await_previous_kernel();
    MlaSchedule<64, int64_t, HAS_LENGTHS> schedule(seq_lens, 1, num_seqs, max_tokens, max_splits, join_units, 0.0f,
                                            level_units, item_units, gridDim.x, blockIdx.x);
    int* to = found + blockIdx.x * 64 * 5;
    for (; schedule.has_item(); schedule.next(), to += 5) {
        const MlaItem item = schedule.item();
        if (threadIdx.x == 0) {
            to[0] = item.seq;
            to[1] = item.begin;
            to[2] = item.end;
            to[3] = item.slot;
            to[4] = item.pieces;
        }
    }
}
"""


@pytest.mark.parametrize(
    ("lengths", "num_shares", "max_splits"),
    [
        ([64 * 10] * 6, 5, 9999),  # shares end within units of sequences
        ([64 * 10] * 6, 12, 9999),  # each sequence has two whole shares
        ([64 * 10] * 6, 23, 9999),  # three shares of four units for each, or equal ones of three
        ([64 * 10, 0, 65, 1], 6, 9999),
        ([1, 0, 5000, 64, 65, -7, 2**62, 0], 7, 9999),
        ([1, 0, 5000, 64, 65, -7, 2**62, 0], 7, 2),
        ([1, 0, 5000, 64, 65, -7, 2**62, 0], 7, 3),
        ([0, 0, 0], 9, 9999),
        ([(i * 7919) % 3000 for i in range(150)], 66, 9999),
        ([(i * 7919) % 3000 for i in range(150)], 66, 1),
        ([100000], 132, 9999),
        ([100000], 132, 5),
    ],
)
@pytest.mark.parametrize("item_units", [0, 2])
def test_mla_schedule(lengths: list[int], num_shares: int, max_splits: int, item_units: int) -> None:
    """Items cover every token once, and the slots of partial results are what the combine reads. Shares are equal with
    the time of their items, or a CTA has one item, where that takes no longer."""
    max_tokens = 100000
    found = numpy.full((num_shares, 64, 5), -1, numpy.int32)
    launched(
        MLA_ITEMS,
        num_shares,
        32,
        found=found,
        seq_lens=numpy.array(lengths, numpy.int64),
        num_seqs=len(lengths),
        max_tokens=max_tokens,
        max_splits=max_splits,
        join_units=0.0,
        level_units=0.0,
        item_units=item_units,
        HAS_LENGTHS=True,
    )
    shares = [[tuple(item) for item in share.tolist() if item[0] >= 0] for share in found]
    exact = [min(max(length, 0), max_tokens) for length in lengths]
    units = [max(1, -(-length // 64)) for length in exact]
    slots = []
    for seq, length in enumerate(exact):
        items = [item for share in shares for item in share if item[0] == seq]
        assert items[0][1] == 0
        assert items[-1][2] == length
        assert all(one[2] == other[1] and one[2] % 64 == 0 for one, other in pairwise(items))
        assert {item[4] for item in items} == {len(items)}
        assert len(items) <= max_splits
        if len(items) > 1:
            first = items[0][3]
            assert [item[3] for item in items] == [first, *((first // 2 + i) * 2 for i in range(1, len(items)))]
            slots += [item[3] for item in items]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < 2 * num_shares for slot in slots)
    if max_splits > len(lengths) + num_shares:
        equal = -(-(sum(units) + item_units * len(units)) // num_shares)
        fitting = (size for size in range(1, equal + 1) if sum(-(-one // size) for one in units) <= num_shares)
        own = next(fitting, None)
        of_items = [[max(1, -(-(end - begin) // 64)) for _, begin, end, *_ in share] for share in shares]
        largest = max(sum(share) + item_units * max(len(share) - 1, 0) for share in of_items)
        if own:
            assert largest == min(own, max(units))
            assert max(map(len, shares)) == 1
        else:  # a share may end within a gap
            assert equal - max(item_units - 1, 0) <= largest <= equal


@pytest.mark.parametrize(
    ("num_seqs", "length", "num_shares", "max_splits"),
    [(6, 640, 5, 9999), (6, 640, 12, 9999), (6, 640, 23, 9999), (70, 100, 9, 9999), (7, 0, 3, 9999), (7, 5000, 3, 2)],
)
@pytest.mark.parametrize("item_units", [0, 2])
def test_mla_schedule_without_lengths(
    num_seqs: int, length: int, num_shares: int, max_splits: int, item_units: int
) -> None:
    """The items are those of equal lengths that are given."""
    both = []
    for has_lengths in (True, False):
        found = numpy.full((num_shares, 64, 5), -1, numpy.int32)
        launched(
            MLA_ITEMS,
            num_shares,
            32,
            found=found,
            seq_lens=numpy.full(num_seqs, length, numpy.int64),
            num_seqs=num_seqs,
            max_tokens=length,
            max_splits=max_splits,
            join_units=0.0,
            level_units=0.0,
            item_units=item_units,
            HAS_LENGTHS=has_lengths,
        )
        both.append(found)
    assert (both[0] >= 0).any()
    assert numpy.array_equal(*both)


@pytest.mark.parametrize(
    ("join_units", "level_units", "item_units", "is_cut"),
    [
        (6.0, 0.0, 0, True),
        (7.0, 0.0, 0, False),
        (5.0, 1.0, 0, True),
        (6.0, 1.0, 0, False),
        (6.5, 0.0, 1, True),
        (7.0, 0.0, 1, False),
    ],
)
def test_mla_cuts_where_a_combine_pays(join_units: float, level_units: float, item_units: int, is_cut: bool) -> None:
    """Whole sequences take two rounds of at most 10 units and one more item, equal shares 13 units, 14 with
    items, and the combine, a tree of one level."""
    found = numpy.full((3, 64, 5), -1, numpy.int32)
    lengths = numpy.array([640, 500, 640, 600], numpy.int64)
    arguments: dict[str, Any] = {"num_seqs": 4, "max_tokens": 999, "max_splits": 99}
    arguments |= {"join_units": join_units, "level_units": level_units, "item_units": item_units}
    launched(MLA_ITEMS, 3, 32, found=found, HAS_LENGTHS=True, seq_lens=lengths, **arguments)
    assert ((found[..., 4] > 1).any()) == is_cut
    if not is_cut:
        assert [[item[0] for item in share.tolist() if item[0] >= 0] for share in found] == [[0, 3], [1], [2]]


@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "tokens", "page_size", "grid", "combines"),
    [
        (64, 128, 4096, 64, (2, 66, 1), True),
        (64, 24, 4096, 16, (1, 132, 1), True),
        (1, 128, 8192, 64, (2, 64, 1), False),
        (1, 128, 32768, 64, (2, 66, 1), False),
        (1, 24, 32768, 8, (1, 132, 1), False),
        (300, 128, 128, 64, (2, 66, 1), False),
    ],
)
def test_mla_choice_of_shares(
    num_seqs: int, num_heads: int, tokens: int, page_size: int, grid: tuple[int, int, int], combines: bool
) -> None:
    """A block on each SM, but no shares of less than a pair of tiles; whole sequences if none may be cut. Blocks
    combine few large pieces of each sequence, mla_combine.cu many pieces, or small ones."""
    make = ArgMaker(HOPPER)
    out, pe = (make.empty(num_seqs, num_heads, size, dtype="bfloat16") for size in (512, 64))
    cache = make.empty(9, page_size, 576, dtype="bfloat16")
    indices = make.empty(num_seqs, dtype="int32"), make.empty(num_seqs, tokens // page_size, dtype="int32")
    first, *combine = MLA.launches(out, None, out, pe, cache, *indices, None, 0.1, 0)
    assert first.grid == grid
    assert len(combine) == (num_seqs < 300 and not combines)
    assert first.specialisation.constants["COMBINES"] == combines
    assert first.specialisation.constants["HALF_BOXES"] == (page_size < 64)


@pytest.mark.parametrize(("num_heads", "kind"), [(16, None), (20, None), (17, FP8)], ids=str)
def test_mla_missing_pages(on: str, num_heads: int, kind: torch.dtype | None) -> None:
    """A sequence attends to the tokens that it has; without any, the result is zeros."""
    call = mla_call([196, 40], num_heads, kind=kind, device=on)
    entries = call["plain"][0]
    call["page_table"][0, 1] = -1
    call["page_table"][0, 4] = len(call["kv_c_and_k_pe_cache"])
    call["page_table"][1] = 2**31 - 1
    call["plain"] = [torch.cat((entries[:16], entries[32:64], entries[80:])), entries[:0]]
    assert_is_mla(call)
    assert (call["out"][1] == 0).all()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("cluster", "cache_t", "box_tokens", "is_ds_mla"),
    few(
        [
            (2, dtypes.float8_e4m3fn, 1, True),
            (1, dtypes.float8_e4m3fn, 1, True),
            (1, dtypes.float8_e4m3fn, 1, False),
            (1, dtypes.bfloat16, 1, False),
            (1, dtypes.bfloat16, 16, False),
            (1, dtypes.bfloat16, 64, False),
        ],
        2,
    ),
)
def test_mla_compiles_without_spills_and_advice(
    cluster: int, cache_t: dtypes.DType, box_tokens: int, is_ds_mla: bool
) -> None:
    one = mla_sm90._decode.for_arch("sm_90a")(
        query_t=dtypes.bfloat16,
        cache_t=cache_t,
        out_t=dtypes.bfloat16,
        length_t=dtypes.int32,
        table_t=dtypes.int32,
        PAGE_SIZE=64,
        LISTS_SLOTS=box_tokens == 1,
        HAS_LENGTHS=True,
        BOX_TOKENS=box_tokens,
        CLUSTER=cluster,
        HALF_BOXES=box_tokens == 16,
        HAS_LSE=True,
        COMBINES=True,
        IS_DS_MLA=is_ds_mla,
        QUERY_TOKENS=4 if box_tokens == 64 or (box_tokens == 1 and not is_ds_mla) else 1,
    )
    report = offline.compile(one.kernel.file, str(one), one.text, "sm_90a")
    assert (report.spill_bytes, report.stack_bytes, report.advice) == (0, 0, ())
    assert report.shared_bytes + mla_sm90._SHARED_BYTES <= HOPPER.shared_memory


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("query_t", "heads", "query_tokens", "combines"),
    [
        (dtypes.bfloat16, 32, 1, True),
        (dtypes.bfloat16, 32, 4, False),
        (dtypes.bfloat16, 32, 4, True),
        (dtypes.float8_e4m3fn, 32, 4, True),
        (dtypes.float8_e4m3fn, 64, 1, True),
        (dtypes.float8_e4m3fn, 64, 4, False),
        (dtypes.float8_e4m3fn, 64, 4, True),
    ],
    ids=str,
)
def test_mla_fp8_compiles_without_spills(query_t: dtypes.DType, heads: int, query_tokens: int, combines: bool) -> None:
    one = mla_sm90_fp8._decode.for_arch("sm_90a")(
        query_t=query_t,
        HEADS=heads,
        cache_t=dtypes.float8_e4m3fn,
        out_t=dtypes.bfloat16,
        length_t=dtypes.int32,
        table_t=dtypes.int32,
        PAGE_SIZE=64,
        LISTS_SLOTS=False,
        HAS_LENGTHS=True,
        BOX_TOKENS=64 // query_tokens,
        HAS_LSE=True,
        COMBINES=combines,
        IS_DS_MLA=False,
        QUERY_TOKENS=query_tokens,
    )
    report = offline.compile(one.kernel.file, str(one), one.text, "sm_90a")
    assert (report.spill_bytes, report.stack_bytes, report.advice) == (0, 0, ())
    assert (
        report.shared_bytes + mla_sm90_fp8.shared_memory(heads, query_t is not dtypes.bfloat16) <= HOPPER.shared_memory
    )


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("kernel", "query_t", "cache_t", "is_ds_mla", "split_ctas"),
    few(
        [
            (mla_small_h._decode, dtypes.bfloat16, dtypes.float8_e4m3fn, True, 1),
            (mla_small_h._decode, dtypes.bfloat16, dtypes.bfloat16, False, 1),
            (mla_small_h._decode, dtypes.bfloat16, dtypes.bfloat16, False, 16),
            (mla_small_h_fp8._decode, dtypes.bfloat16, dtypes.float8_e4m3fn, False, 16),
            (mla_small_h_fp8._decode, dtypes.float8_e4m3fn, dtypes.float8_e4m3fn, False, 16),
        ],
        2,
    ),
)
def test_mla_small_h_compiles_without_spills(
    kernel: Kernel, query_t: dtypes.DType, cache_t: dtypes.DType, is_ds_mla: bool, split_ctas: int
) -> None:
    groups = 4 if is_ds_mla or split_ctas > 1 else 1
    one = kernel(
        query_t=query_t,
        cache_t=cache_t,
        out_t=dtypes.bfloat16,
        length_t=dtypes.int32,
        table_t=dtypes.int32,
        PAGE_SIZE=64,
        LISTS_SLOTS=False,
        HAS_LENGTHS=True,
        HAS_LSE=True,
        COMBINES=split_ctas == 1,
        CLUSTER=split_ctas,
        IS_DS_MLA=is_ds_mla,
        QUERY_TOKENS=1 if is_ds_mla else 4,
        **({} if kernel is mla_small_h_fp8._decode else {"GROUPS": groups, "COPY_TOKENS": 16, "CTA_HEADS": 16}),
    )
    report = offline.compile(one.kernel.file, str(one), one.text, "sm_90")
    assert (report.spill_bytes, report.stack_bytes) == (0, 0)
