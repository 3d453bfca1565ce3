"""What of a model is replaced, and how it is undone."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from transformers.activations import SiLUActivation

from ..._model_error import ModelError
from .experts import Experts
from .modules import MLP, Attention, DecoderLayer, Generation, Replacement, RMSNorm, RotaryEmbedding
from .quantised import Projection, holds_codes, obstacle

# {family: the module of transformers that has it}
_FAMILIES = {family: family.lower() for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral")}
_FAMILIES |= {"Qwen3Moe": "qwen3_moe", "DeepseekV2": "deepseek_v2", "DeepseekV3": "deepseek_v3"}
# Latent attention stays as it is, and with it the rotary embedding, the cache and the sums of layers.
_KINDS_OF_LATENT_ATTENTION = ("RMSNorm", "MLP", "Experts")
_KINDS: dict[str, type[Replacement]] = {
    "RotaryEmbedding": RotaryEmbedding,
    "RMSNorm": RMSNorm,
    "Attention": Attention,
    "MLP": MLP,
    "Experts": Experts,
    "Projection": Projection,
}
_PROJECTIONS = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)
_NORMS = ("input_layernorm", "post_attention_layernorm")
_Model = TypeVar("_Model", bound=nn.Module)


class Report(NamedTuple):
    """What `accelerate` did; printed, a line for each kind of module.

    Attributes:
        replaced: {class of modules: how many of them}.
        ops: {class of modules: what computes them now}.
        left_alone: {name of a module: why}.
    """

    replaced: dict[str, int]
    ops: dict[str, str]
    left_alone: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{count:4} {kind}: {self.ops[kind]}" for kind, count in self.replaced.items()]
        return "\n".join(lines + [f"left alone: {name}: {why}" for name, why in self.left_alone.items()])


def accelerate(model: _Model) -> _Model:
    """Give a decoder of transformers the kernels of this library, in place.

    Norms, rotary embedding, gated MLPs, experts, the sums of the residual stream, projections of fp8 weights, and
    attention over a `PagedCache`, which `generate` makes by itself for greedy search and sampling. The modules, their
    names and the state dict stay; what the forwards compute differs by rounding alone. The weights of queries, keys and
    values are put behind each other in memory, and so are those of gate and up, so that each is one product; that takes
    no more memory. Where gradients are enabled, or under autocast, the model does what it did before.

    Call it when the model is on the device and of the dtype that it shall have. Where parameters are given other memory
    later (by `to`, or when adapters are merged), call it again: until then products are separate, and a compiled step
    does not notice.

    Args:
        model: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, MixtralForCausalLM,
            Qwen3MoeForCausalLM, DeepseekV2ForCausalLM or DeepseekV3ForCausalLM, on one device, float32, float16 or
            bfloat16. A module in it that is of another class, or whose forward somebody has replaced, is left alone. Of
            DeepSeek's, norms, MLPs and experts are replaced.

    Returns:
        The same model. `report` says what was replaced, `restore` undoes it.

    Raises:
        ModelError: a ValueError, for any other model; it is not accelerated then.
    """
    family, dtype = _family(model)
    restore(model)
    known: dict[str, Any] = {}
    left_alone: dict[str, str] = {}
    is_latent = family.startswith("Deepseek")
    for name, kind, module in _parts(model.model):
        if is_latent and kind not in _KINDS_OF_LATENT_ATTENTION:
            continue
        why = _obstacle(module, kind, family, dtype)
        if not why and kind == "DecoderLayer" and not {f"{name}.{norm}" for norm in _NORMS} <= known.keys():
            why = "a norm in it is left alone"
        if why and kind == "RotaryEmbedding":
            raise ModelError("accelerate", f"{name}: {why}")
        if why:
            left_alone[name] = why
        else:
            known[name] = kind, module
    replaced = {name: module for name, (_, module) in known.items()}
    layers = list(model.model.layers)
    replacements: list[Replacement] = [] if is_latent else [Generation(model)]
    for name, (kind, module) in known.items():
        if kind == "DecoderLayer":
            next_layer = layers.index(module) + 1
            following = layers[next_layer] if f"model.layers.{next_layer}.input_layernorm" in known else None
            parts = (replaced.get(f"{name}.{part}") for part in ("self_attn", "mlp"))
            replacements.append(DecoderLayer(module, following, *parts))
        else:
            replacements.append(_KINDS[kind](module))
    for replacement in replacements:
        replacement.install()
    vars(model)["_pyops"] = replacements, left_alone
    return model


def report(model: nn.Module) -> Report:
    """What is replaced in `model`; nothing if it is not accelerated."""
    replacements, left_alone = vars(model).get("_pyops", ([], {}))
    ops = {type(one.module).__name__: one.op for one in replacements}
    return Report(dict(Counter(type(one.module).__name__ for one in replacements)), ops, dict(left_alone))


def restore(model: _Model) -> _Model:
    """Undo `accelerate`: every forward is that of its class, and every parameter has memory of its own."""
    for replacement in vars(model).pop("_pyops", ([], {}))[0]:
        replacement.remove()
    return model


def _family(model: Any) -> tuple[str, torch.dtype]:
    """The family of a model that can be accelerated, and its dtype; an error that says what is in the way of others."""
    names = [f"{family}ForCausalLM" for family in _FAMILIES]
    family = next((f for f, name in zip(_FAMILIES, names, strict=True) if isinstance(model, _class(f, name))), None)
    if family is None:
        raise ModelError("accelerate", f"model: expected one of {', '.join(names)}, got {type(model).__name__}")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or torch.device("meta") in devices:
        found = ", ".join(sorted(map(str, devices)))
        raise ModelError("accelerate", f"model: expected all parameters on one device, found {found}")
    dtypes = {parameter.dtype for name, parameter in model.named_parameters() if "norm" in name}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float16, torch.bfloat16}:
        found = ", ".join(sorted(map(str, dtypes)))
        raise ModelError("accelerate", f"model: expected norms of float32, float16 or bfloat16, found {found}")
    return family, dtypes.pop()


def _class(family: str, name: str) -> Any:
    """The class of transformers, or one that nothing is an instance of where its module is not loaded."""
    lower = _FAMILIES[family]
    return getattr(sys.modules.get(f"transformers.models.{lower}.modeling_{lower}"), name, ())


def _parts(decoder: Any) -> Iterator[tuple[str, str, Any]]:
    """(name, kind, module) of all that may be replaced, layers behind what is in them."""
    yield "model.rotary_emb", "RotaryEmbedding", decoder.rotary_emb
    for i, layer in enumerate(decoder.layers):
        at = f"model.layers.{i}"
        for name, kind in (
            ("input_layernorm", "RMSNorm"),
            ("self_attn", "Attention"),
            ("self_attn.q_norm", "RMSNorm"),
            ("self_attn.k_norm", "RMSNorm"),
            ("post_attention_layernorm", "RMSNorm"),
            ("mlp", "MLP"),
        ):
            module = _within(layer, name)
            if kind == "MLP" and hasattr(module, "shared_experts"):
                yield f"{at}.{name}.shared_experts", "MLP", module.shared_experts
            if kind == "MLP" and hasattr(module, "experts"):
                name, kind, module = f"{name}.experts", "Experts", module.experts
            if module is not None:
                yield f"{at}.{name}", kind, module
        for name in _PROJECTIONS:
            module = _within(layer, name)
            if holds_codes(module):
                yield f"{at}.{name}", "Projection", module
        yield at, "DecoderLayer", layer
    yield "model.norm", "RMSNorm", decoder.norm


def _within(module: Any, name: str) -> Any:
    """The module of this name in a module, or None."""
    for step in name.split("."):
        module = getattr(module, step, None)
    return module


def _obstacle(module: Any, kind: str, family: str, dtype: torch.dtype) -> str | None:
    """Why a module cannot be replaced in a model of a dtype; None where it can."""
    expected = f"{family}{kind}"
    if kind != "Projection" and type(module) is not _class(family, expected):
        return f"expected {expected}, got {type(module).__name__}"
    if "forward" in vars(module):
        return "its forward is replaced already"
    if kind in ("MLP", "Experts") and not isinstance(module.act_fn, (nn.SiLU, SiLUActivation)):
        return f"its activation is {type(module.act_fn).__name__}, not SiLU"
    if kind == "Experts" and module.gate_up_proj.dtype != dtype:
        return f"its weights are {module.gate_up_proj.dtype}, not {dtype}"
    return obstacle(module, dtype) if kind == "Projection" else None
