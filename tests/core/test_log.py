"""Log lines of compiles: none, one after a second, or one for each kernel."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyops import compile_ahead
from pyops._core import log
from pyops._core.system import device
from pyops._core.text import compiler
from pyops._core.text.compiler import Compiled
from pyops.host.toolchain import toolchains


def stderr_of(folder: Path, size: int, before: str = "", **switches: str) -> str:
    """The standard error of a program that calls an op on the CPU; each size has its own kernel."""
    code = f"""
import logging
import numpy
import pyops
{before}
out = numpy.empty((1, {size}), "float32")
pyops.silu_and_mul(out, numpy.ones((1, {2 * size}), "float32"))
"""
    environment = {**os.environ, "PYOPS_CPU": "kernels", "CUPY_CACHE_DIR": str(folder), **switches}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture
def slow_compiler(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine on which a C++ compile, here with -Og, takes more than a second."""
    real = shutil.which("g++")
    if real is None:
        pytest.skip("no g++")
    fake = tmp_path / "bin" / "g++"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\ncase "$*" in *-Og*) sleep {log.PATIENCE + 0.5};; esac\nexec {real} "$@"\n')
    fake.chmod(0o755)
    return {"PATH": f"{fake.parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.slow
def test_compile_of_more_than_a_second_is_logged(tmp_path: Path, slow_compiler: dict[str, str]) -> None:
    told = "pyops: compiling activation/act_and_mul.cu for the CPU ...\n"
    assert told in stderr_of(tmp_path, 4, **slow_compiler)
    assert stderr_of(tmp_path, 4, **slow_compiler) == ""  # the cache folder has the kernel
    shown = stderr_of(tmp_path, 8, "logging.basicConfig(format='%(levelname)s %(name)s')", **slow_compiler)
    assert shown == "WARNING pyops.compile\n"  # once, in the program's own format
    assert stderr_of(tmp_path, 16, "logging.getLogger('pyops').setLevel('ERROR')", **slow_compiler) == ""


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.slow
def test_every_kernel_is_logged_by_the_switch_or_the_level(tmp_path: Path) -> None:
    line = r"^pyops: activation/act_and_mul\.cu scalar_t=float32 .* host: {} in \d+ ms$"
    by_switch = stderr_of(tmp_path, 4, PYOPS_LOG="1")
    by_level = stderr_of(tmp_path, 8, "logging.getLogger('pyops').setLevel('INFO')")
    again = stderr_of(tmp_path, 4, PYOPS_LOG="1")
    for told, origin in ((by_switch, "compiled"), (by_level, "compiled"), (again, "read from disk")):
        assert len(re.findall(line.format(origin), told, re.MULTILINE)) == 1, told
    assert len(again.splitlines()) == 1


def test_compiles_for_a_gpu_are_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake CuPy compiles nothing, but takes long."""

    class Module:
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            assert (code, options) == ("text", ())

        def _module(self, compiler_log: Any) -> Any:
            while not caplog.records:
                pass
            compiler_log.write("")
            return SimpleNamespace(get_function=lambda entry: SimpleNamespace(ptr=0))

    cuda = SimpleNamespace(
        Device=lambda index: nullcontext(),
        runtime=SimpleNamespace(is_hip=False),
        compiler=SimpleNamespace(CompileException=ZeroDivisionError),
        driver=SimpleNamespace(CUDADriverError=ZeroDivisionError),
    )
    monkeypatch.setattr(compiler, "cupy", SimpleNamespace(cuda=cuda, RawModule=Module))
    monkeypatch.setattr(compiler, "_attributes", lambda function: (32, 0, 0))
    monkeypatch.setattr(compiler, "_alone", lambda *key: nullcontext())
    monkeypatch.setattr(device, "get", lambda index: device.model("sm_90"))
    monkeypatch.setattr(log, "PATIENCE", 0.01)
    with caplog.at_level(logging.INFO, "pyops"):
        compiler._load(0, "text", "rms_norm", "norm/rms_norm.cu", "scalar_t=float16", ())
    slow, ready = (one.getMessage() for one in caplog.records)
    assert slow == "compiling norm/rms_norm.cu for sm_90 ..."
    assert re.fullmatch(r"norm/rms_norm\.cu scalar_t=float16 sm_90: compiled in \d+ ms, 32 registers", ready)


def test_short_wait_is_not_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "PATIENCE", 60.0)
    threads = threading.active_count()
    with caplog.at_level(logging.INFO, "pyops"), log.waiting("compiling"):
        assert threading.active_count() == threads + 1
    assert not caplog.records


def test_only_the_outer_of_nested_waits_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "PATIENCE", 0.01)

    def wait(told: int) -> None:
        while len(caplog.records) < told:
            pass

    with log.waiting("outer"), log.waiting("inner"):
        wait(told=1)
    with log.waiting("next"):
        wait(told=2)
    assert [(one.name, one.levelname, one.getMessage()) for one in caplog.records] == [
        ("pyops.compile", "WARNING", "outer ..."),
        ("pyops.compile", "WARNING", "next ..."),
    ]


def test_kernels_that_are_loaded_together_are_one_wait(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "PATIENCE", 0.01)

    def compile_slowly(index: int, text: str, entry: str, kernel: str, constants: str, *_: object) -> Compiled:
        with log.waiting(f"compiling {kernel}"):
            while not caplog.records:
                pass
        return Compiled(kernel, constants, index, "sm_90", 1.0, "compiled", 1, 0, 0, 0, None)

    monkeypatch.setattr(compiler, "load", compile_slowly)
    wanted = compile_ahead.specialisations(["rms_norm"], {"dtype": ["float16", "float32"]}, device.model())
    no_device = 1000
    try:
        compile_ahead.load(wanted, no_device)
    finally:
        for op, one in wanted:
            one.kernel._loaded.clear()
            del op.specialisations[no_device, one.kernel, one.key]
    assert [one.getMessage() for one in caplog.records] == ["compiling 2 kernels ..."]


def test_program_without_a_standard_error_goes_on() -> None:
    code = "import logging, sys, pyops\nsys.stderr = None\nlogging.getLogger('pyops.compile').warning('lost')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stderr == b""
