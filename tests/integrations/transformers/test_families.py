"""Families that the code does not name: the same tokens as before, and the replacements that the page lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from pyops.host import toolchain
from pyops.integrations.transformers import PagedCache, Report, accelerate, report, restore
from pyops.integrations.transformers.cache import CACHE
from pyops.testing import cpu
from tests.integrations.transformers.test_transformers import prompts, same_logits, steps
from tests.support.small_models import SIZES

PAGE = Path(__file__).parents[3] / "docs" / "transformers.md"
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
    "Ministral3": HEADS,
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
COUNT = 16  # tokens that are generated


def model_of(family: str, seed: int = 1) -> Any:
    """A model with random weights, also in norms and biases."""
    torch.manual_seed(seed)
    names = [f"{family}{kind}" for kind in ("TextConfig", "Config", "ForCausalLM", "LMHeadModel")]
    text, plain, *models = (getattr(transformers, name, None) for name in names)
    config = (text or plain)(**SIZES | {"pad_token_id": 0} | FAMILIES.get(family, {}))
    model = next(filter(None, models))(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0.0, 0.3)
        elif parameter.ndim == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def row(family: str, found: Report) -> str:
    """A report as the row of a family on the page: attention, norms, MLP or experts, residual adds."""

    def of(*kinds: str) -> str:
        ops = (entry.op.split(",")[0] or "-" for entry in found.entries if entry.kind.endswith(kinds))
        return " or ".join(dict.fromkeys(ops)) or "-"

    parts = of("Attention"), of("Norm", "Norm1P", "NormPerHead"), of("MLP", "Experts"), of("Layer", "Block")
    return f"| {family} | {' | '.join(parts)} |"


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_same(family: str) -> None:
    """After three prompts with left padding, and again after the model is restored."""
    model = model_of(family)
    tokens, mask = prompts()
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0}
    before = model.generate(tokens, **options)
    accelerate(model)
    found = report(model)
    assert row(family, found) in PAGE.read_text().splitlines()
    assert torch.equal(model.generate(tokens, **options), before)
    restore(model)
    assert not any("forward" in vars(module) for module in model.modules())


def seen(model: Any, **options: Any) -> list[torch.Tensor]:
    """Attention weights and hidden states from a model's call and from `generate`, where there are any."""
    tokens, mask = prompts()
    options |= {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        found = [model(tokens, **options)]
    options |= {"return_dict_in_generate": True, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    written = model.generate(tokens[1:2], attention_mask=mask[1:2], **options | {CACHE: None})
    steps = [each for name in ("attentions", "hidden_states") for each in getattr(written, name) or ()]
    return [x for each in (found[0].attentions, found[0].hidden_states, *steps) for x in each or () if x is not None]


@pytest.mark.parametrize("family", [*FAMILIES, "GPTBigCode", "Persimmon"])
def test_recorded_intermediate_results(family: str) -> None:
    """Attention "eager" returns its weights whether or not they are asked for."""
    model = model_of(family)
    model.set_attn_implementation("eager")
    theirs = seen(model)
    accelerate(model)
    for options in ({}, {CACHE: PagedCache(model.config)}):
        for ours, expected in zip(seen(model, **options), theirs, strict=True):
            assert ours.shape == expected.shape
            same_logits(ours, expected)


@pytest.mark.skipif(not toolchain.toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize(("family", "dtype"), [("Gemma2", "bfloat16"), ("Phi", "float32")])
@pytest.mark.slow
def test_kernels_on_the_host(family: str, dtype: str) -> None:
    """Soft caps and windows, and queries rotated in part, by the kernels themselves."""
    model = model_of(family)
    exact = steps(model, transformers.DynamicCache(config=model.config), True)
    accelerate(model.to(getattr(torch, dtype)))
    with cpu("kernels"):
        ours = steps(model, PagedCache(model.config, 25), True)
    if dtype == "float32":
        same_logits(ours, exact)
    else:
        theirs = steps(restore(model), transformers.DynamicCache(config=model.config), True)
        assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


@pytest.mark.slow
def test_decode_step_is_one_graph() -> None:
    """With the attention's own forward; the graph serves the next step, too."""
    torch.compiler.reset()  # other tests may have used up the limit of recompiles
    model = model_of("GPTNeoX")
    theirs = steps(model, transformers.StaticCache(config=model.config, max_cache_len=25), False)
    accelerate(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def step(*args: Any, **kwargs: Any) -> Any:
        found = compiled(*args, **kwargs)
        torch.compiler.set_stance("fail_on_recompile")
        return found

    try:
        same_logits(steps(model, PagedCache(model.config, 25), False, step), theirs)
    finally:
        torch.compiler.set_stance("default")
        torch.compiler.reset()


class Looped(LlamaAttention):  # type: ignore[misc]
    """An attention that a layer may call twice, each time with its own layer of the cache."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        attention_mask: Any = None,
        past_key_values: Any = None,
        cache: Any = None,
        loop: int = 0,
        **kwargs: Any,
    ) -> Any:
        shape, past = (*hidden_states.shape[:-1], -1, self.head_dim), past_key_values if cache is None else cache
        parts = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past is not None:
            key, value = past.update(key, value, self.layer_idx + loop)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*shape[:-2], -1)), weights


class Twice(LlamaDecoderLayer):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        between = super().forward(hidden_states, **kwargs)
        result: torch.Tensor = super().forward(between, loop=2, **kwargs)
        return result


def test_layers_that_run_twice() -> None:
    """Each time with its own layer of the cache, which an argument of the attention selects."""
    model = model_of("Llama")
    model.config.num_hidden_layers = 4
    for layer in model.model.layers:
        layer.__class__, layer.self_attn.__class__ = Twice, Looped
    exact = steps(model, transformers.DynamicCache(config=model.config), True)
    accelerate(model)
    assert any(entry.op.startswith("one product") for entry in report(model).entries)
    same_logits(steps(model, PagedCache(model.config), True), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Phi3", "Gemma2", "Cohere2", "GPTNeoX"])
def test_tokens_on_a_gpu(family: str) -> None:
    """In float32; with "static", `generate` compiles the step into one CUDA graph."""
    model = model_of(family).cuda()
    tokens, mask = (each.cuda() for each in prompts())
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0}
    before = model.generate(tokens, **options)
    accelerate(model)
    assert torch.equal(model.generate(tokens, **options), before)
    torch.compiler.reset()  # other models of the process count towards the limit of compiles
    options |= {"cache_implementation": "static", "compile_config": transformers.CompileConfig(fullgraph=True)}
    assert torch.equal(model.generate(tokens, **options), before)
