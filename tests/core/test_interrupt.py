"""Ctrl-C and outputs that cannot be written, as user programs meet them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pyops
from pyops.__main__ import main
from pyops.testing import scheduled

SPIN = """
extern "C" __global__ void spin(volatile int* flag) {
    while (!*flag) {}
}
"""


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """Python's own handler, because a shell that starts the tests in the background makes them ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_host_kernel_is_interrupted(run_on_host: Callable[..., None]) -> None:
    import numpy

    flag = numpy.zeros(1, numpy.int32)
    with scheduled(pyops.testing.SCHEDULES[0], seconds=0.1), pytest.raises(pyops.KernelFault, match="time limit"):
        run_on_host(SPIN, 1, 1, flag=flag)  # compiles
    for seconds in (0.1, 0.5):
        timer, started = interrupt_after(seconds), time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run_on_host(SPIN, 1, 1, flag=flag)
        timer.join()
        assert time.monotonic() - started < seconds + 5  # its own limit is a minute
    flag[0] = 1
    run_on_host(SPIN, 1, 1, flag=flag)  # the next launch runs


def test_interrupted_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pyops.cli.table.text", interrupted)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


# Ctrl-C at the moment when a module is looked for.
AT_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == os.environ["INTERRUPTED"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""
SCRIPT = "import sys\nfrom pyops.__main__ import script\nsys.exit(script())\n"


@pytest.mark.parametrize(
    ("words", "module", "status", "told"),
    [
        (["-m", "pyops", "list"], "numpy", -signal.SIGINT, ""),
        (["-Bm", "pyops", "list"], "pyops.cli", -signal.SIGINT, ""),
        (["-m", "pyops", "list"], "pyops.cli.table", 130, "interrupted\n"),
        (["{folder}/pyops", "list"], "pyops.fused", -signal.SIGINT, ""),
        # programs of their own
        (["-c", "import pyops"], "pyops.fused", -signal.SIGINT, "KeyboardInterrupt\n"),
        (["-m", "other", "pyops"], "pyops.fused", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_an_import_that_is_interrupted(tmp_path: Path, words: list[str], module: str, status: int, told: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT)
    (tmp_path / "pyops").write_text(SCRIPT)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "__init__.py").write_text("import pyops\n")
    path = os.pathsep.join((str(tmp_path), str(Path(pyops.__file__).parents[1])))
    environment = {**os.environ, "PYTHONPATH": path, "INTERRUPTED": module}
    command = [sys.executable, *(word.format(folder=tmp_path) for word in words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[-len(told) :] if told else done.stderr) == (status, told)
    assert ("Traceback" in done.stderr) == told.startswith("KeyboardInterrupt")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("words", [["list"], ["doctor", "--json"], ["source", "rms_norm"]])
@pytest.mark.slow
def test_unwritable_output(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "pyops", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "the output cannot be written: No space left on device\n")


def test_negative_sizes_are_no_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("show", "source"):
        assert main([command, "rms_norm", "hidden_size=-1"]) == 2
        assert "expected sizes of 0 or more, got shape" in capsys.readouterr().err


def test_wrong_switch_is_named_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYOPS_CPU", "bogus")
    assert main(["generate", "--model", "/nowhere", "--prompt", "text"]) == 2
    assert capsys.readouterr().err.startswith("PYOPS_CPU: expected")
