"""Attention: the function that a module asks transformers' interface for reads a PagedCache; projections as one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cache as remembered
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import AttentionInterface

from ..._core.errors import OpError
from .cache import PagedCache, PagedLayer
from .joined import Joined
from .replacement import CACHE_NAMES, Replacement, hooked, renamed, served
from .rotary import POSITIONS, Step, Turn, angles_of, turn_of
from .trial import StandIn, Unknown, agree, forward_of, randn, settings, tried, twin, width

IMPLEMENTATIONS = ("sdpa", "eager")  # of attention, whose masks PagedCache reads
_PAST = "pyops_past"  # the argument that forwards pass on to the attention function
# Arguments of attention functions that "sdpa" and "eager" do not read, or that `attend` reads itself.
_OPTIONS = {"scaling", "softcap", "s_aux", "dropout", "is_causal", "sliding_window", "output_attentions"}
_IGNORED = {"position_ids", "use_cache", "cache_position", "output_hidden_states", "return_dict", *CACHE_NAMES}
# What a forward may name, beside its settings, that one product and one op serve: nothing else of its arguments.
_JOINED = {
    "shape",
    "view",
    "transpose",
    "reshape",
    "contiguous",
    "head_dim",
    "layer_idx",
    "config",
    "scaling",
    "training",
}
_JOINED |= {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "update", "get_interface", "getattr"}
_JOINED |= {
    "attention_dropout",
    "sliding_window",
    "attn_logit_softcapping",
    "_attn_implementation",
    "eager_attention_forward",
}
_JOINED |= {"nn", "functional", "dropout"}
_PROMPT, _HIDDEN = 5, 16  # tokens and hidden size of a trial


class Past(NamedTuple):
    """What an attention function needs beside its arguments: a layer of a PagedCache, and what layers share."""

    layer: PagedLayer
    step: Step | None


def attend(
    original: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    pyops_past: Past | None = None,
    **kwargs: Any,
) -> Any:
    """An attention function of transformers': by the ops if the newest keys and values lie in a PagedCache.

    Args:
        original: the function of transformers, for what is not served.
        query, key, value: [batch, num_heads, count or length, head_dim].
        pyops_past: where keys and values lie; None if they do not.
        kwargs: what the module says to the function.
    """
    if pyops_past is not None and not args and _plain(module, kwargs):
        layer, step = pyops_past
        window, known = kwargs.get("sliding_window") or 0, [] if step is None else step.sequences
        found = [where for mask, size, where in known if mask is attention_mask and size == window]
        where = found[0] if found else layer.locate(query.shape[2], attention_mask, _windows(module, kwargs))
        if step is not None and not found:
            step.sequences.append((attention_mask, window, where))
        if where is not None:
            options = kwargs.get("scaling"), kwargs.get("softcap") or 0.0, kwargs.get("s_aux")
            scale = query.shape[-1] ** -0.5 if options[0] is None else options[0]
            sinks = None if options[2] is None else options[2].float()
            return layer.attend(query.transpose(1, 2), where, scale, options[1], sinks), None
    return original(module, query, key, value, attention_mask, *args, **kwargs)


def _plain(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether attention is what the ops compute: causal, by a mask that they know, without weights to return."""
    config = module.config
    return (
        config._attn_implementation in IMPLEMENTATIONS
        and getattr(module, "is_causal", True)
        and kwargs.get("is_causal") is not False
        and not kwargs.get("dropout")
        and not kwargs.get("output_attentions", getattr(config, "output_attentions", False))
        and all(value is None or name in _OPTIONS or name in _IGNORED for name, value in kwargs.items())
    )


def _windows(module: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Sizes that the sliding window of a layer may have, the likeliest first; 0 for none."""
    config = module.config
    of_config = getattr(config, "sliding_window", None) or 0
    if torch.compiler.is_compiling() and of_config and "sliding_window" not in kwargs:
        return ()  # the mask says it, and cannot be read
    return kwargs.get("sliding_window") or 0, 0, of_config


class Interface:
    """transformers' attention interface, of which `attend` is every function.

    Args:
        original: the interface that the module of transformers has.
    """

    def __init__(self, original: AttentionInterface) -> None:
        self.original = original

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return partial(attend, self.original.get_interface(name, default))


def bind(function: Any, **names: Any) -> Any:
    """The function with other values for some of its global names."""
    # Without a module's name torch.compile looks names up here, and not in that module.
    values = {name: value for name, value in function.__globals__.items() if name != "__name__"} | names
    bound = FunctionType(function.__code__, values, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def seams(function: Any) -> tuple[str | None, dict[str, Turn]]:
    """The names by which a forward knows the attention interface, and functions that turn queries and keys."""
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    interface = next((name for name, value in named.items() if isinstance(value, AttentionInterface)), None)
    turns = {name: turn for name, value in named.items() if (turn := turn_of(value)) is not None}
    return interface, turns


@remembered
def bound_forward(function: Any) -> Any:
    """The forward of an attention with `Interface` and the ops for the names of its seams.

    Raises:
        Unknown: it asks no interface.
    """
    interface, turns = seams(function)
    if interface is None:
        raise Unknown("its forward asks no attention interface")
    return bind(function, **{interface: Interface(function.__globals__[interface])}, **turns)


def is_attention(module: Any) -> bool:
    """Whether a module knows its layer and has projections, between which it, or what it derives from, updates a cache."""
    forwards = (inspect.unwrap(vars(kind)["forward"]) for kind in type(module).__mro__ if "forward" in vars(kind))
    updates = any("update" in forward.__code__.co_names for forward in forwards if inspect.isfunction(forward))
    knows = hasattr(module, "layer_idx") and hasattr(module, "config")
    return updates and knows and any(width(part) for part in module.children())


class BoundAttention(Replacement):
    """The module's own forward, whose attention function and rotary embedding are ops.

    Raises:
        Unknown: with these it does not compute what it did.
    """

    paged = "reshape_and_cache_flash, paged_attention_v1, paged_attention_varlen"

    def __init__(self, module: Any, rotary: Any) -> None:
        super().__init__(module)
        function = forward_of(module)
        self.bound = bound_forward(function)
        self.parameters = tuple(inspect.signature(function).parameters)
        turns = "apply_rotary_emb, and " if seams(function)[1] else ""
        self.op = f"{turns}with a PagedCache {self.paged}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states = args[0] if args else kwargs[self.parameters[1]]
        if not served(hidden_states):
            return self.original(*args, **kwargs)
        return self.bound(self.module, *args, **renamed(kwargs, self.parameters), **self._past(args, kwargs))

    def _past(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Past]:
        """What the forward passes on to the attention function; nothing without a PagedCache."""
        values = (*args, *kwargs.values())
        paged = next((value for value in values if isinstance(value, PagedCache)), None)
        if paged is None:
            return {}
        step = next((value for value in values if isinstance(value, Step)), None)
        return {_PAST: Past(paged.layers[self.module.layer_idx], step)}


class JoinedAttention(BoundAttention):
    """Queries, keys and values by one product, norms of their heads, and both turned in place by one op."""

    def __init__(self, module: Any, rotary: Any) -> None:
        super().__init__(module, rotary)
        function = forward_of(module)
        interface, turns = seams(function)
        strange = set(function.__code__.co_names) - _JOINED - {interface, *turns} - settings(module).keys()
        turn = next(iter(turns.values()), None)
        linears = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        if strange or turn is None or not all(map(width, linears)):
            raise Unknown("its forward is not that of one product")
        self.turn, self.interface = turn, function.__globals__[interface]
        self.options, self.eager = _asked(module, interface, rotary)
        self.qkv = Joined(*linears)
        self.sizes = [linear.out_features for linear in self.qkv.linears]
        self.norms = [getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]
        # Of all heads together, or of each.
        self.norms_heads = not self.norms or self.norms[0].weight.shape[-1] == module.head_dim
        rotary_op = "flashinfer_rotary_embedding" if turn.in_float32[0] else "rotary_embedding"
        self.op = f"{rotary_op}, and with a PagedCache {self.paged}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.parameters[1:], args, strict=False)) | renamed(kwargs, self.parameters)
        hidden_states, step, module = given.pop("hidden_states"), given.pop("position_embeddings", None), self.module
        if not isinstance(step, Step) or module.training:
            return super().forward(*args, **kwargs)
        query, key, value = self._heads(hidden_states)
        if not self.turn.in_place(step, query, key):
            return super().forward(*args, **kwargs)
        states, past = (key.transpose(1, 2), value.transpose(1, 2)), None
        name = next(name for name in CACHE_NAMES if name in self.parameters)
        cache, mask = given.pop(name, None), given.pop("attention_mask", None)
        if isinstance(cache, PagedCache):
            past = Past(cache.layers[module.layer_idx], step)
            past.layer.reserve(*states)
            if step.slots is None:
                step.slots = past.layer.slots_for(key.shape[1])
            past.layer.write(key, value, step.slots)
            states = past.layer.kept()
        elif cache is not None:
            states = cache.update(*states, module.layer_idx)
        function = self.interface.get_interface(module.config._attn_implementation, self.eager)
        options = self.options | {"dropout": 0.0} | given
        out, weights = attend(function, module, query.transpose(1, 2), *states, mask, pyops_past=past, **options)
        return module.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights

    def _heads(self, hidden_states: Tensor) -> list[Tensor]:
        """Queries, keys and values [batch, count, num_heads, head_dim], of which the first two may be written."""
        parts = list(self.qkv(hidden_states).split(self.sizes, -1))
        heads = [part.unflatten(-1, (-1, self.module.head_dim)) for part in parts]
        for i, norm in enumerate(self.norms):
            normalised = norm(heads[i]) if self.norms_heads else norm(parts[i]).view(heads[i].shape)
            # What a hook has seen of it is not turned with it.
            heads[i] = normalised.clone() if hooked(norm) else normalised
        return heads

    def remove(self) -> None:
        super().remove()
        self.qkv.part()


class _Asked:
    """An attention interface that keeps what a module says to its function."""

    def get_interface(self, name: str, default: Any) -> Any:
        self.default = default
        return self.keep

    def keep(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        self.options = options
        return query.transpose(1, 2), None


def _asked(module: Any, interface: str | None, rotary: Any) -> tuple[dict[str, Any], Any]:
    """What a module says to its attention function beside dropout, and what it takes for the function of "eager"."""
    asked, played = _Asked(), _played(module)
    _results(played, partial(bind(forward_of(module), **{str(interface): asked}), played), None, rotary)
    return {name: value for name, value in asked.options.items() if name in _OPTIONS - {"dropout"}}, asked.default


def attention_of(module: Any, rotary: Any) -> BoundAttention:
    """What takes the place of an attention: the fastest that computes what it does for a prompt and for a token.

    Args:
        rotary: the module that gives its angles, or None.

    Raises:
        Unknown: nothing does.
    """
    bound_forward(forward_of(module))  # what asks no interface need not be tried
    played = _played(module)
    theirs = _results(played, partial(forward_of(played), played), DynamicCache(), rotary)
    why = "its attention function is not that of the ops"
    for replacement in (JoinedAttention, BoundAttention):
        try:
            paged = PagedCache(played.config)
            paged.layers[module.layer_idx] = layer = _Watched(None)
            ours = _results(played, replacement(played, rotary).forward, paged, rotary)
        except (Unknown, OpError) as reason:
            why = str(reason)
        else:
            if layer.has_attended and agree(ours, theirs):
                return replacement(module, rotary)
    raise Unknown(why)


class _Watched(PagedLayer):
    """A layer that knows whether it was read by the ops."""

    has_attended = False

    def attend(self, *args: Any) -> Tensor:
        self.has_attended = True
        return super().attend(*args)


def _played(module: Any) -> Any:
    """A twin whose projections are stand-ins."""
    parts = {
        name: StandIn(width(part) or 0, seed)
        for seed, (name, part) in enumerate(module.named_children())
        if width(part)
    }
    made = twin(module, parts)
    if made.config._attn_implementation not in IMPLEMENTATIONS:
        made.config = copy.copy(made.config)
        made.config._attn_implementation = "eager"
    return made


def _results(played: Any, forward: Callable[..., Any], cache: Any, rotary: Any) -> list[Tensor]:
    """What a forward gives for a prompt and a token behind it, and what its projections are given on the way."""
    signature = inspect.signature(forward_of(played)).parameters
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.values())
    stand_ins = [part for part in played.children() if isinstance(part, StandIn)]
    results = []
    for count in (_PROMPT, 1):
        mask = torch.ones(1, 1, count, count, dtype=torch.bool, device="cpu").tril() if count > 1 else None
        if mask is not None and played.config._attn_implementation == "eager":
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        hidden = randn(1, count, _HIDDEN, seed=count)
        angles = (hidden[..., :0], hidden[..., :0]) if rotary is None else angles_of(rotary, played.config, count=count)
        known = {
            "attention_mask": mask,
            "position_embeddings": Step(hidden, *angles),
            **dict.fromkeys(CACHE_NAMES, cache),
        }
        given = {name: value for name, value in known.items() if name in signature}
        if takes_more or "position_ids" in signature:
            given["position_ids"] = POSITIONS + torch.arange(count, device="cpu")[None]
        for stand_in in stand_ins:
            stand_in.given.clear()
        found = tried(partial(forward, hidden, **given))
        results += [found[0], *(x for stand_in in stand_ins for x in stand_in.given)]
    return results
