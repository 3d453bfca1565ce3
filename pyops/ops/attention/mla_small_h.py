"""MLA decode of at most 16 heads on Hopper, 16-bit or "fp8_ds_mla" cache: the geometry of mla_decode_small_h.cu."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from .combine import CombineConfig, choose_combine, lanes_of
from .mla_problem import ENTRY_SIZE, LATENT_SIZE, MlaProblem, arguments_of, constants_of

_decode = Kernel("attention/mla_decode_small_h.cu")

# Query heads of a block, tokens of a warp group's KV tile, threads of a warp group.
_HEADS, _GROUP_TOKENS, _GROUP_THREADS = 16, 16, 64
_GROUPS = (4, 2)  # warp groups of a block; an SM holds one block of four or two blocks of two
_MAX_SPLITS = 128  # most splits of a sequence
# The cost model: least us of an SM per 64 tokens; factor if an SM has one block of two groups; us per block; us per
# combine kernel; bytes per us. Fitted to 64 sequences of 4096 tokens.
_UNIT_US, _ALONE, _START_US, _JOIN_US, _BYTES_PER_US = 1.5, 1.4, 4.0, 3.0, 4.3e6


@dataclass(frozen=True, slots=True)
class FewHeadsConfig:
    """The geometry of mla_decode_small_h.cu.

    Attributes:
        groups: groups of two warps of a block.
        max_splits: most splits of a sequence; a block takes one split.
        min_split: fewest tokens of a split; a multiple of SPLIT_UNIT.
        combine: the kernel that combines the splits.
    """

    groups: int
    max_splits: int
    min_split: int
    combine: CombineConfig

    SPLIT_UNIT = 64

    def candidates(self, problem: MlaProblem, device: Device) -> list[FewHeadsConfig]:
        """Other blocks and splits. The combine kernel stays: a tuning table cannot hold it."""
        del device
        found = tuning.varied(self, groups=_GROUPS)
        if problem.num_kv_splits <= 0:
            found += tuning.varied(self, max_splits=tuning.beside(self.max_splits, 1, _MAX_SPLITS))
        return found

    def launch(self, problem: MlaProblem, arguments: dict[str, Any]) -> Launch:
        """A block for each split of each sequence."""
        kernel = _decode(
            **constants_of(problem),
            IS_DS_MLA=problem.is_ds_mla,
            GROUPS=self.groups,
            COPY_TOKENS=_copy_tokens(problem),
        )
        return kernel.launch(
            (problem.num_seqs, self.max_splits),
            self.groups * _GROUP_THREADS,
            shared_memory(problem, self.groups),
            **arguments_of(problem),
            **arguments,
        )


def shared_memory(problem: MlaProblem, groups: int) -> int:
    """Bytes of dynamic shared memory of a block, as mla_decode_small_h.cu counts them."""
    logits, stages = 4096 * groups, 4 if problem.is_ds_mla else 2
    return _HEADS * ENTRY_SIZE * 2 + logits + stages * groups * _GROUP_TOKENS * _entry_bytes(problem)


def _entry_bytes(problem: MlaProblem) -> int:
    return problem.cache.shape[2] * problem.cache.dtype.itemsize


def _copy_tokens(problem: MlaProblem) -> int:
    """Tokens that one bulk copy loads: up to 16 with contiguous latent KV in a page."""
    cache = problem.cache
    lie_dense = cache.strides[1] == cache.shape[2] or cache.shape[1] == 1
    return gcd(cache.shape[1], 16) if lie_dense else 1


def choose(problem: MlaProblem, device: Device) -> FewHeadsConfig:
    """The block and the number of splits with the least time by the cost model."""
    units = -(-problem.max_tokens // FewHeadsConfig.SPLIT_UNIT)
    split_bytes = 2 * 4 * problem.num_seqs * problem.num_heads * LATENT_SIZE  # partials, written and read
    bytes_us = FewHeadsConfig.SPLIT_UNIT * _entry_bytes(problem) * device.num_sms / _BYTES_PER_US
    unit_us = max(_UNIT_US, bytes_us)

    def time(groups: int, splits: int) -> float:
        blocks, at_once = problem.num_seqs * splits, 4 // groups
        rounds = -(-blocks // (at_once * device.num_sms))
        is_alone = at_once > 1 and blocks <= device.num_sms
        own_us = unit_us * (_ALONE if is_alone else at_once)
        alone = rounds * (-(-units // splits) * own_us + _START_US)
        return alone + (_JOIN_US + splits * split_bytes / _BYTES_PER_US if splits > 1 else 0.0)

    wanted = problem.num_kv_splits
    all_splits = (wanted,) if wanted > 0 else range(1, _MAX_SPLITS + 1)
    groups, max_splits = min(product(_GROUPS, all_splits), key=lambda pair: time(*pair))
    max_splits = max(1, min(max_splits, units))
    lanes = lanes_of(LATENT_SIZE, problem.combine_width, device)
    combine = choose_combine(problem.num_seqs, problem.num_heads, max_splits, lanes, device)
    return FewHeadsConfig(groups, max_splits, FewHeadsConfig.SPLIT_UNIT, combine)
