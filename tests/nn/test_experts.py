"""MoE layers: all methods agree, checkpoints load, experts on several ranks add up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

import pyops
from pyops.nn import (
    FusedMoE,
    FusedMoEModularMethod,
    ReplicatedLinear,
    TransformersFusedMoE,
    UnquantizedFusedMoEMethod,
    experts,
    mixture,
)
from pyops.nn.custom_op import set_custom_ops

TOKENS, EXPERTS, HIDDEN, CHANNELS = 9, 8, 64, 32


@pytest.fixture(autouse=True)
def on_cuda() -> Iterator[None]:
    """Make layers as on CUDA; their ops then run their references."""
    with set_custom_ops("all", platform="cuda"):
        yield


def filled(layer: FusedMoE) -> FusedMoE:
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.2, generator=generator)
    return layer


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, HIDDEN, generator=generator), torch.randn(TOKENS, EXPERTS, generator=generator)


GROUPS = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
BIAS = torch.linspace(-1.0, 1.0, EXPERTS)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"renormalize": False, "routed_scaling_factor": 2.5},
    GROUPS,
    {**GROUPS, "scoring_func": "sigmoid", "e_score_correction_bias": BIAS, "routed_scaling_factor": 2.5},
    {"scoring_func": "sigmoid", "e_score_correction_bias": BIAS},
    {"activation": "swigluoai", "has_bias": True},
    {"activation": "relu2", "is_act_and_mul": False},
    {"swiglu_limit": 0.5},
    {"swiglu_limit": 0.5, "has_bias": True, "scoring_func": "sqrtsoftplus", "e_score_correction_bias": BIAS},
    {"custom_routing_function": lambda x, logits, k, _: (torch.ones(len(x), k), logits.topk(k, 1)[1].int())},
]


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_methods_agree(options: dict[str, Any]) -> None:
    """Plain PyTorch and the ops, up to the rounding of sums."""
    layer, given = filled(FusedMoE(EXPERTS, 2, HIDDEN, CHANNELS, **options)), inputs()
    native, by_ops = layer.forward_native(*given), layer.forward_cuda(*given)
    assert (native - by_ops).abs().max() <= 2.0**-20 * native.abs().max()
    assert native.abs().max() > 0.1


def test_layer_by_hand() -> None:
    layer, (x, logits) = filled(FusedMoE(EXPERTS, 3, HIDDEN, CHANNELS)), inputs()
    chances, ids = logits.double().softmax(1).topk(3, 1)
    chances = chances / chances.sum(1, keepdim=True)
    exact = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for t in range(TOKENS):
        for j in range(3):
            gate, up = (layer.w13_weight[ids[t, j]].double() @ x[t].double()).chunk(2)
            exact[t] += chances[t, j] * (layer.w2_weight[ids[t, j]].double() @ (silu(gate) * up))
    assert (layer(x, logits) - exact).abs().max() <= 2.0**-20 * exact.abs().max()
    chosen = TransformersFusedMoE(EXPERTS, 3, HIDDEN, CHANNELS)
    chosen.load_state_dict(layer.state_dict())
    for method in (chosen, chosen.forward_native, chosen.forward_cuda):
        assert (method(x, ids, chances) - exact).abs().max() <= 2.0**-20 * exact.abs().max()


def test_shared_experts_transforms_and_scale() -> None:
    """The layer's own gate, shared experts, transforms of the input and of the sum, the scale of the sum; by hand."""
    torch.manual_seed(3)
    wide = 48
    gate, down, up, shared = (
        torch.nn.Linear(*sizes, bias=False)
        for sizes in ((HIDDEN, EXPERTS), (wide, HIDDEN), (HIDDEN, wide), (wide, wide))
    )
    plain = filled(FusedMoE(EXPERTS, 2, HIDDEN, CHANNELS, scoring_func="sigmoid"))
    options: dict[str, Any] = {"routed_scaling_factor": 2.5, "apply_routed_scale_to_output": True}
    options |= {"gate": gate, "shared_experts": shared, "scoring_func": "sigmoid"}
    layer = FusedMoE(
        *(EXPERTS, 2, HIDDEN, CHANNELS), routed_input_transform=down, routed_output_transform=up, **options
    )
    layer.load_state_dict(plain.state_dict(), strict=False)
    assert layer.is_internal_router
    assert not plain.is_internal_router
    x, ignored = torch.randn(TOKENS, wide), torch.full((TOKENS, EXPERTS), float("nan"))
    with torch.no_grad():
        expected = shared(x) + up(2.5 * plain(down(x), gate(down(x))))
        for method in (layer.forward_native, layer.forward_cuda):
            torch.testing.assert_close(method(x, ignored), expected, rtol=1e-5, atol=1e-5)
        # Layers of this library return a pair.
        layer.shared_experts = ReplicatedLinear(wide, wide, bias=False)
        layer.shared_experts.weight.copy_(shared.weight)
        torch.testing.assert_close(layer(x, ignored), expected, rtol=1e-5, atol=1e-5)
        assert isinstance(layer.shared_experts(x), tuple)


def test_scaled_sum_in_float16() -> None:
    """Shared experts are divided by the scale, as in vLLM: the model multiplies later."""
    given = {"routed_scaling_factor": 4.0, "apply_routed_scale_to_output": True, "params_dtype": torch.float16}
    x, logits = (one.half() for one in inputs())
    layer = filled(FusedMoE(EXPERTS, 2, HIDDEN, CHANNELS, **given))
    alone = layer(x, logits)
    layer.shared_experts = torch.nn.Identity()
    torch.testing.assert_close(layer(x, logits), alone / 4 + x / 4, rtol=2.0**-9, atol=2.0**-10)


def test_experts_selected_by_a_token_table() -> None:
    table = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(20)]).int()
    layer = filled(FusedMoE(EXPERTS, 2, HIDDEN, CHANNELS, scoring_func="sqrtsoftplus", hash_indices_table=table))
    (x, logits), tokens = inputs(), torch.arange(TOKENS) * 2
    chances, ids = layer.select_experts(x, logits, tokens)
    assert torch.equal(ids, table[tokens])
    scores = torch.nn.functional.softplus(logits).sqrt().gather(1, ids.long())
    torch.testing.assert_close(chances, scores / scores.sum(1, keepdim=True))
    torch.testing.assert_close(layer.forward_native(x, logits, tokens), layer.forward_cuda(x, logits, tokens))


def test_clamped_experts_by_hand() -> None:
    layer, (x, logits) = filled(FusedMoE(EXPERTS, 1, HIDDEN, CHANNELS, swiglu_limit=0.25)), inputs()
    ids = logits.argmax(1)
    halves = torch.einsum("erk,tk->ter", layer.w13_weight.double(), x.double())[torch.arange(TOKENS), ids]
    gate, up = halves.chunk(2, 1)
    hidden = silu(gate.clamp(max=0.25)) * up.clamp(-0.25, 0.25)
    exact = torch.einsum("thc,tc->th", layer.w2_weight[ids].double(), hidden)
    for method in (layer.forward_native, layer.forward_cuda):
        assert (method(x, logits) - exact).abs().max() <= 2.0**-20 * exact.abs().max()
    with pytest.raises(pyops.OpError, match=r"expected gemm1_clamp_limit None with gelu, got 1\.0"):
        pyops.fused_experts(
            *(x, layer.w13_weight, layer.w2_weight, torch.ones(TOKENS, 1), ids[:, None]),
            activation="gelu",
            quant_config=pyops.FusedMoEQuantConfig(gemm1_clamp_limit=1.0),
        )


def test_switches() -> None:
    with set_custom_ops("all,-fused_moe,-unquantized_fused_moe", platform="cuda"):
        layer = filled(FusedMoE(EXPERTS, 2, HIDDEN, CHANNELS))
    assert layer._forward_method == layer.forward_native
    assert layer.quant_method._forward_method == layer.quant_method.forward_native


def test_kernel_of_a_modular_method() -> None:
    """It is called if the layer is on; otherwise the previous method computes."""
    calls = []

    def kernel(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(options)
        return pyops.fused_experts(*args, **options)

    layer, given = filled(FusedMoE(EXPERTS, 2, HIDDEN, CHANNELS, has_bias=True)), inputs()
    expected = layer.forward_cuda(*given)
    layer.quant_method = FusedMoEModularMethod(UnquantizedFusedMoEMethod(), kernel)
    chosen = layer.select_experts(*given)
    assert torch.equal(layer.quant_method.forward_cuda(layer, given[0], *chosen), expected)
    assert [one["activation"] for one in calls] == ["silu"]
    assert (layer.forward_native(*given) - expected).abs().max() <= 2.0**-20 * expected.abs().max()
    assert len(calls) == 1


@pytest.mark.parametrize("ep_size", [None, 2])
def test_ranks_divide_channels_or_experts(ep_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint, loaded by two ranks, gives results that add up to those of one rank."""
    whole, given = filled(FusedMoE(EXPERTS, 2, HIDDEN, CHANNELS, has_bias=True)), inputs()
    names = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", EXPERTS)
    assert len(names) == 3 * EXPERTS
    checkpoint = {}
    for at, name, expert, shard in names:
        for kind in ("weight", "bias"):
            value = getattr(whole, f"{at.removeprefix('experts.')}{kind}")[expert]
            part = value if shard == "w2" else value.chunk(2)[int(shard == "w3")]
            checkpoint[f"{name}{kind}"] = part
    total = torch.zeros_like(given[0])
    for rank in range(2):
        for module in (experts, mixture):
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 2)
        monkeypatch.setattr(experts, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        layer = FusedMoE(EXPERTS, 2, HIDDEN, CHANNELS, has_bias=True, ep_size=ep_size)
        for at, name, expert, shard in names:
            for kind in ("weight", "bias"):
                parameter = getattr(layer, f"{at.removeprefix('experts.')}{kind}")
                layer.weight_loader(parameter, checkpoint[f"{name}{kind}"], f"{name}{kind}", shard, expert)
        parts = layer.forward_cuda(*given), layer.forward_native(*given)
        assert (parts[0] - parts[1]).abs().max() <= 2.0**-20 * parts[0].abs().max()
        total += parts[0]
    expected = whole(*given)
    assert (total - expected).abs().max() <= 2.0**-19 * expected.abs().max()


def test_interleaved_gate_and_up_stay_interleaved() -> None:
    layer = FusedMoE(2, 1, 4, 3, activation="swigluoai")
    gate, up = torch.ones(3, 4), torch.full((3, 4), 2.0)
    layer.weight_loader(layer.w13_weight, gate, "gate", "w1", 1)
    layer.weight_loader(layer.w13_weight, up, "up", "w3", 1)
    assert layer.w13_weight[1, :, 0].tolist() == [1.0, 2.0] * 3


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"top_k": 9}, "top_k"),
        ({"activation": "tanh"}, "activation"),
        ({"quant_config": object()}, "quant_config"),
        ({"ep_size": 3}, "ep_size"),
        ({"dp_size": 2}, "dp_size"),
        ({"scoring_func": "tanh"}, "scoring_func"),
        ({"use_grouped_topk": True}, "num_expert_group"),
        ({**GROUPS, "scoring_func": "sqrtsoftplus"}, "scoring_func"),
        ({"swiglu_limit": 1.0, "activation": "gelu"}, "swiglu_limit"),
        ({"hash_indices_table": torch.zeros(3, 2)}, "hash_indices_table"),
        ({"enable_eplb": True}, "enable_eplb"),
        ({"num_redundant_experts": 1}, "num_redundant_experts"),
        ({"is_sequence_parallel": True}, "is_sequence_parallel"),
        ({"shared_expert_gate": torch.nn.Identity()}, "shared_expert_gate"),
        ({"zero_expert_type": "identity"}, "zero_expert_type"),
    ],
)
def test_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"FusedMoE: {name}"):
        FusedMoE(**{"num_experts": EXPERTS, "top_k": 2, "hidden_size": HIDDEN, "intermediate_size": CHANNELS} | options)


def test_weights_of_other_shapes_and_names_are_refused() -> None:
    layer = FusedMoE(EXPERTS, 2, HIDDEN, CHANNELS)
    with pytest.raises(ValueError, match=r"one: expected shape \(32, 64\) on this rank, got \(32, 63\)"):
        layer.weight_loader(layer.w13_weight, torch.ones(CHANNELS, HIDDEN - 1), "one", "w1", 0)
    with pytest.raises(ValueError, match="shard_id: expected w1, w2 or w3, got 'w4' for one"):
        layer.weight_loader(layer.w13_weight, torch.ones(CHANNELS, HIDDEN), "one", "w4", 0)
