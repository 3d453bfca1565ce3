"""The block size of the lists that sort the rows of grouped GEMMs: that with which the products are fastest."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

from ... import tuning
from ..._core.op import torch_library
from ..._core.system import device as devices
from ..._core.system.device import Device
from ..._core.tensors import dtypes
from ..._core.tensors.dtypes import bfloat16, uint8
from .._shared.scalar_type import SCALAR_TYPES
from . import grouped_engines, grouped_rates, grouped_sm80_small_m, packed_grouped_engines, wq_grouped_engines
from .grouped_problem import ACTIVATIONS, rounded
from .grouped_shape import GroupedShape, Scales
from .packed_grouped_engines import PackedGroupedShape
from .wq_grouped_problem import WqGroupedShape

# {shape: (choice, block sizes)}: the row tiles of the kernels.
_CHOICES: dict[type[GroupedShape], tuple[Any, tuple[int, ...]]] = {
    GroupedShape: (grouped_engines.choose, (16, 32, 48, 64, 96, 128, 192)),
    PackedGroupedShape: (packed_grouped_engines.choose, (16, 32, 48, 64, 96, 128, 160, 192)),
    WqGroupedShape: (wq_grouped_engines.choose, (8, 16, 32, 48, 64, 96, 128, 160, 192)),
}
# Of K-major quantized weights: `b_type` of `grouped_gemm_packed`, elements of K under one scale or 0 for one scale per
# row, and whether groups have zero points.
Quants = tuple[str, int, bool]
_SAME = 1.02  # a block size that served fewer rows is kept while no other is faster by this factor
_MAX_LIMITS = 1024  # results of `limits` that a process remembers
_FEW_ROWS, _MOST_ROWS = 8, 1024  # rows of an expert below and above which the block size hardly changes


class Limit(NamedTuple):
    """The block size up to a number of rows, and above that of the `Limit` before."""

    rows: int
    block_size: int


def block_size_for(shape: GroupedShape, device: Device) -> int:
    """The block size with which `moe_align_block_size` should sort the rows of this product; its own is not read."""
    rows = tuning.pinned_rows(shape.rows, shape.num_experts)
    times = _times(device, replace(shape, rows=rounded(rows)))
    return min(times, key=lambda size: times[size])


def of_rows(num_rows: int, found: tuple[Limit, ...]) -> int:
    """The block size for `num_rows` rows. They are only compared, so that torch.compile need not know them."""
    for one in found[:-1]:
        if num_rows <= one.rows:
            return one.block_size
    return found[-1].block_size


def limits_of_experts(
    sizes: tuple[int, int, int, int],
    activation: str,
    names: tuple[str, str],
    scales: Scales,
    device_index: int,
    quants: Quants | None = None,
) -> tuple[Limit, ...]:
    """The block sizes for both products of a layer of experts.

    The arguments are constants of torch.compile, which takes the result for one.

    Args:
        sizes: (experts, experts of a token, hidden size, intermediate size).
        activation: of the first product's epilogue.
        names: names of the dtypes of the results, and of the operands.
        scales: of the operands.
        device_index: ordinal of the device; -1 for host memory.
        quants: of weights that are quantized while activations are not; or None.
    """
    num_experts, top_k, hidden, width = sizes
    of_host = torch_library.observed_device() or devices.host()
    device = devices.get(device_index) if device_index >= 0 and devices.count() else of_host
    out_dtype, dtype = (dtypes.of(name) or bfloat16 for name in names)
    gated = ACTIVATIONS[activation]
    shape = GroupedShape(0, num_experts, hidden, width, 1, dtype, out_dtype, scales)
    first = replace(shape, n=width * (2 if gated else 1), k=hidden, top_k=top_k, gated=gated)
    return limits(device, *((first, shape) if quants is None else (_quantized(one, quants) for one in (first, shape))))


limits_of_experts._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler does, without torch


def _quantized(shape: GroupedShape, quants: Quants) -> WqGroupedShape:
    """The shape with K-major quantized weights."""
    name, group_size, has_zeros = quants
    kind, dense = SCALAR_TYPES[name], shape if group_size else replace(shape, scales="row")
    return WqGroupedShape(
        **{one.name: getattr(dense, one.name) for one in fields(GroupedShape)},
        type=kind,
        group_size=group_size or shape.k,
        scale_dtype=uint8 if kind.exponent else shape.dtype if group_size else None,
        has_zeros=has_zeros,
    )


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
    choose, sizes = _CHOICES[type(shapes[0])]
    # Of the kernels of GroupedShape one alone has a tile of 8 rows that was made for few rows.
    if all(type(one) is GroupedShape and not grouped_sm80_small_m.refusal(one, device) for one in shapes):
        sizes = min(grouped_sm80_small_m.TILES_M), *sizes
    for size in sizes:
        slots = max(one.rows + min(one.rows, one.num_experts) * (size - 1) for one in shapes)
        products = [choose.fastest(replace(one, block_size=size), device) for one in shapes]
        found[size] = slot * slots + sum(one.us for one in products)
    return found
