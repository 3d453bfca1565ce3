"""vLLM 0.33's `fused_moe_lora` by this library's ops: integers, exactly, as its layers call it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import pyops
from pyops.integrations.vllm import table

LORAS, EXPERTS, TOKENS, TOP_K, HIDDEN, SIZE, RANK, BLOCK = 3, 4, 20, 2, 24, 16, 8, 16
TILES = [BLOCK, 32, 64, 8, 4, 3, 1] * 2
GENERATOR = torch.Generator().manual_seed(0)
MAPPING = torch.randint(-1, LORAS, (TOKENS,), generator=GENERATOR, dtype=torch.int32)
TOPK_IDS = torch.randint(0, EXPERTS, (TOKENS, TOP_K), generator=GENERATOR, dtype=torch.int32)
TOPK_WEIGHTS = torch.randint(1, 5, (TOKENS, TOP_K), generator=GENERATOR) / 4
ENABLED, NAMED = torch.tensor([1, 0, 1, 1], dtype=torch.int32), torch.tensor([-1, 0, 1, 2], dtype=torch.int32)
ACTIVE = torch.tensor([4], dtype=torch.int32)


def integers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=GENERATOR).to(torch.bfloat16)


def lists(is_sorted: bool) -> tuple[Any, ...]:
    """sorted_token_ids, expert_ids and num_tokens_post_padded, as vLLM makes them."""
    if not is_sorted:
        return None, TOPK_IDS.reshape(-1), None
    slots = TOPK_IDS.numel() + EXPERTS * (BLOCK - 1)
    blocks = -(-slots // BLOCK)
    ids, experts = torch.empty(LORAS * slots, dtype=torch.int32), torch.full((LORAS * blocks,), -1, dtype=torch.int32)
    counts = torch.empty(LORAS, dtype=torch.int32)
    sizes = EXPERTS, BLOCK, LORAS, slots, blocks
    pyops.moe_lora_align_block_size(TOPK_IDS, MAPPING, *sizes, ids, experts, counts, ENABLED, NAMED)
    return ids.view(LORAS, -1), experts.view(LORAS, -1), counts


def call(output: Tensor, x: Tensor, a: list[Tensor], b: list[Tensor], is_sorted: bool, *flags: Any) -> None:
    kernel = table("0.33")["fused_moe_lora"].kernel
    assert kernel is not None
    rest = MAPPING, a[0].shape[2], TOP_K, NAMED, ACTIVE, ENABLED, *TILES, *flags
    kernel(output, x, a, b, TOPK_WEIGHTS, *lists(is_sorted), *rest)


def added(x: Tensor, a: list[Tensor], b: list[Tensor], is_weighted: bool) -> Tensor:
    """What the adapters add, in float64."""
    wanted = torch.zeros(TOKENS, TOP_K, sum(weight.shape[2] for weight in b), dtype=torch.float64)
    for token in range(TOKENS):
        lora = int(MAPPING[token])
        for k in range(TOP_K if lora >= 0 and ENABLED[lora] else 0):
            expert = int(TOPK_IDS[token, k])
            row = x[token * TOP_K + k] if is_weighted else x[token]
            parts = [
                bs[lora, expert].double() @ (as_[lora, expert].double() @ row.double())
                for as_, bs in zip(a, b, strict=True)
            ]
            wanted[token, k] = torch.cat(parts) * (float(TOPK_WEIGHTS[token, k]) if is_weighted else 1)
    return wanted


@pytest.mark.parametrize("is_sorted", [False, True])
def test_both_products_of_a_layer(is_sorted: bool) -> None:
    """Gates and ups of rows of tokens, A shared by the experts; then the rows of pairs, weighted."""
    a = [integers(LORAS, 1, RANK, HIDDEN).expand(-1, EXPERTS, -1, -1) for _ in range(2)]
    b = [integers(LORAS, EXPERTS, SIZE, RANK) for _ in range(2)]
    x, y = integers(TOKENS, HIDDEN), torch.full((TOKENS, TOP_K, 2 * SIZE), 5.0)
    call(y, x, a, b, is_sorted)
    assert torch.equal(y.double(), 5 + added(x, a, b, False))

    a, b = [integers(LORAS, EXPERTS, RANK, SIZE)], [integers(LORAS, EXPERTS, HIDDEN, RANK)]
    x, y = integers(TOKENS * TOP_K, SIZE), torch.zeros(TOKENS, TOP_K, HIDDEN)
    call(y, x, a, b, is_sorted, True, False, 0, False)
    assert torch.equal(y.double(), added(x, a, b, True))


@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_shards(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the products, ranks add or gather what they have; a rank writes its own columns."""
    is_reduced = name == "all_reduce"
    vllm = ModuleType("vllm.distributed")
    setattr(vllm, f"tensor_model_parallel_{name}", lambda x: 2 * x if is_reduced else torch.cat((x, x), -1))
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.distributed", vllm)
    half = integers(LORAS, EXPERTS, RANK, HIDDEN)
    a, b = [half], [integers(LORAS, EXPERTS, SIZE, RANK * (1 if is_reduced else 2))]
    x, y = integers(TOKENS, HIDDEN), torch.full((TOKENS, TOP_K, 2 * SIZE + 3), 5.0)
    call(y, x, a, b, True, False, True, SIZE)
    whole = [2 * half if is_reduced else torch.cat((half, half), 2)]
    assert torch.equal(y[..., SIZE : 2 * SIZE].double(), 5 + added(x, whole, b, False))
    assert (y[..., :SIZE] == 5).all()
    assert (y[..., 2 * SIZE :] == 5).all()


def test_refusals() -> None:
    a, b = [integers(LORAS, EXPERTS, RANK, HIDDEN)] * 5, [integers(LORAS, EXPERTS, SIZE, RANK)] * 5
    x, y = integers(TOKENS, HIDDEN), torch.zeros(TOKENS, TOP_K, 5 * SIZE)
    for change, name in (
        ({"a": a[:4]}, "lora_b_stacked"),
        ({"x": x[1:]}, "qcurr_hidden_states"),
        ({"flags": (False, False, 1)}, "offset"),
        ({"flags": (True,)}, "qcurr_hidden_states"),
    ):
        given: dict[str, Any] = {"output": y, "x": x, "a": a, "b": b, "is_sorted": True, "flags": ()} | change
        with pytest.raises(pyops.OpError, match=f"fused_moe_lora: {name}"):
            call(*[given[one] for one in ("output", "x", "a", "b", "is_sorted")], *given["flags"])
    assert not y.any()
    call(y, x, a, b, True)  # five slices are two launches
    assert torch.equal(y.double(), added(x, a, b, False))
