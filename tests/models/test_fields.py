"""Fields in model files: which are read, refused or harmless, and the defaults of absent ones."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers

from pyops import ModelError
from pyops.models import Config, Quantization, fields
from pyops.models.config import ARCHITECTURES

# Sizes that every model file has: transformers' defaults for them are those of one model and are not used.
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "text_config"}
SIZES |= {"architectures", "max_position_embeddings", "num_key_value_heads", "num_experts_per_tok"}


def full(architecture: str) -> dict[str, Any]:
    """Every field of the family's config class in transformers, with its default."""
    config = getattr(transformers, architecture).config_class()
    values: dict[str, Any] = config.to_dict() | {"architectures": [architecture]}
    if "text_config" in values:
        values["text_config"] = type(config.text_config)().to_dict()
    # Defaults that make no model: transformers leaves these fields to the files.
    made = {"DeepseekV2": {"num_experts_per_tok": 6}, "Glm4Moe": {"num_attention_heads": 32}}
    return values | next((fields for name, fields in made.items() if name in architecture), {})


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_absent_field_has_transformers_default(architecture: str) -> None:
    values = full(architecture)
    config, text = Config.parse(values), values.get("text_config", {})
    others = {name: Config.parse(without(values, name)) for name in values.keys() - SIZES}
    others |= {
        f"text_config.{name}": Config.parse(values | {"text_config": without(text, name)})
        for name in text.keys() - SIZES
    }
    assert [name for name, other in others.items() if other != config] == []


@pytest.mark.parametrize("text", ["gemma3_text", "mistral"])
def test_eos_tokens_of_a_multimodal_model(text: str) -> None:
    """The model's own field precedes its decoder's; an explicit null stays null."""
    name = {"gemma3_text": "Gemma3ForConditionalGeneration", "mistral": "Mistral3ForConditionalGeneration"}[text]
    values = without(full(name), "eos_token_id")
    of_text = values["text_config"] | {"eos_token_id": 7}
    assert Config.parse(values | {"text_config": of_text}).eos_token_ids == (7,)
    assert Config.parse(values | {"text_config": of_text, "eos_token_id": [1, 106]}).eos_token_ids == (1, 106)
    assert Config.parse(values | {"text_config": of_text | {"eos_token_id": None}}).eos_token_ids == ()


# Known fields

_FACTS = json.loads((Path(__file__).parents[1] / "support" / "model_fields.json").read_text(encoding="utf-8"))
# {a published file: its fields, with small sizes}, and likewise of `quantization_config`.
PUBLISHED: dict[str, dict[str, Any]] = _FACTS["config.json"]
QUANTIZED: dict[str, dict[str, Any]] = _FACTS["quantization_config"] | {
    "transformers' AWQ": transformers.AwqConfig().to_dict(),
    "transformers' GPTQ": transformers.GPTQConfig(bits=4).to_dict(),
    "transformers' fp8": json.loads(json.dumps(transformers.FineGrainedFP8Config().to_dict())),
}
# Values of a `quantization_config` that quantises no weights.
CACHES: dict[str, dict[str, Any]] = _FACTS["cache_alone"]
LLAMA = PUBLISHED["Llama 3.1"]
GENERATION = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": [2, 7], "transformers_version": "4.42.3"}


def warned(values: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Config.parse(values)
    return [str(one.message) for one in found]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_field_of_transformers_configs_is_known(architecture: str) -> None:
    assert warned(full(architecture)) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_field_of_published_files_is_known(name: str) -> None:
    assert warned(PUBLISHED[name]) == []


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_every_field_of_published_quantization_configs_is_known(name: str, field: str) -> None:
    """Under either name."""
    assert warned(LLAMA | {field: QUANTIZED[name]}) == []
    assert Config.parse(LLAMA | {field: QUANTIZED[name]}).quantization == Quantization.parse(QUANTIZED[name])


@pytest.mark.parametrize("name", CACHES)
def test_every_field_of_a_cache_scheme_is_known(name: str) -> None:
    assert warned(LLAMA | {"quantization_config": CACHES[name]}) == []


def names_of(values: dict[str, Any]) -> set[str]:
    inner = [names_of(value) for value in values.values() if isinstance(value, dict)]
    return set(values).union(*inner)


def test_tables_have_only_fields_of_real_files() -> None:
    known = set().union(*map(names_of, PUBLISHED.values()))
    assert known.union(*(names_of(full(each)) for each in ARCHITECTURES)) >= fields.HARMLESS
    assert set().union(*map(names_of, (*QUANTIZED.values(), *CACHES.values()))) >= fields.HARMLESS_OF_QUANTIZATION
    assert transformers.GenerationConfig().to_dict().keys() | GENERATION.keys() >= fields.HARMLESS_OF_GENERATION


def test_unknown_field_is_named_once() -> None:
    """For any value but null, with the path of objects that contain it."""
    rope = {"rope_type": "linear", "factor": 2.0, "section": [1, 2]}
    values = LLAMA | {
        "zeta": False,
        "eta": 0,
        "theta": None,
        "rope_scaling": rope,
        "quantization_config": QUANTIZED["AutoAWQ"] | {"a": 1},
    }
    message = "config.json: not read: eta, quantization_config.a, rope_scaling.section, zeta"
    assert warned(values) == [message]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            Config.parse(values | {"iota": 1})
    assert len(found) == 1


@pytest.mark.parametrize("name", fields.NEUTRAL)
def test_field_that_would_change_tokens_is_refused(name: str) -> None:
    """Except for values without an effect, and in families that read the field."""
    values = LLAMA | ({"architectures": ["Qwen2ForCausalLM"]} if name == "mlp_bias" else {})
    for value in (None, *fields.NEUTRAL[name]):
        assert warned(values | {name: value}) == []
    for value in (each for each in (3.5, "no", True) if each not in fields.NEUTRAL[name]):
        with pytest.raises(ModelError, match=rf"^config: {name}: expected .*, got '?{value}"):
            Config.parse(values | {name: value})


def test_generation_config(tmp_path: Path) -> None:
    """Its EOS tokens count; its sampling parameters, which callers set here, are logged."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))
    assert Config.read(tmp_path).eos_token_ids == (2, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION | {"temperature": 0.6, "do_sample": True}))
    with pytest.warns(UserWarning, match=r"^generation_config\.json: not read: do_sample, temperature$"):
        Config.read(tmp_path)
