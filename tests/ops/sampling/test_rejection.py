"""Speculative decoding: for any drafts, tokens have the target's distribution."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import pyops
from tests.support.calls import DEVICES, Host

NAN = float("nan")


def sample(drafts: Any, ends: Any, q: torch.Tensor | None, p: torch.Tensor, max_drafts: int, seed: int = 0) -> Any:
    """Output tokens; the bonus token of request r is 9000 + r."""
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
    """Whether counts fit a correct sampler; a correct one fails once in ten million (Wilson and Hilferty 1931)."""
    freedom = len(expected) - 1
    square = ((counts - expected) ** 2 / expected).sum()
    return bool(square < freedom * (1 - 2 / (9 * freedom) + 5.2 * (2 / (9 * freedom)) ** 0.5) ** 3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_draft_probs", [True, False])
def test_tokens_have_the_targets_distribution(with_draft_probs: bool, device: str) -> None:
    """The first token's is the target's, with drafts from another one; so is the second's where the first draft was
    accepted."""
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
@pytest.mark.parametrize("shared", ["draft", "bonus"])
def test_reused_seed_and_offset(shared: str, device: str) -> None:
    """The request's seed and offset may have drawn the draft, or the bonus token: acceptance and replacement are
    independent of the random number that the sampler took.

    One of the two tokens at a time: drawn under one seed and offset, draft and bonus token depend on each other.
    """
    batch, offset = 400 if isinstance(device, Host) else 2000, 7  # an emulated GPU is slow
    draft_offset, bonus_offset = (offset, offset + 1) if shared == "draft" else (offset + 1, offset)
    q = torch.tensor([0.4, 0.3, 0.2, 0.1])
    p = torch.full((4,), 0.25)
    seeds = torch.arange(batch, device=device)
    draft_probs, target_probs = (row.to(device).expand(batch, -1).contiguous() for row in (q, p))

    def draw(probs: torch.Tensor, offset: int) -> torch.Tensor:
        samples = torch.empty(batch, dtype=torch.int32, device=device)
        pyops.top_k_top_p_sampling_from_logits(samples, probs.log(), seeds, torch.full_like(seeds, offset))
        return samples

    out = torch.empty(batch, 2, dtype=torch.int32, device=device)
    pyops.rejection_sample(
        out,
        draw(draft_probs, draft_offset),
        torch.arange(1, batch + 1, dtype=torch.int32, device=device),
        draft_probs,
        target_probs,
        draw(target_probs, bonus_offset),
        seeds,
        torch.full_like(seeds, offset),
    )
    first, second = out.cpu().numpy().T
    accepted = second >= 0
    residual = (p - q).clamp(min=0)  # the distribution that replaces a rejected draft
    assert chi_square(numpy.bincount(accepted, minlength=2), numpy.array([0.2, 0.8]) * batch)
    assert chi_square(numpy.bincount(first, minlength=4), p.numpy() * batch)
    assert chi_square(numpy.bincount(second[accepted], minlength=4), p.numpy() * accepted.sum())
    replaced = numpy.bincount(first[~accepted], minlength=4)
    assert not replaced[:2].any()
    assert chi_square(replaced[2:], (residual / residual.sum()).numpy()[2:] * (~accepted).sum())


@pytest.mark.parametrize("device", DEVICES)
def test_no_drafts(device: str) -> None:
    """A batch in which no request has a draft."""
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
    """One-hot targets: drafts are accepted as long as they are right; requests with no, some and too many drafts."""
    right = torch.arange(9) * 3 % 7
    p = torch.nn.functional.one_hot(right, vocab_size).float().to(device)
    drafts = right.tolist()
    drafts[2] = (drafts[2] + 1) % 7  # the second draft of its request
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
def test_invalid_inputs(device: str) -> None:
    """Tokens and ends out of range, invalid probabilities: nothing is read or written out of bounds."""
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
    with pytest.raises(pyops.OpError, match="target_probs: expected at most 4194304 tokens, got 4194305"):
        sample([], [0], None, torch.empty(0, 2**22 + 1), 1)
