"""Keys of GGUF metadata: the types of those that are read, and how the others are treated.

A key that is not read may be in `HARMLESS`, because no token depends on it, or in `NEUTRAL`, with the only values that
change no token; other values are refused. A warning names every other key that is not read. Keys of an architecture
are listed without its prefix.
"""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .config_values import is_integer

INTEGER, NUMBER, FLAG, TEXT = "an integer", "a number", "true or false", "a string"
TEXTS, INTEGERS, NUMBERS = "strings", "integers", "numbers"
TYPES: dict[str, str] = {
    **dict.fromkeys(("block_count", "context_length", "embedding_length", "feed_forward_length"), INTEGER),
    **{f"attention.{key}": INTEGER for key in ("head_count", "head_count_kv", "sliding_window", "q_lora_rank")},
    **{f"attention.{key}": INTEGER for key in ("key_length", "value_length", "key_length_mla", "value_length_mla")},
    **{f"expert_{key}": INTEGER for key in ("count", "used_count", "shared_count", "feed_forward_length")},
    **{f"expert_{key}": INTEGER for key in ("group_count", "group_used_count", "gating_func")},
    **dict.fromkeys(("attention.kv_lora_rank", "leading_dense_block_count", "rope.dimension_count"), INTEGER),
    **dict.fromkeys(("rope.scaling.original_context_length", "split.count"), INTEGER),
    **{f"attention.layer_norm{key}_epsilon": NUMBER for key in ("", "_rms")},
    **{f"rope.scaling.{key}": NUMBER for key in ("factor", "attn_factor", "yarn_beta_fast", "yarn_beta_slow")},
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa", "rope.scale_linear", "attention.scale"), NUMBER),
    **dict.fromkeys(("rope.scaling.yarn_log_multiplier", "expert_weights_scale", "logit_scale"), NUMBER),
    **dict.fromkeys(("embedding_scale", "residual_scale"), NUMBER),
    **{f"{key}_logit_softcapping": NUMBER for key in ("attn", "final")},
    **dict.fromkeys(("use_parallel_residual", "expert_weights_norm"), FLAG),
    **{f"tokenizer.ggml.{key}": FLAG for key in ("add_bos_token", "add_eos_token", "add_space_prefix")},
    **{f"tokenizer.ggml.{key}_token_id": INTEGER for key in ("bos", "eos", "eot", "eom", "unknown")},
    **{f"tokenizer.ggml.fim_{key}_token_id": INTEGER for key in ("pad", "rep", "sep")},
    **{f"tokenizer.ggml.{key}": TEXT for key in ("model", "pre")},
    **dict.fromkeys(("general.architecture", "rope.scaling.type"), TEXT),
    **{f"tokenizer.ggml.{key}": TEXTS for key in ("tokens", "merges")},
    "tokenizer.ggml.token_type": INTEGERS,
    "tokenizer.ggml.scores": NUMBERS,
}
# Prefixes of keys that have no effect, and one whole key, because no chat template is applied.
HARMLESS_BEGINNINGS = ("general.", "quantize.imatrix.", "split.", "tokenizer.chat_template")
_SAMPLING = "general.sampling."  # the caller sets sampling parameters, so a warning names these keys
HARMLESS = {
    *(key for key in TYPES if key.startswith("tokenizer.ggml.")),  # the tokenizer reads them
    *(f"tokenizer.ggml.{key}_token_id" for key in ("seperator", "padding", "mask", "prefix", "suffix", "middle")),
    *(f"tokenizer.ggml.fim_{key}_token_id" for key in ("pre", "suf", "mid")),
    "tokenizer.ggml.token_type_count",
    *("vocab_size", "tensor_data_layout", "pooling_type", "decoder_start_token_id", "tokenizer.huggingface.json"),
    # parameters of RoPE scalings and mixtures that the file does not use, and facts that follow from tensors
    *("rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast"),
    *("rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier", "rope.scaling.factor", "rope.scale_linear"),
    *("expert_used_count", "expert_feed_forward_length", "use_parallel_residual"),
    *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "general.type": ("model",),
    "general.quantization_version": (2,),
    "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.precompiled_charsmap": ([],),
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window_pattern": (),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "moe_every_n_layers": (0,),
    "nextn_predict_layers": (0,),
    "residual_scale": (0.0, 1.0),
    **dict.fromkeys(("rope.dimension_sections", "rope.dimension_count_swa", "attention.temperature_length"), ()),
    **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa", "swiglu_clamp_exp"), ()),
    **dict.fromkeys(("swiglu_clamp_shexp", "embedding_length_out", "experts_per_group"), ()),
    **dict.fromkeys(
        ("attention.shared_kv_layers", "full_attention_interval", "expert_shared_feed_forward_length"), (0,)
    ),
    **dict.fromkeys(("attention.output_scale", "expert_group_scale"), (0.0, 1.0)),
    "rope.freq_base_swa": (),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "router_logit_softcapping": (0.0,),
}


def is_of(kind: str, value: Any) -> bool:
    """Whether a metadata value has the expected type. An integer counts as a number."""
    if kind in (TEXTS, INTEGERS, NUMBERS):
        return isinstance(value, list) and all(is_of(_ELEMENTS[kind], one) for one in value)
    if kind in (FLAG, TEXT):
        return isinstance(value, bool if kind == FLAG else str)
    return is_integer(value) or (kind == NUMBER and isinstance(value, float))


_ELEMENTS = {TEXTS: TEXT, INTEGERS: INTEGER, NUMBERS: NUMBER}


def check_unread(path: Path, architecture: str, unread: Iterable[str], value_of: Callable[[str], Any]) -> None:
    """A warning that names the keys that were not read and are not harmless, once for a process.

    Raises:
        ModelError: a key has a value that is not neutral.
    """
    unknown = []
    for key in unread:
        own = key.removeprefix(f"{architecture}.")
        if own in NEUTRAL:
            if value_of(key) not in NEUTRAL[own]:
                expected = " or ".join(map(repr, NEUTRAL[own])) or "none"
                raise ModelError(path, f"{key}: expected {expected}, got {reprlib.repr(value_of(key))}")
        elif own not in HARMLESS and (not key.startswith(HARMLESS_BEGINNINGS) or key.startswith(_SAMPLING)):
            unknown.append(key)
    if unknown:
        warnings.warn(f"{path.name}: not read: {', '.join(sorted(unknown))}", stacklevel=1)
