"""The geometry of the selective scan for prefill."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

from ... import tuning
from ..._core.tensors.dtypes import float32

if TYPE_CHECKING:
    from ..._core.system.device import Device
    from ..._core.tensors.dtypes import DType

_SCAN_THREADS, _STAGE_THREADS = 128, 128  # consumer and producer threads of a block of selective_scan_fwd.cu
_TOKENS_THREADS, _TOKENS_BLOCKS = 128, 3  # threads of a block and blocks per SM of selective_scan_tokens.cu
# selective_scan_tokens.cu, in which lanes share the tokens of a channel, is chosen for at most _FEW_CHANNELS channels,
# of all sequences together, and at least _LONG_SEQUENCE tokens per sequence.
_FEW_CHANNELS, _LONG_SEQUENCE = 2048, 512
_MAX_LANES = 32  # most lanes that share a channel
_MAX_PARTS = 8  # most parts of a tile, each with its own warps: more warps per block would have too few registers
_FEW_WARPS = 8  # warps per SM: with at most this many, a thread has registers for four overlapping scans
_BUFFERS = 2  # token tiles in shared memory: one is scanned while the next is loaded
# Lane tiles of selective_scan_fwd.cu: (channels, states) that one lane scans. The first one reads shared memory least,
# the last one spreads a channel over the most lanes. `choose` takes the first tile with which at least _MIN_SHARE of
# the device's warp schedulers have a scanning warp. Measured on an H200: 8192 channels with 8192 tokens each take
# 586 us with (1, 4) and tiles of 64 tokens, 629 us with tiles of 32, and 766 us with (1, 2). (2, 4) is for short
# sequences: 64 sequences of 128 tokens take 555 us with it, and 701 us with (1, 4).
_SHORT_LANE_TILES = (2, 4), (1, 4), (1, 2)
_LANE_TILES = _SHORT_LANE_TILES[1:]
_MIN_SHARE = 0.75  # share of the warp schedulers
_SCHEDULERS = 4  # warp schedulers of an SM
_MAX_TILE_TOKENS, _MIN_TILE_TOKENS = 64, 8  # most and fewest tokens of a tile
_SHORT_SEQUENCE, _SHORT_TILE_TOKENS = 128, 32  # most tokens of a short sequence, and of its tiles
_PINNED_TOKENS = 2**15  # batch invariance: tokens that the choice assumes, a thousand for each sequence
_MAX_STAGED_BYTES = 128  # most bytes that a producer thread holds in registers


class ScanProblem(NamedTuple):
    """The input of `choose`.

    Attributes:
        batch: number of sequences.
        dim: number of channels.
        num_tokens: tokens of all sequences together.
        state_size: states of a channel.
        vec_size, state_vec_size: elements per memory access, along tokens and along states.
    """

    batch: int
    dim: int
    num_tokens: int
    state_size: int
    dtype: DType
    vec_size: int
    state_vec_size: int

    def bucket(self) -> str:
        """The key of a tuning table: problems with equal buckets share a tuned Config."""
        batch, tokens = tuning.power_of_two(self.batch), tuning.power_of_two(self.num_tokens)
        return (
            f"batch={batch} tokens={tokens} dim={self.dim} state_size={self.state_size} {self.dtype.name} "
            f"vec_size={self.vec_size},{self.state_vec_size}"
        )


@dataclass(frozen=True)
class ScanConfig:
    """The geometry of selective_scan_fwd.cu.

    Attributes:
        channels, states: channels and states per consumer lane.
        lanes: lanes that share a channel.
        tile_tokens: tokens of a tile in shared memory.
        scan_threads, stage_threads: consumer threads of a block, which scan, and producer threads, which load tiles.
        min_blocks: resident blocks per SM for which the compiler bounds registers.
    """

    channels: int
    states: int
    lanes: int
    tile_tokens: int
    scan_threads: int = _SCAN_THREADS
    stage_threads: int = _STAGE_THREADS
    min_blocks: int = 2

    @property
    def block_channels(self) -> int:
        return self.scan_threads // self.lanes * self.channels

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return self.scan_threads + self.stage_threads

    def constants(self, problem: ScanProblem) -> dict[str, int]:
        """The kernel's compile-time constants by name."""
        return {
            "LANES": self.lanes,
            "STATES": self.states,
            "CHANNELS": self.channels,
            "TILE_TOKENS": self.tile_tokens,
            "STATE_VEC_SIZE": min(problem.state_vec_size, self.states),
            "SCAN_THREADS": self.scan_threads,
            "STAGE_THREADS": self.stage_threads,
            "MIN_BLOCKS": self.min_blocks,
        }

    def shared_bytes(self, problem: ScanProblem) -> int:
        """Bytes of the tiles, `Buffer` of selective_scan_stage.cuh."""
        rows = 3 * self.block_channels * (self.tile_tokens + 4)  # delta, delta * u, y; 4 floats pad a row
        floats = rows + 2 * self.tile_tokens * self.lanes * self.states  # and B and C
        return _BUFFERS * (floats * float32.itemsize + self.block_channels * self.tile_tokens * problem.dtype.itemsize)

    def fits(self, problem: ScanProblem, device: Device) -> bool:
        """Whether the tiles fit into shared memory, and a producer thread's part of a tile into its registers."""
        staged = (3 * self.block_channels + 2 * self.lanes * self.states) * self.tile_tokens // self.stage_threads
        staged_bytes = staged * problem.dtype.itemsize
        return self.shared_bytes(problem) <= device.shared_memory and staged_bytes <= _MAX_STAGED_BYTES

    def candidates(self, problem: ScanProblem, device: Device) -> list[ScanConfig]:
        """Other lane tiles, token tiles, thread counts and register bounds."""
        tiles = [_lane_tile(problem.state_size, *tile, self.tile_tokens) for tile in _SHORT_LANE_TILES]
        more = tuning.varied(
            self,
            tile_tokens=tuning.beside(self.tile_tokens, _MIN_TILE_TOKENS, _MAX_TILE_TOKENS),
            scan_threads=tuning.beside(self.scan_threads, 64, 128),
            stage_threads=tuning.beside(self.stage_threads, 64, 256),
            min_blocks=tuning.beside(self.min_blocks, 1, 4),
        )
        return [one for one in [*tiles, *more] if one.fits(problem, device)]


@dataclass(frozen=True)
class TokensConfig:
    """The geometry of selective_scan_tokens.cu.

    Attributes:
        lanes: lanes that share the tokens of one channel in one part of a tile.
        states: states with overlapping scans.
        num_threads: threads of a block.
        parts: parts of a tile along the tokens, each with its own warps.
        min_blocks: resident blocks per SM for which the compiler bounds registers.
    """

    lanes: int
    states: int = 2
    num_threads: int = _TOKENS_THREADS
    min_blocks: int = _TOKENS_BLOCKS
    parts: int = 1

    @property
    def block_channels(self) -> int:
        return self.num_threads // (self.lanes * self.parts)

    def constants(self, problem: ScanProblem) -> dict[str, int]:
        """The kernel's compile-time constants by name."""
        return {
            "LANES": self.lanes,
            "PARTS": self.parts,
            "GROUP": gcd(self.states, problem.state_size),
            "NUM_THREADS": self.num_threads,
            "MIN_BLOCKS": self.min_blocks,
        }

    def shared_bytes(self, problem: ScanProblem) -> int:
        """Bytes of `Channel` of selective_scan_tokens.cu for the channels of a block."""
        totals = 2 * self.parts * gcd(self.states, problem.state_size)  # double-buffered
        # The factor 2: a channel has rates and states, and a total has a factor and a state.
        return self.block_channels * 2 * (problem.state_size + totals) * float32.itemsize

    def candidates(self, problem: ScanProblem, device: Device) -> list[TokensConfig]:
        """Other lanes, block sizes and register bounds."""
        sizes = [tuning.resized(self, size) for size in tuning.beside(self.num_threads, 64, 256)]
        more = tuning.varied(
            self,
            lanes=tuning.beside(self.lanes, 4, 32),
            states=(2, 4),
            min_blocks=tuning.beside(self.min_blocks, 1, 8),
            parts=tuning.beside(self.parts, 1, _MAX_PARTS),
        )
        return [one for one in [*sizes, *more] if one.block_channels]


def _lane_tile(state_size: int, channels: int, states: int, tile_tokens: int) -> ScanConfig:
    """The config with at least `states` states in a lane, and no more lanes than the states need."""
    states = max(states, tuning.power_of_two(-(-state_size // _MAX_LANES)))
    return ScanConfig(channels, states, tuning.power_of_two(-(-state_size // states)), tile_tokens)


def choose(problem: ScanProblem, device: Device) -> ScanConfig | TokensConfig:
    """With few channels and long sequences, lanes share the tokens of a channel; otherwise they share its states."""
    batch, tokens = tuning.pinned(problem.batch), tuning.pinned(problem.num_tokens, _PINNED_TOKENS)
    problem = problem._replace(batch=batch, num_tokens=tokens)
    # All problems of a bucket get the same Config class, so that a tuning table can name its fields.
    rounded_tokens = tuning.power_of_two(problem.num_tokens) // tuning.power_of_two(problem.batch)
    # In selective_scan_tokens.cu a lane has as many tokens as the alignment of the whole batch allows.
    is_few = problem.dim * tuning.power_of_two(problem.batch) <= _FEW_CHANNELS
    if is_few and rounded_tokens >= _LONG_SEQUENCE and not tuning.batch_invariant():
        return _share_tokens(problem, device, rounded_tokens)
    return _choose_recurrence(problem, device)


def _share_tokens(problem: ScanProblem, device: Device, sequence_tokens: int) -> TokensConfig:
    """The Config of selective_scan_tokens.cu, with as many parts of a tile as the SMs and the sequences have use for.

    A part takes one warp. All parts together take at most _FEW_WARPS warps per SM, and every lane has tokens.
    """
    config, max_warps = TokensConfig(_MAX_LANES), _FEW_WARPS * device.num_sms
    parts = max_warps // max(1, problem.dim * tuning.power_of_two(problem.batch))
    if parts == 0:
        return config
    parts = min(_MAX_PARTS, parts, max(1, sequence_tokens // (_MAX_LANES * max(problem.vec_size, 4))))
    parts = 1 << parts.bit_length() - 1
    num_threads = max(config.num_threads, parts * _MAX_LANES)
    min_blocks = _FEW_WARPS * _MAX_LANES // num_threads
    # On AMD GPUs a thread has too few registers for four overlapping scans.
    states = config.states if device.arch.startswith("gfx") else 4
    return replace(config, states=states, num_threads=num_threads, min_blocks=min_blocks, parts=parts)


def _choose_recurrence(problem: ScanProblem, device: Device) -> ScanConfig:
    """The Config of selective_scan_fwd.cu: the first lane tile that fills the device.

    Token tiles are no longer than the average sequence, rounded up to a power of two.
    """
    sequence_tokens = -(-problem.num_tokens // max(1, problem.batch))
    tile_tokens = max(_MIN_TILE_TOKENS, min(_MAX_TILE_TOKENS, tuning.power_of_two(sequence_tokens)))
    short = sequence_tokens <= _SHORT_SEQUENCE
    if short:
        tile_tokens = min(tile_tokens, _SHORT_TILE_TOKENS)
    for channels, states in _SHORT_LANE_TILES if short else _LANE_TILES:
        config = _lane_tile(problem.state_size, channels, states, tile_tokens)
        warps = problem.batch * problem.dim * config.lanes / (channels * device.warp_size)
        if warps >= _MIN_SHARE * _SCHEDULERS * device.num_sms:
            break
    while not config.fits(problem, device) and config.tile_tokens > _MIN_TILE_TOKENS:
        config = _lane_tile(problem.state_size, config.channels, config.states, config.tile_tokens // 2)
    return config
