"""Penalties and bitmasks against numpy: exact, for any contents, sizes and addresses."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops import tuning
from pyops._core.system.device import model
from pyops.ops.sampling import _masked_edit
from pyops.ops.sampling._masked_edit import EditConfig, EditProblem, choose
from pyops.testing import CONTENTS, Layout, filled, same_bits, strategies
from tests.support.calls import DEVICES

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SPECIAL = [0.0, -0.0, 1e-40, -1e-40, 3.0, -3.0, 1e38, -1e38, float("inf"), float("-inf"), float("nan")]


def exact(x: torch.Tensor) -> Any:
    return x.detach().cpu().double().numpy()


def rounded(x: Any, dtype: torch.dtype) -> torch.Tensor:
    """float64 values rounded by float32 arithmetic once, then to `dtype`."""
    with numpy.errstate(all="ignore"):
        return torch.from_numpy(numpy.asarray(x, "float64").astype("float32")).to(dtype)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    found = actual.cpu()
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    assert same_bits(found.masked_fill(nan, 0), expected.masked_fill(nan, 0))


def repetition(logits: torch.Tensor, prompt: torch.Tensor, output: torch.Tensor, penalties: torch.Tensor) -> Any:
    x, p = exact(logits), exact(penalties)[:, None]
    with numpy.errstate(all="ignore"):
        lowered = rounded(numpy.where(x > 0, x / p, x * p), logits.dtype)
    return torch.where((prompt | output).cpu(), lowered, logits.cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    num_seqs=st.integers(1, 5),
    vocab_size=st.sampled_from([1, 2, 3, 15, 16, 17, 31, 256, 1019]),
    kind=st.sampled_from(CONTENTS),
    share=st.sampled_from([0.0, 0.005, 0.5, 1.0]),
    offset=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_repetition_penalties(
    dtype: torch.dtype, num_seqs: int, vocab_size: int, kind: str, share: float, offset: int, seed: int, device: str
) -> None:
    """Rows of any size, so that adjacent rows share a vector; few tokens set, or all; masks and logits misaligned."""
    generator = torch.Generator(device).manual_seed(seed)
    masks = [torch.rand((num_seqs, vocab_size), device=device, generator=generator) < share for _ in range(2)]
    logits = filled(torch.randn((num_seqs, vocab_size), device=device, generator=generator).to(dtype), kind)
    penalties = (1 + torch.rand(num_seqs, device=device, generator=generator)).to(dtype)
    right = repetition(logits, *masks, penalties)
    place = Layout(offset=offset).place
    logits = place(logits)
    pyops.apply_repetition_penalties_(logits, *map(place, masks), penalties)
    assert_same(logits, right)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_repetition_of_special_values(dtype: torch.dtype, device: str) -> None:
    """Applied once, also where both masks are set; 0, NaN and subnormal numbers; penalties of any kind."""
    x = torch.tensor(SPECIAL * 2, device=device, dtype=dtype).expand(8, -1).contiguous()
    penalties = torch.tensor([1.05, 2.0, 0.5, 0.0, -1.0, 1e-30, float("inf"), float("nan")], device=device).to(dtype)
    mask = torch.arange(x.shape[1], device=device).expand(8, -1) < len(SPECIAL)
    right = repetition(x, mask, mask, penalties)
    pyops.apply_repetition_penalties_(x, mask.contiguous(), mask.contiguous(), penalties)
    assert_same(x, right)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("batch", "eager"), [(1, True), (1, False), (2, True), (4, False)])
@pytest.mark.parametrize("vocab_size", [4001, 4096])
def test_vectors_of_a_thread(
    vocab_size: int, batch: int, eager: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread has one or several vectors, and loads logits with their marks or after them; more rows than a dimension
    of a grid has."""
    num_seqs = 3
    monkeypatch.setattr(_masked_edit, "MAX_GRID_YZ", 2)
    generator = torch.Generator(device).manual_seed(vocab_size)
    shape = num_seqs, vocab_size
    logits = torch.randn(shape, device=device, generator=generator)
    masks = [torch.rand(shape, device=device, generator=generator) < 0.05 for _ in range(2)]
    penalties = 1 + torch.rand(num_seqs, device=device, generator=generator)
    frequency = torch.full((num_seqs,), 0.25, device=device)
    presence = torch.arange(num_seqs, device=device, dtype=torch.float32)
    bitmask = torch.randint(-(2**31), 2**31, (num_seqs, -(-vocab_size // 32)), generator=generator, device=device).int()
    bitmask[:, ::3], bitmask[:, 1::3] = 0, -1
    tokens = torch.arange(vocab_size, device=device)
    lowered = torch.where(masks[0], logits - (0.75 + presence[:, None]), logits)
    allowed = bitmask[:, tokens // 32] >> tokens % 32 & 1
    calls = {
        "apply_repetition_penalties_": ((*masks, penalties), repetition(logits, *masks, penalties)),
        "apply_penalties_": ((masks[0].int() * 3, frequency, presence), lowered),
        "apply_token_bitmask_": ((bitmask,), logits.masked_fill(allowed == 0, -float("inf"))),
    }
    for name, (others, right) in calls.items():
        x, op = logits.clone(), pyops.registry[name]
        op.forget()
        with tuning.forced(name, EditConfig(batch, eager, 128)):
            op.call(x, *others)
        op.forget()
        assert_same(x, right.cpu())


def test_choice() -> None:
    """One wave of blocks as long as four vectors to a thread allow it. Few logits are loaded before their marks."""
    device = model("sm_90")
    for num_rows, vocab_size, itemsize, expected in (
        (1, 128256, 4, (1, True)),
        (4, 128256, 4, (1, True)),
        (4, 153600, 4, (2, False)),
        (34, 32000, 4, (4, False)),
        (8, 128256, 2, (1, True)),
        (16, 128256, 2, (2, False)),
    ):
        config = choose(EditProblem(num_rows, vocab_size, 16 // itemsize, itemsize), device)
        assert (config.batch, config.eager) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_empty_tensors(device: str) -> None:
    """No rows, no tokens; tensors that are not contiguous are refused all the same."""
    for shape in ((0, 7), (3, 0)):
        logits = torch.empty(shape, device=device)
        mask = torch.empty(shape, device=device, dtype=torch.bool)
        pyops.apply_repetition_penalties_(logits, mask, mask, torch.ones(shape[0], device=device))
    apart = torch.zeros((3, 8), device=device)[:, :7]
    mask = torch.zeros((3, 7), device=device, dtype=torch.bool)
    with pytest.raises(pyops.OpError, match="logits: expected a contiguous tensor"):
        pyops.apply_repetition_penalties_(apart, mask, mask, torch.ones(3, device=device))
    with pytest.raises(pyops.OpError, match="prompt_mask: expected dtype bool"):
        pyops.apply_repetition_penalties_(apart.contiguous(), mask.byte(), mask, torch.ones(3, device=device))


@pytest.mark.parametrize("device", DEVICES)
@given(case=strategies.tensors((3, 37)), seed=st.integers(0, 99))
def test_frequency_and_presence(case: torch.Tensor, seed: int, device: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(-2, 5, case.shape, generator=generator, dtype=torch.int32)
    frequency, presence = torch.randn((2, 3), generator=generator)
    x, f, p = exact(case), exact(frequency)[:, None], exact(presence)[:, None]
    with numpy.errstate(all="ignore"):
        penalty = (f * counts.numpy()).astype("float32").astype("float64") + p
        lowered = rounded(x - penalty.astype("float32").astype("float64"), case.dtype)
    logits = case.to(device).contiguous()
    pyops.apply_penalties_(logits, counts.to(device), frequency.to(device), presence.to(device))
    assert_same(logits, torch.where(counts > 0, lowered, case))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 1000])
def test_bitmask(vocab_size: int, dtype: torch.dtype, device: str) -> None:
    """Every bit on its own, with words that are full, empty or mixed; rows listed once, twice or out of range."""
    rows, words = 5, -(-vocab_size // 32)
    random = numpy.random.default_rng(vocab_size)
    mask = random.integers(0, 2**32, (rows, words), dtype="uint32")
    mask[0], mask[1, ::2] = 0, 2**32 - 1
    allowed = numpy.unpackbits(mask.view("uint8"), axis=-1, bitorder="little")[:, :vocab_size].astype(bool)
    bitmask = torch.from_numpy(mask.view("int32")).to(device)
    for indices in (None, [3, 0, 3], [-1, 5, 1, 2**31 - 1], []):
        logits = torch.randn((rows, vocab_size), device=device).to(dtype)
        chosen = numpy.isin(numpy.arange(rows), range(rows) if indices is None else indices)
        forbidden = torch.from_numpy(~allowed & chosen[:, None])
        right = logits.cpu().masked_fill(forbidden, -float("inf"))
        which = None if indices is None else torch.tensor(indices, dtype=torch.int32, device=device)
        pyops.apply_token_bitmask_(logits, bitmask, which)
        assert same_bits(logits.cpu(), right)
