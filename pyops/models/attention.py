"""What the layers of a Llama are made of: projections, attention over a paged cache, MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._core.lazy import torch
from ..ops.activation import silu_and_mul
from ..ops.attention import paged_attention_v1, paged_attention_varlen
from ..ops.cache import reshape_and_cache_flash
from ..ops.linear.skinny_linear import skinny_linear
from ..ops.norm import rms_norm
from ..ops.rotary import rotary_embedding
from .batch import Batch
from .config import Config

if TYPE_CHECKING:
    from torch import Tensor

# Rows up to which skinny_linear is faster than cuBLAS (docs/performance.md, "`skinny_linear`").
_MAX_SKINNY_ROWS = 1


class Place(NamedTuple):
    """The dtype and device of weights."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def linear(self, rows: int, columns: int, bias: bool) -> Linear:
        return Linear(self.empty(rows, columns), self.empty(rows) if bias else None)


class Linear(NamedTuple):
    """A projection, or several of the same input stacked: weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``."""
        if x.shape[0] > _MAX_SKINNY_ROWS or not x.is_cuda:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        skinny_linear(out, x, self.weight, self.bias)
        return out

    def parts(self, **sizes: int) -> dict[str, Tensor]:
        """{name in a checkpoint: view} of the stacked projections, given by their names and rows."""
        return {
            f"{name}.{kind}": part
            for kind, whole in self._asdict().items()
            if whole is not None
            for name, part in zip(sizes, whole.split(list(sizes.values())), strict=True)
        }


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
        self.config, self.sliding_window = config, sliding_window
        self.sizes = {"q_proj": config.num_attention_heads * head_dim, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = place.linear(sum(self.sizes.values()), config.hidden_size, config.qkv_bias)
        self.q_norm, self.k_norm = (place.empty(head_dim) if config.qk_norm else None for _ in range(2))
        self.o = place.linear(config.hidden_size, self.sizes["q_proj"], config.o_bias)
        # The scale of an fp8 cache, for the signatures of ops. No kernel reads it, as this cache has the model's dtype.
        self._one = torch.ones(1, device=place.device)
        self.token_bytes = 2 * kv_size * place.dtype.itemsize

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        norms = {"q_norm.weight": self.q_norm, "k_norm.weight": self.k_norm}
        found = {name: norm for name, norm in norms.items() if norm is not None}
        return found | self.qkv.parts(**self.sizes) | self.o.parts(o_proj=self.config.hidden_size)

    def new_cache(self, num_blocks: int, block_size: int, num_slots: int) -> tuple[Tensor, ...]:
        """Keys and values: each [num_blocks, block_size, num_key_value_heads, head_dim]."""
        shape = (2, num_blocks, block_size, self.config.num_key_value_heads, self.config.head_dim)
        return tuple(torch.empty(shape, dtype=self.qkv.weight.dtype, device=self.qkv.weight.device))

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
        window, steps = self.sliding_window, batch.num_decodes
        if steps:
            texts = batch.block_tables[:steps], batch.seq_lens[:steps], block_size, max_seq_len, None
            paged_attention_v1(out[:steps], query[:steps], *past, *texts, *scales, sliding_window=window)
        if steps < len(batch.seq_lens):
            prompts = batch.block_tables[steps:], batch.seq_lens[steps:], batch.cu_seqlens_of_prompts, block_size
            paged_attention_varlen(out[steps:], query[steps:], *past, *prompts, *scales, sliding_window=window)
        return self.o(out.flatten(1))


class MLP:
    """``down(silu(gate(x)) * up(x))``; gate and up are one matrix."""

    def __init__(self, config: Config, place: Place) -> None:
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up = place.linear(2 * self.intermediate_size, self.hidden_size, config.mlp_bias)
        self.down = place.linear(self.hidden_size, self.intermediate_size, config.mlp_bias)

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        gate_up = self.gate_up.parts(gate_proj=self.intermediate_size, up_proj=self.intermediate_size)
        return gate_up | self.down.parts(down_proj=self.hidden_size)

    def __call__(self, hidden: Tensor) -> Tensor:
        gate_up = self.gate_up(hidden)
        activated = gate_up.new_empty(gate_up.shape[0], self.intermediate_size)
        silu_and_mul(activated, gate_up)
        return self.down(activated)
