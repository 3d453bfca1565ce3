"""The combine kernel (decode_combine.cu), which combines the partial results of splits: its choice and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import DType
from ..._core.tensors.tensor import TensorArg
from .arguments import Options

_combine = Kernel("attention/decode_combine.cu")

TILE_TOKENS = 16  # default SPLIT_UNIT of splits.cuh: the tokens of a split are a multiple of it

# docs/performance/decode.md, "Parallel combine": up to eight groups of threads, each with four loads in flight.
_SPLITS_IN_FLIGHT = 4  # splits that a group of threads loads at once: BATCH of the kernel
_MAX_GROUPS = 8  # most groups of threads of a head
_MANY_HEADS = 4  # (sequence, head) rows per SM above which few threads per row fill the device
_MAX_HEAD_THREADS = 512  # most threads of a head
# docs/performance/decode.md, "One kernel for every batch size": one combine kernel serves all batches of many heads.
# A kernel with other numbers of groups and heads was up to 1.6 % faster for some batches (256 sequences of 1024
# tokens).
_GROUPS_OF_MANY, _HEADS_OF_MANY = 2, 4


@dataclass(frozen=True, slots=True)
class CombineConfig:
    """The geometry of decode_combine.cu, which combines splits.

    Attributes:
        groups: groups of threads that share a head; each takes every `groups`-th split.
        heads_per_block: query heads per block.
        parts: blocks that share the elements of a head.
    """

    groups: int
    heads_per_block: int
    parts: int = 1


def lanes_of(head_size: int, vec_size: int, device: Device) -> int:
    """Threads that share the elements of a head, rounded up to whole warps."""
    return -(-head_size // (vec_size * device.warp_size)) * device.warp_size


def vector_width(out: TensorArg, tmp_out: TensorArg | None, partial_dtype: DType, out_dtype: DType) -> int:
    """Elements that a thread loads and stores at once; `tmp_out` is None for a workspace of the plan."""
    widest = 16 // max(partial_dtype.itemsize, out_dtype.itemsize)
    return min(check.vector_width(out.shape[-1], *(arg for arg in (out, tmp_out) if arg)), widest)


def choose_combine(num_seqs: int, num_heads: int, max_splits: int, lanes: int, device: Device) -> CombineConfig:
    """Groups for the splits of a head, heads of a block, and parts of a head if its groups do not fit into a block."""
    num_seqs, max_splits = tuning.pinned(num_seqs), tuning.pinned(max_splits)
    rows, most_blocks = num_seqs * num_heads, _MANY_HEADS * device.num_sms
    fits = _GROUPS_OF_MANY * _HEADS_OF_MANY * lanes <= _MAX_HEAD_THREADS
    if rows > most_blocks and num_heads % _HEADS_OF_MANY == 0 and fits:
        return CombineConfig(_GROUPS_OF_MANY, _HEADS_OF_MANY)
    groups = parts = 1
    while groups < _MAX_GROUPS and _SPLITS_IN_FLIGHT * groups < max_splits:
        if 2 * groups * lanes > _MAX_HEAD_THREADS:
            if lanes % (2 * device.warp_size) or 2 * parts * rows > most_blocks:
                break
            lanes, parts = lanes // 2, parts * 2
        groups *= 2
    return CombineConfig(groups, 1, parts)


def launch_combine(
    config: CombineConfig,
    num_seqs: int,
    out: TensorArg,
    vec_size: int,
    options: Options,
    constants: dict[str, Any],
    arguments: dict[str, Any],
) -> Launch:
    """The launch that combines up to ``arguments["max_splits"]`` splits of each sequence into `out` [.., heads,
    size]."""
    num_heads, head_size = out.shape[-2:]
    lanes = lanes_of(-(-head_size // config.parts), vec_size, out.device)
    max_groups = min(_MAX_GROUPS, 1024 // lanes)
    has_whole_parts = config.parts == -(-head_size // (lanes * vec_size))
    if config.groups * config.heads_per_block > max_groups or num_heads % config.heads_per_block or not has_whole_parts:
        raise ValueError(
            f"{config}: expected at most {max_groups} groups in a block, whole blocks of {num_heads} heads, and parts "
            "of whole warps"
        )
    kernel = _combine(
        **constants,
        HEAD_SIZE=head_size,
        NUM_HEADS=num_heads,
        VEC_SIZE=vec_size,
        LANES=lanes,
        GROUPS=config.groups,
        HEADS=config.heads_per_block,
        HAS_SINKS=options.sinks is not None,
        HAS_LSE=options.lse is not None,
    )
    num_threads = lanes * config.groups * config.heads_per_block
    grid = num_seqs * num_heads // config.heads_per_block * config.parts
    return kernel.launch(grid, num_threads, **arguments)
