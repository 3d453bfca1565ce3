"""MLA decode by WGMMA with an fp8 cache on compute capability 9.0: the geometry of mla_decode_sm90_fp8.cu."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.tensor_map import TensorMap
from ..._core.system.device import Device
from .mla_problem import ENTRY_SIZE, LATENT_SIZE, MlaProblem, arguments_of, constants_of, query_strides
from .mla_schedule import MAX_SHARES, PARTIAL_BYTES_PER_US, SM_BYTES_PER_US, choose_shares, head_groups

_decode = Kernel("attention/mla_decode_sm90_fp8.cu")

_TOKENS = 64  # tokens of a KV tile
_HEADS = (32, 64)  # query heads of a block: 64 with queries of fp8 alone
_MIN_HEADS = 17  # fewest query heads of 16 bits: mma.sync has 16 rows
_PANEL_SIZE = 64  # bytes of a row of a TMA box, and of its swizzle
_STAGES = 4  # tiles in shared memory
# The cost model, by an H200: us of two KV tiles, also with queries of fp8, and us of a block without its tiles, with
# queries of 16 bits, and of fp8 for 32 and 64 heads; bytes per us of partial results of 64 heads for mla_combine.cu,
# and for mla_tree_combine.cuh, where registers leave five loads in flight (docs/performance/mla.md, "Queries of fp8").
_PAIR_US, _FP8_PAIR_US, _BLOCK_US, _FP8_BLOCK_US = 3.2, 2.8, 3.5, {32: 5.4, 64: 11.5}
_WIDE_PARTIAL_RATE, _WIDE_TREE_RATE = 5e6, 6.5e4


@dataclass(frozen=True, slots=True)
class MlaSm90Fp8Config:
    """The geometry of mla_decode_sm90_fp8.cu.

    Attributes:
        heads: query heads of a block.
        num_shares: shares of the tokens of all sequences; a block for each, and for each group of heads.
        combines: whether blocks combine the pieces of a sequence; otherwise mla_combine.cu does.
    """

    heads: int
    num_shares: int
    combines: bool

    BLOCKS, UNIT, split_ctas = 1, 2 * _TOKENS, 1
    WARPS = 8

    @property
    def HEADS(self) -> int:
        return self.heads

    @property
    def PARTIALS(self) -> int:
        return self.heads * LATENT_SIZE // 256 + 2 * (self.heads // 4)

    @property
    def PARTIAL_RATE(self) -> float:
        return PARTIAL_BYTES_PER_US if self.heads == _HEADS[0] else _WIDE_PARTIAL_RATE

    @property
    def TREE_RATE(self) -> float:
        return SM_BYTES_PER_US if self.heads == _HEADS[0] else _WIDE_TREE_RATE

    def candidates(self, problem: MlaProblem, device: Device) -> list[MlaSm90Fp8Config]:
        """Other numbers of shares, and the other combine."""
        del problem, device
        found = tuning.varied(self, combines=(False, True))
        return found + tuning.varied(self, num_shares=tuning.beside(self.num_shares, 1, MAX_SHARES))

    def block_us(self, problem: MlaProblem) -> float:
        """The time of a block without its units, in us."""
        return _FP8_BLOCK_US[self.heads] if problem.has_fp8_queries else _BLOCK_US

    def unit_us(self, problem: MlaProblem, device: Device) -> float:
        """The time of a block for two KV tiles, in us, if all SMs are busy."""
        del device
        return _FP8_PAIR_US if problem.has_fp8_queries else _PAIR_US

    def launch(self, problem: MlaProblem, arguments: dict[str, Any]) -> Launch:
        """A block for each share and each group of heads."""
        box_tokens = _box_tokens(problem)
        kernel = _decode.for_arch(problem.cache.device.arch_feature)(
            **constants_of(problem), HEADS=self.heads, BOX_TOKENS=box_tokens, COMBINES=self.combines
        )
        return kernel.launch(
            (head_groups(problem, self), self.num_shares),
            384,
            shared_memory(self.heads, problem.has_fp8_queries),
            cache_map=_map(problem, box_tokens),
            **_decode.taken(arguments_of(problem) | arguments),  # page_stride and slot_stride are those of the map
            **query_strides(problem),
        )


def shared_memory(heads: int, has_fp8_queries: bool) -> int:
    """Bytes of dynamic shared memory of a block: queries or what warpgroups exchange, probabilities, tiles."""
    first = heads * ENTRY_SIZE if has_fp8_queries else heads * LATENT_SIZE * 4
    probabilities = (_STAGES if has_fp8_queries else 2) * _TOKENS * heads * 2
    return first + probabilities + _STAGES * _TOKENS * ENTRY_SIZE


def serves(problem: MlaProblem) -> bool:
    """Whether the kernel supports a call with operands that TMA can load, and enough heads: plain fp8, and pages that
    boxes of 8 tokens divide."""
    if not problem.is_plain_fp8 or problem.lists_slots or _box_tokens(problem) % 8:
        return False
    return problem.has_fp8_queries or _MIN_HEADS <= problem.num_heads <= _HEADS[0]


def _box_tokens(problem: MlaProblem) -> int:
    """Tokens of a TMA box."""
    return gcd(problem.cache.shape[1], _TOKENS)


def _map(problem: MlaProblem, tokens: int) -> TensorMap:
    """The map with boxes of the whole latent KV of some tokens: panels of 64 bytes of each eight of them."""
    cache = problem.cache
    (num_pages, page_size, _), (page, slot, _) = cache.shape, cache.strides
    sizes = (_PANEL_SIZE, 8, ENTRY_SIZE // _PANEL_SIZE, page_size // 8, num_pages)
    strides = (slot, _PANEL_SIZE, 8 * slot, page if num_pages > 1 else page_size * slot)
    return TensorMap(cache, cache.dtype, sizes, strides, (_PANEL_SIZE, 8, sizes[2], tokens // 8, 1), _PANEL_SIZE)


def choose(problem: MlaProblem, device: Device) -> MlaSm90Fp8Config:
    """A block on every SM, or one per sequence."""
    heads = _HEADS[problem.has_fp8_queries and problem.num_heads > _HEADS[0]]
    config = MlaSm90Fp8Config(heads, 1, combines=False)
    return MlaSm90Fp8Config(heads, *choose_shares(problem, config, device))
