"""GGUF metadata: keys of RoPE, EOS tokens, and which keys are read, refused or harmless."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from numpy.typing import NDArray

from pyops import ModelError
from pyops.models import Config, gguf_keys
from pyops.models.gguf_file import GgufFile
from pyops.models.gguf_tokenizer import tokenizer_of

HEAD_DIM, POSITIONS, THETA = 16, 64, 10000.0
SIZES: dict[str, Any] = {
    "context_length": POSITIONS,
    "embedding_length": 32,
    "feed_forward_length": 32,
    "block_count": 1,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
TOKENS = ["<unk>", "<s>", "</s>"]


def written(
    path: Path,
    values: dict[str, Any],
    tensors: dict[str, NDArray[Any]] | None = None,
    arch: str = "llama",
    kinds: dict[str, Any] | None = None,
) -> Path:
    """A file of a one-layer model with weights that nobody reads; keys that begin with a dot belong to the
    architecture."""
    writer = gguf.GGUFWriter(path, arch)
    add: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in ({f".{key}": value for key, value in SIZES.items()} | values).items():
        if value is not None:
            add[type(value)](f"{arch}{key}" if key.startswith(".") else key, value)
    tokens = values.get("tokenizer.ggml.tokens")
    vocab_size = len(tokens if isinstance(tokens, list) else TOKENS)
    for name, data in ({"token_embd.weight": numpy.zeros((vocab_size, 32), "float32")} | (tensors or {})).items():
        writer.add_tensor(name, data, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# RoPE

FREQUENCIES = THETA ** -(torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
DIVISORS = [1.0 + i / 4 for i in range(HEAD_DIM // 2)]


def yarn(factor: float, original: int, fast: float = 32.0, slow: float = 1.0) -> torch.Tensor:
    """Frequencies of YaRN (arXiv:2309.00071, section 3.2), with the ends of its ramp rounded outwards as in
    llama.cpp."""
    low, high = (
        HEAD_DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(THETA)) for turns in (fast, slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), HEAD_DIM - 1)
    ramp = ((torch.arange(HEAD_DIM // 2).double() - low) / max(high - low, 0.001)).clamp(0, 1)
    return FREQUENCIES / factor * ramp + FREQUENCIES * (1 - ramp)


MSCALE = 0.1 * math.log(4.0) + 1
YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
# {metadata: (frequencies, the factor of cosines and sines)}
ROPES: dict[str, tuple[dict[str, Any], torch.Tensor, float]] = {
    "nothing": ({}, FREQUENCIES, 1.0),
    "a factor without a type": ({"scaling.factor": 4.0}, FREQUENCIES / 4, 1.0),
    "linear": ({"scaling.type": "linear", "scaling.factor": 4.0}, FREQUENCIES / 4, 1.0),
    "the old name": ({"scale_linear": 4.0}, FREQUENCIES / 4, 1.0),
    "both names": ({"scale_linear": 4.0, "scaling.factor": 2.0}, FREQUENCIES / 2, 1.0),
    "the old name with a type": ({"scale_linear": 4.0, "scaling.type": "linear"}, FREQUENCIES / 4, 1.0),
    "a factor of 0": ({"scaling.factor": 0.0}, FREQUENCIES, 1.0),
    "a factor of none": ({"scaling.type": "none", "scaling.factor": 4.0}, FREQUENCIES, 1.0),
    "yarn": ({f"scaling.{key}": value for key, value in YARN.items()}, yarn(4.0, 16), MSCALE),
    "yarn of all positions": ({"scaling.type": "yarn", "scaling.factor": 4.0}, yarn(4.0, POSITIONS), MSCALE),
    "yarn by the old name": ({"scaling.type": "yarn", "scale_linear": 4.0}, yarn(4.0, POSITIONS), MSCALE),
    "yarn with its ramp": (
        {f"scaling.{key}": value for key, value in (YARN | {"yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0}).items()},
        yarn(4.0, 16, 8.0, 2.0),
        MSCALE,
    ),
    "yarn with attn_factor": (
        {f"scaling.{key}": value for key, value in (YARN | {"attn_factor": 0.75}).items()},
        yarn(4.0, 16),
        0.75 * MSCALE,
    ),
    "yarn with attn_factor and a multiplier": (
        {f"scaling.{key}": value for key, value in (YARN | {"attn_factor": 0.75, "yarn_log_multiplier": 0.1}).items()},
        yarn(4.0, 16),
        0.75,
    ),
    "yarn with a multiplier": (
        {f"scaling.{key}": value for key, value in (YARN | {"yarn_log_multiplier": 0.1}).items()},
        yarn(4.0, 16),
        1.0,
    ),
    "divisors": ({"tensor": DIVISORS}, FREQUENCIES / torch.tensor(DIVISORS).double(), 1.0),
    "divisors and a factor": (
        {"tensor": DIVISORS, "scaling.factor": 2.0},
        FREQUENCIES / torch.tensor(DIVISORS).double() / 2,
        1.0,
    ),
}


@pytest.mark.parametrize("what", ROPES)
def test_rope_matches_the_formula(what: str, tmp_path: Path) -> None:
    values, frequencies, factor = ROPES[what]
    tensors = {"rope_freqs.weight": numpy.array(values["tensor"], "float32")} if "tensor" in values else {}
    metadata = {f".rope.{key}": value for key, value in values.items() if key != "tensor"}
    rope = Config.read(written(tmp_path / "model.gguf", metadata, tensors)).rope
    torch.testing.assert_close(rope.frequencies(HEAD_DIM).double(), frequencies, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-6)


REFUSED_ROPES: dict[str, tuple[dict[str, Any], str]] = {
    "attn_factor": (
        {"scaling.attn_factor": 0.5},
        r"llama\.rope\.scaling\.attn_factor: expected 1\.0 without .*, got 0",
    ),
    "a type": (
        {"scaling.type": "dynamic", "scaling.factor": 2.0},
        r"rope\.scaling\.type: expected 'none' or .*'dynamic'",
    ),
    "a word": (
        {"scaling.factor": "two"},
        r"rope\.scaling\.factor: expected a number, got 'two'",
    ),
    "divisors and yarn": (
        {"scaling.type": "yarn", "tensor": DIVISORS},
        "expected 'linear' or 'none' beside rope_freqs",
    ),
}


@pytest.mark.parametrize("what", REFUSED_ROPES)
def test_unsupported_rope_is_refused(what: str, tmp_path: Path) -> None:
    values, message = REFUSED_ROPES[what]
    tensors = {"rope_freqs.weight": numpy.array(values["tensor"], "float32")} if "tensor" in values else {}
    metadata = {f".rope.{key}": value for key, value in values.items() if key != "tensor"}
    with pytest.raises(ModelError, match=message):
        Config.read(written(tmp_path / "model.gguf", metadata, tensors))


# Known keys

_FACTS = json.loads((Path(__file__).parents[1] / "support" / "model_fields.json").read_text(encoding="utf-8"))
# {a published file: its keys, those of its architecture with a dot in front}, with small sizes.
PUBLISHED: dict[str, dict[str, Any]] = _FACTS["gguf"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_key_of_published_files_is_known(name: str, tmp_path: Path) -> None:
    values = dict(PUBLISHED[name])
    path = written(tmp_path / "model.gguf", values, arch=values.pop("general.architecture"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config.read(path).vocab_size == len(TOKENS)


def test_every_decoder_key_of_the_package_is_known() -> None:
    """Harmless keys, and keys that may change tokens; the package's other keys belong to unsupported models or to no
    model."""
    sections = (gguf.Keys.General, gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope, gguf.Keys.Split)
    every = [key for section in (*sections, gguf.Keys.Tokenizer) for key in vars(section).values()]
    keys = {key for key in every if isinstance(key, str)}
    keys = {key.removeprefix("{arch}.") for key in keys if "." in key and key != gguf.Keys.General.__module__}
    known = gguf_keys.TYPES.keys() | gguf_keys.HARMLESS | gguf_keys.NEUTRAL.keys()
    others = {key for key in keys - known if not key.startswith(gguf_keys.HARMLESS_BEGINNINGS)}
    assert others <= OTHERS
    assert known - keys <= {"rope.scale_linear"}, "no key of a real file"


OTHERS = {f"attention.{key}_lora_rank" for key in ("decay", "gate", "iclr", "value_residual_mix")}
OTHERS |= {"attention.group_norm_epsilon", "attention.group_norm_groups", "attention.relative_buckets_count"}
OTHERS |= {
    "activation_sparsity_scale",
    "altup.active_idx",
    "altup.num_inputs",
    "decoder_block_count",
    "features_length",
}
OTHERS |= {"embedding_length_per_layer_input", "expert_chunk_feed_forward_length", "moe_latent_size", "swin_norm"}
OTHERS |= {"n_deepstack_layers", "rescale_every_n_layers", "time_decay_extra_dim", "time_mix_extra_dim"}
OTHERS |= {"token_shift_count", "tokenizer.rwkv.world", "{dense}_feat_in", "{dense}_feat_out"}


@pytest.mark.parametrize("key", gguf_keys.NEUTRAL)
def test_key_that_would_change_tokens_is_refused(key: str, tmp_path: Path) -> None:
    """Except for values without an effect."""
    own = key if key.startswith(("general", "tokenizer")) else f".{key}"
    for i, value in enumerate(value for value in gguf_keys.NEUTRAL[key] if value != []):
        Config.read(written(tmp_path / f"{i}.gguf", {own: value}, arch="qwen2"))
    for value in (0.375, 77, "no"):
        with pytest.raises(ModelError, match=rf"{key}: expected .*, got '?{value}"):
            Config.read(written(tmp_path / "model.gguf", {own: value}, arch="qwen2"))


def test_unknown_key_is_named_once(tmp_path: Path) -> None:
    values = {".zeta": 1, "general.sampling.temp": 0.5, "eta": "x", ".rope.theta": [1, 2]}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            Config.read(written(tmp_path / "model.gguf", values))
    expected = "model.gguf: not read: eta, general.sampling.temp, llama.rope.theta, llama.zeta"
    assert [str(one.message) for one in found] == [expected]


@pytest.mark.filterwarnings("ignore:.*not read")
@pytest.mark.parametrize("arch", ["llama", "deepseek2", "gemma3", "granite", "stablelm"])
def test_value_of_another_type_is_refused(arch: str, tmp_path: Path) -> None:
    """For any key, always by ModelError."""
    path, refused = tmp_path / "model.gguf", set()
    whole = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.scores": [0.0] * 3}
    for key in gguf_keys.TYPES.keys() - {"general.architecture"}:
        own = key if key.startswith(("split", "tokenizer")) else f".{key}"
        for value in ("x", [1.5], True, 3, 1.5):
            try:
                file = GgufFile(written(path, whole | {own: value}, arch=arch))
                file.config()
                tokenizer_of(file)
            except ModelError as error:
                refused |= {key} if f"{key}: expected {gguf_keys.TYPES[key]}, got" in str(error) else set()
    assert {
        "block_count",
        "attention.head_count",
        "rope.scaling.type",
        "tokenizer.ggml.tokens",
        "split.count",
    } <= refused
    assert len(refused) > 25


def test_layers_with_a_window(tmp_path: Path) -> None:
    """A number of layers, or a bool for each; other values are refused, and so is a family without windows."""
    for pattern, windows in ((2, (5, 0, 5)), (0, (5, 5, 5)), (1, (0, 0, 0)), ([False, True, True], (0, 5, 5))):
        values = {".block_count": 3, ".attention.sliding_window": 5, ".attention.sliding_window_pattern": pattern}
        path = written(tmp_path / "model.gguf", values, arch="gemma2")
        assert Config.read(path).sliding_windows == windows
    for pattern in ([True], "x", [1, 0, 1]):
        with pytest.raises(
            ModelError, match=r"sliding_window_pattern: expected a number or a bool for each of 3 layers"
        ):
            Config.read(written(path, values | {".attention.sliding_window_pattern": pattern}, arch="gemma2"))
    with pytest.raises(ModelError, match=r"sliding_window_pattern: expected none, got 2"):
        Config.read(written(path, values | {".attention.sliding_window_pattern": 2}, arch="phi3"))


def test_values_have_the_length_of_keys(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"attention\.value_length: expected 16, as keys have, got 8"):
        Config.read(written(tmp_path / "model.gguf", {".attention.value_length": 8}))
