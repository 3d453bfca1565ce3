"""The arguments of `benchmarks.experts` for block-scaled weights, on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import block_experts
from pyops.testing import cpu
from tests.every_op.test_pipelines import watch
from tests.ops.linear.test_grouped import needs_compiler


@needs_compiler
@pytest.mark.parametrize("name", block_experts.LAYERS)
def test_both_routes_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gaps between rows, as the benchmark has them for the other route, weights are dequantized first."""
    layer = replace(block_experts.LAYERS[name], experts=3)
    torch.manual_seed(1)
    given = block_experts.arguments(layer, torch.tensor([5, 0, 3]), block_experts.weights(layer, 64, 128, "cpu"))
    for one, fused in ((given, True), (given | {"b": block_experts.with_gaps(given["b"])}, False)):
        one["out"].fill_(7.0)
        with monkeypatch.context() as patch, cpu("kernels"):
            seen = watch(patch)
            layer.function(**one)
        assert block_experts.error(layer, one) <= block_experts.MOST
        assert any("/wq_grouped_gemm" in file for file in seen) is fused
