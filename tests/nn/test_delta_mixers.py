"""Mixers with the gated delta rule against transformers with the same weights: prompts, chunked prompts, decode
steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyops import nn as layers
from pyops import testing
from pyops.host.toolchain import toolchains

pytestmark = pytest.mark.usefixtures("no_grad")

Tensor = torch.Tensor
LENGTHS = [9, 3, 40]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
# The generator of transformers' parameters; the test draws them again.
DRAWN = {"linear_a_log_min": 1.0, "linear_a_log_max": 16.0, "linear_dt_min": 1e-3, "linear_dt_max": 0.1}
DRAWN |= {"linear_dt_init_floor": 1e-4, "dtype": None, "layer_types": ["linear_attention"]}
MODES = ["reference", pytest.param("kernels", marks=pytest.mark.skipif(not toolchains(), reason="no C++ compiler"))]


def theirs_and_ours(kind: str) -> tuple[Any, Any]:
    """Layers with the same random weights: one of transformers and one of this library."""
    torch.manual_seed(5)
    name = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5", "olmo_hybrid": "OlmoHybrid"}[kind]
    modeling = pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")
    config = SimpleNamespace(**SIZES, **DRAWN, linear_allow_neg_eigval=True)
    theirs = getattr(modeling, f"{name}GatedDeltaNet")(config, 0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    weights = theirs.state_dict()

    def joined(*names: str) -> Tensor:
        return torch.cat([weights.pop(f"{name}.weight") for name in names])

    if kind == "olmo_hybrid":
        ours: Any = layers.OlmoHybridGatedDeltaNetAttention(config, None)
        weights["in_proj_qkvg.weight"] = joined("q_proj", "k_proj", "v_proj", "g_proj")
        if "conv1d.weight" not in weights:  # in older versions of transformers
            weights["conv1d.weight"] = joined("q_conv1d", "k_conv1d", "v_conv1d")
    else:
        ours = layers.QwenGatedDeltaNetAttention(config, None, "layer", kind == "qwen3_next")
        if kind == "qwen3_5":
            weights["in_proj_qkvz.weight"] = joined("in_proj_qkv", "in_proj_z")
            weights["in_proj_ba.weight"] = joined("in_proj_b", "in_proj_a")
    ours.load_state_dict(weights)
    return theirs, ours


def kimi() -> tuple[Any, Any]:
    """The same of Kimi Linear."""
    torch.manual_seed(6)
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    sizes = {"head_dim": 16, "num_heads": 2, "short_conv_kernel_size": 4}
    own: dict[str, Any] = {"linear_head_dim": 16, "linear_num_heads": 2, "linear_conv_kernel_dim": 4}
    own |= {"hidden_size": 32, "hidden_act": "silu", "rms_norm_eps": 1e-5, "layer_types": ["linear_attention"]}
    config = SimpleNamespace(**own)
    theirs = modeling.KimiLinearDeltaAttention(config, 0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    ours = layers.KimiGatedDeltaNetAttention(SimpleNamespace(hidden_size=32, linear_attn_config=sizes), None)
    ours.load_state_dict({name.removeprefix("forget_gate."): weight for name, weight in theirs.state_dict().items()})
    return theirs, ours


def states(shape: tuple[int, ...] = (4, 8, 16)) -> tuple[Tensor, Tensor]:
    """Five state slots. No sequence without an initial state may read their contents."""
    return torch.full((5, 96, 3), torch.nan), torch.full((5, *shape), torch.nan)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear"])
def test_matches_transformers(kind: str, mode: Any) -> None:
    theirs, ours = kimi() if kind == "kimi_linear" else theirs_and_ours(kind)
    texts = [torch.randn(length, 32) for length in LENGTHS]
    expected = torch.cat([theirs(text[None])[0] for text in texts])
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)])
    with testing.cpu(mode):
        for method in (ours.forward_native, ours.forward_cuda):
            torch.testing.assert_close(method(torch.cat(texts), None, None, starts), expected, rtol=1e-4, atol=1e-5)
        # In two pieces, and the last two tokens of each sequence one by one.
        kept, slots, found = states(ours.state_shape), torch.tensor([3, 0, 4]), [[], [], []]
        cuts = [[0, 2, length - 2, length - 1, length] for length in LENGTHS]
        cuts[1] = [0, 1, 1, 2, 3]
        for piece in range(4):
            parts = [text[cut[piece] : cut[piece + 1]] for text, cut in zip(texts, cuts, strict=True)]
            ends = torch.tensor([0, *torch.tensor([len(part) for part in parts]).cumsum(0)])
            initial = torch.full((3,), piece > 0)
            steps = 3 if piece > 1 else 0
            y = ours(torch.cat(parts), *kept, ends, slots, initial, steps)
            for i, one in enumerate(y.split([len(part) for part in parts])):
                found[i].append(one)
    torch.testing.assert_close(torch.cat([torch.cat(pieces) for pieces in found]), expected, rtol=1e-4, atol=1e-5)
    assert bool(torch.stack([kept[0][[1, 2]].isnan().all(), kept[1][[1, 2]].isnan().all()]).all())


def test_decode_steps_next_to_prompts() -> None:
    """The first sequence takes a decode step, the second is a prompt in a slot without a state."""
    _, ours = theirs_and_ours("qwen3_next")
    text, other, kept = torch.randn(6, 32), torch.randn(4, 32), states()
    expected = ours(text), ours(other)
    ours(text[:5], *kept, None, torch.tensor([2]))
    y = ours(
        torch.cat((text[5:], other)),
        *(*kept, torch.tensor([0, 1, 5]), torch.tensor([2, 1]), torch.tensor([True, False]), 1),
    )
    torch.testing.assert_close(y, torch.cat((expected[0][5:], expected[1])), rtol=1e-4, atol=1e-5)


def test_refused() -> None:
    config = SimpleNamespace(**SIZES, linear_use_gate=False)
    with pytest.raises(ValueError, match="OlmoHybridGatedDeltaNetAttention: config: expected linear_use_gate"):
        layers.OlmoHybridGatedDeltaNetAttention(config, None)
    config.output_gate_type = "tanh"
    with pytest.raises(ValueError, match="RMSNormGated: activation"):
        layers.QwenGatedDeltaNetAttention(config, None)
    with pytest.raises(ValueError, match="quant_config"):
        layers.QwenGatedDeltaNetAttention(config, SimpleNamespace(quant_config=object()))
    ours = theirs_and_ours("qwen3_5")[1]
    with pytest.raises(ValueError, match=r"ssm_state: expected shape \(num_slots, 4, 8, 16\)"):
        ours(torch.randn(2, 32), None, torch.zeros(1, 4, 16, 8))
