"""The GEMMs of experts for few tokens against float64, exact for integers, and in `fused_experts`."""

from __future__ import annotations

import pytest
import torch

import pyops
from pyops._core import config
from pyops.ops.linear.grouped_problem import ACTIVATIONS
from tests.support.calls import DEVICES

EXPERTS, TOP_K = 5, 3


def integers(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator, device=device).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_k", [3, 8])  # an odd number, and choices that are divided among warps
@pytest.mark.parametrize("hidden_size", [7, 96, 1030, 2048])
def test_sums_of_integers_are_exact(hidden_size: int, top_k: int, device: str) -> None:
    """More columns than a block has rows; ids that name no expert; rows with gaps."""
    columns, ids = 37, torch.tensor([[0, 4, -1], [2, 2, EXPERTS]], dtype=torch.int64, device=device)
    ids = torch.cat((ids, ids, ids), 1)[:, :top_k].contiguous()
    x = integers(2, 2 * hidden_size, device=device)[:, :hidden_size]
    weight, bias = (integers(EXPERTS, columns, *more, device=device, seed=1) for more in ((hidden_size,), ()))
    found = x.new_full((2 * top_k, columns + 3), 7.0)
    pyops.skinny_experts(found[:, :columns], x, weight, ids, bias)
    exists = (ids >= 0) & (ids < EXPERTS)
    at = ids.where(exists, 0)
    each = torch.einsum("tjnk,tk->tjn", weight[at].double(), x.double()) + bias[at].double()
    each = each.where(exists[..., None], 0)
    assert torch.equal(found[:, :columns].double(), each.flatten(0, 1))
    assert (found[:, columns:] == 7.0).all()

    inputs = integers(2 * top_k, hidden_size, device=device, seed=2)
    inputs[~exists.flatten()] = torch.nan
    factors = integers(2, top_k, device=device, seed=3)
    out = integers(2, columns, device=device, seed=4)
    each = torch.einsum("tjnk,tjk->tjn", weight[at].double(), inputs.nan_to_num().unflatten(0, (2, top_k)).double())
    each = ((each + bias[at].double()) * factors[..., None].double()).where(exists[..., None], 0)
    expected = out.double() + each.sum(1)
    pyops.skinny_experts_sum(out, inputs, weight, ids, factors, bias, out)  # in place
    assert torch.equal(out.double(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["none", "silu", "swigluoai"])
@pytest.mark.parametrize("hidden_size", [7, 1030])
def test_shared_parts_are_experts_of_every_token(hidden_size: int, activation: str, device: str) -> None:
    """A shared MLP gives the bits that experts with its channels give as further choices."""
    columns, parts, order = 12, 2, ACTIVATIONS[activation]
    rows = columns * (2 if order else 1)
    ids = torch.tensor([[0, 4, -1], [2, 2, EXPERTS + 2]], dtype=torch.int64, device=device)
    x, weight = integers(2, hidden_size, device=device) / 8, integers(EXPERTS, rows, hidden_size, device=device, seed=1)
    whole = integers(parts * rows, hidden_size + 2, device=device, seed=2)[:, :hidden_size]
    kinds = 2 if order == 1 else 1  # gates first, then ups
    of_parts = whole.unflatten(0, (kinds, parts, -1)).transpose(0, 1).flatten(1, 2)
    further = torch.arange(EXPERTS, EXPERTS + parts, dtype=torch.int64, device=device).expand(2, -1)
    known = torch.cat((ids.where(ids < EXPERTS, -1), further), 1)
    found, expected = (x.new_full((2 * (TOP_K + parts), columns), 7.0) for _ in range(2))
    pyops.skinny_experts(found, x, weight, ids, None, activation, whole)
    pyops.skinny_experts(expected, x, torch.cat((weight, of_parts)), known, None, activation)
    assert torch.equal(found, expected)
    if order:
        return

    downs = integers(EXPERTS, columns, hidden_size, device=device, seed=3)
    down = integers(columns, parts * hidden_size, device=device, seed=4)
    of_parts = down.unflatten(1, (parts, -1)).transpose(0, 1)
    inputs, factors = integers(2 * (TOP_K + parts), hidden_size, device=device), torch.ones(2, 5, device=device)
    factors[:, :TOP_K] = integers(2, TOP_K, device=device, seed=5)
    out, expected = (x.new_full((2, columns), 7.0) for _ in range(2))
    pyops.skinny_experts_sum(out, inputs, downs, ids, factors[:, :TOP_K].contiguous(), None, None, down)
    pyops.skinny_experts_sum(expected, inputs, torch.cat((downs, of_parts)), known, factors)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_token_of_fused_experts(activation: str) -> None:
    """The result for one token is that of the grouped GEMMs, which two equal tokens take."""
    generator = torch.Generator().manual_seed(0)
    hidden_size, channels = 40, 24
    rows = channels * (2 if ACTIVATIONS[activation] else 1)
    shapes = (1, hidden_size), (EXPERTS, rows, hidden_size), (EXPERTS, hidden_size, channels), (EXPERTS, rows)
    x, w1, w2, b1, b2 = (torch.randn(shape, generator=generator) for shape in (*shapes, (EXPERTS, hidden_size)))
    w1, w2 = w1 * hidden_size**-0.5, w2 * channels**-0.5
    weights, ids = torch.rand(1, TOP_K, generator=generator), torch.tensor([[3, 0, EXPERTS]], dtype=torch.int32)
    terms = pyops.FusedMoEQuantConfig(w1_bias=b1, w2_bias=b2)
    with config.cpu("kernels"):
        one, two = (
            pyops.fused_experts(
                *(x.expand(n, -1).contiguous(), w1, w2, weights.expand(n, -1).contiguous()),
                *(ids.expand(n, -1).contiguous(), False, activation),
                quant_config=terms,
            )
            for n in (1, 2)
        )
    assert one.abs().max() > 0.1
    torch.testing.assert_close(one[0], two[0], rtol=1e-5, atol=1e-5)


def test_refused() -> None:
    x, ids, out = torch.ones(2, 8), torch.zeros(2, 3, dtype=torch.int32), torch.empty(6, 4)
    weight, factors = torch.ones(5, 4, 8), torch.ones(2, 3)
    for args, message in (
        ((out, x, weight[..., :7], ids), "weight: expected shape (num_experts, rows=4, hidden_size=8), got (5, 4, 7)"),
        ((out, x, weight, ids, None, "silu"), "weight: expected shape (num_experts, rows=8, hidden_size=8), got "),
        ((out[:5], x, weight, ids), "out: expected shape (rows=6, output_size), got (5, 4)"),
        ((out, x, weight[:0], ids), "weight: expected at least one expert, got shape (0, 4, 8)"),
        ((out, x, weight.half(), ids), "weight: expected dtype float32, got float16"),
        ((out, x, weight, ids, torch.ones(5, 3)), "bias: expected shape (num_experts=5, rows=4), got (5, 3)"),
        ((out, x, weight, ids, None, "tanh"), "activation: expected none or silu or "),
        (
            (out, x, weight, ids, None, "none", torch.ones(6, 8)),
            "shared: expected shape (a multiple of 4, 8), got (6, 8)",
        ),
        (
            (out, x, weight, ids, None, "none", torch.ones(8, 8)),
            "out: expected shape (rows=10, output_size), got (6, 4)",
        ),
    ):
        with pytest.raises(pyops.OpError) as caught:
            pyops.skinny_experts(*args)
        assert str(caught.value).startswith(f"skinny_experts: {message}")
    for args, message in (
        ((x[:, :4], x, weight, ids, factors), "input: expected shape (rows=6, hidden_size), got (2, 8)"),
        (
            (x[:, :4], torch.ones(6, 8), weight, ids, factors[:1]),
            "topk_weights: expected shape (num_tokens=2, top_k=3)",
        ),
        (
            (x[:, :4], torch.ones(6, 8), weight, ids, factors, None, x),
            "addend: expected shape (num_tokens=2, output_si",
        ),
        (
            (x[:, :4], torch.ones(6, 8), weight, ids, factors, None, None, torch.ones(3, 8)),
            "shared: expected shape (4, a multiple of 8), got (3, 8)",
        ),
    ):
        with pytest.raises(pyops.OpError) as caught:
            pyops.skinny_experts_sum(*args)
        assert str(caught.value).startswith(f"skinny_experts_sum: {message}")
