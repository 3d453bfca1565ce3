"""Mixtures of experts of transformers' models, with the experts of this library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from pyops.integrations.transformers import accelerate, experts, report, restore

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {"n_routed_experts": 6, "moe_intermediate_size": 32, "num_key_value_heads": 4, "kv_lora_rank": 24}
LATENT |= {"q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral with a window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "qwen3 moe with an MLP": (
        "Qwen3Moe",
        {"num_experts": 6, "moe_intermediate_size": 32, "mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    "deepseek v3 with an MLP": ("DeepseekV3", LATENT | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}),
    "deepseek v2": ("DeepseekV2", LATENT | {"q_lora_rank": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one prompt, and of three with padding on the left; by the op, until the model is restored."""
    family, options = CASES[case]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    calls: list[int] = []

    def counted(hidden_states: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append(len(hidden_states))
        return fused(hidden_states, *args)

    fused = experts.fused_experts
    monkeypatch.setattr(experts, "fused_experts", counted)
    tokens = torch.randint(0, 160, (3, 13), generator=torch.Generator().manual_seed(5))
    mask = (torch.arange(13) >= torch.tensor([6, 0, 12])[:, None]).long()
    steps: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}

    def generated() -> list[list[int]]:
        alone = model.generate(tokens[1:2], **steps)
        return alone.tolist() + model.generate(tokens, attention_mask=mask, **steps).tolist()

    before = generated()
    assert not calls
    accelerate(model)
    calls.clear()
    assert generated() == before
    layers = sum(hasattr(layer.mlp, "experts") for layer in model.model.layers)
    assert calls == [13] * layers + [1] * 23 * layers + [39] * layers + [3] * 23 * layers
    assert report(model).replaced[f"{family}Experts"] == layers
    latent = [name for name in report(model).left_alone if name.endswith("self_attn")]
    assert len(latent) == (2 if "deepseek" in case else 0)
    if "window" in case:  # the experts do not break a graph
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad():
            logits = compiled(tokens, use_cache=False).logits
            torch.testing.assert_close(logits, model(tokens, use_cache=False).logits)
    with torch.enable_grad():
        model(tokens).logits.sum().backward()  # the ops have no gradients
    assert model.model.layers[1].mlp.experts.gate_up_proj.grad.any()
    restore(model)
    calls.clear()
    assert generated() == before
    assert not calls
