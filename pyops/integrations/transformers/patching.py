"""`accelerate`, which replaces the forwards of a model's modules; `restore`, which undoes it; `report`."""

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
    """Replace the forwards of a transformers model by the kernels of this library, in place.

    Replaces norms, rotary embedding, MLPs, experts, residual additions, fp8 and packed projections, attention over a
    `PagedCache` (which `generate` then makes for greedy search and sampling), and the attention of encoders. A module
    is recognised by what it computes, not by its name: its forward and the replacement run on the same small inputs,
    and a module for which they disagree is left to transformers. The modules, their names and the state dict stay, and
    results differ only by rounding. Weights of projections with the same input are stacked, so that one GEMM computes
    them; this takes no additional memory. While gradients are enabled, or under autocast, the model runs as before.

    Call it when the model has its final device and dtype. A module that is changed later (adapters, hooks, forwards,
    submodules, settings, dtypes, training mode) runs transformers' code until `accelerate` is called again or the
    change is undone. If only parameters move to other memory, stacked projections become separate GEMMs. A step that
    is already compiled does not notice all of these changes.

    Args:
        model: a model of transformers, on one device, float32, float16 or bfloat16.

    Returns:
        The same model. `report` says what was replaced and why the rest was not, `restore` undoes it.

    Raises:
        ModelError: a ValueError, for any other model; it is not accelerated then.

    Examples:
        >>> prompt = torch.randint(100, (1, 7))
        >>> before = model.generate(prompt, max_new_tokens=8, do_sample=False)
        >>> after = accelerate(model).generate(prompt, max_new_tokens=8, do_sample=False)
        >>> torch.equal(before, after)
        True
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
    """The current replacements in `model`; an empty report if it is not accelerated.

    Examples:
        >>> report(accelerate(model)).replaced["LlamaMLP"]  # of two layers
        2
    """
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
    """Undo `accelerate`: modules get their forwards back, and every parameter its own memory.

    Examples:
        >>> model = accelerate(model)
        >>> print(report(restore(model)))
        no module is replaced
    """
    for replacement in vars(model).pop("_pyops", ({}, {}))[0].values():
        replacement.remove()
    return model


def _dtype(model: Any) -> torch.dtype:
    """The dtype of a model. ModelError if the model cannot be accelerated."""
    if not isinstance(model, PreTrainedModel):
        raise ModelError("accelerate", f"model: expected a model of transformers, got {type(model).__name__}")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or torch.device("meta") in devices:
        found = ", ".join(sorted(map(str, devices)))
        raise ModelError("accelerate", f"model: expected all parameters on one device, found {found}")
    # The dtype of the embeddings, because scales of quantised weights may have another.
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
    dtype: torch.dtype = next((module.weight.dtype for module in embeddings), model.dtype)
    if dtype not in _DTYPES:
        raise ModelError("accelerate", f"model: expected float32, float16 or bfloat16, found {dtype}")
    return dtype


class _Found:
    """The replacements of a model's modules, and the reasons for the modules without one.

    Attributes:
        replacements: {module: the replacement of its forward}.
        why: {module: the reason why it is left to transformers}.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.dtype, self.trials, self.masks, self.config = dtype, Trials(), Masks(), model.config
        self.replacements: dict[Any, Replacement] = {}
        self.why: dict[Any, str] = {}
        modules = [module for module in model.modules() if module is not model]
        # {module: its rotary embedding}: the nearest one among its siblings and the siblings of its ancestors.
        self.rotary: dict[Any, Any] = {}
        for module in model.modules():
            for rotary in filter(is_rotary, module.children()):
                self.rotary |= dict.fromkeys(module.modules(), rotary)
        attentions = [module for module in modules if is_attention(module)]
        for module in modules:
            self._try(module)
        served = {type(module) for module in attentions if isinstance(self.replacements.get(module), BoundAttention)}
        # Only replaced attention reads the `Step` that replaced rotary embeddings and layers pass on.
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
            # Every layer of the cache must belong to exactly one attention module.
            layers_of_cache = range(self.config.get_text_config(decoder=True).num_hidden_layers)
            of_each = sorted(module.layer_idx for module in attentions) == list(layers_of_cache)
            if served and of_each and all(type(module) in served for module in attentions):
                self.replacements = {model: Generation(model, self.dtype), **self.replacements}
            else:
                self.why[model] = "not every layer has an attention that reads a PagedCache"

    def _try(self, module: Any) -> None:
        """Make the replacement of a module other than a layer or a rotary embedding, or record why there is none."""
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
                if not has_weights:  # activations and dropout are not reported
                    self.why.pop(module, None)
        elif any(width(part) for part in module.children()) and not any(map(is_attention, module.children())):
            self.why[module] = "it is nothing that is tried"

    def _add(self, module: Any, make: Any, why: str | None = None) -> None:
        """Record the replacement that `make` returns; or the reason `why`, or the one that `make` raises."""
        try:
            if why or "forward" in vars(module):
                raise Unknown(why or "its forward is replaced already")
            self.replacements[module] = make()
        except Unknown as reason:
            self.why[module] = str(reason)
