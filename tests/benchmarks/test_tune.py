"""`python -m benchmarks tune` without a GPU: stubs of plans' choices, and times by a formula."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pyops
from benchmarks import __main__ as main
from benchmarks import shapes, timing, tune
from benchmarks.timing import Spread


@dataclass(frozen=True)
class Join:
    groups: int


@dataclass(frozen=True)
class Config:
    num_warps: int = 4
    splits: int = 1
    early: bool = False
    scale: float = 1.0
    join: Join = Join(2)

    def candidates(self, problem: Any, device: Any) -> list[Config]:
        warps = [replace(self, num_warps=count) for count in (self.num_warps // 2, 2 * self.num_warps)]
        return [*warps, replace(self, splits=2 * self.splits), replace(self, early=not self.early)]


class Problem:
    def bucket(self) -> str:
        return "tokens=16"


class Tuning:
    """A stub of pyops.tuning."""

    def __init__(self, folder: Path) -> None:
        self.TABLES = folder
        self.table = SimpleNamespace(cache_clear=lambda: None)
        self.override: Any = None
        self.key, self.is_config = pyops.tuning.key, pyops.tuning.is_config

    def config(self, op: str, problem: Any, device: Any, choose: Callable[[Any, Any], Any]) -> Any:
        return self.override or choose(problem, device)

    @contextmanager
    def forced(self, op: str, config: Any) -> Iterator[None]:
        self.override = config
        try:
            yield
        finally:
            self.override = None


class Machine:
    """An op with a plan, results, and times: `us` of the Config with which its plan was made."""

    def __init__(self, tuning: Tuning, us: Callable[[Any], float], first: Any = None) -> None:
        self.name = "an_op"
        self.tuning, self.us, self.first = tuning, us, first or Config()
        self.plan: Any = None
        self.asked: list[Any] = []

    def forget(self) -> None:
        self.plan = None

    def check(self) -> None:
        if self.plan is None:
            device = SimpleNamespace(name="imagined-gpu")
            self.tuning.config("another_op", Problem(), device, lambda problem, device: "another")
            self.plan = self.tuning.config(self.name, Problem(), device, lambda problem, device: self.first)
        assert self.plan.num_warps != 8, "wrong results"

    def time_us(self) -> Spread:
        self.asked.append(self.plan)
        us = self.us(self.plan)
        return Spread(us, us - 0.1, us + 0.1)

    def tune(self, rounds: int = 2) -> tune.Tuned:
        op: Any = self
        return tune.tune(op, self.tuning, self.check, self.time_us, rounds)


def choice(config: Any) -> tune.Choice:
    return tune.Choice(Problem(), SimpleNamespace(name="imagined-gpu"), config)


def test_the_fastest_config_is_found_by_changing_two_fields(tmp_path: Path) -> None:
    machine = Machine(Tuning(tmp_path), lambda config: 10 + config.num_warps - 2 * config.early - config.splits / 10)
    tuned = machine.tune()
    assert tuned.choice.config == Config()
    assert tuned.best == Config(num_warps=2, early=True)  # 8 warps give wrong results
    assert (tuned.best_us.median, tuned.choice_us.median) == (9.9, 13.9)
    assert tuned.tried[0].config == tuned.best
    assert [one.config for one in tuned.tried if one.us is None] == [Config(num_warps=8)]
    assert "wrong results" in tuned.tried[-1].trouble
    assert machine.asked[-2:] == [Config(), tuned.best]  # timed again, alternating
    assert machine.plan is None  # no plan of a forced Config is left
    assert machine.tuning.override is None


def test_one_round_changes_one_field(tmp_path: Path) -> None:
    machine = Machine(Tuning(tmp_path), lambda config: 10 + config.num_warps - 2 * config.early)
    tuned = machine.tune(rounds=1)
    assert all(len(tune.difference(one.config, Config())) <= 1 for one in tuned.tried)


def test_no_config_is_timed_twice_in_the_search(tmp_path: Path) -> None:
    machine = Machine(Tuning(tmp_path), lambda config: 5.0)
    machine.tune(rounds=5)
    *search, _, _ = machine.asked
    assert len(search) == len(set(search))


def test_choice_is_kept_within_the_spread(tmp_path: Path) -> None:
    machine = Machine(Tuning(tmp_path), lambda config: 5.0 - 0.15 * config.early)
    tuned = machine.tune()
    assert tuned.tried[0].config.early
    assert tuned.best == tuned.choice.config == Config()


def test_lucky_time_in_the_search_is_not_trusted(tmp_path: Path) -> None:
    machine = Machine(Tuning(tmp_path), lambda config: 5.0 if machine.asked.count(config) > 1 else 5.0 - config.early)
    assert machine.tune().best == Config()


def test_choice_with_wrong_results_is_an_error(tmp_path: Path) -> None:
    machine = Machine(Tuning(tmp_path), lambda config: 1.0, first=Config(num_warps=8))
    with pytest.raises(AssertionError, match="wrong results"):
        machine.tune()


def test_op_without_a_config_is_an_error(tmp_path: Path) -> None:
    machine = Machine(Tuning(tmp_path), lambda config: 1.0)
    machine.check = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="an_op chooses no Config"):
        machine.tune()


def tuned(best: Config, first: Config | None = None) -> tune.Tuned:
    spread = Spread(1.0, 0.9, 1.1)
    tried = [tune.Timed(best, spread), tune.Timed(Config(num_warps=8), None, "wrong results")]
    return tune.Tuned(choice(first or Config()), tried, best, spread, Spread(2.0, 1.9, 2.1))


def test_tried_configs_are_printed() -> None:
    case = shapes.Case(pyops.registry["rms_norm"], {"num_tokens": 16})
    text = tune.render(case, tuned(Config(splits=2, early=True)))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert lines[2:] == [["splits=2 early=True", "1.00", "0.90-1.10", ""], ["num_warps=8", "", "", "wrong results"]]
    assert "Best: splits=2 early=True, 1.00 us; the choice 2.00 us." in text
    assert "tokens=16" in text
    assert "The choice stays" in tune.render(case, tuned(Config()))


def test_table_holds_the_best_config(tmp_path: Path) -> None:
    """All its fields that a table can hold."""
    path = tmp_path / "tuning" / "imagined-gpu.json"
    tune.save(path, "an_op", tuned(Config(splits=2, early=True)))
    assert json.loads(path.read_text()) == {"an_op": {"Config tokens=16": {"num_warps": 4, "splits": 2, "early": True}}}
    path.write_text(
        '{"an_op": {"Config tokens=32": {"splits": 4}, "Config tokens=16": {"num_warps": 2}}, "other": {"x": {"y": 1}}}'
    )
    tune.save(path, "an_op", tuned(Config(splits=2)))
    best = {"num_warps": 4, "splits": 2, "early": False}
    assert json.loads(path.read_text())["an_op"] == {"Config tokens=16": best, "Config tokens=32": {"splits": 4}}
    assert json.loads(path.read_text())["other"] == {"x": {"y": 1}}


def test_table_entry_goes_when_the_choice_is_best(tmp_path: Path) -> None:
    path = tmp_path / "imagined-gpu.json"
    path.write_text('{"an_op": {"Config tokens=16": {"splits": 2}}}')
    tune.save(path, "an_op", tuned(Config()))
    assert json.loads(path.read_text()) == {}


def test_table_holds_scalars_only(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot hold the Config's join"):
        tune.save(tmp_path / "imagined-gpu.json", "an_op", tuned(Config(join=Join(4))))


# The command


def test_axes_choose_the_cases() -> None:
    op = pyops.registry["rms_norm"]
    cases = tune.cases_of(op, ["num_tokens=1,16", "hidden_size=64"])
    assert [case.axes for case in cases] == [
        {"num_tokens": count, "hidden_size": 64, "dtype": "bfloat16"} for count in (1, 16)
    ]
    assert tune.cases_of(op, ["dtype=float16"])[0].axes["dtype"] == "float16"
    with pytest.raises(ValueError, match="no axis is called tokens; there are num_tokens"):
        tune.cases_of(op, ["tokens=1"])


@pytest.mark.parametrize(
    ("words", "message"),
    [(["no_such_op"], "no op is called no_such_op"), (["silu_and_mul_quant", "quant_dtype=int4"], "rules out one of")],
)
def test_mistakes_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["tune", *words])
    assert message in capsys.readouterr().err


def test_command_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main.main(["tune", "rms_norm"]) == 2
    assert "torch sees none" in capsys.readouterr().err


def test_op_is_tuned_for_every_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = Tuning(tmp_path)
    machine = Machine(stub, lambda config: 5.0 - config.early)
    machine.name = "rms_norm"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "tuning", stub)
    monkeypatch.setattr(tune, "on_gpu", lambda case, effort: (machine.check, machine.time_us))
    monkeypatch.setattr(pyops.registry["rms_norm"], "forget", machine.forget)
    assert main.main(["tune", "rms_norm", "num_tokens=1,16", "--save"]) == 0
    best = {"num_warps": 4, "splits": 1, "early": True}
    assert json.loads((tmp_path / "imagined-gpu.json").read_text()) == {"rms_norm": {"Config tokens=16": best}}
    assert capsys.readouterr().out.count("Best: early=True, 4.00 us; the choice 5.00 us.") == 2


def test_case_is_checked_against_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU tensors, for which calls run the reference."""
    arguments = shapes.Case.arguments
    monkeypatch.setattr(shapes.Case, "arguments", lambda case, seed=0, device="": arguments(case, seed, "cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(L2_cache_size=1 << 20))
    monkeypatch.setattr(tune, "gpu_us", lambda calls, effort, renew: Spread(len(calls), 0.0, 0.0))
    op = pyops.registry["rms_norm"]
    check, time_us = tune.on_gpu(shapes.Case(op, {"num_tokens": 3, "hidden_size": 64}), timing.Effort(sets=4))
    check()
    assert time_us().median == 4
    monkeypatch.setattr(type(op), "__call__", lambda *args: None)
    with pytest.raises(AssertionError, match="rms_norm: out"):
        check()
