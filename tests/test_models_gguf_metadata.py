"""GGUF metadata: keys of the rotary embedding, ends of texts, and which keys are read, refused or harmless."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from numpy.typing import NDArray

from pyops import ModelError
from pyops.models import Config

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
    path: Path, values: dict[str, Any], tensors: dict[str, NDArray[Any]] | None = None, arch: str = "llama"
) -> Path:
    """A file of a model of one layer, whose weights nobody reads; keys with a dot in front are the architecture's."""
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
    vocab_size = len(values.get("tokenizer.ggml.tokens", TOKENS))
    for name, data in ({"token_embd.weight": numpy.zeros((vocab_size, 32), "float32")} | (tensors or {})).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# The rotary embedding

FREQUENCIES = THETA ** -(torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
DIVISORS = [1.0 + i / 4 for i in range(HEAD_DIM // 2)]


def yarn(factor: float, original: int, fast: float = 32.0, slow: float = 1.0) -> torch.Tensor:
    """Frequencies of YaRN (arXiv:2309.00071, section 3.2), the ends of its ramp rounded outwards, as llama.cpp does."""
    low, high = (
        HEAD_DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(THETA)) for turns in (fast, slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), HEAD_DIM - 1)
    ramp = ((torch.arange(HEAD_DIM // 2).double() - low) / max(high - low, 0.001)).clamp(0, 1)
    return FREQUENCIES / factor * ramp + FREQUENCIES * (1 - ramp)


MSCALE = 0.1 * math.log(4.0) + 1
YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
# {what the metadata say: (frequencies, the factor of cosines and sines)}
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
def test_the_rotary_embedding_is_that_of_the_formula(what: str, tmp_path: Path) -> None:
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
        r"rope\.scaling\.factor of 'linear': expected a positive number .*, got 'two'",
    ),
    "divisors and yarn": (
        {"scaling.type": "yarn", "tensor": DIVISORS},
        "expected 'linear' or 'none' beside rope_freqs",
    ),
}


@pytest.mark.parametrize("what", REFUSED_ROPES)
def test_a_rotary_embedding_that_is_not_served(what: str, tmp_path: Path) -> None:
    values, message = REFUSED_ROPES[what]
    tensors = {"rope_freqs.weight": numpy.array(values["tensor"], "float32")} if "tensor" in values else {}
    metadata = {f".rope.{key}": value for key, value in values.items() if key != "tensor"}
    with pytest.raises(ModelError, match=message):
        Config.read(written(tmp_path / "model.gguf", metadata, tensors))
