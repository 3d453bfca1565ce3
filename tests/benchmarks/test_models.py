"""`benchmarks.models` and `benchmarks.fit` without a GPU: drawn rows, the report of times, the fit itself."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import fit, models, packed_products
from benchmarks.models import MODELS, Row
from pyops._core.system import device
from pyops.ops.linear import gemm_sm90_cost
from pyops.ops.linear.gemm_sm80 import MmaConfig
from pyops.ops.linear.gemm_sm90_choice import Shape, candidates, config_us

H200 = device.model("sm_90")
MMA = MmaConfig(64, 64, 2, 2, 4, 1, 2)
FILE = gemm_sm90_cost.TABLE


@pytest.mark.parametrize("kind", [*models.KINDS, *packed_products.KINDS])
def test_rows_are_layers_of_models(kind: str) -> None:
    rows = models.draw(kind, 30, seed=3)
    layers = {layer for model in MODELS.values() for parts in (1, 2, 4, 8) for layer in model.layers(parts).values()}
    assert len({str(row) for row in rows}) == 30
    assert all((row.n, row.k) in layers and 1 <= row.m <= 8192 for row in rows)
    assert rows == models.draw(kind, 30, seed=3)
    assert rows != models.draw(kind, 30, seed=4)


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


def samples(rates: gemm_sm90_cost.GemmRates) -> list[fit.Sample]:
    """Times that the model has for these rates."""
    found = []
    for m, n, steps in ((16, 4096, 64), (64, 28672, 64), (192, 4096, 224), (1024, 7168, 56), (4096, 4096, 64)):
        for blocked, eight_bits, gated in ((False, False, False), (False, False, True), (True, True, False)):
            shape = Shape(m, n, steps, blocked, blocked, eight_bits, eight_bits, gated, True)
            for config in candidates(shape, MMA, H200):
                values = asdict(config) | {"kernel": type(config).__name__}
                us = config_us(config, shape, H200, rates)
                found.append(fit.Sample(f"{m}x{n}x{steps} {blocked} {gated}", values, us, shape))
    return found


def test_fit_finds_rates_again() -> None:
    """From rates that are a fifth off, with times that the model has for the right ones."""
    right = gemm_sm90_cost.of(H200)
    wrong = replace(right, k_tile=right.k_tile * 1.2, mma=right.mma / 1.2, swap_n=right.swap_n * 1.2, part=1.2)
    timed = samples(right)
    before, after = fit.errors(wrong, timed, H200), fit.errors(fit.fit(wrong, timed, H200), timed, H200)
    assert after["median error of a time"] < 0.02 < before["median error of a time"]
    assert after["mean loss of the choice"] <= 0.005


def test_errors_count_what_the_choice_loses() -> None:
    rates = gemm_sm90_cost.of(H200)
    timed = [replace(one, us=100.0) for one in samples(rates) if one.row.startswith("16x")]
    chosen = min(timed, key=lambda one: fit.predicted(rates, one, H200))
    worse = [replace(one, us=150.0) if one is chosen else one for one in timed]
    first = {one.row for one in timed}
    assert fit.errors(rates, worse, H200)["largest loss"] == 0.5
    assert fit.errors(rates, worse, H200)["mean loss of the choice"] == pytest.approx(0.5 / len(first), abs=1e-4)


def test_times_of_a_file_are_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = tmp_path / "times.json"
    times.write_text(json.dumps([asdict(one) for one in samples(gemm_sm90_cost.of(H200))[::9]]))
    before = FILE.read_text()
    fit.main(["--times", str(times)])
    assert "fitted to all rows" in capsys.readouterr().out
    assert FILE.read_text() == before, "without --save nothing is written"


def test_rates_come_with_their_errors() -> None:
    for found in json.loads(FILE.read_text()).values():
        assert found["errors"]["mean loss of the choice"] < 0.05
        assert found["errors"]["rows"] >= 100
