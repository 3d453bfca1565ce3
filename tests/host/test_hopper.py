"""Whole kernels for Hopper on the host: correct ones under every schedule, and the report for each injected fault."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest

import pyops
from pyops.host import toolchain
from pyops.testing import SCHEDULES, scheduled
from tests.host import hopper
from tests.host.hopper.faults import FAULTS, FAULTS_OF_CLUSTERS, WRONG_RESULT
from tests.support.profiles import few

pytestmark = pytest.mark.skipif(not toolchain.toolchains(), reason="no C++ compiler")


@pytest.mark.parametrize("cluster", [1, 2])
def test_gemm(cluster: int) -> None:
    for shape, schedule in product(((200, 136, 320), (264, 128, 72)), SCHEDULES):
        with scheduled(schedule, seconds=20.0, strict_fences=True):
            out, right = hopper.gemm(*shape, cluster=cluster)
        numpy.testing.assert_array_equal(out, right)


ALL_FAULTS = {
    f"{name}, cluster of {cluster}": (cluster, fault)
    for cluster, table in ((1, FAULTS), (2, FAULTS_OF_CLUSTERS))
    for name, fault in table.items()
}


@pytest.mark.parametrize("name", few(ALL_FAULTS, 6))
def test_faults_of_gemm(name: str) -> None:
    cluster, fault = ALL_FAULTS[name]
    text = fault.apply(hopper.text_of("gemm"))
    for schedule in SCHEDULES:
        with scheduled(schedule, seconds=20.0):
            if fault.kinds == {WRONG_RESULT}:
                out, right = hopper.gemm(256 * cluster, 256, 328, text, cluster, **fault.maps)
                assert (out != right).any()
                continue
            with pytest.raises(pyops.KernelFault) as caught:
                hopper.gemm(256 * cluster, 256, 328, text, cluster, **fault.maps)
        assert caught.value.kind in fault.kinds, caught.value
        named = "kernels_cu/test/gemm.cu:" in str(caught.value)
        assert named or caught.value.kind == "setmaxnreg", caught.value  # seen at the end of a block


def test_deadlock_report() -> None:
    """It says which thread waits where, for which phase of which mbarrier, and which arrivals the phase lacks."""
    text = FAULTS["parity of the producer"].apply(hopper.text_of("gemm"))
    with pytest.raises(pyops.KernelFault) as caught:
        hopper.gemm(256, 256, 328, text)
    waits = "threads 0 to 255 wait at mbarrier_wait (kernels_cu/include/barrier.cuh:"
    lacks = "for phase 0 of mbarrier #0 (byte 163840 of dynamic shared memory), which lacks 1 of 1 arrivals and 0 bytes"
    assert waits in caught.value.message
    assert lacks in caught.value.message
    assert "threads 257 to 383 have exited" in caught.value.message


FENCE = "        fence_proxy_async();\n        named_barrier_sync(1 + warpgroup, 128);\n        if (thread == 0) {\n"
LATE_FENCE = (
    "        named_barrier_sync(1 + warpgroup, 128);\n        if (thread == 0) {\n            fence_proxy_async();\n"
)


def test_strict_fences() -> None:
    """A fence by the storing thread alone, after the barrier, is accepted, unless each writer must fence."""
    text = hopper.text_of("gemm")
    assert FENCE in text
    late = text.replace(FENCE, LATE_FENCE)
    for schedule in SCHEDULES:
        with scheduled(schedule, seconds=20.0):
            out, right = hopper.gemm(128, 128, 128, late)
        numpy.testing.assert_array_equal(out, right)
        with scheduled(schedule, seconds=20.0, strict_fences=True), pytest.raises(pyops.KernelFault) as caught:
            hopper.gemm(128, 128, 128, late)
        assert caught.value.kind == "missing proxy fence"


STEPS = 5
# {line of mixed.cu: the faults without it}. Some lines are redundant with others: nothing is reported then.
MIXED_LINES: dict[str, set[str]] = {
    "": set(),
    "        sync_warp();  // AFTER THE WAIT\n": {"async copy not waited for", "uninitialised shared memory"},
    "        fence_proxy_async();                 // OF THE TILE\n": {"missing proxy fence"},
    "        named_barrier_sync(3 + group, 128);  // THE TILE IS WRITTEN\n": set(),  # the ping-pong barrier comes later
    "        sync_warp();  // BEFORE THE ARRIVAL\n": set(),  # the lanes have met since they have read
    "        named_barrier_sync(3 + group, 128);  // THE TILE HAS BEEN READ\n": set(),  # each warp has waited
}


@pytest.mark.parametrize("line", few(MIXED_LINES, 3))
def test_mixed(line: str) -> None:
    rng = numpy.random.default_rng(0)
    a = rng.standard_normal((128, 64 * STEPS)).astype(hopper.bf16)
    q = rng.integers(-127, 128, (128, 64 * STEPS), dtype=numpy.int8)
    scale = (rng.random((STEPS, 128)) + 0.5).astype(numpy.float32)
    weight = (q.astype(numpy.float32) * numpy.repeat(scale.T, 64, axis=1)).astype(hopper.bf16)
    right = hopper.products(a, weight, 16)
    maps = {
        "a_map": hopper.mapped("a", a, (64, 64), 128),
        "q_map": hopper.mapped("q", q, (64, 128)),
        "scale_map": hopper.mapped("scale", scale, (128, 1)),
    }
    text, kinds = hopper.text_of("mixed"), MIXED_LINES[line]
    assert line in text
    shared = 2 * (2 * 64 * 128 + 128 * 64 + 1024) + 2 * 128 * 128 + 32
    for schedule in SCHEDULES:
        out = numpy.full((128, 128), numpy.nan, numpy.float32)
        arrays = {"out": out, "a": a, "q": q, "scale": scale}
        launch = (text.replace(line, ""), arrays, 1, 384, shared, {})
        with scheduled(schedule, seconds=20.0, strict_fences=not kinds):
            if not kinds:
                hopper.run("test/mixed.cu", *launch, steps=STEPS, **maps)
                numpy.testing.assert_array_equal(out, right)
                continue
            with pytest.raises(pyops.KernelFault) as caught:
                hopper.run("test/mixed.cu", *launch, steps=STEPS, **maps)
        assert caught.value.kind in kinds, caught.value


TYPES = {
    "bf16_t": ml_dtypes.bfloat16,
    "half_t": numpy.float16,
    "fp8_e4m3_t": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2_t": ml_dtypes.float8_e5m2,
    "int8_t": numpy.int8,
}
PRODUCTS = [
    (kind, columns, swizzle, registers, transposed)
    for kind, columns, swizzle, registers, transposed in product(
        TYPES, (16, 128, 256), (128, 64, 32), (False, True), (False, True)
    )
    if not transposed or (numpy.dtype(TYPES[kind]).itemsize == 2 and swizzle == 128 and columns >= 64)
]


def _fragments(a: Any) -> Any:
    """[32 bytes of K, word, thread]: a [64, K] in the registers of a warpgroup."""
    rows = a.view(numpy.uint8).reshape(64, -1)
    step, word, thread = numpy.indices((rows.shape[1] // 32, 4, 128))
    row = thread // 32 * 16 + thread % 32 // 4 + word % 2 * 8
    first = step * 32 + thread % 4 * 4 + word // 2 * 16
    return numpy.ascontiguousarray(rows[row[..., None], first[..., None] + numpy.arange(4)]).view(numpy.uint32)[..., 0]


@pytest.mark.parametrize(("kind", "columns", "swizzle", "registers", "transposed"), few(PRODUCTS, 5))
def test_every_wgmma(kind: str, columns: int, swizzle: int, registers: bool, transposed: bool) -> None:
    rng = numpy.random.default_rng(columns)
    native = numpy.dtype(TYPES[kind])
    integers, k = native == numpy.int8, swizzle // native.itemsize
    draw = (lambda *shape: rng.integers(-128, 128, shape)) if integers else (lambda *shape: rng.standard_normal(shape))
    a, b = draw(64, k).astype(native), draw(columns, k).astype(native)
    right = a.astype(int) @ b.astype(int).T if integers else hopper.products(a, b, 32 // native.itemsize)
    with scheduled(SCHEDULES[(columns // 16 + registers) % 5], seconds=20.0):
        numpy.testing.assert_array_equal(_product(kind, a, b, swizzle, registers, transposed), right)


def _product(kind: str, a: Any, b: Any, swizzle: int = 128, registers: bool = False, transposed: bool = False) -> Any:
    """a [64, K] b [columns, K]^T by one chain of wgmma; the rows of a have the length of the swizzle."""
    columns, k = b.shape
    stored = numpy.ascontiguousarray(b.T) if transposed else b
    boxes = columns // 64 if transposed else 1
    box = (64, k) if transposed else (k, columns)
    constants = {
        "element_t": kind,
        "N": columns,
        "ROW_BYTES": swizzle,
        "BOXES": boxes,
        "BOX_BYTES": box[0] * box[1] * a.itemsize,
        "SWIZZLE": f"SWIZZLE_{swizzle}B",
        "REGISTERS": registers,
        "TRANSPOSED": transposed,
    }
    out = numpy.zeros((64, columns), numpy.int32 if kind == "int8_t" else numpy.float32)
    arrays = {"out": out, "fragments": _fragments(a), "a": a, "b": stored}
    maps = {"a_map": hopper.mapped("a", a, (k, 64), swizzle), "b_map": hopper.mapped("b", stored, box, swizzle)}
    hopper.run("test/one_product.cu", hopper.text_of("one_product"), arrays, 1, 128, 72 * 1024, constants, **maps)
    return out


@pytest.mark.parametrize("case", range(4))
def test_fp8_accumulators_equal_those_of_an_h200(case: int) -> None:
    """Bit for bit: sums of 128 products by wgmma on an H200, half of them the farthest from exact ones."""
    measured = json.loads((Path(hopper.__file__).parent / "fp8_sums.json").read_text(encoding="utf-8"))[case]
    native = TYPES[measured["element_t"]]
    a, b = (
        numpy.array([list(bytes.fromhex(row)) for row in rows], numpy.uint8).view(native)
        for rows in ([measured["a"]] * 64, measured["b"])
    )
    assert (_product(measured["element_t"], a, b) == measured["sums"]).all()
    assert (hopper.products(a, b, 32) == measured["sums"]).all()


@pytest.mark.parametrize("kind", ["fp8_e4m3_t", "fp8_e5m2_t"])
def test_fp8_nan_and_infinity(kind: str) -> None:
    a, b = numpy.ones((64, 128), TYPES[kind]), numpy.ones((16, 128), TYPES[kind])
    a[3, 40] = b[5, 100] = numpy.nan
    right = numpy.full((64, 16), 128.0, numpy.float32)
    right[3], right[:, 5] = numpy.nan, numpy.nan
    numpy.testing.assert_array_equal(_product(kind, a, b), right)
