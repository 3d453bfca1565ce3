"""MLA decode of many heads by mma.sync from compute capability 8.0 on: the geometry of mla_decode_sm80.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from .mla_problem import ENTRY_SIZE, LATENT_SIZE, ROPE_SIZE, MlaProblem, arguments_of, constants_of, query_strides
from .mla_schedule import MAX_SHARES, PARTIAL_BYTES_PER_US, SM_BYTES_PER_US, choose_shares, head_groups

_decode = Kernel("attention/mla_decode_sm80.cu")

HEADS = 64  # query heads of a block
_NUM_WARPS = HEADS // 8
_MIN_HEADS = HEADS // 2 + 1  # fewest heads of this kernel: a block is more than half full
_OPERANDS = 18  # A operands of the queries of a warp
# Tokens of a KV tile, KV tiles that are being loaded, and operands in registers: with more NVRTC 13.0 spills.
_GEOMETRIES = ((32, 1, 14), (16, 1, 14))
_FP8_GEOMETRIES = ((16, 2, 14), (16, 1, 15))
STATIC_SHARED = 3200  # bytes of static shared memory: an upper bound
# The cost model: us per 128 tokens, and us of a block without them, by 1 x 4096 with 128 heads: queries come in two
# passes, and P V of the last tile follows alone.
_UNIT_US, _BLOCK_US = 8.6, 6.6


@dataclass(frozen=True, slots=True)
class MlaSm80Config:
    """The geometry of mla_decode_sm80.cu.

    Attributes:
        step_tokens: tokens of a KV tile.
        ahead: KV tiles that are being loaded.
        held: A operands of the queries in registers of a warp; the others are in shared memory.
        num_shares: shares of the tokens of all sequences; a block for each, and for each 64 heads.
    """

    step_tokens: int
    ahead: int
    held: int
    num_shares: int

    HEADS, BLOCKS, UNIT, split_ctas = HEADS, 1, 128, 1
    WARPS, PARTIALS = _NUM_WARPS, LATENT_SIZE // 4 + 4
    PARTIAL_RATE, TREE_RATE = PARTIAL_BYTES_PER_US, SM_BYTES_PER_US
    combines = False  # mla_combine.cu combines the pieces of a sequence

    def candidates(self, problem: MlaProblem, device: Device) -> list[MlaSm80Config]:
        """Other KV tiles and numbers of shares."""
        found = [
            replace(self, step_tokens=tokens, ahead=ahead, held=held)
            for tokens, ahead, held in _geometries_that_fit(problem, device)
        ]
        return found + tuning.varied(self, num_shares=tuning.beside(self.num_shares, 1, MAX_SHARES))

    def block_us(self, problem: MlaProblem) -> float:
        """The time of a block without its units, in us."""
        del problem
        return _BLOCK_US

    def unit_us(self, problem: MlaProblem, device: Device) -> float:
        """The time of a block for 128 tokens, in us."""
        del problem, device
        return _UNIT_US

    def launch(self, problem: MlaProblem, arguments: dict[str, Any]) -> Launch:
        """A block for each share and each 64 heads."""
        kernel = _decode(
            **constants_of(problem),
            product_t=problem.product_dtype,
            HEADS=HEADS,
            TOKENS=self.step_tokens,
            NUM_WARPS=_NUM_WARPS,
            AHEAD=self.ahead,
            HELD=self.held,
            QUERY_ACCESS=min(8, check.vector_width(ROPE_SIZE, problem.q_nope, problem.q_pe)),
            OUT_ACCESS=min(2, check.vector_width(LATENT_SIZE, problem.out)),
        )
        return kernel.launch(
            (head_groups(problem, self), self.num_shares),
            _NUM_WARPS * 32,
            shared_memory(problem, self.step_tokens, self.ahead, self.held),
            **arguments_of(problem),
            **query_strides(problem),
            **_decode.taken(arguments),  # without those of mla_tree_combine.cuh
        )


def shared_memory(problem: MlaProblem, tokens: int, ahead: int, held: int) -> int:
    """Bytes of dynamic shared memory of a block, as mla_decode_sm80.cu counts them."""
    row = (ENTRY_SIZE + 8) * 2
    token = 3 * row + ahead * problem.cache.shape[2] if problem.is_fp8 else (ahead + 2) * row
    # Of each head three float32 partial scores of a token, and two rows of probabilities; operands of the queries.
    others = HEADS * (tokens * 3 * 4 + (tokens + 8) * 2 * 2)
    return tokens * token + others + _NUM_WARPS * (_OPERANDS - held) * 32 * 16


def _geometries_that_fit(problem: MlaProblem, device: Device) -> list[tuple[int, int, int]]:
    """The geometries that fit into shared memory."""
    most = device.shared_memory - STATIC_SHARED
    geometries = _FP8_GEOMETRIES if problem.is_fp8 else _GEOMETRIES
    return [one for one in geometries if shared_memory(problem, *one) <= most]


def serves(problem: MlaProblem, device: Device) -> bool:
    """Whether mla_decode_sm80.cu supports the call, and has enough heads."""
    return (
        problem.may_use_mma
        and device.supports("async_copies")
        and problem.num_heads >= _MIN_HEADS
        and bool(_geometries_that_fit(problem, device))
    )


def choose(problem: MlaProblem, device: Device) -> MlaSm80Config:
    """A block on every SM."""
    config = MlaSm80Config(*_geometries_that_fit(problem, device)[0], 1)
    num_shares, _ = choose_shares(problem, config, device)
    return replace(config, num_shares=num_shares)
