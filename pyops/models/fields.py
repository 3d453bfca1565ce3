"""Fields of a model's files: which of them were read, and how the others are treated.

If a family reads no field of some name, three things can happen. `HARMLESS` lists fields that never change what the
model generates: they are ignored. `NEUTRAL` lists fields that may change it, with the values that do not: other values
are refused. A warning names any other field.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, ItemsView
from typing import Any

from .config_values import refuse

# Fields that do not change the generated tokens. A field of a nested object is listed by the last part of its name.
HARMLESS = {
    # provenance of the file, and how transformers builds its module
    *("_name_or_path", "model_type", "transformers_version", "auto_map", "return_dict", "id2label", "label2id"),
    *("_attn_implementation_autoset", "unsloth_version", "unsloth_fixed"),
    *("use_cache", "cache_implementation", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("chunk_size_feed_forward", "is_decoder", "num_logits_to_keep", "pretraining_tp", "ep_size"),
    # training: dropout, initialisation, losses
    *("attention_dropout", "hidden_dropout", "embd_pdrop", "embedding_dropout", "resid_pdrop", "residual_dropout"),
    *("classifier_dropout", "initializer_range", "rescale_prenorm_residual"),
    *("router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux", "z_loss_coefficient"),
    *("time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_scale"),
    # tokens that tokenizers add
    *("bos_token_id", "pad_token_id"),
    # chunking of scans, and sizes that follow from other fields
    *("chunk_size", "mamba_chunk_size", "use_associative_scan", "use_mambapy", "qk_head_dim", "intermediate_size"),
    *("time_step_rank", "original_max_position_embeddings", "initial_context_length", "fused_norm", "fused_add_norm"),
    "max_position_embeddings",  # inside `rope_parameters`: the top-level field overrides it
    *("experts_per_token", "attn_rotary_emb", "max_window_layers"),
    *("d_inner", "d_model", "n_layer", "ssm_cfg", "pad_vocab_size_multiple"),
    # presence of biases, in families where it is fixed or follows from the tensors
    "attention_bias",
    # vision encoders, which are not loaded; and the inner ``tie_word_embeddings``, which the top-level one overrides
    *("vision_config", "image_token_index", "boi_token_index", "eoi_token_index"),
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
    *("vision_feature_layer", "tie_word_embeddings"),
    # M-RoPE sections: a text token has the same position in all of them
    *("mrope_section", "mrope_interleaved"),
    # multi-token prediction layers, which are not loaded, and the dtype of states, which are always float32
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mtp_layers_block_type", "num_nextn_predict_layers"),
    *("mamba_ssm_dtype", "mamba_ssm_cache_dtype"),
    # Nemotron-H: choices of kernels, and sizes that follow from other fields
    *("use_mamba_kernels", "moe_shared_expert_overlap", "expand", "n_shared_experts"),
}
# Fields that change the generated tokens in families that read them. Elsewhere only these values and null are accepted.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_chunk_size": (),
    "attn_logit_softcapping": (),
    "attn_res_block_size": (),
    "attn_output_gate": (False,),
    "clip_qkv": (),
    "final_logit_softcapping": (),
    "gate_lower_bound": (),
    "hidden_activation": ("gelu_pytorch_tanh",),  # Gemma 1 supports only this activation
    "is_encoder_decoder": (False,),
    "mamba_hidden_act": ("silu",),
    "mamba_proj_bias": (False,),
    "mla_use_output_gate": (False,),
    "mlp_bias": (False,),
    "mlp_only_layers": ([],),
    "mlp_type": ("default",),
    "norm_type": ("layer_norm",),
    "pack_dtype": ("int32",),
    "position_embedding_type": ("rope",),
    "qk_layernorm": (False,),
    "qk_norm": (False,),
    "quantization": (),  # MLX writes it
    "residual_in_fp32": (False,),
    "rms_norm": (True,),
    "routed_expert_hidden_size": (),
    "scoring_func": ("softmax",),
    "use_bidirectional_attention": (False,),
    "use_full_rank_gate": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
}
# Fields of the objects in `_QUANTIZATION`. They say how the weights were quantized, or choose a kernel.
HARMLESS_OF_QUANTIZATION = {
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "dataset", "tokenizer", "batch_size"),
    *("pad_token_id", "max_input_length", "cache_block_outputs", "block_name_to_quantize", "model_seqlen", "meta"),
    *("module_name_preceding_first_block", "act_group_aware", "model_name_or_path", "model_file_base_name"),
    *("exllama_config", "use_exllama", "backend", "do_fuse", "sym", "desc_act", "quantization_status"),
    *("global_compression_ratio", "version", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    *("block_structure", "modules_to_not_convert", "producer"),
}
# Fields of ``generation_config.json`` that are ignored, because the caller of the engine decides. Sampling parameters
# are not listed: a warning has to say that the file's values are not used.
HARMLESS_OF_GENERATION = {
    *(
        "_from_model_config",
        "transformers_version",
        "bos_token_id",
        "pad_token_id",
        "use_cache",
        "cache_implementation",
    ),
    *("max_length", "max_new_tokens", "output_attentions", "output_hidden_states"),
    *("return_dict_in_generate", "decoder_start_token_id"),
}
_QUANTIZATION = ("quantization_config", "compression_config")  # the objects with `HARMLESS_OF_QUANTIZATION`


class Fields(dict[str, Any]):
    """A JSON object that remembers which fields of it, and of objects in it, were read.

    Args:
        values: the object.
        read: paths of the fields that were read, as ``"rope_parameters.factor"``; nested objects and unions share it.
        at: the path of this object with a final dot, or "" at the top.
    """

    def __init__(self, values: dict[str, Any], read: set[str] | None = None, at: str = "") -> None:
        super().__init__(values)
        self._read: set[str] = set() if read is None else read
        self._at = at

    def _found(self, name: str, value: Any) -> Any:
        path = f"{self._at}{name}"
        self._read.add(path)
        is_plain = isinstance(value, dict) and not isinstance(value, Fields)
        return Fields(value, self._read, f"{path}.") if is_plain else value

    def __getitem__(self, name: str) -> Any:
        return self._found(name, super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._found(name, super().get(name, default))

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return {name: self[name] for name in self}.items()

    def __or__(self, other: dict[str, Any]) -> Fields:  # type: ignore[override]
        return Fields(super().__or__(other), self._read, self._at)

    def __ror__(self, other: dict[str, Any]) -> Fields:  # type: ignore[override]
        return Fields(super().__ror__(other), self._read, self._at)

    def unread(self) -> dict[str, Any]:
        """{path: value} of the fields that were not read, except null values."""
        values: dict[str, Any] = {}
        for name, value in dict.items(self):
            path = f"{self._at}{name}"
            if path not in self._read:
                values |= {} if value is None else {path: value}
            elif isinstance(value, dict):
                values |= Fields(value, self._read, f"{path}.").unread()
        return values


def check_unread(values: Fields, file: str, harmless: Collection[str] = HARMLESS) -> None:
    """Warn of the fields that were not read and are neither `harmless` nor neutral.

    Raises:
        ModelError: a field in `NEUTRAL` has another value.
    """
    unknown = []
    for path, value in values.unread().items():
        outer, name = path.split(".")[0], path.split(".")[-1]
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise refuse(path, " or ".join(map(repr, NEUTRAL[name])) or "null", value)
        elif name not in (HARMLESS_OF_QUANTIZATION if outer in _QUANTIZATION else harmless):
            unknown.append(path)
    if unknown:
        warnings.warn(f"{file}: not read: {', '.join(sorted(unknown))}", stacklevel=1)
