"""Which tests a run has that names none: shares of what rotates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pyops
from tests import conftest
from tests.support import profiles

SHARES = 4


@pytest.fixture(autouse=True)
def _shares(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = replace(profiles.PROFILE, shares=SHARES)
    monkeypatch.setattr(profiles, "PROFILE", profile)
    monkeypatch.setattr(conftest, "PROFILE", profile)


def _in_each_share(monkeypatch: pytest.MonkeyPatch, found: Any) -> list[list[Any]]:
    results = []
    for rotation in range(500, 500 + SHARES):
        monkeypatch.setattr(profiles, "rotation", lambda rotation=rotation: rotation)
        results.append(list(found()))
    return results


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5, 11])
def test_shares_have_every_value(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each has at least one."""
    shares = _in_each_share(monkeypatch, lambda: profiles.share(range(number), "rms_norm"))
    assert set().union(*shares) == set(range(number))
    assert all(shares) or not number
    assert all(share == sorted(set(share)) for share in shares)
    assert max(map(len, shares)) <= -(-number // SHARES)


def _item(name: str, *marks: pytest.Mark, **params: Any) -> Any:
    callspec = {"callspec": SimpleNamespace(params=params)} if params else {}
    found = {mark.name: mark for mark in marks}
    path = Path("tests/every_op/test_of_ops.py")
    item = {"nodeid": f"{name}[{params}]", "path": path, "get_closest_marker": found.get} | callspec
    return type("Item", (), item)()


def test_every_test_is_in_some_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op is in the same share in every test; a test that does not rotate is in all."""
    ops = list(pyops.registry.values())[:20]
    rotates, slow = pytest.mark.rotates.mark, pytest.mark.slow.mark
    items = [_item(f"a_{i}") for i in range(3)]
    items += [_item(name, rotates, op=op) for name in ("b", "c") for op in ops]
    items += [_item(f"d_{i}", slow, size=i) for i in range(9)]
    cases = [_item("e", pytest.mark.rotates("cases").mark, op=op, case=i) for op in ops for i in range(6)]
    shares = _in_each_share(monkeypatch, lambda: conftest._rotated(items + cases))
    for share in shares:
        assert share[:3] == items[:3]
        in_test = {name: [item.callspec.params["op"] for item in share if item.nodeid[0] == name] for name in "bce"}
        assert in_test["b"] == in_test["c"]
        assert set(in_test["e"]) == set(ops)
    counts = [sum(item in share for share in shares) for item in items]
    assert counts == [SHARES] * 3 + [1] * (len(items) - 3)
    assert all(sum(item in share for share in shares) in (1, 2) for item in cases)


def test_without_a_device_shares_are_of_what_runs_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "_device", lambda: None)
    cases, gpu = pytest.mark.rotates("cases").mark, pytest.mark.gpu.mark
    ops = list(pyops.registry.values())[:20]
    items = [_item("e", cases, *([gpu] * on_gpu), op=op, on_gpu=on_gpu) for op in ops for on_gpu in (True, False)]
    for share in _in_each_share(monkeypatch, lambda: conftest._chosen(items)):
        assert set(share) == set(items[1::2])


def test_share_is_by_the_hour_of_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.delenv("PYOPS_TEST_SHARE", raising=False)
    for answer in ("7199\n", "7200\n", ""):  # "" outside of a repository
        monkeypatch.setattr(profiles.subprocess, "run", lambda *_, answer=answer, **__: SimpleNamespace(stdout=answer))
        found.append(profiles.rotation.__wrapped__())
    monkeypatch.setenv("PYOPS_TEST_SHARE", "11")
    assert [*found, profiles.rotation.__wrapped__()] == [1, 2, 0, 10]


def test_share_of_the_environment_is_that_of_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_TEST_SHARE", "3")
    monkeypatch.setattr(profiles, "rotation", profiles.rotation.__wrapped__)
    assert profiles.name_of_share() == "3/4"
