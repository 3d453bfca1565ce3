"""Routers with a float32 weight: integers with exact sums, and weights that bfloat16 would lose."""

from __future__ import annotations

import pytest
import torch

import pyops
from tests.support.calls import DEVICES


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 256, 384), (3, 5, 33), (33, 40, 160), (7, 1, 1)])
def test_sums_of_integers_are_exact(tokens: int, experts: int, k: int, dtype: torch.dtype, where: str) -> None:
    """Weights have 14 bits or more, which float32 holds and bfloat16 and TF32 do not; rows of any stride."""
    generator = torch.Generator().manual_seed(tokens)
    a = torch.randint(-3, 4, (tokens, k + 8), generator=generator).to(dtype).to(where)[:, :k]
    bound = min(2**16, 2**22 // k)  # every partial sum is below 2^24
    b = torch.randint(-bound, bound, (experts, k), generator=generator).float().to(where)
    whole = torch.full((tokens, experts + 3), 7.5, device=where)
    pyops.fp32_router_gemm(whole[:, :experts], a, b)
    right = a.double() @ b.double().T
    assert torch.equal(whole[:, :experts].double(), right.float().double())
    assert (whole[:, experts:] == 7.5).all()


def test_other_types_are_refused() -> None:
    a, b, out = torch.ones(2, 8), torch.ones(4, 8), torch.full((2, 4), 7.5)
    for args, name in (
        ((out, a.half(), b), "mat_a"),
        ((out, a, b.bfloat16()), "mat_b"),
        ((out.bfloat16(), a, b), "output"),
        ((out, a, b[:, :4]), "mat_b"),
    ):
        with pytest.raises(pyops.OpError, match=f"fp32_router_gemm: {name}"):
            pyops.fp32_router_gemm(*args)
    assert (out == 7.5).all()
