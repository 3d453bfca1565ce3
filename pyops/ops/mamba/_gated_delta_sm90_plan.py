"""The gated delta rule on Hopper: launches by WGMMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ._gated_delta_plan import GatedDeltaProblem, arguments_of, constants_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_prepare = Kernel("mamba/gated_delta_prepare.cu")
_walk = Kernel("mamba/gated_delta_sm90.cu")

_TOKENS = 64  # tokens of a tile
_PREPARE_BLOCKS = 5  # resident blocks of gated_delta_prepare.cu per SM: shared memory holds five
_STAGES = 3  # tiles in shared memory of gated_delta_sm90.cu
_ROWS = (64, 128)  # rows of the state of a block of gated_delta_sm90.cu
# Cycles of a tile in a block, by rows: the chain of its four products, and for two warpgroups their MMAs. An H200 takes
# 192 and 276 us for one sequence of 8192 tokens with 8 heads.
_TILE_CYCLES = {64: 2500, 128: 3600}
_L2_BYTES = 3300  # bytes that the L2 cache delivers to all SMs in a cycle; an estimate
_SQUARE_BYTES = 2 * _TOKENS * _TOKENS  # bytes of a matrix that relates the tokens of a tile to each other
_PREPARED_BYTES = 2 * _SQUARE_BYTES + 3 * 4 * _TOKENS + 32  # bytes of PreparedTile of gated_delta_sm90_tiles.cuh
_LOWER_BYTES = 4 * (64 * 68 + 4 * 16 * 20)  # bytes of Lower of gated_delta_prepare.cu
# Constants of both kernels, and of each.
_OF_BOTH = ("scalar_t", "starts_t", "KEY_SIZE", "QK_NORM")
_OF_PREPARE = (*_OF_BOTH, "g_t", "beta_t")
_OF_WALK = (*_OF_BOTH, "initial_t", "state_t", "VALUE_SIZE")


@dataclass(frozen=True, slots=True)
class GatedDeltaSm90Config:
    """The geometry of gated_delta_sm90.cu.

    Attributes:
        rows: rows of the state of a block, 64 for each warpgroup. With few, more SMs have work, and more blocks load
            the same keys and queries.
    """

    rows: int

    def candidates(self, problem: GatedDeltaProblem, device: Device) -> Iterable[GatedDeltaSm90Config]:
        """The other number of rows."""
        return tuning.varied(self, rows=_fitting(problem))


def choose(problem: GatedDeltaProblem, device: Device) -> GatedDeltaSm90Config:
    """The least time of a tile of all heads: that of the busiest SM, or that of the L2 cache."""
    heads = tuning.pinned(problem.num_seqs) * problem.tokens.v.shape[2]
    key_size, value_size = problem.tokens.q.shape[3], problem.tokens.v.shape[3]

    def cycles(rows: int) -> float:
        blocks = heads * value_size // rows
        return max(-(-blocks // device.num_sms) * _TILE_CYCLES[rows], blocks * _stage_bytes(key_size, rows) / _L2_BYTES)

    return GatedDeltaSm90Config(min(_fitting(problem), key=cycles))


def _fitting(problem: GatedDeltaProblem) -> list[int]:
    return [rows for rows in _ROWS if problem.tokens.v.shape[3] % rows == 0]


def _stage_bytes(key_size: int, rows: int) -> int:
    """Bytes of a tile in shared memory."""
    return -(-(2 * _TOKENS * (2 * key_size + rows) + _PREPARED_BYTES) // 1024) * 1024


def launches(problem: GatedDeltaProblem, config: GatedDeltaSm90Config) -> list[Launch]:
    q, v = problem.tokens.q, problem.tokens.v
    key_size, (batch, num_tokens, value_heads, value_size) = q.shape[3], v.shape
    constants, arch = constants_of(problem), q.device.arch_feature
    slots = batch * num_tokens // _TOKENS + problem.num_seqs  # SequenceTiles of sequence_tiles.cuh
    prepared = Scratch(slots * value_heads * _PREPARED_BYTES)
    matrices = max(2 * _TOKENS * 2 * key_size, _PREPARED_BYTES + _LOWER_BYTES)
    of_tokens = 6 * _TOKENS * 4 + 20  # logs, strengths, squares and norms, large rows, and the sequence
    shared = -(-matrices // 1024) * 1024 + -(-of_tokens // 1024) * 1024
    prepare = _prepare.for_arch(arch)(**{name: constants[name] for name in _OF_PREPARE}, MIN_BLOCKS=_PREPARE_BLOCKS)
    walk = _walk.for_arch(arch)(**{name: constants[name] for name in _OF_WALK}, ROWS=config.rows, STAGES=_STAGES)
    return [
        prepare.launch(slots * value_heads, 128, shared, prepared=prepared, **arguments_of(problem, _prepare)),
        walk.launch(
            problem.num_seqs * value_heads * (value_size // config.rows),
            128 + 2 * config.rows,
            _STAGES * _stage_bytes(key_size, config.rows),
            prepared=prepared,
            **arguments_of(problem, _walk),
        ),
    ]
