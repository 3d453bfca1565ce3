"""LoRA: integers with exact products, slices in one launch, adapters in any order, indices of any value, by either
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

FAR = -(2**63), -2, 2**32, 2**63 - 1
LORAS, PADDING = 5, 3


def _run(name: str, kernel: str, *args: Any) -> None:
    """The op on the host backend, under every schedule with the same result; one launch of the kernel."""
    op = pyops.registry[name]
    op.forget()
    (launch,) = op.launches(*arguments.describe(op.declaration, args)[1])
    assert launch.specialisation.kernel.file == f"linear/{kernel}.cu"
    out, first = args[0], None
    before = out.clone()
    for schedule in SCHEDULES:
        out.copy_(before)
        with cpu("kernels"), scheduled(schedule, seconds=30.0):
            op.wrapper(*args)
        first = out.clone() if first is None else first
        assert torch.equal(out, first)
    op.forget()


def _order(indices: Tensor, counted: int) -> tuple[Tensor, Tensor]:
    """The first tokens sorted by adapter and then hostile padding, and the tokens of each adapter."""
    order = torch.full_like(indices, -7)
    order[:counted] = indices[:counted].sort(stable=True).indices
    counts = indices[:counted].unique(return_counts=True)[1]
    return order, torch.cat((counts, counts.new_zeros(2)))


# On one SM, tensor cores load the fewest bytes; over many, few tokens are spread better without them.
@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("kernel", "num_sms", "tokens", "columns", "size", "dtype", "ordered"),
    [
        ("lora_mma", 1, 37, (40,), 264, torch.bfloat16, False),
        ("lora_mma", 1, 53, (24, 8, 40), 264, torch.float16, True),
        ("lora_mma", 1, 19, (13, 1), 77, torch.float16, False),
        ("lora_simt", 132, 19, (13, 30, 13, 7), 77, torch.bfloat16, True),
    ],
)
def test_products_of_integers_are_exact(
    kernel: str,
    num_sms: int,
    tokens: int,
    columns: tuple[int, ...],
    size: int,
    dtype: torch.dtype,
    ordered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both products, in rows with gaps; a token without an adapter, or after the ordered ones, gets zeros or stays."""
    monkeypatch.setitem(device._HOST, 32, replace(device._HOST[32], num_sms=num_sms))
    generator = torch.Generator().manual_seed(tokens)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)

    slices = len(columns)
    indices = torch.randint(-1, LORAS, (tokens,), generator=generator)
    indices[: len(FAR)] = torch.tensor(FAR)
    counted = tokens - PADDING if ordered else tokens
    order, counts = _order(indices, counted) if ordered else (None, None)
    adapters = [index if t < counted and 0 <= index < LORAS else None for t, index in enumerate(indices.tolist())]

    def product(x: Tensor, weight: Tensor) -> Tensor:
        """In float64, of the tokens with an adapter; NaN without."""
        wanted = torch.full((tokens, weight.shape[1]), torch.nan, dtype=torch.float64)
        for token, adapter in enumerate(adapters):
            if adapter is not None:
                wanted[token] = weight[adapter].double() @ x[token].double()
        return wanted

    x, weights = integers(tokens, size + 8)[:, :size], [integers(LORAS, columns[0], size) for _ in columns]
    wide = torch.full((slices, tokens, columns[0] + 3), 7.5)
    _run(
        "lora_shrink",
        kernel,
        wide[..., : columns[0]],
        x,
        weights[0],
        indices,
        2.0,
        *weights[1:],
        *[None] * (4 - slices),
        order,
        counts,
    )
    for rows, weight in zip(wide, weights, strict=True):
        assert torch.equal(rows[:, : columns[0]].double(), (2 * product(x, weight)).nan_to_num(0.0))
    assert (wide[..., columns[0] :] == 7.5).all()

    xs, weights = integers(slices, tokens, size + 8)[..., :size], [integers(LORAS, n, size) for n in columns]
    whole = torch.full((tokens, 2 + sum(columns) + 3), 7.5)
    _run(
        "lora_expand",
        kernel,
        whole[:, 2:-3],
        xs,
        weights[0],
        indices,
        True,
        *weights[1:],
        *[None] * (4 - slices),
        order,
        counts,
    )
    wanted = torch.cat([product(x, weight) for x, weight in zip(xs, weights, strict=True)], 1)
    assert torch.equal(whole[:, 2:-3].double(), (7.5 + wanted).nan_to_num(7.5))
    assert (whole[:, :2] == 7.5).all()
    assert (whole[:, -3:] == 7.5).all()


def test_every_token_without_an_adapter() -> None:
    x, weight, indices = torch.ones(3, 8), torch.ones(2, 4, 8), torch.full((3,), -1)
    assert (pyops.lora_shrink.new(x, weight, indices) == 0).all()
    assert pyops.lora_shrink.new(x, weight, indices, 1.0, weight, weight).shape == (3, 3, 4)
    for args, name in (
        ((x.half(), weight, indices), "x"),
        ((x, weight[:, :, :4], indices), "lora_a"),
        ((x, weight, indices[:2]), "indices"),
        ((x, weight, indices.float()), "indices"),
        ((x, weight, indices, 1.0, weight[:, :3].contiguous()), "lora_a1"),
        ((x, weight, indices, 1.0, None, weight), "lora_a2"),
        ((x, weight, indices, 1.0, None, None, None, indices), "order"),
        ((x, weight, indices, 1.0, None, None, None, indices[:2], indices), "order"),
    ):
        with pytest.raises(pyops.OpError, match=f"lora_shrink: {name}"):
            pyops.lora_shrink.new(*args)
