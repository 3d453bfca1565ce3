"""The names of `pyops` for editors and type checkers: the output of `python -m pyops list --stub`."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from ._core.op.typed import Attributes as _Attributes
from . import check as check
from ._core.errors import CaptureError as CaptureError
from ._core.errors import CompileError as CompileError
from ._core.errors import DeviceFault as DeviceFault
from ._core.errors import MissingDependencyError as MissingDependencyError
from ._core.errors import NotLoadedError as NotLoadedError
from ._core.errors import OpError as OpError
from ._core.errors import RankError as RankError
from ._core.errors import UnsupportedGpuError as UnsupportedGpuError
from ._core.launch.kernel import Kernel as Kernel
from ._core.op.decorator import op as op
from ._core.op.op import Op as Op
from ._core.op.typed import Wrapper as Wrapper
from ._core.text.compiler import Compiled as Compiled
from .compile_ahead import warmup as warmup
from .errors import ModelError as ModelError
from .fused.experts import FusedMoEQuantConfig as FusedMoEQuantConfig
from .host.faults import KernelFault as KernelFault
from .ops._shared.scalar_type import SCALAR_TYPES as SCALAR_TYPES
from .ops._shared.scalar_type import ScalarType as ScalarType
from .snippet import example_text as example_text
from .ops.collective.expert_parallel import DispatchedRows as DispatchedRows
from .ops.collective.expert_parallel import ExpertParallel as ExpertParallel
from .ops.collective.process_group import CustomAllReduce as CustomAllReduce

__version__: str
registry: Mapping[str, Op]

def convert_vertical_slash_indexes(
    q_seqlens: Tensor,
    kv_seqlens: Tensor,
    vertical_indexes: Tensor,
    slash_indexes: Tensor,
    context_size: int,
    block_size_M: int,
    block_size_N: int,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`convert_vertical_slash_indexes_mergehead` into new (block_count, block_offset, column_count, column_index).

    Args:
        q_seqlens: [batch] int32, queries and keys of each sequence.
        kv_seqlens: [batch] int32, queries and keys of each sequence.
        vertical_indexes: [batch, num_heads, num_verticals] int32, ascending columns.
        slash_indexes: [batch, num_heads, num_slashes] int32, descending distances of diagonals.
        context_size: queries of a sequence, at most.
        block_size_M: queries and keys of a block; block_size_M is at most block_size_N.
        block_size_N: queries and keys of a block; block_size_M is at most block_size_N.
        causal: whether the keys end where the queries do.
    """

def sm100_cutlass_mla_get_workspace_size(max_seq_len: int, num_batches: int, sm_count: int, num_kv_splits: int) -> int:
    """Bytes of the workspace that vLLM's `sm100_cutlass_mla_decode` asks for: ``513 * 4 * 128 * splits * batches``.

    The op here does not read its workspace, so this size is always enough, and a workspace of None is, too.

    Args:
        max_seq_len: tokens of the longest sequence.
        num_batches: sequences.
        sm_count: SMs of the device.
        num_kv_splits: splits of a sequence; 0 or less for vLLM's choice by the other arguments.
    """

def copy_blocks(key_caches: Sequence[Any], value_caches: Sequence[Any], block_mapping: Any) -> None:
    """Copy blocks in the caches of every layer: ``cache[block_mapping[i, 1]] = cache[block_mapping[i, 0]]``.

    Each layer is a call of `copy_cache_blocks`, which says what is copied and what is skipped.

    Args:
        key_caches: one of each per layer, read and written; empty lists do nothing.
        value_caches: one of each per layer, read and written; empty lists do nothing.
        block_mapping: [num_pairs, 2] int64 or int32, on the device of the caches.

    Raises:
        OpError: for lists of different lengths, and for what `copy_cache_blocks` refuses; no layer is written.
    """

def copy_blocks_mla(kv_caches: Sequence[Any], block_mapping: Any) -> None:
    """Copy blocks in the caches of every layer: `copy_blocks` for one cache per layer, as of latent KV.

    Args:
        kv_caches: one for each layer, read and written.
        block_mapping: [num_pairs, 2] int64 or int32, on the device of the caches.
    """

def swap_blocks(src: Any, dst: Any, block_size_in_bytes: int, block_mapping: Any) -> None:
    """Copy blocks from one tensor to another, of the same device or of the host: block ``m[i, 1]`` of `dst` becomes
    block ``m[i, 0]`` of `src`.

    Both tensors are read as consecutive blocks of `block_size_in_bytes` bytes. Pairs of blocks that follow each other
    on both sides become one copy. Copies are asynchronous on the current stream where the library supports it (host
    memory must be pinned). A pair is skipped if either block does not exist.

    Args:
        src: torch tensors, or numpy and cupy arrays, of any dtype and shape without gaps; both on one GPU, or one
            or both in host memory.
        dst: torch tensors, or numpy and cupy arrays, of any dtype and shape without gaps; both on one GPU, or one
            or both in host memory.
        block_size_in_bytes: bytes of a block.
        block_mapping: [n, 2] integers, (source, destination), in host memory: a torch tensor, a numpy array or a list.
            No block of memory may be a destination and a source.

    Raises:
        OpError: a mapping that is not [n, 2] integers in host memory, a destination that overlaps a source, a size
            below 1, tensors with gaps, of two libraries or two GPUs. Nothing has been written then.
    """

def swap_blocks_batch(src_ptrs: Tensor, dst_ptrs: Tensor, sizes: Tensor, is_src_access_order_any: bool = False) -> None:
    """Copy ``sizes[i]`` bytes from address ``src_ptrs[i]`` to address ``dst_ptrs[i]``, on torch's current stream.

    From CUDA 12.8 on, one driver call does all copies, unless the stream is the default one. Addresses are not
    validated, because nothing says which memory they belong to: only null is refused. On a machine without a GPU the
    copies are done when the call returns.

    Args:
        src_ptrs: [n] int64 in host memory, contiguous: addresses of device memory or of pinned host memory.
            Destinations may not overlap each other or a source.
        dst_ptrs: [n] int64 in host memory, contiguous: addresses of device memory or of pinned host memory.
            Destinations may not overlap each other or a source.
        sizes: [n] int64 in host memory, contiguous: bytes, 0 or more.
        is_src_access_order_any: whether sources may be read before earlier work on the stream is done; earlier work
            may then not write them.

    Raises:
        OpError: tensors of other types or lengths, a null address, a negative size. Nothing has been written then.
    """

def all_reduce(fa: int, inp: Tensor, out: Tensor, reg_buffer: int, reg_buffer_sz_bytes: int) -> None:
    """``out = sum of inp over ranks``: in float32, in the order of ranks, rounded once; the same bits on every rank.

    Args:
        fa: handle of `init_custom_ar`. Every rank must call, with tensors of the same dtype and size.
        inp: float32, float16 or bfloat16; contiguous, or a dense tensor that fills its storage to the end; a multiple
            of 16 bytes.
        out: as `inp`, written; may be `inp` unless `inp` itself is a registered buffer that peers read.
        reg_buffer: address of a registered buffer, into which `inp` is copied; or 0, if `inp` is registered or the
            stream is being captured. Not used if `inp` is at most 1 MiB over all ranks: it is then sent as packets.
        reg_buffer_sz_bytes: size of that buffer.
    """

def all_reduce_add_rms_norm(
    fa: int,
    inp: Tensor,
    out: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
) -> None:
    """`all_reduce` into `out`, then `fused_add_rms_norm` of `out` and `residual`, as one kernel, for short tensors.

    Args:
        fa: handle of `init_custom_ar`. Every rank must call, with tensors of the same dtype and size.
        inp: [..., hidden_size], as in `all_reduce`; at most 1 MiB over all ranks.
        out: as `inp`, written; may be `inp`.
        residual: as `out`, read and written: it gets the sum of the all-reduce and the residual.
        weight: [hidden_size].
        epsilon: added to the mean of squares.
    """

def allocate_shared_buffer_and_handle(size: int) -> tuple[int, Tensor]:
    """Zeroed memory of the current device that other ranks can map, and its handle.

    Args:
        size: bytes, 1 or more.

    Returns:
        The address, and a uint8 tensor [64] on the CPU for `open_mem_handle` in another process. `free_shared_buffer`
        frees the memory; nothing else does. Within `pyops.testing.ranks`, memory of the host.
    """

def custom_all_gather(fa: int, inp: Tensor, out: Tensor, reg_buffer: int, reg_buffer_sz_bytes: int) -> None:
    """``out = the tensors inp of all ranks, in the order of ranks``.

    Args:
        fa: handle of `init_custom_ar`. Every rank must call, with tensors of the same dtype and size.
        inp: of any dtype, as in `all_reduce`: dense, and a multiple of 16 bytes.
        out: of the dtype of `inp`, with as many elements as those of all ranks, written.
        reg_buffer: address of a registered buffer, into which `inp` is copied; or 0, if `inp` is registered or the
            stream is being captured.
        reg_buffer_sz_bytes: size of that buffer.
    """

def custom_reduce_scatter(fa: int, inp: Tensor, out: Tensor, reg_buffer: int, reg_buffer_sz_bytes: int) -> None:
    """``out = slice r of the sum of inp over ranks`` on rank r: in float32, in the order of ranks, rounded once.

    Args:
        fa: handle of `init_custom_ar`. Every rank must call, with tensors of the same dtype and size.
        inp: float32, float16 or bfloat16, as in `all_reduce`; a multiple of 16 bytes for each rank.
        out: of the dtype of `inp`, with its elements divided by the number of ranks, written.
        reg_buffer: address of a registered buffer, into which `inp` is copied; or 0, if `inp` is registered or the
            stream is being captured.
        reg_buffer_sz_bytes: size of that buffer.
    """

def dispose(fa: int) -> None:
    """Destroy a communicator, and unmap the peers' graph buffers that it mapped.

    Args:
        fa: the communicator, as `init_custom_ar` returns it.
    """

def free_shared_buffer(ptr: int) -> None:
    """Free memory of `allocate_shared_buffer_and_handle`. No rank may use it afterwards.

    Args:
        ptr: the address that `allocate_shared_buffer_and_handle` has returned.
    """

def get_graph_buffer_ipc_meta(fa: int) -> tuple[list[int], list[int]]:
    """For the buffers of captured calls: IPC handles of their allocations, as bytes, and the offsets in these.

    Args:
        fa: the communicator, as `init_custom_ar` returns it.
    """

def init_custom_ar(ipc_tensors: Sequence[int], rank_data: Tensor, rank: int, fully_connected: bool) -> int:
    """Create a communicator; returns the handle that the other functions take.

    Args:
        ipc_tensors: for each rank, the address in this process of `meta_size()` zeroed bytes of signals, followed by
            scratch memory of the size of the largest message.
        rank_data: uint8 on the device, for the addresses of registered buffers, 64 bytes per buffer.
        rank: the number of this rank.
        fully_connected: whether every pair of GPUs has a direct link; if not, more than two ranks use the two-shot
            algorithm.
    """

def init_custom_qr(rank: int, world_size: int, qr_max_size: int | None = None) -> int:
    """Allocate memory for messages of up to `qr_max_size` bytes; returns a handle.

    Args:
        rank: the rank of this process.
        world_size: 2, 4 or 8 ranks.
        qr_max_size: bytes of the largest message; None for `qr_max_size()`.
    """

def lost_ranks(fa: int) -> dict[int, tuple[int, int]]:
    """{rank that a kernel gave up waiting for: (block that waited, number of the barrier)}.

    A kernel gives up after 30 seconds and ends with a trap. Every later CUDA call in this process then fails; calls of
    this library raise a `RankError`. This function still works then.

    Args:
        fa: the communicator, as `init_custom_ar` returns it.
    """

def meta_size() -> int:
    """Bytes of the signals and packets of a rank, which precede its scratch memory."""

def minimax_allreduce_rms(
    input: Tensor,
    norm_weight: Tensor,
    workspace: Tensor,
    rank: int,
    nranks: int,
    eps: float,
) -> Tensor:
    """``input / sqrt(mean of squares over the columns of all ranks + eps) * norm_weight``, a new tensor.

    Args:
        input: [num_tokens, hidden_size / nranks], this rank's columns; float32, float16 or bfloat16.
        norm_weight: [hidden_size / nranks], of the same dtype.
        workspace: int64 on the device; elements ``2 nranks`` to ``3 nranks - 1`` are the addresses of each rank's
            memory, as in vLLM's ``LamportWorkspace``: 1536 bytes plus 16 per token, initialised with equal words. The
            memory must be used by these two functions only.
        rank: this rank of 2, 4 or 8.
        nranks: this rank of 2, 4 or 8.
        eps: added to the mean.
    """

def minimax_allreduce_rms_qk(
    qkv: Tensor,
    norm_weight_q: Tensor,
    norm_weight_k: Tensor,
    workspace: Tensor,
    q_size: int,
    kv_size: int,
    rank: int,
    nranks: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`minimax_allreduce_rms` of the first `q_size` columns of `qkv`, and of the next `kv_size`: two new tensors.

    Args:
        qkv: [num_tokens, q_size + kv_size or more]; the elements of a row are contiguous.
        norm_weight_q: [q_size].
        norm_weight_k: [kv_size].
        workspace: int64 on the device; elements ``2 nranks`` to ``3 nranks - 1`` are the addresses of each rank's
            memory, as in vLLM's ``LamportWorkspace``: 1536 bytes plus 16 per token, initialised with equal words. The
            memory must be used by these two functions only.
        q_size: columns of the two tensors.
        kv_size: columns of the two tensors.
        rank: this rank of 2, 4 or 8.
        nranks: this rank of 2, 4 or 8.
        eps: added to the mean.
    """

def open_mem_handle(mem_handle: Tensor) -> int:
    """Map another process's memory by its handle; returns the address in this process.

    Args:
        mem_handle: uint8 [64] on the CPU.
    """

def qr_all_reduce(fa: int, inp: Tensor, out: Tensor, quant_level: int, cast_bf2half: bool = False) -> None:
    """``out = sum of inp over ranks``, with each input and each sum quantized in blocks of 32 elements.

    Args:
        fa: the handle that `init_custom_qr` returns.
        inp: float16 or bfloat16, contiguous, a multiple of 8 elements, at most the bytes given to `init_custom_qr`.
        out: as `inp`, written; may be `inp`.
        quant_level: 0 for 16 bits, not quantized; 1, 2, 3 for 8, 6 and 4 bits.
        cast_bf2half: compute bfloat16 in float16, which overflows beyond 65504.

    A quantized block with an element that is not finite becomes NaN.
    """

def qr_destroy(fa: int) -> None:
    """Free the memory of this rank. No rank may use it afterwards.

    Args:
        fa: the handle that `init_custom_qr` returns.
    """

def qr_get_handle(fa: int) -> Tensor:
    """The handle of this rank's memory for `qr_open_handles` of the others: uint8 [64] on the CPU.

    Args:
        fa: the handle that `init_custom_qr` returns.
    """

def qr_max_size() -> int:
    """Bytes of the largest message for which `init_custom_qr` allocates memory by default."""

def qr_open_handles(_fa: int, handles: Sequence[Tensor]) -> None:
    """Map the memory of all ranks; `handles` are in the order of ranks. Call it before the first `qr_all_reduce`.

    Args:
        _fa: the handle that `init_custom_qr` returns.
        handles: of `qr_get_handle` of each rank.
    """

def register_buffer(fa: int, ipc_tensors: Sequence[int]) -> None:
    """Register a buffer for `all_reduce` by its addresses in this process, one per rank, in the order of ranks.

    Args:
        fa: the communicator, as `init_custom_ar` returns it.
        ipc_tensors: addresses in this process.
    """

def register_graph_buffers(fa: int, handles: Sequence[Sequence[int]], offsets: Sequence[Sequence[int]]) -> None:
    """Map the graph buffers of all ranks (results of `get_graph_buffer_ipc_meta`), before the first replay.

    Args:
        fa: the communicator, as `init_custom_ar` returns it.
        handles: of each rank, in the order of ranks.
        offsets: of each rank, in the order of ranks.
    """

def cutlass_encode_and_reorder_int4b_grouped(b_tensors: Tensor) -> tuple[Tensor, Tensor]:
    """(`cutlass_encode_and_reorder_int4b_experts` of `b_tensors`, a description of each expert's layout).

    All experts have the same layout: the description is [num_experts, 0] int32.

    Args:
        b_tensors: [num_experts, N, K / 8] int32, contiguous; K a multiple of 32, N of 16.
    """

def cutlass_group_gemm_supported(cuda_device_capability: int) -> bool:
    """Whether `cutlass_moe_mm` is an op of this library and runs on the tensor cores of a GPU.

    Args:
        cuda_device_capability: ten times the major number, plus the minor one, as 90.
    """

def cutlass_scaled_mm_supports_block_fp8(cuda_device_capability: int) -> bool:
    """Whether `cutlass_scaled_mm` multiplies fp8 with block scales on the tensor cores of a GPU.

    Args:
        cuda_device_capability: ten times the major number, plus the minor one, as 90.
    """

def cutlass_scaled_mm_supports_fp4(cuda_device_capability: int) -> bool:
    """Whether `cutlass_scaled_fp4_mm` runs on the tensor cores of a GPU, where it multiplies bfloat16.

    Args:
        cuda_device_capability: ten times the major number, plus the minor one, as 90.
    """

def cutlass_scaled_mm_supports_fp8(cuda_device_capability: int) -> bool:
    """Whether `cutlass_scaled_mm` multiplies fp8 on the tensor cores of a GPU, as fp8 or as float16.

    Args:
        cuda_device_capability: ten times the major number, plus the minor one, as 90.
    """

def cutlass_sparse_scaled_mm_supported(cuda_device_capability: int) -> bool:
    """Whether `cutlass_scaled_sparse_mm` runs on the tensor cores of a GPU.

    Args:
        cuda_device_capability: ten times the major number, plus the minor one, as 90.
    """

def ggml_moe_get_block_size(quant_type: int) -> int:
    """The block size for `ggml_moe_a8` (rows of one expert): 4, as upstream; 0 for an unsupported type.

    Args:
        quant_type: the type's number, as `ggml_dequantize` lists them.
    """

gptq_marlin_gemm: _marlin_gemm

machete_gemm: _machete_mm

def machete_supported_schedules(
    a_type: Any,
    b_type: int,
    group_scales_type: Any,
    group_zeros_type: Any = None,
    channel_scales_type: Any = None,
    token_scales_type: Any = None,
    out_type: Any = None,
) -> list[str]:
    """The schedules that `machete_mm` takes for these types; an empty list for types that it does not multiply.

    Args:
        a_type: dtype of A.
        b_type: type of the quants, a number of vLLM's scalar types.
        group_scales_type: dtypes; None for absent arguments.
        group_zeros_type: dtypes; None for absent arguments.
        channel_scales_type: dtypes; None for absent arguments.
        token_scales_type: dtypes; None for absent arguments.
        out_type: dtype of the result; None for that of A.
    """

def marlin_int4_fp8_preprocess(qweight: Tensor, qzeros_or_none: Tensor | None = None, inplace: bool = False) -> Tensor:
    """`marlin_int4_fp8_preprocess_out` into `qweight`, which is returned, or into a new tensor if not `inplace`.

    Args:
        qweight: [K, N / 8] int32, contiguous, in the layout of AWQ; without zero points of any shape and layout.
        qzeros_or_none: [num_groups, N / 8] int32, contiguous, packed as qweight; num_groups divides K. None: all zero
            points are 8.
        inplace: whether the result overwrites `qweight`.
    """

def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor | None,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = 'silu',
    pad_slot_id: int = -1,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    num_computed_tokens: Tensor | None = None,
    block_size_to_align: int = 0,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """The convolution of the tokens of many sequences, see `causal_conv1d_prefill`: a new tensor like x.

    Args:
        x: [dim, num_tokens], contiguous in memory along either the channels of a token or the tokens of a channel
            (else it is copied). The result has the same layout and the dtype of x; x is converted to the dtype of
            conv_states first.
        weight: [dim, width], contiguous, float32, float16 or bfloat16, width 2 to 8.
        bias: [dim] of the dtype of `weight`, or None for 0.
        conv_states: [num_slots, dim, at least width - 1], any strides, read and written; None if no state is kept.
        query_start_loc: [num_seqs + 1], ascending: the first token of each sequence, and the end of the last. This and
            all other indices are int32, or all are int64. A start below 0 is taken for 0, one after the tokens for
            their end. Where starts do not ascend, sequences share tokens: the results of these tokens, and the states
            of these sequences, are undefined.
        cache_indices: [num_seqs] slots of sequences, or [num_seqs, max_blocks]; None for slots 0, 1, 2, ...
        has_initial_state: [num_seqs] bool; None if no sequence has one.
        activation: "silu", "swish" or True for silu; None or False for none.
        pad_slot_id: the slot that means no slot (a padding sequence).
        block_idx_first_scheduled_token: [num_seqs] columns.
        block_idx_last_scheduled_token: [num_seqs] columns.
        initial_state_idx: [num_seqs] columns.
        num_computed_tokens: [num_seqs] tokens of each sequence before this call; None for 0.
        block_size_to_align: tokens of a block; only with prefix caching.
        metadata: for compatibility with vLLM; no effect: arguments are always checked.
        validate_data: for compatibility with vLLM; no effect: arguments are always checked.
    """

def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    pad_slot_id: int = -1,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    validate_data: bool = False,
) -> Tensor:
    """The convolution of the new tokens of each sequence, see `causal_conv1d_decode`: x, overwritten.

    Args:
        x: [num_seqs, dim] or [num_seqs, dim, seq_len]; or with query_start_loc [num_tokens, dim]. If its dtype is
            not that of conv_state, x is left unchanged, and the result is a new tensor.
        conv_state: [num_slots, dim, state_len], any strides, read and written.
        weight: [dim, width], contiguous, float32, float16 or bfloat16, width 2 to 8.
        bias: [dim] of the dtype of `weight`, or None for 0.
        activation: "silu", "swish" or True for silu; None or False for none.
        conv_state_indices: [num_seqs] slots of sequences, or [num_seqs, max_blocks]; without prefix caching, only
            column 0 counts; None for slots 0, 1, 2, ... This and all other indices are int32, or all are int64.
        num_accepted_tokens: [num_seqs], at least 1: how many tokens of the last call are kept; None without
            speculative decoding.
        query_start_loc: [num_seqs + 1], ascending: the first token of each sequence, and the end of the last. A start
            below 0 is taken for 0, one after the tokens for their end. Where starts do not ascend, sequences share
            tokens: these tokens, and the states of these sequences, are undefined.
        max_query_len: at least the tokens of each sequence, with query_start_loc; -1 if not known.
        pad_slot_id: the slot that means no slot (a padding sequence).
        block_idx_last_scheduled_token: [num_seqs] columns of conv_state_indices for prefix caching:
            where the state is written, and where it is read.
        initial_state_idx: [num_seqs] columns of conv_state_indices for prefix caching:
            where the state is written, and where it is read.
        validate_data: for compatibility with vLLM; no effect: arguments are always checked.
    """

def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """(o, final_state) of `gated_delta_rule` for prefill, with the arguments of flash-linear-attention and vLLM.

    `scale` is ``key_size**-0.5`` if None; the final state is float32, or None without `output_final_state`. Tensors
    are [batch, tokens, heads, ...]: `head_first` must be False.

    Args:
        q: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
            contiguous, constant token stride, as in o and the other inputs.
        k: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
            contiguous, constant token stride, as in o and the other inputs.
        v: [batch, num_tokens, value_heads, value_size] of the same dtype; key_heads divides value_heads.
        g: [batch, num_tokens, value_heads], float32, float16 or bfloat16: logarithms of decays.
        beta: as `g`, of any of its dtypes, or None for ones: how much of the error is corrected.
        scale: factor of the outputs.
        initial_state: [num_seqs, value_heads, key_size, value_size], float32, float16 or bfloat16, contiguous; or None
            for zeros.
        output_final_state: whether the final state is returned.
        cu_seqlens: [num_seqs + 1] int32 or int64: sequence s has the tokens ``cu_seqlens[s]`` up to
            ``cu_seqlens[s + 1]``, and batch is 1. None: every row of the batch is a sequence. If the two numbers are
            not a valid range, the sequence has no tokens. Sequences may not overlap.
        head_first: False.
        use_qk_l2norm_in_kernel: whether q and k are normalised. Any finite q and k are then safe; without it, and for
            v, intermediate results that overflow float32 become infinite or NaN.
        state_v_first: whether states are [..., value_size, key_size].
    """

def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, final_state) of `kda` for prefill, with the arguments of flash-linear-attention.

    `scale` is ``key_size**-0.5`` if None; the final state is float32, or None without `output_final_state`. `A_log`,
    `dt_bias` and `lower_bound` have no effect without `use_gate_in_kernel`.

    Args:
        q: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
            contiguous, constant token stride, as in o and the other inputs.
        k: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
            contiguous, constant token stride, as in o and the other inputs.
        v: [batch, num_tokens, value_heads, value_size] of the same dtype; key_heads divides value_heads.
        g: [batch, num_tokens, value_heads, key_size], float32, float16 or bfloat16: logarithms of decays, or logits.
        beta: [batch, num_tokens, value_heads], of any of these dtypes, or None for ones: how much of the error is
            corrected.
        scale: factor of the outputs.
        initial_state: [num_seqs, value_heads, key_size, value_size], float32, float16 or bfloat16, contiguous; or None
            for zeros.
        output_final_state: whether the final state is returned.
        use_qk_l2norm_in_kernel: whether q and k are normalised. Any finite q and k are then safe; without it, and for
            v, intermediate results that overflow float32 become infinite or NaN.
        use_gate_in_kernel: whether g are logits of the gate, which needs `A_log`; otherwise logarithms of decays.
        use_beta_sigmoid_in_kernel: whether beta is replaced by its sigmoid.
        state_v_first: whether states are [..., value_size, key_size].
        cu_seqlens: [num_seqs + 1] int32 or int64: sequence s has the tokens ``cu_seqlens[s]`` up to
            ``cu_seqlens[s + 1]``, and batch is 1. None: every row of the batch is a sequence. If the two numbers are
            not a valid range, the sequence has no tokens. Sequences may not overlap.
        A_log: [value_heads] float32, float16 or bfloat16, contiguous, or None.
        dt_bias: [value_heads, key_size] or [value_heads * key_size], of any of these dtypes, contiguous, or None for
            zeros; only with A_log.
        lower_bound: the least logarithm of a decay, at most 0, or None; only with A_log.
    """

def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """(o, final_state) of `gated_delta_rule_update`, with vLLM's arguments: the state in slots is updated in place.

    With `inplace_final_state` False, the result is that of `chunk_gated_delta_rule`: new states, one for each sequence.

    Args:
        q: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
            contiguous, constant token stride, as in o and the other inputs.
        k: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
            contiguous, constant token stride, as in o and the other inputs.
        v: [batch, num_tokens, value_heads, value_size] of the same dtype; key_heads divides value_heads.
        g: [batch, num_tokens, value_heads], float32, float16 or bfloat16: logarithms of decays.
        beta: as `g`, of any of its dtypes, or None for ones: how much of the error is corrected.
        scale: factor of the outputs.
        initial_state: the states in slots, `state` of `gated_delta_rule_update`.
        inplace_final_state: whether these states are updated.
        cu_seqlens: [num_seqs + 1] int32 or int64: sequence s has the tokens ``cu_seqlens[s]`` up to
            ``cu_seqlens[s + 1]``, and batch is 1. None: every row of the batch is a sequence. If the two numbers are
            not a valid range, the sequence has no tokens. Sequences may not overlap.
        ssm_state_indices: [num_seqs] or [num_seqs, tokens] int32 or int64, or None: sequence s has slot s.
        num_accepted_tokens: [num_seqs] int32 or int64, or None for ones; only with two dimensions of slots.
        use_qk_l2norm_in_kernel: whether q and k are normalised. Any finite q and k are then safe; without it, and for
            v, intermediate results that overflow float32 become infinite or NaN.
        state_v_first: whether states are [..., value_size, key_size].
    """

def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """(o, final_state) of `kda_update`, with vLLM's arguments: the state in slots is updated in place.

    With `inplace_final_state` False, the result is that of `chunk_kda`: new states, one for each sequence.

    Args:
        q: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
            contiguous, constant token stride, as in o and the other inputs.
        k: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
            contiguous, constant token stride, as in o and the other inputs.
        v: [batch, num_tokens, value_heads, value_size] of the same dtype; key_heads divides value_heads.
        g: [batch, num_tokens, value_heads, key_size], float32, float16 or bfloat16: logarithms of decays, or logits.
        beta: [batch, num_tokens, value_heads], of any of these dtypes, or None for ones: how much of the error is
            corrected.
        scale: factor of the outputs.
        initial_state: the states in slots, `state` of `kda_update`.
        inplace_final_state: whether these states are updated.
        use_qk_l2norm_in_kernel: whether q and k are normalised. Any finite q and k are then safe; without it, and for
            v, intermediate results that overflow float32 become infinite or NaN.
        cu_seqlens: [num_seqs + 1] int32 or int64: sequence s has the tokens ``cu_seqlens[s]`` up to
            ``cu_seqlens[s + 1]``, and batch is 1. None: every row of the batch is a sequence. If the two numbers are
            not a valid range, the sequence has no tokens. Sequences may not overlap.
        ssm_state_indices: [num_seqs] or [num_seqs, tokens] int32 or int64, or None: sequence s has slot s.
        num_accepted_tokens: [num_seqs] int32 or int64, or None for ones; only with two dimensions of slots.
        state_v_first: whether states are [..., value_size, key_size].
    """

def mamba_chunk_scan_combined_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor,
    cu_chunk_seqlens: Tensor,
    last_chunk_indices: Tensor,
    seq_idx: Tensor,
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf),
    return_intermediate_states: bool = False,
    state_dtype: Any = None,
) -> Tensor:
    """`mamba_chunk_scan_varlen` with vLLM's arguments: `dt_limit` is (dt_min, dt_max). Returns the states.

    Args:
        x: [num_tokens, num_heads, head_size], float32, float16 or bfloat16. In x, B, C, z and out, heads are
            contiguous, and tokens have any stride.
        dt: [num_tokens, num_heads], float32, float16 or bfloat16, any strides.
        A: [num_heads] float32, negative.
        B: [num_tokens, num_groups, state_size] of the dtype of `x`, state_size up to 256; num_groups divides
            num_heads, and heads of a group are adjacent.
        C: [num_tokens, num_groups, state_size] of the dtype of `x`, state_size up to 256; num_groups divides
            num_heads, and heads of a group are adjacent.
        chunk_size: tokens of a chunk, at most.
        cu_seqlens: [num_seqs + 1] int32 or int64, first token of each sequence. The four index tensors have one dtype.
        cu_chunk_seqlens: [num_chunks + 1], first token of each chunk, ascending.
        last_chunk_indices: [num_seqs], the last chunk of each sequence.
        seq_idx: [num_chunks], the sequence of each chunk.
        out: as `x`, written where chunks have tokens.
        D: [num_heads] or [num_heads, head_size], or None.
        z: as `x`, or None.
        dt_bias: [num_heads], or None.
        initial_states: [num_seqs, num_heads, head_size, state_size], contiguous, or None for zeros.
        dt_softplus: how `dt` is changed.
        dt_limit: (dt_min, dt_max).
        return_intermediate_states: whether `states` has the state after every chunk, instead of every sequence.
        state_dtype: of new `states`; None is the dtype of `C`.
    """

def selective_scan_fn(
    u: Tensor,
    ssm_states: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    block_size: int = 1024,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    cu_chunk_seqlen: Tensor | None = None,
    last_chunk_indices: Tensor | None = None,
) -> Tensor:
    """`selective_scan_fwd` for torch tensors of any strides; B and C may lack the dimension of groups.

    Tensors with strides that the op does not take are copied. The result is `z` if it is given, else `delta`: the
    tensor itself, or its copy.

    Args:
        u: [batch, dim, num_tokens], or [dim, num_tokens] with `query_start_loc`; float32, float16 or bfloat16; tokens
            contiguous, any other strides.
        ssm_states: [num_slots, dim, state_size], float32 or of the dtype of `u`, states contiguous; written. No two
            sequences may have the same slot.
        delta: the same, the time steps; overwritten by the result.
        A: [dim, state_size] float32, states contiguous; state_size is at most 256.
        B: [batch, groups, state_size, num_tokens] or [groups, state_size, num_tokens] of the dtype of `u`; tokens
            contiguous. ``dim / groups`` adjacent channels share a group.
        C: the same.
        D: D_, z_ and delta_bias_ of `selective_scan_fwd`.
        z: D_, z_ and delta_bias_ of `selective_scan_fwd`.
        delta_bias: D_, z_ and delta_bias_ of `selective_scan_fwd`.
        delta_softplus: whether time steps are softplus(delta + delta_bias_).
        query_start_loc: [batch + 1] int32, contiguous: the first token of each sequence, and the end of the last.
            Sequences may not overlap. None: each row of the batch is a sequence.
        cache_indices: [batch], or [batch, columns] with slots of blocks, int32; or None: sequence b has slot b.
        has_initial_state: [batch] bool, contiguous; or None: no sequence has a state.
        pad_slot_id: the slot of a padding sequence.
        block_size: tokens of a block, at least 1; not used without `block_idx_last_scheduled_token`.
        block_idx_first_scheduled_token: [batch] int32, contiguous;
            all three or none.
        block_idx_last_scheduled_token: [batch] int32, contiguous;
            all three or none.
        initial_state_idx: [batch] int32, contiguous;
            all three or none.
        cu_chunk_seqlen: [chunks + 1] int32, contiguous: the first token of each chunk of the sequences, counted over
            all; only differences of adjacent elements are used. A first chunk of less than 1 or more than block_size
            tokens counts as one of block_size.
        last_chunk_indices: [batch] int32, contiguous: the last chunk of each sequence; both or none, and only with
            block_idx_last_scheduled_token.
    """

def get_cuda_view_from_cpu_tensor(cpu_tensor: Tensor) -> Tensor:
    """The memory of a pinned tensor as a tensor of a GPU, with the shape, strides and dtype of `cpu_tensor`.

    CPU and GPU share the memory: each reads what the other wrote, once streams are synchronised. The result keeps
    `cpu_tensor` alive. The GPU is the one for which the memory was pinned.

    Args:
        cpu_tensor: a torch tensor in pinned host memory, of any dtype and strides, and not empty.

    Raises:
        OpError: `cpu_tensor` is no torch tensor, is not in host memory, or is not pinned.
    """

def get_device_attribute(attribute: int, device: int) -> int:
    """The value of an attribute of a device. The driver is asked at every call.

    Args:
        attribute: number of the attribute in the runtime's enumeration (``cudaDeviceAttr``, ``hipDeviceAttribute_t``).
        device: ordinal of the device in this process; the current device if negative.

    Raises:
        OpError: there is no such device, or no such attribute.
    """

def get_max_shared_memory_per_block_device_attribute(device: int) -> int:
    """Bytes of shared memory that one block can ask for, opt-in included.

    Args:
        device: ordinal of the device in this process; the current device if negative.

    Raises:
        OpError: there is no such device.
    """

def weak_ref_tensor(input: Tensor) -> Tensor:
    """A tensor over the memory of `input` that does not keep the memory alive, with its shape, strides and dtype.

    For buffers of a CUDA graph: its pool keeps their memory. Once `input` is freed, its memory may be given to
    another tensor; the result then shows the elements of that tensor.

    Args:
        input: a torch tensor on a GPU, of any dtype and strides. An empty tensor gives a new empty tensor.

    Raises:
        OpError: `input` is no torch tensor, or is not on a GPU.
    """

def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    inplace: bool = False,
    activation: str = 'silu',
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
    quant_config: FusedMoEQuantConfig | None = None,
) -> Tensor:
    """The experts of a layer: ``out[t] = sum_j weight[t, j] * (f(x[t] @ w1[e].T) @ w2[e].T)``, e the j-th of token t.

    After vLLM's function of this name. Accumulation is float32; the activation and each expert's result are rounded
    once to the dtype of hidden_states, or quantised. Experts that do not exist, or that another device holds, add
    nothing.

    Args:
        hidden_states: [num_tokens, hidden_size] float32, float16 or bfloat16; rows of one stride.
        w1: [num_experts, 2 * intermediate_size, hidden_size], rows of one stride; [num_experts, intermediate_size,
            hidden_size] for activations without gates. Of the dtype of hidden_states, or quantised; 4-bit quants are
            packed two to a byte along the last dimension.
        w2: [num_experts, hidden_size, intermediate_size], likewise.
        topk_weights: [num_tokens, topk] float32, contiguous.
        topk_ids: [num_tokens, topk] int32 or int64, contiguous.
        inplace: whether the result is written to hidden_states.
        activation: one of those of `grouped_gemm`.
        apply_router_weight_on_input: whether weights multiply ``x[t] @ w1[e].T``; then topk is 1.
        global_num_experts: experts on all devices; -1 for the size of expert_map or else w1.
        expert_map: [global_num_experts] int32, contiguous: the local index of each expert, -1 if another device holds
            it; or None.
        quant_config: scales and biases; None for neither.

    Returns:
        [num_tokens, hidden_size], new unless `inplace`.

    Examples:
        >>> x, logits = torch.randn(5, 64).bfloat16(), torch.randn(5, 8)
        >>> w1, w2 = torch.randn(8, 2 * 128, 64).bfloat16(), torch.randn(8, 64, 128).bfloat16()
        >>> weights, ids, _ = pyops.fused_topk(x, logits, 2, renormalize=True)
        >>> pyops.fused_experts(x, w1, w2, weights, ids).shape
        torch.Size([5, 64])
    """

def fused_grouped_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    e_score_correction_bias: Tensor | None,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = 'softmax',
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`grouped_topk` of logits, by their softmax or sigmoid.

    Args:
        hidden_states: [num_tokens, ...]; only its number of tokens is used.
        gating_output: [num_tokens, num_experts], logits, as `scores` of grouped_topk.
        topk: as in grouped_topk.
        renormalize: as in grouped_topk.
        e_score_correction_bias: `bias` of grouped_topk.
        num_expert_group: as in grouped_topk.
        topk_group: as in grouped_topk.
        scoring_func: "softmax" or "sigmoid".
        routed_scaling_factor: as in grouped_topk.

    Returns:
        Weights float32 and ids int32, both [num_tokens, topk].
    """

def fused_marlin_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    w1_scale: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    quant_type_id: int,
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    activation: str = 'silu',
    activation_func: Callable[[str, Tensor, Tensor], None] | None = None,
    moe_sum: Callable[[Tensor, Tensor], None] | None = None,
    expert_map: Tensor | None = None,
    input_global_scale1: Tensor | None = None,
    input_global_scale2: Tensor | None = None,
    global_scale1: Tensor | None = None,
    global_scale2: Tensor | None = None,
    g_idx1: Tensor | None = None,
    g_idx2: Tensor | None = None,
    sort_indices1: Tensor | None = None,
    sort_indices2: Tensor | None = None,
    w1_zeros: Tensor | None = None,
    w2_zeros: Tensor | None = None,
    workspace: Tensor | None = None,
    intermediate_cache13: Tensor | None = None,
    intermediate_cache2: Tensor | None = None,
    is_k_full: bool = True,
    output: Tensor | None = None,
    input_dtype: Any = None,
    inplace: bool = False,
) -> Tensor:
    """The experts of a layer: `fused_experts` with weights in Marlin's layout, by `moe_wna16_marlin_gemm`.

    After vLLM's function of this name. Experts that do not exist, or that another device holds, add nothing.

    Args:
        hidden_states: [num_tokens, hidden_size] float16 or bfloat16; rows of one stride.
        w1: [num_experts, hidden_size / 16, intermediate_size * bits] int32: gates, then ups (interleaved for
            "swigluoai"); half the columns for activations without gates.
        w2: [num_experts, intermediate_size / 16, hidden_size * bits / 2] int32.
        bias1: the
            arguments of `moe_wna16_marlin_gemm` for w1 and w2.
        bias2: the
            arguments of `moe_wna16_marlin_gemm` for w1 and w2.
        w1_scale: the
            arguments of `moe_wna16_marlin_gemm` for w1 and w2.
        w2_scale: the
            arguments of `moe_wna16_marlin_gemm` for w1 and w2.
        topk_weights: [num_tokens, topk] float32, contiguous
        topk_ids: likewise, int32 or int64.
        quant_type_id: the type of the quantized weights, a number of `pyops.SCALAR_TYPES`.
        apply_router_weight_on_input: whether router weights scale the first GEMM; then topk is 1.
        global_num_experts: experts on all devices; -1 for the size of expert_map or else w1.
        activation: gated: "silu", "gelu", "swigluoai" or "swiglustep"; without gates: "silu_no_mul", "gelu_no_mul" or
            "relu2_no_mul".
        activation_func: a function ``(activation, out, input)`` that replaces the activation; it has no gate if the
            name ends in "_no_mul".
        moe_sum: a function ``(input, out)`` that replaces the sum over each token's experts.
        expert_map: [global_num_experts] int32, contiguous: the local index of each expert, -1 if another device holds
            it; or None.
        input_global_scale1: one float32 each, multiplies the row scales of int8; or None.
        input_global_scale2: one float32 each, multiplies the row scales of int8; or None.
        global_scale1: the
            arguments of `moe_wna16_marlin_gemm` for w1 and w2.
        global_scale2: the
            arguments of `moe_wna16_marlin_gemm` for w1 and w2.
        g_idx1: the
            arguments of `moe_wna16_marlin_gemm` for w1 and w2.
        g_idx2: the
            arguments of `moe_wna16_marlin_gemm` for w1 and w2.
        sort_indices1: perm of `moe_wna16_marlin_gemm`.
        sort_indices2: perm of `moe_wna16_marlin_gemm`.
        w1_zeros: the
            arguments of `moe_wna16_marlin_gemm` for w1 and w2.
        w2_zeros: the
            arguments of `moe_wna16_marlin_gemm` for w1 and w2.
        workspace: accepted because vLLM has it; it has no effect.
        intermediate_cache13: workspaces of the dtype of hidden_states: num_tokens * topk rows of
            the wider of both GEMMs' results, and num_tokens * topk rows of intermediate_size; or None. `output` may
            share the memory of the second.
        intermediate_cache2: workspaces of the dtype of hidden_states: num_tokens * topk rows of
            the wider of both GEMMs' results, and num_tokens * topk rows of intermediate_size; or None. `output` may
            share the memory of the second.
        is_k_full: groups are consecutive; otherwise the weight is a shard, and g_idx has the groups of its rows.; no uint8b128 with int8.
        output: [num_tokens, hidden_size], written; None for a new tensor, or hidden_states if `inplace`.
        input_dtype: int8 or float8_e4m3fn to quantise the inputs of both GEMMs per row, with weights for 8-bit
            activations, see `moe_wna16_marlin_gemm`; or None for 16-bit inputs.
        inplace: whether the result is written to hidden_states.

    Returns:
        [num_tokens, hidden_size].

    Examples:
        >>> w1 = torch.randint(-(2**31), 2**31 - 1, (8, 64 // 16, 128 * 4), dtype=torch.int32)  # of 8 experts
        >>> w2 = torch.randint(-(2**31), 2**31 - 1, (8, 128 // 16, 64 * 4 // 2), dtype=torch.int32)
        >>> scales = torch.full((8, 1, 256), 0.01).bfloat16(), torch.full((8, 1, 64), 0.01).bfloat16()
        >>> x, logits = torch.randn(5, 64).bfloat16(), torch.randn(5, 8)
        >>> weights, ids, _ = pyops.fused_topk(x, logits, 2, renormalize=True)
        >>> uint4b8 = pyops.SCALAR_TYPES["uint4b8"].id
        >>> pyops.fused_marlin_moe(x, w1, w2, None, None, *scales, weights, ids, uint4b8).shape
        torch.Size([5, 64])
    """

def fused_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    inplace: bool = False,
    activation: str = 'silu',
    use_grouped_topk: bool = False,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    custom_routing_function: Any = None,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
    quant_config: FusedMoEQuantConfig | None = None,
) -> Tensor:
    """A layer of experts: routes each token to `topk` experts by its logits, then runs `fused_experts`.

    Args:
        hidden_states: [num_tokens, hidden_size] float32, float16 or bfloat16; rows of one stride.
        w1: [num_experts, 2 * intermediate_size, hidden_size], rows of one stride; [num_experts, intermediate_size,
            hidden_size] for activations without gates. Of the dtype of hidden_states, or quantised; 4-bit quants are
            packed two to a byte along the last dimension.
        w2: [num_experts, hidden_size, intermediate_size], likewise.
        gating_output: [num_tokens, global_num_experts], the router logits.
        topk: experts per token.
        renormalize: whether the weights of a token are divided by their sum.
        inplace: whether the result is written to hidden_states.
        activation: one of those of `grouped_gemm`.
        use_grouped_topk: whether experts are chosen by `fused_grouped_topk`.
        num_expert_group: how many groups of experts there are, and from how many of them, the best ones, a
            token's experts are chosen.
        topk_group: how many groups of experts there are, and from how many of them, the best ones, a
            token's experts are chosen.
        custom_routing_function: ``(hidden_states, gating_output, topk, renormalize)`` returns weights and ids; or None,
            for the softmax of the logits.
        global_num_experts: experts on all devices; -1 for the size of expert_map or else w1.
        expert_map: [global_num_experts] int32, contiguous: the local index of each expert, -1 if another device holds
            it; or None.
        quant_config: scales and biases; None for neither.

    Examples:
        >>> x, logits = torch.randn(5, 64).bfloat16(), torch.randn(5, 8)
        >>> w1, w2 = torch.randn(8, 2 * 128, 64).bfloat16(), torch.randn(8, 64, 128).bfloat16()
        >>> pyops.fused_moe(x, w1, w2, logits, topk=2, renormalize=True).shape
        torch.Size([5, 64])
    """

def fused_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    indices_type: torch.dtype | None = None,
    scoring_func: str = 'softmax',
) -> tuple[Tensor, Tensor, Tensor]:
    """The topk experts of each token, by `topk_softmax` or `topk_sigmoid`, in new tensors.

    Args:
        hidden_states: [num_tokens, ...]; only its number of tokens is used.
        gating_output: [num_tokens, num_experts], logits: a torch tensor, float32, float16 or bfloat16; rows of any
            stride.
        topk: experts of a token, at most num_experts.
        renormalize: whether the weights of a token are divided by their sum.
        indices_type: dtype of the ids: torch.int32, torch.uint32 or torch.int64; None for int32.
        scoring_func: "softmax" or "sigmoid".

    Returns:
        Weights float32, ids, and token_expert_indices int32, all [num_tokens, topk], as the op writes them.
    """

def fused_topk_bias(
    hidden_states: Tensor,
    gating_output: Tensor,
    e_score_correction_bias: Tensor | None,
    topk: int,
    renormalize: bool,
    scoring_func: str = 'softmax',
    indices_type: torch.dtype | None = None,
    input_tokens: Tensor | None = None,
    hash_indices_table: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The topk experts of each token, ranked by score plus bias, in new tensors.

    Args:
        hidden_states: [num_tokens, ...]; only its number of tokens is used.
        gating_output: [num_tokens, num_experts], logits: a torch tensor, float32, float16 or bfloat16; rows of any
            stride.
        e_score_correction_bias: [num_experts] float32, contiguous; or None.
        topk: experts of a token, at most num_experts.
        renormalize: whether the weights of a token are divided by their sum.
        scoring_func: "softmax", "sigmoid" or "sqrtsoftplus": `topk_softmax`, `topk_sigmoid` or `topk_softplus_sqrt`.
        indices_type: dtype of the ids: torch.int32, torch.uint32 or torch.int64; None for int32.
        input_tokens: of topk_softplus_sqrt; None for the others.
        hash_indices_table: of topk_softplus_sqrt; None for the others.
        routed_scaling_factor: multiplies the weights, after they are renormalised.

    Returns:
        Weights float32 and ids, both [num_tokens, topk].
    """

def moe_align(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sorted_token_ids, expert_ids, num_tokens_post_padded) of `moe_align_block_size`, which are new.

    The arguments and the sizes are those of vLLM's Python function ``moe_align_block_size``.

    Args:
        topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token; any number.
        block_size: rows of a block of the GEMM (its tile M).
        num_experts: number of experts.
        expert_map: [num_experts] int32, contiguous: the local index of each expert, -1 for an expert on another device.
        pad_sorted_ids: whether the size of sorted_token_ids is rounded up to a multiple of block_size.
        ignore_invalid_experts: whether rows of experts on other devices are skipped, and the others sorted by local
            index. Otherwise all rows are sorted by `topk_ids`, and expert_ids holds ``expert_map[expert]``,
            which may be -1.
    """

def moe_permute_unpermute_supported() -> bool:
    """Whether `moe_permute` and `moe_unpermute` run: always."""

def parallel_fused_experts(
    parallel: ExpertParallel,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = 'silu',
    quant_config: FusedMoEQuantConfig | None = None,
    most_tokens: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`fused_experts` for this rank's tokens with the experts of all ranks. Every rank must call it.

    Each rank's result for a token is rounded to the dtype of hidden_states; the sum over ranks is float32, in rank
    order, and rounded once.

    Args:
        parallel: created for the total number of experts, and the dtype and row size of hidden_states. If it has a
            quant_dtype, quant_config must have the same, and blocks of 128 x 128.
        hidden_states: [num_tokens, hidden_size], contiguous; the tokens of this rank, possibly none.
        w1: [num_experts, 2 * intermediate_size, hidden_size], rows of one stride; [num_experts, intermediate_size,
            hidden_size] for activations without gates. Of the dtype of hidden_states, or quantised; 4-bit quants are
            packed two to a byte along the last dimension., for the experts of this rank. A per-tensor activation
            scale must be static (`a1_scale`), because a dynamic one would include rows without a token.
        w2: [num_experts, hidden_size, intermediate_size], likewise., for the experts of this rank. A per-tensor activation
            scale must be static (`a1_scale`), because a dynamic one would include rows without a token.
        topk_weights: [num_tokens, top_k] float32, contiguous.
        topk_ids: [num_tokens, top_k] int32 or int64, contiguous, indices among the experts of all ranks. Other ids add
            nothing.
        activation: one of those of `grouped_gemm`., for the experts of this rank. A per-tensor activation
            scale must be static (`a1_scale`), because a dynamic one would include rows without a token.
        quant_config: scales and biases; None for neither., for the experts of this rank. A per-tensor activation
            scale must be static (`a1_scale`), because a dynamic one would include rows without a token.
        most_tokens: as in `ExpertParallel.dispatch`.
        out: [num_tokens, hidden_size], contiguous, written; None for a new tensor. It may be hidden_states.

    Returns:
        `out`.

    Examples:
        >>> from pyops.testing import ranks
        >>> def layer(rank):  # of two, each with 4 of the 8 experts
        ...     parallel = pyops.ExpertParallel(None, "cpu", num_experts=8, max_tokens=16, hidden_size=64, top_k=2)
        ...     w1, w2 = torch.randn(4, 2 * 64, 64).bfloat16(), torch.randn(4, 64, 64).bfloat16()
        ...     weights, ids = torch.randn(5, 8).softmax(-1).topk(2)
        ...     return pyops.parallel_fused_experts(parallel, torch.randn(5, 64).bfloat16(), w1, w2, weights, ids).shape
        >>> ranks(2).run(layer)  # on GPUs, a process calls it for each, with a group of torch.distributed
        [torch.Size([5, 64]), torch.Size([5, 64])]
    """

def mixer2_gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float = 1e-06,
    n_groups: int = 1,
) -> Tensor:
    """RMS norm by groups of ``x * silu(gate)``, the norm of Mamba-2 mixers, see `rms_norm_gated`: a new tensor like x.

    ``T(v / sqrt(mean(v^2) + eps) * weight)`` with ``v = x * silu(gate)`` and the mean over each group; float32, rounded
    once (Dao and Gu 2024, arXiv:2405.21060).

    Args:
        x: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        gate: shape and dtype of `x`, constant row stride.
        weight: [hidden_size] of the same dtype, or None for ones.
        eps: added to the mean of squares.
        n_groups: groups of a row that are normalised by themselves, a divisor of hidden_size.
    """

def hadacore_transform(x: Tensor, inplace: bool = True) -> Tensor:
    """`hadacore_transform_out` into `x`, which is returned, or into a new tensor if not `inplace`.

    `x` may have any strides. Unless it is contiguous, or a vector or matrix of contiguous rows, it is copied first, and
    the result is copied back.

    Args:
        x: the same shape, float32, float16 or bfloat16, hidden_size a power of two up to 32768; constant row stride.
        inplace: whether the result overwrites `x`.
    """

def nvfp4_experts_quant(
    input_tensor: Tensor,
    input_global_scale: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """(packed e2m1 values, scales) of `scaled_fp4_experts_quant`, for which vLLM has the same name.

    Args:
        input_tensor: [num_tokens * topk, hidden_size], float16 or bfloat16, hidden_size a multiple of 16; rows of one
            stride.
        input_global_scale: [num_experts] float32.
        expert_offsets: [num_experts + 1] int32, where the rows of each expert begin.
        blockscale_offsets: [num_experts + 1] int32, the first rows of scales: cumulative rows, each rounded up to 128.
        topk: experts of a token; it has no effect.

    The scales are float8_e4m3fn in tiles, with enough rows for any distribution; rows without an expert are undefined.
    """

def nvfp4_quant(
    input: Tensor,
    input_global_scale: Tensor,
    is_sf_swizzled_layout: bool = True,
    backend: str = 'none',
) -> tuple[Tensor, Tensor]:
    """(packed e2m1 values, scales) of `scaled_fp4_quant`, for which vLLM has the same name.

    Args:
        input: [..., hidden_size], float16 or bfloat16, hidden_size a multiple of 16; constant row stride.
        input_global_scale: one float32, a factor of the input.
        is_sf_swizzled_layout: scales are float8_e4m3fn in tiles, [num_tokens rounded up to 128, hidden_size / 16
            rounded up to 4]; else uint8, [num_tokens, hidden_size / 16].
        backend: a name with "trtllm" asks for tiles of 8 rows for at most 32 rows, which is not supported.

    The packed values are uint8, [num_tokens, hidden_size / 2].
    """

def per_token_group_quant_fp8(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: Any = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(fp8 values, scales) with a dynamic scale per group of contiguous elements, see `per_token_group_fp8_quant`.

    Args:
        x: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        group_size: a divisor of hidden_size.
        eps: lower bound of the maximum of a group.
        dtype: torch.float8_e4m3fn or torch.float8_e4m3fnuz; None for the dtype of `out_q`, or else the device's format,
            float8_e4m3fnuz on gfx942, float8_e4m3fn elsewhere.
        column_major_scales: whether the last two dimensions of the scales are transposed in memory.
        tma_aligned_scales: with column_major_scales, whether columns begin at multiples of 16 bytes; only for a matrix.
        out_q: receives the fp8 values; None for a new tensor.
        use_ue8m0: whether scales are powers of two; None is False.
    """

def per_token_group_quant_fp8_packed_for_deepgemm(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    use_ue8m0: bool | None = None,
    out_q: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(fp8 values, packed exponents of scales) of a matrix, see `per_token_group_fp8_quant_packed`.

    Args:
        x: [num_tokens, hidden_size], float32, float16 or bfloat16; copied unless the elements of a row are contiguous.
        group_size: a divisor of hidden_size.
        eps: lower bound of the maximum of a group.
        use_ue8m0: must not be False: scales are powers of two.
        out_q: receives the fp8 values; None for a new tensor.

    The exponents are [num_tokens, groups / 4 rounded up] int32 with strides (1, num_tokens rounded up to 4); the
    padding between the columns is 0.
    """

def scaled_fp8_quant(
    input: Tensor,
    scale: Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(fp8 values, scale) of a matrix, with the static `scale`, or with dynamic scales per token or per tensor.

    Args:
        input: [num_tokens, hidden_size], float32, float16 or bfloat16.
        scale: float32, any strides. One element: for all elements. [n]: one for each group of rows, or of columns, as
            `group_shape` says. [m, n]: one for each of m x n blocks of equal size., returned unchanged; None for dynamic scales.
        num_token_padding: minimum number of rows of the fp8 values, and of per-token scales; rows after the tokens are
            undefined.
        scale_ub: bounds the magnitude for per-token scales, see `dynamic_per_token_scaled_fp8_quant`.
        use_per_token_if_dynamic: dynamic scales are per token, [rows, 1]; else per tensor, [1].
        output: float8_e4m3fn or float8_e4m3fnuz, written; not with num_token_padding. None: the device's
            format, float8_e4m3fnuz on gfx942, float8_e4m3fn elsewhere.
        group_shape: see `static_scaled_fp8_quant`.
    """

def scaled_int8_quant(
    input: Tensor,
    scale: Tensor | None = None,
    azp: Tensor | None = None,
    symmetric: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(int8 values, scale, zero point or None), with static ones, or with dynamic ones per token.

    Args:
        input: [..., hidden_size], float32, float16 or bfloat16; constant row stride if `scale` is given, else copied
            unless contiguous or a matrix with contiguous rows.
        scale: one float32., returned unchanged; None for dynamic ones, [rows, 1].
        azp: one int32, the zero point, which may lie outside int8; or None for 0., returned unchanged; None for dynamic ones, [rows, 1].
        symmetric: whether the zero point is 0. With `scale` it must agree with `azp`.
    """

def silu_and_mul_nvfp4_experts_quant(
    input_tensor: Tensor,
    input_global_scale: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """(e2m1 values, scales) of `silu_and_mul_scaled_fp4_experts_quant`, for which vLLM has the same name.

    As `nvfp4_experts_quant`, but `input_tensor` has twice the columns: gate and up.

    Args:
        input_tensor: [num_tokens * topk, 2 * hidden_size].
        input_global_scale: [num_experts] float32.
        expert_offsets: [num_experts + 1] int32, where the rows of each expert begin.
        blockscale_offsets: [num_experts + 1] int32, the first rows of scales: cumulative rows, each rounded up to 128.
        topk: experts of a token; it has no effect.
    """

class _gelu(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor) -> None:
        """GELU: ``out = T(x / 2 * (1 + erf(x / sqrt(2))))`` (Hendrycks and Gimpel 2016, arXiv:1606.08415).

        Computed in float32 and rounded once.

        Args:
            out: [...], written; may be `input` itself; constant row stride.
            input: the same shape, float32, float16 or bfloat16; constant row stride.
        """
    @staticmethod
    def new(input: Tensor) -> Tensor:
        """GELU: ``out = T(x / 2 * (1 + erf(x / sqrt(2))))`` (Hendrycks and Gimpel 2016, arXiv:1606.08415).

        Computed in float32 and rounded once.

        Args:
            input: [...], float32, float16 or bfloat16; constant row stride.

        Returns:
            out: [...].
        """

gelu: _gelu

class _gelu_new(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor) -> None:
        """GELU as GPT-2 writes it: ``out = x / 2 * (1 + tanh(0.79788456 * (x + 0.044715 * x^3)))``.

        Every operation rounds to the element type, as in eager PyTorch (Hendrycks and Gimpel 2016, arXiv:1606.08415), and
        results equal eager's bit for bit. An approximation would not be close: 1 + tanh cancels, which magnifies
        differences.

        Args:
            out: [...], written; may be `input` itself; constant row stride.
            input: the same shape, float32, float16 or bfloat16; constant row stride.
        """
    @staticmethod
    def new(input: Tensor) -> Tensor:
        """GELU as GPT-2 writes it: ``out = x / 2 * (1 + tanh(0.79788456 * (x + 0.044715 * x^3)))``.

        Every operation rounds to the element type, as in eager PyTorch (Hendrycks and Gimpel 2016, arXiv:1606.08415), and
        results equal eager's bit for bit. An approximation would not be close: 1 + tanh cancels, which magnifies
        differences.

        Args:
            input: [...], float32, float16 or bfloat16; constant row stride.

        Returns:
            out: [...].
        """

gelu_new: _gelu_new

class _gelu_fast(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor) -> None:
        """GELU with the cube factored out: ``out = x / 2 * (1 + tanh(0.79788456 * x * (1 + 0.044715 * x * x)))``.

        Every operation rounds to the element type, as in eager PyTorch (Hendrycks and Gimpel 2016, arXiv:1606.08415), and
        results equal eager's bit for bit. An approximation would not be close: 1 + tanh cancels, which magnifies
        differences.

        Args:
            out: [...], written; may be `input` itself; constant row stride.
            input: the same shape, float32, float16 or bfloat16; constant row stride.
        """
    @staticmethod
    def new(input: Tensor) -> Tensor:
        """GELU with the cube factored out: ``out = x / 2 * (1 + tanh(0.79788456 * x * (1 + 0.044715 * x * x)))``.

        Every operation rounds to the element type, as in eager PyTorch (Hendrycks and Gimpel 2016, arXiv:1606.08415), and
        results equal eager's bit for bit. An approximation would not be close: 1 + tanh cancels, which magnifies
        differences.

        Args:
            input: [...], float32, float16 or bfloat16; constant row stride.

        Returns:
            out: [...].
        """

gelu_fast: _gelu_fast

class _gelu_quick(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor) -> None:
        """GELU by the logistic function: ``out = T(x / (1 + exp(-1.702 * x)))``.

        Computed in float32 and rounded once (Hendrycks and Gimpel 2016, arXiv:1606.08415).

        Args:
            out: [...], written; may be `input` itself; constant row stride.
            input: the same shape, float32, float16 or bfloat16; constant row stride.
        """
    @staticmethod
    def new(input: Tensor) -> Tensor:
        """GELU by the logistic function: ``out = T(x / (1 + exp(-1.702 * x)))``.

        Computed in float32 and rounded once (Hendrycks and Gimpel 2016, arXiv:1606.08415).

        Args:
            input: [...], float32, float16 or bfloat16; constant row stride.

        Returns:
            out: [...].
        """

gelu_quick: _gelu_quick

class _relu2(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor) -> None:
        """Squared ReLU: ``out = T(max(x, 0)^2)``; NaN stays NaN (So et al. 2021, arXiv:2109.08668).

        Args:
            out: [...], written; may be `input` itself; constant row stride.
            input: the same shape, float32, float16 or bfloat16; constant row stride.
        """
    @staticmethod
    def new(input: Tensor) -> Tensor:
        """Squared ReLU: ``out = T(max(x, 0)^2)``; NaN stays NaN (So et al. 2021, arXiv:2109.08668).

        Args:
            input: [...], float32, float16 or bfloat16; constant row stride.

        Returns:
            out: [...].
        """

relu2: _relu2

class _relu_squared(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor) -> None:
        """`relu2` by the name of vLLM's op: ``out = T(max(x, 0)^2)``. NaN stays NaN, which vLLM's op makes 0.

        Args:
            out: [...], written; may be `input` itself; constant row stride.
            input: the same shape, float32, float16 or bfloat16; constant row stride.
        """
    @staticmethod
    def new(input: Tensor) -> Tensor:
        """`relu2` by the name of vLLM's op: ``out = T(max(x, 0)^2)``. NaN stays NaN, which vLLM's op makes 0.

        Args:
            input: [...], float32, float16 or bfloat16; constant row stride.

        Returns:
            out: [...].
        """

relu_squared: _relu_squared

class _silu(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor) -> None:
        """SiLU: ``out = T(x / (1 + exp(-x)))`` (Hendrycks and Gimpel 2016, arXiv:1606.08415).

        Computed in float32 and rounded once.

        Args:
            out: [...], written; may be `input` itself; constant row stride.
            input: the same shape, float32, float16 or bfloat16; constant row stride.
        """
    @staticmethod
    def new(input: Tensor) -> Tensor:
        """SiLU: ``out = T(x / (1 + exp(-x)))`` (Hendrycks and Gimpel 2016, arXiv:1606.08415).

        Computed in float32 and rounded once.

        Args:
            input: [...], float32, float16 or bfloat16; constant row stride.

        Returns:
            out: [...].
        """

silu: _silu

class _xielu(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        alpha_p: Tensor,
        alpha_n: Tensor,
        beta: float = 0.5,
        eps: float = -1e-06,
    ) -> None:
        """xIELU, a quadratic and an exponential side with learned strengths (Huang and Schlag 2024, arXiv:2411.13010).

        ``out = a_p * x * x + beta * x`` where x > 0, else ``(expm1(min(x, eps)) - x) * a_n + beta * x``, with ``a_p =
        softplus(alpha_p)`` and ``a_n = beta + softplus(alpha_n)``. `beta` and `eps` are first rounded to the element type.
        Every operation rounds to it, too, as in eager PyTorch.

        Args:
            out: [...], written; may be `input` itself; constant row stride.
            input: the same shape, float32, float16 or bfloat16; constant row stride.
            alpha_p: [1] of the same dtype, the learned values before softplus.
            alpha_n: [1] of the same dtype, the learned values before softplus.
            beta: slope at zero
            eps: where the exponential side starts, just below zero.
        """
    @staticmethod
    def new(input: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-06) -> Tensor:
        """xIELU, a quadratic and an exponential side with learned strengths (Huang and Schlag 2024, arXiv:2411.13010).

        ``out = a_p * x * x + beta * x`` where x > 0, else ``(expm1(min(x, eps)) - x) * a_n + beta * x``, with ``a_p =
        softplus(alpha_p)`` and ``a_n = beta + softplus(alpha_n)``. `beta` and `eps` are first rounded to the element type.
        Every operation rounds to it, too, as in eager PyTorch.

        Args:
            input: [...], float32, float16 or bfloat16; constant row stride.
            alpha_p: [1] of the same dtype, the learned values before softplus.
            alpha_n: [1] of the same dtype, the learned values before softplus.
            beta: slope at zero
            eps: where the exponential side starts, just below zero.

        Returns:
            out: [...].
        """

xielu: _xielu

class _silu_and_mul(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor) -> None:
        """SwiGLU: ``out = T(T(g / (1 + exp(-g))) * u)`` for the halves ``input = [g, u]``.

        After Shazeer 2020, arXiv:2002.05202. Equal to eager PyTorch on the same device, bit for bit.

        Args:
            out: [..., hidden_size], written; constant row stride.
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
        """
    @staticmethod
    def new(input: Tensor) -> Tensor:
        """SwiGLU: ``out = T(T(g / (1 + exp(-g))) * u)`` for the halves ``input = [g, u]``.

        After Shazeer 2020, arXiv:2002.05202. Equal to eager PyTorch on the same device, bit for bit.

        Args:
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.

        Returns:
            out: [..., hidden_size].
        """

silu_and_mul: _silu_and_mul

class _silu_and_mul_with_clamp(_Attributes, Protocol):
    def __call__(self, result: Tensor, input: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> None:
        """SwiGLU of clamped halves: ``result = T(T(x / (1 + exp(-alpha * x))) * (y + beta))`` for ``input = [g, u]``.

        ``x = min(g, l), y = max(min(u, l), -l)``, where l is `limit`, rounded to the element type. A NaN limit means no
        limit; with a limit below 0 every u becomes -l. NaN stays NaN. ``y + beta`` is float32. Without alpha and beta equal
        to eager PyTorch on the same device, bit for bit.

        Args:
            result: [..., hidden_size], written; constant row stride.
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
            limit: largest gate and largest magnitude of u.
            alpha: slope of the sigmoid.
            beta: added to the clamped u.
        """
    @staticmethod
    def new(input: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
        """SwiGLU of clamped halves: ``result = T(T(x / (1 + exp(-alpha * x))) * (y + beta))`` for ``input = [g, u]``.

        ``x = min(g, l), y = max(min(u, l), -l)``, where l is `limit`, rounded to the element type. A NaN limit means no
        limit; with a limit below 0 every u becomes -l. NaN stays NaN. ``y + beta`` is float32. Without alpha and beta equal
        to eager PyTorch on the same device, bit for bit.

        Args:
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
            limit: largest gate and largest magnitude of u.
            alpha: slope of the sigmoid.
            beta: added to the clamped u.

        Returns:
            result: [..., hidden_size].
        """

silu_and_mul_with_clamp: _silu_and_mul_with_clamp

class _mul_and_silu(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor) -> None:
        """SwiGLU with the activation on the second half: ``out = T(g * T(silu(u)))`` for ``input = [g, u]``.

        Equal to eager PyTorch on the same device, bit for bit.

        Args:
            out: [..., hidden_size], written; constant row stride.
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
        """
    @staticmethod
    def new(input: Tensor) -> Tensor:
        """SwiGLU with the activation on the second half: ``out = T(g * T(silu(u)))`` for ``input = [g, u]``.

        Equal to eager PyTorch on the same device, bit for bit.

        Args:
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.

        Returns:
            out: [..., hidden_size].
        """

mul_and_silu: _mul_and_silu

class _gelu_and_mul(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor) -> None:
        """GEGLU: ``out = T(T(g / 2 * (1 + erf(g / sqrt(2)))) * u)`` for the halves ``input = [g, u]``.

        After Shazeer 2020, arXiv:2002.05202. Equal to eager PyTorch on the same device, bit for bit.

        Args:
            out: [..., hidden_size], written; constant row stride.
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
        """
    @staticmethod
    def new(input: Tensor) -> Tensor:
        """GEGLU: ``out = T(T(g / 2 * (1 + erf(g / sqrt(2)))) * u)`` for the halves ``input = [g, u]``.

        After Shazeer 2020, arXiv:2002.05202. Equal to eager PyTorch on the same device, bit for bit.

        Args:
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.

        Returns:
            out: [..., hidden_size].
        """

gelu_and_mul: _gelu_and_mul

class _gelu_tanh_and_mul(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor) -> None:
        """GEGLU by the hyperbolic tangent: ``out = T(T(g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3)))) * u)``.

        ``input = [g, u]`` (Hendrycks and Gimpel 2016, arXiv:1606.08415). Equal to eager PyTorch on the same device, bit for
        bit.

        Args:
            out: [..., hidden_size], written; constant row stride.
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
        """
    @staticmethod
    def new(input: Tensor) -> Tensor:
        """GEGLU by the hyperbolic tangent: ``out = T(T(g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3)))) * u)``.

        ``input = [g, u]`` (Hendrycks and Gimpel 2016, arXiv:1606.08415). Equal to eager PyTorch on the same device, bit for
        bit.

        Args:
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.

        Returns:
            out: [..., hidden_size].
        """

gelu_tanh_and_mul: _gelu_tanh_and_mul

class _fatrelu_and_mul(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor, threshold: float) -> None:
        """FATReLU gate: ``out = T((g <= t ? 0 : g) * u)`` for the halves ``input = [g, u]`` and the threshold t.

        The threshold is first rounded to the element type. NaN in g stays NaN (Kurtz et al. 2020, "Inducing and exploiting
        activation sparsity", ICML). Equal to eager PyTorch on the same GPU, bit for bit.

        Args:
            out: [..., hidden_size], written; constant row stride.
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
            threshold: elements of g up to it count as 0.
        """
    @staticmethod
    def new(input: Tensor, threshold: float) -> Tensor:
        """FATReLU gate: ``out = T((g <= t ? 0 : g) * u)`` for the halves ``input = [g, u]`` and the threshold t.

        The threshold is first rounded to the element type. NaN in g stays NaN (Kurtz et al. 2020, "Inducing and exploiting
        activation sparsity", ICML). Equal to eager PyTorch on the same GPU, bit for bit.

        Args:
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
            threshold: elements of g up to it count as 0.

        Returns:
            out: [..., hidden_size].
        """

fatrelu_and_mul: _fatrelu_and_mul

class _swigluoai_and_mul(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor, alpha: float = 1.702, limit: float = 7.0) -> None:
        """Clamped SwiGLU of adjacent elements: ``out = T((u + 1) * g / (1 + exp(-alpha * g)))``.

        g is the even elements of `input`, clamped to at most `limit`; u is the odd ones, clamped to +-`limit`. NaN counts
        as `limit`. Computed in float32 and rounded once. The gate of the gpt-oss models (OpenAI 2025, arXiv:2508.10925).

        Args:
            out: [..., hidden_size], written; constant row stride.
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
            alpha: slope of the sigmoid
            limit: largest gate and largest magnitude of u.
        """
    @staticmethod
    def new(input: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
        """Clamped SwiGLU of adjacent elements: ``out = T((u + 1) * g / (1 + exp(-alpha * g)))``.

        g is the even elements of `input`, clamped to at most `limit`; u is the odd ones, clamped to +-`limit`. NaN counts
        as `limit`. Computed in float32 and rounded once. The gate of the gpt-oss models (OpenAI 2025, arXiv:2508.10925).

        Args:
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
            alpha: slope of the sigmoid
            limit: largest gate and largest magnitude of u.

        Returns:
            out: [..., hidden_size].
        """

swigluoai_and_mul: _swigluoai_and_mul

class _swiglustep_and_mul(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor, limit: float = 7.0) -> None:
        """SwiGLU with both factors clamped: ``out = T(min(silu(g), limit) * min(max(u, -limit), limit))``.

        g and u are the halves ``input = [g, u]``. Computed in float32 and rounded once; NaN stays NaN; a NaN limit means
        no limit.

        Args:
            out: [..., hidden_size], written; constant row stride.
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
            limit: largest activated gate and largest magnitude of u.
        """
    @staticmethod
    def new(input: Tensor, limit: float = 7.0) -> Tensor:
        """SwiGLU with both factors clamped: ``out = T(min(silu(g), limit) * min(max(u, -limit), limit))``.

        g and u are the halves ``input = [g, u]``. Computed in float32 and rounded once; NaN stays NaN; a NaN limit means
        no limit.

        Args:
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
            limit: largest activated gate and largest magnitude of u.

        Returns:
            out: [..., hidden_size].
        """

swiglustep_and_mul: _swiglustep_and_mul

class _situ_and_mul(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor, beta: float = 1.0, linear_beta: float = -1.0) -> None:
        """SituGLU: ``out = T(beta * tanh(g / beta) / (1 + exp(-g)) * y)`` for the halves ``input = [g, u]``.

        ``y = linear_beta * tanh(u / linear_beta)`` if `linear_beta` is above 0, else ``y = u``. Computed in float32 and
        rounded once; NaN stays NaN. The gate of Kimi K3. Modelled on vLLM's op of this name.

        Args:
            out: [..., hidden_size], written; constant row stride.
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
            beta: bound of the activated gate, not 0
            linear_beta: bound of y, or a number that is not positive for none.
        """
    @staticmethod
    def new(input: Tensor, beta: float = 1.0, linear_beta: float = -1.0) -> Tensor:
        """SituGLU: ``out = T(beta * tanh(g / beta) / (1 + exp(-g)) * y)`` for the halves ``input = [g, u]``.

        ``y = linear_beta * tanh(u / linear_beta)`` if `linear_beta` is above 0, else ``y = u``. Computed in float32 and
        rounded once; NaN stays NaN. The gate of Kimi K3. Modelled on vLLM's op of this name.

        Args:
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
            beta: bound of the activated gate, not 0
            linear_beta: bound of y, or a number that is not positive for none.

        Returns:
            out: [..., hidden_size].
        """

situ_and_mul: _situ_and_mul

class _masked_moe_activation(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        valid_token_counts: Tensor,
        activation: str,
        clamp_limit: float = 0.0,
        alpha: float = 1.0,
        beta: float = 0.0,
        situ_beta: float = 1.0,
        situ_linear_beta: float = -1.0,
    ) -> None:
        """An activation of the first ``valid_token_counts[e]`` rows of each expert e; other rows are left unchanged.

        ``"silu"``, ``"gelu"`` and ``"gelu_tanh"`` equal `silu_and_mul`, `gelu_and_mul` and `gelu_tanh_and_mul`;
        ``"swigluoai"`` equals `swigluoai_and_mul` with `alpha` and `clamp_limit`, ``"swiglustep"`` `swiglustep_and_mul`
        with `clamp_limit`, and ``"situ"`` `situ_and_mul` with `situ_beta` and `situ_linear_beta`. ``"silu_with_clamp"`` and
        ``"swigluoai_uninterleave"`` are ``T(T(g / (1 + exp(-alpha * g))) * (u + beta))`` for the halves ``input = [g, u]``,
        with g at most l and u clamped to +-l, where l is `clamp_limit` rounded to the element type; NaN stays NaN. With the
        suffix ``"_no_mul"``, the activation is not gated: `silu`, `gelu`, its approximation by tanh, or `relu2` of every
        element. Modelled on vLLM's op of this name.

        Args:
            out: [num_experts, num_tokens, hidden_size] or [num_tokens, hidden_size], written; the last stride is 1.
            input: of the same dtype, float32, float16 or bfloat16, with rows of hidden_size elements for an activation that
                is not gated, else of twice as many; the last stride is 1.
            valid_token_counts: [num_experts] int32, contiguous, or of one element if there is no dimension of experts;
                clamped to 0 ... num_tokens.
            activation: one of the names above; others are refused.
            clamp_limit: parameters of some activations; the others ignore them.
            alpha: parameters of some activations; the others ignore them.
            beta: parameters of some activations; the others ignore them.
            situ_beta: parameters of some activations; the others ignore them.
            situ_linear_beta: parameters of some activations; the others ignore them.
        """
    @staticmethod
    def new(
        input: Tensor,
        valid_token_counts: Tensor,
        activation: str,
        clamp_limit: float = 0.0,
        alpha: float = 1.0,
        beta: float = 0.0,
        situ_beta: float = 1.0,
        situ_linear_beta: float = -1.0,
    ) -> Tensor:
        """An activation of the first ``valid_token_counts[e]`` rows of each expert e; other rows are left unchanged.

        ``"silu"``, ``"gelu"`` and ``"gelu_tanh"`` equal `silu_and_mul`, `gelu_and_mul` and `gelu_tanh_and_mul`;
        ``"swigluoai"`` equals `swigluoai_and_mul` with `alpha` and `clamp_limit`, ``"swiglustep"`` `swiglustep_and_mul`
        with `clamp_limit`, and ``"situ"`` `situ_and_mul` with `situ_beta` and `situ_linear_beta`. ``"silu_with_clamp"`` and
        ``"swigluoai_uninterleave"`` are ``T(T(g / (1 + exp(-alpha * g))) * (u + beta))`` for the halves ``input = [g, u]``,
        with g at most l and u clamped to +-l, where l is `clamp_limit` rounded to the element type; NaN stays NaN. With the
        suffix ``"_no_mul"``, the activation is not gated: `silu`, `gelu`, its approximation by tanh, or `relu2` of every
        element. Modelled on vLLM's op of this name.

        Args:
            input: of the same dtype, float32, float16 or bfloat16, with rows of hidden_size elements for an activation that
                is not gated, else of twice as many; the last stride is 1.
            valid_token_counts: [num_experts] int32, contiguous, or of one element if there is no dimension of experts;
                clamped to 0 ... num_tokens.
            activation: one of the names above; others are refused.
            clamp_limit: parameters of some activations; the others ignore them.
            alpha: parameters of some activations; the others ignore them.
            beta: parameters of some activations; the others ignore them.
            situ_beta: parameters of some activations; the others ignore them.
            situ_linear_beta: parameters of some activations; the others ignore them.

        Returns:
            out: [num_experts, num_tokens, hidden_size] or [num_tokens, hidden_size]. Zeros where the op
                leaves it as it is.
        """

masked_moe_activation: _masked_moe_activation

class _silu_and_mul_quant(_Attributes, Protocol):
    def __call__(self, result: Tensor, input: Tensor, scale: Tensor) -> None:
        """`silu_and_mul` written as fp8: ``result = fp8(clamp(T(T(silu(g)) * u) * (1 / scale)))`` for ``input = [g, u]``.

        T rounds to the dtype of `input`, and the reciprocal is rounded to float32. The result saturates at +-448 (224 for
        float8_e4m3fnuz), and NaN becomes the largest fp8 value. `static_scaled_fp8_quant` says what happens if the
        reciprocal is not finite.

        Args:
            result: [..., hidden_size], float8_e4m3fn or float8_e4m3fnuz, written; constant row stride.
            input: [..., 2 * hidden_size], float16 or bfloat16; constant row stride.
            scale: one float32 element, of any sign.
        """
    @staticmethod
    def new(input: Tensor, scale: Tensor, *, quant_dtype: torch.dtype | None = None) -> Tensor:
        """`silu_and_mul` written as fp8: ``result = fp8(clamp(T(T(silu(g)) * u) * (1 / scale)))`` for ``input = [g, u]``.

        T rounds to the dtype of `input`, and the reciprocal is rounded to float32. The result saturates at +-448 (224 for
        float8_e4m3fnuz), and NaN becomes the largest fp8 value. `static_scaled_fp8_quant` says what happens if the
        reciprocal is not finite.

        Args:
            input: [..., 2 * hidden_size], float16 or bfloat16; constant row stride.
            scale: one float32 element, of any sign.
            quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

        Returns:
            result: [..., hidden_size], float8_e4m3fn or float8_e4m3fnuz.
        """

silu_and_mul_quant: _silu_and_mul_quant

class _silu_and_mul_per_block_quant(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        scales: Tensor,
        group_size: int,
        scale_ub: Tensor | None = None,
        is_scale_transposed: bool = False,
    ) -> None:
        """`silu_and_mul` written as int8 or fp8, with one dynamic scale per group of adjacent elements.

        ``y = T(T(silu(g)) * u)`` for ``input = [g, u]``, where T rounds to the dtype of `input`. Each group has the scale
        ``s = max(min(max|y| / largest, scale_ub), smallest)``, and ``out = quantized(y / s)``; for int8, y is multiplied by
        the float32 reciprocal of s. ``largest`` is 448 for float8_e4m3fn, 224 for float8_e4m3fnuz and 127 for int8.
        ``smallest`` is 1 / (512 * largest), and 2^-23 for int8. The maximum ignores NaN; in `out`, NaN becomes the largest
        fp8 value, or 0 for int8. The op equals `silu_and_mul` followed by this quantization, bit for bit.

        Args:
            out: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or int8, written; constant row stride.
            input: [..., 2 * hidden_size], float16 or bfloat16; constant row stride; hidden_size a multiple of group_size.
            scales: [num_tokens, hidden_size / group_size] float32, written; any strides. num_tokens is the product of the
                leading dimensions of `out`.
            group_size: 64 or 128.
            scale_ub: one float32, an upper bound of every scale; only with fp8.
            is_scale_transposed: `scales` may then also be [hidden_size / group_size, num_tokens], contiguous.
        """
    @staticmethod
    def new(
        input: Tensor,
        group_size: int,
        scale_ub: Tensor | None = None,
        is_scale_transposed: bool = False,
        *,
        quant_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`silu_and_mul` written as int8 or fp8, with one dynamic scale per group of adjacent elements.

        ``y = T(T(silu(g)) * u)`` for ``input = [g, u]``, where T rounds to the dtype of `input`. Each group has the scale
        ``s = max(min(max|y| / largest, scale_ub), smallest)``, and ``out = quantized(y / s)``; for int8, y is multiplied by
        the float32 reciprocal of s. ``largest`` is 448 for float8_e4m3fn, 224 for float8_e4m3fnuz and 127 for int8.
        ``smallest`` is 1 / (512 * largest), and 2^-23 for int8. The maximum ignores NaN; in `out`, NaN becomes the largest
        fp8 value, or 0 for int8. The op equals `silu_and_mul` followed by this quantization, bit for bit.

        Args:
            input: [..., 2 * hidden_size], float16 or bfloat16; constant row stride; hidden_size a multiple of group_size.
            group_size: 64 or 128.
            scale_ub: one float32, an upper bound of every scale; only with fp8.
            is_scale_transposed: `scales` may then also be [hidden_size / group_size, num_tokens], contiguous.
            quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

        Returns:
            out: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or int8.
            scales: [num_tokens, hidden_size / group_size] float32; with `is_scale_transposed` columns are contiguous.
        """

silu_and_mul_per_block_quant: _silu_and_mul_per_block_quant

class _situ_and_mul_quant(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        scale: Tensor,
        input: Tensor,
        beta: float = 1.0,
        linear_beta: float = -1.0,
        group_size: int = 0,
        num_valid_tokens: Tensor | None = None,
        topk: int = 1,
    ) -> None:
        """`situ_and_mul` of the first rows, written as fp8 with one dynamic scale per group of 128 adjacent elements.

        ``y = T(situ(g, u))``, where T rounds to the dtype of `input`. Each group has the scale ``s = max(max|y|, 1e-30) *
        (1 / largest)``, and ``out = fp8(y * (1 / s))``; both reciprocals are rounded to float32, and ``largest`` is 448
        (224 for float8_e4m3fnuz). The maximum ignores NaN, which becomes the largest fp8 value in `out`, as does an
        infinity, with an infinite scale. Rows from ``num_valid_tokens * topk`` on get scales of 1, and their `out` is left
        unchanged. For the second GEMM of experts, with the rows of a token's topk choices. Modelled on vLLM's op of this
        name.

        Args:
            out: [..., hidden_size], float8_e4m3fn or float8_e4m3fnuz, written; constant row stride.
            scale: [..., hidden_size / 128] float32, written; constant row stride.
            input: [..., 2 * hidden_size], float16 or bfloat16; constant row stride; hidden_size a multiple of 128.
            beta: bound of the activated gate, not 0
            linear_beta: bound of y, or a number that is not positive for none.
            group_size: 128; the default, as in vLLM, is refused.
            num_valid_tokens: one int32 element, any number; without it all rows are valid.
            topk: rows of a token, at least 1.
        """
    @staticmethod
    def new(
        input: Tensor,
        beta: float = 1.0,
        linear_beta: float = -1.0,
        group_size: int = 0,
        num_valid_tokens: Tensor | None = None,
        topk: int = 1,
        *,
        quant_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`situ_and_mul` of the first rows, written as fp8 with one dynamic scale per group of 128 adjacent elements.

        ``y = T(situ(g, u))``, where T rounds to the dtype of `input`. Each group has the scale ``s = max(max|y|, 1e-30) *
        (1 / largest)``, and ``out = fp8(y * (1 / s))``; both reciprocals are rounded to float32, and ``largest`` is 448
        (224 for float8_e4m3fnuz). The maximum ignores NaN, which becomes the largest fp8 value in `out`, as does an
        infinity, with an infinite scale. Rows from ``num_valid_tokens * topk`` on get scales of 1, and their `out` is left
        unchanged. For the second GEMM of experts, with the rows of a token's topk choices. Modelled on vLLM's op of this
        name.

        Args:
            input: [..., 2 * hidden_size], float16 or bfloat16; constant row stride; hidden_size a multiple of 128.
            beta: bound of the activated gate, not 0
            linear_beta: bound of y, or a number that is not positive for none.
            group_size: 128; the default, as in vLLM, is refused.
            num_valid_tokens: one int32 element, any number; without it all rows are valid.
            topk: rows of a token, at least 1.
            quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

        Returns:
            out: [..., hidden_size], float8_e4m3fn or float8_e4m3fnuz. Zeros where the op leaves it as it
                is.
            scale: [..., hidden_size / 128] float32.
        """

situ_and_mul_quant: _situ_and_mul_quant

class _muse_spark_mul_tanh_soft_cap(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor, multiplier: float, soft_cap_temp: float) -> None:
        """Multiply logits and cap them softly: ``out = c * tanh(input * multiplier / c)`` in float32, with c soft_cap_temp.

        Args:
            out: [...] float32, written; constant row stride.
            input: the same shape, float32, float16 or bfloat16; constant row stride.
            multiplier: the factor of logits.
            soft_cap_temp: the cap. Numbers are 0 or NaN under a cap of 0.
        """
    @staticmethod
    def new(input: Tensor, multiplier: float, soft_cap_temp: float) -> Tensor:
        """Multiply logits and cap them softly: ``out = c * tanh(input * multiplier / c)`` in float32, with c soft_cap_temp.

        Args:
            input: [...], float32, float16 or bfloat16; constant row stride.
            multiplier: the factor of logits.
            soft_cap_temp: the cap. Numbers are 0 or NaN under a cap of 0.

        Returns:
            out: [...] float32.
        """

muse_spark_mul_tanh_soft_cap: _muse_spark_mul_tanh_soft_cap

class _gelu_and_mul_sparse(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor, activation_sparsity: float, approximate: str = 'none') -> None:
        """GEGLU of the gates above a quantile of their row; about the fraction `activation_sparsity` of `out` is zero.

        ``out = T(T(gelu(max(T(g - c), 0))) * u)`` for the halves ``input = [g, u]`` and the cutoff ``c = T(T(mean(g)) +
        T(T(std(g)) * q))``, where q is the standard normal quantile of `activation_sparsity`. Mean and deviation (of the
        population) are taken over the row in float64 and rounded to float32, then to the element type T. Every later result
        is rounded to T. The statistical top-k of Gemma 3n (You et al. 2025, arXiv:2506.06644).

        Args:
            out: [..., hidden_size], written; constant row stride.
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
            activation_sparsity: the fraction of a normally distributed row to cut, above 0 and below 1.
            approximate: "none" for the error function, "tanh" for the hyperbolic tangent.
        """
    @staticmethod
    def new(input: Tensor, activation_sparsity: float, approximate: str = 'none') -> Tensor:
        """GEGLU of the gates above a quantile of their row; about the fraction `activation_sparsity` of `out` is zero.

        ``out = T(T(gelu(max(T(g - c), 0))) * u)`` for the halves ``input = [g, u]`` and the cutoff ``c = T(T(mean(g)) +
        T(T(std(g)) * q))``, where q is the standard normal quantile of `activation_sparsity`. Mean and deviation (of the
        population) are taken over the row in float64 and rounded to float32, then to the element type T. Every later result
        is rounded to T. The statistical top-k of Gemma 3n (You et al. 2025, arXiv:2506.06644).

        Args:
            input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
            activation_sparsity: the fraction of a normally distributed row to cut, above 0 and below 1.
            approximate: "none" for the error function, "tanh" for the hyperbolic tangent.

        Returns:
            out: [..., hidden_size].
        """

gelu_and_mul_sparse: _gelu_and_mul_sparse

class _paged_attention_v1(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        num_kv_heads: int,
        scale: float,
        block_tables: Tensor,
        seq_lens: Tensor,
        block_size: int,
        max_seq_len: int,
        alibi_slopes: Tensor | None,
        kv_cache_dtype: str,
        k_scale: Tensor | float,
        v_scale: Tensor | float,
        tp_rank: int = 0,
        blocksparse_local_blocks: int = 0,
        blocksparse_vert_stride: int = 0,
        blocksparse_block_size: int = 64,
        blocksparse_head_sliding_step: int = 0,
        *,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
        constant_past: bool = False,
    ) -> None:
        """Attention of one query token of each sequence over its tokens in a paged key-value cache.

        For head h of sequence s of length L, with the keys and values of the key-value head that h shares::

            l_i = softcap(scale * q . k_i) + alibi_slopes[h] * (i - L + 1)      0 <= i < L
            p_i = exp(l_i - m) / (sum_j exp(l_j - m) + 1e-6),  m = max_j l_j
            out = T(sum_i p_i * v_i)

        in float32 (PagedAttention: Kwon et al. 2023, arXiv:2309.06180). With an fp8 cache and 16-bit queries, p_i is
        rounded to float16. Token i lies in block ``block_tables[s, i // block_size]``, slot ``i % block_size``. A token
        with a block number out of range contributes nothing. An empty sequence gives zeros. Slots without a token
        are ignored, whatever they contain. An infinite value of an attended token gives infinity or NaN, and so does a
        logit that overflows float32. Accumulating the largest finite values does not overflow; a float32 result within
        2^-16 of the largest float may be rounded to infinity.

        Args:
            out: [num_seqs, num_heads, head_size], written; heads contiguous.
            query: the same shape, float32, float16 or bfloat16; heads contiguous, any row stride.
            key_cache: packed, [num_blocks, num_kv_heads, head_size / x, block_size, x] with x elements in 16 bytes, or
                flash, [num_blocks, block_size, num_kv_heads, head_size]. The number of dimensions tells which. Its dtype is
                that of the queries, or for fp8 uint8 or a float8.
            value_cache: packed, [num_blocks, num_kv_heads, head_size, block_size], or flash, the shape of key_cache.
            num_kv_heads: key-value heads; divides num_heads.
            scale: factor of the logits.
            block_tables: [num_seqs, max_blocks], int32 or int64, any strides.
            seq_lens: [num_seqs], int32 or int64, any stride; at most max_blocks * block_size tokens count: later
                ones are left out, which is an error only with ``PYOPS_CHECK=1``.
            block_size: slots of a block.
            max_seq_len: for compatibility with vLLM; no effect: the length is not limited.
            alibi_slopes: [num_heads] float32, or None (Press et al. 2021, arXiv:2108.12409).
            kv_cache_dtype: "auto" (that of the queries), "fp8" or "fp8_e4m3", "fp8_e5m2".
            k_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto".
            v_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto".
            tp_rank: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks.
            blocksparse_local_blocks: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks.
            blocksparse_vert_stride: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks.
            blocksparse_block_size: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks.
            blocksparse_head_sliding_step: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks.
            sliding_window: tokens at the end of a sequence that are attended to; 0 for all.
            logits_soft_cap: c of ``softcap(l) = c * tanh(l / c)``; 0 for none.
            sinks: [num_heads] float32, for each head one more logit, without a value; or None.
            lse: [num_heads, num_seqs] float32, written: ``m + log(sum_i exp(l_i - m))``, -inf for an empty sequence.
            constant_past: a promise that no kernel which may still run when this one starts writes seq_lens,
                block_tables or scales, nor keys and values of tokens but the last one of each sequence. With few short
                sequences the others are then loaded while the previous kernel runs.
        """
    @staticmethod
    def new(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        num_kv_heads: int,
        scale: float,
        block_tables: Tensor,
        seq_lens: Tensor,
        block_size: int,
        max_seq_len: int,
        alibi_slopes: Tensor | None,
        kv_cache_dtype: str,
        k_scale: Tensor | float,
        v_scale: Tensor | float,
        tp_rank: int = 0,
        blocksparse_local_blocks: int = 0,
        blocksparse_vert_stride: int = 0,
        blocksparse_block_size: int = 64,
        blocksparse_head_sliding_step: int = 0,
        *,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
        constant_past: bool = False,
    ) -> Tensor:
        """Attention of one query token of each sequence over its tokens in a paged key-value cache.

        For head h of sequence s of length L, with the keys and values of the key-value head that h shares::

            l_i = softcap(scale * q . k_i) + alibi_slopes[h] * (i - L + 1)      0 <= i < L
            p_i = exp(l_i - m) / (sum_j exp(l_j - m) + 1e-6),  m = max_j l_j
            out = T(sum_i p_i * v_i)

        in float32 (PagedAttention: Kwon et al. 2023, arXiv:2309.06180). With an fp8 cache and 16-bit queries, p_i is
        rounded to float16. Token i lies in block ``block_tables[s, i // block_size]``, slot ``i % block_size``. A token
        with a block number out of range contributes nothing. An empty sequence gives zeros. Slots without a token
        are ignored, whatever they contain. An infinite value of an attended token gives infinity or NaN, and so does a
        logit that overflows float32. Accumulating the largest finite values does not overflow; a float32 result within
        2^-16 of the largest float may be rounded to infinity.

        Args:
            query: [num_seqs, num_heads, head_size], float32, float16 or bfloat16; heads contiguous, any row stride.
            key_cache: packed, [num_blocks, num_kv_heads, head_size / x, block_size, x] with x elements in 16 bytes, or
                flash, [num_blocks, block_size, num_kv_heads, head_size]. The number of dimensions tells which. Its dtype is
                that of the queries, or for fp8 uint8 or a float8.
            value_cache: packed, [num_blocks, num_kv_heads, head_size, block_size], or flash, the shape of key_cache.
            num_kv_heads: key-value heads; divides num_heads.
            scale: factor of the logits.
            block_tables: [num_seqs, max_blocks], int32 or int64, any strides.
            seq_lens: [num_seqs], int32 or int64, any stride; at most max_blocks * block_size tokens count: later
                ones are left out, which is an error only with ``PYOPS_CHECK=1``.
            block_size: slots of a block.
            max_seq_len: for compatibility with vLLM; no effect: the length is not limited.
            alibi_slopes: [num_heads] float32, or None (Press et al. 2021, arXiv:2108.12409).
            kv_cache_dtype: "auto" (that of the queries), "fp8" or "fp8_e4m3", "fp8_e5m2".
            k_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto".
            v_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto".
            tp_rank: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks.
            blocksparse_local_blocks: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks.
            blocksparse_vert_stride: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks.
            blocksparse_block_size: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks.
            blocksparse_head_sliding_step: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks.
            sliding_window: tokens at the end of a sequence that are attended to; 0 for all.
            logits_soft_cap: c of ``softcap(l) = c * tanh(l / c)``; 0 for none.
            sinks: [num_heads] float32, for each head one more logit, without a value; or None.
            lse: [num_heads, num_seqs] float32, written: ``m + log(sum_i exp(l_i - m))``, -inf for an empty sequence.
            constant_past: a promise that no kernel which may still run when this one starts writes seq_lens,
                block_tables or scales, nor keys and values of tokens but the last one of each sequence. With few short
                sequences the others are then loaded while the previous kernel runs.

        Returns:
            out: [num_seqs, num_heads, head_size].
        """

paged_attention_v1: _paged_attention_v1

class _merge_attn_states(_Attributes, Protocol):
    def __call__(
        self,
        output: Tensor,
        prefix_output: Tensor,
        prefix_lse: Tensor,
        suffix_output: Tensor,
        suffix_lse: Tensor,
        output_lse: Tensor | None = None,
        prefill_tokens_with_context: int | None = None,
        output_scale: Tensor | None = None,
    ) -> None:
        """Attention over all keys, merged from two parts of them: ``output = T((a * prefix + b * suffix) / (a + b))``.

        ``a = exp(prefix_lse - m), b = exp(suffix_lse - m), m = max(prefix_lse, suffix_lse)``, in float32, and ``output_lse
        = log(a + b) + m`` (section 2.2 of Ye et al. 2025, arXiv:2501.01005). A part whose lse is +inf or -inf is empty: the
        other part is copied, whatever it contains. If both parts are empty, the prefix is copied and output_lse is -inf. An
        infinite element gives NaN if float32 rounds the weight of its part to 0. With `output_scale`, output is
        ``fp8(result * (1 / output_scale))`` of the result in float32, saturating as in `static_scaled_fp8_quant`.

        Args:
            output: [num_tokens, num_heads, head_size], written, the dtype of prefix_output; may be `prefix_output`. With
                `output_scale` float8_e4m3fn or float8_e4m3fnuz.
            prefix_output: the shape of output, float32, float16 or bfloat16. All three may have any strides
                but the last.
            prefix_lse: [num_heads, num_tokens] float32, natural log-sum-exp of the logits; any strides.
            suffix_output: the shape of output, float32, float16 or bfloat16. All three may have any strides
                but the last.
            suffix_lse: [num_heads, num_tokens] float32, natural log-sum-exp of the logits; any strides.
            output_lse: [num_heads, num_tokens] float32, written; any strides. Or None.
            prefill_tokens_with_context: tokens from this one on have no prefix: output and output_lse are copies of the
                suffix's, an lse of +inf as well. None: all tokens have one.
            output_scale: one float32, or None.
        """
    @staticmethod
    def new(
        prefix_output: Tensor,
        prefix_lse: Tensor,
        suffix_output: Tensor,
        suffix_lse: Tensor,
        output_lse: Tensor | None = None,
        prefill_tokens_with_context: int | None = None,
        output_scale: Tensor | None = None,
        *,
        quant_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Attention over all keys, merged from two parts of them: ``output = T((a * prefix + b * suffix) / (a + b))``.

        ``a = exp(prefix_lse - m), b = exp(suffix_lse - m), m = max(prefix_lse, suffix_lse)``, in float32, and ``output_lse
        = log(a + b) + m`` (section 2.2 of Ye et al. 2025, arXiv:2501.01005). A part whose lse is +inf or -inf is empty: the
        other part is copied, whatever it contains. If both parts are empty, the prefix is copied and output_lse is -inf. An
        infinite element gives NaN if float32 rounds the weight of its part to 0. With `output_scale`, output is
        ``fp8(result * (1 / output_scale))`` of the result in float32, saturating as in `static_scaled_fp8_quant`.

        Args:
            prefix_output: the shape of output, float32, float16 or bfloat16. All three may have any strides
                but the last.
            prefix_lse: [num_heads, num_tokens] float32, natural log-sum-exp of the logits; any strides.
            suffix_output: the shape of output, float32, float16 or bfloat16. All three may have any strides
                but the last.
            suffix_lse: [num_heads, num_tokens] float32, natural log-sum-exp of the logits; any strides.
            output_lse: [num_heads, num_tokens] float32, written; any strides. Or None.
            prefill_tokens_with_context: tokens from this one on have no prefix: output and output_lse are copies of the
                suffix's, an lse of +inf as well. None: all tokens have one.
            output_scale: one float32, or None.
            quant_dtype: of the output with `output_scale`; None for the e4m3 of the device.

        Returns:
            output: [num_tokens, num_heads, head_size], the dtype of prefix_output. With `output_scale`
                float8_e4m3fn or float8_e4m3fnuz.
        """

merge_attn_states: _merge_attn_states

class _sm100_cutlass_mla_decode(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        lse: Tensor | None,
        q_nope: Tensor,
        q_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        workspace: Tensor | None,
        scale: float,
        num_kv_splits: int,
        *,
        query_tokens: int = 1,
    ) -> None:
        """Multi-head latent attention of the newest tokens of each sequence over its tokens in a paged cache, on any GPU.

        The cache holds the latent KV of each token: a latent vector c of 512 elements, then a RoPE key r of 64 elements
        (`concat_and_cache_mla`). Both together are the key of every head, and c is the value of every head. The caller has
        multiplied the queries by the up-projection of the keys (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1, absorbed
        form). For a head of a sequence of length L::

            l_i = scale * (q_nope . c_i + q_pe . r_i)                           0 <= i < L
            p_i = exp(l_i - m) / (sum_j exp(l_j - m) + 1e-6),  m = max_j l_j
            out = T(sum_i p_i * c_i)

        in float32; ``exp(l_i - m)`` is rounded to 16 bits before it multiplies c_i, unless the queries are float32. The
        accumulators of logits of fp8 queries over an fp8 cache may have 14 bits (`fp8_accumulation.py`). Token i
        lies in page ``page_table[s, i // page_size]``, slot ``i % page_size``. A token with a page number out of range
        contributes nothing. An empty sequence gives zeros. Slots without a token are ignored, whatever they contain. An
        infinite element of an attended latent KV gives infinity or NaN, and so does a logit that overflows float32.
        Accumulating the largest finite values does not overflow; a float32 result within 2^-16 of the largest float may be
        rounded to infinity.
        Nothing is returned.

        With n = `query_tokens` query tokens of each sequence, the newest of its tokens, rows ``s * n`` to ``s * n + n - 1``
        of the queries are those of sequence s. The t-th of them attends to the first ``L - n + 1 + t`` tokens: the formula
        with this number as L. An infinite element, or NaN, of a token may then reach all queries of its sequence.

        Args:
            out: [num_seqs * query_tokens, num_heads, 512], written, of the queries' dtype, or bfloat16 for queries of fp8;
                heads contiguous.
            lse: [num_seqs * query_tokens, num_heads] float32, written: ``m + log(sum_i exp(l_i - m))``, -inf for an empty
                sequence; or None.
            q_nope: [num_seqs * query_tokens, num_heads, 512], float32, float16, bfloat16 or float8_e4m3fn; any strides but
                the last. With several query tokens, the stride of rows is num_heads times that of heads. Any number of
                heads.
            q_pe: [num_seqs * query_tokens, num_heads, 64], the RoPE part of the queries, of the dtype of q_nope; strides
                likewise. No scale is applied to queries of fp8: a caller who has quantized them multiplies `scale` by it.
            kv_c_and_k_pe_cache: [num_pages, page_size, 576], of the queries' dtype, or fp8 (float8_e4m3fn, float8_e4m3fnuz
                or uint8). No scale is applied to fp8 values: a caller who has written them with a scale multiplies `scale`
                and the result by it. Or [num_pages, page_size, 656] uint8 in the format "fp8_ds_mla"
                (`concat_and_cache_mla`, written with the queries' dtype, float16 or bfloat16): ``c = T(quant * scale)``,
                one scale for 128 quants. Any page size, any strides but the last.
            seq_lens: [num_seqs], int32 or int64, any stride; at most max_pages * page_size tokens count: later ones are
                left out, which is an error only with ``PYOPS_CHECK=1``.
            page_table: [num_seqs, max_pages], int32 or int64, any strides.
            workspace: uint8, or None. Neither read nor written: the op allocates its own for the length of the call.
            scale: factor of the logits.
            num_kv_splits: most splits of a sequence; each split is a block. 1 for a single pass, 0 or less for the number
                that keeps the device busy.
            query_tokens: query tokens of each sequence, as in speculative decoding.
        """
    @staticmethod
    def new(
        lse: Tensor | None,
        q_nope: Tensor,
        q_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        workspace: Tensor | None,
        scale: float,
        num_kv_splits: int,
        *,
        query_tokens: int = 1,
    ) -> Tensor:
        """Multi-head latent attention of the newest tokens of each sequence over its tokens in a paged cache, on any GPU.

        The cache holds the latent KV of each token: a latent vector c of 512 elements, then a RoPE key r of 64 elements
        (`concat_and_cache_mla`). Both together are the key of every head, and c is the value of every head. The caller has
        multiplied the queries by the up-projection of the keys (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1, absorbed
        form). For a head of a sequence of length L::

            l_i = scale * (q_nope . c_i + q_pe . r_i)                           0 <= i < L
            p_i = exp(l_i - m) / (sum_j exp(l_j - m) + 1e-6),  m = max_j l_j
            out = T(sum_i p_i * c_i)

        in float32; ``exp(l_i - m)`` is rounded to 16 bits before it multiplies c_i, unless the queries are float32. The
        accumulators of logits of fp8 queries over an fp8 cache may have 14 bits (`fp8_accumulation.py`). Token i
        lies in page ``page_table[s, i // page_size]``, slot ``i % page_size``. A token with a page number out of range
        contributes nothing. An empty sequence gives zeros. Slots without a token are ignored, whatever they contain. An
        infinite element of an attended latent KV gives infinity or NaN, and so does a logit that overflows float32.
        Accumulating the largest finite values does not overflow; a float32 result within 2^-16 of the largest float may be
        rounded to infinity.
        Nothing is returned.

        With n = `query_tokens` query tokens of each sequence, the newest of its tokens, rows ``s * n`` to ``s * n + n - 1``
        of the queries are those of sequence s. The t-th of them attends to the first ``L - n + 1 + t`` tokens: the formula
        with this number as L. An infinite element, or NaN, of a token may then reach all queries of its sequence.

        Args:
            lse: [num_seqs * query_tokens, num_heads] float32, written: ``m + log(sum_i exp(l_i - m))``, -inf for an empty
                sequence; or None.
            q_nope: [num_seqs * query_tokens, num_heads, 512], float32, float16, bfloat16 or float8_e4m3fn; any strides but
                the last. With several query tokens, the stride of rows is num_heads times that of heads. Any number of
                heads.
            q_pe: [num_seqs * query_tokens, num_heads, 64], the RoPE part of the queries, of the dtype of q_nope; strides
                likewise. No scale is applied to queries of fp8: a caller who has quantized them multiplies `scale` by it.
            kv_c_and_k_pe_cache: [num_pages, page_size, 576], of the queries' dtype, or fp8 (float8_e4m3fn, float8_e4m3fnuz
                or uint8). No scale is applied to fp8 values: a caller who has written them with a scale multiplies `scale`
                and the result by it. Or [num_pages, page_size, 656] uint8 in the format "fp8_ds_mla"
                (`concat_and_cache_mla`, written with the queries' dtype, float16 or bfloat16): ``c = T(quant * scale)``,
                one scale for 128 quants. Any page size, any strides but the last.
            seq_lens: [num_seqs], int32 or int64, any stride; at most max_pages * page_size tokens count: later ones are
                left out, which is an error only with ``PYOPS_CHECK=1``.
            page_table: [num_seqs, max_pages], int32 or int64, any strides.
            workspace: uint8, or None. Neither read nor written: the op allocates its own for the length of the call.
            scale: factor of the logits.
            num_kv_splits: most splits of a sequence; each split is a block. 1 for a single pass, 0 or less for the number
                that keeps the device busy.
            query_tokens: query tokens of each sequence, as in speculative decoding.

        Returns:
            out: [num_seqs * query_tokens, num_heads, 512], of the queries' dtype, or bfloat16 for queries
                of fp8.
        """

sm100_cutlass_mla_decode: _sm100_cutlass_mla_decode

class _sparse_mla_attention(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        lse: Tensor | None,
        q_nope: Tensor,
        q_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        indices: Tensor,
        topk_length: Tensor | None,
        scale: float,
        num_kv_splits: int,
    ) -> None:
        """Multi-head latent attention of each query token over a list of slots of a paged cache, on any GPU.

        DeepSeek sparse attention (DeepSeek-AI 2025, DeepSeek-V3.2): an indexer has chosen, for each query token, the tokens
        that it attends to (`fp8_mqa_logits`, `top_k_per_row_prefill`). Decode and prefill are the same call, in which a
        prompt has many query tokens: causality is a property of the lists. The formula is that of
        `sm100_cutlass_mla_decode`, with the entry of the cache in slot ``indices[t, i]`` as token i of query token t. Slot
        number ``page * page_size + offset`` is slot `offset` of the page. A slot number that is negative or has no page is
        skipped, a slot that is listed twice counts twice, and a query token without any slot gives zeros and an lse of
        -inf. Nothing is returned.

        Args:
            out: [num_tokens, num_heads, 512], written, of the queries' dtype, or bfloat16 for queries of fp8; heads
                contiguous.
            lse: [num_tokens, num_heads] float32, written: the log-sum-exp of the logits; or None.
            q_nope: [num_tokens, num_heads, 512], float32, float16, bfloat16 or float8_e4m3fn; any strides but the last: a
                view of the first 512 elements of queries of 576 will do. Any number of heads.
            q_pe: [num_tokens, num_heads, 64], the RoPE part of the queries, of the dtype of q_nope.
            kv_c_and_k_pe_cache: [num_pages, page_size, 576], of the queries' dtype or fp8, or [num_pages, page_size, 656]
                uint8 in the format "fp8_ds_mla", as `sm100_cutlass_mla_decode` takes it.
            indices: [num_tokens, topk], int32 or int64, any token stride: slot numbers.
            topk_length: [num_tokens], int32 or int64, any stride: how many of a token's indices count, the first ones; or
                None for all of them. Longer lists than topk end with it.
            scale: factor of the logits.
            num_kv_splits: most splits of a list; each split is a block. 1 for a single pass, 0 or less for the number
                that keeps the device busy.
        """
    @staticmethod
    def new(
        lse: Tensor | None,
        q_nope: Tensor,
        q_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        indices: Tensor,
        topk_length: Tensor | None,
        scale: float,
        num_kv_splits: int,
    ) -> Tensor:
        """Multi-head latent attention of each query token over a list of slots of a paged cache, on any GPU.

        DeepSeek sparse attention (DeepSeek-AI 2025, DeepSeek-V3.2): an indexer has chosen, for each query token, the tokens
        that it attends to (`fp8_mqa_logits`, `top_k_per_row_prefill`). Decode and prefill are the same call, in which a
        prompt has many query tokens: causality is a property of the lists. The formula is that of
        `sm100_cutlass_mla_decode`, with the entry of the cache in slot ``indices[t, i]`` as token i of query token t. Slot
        number ``page * page_size + offset`` is slot `offset` of the page. A slot number that is negative or has no page is
        skipped, a slot that is listed twice counts twice, and a query token without any slot gives zeros and an lse of
        -inf. Nothing is returned.

        Args:
            lse: [num_tokens, num_heads] float32, written: the log-sum-exp of the logits; or None.
            q_nope: [num_tokens, num_heads, 512], float32, float16, bfloat16 or float8_e4m3fn; any strides but the last: a
                view of the first 512 elements of queries of 576 will do. Any number of heads.
            q_pe: [num_tokens, num_heads, 64], the RoPE part of the queries, of the dtype of q_nope.
            kv_c_and_k_pe_cache: [num_pages, page_size, 576], of the queries' dtype or fp8, or [num_pages, page_size, 656]
                uint8 in the format "fp8_ds_mla", as `sm100_cutlass_mla_decode` takes it.
            indices: [num_tokens, topk], int32 or int64, any token stride: slot numbers.
            topk_length: [num_tokens], int32 or int64, any stride: how many of a token's indices count, the first ones; or
                None for all of them. Longer lists than topk end with it.
            scale: factor of the logits.
            num_kv_splits: most splits of a list; each split is a block. 1 for a single pass, 0 or less for the number
                that keeps the device busy.

        Returns:
            out: [num_tokens, num_heads, 512], of the queries' dtype, or bfloat16 for queries of fp8.
        """

sparse_mla_attention: _sparse_mla_attention

class _fp8_mqa_logits(_Attributes, Protocol):
    def __call__(
        self,
        logits: Tensor,
        q: Tensor,
        k: Tensor,
        k_scales: Tensor,
        weights: Tensor,
        cu_seqlen_ks: Tensor,
        cu_seqlen_ke: Tensor,
        clean_logits: bool,
        compressed: bool,
    ) -> None:
        """Logits of the indexer of DeepSeek sparse attention for the query tokens of prompts, on any GPU.

        The keys of all heads are the same (MQA). For query token m and a key n with ``ks[m] <= n < ke[m]``
        (DeepSeek-AI 2025, DeepSeek-V3.2, the lightning indexer)::

            logits[m, n] = k_scales[n] * sum_h weights[m, h] * max(q[m, h] . k[n], 0)

        in float32, in which the maximum of NaN and 0 is 0. Hopper's tensor cores keep 14 bits of ``q[m, h] . k[n]``
        (`fp8_accumulation.py`). The caller has multiplied the weights by the scales of the queries.
        `top_k_per_row_prefill` then finds the largest of each row.

        Args:
            logits: [num_tokens, num_keys] float32, written where query tokens have keys; columns contiguous, any row
                stride. Or, if `compressed`, [num_tokens, columns] with logit n of row m in column ``n - ks[m]``; keys
                beyond the columns have no logit.
            q: [num_tokens, num_heads, head_size] float8_e4m3fn; heads contiguous, any token stride.
            k: [num_keys, head_size] float8_e4m3fn or uint8 of the same bits; any row stride.
            k_scales: [num_keys] float32, contiguous.
            weights: [num_tokens, num_heads] float32; any row stride.
            cu_seqlen_ks: [num_tokens] int32, contiguous: the first key of each query token.
            cu_seqlen_ke: [num_tokens] int32, contiguous: the key after the last one. Bounds beyond the keys end with them.
            clean_logits: whether the other elements become -inf; otherwise they are left unchanged. Only without
                `compressed`.
            compressed: whether a row begins with its first key.
        """
    @staticmethod
    def new(
        q: Tensor,
        k: Tensor,
        k_scales: Tensor,
        weights: Tensor,
        cu_seqlen_ks: Tensor,
        cu_seqlen_ke: Tensor,
        clean_logits: bool,
        compressed: bool,
    ) -> Tensor:
        """Logits of the indexer of DeepSeek sparse attention for the query tokens of prompts, on any GPU.

        The keys of all heads are the same (MQA). For query token m and a key n with ``ks[m] <= n < ke[m]``
        (DeepSeek-AI 2025, DeepSeek-V3.2, the lightning indexer)::

            logits[m, n] = k_scales[n] * sum_h weights[m, h] * max(q[m, h] . k[n], 0)

        in float32, in which the maximum of NaN and 0 is 0. Hopper's tensor cores keep 14 bits of ``q[m, h] . k[n]``
        (`fp8_accumulation.py`). The caller has multiplied the weights by the scales of the queries.
        `top_k_per_row_prefill` then finds the largest of each row.

        Args:
            q: [num_tokens, num_heads, head_size] float8_e4m3fn; heads contiguous, any token stride.
            k: [num_keys, head_size] float8_e4m3fn or uint8 of the same bits; any row stride.
            k_scales: [num_keys] float32, contiguous.
            weights: [num_tokens, num_heads] float32; any row stride.
            cu_seqlen_ks: [num_tokens] int32, contiguous: the first key of each query token.
            cu_seqlen_ke: [num_tokens] int32, contiguous: the key after the last one. Bounds beyond the keys end with them.
            clean_logits: whether the other elements become -inf; otherwise they are left unchanged. Only without
                `compressed`.
            compressed: whether a row begins with its first key.

        Returns:
            logits: [num_tokens, num_keys] float32, written where query tokens have keys; columns, any row
                stride. Or, if `compressed`, [num_tokens, columns] with logit n of row m in column ``n -
                ks[m]``; keys beyond the columns have no logit. Zeros where the op leaves it as it is.
        """

fp8_mqa_logits: _fp8_mqa_logits

class _fp8_paged_mqa_logits(_Attributes, Protocol):
    def __call__(
        self,
        logits: Tensor,
        q: Tensor,
        kv_cache: Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        clean_logits: bool,
    ) -> None:
        """`fp8_mqa_logits` of the last tokens of each sequence with the keys of the indexer's paged cache.

        Row ``s * next_n + j`` of the logits is that of token j of sequence s. It has the keys at positions
        ``n < context_lens[s] - (next_n - 1 - j)``, logit n in column n, for as many columns as there are. A key with a
        block number out of range has a logit of -inf. `top_k_per_row_decode` then finds the largest of each row.

        Args:
            logits: [num_seqs * next_n, columns] float32, written where rows have keys; columns contiguous, any row stride.
            q: [num_seqs, next_n, num_heads, head_size] float8_e4m3fn, contiguous.
            kv_cache: [num_blocks, block_size, head_size + 4] uint8, blocks contiguous, any block stride: the keys of all
                slots of a block, then their float32 scales (`indexer_k_quant_and_cache` with groups of head_size).
            weights: [num_seqs * next_n, num_heads] float32; any row stride.
            context_lens: [num_seqs] int32 or int64, any stride; or [num_seqs, next_n], contiguous: a length for each row.
                Longer contexts than the block table or the columns end with them.
            block_tables: [num_seqs, max_blocks] int32 or int64, any strides.
            clean_logits: whether the other elements become -inf; otherwise they are left unchanged.
        """
    @staticmethod
    def new(
        q: Tensor,
        kv_cache: Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        clean_logits: bool,
    ) -> Tensor:
        """`fp8_mqa_logits` of the last tokens of each sequence with the keys of the indexer's paged cache.

        Row ``s * next_n + j`` of the logits is that of token j of sequence s. It has the keys at positions
        ``n < context_lens[s] - (next_n - 1 - j)``, logit n in column n, for as many columns as there are. A key with a
        block number out of range has a logit of -inf. `top_k_per_row_decode` then finds the largest of each row.

        Args:
            q: [num_seqs, next_n, num_heads, head_size] float8_e4m3fn, contiguous.
            kv_cache: [num_blocks, block_size, head_size + 4] uint8, blocks contiguous, any block stride: the keys of all
                slots of a block, then their float32 scales (`indexer_k_quant_and_cache` with groups of head_size).
            weights: [num_seqs * next_n, num_heads] float32; any row stride.
            context_lens: [num_seqs] int32 or int64, any stride; or [num_seqs, next_n], contiguous: a length for each row.
                Longer contexts than the block table or the columns end with them.
            block_tables: [num_seqs, max_blocks] int32 or int64, any strides.
            clean_logits: whether the other elements become -inf; otherwise they are left unchanged.

        Returns:
            logits: [num_seqs * next_n, columns] float32, written where rows have keys; columns, any row
                stride. Zeros where the op leaves it as it is.
        """

fp8_paged_mqa_logits: _fp8_paged_mqa_logits

class _paged_attention_v2(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        exp_sums: Tensor,
        max_logits: Tensor,
        tmp_out: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        num_kv_heads: int,
        scale: float,
        block_tables: Tensor,
        seq_lens: Tensor,
        block_size: int,
        max_seq_len: int,
        alibi_slopes: Tensor | None,
        kv_cache_dtype: str,
        k_scale: Tensor | float,
        v_scale: Tensor | float,
        tp_rank: int = 0,
        blocksparse_local_blocks: int = 0,
        blocksparse_vert_stride: int = 0,
        blocksparse_block_size: int = 64,
        blocksparse_head_sliding_step: int = 0,
        *,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        """`paged_attention_v1` in partitions of 512 tokens, with their results in memory that the caller provides.

        Partition p of a head writes its row max m_p to `max_logits`, ``z_p = sum_i exp(l_i - m_p)`` to `exp_sums`, and its
        own attention, rounded to T, to `tmp_out`. Then ``out = T(sum_p w_p tmp_out_p / (sum_p w_p + 1e-6))`` with ``w_p =
        z_p exp(m_p - m)``; a sink is added to both sums when partitions are combined. Memory of partitions after the end of
        a sequence, or before its window, is left unchanged.

        Args:
            out: [num_seqs, num_heads, head_size], written; heads contiguous. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            exp_sums: [num_seqs, num_heads, max_partitions] float32, contiguous, written.
            max_logits: [num_seqs, num_heads, max_partitions] float32, contiguous, written.
            tmp_out: [num_seqs, num_heads, max_partitions, head_size] of the queries' dtype, contiguous, written.
            query: the same shape, float32, float16 or bfloat16; heads contiguous, any row stride. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            key_cache: packed, [num_blocks, num_kv_heads, head_size / x, block_size, x] with x elements in 16 bytes, or
                flash, [num_blocks, block_size, num_kv_heads, head_size]. The number of dimensions tells which. Its dtype is
                that of the queries, or for fp8 uint8 or a float8. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            value_cache: packed, [num_blocks, num_kv_heads, head_size, block_size], or flash, the shape of key_cache. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            num_kv_heads: key-value heads; divides num_heads. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            scale: factor of the logits. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            block_tables: [num_seqs, max_blocks], int32 or int64, any strides. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            seq_lens: [num_seqs], int32 or int64, any stride; at most max_blocks * block_size tokens count: later
                ones are left out, which is an error only with ``PYOPS_CHECK=1``. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            block_size: slots of a block. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            max_seq_len: for compatibility with vLLM; no effect: the length is not limited. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            alibi_slopes: [num_heads] float32, or None (Press et al. 2021, arXiv:2108.12409). Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            kv_cache_dtype: "auto" (that of the queries), "fp8" or "fp8_e4m3", "fp8_e5m2". Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            k_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto". Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            v_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto". Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            tp_rank: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            blocksparse_local_blocks: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            blocksparse_vert_stride: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            blocksparse_block_size: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            blocksparse_head_sliding_step: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            sliding_window: tokens at the end of a sequence that are attended to; 0 for all. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            logits_soft_cap: c of ``softcap(l) = c * tanh(l / c)``; 0 for none. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            sinks: [num_heads] float32, for each head one more logit, without a value; or None. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            lse: [num_heads, num_seqs] float32, written: ``m + log(sum_i exp(l_i - m))``, -inf for an empty sequence. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
        """
    @staticmethod
    def new(
        exp_sums: Tensor,
        max_logits: Tensor,
        tmp_out: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        num_kv_heads: int,
        scale: float,
        block_tables: Tensor,
        seq_lens: Tensor,
        block_size: int,
        max_seq_len: int,
        alibi_slopes: Tensor | None,
        kv_cache_dtype: str,
        k_scale: Tensor | float,
        v_scale: Tensor | float,
        tp_rank: int = 0,
        blocksparse_local_blocks: int = 0,
        blocksparse_vert_stride: int = 0,
        blocksparse_block_size: int = 64,
        blocksparse_head_sliding_step: int = 0,
        *,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """`paged_attention_v1` in partitions of 512 tokens, with their results in memory that the caller provides.

        Partition p of a head writes its row max m_p to `max_logits`, ``z_p = sum_i exp(l_i - m_p)`` to `exp_sums`, and its
        own attention, rounded to T, to `tmp_out`. Then ``out = T(sum_p w_p tmp_out_p / (sum_p w_p + 1e-6))`` with ``w_p =
        z_p exp(m_p - m)``; a sink is added to both sums when partitions are combined. Memory of partitions after the end of
        a sequence, or before its window, is left unchanged.

        Args:
            exp_sums: [num_seqs, num_heads, max_partitions] float32, contiguous, written.
            max_logits: [num_seqs, num_heads, max_partitions] float32, contiguous, written.
            tmp_out: [num_seqs, num_heads, max_partitions, head_size] of the queries' dtype, contiguous, written.
            query: the same shape, float32, float16 or bfloat16; heads contiguous, any row stride. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            key_cache: packed, [num_blocks, num_kv_heads, head_size / x, block_size, x] with x elements in 16 bytes, or
                flash, [num_blocks, block_size, num_kv_heads, head_size]. The number of dimensions tells which. Its dtype is
                that of the queries, or for fp8 uint8 or a float8. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            value_cache: packed, [num_blocks, num_kv_heads, head_size, block_size], or flash, the shape of key_cache. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            num_kv_heads: key-value heads; divides num_heads. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            scale: factor of the logits. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            block_tables: [num_seqs, max_blocks], int32 or int64, any strides. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            seq_lens: [num_seqs], int32 or int64, any stride; at most max_blocks * block_size tokens count: later
                ones are left out, which is an error only with ``PYOPS_CHECK=1``. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            block_size: slots of a block. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            max_seq_len: for compatibility with vLLM; no effect: the length is not limited. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            alibi_slopes: [num_heads] float32, or None (Press et al. 2021, arXiv:2108.12409). Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            kv_cache_dtype: "auto" (that of the queries), "fp8" or "fp8_e4m3", "fp8_e5m2". Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            k_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto". Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            v_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto". Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            tp_rank: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            blocksparse_local_blocks: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            blocksparse_vert_stride: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            blocksparse_block_size: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            blocksparse_head_sliding_step: block-sparse attention if blocksparse_vert_stride > 1. Page j of the sequence lies in
                sparse block kb = j * block_size // blocksparse_block_size, and the query in sparse block qb. A head attends
                to the page if (kb + offset) % blocksparse_vert_stride == 0, where the offset grows by
                blocksparse_head_sliding_step from head to head, or if kb > qb - blocksparse_local_blocks. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            sliding_window: tokens at the end of a sequence that are attended to; 0 for all. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            logits_soft_cap: c of ``softcap(l) = c * tanh(l / c)``; 0 for none. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            sinks: [num_heads] float32, for each head one more logit, without a value; or None. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            lse: [num_heads, num_seqs] float32, written: ``m + log(sum_i exp(l_i - m))``, -inf for an empty sequence. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.

        Returns:
            out: as in `paged_attention_v1`. Tokens beyond max_partitions * 512 are left out, like those
                beyond the block table.
        """

paged_attention_v2: _paged_attention_v2

class _paged_attention_rocm(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        exp_sums: Tensor,
        max_logits: Tensor,
        tmp_out: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        num_kv_heads: int,
        scale: float,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor | None,
        block_size: int,
        max_seq_len: int,
        alibi_slopes: Tensor | None,
        kv_cache_dtype: str,
        k_scale: Tensor | float,
        v_scale: Tensor | float,
        fp8_out_scale: Tensor | None = None,
        mfma_type: str = 'f16',
        *,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        """`paged_attention_v2` in partitions of 256 tokens, for the decode rows of a mixed batch, on any platform.

        Args:
            out: [num_rows, num_heads, head_size], written; with fp8_out_scale float8_e4m3fn or uint8.
            exp_sums: [num_seqs, num_heads, max_partitions] float32, contiguous, written.
            max_logits: [num_seqs, num_heads, max_partitions] float32, contiguous, written.
            tmp_out: [num_seqs, num_heads, max_partitions, head_size] of the queries' dtype, contiguous, written.
            query: [num_rows, num_heads, head_size]; num_rows may exceed num_seqs.
            key_cache: packed, [num_blocks, num_kv_heads, head_size / x, block_size, x] with x elements in 16 bytes, or
                flash, [num_blocks, block_size, num_kv_heads, head_size]. The number of dimensions tells which. Its dtype is
                that of the queries, or for fp8 uint8 or a float8. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            value_cache: packed, [num_blocks, num_kv_heads, head_size, block_size], or flash, the shape of key_cache. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            num_kv_heads: key-value heads; divides num_heads. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            scale: factor of the logits. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            block_tables: [num_seqs, max_blocks], int32 or int64, any strides. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            seq_lens: [num_seqs], int32 or int64, any stride; at most max_blocks * block_size tokens count: later
                ones are left out, which is an error only with ``PYOPS_CHECK=1``. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            query_start_loc: [num_seqs + 1] int32 or int64, any stride. Sequence s has the rows query_start_loc[s] <= i <
                query_start_loc[s + 1]; a sequence is skipped unless it has exactly one row, inside `query`. None: sequence
                s has row s.
            block_size: slots of a block. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            max_seq_len: for compatibility with vLLM; no effect: the length is not limited. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            alibi_slopes: [num_heads] float32, or None (Press et al. 2021, arXiv:2108.12409). Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            kv_cache_dtype: "auto" (that of the queries), "fp8" or "fp8_e4m3", "fp8_e5m2". Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            k_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto". Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            v_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto". Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            fp8_out_scale: one float32; ``out = fp8(result * (1 / fp8_out_scale))``, saturating.
            mfma_type: ignored.
            sliding_window: tokens at the end of a sequence that are attended to; 0 for all. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            logits_soft_cap: c of ``softcap(l) = c * tanh(l / c)``; 0 for none. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            sinks: [num_heads] float32, for each head one more logit, without a value; or None. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            lse: [num_heads, num_rows] float32, written where `out` is.
        """
    @staticmethod
    def new(
        exp_sums: Tensor,
        max_logits: Tensor,
        tmp_out: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        num_kv_heads: int,
        scale: float,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor | None,
        block_size: int,
        max_seq_len: int,
        alibi_slopes: Tensor | None,
        kv_cache_dtype: str,
        k_scale: Tensor | float,
        v_scale: Tensor | float,
        fp8_out_scale: Tensor | None = None,
        mfma_type: str = 'f16',
        *,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """`paged_attention_v2` in partitions of 256 tokens, for the decode rows of a mixed batch, on any platform.

        Args:
            exp_sums: [num_seqs, num_heads, max_partitions] float32, contiguous, written.
            max_logits: [num_seqs, num_heads, max_partitions] float32, contiguous, written.
            tmp_out: [num_seqs, num_heads, max_partitions, head_size] of the queries' dtype, contiguous, written.
            query: [num_rows, num_heads, head_size]; num_rows may exceed num_seqs.
            key_cache: packed, [num_blocks, num_kv_heads, head_size / x, block_size, x] with x elements in 16 bytes, or
                flash, [num_blocks, block_size, num_kv_heads, head_size]. The number of dimensions tells which. Its dtype is
                that of the queries, or for fp8 uint8 or a float8. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            value_cache: packed, [num_blocks, num_kv_heads, head_size, block_size], or flash, the shape of key_cache. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            num_kv_heads: key-value heads; divides num_heads. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            scale: factor of the logits. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            block_tables: [num_seqs, max_blocks], int32 or int64, any strides. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            seq_lens: [num_seqs], int32 or int64, any stride; at most max_blocks * block_size tokens count: later
                ones are left out, which is an error only with ``PYOPS_CHECK=1``. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            query_start_loc: [num_seqs + 1] int32 or int64, any stride. Sequence s has the rows query_start_loc[s] <= i <
                query_start_loc[s + 1]; a sequence is skipped unless it has exactly one row, inside `query`. None: sequence
                s has row s.
            block_size: slots of a block. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            max_seq_len: for compatibility with vLLM; no effect: the length is not limited. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            alibi_slopes: [num_heads] float32, or None (Press et al. 2021, arXiv:2108.12409). Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            kv_cache_dtype: "auto" (that of the queries), "fp8" or "fp8_e4m3", "fp8_e5m2". Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            k_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto". Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            v_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto". Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            fp8_out_scale: one float32; ``out = fp8(result * (1 / fp8_out_scale))``, saturating.
            mfma_type: ignored.
            sliding_window: tokens at the end of a sequence that are attended to; 0 for all. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            logits_soft_cap: c of ``softcap(l) = c * tanh(l / c)``; 0 for none. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            sinks: [num_heads] float32, for each head one more logit, without a value; or None. Tokens beyond max_partitions * 512 are left out, like those beyond the
                block table.
            lse: [num_heads, num_rows] float32, written where `out` is.

        Returns:
            out: [num_rows, num_heads, head_size]; with fp8_out_scale float8_e4m3fn or uint8. Zeros where
                the op leaves it as it is.
        """

paged_attention_rocm: _paged_attention_rocm

class _attention_varlen(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        scale: float,
        causal: bool = True,
        *,
        alibi_slopes: Tensor | None = None,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        """Attention within each of several sequences, with queries, keys and values in ragged tensors.

        Sequence s has the rows ``cu_seqlens_q[s]`` up to ``cu_seqlens_q[s + 1]`` of `query`, m of them, and the rows
        ``cu_seqlens_k[s]`` up to ``cu_seqlens_k[s + 1]`` of `key` and `value`, n of them. If `causal`, its query tokens are
        the last of its n tokens, and token i attends to the keys ``j <= n - m + i``; otherwise it attends to all n keys.
        The formula and its rounding are those of `paged_attention_varlen`, which takes keys and values from a cache.

        A query without keys gives zeros; rows of `out` that belong to no sequence are left unchanged. NaN or infinity
        among the values that one query of a sequence attends to may reach the sequence's other queries, and no others.

        Args:
            out: [num_tokens, num_heads, value_size] of the queries' dtype, written; heads contiguous.
            query: [num_tokens, num_heads, head_size], float32, float16 or bfloat16; heads contiguous, any row stride.
            key: [num_keys, num_kv_heads, head_size] of the queries' dtype; any row and head strides. num_heads is a
                multiple of num_kv_heads.
            value: [num_keys, num_kv_heads, value_size] with value_size <= head_size, likewise.
            cu_seqlens_q: [num_seqs + 1] int32 or int64, ascending; where it is not, rows of any sequence may be left
                unchanged.
            cu_seqlens_k: [num_seqs + 1] int32 or int64, ascending; a sequence has no keys if its rows are not in `key`.
            scale: factor of the logits.
            causal: whether a token attends to no later token.
            alibi_slopes: [num_heads] float32, or None: ``slope * (j - the last token it attends to)`` is added.
            sliding_window: if `causal`, a token attends only to the last sliding_window of its tokens; 0 for all.
            logits_soft_cap: c of ``softcap(l) = c * tanh(l / c)``; 0 for none.
            sinks: [num_heads] float32, for each head one more logit, without a value; or None.
            lse: [num_heads, num_tokens] float32, written: the logarithm of the sum of exponentials, -inf without keys.
        """
    @staticmethod
    def new(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        scale: float,
        causal: bool = True,
        *,
        alibi_slopes: Tensor | None = None,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attention within each of several sequences, with queries, keys and values in ragged tensors.

        Sequence s has the rows ``cu_seqlens_q[s]`` up to ``cu_seqlens_q[s + 1]`` of `query`, m of them, and the rows
        ``cu_seqlens_k[s]`` up to ``cu_seqlens_k[s + 1]`` of `key` and `value`, n of them. If `causal`, its query tokens are
        the last of its n tokens, and token i attends to the keys ``j <= n - m + i``; otherwise it attends to all n keys.
        The formula and its rounding are those of `paged_attention_varlen`, which takes keys and values from a cache.

        A query without keys gives zeros; rows of `out` that belong to no sequence are left unchanged. NaN or infinity
        among the values that one query of a sequence attends to may reach the sequence's other queries, and no others.

        Args:
            query: [num_tokens, num_heads, head_size], float32, float16 or bfloat16; heads contiguous, any row stride.
            key: [num_keys, num_kv_heads, head_size] of the queries' dtype; any row and head strides. num_heads is a
                multiple of num_kv_heads.
            value: [num_keys, num_kv_heads, value_size] with value_size <= head_size, likewise.
            cu_seqlens_q: [num_seqs + 1] int32 or int64, ascending; where it is not, rows of any sequence may be left
                unchanged.
            cu_seqlens_k: [num_seqs + 1] int32 or int64, ascending; a sequence has no keys if its rows are not in `key`.
            scale: factor of the logits.
            causal: whether a token attends to no later token.
            alibi_slopes: [num_heads] float32, or None: ``slope * (j - the last token it attends to)`` is added.
            sliding_window: if `causal`, a token attends only to the last sliding_window of its tokens; 0 for all.
            logits_soft_cap: c of ``softcap(l) = c * tanh(l / c)``; 0 for none.
            sinks: [num_heads] float32, for each head one more logit, without a value; or None.
            lse: [num_heads, num_tokens] float32, written: the logarithm of the sum of exponentials, -inf without keys.

        Returns:
            out: [num_tokens, num_heads, value_size] of the queries' dtype. Zeros where the op leaves it as
                it is.
        """

attention_varlen: _attention_varlen

class _convert_vertical_slash_indexes_mergehead(_Attributes, Protocol):
    def __call__(
        self,
        q_seqlens: Tensor,
        kv_seqlens: Tensor,
        vertical_indexes: Tensor,
        slash_indexes: Tensor,
        vertical_indices_count: Tensor | None,
        slash_indices_count: Tensor | None,
        context_size: int,
        block_size_M: int,
        block_size_N: int,
        causal: bool = True,
        *,
        block_count: Tensor | None = None,
        block_offset: Tensor | None = None,
        column_count: Tensor | None = None,
        column_index: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Vertical lines and diagonals of an attention matrix, as blocks and single columns of each row of blocks.

        A row of blocks holds block_size_M queries, up to query ``end``. Its base is ``end + kv_len - q_len`` if `causal`
        (the keys end where the queries do), else ``end + kv_len`` (the keys are an earlier chunk). A slash s adds the key
        range ``[e - block_size_M, e)`` with ``e = max(base - s, block_size_M)``. Ranges are merged if they meet or the gap
        between them is less than block_size_M; a merged range grows by whole block_size_M. Each range is cut into blocks of
        block_size_N keys, and `block_offset` gets the first key of each block. `column_index` gets the verticals that lie
        in no range: if `causal`, only those before the last range (MInference, Jiang et al. 2024, arXiv:2407.02490).
        Ignored are negative slashes, verticals outside the keys, and slashes at or after the base, unless the last slash of
        all lies at the base.

        Args:
            q_seqlens: [batch] int32, queries and keys of each sequence.
            kv_seqlens: [batch] int32, queries and keys of each sequence.
            vertical_indexes: [batch, num_heads, num_verticals] int32, ascending columns.
            slash_indexes: [batch, num_heads, num_slashes] int32, descending distances of diagonals.
            vertical_indices_count: [num_heads] int32, number of leading indices of each head
                that count; None for all.
            slash_indices_count: [num_heads] int32, number of leading indices of each head
                that count; None for all.
            context_size: queries of a sequence, at most.
            block_size_M: queries and keys of a block; block_size_M is at most block_size_N.
            block_size_N: queries and keys of a block; block_size_M is at most block_size_N.
            causal: whether the keys end where the queries do.
            block_count: [batch, num_heads, rows] int32; rows is context_size / block_size_M, rounded up. They
                are zero for rows after the queries of a sequence.
            block_offset: [batch, num_heads, rows, num_slashes] int32; zeros after the blocks of a row.
            column_count: [batch, num_heads, rows] int32; rows is context_size / block_size_M, rounded up. They
                are zero for rows after the queries of a sequence.
            column_index: [batch, num_heads, rows, num_verticals] int32; zeros after the columns of a row.

        All tensors are contiguous. The last four are written and returned, and new unless given.

        Returns:
            block_count: [batch, num_heads, rows] int32; rows is context_size / block_size_M, rounded up. They are
                zero for rows after the queries of a sequence.
            block_offset: [batch, num_heads, rows, num_slashes] int32; zeros after the blocks of a row.
            column_count: [batch, num_heads, rows] int32; rows is context_size / block_size_M, rounded up. They are
                zero for rows after the queries of a sequence.
            column_index: [batch, num_heads, rows, num_verticals] int32; zeros after the columns of a row.
        """
    @staticmethod
    def new(
        q_seqlens: Tensor,
        kv_seqlens: Tensor,
        vertical_indexes: Tensor,
        slash_indexes: Tensor,
        vertical_indices_count: Tensor | None,
        slash_indices_count: Tensor | None,
        context_size: int,
        block_size_M: int,
        block_size_N: int,
        causal: bool = True,
        *,
        block_count: Tensor | None = None,
        block_offset: Tensor | None = None,
        column_count: Tensor | None = None,
        column_index: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Vertical lines and diagonals of an attention matrix, as blocks and single columns of each row of blocks.

        A row of blocks holds block_size_M queries, up to query ``end``. Its base is ``end + kv_len - q_len`` if `causal`
        (the keys end where the queries do), else ``end + kv_len`` (the keys are an earlier chunk). A slash s adds the key
        range ``[e - block_size_M, e)`` with ``e = max(base - s, block_size_M)``. Ranges are merged if they meet or the gap
        between them is less than block_size_M; a merged range grows by whole block_size_M. Each range is cut into blocks of
        block_size_N keys, and `block_offset` gets the first key of each block. `column_index` gets the verticals that lie
        in no range: if `causal`, only those before the last range (MInference, Jiang et al. 2024, arXiv:2407.02490).
        Ignored are negative slashes, verticals outside the keys, and slashes at or after the base, unless the last slash of
        all lies at the base.

        Args:
            q_seqlens: [batch] int32, queries and keys of each sequence.
            kv_seqlens: [batch] int32, queries and keys of each sequence.
            vertical_indexes: [batch, num_heads, num_verticals] int32, ascending columns.
            slash_indexes: [batch, num_heads, num_slashes] int32, descending distances of diagonals.
            vertical_indices_count: [num_heads] int32, number of leading indices of each head
                that count; None for all.
            slash_indices_count: [num_heads] int32, number of leading indices of each head
                that count; None for all.
            context_size: queries of a sequence, at most.
            block_size_M: queries and keys of a block; block_size_M is at most block_size_N.
            block_size_N: queries and keys of a block; block_size_M is at most block_size_N.
            causal: whether the keys end where the queries do.
            block_count: [batch, num_heads, rows] int32; rows is context_size / block_size_M, rounded up. They
                are zero for rows after the queries of a sequence.
            block_offset: [batch, num_heads, rows, num_slashes] int32; zeros after the blocks of a row.
            column_count: [batch, num_heads, rows] int32; rows is context_size / block_size_M, rounded up. They
                are zero for rows after the queries of a sequence.
            column_index: [batch, num_heads, rows, num_verticals] int32; zeros after the columns of a row.

        All tensors are contiguous. The last four are written and returned, and new unless given.

        Returns:
            block_count: [batch, num_heads, rows] int32; rows is context_size / block_size_M, rounded up. They are
                zero for rows after the queries of a sequence.
            block_offset: [batch, num_heads, rows, num_slashes] int32; zeros after the blocks of a row.
            column_count: [batch, num_heads, rows] int32; rows is context_size / block_size_M, rounded up. They are
                zero for rows after the queries of a sequence.
            column_index: [batch, num_heads, rows, num_verticals] int32; zeros after the columns of a row.
        """

convert_vertical_slash_indexes_mergehead: _convert_vertical_slash_indexes_mergehead

class _paged_attention_varlen(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        num_kv_heads: int,
        scale: float,
        block_tables: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        block_size: int,
        kv_cache_dtype: str,
        k_scale: Tensor | float,
        v_scale: Tensor | float,
        causal: bool = True,
        *,
        alibi_slopes: Tensor | None = None,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
        q_scale: Tensor | None = None,
        max_query_len: int = 0,
    ) -> None:
        """Attention of the newest tokens of each sequence over all its tokens in a paged key-value cache.

        The query tokens of sequence s are rows ``cu_seqlens_q[s]`` up to ``cu_seqlens_q[s + 1]`` of `query`, the last ones
        of its ``seq_lens[s]`` tokens; the cache already holds the keys and values of all of them. Of n query tokens, token
        i attends to the tokens ``j <= seq_lens[s] - n + i``, or to all of them if not `causal`, with the formula of
        `paged_attention_v1`. Weights are rounded to the element type, accumulation is in float32 (Dao 2023,
        arXiv:2307.08691). With e4m3 queries and keys, fp8 values are multiplied: the largest weight of a row becomes 256 or
        a little more, and weights are then rounded to e4m3; on Hopper, accumulators of a head and of a KV tile have 14
        bits. A token with a block number out of range contributes nothing; a query without keys gives zeros; rows that
        belong to no sequence are left unchanged. NaN or infinity among the values that one query of a sequence attends to
        may reach its other queries.

        Args:
            out: [num_tokens, num_heads, value_size] of the queries' dtype, written; heads contiguous.
            query: [num_tokens, num_heads, head_size], float32, float16 or bfloat16; heads contiguous, any row stride.
                Or float8_e4m3fn with e4m3 caches; `out` then has one of the other dtypes.
            key_cache: packed, [num_blocks, num_kv_heads, head_size / x, block_size, x] with x elements in 16 bytes, or
                flash, [num_blocks, block_size, num_kv_heads, head_size]. The number of dimensions tells which. Its dtype is
                that of the queries, or for fp8 uint8 or a float8.
            value_cache: packed, [num_blocks, num_kv_heads, head_size, block_size], or flash, the shape of key_cache., but a value of a head may have fewer elements than a key: packed,
                [num_blocks, num_kv_heads, value_size, block_size], or flash, [num_blocks, block_size, num_kv_heads,
                value_size].
            num_kv_heads: key-value heads; divides num_heads.
            scale: factor of the logits.
            block_tables: [num_seqs, max_blocks], int32 or int64, any strides.
            seq_lens: [num_seqs], int32 or int64, any stride; at most max_blocks * block_size tokens count: later
                ones are left out, which is an error only with ``PYOPS_CHECK=1``.
            cu_seqlens_q: [num_seqs + 1] int32 or int64, ascending; where it is not, rows of any sequence may be left
                unchanged.
            block_size: slots of a block.
            kv_cache_dtype: "auto" (that of the queries), "fp8" or "fp8_e4m3", "fp8_e5m2".
            k_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto".
            v_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto".
            causal: whether a token attends to no later token.
            alibi_slopes: [num_heads] float32, or None: ``slope * (j - the last token it attends to)`` is added.
            sliding_window: a token attends only to the last sliding_window of its tokens; 0 for all.
            logits_soft_cap: c of ``softcap(l) = c * tanh(l / c)``; 0 for none.
            sinks: [num_heads] float32, for each head one more logit, without a value; or None.
            lse: [num_heads, num_tokens] float32, written: the logarithm of the sum of exponentials, -inf without keys.
            q_scale: scale of e4m3 queries: [1] float32, or [num_kv_heads] if k_scale has as many elements; None for 1.
            max_query_len: the most query tokens of a sequence if they are few, as in speculative decoding; 0 if they are
                not, or unknown. Only the choice of the kernel depends on it, and each number has a plan of its own.
        """
    @staticmethod
    def new(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        num_kv_heads: int,
        scale: float,
        block_tables: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        block_size: int,
        kv_cache_dtype: str,
        k_scale: Tensor | float,
        v_scale: Tensor | float,
        causal: bool = True,
        *,
        alibi_slopes: Tensor | None = None,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
        q_scale: Tensor | None = None,
        max_query_len: int = 0,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Attention of the newest tokens of each sequence over all its tokens in a paged key-value cache.

        The query tokens of sequence s are rows ``cu_seqlens_q[s]`` up to ``cu_seqlens_q[s + 1]`` of `query`, the last ones
        of its ``seq_lens[s]`` tokens; the cache already holds the keys and values of all of them. Of n query tokens, token
        i attends to the tokens ``j <= seq_lens[s] - n + i``, or to all of them if not `causal`, with the formula of
        `paged_attention_v1`. Weights are rounded to the element type, accumulation is in float32 (Dao 2023,
        arXiv:2307.08691). With e4m3 queries and keys, fp8 values are multiplied: the largest weight of a row becomes 256 or
        a little more, and weights are then rounded to e4m3; on Hopper, accumulators of a head and of a KV tile have 14
        bits. A token with a block number out of range contributes nothing; a query without keys gives zeros; rows that
        belong to no sequence are left unchanged. NaN or infinity among the values that one query of a sequence attends to
        may reach its other queries.

        Args:
            query: [num_tokens, num_heads, head_size], float32, float16 or bfloat16; heads contiguous, any row stride.
                Or float8_e4m3fn with e4m3 caches; `out` then has one of the other dtypes.
            key_cache: packed, [num_blocks, num_kv_heads, head_size / x, block_size, x] with x elements in 16 bytes, or
                flash, [num_blocks, block_size, num_kv_heads, head_size]. The number of dimensions tells which. Its dtype is
                that of the queries, or for fp8 uint8 or a float8.
            value_cache: packed, [num_blocks, num_kv_heads, head_size, block_size], or flash, the shape of key_cache., but a value of a head may have fewer elements than a key: packed,
                [num_blocks, num_kv_heads, value_size, block_size], or flash, [num_blocks, block_size, num_kv_heads,
                value_size].
            num_kv_heads: key-value heads; divides num_heads.
            scale: factor of the logits.
            block_tables: [num_seqs, max_blocks], int32 or int64, any strides.
            seq_lens: [num_seqs], int32 or int64, any stride; at most max_blocks * block_size tokens count: later
                ones are left out, which is an error only with ``PYOPS_CHECK=1``.
            cu_seqlens_q: [num_seqs + 1] int32 or int64, ascending; where it is not, rows of any sequence may be left
                unchanged.
            block_size: slots of a block.
            kv_cache_dtype: "auto" (that of the queries), "fp8" or "fp8_e4m3", "fp8_e5m2".
            k_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto".
            v_scale: factors of the keys and values of an fp8 cache: a number, or a tensor's first float32, or
                both [num_kv_heads], one for each head. Not read for "auto".
            causal: whether a token attends to no later token.
            alibi_slopes: [num_heads] float32, or None: ``slope * (j - the last token it attends to)`` is added.
            sliding_window: a token attends only to the last sliding_window of its tokens; 0 for all.
            logits_soft_cap: c of ``softcap(l) = c * tanh(l / c)``; 0 for none.
            sinks: [num_heads] float32, for each head one more logit, without a value; or None.
            lse: [num_heads, num_tokens] float32, written: the logarithm of the sum of exponentials, -inf without keys.
            q_scale: scale of e4m3 queries: [1] float32, or [num_kv_heads] if k_scale has as many elements; None for 1.
            max_query_len: the most query tokens of a sequence if they are few, as in speculative decoding; 0 if they are
                not, or unknown. Only the choice of the kernel depends on it, and each number has a plan of its own.
            out_dtype: of the output, with queries of fp8; None for bfloat16 then, and the dtype of the queries otherwise.

        Returns:
            out: [num_tokens, num_heads, value_size] of the queries' dtype. Zeros where the op leaves it as
                it is.
        """

paged_attention_varlen: _paged_attention_varlen

class _copy_cache_blocks(_Attributes, Protocol):
    def __call__(self, key_cache: Tensor, value_cache: Tensor | None, block_mapping: Tensor) -> None:
        """Copy whole blocks of the caches of one layer: ``cache[block_mapping[i, 1]] = cache[block_mapping[i, 0]]``.

        A pair is skipped if either block does not exist. All pairs are copied at once: a block may be the source of many
        pairs. The contents of a block that is the destination of two pairs, or a destination and a source, are unspecified.

        Args:
            key_cache: [num_blocks, ...] of any supported dtype, read and written; blocks without gaps, their elements in
                any order.
            value_cache: a cache with as many blocks of as many bytes; or None.
            block_mapping: [num_pairs, 2] int64 or int32, (source, destination), any strides.
        """

copy_cache_blocks: _copy_cache_blocks

class _compress_kv(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        states: Tensor,
        kv: Tensor,
        gate: Tensor,
        position_bias: Tensor,
        weight: Tensor,
        cos_sin_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        state_slots: Tensor,
        eps: float,
    ) -> None:
        """Compress each window of r tokens to one key, where the newest tokens of a sequence end it (DeepSeek-V4).

        Window w holds the tokens at positions ``w * r`` to ``w * r + r - 1``. Its key is, for each element d, with the kv
        and the gates of its tokens and the bias of a token's position in its window::

            x[d] = sum_t softmax_t(gate[t, d] + position_bias[t % r, d]) * kv[t, d]

        then RMS norm with `weight`, and RoPE of the last rope_size elements in adjacent pairs by the angles of position
        ``w * r``. All in float32, rounded once. A row of `kv` and of `gate` is one head of head_size elements, or two: then
        windows overlap, and the sum is over the first heads of the window before and the second heads of this window, 2 * r
        tokens. The first window has none before it.

        The last ``length`` tokens of each sequence, where length is r, or 2 * r with two heads, stay in `states`, for the
        windows that end later: the token at position p in row ``p % length``. Tokens before those of `kv` are read there.
        Without an existing slot a sequence has no earlier tokens, and nothing is kept. A window with a position outside the
        table has no key.

        Args:
            out: [num_tokens, head_size], written where a token is the last of its window; any token stride.
            states: [num_slots, length, 2 * row], read and written: kv and gate of a token; any slot stride, of the dtype of
                `out`: float32, float16 or bfloat16.
            kv: [num_tokens, row] of the same dtype, any token strides; row is head_size or 2 * head_size.
            gate: [num_tokens, row] of the same dtype, any token strides; row is head_size or 2 * head_size.
            position_bias: [r, row] float32, contiguous.
            weight: [head_size] of the dtype of `out`, contiguous.
            cos_sin_cache: [max_position, rope_size] float32, contiguous: cosines, then sines; rope_size is even and at
                most head_size.
            query_start_loc: [num_seqs + 1] int32 or int64, any stride, ascending: the first token of each sequence,
                then the end of the last one. Where it is not ascending, keys of any sequence may be left out.
            seq_lens: [num_seqs] int32 or int64, any stride: tokens of each sequence, with those of `kv`.
            state_slots: [num_seqs] int32 or int64, any stride; a negative slot stands for none.
            eps: added to the mean of squares.
        """
    @staticmethod
    def new(
        states: Tensor,
        kv: Tensor,
        gate: Tensor,
        position_bias: Tensor,
        weight: Tensor,
        cos_sin_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        state_slots: Tensor,
        eps: float,
    ) -> Tensor:
        """Compress each window of r tokens to one key, where the newest tokens of a sequence end it (DeepSeek-V4).

        Window w holds the tokens at positions ``w * r`` to ``w * r + r - 1``. Its key is, for each element d, with the kv
        and the gates of its tokens and the bias of a token's position in its window::

            x[d] = sum_t softmax_t(gate[t, d] + position_bias[t % r, d]) * kv[t, d]

        then RMS norm with `weight`, and RoPE of the last rope_size elements in adjacent pairs by the angles of position
        ``w * r``. All in float32, rounded once. A row of `kv` and of `gate` is one head of head_size elements, or two: then
        windows overlap, and the sum is over the first heads of the window before and the second heads of this window, 2 * r
        tokens. The first window has none before it.

        The last ``length`` tokens of each sequence, where length is r, or 2 * r with two heads, stay in `states`, for the
        windows that end later: the token at position p in row ``p % length``. Tokens before those of `kv` are read there.
        Without an existing slot a sequence has no earlier tokens, and nothing is kept. A window with a position outside the
        table has no key.

        Args:
            states: [num_slots, length, 2 * row], read and written: kv and gate of a token; any slot stride, of the dtype of
                `out`: float32, float16 or bfloat16.
            kv: [num_tokens, row] of the same dtype, any token strides; row is head_size or 2 * head_size.
            gate: [num_tokens, row] of the same dtype, any token strides; row is head_size or 2 * head_size.
            position_bias: [r, row] float32, contiguous.
            weight: [head_size] of the dtype of `out`, contiguous.
            cos_sin_cache: [max_position, rope_size] float32, contiguous: cosines, then sines; rope_size is even and at
                most head_size.
            query_start_loc: [num_seqs + 1] int32 or int64, any stride, ascending: the first token of each sequence,
                then the end of the last one. Where it is not ascending, keys of any sequence may be left out.
            seq_lens: [num_seqs] int32 or int64, any stride: tokens of each sequence, with those of `kv`.
            state_slots: [num_seqs] int32 or int64, any stride; a negative slot stands for none.
            eps: added to the mean of squares.

        Returns:
            out: [num_tokens, head_size], written where a token is the last of its window; any token
                stride. Zeros where the op leaves it as it is.
        """

compress_kv: _compress_kv

class _concat_and_cache_mla(_Attributes, Protocol):
    def __call__(
        self,
        kv_c: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        scale: Tensor | float,
    ) -> None:
        """Write the latent and the rotary key of tokens into the slots of a paged cache (multi-head latent attention).

        ``kv_cache[b, o] = [kv_c[t], k_pe[t]]`` with ``b, o = divmod(slot_mapping[t], block_size)``, or quantized to
        fp8. Nothing is written for a slot that is negative or after the last. Among tokens with the same slot, it is
        unspecified which one is kept.

        With "fp8_ds_mla" an entry is 656 bytes: 512 e4m3 values of `kv_c`; four float32, the scales of its tiles of 128
        elements, ``max(max|x| / 448, 2^-126)``, where the maximum ignores NaN; and 64 elements of `k_pe`, copied
        (readers interpret them as bfloat16).

        Args:
            kv_c: [at least num_tokens, latent_size], float32, float16 or bfloat16; any token stride.
            k_pe: [at least num_tokens, rope_size], of the same dtype; any token stride.
            kv_cache: [num_blocks, block_size, latent_size + rope_size], written where slots say; any strides but the last;
                of the dtype of `kv_c`, or uint8 or float8. For "fp8_ds_mla" [num_blocks, block_size, 656] uint8,
                latent_size 512, rope_size 64 and a dtype of two bytes.
            slot_mapping: [num_tokens] int64 or int32, any stride.
            kv_cache_dtype: "auto", "fp8", "fp8_e4m3", "fp8_e5m2" or "fp8_ds_mla".
            scale: one float32, or a number; not read for "auto" and "fp8_ds_mla".
        """

concat_and_cache_mla: _concat_and_cache_mla

class _concat_and_cache_mla_rope_fused(_Attributes, Protocol):
    def __call__(
        self,
        positions: Tensor,
        q_pe: Tensor,
        k_pe: Tensor,
        kv_c: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool,
        slot_mapping: Tensor,
        kv_cache: Tensor,
        kv_cache_dtype: str,
        kv_cache_scale: Tensor | float,
    ) -> None:
        """Rotate queries and keys in place, then write latent and key into a paged cache, as `concat_and_cache_mla` does.

        The pairs (j, j + rope_size / 2) if `is_neox`, else (2j, 2j + 1), rotate by the angles in row ``positions[t]`` of
        `cos_sin_cache` (Su et al. 2021, arXiv:2104.09864); each multiplication and addition is rounded to T. If the slot
        of a token is negative or after the last, only its queries are rotated. If its position lies outside the table,
        nothing of the token is rotated or written.

        Args:
            positions: [at least num_tokens] int64 or int32, any stride.
            q_pe: [at least num_tokens, num_heads, rope_size], float32, float16 or bfloat16, read and written; any strides
                of tokens and heads.
            k_pe: [at least num_tokens, rope_size] of the same dtype, read and written; any token stride.
            kv_c: [at least num_tokens, latent_size] of the same dtype; any token stride.
            cos_sin_cache: [max_position, rope_size] of the same dtype, or float32, which is rounded to it; contiguous:
                cosines in the first half of a row, sines in the second.
            is_neox: whether a pair has one element in each half of a row, or two adjacent elements.
            slot_mapping: [num_tokens] int64 or int32, any stride. Nothing is written of tokens after the last slot.
            kv_cache: [num_blocks, block_size, latent_size + rope_size], written where slots say; any strides but the last;
                of the same dtype, or uint8 or float8.
            kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
            kv_cache_scale: one float32, or a number; not read for "auto".
        """

concat_and_cache_mla_rope_fused: _concat_and_cache_mla_rope_fused

class _mla_norm_rope_cache(_Attributes, Protocol):
    def __call__(
        self,
        positions: Tensor,
        q_pe: Tensor,
        k_pe: Tensor,
        kv_c: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool,
        slot_mapping: Tensor,
        kv_cache: Tensor,
        kv_cache_dtype: str,
        kv_cache_scale: Tensor | float,
        norm_weight: Tensor,
        epsilon: float = 1e-06,
        absorbed: Tensor | None = None,
        plain: Tensor | None = None,
        up_keys: Tensor | None = None,
    ) -> None:
        """Rotate queries and keys in place, then write the norm of the latent and the key into a paged cache: one launch.

        As `rms_norm` of `kv_c`, then `concat_and_cache_mla_rope_fused`, but `kv_c` itself is not changed. For few tokens
        the launch may also compute ``absorbed = plain @ up_keys``, as `skinny_bmm` does: neither needs the other.

        Args:
            positions: [at least num_tokens] int64 or int32, any stride.
            q_pe: [at least num_tokens, num_heads, rope_size], float32, float16 or bfloat16, read and written; any strides
                of tokens and heads.
            k_pe: [at least num_tokens, rope_size] of the same dtype, read and written; any token stride.
            kv_c: [at least num_tokens, latent_size] of the same dtype; any token stride.
            cos_sin_cache: [max_position, rope_size] of the same dtype, or float32, which is rounded to it; contiguous:
                cosines in the first half of a row, sines in the second.
            is_neox: whether a pair has one element in each half of a row, or two adjacent elements.
            slot_mapping: [num_tokens] int64 or int32, any stride. Nothing is written of tokens after the last slot.
            kv_cache: likewise.
            kv_cache_dtype: likewise.
            kv_cache_scale: likewise.
            norm_weight: [latent_size] of the dtype of `kv_c`, contiguous.
            epsilon: added to the mean of squares.
            absorbed: [num_heads, num_tokens, N], written; elements of a row contiguous, any strides else; or None.
            plain: [num_heads, num_tokens, K] of the same dtype; likewise.
            up_keys: [num_heads, K, N] of the same dtype, rows contiguous, any strides else. The kernel reads it while the
                previous kernel runs: no kernel that may still run may write it.
        """

mla_norm_rope_cache: _mla_norm_rope_cache

class _concat_mla_q(_Attributes, Protocol):
    def __call__(self, ql_nope: Tensor, q_pe: Tensor, q_out: Tensor) -> None:
        """Concatenate the two parts of query heads: ``q_out[t, h] = [ql_nope[t, h], q_pe[t, h]]``, bits copied.

        This is the layout of queries in the decode of multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434).

        Args:
            ql_nope: [num_tokens, num_heads, latent_size], float32, float16 or bfloat16; any strides but the last.
            q_pe: [num_tokens, num_heads, rope_size] of the same dtype; any strides but the last.
            q_out: [num_tokens, num_heads, latent_size + rope_size] of the same dtype, written; any strides but the last.
        """
    @staticmethod
    def new(ql_nope: Tensor, q_pe: Tensor) -> Tensor:
        """Concatenate the two parts of query heads: ``q_out[t, h] = [ql_nope[t, h], q_pe[t, h]]``, bits copied.

        This is the layout of queries in the decode of multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434).

        Args:
            ql_nope: [num_tokens, num_heads, latent_size], float32, float16 or bfloat16; any strides but the last.
            q_pe: [num_tokens, num_heads, rope_size] of the same dtype; any strides but the last.

        Returns:
            q_out: [num_tokens, num_heads, latent_size + rope_size] of the same dtype.
        """

concat_mla_q: _concat_mla_q

class _convert_fp8(_Attributes, Protocol):
    def __call__(self, output: Tensor, input: Tensor, scale: float = 1.0, kv_dtype: str = 'fp8') -> None:
        """Convert a cache to fp8, ``e4m3(input / scale)``, or from fp8 to floats, ``T(input * scale)``.

        The quotient is a true division in float32, rounded to the nearest fp8 value; it saturates, and NaN stays NaN.

        Args:
            output: one of them float32, float16 or bfloat16, the other uint8, float8_e4m3fn or float8_e4m3fnuz. They
                have the same shape and the same order of dimensions in memory; or both are contiguous, with the same number
                of elements, which are converted in memory order (caches of different packing). `output` is written.
            input: one of them float32, float16 or bfloat16, the other uint8, float8_e4m3fn or float8_e4m3fnuz. They
                have the same shape and the same order of dimensions in memory; or both are contiguous, with the same number
                of elements, which are converted in memory order (caches of different packing). `output` is written.
            scale: the scale of the fp8 values.
            kv_dtype: "fp8" or "fp8_e4m3".
        """
    @staticmethod
    def new(
        input: Tensor,
        scale: float = 1.0,
        kv_dtype: str = 'fp8',
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Convert a cache to fp8, ``e4m3(input / scale)``, or from fp8 to floats, ``T(input * scale)``.

        The quotient is a true division in float32, rounded to the nearest fp8 value; it saturates, and NaN stays NaN.

        Args:
            input: one of them float32, float16 or bfloat16, the other uint8, float8_e4m3fn or float8_e4m3fnuz. They
                have the same shape and the same order of dimensions in memory; or both are contiguous, with the same number
                of elements, which are converted in memory order (caches of different packing). `output` is written.
            scale: the scale of the fp8 values.
            kv_dtype: "fp8" or "fp8_e4m3".
            out_dtype: of the output; None for bfloat16 of fp8 values, and for the e4m3 of the device of others.

        Returns:
            output: the shape of `input`.
        """

convert_fp8: _convert_fp8

class _cp_gather_and_upconvert_fp8_kv_cache(_Attributes, Protocol):
    def __call__(
        self,
        src_cache: Tensor,
        dst: Tensor,
        block_table: Tensor,
        seq_lens: Tensor | None,
        workspace_starts: Tensor,
        batch_size: int,
        seq_starts: Tensor | None = None,
    ) -> None:
        """Gather the 656-byte entries of sequences (see `concat_and_cache_mla`) from a paged cache as bfloat16 rows.

        ``dst[workspace_starts[b] + j, i] = bfloat16(fp8[i] * scale[i // 128])`` for i < 512, and the 64 elements after
        them are copied, from the entry ``src_cache[block_table[b, p // block_size], p % block_size]`` with
        ``p = seq_starts[b] + j``, for every b below batch_size and j below ``seq_lens[b]``. A row of no sequence, or
        without an existing entry, is left unchanged. If sequences overlap, a row belongs to the first of them.

        Args:
            src_cache: [num_blocks, block_size, 656] uint8; any strides but the last.
            dst: [num_rows, 576] bfloat16, written row by row; any row stride.
            block_table: [at least batch_size, max_blocks] int32 or int64, any strides.
            seq_lens: [at least batch_size] int32 or int64: tokens of each sequence. None: a sequence ends where the next
                begins, the last with `dst`.
            workspace_starts: [at least batch_size] int32 or int64: the row of `dst` at which each sequence begins.
            batch_size: sequences to gather.
            seq_starts: [at least batch_size] int32 or int64: the first position of each sequence that is gathered; a
                sequence with one outside the table is not. None: 0.
        """

cp_gather_and_upconvert_fp8_kv_cache: _cp_gather_and_upconvert_fp8_kv_cache

class _cp_gather_and_upconvert_nvfp4_kv_cache(_Attributes, Protocol):
    def __call__(
        self,
        src_cache: Tensor,
        dst: Tensor,
        block_table: Tensor,
        workspace_starts: Tensor,
        batch_size: int,
    ) -> None:
        """Gather the 352-byte entries "nvfp4_ds_mla" of sequences from a paged cache as bfloat16 rows.

        An entry has 512 e2m1 values, two in a byte, the first in the lower bits; 64 float8_e4m3fn, the rotary key; and 32
        scales, float8_e4m3fn, that of the 16 values of group g at byte ``8 * (g % 4) + g // 4``. ``dst[workspace_starts[b]
        + j] = [value * scale, rotary key]``, exactly, from the entry ``src_cache[block_table[b, j // block_size], j %
        block_size]``, for every b below batch_size. A sequence ends where the next begins, the last with `dst`. A row of no
        sequence, or without an existing entry, is left unchanged.

        Args:
            src_cache: [num_blocks, block_size, 352] uint8; any strides but the last.
            dst: [num_rows, 576] bfloat16, written row by row; any row stride.
            block_table: [at least batch_size, max_blocks] int32 or int64, any strides.
            workspace_starts: [at least batch_size] int32 or int64: the row of `dst` at which each sequence begins.
            batch_size: sequences to gather.
        """

cp_gather_and_upconvert_nvfp4_kv_cache: _cp_gather_and_upconvert_nvfp4_kv_cache

class _fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(_Attributes, Protocol):
    def __call__(
        self,
        q_in: Tensor,
        kv: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        position_ids: Tensor,
        cos_sin_cache: Tensor,
        q_head_padded: int,
        eps: float,
        cache_block_size: int,
        apply_q_norm: bool = True,
        kv_mxfp8: bool = False,
        apply_q_rope: bool = True,
        is_q_interleaved: bool = False,
        *,
        q_out: Tensor | None = None,
    ) -> Tensor:
        """Norm and rotate the query heads of DeepSeek-V4; rotate its key, and write the key into a paged cache as fp8.

        ``q_out[t, h] = rotated(x / sqrt(mean(x^2) + eps))`` for ``x = q_in[t, h]``, and 0 for padding heads; the key is
        ``rotated(kv[t])``. Elements 448 to 511 rotate in adjacent pairs by the angles of the token's position. All in
        float32, rounded to T at the end.

        A block of the cache holds cache_block_size entries of 576 bytes, the first 448 elements of the key as
        float8_e4m3fn of ``key / scale`` and the 64 rotated ones unquantized, followed by cache_block_size entries of 8
        bytes: the exponents of the scales of 7 groups of 64 elements, biased by 127, and a 0. A scale is the smallest power
        of two not below ``max(max|key|, 1e-4) / 448``. NaN is ignored by the maximum and becomes -448. With `kv_mxfp8`, the
        format of DeepSeek-V4.1, an entry is 528 bytes: all 512 elements as float8_e4m3fn, then the exponents of the scales
        of 16 groups of 32 elements.

        A token with a position outside the table is not rotated, and its key not written; nor is a key with a slot that is
        negative or after the last.

        Args:
            q_in: [num_tokens, num_heads, 512], float16 or bfloat16; any strides but the last.
            kv: [num_tokens, 512] of the same dtype; any token stride.
            k_cache: [num_blocks, at least 584 * cache_block_size] uint8, written where slots say; any block stride. With
                `kv_mxfp8` at least 528 * cache_block_size.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            position_ids: [num_tokens] int64 or int32, any stride.
            cos_sin_cache: [max_position, 64] float32, contiguous, of one row at least: 32 cosines, then 32 sines.
            q_head_padded: heads of q_out, at least num_heads; or 0, with which queries are not read and q_out is [0].
            eps: added to the mean of squares.
            cache_block_size: slots of a block, at least 1.
            apply_q_norm: whether queries are normalised.
            kv_mxfp8: the format of the cache.
            apply_q_rope: whether queries are rotated; keys always are.
            is_q_interleaved: whether the queries of a token are [32, heads, 16] in memory, in q_in and in q_out, where
                [j, h] is the elements 16j to 16j + 15 of head h; the tokens of q_in are then contiguous.
            q_out: [num_tokens, q_head_padded, 512] of the dtype of `q_in`, contiguous, written and returned; new unless
                given.

        Returns:
            q_out: [num_tokens, q_head_padded, 512] of the dtype of `q_in`.
        """
    @staticmethod
    def new(
        q_in: Tensor,
        kv: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        position_ids: Tensor,
        cos_sin_cache: Tensor,
        q_head_padded: int,
        eps: float,
        cache_block_size: int,
        apply_q_norm: bool = True,
        kv_mxfp8: bool = False,
        apply_q_rope: bool = True,
        is_q_interleaved: bool = False,
        *,
        q_out: Tensor | None = None,
    ) -> Tensor:
        """Norm and rotate the query heads of DeepSeek-V4; rotate its key, and write the key into a paged cache as fp8.

        ``q_out[t, h] = rotated(x / sqrt(mean(x^2) + eps))`` for ``x = q_in[t, h]``, and 0 for padding heads; the key is
        ``rotated(kv[t])``. Elements 448 to 511 rotate in adjacent pairs by the angles of the token's position. All in
        float32, rounded to T at the end.

        A block of the cache holds cache_block_size entries of 576 bytes, the first 448 elements of the key as
        float8_e4m3fn of ``key / scale`` and the 64 rotated ones unquantized, followed by cache_block_size entries of 8
        bytes: the exponents of the scales of 7 groups of 64 elements, biased by 127, and a 0. A scale is the smallest power
        of two not below ``max(max|key|, 1e-4) / 448``. NaN is ignored by the maximum and becomes -448. With `kv_mxfp8`, the
        format of DeepSeek-V4.1, an entry is 528 bytes: all 512 elements as float8_e4m3fn, then the exponents of the scales
        of 16 groups of 32 elements.

        A token with a position outside the table is not rotated, and its key not written; nor is a key with a slot that is
        negative or after the last.

        Args:
            q_in: [num_tokens, num_heads, 512], float16 or bfloat16; any strides but the last.
            kv: [num_tokens, 512] of the same dtype; any token stride.
            k_cache: [num_blocks, at least 584 * cache_block_size] uint8, written where slots say; any block stride. With
                `kv_mxfp8` at least 528 * cache_block_size.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            position_ids: [num_tokens] int64 or int32, any stride.
            cos_sin_cache: [max_position, 64] float32, contiguous, of one row at least: 32 cosines, then 32 sines.
            q_head_padded: heads of q_out, at least num_heads; or 0, with which queries are not read and q_out is [0].
            eps: added to the mean of squares.
            cache_block_size: slots of a block, at least 1.
            apply_q_norm: whether queries are normalised.
            kv_mxfp8: the format of the cache.
            apply_q_rope: whether queries are rotated; keys always are.
            is_q_interleaved: whether the queries of a token are [32, heads, 16] in memory, in q_in and in q_out, where
                [j, h] is the elements 16j to 16j + 15 of head h; the tokens of q_in are then contiguous.
            q_out: [num_tokens, q_head_padded, 512] of the dtype of `q_in`, contiguous, written and returned; new unless
                given.

        Returns:
            q_out: [num_tokens, q_head_padded, 512] of the dtype of `q_in`.
        """

fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert: _fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert

class _fused_deepseek_v4_kv_rope_insert(_Attributes, Protocol):
    def __call__(
        self,
        kv: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        position_ids: Tensor,
        cos_sin_cache: Tensor,
        cache_block_size: int,
        fp8_scale: Tensor | None = None,
        kv_mxfp8: bool = False,
    ) -> None:
        """Rotate the key of DeepSeek-V4, and write it into a paged cache.

        The key is ``rotated(kv[t])``, as in `fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`, which describes the two
        formats of a cache of bytes, and the tokens that are skipped. A cache of floats holds the key rounded to
        T; a cache of float8_e4m3fn holds ``key * (1 / fp8_scale)``, saturating, where NaN becomes -448.

        Args:
            kv: [num_tokens, 512], float16 or bfloat16; any token stride.
            k_cache: written where slots say; any block stride. [num_blocks, cache_block_size, 584] uint8 with adjacent
                slots, or 528 with `kv_mxfp8`; or [num_blocks, cache_block_size, 512] of the dtype of `kv` or float8_e4m3fn,
                any slot stride.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            position_ids: [num_tokens] int64 or int32, any stride.
            cos_sin_cache: [max_position, 64] float32, contiguous, of one row at least: 32 cosines, then 32 sines.
            cache_block_size: slots of a block, at least 1.
            fp8_scale: one float32, for a cache of float8_e4m3fn; not read for others.
            kv_mxfp8: the format of a cache of bytes; no effect on others.
        """

fused_deepseek_v4_kv_rope_insert: _fused_deepseek_v4_kv_rope_insert

class _fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert(_Attributes, Protocol):
    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        position_ids: Tensor,
        cos_sin_cache: Tensor,
        eps: float,
        cache_block_size: int,
        apply_q_norm: bool = True,
    ) -> None:
        """Norm and rotate the query heads of DeepSeek-V4 in place; rotate its key, and write it into a paged cache of rows.

        ``q[t, h] = rotated(x / sqrt(mean(x^2) + eps))`` for ``x = q[t, h]``, and the key is ``rotated(kv[t])``, as in
        `fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`, which describes the rotation, and the tokens that are not
        rotated or have no key written. All in float32, rounded to T at the end.

        Args:
            q: [num_tokens, num_heads, 512], float16 or bfloat16, contiguous, read and written.
            kv: [num_tokens, 512] of the same dtype; any token stride.
            k_cache: [num_blocks, cache_block_size, 512] of the same dtype, written where slots say; any strides but the
                last.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            position_ids: [num_tokens] int64 or int32, any stride.
            cos_sin_cache: [max_position, 64] float32, contiguous, of one row at least: 32 cosines, then 32 sines.
            eps: added to the mean of squares.
            cache_block_size: slots of a block, at least 1.
            apply_q_norm: whether queries are normalised.
        """

fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert: _fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert

class _fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert(_Attributes, Protocol):
    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        q_fp8: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        position_ids: Tensor,
        cos_sin_cache: Tensor,
        fp8_scale: Tensor,
        q_fp8_scale_inv: Tensor,
        eps: float,
        cache_block_size: int,
        apply_q_norm: bool = True,
    ) -> None:
        """Norm and rotate the query heads of DeepSeek-V4, as fp8; rotate its key, and write it into a paged cache of fp8.

        `fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert` in float8_e4m3fn: ``q_fp8`` is the queries times
        ``q_fp8_scale_inv``, and the cache holds ``key * (1 / fp8_scale)``, both of float32 values, saturating; NaN becomes
        -448.

        Args:
            q: [num_tokens, num_heads, 512], float16 or bfloat16; any strides but the last.
            kv: [num_tokens, 512] of the same dtype; any token stride.
            q_fp8: [num_tokens, num_heads, 512] float8_e4m3fn, contiguous, written.
            k_cache: [num_blocks, cache_block_size, 512] float8_e4m3fn, written where slots say; any strides but the last.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            position_ids: [num_tokens] int64 or int32, any stride.
            cos_sin_cache: [max_position, 64] float32, contiguous, of one row at least: 32 cosines, then 32 sines.
            fp8_scale: one float32 each.
            q_fp8_scale_inv: one float32 each.
            eps: added to the mean of squares.
            cache_block_size: slots of a block, at least 1.
            apply_q_norm: whether queries are normalised.
        """
    @staticmethod
    def new(
        q: Tensor,
        kv: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        position_ids: Tensor,
        cos_sin_cache: Tensor,
        fp8_scale: Tensor,
        q_fp8_scale_inv: Tensor,
        eps: float,
        cache_block_size: int,
        apply_q_norm: bool = True,
    ) -> Tensor:
        """Norm and rotate the query heads of DeepSeek-V4, as fp8; rotate its key, and write it into a paged cache of fp8.

        `fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert` in float8_e4m3fn: ``q_fp8`` is the queries times
        ``q_fp8_scale_inv``, and the cache holds ``key * (1 / fp8_scale)``, both of float32 values, saturating; NaN becomes
        -448.

        Args:
            q: [num_tokens, num_heads, 512], float16 or bfloat16; any strides but the last.
            kv: [num_tokens, 512] of the same dtype; any token stride.
            k_cache: [num_blocks, cache_block_size, 512] float8_e4m3fn, written where slots say; any strides but the last.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            position_ids: [num_tokens] int64 or int32, any stride.
            cos_sin_cache: [max_position, 64] float32, contiguous, of one row at least: 32 cosines, then 32 sines.
            fp8_scale: one float32 each.
            q_fp8_scale_inv: one float32 each.
            eps: added to the mean of squares.
            cache_block_size: slots of a block, at least 1.
            apply_q_norm: whether queries are normalised.

        Returns:
            q_fp8: [num_tokens, num_heads, 512] float8_e4m3fn.
        """

fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert: _fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert

class _gather_and_maybe_dequant_cache(_Attributes, Protocol):
    def __call__(
        self,
        src_cache: Tensor,
        dst: Tensor,
        block_table: Tensor,
        cu_seq_lens: Tensor,
        token_to_seq: Tensor,
        num_tokens: int,
        kv_cache_dtype: str,
        scale: Tensor | float,
        seq_starts: Tensor | None = None,
    ) -> None:
        """Gather the entries of sequences from a paged cache into rows, and dequantize fp8.

        ``dst[t] = src_cache[block_table[b, p // block_size], p % block_size]``, or ``T(fp8 * scale)`` in float32, with
        ``b = token_to_seq[t]`` and ``p = t - cu_seq_lens[b] + seq_starts[b]``, for t below num_tokens. A row t outside its
        sequence (``t >= cu_seq_lens[b + 1]``), of no sequence, or with an entry that does not exist is left unchanged.

        Args:
            src_cache: [num_blocks, block_size, entry_size]; any strides but the last; of the dtype of `dst`, or uint8 or
                float8.
            dst: [at least num_tokens, entry_size], float32, float16 or bfloat16, written row by row; any row stride.
            block_table: [at least num_seqs, max_blocks] int32 or int64, any strides.
            cu_seq_lens: [num_seqs + 1] int32 or int64: the row at which each sequence begins, and the end of the last.
            token_to_seq: [at least num_tokens] int32 or int64: the sequence of each row; out of range: no sequence.
            num_tokens: rows to fill.
            kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
            scale: one float32, or a number; not read for "auto".
            seq_starts: [num_seqs] int32 or int64: the position at which the first row of each sequence is read, not
                negative; None for 0.
        """
    @staticmethod
    def new(
        src_cache: Tensor,
        block_table: Tensor,
        cu_seq_lens: Tensor,
        token_to_seq: Tensor,
        num_tokens: int,
        kv_cache_dtype: str,
        scale: Tensor | float,
        seq_starts: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Gather the entries of sequences from a paged cache into rows, and dequantize fp8.

        ``dst[t] = src_cache[block_table[b, p // block_size], p % block_size]``, or ``T(fp8 * scale)`` in float32, with
        ``b = token_to_seq[t]`` and ``p = t - cu_seq_lens[b] + seq_starts[b]``, for t below num_tokens. A row t outside its
        sequence (``t >= cu_seq_lens[b + 1]``), of no sequence, or with an entry that does not exist is left unchanged.

        Args:
            src_cache: [num_blocks, block_size, entry_size]; any strides but the last; of the dtype of `dst`, or uint8 or
                float8.
            block_table: [at least num_seqs, max_blocks] int32 or int64, any strides.
            cu_seq_lens: [num_seqs + 1] int32 or int64: the row at which each sequence begins, and the end of the last.
            token_to_seq: [at least num_tokens] int32 or int64: the sequence of each row; out of range: no sequence.
            num_tokens: rows to fill.
            kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
            scale: one float32, or a number; not read for "auto".
            seq_starts: [num_seqs] int32 or int64: the position at which the first row of each sequence is read, not
                negative; None for 0.
            out_dtype: of the output; None for the dtype of the cache if that is a float of 16 or 32 bits, else bfloat16.

        Returns:
            dst: [num_tokens, entry_size]; zeros where there is no entry.
        """

gather_and_maybe_dequant_cache: _gather_and_maybe_dequant_cache

class _cp_gather_cache(_Attributes, Protocol):
    def __call__(
        self,
        src_cache: Tensor,
        dst: Tensor,
        block_table: Tensor,
        cu_seq_lens: Tensor,
        batch_size: int,
        seq_starts: Tensor | None = None,
    ) -> None:
        """Gather the entries of sequences from a paged cache into rows, bit for bit (context parallelism).

        ``dst[cu_seq_lens[b] + j] = src_cache[block_table[b, p // block_size], p % block_size]`` with
        ``p = j + seq_starts[b]``, for every b below batch_size and j below ``cu_seq_lens[b + 1] - cu_seq_lens[b]``. A row
        of no sequence, or with an entry that does not exist, is left unchanged.

        Args:
            src_cache: [num_blocks, block_size, ...] of any supported dtype of 1, 2 or 4 bytes; contiguous entries, any
                strides of blocks and slots.
            dst: [num_rows, ...] of the same dtype, written row by row; any row stride.
            block_table: [at least batch_size, max_blocks] int32 or int64, any strides.
            cu_seq_lens: [at least batch_size + 1] int32 or int64, ascending: the row at which each sequence begins.
            batch_size: sequences to gather.
            seq_starts: [at least batch_size] int32 or int64: the position at which each sequence is read, not negative;
                None for 0.
        """

cp_gather_cache: _cp_gather_cache

class _indexer_k_quant_and_cache(_Attributes, Protocol):
    def __call__(
        self,
        k: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        quant_block_size: int,
        kv_cache_dtype: str,
    ) -> None:
        """Quantize the indexer's keys by groups and write them into its paged cache (sparse attention of DeepSeek V3.2).

        The scale of a group x of `quant_block_size` elements is ``s = max(max|x|, 1e-4) / 448``, where the maximum ignores
        NaN, rounded up to a power of two for "ue8m0". The keys are ``e4m3(x / s)``, saturating; NaN stays NaN. A block of
        the cache is not a list of entries: it holds the keys of all its slots, [block_size, head_size], and then the
        scales of all its slots, [block_size, head_size / quant_block_size] float32. Nothing is written for a slot that is
        negative or after the last. Among tokens with the same slot, it is unspecified which one is kept.

        Args:
            k: [num_tokens, head_size], float32, float16 or bfloat16; any token stride. Tokens beyond the shorter of `k`
                and `slot_mapping` are not written.
            kv_cache: [num_blocks, block_size, head_size + 4 * head_size / quant_block_size] uint8, blocks contiguous, any
                block stride; written where slots say.
            slot_mapping: [num_tokens] int64 or int32, any stride.
            quant_block_size: elements under one scale, a divisor of head_size.
            kv_cache_dtype: the format of scales: "ue8m0" or any other name.
        """

indexer_k_quant_and_cache: _indexer_k_quant_and_cache

class _cp_gather_indexer_k_quant_cache(_Attributes, Protocol):
    def __call__(
        self,
        kv_cache: Tensor,
        dst_k: Tensor,
        dst_scale: Tensor,
        block_table: Tensor,
        cu_seq_lens: Tensor,
    ) -> None:
        """Gather the quantized keys of sequences and their scales from the indexer's cache (`indexer_k_quant_and_cache`).

        Row ``t`` of `dst_k` and `dst_scale` are the key and the scales in slot ``j % block_size`` of the block
        ``block_table[b, j // block_size]``, with ``j = t - cu_seq_lens[b]`` and b the sequence for which
        ``cu_seq_lens[b] <= t < cu_seq_lens[b + 1]``. A row of no sequence, or without an existing slot, is left unchanged.

        Args:
            kv_cache: [num_blocks, block_size, head_size + scale_size] uint8, blocks contiguous: the keys of all slots,
                then the scales of all slots; any block stride.
            dst_k: [num_rows, head_size] uint8 or float8, written row by row; any row stride.
            dst_scale: [num_rows, scale_size] uint8, the bytes of float32 scales, written row by row; any row stride.
            block_table: [num_seqs, max_blocks] int32 or int64, any strides.
            cu_seq_lens: [num_seqs + 1] int32 or int64, ascending.
        """

cp_gather_indexer_k_quant_cache: _cp_gather_indexer_k_quant_cache

class _fused_kimi_k3_mla_key_concat_kv_cache_insert(_Attributes, Protocol):
    def __call__(
        self,
        q: Tensor,
        k_nope: Tensor,
        k_pe: Tensor,
        kv_c_normed: Tensor,
        k_out: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        cache_block_size: int,
        position_ids: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
    ) -> None:
        """Rotate queries in place, concatenate keys, and write the latent into a paged cache (Kimi K3's MLA, prefill).

        ``k_out[t, h] = [k_nope[t, h], rotated(k_pe[t])]`` and ``k_cache[b, o] = [kv_c_normed[t], rotated(k_pe[t])]`` with
        ``b, o = divmod(slot_mapping[t], cache_block_size)``. The last rope_size elements of a query rotate, too. A rotation
        is that of the adjacent pairs (2j, 2j + 1) by the angles of the token's position, in float32, rounded once; without
        `position_ids` and `cos_sin_cache` nothing rotates. No entry is written for a slot that is negative or after the
        last. A token with a position outside the table is not rotated, and has no entry written.

        Args:
            q: [num_tokens, num_heads, nope_size + rope_size], float16 or bfloat16, read and written; any strides but the
                last.
            k_nope: [num_tokens, num_heads, nope_size] of the same dtype; any strides but the last.
            k_pe: [num_tokens, rope_size] of the same dtype; any token stride. All sizes are multiples of 8.
            kv_c_normed: [num_tokens, latent_size] of the same dtype; any token stride.
            k_out: [num_tokens, num_heads, nope_size + rope_size] of the same dtype, written; any strides but the last.
            k_cache: [num_blocks, cache_block_size, latent_size + rope_size] of the same dtype, written where slots say; any
                strides but the last.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            cache_block_size: slots of a block.
            position_ids: [num_tokens] int64 or int32, any stride, or None.
            cos_sin_cache: [max_position, rope_size] float32, of one row at least, any row stride: cosines, then sines; or
                None.
        """
    @staticmethod
    def new(
        q: Tensor,
        k_nope: Tensor,
        k_pe: Tensor,
        kv_c_normed: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        cache_block_size: int,
        position_ids: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
    ) -> Tensor:
        """Rotate queries in place, concatenate keys, and write the latent into a paged cache (Kimi K3's MLA, prefill).

        ``k_out[t, h] = [k_nope[t, h], rotated(k_pe[t])]`` and ``k_cache[b, o] = [kv_c_normed[t], rotated(k_pe[t])]`` with
        ``b, o = divmod(slot_mapping[t], cache_block_size)``. The last rope_size elements of a query rotate, too. A rotation
        is that of the adjacent pairs (2j, 2j + 1) by the angles of the token's position, in float32, rounded once; without
        `position_ids` and `cos_sin_cache` nothing rotates. No entry is written for a slot that is negative or after the
        last. A token with a position outside the table is not rotated, and has no entry written.

        Args:
            q: [num_tokens, num_heads, nope_size + rope_size], float16 or bfloat16, read and written; any strides but the
                last.
            k_nope: [num_tokens, num_heads, nope_size] of the same dtype; any strides but the last.
            k_pe: [num_tokens, rope_size] of the same dtype; any token stride. All sizes are multiples of 8.
            kv_c_normed: [num_tokens, latent_size] of the same dtype; any token stride.
            k_cache: [num_blocks, cache_block_size, latent_size + rope_size] of the same dtype, written where slots say; any
                strides but the last.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            cache_block_size: slots of a block.
            position_ids: [num_tokens] int64 or int32, any stride, or None.
            cos_sin_cache: [max_position, rope_size] float32, of one row at least, any row stride: cosines, then sines; or
                None.

        Returns:
            k_out: [num_tokens, num_heads, nope_size + rope_size] of the same dtype.
        """

fused_kimi_k3_mla_key_concat_kv_cache_insert: _fused_kimi_k3_mla_key_concat_kv_cache_insert

class _fused_kimi_k3_mla_key_concat_ds_mla_insert(_Attributes, Protocol):
    def __call__(
        self,
        q: Tensor,
        k_nope: Tensor,
        k_pe: Tensor,
        kv_c_normed: Tensor,
        k_out: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        cache_block_size: int,
        position_ids: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
    ) -> None:
        """`fused_kimi_k3_mla_key_concat_kv_cache_insert` with a cache in the format "fp8_ds_mla".

        An entry is 656 bytes: 512 float8_e4m3fn of ``kv_c_normed / scale``, four float32, the scales of its tiles of 128
        elements, and the 64 elements of ``rotated(k_pe)``. A scale is the smallest power of two not below ``max(max|x| /
        448, 1e-4)``, where the maximum ignores NaN.

        Args:
            q: [num_tokens, num_heads, nope_size + 64], float16 or bfloat16, read and written; any strides but the last.
            k_nope: [num_tokens, num_heads, nope_size] of the same dtype; any strides but the last.
            k_pe: [num_tokens, 64] of the same dtype; any token stride.
            kv_c_normed: [num_tokens, 512] of the same dtype; any token stride.
            k_out: [num_tokens, num_heads, nope_size + 64] of the same dtype, written; any strides but the last.
            k_cache: [num_blocks, cache_block_size, 656] uint8, written where slots say; any strides but the last.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            cache_block_size: slots of a block.
            position_ids: [num_tokens] int64 or int32, any stride, or None.
            cos_sin_cache: [max_position, 64] float32, of one row at least, any row stride; or None.
        """
    @staticmethod
    def new(
        q: Tensor,
        k_nope: Tensor,
        k_pe: Tensor,
        kv_c_normed: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        cache_block_size: int,
        position_ids: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
    ) -> Tensor:
        """`fused_kimi_k3_mla_key_concat_kv_cache_insert` with a cache in the format "fp8_ds_mla".

        An entry is 656 bytes: 512 float8_e4m3fn of ``kv_c_normed / scale``, four float32, the scales of its tiles of 128
        elements, and the 64 elements of ``rotated(k_pe)``. A scale is the smallest power of two not below ``max(max|x| /
        448, 1e-4)``, where the maximum ignores NaN.

        Args:
            q: [num_tokens, num_heads, nope_size + 64], float16 or bfloat16, read and written; any strides but the last.
            k_nope: [num_tokens, num_heads, nope_size] of the same dtype; any strides but the last.
            k_pe: [num_tokens, 64] of the same dtype; any token stride.
            kv_c_normed: [num_tokens, 512] of the same dtype; any token stride.
            k_cache: [num_blocks, cache_block_size, 656] uint8, written where slots say; any strides but the last.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            cache_block_size: slots of a block.
            position_ids: [num_tokens] int64 or int32, any stride, or None.
            cos_sin_cache: [max_position, 64] float32, of one row at least, any row stride; or None.

        Returns:
            k_out: [num_tokens, num_heads, nope_size + 64] of the same dtype.
        """

fused_kimi_k3_mla_key_concat_ds_mla_insert: _fused_kimi_k3_mla_key_concat_ds_mla_insert

class _fused_kimi_k3_mla_decode_q_concat_kv_cache_insert(_Attributes, Protocol):
    def __call__(
        self,
        ql_nope: Tensor,
        q_pe: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        mqa_q: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        cache_block_size: int,
        position_ids: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
    ) -> None:
        """Concatenate the parts of queries, and write the latent into a paged cache (Kimi K3's MLA, decode).

        ``mqa_q[t, h] = [ql_nope[t, h], rotated(q_pe[t, h])]`` and ``k_cache[b, o] = [kv_c_normed[t], rotated(k_pe[t])]``
        with ``b, o = divmod(slot_mapping[t], cache_block_size)``; rotations and slots are those of
        `fused_kimi_k3_mla_key_concat_kv_cache_insert`.

        Args:
            ql_nope: [num_tokens, num_heads, latent_size], float16 or bfloat16; any strides but the last.
            q_pe: [num_tokens, num_heads, rope_size] of the same dtype; any strides but the last.
            kv_c_normed: [num_tokens, latent_size] of the same dtype; any token stride.
            k_pe: [num_tokens, rope_size] of the same dtype; any token stride. Both sizes are multiples of 8.
            mqa_q: [num_tokens, num_heads, latent_size + rope_size] of the same dtype, written; any strides but the last.
            k_cache: [num_blocks, cache_block_size, latent_size + rope_size] of the same dtype, written where slots say; any
                strides but the last.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            cache_block_size: slots of a block.
            position_ids: [num_tokens] int64 or int32, any stride, or None.
            cos_sin_cache: [max_position, rope_size] float32, of one row at least, any row stride; or None.
        """
    @staticmethod
    def new(
        ql_nope: Tensor,
        q_pe: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        cache_block_size: int,
        position_ids: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
    ) -> Tensor:
        """Concatenate the parts of queries, and write the latent into a paged cache (Kimi K3's MLA, decode).

        ``mqa_q[t, h] = [ql_nope[t, h], rotated(q_pe[t, h])]`` and ``k_cache[b, o] = [kv_c_normed[t], rotated(k_pe[t])]``
        with ``b, o = divmod(slot_mapping[t], cache_block_size)``; rotations and slots are those of
        `fused_kimi_k3_mla_key_concat_kv_cache_insert`.

        Args:
            ql_nope: [num_tokens, num_heads, latent_size], float16 or bfloat16; any strides but the last.
            q_pe: [num_tokens, num_heads, rope_size] of the same dtype; any strides but the last.
            kv_c_normed: [num_tokens, latent_size] of the same dtype; any token stride.
            k_pe: [num_tokens, rope_size] of the same dtype; any token stride. Both sizes are multiples of 8.
            k_cache: [num_blocks, cache_block_size, latent_size + rope_size] of the same dtype, written where slots say; any
                strides but the last.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            cache_block_size: slots of a block.
            position_ids: [num_tokens] int64 or int32, any stride, or None.
            cos_sin_cache: [max_position, rope_size] float32, of one row at least, any row stride; or None.

        Returns:
            mqa_q: [num_tokens, num_heads, latent_size + rope_size] of the same dtype.
        """

fused_kimi_k3_mla_decode_q_concat_kv_cache_insert: _fused_kimi_k3_mla_decode_q_concat_kv_cache_insert

class _fused_kimi_k3_mla_decode_q_concat_ds_mla_insert(_Attributes, Protocol):
    def __call__(
        self,
        ql_nope: Tensor,
        q_pe: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        mqa_q: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        cache_block_size: int,
        position_ids: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
    ) -> None:
        """`fused_kimi_k3_mla_decode_q_concat_kv_cache_insert` with a cache in the format "fp8_ds_mla".

        `fused_kimi_k3_mla_key_concat_ds_mla_insert` describes the 656 bytes of an entry.

        Args:
            ql_nope: [num_tokens, num_heads, 512], float16 or bfloat16; any strides but the last.
            q_pe: [num_tokens, num_heads, 64] of the same dtype; any strides but the last.
            kv_c_normed: [num_tokens, 512] of the same dtype; any token stride.
            k_pe: [num_tokens, 64] of the same dtype; any token stride.
            mqa_q: [num_tokens, num_heads, 576] of the same dtype, written; any strides but the last.
            k_cache: [num_blocks, cache_block_size, 656] uint8, written where slots say; any strides but the last.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            cache_block_size: slots of a block.
            position_ids: [num_tokens] int64 or int32, any stride, or None.
            cos_sin_cache: [max_position, 64] float32, of one row at least, any row stride; or None.
        """
    @staticmethod
    def new(
        ql_nope: Tensor,
        q_pe: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        cache_block_size: int,
        position_ids: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
    ) -> Tensor:
        """`fused_kimi_k3_mla_decode_q_concat_kv_cache_insert` with a cache in the format "fp8_ds_mla".

        `fused_kimi_k3_mla_key_concat_ds_mla_insert` describes the 656 bytes of an entry.

        Args:
            ql_nope: [num_tokens, num_heads, 512], float16 or bfloat16; any strides but the last.
            q_pe: [num_tokens, num_heads, 64] of the same dtype; any strides but the last.
            kv_c_normed: [num_tokens, 512] of the same dtype; any token stride.
            k_pe: [num_tokens, 64] of the same dtype; any token stride.
            k_cache: [num_blocks, cache_block_size, 656] uint8, written where slots say; any strides but the last.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            cache_block_size: slots of a block.
            position_ids: [num_tokens] int64 or int32, any stride, or None.
            cos_sin_cache: [max_position, 64] float32, of one row at least, any row stride; or None.

        Returns:
            mqa_q: [num_tokens, num_heads, 576] of the same dtype.
        """

fused_kimi_k3_mla_decode_q_concat_ds_mla_insert: _fused_kimi_k3_mla_decode_q_concat_ds_mla_insert

class _fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert(_Attributes, Protocol):
    def __call__(
        self,
        ql_nope: Tensor,
        q_pe: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        mqa_q: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        q_scale_inv: Tensor,
        cache_scale_inv: Tensor,
        cache_block_size: int,
        position_ids: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
    ) -> None:
        """`fused_kimi_k3_mla_decode_q_concat_kv_cache_insert` with an fp8 cache, and with queries in fp8 or not.

        The cache holds ``[kv_c_normed[t], rotated(k_pe[t])] * cache_scale_inv`` and `mqa_q`, if it is fp8, its values times
        ``q_scale_inv``: float8_e4m3fn of float32 values, saturating; NaN stays NaN.

        Args:
            ql_nope: [num_tokens, num_heads, latent_size], float16 or bfloat16; any strides but the last.
            q_pe: [num_tokens, num_heads, rope_size] of the same dtype; any strides but the last.
            kv_c_normed: [num_tokens, latent_size] of the same dtype; any token stride.
            k_pe: [num_tokens, rope_size] of the same dtype; any token stride. Both sizes are multiples of 8.
            mqa_q: [num_tokens, num_heads, latent_size + rope_size] float8_e4m3fn or the dtype of `ql_nope`, written; any
                strides but the last.
            k_cache: [num_blocks, cache_block_size, latent_size + rope_size] float8_e4m3fn, written where slots say; any
                strides but the last.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            q_scale_inv: one float32 each; `q_scale_inv` is not read unless `mqa_q` is fp8.
            cache_scale_inv: one float32 each; `q_scale_inv` is not read unless `mqa_q` is fp8.
            cache_block_size: slots of a block.
            position_ids: [num_tokens] int64 or int32, any stride, or None.
            cos_sin_cache: [max_position, rope_size] float32, of one row at least, any row stride; or None.
        """
    @staticmethod
    def new(
        ql_nope: Tensor,
        q_pe: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        q_scale_inv: Tensor,
        cache_scale_inv: Tensor,
        cache_block_size: int,
        position_ids: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
    ) -> Tensor:
        """`fused_kimi_k3_mla_decode_q_concat_kv_cache_insert` with an fp8 cache, and with queries in fp8 or not.

        The cache holds ``[kv_c_normed[t], rotated(k_pe[t])] * cache_scale_inv`` and `mqa_q`, if it is fp8, its values times
        ``q_scale_inv``: float8_e4m3fn of float32 values, saturating; NaN stays NaN.

        Args:
            ql_nope: [num_tokens, num_heads, latent_size], float16 or bfloat16; any strides but the last.
            q_pe: [num_tokens, num_heads, rope_size] of the same dtype; any strides but the last.
            kv_c_normed: [num_tokens, latent_size] of the same dtype; any token stride.
            k_pe: [num_tokens, rope_size] of the same dtype; any token stride. Both sizes are multiples of 8.
            k_cache: [num_blocks, cache_block_size, latent_size + rope_size] float8_e4m3fn, written where slots say; any
                strides but the last.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            q_scale_inv: one float32 each; `q_scale_inv` is not read unless `mqa_q` is fp8.
            cache_scale_inv: one float32 each; `q_scale_inv` is not read unless `mqa_q` is fp8.
            cache_block_size: slots of a block.
            position_ids: [num_tokens] int64 or int32, any stride, or None.
            cos_sin_cache: [max_position, rope_size] float32, of one row at least, any row stride; or None.

        Returns:
            mqa_q: [num_tokens, num_heads, latent_size + rope_size] float8_e4m3fn or the dtype of `ql_nope`.
        """

fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert: _fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert

class _fused_kimi_k3_mla_kv_concat(_Attributes, Protocol):
    def __call__(self, k_nope: Tensor, k_pe: Tensor, k_out: Tensor) -> None:
        """Concatenate the parts of keys, ``k_out[t, h] = [k_nope[t, h], k_pe[t]]`` (Kimi K3's MLA, chunked prefill).

        Args:
            k_nope: [num_tokens, num_heads, nope_size], float16 or bfloat16; any strides but the last.
            k_pe: [num_tokens, rope_size] of the same dtype; any token stride. Both sizes are multiples of 8.
            k_out: [num_tokens, num_heads, nope_size + rope_size] of the same dtype, written; any strides but the last.
        """
    @staticmethod
    def new(k_nope: Tensor, k_pe: Tensor) -> Tensor:
        """Concatenate the parts of keys, ``k_out[t, h] = [k_nope[t, h], k_pe[t]]`` (Kimi K3's MLA, chunked prefill).

        Args:
            k_nope: [num_tokens, num_heads, nope_size], float16 or bfloat16; any strides but the last.
            k_pe: [num_tokens, rope_size] of the same dtype; any token stride. Both sizes are multiples of 8.

        Returns:
            k_out: [num_tokens, num_heads, nope_size + rope_size] of the same dtype.
        """

fused_kimi_k3_mla_kv_concat: _fused_kimi_k3_mla_kv_concat

class _fused_kimi_k3_mla_kv_concat_quant_fp8(_Attributes, Protocol):
    def __call__(self, k_nope: Tensor, k_pe: Tensor, v: Tensor, k_fp8: Tensor, v_fp8: Tensor) -> None:
        """Concatenate the parts of keys, and convert keys and values to fp8 (Kimi K3's MLA, chunked prefill).

        ``k_fp8[t, h] = [k_nope[t, h], k_pe[t]]`` and ``v_fp8 = v`` as float8_e4m3fn, saturating; NaN stays NaN.

        Args:
            k_nope: [num_tokens, num_heads, nope_size], float16 or bfloat16; any strides but the last.
            k_pe: [num_tokens, rope_size] of the same dtype, or float8_e4m3fn, copied; any token stride.
            v: [num_tokens, num_heads, v_size] of the dtype of `k_nope`; any strides but the last. All sizes are multiples
                of 8.
            k_fp8: [num_tokens, num_heads, nope_size + rope_size] float8_e4m3fn, written; any strides but the last.
            v_fp8: [num_tokens, num_heads, v_size] float8_e4m3fn, written; any strides but the last.
        """
    @staticmethod
    def new(k_nope: Tensor, k_pe: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Concatenate the parts of keys, and convert keys and values to fp8 (Kimi K3's MLA, chunked prefill).

        ``k_fp8[t, h] = [k_nope[t, h], k_pe[t]]`` and ``v_fp8 = v`` as float8_e4m3fn, saturating; NaN stays NaN.

        Args:
            k_nope: [num_tokens, num_heads, nope_size], float16 or bfloat16; any strides but the last.
            k_pe: [num_tokens, rope_size] of the same dtype, or float8_e4m3fn, copied; any token stride.
            v: [num_tokens, num_heads, v_size] of the dtype of `k_nope`; any strides but the last. All sizes are multiples
                of 8.

        Returns:
            k_fp8: [num_tokens, num_heads, nope_size + rope_size] float8_e4m3fn.
            v_fp8: [num_tokens, num_heads, v_size] float8_e4m3fn.
        """

fused_kimi_k3_mla_kv_concat_quant_fp8: _fused_kimi_k3_mla_kv_concat_quant_fp8

class _fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert(_Attributes, Protocol):
    def __call__(
        self,
        q: Tensor,
        k_nope: Tensor,
        k_pe: Tensor,
        kv_c_normed: Tensor,
        v: Tensor,
        q_fp8: Tensor,
        k_fp8: Tensor,
        v_fp8: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        q_scale_inv: Tensor,
        k_scale_inv: Tensor,
        v_scale_inv: Tensor,
        cache_scale_inv: Tensor,
        cache_block_size: int,
        position_ids: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
    ) -> None:
        """`fused_kimi_k3_mla_key_concat_kv_cache_insert` in fp8: queries, keys, values and the latent (Kimi K3, prefill).

        ``q_fp8 = q * q_scale_inv`` with rotated last elements; ``k_fp8[t, h] = [k_nope[t, h], rotated(k_pe[t])] *
        k_scale_inv``; ``v_fp8 = v * v_scale_inv``; and ``k_cache[b, o] = [kv_c_normed[t], rotated(k_pe[t])] *
        cache_scale_inv``. All as float8_e4m3fn of float32 values, saturating; NaN stays NaN. The op named above describes
        rotations and slots.

        Args:
            q: [num_tokens, num_heads, nope_size + rope_size], float16 or bfloat16; any strides but the last.
            k_nope: [num_tokens, num_heads, nope_size] of the same dtype; any strides but the last.
            k_pe: [num_tokens, rope_size] of the same dtype; any token stride.
            kv_c_normed: [num_tokens, latent_size] of the same dtype; any token stride.
            v: [num_tokens, num_heads, v_size] of the same dtype; any strides but the last. All sizes are multiples of 8.
            q_fp8: [num_tokens, num_heads, nope_size + rope_size] float8_e4m3fn, written; any strides but the last.
            k_fp8: [num_tokens, num_heads, nope_size + rope_size] float8_e4m3fn, written; any strides but the last.
            v_fp8: [num_tokens, num_heads, v_size] float8_e4m3fn, written; any strides but the last.
            k_cache: [num_blocks, cache_block_size, latent_size + rope_size] float8_e4m3fn, written where slots say; any
                strides but the last.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            q_scale_inv: one float32 each.
            k_scale_inv: one float32 each.
            v_scale_inv: one float32 each.
            cache_scale_inv: one float32 each.
            cache_block_size: slots of a block.
            position_ids: [num_tokens] int64 or int32, any stride, or None.
            cos_sin_cache: [max_position, rope_size] float32, of one row at least, any row stride; or None.
        """
    @staticmethod
    def new(
        q: Tensor,
        k_nope: Tensor,
        k_pe: Tensor,
        kv_c_normed: Tensor,
        v: Tensor,
        k_cache: Tensor,
        slot_mapping: Tensor,
        q_scale_inv: Tensor,
        k_scale_inv: Tensor,
        v_scale_inv: Tensor,
        cache_scale_inv: Tensor,
        cache_block_size: int,
        position_ids: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`fused_kimi_k3_mla_key_concat_kv_cache_insert` in fp8: queries, keys, values and the latent (Kimi K3, prefill).

        ``q_fp8 = q * q_scale_inv`` with rotated last elements; ``k_fp8[t, h] = [k_nope[t, h], rotated(k_pe[t])] *
        k_scale_inv``; ``v_fp8 = v * v_scale_inv``; and ``k_cache[b, o] = [kv_c_normed[t], rotated(k_pe[t])] *
        cache_scale_inv``. All as float8_e4m3fn of float32 values, saturating; NaN stays NaN. The op named above describes
        rotations and slots.

        Args:
            q: [num_tokens, num_heads, nope_size + rope_size], float16 or bfloat16; any strides but the last.
            k_nope: [num_tokens, num_heads, nope_size] of the same dtype; any strides but the last.
            k_pe: [num_tokens, rope_size] of the same dtype; any token stride.
            kv_c_normed: [num_tokens, latent_size] of the same dtype; any token stride.
            v: [num_tokens, num_heads, v_size] of the same dtype; any strides but the last. All sizes are multiples of 8.
            k_cache: [num_blocks, cache_block_size, latent_size + rope_size] float8_e4m3fn, written where slots say; any
                strides but the last.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            q_scale_inv: one float32 each.
            k_scale_inv: one float32 each.
            v_scale_inv: one float32 each.
            cache_scale_inv: one float32 each.
            cache_block_size: slots of a block.
            position_ids: [num_tokens] int64 or int32, any stride, or None.
            cos_sin_cache: [max_position, rope_size] float32, of one row at least, any row stride; or None.

        Returns:
            q_fp8: [num_tokens, num_heads, nope_size + rope_size] float8_e4m3fn.
            k_fp8: [num_tokens, num_heads, nope_size + rope_size] float8_e4m3fn.
            v_fp8: [num_tokens, num_heads, v_size] float8_e4m3fn.
        """

fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert: _fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert

class _fused_minimax_m3_qknorm_rope_kv_insert(_Attributes, Protocol):
    def __call__(
        self,
        qkv: Tensor,
        q_norm_weight: Tensor,
        k_norm_weight: Tensor,
        cos_sin_cache: Tensor,
        positions: Tensor,
        num_heads: int,
        num_kv_heads: int,
        rotary_dim: int,
        eps: float,
        index_q_norm_weight: Tensor | None,
        index_k_norm_weight: Tensor | None,
        num_index_heads: int,
        slot_mapping: Tensor | None,
        index_slot_mapping: Tensor | None,
        kv_cache: Tensor | None,
        index_cache: Tensor | None,
        block_size: int,
        q_out: Tensor | None,
        index_q_out: Tensor | None,
        kv_cache_dtype: str,
        skip_index_branch: bool = False,
        q_fp8_out: Tensor | None = None,
        q_fp8_scale: float = 1.0,
        kv_k_scale: Tensor | None = None,
        kv_v_scale: Tensor | None = None,
    ) -> None:
        """Norm and rotate the heads of qkv in place, and insert keys and values into caches (MiniMax-M3).

        A row of qkv has query, key and value heads, and, if num_index_heads is not 0, index query heads and one index key.
        A head ``x`` of queries or keys becomes ``rotated(x / sqrt(mean(x^2) + eps) * (1 + weight))`` with the weight of its
        kind. Its first rotary_dim elements rotate in pairs (j, j + rotary_dim / 2) by the angles of the token's position;
        all in float32, rounded once to T. With `kv_cache`, keys and values are then written to ``b, o =
        divmod(slot_mapping[t], block_size)``, as they are or as fp8, and the index key to slot ``index_slot_mapping[t]`` of
        `index_cache`. A token with a position outside the table is not rotated, and nothing of it is inserted; nor is what
        has a slot that is negative or after the last.

        Args:
            qkv: [num_tokens, heads * head_size], float16 or bfloat16, read and written; any row stride. Values are not
                changed.
            q_norm_weight: [head_size], float32, float16 or bfloat16; head_size 64, 128, 192 or 256.
            k_norm_weight: [head_size], float32, float16 or bfloat16; head_size 64, 128, 192 or 256.
            cos_sin_cache: [max_position, rotary_dim], float32, float16 or bfloat16, of one row at least, any row stride:
                cosines, then sines.
            positions: [num_tokens] int64 or int32, any stride.
            num_heads: heads of queries, and of keys.
            num_kv_heads: heads of queries, and of keys.
            rotary_dim: even, at most head_size.
            eps: added to the mean of squares.
            index_q_norm_weight: [head_size] of the dtype of the other weights; None without an index.
            index_k_norm_weight: [head_size] of the dtype of the other weights; None without an index.
            num_index_heads: heads of index queries; 0 without an index.
            slot_mapping: [at most num_tokens] int64 or int32, any stride; None without `kv_cache`.
            index_slot_mapping: the same for `index_cache`; `slot_mapping` where it is None.
            kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], keys before values, written where slots say;
                any strides but the last; of the dtype of `qkv`, or uint8 or float8; or None.
            index_cache: [..., head_size], contiguous, of the dtype of `qkv` or float8_e4m3fn, written where slots say;
                needed with an index and `kv_cache`.
            block_size: slots of a block of `kv_cache`.
            q_out: [num_tokens, num_heads * head_size] of the dtype of `qkv`, contiguous, written: queries, instead of
                in qkv; or None.
            index_q_out: [num_tokens, num_index_heads * head_size] of the dtype of `index_cache`, contiguous, written: index
                queries, instead of in qkv; or None.
            kv_cache_dtype: "auto", "bfloat16" or "float16", all the same; "fp8", "fp8_e4m3" or "fp8_e5m2".
            skip_index_branch: whether index heads stay as they are.
            q_fp8_out: [num_tokens, num_heads * head_size] float8_e4m3fn, contiguous, written: queries, rounded to T,
                divided by q_fp8_scale. Without `q_out`, the queries of qkv are then not changed.
            q_fp8_scale: above 0.
            kv_k_scale: not read: fp8 caches have a scale of 1.
            kv_v_scale: not read: fp8 caches have a scale of 1.
        """

fused_minimax_m3_qknorm_rope_kv_insert: _fused_minimax_m3_qknorm_rope_kv_insert

class _fused_qknorm_rope_cache(_Attributes, Protocol):
    def __call__(
        self,
        q_out: Tensor,
        k_out: Tensor,
        v_out: Tensor,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        head_dim: int,
        num_q_heads: int,
        num_kv_heads: int,
        rotary_pairs: int,
        epsilon: float,
        norm_weight_bias: float,
        kv_cache_dtype: str = 'auto',
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Split qkv into queries, keys and values, norm and rotate queries and keys, and insert keys and values (Step 5).

        ``q_out[t, h] = rotated(x / sqrt(mean(x^2) + epsilon) * (q_weight + norm_weight_bias))`` for head ``x`` of
        ``qkv[t]``, keys likewise, and values as they are. The first 2 * rotary_pairs elements of a head rotate in pairs
        (j, j + rotary_pairs) by the angles of the token's position; all in float32, rounded once. Keys and values are
        then written to ``b, o = divmod(slot_mapping[t], block_size)`` of the caches, as they are or as fp8 of ``x /
        scale``. A token with a position outside the table is not rotated, and nothing of it is inserted; nor is a token
        with a slot that is negative or after the last.

        Args:
            q_out: [num_tokens, num_q_heads * head_dim], of the dtype of `qkv`, contiguous, written.
            k_out: [num_tokens, num_kv_heads * head_dim] of the same dtype, contiguous, written.
            v_out: [num_tokens, num_kv_heads * head_dim] of the same dtype, contiguous, written.
            qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim], float16 or bfloat16; any row stride.
            q_weight: [head_dim], float32, float16 or bfloat16, both of one dtype.
            k_weight: [head_dim], float32, float16 or bfloat16, both of one dtype.
            cos: [max_position, at least rotary_pairs], float32, float16 or bfloat16, of one row at least; both of one
                dtype, any row strides. Not read if rotary_pairs is 0.
            sin: [max_position, at least rotary_pairs], float32, float16 or bfloat16, of one row at least; both of one
                dtype, any row strides. Not read if rotary_pairs is 0.
            positions: [num_tokens] int64 or int32, any stride.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            k_cache: [num_blocks, block_size, num_kv_heads, head_dim], written where slots say; any strides but the
                last; of the dtype of `qkv`, or uint8 or float8.
            v_cache: [num_blocks, block_size, num_kv_heads, head_dim], written where slots say; any strides but the
                last; of the dtype of `qkv`, or uint8 or float8.
            head_dim: 64, 128, 192 or 256.
            num_q_heads: heads of each kind.
            num_kv_heads: heads of each kind.
            rotary_pairs: at most head_dim / 2.
            epsilon: added to the mean of squares.
            norm_weight_bias: added to the weights.
            kv_cache_dtype: "auto", "bfloat16" or "float16", all the same; "fp8", "fp8_e4m3" or "fp8_e5m2".
            k_scale: one float32 each; needed for fp8.
            v_scale: one float32 each; needed for fp8.
        """
    @staticmethod
    def new(
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        head_dim: int,
        num_q_heads: int,
        num_kv_heads: int,
        rotary_pairs: int,
        epsilon: float,
        norm_weight_bias: float,
        kv_cache_dtype: str = 'auto',
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split qkv into queries, keys and values, norm and rotate queries and keys, and insert keys and values (Step 5).

        ``q_out[t, h] = rotated(x / sqrt(mean(x^2) + epsilon) * (q_weight + norm_weight_bias))`` for head ``x`` of
        ``qkv[t]``, keys likewise, and values as they are. The first 2 * rotary_pairs elements of a head rotate in pairs
        (j, j + rotary_pairs) by the angles of the token's position; all in float32, rounded once. Keys and values are
        then written to ``b, o = divmod(slot_mapping[t], block_size)`` of the caches, as they are or as fp8 of ``x /
        scale``. A token with a position outside the table is not rotated, and nothing of it is inserted; nor is a token
        with a slot that is negative or after the last.

        Args:
            qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim], float16 or bfloat16; any row stride.
            q_weight: [head_dim], float32, float16 or bfloat16, both of one dtype.
            k_weight: [head_dim], float32, float16 or bfloat16, both of one dtype.
            cos: [max_position, at least rotary_pairs], float32, float16 or bfloat16, of one row at least; both of one
                dtype, any row strides. Not read if rotary_pairs is 0.
            sin: [max_position, at least rotary_pairs], float32, float16 or bfloat16, of one row at least; both of one
                dtype, any row strides. Not read if rotary_pairs is 0.
            positions: [num_tokens] int64 or int32, any stride.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            k_cache: [num_blocks, block_size, num_kv_heads, head_dim], written where slots say; any strides but the
                last; of the dtype of `qkv`, or uint8 or float8.
            v_cache: [num_blocks, block_size, num_kv_heads, head_dim], written where slots say; any strides but the
                last; of the dtype of `qkv`, or uint8 or float8.
            head_dim: 64, 128, 192 or 256.
            num_q_heads: heads of each kind.
            num_kv_heads: heads of each kind.
            rotary_pairs: at most head_dim / 2.
            epsilon: added to the mean of squares.
            norm_weight_bias: added to the weights.
            kv_cache_dtype: "auto", "bfloat16" or "float16", all the same; "fp8", "fp8_e4m3" or "fp8_e5m2".
            k_scale: one float32 each; needed for fp8.
            v_scale: one float32 each; needed for fp8.

        Returns:
            q_out: [num_tokens, num_q_heads * head_dim], of the dtype of `qkv`.
            k_out: [num_tokens, num_kv_heads * head_dim] of the same dtype.
            v_out: [num_tokens, num_kv_heads * head_dim] of the same dtype.
        """

fused_qknorm_rope_cache: _fused_qknorm_rope_cache

class _fused_muse_spark_qknorm_rope_kv_insert(_Attributes, Protocol):
    def __call__(
        self,
        qkv: Tensor,
        positions: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        cos_sin_cache: Tensor | None,
        rotary_dim: int,
        slot_mapping: Tensor | None,
        kv_cache: Tensor | None,
        block_size: int,
        kv_cache_dtype: str,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        q_fp8_out: Tensor | None = None,
        q_scale: Tensor | None = None,
    ) -> None:
        """Norm and rotate the query and key heads of qkv in place, and insert keys and values into a cache (Muse Spark).

        A head ``x`` becomes ``rotated(x / sqrt(mean(x^2) + eps))``. Its first rotary_dim elements rotate in adjacent pairs
        (2j, 2j + 1) by the angles of the token's position; without `cos_sin_cache` nothing rotates. All in float32, rounded
        once. With `kv_cache`, keys and values are then written to ``b, o = divmod(slot_mapping[t], block_size)``, as they
        are or as fp8 of ``x / scale``. A token with a position outside the table is not rotated, and nothing of it is
        inserted; nor is a token with a slot that is negative or after the last.

        Args:
            qkv: [num_tokens, at least (num_heads + 2 * num_kv_heads) * head_dim], float16 or bfloat16, read and written;
                any row stride. Values, and what follows them, are not changed.
            positions: [num_tokens] int64 or int32, any stride; not read without `cos_sin_cache`.
            num_heads: heads of queries, and of keys.
            num_kv_heads: heads of queries, and of keys.
            head_dim: 64, 128, 192 or 256.
            eps: added to the mean of squares.
            cos_sin_cache: [max_position, rotary_dim], float32, float16 or bfloat16, of one row at least, any row stride:
                cosines, then sines; or None.
            rotary_dim: even, at most head_dim; no effect without `cos_sin_cache`.
            slot_mapping: [at most num_tokens] int64 or int32, any stride; None without `kv_cache`.
            kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_dim], keys before values, written where slots say; any
                strides but the last; of the dtype of `qkv`, or uint8 or float8; or None.
            block_size: slots of a block of `kv_cache`.
            kv_cache_dtype: "auto", "bfloat16" or "float16", all the same; "fp8", "fp8_e4m3" or "fp8_e5m2".
            k_scale: one float32 each; needed for fp8.
            v_scale: one float32 each; needed for fp8.
            q_fp8_out: [num_tokens, num_heads * head_dim] float8_e4m3fn, contiguous, written: queries, rounded to T, divided
                by `q_scale`. The queries of qkv are then not changed.
            q_scale: one float32, with `q_fp8_out`.
        """

fused_muse_spark_qknorm_rope_kv_insert: _fused_muse_spark_qknorm_rope_kv_insert

class _fused_qk_rope_cache(_Attributes, Protocol):
    def __call__(
        self,
        qkv: Tensor,
        num_heads_q: int,
        num_heads_kv: int,
        head_dim: int,
        cos_sin_cache: Tensor,
        is_neox: bool,
        positions: Tensor,
        slot_mapping: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        kv_cache_dtype: str = 'auto',
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 1e-06,
        constant_positions: bool = False,
    ) -> None:
        """Rotate the query and key heads of qkv in place, and insert keys and values into a paged cache: one launch.

        With weights a head ``x`` first becomes ``x / sqrt(mean(x^2) + eps) * weight``. The first ``rotary_dim`` elements of
        a head rotate in pairs: (j, j + rotary_dim / 2) if `is_neox`, else (2j, 2j + 1) (Su et al. 2021, arXiv:2104.09864).
        All in float32, rounded once. Keys and values are then written to ``b, o = divmod(slot_mapping[t], block_size)`` of
        the caches, as they are or as fp8 of ``x / scale``. A token with a position outside the table is not rotated, and
        nothing of it is inserted; nor is a token with a slot that is negative or after the last.

        Args:
            qkv: [num_tokens, at least (num_heads_q + 2 * num_heads_kv) * head_dim], float16 or bfloat16, read and written;
                any row stride. Values, and what follows them, are not changed.
            num_heads_q: heads of queries, and of keys.
            num_heads_kv: heads of queries, and of keys.
            head_dim: 64, 128 or 256.
            cos_sin_cache: [max_position, rotary_dim], float32, float16 or bfloat16, of one row at least, any row stride:
                cosines, then sines; rotary_dim even, at most head_dim.
            is_neox: which elements form a pair.
            positions: [num_tokens] int64 or int32, any stride.
            slot_mapping: [at most num_tokens] int64 or int32, any stride: the slots of the first tokens.
            key_cache: [num_blocks, block_size, num_heads_kv, head_dim], written where slots say; any strides
                but the last; of the dtype of `qkv`, or uint8 or float8.
            value_cache: [num_blocks, block_size, num_heads_kv, head_dim], written where slots say; any strides
                but the last; of the dtype of `qkv`, or uint8 or float8.
            kv_cache_dtype: "auto", "bfloat16" or "float16", all the same; "fp8", "fp8_e4m3" or "fp8_e5m2".
            k_scale: one float32 each; needed for fp8.
            v_scale: one float32 each; needed for fp8.
            q_weight: [head_dim], float32, float16 or bfloat16, both of one dtype; or None, both.
            k_weight: [head_dim], float32, float16 or bfloat16, both of one dtype; or None, both.
            eps: added to the mean of squares; not read without weights.
            constant_positions: a promise that no kernel which may still run when this one starts writes positions,
                slot_mapping, cos_sin_cache or weights. They are then loaded while the previous kernel runs.
        """

fused_qk_rope_cache: _fused_qk_rope_cache

class _reshape_and_cache(_Attributes, Protocol):
    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor | float,
        v_scale: Tensor | float,
    ) -> None:
        """Write keys and values of tokens into the slots of a packed cache.

        ``key_cache[b, h, d // x, o, d % x] = key[t, h, d]; value_cache[b, h, d, o] = value[t, h, d]`` with
        ``b, o = divmod(slot_mapping[t], block_size)``, or quantized to fp8. Nothing is written for a slot that is negative
        or after the last. Among tokens with the same slot, it is unspecified which one is kept.

        Args:
            key: [at least num_tokens, num_heads, head_size], float32, float16 or bfloat16; any token stride.
            value: [at least num_tokens, num_heads, head_size], float32, float16 or bfloat16; any token stride.
            key_cache: [num_blocks, num_heads, head_size / x, block_size, x], contiguous, written where slots say; of the
                dtype of `key`, or uint8 or float8.
            value_cache: [num_blocks, num_heads, head_size, block_size], likewise.
            slot_mapping: [num_tokens] int64 or int32, any stride.
            kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
            k_scale: one float32 each, or a number; not read for "auto".
            v_scale: one float32 each, or a number; not read for "auto".
        """

reshape_and_cache: _reshape_and_cache

class _reshape_and_cache_flash(_Attributes, Protocol):
    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor | float,
        v_scale: Tensor | float,
    ) -> None:
        """Write keys and values of tokens into the slots of a paged cache, head by head.

        ``key_cache[b, o, h] = key[t, h]; value_cache[b, o, h] = value[t, h]`` with
        ``b, o = divmod(slot_mapping[t], block_size)``, or quantized to fp8. Nothing is written for a slot that is negative
        or after the last. Among tokens with the same slot, it is unspecified which one is kept.

        Args:
            key: [at least num_tokens, num_heads, head_size], float32, float16 or bfloat16; any token and
                head strides.
            value: [at least num_tokens, num_heads, head_size], float32, float16 or bfloat16; any token and
                head strides.
            key_cache: [num_blocks, block_size, num_heads, head_size], written where slots say; each of any
                strides but that of the last dimension, so that heads may come before slots in memory and both caches may be
                slices of one buffer; of the dtype of `key`, or uint8 or float8.
            value_cache: [num_blocks, block_size, num_heads, head_size], written where slots say; each of any
                strides but that of the last dimension, so that heads may come before slots in memory and both caches may be
                slices of one buffer; of the dtype of `key`, or uint8 or float8.
            slot_mapping: [num_tokens] int64 or int32, any stride.
            kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
            k_scale: one float32 each, or a number, or both [num_heads], one for each head; not read for "auto".
            v_scale: one float32 each, or a number, or both [num_heads], one for each head; not read for "auto".
        """

reshape_and_cache_flash: _reshape_and_cache_flash

class _ngram_compute_n_gram_ids(_Attributes, Protocol):
    def __call__(
        self,
        ne_n: int,
        ne_k: int,
        ne_weights: Tensor,
        ne_mods: Tensor,
        exclusive_ne_embedder_size_sums: Tensor,
        exclusive_req_len_sums: Tensor,
        ne_token_table: Tensor,
        row_indices: Tensor,
        column_starts: Tensor,
        n_gram_ids: Tensor,
    ) -> None:
        """The hashed ids of the n-grams that end with each token, for the embedding of LongCat-Flash.

        An n-gram of n tokens, n = 2 ... ne_n, has ne_k ids. The id number ``c = (n - 2) * ne_k + k`` of a token is ``s[c] +
        h``, where s is `exclusive_ne_embedder_size_sums` and h the sum of ``table[row, column - j] * w[n - 2, k, j] mod m``
        over j = 0 ... n - 1, again mod m, with ``m = ne_mods[n - 2, k]``; mod is never negative. The sum ends before the
        first j with ``column - j < 0`` or a negative entry of the table, which stands for a token that no n-gram contains.

        Request r has the tokens from ``exclusive_req_len_sums[r]`` on, before the next request's; token i of it lies at
        ``row = row_indices[r]`` and ``column = column_starts[r] + i`` of the table. Ids are left unchanged for tokens
        before the first and after the last request, for rows and columns outside the table, and where m is below 1. Sums
        that do not ascend give any ids. Modelled on vLLM's op of this name.

        Args:
            ne_n: tokens of the longest n-gram, 2 to 32
            ne_k: ids of each n-gram, 1 to 1024.
            ne_weights: [ne_n - 1, ne_k, ne_n] int32, contiguous: w.
            ne_mods: [ne_n - 1, ne_k] int32, contiguous: m, the rows of an embedding table.
            exclusive_ne_embedder_size_sums: [(ne_n - 1) * ne_k + 1] int32, contiguous: s. The last is not read. The sum
                with h wraps around in 32 bits.
            exclusive_req_len_sums: [num_requests + 1] int32, contiguous, ascending from 0.
            ne_token_table: [rows, columns] int32; constant row stride.
            row_indices: [num_requests] int64, contiguous.
            column_starts: [num_requests] int32, contiguous: the column of each request's first token.
            n_gram_ids: [num_tokens, (ne_n - 1) * ne_k] int32, contiguous, written.
        """

ngram_compute_n_gram_ids: _ngram_compute_n_gram_ids

class _vocab_parallel_embedding(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        input_ids: Tensor,
        weight: Tensor,
        org_vocab_start_index: int,
        org_vocab_end_index: int,
        num_org_vocab_padding: int,
        added_vocab_start_index: int,
        added_vocab_end_index: int,
    ) -> None:
        """The rows of this rank's part of an embedding table, bit for bit, and zeros for tokens of other ranks.

        The sum of the outputs of all ranks is the embedding. `weight` has rows for the tokens of this rank's range of the
        original vocabulary, then rows of padding, then rows for its range of added tokens. A token in both ranges is one of
        the original vocabulary. Modelled on vLLM's op of this name.

        Args:
            out: [num_tokens, hidden_size] of the dtype of `weight`, written; constant row stride.
            input_ids: [num_tokens] int32 or int64, contiguous; any values are allowed.
            weight: [rows, hidden_size], floats, float8 or integers; constant row stride. At least as many rows as both
                ranges and the padding have.
            org_vocab_start_index: this rank's tokens of the original vocabulary; the end is exclusive.
            org_vocab_end_index: this rank's tokens of the original vocabulary; the end is exclusive.
            num_org_vocab_padding: rows of padding after them.
            added_vocab_start_index: this rank's added tokens, likewise; an empty range for none.
            added_vocab_end_index: this rank's added tokens, likewise; an empty range for none.
        """
    @staticmethod
    def new(
        input_ids: Tensor,
        weight: Tensor,
        org_vocab_start_index: int,
        org_vocab_end_index: int,
        num_org_vocab_padding: int,
        added_vocab_start_index: int,
        added_vocab_end_index: int,
    ) -> Tensor:
        """The rows of this rank's part of an embedding table, bit for bit, and zeros for tokens of other ranks.

        The sum of the outputs of all ranks is the embedding. `weight` has rows for the tokens of this rank's range of the
        original vocabulary, then rows of padding, then rows for its range of added tokens. A token in both ranges is one of
        the original vocabulary. Modelled on vLLM's op of this name.

        Args:
            input_ids: [num_tokens] int32 or int64, contiguous; any values are allowed.
            weight: [rows, hidden_size], floats, float8 or integers; constant row stride. At least as many rows as both
                ranges and the padding have.
            org_vocab_start_index: this rank's tokens of the original vocabulary; the end is exclusive.
            org_vocab_end_index: this rank's tokens of the original vocabulary; the end is exclusive.
            num_org_vocab_padding: rows of padding after them.
            added_vocab_start_index: this rank's added tokens, likewise; an empty range for none.
            added_vocab_end_index: this rank's added tokens, likewise; an empty range for none.

        Returns:
            out: [num_tokens, hidden_size] of the dtype of `weight`.
        """

vocab_parallel_embedding: _vocab_parallel_embedding

class _skinny_linear(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        constant_weight: bool = False,
        activation: str = 'none',
        norm_weight: Tensor | None = None,
        epsilon: float = 1e-06,
        prefetched: Tensor | None = None,
    ) -> None:
        """A linear layer for small M: ``out = f(norm(input) @ weight.T + bias)``, accumulated in float32 and rounded once.

        It is meant for the decode step of one or two sequences: from four rows on, a GEMM on tensor cores (`linear`) is
        faster. The weight is read once for every four rows of `input`. Each lane of a warp accumulates a part of a dot
        product; then the partial sums are added. If the magnitudes of the products add up to more than the largest float32,
        the result may be right, infinite or NaN: a partial sum may be infinite where the whole is not.

        Args:
            out: [..., output_size], written; constant row stride.
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            weight: [output_size, hidden_size] of the same dtype; constant row stride.
            bias: of the same dtype, contiguous, an element for each row of weight; or None.
            constant_weight: a promise that no kernel which may still run when this one starts writes `weight` or
                `norm_weight`, as is so for the weights of a model. The kernel then loads them while the previous kernel
                runs. If that kernel does write them, the result may be that of the old values.
            activation: "none", "gelu" or "silu_and_mul", as of `linear`; with the last, weight has 2 * output_size rows.
            norm_weight: [hidden_size] of the same dtype, contiguous: input is normalised and rounded as by `rms_norm`; or
                None for no norm. Rows have at most 32 KB then.
            epsilon: of the norm.
            prefetched: rows that a later kernel reads, [rows, columns] of the same dtype, such as a part of each row of the
                next weight, constant row stride; or None. The kernel prefetches them into L2 while the previous kernel,
                which may leave memory idle, still runs. It does not read them.
        """
    @staticmethod
    def new(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        constant_weight: bool = False,
        activation: str = 'none',
        norm_weight: Tensor | None = None,
        epsilon: float = 1e-06,
        prefetched: Tensor | None = None,
    ) -> Tensor:
        """A linear layer for small M: ``out = f(norm(input) @ weight.T + bias)``, accumulated in float32 and rounded once.

        It is meant for the decode step of one or two sequences: from four rows on, a GEMM on tensor cores (`linear`) is
        faster. The weight is read once for every four rows of `input`. Each lane of a warp accumulates a part of a dot
        product; then the partial sums are added. If the magnitudes of the products add up to more than the largest float32,
        the result may be right, infinite or NaN: a partial sum may be infinite where the whole is not.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            weight: [output_size, hidden_size] of the same dtype; constant row stride.
            bias: of the same dtype, contiguous, an element for each row of weight; or None.
            constant_weight: a promise that no kernel which may still run when this one starts writes `weight` or
                `norm_weight`, as is so for the weights of a model. The kernel then loads them while the previous kernel
                runs. If that kernel does write them, the result may be that of the old values.
            activation: "none", "gelu" or "silu_and_mul", as of `linear`; with the last, weight has 2 * output_size rows.
            norm_weight: [hidden_size] of the same dtype, contiguous: input is normalised and rounded as by `rms_norm`; or
                None for no norm. Rows have at most 32 KB then.
            epsilon: of the norm.
            prefetched: rows that a later kernel reads, [rows, columns] of the same dtype, such as a part of each row of the
                next weight, constant row stride; or None. The kernel prefetches them into L2 while the previous kernel,
                which may leave memory idle, still runs. It does not read them.

        Returns:
            out: [..., output_size].
        """

skinny_linear: _skinny_linear

class _cutlass_scaled_mm(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        a_scales: Tensor,
        b_scales: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """A GEMM of 8-bit matrices with scales: ``out = a_scales * (b_scales * (a @ b)) + bias``.

        Accumulation is exact for int8 and in float32 for fp8; the epilogue is computed in float32 and rounded once.
        Per-tensor scales, per-row scales of a and per-column scales of b may be mixed. Scales with any other number of
        elements are block scales:
        ``out[m, n] = sum_j a_scales[m, j] * b_scales[j, n // 128] * (a[m, j-th 128] . b[j-th 128, n])``.

        Hopper's tensor cores keep 14 bits of an fp8 accumulator (`fp8_accumulation.py`). For a float16 out, accumulators
        are promoted to float32 after every 64 elements of K; for bfloat16 after every 128 if M is at most 64 or scales are
        block scales. Then the largest error is less than 1.5 times that of rounding once. Otherwise all of K is
        accumulated, as with CUTLASS's FastAccum: for random numbers, the largest error is 1.1 times that of rounding to
        bfloat16 for 1024 elements, 2.2 times for 4096 and 2.5 times for 14336.

        Args:
            out: [M, N] float16 or bfloat16, written; elements of a row are contiguous.
            a: [M, K] int8, float8_e4m3fn, float8_e4m3fnuz or float8_e5m2, any strides; row-major is fast.
            b: [K, N] of the same dtype, any strides; column-major is fast.
            a_scales: float32, contiguous, M or 1 elements; or [M, ceil(K / 128)] of any strides.
            b_scales: float32, contiguous, N or 1 elements; or [ceil(K / 128), ceil(N / 128)] of any strides.
            bias: of the dtype of out, contiguous, N elements; or None, as it must be with block scales.
        """
    @staticmethod
    def new(
        a: Tensor,
        b: Tensor,
        a_scales: Tensor,
        b_scales: Tensor,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A GEMM of 8-bit matrices with scales: ``out = a_scales * (b_scales * (a @ b)) + bias``.

        Accumulation is exact for int8 and in float32 for fp8; the epilogue is computed in float32 and rounded once.
        Per-tensor scales, per-row scales of a and per-column scales of b may be mixed. Scales with any other number of
        elements are block scales:
        ``out[m, n] = sum_j a_scales[m, j] * b_scales[j, n // 128] * (a[m, j-th 128] . b[j-th 128, n])``.

        Hopper's tensor cores keep 14 bits of an fp8 accumulator (`fp8_accumulation.py`). For a float16 out, accumulators
        are promoted to float32 after every 64 elements of K; for bfloat16 after every 128 if M is at most 64 or scales are
        block scales. Then the largest error is less than 1.5 times that of rounding once. Otherwise all of K is
        accumulated, as with CUTLASS's FastAccum: for random numbers, the largest error is 1.1 times that of rounding to
        bfloat16 for 1024 elements, 2.2 times for 4096 and 2.5 times for 14336.

        Args:
            a: [M, K] int8, float8_e4m3fn, float8_e4m3fnuz or float8_e5m2, any strides; row-major is fast.
            b: [K, N] of the same dtype, any strides; column-major is fast.
            a_scales: float32, contiguous, M or 1 elements; or [M, ceil(K / 128)] of any strides.
            b_scales: float32, contiguous, N or 1 elements; or [ceil(K / 128), ceil(N / 128)] of any strides.
            bias: of the dtype of out, contiguous, N elements; or None, as it must be with block scales.
            out_dtype: of the output; None for bfloat16, or the dtype of the bias.

        Returns:
            out: [M, N] float16 or bfloat16.
        """

cutlass_scaled_mm: _cutlass_scaled_mm

class _cutlass_scaled_mm_azp(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        a_scales: Tensor,
        b_scales: Tensor,
        azp_adj: Tensor,
        azp: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """`cutlass_scaled_mm` of int8 with zero points of a: ``out = a_scales * (b_scales * (a @ b - z)) + bias``.

        ``z = azp[m] * azp_adj[n]`` where azp is given, and ``azp_adj[n]`` where it is None. The difference is computed in
        int32, with wraparound.

        Args:
            out: [M, N] float16 or bfloat16, written; elements of a row are contiguous.
            a: [M, K] int8, any strides; row-major is fast.
            b: [K, N] int8, any strides; column-major is fast.
            a_scales: float32, contiguous, M or 1 elements
            b_scales: likewise, N or 1.
            azp_adj: int32, contiguous, N elements: the sum of each column of b, times the zero point if azp is None.
            azp: int32, contiguous, M elements: a zero point for each row; or None.
            bias: of the dtype of out, contiguous, N elements; or None.
        """
    @staticmethod
    def new(
        a: Tensor,
        b: Tensor,
        a_scales: Tensor,
        b_scales: Tensor,
        azp_adj: Tensor,
        azp: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`cutlass_scaled_mm` of int8 with zero points of a: ``out = a_scales * (b_scales * (a @ b - z)) + bias``.

        ``z = azp[m] * azp_adj[n]`` where azp is given, and ``azp_adj[n]`` where it is None. The difference is computed in
        int32, with wraparound.

        Args:
            a: [M, K] int8, any strides; row-major is fast.
            b: [K, N] int8, any strides; column-major is fast.
            a_scales: float32, contiguous, M or 1 elements
            b_scales: likewise, N or 1.
            azp_adj: int32, contiguous, N elements: the sum of each column of b, times the zero point if azp is None.
            azp: int32, contiguous, M elements: a zero point for each row; or None.
            bias: of the dtype of out, contiguous, N elements; or None.
            out_dtype: of the output; None for bfloat16, or the dtype of the bias.

        Returns:
            out: [M, N] float16 or bfloat16.
        """

cutlass_scaled_mm_azp: _cutlass_scaled_mm_azp

class _rearrange_kn_weight_as_n32k16_order(_Attributes, Protocol):
    def __call__(
        self,
        b_qweight: Tensor,
        b_scales: Tensor,
        b_zeros: Tensor | None,
        has_zp: bool,
        b_qweight_reorder: Tensor,
        b_scales_reorder: Tensor,
        b_zeros_reorder: Tensor | None,
        K: int,
        N: int,
        N_32align: int,
    ) -> None:
        """An 8-bit weight in tiles of 16 x 32, for `allspark_w8a16_gemm`; scales and zero points in the same column order.

        Columns after the last one are 0. For an empty weight nothing is written. `_shared/packed_layouts.py` has the layout
        and the column order (n32k16).

        Args:
            b_qweight: [K, N] uint8, contiguous; K a multiple of 16.
            b_scales: [1, N] float16 or bfloat16, contiguous.
            b_zeros: the same, with has_zp; else None, or not read.
            has_zp: whether there are zero points.
            b_qweight_reorder: [N_32align, K] uint8, contiguous, written.
            b_scales_reorder: [1, N_32align] of the dtype of b_scales, contiguous, written.
            b_zeros_reorder: the same, written with has_zp; else None, or not written.
            K: the size of the weight.
            N: the size of the weight.
            N_32align: N, rounded up to a multiple of 32.
        """
    @staticmethod
    def new(
        b_qweight: Tensor,
        b_scales: Tensor,
        b_zeros: Tensor | None,
        has_zp: bool,
        b_zeros_reorder: Tensor | None,
        K: int,
        N: int,
        N_32align: int,
    ) -> tuple[Tensor, Tensor]:
        """An 8-bit weight in tiles of 16 x 32, for `allspark_w8a16_gemm`; scales and zero points in the same column order.

        Columns after the last one are 0. For an empty weight nothing is written. `_shared/packed_layouts.py` has the layout
        and the column order (n32k16).

        Args:
            b_qweight: [K, N] uint8, contiguous; K a multiple of 16.
            b_scales: [1, N] float16 or bfloat16, contiguous.
            b_zeros: the same, with has_zp; else None, or not read.
            has_zp: whether there are zero points.
            b_zeros_reorder: the same, written with has_zp; else None, or not written.
            K: the size of the weight.
            N: the size of the weight.
            N_32align: N, rounded up to a multiple of 32.

        Returns:
            b_qweight_reorder: [N_32align, K] uint8.
            b_scales_reorder: [1, N_32align] of the dtype of b_scales.
        """

rearrange_kn_weight_as_n32k16_order: _rearrange_kn_weight_as_n32k16_order

class _allspark_w8a16_gemm(_Attributes, Protocol):
    def __call__(
        self,
        a: Tensor,
        b_qweight: Tensor,
        b_scales: Tensor,
        b_qzeros: Tensor | None,
        n: int,
        group_size: int,
        sm_count: int,
        sm_version: int,
        CUBLAS_M_THRESHOLD: int,
        has_zp: bool,
        n32k16_reorder: bool,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GEMM with an 8-bit weight in AllSpark's layout: ``out = scale * (a @ (quant - 128 - zero))``.

        A zero point is any float: differences may be rounded to the dtype of a. Accumulation is in float32; the result is
        rounded once.

        Args:
            a: [M, K] float16 or bfloat16; constant row stride; K a multiple of 16.
            b_qweight: [n rounded up to 32, K] uint8, contiguous, as `rearrange_kn_weight_as_n32k16_order` writes it.
            b_scales: [1, n rounded up to 32] of the dtype of a, contiguous, in that order.
            b_qzeros: the same, with has_zp; else None.
            n: columns of the weight.
            group_size: must be -1: a column has one scale.
            sm_count: for compatibility with vLLM; no effect.
            sm_version: for compatibility with vLLM; no effect.
            CUBLAS_M_THRESHOLD: for compatibility with vLLM; no effect.
            has_zp: whether there are zero points.
            n32k16_reorder: must be True: the weight is in that order.
            out: [M, n] of the dtype of a, returned; elements of a row are contiguous; new unless given.

        Returns:
            out: [M, n] of the dtype of a.
        """
    @staticmethod
    def new(
        a: Tensor,
        b_qweight: Tensor,
        b_scales: Tensor,
        b_qzeros: Tensor | None,
        n: int,
        group_size: int,
        sm_count: int,
        sm_version: int,
        CUBLAS_M_THRESHOLD: int,
        has_zp: bool,
        n32k16_reorder: bool,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GEMM with an 8-bit weight in AllSpark's layout: ``out = scale * (a @ (quant - 128 - zero))``.

        A zero point is any float: differences may be rounded to the dtype of a. Accumulation is in float32; the result is
        rounded once.

        Args:
            a: [M, K] float16 or bfloat16; constant row stride; K a multiple of 16.
            b_qweight: [n rounded up to 32, K] uint8, contiguous, as `rearrange_kn_weight_as_n32k16_order` writes it.
            b_scales: [1, n rounded up to 32] of the dtype of a, contiguous, in that order.
            b_qzeros: the same, with has_zp; else None.
            n: columns of the weight.
            group_size: must be -1: a column has one scale.
            sm_count: for compatibility with vLLM; no effect.
            sm_version: for compatibility with vLLM; no effect.
            CUBLAS_M_THRESHOLD: for compatibility with vLLM; no effect.
            has_zp: whether there are zero points.
            n32k16_reorder: must be True: the weight is in that order.
            out: [M, n] of the dtype of a, returned; elements of a row are contiguous; new unless given.

        Returns:
            out: [M, n] of the dtype of a.
        """

allspark_w8a16_gemm: _allspark_w8a16_gemm

class _awq_gemm(_Attributes, Protocol):
    def __call__(
        self,
        input: Tensor,
        qweight: Tensor,
        scales: Tensor,
        qzeros: Tensor,
        split_k_iters: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GEMM with an AWQ weight: ``out = input @ ((quant - zero) * scale)``, accumulated in float32, rounded once.

        Weights may be rounded to the dtype of `input`, unless a column has one scale; then the epilogue applies it. A word
        holds eight columns in the order 0 2 4 6 1 3 5 7, starting at its lowest nibble (Lin et al. 2023, arXiv:2306.00978).

        Args:
            input: [M, K] float16 or bfloat16; constant row stride.
            qweight: [K, N / 8] int32, contiguous.
            scales: [num_groups, N] of the dtype of `input`, contiguous; num_groups divides K.
            qzeros: [num_groups, N / 8] int32, packed as the weight, contiguous; used as stored.
            split_k_iters: for compatibility with vLLM; no effect.
            out: [M, N] of the dtype of `input`, returned; elements of a row are contiguous; new unless given.

        Returns:
            out: [M, N] of the dtype of `input`.
        """
    @staticmethod
    def new(
        input: Tensor,
        qweight: Tensor,
        scales: Tensor,
        qzeros: Tensor,
        split_k_iters: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GEMM with an AWQ weight: ``out = input @ ((quant - zero) * scale)``, accumulated in float32, rounded once.

        Weights may be rounded to the dtype of `input`, unless a column has one scale; then the epilogue applies it. A word
        holds eight columns in the order 0 2 4 6 1 3 5 7, starting at its lowest nibble (Lin et al. 2023, arXiv:2306.00978).

        Args:
            input: [M, K] float16 or bfloat16; constant row stride.
            qweight: [K, N / 8] int32, contiguous.
            scales: [num_groups, N] of the dtype of `input`, contiguous; num_groups divides K.
            qzeros: [num_groups, N / 8] int32, packed as the weight, contiguous; used as stored.
            split_k_iters: for compatibility with vLLM; no effect.
            out: [M, N] of the dtype of `input`, returned; elements of a row are contiguous; new unless given.

        Returns:
            out: [M, N] of the dtype of `input`.
        """

awq_gemm: _awq_gemm

class _gptq_gemm(_Attributes, Protocol):
    def __call__(
        self,
        a: Tensor,
        b_q_weight: Tensor,
        b_gptq_qzeros: Tensor,
        b_gptq_scales: Tensor,
        b_g_idx: Tensor | None,
        use_exllama: bool,
        use_v2_format: bool,
        bit: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GEMM with a GPTQ weight: ``out = a @ ((quant - zero) * scale)``, accumulated in float32, rounded once.

        Weights may be rounded to the dtype of `a`, unless a column has one scale; then the epilogue applies it. Each column
        of the weight has consecutive quants, starting at the lowest bit of its first word; so does each row of zero points
        (Frantar et al. 2022, arXiv:2210.17323). A row of the weight counts as zeros if b_g_idx names no group or no column
        of `a` for it.

        Args:
            a: [M, K] float16 or bfloat16; constant row stride.
            b_q_weight: [K * bit / 32, N] int32, contiguous.
            b_gptq_qzeros: [num_groups, N * bit / 32] int32, contiguous.
            b_gptq_scales: [num_groups, N] of the dtype of `a`, contiguous.
            b_g_idx: [K] int32, contiguous; empty or None: rows are in order, in groups of K / num_groups. With use_exllama
                row k of the weight multiplies column ``b_g_idx[k]`` of `a`; otherwise its group is ``b_g_idx[k]``.
            use_exllama: whether the weight comes from `gptq_shuffle` (layout exllama).
            use_v2_format: whether zero points are used as they are stored; otherwise 1 is added to them.
            bit: bits of a quant: 2, 3, 4 or 8.
            out: [M, N] of the dtype of `a`, returned; elements of a row are contiguous; new unless given.

        Returns:
            out: [M, N] of the dtype of `a`.
        """
    @staticmethod
    def new(
        a: Tensor,
        b_q_weight: Tensor,
        b_gptq_qzeros: Tensor,
        b_gptq_scales: Tensor,
        b_g_idx: Tensor | None,
        use_exllama: bool,
        use_v2_format: bool,
        bit: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GEMM with a GPTQ weight: ``out = a @ ((quant - zero) * scale)``, accumulated in float32, rounded once.

        Weights may be rounded to the dtype of `a`, unless a column has one scale; then the epilogue applies it. Each column
        of the weight has consecutive quants, starting at the lowest bit of its first word; so does each row of zero points
        (Frantar et al. 2022, arXiv:2210.17323). A row of the weight counts as zeros if b_g_idx names no group or no column
        of `a` for it.

        Args:
            a: [M, K] float16 or bfloat16; constant row stride.
            b_q_weight: [K * bit / 32, N] int32, contiguous.
            b_gptq_qzeros: [num_groups, N * bit / 32] int32, contiguous.
            b_gptq_scales: [num_groups, N] of the dtype of `a`, contiguous.
            b_g_idx: [K] int32, contiguous; empty or None: rows are in order, in groups of K / num_groups. With use_exllama
                row k of the weight multiplies column ``b_g_idx[k]`` of `a`; otherwise its group is ``b_g_idx[k]``.
            use_exllama: whether the weight comes from `gptq_shuffle` (layout exllama).
            use_v2_format: whether zero points are used as they are stored; otherwise 1 is added to them.
            bit: bits of a quant: 2, 3, 4 or 8.
            out: [M, N] of the dtype of `a`, returned; elements of a row are contiguous; new unless given.

        Returns:
            out: [M, N] of the dtype of `a`.
        """

gptq_gemm: _gptq_gemm

class _linear(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str = 'none',
        constant_weight: bool = False,
    ) -> None:
        """A linear layer and its activation: ``out = f(input @ weight.T + bias)``, accumulated in float32 and rounded once.

        With "silu_and_mul" the first half of the weight's rows are gates, the second half ups: ``out = silu(gate) * up``
        for ``[gate, up] = input @ weight.T + bias``; neither is rounded before.

        Args:
            out: [..., output_size], written; constant row stride.
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            weight: [output_size, hidden_size] of the same dtype, or [2 * output_size, hidden_size] with "silu_and_mul";
                constant row stride.
            bias: of the same dtype, contiguous: an element for each row of weight, or for each element of
                ``input @ weight.T``; or None.
            activation: "none"; "gelu", by the error function; or "silu_and_mul".
            constant_weight: the promise of `skinny_linear`. A kernel for few rows then loads `weight` early.
        """
    @staticmethod
    def new(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str = 'none',
        constant_weight: bool = False,
    ) -> Tensor:
        """A linear layer and its activation: ``out = f(input @ weight.T + bias)``, accumulated in float32 and rounded once.

        With "silu_and_mul" the first half of the weight's rows are gates, the second half ups: ``out = silu(gate) * up``
        for ``[gate, up] = input @ weight.T + bias``; neither is rounded before.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            weight: [output_size, hidden_size] of the same dtype, or [2 * output_size, hidden_size] with "silu_and_mul";
                constant row stride.
            bias: of the same dtype, contiguous: an element for each row of weight, or for each element of
                ``input @ weight.T``; or None.
            activation: "none"; "gelu", by the error function; or "silu_and_mul".
            constant_weight: the promise of `skinny_linear`. A kernel for few rows then loads `weight` early.

        Returns:
            out: [..., output_size].
        """

linear: _linear

class _LLMM1(_Attributes, Protocol):
    def __call__(self, in_a: Tensor, in_b: Tensor, rows_per_block: int, *, out: Tensor | None = None) -> Tensor:
        """A GEMM for one token: ``out = in_b @ in_a.T``, accumulated in float32 and rounded once.

        More tokens are supported, too.

        Args:
            in_a: the weight, [outputs, K] float16 or bfloat16, any strides; row-major is fast.
            in_b: the tokens, [tokens, K] of the same dtype, likewise.
            rows_per_block: launch parameter of upstream's kernel; any integer, no effect.
            out: [tokens, outputs] of the same dtype, returned; elements of a row are contiguous.

        Returns:
            out: [tokens, outputs] of the same dtype.
        """
    @staticmethod
    def new(in_a: Tensor, in_b: Tensor, rows_per_block: int, *, out: Tensor | None = None) -> Tensor:
        """A GEMM for one token: ``out = in_b @ in_a.T``, accumulated in float32 and rounded once.

        More tokens are supported, too.

        Args:
            in_a: the weight, [outputs, K] float16 or bfloat16, any strides; row-major is fast.
            in_b: the tokens, [tokens, K] of the same dtype, likewise.
            rows_per_block: launch parameter of upstream's kernel; any integer, no effect.
            out: [tokens, outputs] of the same dtype, returned; elements of a row are contiguous.

        Returns:
            out: [tokens, outputs] of the same dtype.
        """

LLMM1: _LLMM1

class _wvSplitK(_Attributes, Protocol):
    def __call__(
        self,
        in_a: Tensor,
        in_b: Tensor,
        in_bias: Tensor | None,
        CuCount: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A linear layer for one to four tokens: ``out = in_b @ in_a.T + in_bias``, accumulated in float32, rounded once.

        More tokens are supported, too.

        Args:
            in_a: the weight, [outputs, K] float16 or bfloat16, any strides; row-major is fast.
            in_b: the tokens, [tokens, K] of the same dtype, likewise.
            in_bias: [outputs] or [tokens, outputs] of the same dtype, elements of a row contiguous; or None.
            CuCount: number of compute units for upstream's kernel; any integer, no effect.
            out: [tokens, outputs] of the same dtype, returned; elements of a row are contiguous.

        Returns:
            out: [tokens, outputs] of the same dtype.
        """
    @staticmethod
    def new(in_a: Tensor, in_b: Tensor, in_bias: Tensor | None, CuCount: int, *, out: Tensor | None = None) -> Tensor:
        """A linear layer for one to four tokens: ``out = in_b @ in_a.T + in_bias``, accumulated in float32, rounded once.

        More tokens are supported, too.

        Args:
            in_a: the weight, [outputs, K] float16 or bfloat16, any strides; row-major is fast.
            in_b: the tokens, [tokens, K] of the same dtype, likewise.
            in_bias: [outputs] or [tokens, outputs] of the same dtype, elements of a row contiguous; or None.
            CuCount: number of compute units for upstream's kernel; any integer, no effect.
            out: [tokens, outputs] of the same dtype, returned; elements of a row are contiguous.

        Returns:
            out: [tokens, outputs] of the same dtype.
        """

wvSplitK: _wvSplitK

class _wvSplitKrc(_Attributes, Protocol):
    def __call__(
        self,
        in_a: Tensor,
        in_b: Tensor,
        in_bias: Tensor | None,
        CuCount: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A linear layer for 9 to 128 tokens: ``out = in_b @ in_a.T + in_bias``, accumulated in float32 and rounded once.

        Any number of tokens is supported.

        Args:
            in_a: the weight, [outputs, K] float16 or bfloat16, any strides; row-major is fast.
            in_b: the tokens, [tokens, K] of the same dtype, likewise.
            in_bias: [outputs] or [tokens, outputs] of the same dtype, elements of a row contiguous; or None.
            CuCount: number of compute units for upstream's kernel; any integer, no effect.
            out: [tokens, outputs] of the same dtype, returned; elements of a row are contiguous.

        Returns:
            out: [tokens, outputs] of the same dtype.
        """
    @staticmethod
    def new(in_a: Tensor, in_b: Tensor, in_bias: Tensor | None, CuCount: int, *, out: Tensor | None = None) -> Tensor:
        """A linear layer for 9 to 128 tokens: ``out = in_b @ in_a.T + in_bias``, accumulated in float32 and rounded once.

        Any number of tokens is supported.

        Args:
            in_a: the weight, [outputs, K] float16 or bfloat16, any strides; row-major is fast.
            in_b: the tokens, [tokens, K] of the same dtype, likewise.
            in_bias: [outputs] or [tokens, outputs] of the same dtype, elements of a row contiguous; or None.
            CuCount: number of compute units for upstream's kernel; any integer, no effect.
            out: [tokens, outputs] of the same dtype, returned; elements of a row are contiguous.

        Returns:
            out: [tokens, outputs] of the same dtype.
        """

wvSplitKrc: _wvSplitKrc

class _wvSplitKQ(_Attributes, Protocol):
    def __call__(
        self,
        in_a: Tensor,
        in_b: Tensor,
        in_bias: Tensor | None,
        out_c: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        CuCount: int,
    ) -> None:
        """A linear layer of fp8 for one to four tokens: ``out_c = scale_b * (scale_a * (in_b @ in_a.T)) + in_bias``.

        Accumulation and scales are in float32; the result is rounded once. More tokens are supported, too.

        Args:
            in_a: the weight, [outputs, K] float8_e4m3fn or float8_e4m3fnuz, any strides; row-major is fast.
            in_b: the tokens, [tokens, K] of the same dtype, likewise.
            in_bias: [outputs] or [tokens, outputs] of the dtype of out_c, elements of a row contiguous; or None.
            out_c: [tokens, outputs] float16 or bfloat16, written; elements of a row are contiguous.
            scale_a: scale of the weight, one float32
            scale_b: scale of the tokens, likewise.
            CuCount: number of compute units for upstream's kernel; any integer, no effect.
        """
    @staticmethod
    def new(
        in_a: Tensor,
        in_b: Tensor,
        in_bias: Tensor | None,
        scale_a: Tensor,
        scale_b: Tensor,
        CuCount: int,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A linear layer of fp8 for one to four tokens: ``out_c = scale_b * (scale_a * (in_b @ in_a.T)) + in_bias``.

        Accumulation and scales are in float32; the result is rounded once. More tokens are supported, too.

        Args:
            in_a: the weight, [outputs, K] float8_e4m3fn or float8_e4m3fnuz, any strides; row-major is fast.
            in_b: the tokens, [tokens, K] of the same dtype, likewise.
            in_bias: [outputs] or [tokens, outputs] of the dtype of out_c, elements of a row contiguous; or None.
            scale_a: scale of the weight, one float32
            scale_b: scale of the tokens, likewise.
            CuCount: number of compute units for upstream's kernel; any integer, no effect.
            out_dtype: of the output; None for bfloat16, or the dtype of the bias.

        Returns:
            out_c: [tokens, outputs] float16 or bfloat16.
        """

wvSplitKQ: _wvSplitKQ

class _dsv3_fused_a_gemm(_Attributes, Protocol):
    def __call__(self, output: Tensor, mat_a: Tensor, mat_b: Tensor) -> None:
        """DeepSeek-V3's first projections of queries and latents: ``output = mat_a @ mat_b``, accumulated in float32.

        Args:
            output: [tokens, outputs] bfloat16, written; elements of a row are contiguous.
            mat_a: the tokens, [tokens, K] bfloat16, any strides; row-major is fast.
            mat_b: the weight, [K, outputs] bfloat16, any strides; column-major is fast.
        """
    @staticmethod
    def new(mat_a: Tensor, mat_b: Tensor) -> Tensor:
        """DeepSeek-V3's first projections of queries and latents: ``output = mat_a @ mat_b``, accumulated in float32.

        Args:
            mat_a: the tokens, [tokens, K] bfloat16, any strides; row-major is fast.
            mat_b: the weight, [K, outputs] bfloat16, any strides; column-major is fast.

        Returns:
            output: [tokens, outputs] bfloat16.
        """

dsv3_fused_a_gemm: _dsv3_fused_a_gemm

class _dsv3_router_gemm(_Attributes, Protocol):
    def __call__(self, output: Tensor, mat_a: Tensor, mat_b: Tensor) -> None:
        """DeepSeek-V3's router: ``output = mat_a @ mat_b.T``, accumulated in float32 and rounded once, if at all.

        Args:
            output: [tokens, experts] float32 or bfloat16, written; elements of a row are contiguous.
            mat_a: the tokens, [tokens, K] bfloat16, any strides; row-major is fast.
            mat_b: the weight, [experts, K] bfloat16, likewise.
        """
    @staticmethod
    def new(mat_a: Tensor, mat_b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """DeepSeek-V3's router: ``output = mat_a @ mat_b.T``, accumulated in float32 and rounded once, if at all.

        Args:
            mat_a: the tokens, [tokens, K] bfloat16, any strides; row-major is fast.
            mat_b: the weight, [experts, K] bfloat16, likewise.
            out_dtype: of the output; None for float32.

        Returns:
            output: [tokens, experts] float32 or bfloat16.
        """

dsv3_router_gemm: _dsv3_router_gemm

class _fp32_router_gemm(_Attributes, Protocol):
    def __call__(self, output: Tensor, mat_a: Tensor, mat_b: Tensor) -> None:
        """A router with a float32 weight: ``output = mat_a @ mat_b.T``, multiplied and accumulated in float32.

        For the decode step, as the routers of MiniMax-M2 need it. With bfloat16 tokens the weight is read once for every
        four of them, so for many tokens a conversion to float32 and `linear` is faster. Modelled on vLLM's op of this name,
        which has a list of sizes and at most 48 tokens.

        Args:
            output: [tokens, experts] float32, written; constant row stride.
            mat_a: the tokens, [tokens, K], bfloat16 or float32; at most 2^18 tokens if bfloat16; constant row stride.
            mat_b: the weight, [experts, K] float32; constant row stride.
        """
    @staticmethod
    def new(mat_a: Tensor, mat_b: Tensor) -> Tensor:
        """A router with a float32 weight: ``output = mat_a @ mat_b.T``, multiplied and accumulated in float32.

        For the decode step, as the routers of MiniMax-M2 need it. With bfloat16 tokens the weight is read once for every
        four of them, so for many tokens a conversion to float32 and `linear` is faster. Modelled on vLLM's op of this name,
        which has a list of sizes and at most 48 tokens.

        Args:
            mat_a: the tokens, [tokens, K], bfloat16 or float32; at most 2^18 tokens if bfloat16; constant row stride.
            mat_b: the weight, [experts, K] float32; constant row stride.

        Returns:
            output: [tokens, experts] float32.
        """

fp32_router_gemm: _fp32_router_gemm

class _cutlass_scaled_fp4_mm(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        block_scale_a: Tensor,
        block_scale_b: Tensor,
        alpha: Tensor,
    ) -> None:
        """A GEMM of NVFP4 matrices: ``out = alpha * (A @ B.T)``, accumulated in float32 and rounded once.

        A and B are the quantized values times their scales. Tensor cores apply the scales on compute capability 10.0, 10.3,
        12.0 and 12.1; elsewhere A and B are dequantized in a workspace to bfloat16, which holds them exactly.

        Args:
            out: [M, N] float16 or bfloat16, written; elements of a row are contiguous.
            a: [M, K / 2] uint8, two e2m1 values to a byte, the first in its lower half; K a multiple of 16; rows of one
                stride.
            b: [N, K / 2] uint8, likewise.
            block_scale_a: float8_e4m3fn or uint8, contiguous, [M rounded up to 128, K / 16 rounded up to 4], a scale for
                every sixteen elements of a, in tiles (see `_shared/fp4_tiles.py`), as `scaled_fp4_quant` writes them: none
                is negative.
            block_scale_b: of b, likewise.
            alpha: one float32, normally the reciprocal of the product of both tensors' scales.
        """
    @staticmethod
    def new(
        a: Tensor,
        b: Tensor,
        block_scale_a: Tensor,
        block_scale_b: Tensor,
        alpha: Tensor,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A GEMM of NVFP4 matrices: ``out = alpha * (A @ B.T)``, accumulated in float32 and rounded once.

        A and B are the quantized values times their scales. Tensor cores apply the scales on compute capability 10.0, 10.3,
        12.0 and 12.1; elsewhere A and B are dequantized in a workspace to bfloat16, which holds them exactly.

        Args:
            a: [M, K / 2] uint8, two e2m1 values to a byte, the first in its lower half; K a multiple of 16; rows of one
                stride.
            b: [N, K / 2] uint8, likewise.
            block_scale_a: float8_e4m3fn or uint8, contiguous, [M rounded up to 128, K / 16 rounded up to 4], a scale for
                every sixteen elements of a, in tiles (see `_shared/fp4_tiles.py`), as `scaled_fp4_quant` writes them: none
                is negative.
            block_scale_b: of b, likewise.
            alpha: one float32, normally the reciprocal of the product of both tensors' scales.
            out_dtype: of the output; None for bfloat16.

        Returns:
            out: [M, N] float16 or bfloat16.
        """

cutlass_scaled_fp4_mm: _cutlass_scaled_fp4_mm

class _ggml_mul_mat_vec_a8(_Attributes, Protocol):
    def __call__(self, W: Tensor, X: Tensor, quant_type: int, row: int, *, out: Tensor | None = None) -> Tensor:
        """A linear layer with a GGUF weight, for small M: ``out = X @ W.T``, rounded once.

        The weight is dequantized as by `ggml_dequantize`, to float32; for more than 32 tokens it is then rounded to the
        dtype of X. X is not quantized to 8 bits as upstream does; but with a single token its elements may be rounded by up
        to 2^-21 of the largest of the 32, or 16, that share a scale. Accumulation is in float32. Any number of tokens is
        supported. Scales multiply partial sums of a few elements: an infinity in X may give NaN instead of infinity.

        Args:
            W: uint8, contiguous: the blocks of all rows, in any shape; or [row, bytes of a row], where rows may have more
                blocks than K elements need; these are ignored.
            X: the tokens, [tokens, K] float32, float16 or bfloat16, K a multiple of the type's block; constant row stride.
            quant_type: the type's number, as `ggml_dequantize` lists them.
            row: rows of the weight.
            out: [tokens, row] of the dtype of X, returned; elements of a row are contiguous.

        Returns:
            out: [tokens, row] of the dtype of X.
        """
    @staticmethod
    def new(W: Tensor, X: Tensor, quant_type: int, row: int, *, out: Tensor | None = None) -> Tensor:
        """A linear layer with a GGUF weight, for small M: ``out = X @ W.T``, rounded once.

        The weight is dequantized as by `ggml_dequantize`, to float32; for more than 32 tokens it is then rounded to the
        dtype of X. X is not quantized to 8 bits as upstream does; but with a single token its elements may be rounded by up
        to 2^-21 of the largest of the 32, or 16, that share a scale. Accumulation is in float32. Any number of tokens is
        supported. Scales multiply partial sums of a few elements: an infinity in X may give NaN instead of infinity.

        Args:
            W: uint8, contiguous: the blocks of all rows, in any shape; or [row, bytes of a row], where rows may have more
                blocks than K elements need; these are ignored.
            X: the tokens, [tokens, K] float32, float16 or bfloat16, K a multiple of the type's block; constant row stride.
            quant_type: the type's number, as `ggml_dequantize` lists them.
            row: rows of the weight.
            out: [tokens, row] of the dtype of X, returned; elements of a row are contiguous.

        Returns:
            out: [tokens, row] of the dtype of X.
        """

ggml_mul_mat_vec_a8: _ggml_mul_mat_vec_a8

class _ggml_mul_mat_a8(_Attributes, Protocol):
    def __call__(self, W: Tensor, X: Tensor, quant_type: int, row: int, *, out: Tensor | None = None) -> Tensor:
        """A linear layer with a GGUF weight: ``out = X @ W.T``, accumulated in float32, rounded once.

        The same as `ggml_mul_mat_vec_a8`.

        Args:
            W: uint8, contiguous: the blocks of all rows, in any shape; or [row, bytes of a row], where rows may have more
                blocks than K elements need; these are ignored.
            X: the tokens, [tokens, K] float32, float16 or bfloat16, K a multiple of the type's block; constant row stride.
            quant_type: the type's number, as `ggml_dequantize` lists them.
            row: rows of the weight.
            out: [tokens, row] of the dtype of X, returned; elements of a row are contiguous.

        Returns:
            out: [tokens, row] of the dtype of X.
        """
    @staticmethod
    def new(W: Tensor, X: Tensor, quant_type: int, row: int, *, out: Tensor | None = None) -> Tensor:
        """A linear layer with a GGUF weight: ``out = X @ W.T``, accumulated in float32, rounded once.

        The same as `ggml_mul_mat_vec_a8`.

        Args:
            W: uint8, contiguous: the blocks of all rows, in any shape; or [row, bytes of a row], where rows may have more
                blocks than K elements need; these are ignored.
            X: the tokens, [tokens, K] float32, float16 or bfloat16, K a multiple of the type's block; constant row stride.
            quant_type: the type's number, as `ggml_dequantize` lists them.
            row: rows of the weight.
            out: [tokens, row] of the dtype of X, returned; elements of a row are contiguous.

        Returns:
            out: [tokens, row] of the dtype of X.
        """

ggml_mul_mat_a8: _ggml_mul_mat_a8

class _ggml_moe_a8(_Attributes, Protocol):
    def __call__(
        self,
        X: Tensor,
        W: Tensor,
        sorted_token_ids: Tensor,
        expert_ids: Tensor,
        num_tokens_post_padded: Tensor,
        quant_type: int,
        row: int,
        top_k: int,
        tokens: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Grouped GEMM of choices, sorted by expert: ``out[c] = X[c // top_k] @ W[expert of c].T``.

        Choice c is one of the top_k of token ``c // top_k``. Four slots of `sorted_token_ids` belong to the expert in one
        element of `expert_ids`, as `moe_align_block_size` sorts them for `ggml_moe_get_block_size`. Accumulation is in
        float32, rounded once; X and W are those of `ggml_mul_mat_a8`. A choice of an expert that W does not have gets
        zeros; rows of out that no slot names are left unchanged.

        Args:
            X: [tokens, K] float32, float16 or bfloat16; constant row stride.
            W: [experts, row, bytes of a row] uint8, contiguous; rows may hold more blocks than X has columns for.
            sorted_token_ids: [slots] int32 or int64, contiguous, at least one slot for each choice: choices; a number out
                of range is padding, and so are slots after the last block of four.
            expert_ids: [slots / 4, or more] of the same dtype, contiguous.
            num_tokens_post_padded: one element of the same dtype: the number of leading slots that count.
            quant_type: the type's number, as `ggml_dequantize` lists them.
            row: rows of the weight of an expert.
            top_k: choices of a token.
            tokens: rows of X.
            out: [tokens * top_k, row] of the dtype of X, returned; elements of a row are contiguous.

        Returns:
            out: [tokens * top_k, row] of the dtype of X.
        """
    @staticmethod
    def new(
        X: Tensor,
        W: Tensor,
        sorted_token_ids: Tensor,
        expert_ids: Tensor,
        num_tokens_post_padded: Tensor,
        quant_type: int,
        row: int,
        top_k: int,
        tokens: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Grouped GEMM of choices, sorted by expert: ``out[c] = X[c // top_k] @ W[expert of c].T``.

        Choice c is one of the top_k of token ``c // top_k``. Four slots of `sorted_token_ids` belong to the expert in one
        element of `expert_ids`, as `moe_align_block_size` sorts them for `ggml_moe_get_block_size`. Accumulation is in
        float32, rounded once; X and W are those of `ggml_mul_mat_a8`. A choice of an expert that W does not have gets
        zeros; rows of out that no slot names are left unchanged.

        Args:
            X: [tokens, K] float32, float16 or bfloat16; constant row stride.
            W: [experts, row, bytes of a row] uint8, contiguous; rows may hold more blocks than X has columns for.
            sorted_token_ids: [slots] int32 or int64, contiguous, at least one slot for each choice: choices; a number out
                of range is padding, and so are slots after the last block of four.
            expert_ids: [slots / 4, or more] of the same dtype, contiguous.
            num_tokens_post_padded: one element of the same dtype: the number of leading slots that count.
            quant_type: the type's number, as `ggml_dequantize` lists them.
            row: rows of the weight of an expert.
            top_k: choices of a token.
            tokens: rows of X.
            out: [tokens * top_k, row] of the dtype of X, returned; elements of a row are contiguous.

        Returns:
            out: [tokens * top_k, row] of the dtype of X.
        """

ggml_moe_a8: _ggml_moe_a8

class _ggml_moe_a8_vec(_Attributes, Protocol):
    def __call__(
        self,
        X: Tensor,
        W: Tensor,
        topk_ids: Tensor,
        top_k: int,
        quant_type: int,
        row: int,
        tokens: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Grouped GEMM of few tokens with their experts: ``out[t * top_k + j] = X[t] @ W[topk_ids[t * top_k + j]].T``.

        As `ggml_moe_a8`, without sorted lists. A choice of an expert that W does not have gets zeros.

        Args:
            X: [tokens, K] float32, float16 or bfloat16; constant row stride.
            W: [experts, row, bytes of a row] uint8, contiguous; rows may hold more blocks than X has columns for.
            topk_ids: tokens * top_k elements in any shape, int32 or int64, contiguous: the experts of each token.
            top_k: choices of a token.
            quant_type: the type's number, as `ggml_dequantize` lists them.
            row: rows of the weight of an expert.
            tokens: rows of X.
            out: [tokens * top_k, row] of the dtype of X, returned; elements of a row are contiguous.

        Returns:
            out: [tokens * top_k, row] of the dtype of X.
        """
    @staticmethod
    def new(
        X: Tensor,
        W: Tensor,
        topk_ids: Tensor,
        top_k: int,
        quant_type: int,
        row: int,
        tokens: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Grouped GEMM of few tokens with their experts: ``out[t * top_k + j] = X[t] @ W[topk_ids[t * top_k + j]].T``.

        As `ggml_moe_a8`, without sorted lists. A choice of an expert that W does not have gets zeros.

        Args:
            X: [tokens, K] float32, float16 or bfloat16; constant row stride.
            W: [experts, row, bytes of a row] uint8, contiguous; rows may hold more blocks than X has columns for.
            topk_ids: tokens * top_k elements in any shape, int32 or int64, contiguous: the experts of each token.
            top_k: choices of a token.
            quant_type: the type's number, as `ggml_dequantize` lists them.
            row: rows of the weight of an expert.
            tokens: rows of X.
            out: [tokens * top_k, row] of the dtype of X, returned; elements of a row are contiguous.

        Returns:
            out: [tokens * top_k, row] of the dtype of X.
        """

ggml_moe_a8_vec: _ggml_moe_a8_vec

class _grouped_gemm(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        sorted_token_ids: Tensor,
        expert_ids: Tensor,
        num_tokens_post_pad: Tensor,
        topk_weights: Tensor | None = None,
        a_scales: Tensor | None = None,
        b_scales: Tensor | None = None,
        bias: Tensor | None = None,
        top_k: int = 1,
        block_size: int = 64,
        activation: str = 'none',
    ) -> None:
        """Grouped GEMM over experts: ``out[t] = f(weight[t] * (a[t // top_k] @ b[e].T + bias[e]))``.

        e is the expert of row t. Accumulation is exact for int8 and in float32 for other dtypes, with scales as
        `cutlass_scaled_mm` applies them; the epilogue is computed in float32 and rounded once. Rows that the lists do not
        name, and rows of experts that do not exist, are left unchanged.

        Args:
            out: [num_rows, N], written; float16 or bfloat16, or float32 for operands of float32. Constant row stride.
            a: [num_rows / top_k, K] float32, float16, bfloat16, int8 or float8; constant row stride.
            b: [num_experts, N, K] of the same dtype, or [num_experts, 2 N, K] for an activation with gates and ups; rows of
                one stride.
            sorted_token_ids: [slots] int32, contiguous: rows of out, block by block; any other number for padding.
            expert_ids: [blocks] int32, contiguous: the expert of each block of `block_size` slots.
            num_tokens_post_pad: one int32, the number of slots in use.
            topk_weights: float32, contiguous, a weight for each row of out; or None.
            a_scales: float32, contiguous, one element or one for each row of a; or, for 8-bit operands, block scales
                [num_rows / top_k, ceil(K / 128)] of any strides; or None.
            b_scales: float32, contiguous, [num_experts] or [num_experts, rows of b[e]], with further sizes of 1; or block
                scales [num_experts, ceil(rows / 128), ceil(K / 128)] of any strides; or None.
            bias: of the dtype of out, contiguous, [num_experts, rows of b[e]]; or None.
            top_k: rows of out that share a row of a.
            block_size: slots of a block, a multiple of 8; GPUs with WGMMA are fast with multiples of 64.
            activation: "none"; "silu_no_mul", "gelu_no_mul" (by the error function) or "relu2_no_mul"; "silu" or "gelu",
                ``f(gate) * up``; "swiglustep", ``min(silu(gate), 7) * clip(up, -7, 7)``. Gates are the first half of the
                rows of b[e], ups the other. Or "swigluoai", ``(clip(up, -7, 7) + 1) * g * sigmoid(1.702 g)`` with
                ``g = min(gate, 7)``, with alternating rows of gates and ups.
        """
    @staticmethod
    def new(
        a: Tensor,
        b: Tensor,
        sorted_token_ids: Tensor,
        expert_ids: Tensor,
        num_tokens_post_pad: Tensor,
        topk_weights: Tensor | None = None,
        a_scales: Tensor | None = None,
        b_scales: Tensor | None = None,
        bias: Tensor | None = None,
        top_k: int = 1,
        block_size: int = 64,
        activation: str = 'none',
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Grouped GEMM over experts: ``out[t] = f(weight[t] * (a[t // top_k] @ b[e].T + bias[e]))``.

        e is the expert of row t. Accumulation is exact for int8 and in float32 for other dtypes, with scales as
        `cutlass_scaled_mm` applies them; the epilogue is computed in float32 and rounded once. Rows that the lists do not
        name, and rows of experts that do not exist, are left unchanged.

        Args:
            a: [num_rows / top_k, K] float32, float16, bfloat16, int8 or float8; constant row stride.
            b: [num_experts, N, K] of the same dtype, or [num_experts, 2 N, K] for an activation with gates and ups; rows of
                one stride.
            sorted_token_ids: [slots] int32, contiguous: rows of out, block by block; any other number for padding.
            expert_ids: [blocks] int32, contiguous: the expert of each block of `block_size` slots.
            num_tokens_post_pad: one int32, the number of slots in use.
            topk_weights: float32, contiguous, a weight for each row of out; or None.
            a_scales: float32, contiguous, one element or one for each row of a; or, for 8-bit operands, block scales
                [num_rows / top_k, ceil(K / 128)] of any strides; or None.
            b_scales: float32, contiguous, [num_experts] or [num_experts, rows of b[e]], with further sizes of 1; or block
                scales [num_experts, ceil(rows / 128), ceil(K / 128)] of any strides; or None.
            bias: of the dtype of out, contiguous, [num_experts, rows of b[e]]; or None.
            top_k: rows of out that share a row of a.
            block_size: slots of a block, a multiple of 8; GPUs with WGMMA are fast with multiples of 64.
            activation: "none"; "silu_no_mul", "gelu_no_mul" (by the error function) or "relu2_no_mul"; "silu" or "gelu",
                ``f(gate) * up``; "swiglustep", ``min(silu(gate), 7) * clip(up, -7, 7)``. Gates are the first half of the
                rows of b[e], ups the other. Or "swigluoai", ``(clip(up, -7, 7) + 1) * g * sigmoid(1.702 g)`` with
                ``g = min(gate, 7)``, with alternating rows of gates and ups.
            out_dtype: of the output; None for the dtype of `a` if that is a float of 16 or 32 bits, else for the dtype of
                the bias, else for bfloat16.

        Returns:
            out: [num_rows, N]; float16 or bfloat16, or float32 for operands of float32. Zeros where the op
                leaves it as it is.
        """

grouped_gemm: _grouped_gemm

class _cutlass_fp4_group_mm(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        a_blockscale: Tensor,
        b_blockscales: Tensor,
        alphas: Tensor,
        problem_sizes: Tensor,
        expert_offsets: Tensor,
        sf_offsets: Tensor,
    ) -> None:
        """Grouped GEMM of NVFP4 rows with the weights of their experts: ``out[t] = alphas[e] * (A[t] @ B[e].T)``.

        A and B are the quantized values times their scales. Tensor cores apply the scales on compute capability 12.0 and
        12.1. Elsewhere A and B are dequantized to bfloat16 exactly: B in the main loop, unless experts have hundreds of
        rows or K is not a multiple of 64. Expert e has the rows ``expert_offsets[e] + i`` for i below its size. Other rows
        are left unchanged; experts must not share rows. Modelled on vLLM's op of this name.

        Args:
            out: [num_rows, N] float16 or bfloat16, written; constant row stride.
            a: [num_rows, K / 2] uint8, two e2m1 values to a byte, the first in its lower half; K a multiple of 16; constant
                row stride.
            b: [num_experts, N, K / 2] uint8, likewise.
            a_blockscale: float8_e4m3fn or uint8, contiguous, [rows, K / 16 rounded up to 4], a multiple of 128 rows: the
                scales of each expert in tiles (see `_shared/fp4_tiles.py`), as `scaled_fp4_experts_quant` writes them: none
                is negative.
            b_blockscales: likewise, [num_experts, N rounded up to 128, K / 16 rounded up to 4], in tiles for each expert.
            alphas: float32, contiguous, num_experts elements.
            problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K).
            expert_offsets: [num_experts] int32 or int64, contiguous: the first row of each expert.
            sf_offsets: [num_experts] int32, contiguous: the first row of a_blockscale of each expert, a multiple of 128.
                The scales of a row are zeros if they would lie outside a_blockscale.
        """
    @staticmethod
    def new(
        a: Tensor,
        b: Tensor,
        a_blockscale: Tensor,
        b_blockscales: Tensor,
        alphas: Tensor,
        problem_sizes: Tensor,
        expert_offsets: Tensor,
        sf_offsets: Tensor,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Grouped GEMM of NVFP4 rows with the weights of their experts: ``out[t] = alphas[e] * (A[t] @ B[e].T)``.

        A and B are the quantized values times their scales. Tensor cores apply the scales on compute capability 12.0 and
        12.1. Elsewhere A and B are dequantized to bfloat16 exactly: B in the main loop, unless experts have hundreds of
        rows or K is not a multiple of 64. Expert e has the rows ``expert_offsets[e] + i`` for i below its size. Other rows
        are left unchanged; experts must not share rows. Modelled on vLLM's op of this name.

        Args:
            a: [num_rows, K / 2] uint8, two e2m1 values to a byte, the first in its lower half; K a multiple of 16; constant
                row stride.
            b: [num_experts, N, K / 2] uint8, likewise.
            a_blockscale: float8_e4m3fn or uint8, contiguous, [rows, K / 16 rounded up to 4], a multiple of 128 rows: the
                scales of each expert in tiles (see `_shared/fp4_tiles.py`), as `scaled_fp4_experts_quant` writes them: none
                is negative.
            b_blockscales: likewise, [num_experts, N rounded up to 128, K / 16 rounded up to 4], in tiles for each expert.
            alphas: float32, contiguous, num_experts elements.
            problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K).
            expert_offsets: [num_experts] int32 or int64, contiguous: the first row of each expert.
            sf_offsets: [num_experts] int32, contiguous: the first row of a_blockscale of each expert, a multiple of 128.
                The scales of a row are zeros if they would lie outside a_blockscale.
            out_dtype: of the output; None for bfloat16.

        Returns:
            out: [num_rows, N] float16 or bfloat16. Zeros where the op leaves it as it is.
        """

cutlass_fp4_group_mm: _cutlass_fp4_group_mm

class _cutlass_mxfp4_group_mm(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        a_blockscale: Tensor,
        b_blockscales: Tensor,
        problem_sizes: Tensor,
        expert_offsets: Tensor,
        sf_offsets: Tensor,
    ) -> None:
        """Grouped GEMM of MXFP4 rows with the weights of their experts: ``out[t] = A[t] @ B[e].T``.

        As `cutlass_fp4_group_mm`, without alphas and with scales that are powers of two. Dequantized values are rounded to
        bfloat16: those of 2^128 and more become infinite, but not on tensor cores that apply the scales. Experts must not
        share rows. Modelled on vLLM's op of this name.

        Args:
            out: [num_rows, N] float16 or bfloat16, written; constant row stride.
            a: [num_rows, K / 2] uint8, two e2m1 values to a byte, the first in its lower half; K a multiple of 32; constant
                row stride.
            b: [num_experts, N, K / 2] uint8, likewise.
            a_blockscale: uint8 or float8_e8m0fnu, contiguous, [rows, K / 32 rounded up to 4], a multiple of 128 rows, in
                tiles as `mxfp4_experts_quant` writes them. A byte s is the scale ``2^(s - 127)``; 255 is NaN.
            b_blockscales: likewise, [num_experts, N rounded up to 128, K / 32 rounded up to 4], in tiles for each expert.
            problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K).
            expert_offsets: [num_experts] int32 or int64, contiguous: the first row of each expert.
            sf_offsets: [num_experts] int32, contiguous: the first row of a_blockscale of each expert, a multiple of 128.
                The scales of a row are zeros if they would lie outside a_blockscale.
        """
    @staticmethod
    def new(
        a: Tensor,
        b: Tensor,
        a_blockscale: Tensor,
        b_blockscales: Tensor,
        problem_sizes: Tensor,
        expert_offsets: Tensor,
        sf_offsets: Tensor,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Grouped GEMM of MXFP4 rows with the weights of their experts: ``out[t] = A[t] @ B[e].T``.

        As `cutlass_fp4_group_mm`, without alphas and with scales that are powers of two. Dequantized values are rounded to
        bfloat16: those of 2^128 and more become infinite, but not on tensor cores that apply the scales. Experts must not
        share rows. Modelled on vLLM's op of this name.

        Args:
            a: [num_rows, K / 2] uint8, two e2m1 values to a byte, the first in its lower half; K a multiple of 32; constant
                row stride.
            b: [num_experts, N, K / 2] uint8, likewise.
            a_blockscale: uint8 or float8_e8m0fnu, contiguous, [rows, K / 32 rounded up to 4], a multiple of 128 rows, in
                tiles as `mxfp4_experts_quant` writes them. A byte s is the scale ``2^(s - 127)``; 255 is NaN.
            b_blockscales: likewise, [num_experts, N rounded up to 128, K / 32 rounded up to 4], in tiles for each expert.
            problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K).
            expert_offsets: [num_experts] int32 or int64, contiguous: the first row of each expert.
            sf_offsets: [num_experts] int32, contiguous: the first row of a_blockscale of each expert, a multiple of 128.
                The scales of a row are zeros if they would lie outside a_blockscale.
            out_dtype: of the output; None for bfloat16.

        Returns:
            out: as in `cutlass_fp4_group_mm`. Zeros where the op leaves it as it is.
        """

cutlass_mxfp4_group_mm: _cutlass_mxfp4_group_mm

class _cutlass_mxfp8_grouped_mm(_Attributes, Protocol):
    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        sfa: Tensor,
        sfb: Tensor,
        out: Tensor,
        problem_sizes: Tensor,
        expert_offsets: Tensor,
        blockscale_offsets: Tensor,
    ) -> None:
        """Grouped GEMM of MXFP8 rows with the weights of their experts: ``out[t] = A[t] @ B[e].T``.

        As `cutlass_mxfp4_group_mm`, for e4m3 values. Experts must not share rows. Modelled on vLLM's op of
        this name.

        Args:
            a: [num_rows, K] float8_e4m3fn, K a multiple of 32; constant row stride.
            b: [num_experts, N, K] float8_e4m3fn, constant row stride; or a view of it, [num_experts, K, N].
            sfa: uint8 or float8_e8m0fnu, contiguous, [rows, K / 32 rounded up to 4], a multiple of 128 rows, in tiles as
                `mxfp8_experts_quant` writes them. A byte s is the scale ``2^(s - 127)``; 255 is NaN.
            sfb: likewise, [num_experts, N rounded up to 128, K / 32 rounded up to 4], in tiles for each expert; or a view
                of it with its last two dimensions transposed.
            out: [num_rows, N] float16 or bfloat16, written; constant row stride.
            problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K).
            expert_offsets: [num_experts] int32 or int64, contiguous: the first row of each expert.
            blockscale_offsets: as sf_offsets of `cutlass_fp4_group_mm`.
        """
    @staticmethod
    def new(
        a: Tensor,
        b: Tensor,
        sfa: Tensor,
        sfb: Tensor,
        problem_sizes: Tensor,
        expert_offsets: Tensor,
        blockscale_offsets: Tensor,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Grouped GEMM of MXFP8 rows with the weights of their experts: ``out[t] = A[t] @ B[e].T``.

        As `cutlass_mxfp4_group_mm`, for e4m3 values. Experts must not share rows. Modelled on vLLM's op of
        this name.

        Args:
            a: [num_rows, K] float8_e4m3fn, K a multiple of 32; constant row stride.
            b: [num_experts, N, K] float8_e4m3fn, constant row stride; or a view of it, [num_experts, K, N].
            sfa: uint8 or float8_e8m0fnu, contiguous, [rows, K / 32 rounded up to 4], a multiple of 128 rows, in tiles as
                `mxfp8_experts_quant` writes them. A byte s is the scale ``2^(s - 127)``; 255 is NaN.
            sfb: likewise, [num_experts, N rounded up to 128, K / 32 rounded up to 4], in tiles for each expert; or a view
                of it with its last two dimensions transposed.
            problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K).
            expert_offsets: [num_experts] int32 or int64, contiguous: the first row of each expert.
            blockscale_offsets: as sf_offsets of `cutlass_fp4_group_mm`.
            out_dtype: of the output; None for bfloat16.

        Returns:
            out: as in `cutlass_fp4_group_mm`. Zeros where the op leaves it as it is.
        """

cutlass_mxfp8_grouped_mm: _cutlass_mxfp8_grouped_mm

class _grouped_gemm_packed(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        b_scales: Tensor,
        b_zeros: Tensor | None,
        sorted_token_ids: Tensor,
        expert_ids: Tensor,
        num_tokens_post_pad: Tensor,
        topk_weights: Tensor | None = None,
        bias: Tensor | None = None,
        top_k: int = 1,
        block_size: int = 16,
        activation: str = 'none',
        b_type: str = 'uint4',
    ) -> None:
        """Grouped GEMM with quantized weights: ``out[t] = f(weight[t] * (a[t // top_k] @ w[e].T + bias[e]))``.

        ``w = scale * (quant - zero)``, rounded once to the dtype of a. e is the expert of row t; accumulation is in
        float32, the rest is as in `grouped_gemm`. For many rows per expert, or where no kernel
        fuses the dequantization, the weights are dequantized to a workspace first.

        Args:
            out: [num_rows, N], written; of the dtype of a. Constant row stride.
            a: [num_rows / top_k, K] float16 or bfloat16; constant row stride.
            b: [num_experts, rows, K * bits / 8], contiguous: int8, or uint8; rows are N, or 2 N for an activation with
                gates and ups. With 4 bits the first of two quants is in the lower half of a byte.
            b_scales: contiguous; for "uint4" and "uint8" [num_experts, rows, K / group size] of the dtype of a; for "int8"
                [num_experts, rows] float32; for "float4_e2m1f" [num_experts, rows, K / 32] exponents, uint8 or
                float8_e8m0fnu.
            b_zeros: uint8, contiguous; for "uint4" [num_experts, rows / 2, K / group size], the zero point of the first of
                two rows in the lower half; for "uint8" [num_experts, rows, K / group size]. None: all are 8 (4 bits) or 128
                (8 bits).
            sorted_token_ids: [slots] int32, contiguous: rows of out, block by block; any other number for padding.
            expert_ids: [blocks] int32, contiguous: the expert of each block of `block_size` slots.
            num_tokens_post_pad: one int32, the number of slots in use.
            topk_weights: float32, contiguous, a weight for each row of out; or None.
            bias: of the dtype of out, contiguous, [num_experts, rows of b[e]]; or None.
            top_k: rows of out that share a row of a.
            block_size: slots of a block, a multiple of 8; with weights that are dequantized first, multiples of 16 and of
                64 are faster.
            activation: "none"; "silu_no_mul", "gelu_no_mul" (by the error function) or "relu2_no_mul"; "silu" or "gelu",
                ``f(gate) * up``; "swiglustep", ``min(silu(gate), 7) * clip(up, -7, 7)``. Gates are the first half of the
                rows of b[e], ups the other. Or "swigluoai", ``(clip(up, -7, 7) + 1) * g * sigmoid(1.702 g)`` with
                ``g = min(gate, 7)``, with alternating rows of gates and ups.
            b_type: the type of the quants: "uint4", "uint8", "int8" or "float4_e2m1f".
        """
    @staticmethod
    def new(
        a: Tensor,
        b: Tensor,
        b_scales: Tensor,
        b_zeros: Tensor | None,
        sorted_token_ids: Tensor,
        expert_ids: Tensor,
        num_tokens_post_pad: Tensor,
        topk_weights: Tensor | None = None,
        bias: Tensor | None = None,
        top_k: int = 1,
        block_size: int = 16,
        activation: str = 'none',
        b_type: str = 'uint4',
    ) -> Tensor:
        """Grouped GEMM with quantized weights: ``out[t] = f(weight[t] * (a[t // top_k] @ w[e].T + bias[e]))``.

        ``w = scale * (quant - zero)``, rounded once to the dtype of a. e is the expert of row t; accumulation is in
        float32, the rest is as in `grouped_gemm`. For many rows per expert, or where no kernel
        fuses the dequantization, the weights are dequantized to a workspace first.

        Args:
            a: [num_rows / top_k, K] float16 or bfloat16; constant row stride.
            b: [num_experts, rows, K * bits / 8], contiguous: int8, or uint8; rows are N, or 2 N for an activation with
                gates and ups. With 4 bits the first of two quants is in the lower half of a byte.
            b_scales: contiguous; for "uint4" and "uint8" [num_experts, rows, K / group size] of the dtype of a; for "int8"
                [num_experts, rows] float32; for "float4_e2m1f" [num_experts, rows, K / 32] exponents, uint8 or
                float8_e8m0fnu.
            b_zeros: uint8, contiguous; for "uint4" [num_experts, rows / 2, K / group size], the zero point of the first of
                two rows in the lower half; for "uint8" [num_experts, rows, K / group size]. None: all are 8 (4 bits) or 128
                (8 bits).
            sorted_token_ids: [slots] int32, contiguous: rows of out, block by block; any other number for padding.
            expert_ids: [blocks] int32, contiguous: the expert of each block of `block_size` slots.
            num_tokens_post_pad: one int32, the number of slots in use.
            topk_weights: float32, contiguous, a weight for each row of out; or None.
            bias: of the dtype of out, contiguous, [num_experts, rows of b[e]]; or None.
            top_k: rows of out that share a row of a.
            block_size: slots of a block, a multiple of 8; with weights that are dequantized first, multiples of 16 and of
                64 are faster.
            activation: "none"; "silu_no_mul", "gelu_no_mul" (by the error function) or "relu2_no_mul"; "silu" or "gelu",
                ``f(gate) * up``; "swiglustep", ``min(silu(gate), 7) * clip(up, -7, 7)``. Gates are the first half of the
                rows of b[e], ups the other. Or "swigluoai", ``(clip(up, -7, 7) + 1) * g * sigmoid(1.702 g)`` with
                ``g = min(gate, 7)``, with alternating rows of gates and ups.
            b_type: the type of the quants: "uint4", "uint8", "int8" or "float4_e2m1f".

        Returns:
            out: [num_rows, N]; of the dtype of a. Zeros where the op leaves it as it is.
        """

grouped_gemm_packed: _grouped_gemm_packed

class _cutlass_moe_mm(_Attributes, Protocol):
    def __call__(
        self,
        out_tensors: Tensor,
        a_tensors: Tensor,
        b_tensors: Tensor,
        a_scales: Tensor,
        b_scales: Tensor,
        expert_offsets: Tensor,
        problem_sizes: Tensor,
        a_strides: Tensor | None,
        b_strides: Tensor | None,
        c_strides: Tensor | None,
        per_act_token: bool,
        per_out_ch: bool,
    ) -> None:
        """Grouped GEMM of fp8 rows and weights: ``out[t] = a_scales[t] * (b_scales[e] * (a[t] @ b[e].T))``.

        Expert e has the rows ``expert_offsets[e] + i`` for i below its size. Other rows are left unchanged; experts must
        not share rows. Accumulation is that of fp8 tensor cores (`fp8_accumulation.py`). Modelled on vLLM's
        op of this name.

        Args:
            out_tensors: [num_rows, N] float16 or bfloat16, written; constant row stride.
            a_tensors: [num_rows, K] float8_e4m3fn; constant row stride.
            b_tensors: [num_experts, N, K] of the same dtype, constant row stride; or a view of it, [num_experts, K, N].
            a_scales: float32, contiguous, one for each row if `per_act_token`; else the first of any number of elements.
            b_scales: float32, contiguous, [num_experts, 1], or [num_experts, N] if `per_out_ch`, or with a last size of 1.
            expert_offsets: [num_experts] int64 or int32, contiguous: the first row of each expert.
            problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K), or (N, rows, K).
            a_strides: [num_experts] int64; or None. They are not read: the tensors have their own
                strides.
            b_strides: [num_experts] int64; or None. They are not read: the tensors have their own
                strides.
            c_strides: [num_experts] int64; or None. They are not read: the tensors have their own
                strides.
            per_act_token: see a_scales and b_scales.
            per_out_ch: see a_scales and b_scales.
        """
    @staticmethod
    def new(
        a_tensors: Tensor,
        b_tensors: Tensor,
        a_scales: Tensor,
        b_scales: Tensor,
        expert_offsets: Tensor,
        problem_sizes: Tensor,
        a_strides: Tensor | None,
        b_strides: Tensor | None,
        c_strides: Tensor | None,
        per_act_token: bool,
        per_out_ch: bool,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Grouped GEMM of fp8 rows and weights: ``out[t] = a_scales[t] * (b_scales[e] * (a[t] @ b[e].T))``.

        Expert e has the rows ``expert_offsets[e] + i`` for i below its size. Other rows are left unchanged; experts must
        not share rows. Accumulation is that of fp8 tensor cores (`fp8_accumulation.py`). Modelled on vLLM's
        op of this name.

        Args:
            a_tensors: [num_rows, K] float8_e4m3fn; constant row stride.
            b_tensors: [num_experts, N, K] of the same dtype, constant row stride; or a view of it, [num_experts, K, N].
            a_scales: float32, contiguous, one for each row if `per_act_token`; else the first of any number of elements.
            b_scales: float32, contiguous, [num_experts, 1], or [num_experts, N] if `per_out_ch`, or with a last size of 1.
            expert_offsets: [num_experts] int64 or int32, contiguous: the first row of each expert.
            problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K), or (N, rows, K).
            a_strides: [num_experts] int64; or None. They are not read: the tensors have their own
                strides.
            b_strides: [num_experts] int64; or None. They are not read: the tensors have their own
                strides.
            c_strides: [num_experts] int64; or None. They are not read: the tensors have their own
                strides.
            per_act_token: see a_scales and b_scales.
            per_out_ch: see a_scales and b_scales.
            out_dtype: of the output; None for bfloat16.

        Returns:
            out_tensors: [num_rows, N] float16 or bfloat16. Zeros where the op leaves it as it is.
        """

cutlass_moe_mm: _cutlass_moe_mm

class _cutlass_blockwise_scaled_grouped_mm(_Attributes, Protocol):
    def __call__(
        self,
        output: Tensor,
        a: Tensor,
        b: Tensor,
        scales_a: Tensor,
        scales_b: Tensor,
        problem_sizes: Tensor,
        expert_offsets: Tensor,
    ) -> None:
        """`cutlass_moe_mm` with block scales: 128 elements of a row of a, and blocks of 128 x 128 of a weight.

        Experts must not share rows.

        Args:
            output: [num_rows, N] float16 or bfloat16, written; constant row stride.
            a: [num_rows, K] float8_e4m3fn; constant row stride.
            b: [num_experts, N, K] of the same dtype, constant row stride; or a view of it, [num_experts, K, N].
            scales_a: [num_rows, ceil(K / 128)] float32, any strides.
            scales_b: [num_experts, ceil(N / 128), ceil(K / 128)] float32, any strides.
            problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K), or (N, rows, K).
            expert_offsets: [num_experts] int32 or int64, contiguous: the first row of each expert.
        """
    @staticmethod
    def new(
        a: Tensor,
        b: Tensor,
        scales_a: Tensor,
        scales_b: Tensor,
        problem_sizes: Tensor,
        expert_offsets: Tensor,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`cutlass_moe_mm` with block scales: 128 elements of a row of a, and blocks of 128 x 128 of a weight.

        Experts must not share rows.

        Args:
            a: [num_rows, K] float8_e4m3fn; constant row stride.
            b: [num_experts, N, K] of the same dtype, constant row stride; or a view of it, [num_experts, K, N].
            scales_a: [num_rows, ceil(K / 128)] float32, any strides.
            scales_b: [num_experts, ceil(N / 128), ceil(K / 128)] float32, any strides.
            problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K), or (N, rows, K).
            expert_offsets: [num_experts] int32 or int64, contiguous: the first row of each expert.
            out_dtype: of the output; None for bfloat16.

        Returns:
            output: [num_rows, N] float16 or bfloat16. Zeros where the op leaves it as it is.
        """

cutlass_blockwise_scaled_grouped_mm: _cutlass_blockwise_scaled_grouped_mm

class _cutlass_encode_and_reorder_int4b(_Attributes, Protocol):
    def __call__(self, B: Tensor, *, out: Tensor | None = None) -> Tensor:
        """A signed 4-bit weight as `cutlass_w4a8_mm` takes it.

        Args:
            B: [K / 8, N] int32, any strides; K a multiple of 32, N of 16. Each column has consecutive quants, starting
                at the lowest bits of its first word.
            out: of the shape of B, int32, contiguous, returned; new unless given.

        Returns:
            out: of the shape of B, int32.
        """
    @staticmethod
    def new(B: Tensor, *, out: Tensor | None = None) -> Tensor:
        """A signed 4-bit weight as `cutlass_w4a8_mm` takes it.

        Args:
            B: [K / 8, N] int32, any strides; K a multiple of 32, N of 16. Each column has consecutive quants, starting
                at the lowest bits of its first word.
            out: of the shape of B, int32, contiguous, returned; new unless given.

        Returns:
            out: of the shape of B, int32.
        """

cutlass_encode_and_reorder_int4b: _cutlass_encode_and_reorder_int4b

class _cutlass_encode_and_reorder_int4b_experts(_Attributes, Protocol):
    def __call__(self, b_tensors: Tensor, *, out: Tensor | None = None) -> Tensor:
        """`cutlass_encode_and_reorder_int4b` of the weights of all experts.

        Args:
            b_tensors: [num_experts, N, K / 8] int32, contiguous; K a multiple of 32, N of 16.
            out: of the same shape, int32, contiguous, returned; new unless given.

        Returns:
            out: of the same shape, int32.
        """
    @staticmethod
    def new(b_tensors: Tensor, *, out: Tensor | None = None) -> Tensor:
        """`cutlass_encode_and_reorder_int4b` of the weights of all experts.

        Args:
            b_tensors: [num_experts, N, K / 8] int32, contiguous; K a multiple of 32, N of 16.
            out: of the same shape, int32, contiguous, returned; new unless given.

        Returns:
            out: of the same shape, int32.
        """

cutlass_encode_and_reorder_int4b_experts: _cutlass_encode_and_reorder_int4b_experts

class _cutlass_pack_scale_fp8(_Attributes, Protocol):
    def __call__(self, scales: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The products of scales with -8 ... -1, for `cutlass_w4a8_mm`: ``out[8 i + j] = e4m3((j - 8) * scales[i])``.

        Args:
            scales: [groups, N] float8_e4m3fn, contiguous.
            out: [8 * groups * N] float8_e4m3fn, contiguous, returned; new unless given.

        Returns:
            out: [8 * groups * N] float8_e4m3fn.
        """
    @staticmethod
    def new(scales: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The products of scales with -8 ... -1, for `cutlass_w4a8_mm`: ``out[8 i + j] = e4m3((j - 8) * scales[i])``.

        Args:
            scales: [groups, N] float8_e4m3fn, contiguous.
            out: [8 * groups * N] float8_e4m3fn, contiguous, returned; new unless given.

        Returns:
            out: [8 * groups * N] float8_e4m3fn.
        """

cutlass_pack_scale_fp8: _cutlass_pack_scale_fp8

class _cutlass_w4a8_mm(_Attributes, Protocol):
    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        group_scales: Tensor,
        group_size: int,
        channel_scales: Tensor,
        token_scales: Tensor,
        out_type: torch.dtype | None = None,
        maybe_schedule: str | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GEMM with a signed 4-bit weight: ``out = token_scales * (channel_scales * (A @ e4m3(quant * scale)))``.

        ``group_scales`` is a lookup table of scale * q for q = -8 ... -1; positive q use the negated entry.

        Accumulation is that of fp8 tensor cores (`fp8_accumulation.py`); the result is rounded once.

        Args:
            A: [M, K] float8_e4m3fn; constant row stride.
            B: [K / 8, N] int32, contiguous, as `cutlass_encode_and_reorder_int4b` returns it.
            group_scales: [K / group_size, N, 8] float8_e4m3fn, in any shape, contiguous, as `cutlass_pack_scale_fp8`
                returns them.
            group_size: rows under one scale; divides K.
            channel_scales: float32, contiguous, N or 1 elements
            token_scales: likewise, M or 1.
            out_type: dtype of a new out: bfloat16 or float16, with a slower accumulation (`fp8_accumulation.py`); None for
                bfloat16.
            maybe_schedule: None, or a name of for compatibility with vLLM; no effect.
            out: [M, N] bfloat16 or float16, returned; elements of a row are contiguous; new unless given.

        Returns:
            out: [M, N] bfloat16 or float16.
        """
    @staticmethod
    def new(
        A: Tensor,
        B: Tensor,
        group_scales: Tensor,
        group_size: int,
        channel_scales: Tensor,
        token_scales: Tensor,
        out_type: torch.dtype | None = None,
        maybe_schedule: str | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GEMM with a signed 4-bit weight: ``out = token_scales * (channel_scales * (A @ e4m3(quant * scale)))``.

        ``group_scales`` is a lookup table of scale * q for q = -8 ... -1; positive q use the negated entry.

        Accumulation is that of fp8 tensor cores (`fp8_accumulation.py`); the result is rounded once.

        Args:
            A: [M, K] float8_e4m3fn; constant row stride.
            B: [K / 8, N] int32, contiguous, as `cutlass_encode_and_reorder_int4b` returns it.
            group_scales: [K / group_size, N, 8] float8_e4m3fn, in any shape, contiguous, as `cutlass_pack_scale_fp8`
                returns them.
            group_size: rows under one scale; divides K.
            channel_scales: float32, contiguous, N or 1 elements
            token_scales: likewise, M or 1.
            out_type: dtype of a new out: bfloat16 or float16, with a slower accumulation (`fp8_accumulation.py`); None for
                bfloat16.
            maybe_schedule: None, or a name of for compatibility with vLLM; no effect.
            out: [M, N] bfloat16 or float16, returned; elements of a row are contiguous; new unless given.

        Returns:
            out: [M, N] bfloat16 or float16.
        """

cutlass_w4a8_mm: _cutlass_w4a8_mm

class _cutlass_w4a8_moe_mm(_Attributes, Protocol):
    def __call__(
        self,
        out_tensors: Tensor,
        a_tensors: Tensor,
        b_tensors: Tensor,
        a_scales: Tensor,
        b_scales: Tensor,
        b_group_scales: Tensor,
        b_group_size: int,
        expert_offsets: Tensor,
        problem_sizes: Tensor,
        a_strides: Tensor | None,
        b_strides: Tensor | None,
        c_strides: Tensor | None,
        group_scale_strides: Tensor | None,
        maybe_schedule: str | None = None,
    ) -> None:
        """`cutlass_w4a8_mm` of rows and the weights of their experts: a grouped GEMM.

        ``out[t] = a_scales[t] * (b_scales[e] * (a[t] @ e4m3(quant * scale)))``, e the expert of row t. The weights are
        dequantized in the main loop on compute capability 9.0, if K is a multiple of 128, N of 32 and experts have at most
        hundreds of rows. Rows are those of `cutlass_moe_mm`; experts must not share rows. Modelled
        on vLLM's op of this name.

        Args:
            out_tensors: [num_rows, N] bfloat16 or float16, written; constant row stride.
            a_tensors: [num_rows, K] float8_e4m3fn; constant row stride.
            b_tensors: [num_experts, N, K / 8] int32, contiguous, as `cutlass_encode_and_reorder_int4b_experts` returns it.
            a_scales: [num_rows, 1] float32, contiguous
            b_scales: [num_experts, N, 1], likewise.
            b_group_scales: [num_experts, K / b_group_size, N, 8] float8_e4m3fn, in any shape, contiguous, as
                `cutlass_pack_scale_fp8` returns them.
            b_group_size: elements of K under one scale; divides K.
            expert_offsets: [num_experts] int64 or int32, contiguous: the first row of each expert.
            problem_sizes: [num_experts, 3] int32, contiguous: (N, rows, K), or (rows, N, K).
            a_strides: [num_experts] int64
            b_strides: [num_experts, ...]; or None. They are
                not read: the tensors have their own strides.
            c_strides: [num_experts] int64
            group_scale_strides: [num_experts, ...]; or None. They are
                not read: the tensors have their own strides.
            maybe_schedule: for compatibility with vLLM; no effect.
        """
    @staticmethod
    def new(
        a_tensors: Tensor,
        b_tensors: Tensor,
        a_scales: Tensor,
        b_scales: Tensor,
        b_group_scales: Tensor,
        b_group_size: int,
        expert_offsets: Tensor,
        problem_sizes: Tensor,
        a_strides: Tensor | None,
        b_strides: Tensor | None,
        c_strides: Tensor | None,
        group_scale_strides: Tensor | None,
        maybe_schedule: str | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`cutlass_w4a8_mm` of rows and the weights of their experts: a grouped GEMM.

        ``out[t] = a_scales[t] * (b_scales[e] * (a[t] @ e4m3(quant * scale)))``, e the expert of row t. The weights are
        dequantized in the main loop on compute capability 9.0, if K is a multiple of 128, N of 32 and experts have at most
        hundreds of rows. Rows are those of `cutlass_moe_mm`; experts must not share rows. Modelled
        on vLLM's op of this name.

        Args:
            a_tensors: [num_rows, K] float8_e4m3fn; constant row stride.
            b_tensors: [num_experts, N, K / 8] int32, contiguous, as `cutlass_encode_and_reorder_int4b_experts` returns it.
            a_scales: [num_rows, 1] float32, contiguous
            b_scales: [num_experts, N, 1], likewise.
            b_group_scales: [num_experts, K / b_group_size, N, 8] float8_e4m3fn, in any shape, contiguous, as
                `cutlass_pack_scale_fp8` returns them.
            b_group_size: elements of K under one scale; divides K.
            expert_offsets: [num_experts] int64 or int32, contiguous: the first row of each expert.
            problem_sizes: [num_experts, 3] int32, contiguous: (N, rows, K), or (rows, N, K).
            a_strides: [num_experts] int64
            b_strides: [num_experts, ...]; or None. They are
                not read: the tensors have their own strides.
            c_strides: [num_experts] int64
            group_scale_strides: [num_experts, ...]; or None. They are
                not read: the tensors have their own strides.
            maybe_schedule: for compatibility with vLLM; no effect.
            out_dtype: of the output; None for bfloat16.

        Returns:
            out_tensors: [num_rows, N] bfloat16 or float16. Zeros where the op leaves it as it is.
        """

cutlass_w4a8_moe_mm: _cutlass_w4a8_moe_mm

class _moe_wna16_gemm(_Attributes, Protocol):
    def __call__(
        self,
        input: Tensor,
        output: Tensor,
        b_qweight: Tensor,
        b_scales: Tensor,
        b_qzeros: Tensor | None,
        topk_weights: Tensor | None,
        sorted_token_ids: Tensor,
        experts_ids: Tensor,
        num_tokens_post_pad: Tensor,
        top_k: int,
        BLOCK_SIZE_M: int,
        BLOCK_SIZE_N: int,
        BLOCK_SIZE_K: int,
        bit: int,
    ) -> None:
        """Grouped GEMM with 4- or 8-bit weights: ``output[t] = weight[t] * (input[t // top_k] @ W[e].T)``.

        e is the expert of row t. ``W = (quant - zero) * scale``, rounded to the dtype of input; as in
        `grouped_gemm_packed`. Rows that the lists do not name, and rows of experts that do not exist, become 0. Modelled on
        vLLM's op of this name.

        Args:
            input: [num_tokens, K] float16 or bfloat16; constant row stride.
            output: [..., N] of the same dtype, num_tokens * top_k constant row stride, written.
            b_qweight: [num_experts, N, K * bit / 8] uint8, contiguous; with 4 bits the first of two quants is in the lower
                half of a byte.
            b_scales: [num_experts, N, K / group size] of the dtype of input, contiguous.
            b_qzeros: uint8, contiguous; with 4 bits [num_experts, N / 2, K / group size], the zero point of the first of
                two rows in the lower half; with 8 bits [num_experts, N, K / group size]. None: all are 8 (4 bits) or 128 (8
                bits).
            topk_weights: float32, contiguous, a weight for each row of output; or None.
            sorted_token_ids: one dimension, int32, contiguous, written; capacity for the rows of any distribution:
                ``num_tokens * topk + min(num_experts, num_tokens * topk) * (block_size - 1)`` elements, rounded down to a
                multiple of block_size, are enough. writes them for blocks of
                BLOCK_SIZE_M.
            experts_ids: one dimension, int32, contiguous, written: the expert of each block of `block_size` elements of
                sorted_token_ids, -1 after the last; at least one element for each block. writes them for blocks of
                BLOCK_SIZE_M.
            num_tokens_post_pad: one int32, written: elements used by rows and their padding, a multiple of block_size. writes them for blocks of
                BLOCK_SIZE_M.
            top_k: rows of output that share a row of input.
            BLOCK_SIZE_M: slots of a block, any number; multiples of 16 need no second lists.
            BLOCK_SIZE_N: tiles of vLLM's kernel; not used.
            BLOCK_SIZE_K: tiles of vLLM's kernel; not used.
            bit: bits of a quant, 4 or 8.
        """
    @staticmethod
    def new(
        input: Tensor,
        b_qweight: Tensor,
        b_scales: Tensor,
        b_qzeros: Tensor | None,
        topk_weights: Tensor | None,
        sorted_token_ids: Tensor,
        experts_ids: Tensor,
        num_tokens_post_pad: Tensor,
        top_k: int,
        BLOCK_SIZE_M: int,
        BLOCK_SIZE_N: int,
        BLOCK_SIZE_K: int,
        bit: int,
    ) -> Tensor:
        """Grouped GEMM with 4- or 8-bit weights: ``output[t] = weight[t] * (input[t // top_k] @ W[e].T)``.

        e is the expert of row t. ``W = (quant - zero) * scale``, rounded to the dtype of input; as in
        `grouped_gemm_packed`. Rows that the lists do not name, and rows of experts that do not exist, become 0. Modelled on
        vLLM's op of this name.

        Args:
            input: [num_tokens, K] float16 or bfloat16; constant row stride.
            b_qweight: [num_experts, N, K * bit / 8] uint8, contiguous; with 4 bits the first of two quants is in the lower
                half of a byte.
            b_scales: [num_experts, N, K / group size] of the dtype of input, contiguous.
            b_qzeros: uint8, contiguous; with 4 bits [num_experts, N / 2, K / group size], the zero point of the first of
                two rows in the lower half; with 8 bits [num_experts, N, K / group size]. None: all are 8 (4 bits) or 128 (8
                bits).
            topk_weights: float32, contiguous, a weight for each row of output; or None.
            sorted_token_ids: one dimension, int32, contiguous, written; capacity for the rows of any distribution:
                ``num_tokens * topk + min(num_experts, num_tokens * topk) * (block_size - 1)`` elements, rounded down to a
                multiple of block_size, are enough. writes them for blocks of
                BLOCK_SIZE_M.
            experts_ids: one dimension, int32, contiguous, written: the expert of each block of `block_size` elements of
                sorted_token_ids, -1 after the last; at least one element for each block. writes them for blocks of
                BLOCK_SIZE_M.
            num_tokens_post_pad: one int32, written: elements used by rows and their padding, a multiple of block_size. writes them for blocks of
                BLOCK_SIZE_M.
            top_k: rows of output that share a row of input.
            BLOCK_SIZE_M: slots of a block, any number; multiples of 16 need no second lists.
            BLOCK_SIZE_N: tiles of vLLM's kernel; not used.
            BLOCK_SIZE_K: tiles of vLLM's kernel; not used.
            bit: bits of a quant, 4 or 8.

        Returns:
            output: [num_tokens * top_k, N] of the same dtype.
        """

moe_wna16_gemm: _moe_wna16_gemm

class _lora_shrink(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        x: Tensor,
        lora_a: Tensor,
        indices: Tensor,
        scale: float = 1.0,
        lora_a1: Tensor | None = None,
        lora_a2: Tensor | None = None,
        lora_a3: Tensor | None = None,
        order: Tensor | None = None,
        num_tokens_per_lora: Tensor | None = None,
    ) -> None:
        """The first product of LoRA: ``out[s, t] = scale * lora_a[indices[t]] @ x[t]``, summed in float32.

        A layer has a slice s for queries, keys and values, or for gates and ups. Each token has its adapter. A token
        without one has an index outside of the adapters, such as -1, and gets zeros. The contract is that of vLLM's
        `lora_shrink`.

        Args:
            out: [num_slices, num_tokens, rank], written; the dtype of `lora_a` or float32; the last stride is 1.
            x: [num_tokens, hidden_size], the dtype of `lora_a`, or float32, which is rounded to that of `lora_a`; the last
                stride is 1.
            lora_a: [num_loras, rank, hidden_size], float32, float16 or bfloat16; contiguous. The first slice.
            indices: [num_tokens] int32 or int64, contiguous; the adapter of each token.
            scale: multiplied in float32.
            lora_a1: further slices, like `lora_a`.
            lora_a2: further slices, like `lora_a`.
            lora_a3: further slices, like `lora_a`.
            order: [num_tokens], the dtype of `indices`; the first tokens, each once, sorted by adapter, as many as
                `num_tokens_per_lora` counts: tiles of tokens with few adapters are faster. The other tokens, padding, have
                no adapter, whatever their index. A token out of range is skipped; the rows of a missing one may stay.
            num_tokens_per_lora: the dtype of `indices`, contiguous; the numbers add up to the tokens in `order`.
        """
    @staticmethod
    def new(
        x: Tensor,
        lora_a: Tensor,
        indices: Tensor,
        scale: float = 1.0,
        lora_a1: Tensor | None = None,
        lora_a2: Tensor | None = None,
        lora_a3: Tensor | None = None,
        order: Tensor | None = None,
        num_tokens_per_lora: Tensor | None = None,
    ) -> Tensor:
        """The first product of LoRA: ``out[s, t] = scale * lora_a[indices[t]] @ x[t]``, summed in float32.

        A layer has a slice s for queries, keys and values, or for gates and ups. Each token has its adapter. A token
        without one has an index outside of the adapters, such as -1, and gets zeros. The contract is that of vLLM's
        `lora_shrink`.

        Args:
            x: [num_tokens, hidden_size], the dtype of `lora_a`, or float32, which is rounded to that of `lora_a`; the last
                stride is 1.
            lora_a: [num_loras, rank, hidden_size], float32, float16 or bfloat16; contiguous. The first slice.
            indices: [num_tokens] int32 or int64, contiguous; the adapter of each token.
            scale: multiplied in float32.
            lora_a1: further slices, like `lora_a`.
            lora_a2: further slices, like `lora_a`.
            lora_a3: further slices, like `lora_a`.
            order: [num_tokens], the dtype of `indices`; the first tokens, each once, sorted by adapter, as many as
                `num_tokens_per_lora` counts: tiles of tokens with few adapters are faster. The other tokens, padding, have
                no adapter, whatever their index. A token out of range is skipped; the rows of a missing one may stay.
            num_tokens_per_lora: the dtype of `indices`, contiguous; the numbers add up to the tokens in `order`.

        Returns:
            out: [num_slices, num_tokens, rank]; the dtype of `lora_a` or float32.
        """

lora_shrink: _lora_shrink

class _lora_expand(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        x: Tensor,
        lora_b: Tensor,
        indices: Tensor,
        add_inputs: bool = True,
        lora_b1: Tensor | None = None,
        lora_b2: Tensor | None = None,
        lora_b3: Tensor | None = None,
        order: Tensor | None = None,
        num_tokens_per_lora: Tensor | None = None,
    ) -> None:
        """The second product of LoRA: ``out[t] += lora_b[indices[t]] @ x[s, t]``, summed in float32 and rounded once.

        Each slice s of a layer has columns of `out` of its own. Each token has its adapter. The row of a token without one,
        with an index outside of the adapters such as -1, stays as it is. The contract is that of vLLM's `lora_expand`;
        `out` may be a view of columns of a larger tensor, where vLLM takes an offset.

        Args:
            out: [num_tokens, output_size], updated; the dtype of `lora_b` or float32; the last stride is 1. The columns of
                the slices follow each other.
            x: [num_slices, num_tokens, rank], the dtype of `lora_b`, or float32, which is rounded to that of `lora_b`; the
                last stride is 1.
            lora_b: [num_loras, columns of the slice, rank], float32, float16 or bfloat16; contiguous. The first slice.
            indices: [num_tokens] int32 or int64, contiguous; the adapter of each token.
            add_inputs: add to `out`; otherwise overwrite the rows of tokens with an adapter.
            lora_b1: further slices, with columns of their own.
            lora_b2: further slices, with columns of their own.
            lora_b3: further slices, with columns of their own.
            order: see `lora_shrink`.
            num_tokens_per_lora: see `lora_shrink`.
        """

lora_expand: _lora_expand

class _fused_moe_lora_shrink(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        x: Tensor,
        lora_a: Tensor,
        expert_ids: Tensor,
        adapter_enabled: Tensor,
        token_lora_mapping: Tensor | None = None,
        sorted_token_ids: Tensor | None = None,
        num_tokens_post_padded: Tensor | None = None,
        lora_ids: Tensor | None = None,
        block_size: int = 0,
        lora_a1: Tensor | None = None,
        lora_a2: Tensor | None = None,
        lora_a3: Tensor | None = None,
    ) -> None:
        """The first product of LoRA for experts: ``out[s, t, k] = lora_a[l, e] @ x[t, k]``, summed in float32.

        Choice k of token t is the pair t * top_k + k; e is its expert, and l the adapter of its token. A layer has a slice
        s for gates and ups. The row of a pair without an adapter stays as it is. The contract is that of the first half of
        vLLM's `fused_moe_lora`.

        Pairs come in one of two forms. Without `sorted_token_ids`, each pair has its expert in `expert_ids`, and each token
        its adapter in `token_lora_mapping`. With it, each adapter has a list of its pairs in blocks of one expert, as
        `moe_lora_align_block_size` makes it. An adapter outside of 0 to max_loras - 1, one that is not enabled, and an
        expert outside of 0 to num_experts - 1, such as -1, are none.

        Args:
            out: [num_slices, num_tokens, top_k, rank], written in part; the dtype of `lora_a` or float32; the last stride
                is 1, and pairs follow each other.
            x: [num_tokens, top_k, hidden_size], or [num_tokens, 1, hidden_size] for one row that all choices of a token
                share; the dtype of `lora_a`, or float32, which is rounded to that of `lora_a`; strides as for `out`.
            lora_a: [max_loras, num_experts, rank, hidden_size], float32, float16 or bfloat16; contiguous. The first slice.
                One expert stands for any number that share the adapter.
            expert_ids: int32 or int64, contiguous; [num_tokens * top_k], or the expert of each block of the lists,
                [max_loras, num_blocks].
            adapter_enabled: [max_loras or more] int32, contiguous; 0 for an adapter without weights for experts.
            token_lora_mapping: [num_tokens or more] int32, contiguous; required without `sorted_token_ids`, else not read.
            sorted_token_ids: [max_loras, num_slots] int32, contiguous: pairs, each once; numbers that are no pair are
                padding.
            num_tokens_post_padded: [max_loras] int32, contiguous: the slots of each list that are in use.
            lora_ids: [any] int32, contiguous: the adapters in use. The list of an adapter that is not named is not read.
            block_size: slots of a block of the lists.
            lora_a1: further slices, like `lora_a`.
            lora_a2: further slices, like `lora_a`.
            lora_a3: further slices, like `lora_a`.
        """
    @staticmethod
    def new(
        x: Tensor,
        lora_a: Tensor,
        expert_ids: Tensor,
        adapter_enabled: Tensor,
        token_lora_mapping: Tensor | None = None,
        sorted_token_ids: Tensor | None = None,
        num_tokens_post_padded: Tensor | None = None,
        lora_ids: Tensor | None = None,
        block_size: int = 0,
        lora_a1: Tensor | None = None,
        lora_a2: Tensor | None = None,
        lora_a3: Tensor | None = None,
        *,
        top_k: int | None,
    ) -> Tensor:
        """The first product of LoRA for experts: ``out[s, t, k] = lora_a[l, e] @ x[t, k]``, summed in float32.

        Choice k of token t is the pair t * top_k + k; e is its expert, and l the adapter of its token. A layer has a slice
        s for gates and ups. The row of a pair without an adapter stays as it is. The contract is that of the first half of
        vLLM's `fused_moe_lora`.

        Pairs come in one of two forms. Without `sorted_token_ids`, each pair has its expert in `expert_ids`, and each token
        its adapter in `token_lora_mapping`. With it, each adapter has a list of its pairs in blocks of one expert, as
        `moe_lora_align_block_size` makes it. An adapter outside of 0 to max_loras - 1, one that is not enabled, and an
        expert outside of 0 to num_experts - 1, such as -1, are none.

        Args:
            x: [num_tokens, top_k, hidden_size], or [num_tokens, 1, hidden_size] for one row that all choices of a token
                share; the dtype of `lora_a`, or float32, which is rounded to that of `lora_a`; strides as for `out`.
            lora_a: [max_loras, num_experts, rank, hidden_size], float32, float16 or bfloat16; contiguous. The first slice.
                One expert stands for any number that share the adapter.
            expert_ids: int32 or int64, contiguous; [num_tokens * top_k], or the expert of each block of the lists,
                [max_loras, num_blocks].
            adapter_enabled: [max_loras or more] int32, contiguous; 0 for an adapter without weights for experts.
            token_lora_mapping: [num_tokens or more] int32, contiguous; required without `sorted_token_ids`, else not read.
            sorted_token_ids: [max_loras, num_slots] int32, contiguous: pairs, each once; numbers that are no pair are
                padding.
            num_tokens_post_padded: [max_loras] int32, contiguous: the slots of each list that are in use.
            lora_ids: [any] int32, contiguous: the adapters in use. The list of an adapter that is not named is not read.
            block_size: slots of a block of the lists.
            lora_a1: further slices, like `lora_a`.
            lora_a2: further slices, like `lora_a`.
            lora_a3: further slices, like `lora_a`.
            top_k: choices of a token. Without it, as many as `expert_ids` has for each, or those of `x` if there are lists.

        Returns:
            out: [num_slices, num_tokens, top_k, rank], written in part; the dtype of `lora_a` or float32;
                the last stride is 1, and pairs follow each other. Zeros where the op leaves it as it is.
        """

fused_moe_lora_shrink: _fused_moe_lora_shrink

class _fused_moe_lora_expand(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        x: Tensor,
        lora_b: Tensor,
        expert_ids: Tensor,
        adapter_enabled: Tensor,
        token_lora_mapping: Tensor | None = None,
        sorted_token_ids: Tensor | None = None,
        num_tokens_post_padded: Tensor | None = None,
        lora_ids: Tensor | None = None,
        block_size: int = 0,
        topk_weights: Tensor | None = None,
        add_inputs: bool = True,
        lora_b1: Tensor | None = None,
        lora_b2: Tensor | None = None,
        lora_b3: Tensor | None = None,
    ) -> None:
        """The second product of LoRA for experts: ``out[t, k] += topk_weights[t, k] * lora_b[l, e] @ x[s, t, k]``.

        Choice k of token t is the pair t * top_k + k; e is its expert, and l the adapter of its token. Each slice s of a
        layer has columns of `out` of its own. The row of a pair without an adapter stays as it is. Products are summed in
        float32, and a result is rounded once. The contract is that of the second half of vLLM's `fused_moe_lora`; `out` may
        be a view of columns of a larger tensor, where vLLM takes an offset.

        Args:
            out: [num_tokens, top_k, output_size], updated; the dtype of `lora_b` or float32; the last stride is 1, and
                pairs follow each other, as do the columns of the slices.
            x: [num_slices, num_tokens, top_k, rank], the dtype of `lora_b`, or float32, which is rounded to that of
                `lora_b`; strides as for `out`.
            lora_b: [max_loras, num_experts, columns of the slice, rank], float32, float16 or bfloat16; contiguous. The
                first slice. One expert stands for any number that share the adapter.
            expert_ids: see `fused_moe_lora_shrink`.
            adapter_enabled: see `fused_moe_lora_shrink`.
            token_lora_mapping: see `fused_moe_lora_shrink`.
            sorted_token_ids: see there.
            num_tokens_post_padded: see there.
            lora_ids: see there.
            block_size: see there.
            topk_weights: [num_tokens, top_k], float32, float16 or bfloat16, contiguous: a factor of each pair.
            add_inputs: add to `out`; otherwise overwrite the rows of pairs with an adapter.
            lora_b1: further slices, with columns of their own.
            lora_b2: further slices, with columns of their own.
            lora_b3: further slices, with columns of their own.
        """

fused_moe_lora_expand: _fused_moe_lora_expand

class _machete_prepack_B(_Attributes, Protocol):
    def __call__(
        self,
        B: Tensor,
        a_type: torch.dtype | None,
        b_type: int,
        group_scales_type: torch.dtype | None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GPTQ weight in Marlin's tiles and in its own shape, as `machete_mm` takes it.

        Args:
            B: [K * bits / 32, N] int32, any strides; K a multiple of 16, N of 64. Each column has consecutive quants,
                starting at the lowest bit of its first word.
            a_type: dtype of the activations, float16 or bfloat16; None for either.
            b_type: type of the quants, a number of vLLM's scalar types (`pyops.SCALAR_TYPES`): uint4b8, uint8b128, uint4 or
                uint8.
            group_scales_type: dtype of the scales, as `a_type`.
            out: of the shape of B, int32, contiguous, returned; new unless given.

        Returns:
            out: of the shape of B, int32.
        """
    @staticmethod
    def new(
        B: Tensor,
        a_type: torch.dtype | None,
        b_type: int,
        group_scales_type: torch.dtype | None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GPTQ weight in Marlin's tiles and in its own shape, as `machete_mm` takes it.

        Args:
            B: [K * bits / 32, N] int32, any strides; K a multiple of 16, N of 64. Each column has consecutive quants,
                starting at the lowest bit of its first word.
            a_type: dtype of the activations, float16 or bfloat16; None for either.
            b_type: type of the quants, a number of vLLM's scalar types (`pyops.SCALAR_TYPES`): uint4b8, uint8b128, uint4 or
                uint8.
            group_scales_type: dtype of the scales, as `a_type`.
            out: of the shape of B, int32, contiguous, returned; new unless given.

        Returns:
            out: of the shape of B, int32.
        """

machete_prepack_B: _machete_prepack_B

class _machete_mm(_Attributes, Protocol):
    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        b_type: int,
        out_type: torch.dtype | None = None,
        group_scales: Tensor | None = None,
        group_zeros: Tensor | None = None,
        group_size: int | None = None,
        channel_scales: Tensor | None = None,
        token_scales: Tensor | None = None,
        schedule: str | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GEMM with a weight of `machete_prepack_B`: ``out = A @ (quant * scale + zero)``.

        Weights may be rounded to the dtype of A, unless a column has one scale and no zero; then the epilogue applies the
        scale. Accumulation is in float32; the result is rounded once.

        Args:
            A: [M, K] float16 or bfloat16; constant row stride.
            B: [K * bits / 32, N] int32, contiguous, as `machete_prepack_B` returns it.
            b_type: type of the quants, a number of vLLM's scalar types (`pyops.SCALAR_TYPES`): uint4b8 or uint8b128 without
                group_zeros, uint4 or uint8 with them.
            out_type: None or the dtype of A.
            group_scales: [ceil(K / group_size), N] of the dtype of A, contiguous.
            group_zeros: the same, added to the scaled quants: minus the zero point, times the scale.
            group_size: rows under one scale; None or -1 for K.
            channel_scales: None.
            token_scales: None.
            schedule: None, or one of `machete_supported_schedules`; it has no effect.
            out: [M, N] of the dtype of A, returned; elements of a row are contiguous; new unless given.

        Returns:
            out: [M, N] of the dtype of A.
        """
    @staticmethod
    def new(
        A: Tensor,
        B: Tensor,
        b_type: int,
        out_type: torch.dtype | None = None,
        group_scales: Tensor | None = None,
        group_zeros: Tensor | None = None,
        group_size: int | None = None,
        channel_scales: Tensor | None = None,
        token_scales: Tensor | None = None,
        schedule: str | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GEMM with a weight of `machete_prepack_B`: ``out = A @ (quant * scale + zero)``.

        Weights may be rounded to the dtype of A, unless a column has one scale and no zero; then the epilogue applies the
        scale. Accumulation is in float32; the result is rounded once.

        Args:
            A: [M, K] float16 or bfloat16; constant row stride.
            B: [K * bits / 32, N] int32, contiguous, as `machete_prepack_B` returns it.
            b_type: type of the quants, a number of vLLM's scalar types (`pyops.SCALAR_TYPES`): uint4b8 or uint8b128 without
                group_zeros, uint4 or uint8 with them.
            out_type: None or the dtype of A.
            group_scales: [ceil(K / group_size), N] of the dtype of A, contiguous.
            group_zeros: the same, added to the scaled quants: minus the zero point, times the scale.
            group_size: rows under one scale; None or -1 for K.
            channel_scales: None.
            token_scales: None.
            schedule: None, or one of `machete_supported_schedules`; it has no effect.
            out: [M, N] of the dtype of A, returned; elements of a row are contiguous; new unless given.

        Returns:
            out: [M, N] of the dtype of A.
        """

machete_mm: _machete_mm

class _gptq_marlin_24_gemm(_Attributes, Protocol):
    def __call__(
        self,
        a: Tensor,
        b_q_weight: Tensor,
        b_meta: Tensor,
        b_scales: Tensor,
        workspace: Tensor | None,
        b_q_type: int,
        size_m: int,
        size_n: int,
        size_k: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GEMM with a 2:4 sparse weight, two of four rows stored: ``out = a @ (quant * scale)``.

        Weights may be rounded to the dtype of a, unless a column has one scale; then the epilogue applies it. Accumulation
        is in float32; the result is rounded once. `_shared/packed_layouts.py` has the layout of the stored rows
        (marlin_24). If b_meta has the same position for both rows of a group of four, the second row counts.

        Args:
            a: [M, K] float16 or bfloat16; constant row stride.
            b_q_weight: [K / 32, N * bits / 2] int32, contiguous; K a multiple of 32, N of 64.
            b_meta: [K / 32, 2 N] int16, contiguous: four bits for a group of four rows, the positions of its two stored
                rows.
            b_scales: [num_groups, N] of the dtype of a, contiguous; num_groups divides K. With several groups, columns are
                permuted.
            workspace: for compatibility with vLLM; no effect.
            b_q_type: uint4b8 or uint8b128, a number of vLLM's scalar types (`pyops.SCALAR_TYPES`).
            size_m: M, N, K.
            size_n: M, N, K.
            size_k: M, N, K.
            out: [M, N] of the dtype of a, returned; elements of a row are contiguous; new unless given.

        Returns:
            out: [M, N] of the dtype of a.
        """
    @staticmethod
    def new(
        a: Tensor,
        b_q_weight: Tensor,
        b_meta: Tensor,
        b_scales: Tensor,
        workspace: Tensor | None,
        b_q_type: int,
        size_m: int,
        size_n: int,
        size_k: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GEMM with a 2:4 sparse weight, two of four rows stored: ``out = a @ (quant * scale)``.

        Weights may be rounded to the dtype of a, unless a column has one scale; then the epilogue applies it. Accumulation
        is in float32; the result is rounded once. `_shared/packed_layouts.py` has the layout of the stored rows
        (marlin_24). If b_meta has the same position for both rows of a group of four, the second row counts.

        Args:
            a: [M, K] float16 or bfloat16; constant row stride.
            b_q_weight: [K / 32, N * bits / 2] int32, contiguous; K a multiple of 32, N of 64.
            b_meta: [K / 32, 2 N] int16, contiguous: four bits for a group of four rows, the positions of its two stored
                rows.
            b_scales: [num_groups, N] of the dtype of a, contiguous; num_groups divides K. With several groups, columns are
                permuted.
            workspace: for compatibility with vLLM; no effect.
            b_q_type: uint4b8 or uint8b128, a number of vLLM's scalar types (`pyops.SCALAR_TYPES`).
            size_m: M, N, K.
            size_n: M, N, K.
            size_k: M, N, K.
            out: [M, N] of the dtype of a, returned; elements of a row are contiguous; new unless given.

        Returns:
            out: [M, N] of the dtype of a.
        """

gptq_marlin_24_gemm: _gptq_marlin_24_gemm

class _marlin_gemm(_Attributes, Protocol):
    def __call__(
        self,
        a: Tensor,
        b_q_weight: Tensor,
        b_bias: Tensor | None,
        b_scales: Tensor,
        a_scales: Tensor | None,
        global_scale: Tensor | None,
        b_zeros: Tensor | None,
        g_idx: Tensor | None,
        perm: Tensor | None,
        workspace: Tensor | None,
        b_type_id: int,
        size_m: int,
        size_n: int,
        size_k: int,
        is_k_full: bool = True,
        use_atomic_add: bool = False,
        use_fp32_reduce: bool = False,
        is_zp_float: bool = False,
        *,
        c: Tensor | None = None,
    ) -> Tensor:
        """A GEMM with a weight in Marlin's layout: ``c = a_scales * global_scale * (a @ w) + b_bias``.

        ``w = (quant - zero) * scale``. Accumulation is in float32, and exact for integers with one scale per column, which
        the epilogue applies; else w may be rounded to 16 bits, the dtype of c. The result is rounded once. The layout of
        quants is that of `gptq_marlin_repack` and `awq_marlin_repack` (Frantar et al. 2024, arXiv:2408.11743), for
        activations of 16 or 8 bits; columns of scales, zero points and bias are permuted (`_shared/packed_layouts.py`):

        ============ ============== =========================================== ======================================
        activations  quants         scales [num_groups, N]                      zero points
        ============ ============== =========================================== ======================================
        16 bits      uint4b8,       dtype of a                                  none
                     uint8b128
        16 bits      uint4, uint8   dtype of a                                  [num_groups, N bits / 32] int32, or
                                                                                floats as scales with is_zp_float
        16 bits      e4m3           dtype of a, times 2^8 (float16), 2^120;     none
                                    or e8m0
        16 bits      e2m1           e4m3: the upper bits of float16 of 2^7      none
                                    scale, under a global_scale of the dtype of
                                    a or float32, times 2^7 (float16), 2^119
                                    (bfloat16); or e8m0
        int8         uint4b8,       float16 or bfloat16; of several groups      none; [num_groups, N / 8] int32
                     uint8b128,     integers in their bits
                     uint4
        e4m3         uint4b8, uint4 float16 or bfloat16, times 2^9; quants are  none; [num_groups, N / 8] int32
                                    those of `marlin_int4_fp8_preprocess`
        e4m3         e2m1           e8m0, times 2^6                             none
        ============ ============== =========================================== ======================================

        An e4m3 weight that is NaN, which no checkpoint has, counts as 480 with its sign.

        Args:
            a: [M, K] float16, bfloat16, int8 or float8_e4m3fn; constant row stride.
            b_q_weight: [K / 16, N * bits / 2] int32, contiguous; K a multiple of 16, or of 32 with 8-bit activations; N a
                multiple of 64.
            b_bias: of the dtype of c, contiguous, N elements, permuted; or None.
            b_scales: see above, contiguous; num_groups divides K.
            a_scales: float32, contiguous, M or 1 elements, with 8-bit activations; else None.
            global_scale: one element, where scales are e4m3; else None.
            b_zeros: see above, contiguous; empty or None without zero points.
            g_idx: [K] int32, contiguous; both empty or None, or both given: row k of the weight multiplies column
                ``perm[k]`` of a, and its group is ``g_idx[k]`` unless is_k_full. An index out of range counts as zeros.
            perm: [K] int32, contiguous; both empty or None, or both given: row k of the weight multiplies column
                ``perm[k]`` of a, and its group is ``g_idx[k]`` unless is_k_full. An index out of range counts as zeros.
            workspace: for compatibility with vLLM; no effect.
            b_type_id: the type of the quants, a number of vLLM's scalar types: `pyops.SCALAR_TYPES` has them by name.
            size_m: M, N, K.
            size_n: M, N, K.
            size_k: M, N, K.
            is_k_full: groups are consecutive; otherwise the weight is a shard, and g_idx has the groups of its rows.
            use_atomic_add: for compatibility with vLLM; no effect.
            use_fp32_reduce: for compatibility with vLLM; no effect.
            is_zp_float: zero points are floats.
            c: [M, N], returned; elements of a row are contiguous; new unless given. Its dtype is that of a; with 8-bit
                activations that of b_scales; with e8m0 scales either 16-bit float, by default bfloat16.

        Returns:
            c: [M, N]. Its dtype is that of a; with 8-bit activations that of b_scales; with e8m0 scales
                either 16-bit float, by default bfloat16.
        """
    @staticmethod
    def new(
        a: Tensor,
        b_q_weight: Tensor,
        b_bias: Tensor | None,
        b_scales: Tensor,
        a_scales: Tensor | None,
        global_scale: Tensor | None,
        b_zeros: Tensor | None,
        g_idx: Tensor | None,
        perm: Tensor | None,
        workspace: Tensor | None,
        b_type_id: int,
        size_m: int,
        size_n: int,
        size_k: int,
        is_k_full: bool = True,
        use_atomic_add: bool = False,
        use_fp32_reduce: bool = False,
        is_zp_float: bool = False,
        *,
        c: Tensor | None = None,
    ) -> Tensor:
        """A GEMM with a weight in Marlin's layout: ``c = a_scales * global_scale * (a @ w) + b_bias``.

        ``w = (quant - zero) * scale``. Accumulation is in float32, and exact for integers with one scale per column, which
        the epilogue applies; else w may be rounded to 16 bits, the dtype of c. The result is rounded once. The layout of
        quants is that of `gptq_marlin_repack` and `awq_marlin_repack` (Frantar et al. 2024, arXiv:2408.11743), for
        activations of 16 or 8 bits; columns of scales, zero points and bias are permuted (`_shared/packed_layouts.py`):

        ============ ============== =========================================== ======================================
        activations  quants         scales [num_groups, N]                      zero points
        ============ ============== =========================================== ======================================
        16 bits      uint4b8,       dtype of a                                  none
                     uint8b128
        16 bits      uint4, uint8   dtype of a                                  [num_groups, N bits / 32] int32, or
                                                                                floats as scales with is_zp_float
        16 bits      e4m3           dtype of a, times 2^8 (float16), 2^120;     none
                                    or e8m0
        16 bits      e2m1           e4m3: the upper bits of float16 of 2^7      none
                                    scale, under a global_scale of the dtype of
                                    a or float32, times 2^7 (float16), 2^119
                                    (bfloat16); or e8m0
        int8         uint4b8,       float16 or bfloat16; of several groups      none; [num_groups, N / 8] int32
                     uint8b128,     integers in their bits
                     uint4
        e4m3         uint4b8, uint4 float16 or bfloat16, times 2^9; quants are  none; [num_groups, N / 8] int32
                                    those of `marlin_int4_fp8_preprocess`
        e4m3         e2m1           e8m0, times 2^6                             none
        ============ ============== =========================================== ======================================

        An e4m3 weight that is NaN, which no checkpoint has, counts as 480 with its sign.

        Args:
            a: [M, K] float16, bfloat16, int8 or float8_e4m3fn; constant row stride.
            b_q_weight: [K / 16, N * bits / 2] int32, contiguous; K a multiple of 16, or of 32 with 8-bit activations; N a
                multiple of 64.
            b_bias: of the dtype of c, contiguous, N elements, permuted; or None.
            b_scales: see above, contiguous; num_groups divides K.
            a_scales: float32, contiguous, M or 1 elements, with 8-bit activations; else None.
            global_scale: one element, where scales are e4m3; else None.
            b_zeros: see above, contiguous; empty or None without zero points.
            g_idx: [K] int32, contiguous; both empty or None, or both given: row k of the weight multiplies column
                ``perm[k]`` of a, and its group is ``g_idx[k]`` unless is_k_full. An index out of range counts as zeros.
            perm: [K] int32, contiguous; both empty or None, or both given: row k of the weight multiplies column
                ``perm[k]`` of a, and its group is ``g_idx[k]`` unless is_k_full. An index out of range counts as zeros.
            workspace: for compatibility with vLLM; no effect.
            b_type_id: the type of the quants, a number of vLLM's scalar types: `pyops.SCALAR_TYPES` has them by name.
            size_m: M, N, K.
            size_n: M, N, K.
            size_k: M, N, K.
            is_k_full: groups are consecutive; otherwise the weight is a shard, and g_idx has the groups of its rows.
            use_atomic_add: for compatibility with vLLM; no effect.
            use_fp32_reduce: for compatibility with vLLM; no effect.
            is_zp_float: zero points are floats.
            c: [M, N], returned; elements of a row are contiguous; new unless given. Its dtype is that of a; with 8-bit
                activations that of b_scales; with e8m0 scales either 16-bit float, by default bfloat16.

        Returns:
            c: [M, N]. Its dtype is that of a; with 8-bit activations that of b_scales; with e8m0 scales
                either 16-bit float, by default bfloat16.
        """

marlin_gemm: _marlin_gemm

class _moe_wna16_marlin_gemm(_Attributes, Protocol):
    def __call__(
        self,
        a: Tensor,
        c: Tensor,
        b_q_weight: Tensor,
        b_bias: Tensor | None,
        b_scales: Tensor,
        a_scales: Tensor | None,
        global_scale: Tensor | None,
        b_zeros: Tensor | None,
        g_idx: Tensor | None,
        perm: Tensor | None,
        workspace: Tensor | None,
        sorted_token_ids: Tensor,
        expert_ids: Tensor,
        num_tokens_past_padded: Tensor,
        topk_weights: Tensor | None,
        moe_block_size: int,
        top_k: int,
        mul_topk_weights: bool,
        b_type_id: int,
        size_m: int,
        size_n: int,
        size_k: int,
        is_k_full: bool = True,
        use_atomic_add: bool = False,
        use_fp32_reduce: bool = False,
        is_zp_float: bool = False,
        thread_k: int = -1,
        thread_n: int = -1,
        blocks_per_sm: int = -1,
    ) -> None:
        """Grouped GEMM with weights in Marlin's layout: ``c[t] = weight[t] * (a[t // top_k] @ w[e] + b_bias[e])``.

        e is the expert of row t. The rules of `marlin_gemm` for weights, scales and zero points hold for every expert. Rows
        that the lists do not name, and rows of experts that do not exist, are left unchanged. With 8-bit activations the
        weights are dequantized to a workspace, with all of their scales, in the dtype of c. Modelled on vLLM's op of this
        name.

        Args:
            a: [M, K] float16, bfloat16, int8 or float8_e4m3fn; constant row stride.
            c: [M * top_k, N] of the dtype that `marlin_gemm` gives, written; constant row stride.
            b_q_weight: [num_experts, K / 16, N * bits / 2] int32, contiguous; K a multiple of 16, or of 32 with 8-bit
                activations, N of 64.
            b_bias: [num_experts, N] of the dtype of c, contiguous, permuted; or None.
            b_scales: [num_experts, num_groups, N], contiguous.
            a_scales: float32, contiguous, M or 1 elements, with 8-bit activations; else None.
            global_scale: [num_experts] of the dtype of a or float32, where scales are e4m3; else None.
            b_zeros: [num_experts, num_groups, ...], contiguous; or None.
            g_idx: [num_experts, K] int32, contiguous; both empty or None, as with 8-bit activations, or both given.
            perm: [num_experts, K] int32, contiguous; both empty or None, as with 8-bit activations, or both given.
            workspace: for compatibility with vLLM; no
                effect.
            sorted_token_ids: one dimension, int32, contiguous, written; capacity for the rows of any distribution:
                ``num_tokens * topk + min(num_experts, num_tokens * topk) * (block_size - 1)`` elements, rounded down to a
                multiple of block_size, are enough. writes them for blocks of
                moe_block_size.
            expert_ids: as `moe_align_block_size` writes them for blocks of
                moe_block_size.
            num_tokens_past_padded: as `moe_align_block_size` writes them for blocks of
                moe_block_size.
            topk_weights: float32, contiguous, a weight for each row of c; or None.
            moe_block_size: slots of a block, a multiple of 8.
            top_k: rows of c that share a row of a.
            mul_topk_weights: whether rows are multiplied by their weights.
            b_type_id: the type of the quants, a number of vLLM's scalar types: `pyops.SCALAR_TYPES` has them by name.; no uint8b128 with int8.
            size_m: M, N, K.
            size_n: M, N, K.
            size_k: M, N, K.
            is_k_full: groups are consecutive; otherwise the weight is a shard, and g_idx has the groups of its rows.; no uint8b128 with int8.
            use_atomic_add: for compatibility with vLLM; no
                effect.
            use_fp32_reduce: for compatibility with vLLM; no
                effect.
            is_zp_float: zero points are floats.; no uint8b128 with int8.
            thread_k: for compatibility with vLLM; no
                effect.
            thread_n: for compatibility with vLLM; no
                effect.
            blocks_per_sm: for compatibility with vLLM; no
                effect.
        """
    @staticmethod
    def new(
        a: Tensor,
        b_q_weight: Tensor,
        b_bias: Tensor | None,
        b_scales: Tensor,
        a_scales: Tensor | None,
        global_scale: Tensor | None,
        b_zeros: Tensor | None,
        g_idx: Tensor | None,
        perm: Tensor | None,
        workspace: Tensor | None,
        sorted_token_ids: Tensor,
        expert_ids: Tensor,
        num_tokens_past_padded: Tensor,
        topk_weights: Tensor | None,
        moe_block_size: int,
        top_k: int,
        mul_topk_weights: bool,
        b_type_id: int,
        size_m: int,
        size_n: int,
        size_k: int,
        is_k_full: bool = True,
        use_atomic_add: bool = False,
        use_fp32_reduce: bool = False,
        is_zp_float: bool = False,
        thread_k: int = -1,
        thread_n: int = -1,
        blocks_per_sm: int = -1,
    ) -> Tensor:
        """Grouped GEMM with weights in Marlin's layout: ``c[t] = weight[t] * (a[t // top_k] @ w[e] + b_bias[e])``.

        e is the expert of row t. The rules of `marlin_gemm` for weights, scales and zero points hold for every expert. Rows
        that the lists do not name, and rows of experts that do not exist, are left unchanged. With 8-bit activations the
        weights are dequantized to a workspace, with all of their scales, in the dtype of c. Modelled on vLLM's op of this
        name.

        Args:
            a: [M, K] float16, bfloat16, int8 or float8_e4m3fn; constant row stride.
            b_q_weight: [num_experts, K / 16, N * bits / 2] int32, contiguous; K a multiple of 16, or of 32 with 8-bit
                activations, N of 64.
            b_bias: [num_experts, N] of the dtype of c, contiguous, permuted; or None.
            b_scales: [num_experts, num_groups, N], contiguous.
            a_scales: float32, contiguous, M or 1 elements, with 8-bit activations; else None.
            global_scale: [num_experts] of the dtype of a or float32, where scales are e4m3; else None.
            b_zeros: [num_experts, num_groups, ...], contiguous; or None.
            g_idx: [num_experts, K] int32, contiguous; both empty or None, as with 8-bit activations, or both given.
            perm: [num_experts, K] int32, contiguous; both empty or None, as with 8-bit activations, or both given.
            workspace: for compatibility with vLLM; no
                effect.
            sorted_token_ids: one dimension, int32, contiguous, written; capacity for the rows of any distribution:
                ``num_tokens * topk + min(num_experts, num_tokens * topk) * (block_size - 1)`` elements, rounded down to a
                multiple of block_size, are enough. writes them for blocks of
                moe_block_size.
            expert_ids: as `moe_align_block_size` writes them for blocks of
                moe_block_size.
            num_tokens_past_padded: as `moe_align_block_size` writes them for blocks of
                moe_block_size.
            topk_weights: float32, contiguous, a weight for each row of c; or None.
            moe_block_size: slots of a block, a multiple of 8.
            top_k: rows of c that share a row of a.
            mul_topk_weights: whether rows are multiplied by their weights.
            b_type_id: the type of the quants, a number of vLLM's scalar types: `pyops.SCALAR_TYPES` has them by name.; no uint8b128 with int8.
            size_m: M, N, K.
            size_n: M, N, K.
            size_k: M, N, K.
            is_k_full: groups are consecutive; otherwise the weight is a shard, and g_idx has the groups of its rows.; no uint8b128 with int8.
            use_atomic_add: for compatibility with vLLM; no
                effect.
            use_fp32_reduce: for compatibility with vLLM; no
                effect.
            is_zp_float: zero points are floats.; no uint8b128 with int8.
            thread_k: for compatibility with vLLM; no
                effect.
            thread_n: for compatibility with vLLM; no
                effect.
            blocks_per_sm: for compatibility with vLLM; no
                effect.

        Returns:
            c: [M * top_k, N] of the dtype that `marlin_gemm` gives. Zeros where the op leaves it as it
                is.
        """

moe_wna16_marlin_gemm: _moe_wna16_marlin_gemm

class _marlin_int4_fp8_preprocess_out(_Attributes, Protocol):
    def __call__(self, out: Tensor, qweight: Tensor, qzeros_or_none: Tensor | None = None) -> None:
        """4-bit quants, recoded for a cheap conversion to e4m3: for `marlin_gemm` with activations of e4m3.

        A quant v becomes ``v - zero`` where that is not negative, else ``15 - v``.

        Args:
            out: the shape of qweight, int32, contiguous, written; may be qweight itself.
            qweight: [K, N / 8] int32, contiguous, in the layout of AWQ; without zero points of any shape and layout.
            qzeros_or_none: [num_groups, N / 8] int32, contiguous, packed as qweight; num_groups divides K. None: all zero
                points are 8.
        """
    @staticmethod
    def new(qweight: Tensor, qzeros_or_none: Tensor | None = None) -> Tensor:
        """4-bit quants, recoded for a cheap conversion to e4m3: for `marlin_gemm` with activations of e4m3.

        A quant v becomes ``v - zero`` where that is not negative, else ``15 - v``.

        Args:
            qweight: [K, N / 8] int32, contiguous, in the layout of AWQ; without zero points of any shape and layout.
            qzeros_or_none: [num_groups, N / 8] int32, contiguous, packed as qweight; num_groups divides K. None: all zero
                points are 8.

        Returns:
            out: the shape of qweight, int32.
        """

marlin_int4_fp8_preprocess_out: _marlin_int4_fp8_preprocess_out

class _gptq_marlin_repack(_Attributes, Protocol):
    def __call__(
        self,
        b_q_weight: Tensor,
        perm: Tensor | None,
        size_k: int,
        size_n: int,
        num_bits: int,
        is_a_8bit: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GPTQ weight in Marlin's layout, which `marlin_gemm` takes (Frantar et al. 2024, arXiv:2408.11743).

        Row k becomes row ``perm[k]`` of the given weight, or 0 if that row does not exist. `_shared/packed_layouts.py` has
        the layouts.

        Args:
            b_q_weight: [K * num_bits / 32, N] int32, contiguous; K a multiple of 16, N of 64.
            perm: [K] int32, contiguous; empty or None: rows keep their order, as they must with is_a_8bit.
            size_k: K, N.
            size_n: K, N.
            num_bits: bits of a quant: 4 or 8.
            is_a_8bit: tiles are those for activations of 8 bits; K is a multiple of 32.
            out: [K / 16, N * num_bits / 2] int32, contiguous, returned; new unless given.

        Returns:
            out: [K / 16, N * num_bits / 2] int32.
        """
    @staticmethod
    def new(
        b_q_weight: Tensor,
        perm: Tensor | None,
        size_k: int,
        size_n: int,
        num_bits: int,
        is_a_8bit: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A GPTQ weight in Marlin's layout, which `marlin_gemm` takes (Frantar et al. 2024, arXiv:2408.11743).

        Row k becomes row ``perm[k]`` of the given weight, or 0 if that row does not exist. `_shared/packed_layouts.py` has
        the layouts.

        Args:
            b_q_weight: [K * num_bits / 32, N] int32, contiguous; K a multiple of 16, N of 64.
            perm: [K] int32, contiguous; empty or None: rows keep their order, as they must with is_a_8bit.
            size_k: K, N.
            size_n: K, N.
            num_bits: bits of a quant: 4 or 8.
            is_a_8bit: tiles are those for activations of 8 bits; K is a multiple of 32.
            out: [K / 16, N * num_bits / 2] int32, contiguous, returned; new unless given.

        Returns:
            out: [K / 16, N * num_bits / 2] int32.
        """

gptq_marlin_repack: _gptq_marlin_repack

class _awq_marlin_repack(_Attributes, Protocol):
    def __call__(
        self,
        b_q_weight: Tensor,
        size_k: int,
        size_n: int,
        num_bits: int,
        is_a_8bit: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """An AWQ weight in Marlin's layout, which `marlin_gemm` takes.

        Args:
            b_q_weight: [K, N * num_bits / 32] int32, contiguous, the even columns of a word in its lower half; K a multiple
                of 16, N of 64.
            size_k: K, N.
            size_n: K, N.
            num_bits: bits of a quant: 4 or 8.
            is_a_8bit: tiles are those for activations of 8 bits; K is a multiple of 32.
            out: [K / 16, N * num_bits / 2] int32, contiguous, returned; new unless given.

        Returns:
            out: [K / 16, N * num_bits / 2] int32.
        """
    @staticmethod
    def new(
        b_q_weight: Tensor,
        size_k: int,
        size_n: int,
        num_bits: int,
        is_a_8bit: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """An AWQ weight in Marlin's layout, which `marlin_gemm` takes.

        Args:
            b_q_weight: [K, N * num_bits / 32] int32, contiguous, the even columns of a word in its lower half; K a multiple
                of 16, N of 64.
            size_k: K, N.
            size_n: K, N.
            num_bits: bits of a quant: 4 or 8.
            is_a_8bit: tiles are those for activations of 8 bits; K is a multiple of 32.
            out: [K / 16, N * num_bits / 2] int32, contiguous, returned; new unless given.

        Returns:
            out: [K / 16, N * num_bits / 2] int32.
        """

awq_marlin_repack: _awq_marlin_repack

class _gptq_marlin_moe_repack(_Attributes, Protocol):
    def __call__(
        self,
        b_q_weight: Tensor,
        perm: Tensor | None,
        size_k: int,
        size_n: int,
        num_bits: int,
        is_a_8bit: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """`gptq_marlin_repack` of the weights of all experts.

        Args:
            b_q_weight: [num_experts, K * num_bits / 32, N] int32, contiguous.
            perm: [num_experts, K] int32, contiguous; None, or without columns: rows keep their order.
            size_k: K, N.
            size_n: K, N.
            num_bits: bits of a quant: 4 or 8.
            is_a_8bit: tiles are those for activations of 8 bits; K is a multiple of 32.
            out: [num_experts, K / 16, N * num_bits / 2] int32, contiguous, returned; new unless given.

        Returns:
            out: [num_experts, K / 16, N * num_bits / 2] int32.
        """
    @staticmethod
    def new(
        b_q_weight: Tensor,
        perm: Tensor | None,
        size_k: int,
        size_n: int,
        num_bits: int,
        is_a_8bit: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """`gptq_marlin_repack` of the weights of all experts.

        Args:
            b_q_weight: [num_experts, K * num_bits / 32, N] int32, contiguous.
            perm: [num_experts, K] int32, contiguous; None, or without columns: rows keep their order.
            size_k: K, N.
            size_n: K, N.
            num_bits: bits of a quant: 4 or 8.
            is_a_8bit: tiles are those for activations of 8 bits; K is a multiple of 32.
            out: [num_experts, K / 16, N * num_bits / 2] int32, contiguous, returned; new unless given.

        Returns:
            out: [num_experts, K / 16, N * num_bits / 2] int32.
        """

gptq_marlin_moe_repack: _gptq_marlin_moe_repack

class _awq_marlin_moe_repack(_Attributes, Protocol):
    def __call__(
        self,
        b_q_weight: Tensor,
        perm: Tensor | None,
        size_k: int,
        size_n: int,
        num_bits: int,
        is_a_8bit: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """`awq_marlin_repack` of the weights of all experts.

        Args:
            b_q_weight: [num_experts, K, N * num_bits / 32] int32, contiguous.
            perm: for compatibility with vLLM; no effect.
            size_k: K, N.
            size_n: K, N.
            num_bits: bits of a quant: 4 or 8.
            is_a_8bit: tiles are those for activations of 8 bits; K is a multiple of 32.
            out: [num_experts, K / 16, N * num_bits / 2] int32, contiguous, returned; new unless given.

        Returns:
            out: [num_experts, K / 16, N * num_bits / 2] int32.
        """
    @staticmethod
    def new(
        b_q_weight: Tensor,
        perm: Tensor | None,
        size_k: int,
        size_n: int,
        num_bits: int,
        is_a_8bit: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """`awq_marlin_repack` of the weights of all experts.

        Args:
            b_q_weight: [num_experts, K, N * num_bits / 32] int32, contiguous.
            perm: for compatibility with vLLM; no effect.
            size_k: K, N.
            size_n: K, N.
            num_bits: bits of a quant: 4 or 8.
            is_a_8bit: tiles are those for activations of 8 bits; K is a multiple of 32.
            out: [num_experts, K / 16, N * num_bits / 2] int32, contiguous, returned; new unless given.

        Returns:
            out: [num_experts, K / 16, N * num_bits / 2] int32.
        """

awq_marlin_moe_repack: _awq_marlin_moe_repack

class _skinny_bmm(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        mat2: Tensor,
        constant_weight: bool = False,
        prefetched: Tensor | None = None,
    ) -> None:
        """A batch of small GEMMs for few tokens: ``out[b] = input[b] @ mat2[b]``, accumulated in float32, rounded once.

        It is meant for the decode step of one sequence, where each head of multi-head latent attention has a matrix. Each
        row of `input` reads its matrix: with several rows, GEMMs on tensor cores (`torch.bmm`) are faster.

        Args:
            out: [B, M, N], written; elements of a row contiguous, any strides else.
            input: [B, M, K], float32, float16 or bfloat16; elements of a row contiguous, any strides else.
            mat2: [B, K, N] of the same dtype, contiguous along N or along K, any strides else.
            constant_weight: a promise that no kernel which may still run when this one starts writes `mat2`, as is so for
                the weights of a model. The kernel then loads it while the previous kernel runs.
            prefetched: as of `skinny_linear`.
        """
    @staticmethod
    def new(input: Tensor, mat2: Tensor, constant_weight: bool = False, prefetched: Tensor | None = None) -> Tensor:
        """A batch of small GEMMs for few tokens: ``out[b] = input[b] @ mat2[b]``, accumulated in float32, rounded once.

        It is meant for the decode step of one sequence, where each head of multi-head latent attention has a matrix. Each
        row of `input` reads its matrix: with several rows, GEMMs on tensor cores (`torch.bmm`) are faster.

        Args:
            input: [B, M, K], float32, float16 or bfloat16; elements of a row contiguous, any strides else.
            mat2: [B, K, N] of the same dtype, contiguous along N or along K, any strides else.
            constant_weight: a promise that no kernel which may still run when this one starts writes `mat2`, as is so for
                the weights of a model. The kernel then loads it while the previous kernel runs.
            prefetched: as of `skinny_linear`.

        Returns:
            out: [B, M, N]; elements of a row, any strides else.
        """

skinny_bmm: _skinny_bmm

class _skinny_experts(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        weight: Tensor,
        topk_ids: Tensor,
        bias: Tensor | None = None,
        activation: str = 'none',
        shared: Tensor | None = None,
    ) -> None:
        """The first GEMM of a layer of experts for few tokens.

        ``out[t * top_k + j] = f(input[t] @ weight[e].T + bias[e])`` with e ``topk_ids[t, j]``. It is meant for the decode
        step of one sequence: choices need not be sorted, and each reads the weight of its expert; with more tokens, which
        share experts, `grouped_gemm` is faster. Accumulation is in float32, rounded once. Rows of experts that do not exist
        are zeros.

        A shared MLP with S times the channels of an expert is S more choices of each token, of N channels each. The kernel
        reads its weight while the previous kernel runs: that kernel must not write it.

        Args:
            out: [num_tokens * (top_k + S), N], written; constant row stride.
            input: [num_tokens, K], float32, float16 or bfloat16; constant row stride.
            weight: [num_experts, N, K] of the same dtype, or [num_experts, 2 N, K] for an activation with gates and ups.
            topk_ids: [num_tokens, top_k] int32 or int64, contiguous; any number.
            bias: [num_experts, rows of weight[e]] of the same dtype, contiguous; or None.
            activation: one of those of `grouped_gemm`.
            shared: the first weight of the shared MLP, [S * rows of weight[e], K] of the same dtype, constant row stride,
                gates and ups in the order of those of experts; or None.
        """
    @staticmethod
    def new(
        input: Tensor,
        weight: Tensor,
        topk_ids: Tensor,
        bias: Tensor | None = None,
        activation: str = 'none',
        shared: Tensor | None = None,
    ) -> Tensor:
        """The first GEMM of a layer of experts for few tokens.

        ``out[t * top_k + j] = f(input[t] @ weight[e].T + bias[e])`` with e ``topk_ids[t, j]``. It is meant for the decode
        step of one sequence: choices need not be sorted, and each reads the weight of its expert; with more tokens, which
        share experts, `grouped_gemm` is faster. Accumulation is in float32, rounded once. Rows of experts that do not exist
        are zeros.

        A shared MLP with S times the channels of an expert is S more choices of each token, of N channels each. The kernel
        reads its weight while the previous kernel runs: that kernel must not write it.

        Args:
            input: [num_tokens, K], float32, float16 or bfloat16; constant row stride.
            weight: [num_experts, N, K] of the same dtype, or [num_experts, 2 N, K] for an activation with gates and ups.
            topk_ids: [num_tokens, top_k] int32 or int64, contiguous; any number.
            bias: [num_experts, rows of weight[e]] of the same dtype, contiguous; or None.
            activation: one of those of `grouped_gemm`.
            shared: the first weight of the shared MLP, [S * rows of weight[e], K] of the same dtype, constant row stride,
                gates and ups in the order of those of experts; or None.

        Returns:
            out: [num_tokens * (top_k + S), N].
        """

skinny_experts: _skinny_experts

class _skinny_experts_sum(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        weight: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        bias: Tensor | None = None,
        addend: Tensor | None = None,
        shared: Tensor | None = None,
    ) -> None:
        """The second GEMM of a layer of experts for few tokens, and the sum of the choices.

        ``out[t] = addend[t] + sum_j topk_weights[t, j] * (input[t * top_k + j] @ weight[e].T + bias[e])`` with e
        ``topk_ids[t, j]``, in float32 and rounded once. Choices of experts that do not exist add nothing, whatever their
        rows of `input` hold. The kernel reads `weight`, `topk_ids` and `topk_weights` while the previous kernel runs: that
        kernel must not write them. It is meant to be `skinny_experts`, which does not. The S parts of a shared MLP are
        added likewise, with weight 1 and without a bias.

        Args:
            out: [num_tokens, N], written; constant row stride. It may be `addend`.
            input: [num_tokens * (top_k + S), K], float32, float16 or bfloat16; constant row stride.
            weight: [num_experts, N, K] of the same dtype.
            topk_ids: [num_tokens, top_k] int32 or int64, contiguous; any number.
            topk_weights: [num_tokens, top_k] float32, contiguous.
            bias: [num_experts, N] of the same dtype, contiguous; or None.
            addend: [num_tokens, N] of the same dtype, constant row stride; or None.
            shared: the second weight of the shared MLP, [N, S * K] of the same dtype, constant row stride; or None.
        """
    @staticmethod
    def new(
        input: Tensor,
        weight: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        bias: Tensor | None = None,
        addend: Tensor | None = None,
        shared: Tensor | None = None,
    ) -> Tensor:
        """The second GEMM of a layer of experts for few tokens, and the sum of the choices.

        ``out[t] = addend[t] + sum_j topk_weights[t, j] * (input[t * top_k + j] @ weight[e].T + bias[e])`` with e
        ``topk_ids[t, j]``, in float32 and rounded once. Choices of experts that do not exist add nothing, whatever their
        rows of `input` hold. The kernel reads `weight`, `topk_ids` and `topk_weights` while the previous kernel runs: that
        kernel must not write them. It is meant to be `skinny_experts`, which does not. The S parts of a shared MLP are
        added likewise, with weight 1 and without a bias.

        Args:
            input: [num_tokens * (top_k + S), K], float32, float16 or bfloat16; constant row stride.
            weight: [num_experts, N, K] of the same dtype.
            topk_ids: [num_tokens, top_k] int32 or int64, contiguous; any number.
            topk_weights: [num_tokens, top_k] float32, contiguous.
            bias: [num_experts, N] of the same dtype, contiguous; or None.
            addend: [num_tokens, N] of the same dtype, constant row stride; or None.
            shared: the second weight of the shared MLP, [N, S * K] of the same dtype, constant row stride; or None.

        Returns:
            out: [num_tokens, N]. It may be `addend`.
        """

skinny_experts_sum: _skinny_experts_sum

class _skinny_qkv_rope_cache(_Attributes, Protocol):
    def __call__(
        self,
        query: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor,
        epsilon: float,
        cos_sin_cache: Tensor,
        is_neox: bool,
        positions: Tensor,
        slot_mapping: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> None:
        """Queries, keys and values for small M: a norm, the QKV projection, RoPE, and the insert into a paged cache.

        `skinny_linear` with a norm and `fused_qk_rope_cache` in one launch, for the decode step of one sequence: each token
        reads the weight. ``norm(input) @ weight.T + bias`` has the heads of queries, of keys and of values, where the norm
        is that of `rms_norm`. The first ``rotary_dim`` elements of a head of queries or keys rotate in pairs: (j, j +
        rotary_dim / 2) if `is_neox`, else (2j, 2j + 1) (Su et al. 2021, arXiv:2104.09864). All after the norm is float32,
        rounded once. Keys and values
        are written to ``b, o = divmod(slot_mapping[t], block_size)`` of the caches. A token with a position outside the
        table is not rotated, and nothing of it is inserted; nor is a token with a slot that is negative or after the last.
        The kernel reads `weight` while the previous kernel runs: that kernel must not write it, as is so for the weights of
        a model.

        Args:
            query: [num_tokens, num_heads * head_size], written.
            input: [num_tokens, hidden_size], float32, float16 or bfloat16; any row stride. Rows have at most 32 KB.
            weight: [(num_heads + 2 * num_kv_heads) * head_size, hidden_size] of the same dtype; constant row stride. Rows
                of queries, then of keys, then of values.
            bias: of the same dtype, contiguous, an element for each row of weight; or None.
            norm_weight: [hidden_size] of the same dtype, contiguous.
            epsilon: of the norm of `input`.
            cos_sin_cache: [max_position, rotary_dim], float32, float16 or bfloat16, of one row at least, any row stride:
                cosines, then sines; rotary_dim even, at most head_size.
            is_neox: which elements form a pair.
            positions: [num_tokens] int64 or int32, contiguous.
            slot_mapping: [num_tokens] int64 or int32, contiguous.
            key_cache: [num_blocks, block_size, num_kv_heads, head_size] of the dtype of `input`, written where
                slots say; any strides but the last. head_size is 64, 128 or 256.
            value_cache: [num_blocks, block_size, num_kv_heads, head_size] of the dtype of `input`, written where
                slots say; any strides but the last. head_size is 64, 128 or 256.
        """
    @staticmethod
    def new(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor,
        epsilon: float,
        cos_sin_cache: Tensor,
        is_neox: bool,
        positions: Tensor,
        slot_mapping: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> Tensor:
        """Queries, keys and values for small M: a norm, the QKV projection, RoPE, and the insert into a paged cache.

        `skinny_linear` with a norm and `fused_qk_rope_cache` in one launch, for the decode step of one sequence: each token
        reads the weight. ``norm(input) @ weight.T + bias`` has the heads of queries, of keys and of values, where the norm
        is that of `rms_norm`. The first ``rotary_dim`` elements of a head of queries or keys rotate in pairs: (j, j +
        rotary_dim / 2) if `is_neox`, else (2j, 2j + 1) (Su et al. 2021, arXiv:2104.09864). All after the norm is float32,
        rounded once. Keys and values
        are written to ``b, o = divmod(slot_mapping[t], block_size)`` of the caches. A token with a position outside the
        table is not rotated, and nothing of it is inserted; nor is a token with a slot that is negative or after the last.
        The kernel reads `weight` while the previous kernel runs: that kernel must not write it, as is so for the weights of
        a model.

        Args:
            input: [num_tokens, hidden_size], float32, float16 or bfloat16; any row stride. Rows have at most 32 KB.
            weight: [(num_heads + 2 * num_kv_heads) * head_size, hidden_size] of the same dtype; constant row stride. Rows
                of queries, then of keys, then of values.
            bias: of the same dtype, contiguous, an element for each row of weight; or None.
            norm_weight: [hidden_size] of the same dtype, contiguous.
            epsilon: of the norm of `input`.
            cos_sin_cache: [max_position, rotary_dim], float32, float16 or bfloat16, of one row at least, any row stride:
                cosines, then sines; rotary_dim even, at most head_size.
            is_neox: which elements form a pair.
            positions: [num_tokens] int64 or int32, contiguous.
            slot_mapping: [num_tokens] int64 or int32, contiguous.
            key_cache: [num_blocks, block_size, num_kv_heads, head_size] of the dtype of `input`, written where
                slots say; any strides but the last. head_size is 64, 128 or 256.
            value_cache: [num_blocks, block_size, num_kv_heads, head_size] of the dtype of `input`, written where
                slots say; any strides but the last. head_size is 64, 128 or 256.

        Returns:
            query: [num_tokens, num_heads * head_size].
        """

skinny_qkv_rope_cache: _skinny_qkv_rope_cache

class _skinny_router(_Attributes, Protocol):
    def __call__(
        self,
        normalised: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        input: Tensor,
        norm_weight: Tensor,
        weight: Tensor,
        renormalize: bool,
        scoring_func: str = 'softmax',
        routed_scaling_factor: float = 1.0,
        epsilon: float = 1e-06,
    ) -> None:
        """The norm of each token, the logits of its router, and the choice of its experts, for small M.

        `rms_norm`, a GEMM and `topk_softmax` or `topk_sigmoid` in one launch, for the decode step of one sequence. Logits
        stay float32. With more tokens a GEMM on tensor cores is faster.

        Args:
            normalised: [num_tokens, K], contiguous, written: the norm of `input`, for the experts.
            topk_weights: [num_tokens, topk] float32, contiguous, written; topk is at most 32 and at most num_experts.
            topk_ids: [num_tokens, topk] int32, contiguous, written: the best expert first; of equal ones the lower id.
            input: [num_tokens, K], float32, float16 or bfloat16; constant row stride; rows of at most 32 KB.
            norm_weight: [K] of the dtype of `input`, contiguous.
            weight: [num_experts, K] of the dtype of `input` or float32, constant row stride; at most 512 experts. The
                kernel reads it while the previous kernel runs: that kernel must not write it.
            renormalize: whether the weights of a token are divided by their sum (unless the sum is 0).
            scoring_func: "softmax" or "sigmoid".
            routed_scaling_factor: multiplies the weights, after they are renormalised.
            epsilon: of the norm.
        """
    @staticmethod
    def new(
        input: Tensor,
        norm_weight: Tensor,
        weight: Tensor,
        renormalize: bool,
        scoring_func: str = 'softmax',
        routed_scaling_factor: float = 1.0,
        epsilon: float = 1e-06,
        *,
        topk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The norm of each token, the logits of its router, and the choice of its experts, for small M.

        `rms_norm`, a GEMM and `topk_softmax` or `topk_sigmoid` in one launch, for the decode step of one sequence. Logits
        stay float32. With more tokens a GEMM on tensor cores is faster.

        Args:
            input: [num_tokens, K], float32, float16 or bfloat16; constant row stride; rows of at most 32 KB.
            norm_weight: [K] of the dtype of `input`, contiguous.
            weight: [num_experts, K] of the dtype of `input` or float32, constant row stride; at most 512 experts. The
                kernel reads it while the previous kernel runs: that kernel must not write it.
            renormalize: whether the weights of a token are divided by their sum (unless the sum is 0).
            scoring_func: "softmax" or "sigmoid".
            routed_scaling_factor: multiplies the weights, after they are renormalised.
            epsilon: of the norm.
            topk: how many experts a token has, at most num_experts.

        Returns:
            normalised: [num_tokens, K]: the norm of `input`, for the experts.
            topk_weights: [num_tokens, topk] float32; topk is at most 32 and at most num_experts.
            topk_ids: [num_tokens, topk] int32: the best expert first; of equal ones the lower id.
        """

skinny_router: _skinny_router

class _cutlass_sparse_compress(_Attributes, Protocol):
    def __call__(
        self,
        a: Tensor,
        *,
        a_nzs: Tensor | None = None,
        a_meta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The two kept elements of every four in a row, and their 2:4 metadata, for `cutlass_scaled_sparse_mm`.

        Kept are the elements that are not zero, in their order: the first two if there are more, and zeros if there are
        fewer. A byte of a_meta has the positions of four kept elements, two bits each, the first in the lowest bits.

        Args:
            a: [R, K] bfloat16, float16, float8_e4m3fn or int8, K a multiple of 8; constant row stride.
            a_nzs: [R, K / 2] of the same dtype, returned; constant row stride.
            a_meta: [R, K / 8] uint8, returned; constant row stride.

        Returns:
            a_nzs: [R, K / 2] of the same dtype.
            a_meta: [R, K / 8] uint8.
        """
    @staticmethod
    def new(a: Tensor, *, a_nzs: Tensor | None = None, a_meta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The two kept elements of every four in a row, and their 2:4 metadata, for `cutlass_scaled_sparse_mm`.

        Kept are the elements that are not zero, in their order: the first two if there are more, and zeros if there are
        fewer. A byte of a_meta has the positions of four kept elements, two bits each, the first in the lowest bits.

        Args:
            a: [R, K] bfloat16, float16, float8_e4m3fn or int8, K a multiple of 8; constant row stride.
            a_nzs: [R, K / 2] of the same dtype, returned; constant row stride.
            a_meta: [R, K / 8] uint8, returned; constant row stride.

        Returns:
            a_nzs: [R, K / 2] of the same dtype.
            a_meta: [R, K / 8] uint8.
        """

cutlass_sparse_compress: _cutlass_sparse_compress

class _cutlass_scaled_sparse_mm(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        a: Tensor,
        bt_nzs: Tensor,
        bt_meta: Tensor,
        a_scales: Tensor,
        b_scales: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """A GEMM with a 2:4 sparse weight: ``out = a_scales * (b_scales * (a @ B.T)) + bias``.

        B is the weight before compression; it is expanded to a workspace. Accumulation is exact for int8 and in float32 for
        other dtypes; the epilogue is computed in float32 and rounded once. If bt_meta has the same position for both
        elements of a group, which compression never writes, the second element counts.

        Args:
            out: [M, N] written, of the dtype of a if that has 16 bits, else float16 or bfloat16; elements of a row are
                contiguous.
            a: [M, K] bfloat16, float16, float8_e4m3fn or int8, K a multiple of 8, any strides; row-major is fast.
            bt_nzs: [N, K / 2] of the same dtype, as `cutlass_sparse_compress` writes it for B [N, K]; constant row stride.
            bt_meta: [N, K / 8] uint8, likewise.
            a_scales: float32, contiguous, M or 1 elements
            b_scales: likewise, N or 1.
            bias: of the dtype of out, contiguous, N elements; or None.
        """
    @staticmethod
    def new(
        a: Tensor,
        bt_nzs: Tensor,
        bt_meta: Tensor,
        a_scales: Tensor,
        b_scales: Tensor,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A GEMM with a 2:4 sparse weight: ``out = a_scales * (b_scales * (a @ B.T)) + bias``.

        B is the weight before compression; it is expanded to a workspace. Accumulation is exact for int8 and in float32 for
        other dtypes; the epilogue is computed in float32 and rounded once. If bt_meta has the same position for both
        elements of a group, which compression never writes, the second element counts.

        Args:
            a: [M, K] bfloat16, float16, float8_e4m3fn or int8, K a multiple of 8, any strides; row-major is fast.
            bt_nzs: [N, K / 2] of the same dtype, as `cutlass_sparse_compress` writes it for B [N, K]; constant row stride.
            bt_meta: [N, K / 8] uint8, likewise.
            a_scales: float32, contiguous, M or 1 elements
            b_scales: likewise, N or 1.
            bias: of the dtype of out, contiguous, N elements; or None.
            out_dtype: of the output; None for bfloat16, or the dtype of `a` if that has 16 bits.

        Returns:
            out: [M, N], of the dtype of a if that has 16 bits, else float16 or bfloat16.
        """

cutlass_scaled_sparse_mm: _cutlass_scaled_sparse_mm

class _causal_conv1d_decode(_Attributes, Protocol):
    def __call__(
        self,
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        conv_state_indices: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
        query_start_loc: Tensor | None = None,
        max_query_len: int = -1,
        pad_slot_id: int = -1,
        block_idx_last_scheduled_token: Tensor | None = None,
        initial_state_idx: Tensor | None = None,
    ) -> None:
        """Convolve the new tokens of each sequence in place, continuing from the sequence's state.

        ``x[t, d] = T(act(bias[d] + sum_k weight[d, k] * (history, x)[t + k, d]))`` in float32, rounded once. The history is
        the first ``width - 1`` inputs of the state, the newest last. The state becomes the last ``width - 1`` of history
        and new inputs.

        With num_accepted_tokens (speculative decoding) the history begins ``num_accepted_tokens - 1`` inputs later (clamped
        to the state), and the state becomes the last ``width - 2`` inputs of the history and all new inputs, up to
        state_len. The next call can then continue after any of these tokens.

        A sequence without tokens, or with a slot that is pad_slot_id or does not exist, is skipped: neither its tokens nor
        a state is written. Slots of different sequences must differ.

        Args:
            x: [num_seqs, seq_len, dim], any strides; or with query_start_loc [num_tokens, dim]; float32, float16 or
                bfloat16; overwritten.
            conv_state: [num_slots, state_len, dim] of the dtype of x, any strides, read and written. state_len is at least
                width - 1, and with num_accepted_tokens at least width - 2 and the tokens of a sequence.
            weight: [dim, width], contiguous, float32, float16 or bfloat16, width 2 to 8.
            bias: [dim] of the dtype of `weight`, or None for 0.
            activation: act of the formula: "silu" or its other name "swish", or None.
            conv_state_indices: [num_seqs] slots of sequences, or [num_seqs, max_blocks]; without prefix caching, only
                column 0 counts; None for slots 0, 1, 2, ... This and all other indices are int32, or all are int64.
            num_accepted_tokens: [num_seqs], at least 1: how many tokens of the last call are kept; None without
                speculative decoding.
            query_start_loc: [num_seqs + 1], ascending: the first token of each sequence, and the end of the last. A start
                below 0 is taken for 0, one after the tokens for their end. Where starts do not ascend, sequences share
                tokens: these tokens, and the states of these sequences, are undefined.
            max_query_len: at least the tokens of each sequence, with query_start_loc; -1 if not known.
            pad_slot_id: the slot that means no slot (a padding sequence).
            block_idx_last_scheduled_token: [num_seqs] columns of conv_state_indices for prefix caching:
                where the state is written, and where it is read.
            initial_state_idx: [num_seqs] columns of conv_state_indices for prefix caching:
                where the state is written, and where it is read.
        """

causal_conv1d_decode: _causal_conv1d_decode

class _causal_conv1d_prefill(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        conv_states: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        query_start_loc: Tensor,
        cache_indices: Tensor | None = None,
        has_initial_state: Tensor | None = None,
        activation: str | None = 'silu',
        pad_slot_id: int = -1,
        block_idx_first_scheduled_token: Tensor | None = None,
        block_idx_last_scheduled_token: Tensor | None = None,
        initial_state_idx: Tensor | None = None,
        num_computed_tokens: Tensor | None = None,
        block_size_to_align: int = 0,
        channel_last: bool = True,
    ) -> None:
        """Convolve each channel over the last tokens of its sequence; keep the last inputs of sequences in a cache.

        ``out[t, d] = T(act(bias[d] + sum_k weight[d, k] * x[t - (width - 1) + k, d]))`` in float32, rounded once. The
        inputs before the first token of a sequence are its state if has_initial_state, else 0. The state becomes the last
        ``width - 1`` inputs of the sequence, the newest last; a shorter sequence keeps inputs of the former state.
        (The convolution of Mamba: Gu and Dao 2023, arXiv:2312.00752.)

        A sequence without tokens changes nothing. A sequence with a slot that is pad_slot_id or does not exist has no
        state: it begins with 0, and none is written. A token of no sequence gets 0. Slots of sequences must differ.

        Prefix caching is on where the three block indices are given. A sequence then has a row of slots. Its state comes
        from column initial_state_idx, and its last inputs go to column block_idx_last_scheduled_token. The columns from
        block_idx_first_scheduled_token up to block_idx_last_scheduled_token - 1 get the inputs before block boundaries: the
        last of them those before the last boundary inside the sequence, each earlier column those before the boundary one
        block earlier. A boundary that is not after a token of this call is skipped.

        Args:
            out: [num_tokens, dim], written; or [dim, num_tokens] without channel_last. Constant row stride.
            conv_states: [num_slots, state_len, dim] of the dtype of x, state_len at least width - 1, any strides; read and
                written. None if no state is kept.
            x: shape and dtype of `out`, float32, float16 or bfloat16; constant row stride.
            weight: [dim, width], contiguous, float32, float16 or bfloat16, width 2 to 8.
            bias: [dim] of the dtype of `weight`, or None for 0.
            query_start_loc: [num_seqs + 1], ascending: the first token of each sequence, and the end of the last. This and
                all other indices are int32, or all are int64. A start below 0 is taken for 0, one after the tokens for
                their end. Where starts do not ascend, sequences share tokens: the results of these tokens, and the states
                of these sequences, are undefined.
            cache_indices: [num_seqs] slots of sequences, or [num_seqs, max_blocks]; None for slots 0, 1, 2, ...
            has_initial_state: [num_seqs] bool; None if no sequence has one.
            activation: act of the formula: "silu" or its other name "swish", or None.
            pad_slot_id: the slot that means no slot (a padding sequence).
            block_idx_first_scheduled_token: [num_seqs] columns.
            block_idx_last_scheduled_token: [num_seqs] columns.
            initial_state_idx: [num_seqs] columns.
            num_computed_tokens: [num_seqs] tokens of each sequence before this call; None for 0.
            block_size_to_align: tokens of a block; only with prefix caching.
            channel_last: whether the channels of a token are contiguous in memory.
        """
    @staticmethod
    def new(
        conv_states: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        query_start_loc: Tensor,
        cache_indices: Tensor | None = None,
        has_initial_state: Tensor | None = None,
        activation: str | None = 'silu',
        pad_slot_id: int = -1,
        block_idx_first_scheduled_token: Tensor | None = None,
        block_idx_last_scheduled_token: Tensor | None = None,
        initial_state_idx: Tensor | None = None,
        num_computed_tokens: Tensor | None = None,
        block_size_to_align: int = 0,
        channel_last: bool = True,
    ) -> Tensor:
        """Convolve each channel over the last tokens of its sequence; keep the last inputs of sequences in a cache.

        ``out[t, d] = T(act(bias[d] + sum_k weight[d, k] * x[t - (width - 1) + k, d]))`` in float32, rounded once. The
        inputs before the first token of a sequence are its state if has_initial_state, else 0. The state becomes the last
        ``width - 1`` inputs of the sequence, the newest last; a shorter sequence keeps inputs of the former state.
        (The convolution of Mamba: Gu and Dao 2023, arXiv:2312.00752.)

        A sequence without tokens changes nothing. A sequence with a slot that is pad_slot_id or does not exist has no
        state: it begins with 0, and none is written. A token of no sequence gets 0. Slots of sequences must differ.

        Prefix caching is on where the three block indices are given. A sequence then has a row of slots. Its state comes
        from column initial_state_idx, and its last inputs go to column block_idx_last_scheduled_token. The columns from
        block_idx_first_scheduled_token up to block_idx_last_scheduled_token - 1 get the inputs before block boundaries: the
        last of them those before the last boundary inside the sequence, each earlier column those before the boundary one
        block earlier. A boundary that is not after a token of this call is skipped.

        Args:
            conv_states: [num_slots, state_len, dim] of the dtype of x, state_len at least width - 1, any strides; read and
                written. None if no state is kept.
            x: shape and dtype of `out`, float32, float16 or bfloat16; constant row stride.
            weight: [dim, width], contiguous, float32, float16 or bfloat16, width 2 to 8.
            bias: [dim] of the dtype of `weight`, or None for 0.
            query_start_loc: [num_seqs + 1], ascending: the first token of each sequence, and the end of the last. This and
                all other indices are int32, or all are int64. A start below 0 is taken for 0, one after the tokens for
                their end. Where starts do not ascend, sequences share tokens: the results of these tokens, and the states
                of these sequences, are undefined.
            cache_indices: [num_seqs] slots of sequences, or [num_seqs, max_blocks]; None for slots 0, 1, 2, ...
            has_initial_state: [num_seqs] bool; None if no sequence has one.
            activation: act of the formula: "silu" or its other name "swish", or None.
            pad_slot_id: the slot that means no slot (a padding sequence).
            block_idx_first_scheduled_token: [num_seqs] columns.
            block_idx_last_scheduled_token: [num_seqs] columns.
            initial_state_idx: [num_seqs] columns.
            num_computed_tokens: [num_seqs] tokens of each sequence before this call; None for 0.
            block_size_to_align: tokens of a block; only with prefix caching.
            channel_last: whether the channels of a token are contiguous in memory.

        Returns:
            out: [num_tokens, dim]; or [dim, num_tokens] without channel_last.
        """

causal_conv1d_prefill: _causal_conv1d_prefill

class _mamba_chunk_scan_varlen(_Attributes, Protocol):
    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        cu_seqlens: Tensor,
        cu_chunk_seqlens: Tensor,
        last_chunk_indices: Tensor,
        seq_idx: Tensor,
        out: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_min: float = 0.0,
        dt_max: float = 1.7014118346046923e+38,
        return_intermediate_states: bool = False,
        state_dtype: torch.dtype | None = None,
        *,
        states: Tensor | None = None,
    ) -> Tensor:
        """The prefill scan of Mamba-2: ``h = exp(A dt) h + dt x B^T``, ``out = h C + D x``, token by token.

        `dt` is first ``clamp(softplus(dt + dt_bias), dt_min, dt_max)``, softplus only with `dt_softplus`; `out` is
        multiplied by ``silu(z)`` at the end. Accumulators and the state h are float32. float16 and bfloat16 use MMAs where
        possible, with operands that are rounded to the element type: the state that is multiplied by C, x weighted by its
        decay, and the decayed ``C . B``. In float16 the three must stay below 65520. (Dao and Gu 2024,
        arXiv:2405.21060)

        Chunk c holds the tokens ``cu_chunk_seqlens[c]`` up to ``cu_chunk_seqlens[c + 1]`` of sequence ``seq_idx[c]``, and
        begins where the chunk before it ended if that is of the same sequence, else with the initial state. A chunk without
        tokens leaves the state unchanged. So does an invalid chunk: one longer than `chunk_size`, or not within the tokens
        ``cu_seqlens[s]`` to ``cu_seqlens[s + 1]`` of its sequence s. If the last chunk of a sequence belongs to another
        sequence, the result is the initial state. The division of a sequence into chunks and calls affects only rounding.

        Args:
            x: [num_tokens, num_heads, head_size], float32, float16 or bfloat16. In x, B, C, z and out, heads are
                contiguous, and tokens have any stride.
            dt: [num_tokens, num_heads], float32, float16 or bfloat16, any strides.
            A: [num_heads] float32, negative.
            B: [num_tokens, num_groups, state_size] of the dtype of `x`, state_size up to 256; num_groups divides
                num_heads, and heads of a group are adjacent.
            C: [num_tokens, num_groups, state_size] of the dtype of `x`, state_size up to 256; num_groups divides
                num_heads, and heads of a group are adjacent.
            chunk_size: tokens of a chunk, at most.
            cu_seqlens: [num_seqs + 1] int32 or int64, first token of each sequence. The four index tensors have one dtype.
            cu_chunk_seqlens: [num_chunks + 1], first token of each chunk, ascending.
            last_chunk_indices: [num_seqs], the last chunk of each sequence.
            seq_idx: [num_chunks], the sequence of each chunk.
            out: as `x`, written where chunks have tokens.
            D: [num_heads] or [num_heads, head_size], or None.
            z: as `x`, or None.
            dt_bias: [num_heads], or None.
            initial_states: [num_seqs, num_heads, head_size, state_size], contiguous, or None for zeros.
            dt_softplus: how `dt` is changed.
            dt_min: how `dt` is changed.
            dt_max: how `dt` is changed.
            return_intermediate_states: whether `states` has the state after every chunk, instead of every sequence.
            state_dtype: of new `states`; None is the dtype of `C`.
            states: [num_seqs or num_chunks, num_heads, head_size, state_size], float32, float16 or bfloat16, contiguous,
                written and returned; new unless given.

        Returns:
            states: [num_seqs or num_chunks, num_heads, head_size, state_size], float32, float16 or bfloat16.
        """
    @staticmethod
    def new(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        cu_seqlens: Tensor,
        cu_chunk_seqlens: Tensor,
        last_chunk_indices: Tensor,
        seq_idx: Tensor,
        out: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_min: float = 0.0,
        dt_max: float = 1.7014118346046923e+38,
        return_intermediate_states: bool = False,
        state_dtype: torch.dtype | None = None,
        *,
        states: Tensor | None = None,
    ) -> Tensor:
        """The prefill scan of Mamba-2: ``h = exp(A dt) h + dt x B^T``, ``out = h C + D x``, token by token.

        `dt` is first ``clamp(softplus(dt + dt_bias), dt_min, dt_max)``, softplus only with `dt_softplus`; `out` is
        multiplied by ``silu(z)`` at the end. Accumulators and the state h are float32. float16 and bfloat16 use MMAs where
        possible, with operands that are rounded to the element type: the state that is multiplied by C, x weighted by its
        decay, and the decayed ``C . B``. In float16 the three must stay below 65520. (Dao and Gu 2024,
        arXiv:2405.21060)

        Chunk c holds the tokens ``cu_chunk_seqlens[c]`` up to ``cu_chunk_seqlens[c + 1]`` of sequence ``seq_idx[c]``, and
        begins where the chunk before it ended if that is of the same sequence, else with the initial state. A chunk without
        tokens leaves the state unchanged. So does an invalid chunk: one longer than `chunk_size`, or not within the tokens
        ``cu_seqlens[s]`` to ``cu_seqlens[s + 1]`` of its sequence s. If the last chunk of a sequence belongs to another
        sequence, the result is the initial state. The division of a sequence into chunks and calls affects only rounding.

        Args:
            x: [num_tokens, num_heads, head_size], float32, float16 or bfloat16. In x, B, C, z and out, heads are
                contiguous, and tokens have any stride.
            dt: [num_tokens, num_heads], float32, float16 or bfloat16, any strides.
            A: [num_heads] float32, negative.
            B: [num_tokens, num_groups, state_size] of the dtype of `x`, state_size up to 256; num_groups divides
                num_heads, and heads of a group are adjacent.
            C: [num_tokens, num_groups, state_size] of the dtype of `x`, state_size up to 256; num_groups divides
                num_heads, and heads of a group are adjacent.
            chunk_size: tokens of a chunk, at most.
            cu_seqlens: [num_seqs + 1] int32 or int64, first token of each sequence. The four index tensors have one dtype.
            cu_chunk_seqlens: [num_chunks + 1], first token of each chunk, ascending.
            last_chunk_indices: [num_seqs], the last chunk of each sequence.
            seq_idx: [num_chunks], the sequence of each chunk.
            out: as `x`, written where chunks have tokens.
            D: [num_heads] or [num_heads, head_size], or None.
            z: as `x`, or None.
            dt_bias: [num_heads], or None.
            initial_states: [num_seqs, num_heads, head_size, state_size], contiguous, or None for zeros.
            dt_softplus: how `dt` is changed.
            dt_min: how `dt` is changed.
            dt_max: how `dt` is changed.
            return_intermediate_states: whether `states` has the state after every chunk, instead of every sequence.
            state_dtype: of new `states`; None is the dtype of `C`.
            states: [num_seqs or num_chunks, num_heads, head_size, state_size], float32, float16 or bfloat16, contiguous,
                written and returned; new unless given.

        Returns:
            states: [num_seqs or num_chunks, num_heads, head_size, state_size], float32, float16 or bfloat16.
        """

mamba_chunk_scan_varlen: _mamba_chunk_scan_varlen

class _fused_kda_decode(_Attributes, Protocol):
    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_state: Tensor,
        raw_g: Tensor,
        raw_beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        state_indices: Tensor,
        state: Tensor,
        out: Tensor,
        lower_bound: float | None = None,
        output_gate: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-05,
    ) -> None:
        """One token of Kimi Delta Attention for each sequence: causal convolution, gates, delta rule, gated RMS norm.

        ``q, k, v = silu(bias + sum_w weight[:, w] * (conv_state, x)[w])``; then `kda_update` with normalised q and k, the
        scale ``head_size**-0.5``, the gate of A_log, dt_bias and lower_bound, and ``sigmoid(raw_beta)``; then ``norm(o) *
        norm_weight * sigmoid(output_gate)`` for each head. All is float32, and rounded once. A sequence with a slot out of
        range (-1 for a padded one) is skipped: its outputs are left unchanged. The slots of sequences differ (Kimi Team
        2025, arXiv:2510.26692, with vLLM's arguments).

        Args:
            x: [num_seqs, 3 * num_heads * head_size], float32, float16 or bfloat16: q, k and v of all heads; constant row
                stride. head_size is at most 128.
            weight: [3, width, num_heads * head_size], contiguous, float32, float16 or bfloat16, width 2 to 8.
            bias: [3 * num_heads * head_size] of the dtype of `weight`, contiguous; or None for zeros.
            conv_state: [num_slots, 3 * num_heads * head_size, width - 1] of the dtype of x, any strides, updated.
            raw_g: [1, num_seqs, num_heads, head_size], float32, float16 or bfloat16, contiguous: logits of decays.
            raw_beta: [1, num_seqs, num_heads], of any of these dtypes; heads contiguous.
            A_log: [num_heads], of any of these dtypes, contiguous.
            dt_bias: [num_heads * head_size] or [num_heads, head_size], of any of these dtypes, contiguous.
            state_indices: [num_seqs] int32 or int64, contiguous: the slot of both states.
            state: [num_slots, num_heads, head_size, head_size], float32, float16 or bfloat16, values before keys, updated;
                slots contiguous, any slot stride.
            out: [1, num_seqs, num_heads, head_size] of the dtype of x, contiguous, written where sequences are not skipped.
            lower_bound: the least logarithm of a decay, at most 0, or None; only with A_log.
            output_gate: [num_seqs, num_heads, head_size] or [1, num_seqs, num_heads, head_size] of the dtype of x, heads
                contiguous; or None for no norm.
            norm_weight: [head_size], float32, float16 or bfloat16, contiguous; given if and only if `output_gate` is.
            norm_eps: added to the mean of squares.
        """
    @staticmethod
    def new(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_state: Tensor,
        raw_g: Tensor,
        raw_beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        state_indices: Tensor,
        state: Tensor,
        lower_bound: float | None = None,
        output_gate: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-05,
    ) -> Tensor:
        """One token of Kimi Delta Attention for each sequence: causal convolution, gates, delta rule, gated RMS norm.

        ``q, k, v = silu(bias + sum_w weight[:, w] * (conv_state, x)[w])``; then `kda_update` with normalised q and k, the
        scale ``head_size**-0.5``, the gate of A_log, dt_bias and lower_bound, and ``sigmoid(raw_beta)``; then ``norm(o) *
        norm_weight * sigmoid(output_gate)`` for each head. All is float32, and rounded once. A sequence with a slot out of
        range (-1 for a padded one) is skipped: its outputs are left unchanged. The slots of sequences differ (Kimi Team
        2025, arXiv:2510.26692, with vLLM's arguments).

        Args:
            x: [num_seqs, 3 * num_heads * head_size], float32, float16 or bfloat16: q, k and v of all heads; constant row
                stride. head_size is at most 128.
            weight: [3, width, num_heads * head_size], contiguous, float32, float16 or bfloat16, width 2 to 8.
            bias: [3 * num_heads * head_size] of the dtype of `weight`, contiguous; or None for zeros.
            conv_state: [num_slots, 3 * num_heads * head_size, width - 1] of the dtype of x, any strides, updated.
            raw_g: [1, num_seqs, num_heads, head_size], float32, float16 or bfloat16, contiguous: logits of decays.
            raw_beta: [1, num_seqs, num_heads], of any of these dtypes; heads contiguous.
            A_log: [num_heads], of any of these dtypes, contiguous.
            dt_bias: [num_heads * head_size] or [num_heads, head_size], of any of these dtypes, contiguous.
            state_indices: [num_seqs] int32 or int64, contiguous: the slot of both states.
            state: [num_slots, num_heads, head_size, head_size], float32, float16 or bfloat16, values before keys, updated;
                slots contiguous, any slot stride.
            lower_bound: the least logarithm of a decay, at most 0, or None; only with A_log.
            output_gate: [num_seqs, num_heads, head_size] or [1, num_seqs, num_heads, head_size] of the dtype of x, heads
                contiguous; or None for no norm.
            norm_weight: [head_size], float32, float16 or bfloat16, contiguous; given if and only if `output_gate` is.
            norm_eps: added to the mean of squares.

        Returns:
            out: [1, num_seqs, num_heads, head_size] of the dtype of x, written where sequences are not
                skipped. Zeros where the op leaves it as it is.
        """

fused_kda_decode: _fused_kda_decode

class _gated_delta_rule(_Attributes, Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        scale: float,
        initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        state_v_first: bool = False,
        final_state: Tensor | None = None,
        *,
        o: Tensor | None = None,
    ) -> Tensor:
        """The gated delta rule: ``S = exp(g) S; S += beta k (v - S^T k)^T; o = scale * S^T q``, token by token.

        With `use_qk_l2norm_in_kernel`, q and k are divided by the root of their sum of squares plus 1e-6 first. Heads of q
        and k are shared by groups of adjacent heads of v. Accumulators and the state are float32. float16 and bfloat16 use
        MMAs where possible, 32 tokens at a time, with operands that are rounded to the element type: the
        state, the errors ``v - S^T k``, the updates ``beta (v - S^T k)`` and the dot products of token pairs (Yang et al.
        2024, arXiv:2412.06464, as flash-linear-attention computes it). Hopper takes 64 tokens at a time, with a workspace
        of about 0.19 KB for each token and value head. Where heads would leave SMs idle, it walks up to 16 segments of a
        sequence in parallel, with 128 KB for each one and value head of 128.

        Args:
            q: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            k: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            v: [batch, num_tokens, value_heads, value_size] of the same dtype; key_heads divides value_heads.
            g: [batch, num_tokens, value_heads], float32, float16 or bfloat16: logarithms of decays.
            beta: as `g`, of any of its dtypes, or None for ones: how much of the error is corrected.
            scale: factor of the outputs.
            initial_state: [num_seqs, value_heads, key_size, value_size], float32, float16 or bfloat16, contiguous; or None
                for zeros.
            cu_seqlens: [num_seqs + 1] int32 or int64: sequence s has the tokens ``cu_seqlens[s]`` up to
                ``cu_seqlens[s + 1]``, and batch is 1. None: every row of the batch is a sequence. If the two numbers are
                not a valid range, the sequence has no tokens. Sequences may not overlap.
            use_qk_l2norm_in_kernel: whether q and k are normalised. Any finite q and k are then safe; without it, and for
                v, intermediate results that overflow float32 become infinite or NaN.
            state_v_first: whether states are [..., value_size, key_size].
            final_state: as `initial_state`, written: the state of each sequence after its last token; or None.
            o: as `v`, written where sequences have tokens, and returned; new unless given.

        Returns:
            o: as `v`, written where sequences have tokens.
        """
    @staticmethod
    def new(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        scale: float,
        initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        state_v_first: bool = False,
        final_state: Tensor | None = None,
        *,
        o: Tensor | None = None,
    ) -> Tensor:
        """The gated delta rule: ``S = exp(g) S; S += beta k (v - S^T k)^T; o = scale * S^T q``, token by token.

        With `use_qk_l2norm_in_kernel`, q and k are divided by the root of their sum of squares plus 1e-6 first. Heads of q
        and k are shared by groups of adjacent heads of v. Accumulators and the state are float32. float16 and bfloat16 use
        MMAs where possible, 32 tokens at a time, with operands that are rounded to the element type: the
        state, the errors ``v - S^T k``, the updates ``beta (v - S^T k)`` and the dot products of token pairs (Yang et al.
        2024, arXiv:2412.06464, as flash-linear-attention computes it). Hopper takes 64 tokens at a time, with a workspace
        of about 0.19 KB for each token and value head. Where heads would leave SMs idle, it walks up to 16 segments of a
        sequence in parallel, with 128 KB for each one and value head of 128.

        Args:
            q: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            k: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            v: [batch, num_tokens, value_heads, value_size] of the same dtype; key_heads divides value_heads.
            g: [batch, num_tokens, value_heads], float32, float16 or bfloat16: logarithms of decays.
            beta: as `g`, of any of its dtypes, or None for ones: how much of the error is corrected.
            scale: factor of the outputs.
            initial_state: [num_seqs, value_heads, key_size, value_size], float32, float16 or bfloat16, contiguous; or None
                for zeros.
            cu_seqlens: [num_seqs + 1] int32 or int64: sequence s has the tokens ``cu_seqlens[s]`` up to
                ``cu_seqlens[s + 1]``, and batch is 1. None: every row of the batch is a sequence. If the two numbers are
                not a valid range, the sequence has no tokens. Sequences may not overlap.
            use_qk_l2norm_in_kernel: whether q and k are normalised. Any finite q and k are then safe; without it, and for
                v, intermediate results that overflow float32 become infinite or NaN.
            state_v_first: whether states are [..., value_size, key_size].
            final_state: as `initial_state`, written: the state of each sequence after its last token; or None.
            o: as `v`, written where sequences have tokens, and returned; new unless given.

        Returns:
            o: as `v`, written where sequences have tokens.
        """

gated_delta_rule: _gated_delta_rule

class _gated_delta_rule_update(_Attributes, Protocol):
    def __call__(
        self,
        state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        scale: float,
        cu_seqlens: Tensor | None = None,
        ssm_state_indices: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        state_v_first: bool = False,
        *,
        o: Tensor | None = None,
    ) -> Tensor:
        """`gated_delta_rule` for a few tokens of each sequence, with states in slots that are updated in place.

        Everything is computed in float32. Sequence s begins with the state in slot ``ssm_state_indices[s]`` and leaves its
        last state there. With two dimensions (speculative decoding), it begins with slot
        ``[s, max(num_accepted_tokens[s], 1) - 1]`` and leaves the state after its token t in slot ``[s, t]``. A sequence
        without tokens, or with its first slot out of range (-1 for a padded one), is skipped: its outputs are left
        unchanged. A state with a slot out of range is not stored. The slots of sequences differ, and a sequence names no
        slot twice.

        Args:
            state: [num_slots, value_heads, key_size, value_size], float32, float16 or bfloat16, updated; slots contiguous,
                any slot stride.
            q: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            k: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            v: [batch, num_tokens, value_heads, value_size] of the same dtype; key_heads divides value_heads.
            g: [batch, num_tokens, value_heads], float32, float16 or bfloat16: logarithms of decays.
            beta: as `g`, of any of its dtypes, or None for ones: how much of the error is corrected.
            scale: factor of the outputs.
            cu_seqlens: [num_seqs + 1] int32 or int64: sequence s has the tokens ``cu_seqlens[s]`` up to
                ``cu_seqlens[s + 1]``, and batch is 1. None: every row of the batch is a sequence. If the two numbers are
                not a valid range, the sequence has no tokens. Sequences may not overlap.
            ssm_state_indices: [num_seqs] or [num_seqs, tokens] int32 or int64, or None: sequence s has slot s.
            num_accepted_tokens: [num_seqs] int32 or int64, or None for ones; only with two dimensions of slots.
            use_qk_l2norm_in_kernel: whether q and k are normalised. Any finite q and k are then safe; without it, and for
                v, intermediate results that overflow float32 become infinite or NaN.
            state_v_first: whether states are [..., value_size, key_size].
            o: as `v`, written where sequences are not skipped, and returned; new unless given.

        Returns:
            o: as `v`, written where sequences are not skipped.
        """
    @staticmethod
    def new(
        state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        scale: float,
        cu_seqlens: Tensor | None = None,
        ssm_state_indices: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        state_v_first: bool = False,
        *,
        o: Tensor | None = None,
    ) -> Tensor:
        """`gated_delta_rule` for a few tokens of each sequence, with states in slots that are updated in place.

        Everything is computed in float32. Sequence s begins with the state in slot ``ssm_state_indices[s]`` and leaves its
        last state there. With two dimensions (speculative decoding), it begins with slot
        ``[s, max(num_accepted_tokens[s], 1) - 1]`` and leaves the state after its token t in slot ``[s, t]``. A sequence
        without tokens, or with its first slot out of range (-1 for a padded one), is skipped: its outputs are left
        unchanged. A state with a slot out of range is not stored. The slots of sequences differ, and a sequence names no
        slot twice.

        Args:
            state: [num_slots, value_heads, key_size, value_size], float32, float16 or bfloat16, updated; slots contiguous,
                any slot stride.
            q: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            k: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            v: [batch, num_tokens, value_heads, value_size] of the same dtype; key_heads divides value_heads.
            g: [batch, num_tokens, value_heads], float32, float16 or bfloat16: logarithms of decays.
            beta: as `g`, of any of its dtypes, or None for ones: how much of the error is corrected.
            scale: factor of the outputs.
            cu_seqlens: [num_seqs + 1] int32 or int64: sequence s has the tokens ``cu_seqlens[s]`` up to
                ``cu_seqlens[s + 1]``, and batch is 1. None: every row of the batch is a sequence. If the two numbers are
                not a valid range, the sequence has no tokens. Sequences may not overlap.
            ssm_state_indices: [num_seqs] or [num_seqs, tokens] int32 or int64, or None: sequence s has slot s.
            num_accepted_tokens: [num_seqs] int32 or int64, or None for ones; only with two dimensions of slots.
            use_qk_l2norm_in_kernel: whether q and k are normalised. Any finite q and k are then safe; without it, and for
                v, intermediate results that overflow float32 become infinite or NaN.
            state_v_first: whether states are [..., value_size, key_size].
            o: as `v`, written where sequences are not skipped, and returned; new unless given.

        Returns:
            o: as `v`, written where sequences are not skipped.
        """

gated_delta_rule_update: _gated_delta_rule_update

class _kda(_Attributes, Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        scale: float,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        lower_bound: float | None = None,
        initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        state_v_first: bool = False,
        final_state: Tensor | None = None,
        checkpoint_state: Tensor | None = None,
        checkpoint_offsets: Tensor | None = None,
        *,
        o: Tensor | None = None,
    ) -> Tensor:
        """Kimi Delta Attention: `gated_delta_rule` with decays ``exp(g)`` for each key channel of each value head.

        With `A_log`, g are logits of the gate, and the logarithms of decays are ``lower_bound * sigmoid(exp(A_log) * (g +
        dt_bias))``, or without `lower_bound` ``-exp(A_log) * softplus(g + dt_bias)``. Accumulators and the state are
        float32. From sm_80 on, float16 and bfloat16 use MMAs where possible, 32 tokens at a time, with operands that are
        rounded to the element type: those of `gated_delta_rule`, and keys and queries times decays. This takes a workspace
        of about 0.9 KB for each token and value head with keys of 128 elements (Kimi Team 2025, arXiv:2510.26692, as
        flash-linear-attention and FlashKDA compute it).

        Args:
            q: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            k: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            v: [batch, num_tokens, value_heads, value_size] of the same dtype; key_heads divides value_heads.
            g: [batch, num_tokens, value_heads, key_size], float32, float16 or bfloat16: logarithms of decays, or logits.
            beta: [batch, num_tokens, value_heads], of any of these dtypes, or None for ones: how much of the error is
                corrected.
            scale: factor of the outputs.
            A_log: [value_heads] float32, float16 or bfloat16, contiguous, or None.
            dt_bias: [value_heads, key_size] or [value_heads * key_size], of any of these dtypes, contiguous, or None for
                zeros; only with A_log.
            lower_bound: the least logarithm of a decay, at most 0, or None; only with A_log.
            initial_state: [num_seqs, value_heads, key_size, value_size], float32, float16 or bfloat16, contiguous; or None
                for zeros.
            cu_seqlens: [num_seqs + 1] int32 or int64: sequence s has the tokens ``cu_seqlens[s]`` up to
                ``cu_seqlens[s + 1]``, and batch is 1. None: every row of the batch is a sequence. If the two numbers are
                not a valid range, the sequence has no tokens. Sequences may not overlap.
            use_qk_l2norm_in_kernel: whether q and k are normalised. Any finite q and k are then safe; without it, and for
                v, intermediate results that overflow float32 become infinite or NaN.
            use_beta_sigmoid_in_kernel: whether beta is replaced by its sigmoid.
            state_v_first: whether states are [..., value_size, key_size].
            final_state: as `initial_state`, written: the state of each sequence after its last token; or None.
            checkpoint_state: as `initial_state`, written: the state of sequence s after its first
                ``checkpoint_offsets[s]`` tokens. It is left unchanged if the sequence has fewer tokens, or the offset is
                not positive.
            checkpoint_offsets: [num_seqs] int32 or int64, contiguous; given if and only if `checkpoint_state` is.
            o: as `v`, written where sequences have tokens, and returned; new unless given.

        Returns:
            o: as `v`, written where sequences have tokens.
        """
    @staticmethod
    def new(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        scale: float,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        lower_bound: float | None = None,
        initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        state_v_first: bool = False,
        final_state: Tensor | None = None,
        checkpoint_state: Tensor | None = None,
        checkpoint_offsets: Tensor | None = None,
        *,
        o: Tensor | None = None,
    ) -> Tensor:
        """Kimi Delta Attention: `gated_delta_rule` with decays ``exp(g)`` for each key channel of each value head.

        With `A_log`, g are logits of the gate, and the logarithms of decays are ``lower_bound * sigmoid(exp(A_log) * (g +
        dt_bias))``, or without `lower_bound` ``-exp(A_log) * softplus(g + dt_bias)``. Accumulators and the state are
        float32. From sm_80 on, float16 and bfloat16 use MMAs where possible, 32 tokens at a time, with operands that are
        rounded to the element type: those of `gated_delta_rule`, and keys and queries times decays. This takes a workspace
        of about 0.9 KB for each token and value head with keys of 128 elements (Kimi Team 2025, arXiv:2510.26692, as
        flash-linear-attention and FlashKDA compute it).

        Args:
            q: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            k: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            v: [batch, num_tokens, value_heads, value_size] of the same dtype; key_heads divides value_heads.
            g: [batch, num_tokens, value_heads, key_size], float32, float16 or bfloat16: logarithms of decays, or logits.
            beta: [batch, num_tokens, value_heads], of any of these dtypes, or None for ones: how much of the error is
                corrected.
            scale: factor of the outputs.
            A_log: [value_heads] float32, float16 or bfloat16, contiguous, or None.
            dt_bias: [value_heads, key_size] or [value_heads * key_size], of any of these dtypes, contiguous, or None for
                zeros; only with A_log.
            lower_bound: the least logarithm of a decay, at most 0, or None; only with A_log.
            initial_state: [num_seqs, value_heads, key_size, value_size], float32, float16 or bfloat16, contiguous; or None
                for zeros.
            cu_seqlens: [num_seqs + 1] int32 or int64: sequence s has the tokens ``cu_seqlens[s]`` up to
                ``cu_seqlens[s + 1]``, and batch is 1. None: every row of the batch is a sequence. If the two numbers are
                not a valid range, the sequence has no tokens. Sequences may not overlap.
            use_qk_l2norm_in_kernel: whether q and k are normalised. Any finite q and k are then safe; without it, and for
                v, intermediate results that overflow float32 become infinite or NaN.
            use_beta_sigmoid_in_kernel: whether beta is replaced by its sigmoid.
            state_v_first: whether states are [..., value_size, key_size].
            final_state: as `initial_state`, written: the state of each sequence after its last token; or None.
            checkpoint_state: as `initial_state`, written: the state of sequence s after its first
                ``checkpoint_offsets[s]`` tokens. It is left unchanged if the sequence has fewer tokens, or the offset is
                not positive.
            checkpoint_offsets: [num_seqs] int32 or int64, contiguous; given if and only if `checkpoint_state` is.
            o: as `v`, written where sequences have tokens, and returned; new unless given.

        Returns:
            o: as `v`, written where sequences have tokens.
        """

kda: _kda

class _kda_update(_Attributes, Protocol):
    def __call__(
        self,
        state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        scale: float,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        lower_bound: float | None = None,
        cu_seqlens: Tensor | None = None,
        ssm_state_indices: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        state_v_first: bool = False,
        *,
        o: Tensor | None = None,
    ) -> Tensor:
        """`kda` for a few tokens of each sequence, with states in slots that are updated in place.

        Everything is computed in float32. The slots of sequences, also of several speculative tokens, are those of
        `gated_delta_rule_update`.

        Args:
            state: [num_slots, value_heads, key_size, value_size], float32, float16 or bfloat16, updated; slots contiguous,
                any slot stride.
            q: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            k: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            v: [batch, num_tokens, value_heads, value_size] of the same dtype; key_heads divides value_heads.
            g: [batch, num_tokens, value_heads, key_size], float32, float16 or bfloat16: logarithms of decays, or logits.
            beta: [batch, num_tokens, value_heads], of any of these dtypes, or None for ones: how much of the error is
                corrected.
            scale: factor of the outputs.
            A_log: [value_heads] float32, float16 or bfloat16, contiguous, or None.
            dt_bias: [value_heads, key_size] or [value_heads * key_size], of any of these dtypes, contiguous, or None for
                zeros; only with A_log.
            lower_bound: the least logarithm of a decay, at most 0, or None; only with A_log.
            cu_seqlens: [num_seqs + 1] int32 or int64: sequence s has the tokens ``cu_seqlens[s]`` up to
                ``cu_seqlens[s + 1]``, and batch is 1. None: every row of the batch is a sequence. If the two numbers are
                not a valid range, the sequence has no tokens. Sequences may not overlap.
            ssm_state_indices: [num_seqs] or [num_seqs, tokens] int32 or int64, or None: sequence s has slot s.
            num_accepted_tokens: [num_seqs] int32 or int64, or None for ones; only with two dimensions of slots.
            use_qk_l2norm_in_kernel: whether q and k are normalised. Any finite q and k are then safe; without it, and for
                v, intermediate results that overflow float32 become infinite or NaN.
            use_beta_sigmoid_in_kernel: whether beta is replaced by its sigmoid.
            state_v_first: whether states are [..., value_size, key_size].
            o: as `v`, written where sequences are not skipped, and returned; new unless given.

        Returns:
            o: as `v`, written where sequences are not skipped.
        """
    @staticmethod
    def new(
        state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        scale: float,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        lower_bound: float | None = None,
        cu_seqlens: Tensor | None = None,
        ssm_state_indices: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        state_v_first: bool = False,
        *,
        o: Tensor | None = None,
    ) -> Tensor:
        """`kda` for a few tokens of each sequence, with states in slots that are updated in place.

        Everything is computed in float32. The slots of sequences, also of several speculative tokens, are those of
        `gated_delta_rule_update`.

        Args:
            state: [num_slots, value_heads, key_size, value_size], float32, float16 or bfloat16, updated; slots contiguous,
                any slot stride.
            q: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            k: [batch, num_tokens, key_heads, key_size], float32, float16 or bfloat16, key_size up to 256; heads
                contiguous, constant token stride, as in o and the other inputs.
            v: [batch, num_tokens, value_heads, value_size] of the same dtype; key_heads divides value_heads.
            g: [batch, num_tokens, value_heads, key_size], float32, float16 or bfloat16: logarithms of decays, or logits.
            beta: [batch, num_tokens, value_heads], of any of these dtypes, or None for ones: how much of the error is
                corrected.
            scale: factor of the outputs.
            A_log: [value_heads] float32, float16 or bfloat16, contiguous, or None.
            dt_bias: [value_heads, key_size] or [value_heads * key_size], of any of these dtypes, contiguous, or None for
                zeros; only with A_log.
            lower_bound: the least logarithm of a decay, at most 0, or None; only with A_log.
            cu_seqlens: [num_seqs + 1] int32 or int64: sequence s has the tokens ``cu_seqlens[s]`` up to
                ``cu_seqlens[s + 1]``, and batch is 1. None: every row of the batch is a sequence. If the two numbers are
                not a valid range, the sequence has no tokens. Sequences may not overlap.
            ssm_state_indices: [num_seqs] or [num_seqs, tokens] int32 or int64, or None: sequence s has slot s.
            num_accepted_tokens: [num_seqs] int32 or int64, or None for ones; only with two dimensions of slots.
            use_qk_l2norm_in_kernel: whether q and k are normalised. Any finite q and k are then safe; without it, and for
                v, intermediate results that overflow float32 become infinite or NaN.
            use_beta_sigmoid_in_kernel: whether beta is replaced by its sigmoid.
            state_v_first: whether states are [..., value_size, key_size].
            o: as `v`, written where sequences are not skipped, and returned; new unless given.

        Returns:
            o: as `v`, written where sequences are not skipped.
        """

kda_update: _kda_update

class _selective_scan_fwd(_Attributes, Protocol):
    def __call__(
        self,
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D_: Tensor | None,
        z_: Tensor | None,
        delta_bias_: Tensor | None,
        delta_softplus: bool,
        query_start_loc: Tensor | None,
        cache_indices: Tensor | None,
        has_initial_state: Tensor | None,
        ssm_states: Tensor,
        pad_slot_id: int,
        block_size: int = 1024,
        block_idx_first_scheduled_token: Tensor | None = None,
        block_idx_last_scheduled_token: Tensor | None = None,
        initial_state_idx: Tensor | None = None,
        cu_chunk_seqlen: Tensor | None = None,
        last_chunk_indices: Tensor | None = None,
    ) -> None:
        """The selective scan of Mamba over the tokens of sequences, with its states in a cache (Gu and Dao 2023).

        For each sequence and channel c, from its state h, or 0, and over its tokens t in order::

            d = delta[c, t] + delta_bias_[c], then softplus(d) if delta_softplus
            h[n] = exp(d * A[c, n]) * h[n] + d * u[c, t] * B[n, t]
            delta[c, t] = sum(h * C[:, t]) + D_[c] * u[c, t]

        and ``z_[c, t] = delta[c, t] * silu(z_[c, t])``, before delta is rounded. Computed in float32.

        The state of sequence b is that of slot ``cache_indices[b]``: read if ``has_initial_state[b]``, and written after
        the last token. If the slot is `pad_slot_id` or does not exist, nothing of the sequence is written. Nor is anything
        written for a sequence without tokens, or with tokens that do not exist.

        With `block_idx_last_scheduled_token`, a state is kept for every block of `block_size` tokens. Blocks are counted
        from the first token of the call. With chunks, the first block has the tokens of the sequence's first chunk, so that
        a sequence may continue within a block. Row b of `cache_indices` has the slots of sequence b. The sequence begins
        from the slot in column ``initial_state_idx[b]``. The state after its block i goes to the slot in column
        ``block_idx_first_scheduled_token[b] + i``, and the state after its last block to the slot in column
        ``block_idx_last_scheduled_token[b]``. A state is not written if its slot is `pad_slot_id` or does not exist.

        Args:
            u: [batch, dim, num_tokens], or [dim, num_tokens] with `query_start_loc`; float32, float16 or bfloat16; tokens
                contiguous, any other strides.
            delta: the same, the time steps; overwritten by the result.
            A: [dim, state_size] float32, states contiguous; state_size is at most 256.
            B: [batch, groups, state_size, num_tokens] or [groups, state_size, num_tokens] of the dtype of `u`; tokens
                contiguous. ``dim / groups`` adjacent channels share a group.
            C: the same.
            D_: [dim] float32, contiguous; or None for 0.
            z_: as `u`, a gate; overwritten by the gated result. Or None.
            delta_bias_: [dim] float32, contiguous; or None for 0.
            delta_softplus: whether time steps are softplus(delta + delta_bias_).
            query_start_loc: [batch + 1] int32, contiguous: the first token of each sequence, and the end of the last.
                Sequences may not overlap. None: each row of the batch is a sequence.
            cache_indices: [batch], or [batch, columns] with slots of blocks, int32; or None: sequence b has slot b.
            has_initial_state: [batch] bool, contiguous; or None: no sequence has a state.
            ssm_states: [num_slots, dim, state_size], float32 or of the dtype of `u`, states contiguous; written. No two
                sequences may have the same slot.
            pad_slot_id: the slot of a padding sequence.
            block_size: tokens of a block, at least 1; not used without `block_idx_last_scheduled_token`.
            block_idx_first_scheduled_token: [batch] int32, contiguous;
                all three or none.
            block_idx_last_scheduled_token: [batch] int32, contiguous;
                all three or none.
            initial_state_idx: [batch] int32, contiguous;
                all three or none.
            cu_chunk_seqlen: [chunks + 1] int32, contiguous: the first token of each chunk of the sequences, counted over
                all; only differences of adjacent elements are used. A first chunk of less than 1 or more than block_size
                tokens counts as one of block_size.
            last_chunk_indices: [batch] int32, contiguous: the last chunk of each sequence; both or none, and only with
                block_idx_last_scheduled_token.
        """

selective_scan_fwd: _selective_scan_fwd

class _selective_state_update(_Attributes, Protocol):
    def __call__(
        self,
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        state_batch_indices: Tensor | None = None,
        dst_state_batch_indices: Tensor | None = None,
        pad_slot_id: int = -1,
        out: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        is_blackwell: bool = False,
    ) -> None:
        """The recurrence of Mamba for the newest token of each sequence, or for a few tokens (Gu and Dao 2023).

        For each row p of a head, with the sequence's state h, and over its tokens t in order::

            d = dt[t, p] + dt_bias[p], then softplus(d) if dt_softplus
            h[n] = exp(d * A[p, n]) * h[n] + d * x[t, p] * B[t, n]
            y = sum(h * C[t]) + D[p] * x[t, p]
            out[t, p] = y * silu(z[t, p])

        computed in float32. The dimensions `heads` and `groups` may be missing, from all tensors. Without `cu_seqlens`
        sequence i has one token, number i.

        The state is read from slot ``state_batch_indices[i]``, and the state after the last token is written to slot
        ``dst_state_batch_indices[i]``. If the indices have several columns, the first one is used. With
        `num_accepted_tokens` the tokens are drafts: the state is read from column ``max(num_accepted_tokens[i] - 1, 0)`` of
        the sequence's slots, and the state after its token t is written to column t.

        A slot that is `pad_slot_id` or does not exist is not written. Nothing is written of a sequence that would read such
        a slot, or that has tokens that do not exist.

        Args:
            state: [num_slots, heads, head_size, state_size], float32, float16 or bfloat16; states contiguous, any
                other strides; state_size is at most 256. Written. No sequence may read or write a slot that another writes.
            x: [num_tokens, heads, head_size], float32, float16 or bfloat16, any strides.
            dt: the same, of any of these types.
            A: [heads, head_size, state_size] float32; states contiguous, or expanded from one number for each row;
                any other strides.
            B: [num_tokens, groups, state_size] of the dtype of `x`; states contiguous. ``heads / groups`` adjacent
                heads share a group.
            C: [num_tokens, groups, state_size] of the dtype of `x`; states contiguous. ``heads / groups`` adjacent
                heads share a group.
            D: [heads, head_size], of any floating type and any strides; or None for 0.
            z: as `x`; or None: out is y.
            dt_bias: [heads, head_size], of any floating type and any strides; or None for 0.
            dt_softplus: whether time steps are softplus(dt + dt_bias).
            state_batch_indices: [batch] or [batch, columns] int32; or None: sequence i has slot i.
            dst_state_batch_indices: likewise; or None: states are written to the slots from which they were read.
            pad_slot_id: the slot of a padding sequence.
            out: as `x`, written. It must be given.
            num_accepted_tokens: [batch] int32, contiguous; needs `state_batch_indices` of two dimensions.
            cu_seqlens: [batch + 1] int32, contiguous: the first token of each sequence, and the end of the last. Sequences
                may not overlap.
            is_blackwell: for compatibility with vLLM; no effect.
        """
    @staticmethod
    def new(
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        state_batch_indices: Tensor | None = None,
        dst_state_batch_indices: Tensor | None = None,
        pad_slot_id: int = -1,
        num_accepted_tokens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        is_blackwell: bool = False,
    ) -> Tensor:
        """The recurrence of Mamba for the newest token of each sequence, or for a few tokens (Gu and Dao 2023).

        For each row p of a head, with the sequence's state h, and over its tokens t in order::

            d = dt[t, p] + dt_bias[p], then softplus(d) if dt_softplus
            h[n] = exp(d * A[p, n]) * h[n] + d * x[t, p] * B[t, n]
            y = sum(h * C[t]) + D[p] * x[t, p]
            out[t, p] = y * silu(z[t, p])

        computed in float32. The dimensions `heads` and `groups` may be missing, from all tensors. Without `cu_seqlens`
        sequence i has one token, number i.

        The state is read from slot ``state_batch_indices[i]``, and the state after the last token is written to slot
        ``dst_state_batch_indices[i]``. If the indices have several columns, the first one is used. With
        `num_accepted_tokens` the tokens are drafts: the state is read from column ``max(num_accepted_tokens[i] - 1, 0)`` of
        the sequence's slots, and the state after its token t is written to column t.

        A slot that is `pad_slot_id` or does not exist is not written. Nothing is written of a sequence that would read such
        a slot, or that has tokens that do not exist.

        Args:
            state: [num_slots, heads, head_size, state_size], float32, float16 or bfloat16; states contiguous, any
                other strides; state_size is at most 256. Written. No sequence may read or write a slot that another writes.
            x: [num_tokens, heads, head_size], float32, float16 or bfloat16, any strides.
            dt: the same, of any of these types.
            A: [heads, head_size, state_size] float32; states contiguous, or expanded from one number for each row;
                any other strides.
            B: [num_tokens, groups, state_size] of the dtype of `x`; states contiguous. ``heads / groups`` adjacent
                heads share a group.
            C: [num_tokens, groups, state_size] of the dtype of `x`; states contiguous. ``heads / groups`` adjacent
                heads share a group.
            D: [heads, head_size], of any floating type and any strides; or None for 0.
            z: as `x`; or None: out is y.
            dt_bias: [heads, head_size], of any floating type and any strides; or None for 0.
            dt_softplus: whether time steps are softplus(dt + dt_bias).
            state_batch_indices: [batch] or [batch, columns] int32; or None: sequence i has slot i.
            dst_state_batch_indices: likewise; or None: states are written to the slots from which they were read.
            pad_slot_id: the slot of a padding sequence.
            num_accepted_tokens: [batch] int32, contiguous; needs `state_batch_indices` of two dimensions.
            cu_seqlens: [batch + 1] int32, contiguous: the first token of each sequence, and the end of the last. Sequences
                may not overlap.
            is_blackwell: for compatibility with vLLM; no effect.

        Returns:
            out: as `x`.
        """

selective_state_update: _selective_state_update

class _moe_align_block_size(_Attributes, Protocol):
    def __call__(
        self,
        topk_ids: Tensor,
        num_experts: int,
        block_size: int,
        sorted_token_ids: Tensor,
        experts_ids: Tensor,
        num_tokens_post_pad: Tensor,
        expert_map: Tensor | None = None,
        scatter_idx: Tensor | None = None,
    ) -> None:
        """Sort rows by their experts, and pad the rows of each expert to a multiple of `block_size`.

        A row is one choice of one token: row t is element t of `topk_ids`. `sorted_token_ids` gets the rows of expert 0 in
        ascending order, padded with ``num_tokens * topk`` to a multiple of `block_size`, then the rows of expert 1, and so
        on; the remaining elements are also ``num_tokens * topk``. A row is skipped if its id is not from 0 to num_experts -
        1, or if the map does not map its expert to such a number. Modelled on vLLM's op of this name.

        Args:
            topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token; any number.
            num_experts: number of experts.
            block_size: rows of a block of the GEMM (its tile M).
            sorted_token_ids: one dimension, int32, contiguous, written; capacity for the rows of any distribution:
                ``num_tokens * topk + min(num_experts, num_tokens * topk) * (block_size - 1)`` elements, rounded down to a
                multiple of block_size, are enough.
            experts_ids: one dimension, int32, contiguous, written: the expert of each block of `block_size` elements of
                sorted_token_ids, -1 after the last; at least one element for each block.
            num_tokens_post_pad: one int32, written: elements used by rows and their padding, a multiple of block_size.
            expert_map: [any] int32, contiguous: the local index of each expert, -1 for an expert on another device. Rows
                are sorted by local index, and `experts_ids` holds local indices. None: ids are not mapped.
            scatter_idx: [num_tokens * topk, of any shape] int32, contiguous, written unless None: t for row t, -1 for a row
                that is skipped.
        """
    @staticmethod
    def new(
        topk_ids: Tensor,
        num_experts: int,
        block_size: int,
        expert_map: Tensor | None = None,
        scatter_idx: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sort rows by their experts, and pad the rows of each expert to a multiple of `block_size`.

        A row is one choice of one token: row t is element t of `topk_ids`. `sorted_token_ids` gets the rows of expert 0 in
        ascending order, padded with ``num_tokens * topk`` to a multiple of `block_size`, then the rows of expert 1, and so
        on; the remaining elements are also ``num_tokens * topk``. A row is skipped if its id is not from 0 to num_experts -
        1, or if the map does not map its expert to such a number. Modelled on vLLM's op of this name.

        Args:
            topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token; any number.
            num_experts: number of experts.
            block_size: rows of a block of the GEMM (its tile M).
            expert_map: [any] int32, contiguous: the local index of each expert, -1 for an expert on another device. Rows
                are sorted by local index, and `experts_ids` holds local indices. None: ids are not mapped.
            scatter_idx: [num_tokens * topk, of any shape] int32, contiguous, written unless None: t for row t, -1 for a row
                that is skipped.

        Returns:
            sorted_token_ids: one dimension, int32; capacity for the rows of any distribution: ``num_tokens * topk +
                min(num_experts, num_tokens * topk) * (block_size - 1)`` elements, rounded down to a
                multiple of block_size, are enough.
            experts_ids: one dimension, int32: the expert of each block of `block_size` elements of
                sorted_token_ids, -1 after the last; at least one element for each block.
            num_tokens_post_pad: one int32: elements used by rows and their padding, a multiple of block_size.
        """

moe_align_block_size: _moe_align_block_size

class _batched_moe_align_block_size(_Attributes, Protocol):
    def __call__(
        self,
        max_tokens_per_batch: int,
        block_size: int,
        expert_num_tokens: Tensor,
        sorted_ids: Tensor,
        expert_ids: Tensor,
        num_tokens_post_pad: Tensor,
    ) -> None:
        """The rows of batched experts, one batch of rows per expert, padded per expert to a multiple of `block_size`.

        Expert b has the rows ``b * max_tokens_per_batch + i`` for ``i < expert_num_tokens[b]``, a number that is clamped to
        0 ... max_tokens_per_batch. `sorted_ids` gets the rows of one expert after another; the padding of each
        expert and the elements after the last are ``num_experts * max_tokens_per_batch``. Modelled on vLLM's op of this
        name.

        Args:
            max_tokens_per_batch: row capacity of an expert.
            block_size: rows of a block of the GEMM (its tile M).
            expert_num_tokens: [num_experts] int32, contiguous.
            sorted_ids: [num_experts * c] int32, contiguous, written; c is max_tokens_per_batch, rounded up to a multiple of
                block_size.
            expert_ids: [num_experts * c / block_size] int32, contiguous, written: the expert of each block, -1 after the
                last.
            num_tokens_post_pad: one int32, written: elements used by rows and their padding.
        """
    @staticmethod
    def new(max_tokens_per_batch: int, block_size: int, expert_num_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of batched experts, one batch of rows per expert, padded per expert to a multiple of `block_size`.

        Expert b has the rows ``b * max_tokens_per_batch + i`` for ``i < expert_num_tokens[b]``, a number that is clamped to
        0 ... max_tokens_per_batch. `sorted_ids` gets the rows of one expert after another; the padding of each
        expert and the elements after the last are ``num_experts * max_tokens_per_batch``. Modelled on vLLM's op of this
        name.

        Args:
            max_tokens_per_batch: row capacity of an expert.
            block_size: rows of a block of the GEMM (its tile M).
            expert_num_tokens: [num_experts] int32, contiguous.

        Returns:
            sorted_ids: [num_experts * c] int32; c is max_tokens_per_batch, rounded up to a multiple of
                block_size.
            expert_ids: [num_experts * c / block_size] int32: the expert of each block, -1 after the last.
            num_tokens_post_pad: one int32: elements used by rows and their padding.
        """

batched_moe_align_block_size: _batched_moe_align_block_size

class _moe_lora_align_block_size(_Attributes, Protocol):
    def __call__(
        self,
        topk_ids: Tensor,
        token_lora_mapping: Tensor,
        num_experts: int,
        block_size: int,
        max_loras: int,
        max_num_tokens_padded: int,
        max_num_m_blocks: int,
        sorted_token_ids: Tensor,
        experts_ids: Tensor,
        num_tokens_post_pad: Tensor,
        adapter_enabled: Tensor,
        lora_ids: Tensor,
        expert_map: Tensor | None = None,
    ) -> None:
        """`moe_align_block_size` for each LoRA adapter, with the rows of the tokens that use the adapter.

        Adapter l writes its own part of the outputs, from 0 to max_loras - 1, if `lora_ids` names l anywhere and
        ``adapter_enabled[l]`` is not 0. The parts of other adapters are left unchanged. Modelled on vLLM's op of this name.

        Args:
            topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token; any number.
            token_lora_mapping: [num_tokens] int32, contiguous: the adapter of each token; any number.
            num_experts: number of experts.
            block_size: rows of a block of the GEMM (its tile M).
            max_loras: maximum number of adapters.
            max_num_tokens_padded: elements of sorted_token_ids per adapter; enough for any distribution of rows (see
                `moe_align_block_size`).
            max_num_m_blocks: elements of experts_ids per adapter.
            sorted_token_ids: [max_loras * max_num_tokens_padded] int32, in any shape, contiguous, written for the active
                adapters.
            experts_ids: [max_loras * max_num_m_blocks] int32, in any shape, contiguous, written likewise; -1 after the
                last block.
            num_tokens_post_pad: [max_loras] int32, contiguous, written likewise.
            adapter_enabled: [max_loras or more] int32, contiguous.
            lora_ids: [any] int32, contiguous: adapters; ids out of range are skipped.
            expert_map: [any] int32, contiguous: the local index of each expert, -1 for an expert on another device. Rows
                are sorted by local index, and `experts_ids` holds local indices. None: ids are not mapped.
        """
    @staticmethod
    def new(
        topk_ids: Tensor,
        token_lora_mapping: Tensor,
        num_experts: int,
        block_size: int,
        max_loras: int,
        max_num_tokens_padded: int,
        max_num_m_blocks: int,
        adapter_enabled: Tensor,
        lora_ids: Tensor,
        expert_map: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`moe_align_block_size` for each LoRA adapter, with the rows of the tokens that use the adapter.

        Adapter l writes its own part of the outputs, from 0 to max_loras - 1, if `lora_ids` names l anywhere and
        ``adapter_enabled[l]`` is not 0. The parts of other adapters are left unchanged. Modelled on vLLM's op of this name.

        Args:
            topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token; any number.
            token_lora_mapping: [num_tokens] int32, contiguous: the adapter of each token; any number.
            num_experts: number of experts.
            block_size: rows of a block of the GEMM (its tile M).
            max_loras: maximum number of adapters.
            max_num_tokens_padded: elements of sorted_token_ids per adapter; enough for any distribution of rows (see
                `moe_align_block_size`).
            max_num_m_blocks: elements of experts_ids per adapter.
            adapter_enabled: [max_loras or more] int32, contiguous.
            lora_ids: [any] int32, contiguous: adapters; ids out of range are skipped.
            expert_map: [any] int32, contiguous: the local index of each expert, -1 for an expert on another device. Rows
                are sorted by local index, and `experts_ids` holds local indices. None: ids are not mapped.

        Returns:
            sorted_token_ids: [max_loras * max_num_tokens_padded] int32, written for the active adapters. Zeros where
                the op leaves it as it is.
            experts_ids: [max_loras * max_num_m_blocks] int32, written likewise; -1 after the last block. Zeros
                where the op leaves it as it is.
            num_tokens_post_pad: [max_loras] int32, written likewise. Zeros where the op leaves it as it is.
        """

moe_lora_align_block_size: _moe_lora_align_block_size

class _moe_permute(_Attributes, Protocol):
    def __call__(
        self,
        input: Tensor,
        topk_ids: Tensor,
        token_expert_indices: Tensor,
        expert_map: Tensor | None,
        n_expert: int,
        n_local_expert: int,
        topk: int,
        permuted_input: Tensor,
        expert_first_token_offset: Tensor,
        inv_permuted_idx: Tensor,
        permuted_idx: Tensor,
    ) -> None:
        """Copy the row of each token once for each of its topk experts, sorted by expert.

        Choice j of token t is called row ``t * topk + j``. Rows for experts on this device come first, in the order of the
        local index, 0 to n_local_expert - 1; then rows for experts on other devices, in the order of the expert id; last
        rows with an id out of range. The sort is stable: rows for one expert stay in ascending order. Only rows for experts
        on this device are copied; the rest of `permuted_input` is unchanged. Modelled on vLLM's op of this name.

        Args:
            input: [num_tokens, hidden_size], floats, float8 or integers; constant row stride.
            topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token. Any values are allowed.
            token_expert_indices: [num_tokens, topk] int32, contiguous. vLLM's op takes it; this op does not read it.
            expert_map: one-dimensional int32, contiguous: the local index of each expert, -1 for an expert on another
                device. Ids that it has no entry for are out of range. None: the local index of an expert is its id.
            n_expert: number of experts on all devices, and on this device.
            n_local_expert: number of experts on all devices, and on this device.
            topk: experts of a token.
            permuted_input: [num_tokens * topk, hidden_size] of the same dtype, contiguous, written.
            expert_first_token_offset: [n_local_expert + 1] int64, contiguous, written: the permuted index of the first row
                for each expert on this device, then the number of all rows for experts on this device.
            inv_permuted_idx: [num_tokens, topk] int32, in any shape, contiguous, written: the permuted index of each row.
            permuted_idx: [num_tokens * topk] int32, in any shape, contiguous, written: the row at each permuted index, or
                ``num_tokens * topk`` if its expert is not on this device.
        """
    @staticmethod
    def new(
        input: Tensor,
        topk_ids: Tensor,
        token_expert_indices: Tensor,
        expert_map: Tensor | None,
        n_expert: int,
        n_local_expert: int,
        topk: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Copy the row of each token once for each of its topk experts, sorted by expert.

        Choice j of token t is called row ``t * topk + j``. Rows for experts on this device come first, in the order of the
        local index, 0 to n_local_expert - 1; then rows for experts on other devices, in the order of the expert id; last
        rows with an id out of range. The sort is stable: rows for one expert stay in ascending order. Only rows for experts
        on this device are copied; the rest of `permuted_input` is unchanged. Modelled on vLLM's op of this name.

        Args:
            input: [num_tokens, hidden_size], floats, float8 or integers; constant row stride.
            topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token. Any values are allowed.
            token_expert_indices: [num_tokens, topk] int32, contiguous. vLLM's op takes it; this op does not read it.
            expert_map: one-dimensional int32, contiguous: the local index of each expert, -1 for an expert on another
                device. Ids that it has no entry for are out of range. None: the local index of an expert is its id.
            n_expert: number of experts on all devices, and on this device.
            n_local_expert: number of experts on all devices, and on this device.
            topk: experts of a token.

        Returns:
            permuted_input: [num_tokens * topk, hidden_size] of the same dtype. Zeros where the op leaves it as it is.
            expert_first_token_offset: [n_local_expert + 1] int64: the permuted index of the first row for each expert on this
                device, then the number of all rows for experts on this device.
            inv_permuted_idx: [num_tokens, topk] int32: the permuted index of each row.
            permuted_idx: [num_tokens * topk] int32: the row at each permuted index, or ``num_tokens * topk`` if its
                expert is not on this device.
        """

moe_permute: _moe_permute

class _moe_unpermute(_Attributes, Protocol):
    def __call__(
        self,
        permuted_hidden_states: Tensor,
        topk_weights: Tensor,
        inv_permuted_idx: Tensor,
        expert_first_token_offset: Tensor | None,
        topk: int,
        hidden_states: Tensor,
    ) -> None:
        """The weighted sum of the results of each token: ``out[t] = T(sum of w[t, j] * permuted[inv[t, j]] over j)``.

        Multiplications and additions are float32, each rounded, in the order of j; T rounds to the dtype of the output. An
        index out of range is skipped. So is a row for an expert on another device, which has an index not below the last
        element of `expert_first_token_offset`. Modelled on vLLM's op of this name.

        Args:
            permuted_hidden_states: [num_permuted, hidden_size], float32, float16 or bfloat16; constant row stride.
            topk_weights: [num_tokens, topk] float32, contiguous: w.
            inv_permuted_idx: [num_tokens, topk] int32, in any shape, contiguous: inv, as `moe_permute` writes it.
            expert_first_token_offset: [num_local + 1] int64, contiguous, as `moe_permute` writes it; if None, all experts
                are on this device.
            topk: experts of a token.
            hidden_states: [num_tokens, hidden_size] of the same dtype, written; constant row stride.
        """
    @staticmethod
    def new(
        permuted_hidden_states: Tensor,
        topk_weights: Tensor,
        inv_permuted_idx: Tensor,
        expert_first_token_offset: Tensor | None,
        topk: int,
    ) -> Tensor:
        """The weighted sum of the results of each token: ``out[t] = T(sum of w[t, j] * permuted[inv[t, j]] over j)``.

        Multiplications and additions are float32, each rounded, in the order of j; T rounds to the dtype of the output. An
        index out of range is skipped. So is a row for an expert on another device, which has an index not below the last
        element of `expert_first_token_offset`. Modelled on vLLM's op of this name.

        Args:
            permuted_hidden_states: [num_permuted, hidden_size], float32, float16 or bfloat16; constant row stride.
            topk_weights: [num_tokens, topk] float32, contiguous: w.
            inv_permuted_idx: [num_tokens, topk] int32, in any shape, contiguous: inv, as `moe_permute` writes it.
            expert_first_token_offset: [num_local + 1] int64, contiguous, as `moe_permute` writes it; if None, all experts
                are on this device.
            topk: experts of a token.

        Returns:
            hidden_states: [num_tokens, hidden_size] of the same dtype.
        """

moe_unpermute: _moe_unpermute

class _moe_prepare_scatter(_Attributes, Protocol):
    def __call__(
        self,
        topk_ids: Tensor,
        token_expert_indices: Tensor,
        expert_map: Tensor | None,
        n_expert: int,
        n_local_expert: int,
        expert_first_token_offset: Tensor,
        scatter_idx: Tensor,
        sorted_rows: Tensor,
    ) -> None:
        """The permutation of `moe_permute`, which describes it, without a copy of rows, as vLLM's op of this name.

        Args:
            topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token. Any values are allowed.
            token_expert_indices: [num_tokens, topk] int32, contiguous. vLLM's op takes it; this op does not read it.
            expert_map: one-dimensional int32, contiguous: the local index of each expert, -1 for an expert on another
                device. None: the local index of an expert is its id.
            n_expert: number of experts on all devices, and on this device.
            n_local_expert: number of experts on all devices, and on this device.
            expert_first_token_offset: [n_local_expert + 1] int64, contiguous, written: the permuted index of the first row
                for each expert on this device, then the number of all rows for experts on this device.
            scatter_idx: [num_tokens, topk] int32, in any shape, contiguous, written: the permuted index of each row.
            sorted_rows: [num_tokens * topk] int32, in any shape, contiguous, written: the row at each permuted index, or
                ``num_tokens * topk`` if its expert is not on this device.
        """
    @staticmethod
    def new(
        topk_ids: Tensor,
        token_expert_indices: Tensor,
        expert_map: Tensor | None,
        n_expert: int,
        n_local_expert: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The permutation of `moe_permute`, which describes it, without a copy of rows, as vLLM's op of this name.

        Args:
            topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token. Any values are allowed.
            token_expert_indices: [num_tokens, topk] int32, contiguous. vLLM's op takes it; this op does not read it.
            expert_map: one-dimensional int32, contiguous: the local index of each expert, -1 for an expert on another
                device. None: the local index of an expert is its id.
            n_expert: number of experts on all devices, and on this device.
            n_local_expert: number of experts on all devices, and on this device.

        Returns:
            expert_first_token_offset: [n_local_expert + 1] int64: the permuted index of the first row for each expert on this
                device, then the number of all rows for experts on this device.
            scatter_idx: [num_tokens, topk] int32: the permuted index of each row.
            sorted_rows: [num_tokens * topk] int32: the row at each permuted index, or ``num_tokens * topk`` if its
                expert is not on this device.
        """

moe_prepare_scatter: _moe_prepare_scatter

class _topk_softmax(_Attributes, Protocol):
    def __call__(
        self,
        topk_weights: Tensor,
        topk_ids: Tensor,
        token_expert_indices: Tensor,
        gating_output: Tensor,
        renormalize: bool = False,
        e_score_correction_bias: Tensor | None = None,
        is_padding: Tensor | None = None,
    ) -> None:
        """The topk experts of each token by ``softmax(gating_output)``, and their scores as weights.

        The score of an expert is the softmax of the logits, in float32. Experts are ranked by logit, or by
        ``score + e_score_correction_bias``. The best expert comes first; of equal experts, the one with the lower id. The
        weight of an expert is its score, without the bias. An expert with a NaN logit ranks as -inf and weighs 0. An
        infinite logit scores as the largest float. If all logits of a token are NaN or -inf, its weights are 0.

        Args:
            topk_weights: [num_tokens, topk] float32, contiguous, written; topk is at most num_experts.
            topk_ids: [num_tokens, topk] int32, uint32 or int64, contiguous, written.
            token_expert_indices: [num_tokens, topk] int32, contiguous, written: ``[t, j] = j * num_tokens + t``.
            gating_output: [num_tokens, num_experts] float32, float16 or bfloat16; any row stride; at most 8192
                experts.
            renormalize: whether the weights of a token are divided by their sum (unless the sum is 0).
            e_score_correction_bias: [num_experts] float32, contiguous, or None (DeepSeek-V3, arXiv:2412.19437).
            is_padding: [num_tokens] bool, contiguous: the rows of no token, with ids -1 and weights 0. None: no row.
        """
    @staticmethod
    def new(
        gating_output: Tensor,
        renormalize: bool = False,
        e_score_correction_bias: Tensor | None = None,
        is_padding: Tensor | None = None,
        *,
        topk: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The topk experts of each token by ``softmax(gating_output)``, and their scores as weights.

        The score of an expert is the softmax of the logits, in float32. Experts are ranked by logit, or by
        ``score + e_score_correction_bias``. The best expert comes first; of equal experts, the one with the lower id. The
        weight of an expert is its score, without the bias. An expert with a NaN logit ranks as -inf and weighs 0. An
        infinite logit scores as the largest float. If all logits of a token are NaN or -inf, its weights are 0.

        Args:
            gating_output: [num_tokens, num_experts] float32, float16 or bfloat16; any row stride; at most 8192
                experts.
            renormalize: whether the weights of a token are divided by their sum (unless the sum is 0).
            e_score_correction_bias: [num_experts] float32, contiguous, or None (DeepSeek-V3, arXiv:2412.19437).
            is_padding: [num_tokens] bool, contiguous: the rows of no token, with ids -1 and weights 0. None: no row.
            topk: how many experts a token has, at most num_experts.
            indices_type: of topk_ids, int32, uint32 or int64; None for int32.

        Returns:
            topk_weights: [num_tokens, topk] float32; topk is at most num_experts.
            topk_ids: [num_tokens, topk] int32, uint32 or int64.
            token_expert_indices: [num_tokens, topk] int32: ``[t, j] = j * num_tokens + t``.
        """

topk_softmax: _topk_softmax

class _topk_sigmoid(_Attributes, Protocol):
    def __call__(
        self,
        topk_weights: Tensor,
        topk_ids: Tensor,
        token_expert_indices: Tensor,
        gating_output: Tensor,
        renormalize: bool = False,
        e_score_correction_bias: Tensor | None = None,
        routed_scaling_factor: float = 1.0,
        is_padding: Tensor | None = None,
    ) -> None:
        """`topk_softmax`, where the score of an expert is ``1 / (1 + exp(-logit))``.

        A score below 2^-126, the smallest normal float, is 0.

        Args:
            topk_weights: [num_tokens, topk] float32, contiguous, written; topk is at most num_experts.
            topk_ids: [num_tokens, topk] int32, uint32 or int64, contiguous, written.
            token_expert_indices: [num_tokens, topk] int32, contiguous, written: ``[t, j] = j * num_tokens + t``.
            gating_output: [num_tokens, num_experts] float32, float16 or bfloat16; any row stride; at most 8192
                experts.
            renormalize: whether the weights of a token are divided by their sum (unless the sum is 0).
            e_score_correction_bias: [num_experts] float32, contiguous, or None.
            routed_scaling_factor: multiplies the weights, after they are renormalised.
            is_padding: [num_tokens] bool, contiguous: the rows of no token, with ids -1 and weights 0. None: no row.
        """
    @staticmethod
    def new(
        gating_output: Tensor,
        renormalize: bool = False,
        e_score_correction_bias: Tensor | None = None,
        routed_scaling_factor: float = 1.0,
        is_padding: Tensor | None = None,
        *,
        topk: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`topk_softmax`, where the score of an expert is ``1 / (1 + exp(-logit))``.

        A score below 2^-126, the smallest normal float, is 0.

        Args:
            gating_output: [num_tokens, num_experts] float32, float16 or bfloat16; any row stride; at most 8192
                experts.
            renormalize: whether the weights of a token are divided by their sum (unless the sum is 0).
            e_score_correction_bias: [num_experts] float32, contiguous, or None.
            routed_scaling_factor: multiplies the weights, after they are renormalised.
            is_padding: [num_tokens] bool, contiguous: the rows of no token, with ids -1 and weights 0. None: no row.
            topk: how many experts a token has, at most num_experts.
            indices_type: of topk_ids, int32, uint32 or int64; None for int32.

        Returns:
            topk_weights: [num_tokens, topk] float32; topk is at most num_experts.
            topk_ids: [num_tokens, topk] int32, uint32 or int64.
            token_expert_indices: [num_tokens, topk] int32: ``[t, j] = j * num_tokens + t``.
        """

topk_sigmoid: _topk_sigmoid

class _topk_softplus_sqrt(_Attributes, Protocol):
    def __call__(
        self,
        topk_weights: Tensor,
        topk_ids: Tensor,
        token_expert_indices: Tensor,
        gating_output: Tensor,
        renormalize: bool = False,
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: Tensor | None = None,
        input_tokens: Tensor | None = None,
        hash_indices_table: Tensor | None = None,
        is_padding: Tensor | None = None,
    ) -> None:
        """`topk_softmax`, where the score of an expert is ``sqrt(softplus(logit)) = sqrt(log(1 + exp(logit)))``.

        A softplus below 2^-126, the smallest normal float, is 0. With a table, experts are not chosen: those of token t are
        ``hash_indices_table[input_tokens[t]]``, in that order. If the table has no such row, or the entry is not a valid
        expert, the id is -1 and the weight 0.

        Args:
            topk_weights: [num_tokens, topk] float32, contiguous, written; topk is at most num_experts.
            topk_ids: [num_tokens, topk] int32, uint32 or int64, contiguous, written.
            token_expert_indices: [num_tokens, topk] int32, contiguous, written: ``[t, j] = j * num_tokens + t``.
            gating_output: [num_tokens, num_experts] float32, float16 or bfloat16; any row stride; at most 8192
                experts.
            renormalize: whether the weights of a token are divided by their sum (unless the sum is 0).
            routed_scaling_factor: multiplies the weights, after they are renormalised.
            e_score_correction_bias: [num_experts] float32, contiguous, or None. Without effect if there is a table.
            input_tokens: [num_tokens] int32 or int64, contiguous: rows of the table; given if and only if the table is.
            hash_indices_table: [vocab_size, topk] int32 or int64, contiguous, or None.
            is_padding: [num_tokens] bool, contiguous: the rows of no token, with ids -1 and weights 0. None: no row.
        """
    @staticmethod
    def new(
        gating_output: Tensor,
        renormalize: bool = False,
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: Tensor | None = None,
        input_tokens: Tensor | None = None,
        hash_indices_table: Tensor | None = None,
        is_padding: Tensor | None = None,
        *,
        topk: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`topk_softmax`, where the score of an expert is ``sqrt(softplus(logit)) = sqrt(log(1 + exp(logit)))``.

        A softplus below 2^-126, the smallest normal float, is 0. With a table, experts are not chosen: those of token t are
        ``hash_indices_table[input_tokens[t]]``, in that order. If the table has no such row, or the entry is not a valid
        expert, the id is -1 and the weight 0.

        Args:
            gating_output: [num_tokens, num_experts] float32, float16 or bfloat16; any row stride; at most 8192
                experts.
            renormalize: whether the weights of a token are divided by their sum (unless the sum is 0).
            routed_scaling_factor: multiplies the weights, after they are renormalised.
            e_score_correction_bias: [num_experts] float32, contiguous, or None. Without effect if there is a table.
            input_tokens: [num_tokens] int32 or int64, contiguous: rows of the table; given if and only if the table is.
            hash_indices_table: [vocab_size, topk] int32 or int64, contiguous, or None.
            is_padding: [num_tokens] bool, contiguous: the rows of no token, with ids -1 and weights 0. None: no row.
            topk: how many experts a token has, at most num_experts.
            indices_type: of topk_ids, int32, uint32 or int64; None for int32.

        Returns:
            topk_weights: [num_tokens, topk] float32; topk is at most num_experts.
            topk_ids: [num_tokens, topk] int32, uint32 or int64.
            token_expert_indices: [num_tokens, topk] int32: ``[t, j] = j * num_tokens + t``.
        """

topk_softplus_sqrt: _topk_softplus_sqrt

class _grouped_topk(_Attributes, Protocol):
    def __call__(
        self,
        scores: Tensor,
        num_expert_group: int,
        topk_group: int,
        topk: int,
        renormalize: bool,
        routed_scaling_factor: float,
        bias: Tensor | None,
        scoring_func: int = 0,
        *,
        topk_weights: Tensor | None = None,
        topk_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The topk experts of each token, out of its topk_group best groups of experts, and their scores as weights.

        As DeepSeek-V3 (arXiv:2412.19437) chooses experts; without a bias, as DeepSeek-V2 (arXiv:2405.04434) does:

        1. The score s of an expert is ``scores`` itself, or its sigmoid or softmax. The key of an expert is ``s + bias``.
        2. A group ranks by the sum of its two largest keys, or by its only key. Without a bias it ranks by its largest key.
        3. Of the topk_group best groups, the topk experts with the largest keys are chosen, the best first.
        4. Weights are ``s * routed_scaling_factor``, divided by the sum of the token's s plus 1e-20 if `renormalize`.

        Of equal groups, and of equal keys, the one with the lower index comes first. Where ``scores`` is not finite, s is 0
        and the key is -inf; a key that would be NaN is -inf, too. If fewer than topk_group groups rank above -inf, the
        token's experts are 0, 1, ..., and its weights 1 / topk.

        All arithmetic is float32. vLLM rounds s and s + bias to the dtype of ``scores``; 16-bit scores tie less often here.

        Args:
            scores: [num_tokens, num_experts] float32, float16 or bfloat16; any row stride.
            num_expert_group: groups of equal size into which the experts are divided, 1 to 32. One group may have 8192
                experts, two groups 4096 each, three or four groups 2048 each, and so on.
            topk_group: groups from which the experts of a token are chosen, 1 to num_expert_group.
            topk: experts of a token, 1 to 32, and no more than topk_group groups have.
            renormalize: whether the weights of a token are divided by their sum.
            routed_scaling_factor: multiplies the weights.
            bias: float32, float16 or bfloat16, contiguous, num_experts elements; or None.
            scoring_func: 0 if ``scores`` holds scores; 1 for the sigmoid, 2 for the softmax of logits.
            topk_weights: [num_tokens, topk] float32, contiguous, written and returned; new unless given.
            topk_ids: [num_tokens, topk] int32, contiguous, written and returned; new unless given.

        Returns:
            topk_weights: [num_tokens, topk] float32.
            topk_ids: [num_tokens, topk] int32.
        """
    @staticmethod
    def new(
        scores: Tensor,
        num_expert_group: int,
        topk_group: int,
        topk: int,
        renormalize: bool,
        routed_scaling_factor: float,
        bias: Tensor | None,
        scoring_func: int = 0,
        *,
        topk_weights: Tensor | None = None,
        topk_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The topk experts of each token, out of its topk_group best groups of experts, and their scores as weights.

        As DeepSeek-V3 (arXiv:2412.19437) chooses experts; without a bias, as DeepSeek-V2 (arXiv:2405.04434) does:

        1. The score s of an expert is ``scores`` itself, or its sigmoid or softmax. The key of an expert is ``s + bias``.
        2. A group ranks by the sum of its two largest keys, or by its only key. Without a bias it ranks by its largest key.
        3. Of the topk_group best groups, the topk experts with the largest keys are chosen, the best first.
        4. Weights are ``s * routed_scaling_factor``, divided by the sum of the token's s plus 1e-20 if `renormalize`.

        Of equal groups, and of equal keys, the one with the lower index comes first. Where ``scores`` is not finite, s is 0
        and the key is -inf; a key that would be NaN is -inf, too. If fewer than topk_group groups rank above -inf, the
        token's experts are 0, 1, ..., and its weights 1 / topk.

        All arithmetic is float32. vLLM rounds s and s + bias to the dtype of ``scores``; 16-bit scores tie less often here.

        Args:
            scores: [num_tokens, num_experts] float32, float16 or bfloat16; any row stride.
            num_expert_group: groups of equal size into which the experts are divided, 1 to 32. One group may have 8192
                experts, two groups 4096 each, three or four groups 2048 each, and so on.
            topk_group: groups from which the experts of a token are chosen, 1 to num_expert_group.
            topk: experts of a token, 1 to 32, and no more than topk_group groups have.
            renormalize: whether the weights of a token are divided by their sum.
            routed_scaling_factor: multiplies the weights.
            bias: float32, float16 or bfloat16, contiguous, num_experts elements; or None.
            scoring_func: 0 if ``scores`` holds scores; 1 for the sigmoid, 2 for the softmax of logits.
            topk_weights: [num_tokens, topk] float32, contiguous, written and returned; new unless given.
            topk_ids: [num_tokens, topk] int32, contiguous, written and returned; new unless given.

        Returns:
            topk_weights: [num_tokens, topk] float32.
            topk_ids: [num_tokens, topk] int32.
        """

grouped_topk: _grouped_topk

class _moe_sum(_Attributes, Protocol):
    def __call__(self, input: Tensor, output: Tensor) -> None:
        """The sum over the choices of each token: ``output[t] = T(sum of input[t, j] over j)``.

        Accumulation is in float32, in the order of j; the sum is rounded to the element type once. Modelled on vLLM's op of
        this name.

        Args:
            input: [num_tokens, topk, hidden_size], float32, float16 or bfloat16, contiguous.
            output: [num_tokens, hidden_size] of the same dtype, written; constant row stride.
        """
    @staticmethod
    def new(input: Tensor) -> Tensor:
        """The sum over the choices of each token: ``output[t] = T(sum of input[t, j] over j)``.

        Accumulation is in float32, in the order of j; the sum is rounded to the element type once. Modelled on vLLM's op of
        this name.

        Args:
            input: [num_tokens, topk, hidden_size], float32, float16 or bfloat16, contiguous.

        Returns:
            output: [num_tokens, hidden_size] of the same dtype.
        """

moe_sum: _moe_sum

class _moe_sum_experts(_Attributes, Protocol):
    def __call__(
        self,
        input: Tensor,
        topk_ids: Tensor,
        output: Tensor,
        num_experts: int,
        expert_map: Tensor | None = None,
    ) -> None:
        """`moe_sum` over the choices with experts on this device; zeros for a token without such a choice.

        Args:
            input: [num_tokens, topk, hidden_size], float32, float16 or bfloat16, contiguous; any values for choices with
                experts elsewhere.
            topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token; any number.
            output: [num_tokens, hidden_size] of the same dtype, written; constant row stride.
            num_experts: experts on this device.
            expert_map: [any] int32, contiguous: the local index of each expert, -1 for an expert on another device. None:
                ids are not mapped.
        """
    @staticmethod
    def new(input: Tensor, topk_ids: Tensor, num_experts: int, expert_map: Tensor | None = None) -> Tensor:
        """`moe_sum` over the choices with experts on this device; zeros for a token without such a choice.

        Args:
            input: [num_tokens, topk, hidden_size], float32, float16 or bfloat16, contiguous; any values for choices with
                experts elsewhere.
            topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token; any number.
            num_experts: experts on this device.
            expert_map: [any] int32, contiguous: the local index of each expert, -1 for an expert on another device. None:
                ids are not mapped.

        Returns:
            output: [num_tokens, hidden_size] of the same dtype.
        """

moe_sum_experts: _moe_sum_experts

class _shuffle_rows(_Attributes, Protocol):
    def __call__(self, input_tensor: Tensor, dst2src_map: Tensor, output_tensor: Tensor) -> None:
        """Rows in any order and number, bit for bit: ``output_tensor[i] = input_tensor[dst2src_map[i]]``.

        Where there is no such row, `output_tensor` becomes 0. Modelled on vLLM's op of this name.

        Args:
            input_tensor: [num_sources, hidden_size], floats, float8 or integers; constant row stride.
            dst2src_map: [num_rows, or more] int32, contiguous.
            output_tensor: [num_rows, hidden_size] of the same dtype, written; constant row stride.
        """
    @staticmethod
    def new(input_tensor: Tensor, dst2src_map: Tensor) -> Tensor:
        """Rows in any order and number, bit for bit: ``output_tensor[i] = input_tensor[dst2src_map[i]]``.

        Where there is no such row, `output_tensor` becomes 0. Modelled on vLLM's op of this name.

        Args:
            input_tensor: [num_sources, hidden_size], floats, float8 or integers; constant row stride.
            dst2src_map: [num_rows, or more] int32, contiguous.

        Returns:
            output_tensor: [num_rows, hidden_size] of the same dtype.
        """

shuffle_rows: _shuffle_rows

class _get_cutlass_moe_mm_data(_Attributes, Protocol):
    def __call__(
        self,
        topk_ids: Tensor,
        expert_offsets: Tensor,
        problem_sizes1: Tensor,
        problem_sizes2: Tensor,
        input_permutation: Tensor,
        output_permutation: Tensor,
        num_experts: int,
        n: int,
        k: int,
        blockscale_offsets: Tensor | None = None,
        is_gated: bool = True,
    ) -> None:
        """Sort rows by their experts; compute each expert's GEMM problem sizes and row offsets.

        A row is one choice of one token: row t is element t of `topk_ids`. The sort is stable. A row with an
        expert id out of range is not counted; its position is the number of counted rows. M and N are swapped (swap-AB) for
        up to 64 rows, unless `blockscale_offsets` is given. Modelled on vLLM's op of this name.

        Args:
            topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token; any number.
            expert_offsets: [num_experts + 1] int32, contiguous, written: the sorted position of each expert's first row,
                then the number of counted rows.
            problem_sizes1: [num_experts, 3] int32, contiguous, written: the problem sizes of the first and
                of the second layer.
            problem_sizes2: [num_experts, 3] int32, contiguous, written: the problem sizes of the first and
                of the second layer.
            input_permutation: [num_tokens * topk] int32, contiguous, written: the token of the row at each sorted position;
                0 after the last.
            output_permutation: [num_tokens * topk] int32, contiguous, written: the sorted position of each row.
            num_experts: number of experts.
            n: the sizes of the layers.
            k: the sizes of the layers.
            blockscale_offsets: [num_experts + 1] int32, contiguous, written: like expert_offsets, of rows rounded up to a
                multiple of 128 in each expert. None: not wanted.
            is_gated: the first layer has 2 * n columns; otherwise n.
        """
    @staticmethod
    def new(
        topk_ids: Tensor,
        num_experts: int,
        n: int,
        k: int,
        blockscale_offsets: Tensor | None = None,
        is_gated: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Sort rows by their experts; compute each expert's GEMM problem sizes and row offsets.

        A row is one choice of one token: row t is element t of `topk_ids`. The sort is stable. A row with an
        expert id out of range is not counted; its position is the number of counted rows. M and N are swapped (swap-AB) for
        up to 64 rows, unless `blockscale_offsets` is given. Modelled on vLLM's op of this name.

        Args:
            topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token; any number.
            num_experts: number of experts.
            n: the sizes of the layers.
            k: the sizes of the layers.
            blockscale_offsets: [num_experts + 1] int32, contiguous, written: like expert_offsets, of rows rounded up to a
                multiple of 128 in each expert. None: not wanted.
            is_gated: the first layer has 2 * n columns; otherwise n.

        Returns:
            expert_offsets: [num_experts + 1] int32: the sorted position of each expert's first row, then the number
                of counted rows.
            problem_sizes1: [num_experts, 3] int32: the problem sizes of the first and of the second layer.
            problem_sizes2: [num_experts, 3] int32: the problem sizes of the first and of the second layer.
            input_permutation: [num_tokens * topk] int32: the token of the row at each sorted position; 0 after the last.
            output_permutation: [num_tokens * topk] int32: the sorted position of each row.
        """

get_cutlass_moe_mm_data: _get_cutlass_moe_mm_data

class _get_cutlass_moe_mm_problem_sizes(_Attributes, Protocol):
    def __call__(
        self,
        topk_ids: Tensor,
        problem_sizes1: Tensor,
        problem_sizes2: Tensor,
        num_experts: int,
        n: int,
        k: int,
        blockscale_offsets: Tensor | None = None,
        force_swap_ab: bool | None = None,
    ) -> None:
        """Only the GEMM problem sizes of each expert, see `get_cutlass_moe_mm_data`. Modelled on vLLM's op of this name.

        Args:
            topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token; any number.
            problem_sizes1: [num_experts, 3] int32, contiguous, written: the problem sizes of the first and
                of the second layer.
            problem_sizes2: [num_experts, 3] int32, contiguous, written: the problem sizes of the first and
                of the second layer.
            num_experts: number of experts.
            n: the sizes of the layers.
            k: the sizes of the layers.
            blockscale_offsets: any tensor, neither read nor written; only whether it is given matters, for `force_swap_ab`.
            force_swap_ab: whether sizes are swapped. None: for up to 64 rows, unless `blockscale_offsets` is given.
        """
    @staticmethod
    def new(
        topk_ids: Tensor,
        num_experts: int,
        n: int,
        k: int,
        blockscale_offsets: Tensor | None = None,
        force_swap_ab: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Only the GEMM problem sizes of each expert, see `get_cutlass_moe_mm_data`. Modelled on vLLM's op of this name.

        Args:
            topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token; any number.
            num_experts: number of experts.
            n: the sizes of the layers.
            k: the sizes of the layers.
            blockscale_offsets: any tensor, neither read nor written; only whether it is given matters, for `force_swap_ab`.
            force_swap_ab: whether sizes are swapped. None: for up to 64 rows, unless `blockscale_offsets` is given.

        Returns:
            problem_sizes1: as in `get_cutlass_moe_mm_data`.
            problem_sizes2: as in `get_cutlass_moe_mm_data`.
        """

get_cutlass_moe_mm_problem_sizes: _get_cutlass_moe_mm_problem_sizes

class _get_cutlass_moe_mm_problem_sizes_from_expert_offsets(_Attributes, Protocol):
    def __call__(
        self,
        expert_first_token_offset: Tensor,
        problem_sizes1: Tensor,
        problem_sizes2: Tensor,
        n: int,
        k: int,
        swap_ab: bool,
    ) -> None:
        """The GEMM problem sizes of each expert, from its row offsets (`moe_permute`). Modelled on vLLM's op of this name.

        Args:
            expert_first_token_offset: [num_experts + 1] int64, contiguous. An expert that ends before it begins has
                no rows.
            problem_sizes1: [num_experts, 3] int32, contiguous, written: the problem sizes of the first and
                of the second layer.
            problem_sizes2: [num_experts, 3] int32, contiguous, written: the problem sizes of the first and
                of the second layer.
            n: the sizes of the layers.
            k: the sizes of the layers.
            swap_ab: sizes are swapped.
        """
    @staticmethod
    def new(expert_first_token_offset: Tensor, n: int, k: int, swap_ab: bool) -> tuple[Tensor, Tensor]:
        """The GEMM problem sizes of each expert, from its row offsets (`moe_permute`). Modelled on vLLM's op of this name.

        Args:
            expert_first_token_offset: [num_experts + 1] int64, contiguous. An expert that ends before it begins has
                no rows.
            n: the sizes of the layers.
            k: the sizes of the layers.
            swap_ab: sizes are swapped.

        Returns:
            problem_sizes1: as in `get_cutlass_moe_mm_data`.
            problem_sizes2: as in `get_cutlass_moe_mm_data`.
        """

get_cutlass_moe_mm_problem_sizes_from_expert_offsets: _get_cutlass_moe_mm_problem_sizes_from_expert_offsets

class _get_cutlass_batched_moe_mm_data(_Attributes, Protocol):
    def __call__(
        self,
        expert_offsets: Tensor,
        problem_sizes1: Tensor,
        problem_sizes2: Tensor,
        expert_num_tokens: Tensor,
        num_local_experts: int,
        padded_m: int,
        n: int,
        k: int,
    ) -> None:
        """The GEMM problem sizes of each expert, and the offset of its batch, for batches of `padded_m` rows.

        Sizes are swapped if the batches together have up to 64 rows. Modelled on vLLM's op of this name.

        Args:
            expert_offsets: [num_local_experts] int32, contiguous, written: ``e * padded_m``.
            problem_sizes1: [num_experts, 3] int32, contiguous, written: the problem sizes of the first and
                of the second layer.
            problem_sizes2: [num_experts, 3] int32, contiguous, written: the problem sizes of the first and
                of the second layer.
            expert_num_tokens: [num_local_experts] int32, contiguous: rows of each expert, clamped to 0 ... padded_m.
            num_local_experts: how many experts there are on this device.
            padded_m: rows of a batch.
            n: the sizes of the layers.
            k: the sizes of the layers.
        """
    @staticmethod
    def new(
        expert_num_tokens: Tensor,
        num_local_experts: int,
        padded_m: int,
        n: int,
        k: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The GEMM problem sizes of each expert, and the offset of its batch, for batches of `padded_m` rows.

        Sizes are swapped if the batches together have up to 64 rows. Modelled on vLLM's op of this name.

        Args:
            expert_num_tokens: [num_local_experts] int32, contiguous: rows of each expert, clamped to 0 ... padded_m.
            num_local_experts: how many experts there are on this device.
            padded_m: rows of a batch.
            n: the sizes of the layers.
            k: the sizes of the layers.

        Returns:
            expert_offsets: [num_local_experts] int32: ``e * padded_m``.
            problem_sizes1: as in `get_cutlass_moe_mm_data`.
            problem_sizes2: as in `get_cutlass_moe_mm_data`.
        """

get_cutlass_batched_moe_mm_data: _get_cutlass_batched_moe_mm_data

class _get_cutlass_pplx_moe_mm_data(_Attributes, Protocol):
    def __call__(
        self,
        expert_offsets: Tensor,
        problem_sizes1: Tensor,
        problem_sizes2: Tensor,
        expert_num_tokens: Tensor,
        num_local_experts: int,
        padded_m: int,
        n: int,
        k: int,
    ) -> None:
        """`get_cutlass_batched_moe_mm_data` under the name that vLLM gave it before.

        Args:
            expert_offsets: as in
                `get_cutlass_batched_moe_mm_data`.
            problem_sizes1: as in
                `get_cutlass_batched_moe_mm_data`.
            problem_sizes2: as in
                `get_cutlass_batched_moe_mm_data`.
            expert_num_tokens: as in
                `get_cutlass_batched_moe_mm_data`.
            num_local_experts: as in
                `get_cutlass_batched_moe_mm_data`.
            padded_m: as in
                `get_cutlass_batched_moe_mm_data`.
            n: as in
                `get_cutlass_batched_moe_mm_data`.
            k: as in
                `get_cutlass_batched_moe_mm_data`.
        """
    @staticmethod
    def new(
        expert_num_tokens: Tensor,
        num_local_experts: int,
        padded_m: int,
        n: int,
        k: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`get_cutlass_batched_moe_mm_data` under the name that vLLM gave it before.

        Args:
            expert_num_tokens: as in
                `get_cutlass_batched_moe_mm_data`.
            num_local_experts: as in
                `get_cutlass_batched_moe_mm_data`.
            padded_m: as in
                `get_cutlass_batched_moe_mm_data`.
            n: as in
                `get_cutlass_batched_moe_mm_data`.
            k: as in
                `get_cutlass_batched_moe_mm_data`.

        Returns:
            expert_offsets: as in `get_cutlass_batched_moe_mm_data`.
            problem_sizes1: as in `get_cutlass_batched_moe_mm_data`.
            problem_sizes2: as in `get_cutlass_batched_moe_mm_data`.
        """

get_cutlass_pplx_moe_mm_data: _get_cutlass_pplx_moe_mm_data

class _kimi_k3_attn_res(_Attributes, Protocol):
    def __call__(
        self,
        prefix: Tensor,
        delta: Tensor | None,
        blocks: Tensor,
        norm_weight: Tensor,
        qk_weight: Tensor,
        output_norm_weight: Tensor | None,
        output: Tensor,
        num_blocks: int,
        block_write_idx: int,
        eps: float,
        output_norm_eps: float,
    ) -> None:
        """Mix the residual stream and the outputs of earlier blocks by a softmax over their scores (Kimi K3).

        ``x = prefix[t]``, or, with `delta`, ``x = prefix[t] = T(prefix[t] + delta[t])``; then ``blocks[t, block_write_idx]
        = x`` unless that index is -1. The sources are ``v[s] = blocks[t, s]`` for s < num_blocks, and x. Their scores are
        ``sum(v[s] * norm_weight * qk_weight) / sqrt(mean(v[s]^2) + eps)``, and ``y`` is the sum of the sources, weighted by
        the softmax of the scores. ``output[t] = y``, or, with `output_norm_weight`, ``y / sqrt(mean(y^2) + output_norm_eps)
        * output_norm_weight``. All in float32; T rounds x and the output.

        Args:
            prefix: [num_tokens, hidden_size], float16 or bfloat16, read, and written with `delta`; any row stride.
            delta: the same shape and dtype, any row stride; or None.
            blocks: [num_tokens, at least num_blocks, hidden_size] of the same dtype, read, and written at block_write_idx;
                any strides but the last.
            norm_weight: [hidden_size] of the same dtype; hidden_size at most 16384.
            qk_weight: [hidden_size] of the same dtype; hidden_size at most 16384.
            output_norm_weight: [hidden_size] of the same dtype, or None.
            output: [num_tokens, hidden_size] of the same dtype, written; any row stride.
            num_blocks: blocks that are mixed, 0 to 16.
            block_write_idx: the block that x is written to, or -1.
            eps: added to the means of squares.
            output_norm_eps: added to the means of squares.
        """
    @staticmethod
    def new(
        prefix: Tensor,
        delta: Tensor | None,
        blocks: Tensor,
        norm_weight: Tensor,
        qk_weight: Tensor,
        output_norm_weight: Tensor | None,
        num_blocks: int,
        block_write_idx: int,
        eps: float,
        output_norm_eps: float,
    ) -> Tensor:
        """Mix the residual stream and the outputs of earlier blocks by a softmax over their scores (Kimi K3).

        ``x = prefix[t]``, or, with `delta`, ``x = prefix[t] = T(prefix[t] + delta[t])``; then ``blocks[t, block_write_idx]
        = x`` unless that index is -1. The sources are ``v[s] = blocks[t, s]`` for s < num_blocks, and x. Their scores are
        ``sum(v[s] * norm_weight * qk_weight) / sqrt(mean(v[s]^2) + eps)``, and ``y`` is the sum of the sources, weighted by
        the softmax of the scores. ``output[t] = y``, or, with `output_norm_weight`, ``y / sqrt(mean(y^2) + output_norm_eps)
        * output_norm_weight``. All in float32; T rounds x and the output.

        Args:
            prefix: [num_tokens, hidden_size], float16 or bfloat16, read, and written with `delta`; any row stride.
            delta: the same shape and dtype, any row stride; or None.
            blocks: [num_tokens, at least num_blocks, hidden_size] of the same dtype, read, and written at block_write_idx;
                any strides but the last.
            norm_weight: [hidden_size] of the same dtype; hidden_size at most 16384.
            qk_weight: [hidden_size] of the same dtype; hidden_size at most 16384.
            output_norm_weight: [hidden_size] of the same dtype, or None.
            num_blocks: blocks that are mixed, 0 to 16.
            block_write_idx: the block that x is written to, or -1.
            eps: added to the means of squares.
            output_norm_eps: added to the means of squares.

        Returns:
            output: [num_tokens, hidden_size] of the same dtype; any row stride.
        """

kimi_k3_attn_res: _kimi_k3_attn_res

class _rms_norm_dynamic_per_token_quant(_Attributes, Protocol):
    def __call__(
        self,
        result: Tensor,
        input: Tensor,
        weight: Tensor,
        scale: Tensor,
        epsilon: float,
        scale_ub: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        """RMS norm of `input` (plus `residual`), written as int8 or fp8 with one scale per row, computed from the row.

        ``z = input + residual`` in float32, ``residual = T(z)``, ``y = T(T(z / sqrt(mean(z^2) + epsilon)) * weight)``,
        ``scale = max(min(max|y|, scale_ub) / largest, smallest)``, ``result = quantized(y / scale)``. largest is 448 for
        float8_e4m3fn, 224 for float8_e4m3fnuz, 127 for int8; smallest 1 / (512 * largest), for int8 2^-23. int8 multiplies
        by the reciprocal of the scale. NaN is ignored by the maximum and becomes the largest fp8 value or int8 0.

        Args:
            result: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or int8, written; constant row stride.
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            weight: [hidden_size] of the same dtype.
            scale: one float32 per row, contiguous, written; ``result * scale`` dequantizes.
            epsilon: added to the mean of squares.
            scale_ub: one float32 that bounds max|y|; only with fp8.
            residual: the shape and dtype of `input`, read and written; constant row stride; or None.
        """
    @staticmethod
    def new(
        input: Tensor,
        weight: Tensor,
        epsilon: float,
        scale_ub: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        quant_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """RMS norm of `input` (plus `residual`), written as int8 or fp8 with one scale per row, computed from the row.

        ``z = input + residual`` in float32, ``residual = T(z)``, ``y = T(T(z / sqrt(mean(z^2) + epsilon)) * weight)``,
        ``scale = max(min(max|y|, scale_ub) / largest, smallest)``, ``result = quantized(y / scale)``. largest is 448 for
        float8_e4m3fn, 224 for float8_e4m3fnuz, 127 for int8; smallest 1 / (512 * largest), for int8 2^-23. int8 multiplies
        by the reciprocal of the scale. NaN is ignored by the maximum and becomes the largest fp8 value or int8 0.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            weight: [hidden_size] of the same dtype.
            epsilon: added to the mean of squares.
            scale_ub: one float32 that bounds max|y|; only with fp8.
            residual: the shape and dtype of `input`, read and written; constant row stride; or None.
            quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

        Returns:
            result: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or int8.
            scale: [num_tokens, 1] float32; a code times the scale is its value.
        """

rms_norm_dynamic_per_token_quant: _rms_norm_dynamic_per_token_quant

class _rms_norm_per_block_quant(_Attributes, Protocol):
    def __call__(
        self,
        result: Tensor,
        input: Tensor,
        weight: Tensor,
        scale: Tensor,
        epsilon: float,
        scale_ub: Tensor | None,
        residual: Tensor | None,
        group_size: int,
        is_scale_transposed: bool,
    ) -> None:
        """RMS norm of `input` (plus `residual`), written as int8 or fp8 with one scale per group of adjacent elements.

        As `rms_norm_dynamic_per_token_quant`, with the maximum taken over each group.

        Args:
            result: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or int8, written; constant row stride.
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride; hidden_size a multiple of
                group_size.
            weight: [hidden_size] of the same dtype.
            scale: [num_tokens, hidden_size / group_size] float32, written; constant row stride, or with
                `is_scale_transposed` constant column stride, or [hidden_size / group_size, num_tokens], contiguous.
            epsilon: added to the mean of squares.
            scale_ub: one float32 that bounds max|y| of every group; only with fp8.
            residual: the shape and dtype of `input`, read and written; constant row stride; or None.
            group_size: 64 or 128.
            is_scale_transposed: whether the scales of one group of columns are contiguous, instead of those of one row.
        """
    @staticmethod
    def new(
        input: Tensor,
        weight: Tensor,
        epsilon: float,
        scale_ub: Tensor | None,
        residual: Tensor | None,
        group_size: int,
        is_scale_transposed: bool,
        *,
        quant_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """RMS norm of `input` (plus `residual`), written as int8 or fp8 with one scale per group of adjacent elements.

        As `rms_norm_dynamic_per_token_quant`, with the maximum taken over each group.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride; hidden_size a multiple of
                group_size.
            weight: [hidden_size] of the same dtype.
            epsilon: added to the mean of squares.
            scale_ub: one float32 that bounds max|y| of every group; only with fp8.
            residual: the shape and dtype of `input`, read and written; constant row stride; or None.
            group_size: 64 or 128.
            is_scale_transposed: whether the scales of one group of columns are contiguous, instead of those of one row.
            quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

        Returns:
            result: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or int8.
            scale: [num_tokens, hidden_size / group_size] float32; with `is_scale_transposed` columns are contiguous.
        """

rms_norm_per_block_quant: _rms_norm_per_block_quant

class _mhc_pre(_Attributes, Protocol):
    def __call__(
        self,
        residual: Tensor,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float,
        sinkhorn_repeat: int,
        norm_weight: Tensor | None = None,
        norm_eps: float = 0.0,
        *,
        post_mix: Tensor | None = None,
        comb_mix: Tensor | None = None,
        layer_input: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The coefficients of manifold-constrained hyper-connections (mHC), and the input of a layer (DeepSeek-V4).

        With n streams, ``mixes = fn @ x / sqrt(mean(x^2) + rms_eps)``, where x has all elements of a token. Then, in
        float32 (Xie et al. 2026),

        - ``pre = sigmoid(mixes[:n] * hc_scale[0] + hc_base[:n]) + hc_pre_eps``
        - ``post_mix = sigmoid(mixes[n:2n] * hc_scale[1] + hc_base[n:2n]) * hc_post_mult_value``
        - ``comb_mix``, n x n, from ``mixes[2n:] * hc_scale[2] + hc_base[2n:]``: the softmax of each row plus
          hc_sinkhorn_eps; its columns are divided by their sum plus hc_sinkhorn_eps; then rows and columns alternate,
          sinkhorn_repeat - 1 times each (Sinkhorn and Knopp 1967).
        - ``layer_input = sum_i pre[i] * residual[i]``; with `norm_weight`, its RMS norm. Rounded once.

        The contract is that of vLLM's `mhc_pre`.

        Args:
            residual: [num_tokens, n, hidden_size], float32, float16 or bfloat16; n is 1, 2 or 4; the last stride is 1,
                as in `comb_mix` and `layer_input`.
            fn: [n * (n + 2), n * hidden_size] float32, contiguous and finite.
            hc_scale: [3] float32.
            hc_base: [n * (n + 2)] float32.
            rms_eps: added to the mean of squares of a token.
            hc_pre_eps: as above.
            hc_sinkhorn_eps: as above.
            hc_post_mult_value: as above.
            sinkhorn_repeat: at least 1.
            norm_weight: [hidden_size] of the dtype of `residual`, or None.
            norm_eps: added to the mean of squares of the layer's input.
            post_mix: [num_tokens, n, 1] float32, contiguous, written and returned; new unless given.
            comb_mix: [num_tokens, n, n] float32, written and returned; new unless given.
            layer_input: [num_tokens, hidden_size] of the dtype of `residual`, written and returned; new unless given.

        Returns:
            post_mix: [num_tokens, n, 1] float32.
            comb_mix: [num_tokens, n, n] float32.
            layer_input: [num_tokens, hidden_size] of the dtype of `residual`.
        """
    @staticmethod
    def new(
        residual: Tensor,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float,
        sinkhorn_repeat: int,
        norm_weight: Tensor | None = None,
        norm_eps: float = 0.0,
        *,
        post_mix: Tensor | None = None,
        comb_mix: Tensor | None = None,
        layer_input: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The coefficients of manifold-constrained hyper-connections (mHC), and the input of a layer (DeepSeek-V4).

        With n streams, ``mixes = fn @ x / sqrt(mean(x^2) + rms_eps)``, where x has all elements of a token. Then, in
        float32 (Xie et al. 2026),

        - ``pre = sigmoid(mixes[:n] * hc_scale[0] + hc_base[:n]) + hc_pre_eps``
        - ``post_mix = sigmoid(mixes[n:2n] * hc_scale[1] + hc_base[n:2n]) * hc_post_mult_value``
        - ``comb_mix``, n x n, from ``mixes[2n:] * hc_scale[2] + hc_base[2n:]``: the softmax of each row plus
          hc_sinkhorn_eps; its columns are divided by their sum plus hc_sinkhorn_eps; then rows and columns alternate,
          sinkhorn_repeat - 1 times each (Sinkhorn and Knopp 1967).
        - ``layer_input = sum_i pre[i] * residual[i]``; with `norm_weight`, its RMS norm. Rounded once.

        The contract is that of vLLM's `mhc_pre`.

        Args:
            residual: [num_tokens, n, hidden_size], float32, float16 or bfloat16; n is 1, 2 or 4; the last stride is 1,
                as in `comb_mix` and `layer_input`.
            fn: [n * (n + 2), n * hidden_size] float32, contiguous and finite.
            hc_scale: [3] float32.
            hc_base: [n * (n + 2)] float32.
            rms_eps: added to the mean of squares of a token.
            hc_pre_eps: as above.
            hc_sinkhorn_eps: as above.
            hc_post_mult_value: as above.
            sinkhorn_repeat: at least 1.
            norm_weight: [hidden_size] of the dtype of `residual`, or None.
            norm_eps: added to the mean of squares of the layer's input.
            post_mix: [num_tokens, n, 1] float32, contiguous, written and returned; new unless given.
            comb_mix: [num_tokens, n, n] float32, written and returned; new unless given.
            layer_input: [num_tokens, hidden_size] of the dtype of `residual`, written and returned; new unless given.

        Returns:
            post_mix: [num_tokens, n, 1] float32.
            comb_mix: [num_tokens, n, n] float32.
            layer_input: [num_tokens, hidden_size] of the dtype of `residual`.
        """

mhc_pre: _mhc_pre

class _hc_head(_Attributes, Protocol):
    def __call__(
        self,
        hidden_states: Tensor,
        hc_fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_norm_eps: float,
        hc_eps: float,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """The streams after the last layer as one: `layer_input` of `mhc_pre`, without the other coefficients.

        ``out = sum_i (sigmoid(mixes[i] * hc_scale + hc_base[i]) + hc_eps) * hidden_states[i]`` in float32, rounded once.
        The contract is that of vLLM's `hc_head`.

        Args:
            hidden_states: [num_tokens, n, hidden_size], float32, float16 or bfloat16; the last stride is 1; n is 1, 2 or 4.
            hc_fn: [n, n * hidden_size] float32, contiguous and finite.
            hc_scale: [1] float32.
            hc_base: [n] float32.
            rms_norm_eps: added to the mean of squares of a token.
            hc_eps: as above.
            out: [num_tokens, hidden_size] of the dtype of `hidden_states`, the last stride is 1, written and returned; new
                unless given.

        Returns:
            out: [num_tokens, hidden_size] of the dtype of `hidden_states`, the last stride is 1.
        """
    @staticmethod
    def new(
        hidden_states: Tensor,
        hc_fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_norm_eps: float,
        hc_eps: float,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """The streams after the last layer as one: `layer_input` of `mhc_pre`, without the other coefficients.

        ``out = sum_i (sigmoid(mixes[i] * hc_scale + hc_base[i]) + hc_eps) * hidden_states[i]`` in float32, rounded once.
        The contract is that of vLLM's `hc_head`.

        Args:
            hidden_states: [num_tokens, n, hidden_size], float32, float16 or bfloat16; the last stride is 1; n is 1, 2 or 4.
            hc_fn: [n, n * hidden_size] float32, contiguous and finite.
            hc_scale: [1] float32.
            hc_base: [n] float32.
            rms_norm_eps: added to the mean of squares of a token.
            hc_eps: as above.
            out: [num_tokens, hidden_size] of the dtype of `hidden_states`, the last stride is 1, written and returned; new
                unless given.

        Returns:
            out: [num_tokens, hidden_size] of the dtype of `hidden_states`, the last stride is 1.
        """

hc_head: _hc_head

class _mhc_post(_Attributes, Protocol):
    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        post_layer_mix: Tensor,
        comb_res_mix: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """The streams after a layer: ``out[j] = post_layer_mix[j] * x + sum_i comb_res_mix[i, j] * residual[i]``.

        Products and additions are rounded to float32 in this order, the result to its dtype. The contract is that of vLLM's
        `mhc_post`.

        Args:
            x: [num_tokens, hidden_size], the output of the layer; float32, float16 or bfloat16; the last stride is 1, as
                in `residual`, `comb_res_mix` and `out`.
            residual: [num_tokens, n, hidden_size] of the same dtype; n is 1, 2 or 4.
            post_layer_mix: [num_tokens, n, 1] float32, contiguous, `post_mix` of `mhc_pre`.
            comb_res_mix: [num_tokens, n, n] float32, `comb_mix` of `mhc_pre`.
            out: as `residual`, written and returned; new unless given; may be `residual` itself.

        Returns:
            out: as `residual`.
        """
    @staticmethod
    def new(
        x: Tensor,
        residual: Tensor,
        post_layer_mix: Tensor,
        comb_res_mix: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """The streams after a layer: ``out[j] = post_layer_mix[j] * x + sum_i comb_res_mix[i, j] * residual[i]``.

        Products and additions are rounded to float32 in this order, the result to its dtype. The contract is that of vLLM's
        `mhc_post`.

        Args:
            x: [num_tokens, hidden_size], the output of the layer; float32, float16 or bfloat16; the last stride is 1, as
                in `residual`, `comb_res_mix` and `out`.
            residual: [num_tokens, n, hidden_size] of the same dtype; n is 1, 2 or 4.
            post_layer_mix: [num_tokens, n, 1] float32, contiguous, `post_mix` of `mhc_pre`.
            comb_res_mix: [num_tokens, n, n] float32, `comb_mix` of `mhc_pre`.
            out: as `residual`, written and returned; new unless given; may be `residual` itself.

        Returns:
            out: as `residual`.
        """

mhc_post: _mhc_post

class _mhc_fused_post_pre(_Attributes, Protocol):
    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        post_layer_mix: Tensor,
        comb_res_mix: Tensor,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float,
        sinkhorn_repeat: int,
        norm_weight: Tensor | None = None,
        norm_eps: float = 0.0,
        *,
        residual_cur: Tensor | None = None,
        post_mix_cur: Tensor | None = None,
        comb_mix_cur: Tensor | None = None,
        layer_input_cur: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`mhc_post` of a layer and `mhc_pre` of the next one, of the streams rounded to their dtype.

        The contract is that of vLLM's `mhc_fused_post_pre`.

        Args:
            x: [num_tokens, hidden_size], the output of the layer; float32, float16 or bfloat16; the last stride is 1, as
                in `residual`, `comb_res_mix` and `out`.
            residual: [num_tokens, n, hidden_size] of the same dtype; n is 1, 2 or 4.
            post_layer_mix: [num_tokens, n, 1] float32, contiguous, `post_mix` of `mhc_pre`.
            comb_res_mix: [num_tokens, n, n] float32, `comb_mix` of `mhc_pre`.
            fn: [n * (n + 2), n * hidden_size] float32, contiguous and finite.
            hc_scale: [3] float32.
            hc_base: [n * (n + 2)] float32.
            rms_eps: added to the mean of squares of a token.
            hc_pre_eps: as above.
            hc_sinkhorn_eps: as above.
            hc_post_mult_value: as above.
            sinkhorn_repeat: at least 1.
            norm_weight: [hidden_size] of the dtype of `residual`, or None.
            norm_eps: added to the mean of squares of the layer's input.
            residual_cur: `out` of `mhc_post`, but not `residual` itself.
            post_mix_cur: `post_mix`, `comb_mix` and `layer_input` of `mhc_pre`.
            comb_mix_cur: `post_mix`, `comb_mix` and `layer_input` of `mhc_pre`.
            layer_input_cur: `post_mix`, `comb_mix` and `layer_input` of `mhc_pre`.

        Returns:
            residual_cur: `out` of `mhc_post`, but not `residual` itself.
            post_mix_cur: `post_mix`, `comb_mix` and `layer_input` of `mhc_pre`.
            comb_mix_cur: `post_mix`, `comb_mix` and `layer_input` of `mhc_pre`.
            layer_input_cur: `post_mix`, `comb_mix` and `layer_input` of `mhc_pre`.
        """
    @staticmethod
    def new(
        x: Tensor,
        residual: Tensor,
        post_layer_mix: Tensor,
        comb_res_mix: Tensor,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float,
        sinkhorn_repeat: int,
        norm_weight: Tensor | None = None,
        norm_eps: float = 0.0,
        *,
        residual_cur: Tensor | None = None,
        post_mix_cur: Tensor | None = None,
        comb_mix_cur: Tensor | None = None,
        layer_input_cur: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`mhc_post` of a layer and `mhc_pre` of the next one, of the streams rounded to their dtype.

        The contract is that of vLLM's `mhc_fused_post_pre`.

        Args:
            x: [num_tokens, hidden_size], the output of the layer; float32, float16 or bfloat16; the last stride is 1, as
                in `residual`, `comb_res_mix` and `out`.
            residual: [num_tokens, n, hidden_size] of the same dtype; n is 1, 2 or 4.
            post_layer_mix: [num_tokens, n, 1] float32, contiguous, `post_mix` of `mhc_pre`.
            comb_res_mix: [num_tokens, n, n] float32, `comb_mix` of `mhc_pre`.
            fn: [n * (n + 2), n * hidden_size] float32, contiguous and finite.
            hc_scale: [3] float32.
            hc_base: [n * (n + 2)] float32.
            rms_eps: added to the mean of squares of a token.
            hc_pre_eps: as above.
            hc_sinkhorn_eps: as above.
            hc_post_mult_value: as above.
            sinkhorn_repeat: at least 1.
            norm_weight: [hidden_size] of the dtype of `residual`, or None.
            norm_eps: added to the mean of squares of the layer's input.
            residual_cur: `out` of `mhc_post`, but not `residual` itself.
            post_mix_cur: `post_mix`, `comb_mix` and `layer_input` of `mhc_pre`.
            comb_mix_cur: `post_mix`, `comb_mix` and `layer_input` of `mhc_pre`.
            layer_input_cur: `post_mix`, `comb_mix` and `layer_input` of `mhc_pre`.

        Returns:
            residual_cur: `out` of `mhc_post`, but not `residual` itself.
            post_mix_cur: `post_mix`, `comb_mix` and `layer_input` of `mhc_pre`.
            comb_mix_cur: `post_mix`, `comb_mix` and `layer_input` of `mhc_pre`.
            layer_input_cur: `post_mix`, `comb_mix` and `layer_input` of `mhc_pre`.
        """

mhc_fused_post_pre: _mhc_fused_post_pre

class _layer_norm(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        epsilon: float,
        z: Tensor | None = None,
        mean: Tensor | None = None,
        rstd: Tensor | None = None,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        activation: str = 'swish',
    ) -> None:
        """Normalise rows, or groups within rows, to mean 0 and variance 1, with an optional gate.

        ``out = T((x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias)`` in float32, rounded once (Ba, Kiros and Hinton
        2016, arXiv:1607.06450). Without `z`, ``x = input``. With `z`, ``x = input * act(z)``; or, if `norm_before_gate`,
        the result is multiplied by act(z) before it is rounded. A group gives zeros or NaN if its sum, or its sum of
        squares, overflows float32.

        Args:
            out: [..., hidden_size], written; constant row stride; may be `input` itself.
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            weight: [hidden_size] of the same dtype, or None for ones and zeros.
            bias: [hidden_size] of the same dtype, or None for ones and zeros.
            epsilon: added to the variance.
            z: the shape and dtype of `input`, constant row stride; or None.
            mean: [groups * num_tokens] float32, written: the mean and ``1 / sqrt(var + epsilon)`` of the first group
                of all rows, then of the second, and so on; or None.
            rstd: [groups * num_tokens] float32, written: the mean and ``1 / sqrt(var + epsilon)`` of the first group
                of all rows, then of the second, and so on; or None.
            group_size: elements normalised together, a divisor of hidden_size; None for the whole row.
            norm_before_gate: whether the gate multiplies the norm, and not `input`.
            activation: act of the formula: "swish", which is also called "silu", or "sigmoid".
        """
    @staticmethod
    def new(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        epsilon: float,
        z: Tensor | None = None,
        mean: Tensor | None = None,
        rstd: Tensor | None = None,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        activation: str = 'swish',
    ) -> Tensor:
        """Normalise rows, or groups within rows, to mean 0 and variance 1, with an optional gate.

        ``out = T((x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias)`` in float32, rounded once (Ba, Kiros and Hinton
        2016, arXiv:1607.06450). Without `z`, ``x = input``. With `z`, ``x = input * act(z)``; or, if `norm_before_gate`,
        the result is multiplied by act(z) before it is rounded. A group gives zeros or NaN if its sum, or its sum of
        squares, overflows float32.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            weight: [hidden_size] of the same dtype, or None for ones and zeros.
            bias: [hidden_size] of the same dtype, or None for ones and zeros.
            epsilon: added to the variance.
            z: the shape and dtype of `input`, constant row stride; or None.
            mean: [groups * num_tokens] float32, written: the mean and ``1 / sqrt(var + epsilon)`` of the first group
                of all rows, then of the second, and so on; or None.
            rstd: [groups * num_tokens] float32, written: the mean and ``1 / sqrt(var + epsilon)`` of the first group
                of all rows, then of the second, and so on; or None.
            group_size: elements normalised together, a divisor of hidden_size; None for the whole row.
            norm_before_gate: whether the gate multiplies the norm, and not `input`.
            activation: act of the formula: "swish", which is also called "silu", or "sigmoid".

        Returns:
            out: [..., hidden_size].
        """

layer_norm: _layer_norm

class _rms_norm_gated(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        weight: Tensor | None,
        epsilon: float,
        z: Tensor | None = None,
        bias: Tensor | None = None,
        rstd: Tensor | None = None,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        activation: str = 'swish',
    ) -> None:
        """RMS norm of rows, or of groups within rows, with an optional gate (the norm of Mamba-2 mixers).

        ``out = T(norm(input * act(z)) * weight + bias)``, or ``T((norm(input) * weight + bias) * act(z))`` if
        `norm_before_gate`, with ``norm(x) = x / sqrt(mean(x^2) + epsilon)``; float32, rounded once.

        Args:
            out: [..., hidden_size], written; constant row stride; may be `input` itself.
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            weight: [hidden_size] of the same dtype, or None for ones.
            epsilon: added to the mean of squares.
            z: the gate, of the shape and dtype of `input`, constant row stride; or None.
            bias: [hidden_size] of the same dtype, or None for zeros.
            rstd: [groups * num_tokens] float32, written: ``1 / sqrt(mean(x^2) + epsilon)`` of the first group of all rows,
                then of the second, and so on; or None.
            group_size: elements normalised together, a divisor of hidden_size; None for the whole row.
            norm_before_gate: whether the gate multiplies the norm, and not `input`.
            activation: act of the formula: "swish", which is also called "silu", or "sigmoid".
        """
    @staticmethod
    def new(
        input: Tensor,
        weight: Tensor | None,
        epsilon: float,
        z: Tensor | None = None,
        bias: Tensor | None = None,
        rstd: Tensor | None = None,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        activation: str = 'swish',
    ) -> Tensor:
        """RMS norm of rows, or of groups within rows, with an optional gate (the norm of Mamba-2 mixers).

        ``out = T(norm(input * act(z)) * weight + bias)``, or ``T((norm(input) * weight + bias) * act(z))`` if
        `norm_before_gate`, with ``norm(x) = x / sqrt(mean(x^2) + epsilon)``; float32, rounded once.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            weight: [hidden_size] of the same dtype, or None for ones.
            epsilon: added to the mean of squares.
            z: the gate, of the shape and dtype of `input`, constant row stride; or None.
            bias: [hidden_size] of the same dtype, or None for zeros.
            rstd: [groups * num_tokens] float32, written: ``1 / sqrt(mean(x^2) + epsilon)`` of the first group of all rows,
                then of the second, and so on; or None.
            group_size: elements normalised together, a divisor of hidden_size; None for the whole row.
            norm_before_gate: whether the gate multiplies the norm, and not `input`.
            activation: act of the formula: "swish", which is also called "silu", or "sigmoid".

        Returns:
            out: [..., hidden_size].
        """

rms_norm_gated: _rms_norm_gated

class _rms_norm(_Attributes, Protocol):
    def __call__(self, out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
        """Scale each row of `input` to unit root mean square, then by `weight`.

        ``out = T(T(input / sqrt(mean(input^2) + epsilon)) * weight)``, the mean in float32 over the last dimension
        (Zhang and Sennrich 2019, arXiv:1910.07467).

        If the sum of squares of a row overflows float32, its mean is infinite: finite elements become 0, infinite ones NaN.
        Squares below 2^-126 may count as 0. This holds for every RMS norm here.

        Args:
            out: [..., hidden_size], written; may be `input` itself.
            input: [..., hidden_size], float32, float16 or bfloat16; up to three leading dimensions of any strides.
            weight: [hidden_size] of the same dtype, or None for ones.
            epsilon: added to the mean of squares.
        """
    @staticmethod
    def new(input: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        """Scale each row of `input` to unit root mean square, then by `weight`.

        ``out = T(T(input / sqrt(mean(input^2) + epsilon)) * weight)``, the mean in float32 over the last dimension
        (Zhang and Sennrich 2019, arXiv:1910.07467).

        If the sum of squares of a row overflows float32, its mean is infinite: finite elements become 0, infinite ones NaN.
        Squares below 2^-126 may count as 0. This holds for every RMS norm here.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; up to three leading dimensions of any strides.
            weight: [hidden_size] of the same dtype, or None for ones.
            epsilon: added to the mean of squares.

        Returns:
            out: [..., hidden_size].
        """

rms_norm: _rms_norm

class _fused_add_rms_norm(_Attributes, Protocol):
    def __call__(self, input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
        """Add `residual` to `input`, keep the sum in `residual` and its RMS norm in `input`.

        ``residual = T(input + residual); input = T(T(residual / sqrt(mean(residual^2) + epsilon)) * weight)``. The norm is
        computed from the rounded sum.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16, read and written; constant row stride.
            residual: the same shape and dtype, read and written; constant row stride.
            weight: [hidden_size] of the same dtype, or None for ones.
            epsilon: added to the mean of squares.
        """

fused_add_rms_norm: _fused_add_rms_norm

class _gemma_rms_norm(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        weight: Tensor,
        epsilon: float,
        residual: Tensor | None = None,
        residual_out: Tensor | None = None,
    ) -> None:
        """RMS norm with the weight ``1 + weight``, rounded once (the norm of the Gemma models).

        ``z = input`` or ``residual_out = input + residual``; ``out = T(z / sqrt(mean(z^2) + epsilon) * (1 + weight))``.
        The sum is rounded to the dtype of `residual_out`.

        Args:
            out: [..., hidden_size], written; may be `input` itself.
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            weight: [hidden_size] of the same dtype, zero for no scaling.
            epsilon: added to the mean of squares.
            residual: the shape of `input`, of its dtype or float32; or None.
            residual_out: the shape of `input`, written, given with `residual`; float32 if `input` is float16 or `residual`
                is float32, else the dtype of `input`.
        """
    @staticmethod
    def new(
        input: Tensor,
        weight: Tensor,
        epsilon: float,
        residual: Tensor | None = None,
        residual_out: Tensor | None = None,
    ) -> Tensor:
        """RMS norm with the weight ``1 + weight``, rounded once (the norm of the Gemma models).

        ``z = input`` or ``residual_out = input + residual``; ``out = T(z / sqrt(mean(z^2) + epsilon) * (1 + weight))``.
        The sum is rounded to the dtype of `residual_out`.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            weight: [hidden_size] of the same dtype, zero for no scaling.
            epsilon: added to the mean of squares.
            residual: the shape of `input`, of its dtype or float32; or None.
            residual_out: the shape of `input`, written, given with `residual`; float32 if `input` is float16 or `residual`
                is float32, else the dtype of `input`.

        Returns:
            out: [..., hidden_size].
        """

gemma_rms_norm: _gemma_rms_norm

class _fused_qk_norm_rope(_Attributes, Protocol):
    def __call__(
        self,
        qkv: Tensor,
        num_heads_q: int,
        num_heads_k: int,
        num_heads_v: int,
        head_dim: int,
        eps: float,
        q_weight: Tensor,
        k_weight: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool,
        position_ids: Tensor,
    ) -> None:
        """RMS norm of every query and key head, then rotary embedding, in place; value heads are not touched.

        Norm and rotation are in float32 and rounded once. The first ``rotary_dim`` elements of a head rotate in pairs:
        (j, j + rotary_dim / 2) if `is_neox`, else (2j, 2j + 1) (Su et al. 2021, arXiv:2104.09864). Heads of a token with a
        position outside the cache are left unchanged.

        Args:
            qkv: [num_tokens, (num_heads_q + num_heads_k + num_heads_v) * head_dim], float16 or bfloat16, read and written;
                elements of a row are contiguous.
            num_heads_q: heads of each kind, in this order in a row.
            num_heads_k: heads of each kind, in this order in a row.
            num_heads_v: heads of each kind, in this order in a row.
            head_dim: 64, 128 or 256.
            eps: added to the mean of squares.
            q_weight: [head_dim] of the same dtype.
            k_weight: [head_dim] of the same dtype.
            cos_sin_cache: [max_position, rotary_dim], float32, float16 or bfloat16, contiguous, of at least one row;
                cosines in the first half of a row, sines in the second; rotary_dim even, at most head_dim.
            is_neox: which elements form a pair.
            position_ids: [num_tokens] int64, any stride.
        """

fused_qk_norm_rope: _fused_qk_norm_rope

class _rms_norm_static_fp8_quant(_Attributes, Protocol):
    def __call__(self, result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float) -> None:
        """RMS norm of `input`, written as fp8 under one given scale.

        The norm is rounded as by `rms_norm`; then ``result = fp8(norm * (1 / scale))``, saturating at +-448
        (224 for float8_e4m3fnuz); NaN becomes the largest value. `static_scaled_fp8_quant` says what happens if the
        reciprocal of the scale is not finite.

        Args:
            result: [..., hidden_size], float8_e4m3fn or float8_e4m3fnuz, written; constant row stride.
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            weight: [hidden_size] of the same dtype.
            scale: one float32 on the device; ``result * scale`` dequantizes.
            epsilon: added to the mean of squares.
        """
    @staticmethod
    def new(
        input: Tensor,
        weight: Tensor,
        scale: Tensor,
        epsilon: float,
        *,
        quant_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """RMS norm of `input`, written as fp8 under one given scale.

        The norm is rounded as by `rms_norm`; then ``result = fp8(norm * (1 / scale))``, saturating at +-448
        (224 for float8_e4m3fnuz); NaN becomes the largest value. `static_scaled_fp8_quant` says what happens if the
        reciprocal of the scale is not finite.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            weight: [hidden_size] of the same dtype.
            scale: one float32 on the device; ``result * scale`` dequantizes.
            epsilon: added to the mean of squares.
            quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

        Returns:
            result: [..., hidden_size], float8_e4m3fn or float8_e4m3fnuz.
        """

rms_norm_static_fp8_quant: _rms_norm_static_fp8_quant

class _fused_add_rms_norm_static_fp8_quant(_Attributes, Protocol):
    def __call__(
        self,
        result: Tensor,
        input: Tensor,
        residual: Tensor,
        weight: Tensor,
        scale: Tensor,
        epsilon: float,
    ) -> None:
        """Add `residual` to `input`, keep the sum in `residual`, and write its RMS norm as fp8 under one given scale.

        Sum and norm are those of `fused_add_rms_norm`, fp8 results those of `rms_norm_static_fp8_quant`. `input` is not
        written.

        Args:
            result: [..., hidden_size], float8_e4m3fn or float8_e4m3fnuz, written; constant row stride.
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            residual: the shape and dtype of `input`, read and written; constant row stride.
            weight: [hidden_size] of the same dtype.
            scale: one float32 on the device; ``result * scale`` dequantizes.
            epsilon: added to the mean of squares.
        """
    @staticmethod
    def new(
        input: Tensor,
        residual: Tensor,
        weight: Tensor,
        scale: Tensor,
        epsilon: float,
        *,
        quant_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Add `residual` to `input`, keep the sum in `residual`, and write its RMS norm as fp8 under one given scale.

        Sum and norm are those of `fused_add_rms_norm`, fp8 results those of `rms_norm_static_fp8_quant`. `input` is not
        written.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            residual: the shape and dtype of `input`, read and written; constant row stride.
            weight: [hidden_size] of the same dtype.
            scale: one float32 on the device; ``result * scale`` dequantizes.
            epsilon: added to the mean of squares.
            quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

        Returns:
            result: [..., hidden_size], float8_e4m3fn or float8_e4m3fnuz.
        """

fused_add_rms_norm_static_fp8_quant: _fused_add_rms_norm_static_fp8_quant

class _awq_dequantize(_Attributes, Protocol):
    def __call__(
        self,
        qweight: Tensor,
        scales: Tensor,
        zeros: Tensor,
        split_k_iters: int,
        thx: int,
        thy: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Dequantize an AWQ weight: ``out = (quant - zero) * scale``, rounded once.

        A word holds eight columns in the order 0 2 4 6 1 3 5 7, starting at its lowest nibble (Lin et al. 2023,
        arXiv:2306.00978, as AutoAWQ packs it). Zero points are used as they are stored.

        Args:
            qweight: [K, N / 8] int32, contiguous.
            scales: [num_groups, N], float32, float16 or bfloat16, contiguous; num_groups divides K.
            zeros: [num_groups, N / 8] int32, packed as the weight, contiguous.
            split_k_iters: for compatibility with vLLM; no effect.
            thx: for compatibility with vLLM; no effect.
            thy: for compatibility with vLLM; no effect.
            out: [K, N] of the dtype of `scales`, contiguous, written and returned; new unless given.

        Returns:
            out: [K, N] of the dtype of `scales`.
        """
    @staticmethod
    def new(
        qweight: Tensor,
        scales: Tensor,
        zeros: Tensor,
        split_k_iters: int,
        thx: int,
        thy: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Dequantize an AWQ weight: ``out = (quant - zero) * scale``, rounded once.

        A word holds eight columns in the order 0 2 4 6 1 3 5 7, starting at its lowest nibble (Lin et al. 2023,
        arXiv:2306.00978, as AutoAWQ packs it). Zero points are used as they are stored.

        Args:
            qweight: [K, N / 8] int32, contiguous.
            scales: [num_groups, N], float32, float16 or bfloat16, contiguous; num_groups divides K.
            zeros: [num_groups, N / 8] int32, packed as the weight, contiguous.
            split_k_iters: for compatibility with vLLM; no effect.
            thx: for compatibility with vLLM; no effect.
            thy: for compatibility with vLLM; no effect.
            out: [K, N] of the dtype of `scales`, contiguous, written and returned; new unless given.

        Returns:
            out: [K, N] of the dtype of `scales`.
        """

awq_dequantize: _awq_dequantize

class _static_scaled_fp8_quant(_Attributes, Protocol):
    def __call__(
        self,
        result: Tensor,
        input: Tensor,
        scale: Tensor,
        group_shape: tuple[int, int] | None = None,
    ) -> None:
        """Quantize to fp8 with static scales, per tensor, token, channel or block: ``result = fp8(input * (1 / scale))``.

        The multiplication is by the float32 reciprocal and saturates at +-448; a NaN becomes +448. A scale may have any
        sign. With a scale without a finite reciprocal (of magnitude up to 2^-128), results are 0, with a NaN scale +448; in
        both cases infinities and NaN become +448.

        Args:
            result: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or uint8, written; constant row stride.
            input: the same shape, float32, float16 or bfloat16; constant row stride. It has num_tokens rows.
            scale: float32, any strides. One element: for all elements. [n]: one for each group of rows, or of columns, as
                `group_shape` says. [m, n]: one for each of m x n blocks of equal size.
            group_shape: (rows, columns) that share a scale, -1 for all of them: (-1, 1) per channel, (1, -1) per token.
                Required for a scale [n] of several elements; must agree with a scale [m, n]. Groups divide the rows and
                columns exactly.
        """
    @staticmethod
    def new(
        input: Tensor,
        scale: Tensor,
        group_shape: tuple[int, int] | None = None,
        *,
        quant_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Quantize to fp8 with static scales, per tensor, token, channel or block: ``result = fp8(input * (1 / scale))``.

        The multiplication is by the float32 reciprocal and saturates at +-448; a NaN becomes +448. A scale may have any
        sign. With a scale without a finite reciprocal (of magnitude up to 2^-128), results are 0, with a NaN scale +448; in
        both cases infinities and NaN become +448.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride. It has num_tokens rows.
            scale: float32, any strides. One element: for all elements. [n]: one for each group of rows, or of columns, as
                `group_shape` says. [m, n]: one for each of m x n blocks of equal size.
            group_shape: (rows, columns) that share a scale, -1 for all of them: (-1, 1) per channel, (1, -1) per token.
                Required for a scale [n] of several elements; must agree with a scale [m, n]. Groups divide the rows and
                columns exactly.
            quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

        Returns:
            result: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or uint8.
        """

static_scaled_fp8_quant: _static_scaled_fp8_quant

class _static_scaled_int8_quant(_Attributes, Protocol):
    def __call__(self, result: Tensor, input: Tensor, scale: Tensor, azp: Tensor | None) -> None:
        """Quantize to int8 with one static scale: ``result = int8(input / scale)``, or ``int8(input * (1 / scale)) + azp``.

        Symmetric quantization rounds the true quotient, asymmetric quantization the product with the float32 reciprocal, to
        int32 before the zero point is added. Every step saturates; NaN counts as 0. So, before `azp` is added, a scale
        of 0 gives -128, 127 and (for 0 / 0) 0, and a NaN scale gives 0. A scale may be negative.

        Args:
            result: [..., hidden_size] int8, written; constant row stride.
            input: the same shape, float32, float16 or bfloat16; constant row stride.
            scale: one float32.
            azp: one int32, the zero point, which may lie outside int8; or None for 0.
        """
    @staticmethod
    def new(input: Tensor, scale: Tensor, azp: Tensor | None) -> Tensor:
        """Quantize to int8 with one static scale: ``result = int8(input / scale)``, or ``int8(input * (1 / scale)) + azp``.

        Symmetric quantization rounds the true quotient, asymmetric quantization the product with the float32 reciprocal, to
        int32 before the zero point is added. Every step saturates; NaN counts as 0. So, before `azp` is added, a scale
        of 0 gives -128, 127 and (for 0 / 0) 0, and a NaN scale gives 0. A scale may be negative.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            scale: one float32.
            azp: one int32, the zero point, which may lie outside int8; or None for 0.

        Returns:
            result: [..., hidden_size] int8.
        """

static_scaled_int8_quant: _static_scaled_int8_quant

class _dynamic_scaled_fp8_quant(_Attributes, Protocol):
    def __call__(self, result: Tensor, input: Tensor, scale: Tensor) -> None:
        """Quantize to fp8 with one dynamic scale: ``scale = max|input| / 448; result = fp8(input * (1 / scale))``.

        The multiplication is by the float32 reciprocal. The maximum ignores NaN; a NaN becomes +448. If the reciprocal is
        not finite (no magnitude above about 1e-36), results are 0. An infinity makes the scale infinite: it becomes +448,
        and finite elements become 0. The scale is that of the whole tensor, so that a row depends on all others: no switch
        makes it batch invariant, and activations need `dynamic_per_token_scaled_fp8_quant` for that.

        Args:
            result: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or uint8, written; constant row stride.
            input: the same shape, float32, float16 or bfloat16; constant row stride.
            scale: float32, contiguous; its first element is written.
        """
    @staticmethod
    def new(input: Tensor, *, quant_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Quantize to fp8 with one dynamic scale: ``scale = max|input| / 448; result = fp8(input * (1 / scale))``.

        The multiplication is by the float32 reciprocal. The maximum ignores NaN; a NaN becomes +448. If the reciprocal is
        not finite (no magnitude above about 1e-36), results are 0. An infinity makes the scale infinite: it becomes +448,
        and finite elements become 0. The scale is that of the whole tensor, so that a row depends on all others: no switch
        makes it batch invariant, and activations need `dynamic_per_token_scaled_fp8_quant` for that.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

        Returns:
            result: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or uint8.
            scale: [1] float32.
        """

dynamic_scaled_fp8_quant: _dynamic_scaled_fp8_quant

class _dynamic_per_token_scaled_fp8_quant(_Attributes, Protocol):
    def __call__(self, result: Tensor, input: Tensor, scale: Tensor, scale_ub: Tensor | None = None) -> None:
        """Quantize to fp8 with one dynamic scale per token: ``result = fp8(input / scale)``, a true division.

        ``scale = max(min(max|input|, scale_ub) / 448, 1 / (448 * 512))``, with the maximum of the row, which ignores NaN;
        a NaN becomes +448. Values above the bound saturate. Rows of zeros have the smallest scale.

        Args:
            result: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or uint8, written; constant row stride.
            input: the same shape, float32, float16 or bfloat16; constant row stride.
            scale: float32, contiguous; its first elements, one for each row, are written.
            scale_ub: one float32, an upper bound of the maximum (not of the scale); NaN and None are no bound.
        """
    @staticmethod
    def new(
        input: Tensor,
        scale_ub: Tensor | None = None,
        *,
        quant_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Quantize to fp8 with one dynamic scale per token: ``result = fp8(input / scale)``, a true division.

        ``scale = max(min(max|input|, scale_ub) / 448, 1 / (448 * 512))``, with the maximum of the row, which ignores NaN;
        a NaN becomes +448. Values above the bound saturate. Rows of zeros have the smallest scale.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            scale_ub: one float32, an upper bound of the maximum (not of the scale); NaN and None are no bound.
            quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

        Returns:
            result: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or uint8.
            scale: [num_tokens, 1] float32.
        """

dynamic_per_token_scaled_fp8_quant: _dynamic_per_token_scaled_fp8_quant

class _dynamic_scaled_int8_quant(_Attributes, Protocol):
    def __call__(self, result: Tensor, input: Tensor, scale: Tensor, azp: Tensor | None) -> None:
        """Quantize to int8 with one dynamic scale and, with `azp`, one zero point per token.

        Symmetric: ``scale = max|input| / 127; result = int8(input * (127 / max|input|))``, and 0 where that factor is not
        finite (no magnitude above about 2^-121). Asymmetric: ``scale = (max - min) / 255; azp = round(-128 -
        min / scale); result = int8(round(input * (1 / scale)) + azp)``, so that ``input`` is about ``scale * (result -
        azp)``. If the reciprocal of this scale is not finite, as for a constant row, the range is extended to include 0; if
        it is still not finite, the scale is 1. Integers are int32 and saturate, as do additions. Minimum and maximum
        ignore NaN, which quantizes like 0. An infinite scale quantizes everything like 0.

        Args:
            result: [..., hidden_size] int8, written; constant row stride.
            input: the same shape, float32, float16 or bfloat16; constant row stride.
            scale: one float32 per row, contiguous, written.
            azp: one int32 per row, contiguous, written: the zero point, which may lie outside int8. Or None: symmetric.
        """
    @staticmethod
    def new(input: Tensor, azp: Tensor | None) -> tuple[Tensor, Tensor]:
        """Quantize to int8 with one dynamic scale and, with `azp`, one zero point per token.

        Symmetric: ``scale = max|input| / 127; result = int8(input * (127 / max|input|))``, and 0 where that factor is not
        finite (no magnitude above about 2^-121). Asymmetric: ``scale = (max - min) / 255; azp = round(-128 -
        min / scale); result = int8(round(input * (1 / scale)) + azp)``, so that ``input`` is about ``scale * (result -
        azp)``. If the reciprocal of this scale is not finite, as for a constant row, the range is extended to include 0; if
        it is still not finite, the scale is 1. Integers are int32 and saturate, as do additions. Minimum and maximum
        ignore NaN, which quantizes like 0. An infinite scale quantizes everything like 0.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            azp: one int32 per row, contiguous, written: the zero point, which may lie outside int8. Or None: symmetric.

        Returns:
            result: [..., hidden_size] int8.
            scale: [num_tokens, 1] float32.
        """

dynamic_scaled_int8_quant: _dynamic_scaled_int8_quant

class _scaled_fp4_quant(_Attributes, Protocol):
    def __call__(
        self,
        output: Tensor,
        input: Tensor,
        output_scale: Tensor,
        input_scale: Tensor,
        is_sf_swizzled_layout: bool,
    ) -> None:
        """NVFP4: e2m1 values and, for every sixteen elements, an e4m3 scale, ``s = e4m3(g * (max|x| * (1/6)))``.

        ``output = e2m1(x * r)`` with ``r = 1 / (s * (1 / g))``, or 0 where s is 0, so that x is about ``output * s / g``.
        Every step is rounded to float32; e2m1 values and scales round to nearest even and saturate, at +-6 and 448. The
        maximum ignores NaN; a NaN becomes +6. Two e2m1 values share a byte, the first in its low nibble (NVIDIA 2025,
        "Pretraining Large Language Models with NVFP4", arXiv:2509.25149).

        Args:
            output: [..., hidden_size / 2] uint8, written; constant row stride.
            input: [..., hidden_size], float16 or bfloat16, hidden_size a multiple of 16; constant row stride.
            output_scale: written; contiguous, float8_e4m3fn or uint8 of [rows, columns], or int32 of [rows, columns / 4].
                With is_sf_swizzled_layout the rows are num_tokens rounded up to 128 and the columns hidden_size / 16
                rounded up to 4, in tiles (see `_shared/fp4_tiles.py`) that are padded with zeros; else [num_tokens,
                hidden_size / 16].
            input_scale: g, one float32, a factor of the input: normally ``448 * 6 / max|input|``.
            is_sf_swizzled_layout: whether scales lie in tiles.
        """
    @staticmethod
    def new(input: Tensor, input_scale: Tensor, is_sf_swizzled_layout: bool) -> tuple[Tensor, Tensor]:
        """NVFP4: e2m1 values and, for every sixteen elements, an e4m3 scale, ``s = e4m3(g * (max|x| * (1/6)))``.

        ``output = e2m1(x * r)`` with ``r = 1 / (s * (1 / g))``, or 0 where s is 0, so that x is about ``output * s / g``.
        Every step is rounded to float32; e2m1 values and scales round to nearest even and saturate, at +-6 and 448. The
        maximum ignores NaN; a NaN becomes +6. Two e2m1 values share a byte, the first in its low nibble (NVIDIA 2025,
        "Pretraining Large Language Models with NVFP4", arXiv:2509.25149).

        Args:
            input: [..., hidden_size], float16 or bfloat16, hidden_size a multiple of 16; constant row stride.
            input_scale: g, one float32, a factor of the input: normally ``448 * 6 / max|input|``.
            is_sf_swizzled_layout: whether scales lie in tiles.

        Returns:
            output: [..., hidden_size / 2] uint8.
            output_scale: contiguous, float8_e4m3fn or uint8 of [rows, columns], or int32 of [rows, columns / 4].
                With is_sf_swizzled_layout the rows are num_tokens rounded up to 128 and the columns
                hidden_size / 16 rounded up to 4, in tiles (see `_shared/fp4_tiles.py`) that are padded
                with zeros; else [num_tokens, hidden_size / 16].
        """

scaled_fp4_quant: _scaled_fp4_quant

class _silu_and_mul_nvfp4_quant(_Attributes, Protocol):
    def __call__(self, result: Tensor, result_block_scale: Tensor, input: Tensor, input_global_scale: Tensor) -> None:
        """`scaled_fp4_quant` of a gated activation: of ``T(silu(gate) * up)`` for the halves ``input = [gate, up]``.

        The product is computed in float32 and rounded to the element type once, where `silu_and_mul` rounds twice.

        Args:
            result: [..., hidden_size / 2] uint8, written; constant row stride.
            result_block_scale: written; in tiles that are padded with zeros, as in `scaled_fp4_quant`.
            input: [..., 2 * hidden_size], float16 or bfloat16, hidden_size a multiple of 16; constant row stride.
            input_global_scale: g, one float32, a factor of the product.
        """
    @staticmethod
    def new(input: Tensor, input_global_scale: Tensor) -> tuple[Tensor, Tensor]:
        """`scaled_fp4_quant` of a gated activation: of ``T(silu(gate) * up)`` for the halves ``input = [gate, up]``.

        The product is computed in float32 and rounded to the element type once, where `silu_and_mul` rounds twice.

        Args:
            input: [..., 2 * hidden_size], float16 or bfloat16, hidden_size a multiple of 16; constant row stride.
            input_global_scale: g, one float32, a factor of the product.

        Returns:
            result: [..., hidden_size / 2] uint8.
            result_block_scale: in tiles that are padded with zeros, as in `scaled_fp4_quant`.
        """

silu_and_mul_nvfp4_quant: _silu_and_mul_nvfp4_quant

class _scaled_fp4_experts_quant(_Attributes, Protocol):
    def __call__(
        self,
        output: Tensor,
        output_scale: Tensor,
        input: Tensor,
        input_global_scale: Tensor,
        input_offset_by_experts: Tensor,
        output_scale_offset_by_experts: Tensor,
    ) -> None:
        """`scaled_fp4_quant` of rows that belong to experts: each expert has its own global scale and its own tiles.

        Rows ``o[e]`` to ``o[e + 1] - 1`` belong to expert e. Their scales lie in tiles that begin at row ``t[e]`` of
        `output_scale`. The padding of the last tile of an expert becomes 0; rows after it are left unchanged.
        Experts may have no rows; experts must not share tiles. Nothing is written for the experts from the
        first invalid offset on (below 0, below the previous offset, or beyond the rows), nor for an expert with tiles that
        reach beyond `output_scale`.

        Args:
            output: [num_tokens, hidden_size / 2] uint8, written; constant row stride.
            output_scale: [rows, columns / 4] int32, or [rows, columns] uint8 or float8_e4m3fn, columns being hidden_size /
                16 rounded up to 4, contiguous, written.
            input: [num_tokens, hidden_size], float16 or bfloat16, hidden_size a multiple of 16; constant row stride.
            input_global_scale: [num_experts] float32, contiguous: g of each expert, a factor of its rows.
            input_offset_by_experts: [num_experts + 1] int32, contiguous: o.
            output_scale_offset_by_experts: [num_experts + 1] int32, contiguous: t, in rows, multiples of 128.
        """
    @staticmethod
    def new(
        input: Tensor,
        input_global_scale: Tensor,
        input_offset_by_experts: Tensor,
        output_scale_offset_by_experts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`scaled_fp4_quant` of rows that belong to experts: each expert has its own global scale and its own tiles.

        Rows ``o[e]`` to ``o[e + 1] - 1`` belong to expert e. Their scales lie in tiles that begin at row ``t[e]`` of
        `output_scale`. The padding of the last tile of an expert becomes 0; rows after it are left unchanged.
        Experts may have no rows; experts must not share tiles. Nothing is written for the experts from the
        first invalid offset on (below 0, below the previous offset, or beyond the rows), nor for an expert with tiles that
        reach beyond `output_scale`.

        Args:
            input: [num_tokens, hidden_size], float16 or bfloat16, hidden_size a multiple of 16; constant row stride.
            input_global_scale: [num_experts] float32, contiguous: g of each expert, a factor of its rows.
            input_offset_by_experts: [num_experts + 1] int32, contiguous: o.
            output_scale_offset_by_experts: [num_experts + 1] int32, contiguous: t, in rows, multiples of 128.

        Returns:
            output: [num_tokens, hidden_size / 2] uint8.
            output_scale: [rows, columns / 4] int32, or [rows, columns] uint8 or float8_e4m3fn, columns being
                hidden_size / 16 rounded up to 4.
        """

scaled_fp4_experts_quant: _scaled_fp4_experts_quant

class _silu_and_mul_scaled_fp4_experts_quant(_Attributes, Protocol):
    def __call__(
        self,
        output: Tensor,
        output_scale: Tensor,
        input: Tensor,
        input_global_scale: Tensor,
        input_offset_by_experts: Tensor,
        output_scale_offset_by_experts: Tensor,
    ) -> None:
        """`scaled_fp4_experts_quant` of a gated activation: of ``T(silu(gate) * up)`` for halves ``input = [gate, up]``.

        The product is computed in float32 and rounded to the element type once. Experts must not share tiles.

        Args:
            output: as in
                `scaled_fp4_experts_quant`.
            output_scale: as in
                `scaled_fp4_experts_quant`.
            input: [num_tokens, 2 * hidden_size], float16 or bfloat16, hidden_size a multiple of 16; constant row stride.
            input_global_scale: as in
                `scaled_fp4_experts_quant`.
            input_offset_by_experts: as in
                `scaled_fp4_experts_quant`.
            output_scale_offset_by_experts: as in
                `scaled_fp4_experts_quant`.
        """
    @staticmethod
    def new(
        input: Tensor,
        input_global_scale: Tensor,
        input_offset_by_experts: Tensor,
        output_scale_offset_by_experts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`scaled_fp4_experts_quant` of a gated activation: of ``T(silu(gate) * up)`` for halves ``input = [gate, up]``.

        The product is computed in float32 and rounded to the element type once. Experts must not share tiles.

        Args:
            input: [num_tokens, 2 * hidden_size], float16 or bfloat16, hidden_size a multiple of 16; constant row stride.
            input_global_scale: as in
                `scaled_fp4_experts_quant`.
            input_offset_by_experts: as in
                `scaled_fp4_experts_quant`.
            output_scale_offset_by_experts: as in
                `scaled_fp4_experts_quant`.

        Returns:
            output: as in `scaled_fp4_experts_quant`.
            output_scale: as in `scaled_fp4_experts_quant`.
        """

silu_and_mul_scaled_fp4_experts_quant: _silu_and_mul_scaled_fp4_experts_quant

class _ggml_dequantize(_Attributes, Protocol):
    def __call__(
        self,
        W: Tensor,
        quant_type: int,
        m: int,
        n: int,
        dtype: torch.dtype | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Dequantize a weight of a GGUF file: computed in float32, rounded to the dtype of `out`.

        Types and their numbers in the format: in blocks of 32 elements 2 Q4_0, 3 Q4_1, 6 Q5_0, 7 Q5_1, 8 Q8_0, 20 IQ4_NL;
        in blocks of 256 10 to 14 Q2_K to Q6_K, 16 IQ2_XXS, 17 IQ2_XS, 18 IQ3_XXS, 19 IQ1_S, 21 IQ3_S, 22 IQ2_S, 23 IQ4_XS,
        29 IQ1_M. The float32 values are those of the format's own decoder (the `gguf` package), bit for bit.

        Args:
            W: uint8 of any shape, contiguous: the blocks of the rows, one after another.
            quant_type: the type's number.
            m: rows and columns of the weight; n is a multiple of the block.
            n: rows and columns of the weight; n is a multiple of the block.
            dtype: of a new `out`: float32, float16 or bfloat16; None is float16.
            out: [m, n] of any of these dtypes, contiguous, written and returned; new unless given.

        Returns:
            out: [m, n] of any of these dtypes.
        """
    @staticmethod
    def new(
        W: Tensor,
        quant_type: int,
        m: int,
        n: int,
        dtype: torch.dtype | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Dequantize a weight of a GGUF file: computed in float32, rounded to the dtype of `out`.

        Types and their numbers in the format: in blocks of 32 elements 2 Q4_0, 3 Q4_1, 6 Q5_0, 7 Q5_1, 8 Q8_0, 20 IQ4_NL;
        in blocks of 256 10 to 14 Q2_K to Q6_K, 16 IQ2_XXS, 17 IQ2_XS, 18 IQ3_XXS, 19 IQ1_S, 21 IQ3_S, 22 IQ2_S, 23 IQ4_XS,
        29 IQ1_M. The float32 values are those of the format's own decoder (the `gguf` package), bit for bit.

        Args:
            W: uint8 of any shape, contiguous: the blocks of the rows, one after another.
            quant_type: the type's number.
            m: rows and columns of the weight; n is a multiple of the block.
            n: rows and columns of the weight; n is a multiple of the block.
            dtype: of a new `out`: float32, float16 or bfloat16; None is float16.
            out: [m, n] of any of these dtypes, contiguous, written and returned; new unless given.

        Returns:
            out: [m, n] of any of these dtypes.
        """

ggml_dequantize: _ggml_dequantize

class _gptq_shuffle(_Attributes, Protocol):
    def __call__(self, q_weight: Tensor, q_perm: Tensor | None, bit: int) -> None:
        """Prepare a GPTQ weight for GEMMs, in place: permute rows, interleave the fields of words.

        Row r becomes row ``q_perm[r]`` of the given weight, or 0 if that row does not exist. A word then holds its even
        fields in the low half, from the lowest bits, and its odd fields in the high half. Fields of 8 bits keep their
        positions. A unit of 32 fields of 3 bits has three words of ten fields each, in this order; bit j of the last two
        fields is bit 15 and bit 31 of word j. (This is ExLlama's layout.)

        Args:
            q_weight: [K * bit / 32, N] int32, contiguous, read and written. Row k is field ``k % (32 / bit)``, from the
                lowest bits, of word ``k // (32 / bit)``; for 3 bits, three words are one string of 32 fields.
            q_perm: [K] int32, contiguous; empty or None: rows keep their order.
            bit: 2, 3, 4 or 8.
        """

gptq_shuffle: _gptq_shuffle

class _per_token_group_fp8_quant(_Attributes, Protocol):
    def __call__(
        self,
        input: Tensor,
        output_q: Tensor,
        output_s: Tensor,
        group_size: int,
        eps: float,
        fp8_min: float,
        fp8_max: float,
        scale_ue8m0: bool,
    ) -> None:
        """Quantize to fp8 with one dynamic scale per group of contiguous elements, by a true division.

        ``output_s = max(max|input|, eps) / fp8_max`` over a group, rounded up to a power of two of at least 1e-10 if
        `scale_ue8m0`; ``output_q = fp8(clamp(input / output_s, fp8_min, fp8_max))``. The maximum ignores NaN. NaN
        and infinities become fp8_min.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            output_q: the same shape, float8_e4m3fn, float8_e4m3fnuz or uint8, written; constant row stride.
            output_s: [num_tokens, hidden_size / group_size] float32, written; any strides: row-major, column-major, or
                column-major with columns padded for TMA.
            group_size: any divisor of hidden_size; multiples of 16 bytes (8 elements of 16 bits) are fast.
            eps: lower bound of the maximum of a group, 2^-100 to 2^100.
            fp8_min: the smallest fp8 value, -448 to 0, and the largest, 1 to 448; for float8_e4m3fnuz, -240 to 0
                and 1 to 240, usually -224 and 224.
            fp8_max: the smallest fp8 value, -448 to 0, and the largest, 1 to 448; for float8_e4m3fnuz, -240 to 0
                and 1 to 240, usually -224 and 224.
            scale_ue8m0: whether scales are powers of two.
        """
    @staticmethod
    def new(
        input: Tensor,
        group_size: int,
        eps: float,
        fp8_min: float,
        fp8_max: float,
        scale_ue8m0: bool,
        *,
        quant_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Quantize to fp8 with one dynamic scale per group of contiguous elements, by a true division.

        ``output_s = max(max|input|, eps) / fp8_max`` over a group, rounded up to a power of two of at least 1e-10 if
        `scale_ue8m0`; ``output_q = fp8(clamp(input / output_s, fp8_min, fp8_max))``. The maximum ignores NaN. NaN
        and infinities become fp8_min.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            group_size: any divisor of hidden_size; multiples of 16 bytes (8 elements of 16 bits) are fast.
            eps: lower bound of the maximum of a group, 2^-100 to 2^100.
            fp8_min: the smallest fp8 value, -448 to 0, and the largest, 1 to 448; for float8_e4m3fnuz, -240 to 0
                and 1 to 240, usually -224 and 224.
            fp8_max: the smallest fp8 value, -448 to 0, and the largest, 1 to 448; for float8_e4m3fnuz, -240 to 0
                and 1 to 240, usually -224 and 224.
            scale_ue8m0: whether scales are powers of two.
            quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

        Returns:
            output_q: the same shape, float8_e4m3fn, float8_e4m3fnuz or uint8.
            output_s: [num_tokens, hidden_size / group_size] float32.
        """

per_token_group_fp8_quant: _per_token_group_fp8_quant

class _per_token_group_quant_int8(_Attributes, Protocol):
    def __call__(
        self,
        input: Tensor,
        output_q: Tensor,
        output_s: Tensor,
        group_size: int,
        eps: float,
        int8_min: float,
        int8_max: float,
        round_to_nearest: bool = False,
    ) -> None:
        """Quantize to int8 with one dynamic scale per group of contiguous elements, rounded toward zero.

        ``output_s = max(max|input|, eps) / int8_max`` over a group; ``output_q = trunc(clamp(input / output_s, int8_min,
        int8_max))``, a true division. The maximum ignores NaN. NaN and infinities become int8_min. vLLM rounds toward
        zero; rounding to nearest halves the largest error.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            output_q: the same shape, int8, written; constant row stride.
            output_s: [num_tokens, hidden_size / group_size] float32, written; any strides.
            group_size: any divisor of hidden_size; multiples of 16 bytes (8 elements of 16 bits) are fast.
            eps: lower bound of the maximum of a group, 2^-100 to 2^100.
            int8_min: the smallest int8 value, -128 to 0, and the largest, 1 to 127.
            int8_max: the smallest int8 value, -128 to 0, and the largest, 1 to 127.
            round_to_nearest: round to nearest even instead of toward zero.
        """
    @staticmethod
    def new(
        input: Tensor,
        group_size: int,
        eps: float,
        int8_min: float,
        int8_max: float,
        round_to_nearest: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Quantize to int8 with one dynamic scale per group of contiguous elements, rounded toward zero.

        ``output_s = max(max|input|, eps) / int8_max`` over a group; ``output_q = trunc(clamp(input / output_s, int8_min,
        int8_max))``, a true division. The maximum ignores NaN. NaN and infinities become int8_min. vLLM rounds toward
        zero; rounding to nearest halves the largest error.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            group_size: any divisor of hidden_size; multiples of 16 bytes (8 elements of 16 bits) are fast.
            eps: lower bound of the maximum of a group, 2^-100 to 2^100.
            int8_min: the smallest int8 value, -128 to 0, and the largest, 1 to 127.
            int8_max: the smallest int8 value, -128 to 0, and the largest, 1 to 127.
            round_to_nearest: round to nearest even instead of toward zero.

        Returns:
            output_q: the same shape, int8.
            output_s: [num_tokens, hidden_size / group_size] float32.
        """

per_token_group_quant_int8: _per_token_group_quant_int8

class _per_token_group_fp8_quant_packed(_Attributes, Protocol):
    def __call__(
        self,
        input: Tensor,
        output_q: Tensor,
        output_s_packed: Tensor,
        group_size: int,
        eps: float,
        fp8_min: float,
        fp8_max: float,
    ) -> None:
        """Quantize to fp8 with one power-of-two scale per group; a word packs four scale exponents (DeepGEMM's UE8M0).

        Results and scales are those of `per_token_group_fp8_quant` with `scale_ue8m0`. Byte ``g % 4`` (little-endian) of
        ``output_s_packed[token, g // 4]`` is the biased exponent of the scale of group g; bytes after the last one are 0.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            output_q: the same shape, float8_e4m3fn, float8_e4m3fnuz or uint8, written; constant row stride. It may have
                more rows: rows up to num_tokens rounded up to 4 become 0, and further rows are left unchanged.
            output_s_packed: [num_tokens, groups / 4 rounded up] int32, written; any strides. With the strides of TMA, (1,
                num_tokens rounded up to 4), the padding between the columns becomes 0. It may have num_tokens rounded up to
                4 rows: rows after the tokens become 0.
            group_size: a divisor of hidden_size.
            eps: lower bound of the maximum of a group, 2^-100 to 2^100.
            fp8_min: the smallest fp8 value, -448 to 0, and the largest, 1 to 448; for float8_e4m3fnuz, -240 to 0
                and 1 to 240, usually -224 and 224.
            fp8_max: the smallest fp8 value, -448 to 0, and the largest, 1 to 448; for float8_e4m3fnuz, -240 to 0
                and 1 to 240, usually -224 and 224.
        """
    @staticmethod
    def new(
        input: Tensor,
        group_size: int,
        eps: float,
        fp8_min: float,
        fp8_max: float,
        *,
        quant_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Quantize to fp8 with one power-of-two scale per group; a word packs four scale exponents (DeepGEMM's UE8M0).

        Results and scales are those of `per_token_group_fp8_quant` with `scale_ue8m0`. Byte ``g % 4`` (little-endian) of
        ``output_s_packed[token, g // 4]`` is the biased exponent of the scale of group g; bytes after the last one are 0.

        Args:
            input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            group_size: a divisor of hidden_size.
            eps: lower bound of the maximum of a group, 2^-100 to 2^100.
            fp8_min: the smallest fp8 value, -448 to 0, and the largest, 1 to 448; for float8_e4m3fnuz, -240 to 0
                and 1 to 240, usually -224 and 224.
            fp8_max: the smallest fp8 value, -448 to 0, and the largest, 1 to 448; for float8_e4m3fnuz, -240 to 0
                and 1 to 240, usually -224 and 224.
            quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

        Returns:
            output_q: the shape of `input`, float8_e4m3fn or float8_e4m3fnuz.
            output_s_packed: [num_tokens, groups / 4 rounded up] int32, for TMA of strides (1, num_tokens rounded up to 4).
        """

per_token_group_fp8_quant_packed: _per_token_group_fp8_quant_packed

class _hadacore_transform_out(_Attributes, Protocol):
    def __call__(self, out: Tensor, x: Tensor) -> None:
        """Walsh-Hadamard transform of rows: ``out[..., i] = sum_j (-1)^popcount(i & j) * x[..., j] / sqrt(hidden_size)``.

        In natural (Sylvester's) order; orthonormal, so its own inverse. Computed in float32, rounded once (Fino and Algazi
        1976, "Unified matrix treatment of the fast Walsh-Hadamard transform"; Agarwal et al. 2024, arXiv:2412.08832).
        Elements are scaled by a power of two before they are added, so that sums which float32 holds exactly, such as
        zeros, are exact. In a row whose magnitudes add up to more than sqrt(hidden_size) times the largest float32, results
        may be infinite or NaN that are finite by the formula; float16 has no such rows.

        Args:
            out: [..., hidden_size], written; constant row stride. May be `x`.
            x: the same shape, float32, float16 or bfloat16, hidden_size a power of two up to 32768; constant row stride.
        """
    @staticmethod
    def new(x: Tensor) -> Tensor:
        """Walsh-Hadamard transform of rows: ``out[..., i] = sum_j (-1)^popcount(i & j) * x[..., j] / sqrt(hidden_size)``.

        In natural (Sylvester's) order; orthonormal, so its own inverse. Computed in float32, rounded once (Fino and Algazi
        1976, "Unified matrix treatment of the fast Walsh-Hadamard transform"; Agarwal et al. 2024, arXiv:2412.08832).
        Elements are scaled by a power of two before they are added, so that sums which float32 holds exactly, such as
        zeros, are exact. In a row whose magnitudes add up to more than sqrt(hidden_size) times the largest float32, results
        may be infinite or NaN that are finite by the formula; float16 has no such rows.

        Args:
            x: [..., hidden_size], float32, float16 or bfloat16, hidden_size a power of two up to 32768; constant row stride.

        Returns:
            out: [..., hidden_size].
        """

hadacore_transform_out: _hadacore_transform_out

class _mxfp4_experts_quant(_Attributes, Protocol):
    def __call__(
        self,
        output: Tensor,
        output_scale: Tensor,
        input: Tensor,
        input_offset_by_experts: Tensor,
        output_scale_offset_by_experts: Tensor,
        n_experts: int,
    ) -> None:
        """MXFP4 of rows that belong to experts: e2m1 values, and a power-of-two scale per 32 contiguous elements.

        The scale is the exponent, biased by 127, of ``max|x| / 6`` rounded down to a power of two; ``q = e2m1(x /
        scale)`` saturates at +-6. NaN is ignored by the maximum and becomes +6. If the stored exponent is 0 (a maximum of
        zero or a denormal number) or 255 (infinity), values become 0 with their sign. Rows, tiles and invalid offsets are
        as in `scaled_fp4_experts_quant`; experts must not share tiles.

        Args:
            output: [num_tokens, hidden_size / 2] uint8, written; constant row stride.
            output_scale: [rows, columns / 4] int32, or [rows, columns] uint8, columns being hidden_size / 32 rounded up to
                4, contiguous, written.
            input: [num_tokens, hidden_size], float16 or bfloat16, hidden_size a multiple of 32; constant row stride.
            input_offset_by_experts: [n_experts + 1] int32, contiguous: where each expert's rows begin.
            output_scale_offset_by_experts: [n_experts + 1] int32, contiguous: where each expert's tiles begin, in rows,
                multiples of 128.
            n_experts: number of experts.
        """
    @staticmethod
    def new(
        input: Tensor,
        input_offset_by_experts: Tensor,
        output_scale_offset_by_experts: Tensor,
        n_experts: int,
    ) -> tuple[Tensor, Tensor]:
        """MXFP4 of rows that belong to experts: e2m1 values, and a power-of-two scale per 32 contiguous elements.

        The scale is the exponent, biased by 127, of ``max|x| / 6`` rounded down to a power of two; ``q = e2m1(x /
        scale)`` saturates at +-6. NaN is ignored by the maximum and becomes +6. If the stored exponent is 0 (a maximum of
        zero or a denormal number) or 255 (infinity), values become 0 with their sign. Rows, tiles and invalid offsets are
        as in `scaled_fp4_experts_quant`; experts must not share tiles.

        Args:
            input: [num_tokens, hidden_size], float16 or bfloat16, hidden_size a multiple of 32; constant row stride.
            input_offset_by_experts: [n_experts + 1] int32, contiguous: where each expert's rows begin.
            output_scale_offset_by_experts: [n_experts + 1] int32, contiguous: where each expert's tiles begin, in rows,
                multiples of 128.
            n_experts: number of experts.

        Returns:
            output: [num_tokens, hidden_size / 2] uint8.
            output_scale: [rows, columns / 4] int32, or [rows, columns] uint8, columns being hidden_size / 32
                rounded up to 4.
        """

mxfp4_experts_quant: _mxfp4_experts_quant

class _silu_and_mul_mxfp4_experts_quant(_Attributes, Protocol):
    def __call__(
        self,
        output: Tensor,
        output_scale: Tensor,
        input: Tensor,
        input_offset_by_experts: Tensor,
        output_scale_offset_by_experts: Tensor,
        n_experts: int,
    ) -> None:
        """`mxfp4_experts_quant` of a gated activation: of ``T(silu(gate) * up)`` for halves ``input = [gate, up]``.

        The product is computed in float32 and rounded to the element type once. Experts must not share tiles.

        Args:
            output: as in
                `mxfp4_experts_quant`.
            output_scale: as in
                `mxfp4_experts_quant`.
            input: [num_tokens, 2 * hidden_size], float16 or bfloat16, hidden_size a multiple of 32; constant row stride.
            input_offset_by_experts: as in
                `mxfp4_experts_quant`.
            output_scale_offset_by_experts: as in
                `mxfp4_experts_quant`.
            n_experts: as in
                `mxfp4_experts_quant`.
        """
    @staticmethod
    def new(
        input: Tensor,
        input_offset_by_experts: Tensor,
        output_scale_offset_by_experts: Tensor,
        n_experts: int,
    ) -> tuple[Tensor, Tensor]:
        """`mxfp4_experts_quant` of a gated activation: of ``T(silu(gate) * up)`` for halves ``input = [gate, up]``.

        The product is computed in float32 and rounded to the element type once. Experts must not share tiles.

        Args:
            input: [num_tokens, 2 * hidden_size], float16 or bfloat16, hidden_size a multiple of 32; constant row stride.
            input_offset_by_experts: as in
                `mxfp4_experts_quant`.
            output_scale_offset_by_experts: as in
                `mxfp4_experts_quant`.
            n_experts: as in
                `mxfp4_experts_quant`.

        Returns:
            output: as in `mxfp4_experts_quant`.
            output_scale: as in `mxfp4_experts_quant`.
        """

silu_and_mul_mxfp4_experts_quant: _silu_and_mul_mxfp4_experts_quant

class _mxfp8_experts_quant(_Attributes, Protocol):
    def __call__(
        self,
        input: Tensor,
        problem_sizes: Tensor,
        expert_offsets: Tensor,
        blockscale_offsets: Tensor,
        quant_output: Tensor,
        scale_factor: Tensor,
    ) -> None:
        """MXFP8 of rows that belong to experts: e4m3 values, and a power-of-two scale per 32 contiguous elements.

        The scale is the smallest power of two, 2^-127 or more, that is at least ``max|x| * (1/448)``, stored as its
        exponent, biased by 127; for an infinite maximum it is 2^127. ``q = e4m3(x / scale)`` saturates at +-448. NaN is
        ignored by the maximum and stays NaN. Expert e has the rows ``expert_offsets[e] + i`` for i below
        ``problem_sizes[e, 0]``; its scales lie in tiles that begin at row ``blockscale_offsets[e]`` of `scale_factor`. The
        padding of its last tile becomes 0. Nothing is written for an expert with rows out of range, or with tiles that
        reach beyond `scale_factor`, nor for rows without an expert. Experts must not share rows or tiles.

        Args:
            input: [num_rows, hidden_size], float16 or bfloat16, hidden_size a multiple of 32; constant row stride.
            problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K); only the rows are read.
            expert_offsets: [num_experts] int32, contiguous: the first row of each expert.
            blockscale_offsets: [num_experts] int32, contiguous: where tiles begin, in rows, multiples of 128.
            quant_output: [num_rows, hidden_size] float8_e4m3fn, written; constant row stride.
            scale_factor: [rows, columns] uint8 or float8_e8m0fnu, columns being hidden_size / 32 rounded up to 4,
                contiguous, written.
        """
    @staticmethod
    def new(
        input: Tensor,
        problem_sizes: Tensor,
        expert_offsets: Tensor,
        blockscale_offsets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """MXFP8 of rows that belong to experts: e4m3 values, and a power-of-two scale per 32 contiguous elements.

        The scale is the smallest power of two, 2^-127 or more, that is at least ``max|x| * (1/448)``, stored as its
        exponent, biased by 127; for an infinite maximum it is 2^127. ``q = e4m3(x / scale)`` saturates at +-448. NaN is
        ignored by the maximum and stays NaN. Expert e has the rows ``expert_offsets[e] + i`` for i below
        ``problem_sizes[e, 0]``; its scales lie in tiles that begin at row ``blockscale_offsets[e]`` of `scale_factor`. The
        padding of its last tile becomes 0. Nothing is written for an expert with rows out of range, or with tiles that
        reach beyond `scale_factor`, nor for rows without an expert. Experts must not share rows or tiles.

        Args:
            input: [num_rows, hidden_size], float16 or bfloat16, hidden_size a multiple of 32; constant row stride.
            problem_sizes: [num_experts, 3] int32, contiguous: (rows, N, K); only the rows are read.
            expert_offsets: [num_experts] int32, contiguous: the first row of each expert.
            blockscale_offsets: [num_experts] int32, contiguous: where tiles begin, in rows, multiples of 128.

        Returns:
            quant_output: [num_rows, hidden_size] float8_e4m3fn. Zeros where the op leaves it as it is.
            scale_factor: [rows, columns] uint8 or float8_e8m0fnu, columns being hidden_size / 32 rounded up to 4.
                Zeros where the op leaves it as it is.
        """

mxfp8_experts_quant: _mxfp8_experts_quant

class _permute_cols(_Attributes, Protocol):
    def __call__(self, a: Tensor, perm: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The columns of a matrix in another order, bit for bit: ``out[..., j] = a[..., perm[j]]``.

        `perm` may repeat columns. Where an index is out of range, `out` becomes 0.

        Args:
            a: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            perm: [hidden_size] int32, contiguous.
            out: the same shape and dtype as `a`, written and returned; constant row stride; new unless given.

        Returns:
            out: the same shape and dtype as `a`.
        """
    @staticmethod
    def new(a: Tensor, perm: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The columns of a matrix in another order, bit for bit: ``out[..., j] = a[..., perm[j]]``.

        `perm` may repeat columns. Where an index is out of range, `out` becomes 0.

        Args:
            a: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
            perm: [hidden_size] int32, contiguous.
            out: the same shape and dtype as `a`, written and returned; constant row stride; new unless given.

        Returns:
            out: the same shape and dtype as `a`.
        """

permute_cols: _permute_cols

class _persistent_masked_m_silu_mul_quant(_Attributes, Protocol):
    def __call__(self, input: Tensor, counts: Tensor, y_q: Tensor, y_s: Tensor, use_ue8m0: bool) -> None:
        """SwiGLU of the first ``counts[e]`` tokens of each expert, quantized to fp8 in groups of 128.

        ``y = b(b(silu(gate)) * up)`` for the halves ``input = [gate, up]``; b rounds to bfloat16, and so does every step:
        ``s = b(max(max|y|, b(1e-10)) * b(1/448))`` over a group, with `use_ue8m0` then ``s = 2^ceil(b(log2 s))``; ``y_q =
        fp8(clamp(b(y * b(1 / s)), -448, 448))``. The maximum ignores NaN; a NaN becomes -448. An infinity makes the scale
        infinite: it becomes -448, and finite elements become 0. Results of other tokens are left unchanged.

        Args:
            input: [num_experts, num_tokens, 2 * hidden_size] bfloat16, hidden_size a multiple of 128; the last stride is 1.
            counts: [num_experts] int32, contiguous; clamped to 0 ... num_tokens.
            y_q: [num_experts, num_tokens, hidden_size], float8_e4m3fn or uint8, written; the last stride is 1.
            y_s: written; any strides. [num_experts, num_tokens, hidden_size / 128] float32; or with `use_ue8m0`
                [num_experts, num_tokens, hidden_size / 512 rounded up] int32: byte ``g % 4`` (little-endian) of word
                ``g // 4`` is the biased exponent of the scale of group g. Bytes after the last group are left unchanged.
            use_ue8m0: whether scales are powers of two.
        """
    @staticmethod
    def new(input: Tensor, counts: Tensor, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
        """SwiGLU of the first ``counts[e]`` tokens of each expert, quantized to fp8 in groups of 128.

        ``y = b(b(silu(gate)) * up)`` for the halves ``input = [gate, up]``; b rounds to bfloat16, and so does every step:
        ``s = b(max(max|y|, b(1e-10)) * b(1/448))`` over a group, with `use_ue8m0` then ``s = 2^ceil(b(log2 s))``; ``y_q =
        fp8(clamp(b(y * b(1 / s)), -448, 448))``. The maximum ignores NaN; a NaN becomes -448. An infinity makes the scale
        infinite: it becomes -448, and finite elements become 0. Results of other tokens are left unchanged.

        Args:
            input: [num_experts, num_tokens, 2 * hidden_size] bfloat16, hidden_size a multiple of 128; the last stride is 1.
            counts: [num_experts] int32, contiguous; clamped to 0 ... num_tokens.
            use_ue8m0: whether scales are powers of two.

        Returns:
            y_q: [num_experts, num_tokens, hidden_size] float8_e4m3fn; zeros where there are no tokens.
            y_s: [num_experts, num_tokens, hidden_size / 128] float32; or with `use_ue8m0` [num_experts, num_tokens,
                hidden_size / 512 rounded up] int32: byte ``g % 4`` (little-endian) of word ``g // 4`` is the biased
                exponent of the scale of group g. Zeros elsewhere.
        """

persistent_masked_m_silu_mul_quant: _persistent_masked_m_silu_mul_quant

class _rotary_embedding(_Attributes, Protocol):
    def __call__(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        head_size: int,
        cos_sin_cache: Tensor,
        is_neox: bool,
        rope_dim_offset: int = 0,
        inverse: bool = False,
    ) -> None:
        """Rotary embedding of query and key heads, in place: ``x' = T(T(x cos) - T(y sin)), y' = T(T(y cos) + T(x sin))``.

        Elements `rope_dim_offset` to rope_dim_offset + rotary_dim of a head are rotated in pairs (x, y), by the angles of
        the token's position: elements (j, j + rotary_dim / 2) of these if `is_neox`, else (2j, 2j + 1) (Su et al. 2021,
        arXiv:2104.09864). Every operation rounds to the element type, so results equal those of eager PyTorch bit for bit;
        by a table of float32 every operation rounds to float32, and the result to T. Other elements, and tokens with a
        position outside the table, are left unchanged.

        Args:
            positions: [num_tokens] or [batch, seq_len], int32 or int64, any strides.
            query: positions' shape and [num_heads * head_size] or [num_heads, head_size], float32, float16 or bfloat16,
                read and written; any strides but the last.
            key: the same with num_kv_heads, which divides num_heads, or None.
            head_size: elements of a head.
            cos_sin_cache: [max_position, rotary_dim] of the same dtype or float32, contiguous, of one row at least; cosines
                in the first half of a row, sines in the second; rotary_dim even, at most head_size and 2048.
            is_neox: which elements form a pair.
            rope_dim_offset: the first element of a head that is rotated, at most head_size - rotary_dim.
            inverse: rotate by the negative angles, ``sin`` being -sin.
        """

rotary_embedding: _rotary_embedding

class _flashinfer_rotary_embedding(_Attributes, Protocol):
    def __call__(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        head_size: int,
        cos_sin_cache: Tensor,
        is_neox: bool,
    ) -> None:
        """`rotary_embedding` by a table of float32, in place: ``x' = T(x cos - y sin), y' = T(y cos + x sin)`` in float32.

        A product rounds to float32, then the sum, and the result once more to T. This is the arithmetic of FlashInfer's
        ``apply_rope_with_cos_sin_cache_inplace``, for which vLLM keeps its table in float32.

        Args:
            positions: [num_tokens], int32 or int64, any stride.
            query: [num_tokens, num_heads * head_size] or [num_tokens, num_heads, head_size], float32, float16 or bfloat16,
                read and written; any strides but the last.
            key: the same with num_kv_heads, which divides num_heads.
            head_size: elements of a head.
            cos_sin_cache: [max_position, rotary_dim] float32, contiguous, of one row at least; cosines in the first half of
                a row, sines in the second; rotary_dim even, at most head_size and 2048.
            is_neox: whether a pair is elements (j, j + rotary_dim / 2), or else (2j, 2j + 1).
        """

flashinfer_rotary_embedding: _flashinfer_rotary_embedding

class _apply_rotary_emb(_Attributes, Protocol):
    def __call__(
        self,
        out: Tensor,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        is_neox: bool = True,
        enable_fp32_compute: bool = False,
    ) -> None:
        """Rotary embedding by given angles: ``x' = T(T(x cos) - T(y sin)), y' = T(T(y cos) + T(x sin))``.

        The first rotary_dim elements of a head are rotated in pairs (x, y): elements (j, j + rotary_dim / 2) if `is_neox`,
        else (2j, 2j + 1) (Su et al. 2021, arXiv:2104.09864); the others are copied. Cosines and sines are rounded to the
        element type T, and so is every result, as in eager PyTorch; with `enable_fp32_compute` only the last one is.

        Args:
            out: the shape and dtype of `x`, written; may be `x` itself; any strides but the last.
            x: [batch, seq_len, num_heads, head_size] or without batch, float32, float16 or bfloat16; any strides but the
                last.
            cos: [seq_len, rotary_dim / 2], both float32, float16 or bfloat16; constant row stride; rotary_dim is at
                most head_size and 2048.
            sin: [seq_len, rotary_dim / 2], both float32, float16 or bfloat16; constant row stride; rotary_dim is at
                most head_size and 2048.
            is_neox: which elements form a pair.
            enable_fp32_compute: whether to compute in float32.
        """
    @staticmethod
    def new(x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool = True, enable_fp32_compute: bool = False) -> Tensor:
        """Rotary embedding by given angles: ``x' = T(T(x cos) - T(y sin)), y' = T(T(y cos) + T(x sin))``.

        The first rotary_dim elements of a head are rotated in pairs (x, y): elements (j, j + rotary_dim / 2) if `is_neox`,
        else (2j, 2j + 1) (Su et al. 2021, arXiv:2104.09864); the others are copied. Cosines and sines are rounded to the
        element type T, and so is every result, as in eager PyTorch; with `enable_fp32_compute` only the last one is.

        Args:
            x: [batch, seq_len, num_heads, head_size] or without batch, float32, float16 or bfloat16; any strides but the
                last.
            cos: [seq_len, rotary_dim / 2], both float32, float16 or bfloat16; constant row stride; rotary_dim is at
                most head_size and 2048.
            sin: [seq_len, rotary_dim / 2], both float32, float16 or bfloat16; constant row stride; rotary_dim is at
                most head_size and 2048.
            is_neox: which elements form a pair.
            enable_fp32_compute: whether to compute in float32.

        Returns:
            out: the shape and dtype of `x`.
        """

apply_rotary_emb: _apply_rotary_emb

class _dual_chunk_rotary_embedding(_Attributes, Protocol):
    def __call__(
        self,
        query_out: Tensor,
        key_out: Tensor,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        head_size: int,
        cos_sin_k_cache: Tensor,
        cos_sin_q_cache: Tensor,
        cos_sin_qc_cache: Tensor,
        cos_sin_qc_no_clamp_cache: Tensor,
        cos_sin_q_inter_cache: Tensor,
        is_neox: bool,
    ) -> None:
        """Rotary embedding for dual chunk attention: keys rotate by their positions, queries in five other ways.

        Keys of a token at position p rotate by row p of `cos_sin_k_cache`; the five versions of its queries by row p %
        chunk_len of `cos_sin_q_cache`, the same row of `cos_sin_qc_cache`, the last row of that, and row p % chunk_len of
        `cos_sin_qc_no_clamp_cache` and of `cos_sin_q_inter_cache` (An et al. 2024, arXiv:2402.17463). A row of angles
        rotates a head as in `rotary_embedding`, with the same roundings. If the position of a token lies outside
        `cos_sin_k_cache`, its heads are copied.

        Args:
            query_out: [num_tokens, 5 * num_heads * head_size], written: all heads of the first version, then of the next;
                any row stride.
            key_out: the shape of `key`, written; any strides but the last.
            positions: [num_tokens], int32 or int64, any stride.
            query: [num_tokens, num_heads * head_size] or [num_tokens, num_heads, head_size], float32, float16 or bfloat16,
                as all other tensors; any strides but the last.
            key: the same with num_kv_heads, which divides num_heads.
            head_size: elements of a head.
            cos_sin_k_cache: [max_position, rotary_dim], contiguous; cosines in the first half of a row, sines in the
                second; rotary_dim even, at most head_size and 2048.
            cos_sin_q_cache: [chunk_len, rotary_dim].
            cos_sin_qc_cache: [chunk_len, rotary_dim].
            cos_sin_qc_no_clamp_cache: [chunk_len, rotary_dim].
            cos_sin_q_inter_cache: [chunk_len, rotary_dim].
            is_neox: which elements form a pair.
        """
    @staticmethod
    def new(
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        head_size: int,
        cos_sin_k_cache: Tensor,
        cos_sin_q_cache: Tensor,
        cos_sin_qc_cache: Tensor,
        cos_sin_qc_no_clamp_cache: Tensor,
        cos_sin_q_inter_cache: Tensor,
        is_neox: bool,
    ) -> tuple[Tensor, Tensor]:
        """Rotary embedding for dual chunk attention: keys rotate by their positions, queries in five other ways.

        Keys of a token at position p rotate by row p of `cos_sin_k_cache`; the five versions of its queries by row p %
        chunk_len of `cos_sin_q_cache`, the same row of `cos_sin_qc_cache`, the last row of that, and row p % chunk_len of
        `cos_sin_qc_no_clamp_cache` and of `cos_sin_q_inter_cache` (An et al. 2024, arXiv:2402.17463). A row of angles
        rotates a head as in `rotary_embedding`, with the same roundings. If the position of a token lies outside
        `cos_sin_k_cache`, its heads are copied.

        Args:
            positions: [num_tokens], int32 or int64, any stride.
            query: [num_tokens, num_heads * head_size] or [num_tokens, num_heads, head_size], float32, float16 or bfloat16,
                as all other tensors; any strides but the last.
            key: the same with num_kv_heads, which divides num_heads.
            head_size: elements of a head.
            cos_sin_k_cache: [max_position, rotary_dim], contiguous; cosines in the first half of a row, sines in the
                second; rotary_dim even, at most head_size and 2048.
            cos_sin_q_cache: [chunk_len, rotary_dim].
            cos_sin_qc_cache: [chunk_len, rotary_dim].
            cos_sin_qc_no_clamp_cache: [chunk_len, rotary_dim].
            cos_sin_q_inter_cache: [chunk_len, rotary_dim].
            is_neox: which elements form a pair.

        Returns:
            query_out: [num_tokens, 5 * num_heads * head_size]: all heads of the first version, then of the next;
                any row stride.
            key_out: the shape of `key`.
        """

dual_chunk_rotary_embedding: _dual_chunk_rotary_embedding

class _multimodal_rotary_embedding(_Attributes, Protocol):
    def __call__(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        head_size: int,
        cos_sin_cache: Tensor,
        is_neox: bool,
        mrope_section_t: int,
        mrope_section_h: int,
        mrope_section_w: int,
        mrope_interleaved: bool = False,
    ) -> None:
        """`rotary_embedding` by positions in time, height and width; each axis rotates some of the pairs of every head.

        Pair j has the position in time for j < t, in height for t <= j < t + h, else in width, t, h and w being the
        sections (Wang et al. 2024, arXiv:2409.12191). If `mrope_interleaved`, pairs 1, 4, 7, ... below 3 h have the
        position in height, pairs 2, 5, 8, ... below 3 w that in width, and all others that in time. Tokens with one
        position outside the table are left unchanged.

        Args:
            positions: [3, num_tokens] for time, height and width, or [num_tokens] where the three are one; int32 or int64,
                of any strides.
            query: [num_tokens, num_heads * head_size] or [num_tokens, num_heads, head_size], float32, float16 or bfloat16,
                read and written; any strides but the last.
            key: the same with num_kv_heads, which divides num_heads, or None.
            head_size: elements of a head.
            cos_sin_cache: [max_position, rotary_dim] of the same dtype, contiguous, of one row at least; cosines in the
                first half of a row, sines in the second; rotary_dim even, at most head_size and 2048.
            is_neox: which elements make a pair.
            mrope_section_t: pairs of each axis, rotary_dim / 2 in all.
            mrope_section_h: pairs of each axis, rotary_dim / 2 in all.
            mrope_section_w: pairs of each axis, rotary_dim / 2 in all.
            mrope_interleaved: whether the pairs of the axes alternate.
        """

multimodal_rotary_embedding: _multimodal_rotary_embedding

class _top_k_top_p_sampling_from_logits(_Attributes, Protocol):
    def __call__(
        self,
        samples: Tensor,
        logits: Tensor,
        seeds: Tensor,
        offsets: Tensor | None = None,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> None:
        """Draw a token from each row: the first one at which the running sum of weights exceeds ``r / 2^64`` of their sum.

        Weights are integers, ``w = floor(2^35 exp((x - max x) / t))``, so that their addition is exact and a token depends
        only on its row. Three filters set weights to 0, in this order: `top_k` those of tokens less likely than top_k
        others; `min_p` those below min_p times the largest weight; `top_p` those of all but the most likely tokens that
        together reach top_p of the remaining sum (Holtzman et al. 2019, arXiv:1904.09751; Nguyen et al.
        2024, arXiv:2407.01082). Tokens as likely as the last one that a filter keeps are kept, too. ``r`` is the
        first 64 bits of Philox4x32-10 (Salmon et al. 2011) under the row's seed at its offset: rows of one seed need
        different offsets, and so do the tokens of a sequence.

        A logit of NaN or -inf is never drawn; inf counts as the largest number.

        Args:
            samples: [num_rows] int32, contiguous, written; -1 for a row without a token that can be drawn.
            logits: [num_rows, vocab_size], float32, float16 or bfloat16; any row stride; one token at least.
            seeds: [num_rows] int64, contiguous.
            offsets: [num_rows] int64, contiguous; or None for 0.
            top_k: [num_rows] int32, contiguous; 0 or less, or vocab_size or more, keeps all tokens. Or None.
            top_p: [num_rows] float32, contiguous; 1 or more, or NaN, keeps all tokens. Or None.
            min_p: [num_rows] float32, contiguous; 0 or less, or NaN, keeps all tokens. Or None.
            temperature: t, [num_rows] float32, contiguous; or None for 1. NaN and numbers below 2^-98, including 0 and
                negative ones, take the first of the most likely tokens; inf makes all finite logits equally likely.
        """
    @staticmethod
    def new(
        logits: Tensor,
        seeds: Tensor,
        offsets: Tensor | None = None,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> Tensor:
        """Draw a token from each row: the first one at which the running sum of weights exceeds ``r / 2^64`` of their sum.

        Weights are integers, ``w = floor(2^35 exp((x - max x) / t))``, so that their addition is exact and a token depends
        only on its row. Three filters set weights to 0, in this order: `top_k` those of tokens less likely than top_k
        others; `min_p` those below min_p times the largest weight; `top_p` those of all but the most likely tokens that
        together reach top_p of the remaining sum (Holtzman et al. 2019, arXiv:1904.09751; Nguyen et al.
        2024, arXiv:2407.01082). Tokens as likely as the last one that a filter keeps are kept, too. ``r`` is the
        first 64 bits of Philox4x32-10 (Salmon et al. 2011) under the row's seed at its offset: rows of one seed need
        different offsets, and so do the tokens of a sequence.

        A logit of NaN or -inf is never drawn; inf counts as the largest number.

        Args:
            logits: [num_rows, vocab_size], float32, float16 or bfloat16; any row stride; one token at least.
            seeds: [num_rows] int64, contiguous.
            offsets: [num_rows] int64, contiguous; or None for 0.
            top_k: [num_rows] int32, contiguous; 0 or less, or vocab_size or more, keeps all tokens. Or None.
            top_p: [num_rows] float32, contiguous; 1 or more, or NaN, keeps all tokens. Or None.
            min_p: [num_rows] float32, contiguous; 0 or less, or NaN, keeps all tokens. Or None.
            temperature: t, [num_rows] float32, contiguous; or None for 1. NaN and numbers below 2^-98, including 0 and
                negative ones, take the first of the most likely tokens; inf makes all finite logits equally likely.

        Returns:
            samples: [num_rows] int32; -1 for a row without a token that can be drawn.
        """

top_k_top_p_sampling_from_logits: _top_k_top_p_sampling_from_logits

class _apply_repetition_penalties_(_Attributes, Protocol):
    def __call__(self, logits: Tensor, prompt_mask: Tensor, output_mask: Tensor, repetition_penalties: Tensor) -> None:
        """Make tokens that occurred before less likely: ``l = T(l / p) if l > 0 else T(l * p)`` where a mask is set.

        Logits are edited in place, and once where both masks are set (Keskar et al. 2019, arXiv:1909.05858, but by the sign
        of the logit). 0, negative values and NaN are multiplied. Float32 arithmetic, rounded once. Logits without a set
        mask are left unchanged.

        Args:
            logits: [num_seqs, vocab_size], float32, float16 or bfloat16, contiguous, edited in place.
            prompt_mask: [num_seqs, vocab_size] bool, contiguous: tokens of the prompt and those that followed.
            output_mask: [num_seqs, vocab_size] bool, contiguous: tokens of the prompt and those that followed.
            repetition_penalties: [num_seqs], dtype of logits, contiguous.
        """

apply_repetition_penalties_: _apply_repetition_penalties_

class _apply_penalties_(_Attributes, Protocol):
    def __call__(
        self,
        logits: Tensor,
        output_bin_counts: Tensor,
        frequency_penalties: Tensor,
        presence_penalties: Tensor,
    ) -> None:
        """Lower the logits of tokens by their counts c: ``l = T(l - (frequency * c + presence))`` where c > 0.

        Logits are edited in place. Every step is rounded to float32, the result to T. (These are the penalties of OpenAI's
        API for completions.) Logits with a count of 0 or less are left unchanged.

        Args:
            logits: [num_seqs, vocab_size], float32, float16 or bfloat16, contiguous, edited in place.
            output_bin_counts: [num_seqs, vocab_size] int32, contiguous: how often each token is in the output so far.
            frequency_penalties: [num_seqs] float32, contiguous.
            presence_penalties: [num_seqs] float32, contiguous.
        """

apply_penalties_: _apply_penalties_

class _apply_token_bitmask_(_Attributes, Protocol):
    def __call__(self, logits: Tensor, bitmask: Tensor, indices: Tensor | None = None) -> None:
        """Forbid tokens: ``logits[r, t] = -inf`` where bit t % 32 of ``bitmask[r, t // 32]`` is 0, in place.

        Grammar-constrained decoding uses such bitmasks (Dong et al. 2024, arXiv:2411.15100). Other logits are left
        unchanged.

        Args:
            logits: [num_rows, vocab_size], float32, float16 or bfloat16, edited in place; any row stride.
            bitmask: [num_rows, ceil(vocab_size / 32)] int32, a set bit for each allowed token; any row stride. Bits
                after the last token are ignored.
            indices: [n] int32, contiguous: the rows of logits and bitmask to edit, in any order. Other rows are left
                unchanged; indices of no row are ignored. None: every row.
        """

apply_token_bitmask_: _apply_token_bitmask_

class _softmax(_Attributes, Protocol):
    def __call__(self, out: Tensor, logits: Tensor, temperature: Tensor | None = None) -> None:
        """Probabilities: ``out = exp(d) / sum exp(d), d = (x - max x) / t``, over the last dimension.

        float32 arithmetic, rounded once. A row with a NaN or inf in it, or with -inf alone, becomes NaN.

        Args:
            out: [..., vocab_size], float32, float16 or bfloat16, written; constant row stride. May be `logits`.
            logits: the same shape, float32, float16 or bfloat16; constant row stride.
            temperature: t of each row, float32, contiguous; or None for 1. A t below the smallest normal number, such as
                0, counts as that number, so that the largest logits share all probability. With inf, all finite logits
                are equally likely.
        """
    @staticmethod
    def new(logits: Tensor, temperature: Tensor | None = None) -> Tensor:
        """Probabilities: ``out = exp(d) / sum exp(d), d = (x - max x) / t``, over the last dimension.

        float32 arithmetic, rounded once. A row with a NaN or inf in it, or with -inf alone, becomes NaN.

        Args:
            logits: [..., vocab_size], float32, float16 or bfloat16; constant row stride.
            temperature: t of each row, float32, contiguous; or None for 1. A t below the smallest normal number, such as
                0, counts as that number, so that the largest logits share all probability. With inf, all finite logits
                are equally likely.

        Returns:
            out: [..., vocab_size], float32, float16 or bfloat16.
        """

softmax: _softmax

class _log_softmax(_Attributes, Protocol):
    def __call__(self, out: Tensor, logits: Tensor, temperature: Tensor | None = None) -> None:
        """Logarithms of probabilities: ``out = d - log(sum exp(d)), d = (x - max x) / t``, over the last dimension.

        float32 arithmetic, rounded once. A row with a NaN or inf in it, or with -inf alone, becomes NaN.

        Args:
            out: [..., vocab_size], float32, float16 or bfloat16, written; constant row stride. May be `logits`.
            logits: the same shape, float32, float16 or bfloat16; constant row stride.
            temperature: t of each row, float32, contiguous; or None for 1. A t below the smallest normal number, such as
                0, counts as that number, so that the largest logits share all probability. With inf, all finite logits
                are equally likely.
        """
    @staticmethod
    def new(logits: Tensor, temperature: Tensor | None = None) -> Tensor:
        """Logarithms of probabilities: ``out = d - log(sum exp(d)), d = (x - max x) / t``, over the last dimension.

        float32 arithmetic, rounded once. A row with a NaN or inf in it, or with -inf alone, becomes NaN.

        Args:
            logits: [..., vocab_size], float32, float16 or bfloat16; constant row stride.
            temperature: t of each row, float32, contiguous; or None for 1. A t below the smallest normal number, such as
                0, counts as that number, so that the largest logits share all probability. With inf, all finite logits
                are equally likely.

        Returns:
            out: [..., vocab_size], float32, float16 or bfloat16.
        """

log_softmax: _log_softmax

class _rejection_sample(_Attributes, Protocol):
    def __call__(
        self,
        output_token_ids: Tensor,
        draft_token_ids: Tensor,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_probs: Tensor,
        bonus_token_ids: Tensor,
        seeds: Tensor,
        offsets: Tensor | None = None,
    ) -> None:
        """Rejection sampling of drafted tokens by the target's distribution: the accepted drafts and one more token.

        Draft i of a request, a token of probability q in `draft_probs` and p in `target_probs`, is accepted if q > 0 and
        ``u_i * q < p``. The first rejected draft is replaced by a token drawn by the weights ``max(P - Q, 0)`` of all
        tokens, or by P if these weights are 0, and the drafts after it are dropped. If all drafts are accepted, the bonus
        token follows (Leviathan et al. 2023, arXiv:2211.17192). Weights are integers, ``floor(2^40 w)``; the token drawn is
        the first one at which their running sum exceeds ``r_i / 2^64`` of their sum.

        ``u_i`` are the upper 32 of the first 64 bits of Philox4x32-10 under the request's seed for the counter (offset, i,
        1), ``r_i`` the first 64 bits for (offset, i, 2). `top_k_top_p_sampling_from_logits` uses neither counter: under the
        same seed and offset it may draw a draft or the bonus token. Two tokens need different offsets.

        Args:
            output_token_ids: [batch, max_spec_len + 1] int32, contiguous, written; -1 after the last token, and in place
                of a rejected draft if all weights are 0.
            draft_token_ids: [num_tokens] int32, contiguous: the drafts of one request after another. Numbers that are no
                token are rejected.
            cu_num_draft_tokens: [batch] int32, contiguous: the number of drafts up to the end of each request. Drafts of a
                request beyond max_spec_len are ignored.
            draft_probs: [num_tokens, vocab_size] float32, any row stride; or None: the drafted token has probability 1.
            target_probs: [num_tokens, vocab_size] float32, any row stride; one-hot rows make it greedy.
            bonus_token_ids: [batch] or [batch, 1] int32, contiguous.
            seeds: [batch] int64, contiguous.
            offsets: [batch] int64, contiguous; or None for 0.
        """
    @staticmethod
    def new(
        draft_token_ids: Tensor,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_probs: Tensor,
        bonus_token_ids: Tensor,
        seeds: Tensor,
        offsets: Tensor | None = None,
        *,
        max_spec_len: int,
    ) -> Tensor:
        """Rejection sampling of drafted tokens by the target's distribution: the accepted drafts and one more token.

        Draft i of a request, a token of probability q in `draft_probs` and p in `target_probs`, is accepted if q > 0 and
        ``u_i * q < p``. The first rejected draft is replaced by a token drawn by the weights ``max(P - Q, 0)`` of all
        tokens, or by P if these weights are 0, and the drafts after it are dropped. If all drafts are accepted, the bonus
        token follows (Leviathan et al. 2023, arXiv:2211.17192). Weights are integers, ``floor(2^40 w)``; the token drawn is
        the first one at which their running sum exceeds ``r_i / 2^64`` of their sum.

        ``u_i`` are the upper 32 of the first 64 bits of Philox4x32-10 under the request's seed for the counter (offset, i,
        1), ``r_i`` the first 64 bits for (offset, i, 2). `top_k_top_p_sampling_from_logits` uses neither counter: under the
        same seed and offset it may draw a draft or the bonus token. Two tokens need different offsets.

        Args:
            draft_token_ids: [num_tokens] int32, contiguous: the drafts of one request after another. Numbers that are no
                token are rejected.
            cu_num_draft_tokens: [batch] int32, contiguous: the number of drafts up to the end of each request. Drafts of a
                request beyond max_spec_len are ignored.
            draft_probs: [num_tokens, vocab_size] float32, any row stride; or None: the drafted token has probability 1.
            target_probs: [num_tokens, vocab_size] float32, any row stride; one-hot rows make it greedy.
            bonus_token_ids: [batch] or [batch, 1] int32, contiguous.
            seeds: [batch] int64, contiguous.
            offsets: [batch] int64, contiguous; or None for 0.
            max_spec_len: the most draft tokens that a request has.

        Returns:
            output_token_ids: [batch, max_spec_len + 1] int32; -1 after the last token, and in place of a rejected draft
                if all weights are 0.
        """

rejection_sample: _rejection_sample

class _top_k_per_row_prefill(_Attributes, Protocol):
    def __call__(
        self,
        logits: Tensor,
        rowStarts: Tensor,
        rowEnds: Tensor,
        indices: Tensor,
        numRows: int,
        stride0: int,
        stride1: int,
        topK: int,
    ) -> None:
        """Positions of the topK largest of each segment ``logits[r, rowStarts[r]:rowEnds[r]]``, from left to right.

        Positions count from the start of the segment. Among equal values the first ones are taken, so that the result is
        determined. A segment of at most topK elements gives 0, 1, ... and then -1. Values are ordered by their bits: -NaN,
        -inf, ..., -0, 0, ..., inf, NaN. A segment that reaches beyond the columns ends with them.

        Args:
            logits: [at least numRows, columns] float32, any strides.
            rowStarts: [at least numRows] int32, contiguous.
            rowEnds: [at least numRows] int32, contiguous.
            indices: [numRows, topK] int32, contiguous, written.
            numRows: number of rows.
            stride0: the strides of logits.
            stride1: the strides of logits.
            topK: 0 or more.
        """
    @staticmethod
    def new(
        logits: Tensor,
        rowStarts: Tensor,
        rowEnds: Tensor,
        numRows: int,
        stride0: int,
        stride1: int,
        topK: int,
    ) -> Tensor:
        """Positions of the topK largest of each segment ``logits[r, rowStarts[r]:rowEnds[r]]``, from left to right.

        Positions count from the start of the segment. Among equal values the first ones are taken, so that the result is
        determined. A segment of at most topK elements gives 0, 1, ... and then -1. Values are ordered by their bits: -NaN,
        -inf, ..., -0, 0, ..., inf, NaN. A segment that reaches beyond the columns ends with them.

        Args:
            logits: [at least numRows, columns] float32, any strides.
            rowStarts: [at least numRows] int32, contiguous.
            rowEnds: [at least numRows] int32, contiguous.
            numRows: number of rows.
            stride0: the strides of logits.
            stride1: the strides of logits.
            topK: 0 or more.

        Returns:
            indices: [numRows, topK] int32.
        """

top_k_per_row_prefill: _top_k_per_row_prefill

class _top_k_per_row_decode(_Attributes, Protocol):
    def __call__(
        self,
        logits: Tensor,
        next_n: int,
        seq_lens: Tensor,
        indices: Tensor,
        numRows: int,
        stride0: int,
        stride1: int,
        topK: int,
    ) -> None:
        """`top_k_per_row_prefill` of ``logits[r, : seq_lens[r // next_n] - next_n + r % next_n + 1]``.

        Args:
            logits: [at least numRows, columns] float32, any strides.
            next_n: rows of a sequence, one for each of its last tokens; 1 or more.
            seq_lens: [at least numRows / next_n] int32, contiguous; or [sequences, next_n], a length for each row:
                ``logits[r, : seq_lens[r // next_n, r % next_n]]``.
            indices: [numRows, topK] int32, contiguous, written.
            numRows: number of rows.
            stride0: the strides of logits.
            stride1: the strides of logits.
            topK: 0 or more.
        """
    @staticmethod
    def new(
        logits: Tensor,
        next_n: int,
        seq_lens: Tensor,
        numRows: int,
        stride0: int,
        stride1: int,
        topK: int,
    ) -> Tensor:
        """`top_k_per_row_prefill` of ``logits[r, : seq_lens[r // next_n] - next_n + r % next_n + 1]``.

        Args:
            logits: [at least numRows, columns] float32, any strides.
            next_n: rows of a sequence, one for each of its last tokens; 1 or more.
            seq_lens: [at least numRows / next_n] int32, contiguous; or [sequences, next_n], a length for each row:
                ``logits[r, : seq_lens[r // next_n, r % next_n]]``.
            numRows: number of rows.
            stride0: the strides of logits.
            stride1: the strides of logits.
            topK: 0 or more.

        Returns:
            indices: [numRows, topK] int32.
        """

top_k_per_row_decode: _top_k_per_row_decode
