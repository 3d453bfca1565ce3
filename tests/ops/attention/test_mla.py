"""MLA decode against softmax in float64, against attention that is not absorbed, and its own options."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyops
from pyops import offline, tuning
from pyops._core import config
from pyops._core.launch.kernel import Launch
from pyops._core.system import device as devices
from pyops.example import ArgMaker
from pyops.ops._shared.fp8_accumulation import accumulated, allowed
from pyops.ops.attention import mla_plan, mla_problem, mla_sm80
from pyops.ops.attention.mla_sm80 import MlaSm80Config
from pyops.ops.attention.mla_small_h import FewHeadsConfig
from pyops.ops.attention.mla_small_h_fp8 import CodesConfig
from pyops.testing import SCHEDULES, assert_matches_reference, same_bits, scheduled
from tests.every_op.test_nvrtc import MISSING
from tests.support.calls import DEVICES
from tests.support.profiles import few

pytestmark = pytest.mark.rotates

MLA = pyops.registry["sm100_cutlass_mla_decode"]
LATENT, ROPE = 512, 64
ENTRY = LATENT + ROPE
FP8, FNUZ, BF16 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, BF16: 1.6e-2}


def _call(
    lengths: list[int],
    num_heads: int = 5,
    page_size: int = 16,
    dtype: torch.dtype = BF16,
    kind: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    num_kv_splits: int = 0,
) -> dict[str, Any]:
    """The arguments of a call, with NaN in slots without a token, and `plain`: the latent KV of each sequence.

    A `kind` of uint8 makes latent KV in the format "fp8_ds_mla".
    """
    generator = torch.Generator().manual_seed(seed)
    is_ds_mla = kind == torch.uint8

    def draw(*shape: int, to: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(to)

    num_seqs, max_pages = len(lengths), max(1, *(-(-length // page_size) for length in lengths))
    table = torch.randperm(num_seqs * max_pages + 3, generator=generator)[: num_seqs * max_pages]
    table = table.view(num_seqs, max_pages)
    cache = torch.full((num_seqs * max_pages + 3, page_size, ENTRY), torch.nan).to(FP8 if is_ds_mla else kind or dtype)
    if is_ds_mla:  # every byte is 0xff: NaN as fp8, scale and rotated key
        cache = torch.full((*cache.shape[:2], 656), 255, dtype=torch.uint8)
    plain = []
    for s, length in enumerate(lengths):
        if is_ds_mla:
            codes, rotated = draw(length, LATENT, to=FP8), draw(length, ROPE, to=dtype)
            scales = draw(length, 4, to=torch.float32).abs() * torch.tensor([0.1, 1.0, 2.0, 0.01])
            entries = torch.cat([x.view(torch.uint8) for x in (codes, scales, rotated)], -1)
            latent = (codes.float() * scales.repeat_interleave(128, -1)).to(dtype)
            plain.append(torch.cat((latent, rotated), -1).double())
        else:
            entries = draw(length, ENTRY, to=kind or dtype)
            plain.append(entries.double())
        for i in range(length):
            cache[table[s, i // page_size], i % page_size] = entries[i]
    call = {
        "out": torch.full((num_seqs, num_heads, LATENT), torch.nan, dtype=BF16 if dtype == FP8 else dtype),
        "lse": torch.full((num_seqs, num_heads), torch.nan),
        "q_nope": draw(num_seqs, num_heads, LATENT, to=dtype),
        "q_pe": draw(num_seqs, num_heads, ROPE, to=dtype),
        "kv_c_and_k_pe_cache": cache,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "page_table": table.int(),
        "workspace": None,
        "scale": ENTRY**-0.5,
        "num_kv_splits": num_kv_splits,
    }
    call = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    return call | {"plain": plain}


def _assert_is_attention(call: dict[str, Any], factor: float = 1.0) -> None:
    """Make the call, and compare the result with the formula in float64, in which `factor` moves from `scale` to the
    latent KV.

    The tolerance of the log-sum-exp is that of its logits. Tensor cores add 16 of the 576 products of a logit to the
    accumulator and truncate it to 24 bits, 36 times: the error is at most 2^-17.8 of the sum of magnitudes
    t = |q| . |k|. A random logit is t / 19 on average. Over 800,000 logits with this truncation the mean error was
    2^-24.3 t, three in 10,000 exceeded 2^-22 t, and none 2^-21.4 t. The row max of 330 logits, which may dominate the
    log-sum-exp, was off by 2^-22.7 t on average, in proportion to itself: hence 1e-6 of it plus 2^-22 t.

    Logits of fp8 queries over an fp8 cache have the error of fp8 accumulation; a softmax weight has up to twice that of
    its logit.
    """
    plain = call.pop("plain")
    MLA.wrapper(**call)
    queries = torch.cat((call["q_nope"].double(), call["q_pe"].double()), -1).cpu()
    out, lse = (None if x is None else x.double().cpu() for x in (call["out"], call["lse"]))
    of_codes = call["q_nope"].dtype == call["kv_c_and_k_pe_cache"].dtype == FP8
    for s, entries in enumerate(plain):
        logits = queries[s] @ (entries * factor).T * (call["scale"] / factor)
        right = logits.softmax(-1) @ entries[:, :LATENT]
        of_sums = 0.0
        if of_codes and len(entries):
            of_sums = abs(call["scale"]) * float(allowed(*accumulated(queries[s], entries.T)[1:]).max())
        tolerance = TOLERANCE[call["out"].dtype] + 2 * of_sums
        torch.testing.assert_close(out[s], right, rtol=tolerance, atol=tolerance / 2)
        if len(entries):  # the tolerance of upstream's own test
            assert 1 - 2 * (out[s] * right).sum() / (out[s] ** 2 + right**2).sum() < 1e-5
        if lse is not None:
            terms = queries[s].abs() @ (entries * factor).abs().T * abs(call["scale"] / factor)
            wide = torch.cat((2.0**-22 * terms, torch.full_like(lse[s, :, None], 3e-6)), -1).amax(-1) + of_sums
            exact = logits.logsumexp(-1)
            assert (lse[s].sub(exact).abs() <= 1e-6 * exact.abs() + wide)[exact.isfinite()].all()
            assert torch.equal(lse[s][~exact.isfinite()], exact[~exact.isfinite()])


KINDS = [
    pytest.param(dtype, kind, id=f"{dtype} {kind or ''}".replace("torch.", "").strip())
    for dtype in (torch.float32, torch.float16, BF16, FP8)
    for kind in (None, FP8)
    if (dtype, kind) != (FP8, FP8)
] + [
    pytest.param(dtype, torch.uint8, id=f"{dtype} fp8_ds_mla".removeprefix("torch.")) for dtype in (torch.float16, BF16)
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "kind"), KINDS)
def test_matches_float64_softmax(
    dtype: torch.dtype, kind: torch.dtype | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths of 0, of 1, ending in a page, and of several splits; also by the kernel for any number of heads."""
    _assert_is_attention(_call([0, 1, 15, 16, 33, 150], dtype=dtype, kind=kind, device=device))
    if dtype != torch.float32:
        monkeypatch.setattr(mla_problem, "_MAX_FEW_HEADS", 0)
        MLA.forget()
        _assert_is_attention(_call([0, 16, 70], dtype=dtype, kind=kind, device=device))
        MLA.forget()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_heads", [1, 16, 17, 33, 65, 128])
def test_any_number_of_heads(num_heads: int, device: str) -> None:
    """Every block shape, full, nearly empty, and several blocks."""
    for dtype in (BF16, FP8)[: 1 + (num_heads in (17, 128))]:
        _assert_is_attention(_call([1, 70], num_heads, dtype=dtype, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 5, 64, 128, 200])
def test_any_page_size(page_size: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the kernel for any number of heads."""
    for most in (mla_problem._MAX_FEW_HEADS, 0):
        monkeypatch.setattr(mla_problem, "_MAX_FEW_HEADS", most)
        MLA.forget()
        _assert_is_attention(_call([100, 64, 3], page_size=page_size, dtype=torch.float16, device=device))
    MLA.forget()


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 200) | st.sampled_from([0, 1, 31, 32, 33, 64, 65]), min_size=1, max_size=3),
    kind=st.sampled_from([None, FP8]),
    num_kv_splits=st.integers(-1, 4),
    scale=st.sampled_from([ENTRY**-0.5, 1.0, -0.3]),
    seed=st.integers(0, 99),
)
def test_any_lengths(
    lengths: list[int], kind: torch.dtype | None, num_kv_splits: int, scale: float, seed: int, device: str
) -> None:
    """Also with logits that differ widely, so that the running row max changes."""
    call = _call(lengths, kind=kind, num_kv_splits=num_kv_splits, seed=seed, device=device)
    _assert_is_attention(call | {"scale": scale})


def _with_tokens(call: dict[str, Any], query_tokens: int) -> dict[str, Any]:
    """The call with several query tokens per sequence; `plain` has the entries that each of them attends to."""
    generator = torch.Generator().manual_seed(query_tokens)
    rows = {name: call[name].repeat_interleave(query_tokens, 0) for name in ("out", "lse", "q_nope", "q_pe")}
    for name in ("q_nope", "q_pe"):
        rows[name] = torch.randn(rows[name].shape, generator=generator).to(rows[name].device, rows[name].dtype)
    newer = [query_tokens - 1 - i for i in range(query_tokens)]
    plain = [entries[: max(0, len(entries) - n)] for entries in call["plain"] for n in newer]
    return call | rows | {"plain": plain, "query_tokens": query_tokens}


# (query tokens, heads, dtype, cache, most heads of the kernels for few)
SEVERAL = [
    (4, 16, BF16, None, 16),  # one tile of 64 rows
    (3, 5, BF16, None, 16),
    (2, 8, torch.float16, FP8, 16),
    (3, 2, BF16, None, 0),
    (2, 3, torch.float32, None, 16),
    (16, 5, BF16, FP8, 16),  # rows of a token in two tiles
    (2, 64, BF16, torch.uint8, 16),  # clusters
    (2, 5, FP8, FP8, 16),
]


@pytest.mark.parametrize(("query_tokens", "num_heads", "dtype", "kind", "most"), few(SEVERAL, 3), ids=str)
def test_several_query_tokens(
    query_tokens: int,
    num_heads: int,
    dtype: torch.dtype,
    kind: torch.dtype | None,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each token attends up to itself, also where the last tile or the whole sequence is shorter than their number."""
    monkeypatch.setattr(mla_problem, "_MAX_FEW_HEADS", most)
    MLA.forget()
    kind = None if kind == dtype else kind
    with config.cpu("kernels"):
        _assert_is_attention(_with_tokens(_call([0, 1, 66, 150], num_heads, dtype=dtype, kind=kind), query_tokens))
    MLA.forget()


@pytest.mark.parametrize("kind", few([None, FP8, torch.uint8], 1), ids=str)
def test_several_query_tokens_equal_single_ones(kind: torch.dtype | None) -> None:
    """Bit for bit what the op gives for each token and its length, in one pass; with hostile lengths and pages."""
    call = _with_tokens(_call([1, 70, 40], 20, kind=kind, num_kv_splits=1), 2)
    call.pop("plain")
    call["seq_lens"] = torch.tensor([1, 2**40, -3])
    call["page_table"] = call["page_table"].long()
    call["page_table"][1, :2] = torch.tensor([2**40, -1])
    cache = call["kv_c_and_k_pe_cache"]
    codes = cache.view(torch.uint8)
    call["kv_c_and_k_pe_cache"] = cache.nan_to_num(0.5) if kind is None else codes.masked_fill(codes & 127 > 60, 56)
    held = call["page_table"].shape[1] * 16
    lengths = [max(0, min(length, held) - newer) for length in call["seq_lens"].tolist() for newer in (1, 0)]
    single = {name: x for name, x in call.items() if name != "query_tokens"} | {
        "out": torch.empty_like(call["out"]),
        "lse": torch.empty_like(call["lse"]),
        "seq_lens": torch.tensor(lengths),
        "page_table": call["page_table"].repeat_interleave(2, 0),
    }
    with config.cpu("kernels"):
        MLA.wrapper(**call)
        MLA.wrapper(**single)
    assert same_bits(call["out"], single["out"])
    assert same_bits(call["lse"], single["lse"])


# (compute capability, heads, dtype, cache, query tokens)
MANY = [
    ("sm_80", 65, BF16, None, 1),  # two blocks
    ("sm_89", 40, torch.float16, FP8, 1),
    ("sm_80", 33, BF16, torch.uint8, 2),  # rows of a token in two blocks
    ("sm_80", 64, FP8, FP8, 1),
    ("sm_120", 17, torch.float16, None, 2),
]


@pytest.mark.parametrize(("arch", "num_heads", "dtype", "kind", "query_tokens"), few(MANY, 3), ids=str)
def test_many_heads_without_wgmma(
    arch: str,
    num_heads: int,
    dtype: torch.dtype,
    kind: torch.dtype | None,
    query_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under every schedule: sequences that are cut, pieces without a tile before, and more tiles than are in flight."""
    monkeypatch.setitem(devices._HOST, 32, replace(devices.model(arch), num_sms=6, cluster=1))
    kind = None if kind == dtype else kind
    for schedule in SCHEDULES:
        MLA.forget()
        call = _call([0, 1, 330, 15, 230], num_heads, dtype=dtype, kind=kind, page_size=5)
        call = _with_tokens(call, query_tokens) if query_tokens > 1 else call
        with config.cpu("kernels"), scheduled(schedule):
            _assert_is_attention(call)
        assert isinstance(tuning.last[MLA.name], MlaSm80Config) == (num_heads > 32)
    MLA.forget()


# (config of a kernel for few heads, heads, dtype, cache, query tokens)
FEW_BLOCKS = [
    (FewHeadsConfig(4, 5, combines=True), 40, BF16, None, 1),
    (FewHeadsConfig(2, 5, combines=True), 40, BF16, None, 1),
    (FewHeadsConfig(1, 5, combines=True), 40, BF16, None, 1),
    (FewHeadsConfig(1, 4, combines=False), 17, BF16, torch.uint8, 1),
    (FewHeadsConfig(2, 4, combines=False), 17, BF16, torch.uint8, 1),
    (CodesConfig(5, combines=True), 20, torch.float16, FP8, 2),
    (FewHeadsConfig(4, 5, combines=False), 17, BF16, torch.uint8, 1),
    (CodesConfig(5, combines=False), 33, BF16, FP8, 1),
    (CodesConfig(5, combines=True), 20, FP8, None, 1),
]


@pytest.mark.parametrize(("one", "num_heads", "dtype", "kind", "query_tokens"), few(FEW_BLOCKS, 1), ids=str)
def test_several_blocks_of_few_heads(
    one: FewHeadsConfig | CodesConfig,
    num_heads: int,
    dtype: torch.dtype,
    kind: torch.dtype | None,
    query_tokens: int,
) -> None:
    """Under every schedule: sequences without a token, with tokens for some warps, and cut ones."""
    for schedule in SCHEDULES:
        call = _call([0, 130, 15, 1], num_heads, dtype=dtype, kind=kind, page_size=5)
        call = _with_tokens(call, query_tokens) if query_tokens > 1 else call
        with config.cpu("kernels"), tuning.forced(MLA.name, one), scheduled(schedule):
            _assert_is_attention(call)


def test_refused_query_tokens() -> None:
    call = _with_tokens(_call([9, 9], 4), 3)
    call.pop("plain")
    for query_tokens in (0, -1, 4):
        with pytest.raises(
            pyops.OpError, match=f"query_tokens: expected a divisor of the 6 rows of q_nope, got {query_tokens}"
        ):
            MLA.wrapper(**call | {"query_tokens": query_tokens})
    with pytest.raises(pyops.OpError, match=r"seq_lens: expected shape \(num_seqs=3,\)"):
        MLA.wrapper(**call | {"query_tokens": 2})
    by_head = call["q_nope"].transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(pyops.OpError, match="q_nope: expected heads of all query tokens of a sequence at one stride"):
        MLA.wrapper(**call | {"q_nope": by_head})


def _launches(
    num_kv_splits: int,
    num_seqs: int = 4,
    num_heads: int = 16,
    device: Any = None,
    cache: str = "bfloat16",
    pages: int = 64,
    queries: str = "bfloat16",
) -> list[Launch]:
    """The launches planned for page tables with some pages of 64 tokens. A `cache` of uint8 has the format
    "fp8_ds_mla".
    """
    make = ArgMaker(device or devices.model())
    args = (
        make.empty(num_seqs, num_heads, LATENT, dtype="bfloat16"),
        make.empty(num_seqs, num_heads, dtype="float32"),
        make.empty(num_seqs, num_heads, LATENT, dtype=queries),
        make.empty(num_seqs, num_heads, ROPE, dtype=queries),
        make.empty(999, 64, 656 if cache == "uint8" else ENTRY, dtype=cache),
        make.empty(num_seqs, dtype="int32"),
        make.empty(num_seqs, pages, dtype="int32"),
        None,
        0.1,
        num_kv_splits,
    )
    return MLA.launches(*args)


def test_splits() -> None:
    """As many as the caller allows; one split is a single pass; the default keeps the device busy."""
    on = devices.model("sm_100")
    (single,) = _launches(1, device=on)
    assert single.grid == (4, 1, 1)
    assert _launches(5, device=on)[0].grid == (4, 5, 1)
    assert _launches(0, device=on)[0].grid[1] > 16
    assert len(_launches(0, num_seqs=1000, device=on)) == 1
    assert _launches(0, device=on)[0].grid == _launches(-1, device=on)[0].grid


def test_shares() -> None:
    """On Hopper sequences are cut into as many pieces as the caller allows, and are whole for one split."""
    (single,) = _launches(1)
    assert single.grid == (1, 4, 1)
    assert [_launches(splits)[0].fixed["max_splits"] for splits in (5, 0, -1)] == [5, 2**31 - 1, 2**31 - 1]
    clusters = [_launches(0, 64, heads, cache="uint8")[0].specialisation.constants["CLUSTER"] for heads in (64, 128)]
    assert clusters == [1, 2]  # two CTAs of heads share conversions of scaled fp8


@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "cache", "pages", "kernel", "grid"),
    [
        (2, 32, "bfloat16", 1, "small_h", (2, 2)),
        (2, 64, "uint8", 2, "small_h", (4, 4)),  # pieces of 64 tokens
        (2, 17, "float8_e4m3fn", 1, "small_h_fp8", (2, 2)),
        (66, 32, "bfloat16", 1, "small_h", (2, 66)),
        (64, 32, "float8_e4m3fn", 1, "small_h_fp8", (2, 64)),
        (67, 32, "bfloat16", 1, "small_h", (2, 67)),  # more blocks of four warp groups than run at once
        (254, 32, "bfloat16", 1, "small_h", (2, 254)),  # four blocks of one warp group on an SM
        (254, 128, "bfloat16", 1, "small_h", (8, 66)),  # such a block goes through four sequences
        (254, 128, "uint8", 1, "small_h", (8, 66)),
        (254, 128, "float8_e4m3fn", 1, "small_h_fp8", (8, 33)),
        (200, 16, "bfloat16", 1, "small_h", (1, 200)),
        (67, 64, "bfloat16", 1, "sm90", (1, 67)),  # more blocks than run at once
        (1, 128, "bfloat16", 8, "small_h", (8, 8)),
        (16, 128, "bfloat16", 1, "small_h", (8, 16)),
        (64, 128, "bfloat16", 1, "sm90", (2, 64)),
        (132, 32, "float8_e4m3fn", 1, "small_h_fp8", (2, 132)),  # an SM has two blocks
        (64, 16, "float8_e4m3fn", 64, "small_h_fp8", (1, 264)),
        (64, 32, "float8_e4m3fn", 64, "sm90_fp8", (1, 132)),
        (37, 32, "float8_e4m3fn", 1274, "sm90_fp8", (1, 132)),  # 839 us by mla_decode_sm90.cu, 557 by this kernel
        (64, 128, "float8_e4m3fn", 64, "sm90", (2, 66)),
        (2, 32, "bfloat16", 3, "small_h", (2, 8)),  # clusters of four, which WGMMA's pieces do not beat
        (1, 20, "bfloat16", 5, "small_h", (2, 8)),
        (1, 16, "bfloat16", 16, "small_h", (4, 16)),  # five GPCs have SMs for a cluster of sixteen
        (1, 16, "bfloat16", 64, "small_h", (1, 64)),  # the combine kernel reads pieces faster than one SM has tiles
        (1, 20, "float8_e4m3fn", 5, "small_h_fp8", (2, 8)),
        (1, 64, "bfloat16", 999, "sm90", (1, 132)),
        (16, 16, "bfloat16", 8, "small_h", (1, 64)),  # more clusters of eight than GPCs may have
        (16, 16, "bfloat16", 64, "small_h", (1, 132)),  # shares, as lengths may be mixed
        (2, 65, "bfloat16", 1, "small_h", (5, 2)),
    ],
)
def test_short_sequences_choose_blocks_of_few_heads(
    num_seqs: int, num_heads: int, cache: str, pages: int, kernel: str, grid: tuple[int, int]
) -> None:
    """By the capacity of the page table."""
    launch = _launches(0, num_seqs, num_heads, cache=cache, pages=pages)[0]
    assert launch.specialisation.kernel.file == f"attention/mla_decode_{kernel}.cu"
    assert launch.grid[:2] == grid
    if kernel == "small_h":
        num_blocks = math.prod(grid)
        assert launch.specialisation.constants["GROUPS"] == (4 if num_blocks <= 132 else 2 if num_blocks <= 264 else 1)


@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "pages", "kernel", "grid", "combines", "combine_blocks"),
    [
        (15, 20, 1, "small_h_fp8", (2, 15), False, None),
        (149, 2, 1, "small_h_fp8", (1, 149), False, None),
        (8, 64, 10, "small_h_fp8", (4, 32), False, None),  # clusters of four
        (64, 16, 64, "sm90_fp8", (1, 132), True, None),
        (33, 128, 47, "sm90_fp8", (2, 66), True, None),  # one level of the tree
        (7, 128, 63, "sm90_fp8", (2, 66), False, 4),  # three levels took 42.5 us, the combine kernel 30.8
        (16, 128, 64, "sm90_fp8", (2, 66), False, 4),
        (1, 128, 625, "sm90_fp8", (2, 66), False, 3),
    ],
)
def test_queries_of_fp8_choose(
    num_seqs: int,
    num_heads: int,
    pages: int,
    kernel: str,
    grid: tuple[int, int],
    combines: bool,
    combine_blocks: int | None,
) -> None:
    """Blocks of few heads serve short sequences. The combine kernel has a warp for each task if an SM can hold it."""
    first, *combine = _launches(0, num_seqs, num_heads, cache="float8_e4m3fn", pages=pages, queries="float8_e4m3fn")
    assert (first.specialisation.kernel.file, first.grid[:2]) == (f"attention/mla_decode_{kernel}.cu", grid)
    assert first.specialisation.constants["COMBINES"] == combines
    assert [one.specialisation.constants["BLOCKS"] for one in combine] == [combine_blocks][: combine_blocks is not None]


@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "cache", "pages", "kernel", "grid"),
    [
        (1, 128, "bfloat16", 64, "decode", (4, 32)),  # one wave of blocks of 32 heads, each with 128 tokens
        (2, 128, "bfloat16", 64, "decode_sm80", (2, 64)),  # two waves of them
        (1, 128, "float8_e4m3fn", 64, "decode_sm80", (2, 32)),
        (64, 64, "bfloat16", 64, "decode_sm80", (1, 132)),
    ],
)
def test_many_heads_without_wgmma_choose_by_waves(
    num_seqs: int, num_heads: int, cache: str, pages: int, kernel: str, grid: tuple[int, int]
) -> None:
    """On 132 SMs."""
    launch = _launches(0, num_seqs, num_heads, replace(devices.model("sm_80"), num_sms=132), cache, pages)[0]
    assert (launch.specialisation.kernel.file, launch.grid[:2]) == (f"attention/mla_{kernel}.cu", grid)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_with_little_shared_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """99 KiB hold 64 heads with tiles of 16 tokens; fewer heads, only the smallest block, and for fp8 the next one."""
    little = replace(devices.model(), shared_memory=99 * 1024)
    (launch,) = _launches(1, num_heads=128, device=little)
    assert (launch.grid, launch.block) == ((2, 4, 1), (256, 1, 1))
    assert launch.shared <= little.shared_memory - mla_sm80.STATIC_SHARED
    (launch,) = _launches(1, num_heads=32, device=little)
    assert (launch.grid, launch.block) == ((8, 1, 1), (128, 1, 1))
    assert launch.shared <= little.shared_memory
    (launch,) = _launches(1, num_heads=128, device=replace(little, shared_memory=48 * 1024))
    assert launch.specialisation.kernel.file == "attention/mla_decode_simt.cu"
    monkeypatch.setattr(mla_plan, "BLOCKS", mla_plan.BLOCKS[-1:])
    MLA.forget()
    for dtype in (BF16, FP8):
        _assert_is_attention(_call([0, 1, 50], 20, dtype=dtype, device=device))
    MLA.forget()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("arch", "num_heads", "little"),
    [
        ("sm_80", 128, False),
        ("sm_80", 16, True),
        ("sm_89", 128, True),
        ("sm_90", 128, False),
        ("sm_90", 32, False),
        ("sm_100", 128, False),
        ("sm_120", 128, True),
    ],
)
def test_blocks_compile_without_local_memory(
    arch: str, num_heads: int, little: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = devices.model(arch)
    device = replace(device, shared_memory=99 * 1024) if little else device
    monkeypatch.setattr(mla_problem, "_MIN_HEADS_FOR_WGMMA", 1000)
    monkeypatch.setattr(mla_problem, "_MAX_FEW_HEADS", 0)
    for cache in ("bfloat16", "float8_e4m3fn", "uint8")[: 2 + (num_heads > 32)]:
        one = _launches(1, 64, num_heads, device, cache)[0].specialisation
        report = offline.compile(one.kernel.file, str(one), one.text, arch, one.kernel.options)
        assert (report.spill_bytes, report.stack_bytes) == (0, 0)
        is_many = one.kernel.file.endswith("sm80.cu")
        assert report.shared_bytes <= (mla_sm80 if is_many else mla_plan).STATIC_SHARED


@pytest.mark.parametrize("device", DEVICES)
def test_matches_unabsorbed_attention(device: str) -> None:
    """Keys and values of each head are projected from the latent, as the paper defines them."""
    heads, size, length = 4, 32, 40
    call = _call([length], heads, dtype=torch.float32, device=device)
    entries = call.pop("plain")[0]
    latent, rope = entries.split((LATENT, ROPE), -1)
    generator = torch.Generator().manual_seed(5)
    up_key, up_value = (
        torch.randn(heads, size, LATENT, generator=generator, dtype=torch.float64) / LATENT**0.5 for _ in "kv"
    )
    query = torch.randn(heads, size, generator=generator, dtype=torch.float64)
    rotated = torch.randn(heads, ROPE, generator=generator, dtype=torch.float64)
    keys = torch.cat((torch.einsum("hdc,jc->hjd", up_key, latent), rope.expand(heads, -1, -1)), -1)
    values = torch.einsum("hdc,jc->hjd", up_value, latent)
    whole = torch.cat((query, rotated), -1)[:, None]
    right = torch.nn.functional.scaled_dot_product_attention(whole, keys, values, scale=(size + ROPE) ** -0.5)[:, 0]
    call["q_nope"] = torch.einsum("hd,hdc->hc", query, up_key)[None].float().to(device)
    call["q_pe"], call["scale"] = rotated[None].float().to(device), (size + ROPE) ** -0.5
    MLA.wrapper(**call)
    result = torch.einsum("hc,hdc->hd", call["out"][0].double().cpu(), up_value)
    torch.testing.assert_close(result, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("code", [None, FP8, FNUZ], ids=["auto", "fp8", "fnuz"])
def test_reads_the_cache_of_concat_and_cache_mla(code: torch.dtype | None, device: str) -> None:
    """The fp8 scale multiplies the scale of the logits and the result."""
    kind, factor = ("fp8", 0.05) if code else ("auto", 1.0)
    call = _call([20], 16, device=device)
    call.pop("plain")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(20, ENTRY, generator=generator).to(BF16).to(device)
    cache = torch.zeros(5, 16, ENTRY, dtype=torch.uint8 if code == FP8 else code or BF16, device=device)
    pages = call["page_table"][0].long()
    slots = torch.cat([page * 16 + torch.arange(16, device=device) for page in pages])[:20]
    pyops.concat_and_cache_mla(tokens[:, :LATENT], tokens[:, LATENT:], cache, slots, kind, torch.tensor(factor))
    call |= {"kv_c_and_k_pe_cache": cache, "scale": ENTRY**-0.5 * factor}
    MLA.wrapper(**call)
    entries = tokens.double().cpu()
    if code:
        entries = (tokens.cpu().float() / factor).to(code).double() * factor
    queries = torch.cat((call["q_nope"], call["q_pe"]), -1).double().cpu()[0]
    logits = queries @ entries.T * ENTRY**-0.5
    right = logits.softmax(-1) @ entries[:, :LATENT]
    torch.testing.assert_close(call["out"][0].double().cpu() * factor, right, rtol=1.6e-2, atol=8e-3)
    torch.testing.assert_close(call["lse"][0].double().cpu(), logits.logsumexp(-1), rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_ds_mla_agrees_with_the_gather(device: str) -> None:
    """Attention over a cache of concat_and_cache_mla equals attention over what cp_gather_and_upconvert_fp8_kv_cache
    reads.
    """
    call = _call([20], 16, device=device)
    tokens = torch.randn(20, ENTRY, generator=torch.Generator().manual_seed(1)).to(BF16).to(device)
    cache = torch.zeros(5, 16, 656, dtype=torch.uint8, device=device)
    slots = torch.cat([page * 16 + torch.arange(16, device=device) for page in call["page_table"][0].long()])[:20]
    pyops.concat_and_cache_mla(tokens[:, :LATENT], tokens[:, LATENT:], cache, slots, "fp8_ds_mla", 1.0)
    gathered, start = torch.empty_like(tokens), torch.zeros(1, dtype=torch.int32, device=device)
    pyops.cp_gather_and_upconvert_fp8_kv_cache(cache, gathered, call["page_table"], call["seq_lens"], start, 1)
    _assert_is_attention(call | {"kv_c_and_k_pe_cache": cache, "plain": [gathered.double().cpu()]})


@pytest.mark.parametrize("device", DEVICES)
def test_sliced_tensors(device: str) -> None:
    """Queries inside one tensor, gaps between pages and slots, strided 64-bit indices, some heads of a result."""
    call = _call([100, 7], dtype=torch.float16, device=device)
    whole = torch.cat((call["q_nope"], call["q_pe"], call["q_pe"].new_full((2, 5, 8), torch.nan)), -1)
    cache = call["kv_c_and_k_pe_cache"]
    apart = torch.full((len(cache), 20, 600), torch.nan, dtype=cache.dtype, device=device)
    apart[:, :16, :ENTRY] = cache
    result = torch.full((2, 7, LATENT), 7.0, dtype=cache.dtype, device=device)
    call |= {
        "q_nope": whole[..., :LATENT],
        "q_pe": whole[..., LATENT:ENTRY],
        "kv_c_and_k_pe_cache": apart[:, :16, :ENTRY],
        "seq_lens": torch.stack((call["seq_lens"].long(),) * 2, -1)[:, 0],
        "page_table": call["page_table"].long().T.contiguous().T,
        "out": result[:, :5],
    }
    _assert_is_attention(call)
    assert (result[:, 5:] == 7.0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [None, FP8, FNUZ, torch.uint8], ids=["auto", "fp8", "fnuz", "fp8_ds_mla"])
def test_any_alignment(kind: torch.dtype | None, device: str) -> None:
    """A cache, queries and a result that begin at any element."""
    call = _call([40, 3], 3, kind=kind, device=device)
    for name in ("kv_c_and_k_pe_cache", "q_nope", "q_pe", "out"):
        value = call[name]
        shifted = value.new_empty(value.numel() + 1)[1:].view(value.shape)
        call[name] = shifted.copy_(value)
        _assert_is_attention(dict(call))


@pytest.mark.parametrize("device", DEVICES)
def test_without_lse(device: str) -> None:
    for lengths in ([60], [300]):
        call = _call(lengths, device=device)
        call.pop("plain")
        MLA.wrapper(**call)
        alone = torch.empty_like(call["out"])
        MLA.wrapper(**call | {"lse": None, "out": alone})
        assert same_bits(alone, call["out"])


@pytest.mark.parametrize("device", DEVICES)
def test_larger_workspace_is_not_overrun(device: str) -> None:
    call = _call([200], device=device)
    size = pyops.sm100_cutlass_mla_get_workspace_size(200, 1, 132, 2)
    call["workspace"] = torch.full((size,), 7, dtype=torch.uint8, device=device)
    _assert_is_attention(dict(call))
    assert (call["workspace"] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP8])
def test_hostile_indices(dtype: torch.dtype) -> None:
    """Page numbers and lengths out of range contribute nothing, under every schedule."""
    call = _call([20, 100, 33], 2, dtype=dtype)
    call.pop("plain")
    table = torch.tensor([[0, -1, 2, 3, 4, 5, 6]] * 3)
    table[1] = torch.tensor([10**9, 1, -(2**31), 23, 24, 0, 2**31 - 1])
    call["page_table"], call["seq_lens"] = table.int(), torch.tensor([20, 2**31 - 1, -5], dtype=torch.int32)
    cache = call["kv_c_and_k_pe_cache"].float().nan_to_num(nan=0.5).to(dtype)
    call["kv_c_and_k_pe_cache"] = cache
    assert_matches_reference(MLA, *call.values(), warp_sizes=(32, 64))
    with_far = call | {"page_table": table * 2**31, "seq_lens": torch.tensor([2**62, 2**31 + 40, -(2**62)])}
    assert_matches_reference(MLA, *with_far.values(), schedules=[pyops.testing.SCHEDULES[0]])


@pytest.mark.parametrize("device", DEVICES)
def test_missing_pages(device: str) -> None:
    """A sequence attends to the tokens that it has; without any, the result is zeros."""
    call = _call([96, 40], device=device)
    entries = call["plain"][0]
    call["page_table"][0, 1] = -1
    call["page_table"][0, 4] = len(call["kv_c_and_k_pe_cache"])
    call["page_table"][1] = 2**31 - 1
    call["plain"] = [torch.cat((entries[:16], entries[32:64], entries[80:])), entries[:0]]
    _assert_is_attention(call)
    assert (call["out"][1] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_indices_out_of_range_are_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_CHECK", "1")
    MLA.forget()
    call = _call([20, 40], device=device)
    call.pop("plain")
    MLA.wrapper(**call)
    call["page_table"][1, 1] = 77
    call["page_table"][0, 2] = 77  # after the sequence
    with pytest.raises(pyops.OpError, match=r"page_table: 1 of 6 indices are out of range, the first at \(1, 1\): 77"):
        MLA.wrapper(**call)
    call["page_table"][1, 1] = call["page_table"][0, 2] = 0
    call["seq_lens"][0] = 49
    with pytest.raises(pyops.OpError, match=r"seq_lens: 1 of 2 indices"):
        MLA.wrapper(**call)
    MLA.forget()


WRONG: list[tuple[str, Any]] = [
    ("q_nope", torch.zeros(2, 5, 511, dtype=BF16)),
    ("q_nope", torch.zeros(2, 5, LATENT, dtype=torch.float64)),
    ("q_pe", torch.zeros(2, 4, ROPE, dtype=BF16)),
    ("q_pe", torch.zeros(2, 5, ROPE, dtype=torch.float16)),
    ("out", torch.zeros(2, 5, ENTRY, dtype=BF16)),
    ("out", torch.zeros(2, 5, LATENT, dtype=torch.float16)),
    ("out", torch.zeros(2, LATENT, 5, dtype=BF16).transpose(1, 2)),
    ("lse", torch.zeros(5, 2)),
    ("lse", torch.zeros(2, 5, dtype=BF16)),
    ("kv_c_and_k_pe_cache", torch.zeros(4, 16, 655, dtype=torch.uint8)),
    ("kv_c_and_k_pe_cache", torch.zeros(4, 16, 656, dtype=FP8)),
    ("kv_c_and_k_pe_cache", torch.zeros(4, 16, ENTRY, dtype=torch.float16)),
    ("kv_c_and_k_pe_cache", torch.zeros(4, 16, ENTRY, dtype=torch.float8_e5m2)),
    ("kv_c_and_k_pe_cache", torch.zeros(4, 0, ENTRY, dtype=BF16)),
    ("kv_c_and_k_pe_cache", torch.zeros(4, ENTRY, 16, dtype=BF16).transpose(1, 2)),
    ("seq_lens", torch.zeros(3, dtype=torch.int32)),
    ("page_table", torch.zeros(2, 2)),
    ("page_table", torch.zeros(3, 2, dtype=torch.int32)),
    ("workspace", torch.zeros(9)),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_refused(name: str, value: torch.Tensor) -> None:
    call = _call([20, 7])
    call.pop("plain")
    with pytest.raises(pyops.OpError) as caught:
        MLA.wrapper(**call | {name: value})
    assert caught.value.argument == name
    assert call["out"].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_ds_mla_needs_16_bit_outputs(dtype: torch.dtype) -> None:
    call = _call([20, 7], dtype=dtype)
    call.pop("plain")
    with pytest.raises(pyops.OpError, match="q_nope"):
        MLA.wrapper(**call | {"kv_c_and_k_pe_cache": torch.zeros(4, 16, 656, dtype=torch.uint8)})


def test_workspace_size() -> None:
    """Upstream's formula: 513 floats per split, for each of 128 heads and each sequence."""
    size = pyops.sm100_cutlass_mla_get_workspace_size
    unit = 513 * 4 * 128
    assert size(1, 7, 132, 1) == 7 * unit
    assert size(1, 7, 132, 5) == 35 * unit
    thousand = 1024
    for batches, tokens, splits in (
        (4, 16, 16),
        (4, 15, 8),
        (8, 4, 8),
        (8, 3, 1),
        (16, 8, 4),
        (16, 7, 1),
        (48, 32, 2),
        (32, 16, 2),
        (32, 15, 1),
        (96, 16, 1),
        (128, 128, 1),
    ):
        for chosen_by_upstream in (0, -1):
            assert size(tokens * thousand, batches, 132, chosen_by_upstream) == splits * batches * unit
    assert size(32 * thousand, 48, 192, 0) == 4 * 48 * unit
    assert size(16 * thousand, 96, 192, 0) == 2 * 96 * unit
