"""Hypothesis profiles, what to do without a device, and the summary of the offline compiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache

import hypothesis
import pytest
import torch

for _profile, _examples in (("dev", 10), ("ci", 50), ("nightly", 1000)):
    hypothesis.settings.register_profile(
        _profile,
        max_examples=_examples,
        deadline=None,
        derandomize=_profile != "nightly",
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    )
# The tests run in several processes already.
torch.set_num_threads(1)
hypothesis.settings.load_profile(
    os.environ.get("PYOPS_HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "dev")
)


@cache
def _device() -> str | None:
    """The name of the first device that both torch and CuPy can use."""
    if not torch.cuda.is_available():
        return None
    try:
        import cupy  # noqa: F401
    except ImportError:
        return None
    return torch.cuda.get_device_name(0)


def pytest_report_header() -> str:
    device = _device() or "none, tests marked gpu are skipped"
    return f"gpu: {device}; hypothesis: {hypothesis.settings().max_examples} examples"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _device() is None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no device"))


@pytest.fixture(autouse=True)
def _errors_where_they_happen(request: pytest.FixtureRequest) -> Iterator[None]:
    """A kernel that faults fails the test that launched it."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many specialisations were compiled offline, and the slowest."""
    compiles = [
        entry
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for key, entry in report.user_properties
        if key == "offline_compile"
    ]
    if compiles:
        total = sum(seconds for seconds, *_ in compiles)
        terminalreporter.section("offline compiles")
        terminalreporter.line(f"{len(compiles)} specialisations in {total:.0f} s of compiler time; the slowest:")
        for seconds, arch, kernel, constants in sorted(compiles, reverse=True)[:5]:
            terminalreporter.line(f"{seconds:6.2f} s  {arch}  {kernel}  {constants}")
