"""The gated delta rule: launches of its ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import float32, int32
from .._shared.products import multiplies
from ._gated_delta_problem import DeltaProblem, token_stride

_chunk = Kernel("mamba/gated_delta_chunk.cu")
_recurrent = Kernel("mamba/gated_delta_recurrent.cu")

# Rows of the state in a block of gated_delta_recurrent.cu, and in a thread. Float32 states with contiguous columns then
# have whole lines of 128 bytes in a block, and in a large block, which reads DRAM faster, two of them in sequence.
_ROWS, _LARGE_ROWS, _THREAD_ROWS = 32, 64, 4
# Registers of an SM, and of a thread besides those of the state: in all decode steps, and for a state for each token.
_SM_REGISTERS, _OTHER_REGISTERS, _DRAFT_REGISTERS = 65536, 70, 32
# The producer warps of a block prepare tiles for all of its rows, so large blocks prepare each tile fewer times. On an
# H200, with 32 heads of 128, one sequence of 8192 tokens takes 814 us in blocks of 8 warps, 862 with 4 and 927 with 2.
_WARPS = 4  # warps of a block that hold rows of the state
_LARGE_WARPS = 8  # the same, unless few blocks have work; with warps of 64 lanes they would spill
_FEWEST_BLOCKS = 1 / 8  # of an SM: fewer blocks are made smaller
_MAX_KEY_SIZE = 128  # largest key size of gated_delta_chunk.cu: a thread holds that many elements of half a state row
_MAX_KEY_SIZE_GFX11 = 96  # the same on gfx11, where an operand takes eight registers: larger keys spill
_MIN_TOKENS = 16  # fewest tokens per sequence, on average: with fewer, tiles of gated_delta_chunk.cu are mostly empty
# Microseconds on an H200 of calls with one tile for each sequence (docs/performance/scans.md, "Short sequences"): by
# WGMMA, and for each state of 128 x 128 elements; by gated_delta_recurrent.cu for each state, for each token of a
# state, and at least for each token.
_WGMMA_US, _WGMMA_STATE_US = 10.0, 0.073
_RECURRENT_STATE_US, _TOKEN_US, _MIN_TOKEN_US = 0.026, 0.0095, 0.93
_ALIGNMENT = 256  # most bytes of padding between the parts of shared memory
_PREPARING = 4  # producer warps of gated_delta_chunk.cu; they prepare tiles and hold no rows
# (tokens of a tile, stages), best first: with cp.async, and where registers hold copies.
_TILES, _HELD_TILES = ((32, 4),), ((32, 3), (16, 3))


@dataclass(frozen=True, slots=True, eq=False)
class GatedDeltaProblem(DeltaProblem):
    """A call of an op with one decay for each value head."""

    @property
    def uses_products(self) -> bool:
        """Whether gated_delta_chunk.cu serves the call; gated_delta_recurrent.cu serves every call."""
        q, k, v, o = self.tokens.q, self.tokens.k, self.tokens.v, self.tokens.o
        return (
            self.slots is None
            and multiplies(q.dtype, q.device)
            and q.shape[3] % 16 == 0
            and 16 <= q.shape[3] <= (_MAX_KEY_SIZE_GFX11 if q.device.arch.startswith("gfx11") else _MAX_KEY_SIZE)
            and v.shape[3] % 32 == 0
            and (tuning.batch_invariant() or q.shape[0] * q.shape[1] >= self._min_tokens * self.num_seqs)
            and all(arg.alignment == 16 and token_stride(arg) % 8 == 0 for arg in (q, k, v))
            and o.alignment >= 8
            and token_stride(o) % 4 == 0
            and tiles(q.device, q.shape[3], _WARPS) is not None
        )

    @property
    def uses_wgmma(self) -> bool:
        """Whether gated_delta_prepare.cu and gated_delta_sm90.cu can serve the call."""
        return self.uses_products and self._fits_wgmma

    @property
    def _fits_wgmma(self) -> bool:
        q, v, o = self.tokens.q, self.tokens.v, self.tokens.o
        return (
            q.device.supports("wgmma")
            and q.shape[3] in (64, 128)
            and v.shape[3] % 64 == 0
            and q.shape[0] * q.shape[1] > 0
            and o.alignment == 16
            and token_stride(o) % 8 == 0
        )

    @property
    def _min_tokens(self) -> float:
        """Tokens per sequence, on average, from which tiles take less time than one token after another."""
        if not self._fits_wgmma:
            return _MIN_TOKENS
        states = self.num_seqs * self.tokens.v.shape[2] * self.tokens.q.shape[3] * self.tokens.v.shape[3] / 128**2
        saved = _WGMMA_US + (_WGMMA_STATE_US - _RECURRENT_STATE_US) * states
        return saved / max(_MIN_TOKEN_US, _TOKEN_US * states)


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """The geometry of gated_delta_chunk.cu, kda_chunk.cu or gated_delta_recurrent.cu.

    Attributes:
        warps: warps of a block, without the producer warps.
        min_blocks: resident blocks per SM for which the compiler bounds registers.
        rows: rows of the state in a block of gated_delta_recurrent.cu; a warp of the other kernels has 16.
    """

    warps: int
    min_blocks: int
    rows: int = _ROWS

    def candidates(self, problem: DeltaProblem, device: Device) -> list[GatedDeltaConfig]:
        """Other block sizes and register bounds."""
        sizes = (2, 4, 8) if device.warp_size == 32 or not problem.uses_products else (2, 4)
        warps = [w for w in sizes if not problem.uses_products or problem.tokens.v.shape[3] % (16 * w) == 0]
        return tuning.varied(self, warps=warps, min_blocks=(1, 2))


def choose(problem: GatedDeltaProblem, device: Device) -> GatedDeltaConfig:
    """Smaller blocks, with fewer rows of the state, where larger ones would leave SMs idle."""
    if not problem.uses_products:
        return choose_recurrent(problem)
    _, _, value_heads, value_size = problem.tokens.v.shape
    rows = tuning.pinned(problem.num_seqs) * value_heads * value_size
    for warps in (_LARGE_WARPS, _WARPS):
        fits = value_size % (16 * warps) == 0 and tiles(device, problem.tokens.q.shape[3], warps) is not None
        is_served = warps == _WARPS or device.warp_size == 32
        if fits and is_served and rows // (16 * warps) >= _FEWEST_BLOCKS * device.num_sms:
            return GatedDeltaConfig(warps, 1)
    return GatedDeltaConfig(2, 1)


def choose_recurrent(problem: DeltaProblem) -> GatedDeltaConfig:
    """For a decode step, as many resident blocks as have registers: their states are the bytes in flight."""
    if problem.slots is None:
        return GatedDeltaConfig(_WARPS, 1)
    num_sms = problem.tokens.q.device.num_sms
    small, large = (_resident(problem, rows) for rows in (_ROWS, _LARGE_ROWS))
    few, many = (_blocks(problem, tuning.pinned(problem.num_seqs), rows) for rows in (_LARGE_ROWS, _ROWS))
    if problem.tokens.v.shape[3] % _LARGE_ROWS or few < num_sms:
        return small
    # Where all blocks are resident at the same time, the SM with most rows is the last.
    is_even = many <= small.min_blocks * num_sms and _ROWS * -(-many // num_sms) < _LARGE_ROWS * -(-few // num_sms)
    return small if is_even else large


def _resident(problem: DeltaProblem, rows: int) -> GatedDeltaConfig:
    """Blocks of these rows, and as many on an SM as have registers."""
    assert problem.slots is not None
    indices, threads = problem.slots.ssm_state_indices, 32 * _WARPS
    held = -(-problem.tokens.q.shape[3] * rows // (4 * _THREAD_ROWS * threads)) * 4 * _THREAD_ROWS
    others = _OTHER_REGISTERS + (_DRAFT_REGISTERS if indices is not None and len(indices.shape) == 2 else 0)
    min_blocks = max(1, _SM_REGISTERS // (threads * (held + others)))
    num_sms, blocks = problem.tokens.q.device.num_sms, _blocks(problem, tuning.pinned(problem.num_seqs), rows)
    # One more spills. It pays where only then one launch, or two in sequence, find space at the same time, and where
    # without it a second wave would have blocks for most SMs.
    fewest, most = (min_blocks + 0.5) * num_sms, (min_blocks + 1) * num_sms
    pays = any(fewest < count <= most for count in (blocks, 2 * blocks))
    return GatedDeltaConfig(_WARPS, min_blocks + pays, rows)


def _blocks(problem: DeltaProblem, num_seqs: int, rows: int) -> int:
    """Blocks of gated_delta_recurrent.cu."""
    _, _, value_heads, value_size = problem.tokens.v.shape
    return num_seqs * value_heads * -(-value_size // rows)


class Tiles(NamedTuple):
    """Tokens of a tile of gated_delta_chunk.cu, tiles in shared memory, and bytes of dynamic shared memory."""

    tokens: int
    stages: int
    shared: int


def tiles(device: Device, key_size: int, warps: int) -> Tiles | None:
    """The largest tiles of gated_delta_chunk.cu that fit into shared memory; None if none do."""
    has_mma = device.supports("mma")
    for tokens, stages in _TILES if device.supports("async_copies") else _HELD_TILES:
        # Each stage holds keys, queries and values, with rows padded to 128 bytes; two tiles hold two square matrices.
        key_bytes, value_bytes = (tokens * -(-size // 64) * 128 for size in (key_size, 16 * warps))
        row_bytes = 128 if has_mma else 2 * (tokens + 8)
        summed_bytes = 0 if has_mma else key_size * row_bytes
        dynamic = stages * (2 * key_bytes + value_bytes + summed_bytes) + 4 * tokens * row_bytes
        # Static: `Factors` of three tiles and `Prepared` of two (gated_delta_tokens.cuh).
        fixed = 3 * (3 * tokens + 1) * 4 + 2 * (4 + tokens + 4) * tokens * 4
        if dynamic + fixed + _ALIGNMENT <= device.shared_memory:
            return Tiles(tokens, stages, dynamic)
    return None


def launch(problem: GatedDeltaProblem, config: GatedDeltaConfig) -> Launch:
    """The launch for either op."""
    if not problem.uses_products:
        return launch_recurrent(problem, config)
    q, v = problem.tokens.q, problem.tokens.v
    found = tiles(q.device, q.shape[3], config.warps)
    assert found is not None
    grid = problem.num_seqs * v.shape[2] * (v.shape[3] // (16 * config.warps))
    constants = constants_of(problem) | {"WARPS": config.warps, "TOKENS": found.tokens, "STAGES": found.stages}
    kernel = _chunk(**constants, MIN_BLOCKS=config.min_blocks)
    return kernel.launch(
        grid, q.device.warp_size * (config.warps + _PREPARING), found.shared, **arguments_of(problem, _chunk)
    )


def constants_of(problem: DeltaProblem) -> dict[str, Any]:
    """Constants that the kernels of the gated delta rule have in common."""
    tokens, state, result = problem.tokens, problem.state, problem.result
    beta, cu_seqlens = tokens.beta, tokens.cu_seqlens
    return {
        "scalar_t": tokens.q.dtype,
        "g_t": tokens.g.dtype,
        "beta_t": float32 if beta is None else beta.dtype,
        "initial_t": float32 if state is None else state.dtype,
        "state_t": float32 if result is None else result.dtype,
        "starts_t": int32 if cu_seqlens is None else cu_seqlens.dtype,
        "KEY_SIZE": tokens.q.shape[3],
        "VALUE_SIZE": tokens.v.shape[3],
        "QK_NORM": tokens.use_qk_l2norm_in_kernel,
    }


def gates_of(problem: DeltaProblem) -> dict[str, Any]:
    """Constants of delta_gate.cuh, and of checkpoints."""
    gates, checkpoints = problem.gates, problem.checkpoints
    A_log, dt_bias = (gates.A_log, gates.dt_bias) if gates else (None, None)
    state, offsets = (checkpoints.checkpoint_state, checkpoints.checkpoint_offsets) if checkpoints else (None, None)
    return {
        "A_t": float32 if A_log is None else A_log.dtype,
        "bias_t": float32 if dt_bias is None else dt_bias.dtype,
        "checkpoint_t": float32 if state is None else state.dtype,
        "offset_t": int32 if offsets is None else offsets.dtype,
        "HAS_GATE": A_log is not None,
        "BOUNDED": gates is not None and gates.lower_bound is not None,
        "BETA_SIGMOID": gates is not None and gates.use_beta_sigmoid_in_kernel,
        "CHECKPOINTS": state is not None,
    }


def arguments_of(problem: DeltaProblem, kernel: Kernel) -> dict[str, Any]:
    """Those arguments of a kernel of the gated delta rule that are no tensors, or are absent."""
    tokens, state, result, gates = problem.tokens, problem.state, problem.result, problem.gates
    q, v, beta = tokens.q, tokens.v, tokens.beta
    _, num_tokens, key_heads, key_size = q.shape
    value_heads, value_size = v.shape[2:]
    some_state = result if result is not None else state
    optional = {
        "beta": beta,
        "cu_seqlens": tokens.cu_seqlens,
        "initial_state": None if problem.slots else state,
        "final_state": None if problem.slots else result,
        "A_log": gates and gates.A_log,
        "dt_bias": gates and gates.dt_bias,
        "lower_bound": gates and gates.lower_bound,
        "checkpoint_state": problem.checkpoints and problem.checkpoints.checkpoint_state,
        "checkpoint_offsets": problem.checkpoints and problem.checkpoints.checkpoint_offsets,
    }
    arguments = {
        **{name: 0 for name, arg in optional.items() if arg is None},
        "num_tokens": q.shape[0] * num_tokens,
        "seq_tokens": num_tokens,
        "num_seqs": problem.num_seqs,
        "value_heads": value_heads,
        "heads_per_key": value_heads // key_heads,
        "state_stride": value_heads * value_size * key_size if some_state is None else some_state.strides[0],
        "state_row_stride": key_size if tokens.state_v_first else 1,
        "state_column_stride": 1 if tokens.state_v_first else value_size,
        "g_step": tokens.g.strides[2],
        "beta_step": 0 if beta is None else beta.strides[2],
        "beta_stride": 0 if beta is None else token_stride(beta),
        **{f"{name}_stride": token_stride(getattr(tokens, name)) for name in ("o", "q", "k", "v", "g")},
    }
    return kernel.taken(arguments)


def launch_recurrent(problem: DeltaProblem, config: GatedDeltaConfig) -> Launch:
    """The launch of gated_delta_recurrent.cu, which serves every call."""
    slots = problem.slots
    indices, accepted = (slots.ssm_state_indices, slots.num_accepted_tokens) if slots else (None, None)
    key_size, value_size = problem.tokens.q.shape[3], problem.tokens.v.shape[3]
    counts = problem.num_seqs, tuning.pinned(problem.num_seqs)
    blocks, pinned_blocks = (_blocks(problem, count, config.rows) for count in counts)
    arguments = arguments_of(problem, _recurrent)
    size = (key_size if problem.tokens.state_v_first else value_size) | arguments["state_stride"]
    wide = size % 4 == 0 and all(arg.alignment >= 4 * arg.dtype.itemsize for arg in problem.states)
    kernel = _recurrent(
        **constants_of(problem),
        **gates_of(problem),
        index_t=int32 if indices is None else indices.dtype,
        accepted_t=int32 if accepted is None else accepted.dtype,
        STATE_V_FIRST=problem.tokens.state_v_first,
        LANES=32 * config.warps * _THREAD_ROWS // config.rows,
        ROWS=config.rows,
        STATE_VEC=4 if wide else 1,
        SLOTS=slots is not None,
        PER_TOKEN=indices is not None and len(indices.shape) == 2,
        CHANNEL_DECAYS=problem.gates is not None,
        MIN_BLOCKS=config.min_blocks,
        PREFETCH=2 * pinned_blocks <= config.min_blocks * problem.tokens.q.device.num_sms,
    )
    return kernel.launch(
        blocks,
        32 * config.warps,
        **({} if slots else {"state": 0}),
        **({} if indices else {"ssm_state_indices": 0}),
        **({} if accepted else {"num_accepted_tokens": 0}),
        num_slots=0 if problem.result is None else problem.result.shape[0],
        index_stride=0 if indices is None else indices.strides[0],
        index_columns=1 if indices is None or len(indices.shape) == 1 else indices.shape[1],
        **arguments,
    )
