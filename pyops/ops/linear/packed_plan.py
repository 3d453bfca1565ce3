"""Which kernel serves a product with a weight of packed codes: a Config for each kernel, the choice, the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..._core import check, tuning
from ..._core.device import Device
from ..._core.dtypes import bfloat16, float16
from ..._core.kernel import Kernel, Launch
from ..._core.tensor import TensorArg
from .packed_problem import PackedProblem, PackedWeight

_mma = Kernel("linear/gemm_packed_mma.cu")

_TILE_N = 64
_STAGES = 3
_MAX_WARPS = 16  # of a block
_WARPS = 14  # of a multiprocessor


@dataclass(frozen=True, slots=True)
class PackedMmaConfig:
    """The geometry of gemm_packed_mma.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m: rows of a tile, whose columns are 64.
        warps: of a block, each with a part of K.
        splits: blocks of a cluster, each with a part of K.
        min_blocks: blocks per multiprocessor that the compiler makes room for, by bounding registers.
    """

    tile_m: int
    warps: int
    splits: int
    min_blocks: int

    def launch(self, problem: PackedProblem) -> Launch:
        """A cluster of blocks for each tile."""
        constants = packed_constants(problem)
        step = 512 // problem.weight.bits
        size = constants["GROUP_SIZE"]
        groups = step // size if 0 < size < step else 1
        zeros = _TILE_N * problem.weight.bits // 8 if constants["ZERO_CODES"] else _TILE_N * 2 * constants["ADDED"]
        stage = self.tile_m * step * 2 + groups * (_TILE_N * 2 * constants["HAS_SCALES"] + zeros)
        sums = 4 * -(-self.tile_m // 8) * 32 * 16
        tiles = -(-problem.a.rows // self.tile_m) * (problem.weight.n // _TILE_N)
        return packed_kernel(_mma, problem)(
            **constants,
            TILE_M=self.tile_m,
            WARPS=self.warps,
            SPLITS=self.splits,
            STAGES=_STAGES,
            MIN_BLOCKS=self.min_blocks,
        ).launch(
            (tiles, self.splits),
            self.warps * 32,
            self.warps * max(_STAGES * stage, sums),
            **packed_arguments(problem),
        )


def packed_constants(problem: PackedProblem) -> dict[str, Any]:
    """What every kernel of packed codes is compiled for."""
    weight = problem.weight
    return {
        "scalar_t": problem.a.dtype,
        **problem.epilogue.constants(),
        "BITS": weight.bits,
        "EXPONENT": weight.type.exponent,
        "LAYOUT": f"layout_{weight.layout}",
        "HAS_SCALES": weight.scales is not None,
        "FOLDED": weight.scale_exponent != 0,
        "SCALE_ORDER": f"column_{weight.scale_order}",
        "ZERO_CODES": weight.zero_kind == "codes",
        "ZERO_POINT": weight.zero_offset + weight.type.bias,
        "ADDED": weight.zero_kind == "added",
        "GROUP_SIZE": weight.group_size if weight.groups > 1 else 0,
    }


def _tensors(problem: PackedProblem) -> dict[str, Any]:
    """Pointers of every kernel by parameter."""
    weight, e = problem.weight, problem.epilogue
    return {
        "out": e.out,
        "a": problem.a.source,
        "codes": weight.codes,
        "scales": weight.scales,
        "zeros": weight.zeros,
        "a_scales": e.a_scales,
        "b_scales": e.b_scales,
        "bias": e.bias,
    }


def packed_kernel(kernel: Kernel, problem: PackedProblem) -> Kernel:
    return kernel.renamed(**{name: one.name for name, one in _tensors(problem).items() if isinstance(one, TensorArg)})


def packed_arguments(problem: PackedProblem) -> dict[str, Any]:
    strides = problem.epilogue.arguments()
    absent = {name: 0 if one is None else one for name, one in _tensors(problem).items() if not isinstance(one, TensorArg)}
    return {
        "m": problem.a.rows,
        "n": problem.weight.n,
        "k": problem.weight.k,
        "groups": problem.weight.groups,
        "a_stride": problem.a.stride,
        **{name: strides[name] for name in ("out_stride", "a_scale_step", "b_scale_step")},
        **absent,
    }
