"""ChunkGatedDeltaRule against the recurrence, token by token in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from pyops import nn as layers
from pyops import testing
from pyops.host.toolchain import toolchains
from tests.support.layers import of_all_methods

pytestmark = pytest.mark.usefixtures("no_grad")

Tensor = torch.Tensor
STARTS = [0, 3, 3, 40, 77]  # a short prompt, an empty one, and two longer than a chunk
KEY_HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE = 2, 4, 16, 24


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state [value_heads, value_size, key_size]) of one sequence, [tokens, heads, ...] in float64."""
    outputs = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        error = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
        state = state + torch.einsum("h,hv,hk->hvk", beta[t], error, k[t])
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]) * KEY_SIZE**-0.5)
    return torch.stack(outputs) if outputs else v, state


def drawn(dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    tokens, seqs = STARTS[-1], len(STARTS) - 1

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    return {
        "q": normal(1, tokens, KEY_HEADS, KEY_SIZE).to(dtype),
        "k": normal(1, tokens, KEY_HEADS, KEY_SIZE).to(dtype),
        "v": normal(1, tokens, VALUE_HEADS, VALUE_SIZE).to(dtype),
        "g": -normal(1, tokens, VALUE_HEADS).abs() / 4,
        "beta": normal(1, tokens, VALUE_HEADS).sigmoid().to(dtype),
        "initial_state": normal(seqs, VALUE_HEADS, VALUE_SIZE, KEY_SIZE),
        "cu_seqlens": torch.tensor(STARTS, dtype=torch.int32),
    }


def truth(call: dict[str, Any], normalised: bool) -> tuple[Tensor, Tensor]:
    """(o [tokens, value_heads, value_size], final states) of all sequences."""
    rows = {name: call[name][0].double() for name in ("q", "k", "v", "g", "beta")}
    for name in ("q", "k"):
        row = normalize(rows[name], dim=-1, eps=1e-3) if normalised else rows[name]
        rows[name] = row.repeat_interleave(VALUE_HEADS // KEY_HEADS, 1)
    found = []
    for seq, (begin, end) in enumerate(pairwise(STARTS)):
        parts = (rows[name][begin:end] for name in ("q", "k", "v", "g", "beta"))
        found.append(recurrence(*parts, call["initial_state"][seq].double()))
    return torch.cat([o for o, _ in found]), torch.stack([state for _, state in found])


@pytest.mark.parametrize(
    "mode",
    ["reference", pytest.param("kernels", marks=pytest.mark.skipif(not toolchains(), reason="no C++ compiler"))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_with_initial_states(dtype: torch.dtype, mode: Any) -> None:
    call, layer = drawn(dtype), layers.ChunkGatedDeltaRule()
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    right, states = truth(call, normalised=True)
    with testing.cpu(mode):
        o, final = layer(**call, output_final_state=True)
        assert (o.shape, o.dtype, final.dtype) == (call["v"].shape, dtype, torch.float32)
        torch.testing.assert_close(o[0].double(), right, **tolerance)
        torch.testing.assert_close(final.double(), states, **tolerance)
        buffer = torch.full((STARTS[-1] + 5, VALUE_HEADS, VALUE_SIZE), 7.0, dtype=dtype)
        again, none = layer(**call, output_final_state=False, core_attn_out=buffer)
        assert none is None
        assert testing.same_bits(again, o)
        assert testing.same_bits(buffer[: STARTS[-1]], o[0])
        assert bool((buffer[STARTS[-1] :] == 7).all())


def test_without_norms_and_states() -> None:
    """All methods agree; the state begins with zeros, and rows of a batch are sequences."""
    call = drawn(torch.float32) | {"initial_state": torch.zeros(4, VALUE_HEADS, VALUE_SIZE, KEY_SIZE)}
    call["k"] = normalize(call["k"], dim=-1)
    right, states = truth(call, normalised=False)
    operands = [call[name] for name in ("q", "k", "v", "g", "beta")]
    o, final = of_all_methods(
        layers.ChunkGatedDeltaRule(), *operands, None, True, call["cu_seqlens"], None, None, False
    )
    torch.testing.assert_close(o[0].double(), right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final.double(), states, rtol=1e-4, atol=1e-4)
    batch = [torch.cat([part[:, 3:40]] * 2) for part in operands]
    o, final = of_all_methods(layers.ChunkGatedDeltaRule(), *batch, None, True, None, None, None, False)
    torch.testing.assert_close(o.double(), right[3:40].expand(2, -1, -1, -1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final.double(), states[2].expand(2, -1, -1, -1), rtol=1e-4, atol=1e-4)
