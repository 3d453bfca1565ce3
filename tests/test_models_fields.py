"""Fields of the files of a model: which are read, refused or harmless, and what an absent one stands for."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from pyops.models import Config
from pyops.models.config import ARCHITECTURES

# Sizes of one model, which no file of another leaves out: there the defaults of transformers are not taken.
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "text_config"}
SIZES |= {"architectures", "max_position_embeddings", "num_key_value_heads", "num_experts_per_tok"}


def full(architecture: str) -> dict[str, Any]:
    """Every field of the family's config class in transformers, with its default."""
    config = getattr(transformers, architecture).config_class()
    values = config.to_dict() | {"architectures": [architecture]}
    if "text_config" in values:
        values["text_config"] = type(config.text_config)().to_dict()
    return values | ({"num_experts_per_tok": 6} if "DeepseekV2" in architecture else {})


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_absent_field_has_the_default_of_transformers(architecture: str) -> None:
    values = full(architecture)
    config, text = Config.parse(values), values.get("text_config", {})
    others = {name: Config.parse(without(values, name)) for name in values.keys() - SIZES}
    others |= {
        f"text_config.{name}": Config.parse(values | {"text_config": without(text, name)})
        for name in text.keys() - SIZES
    }
    assert [name for name, other in others.items() if other != config] == []


@pytest.mark.parametrize("text", ["gemma3_text", "mistral"])
def test_ends_of_texts_of_a_model_that_reads_images(text: str) -> None:
    """Those of the model before those of its decoder; null where it is said to be null."""
    name = {"gemma3_text": "Gemma3ForConditionalGeneration", "mistral": "Mistral3ForConditionalGeneration"}[text]
    values = without(full(name), "eos_token_id")
    of_text = values["text_config"] | {"eos_token_id": 7}
    assert Config.parse(values | {"text_config": of_text}).eos_token_ids == (7,)
    assert Config.parse(values | {"text_config": of_text, "eos_token_id": [1, 106]}).eos_token_ids == (1, 106)
    assert Config.parse(values | {"text_config": of_text | {"eos_token_id": None}}).eos_token_ids == ()
