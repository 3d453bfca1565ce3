"""What of a model is replaced, and how it is undone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ...errors import ModelError
from .attention import BoundAttention, attention_of, is_attention
from .encoders import EncoderAttention, Masks, is_encoder_attention
from .experts import Experts, is_experts
from .generation import Generation
from .layers import DecoderLayer
from .mlp import MLP, is_mlp
from .norms import Norm
from .packed import PackedProjection, is_packed
from .quantised import Projection, holds_codes, obstacle
from .replacement import Replacement
from .reporting import Entry, Report
from .rotary import RotaryEmbedding, is_rotary
from .routers import Router, is_router
from .trial import Trials, Unknown, width

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_Model = TypeVar("_Model", bound=nn.Module)


def accelerate(model: _Model) -> _Model:
    """Give a model of transformers the kernels of this library, in place.

    Norms, rotary embedding, MLPs, experts, additions to the residual stream, fp8 projections, and attention
    over a `PagedCache`, which `generate` makes by itself for greedy search and sampling, or of all tokens of an encoder
    to each other. A module is known by what it computes, whatever its family is called: its forward and its replacement
    run on the same few numbers; a module that does not agree is left to transformers. The modules,
    their names and the state dict stay; what the forwards compute differs by rounding alone. The weights of projections
    of one input are stacked in memory, so that one GEMM computes them; that takes no more memory. Where
    gradients are enabled, or under autocast, the model does what it did before.

    Call it when the model is on the device and of the dtype that it shall have. A module that is changed later
    (adapters, hooks, other forwards, parts, settings or dtypes, training) runs as transformers has it until
    `accelerate` is called again or the change is undone; if only parameters get other memory, projections of one
    input are separate GEMMs. A step that is compiled already does not notice all of this.

    Args:
        model: a model of transformers, on one device, float32, float16 or bfloat16.

    Returns:
        The same model. `report` says what was replaced and why the rest was not, `restore` undoes it.

    Raises:
        ModelError: a ValueError, for any other model; it is not accelerated then.
    """
    dtype = _dtype(model)
    restore(model)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        found = _Found(model, dtype)
    for replacement in found.replacements.values():
        replacement.install()
    for replacement in found.replacements.values():
        replacement.watch()
    vars(model)["_pyops"] = found.replacements, found.why
    return model


def report(model: nn.Module) -> Report:
    """What is replaced in `model` now; nothing if it is not accelerated."""
    replacements, why = vars(model).get("_pyops", ({}, {}))
    entries = []
    for name, module in model.named_modules():
        replacement = replacements.get(module)
        changed = None if replacement is None else replacement.changed()
        op, reason = ("", changed) if replacement is None or changed else (replacement.serving(), None)
        if op or reason or module in why:
            entries.append(Entry(name, type(module).__name__, op, reason or why.get(module, "")))
    return Report(entries)


def restore(model: _Model) -> _Model:
    """Undo `accelerate`: every forward is what it was, and every parameter has memory of its own."""
    for replacement in vars(model).pop("_pyops", ({}, {}))[0].values():
        replacement.remove()
    return model


def _dtype(model: Any) -> torch.dtype:
    """The dtype of a model that can be accelerated; an error that says what is in the way of another."""
    if not isinstance(model, PreTrainedModel):
        raise ModelError("accelerate", f"model: expected a model of transformers, got {type(model).__name__}")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or torch.device("meta") in devices:
        found = ", ".join(sorted(map(str, devices)))
        raise ModelError("accelerate", f"model: expected all parameters on one device, found {found}")
    # That of embeddings, because the scales of quantised weights may be of another.
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
    dtype: torch.dtype = next((module.weight.dtype for module in embeddings), model.dtype)
    if dtype not in _DTYPES:
        raise ModelError("accelerate", f"model: expected float32, float16 or bfloat16, found {dtype}")
    return dtype


class _Found:
    """What can be replaced in a model.

    Attributes:
        replacements: {module: the replacement of its forward}.
        why: {module: why it is left to transformers}.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.dtype, self.trials, self.masks, self.config = dtype, Trials(), Masks(), model.config
        self.replacements: dict[Any, Replacement] = {}
        self.why: dict[Any, str] = {}
        modules = [module for module in model.modules() if module is not model]
        # {module: its rotary embedding}: the closest one among its siblings or the siblings of its ancestors.
        self.rotary: dict[Any, Any] = {}
        for module in model.modules():
            for rotary in filter(is_rotary, module.children()):
                self.rotary |= dict.fromkeys(module.modules(), rotary)
        attentions = [module for module in modules if is_attention(module)]
        for module in modules:
            self._try(module)
        served = {type(module) for module in attentions if isinstance(self.replacements.get(module), BoundAttention)}
        # Without one, nothing takes what a rotary embedding and a layer leave.
        why = None if served else "no attention is replaced"
        for module in filter(is_rotary, modules):
            self._add(module, lambda module=module: RotaryEmbedding(module, self.config, self.dtype), why)
        layers = [layer for layer in modules if any(part in attentions for part in layer.children())]
        for layer in layers:
            self._add(layer, lambda layer=layer: DecoderLayer(layer, self.dtype, self.replacements), why)
        for layer, following in pairwise(layers):
            one, after = (self.replacements.get(each) for each in (layer, following))
            if isinstance(one, DecoderLayer) and isinstance(after, DecoderLayer):
                one.following = after
        if hasattr(model, "_prepare_cache_for_generation"):
            # Each layer of the cache belongs to one of them.
            layers_of_cache = range(self.config.get_text_config(decoder=True).num_hidden_layers)
            of_each = sorted(module.layer_idx for module in attentions) == list(layers_of_cache)
            if served and of_each and all(type(module) in served for module in attentions):
                self.replacements = {model: Generation(model, self.dtype), **self.replacements}
            else:
                self.why[model] = "not every layer has an attention that reads a PagedCache"

    def _try(self, module: Any) -> None:
        """Replace a module that is no layer and no rotary embedding, or say why not."""
        has_weights = next(module.parameters(), None) is not None
        if holds_codes(module):
            why = obstacle(module, self.dtype)
            self._add(module, lambda: Projection(module, self.dtype), why)
        elif is_encoder_attention(module):
            self._add(module, lambda: EncoderAttention(module, self.dtype, self.trials, self.masks))
        elif is_attention(module):
            self._add(module, lambda: attention_of(module, self.rotary.get(module), self.dtype, self.trials))
        elif is_packed(module):
            self._add(module, lambda: PackedProjection(module, self.dtype))
        elif is_router(module):
            self._add(module, lambda: Router(module, self.dtype, self.trials))
        elif is_experts(module):
            self._add(module, lambda: Experts(module, self.dtype, self.trials))
        elif is_mlp(module):
            self._add(module, lambda: MLP(module, self.dtype, self.trials))
        elif next(module.children(), None) is None and not (width(module) or is_rotary(module)):
            if not isinstance(module, nn.Embedding):
                large = any(weight.ndim > 2 for weight in module.parameters())
                why = "no op computes what it does" if large else None
                self._add(module, lambda: Norm(module, self.dtype, self.trials), why)
                if not has_weights:  # an activation, or dropout
                    self.why.pop(module, None)
        elif any(width(part) for part in module.children()) and not any(map(is_attention, module.children())):
            self.why[module] = "it is nothing that is tried"

    def _add(self, module: Any, make: Any, why: str | None = None) -> None:
        """Replace a module by what `make` returns, unless there is a reason why not."""
        try:
            if why or "forward" in vars(module):
                raise Unknown(why or "its forward is replaced already")
            self.replacements[module] = make()
        except Unknown as reason:
            self.why[module] = str(reason)
