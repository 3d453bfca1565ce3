"""GGUF files of every family, written by the package `gguf`, against transformers with the dequantised weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy
import pytest
import torch
import transformers

import pyops
from pyops import testing
from pyops.host.toolchain import toolchains
from pyops.models import Engine, SamplingParams, load
from pyops.models.gguf_families import GGUF_FAMILIES

Arch, Type = gguf.MODEL_ARCH, gguf.GGMLQuantizationType
COUNT = 64  # tokens that are generated
PROMPT = [(7 * i) % 96 for i in range(21)]
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
LONGROPE |= {"short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [1.5 + i / 2 for i in range(6)]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
Metadata = Callable[[Any, Any], Any]  # (writer, config) -> metadata


class Case(NamedTuple):
    """A file: llama.cpp's architecture, transformers' family, options of the config, further metadata."""

    arch: Any
    family: str
    options: dict[str, Any]
    metadata: Metadata = lambda writer, config: None
    kind: Any = Type.Q8_0  # for all matrices but routers


def windows(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            getattr(writer, f"add_{name}")(getattr(config, name))


def phi3(writer: Any, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_dimension_count(12)
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_rope_scaling_attn_factors(1.25)
    for name in ("long", "short"):
        writer.add_tensor(f"rope_factors_{name}.weight", numpy.float32(rope[f"{name}_factor"]))


def granite(writer: Any, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def experts(writer: Any, config: Any) -> None:
    counts = (getattr(config, f"{kind}_experts", 0) for kind in ("n_routed", "num", "num_local"))
    writer.add_expert_count(next(filter(None, counts)))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def deepseek(writer: Any, config: Any) -> None:
    """Metadata of the absorbed form: sizes of the latent vector, and those of heads."""
    experts(writer, config)
    sizes = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    if config.topk_method != "greedy":
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(sizes[0])
        writer.add_value_length_mla(sizes[1])
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    else:
        writer.add_key_length(sizes[0])
        writer.add_value_length(sizes[1])
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    is_v3 = config.model_type == "deepseek_v3"
    writer.add_expert_weights_norm(bool(is_v3 and config.norm_topk_prob))
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if is_v3 else gguf.ExpertGatingFuncType.SOFTMAX)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def neox(writer: Any, config: Any) -> None:
    writer.add_rope_dimension_count(4)
    writer.add_parallel_residual(config.use_parallel_residual)


MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.7}
GEMMA2 = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 7}
CASES = {
    "gemma": Case(Arch.GEMMA, "Gemma", {"head_dim": 32}),
    "gemma2": Case(
        Arch.GEMMA2,
        "Gemma2",
        GEMMA2 | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        windows,
    ),
    "gemma3": Case(
        Arch.GEMMA3,
        "Gemma3",
        GEMMA2
        | {"num_hidden_layers": 6, "attn_logit_softcapping": None}
        | {"rope_parameters": {FULL: LINEAR, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}},
        windows,
        Type.Q4_0,
    ),
    "phi3, parts of heads, longrope": Case(
        Arch.PHI3,
        "Phi3",
        {"rope_parameters": LONGROPE | {"attention_factor": 1.25}, "original_max_position_embeddings": 64}
        | {"sliding_window": 23},
        lambda writer, config: (phi3(writer, config), windows(writer, config)),
    ),
    "olmo2": Case(Arch.OLMO2, "Olmo2", {"rope_parameters": YARN}),
    "granite": Case(
        Arch.GRANITE,
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1, "logits_scaling": 4.0}
        | {"attention_bias": True, "mlp_bias": True},
        granite,
    ),
    "smollm3": Case(Arch.SMOLLM3, "SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": False}),
    "command-r with norms of heads": Case(
        Arch.COMMAND_R,
        "Cohere",
        {"use_qk_norm": True, "logit_scale": 0.5},
        lambda writer, config: writer.add_logit_scale(config.logit_scale),
    ),
    "cohere2": Case(
        Arch.COHERE2,
        "Cohere2",
        {"num_hidden_layers": 4, "sliding_window": 7},
        lambda writer, config: (windows(writer, config), writer.add_logit_scale(config.logit_scale)),
    ),
    "stablelm in parallel, norms of heads, biases": Case(
        Arch.STABLELM,
        "StableLm",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
        lambda writer, config: writer.add_rope_dimension_count(4),
    ),
    "starcoder2": Case(Arch.STARCODER2, "Starcoder2", {}),
    "gpt-neox": Case(Arch.GPTNEOX, "GPTNeoX", {}, neox, Type.Q4_0),
    "mixtral": Case(Arch.LLAMA, "Mixtral", {"num_local_experts": 4}, experts, Type.Q4_0),
    "qwen3-moe": Case(
        Arch.QWEN3MOE,
        "Qwen3Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "head_dim": 32,
        },
        experts,
    ),
    "deepseek-v2, keys and values together": Case(
        Arch.DEEPSEEK2, "DeepseekV2", DEEPSEEK | {"q_lora_rank": None, "topk_method": "greedy"}, deepseek
    ),
    "deepseek-v3": Case(
        Arch.DEEPSEEK2,
        "DeepseekV3",
        DEEPSEEK
        | {"q_lora_rank": 32, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc"}
        | {"rope_parameters": YARN | MSCALES},
        deepseek,
    ),
    "gpt-oss": Case(
        Arch.GPT_OSS,
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7, "head_dim": 32}
        | {"rope_parameters": YARN | {"truncate": False}},
        lambda writer, config: (experts(writer, config), windows(writer, config)),
    ),
}
CASES["gpt-oss in mxfp4"] = CASES["gpt-oss"]._replace(kind=Type.MXFP4)


def model_of(case: Case) -> Any:
    """A model of transformers with random weights that make clear choices; biases and norms are random, too."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{case.family}TextConfig" if case.family == "Gemma3" else f"{case.family}Config")
    model = getattr(transformers, f"{case.family}ForCausalLM")(config(**SIZES | case.options))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            parameter.data.normal_(0.0, 0.1)
        elif "norm" in name:
            parameter.data.normal_(0.0 if "Gemma" in case.family else 1.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)
    if model.config.tie_word_embeddings:  # else the most likely token is the last one again
        model.get_input_embeddings().weight.data *= 0.05
    model.set_attn_implementation("eager")  # the only one with a soft cap in every version
    return model.eval()


def turned(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys in the order of llama.cpp, in which RoPE rotates adjacent pairs for Llamas."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(x.shape)


def parts(case: Case, config: Any, name: str, x: torch.Tensor, own: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A file's contents for a tensor: (names in the file, writable views of it)."""
    layer = f"blk.{name.split('.layers.')[-1].split('.')[0]}"
    end = name.rpartition(".")[2]
    if name.endswith("experts.gate_up_proj") and case.family == "GptOss":
        for part, view in (("gate", x[..., 0::2]), ("up", x[..., 1::2])):
            yield f"{layer}.ffn_{part}_exps.weight", view.mT
    elif name.endswith("experts.gate_up_proj_bias"):
        for part, view in (("gate", x[..., 0::2]), ("up", x[..., 1::2])):
            yield f"{layer}.ffn_{part}_exps.bias", view
    elif name.endswith("experts.gate_up_proj"):
        for part, view in zip(("gate", "up"), x.chunk(2, 1), strict=True):
            yield f"{layer}.ffn_{part}_exps.weight", view
    elif name.endswith("experts.down_proj"):
        yield f"{layer}.ffn_down_exps.weight", x.mT if case.family == "GptOss" else x
    elif name.endswith("experts.down_proj_bias"):
        yield f"{layer}.ffn_down_exps.bias", x
    elif "query_key_value" in name:
        yield f"{layer}.attn_qkv.{end}", x.unflatten(0, (config.num_attention_heads, 3, -1)).transpose(0, 1)
    elif "kv_b_proj" in name and config.topk_method != "greedy":
        heads = x.unflatten(0, (config.num_attention_heads, -1))
        yield f"{layer}.attn_k_b.weight", heads[:, : config.qk_nope_head_dim].mT
        yield f"{layer}.attn_v_b.weight", heads[:, config.qk_nope_head_dim :]
    elif name.endswith("e_score_correction_bias"):
        yield f"{layer}.exp_probs_b.bias", x
    elif name.endswith("sinks"):
        yield f"{layer}.attn_sinks.weight", x
    else:
        yield own(name), x


def tensors_of(case: Case, model: Any) -> dict[str, tuple[Any, Any]]:
    """{name in the file: (data, type)}. The model gets the weights of the file."""
    config, found, norms = model.config, dict[str, tuple[Any, Any]](), dict[str, list[torch.Tensor]]()
    table = gguf.get_tensor_name_map(case.arch, config.num_hidden_layers)

    def own(name: str) -> str:
        if case.family == "GptOss" and "post_attention_layernorm" in name:
            return f"blk.{name.split('.')[2]}.post_attention_norm.weight"
        known = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known, name
        return str(known)

    named = {name: x.data for name, x in model.named_parameters()}
    named |= {name: x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")}
    if config.tie_word_embeddings:
        named.pop("lm_head.weight", None)
    counts = {"attn_q": config.num_attention_heads, "attn_k": getattr(config, "num_key_value_heads", 0)}
    for name, whole in named.items():
        if ".norms." in name:  # of heads, which a file merges
            norms.setdefault(own(name.split(".norms.")[0] + ".weight"), []).append(whole)
            continue
        for key, x in parts(case, config, name, whole, own):
            heads = counts.get(key.split(".")[-2], 0) if case.family in ("Granite", "SmolLM3", "Mixtral") else 0
            rows = turned(x, heads) if heads else x.flatten(0, 2) if "query_key_value" in name else x
            if key.endswith(("norm.weight", ".bias", "ffn_gate_inp.weight", "sinks.weight")):
                shift = float("Gemma" in case.family)  # all unquantized tensors there are norms
                found[key] = ((rows + shift).contiguous().numpy(), Type.F32)
                x.copy_(x + shift - shift)
                continue
            kind = Type.BF16 if case.kind == Type.MXFP4 and "exps" not in key else case.kind
            data = gguf.quants.quantize(rows.contiguous().numpy(), kind)
            found[key] = (data, kind)
            exact = torch.from_numpy(gguf.quants.dequantize(data, kind)).float()
            x.copy_(
                exact.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(x.shape) if heads else exact.view(x.shape)
            )
    return found | {key: (torch.stack(each).numpy(), Type.F32) for key, each in norms.items()}


def write(path: Path, case: Case) -> Any:
    """Write the file; returns transformers' model with its weights."""
    model = model_of(case)
    config = model.config
    with torch.no_grad():
        tensors = tensors_of(case, model)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[case.arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    if "head_dim" in case.options:
        writer.add_key_length(config.head_dim)
    epsilon = getattr(config, "layer_norm_eps", getattr(config, "norm_epsilon", None))
    if epsilon is None:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(epsilon)
    rope = config.rope_parameters.get(FULL, config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    case.metadata(writer, config)
    for key, (data, kind) in tensors.items():
        writer.add_tensor(key, data, raw_dtype=None if kind in (Type.F32, Type.F16) else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("name", CASES)
def test_tokens_match_the_dequantised_model(name: str, tmp_path: Path) -> None:
    """In float32, all 64."""
    model = write(tmp_path / "model.gguf", CASES[name])
    engine = Engine(load(tmp_path / "model.gguf", dtype="float32"), max_seq_len=96, max_num_seqs=1)
    (text,) = engine.generate([PROMPT], SamplingParams(max_tokens=COUNT))
    choices = []
    for part in ((PROMPT + text[:-1])[:64], PROMPT + text[:-1]):  # under longrope, the sequence length matters
        with torch.no_grad():
            choices += model(torch.tensor([part])).logits[0].argmax(-1).tolist()[len(choices) :]
    assert text == choices[len(PROMPT) - 1 :]
    assert len(set(text)) >= COUNT // 8


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.slow
def test_warmup_compiles_all_expert_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host backend, which checks every access: a prompt, sorted by experts, and a decode step launch only
    compiled kernels."""
    path, limits = tmp_path / "model.gguf", {"block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 5}
    model = write(path, CASES["mixtral"])
    with testing.cpu("kernels"):
        assert pyops.warmup(model=path, max_model_len=16, dtype="float32", **limits)
        monkeypatch.setenv("PYOPS_JIT", "error")
        (text,) = Engine(load(path, dtype="float32"), max_seq_len=16, **limits).generate(
            [PROMPT[:5]], SamplingParams(max_tokens=2)
        )
    with torch.no_grad():
        assert text == model(torch.tensor([PROMPT[:5] + text[:1]])).logits[0, -2:].argmax(-1).tolist()


def test_every_architecture_has_a_case() -> None:
    """The families of test_models_gguf.py and these."""
    assert {gguf.MODEL_ARCH_NAMES[case.arch] for case in CASES.values()} | {"qwen2", "qwen3"} == set(GGUF_FAMILIES)
