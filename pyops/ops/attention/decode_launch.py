"""Decode attention: the launches of a DecodeProblem with a DecodeConfig."""

from __future__ import annotations

from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg
from .arguments import Options, PagedKV, RaggedKV
from .combine import TILE_TOKENS, launch_combine
from .decode_choose import MIN_WHOLE_HEAD, DecodeConfig, blocks_of_one_split, waves_of
from .decode_problem import DecodeProblem
from .decode_step import shared_memory
from .decode_waves import Waves, wave_arguments
from .layout import CacheLayout, absent, heads_stride

_decode = Kernel("attention/attention_decode.cu")
decode_simt = Kernel("attention/attention_decode_simt.cu")

_NO_COMBINE = {"arrived": 0, "results": 0}
_FLOAT_BYTES = 4
NO_STARTS = {"HAS_STARTS": False, "starts_t": int32, "STARTS_STEP": 1}


def launch(problem: DecodeProblem, config: DecodeConfig) -> list[Launch]:
    """The kernel that computes the splits; if a sequence may have several, a combine kernel or the last block of each
    row combines them.
    """
    max_splits = problem.num_partitions or (1 if config.cluster_size > 1 else config.max_splits)
    arguments = {
        **absent(lse=problem.options.lse, sinks=problem.options.sinks),
        "query_start_loc": problem.query_start_loc or 0,
        "num_seqs": problem.num_seqs,
        "num_rows": problem.query.shape[0],
        "max_tokens": problem.max_tokens,
        "max_splits": max_splits,
        "min_split": config.min_split,
        "out_stride": heads_stride(problem.out),
        "length_step": problem.kv.seq_lens.strides[0],
    }
    is_combined = problem.partials is not None or max_splits > 1
    combines = config.combine if is_combined else None
    if not problem.partials:
        rows = problem.num_seqs * problem.num_heads * max_splits if combines else 0
        arguments |= workspace(rows, problem.head_size)
    constants = {
        "partial_t": problem.partial_dtype,
        "PARTITION": problem.partition,
        "DIRECT": problem.partials is None,
        **_starts(problem.query_start_loc),
    }
    waves = None  # if there are any, kernels distribute their splits by the lengths of all sequences
    may_balance = problem.uses_mma and (problem.num_seqs > 1 or problem.any_tokens)
    if may_balance and max_splits > 1 and not problem.partials and not tuning.batch_invariant():
        waves = waves_of(problem, problem.query.device, config)
    of_waves = wave_arguments(waves)
    if problem.uses_mma:
        of_combine = _combine_of_last_blocks(problem, waves) if is_combined and not combines and waves else _NO_COMBINE
        launches = [_launch_mma(problem, config, waves, constants, arguments | of_waves | of_combine)]
    else:
        launches = [_launch_simt(problem, config, constants, arguments)]
    if combines:
        constants |= {
            "length_t": problem.kv.seq_lens.dtype,
            "HAS_LENGTHS": True,
            "out_t": problem.out_dtype,
            "HAS_OUT_SCALE": problem.fp8_out_scale is not None,
            "LSE_BY_ROW": False,
            "SPLIT_UNIT": TILE_TOKENS,
        }
        arguments |= absent(fp8_out_scale=problem.fp8_out_scale) | of_waves
        launches.append(
            launch_combine(
                combines,
                problem.num_seqs,
                problem.out,
                problem.combine_vector_width,
                problem.options,
                constants,
                arguments,
            )
        )
    return launches


def _launch_mma(
    problem: DecodeProblem,
    config: DecodeConfig,
    waves: Waves | None,
    constants: dict[str, Any],
    arguments: dict[str, Any],
) -> Launch:
    """The launch of attention_decode.cu."""
    kernel = _decode(
        **kv_constants(problem.query, problem.kv, problem.layout, problem.options),
        **constants,
        NUM_KV_HEADS=problem.kv.num_kv_heads,
        CLUSTER=config.cluster_size,
        MAX_WARPS=config.max_warps,
        HEADS=config.heads_per_block,
        QUERY_ACCESS=_query_access(problem),
        HAS_TOKENS=problem.any_tokens,
        QUERY_TOKENS=problem.cta_tokens,
        TILES=config.tiles_per_step,
        ONE_AT_A_TIME=config.one_at_a_time,
        AHEAD=config.ahead,
        PIECES=config.pieces,
        SLICES=config.slices,
        MIN_BLOCKS=config.min_blocks,
        CONSTANT_PAST=problem.constant_past and config.cluster_size > 1 and problem.query_start_loc is None,
    )
    blocks = blocks_of_one_split(problem, config.heads_per_block)
    grid = (blocks, max(config.cluster_size, arguments["max_splits"]))
    if waves:
        grid = (_balanced_splits(problem, waves) * blocks // problem.num_seqs, 1)
    if problem.any_tokens:
        grid = (grid[0] + problem.max_other_tiles * problem.kv.num_kv_heads, config.cluster_size)
    return kernel.launch(
        grid,
        config.num_warps * problem.query.device.warp_size,
        shared_memory(problem, config.num_warps, config.heads_per_block, config.tiles_per_step),
        **arguments,
        **kv_arguments(problem.query, problem.kv, problem.layout, problem.options),
    )


def _query_access(problem: DecodeProblem) -> int:
    """Elements of the widest access that divides the query of a head into aligned pieces."""
    query = problem.query
    vector = 16 // query.dtype.itemsize
    bits = vector | problem.head_size | heads_stride(query) | (query.alignment // query.dtype.itemsize or 1)
    return bits & -bits


def _balanced_splits(problem: DecodeProblem, waves: Waves) -> int:
    """The most splits of all sequences, as Balance of splits.cuh distributes them."""
    num_seqs = problem.num_seqs
    rounded_up = int(num_seqs + 2 * waves.splits + 1)
    if num_seqs > 2 * waves.splits:
        return rounded_up
    whole = int(waves.most_of(problem.attended_tokens) * waves.splits) + 1
    return whole if problem.head_size >= MIN_WHOLE_HEAD else max(whole, rounded_up)


def _combine_of_last_blocks(problem: DecodeProblem, waves: Waves) -> dict[str, Scratch]:
    """Workspace for the results of splits that the last block of a row combines, as decode_combine.cuh lays it out."""
    warp_size = problem.query.device.warp_size
    access = 2 if problem.head_size <= 2 * warp_size else 4  # RESULT_ACCESS of decode_combine.cuh
    parts = -(-problem.head_size // (access * warp_size)) * warp_size + 1
    columns = problem.num_heads * problem.cta_tokens
    nbytes = _balanced_splits(problem, waves) * columns * parts * access * _FLOAT_BYTES
    counters = problem.num_seqs * columns * 4
    return {"arrived": Scratch(counters, zeroed=True), "results": Scratch(nbytes, zeroed=True)}


def _launch_simt(
    problem: DecodeProblem, config: DecodeConfig, constants: dict[str, Any], arguments: dict[str, Any]
) -> Launch:
    """The launch of attention_decode_simt.cu, one query head to a block."""
    kernel = decode_simt(
        **kv_constants(problem.query, problem.kv, problem.layout, problem.options),
        **constants,
        NUM_KV_HEADS=problem.kv.num_kv_heads,
        NUM_WARPS=config.num_warps,
        VARLEN=False,
        CAUSAL=False,
        RAGGED=False,
        SPARSE=problem.sparse.on,
        VALUE_SIZE=problem.head_size,
        X=problem.layout.x,
    )
    sparse = problem.sparse.named()
    del sparse["tp_rank"]
    return kernel.launch(
        (problem.num_seqs * problem.num_heads, arguments["max_splits"]),
        config.num_warps * 32,
        **arguments,
        **kv_arguments(problem.query, problem.kv, problem.layout, problem.options),
        **sparse,
        first_step=problem.sparse.first_step(problem.num_heads, problem.kv.num_kv_heads),
        cu_seqlens_q=0,
        starts_step=0,
    )


def kv_constants(query: TensorArg, kv: PagedKV | RaggedKV, layout: CacheLayout, options: Options) -> dict[str, Any]:
    """The compile-time constants common to all kernels with a paged cache or ragged keys and values."""
    return {
        "scalar_t": query.dtype,
        "cache_t": layout.dtype,
        "table_t": int32 if isinstance(kv, RaggedKV) else kv.block_tables.dtype,
        "length_t": lengths_of(kv).dtype,
        "HEAD_SIZE": query.shape[2],
        "GROUP": query.shape[1] // layout.num_kv_heads,
        "BLOCK_SIZE": layout.block_size,
        "PACKED": layout.packed,
        "HEAD_SCALES": layout.head_scales,
        "HAS_ALIBI": options.alibi_slopes is not None,
        "HAS_SOFTCAP": options.logits_soft_cap > 0,
        "HAS_SINKS": options.sinks is not None,
        "HAS_LSE": options.lse is not None,
    }


def kv_arguments(query: TensorArg, kv: PagedKV | RaggedKV, layout: CacheLayout, options: Options) -> dict[str, Any]:
    """The arguments common to all kernels with a paged cache or ragged keys and values."""
    found = {
        **absent(alibi_slopes=options.alibi_slopes),
        **layout.strides,
        "num_blocks": layout.num_blocks,
        "query_stride": heads_stride(query),
    }
    if isinstance(kv, RaggedKV):
        unused = dict.fromkeys(("block_tables", "table_stride", "table_step", "k_scale", "v_scale"), 0)
        return found | unused | {"key_cache": kv.key, "value_cache": kv.value, "seq_lens": kv.cu_seqlens_k}
    return found | {"table_stride": kv.block_tables.strides[0], "table_step": kv.block_tables.strides[1]}


def lengths_of(kv: PagedKV | RaggedKV) -> TensorArg:
    """The argument that kernels take as seq_lens."""
    lengths: TensorArg = kv.cu_seqlens_k if isinstance(kv, RaggedKV) else kv.seq_lens
    return lengths


def workspace(rows: int, head_size: int) -> dict[str, Any]:
    """Workspace for the float32 partial results of `rows` splits of heads; null pointers if `rows` is 0."""
    if not rows:
        return {"tmp_out": 0, "max_logits": 0, "exp_sums": 0}
    return {"tmp_out": Scratch(rows * head_size * 4), "max_logits": Scratch(rows * 4), "exp_sums": Scratch(rows * 4)}


def _starts(query_start_loc: TensorArg | None) -> dict[str, Any]:
    """The compile-time constants for the first row of each sequence."""
    if query_start_loc is None:
        return NO_STARTS
    return {"HAS_STARTS": True, "starts_t": query_start_loc.dtype, "STARTS_STEP": query_start_loc.strides[0]}
