"""Manifold-constrained hyper-connections in float64, by both kernels of the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyops
from pyops._core.op import arguments
from pyops._core.system import device as devices
from pyops.testing import cpu

DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]
EPS = 1e-6, 1e-3, 1e-4, 1e-2  # of the norm of the streams, of pre, of the iterations, of the norm of the layer's input
REPEAT = 5


def _wide(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows with gaps."""
    return torch.randn(*shape[:-1], shape[-1] + 8).to(dtype)[..., : shape[-1]]


def _gates(residual: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The logits of every coefficient; `scale` has one for each."""
    x = residual.double().flatten(1)
    return x @ fn.double().T / (x.square().mean(-1, keepdim=True) + EPS[0]).sqrt() * scale.double() + base.double()


def _truth(residual: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, weight: Any) -> Any:
    n = residual.shape[1]
    logits = _gates(residual, fn, torch.cat([scale[i].expand(size) for i, size in enumerate((n, n, n * n))]), base)
    comb = torch.zeros(len(residual), n, n, dtype=torch.float64)
    for t in range(len(residual)):
        matrix = torch.softmax(logits[t, 2 * n :].reshape(n, n), 1) + EPS[2]
        matrix /= matrix.sum(0) + EPS[2]
        for _ in range(REPEAT - 1):
            matrix = (matrix.T / (matrix.sum(1) + EPS[2])).T
            matrix /= matrix.sum(0) + EPS[2]
        comb[t] = matrix
    y = torch.einsum("ti,tih->th", logits[:, :n].sigmoid() + EPS[1], residual.double())
    if weight is not None:
        y = y / (y.square().mean(-1, keepdim=True) + EPS[3]).sqrt() * weight.double()
    return 2 * logits[:, n : 2 * n].sigmoid()[..., None], comb, y


def _close(actual: torch.Tensor, truth: torch.Tensor, error: float = 2.0**-19) -> None:
    """Half an ulp of the result, and float32 accumulators that are a few units of 2^-22 of the largest element away."""
    allowed = truth.abs() * torch.finfo(actual.dtype).eps / 2 * 1.01 + error * truth.abs().max()
    assert ((actual.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kernel", "dtype", "tokens", "n", "hidden_size", "has_norm"),
    [
        ("mhc_logits_mma", torch.bfloat16, 3, 4, 328, True),
        ("mhc_logits_mma", torch.bfloat16, 70, 2, 40, False),
        ("mhc_logits_simt", torch.float16, 6, 4, 77, True),
        ("mhc_logits_simt", torch.float32, 1, 1, 600, False),
    ],
)
def test_coefficients_and_streams(
    kernel: str, dtype: torch.dtype, tokens: int, n: int, hidden_size: int, has_norm: bool, device: str
) -> None:
    """Before a layer, after it, and before the next one; streams with gaps."""
    torch.manual_seed(tokens)
    where = "cpu" if device == "host" else device
    residual, x = (
        _wide(tokens, n, hidden_size, dtype=dtype).to(where),
        _wide(tokens, hidden_size, dtype=dtype).to(where),
    )
    columns = n * (n + 2)
    fn = torch.randn(columns, n * hidden_size, device=where) / (n * hidden_size) ** 0.5
    scale, base = torch.randn(3, device=where), torch.randn(columns, device=where)
    weight = torch.randn(hidden_size, device=where).to(dtype) if has_norm else None
    parameters: tuple[Any, ...] = (fn, scale, base, *EPS[:3], 2.0, REPEAT, weight, EPS[3])
    with cpu("kernels" if device == "host" else "reference"):
        post, comb, layer_input = pyops.mhc_pre(residual, *parameters)
        out = pyops.mhc_post(x, residual, post, comb)
        fused = pyops.mhc_fused_post_pre(x, residual, post, comb, *parameters)
        separate = pyops.mhc_pre(out, *parameters)
        head = pyops.hc_head(residual, fn[:n], scale[:1], base[:n], EPS[0], EPS[1])
    for actual, truth in zip((post, comb, layer_input), _truth(residual, fn, scale, base, weight), strict=True):
        _close(actual.cpu(), truth.cpu())
    mixed = torch.einsum("tij,tih->tjh", comb.double(), residual.double())
    _close(out.cpu(), (mixed + post.double() * x.double()[:, None]).cpu())
    assert torch.equal(fused[0], out)
    after = _truth(out, fn, scale, base, weight)
    for results in (separate, fused[1:]):
        for actual, truth in zip(results, after, strict=True):
            _close(actual.cpu(), truth.cpu())
    _close(head.cpu(), _truth(residual, fn, scale, base, None)[2].cpu())
    op = pyops.registry["mhc_pre"]
    outputs = {"post_mix": post, "comb_mix": comb, "layer_input": layer_input}
    described = arguments.describe(op.declaration, (residual, *parameters, *outputs.values()))[1]
    if device == "cuda" and not devices.get(0).supports("bfloat16_products"):
        kernel = "mhc_logits_simt"
    assert op.launches(*described)[0].specialisation.kernel.file == f"norm/{kernel}.cu"


def test_products_with_the_projection_are_exact() -> None:
    """A row of the projection has one element, of 21 bits: two bfloat16 would be 2^-17 of it away."""
    residual = torch.ones(2, 1, 64, dtype=torch.bfloat16)
    values = torch.tensor([2.0**20 + 2**10 + 1, -(2.0**20) - 3, 2.0**19 + 255])
    fn = torch.zeros(3, 64)
    fn[torch.arange(3), torch.tensor([0, 31, 63])] = values
    scale, base = torch.full((3,), 2.0**-20), torch.zeros(3)
    with cpu("kernels"):
        post, _, layer_input = pyops.mhc_pre(residual, fn, scale, base, 0.0, 0.0, 0.0, 1.0, 1)
    _close(post[:, 0, 0], (values[1] * scale[1]).double().sigmoid().expand(2), 2.0**-22)
    assert layer_input.dtype == torch.bfloat16


def test_columns_sum_to_one() -> None:
    """Without eps, columns of the matrix sum to one, and after many iterations rows, too."""
    torch.manual_seed(1)
    residual, fn = torch.randn(5, 4, 16), torch.randn(24, 64) / 8
    _, comb, _ = pyops.mhc_pre(residual, fn, torch.ones(3), torch.zeros(24), 1e-6, 0.0, 0.0, 2.0, 60)
    torch.testing.assert_close(comb.sum(1), torch.ones(5, 4), rtol=0, atol=1e-6)
    torch.testing.assert_close(comb.sum(2), torch.ones(5, 4), rtol=0, atol=1e-6)


def test_refusals() -> None:
    residual, fn, base = torch.randn(2, 4, 16), torch.randn(24, 64), torch.randn(24)
    numbers = 1e-6, 0.0, 0.0, 2.0
    for argument, args in (
        ("residual", (torch.randn(2, 3, 16), fn, torch.ones(3), base, *numbers, 20)),
        ("fn", (residual, fn[:8], torch.ones(3), base, *numbers, 20)),
        ("hc_scale", (residual, fn, torch.ones(1), base, *numbers, 20)),
        ("sinkhorn_repeat", (residual, fn, torch.ones(3), base, *numbers, 0)),
        ("norm_weight", (residual, fn, torch.ones(3), base, *numbers, 20, torch.ones(15))),
    ):
        with pytest.raises(pyops.OpError, match=f"mhc_pre: {argument}: expected"):
            pyops.mhc_pre(*args)
