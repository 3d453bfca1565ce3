"""A GEMM with any packed weight: the weight is dequantized to a workspace and then multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import DType, float32
from ..._core.tensors.tensor import TensorArg
from . import gemm_plan
from .gather_columns import VEC_SIZE, access, gathered
from .gemm_problem import GemmProblem, Operand
from .packed_problem import PackedProblem, PackedWeight
from .pointers import fed

_dequantize_packed = Kernel("linear/dequantize_packed.cu")
_dequantize_table = Kernel("linear/dequantize_table.cu")
_NUM_THREADS = 256  # threads of a block of these kernels
_COLUMNS = 4  # columns of a thread of dequantize_packed.cu
_TILE = 64, 32 * _COLUMNS  # rows and columns of a block of dequantize_packed.cu
_TABLE_TILE = 2 * _NUM_THREADS, 32  # rows and columns of a block of dequantize_table.cu
_MAX_GROUP_ROWS = 16  # rows of its threads
_ZEROS = {"none": 0, "codes": 1, "floats": 2, "added": 3}


@dataclass(frozen=True, slots=True)
class DequantizeConfig:
    """The weight is dequantized to a workspace.

    Attributes:
        gemm: the Config of the GEMM that follows.
    """

    gemm: Any

    def candidates(self, problem: PackedProblem, device: Device) -> list[DequantizeConfig]:
        """Other GEMMs."""
        return [DequantizeConfig(one) for one in self.gemm.candidates(product(problem), device)]

    def launches(self, problem: PackedProblem) -> list[Launch]:
        """The launch that dequantizes the weight, and the GEMM."""
        gemm = product(problem)
        assert isinstance(gemm.b.source, Scratch)
        launches = gemm_plan.launches(gemm, self.gemm)
        return [written(gemm.b.source, gemm.dtype, problem.weight), *launches] if launches else []


def product(problem: PackedProblem) -> GemmProblem:
    """The GEMM of a dequantized weight, in a workspace."""
    w = problem.weight
    a = problem.a if problem.experts is not None else operand(problem)
    dense = Scratch(w.n * w.k * a.dtype.itemsize)
    return GemmProblem(a, Operand.of_scratch(dense, a.dtype, w.n, w.k), w.k, problem.epilogue)


def activations(problem: PackedProblem, *, in_fours: bool = False) -> tuple[list[Launch], Operand]:
    """The activations as operands of the GEMM, and the launches that write them.

    `in_fours`: 8-bit activations are written in the order in which wq_gemm_sm90.cu multiplies layout marlin_8.
    """
    a = operand(problem)
    if a is problem.a:
        return [], a
    return [gathered(a, problem.a, problem.weight.k, problem.weight.perm, in_fours=in_fours)], a


def operand(problem: PackedProblem) -> Operand:
    """The activations; in a workspace if they are permuted or upcast."""
    w, dtype, a = problem.weight, problem.compute_dtype, problem.a
    if w.perm is None and a.dtype is dtype:
        return a
    return Operand.of_scratch(Scratch(a.rows * w.k * dtype.itemsize), dtype, a.rows, w.k)


def written(
    dense: Scratch, dtype: DType, w: PackedWeight, count: int = 1, weight_scales: TensorArg | None = None
) -> Launch:
    """The launch that dequantizes the weight to `dense`, [N, K]; or `count` contiguous weights with a scale each."""
    quants = w.codes
    if w.scale_kind == "products":
        return _written_by_tables(dense, w, quants, count)
    tensors = {"quants": quants, "scales": w.scales, "zeros": w.zeros, "g_idx": w.g_idx, "places": w.places}
    kernel, absent = fed(_dequantize_packed, **tensors, weight_scales=weight_scales)
    floats = w.scales if w.zero_kind == "codes" or w.zeros is None else w.zeros
    rows, columns = (-(-size // tile) for size, tile in zip((w.k, w.n), _TILE, strict=True))
    return kernel(
        scalar_t=dtype,
        LAYOUT=f"layout_{w.layout}",
        BITS=w.bits,
        EXPONENT=w.type.exponent,
        BIAS=w.type.bias,
        SIGNED=w.type.is_integer and w.type.signed,
        RECODED=w.recoding == "marlin_fp8",
        scale_t=float32 if floats is None else floats.dtype,
        SCALE=f"scale_{w.scale_kind}",
        HAS_SCALES=w.scales is not None,
        WEIGHT_SCALES=weight_scales is not None,
        weight_scale_t=float32 if weight_scales is None else weight_scales.dtype,
        SCALE_EXPONENT=w.scale_exponent,
        SCALE_ORDER=f"column_{w.scale_order}",
        ZEROS=_ZEROS[w.zero_kind],
        ZERO_LAYOUT=f"layout_{w.zero_layout}",
        ZERO_OFFSET=w.zero_offset,
        HAS_G_IDX=w.g_idx is not None,
        SHARED_GROUP=w.g_idx is None and (w.groups == 1 or w.group_size % VEC_SIZE == 0),
        PLACES=w.places is not None,
        VEC_SIZE=VEC_SIZE,
        COLUMNS=_COLUMNS,
        ACCESS=access(w.k),
        NUM_THREADS=_NUM_THREADS,
    ).launch(
        (rows * columns, count),
        _NUM_THREADS,
        dense=dense,
        k=w.k,
        n=w.n,
        groups=w.groups,
        group_size=max(1, w.group_size),
        **absent,
    )


def _written_by_tables(dense: Scratch, w: PackedWeight, quants: TensorArg, count: int) -> Launch:
    """The same of W4A8."""
    assert w.scales is not None
    kernel, _ = fed(_dequantize_table, quants=quants, tables=w.scales)
    alignment = quants.alignment // quants.dtype.itemsize | w.n // 8  # in words; a lane has two of half a tile
    rows, columns = (-(-size // tile) for size, tile in zip((w.k, w.n), _TABLE_TILE, strict=True))
    return kernel(
        LAYOUT=f"layout_{w.layout}",
        ACCESS=min(4, alignment & -alignment),
        TABLE_ACCESS=min(8, w.scales.alignment),
        GROUP_ROWS=min(_MAX_GROUP_ROWS, w.group_size & -w.group_size),
        NUM_THREADS=_NUM_THREADS,
    ).launch((rows * columns, count), _NUM_THREADS, dense=dense, k=w.k, n=w.n, groups=w.groups, group_size=w.group_size)
