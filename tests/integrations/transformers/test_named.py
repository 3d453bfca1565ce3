"""`attn_implementation="pyops"` and `experts_implementation="pyops"`: transformers' own tokens and logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import pyops
from pyops.integrations.transformers import named
from tests.support.small_models import EXPERTS, OSS, SIZES

# Families, and what computes the experts of those that have them.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 9},
    "Gemma2": {"sliding_window": 9, "head_dim": 32, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
    "Qwen3Moe": EXPERTS,
    "GptOss": OSS | {"sliding_window": 9},
}
PADDING = 6, 0, 11  # tokens of three prompts of 13 that are padding


def model_of(family: str, attention: str, experts: str) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family])
    config._attn_implementation = attention
    config._experts_implementation = experts
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_models_give_the_same_tokens_and_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts padded on the left, or not; a growing cache and a static one. Padding on the right is left to "sdpa"."""
    calls = {"attention": 0, "experts": 0, "left": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(named, "attention_varlen", counted("attention", named.attention_varlen))
    monkeypatch.setattr(named, "computed", counted("experts", named.computed))
    monkeypatch.setattr(named, "_by_transformers", counted("left", named._by_transformers))
    theirs, ours = model_of(family, "eager", "eager"), model_of(family, "pyops", "pyops")
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(0, 160, (3, 13), generator=torch.Generator().manual_seed(5))
    left = (torch.arange(13) >= torch.tensor(PADDING)[:, None]).long()
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    for mask, more in ((left, {}), (left[:, :].new_ones(3, 13), {}), (left, {"cache_implementation": "static"})):
        found = [model.generate(tokens, attention_mask=mask, **options, **more) for model in (ours, theirs)]
        assert torch.equal(*found)
    assert calls["attention"] > 0
    assert not calls["left"]
    assert (calls["experts"] > 0) == (family in ("GptOss", "Qwen3Moe"))
    with torch.no_grad():
        for mask in (left, left.flip(1)):
            a, b = (model(tokens, attention_mask=mask).logits[mask.bool()] for model in (ours, theirs))
            assert (a - b).abs().max() <= 1e-4 * b.abs().max()
    assert calls["left"]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_keys_and_values_are_read_where_they_lie(batch: int, shared: bool) -> None:
    """Heads before tokens, as a cache has them, and tokens before heads, as projections give them."""
    x = torch.randn(2, batch, 2, 7, 16) if shared else torch.randn(2, batch, 7, 2, 16).transpose(2, 3)
    (keys, values), distance = named._rows(*x)
    assert (keys.data_ptr(), values.data_ptr()) == (x[0].data_ptr(), x[1].data_ptr())
    for b in range(batch):
        for found, given in ((keys, x[0]), (values, x[1])):
            assert torch.equal(found[b * distance : b * distance + 7], given[b].transpose(0, 1))


def test_a_call_that_no_op_serves_is_transformers() -> None:
    """A mask with a hole, and dropout: "sdpa"; with sinks "eager" of the module's file."""
    config = transformers.LlamaConfig(**SIZES)
    module = transformers.models.llama.modeling_llama.LlamaAttention(config, 0).eval()
    q, k, v = (torch.randn(2, heads, 5, 16) for heads in (4, 2, 2))
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    mask[0, 0, 4, 2] = False
    found, _ = named.attention(module, q, k, v, mask)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), mask, enable_gqa=True)
    assert (found.double() - exact.transpose(1, 2)).abs().max() < 1e-5
    from_eager, weights = named.attention(module, q, k, v, mask, output_attentions=True, scaling=0.25)
    assert weights is not None
    assert (from_eager.double() - exact.transpose(1, 2)).abs().max() < 1e-5
    with pytest.raises(pyops.ModelError, match='no "eager"'):
        named.attention(torch.nn.Linear(1, 1), q, k, v, mask, softcap=2.0)


def test_masks_are_those_of_sdpa() -> None:
    assert ALL_MASK_ATTENTION_FUNCTIONS[named.NAME] is ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
