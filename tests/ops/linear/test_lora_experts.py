"""LoRA adapters of experts: integers with exact products, by lists and by pairs, with hostile indices, by either
kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import pyops
from pyops._core.op import arguments
from pyops._core.system import device
from pyops.host.run import SCHEDULES, scheduled
from pyops.host.toolchain import toolchains
from pyops.testing import cpu

MAX_LORAS, EXPERTS = 4, 6
ENABLED, NAMED = (1, 1, 0, 1), (-1, 0, 7, 2, 1)  # adapter 2 is not enabled, and adapter 3 not named


def _run(name: str, kernel: str, *args: Any) -> None:
    """The op on the host backend, under every schedule with the same result; one launch of the kernel."""
    op = pyops.registry[name]
    op.forget()
    (launch,) = op.launches(*arguments.describe(op.declaration, args)[1])
    assert launch.specialisation.kernel.entry == f"{kernel}_experts"
    out, first = args[0], None
    before = out.clone()
    for schedule in SCHEDULES:
        out.copy_(before)
        with cpu("kernels"), scheduled(schedule, seconds=30.0):
            op.wrapper(*args)
        first = out.clone() if first is None else first
        assert torch.equal(out, first)
    op.forget()


def _lists(topk_ids: Tensor, mapping: Tensor, block_size: int) -> tuple[Any, ...]:
    """expert_ids and the arguments after it, from the op that makes the lists; what is not in use is hostile."""
    slots = topk_ids.numel() + EXPERTS * (block_size - 1)
    blocks = -(-slots // block_size)
    ids, experts = torch.full((MAX_LORAS, slots), -5, dtype=torch.int32), torch.full((MAX_LORAS, blocks), 2**31 - 1)
    experts, counts = experts.int(), torch.full((MAX_LORAS,), 2**31 - 1, dtype=torch.int32)
    enabled, named = torch.tensor(ENABLED, dtype=torch.int32), torch.tensor(NAMED, dtype=torch.int32)
    sizes = EXPERTS, block_size, MAX_LORAS, slots, blocks
    pyops.moe_lora_align_block_size(topk_ids, mapping, *sizes, ids, experts, counts, enabled, named)
    for lora in range(MAX_LORAS):
        if ENABLED[lora] and lora in NAMED:
            ids[lora, counts[lora] :] = 0
            experts[lora, counts[lora] // block_size :] = 0
    return experts, enabled, None, ids, counts, named, block_size


# On one SM, tensor cores load the fewest bytes; over many, few pairs are spread better without them.
@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("kernel", "num_sms", "tokens", "top_k", "columns", "size", "dtype", "block_size", "is_shared"),
    [
        ("lora_mma", 1, 13, 3, (24, 24), 264, torch.bfloat16, 16, True),
        ("lora_mma", 1, 25, 2, (13,), 77, torch.float16, 2, False),
        ("lora_mma", 1, 61, 2, (40,), 72, torch.bfloat16, 0, False),
        ("lora_simt", 132, 9, 2, (13, 13, 13), 77, torch.bfloat16, 0, True),
        ("lora_simt", 132, 7, 3, (24,), 72, torch.float32, 4, False),
    ],
)
def test_products_of_integers_are_exact(
    kernel: str,
    num_sms: int,
    tokens: int,
    top_k: int,
    columns: tuple[int, ...],
    size: int,
    dtype: torch.dtype,
    block_size: int,
    is_shared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both products, in rows with gaps; the row of a pair without an adapter stays.

    `block_size`: of the lists; 0 for none. `is_shared`: the choices of a token share a row of x, and the experts a
    weight.
    """
    monkeypatch.setitem(device._HOST, 32, replace(device._HOST[32], num_sms=num_sms))
    generator = torch.Generator().manual_seed(tokens)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)

    mapping = torch.randint(-1, MAX_LORAS, (tokens,), generator=generator, dtype=torch.int32)
    topk_ids = torch.randint(0, EXPERTS, (tokens, top_k), generator=generator, dtype=torch.int32)
    mapping[:2] = torch.tensor([-(2**31), 2**31 - 1])
    if not block_size:
        topk_ids.view(-1)[[-1, -2, -3]] = torch.tensor([-1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    used = {lora for lora in range(MAX_LORAS) if ENABLED[lora] and (lora in NAMED or not block_size)}
    weight_experts = 1 if is_shared else EXPERTS
    if block_size:
        lists = _lists(topk_ids, mapping, block_size)
    else:
        lists = topk_ids.view(-1), torch.tensor(ENABLED, dtype=torch.int32), mapping, None, None, None, 0

    def product(x: Tensor, weight: Tensor) -> Tensor:
        """In float64, of the pairs with an adapter; NaN without."""
        wanted = torch.full((tokens, top_k, weight.shape[2]), torch.nan, dtype=torch.float64)
        for token in range(tokens):
            for k in range(top_k):
                lora, expert = int(mapping[token]), int(topk_ids[token, k])
                if lora in used and expert >= 0 and (is_shared or expert < EXPERTS):
                    matrix = weight[lora, 0 if is_shared else expert]
                    wanted[token, k] = matrix.double() @ x[token, k % x.shape[1]].double()
        return wanted

    slices = len(columns)
    others = [None] * (4 - slices)
    x = integers(tokens, 1 if is_shared else top_k, size + 8)[..., :size]
    weights = [integers(MAX_LORAS, weight_experts, columns[0], size) for _ in columns]
    wide = torch.full((slices, tokens, top_k, columns[0] + 3), 7.5)
    _run("fused_moe_lora_shrink", kernel, wide[..., : columns[0]], x, weights[0], *lists, *weights[1:], *others)
    for rows, weight in zip(wide, weights, strict=True):
        assert torch.equal(rows[..., : columns[0]].double(), product(x, weight).nan_to_num(7.5))
    assert (wide[..., columns[0] :] == 7.5).all()

    xs = integers(slices, tokens, top_k, size + 8)[..., :size]
    weights = [integers(MAX_LORAS, weight_experts, n, size) for n in columns]
    factors = torch.randint(1, 5, (tokens, top_k), generator=generator).to(torch.float16) / 4
    whole = torch.full((tokens, top_k, 2 + sum(columns) + 3), 7.5)
    for topk_weights, add_inputs in ((factors, True), (None, False)):
        whole.fill_(7.5)
        args = whole[..., 2:-3], xs, weights[0], *lists, topk_weights, add_inputs, *weights[1:], *others
        _run("fused_moe_lora_expand", kernel, *args)
        wanted = torch.cat([product(one, weight) for one, weight in zip(xs, weights, strict=True)], 2)
        if topk_weights is not None:
            wanted = 7.5 + wanted * topk_weights.double()[..., None]
        assert torch.equal(whole[..., 2:-3].double(), wanted.nan_to_num(7.5))
        assert (whole[..., :2] == 7.5).all()
        assert (whole[..., -3:] == 7.5).all()


def test_refusals() -> None:
    """Each argument by its name; nothing is written."""
    out, x, weight = torch.zeros(1, 3, 2, 4), torch.ones(3, 1, 8), torch.ones(2, 5, 4, 8)
    pairs, enabled, mapping = (torch.zeros(n, dtype=torch.int32) for n in (6, 2, 3))
    lists = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 16, dtype=torch.int32), enabled, mapping
    for args, name in (
        ((out, x.half(), weight, pairs, enabled, mapping), "x"),
        ((out, torch.ones(3, 3, 8), weight, pairs, enabled, mapping), "x"),
        ((torch.zeros(1, 2, 3, 4).mT.mT.transpose(1, 2), x, weight, pairs, enabled, mapping), "out"),
        ((out, x, weight[:, :, :3], pairs, enabled, mapping), "out"),
        ((out, x, weight[:1].expand(2, 5, 4, 8), pairs, enabled, mapping), "lora_a"),
        ((out, x, weight, pairs[:5], enabled, mapping), "expert_ids"),
        ((out, x, weight, pairs, enabled[:1], mapping), "adapter_enabled"),
        ((out, x, weight, pairs, enabled, mapping[:2]), "token_lora_mapping"),
        ((out, x, weight, pairs, enabled), "token_lora_mapping"),
        ((out, x, weight, pairs, enabled, None, lists[1]), "sorted_token_ids"),
        ((out, x, weight, lists[0], enabled, None, *lists[1:], 0), "block_size"),
        ((out, x, weight, pairs, enabled, None, *lists[1:], 16), "expert_ids"),
        ((out, x, weight, lists[0], enabled, None, lists[1], pairs, mapping, 16), "num_tokens_post_padded"),
        ((out, x, weight, lists[0], enabled, None, lists[1].long(), *lists[2:], 16), "sorted_token_ids"),
        ((out, x, weight, lists[0], enabled, None, *lists[1:3], mapping.long(), 16), "lora_ids"),
    ):
        with pytest.raises(pyops.OpError, match=f"fused_moe_lora_shrink: {name}"):
            pyops.fused_moe_lora_shrink(*args)
    factors, y, b = torch.ones(3, 2, dtype=torch.int32), torch.zeros(3, 2, 5), torch.ones(2, 5, 5, 4)
    with pytest.raises(pyops.OpError, match="fused_moe_lora_expand: topk_weights"):
        pyops.fused_moe_lora_expand(y, out, b, pairs, enabled, mapping, topk_weights=factors)
    assert not out.any()
    assert pyops.fused_moe_lora_shrink.new(x, weight, pairs, enabled, mapping, top_k=2).shape == out.shape
