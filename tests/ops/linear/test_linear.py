"""skinny_linear against float64: exact where sums are exact, and in any layout."""

from __future__ import annotations

import pytest
import torch

import pyops
from pyops._core import config
from tests.support.calls import DEVICES

pytestmark = pytest.mark.rotates

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def test_reads_stay_inside_the_tensors() -> None:
    """Tiles with more rows of weight and of input than exist."""
    tensors = [torch.ones(3, 5), torch.ones(3, 64), torch.ones(5, 64), torch.ones(5)]
    with config.cpu("kernels"):
        pyops.skinny_linear(*tensors)
    assert (tensors[0] == 65.0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize(("output_size", "hidden_size"), [(3, 8), (37, 2056), (130, 776)])
def test_matches_float64(output_size: int, hidden_size: int, tokens: int, dtype: torch.dtype, device: str) -> None:
    """A sum in float32, rounded once: off by at most half an ulp plus the error bound of the additions."""
    x, weight = (draw(n, hidden_size, dtype=dtype, device=device, seed=n) for n in (tokens, output_size))
    bias = draw(output_size, dtype=dtype, device=device, seed=7)
    out = x.new_full((tokens, output_size), torch.nan)
    for given in (None, bias):
        pyops.skinny_linear(out, x, weight, given)
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if given is None else given.double())
        lost = x.double().abs() @ weight.double().abs().T * 2.0**-24 * 32
        half_unit = exact.abs() * torch.finfo(dtype).eps / 2
        assert ((out.double() - exact).abs() <= half_unit + lost).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hidden_size", [1, 7, 96, 2048])
def test_integer_accumulation_is_exact(hidden_size: int, device: str) -> None:
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randint(-15, 16, (n, hidden_size), generator=generator, device=device).float() for n in (2, 70))
    out = x.new_empty(2, 70)
    pyops.skinny_linear(out, x, weight)
    assert torch.equal(out.double(), x.double() @ weight.double().T)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("output_size", "hidden_size"), [(9003, 4), (1107, 1030), (603, 4104)])
def test_more_rows_than_blocks(output_size: int, hidden_size: int, device: str) -> None:
    """Rows that a warp has to itself, that several warps share, and that they share in more than one chunk."""
    generator = torch.Generator(device).manual_seed(1)
    x, weight, bias = (
        torch.randint(-9, 10, shape, generator=generator, device=device).float()
        for shape in ((3, hidden_size), (output_size, hidden_size), (output_size,))
    )
    out = x.new_empty(3, output_size)
    for tokens in (1, 3):
        pyops.skinny_linear(out[:tokens], x[:tokens], weight, bias)
        assert torch.equal(out[:tokens].double(), x[:tokens].double() @ weight.double().T + bias)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hidden_size", [8, 776, 8200])
@pytest.mark.parametrize("activation", ["none", "gelu", "silu_and_mul"])
def test_norm_and_activation(activation: str, hidden_size: int, device: str) -> None:
    """The norm is that of `rms_norm`; gates and ups are not rounded. Rows that registers hold, and longer ones."""
    rows, dtype = 30, torch.bfloat16
    x, weight = (draw(n, hidden_size, dtype=dtype, device=device, seed=n) for n in (3, rows))
    weight *= hidden_size**-0.5
    scale, bias = (draw(n, dtype=dtype, device=device, seed=9) for n in (hidden_size, rows))
    normalised = torch.empty_like(x)
    pyops.rms_norm(normalised, x, scale, 1e-3)
    exact = torch.nn.functional.linear(normalised.double(), weight.double(), bias.double())
    if activation == "gelu":
        exact = torch.nn.functional.gelu(exact)
    elif activation == "silu_and_mul":
        exact = torch.nn.functional.silu(exact[:, : rows // 2]) * exact[:, rows // 2 :]
    out = x.new_full(exact.shape, torch.nan)
    options = {"activation": activation, "norm_weight": scale, "epsilon": 1e-3}
    pyops.skinny_linear(out, x, weight, bias, constant_weight=True, **options)
    # A sum of squares in another order may round an element of the norm to its neighbour.
    torch.testing.assert_close(out.double(), exact, rtol=2.0**-8, atol=2.0**-9)
    plain = torch.empty_like(out)
    pyops.skinny_linear(plain, normalised, weight, bias, activation=activation)
    torch.testing.assert_close(plain.double(), exact, rtol=2.0**-8, atol=2.0**-14)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_larger_tensors(device: str) -> None:
    """Gaps after rows hold NaN and stay as they are; leading dimensions are tokens."""
    whole = draw(2, 3, 136, dtype=torch.bfloat16, device=device)
    x, weights = whole[..., 8:], draw(40, 160, dtype=torch.bfloat16, device=device, seed=1)
    whole[..., :8] = weights[:, 128:] = torch.nan
    place = whole.new_full((2, 3, 48), 7.0)
    pyops.skinny_linear(place[..., :40], x, weights[:, :128])
    dense = whole.new_empty(6, 40)
    pyops.skinny_linear(dense, x.reshape(6, 128).contiguous(), weights[:, :128].contiguous())
    assert torch.equal(place[..., :40].reshape(6, 40), dense)
    assert dense.isfinite().all()
    assert (place[..., 40:] == 7.0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_nan_and_infinity_stay_in_their_row(device: str) -> None:
    """A token or a weight row with NaN or infinity does not affect the others."""
    x, weight = torch.ones(2, 64, device=device), torch.ones(3, 64, device=device)
    x[1, 5], weight[2, 9] = torch.inf, torch.nan
    out = x.new_empty(2, 3)
    pyops.skinny_linear(out, x, weight)
    assert out[:, :2].tolist() == [[64.0, 64.0], [torch.inf, torch.inf]]
    assert out[:, 2].isnan().all()


def test_refused() -> None:
    x, weight, out = torch.ones(2, 8), torch.ones(3, 8), torch.empty(2, 3)
    for args, message in (
        ((out, x, torch.ones(3, 9)), "weight: expected shape (output_size=3, hidden_size=8), got (3, 9)"),
        ((torch.empty(3, 3), x, weight), "out: expected the leading dimensions of input, (2,), got shape (3, 3)"),
        ((out, x, weight.half()), "weight: expected dtype float32, got float16"),
        ((out, x, weight, None, False, "tanh"), "activation: expected none or gelu or silu_and_mul, got tanh"),
        ((out, x, weight, None, False, "none", x[0, :7]), "norm_weight: expected 8 elements, got shape (7,)"),
        ((out, x, weight, None, False, "none", None, 0.0, x.half()), "prefetched: expected dtype float32, got float16"),
        (
            (out, x, weight, None, False, "none", None, 0.0, x[0]),
            "prefetched: expected shape (rows, columns), got (8,)",
        ),
        ((out, x, weight, torch.ones(2)), "bias: expected 3 elements, got shape (2,)"),
        ((out, x[:, :0], torch.ones(3, 0)), "input: expected rows of at least one element, got shape (2, 0)"),
        ((out, x, torch.ones(8, 3).T), "weight: expected a last dimension of stride 1, got strides (1, 3)"),
    ):
        with pytest.raises(pyops.OpError) as caught:
            pyops.skinny_linear(*args)
        assert str(caught.value) == f"skinny_linear: {message}"
