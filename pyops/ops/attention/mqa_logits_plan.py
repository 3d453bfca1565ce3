"""The logits of sparse attention's indexer: the launch, which both ops share."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.tensor_map import TensorMap
from ..._core.tensors.dtypes import DType, float32, int32
from ..._core.tensors.tensor import TensorArg

_mqa_logits = Kernel("attention/mqa_logits.cu")
_mqa_logits_sm90 = Kernel("attention/mqa_logits_sm90.cu")
_mqa_logits_simt = Kernel("attention/mqa_logits_simt.cu")

# mqa_logits.cu: threads of a block, keys of a tile, blocks per SM. Two blocks of 192 threads leave 168 registers to a
# thread; of 256 threads they leave 128, and the keys of a warp take 64: some architectures would spill.
_NUM_THREADS, TILE, _BLOCKS = 192, 192, 2
_RESERVED_SHARED = 1024  # bytes of shared memory that the device reserves in every block
# mqa_logits_sm90.cu: consumer warpgroups, keys of a tile, most columns of an MMA, most keys of a TMA box, most tiles
# and most groups of rows in flight, warps that load keys, most heads, most rows of a sequence.
_SM90_CONSUMERS, _SM90_TILE, _SM90_COLUMNS, _SM90_BOX, _SM90_STAGES, _SM90_KEY_WARPS = 2, 256, 128, 64, 4, 2
_SM90_MAX_HEADS, _SM90_MAX_ROWS = 64, 8
_MIN_BOX = 8  # fewest keys of a box: the period of the swizzle
_SIMT_WARPS = 4  # warps of a block of mqa_logits_simt.cu, a key each
_HEAD_SIZES = (64, 128)  # head sizes of mqa_logits.cu
_MAX_HEADS = 192  # most heads of mqa_logits.cu: a thread loads a weight
_MAX_POSITIONS = 2**30  # most keys and columns: kernels count them in ints
_MAX_GRID_Y = 2**16 - 1  # most blocks of a group of rows
# Waves of blocks: enough that a last partial wave costs little, few enough that a block reads its queries, or keys,
# many times.
_WAVES = 4


def blocks_in_flight(arg: TensorArg) -> int:
    """Blocks of some waves of mqa_logits.cu."""
    return _WAVES * _BLOCKS * arg.device.num_sms


def launch(
    tensors: tuple[TensorArg, TensorArg, TensorArg],
    *,
    keys: TensorArg,
    q_stride: int,
    aligned: bool,
    groups: int,
    positions: int,
    constants: dict[str, Any],
    **arguments: int,
) -> Launch:
    """The launch of `groups` groups of rows with `positions` keys or columns, for (logits, q, weights).

    Args:
        keys: [num_blocks, block_size, head_size], within an argument of the op; rows of a tensor are one block.
        aligned: whether every key begins at a multiple of 16 bytes.
    """
    logits, q, weights = tensors
    num_heads, head_size = q.shape[-2:]
    num_rows, columns = logits.shape
    if not num_heads or not head_size:
        raise q.error(f"expected at least one head of at least one element, got shape {q.shape}")
    check.dtype(logits, float32)
    check.row_size(logits)
    check.dtype(weights, float32)
    check.sizes(weights, num_rows=num_rows, num_heads=num_heads)
    check.row_size(weights)
    if max(columns, arguments["num_keys"]) > _MAX_POSITIONS:
        raise logits.error(f"expected at most {_MAX_POSITIONS} columns and keys, got shape {logits.shape}")
    absent: dict[str, DType | int | bool] = {
        "length_t": int32,
        "table_t": int32,
        "BLOCK_SIZE": 1,
        "SCALE_ACCESS": 4,
        "LENGTH_PER_ROW": False,
        "COMPRESSED": False,
    }
    strides = ("num_blocks", "key_stride", "block_stride", "table_stride", "table_step", "length_step")
    fed = dict.fromkeys(strides, 0) | arguments
    fed |= {"columns": columns, "q_stride": q_stride}
    fed |= {"logits_stride": logits.strides[0], "weights_stride": weights.strides[0]}
    sizes = {"NUM_HEADS": num_heads, "HEAD_SIZE": head_size}
    padded_heads = -(-num_heads // 16) * 16
    takes_vectors = aligned and q.alignment == 16 and (q_stride % 16 == 0 or num_rows == 1) and head_size in _HEAD_SIZES
    tiles = -(-positions // TILE)
    if takes_vectors and num_heads <= _SM90_MAX_HEADS and q.device.supports("wgmma"):
        on_hopper = _launch_sm90(q, keys, positions, absent | constants | sizes, fed)
        if on_hopper:
            return on_hopper
    if constants["PAGED"]:
        tiles = min(tiles, -(-blocks_in_flight(q) // max(1, groups)))
    shared = 2 * padded_heads * ((head_size + 8) * 2 + 4)
    if q.device.supports("mma") and takes_vectors and num_heads <= _MAX_HEADS and shared <= q.device.shared_memory:
        grid = groups, min(tiles, _MAX_GRID_Y)
        fitting = q.device.shared_memory // (shared + _RESERVED_SHARED)
        kernel = _mqa_logits(**absent | constants | sizes, MIN_BLOCKS=max(1, min(_BLOCKS, fitting)))
        return kernel.launch(grid, _NUM_THREADS, shared, **fed)
    grid = groups, min(tiles * (TILE // _SIMT_WARPS), _MAX_GRID_Y)
    kernel = _mqa_logits_simt(**absent | constants | sizes, NUM_WARPS=_SIMT_WARPS)
    return kernel.launch(grid, 32 * _SIMT_WARPS, **fed)


def _launch_sm90(
    q: TensorArg, keys: TensorArg, positions: int, constants: dict[str, Any], fed: dict[str, int]
) -> Launch | None:
    """The launch of mqa_logits_sm90.cu, with as many blocks as run at a time; None if it does not take the rows."""
    num_rows, num_heads, head_size = fed["num_rows"], *q.shape[-2:]
    heads = -(-num_heads // 32) * 32
    # Rows of a prompt are in groups of a chunk for each consumer, or of a power of two if there are few.
    most = _SM90_CONSUMERS * (_SM90_COLUMNS // heads)
    few = most if tuning.batch_invariant() else 1 << max(num_rows - 1, 0).bit_length()
    rows = fed["group_rows"] if constants["PAGED"] else min(most, few)
    box = gcd(constants["BLOCK_SIZE"], _SM90_BOX) if constants["PAGED"] else _SM90_BOX
    queries = replace(q, shape=(num_rows, num_heads, head_size), strides=(fed["q_stride"], head_size, 1))
    limit = _SM90_MAX_ROWS if constants["PAGED"] else most
    if not 0 < rows <= limit or box < _MIN_BOX or not check.mappable(keys, queries):
        return None
    threads = 128 * (_SM90_CONSUMERS + 1)
    stage = _SM90_TILE * (head_size + float32.itemsize) + 2 * 8 + (2 + _SM90_KEY_WARPS) * int32.itemsize
    of_group = rows * (heads * (head_size + float32.itemsize) + 3 * int32.itemsize) + 2 * 8
    rest = (threads // 32 + 4 + 2) * int32.itemsize
    capacity = q.device.shared_memory - rest
    query_stages = min(_SM90_STAGES, max(2, capacity // 2 // of_group))
    stages = min(_SM90_STAGES, (capacity - query_stages * of_group) // stage)
    shared = -(-(rest + stages * stage + query_stages * of_group) // 1024) * 1024
    kernel = _mqa_logits_sm90.for_arch(q.device.arch_feature)(
        **constants, ROWS=rows, STAGES=stages, QUERY_STAGES=query_stages, BOX_KEYS=box
    )
    grid = (min(-(-num_rows // rows) * -(-positions // _SM90_TILE), q.device.num_sms),)
    arguments = {name: fed[name] for name in fed if name not in ("group_rows", "q_stride")}
    return kernel.launch(
        grid,
        threads,
        shared,
        **arguments,
        key_map=TensorMap.of(keys, (head_size, box, 1), head_size),
        query_map=TensorMap.of(queries, (head_size, heads, rows), head_size),
    )
