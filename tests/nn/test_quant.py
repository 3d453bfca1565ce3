"""fp8 quantisation and the choice of experts as modules, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyops import nn as layers
from pyops import testing
from pyops.nn import GroupShape, QuantFP8
from tests.support.layers import DTYPES, of_all_methods

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn


def values(quantized: Tensor) -> Tensor:
    return quantized.to(torch.float64)


NAMES = {"tensor": GroupShape.PER_TENSOR, "token": GroupShape.PER_TOKEN}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", NAMES)
@pytest.mark.parametrize("bounded", [False, True])
def test_quant_fp8_with_dynamic_scales(dtype: torch.dtype, shape: str, bounded: bool) -> None:
    if bounded and shape == "tensor":
        with pytest.raises(ValueError, match="QuantFP8: scale_ub"):
            QuantFP8(False, NAMES[shape])(torch.zeros(2, 2), None, torch.ones(1))
        return
    x = (torch.randn(6, 40) * 5).to(dtype)
    bound = torch.tensor([4.0]) if bounded else None
    layer = QuantFP8(False, NAMES[shape])
    absmax = x.double().abs().max() if shape == "tensor" else x.double().abs().amax(-1, keepdim=True)
    expected = (absmax.clamp(max=4.0) if bounded else absmax) / 448
    for method in (layer.forward_native, layer.forward_cuda, layer):
        quantized, scale = method(x, None, bound)
        assert quantized.dtype == FP8
        assert scale.dtype == torch.float32
        assert scale.shape == ((1,) if shape == "tensor" else (6, 1))
        torch.testing.assert_close(scale.double(), expected.reshape(scale.shape), rtol=2**-22, atol=0.0)
        clipped = (x.double() / scale.double()).clamp(-448, 448)
        # Half an ulp of three mantissa bits, and half a subnormal.
        torch.testing.assert_close(values(quantized), clipped, rtol=2**-4 + 2**-20, atol=2**-10)
    native, ours = layer.forward_native(x, None, bound), layer.forward_cuda(x, None, bound)
    assert (values(native[0]) != values(ours[0])).float().mean() < 0.02  # by reciprocal, or by division


@pytest.mark.parametrize("group", [(-1, -1), (1, -1), (-1, 1), (2, 8), (1, 4)])
def test_quant_fp8_with_given_scales(group: tuple[int, int]) -> None:
    x = torch.randn(4, 16) * 3
    rows, columns = (4 if group[0] < 0 else group[0], 16 if group[1] < 0 else group[1])
    scale = torch.rand(4 // rows, 16 // columns) * 0.05 + 0.01
    whole = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    expected = (x * (1 / whole)).clamp(-448, 448).to(FP8)
    layer = QuantFP8(True, group)
    given = scale.reshape(-1) if 1 in scale.shape else scale
    for each in (scale, given):
        native, returned = layer.forward_native(x, each)
        assert testing.same_bits(native.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(returned.reshape(-1), scale.reshape(-1))
        quantized, returned = layer.forward_cuda(x, each)
        assert testing.same_bits(quantized.view(torch.uint8), expected.view(torch.uint8))
        assert returned is each


@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 64)])
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("column_major", [False, True])
def test_quant_fp8_of_groups(shape: tuple[int, ...], ue8m0: bool, column_major: bool) -> None:
    x = torch.randn(shape) * 8
    layer = QuantFP8(False, (1, 16), column_major_scales=column_major, use_ue8m0=ue8m0)
    scales = x.double().unflatten(-1, (-1, 16)).abs().amax(-1) / 448
    if ue8m0:
        scales = torch.exp2(scales.log2().ceil())
    for method in (layer.forward_native, layer.forward_cuda):
        quantized, scale = method(x)
        torch.testing.assert_close(scale.double(), scales, rtol=2e-7, atol=2e-8)
        assert not column_major or scale.stride(-2) == 1
        expected = (x / scale.repeat_interleave(16, -1)).clamp(-448, 448).to(FP8)
        assert testing.same_bits(quantized.view(torch.uint8), expected.view(torch.uint8))


def test_quant_fp8_native_only_cases() -> None:
    """A partial last group, padding rows, rows of zeros."""
    quantized, scale = QuantFP8(False, (1, 64)).forward_native(torch.ones(8, 513))
    assert quantized.shape == (8, 513)
    assert scale.shape == (8, 9)
    assert bool((values(quantized) == 448).all())
    for shape in NAMES.values():
        layer = QuantFP8(False, shape, num_token_padding=17)
        quantized, scale = layer.forward_native(torch.zeros(3, 4))
        assert quantized.shape == layer.forward_cuda(torch.zeros(3, 4))[0].shape == (17, 4)
        assert scale.shape == layer.forward_cuda(torch.zeros(3, 4))[1].shape
        assert not values(quantized).any()
    assert scale[0] == 1 / (448 * 512)


def test_quant_fp8_with_fnuz(monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices with e4m3fnuz: values up to 224, with and without the kernels."""
    fnuz = torch.float8_e4m3fnuz
    monkeypatch.setattr("pyops.nn.quant.own_fp8", lambda _: "float8_e4m3fnuz")
    monkeypatch.setattr("pyops.ops.quantize.scaled.own_fp8", lambda _: "float8_e4m3fnuz")
    x = torch.randn(6, 64) * 5
    x[0, :3] = torch.tensor([1e6, -1e6, -0.0])
    for layer, parts in ((QuantFP8(False, (1, -1)), x), (QuantFP8(False, (1, 16)), x.unflatten(-1, (-1, 16)))):
        scales = parts.double().abs().amax(-1) / 224
        for method in (layer.forward_native, layer.forward_cuda):
            quantized, scale = method(x)
            assert quantized.dtype == fnuz
            torch.testing.assert_close(scale.double().reshape(scales.shape), scales, rtol=2e-7, atol=1e-5)
            wide = (values(quantized) * scale.double().repeat_interleave(64 // scale.shape[-1], -1)).reshape(x.shape)
            torch.testing.assert_close(wide, x.double(), rtol=2**-4 + 2**-20, atol=float(scales.max()) * 2**-11)
            assert quantized.view(torch.uint8)[0, :3].tolist() == [0x7E, 0xFE, 0]
    for method in ((static := QuantFP8(True, (-1, -1))).forward_native, static.forward_cuda):
        quantized, _ = method(x, torch.ones(1))
        expected = x.clamp(-224, 224).to(fnuz)
        assert testing.same_bits(quantized.view(torch.uint8), expected.view(torch.uint8))
    quantized, scale = QuantFP8(True, (1, -1), num_token_padding=9).forward_native(x, torch.ones(len(x)))
    assert (len(quantized), scale.shape) == (9, (len(x), 1)), "scales that are given are those of the rows"
    quantized, _ = QuantFP8(False, (1, -1), num_token_padding=9).forward_native(x)
    assert (quantized.dtype, quantized.shape) == (fnuz, (9, 64))


def test_latent_queries() -> None:
    layer = layers.get_layer_class("mla_decode_concat_quant_fp8")(True, GroupShape.PER_TENSOR)
    nope, rope, scale = torch.randn(3, 2, 8), torch.randn(3, 2, 4), torch.tensor([0.01])
    quantized = of_all_methods(layer, nope, rope, scale)
    expected = (torch.cat((nope, rope), -1) * (1 / scale)).clamp(-448, 448).to(FP8)
    assert testing.same_bits(quantized.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("renormalize", [True, False])
def test_grouped_topk_by_sigmoid_and_bias(renormalize: bool) -> None:
    """As in the DeepSeek-V3 paper, token by token in float64."""
    logits, bias = torch.randn(33, 16), torch.rand(16) * 0.2
    layer = layers.GroupedTopk(3, renormalize, 4, 2, "sigmoid", 2.5)
    weights, experts = of_all_methods(layer, torch.zeros(33, 8), logits, bias)
    assert weights.dtype == torch.float32
    assert experts.dtype == torch.int32
    scores = logits.double().sigmoid()
    for token in range(33):
        keys = (scores[token] + bias.double()).view(4, 4)
        best = keys.sort(-1).values[:, -2:].sum(-1).topk(2).indices
        allowed = {4 * int(group) + i for group in best for i in range(4)}
        order = sorted(allowed, key=lambda e, keys=keys: -float(keys.flatten()[e]))[:3]
        assert experts[token].tolist() == order
        expected = scores[token, order] / (scores[token, order].sum() if renormalize else 1) * 2.5
        torch.testing.assert_close(weights[token].double(), expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_topk_by_softmax(dtype: torch.dtype) -> None:
    """Groups ranked by their best expert, as in DeepSeek-V2."""
    logits = torch.randn(33, 16).to(dtype)
    weights, experts = of_all_methods(layers.GroupedTopk(2, True, 8, 2), torch.zeros(33, 8), logits)
    scores = logits.float().softmax(-1)  # float32 for any dtype of the logits
    groups = scores.view(33, 8, 2).max(-1).values.topk(2).indices
    masked = torch.zeros_like(scores)
    for token in range(33):
        for group in groups[token]:
            masked[token, 2 * group : 2 * group + 2] = scores[token, 2 * group : 2 * group + 2]
    expected = masked.topk(2)
    assert testing.same_bits(scores.gather(1, experts.long()), expected.values)
    torch.testing.assert_close(weights, expected.values / expected.values.sum(-1, keepdim=True))
    one = layers.GroupedTopk(1, False, 16, 1)  # groups of one expert: the sum of the best two is one score
    assert torch.equal(one(torch.zeros(33, 8), logits, torch.zeros(16))[1][:, 0], scores.argmax(-1).int())
    many = layers.GroupedTopk(40, False, 40, 40)  # more groups and more experts per token than the op takes
    _, experts = of_all_methods(many, torch.zeros(33, 8), torch.randn(33, 80))
    assert experts.shape == (33, 40)
    _, experts = of_all_methods(layers.GroupedTopk(2, False, 33, 33), torch.zeros(3, 8), torch.randn(3, 66))
    assert experts.shape == (3, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantFP8(False, (-1, 1)), "QuantFP8: group_shape: scales are found for"),
        (lambda: QuantFP8(False, (1, 8), num_token_padding=4), "QuantFP8: num_token_padding"),
        (lambda: QuantFP8(True, (-1, -1))(torch.zeros(2, 2)), "QuantFP8: scale: expected one with static=True"),
        (lambda: QuantFP8(False, (-1, -1))(torch.zeros(2, 2), torch.ones(1)), "QuantFP8: scale: expected None"),
        (lambda: layers.GroupedTopk(1, True, 2, 1, "relu"), "GroupedTopk: scoring_func: expected"),
        (lambda: layers.GroupedTopk(1, True), "GroupedTopk: topk_group: expected"),
        (lambda: layers.GroupedTopk(1, True, 2, 1, num_fused_shared_experts=1), "num_fused_shared_experts: expected 0"),
        (
            lambda: layers.GroupedTopk(1, True, 3, 1)(torch.zeros(2, 1), torch.zeros(2, 8)),
            "expected experts in 3 groups",
        ),
        (lambda: layers.GroupedTopk(3, True, 4, 1)(torch.zeros(2, 1), torch.zeros(2, 8)), "at least topk=3"),
        (lambda: layers.GroupedTopk(1, True, 4, 1)(torch.zeros(3, 1), torch.zeros(2, 8)), "expected 3 tokens"),
    ],
)
def test_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
