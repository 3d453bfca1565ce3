"""Attention without a cache (encoders, vision towers): the module's forward with an op as attention function."""

from __future__ import annotations

import inspect
import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from ...ops.attention import attention_varlen
from .attention import CLOSE, ROUNDED, Asked, played_by_stand_ins
from .cache import readable
from .replacement import Replacement, renamed
from .seams import IMPLEMENTATIONS, bind, is_plain, seams
from .trial import StandIn, Trials, Unknown, agree, forward_of, randn, tried

_BATCH, _TOKENS, _PADDED = 2, 5, 2  # sizes of a trial; _PADDED is the number of masked keys of a sequence


def is_encoder_attention(module: Any) -> bool:
    """Whether a module uses transformers' attention interface and its attention is not causal."""
    function = forward_of(module)
    asks = any(isinstance(function.__globals__.get(name), AttentionInterface) for name in function.__code__.co_names)
    is_one = getattr(module, "is_causal", True) is False and not getattr(module, "is_decoder", False)
    return asks and is_one and function.__code__.co_argcount > 1 and hasattr(module, "config")


class Keys(NamedTuple):
    """The keys [batch * length] that the queries of each sequence attend to.

    Attributes:
        rows: [num_keys]: indices of the keys, of all sequences one after another; None for all keys.
        starts: [batch + 1] int32: the index in `rows` of each sequence's first key, then num_keys.
    """

    rows: Tensor | None
    starts: Tensor


class Masks:
    """Reads attention masks. All layers of a forward pass have the same mask, which is read once."""

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[Tensor], int, int, Keys | None] | None = None

    def keys(self, mask: Tensor | None, key: Tensor) -> Keys | None:
        """The unmasked keys of `key` [batch, num_kv_heads, length, head_dim]; None if they differ between queries."""
        batch, _, length, _ = key.shape
        if mask is None:
            return Keys(None, _starts(batch, length, key.device))
        is_kind = mask.dtype == torch.bool or mask.is_floating_point()
        is_sized = mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[1] == 1 and mask.shape[3] == length
        if not (is_kind and is_sized and readable(mask)):
            return None
        if mask.is_inference():  # inference tensors have no version counter, so nothing is cached
            return _read(mask, batch)
        if self._known is not None:
            known, version, size, found = self._known
            if (version, size) == (mask._version, batch) and known() is mask:
                return found
        found = _read(mask, batch)
        self._known = weakref.ref(mask), mask._version, batch, found
        return found


def _starts(count: int, length: int, device: Any) -> Tensor:
    return length * torch.arange(count + 1, dtype=torch.int32, device=device)


def _read(mask: Tensor, batch: int) -> Keys | None:
    """`Masks.keys` of a mask [1 or batch, 1, 1 or count, length], without the cache."""
    is_bool = mask.dtype == torch.bool
    attended, hidden = (mask, ~mask) if is_bool else (mask == 0, mask <= torch.finfo(mask.dtype).min / 2)
    first = attended[:, 0, :1]
    # A sequence without keys is left to transformers, which returns NaN or the mean of all values for it.
    is_of_keys = (attended | hidden) & (attended == first[:, None])
    if not is_of_keys.all() & first.any(-1).all():
        return None
    left = first[:, 0].expand(batch, -1)
    counts = left.sum(-1, dtype=torch.int32)
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
    return Keys(left.flatten().nonzero()[:, 0], starts)


class Interface:
    """transformers' attention interface with the op in place of one of its functions.

    Args:
        original: the interface that the module's file imports.
        function: the function that the op agrees with.
        masks: the masks of the model.
    """

    def __init__(self, original: AttentionInterface, function: Any, masks: Masks) -> None:
        self.original, self.function, self.masks = original, function, masks

    def get_interface(self, name: str, default: Any) -> Any:
        found = self.original.get_interface(name, default)
        return self.attend if found is self.function else found

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Any:
        """The result of the attention function, by the op if possible. Arguments are those of `seams.attend`."""
        out = None if args else self.computed(module, query, key, value, mask, kwargs)
        return self.function(module, query, key, value, mask, *args, **kwargs) if out is None else (out, None)

    def computed(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor | None:
        """The result of the op, [batch, count, num_heads, head_dim]; None if the op does not support the arguments."""
        is_sized = query.shape[:2] == key.shape[:2] and key.shape[:3] == value.shape[:3] and query.numel() * key.numel()
        of_one_dtype = query.dtype is key.dtype is value.dtype and value.shape[3] <= query.shape[3]
        is_told_more = kwargs.get("s_aux") is not None or any(
            map(kwargs.get, ("is_causal", "softcap", "sliding_window"))
        )
        if not (is_sized and of_one_dtype and is_plain(module, kwargs)) or is_told_more:
            return None
        keys = self.masks.keys(mask, key)
        if keys is None:
            return None
        batch, heads, count, head_dim = query.shape
        queries, rows, values = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        if keys.rows is not None:
            rows, values = rows[keys.rows], values[keys.rows]
        out = queries.new_empty(batch * count, heads, value.shape[3])
        scale = head_dim**-0.5 if kwargs.get("scaling") is None else kwargs["scaling"]
        starts = _starts(batch, count, query.device)
        attention_varlen(out, queries, rows, values, starts, keys.starts, scale, False)
        return out.unflatten(0, (batch, count))


class EncoderAttention(Replacement):
    """The module's own forward, with an op as its attention function.

    Args:
        masks: the masks of the model.

    Raises:
        Unknown: the forward uses no attention interface, or the attention function computes something else.
    """

    op = "its own forward, attention_varlen"

    def __init__(self, module: Any, dtype: torch.dtype, trials: Trials, masks: Masks) -> None:
        super().__init__(module, dtype)
        function = forward_of(module)
        self.parameters = tuple(inspect.signature(function).parameters)
        name, tried_function = trials.outcome(module, partial(_tried, dtype))
        self.bound = bind(function, **{name: Interface(function.__globals__[name], tried_function, masks)})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states = args[0] if args else kwargs.get(self.parameters[1])
        if not isinstance(hidden_states, Tensor) or not self.serves(hidden_states):
            return self.original(*args, **kwargs)
        return self.bound(self.module, *args, **renamed(kwargs, self.parameters))


class _Watched(Interface):
    """An interface that counts the calls that the op served, and those that it did not."""

    served = left = 0

    def computed(self, *args: Any) -> Tensor | None:
        found = super().computed(*args)
        self.served, self.left = self.served + (found is not None), self.left + (found is None)
        return found


def _tried(dtype: torch.dtype, module: Any) -> tuple[str, Any]:
    """The global name of the attention interface in a forward, and the function that the op agrees with.

    Raises:
        Unknown: the op does not agree.
    """
    function = forward_of(module)
    name = str(seams(function)[0])
    implementation = getattr(module.config, "_attn_implementation", None)
    if implementation not in IMPLEMENTATIONS:
        raise Unknown(f"its attention is {implementation}")
    original, given = function.__globals__[name], _arguments(module)
    asked = Asked(original)
    _results(played_by_stand_ins(module, torch.float32), bind(function, **{name: asked}), given, torch.float32)
    # CPUs of older versions of torch lack functions of float16.
    for each in dict.fromkeys((torch.float32, torch.float32 if dtype == torch.float32 else torch.bfloat16)):
        made, ours = played_by_stand_ins(module, each), _Watched(original, asked.function, Masks())
        expected = _results(made, function, given, each)
        found = _results(made, bind(function, **{name: ours}), given, each)
        if ours.left or not ours.served:
            raise Unknown("no op computes what it asks of its attention function")
        if not agree(found, expected, CLOSE if each == torch.float32 else ROUNDED):
            raise Unknown("its attention function is not that of the op")
    return name, asked.function


def _arguments(module: Any) -> list[dict[str, Any]]:
    """Arguments of two calls in float32: without a mask, and with a mask of the last keys of a sequence."""
    parameters = inspect.signature(forward_of(module)).parameters
    sizes = [size for part in module.children() if isinstance(size := getattr(part, "in_features", None), int)]
    hidden = {list(parameters)[1]: randn(_BATCH, _TOKENS, sizes[0] if sizes else 16, seed=1)}
    if "position_embeddings" in parameters and isinstance(getattr(module, "head_dim", None), int):
        hidden["position_embeddings"] = tuple(randn(1, _TOKENS, module.head_dim, seed=seed) for seed in (2, 3))
    if "attention_mask" not in parameters:
        return [hidden]
    mask = torch.ones(_BATCH, 1, _TOKENS, _TOKENS, dtype=torch.bool, device="cpu")
    mask[-1, :, :, -_PADDED:] = False
    return [hidden | {"attention_mask": each} for each in (None, mask)]


def _results(module: Any, function: Any, calls: list[dict[str, Any]], dtype: torch.dtype) -> list[Tensor]:
    """The outputs of a forward, and the inputs of its projections, for several calls in `dtype`."""
    stand_ins = [part for part in module.children() if isinstance(part, StandIn)]
    is_eager, least = module.config._attn_implementation == "eager", torch.finfo(dtype).min

    def of_dtype(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(of_dtype, value))
        if isinstance(value, Tensor) and value.dtype == torch.bool:
            return torch.where(value, 0.0, least).to(dtype) if is_eager else value
        return value if value is None else value.to(dtype)

    found = []
    for given in calls:
        for stand_in in stand_ins:
            stand_in.given.clear()
        result = tried(partial(function, module, **{name: of_dtype(value) for name, value in given.items()}))
        found += [result if isinstance(result, Tensor) else result[0], *(x for part in stand_ins for x in part.given)]
    return found
