"""`benchmarks.expert_layers` without a GPU: drawn rows, their bytes, and what the contenders compute."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import pyops
from benchmarks import expert_layers, experts, models
from benchmarks.expert_layers import MIXTURES, Mixture, Row
from pyops.ops.linear.grouped_rates import FAMILY
from pyops.testing import cpu
from pyops.tuning import engines


@pytest.mark.parametrize("kind", [*expert_layers.KINDS, *expert_layers.PRODUCTS])
def test_rows_are_layers_of_models(kind: str) -> None:
    rows = expert_layers.draw(kind, 30, seed=3)
    assert len({str(row) for row in rows}) == 30
    for row in rows:
        name, _, parts = row.layer.rpartition(" tp")
        of = MIXTURES[name]
        assert row.mixture == Mixture(of.experts, of.top_k, of.hidden, of.width // int(parts))
        assert 1 <= row.tokens <= 8192
        if kind.endswith(("blocks", "int4")):
            assert row.mixture.width % 128 == row.mixture.hidden % 128 == 0
        assert (row.number > 0) == (row.block_size > 0) == (kind in expert_layers.PRODUCTS)
    assert models.module(kind) is expert_layers
    assert expert_layers.draw(kind, 30, seed=3) == rows
    assert rows != expert_layers.draw(kind, 30, seed=4)


def test_bytes_of_chosen_experts() -> None:
    """One token of Mixtral reads two of the eight experts; many tokens read all of them."""
    of = MIXTURES["Mixtral 8x7B"]
    expert = 3 * 4096 * 14336
    assert expert_layers.num_bytes(Row("experts", 1, "Mixtral 8x7B tp1", of)) == 2 * expert * 2
    assert expert_layers.num_bytes(Row("experts_blocks", 8192, "Mixtral 8x7B tp1", of)) == 8 * expert
    assert expert_layers.num_bytes(Row("grouped_blocks", 8192, "", of, 1, 64)) == 8 * expert * 2 // 3
    assert expert_layers.num_bytes(Row("grouped_blocks", 8192, "", of, 2, 64)) == 8 * expert // 3
    assert expert_layers.num_bytes(Row("grouped_int4", 8192, "", of, 2, 64)) == 8 * expert // 6


def test_contenders_compute_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture, generator = Mixture(4, 2, 64, 128), torch.Generator().manual_seed(1)
    w1, w2 = (torch.randn(4, *size, generator=generator) * size[1] ** -0.5 for size in ((256, 64), (64, 128)))
    x, logits = torch.randn(9, 64, generator=generator).bfloat16(), torch.randn(9, 4, generator=generator)
    chances, ids = logits.softmax(1).topk(2)
    given = x, (w1.bfloat16(), None), (w2.bfloat16(), None), chances, ids.int()
    model = experts.Model(*(mixture.experts, mixture.top_k, mixture.hidden, mixture.width), "bf16", 0.01)
    out = expert_layers._ours(*given)()
    exact = torch.zeros(9, 64)
    for t in range(9):
        for chance, e in zip(chances[t], ids[t], strict=True):
            gate, up = (w1[e].bfloat16().float() @ x[t].float()).chunk(2)
            exact[t] += chance * (w2[e].bfloat16().float() @ (torch.nn.functional.silu(gate) * up))
    assert (out - exact).abs().mean() <= model.most * exact.abs().mean()


def test_products_are_calls_of_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their arguments are accepted, on the CPU instead of a GPU."""
    for name in ("rand", "randn", "randint", "empty"):
        given = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, given=given, **named: given(*args, **named | {"device": "cpu"}))
    for kind in expert_layers.PRODUCTS:
        for number in (1, 2):
            row = Row(kind, 5, "", Mixture(4, 2, 256, 128), number, 64)
            args: Any = expert_layers.operands(row)
            with cpu("reference"):
                expert_layers.contenders(kind)["pyops"](*args)()
            assert args[0].shape == (10, row.mixture.width if number == 1 else row.mixture.hidden)


def test_report_of_layers() -> None:
    rows = expert_layers.draw("experts", 2, seed=1)
    text = models.report({rows[0]: {"pyops": 2.0, "vLLM": 4.0}, rows[1]: {"pyops": 1.0, "vLLM": 2.0}})
    assert "0.500" in text
    assert str(rows[0]) in text


def test_rates_come_with_their_errors() -> None:
    for found in json.loads(engines.table(FAMILY).read_text()).values():
        assert found["errors"]["median error of a time"] < 0.05
        assert found["errors"]["rows"] >= 30
        assert found["rates"].keys() == set(pyops.ops.linear.grouped_rates.GroupedRates.__slots__)
