"""Decoders with attention in some layers and states in others, against transformers' models of the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from pyops import ModelError
from pyops.models import Config, Engine, SamplingParams, load
from tests.support.small_models import folders
from tests.support.transformers_mamba import random_model

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 256}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA |= {"head_dim": 16, "num_hidden_layers": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS |= {"shared_expert_intermediate_size": 24}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
FALCON_H1 = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "mamba_d_ssm": 48}
FALCON_H1 |= {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 16}
FACTORS: dict[str, Any] = {"ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.6], "mlp_multipliers": [0.8, 1.3]}
FACTORS |= {"attention_in_multiplier": 0.9, "attention_out_multiplier": 1.4, "key_multiplier": 0.6}
FACTORS |= {"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.7, "embedding_multiplier": 3.1, "lm_head_multiplier": 0.3}
GRANITE = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
GRANITE |= {"num_key_value_heads": 2, "num_local_experts": 4, "shared_intermediate_size": 24, "mamba_n_heads": 4}
GRANITE |= {"mamba_d_state": 8, "mamba_chunk_size": 16, "attention_multiplier": 0.3}
NEMOTRON: dict[str, Any] = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "head_dim": 16}
NEMOTRON |= {"num_key_value_heads": 2, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 12, "n_groups": 2}
NEMOTRON |= {"n_routed_experts": 6, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24}
NEMOTRON |= {"chunk_size": 16}
KIMI: dict[str, Any] = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
KIMI |= {"v_head_dim": 8, "linear_num_heads": 3, "linear_head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2}
KIMI |= {"moe_intermediate_size": 16, "num_hidden_layers": 3}
KIMI |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
LAYERS_OF_THREE = {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"]}
# {description: (family, seed of its weights, options)}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", 1, DELTA | EXPERTS),
    "qwen3-next, MLPs, biases, yarn": (
        "Qwen3Next",
        2,
        {**DELTA, **EXPERTS, **LAYERS_OF_THREE, "mlp_only_layers": [1], "attention_bias": True}
        | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}, "norm_topk_prob": False},
    ),
    "qwen3-next, wide values, tied": (
        "Qwen3Next",
        3,
        {**DELTA, **EXPERTS, "linear_value_head_dim": 12, "linear_num_key_heads": 1, "linear_conv_kernel_dim": 2}
        | {"num_key_value_heads": 1, "num_experts_per_tok": 1, "tie_word_embeddings": True, "decoder_sparse_step": 2},
    ),
    "qwen3.5": ("Qwen3_5", 4, DELTA),
    "qwen3.5, biases, yarn": (
        "Qwen3_5",
        5,
        {**DELTA, **LAYERS_OF_THREE, "attention_bias": True, "linear_num_key_heads": 4}
        | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
    ),
    "qwen3.5, wide keys, tied": (
        "Qwen3_5",
        6,
        {**DELTA, "linear_key_head_dim": 20, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}
        | {"num_key_value_heads": 4, "linear_num_key_heads": 1},
    ),
    "qwen3.5 moe": ("Qwen3_5Moe", 16, DELTA | EXPERTS),
    "qwen3.5 moe, biases, yarn": (
        "Qwen3_5Moe",
        17,
        {**DELTA, **EXPERTS, **LAYERS_OF_THREE, "attention_bias": True, "num_experts_per_tok": 3}
        | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}, "linear_num_key_heads": 4},
    ),
    "qwen3.5 moe, one expert, wide values, tied": (
        "Qwen3_5Moe",
        18,
        {**DELTA, **EXPERTS, "linear_value_head_dim": 12, "linear_num_key_heads": 1, "linear_conv_kernel_dim": 2}
        | {"num_key_value_heads": 1, "num_experts_per_tok": 1, "tie_word_embeddings": True, "num_experts": 4},
    ),
    "kimi-linear": ("KimiLinear", 19, KIMI),
    "kimi-linear, groups of experts, a rank of queries, biases": (
        "KimiLinear",
        20,
        {**KIMI, "n_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2, "q_lora_rank": 12}
        | {"attention_bias": True, "linear_conv_kernel_dim": 3, "linear_head_dim": 12, "v_head_dim": 12}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "norm_topk_prob": False},
    ),
    "kimi-linear, one wide head, one expert": (
        "KimiLinear",
        21,
        {**KIMI, "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"], "linear_head_dim": 20}
        | {"linear_num_heads": 1, "num_experts_per_tok": 1, "linear_conv_kernel_dim": 2, "routed_scaling_factor": 1.0},
    ),
    "falcon-h1": ("FalconH1", 7, FALCON_H1),
    "falcon-h1, multipliers, biases, a norm": (
        "FalconH1",
        8,
        {**FALCON_H1, **FACTORS, "attention_bias": True, "mlp_bias": True, "mamba_rms_norm": True}
        | {"mamba_norm_before_gate": False, "mamba_proj_bias": True, "projectors_bias": True, "mamba_n_groups": 2},
    ),
    "falcon-h1, channels of its own, yarn, tied": (
        "FalconH1",
        9,
        {**FALCON_H1, "mamba_d_ssm": None, "mamba_d_conv": 3, "mamba_conv_bias": False, "num_key_value_heads": 1}
        | {"rope_parameters": YARN, "tie_word_embeddings": True, "key_multiplier": 0.5, "num_hidden_layers": 3},
    ),
    "granite": ("GraniteMoeHybrid", 10, GRANITE),
    "granite, MLPs, multipliers, biases, turning": (
        "GraniteMoeHybrid",
        11,
        {**GRANITE, "num_local_experts": 0, "position_embedding_type": "rope", "attention_bias": True}
        | {"embedding_multiplier": 1.7, "logits_scaling": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2}
        | {"mamba_proj_bias": True},
    ),
    "granite, many experts, groups, tied": (
        "GraniteMoeHybrid",
        12,
        {**GRANITE, "num_local_experts": 40, "num_experts_per_tok": 4, "mamba_n_groups": 2, "mamba_d_conv": 3}
        | {"mamba_conv_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "nemotron-h": ("NemotronH", 13, NEMOTRON),
    "nemotron-h, MLPs, biases": (
        "NemotronH",
        15,
        {**NEMOTRON, "layers_block_type": ["mlp", "full_attention", "linear_attention", "mlp", "linear_attention"]}
        | {"mlp_bias": True, "use_bias": True, "conv_kernel": 3},
    ),
    "nemotron-h, groups of experts, tied": (
        "NemotronH",
        15,
        {**NEMOTRON, "n_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.5, "use_conv_bias": False}
        | {"layers_block_type": ["full_attention", "moe", "linear_attention", "moe"], "tie_word_embeddings": True},
    ),
}
PROMPTS = [list(range(5, 25)), [3], [(7 * i) % 96 for i in range(40)]]


@cache
def reference(case: str) -> Any:
    family, seed, options = CASES[case]
    return random_model(family, SIZES | options, seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return folders(tmp_path_factory, reference)


def greedy(case: str, prompt: list[int], text: list[int]) -> list[int]:
    """The most likely tokens by transformers' model after the prompt, and after each generated token.

    They equal the generated tokens if, and only if, the model generates those greedily.
    """
    with torch.no_grad():
        logits = reference(case)(torch.tensor([prompt + text])).logits[0]
    tokens: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return tokens


@pytest.mark.parametrize("case", CASES)
def test_tokens_match_transformers(case: str, folder: Callable[[str], Path]) -> None:
    """Prompts in chunks of at most 9 tokens, together with decode tokens of other sequences; the last one waits for a
    slot.

    The cache begins full of NaN, as if another sequence had left it.
    """
    engine = Engine(load(folder(case)), max_seq_len=104, max_num_seqs=2, max_num_batched_tokens=9)
    for kept in engine._runner.cache:
        for tensor in kept:
            tensor.fill_(float("nan"))
    texts = engine.generate(PROMPTS, SamplingParams(max_tokens=64))
    assert [len(text) for text in texts] == [64] * 3
    assert texts == [greedy(case, prompt, text) for prompt, text in zip(PROMPTS, texts, strict=True)]
    assert len({token for text in texts for token in text}) > 8
    assert sorted(engine._scheduler.free_slots) == [0, 1], "every slot came back, once"


def joined_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, with a layer's experts in two tensors."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        for joined, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            of_expert = [[tensors[f"{layer}.experts.{i}.{part}.weight"] for part in parts] for i in range(6)]
            found[f"{layer}.experts.{joined}"] = torch.stack([torch.cat(each) for each in of_expert])
    return found


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_multimodal_model_generates_its_decoders_tokens(
    kind: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Tensor names as published, with vision layers and multi-token prediction layers."""
    text = folder({"Qwen3_5": "qwen3.5", "Qwen3_5Moe": "qwen3.5 moe"}[kind])
    tensors = joined_experts(safetensors.torch.load_file(text / "model.safetensors"))
    named = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    others = {"mtp.norm.weight": torch.ones(32), "model.visual.merger.norm.weight": torch.ones(8)}
    safetensors.torch.save_file(named | others, tmp_path / "model.safetensors")
    said = json.loads((text / "config.json").read_text(encoding="utf-8"))
    assert said.pop("architectures") == [f"{kind}ForCausalLM"]
    said["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    of_both = getattr(transformers, f"{kind}Config")
    values = of_both(text_config=said, eos_token_id=95, tie_word_embeddings=False).to_dict()
    values |= {"architectures": [f"{kind}ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    models = [load(text), load(tmp_path)]
    assert (models[1].config.eos_token_ids, models[1].config.dtype) == ((95,), "float32")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first, second = (Engine(model, max_seq_len=64).generate(PROMPTS[:2], params) for model in models)
    assert first == second


# {the name that transformers writes: that of published files}.
PUBLISHED_KIMI = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads"}
PUBLISHED_KIMI |= {"linear_conv_kernel_dim": "short_conv_kernel_size"}


def test_published_folder_of_kimi_linear(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Layers are numbered from 1; dense MLPs and mixtures have different names, which transformers makes one."""
    own = folder("kimi-linear")
    tensors = safetensors.torch.load_file(own / "model.safetensors")
    named = {name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): tensor for name, tensor in tensors.items()}
    assert named.keys() != tensors.keys()
    safetensors.torch.save_file(named, tmp_path / "model.safetensors")
    values = json.loads((own / "config.json").read_text(encoding="utf-8"))
    sizes = {published: values.pop(name) for name, published in PUBLISHED_KIMI.items()}
    values |= {"linear_attn_config": sizes | {"kda_layers": [1, 3], "full_attn_layers": [2]}}
    values |= {"first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"}
    values |= {"mla_use_nope": True, "use_grouped_topk": True, "num_nextn_predict_layers": 0, "rope_theta": 1e4}
    del values["layer_types"], values["mlp_layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    first, second = load(own), load(tmp_path)
    assert first.config == second.config
    found = second.tensors()
    assert all(torch.equal(tensor, found[name]) for name, tensor in first.tensors().items())


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "a layer": ("qwen3-next", {"layer_types": ["full_attention", "mamba"] * 2}, "layer_types: expected 4 of linear_"),
    "an interval": ("qwen3-next", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval: exp"),
    "no gate": ("qwen3-next", {"attn_output_gate": False}, "attn_output_gate: expected true, got False"),
    "a norm before the gate": ("falcon-h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate: expected false with"),
    "one bias": ("falcon-h1", {"projectors_bias": True}, "projectors_bias: expected what mamba_proj_bias is, got True"),
    "four factors": ("falcon-h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers: expected 5 numbers, got"),
    "learned positions": (
        "granite",
        {"position_embedding_type": "learned"},
        "position_embedding_type: expected 'rope'",
    ),
    "windows": ("granite", {"layer_types": ["sliding_attention"] * 3}, "layer_types: expected 3 of mamba or attention"),
    "latent experts": ("nemotron-h", {"moe_latent_size": 16}, "moe_latent_size: expected null, got 16"),
    "an activation": ("nemotron-h", {"mlp_hidden_act": "gelu"}, "mlp_hidden_act: expected 'relu2', got 'gelu'"),
    "a letter": ("nemotron-h", {"layers_block_type": "M-X"}, "layers_block_type: expected layers of M, "),
    "heads": ("qwen3-next", {"linear_num_value_heads": 5}, "n_groups: expected a divisor of num_heads=5, got 2"),
    "positions": ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope: expected true, got False"),
    "ungrouped": ("kimi-linear", {"use_grouped_topk": False}, "use_grouped_topk: expected true, got False"),
    "softmax": (
        "kimi-linear",
        {"moe_router_activation_func": "softmax"},
        "moe_router_activation_func: expected 'sigmoid', got 'softmax'",
    ),
    "a bounded gate": (
        "kimi-linear",
        {"linear_attn_config": {"gate_lower_bound": -5.0}},
        "linear_attn_config.gate_lower_bound: expected null, got -5.0",
    ),
    "a layer twice": (
        "kimi-linear",
        {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2]}},
        "linear_attn_config: expected each layer from 1 to 3 in kda_layers or full_attn_layers, got {",
    ),
    "one list": (
        "kimi-linear",
        {"layer_types": None, "linear_attn_config": {"full_attn_layers": [1, 2, 3]}},
        "linear_attn_config: expected each layer from 1 to 3 in kda_layers or full_attn_layers, got {",
    ),
    "no object": ("kimi-linear", {"linear_attn_config": [1]}, "linear_attn_config: expected an object, got"),
    "an MLP": ("kimi-linear", {"mlp_layer_types": ["dense", "none"]}, "mlp_layer_types: expected 3 of dense or sparse"),
    "quantized weights": (
        "kimi-linear",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        "quantization_config: expected None with state-space layers",
    ),
    "wide keys": ("qwen3-next", {"linear_key_head_dim": 257}, "state_size: expected at most 256 states, got 257"),
}


def test_layers_by_letters() -> None:
    """As in folders of Nemotron-H and Nemotron 3."""
    values = json.loads(reference("nemotron-h").config.to_json_string(use_diff=False))
    values |= {"architectures": ["NemotronHForCausalLM"], "layers_block_type": None, "num_hidden_layers": 5}
    config = Config.parse(values | {"hybrid_override_pattern": "M-ME*"})
    assert config.layer_types == ("mamba2", "mlp", "mamba2", "mlp", "attention")
    assert config.mixture is not None
    assert config.mixture.layers == (False, False, False, True, False)


@pytest.mark.parametrize("name", ["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"])
def test_gemma_4_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(
        ModelError, match="architectures: expected heads of one size, where Gemma 4 has two, and no emb"
    ):
        Config.parse({"architectures": [name]})


@pytest.mark.parametrize("what", BAD)
def test_bad_config_is_refused(what: str) -> None:
    case, changes, message = BAD[what]
    model = reference(case)
    values = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    with pytest.raises(ModelError, match=message):
        Config.parse(values | changes)
