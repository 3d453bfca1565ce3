"""Every op with a Config: tables of Configs and candidates of tuning are safe to run.

No line here knows an op by name, except for two lists: one op of every family, and the cases that no default covers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import pyops
from benchmarks import tune
from benchmarks.timing import Spread
from pyops import tuning
from pyops._core import config
from pyops._core.launch.scratch import Scratch
from pyops._core.launch.tensor_map import TensorMap
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops._core.tensors.tensor import TensorArg
from pyops.example import ArgMaker
from pyops.host.toolchain import toolchains
from pyops.testing.calls import assert_results, expected, run
from tests.support import axes
from tests.support.calls import example
from tests.support.profiles import PROFILE, sample

HOST = device.host()
NAMED = replace(HOST, name="imagined-gpu")  # a device that may have a table
# Tokens of three buckets, with two problems in each. In the last two, several plans count tokens in equally many units.
BUCKETS = [(5, 7), (129, 256), (2100, 4096)]


def _axes(op: Op, num_tokens: int) -> axes.Axes:
    return {"num_tokens": num_tokens, **axes.fullest(op)}


def _described(op: Op, num_tokens: int = 5, on: device.Device = HOST, aligned: bool = True) -> list[Any]:
    assert op.example is not None
    args = op.example(ArgMaker(on, op.name), **_axes(op, num_tokens))
    return [replace(arg, alignment=4) if isinstance(arg, TensorArg) and not aligned else arg for arg in args]


def _choice(op: Op, *args: Any, **how: Any) -> tune.Choice | None:
    """The problem and the Config of the op's plan; None if the plan chooses nothing."""
    with tune.choices(tuning, op.name) as seen:
        op.launches(*_described(op, *args, **how))
    assert len(seen) <= 1, f"{op.name}: one Config is forced and tuned, and the plan chooses {len(seen)}"
    return seen[0] if seen else None


def _chosen(op: Op, *args: Any, **how: Any) -> tune.Choice:
    found = _choice(op, *args, **how)
    assert found is not None
    return found


def _candidates(choice: tune.Choice) -> list[Any]:
    found = dict.fromkeys(choice.config.candidates(choice.problem, choice.device))
    return [candidate for candidate in found if candidate != choice.config]


def _launched(op: Op, *args: Any, **how: Any) -> list[tuple[Any, ...]]:
    """The launches of the plan, for comparison."""
    return [
        (
            str(one.specialisation),
            (one.grid, one.block, one.cluster, one.shared),
            {name: _comparable(value) for name, value in one.fixed.items()},
        )
        for one in op.launches(*_described(op, *args, **how))
    ]


def _comparable(value: Any) -> Any:
    if isinstance(value, Scratch):
        return value.nbytes
    if isinstance(value, TensorArg):
        return value.name
    return str(value) if isinstance(value, TensorMap) else value


OPS = [pytest.param(op, id=name) for name, op in pyops.registry.items() if _choice(op)]


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of tables."""
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    tuning.table.cache_clear()
    yield tmp_path
    tuning.table.cache_clear()


def test_every_family_has_an_op_here() -> None:
    """One op for each Config class of each family."""
    families = {
        "rms_norm",
        "dynamic_per_token_scaled_fp8_quant",
        "silu_and_mul",
        "static_scaled_fp8_quant",
        "awq_dequantize",
        "gelu_and_mul_sparse",
        "scaled_fp4_quant",
        "hadacore_transform_out",
        "skinny_linear",
        "linear",
        "rotary_embedding",
        "reshape_and_cache",
        "reshape_and_cache_flash",
        "top_k_per_row_decode",
        "top_k_top_p_sampling_from_logits",
        "paged_attention_v1",
        "paged_attention_varlen",
        "sm100_cutlass_mla_decode",
    }
    assert families <= {param.id for param in OPS}


@pytest.mark.rotates
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("op", OPS)
def test_forced_config_is_used(op: Op, aligned: bool) -> None:
    """And no candidate is redundant: each changes the launch."""
    for arch in ("sm_75", "sm_80", "sm_90", "sm_100", "gfx942"):
        for num_tokens in (1, 5, 129, 4096):
            how = {"num_tokens": num_tokens, "on": device.model(arch), "aligned": aligned}
            choice, launched = _chosen(op, **how), _launched(op, **how)
            candidates = _candidates(choice)
            assert candidates
            for candidate in candidates:
                with tuning.forced(op.name, candidate):
                    assert _launched(op, **how) != launched, candidate
                    assert tuning.last[op.name] is candidate


@pytest.mark.rotates
@pytest.mark.parametrize("op", OPS)
def test_table_is_used(op: Op, tables: Path) -> None:
    """As tuning writes it, for every problem of the bucket with a choice of this class."""
    for first, second in BUCKETS:
        choice = _chosen(op, first)
        key, key_of_second = (tuning.key(one.problem, one.config) for one in (choice, _chosen(op, second)))
        spread = Spread(1.0, 1.0, 1.0)
        for candidate in _candidates(choice):
            tuned = tune.Tuned(choice, [], candidate, spread, spread)
            tune.save(tables / f"{NAMED.name}.json", op.name, tuned)
            tuning.table.cache_clear()
            for num_tokens in (first, second):
                if num_tokens == first or key_of_second == key:
                    with tuning.forced(op.name, candidate):
                        forced = _launched(op, num_tokens)
                    assert _launched(op, num_tokens, NAMED) == forced, (num_tokens, candidate)
            assert _launched(op, first) == _launched(op, first, replace(NAMED, name="another-gpu"))


@pytest.mark.parametrize("op", OPS)
def test_problems_of_a_bucket_are_equal(op: Op) -> None:
    """The same call twice gives equal problems. Few and many tokens give different problems."""
    bucket = _chosen(op).problem.bucket()
    assert _chosen(op).problem.bucket() == bucket
    assert _chosen(op, 4096).problem.bucket() != bucket
    assert len(bucket) < 120


@pytest.mark.parametrize("op", OPS)
def test_tuning_finds_the_fastest_candidate(op: Op) -> None:
    """With times by a formula."""
    choice = _chosen(op)
    for fastest in _candidates(choice):

        def time_us(fastest: Any = fastest) -> Spread:
            us = 1.0 if tuning.last[op.name] == fastest else 2.0
            return Spread(us, us - 0.1, us + 0.1)

        tuned = tune.tune(op, tuning, lambda: _launched(op), time_us, rounds=1)
        assert tuned.choice.config == choice.config
        assert tuned.best == fastest
        assert len(tuned.tried) == 1 + len(_candidates(choice))


needs_compiler = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")


@pytest.mark.rotates
@needs_compiler
@pytest.mark.parametrize("op", OPS)
def test_every_candidate_gives_the_same_result(op: Op) -> None:
    """For two problems of one bucket."""
    _assert_candidates(op, *(_axes(op, num_tokens) for num_tokens in BUCKETS[0]))


# Axes for which a plan chooses a Config of another class, or one with other candidates.
OTHERS: dict[str, axes.Axes] = {
    "rms_norm": {"hidden_size": 769},
    "fused_add_rms_norm": {"hidden_size": 64},
    "reshape_and_cache": {"num_tokens": 5},  # grouped by slot
    "top_k_per_row_decode": {"vocab_size": 17000},
    "top_k_top_p_sampling_from_logits": {"with_top_k": False, "with_top_p": False},
    "paged_attention_v1": {"dtype": "float32", "kv_cache_dtype": "auto"},
    "paged_attention_varlen": {"dtype": "float32", "kv_cache_dtype": "auto"},
    "linear": {"dtype": "float32"},
    "sm100_cutlass_mla_decode": {"dtype": "float32"},
}


@needs_compiler
@pytest.mark.parametrize("name", OTHERS)
def test_candidates_of_other_classes_give_the_same_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("pyops.ops.cache.reshape_and_cache"), "_MAX_UNGROUPED_TOKENS", -1)
    _assert_candidates(pyops.registry[name], _axes(pyops.registry[name], 5) | OTHERS[name])


def _assert_candidates(op: Op, *cases: axes.Axes) -> None:
    """Compare the op with its reference on the host backend, for every candidate of the choice.

    The register bound min_blocks has no effect there, so candidates that differ only in it count as one.
    """
    calls = [example(op, **case) for case in cases]
    with config.cpu("kernels"):
        with tune.choices(tuning, op.name) as seen:
            op.forget()
            for args in calls:
                op.check(*args)
        assert len(seen) == len(calls)
        assert len({one.problem.bucket() for one in seen}) == 1
        right = [expected(op, args) for args in calls]
        try:
            for candidate in sample(_distinct(seen[0]), PROFILE.candidates, op.name):
                op.forget()
                with tuning.forced(op.name, candidate):
                    for args, results in zip(calls, right, strict=True):
                        assert_results(op, results, run(op, args))
                assert tuning.last[op.name] is candidate
        finally:
            op.forget()


def _distinct(choice: tune.Choice) -> list[Any]:
    """The candidates, without duplicates that differ only in min_blocks."""
    found = {}
    for candidate in _candidates(choice):
        names = [one.name for one in fields(candidate) if one.name != "min_blocks"]
        found[tuple(getattr(candidate, name) for name in names)] = candidate
    return list(found.values())
