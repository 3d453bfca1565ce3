"""Constructors of layers: names, order and defaults of their arguments equal those of vLLM 0.22."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch

from pyops import nn as layers
from tests.support import vllm_signatures

_TABLE = json.loads(vllm_signatures.TABLE.read_text())
_SWITCHES = "*, enforce_enable=False, compile_native=False"
# {layer: the arguments of vLLM's class of that name}: those of the table, except for
VLLM: dict[str, str] = {name: one["signature"] for name, one in _TABLE["layers"].items() if name in layers.__all__} | {
    # classes that are no layer of vLLM, or in no file of its layers
    "CustomOp": _SWITCHES,
    "Phi3LongRoPEScaledRotaryEmbedding": (
        "head_size, rotary_dim, max_position_embeddings, original_max_position_embeddings, base, is_neox_style, dtype, "
        "short_factor, long_factor, short_mscale=None, long_mscale=None"
    ),
    # a constructor of CustomOp
    "ReLUSquaredActivation": _SWITCHES,
    # vLLM's internal machinery
    "FusedMoEModularMethod": "old_quant_method=None, experts=None",
    "UnquantizedFusedMoEMethod": "moe=None",
    "get_rope": (
        "head_size, max_position, is_neox_style=True, rope_parameters=None, dtype=None, "
        "dual_chunk_attention_config=None"
    ),
}
VLLM["TransformersFusedMoE"] = VLLM["FusedMoE"]
# Keyword-only arguments of this library alone: the switches of CustomOp, and values that vLLM reads from its
# configuration.
ADDED = {name: {"enforce_enable", "compile_native"} for name in ("FastGELU", "MulAndSilu", "NewGELU", "QuickGELU")}
_OF_STREAMS = "HCHeadOp", "MHCFusedPostPreOp", "MHCPostOp", "MHCPreOp"
ADDED |= {name: {"enforce_enable", "compile_native"} for name in _OF_STREAMS}
ADDED["Phi3LongRoPEScaledRotaryEmbedding"] = {"max_model_len"}
ADDED["MMEncoderAttention"] = {"multimodal_config"}  # in vLLM before 0.16
ADDED |= {name: {"reduce_results"} for name in ("FusedMoE", "TransformersFusedMoE")}  # in vLLM 0.16


def _arguments(function: Any) -> list[tuple[str, Any, Any]]:
    # The arguments of a class are those of __init__: __new__, which replaces a class out of tree, takes anything.
    is_class = isinstance(function, type)
    parameters = list(inspect.signature(function.__init__ if is_class else function).parameters.values())
    return [(p.name, p.kind, p.default) for p in parameters[is_class:]]


def test_every_layer_is_in_the_table() -> None:
    modules = {name for name in layers.__all__ if isinstance(getattr(layers, name), type)}
    modules = {name for name in modules if issubclass(getattr(layers, name), torch.nn.Module)}
    # PluggableLayer has no constructor of its own.
    assert modules - {"PluggableLayer"} == VLLM.keys() - {"get_rope"}


@pytest.mark.parametrize("name", VLLM)
def test_arguments_match_vllm(name: str) -> None:
    known = {"torch": torch, "DEFAULT_VOCAB_PADDING_SIZE": 64}  # vllm/model_executor/layers/vocab_parallel_embedding.py
    theirs = _arguments(eval(f"lambda {VLLM[name]}: None", known))
    added = ADDED.get(name, set())
    ours = _arguments(getattr(layers, name))
    assert {argument for argument, kind, _ in ours if kind is inspect.Parameter.KEYWORD_ONLY} >= added
    assert [argument for argument in ours if argument[0] not in added] == theirs
