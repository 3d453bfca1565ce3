"""attention_varlen: attention of ragged keys and values, by every kernel that serves it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyops
from pyops import offline, tuning
from pyops._core import config
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops.example import ArgMaker
from pyops.ops.attention import prefill_sm90
from pyops.ops.attention.arguments import Options, RaggedKV
from pyops.ops.attention.prefill_mma import PrefillMmaConfig
from pyops.ops.attention.prefill_plan import choose, launch
from pyops.ops.attention.prefill_problem import PrefillProblem, check_ragged
from pyops.ops.attention.prefill_sm90 import PrefillSm90Config
from pyops.testing import SCHEDULES, assert_matches_reference, same_bits, strategies
from tests.every_op.test_nvrtc import MISSING
from tests.ops.attention.test_hopper import HOPPER, _schedules
from tests.ops.attention.test_varlen import TOLERANCE, reference
from tests.support.calls import DEVICES, KERNELS, Host
from tests.support.profiles import few

pytestmark = pytest.mark.rotates

RAGGED = pyops.registry["attention_varlen"]
PAGED = pyops.registry["paged_attention_varlen"]


@pytest.fixture(params=DEVICES)
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each device by name; the host runs the kernels for compute capability 8.0."""
    monkeypatch.setitem(device._HOST, 32, replace(device.host(), arch="sm_80", num_sms=108, cluster=1))
    with config.cpu("kernels" if isinstance(request.param, Host) else "reference"):
        yield str(request.param)


@pytest.fixture(params=KERNELS)
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The host backend and, on Hopper, the GPU. The host gets few SMs, so that a CTA has several work items."""
    if request.param == "cuda" and not device.get(0).supports("wgmma"):
        pytest.skip("no Hopper")
    monkeypatch.setitem(device._HOST, 32, replace(device.host(), num_sms=2))
    with config.cpu("kernels"):
        yield str(request.param)


def _starts(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def _call(
    counts: list[int],
    lengths: list[int],
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.bfloat16,
    on: str = "cpu",
) -> dict[str, Any]:
    """Sequences with these numbers of queries and keys. Keys and values are slices of the rows of one tensor."""
    generator = torch.Generator().manual_seed(sum(lengths) + sizes[0])
    query = torch.randn(sum(counts), heads[0], sizes[0], generator=generator).to(dtype).to(on)
    both = torch.randn(sum(lengths), heads[1], sum(sizes), generator=generator).to(dtype).to(on)
    key, value = both.split(list(sizes), -1)
    return {
        "out": torch.full((sum(counts), heads[0], sizes[1]), torch.nan, dtype=dtype, device=on),
        "query": query,
        "key": key,
        "value": value,
        "cu_seqlens_q": _starts(counts).to(on),
        "cu_seqlens_k": _starts(lengths).to(on),
        "scale": sizes[0] ** -0.5,
        "lse": torch.full((heads[0], sum(counts)), torch.nan, device=on),
    }


def _assert_is_attention(call: dict[str, Any], bias: Any = None) -> None:
    RAGGED.wrapper(**call)
    tolerance = TOLERANCE[call["query"].dtype]
    starts, key_starts = call["cu_seqlens_q"].tolist(), call["cu_seqlens_k"].tolist()
    for s in range(len(starts) - 1):
        rows, tokens = slice(*starts[s : s + 2]), slice(*key_starts[s : s + 2])
        right, log_sum = reference(call["query"][rows], call["key"][tokens], call["value"][tokens], call, bias)
        torch.testing.assert_close(call["out"][rows].double().cpu(), right, rtol=tolerance, atol=tolerance)
        if call["lse"] is not None:
            torch.testing.assert_close(call["lse"][:, rows].double().cpu(), log_sum, rtol=1e-5, atol=2e-5)


def _by_wgmma(one: PrefillSm90Config, schedules: Any = SCHEDULES[:1], bias: Any = None, **call: Any) -> None:
    """With this config the call matches float64 attention, with the same bits under these schedules."""
    first: Any = None
    RAGGED.forget()
    with tuning.forced(RAGGED.name, one):
        for schedule in _schedules(call["out"].device.type, schedules):
            with schedule:
                _assert_is_attention(dict(call), bias)
            result = [call[name].clone() for name in ("out", "lse") if call[name] is not None]
            first = first or result
            assert all(same_bits(*pair) for pair in zip(first, result, strict=True))
    RAGGED.forget()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_matches_float64_attention(on: str, dtype: torch.dtype, causal: bool) -> None:
    """Whole sequences, the ends of some, single tokens, keys without queries, and empty sequences."""
    _assert_is_attention(_call([70, 0, 1, 0, 33], [70, 9, 40, 0, 90], dtype=dtype, on=on) | {"causal": causal})


@pytest.mark.parametrize("sizes", [(12, 12), (8, 8), (72, 72), (80, 80), (112, 40), (192, 128), (256, 256), (40, 33)])
def test_head_sizes(on: str, sizes: tuple[int, int]) -> None:
    _assert_is_attention(_call([18, 2], [90, 2], sizes=sizes, dtype=torch.float16, on=on) | {"causal": False})


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (9, 3)])
def test_options(on: str, heads: tuple[int, int]) -> None:
    slopes = torch.linspace(0.5, -0.125, heads[0])
    for dtype in (torch.float32, torch.bfloat16):
        call = _call([30, 2], [45, 20], heads, dtype=dtype, on=on)
        _assert_is_attention(call | {"logits_soft_cap": 1.5, "alibi_slopes": slopes.to(on)}, slopes.double())
        _assert_is_attention(call | {"sliding_window": 9})


def test_sinks(on: str) -> None:
    """A sink is one more logit in the softmax."""
    sinks = torch.tensor([0.0, 2.0, -40.0, 9.0])
    call = _call([20], [40], dtype=torch.float32, on=on)
    RAGGED.wrapper(**call, sinks=sinks.to(on))
    right, log_sum = reference(call["query"], call["key"], call["value"], call)
    share = torch.exp(log_sum - torch.logaddexp(log_sum, sinks.double()[:, None])).T[..., None]
    torch.testing.assert_close(call["out"].double().cpu(), right * share, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequence_reads_only_its_own_tokens(on: str, dtype: torch.dtype) -> None:
    """NaN among the keys and values of one sequence reaches no other sequence; its own queries become NaN."""
    call = _call([40, 3, 70], [40, 3, 70], dtype=dtype, on=on)
    for name in ("key", "value"):
        call[name][40:43] = torch.nan
    RAGGED.wrapper(**call)
    assert call["out"][40:43].isnan().all()
    for rows in (slice(40), slice(43, None)):
        right, _ = reference(call["query"][rows], call["key"][rows], call["value"][rows], call)
        torch.testing.assert_close(call["out"][rows].double().cpu(), right, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_queries_than_keys(on: str, dtype: torch.dtype) -> None:
    """The first queries have no key: the result is 0, and its log-sum-exp -inf."""
    call = _call([9, 4], [5, 0], dtype=dtype, on=on)
    RAGGED.wrapper(**call)
    right, _ = reference(call["query"][4:9], call["key"], call["value"], call)
    torch.testing.assert_close(call["out"][4:9].double().cpu(), right, rtol=2e-2, atol=1e-2)
    for rows in (slice(4), slice(9, 13)):
        assert (call["out"][rows] == 0).all()
        assert (call["lse"][:, rows] == -torch.inf).all()


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_batch_with_any_layout(data: st.DataObject) -> None:
    """Every kernel of the host, for ragged batches at any offset from aligned addresses, with gaps between rows."""
    counts = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    lengths = [count + data.draw(st.integers(-min(count, 3), 70)) for count in counts]
    sizes = data.draw(st.sampled_from([(64, 64), (80, 32), (24, 9)]))
    call = _call(counts, lengths, data.draw(st.sampled_from([(4, 2), (3, 1)])), sizes)
    for name in ("key", "value"):
        call[name] = data.draw(strategies.layouts()).place(call[name])
    for name in ("query", "out"):  # heads lie one after another
        rows = data.draw(strategies.layouts()).place(call[name].flatten(1))
        call[name] = rows.unflatten(1, call[name].shape[1:])
    call |= {"causal": data.draw(st.booleans())}
    assert_matches_reference(RAGGED, schedules=SCHEDULES[:2], **call)


@pytest.mark.parametrize("num_tokens", [5, 200])
def test_no_sequences(hopper: str, num_tokens: int) -> None:
    """Rows of no sequence are left alone."""
    call = _call([num_tokens], [9], on=hopper)
    none = call["cu_seqlens_q"][:1]
    RAGGED.wrapper(**call | {"cu_seqlens_q": none, "cu_seqlens_k": none})
    caches = call["query"], call["key"][:8, None].repeat(1, 8, 1, 1), call["value"][:8, None].repeat(1, 8, 1, 1)
    PAGED.wrapper(call["out"], *caches, 2, 0.1, none[:0, None], none[:0], none, 8, "auto", 1.0, 1.0)
    assert call["out"].isnan().all()


HOSTILE = [
    ([200, 140, 100, 170], [0, 200, 330, 500]),
    ([-7, 180, 9, 2**31 - 1], [0, 200, 330, 500]),
    ([0, 170, 240, 370], [-5, 200, 330, 2**31 - 1]),
    ([0, 170, 240, 370], [400, 300, 501, 500]),
    ([0, 170, 240, 370], [-(2**31), 2**31 - 1, -1, 500]),
]


@pytest.mark.parametrize(("starts", "key_starts"), HOSTILE)
def test_hostile_starts(hopper: str, starts: list[int], key_starts: list[int]) -> None:
    """A sequence with keys out of range has none; rows of no sequence are left alone. The number of rows selects the
    tile kernels on any device.
    """
    call = _call([170, 70, 130], [200, 130, 170], on=hopper)
    for name, values in (("cu_seqlens_q", starts), ("cu_seqlens_k", key_starts)):
        call[name] = torch.tensor(values, dtype=torch.int32, device=hopper)
    ascending = all(a <= b for a, b in pairwise(starts))
    for one in (PrefillSm90Config(64, 2), PrefillSm90Config(64, 2, max_splits=2), PrefillMmaConfig(4, 1, 64, 2)):
        RAGGED.forget()
        with tuning.forced(RAGGED.name, one):
            if ascending:
                assert_matches_reference(RAGGED, schedules=SCHEDULES[:1], **call)
            else:  # the owner of a row is undefined here; the host checks for out-of-bounds accesses
                RAGGED.wrapper(**call)
    RAGGED.forget()


def test_unsorted_starts_keep_tiles_inside(hopper: str) -> None:
    """The tile lies before the fourth sequence, but four starts are not larger: the search counts them wherever they
    are. The tile belongs to no sequence, and rows before `out` must not be written.
    """
    call = _call([40] * 6 + [60], [40] * 7, on=hopper)
    least = -(2**31)
    starts = torch.tensor([least, least, least, 100, 280, least, 200, 200], dtype=torch.int32, device=hopper)
    call |= {"cu_seqlens_q": starts, "out": torch.zeros_like(call["out"])}
    for one in (PrefillSm90Config(64, 2), PrefillSm90Config(64, 2, max_splits=2)):
        RAGGED.forget()
        with tuning.forced(RAGGED.name, one):
            RAGGED.wrapper(**call)
        assert not call["out"][:100].any()
    RAGGED.forget()


# Work items with more KV tiles than twice the stages; a sequence without queries; one with few tiles.
COUNTS, LENGTHS = [65, 0, 3], [300, 7, 65]


@pytest.mark.parametrize(
    ("one", "sizes", "causal"),
    [
        (PrefillSm90Config(32, 2), (128, 128), True),
        (PrefillSm90Config(32, 3), (64, 64), False),
        (PrefillSm90Config(16, 2, max_splits=3), (64, 64), True),
    ],
    ids=str,
)
def test_every_schedule(hopper: str, one: PrefillSm90Config, sizes: tuple[int, int], causal: bool) -> None:
    call = _call(COUNTS, LENGTHS, (2, 1), sizes, on=hopper) | {"causal": causal}
    _by_wgmma(one, SCHEDULES, **call)
    stages = launch(_problem(4096, *sizes), one)[0].specialisation.constants["STAGES"]
    assert 300 // one.tokens > 2 * stages


@pytest.mark.parametrize(
    ("one", "heads", "sizes", "causal"),
    [
        (PrefillSm90Config(128, 2), (2, 2), (80, 80), False),
        (PrefillSm90Config(80, 3), (2, 2), (72, 72), False),
        (PrefillSm90Config(64, 2, max_splits=2), (2, 1), (104, 40), True),
        (PrefillSm90Config(128, 2), (2, 2), (192, 128), True),
        (PrefillSm90Config(176, 2), (4, 2), (112, 112), False),
        (PrefillSm90Config(64, 2), (2, 1), (256, 256), True),
        (PrefillSm90Config(48, 2), (3, 1), (256, 80), False),
        (PrefillSm90Config(16, 2, max_splits=4), (4, 2), (96, 48), False),
    ],
    ids=str,
)
def test_geometries(
    hopper: str, one: PrefillSm90Config, heads: tuple[int, int], sizes: tuple[int, int], causal: bool
) -> None:
    call = _call([65, 0, 70], [300, 7, 129], heads, sizes, torch.float16, hopper) | {"causal": causal}
    _by_wgmma(one, **call)
    if one.max_splits == 1:  # row sums on the tensor cores
        _by_wgmma(one, **call | {"lse": None})


def test_options_with_wgmma(hopper: str) -> None:
    """A window that begins inside a tile, after NaN rows of another sequence; every option of the logits."""
    one, slopes = PrefillSm90Config(64, 2), torch.tensor([0.5, 0.25, 0.0, -0.125], device=hopper)
    call = _call([65, 130, 3], [190, 130, 3], on=hopper)
    _by_wgmma(one, **call | {"sliding_window": 40})
    _by_wgmma(one, bias=slopes.double().cpu(), **call | {"logits_soft_cap": 1.5, "alibi_slopes": slopes})
    call["value"][190:320] = torch.nan
    RAGGED.forget()
    with tuning.forced(RAGGED.name, one):
        for schedule in _schedules(hopper, SCHEDULES[:2]):
            with schedule:
                RAGGED.wrapper(**call)
            assert call["out"][65:195].isnan().all()
            for rows, tokens in ((slice(65), slice(190)), (slice(195, 198), slice(320, 323))):
                right, _ = reference(call["query"][rows], call["key"][tokens], call["value"][tokens], call)
                torch.testing.assert_close(call["out"][rows].double().cpu(), right, rtol=1.6e-2, atol=1.6e-2)
    RAGGED.forget()


def test_equals_paged_cache_bit_for_bit(hopper: str) -> None:
    """The keys of one sequence are a cache of one block."""
    call = _call([130], [256], on=hopper)
    right = torch.empty_like(call["out"])
    for op in (RAGGED, PAGED):
        op.forget()
    one = PrefillSm90Config(128, 2)
    with tuning.forced(RAGGED.name, one), tuning.forced(PAGED.name, one):
        RAGGED.wrapper(**call)
        of_tokens = torch.zeros(1, 1, dtype=torch.int32, device=hopper), call["cu_seqlens_k"][1:], call["cu_seqlens_q"]
        caches = call["query"], call["key"][None], call["value"][None], 2, call["scale"]
        PAGED.wrapper(right, *caches, *of_tokens, 256, "auto", 1.0, 1.0, lse=torch.empty_like(call["lse"]))
    for op in (RAGGED, PAGED):
        op.forget()
    assert same_bits(call["out"], right)


def test_refused() -> None:
    call = _call([3], [5])
    for name, changed, message in (
        ("key", call["key"][..., :32], r"key: expected shape \(num_keys=?5?, num_kv_heads=?2?, head_size=64\)"),
        ("key", call["key"].float(), "key: expected dtype bfloat16"),
        ("value", call["value"][:4], r"value: expected shape \(num_keys=5, num_kv_heads=2, value_size\)"),
        ("value", torch.zeros(5, 2, 65, dtype=torch.bfloat16), "value: expected values of at most 64 elements"),
        ("out", call["out"][..., :32], r"out: expected shape \(num_tokens=3, num_heads=4, value_size=64\)"),
        ("query", call["query"][:, :3], "query: expected heads that are a multiple of num_kv_heads=2"),
        ("cu_seqlens_q", call["cu_seqlens_q"][:1], r"cu_seqlens_q: expected shape \(num_seqs_and_one=2,\)"),
        ("cu_seqlens_q", call["cu_seqlens_q"][:0], "cu_seqlens_q: expected at least one element"),
        ("cu_seqlens_k", call["cu_seqlens_k"].float(), "cu_seqlens_k: expected dtype int32 or int64"),
        ("lse", call["lse"].T, r"lse: expected shape \(num_heads=4, num_tokens=3\)"),
        ("sliding_window", -1, "sliding_window: expected 0 or more"),
        ("logits_soft_cap", -1.0, "logits_soft_cap: expected 0 or more"),
    ):
        with pytest.raises(pyops.OpError, match=message):
            RAGGED.wrapper(**call | {name: changed})
    with pytest.raises(pyops.OpError, match="sliding_window: expected 0 unless causal, got 4"):
        RAGGED.wrapper(**call, causal=False, sliding_window=4)
    assert call["out"].isnan().all()


def _problem(
    num_tokens: int, head_size: int, value_size: int = 0, arch: str = "sm_90", options: bool = False, **changes: Any
) -> PrefillProblem:
    """A call of 16 heads on 16, as a plan meets it."""
    make = ArgMaker(device.model(arch))
    dtype, num_seqs, heads = changes.get("dtype", "bfloat16"), changes.get("num_seqs", 1), 16
    value_size, num_keys = value_size or head_size, changes.get("num_keys", num_tokens)
    slopes = make.empty(heads, dtype="float32") if options else None
    query, out = (make.empty(num_tokens, heads, size, dtype=dtype) for size in (head_size, value_size))
    key, value = (make.empty(num_keys, heads, size, dtype=dtype) for size in (head_size, value_size))
    starts, key_starts = (make.empty(num_seqs + 1, dtype="int32") for _ in range(2))
    options = Options(alibi_slopes=slopes, logits_soft_cap=20.0 if slopes else 0.0)
    kv = RaggedKV(key, value, key_starts)
    return check_ragged(out, query, kv, options, starts, changes.get("causal", True))


def test_choice_of_kernel() -> None:
    """wgmma where a tensor map can describe keys and values; one TMA box per tile and panel; splits only for few long
    sequences, and one warpgroup for up to 64 rows of each.
    """
    for num_tokens, sizes, changes, expected in (
        (8192, (128, 128), {}, PrefillSm90Config(128, 2)),
        (8192, (72, 72), {"num_seqs": 8}, PrefillSm90Config(128, 2)),
        (64, (128, 128), {"num_keys": 8192}, PrefillSm90Config(64, 1, max_splits=16, splits=256)),
        (64, (128, 128), {"num_keys": 8192, "num_seqs": 32}, PrefillSm90Config(64, 1)),
        (4096, (192, 128), {}, PrefillSm90Config(128, 2)),
        (4096, (256, 256), {}, PrefillSm90Config(64, 2)),
    ):
        problem = _problem(num_tokens, *sizes, **changes)
        assert choose(problem, HOPPER) == expected
        constants = launch(problem, expected)[0].specialisation.constants
        assert (constants["RAGGED"], constants["BOX_TOKENS"], constants["WHOLE_HEADS"]) == (
            True,
            expected.tokens,
            False,
        )
    for problem in (_problem(4096, 124), _problem(4096, 128, arch="sm_80"), _problem(4096, 128, dtype="float32")):
        assert isinstance(choose(problem, problem.query.device), PrefillMmaConfig)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("sizes", "options", "num_tokens", "arch"),
    few(
        [
            ((64, 64), False, 8192, "sm_90"),
            ((72, 72), False, 8192, "sm_90"),
            ((72, 72), False, 8192, "sm_80"),
            ((128, 128), False, 8192, "sm_90"),
            ((192, 128), False, 8192, "sm_90"),
            ((256, 256), False, 8192, "sm_90"),
            ((256, 256), True, 8192, "sm_90"),
            ((256, 256), False, 64, "sm_90"),
            ((64, 64), False, 8192, "sm_80"),
            ((128, 128), True, 8192, "sm_80"),
            ((256, 256), False, 8192, "sm_80"),
        ],
        3,
    ),
)
def test_compiles_without_spills_and_advice(sizes: tuple[int, int], options: bool, num_tokens: int, arch: str) -> None:
    problem = _problem(num_tokens, *sizes, arch, options, num_keys=8192)
    one = launch(problem, choose(problem, problem.query.device))[0].specialisation
    report = offline.compile(one.kernel.file, str(one), one.text, arch, one.kernel.options)
    assert (report.spill_bytes, report.stack_bytes, report.advice) == (0, 0, ())
    if arch == "sm_90":
        assert one.constants["scalar_t"] is dtypes.bfloat16
        assert report.shared_bytes <= prefill_sm90._STATIC_BYTES
