"""The Walsh-Hadamard transform, which spreads outliers over a row before it is quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.tensor import TensorArg, contiguous
from ._common import with_dense_rows

if TYPE_CHECKING:
    from torch import Tensor

    from ..._core.system.device import Device
    from ..._core.tensors.dtypes import DType

__all__ = ["hadacore_transform", "hadacore_transform_out"]

_hadamard = Kernel("quantize/hadamard.cu")
_MAX_SIZE = 32768  # most elements of a row
# {largest row size: elements per thread}: a short row then takes one warp, a long one a block. docs/performance/next.md
# has times of the op; these numbers were not tuned.
_ELEMENTS = {256: 8, 512: 16, 4096: 32, _MAX_SIZE: 64}
_RESIDENT, _RESIDENT_BY_ELEMENTS = 1536, {32: 1024, 64: 512}  # resident threads per SM, fewer by elements per thread
_WARP_ROW_THREADS = 128  # threads of a block where a row takes at most one warp
_MIN_SHARED_ELEMENTS = 32  # fewest elements per thread that are exchanged through shared memory at a time


class HadamardProblem(NamedTuple):
    """The input of `choose`: rows, and elements of a row, a power of two."""

    num_rows: int
    size: int
    dtype: DType

    def bucket(self) -> str:
        return f"rows={tuning.power_of_two(self.num_rows)} elements={self.size} {self.dtype.name}"


@dataclass(frozen=True)
class HadamardConfig:
    """Geometry of hadamard.cu.

    Attributes:
        elements: elements of a thread.
        num_threads: threads of a block.
        rounds: parts in which a row is exchanged through shared memory: 2 if the whole row does not fit.
        min_blocks: resident blocks per SM.
    """

    elements: int
    num_threads: int
    rounds: int
    min_blocks: int

    def candidates(self, problem: HadamardProblem, device: Device) -> list[HadamardConfig]:
        """Other elements per thread and register bounds."""
        found = []
        for elements in tuning.beside(self.elements, 1, min(problem.size, max(_ELEMENTS.values()))):
            row_threads = problem.size // elements
            if row_threads <= 32 or elements // self.rounds >= _MIN_SHARED_ELEMENTS:
                found.append(tuning.resized(self, _block_threads(row_threads), elements=elements))
        return found + tuning.varied(self, min_blocks=tuning.occupancies(self.num_threads, self.min_blocks))


def _block_threads(row_threads: int) -> int:
    """Threads of a block if each row takes `row_threads`."""
    return max(_WARP_ROW_THREADS, row_threads) if row_threads <= 32 else row_threads


def choose(problem: HadamardProblem, device: Device) -> HadamardConfig:
    """The geometry; it does not depend on the number of rows."""
    size = problem.size
    elements = min(size, next(elements for max_size, elements in _ELEMENTS.items() if size <= max_size))
    num_threads = _block_threads(size // elements)
    rounds = 1 if 4 * size <= device.shared_memory else 2
    resident = _RESIDENT_BY_ELEMENTS.get(elements, _RESIDENT)
    return HadamardConfig(elements, num_threads, rounds, max(1, resident // num_threads))


def hadacore_transform(x: Tensor, inplace: bool = True) -> Tensor:
    """`hadacore_transform_out` into `x`, which is returned, or into a new tensor if not `inplace`.

    `x` may have any strides. Unless it is contiguous, or a vector or matrix of contiguous rows, it is copied first, and
    the result is copied back.

    Args:
        inplace: whether the result overwrites `x`.
    """
    rows = with_dense_rows(x) if x.ndim in (1, 2) else contiguous(x)
    if not inplace:
        return hadacore_transform_out.new(rows)
    hadacore_transform_out(rows, rows)
    if rows is not x:
        x[...] = rows
    return x


@op(out="out", in_place={"out": "x"})
def hadacore_transform_out(out: Tensor, x: Tensor) -> None:
    """Walsh-Hadamard transform of rows: ``out[..., i] = sum_j (-1)^popcount(i & j) * x[..., j] / sqrt(hidden_size)``.

    In natural (Sylvester's) order; orthonormal, so its own inverse. Computed in float32, rounded once (Fino and Algazi
    1976, "Unified matrix treatment of the fast Walsh-Hadamard transform"; Agarwal et al. 2024, arXiv:2412.08832).
    Elements are scaled by a power of two before they are added, so that sums which float32 holds exactly, such as
    zeros, are exact. In a row whose magnitudes add up to more than sqrt(hidden_size) times the largest float32, results
    may be infinite or NaN that are finite by the formula; float16 has no such rows.

    Args:
        out: [..., hidden_size], written; constant row stride. May be `x`.
        x: the same shape, float32, float16 or bfloat16, hidden_size a power of two up to 32768; constant row stride.
    """
    size = x.shape[-1]
    y, apart = x.double(), 1
    while apart < size:
        first, second = y.unflatten(-1, (-1, 2, apart)).unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        apart *= 2
    out.copy_((y / size**0.5).to(x.dtype))


@hadacore_transform_out.result
def result_hadacore_transform_out(x: TensorArg) -> Result:
    return Result(x.shape, x.dtype)


@hadacore_transform_out.plan
def plan_hadacore_transform_out(out: TensorArg, x: TensorArg) -> Launch:
    check.floating(x)
    size = check.row_size(x)
    check.like(out, x)
    check.row_size(out)
    if size & (size - 1) or not 1 <= size <= _MAX_SIZE:
        raise x.error(f"expected a last dimension that is a power of two up to {_MAX_SIZE}, got shape {x.shape}")
    num_rows = check.num_rows(x)
    config = tuning.config(x.op, HadamardProblem(num_rows, size, x.dtype), x.device, choose)
    row_threads = size // config.elements
    vec_size = min(config.elements, 16 // x.dtype.itemsize)
    return _hadamard(
        scalar_t=x.dtype,
        SIZE=size,
        VEC_SIZE=vec_size,
        ACCESS=check.vector_width(vec_size, out, x),
        NUM_THREADS=config.num_threads,
        ROW_THREADS=row_threads,
        ROUNDS=config.rounds,
        MIN_BLOCKS=config.min_blocks,
    ).launch(
        grid=-(-num_rows // (config.num_threads // row_threads)),
        block=config.num_threads,
        shared=4 * size // config.rounds if row_threads > 32 else 0,
        num_rows=num_rows,
        out_stride=check.row_stride(out),
        x_stride=check.row_stride(x),
    )


@hadacore_transform_out.example
def example_hadacore_transform_out(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 128, 1024, 8192, 1, 4, 2048] = 4096,
    dtype: str = "bfloat16",
) -> tuple[Any, ...]:
    return make.empty(num_tokens, hidden_size, dtype=dtype), make.randn(num_tokens, hidden_size, dtype=dtype)
