"""The ops of vLLM 0.33 for Kimi Delta Attention and for the gated delta rule of several speculative tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pyops.integrations.vllm import register, table
from tests.ops.mamba.test_gated_delta_rule import assert_near
from tests.ops.mamba.test_kda import part_of, tokens, truth


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with register("0.33"):
        yield


def test_flashkda() -> None:
    """Two prompts, with an initial, a final and a checkpoint state; vLLM allocates what get_workspace_size returns."""
    call = tokens("cpu", 50, (2, 2), (128, 128), torch.bfloat16) | {"lower_bound": -5.0}
    inputs = [call[name].contiguous() for name in ("q", "k", "v", "g", "beta")]
    initial, final, checkpoint = (torch.randn(2, 2, 128, 128) for _ in range(3))
    out, offsets = torch.empty_like(inputs[2]), torch.tensor([16, 0], dtype=torch.int32)
    kept = checkpoint[1].clone()
    workspace = torch.empty(torch.ops._flashkda_C.get_workspace_size(50, 2, 2), dtype=torch.uint8)
    torch.ops._flashkda_C.fwd(
        *(*inputs, 128**-0.5, out, workspace, call["A_log"], call["dt_bias"].view(2, 128), -5.0),
        *(initial, final, torch.tensor([0, 30, 50]), checkpoint, offsets),
    )
    for seq, (begin, end) in enumerate([(0, 30), (30, 50)]):
        wanted, states = truth(part_of(call, begin, end), initial[seq].transpose(1, 2))
        assert_near(out[:, begin:end], wanted, torch.bfloat16)
        assert_near(final[seq].transpose(1, 2), states[-1], torch.float32)
        if not seq:
            assert_near(checkpoint[0].transpose(1, 2), states[15], torch.float32)
    assert torch.equal(checkpoint[1], kept)


def test_fused_kda_decode_is_served() -> None:
    assert table("0.33")["fused_kda_decode"].state == "served"


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gdn_of_speculative_tokens(activation: str) -> None:
    """A sequence with slot 0, or without accepted tokens, has outputs of 0; others have a state after each token."""
    torch.manual_seed(3)
    key_heads, value_heads, size, count = 1, 2, 128, 6
    mixed = torch.randn(count, (2 * key_heads + value_heads) * size).bfloat16()
    a, b, A_log, dt_bias = (torch.randn(*n) for n in ((count, 2), (count, 2), (2,), (2,)))
    slots, accepted = (
        torch.tensor([[1, 2, 3], [0, 4, 5], [6, 7, 8]], dtype=torch.int32),
        torch.tensor([2, 1, 0], dtype=torch.int32),
    )
    starts, state = torch.tensor([0, 3, 5, 6], dtype=torch.int32), torch.randn(9, value_heads, size, size)
    gate, weight, before = torch.randn(count, value_heads, size).bfloat16(), torch.randn(size), state.clone()
    out = torch.empty_like(gate)
    torch.ops._C.fused_gdn_decode_post_conv_mtp(
        *(mixed, a.bfloat16(), b.bfloat16(), A_log, dt_bias, slots, starts, accepted, state, gate, weight, out),
        *(size**-0.5, 1e-5, activation),
    )
    q, k, v = (part.unflatten(1, (-1, size))[None] for part in mixed.split([size, size, 2 * size], 1))
    g = -A_log.exp() * (1 + (a.bfloat16().float() + dt_bias).exp()).log()
    call = {"q": q, "k": k, "v": v, "g": g[None, :, :, None].expand(1, count, 2, size), "scale": size**-0.5}
    call |= {"beta": b.bfloat16().float().sigmoid()[None], "use_beta_sigmoid_in_kernel": False}
    wanted, states = truth(part_of(call | {"use_qk_l2norm_in_kernel": True}, 0, 3), before[2].transpose(1, 2))
    normed = torch.nn.functional.rms_norm(wanted[0], (size,), weight.double(), 1e-5)
    opened = gate[:3].double()
    assert_near(out[:3], normed * opened.sigmoid() * (opened if activation == "silu" else 1.0), torch.bfloat16)
    assert not out[3:].any()
    for t in range(3):
        assert_near(state[1 + t].transpose(1, 2), states[t], torch.float32)
    untouched = [0, 4, 5, 6, 7, 8]
    assert torch.equal(state[untouched], before[untouched])
