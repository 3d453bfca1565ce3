"""Decode attention: the problem, and the checks of a call."""

from __future__ import annotations

from dataclasses import dataclass

from ... import check, tuning
from ..._core.system.device import Device
from ..._core.tensors.dtypes import DType, float8_e4m3fn, float32, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared.products import multiplies
from .arguments import Options, PagedKV, Partials, Sparse
from .combine import vector_width
from .layout import CacheLayout, check_kv, max_tokens_of

_MAX_GRID_Y = 65535  # largest grid dimension y; each split is a block


@dataclass(frozen=True, slots=True, eq=False)
class DecodeProblem:
    """One query token, or a few, of each sequence against a paged cache.

    Attributes:
        query_tokens: query tokens of a CTA of attention_decode.cu, where a sequence may have any number of them; 0:
            each sequence has one query token.
        max_query_len: the most query tokens of a sequence, by the caller; 0: unknown.
        constant_past: the promise of `paged_attention_v1`.
        partition: tokens of each split if the caller gives memory for `partials`; 0 if the plan chooses the splits.
    """

    out: TensorArg
    query: TensorArg
    kv: PagedKV
    layout: CacheLayout
    options: Options
    sparse: Sparse
    partials: Partials | None
    partition: int
    query_start_loc: TensorArg | None
    fp8_out_scale: TensorArg | None
    query_tokens: int = 0
    max_query_len: int = 0
    constant_past: bool = False

    @property
    def num_seqs(self) -> int:
        return int(self.kv.block_tables.shape[0])

    @property
    def any_tokens(self) -> bool:
        """Whether sequences may have any number of query tokens."""
        return self.query_tokens > 0

    @property
    def cta_tokens(self) -> int:
        """Query tokens of a CTA."""
        return max(1, self.query_tokens)

    @property
    def max_other_tiles(self) -> int:
        """Most tiles of query_tokens query tokens that are not the first tile of their sequence."""
        return max(0, self.query.shape[0] - 1) // self.query_tokens if self.any_tokens else 0

    @property
    def other_tiles(self) -> int:
        """The same, as the plan expects it: the lengths are on the device. If all sequences may have equally many
        tokens, they have; otherwise one sequence has all but one of each other, or as many as the caller says."""
        num_tokens, num_seqs = self.query.shape[0], max(1, self.num_seqs)
        if not self.any_tokens or num_tokens <= num_seqs:
            return 0
        if num_tokens % num_seqs == 0:
            return num_seqs * ((num_tokens // num_seqs - 1) // self.query_tokens)
        others = (num_tokens - num_seqs) // self.query_tokens
        most = (self.max_query_len - 1) // self.query_tokens if self.max_query_len else others
        return min(others, num_seqs * most)

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def head_size(self) -> int:
        return self.query.shape[2]

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.kv.num_kv_heads

    @property
    def columns(self) -> int:
        """Query heads that share a key-value head, times the query tokens of a CTA."""
        return self.group * self.cta_tokens

    @property
    def used_columns(self) -> int:
        """The columns that CTAs use, if all sequences have as many query tokens, or the most that the caller says."""
        tokens = self.max_query_len or -(-self.query.shape[0] // max(1, self.num_seqs))
        return self.group * min(self.cta_tokens, tokens)

    @property
    def slices(self) -> int:
        """Slices of a head, each with a warp of its own: the accumulators of 16 columns of 128 elements, with keys and
        values of a step, are nearly all registers of a warp."""
        if not self.uses_mma or not self.query.device.supports("mma") or self.head_size <= 128:
            return 1
        return 2 if self.head_size <= 256 else 4

    @property
    def slice_size(self) -> int:
        """Most elements of a slice of a head."""
        return -(-self.head_size // self.slices)

    @property
    def cta_heads(self) -> int:
        """Columns of the MMAs of a CTA of attention_decode.cu. More would spill registers."""
        return 16 if not self.query.device.supports("mma") or self.columns > 8 else 8

    @property
    def reads(self) -> int:
        """How often CTAs of attention_decode.cu read the cache: each CTA reads it for its own heads."""
        return -(-self.group // self.cta_heads)

    @property
    def num_partitions(self) -> int:
        """Splits of a sequence if the caller provides memory for their results, else 0."""
        return max(1, self.partials.exp_sums.shape[-1]) if self.partials else 0

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the block table holds."""
        tokens = max_tokens_of(self.kv)
        return min(tokens, self.num_partitions * self.partition) if self.partials else tokens

    @property
    def attended_tokens(self) -> int:
        """The most tokens that a query attends to."""
        window = self.options.sliding_window
        return min(self.max_tokens, window) if window else self.max_tokens

    @property
    def max_head_size(self) -> int:
        """Largest head size of attention_decode.cu: larger heads spill registers."""
        device = self.query.device
        if device.supports("mma"):
            return 512
        return 128 if device.arch.startswith("gfx11") else 256

    @property
    def uses_mma(self) -> bool:
        """Whether attention_decode.cu, with MMAs, supports the call.

        attention_decode_simt.cu supports every call.
        """
        layout, device = self.layout, self.query.device
        token_stride = max(layout.strides["key_token_stride"], layout.strides["value_token_stride"])
        # Adjacent tokens of a packed cache that a lane loads at once.
        packed_run = max(run_tokens(device), 4 if layout.dtype is self.query.dtype else 8)
        return (
            multiplies(self.query.dtype, device)
            and layout.aligned
            and self.head_size <= self.max_head_size
            and not self.sparse.on
            and token_stride * layout.block_size < 2**31
            and (not layout.packed or layout.block_size % packed_run == 0)
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of a key and its value of a head."""
        return 2 * self.head_size * self.layout.dtype.itemsize

    @property
    def partial_dtype(self) -> DType:
        """The dtype of the results of splits before they are combined."""
        return self.partials.tmp_out.dtype if self.partials else float32

    @property
    def out_dtype(self) -> DType:
        """The element type of `out`, which may be uint8 for fp8."""
        return float8_e4m3fn if self.fp8_out_scale else self.out.dtype

    @property
    def combine_vector_width(self) -> int:
        """Elements that a thread of the combine kernel loads and stores at once."""
        tmp_out = self.partials.tmp_out if self.partials else None
        return vector_width(self.out, tmp_out, self.partial_dtype, self.out_dtype)

    def bucket(self) -> str:
        layout, options = self.layout, self.options
        words = [
            "mma" if self.uses_mma else "simt",
            f"{self.query.dtype.name}",
            f"cache={layout.dtype.name}{'-packed' * layout.packed}",
            f"heads={self.num_heads}/{self.kv.num_kv_heads}x{self.head_size}",
            f"block={layout.block_size}",
            f"seqs={tuning.power_of_two(self.num_seqs)}",
            f"tokens={tuning.power_of_two(self.max_tokens)}",
        ]
        words += [f"partition={self.partition}"] if self.partition else []
        words += [f"query_tokens={self.query_tokens}"] if self.any_tokens else []
        words += ["logits_changed"] if options.alibi_slopes or options.logits_soft_cap else []
        return " ".join(words)


def run_tokens(device: Device) -> int:
    """Most tokens of a value tile that a lane multiplies: RUN_TOKENS of decode_tile.cuh."""
    return 4 if device.supports("mma") or device.warp_size == 64 else 16


def check_decode(
    out: TensorArg,
    query: TensorArg,
    kv: PagedKV,
    options: Options,
    sparse: Sparse,
    partials: Partials | None = None,
    partition: int = 0,
    query_start_loc: TensorArg | None = None,
    fp8_out_scale: TensorArg | None = None,
    more_rows_than_sequences: bool = False,
) -> DecodeProblem:
    """The problem of a call; OpError for a call that no kernel serves."""
    layout = check_kv(query, kv, options)
    num_rows, num_heads, head_size = query.shape
    num_seqs = kv.block_tables.shape[0]
    check.same_shape(out, query)
    check.dtype(out, *([query.dtype] if fp8_out_scale is None else [uint8, float8_e4m3fn]))
    if query_start_loc is None and not (more_rows_than_sequences and num_rows > num_seqs):
        check.sizes(kv.block_tables, num_seqs=num_rows, max_blocks=None)
    check.shape(options.lse, float32, num_heads=num_heads, num_rows=num_rows)
    if sparse.on and sparse.blocksparse_block_size <= 0:
        message = f"expected 1 or more, got {sparse.blocksparse_block_size}"
        raise check.refuse(query, "blocksparse_block_size", message)
    if partials:
        num_partitions = check.row_size(partials.exp_sums)
        sizes = {"num_seqs": num_seqs, "num_heads": num_heads, "max_partitions": num_partitions}
        check.shape(partials.exp_sums, float32, **sizes)
        check.shape(partials.max_logits, float32, **sizes)
        check.shape(partials.tmp_out, query.dtype, **sizes, head_size=head_size)
        if num_partitions > _MAX_GRID_Y:
            message = f"expected at most {_MAX_GRID_Y} partitions, got {num_partitions}"
            raise check.refuse(query, "tmp_out", message)
    return DecodeProblem(out, query, kv, layout, options, sparse, partials, partition, query_start_loc, fp8_out_scale)
