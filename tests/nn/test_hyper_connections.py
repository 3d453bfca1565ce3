"""Hyper-connections as modules: leading dimensions, and the fused module next to its parts."""

from __future__ import annotations

import pytest
import torch

from pyops.nn import HCHeadOp, MHCFusedPostPreOp, MHCPostOp, MHCPreOp

SHAPE = 2, 3, 4, 16  # batch, tokens, streams, elements of a stream


@pytest.mark.parametrize("method", ["forward_native", "forward_cuda"])
def test_streams_of_a_batch(method: str) -> None:
    """Ones in all streams: every coefficient follows from the bias alone if the projection is zero."""
    torch.manual_seed(3)
    residual, x = torch.ones(SHAPE), torch.randn(2, 3, 16)
    pre, post, fused, head = (getattr(layer(), method) for layer in (MHCPreOp, MHCPostOp, MHCFusedPostPreOp, HCHeadOp))
    fn, scale, base = torch.zeros(24, 64), torch.ones(3), torch.zeros(24)
    numbers = 1e-6, 0.0, 0.0, 2.0, 20
    post_mix, comb_mix, layer_input = pre(residual, fn, scale, base, *numbers, 3, torch.full((16,), 5.0), 0.0)
    assert torch.equal(post_mix, torch.ones(2, 3, 4, 1))
    assert torch.equal(comb_mix, torch.full((2, 3, 4, 4), 0.25))
    torch.testing.assert_close(layer_input, torch.full((2, 3, 16), 5.0))
    streams = post(x, residual, post_mix, comb_mix)
    torch.testing.assert_close(streams, (1 + x)[:, :, None].expand(SHAPE))
    results = fused(x, residual, post_mix, comb_mix, fn, scale, base, *numbers, 3, 1)
    expected = streams, *pre(streams, fn, scale, base, *numbers)
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    torch.testing.assert_close(head(residual, fn[:4], scale[:1], base[:4], 1e-6, 0.25), torch.full((2, 3, 16), 3.0))
