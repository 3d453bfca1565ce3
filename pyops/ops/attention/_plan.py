"""The plan of decode attention, for all of its ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..._core import check
from ..._core.device import Device
from ..._core.dtypes import DType, float8_e4m3fn, float8_e4m3fnuz, float32, int32, uint8
from ..._core.kernel import Kernel, Launch, Scratch, Specialisation
from ..._core.lazy import torch
from ..._core.tensor import TensorArg
from .reference import Sparse

if TYPE_CHECKING:
    from torch import Tensor

_decode = Kernel("attention/attention_decode.cu")
decode_simt = Kernel("attention/attention_decode_simt.cu")
combine = Kernel("attention/attention_combine.cu")

NO_STARTS = {"HAS_STARTS": False, "starts_t": int32, "STARTS_STEP": 1}
NUM_WARPS = 4
TILE_TOKENS = 16  # rows of a product
_MIN_SPLIT = 64  # tokens: a step of every warp of a block
_MAX_SPLITS = 128
_MAX_STEPS = 4  # of a warp, for which a cluster takes a whole sequence: more are worth splits and their join
_ONE_ROUND = (4, 3)  # warps of blocks that are to run in one round, if they fit
_JOIN_THREADS = (512, 128)  # of a head, at most: of few heads, and of many
_LARGEST_HEAD = 1024
MAX_TOKENS = 2**31 - 2**20  # counted in 32 bits, with room for the last step


@dataclass(frozen=True, slots=True)
class Cache:
    """The caches of a call: their layout and what a kernel is told of it."""

    packed: bool
    dtype: DType
    num_blocks: int
    block_size: int
    num_kv_heads: int
    chunk: int  # elements of the innermost dimension of packed keys
    strides: dict[str, int]
    aligned: bool  # for accesses of 16 bytes to everything that is read at once

    @classmethod
    def of(
        cls, key_cache: TensorArg, value_cache: TensorArg, query: TensorArg, head_size: int, kv_cache_dtype: str
    ) -> Cache:
        kind = check.cache_dtype(key_cache, kv_cache_dtype, query.dtype)
        if check.cache_dtype(value_cache, kv_cache_dtype, query.dtype) is not kind:
            raise value_cache.error(f"expected codes of {kind} like key_cache, got {value_cache.dtype}")
        packed = len(key_cache.shape) == 5
        chunk = 16 // kind.itemsize
        if packed:
            if len(value_cache.shape) != 4:
                raise value_cache.error(f"expected 4 dimensions beside a key_cache of 5, got shape {value_cache.shape}")
            num_blocks, num_kv_heads, _, block_size, _ = key_cache.shape
            if head_size % chunk:
                raise key_cache.error(f"a packed cache of {kind} takes head sizes that are multiples of {chunk}")
            expected: tuple[int, ...] = (num_blocks, num_kv_heads, head_size // chunk, block_size, chunk)
            expected_values: tuple[int, ...] = (num_blocks, num_kv_heads, head_size, block_size)
            inner = {key_cache: (block_size * chunk, chunk, 1), value_cache: (block_size, 1)}
            heads = 1
        else:
            if len(key_cache.shape) != 4:
                raise key_cache.error(f"expected 5 dimensions (packed) or 4, got shape {key_cache.shape}")
            num_blocks, block_size, num_kv_heads, _ = key_cache.shape
            expected = expected_values = (num_blocks, block_size, num_kv_heads, head_size)
            inner = {key_cache: (1,), value_cache: (1,)}
            heads = 2
        for cache, shape in ((key_cache, expected), (value_cache, expected_values)):
            if cache.shape != shape:
                raise cache.error(f"expected shape {shape}, got {cache.shape}")
            steps = inner[cache]
            sizes = cache.shape[-len(steps) :]
            if cache.numel and any(
                n > 1 and a != b for n, a, b in zip(sizes, cache.strides[-len(steps) :], steps, strict=True)
            ):
                raise cache.error(f"expected the last {len(steps)} dimensions contiguous, got strides {cache.strides}")
        strides = {}
        aligned = head_size % chunk == 0 and key_cache.alignment == value_cache.alignment == 16
        for name, cache in (("key", key_cache), ("value", value_cache)):
            strides[f"{name}_block_stride"] = cache.strides[0]
            strides[f"{name}_token_stride"] = 0 if packed else cache.strides[1]
            strides[f"{name}_head_stride"] = cache.strides[heads]
            outer = cache.strides[: heads + 1]
            aligned &= all(stride % chunk == 0 or size == 1 for stride, size in zip(outer, cache.shape, strict=False))
        return cls(packed, kind, num_blocks, block_size, num_kv_heads, chunk, strides, aligned)


def heads_stride(arg: TensorArg) -> int:
    """Elements from one row of [rows, heads, head_size] to the next; heads and their elements must be contiguous."""
    _, heads, size = arg.shape
    if arg.numel and ((size > 1 and arg.strides[2] != 1) or (heads > 1 and arg.strides[1] != size)):
        raise arg.error(f"expected the last two dimensions contiguous, got strides {arg.strides}")
    return arg.strides[0]


def checked(
    query: TensorArg,
    key_cache: TensorArg,
    value_cache: TensorArg,
    num_kv_heads: int,
    block_tables: TensorArg,
    seq_lens: TensorArg,
    block_size: int,
    kv_cache_dtype: str,
    k_scale: TensorArg,
    v_scale: TensorArg,
    alibi_slopes: TensorArg | None,
    sinks: TensorArg | None,
    sliding_window: int,
) -> Cache:
    """The caches of a call, where these arguments fit together."""
    check.floating(query)
    check.sizes(query, num_tokens=None, num_heads=None, head_size=None)
    _, num_heads, head_size = query.shape
    check.index(block_tables, num_seqs=None, max_blocks=None)
    check.index(seq_lens, num_seqs=block_tables.shape[0])
    cache = Cache.of(key_cache, value_cache, query, head_size, kv_cache_dtype)
    for name, given, held in (
        ("num_kv_heads", num_kv_heads, cache.num_kv_heads),
        ("block_size", block_size, cache.block_size),
    ):
        if given != held:
            raise check.refuse(query, name, f"expected {held} as in key_cache of shape {key_cache.shape}, got {given}")
    if num_kv_heads == 0 or num_heads % num_kv_heads or block_size == 0 or head_size == 0:
        raise query.error(f"expected heads that are a multiple of num_kv_heads={num_kv_heads}, got shape {query.shape}")
    if head_size > _LARGEST_HEAD:
        raise query.error(f"expected a head_size of at most {_LARGEST_HEAD}, got {head_size}")
    for per_head in (alibi_slopes, sinks):
        check.shape(per_head, float32, num_heads=num_heads)
    check.at_least(k_scale, float32, 1)
    check.at_least(v_scale, float32, 1)
    if sliding_window < 0:
        raise check.refuse(query, "sliding_window", f"expected 0 or more, got {sliding_window}")
    return cache


def example_caches(
    make: Any, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: DType, packed: bool
) -> tuple[Any, Any]:
    """Caches of keys and values, of these elements, for an op's example."""
    x = 16 // dtype.itemsize
    keys: tuple[int, ...] = (num_blocks, block_size, num_kv_heads, head_size)
    values = keys
    if packed:
        keys = (num_blocks, num_kv_heads, head_size // x, block_size, x)
        values = (num_blocks, num_kv_heads, head_size, block_size)
    return make.randn(*keys, dtype=dtype.name), make.randn(*values, dtype=dtype.name)


def warps_of_block(blocks: int, resident: int) -> int:
    """Warps of a block, of which there are so many, where `resident` of four warps run at the same time.

    A last round of blocks takes at least half the time of a full one, so that it is best a full one or none. A single
    round leaves as little room as it can: blocks of the next kernel would fill it, unevenly.
    """
    for warps in _ONE_ROUND:
        if blocks * warps <= NUM_WARPS * resident:
            return warps

    def waste(warps: int) -> float:
        rounds = blocks * warps / (NUM_WARPS * resident)
        part = rounds % 1.0
        return (rounds - part + (max(part, 0.5) if part else 0.0)) / rounds

    return min((4, 2, 1), key=waste)


def blocks_of_cluster(blocks: int, most_tokens: int, step: int, wide: bool, device: Device) -> tuple[int, int]:
    """How many blocks take a sequence together where `blocks` would take all, and of how many warps; 1 if none do.

    They need no second kernel for their join, but neither do they know of other sequences: so only where one block each
    would leave half of the multiprocessors idle, and where the longest sequence is not long. They have twice the warps
    where they may be so `wide`, tokens are many, and half of the multiprocessors are left to the next kernel, which may
    start early.
    """
    warps = NUM_WARPS
    if wide and most_tokens > 8 * warps * step and 16 * blocks <= device.multiprocessors:
        warps *= 2
    if 2 * blocks > device.multiprocessors:
        return 1, warps
    room = min(device.cluster, 2 * device.multiprocessors // max(1, blocks), -(-most_tokens // (warps * step)))
    cluster = next(n for n in (8, 4, 2, 1) if n <= max(1, room))
    steps = min(_MAX_STEPS, max(2, blocks))  # few blocks cannot ask for all that memory gives
    return (cluster, warps) if most_tokens <= steps * cluster * warps * step else (1, warps)


def splits_of_sequence(num_seqs: int, slots: float, most_tokens: int, rounds: int) -> int:
    """The most splits of a sequence, where `slots` splits of all of them run at the same time.

    Of one sequence, two thirds of these: memory has no more to give. Of several, so many times the share of each.
    """
    if 4 * slots < num_seqs:
        return 1  # their blocks are so many that a long one is none of the last
    wanted = slots * 2 / 3 if num_seqs <= 1 else max(4, rounds * slots / num_seqs)
    return max(1, min(-(-most_tokens // _MIN_SPLIT), _MAX_SPLITS, int(wanted)))


def starts_of(query_start_loc: TensorArg) -> dict[str, Any]:
    """The constants that tell where sequences begin."""
    return {"HAS_STARTS": True, "starts_t": query_start_loc.dtype, "STARTS_STEP": query_start_loc.strides[0]}


def join_splits(
    num_seqs: int, most_splits: int, out: TensorArg, tmp_out: TensorArg | None, **constants: Any
) -> Specialisation:
    """The kernel that joins up to `most_splits` splits of each sequence into `out` [.., num_heads, head_size]."""
    num_heads, head_size = out.shape[-2:]
    widest = 16 // max(constants["partial_t"].itemsize, constants["out_t"].itemsize)
    vec_size = min(check.vector_width(head_size, *(arg for arg in (out, tmp_out) if arg)), widest)
    lanes = -(-head_size // (vec_size * out.device.warp_size)) * out.device.warp_size
    many = num_seqs * num_heads > 4 * out.device.multiprocessors
    # Four splits of a group are in flight together. Many sequences have few splits: then blocks take several heads.
    groups = next((n for n in (1, 2, 4, 8) if 4 * n >= most_splits or 2 * n * lanes > _JOIN_THREADS[many]), 8)
    heads = next((n for n in (8, 4, 2) if many and num_heads % n == 0 and n * groups * lanes <= 256), 1)
    return combine(
        **constants,
        HEAD_SIZE=head_size,
        NUM_HEADS=num_heads,
        VEC_SIZE=vec_size,
        LANES=lanes,
        GROUPS=groups,
        HEADS=heads,
    )


def launch_join(kernel: Specialisation, num_seqs: int, /, **values: Any) -> Launch:
    """The launch of what `join_splits` gives."""
    constants = kernel.constants
    num_threads = constants["LANES"] * constants["GROUPS"] * constants["HEADS"]
    return kernel.launch(num_seqs * constants["NUM_HEADS"] // constants["HEADS"], num_threads, **values)


def plan(
    out: TensorArg,
    query: TensorArg,
    key_cache: TensorArg,
    value_cache: TensorArg,
    num_kv_heads: int,
    block_tables: TensorArg,
    seq_lens: TensorArg,
    block_size: int,
    alibi_slopes: TensorArg | None,
    kv_cache_dtype: str,
    k_scale: TensorArg,
    v_scale: TensorArg,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    sliding_window: int = 0,
    logits_soft_cap: float = 0.0,
    sinks: TensorArg | None = None,
    lse: TensorArg | None = None,
    exp_sums: TensorArg | None = None,
    max_logits: TensorArg | None = None,
    tmp_out: TensorArg | None = None,
    partition: int = 0,
    rows_of_others: bool = False,
    query_start_loc: TensorArg | None = None,
    fp8_out_scale: TensorArg | None = None,
    **_: Any,
) -> list[Launch]:
    """The launches of an op whose parameters have these names. With `rows_of_others`, there may be more rows than
    sequences."""
    sparse = Sparse(
        tp_rank,
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
    )
    cache = checked(
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        block_tables,
        seq_lens,
        block_size,
        kv_cache_dtype,
        k_scale,
        v_scale,
        alibi_slopes,
        sinks,
        sliding_window,
    )
    num_rows, num_heads, head_size = query.shape
    num_seqs = block_tables.shape[0]
    check.same_shape(out, query)
    check.dtype(out, *([query.dtype] if fp8_out_scale is None else [uint8, float8_e4m3fn]))
    if query_start_loc is None and not (rows_of_others and num_rows > num_seqs):
        check.sizes(block_tables, num_seqs=num_rows, max_blocks=None)
    check.shape(lse, float32, num_heads=num_heads, num_rows=num_rows)
    if sparse.on and sparse.block_size <= 0:
        raise check.refuse(query, "blocksparse_block_size", f"expected 1 or more, got {sparse.block_size}")

    group = num_heads // num_kv_heads
    products = (
        query.dtype is not float32
        and cache.aligned
        and head_size <= 256
        and query.device.warp_size == 32
        and not sparse.on
        and max(cache.strides["key_token_stride"], cache.strides["value_token_stride"]) * block_size < 2**31
        and (not cache.packed or block_size % (4 if cache.dtype is query.dtype else 8) == 0)
    )
    heads = 16 if group > 8 and head_size <= 128 else 8  # of large heads, results of eight fit into registers
    # As many bytes on their way as registers have room for; large heads, many of them and small blocks take more.
    wide = head_size <= 64 and block_size % TILE_TOKENS == 0
    tiles = 1 if cache.chunk == 8 or head_size > 128 else 4 if wide else 2  # of 16 tokens in a warp's step
    large = head_size > 128 or heads > 8 or cache.dtype is float8_e4m3fnuz  # which integers convert
    min_blocks = 2 if large or block_size % 8 or (tiles == 4 and not cache.packed) else 3
    blocks = num_seqs * (num_kv_heads * -(-group // heads) if products else num_heads)
    most_tokens = min(block_tables.shape[1] * block_size, MAX_TOKENS)
    resident = min_blocks * query.device.multiprocessors  # blocks of four warps that run at the same time
    num_warps = warps_of_block(blocks, resident) if products else NUM_WARPS
    resident = resident * NUM_WARPS // num_warps
    slots = resident * num_seqs / max(1, blocks)
    cluster = 1
    if products and not tmp_out:
        small = min(heads, group) * head_size <= 1024  # whose results fit into shared memory
        cluster, warps = blocks_of_cluster(blocks, most_tokens, TILE_TOKENS * tiles, small, query.device)
    if cluster > 1:
        most_splits, num_warps = 1, warps
        if num_warps > NUM_WARPS:
            min_blocks = 1
    elif tmp_out:
        assert exp_sums
        assert max_logits
        sizes = {"num_seqs": num_seqs, "num_heads": num_heads, "most_partitions": exp_sums.shape[-1]}
        check.shape(exp_sums, float32, **sizes)
        check.shape(max_logits, float32, **sizes)
        check.shape(tmp_out, query.dtype, **sizes, head_size=head_size)
        most_splits = max(1, exp_sums.shape[-1])
        most_tokens = min(most_tokens, most_splits * partition)
    else:
        most_splits = splits_of_sequence(num_seqs, slots, most_tokens, 8 if products else 2)
    balanced = products and not tmp_out and num_seqs > 1 and most_splits > 1
    if most_splits > 65535:
        raise check.refuse(query, "tmp_out", f"expected at most 65535 partitions, got {most_splits}")
    direct = tmp_out is None
    combined = not direct or most_splits > 1
    rows = num_seqs * num_heads * most_splits if combined else 0
    memory: dict[str, Any] = {}
    if direct:
        memory = {
            "tmp_out": Scratch(rows * head_size * 4) if rows else 0,
            "max_logits": Scratch(rows * 4) if rows else 0,
            "exp_sums": Scratch(rows * 4) if rows else 0,
        }
    flags = {
        "PARTITION": partition,
        "DIRECT": direct,
        "HAS_SINKS": sinks is not None,
        "HAS_LSE": lse is not None,
        **(starts_of(query_start_loc) if query_start_loc else NO_STARTS),
    }
    partial_t = float32 if tmp_out is None else tmp_out.dtype
    types = {"partial_t": partial_t, "length_t": seq_lens.dtype}
    common = {
        **{name: 0 for name, arg in (("lse", lse), ("sinks", sinks), ("query_start_loc", query_start_loc)) if not arg},
        **memory,
        "num_seqs": num_seqs,
        "num_rows": num_rows,
        "max_tokens": most_tokens,
        "max_splits": most_splits,
        "sliding_window": sliding_window,
        "min_split": _MIN_SPLIT,
        "out_stride": heads_stride(out),
        "length_step": seq_lens.strides[0],
    }
    balance: dict[str, Any] = {"wave_splits": slots}
    constants = {
        "scalar_t": query.dtype,
        **types,
        "cache_t": cache.dtype,
        "table_t": block_tables.dtype,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "PACKED": cache.packed,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "NUM_WARPS": num_warps,
        **flags,
        "HAS_ALIBI": alibi_slopes is not None,
        "HAS_SOFTCAP": logits_soft_cap > 0,
    }
    fixed = {
        **common,
        **({} if alibi_slopes else {"alibi_slopes": 0}),
        **cache.strides,
        "num_blocks": cache.num_blocks,
        "query_stride": heads_stride(query),
        "table_stride": block_tables.strides[0],
        "table_step": block_tables.strides[1],
        "logits_soft_cap": logits_soft_cap,
    }
    if products:
        fixed |= balance
        # Large heads leave no registers for options, on later architectures none for themselves.
        crowded = alibi_slopes or logits_soft_cap or not query.device.arch.startswith(("sm_8", "sm_90"))
        kernel = _decode(
            **constants,
            BALANCED=balanced,
            CLUSTER=cluster,
            HEADS=heads,
            TILES=tiles,
            ONE_AT_A_TIME=bool(crowded) and head_size > 128 and cache.chunk == 8,
            MIN_BLOCKS=min_blocks,
        )
    else:
        kernel = decode_simt(**constants, VARLEN=False, CAUSAL=False, SPARSE=sparse.on, X=cache.chunk)
        fixed |= {
            **dict.fromkeys(("cu_seqlens_q", "starts_step"), 0),
            "blocksparse_local_blocks": sparse.local_blocks,
            "blocksparse_vert_stride": sparse.vert_stride,
            "blocksparse_block_size": sparse.block_size,
            "blocksparse_head_sliding_step": sparse.head_sliding_step,
            "first_step": sparse.first_step(num_heads, num_kv_heads),
        }
    grid = (int(num_seqs + 2 * slots + 1) * blocks // num_seqs, 1) if balanced else (blocks, max(cluster, most_splits))
    launches = [kernel.launch(grid, num_warps * 32, **fixed)]
    if combined:
        join = join_splits(
            num_seqs,
            most_splits,
            out,
            tmp_out,
            **types,
            **flags,
            BALANCED=balanced,
            out_t=float8_e4m3fn if fp8_out_scale else out.dtype,
            HAS_OUT_SCALE=fp8_out_scale is not None,
            LSE_BY_ROW=False,
        )
        absent = {} if fp8_out_scale else {"fp8_out_scale": 0}
        launches.append(launch_join(join, num_seqs, **common, **balance, **absent))
    return launches


def bad_indices(
    block_tables: Tensor,
    seq_lens: Tensor,
    num_blocks: int,
    block_size: int,
    attended: Tensor | int = 0,
    most_tokens: int | None = None,
) -> dict[str, Tensor]:
    """For PYOPS_CHECK: lengths that have no room, and entries that name no block, of those that tokens need: the last
    `attended` of each sequence, or all for 0."""
    room = block_tables.shape[1] * block_size
    first = torch.arange(block_tables.shape[1], device=block_tables.device) * block_size
    begins = torch.where(torch.as_tensor(attended) > 0, seq_lens - attended, 0)
    used = (first < seq_lens[:, None]) & (first + block_size > begins[:, None])
    return {
        "block_tables": used & ((block_tables < 0) | (block_tables >= num_blocks)),
        "seq_lens": (seq_lens < 0) | (seq_lens > (room if most_tokens is None else min(room, most_tokens))),
    }
