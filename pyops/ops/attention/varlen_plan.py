"""Attention of many query tokens: the problem, the choice of a Config, and the launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..._core import check, tuning
from ..._core.device import Device
from ..._core.dtypes import float32
from ..._core.kernel import Kernel, Launch
from ..._core.tensor import TensorArg
from .arguments import Options, PagedKV, Sparse
from .decode_launch import NO_STARTS, decode_simt, kv_arguments, kv_constants
from .layout import CacheLayout, absent, check_kv, heads_stride, max_tokens_of

_varlen = Kernel("attention/attention_varlen.cu")

_NUM_WARPS = 4
_TILE_ROWS = 16  # rows of one matrix product; a row is a query token and one of the heads that share a key-value head
# docs/performance.md, "Two tiles of 16 rows to a warp read keys and values half as often".
_MIN_ROWS_FOR_TWO_TILES = 256  # of a sequence, on average
_MAX_HEAD_SIZE_OF_TWO_TILES = 64  # with codes or options; 128 on sm_90 without ("two tiles spill: one then")


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Query tokens of several sequences against a paged cache."""

    out: TensorArg
    query: TensorArg
    kv: PagedKV
    layout: CacheLayout
    options: Options
    cu_seqlens_q: TensorArg
    causal: bool

    @property
    def num_seqs(self) -> int:
        return int(self.kv.block_tables.shape[0])

    @property
    def num_rows(self) -> int:
        """Rows of the matrix products of one key-value head."""
        num_tokens, num_heads, _ = self.query.shape
        return num_tokens * num_heads // self.kv.num_kv_heads

    @property
    def uses_mma(self) -> bool:
        """Whether attention_varlen.cu serves the call; attention_decode_simt.cu serves every call."""
        query, head_size = self.query, self.query.shape[2]
        return (
            query.dtype is not float32
            and self.layout.aligned
            and query.alignment == 16
            and heads_stride(query) % 8 == 0
            and head_size % 16 == 0
            and head_size <= 256
            and query.device.supports("mma")
            and (not self.layout.packed or self.layout.block_size % 8 == 0)
        )

    def bucket(self) -> str:
        (num_tokens, num_heads, head_size), layout, options = self.query.shape, self.layout, self.options
        words = [
            "mma" if self.uses_mma else "simt",
            f"{self.query.dtype.name}",
            f"cache={layout.dtype.name}{'-packed' * layout.packed}",
            f"heads={num_heads}/{self.kv.num_kv_heads}x{head_size}",
            f"block={layout.block_size}",
            f"seqs={tuning.power_of_two(self.num_seqs)}",
            f"query_tokens={tuning.power_of_two(num_tokens)}",
        ]
        words += ["logits_changed"] if options.alibi_slopes or options.logits_soft_cap else []
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Config:
    """How one call runs.

    Attributes:
        num_warps: of a block.
        row_tiles: tiles of 16 rows to a warp.
        step_tokens: tokens whose keys and values a block holds in shared memory at once.
        min_blocks: blocks that a multiprocessor must hold; bounds the registers.
    """

    num_warps: int
    row_tiles: int
    step_tokens: int
    min_blocks: int

    def candidates(self, problem: Problem, device: Device) -> list[Config]:
        """Other warps, tiles, steps and registers."""
        if not problem.uses_mma:
            return tuning.varied(self, num_warps=tuning.beside(self.num_warps, 2, 8))
        found = tuning.varied(
            self,
            num_warps=tuning.beside(self.num_warps, self.step_tokens // 16, 8),
            row_tiles=(1, 2),
            step_tokens=tuning.beside(self.step_tokens, 16, 16 * self.num_warps),
            min_blocks=(1, 2, 3),
        )
        return [config for config in found if shared_memory(problem, config) <= device.shared_memory]


def check_varlen(call: Mapping[str, Any]) -> Problem:
    """The problem of a call, whose arguments are given by name; OpError for a call that no kernel serves."""
    query, out, cu_seqlens_q = call["query"], call["out"], call["cu_seqlens_q"]
    kv, options = PagedKV.of(call), Options.of(call)
    layout = check_kv(query, kv, options)
    check.like(out, query)
    check.index(cu_seqlens_q, num_seqs_and_one=kv.block_tables.shape[0] + 1)
    check.shape(options.lse, float32, num_heads=query.shape[1], num_tokens=query.shape[0])
    return Problem(out, query, kv, layout, options, cu_seqlens_q, bool(call["causal"]))


def choose(problem: Problem, device: Device) -> Config:
    """The Config for this problem."""
    head_size, options = problem.query.shape[2], problem.options
    is_plain = (
        problem.layout.dtype is problem.query.dtype and options.alibi_slopes is None and not options.logits_soft_cap
    )
    max_head_size = _MAX_HEAD_SIZE_OF_TWO_TILES * (2 if is_plain and device.arch == "sm_90" else 1)
    many_rows = problem.num_rows >= _MIN_ROWS_FOR_TWO_TILES * problem.num_seqs
    return Config(
        num_warps=_NUM_WARPS,
        row_tiles=2 if many_rows and head_size <= max_head_size else 1,
        step_tokens=64 if head_size <= 128 else 32,
        min_blocks=2,
    )


def shared_memory(problem: Problem, config: Config) -> int:
    """Bytes of dynamic shared memory of a block, as attention_varlen.cu counts them.

    Queries, two steps of keys and two steps of values; rows are padded to 128 bytes.
    """
    head_size, tokens = problem.query.shape[2], config.step_tokens
    head_bytes, step_bytes = -(-head_size // 64) * 128, tokens * 2
    value_bytes = head_size * max(128, step_bytes) if problem.layout.packed else tokens * head_bytes
    block_rows = config.num_warps * _TILE_ROWS * config.row_tiles
    return block_rows * head_bytes + 2 * tokens * head_bytes + 2 * value_bytes


def launch(problem: Problem, config: Config) -> Launch:
    """The kernel, and nothing to join: a block takes its rows over all tokens."""
    options = problem.options
    constants = {
        **kv_constants(problem.query, problem.kv, problem.layout, options),
        "starts_t": problem.cu_seqlens_q.dtype,
        "X": problem.layout.x,
        "NUM_WARPS": config.num_warps,
        "CAUSAL": problem.causal,
    }
    arguments = {
        **absent(sinks=options.sinks, lse=options.lse),
        **kv_arguments(problem.query, problem.kv, problem.layout, options),
        "num_seqs": problem.num_seqs,
        "max_tokens": max_tokens_of(problem.kv),
        "out_stride": heads_stride(problem.out),
        "length_step": problem.kv.seq_lens.strides[0],
        "starts_step": problem.cu_seqlens_q.strides[0],
    }
    if problem.uses_mma:
        return _launch_mma(problem, config, constants, arguments)
    return _launch_simt(problem, config, constants, arguments)


def _launch_mma(problem: Problem, config: Config, constants: dict[str, Any], arguments: dict[str, Any]) -> Launch:
    num_tokens, out = problem.query.shape[0], problem.out
    block_rows = config.num_warps * _TILE_ROWS * config.row_tiles
    pairs = out.alignment >= 2 * out.dtype.itemsize and heads_stride(out) % 2 == 0
    kernel = _varlen(
        **constants,
        TOKENS=config.step_tokens,
        ROW_TILES=config.row_tiles,
        MIN_BLOCKS=config.min_blocks,
        OUT_ACCESS=2 if pairs else 1,
    )
    # Each sequence may leave one block with fewer rows.
    grid = (problem.num_rows // block_rows + problem.num_seqs if num_tokens else 0, problem.kv.num_kv_heads)
    return kernel.launch(
        grid, config.num_warps * 32, shared_memory(problem, config), num_tokens=num_tokens, **arguments
    )


def _launch_simt(problem: Problem, config: Config, constants: dict[str, Any], arguments: dict[str, Any]) -> Launch:
    num_tokens, num_heads, _ = problem.query.shape
    kernel = decode_simt(
        **NO_STARTS
        | constants
        | {
            "NUM_KV_HEADS": problem.kv.num_kv_heads,
            "PARTITION": 0,
            "DIRECT": True,
            "VARLEN": True,
            "SPARSE": False,
            "partial_t": float32,
        }
    )
    sparse = Sparse().named() | {"first_step": 0}
    del sparse["tp_rank"]
    arguments |= dict.fromkeys((*sparse, "tmp_out", "max_logits", "exp_sums", "query_start_loc"), 0)
    arguments |= {"num_rows": num_tokens, "max_splits": 1, "min_split": 64}
    return kernel.launch((num_tokens * num_heads if problem.num_seqs else 0, 1), config.num_warps * 32, **arguments)
