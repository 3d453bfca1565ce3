"""Prefill attention: the problem, and the checks of a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from ... import check, tuning
from ..._core.system.device import Device
from ..._core.tensors.dtypes import float8_e4m3fn, float32
from ..._core.tensors.tensor import TensorArg
from .._shared.products import multiplies
from . import decode_problem
from .arguments import Options, PagedKV, RaggedKV, Sparse
from .layout import CacheLayout, check_kv, check_rows, heads_stride, max_tokens_of

# Query tokens per sequence, on average, from which the prefill kernel also takes sequences of one query token; below,
# decode attention takes those (docs/performance/prefill.md, "Sequences of one query token").
_MAX_TOKENS_BESIDE_SINGLE_ROWS = 128

MAX_FEW_TOKENS = 16  # most query tokens of a sequence that count as few: those of speculative decoding
_MAX_COLUMN_WARPS = 4  # most warps that share rows in prefill_mma.cu
_MAX_WGMMA_HEAD_SIZE = 256  # largest head size of prefill_sm90.cu
# Bytes of 64 rows of queries of 512 elements, 32 keys and 32 values, with P: of sm_80, sm_9x and sm_10x, not of others.
_SHARED_MEMORY_OF_SHARED_ROWS = 140 * 1024
_MAX_FEW_ROWS = 128  # most query rows of a sequence and key-value head that count as few: those of one CTA


def _max_head_size(device: Device, packed: bool) -> int:
    """Largest head size of prefill_mma.cu: with larger heads a tile of queries, one of keys and a slice of one of
    values exceed shared memory. On sm_75 packed values, which have rows of 128 bytes, do so above 256."""
    if not device.supports("mma"):
        return _max_slice(device)
    return 256 if packed and not device.supports("async_copies") else 512


def _max_slice(device: Device) -> int:
    """Most columns of values of a warp of prefill_mma.cu: more spill. The accumulators of 16 rows of 512 are 256
    registers of a lane."""
    return 256 if device.supports("async_copies") or device.warp_size == 64 else 128


@dataclass(frozen=True, slots=True, eq=False)
class PrefillProblem:
    """Query tokens of several sequences against a paged cache, or against ragged keys and values.

    Attributes:
        query: queries in the dtype of out; for e4m3 queries, a contiguous tensor with the same values in that dtype.
        cu_seqlens_q: None: each sequence has one query token, its row of `query`.
        codes, q_scale: e4m3 queries and their scale; None for other queries. A q_scale of None means 1.
        p_hi_lo: whether 16-bit probabilities are split into two values of their type, as in decode attention.
        max_query_len: the most query tokens of a sequence, by the caller; 0: unknown. No result depends on it.
    """

    out: TensorArg
    query: TensorArg
    kv: PagedKV | RaggedKV
    layout: CacheLayout
    options: Options
    cu_seqlens_q: TensorArg | None
    causal: bool
    codes: TensorArg | None = None
    q_scale: TensorArg | None = None
    p_hi_lo: bool = False
    max_query_len: int = 0

    @property
    def num_seqs(self) -> int:
        return int(self.cu_seqlens_q.shape[0]) - 1 if self.cu_seqlens_q else self.query.shape[0]

    @property
    def tokens_of_each(self) -> int:
        """Query tokens of each sequence if all have as many, or the most of one if these are few; 0 if neither.

        The counts are on the device, so the former is a guess: a batch of speculative decoding has a whole number of
        tokens per sequence. No result depends on it.
        """
        tokens, remainder = divmod(self.query.shape[0], max(1, self.num_seqs))
        if 0 < self.max_query_len <= MAX_FEW_TOKENS:
            tokens, remainder = self.max_query_len, 0
        return 0 if remainder or tuning.batch_invariant() else tokens

    @property
    def is_mixed(self) -> bool:
        """Whether sequences have different numbers of query tokens, and so different lengths."""
        num_tokens, num_seqs = self.query.shape[0], max(1, self.num_seqs)
        return num_seqs > 1 and num_tokens != num_seqs * max(num_tokens // num_seqs, self.max_query_len)

    @property
    def few_rows(self) -> int:
        """Query tokens of a sequence times the heads of a key-value head, if that is equal for all and few; else 0.

        Such calls are bound by memory: their kernels read the cache once, and split it among all CTAs.
        """
        rows = self.tokens_of_each * self.group
        return rows if rows <= _MAX_FEW_ROWS and self.single_rows is None else 0

    @property
    def keys_and_values(self) -> tuple[TensorArg, TensorArg]:
        kv = self.kv
        return (kv.key_cache, kv.value_cache) if isinstance(kv, PagedKV) else (kv.key, kv.value)

    @property
    def expected_tokens(self) -> int:
        """Expected keys of a sequence: the most that its block table holds, or the mean for ragged keys."""
        max_tokens = max_tokens_of(self.kv)
        return -(-max_tokens // max(1, self.num_seqs)) if self.layout.ragged else max_tokens

    @property
    def likely_tokens(self) -> int:
        """Expected keys of the longest sequence of a paged cache, with the new ones: its last block is half full."""
        new = max(self.max_query_len, -(-self.query.shape[0] // max(1, self.num_seqs)))
        return min(self.expected_tokens, max(new, self.expected_tokens - self.layout.block_size // 2))

    def box_tokens(self, tile_tokens: int) -> int:
        """Keys of a KV tile in one TMA box."""
        return tile_tokens if self.layout.ragged else gcd(self.layout.block_size, tile_tokens)

    @property
    def num_rows(self) -> int:
        """Rows of the MMAs of one key-value head."""
        num_tokens, num_heads, _ = self.query.shape
        return num_tokens * num_heads // self.layout.num_kv_heads

    def count_tiles(self, rows: int) -> int:
        """Numbers of tiles of so many rows. Each sequence may add one with fewer rows, or without."""
        return self.num_rows // rows + self.num_seqs if self.cu_seqlens_q else self.num_seqs * -(-self.group // rows)

    @property
    def group(self) -> int:
        """Query heads of one key-value head."""
        return int(self.query.shape[1]) // self.layout.num_kv_heads

    @property
    def value_size(self) -> int:
        """Elements of a value of a head; at most the elements of a key."""
        return self.layout.value_size

    @property
    def slices(self) -> int:
        """The fewest slices of a value in prefill_mma.cu."""
        return count_slices(self, _MAX_COLUMN_WARPS if shares_rows(self) else 1)

    @property
    def is_fp8(self) -> bool:
        return self.layout.dtype is not self.query.dtype

    @property
    def has_aligned_out(self) -> bool:
        """Whether rows of `out` are stored by accesses of several elements."""
        return self.out.alignment == 16 and heads_stride(self.out) % 8 == 0

    @property
    def has_plain_logits(self) -> bool:
        """Whether logits are scaled dot products, without ALiBi slopes and soft cap."""
        return self.options.alibi_slopes is None and not self.options.logits_soft_cap

    @property
    def uses_mma(self) -> bool:
        """Whether prefill_mma.cu supports the call; attention_decode_simt.cu supports every call."""
        query, head_size, device = self.query, self.query.shape[2], self.query.device
        unit = 16 if self.layout.packed or self.is_fp8 else 8
        # On gfx11 a lane holds a whole operand row: with ALiBi slopes or a soft cap, short values spill registers.
        has_registers = self.value_size == head_size or self.has_plain_logits or not device.arch.startswith("gfx11")
        return (
            has_registers
            and multiplies(query.dtype, device)
            and self.layout.aligned
            and query.alignment == 16
            and heads_stride(query) % 8 == 0
            and head_size % unit == self.value_size % (unit * self.slices) == 0
            and head_size <= _max_head_size(device, self.layout.packed)
            and (not self.layout.packed or self.layout.block_size % 8 == 0)
        )

    @property
    def uses_wgmma(self) -> bool:
        """Whether prefill_sm90.cu supports the call."""
        query, layout = self.query, self.layout
        has_registers = not self.is_fp8 or self.value_size <= 192 or self.has_plain_logits
        has_one_unit = not layout.head_scales or self.has_plain_logits  # the polynomials of the soft cap take one scale
        return (
            query.device.supports("wgmma")
            and self.uses_mma
            and query.shape[2] <= _MAX_WGMMA_HEAD_SIZE
            and layout.dtype in (query.dtype, float8_e4m3fn)
            and not layout.packed
            and (layout.ragged or layout.block_size % 8 == 0)
            and has_registers
            and has_one_unit
            and self.group <= 128
            and self.has_aligned_out
            and query.numel * self.keys_and_values[0].numel > 0
            and (query.shape[0] + self.num_seqs) * layout.num_kv_heads < 2**31  # most work items
        )

    @property
    def single_rows(self) -> decode_problem.DecodeProblem | None:
        """The decode problem for the sequences with one query token, which may fill all SMs; None if there are few."""
        # Lengths are on the device, so the plan does not know which sequences these are.
        num_seqs, num_tokens, device = self.num_seqs, self.query.shape[0], self.query.device
        if not isinstance(self.kv, PagedKV) or self.cu_seqlens_q is None:
            return None
        single_rows = self.as_decode()
        is_served = self.uses_mma and single_rows.uses_mma and self.value_size == self.query.shape[2]
        may_be_many = num_seqs * self.kv.num_kv_heads >= device.num_sms and self.tokens_of_each <= 1
        may_be_many &= num_tokens < _MAX_TOKENS_BESIDE_SINGLE_ROWS * num_seqs
        may_be_many |= tuning.batch_invariant()
        reads_once = single_rows.reads == 1 or not self.uses_wgmma
        return single_rows if is_served and may_be_many and reads_once and self.codes is None else None

    def as_decode(self, query_tokens: int = 0) -> decode_problem.DecodeProblem:
        """The decode problem of a call with a paged cache. A CTA takes `query_tokens` of a sequence; 0: it has one."""
        assert isinstance(self.kv, PagedKV)
        return decode_problem.DecodeProblem(
            self.out,
            self.query,
            self.kv,
            self.layout,
            self.options,
            Sparse(),
            partials=None,
            partition=0,
            query_start_loc=self.cu_seqlens_q,
            fp8_out_scale=None,
            query_tokens=query_tokens,
            max_query_len=self.max_query_len,
        )

    def bucket(self) -> str:
        (num_tokens, num_heads, head_size), layout = self.query.shape, self.layout
        sizes = f"{head_size}" + f"/{self.value_size}" * (self.value_size != head_size)
        words = [
            "wgmma" if self.uses_wgmma else "mma" if self.uses_mma else "simt",
            f"{(self.codes or self.query).dtype.name}",
            f"cache={'ragged' if layout.ragged else layout.dtype.name}{'-packed' * layout.packed}",
            f"heads={num_heads}/{layout.num_kv_heads}x{sizes}",
            f"block={layout.block_size}",
            f"seqs={tuning.power_of_two(self.num_seqs)}",
            f"query_tokens={tuning.power_of_two(num_tokens)}",
        ]
        return " ".join(words + ["logits_changed"] * (not self.has_plain_logits))


def shares_rows(problem: PrefillProblem) -> bool:
    """Whether warps of prefill_mma.cu share rows of values with more columns than a warp has accumulators."""
    device = problem.query.device
    return (
        problem.value_size > _max_slice(device)
        and not problem.layout.packed
        and device.supports("async_copies")
        and device.shared_memory >= _SHARED_MEMORY_OF_SHARED_ROWS
    )


def count_slices(problem: PrefillProblem, column_warps: int) -> int:
    """Slices of a value in prefill_mma.cu, each with its own CTAs, if so many warps share rows. All CTAs of a tile
    compute its scores, so that keys are read once per slice."""
    return -(-problem.value_size // (column_warps * _max_slice(problem.query.device)))


def check_varlen(
    out: TensorArg,
    query: TensorArg,
    kv: PagedKV,
    options: Options,
    cu_seqlens_q: TensorArg,
    causal: bool = True,
    q_scale: TensorArg | None = None,
) -> PrefillProblem:
    """The problem of a call; OpError for a call that no kernel serves."""
    codes = query if query.dtype is float8_e4m3fn else None
    if codes is not None:
        query = _widened(codes, out)
    layout = check_kv(query, kv, options, short_values=True)
    _check_result(out, query, layout, options)
    if codes is not None:
        _check_codes(codes, q_scale, kv, layout)
    elif q_scale is not None:
        raise q_scale.error(f"expected None beside queries of {query.dtype}, which have no scale")
    check.index(cu_seqlens_q, num_seqs_and_one=kv.block_tables.shape[0] + 1)
    return PrefillProblem(out, query, kv, layout, options, cu_seqlens_q, bool(causal), codes, q_scale)


def check_ragged(
    out: TensorArg, query: TensorArg, kv: RaggedKV, options: Options, cu_seqlens_q: TensorArg, causal: bool
) -> PrefillProblem:
    """The problem of a call with ragged keys and values; OpError for a call that no kernel serves."""
    if not cu_seqlens_q.numel:
        raise cu_seqlens_q.error(f"expected at least one element, got shape {cu_seqlens_q.shape}")
    layout = check_rows(query, kv, options)
    if options.sliding_window and not causal:
        raise check.refuse(query, "sliding_window", f"expected 0 unless causal, got {options.sliding_window}")
    _check_result(out, query, layout, options)
    check.index(cu_seqlens_q, num_seqs_and_one=kv.cu_seqlens_k.shape[0])
    return PrefillProblem(out, query, kv, layout, options, cu_seqlens_q, bool(causal))


def _check_result(out: TensorArg, query: TensorArg, layout: CacheLayout, options: Options) -> None:
    num_tokens, num_heads, _ = query.shape
    check.sizes(out, num_tokens=num_tokens, num_heads=num_heads, value_size=layout.value_size)
    check.dtype(out, query.dtype)
    check.shape(options.lse, float32, num_heads=num_heads, num_tokens=num_tokens)


def _widened(codes: TensorArg, out: TensorArg) -> TensorArg:
    """The descriptor of e4m3 queries after upcasting to the dtype of out."""
    check.floating(out)
    strides, pitch = [], 1
    for size in reversed(codes.shape):
        strides.append(pitch)
        pitch *= size
    return replace(codes, dtype=out.dtype, strides=tuple(reversed(strides)), alignment=16)


def _check_codes(codes: TensorArg, q_scale: TensorArg | None, kv: PagedKV, layout: CacheLayout) -> None:
    """Check that e4m3 queries have e4m3 keys, and one scale, or per-head scales where keys have them."""
    if layout.dtype is not float8_e4m3fn:
        expected = f'expected "fp8" or "fp8_e4m3" and codes of {float8_e4m3fn} beside queries of this type'
        raise check.refuse(codes, "kv_cache_dtype", f'{expected}, got "{kv.kv_cache_dtype}" and {layout.dtype}')
    heads_stride(codes)
    if layout.head_scales and q_scale is not None and q_scale.numel != 1:
        check.shape(q_scale, float32, num_kv_heads=kv.num_kv_heads)
    else:
        check.scalar(q_scale)
