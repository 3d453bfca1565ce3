"""The seams of an attention forward: global names for transformers' attention interface and for RoPE functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as remembered
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from .cache import PagedCache
from .replacement import CACHE_NAMES, hooked
from .rotary import Step, Turn, turn_of
from .trial import Unknown

IMPLEMENTATIONS = ("sdpa", "eager")  # attention implementations with mask formats that PagedCache reads
PAST = "pyops_past"  # the keyword that forwards pass on to the attention function
# Arguments of attention functions that `attend` supports.
OPTIONS = {"scaling", "softcap", "s_aux", "dropout", "is_causal", "sliding_window", "output_attentions"}
# Arguments that layers and models pass on, but neither "sdpa" nor "eager" reads.
IGNORED = {"position_ids", "use_cache", "cache_position", "output_hidden_states", "return_dict", "deterministic"}
IGNORED |= {*CACHE_NAMES}


class Past(NamedTuple):
    """The additional argument of an attention function.

    Attributes:
        cache: the cache to which keys and values are written.
        step: the state that layers share, or None.
        function: the attention function with which the ops agreed.
    """

    cache: PagedCache
    step: Step | None
    function: Callable[..., Any]


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
    """A transformers attention function. The ops compute it if the module has just written to a PagedCache.

    Args:
        original: transformers' function, for calls that the ops do not support.
        query, key, value: [batch, num_heads, count or length, head_dim].
        pyops_past: the cache; None without a PagedCache.
        kwargs: further arguments from the module.
    """
    layer = None if pyops_past is None else pyops_past.cache.take_written()
    is_served = pyops_past is not None and original is pyops_past.function and not args
    is_served &= query.dtype is key.dtype is value.dtype
    is_causal = getattr(module, "is_causal", True) and kwargs.get("is_causal") is not False
    if pyops_past is not None and layer is not None and is_served and is_causal and is_plain(module, kwargs):
        step = pyops_past.step
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


def is_plain(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the ops support the attention, mask aside: no dropout, no returned weights, only known arguments."""
    config = module.config
    return (
        config._attn_implementation in IMPLEMENTATIONS
        # A hook may read the weights that "eager" returns, even if output_attentions is false.
        and not (config._attn_implementation == "eager" and hooked(module))
        and not kwargs.get("dropout")
        and not kwargs.get("output_attentions", getattr(config, "output_attentions", False))
        and all(value is None or name in OPTIONS or name in IGNORED for name, value in kwargs.items())
    )


def _windows(module: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Candidates for the sliding window of a layer, the likeliest first; 0 for none."""
    config = module.config
    of_config = getattr(config, "sliding_window", None) or 0
    if torch.compiler.is_compiling() and of_config and "sliding_window" not in kwargs:
        return ()  # only the mask tells, and it cannot be read while compiling
    return kwargs.get("sliding_window") or 0, 0, of_config


class Interface:
    """transformers' attention interface, with `attend` around every function.

    Args:
        original: the interface that the module's file imports.
    """

    def __init__(self, original: AttentionInterface) -> None:
        self.original = original

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return partial(attend, self.original.get_interface(name, default))


def bind(function: Any, **names: Any) -> Any:
    """A copy of the function with other values for some of its globals."""
    # Without `__name__`, torch.compile looks globals up in this dictionary and not in the original module.
    values = {name: value for name, value in function.__globals__.items() if name != "__name__"} | names
    bound = FunctionType(function.__code__, values, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def seams(function: Any) -> tuple[str | None, dict[str, Turn]]:
    """The global name of the attention interface in a forward, and {global name: rotation} of its RoPE functions."""
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    interface = next((name for name, value in named.items() if isinstance(value, AttentionInterface)), None)
    turns = {name: turn for name, value in named.items() if (turn := turn_of(value)) is not None}
    return interface, turns


@remembered
def bound_forward(function: Any) -> Any:
    """An attention forward with `Interface` and the ops bound to the names of its seams.

    Raises:
        Unknown: the forward uses no attention interface.
    """
    interface, turns = seams(function)
    if interface is None:
        raise Unknown("its forward asks no attention interface")
    return bind(function, **{interface: Interface(function.__globals__[interface])}, **turns)
