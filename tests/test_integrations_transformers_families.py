"""Families of transformers that no list here has: tokens as before, and what the page says of each is what is done."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pyops._core.host import toolchain
from pyops.integrations.transformers import PagedCache, Report, accelerate, report, restore
from pyops.testing import cpu
from tests.test_integrations_transformers import prompts, steps
from tests.test_models import SIZES

PAGE = Path(__file__).parents[1] / "docs" / "transformers.md"
HEADS, WINDOW = {"head_dim": 16}, {"sliding_window": 9}
FAMILIES: dict[str, dict[str, Any]] = {
    "Apertus": {},
    "Arcee": {},
    "Cohere": {},
    "Cohere2": WINDOW,
    "Ernie4_5": HEADS,
    "Exaone4": WINDOW,
    "Falcon": {},
    "Gemma": HEADS,
    "Gemma2": HEADS | WINDOW,
    "Gemma3": HEADS | WINDOW,
    "Glm": HEADS,
    "Glm4": HEADS,
    "GPT2": {},
    "GPTNeoX": {},
    "GptOss": HEADS | WINDOW | {"num_local_experts": 4},
    "Granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "Helium": HEADS,
    "HunYuanDenseV1": HEADS,
    "Ministral": HEADS | WINDOW,
    "Nemotron": {},
    "Olmo": {"clip_qkv": 2.0},
    "Olmo2": {},
    "Olmo3": WINDOW,
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "Phi": {},
    "Phi3": WINDOW,
    "SeedOss": HEADS,
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "StableLm": {"qk_layernorm": True},
    "Starcoder2": WINDOW,
}
COUNT = 24  # tokens that are generated


def model_of(family: str, seed: int = 1) -> Any:
    """A model of random weights, those of norms and biases too."""
    torch.manual_seed(seed)
    names = [f"{family}{kind}" for kind in ("TextConfig", "Config", "ForCausalLM", "LMHeadModel")]
    text, plain, *models = (getattr(transformers, name, None) for name in names)
    config = (text or plain)(**SIZES | {"pad_token_id": 0} | FAMILIES[family])
    model = next(filter(None, models))(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0.0, 0.3)
        elif parameter.ndim == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def row(family: str, found: Report) -> str:
    """What a report says, as the row of a family on the page: attention, norms, MLP or experts, sums."""

    def of(*kinds: str) -> list[str]:
        ops = (entry.op for entry in found.entries if entry.kind.endswith(kinds))
        return list(dict.fromkeys(f"`{op.split(',')[0]}`" if op else "-" for op in ops)) or ["-"]

    attention = " or ".join(
        {"`ro": "one product", "`fl": "one product", "`ap": "its own", "`wi": "its own", "-": "-"}[op[:3]]
        for op in of("Attention")
    )
    norms, products = (", ".join(of(*kinds)) for kinds in (("Norm", "Norm1P", "NormPerHead"), ("MLP", "Experts")))
    return f"| {family} | {attention} | {norms} | {products} | {'yes' if of('Layer', 'Block') != ['-'] else '-'} |"


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_same(family: str) -> None:
    """Behind three prompts that are padded on the left, and again when the model is restored."""
    model = model_of(family)
    tokens, mask = prompts()
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0}
    before = model.generate(tokens, **options)
    accelerate(model)
    found = report(model)
    print(found)
    print(row(family, found))
    assert torch.equal(model.generate(tokens, **options), before)
    restore(model)
    assert not any("forward" in vars(module) for module in model.modules())
