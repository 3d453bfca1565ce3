"""MLA decode on Hopper: equal shares of the tokens of all sequences (mla_schedule.cuh), and their combine."""

from __future__ import annotations

from typing import Any, Protocol

from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from .decode_launch import workspace
from .layout import absent, heads_stride
from .mla_problem import LATENT_SIZE, MlaProblem

_combine = Kernel("attention/mla_combine.cu")

MAX_SHARES = 2**15 - 1  # most shares: a grid has fewer than 2^16 blocks along y, and a cluster two per share
_NUM_THREADS, _BLOCKS = 256, 8  # threads of a block of mla_combine.cu, blocks per SM
_PARTS = 4  # parts of a head in mla_combine.cu
# The cost model: us per combine kernel, and bytes per us of partial results.
_JOIN_US, _BYTES_PER_US = 3.0, 4.3e6
_MAX_UNITS = 2**30  # most units of all sequences: the kernels count them in ints
_ANY_SPLITS = 2**31 - 1  # max_splits without a limit
_SLOTS, _PIECES_BYTES = 2, 8  # slots of a share; bytes of MlaPieces


class SharesConfig(Protocol):
    """The geometry of a kernel with shares.

    Attributes:
        num_shares: shares of the tokens of all sequences; a block for each, and for each group of heads.
        UNIT: tokens; sequences are cut at multiples of it.
    """

    @property
    def num_shares(self) -> int: ...
    @property
    def UNIT(self) -> int: ...

    def unit_us(self, problem: MlaProblem, device: Device) -> float:
        """The time of a block for a unit, in us."""
        ...

    def launch(self, problem: MlaProblem, arguments: dict[str, Any]) -> Launch: ...


def choose_shares(problem: MlaProblem, config: SharesConfig, blocks: int) -> int:
    """The number of shares: one for each of the `blocks` that run at once, or one per sequence if none is cut."""
    if not _may_cut(problem, config):
        return min(problem.num_seqs, MAX_SHARES)
    return max(1, min(blocks, problem.num_seqs * _units(problem, config)))


def launch(problem: MlaProblem, config: SharesConfig) -> list[Launch]:
    """The kernel that computes the shares, and the combine if sequences may be cut."""
    device, num_seqs, num_heads = problem.cache.device, problem.num_seqs, problem.num_heads
    join_units, piece_units = _combine_units(problem, config)
    is_cut = _may_cut(problem, config)
    shared = {
        **absent(lse=problem.lse),
        **workspace(_SLOTS * config.num_shares * num_heads if is_cut else 0, LATENT_SIZE),
        "pieces": Scratch(num_seqs * _PIECES_BYTES) if is_cut else 0,
        "num_seqs": num_seqs,
        "num_heads": num_heads,
        "out_stride": heads_stride(problem.out),
    }
    arguments = {
        "max_splits": 1 if not is_cut else problem.num_kv_splits if problem.num_kv_splits > 0 else _ANY_SPLITS,
        "join_units": join_units,
        "piece_units": piece_units,
    }
    launches = [config.launch(problem, shared | arguments)]
    if is_cut:
        kernel = _combine(out_t=problem.out.dtype, HAS_LSE=problem.lse is not None)
        grid = min(num_seqs * num_heads * _PARTS, _BLOCKS * device.num_sms)
        launches.append(kernel.launch(grid, _NUM_THREADS, **shared))
    return launches


def _units(problem: MlaProblem, config: SharesConfig) -> int:
    """Units of the longest sequence that the page table holds."""
    return max(1, -(-problem.max_tokens // config.UNIT))


def _combine_units(problem: MlaProblem, config: SharesConfig) -> tuple[float, float]:
    """The times of the combine kernel, and of writing and reading a partial result, in units."""
    unit_us, piece_bytes = config.unit_us(problem, problem.cache.device), 2 * 4 * problem.num_heads * LATENT_SIZE
    return _JOIN_US / unit_us, piece_bytes / _BYTES_PER_US / unit_us


def _may_cut(problem: MlaProblem, config: SharesConfig) -> bool:
    """Whether sequences may be long enough to be cut: a combine takes the time of some units."""
    units = _units(problem, config)
    is_long = units > 1 + sum(_combine_units(problem, config))
    return is_long and problem.num_kv_splits != 1 and problem.num_seqs * units <= _MAX_UNITS
