"""Multi-head latent attention over a paged latent KV cache: the layer, and its absorbed and expanded forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from ..ops.attention import paged_attention_v1, paged_attention_varlen, sm100_cutlass_mla_decode
from ..ops.attention.mla_problem import LATENT_SIZE, ROPE_SIZE
from ..ops.attention.mla_sparse import sparse_mla_attention
from ..ops.cache import concat_and_cache_mla
from ..ops.linear.skinny_bmm import bmm_into
from .custom_op import CustomOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MLAModules", "MultiHeadLatentAttentionWrapper"]

# Heads that the expanded form projects at a time. Their keys and values take 20 KB per token of DeepSeek-V3, instead of
# 82 KB for all 128 heads; a prefill of 512 tokens still gives each SM of an H200 a query tile.
_HEADS_AT_ONCE = 32


def latent_attention(
    query: Tensor,
    up: Tensor,
    entries: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    num_decodes: int,
    scale: float,
    k_scale: Tensor,
    factor: float = 1.0,
    absorbed: Tensor | None = None,
    prefetched: Tensor | None = None,
) -> Tensor:
    """Attention of the newest tokens of sequences: `absorbed_attention` of the first `num_decodes` sequences, which
    have one token each, and `expanded_attention` of the others.

    Args:
        query: [num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim], after the rotary embedding.
        cu_seqlens_q: [num_seqs + 1], each sequence's first token, then num_tokens. Others as in `absorbed_attention`.

    Returns:
        [num_tokens, num_heads * v_head_dim].
    """
    steps, prompts = slice(None, num_decodes), slice(num_decodes, None)
    parts, common = [], (scale, k_scale, factor)
    if num_decodes:
        of_steps = block_tables[steps], seq_lens[steps], *common, None, absorbed, prefetched
        parts.append(absorbed_attention(query[steps], up, entries, *of_steps))
    if num_decodes < len(seq_lens):
        texts = block_tables[prompts], seq_lens[prompts], cu_seqlens_q[prompts] - num_decodes
        parts.append(expanded_attention(query[prompts], up, entries, *texts, *common))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def absorbed_attention(
    query: Tensor,
    up: Tensor,
    entries: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    k_scale: Tensor,
    factor: float = 1.0,
    slots: Tensor | None = None,
    absorbed: Tensor | None = None,
    prefetched: Tensor | None = None,
) -> Tensor:
    """Attention of one token of each sequence, in the absorbed form (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

    All heads share the latent vectors as keys and values (MQA). `sm100_cutlass_mla_decode` computes the sizes that it
    supports; `paged_attention_v1` computes others, with the latent KV as its only KV head.

    Args:
        query: [num_seqs, num_heads, qk_nope_head_dim + qk_rope_head_dim], after the rotary embedding.
        up: [num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]: projects latent vectors to keys and values.
        entries: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], of the queries' dtype or float8_e4m3fn.
        block_tables, seq_lens: as in `paged_attention_v1`.
        scale: of the logits.
        k_scale, factor: the scale of an fp8 cache, [1] float32 and as a Python number; for other caches unread and 1.
        slots: [num_seqs, top_k] int32, those that a token attends to (`sparse_mla_attention`); None for its sequence.
        absorbed: [num_heads, num_seqs, kv_lora_rank], the queries times the projections of keys, if they are known.
        prefetched: rows that a later kernel reads, as of `skinny_linear`.

    Returns:
        [num_seqs, num_heads * v_head_dim].
    """
    rank, rope_size = up.shape[2], entries.shape[2] - up.shape[2]
    plain, turned = query.split([query.shape[2] - rope_size, rope_size], -1)
    up_keys, up_values = up.split([plain.shape[2], up.shape[1] - plain.shape[2]], 1)
    if absorbed is None:
        absorbed = bmm_into(query.new_empty(len(up), len(query), rank), plain.transpose(0, 1), up_keys)
    absorbed = absorbed.transpose(0, 1)
    if (rank, rope_size) == (LATENT_SIZE, ROPE_SIZE):
        out = query.new_empty(absorbed.shape)
        # The op ignores the scale of fp8 values, so the scale multiplies the logits and the result.
        texts = (seq_lens, block_tables) if slots is None else (slots,)
        attend: Callable[..., None] = sm100_cutlass_mla_decode if slots is None else sparse_mla_attention
        attend(out, None, absorbed, turned, entries, *texts, None, scale * factor, 0)
    else:
        joined = torch.cat((absorbed, turned), -1)
        whole, cache, block_size = torch.empty_like(joined), entries.unsqueeze(2), entries.shape[1]
        kind = "fp8" if entries.element_size() == 1 else "auto"
        options = block_size, block_tables.shape[1] * block_size, None, kind, k_scale, k_scale
        paged_attention_v1(whole, joined, cache, cache, 1, scale, block_tables, seq_lens, *options)
        out, factor = whole[..., :rank], 1.0
    values = query.new_empty(len(query), len(up), up_values.shape[1])
    bmm_into(values.transpose(0, 1), out.transpose(0, 1), up_values.transpose(1, 2), factor, prefetched)
    return values.flatten(1)


def expanded_attention(
    query: Tensor,
    up: Tensor,
    entries: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    k_scale: Tensor,
    factor: float = 1.0,
) -> Tensor:
    """Prefill in the expanded form: the cached tokens of the sequences are projected to keys and values of heads, of
    `_HEADS_AT_ONCE` heads at a time into one buffer, from which the attention op reads them.

    Args:
        query: [num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim], after the rotary embedding.
        cu_seqlens_q: as in `paged_attention_varlen`.
        others: as in `absorbed_attention`.

    Returns:
        [num_tokens, num_heads * v_head_dim].
    """
    (num_heads, _, rank), qk_head_dim, is_fp8 = up.shape, query.shape[2], entries.element_size() == 1
    rope_size = entries.shape[2] - rank
    plain_size = qk_head_dim - rope_size
    # Indexed as bytes, because some versions of torch cannot index float8 tensors.
    kept = (entries.view(torch.uint8) if is_fp8 else entries)[block_tables.flatten().clamp(min=0)]
    if is_fp8:
        kept = kept.view(entries.dtype).to(query.dtype).mul_(factor)
    kv_c, k_pe = kept.split([rank, rope_size], -1)
    heads = min(_HEADS_AT_ONCE, num_heads)
    keys = kv_c.new_empty(*kv_c.shape[:2], heads, qk_head_dim)
    keys[..., plain_size:] = k_pe.unsqueeze(2)
    values = kv_c.new_empty(*kv_c.shape[:2], heads, up.shape[1] - plain_size)
    blocks = torch.arange(block_tables.numel(), dtype=torch.int64, device=entries.device).view(block_tables.shape)
    prompts = blocks, seq_lens, cu_seqlens_q, entries.shape[1], "auto", k_scale, k_scale
    out = query.new_empty(*query.shape[:2], values.shape[3])
    for first in range(0, num_heads, heads):
        some = slice(first, first + heads)
        k, v = (whole[:, :, : len(up[some])] for whole in (keys, values))
        up_keys, up_values = up[some].split([plain_size, values.shape[3]], 1)
        for weights, made in ((up_keys, k[..., :plain_size]), (up_values, v)):
            latents = kv_c.flatten(0, 1).expand(len(weights), -1, -1)
            # Not `bmm(out=...)`, which torch.compile cannot trace for tensors that are not dense.
            made.flatten(0, 1).transpose(0, 1).baddbmm_(latents, weights.transpose(1, 2), beta=0)
        paged_attention_varlen(out[:, some], query[:, some], k, v, k.shape[2], scale, *prompts)
    return out.flatten(1)


@dataclass
class MLAModules:
    """Modules of `MultiHeadLatentAttentionWrapper`, by vLLM's names. A projection may return (output, bias)."""

    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Module
    rotary_emb: nn.Module | None
    o_proj: nn.Module
    fused_qkv_a_proj: nn.Module | None = None
    kv_a_proj_with_mqa: nn.Module | None = None
    q_a_layernorm: nn.Module | None = None
    q_b_proj: nn.Module | None = None
    q_proj: nn.Module | None = None
    indexer: nn.Module | None = None
    is_sparse: bool = False
    topk_indices_buffer: Tensor | None = None


@CustomOp.register("multi_head_latent_attention")
class MultiHeadLatentAttentionWrapper(CustomOp):
    """Multi-head latent attention with its projections.

    ``forward(positions, hidden_states, llama_4_scaling=None, kv_cache, block_table, seq_lens, query_start_loc,
    slot_mapping, num_decodes=0)`` takes tokens [num_tokens, hidden_size] at positions [num_tokens], and returns
    [num_tokens, hidden_size]. The latent KV of the tokens, latent vectors and rotated keys, is written to kv_cache
    [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim] at slot_mapping by `pyops.concat_and_cache_mla`. Each
    sequence attends to the first seq_lens of the tokens in its blocks, and its newest tokens are those from
    query_start_loc [num_seqs + 1] on. The first num_decodes sequences have one token each and are computed in the
    absorbed form, by `pyops.sm100_cutlass_mla_decode` if kv_lora_rank is 512 and qk_rope_head_dim is 64, else by
    `pyops.paged_attention_v1`; the others in the expanded form, by `pyops.paged_attention_varlen`. Unlike vLLM's layer,
    which gets the cache from the forward context, this one gets it as an argument. llama_4_scaling multiplies the
    queries.

    Args:
        hidden_size: elements of a hidden state.
        num_heads: heads on this rank.
        scale: multiplies the logits.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: elements of a head: the part of queries and keys without RoPE,
            the part with RoPE, and values, at most the sum of both parts.
        q_lora_rank: elements of the vector from which queries are projected; None to project hidden states.
        kv_lora_rank: elements of a latent vector.
        mla_modules: with `q_lora_rank` fused_qkv_a_proj, q_a_layernorm and q_b_proj, without it q_proj and
            kv_a_proj_with_mqa. kv_b_proj has a plain weight. An indexer is not supported.
        cache_config, quant_config, skip_topk: accepted because vLLM has them.
        prefix: the name of the layer in its model.

    Examples:
        >>> q, kv_a, kv_b, o = map(torch.nn.Linear, (64, 64, 32, 64), (96, 40, 128, 64))
        >>> modules = MLAModules(RMSNorm(32), kv_b, rotary_emb=None, o_proj=o, q_proj=q, kv_a_proj_with_mqa=kv_a)
        >>> attention = MultiHeadLatentAttentionWrapper(64, 4, 24**-0.5, 16, 8, 16, None, 32, modules)
        >>> table, lens, starts = map(torch.IntTensor, ([[2]], [5], [0, 5]))  # a prompt of 5 tokens, in block 2
        >>> batch = {"block_table": table, "seq_lens": lens, "query_start_loc": starts}
        >>> cache, slots = torch.zeros(4, 16, 32 + 8), torch.arange(32, 37)
        >>> with torch.no_grad():
        ...     out = attention(torch.arange(5), torch.randn(5, 64), kv_cache=cache, slot_mapping=slots, **batch)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        mla_modules: MLAModules,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
        skip_topk: bool = False,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.scale, self.prefix = hidden_size, num_heads, scale, prefix
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.qk_head_dim, self.v_head_dim = qk_nope_head_dim + qk_rope_head_dim, v_head_dim
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        name = type(self).__name__
        if v_head_dim > self.qk_head_dim:
            raise ValueError(f"{name}: v_head_dim: expected at most {self.qk_head_dim}, got {v_head_dim}")
        if mla_modules.is_sparse or mla_modules.indexer is not None:
            raise ValueError(f"{name}: mla_modules: an indexer is not supported")
        with_rank, without = ("fused_qkv_a_proj", "q_a_layernorm", "q_b_proj"), ("q_proj", "kv_a_proj_with_mqa")
        for module in without if q_lora_rank is None else with_rank:
            if getattr(mla_modules, module) is None:
                raise ValueError(f"{name}: mla_modules: expected {module} with q_lora_rank={q_lora_rank}, got None")
        for module in (*with_rank, *without, "kv_a_layernorm", "kv_b_proj", "rotary_emb", "o_proj"):
            setattr(self, module, getattr(mla_modules, module))
        self.register_buffer("_one", torch.ones(1, dtype=torch.float32), persistent=False)

    def forward_native(self, positions: Tensor, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._attend(self._natively, positions, hidden_states, *args, **kwargs)

    def forward_cuda(self, positions: Tensor, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._attend(self._by_ops, positions, hidden_states, *args, **kwargs)

    def _attend(
        self,
        attention: Callable[..., Tensor],
        positions: Tensor,
        hidden_states: Tensor,
        llama_4_scaling: Tensor | None = None,
        *,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        slot_mapping: Tensor,
        num_decodes: int = 0,
    ) -> Tensor:
        if self.q_lora_rank is None:
            query, latent = _output(self.q_proj(hidden_states)), _output(self.kv_a_proj_with_mqa(hidden_states))
        else:
            sizes = [self.q_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim]
            compressed, latent = _output(self.fused_qkv_a_proj(hidden_states)).split(sizes, -1)
            query = _output(self.q_b_proj(self.q_a_layernorm(compressed)))
        query = query.unflatten(-1, (self.num_heads, self.qk_head_dim))
        kv_c, k_pe = latent.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        kv_c = self.kv_a_layernorm(kv_c)
        if self.rotary_emb is not None:
            plain, turned = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
            turned, k_pe = self.rotary_emb(positions, turned, k_pe.unsqueeze(1))
            query, k_pe = torch.cat((plain, turned), -1), k_pe.squeeze(1)
        if llama_4_scaling is not None:
            query = query * llama_4_scaling
        out = attention(query, kv_c, k_pe, kv_cache, block_table, seq_lens, query_start_loc, slot_mapping, num_decodes)
        return _output(self.o_proj(out))

    def _by_ops(
        self,
        query: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        slot_mapping: Tensor,
        num_decodes: int,
    ) -> Tensor:
        concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, "auto", self._one)
        up = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))
        texts = block_table, seq_lens, query_start_loc, num_decodes
        return latent_attention(query, up, kv_cache, *texts, self.scale, self._one)

    def _natively(
        self,
        query: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        slot_mapping: Tensor,
        num_decodes: int,
    ) -> Tensor:
        there = (slot_mapping >= 0) & (slot_mapping < kv_cache.shape[0] * kv_cache.shape[1])
        slots = slot_mapping[there].long()
        kv_cache[slots // kv_cache.shape[1], slots % kv_cache.shape[1]] = torch.cat((kv_c, k_pe), -1)[there]
        starts, outputs = query_start_loc.tolist(), []
        for i, length in enumerate(seq_lens.tolist()):
            rows = query[starts[i] : starts[i + 1]]
            entries = kv_cache[block_table[i].clamp(min=0).long()].flatten(0, 1)[:length]
            latent, turned = entries.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
            expanded = functional.linear(latent, self.kv_b_proj.weight).unflatten(-1, (self.num_heads, -1))
            plain, values = expanded.split([self.qk_nope_head_dim, self.v_head_dim], -1)
            keys = torch.cat((plain, turned[:, None].expand(-1, self.num_heads, -1)), -1)
            tokens = torch.arange(length, dtype=torch.int64, device=query.device)
            seen = tokens <= tokens[length - len(rows) :, None]
            q, k, v = (x.transpose(0, 1) for x in (rows, keys, values))
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)
            outputs.append(out.transpose(0, 1).flatten(1))
        return torch.cat(outputs)


def _output(result: Any) -> Tensor:
    """The output of a projection that may return a bias with it."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output
