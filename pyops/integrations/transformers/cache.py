"""A KV cache for transformers' models that the ops read as a paged cache; a block may begin at any slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation import GenerateDecoderOnlyOutput

from ...ops.attention import paged_attention_v1, paged_attention_varlen
from ...ops.cache import reshape_and_cache_flash

# The name of the cache argument of forwards and `generate`: `cache` from transformers 5.24 on.
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
_BLOCK = 16  # slots of a block
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of keys and values that the ops can write
_STEP = 256  # fewest slots by which an unlimited cache grows


@dataclass(frozen=True)
class Sequences:
    """The sequences of a batch in a layer's cache, the newest tokens included.

    Attributes:
        block_tables, seq_lens: [num_seqs, max_blocks] and [num_seqs] integers.
        cu_seqlens_q: [num_seqs + 1] integers; None if every sequence has one new token. Left padding is a sequence of
            its own, without keys.
        sliding_window: window of the attention, in tokens; 0 for none.
    """

    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    sliding_window: int


class Slots:
    """Keys and values of one layer: a slot for each token of each row of the batch, padding included.

    A block is any 16 consecutive slots, so block tables can begin at the first token after a row's padding, and no
    token is moved.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, max_cache_len: int | None) -> None:
        super().__init__()
        self.max_cache_len = max_cache_len
        self.is_initialized = False
        # A tensor, as in transformers' static cache: a Python number would recompile a compiled step for each length.
        self.cumulative_length: Any = 0 if max_cache_len is None else torch.tensor(0, dtype=torch.int64, device="cpu")
        self.is_regular = True  # whether the ops supported every mask since the first token
        self._written = 0  # tokens written outside of compiled steps

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shapes = tuple(key_states.shape), tuple(value_states.shape)
        if shapes[0] != shapes[1]:
            raise ValueError(f"PagedCache: expected keys and values of one shape, got {shapes[0]} and {shapes[1]}")
        self.device = key_states.device
        self.batch_size, self.num_heads, count, self.head_dim = key_states.shape
        self._one = torch.ones(
            1, dtype=torch.float32, device=self.device
        )  # the scale of an fp8 cache; not read for other dtypes
        room = self.max_cache_len or max(1, -(-count // _STEP)) * _STEP
        self._allocate(room, (key_states.dtype, value_states.dtype))
        self.is_initialized = True

    def reserve(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate slots for `count` more tokens, as in these keys [batch, num_heads, count, head_dim]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.compiler.is_compiling():
            return
        if key_states.shape[0] != self.batch_size:
            raise ValueError(f"PagedCache: expected a batch of {self.batch_size} rows, got {key_states.shape[0]}")
        needed, keys, values = self._written + key_states.shape[2], self.keys, self.values
        given, dtypes = (key_states.dtype, value_states.dtype), (keys.dtype, values.dtype)
        if needed <= self._room and given == dtypes:
            return
        if self.max_cache_len is not None:
            if needed > self._room:
                raise ValueError(f"PagedCache: max_cache_len: expected at least {needed} tokens, got {self._room}")
            raise ValueError(f"PagedCache: expected keys and values of {dtypes}, got {given}")
        promoted = tuple(map(torch.promote_types, dtypes, given))
        if needed <= self._room and promoted == dtypes:
            return
        self._allocate(
            self._room if needed <= self._room else max(2 * self._room, -(-needed // _STEP) * _STEP), promoted
        )
        self.keys[:, :, : keys.shape[2]], self.values[:, :, : values.shape[2]] = keys, values

    def slots_for(self, count: int) -> Tensor:
        """[batch * count] slots of each row's next `count` tokens; an index past the last slot if the row is full."""
        positions = torch.arange(count, dtype=torch.int64, device=self.device) + self.cumulative_length
        slots = self._firsts()[:, None] + positions
        if self.max_cache_len is not None:
            slots = torch.where(positions < self._room, slots, self._key_slots.shape[0])
        return slots.flatten()

    def locate(self, count: int, attention_mask: Tensor | None, windows: tuple[int, ...]) -> Sequences | None:
        """Locate the sequences, including the newest `count` tokens of each row, which are already written.

        Args:
            attention_mask: [batch, 1, count, length]: True or 0.0 where a query attends to a key; None for a plain
                causal mask.
            windows: candidates for the sliding window of the mask; 0 for none. While a graph is traced or captured, the
                mask cannot be read, and the first candidate is taken.

        Returns:
            The sequences; None if the mask is not causal with left padding and one of the windows. After that every
            call returns None, until the layer is reset.
        """
        # Only masks that all heads share are supported.
        self.is_regular &= attention_mask is None or (attention_mask.ndim == 4 and attention_mask.shape[1] == 1)
        if not self.is_regular:
            return None
        firsts, past = self._firsts(), self.cumulative_length - count
        window = 0
        if attention_mask is None:
            starts = torch.zeros_like(firsts)
        else:
            attended = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
            starts = attended.any(-2).int().argmax(-1).flatten().expand(len(firsts))
            # The keys of a single query token are a contiguous run, so its window is folded into `starts`.
            sizes = windows if count > 1 else (0,)
            fitting = (size for size in sizes if _fits(attended, starts, past, size)) if readable(attended) else sizes
            found = next(iter(fitting), None)
            if found is None:
                self.is_regular = False
                return None
            window = found
        blocks = torch.arange(0, self._room, _BLOCK, dtype=torch.int64, device=self.device)
        tables = (firsts + starts)[:, None] + blocks
        lengths = torch.clamp(past + count - starts, max=self._room)
        if count == 1:
            return Sequences(tables, lengths, None, window)
        rows = torch.arange(0, len(firsts) + 1, dtype=torch.int64, device=self.device) * count
        if attention_mask is None:
            return Sequences(tables, lengths, rows, window)
        # Each row is two sequences: the padding among the new tokens, which has no keys, and the other tokens.
        padding = (starts - past).clamp(0, count)
        cu_seqlens_q = torch.cat((torch.stack((rows[:-1], rows[:-1] + padding), -1).flatten(), rows[-1:]))
        seq_lens = torch.stack((torch.zeros_like(lengths), lengths), -1).flatten()
        return Sequences(tables.repeat_interleave(2, 0), seq_lens, cu_seqlens_q, window)

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write the next tokens of each row, [batch, count, num_heads, head_dim], to `slots`."""
        rows = key.flatten(0, 1), value.flatten(0, 1)
        if key.dtype == value.dtype == self._key_slots.dtype == self._value_slots.dtype and key.dtype in _DTYPES:
            caches = self._key_slots[:, None], self._value_slots[:, None]
            reshape_and_cache_flash(*rows, *caches, slots, "auto", self._one, self._one)
        else:
            for kept, row in zip((self._key_slots, self._value_slots), rows, strict=True):
                kept[slots] = row.to(kept.dtype)
        self.cumulative_length += key.shape[1]
        if not torch.compiler.is_compiling():
            self._written += key.shape[1]

    def attend(self, query: Tensor, where: Sequences, scale: float, soft_cap: float, sinks: Tensor | None) -> Tensor:
        """Attention of `query` [batch, count, num_attention_heads, head_dim] over the cache, which has its tokens.

        Returns a tensor of the shape of `query`.
        """
        rows = query.flatten(0, 1)
        if rows.stride()[1:] != (self.head_dim, 1):
            rows = rows.contiguous()
        out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        shape = self.batch_size * self._room, _BLOCK, self.num_heads, self.head_dim
        slot = self.num_heads * self.head_dim
        strides = slot, slot, self.head_dim, 1
        caches = self._key_slots.as_strided(shape, strides), self._value_slots.as_strided(shape, strides)
        past = (*caches, self.num_heads, scale, where.block_tables, where.seq_lens)
        scales = ("auto", self._one, self._one)
        options: dict[str, Any] = {"sliding_window": where.sliding_window, "logits_soft_cap": soft_cap, "sinks": sinks}
        if where.cu_seqlens_q is None:
            paged_attention_v1(out, rows, *past, _BLOCK, self._room, None, *scales, **options)
        else:
            paged_attention_varlen(out, rows, *past, where.cu_seqlens_q, _BLOCK, *scales, **options)
        return out.view(query.shape)

    def _allocate(self, room: int, dtypes: Iterable[torch.dtype]) -> None:
        self._room = room
        # The last block begins at the last slot.
        shape = (self.batch_size * room + _BLOCK - 1, self.num_heads, self.head_dim)
        self._hold(*(torch.zeros(shape, dtype=dtype, device=self.device) for dtype in dtypes))
        if self.max_cache_len is not None:
            self.cumulative_length = self.cumulative_length.to(self.device)
            if not torch.compiler.is_compiling():
                for static in (self._key_slots, self._value_slots, self.cumulative_length, self._one):
                    torch._dynamo.mark_static_address(static)

    def _hold(self, key_slots: Tensor, value_slots: Tensor) -> None:
        """Store these slots, and views of them as rows [batch, num_heads, capacity, head_dim]."""
        self._key_slots, self._value_slots = key_slots, value_slots
        self.keys, self.values = (
            slots[: self.batch_size * self._room].unflatten(0, (self.batch_size, self._room)).transpose(1, 2)
            for slots in (key_slots, value_slots)
        )

    def _move(self, device: torch.device) -> None:
        if self.is_initialized and self._key_slots.device != device:
            slots = self._key_slots, self._value_slots
            self._hold(*(each.to(device, non_blocking=True) for each in slots))

    def _firsts(self) -> Tensor:
        """The first slot of each row of the batch."""
        return torch.arange(self.batch_size, dtype=torch.int64, device=self.device) * self._room

    def kept(self) -> tuple[Tensor, Tensor]:
        """All keys and values [batch, num_heads, tokens, head_dim], as a dynamic or static cache returns them."""
        if self.max_cache_len is not None:
            return self.keys, self.values
        return self.keys[:, :, : self.cumulative_length], self.values[:, :, : self.cumulative_length]


class PagedLayer(Slots, CacheLayerMixin):  # type: ignore[misc]
    """`Slots` with the interface of transformers' cache layers."""

    is_sliding = False
    is_croppable = True

    def __init__(self, max_cache_len: int | None) -> None:
        super().__init__(max_cache_len)
        self.is_compileable = max_cache_len is not None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [batch, num_heads, count, head_dim]; returns all of them, as `kept`."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError(
                "PagedCache: keys and values would lose their gradients: call the model in torch.no_grad()"
            )
        count = key_states.shape[2]
        self.reserve(key_states, value_states)
        self.write(key_states.transpose(1, 2), value_states.transpose(1, 2), self.slots_for(count))
        return self.kept()

    def get_seq_length(self) -> Any:
        return self.cumulative_length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.max_cache_len or self.cumulative_length + query_length), 0

    def get_max_length(self) -> int:
        return self.max_cache_len or -1

    def reset(self) -> None:
        """Forget all tokens. The batch size and dtype of an unlimited layer may then change."""
        if self.max_cache_len is None:
            self.is_initialized = False
        super().reset()
        self._written, self.is_regular = 0, True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest -tokens_to_remove tokens, at most all."""
        if tokens_to_remove > 0:
            raise ValueError(f"PagedCache: crop: expected minus the number of tokens to remove, got {tokens_to_remove}")
        if self.is_initialized:
            self.cumulative_length += max(tokens_to_remove, -int(self.cumulative_length))
            self._written = max(0, self._written + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(
                torch.arange(self.batch_size, dtype=torch.int64, device="cpu").repeat_interleave(repeats)
            )

    def batch_select_indices(self, indices: Any) -> None:
        """Keep these rows of the batch, in this order. `indices` may be anything that indexes a tensor."""
        if not self.is_initialized:
            return
        rows = torch.arange(self.batch_size, dtype=torch.int64, device=self.device)[indices]
        keys, values = (kept.index_select(0, rows) for kept in (self.keys, self.values))
        if len(rows) != self.batch_size:
            self.batch_size = len(rows)
            self._allocate(self._room, (keys.dtype, values.dtype))
        self.keys.copy_(keys)
        self.values.copy_(values)

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        self._move(self.device)


def readable(mask: Tensor) -> bool:
    """Whether the elements of a mask can be read, which is not so while a graph is traced or captured."""
    return not (torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()))


def _fits(attended: Tensor, starts: Tensor, past: Any, sliding_window: int) -> bool:
    """Whether a mask is causal with left padding and this sliding window, 0 for none."""
    count, length = attended.shape[-2:]
    keys = torch.arange(length, dtype=torch.int64, device=attended.device)
    queries = (torch.arange(count, dtype=torch.int64, device=attended.device) + past)[:, None]
    expected = (keys <= queries) & (keys >= starts[:, None, None])
    if sliding_window:
        expected &= keys > queries - sliding_window
    return bool(torch.equal(attended[:, 0].expand(expected.shape), expected))


class PagedCache(Cache):  # type: ignore[misc]
    """A KV cache that the paged ops read; replaces transformers' DynamicCache and StaticCache.

    In a model that is not accelerated it behaves as they do. Layers with a sliding window keep all tokens.

    Args:
        config: the config of the model.
        max_cache_len: most tokens of a row of the batch. All memory is allocated at once, and decode steps can be
            compiled. None: the cache grows, and decode steps cannot be compiled.

    Examples:
        >>> cache = PagedCache(config, max_cache_len=64)  # for generate(prompt, past_key_values=cache)
        >>> keys, values = cache.update(torch.randn(1, 4, 7, 16), torch.randn(1, 4, 7, 16), layer_idx=0)
    """

    def __init__(self, config: Any, max_cache_len: int | None = None) -> None:
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(f"PagedCache: max_cache_len: expected 1 or more, got {max_cache_len}")
        layers = config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(layers=[PagedLayer(max_cache_len) for _ in range(layers)])
        self.written: PagedLayer | None = None  # set by an attention module between its write and its read

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values to a layer: see `PagedLayer.update`."""
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.written = self.layers[layer_idx]
        return found

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, None]]:
        """(keys, values, None) of each layer, as a dynamic cache yields them."""
        for layer in self.layers:
            yield (*(layer.kept() if layer.is_initialized else (None, None)), None)

    def take_written(self) -> PagedLayer | None:
        """The layer that the current attention module has just written; None if it has not. Resets `written`."""
        layer, self.written = self.written, None
        return layer
