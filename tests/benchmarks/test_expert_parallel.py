"""The benchmark of expert parallelism without GPUs: predictions, its checks, a gloo process."""

from __future__ import annotations

import warnings
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch

import pyops
from benchmarks import expert_parallel
from benchmarks.expert_parallel import Exchange, Model, check, check_products, draw, of_codes, of_kernels, predicted
from pyops.testing import ranks

SMALL = Model("small", 64, 8, 3)


def test_the_page_has_the_predictions() -> None:
    page = (Path(__file__).parents[2] / "docs" / "many_gpus.md").read_text()
    table = page.split("<!-- predicted experts -->\n")[1].split("<!-- /predicted experts -->")[0]
    assert table == f"{expert_parallel.table()}\n"


def test_predictions_by_hand() -> None:
    """128 tokens of eight choices among 256 experts: a tenth of the tokens choose no expert of one rank of four."""
    deepseek = expert_parallel.MODELS[0]
    none = comb(192, 8) / comb(256, 8)
    assert none == pytest.approx(0.097, abs=0.001)
    assert deepseek.nbytes(4, 128) == pytest.approx(128 * 3 * (1 - none) * 14336)
    there, back = predicted(deepseek, 4, 128)
    over_links = 128 * 3 * (1 - none) * 14336 / 450e9
    assert there == pytest.approx(1.5e-6 + 1.5e-6 + 1e-6 + over_links)
    assert back == pytest.approx(1.5e-6 + 0.45e-6 + 1e-6 + over_links)
    # One vector per thread at a time: 1792 vectors of 64 threads each, where the links would take less than a
    # microsecond.
    assert predicted(Model("few choices", 7168, 256, 1), 8, 128)[1] == pytest.approx(2.95e-6 + 6e-6, rel=0.01)


def test_the_kernels_pass_the_checks() -> None:
    def body(rank: int) -> None:
        parallel = pyops.ExpertParallel(None, "cpu", *(SMALL.num_experts, 5, SMALL.hidden_size, SMALL.top_k))
        check(of_kernels(parallel), parallel.experts, *draw(SMALL, 5, rank, parallel.device))
        check_products(parallel, SMALL, 5, rank)
        parallel.close()
        model = Model("of groups", 256, 8, 3)
        codes = pyops.ExpertParallel(None, "cpu", 8, 5, 256, 3, quant_dtype=torch.float8_e4m3fn)
        check(of_codes(codes), codes.experts, *draw(model, 5, rank, codes.device))

    ranks(2, 60).run(body)


def test_wrong_results_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> None:
        parallel = pyops.ExpertParallel(None, "cpu", *(SMALL.num_experts, 5, SMALL.hidden_size, SMALL.top_k))
        x, ids, weights = draw(SMALL, 5, rank, parallel.device)
        wrong = Exchange("wrong", of_kernels(parallel).dispatch, lambda rows: parallel.combine(rows.flip(0)))
        with pytest.raises(AssertionError, match="wrong: 5 tokens of 64 do not come back as they should"):
            check(wrong, parallel.experts, x, ids, weights)
        monkeypatch.setattr(parallel, "combine", lambda rows, out: torch.zeros_like(x))
        with pytest.raises(AssertionError, match="small: 5 tokens differ by 1 from those of one GPU"):
            check_products(parallel, SMALL, 5, rank)

    ranks(2, 60).run(body)


@pytest.mark.parametrize("way", [expert_parallel.by_gather, expert_parallel.by_all_to_all])
def test_nccl_contenders_pass_the_checks(way: Any, tmp_path: Path) -> None:
    """With gloo, in one process."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # names of collectives that torch 2.13 changes
            check(way(range(8), 1), range(8), *draw(SMALL, 5, 0, torch.device("cpu")))
    finally:
        torch.distributed.destroy_process_group()


def test_missing_processes_or_gpus_are_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    expert_parallel.main(["--predict"])
    assert capsys.readouterr().out == f"{expert_parallel.table()}\n"
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="expected processes of torchrun"):
        expert_parallel.main([])
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="expected a GPU for each process, got 1"):
        expert_parallel.main([])
