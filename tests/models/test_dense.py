"""Dense decoders, feature by feature, against transformers: the same float32 weights generate the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from pyops import ModelError, testing
from pyops.host.toolchain import toolchains
from pyops.models import Config, Decoder, Engine, Multipliers, Names, Norms, Quantization, Rope, SamplingParams, load
from pyops.models.linear import Place
from pyops.models.norm import Norm
from pyops.models.runner import Part, Runner

transformers.utils.logging.disable_progress_bar()

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPTS = [[(7 * i) % 96 for i in range(37)], [3]]
NUM_TOKENS = 64
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


def longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.7 * i for i in range(pairs)],
    }


FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA2 = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {"num_key_value_heads": 4}),
    "phi3 with longrope from the 40th token on, a window": (
        "Phi3",
        {"rope_parameters": longrope(8), "original_max_position_embeddings": 40, "sliding_window": 23},
    ),
    "phi3, parts of heads turn by longrope, tied": (
        "Phi3",
        {"rope_parameters": longrope(6) | {"partial_rotary_factor": 0.75}, "tie_word_embeddings": True}
        | {"original_max_position_embeddings": 64},
    ),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma with one key head, biases": ("Gemma", {"head_dim": 16, "num_key_value_heads": 1, "attention_bias": True}),
    "gemma, not tied, linear rope": (
        "Gemma",
        {"head_dim": 16, "tie_word_embeddings": False, "rope_parameters": LINEAR},
    ),
    "gemma2": ("Gemma2", GEMMA2 | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma2 without caps, windows by layer": (
        "Gemma2",
        GEMMA2
        | {"layer_types": [FULL, SLIDING], "attn_logit_softcapping": None, "final_logit_softcapping": None}
        | {"attention_bias": True},
    ),
    "gemma2, three layers, not tied, gelu": (
        "Gemma2",
        GEMMA2
        | {"num_hidden_layers": 3, "hidden_activation": "gelu", "tie_word_embeddings": False, "head_dim": 32}
        | {"num_key_value_heads": 1, "rope_parameters": LLAMA3},
    ),
    "gemma3": ("Gemma3", GEMMA2 | {"sliding_window_pattern": 2}),
    "gemma3, windows by layer, scaled rope, a cap": (
        "Gemma3",
        GEMMA2
        | {"layer_types": [FULL, SLIDING], "final_logit_softcapping": 5.0, "attention_bias": True}
        | {"rope_parameters": {FULL: LINEAR, SLIDING: {"rope_type": "default", "rope_theta": 100.0}}},
    ),
    "gemma3, three layers, not tied, gelu": (
        "Gemma3",
        GEMMA2
        | {"num_hidden_layers": 3, "sliding_window_pattern": 3, "hidden_activation": "gelu", "head_dim": 32}
        | {"tie_word_embeddings": False, "num_key_value_heads": 1},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2 with one key head, biases": ("Olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "olmo2 with yarn, three layers": ("Olmo2", {"rope_parameters": YARN, "num_hidden_layers": 3}),
    "olmo3": ("Olmo3", {"sliding_window": 7, "num_hidden_layers": 4}),
    "olmo3, windows by layer, yarn without windows": (
        "Olmo3",
        {"sliding_window": 9, "layer_types": [FULL, SLIDING]}
        | {"rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 300.0}}},
    ),
    "olmo3 with biases, one key head": (
        "Olmo3",
        {"sliding_window": 5, "attention_bias": True, "num_key_value_heads": 1},
    ),
    "seed-oss": ("SeedOss", {"head_dim": 32}),
    "seed-oss with all biases, yarn": (
        "SeedOss",
        {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True, "rope_parameters": YARN},
    ),
    "seed-oss, no biases, tied": (
        "SeedOss",
        {"head_dim": None, "attention_bias": False, "tie_word_embeddings": True, "num_hidden_layers": 3},
    ),
    "ernie4.5": ("Ernie4_5", {"head_dim": 32}),
    "ernie4.5 with biases, not tied": (
        "Ernie4_5",
        {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1},
    ),
    "ernie4.5, three layers, linear rope": (
        "Ernie4_5",
        {"head_dim": 16, "num_hidden_layers": 3, "tie_word_embeddings": False, "rope_parameters": LINEAR},
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1, "logits_scaling": 4.0},
    ),
    "granite with biases, tied": (
        "Granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "embedding_multiplier": 0.7}
        | {"attention_multiplier": 0.3, "num_key_value_heads": 4},
    ),
    "granite, three layers, linear rope": (
        "Granite",
        {"residual_multiplier": 0.22, "num_hidden_layers": 3, "num_key_value_heads": 1, "rope_parameters": LINEAR},
    ),
    "cohere": ("Cohere", {}),
    "cohere with norms of heads, not tied": ("Cohere", {"use_qk_norm": True, "tie_word_embeddings": False}),
    "cohere with norms of heads, biases, yarn": (
        "Cohere",
        {"use_qk_norm": True, "attention_bias": True, "rope_parameters": YARN, "logit_scale": 2.0},
    ),
    "cohere2": ("Cohere2", {"sliding_window": 7, "sliding_window_pattern": 2}),
    "cohere2, windows by layer, biases, not tied": (
        "Cohere2",
        {"sliding_window": 9, "layer_types": [FULL, SLIDING], "attention_bias": True, "tie_word_embeddings": False},
    ),
    "cohere2, three layers": (
        "Cohere2",
        {"sliding_window": 5, "num_hidden_layers": 3, "sliding_window_pattern": 3, "num_key_value_heads": 4},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3 with windows, biases, not tied": (
        "SmolLM3",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 7, "tie_word_embeddings": False}
        | {"attention_bias": True, "mlp_bias": True},
    ),
    "smollm3, windows by layer, scaled rope": (
        "SmolLM3",
        {"num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL], "use_sliding_window": True}
        | {"sliding_window": 9, "rope_parameters": LLAMA3, "no_rope_layers": [1, 1, 0], "tie_word_embeddings": False},
    ),
    "stablelm": ("StableLm", {}),
    "stablelm in parallel, norms of heads, biases": (
        "StableLm",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    ),
    "stablelm with norms of heads, tied": (
        "StableLm",
        {"qk_layernorm": True, "tie_word_embeddings": True, "num_key_value_heads": 4, "rope_parameters": LINEAR},
    ),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2 with a window, not tied": (
        "Starcoder2",
        {"sliding_window": 9, "tie_word_embeddings": False, "hidden_act": "gelu", "num_key_value_heads": 4},
    ),
    "starcoder2 without biases, gelu_new": (
        "Starcoder2",
        {"use_bias": False, "hidden_act": "gelu_new", "tie_word_embeddings": False, "rope_parameters": YARN},
    ),
    "falcon": ("Falcon", {}),
    "falcon, new, with norms of both, groups of queries, biases": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "ffn_hidden_size": 80},
    ),
    "falcon, one after the other, head by head, not tied": (
        "Falcon",
        {"multi_query": False, "parallel_attn": False, "tie_word_embeddings": False, "num_hidden_layers": 3},
    ),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt-neox one after the other, without biases of attention": (
        "GPTNeoX",
        {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"},
    ),
    "gpt-neox, tied, three layers, gelu_fast": (
        "GPTNeoX",
        {"tie_word_embeddings": True, "num_hidden_layers": 3, "hidden_act": "gelu_fast", "rotary_emb_base": 500.0},
    ),
}


def reference(case: str) -> Any:
    """A model of transformers with random weights that make clear choices; biases and norms are random, too."""
    family, options = CASES[case]
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config_of(family, SIZES | options))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0.0, 0.1)
        elif "norm" in name:
            parameter.data.normal_(0.0 if "Gemma" in family else 1.0, 0.2)
    if model.config.tie_word_embeddings:  # else the most likely token is the last one again
        model.get_input_embeddings().weight.data *= 0.05
    model.set_attn_implementation("eager")  # the only one with a soft cap in every version
    return model.eval()


def config_of(family: str, options: dict[str, Any]) -> Any:
    return getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")(**options)


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens], device=model.device)).logits[0].clone()
    return found


def choices(model: Any, tokens: list[int]) -> list[int]:
    """The most likely token after each of `tokens` by transformers' model, if that token were the last.

    Under longrope, frequencies depend on the length of the sequence.
    """
    bound = len(tokens)
    if (model.config.rope_parameters or {}).get("rope_type") == "longrope":
        bound = model.config.original_max_position_embeddings
    short, whole = (logits_of(model, part).argmax(-1).tolist() for part in (tokens[:bound], tokens))
    return short + whole[len(short) :]


@pytest.mark.parametrize("case", CASES)
def test_tokens_match_transformers(case: str, tmp_path: Path) -> None:
    """Prompts of different lengths in one batch, 64 tokens each: every token is transformers' choice after those before
    it.

    So the tokens are those that transformers generates greedily.
    """
    model = reference(case)
    model.save_pretrained(tmp_path)
    ours = load(tmp_path)
    texts = Engine(ours, max_seq_len=110, max_num_seqs=2).generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS))
    assert len({token for text in texts for token in text}) > 16, "a model that repeats itself says little"
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text == choices(model, [*prompt, *text[:-1]])[len(prompt) - 1 :]
    prompt = PROMPTS[0]
    logits = Runner(ours, 3, 16, 1, 110).run([Part(prompt, 0, [2, 0, 1])])[0]
    theirs = logits_of(model, prompt)[-1]
    exact = logits_of(model.double(), prompt)[-1]
    assert (logits - exact).abs().max() <= 4 * (theirs - exact).abs().max()


LONG = "phi3 with longrope from the 40th token on, a window"


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    reference(LONG).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "limits",
    [{"block_size": 8, "max_num_batched_tokens": 7}, {"block_size": 4, "num_blocks": 26, "max_num_seqs": 3}],
    ids=str,
)
def test_longrope_recomputes_sequences_that_become_long(limits: dict[str, int], long_folder: Path) -> None:
    """Together with others, in chunks, where the token that makes a sequence long needs a new block."""
    prompts = [list(range(30)), [3, 1, 2], list(range(50, 95))]
    engine, model = Engine(load(long_folder), max_seq_len=96, **limits), reference(LONG)
    for prompt, text in zip(prompts, engine.generate(prompts, SamplingParams(max_tokens=42)), strict=True):
        assert text == choices(model, [*prompt, *text[:-1]])[len(prompt) - 1 :]
    assert (engine.preemptions > 0) == ("num_blocks" in limits)
    assert len(engine._scheduler.free_blocks) == engine.num_blocks


def test_long_sequence_rolls_back_to_a_short_one(long_folder: Path) -> None:
    engine, prompt = Engine(load(long_folder), block_size=4, max_seq_len=96), list(range(5, 25))
    params = SamplingParams(max_tokens=40)
    (expected,) = engine.generate([prompt], params)
    request = engine.add(prompt, params)
    found = [engine.step()[0].token for _ in range(30)]
    engine.step_back(request, 30)
    assert found[:10] + [output.token for output in engine.run()] == expected


SMALL = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}
ON_THE_HOST = {
    "norms around, of heads, soft caps, two rotary embeddings": Config(
        **SMALL,
        norms=Norms("gemma", place="around"),
        qk_norm="head",
        hidden_act="gelu_pytorch_tanh",
        sliding_windows=(3, 0),
        layer_ropes=(Rope(100.0), Rope()),
        multipliers=Multipliers(embedding=5.7, attention=0.3, attention_soft_cap=2.0, logits_soft_cap=3.0),
        names=Names(attention_out_norm="norm_a", mlp_norm="norm_b", mlp_out_norm="norm_c"),
    ),
    "layer norms, also of heads, in parallel, neighbours turn, a layer without": Config(
        **SMALL,
        norms=Norms("layer", has_bias=True),
        qk_norm="heads",
        parallel_residual=True,
        has_gate=False,
        hidden_act="gelu_fast",
        mlp_bias=True,
        layer_ropes=(Rope(interleaved=True, partial_rotary_factor=0.5), None),
        names=Names(gate_up=("up_proj",)),
    ),
    "norms behind, of rows, what layers add is multiplied": Config(
        **SMALL,
        norms=Norms("rms_once", place="after"),
        qk_norm="row",
        hidden_act="gelu",
        multipliers=Multipliers(residual=0.3, logits=2.0),
        names=Names(attention_out_norm="norm_a", mlp_out_norm="norm_b"),
    ),
}


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize("case", ON_THE_HOST)
def test_kernels_generate_the_same_tokens(case: str) -> None:
    """On the host backend, which checks every access."""
    model = Decoder(ON_THE_HOST[case]).randomise(3, scale=2.0)
    prompts, params = [[1, 2, 3, 4, 5, 6], [7, 8]], SamplingParams(max_tokens=4)
    expected = Engine(model, block_size=4, max_num_seqs=2).generate(prompts, params)
    with testing.cpu("kernels"):
        assert Engine(model, block_size=4, max_num_seqs=2).generate(prompts, params) == expected


def values_of(case: str, **changes: Any) -> dict[str, Any]:
    """The contents of the ``config.json`` of a case."""
    family, options = CASES[case]
    values: dict[str, Any] = json.loads(config_of(family, SIZES | options).to_json_string(use_diff=False))
    return values | {"architectures": [f"{family}ForCausalLM"]} | changes


@pytest.mark.parametrize("case", [case for case in CASES if "," not in case and " " not in case])
def test_8_bit_weights_are_those_of_linear_modules(case: str) -> None:
    """All linear modules of transformers' model except the LM head; GPT-NeoX merges queries, keys and values head by
    head."""
    values = values_of(case, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    if case == "gpt-neox":
        with pytest.raises(ModelError, match=r"quantization_config: expected None with .* joined head by head"):
            Config.parse(values)
        return
    with torch.device("meta"):
        modules = reference(case).named_modules()
    linear = {name for name, module in modules if isinstance(module, torch.nn.Linear) and name != "lm_head"}
    ours = Decoder(Config.parse(values), "bfloat16", "meta").tensors()
    quantised = {name for name, tensor in ours.items() if tensor.dtype == torch.float8_e4m3fn}
    assert quantised == {f"{name}.weight" for name in linear}
    assert {name for name in ours if name.endswith("_scale")} == {f"{name}.weight_scale" for name in linear}


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "falcon with alibi": ("falcon", {"alibi": True}, "alibi: expected false"),
    "a new falcon one after the other": (
        "falcon",
        {"new_decoder_architecture": True, "parallel_attn": False},
        "parallel_attn: expected true with new_decoder_architecture",
    ),
    "an old falcon with two norms": (
        "falcon",
        {"num_ln_in_parallel_attn": 2},
        "num_ln_in_parallel_attn: expected 1, or 2 with new_decoder_architecture, got 2",
    ),
    "an activation with a gate": ("phi3", {"hidden_act": "relu"}, "hidden_act: expected 'silu' or .*, got 'relu'"),
    "an activation without a gate": (
        "gpt-neox",
        {"hidden_act": "silu"},
        "hidden_act: expected 'gelu' or .*, got 'silu'",
    ),
    "another activation": ("gemma2", {"hidden_activation": None}, "hidden_act: expected .*, got None"),
    "a rope of Phi-3": (
        "phi3",
        {"rope_parameters": LINEAR},
        "rope_type: expected default or longrope or su or yarn, got 'linear'",
    ),
    "too few factors": (
        "phi3",
        {"rope_parameters": longrope(7)},
        r"rope_parameters\.short_factor: expected 8 numbers, got \(1\.0, ",
    ),
    "no list of factors": (
        "phi3",
        {"rope_parameters": longrope(8) | {"long_factor": 2.0}},
        r"rope_parameters\.long_factor: expected a list of numbers, got 2\.0",
    ),
    "more than a head": ("stablelm", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "at most 1, got 1.5"),
    "part of a head of a Cohere": (
        "cohere",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor: expected 1.0, got",
    ),
    "part of a head": ("granite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0, got 0.5"),
    "texts read from both sides": (
        "gemma3",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention: expected false, got True",
    ),
    "one rope for two": (
        "gemma3",
        {"rope_parameters": LINEAR},
        "rope_parameters: expected objects for full_attention and sliding_attention, got",
    ),
    "a pattern of windows": (
        "gemma3",
        {"layer_types": None, "sliding_window_pattern": 0},
        "sliding_window_pattern: exp",
    ),
    "kinds of layers": ("cohere2", {"layer_types": ["chunked"] * 2}, "layer_types: expected 2 of full_attention or"),
    "windows of a Granite": (
        "granite",
        {"layer_types": [SLIDING] * 2},
        "layer_types: expected 2 of full_attention, got",
    ),
    "a multiplier": (
        "granite",
        {"residual_multiplier": 0},
        "residual_multiplier: expected a positive number .*, got 0",
    ),
    "a scale of logits": ("cohere", {"logit_scale": None}, "logit_scale: expected a positive number .*, got None"),
    "a cap": ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping: expected a positive number"),
    "layers that turn": ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: expected 0 or 1 for each of 2 layers"),
    "a flag": ("stablelm", {"use_parallel_residual": 1}, "use_parallel_residual: expected true or false, got 1"),
    "an epsilon": ("starcoder2", {"norm_epsilon": 0}, "norm_epsilon: expected a positive number"),
}


@pytest.mark.parametrize("what", BAD)
def test_unsupported_configs_are_refused_by_name(what: str) -> None:
    case, changes, message = BAD[what]
    with pytest.raises(ModelError, match=message):
        Config.parse(values_of(case, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"parallel_residual": True, "norms": Norms(place="after")},
            "norms.place: expected 'before' with parallel_res",
        ),
        ({"shares_norm": True}, "shares_norm: expected False without parallel_residual"),
        ({"has_gate": False, "hidden_act": "gelu"}, "names.gate_up: expected 1 name, got"),
        ({"names": Names(qkv=("q", "kv"))}, "names.qkv: expected 1 or 3 names"),
        ({"qk_norm": "heads and rows"}, "qk_norm: expected '' or 'head'"),
        ({"layer_ropes": (None,)}, "layer_ropes: expected one for each of 2 layers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_incompatible_parts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Config(**SMALL | changes)
    with pytest.raises(ModelError, match=r"norms\.kind: expected 'rms' or 'rms_once'"):
        Norms("l2")


def test_files_of_older_versions_are_read() -> None:
    """As in folders of Phi-3, Gemma 3, Pythia and StableLM; absent fields have transformers' defaults."""
    sizes = {name: SIZES[name] for name in SIZES if isinstance(SIZES[name], int)}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "type": "su"}
    phi3 = {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 64, "rope_scaling": factors}
    rope = Config.parse(sizes | phi3).rope
    assert (rope.kind, rope.max_short_length, rope.long_divisors) == ("longrope", 64, (2.0,) * 8)
    assert rope.attention_factor == pytest.approx((1 + 1 / 6) ** 0.5)
    gemma3 = {"architectures": ["Gemma3ForCausalLM"], "rope_theta": 1e6, "rope_local_base_freq": 1e4, "head_dim": 16}
    gemma3 |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 7}
    config = Config.parse(sizes | gemma3 | {"num_hidden_layers": 6})
    assert config.sliding_windows == (7,) * 5 + (0,)
    assert config.layer_ropes == (Rope(1e4),) * 5 + (Rope(1e6, "linear", 8.0),)
    gemma = {"architectures": ["GemmaForCausalLM"], "head_dim": 16, "hidden_act": "gelu"}
    assert Config.parse(sizes | gemma).hidden_act == "gelu_pytorch_tanh"
    neox = Config.parse(sizes | {"architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.5, "rotary_emb_base": 500})
    assert neox.rope == Rope(500.0, partial_rotary_factor=0.5)
    assert (neox.qkv_bias, neox.mlp_bias, neox.parallel_residual, neox.num_key_value_heads) == (True, True, True, 4)
    stablelm = sizes | {"architectures": ["StableLmForCausalLM"], "partial_rotary_factor": 0.5, "rope_theta": 100}
    assert Config.parse(stablelm).rope == Rope(100.0, partial_rotary_factor=0.5)


IMAGES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES |= {"image_size": 28, "patch_size": 14}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("Gemma3", "gemma3"),
        ("Gemma3", "gemma3, three layers, not tied, gelu"),
        *(("Mistral3", text) for text in ("Mistral", "Ministral3", "Mistral4")),
    ],
)
def test_decoder_of_a_multimodal_model(family: str, case: str, tmp_path: Path) -> None:
    """Under both prefixes that transformers has used for the parts of such a model."""
    if family == "Mistral3":
        torch.manual_seed(2)
        options = SIZES | (
            {"n_routed_experts": 4, "num_key_value_heads": 4} if case == "Mistral4" else {"head_dim": 16}
        )
        config = getattr(transformers, f"{case}Config")(**options)
        text = getattr(transformers, f"{case}ForCausalLM")(config)
        more = {"vision_config": IMAGES | {"model_type": "pixtral", "head_dim": 16}}
    else:
        text, more = reference(case), {"vision_config": IMAGES, "mm_tokens_per_image": 4}
    more |= {"tie_word_embeddings": text.config.tie_word_embeddings, "eos_token_id": [95, 94]}
    config = getattr(transformers, f"{family}Config")(text_config=text.config.to_dict(), **more)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    model.set_attn_implementation("eager")
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    assert any(name.startswith("language_model.model.layers") for name in tensors)
    newer = {f"model.{name}".replace("language_model.model.", "language_model."): x for name, x in tensors.items()}
    newer = {name.replace("model.language_model.lm_head", "lm_head"): x for name, x in newer.items()}
    for each in (tensors, newer):
        safetensors.torch.save_file(each, file)
        ours = load(tmp_path)
        assert ours.config.eos_token_ids == (95, 94)
        (found,) = Engine(ours, max_seq_len=110).generate([PROMPTS[0]], SamplingParams(max_tokens=8, ignore_eos=True))
        assert len(set(found)) > 1
        written = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert found == written[0, len(PROMPTS[0]) :].tolist()


def test_text_config_with_few_fields() -> None:
    """As in folders of Gemma 3; other fields have transformers' defaults."""
    said = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    said |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    name, theirs = "Gemma3ForConditionalGeneration", transformers.Gemma3TextConfig(**said)
    config = Config.parse({"architectures": [name], "text_config": said, "torch_dtype": "bfloat16"})
    for size in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(config, size) == getattr(theirs, size)
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.multipliers.attention == theirs.query_pre_attn_scalar**-0.5
    kinds = tuple(SLIDING if window else FULL for window in config.sliding_windows)
    assert (kinds, config.tie_word_embeddings, config.dtype) == (tuple(theirs.layer_types), True, "bfloat16")
    assert config.layer_ropes[4:6] == (Rope(1e4), Rope(1e6, "linear", 8.0))
    with pytest.raises(ModelError, match="text_config: expected an object, got None"):
        Config.parse({"architectures": [name]})
    with pytest.raises(ModelError, match=r"text_config\.model_type: expected 'gemma3_text', got 'gemma3n_text'"):
        Config.parse({"architectures": [name], "text_config": said | {"model_type": "gemma3n_text"}})


def test_heads_with_older_names_are_read(tmp_path: Path) -> None:
    """GPT-NeoX's LM head, and the attention masks in its files."""
    model = reference("gpt-neox")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["embed_out.weight"] = tensors.pop("lm_head.weight", tensors.get("embed_out.weight"))
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    safetensors.torch.save_file(tensors, file)
    assert torch.equal(load(tmp_path).head.weight, model.lm_head.weight)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if " " not in case])
def test_logits_in_bfloat16_under_a_graph(case: str, tmp_path: Path) -> None:
    """At most twice as far from float32, with the same weights, as transformers' model in bfloat16."""
    model = reference(case).bfloat16().cuda()
    model.save_pretrained(tmp_path)
    runner, prompt, following = Runner(load(tmp_path, "cuda"), 7, 16, 1, 110), PROMPTS[0], list(range(20))
    found = [runner.run([Part(prompt, 0, range(7))]).clone()]
    for i, token in enumerate(following, len(prompt)):
        found.append(runner.run([Part([token], i, range(7))]).clone())
    theirs = logits_of(model, prompt + following)[len(prompt) - 1 :].float()
    exact = logits_of(model.float(), prompt + following)[len(prompt) - 1 :]
    assert (torch.cat(found).float() - exact).norm() <= 2 * (theirs - exact).norm()


def test_older_olmo3_scales_only_layers_without_a_window() -> None:
    """As in transformers: ``rope_scaling`` and ``rope_theta`` at the top level do not apply to windowed layers."""
    options = {
        "sliding_window": 7,
        "rope_theta": 300.0,
        "rope_scaling": {k: YARN[k] for k in YARN if k != "rope_theta"},
    }
    theirs = transformers.Olmo3Config(**SIZES | options).rope_parameters
    config = Config.parse(SIZES | {"architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 4} | options)
    full, window = config.layer_ropes[3], config.layer_ropes[0]
    assert full is not None
    assert window is not None
    for rope, kind in ((full, FULL), (window, SLIDING)):
        assert (rope.kind, rope.theta) == (theirs[kind]["rope_type"], theirs[kind]["rope_theta"])
    assert full.factor == theirs[FULL]["factor"]


def test_gemma_float16_residual_is_float32() -> None:
    """Sums beyond 65504, float16's maximum, which Gemmas reach: two of 60000, and the following layers."""
    norm = Norm(Norms("gemma"), 1e-6, Place(torch.float16, torch.device("cpu")), 8)
    norm.weight.zero_()
    signs = torch.tensor([1.0, -1.0] * 4).expand(2, 8)
    hidden, residual = (60000 * signs).half(), (60000 * signs).half()
    total = norm.add(hidden, residual)
    assert total.dtype == torch.float32
    assert torch.equal(total, 2 * residual.float())
    assert torch.equal(hidden, signs.half())


def test_logits_are_multiplied_before_the_soft_cap() -> None:
    multipliers = Multipliers(logits=3.0, logits_soft_cap=5.0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8}
    model = Decoder(Config(**sizes, **heads, multipliers=multipliers)).randomise(0)
    hidden = 4 * torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model.logits(hidden)
    products = hidden.double() @ model.tensors()["lm_head.weight"].double().T
    assert products.abs().max() > 1
    torch.testing.assert_close(logits.double(), 5 * torch.tanh(3 * products / 5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_rounded", [True, False])
def test_embedding_multiplier_in_bfloat16(is_rounded: bool) -> None:
    """One family rounds the multiplier to the dtype of activations, others only the product."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8}
    multipliers = Multipliers(embedding=33.37, embedding_is_rounded=is_rounded)
    model = Decoder(Config(**sizes, **heads, multipliers=multipliers, dtype="bfloat16")).randomise(0)
    weights = model.tensors()["model.embed_tokens.weight"].double()
    factor = 33.25 if is_rounded else 33.37  # the ulp of bfloat16 is 0.25 here
    with torch.no_grad():
        assert torch.equal(model._embedded(torch.arange(64)), (weights * factor).bfloat16())


def test_merged_projections_share_the_largest_scale() -> None:
    """Nothing saturates under it, in any order of the scales in a file."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8}
    quantization = Quantization("float8_e4m3fn", "tensor", "static")
    model = Decoder(Config(**sizes, **heads, quantization=quantization, dtype="bfloat16"))
    names = [f"model.layers.0.self_attn.{one}_proj.input_scale" for one in "qkv"]
    for name, scale in zip(names, (0.25, 0.5, 0.125), strict=True):
        model.write(name, torch.tensor(scale))
    assert [float(model.tensors()[name]) for name in names] == [0.5] * 3
