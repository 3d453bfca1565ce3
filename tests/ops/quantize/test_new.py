"""Quantisation into new tensors, by the functions that return quants and scales."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import pyops
from pyops._core.system import device as devices
from pyops._core.tensors import dtypes
from pyops.example import ArgMaker
from pyops.ops._shared.fp8 import converts_fp8, native_fp8, own_fp8
from pyops.ops.quantize import scaled
from tests.support.calls import DEVICES
from tests.support.quantize_truth import (
    FNUZ,
    FP8,
    INT8,
    LARGEST,
    _quietly,
    absmax,
    draw,
    exact,
    f32,
    grouped,
    new,
    same,
    static_fp8,
    static_int8,
    token_azp,
    token_fp8,
    token_int8,
)

__all__ = ["_quietly"]  # a fixture


@pytest.mark.parametrize("device", DEVICES)
def test_scaled_fp8_quant(device: str) -> None:
    x = draw(5, 96, device=device)
    quantized, scale = pyops.scaled_fp8_quant(x)
    right_scale = f32(absmax(exact(x).reshape(1, -1)).item() / 448)
    assert (quantized.dtype, scale.shape, scale.dtype) == (FP8, (1,), torch.float32)
    same(scale, right_scale)
    same(quantized, static_fp8(exact(x), right_scale))
    bound = torch.tensor(4.0, device=device)
    quantized, scale = pyops.scaled_fp8_quant(x, num_token_padding=17, scale_ub=bound, use_per_token_if_dynamic=True)
    assert (quantized.shape, scale.shape) == ((17, 96), (17, 1))
    right, rights = token_fp8(exact(x), 4.0)
    same(quantized[:5], right)
    same(scale[:5], rights)
    given_scale = torch.full((5, 1), 0.1, device=device)
    output = new((5, 96), FP8, device)
    quantized, scale = pyops.scaled_fp8_quant(x, given_scale, output=output, group_shape=(1, 96))
    assert quantized is output
    assert scale is given_scale
    same(quantized, static_fp8(exact(x), exact(given_scale)))
    assert pyops.scaled_fp8_quant(x, num_token_padding=2)[0].shape == (5, 96)


@pytest.mark.parametrize("device", DEVICES)
def test_scaled_int8_quant(device: str) -> None:
    x = draw(96, 5, device=device).t() + 2
    quantized, scale, azp = pyops.scaled_int8_quant(x)
    right, right_scale = token_int8(exact(x))
    assert azp is None
    same(quantized, right)
    same(scale, right_scale)
    quantized, scale, azp = pyops.scaled_int8_quant(x, symmetric=False)
    right, right_scale, right_azp = token_azp(exact(x))
    same(quantized, right)
    same(scale, right_scale)
    same(azp, right_azp)
    apart = torch.nn.functional.pad(x, (0, 7))[:, :96]
    same(pyops.scaled_int8_quant(apart, symmetric=False)[0], right)
    assert (scale.shape, azp.shape, azp.dtype) == ((5, 1), (5, 1), torch.int32)
    s, zero = torch.tensor(0.1, device=device), torch.tensor(3, dtype=torch.int32, device=device)
    x = x.contiguous()
    same(pyops.scaled_int8_quant(x, s)[0], static_int8(exact(x), exact(s), None))
    same(pyops.scaled_int8_quant(apart, s)[0], static_int8(exact(apart), exact(s), None))
    quantized, scale, azp = pyops.scaled_int8_quant(x, s, zero, symmetric=False)
    assert scale is s
    assert azp is zero
    same(quantized, static_int8(exact(x), exact(s), 3))


@pytest.mark.parametrize("device", DEVICES)
def test_group_quant_into_new_tensors(device: str) -> None:
    x = draw(5, 256, device=device)
    right, right_scale = grouped(exact(x), 64, FP8)
    for options, strides in (
        ({}, (4, 1)),
        ({"column_major_scales": True}, (1, 5)),
        ({"column_major_scales": True, "tma_aligned_scales": True}, (1, 8)),
    ):
        quantized, scale = pyops.per_token_group_quant_fp8(x, 64, **options)
        assert scale.stride() == strides
        same(quantized, right)
        same(scale, right_scale)
    output = new(x.shape, FP8, device)
    quantized, scale = pyops.per_token_group_quant_fp8(x, 64, dtype=FP8, out_q=output, use_ue8m0=True)
    assert quantized is output
    right, right_scale = grouped(exact(x), 64, FP8, power_of_two=True)
    same(quantized, right)
    same(scale, right_scale)
    for major, strides in ((False, (4, 2, 1)), (True, (4, 1, 2))):
        quantized, scale = pyops.per_token_group_quant_fp8(x.view(5, 2, 128), 64, column_major_scales=major)
        assert (scale.shape, scale.stride()) == ((5, 2, 2), strides)
        same(scale.flatten(1), grouped(exact(x), 64, FP8)[1])
    packed_codes, packed = pyops.per_token_group_quant_fp8_packed_for_deepgemm(x, 64)
    assert (packed.shape, packed.stride(), packed.dtype) == ((5, 1), (1, 8), torch.int32)
    same(packed_codes, right)
    whole = packed.as_strided((8, 1), (1, 8)).cpu().numpy().view("uint8").reshape(8, 4)
    assert (whole[:5] == numpy.log2(right_scale) + 127).all()
    assert not whole[5:].any()
    columns = pyops.per_token_group_quant_fp8_packed_for_deepgemm(x.t().contiguous().t(), 64)
    assert torch.equal(columns[0].view(torch.uint8), packed_codes.view(torch.uint8))
    assert torch.equal(columns[1], packed)


@pytest.mark.parametrize("device", DEVICES)
def test_scale_tensor_with_unused_elements(device: str) -> None:
    """The first elements are written, the others are left alone."""
    x = draw(5, 64, device=device)
    for op, shape, count in (
        (pyops.dynamic_per_token_scaled_fp8_quant, (8, 1), 5),
        (pyops.dynamic_per_token_scaled_fp8_quant, (5,), 5),
        (pyops.dynamic_scaled_fp8_quant, (3,), 1),
    ):
        quantized, scale = new(x.shape, FP8, device), torch.full(shape, 7.0, device=device)
        op(quantized, x, scale)
        right_codes, right = new(x.shape, FP8, device), torch.empty(count, device=device)
        op(right_codes, x, right)
        assert torch.equal(scale.flatten()[:count], right)
        assert (scale.flatten()[count:] == 7.0).all()
        assert torch.equal(quantized.view(torch.uint8), right_codes.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_int8_groups_round_to_nearest(device: str) -> None:
    """Ties go to even, and values saturate before they are rounded."""
    x = draw(6, 128, device=device)
    x[0, :5] = torch.tensor([127.0, 2.5, 3.5, -0.5, -126.5])  # under a scale of 1
    x[0, 5:] = 0.0
    for limits in ((-128.0, 127.0), (-20.5, 100.0)):
        quantized, scale = new(x.shape, INT8, device), torch.empty(6, 2, device=device)
        pyops.per_token_group_quant_int8(x, quantized, scale, 64, 1e-10, *limits, True)
        right, right_scale = grouped(exact(x), 64, INT8, limits=limits, rounded=numpy.rint)
        same(quantized, right)
        same(scale, right_scale)


@pytest.mark.parametrize("device", DEVICES)
def test_unsigned_groups_have_no_negative_zero(device: str) -> None:
    """Where the smallest quant is 0, no result is -0."""
    x = torch.tensor([[-1.0, -0.0, 0.0, 2.0]], device=device)
    quantized, scale = new(x.shape, FP8, device), torch.empty(1, 1, device=device)
    pyops.per_token_group_fp8_quant(x, quantized, scale, 4, 1e-10, 0.0, 448.0, False)
    assert quantized.view(torch.uint8).tolist() == [[0, 0, 0, 0x7E]]


@pytest.mark.parametrize("device", DEVICES)
def test_new_tensors_have_the_devices_e4m3(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is e4m3fnuz, its limits apply; an explicit tensor or dtype takes precedence."""
    x = draw(5, 256, device=device)
    for kind in (FP8, FNUZ):
        quantized, scale = pyops.scaled_fp8_quant(x, output=new(x.shape, kind, device))
        right_scale = f32(absmax(exact(x).reshape(1, -1)).item() / LARGEST[kind])
        same(scale, right_scale)
        same(quantized, static_fp8(exact(x), right_scale, kind))
        for options in ({"dtype": kind}, {"out_q": new(x.shape, kind, device)}):
            quantized, scale = pyops.per_token_group_quant_fp8(x, 64, **options)
            assert quantized.dtype is kind
            right, right_scale = grouped(exact(x), 64, kind)
            same(quantized, right)
            same(scale, right_scale)
    for out_q in (new(x.shape, FNUZ, device), new(x.shape, torch.int8, device)):
        with pytest.raises(
            pyops.OpError, match=f"out_q: expected quantized values of torch.float8_e4m3fn, got {out_q.dtype}"
        ):
            pyops.per_token_group_quant_fp8(x, 64, dtype=FP8, out_q=out_q)
    as_bytes, scale = pyops.per_token_group_quant_fp8(x, 64, dtype=FP8, out_q=new(x.shape, torch.uint8, device))
    same(as_bytes, grouped(exact(x), 64, FP8)[0])

    monkeypatch.setattr(scaled, "own_fp8", lambda _: "float8_e4m3fnuz")
    for more in ({}, {"use_per_token_if_dynamic": True}, {"scale": torch.ones(1, device=device)}):
        quantized, scale = pyops.scaled_fp8_quant(x, **more)
        assert quantized.dtype is FNUZ
        right, right_scale = token_fp8(exact(x), None, FNUZ)
        same(quantized, right if "use_per_token_if_dynamic" in more else static_fp8(exact(x), exact(scale), FNUZ))
        if "use_per_token_if_dynamic" in more:
            same(scale, right_scale)
    right, right_scale = grouped(exact(x), 64, FNUZ, power_of_two=True)
    for quantized in (
        pyops.per_token_group_quant_fp8(x, 64, use_ue8m0=True)[0],
        pyops.per_token_group_quant_fp8_packed_for_deepgemm(x, 64)[0],
    ):
        assert quantized.dtype is FNUZ
        same(quantized, right)


def test_e4m3_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows from the architecture, which torch reports for AMD GPUs with more than its name."""
    for arch in ("sm_80", "sm_90", "sm_100"):
        assert native_fp8(devices.model(arch)) is dtypes.float8_e4m3fn
        assert converts_fp8(devices.model(arch)) is (arch != "sm_80")
    old = devices.model("gfx942")
    assert (native_fp8(old), converts_fp8(old)) == (dtypes.float8_e4m3fnuz, False)
    assert native_fp8(replace(old, arch="gfx940")) is dtypes.float8_e4m3fnuz
    for arch in ("gfx950", "gfx1200"):
        new = replace(old, arch=arch)
        assert (native_fp8(new), converts_fp8(new)) == (dtypes.float8_e4m3fn, True)
    assert not converts_fp8(replace(old, arch="gfx90a"))
    assert own_fp8(torch.ones(1)) == own_fp8(numpy.ones(1)) == "float8_e4m3fn"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert own_fp8(torch.ones(1)) == "float8_e4m3fn"
    for name, kind in (("gfx942:sramecc+:xnack-", "float8_e4m3fnuz"), ("gfx950", "float8_e4m3fn")):
        properties = SimpleNamespace(gcnArchName=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        gpu_tensor = SimpleNamespace(is_cuda=True, device="cuda:0", new_empty=None)
        assert own_fp8(gpu_tensor) == kind
    array = SimpleNamespace(device=SimpleNamespace(id=1))  # a CuPy array
    monkeypatch.setattr(devices, "get", lambda index: replace(old, index=index))
    assert own_fp8(array) == "float8_e4m3fnuz"


def test_threads_for_fp8_without_an_instruction() -> None:
    """The blocks per SM that a kernel asks for where integer instructions convert to fp8: one, for both e4m3 types."""
    for arch, native in (("sm_90", FP8), ("sm_80", None), ("gfx942", FNUZ)):
        for kind in LARGEST:
            for name in ("dynamic_scaled_fp8_quant", "static_scaled_fp8_quant", "rms_norm_per_block_quant"):
                op = pyops.registry[name]
                assert op.example is not None
                dtype = str(kind).removeprefix("torch.")
                args = op.example(ArgMaker(devices.model(arch)), num_tokens=4096, hidden_size=4096, quant_dtype=dtype)
                blocks = op.launches(*args)[-1].specialisation.constants["MIN_BLOCKS"]
                assert (blocks > 1) is (kind is native), (name, arch, kind)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_graph_break(device: str) -> None:
    """Ops that allocate, and an op with a pair of integers."""

    def call(x: torch.Tensor, scale: torch.Tensor) -> list[Any]:
        return [
            *pyops.scaled_fp8_quant(x),
            *pyops.scaled_fp8_quant(x, use_per_token_if_dynamic=True),
            pyops.scaled_fp8_quant(x, scale, group_shape=(1, -1))[0],
            *pyops.scaled_int8_quant(x, symmetric=False),
            *pyops.per_token_group_quant_fp8(x, 32, column_major_scales=True),
            *pyops.per_token_group_quant_fp8_packed_for_deepgemm(x, 32),
        ]

    x, scale = draw(4, 64, device=device), torch.full((4,), 0.1, device=device)
    eager = call(x, scale)
    torch._dynamo.reset()
    for one, other in zip(eager, torch.compile(call, fullgraph=True, backend="aot_eager")(x, scale), strict=True):
        same(other, exact(one.view(torch.uint8) if one.dtype is FP8 else one))
