"""The parts of the layers of a dense decoder: attention over a paged cache, and MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .._core.system.lazy import torch
from ..ops.activation import (
    gelu_and_mul,
    gelu_fast,
    gelu_new,
    gelu_tanh_and_mul,
    relu2,
    silu_and_mul,
    silu_and_mul_with_clamp,
)
from ..ops.attention import paged_attention_v1, paged_attention_varlen
from ..ops.cache import fused_qk_rope_cache, reshape_and_cache_flash
from ..ops.linear.dense import linear
from ..ops.linear.skinny_linear import skinny_linear
from ..ops.linear.skinny_qkv import skinny_qkv_rope_cache
from ..ops.norm import fused_qk_norm_rope
from ..ops.rotary import rotary_embedding
from ..tuning import batch_invariant
from .batch import Batch
from .config import Config
from .kv_cache import KvScales
from .linear import MAX_SKINNY_ROWS, Linear, Place, ScaledLinear, gpu_of
from .norm import Norm
from .rope import Rope

if TYPE_CHECKING:
    from torch import Tensor


class Attention:
    """Grouped-query attention over a paged cache of keys and values, optionally with a rotary embedding.

    An fp8 cache holds quantized keys and values; the attention kernels multiply them by `scales`.

    Args:
        config: sizes and options.
        sliding_window: the number of last tokens to attend to; 0 for all.
        rope: the rotary embedding; None for none.
        place: dtype, device and quantization of the weights.
    """

    slot_bytes = 0

    def __init__(self, config: Config, sliding_window: int, rope: Rope | None, place: Place) -> None:
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.config, self.sliding_window, self.rope, self.place = config, sliding_window, rope, place
        parts = 2 if config.gates_attention else 1  # rows per query head: the head, and its output gate
        self.sizes = parts * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
        self.qkv = place.linear(named_sizes(config.names.qkv, self.sizes), config.hidden_size, config.qkv_bias)
        self.q_norm, self.k_norm = self._norm(heads), self._norm(kv_heads)
        self.o = place.linear({config.names.o: config.hidden_size}, heads * head_dim, config.o_bias)
        self.sinks = torch.empty(heads, dtype=torch.float32, device=place.device) if config.sinks else None
        self.scales = KvScales(("k_scale", "v_scale"), kv_heads, place.device)
        self.token_size = 2 * self.sizes[1]

    def _norm(self, num_heads: int) -> Norm | None:
        """The norm of `num_heads` query or key heads."""
        config = self.config
        if not config.qk_norm:
            return None
        size = config.head_dim * (num_heads if config.qk_norm == "row" else 1)
        kind, count = replace(config.norms, has_bias=False), num_heads if config.qk_norm == "heads" else 1
        return Norm(kind, config.rms_norm_eps, self.place, size, count)

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        found = {} if self.sinks is None else {"sinks": self.sinks}
        for name, norm in ((self.config.names.q_norm, self.q_norm), (self.config.names.k_norm, self.k_norm)):
            if norm is not None and self.config.qk_norm == "heads":
                weights = norm.weight.unflatten(0, (-1, self.config.head_dim))
                by_head = {f"{name.format(i)}.weight": weight for i, weight in enumerate(weights)}
                found |= by_head if "{}" in name else {f"{name}.weight": weights}
            elif norm is not None:
                found[f"{name}.weight"] = norm.weight
        return found | self.qkv.tensors() | self.o.tensors()

    def new_cache(self, num_blocks: int, block_size: int, num_slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Keys and values: each [num_blocks, block_size, num_key_value_heads, head_dim]."""
        shape = (2, num_blocks, block_size, self.config.num_key_value_heads, self.config.head_dim)
        return tuple(torch.empty(shape, dtype=dtype, device=self.place.device))

    def __call__(self, hidden: Tensor, batch: Batch, cache: tuple[Tensor, ...], tables: dict[Rope, Tensor]) -> Tensor:
        return self.o(self._attended(self.qkv(hidden), batch, cache, tables))

    @property
    def adds(self) -> bool:
        """Whether `add_to` serves these weights."""
        return isinstance(self.qkv, Linear) and isinstance(self.o, Linear) and self.o.bias is None

    def add_to(
        self, residual: Tensor, norm: Norm, batch: Batch, cache: tuple[Tensor, ...], tables: dict[Rope, Tensor]
    ) -> Tensor:
        """``residual + self(norm.of(residual), ...)`` for one token: see `one_token`."""
        assert isinstance(self.qkv, Linear)
        assert isinstance(self.o, Linear)
        if self.rope is not None and self._is_projected_at_once(residual, cache):
            query = self._projected_and_inserted(residual, norm, self.rope, batch, cache, tables[self.rope])
            return self.o.add_to(residual, self._over_cache(query, batch, cache).flatten(1))
        return self.o.add_to(residual, self._attended(self.qkv.of_norm(residual, *norm.terms), batch, cache, tables))

    def _is_projected_at_once(self, residual: Tensor, cache: tuple[Tensor, ...]) -> bool:
        """Whether one kernel computes queries, keys and values."""
        return self.q_norm is None and self._is_fused(residual) and cache[0].dtype == residual.dtype

    def _projected_and_inserted(
        self, residual: Tensor, norm: Norm, rope: Rope, batch: Batch, cache: tuple[Tensor, ...], table: Tensor
    ) -> Tensor:
        """The rotated queries of one token, [1, heads, head_dim]. Its keys and values are inserted into `cache`."""
        assert isinstance(self.qkv, Linear)
        normalised = residual, self.qkv.weight, self.qkv.bias, *norm.terms
        rotated = table, not rope.interleaved, batch.positions, batch.slot_mapping
        query = skinny_qkv_rope_cache.new(*normalised, *rotated, *cache)
        return query.unflatten(-1, (-1, self.config.head_dim))

    def _attended(
        self, projected: Tensor, batch: Batch, cache: tuple[Tensor, ...], tables: dict[Rope, Tensor]
    ) -> Tensor:
        """The heads of the tokens after attention, [num_tokens, heads * head_dim]. Writes `cache`.

        Args:
            projected: queries, keys and values of the tokens, side by side.
        """
        config, head_dim = self.config, self.config.head_dim
        query, key, value = (part.unflatten(-1, (-1, head_dim)) for part in projected.split(list(self.sizes), -1))
        gate = None
        if config.gates_attention:
            query, gate = (part.contiguous() for part in (query[:, ::2], query[:, 1::2]))
        key_cache, value_cache = cache
        scales = self.scales.arguments(key_cache.dtype)
        is_fused = self.rope is not None and self._is_fused(projected)
        if self.rope is not None and is_fused and key_cache.dtype == projected.dtype:
            self._rotate_and_insert(projected, self.rope, batch, cache, tables[self.rope])
        else:
            if self.rope is not None and is_fused and self.q_norm is not None:
                self._normalise_and_turn(projected, self.rope, batch.positions, tables[self.rope])
            else:
                if self.q_norm is not None and self.k_norm is not None:
                    query, key = self._normalised(self.q_norm, query), self._normalised(self.k_norm, key)
                if self.rope is not None:
                    halves = not self.rope.interleaved
                    rotary_embedding(batch.positions, query, key, head_dim, tables[self.rope], halves)
            reshape_and_cache_flash(key, value, key_cache, value_cache, batch.slot_mapping, *scales)
        out = self._over_cache(query, batch, cache)
        return (out if gate is None else out.mul_(gate.sigmoid_())).flatten(1)

    def _over_cache(self, query: Tensor, batch: Batch, cache: tuple[Tensor, ...]) -> Tensor:
        """The heads of the tokens after attention: like `query`, [num_tokens, heads, head_dim]."""
        config, (key_cache, value_cache) = self.config, cache
        if self.rope is not None:
            self.rope.scale_queries(query, batch.positions)
        scales = self.scales.arguments(key_cache.dtype)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        block_size = key_cache.shape[1]
        max_seq_len = batch.block_tables.shape[1] * block_size
        past = (key_cache, value_cache, config.num_key_value_heads, config.attention_scale)
        options: dict[str, Any] = {
            "sliding_window": self.sliding_window,
            "logits_soft_cap": config.multipliers.attention_soft_cap,
            "sinks": self.sinks,
        }
        steps = batch.num_decodes
        if steps:
            texts = batch.block_tables[:steps], batch.seq_lens[:steps], block_size, max_seq_len, None
            paged_attention_v1(out[:steps], query[:steps], *past, *texts, *scales, **options, constant_past=True)
        if steps < len(batch.seq_lens):
            prompts = batch.block_tables[steps:], batch.seq_lens[steps:], batch.cu_seqlens_of_prompts, block_size
            paged_attention_varlen(out[steps:], query[steps:], *past, *prompts, *scales, **options)
        return out

    def _is_fused(self, projected: Tensor) -> bool:
        """Whether one kernel normalises heads, where they have norms, and rotates queries and keys of these sizes."""
        config = self.config
        return (
            (self.q_norm is None or (config.qk_norm, self.q_norm.kind) == ("head", "rms"))
            and not config.gates_attention
            and config.head_dim in (64, 128, 256)
            and projected.element_size() == 2
        )

    def _rotate_and_insert(
        self, projected: Tensor, rope: Rope, batch: Batch, cache: tuple[Tensor, ...], table: Tensor
    ) -> None:
        """Normalise, where there are norms, and rotate the queries and keys in `projected`, [num_tokens, queries, keys,
        values], in place, and insert keys and values into `cache`."""
        config = self.config
        sizes = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        rotated = table, not rope.interleaved, batch.positions, batch.slot_mapping
        key_cache, value_cache = cache
        fused_qk_rope_cache(
            projected,
            *sizes,
            *rotated,
            key_cache,
            value_cache,
            q_weight=None if self.q_norm is None else self.q_norm.weight,
            k_weight=None if self.k_norm is None else self.k_norm.weight,
            eps=config.rms_norm_eps,
            constant_positions=True,
        )

    def _normalise_and_turn(self, projected: Tensor, rope: Rope, positions: Tensor, table: Tensor) -> None:
        """Normalise and rotate the queries and keys in `projected`, [num_tokens, queries, keys, values], in place."""
        config = self.config
        assert self.q_norm is not None
        assert self.k_norm is not None
        heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        weights = self.q_norm.weight, self.k_norm.weight
        epsilon = config.rms_norm_eps
        fused_qk_norm_rope(
            projected, *heads, config.head_dim, epsilon, *weights, table, not rope.interleaved, positions
        )

    def _normalised(self, norm: Norm, heads: Tensor) -> Tensor:
        """Normalise `heads`, [num_tokens, heads, head_dim], in place if the op supports their strides."""
        if self.config.qk_norm != "head":
            norm(heads.flatten(1))
            return heads
        if norm.kind == "gemma":  # gemma_rms_norm needs rows with one stride
            return norm.of(heads.reshape(-1, heads.shape[-1])).view(heads.shape)
        norm(heads)
        return heads


def named_sizes(names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    """{name in a checkpoint: rows} of projections of one input; a single name stands for one fused projection."""
    return dict(zip(names, sizes, strict=True)) if len(names) > 1 else {names[0]: sum(sizes)}


_GATED = {"silu": silu_and_mul, "gelu": gelu_and_mul, "gelu_pytorch_tanh": gelu_tanh_and_mul}
_PLAIN = {"gelu_new": gelu_new, "gelu_fast": gelu_fast, "relu2": relu2}
_TORCH_GELU = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}  # without an op: {activation: approximate of torch's gelu}


class MLP:
    """``down(act(gate(x)) * up(x))``, where gate and up are one matrix, or ``down(act(up(x)))``.

    Args:
        config: sizes and options.
        place: dtype, device and quantization of the weights.
        intermediate_size: channels; None for those of `config`.
        limit: the largest gate, and the largest magnitude of ``up(x)``, with "silu"; 0 for none.
    """

    def __init__(self, config: Config, place: Place, intermediate_size: int | None = None, limit: float = 0.0) -> None:
        hidden_size, self.intermediate_size = config.hidden_size, intermediate_size or config.intermediate_size
        self.activation, self.has_gate, self.limit = config.hidden_act, config.has_gate, limit
        sizes = named_sizes(config.names.gate_up, (self.intermediate_size,) * (2 if self.has_gate else 1))
        self.gate_up = place.linear(sizes, hidden_size, config.mlp_bias)
        self.down = place.linear({config.names.down: hidden_size}, self.intermediate_size, config.mlp_bias)

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        return self.gate_up.tensors() | self.down.tensors()

    def __call__(self, hidden: Tensor) -> Tensor:
        if isinstance(self.down, ScaledLinear) and self._is_plain_silu:
            return self.down.product.of_silu(self.gate_up(hidden))
        return self.down(self._activated(hidden))

    @property
    def _is_plain_silu(self) -> bool:
        return (self.activation, self.has_gate, self.limit) == ("silu", True, 0.0)

    def add_to(self, total: Tensor, hidden: Tensor) -> Tensor:
        """The result and `total`, in the memory of `total` or in new memory."""
        if isinstance(self.down, Linear) and self.down.bias is None and not batch_invariant():
            return self.down.add_to(total, self._activated(hidden))
        return total.add_(self(hidden))

    @property
    def adds(self) -> bool:
        """Whether `add_norm_to` serves these weights."""
        return isinstance(self.gate_up, Linear) and isinstance(self.down, Linear) and self.down.bias is None

    def add_norm_to(self, residual: Tensor, norm: Norm) -> Tensor:
        """``residual + self(norm.of(residual))`` for one token: see `one_token`."""
        assert isinstance(self.gate_up, Linear)
        assert isinstance(self.down, Linear)
        if self._is_plain_silu:
            return self.down.add_to(residual, self.gate_up.of_norm(residual, *norm.terms, "silu_and_mul"))
        return self.down.add_to(residual, self._activated(norm.of(residual)))

    def _activated(self, hidden: Tensor) -> Tensor:
        """The activations, [num_tokens, intermediate_size]."""
        if (weight := self._of_fused_gate(hidden)) is not None:
            if hidden.shape[0] <= MAX_SKINNY_ROWS and not batch_invariant():
                return skinny_linear.new(hidden, weight, constant_weight=True, activation="silu_and_mul")
            activated = hidden.new_empty(hidden.shape[0], self.intermediate_size)
            linear(activated, hidden, weight, None, "silu_and_mul", constant_weight=True)
            return activated
        gate_up = self.gate_up(hidden)
        if not self.has_gate and self.activation in _TORCH_GELU:
            return torch.nn.functional.gelu(gate_up, approximate=_TORCH_GELU[self.activation])
        activated = gate_up.new_empty(gate_up.shape[0], self.intermediate_size)
        if self.limit:
            silu_and_mul_with_clamp(activated, gate_up, self.limit)
        else:
            (_GATED if self.has_gate else _PLAIN)[self.activation](activated, gate_up)
        return activated

    def _of_fused_gate(self, hidden: Tensor) -> Tensor | None:
        """The weight of gate and up if one kernel multiplies by it and activates: plain, of 16 bits, on a GPU.

        docs/performance/products.md, kind gated, compares it with cuBLAS and an activation.
        """
        matrix = self.gate_up
        if not isinstance(matrix, Linear) or matrix.bias is not None or not self._is_plain_silu:
            return None
        return matrix.weight if gpu_of(hidden) is not None and hidden.element_size() == 2 else None
