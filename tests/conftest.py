"""Hypothesis profiles, skips without a device, and the option ``--specialisations``."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import hypothesis
import pytest
import torch

import kernels_cu
import pyops
from pyops._core import config
from pyops._core.op import torch_library
from pyops._core.op.op import Op, registry
from pyops._core.system import device
from pyops.host import run as host
from tests.support import profiles
from tests.support.calls import Host
from tests.support.kernels import caught, kernel, run_on_host  # noqa: F401 (fixtures)
from tests.support.profiles import PROFILE

hypothesis.settings.register_profile(
    profiles.NAME,
    max_examples=PROFILE.examples,
    deadline=None,
    derandomize=profiles.NAME != "nightly",
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile(profiles.NAME)
# Without a device torch.manual_seed would note for each kind of device, with a printed stack, to seed it later.
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
# pytest adds its handlers six times per test to every logger that does not propagate: forty of torch's.
for _logger in logging.root.manager.loggerDict.values():
    if isinstance(_logger, logging.Logger) and _logger.name.startswith("torch") and "__" not in _logger.name:
        _logger.propagate = True
# The tests run in several processes already.
torch.set_num_threads(1)
# Until all tests are collected, nearly everything that is made stays: see pytest_collection_finish.
gc.disable()
# More processes than GPUs would only wait for each other.
_MAX_PROCESSES = 8


def _cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A run that names neither a file nor a test uses all cores unless told otherwise."""
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    config.option.everything = everything
    alone = config.option.usepdb or config.option.collectonly or hasattr(config, "workerinput")  # or a worker of xdist
    # None: pytest-xdist is installed, and -n was not given.
    if everything and not alone and getattr(config.option, "numprocesses", 0) is None:
        config.option.numprocesses = min(_cores(), _MAX_PROCESSES)
        config.option.dist = "worksteal"


@cache
def _device() -> str | None:
    """The name of the first device that both torch and CuPy can use."""
    if not torch.cuda.is_available():
        return None
    try:
        import cupy
    except ImportError:
        return None
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):  # lets a sanitizer know every array's bounds
        cupy.cuda.set_allocator(None)
    return torch.cuda.get_device_name(0)


def pytest_report_header() -> str:
    device = _device() or "none, tests marked gpu are skipped"
    return f"gpu: {device}; profile: {profiles.NAME}, of dev, ci and nightly; share: {profiles.name_of_share()}"


def pytest_itemcollected(item: pytest.Item) -> None:
    """`-k test_norm` selects all tests of a family, those of tests/ops/norm."""
    if item.path.parent.parent.name == "ops":
        item.extra_keyword_matches.add(f"test_{item.path.parent.name}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _device() is None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no device"))
    if config.option.everything:
        chosen = _chosen(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]


def pytest_collection_finish() -> None:
    """Freeze the collected tests, so that the garbage collector does not scan them again and again.

    It also runs after every 10,000 new objects instead of 700, which saves a twentieth of Python's time.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
    # Triton, if it is installed, would print what the interpreter leaves as leaks. pytest collects twice before.
    atexit.register(gc.unfreeze)


def _rotated(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The tests that do not rotate, and one share of the others: of the ops, of the cases of each op, or of tests.

    An op is in the same share in every test, so that its kernels are compiled in few runs.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("rotates") or item.get_closest_marker("slow")
        name, callspec = item.nodeid.partition("[")[0], getattr(item, "callspec", None)
        op = callspec.params.get("op") if callspec else None
        if mark is None or PROFILE.shares == 1:
            yield item
        elif "cases" in mark.args:
            cases.setdefault(op.name, []).append(item)
        elif profiles.is_in_share(op.name if isinstance(op, Op) else name):
            yield item
    for name, few in cases.items():
        yield from profiles.share(few, name)


def _chosen(items: list[pytest.Item]) -> set[pytest.Item]:
    """The tests of a run that names none: every test of every op, and a profile's number of variants of others.

    Of tests that rotate, it is a share.
    """
    runnable = [
        item
        for item in items
        if (_device() or not item.get_closest_marker("gpu")) and (PROFILE.slow or not item.get_closest_marker("slow"))
    ]
    variants: dict[str, list[pytest.Item]] = {}
    for item in _rotated(runnable):
        on_gpu = bool(item.get_closest_marker("gpu"))
        name, _, parameters = item.nodeid.partition("[")
        of_every_op = item.path.parent.name == "every_op"
        variants.setdefault(f"{name} {on_gpu} {parameters if of_every_op else ''}", []).append(item)
    return {
        item for name, few in variants.items() for item in profiles.varied(few, PROFILE.variants, name, _parameters)
    }


def _parameters(item: pytest.Item) -> list[str]:
    """The value of each parameter of a test."""
    callspec = getattr(item, "callspec", None)
    return [f"{name}={value}" for name, value in callspec.params.items()] if callspec else []


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[device.Device]:
    """A device with one SM, so that a few tokens fill it."""
    made = dataclasses.replace(device.model(), num_sms=1)
    monkeypatch.setitem(device._MODELS, "sm_90", made)
    for _ in _host_with(monkeypatch, num_sms=1):
        yield made


@pytest.fixture
def no_clusters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host without clusters, as devices before sm_90."""
    yield from _host_with(monkeypatch, cluster=1)


def _host_with(monkeypatch: pytest.MonkeyPatch, **changes: int) -> Iterator[None]:
    for warp_size, model in device._HOST.items():
        monkeypatch.setitem(device._HOST, warp_size, dataclasses.replace(model, **changes))
    for op in pyops.registry.values():
        op.forget()
    yield
    for op in pyops.registry.values():
        op.forget()


@pytest.fixture(autouse=True)
def _each_test_by_itself(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up what every test needs, in one fixture, because each fixture costs as much time as a short test.

    Random numbers are seeded per test, so they do not depend on the tests before. If a parameter of the test is a
    `Host`, ops run kernels on the CPU. The report notes specialisations that this test loaded on the host first. Ops
    that the test declares are removed after it. If a kernel faults on a GPU, the test that launched it fails.
    """
    _seed(0)
    ops, num_loaded = set(registry), len(host._loaded)
    callspec = getattr(request.node, "callspec", None)
    on_host = callspec is not None and any(isinstance(value, Host) for value in callspec.params.values())
    with config.cpu("kernels") if on_host else nullcontext():
        yield
    for function in list(host._loaded.values())[num_loaded:]:
        request.node.user_properties.append(("host", (function.kernel, function.constants)))
    for name in registry.keys() - ops:
        torch_library.remove(name)
        del registry[name]
    if request.node.get_closest_marker("gpu") and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@pytest.fixture
def no_grad() -> Iterator[None]:
    """Parameters of layers require grad, and kernels have no derivative."""
    with torch.no_grad():
        yield


def _noted(reporter: pytest.TerminalReporter, key: str, when: str) -> list[Any]:
    reports = [report for reports in reporter.stats.values() for report in reports]
    properties = [report.user_properties for report in reports if getattr(report, "when", None) == when]
    return [value for noted in properties for name, value in noted if name == key]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--specialisations", action="store_true", help="list what was compiled offline, and what never ran"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many specialisations were compiled offline and the slowest, which ran on the host, and which never
    did."""
    if not terminalreporter.config.option.specialisations:
        return
    compiles = _noted(terminalreporter, "offline_compile", "call")
    if compiles:
        total = sum(seconds for seconds, *_ in compiles)
        terminalreporter.section("offline compiles")
        terminalreporter.line(f"{len(compiles)} specialisations in {total:.0f} s of compiler time; the slowest:")
        for seconds, arch, kernel, constants in sorted(compiles, reverse=True)[:5]:
            terminalreporter.line(f"{seconds:6.2f} s  {arch}  {kernel}  {constants}")
    ran = {(kernel, constants) for kernel, constants in _noted(terminalreporter, "host", "teardown")}
    if ran:
        terminalreporter.section("specialisations on the host")
        own = {kernel for kernel, _ in ran} & set(kernels_cu.names())
        terminalreporter.line(f"{sum(kernel in own for kernel, _ in ran)} ran, of {len(own)} kernels")
    if ran and compiles:
        table = _values((kernel, constants) for _, _, kernel, constants in compiles)
        missing = {key: values - _values(ran).get(key, set()) for key, values in table.items()}
        skipped, every = sum(map(len, missing.values())), sum(map(len, table.values()))
        terminalreporter.line(f"{every - skipped} of {every} values of constants compiled offline; none ran with")
        for (kernel, constant), values in sorted(missing.items()):
            if values:
                terminalreporter.line(f"  {kernel}  {constant}={','.join(sorted(values))}")


def _values(specialisations: Iterable[tuple[str, str]]) -> dict[tuple[str, str], set[str]]:
    """{(kernel, constant): its values in all specialisations}."""
    found: dict[tuple[str, str], set[str]] = {}
    for text, constants in specialisations:
        for constant in constants.split():
            name, _, value = constant.partition("=")
            found.setdefault((text, name), set()).add(value)
    return found
