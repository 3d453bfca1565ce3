"""MLA decode of at most 16 heads on Hopper, 16-bit or "fp8_ds_mla" cache: the geometry of mla_decode_small_h.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
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
    call_us,
    choose_shares,
    cluster_sizes,
    head_groups,
    most_blocks,
    or_clusters,
)

_decode = Kernel("attention/mla_decode_small_h.cu")

# Query heads of a block, tokens of a warp group's KV tile, threads of a warp group.
_HEADS, _GROUP_TOKENS, _GROUP_THREADS = 16, 16, 64
_GROUPS = (4, 2, 1)  # warp groups of a block; an SM holds four groups
# Query heads of a CTA of a cluster, for calls with at most 16: with fewer, groups of warps and CTAs exchange less, and
# more clusters read the same tokens (docs/performance/mla.md, "Clusters for short calls").
_CLUSTER_HEADS = (16, 8, 4)
# The cost model: least us of an SM per 64 tokens, by the differences of clusters of two, four and eight CTAs
# (docs/performance/mla.md, "Clusters for short calls"); bytes per us of the cache, by 64 sequences of 4096 tokens.
_UNIT_US, _BYTES_PER_US = 1.9, 4.3e6
# The cost model: us of a block of one warp group without its units. Its results stay in registers, which is 1.5 us less
# than BLOCK_US by clock stamps of a block of two (docs/performance/mla.md, "Clock stamps").
_ALONE_BLOCK_US = 1.5


@dataclass(frozen=True, slots=True)
class FewHeadsConfig:
    """The geometry of mla_decode_small_h.cu.

    Attributes:
        groups: groups of two warps of a block.
        num_shares: shares of the tokens of all sequences; a block or a cluster for each.
        combines: whether blocks combine the pieces of a sequence; otherwise mla_combine.cu does.
        split_ctas: CTAs of a cluster that split each sequence and combine its pieces; 1: no clusters.
        HEADS: query heads of a block; fewer than the rows of its MMAs in clusters alone.
    """

    groups: int
    num_shares: int
    combines: bool
    split_ctas: int = 1
    HEADS: int = _HEADS

    UNIT, PARTIAL_RATE, TREE_RATE = 64, PARTIAL_BYTES_PER_US, SM_BYTES_PER_US

    @property
    def BLOCKS(self) -> int:
        return _GROUPS[0] // self.groups

    @property
    def WARPS(self) -> int:
        return 2 if self.groups == 1 else _HEADS // 2

    @property
    def PARTIALS(self) -> int:
        return _HEADS * LATENT_SIZE // (32 * self.WARPS) + 4

    def candidates(self, problem: MlaProblem, device: Device) -> list[FewHeadsConfig]:
        """Other blocks and numbers of shares."""
        del problem, device
        found = tuning.varied(self, groups=_GROUPS)
        if self.split_ctas == 1:
            found += tuning.varied(self, combines=(False, True))
        return found + tuning.varied(self, num_shares=tuning.beside(self.num_shares, 1, MAX_SHARES))

    def block_us(self, problem: MlaProblem) -> float:
        """The time of a block without its units, in us."""
        del problem
        return _ALONE_BLOCK_US if self.groups == 1 and self.split_ctas == 1 else BLOCK_US

    def unit_us(self, problem: MlaProblem, device: Device) -> float:
        """The time of a block for 64 tokens, in us, if all SMs are busy."""
        # The blocks of other groups of heads read the same from L2.
        num_readers = min(device.num_sms, most_blocks(problem, self)) / head_groups(problem, self)
        bytes_us = self.UNIT * _entry_bytes(problem) * num_readers / _BYTES_PER_US
        # A block of fewer than four groups takes several tiles for 64 tokens, but one for a sequence that fits in it.
        tiles = min(_GROUPS[0] // self.groups, max(1, -(-problem.max_tokens // (self.groups * _GROUP_TOKENS))))
        if (
            problem.num_seqs > self.BLOCKS * device.num_sms // head_groups(problem, self)
            and problem.max_tokens <= self.UNIT
        ):
            # Blocks that go through several sequences have mean lengths: any up to what the page table holds.
            return max(_UNIT_US, bytes_us) * (1 + tiles) / 2
        return max(_UNIT_US, bytes_us) * tiles

    def launch(self, problem: MlaProblem, arguments: dict[str, Any]) -> Launch:
        """A block for each share and each 16 heads."""
        kernel = _decode(
            **constants_of(problem),
            GROUPS=self.groups,
            COMBINES=self.combines,
            CLUSTER=self.split_ctas,
            CTA_HEADS=self.HEADS,
            COPY_TOKENS=_copy_tokens(problem),
        )
        return kernel.launch(
            (head_groups(problem, self), self.num_shares * self.split_ctas),
            self.groups * _GROUP_THREADS,
            shared_memory(problem, self.groups),
            **arguments_of(problem),
            **query_strides(problem),
            **arguments,
        )


def shared_memory(problem: MlaProblem, groups: int) -> int:
    """Bytes of dynamic shared memory of a block, as mla_decode_small_h.cu counts them."""
    logits, stages = 4096 * groups, (4 if problem.is_ds_mla else 2) // (2 if groups == 1 else 1)
    return _HEADS * ENTRY_SIZE * 2 + logits + stages * groups * _GROUP_TOKENS * _entry_bytes(problem)


def _entry_bytes(problem: MlaProblem) -> int:
    return problem.cache.shape[2] * problem.cache.dtype.itemsize


def _copy_tokens(problem: MlaProblem) -> int:
    """Tokens that one bulk copy loads: up to 16 with contiguous latent KV in a page."""
    cache = problem.cache
    if problem.lists_slots:
        return 1
    lie_dense = cache.strides[1] == cache.shape[2] or cache.shape[1] == 1
    return gcd(cache.shape[1], 16) if lie_dense else 1


def choose(problem: MlaProblem, device: Device) -> FewHeadsConfig:
    """A block of four groups on every SM, or two or four blocks of fewer groups, which have more partial results, but
    more sequences at once. Or a cluster for each sequence, whatever the other lengths."""
    found: list[FewHeadsConfig] = []
    clusters: list[FewHeadsConfig] = []
    for groups in _GROUPS:
        config = FewHeadsConfig(groups, 1, combines=False)
        num_shares, combines = choose_shares(problem, config, device)
        found.append(replace(config, num_shares=num_shares, combines=combines))
        for heads in _CLUSTER_HEADS if problem.num_heads <= _HEADS else (_HEADS,):
            shared = replace(config, num_shares=problem.num_seqs, HEADS=heads)
            clusters += [replace(shared, split_ctas=size) for size in cluster_sizes(problem, shared, device)]
    config = min(found, key=lambda one: call_us(problem, one, device))
    return or_clusters(problem, config, clusters, device)
