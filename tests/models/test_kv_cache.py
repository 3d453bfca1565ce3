"""fp8 KV caches of models, against transformers' models with keys and values rounded to fp8."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor
from transformers.masking_utils import eager_mask

import pyops
from pyops import ModelError, testing
from pyops.host.toolchain import toolchains
from pyops.models import (
    Config,
    Decoder,
    Engine,
    ParallelDecoder,
    SamplingParams,
    calibrate_kv_scales,
    load,
    write_kv_scales,
)
from pyops.models import engine as engine_module
from pyops.models.kv_cache import cache_dtype
from tests.models import test_hybrid as test_models_hybrid
from tests.models import test_parallel as test_models_parallel
from tests.support import small_models
from tests.support.small_models import PROMPTS, folders

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
COUNT = 16  # tokens that are generated
TINY: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16}
HYBRID_PROMPTS = [list(range(5, 25)), [(7 * i) % 96 for i in range(40)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return folders(tmp_path_factory, model_of)


def model_of(case: str) -> Any:
    return (small_models if case in small_models.CASES else test_models_hybrid).reference(case)


# The truth


def rounded(x: Tensor, scale: Tensor, codes: torch.dtype = E4M3) -> Tensor:
    """`x` rounded to fp8 under `scale`."""
    largest = torch.finfo(codes).max
    return (x / scale).clamp(-largest, largest).to(codes).float() * scale


@contextmanager
def rounding(model: Any, scales: dict[str, Tensor], codes: torch.dtype) -> Iterator[Any]:
    """A copy of transformers' model with plain attention, in which keys and values are rounded to fp8.

    For MLA the latent KV is rounded, and keys and values are projected from it.
    """
    model = copy.deepcopy(model)
    by_layer = {int(name.split(".")[2]): {} for name in scales}
    for name, scale in scales.items():
        by_layer[int(name.split(".")[2])][name.rpartition(".")[2]] = scale

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        own = by_layer[module.layer_idx]
        if hasattr(module, "kv_lora_rank"):
            plain, turned = key.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
            key = torch.cat((plain, rounded(turned, own["k_scale"], codes)), -1)
        else:
            key, value = (
                rounded(x, own[kind].view(-1, 1, 1), codes) for x, kind in ((key, "k_scale"), (value, "v_scale"))
            )
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        logits = query @ key.transpose(2, 3) * scaling
        past = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        logits = logits.masked_fill(~past, -torch.inf) if mask is None else logits + mask
        return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("rounded", attend)
    transformers.AttentionMaskInterface.register("rounded", eager_mask)
    for i, layer in enumerate(model.model.layers):
        attention = getattr(layer, "self_attn", None)
        if hasattr(attention, "kv_a_layernorm"):
            scale = by_layer[i]["k_scale"]
            attention.kv_a_layernorm.register_forward_hook(lambda *args, scale=scale: rounded(args[2], scale, codes))
    model.set_attn_implementation("rounded")
    with torch.no_grad():
        yield model


def likeliest(model: Any, prompt: list[int], text: list[int]) -> list[int]:
    """The most likely tokens after the prompt and each generated token: the generated tokens themselves, if these are
    greedy."""
    tokens: list[int] = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    return tokens


def check_texts(
    case: str, ours: Decoder, scales: dict[str, Tensor], kv_cache_dtype: str = "fp8", **options: Any
) -> None:
    prompts = PROMPTS if case in small_models.CASES else HYBRID_PROMPTS
    engine = Engine(ours, max_seq_len=120, max_num_seqs=2, kv_cache_dtype=kv_cache_dtype, **options)
    texts = engine.generate(prompts, SamplingParams(max_tokens=COUNT))
    with rounding(model_of(case), scales, E5M2 if kv_cache_dtype == "fp8_e5m2" else E4M3) as theirs:
        assert texts == [likeliest(theirs, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        plain = [likeliest(model_of(case), prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    assert texts != plain, "codes change no token"


# Tokens


@pytest.mark.parametrize(
    ("case", "per_head"),
    [
        ("llama", False),
        ("llama with one key head, llama3 rope, biases", True),
        ("mistral with a window", True),
        ("qwen3", True),
        ("deepseek v3", False),
        ("deepseek v2 with entries of the op", False),
        ("falcon-h1", True),
        ("nemotron-h", False),
        ("kimi-linear", False),
    ],
)
def test_tokens_match_rounded_keys_and_values(case: str, per_head: bool, folder: Callable[[str], Path]) -> None:
    """Chunked prompts together with decode tokens of other sequences."""
    ours = load(folder(case))
    found = calibrate_kv_scales(ours, PROMPTS[:1], per_head=per_head)
    heads = 1 if ours.config.latent else ours.config.num_key_value_heads
    assert {tuple(scale.shape) for scale in found.values()} == {(heads if per_head else 1,)}
    # Small scales clip two thirds of the range, so that tokens show whether scales count.
    scales = {name: scale * (0.3 + 0.1 * i) for i, (name, scale) in enumerate(found.items())}
    write_kv_scales(ours, scales)
    check_texts(case, ours, scales, max_num_batched_tokens=19)


def test_e5m2_cache(folder: Callable[[str], Path]) -> None:
    """Under the scales of an e4m3 cache; e5m2 has the larger range."""
    ours = load(folder("qwen3"))
    check_texts("qwen3", ours, calibrate_kv_scales(ours, PROMPTS[:1]), "fp8_e5m2")


def test_default_scales_are_1(folder: Callable[[str], Path]) -> None:
    ours = load(folder("qwen3"))
    names = [f"model.layers.{i}.self_attn.{kind}_scale" for i in range(2) for kind in "kv"]
    check_texts("qwen3", ours, dict.fromkeys(names, torch.ones(1)))


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_kernels_generate_the_same_tokens(kv_cache_dtype: str) -> None:
    """On the host backend, which checks every access."""
    model = Decoder(Config(**TINY)).randomise(3, scale=2.0)
    scales = {"model.layers.0.self_attn.k_scale": torch.tensor([0.01, 0.02]), "model.layers.0.self_attn.v_scale": 0.02}
    write_kv_scales(model, scales)
    prompts, params = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11]], SamplingParams(max_tokens=4)
    limits = {"block_size": 4, "max_num_seqs": 4, "kv_cache_dtype": kv_cache_dtype}
    expected = Engine(model, **limits).generate(prompts, params)
    with testing.cpu("kernels"):
        assert Engine(model, **limits).generate(prompts, params) == expected


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.slow
def test_warmed_up_model_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8, "kv_cache_dtype": "fp8"}
    with testing.cpu("kernels"):
        assert pyops.warmup(model=Config(**TINY), max_model_len=16, **limits)
        monkeypatch.setenv("PYOPS_JIT", "error")
        engine = Engine(Decoder(Config(**TINY)).randomise(3), max_seq_len=16, **limits)
        engine.generate([[1] * 9, [2, 3], [4]], SamplingParams(max_tokens=6))


# Calibration


def observed(case: str) -> dict[str, Tensor]:
    """{name: absmax per head [num_heads]} over the prompts, from transformers' own cache."""
    found: dict[str, Tensor] = {}
    for prompt in PROMPTS:
        with torch.no_grad():
            cache = model_of(case)(torch.tensor([prompt]), use_cache=True).past_key_values
        for i, layer in enumerate(cache.layers):
            for kind, kept in (("k", layer.keys), ("v", layer.values)):
                name = f"model.layers.{i}.self_attn.{kind}_scale"
                found[name] = torch.maximum(found.get(name, torch.zeros(1)), kept.abs().amax((0, 2, 3)))
    return found


@pytest.mark.parametrize("per_head", [False, True])
def test_calibrated_scales_are_absmax_over_448(per_head: bool, folder: Callable[[str], Path]) -> None:
    """The config asks for an fp8 cache, which calibration does not use."""
    model = load(folder("qwen3"))
    model.config = replace(model.config, kv_cache_dtype="fp8_e4m3")
    found, largest = calibrate_kv_scales(model, PROMPTS, per_head=per_head), observed("qwen3")
    assert found.keys() == largest.keys()
    for name, scale in found.items():
        expected = (largest[name] if per_head else largest[name].amax(0, keepdim=True)) / 448
        torch.testing.assert_close(scale, expected, rtol=1e-5, atol=0.0)
    written = [layer.mixer.scales for layer in model.layers]
    for i, scales in enumerate(written):
        assert torch.equal(scales.keys, found[f"model.layers.{i}.self_attn.k_scale"].expand(2))
        assert torch.equal(scales.values, found[f"model.layers.{i}.self_attn.v_scale"].expand(2))


def test_calibration_of_zeros_and_nan() -> None:
    model = Decoder(Config(**TINY)).randomise(3)
    values = model.tensors()["model.layers.0.self_attn.v_proj.weight"]
    values.zero_()
    assert calibrate_kv_scales(model, [[1, 2]])["model.layers.0.self_attn.v_scale"].tolist() == [1.0]
    values.fill_(float("nan"))
    with pytest.raises(ModelError, match=r"v_scale: expected a positive finite number, got nan"):
        calibrate_kv_scales(model, [[1, 2]])
    with pytest.raises(ModelError, match="calibrate_kv_scales: prompts: expected one or more, got none"):
        calibrate_kv_scales(model, [])


# Files


def saved(source: Path, target: Path, scales: dict[str, Tensor], **config: Any) -> Path:
    """A copy of a folder with additional tensors and fields of config.json."""
    target.mkdir()
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    safetensors.torch.save_file(tensors | scales, target / "model.safetensors")
    said = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(said | config), encoding="utf-8")
    return target


_FACTS = Path(__file__).parents[1] / "support" / "model_fields.json"
CACHES = json.loads(_FACTS.read_text(encoding="utf-8"))["cache_alone"]
COMPRESSED: dict[str, Any] = CACHES["llm-compressor"]
SCHEME: dict[str, Any] = COMPRESSED["kv_cache_scheme"]
# {writer: its names of scales in a layer}
NAMES = {
    "llm-compressor": ("self_attn.k_scale", "self_attn.v_scale"),
    "early llm-compressor": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "ModelOpt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "vLLM": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "joined projections": ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
    "caches": ("self_attn.k_cache.scale", "self_attn.v_cache.scale"),
}


def dtype_of(model: Decoder) -> torch.dtype:
    return cache_dtype(model.config, model.dtype, "auto")


def scales_of(model: Decoder) -> list[list[float]]:
    return [[*layer.mixer.scales.keys.tolist(), *layer.mixer.scales.values.tolist()] for layer in model.layers]


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES.keys())
def test_names_of_scales(names: tuple[str, str], folder: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = {
        f"model.layers.{i}.{name}": torch.tensor(0.5 + i + j / 4) for i in range(2) for j, name in enumerate(names)
    }
    model = load(saved(folder("qwen3"), tmp_path / "model", tensors))
    assert scales_of(model) == [[0.5, 0.5, 0.75, 0.75], [1.5, 1.5, 1.75, 1.75]]
    assert dtype_of(model) == torch.float32, "scales alone ask for no fp8 cache"


def test_one_scale_for_keys_and_values(folder: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor([0.5 + i]) for i in range(2)}
    assert scales_of(load(saved(folder("qwen3"), tmp_path / "model", tensors))) == [[0.5] * 4, [1.5] * 4]


@pytest.mark.parametrize("said", CACHES.values(), ids=CACHES.keys())
def test_folder_that_asks_for_an_fp8_cache(said: dict[str, Any], folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Per-head scales in bfloat16; scales of queries and zero points are ignored."""
    found = {name: (0.7 * largest / 448).bfloat16() for name, largest in observed("qwen3").items()}
    tensors = {name: scale.view(-1, 1, 1) for name, scale in found.items()}
    tensors |= {f"model.layers.{i}.self_attn.q_scale": torch.ones(1) for i in range(2)}
    tensors |= {f"model.layers.{i}.self_attn.k_zero_point": torch.zeros(2, 1, 1).to(E4M3) for i in range(2)}
    model = load(saved(folder("qwen3"), tmp_path / "model", tensors, quantization_config=said))
    assert (model.config.quantization, dtype_of(model)) == (None, E4M3)
    check_texts("qwen3", model, {name: scale.float() for name, scale in found.items()}, "auto")


def test_early_model_opt_file(folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = saved(folder("qwen3"), tmp_path / "model", {})
    for algorithm, expected in (("FP8", E4M3), (None, torch.float32)):
        said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": algorithm}}
        (path / "hf_quant_config.json").write_text(json.dumps(said), encoding="utf-8")
        assert dtype_of(load(path)) == expected


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"},
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}
            },
            "kv_cache_scheme": SCHEME | {"strategy": "attn_head", "group_size": None},
        },
    ],
    ids=["AutoFP8", "pack-quantized"],
)
def test_quantised_weights_with_an_fp8_cache(said: dict[str, Any]) -> None:
    llama = {"architectures": ["LlamaForCausalLM"]} | {name: TINY[name] for name in TINY if name != "head_dim"}
    config = Config.parse(llama | {"quantization_config": said})
    assert config.kv_cache_dtype == "fp8_e4m3"
    assert config.quantization is not None


# Memory


@pytest.mark.parametrize("case", ["qwen3", "deepseek v3", "falcon-h1"])
def test_fp8_cache_has_twice_as_many_blocks(
    case: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice those of a bfloat16 cache, in the memory that tables, rows and states leave."""
    model = load(folder(case), dtype="bfloat16")
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: 1 << 20)
    sixteen, eight = (
        Engine(model, max_num_seqs=64, max_seq_len=256, block_size=4, kv_cache_dtype=kind)
        for kind in ("bfloat16", "fp8")
    )
    assert eight.num_blocks < 64 * 64, "memory is the limit"
    assert 2 * sixteen.num_blocks <= eight.num_blocks <= 2 * sixteen.num_blocks + 2
    for mine, theirs in zip(eight._runner.cache, sixteen._runner.cache, strict=True):
        kept = [(a, b) for a, b in zip(mine, theirs, strict=True) if a.dtype == E4M3]
        assert kept, "attention keeps codes"
        assert all(a.nbytes / eight.num_blocks * 2 == b.nbytes / sixteen.num_blocks for a, b in kept)


# Refusals

K, V = "model.layers.0.self_attn.k_scale", "model.layers.1.self_attn.v_scale"


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        *((K, torch.tensor([value]), rf"{K}: expected a positive finite number, got {value}") for value in (0.0, -0.5)),
        *(
            (V, torch.tensor(float(value)), f"{V}: expected a positive finite number, got {value}")
            for value in ("nan", "inf")
        ),
        (V, torch.tensor([1.0, -1.0]), f"{V}: expected a positive finite number, got -1.0"),
        (K, torch.ones(4), rf"{K}: expected at most 2 elements, got shape \(4,\)"),
        (K, torch.ones(0), rf"{K}: expected 1 element or 2, got 0"),
        (K, torch.ones(1, dtype=torch.int8), f"{K}: expected BF16 or F16 or F32, got I8"),
        (K, None, f"{K}: is missing, and other scales of the cache are there"),
        ("model.layers.7.self_attn.k_scale", torch.ones(1), "model.layers.7.self_attn.k_scale: is no scale of a cache"),
        ("model.layers.0.self_attn.k_zero_point", torch.ones(1), "k_zero_point: expected zeros"),
    ],
)
def test_bad_scales_are_refused(
    name: str, scale: Tensor | None, message: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    tensors = {f"model.layers.{i}.self_attn.{kind}_scale": torch.ones(1) for i in range(2) for kind in "kv"}
    tensors = {key: value for key, value in (tensors | {name: scale}).items() if value is not None}
    with pytest.raises(ModelError, match=message):
        load(saved(folder("qwen3"), tmp_path / "model", tensors))


def test_bad_scales_of_a_caller_are_refused() -> None:
    """Nothing is written then."""
    model = Decoder(Config(**TINY))
    name = "model.layers.0.self_attn"
    for scales, message in (
        ({f"{name}.k_scale": 0.5, f"{name}.v_scale": 0.0}, "v_scale: expected a positive finite number, got 0.0"),
        ({f"{name}.k_scale": 0.5}, "v_scale: is missing"),
        ({f"{name}.kv_scale": torch.ones(3)}, "kv_scale: expected 1 element or 2, got 3"),
        ({f"{name}.kv_scale": 0.5, f"{name}.scale": 0.5}, r"\.scale: is no scale of a cache"),
    ):
        with pytest.raises(ModelError, match=rf"^kv_scales: {name}.*{message}"):
            write_kv_scales(model, scales)
    assert scales_of(model) == [[1.0] * 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 4}, "num_bits: expected 8, got 4"),
        ({"num_bits": None}, "num_bits: expected 8, got None"),
        ({"type": "int"}, "type: expected 'float', got 'int'"),
        ({"strategy": "group"}, "strategy: expected 'tensor' or 'attn_head', got 'group'"),
        ({"strategy": ["tensor"]}, r"strategy: expected 'tensor' or 'attn_head', got \['tensor'\]"),
        ({"symmetric": False}, "symmetric: expected True, got False"),
        ({"dynamic": True}, "dynamic: expected False, got True"),
        ({"group_size": 64}, "group_size: expected null, got 64"),
    ],
)
def test_unsupported_schemes_are_refused(change: dict[str, Any], message: str) -> None:
    said = COMPRESSED | {"kv_cache_scheme": SCHEME | change}
    with pytest.raises(ModelError, match=rf"^config: quantization_config\.kv_cache_scheme\.{message}"):
        Config.parse({"architectures": ["LlamaForCausalLM"], **TINY, "quantization_config": said})


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"kv_cache_scheme": "dynamic"}, "kv_cache_scheme: expected an object, 'static' or null, got 'dynamic'"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo: expected 'FP8' or null, got 'NVFP4'"),
        ({"kv_cache_quant_algo": "FP8", "quant_algo": "NVFP4"}, "quant_method: expected 'fp8', .*, got 'modelopt'"),
    ],
)
def test_unsupported_configs_are_refused(said: dict[str, Any], message: str) -> None:
    said = {"quant_method": "modelopt"} | said
    with pytest.raises(ModelError, match=rf"^config: quantization_config\.{message}"):
        Config.parse({"architectures": ["LlamaForCausalLM"], **TINY, "quantization_config": said})


def test_unsupported_dtypes_are_refused(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before memory is allocated."""
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: pytest.fail("memory was asked for"))
    qwen3, deepseek = load(folder("qwen3")), load(folder("deepseek v3"))
    served = "expected 'auto', 'fp8', 'fp8_e4m3', 'fp8_e5m2' or 'float32'"
    for model, kind, message in (
        (qwen3, "int8", f"{served}, got 'int8'"),
        (qwen3, "bfloat16", f"{served}, got 'bfloat16'"),
        (qwen3, "fp8_ds_mla", f"{served}, got 'fp8_ds_mla'"),
        (qwen3, None, f"{served}, got None"),
        (deepseek, "fp8_e5m2", "expected 'auto', 'fp8', 'fp8_e4m3' or 'float32' with latent attention, got 'fp8_e5m2'"),
    ):
        with pytest.raises(ModelError, match=f"^kv_cache_dtype: {message}"):
            Engine(model, max_seq_len=96, kv_cache_dtype=kind)


# Tensor parallelism


def test_ranks_have_the_scales_of_their_heads() -> None:
    """Scales of one process that calibrates the whole model; scales of a caller; and of ranks that calibrate
    together."""
    config = test_models_parallel.CONFIGS["llama"]
    whole, prompts = Decoder(config).randomise(0, 4.0), test_models_parallel.PROMPTS
    scales = calibrate_kv_scales(whole, prompts, per_head=True)
    limits = {"max_num_seqs": 2, "num_blocks": 16, "kv_cache_dtype": "fp8"}
    expected = Engine(whole, **limits).generate(prompts, SamplingParams(max_tokens=12))

    def part(group: Any) -> tuple[Any, Any, Any]:
        model = ParallelDecoder(config, group).randomise(0, 4.0)
        calibrated = calibrate_kv_scales(model, prompts, per_head=True)
        write_kv_scales(model, scales)
        return calibrated, scales_of(model), Engine(model, **limits).generate(prompts, SamplingParams(max_tokens=12))

    for rank, (calibrated, own, texts) in enumerate(test_models_parallel.in_threads(2, part)):
        assert calibrated.keys() == scales.keys()
        for name, scale in scales.items():
            torch.testing.assert_close(calibrated[name], scale, rtol=1e-5, atol=0.0)
        heads = slice(2 * rank, 2 * rank + 2)
        names = [[f"model.layers.{i}.self_attn.{kind}_scale" for kind in "kv"] for i in range(2)]
        assert own == [[*scales[k][heads].tolist(), *scales[v][heads].tolist()] for k, v in names]
        assert texts == expected


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["qwen3", "deepseek v2 with entries of the op"])
def test_graphs_and_kernels(case: str, folder: Callable[[str], Path]) -> None:
    """In bfloat16, with and without graphs; most tokens are the most likely ones of the float32 model with rounded
    KV."""
    ours = load(folder(case), "cuda", "bfloat16")
    scales = calibrate_kv_scales(ours, PROMPTS, per_head=True)
    params = SamplingParams(max_tokens=COUNT)
    texts = [
        Engine(ours, max_seq_len=160, max_num_seqs=4, kv_cache_dtype="fp8", graphs=graphs).generate(PROMPTS, params)
        for graphs in (False, True)
    ]
    assert texts[0] == texts[1]
    with rounding(model_of(case), scales, E4M3) as theirs:
        same = [
            a == b
            for prompt, text in zip(PROMPTS, texts[0], strict=True)
            for a, b in zip(text, likeliest(theirs, prompt, text), strict=True)
        ]
    assert sum(same) >= 0.8 * len(same)
