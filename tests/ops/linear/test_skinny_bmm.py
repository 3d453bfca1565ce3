"""Batches of small GEMMs for few tokens: exact for integers, for every layout that multi-head latent attention has."""

from __future__ import annotations

import pytest
import torch

import pyops
from tests.support.calls import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(("k", "n"), [(1, 3), (33, 37), (128, 200), (300, 64), (1030, 1)])
def test_sums_of_integers_are_exact(k: int, n: int, by_columns: bool, constant: bool, device: str) -> None:
    """Two rows of each of three matrices, which are parts of larger ones; the output is transposed and has gaps."""
    generator = torch.Generator(device).manual_seed(k)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-9, 10, shape, generator=generator, device=device).float()

    x = integers(2, 3, k + 5)[..., :k].transpose(0, 1)
    mat2 = integers(3, k + 2, n + 3)[:, 2:, :n] if by_columns else integers(3, n + 2, k + 3)[:, 2:, :k].mT
    whole = x.new_full((2, 3, n + 1), 7.0)
    pyops.skinny_bmm(whole.transpose(0, 1)[..., :n], x, mat2, constant)
    assert torch.equal(whole[..., :n].transpose(0, 1).double(), x.double() @ mat2.double())
    assert (whole[..., n:] == 7.0).all()


def test_refused() -> None:
    x, mat2, out = torch.ones(3, 2, 8), torch.ones(3, 8, 4), torch.full((3, 2, 4), 7.0)
    for args, message in (
        ((out, x, mat2[:2]), "mat2: expected shape (B=3, K=8, N), got (2, 8, 4)"),
        ((out, x[..., :7], mat2), "mat2: expected shape (B=3, K=7, N), got (3, 8, 4)"),
        ((out[:, :1], x, mat2), "out: expected shape (B=3, M=2, N=4), got (3, 1, 4)"),
        ((out, x.half(), mat2), "out: expected dtype float16, got float32"),
        ((out, x.mT.contiguous().mT, mat2), "input: expected a last dimension of stride 1"),
        ((out, x, torch.ones(3, 8, 8)[..., ::2]), "mat2: expected columns or rows of stride 1, got strides (64, 8, 2)"),
        ((out, x, mat2, False, mat2[0].T), "prefetched: expected a last dimension of stride 1, got strides (1, 4)"),
        ((out, x[..., :0], mat2[:, :0]), "input: expected rows of at least one element"),
    ):
        with pytest.raises(pyops.OpError) as caught:
            pyops.skinny_bmm(*args)
        assert str(caught.value).startswith(f"skinny_bmm: {message}")
    assert (out == 7.0).all()
    assert pyops.skinny_bmm.new(x[:, :0], mat2).shape == (3, 0, 4)
