"""Decode attention, and few query tokens per sequence, by the prefill kernels. Their rows are query tokens and the
query heads of a key-value head. Against float64 attention, under every schedule; and when plans choose them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from pyops import offline, tuning
from pyops._core import config
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops.example import ArgMaker
from pyops.ops.attention import prefill_mma, prefill_sm90
from pyops.ops.attention.prefill_mma import PrefillMmaConfig
from pyops.ops.attention.prefill_plan import choose, launch
from pyops.ops.attention.prefill_sm90 import PrefillSm90Config
from pyops.testing import SCHEDULES, same_bits, scheduled
from tests.every_op.test_nvrtc import MISSING
from tests.ops.attention.test_attention import V1, in_codes_of_heads, paged_call
from tests.ops.attention.test_hopper import _in_codes as over_fp8
from tests.ops.attention.test_hopper import _problem, _varlen
from tests.ops.attention.test_varlen import VARLEN, reference
from tests.ops.attention.test_varlen import _assert_is_attention as assert_is_varlen
from tests.ops.attention.test_varlen import _call as varlen_call
from tests.support.profiles import few

pytestmark = pytest.mark.rotates

# Lengths around multiples of 16-token blocks and of KV tiles; an empty sequence; one of a single token.
LENGTHS = [0, 1, 63, 129, 400]
# Errors of results near 1: rounding to the type of the queries; with an fp8 cache also weights rounded to float16.
RTOL = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.fixture(params=["sm_90", "sm_80"], autouse=True)
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The host backend runs kernels for this architecture, with few SMs, so that a CTA has several work items."""
    cluster = 8 if request.param == "sm_90" else 1
    monkeypatch.setitem(device._HOST, 32, replace(device.host(), arch=request.param, num_sms=2, cluster=cluster))
    with config.cpu("kernels"):
        yield str(request.param)


def _on(arch: str, one: PrefillSm90Config) -> Any:
    """The geometry on this architecture: rows and splits of prefill_mma.cu are those of prefill_sm90.cu on sm_80."""
    return one if arch == "sm_90" else PrefillMmaConfig(4, one.consumers, 32, 2, one.max_splits)


def _assert_is_decode(one: Any, schedules: Any, bias: Any = None, **call: Any) -> None:
    """Results and log-sum-exps match float64 attention, with the same bits under these schedules.

    `one` is a config, or a class of the configs that plans choose.
    """
    plain, dtype = call.pop("plain"), call["query"].dtype
    call["lse"] = torch.zeros(call["out"].shape[1::-1])
    first: Any = None
    V1.forget()
    for schedule in schedules:
        with nullcontext() if isinstance(one, type) else tuning.forced(V1.name, one), scheduled(schedule):
            V1.wrapper(**call)
        assert isinstance(tuning.last[V1.name], one if isinstance(one, type) else type(one))
        result = [call["out"].clone(), call["lse"].clone()]
        first = first or result
        assert all(same_bits(*pair) for pair in zip(first, result, strict=True))
    V1.forget()
    weight = 2.0**-10 if call["kv_cache_dtype"] != "auto" else 2.0**-15
    for s, (keys, values) in enumerate(plain):
        sinks = call.get("sinks")
        right, log_sum = reference(call["query"][s : s + 1], keys, values, call, bias)
        if sinks is not None:
            with_sink = torch.logaddexp(log_sum[:, 0], sinks.double())
            right = right * (log_sum[:, 0] - with_sink).exp()[None, :, None]
            log_sum = with_sink[:, None]
        largest = float(values.double().abs().max()) if len(values) else 0.0
        torch.testing.assert_close(
            call["out"][s].double(), right[0], rtol=RTOL[dtype], atol=4 * weight * max(1.0, largest)
        )
        torch.testing.assert_close(call["lse"][:, s].double(), log_sum[:, 0], rtol=1e-5, atol=2e-5)


# (geometry, heads, head size, block size, dtype)
GEOMETRIES = [
    (PrefillSm90Config(128, 2, max_splits=3), (71, 1), 64, 16, torch.bfloat16),
    (PrefillSm90Config(64, 1, max_splits=2), (48, 1), 128, 16, torch.bfloat16),
    (PrefillSm90Config(64, 1), (40, 2), 128, 32, torch.float16),
    (PrefillSm90Config(64, 1, max_splits=2, alone=True), (18, 1), 256, 16, torch.bfloat16),
    (PrefillSm90Config(64, 2), (128, 1), 128, 8, torch.float16),
    (PrefillSm90Config(96, 1, max_splits=4), (9, 1), 80, 16, torch.bfloat16),
]


@pytest.mark.parametrize(("one", "heads", "head_size", "block_size", "dtype"), few(GEOMETRIES, 4), ids=str)
def test_decode(
    arch: str, one: Any, heads: tuple[int, int], head_size: int, block_size: int, dtype: torch.dtype
) -> None:
    call = paged_call(LENGTHS, heads, head_size=head_size, block_size=block_size, dtype=dtype)
    _assert_is_decode(_on(arch, one), SCHEDULES, **call)


@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
def test_options(arch: str, is_fp8: bool) -> None:
    """Each option alone, and all of them; blocks with invalid numbers."""
    heads = 20
    call = paged_call(LENGTHS, (heads, 1), head_size=64, dtype=torch.bfloat16)
    call = over_fp8(call) if is_fp8 else call
    slopes = torch.linspace(-0.1, 0.4, heads)
    one = _on(arch, PrefillSm90Config(64, 1, max_splits=2))
    for options in (
        {"sliding_window": 70},
        {"logits_soft_cap": 3.0, "scale": 0.5},
        {"sinks": torch.linspace(-2.0, 3.0, heads)},
        {"alibi_slopes": slopes},
        {"sliding_window": 90, "logits_soft_cap": 20.0, "sinks": torch.ones(heads), "alibi_slopes": slopes},
    ):
        _assert_is_decode(one, SCHEDULES[:1], options.get("alibi_slopes"), **call | options)
    table = call["block_tables"].clone()
    table[3, 2], table[4, 7] = -1, 10**6
    plain = list(call["plain"])
    for s, block in ((3, 2), (4, 7)):
        kept = torch.cat([torch.arange(block * 16), torch.arange(block * 16 + 16, LENGTHS[s])])
        plain[s] = [x[kept] for x in plain[s]]
    _assert_is_decode(one, SCHEDULES[:1], **call | {"block_tables": table, "plain": plain})


# (heads, head size, block size, dtype)
SHORT = [
    ((35, 1), 64, 8, torch.bfloat16),
    ((142, 2), 64, 16, torch.float16),
    ((48, 2), 128, 16, torch.bfloat16),
    ((20, 1), 80, 16, torch.bfloat16),
    ((18, 1), 192, 32, torch.float16),
]


@pytest.mark.parametrize("is_fp8", [False, True], ids=["16-bit", "fp8"])
@pytest.mark.parametrize(("heads", "head_size", "block_size", "dtype"), few(SHORT, 3), ids=str)
def test_short_sequences(
    arch: str,
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    is_fp8: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CTAs of prefill_mma.cu with all heads of a key-value head, in one tile or two, as exact as decode attention."""
    if arch != "sm_90":
        pytest.skip("on other GPUs test_decode has these tiles")
    monkeypatch.setattr(prefill_mma, "us_of_short", lambda *_, **__: 0.0)
    call = paged_call([0, 1, 32, 63, 128], heads, head_size=head_size, block_size=block_size, dtype=dtype)
    _assert_is_decode(PrefillMmaConfig, SCHEDULES, **over_fp8(call) if is_fp8 else call)
    options = {"sliding_window": 40, "sinks": torch.linspace(-2.0, 3.0, heads[0])}
    _assert_is_decode(PrefillMmaConfig, SCHEDULES[:1], **call | options)


def test_scales_of_heads(arch: str) -> None:
    plain = paged_call(LENGTHS, (40, 2), head_size=64, dtype=torch.bfloat16)
    call = in_codes_of_heads(plain, [0.25, 1.0], [3.0, -0.5])
    _assert_is_decode(_on(arch, PrefillSm90Config(64, 1, max_splits=2)), SCHEDULES[:1], **call)


# (query tokens of each sequence, geometry, heads, head size, causal)
FEW_TOKENS = [
    (4, PrefillSm90Config(64, 1, max_splits=2), (8, 2), 128, True),
    (8, PrefillSm90Config(64, 1), (8, 2), 64, True),
    (3, PrefillSm90Config(48, 1, max_splits=3), (5, 1), 192, False),
    (16, PrefillSm90Config(64, 1, max_splits=2), (4, 1), 64, True),
]


@pytest.mark.parametrize(("count", "one", "heads", "head_size", "causal"), few(FEW_TOKENS, 2), ids=str)
def test_few_query_tokens(
    arch: str, count: int, one: Any, heads: tuple[int, int], head_size: int, causal: bool
) -> None:
    """Several query tokens of each sequence, as in speculative decoding."""
    lengths = [count, 63 + count, 130, 600]
    call = varlen_call([count] * 4, lengths, heads, dtype=torch.bfloat16, head_size=head_size)
    _varlen(_on(arch, one), SCHEDULES, **call | {"causal": causal, "sliding_window": 0 if count % 2 else 530})


def test_few_query_tokens_over_fp8(arch: str) -> None:
    call = varlen_call([5, 5, 2], [90, 300, 2], (6, 2), dtype=torch.bfloat16, head_size=128)
    _varlen(_on(arch, PrefillSm90Config(64, 1, max_splits=2)), SCHEDULES[:2], **over_fp8(call))


def test_counts_that_only_look_equal() -> None:
    """As many query tokens as if each sequence had three; the plan's guess changes no result."""
    call = varlen_call([1, 7, 4, 0], [50, 300, 4, 9], (8, 2), dtype=torch.bfloat16, head_size=64)
    call["lse"] = torch.zeros(8, 12)
    VARLEN.forget()
    assert_is_varlen(call)
    VARLEN.forget()


# (device, op, axes of its example, the kernel of its first launch, consumers or row tiles)
CHOICES = [
    ("sm_90", V1, {"num_heads": 71, "num_kv_heads": 1, "head_size": 64}, "prefill_sm90", 2),
    ("sm_90", V1, {"num_heads": 48, "num_kv_heads": 1}, "prefill_sm90", 1),
    ("sm_90", V1, {"num_heads": 48, "num_kv_heads": 1, "kv_cache_dtype": "fp8"}, "prefill_sm90", 1),
    ("sm_90", V1, {"num_heads": 12, "num_kv_heads": 1, "head_size": 256}, "attention_decode", 0),
    (
        "sm_90",
        V1,
        {"num_tokens": 44, "max_seq_len": 1398, "num_heads": 24, "num_kv_heads": 1, "kv_cache_dtype": "fp8"},
        "attention_decode",
        0,
    ),
    ("sm_90", V1, {"num_heads": 128, "num_kv_heads": 1, "head_size": 256}, "prefill_sm90", 2),
    ("sm_90", V1, {"num_heads": 48, "num_kv_heads": 1, "head_size": 256}, "prefill_sm90", 1),
    ("sm_90", V1, {"num_heads": 48, "num_kv_heads": 1, "packed": True}, "prefill_mma", 1),
    ("sm_90", V1, {"num_heads": 48, "num_kv_heads": 4}, "attention_decode", 0),
    ("sm_90", V1, {"num_heads": 48, "num_kv_heads": 1, "max_seq_len": 64}, "attention_decode", 0),
    ("sm_90", V1, {"num_heads": 129, "num_kv_heads": 1}, "attention_decode", 0),
    ("sm_80", V1, {"num_heads": 71, "num_kv_heads": 1, "head_size": 64}, "prefill_mma", 2),
    ("sm_80", V1, {"num_heads": 48, "num_kv_heads": 1, "head_size": 256}, "prefill_mma", 1),
    ("sm_100", V1, {"num_heads": 48, "num_kv_heads": 1, "kv_cache_dtype": "fp8"}, "prefill_mma", 1),
    ("gfx942", V1, {"num_heads": 48, "num_kv_heads": 1}, "attention_decode", 0),
]


@pytest.mark.parametrize(
    ("on", "op", "axes", "kernel", "tiles"), CHOICES, ids=lambda one: one.name if isinstance(one, Op) else str(one)
)
def test_choice(on: str, op: Op, axes: dict[str, Any], kernel: str, tiles: int) -> None:
    """Prefill kernels where CTAs of attention_decode.cu would read a large cache several times; registers suffice."""
    assert op.example is not None
    launches = op.launches(*op.example(ArgMaker(device.model(on)), **{"num_tokens": 17, "max_seq_len": 5000} | axes))
    one = launches[0].specialisation
    assert one.kernel.file == f"attention/{kernel}.cu"
    found = tuning.last[op.name]
    assert tiles == getattr(found, "consumers", getattr(found, "row_tiles", 0))
    if kernel != "attention_decode":
        assert found.max_splits > 1
    if MISSING is None and on.startswith("sm"):
        for one in (launch.specialisation for launch in launches):
            report = offline.compile(one.kernel.file, str(one), one.text, on, one.kernel.options)
            assert (report.spill_bytes, report.stack_bytes, report.advice) == (0, 0, ())


# (sequences, tokens of a table, heads, head size, cache) -> KV tiles in shared memory; 0: attention_decode.cu
SHORT_CHOICES = [
    (245, 28, (35, 1), 64, "auto", 2),
    (256, 64, (71, 1), 64, "auto", 2),
    (100, 30, (48, 2), 128, "auto", 2),
    (256, 30, (48, 2), 128, "auto", 0),
    (100, 30, (48, 2), 128, "fp8", 2),
    (44, 100, (24, 1), 128, "fp8", 0),
    (245, 28, (16, 1), 64, "auto", 0),
    (245, 300, (35, 1), 64, "auto", 0),
]


@pytest.mark.parametrize(("num_seqs", "tokens", "heads", "head_size", "cache", "stages"), SHORT_CHOICES, ids=str)
def test_choice_of_short_sequences(
    num_seqs: int, tokens: int, heads: tuple[int, int], head_size: int, cache: str, stages: int
) -> None:
    """One CTA of prefill_mma.cu for each short sequence, without numbers of tiles that are empty; registers suffice."""
    axes = {"num_tokens": num_seqs, "max_seq_len": tokens, "num_heads": heads[0], "num_kv_heads": heads[1]}
    axes |= {"head_size": head_size, "kv_cache_dtype": cache}
    assert V1.example is not None
    launch, *rest = V1.launches(*V1.example(ArgMaker(device.model("sm_90")), **axes))
    found = tuning.last[V1.name]
    assert isinstance(found, PrefillMmaConfig) == (stages > 0)
    if not stages:
        return
    one = launch.specialisation
    assert (rest, found.stages, one.constants["P_HI_LO"], one.constants["HAS_STARTS"]) == ([], stages, True, False)
    assert launch.grid[:2] == (num_seqs * -(-heads[0] // heads[1] // 64), heads[1])
    if MISSING is None:
        report = offline.compile(one.kernel.file, str(one), one.text, "sm_90", one.kernel.options)
        assert (report.spill_bytes, report.stack_bytes) == (0, 0)


def test_few_rows_choose_two_ctas_per_sm() -> None:
    """Rows of one warpgroup; splits where work items would leave CTAs idle; more rows take two warpgroups."""
    hopper = device.model("sm_90")
    for num_seqs, count, expected in (
        (256, 4, PrefillSm90Config(64, 1)),
        (256, 8, PrefillSm90Config(64, 1)),
        (64, 8, PrefillSm90Config(64, 1, max_splits=4, splits=256)),
        (64, 16, PrefillSm90Config(128, 2)),
    ):
        problem = _problem(num_seqs * count, 128, num_seqs=num_seqs)
        assert choose(problem, hopper) == expected
        found = launch(problem, expected)[0]
        ctas = found.specialisation.constants["MIN_BLOCKS"]
        assert ctas == 3 - expected.consumers
        # Static shared memory, and 1 KB for the system, in each CTA; an SM has 1 KB more than a CTA may ask for.
        assert ctas * (found.shared + prefill_sm90._STATIC_BYTES + 1024) <= hopper.shared_memory + 1024
