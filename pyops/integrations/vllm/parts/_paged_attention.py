"""vLLM's attention backend for decoders with a paged KV cache, on this library's attention ops."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import CUDAGraphMode, get_current_vllm_config_or_none
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from ....ops.attention import paged_attention_v1, paged_attention_varlen
from ....ops.attention.prefill_problem import MAX_FEW_TOKENS
from ....ops.cache import reshape_and_cache_flash

try:
    from vllm.v1.attention.backends.utils import get_kv_cache_layout
except ImportError:  # vLLM 0.33: the cache of a layer is [blocks, heads, slots, keys and values of a slot]
    get_kv_cache_layout = None

MIN_CAPABILITY = DeviceCapability(8, 0)  # the MMA kernels need mma.sync for bfloat16
_POOLING_MODEL = "VoxtralRealtimeGeneration"  # its encoder raises an error for unknown backend classes
KV_CACHE_DTYPES = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]


def used_columns(common: CommonAttentionMetadata, config: Any, block_size: int) -> int:
    """The number of block table columns that the ops get in a step.

    A plan chooses the number of KV splits by the capacity of the table, which in vLLM is the model's longest sequence.
    The table is therefore truncated after the longest sequence of the step, rounded up to a power of two to limit the
    number of plans. A batch that may be captured into a CUDA graph keeps all columns: vLLM warms up with sequences of
    one token, and the capture must use the plan of the warm-up.
    """
    columns: int = common.block_table_tensor.shape[1]
    if common.max_query_len <= _captured_query_len(config):
        return columns
    blocks: int = -(-common.max_seq_len // block_size)
    return min(columns, 1 << (blocks - 1).bit_length())


def _captured_query_len(config: Any) -> int:
    """The largest query length of batches with attention inside a CUDA graph."""
    mode, speculative = config.compilation_config.cudagraph_mode, config.speculative_config
    if mode is None or not mode.has_full_cudagraphs():
        return 0
    if mode.mixed_mode() == CUDAGraphMode.FULL:
        return int(config.scheduler_config.max_num_batched_tokens)
    return 1 + (speculative.num_speculative_tokens or 0 if speculative else 0)


def refused_combination(dtype: torch.dtype, kv_cache_dtype: str | None, *, context_parallel: bool) -> str | None:
    """Why a combination of cache dtype, query `dtype` and context parallelism is not supported; None if it is."""
    if kv_cache_dtype in ("float16", "bfloat16") and kv_cache_dtype != str(dtype).removeprefix("torch."):
        return f"kv_cache_dtype {kv_cache_dtype} beside queries of {dtype} not supported"
    config = get_current_vllm_config_or_none()
    if config is not None and config.parallel_config.decode_context_parallel_size > 1 and not context_parallel:
        return "decode context parallelism not supported"
    return None


@dataclass
class PagedMetadata(AttentionMetadata):  # type: ignore[misc]
    """The metadata that all layers of a KV cache group share in a step.

    Attributes:
        num_reqs: sequences, including the padding of a CUDA graph.
        is_decode: whether each sequence has exactly one query row.
        max_query_len: the most query rows of a sequence if they are few; 0 if not, because each number has a plan.
        block_table: [num_reqs, blocks], with capacity for at least `max_seq_len` tokens.
    """

    num_actual_tokens: int
    num_reqs: int
    is_decode: bool
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):  # type: ignore[misc]
    """Selects from vLLM's metadata the tensors that the ops read, without any work on the device or synchronisation."""

    # Plans depend only on shapes, and kernels read the lengths, so a captured batch serves any lengths. A mixed batch
    # is captured with max_query_len > 1, hence with the op for queries of any length.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("pyops' attention backend is causal; choose another by --attention-backend")
        return PagedMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_reqs=common.num_reqs,
            is_decode=common.max_query_len == 1 and common.num_actual_tokens == common.num_reqs,
            max_query_len=common.max_query_len if common.max_query_len <= MAX_FEW_TOKENS else 0,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor[:, : used_columns(common, self.vllm_config, self.block_size)],
            slot_mapping=common.slot_mapping,
        )

    def update_block_table(
        self, metadata: PagedMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> PagedMetadata:
        updated = copy.copy(metadata)
        updated.block_table = blk_table[:, : metadata.block_table.shape[1]]
        updated.slot_mapping = slot_mapping
        return updated


class Served:
    """The base of the decoder and MLA backends. vLLM tries its next backend for a layer that these refuse."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # layers look up this name in vLLM's enumeration of backends

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return bool(capability >= MIN_CAPABILITY)


class PagedBackend(Served, AttentionBackend):  # type: ignore[misc]
    """The backend of decoders."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = [*KV_CACHE_DTYPES, "fp8_e5m2"]
    # Saves one custom op per layer, tens of microseconds of Python time outside of CUDA graphs.
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_impl_cls() -> type[PagedImpl]:
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        return PagedMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The ops read keys and values through strides, so slots may come before heads, or heads before slots."""
        block, *inner = (0, 1, 2, 3, 4) if get_kv_cache_layout() == "NHD" else (0, 1, 3, 2, 4)
        if include_num_layers_dimension:  # the first dimension: all layers of a block are adjacent
            return block + 1, 0, *(dim + 1 for dim in inner)
        return block, *inner

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 16 == 0 and 16 <= head_size <= 256

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *more: Any, **named: Any
    ) -> str | None:
        config = get_current_vllm_config_or_none()
        model = None if config is None else config.model_config
        if model is not None and _POOLING_MODEL in model.architectures:
            return f"blocks that are pooled ({_POOLING_MODEL}) not supported"
        return refused_combination(dtype, kv_cache_dtype, context_parallel=False)


def _no_cache() -> None:
    """The value of the weak reference to a cache before one is bound."""


class PagedImpl(AttentionImpl[PagedMetadata]):  # type: ignore[misc]
    """The attention of one layer.

    Outside of CUDA graphs `forward` runs in Python for each layer of each step, so it avoids creating tensors: views of
    the cache are kept, and the op handles padding rows of queries.
    """

    _bound: Callable[[], torch.Tensor | None]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"expected attention of a decoder, got {attn_type}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self._cache_dtype = kv_cache_dtype if kv_cache_dtype.startswith("fp8") else "auto"
        self._writes = kv_sharing_target_layer_name is None
        self._sinks = sinks
        place = torch.get_default_device()  # vLLM creates layers with the worker's device as torch's default
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device=place)
        self._alibi_slopes = slopes
        self._options: dict[str, Any] = {
            "sliding_window": sliding_window or 0,
            "logits_soft_cap": float(logits_soft_cap or 0.0),
            "sinks": sinks,
        }
        self._release(None)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self._release(None)
        if self._sinks is not None:
            self._options["sinks"] = self._sinks.float()

    def _bind(self, layer: Any, kv_cache: torch.Tensor) -> None:
        """Keep views of a cache and the scales of its layer, because each attribute lookup takes a microsecond.

        vLLM profiles memory with a small first cache and frees it, so the views must not keep it alive.
        """
        cache = kv_cache.data  # views of kv_cache itself would keep it alive
        of_kind = cache.unbind(1) if cache.ndim == 5 else cache.transpose(1, 2).split(self.head_size, -1)
        self._key_cache, self._value_cache = of_kind
        self._block_size = kv_cache.shape[2]
        self._scales = layer._k_scale, layer._v_scale
        self._bound = weakref.ref(kv_cache, self._release)

    def _release(self, _: Any) -> None:
        """Forget the cache that was bound."""
        self._bound = _no_cache
        self._key_cache = self._value_cache = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the attention of `query` [rows, num_heads, head_size] to `output` of the same shape, and return it.

        Padding rows of a CUDA graph are left as they are. Keys and values are first written to `kv_cache` at
        `attn_metadata.slot_mapping`, unless this layer shares the cache of another layer.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("pyops' attention backend does not quantize its output")
        if attn_metadata is None:  # a profiling run of vLLM
            return output.fill_(0)
        if self._bound() is not kv_cache:
            self._bind(layer, kv_cache)
        if self._writes and key is not None and value is not None:
            caches = self._key_cache, self._value_cache
            reshape_and_cache_flash(key, value, *caches, attn_metadata.slot_mapping, self._cache_dtype, *self._scales)
        if attn_metadata.is_decode:
            self._decode(query, attn_metadata, output)
        else:
            self._mixed(query, attn_metadata, output)
        return output

    def _decode(self, query: torch.Tensor, metadata: PagedMetadata, output: torch.Tensor) -> None:
        """One query row per sequence."""
        count = metadata.num_reqs
        if query.shape[0] != count:
            query, output = query[:count], output[:count]
        paged_attention_v1(
            output,
            query,
            self._key_cache,
            self._value_cache,
            self.num_kv_heads,
            self.scale,
            metadata.block_table,
            metadata.seq_lens,
            self._block_size,
            metadata.max_seq_len,
            self._alibi_slopes,
            self._cache_dtype,
            *self._scales,
            **self._options,
        )

    def _mixed(self, query: torch.Tensor, metadata: PagedMetadata, output: torch.Tensor) -> None:
        """Any number of query rows per sequence: prefill, chunked prefill, speculative drafts, mixed with decodes."""
        paged_attention_varlen(
            output,
            query,
            self._key_cache,
            self._value_cache,
            self.num_kv_heads,
            self.scale,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            self._block_size,
            self._cache_dtype,
            *self._scales,
            alibi_slopes=self._alibi_slopes,
            max_query_len=metadata.max_query_len,
            **self._options,
        )
