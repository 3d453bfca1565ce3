"""Mamba, Mamba-2 and Bamba against transformers: the same float32 weights generate the same tokens; states; folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
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
from pyops.host.toolchain import toolchains
from pyops.models import Config, Decoder, Engine, SamplingParams, StateSpace, load
from pyops.models.parts import BOTH
from pyops.models.runner import Part, Runner
from tests.support.small_models import folders
from tests.support.transformers_mamba import random_model

transformers.utils.logging.disable_progress_bar()

NEEDS_COMPILER = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
ATTENTION = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
ATTENTION |= {"max_position_embeddings": 256, "num_hidden_layers": 3, "attn_layer_indices": [1]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {"hidden_size": 32, "state_size": 8, "time_step_rank": 4}),
    "mamba with biases, untied": (
        "Mamba",
        {"hidden_size": 24, "state_size": 5, "conv_kernel": 2, "use_bias": True, "tie_word_embeddings": False},
    ),
    "mamba without biases": (
        "Mamba",
        {"hidden_size": 16, "state_size": 16, "conv_kernel": 3, "use_conv_bias": False, "num_hidden_layers": 3},
    ),
    "mamba2": (
        "Mamba2",
        {"hidden_size": 32, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    ),
    "mamba2 with biases and groups": (
        "Mamba2",
        {"hidden_size": 24, "state_size": 5, "num_heads": 12, "head_dim": 4, "n_groups": 3, "use_bias": True},
    ),
    "mamba2 without biases, tied": (
        "Mamba2",
        {
            "hidden_size": 16,
            "state_size": 16,
            "num_heads": 2,
            "head_dim": 16,
            "n_groups": 2,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": (
        "Bamba",
        {"hidden_size": 32, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_chunk_size": 16} | ATTENTION,
    ),
    "bamba with biases, groups and yarn": (
        "Bamba",
        {
            "hidden_size": 32,
            "mamba_d_state": 5,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": YARN | {"partial_rotary_factor": 0.25},
            **ATTENTION,
            "attn_layer_indices": [0, 2],
        },
    ),
    "bamba without biases, tied": (
        "Bamba",
        {
            "hidden_size": 16,
            "mamba_d_state": 16,
            "mamba_n_heads": 2,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
            **ATTENTION,
            "num_key_value_heads": 4,
            "num_hidden_layers": 2,
        },
    ),
}
FAMILIES = ("mamba", "mamba2", "bamba")
PROMPTS = [list(range(5, 25)), [3], [(7 * i) % 96 for i in range(40)]]


@cache
def reference(case: str) -> Any:
    return random_model(*CASES[case])


@cache
def texts(case: str) -> list[list[int]]:
    """Tokens that transformers' model generates greedily after each prompt by itself: 64 each."""
    found = []
    for prompt in PROMPTS:
        written = reference(case).generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)
        found.append(written[0, len(prompt) :].tolist())
    assert len({token for text in found for token in text}) > 8
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return folders(tmp_path_factory, reference)


def soiled(engine: Engine) -> Engine:
    """The engine with a cache full of NaN, as if other sequences had left it."""
    for kept in engine._runner.cache:
        for tensor in kept:
            tensor.fill_(float("nan"))
    return engine


# Tokens


@pytest.mark.parametrize("case", CASES)
def test_tokens_match_transformers(case: str, folder: Callable[[str], Path]) -> None:
    """Prompts in chunks of at most 9 tokens, together with decode tokens of other sequences; the last one waits for a
    slot."""
    engine = soiled(Engine(load(folder(case)), max_seq_len=104, max_num_seqs=2, max_num_batched_tokens=9))
    assert engine.generate(PROMPTS, SamplingParams(max_tokens=64)) == texts(case)
    assert sorted(engine._scheduler.free_slots) == [0, 1], "every slot came back, once"


@pytest.mark.parametrize("case", CASES)
def test_sequences_roll_back(case: str, folder: Callable[[str], Path]) -> None:
    """To tokens in the middle and to the end of a prompt, while they run and while they wait."""
    engine = soiled(Engine(load(folder(case)), max_seq_len=104, max_num_seqs=2, max_num_batched_tokens=9))
    whole = [prompt + text for prompt, text in zip(PROMPTS, texts(case), strict=True)]
    requests = {engine.add(prompt, SamplingParams(max_tokens=24)): list(prompt) for prompt in PROMPTS}
    back = {(0, 20 + 13): 20 + 5, (1, 1 + 20): 1 + 20, (1, 1 + 9): 1, (2, 40 + 23): 40 + 7}
    engine.step_back(2, 40)  # it waits, so nothing changes
    while engine.busy:
        for request, token, *_ in engine.step():
            requests[request].append(token)
            if num_tokens := back.pop((request, len(requests[request])), 0):
                engine.step_back(request, num_tokens)
                del requests[request][num_tokens:]
    assert not back
    for text, expected, prompt in zip(requests.values(), whole, PROMPTS, strict=True):
        assert text == expected[: len(prompt) + 24]


@pytest.mark.parametrize("case", ["bamba", "bamba with biases, groups and yarn"])
def test_preemption_when_blocks_run_out(case: str, folder: Callable[[str], Path]) -> None:
    engine = soiled(Engine(load(folder(case)), num_blocks=22, block_size=4, max_seq_len=104, max_num_seqs=3))
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    expected = [texts(case)[i][:40] for i in (0, 1, 0)]
    assert engine.generate(prompts, SamplingParams(max_tokens=40)) == expected
    assert engine.preemptions > 0
    assert sorted(engine._scheduler.free_blocks) == list(range(22)), "every block came back, once"
    assert sorted(engine._scheduler.free_slots) == [0, 1, 2], "every slot came back, once"


# States


def parts(runner: Runner, *given: tuple[Sequence[int], int, list[int], int]) -> list[Part]:
    """Parts of (tokens, start, blocks, slot); a model without attention has no blocks."""
    has_blocks = runner.model.config.has_attention
    return [Part(tokens, start, blocks if has_blocks else [], slot) for tokens, start, blocks, slot in given]


def logits_behind(runner: Runner, prompt: list[int], following: list[int]) -> torch.Tensor:
    """Logits after a prompt in two chunks, and after each following token by decode steps."""
    pieces = [prompt[:17], prompt[17:], *([token] for token in following)]
    starts = [0, 17, *range(len(prompt), len(prompt) + len(following))]
    each = zip(pieces, starts, strict=True)
    found = [runner.run(parts(runner, (piece, start, [3, 1, 4, 5], 1))).clone() for piece, start in each]
    return torch.cat(found[1:])


@pytest.mark.parametrize("case", FAMILIES)
def test_slot_does_not_leak_the_previous_state(case: str, folder: Callable[[str], Path]) -> None:
    """One slot for consecutive sequences; one of them begins with a single token."""
    engine = Engine(load(folder(case)), max_seq_len=104, max_num_seqs=1)
    for kept in engine._runner.cache:
        for tensor in kept:
            tensor.zero_()
    for i in (0, 1, 2, 1):
        assert engine.generate([PROMPTS[i]], SamplingParams(max_tokens=8)) == [texts(case)[i][:8]]


@pytest.mark.parametrize("case", FAMILIES)
def test_batch_of_decode_steps_and_prompts(case: str, folder: Callable[[str], Path]) -> None:
    """Decode steps of two sequences, the first chunk of a prompt, a middle chunk and a one-token prompt: each as if
    alone."""
    runner = Runner(load(folder(case)), 25, 4, 5, 32)
    tokens = [(11 * i) % 96 for i in range(20)]
    counts = [(9, 1), (1, 1), (0, 6), (3, 5), (0, 1)]
    blocks = [list(range(5 * i, 5 * i + 5)) for i in range(5)]
    pasts = parts(runner, *((tokens[:start], 0, blocks[i], i) for i, (start, _) in enumerate(counts) if start))
    news = parts(runner, *((tokens[n:][:count], n, blocks[i], i) for i, (n, count) in enumerate(counts)))

    def begin() -> None:
        for kept in runner.cache:
            for tensor in kept:
                tensor.fill_(float("nan"))
        runner.run(pasts)

    begin()
    together = runner.run(news)
    begin()
    alone = torch.cat([runner.run([new]).clone() for new in news])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert torch.equal(together.argmax(-1), alone.argmax(-1))


@pytest.mark.parametrize("case", FAMILIES)
def test_padded_rows_touch_no_states(case: str, folder: Callable[[str], Path]) -> None:
    """Three sequences, padded to four."""
    runner = Runner(load(folder(case)), 8, 4, 4, 16)
    prompts, blocks, slots = [[1, 2, 3, 4, 5], [6, 7], [8]], [[6, 1], [3], [5]], [3, 0, 1]
    runner.run(parts(runner, *zip(prompts, [0, 0, 0], blocks, slots, strict=True)))
    states = [tensor for kept in runner.cache for tensor in kept if len(tensor) == 4]
    assert states
    before = [tensor.clone() for tensor in states]
    runner.run(parts(runner, *zip([[9], [10], [11]], [5, 2, 1], blocks, slots, strict=True)))
    for old, new in zip(before, states, strict=True):
        assert testing.same_bits(old[2], new[2])
        assert all(not torch.equal(old[slot], new[slot]) for slot in slots)
    before, rows = [tensor.clone() for tensor in states], runner._rows.clone()
    runner._load_kernels(4, None)  # the warm-up before a capture must compute no step
    assert torch.equal(runner._rows, rows)
    assert all(testing.same_bits(old, new) for old, new in zip(before, states, strict=True))


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_are_as_exact_as_those_of_transformers(case: str, folder: Callable[[str], Path]) -> None:
    """In chunked prefill and decode, against the same model in float64 with its scans in float32."""
    prompt, following = PROMPTS[2], texts(case)[2][:20]
    found = logits_behind(Runner(load(folder(case)), 8, 16, 2, 64), prompt, following)
    tokens = torch.tensor([prompt + following])
    with torch.no_grad():
        theirs = reference(case)(tokens).logits[0, 39:]
        exact = deepcopy(reference(case)).double()(tokens).logits[0, 39:]
    assert (found - exact).abs().max() <= 4 * (theirs - exact).abs().max()


@pytest.mark.parametrize("case", FAMILIES)
def test_bfloat16_is_as_exact_as_transformers(case: str, folder: Callable[[str], Path]) -> None:
    """Logits of a prompt and of decode steps are at most twice as far from float32."""
    prompt, following = PROMPTS[2], texts(case)[2][:20]
    theirs = type(reference(case)).from_pretrained(folder(case), dtype=torch.bfloat16)
    found = logits_behind(Runner(load(folder(case), dtype="bfloat16"), 8, 16, 2, 64), prompt, following)
    tokens = torch.tensor([prompt + following])
    with torch.no_grad():
        exact, rounded = (model(tokens).logits[0, 39:].float() for model in (reference(case), theirs))
    assert (found.float() - exact).norm() <= 2 * (rounded - exact).norm()


def test_impossible_rollbacks_are_refused(folder: Callable[[str], Path]) -> None:
    engine = Engine(load(folder("mamba")), max_seq_len=64)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=4))
    engine.step()
    for number, num_tokens, message in (
        (request, 2, "num_tokens: expected 3 to 4, got 2"),
        (request, 5, "num_tokens: expected 3 to 4, got 5"),
        (request, 3.0, r"num_tokens: expected 3 to 4, got 3\.0"),
        (request + 1, 3, "request: expected one that has not ended, got 1"),
    ):
        with pytest.raises(ModelError, match=f"Engine.step_back: {message}"):
            engine.step_back(number, num_tokens)
    assert len(list(engine.run())) == 3
    with pytest.raises(ModelError, match="request: expected one that has not ended, got 0"):
        engine.step_back(request, 3)


def test_memory_of_states(folder: Callable[[str], Path]) -> None:
    """Per slot; longer sequences need no more, unless a layer is attention."""
    mamba, bamba = load(folder("mamba")), load(folder("bamba"))
    assert (mamba.token_bytes(), mamba.slot_bytes) == (0, 2 * 4 * 64 * (3 + 8))
    assert (bamba.token_bytes(), bamba.slot_bytes) == (2 * 4 * 2 * 8, 2 * 4 * (3 * (64 + 2 * 8) + 64 * 8))
    long = Engine(mamba, max_seq_len=2**31 - 1, max_num_seqs=2)
    assert len(long.generate([[1, 2]], SamplingParams(max_tokens=3))[0]) == 3
    for model in (mamba, bamba):
        with pytest.raises(ModelError, match="num_blocks: the memory of cpu has room for 0, with what max_num_seqs"):
            Engine(model, max_num_seqs=10**12)


# Kernels

TINY = {"vocab_size": 32, "hidden_size": 16, "max_position_embeddings": 64}
TINY_MAMBA = StateSpace("mamba", 32, state_size=4, conv_kernel=3, time_step_rank=2)
TINY_MAMBA2 = StateSpace("mamba2", 32, state_size=8, conv_kernel=4, num_heads=4, head_dim=8, n_groups=2)
TINY_DELTA_RULE = StateSpace("delta_rule", 32, state_size=8, conv_kernel=4, num_heads=4, head_dim=8, n_groups=2)
TINY_ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
NO_ATTENTION = dict.fromkeys(TINY_ATTENTION, 0)
TINIES = {
    "mamba": Config(
        **TINY, **NO_ATTENTION, intermediate_size=0, num_hidden_layers=1, layer_types=("mamba",), state_space=TINY_MAMBA
    ),
    "mamba2 and attention": Config(
        **TINY,
        **TINY_ATTENTION,
        intermediate_size=24,
        num_hidden_layers=2,
        layer_types=("mamba2", "attention"),
        state_space=TINY_MAMBA2,
    ),
    "delta rule and gated attention": Config(
        **TINY,
        **TINY_ATTENTION,
        intermediate_size=24,
        num_hidden_layers=2,
        layer_types=("delta_rule", "attention"),
        state_space=TINY_DELTA_RULE,
        gates_attention=True,
    ),
    "mamba2 beside attention": Config(
        **TINY,
        **TINY_ATTENTION,
        intermediate_size=24,
        num_hidden_layers=1,
        layer_types=(BOTH,),
        state_space=TINY_MAMBA2,
    ),
}


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", TINIES)
def test_kernels_generate_the_same_tokens(kind: str) -> None:
    """On the host backend, which checks every access."""
    model = Decoder(TINIES[kind]).randomise(3, scale=2.0)
    prompts, params = [[1, 2, 3, 4, 5, 6], [7], [9, 10, 11]], SamplingParams(max_tokens=4)
    limits = {"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 5}
    expected = Engine(model, **limits).generate(prompts, params)
    with testing.cpu("kernels"):
        assert soiled(Engine(model, **limits)).generate(prompts, params) == expected


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("kind", TINIES)
def test_warmed_up_model_compiles_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of any lengths with decode batches of any size; on the host."""
    limits = {"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    prompts = [[1 + i] * (1 + 7 * i % 23) for i in range(8)]
    model = Decoder(TINIES[kind]).randomise(3, scale=2.0)
    with testing.cpu("kernels"):
        assert pyops.warmup(model=TINIES[kind], max_model_len=64, **limits)
        monkeypatch.setenv("PYOPS_JIT", "error")
        Engine(model, max_seq_len=64, **limits).generate(prompts, SamplingParams(max_tokens=6))


# Folders


def config_of(case: str, **changes: Any) -> Config:
    model = reference(case)
    values = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    return Config.parse(values | changes)


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "an activation": ("mamba", {"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
    "a wide convolution": ("mamba", {"conv_kernel": 9}, "conv_kernel: expected 2 to 8 taps, got 9"),
    "many states": ("mamba2", {"state_size": 257}, "state_size: expected at most 256 states, got 257"),
    "no states": ("mamba", {"state_size": None}, "state_size: expected a positive integer .*, got None"),
    "a rank": ("mamba", {"time_step_rank": "big"}, "time_step_rank: expected a positive integer .*, got 'big'"),
    "an epsilon": ("mamba", {"layer_norm_epsilon": "1"}, "layer_norm_epsilon: expected a positive number .*, got '1'"),
    "an expansion": ("mamba", {"expand": 1e9}, r"expand \* hidden_size: expected a positive integer up to .*, got 32"),
    "heads": ("mamba2", {"num_heads": 7}, r"expand \* hidden_size: expected num_heads \* head_dim = 56 chan.*, got 64"),
    "groups": ("mamba2", {"n_groups": 3}, "n_groups: expected a divisor of num_heads=8, got 3"),
    "a limit": ("mamba2", {"time_step_limit": [0.0, 5.0]}, r"time_step_limit: expected .*, got \[0\.0, 5\.0\]"),
    "a limit of bamba": (
        "bamba",
        {"time_step_limit": [0.1, None]},
        r"time_step_limit: expected .*, got \[0\.1, None\]",
    ),
    "no limit at all": ("mamba2", {"time_step_limit": 3}, "time_step_limit: expected .*, got 3"),
    "a bias": ("mamba", {"use_bias": 1}, "use_bias: expected true or false, got 1"),
    "layers": ("bamba", {"attn_layer_indices": [3]}, r"attn_layer_indices: expected layers from 0 to 2, got \[3\]"),
    "a layer": ("bamba", {"attn_layer_indices": 1}, "attn_layer_indices: expected layers from 0 to 2, got 1"),
    "part of a head": (
        "bamba",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.1}},
        r"partial_rotary_factor: expected an even number of 8 elements, got 0\.1",
    ),
    "more than a head": (
        "bamba",
        {"rope_parameters": {"partial_rotary_factor": 2}},
        r"partial_rotary_factor: expected at most 1, got 2\.0",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_config_is_refused(what: str) -> None:
    case, changes, message = BAD[what]
    with pytest.raises(ModelError, match=message):
        config_of(case, **changes)


def test_layers_without_sizes_are_refused() -> None:
    sizes = {name: value for name, value in vars(TINIES["mamba"]).items() if name != "state_space"}
    with pytest.raises(ModelError, match="layer_types: expected 1 of attention, got"):
        Config(**sizes)
    with pytest.raises(
        ModelError, match="layer_types: expected 1 of attention or mamba2 or attention and states or mlp, got"
    ):
        Config(**sizes, state_space=TINY_MAMBA2)
    with pytest.raises(ModelError, match="kind: expected mamba or mamba2 or delta_rule or kda, got 'mamba3'"):
        StateSpace("mamba3", 32, 4, 3)


def test_old_spellings_and_defaults() -> None:
    """As in the folders of mamba-130m-hf, Mamba-Codestral-7B and Bamba-9B."""
    sizes = {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24, "torch_dtype": "float32"}
    old = {"d_inner": 1536, "d_model": 768, "fused_add_norm": True, "intermediate_size": 1536, "n_layer": 24}
    mamba = Config.parse({"architectures": ["MambaForCausalLM"], "time_step_rank": 48, "eos_token_id": 0} | sizes | old)
    assert mamba.state_space == StateSpace("mamba", 1536, 16, 4, time_step_rank=48)
    assert mamba == Config.parse({"architectures": ["MambaForCausalLM"], "eos_token_id": 0} | sizes)
    assert (mamba.tie_word_embeddings, mamba.rms_norm_eps, mamba.residual_in_float32) == (True, 1e-5, True)
    sizes = {"vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "torch_dtype": "bfloat16"}
    limit = {"time_step_limit": [0.0, float("inf")]}
    mamba2 = Config.parse({"architectures": ["Mamba2ForCausalLM"]} | sizes | limit)
    assert mamba2.state_space == StateSpace("mamba2", 8192, 128, 4, num_heads=128, head_dim=64, n_groups=8)
    assert not mamba2.tie_word_embeddings
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}
    heads = {"num_attention_heads": 32, "num_key_value_heads": None, "max_position_embeddings": 262144}
    bamba = Config.parse(
        {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [9, 18, 27], "rope_theta": 5e5}
        | {"mamba_d_head": "auto", "mamba_d_state": 128, "rope_scaling": None, "partial_rotary_factor": 1.0}
        | sizes
        | heads
    )
    assert bamba.state_space == StateSpace("mamba2", 8192, 128, 4, num_heads=128, head_dim=64, n_groups=1)
    assert [i for i, kind in enumerate(bamba.layer_types) if kind == "attention"] == [9, 18, 27]
    assert (bamba.num_key_value_heads, bamba.rope.theta, bamba.rope.rotary_dim(128)) == (32, 5e5, 64)


def test_missing_decay_is_named(folder: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = safetensors.torch.load_file(folder("mamba") / "model.safetensors")
    del tensors["backbone.layers.1.mixer.A_log"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(folder("mamba") / "config.json", tmp_path)
    with pytest.raises(ModelError, match=r"backbone\.layers\.1\.mixer\.A_log: is in no shard$"):
        load(tmp_path)


@pytest.mark.parametrize("case", FAMILIES)
def test_generate_prints_text(
    case: str, folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder(case), tmp_path / "words")
    vocabulary = {f"w{i}": i for i in range(96)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words" / "tokenizer.json"))
    prompts = [" ".join(f"w{token}" for token in prompt) for prompt in PROMPTS[:2]]
    options = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert (
        main(["generate", "--model", str(tmp_path / "words"), "--max-tokens", "12", "--device", "cpu", *options]) == 0
    )
    expected = [
        " ".join([prompt, *(f"w{token}" for token in text[:12])])
        for prompt, text in zip(prompts, texts(case), strict=False)
    ]
    assert capsys.readouterr().out.splitlines() == expected


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_tokens_match_transformers_on_device(case: str, folder: Callable[[str], Path]) -> None:
    """In float32, with decode steps under graphs and without."""
    model = load(folder(case), "cuda")
    for graphs in (True, False):
        limits = {"max_seq_len": 104, "max_num_seqs": 3, "max_num_batched_tokens": 9}
        engine = soiled(Engine(model, graphs=graphs, **limits))
        assert engine.generate(PROMPTS, SamplingParams(max_tokens=64)) == texts(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", FAMILIES)
def test_bfloat16_under_a_graph(case: str, folder: Callable[[str], Path]) -> None:
    """Logits are at most twice as far from float32 as those of transformers' model in bfloat16."""
    prompt, following = PROMPTS[2], texts(case)[2][:20]
    theirs = type(reference(case)).from_pretrained(folder(case), dtype=torch.bfloat16)
    found = logits_behind(Runner(load(folder(case), "cuda", "bfloat16"), 8, 16, 2, 64), prompt, following)
    tokens = torch.tensor([prompt + following])
    with torch.no_grad():
        exact, rounded = (model(tokens).logits[0, 39:].float() for model in (reference(case), theirs))
    assert (found.float().cpu() - exact).norm() <= 2 * (rounded - exact).norm()
