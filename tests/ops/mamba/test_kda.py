"""Kimi Delta Attention, against a loop over tokens in float64: gates of any strength, checkpoints, hostile indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyops
from pyops.testing.calls import assert_results, expected, run
from tests.ops.mamba.test_gated_delta_rule import assert_near, device
from tests.support.calls import example

__all__ = ["device"]  # a fixture

Call = dict[str, Any]


def tokens(device: str, count: int, heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype) -> Call:
    """Arguments of `kda` for one row of tokens, with logits of gates; q, k and v are views of one tensor."""
    torch.manual_seed(count + sum(sizes))
    widths = [heads[0] * sizes[0], heads[0] * sizes[0], heads[1] * sizes[1]]
    parts = torch.randn(1, count, sum(widths), device=device).to(dtype).split(widths, 2)
    found: Call = {
        name: part.unflatten(2, (many, -1))
        for name, part, many in zip(("q", "k", "v"), parts, (heads[0], *heads), strict=True)
    }
    found["g"] = (torch.randn(1, count, heads[1], sizes[0], device=device) - 2).to(dtype)
    found["beta"] = torch.randn(1, count, heads[1], device=device).to(dtype)
    found["A_log"] = torch.randn(heads[1], device=device) / 2
    found["dt_bias"] = torch.randn(heads[1] * sizes[0], device=device)
    return found | {"scale": sizes[0] ** -0.5, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def truth(call: Call, initial: torch.Tensor | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The outputs of a row of tokens, and the state [value_heads, key_size, value_size] after each."""
    q, k, v, g, beta = (call[name][0].double().cpu() for name in ("q", "k", "v", "g", "beta"))
    if call.get("A_log") is not None:
        rate, bias = call["A_log"].double().cpu().exp()[:, None], call["dt_bias"].double().cpu().view(g.shape[1:])
        bound = call.get("lower_bound")
        g = -rate * (g + bias).exp().log1p() if bound is None else bound / (1 + (-rate * (g + bias)).exp())
    if call["use_beta_sigmoid_in_kernel"]:
        beta = 1 / (1 + (-beta).exp())
    if call["use_qk_l2norm_in_kernel"]:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    group, states, outputs = v.shape[1] // q.shape[1], [], []
    state = torch.zeros(v.shape[1], k.shape[2], v.shape[2]).double() if initial is None else initial.double().cpu()
    for t in range(len(q)):
        key, query = k[t].repeat_interleave(group, 0), q[t].repeat_interleave(group, 0)
        state = g[t].exp()[:, :, None] * state
        error = v[t] - torch.einsum("hkv,hk->hv", state, key)
        state = state + torch.einsum("hk,hv,h->hkv", key, error, beta[t])
        states.append(state)
        outputs.append(call["scale"] * torch.einsum("hkv,hk->hv", state, query))
    return torch.stack(outputs)[None], states


def part_of(call: Call, begin: int, end: int) -> Call:
    """The call on some of its tokens."""
    return {name: x[:, begin:end] if isinstance(x, torch.Tensor) and x.ndim > 2 else x for name, x in call.items()}


@pytest.mark.parametrize(
    ("heads", "sizes", "dtype", "lower_bound"),
    [
        ((1, 2), (128, 32), torch.bfloat16, -5.0),
        ((2, 2), (64, 96), torch.float16, None),
        ((1, 1), (32, 64), torch.bfloat16, None),
        ((1, 2), (96, 32), torch.float16, -0.5),
        ((1, 3), (7, 5), torch.float32, -5.0),
    ],
)
def test_prompts_and_checkpoints(
    device: str, heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype, lower_bound: float | None
) -> None:
    """Sequences of lengths around a tile, each with a state after some of its tokens; states in either order."""
    lengths, offsets = [34, 1, 0, 64, 40, 32, 33], [1, 1, 5, 37, 41, 0, 32]
    state_v_first = heads == (1, 2)
    call = tokens(device, sum(lengths), heads, sizes, dtype) | {"lower_bound": lower_bound}
    states = torch.randn(3, len(lengths), heads[1], *sizes, device=device)
    given = (states.transpose(3, 4) if state_v_first else states).contiguous().clone()
    initial, final, checkpoint = given
    o = pyops.kda(
        **call,
        initial_state=initial,
        cu_seqlens=torch.tensor([0, *lengths], device=device).cumsum(0),
        state_v_first=state_v_first,
        final_state=final,
        checkpoint_state=checkpoint,
        checkpoint_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
    )
    final, checkpoint = ((x.transpose(2, 3) if state_v_first else x).cpu() for x in (final, checkpoint))
    begin = 0
    for seq, (length, offset) in enumerate(zip(lengths, offsets, strict=True)):
        own = states[0, seq].double().cpu()
        if length:
            wanted, after = truth(part_of(call, begin, begin + length), own)
            assert_near(o[:, begin : begin + length].cpu(), wanted, dtype)
        else:
            after = [own]
        assert_near(final[seq], after[-1], dtype)
        if 0 < offset <= length:
            assert_near(checkpoint[seq], after[offset - 1], dtype)
        else:
            assert torch.equal(checkpoint[seq], states[2, seq].cpu())
        begin += length


@pytest.mark.parametrize("kind", ["least", "open", "mixed", "sudden"])
def test_gates_of_any_strength(device: str, kind: str) -> None:
    """No factor overflows, and tokens keep what their decays leave of neighbours: strong, weak and zero decays."""
    call = tokens(device, 96, (1, 2), (64, 32), torch.bfloat16)
    call["dt_bias"] = torch.zeros_like(call["dt_bias"])
    signs = torch.where(call["g"] < -2, -1.0, 1.0)
    if kind == "least":  # -5 for each of 96 tokens
        call |= {"g": torch.full_like(call["g"], 50.0), "lower_bound": -5.0}
    elif kind == "open":  # raw gates of 50: logarithms of about -50
        call["g"] = torch.full_like(call["g"], 50.0)
    elif kind == "mixed":
        call["g"] = (50 * signs).to(torch.bfloat16)
    else:  # logarithms of decays: 0, and now and then -inf
        call["g"] = torch.zeros_like(call["g"]).float()
        call["g"][:, 5::7, :, ::3] = -torch.inf
        call["A_log"] = call["dt_bias"] = None
    final = torch.empty(1, 2, 64, 32, device=device)
    o = pyops.kda(**call, final_state=final)
    wanted, states = truth(call)
    assert_near(o.cpu(), wanted, torch.bfloat16)
    assert_near(final[0].cpu(), states[-1], torch.bfloat16)


def test_one_decay_for_all_channels_is_the_gated_delta_rule(device: str) -> None:
    call = tokens(device, 70, (1, 2), (64, 32), torch.bfloat16)
    g = -torch.rand(1, 70, 2, device=device)
    rest = {name: call[name] for name in ("q", "k", "v", "scale", "use_qk_l2norm_in_kernel")}
    beta = call["beta"].float().sigmoid()
    o = pyops.kda(**rest, g=g[..., None].expand(1, 70, 2, 64).contiguous(), beta=beta)
    assert_near(o, pyops.gated_delta_rule(**rest, g=g, beta=beta).double(), torch.bfloat16)


def test_matches_transformers(device: str) -> None:
    """Kimi Linear's own function."""
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    call = tokens(device, 50, (2, 2), (32, 32), torch.float16)
    args = [call[name] for name in ("q", "k", "v")] + [-torch.rand(1, 50, 2, 32), torch.rand(1, 50, 2)]
    args = [x.to(device) for x in args]
    o, last = pyops.chunk_kda(*args, output_final_state=True, use_qk_l2norm_in_kernel=True)
    rule = getattr(modeling.recurrent_kimi_delta_attention, "__wrapped__", modeling.recurrent_kimi_delta_attention)
    wanted, wanted_last = rule(*(x.float().cpu() for x in args), None, True, use_qk_l2norm_in_kernel=True)
    assert_near(o.cpu(), wanted.double(), torch.float16)
    assert_near(last.cpu(), wanted_last.double(), torch.float16)


def test_speculative_tokens(device: str) -> None:
    """Each draft token has its own state, and a step starts from that of the last accepted token."""
    call = tokens(device, 6, (1, 2), (32, 8), torch.float32) | {"lower_bound": -5.0}
    starts, slots = torch.tensor([0, 3, 3, 6]), torch.tensor([[0, 1, 2], [3, 4, 5], [6, -1, 99]])
    state = torch.randn(9, 2, 32, 8, device=device)
    before, accepted = state.clone().cpu(), torch.tensor([2, 1, 1])
    indices = {"cu_seqlens": starts, "ssm_state_indices": slots, "num_accepted_tokens": accepted}
    o = pyops.kda_update(state, **call, **{name: x.to(device) for name, x in indices.items()})
    held = before.double()
    for seq, (begin, end) in enumerate([(0, 3), (3, 3), (3, 6)]):
        if begin < end:
            wanted, after = truth(part_of(call, begin, end), before[slots[seq, accepted[seq] - 1]])
            assert_near(o[:, begin:end].cpu(), wanted, torch.float32)
            for slot, one in zip(slots[seq].tolist(), after, strict=True):
                if 0 <= slot < 9:
                    held[slot] = one
    assert_near(state.cpu(), held, torch.float32)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 128), (torch.float32, 20)])
def test_fused_decode(device: str, dtype: torch.dtype, size: int) -> None:
    """Three tokens, one at a time, are a causal convolution, the recurrence and a gated norm of each head."""
    torch.manual_seed(size)
    heads, count, slots = 2, 3, torch.tensor([3, -1, 0], dtype=torch.int32)
    width = heads * size
    x, gate = torch.randn(3, count, 3 * width).to(dtype), torch.randn(3, count, heads, size).to(dtype)
    raw_g, raw_beta = torch.randn(3, count, heads, size).to(dtype) - 2, torch.randn(3, count, heads).to(dtype)
    weight, bias, norm_weight = torch.randn(3, 4, width) / 2, torch.randn(3 * width), torch.randn(size)
    A_log, dt_bias = torch.randn(heads) / 2, torch.randn(width)
    conv, state = torch.randn(5, 3, 3 * width).to(dtype).transpose(1, 2), torch.randn(5, heads, size, size)
    held = [each.clone().to(device) for each in (conv, state)]
    call = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": -5.0, "scale": size**-0.5}
    call |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    parameters = [p.to(device) for p in (A_log, dt_bias, slots)]
    results = []
    for t in range(count):
        out = torch.full((1, 3, heads, size), 7.0, dtype=dtype, device=device)
        of_token = [p[None, :, t].contiguous().to(device) for p in (raw_g, raw_beta)]
        pyops.fused_kda_decode(
            *(x[:, t].to(device), weight.to(device), bias.to(device), held[0], *of_token, *parameters, held[1], out),
            *(-5.0, gate[:, t].to(device), norm_weight.to(device), 1e-5),
        )
        results.append(out[0].cpu())
    for seq, slot in enumerate(slots.tolist()):
        actual = torch.stack([result[seq] for result in results])
        if slot < 0:
            assert torch.equal(actual, torch.full_like(actual, 7.0))
            continue
        history = torch.cat([conv[slot].double(), x[seq].double().T], 1)
        taps = weight.double().transpose(1, 2).reshape(3 * width, 1, 4)
        parts = torch.nn.functional.conv1d(history[None], taps, bias.double(), groups=3 * width)
        q, k, v = torch.nn.functional.silu(parts)[0].T.view(1, count, 3, heads, size).unbind(2)
        rest = {"g": raw_g[seq][None], "beta": raw_beta[seq][None]}
        o, states = truth(call | {"q": q, "k": k, "v": v} | rest, state[slot].transpose(1, 2))
        wanted = torch.nn.functional.rms_norm(o[0], (size,), norm_weight.double(), 1e-5) * gate[seq].double().sigmoid()
        assert_near(actual, wanted, dtype)
        assert_near(held[1][slot].cpu().transpose(1, 2), states[-1], torch.float32)
        assert torch.equal(held[0][slot].cpu().double(), history[:, -3:])
    untouched = [1, 2, 4]
    assert torch.equal(held[1][untouched].cpu(), state[untouched])
    assert torch.equal(held[0][untouched].cpu(), conv[untouched])


@pytest.mark.parametrize("value", [-1, -(2**31), 2**31 - 1])
def test_hostile_checkpoints(device: str, value: int) -> None:
    """An offset that no token has leaves its state alone, and the other sequence has its own."""
    op = pyops.registry["kda"]
    for head_dim in (128, 7):
        args = example(op, device, num_tokens=40, head_dim=head_dim, options=True)
        index = [p.name for p in op.parameters].index("checkpoint_offsets")
        args[index] = args[index].clone()
        args[index][1] = value
        assert_results(op, expected(op, args), run(op, args))


def test_norms_near_the_float_maximum(device: str) -> None:
    """Squares of bfloat16 keys and queries overflow, but only their directions count."""
    call = tokens(device, 40, (1, 2), (64, 32), torch.bfloat16)
    of_ones, of_largest = call.copy(), call.copy()
    for name in ("q", "k"):
        signs = call[name].sign()
        rows = torch.arange(40, device=device)[None, :, None, None] % 5 == 1
        of_ones[name] = torch.where(rows, signs * 1024.0, call[name])  # next to this, epsilon = 1e-6 is negligible
        of_largest[name] = torch.where(rows, signs * torch.finfo(torch.bfloat16).max, call[name])
    assert_near(pyops.kda(**of_largest).cpu(), truth(of_ones)[0], torch.bfloat16)


def test_refused() -> None:
    call = tokens("cpu", 5, (2, 4), (16, 8), torch.float32)
    for changes, argument in [
        ({"g": call["g"][..., 0]}, "g"),
        ({"A_log": call["A_log"][:3]}, "A_log"),
        ({"A_log": None}, "dt_bias"),
        ({"dt_bias": call["dt_bias"].view(16, 4)}, "dt_bias"),
        ({"lower_bound": 1.0}, "lower_bound"),
        ({"checkpoint_state": torch.zeros(1, 4, 16, 8)}, "checkpoint_state"),
        ({"checkpoint_offsets": torch.zeros(1, dtype=torch.int32)}, "checkpoint_offsets"),
        ({"initial_state": torch.zeros(2, 4, 16, 8)}, "initial_state"),
    ]:
        with pytest.raises(pyops.OpError) as caught:
            pyops.kda(**call | changes)
        assert caught.value.argument == argument
    with pytest.raises(ValueError, match="A_log"):
        pyops.chunk_kda(*(call[name] for name in ("q", "k", "v", "g", "beta")), use_gate_in_kernel=True)
