"""Infinities, NaN, the largest and the smallest numbers, against float64. Kernels and references give the same."""

from __future__ import annotations

import pytest
import torch

import pyops
from tests.calls import DEVICES

INF, NAN = float("inf"), float("nan")
LARGEST = torch.finfo(torch.float32).max
# A temperature without an inverse in float32; the smallest number; the smallest normal number.
TINY = (1e-42, 2.0**-149, 2.0**-126)


# Sampling

# Logits of a row, over and over.
ROWS = {
    "plain": [1.0, 3.0, 2.0, 3.0],
    "masked": [1.0, -INF, 3.0, -INF, 2.0],
    "largest": [LARGEST, 0.0, -LARGEST, -INF, LARGEST, -LARGEST / 2],
    "negative": [-LARGEST, -LARGEST / 2, -LARGEST],
}


def _probabilities(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """softmax(x / t) in float64 for any t > 0, inf included."""
    wide, divisor = x.double(), t.double()[:, None]
    below = torch.where(wide == -INF, -INF, (wide - wide.amax(-1, keepdim=True)) / divisor)
    weights = torch.exp(below)
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [24, 5000])
@pytest.mark.parametrize("name", ROWS)
def test_softmax_at_any_temperature(name: str, columns: int, device: str) -> None:
    """From the smallest number, where the largest logits share what there is, to inf, where all finite ones do."""
    t = torch.tensor([*TINY, 1e-30, 0.5, 1.0, 3.0, 1e30, 1e38, LARGEST, INF], device=device)
    x = torch.tensor(ROWS[name], device=device).repeat(columns)[:columns].expand(len(t), -1).contiguous()
    right = _probabilities(x, t)
    out = torch.empty_like(x)
    pyops.softmax(out, x, t)
    torch.testing.assert_close(out.double(), right, rtol=2e-6, atol=1e-12)
    pyops.log_softmax(out, x, t)
    torch.testing.assert_close(out.double().exp(), right, rtol=4e-6, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_softmax_at_no_temperature(device: str) -> None:
    """Numbers below the smallest normal one, 0 and negative ones among them, count as that number; NaN gives NaN."""
    x = torch.tensor([[1.0, 3.0, 2.0, 3.0]], device=device).repeat(5, 1)
    out = torch.empty_like(x)
    pyops.softmax(out, x, torch.tensor([0.0, -0.0, -1.0, -INF, NAN], device=device))
    assert out[:4].tolist() == [[0.0, 0.5, 0.0, 0.5]] * 4
    assert out[4].isnan().all()
    x[0, 2], x[1, 0], x[2] = NAN, INF, -INF
    for t in (TINY[0], INF):
        pyops.softmax(out, x, torch.full((5,), t, device=device))
        assert out[:3].isnan().all()
        assert not out[3:].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("filters", [(), ("top_p",), ("top_k", "top_p")])
@pytest.mark.parametrize("name", ROWS)
def test_draws_at_any_temperature(name: str, filters: tuple[str, ...], device: str) -> None:
    """Every token as often as its probability says, and no other one. At no temperature, the first of the likeliest."""
    rows = 300
    x = torch.tensor(ROWS[name], device=device).repeat(3).expand(rows, -1).contiguous()
    given = {name: torch.full((rows,), 1.0, device=device) for name in filters}
    if "top_k" in filters:
        given["top_k"] = torch.zeros(rows, dtype=torch.int32, device=device)
    samples, seeds = torch.empty(rows, dtype=torch.int32, device=device), torch.arange(rows, device=device)
    for t in (TINY[0], 0.5, 1e38, LARGEST, INF):
        temperature = torch.full((rows,), t, device=device)
        pyops.top_k_top_p_sampling_from_logits(samples, x, seeds, temperature=temperature, **given)
        right = _probabilities(x[:1], temperature[:1])[0].cpu()
        if t < 1e-38:
            right = torch.zeros_like(right).index_fill(0, right.argmax(), 1.0)
        counts = torch.bincount(samples.cpu(), minlength=len(right))
        deviation = (rows * right * (1 - right)).sqrt()
        assert ((counts - rows * right).abs() <= 5 * deviation).all(), (t, counts, rows * right)
