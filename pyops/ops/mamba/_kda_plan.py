"""Kimi Delta Attention: launches of its ops."""

from __future__ import annotations

from dataclasses import dataclass

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import bfloat16
from .._shared.products import multiplies
from ._gated_delta_plan import (
    GatedDeltaConfig,
    arguments_of,
    choose_recurrent,
    constants_of,
    gates_of,
    launch_recurrent,
)
from ._gated_delta_problem import DeltaProblem, check_rule, token_stride

_prepare = Kernel("mamba/kda_prepare.cu")
_chunk = Kernel("mamba/kda_chunk.cu")

_TOKENS = 32  # tokens of a tile
_MAX_KEY_SIZE = 128  # largest key size of kda_chunk.cu: a thread holds that many elements of half a state row
_MIN_TOKENS = 16  # fewest tokens per sequence, on average: with fewer, tiles are mostly empty
# Least logarithm of a decay for which kda_prepare.cu takes one anchor for 16 tokens: exp(16 * 5.5) is finite in
# bfloat16.
_LEAST_BOUND = -5.5
_PREPARE_BLOCKS = 2  # resident blocks of kda_prepare.cu per SM
_WARPS = (8, 4, 2)  # warps of a block of kda_chunk.cu; every block loads all prepared tiles of a head
# (resident blocks per SM, tiles in shared memory), best first: two blocks hide each other's barriers.
_STAGES = ((2, 3), (1, 3), (1, 2))
_ALIGNMENT = 1024  # most bytes of padding of shared memory, and of the memory that the driver reserves in a block
# Constants of delta_gate.cuh, and of the tiles that both kernels have.
_OF_PREPARE = (
    *("scalar_t", "g_t", "beta_t", "starts_t", "offset_t", "A_t", "bias_t", "KEY_SIZE", "QK_NORM"),
    *("HAS_GATE", "BOUNDED", "BETA_SIGMOID", "CHECKPOINTS"),
)
_OF_CHUNK = (
    *("scalar_t", "initial_t", "state_t", "checkpoint_t", "starts_t", "offset_t"),
    *("KEY_SIZE", "VALUE_SIZE", "CHECKPOINTS"),
)


@dataclass(frozen=True, slots=True, eq=False)
class KdaProblem(DeltaProblem):
    """A call of an op with a decay for each key channel."""

    @property
    def uses_products(self) -> bool:
        """Whether kda_prepare.cu and kda_chunk.cu serve the call."""
        q, k, v, g, o = self.tokens.q, self.tokens.k, self.tokens.v, self.tokens.g, self.tokens.o
        return (
            self.slots is None
            and q.device.supports("async_copies")
            and multiplies(q.dtype, q.device)
            and q.shape[3] % 32 == 0
            and 32 <= q.shape[3] <= _MAX_KEY_SIZE
            and v.shape[3] % 32 == 0
            and q.shape[0] * q.shape[1] >= max(1, 0 if tuning.batch_invariant() else _MIN_TOKENS * self.num_seqs)
            and all(arg.alignment == 16 and token_stride(arg) % 8 == 0 for arg in (q, k, v))
            and all(arg.alignment >= 4 * arg.dtype.itemsize and token_stride(arg) % 4 == 0 for arg in (g, o))
        )


def choose(problem: KdaProblem, device: Device) -> GatedDeltaConfig:
    """Blocks by which the busiest SM has the fewest warps, and of these the largest, which load the fewest tiles."""
    if not problem.uses_products:
        return choose_recurrent(problem)
    _, _, value_heads, value_size = problem.tokens.v.shape
    heads = tuning.pinned(problem.num_seqs) * value_heads
    fitting = (w for w in _WARPS if value_size % (16 * w) == 0)
    return GatedDeltaConfig(min(fitting, key=lambda w: w * -(-heads * value_size // (16 * w * device.num_sms))), 1)


def plan(op: str, problem: KdaProblem) -> list[Launch]:
    """The launches for either op."""
    check_rule(problem)
    config = tuning.config(op, problem, problem.tokens.q.device, choose)
    return _launches(problem, config) if problem.uses_products else [launch_recurrent(problem, config)]


def _launches(problem: KdaProblem, config: GatedDeltaConfig) -> list[Launch]:
    q, v = problem.tokens.q, problem.tokens.v
    key_size, (batch, num_tokens, value_heads, value_size) = q.shape[3], v.shape
    constants = constants_of(problem) | gates_of(problem)
    # A sequence begins at a slot of its own (SequenceTiles of kda_tiles.cuh).
    slots = batch * num_tokens // _TOKENS + problem.num_seqs * (2 if constants["CHECKPOINTS"] else 1)
    tile_bytes = _TOKENS * (3 * key_size + 2 * _TOKENS) * q.dtype.itemsize + 4 * key_size
    prepared = Scratch(slots * value_heads * tile_bytes)
    lower_bound = problem.gates.lower_bound if problem.gates else None
    one_anchor = q.dtype == bfloat16 and lower_bound is not None and lower_bound >= _LEAST_BOUND
    of_prepare = {name: constants[name] for name in _OF_PREPARE} | {"ONE_ANCHOR": one_anchor}
    prepare = _prepare(**of_prepare, TOKENS=_TOKENS, MIN_BLOCKS=_PREPARE_BLOCKS).launch(
        slots * value_heads, 2 * key_size, prepared=prepared, **arguments_of(problem, _prepare)
    )
    stages, shared = _stages(q.device, key_size, config.warps)
    of_chunk = {name: constants[name] for name in _OF_CHUNK}
    chunk = _chunk(**of_chunk, TOKENS=_TOKENS, STAGES=stages, WARPS=config.warps, MIN_BLOCKS=config.min_blocks).launch(
        problem.num_seqs * value_heads * (value_size // (16 * config.warps)),
        q.device.warp_size * config.warps,
        shared,
        prepared=prepared,
        **arguments_of(problem, _chunk),
    )
    return [prepare, chunk]


def _stages(device: Device, key_size: int, warps: int) -> tuple[int, int]:
    """Tiles of kda_chunk.cu in shared memory, and their bytes. Rows of a tile are padded to 128 bytes."""
    row_bytes = 3 * -(-key_size // 64) * 128 + -(-16 * warps // 64) * 128 + 2 * 128
    stage_bytes = _TOKENS * row_bytes + -(-4 * key_size // 128) * 128
    fits = (
        stages for blocks, stages in _STAGES if blocks * (stages * stage_bytes + _ALIGNMENT) <= device.shared_memory
    )
    stages = next(fits, _STAGES[-1][1])
    return stages, stages * stage_bytes
