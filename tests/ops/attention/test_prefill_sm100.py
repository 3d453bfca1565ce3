"""prefill_sm100.cu, in CUDA Tile C++, by the host backend; python -m tests.tiles compiles it for Blackwell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import pyops
from pyops import tuning
from pyops._core.system import device
from pyops._core.system.device import Device
from pyops.example import ArgMaker
from pyops.ops.attention import decode_plan, prefill_sm100
from pyops.ops.attention.arguments import Options, PagedKV
from pyops.ops.attention.prefill_mma import PrefillMmaConfig
from pyops.ops.attention.prefill_plan import choose, launch
from pyops.ops.attention.prefill_problem import PrefillProblem, check_varlen
from pyops.ops.attention.prefill_sm100 import PrefillTileConfig
from pyops.testing import assert_matches_reference
from tests.ops.attention.test_ragged import RAGGED
from tests.ops.attention.test_ragged import _call as ragged_call
from tests.ops.attention.test_varlen import TOLERANCE, VARLEN, _call, hostile_call, reference
from tests.ops.linear.test_products import needs_compiler
from tests.support.blackwell import BLACKWELL, forget, mistaken, on_blackwell

pytestmark = pytest.mark.rotates

FILE = "attention/prefill_sm100.cu"
COUNTS, LENGTHS = [41, 0, 1, 30, 5], [75, 9, 40, 90, 5]
SMALL = PrefillTileConfig(16, 16)


@pytest.fixture(autouse=True)
def blackwell(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The host backend in place of a Blackwell GPU."""
    monkeypatch.setattr(prefill_sm100, "_MIN_TILE", 16)
    with on_blackwell(monkeypatch, VARLEN, RAGGED):
        yield


def assert_is_attention(op: Any, one: PrefillTileConfig, call: dict[str, Any], plain: list[Any]) -> None:
    """Result and log-sum-exp of each sequence; no other kernel has run."""
    op.specialisations.clear()
    with tuning.forced(op.name, one):
        op.wrapper(**call)
    assert {found.kernel.file for found in op.specialisations.values()} == {FILE}
    starts, tolerance = call["cu_seqlens_q"].tolist(), TOLERANCE[call["query"].dtype]
    for s, (keys, values) in enumerate(plain):
        rows = slice(starts[s], starts[s + 1])
        right, log_sum = reference(call["query"][rows], keys, values, call)
        if (sinks := call.get("sinks")) is not None:
            whole = torch.logaddexp(log_sum, sinks.double()[:, None])
            right, log_sum = right * torch.exp(log_sum - whole).T[..., None], whole
        torch.testing.assert_close(call["out"][rows].double(), right, rtol=tolerance, atol=tolerance)
        if call.get("lse") is not None:
            torch.testing.assert_close(call["lse"][:, rows].double(), log_sum, rtol=1e-5, atol=2e-5)


def paged(heads: tuple[int, int] = (6, 2), **more: Any) -> tuple[dict[str, Any], list[Any]]:
    """(call, keys and values of each sequence)"""
    call = _call(COUNTS, LENGTHS, heads, dtype=more.pop("dtype", torch.bfloat16), **more)
    plain = call.pop("plain")
    return call | {"lse": torch.full((heads[0], sum(COUNTS)), torch.nan)}, plain


# (geometry, heads, head size, value size, tokens of a page, arguments): pages of whole tiles, and tiles of pages
CASES: list[tuple[PrefillTileConfig, tuple[int, int], int, int, int, dict[str, Any]]] = [
    (SMALL, (6, 2), 16, 16, 32, {}),
    (SMALL, (4, 1), 24, 24, 16, {"causal": False}),
    (PrefillTileConfig(32, 16), (5, 1), 32, 16, 8, {}),
    (SMALL, (2, 2), 32, 32, 16, {"sliding_window": 25, "logits_soft_cap": 1.5}),
    (
        PrefillTileConfig(16, 32),
        (4, 2),
        16,
        16,
        5,
        {"sliding_window": 9, "sinks": torch.tensor([0.0, 2.0, -40.0, 9.0])},
    ),
]


@needs_compiler
@pytest.mark.parametrize(("one", "heads", "head_size", "value_size", "page", "more"), CASES, ids=str)
def test_paged(
    one: PrefillTileConfig, heads: tuple[int, int], head_size: int, value_size: int, page: int, more: dict[str, Any]
) -> None:
    """Whole prompts, the ends of prompts, single tokens, and sequences without a token in this batch."""
    call, plain = paged(heads, head_size=head_size, value_size=value_size, block_size=page)
    assert_is_attention(VARLEN, one, call | more, plain)


@needs_compiler
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_ragged(causal: bool) -> None:
    counts, lengths = [41, 3, 30], [75, 3, 50]
    call = ragged_call(counts, lengths, (4, 2), (32, 16)) | {"causal": causal}
    ends = torch.tensor(lengths).cumsum(0).tolist()
    plain = [
        (call["key"][end - length : end], call["value"][end - length : end])
        for end, length in zip(ends, lengths, strict=True)
    ]
    assert_is_attention(RAGGED, SMALL, call, plain)


@needs_compiler
def test_slots_after_the_end_are_not_read() -> None:
    """They may hold anything, also where a page is a whole tile."""
    call, plain = paged(head_size=16, block_size=16)
    for s, length in enumerate(LENGTHS):
        page = int(call["block_tables"][s, (length - 1) // 16])
        for name in "key_cache", "value_cache":
            call[name][page, (length - 1) % 16 + 1 :] = torch.nan
    assert_is_attention(VARLEN, SMALL, call, plain)


@needs_compiler
def test_hostile_indices() -> None:
    """The host backend finds any access outside of the tensors; tokens in invalid blocks contribute nothing."""
    for page in 8, 16:
        call = hostile_call(head_size=16, block_size=page, dtype=torch.bfloat16)
        with tuning.forced(VARLEN.name, SMALL):
            assert_matches_reference(VARLEN, **call)
    call, _ = paged(head_size=16)
    for lengths, starts in (
        ([2**31 - 1, -5, 0, 90, 3], [0, 41, 41, 42, 72, 77]),
        ([75, 9, 40, 90, 5], [0, 41, -3, 60, 5, 2**31 - 1]),
    ):
        call["seq_lens"][:], call["cu_seqlens_q"][:] = torch.tensor(lengths), torch.tensor(starts)
        with tuning.forced(VARLEN.name, SMALL):
            VARLEN.wrapper(**call)


@needs_compiler
def test_first_use_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYOPS_TRUST")
    monkeypatch.setattr(decode_plan, "_columns_are_faster", lambda *_: False)
    monkeypatch.setattr(prefill_sm100, "choose", lambda _: SMALL)
    call, _ = paged(head_size=16)
    for others in {"attention/prefill_mma.cu"}, set():
        forget(VARLEN)
        VARLEN.wrapper(**call)
        assert {one.kernel.file for one in VARLEN.specialisations.values()} == {FILE, *others}


MISTAKES = {
    "heads of a sequence's first tile": (
        "rows - row_tokens * column_of<ROWS>(GROUP)",
        "row_numbers<ROWS>() - row_tokens * column_of<ROWS>(0)",
    ),
    "queries of the first sequence": (
        "row_tokens + column_of<ROWS>(int(first_token));\n        return",
        "row_tokens;\n        return",
    ),
    "rows of the next sequence": ("const auto exists = rows <=", "const auto exists = rows <= rows + "),
    "limits of whole prompts": ("CAUSAL ? context : int(length) - 1)", "CAUSAL ? 0 : int(length) - 1)"),
    "a tile that some rows do not see": (
        "most((oldest + 1) / TOKENS, seen_tile)",
        "most((oldest + TOKENS) / TOKENS, seen_tile)",
    ),
    "missed last tile": ("most((newest + TOKENS) / TOKENS, first_tile)", "most(newest / TOKENS, first_tile)"),
    "a tile that the window cuts": ("most((newest - window + TOKENS) / TOKENS, first_tile)", "first_tile"),
    "window of one key more": ("columns > last - full", "columns >= last - full"),
    "keys after the limit": ("is_there & (columns <= last)", "is_there"),
    "slots after the end": ("positions < column_of<TOKENS>(int(length))", "positions < column_of<TOKENS>(1 << 20)"),
    "page of another tile": (
        "blocks[i * TOKENS / BLOCK_SIZE * table_step]",
        "blocks[(i * TOKENS / BLOCK_SIZE & ~1) * table_step]",
    ),
    "slot of a page's start": ("const int64_t slot = i * TOKENS % BLOCK_SIZE", "const int64_t slot = 0"),
    "heads of the first key head": ("key_cache + kv_head * key_head_stride", "key_cache + 0 * kv_head"),
    "row sum by the last row max": ("row_sum = row_sum * factor + sum_of_rows", "row_sum = row_sum + sum_of_rows"),
    "results of the last row max": ("accum * over_values(factor));", "accum);"),
    "row max of a tile alone": ("larger_of(row_max, max_of_rows(logits))", "max_of_rows(logits)"),
    "natural exponentials": ("(scale * LOG2_E)", "(scale)"),
    "uncounted sink": ("row_sum * factor + exp2_of(sink - larger)", "row_sum * factor"),
    "log-sum-exp to the base of two": ("* column_of<ROWS>(LN_2)", ""),
}


def attend() -> None:
    """Calls that take every branch of the kernel together, until one is wrong."""
    for one, heads, head_size, value_size, page, more in (CASES[0], CASES[3], CASES[4]):
        call, plain = paged(heads, head_size=head_size, value_size=value_size, block_size=page)
        forget(VARLEN, RAGGED)
        assert_is_attention(VARLEN, one, call | more, plain)


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    monkeypatch.setattr(prefill_sm100, "_prefill_sm100", mistaken(FILE, *MISTAKES[mistake]))
    with pytest.raises((AssertionError, pyops.KernelFault)):
        attend()


def problem(
    num_tokens: int = 4096,
    head_size: int = 128,
    page: int = 16,
    on: Device = BLACKWELL,
    kv_cache_dtype: str = "auto",
    alibi: bool = False,
    gap: int = 0,
) -> PrefillProblem:
    """A prompt of 32 query heads and 8 key-value heads; a page begins `gap` elements after the last one."""
    make = ArgMaker(on)
    query = make.empty(num_tokens, 32, head_size, dtype="bfloat16")
    cache = make.empty(512, page, 8, head_size, dtype="uint8" if kv_cache_dtype == "fp8" else "bfloat16")
    cache = replace(cache, strides=(cache.strides[0] + gap, *cache.strides[1:]))
    tables, lengths, starts = (make.empty(*shape, dtype="int32") for shape in ((1, 512), (1,), (2,)))
    scale, slopes = make.empty(1, dtype="float32"), make.empty(32, dtype="float32") if alibi else None
    kv = PagedKV(cache, cache, 8, tables, lengths, page, kv_cache_dtype, scale, scale)
    return check_varlen(query, query, kv, Options(slopes), starts)


def test_choice() -> None:
    """Blackwell's own kernel takes prompts, and leaves to others what it cannot load or compute."""
    for page, head_size, tokens in ((16, 128, 128), (64, 128, 64), (128, 128, 128), (16, 256, 64), (32, 192, 64)):
        one = problem(page=page, head_size=head_size)
        assert choose(one, BLACKWELL) == PrefillTileConfig(128, tokens)
        (launched,) = launch(one, PrefillTileConfig(128, tokens))
        assert launched.grid == (4096 * 4 // 128 + 1, 8, 1)
    for words, one in (
        ("CUDA 13.4", problem(on=device.model("sm_100"))),
        ("other dtypes", problem(kv_cache_dtype="fp8")),
        ("other dtypes", problem(head_size=124)),
        ("few query tokens", problem(num_tokens=16)),
        ("slopes", problem(alibi=True)),
        ("256 elements", problem(head_size=512)),
        ("no numbers", problem(gap=8)),
    ):
        assert words in (prefill_sm100.refusal(one) or "")
        assert isinstance(choose(one, one.query.device), PrefillMmaConfig)
    with pytest.raises(ValueError, match="no geometry"):
        PrefillTileConfig(96, 128)
