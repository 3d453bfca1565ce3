"""`benchmarks.models` and `benchmarks.fit` without a GPU: drawn rows, the report of times, the fit itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import expert_layers, fit, models, packed_products
from benchmarks.models import MODELS, Row
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops.ops.linear.gemm_engines import choose
from pyops.ops.linear.gemm_rates import FAMILY, GemmRates
from pyops.ops.linear.gemm_shape import GemmShape
from pyops.tuning import engines

H200 = device.model("sm_90")
FILE = engines.table(FAMILY)


@pytest.mark.parametrize("kind", [*sorted({*models.KINDS} - {*expert_layers.KINDS}), *packed_products.KINDS])
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


def samples(rates: GemmRates) -> list[fit.Sample]:
    """Times that the model has for these rates."""
    found = []
    for m, n, k in ((2, 1024, 4096), (16, 4096, 4096), (64, 28672, 4096), (192, 4096, 14336), (1024, 7168, 3584)):
        for dtype, blocked, gated in (
            (dtypes.bfloat16, False, False),
            (dtypes.bfloat16, False, True),
            (dtypes.float8_e4m3fn, True, False),
        ):
            vec_size, plain = 16 // dtype.itemsize, not (blocked or gated)
            shape = GemmShape(
                m, n, k, dtype, dtypes.bfloat16, vec_size, block_scaled=blocked, is_gated=gated, is_plain=plain
            )
            for one in choose.candidates(shape, H200):
                us = next(e for e in choose.engines if e.name == one.engine).time_us(one.config, shape, H200, rates)
                found.append(fit.Sample(f"{m}x{n}x{k} {blocked} {gated}", one.engine, repr(one.config), us, shape))
    return found


def test_fit_finds_rates_again() -> None:
    """From rates that are a fifth off, with times that the model has for the right ones."""
    right = choose.rates_of(H200)
    wrong = replace(right, k_tile=right.k_tile * 1.2, mma=right.mma / 1.2, swap_n=right.swap_n * 1.2, part=1.2)
    timed = samples(right)
    before, after = fit.errors(wrong, timed, H200), fit.errors(fit.fit(wrong, timed, H200), timed, H200)
    assert after["median error of a time"] < 0.02 < before["median error of a time"]
    assert after["mean loss of the choice"] <= 0.005


def test_errors_count_what_the_choice_loses() -> None:
    rates = choose.rates_of(H200)
    timed = [replace(one, us=100.0) for one in samples(rates) if one.row.startswith("16x")]
    chosen = min(timed, key=lambda one: fit.predicted(rates, one, H200))
    worse = [replace(one, us=150.0) if one is chosen else one for one in timed]
    first = {one.row for one in timed}
    assert fit.errors(rates, worse, H200)["largest loss"] == 0.5
    assert fit.errors(rates, worse, H200)["mean loss of the choice"] == pytest.approx(0.5 / len(first), abs=1e-4)


def test_times_of_a_file_are_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = tmp_path / "times.json"
    times.write_text(json.dumps([fit.as_json(one) for one in samples(choose.rates_of(H200))[::9]]))
    before = FILE.read_text()
    fit.main(["--times", str(times)])
    assert "fitted to all rows" in capsys.readouterr().out
    assert FILE.read_text() == before, "without --save nothing is written"


def test_rates_come_with_their_errors() -> None:
    for found in json.loads(FILE.read_text()).values():
        assert found["errors"]["mean loss of the choice"] < 0.05
        assert found["errors"]["rows"] >= 100
