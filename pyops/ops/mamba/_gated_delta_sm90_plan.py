"""The gated delta rule on Hopper: launches by WGMMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import check, tuning
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
# Resident blocks of gated_delta_prepare.cu per SM, with one head and with several: shared memory holds five, and dot
# products of tokens stay in registers from head to head.
_PREPARE_BLOCKS = 5, 4
_FEWEST_PREPARE_BLOCKS = 3  # blocks of gated_delta_prepare.cu per SM that are worth more than shared dot products
_MAX_STAGES = 4  # most tiles in shared memory of gated_delta_sm90.cu
_ROWS = (64, 128)  # rows of the state of a block of gated_delta_sm90.cu
# Cycles of a tile in a block, by rows. An H200 took 2580 and 3600 before S k and S q were one product, and u and the
# outputs; these are estimates. The others are fitted to an H200.
_TILE_CYCLES = {64: 1800, 128: 2300}
_FIRST_CYCLES = {64: 1650, 128: 2400}  # the same without outputs
_COMBINE_CYCLES = 4000  # cycles of a segment in gated_delta_segments.cu; an estimate
_LAUNCH_CYCLES = 5000  # cycles of a launch besides, with loads and stores of states
_MAX_SEGMENTS = 16  # segments of a sequence
_L2_BYTES = 3300  # bytes that the L2 cache delivers to all SMs in a cycle; an estimate
# Bytes of parts of gated_delta_sm90_tiles.cuh: of Weights in shared memory; of TileFactors, in which the inverse has
# three quarters of these; of PreparedTile, in which weights have ten of 16 blocks.
_SQUARE_BYTES = 2 * _TOKENS * _TOKENS
_FACTORS_BYTES = _SQUARE_BYTES * 3 // 4 + 3 * 4 * _TOKENS + 32
_PREPARED_BYTES = _SQUARE_BYTES * 10 // 16 + _FACTORS_BYTES
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
        heads: value heads of a block of gated_delta_prepare.cu; those of one key head share dot products of tokens.
    """

    rows: int
    segments: int = 1
    heads: int = 1

    def candidates(self, problem: GatedDeltaProblem, device: Device) -> Iterable[GatedDeltaSm90Config]:
        """Other numbers of rows, segments and heads."""
        segments = (1,) if tuning.batch_invariant() else (1, 2, 4, 8, 16)
        return tuning.varied(self, rows=_fitting(problem), segments=segments, heads=_sharing(problem))


def choose(problem: GatedDeltaProblem, device: Device) -> GatedDeltaSm90Config:
    """The least time of the launches, each that of the busiest SM or that of the L2 cache."""
    sizes = range(1, 1 if tuning.batch_invariant() else _MAX_SEGMENTS)
    heads = _prepared_heads(problem, device)
    configs = [GatedDeltaSm90Config(rows, 1 + more, heads) for rows in _fitting(problem) for more in (0, *sizes)]
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
        rows = _first_rows(problem, device, config)
        found += _LAUNCH_CYCLES + walk(chains * _first_blocks(problem, config, rows), rows, _FIRST_CYCLES)
    if config.segments > 2:
        waves = -(-chains * (value_size // 64) // device.num_sms)
        found += _LAUNCH_CYCLES + waves * (config.segments - 2) * _COMBINE_CYCLES
    return found


def _first_rows(problem: GatedDeltaProblem, device: Device, config: GatedDeltaSm90Config) -> int:
    """Rows of a block of the walk without outputs: those with which the busiest SM has the least work."""
    chains = problem.num_seqs * problem.tokens.v.shape[2]
    fitting = [rows for rows in _fitting(problem) if problem.tokens.q.shape[3] % rows == 0]
    return min(
        fitting,
        key=lambda rows: -(-chains * _first_blocks(problem, config, rows) // device.num_sms) * _FIRST_CYCLES[rows],
    )


def _first_blocks(problem: GatedDeltaProblem, config: GatedDeltaSm90Config, rows: int) -> int:
    """Blocks of a head of a sequence in the walk without outputs: those of states, and those of transitions."""
    key_size, value_size = problem.tokens.q.shape[3], problem.tokens.v.shape[3]
    return (config.segments - 1) * value_size // rows + max(0, config.segments - 2) * key_size // rows


def _fitting(problem: GatedDeltaProblem) -> list[int]:
    return [rows for rows in _ROWS if problem.tokens.v.shape[3] % rows == 0]


def _stage_bytes(key_size: int, rows: int) -> int:
    """Bytes of a tile in shared memory."""
    return -(-(2 * _TOKENS * (2 * key_size + rows) + _SQUARE_BYTES + _FACTORS_BYTES) // 1024) * 1024


def _stages(device: Device, stage_bytes: int) -> int:
    """Tiles that fit into the shared memory of a block, next to its barriers."""
    return min(_MAX_STAGES, (device.shared_memory - 16 * _MAX_STAGES) // stage_bytes)


def launches(problem: GatedDeltaProblem, config: GatedDeltaSm90Config) -> list[Launch]:
    q, v = problem.tokens.q, problem.tokens.v
    key_size, value_heads, value_size = q.shape[3], *v.shape[2:]
    constants, arch = constants_of(problem), q.device.arch_feature
    slots = _slots(problem)
    prepared = Scratch(slots * value_heads * _PREPARED_BYTES)
    matrices = max(2 * _TOKENS * 2 * key_size, _PREPARED_BYTES + _LOWER_BYTES)
    # Logs and strengths; squares and norms; large rows, and the sequence.
    of_tokens = (2 * config.heads + 4) * _TOKENS * 4 + 20
    shared = -(-matrices // 1024) * 1024 + -(-of_tokens // 1024) * 1024
    prepare = _prepare.for_arch(arch)(
        **{name: constants[name] for name in _OF_PREPARE},
        HEADS=config.heads,
        MIN_BLOCKS=_PREPARE_BLOCKS[config.heads > 1],
    )
    chains, segments = problem.num_seqs * value_heads, config.segments
    state_bytes = 4 * value_size * key_size
    v_first = problem.tokens.state_v_first
    in_pairs = not problem.states or check.vector_width(key_size, *problem.states) >= 2
    added = Scratch(chains * (segments - 1) * state_bytes)
    transitions = Scratch(chains * max(0, segments - 2) * _transition_bytes(key_size))

    def walk(blocks: int, rows: int, outputs: bool) -> Launch:
        stage_bytes = _stage_bytes(key_size, rows)
        stages = _stages(q.device, stage_bytes)
        kernel = _walk.for_arch(arch)(
            **{name: constants[name] for name in _OF_WALK},
            ROWS=rows,
            STAGES=stages,
            OUTPUTS=outputs,
            STATE_V_FIRST=v_first,
            STATE_ACCESS=2 if v_first and in_pairs else 1,
        )
        arguments = arguments_of(problem, _walk) | {"segments": segments, "prepared": prepared}
        arguments |= {"added": added if segments > 1 else 0, "transitions": transitions if segments > 2 else 0}
        return kernel.launch(chains * blocks, 128 + 2 * rows, stages * stage_bytes, **arguments)

    found = [
        prepare.launch(
            slots * value_heads // config.heads, 128, shared, prepared=prepared, **arguments_of(problem, _prepare)
        )
    ]
    if segments > 1:
        rows = _first_rows(problem, q.device, config)
        found.append(walk(_first_blocks(problem, config, rows), rows, False))
    if segments > 2:
        combine = _combine.for_arch(arch)(**{name: constants[name] for name in _OF_COMBINE})
        found.append(
            combine.launch(
                chains * (value_size // 64),
                128,
                2 * _transition_bytes(key_size),
                added=added,
                transitions=transitions,
                segments=segments,
            )
        )
    return [*found, walk(segments * value_size // config.rows, config.rows, True)]


def _prepared_heads(problem: GatedDeltaProblem, device: Device) -> int:
    """Value heads of a block of gated_delta_prepare.cu: the most that leave enough blocks."""
    blocks = _slots(problem) * problem.tokens.v.shape[2]
    return max(n for n in _sharing(problem) if n == 1 or blocks // n >= _FEWEST_PREPARE_BLOCKS * device.num_sms)


def _sharing(problem: GatedDeltaProblem) -> list[int]:
    """Numbers of value heads that have a key head in common."""
    of_key = problem.tokens.v.shape[2] // problem.tokens.q.shape[2]
    return [n for n in range(1, 5) if of_key % n == 0]


def _slots(problem: GatedDeltaProblem) -> int:
    """Slots of tiles: SequenceTiles of sequence_tiles.cuh."""
    batch, num_tokens = problem.tokens.q.shape[:2]
    return batch * num_tokens // _TOKENS + problem.num_seqs


def _transition_bytes(key_size: int) -> int:
    """Bytes of Transition of gated_delta_sm90_tiles.cuh."""
    return 2 * 2 * key_size * key_size
