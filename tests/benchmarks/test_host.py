"""Host times without a GPU: every op has one, a cache hit takes the path of a GPU call, the fake driver never leaks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pyops
from benchmarks import host, shapes
from benchmarks.fake_driver import fake_driver
from pyops._core.launch import workspace
from pyops._core.op.wrapper import NAMESPACE
from pyops._core.system import device, driver

RMS_NORM = pyops.registry["rms_norm"]


def arguments() -> tuple[Any, ...]:
    return shapes.Case(RMS_NORM, {"num_tokens": 3, "hidden_size": 64}).arguments(device="cpu")


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CALLS", 2)
    monkeypatch.setattr(host, "_WARM", 2)
    monkeypatch.setattr(host, "NEW_SIZES", range(301, 305))


@pytest.mark.usefixtures("few_calls")
def test_every_op_has_a_host_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "RESULTS", tmp_path / "results" / "cpu-host.json")
    assert host.main(["--batches", "1", "--save"]) == 0
    result = json.loads(host.RESULTS.read_text())
    assert [row["op"] for row in result["hits"]] == list(pyops.registry)
    for row in result["hits"]:
        assert row["launches"]
        assert row["ns"] >= row["lowest_ns"] > 0
        assert row["other_ns"] >= row["lowest_other_ns"] > 0
    assert {row["op"] for row in result["misses"]} == set(host.MISSES)
    assert all(row["us"] >= row["lowest_us"] > 0 for row in result["misses"])
    text = host.RESULTS.with_suffix(".md").read_text()
    assert all(f"| {name} " in text for name in pyops.registry)


def test_pairs_equal_those_of_the_wrapper() -> None:
    pairs = {name: host.num_pairs(pyops.registry[name]) for name in ("rms_norm", "paged_attention_v2")}
    assert pairs == {"rms_norm": 2, "paged_attention_v2": 55}


def called(call: Any) -> list[str]:
    """Names of the functions that `call` calls, Python's and C's."""
    names = []

    def note(frame: Any, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            names.append(frame.f_code.co_name if event == "call" else function.__name__)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize("name", ["rms_norm", "paged_attention_v2"])
def test_cache_hit_takes_the_gpu_path(name: str) -> None:
    op = pyops.registry[name]
    with fake_driver():
        call = host.call_of(host.case_of(op))
        miss = called(call)
        for _ in range(2):
            call()
        hit = called(call)
    assert "prepare" in miss
    assert {"check", "data_ptr", "pack_into"} <= set(hit)  # the guard, the addresses, the kernel's parameters
    python = {"prepare", "_remember", "check_overlap", "call_unkept", "_recover", "describe"}
    assert not python & set(hit)
    assert hit.count("__missing__") == 0  # the state of a stream is made once


def replaced_by_the_fake() -> list[Any]:
    functions = [device.get, device.host, device.count, driver.get, driver.raise_limits, driver.relaxed_capture]
    return [*functions, workspace.allocate_torch, workspace.zeros, {**NAMESPACE}]


def test_the_fake_driver_does_not_leak() -> None:
    op, args = RMS_NORM, arguments()
    before, specialisations, compiled = replaced_by_the_fake(), dict(op.specialisations), op.compiled()

    def fail_within() -> None:
        with fake_driver():
            op(*args)
            assert args[0].isnan().all()  # no kernel ran
            assert [one.origin for one in op.compiled()] == ["fake"]
            assert replaced_by_the_fake() != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_within()
    assert replaced_by_the_fake() == before
    assert (op.specialisations, op.compiled()) == (specialisations, compiled)
    assert not op.plans
    op(*args)
    again = arguments()
    op.applied(op.reference, again)()
    assert torch.equal(args[0], again[0])
