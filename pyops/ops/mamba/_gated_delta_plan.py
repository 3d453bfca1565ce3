"""The gated delta rule: checks and launches of its ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import float32, int32
from ..._core.tensors.tensor import TensorArg
from .._shared.products import multiplies
from ._chunk_scan_problem import check_heads

_chunk = Kernel("mamba/gated_delta_chunk.cu")
_recurrent = Kernel("mamba/gated_delta_recurrent.cu")

_MAX_SIZE = 256  # largest key size
_MAX_KEYS = 32  # most columns of the state in registers of a thread
# Measured on an H200 with heads of 128. 8 sequences of 1024 tokens take 266 us with 8 warps and 481 us with 4, because
# the producer warps then prepare tiles for more rows. One sequence of 8192 tokens has few blocks: 908 us with 4 warps,
# 923 with 2 and 987 with 8.
_WARPS = 4  # warps of a block that hold rows of the state
_LARGE_WARPS = 8  # the same, if such blocks still fill all SMs; with warps of 64 lanes they would spill
_MAX_KEY_SIZE = 128  # largest key size of gated_delta_chunk.cu: a thread holds that many elements of half a state row
_MAX_KEY_SIZE_GFX11 = 96  # the same on gfx11, where an operand takes eight registers: larger keys spill
_MIN_TOKENS = 16  # fewest tokens per sequence, on average: with fewer, tiles of gated_delta_chunk.cu are mostly empty
_ALIGNMENT = 256  # most bytes of padding between the parts of shared memory
_PREPARING = 4  # producer warps of gated_delta_chunk.cu; they prepare tiles and hold no rows
# (tokens of a tile, stages), best first: with cp.async, and where registers hold copies.
_TILES, _HELD_TILES = ((32, 4),), ((32, 3), (16, 3))


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The arguments that the ops of the gated delta rule have in common."""

    q: TensorArg
    k: TensorArg
    v: TensorArg
    g: TensorArg
    beta: TensorArg | None
    cu_seqlens: TensorArg | None
    use_qk_l2norm_in_kernel: bool
    state_v_first: bool
    o: TensorArg


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The states of `gated_delta_rule_update`, and the arguments by which a sequence finds its own."""

    state: TensorArg
    ssm_state_indices: TensorArg | None
    num_accepted_tokens: TensorArg | None


@dataclass(frozen=True, slots=True, eq=False)
class GatedDeltaProblem:
    """A call of an op of the gated delta rule.

    Attributes:
        state: the states that sequences begin with, or None; result: gets the states, or is None.
        slots: of the update, where both are the same; else None.
    """

    tokens: Tokens
    state: TensorArg | None
    result: TensorArg | None
    slots: Slots | None = None

    @property
    def num_seqs(self) -> int:
        cu_seqlens = self.tokens.cu_seqlens
        return int(self.tokens.q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)

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
            and (tuning.batch_invariant() or q.shape[0] * q.shape[1] >= _MIN_TOKENS * self.num_seqs)
            and all(arg.alignment == 16 and token_stride(arg) % 8 == 0 for arg in (q, k, v))
            and o.alignment >= 8
            and token_stride(o) % 4 == 0
            and tiles(q.device, q.shape[3], _WARPS) is not None
        )

    def bucket(self) -> str:
        q, v = self.tokens.q, self.tokens.v
        return (
            f"{'mma' if self.uses_products else 'simt'} {q.dtype.name} heads={v.shape[2]}/{q.shape[2]} "
            f"{q.shape[3]}x{v.shape[3]} tokens={tuning.power_of_two(q.shape[0] * q.shape[1])} "
            f"seqs={tuning.power_of_two(self.num_seqs)}"
        )


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """The geometry of gated_delta_chunk.cu or gated_delta_recurrent.cu.

    Attributes:
        warps: warps of a block, without the producer warps.
        min_blocks: resident blocks per SM for which the compiler bounds registers.
    """

    warps: int
    min_blocks: int

    def candidates(self, problem: GatedDeltaProblem, device: Device) -> list[GatedDeltaConfig]:
        """Other block sizes and register bounds."""
        sizes = (2, 4, 8) if device.warp_size == 32 or not problem.uses_products else (2, 4)
        warps = [w for w in sizes if not problem.uses_products or problem.tokens.v.shape[3] % (16 * w) == 0]
        return tuning.varied(self, warps=warps, min_blocks=(1, 2))


def choose(problem: GatedDeltaProblem, device: Device) -> GatedDeltaConfig:
    """Smaller blocks, with fewer rows of the state, where larger ones would leave SMs idle."""
    if not problem.uses_products:
        return GatedDeltaConfig(_WARPS, 1)
    _, _, value_heads, value_size = problem.tokens.v.shape
    num_blocks = tuning.pinned(problem.num_seqs) * value_heads * value_size // (16 * _WARPS)
    large = device.warp_size == 32 and value_size % (16 * _LARGE_WARPS) == 0 and num_blocks // 2 >= device.num_sms
    if large and tiles(device, problem.tokens.q.shape[3], _LARGE_WARPS) is not None:
        return GatedDeltaConfig(_LARGE_WARPS, 1)
    return GatedDeltaConfig(2 if value_size % (16 * _WARPS) or num_blocks < device.num_sms else _WARPS, 1)


def check_rule(problem: GatedDeltaProblem) -> None:
    """OpError for a call that no kernel serves."""
    tokens = problem.tokens
    q, v, o, cu_seqlens = tokens.q, tokens.v, tokens.o, tokens.cu_seqlens
    check.floating(q)
    check.sizes(q, batch=None, num_tokens=None, key_heads=None, key_size=None)
    batch, num_tokens, key_heads, key_size = q.shape
    check.like(tokens.k, q)
    check.sizes(v, batch=batch, num_tokens=num_tokens, value_heads=None, value_size=None)
    value_heads, value_size = v.shape[2:]
    if not key_heads or value_heads % key_heads:
        raise v.error(f"expected a multiple of {key_heads} heads, those of q, got {value_heads}")
    if not 1 <= key_size <= _MAX_SIZE:
        raise q.error(f"expected heads of 1 to {_MAX_SIZE} elements, got {key_size}")
    check.dtype(v, q.dtype)
    check.like(o, v)
    for arg in (q, tokens.k, v, o):
        check_heads(arg)
        token_stride(arg)
    for factor in (tokens.g, tokens.beta):
        if factor is not None:
            check.floating(factor)
            check.sizes(factor, batch=batch, num_tokens=num_tokens, value_heads=value_heads)
            token_stride(factor)
    check.index(cu_seqlens, num_seqs_and_one=None)
    if cu_seqlens is not None:
        check.contiguous(cu_seqlens)
        if batch != 1:
            raise q.error(f"expected a batch of 1 beside cu_seqlens, got {batch}")
        if not cu_seqlens.shape[0]:
            raise cu_seqlens.error("expected at least one entry, got none")
    last = (value_size, key_size) if tokens.state_v_first else (key_size, value_size)
    for state in (problem.state, problem.result):
        if state is not None:
            check.floating(state)
            check.sizes(state, count=None, value_heads=value_heads, **dict(zip(("rows", "columns"), last, strict=True)))
    if problem.slots is None:
        _check_states(problem)
    else:
        _check_slots(problem.slots, problem.num_seqs)


def token_stride(arg: TensorArg) -> int:
    """Token stride in elements; OpError unless one stride fits the tokens of all rows of the batch."""
    batch, num_tokens = arg.shape[:2]
    if batch > 1 and num_tokens > 1 and arg.strides[0] != num_tokens * arg.strides[1]:
        raise arg.error(f"expected tokens of one stride, got shape {arg.shape} with strides {arg.strides}")
    return arg.strides[1] if num_tokens > 1 else arg.strides[0]


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
    tokens, state, result = problem.tokens, problem.state, problem.result
    q, v, g, beta, cu_seqlens = tokens.q, tokens.v, tokens.g, tokens.beta, tokens.cu_seqlens
    _, num_tokens, key_heads, key_size = q.shape
    value_heads, value_size = v.shape[2:]
    some_state = result if result is not None else state
    state_stride = value_heads * value_size * key_size if some_state is None else some_state.strides[0]
    constants = {
        "scalar_t": q.dtype,
        "g_t": g.dtype,
        "beta_t": float32 if beta is None else beta.dtype,
        "initial_t": float32 if state is None else state.dtype,
        "state_t": float32 if result is None else result.dtype,
        "starts_t": int32 if cu_seqlens is None else cu_seqlens.dtype,
        "KEY_SIZE": key_size,
        "VALUE_SIZE": value_size,
        "QK_NORM": tokens.use_qk_l2norm_in_kernel,
        "MIN_BLOCKS": config.min_blocks,
    }
    states = (None, None) if problem.slots else (state, result)
    optional = zip(("beta", "cu_seqlens", "initial_state", "final_state"), (beta, cu_seqlens, *states), strict=True)
    arguments = {
        **{name: 0 for name, arg in optional if arg is None},
        "num_tokens": q.shape[0] * num_tokens,
        "seq_tokens": num_tokens,
        "value_heads": value_heads,
        "heads_per_key": value_heads // key_heads,
        "state_stride": state_stride,
        "state_row_stride": key_size if tokens.state_v_first else 1,
        "state_column_stride": 1 if tokens.state_v_first else value_size,
        "g_step": g.strides[2],
        "beta_step": 0 if beta is None else beta.strides[2],
        "beta_stride": 0 if beta is None else token_stride(beta),
        **{f"{name}_stride": token_stride(getattr(tokens, name)) for name in ("o", "q", "k", "v", "g")},
    }
    num_heads = problem.num_seqs * value_heads
    if problem.uses_products:
        found = tiles(q.device, key_size, config.warps)
        assert found is not None
        grid = num_heads * (value_size // (16 * config.warps))
        kernel = _chunk(**constants, WARPS=config.warps, TOKENS=found.tokens, STAGES=found.stages)
        return kernel.launch(grid, q.device.warp_size * (config.warps + _PREPARING), found.shared, **arguments)
    return _launch_recurrent(problem, config, constants, arguments, num_heads)


def _launch_recurrent(
    problem: GatedDeltaProblem,
    config: GatedDeltaConfig,
    constants: dict[str, Any],
    arguments: dict[str, Any],
    num_heads: int,
) -> Launch:
    slots, states = problem.slots, [arg for arg in (problem.state, problem.result) if arg is not None]
    indices, accepted = (slots.ssm_state_indices, slots.num_accepted_tokens) if slots else (None, None)
    key_size, value_size = problem.tokens.q.shape[3], problem.tokens.v.shape[3]
    lanes = min(32, tuning.power_of_two(-(-key_size // _MAX_KEYS)))
    rows = 32 * config.warps // lanes
    columns_together = problem.tokens.state_v_first and (key_size | arguments["state_stride"]) % 4 == 0
    wide = columns_together and all(arg.alignment >= 4 * arg.dtype.itemsize for arg in states)
    kernel = _recurrent(
        **constants,
        index_t=int32 if indices is None else indices.dtype,
        accepted_t=int32 if accepted is None else accepted.dtype,
        LANES=lanes,
        ROWS=rows,
        STATE_VEC=4 if wide else 1,
        SLOTS=slots is not None,
        PER_TOKEN=indices is not None and len(indices.shape) == 2,
    )
    return kernel.launch(
        num_heads * -(-value_size // rows),
        32 * config.warps,
        **({} if slots else {"state": 0}),
        **({} if indices else {"ssm_state_indices": 0}),
        **({} if accepted else {"num_accepted_tokens": 0}),
        num_slots=0 if problem.result is None else problem.result.shape[0],
        index_stride=0 if indices is None else indices.strides[0],
        index_columns=1 if indices is None or len(indices.shape) == 1 else indices.shape[1],
        **arguments,
    )


def _check_states(problem: GatedDeltaProblem) -> None:
    """The states of `gated_delta_rule`: one for each sequence, contiguous."""
    for arg in (problem.state, problem.result):
        if arg is not None:
            if arg.shape[0] != problem.num_seqs:
                raise arg.error(f"expected a state for each of {problem.num_seqs} sequences, got shape {arg.shape}")
            check.contiguous(arg)


def _check_slots(slots: Slots, num_seqs: int) -> None:
    """The state and the slots of `gated_delta_rule_update`."""
    state, indices, accepted, inner = slots.state, slots.ssm_state_indices, slots.num_accepted_tokens, 1
    for size, stride in zip(reversed(state.shape[1:]), reversed(state.strides[1:]), strict=True):
        if size > 1 and stride != inner and state.numel:
            raise state.error(f"expected contiguous slots, got shape {state.shape} with strides {state.strides}")
        inner *= size
    if indices is not None:
        check.index(indices, **{"num_seqs": num_seqs, **({"tokens": None} if len(indices.shape) == 2 else {})})
        if len(indices.shape) == 2 and indices.shape[1] > 1 and indices.strides[1] != 1:
            raise indices.error(f"expected rows of neighbouring slots, got strides {indices.strides}")
    check.index(accepted, num_seqs=num_seqs)
    if accepted is not None:
        check.contiguous(accepted)
        if indices is None or len(indices.shape) != 2:
            raise accepted.error("expected ssm_state_indices of shape (num_seqs, tokens) beside it")
