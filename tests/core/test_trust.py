"""Kernels that no GPU of an architecture has run: compared with portable ones at first use, never trusted blindly."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import numpy
import pytest
import torch

import pyops
from pyops._core import config
from pyops._core.errors import DeviceFault
from pyops._core.launch.kernel import Kernel
from pyops._core.op import index_check, trust
from pyops._core.op.wrapper import NAMESPACE
from pyops._core.system import device
from pyops._core.system import driver as driver_calls
from pyops._core.tensors import tensor
from pyops._core.text import compiler
from pyops._core.text.compiler import Compiled
from pyops.cli import doctor
from pyops.host.toolchain import toolchains
from pyops.ops.linear import gemm_sm100
from pyops.ops.linear.gemm_engines import choose
from pyops.ops.linear.gemm_sm100 import TileConfig
from tests.core.conftest import Driver
from tests.support.blackwell import BLACKWELL, mistaken

OWN, PORTABLE = "linear/gemm_sm100.cu", "linear/gemm_sm80.cu"
M, N, K = 40, 72, 200
INDICES = count(100)  # ordinals of devices: each has loaded nothing yet
needs_compiler = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has compared nothing, and that prefers gemm_sm100.cu, with a small tile, for any GEMM."""
    ours = {"configs": lambda *_: [TileConfig(64, 16)], "time_us": lambda *_: 0.0}
    engines = [replace(one, **ours) if one.name in OWN else one for one in choose.engines]
    monkeypatch.setattr(choose, "engines", engines)
    choose._fastest.cache_clear()
    for name in ("_agreed", "_zeros", "disabled"):
        monkeypatch.setattr(trust, name, type(getattr(trust, name))())
    monkeypatch.delenv("PYOPS_TRUST", raising=False)
    pyops.registry["linear"].forget()
    yield
    pyops.registry["linear"].forget()
    choose._fastest.cache_clear()


def operands(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(rows, K, generator=generator).bfloat16() for rows in (M, N))
    return torch.empty(M, N, dtype=torch.bfloat16), x, weight


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of the comparison; those of the logger pyops.compile come from a slow compiler."""
    found = [one.getMessage() for one in caplog.records if (one.name, one.levelno) == ("pyops", logging.WARNING)]
    return [message for message in found if OWN in message]


# On the host backend


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host backend in place of a GPU that has run no kernel of its own yet."""
    monkeypatch.setitem(device._HOST, 32, BLACKWELL)
    with config.cpu("kernels"):
        yield


def ran(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> set[str]:
    """The kernels that a call loads, the host backend's and those compared; the result is right."""
    op = pyops.registry["linear"]
    op.specialisations.clear()
    pyops.linear(out, x, weight, None)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=2**-8, atol=2**-8)
    return {one.kernel.file for one in op.specialisations.values()}


@needs_compiler
def test_right_kernel_is_compared_once(blackwell: None, caplog: pytest.LogCaptureFixture) -> None:
    out, x, weight = operands()
    assert ran(out, x, weight) == {OWN, PORTABLE}
    pyops.registry["linear"].forget()
    assert ran(out, x, weight) == {OWN}
    assert not warnings(caplog)
    assert doctor.proven_on(BLACKWELL).startswith("not ")


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("i * TILE_K < depth", "(i + 1) * TILE_K < depth", id="missed tail of K"),
        pytest.param("a_view.load(row, i)", "a_view.load(row, i ^ (i == 1))", id="k-tile taken twice"),
        pytest.param("row, column, cast<out_t>(x)", "row, column, cast<out_t>(x * x)", id="wrong epilogue"),
    ],
)
def test_wrong_kernel_is_disabled(
    blackwell: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, old: str, new: str
) -> None:
    """The call and all others have the portable kernel's results, and plans that were made before are gone."""
    monkeypatch.setattr(gemm_sm100, "_gemm_sm100", mistaken(OWN, old, new))
    out, x, weight = operands()
    norm = pyops.registry["relu2"]
    pyops.relu2(torch.empty(2, 8), torch.ones(2, 8))
    assert norm.plans
    assert ran(out, x, weight) == {OWN, PORTABLE}
    assert not norm.plans
    (message,) = warnings(caplog)
    assert "TILE_K=64" in message
    assert "pyops doctor" in message
    assert OWN not in ran(torch.empty(9, N, dtype=torch.float16), x[:9].half(), weight.half())
    assert len(warnings(caplog)) == 1


def test_doctor_names_kernels_with_instructions_of_their_own() -> None:
    assert "not linear/gemm_sm120.cu: " in doctor.proven_on(device.model("sm_120"))
    assert "portable kernels" in doctor.proven_on(device.model("sm_89"))
    for_cdna = doctor.proven_on(device.model("gfx942"))
    assert "linear/wq_gemm_cdna.cu" in for_cdna
    assert "linear/gemm_sm120.cu" not in for_cdna


@needs_compiler
def test_switch_trusts(blackwell: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_TRUST", "1")
    assert ran(*operands()) == {OWN}
    assert "PYOPS_TRUST" in doctor.proven_on(BLACKWELL)


@needs_compiler
def test_proven_kernel_is_trusted(blackwell: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trust.PROVEN, "sm_100", ("linear/gemm_sm*.cu",))
    assert ran(*operands()) == {OWN}


@needs_compiler
def test_zeros_prove_little(blackwell: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Dummy operands of a warm-up hide mistakes; but a layer of zeros is not compared for ever."""
    monkeypatch.setattr(
        gemm_sm100, "_gemm_sm100", mistaken(OWN, "row, column, cast<out_t>(x)", "row, column, cast<out_t>(x * x)")
    )
    out, x, weight = operands()
    assert ran(out, x * 0, weight) == {OWN, PORTABLE}
    assert not pyops.registry["linear"].plans
    assert ran(out, x, weight) == {OWN, PORTABLE}
    assert len(warnings(caplog)) == 1
    monkeypatch.setattr(trust, "disabled", set())
    for _ in range(trust._MAX_ZEROS + 1):
        pyops.linear(out, x * 0, weight, None)
    assert pyops.registry["linear"].plans


@needs_compiler
def test_copies_have_strides_of_the_tensors(blackwell: None) -> None:
    """Rows of out have gaps, in torch and in numpy, and what lies in the gaps stays."""
    _, x, weight = operands()
    wide = torch.full((M, 2 * N), 7.0, dtype=torch.bfloat16)
    ran(wide[:, :N], x, weight)
    assert wide[:, N:].eq(7).all()
    array = numpy.zeros((3, 8), numpy.float32)[:, ::2]
    copy = trust._copy(array)
    assert (copy.strides, copy.shape, copy.dtype) == (array.strides, array.shape, array.dtype)
    assert not numpy.shares_memory(copy, array)


# On a driver that computes with torch


class Computing(Driver):
    """Runs GEMMs of bfloat16, those of gemm_sm100.cu with an error."""

    wrong = 0.0

    def launch(self, *words: Any) -> None:
        super().launch(*words)
        file, *_, values = self.launches[-1]

        def matrix(name: str, rows: int, columns: int) -> torch.Tensor:
            memory = (ctypes.c_uint16 * (rows * columns)).from_address(values[name])
            return torch.frombuffer(memory, dtype=torch.bfloat16).view(rows, columns)

        x, weight = (matrix(values_of, rows, K) for values_of, rows in (("a", M), ("b", N)))
        result = x.double() @ weight.double().T
        matrix("out", M, N).copy_(result * (1 + self.wrong * (file == OWN)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Computing:
    """A device on which tensors in host memory lie, with a driver that computes."""
    made = Computing()
    on = replace(BLACKWELL, index=next(INDICES), name="nvidia-b200")
    calls = driver_calls.Driver(made.launch, None, Driver.Error, lambda: 0, made.encode_map, made.replace_address)
    monkeypatch.setattr(driver_calls, "get", lambda: calls)
    monkeypatch.setattr(driver_calls, "raise_limits", lambda *_: None)
    monkeypatch.setattr(device, "get", lambda index: on)
    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(tensor, "device_of", lambda value: on)
    monkeypatch.setitem(NAMESPACE, "torch_stream", lambda index: 5)

    def load(index: int, text: str, entry: str, kernel: str, constants: str, *_: Any) -> Compiled:
        made.kernels.append(Kernel(kernel))
        return Compiled(kernel, constants, index, "sm_100", 0.0, "fake", 0, 0, 0, len(made.kernels) - 1, None)

    monkeypatch.setattr(compiler, "load", load)
    monkeypatch.setattr(index_check, "capturing", lambda *_: False)
    monkeypatch.setattr(trust, "capturing", lambda *_: False)
    return made


def launched(gpu: Computing) -> list[str]:
    """The kernels of a call, in order; its result is right."""
    out, x, weight = operands()
    start = len(gpu.launches)
    pyops.linear(out, x, weight, None)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=2**-8, atol=2**-8)
    return [file for file, *_ in gpu.launches[start:]]


def test_device_compares_once(gpu: Computing, caplog: pytest.LogCaptureFixture) -> None:
    assert launched(gpu) == [PORTABLE, OWN, OWN]
    assert launched(gpu) == [OWN]
    assert not warnings(caplog)


def test_device_disables(gpu: Computing, caplog: pytest.LogCaptureFixture) -> None:
    gpu.wrong = 2.0**-5
    assert launched(gpu) == [PORTABLE, OWN, PORTABLE]
    assert launched(gpu) == [PORTABLE]
    (message,) = warnings(caplog)
    assert "nvidia-b200" in message


def test_capture_takes_the_portable_kernel(
    gpu: Computing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And keeps no plan: the first call outside of a capture compares."""
    monkeypatch.setattr(trust, "capturing", lambda *_: True)
    assert launched(gpu) == [PORTABLE]
    assert "captured" in warnings(caplog)[0]
    monkeypatch.setattr(trust, "capturing", lambda *_: False)
    assert launched(gpu) == [PORTABLE, OWN, OWN]
    monkeypatch.setattr(trust, "capturing", lambda *_: True)
    assert launched(gpu) == [OWN]


def test_fault_names_the_kernel(gpu: Computing, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(trust, "_compared", fail)
    with pytest.raises(DeviceFault, match=r"gemm_sm100.cu, which no sm_100 has run.*illegal memory access"):
        launched(gpu)


# What rounding makes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    exact = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).double() * 20
    noisy = exact + torch.randn(64, 512, generator=torch.Generator().manual_seed(1)) * 2.0**-10
    a, b = (x.round().to(dtype) if dtype == torch.int8 else x.to(dtype) for x in (exact, noisy))
    assert trust._difference(a, b) is None
    other = b.clone()
    other[3, 5] = 90.0
    assert "1 of 32768 elements" in str(trust._difference(a, other))
    if dtype.is_floating_point:
        a[3, 5], other[3, 5] = 0.0, torch.nan
        assert trust._difference(a, other)
        assert trust._difference(other, other) is None


def test_rows_from_first_to_last_are_compared() -> None:
    rows = trust._rows(torch.arange(1000.0).view(10, 100, 1)).flatten().tolist()
    assert len(rows) == 256
    assert (rows[0], rows[-1]) == (0.0, 999.0)
    assert max(b - a for a, b in pairwise(rows)) <= 4
    assert trust._rows(torch.ones(5)).shape == (1, 5)
