"""A gated activation that keeps only the largest gates of a row."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

from ..._core import check
from ..._core.kernel import Kernel, Launch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg
from .._shared import geometry
from ._common import check_halves, example_gated

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gelu_and_mul_sparse"]

_gelu_and_mul_sparse = Kernel("activation/gelu_and_mul_sparse.cu")

_WARP_SIZE = 32
_THREAD_BYTES = 64  # of the gates of a row that a thread holds, in 16 registers; the other half takes as many


@dataclass(frozen=True)
class SparseConfig:
    """The geometry of gelu_and_mul_sparse.cu; the attributes are constants of the kernel.

    Attributes:
        vec_size: elements of a vector.
        num_threads: threads of a block.
        row_threads: threads that share a row: a warp, or the block.
    """

    vec_size: int
    num_threads: int
    row_threads: int

    @property
    def constants(self) -> dict[str, int]:
        """The constants of the kernel, by its names for them."""
        return {"VEC_SIZE": self.vec_size, "NUM_THREADS": self.num_threads, "ROW_THREADS": self.row_threads}

    def num_blocks(self, num_rows: int) -> int:
        """Blocks for so many rows."""
        return -(-num_rows // (self.num_threads // self.row_threads))


def choose(hidden_size: int, vec_size: int, itemsize: int) -> SparseConfig:
    """The geometry for rows of `hidden_size` elements of `itemsize` bytes, in vectors of `vec_size`."""
    row_vecs = hidden_size // vec_size
    if row_vecs <= geometry.WARP_ROW_VECS:
        return SparseConfig(vec_size, geometry.WARP_ROW_BLOCK, _WARP_SIZE)
    vec_bytes = max(4, vec_size * itemsize)  # in registers
    row_threads = check.threads(-(-row_vecs // (_THREAD_BYTES // vec_bytes)))
    return SparseConfig(vec_size, row_threads, row_threads)


@op(out="out", keyed="activation_sparsity")
def gelu_and_mul_sparse(out: Tensor, input: Tensor, activation_sparsity: float, approximate: str = "none") -> None:
    """GEGLU of the gates above a quantile of their row, which leaves about `activation_sparsity` of `out` zero.

    ``out = T(T(gelu(max(T(g - c), 0))) * u)`` for the halves ``input = [g, u]`` and the cutoff ``c = T(T(mean(g)) +
    T(T(std(g)) * q))``, q being the standard normal quantile of `activation_sparsity` and the deviation that of the
    population. Mean and deviation are taken over the row in float64 and rounded to float32, then to the element type T,
    as is every result after them. The statistical top-k of Gemma 3n (You et al. 2025, arXiv:2506.06644).

    Args:
        out: [..., hidden_size], written; rows of one stride.
        input: [..., 2 * hidden_size], float32, float16 or bfloat16; rows of one stride.
        activation_sparsity: the fraction of a normally distributed row to cut, above 0 and below 1.
        approximate: "none" for the error function, "tanh" for the hyperbolic tangent.
    """
    gelu_and_mul_above(out, input, NormalDist().inv_cdf(activation_sparsity), approximate)


def gelu_and_mul_above(out: Tensor, input: Tensor, multiplier: float, approximate: str) -> None:
    """The reference of `gelu_and_mul_sparse`, whose cutoff is so many deviations above the mean."""
    gate, up = input.chunk(2, dim=-1)
    wide = gate.double()
    mean = wide.mean(-1, keepdim=True).float().to(input.dtype)
    deviation = wide.std(-1, correction=0, keepdim=True).float().to(input.dtype)
    cutoff = mean + deviation * multiplier
    out.copy_(torch.nn.functional.gelu(torch.relu(gate - cutoff), approximate=approximate) * up)


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
    config = choose(hidden_size, check.vector_width(hidden_size, out, input), input.dtype.itemsize)
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
