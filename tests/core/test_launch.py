"""Packing and launching on a driver that is a Python function: the values of kernel parameters at a launch."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

import pyops
from pyops._core.errors import OpError
from pyops._core.launch import launch
from pyops._core.launch.kernel import Kernel
from pyops._core.op import index_check
from pyops._core.system import device
from tests.core.conftest import Driver, call, text

MakeKernel = Callable[[str, str], Kernel]


def test_parameters_hold_the_given_values(kernel: MakeKernel, driver: Driver) -> None:
    every = kernel(
        "every",
        text(
            "every", "float* out, float a, const int* input, int b, int64_t c, bool d, double e, uint32_t f, uint64_t g"
        ),
    )
    fixed = {"b": -5, "c": -(2**62), "d": True, "f": 2**32 - 1, "g": 2**64 - 1}
    bound = driver.bind([every().launch((3, 2), 64, 512, **fixed)], ("out", "input"), (("a", "d"), ("e", "d")), {})
    for a, e in ((0.5, 0.1), (-2.0, 1e300)):
        call(bound, 77, 2**48, 2**47, a, e)
    assert driver.launches == [
        (
            "test/every.cu",
            (3, 2, 1),
            (64, 1, 1),
            512,
            77,
            {"out": 2**48, "a": a, "input": 2**47, "e": e} | fixed,
        )
        for a, e in ((0.5, 0.1), (-2.0, 1e300))
    ]


def test_keyed_scalars_of_the_op_reach_the_kernel(kernel: MakeKernel, driver: Driver) -> None:
    """By name; a value that the plan fixes precedes the op's own, also for a tensor."""
    scalars = kernel("scalars", text("scalars", "float* out, float* residual, int rows, bool causal"))
    one = scalars().launch(1, 64, residual=0, rows=9)
    bound = driver.bind([one], ("out", "residual"), (("unused", "d"),), {"rows": 4, "causal": True, "window": 8})
    call(bound, 0, 111, 222, 3.0)
    assert driver.launches[0][-1] == {"out": 111, "residual": 0, "rows": 9, "causal": True}


def test_renamed_kernel_is_fed_by_other_names(kernel: MakeKernel, driver: Driver) -> None:
    """Parameters of any kernel with that text; the loaded function is the kernel's."""
    plain = kernel("plain", text("plain", "float* out, const float* input, const float* bias, int rows"))
    renamed = plain.renamed(out="result", input="x")
    assert renamed is plain.renamed(out="result", input="x")
    assert renamed is not plain.renamed(out="result")
    assert renamed._loaded is plain._loaded
    assert renamed.for_arch("sm_90a").names == renamed.names
    bound = driver.bind([renamed().launch(1, 64, rows=9, bias=0)], ("x", "bias", "result"), (), {})
    call(bound, 0, 111, 222, 333)
    (launched,) = driver.launches
    assert launched[-1] == {"result": 333, "x": 111, "bias": 0, "rows": 9}


def test_launches_of_one_op_share_their_words(kernel: MakeKernel, driver: Driver) -> None:
    """Each kernel gets those of the op's values that it names, in the C type of its signature."""
    first = kernel("first", text("first", "float* out, int rows"))
    second = kernel("second", text("second", "int rows, const float* input, float* out, float epsilon"))
    third = kernel("third", text("third", "double limit, float* out"))
    launches = [made().launch(1, 64, **({"rows": 3} if made is not third else {})) for made in (first, second, third)]
    bound = driver.bind(launches, ("out", "input"), (("epsilon", "d"), ("limit", "d")), {})
    for out, epsilon in ((4096, 0.25), (8192, 0.5)):
        call(bound, 5, out, 64, epsilon, 0.1)
    values = [(file, taken) for file, *_, taken in driver.launches]
    assert values == [
        entry
        for out, epsilon in ((4096, 0.25), (8192, 0.5))
        for entry in (
            ("test/first.cu", {"out": out, "rows": 3}),
            ("test/second.cu", {"rows": 3, "input": 64, "out": out, "epsilon": epsilon}),
            ("test/third.cu", {"limit": 0.1, "out": out}),
        )
    ]
    assert {stream for *_, stream, _ in driver.launches} == {5}


def test_shared_parameter_has_one_type(kernel: MakeKernel, driver: Driver) -> None:
    single = kernel("single", text("single", "float* out, float epsilon"))
    double = kernel("double", text("double", "float* out, double epsilon"))
    with pytest.raises(TypeError, match=r"test/double\.cu: epsilon has another type than in a kernel launched before"):
        driver.bind([single().launch(1, 64), double().launch(1, 64)], ("out",), (("epsilon", "d"),), {})


def test_missing_parameter_and_unused_value_are_errors(kernel: MakeKernel, driver: Driver) -> None:
    scale = kernel("scale", text("scale", "float* out, int64_t size, int times"))
    with pytest.raises(TypeError, match=r"test/scale\.cu: nothing feeds the parameter times"):
        driver.bind([scale().launch(1, 64, size=1)], ("out",), (), {})
    with pytest.raises(TypeError, match=r"test/scale\.cu: no parameter takes the value rows"):
        driver.bind([scale().launch(1, 64, size=1, rows=2)], ("out",), (), {"times": 1})


@pytest.mark.parametrize("value", [1e300, None, "x"])
def test_value_that_does_not_fit_is_named(kernel: MakeKernel, driver: Driver, value: Any) -> None:
    single = kernel("narrow", text("narrow", "float* out, float slope, float epsilon"))
    bound = driver.bind([single().launch(1, 64)], ("out",), (("slope", "d"), ("epsilon", "d")), {})
    words = (64, 1.0, value)
    with pytest.raises((struct.error, OverflowError, TypeError)) as caught:
        call(bound, 0, *words)
    with pytest.raises(pyops.OpError, match=r"^op: epsilon: got "):
        launch.recover(caught.value, "op", 0, bound, (("out", "Q"), ("slope", "d"), ("epsilon", "d")), 0, *words)
    assert not driver.launches


def test_no_launch_at_all(driver: Driver) -> None:
    call(driver.bind([], ("out",), (("epsilon", "d"),), {}), 0, 64, 1.0)
    assert not driver.launches


def test_threads_do_not_mix_their_words(kernel: MakeKernel, driver: Driver) -> None:
    """One plan, many threads: the words of a call stay together from packing to launching."""
    pair = kernel("pair", text("pair", "float* out, const float* input, float epsilon"))
    bound = driver.bind([pair().launch(1, 64), pair().launch(2, 64)], ("out", "input"), (("epsilon", "d"),), {})
    barrier = threading.Barrier(8)

    def calls(thread: int) -> None:
        barrier.wait()
        for i in range(200):
            word = 1000 * thread + i
            call(bound, thread, word, word, float(word))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(calls, range(8)))
    assert len(driver.launches) == 8 * 200 * 2
    for *_, stream, values in driver.launches:
        assert values["out"] == values["input"] == values["epsilon"]
        assert values["out"] // 1000 == stream


def test_each_library_knows_whether_its_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    stream = mock.create_autospec(cupy.cuda.Stream, instance=True)
    stream.is_capturing.return_value = True
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda index: stream)
    assert index_check.capturing("cupy", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert index_check.capturing("torch", 0)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_thread_counts_beyond_the_runtime_are_refused(
    kernel: MakeKernel, driver: Driver, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    monkeypatch.setattr(device, "get", lambda index: device.model(arch))
    many = kernel("many", text("many", "float* out"))
    driver.bind([many().launch(2**24 - 1, 256)], ("out",), (), {})
    if arch == "sm_90":
        driver.bind([many().launch(2**24, 256)], ("out",), (), {})
    else:
        with pytest.raises(OpError, match="out: needs 4294967296 threads"):
            driver.bind([many().launch(2**24, 256)], ("out",), (), {})


@pytest.mark.parametrize("grid", [(2**31,), (2**33 + 1,), (1, 2**16), (1, 1, 2**16)])
def test_impossible_blocks_are_refused(kernel: MakeKernel, driver: Driver, grid: tuple[int, ...]) -> None:
    """The driver would refuse some of them, and take others modulo 2^32."""
    many = kernel("many", text("many", "float* out"))
    with pytest.raises(OpError, match=r"out: needs .* blocks, but a launch has at most"):
        driver.bind([many().launch(grid, 1)], ("out",), (), {})


def test_launches_of_few_streams_are_cached() -> None:
    """A program that makes a stream for every request does not fill memory."""
    streams = launch.Streams(lambda stream: lambda: stream)
    for stream in range(1000):
        assert streams[stream]() == streams[stream]() == stream
    assert len(streams) <= 64
