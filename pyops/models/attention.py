"""What the layers of a Llama are made of: attention over a paged cache, MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import torch
from ..ops.activation import silu_and_mul
from ..ops.attention import paged_attention_v1, paged_attention_varlen
from ..ops.cache import reshape_and_cache_flash
from ..ops.norm import rms_norm
from ..ops.rotary import rotary_embedding
from .batch import Batch
from .config import Config
from .linear import Place

if TYPE_CHECKING:
    from torch import Tensor


class Attention:
    """Attention with a rotary embedding and grouped queries. It keeps keys and values, in blocks of tokens.

    Args:
        config: sizes and options.
        sliding_window: the number of last tokens to attend to; 0 for all.
        place: of the weights.
    """

    slot_bytes = 0

    def __init__(self, config: Config, sliding_window: int, place: Place) -> None:
        head_dim, kv_size = config.head_dim, config.num_key_value_heads * config.head_dim
        self.config, self.sliding_window, self.place = config, sliding_window, place
        self.sizes = {"q_proj": config.num_attention_heads * head_dim, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = place.linear(self.sizes, config.hidden_size, config.qkv_bias)
        self.q_norm, self.k_norm = (place.empty(head_dim) if config.qk_norm else None for _ in range(2))
        self.o = place.linear({"o_proj": config.hidden_size}, self.sizes["q_proj"], config.o_bias)
        self.sinks = torch.empty(config.num_attention_heads, device=place.device) if config.sinks else None
        # The scale of an fp8 cache, for the signatures of ops. No kernel reads it, as this cache has the model's dtype.
        self._one = torch.ones(1, device=place.device)
        self.token_bytes = 2 * kv_size * place.dtype.itemsize

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        own = {"q_norm.weight": self.q_norm, "k_norm.weight": self.k_norm, "sinks": self.sinks}
        found = {name: tensor for name, tensor in own.items() if tensor is not None}
        return found | self.qkv.tensors() | self.o.tensors()

    def new_cache(self, num_blocks: int, block_size: int, num_slots: int) -> tuple[Tensor, ...]:
        """Keys and values: each [num_blocks, block_size, num_key_value_heads, head_dim]."""
        shape = (2, num_blocks, block_size, self.config.num_key_value_heads, self.config.head_dim)
        return tuple(torch.empty(shape, dtype=self.place.dtype, device=self.place.device))

    def __call__(self, hidden: Tensor, batch: Batch, cache: tuple[Tensor, ...], cos_sin: Tensor) -> Tensor:
        config, head_dim = self.config, self.config.head_dim
        qkv = self.qkv(hidden)
        query, key, value = (part.unflatten(-1, (-1, head_dim)) for part in qkv.split(list(self.sizes.values()), -1))
        if config.qk_norm:
            rms_norm(query, query, self.q_norm, config.rms_norm_eps)
            rms_norm(key, key, self.k_norm, config.rms_norm_eps)
        rotary_embedding(batch.positions, query, key, head_dim, cos_sin, True)
        key_cache, value_cache = cache
        scales = ("auto", self._one, self._one)
        reshape_and_cache_flash(key, value, key_cache, value_cache, batch.slot_mapping, *scales)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        block_size = key_cache.shape[1]
        max_seq_len = batch.block_tables.shape[1] * block_size
        past = (key_cache, value_cache, config.num_key_value_heads, head_dim**-0.5)
        window, sinks, steps = self.sliding_window, self.sinks, batch.num_decodes
        if steps:
            texts = batch.block_tables[:steps], batch.seq_lens[:steps], block_size, max_seq_len, None
            paged_attention_v1(out[:steps], query[:steps], *past, *texts, *scales, sliding_window=window, sinks=sinks)
        if steps < len(batch.seq_lens):
            prompts = batch.block_tables[steps:], batch.seq_lens[steps:], batch.cu_seqlens_of_prompts, block_size
            paged_attention_varlen(
                out[steps:], query[steps:], *past, *prompts, *scales, sliding_window=window, sinks=sinks
            )
        return self.o(out.flatten(1))


class MLP:
    """``down(silu(gate(x)) * up(x))``; gate and up are one matrix.

    Args:
        config: sizes and options.
        place: of the weights.
        intermediate_size: channels, where they are not those of `config`.
    """

    def __init__(self, config: Config, place: Place, intermediate_size: int | None = None) -> None:
        hidden_size, self.intermediate_size = config.hidden_size, intermediate_size or config.intermediate_size
        sizes = dict.fromkeys(("gate_proj", "up_proj"), self.intermediate_size)
        self.gate_up = place.linear(sizes, hidden_size, config.mlp_bias)
        self.down = place.linear({"down_proj": hidden_size}, self.intermediate_size, config.mlp_bias)

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        return self.gate_up.tensors() | self.down.tensors()

    def __call__(self, hidden: Tensor) -> Tensor:
        gate_up = self.gate_up(hidden)
        activated = gate_up.new_empty(gate_up.shape[0], self.intermediate_size)
        silu_and_mul(activated, gate_up)
        return self.down(activated)
