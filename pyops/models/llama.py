"""A decoder of the Llama family on the ops of this library: Llama 2 and 3, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .._core.lazy import torch
from ..ops.activation import silu_and_mul
from ..ops.attention import paged_attention_v1, paged_attention_varlen
from ..ops.cache import reshape_and_cache_flash
from ..ops.linear.skinny_linear import skinny_linear
from ..ops.norm import fused_add_rms_norm, rms_norm
from ..ops.rotary import rotary_embedding
from .config import Config

if TYPE_CHECKING:
    from torch import Tensor

# Rows up to which skinny_linear is faster than cuBLAS (docs/performance.md, "`skinny_linear`").
_MAX_SKINNY_ROWS = 1


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


@dataclass(frozen=True)
class Layer:
    """The weights of a layer. `qkv` is one matrix product, and so is `gate_up`."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    sliding_window: int


@dataclass(frozen=True)
class Batch:
    """The newest tokens of several sequences. One forward pass computes them and adds them to the cache.

    Attributes:
        tokens, positions, slot_mapping: [num_tokens] integers: the tokens, their positions in their sequences and their
            slots in the cache. A token with slot -1 is not added to the cache.
        block_tables: [num_seqs, max_blocks]: the cache blocks of each sequence.
        seq_lens: [num_seqs]: tokens of each sequence, the newest included.
        cu_seqlens_q: [num_seqs + 1]: the first of `tokens` of each sequence, then num_tokens; None if each sequence has
            one token.
    """

    tokens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None


class Llama:
    """The decoder. Its weights are not set: `tensors` gives views to write them to.

    Args:
        config: sizes and options.
        dtype: name of the dtype of weights, activations and cache; None for the dtype of `config`.
        device: device of the weights; on "meta" they take no memory.
    """

    def __init__(self, config: Config, dtype: str | None = None, device: Any = "cpu") -> None:
        self.config = config
        self.device, self.dtype = torch.device(device), getattr(torch, dtype or config.dtype)
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self._split = [heads * config.head_dim, kv_heads * config.head_dim, kv_heads * config.head_dim]

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=self.dtype, device=self.device)

        def linear(rows: int, columns: int, bias: bool) -> Linear:
            return Linear(empty(rows, columns), empty(rows) if bias else None)

        self.embedding = empty(config.vocab_size, hidden)
        self.layers = [
            Layer(
                input_norm=empty(hidden),
                qkv=linear(sum(self._split), hidden, config.qkv_bias),
                q_norm=empty(config.head_dim) if config.qk_norm else None,
                k_norm=empty(config.head_dim) if config.qk_norm else None,
                o=linear(hidden, self._split[0], config.o_bias),
                mlp_norm=empty(hidden),
                gate_up=linear(2 * config.intermediate_size, hidden, config.mlp_bias),
                down=linear(hidden, config.intermediate_size, config.mlp_bias),
                sliding_window=window,
            )
            for window in config.sliding_windows
        ]
        self.norm = empty(hidden)
        self.head = Linear(self.embedding if config.tie_word_embeddings else empty(config.vocab_size, hidden), None)
        # The scale of an fp8 cache, for the signatures of ops. No kernel reads it, as this cache has the model's dtype.
        self._one = torch.ones(1, device=self.device)

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: view of the weights to write the tensor to}."""
        config = self.config
        found = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not config.tie_word_embeddings:
            found["lm_head.weight"] = self.head.weight
        for i, layer in enumerate(self.layers):
            at = f"model.layers.{i}."
            norms = {
                "input_layernorm": layer.input_norm,
                "post_attention_layernorm": layer.mlp_norm,
                "self_attn.q_norm": layer.q_norm,
                "self_attn.k_norm": layer.k_norm,
            }
            found |= {f"{at}{name}.weight": norm for name, norm in norms.items() if norm is not None}
            for merged, names, sizes in (
                (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), self._split),
                (layer.o, ("self_attn.o_proj",), [config.hidden_size]),
                (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj"), [config.intermediate_size] * 2),
                (layer.down, ("mlp.down_proj",), [config.hidden_size]),
            ):
                for kind, whole in merged._asdict().items():
                    if whole is not None:
                        parts = zip(names, whole.split(sizes), strict=True)
                        found |= {f"{at}{name}.{kind}": part for name, part in parts}
        return found

    def randomise(self, seed: int, scale: float = 1.0) -> Llama:
        """Set the weights of norms to 1, all others to normal noise with deviation ``scale / sqrt(columns)``."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for name, tensor in self.tensors().items():
            if name.endswith("norm.weight"):
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, scale * tensor.shape[-1] ** -0.5, generator=generator)
        return self

    def new_cache(self, num_blocks: int, block_size: int) -> Tensor:
        """A paged cache of keys and values: [layers, 2, num_blocks, block_size, num_key_value_heads, head_dim]."""
        config = self.config
        shape = (len(self.layers), 2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def new_cos_sin(self, num_positions: int) -> Tensor:
        """The table of the rotary embedding for texts of up to `num_positions` tokens: [num_positions, head_dim]."""
        return self.config.rope.cos_sin(self.config.head_dim, num_positions, self.device).to(self.dtype)

    def forward(self, batch: Batch, cache: Tensor, cos_sin: Tensor) -> Tensor:
        """Hidden states of the tokens after the last norm: [num_tokens, hidden_size]. Writes `cache`."""
        epsilon = self.config.rms_norm_eps
        residual = self.embedding[batch.tokens]
        hidden = torch.empty_like(residual)
        rms_norm(hidden, residual, self.layers[0].input_norm, epsilon)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer, caches, next_norm in zip(self.layers, cache, next_norms, strict=True):
            hidden = self._attention(layer, hidden, batch, cos_sin, *caches)
            fused_add_rms_norm(hidden, residual, layer.mlp_norm, epsilon)
            gate_up = layer.gate_up(hidden)
            activated = gate_up.new_empty(gate_up.shape[0], self.config.intermediate_size)
            silu_and_mul(activated, gate_up)
            hidden = layer.down(activated)
            fused_add_rms_norm(hidden, residual, next_norm, epsilon)
        return hidden

    def _attention(
        self, layer: Layer, hidden: Tensor, batch: Batch, cos_sin: Tensor, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        config, head_dim = self.config, self.config.head_dim
        qkv = layer.qkv(hidden)
        query, key, value = (part.unflatten(-1, (-1, head_dim)) for part in qkv.split(self._split, -1))
        if config.qk_norm:
            rms_norm(query, query, layer.q_norm, config.rms_norm_eps)
            rms_norm(key, key, layer.k_norm, config.rms_norm_eps)
        rotary_embedding(batch.positions, query, key, head_dim, cos_sin, True)
        scales = ("auto", self._one, self._one)
        reshape_and_cache_flash(key, value, key_cache, value_cache, batch.slot_mapping, *scales)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        block_size = key_cache.shape[1]
        max_seq_len = batch.block_tables.shape[1] * block_size
        past = (key_cache, value_cache, config.num_key_value_heads, head_dim**-0.5, batch.block_tables, batch.seq_lens)
        window = layer.sliding_window
        if batch.cu_seqlens_q is None:
            paged_attention_v1(out, query, *past, block_size, max_seq_len, None, *scales, sliding_window=window)
        else:
            paged_attention_varlen(out, query, *past, batch.cu_seqlens_q, block_size, *scales, sliding_window=window)
        return layer.o(out.flatten(1))
