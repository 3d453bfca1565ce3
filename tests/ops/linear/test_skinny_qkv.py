"""skinny_qkv_rope_cache: exact for integers, a norm by float64, slots and positions."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import pyops
from pyops.ops.linear.skinny_linear import SkinnyConfig
from tests.ops.cache.test_qk_norm_rope import (
    BLOCK,
    DEVICES,
    POSITIONS,
    SLOTS,
    STORED,
    TOKENS,
    right,
    run,
    where,
)
from tests.ops.linear.test_products import forced

OP = "skinny_qkv_rope_cache"
KV = 2
# With 20 heads of 64 elements: six blocks a head in three rounds, a block has fewer.
FEW = SkinnyConfig(vec_size=4, tokens=1, split=4, batch=1, num_threads=256, min_blocks=1)


def draw(heads: int, hidden_size: int, head_size: int, rotary_dim: int, dtype: torch.dtype, at: str) -> dict[str, Any]:
    """Tensors of small integers with gaps after rows; the norm of a token is the token."""
    torch.manual_seed(heads)
    x, weight, bias, table = (
        torch.randint(-4, 5, shape, device=at).to(dtype)
        for shape in (
            (TOKENS, hidden_size + 8),
            (heads * head_size, hidden_size + 8),
            (heads * head_size,),
            (5, rotary_dim),
        )
    )
    key_cache, value_cache = torch.full((3, 2, BLOCK, KV, head_size), 7.0, device=at).to(dtype).unbind(1)
    return {
        "query": torch.empty(TOKENS, (heads - 2 * KV) * head_size, dtype=dtype, device=at),
        "input": torch.where(x < 0, -1, 1).to(dtype)[:, :hidden_size],
        "weight": weight[:, :hidden_size],
        "bias": bias,
        "norm_weight": torch.ones(hidden_size, dtype=dtype, device=at),
        "epsilon": 0.0,
        "cos_sin_cache": table / 4,
        "is_neox": True,
        "positions": torch.tensor(POSITIONS, device=at),
        "slot_mapping": torch.tensor(SLOTS, device=at),
        "key_cache": key_cache,
        "value_cache": value_cache,
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("heads", "hidden_size", "head_size", "rotary_dim", "is_neox", "has_bias", "dtype", "config"),
    [
        (5, 96, 64, 64, True, False, torch.float32, None),
        (6, 51, 128, 24, False, True, torch.bfloat16, None),
        (5, 2056, 256, 192, True, True, torch.bfloat16, None),
        (20, 96, 64, 24, True, False, torch.float32, FEW),
        (20, 96, 64, 64, False, True, torch.float32, FEW),
        (20, 96, 64, 64, True, True, torch.float32, replace(FEW, num_threads=512)),
    ],
)
def test_exact_products(
    heads: int,
    hidden_size: int,
    head_size: int,
    rotary_dim: int,
    is_neox: bool,
    has_bias: bool,
    dtype: torch.dtype,
    config: SkinnyConfig | None,
    device: str,
) -> None:
    """Every value is exact, and then rounded; positions and slots that do not exist."""
    at = where(device)
    given = draw(heads, hidden_size, head_size, rotary_dim, dtype, at) | {"is_neox": is_neox}
    exact = given["input"].double() @ given["weight"].double().T
    if has_bias:
        exact += given["bias"].double()
    else:
        given["bias"] = None
    with nullcontext() if config is None else forced(OP, config):
        run(device, OP, *given.values())
    q, k, v = exact.unflatten(-1, (-1, head_size)).split((heads - 2 * KV, KV, KV), 1)
    query, key = (right(x, None, given["cos_sin_cache"], is_neox, False).to(dtype) for x in (q, k))
    assert torch.equal(given["query"].view(query.shape), query)
    for cache, heads_of in (("key_cache", key), ("value_cache", v.to(dtype))):
        expected = torch.full_like(given[cache], 7.0)
        for slot, token in STORED.items():
            expected[slot // BLOCK, slot % BLOCK] = heads_of[token]
        assert torch.equal(given[cache], expected)


def test_a_norm_of_the_token() -> None:
    """That of `rms_norm`; an example has no small integers."""
    given = draw(5, 776, 64, 64, torch.bfloat16, "cpu")
    given |= {"input": torch.randn(TOKENS, 776).bfloat16(), "norm_weight": torch.rand(776).bfloat16(), "epsilon": 1e-3}
    normalised = torch.empty_like(given["input"])
    pyops.rms_norm(normalised, given["input"], given["norm_weight"], 1e-3)
    run("host", OP, *given.values())
    exact = torch.nn.functional.linear(normalised.double(), given["weight"].double(), given["bias"].double())
    expected = right(exact.unflatten(-1, (-1, 64))[:, : 5 - 2 * KV], None, given["cos_sin_cache"], True, False)
    torch.testing.assert_close(given["query"].double().view(expected.shape), expected, rtol=2.0**-8, atol=2.0**-3)


def test_refused() -> None:
    given = draw(5, 32, 64, 64, torch.float32, "cpu")
    cache, x, table = given["key_cache"], given["input"], given["cos_sin_cache"]
    few_rows = "expected rows of heads of 64 elements, 2 of keys and of values each, got shape"
    few_angles = "expected at least one row, of an even rotary_dim from 2 to 64, got shape"
    for name, value, message in (
        ("weight", given["weight"][:-1], few_rows),
        ("weight", given["weight"][:192], few_rows),
        ("weight", given["weight"].half(), "expected dtype float32, got float16"),
        ("input", torch.ones(TOKENS, 8200), "expected rows of 1 to 32768 bytes"),
        ("query", x, "expected shape"),
        ("bias", x[0], "expected shape"),
        ("norm_weight", x[0, :31], "expected shape"),
        ("cos_sin_cache", table[:, :63], few_angles),
        ("cos_sin_cache", table[:0], few_angles),
        ("positions", given["positions"][:4], "expected shape"),
        ("slot_mapping", given["slot_mapping"].float(), "expected dtype int32 or int64, got float32"),
        ("key_cache", cache[..., :32], "expected heads of 64 or 128 or 256 elements"),
        ("value_cache", cache[:1], "expected shape (3, 4, 2, 64) like key_cache"),
        ("value_cache", cache.half(), "expected dtype float32, got float16"),
    ):
        with pytest.raises(pyops.OpError) as caught:
            pyops.skinny_qkv_rope_cache(**given | {name: value})
        assert str(caught.value).startswith(f"{OP}: {name}: {message}")
