"""MLA decode of at most 16 heads with an fp8 cache: the geometry of mla_decode_small_h_fp8.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from .mla_problem import ENTRY_SIZE, LATENT_SIZE, MlaProblem, arguments_of, constants_of, query_strides
from .mla_schedule import (
    BLOCK_US,
    MAX_SHARES,
    PARTIAL_BYTES_PER_US,
    SM_BYTES_PER_US,
    choose_shares,
    cluster_sizes,
    head_groups,
    most_blocks,
    or_clusters,
)

_decode = Kernel("attention/mla_decode_small_h_fp8.cu")

_HEADS, _TOKENS = 16, 64  # query heads of a block, tokens of a KV tile
_NUM_THREADS, _BLOCKS = 128, 2  # threads of a block, blocks per SM
SHARED_MEMORY = _HEADS * ENTRY_SIZE * 2 + _HEADS * (_TOKENS * 2 + 16) + 2 * _TOKENS * ENTRY_SIZE  # bytes of a block
# The cost model: us per KV tile where an SM has one block; where it has two, by 64 sequences of 4096 tokens (58.5 us).
_TILE_US, _SHARED_TILE_US = 2.2, 3.3


@dataclass(frozen=True, slots=True)
class CodesConfig:
    """The geometry of mla_decode_small_h_fp8.cu.

    Attributes:
        num_shares: shares of the tokens of all sequences; a block or a cluster for each.
        combines: whether blocks combine the pieces of a sequence; otherwise mla_combine.cu does.
        split_ctas: CTAs of a cluster that split each sequence and combine its pieces; 1: no clusters.
    """

    num_shares: int
    combines: bool
    split_ctas: int = 1

    HEADS, BLOCKS, UNIT = _HEADS, _BLOCKS, _TOKENS
    WARPS, PARTIALS = _NUM_THREADS // 32, _HEADS * LATENT_SIZE // _NUM_THREADS + 4
    PARTIAL_RATE, TREE_RATE = PARTIAL_BYTES_PER_US, SM_BYTES_PER_US

    def candidates(self, problem: MlaProblem, device: Device) -> list[CodesConfig]:
        """Other numbers of shares, and the other combine."""
        del problem, device
        found = tuning.varied(self, combines=(False, True)) if self.split_ctas == 1 else []
        return found + tuning.varied(self, num_shares=tuning.beside(self.num_shares, 1, MAX_SHARES))

    def block_us(self, problem: MlaProblem) -> float:
        """The time of a block without its units, in us."""
        del problem
        return BLOCK_US

    def unit_us(self, problem: MlaProblem, device: Device) -> float:
        """The time of a block for a KV tile, in us."""
        return _TILE_US if most_blocks(problem, self) <= device.num_sms else _SHARED_TILE_US

    def launch(self, problem: MlaProblem, arguments: dict[str, Any]) -> Launch:
        """A block for each share and each 16 heads."""
        return _decode(**constants_of(problem), COMBINES=self.combines, CLUSTER=self.split_ctas).launch(
            (head_groups(problem, self), self.num_shares * self.split_ctas),
            _NUM_THREADS,
            SHARED_MEMORY,
            **arguments_of(problem),
            **query_strides(problem),
            **arguments,
        )


def choose(problem: MlaProblem, device: Device) -> CodesConfig:
    """Two blocks on every SM, or a cluster for each sequence."""
    config = CodesConfig(1, combines=False)
    config = CodesConfig(*choose_shares(problem, config, device))
    clusters = [CodesConfig(problem.num_seqs, False, size) for size in cluster_sizes(problem, config, device)]
    return or_clusters(problem, config, clusters, device)
