"""The choice among engines: the least time by the model, refusals, and what `pyops show` prints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from pyops._core.system import device
from pyops.cli import show
from pyops.tuning import engines
from pyops.tuning.engines import Choice, Engine

ON = device.model("sm_90")


@dataclass(frozen=True)
class Rates:
    launch: float
    row: float


def choice(**rates: float) -> Choice[int, Rates]:
    """A wide kernel for even shapes, with two configs, and a narrow one for all; a config is rows of a tile."""
    made = Rates(**{"launch": 2.0, "row": 1.0} | rates)

    def us(rows: int, shape: int, on: device.Device, rates: Rates) -> float:
        return rates.launch + -(-shape // rows) * rates.row

    return Choice(
        lambda problem: int(problem),
        lambda on: made,
        Engine("wide.cu", lambda shape, on: "odd" if shape % 2 else None, lambda shape, on: (4, 8), us),
        Engine("narrow.cu", lambda shape, on: None, lambda shape, on: (1,), us),
    )


def test_the_least_time_of_engines_that_serve() -> None:
    choose = choice()
    assert choose("16", ON) == 8
    assert choose("4", ON) == 4, "of equal times the first"
    assert choose("5", ON) == 1
    assert [one.us for one in choose.candidates(16, ON)] == [6.0, 4.0, 18.0]
    assert choice(row=0.0)("16", ON) == 4


def test_explanations_name_times_and_reasons() -> None:
    assert choice().explained("16", ON) == ["wide.cu: 4.0 us by the model, 8", "narrow.cu: 18.0 us by the model, 1"]
    assert choice().explained("5", ON) == ["wide.cu: no, odd", "narrow.cu: 7.0 us by the model, 1"]


def test_show_prints_every_engine() -> None:
    text = show.show("linear", {"num_tokens": 40})
    assert "gemm_sm90.cu: " in text
    assert "gemv.cu: no, it is for at most 16 rows" in text


def test_rates_of_a_device_that_was_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are those of an H200."""
    monkeypatch.setattr(engines, "TABLES", tmp_path)
    engines._rates.cache_clear()
    known = {"nvidia-h200": {"rates": {"launch": 1.0, "row": 2.0}}, "other": {"rates": {"launch": 3.0, "row": 4.0}}}
    engines.table("family").write_text(json.dumps(known))
    assert engines.rates(Rates, "family", "other") == Rates(3.0, 4.0)
    assert engines.rates(Rates, "family", "unknown") == Rates(1.0, 2.0)
    engines._rates.cache_clear()
