"""`benchmarks.models` and `benchmarks.fit` without a GPU: drawn rows, the report of times, the fit itself."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from concurrent.futures import Executor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pyops
from benchmarks import drawn, fit, gemm_layers, installed, models, packed_products, rivals
from benchmarks.gemm_layers import MODELS, Row
from pyops import SCALAR_TYPES
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops.ops.linear.gemm_shape import GemmShape
from pyops.ops.linear.grouped_shape import GroupedShape
from pyops.ops.linear.packed_shape import PackedShape
from pyops.ops.linear.wq_grouped_problem import WqGroupedShape
from pyops.tuning import engines
from tests.ops.linear.test_packed_choice import problem as packed

HOPPER = device.model("sm_90")
FAMILIES = list(fit.FAMILIES.values())


@pytest.mark.parametrize(
    "kind", [*gemm_layers.KINDS, *(kind for kind in packed_products.KINDS if kind not in gemm_layers.KINDS)]
)
def test_rows_are_layers_of_models(kind: str) -> None:
    draw = models.module(kind).draw
    rows = draw(kind, 30, seed=3)
    layers = {layer for model in MODELS.values() for parts in (1, 2, 4, 8) for layer in model.layers(parts).values()}
    assert len({str(row) for row in rows}) == 30
    assert all((row.n, row.k) in layers and 1 <= row.m <= 8192 for row in rows)
    assert rows == draw(kind, 30, seed=3)
    assert rows != draw(kind, 30, seed=4)


def test_layers_of_tensor_parallel() -> None:
    """Llama 3.1 8B on four GPUs; a key head is not divided."""
    assert MODELS["Llama 3.1 8B"].layers(4) == {
        "qkv": (1024 + 2 * 256, 4096),
        "o": (4096, 1024),
        "gate_up": (7168, 4096),
        "down": (4096, 3584),
        "head": (32064, 4096),
    }
    assert MODELS["Falcon 7B"].layers(2)["qkv"] == (71 * 64 // 2 + 2 * 64, 4544)


def test_report_compares_with_the_best_rival() -> None:
    times = {
        Row("bf16", 1, 16, 16, "a"): {"pyops": 2.0, "cuBLAS": 4.0, "vLLM": 1.0},
        Row("bf16", 2, 16, 16, "b"): {"pyops": 1.0, "cuBLAS": 8.0},
    }
    text = models.report(times)
    summary = next(line for line in text.splitlines() if line.startswith("| bf16 "))
    assert [cell.strip() for cell in summary.split("|")[1:-1]] == ["bf16", "2", "0.500", "1", "2.00"]
    assert text.index("bf16:1x16x16") < text.index("bf16:2x16x16"), "the worst row comes first"
    each = [[cell.strip() for cell in line.split("|")[1:5]] for line in text.splitlines() if line.startswith("| bf16 ")]
    assert each[1:] == [["bf16", "cuBLAS", "2", "0.250"], ["bf16", "vLLM", "1", "2.000"]]
    assert models.report({}) == "no row was timed with a rival"


def test_kinds_take_turns() -> None:
    rows = list(models.in_rounds(["bf16", "decode", "norms"], 3, seed=3))
    assert [row.kind for row in rows] == ["bf16", "decode", "norms"] * 3
    assert [row for row in rows if row.kind == "norms"] == models.module("norms").draw("norms", 3, seed=3)


def test_a_row_that_ends_its_process_costs_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows after it get a new process, without a rival that ended two. After the last minute no row begins."""
    row, times, started = Row("bf16", 1, 16, 16, "a"), {"pyops": 1.0, "cuBLAS": 2.0}, list[list[str]]()
    crashed, hangs = BrokenProcessPool("died"), TimeoutError("hangs")
    results = iter([(times, None), ({}, "FA3"), crashed, hangs, ({}, "FA3"), (times, None), (times, None)])

    def measure(row: Row) -> Any:
        if isinstance(result := next(results), Exception):
            raise result
        return result

    def start(without: Collection[str]) -> Executor:
        started.append(list(without))
        return ThreadPoolExecutor(1)

    monkeypatch.setattr(models, "_measure", measure)
    found = [one for _, one in models.measured([row] * 7, 1.0, ["compile"], start)]
    assert found == [times, {}, {}, {}, {}, times, times]
    assert started == [["compile"]] * 4 + [["compile", "FA3"]]
    assert "bf16:1x16x16: BrokenProcessPool: died" in capsys.readouterr().err
    assert list(models.measured([row], 0.0, (), start)) == []


def test_a_rival_that_hangs_costs_its_time_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"out": torch.ones(3)}

    def hangs(_: Any) -> Any:
        return lambda: time.sleep(30)

    contenders = {"pyops": lambda _: lambda: None, "FLA": hangs, "vLLM": lambda _: lambda: torch.ones(3)}
    monkeypatch.setattr(installed, "patience_s", 0.05)
    assert set(drawn.agreeing("row", contenders, call, "out", 0.01)) == {"pyops", "vLLM"}
    assert "row: FLA: takes more than 0.05 s" in capsys.readouterr().err


def test_a_rival_that_is_left_out_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    op = pyops.registry["rms_norm"]
    assert set(rivals.builders(op, ("torch", "reference"))[0]) == {"torch", "reference"}
    monkeypatch.setattr(installed, "left_out", {"torch"})
    assert set(rivals.builders(op, ("torch", "reference"))[0]) == {"reference"}


def shapes(family: fit.Family) -> dict[str, Any]:
    """{row: a shape}."""
    sizes = (2, 1024, 4096), (16, 4096, 4096), (64, 28672, 4096), (192, 4096, 14336), (1024, 7168, 3584)
    found: dict[str, Any] = {}
    for m, n, k in sizes:
        if family.name == "packed":
            for layout in ("marlin", "awq"):
                found[f"{layout}:{m}x{n}x{k}"] = PackedShape.of(packed(m, n, k, HOPPER, layout))
            continue
        if family.name.endswith("grouped"):
            for block_size in (16, 64, 128):
                sizes: Any = {"rows": 8 * m, "num_experts": 32, "n": n, "k": k, "top_k": 4, "block_size": block_size}
                if family.name == "wq_grouped":
                    of_weight = {"type": SCALAR_TYPES["uint4"], "group_size": 128, "scale_dtype": dtypes.bfloat16}
                    found[f"blocks of {block_size}:{m}x{n}x{k}"] = WqGroupedShape(**sizes, **of_weight)
                    continue
                found[f"blocks of {block_size}:{m}x{n}x{k}"] = GroupedShape(**sizes)
            continue
        for kind in ("bf16", "gated", "blocks"):
            dtype, blocked, gated = dtypes.bfloat16, kind == "blocks", kind == "gated"
            if blocked:
                dtype = dtypes.float8_e4m3fn
            found[f"{kind}:{m}x{n}x{k}"] = GemmShape(
                m,
                n,
                k,
                dtype,
                dtypes.bfloat16,
                16 // dtype.itemsize,
                block_scaled=blocked,
                is_gated=gated,
                is_plain=kind == "bf16",
            )
    return found


def samples(family: fit.Family, rates: Any) -> list[fit.Sample]:
    """Times that the model has for these rates."""
    return [
        fit.Sample(row, engine.name, repr(config), engine.time_us(config, shape, HOPPER, rates), shape)
        for row, shape in shapes(family).items()
        for engine in family.choose.engines
        if engine.refusal(shape, HOPPER) is None
        for config in engine.configs(shape, HOPPER)
    ]


OFF = {
    "gemm": {"k_tile": 1.2, "mma": 1 / 1.2, "swap_m": 1.2, "stream_k": 1.3},
    "packed": {"code": 1.2, "mma": 1 / 1.2, "mma_code": 1.2, "part": 1.2, "few_k_tile": 1 / 1.2},
    "wq_grouped": {"mma_uint4": 1.2, "mma_row": 1 / 1.2, "wgmma": 1.2, "tile": 1.3, "launch": 1.2},
    "grouped": {"k_tile": 1.2, "mma": 1 / 1.2, "l2": 1.3, "mma_area": 1.2},
}
by_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@by_family
def test_fit_finds_rates_again(family: fit.Family) -> None:
    """From rates that are a fifth off, with times that the model has for the right ones."""
    right = family.choose.rates_of(HOPPER)
    wrong = replace(right, **{name: getattr(right, name) * factor for name, factor in OFF[family.name].items()})
    timed = samples(family, right)[::9]
    before, after = (
        fit.errors(family, rates, timed, HOPPER) for rates in (wrong, fit.fit(family, wrong, timed, HOPPER))
    )
    assert after["median error of a time"] < 0.02 < before["median error of a time"]
    assert after["mean loss of the choice"] <= 0.005


def test_fit_moves_a_rate_of_0() -> None:
    """No factor changes 0."""
    family = fit.FAMILIES["packed"]
    right = family.choose.rates_of(HOPPER)
    wrong, timed = replace(right, epilogue=0.0), samples(family, right)[::5]
    found = fit.fit(family, wrong, timed, HOPPER)
    assert found.epilogue > 0
    models = [fit.model(family, one, HOPPER) for one in timed]
    assert fit.error(found, timed, models) < fit.error(wrong, timed, models) / 4


@by_family
def test_errors_count_what_the_choice_loses(family: fit.Family) -> None:
    rates = family.choose.rates_of(HOPPER)
    timed = [replace(one, us=100.0) for one in samples(family, rates) if ":16x" in one.row]
    chosen = min(timed, key=lambda one: fit.model(family, one, HOPPER)(rates))
    worse = [replace(one, us=150.0) if one is chosen else one for one in timed]
    first = {one.row for one in timed}
    assert fit.errors(family, rates, worse, HOPPER)["largest loss"] == 0.5
    assert fit.errors(family, rates, worse, HOPPER)["mean loss of the choice"] == pytest.approx(
        0.5 / len(first), abs=1e-4
    )


@by_family
def test_times_of_a_file_are_fitted(family: fit.Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times, timed = tmp_path / "times.json", samples(family, family.choose.rates_of(HOPPER))[::9]
    times.write_text(json.dumps([fit.as_json(one) for one in timed]))
    assert fit.samples_of(family, times) == timed
    before = engines.table(family.name).read_text()
    fit.main([family.name, "--times", str(times)])
    assert "fitted to all rows" in capsys.readouterr().out
    assert engines.table(family.name).read_text() == before, "without --save nothing is written"


def test_times_as_an_older_gpu_are_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "collect", lambda *_: [])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device, "get", lambda _: replace(device.model("sm_80"), translates=True))
    with pytest.raises(SystemExit):
        fit.main(["packed", "--save"])


@by_family
def test_rates_come_with_their_errors(family: fit.Family) -> None:
    for found in json.loads(engines.table(family.name).read_text()).values():
        assert set(found["rates"]) == {one.name for one in fields(family.choose.rates_of(HOPPER))}
        if "mean loss of the choice" in found["errors"]:  # else derived from docs/performance, not fitted yet
            assert found["errors"]["mean loss of the choice"] < 0.05
            assert found["errors"]["rows"] >= (40 if "only" in found["errors"] else 100)  # `only`: rates that changed
