"""The logits of sparse attention's indexer: the launch, which both ops share."""

from __future__ import annotations

from typing import Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.tensors.dtypes import DType, float32, int32
from ..._core.tensors.tensor import TensorArg

_mqa_logits = Kernel("attention/mqa_logits.cu")
_mqa_logits_sm90 = Kernel("attention/mqa_logits_sm90.cu")
_mqa_logits_simt = Kernel("attention/mqa_logits_simt.cu")

# mqa_logits.cu: threads of a block, keys of a tile, blocks per SM. Two blocks of 192 threads leave 168 registers to a
# thread; of 256 threads they leave 128, and the keys of a warp take 64: some architectures would spill.
_NUM_THREADS, TILE, _BLOCKS = 192, 192, 2
_RESERVED_SHARED = 1024  # bytes of shared memory that the device reserves in every block
# mqa_logits_sm90.cu: threads of a block, keys of a tile, tiles of a block in flight, blocks per SM, most heads.
_SM90_THREADS, _SM90_TILE, _SM90_STAGES, _SM90_BLOCKS, _SM90_MAX_HEADS = 256, 128, 3, 2, 64
_SM90_CONSTANTS = "NUM_HEADS", "HEAD_SIZE", "BLOCK_SIZE", "LENGTH_PER_ROW", "CLEAN", "length_t", "table_t"
_SM90_STRIDES = "logits_stride", "weights_stride", "block_stride", "table_stride", "table_step", "length_step"
_SM90_ARGUMENTS = "columns", "num_keys", "num_blocks", *_SM90_STRIDES
_MIN_TILES = 4  # fewest tiles of a block in more than one wave: a block converts its queries first
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
    q_stride: int,
    aligned: bool,
    groups: int,
    positions: int,
    constants: dict[str, Any],
    **arguments: int,
) -> Launch:
    """The launch of `groups` groups of rows with `positions` keys or columns, for (logits, q, weights).

    Args:
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
    if constants["PAGED"]:
        if takes_vectors and num_heads <= _SM90_MAX_HEADS and q.device.supports("wgmma"):
            of_row, of_key = padded_heads * (2 * head_size + 4) + 4, head_size + 2 * float32.itemsize
            shared = arguments["group_rows"] * of_row + _SM90_STAGES * _SM90_TILE * of_key
            if _SM90_BLOCKS * (shared + _RESERVED_SHARED) <= q.device.shared_memory:
                return _launch_sm90(q, groups, positions, shared, constants | sizes, fed)
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
    q: TensorArg, groups: int, positions: int, shared: int, constants: dict[str, Any], fed: dict[str, int]
) -> Launch:
    """The launch of mqa_logits_sm90.cu: some waves of blocks with several tiles each, and at least one wave."""
    tiles, slots = -(-positions // _SM90_TILE), _SM90_BLOCKS * q.device.num_sms
    blocks = max(slots // max(1, groups), min(_WAVES * slots // max(1, groups), tiles // _MIN_TILES), 1)
    kernel = _mqa_logits_sm90.for_arch(q.device.arch_feature)(
        ROWS=fed["group_rows"], **{name: constants[name] for name in _SM90_CONSTANTS}
    )
    grid = groups, min(tiles, blocks, _MAX_GRID_Y)
    return kernel.launch(grid, _SM90_THREADS, shared, **{name: fed[name] for name in _SM90_ARGUMENTS})
