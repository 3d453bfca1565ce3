"""Products of LoRA: the choice among kernels, and the launch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import bfloat16, float32
from ..._core.tensors.tensor import TensorArg

_TILE = 16  # rows of an MMA operand
_NUM_WARPS = 8  # most warps of a CTA
_WARP_K = 128  # fewest elements of K for each warp that splits it
_MAX_SUMS = 8192  # most float32 of a CTA in shared memory
_BATCH_TILES = 8  # operand tiles of a warp that it loads at a time: 64 registers
_MIN_BLOCKS = 2  # CTAs of lora_mma.cu per SM, so that one loads while the other stores; 1 for elements one by one
_SIMT_THREADS = 256  # threads of a CTA of lora_simt.cu
_IN_FLIGHT = 8  # vectors of the weight that a thread of lora_simt.cu loads at a time
_MAX_LORAS = 2**30  # adapters: kernels have their numbers in 32 bits
_STEP = 32  # elements of K of a step of lora_mma.cu


@dataclass(frozen=True)
class _Problem:
    """A product: `num_tokens` rows of `size` elements by a weight of `columns` rows for each adapter and slice.

    Attributes:
        columns: of each slice.
        shares_x: whether all slices multiply the same x.
        is_ordered: whether tokens come in order of their adapters.
        lists: (their number, slots of each) if tokens come in padded lists, in blocks of one adapter each.
        vec_size: elements of an access to the weight.
        input_size: bytes of an element of x.
        has_mma: whether MMAs take the weight.
    """

    num_tokens: int
    num_loras: int
    columns: tuple[int, ...]
    size: int
    shares_x: bool
    is_ordered: bool
    lists: tuple[int, int] | None
    vec_size: int
    input_size: int
    has_mma: bool
    device: Device

    def num_columns(self, step: int) -> int:
        """Columns of all slices, if each begins at a multiple of `step`."""
        return sum(-(-columns // step) * step for columns in self.columns)

    def num_tiles(self, tokens: int) -> int:
        """Tiles of so many tokens that have any; of padded lists, the most."""
        tiles = -(-self.num_tokens // tokens)
        return tiles if self.lists is None else min(self.num_tokens, tiles + self.num_loras - 1)

    def grid_tiles(self, tokens: int) -> int:
        """Tiles of so many tokens, or slots of padded lists, for which CTAs are launched."""
        if self.lists is None or not self.num_tokens:
            return self.num_tiles(tokens)
        return self.lists[0] * -(-self.lists[1] // tokens)


@dataclass(frozen=True)
class _Rows:
    """The geometry of lora_simt.cu: threads that share rows of the weight, and the rows that they share."""

    row_threads: int
    rows: int

    @property
    def block_columns(self) -> int:
        return _SIMT_THREADS // self.row_threads * self.rows

    def column_tiles(self, problem: _Problem) -> int:
        return problem.num_columns(self.block_columns) // self.block_columns

    def num_blocks(self, problem: _Problem) -> int:
        """CTAs with a token."""
        return problem.num_tiles(1) * self.column_tiles(problem)

    def load(self, problem: _Problem) -> int:
        """Rows of K elements that the busiest SM loads."""
        waves = -(-self.num_blocks(problem) // problem.device.num_sms)
        return waves * (min(max(problem.columns), self.block_columns) + 1)

    def constants(self, problem: _Problem) -> dict[str, int]:
        batch = min(_IN_FLIGHT // self.rows, -(-problem.size // (self.row_threads * problem.vec_size)))
        constants = {"ROW_THREADS": self.row_threads, "ROWS": self.rows, "BATCH": max(1, batch)}
        return constants | {"SLICE_STEP": self.block_columns}


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

    def slice_step(self, problem: _Problem) -> int:
        """A tile may have several slices if they share x; an MMA has one."""
        return _TILE if problem.shares_x else self.tile_columns

    def num_adapters(self, problem: _Problem) -> int:
        """Adapters of a tile of tokens, if these have as many different ones as there are."""
        others = problem.num_loras - 1
        if problem.lists is not None:  # blocks have one, and are seldom smaller than a tile
            others = 0
        elif problem.is_ordered:  # one where tiles begin, and each of the others begins in one tile
            others //= max(1, -(-problem.num_tokens // self.tokens))
        return max(1, min(self.tokens, problem.num_tokens, others + 1))

    def column_tiles(self, problem: _Problem) -> int:
        return -(-problem.num_columns(self.slice_step(problem)) // self.tile_columns)

    def column_blocks(self, problem: _Problem) -> int:
        """CTAs that share the column tiles of a tile of tokens: the fewest with the least time of the busiest SM, if a
        CTA takes as long to find its tokens as for a column tile. CTAs that split K have one."""
        rows, tiles = problem.num_tiles(self.tokens) * self.parts(problem), self.column_tiles(problem)
        if self.k_warps > 1:
            return tiles
        resident = _MIN_BLOCKS * problem.device.num_sms
        return min(range(1, tiles + 1), key=lambda blocks: -(-rows * blocks // resident) * (1 - (-tiles // blocks)))

    def parts(self, problem: _Problem) -> int:
        """CTAs that share the adapters of a tile of tokens and columns while SMs would idle."""
        tiles = problem.num_tiles(self.tokens) * self.column_tiles(problem)
        return min(self.num_adapters(problem), -(-problem.device.num_sms // max(1, tiles)))

    def load(self, problem: _Problem) -> int:
        """Rows of K elements that the busiest SM loads."""
        tiles, parts = problem.num_tiles(self.tokens) * self.column_tiles(problem), self.parts(problem)
        adapters = -(-self.num_adapters(problem) // parts)
        columns = min(problem.num_columns(1), self.tile_columns)
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
            "SLICE_STEP": self.slice_step(problem),
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
    # By lora_simt.cu, every slot of a list would be a CTA.
    best_load = math.inf if problem.has_mma and problem.lists is not None else best.load(problem)
    for tiles_m, tiles_n in itertools.product((1, 2), (1, 2, 3, 4)) if problem.has_mma else ():
        columns = problem.num_columns(_TILE) if problem.shares_x else max(problem.columns)
        needed = -(-columns // (_TILE * tiles_n))
        tiles = _Tiles(tiles_m, tiles_n, k_warps, min(_NUM_WARPS // k_warps, tuning.power_of_two(max(1, needed))))
        fits = k_warps * tiles.tokens * tiles.tile_columns <= _MAX_SUMS
        if fits and (load := tiles.load(problem)) < best_load:
            best, best_load = tiles, load
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


def check_operands(out: TensorArg, x: TensorArg, weights: Sequence[TensorArg | None]) -> None:
    """Checks what all products have in common, but for sizes."""
    weight, *others = given(weights)
    check.floating(weight)
    for arg in (weight, *others):
        check.dtype(arg, weight.dtype)
        check.contiguous(arg)
    if math.prod(weight.shape[:-2]) > _MAX_LORAS:
        raise weight.error(f"expected at most 2^30 adapters, got shape {weight.shape}")
    for arg in (x, out):
        check.dtype(arg, weight.dtype, float32)
        check.row_size(arg)
        check.narrow(arg)


def launch(
    mma: Kernel,
    simt: Kernel,
    out: TensorArg,
    x: TensorArg,
    weights: Sequence[TensorArg | None],
    *,
    num_rows: int,
    is_shrink: bool,
    is_ordered: bool,
    constants: dict[str, Any],
    lists: tuple[int, int] | None = None,
    **arguments: Any,
) -> Launch:
    """A launch of that kernel which the choice takes, with these constants and arguments and with its own.

    The weights are [..., columns of the slice, size]; `num_rows` are the tokens of the `_Problem`, which has
    `is_ordered` and `lists`, too.
    """
    slices, size = given(weights), x.shape[-1]
    weight, columns = slices[0], tuple(arg.shape[-2] for arg in slices)
    vec_size, input_vec = check.vector_width(size, *slices), check.vector_width(size, x)
    products = "bfloat16_products" if weight.dtype is bfloat16 else "products"
    has_mma = weight.dtype is not float32 and x.device.supports(products)
    problem = _Problem(
        num_rows,
        math.prod(weight.shape[:-2]),
        columns,
        size,
        shares_x=is_shrink,
        is_ordered=is_ordered,
        lists=lists,
        vec_size=vec_size,
        input_size=x.dtype.itemsize,
        has_mma=has_mma,
        device=x.device,
    )
    chosen = _choose(replace(problem, num_tokens=tuning.pinned(num_rows)))
    constants |= {"scalar_t": weight.dtype, "input_t": x.dtype, "out_t": out.dtype, "VEC_SIZE": vec_size}
    constants |= {"NUM_SLICES": len(slices), **chosen.constants(problem)}
    arguments |= {f"columns{i or ''}": columns[i] if i < len(columns) else 0 for i in range(len(weights))}
    # A slice of out begins at its number times out_slice_stride, plus the columns of the slices before it.
    arguments |= {"size": size, "out_slice_stride": out.strides[0] - columns[0] if is_shrink else 0}
    arguments |= {"x_slice_stride": 0 if is_shrink else x.strides[0]}
    names = {f"weight{i or ''}": f"lora_{'a' if is_shrink else 'b'}{i or ''}" for i in range(len(weights))}
    if isinstance(chosen, _Rows):
        specialised = simt.renamed(**names)(**constants, INPUT_VEC=min(vec_size, input_vec), NUM_THREADS=_SIMT_THREADS)
        blocks = problem.grid_tiles(1) * chosen.column_tiles(problem)
        return specialised.launch(grid=blocks, block=_SIMT_THREADS, **arguments)
    num_threads = chosen.k_warps * chosen.n_warps * x.device.warp_size
    column_blocks = chosen.column_blocks(problem)
    tiles = problem.grid_tiles(chosen.tokens) * column_blocks
    if lists is not None and chosen.k_warps == 1:  # tiles in use follow each other, and CTAs take one after another
        tiles = min(tiles, _MIN_BLOCKS * x.device.num_sms)
    return mma.renamed(**names)(
        **constants,
        INPUT_VEC=input_vec,
        OUT_VEC=check.vector_width(math.gcd(*columns), out),
        NUM_THREADS=num_threads,
        MIN_BLOCKS=_MIN_BLOCKS if vec_size > 1 else 1,
    ).launch(grid=(tiles, chosen.parts(problem)), block=num_threads, column_blocks=column_blocks, **arguments)


def given(weights: Sequence[Any]) -> list[Any]:
    """The weights of slices that are given, which are the first ones; OpError where one is left out."""
    found = [weight for weight in weights if weight is not None]
    for weight, expected in zip(weights, found, strict=False):
        if weight is None:
            raise expected.error("expected no slice after one that is None")
    return found
