"""Products with the LoRA adapter of each token: to the rank, and from it to the outputs of a layer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.device import Device
from ..._core.tensors.dtypes import bfloat16, float32
from ..._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["lora_expand", "lora_shrink"]

_mma, _simt = Kernel("linear/lora_mma.cu"), Kernel("linear/lora_simt.cu")
_TILE = 16  # rows of an MMA operand
_NUM_WARPS = 8  # most warps of a CTA
_WARP_K = 128  # fewest elements of K for each warp that splits it
_MAX_SUMS = 8192  # most float32 of a CTA in shared memory
_BATCH_TILES = 8  # operand tiles of a warp that it loads at a time: 64 registers
_MIN_BLOCKS = 2  # CTAs of lora_mma.cu per SM, so that one loads while the other stores
_SIMT_THREADS = 256  # threads of a CTA of lora_simt.cu
_IN_FLIGHT = 8  # vectors of the weight that a thread of lora_simt.cu loads at a time
_STEP = 32  # elements of K of a step of lora_mma.cu


@dataclass(frozen=True)
class _Problem:
    """A product: `num_tokens` rows of `size` elements by a weight of `columns` rows for each adapter.

    Attributes:
        vec_size: elements of an access to the weight.
        input_size: bytes of an element of x.
        has_mma: whether MMAs take the weight.
    """

    num_tokens: int
    num_loras: int
    columns: int
    size: int
    vec_size: int
    input_size: int
    has_mma: bool
    device: Device


@dataclass(frozen=True)
class _Rows:
    """The geometry of lora_simt.cu: threads that share rows of the weight, and the rows that they share."""

    row_threads: int
    rows: int

    @property
    def block_columns(self) -> int:
        return _SIMT_THREADS // self.row_threads * self.rows

    def num_blocks(self, problem: _Problem) -> int:
        return problem.num_tokens * -(-problem.columns // self.block_columns)

    def load(self, problem: _Problem) -> int:
        """Rows of K elements that the busiest SM loads."""
        waves = -(-self.num_blocks(problem) // problem.device.num_sms)
        return waves * (min(problem.columns, self.block_columns) + 1)

    def constants(self, problem: _Problem) -> dict[str, int]:
        batch = min(_IN_FLIGHT // self.rows, -(-problem.size // (self.row_threads * problem.vec_size)))
        return {"ROW_THREADS": self.row_threads, "ROWS": self.rows, "BATCH": max(1, batch)}


@dataclass(frozen=True)
class _Tiles:
    """The geometry of lora_mma.cu; the attributes are constants of the kernel."""

    tiles_m: int
    tiles_n: int
    k_warps: int
    n_warps: int

    @property
    def tokens(self) -> int:
        return self.tiles_m * _TILE

    @property
    def tile_columns(self) -> int:
        return self.n_warps * self.tiles_n * _TILE

    def grid(self, problem: _Problem) -> tuple[int, int]:
        """Tiles of tokens and columns, and the CTAs that share the adapters of each while SMs would idle."""
        tiles = -(-problem.num_tokens // self.tokens) * -(-problem.columns // self.tile_columns)
        idle = -(-problem.device.num_sms // max(1, tiles))
        return tiles, max(1, min(self.tokens, problem.num_loras, idle))

    def load(self, problem: _Problem) -> int:
        """Rows of K elements that the busiest SM loads if tokens have as many different adapters as there are."""
        tiles, parts = self.grid(problem)
        adapters = -(-min(self.tokens, problem.num_tokens, problem.num_loras) // parts)
        columns = min(problem.columns, self.tile_columns)
        return -(-tiles * parts // problem.device.num_sms) * (adapters * columns + -(-self.tokens // parts))

    def constants(self, problem: _Problem) -> dict[str, int]:
        steps = -(-problem.size // (self.k_warps * _STEP))
        loaded = self.tiles_m * problem.input_size // 2 + self.tiles_n  # in tiles of 16-bit elements
        return {
            "TILES_M": self.tiles_m,
            "TILES_N": self.tiles_n,
            "K_WARPS": self.k_warps,
            "N_WARPS": self.n_warps,
            "BATCH": max(1, min(steps, _BATCH_TILES // loaded)),
        }


def _choose(problem: _Problem) -> _Rows | _Tiles:
    """The kernel and its geometry by which the busiest SM loads the fewest bytes. This bounds the time: by weights in a
    decode step, by inputs and weights from the L2 cache otherwise.

    The split of K depends on K alone, so that a sum has one order in each kernel for any number of tokens.
    """
    k_warps = 1
    while k_warps < _NUM_WARPS and 2 * k_warps * _WARP_K <= problem.size:
        k_warps *= 2
    best: _Rows | _Tiles = _choose_rows(problem)
    for tiles_m, tiles_n in itertools.product((1, 2), (1, 2, 4)) if problem.has_mma else ():
        needed = -(-problem.columns // (_TILE * tiles_n))
        tiles = _Tiles(tiles_m, tiles_n, k_warps, min(_NUM_WARPS // k_warps, tuning.power_of_two(max(1, needed))))
        fits = k_warps * tiles.tokens * tiles.tile_columns <= _MAX_SUMS
        if fits and tiles.load(problem) < best.load(problem):
            best = tiles
    return best


def _choose_rows(problem: _Problem) -> _Rows:
    """As many rows for a thread as it needs to have loads in flight, unless SMs would idle."""
    row_threads, rows = 1, _IN_FLIGHT
    while row_threads < problem.device.warp_size and row_threads * problem.vec_size < problem.size:
        row_threads *= 2
    while rows > 1 and rows * problem.size > _IN_FLIGHT * row_threads * problem.vec_size:
        rows //= 2
    while rows > 1 and _Rows(row_threads, rows).num_blocks(problem) < problem.device.num_sms:
        rows //= 2
    return _Rows(row_threads, rows)


def _plan(
    out: TensorArg, x: TensorArg, weight: TensorArg, indices: TensorArg, *, clears: bool, adds: bool, **arguments: Any
) -> Launch:
    """Checks what the ops have in common, and chooses the kernel."""
    check.floating(weight)
    check.row_size(weight)
    for arg in (x, out):
        check.dtype(arg, weight.dtype, float32)
        check.row_size(arg)
        check.narrow(arg)
    num_tokens, size = x.shape
    num_loras, columns = weight.shape[:2]
    check.index(indices, num_tokens=num_tokens)
    check.contiguous(indices)
    vec_size, input_vec = check.vector_width(size, weight), check.vector_width(size, x)
    products = "bfloat16_products" if weight.dtype is bfloat16 else "products"
    has_mma = weight.dtype is not float32 and x.device.supports(products)
    problem = _Problem(num_tokens, num_loras, columns, size, vec_size, x.dtype.itemsize, has_mma, x.device)
    chosen = _choose(replace(problem, num_tokens=tuning.pinned(num_tokens)))
    constants: dict[str, Any] = {"scalar_t": weight.dtype, "input_t": x.dtype, "out_t": out.dtype}
    constants |= {"index_t": indices.dtype, "ADDS": adds, "CLEARS": clears, "VEC_SIZE": vec_size}
    constants |= chosen.constants(problem)
    arguments |= {"num_loras": num_loras, "columns": columns, "size": size, "lora_stride": weight.strides[0]}
    arguments |= {"out_stride": out.strides[0], "x_stride": x.strides[0], "weight_stride": weight.strides[1]}
    if isinstance(chosen, _Rows):
        kernel = _simt.renamed(weight=weight.name)
        specialised = kernel(**constants, INPUT_VEC=min(vec_size, input_vec), NUM_THREADS=_SIMT_THREADS)
        return specialised.launch(grid=chosen.num_blocks(problem), block=_SIMT_THREADS, **arguments)
    num_threads = chosen.k_warps * chosen.n_warps * x.device.warp_size
    return _mma.renamed(weight=weight.name)(
        **constants,
        INPUT_VEC=input_vec,
        OUT_VEC=check.vector_width(columns, out),
        NUM_THREADS=num_threads,
        MIN_BLOCKS=_MIN_BLOCKS,
    ).launch(grid=chosen.grid(problem), block=num_threads, num_tokens=num_tokens, **arguments)


def _product(x: Tensor, weight: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens have an adapter, and the product of each of these with its own."""
    import torch

    found = ((indices >= 0) & (indices < len(weight))).nonzero()[:, 0]
    rows = x[found].to(weight.dtype).float()
    product = rows.new_zeros(len(found), weight.shape[1])
    for adapter in indices[found].unique().tolist():
        mine = indices[found] == adapter
        product[mine] = torch.matmul(rows[mine], weight[adapter].float().T)
    return found, product


@op(out="out", atol=2.0**-18)
def lora_shrink(out: Tensor, x: Tensor, lora_a: Tensor, indices: Tensor, scale: float = 1.0) -> None:
    """The first product of LoRA: ``out[t] = scale * lora_a[indices[t]] @ x[t]``, summed in float32.

    Each token has its adapter, in any order. A token without one has an index outside of the adapters, such as -1, and
    gets zeros. The contract is that of vLLM's `lora_shrink` for one slice.

    Args:
        out: [num_tokens, rank], written; the dtype of `lora_a` or float32; the last stride is 1.
        x: [num_tokens, hidden_size], the dtype of `lora_a`, or float32, which is rounded to that of `lora_a`; the last
            stride is 1.
        lora_a: [num_loras, rank, hidden_size], float32, float16 or bfloat16; the last stride is 1.
        indices: [num_tokens] int32 or int64, contiguous; the adapter of each token.
        scale: multiplied in float32.
    """
    found, product = _product(x, lora_a, indices)
    out.zero_()
    out[found] = (product * scale).to(out.dtype)


@lora_shrink.result
def result_lora_shrink(x: TensorArg, lora_a: TensorArg) -> Result:
    check.sizes(x, num_tokens=None, hidden_size=None)
    check.sizes(lora_a, num_loras=None, rank=None, hidden_size=x.shape[1])
    return Result((x.shape[0], lora_a.shape[1]), float32)


@lora_shrink.plan
def plan_lora_shrink(out: TensorArg, x: TensorArg, lora_a: TensorArg, indices: TensorArg) -> Launch:
    num_tokens, rank = result_lora_shrink(x, lora_a).shape
    check.sizes(out, num_tokens=num_tokens, rank=rank)
    return _plan(out, x, lora_a, indices, clears=True, adds=False)


@lora_shrink.example
def example_lora_shrink(
    make: Any,
    *,
    num_tokens: int = 144,
    num_loras: Literal[4, 1] = 4,
    rank: Literal[16, 13] = 16,
    hidden_size: Literal[512, 77] = 512,
    dtype: str = "bfloat16",
    index_dtype: Literal["int32", "int64"] = "int32",
) -> tuple[Any, ...]:
    return (
        make.empty(num_tokens, rank, dtype="float32"),
        make.randn(num_tokens, hidden_size, dtype=dtype),
        make.randn(num_loras, rank, hidden_size, dtype=dtype, scale=hidden_size**-0.5),
        make.randint(-1, num_loras, num_tokens, dtype=index_dtype),
        2.0,
    )


@op(inout="out", atol=2.0**-18)
def lora_expand(out: Tensor, x: Tensor, lora_b: Tensor, indices: Tensor, add_inputs: bool = True) -> None:
    """The second product of LoRA: ``out[t] += lora_b[indices[t]] @ x[t]``, summed in float32 and rounded once.

    Each token has its adapter, in any order. The row of a token without one, with an index outside of the adapters such
    as -1, stays as it is. The contract is that of vLLM's `lora_expand` for one slice; `out` may be a view of columns of
    a larger tensor, where vLLM takes an offset.

    Args:
        out: [num_tokens, output_size], updated; the dtype of `lora_b` or float32; the last stride is 1.
        x: [num_tokens, rank], the dtype of `lora_b`, or float32, which is rounded to that of `lora_b`; the last stride
            is 1.
        lora_b: [num_loras, output_size, rank], float32, float16 or bfloat16; the last stride is 1.
        indices: [num_tokens] int32 or int64, contiguous; the adapter of each token.
        add_inputs: add to `out`; otherwise overwrite the rows of tokens with an adapter.
    """
    found, product = _product(x, lora_b, indices)
    out[found] = (product + out[found].float() if add_inputs else product).to(out.dtype)


@lora_expand.plan
def plan_lora_expand(out: TensorArg, x: TensorArg, lora_b: TensorArg, indices: TensorArg, add_inputs: bool) -> Launch:
    check.sizes(x, num_tokens=None, rank=None)
    check.sizes(lora_b, num_loras=None, output_size=None, rank=x.shape[1])
    check.sizes(out, num_tokens=x.shape[0], output_size=lora_b.shape[1])
    return _plan(out, x, lora_b, indices, clears=False, adds=add_inputs, scale=1.0)


@lora_expand.example
def example_lora_expand(
    make: Any,
    *,
    num_tokens: int = 40,
    num_loras: Literal[4, 1] = 4,
    rank: Literal[16, 13] = 16,
    output_size: Literal[512, 77] = 512,
    dtype: str = "bfloat16",
    add_inputs: bool = True,
) -> tuple[Any, ...]:
    return (
        make.randn(num_tokens, output_size, dtype=dtype),
        make.randn(num_tokens, rank, dtype="float32"),
        make.randn(num_loras, output_size, rank, dtype=dtype, scale=rank**-0.5),
        make.randint(-1, num_loras, num_tokens, dtype="int64"),
        add_inputs,
    )


def _outside(weight: Tensor, indices: Tensor) -> Tensor:
    """Indices that are neither an adapter nor -1."""
    return (indices < -1) | (indices >= len(weight))


@lora_shrink.bad_indices
def bad_indices_lora_shrink(lora_a: Tensor, indices: Tensor) -> dict[str, Tensor]:
    return {"indices": _outside(lora_a, indices)}


@lora_expand.bad_indices
def bad_indices_lora_expand(lora_b: Tensor, indices: Tensor) -> dict[str, Tensor]:
    return {"indices": _outside(lora_b, indices)}
