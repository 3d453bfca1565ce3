"""Layers that mix tokens or pixels: convolutions and attention, against torch, transformers and float64."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from pyops import nn as layers
from pyops import testing
from pyops.host.toolchain import toolchains
from tests.support.layers import DTYPES, of_all_methods

Tensor = torch.Tensor
NEEDS_COMPILER = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")

CONVOLUTIONS: list[dict[str, Any]] = [
    {"kernel_size": 4, "stride": 4},
    {"kernel_size": 3, "padding": 1, "bias": False},
    {"kernel_size": 3, "padding": "same"},
    {"kernel_size": 2, "padding": "valid", "stride": 2, "groups": 2},
    {"kernel_size": 2, "stride": 2, "dilation": 2},
]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_convolutions(dims: int, options: dict[str, Any]) -> None:
    """State and result equal those of torch."""
    cls, theirs_cls = ((layers.Conv2dLayer, torch.nn.Conv2d), (layers.Conv3dLayer, torch.nn.Conv3d))[dims - 2]
    ours, theirs = cls(4, 6, **options), theirs_cls(4, 6, **options)
    ours.load_state_dict(theirs.state_dict())
    assert ours.enable_linear == (options == {"kernel_size": 4, "stride": 4})
    x = torch.randn(2, 4, *(9, 11, 8)[:dims])
    expected = theirs(x).detach()
    for method in (ours.forward_native, ours.forward_cuda, ours):
        torch.testing.assert_close(method(x).detach(), expected, rtol=1e-5, atol=1e-5)
    assert ours.weight.dtype == torch.float32
    assert cls(4, 6, 2, params_dtype=torch.bfloat16).weight.dtype == torch.bfloat16


def test_convolution_with_a_kernel_for_each_dimension() -> None:
    ours, theirs = layers.Conv3dLayer(3, 5, (2, 4, 4), (2, 4, 4)), torch.nn.Conv3d(3, 5, (2, 4, 4), (2, 4, 4))
    assert ours.enable_linear
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 3, 4, 8, 12)
    torch.testing.assert_close(ours.forward_native(x), theirs(x), rtol=1e-5, atol=1e-5)


def _short_conv(bias: bool) -> tuple[layers.ShortConv, Lfm2ShortConv]:
    config = transformers.Lfm2Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, conv_bias=bias, conv_L_cache=3
    )
    theirs = Lfm2ShortConv(config, 0).eval()
    ours = layers.ShortConv(config, 8, 0)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("bias", [True, False])
def test_short_conv_matches_lfm2(bias: bool) -> None:
    ours, theirs = _short_conv(bias)
    with torch.no_grad():
        x = torch.randn(1, 7, 8)
        torch.testing.assert_close(ours(x[0]), theirs(x)[0], rtol=1e-5, atol=1e-6)
        short = torch.randn(1, 1, 8)
        torch.testing.assert_close(ours(short[0]), theirs(short)[0], rtol=1e-5, atol=1e-6)


def test_short_conv_continues_from_its_cache() -> None:
    """Sequences in pieces, together with others, in any slots: each as if alone in one piece."""
    ours, _ = _short_conv(True)
    sequences = [torch.randn(length, 8) for length in (1, 2, 5, 9, 4)]
    slots = torch.tensor([3, 0, 5, -1, 1])
    state = torch.randn(6, 8, 2)
    untouched = state[[2, 4]].clone()
    with torch.no_grad():
        expected = [ours(sequence) for sequence in sequences]
        done, results = [0] * 5, [[] for _ in sequences]
        for step in ([1, 1, 2, 9, 0], [0, 1, 1, 0, 3], [0, 0, 2, 0, 1]):
            parts = [s[at : at + n] for s, at, n in zip(sequences, done, step, strict=True)]
            starts = torch.tensor([0, *step]).cumsum(0)
            initial = torch.tensor([at > 0 for at in done])
            out = ours(torch.cat(parts), state, starts, slots, initial)
            for result, part in zip(results, out.split(step), strict=True):
                result.append(part)
            done = [at + n for at, n in zip(done, step, strict=True)]
        for result, whole in zip(results, expected, strict=True):
            torch.testing.assert_close(torch.cat(result), whole, rtol=1e-5, atol=1e-6)
        assert testing.same_bits(state[[2, 4]], untouched)
        # The newest inputs are kept.
        gate, _, value = ours.in_proj(sequences[2])[0].chunk(3, -1)
        torch.testing.assert_close(state[5], (gate * value)[-2:].T, rtol=1e-5, atol=1e-6)
        none = torch.tensor([-1])
        before = state.clone()
        ours(sequences[0], state, torch.tensor([0, 1]), none, torch.tensor([True]))
        assert testing.same_bits(state, before)
        assert ours(torch.zeros(0, 8), state, torch.tensor([0, 0]), torch.tensor([2])).shape == (0, 8)
        assert testing.same_bits(state, before)


@pytest.mark.parametrize("run", [pytest.param("kernels", marks=NEEDS_COMPILER), "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_short_conv_by_its_op(dtype: torch.dtype, run: str) -> None:
    """Equals its native method, with states in either layout, and without states."""
    ours = _short_conv(True)[0].to(dtype)
    starts, slots = torch.tensor([0, 1, 1, 7, 12, 13]), torch.tensor([3, 0, 5, -1, 1], dtype=torch.int32)
    initial, x = torch.tensor([True, True, False, True, True]), torch.randn(13, 8).to(dtype)
    native = torch.randn(6, 8, 2).to(dtype)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for kernels in (native.clone(), native.mT.contiguous().mT):
        before = native.clone()
        with torch.no_grad(), testing.cpu("kernels") if run == "kernels" else nullcontext():
            result = ours.forward_cuda(x, kernels, starts, slots, initial)
            alone = ours.forward_cuda(x)
            empty = ours.forward_cuda(x[:0], kernels, starts[:2] * 0, slots[:1])
        with torch.no_grad():
            torch.testing.assert_close(
                result, ours.forward_native(x, before, starts, slots, initial), rtol=tolerance, atol=tolerance
            )
            torch.testing.assert_close(alone, ours.forward_native(x), rtol=tolerance, atol=tolerance)
        assert empty.shape == (0, 8)
        assert testing.same_bits(kernels.contiguous(), before)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[seq_len, heads, head_size] in float64."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    weights = (torch.einsum("qhd,khd->hqk", q.double(), k) * scale).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_mm_encoder_attention(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    layer = layers.MMEncoderAttention(heads, 16, num_kv_heads=kv_heads)
    assert layer.scale == 0.25
    query = torch.randn(2, 5, heads * 16).to(dtype)
    key, value = torch.randn(2, 2, 7, kv_heads * 16).to(dtype)
    q, k, v = (x.unflatten(-1, (-1, 16)) for x in (query, key, value))
    expected = torch.stack([_attention(*each, 0.25) for each in zip(q, k, v, strict=True)])
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for result in (of_all_methods(layer, query, key, value), of_all_methods(layer, q, k, v)):
        torch.testing.assert_close(result.reshape(q.shape).double(), expected, rtol=0.0, atol=tolerance)
    assert of_all_methods(layer, q, k, v).shape == q.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[2, 2], [2, 3, 4], [1, 0, 8]])
@pytest.mark.parametrize("tensor", [True, False])
def test_mm_encoder_attention_in_segments(dtype: torch.dtype, lengths: list[int], tensor: bool) -> None:
    layer = layers.MMEncoderAttention(4, 16, scale=0.3, num_kv_heads=2)
    projected = torch.randn(1, sum(lengths), 8 * 16).to(dtype)
    q, k, v = (x.unflatten(-1, (-1, 16)) for x in projected.split([64, 32, 32], -1))
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = torch.tensor(max(lengths)) if tensor else max(lengths)
    segments = [x[0].split(lengths) for x in (q, k, v)]
    expected = torch.cat([_attention(*each, 0.3) for each in zip(*segments, strict=True)])[None]
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for result in (
        layer.forward_native(q, k, v, starts, longest),
        layer.forward_cuda(q, k, v, starts, longest),
        layer.forward_cuda(q, k, v, starts),
        layer(q.flatten(2), k.flatten(2), v.flatten(2), starts, longest).view(q.shape),
    ):
        assert result.shape == q.shape
        torch.testing.assert_close(result.double(), expected, rtol=0.0, atol=tolerance)


@NEEDS_COMPILER
def test_kernels_compute_the_same() -> None:
    layer = layers.MMEncoderAttention(2, 16)
    q, k, v = torch.randn(3, 1, 5, 2, 16)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    with testing.cpu("kernels"):
        result = layer.forward_cuda(q, k, v, starts, 3)
    torch.testing.assert_close(result, layer.forward_native(q, k, v, starts, 3), rtol=1e-4, atol=1e-4)


CONFIG = SimpleNamespace(conv_L_cache=1, conv_bias=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers.Conv2dLayer(4, 4, 2, padding="same"), 'Conv2dLayer: padding: "same" needs odd kernels'),
        (lambda: layers.Conv2dLayer(4, 4, 3, padding_mode="reflect"), "Conv2dLayer: padding_mode: expected"),
        (lambda: layers.Conv2dLayer(4, 6, 3, groups=4), "Conv2dLayer: groups: expected a divisor of 4 and 6, got 4"),
        (lambda: layers.Conv3dLayer(4, 4, (3, 3)), "Conv3dLayer: kernel_size: expected one or 3 integers"),
        (lambda: layers.Conv2dLayer(4, 4, 2)(torch.zeros(4, 8, 8)), "Conv2dLayer: x: expected 4 dimensions"),
        (lambda: layers.ShortConv(CONFIG, 8, 0), "ShortConv: config.conv_L_cache: expected at least 2, got 1"),
        (
            lambda: _short_conv(True)[0](torch.zeros(2, 8), torch.zeros(1, 8, 3)),
            "ShortConv: conv_state: expected shape",
        ),
        (
            lambda: layers.MMEncoderAttention(4, 8, num_kv_heads=3),
            "MMEncoderAttention: num_kv_heads: expected a divisor",
        ),
        (
            lambda: layers.MMEncoderAttention(2, 4)(*[torch.zeros(1, 3, 4)] * 3),
            "MMEncoderAttention: query: expected",
        ),
        (
            lambda: layers.MMEncoderAttention(1, 4)(*[torch.zeros(2, 3, 4)] * 3, torch.tensor([0, 3])),
            "MMEncoderAttention: cu_seqlens: expected a batch of 1",
        ),
    ],
)
def test_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
