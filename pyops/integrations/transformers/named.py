"""The name "pyops" in transformers' own interfaces: `attn_implementation="pyops"`, `experts_implementation="pyops"`.

Importing this package registers both. A call that the ops do not support, and no others, is computed by transformers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...errors import ModelError
from ...ops.attention import attention_varlen
from .cache import readable
from .experts import Form, computed, form_of, lay_out
from .trial import Trials, Unknown, forward_of

NAME = "pyops"
# Tensors that attention functions get and the ops serve, or neither "sdpa" nor "eager" reads.
_TENSORS = {"s_aux", "position_ids", "cache_position"}


class Span(NamedTuple):
    """The keys that the queries of each sequence of a batch attend to.

    Attributes:
        starts, ends: [batch] int64: the first key that any query attends to, and the key after the last one.
        causal: whether the queries are the last tokens before `ends`, and attend to no later token.
        window: keys that a query attends to, up to its own; 0 for all.
    """

    starts: Tensor
    ends: Tensor
    causal: bool
    window: int


# {mask: its version, its sliding window, and what was read of it}. The layers of a forward share it.
_spans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_forms: WeakIdKeyDictionary = WeakIdKeyDictionary()  # {module with experts: their form, None for one that no op has}
_trials = Trials()


def register() -> None:
    """Make "pyops" a name of transformers' interfaces of attention, its masks, and experts."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers, by `attention_varlen`.

    Masks are those of "sdpa": None, causal or not, with a sliding window, padded on either side of a sequence. A mask
    is read once for all layers, which synchronises with the device. Other masks, dropout, gradients, mixed dtypes,
    position biases, and masks while a graph is traced or captured are left to "sdpa"; with a soft cap or sinks, which
    "sdpa" does not have, to "eager".

    Args:
        query, key, value: [batch, heads, count or length, head_dim].

    Returns:
        [batch, count, heads, head_dim], and None.

    Raises:
        ModelError: the ops do not support the call, and the file of the module has no "eager" attention.
    """
    span = _span_of(module, query, key, value, attention_mask, kwargs)
    if span is None:
        return _by_transformers(module, query, key, value, attention_mask, kwargs)
    batch, heads, count, head_dim = query.shape
    (rows, values), distance = _rows(key, value)
    out = query.new_empty(batch * count, heads, value.shape[3])
    # Between the keys of two sequences lie those of a sequence without queries.
    firsts = distance * torch.arange(batch, dtype=torch.int64, device=key.device)
    key_starts = torch.stack((firsts + span.starts, firsts + span.ends), 1).flatten()
    queries = count * torch.arange(batch + 1, dtype=torch.int64, device=key.device)
    sinks, scale = kwargs.get("s_aux"), kwargs.get("scaling")
    attention_varlen(
        out,
        query.transpose(1, 2).reshape(batch * count, heads, head_dim),
        rows,
        values,
        queries.repeat_interleave(2)[1:-1],
        key_starts,
        head_dim**-0.5 if scale is None else scale,
        span.causal,
        sliding_window=span.window,
        logits_soft_cap=kwargs.get("softcap") or 0.0,
        sinks=None if sinks is None else sinks.float(),
    )
    return out.unflatten(0, (batch, count)), None


def _span_of(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> Span | None:
    """The keys of each sequence; None for a call that the ops do not support."""
    (batch, heads, count, head_dim), length = query.shape, key.shape[2]
    sized = key.shape[0] == batch and key.shape[3] == head_dim >= value.shape[3] and heads % key.shape[1] == 0
    plain = query.dtype is key.dtype is value.dtype and 0 not in (batch, count, length, value.shape[3])
    plain = plain and not (torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value)))
    told_more = any(isinstance(value, Tensor) and name not in _TENSORS for name, value in kwargs.items())
    if not (sized and plain) or told_more or kwargs.get("dropout") or kwargs.get("output_attentions"):
        return None
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if mask is None:
        # "sdpa" would align the first query with the first key.
        if causal and count not in (1, length):
            return None
        every = torch.zeros(batch, dtype=torch.int64, device=key.device)
        return Span(every, every + length, bool(causal) and count > 1, 0)
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[3] != length or not readable(mask):
        return None
    window = kwargs.get("sliding_window") or 0
    if mask.is_inference():  # inference tensors have no version, so what was read is not kept
        return _read(mask, batch, window)
    known = mask._version, window, batch
    if mask not in _spans or _spans[mask][0] != known:
        _spans[mask] = known, _read(mask, batch, window)
    found: Span | None = _spans[mask][1]
    return found


def _read(mask: Tensor, batch: int, window: int) -> Span | None:
    """The keys that a mask [1 or batch, 1, count, length] leaves; None if they are no span of a causal or of a whole
    sequence, with this sliding window or none."""
    attended = (mask if mask.dtype == torch.bool else mask == 0)[:, 0].expand(batch, -1, -1)
    hidden = ~attended if mask.dtype == torch.bool else (mask <= torch.finfo(mask.dtype).min / 2)[:, 0]
    some = attended.any(1)
    count, length = attended.shape[1:]
    starts, ends = some.int().argmax(1), length - some.flip(1).int().argmax(1)
    keys = torch.arange(length, dtype=torch.int64, device=mask.device)
    # The position of each query if they are the last tokens before `ends`.
    own = ends[:, None, None] - count + torch.arange(count, dtype=torch.int64, device=mask.device)[:, None]
    whole = (keys >= starts[:, None, None]) & (keys < ends[:, None, None])
    causal = whole & (keys <= own)
    kinds = [(whole, False, 0), (causal, True, 0), (causal & (keys > own - window), True, window)]
    if not bool((attended | hidden).all() & some.any(1).all()):
        return None
    for expected, is_causal, size in kinds if window else kinds[:2]:
        if torch.equal(attended, expected):
            return Span(starts, ends, is_causal, size)
    return None


def _rows(key: Tensor, value: Tensor) -> tuple[tuple[Tensor, Tensor], int]:
    """Keys and values [rows, heads, head_dim], and the rows from one sequence of the batch to the next: views, unless
    the sequences of keys and of values have other distances."""

    def distance(x: Tensor) -> int:
        step = x.stride(2)
        return int(x.stride(0) // step if x.shape[0] > 1 and step and x.stride(0) % step == 0 else x.shape[2])

    def fits(x: Tensor, rows: int) -> bool:
        is_spaced = x.shape[0] == 1 or x.stride(0) == rows * x.stride(2)
        return bool(x.stride(3) == 1 and x.stride(2) > 0 and is_spaced)

    def viewed(x: Tensor, rows: int) -> Tensor:
        batch, heads, length, size = x.shape
        return x.as_strided(((batch - 1) * rows + length, heads, size), (x.stride(2), x.stride(1), 1))

    rows = distance(key)
    if not (fits(key, rows) and fits(value, rows) and rows >= key.shape[2]):
        key, value = key.contiguous(), value.contiguous()
        rows = key.shape[1] * key.shape[2]
    return (viewed(key, rows), viewed(value, rows)), rows


def _by_transformers(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """The attention function of transformers with the arguments of the call."""
    if not kwargs.get("softcap") and kwargs.get("s_aux") is None and not kwargs.get("output_attentions"):
        found: tuple[Tensor, Tensor | None] = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)
        return found
    eager = forward_of(module).__globals__.get("eager_attention_forward")
    if eager is None:
        raise ModelError(
            type(module).__name__, 'neither the ops nor "sdpa" compute its attention, which has no "eager"'
        )
    if mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True):
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    out, weights = eager(module, query, key, value, mask, **kwargs)
    return out, weights


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """An experts function of transformers, by `fused_experts`.

    The form of a module's experts is tried at its first call, as by `accelerate`. Weights [experts, in, out] are then
    transposed in memory, and keep their shape. Experts of another form, gradients and mixed dtypes are left to
    transformers' own loop over the experts.
    """
    if module not in _forms:
        try:
            _forms[module] = _trials.outcome(module, form_of)
        except Unknown:
            _forms[module] = None
    form: Form | None = _forms[module]
    weights = list(module.parameters(recurse=False))
    needs_grad = torch.is_grad_enabled() and any(one.requires_grad for one in (hidden_states, *weights))
    of_one_dtype = all(one.dtype == hidden_states.dtype for one in weights)
    if form is None or needs_grad or not of_one_dtype or hidden_states.ndim != 2:
        found: Tensor = forward_of(module)(module, hidden_states, top_k_index, top_k_weights)
        return found
    if form.by_inputs and not torch.compiler.is_compiling():
        lay_out(module)
    return computed(module, form, hidden_states, top_k_index, top_k_weights)
