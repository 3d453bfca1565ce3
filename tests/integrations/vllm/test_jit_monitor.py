"""Compiles of this library in vLLM 0.33's monitor, with a stand-in for the monitor."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from pyops._core import log
from pyops.integrations.vllm.parts import jit_monitor


class Monitor(ModuleType):
    """vLLM's `vllm.utils.jit_monitor`, with the names that the part uses."""

    active = False
    raises = False

    def __init__(self) -> None:
        super().__init__("vllm.utils.jit_monitor")
        self.events: list[dict[str, Any]] = []

    def is_active(self) -> bool:
        return self.active

    def _handle_jit_event(self, *, backend: str, event: str, fn_name: str, detail: str | None = None) -> None:
        self.events.append({"backend": backend, "fn_name": fn_name, "detail": detail})
        if self.raises:
            raise RuntimeError("compiled during inference")


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitor]:
    found = Monitor()
    for name, module in (("vllm", ModuleType("vllm")), ("vllm.utils", ModuleType("vllm.utils"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "vllm.utils.jit_monitor", found)
    assert jit_monitor.install()
    assert not jit_monitor.install()  # a second call changes nothing
    yield found
    jit_monitor.uninstall()


def test_compiles_are_reported_after_the_warm_up(monitor: Monitor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "pyops")
    log.ready("norm/rms_norm.cu", "VEC_SIZE=8", "sm_90", "compiled in 300 ms, 32 registers")
    assert not monitor.events
    monitor.active = True
    log.ready("norm/rms_norm.cu", "VEC_SIZE=8", "sm_90", "read from disk in 3 ms, 32 registers")
    assert not monitor.events
    log.ready("norm/rms_norm.cu", "VEC_SIZE=8", "sm_90", "compiled in 300 ms, 32 registers")
    kernel, how = "norm/rms_norm.cu VEC_SIZE=8 sm_90", "compiled in 300 ms, 32 registers"
    assert monitor.events == [{"backend": "pyops", "fn_name": kernel, "detail": how}]
    assert not caplog.records  # whoever does not ask for INFO sees none


def test_the_monitor_may_make_a_compile_an_error(monitor: Monitor) -> None:
    monitor.active = monitor.raises = True
    with pytest.raises(RuntimeError, match="compiled during inference"):
        log.ready("norm/rms_norm.cu", "VEC_SIZE=8", "sm_90", "compiled in 300 ms")


def test_the_logger_is_as_before(monitor: Monitor, caplog: pytest.LogCaptureFixture) -> None:
    """Records of the level that the program asks for pass; uninstalled, nothing is left."""
    caplog.set_level(logging.INFO, "pyops")
    log.ready("norm/rms_norm.cu", "VEC_SIZE=8", "sm_90", "compiled in 300 ms")
    log.compiling.warning("%s ...", "compiling norm/rms_norm.cu")
    assert len(caplog.records) == 2
    jit_monitor.uninstall()
    assert log.compiling.level == logging.NOTSET
    assert not log.compiling.filters


def test_vllm_without_the_monitor_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.utils.jit_monitor", None)
    assert jit_monitor.install() == ""
    assert not log.compiling.filters
