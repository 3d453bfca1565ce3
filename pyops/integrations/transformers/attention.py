"""Attention: the module's own forward with functions replaced, or a forward with one fused QKV GEMM."""

from __future__ import annotations

import copy
import dis
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from ..._core.errors import OpError
from .cache import PagedCache, PagedLayer
from .joined import Joined
from .replacement import CACHE_NAMES, Replacement, hooked, renamed
from .rotary import POSITIONS, Step, angles_of
from .seams import IGNORED, IMPLEMENTATIONS, OPTIONS, PAST, Past, attend, bind, bound_forward, seams
from .trial import StandIn, Trials, Unknown, agree, forward_of, randn, settings, tried, twin, width

# A forward is replaced by `JoinedAttention` only if it uses no names but these and the module's settings.
_JOINED = {"shape", "view", "transpose", "reshape", "contiguous", "nn", "functional", "dropout", "getattr"}
_JOINED |= {"config", "training", "head_dim", "layer_idx", "scaling", "attention_dropout", "attn_logit_softcapping"}
_JOINED |= {"sliding_window", "_attn_implementation", "eager_attention_forward", "get_interface", "update"}
_JOINED |= {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
_PROMPT, _HIDDEN = 5, 16  # prompt tokens and hidden size of a trial
# Tolerances of a trial, relative to the largest element: in float32, and if logits and P are rounded to bfloat16.
CLOSE, ROUNDED = 1e-5, 0.1


def is_attention(module: Any) -> bool:
    """Whether a module is attention with a cache: it has a layer_idx, and its class or a base class updates a cache."""
    forwards = (inspect.unwrap(vars(kind)["forward"]) for kind in type(module).__mro__ if "forward" in vars(kind))
    updates = any("update" in forward.__code__.co_names for forward in forwards if inspect.isfunction(forward))
    is_one = isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "config")
    return updates and is_one and any(width(part) for part in module.children())


class Asked:
    """Stands in for transformers' attention interface in a trial, and records how a module uses it.

    Attributes:
        function, eager: the attention function that the module got, and the one it passes as default for "eager".
        options: keyword arguments that the module passed to the function, except dropout.
    """

    def __init__(self, original: Any) -> None:
        self.original = original

    def get_interface(self, name: str, default: Any) -> Any:
        self.eager, self.function = default, self.original.get_interface(name, default)
        return self.keep

    def keep(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        self.options = {name: value for name, value in options.items() if name in OPTIONS - {"dropout"}}
        return query.transpose(1, 2), None


class BoundAttention(Replacement):
    """The module's own forward, with ops in place of its attention function and its RoPE function.

    Args:
        asked: the attention function, and the options that the module passes to it.

    Raises:
        Unknown: the forward uses no attention interface.
    """

    paged = "reshape_and_cache_flash, paged_attention_v1, paged_attention_varlen"

    def __init__(self, module: Any, dtype: torch.dtype, asked: Asked) -> None:
        super().__init__(module, dtype)
        self.asked = asked
        function = forward_of(module)
        self.bound = bound_forward(function)
        self.parameters = tuple(inspect.signature(function).parameters)
        turns = " apply_rotary_emb," if seams(function)[1] else ""
        self.op = f"its own forward,{turns} and with a PagedCache {self.paged}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states = args[0] if args else kwargs[self.parameters[1]]
        return self._bound(args, kwargs) if self.serves(hidden_states) else self.original(*args, **kwargs)

    def _bound(self, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.bound(self.module, *args, **renamed(kwargs, self.parameters), **self._past(args, kwargs))

    def _past(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Past]:
        """The keyword argument that reaches the attention function through the forward; {} without a PagedCache."""
        values = (*args, *kwargs.values())
        paged = next((value for value in values if isinstance(value, PagedCache)), None)
        if paged is None:
            return {}
        paged.written = None  # stale if the ops did not serve the previous attention
        step = next((value for value in values if isinstance(value, Step)), None)
        return {PAST: Past(paged, step, self.asked.function)}


class JoinedAttention(BoundAttention):
    """A forward with one fused QKV GEMM, QK norms, and one op that rotates queries and keys in place."""

    def __init__(self, module: Any, dtype: torch.dtype, asked: Asked) -> None:
        super().__init__(module, dtype, asked)
        function = forward_of(module)
        interface, turns = seams(function)
        strange = set(function.__code__.co_names) - _JOINED - {interface, *turns} - settings(module).keys()
        turn = next(iter(turns.values()), None)
        linears = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        if strange or turn is None or not all(map(width, linears)):
            raise Unknown("its forward is not that of one product")
        self.turn, self.function, self.interface = turn, function, str(interface)
        # Parameters that the forward may use in an unknown way. A call that passes one of them falls back.
        self.more = set(self.parameters[2:]) - {"position_embeddings", "attention_mask"} - OPTIONS - IGNORED
        self.qkv = Joined(*linears)
        self.sizes = [linear.out_features for linear in self.qkv.linears]
        self.norms = [getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]
        # QK norms normalise each head, or all heads of a token together.
        weight = getattr(self.norms[0], "weight", None) if self.norms else None
        self.norms_heads = weight is None or weight.shape[-1] == module.head_dim
        rotary_op = "flashinfer_rotary_embedding" if turn.in_float32[0] else "rotary_embedding"
        self.op = f"one product, {rotary_op}, and with a PagedCache {self.paged}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.parameters[1:], args, strict=False)) | renamed(kwargs, self.parameters)
        hidden_states, step, module = given.pop(self.parameters[1]), given.pop("position_embeddings", None), self.module
        if not self.serves(hidden_states):
            return self.original(*args, **kwargs)
        name = next(name for name in CACHE_NAMES if name in self.parameters)
        cache, mask = given.pop(name, None), given.pop("attention_mask", None)
        is_known = cache is None or isinstance(cache, (PagedCache, DynamicCache, StaticCache))
        is_told_more = any(given.get(parameter) is not None for parameter in self.more)
        if not isinstance(step, Step) or not is_known or is_told_more:
            return self._bound(args, kwargs)
        query, key, value = self._heads(hidden_states)
        if not self.turn.in_place(step, query, key):
            return self._bound(args, kwargs)
        states, past = (key.transpose(1, 2), value.transpose(1, 2)), None
        if isinstance(cache, PagedCache):
            past = Past(cache, step, self.asked.function)
            cache.written = layer = cache.layers[module.layer_idx]
            layer.reserve(*states)
            if step.slots is None:
                step.slots = layer.slots_for(key.shape[1])
            layer.write(key, value, step.slots)
            states = layer.kept()
        elif cache is not None:
            states = cache.update(*states, module.layer_idx)
        interface = self.function.__globals__[self.interface]
        function = interface.get_interface(module.config._attn_implementation, self.asked.eager)
        options = self.asked.options | {"dropout": 0.0} | given
        out, weights = attend(function, module, query.transpose(1, 2), *states, mask, pyops_past=past, **options)
        return module.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights

    def _heads(self, hidden_states: Tensor) -> list[Tensor]:
        """Queries, keys and values [batch, count, num_heads, head_dim]. The caller may overwrite queries and keys."""
        parts = list(self.qkv(hidden_states).split(self.sizes, -1))
        heads = [part.unflatten(-1, (-1, self.module.head_dim)) for part in parts]
        for i, norm in enumerate(self.norms):
            normalised = norm(heads[i]) if self.norms_heads else norm(parts[i]).view(heads[i].shape)
            # A hook may have kept the output of the norm, so a copy is rotated.
            heads[i] = normalised.clone() if hooked(norm) else normalised
        return heads

    def serving(self) -> str:
        return self.op + self.qkv.note()

    def remove(self) -> None:
        super().remove()
        self.qkv.part()


def attention_of(module: Any, rotary: Any, dtype: torch.dtype, trials: Trials) -> BoundAttention:
    """The fastest replacement of an attention module that agrees with it in prefill and decode.

    Args:
        rotary: the module that computes its cosines and sines, or None.
        dtype: dtype of the model. The results must agree to `CLOSE` in float32, to `ROUNDED` in 16 bits.

    Raises:
        Unknown: no replacement agrees.
    """
    # If a forward uses layer_idx only to update the cache, layers with equal settings share one trial.
    layer = module.layer_idx if _counts_layers(module) else _settings_of_layer(module.config, module.layer_idx)
    replacement, asked = trials.outcome(module, partial(_tried, rotary, dtype), rotary, layer)
    return replacement(module, dtype, asked)


def _counts_layers(module: Any) -> bool:
    """Whether layer_idx matters beyond the cache update: the forward, or a function near it, reads it elsewhere."""
    function = forward_of(module)
    named = [code.argval for code in dis.get_instructions(function)]
    called = (function.__globals__.get(name) for name in function.__code__.co_names)
    methods = (value for kind in type(module).__mro__ for name, value in vars(kind).items() if name != "__init__")
    others = {inspect.unwrap(each) for each in (*called, *methods) if inspect.isfunction(each)} - {function}
    return named.count("layer_idx") > 1 or any("layer_idx" in each.__code__.co_names for each in others)


def _settings_of_layer(config: Any, layer_idx: int) -> Any:
    """The settings of one layer: its entries in those lists of the configuration that have one entry per layer."""
    lists = {name: value for name, value in vars(config).items() if isinstance(value, (list, tuple))}
    count = getattr(config, "num_hidden_layers", None)
    return tuple((name, str(value[layer_idx])) for name, value in lists.items() if len(value) == count)


def _tried(rotary: Any, dtype: torch.dtype, module: Any) -> tuple[type[BoundAttention], Asked]:
    """Try the replacements of an attention module; returns the class that agrees and its argument `asked`.

    Raises:
        Unknown: no replacement agrees.
    """
    function = forward_of(module)
    bound_forward(function)  # raises Unknown if the forward uses no attention interface
    interface, _ = seams(function)
    asked, played = Asked(function.__globals__[interface]), played_by_stand_ins(module, torch.float32)
    _results(played, partial(bind(function, **{str(interface): asked}), played), None, rotary, torch.float32)
    forms, why = [JoinedAttention, BoundAttention], "its attention function is not that of the ops"
    # CPUs of older versions of torch lack functions of float16.
    rounded = dtype if dtype == torch.float32 else torch.bfloat16
    for each in dict.fromkeys((torch.float32, rounded)):
        played = played_by_stand_ins(module, each)
        theirs = _results(played, partial(function, played), DynamicCache(), rotary, each)
        for form in list(forms):
            try:
                paged = PagedCache(played.config)
                paged.layers[module.layer_idx] = layer = _Watched(None)
                ours = _results(played, tried(partial(form, played, each, asked)).forward, paged, rotary, each)
            except (Unknown, OpError) as reason:
                why = str(reason)
                forms.remove(form)
            else:
                tolerance = CLOSE if each == torch.float32 else ROUNDED
                if not (layer.has_attended and agree(ours, theirs, tolerance)):
                    forms.remove(form)
    if not forms:
        raise Unknown(why)
    return forms[0], asked


class _Watched(PagedLayer):
    """A cache layer that records whether `attend` was called."""

    has_attended = False

    def attend(self, *args: Any) -> Tensor:
        self.has_attended = True
        return super().attend(*args)


def played_by_stand_ins(module: Any, dtype: torch.dtype) -> Any:
    """A twin with stand-ins as projections, and an attention implementation that `attend` supports."""
    parts = {
        name: StandIn(width(part) or 0, seed)
        for seed, (name, part) in enumerate(module.named_children())
        if width(part)
    }
    made = twin(module, parts, dtype)
    if made.config._attn_implementation not in IMPLEMENTATIONS:
        made.config = copy.copy(made.config)
        made.config._attn_implementation = "eager"
    return made


def _results(played: Any, forward: Callable[..., Any], cache: Any, rotary: Any, dtype: torch.dtype) -> list[Tensor]:
    """The outputs of a forward in prefill and in one decode step, and the inputs of its projections."""
    signature = inspect.signature(forward_of(played)).parameters
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.values())
    stand_ins = [part for part in played.children() if isinstance(part, StandIn)]
    results = []
    for count in (_PROMPT, 1):
        mask = torch.ones(1, 1, count, count, dtype=torch.bool, device="cpu").tril() if count > 1 else None
        if mask is not None and played.config._attn_implementation == "eager":
            mask = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)
        hidden = randn(1, count, _HIDDEN, seed=count, dtype=dtype)
        angles = (
            (hidden[..., :0], hidden[..., :0])
            if rotary is None
            else angles_of(rotary, played.config, dtype, played.layer_idx, count)
        )
        known = {
            "attention_mask": mask,
            "position_embeddings": Step(hidden, *angles),
            **dict.fromkeys(CACHE_NAMES, cache),
        }
        given = {name: value for name, value in known.items() if name in signature}
        if takes_more or "position_ids" in signature:
            given["position_ids"] = POSITIONS + torch.arange(count, dtype=torch.int64, device="cpu")[None]
        for stand_in in stand_ins:
            stand_in.given.clear()
        found = tried(partial(forward, hidden, **given))
        results += [found[0], *(x for stand_in in stand_ins for x in stand_in.given)]
    return results
