"""Speculative decoding: whatever was drafted, tokens have the target's distribution."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import pyops
from tests.calls import DEVICES

NAN = float("nan")


def sample(drafts: Any, ends: Any, q: torch.Tensor | None, p: torch.Tensor, max_drafts: int, seed: int = 0) -> Any:
    """Output tokens, the bonus of request r being 9000 + r."""
    device, batch = p.device, len(ends)
    out = torch.full((batch, max_drafts + 1), 77, dtype=torch.int32, device=device)
    pyops.rejection_sample(
        out,
        torch.as_tensor(drafts, dtype=torch.int32).to(device),
        torch.as_tensor(ends, dtype=torch.int32).to(device),
        q,
        p,
        torch.arange(9000, 9000 + batch, dtype=torch.int32, device=device),
        torch.arange(seed, seed + batch, device=device),
    )
    return out.tolist()


def chi_square(counts: Any, expected: Any) -> bool:
    """Whether counts are those of a right sampler; of ten million, one fails (Wilson and Hilferty 1931)."""
    freedom = len(expected) - 1
    square = ((counts - expected) ** 2 / expected).sum()
    return bool(square < freedom * (1 - 2 / (9 * freedom) + 5.2 * (2 / (9 * freedom)) ** 0.5) ** 3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_draft_probs", [True, False])
def test_distribution(with_draft_probs: bool, device: str) -> None:
    """The first token's is the target's, from drafts of another; so is the second's where the first draft stood."""
    batch, vocab_size = 4000 if device == "cuda" else 500, 10
    random = numpy.random.default_rng(5)
    p = (torch.randn(vocab_size, generator=torch.Generator().manual_seed(1))).softmax(0)
    q = (torch.randn(vocab_size, generator=torch.Generator().manual_seed(2))).softmax(0)
    if not with_draft_probs:
        q = torch.zeros(vocab_size)
        q[3] = 1.0
    drafts = random.choice(vocab_size, 2 * batch, p=q.double().numpy() / float(q.double().sum()))
    every = q.expand(2 * batch, -1).contiguous().to(device) if with_draft_probs else None
    target = p.expand(2 * batch, -1).contiguous().to(device)
    tokens = numpy.array(sample(drafts, 2 * numpy.arange(1, batch + 1), every, target, 2, seed=400))
    assert chi_square(numpy.bincount(tokens[:, 0], minlength=vocab_size), p.double().numpy() * batch)
    second = tokens[tokens[:, 1] >= 0, 1]
    accepted = float(torch.minimum(p, q).sum())
    assert abs(len(second) / batch - accepted) < 5 * (accepted * (1 - accepted) / batch) ** 0.5
    expected = p.double().numpy() * len(second)
    assert (tokens[tokens[:, 1] < 0, 2] == -1).all()
    large = expected >= 5
    assert chi_square(
        numpy.array([*numpy.bincount(second, minlength=vocab_size)[large], (~large[second]).sum() + 1e-9]),
        numpy.array([*expected[large], expected[~large].sum() + 1e-9]),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_and_bonus_tokens_of_the_same_seeds(device: str) -> None:
    """A draft, and the token that follows it, drawn by the sampler under the request's own seed and offset, depend on
    other numbers than whether the draft stands."""
    batch, vocab_size = 4000 if device == "cuda" else 400, 4
    seeds, offsets = torch.arange(batch, device=device), torch.full((batch,), 7, device=device)
    uniform = torch.full((batch, vocab_size), 0.25, device=device)
    skewed = torch.tensor([0.4, 0.3, 0.2, 0.1], device=device).expand(batch, -1).contiguous()
    drafts, bonus = (torch.empty(batch, dtype=torch.int32, device=device) for _ in range(2))
    pyops.top_k_top_p_sampling_from_logits(drafts, skewed.log(), seeds, offsets)
    pyops.top_k_top_p_sampling_from_logits(bonus, uniform.log(), seeds, offsets)
    out = torch.empty(batch, 2, dtype=torch.int32, device=device)
    ends = torch.arange(1, batch + 1, dtype=torch.int32, device=device)
    pyops.rejection_sample(out, drafts, ends, skewed, uniform, bonus, seeds, offsets)
    tokens = out.cpu().numpy()
    second = tokens[tokens[:, 1] >= 0, 1]
    assert abs(len(second) / batch - 0.8) < 0.1
    for found in (tokens[:, 0], second):
        assert chi_square(numpy.bincount(found, minlength=vocab_size), numpy.full(vocab_size, len(found) / 4))


@pytest.mark.parametrize("device", DEVICES)
def test_no_drafts(device: str) -> None:
    """A batch in which no request has one."""
    assert sample([], [0, 0, 0], None, torch.empty(0, 50, device=device), 3) == [
        [9000 + r, -1, -1, -1] for r in range(3)
    ]
    assert sample([], [0, 0], torch.empty(0, 50, device=device), torch.empty(0, 50, device=device), 1) == [
        [9000, -1],
        [9001, -1],
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [7, 5000])
def test_greedy_and_ragged(vocab_size: int, device: str) -> None:
    """One-hot targets: drafts stand as long as they are right; requests of none, some and too many drafts."""
    right = torch.arange(9) * 3 % 7
    p = torch.nn.functional.one_hot(right, vocab_size).float().to(device)
    drafts = right.tolist()
    drafts[2] = (drafts[2] + 1) % 7  # the second of its request
    ends = [1, 1, 4, 9]
    for q in (None, torch.full_like(p, 1 / vocab_size)):
        r = right.tolist()
        assert sample(drafts, ends, q, p, 3) == [
            [r[0], 9000, -1, -1],
            [9001, -1, -1, -1],
            [r[1], r[2], -1, -1],
            [r[4], r[5], r[6], 9003],
        ]


@pytest.mark.parametrize("device", DEVICES)
def test_what_makes_no_sense(device: str) -> None:
    """Tokens and ends that do not exist, probabilities that are none: nothing is read or written beside the tensors."""
    p = torch.full((4, 5), 0.2, device=device)
    assert sample([0, 1, 2, 3], [-5, 2**31 - 1, 3, 1], None, p * 0 + 1, 2) == [
        [9000, -1, -1],
        [0, 1, 9001],
        [9002, -1, -1],
        [9003, -1, -1],
    ]
    for tokens in ([-1, 5, 2**31 - 1, -(2**31)],):
        found = sample(tokens, [1, 2, 3, 4], p, p, 1)
        assert all(0 <= row[0] < 5 and row[1] == -1 for row in found)
    assert sample([0, 1, 2, 3], [1, 2, 3, 4], p, p * NAN, 1) == [[-1, -1]] * 4
    assert sample([0, 1, 2, 3], [3, 100], None, p * 0 + 1, 2) == [[0, 1, 9000], [3, 9001, -1]]
    assert all(row[0] >= 0 and row[1] == -1 for row in sample([0, 1, 2, 3], [1, 2, 3, 4], p * 0, p, 1))
    one = torch.zeros((4, 5), device=device)
    one[:, 4] = 1.0
    assert sample([0] * 4, [1, 2, 3, 4], one, one, 1) == [[4, -1]] * 4  # P - Q is 0 everywhere


def test_wrong_shapes_are_refused() -> None:
    p = torch.full((4, 5), 0.2)
    with pytest.raises(pyops.OpError, match="draft_probs: expected shape"):
        sample([0] * 4, [1, 2, 3, 4], p[:3], p, 1)
    with pytest.raises(pyops.OpError, match="draft_token_ids: expected shape"):
        sample([0] * 3, [1, 2, 3, 4], p, p, 1)
