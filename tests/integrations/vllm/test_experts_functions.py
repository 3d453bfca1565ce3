"""vLLM's experts of packed weights by this library's functions: prepared by vLLM, compared with float64."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyops import SCALAR_TYPES
from tests.ops.linear.test_products import positive
from tests.ops.moe.test_experts import coded, experts_in_float64
from tests.ops.moe.test_marlin import weight
from tests.support import packed
from tests.support.vllm_experts import (
    ANY_DEVICE,
    BF16,
    CHANNELS,
    EXPERTS,
    HIDDEN,
    LAYERS,
    Vllm,
    apply,
    error,
    installed,
    layer,
    moved,
    routed,
    vllm,
)

__all__ = ["installed", "vllm"]  # fixtures


@ANY_DEVICE
@pytest.mark.parametrize("kind", ["gptq", "gptq with order", "awq"])
@pytest.mark.parametrize("with_map", [False, True])
def test_4_bits(installed: Vllm, kind: str, with_map: bool, device: str) -> None:
    """Weights that vLLM repacks for Marlin in its own preparation of GPTQ and AWQ."""
    x, weights, ids = routed(experts=6 if with_map else EXPERTS)
    expert_map = torch.tensor([3, -1, 0, 2, 1, -1], dtype=torch.int32) if with_map else None
    group, common = 64, {"lm_head_quantized": False, "full_config": {}}
    of_w1, of_w2 = (packed_weights(kind, k, n, group) for k, n in ((HIDDEN, 2 * CHANNELS), (CHANNELS, HIDDEN)))
    exact = experts_in_float64(x, of_w1["w"], of_w2["w"], weights, ids, expert_map=expert_map)
    of_w1, of_w2 = (dict(zip(of, moved(device, *of.values()), strict=True)) for of in (of_w1, of_w2))
    if kind == "awq":
        scheme = installed.awq_marlin.AWQMarlinConfig(4, group, True, modules_to_not_convert=None, **common)
        zeros = {"w13_qzeros": of_w1["zeros"], "w2_qzeros": of_w2["zeros"]}
    else:
        scheme = installed.auto_gptq.AutoGPTQConfig(4, group, kind != "gptq", True, dynamic={}, **common)
        zeros = {"w13_g_idx": of_w1["groups"], "w2_g_idx": of_w2["groups"]}
    oracle, config = installed.int_wna16, layer(installed, device=device)
    backend, experts = oracle.select_wna16_moe_backend(config, installed.quant_utils.kInt4Static, 4)
    groups = {"num_groups_w13": HIDDEN // group, "num_groups_w2": CHANNELS // group}
    a_layer = SimpleNamespace(intermediate_size_per_partition=CHANNELS, **groups)
    codes, scales = ([of[name] for of in (of_w1, of_w2)] for name in ("codes", "scales"))
    prepared = oracle.convert_to_wna16_moe_kernel_format(backend, a_layer, scheme, None, *codes, *scales, **zeros)
    (w13, w2, s13, s2), of_groups, (z13, z2) = prepared[:4], prepared[4:8], prepared[8:10]
    quant_config = installed.config.int4_w4a16_moe_quant_config(s13, s2, z13, z2, [0, group])
    kernel = oracle.make_wna16_moe_kernel(quant_config, config, experts, True, *of_groups)
    calls: list[str] = []
    theirs = pytest.MonkeyPatch()
    theirs.setattr(installed.marlin_moe, "_fused_marlin_moe", lambda *_, **__: calls.append("vLLM's"))
    out = apply(installed, kernel, x, w13, w2, weights, ids, expert_map)
    theirs.undo()
    assert not calls
    assert error(out, exact) <= 2.0**-6
    assert not out[2].any()


def packed_weights(kind: str, k: int, n: int, group: int) -> dict[str, torch.Tensor]:
    """Quants, scales, zero points and groups as in checkpoints of a kind, and w [experts, n, k]."""
    found: list[dict[str, torch.Tensor]] = []
    for e in range(EXPERTS):
        codes, zeros = packed.draw(0, 16, k, n, seed=k + e), packed.draw(0, 16, k // group, n, seed=k + 9 + e)
        zeros = zeros if kind == "awq" else torch.full_like(zeros, 8)
        scales = ((positive(k // group, n, seed=e) + 0.5) * k**-0.5 / 8).to(BF16)
        groups = torch.arange(k) // group
        if kind == "gptq with order":
            groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(e))]
        w = ((codes - zeros[groups]) * scales[groups].double()).T
        parts = {"codes": (packed.awq if kind == "awq" else packed.gptq)(codes, 4), "zeros": packed.awq(zeros)}
        found.append({**parts, "scales": scales, "groups": groups.int(), "w": w})
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


def test_functions_of_experts(installed: Vllm) -> None:
    """`fused_experts` of 4 bits along K; vLLM's own function for other cases."""
    function = importlib.import_module(f"{LAYERS}.fused_moe.fused_moe").fused_experts
    x, weights, ids = routed()
    (c1, s1, z1, w1), (c2, s2, z2, w2) = (
        coded("int4 zeros", sizes, seed)
        for seed, sizes in enumerate([(EXPERTS, 2 * CHANNELS, HIDDEN), (EXPERTS, HIDDEN, CHANNELS)])
    )
    quant_config = installed.config.int4_w4a16_moe_quant_config(s1, s2, z1, z2, [0, 32])
    silu, gelu_tanh = installed.activation.MoEActivation.SILU, installed.activation.MoEActivation.GELU_TANH
    out = function(x, c1, c2, topk_weights=weights, topk_ids=ids, activation=silu, quant_config=quant_config)
    assert error(out, experts_in_float64(x, w1, w2, weights, ids)) <= 2.0**-7
    calls: list[str] = []
    theirs = functions_of(installed).fused(lambda *_, **__: calls.append("vLLM's"))
    theirs(x, c1, c2, weights, ids, activation=gelu_tanh, quant_config=quant_config)
    theirs(x.float(), w1.float(), w2.float(), weights, ids)
    assert len(calls) == 2


def functions_of(installed: Vllm) -> Any:
    return importlib.import_module("pyops.integrations.vllm.parts._expert_functions")


def test_marlin_with_the_callers_functions(installed: Vllm) -> None:
    """Callbacks that adapters (LoRA) add to the activation and to the sum, called with vLLM's names of activations."""
    x, weights, ids = routed()
    (_, of_w1), (_, of_w2) = weight(128, 2 * 64, 1, False, False), weight(64, 128, 50, False, False)
    x, calls = x[:, :128].contiguous(), []
    plain = installed.activation.apply_moe_activation

    def activation_func(activation: Any, out: torch.Tensor, x: torch.Tensor) -> None:
        calls.append(activation)
        plain(activation, out, x)

    def moe_sum(x: torch.Tensor, out: torch.Tensor) -> None:
        calls.append("sum")
        torch.sum(x, 1, out=out)

    call = x, of_w1["codes"], of_w2["codes"], None, None, of_w1["scales"], of_w2["scales"], weights, ids
    kind = {"quant_type_id": SCALAR_TYPES["uint4b8"].id}
    gelu = installed.activation.MoEActivation.GELU
    expected = installed.marlin_moe.fused_marlin_moe(*call, **kind, activation=gelu, activation_func=plain)
    given = {"activation": gelu, "activation_func": activation_func, "moe_sum": moe_sum}
    out = installed.marlin_moe.fused_marlin_moe(*call, **kind, **given)
    assert calls == [gelu, "sum"]
    assert error(out[3:], expected[3:].double()) <= 2.0**-8
