"""Activations as modules, against torch.nn.functional, transformers and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from pyops import OpError, testing
from pyops import nn as layers
from pyops.host.toolchain import toolchains
from tests.support.layers import DTYPES, of_all_methods

pytestmark = pytest.mark.usefixtures("no_grad")

Tensor = torch.Tensor
_SHAPES = [(7, 34), (2, 3, 16), (0, 8), (10,)]


def _of_halves(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(*x.chunk(2, -1))


EXACT: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Tensor]]] = {
    "silu_and_mul": (layers.SiluAndMul, _of_halves(lambda g, u: functional.silu(g) * u)),
    "silu_and_mul_with_clamp": (
        lambda: layers.SiluAndMulWithClamp(1.5),
        _of_halves(lambda g, u: functional.silu(g.clamp(max=1.5)) * u.clamp(-1.5, 1.5)),
    ),
    "mul_and_silu": (layers.MulAndSilu, _of_halves(lambda g, u: g * functional.silu(u))),
    "gelu_and_mul": (layers.GeluAndMul, _of_halves(lambda g, u: functional.gelu(g) * u)),
    "gelu_tanh_and_mul": (
        lambda: layers.GeluAndMul("tanh"),
        _of_halves(lambda g, u: functional.gelu(g, approximate="tanh") * u),
    ),
    "fatrelu_and_mul": (
        lambda: layers.FatreluAndMul(0.25),
        _of_halves(lambda g, u: functional.threshold(g, 0.25, 0.0) * u),
    ),
    # PyTorch computes float16 on the CPU with an approximation of its own, up to one ulp off.
    "gelu": (layers.GELU, lambda x: functional.gelu(x.float()).to(x.dtype)),
    "relu2": (layers.ReLUSquaredActivation, transformers.activations.ReLUSquaredActivation()),
    "gelu_fast": (layers.FastGELU, transformers.activations.FastGELUActivation()),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_equal_to_eager_torch(name: str, dtype: torch.dtype) -> None:
    make, expected = EXACT[name]
    for shape in _SHAPES:
        x = torch.randn(shape).to(dtype) * 3
        assert testing.same_bits(of_all_methods(make(), x), expected(x))


def _swigluoai(x: Tensor) -> Tensor:
    """The formula of GptOssExperts in transformers, in float64."""
    gate, up = x.double()[..., ::2].clamp(max=7.0), x.double()[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def _swiglustep(x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, -1)
    return (gate * torch.sigmoid(gate)).clamp(max=2.0) * up.clamp(-2.0, 2.0)


CLOSE: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Tensor]]] = {
    "swigluoai_and_mul": (layers.SwigluOAIAndMul, _swigluoai),
    "swiglustep_and_mul": (lambda: layers.SwigluStepAndMul(2.0), _swiglustep),
    "quick_gelu": (layers.QuickGELU, lambda x: transformers.activations.QuickGELUActivation()(x.double())),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CLOSE)
def test_one_rounding_from_float64(name: str, dtype: torch.dtype) -> None:
    make, expected = CLOSE[name]
    for shape in _SHAPES:
        x = torch.randn(shape).to(dtype) * 4
        result = of_all_methods(make(), x)
        assert result.dtype == dtype
        # Half an ulp of rounding, and in float32 a few ulps of the operations.
        rtol = {torch.float32: 2**-20, torch.float16: 2**-11 + 2**-20, torch.bfloat16: 2**-8 + 2**-20}[dtype]
        rtol += (
            1.702 * max(x.abs().flatten().tolist(), default=0.0) * 2**-24
        )  # for the rounding of an exponential's argument
        atol = {torch.float32: 1e-30, torch.float16: 2.0**-25, torch.bfloat16: 1e-30}[dtype]  # half a subnormal
        torch.testing.assert_close(result.double(), expected(x), rtol=rtol, atol=atol)


def test_new_gelu() -> None:
    """GPT-2's; transformers computes the cube by another function: close, not equal."""
    x = torch.randn(7, 33) * 3
    expected = transformers.activations.NewGELUActivation()(x.double())
    torch.testing.assert_close(of_all_methods(layers.NewGELU(), x).double(), expected, rtol=1.3e-6, atol=1e-6)
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        expected = transformers.activations.NewGELUActivation()(x.to(dtype))
        torch.testing.assert_close(of_all_methods(layers.NewGELU(), x.to(dtype)), expected, rtol=tolerance, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_xielu(dtype: torch.dtype) -> None:
    """State and result equal those of transformers."""
    theirs = transformers.activations.XIELUActivation(dtype=dtype)
    ours = layers.XIELU(dtype=dtype)
    assert set(ours.state_dict()) == set(theirs.state_dict()) == {"alpha_p", "alpha_n", "beta", "eps"}
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name])
    state = {"alpha_p": torch.tensor([0.3]), "alpha_n": torch.tensor([-0.7]), "beta": torch.tensor(0.75)}
    state |= {"eps": torch.tensor(-1e-6)}
    for module in (ours, theirs):
        module.load_state_dict(state)
    x = torch.randn(5, 31).to(dtype)
    assert testing.same_bits(of_all_methods(ours, x), theirs(x).detach())


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("sparsity", [0.5, 0.95])
def test_gelu_and_mul_sparse(sparsity: float, approximate: str) -> None:
    """As in Gemma 3n."""
    config = transformers.Gemma3nTextConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, activation_sparsity_pattern=[sparsity]
    )
    gate, up = torch.randn(2, 6, 64, dtype=torch.float32)
    cut = Gemma3nTextMLP(config)._gaussian_topk(gate)
    expected = functional.gelu(cut, approximate=approximate) * up
    result = of_all_methods(layers.GeluAndMulSparse(sparsity, approximate), torch.cat((gate, up), -1))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    assert (result == 0).float().mean() > sparsity - 0.15


@pytest.mark.parametrize(
    "layer", [layers.SiluAndMul(), layers.GeluAndMulSparse(0.9), layers.FastGELU(), layers.XIELU()]
)
def test_any_strides(layer: Any) -> None:
    x = torch.randn(4, 6, 40, dtype=torch.float32)
    for view in (x[..., :16], x.transpose(0, 1), x[:, ::2, :8], x.mT, x[0].t()):
        assert testing.same_bits(of_all_methods(layer, view), layer.forward_native(view.contiguous()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers.GeluAndMul("erf"), "GeluAndMul: approximate: expected"),
        (lambda: layers.GeluAndMulSparse(0.5, "erf"), "GeluAndMulSparse: approximate: expected"),
        (lambda: layers.GeluAndMulSparse(0.0), "GeluAndMulSparse: activation_sparsity: expected above 0"),
        (lambda: layers.SwigluStepAndMul(None), "SwigluStepAndMul: limit: expected a number"),
        (lambda: layers.XIELU(alpha_n_init=0.4), "XIELU: expected .* alpha_n_init above beta"),
        (lambda: layers.SiluAndMul().forward_cuda(torch.zeros(2, 3)), "silu_and_mul: input: expected a last dimension"),
    ],
)
def test_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
    assert issubclass(OpError, ValueError)


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
def test_kernels_compute_the_same() -> None:
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    for layer in (layers.SiluAndMul(), layers.FatreluAndMul(0.25), layers.FastGELU(), layers.XIELU()):
        with testing.cpu("kernels"):
            result = layer.forward_cuda(x)
        torch.testing.assert_close(result, layer.forward_native(x), rtol=2**-7, atol=1e-6)
