"""What a decoder is made of, beside its sizes: norms, multipliers, and the names of parts in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .config_values import refuse

_NORM_KINDS, _NORM_PLACES = ("rms", "rms_once", "gemma", "layer"), ("before", "after", "around")
BOTH = "attention and states"  # the type of a layer that has both, of the same input, and adds what they give
MLP_ALONE = "mlp"  # the type of a layer that is an MLP or a mixture; then no layer has another MLP
QK_NORMS = ("", "head", "heads", "row")


class Names(NamedTuple):
    """Names of the parts of a model in its checkpoint; those of a Llama, unless others are given.

    Attributes:
        input_norm, mlp_norm: of the norms before attention, or a mixer, and before an MLP.
        mlp: of MLPs; "" where their parts, or experts', are parts of the layer.
        attention_out_norm, mlp_out_norm: of the norms behind attention and MLPs.
        qkv, gate_up: of projections, in the order of their rows. One name stands for all of them joined.
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    state_space: str = "mamba"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    attention_out_norm: str = ""
    mlp_out_norm: str = ""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    o: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


@dataclass(frozen=True)
class Norms:
    """The norms of a decoder, all of one kind.

    Attributes:
        kind: "rms"; "rms_once", the same rounded once, behind the product with the weights; "gemma", which is
            "rms_once" of one more than the weights; or "layer".
        has_bias: whether layer norms, but those of query and key heads, have a bias.
        place: where a layer has its norms: "before" attention and MLPs, "after" them, on what is added to the sums of
            layers, or "around" them, which is both.
    """

    kind: str = "rms"
    has_bias: bool = False
    place: str = "before"

    def __post_init__(self) -> None:
        for name, served in (("kind", _NORM_KINDS), ("place", _NORM_PLACES)):
            if getattr(self, name) not in served:
                raise refuse(f"norms.{name}", " or ".join(map(repr, served)), getattr(self, name))


class Multipliers(NamedTuple):
    """Numbers that a decoder multiplies by, and bounds of logits.

    Attributes:
        embedding: of embeddings.
        embedding_is_rounded: whether `embedding` is first rounded to the dtype of activations.
        residual: of what a layer adds to the sums of layers.
        attention: of the logits of attention; None for ``head_dim ** -0.5``.
        logits: of the logits of tokens.
        attention_soft_cap, logits_soft_cap: c of ``c * tanh(l / c)``, which replaces a logit l; 0 for none.
    """

    embedding: float = 1.0
    embedding_is_rounded: bool = False
    residual: float = 1.0
    attention: float | None = None
    logits: float = 1.0
    attention_soft_cap: float = 0.0
    logits_soft_cap: float = 0.0
