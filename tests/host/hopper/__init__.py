"""Kernels for Hopper that the tests of the host backend run: correct ones, and with faults injected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy

from pyops._core.launch.kernel import Kernel
from pyops._core.launch.tensor_map import TensorMap
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops._core.tensors.tensor import describe_new
from pyops.host import launch

Array = numpy.ndarray[Any, Any]
bf16 = ml_dtypes.bfloat16
STAGES = 4


def text_of(name: str) -> str:
    """The text of a kernel in this folder."""
    return (Path(__file__).parent / f"{name}.cu").read_text(encoding="utf-8")


def mapped(name: str, array: Array, box: tuple[int, ...], swizzle: int = 0, **wrong: Any) -> TensorMap:
    """The tensor maps of arrays by name; `wrong` replaces parts of a map."""
    kind = dtypes.of(array.dtype.name)
    assert kind is not None
    what = {"sizes": array.shape[::-1], "strides": array.strides[-2::-1], "box": box, "swizzle": swizzle} | wrong
    arg = describe_new("test", name, what["sizes"][::-1], kind, device.model("sm_90"))  # as large as the map says
    arg.alignment = 16
    return TensorMap(arg, kind, **what)


def run(
    file: str,
    text: str,
    arrays: dict[str, Array],
    grid: Any,
    block: int,
    shared: int,
    constants: dict[str, Any],
    **fixed: Any,
) -> None:
    """Run a kernel of sm_90a on the host."""
    one = Kernel(file, "sm_90a", text=text)(**constants).launch(grid, block, shared, **fixed)
    extents = [array.nbytes for array in arrays.values()]
    launch.run_launches([one], tuple(arrays), extents, (), {}, *(array.ctypes.data for array in arrays.values()))


def products(a: Array, b: Array, depth: int) -> Array:
    """a b^T as the host's wgmma adds `depth` products: exactly, then rounded to float32; fp8 by `_cut_products`."""
    sums = numpy.zeros((len(a), len(b)), numpy.float32)
    for at in range(0, a.shape[1], depth):
        one, other = a[:, at : at + depth], b[:, at : at + depth]
        if depth == 32:
            sums = _cut_products(sums, one, other)
        else:
            exact = one.astype(float) @ other.astype(float).T
            sums = (sums.astype(float) + exact).astype(numpy.float32)
    return sums


def _cut_products(sums: Array, a: Array, b: Array) -> Array:
    """accumulator + a b^T for fp8: terms in multiples of 2^-13 of the largest power of two, 14 bits of the result."""
    least = -6 if a.dtype == ml_dtypes.float8_e4m3fn else -14

    def power(x: Array, least: int = -200) -> Array:
        return numpy.where(x == 0, -200, numpy.maximum(numpy.frexp(x.astype(float))[1] - 1, least))

    terms = numpy.concatenate((a.astype(float)[:, None] * b.astype(float), sums.astype(float)[..., None]), -1)
    powers = numpy.concatenate((power(a, least)[:, None] + power(b, least), power(sums)[..., None]), -1).max(-1)
    cut = numpy.trunc(numpy.ldexp(terms, 13 - powers[..., None])).sum(-1)
    kept = numpy.maximum(power(cut) - 13, 0)
    return numpy.ldexp(numpy.trunc(numpy.ldexp(cut, -kept)), kept + powers - 13).astype(numpy.float32)


def gemm(
    m: int, n: int, k: int, text: str | None = None, cluster: int = 1, grid: int = 2, **maps: dict[str, Any]
) -> tuple[Array, Array]:
    """(result of gemm.cu, expected result bit for bit). `maps` has wrong parts of tensor maps."""
    rng = numpy.random.default_rng(m + n + k)
    a, b = (rng.standard_normal((rows, k)).astype(bf16) for rows in (m, n))
    out = numpy.full((m, n), numpy.nan, bf16)
    boxes = {"input": (a, (64, 128)), "weight": (b, (64, 128 // cluster)), "out": (out, (64, 64))}
    fixed = {
        f"{name}_map": mapped(name, array, **{"box": box, "swizzle": 128} | maps.get(name, {}))
        for name, (array, box) in boxes.items()
    }
    shared = STAGES * (128 + 128) * 64 * 2 + 128 * 128 * 2 + 16 * STAGES
    constants = {"BLOCK_N": 128, "STAGES": STAGES, "CLUSTER": cluster}
    arrays = {"out": out, "input": a, "weight": b}
    run(
        "test/gemm.cu", text or text_of("gemm"), arrays, (grid, cluster), 384, shared, constants, **fixed, m=m, n=n, k=k
    )
    return out.view(numpy.uint16), products(a, b, 16).astype(bf16).view(numpy.uint16)
