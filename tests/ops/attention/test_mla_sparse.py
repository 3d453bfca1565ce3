"""Sparse MLA against softmax in float64 over the listed slots, against dense MLA decode, and hostile lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyops
from pyops import tuning
from pyops._core.system import device as devices
from pyops.example import ArgMaker
from pyops.ops.attention import mla_upconvert
from pyops.testing import assert_matches_reference, same_bits
from tests.ops.attention.test_mla import BF16, ENTRY, FP8, LATENT, ROPE, TOLERANCE
from tests.support.calls import DEVICES

pytestmark = pytest.mark.rotates

SPARSE = pyops.registry["sparse_mla_attention"]
PAGE_SIZE, NUM_PAGES = 16, 9
SLOTS = PAGE_SIZE * NUM_PAGES


def _call(
    num_tokens: int,
    topk: int,
    num_heads: int,
    dtype: torch.dtype = BF16,
    kind: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """The arguments of a call over any slots, among them absent ones, and `plain`: the latent KV of every slot.

    The pages of the cache are not adjacent, and NaN lies between them. A `kind` of uint8 makes latent KV in the format
    "fp8_ds_mla".
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, to: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(to)

    pages = NUM_PAGES, PAGE_SIZE
    if kind == torch.uint8:
        quants, rotated = draw(*pages, LATENT, to=FP8), draw(*pages, ROPE, to=dtype)
        scales = draw(*pages, 4, to=torch.float32).abs() * torch.tensor([0.1, 1.0, 2.0, 0.01])
        entries = torch.cat([x.view(torch.uint8) for x in (quants, scales, rotated)], -1)
        plain = torch.cat(((quants.float() * scales.repeat_interleave(128, -1)).to(dtype), rotated), -1)
    else:
        entries = plain = draw(*pages, ENTRY, to=kind or dtype)
    whole = torch.full((NUM_PAGES, PAGE_SIZE + 2, entries.shape[-1]), 255, dtype=torch.uint8)
    padded = whole if kind == torch.uint8 else torch.full(whole.shape, torch.nan).to(entries.dtype)
    padded[:, :PAGE_SIZE] = entries
    queries = draw(num_tokens, num_heads, ENTRY, to=dtype).to(device)
    indices = torch.randint(-1, SLOTS, (num_tokens, topk), generator=generator, dtype=torch.int32)
    return {
        "out": torch.full((num_tokens, num_heads, LATENT), torch.nan, dtype=BF16 if dtype == FP8 else dtype).to(device),
        "lse": torch.full((num_tokens, num_heads), torch.nan, device=device),
        "q_nope": queries[..., :LATENT],
        "q_pe": queries[..., LATENT:],
        "kv_c_and_k_pe_cache": padded.to(device)[:, :PAGE_SIZE],
        "indices": indices.to(device),
        "topk_length": None,
        "scale": ENTRY**-0.5,
        "num_kv_splits": 0,
        "plain": plain.double().flatten(0, 1),
    }


def _assert_is_attention(call: dict[str, Any]) -> None:
    """Make the call, and compare the result with the formula in float64, with the tolerances of dense MLA."""
    plain = call.pop("plain")
    SPARSE.wrapper(**call)
    queries = torch.cat((call["q_nope"].double(), call["q_pe"].double()), -1).cpu()
    out, lse = call["out"].double().cpu(), call["lse"].double().cpu()
    tolerance = TOLERANCE[call["out"].dtype]
    for t, row in enumerate(call["indices"].tolist()):
        length = len(row) if call["topk_length"] is None else int(call["topk_length"][t])
        entries = plain[[slot for slot in row[: max(0, length)] if 0 <= slot < SLOTS]]
        logits = queries[t] @ entries.T * call["scale"]
        torch.testing.assert_close(out[t], logits.softmax(-1) @ entries[:, :LATENT], rtol=tolerance, atol=tolerance / 2)
        right = logits.logsumexp(-1)
        terms = queries[t].abs() @ entries.abs().T * abs(call["scale"])
        wide = 3e-6 + 2.0**-22 * (terms.amax(-1) if len(entries) else 0.0)
        assert (right.isinf() | ((lse[t] - right).abs() <= 1e-6 * right.abs() + wide)).all()
        assert torch.equal(lse[t][right.isinf()], right[right.isinf()])


# Each kernel of each device: wgmma, few heads, mma.sync, and none.
KERNELS = [
    pytest.param(dtype, kind, heads, arch, id=f"{dtype} {kind or ''} {heads} {arch}".replace("torch.", ""))
    for dtype, kind, heads, arch in (
        (BF16, None, 20, "sm_90"),
        (torch.float16, FP8, 70, "sm_90"),
        (BF16, torch.uint8, 128, "sm_90"),
        (BF16, FP8, 16, "sm_90"),
        (BF16, torch.uint8, 8, "sm_90"),
        (BF16, torch.uint8, 40, "sm_80"),
        (torch.float16, torch.uint8, 16, "sm_75"),
        (torch.float32, FP8, 3, "sm_80"),
    )
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "kind", "heads", "arch"), KERNELS)
def test_matches_float64_softmax(
    dtype: torch.dtype,
    kind: torch.dtype | None,
    heads: int,
    arch: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Absent slots anywhere in a list, slots that are listed twice, and a list without a slot."""
    if str(device) != "cuda":
        monkeypatch.setenv("PYOPS_ARCH", arch)
    SPARSE.forget()
    try:
        call = _call(3, 150, heads, dtype, kind, device)
        call["indices"][1] = -1
        call["indices"][2, :140] = SLOTS
        _assert_is_attention(call)
        assert (call["out"][1] == 0).all()
        assert (call["lse"][1] == -torch.inf).all()
    finally:
        SPARSE.forget()


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=8, deadline=None)
@given(data=st.data(), topk=st.sampled_from([1, 31, 64, 130, 300]), heads=st.sampled_from([4, 20]))
def test_any_lengths(device: str, data: st.DataObject, topk: int, heads: int) -> None:
    """Lengths of 0, of 1 and beyond the list; what a list has after its length is not read."""
    lengths = data.draw(st.lists(st.integers(-3, topk + 3), min_size=1, max_size=3))
    call = _call(len(lengths), topk, heads, seed=data.draw(st.integers(0, 9)), device=device)
    call["topk_length"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    call["num_kv_splits"] = data.draw(st.integers(-1, 3))
    _assert_is_attention(call)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [None, FP8], ids=str)
def test_agrees_with_dense_attention(kind: torch.dtype | None, device: str) -> None:
    """A list of the slots of a sequence in their order gives the bits of dense attention by the same kernel, also where
    that loads a 16-bit cache by TMA."""
    call = _call(2, 5 * PAGE_SIZE, 20, torch.float16, kind, device)
    del call["plain"]
    pages = torch.tensor([[3, 0, 8, 1, 5], [7, 2, 4, 6, 0]], dtype=torch.int32, device=device)
    call["indices"] = (pages[..., None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device).int()).flatten(1)
    SPARSE.wrapper(**call)
    dense = {name: call[name] for name in ("q_nope", "q_pe", "kv_c_and_k_pe_cache", "scale", "num_kv_splits")}
    dense |= {"seq_lens": torch.full((2,), 5 * PAGE_SIZE, dtype=torch.int32, device=device), "page_table": pages}
    dense |= {"out": torch.empty_like(call["out"]), "lse": torch.empty_like(call["lse"]), "workspace": None}
    with tuning.forced("sm100_cutlass_mla_decode", tuning.last[SPARSE.name]):
        pyops.sm100_cutlass_mla_decode(**dense)
    assert same_bits(dense["out"], call["out"])
    assert same_bits(dense["lse"], call["lse"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_converted_cache_gives_the_bits_of_16_bits(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_upconvert, "pays", lambda problem: problem.is_ds_mla)
    call = _call(2, 140, 20, dtype, torch.uint8, device)
    plain = call.pop("plain").to(dtype).view(NUM_PAGES, PAGE_SIZE, ENTRY).to(device)
    results = []
    for cache in (call["kv_c_and_k_pe_cache"], plain):
        SPARSE.forget()
        out, lse = torch.empty_like(call["out"]), torch.empty_like(call["lse"])
        SPARSE.wrapper(**call | {"kv_c_and_k_pe_cache": cache, "out": out, "lse": lse})
        results.append((out, lse))
    SPARSE.forget()
    assert all(same_bits(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(("dtype", "heads"), [(torch.float32, 2), (BF16, 2), (BF16, 20), (FP8, 20)])
def test_hostile_lists(dtype: torch.dtype, heads: int) -> None:
    """Slots and lengths out of range contribute nothing, under every schedule, and neither does slot 0 for them."""
    call = _call(3, 70, heads, dtype)
    del call["plain"]
    call["kv_c_and_k_pe_cache"][0, 0] = torch.nan
    call["indices"][call["indices"] == 0] = 1
    call["indices"][0, ::3] = torch.tensor([2**31 - 1, -(2**31), SLOTS, SLOTS + 1, -1, 7]).int().repeat(4)
    call["topk_length"] = torch.tensor([2**31 - 1, -5, 33], dtype=torch.int32)
    assert_matches_reference(SPARSE, *call.values(), warp_sizes=(32, 64))
    far = call["indices"].long()
    far[2, ::2] *= 2**40
    call |= {"indices": far, "topk_length": torch.tensor([2**62, -(2**62), 2**31 + 40])}
    assert_matches_reference(SPARSE, *call.values(), schedules=[pyops.testing.SCHEDULES[0]])


def test_slots_out_of_range_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot of -1 means no token; others that do not exist are reported, and so are lengths."""
    monkeypatch.setenv("PYOPS_CHECK", "1")
    SPARSE.forget()
    call = _call(2, 8, 3)
    del call["plain"]
    SPARSE.wrapper(**call)
    call["indices"][1, 2] = SLOTS
    with pytest.raises(pyops.OpError, match=r"indices: 1 of 16 indices are out of range, the first at \(1, 2\): 144"):
        SPARSE.wrapper(**call)
    call["topk_length"] = torch.tensor([9, 2], dtype=torch.int32)
    with pytest.raises(pyops.OpError, match="topk_length: 1 of 2 indices"):
        SPARSE.wrapper(**call)
    SPARSE.forget()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q_pe", torch.zeros(2, 3, LATENT, dtype=BF16)),
        ("kv_c_and_k_pe_cache", torch.zeros(4, 16, 655, dtype=torch.uint8)),
        ("indices", torch.zeros(3, 8, dtype=torch.int32)),
        ("indices", torch.zeros(2, 8)),
        ("indices", torch.zeros(8, 2, dtype=torch.int32).T),
        ("topk_length", torch.zeros(3, dtype=torch.int32)),
    ],
)
def test_refused(name: str, value: torch.Tensor) -> None:
    call = _call(2, 8, 3)
    del call["plain"]
    with pytest.raises(pyops.OpError) as caught:
        SPARSE.wrapper(**call | {name: value})
    assert caught.value.argument == name
    assert call["out"].isnan().all()


@pytest.mark.parametrize(
    ("arch", "cache", "heads", "kernel"),
    [
        ("sm_90", "fp8_ds_mla", 128, "mla_decode_sm90"),
        ("sm_90", "bfloat16", 128, "mla_decode_sm90"),
        ("sm_90", "bfloat16", 16, "mla_decode_small_h"),
        ("sm_90", "float8_e4m3fn", 16, "mla_decode_small_h_fp8"),
        ("sm_80", "fp8_ds_mla", 128, "mla_decode_sm80"),
        ("sm_120", "fp8_ds_mla", 128, "mla_decode_sm80"),
    ],
)
def test_kernel_of_a_device(arch: str, cache: str, heads: int, kernel: str) -> None:
    """Decode of few tokens is split; a prompt of many tokens is a single pass without a combine."""
    make = ArgMaker(devices.model(arch))
    shape = (64, 64, 656) if cache == "fp8_ds_mla" else (64, 64, ENTRY)
    for num_tokens, launches in ((6, 2), (8192, 1)):
        planned = SPARSE.launches(
            make.empty(num_tokens, heads, LATENT, dtype="bfloat16"),
            None,
            make.empty(num_tokens, heads, LATENT, dtype="bfloat16"),
            make.empty(num_tokens, heads, ROPE, dtype="bfloat16"),
            make.empty(*shape, dtype="uint8" if cache == "fp8_ds_mla" else cache),
            make.empty(num_tokens, 4096, dtype="int32"),
            None,
            0.1,
            0,
        )
        files = [one.specialisation.kernel.file for one in planned]
        converts = (kernel, cache, num_tokens) == ("mla_decode_sm90", "fp8_ds_mla", 8192)
        assert files[converts] == f"attention/{kernel}.cu"
        assert (files[0] == "attention/mla_upconvert.cu") == converts
        assert len(planned) >= launches


@pytest.mark.parametrize(
    ("num_tokens", "cache", "num_pages", "converts"),
    [
        (4096, "uint8", 512, True),
        (4096, "float8_e4m3fn", 512, False),
        (4096, "uint8", 8192, False),  # the converted cache would have 604 MB
        (128, "uint8", 4096, False),  # a slot is listed once
        (128, "uint8", 512, True),
        (16, "uint8", 512, False),
    ],
)
def test_converts_a_cache_that_many_tokens_share(num_tokens: int, cache: str, num_pages: int, converts: bool) -> None:
    make = ArgMaker(devices.model("sm_90"))
    out, pe = (make.empty(num_tokens, 128, size, dtype="bfloat16") for size in (LATENT, ROPE))
    entries = make.empty(num_pages, 64, 656 if cache == "uint8" else ENTRY, dtype=cache)
    indices = make.empty(num_tokens, 2048, dtype="int32")
    first = SPARSE.launches(out, None, out, pe, entries, indices, None, 0.1, 0)[0]
    assert (first.specialisation.kernel.file == "attention/mla_upconvert.cu") == converts
