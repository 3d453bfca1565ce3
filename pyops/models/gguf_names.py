"""Where a GGUF file has the tensors of a Hugging Face folder: under other names, as slices, or composed of several.

llama.cpp stores all experts of a layer in one tensor, likewise the norms of its heads, and splits some tensors in two.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from .gguf_families import GgufFamily
from .mixture import STACKED

MXFP4_PARTS = ("blocks", "scales")  # suffixes of the two tensors of an MXFP4 matrix in Hugging Face folders
KV_B = "kv_b_proj"
# {name of a tensor that is composed of others: llama.cpp's names of these}
_MADE: dict[str, tuple[str, ...]] = {KV_B: ("attn_k_b", "attn_v_b")}
_MADE_OF_EXPERTS: dict[str, tuple[str, ...]] = {
    STACKED[0]: ("ffn_gate_exps", "ffn_up_exps"),
    STACKED[1]: ("ffn_down_exps",),
}
_LATENT = {
    "attn_q_a": "q_a_proj",
    "attn_q_b": "q_b_proj",
    "attn_q_a_norm": "q_a_layernorm",
    "attn_kv_a_mqa": "kv_a_proj_with_mqa",
    "attn_kv_a_norm": "kv_a_layernorm",
    "attn_kv_b": KV_B,
}


class Source(NamedTuple):
    """Where a tensor is.

    Attributes:
        own: names of its source tensors in the file.
        part: its index in the first source tensor; None for all of it.
        made: the composed tensor: `KV_B` or one of `STACKED`, with "_bias", or with "_blocks" or "_scales" of MXFP4;
            "" if the source tensor is used as it is.
    """

    own: tuple[str, ...]
    part: int | None = None
    made: str = ""


def sources(shapes: Mapping[str, tuple[int, ...]], mxfp4: Collection[str], family: GgufFamily) -> dict[str, Source]:
    """{name in a Hugging Face folder: its source}. A tensor with an unknown name keeps its name.

    Args:
        shapes: {name of a tensor in the file: shape}.
        mxfp4: names of the mxfp4 tensors.
        family: the family of the file's architecture.
    """
    found: dict[str, Source] = {}
    names, parts, made = family.family.names, _parts(family), _made(family)
    outer = {"token_embd": names.embedding, "output_norm": names.norm, "output": "lm_head"}
    for own, shape in shapes.items():
        base, _, end = own.rpartition(".")
        in_layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
        number, part = in_layer.groups() if in_layer else ("", "")
        layer = f"{names.layers}.{number}."
        if base in outer:
            found[f"{outer[base]}.{end}"] = Source((own,))
        elif part in made:
            name, of = made[part]
            found |= _joined(layer + name, [f"blk.{number}.{one}.{end}" for one in of], shapes, mxfp4)
        elif part not in parts:
            found[own] = Source((own,))
        elif "{}" in parts[part]:
            found |= {f"{layer}{parts[part].format(i)}.{end}": Source((own,), i) for i in range(shape[0])}
        elif parts[part].endswith(("sinks", "_bias")):  # Hugging Face has no ".weight" or ".bias" here
            found[layer + parts[part]] = Source((own,))
        else:
            found[f"{layer}{parts[part]}.{end}"] = Source((own,))
    return found


def _joined(
    name: str, own: list[str], shapes: Mapping[str, tuple[int, ...]], mxfp4: Collection[str]
) -> dict[str, Source]:
    """The sources of the tensors that are composed of the tensors `own` of a layer, if the file has all of them."""
    if not all(one in shapes for one in own):
        return {one: Source((one,)) for one in own if one in shapes}
    if name.endswith(KV_B):
        return {f"{name}.weight": Source(tuple(own), made=KV_B)}
    made = next(each for each in STACKED if name.endswith(each))
    if own[0].endswith(".bias"):
        return {f"{name}_bias": Source(tuple(own), made=f"{made}_bias")}
    if all(one in mxfp4 for one in own):
        return {f"{name}_{kind}": Source(tuple(own), made=f"{made}_{kind}") for kind in MXFP4_PARTS}
    return {name: Source(tuple(own), made=made)}


def _made(family: GgufFamily) -> dict[str, tuple[str, tuple[str, ...]]]:
    """{llama.cpp's part of a layer: (name of the composed tensor within the layer, all its parts)}."""
    names = family.family.names
    made = {f"{names.attention}.{name}": of for name, of in _MADE.items()}
    if family.is_stacked:
        made |= {f"{names.mlp}.{name}": of for name, of in _MADE_OF_EXPERTS.items()}
    return {part: (name, of) for name, of in made.items() for part in of}


def _parts(family: GgufFamily) -> dict[str, str]:
    """{llama.cpp's name of a part of a layer: Hugging Face's name}; "{}" stands for an index into the tensor."""
    names = family.family.names
    attention, mlp = f"{names.attention}.", f"{names.mlp}."
    qkv = ("attn_qkv",) if len(names.qkv) == 1 else ("attn_q", "attn_k", "attn_v")
    gate_up = ("ffn_up",) if len(names.gate_up) == 1 else ("ffn_gate", "ffn_up")
    found = {
        "attn_norm": names.input_norm,
        "ffn_norm": names.mlp_norm,
        "post_attention_norm": names.attention_out_norm,
        "post_ffw_norm": names.mlp_out_norm,
        **dict(zip(qkv, (attention + name for name in names.qkv), strict=True)),
        **dict(zip(gate_up, (mlp + name for name in names.gate_up), strict=True)),
        "attn_output": attention + names.o,
        "attn_q_norm": attention + names.q_norm,
        "attn_k_norm": attention + names.k_norm,
        "attn_sinks": f"{attention}sinks",
        "ffn_down": mlp + names.down,
        "ffn_gate_inp": mlp + family.router,
        "exp_probs_b": f"{mlp}{family.router}.e_score_correction_bias",
        **{own: attention + name for own, name in _LATENT.items()},
        **{f"ffn_{part}_shexp": f"{mlp}shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    }
    for own, name in zip(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), family.experts, strict=True):
        found[own] = f"{mlp}experts.{{}}.{name}"
    return found | {own: found[other] for own, other in family.own_names.items()}
