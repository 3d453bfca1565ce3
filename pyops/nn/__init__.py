"""Layers of models as modules, with vLLM's names, arguments and states. A file imports only files listed before it:

custom_op base parallel              switching layers on and off; layers of one op; tensor parallelism
activation norm norm_gated           activations, norms
quant routing                        fp8 quantization, routing to experts
experts mixture                      experts' weights and the methods that apply them, mixtures of experts
linear rotary attention conv         projections, rotary embedding, attention without a cache, convolutions
rotary_dual                          rotary embedding for dual chunk attention
rotary_scaled rotary_yarn            rotary embedding of long sequences
merged embedding                     merged projections, token embeddings
factory logits states                the rotary embedding of a configuration, logits, states in slots of a cache
latent                               multi-head latent attention
shortconv mixer mamba mamba_heads    the short convolution, the base of Mamba mixers, the mixers
delta_rule kimi_delta                the gated delta rule and its mixers
hyper_connections                    the streams of manifold-constrained hyper-connections

docs/layers.md lists them.
"""

from __future__ import annotations

from typing import Any

# First, because without torch it raises the error that says how to install torch.
from .custom_op import CustomOp, PluggableLayer, op_registry, set_custom_ops  # isort: split

from . import (
    activation,
    attention,
    conv,
    delta_rule,
    embedding,
    experts,
    factory,
    hyper_connections,
    kimi_delta,
    latent,
    linear,
    logits,
    mamba,
    mamba_heads,
    merged,
    mixture,
    norm,
    norm_gated,
    parallel,
    quant,
    rotary,
    rotary_dual,
    rotary_scaled,
    rotary_yarn,
    routing,
    shortconv,
)
from .activation import *
from .attention import *
from .conv import *
from .delta_rule import *
from .embedding import *
from .experts import *
from .factory import *
from .hyper_connections import *
from .kimi_delta import *
from .latent import *
from .linear import *
from .logits import *
from .mamba import *
from .mamba_heads import *
from .merged import *
from .mixture import *
from .norm import *
from .norm_gated import *
from .parallel import *
from .quant import *
from .quant import _DecodeConcatQuantFP8
from .rotary import *
from .rotary_dual import *
from .rotary_scaled import *
from .rotary_yarn import *
from .routing import *
from .shortconv import *

MISSING = {
    "static_sink_attention": (
        "StaticSinkAttention",
        "is vLLM's attention of an engine, with tokens put before its cache",
    ),
    "sparse_attn_indexer": (
        "SparseAttnIndexer",
        "is part of vLLM's engine; its logits are `pyops.fp8_mqa_logits` and `pyops.fp8_paged_mqa_logits`",
    ),
    "bailing_moe_linear_attention": (
        "BailingMoELinearAttention",
        "is put together by its model; its scan is `pyops.mamba_chunk_scan_varlen` with time steps of 1",
    ),
    "qwen2_decoder": ("CustomQwen2Decoder", "is a model of transformers"),
    "rel_pos_attention": ("RelPosAttention", "no op of attention adds a bias for each pair of tokens"),
}
"""{name of an op: (name of its class, why it is not here)} of layers that vLLM has and this library has not."""


def get_layer_class(name: str) -> type:
    """The layer class with the registered name ("rms_norm") or class name ("RMSNorm") `name`, else ValueError.

    Examples:
        >>> get_layer_class("rms_norm") is get_layer_class("RMSNorm") is RMSNorm
        True
    """
    for op_name, layer in op_registry.items():
        if name in (op_name, layer.__name__):
            return layer
    raise ValueError(_absence(name) or f"pyops.nn has no layer {name}")


def _absence(name: str) -> str | None:
    for op_name, (layer, reason) in MISSING.items():
        if name in (op_name, layer):
            return f"pyops.nn has no {layer} ({op_name}): {reason}"
    return None


def __getattr__(name: str) -> Any:
    raise AttributeError(_absence(name) or f"module {__name__!r} has no attribute {name!r}")


__all__ = ["MISSING", "CustomOp", "PluggableLayer", "get_layer_class", "set_custom_ops"]
for _module in (
    activation,
    attention,
    conv,
    delta_rule,
    embedding,
    experts,
    factory,
    hyper_connections,
    kimi_delta,
    latent,
    linear,
    logits,
    mamba,
    mamba_heads,
    merged,
    mixture,
    norm,
    norm_gated,
    parallel,
    quant,
    rotary,
    rotary_dual,
    rotary_scaled,
    rotary_yarn,
    routing,
    shortconv,
):
    __all__ += _module.__all__
