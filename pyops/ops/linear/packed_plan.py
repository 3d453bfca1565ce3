"""Which kernel serves a product with a weight of packed codes: a Config for each kernel, the choice, the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..._core import check, tuning
from ..._core.device import Device
from ..._core.dtypes import bfloat16, float16
from ..._core.kernel import Kernel, Launch
from ..._core.tensor import TensorArg
from ..._core.tensor_map import TensorMap
from .packed_problem import PackedProblem, PackedWeight

_mma, _wgmma = Kernel("linear/gemm_packed_mma.cu"), Kernel("linear/gemm_packed.cu")

_TILE_N = 64
_STAGES = 3
_MAX_WARPS = 16  # of a block
_STEP_K = 64  # rows of the weight, of a step of gemm_packed.cu
_BARRIER_BYTES = 8
_MAX_STAGES = 8
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
        kernel = packed_kernel(_mma, problem)
        return kernel(
            **constants,
            WHOLE_STEPS=problem.weight.k % step == 0,
            TILE_M=self.tile_m,
            WARPS=self.warps,
            SPLITS=self.splits,
            STAGES=_STAGES,
            MIN_BLOCKS=self.min_blocks,
        ).launch(
            (tiles, self.splits),
            self.warps * 32,
            self.warps * max(_STAGES * stage, sums),
            **packed_arguments(problem, kernel),
        )


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """The geometry of gemm_packed.cu; the attributes are constants of the kernel.

    Attributes:
        tile_m, tile_n: rows and columns of a tile.
        chunk: products of 16 rows of the weight in flight.
        splits: blocks of a cluster that share a tile, each with a part of K.
        min_blocks: blocks per multiprocessor that the compiler makes room for, by bounding registers.
    """

    tile_m: int
    tile_n: int
    chunk: int
    splits: int
    min_blocks: int

    def launch(self, problem: PackedProblem) -> Launch:
        """A block, or a cluster of them, for each tile, or as many blocks as the device holds at a time."""
        weight, device, constants = problem.weight, problem.epilogue.out.device, packed_constants(problem)
        size = weight.group_size if weight.groups > 1 else 0
        groups = _STEP_K // size if 0 < size < _STEP_K else 1
        entries = {"scales": constants["HAS_SCALES"] * 16, "zeros": 16 if constants["ADDED"] else constants["ZERO_CODES"] * weight.bits}
        loads = self.tile_m * 128 + _STEP_K * self.tile_n * weight.bits // 8
        loads += groups * self.tile_n * sum(entries.values()) // 8
        stage = -(-loads // 1024) * 1024 + 2 * _BARRIER_BYTES
        sums = self.tile_m * self.tile_n * 4 if self.splits > 1 else 0
        stores = self.tile_n * 128 if self.tile_m > 64 else 0
        fixed = sums + stores + _BARRIER_BYTES
        shared = device.shared_memory if self.min_blocks == 1 else (device.shared_memory + 1024) // self.min_blocks - 1024
        stages = min(_MAX_STAGES, (shared - fixed) // stage)
        tiles = -(-problem.a.rows // self.tile_m) * -(-weight.n // self.tile_n)
        kernel = packed_kernel(_wgmma.for_arch(device.arch_feature), problem)
        return kernel(
            **constants,
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            CHUNK=self.chunk,
            STAGES=stages,
            SPLITS=self.splits,
            MIN_BLOCKS=self.min_blocks,
        ).launch(
            (tiles if self.splits > 1 else min(tiles, device.multiprocessors * self.min_blocks), self.splits),
            384 if self.tile_m * self.tile_n > 128 * 128 else 288,
            fixed + stages * stage,
            **_maps(problem, self.tile_m, self.tile_n, groups),
            **packed_arguments(problem, kernel),
        )


def _maps(problem: PackedProblem, tile_m: int, tile_n: int, groups: int) -> dict[str, TensorMap]:
    """The boxes of a step. Where there are no scales or zero points, the map of a stands for theirs."""
    weight, a, out = problem.weight, problem.a, problem.epilogue.out
    n, k, bits = weight.n, weight.k, weight.bits
    pitch = a.stride * 2 if a.rows > 1 else -(-k // 8) * 16
    of_a = TensorMap(a.source, a.dtype, (k, a.rows), (pitch,), (_STEP_K, tile_m), 128)

    def of_groups(tensor: TensorArg | None, entry: int) -> TensorMap:
        if tensor is None:
            return of_a
        width = 8 * tensor.dtype.itemsize
        size, box = n * entry // width, tile_n * entry // width
        return TensorMap(tensor, tensor.dtype, (size, weight.groups), (n * entry // 8,), (box, groups))

    sizes, box, swizzle = {
        "marlin": ((32 * bits, n // 64, -(-k // 16)), (32 * bits, tile_n // 64, 4), 0),
        "gptq": ((n, k * bits // 32, 1), (tile_n, 2 * bits, 1), 0),
        "exllama": ((n, k * bits // 32, 1), (tile_n, 2 * bits, 1), 0),
        "awq": ((n // 8, k, 1), (tile_n // 8, _STEP_K, 1), tile_n // 2),
    }[weight.layout]
    strides = (sizes[0] * 4, sizes[0] * sizes[1] * 4)
    out_pitch = check.row_stride(out) * 2 if a.rows > 1 else -(-n // 8) * 16
    store = 16 * tile_n // 128
    return {
        "a_map": of_a,
        "codes_map": TensorMap(weight.codes, weight.codes.dtype, sizes, strides, box, swizzle),
        "scales_map": of_groups(weight.scales, 16),
        "zeros_map": of_groups(weight.zeros, bits if weight.zero_kind == "codes" else 16),
        "out_map": TensorMap(out, out.dtype, (n, a.rows), (out_pitch,), (store, 16), store * 2),
    }


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
    """`kernel`, its parameters fed by the op's tensors."""
    return kernel.renamed(**{name: one.name for name, one in _tensors(problem).items() if isinstance(one, TensorArg)})


def packed_arguments(problem: PackedProblem, kernel: Kernel) -> dict[str, Any]:
    """Those arguments of the problem that the kernel takes, beside the op's tensors."""
    weight = problem.weight
    sizes = {"m": problem.a.rows, "n": weight.n, "k": weight.k, "groups": weight.groups, "a_stride": problem.a.stride}
    absent = {name: 0 if one is None else one for name, one in _tensors(problem).items() if not isinstance(one, TensorArg)}
    taken = {name for _, name in kernel.signature.parameters}
    return {name: one for name, one in {**sizes, **problem.epilogue.arguments(), **absent}.items() if name in taken}
