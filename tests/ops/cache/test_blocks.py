"""Whole cache blocks: copy, swap, conversion."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy
import pytest
import torch

import pyops
from pyops.testing import same_bits
from tests.support.cache import ints, make, quantised
from tests.support.calls import DEVICES, refusal


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
def test_copy_blocks(dtype: torch.dtype, where: str) -> None:
    """Lists of layers, padded blocks, heads-first blocks, a source that is copied twice."""
    layers = [make(7, 4, 3, 5, where=where, seed=i).to(dtype) for i in range(4)]
    layers[2] = make(7, 3, 4, 6, where=where).to(dtype).transpose(1, 2)[..., :5].contiguous().transpose(1, 2)
    layers[2] = layers[2].transpose(1, 2)
    padded = make(7, 77, where=where).to(dtype)[:, :60].unflatten(1, (4, 3, 5))
    layers[3] = padded
    pairs = [[0, 3], [0, 4], [5, 1], [6, 6], [-1, 2], [2, 7]]
    before = [layer.clone() for layer in layers]
    pyops.copy_blocks(layers[:2], layers[2:], ints(pairs, where=where))
    for layer, old in zip(layers, before, strict=True):
        for block in range(7):
            assert same_bits(layer[block].contiguous(), old[{3: 0, 4: 0, 1: 5}.get(block, block)].contiguous())
    pyops.copy_blocks_mla([layers[0]], ints([[3, 2]], where=where))
    assert same_bits(layers[0][2], before[0][0])
    pyops.copy_blocks([], [], ints(pairs, where=where))
    with pytest.raises(pyops.OpError, match=r"^copy_blocks: value_caches: expected 2 tensors like key_caches, got 1$"):
        pyops.copy_blocks(layers[:2], layers[:1], ints(pairs, where=where))
    held = layers[0].clone()
    for other in (layers[1].flatten(), 3, layers[0]._neg_view()):
        with pytest.raises(pyops.OpError, match=r"^copy_cache_blocks: key_cache: (expected|its elements)"):
            pyops.copy_blocks_mla([layers[0], other], ints(pairs, where=where))
    assert same_bits(layers[0], held)  # nor has the layer before been written


@pytest.mark.parametrize("as_what", ["torch", "numpy"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_swap_blocks_on_the_host(dtype: torch.dtype, as_what: str) -> None:
    src, dst = make(9, 3, 5), torch.zeros(8, 3, 5)
    pairs = ints([[0, 1], [1, 2], [2, 3], [8, 0], [7, 4], [5, 8], [9, 5], [-1, 6], [3, -2], [4, 7]], dtype)
    right = torch.zeros_like(dst)
    for source, target in ((0, 1), (1, 2), (2, 3), (8, 0), (7, 4), (4, 7)):
        right[target] = src[source]
    if as_what == "numpy":
        pyops.swap_blocks(src.numpy(), dst.numpy(), 60, pairs.numpy())
    else:
        pyops.swap_blocks(src, dst, 60, pairs)
    assert same_bits(dst, right)
    pyops.swap_blocks(src, dst, 60, torch.zeros(0, 2, dtype=dtype))
    pyops.swap_blocks(src[3:5], dst[6:], 60, [[0, 1]])
    assert same_bits(dst[7], src[3])


def test_swap_blocks_merges_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyops.ops.cache import blocks

    made: list[tuple[int, int, int]] = []
    monkeypatch.setattr(blocks, "_copier", lambda src, dst: lambda *copy: made.append(copy))
    pyops.swap_blocks(make(8, 4), make(8, 4), 16, [[0, 4], [1, 5], [2, 6], [4, 7], [5, 0], [7, 2], [6, 1]])
    assert made == [(0, 64, 48), (64, 112, 16), (80, 0, 16), (112, 32, 16), (96, 16, 16)]


@pytest.mark.parametrize(
    ("argument", "args"),
    [
        ("block_mapping", (torch.zeros(4, 4), torch.zeros(4, 4), 16, torch.zeros(2, 3, dtype=torch.int64))),
        ("block_mapping", (torch.zeros(4, 4), torch.zeros(4, 4), 16, torch.zeros(2, 2))),
        ("block_size_in_bytes", (torch.zeros(4, 4), torch.zeros(4, 4), 0, [[0, 1]])),
        ("src", (torch.zeros(4, 4)[:, :2], torch.zeros(4, 4), 16, [[0, 1]])),
        ("dst", (torch.zeros(4, 4), numpy.zeros((4, 4)), 16, [[0, 1]])),
        ("dst", (torch.zeros(4, 4), 3, 16, [[0, 1]])),
        ("block_size_in_bytes", (torch.zeros(4, 4), torch.zeros(4, 4), True, [[0, 1]])),
        ("block_size_in_bytes", (torch.zeros(4, 4), torch.zeros(4, 4), 16.0, [[0, 1]])),
        ("block_mapping", (torch.zeros(4, 4), torch.zeros(4, 4), 16, [[0, 1], [2]])),
        ("src", (torch.zeros(4, 4)._neg_view(), torch.zeros(4, 4), 16, [[0, 1]])),
        ("dst", (torch.zeros(4, 4), torch.zeros(4, 2, dtype=torch.cfloat).conj(), 16, [[0, 1]])),
    ],
)
def test_swap_blocks_refused(argument: str, args: Any) -> None:
    with pytest.raises(pyops.OpError, match=f"^swap_blocks: {argument}: "):
        pyops.swap_blocks(*args)


def test_blocks_of_any_dtype() -> None:
    for dtype in (torch.int16, torch.uint16, torch.float64, torch.complex64, torch.float8_e4m3fnuz):
        src = torch.arange(240, dtype=torch.uint8).view(dtype)
        dst = torch.zeros_like(src)
        pyops.swap_blocks(src, dst, numpy.int64(16), [[0, 2]])
        assert torch.equal(dst.view(torch.uint8)[32:48], src.view(torch.uint8)[:16])


def test_swap_blocks_within_one_tensor() -> None:
    """A destination may not overlap a source, not even in part; such a call writes nothing."""
    x = make(4, 4)
    before = x.clone()
    for src, dst, mapping in ((x, x, [[3, 2], [0, 1], [1, 0]]), (x, x, [[0, 0]]), (x[1:], x, [[0, 2], [1, 0]])):
        with pytest.raises(pyops.OpError, match=r"^swap_blocks: block_mapping: a destination overlaps a source$"):
            pyops.swap_blocks(src, dst, 16, mapping)
    flat = x.view(-1)
    with pytest.raises(pyops.OpError, match="overlaps"):
        pyops.swap_blocks(flat[2:], flat, 16, [[0, 1]])
    assert torch.equal(x, before)
    pyops.swap_blocks(x, x, 16, [[0, 3], [1, 2]])
    assert torch.equal(x, before[[0, 1, 1, 0]])


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("way", ["to host", "to device", "on device"])
def test_swap_blocks_between_devices(way: str, pinned: bool) -> None:
    src, dst = make(300, 3, 5), torch.zeros(300, 3, 5)
    if pinned:
        src, dst = src.pin_memory(), dst.pin_memory()
    given = (src if way == "to device" else src.cuda()), (dst if way == "to host" else dst.cuda())
    sources = torch.cat((torch.arange(40), torch.randint(0, 300, (260,))))
    pyops.swap_blocks(*given, 60, torch.stack((sources, torch.arange(300)), 1))
    torch.cuda.synchronize()
    assert same_bits(given[1].cpu(), src[sources])


@pytest.mark.parametrize("where", DEVICES)
def test_convert_fp8_layouts(where: str) -> None:
    """Permuted, sliced and flat tensors: elements pair up by their indices, and gaps between them are not written."""
    for shape, dims in (((3, 4, 5, 8), (0, 2, 1, 3)), ((6, 7), (1, 0)), ((9,), (0,)), ((2, 3, 4), (2, 0, 1))):
        x = make(*shape, where=where).permute(dims)
        output = torch.zeros(shape, dtype=torch.uint8, device=where).permute(dims)
        pyops.convert_fp8(output, x, 0.1)
        right = quantised(x, 0.1, torch.float8_e4m3fn)
        assert torch.equal(output, right)
        back = torch.zeros(shape, dtype=torch.float16, device=where).permute(dims)
        pyops.convert_fp8(back, output.view(torch.float8_e4m3fn), 0.1, "fp8_e4m3")
        assert same_bits(back.contiguous(), (right.view(torch.float8_e4m3fn).float() * 0.1).half().contiguous())
    column, single = make(5, 3, where=where)[:, 1:2], torch.zeros(5, 4, dtype=torch.uint8, device=where)
    pyops.convert_fp8(single[:, 2:3], column)
    assert torch.equal(single[:, 2:3], quantised(column, 1.0, torch.float8_e4m3fn))
    wide, codes = make(5, 12, where=where), torch.zeros(5, 16, dtype=torch.uint8, device=where)
    pyops.convert_fp8(codes[:, 3:10], wide[:, 2:9])
    assert torch.equal(codes[:, 3:10], quantised(wide[:, 2:9], 1.0, torch.float8_e4m3fn))
    assert not codes[:, :3].any()
    assert not codes[:, 10:].any()


@pytest.mark.parametrize("where", DEVICES)
def test_convert_fp8_of_another_shape(where: str) -> None:
    """Contiguous caches with equally many elements pair them up in memory order; zero elements are no error."""
    x = make(5, 3, 4, 16, 8, where=where)
    codes = torch.zeros(5, 3, 2, 16, 16, dtype=torch.uint8, device=where)
    pyops.convert_fp8(codes, x, 0.1)
    right = quantised(x, 0.1, torch.float8_e4m3fn)
    assert torch.equal(codes.flatten(), right.flatten())
    back = torch.zeros(x.shape, dtype=torch.float16, device=where)
    pyops.convert_fp8(back, codes, 0.1)
    assert torch.equal(back, (right.view(torch.float8_e4m3fn).float() * 0.1).half())
    pyops.convert_fp8(codes[:0], x[:0].view(0, 7))


@pytest.mark.parametrize("where", DEVICES)
def test_convert_fp8_of_more_rows_than_a_grid_has(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("pyops.ops.cache.convert_fp8"), "_MAX_ROWS", 2)
    pyops.registry["convert_fp8"].forget()
    x, codes = make(7, 12, where=where)[:, :9], torch.zeros(7, 9, dtype=torch.uint8, device=where)
    pyops.convert_fp8(codes, x)
    assert torch.equal(codes, quantised(x, 1.0, torch.float8_e4m3fn))
    pyops.registry["convert_fp8"].forget()


@pytest.mark.parametrize("where", DEVICES)
def test_convert_fp8_refused(where: str) -> None:
    op = pyops.registry["convert_fp8"]
    x, codes = make(4, 6, where=where), torch.zeros(4, 6, dtype=torch.uint8, device=where)
    for kind in ("auto", "fp8_e5m2", "int8"):
        assert refusal(op, [codes, x, 1.0, kind]).argument == "kv_dtype"
    assert refusal(op, [x.clone(), x, 1.0, "fp8"]).argument == "output"
    assert refusal(op, [codes.clone(), codes, 1.0, "fp8"]).argument == "output"
    assert refusal(op, [codes.t().contiguous().t(), x, 1.0, "fp8"]).argument == "output"
    assert refusal(op, [codes.view(2, 3, 4)[:, :2], x, 1.0, "fp8"]).argument == "output"
    assert refusal(op, [codes.view(3, 8).t(), x, 1.0, "fp8"]).argument == "output"
    assert refusal(op, [codes.view(3, 8), x.view(6, 4).t(), 1.0, "fp8"]).argument == "input"
    apart = torch.zeros(2, 3, 4, dtype=torch.uint8, device=where)[:, ::2, ::2]
    assert refusal(op, [apart, make(2, 2, 2, where=where), 1.0, "fp8"]).argument == "output"
