"""Options of a decoder other than its sizes: norms, multipliers, and names of parts in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .config_values import refuse

_NORM_KINDS, _NORM_PLACES = ("rms", "rms_once", "gemma", "layer"), ("before", "after", "around")
BOTH = "attention and states"  # layer type: attention and a state-space mixer in parallel
MLP_ALONE = "mlp"  # layer type: only an MLP or a mixture; then no other layer has an MLP
QK_NORMS = ("", "head", "heads", "row")


class Names(NamedTuple):
    """Names of the parts of a model in its checkpoint; by default those of a Llama.

    Attributes:
        input_norm, mlp_norm: norms before attention, or a mixer, and before an MLP.
        mlp: the MLP; "" if the projections, or the experts, are direct children of the layer.
        experts: the mixture of experts, if its name is not that of an MLP; "" if it is.
        attention_out_norm, mlp_out_norm: norms after attention and after the MLP.
        qkv, gate_up: projections, in the order of their rows. A single name stands for one fused projection.

    Examples:
        >>> from dataclasses import replace
        >>> model = Decoder(replace(config, names=Names(layers="transformer.h")))
        >>> "transformer.h.0.self_attn.q_proj.weight" in model.tensors()
        True
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    state_space: str = "mamba"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    experts: str = ""
    attention_out_norm: str = ""
    mlp_out_norm: str = ""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    o: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"

    def mlp_of(self, has_experts: bool) -> str:
        """The name of a layer's MLP, or of its mixture of experts."""
        return (self.experts if has_experts else "") or self.mlp


@dataclass(frozen=True)
class Norms:
    """The norms of a decoder, all of one kind.

    Attributes:
        kind: "rms"; "rms_once", rounded only once, after the multiplication by the weights; "gemma", which is
            "rms_once" with 1 added to the weights; or "layer".
        has_bias: whether layer norms, except those of query and key heads, have a bias.
        place: where a layer has its norms: "before" attention and MLP (pre-norm), "after" them, before the addition to
            the residual, or "around" them, which is both.

    Examples:
        >>> from dataclasses import replace
        >>> model = Decoder(replace(config, norms=Norms("gemma"))).randomise(seed=0)
    """

    kind: str = "rms"
    has_bias: bool = False
    place: str = "before"

    def __post_init__(self) -> None:
        for name, served in (("kind", _NORM_KINDS), ("place", _NORM_PLACES)):
            if getattr(self, name) not in served:
                raise refuse(f"norms.{name}", " or ".join(map(repr, served)), getattr(self, name))


class Multipliers(NamedTuple):
    """Multipliers and logits soft caps of a decoder.

    Attributes:
        embedding: of embeddings.
        embedding_is_rounded: whether `embedding` is first rounded to the dtype of activations.
        residual: of the outputs that a layer adds to the residual stream.
        attention: of the attention logits; None for ``head_dim ** -0.5``.
        logits: of the output logits.
        attention_soft_cap, logits_soft_cap: c of ``c * tanh(l / c)``, which replaces a logit l; 0 for none.

    Examples:
        >>> from dataclasses import replace
        >>> model = Decoder(replace(config, multipliers=Multipliers(logits_soft_cap=30.0))).randomise(seed=0)
    """

    embedding: float = 1.0
    embedding_is_rounded: bool = False
    residual: float = 1.0
    attention: float | None = None
    logits: float = 1.0
    attention_soft_cap: float = 0.0
    logits_soft_cap: float = 0.0
