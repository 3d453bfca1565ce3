"""Paged attention of a few query tokens per sequence by attention_decode.cu, with tokens and heads as MMA columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pyops import OpError, offline, tuning
from pyops._core import config
from pyops._core.launch.kernel import Specialisation
from pyops._core.system import device
from pyops.example import ArgMaker
from pyops.ops.attention.decode_choose import DecodeConfig
from pyops.testing import SCHEDULES, assert_matches_reference, same_bits, scheduled
from tests.every_op.test_nvrtc import MISSING
from tests.ops.attention.test_attention import V1
from tests.ops.attention.test_decode_steps import AHEAD as ONE_WARP
from tests.ops.attention.test_e4m3 import _call as _e4m3_call
from tests.ops.attention.test_hopper import _in_codes as over_fp8
from tests.ops.attention.test_varlen import TOLERANCE, VARLEN, _call, hostile_call, reference
from tests.support.profiles import few

pytestmark = pytest.mark.rotates

COUNTS = [3, 0, 1, 17, 2]
LENGTHS = [70, 9, 1, 30, 2]
WIDE = replace(ONE_WARP, heads_per_block=16, ahead=True)
SPLITS = replace(WIDE, num_warps=2, max_splits=4, min_split=16)
CLUSTER = replace(WIDE, num_warps=4, cluster_size=2)
# (config, heads, head size, fp8 cache, packed cache, arguments)
CASES: list[tuple[DecodeConfig, tuple[int, int], int, bool, bool, dict[str, Any]]] = [
    (CLUSTER, (6, 2), 64, False, False, {}),
    (SPLITS, (6, 1), 64, False, False, {"logits_soft_cap": 2.0}),
    (replace(SPLITS, tiles_per_step=2), (1, 1), 64, True, False, {"sliding_window": 9}),
    (replace(SPLITS, num_warps=4, slices=2), (6, 2), 256, False, False, {"sliding_window": 70}),
    (replace(CLUSTER, num_warps=8, slices=4), (3, 1), 320, True, False, {}),
    (SPLITS, (4, 1), 64, False, True, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.0, -0.125])}),
    (CLUSTER, (3, 1), 128, True, False, {"sliding_window": 500}),
    (SPLITS, (9, 1), 64, False, False, {"sliding_window": 40}),
]


@pytest.fixture(autouse=True)
def _as_hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(device._HOST, 32, device.model("sm_90"))
    VARLEN.forget()
    yield
    VARLEN.forget()


def _attend(one: DecodeConfig, call: dict[str, Any], schedules: Any = SCHEDULES[:1]) -> None:
    """Run the call with this config; schedules change no bit of the result."""
    results = []
    for schedule in schedules:
        VARLEN.forget()
        with config.cpu("kernels"), tuning.forced(VARLEN.name, one), scheduled(schedule):
            VARLEN.wrapper(**call)
        results.append(call["out"].clone())
    assert all(same_bits(results[0], other) for other in results)


@pytest.mark.parametrize(("one", "heads", "head_size", "is_fp8", "packed", "more"), few(CASES, 3), ids=str)
def test_matches_attention(
    one: DecodeConfig, heads: tuple[int, int], head_size: int, is_fp8: bool, packed: bool, more: dict[str, Any]
) -> None:
    """Sequences of no, one, a few and more tokens than a CTA has, each token with its own keys."""
    call = _call(COUNTS, LENGTHS, heads, head_size=head_size, dtype=torch.bfloat16, packed=packed)
    call = over_fp8(call) if is_fp8 else call
    plain, starts = call.pop("plain"), call["cu_seqlens_q"].tolist()
    call |= more | {"lse": torch.full((heads[0], sum(COUNTS)), torch.nan)}
    _attend(one, call, SCHEDULES[:: len(SCHEDULES) - 1])
    slopes = more.get("alibi_slopes")
    for s, (keys, values) in enumerate(plain):
        rows = slice(starts[s], starts[s + 1])
        right, log_sum = reference(call["query"][rows], keys, values, call, None if slopes is None else slopes.double())
        tolerance = TOLERANCE[torch.bfloat16]
        torch.testing.assert_close(call["out"][rows].double(), right, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(call["lse"][:, rows].double(), log_sum, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("heads", "is_fp8", "window"), [((3, 1), False, 0), ((2, 2), True, 0), ((6, 1), False, 21)], ids=str
)
def test_equals_single_tokens(heads: tuple[int, int], is_fp8: bool, window: int) -> None:
    """Bit for bit what the op of one token gives for each token and its length: one warp takes keys in one order."""
    call = _call(COUNTS, LENGTHS, heads, dtype=torch.bfloat16)
    call = over_fp8(call) if is_fp8 else call
    call.pop("plain")
    call |= {"sliding_window": window, "sinks": torch.linspace(-1.0, 1.0, heads[0])}
    _attend(WIDE, call)
    owners = [s for s, count in enumerate(COUNTS) for _ in range(count)]
    lengths = [length - count + 1 + i for count, length in zip(COUNTS, LENGTHS, strict=True) for i in range(count)]
    single = {name: x for name, x in call.items() if name != "cu_seqlens_q"}
    single |= {"out": torch.empty_like(call["out"]), "seq_lens": torch.tensor(lengths, dtype=torch.int32)}
    single |= {"block_tables": call["block_tables"][owners], "max_seq_len": 70, "alibi_slopes": None}
    V1.forget()
    with config.cpu("kernels"), tuning.forced(V1.name, replace(WIDE, heads_per_block=8)):
        V1.wrapper(**single)
    V1.forget()
    assert same_bits(call["out"], single["out"])


def test_e4m3_queries() -> None:
    """Bit for bit what the same queries give in bfloat16, with their scale in that of the keys."""
    call = _e4m3_call(COUNTS, LENGTHS, (6, 2))
    call.pop("plain")
    _attend(SPLITS, call, SCHEDULES[:: len(SCHEDULES) - 1])
    right = {name: x for name, x in call.items() if name != "q_scale"}
    right |= {"out": torch.empty_like(call["out"]), "query": call["query"].bfloat16(), "k_scale": 0.5 * 0.75}
    _attend(SPLITS, right)
    assert same_bits(call["out"], right["out"])


@pytest.mark.parametrize("one", [SPLITS, CLUSTER], ids=["splits", "cluster"])
def test_hostile_indices(one: DecodeConfig) -> None:
    """Indices out of range contribute nothing; rows of no sequence are left alone."""
    call = hostile_call(dtype=torch.bfloat16)
    for lengths, starts in (
        ([20, 2**62, -5], [0, 20, 25, 33]),
        ([2, 30, 33], [-7, 3, 9, 2**63 - 1]),
        ([20, 30, 33], [0, 20, 25, 30]),
    ):
        call["seq_lens"], call["cu_seqlens_q"] = torch.tensor(lengths), torch.tensor(starts)
        for window in (0, 2**63 - 1, 4):
            VARLEN.forget()
            with tuning.forced(VARLEN.name, one):
                assert_matches_reference(VARLEN, **call | {"sliding_window": window}, schedules=SCHEDULES[:1])
    for starts in ([30, 20, 10, 20], [-(2**63), 2**63 - 1, -(2**63), 33]):
        call["cu_seqlens_q"] = torch.tensor(starts)
        with config.cpu("kernels"), tuning.forced(VARLEN.name, one):
            VARLEN.wrapper(**call)  # the owner of a row is undefined, but no row outside is touched


# (tokens of the sequences, table's tokens, heads, fp8 cache, or e4m3) -> columns of a CTA and query tokens of it; None:
# prefill
CHOICES = [
    ([7] * 3, 21, (4, 4), False, None),
    ([2] * 30, 96, (8, 2), False, (8, 2)),
    ([5, 1], 32, (3, 1), False, None),
    ([10] * 80 + [11] * 3 + [7], 32, (10, 2), True, None),
    ([3] * 38, 16, (64, 64), False, (8, 8)),
    ([4] * 8, 8192, (32, 8), False, (16, 4)),  # four splits of each sequence
    ([4] * 16, 4096, (32, 8), False, (16, 4)),
    ([2] * 14, 896, (6, 1), True, (16, 2)),
    ([1] * 32, 64, (32, 8), False, (8, 2)),
    ([4] * 64, 2048, (32, 8), False, (16, 4)),
    ([5] * 57, 160, (32, 8), False, None),
    ([128] * 8, 128, (32, 8), False, None),
    ([1] * 255 + [258], 8192, (32, 8), False, None),
    ([2] * 4, 4096, (16, 1), False, None),
    ([1] * 2, 64384, (4, 1), "e4m3", (8, 2)),
    ([64] * 2, 8192, (4, 1), "e4m3", None),
    ([3, 1, 1, 7, 1], 64, (32, 2), False, None),
    ([3, 1, 1, 7, 1], 64, (32, 2), "e4m3", (16, 1)),
    ([3] * 10, 72072, (8, 2), False, None),
    ([1] * 5, 8, (32, 4), "e4m3", (8, 1)),
    ([5] * 22, 128, (4, 1), False, None),
]


def _launched(
    counts: list[int],
    tokens: int,
    heads: tuple[int, int],
    is_fp8: bool | str,
    arch: str = "sm_90",
    head_size: int = 128,
    options: bool = False,
    max_query_len: int = 0,
    block_size: int = 16,
) -> Specialisation | None:
    """The last specialisation of a call; None if it is one of prefill."""
    make, (num_heads, num_kv_heads) = ArgMaker(device.model(arch)), heads
    cache = make.empty(9, block_size, num_kv_heads, head_size, dtype="float8_e4m3fn" if is_fp8 else "bfloat16")
    out = make.empty(sum(counts), num_heads, head_size, dtype="bfloat16")
    query = make.empty(*out.shape, dtype="float8_e4m3fn") if is_fp8 == "e4m3" else out
    tables = make.empty(len(counts), -(-tokens // block_size), dtype="int32")
    lengths, starts = (make.empty(size, dtype="int32") for size in (len(counts), len(counts) + 1))
    one, codes = make.full(1, value=1.0, dtype="float32"), "fp8" if is_fp8 else "auto"
    of_heads = make.full(num_heads, value=0.5, dtype="float32") if options else None
    more = (of_heads, 20, 2.0, of_heads, None, None) if options else (None, 0, 0.0, None, None, None)
    call = (
        out,
        query,
        cache,
        cache,
        num_kv_heads,
        0.1,
        tables,
        lengths,
        starts,
        block_size,
        codes,
        one,
        one,
        True,
        *more,
        max_query_len,
    )
    last = VARLEN.launches(*call)[-1]
    return last.specialisation if isinstance(tuning.last[VARLEN.name], DecodeConfig) else None


@pytest.mark.parametrize(("counts", "tokens", "heads", "is_fp8", "expected"), CHOICES)
def test_choice(
    counts: list[int], tokens: int, heads: tuple[int, int], is_fp8: bool | str, expected: tuple[int, int] | None
) -> None:
    one = _launched(counts, tokens, heads, is_fp8)
    assert (one and (one.constants["HEADS"], one.constants["QUERY_TOKENS"])) == expected


def test_choice_by_half_full_blocks() -> None:
    """The last block of a sequence is half full: 9 tokens in a block of 64 slots are probably one KV tile of
    prefill_mma.cu, and 65 in two of them three."""
    counts = [1] * 27 + [2, 3, 4, 5, 6, 7, 8, 8, 8, 8]
    assert _launched(counts, 9, (5, 5), True, max_query_len=8, block_size=64) is None
    assert _launched(counts, 65, (5, 5), True, max_query_len=8, block_size=64) is not None


def test_choice_by_the_most_tokens_of_a_sequence() -> None:
    """Without it, one sequence might have nearly all tokens; no result depends on it."""
    counts = [8] * 148 + [1, 3, 6]
    assert _launched(counts, 4832, (8, 8), False) is None
    assert _launched(counts, 4832, (8, 8), False, max_query_len=17) is None
    one = _launched(counts, 4832, (8, 8), False, max_query_len=8)
    assert one is not None
    assert one.constants["QUERY_TOKENS"] == 8
    call = _call([3, 0, 9, 2], [40, 9, 30, 2], (2, 2), head_size=64, dtype=torch.bfloat16)
    call.pop("plain")
    for most in (1, 9):
        assert_matches_reference(VARLEN, **call | {"max_query_len": most}, schedules=SCHEDULES[:1])
    with pytest.raises(OpError, match="max_query_len: expected 0 or more, got -1"):
        VARLEN.wrapper(**call | {"max_query_len": -1})


def test_splits_of_long_sequences() -> None:
    """As many as steps and the combine take the least time for: 64384 tokens are 503 steps. A warp of the last block
    with two heads takes twice as long to combine."""
    for counts, tokens, heads, splits in (
        ([1] * 2, 64384, (4, 1), 96),
        ([1] * 2, 16384, (4, 1), 48),
        ([2] * 7, 15079, (8, 2), 32),
    ):
        _launched(counts, tokens, heads, True, max_query_len=counts[0])
        assert (tuning.last[VARLEN.name].max_splits, tuning.last[VARLEN.name].cluster_size) == (splits, 1)


def test_clusters_by_the_columns_in_use() -> None:
    """CTAs have columns for four tokens. Sequences of one have splits, where clusters would fill half of the SMs."""
    for most, cluster_size in ((1, 1), (4, 8)):
        _launched([1] * 2, 7150, (8, 4), False, max_query_len=most)
        assert tuning.last[VARLEN.name].cluster_size == cluster_size


def test_warps_that_have_a_step() -> None:
    """CTAs beyond one wave have no warp without keys, so that more of them run at once."""
    _launched([10] * 80 + [11] * 3 + [7], 32, (10, 2), True, "sm_80")
    assert tuning.last[VARLEN.name].num_warps == 1
    _launched([5, 1], 32, (3, 1), False, "sm_80")
    assert tuning.last[VARLEN.name].num_warps == 4


def test_batch_invariance_takes_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a CTA would change how the keys of each are split."""
    call = [4] * 64, 2048, (32, 8), False
    assert _launched(*call)
    monkeypatch.setenv("PYOPS_BATCH_INVARIANT", "1")
    assert _launched(*call) is None


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("arch", "is_fp8", "head_size"),
    few([("sm_90", True, 64), ("sm_100", False, 128), ("sm_80", True, 128), ("sm_100", False, 256)], 1),
    ids=str,
)
def test_registers_suffice(arch: str, is_fp8: bool, head_size: int) -> None:
    one = _launched([2] * 64, 2048, (16, 4), is_fp8, arch, head_size, options=True)
    assert one is not None
    report = offline.compile(one.kernel.file, str(one), one.text, arch, one.kernel.options)
    assert (report.spill_bytes, report.stack_bytes) == (0, 0)
