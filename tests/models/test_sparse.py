"""DeepSeek-V3.2 and GLM-5: an indexer that chooses few tokens, against transformers with queries and keys in fp8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from pyops import ModelError
from pyops.models import Config, Engine, SamplingParams, load
from tests.support.small_models import CASES, SIZES

TOP_K, COUNT = 8, 24
# {family: (the case of `CASES`, transformers' module, its rotation of the indexer's queries and keys)}
FAMILIES: dict[str, tuple[str, Any, str]] = {
    "DeepseekV32": (
        "deepseek v3.2, an indexer for more tokens than there are",
        modeling_deepseek_v32,
        "apply_rotary_pos_emb",
    ),
    "GlmMoeDsa": (
        "glm 5, an indexer for more tokens than there are, shared by two layers",
        modeling_glm_moe_dsa,
        "apply_rotary_pos_emb_interleave",
    ),
}
PROMPTS: list[list[int]] = [[(7 * i) % 160 for i in range(40)], [3], [11, 150, 9]]


def _rounded(x: Tensor) -> Tensor:
    """Values of e4m3 times a scale for each row."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def _indices(self: Any, hidden: Tensor, q_latent: Tensor, position: Any, mask: Tensor, *_: Any, cache: Any) -> Tensor:
    """transformers' indexer with queries and keys in fp8; among equal logits the first are taken."""
    query, key = self.wq_b(q_latent).unflatten(-1, (self.n_heads, -1)), self.k_norm(self.wk(hidden))[:, :, None]
    _, modeling, rotation = FAMILIES[type(self).__name__.removesuffix("Indexer")]
    rotated = getattr(modeling, rotation)(query[..., :64], key[..., :64], *position, unsqueeze_dim=2)
    query, key = (_rounded(torch.cat((new, x[..., 64:]), -1)) for new, x in zip(rotated, (query, key), strict=True))
    keys = cache.update_indexer(key[:, :, 0], self.layer_idx)
    products = torch.einsum("bshd,btd->bsht", query, keys).relu()
    logits = torch.einsum("bsht,bsh->bst", products, self.weights_proj(hidden))
    mask = mask if mask.dtype == torch.bool else mask >= 0
    logits = logits.masked_fill(~mask, -torch.inf)
    return logits.sort(dim=-1, descending=True, stable=True).indices[..., : self.index_topk].int()


def _model(family: str, top_k: int) -> Any:
    sizes = SIZES | CASES[FAMILIES[family][0]][1] | {"index_n_heads": 8, "index_topk": top_k}
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if "k_norm" in name:
            parameter.data.normal_(0.5, 0.3)
    return model


def _texts(model: Any) -> list[list[int]]:
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_match_transformers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in one batch, longer and shorter than the list of the indexer."""
    monkeypatch.setattr(getattr(FAMILIES[family][1], f"{family}Indexer"), "forward", _indices)
    model = _model(family, TOP_K)
    model.save_pretrained(tmp_path)
    expected = _texts(model)
    assert expected != _texts(_model(family, 2048))
    assert Engine(load(tmp_path), max_seq_len=128).generate(PROMPTS, SamplingParams(max_tokens=COUNT)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_lora_rank": 256}, "kv_lora_rank: expected 512 with an indexer, got 256"),
        ({"q_lora_rank": None}, "q_lora_rank: expected a size with an indexer"),
        ({"index_head_dim": 32}, "index_head_dim: expected at least 64, got 32"),
        ({"index_topk": 0}, "index_topk"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types: expected 2 of indexed_attention"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: expected 2 of sparse or dense"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    case = CASES[FAMILIES["DeepseekV32"][0]][1]
    values = SIZES | case | options | {"architectures": ["DeepseekV32ForCausalLM"]}
    with pytest.raises(ModelError, match=message):
        Config.parse(json.loads(json.dumps(values)))


def test_older_files_name_the_layers_otherwise() -> None:
    case = CASES[FAMILIES["DeepseekV32"][0]][1]
    values = SIZES | case | {"architectures": ["DeepseekV32ForCausalLM"]}
    layers = Config.parse(values).num_hidden_layers
    older = {"layer_types": ["deepseek_sparse_attention"] * layers}
    assert Config.parse(values | older) == Config.parse(values)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, "full full full full full"),
        ({"index_topk_freq": 3}, "full full shared shared full"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "full shared full shared full"),
        ({"index_topk_pattern": "FSSFS"}, "full shared shared full shared"),
    ],
)
def test_layers_of_glm_5_that_share_an_indexer(options: dict[str, Any], kinds: str) -> None:
    sizes = SIZES | CASES[FAMILIES["GlmMoeDsa"][0]][1] | {"num_hidden_layers": 5}
    del sizes["indexer_types"]
    assert transformers.GlmMoeDsaConfig(**sizes | options).indexer_types == kinds.split()
    latent = Config.parse(sizes | options | {"architectures": ["GlmMoeDsaForCausalLM"]}).latent
    assert [latent.indexer.shares_at(i) for i in range(5)] == [kind == "shared" for kind in kinds.split()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"indexer_types": ["shared", "full"]}, "indexer_types: expected an indexer in the first layer"),
        ({"indexer_types": None, "index_topk_pattern": "FX"}, "index_topk_pattern: expected 2 of F or S"),
        ({"indexer_types": None, "index_topk_freq": 0.5}, "index_topk_freq: expected a number of layers"),
    ],
)
def test_refusals_of_glm_5(options: dict[str, Any], message: str) -> None:
    values = SIZES | CASES[FAMILIES["GlmMoeDsa"][0]][1] | options | {"architectures": ["GlmMoeDsaForCausalLM"]}
    with pytest.raises(ModelError, match=message):
        Config.parse(values)
