"""The attention residual of Kimi K3, in float64."""

from __future__ import annotations

import pytest
import torch

import pyops
from pyops.testing import cpu

DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_blocks", "write", "has_delta", "has_norm"),
    [(0, 0, True, False), (3, 3, True, True), (8, -1, False, True), (4, 1, True, False)],
)
def test_attention_residual(num_blocks: int, write: int, has_delta: bool, has_norm: bool, device: str) -> None:
    """Rows with gaps; a block that is written is mixed as written."""
    where, size, tokens = "cpu" if device == "host" else device, 520, 3
    torch.manual_seed(5)
    wide = torch.randn(tokens, 11, size + 8, dtype=torch.bfloat16, device=where)
    prefix, delta, blocks = wide[:, 0, :size].clone(), wide[:, 1, :size], wide[:, 2:10, :size]
    weights = [torch.randn(size, dtype=torch.bfloat16, device=where) for _ in range(3)]
    weights[1] /= 8
    x = (prefix.float() + delta.float()).bfloat16() if has_delta else prefix.clone()
    right = blocks.clone()
    if write >= 0:
        right[:, write] = x
    sources = torch.cat((right[:, :num_blocks], x[:, None]), 1).double()
    scores = (sources * weights[0].double() * weights[1].double()).sum(-1)
    scores = scores / (sources.square().mean(-1) + 1e-5).sqrt()
    y = (scores.softmax(-1)[..., None] * sources).sum(1)
    magnitude = (scores.softmax(-1)[..., None] * sources.abs()).sum(1)
    if has_norm:
        scale = weights[2].double() / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        y, magnitude = y * scale, magnitude * scale.abs()
    output = torch.empty_like(prefix)
    args = prefix, delta if has_delta else None, blocks, *weights[:2], weights[2] if has_norm else None, output
    with cpu("kernels" if device == "host" else "reference"):
        pyops.kimi_k3_attn_res(*args, num_blocks, write, 1e-5, 1e-3)
    assert torch.equal(prefix, x)
    assert torch.equal(blocks, right)
    # Half an ulp of bfloat16, and float32 scores that are a few units of 2^-24 times their terms away.
    assert ((output.double() - y).abs() <= y.abs() * 2**-8 * 1.01 + magnitude * 2**-18).all()


def test_refusals() -> None:
    rows, weight = torch.randn(2, 64).bfloat16(), torch.randn(64).bfloat16()
    blocks, output = torch.randn(2, 3, 64).bfloat16(), torch.empty(2, 64).bfloat16()
    for argument, numbers in (("num_blocks", (4, -1)), ("block_write_idx", (3, 3)), ("block_write_idx", (3, -2))):
        with pytest.raises(pyops.OpError, match=f"kimi_k3_attn_res: {argument}: expected"):
            pyops.kimi_k3_attn_res(rows, None, blocks, weight, weight, None, output, *numbers, 1e-5, 1e-5)
