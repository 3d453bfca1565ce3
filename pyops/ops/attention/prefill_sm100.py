"""Prefill attention by tcgen05: geometry and launch of prefill_sm100.cu, in CUDA Tile C++.

No GPU has run this kernel. It is compiled for sm_100 and sm_103, and run by the host backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from .layout import heads_stride
from .prefill_problem import PrefillProblem

_prefill_sm100 = Kernel("attention/prefill_sm100.cu")

_MIN_TILE = 64  # fewest columns of a tile of queries, keys or values: one box of TMA
_MAX_HEAD_TILE = 256  # most columns of a tile: with more, a tile of keys and one of values exceed shared memory
_MAX_NUMBER = 2**31  # numbers of rows that TMA gathers are smaller
_UNUSED = "cache_t", "PACKED", "X", "HEAD_SCALES", "HAS_ALIBI"  # constants of other kernels


@dataclass(frozen=True, slots=True)
class PrefillTileConfig:
    """The geometry of prefill_sm100.cu; the attributes are constants of the kernel.

    Attributes:
        rows: rows of a block.
        tokens: keys of a KV tile.
    """

    rows: int
    tokens: int

    def __post_init__(self) -> None:
        if any(size & (size - 1) or not 0 < size <= 128 for size in (self.rows, self.tokens)):
            raise ValueError(f"no geometry of prefill_sm100.cu: {self}")

    def candidates(self, problem: PrefillProblem, device: Device) -> list[PrefillTileConfig]:
        """Other tiles."""
        return tuning.varied(self, rows=(64, 128), tokens=(64, 128))

    def launch(self, problem: PrefillProblem, constants: dict[str, Any], arguments: dict[str, Any]) -> list[Launch]:
        """A block for each tile of rows and key-value head."""
        tiles = problem.count_tiles(self.rows)
        arguments |= {"num_tiles": tiles, "num_tokens": problem.query.shape[0]}
        arguments["num_kv_heads"] = problem.layout.num_kv_heads
        kernel = _prefill_sm100(
            **{name: value for name, value in constants.items() if name not in _UNUSED},
            ROWS=self.rows,
            TOKENS=self.tokens,
            HEAD_TILE=_tile_of(problem.query.shape[2]),
            VALUE_TILE=_tile_of(problem.value_size),
        )
        grid = tiles, problem.layout.num_kv_heads
        return [kernel.launch(grid, 1, **_prefill_sm100.taken(arguments))]


def refusal(problem: PrefillProblem) -> str | None:
    """Why prefill_sm100.cu does not serve a call that prefill_mma.cu serves."""
    query, layout, ragged = problem.query, problem.layout, problem.layout.ragged
    if not query.device.supports("tcgen05"):
        return "the device has no tcgen05, or NVRTC and the driver are older than CUDA 13.4"
    if not problem.uses_mma or layout.packed or problem.is_fp8 or problem.codes is not None:
        return "operands of other dtypes, alignments or layouts"
    if problem.cu_seqlens_q is None or problem.few_rows or problem.p_hi_lo:
        return "few query tokens"
    if problem.options.alibi_slopes is not None:
        return "ALiBi slopes"
    if max(query.shape[2], problem.value_size) > _MAX_HEAD_TILE:
        return f"heads of more than {_MAX_HEAD_TILE} elements"
    if not problem.has_aligned_out or query.numel * problem.keys_and_values[0].numel == 0:
        return "results that TMA cannot store, or an empty operand"
    (num_tokens, num_heads, head_size), out_stride = query.shape, heads_stride(problem.out)
    numbers = [num_tokens * num_heads]
    rows = [(heads_stride(query), head_size, num_tokens), (out_stride, problem.value_size, num_tokens)]
    if not ragged:
        names = "key", "value"
        rows += [
            (layout.strides[f"{one}_block_stride"], layout.strides[f"{one}_token_stride"], layout.num_blocks)
            for one in names
        ]
        if any(pitch % 8 for _, pitch, _ in rows):
            return "tokens with a stride that is not a multiple of 16 bytes"
    for stride, pitch, count in rows:
        if pitch == 0 or (count > 1 and stride % pitch):
            return "rows that have no numbers: a stride is not a multiple of another"
        numbers.append(count * max(1, stride // pitch))
    return None if max(numbers) < _MAX_NUMBER else "more rows than 32 bits count"


def choose(problem: PrefillProblem) -> PrefillTileConfig:
    """The largest KV tile that fits into tensor memory and shared memory next to others, and into a page."""
    wide = _tile_of(problem.query.shape[2]) > 128
    of_page = not problem.layout.ragged and problem.layout.block_size % 128 and problem.layout.block_size % 64 == 0
    return PrefillTileConfig(128, 64 if wide or of_page else 128)


def _tile_of(size: int) -> int:
    """Columns of a tile for rows of `size` elements."""
    return max(_MIN_TILE, tuning.power_of_two(size))
