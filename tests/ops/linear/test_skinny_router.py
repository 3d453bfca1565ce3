"""Norm, router logits and the choice of experts in one launch, next to the separate ops."""

from __future__ import annotations

import pytest
import torch

import pyops
from tests.support.calls import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("k", "experts", "topk", "scores", "renormalize"),
    [
        (2048, 128, 8, "softmax", True),
        (96, 64, 6, "softmax", False),
        (51, 3, 3, "sigmoid", True),
        (1030, 512, 32, "sigmoid", False),
        (8, 1, 1, "softmax", False),
    ],
)
def test_as_the_separate_ops(k: int, experts: int, topk: int, scores: str, renormalize: bool, device: str) -> None:
    """Inputs and weights are signs, so that all sums are exact; many logits are equal."""
    generator = torch.Generator(device).manual_seed(k)
    signs = (torch.randint(0, 2, (3 + experts, k + 4), generator=generator, device=device) * 2 - 1).float()
    x, weight = signs[:3, :k], signs[3:, :k] / 8
    hidden, weights, ids = pyops.skinny_router.new(
        x, torch.ones(k, device=device), weight, renormalize, scores, 2.5, 0.0, topk=topk
    )
    assert torch.equal(hidden, x)
    logits = x.double() @ weight.double().T
    order = logits.sort(descending=True, stable=True)[1][:, :topk]
    assert torch.equal(ids.long(), order)
    values = (logits.softmax(-1) if scores == "softmax" else logits.sigmoid()).gather(1, order)
    values = values / values.sum(-1, keepdim=True) if renormalize else values
    torch.testing.assert_close(weights.double(), values * 2.5, rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_calls_in_a_row_and_hostile_tokens(device: str) -> None:
    """The last block leaves zeros for the next call. NaN ranks last and weighs 0."""
    x, weight = torch.ones(2, 64, device=device), torch.ones(40, 64, device=device)
    weight[:33] = torch.nan
    weight[35] = 2.0
    x[1] = torch.nan
    for _ in range(2):
        _, weights, ids = pyops.skinny_router.new(x, torch.ones(64, device=device), weight, True, topk=4)
        assert ids.tolist() == [[35, 33, 34, 36], [0, 1, 2, 3]]
        assert weights.sum(-1).tolist() == [1.0, 0.0]


def test_refused() -> None:
    x, norm, weight = torch.ones(2, 8), torch.ones(8), torch.ones(4, 8)
    weights, ids, out = torch.empty(2, 3), torch.empty(2, 3, dtype=torch.int32), torch.full((2, 8), 7.0)
    for args, message in (
        ((out, weights, ids, x[:, :7], norm, weight, True), "normalised: expected shape (num_tokens=2, K=7)"),
        ((out, weights, ids, x, norm[:7], weight, True), "norm_weight: expected shape (K=8,), got (7,)"),
        ((out, weights, ids, x, norm, weight.half(), True), "weight: expected dtype float32"),
        ((out, weights, ids, x, norm, weight[:2], True), "topk_weights: expected 1 to 2 columns, got shape (2, 3)"),
        ((out, weights, ids, x, norm, torch.ones(513, 8), True), "weight: expected 1 to 512 experts"),
        ((out, weights, ids.long(), x, norm, weight, True), "topk_ids: expected dtype int32, got int64"),
        ((out, weights, ids, x, norm, weight, True, "tanh"), "scoring_func: expected softmax or sigmoid, got tanh"),
        ((out, weights, ids, x.new_ones(2, 8193), norm, weight, True), "input: expected rows of 1 to 32768 bytes"),
    ):
        with pytest.raises(pyops.OpError) as caught:
            pyops.skinny_router(*args)
        assert str(caught.value).startswith(f"skinny_router: {message}")
    assert (out == 7.0).all()
