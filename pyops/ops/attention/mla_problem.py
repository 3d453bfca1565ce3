"""Multi-head latent attention: the problem, and the checks of a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ... import check, tuning
from ..._core.launch.scratch import Scratch
from ..._core.tensors.dtypes import E4M3, DType, bfloat16, float8_e4m3fn, float16, float32, int32, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8
from .._shared.products import multiplies
from .combine import vector_width
from .layout import MAX_TOKENS

LATENT_SIZE, ROPE_SIZE = 512, 64  # elements of the latent vector, of the RoPE key
ENTRY_SIZE = LATENT_SIZE + ROPE_SIZE  # elements of a token's latent KV
DS_MLA_BYTES = 656  # bytes of a token of "fp8_ds_mla": fp8 latent, four scales, and a 16-bit RoPE key
_MIN_HEADS_FOR_WGMMA = 8  # fewest heads of mla_decode_sm90.cu
_MAX_FEW_HEADS = 16  # most heads of a block of mla_decode_small_h.cu and mla_decode_small_h_fp8.cu
_MAX_FEW_BLOCKS = 8  # most of these blocks that share the heads of a sequence
_FEW_HEADS_SHARED = 204 * 1024  # most bytes of shared memory of a block for few heads
# Bytes of shared memory for WGMMA: queries and two KV tiles; barriers, slots, scales, row maxima, row sums.
_WGMMA_SHARED = 3 * 64 * ENTRY_SIZE * 2 + 11264


@dataclass(frozen=True, slots=True, eq=False)
class MlaProblem:
    """One or a few query tokens per sequence against a paged cache of latent KV: the arguments of the op that matter.

    Attributes:
        query_tokens: query tokens of each sequence. `by_sequence` counts the heads of all of them as heads.
        lists_slots: whether a row of the page table lists the slot of each token.
    """

    out: TensorArg
    lse: TensorArg | None
    q_nope: TensorArg
    q_pe: TensorArg
    kv_c_and_k_pe_cache: TensorArg
    seq_lens: TensorArg | None
    page_table: TensorArg
    workspace: TensorArg | None
    num_kv_splits: int
    query_tokens: int = 1
    lists_slots: ClassVar[bool] = False

    def by_sequence(self) -> MlaProblem:
        """The problem with the query tokens of a sequence in one row: its heads are those of each token."""
        if self.query_tokens == 1:
            return self
        out, q_nope, q_pe = (_rows_merged(arg, self.query_tokens) for arg in (self.out, self.q_nope, self.q_pe))
        lse = self.lse and _rows_merged(self.lse, self.query_tokens)
        return replace(self, out=out, lse=lse, q_nope=q_nope, q_pe=q_pe)

    @property
    def cache(self) -> TensorArg:
        return self.kv_c_and_k_pe_cache

    @property
    def entries(self) -> Scratch | None:
        """The memory of the cache, where it is not the op's tensor."""
        return None

    @property
    def cache_dtype(self) -> DType:
        """The element type of the cache, whose dtype may be uint8."""
        if self.is_ds_mla:
            return float8_e4m3fn
        return fp8.cache_dtype(self.cache, "fp8" if self.is_fp8 else "auto", self.q_nope.dtype)

    @property
    def length_dtype(self) -> DType:
        """The element type of the lengths, also where there are none."""
        return int32 if self.seq_lens is None else self.seq_lens.dtype

    @property
    def num_seqs(self) -> int:
        return self.q_nope.shape[0]

    @property
    def num_heads(self) -> int:
        return self.q_nope.shape[1]

    @property
    def is_fp8(self) -> bool:
        return self.cache.dtype.itemsize == 1

    @property
    def is_ds_mla(self) -> bool:
        """Whether the cache is "fp8_ds_mla": 656 bytes per token."""
        return self.cache.dtype is uint8 and self.cache.shape[2:] == (DS_MLA_BYTES,)

    @property
    def is_plain_fp8(self) -> bool:
        """Whether the cache is fp8 without scales per token."""
        return self.is_fp8 and not self.is_ds_mla

    @property
    def has_fp8_queries(self) -> bool:
        """Whether queries are fp8, too: kernels without MMAs of fp8 convert them to float16."""
        return self.q_nope.dtype is float8_e4m3fn

    @property
    def product_dtype(self) -> DType:
        """The dtype of the MMA operands."""
        return float16 if self.has_fp8_queries else self.q_nope.dtype

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the page table holds."""
        return min(self.page_table.shape[1] * (1 if self.lists_slots else self.cache.shape[1]), MAX_TOKENS)

    @property
    def may_use_mma(self) -> bool:
        """Whether mla_decode.cu supports the call, if its shared memory fits; mla_decode_simt.cu supports every
        call."""
        cache, chunk = self.cache, 16 // self.cache_dtype.itemsize
        is_aligned = cache.alignment == 16 and all(
            stride % chunk == 0 or size == 1 for size, stride in zip(cache.shape[:2], cache.strides[:2], strict=True)
        )
        return is_aligned and multiplies(self.product_dtype, cache.device)

    @property
    def uses_wgmma(self) -> bool:
        """Whether mla_decode_sm90.cu supports the call, or mla_decode_sm90_fp8.cu does if queries are fp8 and it
        serves the cache: no float32, tensors that TMA can load, and enough heads."""
        device, args = self.cache.device, (self.q_nope, self.q_pe)
        return (
            device.supports("wgmma")
            and device.shared_memory >= _WGMMA_SHARED
            and self.num_heads >= _MIN_HEADS_FOR_WGMMA
            and self.product_dtype is not float32
            and all(arg.alignment == 16 and rows_are_aligned(arg) for arg in (*args, self.cache))
            and self.cache_dtype in (self.product_dtype, float8_e4m3fn)
            and self.out.alignment == 16
            and self.out.strides[0] % 8 == 0
            and self.q_nope.numel * self.cache.numel > 0
        )

    @property
    def has_few_heads(self) -> bool:
        """Whether the heads fit into one block of a kernel for few heads, which supports the call."""
        return self.num_heads <= _MAX_FEW_HEADS and self.allows_few_heads

    @property
    def allows_few_heads(self) -> bool:
        """Whether mla_decode_small_h_fp8.cu (plain fp8) or mla_decode_small_h.cu supports the call: a few blocks of 16
        heads, aligned queries of 16 bits, or of fp8 over plain fp8."""
        device, args = self.cache.device, (self.q_nope, self.q_pe)
        return (
            device.supports("wgmma")
            and device.shared_memory >= _FEW_HEADS_SHARED
            and self.num_heads <= _MAX_FEW_HEADS * _MAX_FEW_BLOCKS
            and self.cache_dtype in (self.q_nope.dtype, float8_e4m3fn)
            and self.product_dtype is not float32
            and all(arg.alignment == 16 for arg in args)
            and all(rows_are_aligned(arg) for arg in (*args, self.cache))
            and self.cache.alignment == 16
            and self.out.alignment == 16
            and self.out.strides[0] % 8 == 0
            and self.q_nope.numel * self.cache.numel > 0
        )

    @property
    def combine_width(self) -> int:
        """Elements that a thread of the combine kernel loads and stores at once."""
        return vector_width(self.out, None, float32, self.out.dtype)

    def bucket(self) -> str:
        words = [
            "few" if self.has_few_heads else "wgmma" if self.uses_wgmma else "mma" if self.may_use_mma else "simt",
            self.q_nope.dtype.name,
            f"cache={'fp8_ds_mla' if self.is_ds_mla else self.cache_dtype.name}",
            f"heads={self.num_heads}",
            f"page={self.cache.shape[1]}",
            f"seqs={tuning.power_of_two(self.num_seqs)}",
            f"tokens={tuning.power_of_two(self.max_tokens)}",
        ]
        words += [f"splits={self.num_kv_splits}"] * (self.num_kv_splits > 0)
        words += [f"query_tokens={self.query_tokens}"] * (self.query_tokens > 1)
        return " ".join(words + ["sparse"] * self.lists_slots)


@dataclass(frozen=True, slots=True, eq=False)
class SparseMlaProblem(MlaProblem):
    """The same for a list of slots of each query token: `page_table` is the lists, `seq_lens` their lengths.

    Attributes:
        converted: the cache after its conversion (`mla_upconvert`).
    """

    converted: Scratch | None = None
    lists_slots: ClassVar[bool] = True

    @property
    def entries(self) -> Scratch | None:
        return self.converted


def _rows_merged(arg: TensorArg, rows: int) -> TensorArg:
    """[num_rows, num_heads, ...] as [num_rows / rows, rows * num_heads, ...]."""
    (num_rows, num_heads, *sizes), (stride, head_stride, *strides) = arg.shape, arg.strides
    if num_heads == 1:
        head_stride = stride
    elif stride != num_heads * head_stride and num_rows > 1:
        message = f"expected heads of all query tokens of a sequence at one stride, got strides {arg.strides}"
        raise arg.error(message)
    return replace(
        arg,
        shape=(num_rows // rows, rows * num_heads, *sizes),
        strides=(rows * num_heads * head_stride, head_stride, *strides),
    )


def rows_are_aligned(arg: TensorArg) -> bool:
    """Whether rows begin at multiples of 16 bytes."""
    chunk = 16 // arg.dtype.itemsize
    return all(stride % chunk == 0 or size == 1 for size, stride in zip(arg.shape[:2], arg.strides[:2], strict=True))


def check_mla(problem: MlaProblem) -> None:
    """OpError for a call that no kernel serves."""
    out, q_nope, q_pe, cache = problem.out, problem.q_nope, problem.q_pe, problem.cache
    check.dtype(q_nope, float32, float16, bfloat16, float8_e4m3fn)
    check.sizes(q_nope, num_seqs=None, num_heads=None, latent_size=LATENT_SIZE)
    num_rows, num_heads, _ = q_nope.shape
    num_seqs, remainder = divmod(num_rows, max(1, problem.query_tokens))
    if problem.query_tokens < 1 or remainder:
        message = f"expected a divisor of the {num_rows} rows of q_nope, got {problem.query_tokens}"
        raise check.refuse(q_nope, "query_tokens", message)
    check.sizes(q_pe, num_seqs=num_rows, num_heads=num_heads, rope_size=ROPE_SIZE)
    check.dtype(q_pe, q_nope.dtype)
    check.same_shape(out, q_nope)
    check.dtype(out, bfloat16 if q_nope.dtype is float8_e4m3fn else q_nope.dtype)
    check.shape(problem.lse, float32, num_seqs=num_rows, num_heads=num_heads)
    check.dtype(cache, *dict.fromkeys((q_nope.dtype, *E4M3, uint8)))
    if problem.is_ds_mla:
        check.dtype(q_nope, float16, bfloat16)  # the dtype of the RoPE key
    check.sizes(cache, num_pages=None, page_size=None, entry_size=DS_MLA_BYTES if problem.is_ds_mla else ENTRY_SIZE)
    for arg in (q_nope, q_pe, cache):
        check.row_size(arg)
    if cache.shape[1] == 0:
        raise cache.error(f"expected pages of at least one slot, got shape {cache.shape}")
    check.index(problem.seq_lens, num_seqs=num_seqs)
    check.index(problem.page_table, num_seqs=num_seqs, **{"topk" if problem.lists_slots else "max_pages": None})
    check.dtype(problem.workspace, uint8)
    check.dtype(cache, uint8, problem.cache_dtype)


def constants_of(problem: MlaProblem) -> dict[str, Any]:
    """The constants that all kernels have in common."""
    return {
        "query_t": problem.q_nope.dtype,
        "cache_t": problem.cache_dtype,
        "out_t": problem.out.dtype,
        "length_t": problem.length_dtype,
        "table_t": problem.page_table.dtype,
        "PAGE_SIZE": problem.cache.shape[1],
        "HAS_LSE": problem.lse is not None,
        "HAS_LENGTHS": problem.seq_lens is not None,
        "LISTS_SLOTS": problem.lists_slots,
        "QUERY_TOKENS": problem.query_tokens,
        "IS_DS_MLA": problem.is_ds_mla,
    }


def arguments_of(problem: MlaProblem) -> dict[str, Any]:
    """The arguments that say where the tokens of a sequence are."""
    cache, page_table = problem.cache, problem.page_table
    return {
        **({"kv_c_and_k_pe_cache": problem.entries} if problem.entries else {}),
        **lengths_of(problem),
        "page_table": page_table,
        "num_pages": cache.shape[0],
        "page_stride": cache.strides[0],
        "slot_stride": cache.strides[1],
        "table_stride": page_table.strides[0],
        "table_step": page_table.strides[1],
    }


def lengths_of(problem: MlaProblem) -> dict[str, Any]:
    """The arguments that say how many tokens a sequence has."""
    seq_lens = problem.seq_lens
    return {
        "seq_lens": 0 if seq_lens is None else seq_lens,
        "length_step": 0 if seq_lens is None else seq_lens.strides[0],
        "max_tokens": problem.max_tokens,
    }


def query_strides(problem: MlaProblem) -> dict[str, int]:
    """The strides of queries that are loaded without a tensor map."""
    q_nope, q_pe = problem.q_nope, problem.q_pe
    return {
        "nope_stride": q_nope.strides[0],
        "nope_head_stride": q_nope.strides[1],
        "pe_stride": q_pe.strides[0],
        "pe_head_stride": q_pe.strides[1],
    }
