"""Softmax and sampling, against float64 and against statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops import tuning
from pyops._core import config
from pyops._core.system.device import model
from pyops.example import ArgMaker
from pyops.host import toolchain
from pyops.ops.sampling import _draw_plan as plan
from pyops.ops.sampling._random import philox
from pyops.testing import SCHEDULES, assert_matches_reference, scheduled
from tests.support.calls import DEVICES, KERNELS

pytestmark = pytest.mark.rotates

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF, NAN = float("inf"), float("nan")
_MAX_BLOCK_LOGITS = plan._MAX_BLOCK_LOGITS


# Softmax


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("logarithm", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 8192), (2, 3, 1000), (1, 30001), (140, 9000)])
def test_softmax(shape: tuple[int, ...], dtypes: Any, logarithm: bool, device: str) -> None:
    """Rows of one block and of several, of three dimensions, into another dtype."""
    out_dtype, dtype = dtypes
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 5).to(dtype).to(device)
    out = torch.full(shape, NAN, dtype=out_dtype, device=device)
    t = torch.linspace(0.5, 2.0, max(1, x[..., 0].numel()), device=device)
    for temperature in (None, t):
        (pyops.log_softmax if logarithm else pyops.softmax)(out, x, temperature)
        scaled = x.double() / (1.0 if temperature is None else temperature.double().reshape(*shape[:-1], 1))
        right = scaled.log_softmax(-1) if logarithm else scaled.softmax(-1)
        torch.testing.assert_close(out.double(), right, rtol=2e-6, atol=2e-6 if logarithm else 1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [8, 20000])
def test_softmax_of_nan_and_infinity(columns: int, device: str) -> None:
    """Masked tokens have no weight, in any piece; undefined results are NaN, as in eager PyTorch."""
    x = torch.randn((5, columns), generator=torch.Generator().manual_seed(1)).to(device)
    x[0, columns // 3 :] = -INF
    x[1] = -INF
    x[2, -1], x[3, 2] = INF, NAN
    x[4, 0] = -INF
    out = torch.zeros_like(x)
    pyops.softmax(out, x)
    right = x.softmax(-1)
    torch.testing.assert_close(out, right, equal_nan=True)
    assert out[1:4].isnan().all()
    assert not out[0, columns // 3 :].any()
    pyops.log_softmax(x, x)
    torch.testing.assert_close(x.exp(), right, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_softmax_at_a_tiny_temperature(device: str) -> None:
    """1/1e-40 overflows: the largest logit gets all probability."""
    x = torch.tensor([[1.0, 3.0, 2.0]], device=device).repeat(2, 1)
    t = torch.tensor([1e-40, 1e-38], device=device)
    out = torch.empty_like(x)
    pyops.softmax(out, x, t)
    assert out.tolist() == [[0.0, 1.0, 0.0]] * 2
    pyops.log_softmax(out, x, t)
    assert out[:, 1].tolist() == [0.0, 0.0]
    assert (out[:, ::2] < -1e37).all()


# Sampling


@pytest.fixture(scope="module", params=["whole rows", "pieces"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rows in the shared memory of blocks, or read piece by piece as if they did not fit."""
    yield from _planned(_MAX_BLOCK_LOGITS=_MAX_BLOCK_LOGITS if request.param == "whole rows" else 0)


@pytest.fixture
def clusters() -> Iterator[None]:
    """Rows in the shared memory of several blocks, unless they are very short."""
    yield from _planned(_MAX_BLOCK_LOGITS=_MAX_BLOCK_LOGITS, _MIN_BLOCK_LOGITS=256)


@pytest.fixture(params=[1, 2])
def rereads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rows that one or two blocks read in every pass."""
    with tuning.forced("top_k_top_p_sampling_from_logits", plan.WholeRows(request.param, 128, 1, in_shared=False)):
        yield from _planned()


def _planned(**changed: Any) -> Iterator[None]:
    op = pyops.registry["top_k_top_p_sampling_from_logits"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changed.items():
            patch.setattr(plan, name, value)
        op.forget()
        yield
    op.forget()


def draw(logits: torch.Tensor, seeds: Any = 0, **filters: Any) -> torch.Tensor:
    """Tokens for rows: all rows have the same logits, and seeds count up from the given one."""
    rows, device = logits.shape[0], logits.device
    kinds = {"top_k": torch.int32, "offsets": torch.int64}
    filters = {
        name: torch.as_tensor(value, dtype=kinds.get(name, torch.float32), device=device).expand(rows).contiguous()
        for name, value in filters.items()
    }
    samples = torch.full((rows,), -7, dtype=torch.int32, device=device)
    pyops.top_k_top_p_sampling_from_logits(samples, logits, seeds + torch.arange(rows, device=device), **filters)
    return samples.cpu()


def kept(probabilities: Any, top_k: int, top_p: float, min_p: float) -> Any:
    """float64 probabilities after the filters, by a sort."""
    order = numpy.argsort(-probabilities, kind="stable")[:top_k]
    order = order[probabilities[order] >= min_p * probabilities.max()]
    share = probabilities[order] / probabilities[order].sum()
    order = order[: int((numpy.cumsum(share) < top_p).sum()) + 1]
    left = numpy.zeros_like(probabilities)
    left[order] = probabilities[order]
    return left / left.sum()


def test_philox_matches_published_numbers() -> None:
    """The known answers of Random123."""
    assert philox(0, 0) == 0xE169C58D_6627E8D5
    ones = 2**64 - 1
    assert philox(ones, ones, 2**32 - 1, 2**32 - 1) == 0x41C83B0E_408F276D
    assert philox(0x299F31D0_A4093822, 0x85A308D3_243F6A88, 0x13198A2E, 0x03707344) == 0x94FDCCEB_D16CFE09


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "temperature", "dtype"),
    [
        (0, 1.0, 0.0, 1.0, torch.float32),
        (5, 1.0, 0.0, 1.0, torch.float32),
        (0, 0.8, 0.0, 1.0, torch.float32),
        (0, 1.0, 0.2, 1.0, torch.float32),
        (12, 0.7, 0.05, 1.5, torch.float16),
        (12, 0.7, 0.05, 1.5, torch.bfloat16),
    ],
)
def test_tokens_have_their_probabilities(
    top_k: int, top_p: float, min_p: float, temperature: float, dtype: torch.dtype, device: str
) -> None:
    """Chi-square over the tokens of many seeds; a filtered token is never drawn."""
    vocab_size, rows = 40, 4000 if device == "cuda" else 300
    row = (torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 1.5).to(dtype)
    p = (row.double() / temperature).softmax(0).numpy()
    if len(numpy.unique(p)) < vocab_size:  # values must differ, because a filter keeps equal ones together
        row[:] = torch.arange(vocab_size).to(dtype) / 16
        p = (row.double() / temperature).softmax(0).numpy()
    expected = kept(p, top_k or vocab_size, top_p, min_p) * rows
    tokens = draw(
        row.to(device).expand(rows, -1).contiguous(),
        seeds=1000,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        temperature=temperature,
    )
    counts = numpy.bincount(tokens.numpy(), minlength=vocab_size)
    assert not counts[expected == 0].any()
    often = expected >= 5
    observed = [*counts[often], counts[~often].sum()]
    wanted = [*expected[often], expected[~often].sum()]
    pairs = [(o, e) for o, e in zip(observed, wanted, strict=True) if e > 0]
    square, freedom = sum((o - e) ** 2 / e for o, e in pairs), len(pairs) - 1
    # Only one of ten million correct samplers exceeds this (Wilson and Hilferty 1931).
    assert square < freedom * (1 - 2 / (9 * freedom) + 5.2 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("device", KERNELS)
@given(
    rows=st.integers(1, 4),
    vocab_size=st.sampled_from([1, 2, 63, 1024, 1025, 3001]),
    scale=st.sampled_from([0.0, 0.01, 3.0, 100.0]),
    top_k=st.sampled_from([-1, 1, 2, 50, 5000]),
    top_p=st.sampled_from([0.0, 1e-6, 0.5, 0.999, 1.0, NAN]),
    min_p=st.sampled_from([0.0, 1e-9, 0.1, 1.0, 2.0, NAN]),
    temperature=st.sampled_from([0.0, 1e-40, 0.3, 1.0, 1e30, INF, -1.0, NAN]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(-(2**63), 2**63 - 10),
    step=st.booleans(),
)
def test_equals_the_reference(
    rows: int,
    vocab_size: int,
    scale: float,
    top_k: int,
    top_p: float,
    min_p: float,
    temperature: float,
    dtype: torch.dtype,
    seed: int,
    step: bool,
    device: str,
) -> None:
    """For any parameters; equal logits, nearly equal ones, and rows that begin anywhere."""
    memory = torch.randn((rows, vocab_size + step), generator=torch.Generator().manual_seed(vocab_size)) * scale
    logits = memory.to(dtype).to(device)[:, step:]

    def column(value: float, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=kind, device=device)

    samples, seeds = column(-7, torch.int32), torch.arange(rows, device=device) + seed
    filters = (column(top_k, torch.int32), column(top_p), column(min_p), column(temperature))
    args = (logits, seeds, column(5, torch.int64), *filters)
    pyops.top_k_top_p_sampling_from_logits(samples, *args)
    right = torch.empty_like(samples)
    pyops.registry["top_k_top_p_sampling_from_logits"].reference(right, *args)
    assert samples.tolist() == right.tolist()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("device", KERNELS)
def test_each_row_has_its_own_filters(device: str) -> None:
    _assert_each_row_has_its_own(device, 60)


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [6, 24, 60])
def test_rows_of_clusters(rows: int, device: str) -> None:
    """A row has eight, four or two CTAs."""
    op = pyops.registry["top_k_top_p_sampling_from_logits"]
    example = op.example(ArgMaker(model()), num_tokens=rows, vocab_size=3001)  # type: ignore[misc]
    (launch,) = op.launches(*example)
    assert launch.specialisation.constants["CLUSTER"] == {6: 8, 24: 4, 60: 2}[rows]
    _assert_each_row_has_its_own(device, rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("rereads")
def test_rows_read_in_every_pass(device: str) -> None:
    """As they are where not all rows fit in shared memory at once."""
    _assert_each_row_has_its_own(device, 12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("rereads")
def test_rows_with_unlikely_candidates(device: str) -> None:
    """The bound for top-k comes from the first logits: they may be the smallest, equal, few, or all that there is."""
    x = torch.randn((10, 9001), generator=torch.Generator().manual_seed(5))
    x[0], x[1] = x[0].sort().values, x[1].sort(descending=True).values
    x[2], x[3] = x[2] * 0.0, x[3].round()  # 0 and -0, more equal logits than fit
    x[4], x[5, 20:] = -INF, NAN  # no logit, fewer than top_k
    x[6, :8000] = -INF
    x[7, ::3], x[7, 1::700] = NAN, INF
    x[8, 8990:] = 50.0
    x[9, ::2] = -x[9, ::2].abs() * 1e-38  # subnormal numbers, too
    x = x.to(device)
    top_k, top_p = (torch.full((10,), value, device=device) for value in (30, 0.7))
    samples, right = (torch.full((10,), -7, dtype=torch.int32, device=device) for _ in range(2))
    for seed in (1, 2):
        args = (x, torch.arange(10, device=device) * seed, None, top_k.int(), top_p)
        pyops.top_k_top_p_sampling_from_logits(samples, *args)
        pyops.registry["top_k_top_p_sampling_from_logits"].reference(right, *args)
        assert samples.tolist() == right.tolist()


@pytest.mark.usefixtures("rereads")
@pytest.mark.skipif(not toolchain.toolchains(), reason="no C++ compiler")
def test_any_schedule_of_candidates() -> None:
    """A row read once, one with more candidates than fit, and one without top-k."""
    x = torch.randn((3, 5000), generator=torch.Generator().manual_seed(1))
    x[1] = 1.0
    filters = (None, torch.tensor([40, 40, 0], dtype=torch.int32), torch.tensor([0.9, 1.0, 0.5]), None, None)
    samples, seeds = torch.empty(3, dtype=torch.int32), torch.tensor([1, 2, 3])
    assert_matches_reference(
        pyops.top_k_top_p_sampling_from_logits, samples, x, seeds, *filters, schedules=SCHEDULES, warp_sizes=(32, 64)
    )


def _assert_each_row_has_its_own(device: str, rows: int) -> None:
    """Few tokens or many, with a wide or narrow spread of logits, around 0 or below, equal the reference."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn((rows, 3002), generator=random) * torch.tensor([0.05, 1.0, 8.0]).repeat(rows // 3)[:, None]
    x = (x - 30.0 * (torch.arange(rows) % 4 == 1)[:, None]).to(device)[:, 1:]
    x[5::7] = x[5::7].round(decimals=1)  # equal ones
    top_k = torch.randint(1, 300, (rows,), generator=random).to(device, torch.int32)
    top_k[::2] = 0
    top_k[4::8] = 2000
    top_p = torch.rand(rows, generator=random).to(device)
    top_p[3::9] = NAN
    min_p = torch.rand(rows, generator=random).to(device) * 0.1
    min_p[::5] = 0.0
    samples, right = (torch.full((rows,), -7, dtype=torch.int32, device=device) for _ in range(2))
    for seed in (1, 2):
        args = (x, torch.arange(rows, device=device) * seed, None, top_k, top_p, min_p, None)
        pyops.top_k_top_p_sampling_from_logits(samples, *args)
        pyops.registry["top_k_top_p_sampling_from_logits"].reference(right, *args)
        assert samples.tolist() == right.tolist()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_without_probability(dtype: torch.dtype, device: str) -> None:
    """NaN and -inf are never drawn; +inf precedes all else; rows of only such logits give -1, under any filters."""
    x = torch.randn((6, 2000), generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    x[0], x[1], x[2] = NAN, -INF, -INF
    x[1, 7], x[2, 1500] = NAN, -3.0
    x[3, [5, 1999]] = INF
    x[4, 1:] = NAN
    x[5, ::2] = -INF
    each = [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}]
    for filters in each if dtype is DTYPES[0] else each[:2]:  # logits of every dtype are filtered in float32
        tokens = draw(x, **filters).tolist()
        assert tokens[:3] == [-1, -1, 1500]
        assert tokens[3] in (5, 1999)
        assert tokens[4] == 0
        assert tokens[5] % 2 == 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("device", KERNELS)
def test_most_likely_token(device: str) -> None:
    """The first of them at temperature 0, and under every filter that leaves no other."""
    x = torch.randn((5, 5000), generator=torch.Generator().manual_seed(1)).to(device)
    best = x.argmax(-1).tolist()
    for filters in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 0.0}, {"temperature": 1e-4}):
        assert draw(x, **filters).tolist() == best
    x[:, 4000] = x[:, 30] = x.amax(-1) + 1
    assert draw(x, temperature=0.0).tolist() == [30] * 5
    assert set(draw(x.repeat(8, 1), top_k=1).tolist()) == {30, 4000}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("device", KERNELS)
def test_row_depends_on_seed_and_offset_alone(device: str) -> None:
    """Not on the other rows, nor on their number, which determines the launch."""
    rows = 300 if device == "cuda" else 140  # more than SMs
    x = torch.randn((rows, 1300), generator=torch.Generator().manual_seed(1)).to(device)
    filters = {"top_p": 0.9, "top_k": 600}
    all_at_once = draw(x, **filters)
    for row in (0, 17, rows - 1):
        assert draw(x[row : row + 1], seeds=row, **filters).tolist() == [all_at_once[row]]
    for other in ({"seeds": rows}, {"offsets": 1}, {"seeds": 2**32}):
        assert (draw(x[:40], **other, **filters) != all_at_once[:40]).sum() > 40 * 2 // 3


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("device", KERNELS)
def test_many_small_weights(device: str) -> None:
    """Tokens with weights in low bits alone are drawn as often as their sum says."""
    x = torch.full((150, 3000), -11.9, device=device)
    x[:, 1000] = 0.0
    args = (x, torch.arange(150, device=device))
    samples, right = (torch.full((150,), -7, dtype=torch.int32, device=device) for _ in range(2))
    pyops.top_k_top_p_sampling_from_logits(samples, *args)
    pyops.registry["top_k_top_p_sampling_from_logits"].reference(right, *args)
    assert samples.tolist() == right.tolist()
    assert 0 < (right != 1000).sum() < 20


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("device", KERNELS)
def test_many_equal_weights(device: str) -> None:
    """Small weights with a sum that exceeds 32 bits in one bin or counter."""
    x = torch.full((12, 40000), -11.9, device=device)
    x[:, 7] = 0.0
    args = (x, torch.arange(12, device=device), None, None, torch.full((12,), 0.999, device=device))
    samples, right = (torch.full((12,), -7, dtype=torch.int32, device=device) for _ in range(2))
    pyops.top_k_top_p_sampling_from_logits(samples, *args)
    pyops.registry["top_k_top_p_sampling_from_logits"].reference(right, *args)
    assert samples.tolist() == right.tolist()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("device", KERNELS)
def test_every_bit_of_a_random_number_counts(device: str) -> None:
    """Among a thousand tokens of nearly equal weights, many random numbers give the reference's tokens."""
    x = (torch.randn((200, 1000), generator=torch.Generator().manual_seed(1)) * 0.01).to(device)
    args = (x, torch.arange(200, device=device) - 100)
    samples, right = (torch.full((200,), -7, dtype=torch.int32, device=device) for _ in range(2))
    pyops.top_k_top_p_sampling_from_logits(samples, *args)
    pyops.registry["top_k_top_p_sampling_from_logits"].reference(right, *args)
    assert samples.tolist() == right.tolist()


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(not toolchain.toolchains(), reason="no C++ compiler")
def test_any_schedule_of_many_blocks() -> None:
    """The last block to arrive reads what the others have written."""
    x = torch.randn((2, 5000), generator=torch.Generator().manual_seed(1))
    seeds = torch.tensor([1, 2])
    filters = (None, torch.tensor([3000, 40], dtype=torch.int32), torch.tensor([0.9, 1.0]), None, None)
    assert_matches_reference(
        pyops.top_k_top_p_sampling_from_logits,
        torch.empty(2, dtype=torch.int32),
        x,
        seeds,
        *filters,
        schedules=SCHEDULES,
        warp_sizes=(32, 64),
    )
    with config.cpu("kernels"):
        tokens = set()
        for schedule in SCHEDULES:
            with scheduled(schedule):
                tokens.add(tuple(draw(x, top_k=3000, top_p=0.9).tolist()))
        assert len(tokens) == 1


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (plan.DrawProblem(1, 4000, 2, True, True, True), plan.WholeRows(1, 128, 8)),
        (plan.DrawProblem(1, 4000, 2, True, False, True), plan.WholeRows(1, 128, 12)),
        (plan.DrawProblem(1, 128256, 2, True, True, False), plan.WholeRows(8, 512, 2)),
        (plan.DrawProblem(1, 128256, 4, False, False, True), plan.WholeRows(8, 512, 3)),
        (plan.DrawProblem(66, 32000, 4, True, False, True), plan.WholeRows(2, 512, 3)),
        (plan.DrawProblem(128, 32000, 4, True, False, True), plan.WholeRows(1, 1024, 1)),
        (plan.DrawProblem(160, 32000, 4, True, False, True), plan.WholeRows(2, 512, 3)),
        (plan.DrawProblem(128, 32000, 4, True, True, True), plan.WholeRows(1, 512, 1)),
        (plan.DrawProblem(160, 32000, 4, True, True, True), plan.WholeRows(1, 512, 2, in_shared=False)),
        (plan.DrawProblem(64, 151936, 4, True, False, True), plan.WholeRows(8, 256, 5, in_shared=False)),
        (plan.DrawProblem(64, 151936, 4, True, True, True), plan.WholeRows(2, 512, 2, in_shared=False)),
        (plan.DrawProblem(211, 151936, 4, True, True, True), plan.WholeRows(2, 256, 4, in_shared=False)),
        (plan.DrawProblem(32, 151936, 4, True, False, True), plan.WholeRows(8, 512, 2)),
        (plan.DrawProblem(32, 151936, 4, True, True, True), plan.WholeRows(4, 512, 1)),
        (plan.DrawProblem(1, 2**20, 4, True, True, True), plan.Pieces(1024)),
        (plan.DrawProblem(256, 128256, 4, True, False, False), plan.Pieces(16384)),
        (plan.DrawProblem(1, 128256, 4, True, False, False), plan.Pieces(1024)),
    ],
)
def test_geometry(problem: plan.DrawProblem, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters for filtered rows, one CTA instead of two that would crowd SMs; smaller pieces for few rows."""
    monkeypatch.setattr(plan, "_MAX_BLOCK_LOGITS", _MAX_BLOCK_LOGITS)  # `kernels` may have changed it for the module
    assert plan.choose(problem, model()) == expected
