"""Quantisation into new numpy and CuPy arrays equals that of torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyops
from pyops._core import config
from pyops._core.tensors.tensor import library_of, to_torch
from pyops.host.toolchain import toolchains
from pyops.testing import same_bits
from tests.support.calls import as_cupy, as_numpy

# The way calls run, the device of their tensors, and the function that makes arrays of these.
LIBRARIES = pytest.mark.parametrize(
    ("mode", "device", "arrays"),
    [
        pytest.param("reference", "cpu", as_numpy, id="numpy"),
        pytest.param(
            "kernels",
            "cpu",
            as_numpy,
            id="numpy-host",
            marks=pytest.mark.skipif(not toolchains(), reason="no compiler"),
        ),
        pytest.param("kernels", "cuda", as_cupy, id="cupy", marks=pytest.mark.gpu),
    ],
)
Make = Callable[[Any], Any]  # a torch tensor -> itself, or an array over its memory


def draw(*shape: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) * 8).bfloat16()


def empty(dtype: torch.dtype) -> Any:
    return torch.full((5, 256), 0x55, dtype=torch.uint8).view(dtype)


def scaled_fp8(make: Make) -> list[Any]:
    x, scale = make(draw(5, 256)), make(torch.full((5, 1), 0.1))
    given = make(empty(torch.float8_e4m3fnuz))
    padded, rows = pyops.scaled_fp8_quant(x, None, 17, make(torch.tensor(4.0)), True)
    assert (padded.shape, rows.shape) == ((17, 256), (17, 1))
    results = [
        *pyops.scaled_fp8_quant(x),
        *pyops.scaled_fp8_quant(x, scale, group_shape=(1, 256)),
        padded[:5],
        rows[:5],
    ]
    quantized, one = pyops.scaled_fp8_quant(x, output=given)
    assert quantized is given
    return [*results, quantized, one]


def scaled_int8(make: Make) -> list[Any]:
    x, scale, azp = make(draw(2, 3, 64)), make(torch.tensor(0.1)), make(torch.tensor(3, dtype=torch.int32))
    apart = make(draw(4, 6).t())
    quantized, found, none = pyops.scaled_int8_quant(apart)
    assert none is None
    given = pyops.scaled_int8_quant(x, scale, azp, symmetric=False)
    assert given[1] is scale
    assert given[2] is azp
    dynamic = pyops.scaled_int8_quant(x, symmetric=False)
    return [quantized, found, given[0], pyops.scaled_int8_quant(x, scale)[0], *dynamic]


def groups(make: Make) -> list[Any]:
    x, deep, given = make(draw(5, 256)), make(draw(5, 2, 128)), make(empty(torch.uint8))
    results: list[Any] = []
    for options in (
        {"dtype": "float8_e4m3fnuz"},
        {"column_major_scales": True},
        {"column_major_scales": True, "tma_aligned_scales": True, "use_ue8m0": True},
        {"out_q": given},
    ):
        results += pyops.per_token_group_quant_fp8(x, 64, **options)
    for major in (False, True):
        results += pyops.per_token_group_quant_fp8(deep, 64, column_major_scales=major)
    return results


def packed_groups(make: Make) -> list[Any]:
    pack = pyops.per_token_group_quant_fp8_packed_for_deepgemm
    return [*pack(make(draw(5, 256)), 64), *pack(make(draw(64, 6).t()), 16)]


def int8_groups(make: Make) -> list[Any]:
    return [*pyops.per_token_group_quant_int8.new(make(draw(2, 3, 64)), 16, 1e-10, -128.0, 127.0)]


def nvfp4(make: Make) -> list[Any]:
    x, scale = make(draw(2, 3, 80)), make(torch.tensor(7.0))
    return [*pyops.nvfp4_quant(x, scale), *pyops.nvfp4_quant(x, scale, False)]


def gated_nvfp4(make: Make) -> list[Any]:
    return [*pyops.silu_and_mul_nvfp4_quant.new(make(draw(5, 160)), make(torch.tensor(7.0)))]


def nvfp4_experts(make: Make) -> list[Any]:
    x, scales = make(draw(9, 160)), make(torch.tensor([3.0, 4.0, 5.0]))
    offsets = [make(torch.tensor(values, dtype=torch.int32)) for values in ([0, 2, 2, 9], [0, 128, 128, 256])]
    results: list[Any] = []
    for function in (pyops.nvfp4_experts_quant, pyops.silu_and_mul_nvfp4_experts_quant):
        quantized, tiles = function(x, scales, *offsets, 2)
        results += [quantized, tiles[:256]]  # garbage after the tiles of the last expert
    return results


def hadamard(make: Make) -> list[Any]:
    x, apart = make(draw(3, 64)), make(draw(64, 3).t())
    assert pyops.hadacore_transform(apart) is apart
    return [pyops.hadacore_transform(x, inplace=False), apart, x]


@LIBRARIES
@pytest.mark.parametrize(
    "calls",
    [scaled_fp8, scaled_int8, groups, packed_groups, int8_groups, nvfp4, gated_nvfp4, nvfp4_experts, hadamard],
    ids=lambda calls: calls.__name__,
)
def test_arrays_equal_torch_tensors(calls: Callable[[Make], list[Any]], mode: str, device: str, arrays: Make) -> None:
    """The quants, scales and strides of torch tensors, in arrays of the input's library."""
    with config.cpu(mode):
        right = calls(lambda tensor: tensor.to(device))
        found = calls(lambda tensor: arrays(tensor.to(device)))
    for array, tensor in zip(found, right, strict=True):
        assert library_of(array) == library_of(arrays(torch.ones(1, device=device)))
        assert same_bits(to_torch(array), tensor)
        assert to_torch(array).stride() == tensor.stride()


def test_array_refusals() -> None:
    x = as_numpy(draw(5, 256))
    with pytest.raises(
        pyops.OpError, match=r"^per_token_group_quant_fp8: out_q: expected quantized values of an e4m3, got int8$"
    ):
        pyops.per_token_group_quant_fp8(x, 64, out_q=as_numpy(empty(torch.int8)))
    with pytest.raises(pyops.OpError, match=r"^scaled_fp8_quant: output: expected dtype float8_e4m3fn or .* got int8$"):
        pyops.scaled_fp8_quant(x, output=as_numpy(empty(torch.int8)))
    with pytest.raises(pyops.OpError, match=r"^per_token_group_fp8_quant: group_size: expected a divisor"):
        pyops.per_token_group_quant_fp8(x, 63)
    with pytest.raises(pyops.OpError, match=r"^static_scaled_int8_quant: scale: expected a numpy tensor like input"):
        pyops.scaled_int8_quant(x, torch.ones(1))
    with pytest.raises(pyops.OpError, match=r"^scaled_fp4_quant: input: expected a last dimension of multiples of 16"):
        pyops.nvfp4_quant(as_numpy(draw(5, 40)), as_numpy(torch.ones(1)))
