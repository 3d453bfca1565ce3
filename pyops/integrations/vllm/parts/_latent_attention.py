"""vLLM's backend of multi-head latent attention (MLA), decode and prefill, by this library's ops."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from ....ops.attention import attention_varlen, sm100_cutlass_mla_decode
from ....ops.cache import concat_and_cache_mla
from ._paged_attention import KV_CACHE_DTYPES, MIN_CAPABILITY, Served, refused_combination, used_columns

_LATENT_SIZE, _ROPE_SIZE = 512, 64
_BLOCK_SIZE = 64  # docs/performance/mla.md: 64 x 4096, 128 heads, 132 us with pages of 64 and 150 with pages of 16


class LatentMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):  # type: ignore[misc]
    """vLLM's metadata builder, with block tables truncated to the longest sequence of the step.

    With speculative decoding, sequences of equally many query tokens are decode, too.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLACommonMetadata:
        columns = used_columns(common_attn_metadata, self.vllm_config, self.kv_cache_spec.block_size)
        common = common_attn_metadata.replace(block_table_tensor=common_attn_metadata.block_table_tensor[:, :columns])
        return super().build(common_prefix_len, common, fast_build)


class LatentBackend(Served, MLACommonBackend):  # type: ignore[misc]
    """The backend of MLA decode."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = KV_CACHE_DTYPES

    @staticmethod
    def get_impl_cls() -> type[LatentImpl]:
        return LatentImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
        return LatentMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [_LATENT_SIZE + _ROPE_SIZE]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(default_block_size, _BLOCK_SIZE)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *more: Any, **named: Any
    ) -> str | None:
        return refused_combination(dtype, kv_cache_dtype, context_parallel=True)


class LatentImpl(MLACommonImpl[MLACommonMetadata]):  # type: ignore[misc]
    """Decode over the latent KV cache. vLLM projects queries and outputs; prefill goes to its prefill backend."""

    can_return_lse_for_decode: bool = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False  # queries stay 16-bit, in two parts: fp8 ones are less accurate
        self._is_fp8 = self.kv_cache_dtype.startswith("fp8")

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        if kv_cache.numel():
            codes = kv_cache_dtype if self._is_fp8 else "auto"
            concat_and_cache_mla(kv_c_normed, k_pe.squeeze(1), kv_cache, slot_mapping.flatten(), codes, k_scale)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """([num_rows, num_heads, 512], log-sum-exp [num_rows, num_heads] where ranks share sequences).

        Queries are [num_rows, num_heads, 512] and [..., 64], or both in one tensor. Sequences have equally many rows.
        """
        q_nope, q_pe = q if isinstance(q, tuple) else q.split((_LATENT_SIZE, _ROPE_SIZE), -1)
        decode = attn_metadata.decode
        query_tokens = len(q_nope) // len(decode.seq_lens)
        if query_tokens > 1:  # vLLM's projection of the queries leaves the rows of a head together
            q_nope, q_pe = (x if x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous() for x in (q_nope, q_pe))
        out = torch.empty(q_nope.shape, dtype=q_nope.dtype, device=q_nope.device)
        lse = out.new_empty(out.shape[:2], dtype=torch.float32) if self.need_to_return_lse_for_decode else None
        # The op ignores the scale of fp8 values; the cache's per-tensor scale multiplies the logits and the output.
        code = layer._k_scale_float if self._is_fp8 else 1.0
        sm100_cutlass_mla_decode(
            out,
            lse,
            q_nope,
            q_pe,
            kv_c_and_k_pe_cache,
            decode.seq_lens,
            decode.block_table,
            None,
            self.scale * code,
            0,
            query_tokens=query_tokens,
        )
        if code != 1.0:
            out.mul_(code)
        return out, lse


class LatentPrefillBackend(MLAPrefillBackend):  # type: ignore[misc]
    """Prefill attention over keys and values that vLLM has projected; they are not in a cache."""

    @staticmethod
    def get_name() -> str:
        return "PYOPS"

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability) -> bool:
        return bool(device_capability >= MIN_CAPABILITY)

    def run_prefill_new_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_softmax_lse: bool
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        starts = self._prefill_metadata.query_start_loc
        out, lse = self._attend(q, k, v, starts, causal=True, with_lse=return_softmax_lse)
        return out if lse is None else (out, lse)

    def run_prefill_context_chunk(
        self, chunk_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        starts = self._prefill_metadata.chunked_context.cu_seq_lens[chunk_idx]
        return self._attend(q, k, v, starts, causal=False, with_lse=True)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_starts: torch.Tensor,
        *,
        causal: bool,
        with_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """([num_tokens, num_heads, v_head_dim], log-sum-exp [num_heads, num_tokens] if `with_lse`)."""
        rows, heads, _ = query.shape
        out = query.new_empty(rows, heads, value.shape[2])
        lse = query.new_empty(heads, rows, dtype=torch.float32) if with_lse else None
        starts = self._prefill_metadata.query_start_loc
        attention_varlen(out, query, key, value, starts, key_starts, self.scale, causal, lse=lse)
        return out, lse
