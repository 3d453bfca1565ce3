"""Prefill attention with heads of 257 to 512 elements: warps of prefill_mma.cu share rows, or CTAs have slices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pyops import offline, tuning
from pyops._core import config
from pyops._core.launch.kernel import Launch
from pyops._core.system import device
from pyops.example import ArgMaker
from pyops.ops.attention.prefill_mma import PrefillMmaConfig
from pyops.testing import SCHEDULES, assert_matches_reference, same_bits, scheduled
from tests.every_op.test_nvrtc import MISSING
from tests.ops.attention.test_attention import in_codes_of_heads
from tests.ops.attention.test_hopper import _in_codes as over_fp8
from tests.ops.attention.test_ragged import RAGGED
from tests.ops.attention.test_ragged import _call as ragged_call
from tests.ops.attention.test_varlen import TOLERANCE, VARLEN, _call, hostile_call, reference
from tests.support.profiles import few

COUNTS, LENGTHS = [9, 0, 1, 6], [140, 9, 33, 6]  # two splits of the first sequence
SHORT = PrefillMmaConfig(num_warps=2, row_tiles=1, step_tokens=16, min_blocks=2, stages=1)
EIGHT = PrefillMmaConfig(num_warps=8, row_tiles=1, step_tokens=32, min_blocks=1)
SPLITS = PrefillMmaConfig(num_warps=4, row_tiles=1, step_tokens=16, min_blocks=1, max_splits=3)
SHARED = PrefillMmaConfig(num_warps=8, row_tiles=2, step_tokens=64, min_blocks=1, stages=1, column_warps=4)
SHARED_SPLITS = PrefillMmaConfig(8, row_tiles=1, step_tokens=32, min_blocks=1, max_splits=3, stages=1, column_warps=2)
FOUR = replace(SHARED, num_warps=4, row_tiles=1)
SLOPES = torch.tensor([0.5, 0.25, 0.0, -0.125])
# (config, architecture, heads, arguments, cache: "", "fp8", "fp8 heads" or "packed")
CASES: list[tuple[PrefillMmaConfig, str, tuple[int, int], dict[str, Any], str]] = [
    (SHARED, "sm_90", (16, 1), {"sliding_window": 25}, ""),
    (SHARED_SPLITS, "sm_80", (4, 2), {"logits_soft_cap": 1.5, "alibi_slopes": SLOPES}, "fp8 heads"),
    (FOUR, "sm_90", (4, 1), {"causal": False}, ""),
    (EIGHT, "sm_90", (16, 1), {"sliding_window": 25}, ""),
    (SPLITS, "sm_90", (4, 1), {}, ""),
    (SPLITS, "sm_80", (4, 2), {"logits_soft_cap": 1.5, "alibi_slopes": SLOPES}, "fp8 heads"),
    (SHORT, "sm_80", (4, 1), {"causal": False}, "packed"),
    (SHORT, "sm_75", (4, 2), {"sliding_window": 25}, ""),
    (SHORT, "sm_75", (4, 1), {"logits_soft_cap": 1.5}, "fp8"),
]


@pytest.fixture(autouse=True)
def _forget() -> Any:
    VARLEN.forget()
    yield
    VARLEN.forget()


def _run(one: PrefillMmaConfig, call: dict[str, Any], schedules: Any = SCHEDULES[:1]) -> None:
    """Run the call with this config; schedules change no bit of the results."""
    results = []
    for schedule in schedules:
        VARLEN.forget()
        with config.cpu("kernels"), tuning.forced(VARLEN.name, one), scheduled(schedule):
            VARLEN.wrapper(**call)
        assert tuning.last[VARLEN.name] == one
        results.append((call["out"].clone(), call["lse"].clone()))
    assert all(same_bits(a, b) for other in results for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("one", "arch", "heads", "more", "cache"), few(CASES, 3), ids=str)
def test_matches_attention(
    one: PrefillMmaConfig,
    arch: str,
    heads: tuple[int, int],
    more: dict[str, Any],
    cache: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each slice has its columns of the result, and one of them the log-sum-exp."""
    monkeypatch.setitem(device._HOST, 32, device.model(arch))
    dtype = torch.float16 if arch == "sm_75" else torch.bfloat16
    call = _call(COUNTS, LENGTHS, heads, head_size=512, dtype=dtype, packed=cache == "packed")
    if cache:
        call = {
            "fp8": over_fp8,
            "fp8 heads": lambda plain: in_codes_of_heads(plain, [0.5, 0.25], [3.0, -0.5]),
            "packed": dict,
        }[cache](call)
    plain, starts = call.pop("plain"), call["cu_seqlens_q"].tolist()
    call |= more | {"lse": torch.full((heads[0], sum(COUNTS)), torch.nan)}
    _run(one, call, SCHEDULES[:: len(SCHEDULES) - 1])
    slopes = more.get("alibi_slopes")
    for s, (keys, values) in enumerate(plain):
        rows = slice(starts[s], starts[s + 1])
        right, log_sum = reference(call["query"][rows], keys, values, call, None if slopes is None else slopes.double())
        torch.testing.assert_close(call["out"][rows].double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(call["lse"][:, rows].double(), log_sum, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("one", "count"), [(SHORT, 20), (SPLITS, 5)], ids=["whole", "splits"])
def test_sinks(one: PrefillMmaConfig, count: int) -> None:
    """Every slice counts the sink of its head."""
    sinks = torch.tensor([0.0, 2.0, -40.0, 9.0])
    call = _call([count], [130], head_size=512, dtype=torch.float16)
    keys, values = call.pop("plain")[0]
    _run(one, call | {"sinks": sinks, "lse": torch.empty(4, count)})
    right, log_sum = reference(call["query"], keys, values, call)
    share = torch.exp(log_sum - torch.logaddexp(log_sum, sinks.double()[:, None])).T[..., None]
    torch.testing.assert_close(call["out"].double(), right * share, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("sizes", few([(512, 512), (384, 320), (264, 128)], 1), ids=str)
def test_ragged(sizes: tuple[int, int]) -> None:
    """Ragged keys and values, also values narrower than keys, and those of one slice."""
    call = ragged_call([20, 7], [50, 7], (4, 1), sizes)
    RAGGED.forget()
    with config.cpu("kernels"):
        RAGGED.wrapper(**call, causal=True)
    RAGGED.forget()
    for rows, at in ((slice(0, 20), slice(0, 50)), (slice(20, 27), slice(50, 57))):
        right, log_sum = reference(call["query"][rows], call["key"][at], call["value"][at], call)
        torch.testing.assert_close(call["out"][rows].double(), right, rtol=1.6e-2, atol=1.6e-2)
        torch.testing.assert_close(call["lse"][:, rows].double(), log_sum, rtol=1e-5, atol=2e-5)


def test_hostile_indices() -> None:
    """Indices out of range contribute nothing; rows of no sequence are left alone."""
    call = hostile_call(head_size=512, dtype=torch.bfloat16)
    for one, lengths, starts in (
        (SHORT, [20, 2**62, -5], [0, 20, 25, 33]),
        (SPLITS, [2, 2**31 - 1, 33], [-7, 3, 9, 2**63 - 1]),
    ):
        call["seq_lens"], call["cu_seqlens_q"] = torch.tensor(lengths), torch.tensor(starts)
        VARLEN.forget()
        with tuning.forced(VARLEN.name, one):
            assert_matches_reference(VARLEN, **call, schedules=SCHEDULES[:1])
    call["cu_seqlens_q"] = torch.tensor([30, 20, 10, 20])
    with config.cpu("kernels"), tuning.forced(VARLEN.name, SPLITS):
        VARLEN.wrapper(**call)  # the owner of a row is undefined, but no row outside is touched


def _launched(
    arch: str,
    sizes: tuple[int, int] = (512, 512),
    counts: tuple[int, int] = (4096, 1),
    heads: tuple[int, int] = (16, 1),
    cache: str = "",
    tokens: int = 4096,
    options: bool = False,
) -> Launch:
    """The only launch of counts[0] query tokens of counts[1] sequences."""
    make, (num_heads, num_kv_heads), (num_tokens, num_seqs) = ArgMaker(device.model(arch)), heads, counts
    dtype = "float16" if arch == "sm_75" else "bfloat16"
    cache_dtype = "float8_e4m3fn" if cache == "fp8" else dtype
    keys, values = ((9, 16, num_kv_heads, size) for size in sizes)
    if cache == "packed":
        keys, values = (9, num_kv_heads, sizes[0] // 8, 16, 8), (9, num_kv_heads, sizes[1], 16)
    query, out = (make.empty(num_tokens, num_heads, size, dtype=dtype) for size in sizes)
    tables = make.empty(num_seqs, tokens // 16, dtype="int32")
    lengths, starts = (make.empty(size, dtype="int32") for size in (num_seqs, num_seqs + 1))
    one, of_heads = make.full(1, value=1.0, dtype="float32"), make.full(num_heads, value=0.5, dtype="float32")
    more = (of_heads, 20, 2.0, of_heads) if options else (None, 0, 0.0, None)
    scales = ("fp8" if cache == "fp8" else "auto", one, one)
    caches = (make.empty(*keys, dtype=cache_dtype), make.empty(*values, dtype=cache_dtype))
    call = (out, query, *caches, num_kv_heads, 0.1, tables, lengths, starts, 16, *scales, True, *more, None, None)
    (launch,) = VARLEN.launches(*call)
    return launch


MMA, SIMT, DECODE = "prefill_mma", "attention_decode_simt", "attention_decode"


@pytest.mark.parametrize(
    ("kernel", "slices", "call"),
    [
        (MMA, 1, {"arch": "sm_90"}),
        (MMA, 2, {"arch": "sm_80", "cache": "packed"}),
        (MMA, 1, {"arch": "sm_100", "sizes": (384, 320)}),
        (MMA, 2, {"arch": "sm_89", "sizes": (384, 320)}),
        (MMA, 1, {"arch": "sm_90", "sizes": (512, 256)}),
        (MMA, 4, {"arch": "sm_75"}),
        (MMA, 2, {"arch": "sm_75", "sizes": (256, 256)}),
        (SIMT, 0, {"arch": "sm_75", "cache": "packed"}),  # no shared memory
        (MMA, 1, {"arch": "sm_80", "sizes": (264, 264)}),
        (SIMT, 0, {"arch": "sm_89", "sizes": (264, 264)}),  # not two slices of whole chunks
        (SIMT, 0, {"arch": "sm_80", "sizes": (520, 520)}),
        (SIMT, 0, {"arch": "gfx942"}),
        (DECODE, 4, {"arch": "sm_90", "counts": (128, 64), "heads": (2, 1)}),  # two tokens of two heads
    ],
    ids=str,
)
def test_kernels(kernel: str, slices: int, call: dict[str, Any]) -> None:
    """attention_decode_simt.cu has the calls for which prefill_mma.cu has no registers or no shared memory."""
    launch = _launched(**call)
    assert launch.specialisation.kernel.file == f"attention/{kernel}.cu"
    assert launch.shared <= device.model(call["arch"]).shared_memory - 2048
    assert launch.specialisation.constants.get("SLICES", 0) == slices
    assert kernel != MMA or launch.grid[1] == slices


@pytest.mark.parametrize(
    ("arch", "call", "expected"),
    [
        ("sm_90", {}, (64, 64, 8, 4, 1)),
        ("sm_90", {"cache": "fp8"}, (64, 32, 8, 2, 1)),
        ("sm_90", {"counts": (900, 10), "heads": (4, 1), "tokens": 192}, (32, 64, 8, 4, 1)),
        ("sm_90", {"counts": (99, 10), "heads": (4, 1), "tokens": 192}, (16, 64, 4, 4, 1)),
        ("sm_90", {"counts": (49, 7), "heads": (4, 1), "tokens": 128, "cache": "fp8"}, (32, 64, 8, 4, 1)),
        ("sm_90", {"cache": "packed"}, (128, 32, 8, 1, 1)),
        ("sm_80", {}, (64, 32, 8, 2, 1)),
        ("sm_89", {}, (64, 16, 4, 1, 1)),
        ("sm_89", {"cache": "packed"}, (32, 16, 2, 1, 1)),
        ("sm_75", {}, (32, 16, 2, 1, 1)),
    ],
    ids=str,
)
def test_geometries(arch: str, call: dict[str, Any], expected: tuple[int, ...]) -> None:
    """Few rows to a CTA where it is one of few. Without warps that share rows, CTAs have as many warps as fit."""
    _launched(arch, **call)
    one = tuning.last[VARLEN.name]
    assert (one.rows, one.step_tokens, one.num_warps, one.column_warps, one.min_blocks) == expected


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("arch", "call"),
    few(
        [
            ("sm_75", {}),
            ("sm_75", {"sizes": (256, 256), "cache": "packed"}),
            ("sm_80", {"cache": "fp8"}),
            ("sm_90", {"counts": (99, 10), "heads": (4, 1), "tokens": 192}),
            ("sm_90", {}),
            ("sm_90", {"counts": (49, 7), "heads": (4, 1), "tokens": 128, "cache": "fp8"}),
            ("sm_89", {}),
            ("sm_100", {"cache": "packed"}),
            ("sm_100", {}),
        ],
        2,
    ),
    ids=str,
)
def test_registers_suffice(arch: str, call: dict[str, Any]) -> None:
    one = _launched(arch, options=True, **call).specialisation
    report = offline.compile(one.kernel.file, str(one), one.text, arch, one.kernel.options)
    assert (report.spill_bytes, report.stack_bytes) == (0, 0)
