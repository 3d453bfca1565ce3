"""LoRA: integers with exact products, adapters in any order, indices of any value, by either kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import pyops
from pyops._core.op import arguments
from pyops._core.system import device
from pyops.host.toolchain import toolchains
from pyops.testing import cpu

FAR = -(2**63), -2, 2**32, 2**63 - 1


# On one SM, tensor cores load the fewest bytes; over many, few tokens are spread better without them.
@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("kernel", "num_sms", "tokens", "columns", "size", "dtype"),
    [
        ("lora_mma", 1, 37, 40, 264, torch.bfloat16),
        ("lora_mma", 1, 19, 13, 77, torch.float16),
        ("lora_simt", 132, 19, 13, 77, torch.bfloat16),
    ],
)
def test_products_of_integers_are_exact(
    kernel: str, num_sms: int, tokens: int, columns: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both products of one shape, in rows with gaps; a token without an adapter gets zeros, or stays."""
    monkeypatch.setitem(device._HOST, 32, replace(device._HOST[32], num_sms=num_sms))
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randint(-3, 4, (tokens, size + 8), generator=generator).to(dtype)[:, :size]
    weight = torch.randint(-3, 4, (5, columns, size), generator=generator).to(dtype)
    indices = torch.randint(-1, 5, (tokens,), generator=generator)
    indices[: len(FAR)] = torch.tensor(FAR)
    product = torch.zeros(tokens, columns, dtype=torch.float64)
    found = [token for token, index in enumerate(indices.tolist()) if 0 <= index < 5]
    for token in found:
        product[token] = weight[indices[token]].double() @ x[token].double()
    for op, wanted in (
        (pyops.lora_shrink, 2 * product),
        (pyops.lora_expand, 7.5 + product),
    ):
        declared = pyops.registry[op.__name__]
        declared.forget()
        whole = torch.full((tokens, columns + 3), 7.5)
        args = (whole[:, :columns], x, weight, indices, 2.0 if op is pyops.lora_shrink else True)
        with cpu("kernels"):
            op(*args)
        declared.forget()
        (launch,) = declared.launches(*arguments.describe(declared.declaration, args)[1])
        assert launch.specialisation.kernel.file == f"linear/{kernel}.cu"
        assert torch.equal(whole[:, :columns].double(), wanted)
        assert (whole[:, columns:] == 7.5).all()


def test_every_token_without_an_adapter() -> None:
    x, weight, indices = torch.ones(3, 8), torch.ones(2, 4, 8), torch.full((3,), -1)
    assert (pyops.lora_shrink.new(x, weight, indices) == 0).all()
    for args, name in (
        ((x.half(), weight, indices), "x"),
        ((x, weight[:, :, :4], indices), "lora_a"),
        ((x, weight, indices[:2]), "indices"),
        ((x, weight, indices.float()), "indices"),
    ):
        with pytest.raises(pyops.OpError, match=f"lora_shrink: {name}"):
            pyops.lora_shrink.new(*args)
