"""vLLM's LoRA layers with this library's ops: integers on CPU tensors, exactly."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pyops
from pyops.integrations.vllm import override
from pyops.integrations.vllm.table import DEFINED_IN_PYTHON
from pyops.testing import cpu
from tests.support.vllm_layers import on_hopper

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")

OPS = "lora_shrink", "lora_expand"
HIDDEN, HEAD, RANK, LORAS, TOKENS = 32, 8, 8, 3, 40
SLICES = 4 * HEAD, 2 * HEAD, 2 * HEAD  # columns of queries, keys and values


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's object that calls the ops, which are this library's kernels."""
    with on_hopper(monkeypatch):
        monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)  # so that vLLM imports its module of the ops
        for name in OPS:
            importlib.import_module(DEFINED_IN_PYTHON[name])
        from vllm.config.lora import LoRAConfig
        from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
        from vllm.utils import torch_utils

        monkeypatch.setattr(torch_utils, "PIN_MEMORY", False)  # in 0.22 also the default of an argument
        if "pin_memory" in inspect.signature(torch_utils.async_tensor_h2d).parameters:
            monkeypatch.setattr(torch_utils.async_tensor_h2d, "__defaults__", (False,))
        config = LoRAConfig(max_lora_rank=RANK, max_loras=LORAS, lora_dtype=torch.bfloat16)
        with override(*OPS) as replaced, cpu("kernels"):
            assert set(replaced.names) == {f"vllm::{name}" for name in OPS}
            yield PunicaWrapperGPU(TOKENS, TOKENS, torch.device("cpu"), lora_config=config)


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def route(wrapper: Any, adapters: list[int]) -> None:
    """A step of tokens with these adapters, by their slots; -1 is none."""
    from vllm.lora.layers import LoRAMapping

    ids = tuple(slot + 1 for slot in adapters)
    wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill=True), [slot + 1 for slot in range(LORAS)], LORAS, 100)


def applied(x: Tensor, pairs: list[list[tuple[Tensor, Tensor]]], adapters: list[int]) -> Tensor:
    """What the adapters add, [num_tokens, columns of all slices] float64; `pairs` has A and B of each slice."""
    rows = [torch.zeros(sum(SLICES), dtype=torch.float64) for _ in x]
    for token, slot in enumerate(adapters):
        if slot >= 0:
            rows[token] = torch.cat([b.double() @ (a.double() @ x[token].double()) for a, b in pairs[slot]])
    return torch.stack(rows)


def test_queries_keys_and_values(wrapper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of three slices; rows of padding stay, whatever an earlier step has left there."""
    from vllm.lora.layers import MergedQKVParallelLinearWithLoRA, column_parallel_linear
    from vllm.model_executor.layers.linear import QKVParallelLinear

    monkeypatch.setattr(column_parallel_linear, "tensor_model_parallel_all_gather", lambda shrunk: shrunk)
    plain = QKVParallelLinear(HIDDEN, HEAD, 4, 2, bias=False, params_dtype=torch.bfloat16, disable_tp=True)
    plain.weight.data.copy_(integers(sum(SLICES), HIDDEN, seed=1))
    layer = MergedQKVParallelLinearWithLoRA(plain)
    layer.create_lora_weights(LORAS, wrapper.lora_config)
    drawn = [(integers(RANK, HIDDEN, seed=i), integers(SLICES[i % 3], RANK, seed=i + 50)) for i in range(3 * LORAS)]
    pairs = [drawn[3 * slot : 3 * slot + 3] for slot in range(LORAS)]
    for slot, of_slices in enumerate(pairs):
        layer.set_lora(slot, *map(list, zip(*of_slices, strict=True)))
    layer.set_mapping(wrapper)
    x = integers(TOKENS, HIDDEN, seed=2)
    for counted, adapters in ((TOKENS, [2, 0, -1, 1, 0] * 8), (7, [1, -1, 1, 0, 2, 2, 1]), (3, [-1, -1, -1])):
        route(wrapper, adapters)
        base = x.double() @ plain.weight.double().T
        wanted = base + applied(x, pairs, adapters + [-1] * (TOKENS - counted))
        assert torch.equal(layer.apply(x).double(), wanted)


def test_more_slices_than_a_launch_has(wrapper: Any) -> None:
    """Six slices, written over columns from an offset on."""
    a, b = [integers(LORAS, 1, RANK, HIDDEN, seed=i) for i in range(6)], [integers(LORAS, 1, 3, RANK, seed=9)] * 6
    x, adapters = integers(TOKENS, HIDDEN, seed=3), [0, 1, 2, -1] * 10
    route(wrapper, adapters)
    y = torch.full((TOKENS, 25), 9.0, dtype=torch.bfloat16)
    wrapper.add_lora_linear(y, x, tuple(a), tuple(b), 2.0, (3,) * 6, offset_start=5, add_inputs=False)
    for token, slot in enumerate(adapters):
        parts = [2 * b[i][slot, 0].double() @ (a[i][slot, 0].double() @ x[token].double()) for i in range(6)]
        assert torch.equal(y[token, 5:23].double(), torch.cat(parts) if slot >= 0 else torch.full((18,), 9.0).double())
    assert (y[:, :5] == 9).all()
    assert (y[:, 23:] == 9).all()
    meta = wrapper.token_mapping_meta.meta_args(TOKENS, False)
    with pytest.raises(pyops.OpError, match="lora_expand: offset_start: expected at most 22, for 3 columns, got 23"):
        torch.ops.vllm.lora_expand(torch.zeros(1, TOKENS, RANK), b[:1], y, *meta, 23, True)
