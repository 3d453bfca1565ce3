"""Tensor maps: what a plan may describe, what kernels are given at every call, and what that takes a driver."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from pyops._core import device, dtypes, launch, offline, tensor_map
from pyops._core import driver as driver_calls
from pyops._core.errors import OpError
from pyops._core.kernel import Kernel, Scratch
from pyops._core.tensor import TensorArg, describe_new
from pyops._core.tensor_map import TensorMap, mappable
from tests.core.conftest import Driver, call, text

MakeKernel = Callable[[str, str], Kernel]
PAGE = 4096


def arg(
    *shape: int, name: str = "x", strides: tuple[int, ...] | None = None, dtype: str = "bfloat16", **other: Any
) -> TensorArg:
    kind = dtypes.of(dtype)
    assert kind is not None
    made = describe_new("op", name, shape, kind, device.model(other.pop("arch", "sm_90")))
    made.strides, made.alignment = strides or made.strides, other.pop("alignment", 16)
    return made


# What can be mapped


@pytest.mark.parametrize(
    ("one", "sizes", "strides"),
    [
        (arg(33, 64), (64, 33), (128,)),
        (arg(33, 64, strides=(72, 1)), (64, 33), (144,)),
        (arg(2, 3, 64, strides=(64, 128, 1)), (64, 3, 2), (256, 128)),  # a transposed view
        (arg(1, 60, strides=(7, 1)), (60, 1), (128,)),  # one row: no stride to look at
        (arg(5, 1, 8, strides=(24, 3, 1)), (8, 1, 5), (16, 48)),
        (arg(7), (7,), ()),
        (arg(4, 16, dtype="float8_e4m3fn"), (16, 4), (16,)),
    ],
)
def test_a_whole_argument(one: TensorArg, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert mappable(one)
    made = TensorMap.of(one, (16, *(1 for _ in sizes[1:])), 32)
    assert (made.sizes, made.strides, made.dtype, made.offset) == (sizes, strides, one.dtype, 0)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (arg(8, 64, alignment=8), "an address that is a multiple of 16, got one of 8"),
        (arg(8, 60), "strides and an offset that are multiples of 16"),
        (arg(8, 64, strides=(0, 1)), "strides and an offset"),  # expanded
        (arg(8, 64, strides=(1, 8)), "a last dimension of stride 1"),
        (arg(0, 64), "sizes from 1 to"),
        (arg(2**32 + 1, 8, dtype="int8", strides=(16, 1)), "sizes from 1 to"),
        (arg(), "1 to 5 dimensions"),
        (arg(2, 2, 2, 2, 2, 8), "1 to 5 dimensions"),
        (arg(8, 64, arch="sm_80"), "compute capability 9.0 and later"),
        (arg(8, 64, arch="gfx942"), "compute capability 9.0 and later"),
    ],
)
def test_what_takes_the_portable_kernel(one: TensorArg, message: str) -> None:
    assert not mappable(one)
    assert not mappable(arg(8, 64), one)
    with pytest.raises(OpError, match=rf"^op: x: .*{message}"):
        TensorMap.of(one, (8, *(1 for _ in one.shape[1:])))


def test_the_largest_that_can_be_mapped() -> None:
    assert mappable(arg(2**32, 8), arg(2, 2, 2, 2, 8), arg(8, 64, arch="sm_100"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"box": (257, 1)}, "1 to 256 elements"),
        ({"box": (64, 257)}, "1 to 256 elements"),
        ({"box": (0, 1)}, "1 to 256 elements"),
        ({"box": (12, 1)}, "rows of a multiple of 16 bytes"),
        ({"box": (64,)}, "1 to 5 dimensions"),
        ({"swizzle": 16}, "a swizzle is 0, 32, 64 or 128"),
        ({"swizzle": 64}, "no less than a row of the box"),
        ({"strides": (8,)}, "multiples of 16"),
        ({"strides": (2**40,)}, "multiples of 16"),
        ({"offset": 8}, "multiples of 16"),
        ({"offset": 16}, "reaches over bytes 16 to 2064 of 2048"),
        ({"offset": -16}, "reaches over bytes -16"),
        ({"sizes": (64, 17)}, "reaches over bytes 0 to 2176 of 2048"),
        ({"sizes": (72, 16)}, "reaches over bytes 0 to 2064 of 2048"),
    ],
)
def test_what_the_driver_would_refuse(change: dict[str, Any], message: str) -> None:
    right = {"sizes": (64, 16), "strides": (128,), "box": (64, 16), "swizzle": 128}
    for memory, error in ((arg(16, 64), OpError), (Scratch(2048), ValueError)):
        TensorMap(memory, dtypes.bfloat16, **right)
        with pytest.raises(error, match=message):
            TensorMap(memory, dtypes.bfloat16, **{**right, **change})


def test_is_shown_in_the_order_of_a_tensor() -> None:
    shown = "x [16, 64] bfloat16, boxes of [8, 32], swizzled by 64 bytes"
    assert str(TensorMap.of(arg(16, 64), (32, 8), 64)) == shown
    part = TensorMap(Scratch(256), dtypes.float32, (8, 2), (96,), (4, 2), offset=32)
    assert str(part) == "scratch memory from byte 32 [2, 8] float32, boxes of [2, 4]"


# What a kernel is given

MAPS = "const __grid_constant__ TensorMap"


def test_a_map_follows_its_tensor(kernel: MakeKernel, driver: Driver) -> None:
    """Encoded once; told an address where that is another than at the last call."""
    made = kernel("mapped", text("mapped", f"float* out, {MAPS} x_map, int rows, {MAPS} y_map, float epsilon"))
    x, y = arg(16, 64), arg(32, 8, name="y", dtype="float32")
    maps = {"x_map": TensorMap.of(x, (64, 8), 128), "y_map": TensorMap(y, y.dtype, (4, 32), (32,), (4, 2), 0, 16)}
    words = ("out", "y", "x"), (("epsilon", "d"),), {}
    bound = driver.bind([made().launch(1, 64, rows=3, **maps)], *words)
    assert driver.encoded == [
        (1, 2, (64, 16), (128, 0), (64, 8), (1, 1), 0, 3, 3, 0),
        (2, 2, (4, 32), (32, 0), (4, 2), (1, 1), 0, 0, 3, 0),
    ]
    steps = [(1, 2), (1, 2), (3, 2), (3, 4), (1, 2)]
    for x_page, y_page in steps:
        call(bound, 7, PAGE, y_page * PAGE, x_page * PAGE, 0.5)
    assert [values for *_, values in driver.launches] == [
        {"out": PAGE, "x_map": (0, i * PAGE), "rows": 3, "y_map": (1, j * PAGE + 16), "epsilon": 0.5} for i, j in steps
    ]
    assert len(driver.encoded) == 2
    assert sorted(driver.replaced[:2]) == [PAGE, 2 * PAGE + 16]
    assert driver.replaced[2:4] == [3 * PAGE, 4 * PAGE + 16]
    assert len(driver.replaced) == 6


def test_launches_of_a_plan_have_maps_of_their_own(kernel: MakeKernel, driver: Driver) -> None:
    """In each launch's own parameters, of one tensor or of scratch memory that a launch writes and the next reads."""
    first = kernel("first", text("first", f"{MAPS} x_map, {MAPS} to"))
    second = kernel("second", text("second", f"float* out, {MAPS} x_map, float* counts, {MAPS} from_"))
    x, memory, counts = arg(16, 64), Scratch(1000), Scratch(64, zeroed=True)
    x_map, part = TensorMap.of(x, (64, 8)), TensorMap(memory, x.dtype, (64, 2), (128,), (64, 1), 0, 128)
    marks = TensorMap(counts, dtypes.int32, (16,), (), (16,))
    launches = [first().launch(1, 64, x_map=x_map, to=part)]
    launches += [second().launch(1, 64, x_map=x_map, counts=counts, from_=one) for one in (part, marks)]
    lies = [2**20]
    workspace = pytest.MonkeyPatch()
    with workspace.context() as patch:
        patch.setattr("pyops._core.workspace.zeros", lambda *_: 2**21)
        bound = driver.bind(launches, ("out", "x"), (), {}, lambda index, nbytes: (None, lies[0]))
        for lies[0], page in ((2**20, 1), (2**20, 1), (2**22, 1), (2**22, 2)):
            call(bound, 0, PAGE, page * PAGE)
    seen = [values for *_, values in driver.launches]
    assert seen == [
        values
        for at, page in ((2**20, 1), (2**20, 1), (2**22, 1), (2**22, 2))
        for values in (
            {"x_map": (0, page * PAGE), "to": (1, at + 128)},
            {"out": PAGE, "x_map": (2, page * PAGE), "counts": 2**21, "from_": (3, at + 128)},
            {"out": PAGE, "x_map": (4, page * PAGE), "counts": 2**21, "from_": (5, 2**21)},
        )
    ]
    assert len(driver.encoded) == 6
    assert len(driver.replaced) == 6 + 0 + 2 + 3


def test_a_map_that_could_not_be_told_is_told_again(kernel: MakeKernel, driver: Driver) -> None:
    made = kernel("mapped", text("mapped", f"{MAPS} x_map, {MAPS} again"))
    x_map = TensorMap.of(arg(16, 64), (64, 8))
    bound = driver.bind([made().launch(1, 64, x_map=x_map, again=x_map)], ("x",), (), {})
    call(bound, 0, PAGE)
    driver.status = 700
    with pytest.raises(Driver.Error) as caught:
        call(bound, 0, 2 * PAGE)
    assert caught.value.status == 700
    assert len(driver.launches) == 1
    call(bound, 0, PAGE)
    assert driver.launches[1][-1] == {"x_map": (0, PAGE), "again": (1, PAGE)}
    assert len(driver.replaced) == 4


def test_maps_that_a_driver_or_device_does_not_have(
    kernel: MakeKernel, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kernel("mapped", text("mapped", f"{MAPS} x_map"))
    launches = [made().launch(1, 64, x_map=TensorMap.of(arg(16, 64), (64, 8)))]
    driver.status = 1
    with pytest.raises(OpError, match=r"^op: x: the driver refuses a tensor map: 1: x \[16, 64\] bfloat16, boxes"):
        driver.bind(launches, ("x",), (), {})
    monkeypatch.setattr(device, "get", lambda index: device.model("gfx942"))
    with pytest.raises(OpError, match=r"^op: x: tensor maps exist on compute capability 9\.0 and later"):
        driver.bind(launches, ("x",), (), {})
    calls = driver_calls.Driver(driver.launch, None, Driver.Error, lambda: 0)  # too old
    monkeypatch.setattr(driver_calls, "get", lambda: calls)
    monkeypatch.setattr(device, "get", lambda index: device.model())
    with pytest.raises(OpError, match=r"^op: x: tensor maps exist"):
        driver.bind(launches, ("x",), (), {})


@pytest.mark.parametrize(
    ("parameters", "fixed", "message"),
    [
        (f"{MAPS} x", {}, "nothing feeds the parameter x"),  # a tensor's address is no map
        (f"{MAPS} x", {"x": 3}, "x takes a TensorMap, got 3"),
        ("const float* x", {"x": TensorMap.of(arg(16, 64), (64, 8))}, r"x takes no TensorMap, got x \[16, 64\]"),
    ],
)
def test_maps_are_fed_to_maps(
    kernel: MakeKernel, driver: Driver, parameters: str, fixed: dict[str, Any], message: str
) -> None:
    made = kernel("mapped", text("mapped", parameters))
    with pytest.raises(TypeError, match=rf"test/mapped\.cu: {message}"):
        driver.bind([made().launch(1, 64, **fixed)], ("x",), (), {})


def test_a_map_without_grid_constant_is_no_parameter(kernel: MakeKernel) -> None:
    with pytest.raises(ValueError, match="parameter x_map has type 'TensorMap'"):
        assert kernel("mapped", text("mapped", "const TensorMap x_map")).signature


# On the CPU, and for a GPU

READS = """
#ifdef PYOPS_HOST
#define __grid_constant__
#endif
struct alignas(64) Described {
    unsigned long long address, strides[4];
    unsigned magic, rank, element_bytes, swizzle, sizes[5], box[5], reserved[8];
};
using TensorMap = Described;
// Every field of a map, and the first 16-bit number of each row behind it.
extern "C" __global__ void reads(long long* out, const __grid_constant__ TensorMap x_map, int rows) {
    if (threadIdx.x) return;
    const unsigned* words = &x_map.magic;
    for (int i = 0; i < 4; ++i) out[i] = x_map.strides[i];
    for (int i = 0; i < 22; ++i) out[4 + i] = words[i];
    for (int i = 0; i < rows; ++i) {
        out[26 + i] = *reinterpret_cast<const short*>(x_map.address + x_map.strides[0] * i);
    }
}
"""


def test_the_host_s_maps(kernel: MakeKernel) -> None:
    x = numpy.arange(6 * 72, dtype=numpy.int16).reshape(6, 72)
    out = numpy.zeros(26 + 5, numpy.int64)
    described = arg(6, 72)
    one = TensorMap(described, described.dtype, (64, 5), (144,), (32, 3), 64, offset=144 + 16)
    launched = kernel("reads", READS)().launch(1, 64, x_map=one, rows=5)
    assert ctypes.sizeof(ctypes.c_char * tensor_map.NBYTES) == 128
    for moved in (x, x + 1000):
        words = (out.ctypes.data, moved.ctypes.data)
        launch.run_on_host([launched], ("out", "x"), (out.nbytes, x.nbytes), (), {}, *words)
        assert out[:4].tolist() == [144, 0, 0, 0]
        assert out[4:26].tolist() == [0x70616D74, 2, 2, 2, 64, 5, 0, 0, 0, 32, 3, *(0,) * 11]
        assert out[26:].tolist() == moved[1:, 8].tolist()


def test_scratch_memory_on_the_host(kernel: MakeKernel) -> None:
    """Reads what lies in a workspace: the bytes that the host fills it with."""
    out = numpy.zeros(26 + 5, numpy.int64)
    for memory, expected in ((Scratch(2048), -1), (Scratch(2048, zeroed=True), 0)):
        one = TensorMap(memory, dtypes.bfloat16, (64, 5), (256,), (64, 5), offset=256)
        launched = kernel("reads", READS)().launch(1, 64, x_map=one, rows=5)
        launch.run_on_host([launched], ("out",), (out.nbytes,), (), {}, out.ctypes.data)
        assert out[26:].tolist() == [expected] * 5


def test_compiles_for_a_gpu(kernel: MakeKernel) -> None:
    """The parameter lies at a multiple of 64 bytes, which the driver sees to: a launch points to each parameter."""
    made = kernel("reads", READS)()
    report = offline.compile("reads", "", made.text, "sm_90")
    assert report.spill_bytes == 0
    assert re.search(rb"reads", report.binary)


def test_the_fake_driver_takes_maps(kernel: MakeKernel) -> None:
    from benchmarks.fake_driver import fake_driver

    made = kernel("mapped", text("mapped", f"float* out, {MAPS} x_map"))
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    with fake_driver():
        one = made().launch(1, 64, x_map=TensorMap.of(arg(16, 64), (64, 8)))
        bound = launch.bind("op", 0, [one], [1], ("out", "x"), (), {})
        assert not bound.launch(0, PAGE, x.data_ptr())
