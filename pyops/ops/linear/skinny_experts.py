"""The two GEMMs of a layer of experts for few tokens, without tensor cores (GEMV)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32
from ..._core.tensors.tensor import TensorArg
from .grouped import activated
from .grouped_problem import ACTIVATIONS
from .skinny_linear import SkinnyConfig, config_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..._core.system.device import Device

__all__ = ["skinny_experts", "skinny_experts_sum"]

_gemv_experts = Kernel("linear/gemv_experts.cu")
_MAX_CHOICES = 65535  # most choices of all tokens: blockIdx.y counts them
_MAX_TOP_K = 1024  # most choices of a token, kept in shared memory
_EXAMPLE_EXPERTS = 5


@dataclass(frozen=True)
class ExpertRows:
    """A GEMM of gemv_experts.cu: rows of the input times the weights of their experts.

    Attributes:
        out: [num_tokens * (top_k + num_shared), N], or [num_tokens, N] for a sum.
        input: [num_tokens, K], or [num_tokens * (top_k + num_shared), K] for a sum.
        weight: [num_experts, rows, K].
        ids: [num_tokens, top_k].
        bias: [num_experts, rows] or None.
        activation: one of `ACTIVATIONS`.
        is_sum: whether the choices of a token are added.
        shared, num_shared: the weight of the shared MLP or None, and the choices of a token that are parts of it.
    """

    out: TensorArg
    input: TensorArg
    weight: TensorArg
    ids: TensorArg
    bias: TensorArg | None
    activation: str = "none"
    is_sum: bool = False
    shared: TensorArg | None = None
    num_shared: int = 0

    def bucket(self) -> str:
        num_experts, rows, hidden_size = self.weight.shape
        choices = self.ids.shape[0] * (self.ids.shape[1] + self.num_shared)
        return f"choices={tuning.power_of_two(choices)} weight={num_experts}x{rows}x{hidden_size}"


def check_rows(
    out: TensorArg,
    input: TensorArg,
    weight: TensorArg,
    ids: TensorArg,
    bias: TensorArg | None,
    activation: str = "none",
    is_sum: bool = False,
    shared: TensorArg | None = None,
) -> ExpertRows:
    """The problem of a call; OpError for tensors that do not fit together."""
    check.floating(input)
    if activation not in ACTIVATIONS:
        raise check.refuse(out, "activation", f"expected {' or '.join(ACTIVATIONS)}, got {activation}")
    check.index(ids, num_tokens=None, top_k=None)
    check.contiguous(ids)
    (num_tokens, top_k), num_shared = ids.shape, num_parts(weight, shared, is_sum)
    choices = num_tokens * (top_k + num_shared)
    if not 1 <= top_k <= _MAX_TOP_K:
        raise ids.error(f"expected 1 to {_MAX_TOP_K} choices of a token, got shape {ids.shape}")
    if choices > _MAX_CHOICES:
        raise ids.error(f"expected at most {_MAX_CHOICES} choices, got {choices} with shape {ids.shape}")
    check.sizes(input, rows=choices if is_sum else num_tokens, hidden_size=None)
    check.sizes(out, rows=num_tokens if is_sum else choices, output_size=None)
    columns, hidden_size = check.row_size(out), check.row_size(input)
    if not hidden_size:
        raise input.error(f"expected rows of at least one element, got shape {input.shape}")
    rows = columns * 2 if ACTIVATIONS[activation] else columns
    check.sizes(weight, num_experts=None, rows=rows, hidden_size=hidden_size)
    if not weight.shape[0]:
        raise weight.error(f"expected at least one expert, got shape {weight.shape}")
    for one in (out, weight, *([] if shared is None else [shared])):
        check.dtype(one, input.dtype)
        check.row_size(one)
    check.shape(bias, input.dtype, num_experts=weight.shape[0], rows=rows)
    return ExpertRows(out, input, weight, ids, bias, activation, is_sum, shared, num_shared)


def num_parts(weight: TensorArg, shared: TensorArg | None, is_sum: bool = False) -> int:
    """The parts of a shared MLP that are as large as an expert; OpError for a weight that does not have such parts."""
    if shared is None:
        return 0
    check.sizes(weight, num_experts=None, rows=None, hidden_size=None)
    check.sizes(shared, rows=None, hidden_size=None)
    (_, rows, columns), divided = weight.shape, int(is_sum)
    part, whole = (rows, columns)[divided], shared.shape[divided]
    if shared.shape[1 - divided] != (columns, rows)[divided] or not part or not whole or whole % part:
        sizes = f"{rows}, a multiple of {columns}" if is_sum else f"a multiple of {rows}, {columns}"
        raise shared.error(f"expected shape ({sizes}), got {shared.shape}")
    return whole // part


def choose(problem: ExpertRows, device: Device) -> SkinnyConfig:
    hidden_size = problem.input.shape[1]
    vec_size = check.vector_width(hidden_size, *filter(None, (problem.input, problem.weight, problem.shared)))
    return config_of(hidden_size, vec_size, several=False, warp_size=device.warp_size)


def launch(problem: ExpertRows, addend: TensorArg | None = None) -> Launch:
    """The launch for a problem."""
    device, (rows, columns), is_sum = problem.out.device, problem.out.shape, problem.is_sum
    config = tuning.config(problem.out.op, problem, device, choose)
    sharers = config.sharers(problem.ids.shape[1] + problem.num_shared, columns, device) if is_sum else 1
    return _gemv_experts(
        scalar_t=problem.input.dtype,
        input_t=problem.input.dtype,
        id_t=problem.ids.dtype,
        HIDDEN_SIZE=problem.input.shape[1],
        **config.constants,
        TOP_K=problem.ids.shape[1],
        SHARED=problem.num_shared,
        COMBINES=is_sum,
        SHARERS=sharers,
        HAS_BIAS=problem.bias is not None,
        HAS_ADDEND=addend is not None,
        ACTIVATION=f"expert_{problem.activation}",
        GATED=ACTIVATIONS[problem.activation],
    ).launch(
        grid=(config.num_blocks(columns * sharers, device, rows), rows),
        block=config.num_threads,
        num_experts=problem.weight.shape[0],
        output_size=columns,
        out_stride=check.row_stride(problem.out),
        input_stride=check.row_stride(problem.input),
        addend_stride=0 if addend is None else check.row_stride(addend),
        weight_stride=problem.weight.strides[1],
        expert_stride=problem.weight.strides[0],
        bias_stride=0 if problem.bias is None else problem.bias.shape[1],
        shared_stride=0 if problem.shared is None else check.row_stride(problem.shared),
        **({} if is_sum else {"topk_weights": 0, "addend": 0}),
    )


@op(out="out", atol=2.0**-18)
def skinny_experts(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    topk_ids: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    shared: Tensor | None = None,
) -> None:
    """The first GEMM of a layer of experts for few tokens.

    ``out[t * top_k + j] = f(input[t] @ weight[e].T + bias[e])`` with e ``topk_ids[t, j]``. It is meant for the decode
    step of one sequence: choices need not be sorted, and each reads the weight of its expert; with more tokens, which
    share experts, `grouped_gemm` is faster. Accumulation is in float32, rounded once. Rows of experts that do not exist
    are zeros.

    A shared MLP with S times the channels of an expert is S more choices of each token, of N channels each. The kernel
    reads its weight while the previous kernel runs: that kernel must not write it.

    Args:
        out: [num_tokens * (top_k + S), N], written; constant row stride.
        input: [num_tokens, K], float32, float16 or bfloat16; constant row stride.
        weight: [num_experts, N, K] of the same dtype, or [num_experts, 2 N, K] for an activation with gates and ups.
        topk_ids: [num_tokens, top_k] int32 or int64, contiguous; any number.
        bias: [num_experts, rows of weight[e]] of the same dtype, contiguous; or None.
        activation: one of those of `grouped_gemm`.
        shared: the first weight of the shared MLP, [S * rows of weight[e], K] of the same dtype, constant row stride,
            gates and ups in the order of those of experts; or None.
    """
    choices = len(out) // max(1, len(topk_ids))
    for t, experts in enumerate(topk_ids.tolist()):
        rows = out[t * choices :][:choices]
        for row, expert in zip(rows, experts, strict=False):
            exists = 0 <= expert < len(weight)
            row[:] = activated(_product(input[t], weight, bias, expert)[None], activation)[0] if exists else 0
        if shared is not None:
            whole = activated((shared.double() @ input[t].double())[None], activation)
            rows[len(experts) :] = whole.unflatten(1, (-1, out.shape[1]))[0]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    """``weight[expert] @ x + bias[expert]`` in float64."""
    product = weight[expert].double() @ x.double()
    return product if bias is None else product + bias[expert].double()


@skinny_experts.result
def result_skinny_experts(
    input: TensorArg, weight: TensorArg, topk_ids: TensorArg, activation: str, shared: TensorArg | None
) -> Result:
    check.sizes(weight, num_experts=None, rows=None, hidden_size=check.row_size(input))
    check.index(topk_ids, num_tokens=None, top_k=None)
    columns = weight.shape[1] // (2 if ACTIVATIONS.get(activation) else 1)
    return Result((topk_ids.shape[0] * (topk_ids.shape[1] + num_parts(weight, shared)), columns), input.dtype)


@skinny_experts.plan
def plan_skinny_experts(
    out: TensorArg,
    input: TensorArg,
    weight: TensorArg,
    topk_ids: TensorArg,
    bias: TensorArg | None,
    activation: str,
    shared: TensorArg | None,
) -> Launch:
    return launch(check_rows(out, input, weight, topk_ids, bias, activation, shared=shared))


@op(out="out", atol=2.0**-18, in_place={"out": "addend"})
def skinny_experts_sum(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    shared: Tensor | None = None,
) -> None:
    """The second GEMM of a layer of experts for few tokens, and the sum of the choices.

    ``out[t] = addend[t] + sum_j topk_weights[t, j] * (input[t * top_k + j] @ weight[e].T + bias[e])`` with e
    ``topk_ids[t, j]``, in float32 and rounded once. Choices of experts that do not exist add nothing, whatever their
    rows of `input` hold. The kernel reads `weight`, `topk_ids` and `topk_weights` while the previous kernel runs: that
    kernel must not write them. It is meant to be `skinny_experts`, which does not. The S parts of a shared MLP are
    added likewise, with weight 1 and without a bias.

    Args:
        out: [num_tokens, N], written; constant row stride. It may be `addend`.
        input: [num_tokens * (top_k + S), K], float32, float16 or bfloat16; constant row stride.
        weight: [num_experts, N, K] of the same dtype.
        topk_ids: [num_tokens, top_k] int32 or int64, contiguous; any number.
        topk_weights: [num_tokens, top_k] float32, contiguous.
        bias: [num_experts, N] of the same dtype, contiguous; or None.
        addend: [num_tokens, N] of the same dtype, constant row stride; or None.
        shared: the second weight of the shared MLP, [N, S * K] of the same dtype, constant row stride; or None.
    """
    choices = len(input) // max(1, len(topk_ids))
    for t, experts in enumerate(topk_ids.tolist()):
        rows = input[t * choices :][:choices]
        total = torch.zeros_like(out[t], dtype=torch.float64) if addend is None else addend[t].double()
        for j, expert in enumerate(experts):
            if 0 <= expert < len(weight):
                total = total + topk_weights[t, j].double() * _product(rows[j], weight, bias, expert)
        if shared is not None:
            total = total + shared.double() @ rows[len(experts) :].flatten().double()
        out[t] = total


@skinny_experts_sum.result
def result_skinny_experts_sum(input: TensorArg, weight: TensorArg, topk_ids: TensorArg) -> Result:
    check.sizes(weight, num_experts=None, rows=None, hidden_size=check.row_size(input))
    check.index(topk_ids, num_tokens=None, top_k=None)
    return Result((topk_ids.shape[0], weight.shape[1]), input.dtype)


@skinny_experts_sum.plan
def plan_skinny_experts_sum(
    out: TensorArg,
    input: TensorArg,
    weight: TensorArg,
    topk_ids: TensorArg,
    topk_weights: TensorArg,
    bias: TensorArg | None,
    addend: TensorArg | None,
    shared: TensorArg | None,
) -> Launch:
    problem = check_rows(out, input, weight, topk_ids, bias, is_sum=True, shared=shared)
    check.shape(topk_weights, float32, num_tokens=topk_ids.shape[0], top_k=topk_ids.shape[1])
    check.shape(addend, input.dtype, num_tokens=out.shape[0], output_size=out.shape[1])
    return launch(problem, addend)


@skinny_experts.bad_indices
@skinny_experts_sum.bad_indices
def bad_indices_skinny_experts(weight: Tensor, topk_ids: Tensor) -> dict[str, Tensor]:
    return {"topk_ids": (topk_ids < 0) | (topk_ids >= len(weight))}


@skinny_experts.example
def example_skinny_experts(
    make: Any,
    *,
    num_tokens: int = 1,
    top_k: Literal[2, 3] = 2,
    hidden_size: Literal[160, 51] = 160,
    output_size: int = 24,
    dtype: str = "bfloat16",
    id_dtype: Literal["int32", "int64"] = "int32",
    activation: Literal["none", "silu", "gelu", "swigluoai", "swiglustep", "silu_no_mul"] = "silu",
    with_bias: bool = False,
    num_shared: Literal[0, 2] = 0,
) -> tuple[Any, ...]:
    rows = output_size * (2 if ACTIVATIONS[activation] else 1)
    shared = make.randn(num_shared * rows, hidden_size, dtype=dtype, scale=hidden_size**-0.5) if num_shared else None
    return (
        make.empty(num_tokens * (top_k + num_shared), output_size, dtype=dtype),
        make.randn(num_tokens, hidden_size, dtype=dtype),
        make.randn(_EXAMPLE_EXPERTS, rows, hidden_size, dtype=dtype, scale=hidden_size**-0.5),
        make.randint(0, _EXAMPLE_EXPERTS, num_tokens, top_k, dtype=id_dtype),
        make.randn(_EXAMPLE_EXPERTS, rows, dtype=dtype) if with_bias else None,
        activation,
        shared,
    )


@skinny_experts_sum.example
def example_skinny_experts_sum(
    make: Any,
    *,
    num_tokens: int = 1,
    top_k: Literal[2, 3] = 2,
    hidden_size: Literal[160, 51] = 160,
    output_size: int = 24,
    dtype: str = "bfloat16",
    id_dtype: Literal["int32", "int64"] = "int32",
    with_bias: bool = False,
    with_addend: bool = True,
    num_shared: Literal[0, 2] = 0,
) -> tuple[Any, ...]:
    return (
        make.empty(num_tokens, output_size, dtype=dtype),
        make.randn(num_tokens * (top_k + num_shared), hidden_size, dtype=dtype),
        make.randn(_EXAMPLE_EXPERTS, output_size, hidden_size, dtype=dtype, scale=hidden_size**-0.5),
        make.randint(0, _EXAMPLE_EXPERTS, num_tokens, top_k, dtype=id_dtype),
        make.randn(num_tokens, top_k, dtype="float32"),
        make.randn(_EXAMPLE_EXPERTS, output_size, dtype=dtype) if with_bias else None,
        make.randn(num_tokens, output_size, dtype=dtype) if with_addend else None,
        make.randn(output_size, num_shared * hidden_size, dtype=dtype) if num_shared else None,
    )
