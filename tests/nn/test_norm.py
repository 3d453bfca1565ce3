"""Norms as modules, against torch.nn.functional, transformers and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from pyops import nn as layers
from pyops import testing
from pyops.host.toolchain import toolchains
from tests.support.layers import DTYPES, of_all_methods

pytestmark = pytest.mark.usefixtures("no_grad")

Tensor = torch.Tensor
EPS = 1e-6
TOLERANCE = {torch.float32: 2**-20, torch.float16: 3 * 2**-11, torch.bfloat16: 3 * 2**-8}  # three roundings


def _random(module: Any) -> Any:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 1.0, 0.1)
    return module


def _norm(x: Tensor, weight: Tensor | None) -> Tensor:
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y if weight is None else y * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm(dtype: torch.dtype, has_weight: bool) -> None:
    layer = _random(layers.RMSNorm(48, EPS, has_weight=has_weight, dtype=dtype))
    assert [name for name, _ in layer.named_parameters()] == ["weight"] * has_weight
    assert list(layer.state_dict()) == ["weight"] * has_weight
    weight = layer.weight.detach()
    assert weight.dtype == dtype
    assert has_weight or bool((weight == 1).all())
    for shape in ((7, 48), (2, 3, 48), (2, 3, 2, 48), (48,), (0, 48)):
        x = torch.randn(shape).to(dtype)
        expected = _norm(x.double(), weight if has_weight else None)
        torch.testing.assert_close(of_all_methods(layer, x).double(), expected, rtol=TOLERANCE[dtype], atol=1e-7)
        residual = torch.randn(shape).to(dtype)
        y, total = of_all_methods(layer, x, residual)
        assert testing.same_bits(total, x + residual)
        expected = _norm(total.double(), weight if has_weight else None)
        torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=1e-7)


def test_rms_norm_is_in_place_where_kernels_run_with_a_residual() -> None:
    layer, x, residual = layers.RMSNorm(8), torch.randn(3, 8), torch.randn(3, 8)
    kept = x.clone(), residual.clone()
    y, total = layer.forward_cuda(x, residual)
    assert y is x
    assert total is residual
    native = layer.forward_native(*kept)
    assert testing.same_bits(y, native[0])
    assert testing.same_bits(total, native[1])


def test_rms_norm_matches_llama() -> None:
    theirs = transformers.models.llama.modeling_llama.LlamaRMSNorm(32, EPS).to(torch.bfloat16)
    ours = layers.RMSNorm(32, EPS, dtype=torch.bfloat16)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    torch.testing.assert_close(of_all_methods(ours, x), theirs(x).detach(), rtol=2**-7, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_over_a_part_of_the_row(dtype: torch.dtype) -> None:
    layer = _random(layers.RMSNorm(12, EPS, var_hidden_size=8, dtype=dtype))
    x, residual = torch.randn(2, 2, 5, 12).to(dtype)
    z = (x + residual).double()
    for args, whole in (((x,), x.double()), ((x, residual), z)):
        result = of_all_methods(layer, *args)
        y = result if len(args) == 1 else result[0]
        expected = whole / (whole[..., :8].square().mean(-1, keepdim=True) + EPS).sqrt() * layer.weight.double()
        torch.testing.assert_close(y.double(), expected.detach(), rtol=TOLERANCE[dtype], atol=1e-7)
    assert testing.same_bits(result[1], x + residual)
    assert layers.RMSNorm(12, var_hidden_size=12).variance_size_override is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemma_rms_norm(dtype: torch.dtype) -> None:
    layer = layers.GemmaRMSNorm(24, EPS).to(dtype)
    assert not layer.weight.any()
    torch.nn.init.normal_(layer.weight)
    theirs = transformers.models.gemma.modeling_gemma.GemmaRMSNorm(24, EPS).to(dtype)
    theirs.load_state_dict(layer.state_dict())
    x, residual = torch.randn(2, 3, 24).to(dtype)
    torch.testing.assert_close(of_all_methods(layer, x), theirs(x).detach(), rtol=TOLERANCE[dtype], atol=1e-7)
    y, total = of_all_methods(layer, x, residual)
    if dtype == torch.float16:
        assert testing.same_bits(total, x.float() + residual.float())
    else:
        assert testing.same_bits(total, x + residual)
    expected = _norm(total.double(), layer.weight.detach().double() + 1)
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=1e-7)
    # This layer's residual is the input residual of the next one.
    again, total = of_all_methods(layer, x, total)
    assert total.dtype == (torch.float32 if dtype != torch.bfloat16 else dtype)
    assert again.dtype == dtype
    _, total = of_all_methods(layer, x, residual.float())
    assert testing.same_bits(total, x.float() + residual.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [None, 8])
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_rms_norm_gated(dtype: torch.dtype, group_size: int | None, norm_before_gate: bool, activation: str) -> None:
    layer = _random(layers.RMSNormGated(24, EPS, group_size, norm_before_gate, dtype=dtype, activation=activation))
    assert layer.bias is None
    x, z = torch.randn(2, 5, 24).to(dtype)
    gate = functional.sigmoid(z.double()) if activation == "sigmoid" else functional.silu(z.double())

    def norm(y: Tensor) -> Tensor:
        return _norm(y.unflatten(-1, (-1, group_size or 24)), None).flatten(-2) * layer.weight.detach().double()

    for args, expected in (
        ((x,), norm(x.double())),
        ((x, z), norm(x.double()) * gate if norm_before_gate else norm(x.double() * gate)),
    ):
        torch.testing.assert_close(
            of_all_methods(layer, *args).double(), expected, rtol=TOLERANCE[dtype], atol=2.0**-25
        )


@pytest.mark.parametrize("name", ["RMSNormGated", "FusedRMSNormGated"])
def test_gated_norms_refuse_another_activation(name: str) -> None:
    with pytest.raises(ValueError, match=rf'^{name}: activation: expected "swish", "silu" or "sigmoid", got'):
        getattr(layers, name)(24, activation="gelu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_fused_rms_norm_gated(dtype: torch.dtype, activation: str, weight_dtype: torch.dtype | None) -> None:
    """The weight may have another dtype, or be absent; everything is rounded once."""
    layer = _random(
        layers.FusedRMSNormGated(24, weight_dtype is not None, EPS, activation, dtype=weight_dtype or torch.float32)
    )
    x, g, residual = torch.randn(3, 2, 5, 24).to(dtype)
    gate = getattr(functional, activation)(g.double())

    def expected(y: Tensor) -> Tensor:
        return _norm(y, None if layer.weight is None else layer.weight.detach()) * gate

    tolerance: dict[str, Any] = {"rtol": torch.finfo(dtype).eps, "atol": 2.0**-20}
    torch.testing.assert_close(of_all_methods(layer, x, g).double(), expected(x.double()), **tolerance)
    total = x.double() + residual.double()
    y, kept = of_all_methods(layer, x, g, residual.float(), True)
    torch.testing.assert_close(y.double(), expected(total), **tolerance)
    torch.testing.assert_close(kept, total.float())
    assert y.dtype == dtype
    torch.testing.assert_close(of_all_methods(layer, x, g, residual), y, rtol=0, atol=0)
    for wide in (False, True):
        y, kept = of_all_methods(layer, x, g, None, True, wide)
        assert testing.same_bits(kept, x.float() if wide else x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_minimax_norm_of_one_rank(dtype: torch.dtype) -> None:
    """Its ranks are tested with the sharded layers; its weight is float32 and may be a shard."""
    layer = _random(layers.MiniMaxText01RMSNormTP(24, EPS))
    q, k = torch.randn(2, 5, 24).to(dtype)
    expected = _norm(q.double(), layer.weight.detach()), _norm(k.double(), layer.weight.detach())
    tolerance: dict[str, Any] = {"rtol": torch.finfo(dtype).eps, "atol": 2.0**-20}
    torch.testing.assert_close(of_all_methods(layer, q).double(), expected[0], **tolerance)
    found = layer.forward_qk(layer, layer, q, k)
    torch.testing.assert_close([one.double() for one in found], list(expected), **tolerance)
    part = layers.MiniMaxText01RMSNormTP(24, weight_shard_world_size=3, weight_shard_rank=1)
    part.weight.weight_loader(part.weight, torch.arange(24.0))
    assert part.weight.tolist() == list(range(8, 16))
    with pytest.raises(ValueError, match="MiniMaxText01RMSNormTP: hidden_size: expected a multiple of 5, got 24"):
        layers.MiniMaxText01RMSNormTP(24, weight_shard_world_size=5)


@pytest.mark.parametrize("groups", [1, 4])
def test_mixer2_norm_matches_zamba2(groups: int) -> None:
    theirs = Zamba2RMSNormGated(16, group_size=16 // groups, eps=EPS)
    torch.nn.init.normal_(theirs.weight)
    ours = layers.Mixer2RMSNormGated(16, groups, eps=EPS)
    ours.load_state_dict(theirs.state_dict())
    x, gate = torch.randn(2, 5, 16)
    expected = theirs(x, gate).detach()
    torch.testing.assert_close(of_all_methods(ours, x, gate), expected, rtol=1e-5, atol=1e-6)


def test_mixer2_norm_without_a_norm() -> None:
    x, gate = torch.randn(2, 5, 16)
    plain = layers.Mixer2RMSNormGated(16, 1, use_rms_norm=False)
    assert not list(plain.parameters())
    torch.testing.assert_close(of_all_methods(plain, x, gate), x * functional.silu(gate))


def test_any_strides() -> None:
    x = torch.randn(4, 6, 40)
    for view in (
        x[..., :16],
        x.transpose(0, 1)[..., 8:24],
        x[:, ::2, :16],
        x[:, :4, :4].flatten(1).view(2, 2, 16).mT.mT,
    ):
        for layer in (layers.RMSNorm(16), layers.GemmaRMSNorm(16), layers.RMSNormGated(16)):
            assert testing.same_bits(of_all_methods(layer, view), layer.forward_native(view.contiguous()))
        layer = layers.RMSNorm(16)
        for ours, expected in zip(
            of_all_methods(layer, view, view), layer.forward_native(view.contiguous(), view.contiguous()), strict=True
        ):
            assert testing.same_bits(ours, expected)
    assert testing.same_bits(of_all_methods(layers.RMSNorm(4), x.mT[..., :4]), layers.RMSNorm(4)(x.mT[..., :4]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers.RMSNorm(8, var_hidden_size=9), "RMSNorm: var_hidden_size: expected 1 to 8, got 9"),
        (lambda: layers.RMSNorm(8, var_hidden_size=4)(torch.zeros(2, 9)), "RMSNorm: x: expected rows of hidden_size=8"),
        (
            lambda: layers.RMSNorm(8).forward_cuda(torch.zeros(2, 9)),
            r"rms_norm: weight: expected shape \(hidden_size=9",
        ),
        (lambda: layers.Mixer2RMSNormGated(10, 3), "Mixer2RMSNormGated: full_hidden_size: expected a multiple of 3"),
    ],
)
def test_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
def test_kernels_compute_the_same() -> None:
    x, residual = torch.randn(2, 3, 32)
    for layer, args in (
        (layers.RMSNorm(32), (x,)),
        (layers.RMSNorm(32), (x, residual)),
        (layers.GemmaRMSNorm(32), (x, residual)),
        (layers.RMSNormGated(32), (x, residual)),
    ):
        expected = layer.forward_native(*args)
        with testing.cpu("kernels"):
            result = layer.forward_cuda(*(arg.clone() for arg in args))
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
