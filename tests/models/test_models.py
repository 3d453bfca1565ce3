"""Models against transformers: the same float32 weights generate the same tokens; batching; sampling."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import pyops
from pyops import ModelError, testing, tuning
from pyops._core.system import device
from pyops.host.toolchain import toolchains
from pyops.models import Config, Decoder, Engine, Rope, SamplingParams, load, serving_kernels
from pyops.models import runner as runner_module
from pyops.models.attention import Attention
from pyops.models.drawing import Draw, chosen
from pyops.models.kernels import prefill_sizes
from pyops.models.runner import Part, Runner
from tests.support.small_models import CASES, PROMPTS, SIZES, folders, reference, teacher_forced, text, texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case, saved once."""
    return folders(tmp_path_factory)


@pytest.fixture
def llama(folder: Callable[[str], Path]) -> Decoder:
    return load(folder("llama"))


# The decoder


@pytest.mark.parametrize("case", CASES)
def test_tokens_match_transformers(case: str, folder: Callable[[str], Path]) -> None:
    """Prompts of different lengths in one batch, 64 tokens each."""
    engine = Engine(load(folder(case)), max_seq_len=160, max_num_seqs=4)
    assert engine.generate(PROMPTS, SamplingParams(max_tokens=64)) == texts(case, 64)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_as_exact_as_those_of_transformers(case: str, folder: Callable[[str], Path]) -> None:
    """In prefill and decode, against the same model in float64."""
    prompt, following = PROMPTS[0], text(case, tuple(PROMPTS[0]), 20)
    runner = Runner(load(folder(case)), 8, 16, 2, 64)
    ours = teacher_forced(runner, prompt, following)
    tokens = torch.tensor([prompt + following])
    with torch.no_grad():
        theirs = reference(case)(tokens).logits[0, len(prompt) - 1 :]
        double = getattr(transformers, f"{CASES[case][0]}ForCausalLM").from_pretrained(
            folder(case), dtype=torch.float64
        )
        double.set_experts_implementation("eager")  # grouped GEMM has no float64
        exact = double(tokens).logits[0, len(prompt) - 1 :]
    assert (ours - exact).abs().max() <= 4 * (theirs - exact).abs().max()


def test_padded_rows_touch_nothing(llama: Decoder) -> None:
    """Three sequences, padded to four: slots without a token keep their contents."""
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
def test_rope_angles_match_transformers(case: str) -> None:
    """With parameters like those of Llama 3.1, and the attention factor of cosines and sines."""
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
def test_kernels_generate_the_same_tokens() -> None:
    """On the host backend, which checks every access."""
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 16}
    model = Decoder(Config(**sizes, qk_norm="head", sliding_windows=(5,))).randomise(3, scale=2.0)
    prompts, params = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11]], SamplingParams(max_tokens=4)
    expected = Engine(model, block_size=4, max_num_seqs=4).generate(prompts, params)
    with testing.cpu("kernels"):
        assert Engine(model, block_size=4, max_num_seqs=4).generate(prompts, params) == expected


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.slow
def test_warmed_up_model_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of any lengths, decode batches of any size, a sequence that is rolled back; on the host."""
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}
    config = Config(**sizes, qk_norm="head", sliding_windows=(5, 0))
    limits = {"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    prompts = [[1 + i] * (1 + 7 * i % 23) for i in range(8)]
    model = Decoder(config).randomise(3, scale=2.0)
    with testing.cpu("kernels"):
        assert pyops.warmup(model=config, max_model_len=64, **limits)
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
def test_few_kernels_serve_a_real_model() -> None:
    """Llama 3 8B on a GPU, from its sizes alone."""
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072}
    found = serving_kernels(Config(**sizes, dtype="bfloat16"), device.model("sm_90"), max_num_seqs=256)
    counts = Counter(op.name for op, _ in found)
    assert set(counts) == {
        "vocab_parallel_embedding",
        "rms_norm",
        "fused_add_rms_norm",
        "skinny_linear",
        "skinny_qkv_rope_cache",
        "linear",
        "fused_qk_rope_cache",
        "paged_attention_v1",
        "paged_attention_varlen",
        "top_k_top_p_sampling_from_logits",
    }
    # 21 are `linear` of 2 to 64 rows, 13 sampling and 2 the embedding, for numbers of rows.
    assert counts.total() <= 61, counts
    # With a norm and an activation; with a residual, for two K; the LM head.
    assert counts["skinny_linear"] == 4, counts


@pytest.mark.parametrize("most", [1, 7, 100, 8192])
def test_prefill_sizes_meet_every_m_that_gemms_are_chosen_by(most: int) -> None:
    """So a kernel that `serving_kernels` does not name is not chosen for another number of tokens."""
    sizes = list(prefill_sizes(most))
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert {tuning.rounded_rows(size) for size in sizes} == {tuning.rounded_rows(m) for m in range(1, most + 1)}


@pytest.mark.parametrize(
    "options",
    [{}, {"partial_rotary_factor": 0.5, "interleaved": True}, {"query_beta": 0.1}],
    ids=["neox", "gptj", "scaled"],
)
def test_one_kernel_normalises_and_rotates_heads(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, as exactly as a norm and a rotary embedding after it, against the same weights in float32."""
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256}
    rope = Rope(original_max_position_embeddings=8, **options)
    config = Config(**sizes, **heads, qk_norm="head", rope=rope, dtype="bfloat16")
    prompt, following = PROMPTS[0], PROMPTS[1]
    model = Decoder(config).randomise(seed=0)
    for layer in model.layers:
        assert isinstance(layer.mixer, Attention)
        for norm in (layer.mixer.q_norm, layer.mixer.k_norm):
            assert norm is not None
            norm.weight.uniform_(0.5, 2.0)
    exact = Decoder(config, "float32")
    for name, tensor in model.tensors().items():
        exact.tensors()[name].copy_(tensor)
    expected, fused = (teacher_forced(Runner(one, 8, 16, 2, 64), prompt, following) for one in (exact, model))
    monkeypatch.setattr(Attention, "_is_fused", lambda *_: False)
    separate = teacher_forced(Runner(model, 8, 16, 2, 64), prompt, following)
    assert not torch.equal(fused, separate), "rounded once instead of twice"
    error, error_separate = ((one - expected).norm() / expected.norm() for one in (fused, separate))
    assert error <= 1.1 * error_separate
    assert error < 0.02


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
def test_tokens_do_not_depend_on_the_batch(limits: dict[str, int], llama: Decoder) -> None:
    """Fewer running than waiting requests, chunked prompts, other block sizes."""
    engine = Engine(llama, max_seq_len=128, **limits)
    assert engine.generate(PROMPTS, SamplingParams(max_tokens=24)) == texts("llama", 24)


def test_preemption_when_blocks_run_out(llama: Decoder) -> None:
    engine = Engine(llama, num_blocks=24, block_size=4, max_seq_len=96, max_num_seqs=4)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    expected = [text("llama", tuple(prompt), 50) for prompt in prompts]
    assert engine.generate(prompts, SamplingParams(max_tokens=50)) == expected
    assert engine.preemptions > 0
    assert sorted(engine._scheduler.free_blocks) == list(range(24)), "every block came back, once"


@pytest.mark.parametrize("running", [1, 2])
@pytest.mark.parametrize("missing", [0, 1])
def test_block_is_reserved_for_each_running_request(running: int, missing: int, llama: Decoder) -> None:
    """With one block fewer, the last request waits, because its prompt would be computed, preempted and computed
    again."""
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


def test_rolling_back_keeps_the_prompt(llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of the remaining tokens are still cached, and blocks of the others are free."""
    engine = Engine(llama, block_size=4, max_seq_len=96, max_num_seqs=2)
    counts: list[int] = []
    forward = llama.forward
    monkeypatch.setattr(
        llama, "forward", lambda batch, *rest: counts.append(len(batch.tokens)) or forward(batch, *rest)
    )
    request = engine.add(PROMPTS[0], SamplingParams(max_tokens=24))
    found = [engine.step()[0].token for _ in range(17)]
    engine.step_back(request, len(PROMPTS[0]) + 5)
    assert len(engine._scheduler.free_blocks) == engine.num_blocks - 7
    found = found[:5] + [output.token for output in engine.run()]
    assert found == text("llama", tuple(PROMPTS[0]), 24)
    assert counts == [len(PROMPTS[0])] + [1] * (16 + 19)
    assert sorted(engine._scheduler.free_blocks) == list(range(engine.num_blocks))


def test_late_requests(llama: Decoder) -> None:
    engine = Engine(llama, max_seq_len=96, max_num_seqs=4)
    found: dict[int, list[int]] = {engine.add(PROMPTS[0], SamplingParams(max_tokens=20)): []}
    for output in engine.run():
        found.setdefault(output.request, []).append(output.token)
        if len(found) == 1 and len(found[0]) == 5:
            engine.add(PROMPTS[2], SamplingParams(max_tokens=8))
    assert list(found.values()) == [text("llama", tuple(PROMPTS[0]), 20), text("llama", tuple(PROMPTS[2]), 8)]
    assert engine.step() == []


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_default_device_changes_nothing(temperature: float, folder: Callable[[str], Path], llama: Decoder) -> None:
    """Tensors in host memory stay there, and the others are on the model's device."""
    params, prompts = SamplingParams(max_tokens=8, temperature=temperature, seed=5), [[1, 2, 3], [4]]
    expected = Engine(llama, max_num_seqs=2).generate(prompts, params)
    assert len(set(expected[0])) > 1
    with torch.device("meta"):
        assert Engine(load(folder("llama")), max_num_seqs=2).generate(prompts, params) == expected
        made = Decoder(llama.config).randomise(3)
    assert all(
        tensor.equal(made.tensors()[name]) for name, tensor in Decoder(llama.config).randomise(3).tensors().items()
    )


def test_generation_ends_at_the_eos_token(llama: Decoder) -> None:
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


def test_impossible_requests_are_refused(llama: Decoder) -> None:
    engine = Engine(llama, num_blocks=3, block_size=4, max_seq_len=20)
    assert len(engine.generate([[1] * 9], SamplingParams(max_tokens=4))[0]) == 4  # 13 tokens, the last is not cached
    for prompt, count, message in (
        ([], 1, "prompt: expected tokens from 0 to 159, got none"),
        ([5, 1.5], 1, r"prompt: expected integers, got \[5, 1\.5\]"),
        ("text", 1, "prompt: expected integers, got 'text'"),
        (7, 1, r"prompt: expected the token ids of each prompt, as \[\[1, 2, 3\]\], got 7"),
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


def test_refused_prompts_add_no_request(llama: Decoder) -> None:
    engine = Engine(llama, max_seq_len=96)
    with pytest.raises(ModelError, match="prompt: expected tokens from 0 to 159, got token 160"):
        engine.generate([PROMPTS[0], [160]])
    assert not engine.busy
    assert engine.generate([PROMPTS[0]]) == [text("llama", tuple(PROMPTS[0]), 16)]
    engine.add(PROMPTS[0])
    with pytest.raises(ModelError, match="what was asked for before has not ended"):
        engine.generate([PROMPTS[0]])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("where", ["model", "choice"])
def test_error_in_a_step_ends_all_requests(
    where: str, ahead: bool, llama: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three running requests and one that waits; later requests are served as by a new engine."""
    engine = Engine(llama, max_seq_len=96, max_num_seqs=3, ahead=ahead)
    for prompt in (*PROMPTS, PROMPTS[0]):
        engine.add(prompt)
    for _ in range(3):
        engine.step()

    def fail(*args: Any) -> None:
        raise RuntimeError("no")

    if where == "model":
        monkeypatch.setattr(engine._runner.model, "forward", fail)
    else:
        monkeypatch.setattr(runner_module, "choose", fail)
    with pytest.raises(RuntimeError, match="no"):
        engine.step()
    monkeypatch.undo()
    assert not engine.busy
    assert engine.step() == []
    assert sorted(engine._scheduler.free_blocks) == list(range(engine.num_blocks))
    assert sorted(engine._scheduler.free_slots) == [0, 1, 2]
    assert engine.generate(PROMPTS, SamplingParams(max_tokens=24)) == texts("llama", 24)


def test_rope_table_is_as_long_as_max_seq_len() -> None:
    """Also for a model of two thousand million positions; if its table does not fit in memory, the engine says so."""
    sizes = {name: value for name, value in SIZES.items() if name in Config.__dataclass_fields__ and value is not None}
    model = Decoder(Config(**sizes | {"head_dim": 16, "max_position_embeddings": 2**31 - 1})).randomise(0)
    assert len(Engine(model, max_seq_len=40).generate([[1, 2]], SamplingParams(max_tokens=5))[0]) == 5
    with pytest.raises(ModelError, match="num_blocks: the memory of cpu has room for 0"):
        Engine(model, max_seq_len=2**31 - 1, max_num_seqs=1)


# Sampling


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        *((1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (2.0, 5, 1.0, 0.0), (1.0, 0, 0.7, 0.0), (1.3, 8, 0.6, 0.0)),
        (2.0, 12, 0.9, 0.3),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Each token's share of the draws of a seed is its float64 probability after the filters. Seeds are modulo 2^64."""
    logits = torch.randn(20, generator=torch.Generator().manual_seed(2)) * 2
    probabilities = (logits.double() / temperature).softmax(-1)
    likeliest = sorted(range(20), key=lambda i: -probabilities[i])[: top_k or 20]
    likeliest = [i for i in likeliest if probabilities[i] >= min_p * probabilities.max()]
    sums = probabilities[likeliest].cumsum(0) / probabilities[likeliest].sum()
    kept = likeliest[: int((sums < top_p).sum()) + 1]
    expected = torch.zeros(20, dtype=torch.float64)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    count = 2000
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=2**64 - 3)
    tokens = chosen(logits.expand(count, -1), [Draw(params, i) for i in range(count)])
    shares = torch.bincount(torch.tensor(tokens), minlength=20) / count
    # Five standard deviations of a share of independent draws.
    assert ((shares - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all()
    assert tokens[5:9] == chosen(logits.expand(4, -1), [Draw(replace(params, seed=2**65 - 3), i) for i in range(5, 9)])


def test_seeded_tokens_do_not_depend_on_the_batch(llama: Decoder) -> None:
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
    """The most likely token, or any of them; also with large logits."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.5]]) * torch.tensor([[1.0], [1e30], [-1e30]])
    params, count = SamplingParams(temperature=temperature, **options), 64
    found = chosen(logits.repeat(count, 1), [Draw(params, i) for i in range(3 * count)])
    of_rows = [set(found[row::3]) for row in range(3)]
    is_greedy = temperature < 1 or "top_p" in options
    assert of_rows == ([{1}, {1}, {3}] if is_greedy else [{0, 1, 2, 3}] * 3)


def test_rows_of_nan_and_infinity() -> None:
    """NaN is never drawn, and infinity always; adjacent rows are drawn as usual."""
    nan, infinite = float("nan"), float("inf")
    logits = torch.tensor(
        [
            [nan, nan, nan, nan],
            [-infinite, nan, 2.0, nan],
            [1.0, 2.0, infinite, 3.0],
            [-infinite, -infinite, -infinite, -infinite],
            [-infinite, 1.0, 1.0, -infinite],
        ]
    )
    greedy, drawn = SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9)
    for number in range(8):
        tokens = chosen(logits, [Draw(drawn, number)] * 5)
        assert tokens[:4] == [0, 2, 2, 0]
        assert tokens[4] in (1, 2)
        assert chosen(logits[2:], [Draw(greedy, number)] * 3) == [2, 0, 1]
        assert chosen(logits[2:], [Draw(greedy, number), Draw(drawn, number), Draw(greedy, number)]) == [2, 0, 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", value) for value in (0, 1.5, "5", None, True, float("inf"))),
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"), 10**400, "1", True)),
        *(("top_k", value) for value in (-1, 2.5, False)),
        *(("top_p", value) for value in (0.0, 1.0000001, float("nan"), None)),
        *(("min_p", value) for value in (-0.1, 1.0000001, float("nan"), None)),
        *(("seed", value) for value in (-1, "x", None, 0.5)),
        *(("ignore_eos", value) for value in (1, None, "no")),
    ],
)
def test_bad_sampling_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"SamplingParams: {name}: expected .*, got {re.escape(repr(value))}"):
        SamplingParams(**{name: value})


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
    """At most twice as far from float32, with the same weights, as transformers' model in bfloat16."""
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
def test_graphs_do_not_change_tokens(folder: Callable[[str], Path]) -> None:
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
