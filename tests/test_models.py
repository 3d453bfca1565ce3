"""Models against transformers: the same weights, in float32, give the same texts; folders; batching; sampling."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers

import pyops
from pyops import ModelError, testing
from pyops.__main__ import main
from pyops._core import device
from pyops._core.host.toolchain import toolchains
from pyops.cli import generate
from pyops.models import Config, Decoder, Engine, Rope, SamplingParams, checkpoint, load, serving_kernels
from pyops.models import engine as engine_module
from pyops.models.params import sample
from pyops.models.runner import Part, Runner

transformers.utils.logging.disable_progress_bar()

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.3}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
BIASES = {"attention_bias": True, "mlp_bias": True}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4}
LATENT |= {"kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama with one key head, llama3 rope, biases": (
        "Llama",
        {"num_key_value_heads": 1, "rope_parameters": LLAMA3} | BIASES,
    ),
    "llama with linear rope, tied": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LINEAR}),
    "llama with yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen2 with dynamic rope": ("Qwen2", {"rope_parameters": DYNAMIC}),
    "qwen3 with yarn of its own": (
        "Qwen3",
        {
            "head_dim": 32,
            "rope_parameters": YARN | {"beta_fast": 8, "beta_slow": 2.0, "mscale": 1.5, "mscale_all_dim": 0.5},
        },
    ),
    "mistral with a window": ("Mistral", {"sliding_window": 9, "num_hidden_layers": 3}),
    "mistral with wide heads": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "ministral": ("Ministral", {"sliding_window": 9, "head_dim": 32, "tie_word_embeddings": True}),
    "ministral, windows by layer": (
        "Ministral",
        {"sliding_window": 7, "head_dim": 16, "num_hidden_layers": 3}
        | {"layer_types": ["full_attention", *["sliding_attention"] * 2]},
    ),
    "ministral with yarn": ("Ministral", {"sliding_window": 16, "head_dim": 16, "rope_parameters": YARN}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with a window in its last layer": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral with a window, three experts of eight": (
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 9, "head_dim": 32},
    ),
    "mixtral, tied, one expert": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    ),
    "qwen3 moe": ("Qwen3Moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "qwen3 moe with an MLP, biases and a window": (
        "Qwen3Moe",
        EXPERTS | {"mlp_only_layers": [0], "attention_bias": True, "use_sliding_window": True, "sliding_window": 9},
    ),
    "qwen3 moe in every second layer": (
        "Qwen3Moe",
        EXPERTS | {"decoder_sparse_step": 2, "num_hidden_layers": 3, "norm_topk_prob": True},
    ),
    "deepseek v2, no rank of queries, the best experts, biases": (
        "DeepseekV2",
        LATENT | {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 1},
    ),
    "deepseek v2, the best of groups, yarn": (
        "DeepseekV2",
        LATENT
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0}
        | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek v2 with entries of the op": (
        "DeepseekV2",
        LATENT | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "n_shared_experts": 1},
    ),
    "deepseek v3": (
        "DeepseekV3",
        LATENT | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "rope_parameters": YARN},
    ),
    "deepseek v3 of halves, yarn with mscale": (
        "DeepseekV3",
        LATENT
        | {"n_group": 2, "topk_group": 1, "rope_interleave": False, "attention_bias": True, "v_head_dim": 24}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "first_k_dense_replace": 0},
    ),
    "deepseek v3, no groups, weights as they are": (
        "DeepseekV3",
        LATENT
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0}
        | {"q_lora_rank": None, "tie_word_embeddings": True, "routed_scaling_factor": 1.0},
    ),
    "gpt-oss": ("GptOss", OSS | {"sliding_window": 9, "rope_parameters": YARN | {"truncate": False}}),
    "gpt-oss, three layers, no biases of attention": (
        "GptOss",
        OSS | {"num_hidden_layers": 3, "attention_bias": False, "num_experts_per_tok": 3, "sliding_window": 16},
    ),
    "gpt-oss, the window in the last layer, tied": (
        "GptOss",
        OSS
        | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7, "tie_word_embeddings": True}
        | {"num_experts_per_tok": 1, "num_key_value_heads": 1},
    ),
}
PROMPTS: list[list[int]] = [list(range(5, 25)), [3], [(7 * i) % 160 for i in range(70)]]


@cache
def reference(case: str) -> Any:
    """A model of transformers whose random weights make clear choices; biases and norms are random too."""
    family, options = CASES[case]
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES | options))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            parameter.data.normal_(0.0, 0.3)
        elif "norm" in name:
            parameter.data.normal_(1.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.normal_(0.0, 0.3)
    return model.eval()


@cache
def text(case: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """What transformers' model writes, greedily, behind the prompt."""
    written = reference(case).generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return written[0, len(prompt) :].tolist()


def texts(case: str, count: int) -> list[list[int]]:
    return [text(case, tuple(prompt), count) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case, saved once."""
    saved: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in saved:
            saved[case] = tmp_path_factory.mktemp("model")
            reference(case).save_pretrained(saved[case])
        return saved[case]

    return get


@pytest.fixture
def llama(folder: Callable[[str], Path]) -> Decoder:
    return load(folder("llama"))


def teacher_forced(runner: Runner, prompt: Sequence[int], following: Sequence[int]) -> torch.Tensor:
    """Logits behind the prompt, by prefill, and behind each token that follows, by decode steps."""
    blocks = list(range(-(-(len(prompt) + len(following)) // runner.block_size)))[::-1]
    found = [runner.run([Part(prompt, 0, blocks)])]
    for i, token in enumerate(following):
        found.append(runner.run([Part([token], len(prompt) + i, blocks)]).clone())
    return torch.cat(found)


# The decoder


@pytest.mark.parametrize("case", CASES)
def test_texts_are_those_of_transformers(case: str, folder: Callable[[str], Path]) -> None:
    """Prompts of different lengths, together, 64 tokens each."""
    engine = Engine(load(folder(case)), max_seq_len=160, max_num_seqs=4)
    assert engine.generate(PROMPTS, SamplingParams(max_tokens=64)) == texts(case, 64)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_as_exact_as_those_of_transformers(case: str, folder: Callable[[str], Path]) -> None:
    """By prefill and by decode, compared with the same model in float64."""
    prompt, following = PROMPTS[0], text(case, tuple(PROMPTS[0]), 20)
    runner = Runner(load(folder(case)), 8, 16, 2, 64)
    ours = teacher_forced(runner, prompt, following)
    tokens = torch.tensor([prompt + following])
    with torch.no_grad():
        theirs = reference(case)(tokens).logits[0, len(prompt) - 1 :]
        double = getattr(transformers, f"{CASES[case][0]}ForCausalLM").from_pretrained(
            folder(case), dtype=torch.float64
        )
        double.set_experts_implementation("eager")  # grouped products have no float64
        exact = double(tokens).logits[0, len(prompt) - 1 :]
    assert (ours - exact).abs().max() <= 4 * (theirs - exact).abs().max()


def test_padded_rows_touch_nothing(llama: Decoder) -> None:
    """Of three sequences, which are padded to four: what no token owns keeps what it held."""
    runner = Runner(llama, 8, 4, 4, 16)
    cache = torch.stack([torch.stack(kept) for kept in runner.cache]).fill_(7.0)
    runner.cache = [tuple(kept) for kept in cache]
    tables = [[6, 1], [3], [5]]
    runner.run([Part([1, 2, 3, 4, 5], 0, tables[0]), Part([6, 7], 0, tables[1]), Part([8, 9, 10], 0, tables[2])])
    together = runner.run([Part([11], 5, tables[0]), Part([12], 2, tables[1]), Part([13], 3, tables[2])])
    alone = torch.cat(
        [
            runner.run([Part([11], 5, tables[0])]),
            runner.run([Part([12], 2, tables[1])]),
            runner.run([Part([13], 3, [5])]),
        ]
    )
    torch.testing.assert_close(together, alone)
    written = (cache != 7.0).all(-1).all(-1).all(0).all(0)
    owned = torch.zeros(8, 4, dtype=torch.bool)
    owned[6], owned[1, :2], owned[3, :3], owned[5] = True, True, True, True
    assert torch.equal(written, owned)
    assert ((cache != 7.0).any(-1).any(-1).any(0).any(0) == owned).all()


LONG = {"factor": 8.0, "original_max_position_embeddings": 8192}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 8.3},
    "llama3": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | LONG,
    "yarn": {"rope_type": "yarn"} | LONG,
    "yarn between whole pairs": {"rope_type": "yarn", "truncate": False, "beta_fast": 0, "beta_slow": None} | LONG,
    "yarn with truncate null": {"rope_type": "yarn", "truncate": None} | LONG,
    "yarn with its ramp reversed": {"rope_type": "yarn", "beta_fast": 2, "beta_slow": 16} | LONG,
    "yarn with a ramp of nothing": {"rope_type": "yarn", "beta_fast": 1e9, "beta_slow": 1e9} | LONG,
    "yarn with an attention factor": {"rope_type": "yarn", "attention_factor": 0.75, "mscale": 2.0} | LONG,
    "yarn with scales": {"rope_type": "yarn", "mscale": 0.707, "mscale_all_dim": 2} | LONG,
    "yarn with one scale": {"rope_type": "yarn", "mscale": 0.707, "mscale_all_dim": 0} | LONG,
    "yarn that shortens": {"rope_type": "yarn", "factor": 0.5, "mscale": 2.0, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize("case", ROPES)
def test_angles_are_those_of_transformers(case: str) -> None:
    """With numbers like those of Llama 3.1; what cosines and sines are multiplied by, too."""
    sizes = SIZES | {"head_dim": 128, "max_position_embeddings": 16384}
    rope = {"rope_theta": 500000.0} | ROPES[case]
    config = Config.parse({"architectures": ["LlamaForCausalLM"], **sizes, "rope_parameters": rope})
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.LlamaConfig(**sizes, rope_parameters=dict(rope))
    )
    torch.testing.assert_close(config.rope.frequencies(128), theirs.inv_freq, rtol=2**-21, atol=0.0)
    assert config.rope.attention_factor == theirs.attention_scaling
    table = config.rope.cos_sin(128, 5)
    angles = torch.arange(5.0)[:, None] * theirs.inv_freq
    expected = torch.cat((angles.cos(), angles.sin()), -1) * theirs.attention_scaling
    torch.testing.assert_close(table, expected, rtol=0.0, atol=2**-20)


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
def test_the_kernels_write_the_same() -> None:
    """On the host, checked for every access."""
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 16}
    model = Decoder(Config(**sizes, qk_norm="head", sliding_windows=(5,))).randomise(3, scale=2.0)
    prompts, params = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11]], SamplingParams(max_tokens=4)
    expected = Engine(model, block_size=4, max_num_seqs=4).generate(prompts, params)
    with testing.cpu("kernels"):
        assert Engine(model, block_size=4, max_num_seqs=4).generate(prompts, params) == expected


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.slow
def test_a_model_that_was_warmed_up_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of any lengths, decode steps of any batch, a text that steps back; on the host."""
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}
    config = Config(**sizes, qk_norm="head", sliding_windows=(5, 0))
    limits = {"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    prompts = [[1 + i] * (1 + 7 * i % 23) for i in range(8)]
    model = Decoder(config).randomise(3, scale=2.0)
    with testing.cpu("kernels"):
        assert pyops.warmup(model=config, max_model_len=64, **limits) == []
        monkeypatch.setenv("PYOPS_JIT", "error")
        engine = Engine(model, num_blocks=14, max_seq_len=64, **limits)
        engine.generate(prompts, SamplingParams(max_tokens=6))
        with pytest.raises(pyops.NotLoadedError, match=r"^rms_norm: "):
            pyops.rms_norm(torch.empty(2, 1832), torch.ones(2, 1832), None, 0.0)


def test_warmup_of_a_model_takes_no_names() -> None:
    with pytest.raises(pyops.OpError, match=r"^rms_norm: model: is given with names of ops$"):
        pyops.warmup(
            "rms_norm",
            model=Config(
                vocab_size=8,
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
                head_dim=8,
                max_position_embeddings=8,
            ),
        )


@pytest.mark.slow
def test_kernels_of_a_real_model_are_few() -> None:
    """Llama 3 8B on a GPU, from its sizes alone."""
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072}
    found = serving_kernels(Config(**sizes, dtype="bfloat16"), device.model("sm_90"), max_num_seqs=256)
    counts = Counter(op.name for op, _ in found)
    assert set(counts) == {
        "rms_norm",
        "fused_add_rms_norm",
        "silu_and_mul",
        "rotary_embedding",
        "reshape_and_cache_flash",
        "paged_attention_v1",
        "paged_attention_varlen",
    }
    assert counts.total() < 40, counts


# Batching


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 7},
        {"block_size": 5, "max_num_seqs": 3},
        {"max_num_batched_tokens": 1},
    ],
    ids=str,
)
def test_texts_do_not_depend_on_the_batch(limits: dict[str, int], llama: Decoder) -> None:
    """Fewer at once than there are, prompts in parts, other blocks."""
    engine = Engine(llama, max_seq_len=128, **limits)
    assert engine.generate(PROMPTS, SamplingParams(max_tokens=24)) == texts("llama", 24)


def test_requests_step_back_when_blocks_run_out(llama: Decoder) -> None:
    engine = Engine(llama, num_blocks=24, block_size=4, max_seq_len=96, max_num_seqs=4)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    expected = [text("llama", tuple(prompt), 50) for prompt in prompts]
    assert engine.generate(prompts, SamplingParams(max_tokens=50)) == expected
    assert engine.preemptions > 0
    assert sorted(engine._scheduler.free_blocks) == list(range(24)), "every block came back, once"


@pytest.mark.parametrize("running", [1, 2])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_block_is_spared_for_each_running_request(running: int, missing: int, llama: Decoder) -> None:
    """With one block fewer, the last request waits: its prompt would be computed, given up and computed again."""
    prompt = [1] * 4  # fills a block
    engine = Engine(llama, num_blocks=2 * running + 4 - missing, block_size=4, max_seq_len=20, max_num_seqs=4)
    for _ in range(running):
        engine.add(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    outputs = engine.step()
    late = engine.add(prompt * 4, SamplingParams(max_tokens=1))
    outputs += (second := engine.step())
    assert [output.request for output in second] == [*range(running), *([] if missing else [late])]
    assert len([*outputs, *engine.run()]) == 3 * running + 1
    assert engine.preemptions == 0


def test_a_text_steps_back_without_its_prompt(llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of the tokens that remain are still there, and blocks of the others are free."""
    engine = Engine(llama, block_size=4, max_seq_len=96, max_num_seqs=2)
    counts: list[int] = []
    run = engine._runner.run
    monkeypatch.setattr(engine._runner, "run", lambda parts: counts.extend(len(p.tokens) for p in parts) or run(parts))
    request = engine.add(PROMPTS[0], SamplingParams(max_tokens=24))
    found = [engine.step()[0].token for _ in range(17)]
    engine.step_back(request, len(PROMPTS[0]) + 5)
    assert len(engine._scheduler.free_blocks) == engine.num_blocks - 7
    found = found[:5] + [output.token for output in engine.run()]
    assert found == text("llama", tuple(PROMPTS[0]), 24)
    assert counts == [len(PROMPTS[0])] + [1] * (16 + 19)
    assert sorted(engine._scheduler.free_blocks) == list(range(engine.num_blocks))


def test_requests_may_come_late(llama: Decoder) -> None:
    engine = Engine(llama, max_seq_len=96, max_num_seqs=4)
    found: dict[int, list[int]] = {engine.add(PROMPTS[0], SamplingParams(max_tokens=20)): []}
    for output in engine.run():
        found.setdefault(output.request, []).append(output.token)
        if len(found) == 1 and len(found[0]) == 5:
            engine.add(PROMPTS[2], SamplingParams(max_tokens=8))
    assert list(found.values()) == [text("llama", tuple(PROMPTS[0]), 20), text("llama", tuple(PROMPTS[2]), 8)]
    assert engine.step() == []


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_default_device_changes_nothing(temperature: float, folder: Callable[[str], Path], llama: Decoder) -> None:
    """What must be in the memory of the host is there, and the rest where the model is."""
    params, prompts = SamplingParams(max_tokens=8, temperature=temperature, seed=5), [[1, 2, 3], [4]]
    expected = Engine(llama, max_num_seqs=2).generate(prompts, params)
    assert len(set(expected[0])) > 1
    with torch.device("meta"):
        assert Engine(load(folder("llama")), max_num_seqs=2).generate(prompts, params) == expected
        made = Decoder(llama.config).randomise(3)
    assert all(
        tensor.equal(made.tensors()[name]) for name, tensor in Decoder(llama.config).randomise(3).tensors().items()
    )


def test_a_text_ends_at_its_end(llama: Decoder) -> None:
    whole = text("llama", tuple(PROMPTS[0]), 24)
    end = whole[10]
    llama.config = replace(llama.config, eos_token_ids=(159 if end != 159 else 158, end))
    engine = Engine(llama, max_seq_len=96)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=24))
    outputs = list(engine.run())
    assert [output.token for output in outputs] == whole[: whole.index(end) + 1]
    assert [output.finished for output in outputs] == [None] * (len(outputs) - 1) + ["stop"]
    assert engine.generate([PROMPTS[0]], SamplingParams(max_tokens=24, ignore_eos=True)) == [whole]
    engine.add(PROMPTS[0], SamplingParams(max_tokens=1, ignore_eos=True))
    assert [output.finished for output in engine.run()] == ["length"]


def test_what_can_never_be_served_is_refused(llama: Decoder) -> None:
    engine = Engine(llama, num_blocks=3, block_size=4, max_seq_len=20)
    assert len(engine.generate([[1] * 9], SamplingParams(max_tokens=4))[0]) == 4  # 13 tokens, the last is not kept
    for prompt, count, message in (
        ([], 1, "prompt: expected tokens from 0 to 159, got none"),
        ([5, 1.5], 1, r"prompt: expected integers, got \[5, 1\.5\]"),
        ("text", 1, "prompt: expected integers, got 'text'"),
        ([5, 160], 1, "prompt: expected tokens from 0 to 159, got token 160"),
        ([5, -1], 1, "prompt: .* got token -1"),
        ([1] * 9, 5, "prompt and max_tokens: need 4 blocks, and the cache has 3"),
        ([1] * 9, 12, "prompt and max_tokens: expected at most max_seq_len=20 tokens, got 21"),
    ):
        with pytest.raises(ModelError, match=message):
            engine.add(prompt, SamplingParams(max_tokens=count))
    assert not engine.busy
    for options, message in (
        ({"max_seq_len": 257}, "max_seq_len: expected at most 256"),
        ({"max_num_seqs": 0}, "max_num_seqs: expected an integer, 1 or more, got 0"),
        ({"num_blocks": 0}, "num_blocks: expected an integer, 1 or more, got 0"),
        ({"block_size": 1.5}, r"block_size: expected an integer, 1 or more, got 1\.5"),
        ({"max_num_batched_tokens": "8"}, "max_num_batched_tokens: expected an integer, 1 or more, got '8'"),
        ({"num_blocks": 10**12}, "num_blocks: the memory of cpu has room for"),
        ({"block_size": 10**12}, "num_blocks: the memory of cpu has room for 0"),
        ({"max_num_seqs": 10**12}, "num_blocks: the memory of cpu has room for 0"),
    ):
        with pytest.raises(ModelError, match=message):
            Engine(llama, **options)


def test_prompts_that_are_refused_leave_none_behind(llama: Decoder) -> None:
    engine = Engine(llama, max_seq_len=96)
    with pytest.raises(ModelError, match="prompt: expected tokens from 0 to 159, got token 160"):
        engine.generate([PROMPTS[0], [160]])
    assert not engine.busy
    assert engine.generate([PROMPTS[0]]) == [text("llama", tuple(PROMPTS[0]), 16)]
    engine.add(PROMPTS[0])
    with pytest.raises(ModelError, match="what was asked for before has not ended"):
        engine.generate([PROMPTS[0]])


@pytest.mark.parametrize("where", ["run", "sample"])
def test_an_error_in_a_step_ends_all_requests(where: str, llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three requests that run and one that waits; what is asked for then is served as by a new engine."""
    engine = Engine(llama, max_seq_len=96, max_num_seqs=3)
    for prompt in (*PROMPTS, PROMPTS[0]):
        engine.add(prompt)
    for _ in range(3):
        engine.step()

    def fail(*args: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(engine._runner if where == "run" else engine_module, where, fail)
    with pytest.raises(RuntimeError, match="no"):
        engine.step()
    monkeypatch.undo()
    assert not engine.busy
    assert engine.step() == []
    assert sorted(engine._scheduler.free_blocks) == list(range(engine.num_blocks))
    assert sorted(engine._scheduler.free_slots) == [0, 1, 2]
    assert engine.generate(PROMPTS, SamplingParams(max_tokens=24)) == texts("llama", 24)


def test_the_table_of_angles_is_as_long_as_the_texts() -> None:
    """Of a model for two thousand million positions; where the memory for it is not there, the engine says so."""
    sizes = {name: value for name, value in SIZES.items() if name in Config.__dataclass_fields__ and value is not None}
    model = Decoder(Config(**sizes | {"head_dim": 16, "max_position_embeddings": 2**31 - 1})).randomise(0)
    assert len(Engine(model, max_seq_len=40).generate([[1, 2]], SamplingParams(max_tokens=5))[0]) == 5
    with pytest.raises(ModelError, match="num_blocks: the memory of cpu has room for 0"):
        Engine(model, max_seq_len=2**31 - 1, max_num_seqs=1)


# Sampling


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 5, 1.0), (1.0, 0, 0.7), (1.3, 8, 0.6)]
)
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature: float, top_k: int, top_p: float) -> None:
    """Draws all over [0, 1): each token takes the part of them that is its probability, cut off in float64."""
    logits = torch.randn(20, generator=torch.Generator().manual_seed(2)) * 2
    probabilities = (logits.double() / temperature).softmax(-1)
    likeliest = sorted(range(20), key=lambda i: -probabilities[i])[: top_k or 20]
    sums = probabilities[likeliest].cumsum(0) / probabilities[likeliest].sum()
    kept = likeliest[: int((sums < top_p).sum()) + 1]
    expected = torch.zeros(20, dtype=torch.float64)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    count = 2000
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    tokens = sample(logits.expand(count, -1), [params] * count, [(i + 0.5) / count for i in range(count)])
    shares = torch.bincount(torch.tensor(tokens), minlength=20) / count
    assert ((shares - expected).abs() <= 1.01 / count).all()
    assert sample(logits[None], [params], [1 - 2**-53])[0] == kept[-1]


def test_a_seed_gives_its_text_whatever_is_beside_it(llama: Decoder) -> None:
    params = SamplingParams(max_tokens=20, temperature=3.0, top_k=50, seed=5)
    (alone,) = Engine(llama, max_seq_len=96).generate([PROMPTS[0]], params)
    engine = Engine(llama, max_seq_len=96, max_num_seqs=4)
    found: dict[int, list[int]] = {}
    for prompt, one in (
        (PROMPTS[2], SamplingParams(max_tokens=9)),
        (PROMPTS[0], params),
        (PROMPTS[0], replace(params, seed=6)),
    ):
        found[engine.add(prompt, one)] = []
    for output in engine.run():
        found[output.request].append(output.token)
    assert found[0] == text("llama", tuple(PROMPTS[2]), 9)
    assert found[1] == alone != found[2]
    assert alone != text("llama", tuple(PROMPTS[0]), 20)


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-40, 1e-38, 1e300, 10**300])
@pytest.mark.parametrize("options", [{}, {"top_p": 1e-46}, {"top_k": 10**400}], ids=str)
def test_every_temperature_draws(temperature: float, options: dict[str, float]) -> None:
    """The likeliest token, or any of them; of large logits too."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.5]]) * torch.tensor([[1.0], [1e30], [-1e30]])
    params = SamplingParams(temperature=temperature, **options)
    found = [sample(logits, [params] * 3, [draw] * 3) for draw in (0.0, 0.3, 0.6, 1 - 2**-53)]
    one = [1, 1, 3]
    flat = [[1, 1, 3], [2, 2, 0], [0, 0, 2], [3, 3, 1]]
    assert found == ([one] * 4 if temperature < 1 or "top_p" in options else flat)


def test_rows_without_numbers_give_their_likeliest_token() -> None:
    """As without a temperature; the rows beside them are drawn from as ever."""
    nan, infinite = float("nan"), float("inf")
    logits = torch.tensor(
        [
            [nan, nan, nan, nan],
            [1.0, nan, 2.0, 0.0],
            [1.0, 2.0, infinite, 3.0],
            [-infinite, -infinite, -infinite, -infinite],
            [-infinite, 1.0, 1.0, -infinite],
        ]
    )
    greedy, drawn = SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9)
    for draw in (0.0, 0.5, 1 - 2**-53):
        tokens = sample(logits, [drawn] * 5, [draw] * 5)
        assert tokens[:4] == sample(logits, [greedy] * 5, [draw] * 5)[:4]
        assert tokens[4] in (1, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", value) for value in (0, 1.5, "5", None, True, float("inf"))),
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"), 10**400, "1", True)),
        *(("top_k", value) for value in (-1, 2.5, False)),
        *(("top_p", value) for value in (0.0, 1.0000001, float("nan"), None)),
        *(("seed", value) for value in (-1, "x", None, 0.5)),
        *(("ignore_eos", value) for value in (1, None, "no")),
    ],
)
def test_bad_sampling_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"SamplingParams: {name}: expected .*, got {re.escape(repr(value))}"):
        SamplingParams(**{name: value})


# Folders


def test_a_folder_of_shards(tmp_path: Path) -> None:
    """And a dtype of one's own, and how far the load has come."""
    reference("qwen3").save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    steps: list[tuple[int, int]] = []
    model = load(tmp_path, dtype="bfloat16", progress=lambda *step: steps.append(step))
    for name, tensor in reference("qwen3").state_dict().items():
        assert torch.equal(model.tensors()[name], tensor.bfloat16()), name
    total = sum(tensor.nbytes for tensor in model.tensors().values())
    assert steps[-1] == (total, total)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = sorted(folder.glob("*.safetensors"))[0]
        tensors = safetensors.torch.load_file(file)
        change(tensors)
        safetensors.torch.save_file(tensors, file)

    return edit


def edit_index(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "shard.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(changes))

    return edit


def rope(**values: Any) -> Callable[[Path], None]:
    return edit_config(rope_parameters=values)


def shorten(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-8])


BAD = {
    "no config": (lambda folder: (folder / "config.json").unlink(), r"config\.json: cannot be read: .*No such file"),
    "a broken config": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: cannot be read"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "expected an object, got list"),
    "an architecture": (
        edit_config(architectures=["GPT2LMHeadModel"]),
        r"architectures: expected Llama.*, got \['GPT2",
    ),
    "no architecture": (edit_config(architectures=None), "architectures: expected"),
    "an activation": (edit_config(hidden_act="relu"), "hidden_act: expected 'silu' or .*, got 'relu'"),
    "quantised": (
        edit_config(quantization_config={"bits": 4}),
        "quantization_config.quant_method: expected 'fp8', .* or 'compressed-tensors', got None",
    ),
    "a rope": (rope(rope_type="longrope"), "rope_type: expected .*, got 'longrope'"),
    "a rope of another type": (rope(rope_type=[]), r"rope_type: expected .*, got \[\]"),
    "no rope at all": (edit_config(rope_scaling=[1]), r"rope_scaling: expected one object for all layers, got \[1\]"),
    "no length of texts": (
        rope(**YARN | {"original_max_position_embeddings": 10**30}),
        "original_max_position_embeddings: expected a positive integer up to 2147483647, got 1000",
    ),
    "an endless factor": (rope(**YARN | {"factor": float("inf")}), r"rope_parameters\.factor: .*, got inf"),
    "a factor of 400 digits": (rope(**YARN | {"factor": 10**400}), r"rope_parameters\.factor: .*, got 1000"),
    "scales that end nothing": (rope(**YARN | {"mscale": -1, "mscale_all_dim": 1}), r"rope_parameters\.mscale: "),
    "a ramp of words": (rope(**YARN | {"beta_fast": "32"}), r"rope_parameters\.beta_fast: .*, got '32'"),
    "an attention factor of 0": (rope(**YARN | {"attention_factor": 0}), r"attention_factor: .*, got 0"),
    "truncate as a word": (rope(**YARN | {"truncate": "false"}), "truncate: expected true or false, got 'false'"),
    "a theta of 1": (rope(**YARN | {"rope_theta": 1}), r"rope_theta: expected more than 1, got 1\.0"),
    "a theta of 0": (rope(rope_theta=0), "rope_theta: expected a positive number from 1e-30 to 1e30, got 0"),
    "a rope without factor": (
        edit_config(rope_parameters={"rope_type": "linear"}),
        r"rope_parameters\.factor: expected",
    ),
    "a theta": (
        edit_config(rope_parameters={"rope_theta": "big"}),
        "rope_theta: expected a positive number .*, got 'big'",
    ),
    "factors in disorder": (
        edit_config(rope_parameters=LLAMA3 | {"high_freq_factor": 1.0}),
        r"high_freq_factor: expected more than low_freq_factor, got 1\.0",
    ),
    "an epsilon": (edit_config(rms_norm_eps=None), "rms_norm_eps: expected a positive number .*, got None"),
    "part of a head": (
        edit_config(rope_parameters={"partial_rotary_factor": 0.5}),
        "partial_rotary_factor: expected 1.0",
    ),
    "an endless epsilon": (edit_config(rms_norm_eps=float("inf")), "rms_norm_eps: expected a .* number .*, got inf"),
    "an epsilon of 400 digits": (edit_config(rms_norm_eps=10**400), "rms_norm_eps: expected a .* number .*, got 1000"),
    "no size": (edit_config(hidden_size=None), "hidden_size: expected a positive integer .*, got None"),
    "a size": (edit_config(num_hidden_layers="2"), "num_hidden_layers: expected a positive integer .*, got '2'"),
    **{
        f"{name} beyond all": (edit_config(**{name: 10**30}), f"{name}: expected a positive integer up to .*, got 10")
        for name in SIZES
        if name.endswith(("_size", "_heads", "_layers", "_embeddings"))
    },
    "a vocabulary beyond all": (
        edit_config(vocab_size=10**19),
        "vocab_size: expected a positive integer up to 1048576",
    ),
    "heads beyond all": (edit_config(head_dim=10**30), "head_dim: expected a positive integer up to 1048576, got 10"),
    "queries beyond all": (
        edit_config(num_attention_heads=2**20),
        r"num_attention_heads \* head_dim: expected a positive integer up to 1048576",
    ),
    "layers beyond the tensors": (edit_config(num_hidden_layers=30000), "has 30000 layers, and 21 tensors for them"),
    **{
        f"architectures {value!r}": (edit_config(architectures=value), "architectures: expected Llama")
        for value in (5, 1.5, True, {"a": 1}, [["LlamaForCausalLM"]], "LlamaForCausalLM")
    },
    "windows of a Llama": (
        edit_config(layer_types=["sliding_attention"] * 2, sliding_window=4),
        r"layer_types: expected 2 of full_attention, got \['sliding",
    ),
    **{
        f"{name} {value!r}": (edit_config(**{name: value}), f"{name}: expected true or false, got ")
        for name, value in (("tie_word_embeddings", "false"), ("attention_bias", 1), ("mlp_bias", []))
    },
    **{
        f"eos_token_id {value!r}": (edit_config(eos_token_id=value), "eos_token_id: expected a token or several, got ")
        for value in ("35", ["35"], {}, -1, [True], 1.5)
    },
    "a deep config": (
        lambda folder: (folder / "config.json").write_text('{"a":' * sys.getrecursionlimit() * 10),
        r"config\.json: cannot be read: ",
    ),
    "a deep generation config": (
        lambda folder: (folder / "generation_config.json").write_text("[" * sys.getrecursionlimit() * 10),
        r"generation_config\.json: cannot be read: ",
    ),
    "heads": (
        edit_config(num_key_value_heads=3),
        "num_key_value_heads: expected a divisor of num_attention_heads=4, got 3",
    ),
    "a dtype": (edit_config(dtype="int8"), "dtype: expected float32 or .*, got 'int8'"),
    "a missing layer": (
        edit_config(num_hidden_layers=3),
        r"model\.layers\.2\.input_.*: is in no shard, nor are 8 others",
    ),
    "one layer more": (edit_config(num_hidden_layers=1), r"model\.layers\.1\..*: is no tensor of this architecture"),
    "a bias": (
        edit_tensors(lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})),
        r"q_proj\.bias: is no tensor of this architecture",
    ),
    "a shape": (edit_config(intermediate_size=100), r"mlp\..*: expected shape .*100.*, got .*96"),
    "a tensor's dtype": (
        edit_tensors(lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)})),
        r"model\.norm\.weight: expected BF16 or F16 or F32, got I8",
    ),
    "a missing tensor": (
        edit_tensors(lambda tensors: tensors.pop("lm_head.weight")),
        r"lm_head\.weight: is in no shard$",
    ),
    "a cut shard": (shorten, r"model\.safetensors: is no whole safetensors file"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors: is missing"),
    "a missing shard": (edit_index(weight_map={"lm_head.weight": "absent.safetensors"}), "absent.*: is missing"),
    "an index that leads away": (
        edit_index(weight_map={"lm_head.weight": "../model.safetensors"}),
        "weight_map: expected",
    ),
    "an index of nothing": (edit_index(metadata={}), "weight_map: expected"),
    "an index of lists": (edit_index(weight_map={"a": ["b"]}), "weight_map: expected"),
    "an index without letters": (edit_index(weight_map={"a": "x\0y"}), "is missing"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_folder_is_refused_before_memory_is_taken(
    what: str, folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder("llama"), tmp_path / "bad")
    damage, message = BAD[what]
    damage(tmp_path / "bad")

    def no_memory(config: Config, dtype: str | None, device: str) -> Decoder:
        assert device == "meta", "memory is taken"
        return Decoder(config, dtype, device)

    monkeypatch.setattr(checkpoint, "Decoder", no_memory)
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "bad")


def test_old_spellings_and_defaults() -> None:
    """As in the folders of Llama 3.1 and Mistral 0.1."""
    sizes = {name: SIZES[name] for name in SIZES if isinstance(SIZES[name], int)}
    new = Config.parse({"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **sizes, "rope_parameters": LLAMA3})
    scaling = {"type" if name == "rope_type" else name: LLAMA3[name] for name in LLAMA3 if name != "rope_theta"}
    old = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "rope_theta": 1e4, "rope_scaling": scaling}
    assert Config.parse(old | sizes) == new
    assert new.rope == Rope(1e4, "llama3", 4.0, 1.0, 4.0, 32)
    first = {"architectures": ["MistralForCausalLM"], "rope_theta": 1e6, "rope_scaling": None, "eos_token_id": [2, 7]}
    mistral = Config.parse(first | sizes)
    assert (mistral.rope, mistral.sliding_windows, mistral.eos_token_ids) == (Rope(1e6), (4096, 4096), (2, 7))
    qwen = {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    }
    assert Config.parse(qwen | sizes).sliding_windows == (0, 7)
    assert Config.parse(qwen | sizes | {"use_sliding_window": False}).sliding_windows == (0, 0)
    with pytest.raises(ModelError, match="layer_types: expected 2 of full_attention, got"):
        Config.parse(qwen | sizes | {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2})
    del sizes["num_key_value_heads"]
    assert Config.parse(old | sizes).num_key_value_heads == 4
    assert Config.parse(first | sizes | {"num_attention_heads": 16}).num_key_value_heads == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}, "original_max_position_embeddings": 32},
        {"rope_parameters": YARN, "original_max_position_embeddings": 32},
        {"rope_parameters": LINEAR, "rope_scaling": YARN, "rope_theta": 50.0},
        {"rope_parameters": LINEAR, "rope_scaling": {}, "rope_theta": 50.0},
        {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 50.0},
        {"rope_scaling": {"type": "linear", "rope_type": "llama3"} | LLAMA3},
    ],
    ids=str,
)
def test_what_a_config_says_twice_is_read_as_transformers_reads_it(
    changes: dict[str, Any], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    values = json.loads((folder("llama") / "config.json").read_text())
    del values["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.LlamaConfig.from_pretrained(tmp_path)
    )
    ours = Config.read(tmp_path).rope
    torch.testing.assert_close(ours.frequencies(16), theirs.inv_freq, rtol=2**-21, atol=0.0)
    assert ours.attention_factor == theirs.attention_scaling


@pytest.mark.parametrize("same", [False, True])
def test_tied_embeddings_with_a_head_of_their_own(same: bool, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The head in the file is taken, as by transformers, whatever the config says."""
    shutil.copytree(folder("llama"), tmp_path / "tied")
    edit_config(tie_word_embeddings=True)(tmp_path / "tied")
    if same:
        embedding = reference("llama").model.embed_tokens.weight.clone()
        edit_tensors(lambda tensors: tensors.update({"lm_head.weight": embedding}))(tmp_path / "tied")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "tied").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPTS[0]])).logits[0, -1:]
    found = Runner(load(tmp_path / "tied"), 8, 16, 2, 64).run([Part(PROMPTS[0], 0, [1, 2])])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_single_file_comes_before_an_index(folder: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(folder("llama"), tmp_path / "both")
    edit_index(weight_map={"lm_head.weight": "shard.safetensors"})(tmp_path / "both")
    edit_tensors(lambda tensors: tensors["lm_head.weight"].zero_())(tmp_path / "both")
    shutil.copy(folder("llama") / "model.safetensors", tmp_path / "both")
    assert torch.equal(load(tmp_path / "both").head.weight, reference("llama").lm_head.weight)


WINDOWS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"Mistral: {value!r}": ({"sliding_window": value}, "sliding_window: expected a positive integer")
        for value in ("", [], True, 0, 4.5, 10**30)
    },
    "Ministral: layers": ({"layer_types": ["other"] * 2}, "expected 2 of full_attention or sliding_attention"),
    "Mistral: layers": ({"layer_types": ["full_attention"] * 2}, "layer_types: expected 2 of sliding_attention"),
    **{
        f"Qwen2: {value!r}": ({"layer_types": value}, "layer_types: expected 2 of full_attention or sliding_attention")
        for value in (5, True, [], [[1], [2]], "ab")
    },
    "Qwen2: a flag": ({"use_sliding_window": "false"}, "use_sliding_window: expected true or false, got 'false'"),
    "Qwen2: first": ({"max_window_layers": True}, "max_window_layers: expected an integer, got True"),
}


@pytest.mark.parametrize("what", WINDOWS)
def test_bad_windows_are_refused(what: str) -> None:
    changes, message = WINDOWS[what]
    sizes = {name: SIZES[name] for name in SIZES if isinstance(SIZES[name], int)}
    values = {"architectures": [f"{what.partition(':')[0]}ForCausalLM"], "use_sliding_window": True, **sizes}
    with pytest.raises(ModelError, match=message):
        Config.parse(values | changes)


def test_weights_without_room_are_refused(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 << 20 < checkpoint.free_bytes(torch.device("cpu")) < 1 << 50
    monkeypatch.setattr(checkpoint, "free_bytes", lambda device: 1000)
    with pytest.raises(ModelError, match=r"its weights take .* GB, and cpu has 0\.0 GB"):
        load(folder("llama"))


@pytest.mark.parametrize("device", ["bogus", "", "meta", "mps", "cuda:99", "cuda:-1", 1.5])
def test_devices_that_are_not_there_are_refused(device: Any, folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=f"device: expected the CPU or one of . GPUs, got '{device}'"):
        load(folder("llama"), device)


def test_ends_of_text_come_from_the_generation_config(folder: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(folder("llama") / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert Config.read(tmp_path).eos_token_ids == (5, 6)


# The command


@pytest.fixture
def words(folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """The folder of a model with a tokenizer, for which token i is the word wi."""
    shutil.copytree(folder("llama"), tmp_path / "words")
    vocabulary = {f"w{i}": i for i in range(160)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words" / "tokenizer.json"))
    return tmp_path / "words"


def sentence(tokens: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def test_generate_prints_texts(words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = PROMPTS[0], PROMPTS[2]
    options = ["--model", str(words), "--max-tokens", "12", "--device", "cpu"]
    assert main(["generate", *options, "--prompt", sentence(first)]) == 0
    printed = capsys.readouterr()
    assert printed.out == sentence([*first, *text("llama", tuple(first), 12)]) + "\n"
    assert "12 tokens, the first after " in printed.err
    assert main(["generate", *options, "--prompt", sentence(first), "--prompt", sentence(last)]) == 0
    expected = [sentence([*prompt, *text("llama", tuple(prompt), 12)]) for prompt in (first, last)]
    printed = capsys.readouterr()
    assert printed.out.splitlines() == expected
    assert "24 tokens" in printed.err


def test_generate_names_what_is_wrong(words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["generate", "--model", str(words), "--prompt", "w1", "--device", "cpu"]
    assert main([*options, "--top-p", "0"]) == 2
    assert capsys.readouterr().err.startswith("SamplingParams: top_p: expected a number, more than 0")
    assert main([*options, "--max-tokens", "1000"]) == 2
    assert "prompt and max_tokens: expected at most max_seq_len=256 tokens, got 1001" in capsys.readouterr().err
    assert main([*options, "--prompt", ""]) == 2
    assert "request: prompt: expected tokens from 0 to 159, got none" in capsys.readouterr().err
    assert main([*options, "--prompt", "w1 \udcff"]) == 2
    assert capsys.readouterr().err == "prompt: expected UTF-8, got 'w1 \\udcff'\n"
    assert main([*options, "--device", "bogus"]) == 2
    assert capsys.readouterr().err.startswith("device: expected the CPU or one of")
    assert main([*options, "--dtype", "int4"]) == 2
    assert capsys.readouterr().err.startswith("dtype: expected float32 or float16 or bfloat16, got 'int4'")
    (words / "tokenizer.json").write_text("no")
    assert main(options) == 2
    assert "tokenizer.json: is no tokenizer: " in capsys.readouterr().err
    (words / "tokenizer.json").unlink()
    assert main(options) == 2
    assert "tokenizer.json: is missing" in capsys.readouterr().err


def test_prompts_are_checked_before_weights_are_read(
    words: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "load", lambda *args: pytest.fail("weights are read"))
    for prompt, count in (("", "1"), ("w1", "256"), (sentence(range(100)) + " w1" * 157, "1")):
        assert main(["generate", "--model", str(words), "--prompt", prompt, "--max-tokens", count]) == 2
        assert capsys.readouterr().err.startswith("request: prompt")


def test_prompts_are_neither_cut_nor_filled(words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(words / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=30, pad_id=7, pad_token="w7")
    tokenizer.save(str(words / "tokenizer.json"))
    options = ["--model", str(words), "--max-tokens", "12", "--device", "cpu"]
    assert main(["generate", *options, "--prompt", sentence(PROMPTS[0])]) == 0
    assert capsys.readouterr().out == sentence([*PROMPTS[0], *text("llama", tuple(PROMPTS[0]), 12)]) + "\n"


@cache
def byte_fallback() -> tokenizers.Tokenizer:
    """A tokenizer as that of Llama 2: what has no token of its own is written byte by byte."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b"]
    vocabulary = {word: i for i, word in enumerate(words)}
    found = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    found.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found.add_special_tokens(words[:3])
    return found


def stream(prompt: Sequence[str | int], text: Sequence[str | int]) -> list[str]:
    """What tokens add, given as words or as the bytes that have no word."""
    tokenizer = byte_fallback()
    prompt, tokens = (
        [tokenizer.token_to_id(one if isinstance(one, str) else f"<0x{one:02X}>") for one in words]
        for words in (prompt, text)
    )
    adding = generate.Stream(tokenizer, prompt)
    return [adding.add(token, last=i == len(tokens) - 1) for i, token in enumerate(tokens)]


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        ([0x0A, 0xF0, "a", "b"], ["\n", "", "�a", "b"]),
        (["a", 0x0A, 0xF0, 0x9F, "a"], ["a", "\n", "", "", "��a"]),
        ([*"😀".encode(), "a"], ["", "", "", "😀", "a"]),
        ([*"é".encode(), "▁a", "</s>"], ["", "é", " a", ""]),
        (["a", 0xF0], ["a", "�"]),
        ([0xF0, "</s>"], ["", "�"]),
        ([*"�".encode(), "a"], ["", "", "", "�a"]),
    ],
    ids=str,
)
def test_bytes_are_shown_once_they_are_text(tokens: list[str | int], pieces: list[str]) -> None:
    assert stream(["<s>", "▁a"], tokens) == pieces


def test_pieces_are_the_text() -> None:
    """Of every prefix of one text as a prompt; and what is no text at all ends nothing."""
    words = "a é▁b漢 😀.\n ▁ab"
    ids = byte_fallback().encode(words).ids
    for end in range(1, len(words)):
        prompt = byte_fallback().encode(words[:end]).ids
        adding = generate.Stream(byte_fallback(), prompt)
        assert ids[: len(prompt)] == prompt
        pieces = [adding.add(token, last=i == len(ids) - 1) for i, token in enumerate(ids[len(prompt) :], len(prompt))]
        assert byte_fallback().decode(prompt) + "".join(pieces) == byte_fallback().decode(ids)
    generator = random.Random(0)
    for _ in range(200):
        tokens = [generator.randrange(264) for _ in range(20)]
        adding = generate.Stream(byte_fallback(), tokens[:2])
        for i, token in enumerate(tokens[2:], 2):
            adding.add(token, last=i == 19)


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], {})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines].count("0") == 8
    assert [line[0] for line in lines].count("1") == 4


# On a GPU

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_key_value_heads": 2,
    "initializer_range": 0.06,
}


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_logits_in_bfloat16_under_a_graph(family: str, tmp_path: Path) -> None:
    """As far from float32 with the same weights as transformers' model in bfloat16 is, at most twice."""
    torch.manual_seed(4)
    sizes = (
        SIZES | WIDE
        if family != "Qwen2"
        else {name: value for name, value in (SIZES | WIDE).items() if name != "head_dim"}
    )
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))
    model.eval().bfloat16().cuda().save_pretrained(tmp_path)
    ours = load(tmp_path, "cuda")
    assert ours.dtype is torch.bfloat16
    prompt, following = PROMPTS[2], [(11 * i) % 160 for i in range(40)]
    tokens = torch.tensor([prompt + following], device="cuda")
    with torch.no_grad():
        theirs = model(tokens).logits[0, len(prompt) - 1 :].float()
        exact = model.float()(tokens).logits[0, len(prompt) - 1 :]
    found = teacher_forced(Runner(ours, 16, 16, 4, 128), prompt, following).float()
    assert (found - exact).norm() <= 2 * (theirs - exact).norm()


@pytest.mark.gpu
def test_graphs_change_nothing(folder: Callable[[str], Path]) -> None:
    """Batches that shrink from three through padding to one, twice."""
    model = load(folder("qwen3"), "cuda", "bfloat16")
    engines = [Engine(model, max_seq_len=160, max_num_seqs=4, graphs=graphs) for graphs in (False, True)]
    for count in (30, 40):
        found = []
        for engine in engines:
            numbers = [engine.add(prompt, SamplingParams(max_tokens=count + 9 * i)) for i, prompt in enumerate(PROMPTS)]
            texts = {number: [] for number in numbers}
            for output in engine.run():
                texts[output.request].append(output.token)
            found.append(list(texts.values()))
        assert found[0] == found[1]
