"""Overrides of a plan's choice: a forced Config, and the table of the device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyops import tuning
from pyops._core.system import device


@dataclass(frozen=True)
class Problem:
    num_rows: int

    def bucket(self) -> str:
        return f"rows={tuning.power_of_two(self.num_rows)}"


@dataclass(frozen=True)
class Config:
    num_warps: int
    cluster_size: int = 1

    def __post_init__(self) -> None:
        if self.num_warps > 9:
            raise ValueError("no room")

    def candidates(self, problem: Problem, device: device.Device) -> list[Config]:
        return tuning.varied(self, num_warps=tuning.beside(self.num_warps, 1, 8))


H200 = replace(device.model(), name="nvidia-h200")


def choose(problem: Problem, device: device.Device) -> Config:
    return Config(num_warps=problem.num_rows % 3)


def config(num_rows: int, on: device.Device = H200, op: str = "an_op") -> Config:
    return tuning.config(op, Problem(num_rows), on, choose)


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of tables."""
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    monkeypatch.setattr(tuning, "last", {})
    tuning.table.cache_clear()
    yield tmp_path
    tuning.table.cache_clear()


def write(tables: Path, name: str, **table: Any) -> None:
    (tables / f"{name}.json").write_text(json.dumps(table))


def test_without_a_table_the_choice_is_used() -> None:
    assert config(5) == Config(2)
    assert config(5, device.model()) == Config(2)


def test_table_changes_the_fields_that_it_names(tables: Path) -> None:
    """For its own op, its own buckets and its own device."""
    write(tables, "nvidia-h200", an_op={"Config rows=8": {"cluster_size": 4}})
    assert config(5) == config(8) == Config(2, 4)
    assert config(4) == Config(1)
    assert config(9) == Config(0)
    assert config(5, op="another_op") == Config(2)
    assert config(5, replace(H200, name="nvidia-b200")) == Config(2)
    assert config(5, device.model()) == Config(2)


def test_table_names_fields_of_the_config(tables: Path) -> None:
    write(tables, "nvidia-h200", an_op={"Config rows=8": {"warps": 4}})
    with pytest.raises(TypeError, match="warps"):
        config(5)


def test_table_serves_choices_with_configs_of_the_same_classes(tables: Path) -> None:
    """A field may be a Config of several classes, or None: an entry with its fields is for the class that it names."""

    @dataclass(frozen=True)
    class Combine:
        groups: int
        candidates = None

    @dataclass(frozen=True)
    class Outer:
        second: Any
        candidates = None

    write(tables, "nvidia-h200", an_op={"Outer Combine rows=8": {"second": {"groups": 4}}})
    for second, expected in ((Combine(1), Combine(4)), (Config(1), Config(1)), (None, None)):
        assert tuning.config("an_op", Problem(5), H200, lambda *_, one=second: Outer(one)) == Outer(expected)  # type: ignore[misc]


def test_forced_config_overrides_the_table(tables: Path) -> None:
    """Contexts nest, and also end with an error."""
    write(tables, "nvidia-h200", an_op={"Config rows=8": {"cluster_size": 4}})
    with tuning.forced("an_op", Config(7)):
        assert config(5) == config(500) == Config(7)
        with tuning.forced("an_op", Config(8)):
            assert config(5) == Config(8)
            assert config(5, op="another_op") == Config(2)
        with pytest.raises(ZeroDivisionError), tuning.forced("an_op", Config(9)):
            raise ZeroDivisionError
        assert config(5) == Config(7)
    assert config(5) == Config(2, 4)


def test_last_config_of_an_op_is_known() -> None:
    config(5)
    config(6, op="another_op")
    config(7)
    assert tuning.last == {"an_op": Config(1), "another_op": Config(0)}


@pytest.mark.parametrize(("count", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1025, 2048)])
def test_power_of_two(count: int, power: int) -> None:
    assert tuning.power_of_two(count) == power


# Parts of candidates


def test_one_field_is_changed_to_each_of_its_values() -> None:
    """Values that a Config refuses are left out."""
    found = tuning.varied(Config(4, 2), num_warps=(4, 8, 16), cluster_size=[1, 4])
    assert found == [Config(4, 2), Config(8, 2), Config(4, 1), Config(4, 4)]


def test_count_is_halved_and_doubled_within_bounds() -> None:
    assert tuning.beside(4, 1, 16) == [2, 8]
    assert tuning.beside(4, 4, 7) == []
    assert tuning.beside(1, 1, 2) == [2]


@pytest.mark.parametrize(
    ("num_threads", "min_blocks", "found"), [(128, 8, [7, 8, 9]), (256, 8, [7, 8]), (1024, 1, [1, 2])]
)
def test_occupancies(num_threads: int, min_blocks: int, found: list[int]) -> None:
    """At least one block, and no more threads than an SM holds."""
    assert list(tuning.occupancies(num_threads, min_blocks)) == found


def test_other_blocks_keep_the_number_of_threads() -> None:
    @dataclass(frozen=True)
    class Blocks:
        num_threads: int
        min_blocks: int | None
        row_threads: int = 32

    assert tuning.resized(Blocks(256, 4), 128, row_threads=64) == Blocks(128, 8, 64)
    assert tuning.resized(Blocks(256, 1), 1024) == Blocks(1024, 1)
    assert tuning.resized(Blocks(256, None), 128) == Blocks(128, None)


def test_device_names_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As benchmarks name the folder of its results."""
    properties = {
        "name": b"NVIDIA H200",
        "major": 9,
        "minor": 0,
        "multiProcessorCount": 132,
        "warpSize": 32,
        "sharedMemPerBlock": 48 * 1024,
    }
    runtime = SimpleNamespace(is_hip=False, getDeviceProperties=lambda _: properties)
    monkeypatch.setattr(device, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    assert device.get.__wrapped__(0).name == "nvidia-h200"
    assert (Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h200").is_dir()
