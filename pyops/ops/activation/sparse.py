"""A gated activation that keeps only the largest gates of a row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import DType
from ..._core.tensors.tensor import TensorArg
from .._shared import geometry
from ._common import check_halves, example_gated, result_gated

if TYPE_CHECKING:
    from torch import Tensor

    from ..._core.system.device import Device

__all__ = ["gelu_and_mul_sparse"]

_gelu_and_mul_sparse = Kernel("activation/gelu_and_mul_sparse.cu")

_WARP_SIZE = 32  # threads that share a short row
_THREAD_BYTES = 64  # bytes of gates that a thread holds: 16 registers
# Resident threads per SM; they bound the registers of a thread to 64, 96 and 112. A thread that holds gates and ups
# would spill with 64 registers for vectors of two 16-bit elements, and with 80 for erf of 16-bit elements (NVRTC 13.0;
# docs/performance/rows.md).
_RESIDENT, _RESIDENT_ERF, _RESIDENT_PAIRS = 1024, 640, 576
_MAX_BOTH_REGISTERS = 16  # most registers of gates with which a thread holds the ups, too: `up_t` of the kernel
_MAX_BOTH_THREADS = 256  # most threads of a block with which a thread holds gates and ups
_MIN_SPILLING_REGISTERS = 9  # fewest registers of gates with which gates and ups do not fit into 64 registers
_CANDIDATE_VECS = 1, 2, 4, 8  # vectors of gates per thread that tuning tries


class SparseProblem(NamedTuple):
    """The input of `choose`: rows of the output, elements of a row, elements of a vector."""

    num_rows: int
    hidden_size: int
    vec_size: int
    dtype: DType
    approximate: str

    def bucket(self) -> str:
        return (
            f"rows={tuning.power_of_two(self.num_rows)} elements={self.hidden_size} {self.dtype.name} "
            f"vec_size={self.vec_size} {self.approximate}"
        )


@dataclass(frozen=True)
class SparseConfig:
    """The geometry of gelu_and_mul_sparse.cu; the attributes are constants of the kernel.

    Attributes:
        vec_size: elements of a vector.
        num_threads: threads of a block.
        row_threads: threads that share a row: a warp, or the block.
        min_blocks: resident blocks per SM for which the compiler bounds registers.
    """

    vec_size: int
    num_threads: int
    row_threads: int
    min_blocks: int

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's compile-time constants by name."""
        return {
            "VEC_SIZE": self.vec_size,
            "NUM_THREADS": self.num_threads,
            "ROW_THREADS": self.row_threads,
            "MIN_BLOCKS": self.min_blocks,
        }

    def num_blocks(self, num_rows: int) -> int:
        """Blocks for `num_rows` rows."""
        return -(-num_rows // (self.num_threads // self.row_threads))

    def candidates(self, problem: SparseProblem, device: Device) -> list[SparseConfig]:
        """Other threads per row where a block reduces one row, and other register bounds."""
        found = []
        if self.row_threads == self.num_threads:
            row_vecs = problem.hidden_size // self.vec_size
            for vecs in _CANDIDATE_VECS:
                threads = check.threads(-(-row_vecs // vecs))
                found.append(tuning.resized(self, threads, row_threads=threads))
        return found + tuning.varied(self, min_blocks=tuning.occupancies(self.num_threads, self.min_blocks))


def choose(problem: SparseProblem, device: Device) -> SparseConfig:
    """The geometry; it does not depend on the number of rows."""
    return _choose(problem.hidden_size, problem.vec_size, problem.dtype, problem.approximate)


@cache  # a plan miss must not pay for it
def _choose(hidden_size: int, vec_size: int, dtype: DType, approximate: str) -> SparseConfig:
    """The geometry for rows of `hidden_size` elements of `dtype`, in vectors of `vec_size`."""
    row_vecs = hidden_size // vec_size
    vec_registers = max(1, vec_size * dtype.itemsize // 4)
    if row_vecs <= geometry.WARP_ROW_VECS:
        num_threads, row_threads = geometry.WARP_ROW_BLOCK, _WARP_SIZE
    else:
        num_threads = row_threads = check.threads(-(-row_vecs // (_THREAD_BYTES // (4 * vec_registers))))
    registers = -(-row_vecs // row_threads) * vec_registers
    resident = _RESIDENT
    if _MIN_SPILLING_REGISTERS <= registers <= _MAX_BOTH_REGISTERS and num_threads <= _MAX_BOTH_THREADS:
        if dtype.itemsize == 2 and vec_size == 2:
            resident = _RESIDENT_PAIRS
        elif dtype.itemsize == 2 and approximate == "none":
            resident = _RESIDENT_ERF
    return SparseConfig(vec_size, num_threads, row_threads, resident // num_threads)


@op(out="out", keyed="activation_sparsity")
def gelu_and_mul_sparse(out: Tensor, input: Tensor, activation_sparsity: float, approximate: str = "none") -> None:
    """GEGLU of the gates above a quantile of their row; about the fraction `activation_sparsity` of `out` is zero.

    ``out = T(T(gelu(max(T(g - c), 0))) * u)`` for the halves ``input = [g, u]`` and the cutoff ``c = T(T(mean(g)) +
    T(T(std(g)) * q))``, where q is the standard normal quantile of `activation_sparsity`. Mean and deviation (of the
    population) are taken over the row in float64 and rounded to float32, then to the element type T. Every later result
    is rounded to T. The statistical top-k of Gemma 3n (You et al. 2025, arXiv:2506.06644).

    Args:
        out: [..., hidden_size], written; constant row stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; constant row stride.
        activation_sparsity: the fraction of a normally distributed row to cut, above 0 and below 1.
        approximate: "none" for the error function, "tanh" for the hyperbolic tangent.
    """
    gelu_and_mul_above(out, input, NormalDist().inv_cdf(activation_sparsity), approximate)


def gelu_and_mul_above(out: Tensor, input: Tensor, multiplier: float, approximate: str) -> None:
    """The reference of `gelu_and_mul_sparse`, with a cutoff `multiplier` standard deviations above the mean."""
    gate, up = input.chunk(2, dim=-1)
    wide = gate.double()
    mean = wide.mean(-1, keepdim=True).float().to(input.dtype)
    deviation = wide.std(-1, correction=0, keepdim=True).float().to(input.dtype)
    cutoff = mean + deviation * multiplier
    out.copy_(torch.nn.functional.gelu(torch.relu(gate - cutoff), approximate=approximate) * up)


gelu_and_mul_sparse.result(result_gated)


@gelu_and_mul_sparse.plan
def plan_gelu_and_mul_sparse(out: TensorArg, input: TensorArg, activation_sparsity: float, approximate: str) -> Launch:
    check_halves(out, input)
    check.dtype(out, input.dtype)
    if not 0.0 < activation_sparsity < 1.0:
        raise check.refuse(
            out, "activation_sparsity", f"expected a number above 0 and below 1, got {activation_sparsity}"
        )
    if approximate not in ("none", "tanh"):
        raise check.refuse(out, "approximate", f'expected "none" or "tanh", got "{approximate}"')
    hidden_size, num_rows = out.shape[-1], check.num_rows(out)
    vec_size = check.vector_width(hidden_size, out, input)
    problem = SparseProblem(num_rows, hidden_size, vec_size, input.dtype, approximate)
    config = tuning.config(out.op, problem, out.device, choose)
    return _gelu_and_mul_sparse(
        scalar_t=input.dtype,
        ACT="gelu" if approximate == "none" else "gelu_tanh",
        HIDDEN_SIZE=hidden_size,
        **config.constants,
    ).launch(
        grid=config.num_blocks(num_rows) if hidden_size else 0,
        block=config.num_threads,
        num_rows=num_rows,
        out_stride=check.row_stride(out),
        input_stride=check.row_stride(input),
        multiplier=NormalDist().inv_cdf(activation_sparsity),
    )


@gelu_and_mul_sparse.example
def example_gelu_and_mul_sparse(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 14336,
    dtype: str = "bfloat16",
    approximate: Literal["none", "tanh"] = "none",
) -> tuple[Any, ...]:
    return (*example_gated(make, num_tokens=num_tokens, hidden_size=hidden_size, dtype=dtype), 0.95, approximate)
