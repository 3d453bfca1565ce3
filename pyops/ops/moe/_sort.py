"""The stable sort of rows by their experts (expert_sort.cuh): its launch, and code shared by references.

A row is one choice of one token: row t of ``num_tokens * topk`` rows is element t of `topk_ids`, read row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

    from ..._core.system.device import Device

_LANE_ROWS = 2  # rows per lane above which the block gets another warp
_KEPT_ROWS = 4  # most rows per lane with bins that stay in registers
# The largest problem for one block. Measured on an H200 with top 8 of 128 experts: one block takes 3.2, 4.6, 6.2 and
# 9.7 us for 16, 128, 256 and 512 tokens; a cluster of eight takes 2.7, 2.9, 2.9 and 3.3 us with two rows per lane, and
# 3.4 us for 512 tokens with four.
_BLOCK_ROWS, _BLOCK_SLOTS = 64, 32768
_THREAD_SLOTS = 16  # output slots per thread above which the block gets more threads
_BLOCK_THREADS = 256, 512, 1024  # numbers of threads of a block
_STATIC_SHARED = 2048  # most bytes of static shared memory of the kernels
_MAX_ROWS = 2**30  # most rows and output slots: kernels count them in 32 bits


class SortProblem(NamedTuple):
    """The input of `choose`: tokens, choices per token, bins, and output elements (rows and padding)."""

    num_tokens: int
    topk: int
    bins: int
    slots: int

    @property
    def num_rows(self) -> int:
        return self.num_tokens * self.topk

    def bucket(self) -> str:
        return f"tokens={tuning.power_of_two(self.num_tokens)} topk={self.topk} bins={self.bins}"


@dataclass(frozen=True)
class SortConfig:
    """The geometry of a sort by experts (expert_sort.cuh).

    Attributes:
        cluster: blocks that share the rows.
        lane_rows: rows per lane above which the block gets another warp, as long as it may have more.
        min_threads, max_threads: fewest and most threads of a block.
    """

    cluster: int
    lane_rows: int = _LANE_ROWS
    min_threads: int = _BLOCK_THREADS[0]
    max_threads: int = _BLOCK_THREADS[-1]

    def shared_words(self, bins: int) -> int:
        """Words of shared memory, without the per-warp counts."""
        return (2 + (self.cluster > 1)) * bins

    def warps(self, problem: SortProblem, device: Device) -> tuple[int, int]:
        """(warps of a block, warps with rows). Each warp with rows has its own counts in shared memory."""
        wanted = max(1, -(-problem.num_rows // (self.cluster * self.lane_rows * device.warp_size)))
        threads = max(wanted * device.warp_size, problem.bins, problem.slots // (self.cluster * _THREAD_SLOTS))
        block = next((n for n in _BLOCK_THREADS if n >= threads), self.max_threads)
        num_warps = max(self.min_threads, min(block, self.max_threads)) // device.warp_size
        words = (device.shared_memory - _STATIC_SHARED) // 4 - self.shared_words(problem.bins)
        return num_warps, min(wanted, num_warps, words // problem.bins)

    def candidates(self, problem: SortProblem, device: Device) -> list[SortConfig]:
        """Other cluster sizes; other rows per lane and threads, where they change the number of warps."""
        clusters = [1 << i for i in range(device.cluster.bit_length())]
        others = tuning.varied(
            self,
            lane_rows=tuning.beside(self.lane_rows, 1, 8),
            min_threads=[n for n in _BLOCK_THREADS if n <= self.max_threads],
            max_threads=[n for n in _BLOCK_THREADS if n >= self.min_threads],
        )
        return tuning.varied(self, cluster=clusters) + [
            one for one in others if one.warps(problem, device) != self.warps(problem, device)
        ]


def choose(problem: SortProblem, device: Device) -> SortConfig:
    """One block for few rows and output slots, else a cluster."""
    few = problem.num_rows <= _BLOCK_ROWS and problem.slots <= _BLOCK_SLOTS
    return SortConfig(1 if few else device.cluster)


def sort_launch(
    kernel: Kernel,
    topk_ids: TensorArg,
    bins: int,
    slots: int,
    groups: int = 1,
    tuned: bool = True,
    fixed: dict[str, Any] | None = None,
    **constants: Any,
) -> Launch:
    """The launch of a kernel that sorts the rows of `topk_ids` into `bins` bins, by a cluster for each of `groups`.

    `slots` is the number of output elements of a group, rows and padding. `tuned`: whether `tuning` may override the
    geometry of the sort.
    """
    device = topk_ids.device
    num_tokens, topk = topk_ids.shape
    problem = SortProblem(num_tokens, topk, bins, slots)
    config = tuning.config(topk_ids.op, problem, device, choose) if tuned else choose(problem, device)
    num_warps, sort_warps = config.warps(problem, device)
    if sort_warps < 1:
        message = f"expected experts for which {device.shared_memory} bytes of shared memory suffice, got {bins}"
        raise check.refuse(topk_ids, "topk_ids", message)
    lane_rows = -(-problem.num_rows // (config.cluster * sort_warps * device.warp_size))
    return kernel(
        id_t=topk_ids.dtype,
        BIN_BITS=bins.bit_length(),
        CLUSTER=config.cluster,
        KEPT=_KEPT_ROWS if lane_rows <= _KEPT_ROWS else 0,
        **constants,
        NUM_THREADS=num_warps * device.warp_size,
    ).launch(
        grid=(groups, config.cluster),
        block=num_warps * device.warp_size,
        shared=4 * (sort_warps * bins + config.shared_words(bins)),
        num_rows=problem.num_rows,
        sort_warps=sort_warps,
        warp_rows=lane_rows * device.warp_size,
        **(fixed or {}),
    )


def check_ids(topk_ids: TensorArg) -> int:
    """Check that `topk_ids` is a contiguous matrix of ids; returns the choices per token."""
    check.index(topk_ids, num_tokens=None, topk=None)
    check.contiguous(topk_ids)
    if topk_ids.numel > _MAX_ROWS:
        raise topk_ids.error(f"expected at most 2^30 elements, got shape {topk_ids.shape}")
    return topk_ids.shape[1]


def check_count(arg: TensorArg, name: str, value: int, low: int = 1, high: int = 2**31 - 1) -> None:
    """Check that the scalar argument `name` lies between `low` and `high`."""
    if not low <= value <= high:
        raise check.refuse(arg, name, f"expected {low} to {high}, got {value}")


def check_map(expert_map: TensorArg | None, num_experts: int) -> int:
    """Check `expert_map`; returns its number of entries."""
    if expert_map is None:
        return num_experts
    check.sizes(expert_map, num_experts=None)
    check.dtype(expert_map, int32)
    check.contiguous(expert_map)
    return min(num_experts, expert_map.shape[0])


def local_experts(topk_ids: Tensor, num_experts: int, num_local: int, expert_map: Tensor | None) -> Tensor:
    """The local index of each row's expert on this device, -1 for an expert elsewhere; [num_rows] int64."""
    ids = topk_ids.reshape(-1).long()
    num_ids = num_experts if expert_map is None else min(num_experts, len(expert_map))
    exists = (ids >= 0) & (ids < num_ids)
    if expert_map is not None and num_ids:
        ids = expert_map[ids.where(exists, 0)].long()
    return ids.where(exists & (ids >= 0) & (ids < num_local), -1)


def sorted_rows(bins: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    """(the rows with a bin >= 0, sorted by bin, stably; the number of rows in each bin)."""
    rows = (bins >= 0).nonzero().squeeze(1)
    counts = torch.zeros(num_bins, dtype=torch.int64, device=bins.device)
    counts.index_add_(0, bins[rows], torch.ones_like(rows))
    return rows[bins[rows].sort(stable=True)[1]], counts


def padded_slots(bins: Tensor, num_bins: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows sorted by bin; the output slot of each, with bins aligned to `block_size`; blocks of each bin)."""
    rows, counts = sorted_rows(bins, num_bins)
    blocks = (counts + block_size - 1) // block_size
    skipped = (blocks * block_size - counts).cumsum(0) - (blocks * block_size - counts)  # padding before each bin
    return rows, torch.arange(len(rows), dtype=torch.int64, device=rows.device) + skipped[bins[rows]], blocks


def max_slots(num_rows: int, num_experts: int, block_size: int) -> int:
    """The maximum number of output slots, with the rows of each expert padded to a multiple of `block_size`."""
    most = num_rows + min(num_rows, num_experts) * (block_size - 1)
    return most // block_size * block_size
