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
_combine = Kernel("mamba/gated_delta_segments.cu")

_TOKENS = 64  # tokens of a tile
_PREPARE_BLOCKS = 5  # resident blocks of gated_delta_prepare.cu per SM: shared memory holds five
_STAGES = 3  # tiles in shared memory of gated_delta_sm90.cu
_ROWS = (64, 128)  # rows of the state of a block of gated_delta_sm90.cu
# Cycles of a tile in a block, by rows: the chain of its four products, and for two warpgroups their MMAs. An H200 takes
# 192 and 276 us for one sequence of 8192 tokens with 8 heads.
_TILE_CYCLES = {64: 2500, 128: 3600}
_SUM_CYCLES = {64: 1850, 128: 2500}  # the same without the two products and the stores of outputs; an estimate
_COMBINE_CYCLES = 1800  # cycles of a segment in gated_delta_segments.cu: the MMAs of three products; an estimate
_LAUNCH_CYCLES = 4000  # cycles between two launches
_MAX_SEGMENTS = 16  # segments of a sequence
_L2_BYTES = 3300  # bytes that the L2 cache delivers to all SMs in a cycle; an estimate
_SQUARE_BYTES = 2 * _TOKENS * _TOKENS  # bytes of a matrix that relates the tokens of a tile to each other
_PREPARED_BYTES = 2 * _SQUARE_BYTES + 3 * 4 * _TOKENS + 32  # bytes of PreparedTile of gated_delta_sm90_tiles.cuh
_LOWER_BYTES = 4 * (64 * 68 + 4 * 16 * 20)  # bytes of Lower of gated_delta_prepare.cu
# Constants of both kernels, and of each.
_OF_BOTH = ("scalar_t", "starts_t", "KEY_SIZE", "QK_NORM")
_OF_PREPARE = (*_OF_BOTH, "g_t", "beta_t")
_OF_WALK = (*_OF_BOTH, "initial_t", "state_t", "VALUE_SIZE")
_OF_COMBINE = ("scalar_t", "KEY_SIZE", "VALUE_SIZE")


@dataclass(frozen=True, slots=True)
class GatedDeltaSm90Config:
    """The geometry of gated_delta_sm90.cu.

    Attributes:
        rows: rows of the state of a block, 64 for each warpgroup. With few, more SMs have work, and more blocks load
            the same keys and queries.
        segments: parts of a sequence that are walked in parallel. More than one take a second walk, for the states that
            they begin with.
    """

    rows: int
    segments: int = 1

    def candidates(self, problem: GatedDeltaProblem, device: Device) -> Iterable[GatedDeltaSm90Config]:
        """The other number of rows, and other segments."""
        segments = (1,) if tuning.batch_invariant() else (1, 2, 4, 8, 16)
        return tuning.varied(self, rows=_fitting(problem), segments=segments)


def choose(problem: GatedDeltaProblem, device: Device) -> GatedDeltaSm90Config:
    """The least time of the launches, each that of the busiest SM or that of the L2 cache."""
    sizes = range(1, 1 if tuning.batch_invariant() else _MAX_SEGMENTS)
    configs = [GatedDeltaSm90Config(rows, 1 + more) for rows in _fitting(problem) for more in (0, *sizes)]
    return min(configs, key=lambda config: _cycles(problem, device, config))


def _cycles(problem: GatedDeltaProblem, device: Device, config: GatedDeltaSm90Config) -> float:
    """Cycles of all launches but the first, if sequences have equal lengths."""
    batch, num_tokens, _, key_size = problem.tokens.q.shape
    value_heads, value_size = problem.tokens.v.shape[2:]
    num_seqs = tuning.pinned(problem.num_seqs)
    tiles = -(-batch * num_tokens // (_TOKENS * max(1, problem.num_seqs)))
    of_segment = -(-tiles // config.segments)

    def walk(blocks: int, rows: int, cycles: dict[int, int]) -> float:
        return of_segment * max(
            -(-blocks // device.num_sms) * cycles[rows], blocks * _stage_bytes(key_size, rows) / _L2_BYTES
        )

    chains = num_seqs * value_heads
    found = walk(chains * config.segments * value_size // config.rows, config.rows, _TILE_CYCLES)
    if config.segments > 1:
        rows = _sum_rows(problem, device, config)
        found += _LAUNCH_CYCLES + walk(chains * _sum_blocks(problem, config, rows), rows, _SUM_CYCLES)
    if config.segments > 2:
        waves = -(-chains * (value_size // 64) // device.num_sms)
        found += _LAUNCH_CYCLES + waves * (config.segments - 2) * _COMBINE_CYCLES
    return found


def _sum_rows(problem: GatedDeltaProblem, device: Device, config: GatedDeltaSm90Config) -> int:
    """Rows of a block of the walk without outputs: those with which the busiest SM has the least work."""
    chains = problem.num_seqs * problem.tokens.v.shape[2]
    fitting = [rows for rows in _fitting(problem) if problem.tokens.q.shape[3] % rows == 0]
    return min(
        fitting,
        key=lambda rows: -(-chains * _sum_blocks(problem, config, rows) // device.num_sms) * _SUM_CYCLES[rows],
    )


def _sum_blocks(problem: GatedDeltaProblem, config: GatedDeltaSm90Config, rows: int) -> int:
    """Blocks of a head of a sequence in the walk without outputs: those of states, and those of transitions."""
    key_size, value_size = problem.tokens.q.shape[3], problem.tokens.v.shape[3]
    return (config.segments - 1) * value_size // rows + max(0, config.segments - 2) * key_size // rows


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
    chains, segments = problem.num_seqs * value_heads, config.segments
    state_bytes = 4 * value_size * key_size
    sums = Scratch(chains * (segments - 1) * state_bytes)
    transitions = Scratch(chains * max(0, segments - 2) * _transition_bytes(key_size))

    def walk(blocks: int, rows: int, outputs: bool) -> Launch:
        kernel = _walk.for_arch(arch)(
            **{name: constants[name] for name in _OF_WALK}, ROWS=rows, STAGES=_STAGES, OUTPUTS=outputs
        )
        arguments = arguments_of(problem, _walk) | {"segments": segments, "prepared": prepared}
        arguments |= {"sums": sums if segments > 1 else 0, "transitions": transitions if segments > 2 else 0}
        return kernel.launch(chains * blocks, 128 + 2 * rows, _STAGES * _stage_bytes(key_size, rows), **arguments)

    found = [prepare.launch(slots * value_heads, 128, shared, prepared=prepared, **arguments_of(problem, _prepare))]
    if segments > 1:
        rows = _sum_rows(problem, q.device, config)
        found.append(walk(_sum_blocks(problem, config, rows), rows, False))
    if segments > 2:
        combine = _combine.for_arch(arch)(**{name: constants[name] for name in _OF_COMBINE})
        found.append(
            combine.launch(
                chains * (value_size // 64),
                128,
                2 * _transition_bytes(key_size),
                sums=sums,
                transitions=transitions,
                segments=segments,
            )
        )
    return [*found, walk(segments * value_size // config.rows, config.rows, True)]


def _transition_bytes(key_size: int) -> int:
    """Bytes of Transition of gated_delta_sm90_tiles.cuh."""
    return 2 * 2 * key_size * key_size
