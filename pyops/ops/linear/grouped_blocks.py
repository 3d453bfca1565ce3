"""The block size of the lists that sort the rows of grouped GEMMs: that with which the products are fastest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ... import tuning
from ..._core.system import device as devices
from ..._core.system.device import Device
from ..._core.tensors import dtypes
from ..._core.tensors.dtypes import DType, bfloat16
from . import grouped_rates
from .grouped_engines import choose
from .grouped_problem import ACTIVATIONS
from .grouped_shape import GroupedShape, Scales

_BLOCK_SIZES = 16, 32, 48, 64, 96, 128, 192  # block sizes: the row tiles of the kernels
_WEIGHT_SIZE = 4096  # N and K of an expert's weight where a caller does not know them
_SAME = 1.02  # a block size that served fewer rows is kept while no other is faster by this factor
_MAX_LIMITS = 1024  # results of `limits` that a process remembers
_FEW_ROWS, _MOST_ROWS = 8, 1024  # rows of an expert below and above which the block size hardly changes


_planned: list[Device] = []  # devices that layers in host memory are planned for


class Limit(NamedTuple):
    """The block size up to a number of rows, and above that of the `Limit` before."""

    rows: int
    block_size: int


def block_size_for(
    num_rows: int,
    num_experts: int,
    n: int = _WEIGHT_SIZE,
    k: int = _WEIGHT_SIZE,
    dtype: DType = bfloat16,
    scales: Scales = "none",
    device: Device | None = None,
) -> int:
    """The block size with which `moe_align_block_size` should sort `num_rows` rows for weights [num_experts, n, k]."""
    rows = tuning.pinned_rows(num_rows, num_experts)
    shape = GroupedShape(rows, num_experts, n, k, dtype=dtype, scales=scales)
    times = _times(device or devices.model(), shape)
    return min(times, key=lambda size: times[size])


def of_rows(num_rows: int, found: tuple[Limit, ...]) -> int:
    """The block size for `num_rows` rows. They are only compared, so that torch.compile need not know them."""
    for one in found[:-1]:
        if num_rows <= one.rows:
            return one.block_size
    return found[-1].block_size


def limits_of_experts(
    sizes: tuple[int, int, int, int], activation: str, names: tuple[str, str], scales: Scales, device_index: int
) -> tuple[Limit, ...]:
    """The block sizes for both products of a layer of experts.

    The arguments are constants of torch.compile, which takes the result for one.

    Args:
        sizes: (experts, experts of a token, hidden size, intermediate size).
        activation: of the first product's epilogue.
        names: names of the dtypes of the results, and of the operands.
        scales: of the operands.
        device_index: ordinal of the device; -1 for host memory.
    """
    num_experts, top_k, hidden, width = sizes
    of_host = _planned[-1] if _planned else devices.host()
    device = devices.get(device_index) if device_index >= 0 and devices.count() else of_host
    out_dtype, dtype = (dtypes.of(name) or bfloat16 for name in names)
    gated = ACTIVATIONS[activation]
    shape = GroupedShape(0, num_experts, hidden, width, 1, dtype, out_dtype, scales)
    return limits(device, replace(shape, n=width * (2 if gated else 1), k=hidden, top_k=top_k, gated=gated), shape)


limits_of_experts._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler does, without torch


@contextmanager
def planned_for(device: Device) -> Iterator[None]:
    """Within this context, layers of experts in host memory are planned for a device that is not present."""
    _planned.append(device)
    try:
        yield
    finally:
        _planned.pop()


@lru_cache(_MAX_LIMITS)
def limits(device: Device, *shapes: GroupedShape) -> tuple[Limit, ...]:
    """The block sizes with which these products of the same rows are fastest, the lists included.

    They are found for numbers of rows that double as long as experts have few of them, and then grow by a quarter. The
    rows of the shapes are not read.
    """
    found: list[Limit] = []
    rows, num_experts = max(one.top_k for one in shapes), max(1, shapes[0].num_experts)
    while True:
        times = _times(device, *(replace(one, rows=rows) for one in shapes))
        best = min(times, key=lambda size: times[size])
        if found and times[found[-1].block_size] <= _SAME * times[best]:
            best = found.pop().block_size
        found.append(Limit(rows, best))
        if rows >= _MOST_ROWS * num_experts:
            return tuple(found)
        rows += -(-rows // 4) if rows >= _FEW_ROWS * num_experts else rows


def _times(device: Device, *shapes: GroupedShape) -> dict[int, float]:
    """{block size: microseconds of these products of the same rows, and of the slots of their lists}."""
    slot, found = grouped_rates.of(device).slot, {}
    for size in _BLOCK_SIZES:
        slots = max(one.rows + min(one.rows, one.num_experts) * (size - 1) for one in shapes)
        products = [choose.fastest(replace(one, block_size=size), device) for one in shapes]
        found[size] = slot * slots + sum(one.us for one in products)
    return found
