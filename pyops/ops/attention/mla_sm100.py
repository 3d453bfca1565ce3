"""MLA decode by tcgen05: geometry and launch of mla_decode_sm100.cu, in CUDA Tile C++.

No GPU has run this kernel. It is compiled for sm_100 and sm_103, and run by the host backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import bfloat16, float16
from .combine import CombineConfig
from .mla_problem import MlaProblem, arguments_of, constants_of, query_strides, rows_are_aligned

_mla_decode_sm100 = Kernel("attention/mla_decode_sm100.cu")

HEADS, TOKENS = 64, 32  # query heads of a block, and tokens of a KV tile; with more of either, registers spill
HALVES = 2  # blocks that share the values of the same heads
_MIN_HEADS = 17  # fewest heads: a tile of 64 rows is mostly empty with fewer, and mla_decode.cu is bound by memory
_MAX_NUMBER = 2**31  # numbers of slots that TMA gathers are smaller


@dataclass(frozen=True, slots=True)
class MlaTileConfig:
    """The geometry and the splits of mla_decode_sm100.cu.

    Attributes:
        heads: query heads of a block.
        tokens: tokens of a KV tile.
        max_splits, min_split, combine: as of `MlaConfig`.
    """

    heads: int
    tokens: int
    max_splits: int
    min_split: int
    combine: CombineConfig

    def candidates(self, problem: MlaProblem, device: Device) -> list[MlaTileConfig]:
        """Other splits."""
        half, twice = max(1, self.max_splits // 2), 2 * self.max_splits
        return tuning.varied(self, max_splits=() if problem.num_kv_splits > 0 else (half, twice))

    def launch_splits(self, problem: MlaProblem, arguments: dict[str, Any]) -> Launch:
        """A block for each split, group of heads and half of their values."""
        arguments = arguments | arguments_of(problem) | query_strides(problem) | {"num_heads": problem.num_heads}
        constants = constants_of(problem) | {"scalar_t": problem.product_dtype}
        for name in ("query_t", "cache_t", "out_t", "IS_DS_MLA"):
            del constants[name]
        grid = problem.num_seqs * -(-problem.num_heads // self.heads) * HALVES, self.max_splits
        kernel = _mla_decode_sm100(**constants, ROWS=self.heads, TOKENS=self.tokens)
        return kernel.launch(grid, 1, **_mla_decode_sm100.taken(arguments))


def refusal(problem: MlaProblem) -> str | None:
    """Why mla_decode_sm100.cu does not serve a call."""
    cache, queries = problem.cache, (problem.q_nope, problem.q_pe)
    if not cache.device.supports("tcgen05"):
        return "the device has no tcgen05, or NVRTC and the driver are older than CUDA 13.4"
    if problem.num_heads < _MIN_HEADS:
        return f"fewer than {_MIN_HEADS} heads"
    if problem.is_fp8 or any(one.dtype not in (bfloat16, float16) for one in queries):
        return "queries and a cache of one 16-bit type alone"
    (pages, page_size, _), (page_stride, slot_stride, _) = cache.shape, cache.strides
    aligned = all(one.alignment == 16 and rows_are_aligned(one) for one in (*queries, problem.out))
    if not (aligned and problem.may_use_mma and slot_stride > 0 and slot_stride % 8 == 0):
        return "TMA loads and stores rows that begin at multiples of 16 bytes"
    if pages > 1 and page_stride % slot_stride:
        return "slots that have no numbers: a stride is not a multiple of another"
    if (
        problem.q_nope.numel * cache.numel == 0
        or (pages * max(1, page_stride // slot_stride) + page_size) >= _MAX_NUMBER
    ):
        return "an empty operand, or more slots than 32 bits count"
    return None
