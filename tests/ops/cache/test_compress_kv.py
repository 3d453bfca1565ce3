"""compress_kv: windows against their formula in float64, and sequences in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import pyops
from pyops.host.toolchain import toolchains
from pyops.testing import cpu

ROPE_SIZE, EPS = 8, 1e-6


class Problem:
    """A sequence of tokens, and the parameters of its windows."""

    def __init__(self, tokens: int, ratio: int, heads: int, head_size: int = 24) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ratio, self.heads, self.head_size = ratio, heads, head_size
        row = heads * head_size
        self.kv, self.gate = (torch.randn(tokens, row, generator=generator) for _ in range(2))
        self.bias = torch.randn(ratio, row, generator=generator)
        self.weight = 1 + 0.2 * torch.randn(head_size, generator=generator)
        angles = torch.rand(tokens, ROPE_SIZE // 2, generator=generator)
        self.table = torch.cat((angles.cos(), angles.sin()), -1)

    def run(self, chunks: Sequence[int], slot: int = 1) -> Tensor:
        """`out` of all tokens of the sequence, in calls of so many tokens, together with an empty sequence."""
        states = torch.full((3, self.heads * self.ratio, 2 * self.heads * self.head_size), torch.nan)
        outs, begin = [], 0
        for count in chunks:
            new, begin = slice(begin, begin + count), begin + count
            out = torch.full((count, self.head_size), 7.0)
            sequences = torch.tensor([0, 0, count]), torch.tensor([0, begin]), torch.tensor([2, slot]).int()
            pyops.compress_kv(
                *(out, states, self.kv[new], self.gate[new], self.bias, self.weight, self.table), *sequences, EPS
            )
            outs.append(out)
        assert states[2].isnan().all()
        return torch.cat(outs)

    def truth(self, window: int) -> Tensor:
        """The key of a window in float64."""
        first, size = window * self.ratio, self.head_size
        kv, gate = self.kv.double(), self.gate.double() + self.bias.double().repeat(len(self.kv), 1)[: len(self.kv)]
        this = slice(first, first + self.ratio)
        values, gates = kv[this, -size:], gate[this, -size:]
        if self.heads == 2 and window:
            before = slice(first - self.ratio, first)
            values, gates = torch.cat((kv[before, :size], values)), torch.cat((gate[before, :size], gates))
        x = (gates.softmax(0) * values).sum(0)
        x = x * (x.square().mean() + EPS).rsqrt() * self.weight.double()
        pairs = torch.view_as_complex(x[-ROPE_SIZE:].unflatten(0, (-1, 2)).contiguous())
        rotation = torch.complex(*self.table[first].double().chunk(2))
        return torch.cat((x[:-ROPE_SIZE], torch.view_as_real(pairs * rotation).flatten()))


@pytest.mark.parametrize(("ratio", "heads"), [(4, 2), (5, 1), (4, 1)])
def test_equals_the_formula(ratio: int, heads: int) -> None:
    problem = Problem(23, ratio, heads)
    out = problem.run([23])
    for token, row in enumerate(out):
        window, rest = divmod(token + 1, ratio)
        expected = problem.truth(window - 1) if not rest else torch.full_like(row, 7.0).double()
        torch.testing.assert_close(row.double(), expected, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize(("ratio", "heads"), [(4, 2), (6, 1)])
@pytest.mark.parametrize("on", ["reference", "kernels"])
def test_chunks_change_no_bit(ratio: int, heads: int, on: str) -> None:
    """Prefill in chunks of any lengths, then decode steps; a slot that is not there keeps nothing."""
    if on == "kernels" and not toolchains():
        pytest.skip("no C++ compiler")
    problem = Problem(29, ratio, heads)
    with cpu(on):
        whole = problem.run([29])
        assert torch.equal(problem.run([3, 1, 13, 2, *[1] * 10]), whole)
        alone = problem.run([3, 26], slot=-1)
    assert torch.equal(alone[3 + 2 * ratio :], whole[3 + 2 * ratio :])
