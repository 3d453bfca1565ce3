"""A linear layer for small M, without tensor cores (GEMV)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.tensors.tensor import TensorArg
from .._shared.norms import rms
from .gemm_problem import GemmProblem, activated
from .gemm_shape import GemmShape
from .linear_problem import check_linear, linear_result
from .pointers import fed
from .prefetch import prefetch_arguments

if TYPE_CHECKING:
    from torch import Tensor

    from ..._core.system.device import Device

__all__ = ["skinny_linear"]

_gemv = Kernel("linear/gemv.cu")
# Measured on an H200: docs/performance/products.md, "`skinny_linear`".
MAX_ROWS = 16  # most rows of a for which a GEMM may choose it
_MAX_TOKENS = 4  # rows of the input of a block; a lane has an accumulator for each of them
_MAX_BATCH = 4  # vectors that a lane multiplies while it waits for the next ones
# Fewest warps of a block. A decode step of one sequence with 4, 8, 16 and 32 warps, us on an H200: Llama 1.1B 717, 680,
# 701 and 808; Qwen3-30B-A3B 2662, 2554, 2613 and 2939. Each block normalises its token; few blocks start late.
_MIN_WARPS = 8
_SPLITS = 1, 2, 4, 8  # warps that share a row of the weight
MAX_NORMALISED_BYTES = 32 << 10  # bytes of a normalised row in shared memory
_RESIDENT = 1024, 512  # threads per SM that registers allow: for one row of the input, for several


@dataclass(frozen=True)
class SkinnyConfig:
    """The geometry of gemv.cu; the attributes are constants of the kernel.

    Attributes:
        vec_size: elements of a vector.
        tokens: rows of the input that a block multiplies with.
        split: warps that share a row of the weight.
        batch: vectors that a lane loads at a time.
        num_threads: threads of a block.
        min_blocks: blocks per SM; bounds the registers.
    """

    vec_size: int
    tokens: int
    split: int
    batch: int
    num_threads: int
    min_blocks: int

    @property
    def constants(self) -> dict[str, int]:
        """The constants of gemv_rows.cuh, and those of the launch."""
        return {
            "VEC_SIZE": self.vec_size,
            "TOKENS": self.tokens,
            "SPLIT": self.split,
            "BATCH": self.batch,
            "NUM_THREADS": self.num_threads,
            "MIN_BLOCKS": self.min_blocks,
        }

    def num_blocks(self, output_size: int, device: Device, num_weights: int = 1) -> int:
        """Blocks for each of `num_weights` weights, with equal numbers of rows: the most that fit on the device."""
        groups = -(-output_size // (self.num_threads // device.warp_size // self.split))
        waves = -(-groups * num_weights // (device.num_sms * self.min_blocks))
        return -(-groups // max(1, waves))

    def sharers(self, choices: int, output_size: int, device: Device) -> int:
        """Warps among which the `choices` of a token are divided: as many as make the blocks of one token fill the
        device, for any number of tokens, on which no result may depend. A warp has few bytes in flight, so fewer warps
        than fit would leave DRAM idle."""
        block_rows, found = self.num_threads // device.warp_size // self.split, 1
        while choices % (2 * found) == 0 and block_rows % (2 * found) == 0:
            if -(-output_size * 2 * found // block_rows) > device.num_sms * self.min_blocks:
                break
            found *= 2
        return found

    def candidates(self, problem: Any, device: Device) -> list[SkinnyConfig]:
        """Other warps per row, vectors in flight, registers, and rows of the input per block if there are several."""
        found = [tuning.resized(self, device.warp_size * max(_MIN_WARPS, split), split=split) for split in _SPLITS]
        return found + tuning.varied(
            self,
            batch=tuning.beside(self.batch, 1, 2 * _MAX_BATCH),
            min_blocks=tuning.occupancies(self.num_threads, self.min_blocks),
            tokens=tuning.beside(self.tokens, 1, 2 * _MAX_TOKENS) if self.tokens > 1 else (),
        )

    def launch(self, problem: GemmProblem, has_epsilon: bool = False, prefetched: TensorArg | None = None) -> Launch:
        """The launch for a problem with the epilogue of a linear layer: at most a bias and an activation.

        Args:
            has_epsilon: whether the op has an argument `epsilon`, which feeds the kernel's.
            prefetched: the argument of `skinny_linear`.
        """
        epilogue = problem.epilogue
        given = (epilogue.out, problem.a.source, problem.b.source, epilogue.bias, problem.norm_weight)
        pairs = dict(zip(("out", "input", "weight", "bias", "norm_weight"), given, strict=True))
        kernel, arguments = fed(_gemv, **pairs)
        if not has_epsilon:
            arguments["epsilon"] = 0.0
        constants = epilogue.constants()
        return kernel(
            scalar_t=problem.b.dtype,
            input_t=problem.a.dtype,
            HIDDEN_SIZE=problem.k,
            **self.constants,
            HAS_BIAS=epilogue.bias is not None,
            ACTIVATION=constants["ACTIVATION"],
            GATED=epilogue.is_gated,
            NORMALISED=problem.norm_weight is not None,
            CONSTANT_WEIGHT=problem.constant_weight,
        ).launch(
            grid=(self.num_blocks(problem.n, problem.device), -(-problem.m // self.tokens)),
            block=self.num_threads,
            num_tokens=problem.m,
            output_size=problem.n,
            out_stride=epilogue.arguments()["out_stride"],
            input_stride=problem.a.stride,
            weight_stride=problem.b.stride,
            **prefetch_arguments(prefetched, problem.b.dtype),
            **arguments,
        )


def check_normalised(input: TensorArg) -> None:
    """OpError unless a block can have a normalised row of `input`, [num_tokens, K], in shared memory."""
    if not 0 < input.shape[1] * input.dtype.itemsize <= MAX_NORMALISED_BYTES:
        raise input.error(f"expected rows of 1 to {MAX_NORMALISED_BYTES} bytes, got shape {input.shape}")


def choose(problem: GemmProblem, device: Device) -> SkinnyConfig:
    shape = GemmShape.of(problem)
    return config_for(shape if problem.norm_weight is None else shape.of_rows(1), device)


def config_for(shape: GemmShape, device: Device) -> SkinnyConfig:
    """The geometry for one token or for several."""
    return config_of(shape.k, shape.vec_size, tuning.pinned(shape.m) != 1, device.warp_size)


@cache  # a plan miss must not pay for it
def config_of(hidden_size: int, vec_size: int, several: bool, warp_size: int) -> SkinnyConfig:
    """The geometry for dot products of `hidden_size` elements, of several tokens or one."""
    lane_vecs = max(1, -(-hidden_size // (vec_size * warp_size)))  # if one warp had the whole row
    split = next(warps for warps in _SPLITS if lane_vecs <= warps * _MAX_BATCH or warps == _SPLITS[-1])
    num_threads = warp_size * max(_MIN_WARPS, split)
    return SkinnyConfig(
        vec_size=vec_size,
        tokens=_MAX_TOKENS if several else 1,
        split=split,
        batch=min(_MAX_BATCH, -(-lane_vecs // split)),
        num_threads=num_threads,
        min_blocks=max(1, _RESIDENT[several] // num_threads),
    )


@op(out="out", atol=2.0**-18)
def skinny_linear(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    constant_weight: bool = False,
    activation: str = "none",
    norm_weight: Tensor | None = None,
    epsilon: float = 1e-6,
    prefetched: Tensor | None = None,
) -> None:
    """A linear layer for small M: ``out = f(norm(input) @ weight.T + bias)``, accumulated in float32 and rounded once.

    It is meant for the decode step of one or two sequences: from four rows on, a GEMM on tensor cores (`linear`) is
    faster. The weight is read once for every four rows of `input`. Each lane of a warp accumulates a part of a dot
    product; then the partial sums are added. If the magnitudes of the products add up to more than the largest float32,
    the result may be right, infinite or NaN: a partial sum may be infinite where the whole is not.

    Args:
        out: [..., output_size], written; constant row stride.
        input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        weight: [output_size, hidden_size] of the same dtype; constant row stride.
        bias: of the same dtype, contiguous, an element for each row of weight; or None.
        constant_weight: a promise that no kernel which may still run when this one starts writes `weight` or
            `norm_weight`, as is so for the weights of a model. The kernel then loads them while the previous kernel
            runs. If that kernel does write them, the result may be that of the old values.
        activation: "none", "gelu" or "silu_and_mul", as of `linear`; with the last, weight has 2 * output_size rows.
        norm_weight: [hidden_size] of the same dtype, contiguous: input is normalised and rounded as by `rms_norm`; or
            None for no norm. Rows have at most 32 KB then.
        epsilon: of the norm.
        prefetched: rows that a later kernel reads, [rows, columns] of the same dtype, such as a part of each row of the
            next weight, constant row stride; or None. The kernel prefetches them into L2 while the previous kernel,
            which may leave memory idle, still runs. It does not read them.
    """
    x = input if norm_weight is None else rms(input.float(), norm_weight.reshape(-1), epsilon, input.dtype)
    product = x.float() @ weight.float().T
    if bias is not None:
        product = product + bias.reshape(-1).float()
    out.copy_(activated(product, activation))


skinny_linear.result(linear_result)


@skinny_linear.plan
def plan_skinny_linear(
    out: TensorArg,
    input: TensorArg,
    weight: TensorArg,
    bias: TensorArg | None,
    constant_weight: bool,
    activation: str,
    norm_weight: TensorArg | None,
    epsilon: float,
    prefetched: TensorArg | None,
) -> Launch:
    problem = check_linear(out, input, weight, bias, activation, constant_weight, norm_weight)
    if not problem.k:
        raise input.error(f"expected rows of at least one element, got shape {input.shape}")
    if norm_weight is not None and problem.k * input.dtype.itemsize > MAX_NORMALISED_BYTES:
        raise input.error(f"expected rows of at most {MAX_NORMALISED_BYTES} bytes with norm_weight, got {input.shape}")
    return tuning.config(problem.op, problem, problem.device, choose).launch(problem, True, prefetched)


@skinny_linear.example
def example_skinny_linear(
    make: Any,
    *,
    num_tokens: int = 1,
    input_size: Literal[2048, 96, 769] = 2048,
    output_size: Literal[16, 37] = 16,
    dtype: str = "bfloat16",
    with_bias: bool = False,
    constant_weight: bool = False,
    activation: Literal["none", "gelu", "silu_and_mul"] = "none",
    with_norm: bool = False,
    with_prefetch: bool = False,
) -> tuple[Any, ...]:
    rows = output_size * (2 if activation == "silu_and_mul" else 1)
    return (
        make.empty(num_tokens, output_size, dtype=dtype),
        make.randn(num_tokens, input_size, dtype=dtype),
        make.randn(rows, input_size, dtype=dtype, scale=input_size**-0.5),
        make.randn(rows, dtype=dtype) if with_bias else None,
        constant_weight,
        activation,
        make.randn(input_size, dtype=dtype) if with_norm else None,
        1e-6,
        make.randn(5, 100, dtype=dtype) if with_prefetch else None,
    )
