"""Products with the LoRA adapter of each token: to the rank, and from it to the outputs of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import float32
from ..._core.tensors.tensor import TensorArg
from .lora_plan import check_operands, given, launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["lora_expand", "lora_shrink"]

_mma, _simt = Kernel("linear/lora_mma.cu"), Kernel("linear/lora_simt.cu")


def _adapters(indices: Tensor, num_tokens_per_lora: Tensor | None) -> Tensor:
    """The adapter of each token; -1 for tokens beyond those that are counted."""
    import torch

    if num_tokens_per_lora is None:
        return indices
    counted = num_tokens_per_lora.clamp(0, len(indices)).sum()
    return torch.where(torch.arange(len(indices), dtype=torch.int64, device=indices.device) < counted, indices, -1)


def multiplied(x: Tensor, weight: Tensor, adapters: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens have an adapter, and the product of each of these with its own."""
    import torch

    found = ((adapters >= 0) & (adapters < len(weight))).nonzero()[:, 0]
    rows = x[found].to(weight.dtype).float()
    product = rows.new_zeros(len(found), weight.shape[1])
    for adapter in adapters[found].unique().tolist():
        mine = adapters[found] == adapter
        product[mine] = torch.matmul(rows[mine], weight[adapter].float().T)
    return found, product


@op(out="out", atol=2.0**-18)
def lora_shrink(
    out: Tensor,
    x: Tensor,
    lora_a: Tensor,
    indices: Tensor,
    scale: float = 1.0,
    lora_a1: Tensor | None = None,
    lora_a2: Tensor | None = None,
    lora_a3: Tensor | None = None,
    order: Tensor | None = None,
    num_tokens_per_lora: Tensor | None = None,
) -> None:
    """The first product of LoRA: ``out[s, t] = scale * lora_a[indices[t]] @ x[t]``, summed in float32.

    A layer has a slice s for queries, keys and values, or for gates and ups. Each token has its adapter. A token
    without one has an index outside of the adapters, such as -1, and gets zeros. The contract is that of vLLM's
    `lora_shrink`.

    Args:
        out: [num_slices, num_tokens, rank], written; the dtype of `lora_a` or float32; the last stride is 1.
        x: [num_tokens, hidden_size], the dtype of `lora_a`, or float32, which is rounded to that of `lora_a`; the last
            stride is 1.
        lora_a: [num_loras, rank, hidden_size], float32, float16 or bfloat16; contiguous. The first slice.
        indices: [num_tokens] int32 or int64, contiguous; the adapter of each token.
        scale: multiplied in float32.
        lora_a1, lora_a2, lora_a3: further slices, like `lora_a`.
        order: [num_tokens], the dtype of `indices`; the first tokens, each once, sorted by adapter, as many as
            `num_tokens_per_lora` counts: tiles of tokens with few adapters are faster. The other tokens, padding, have
            no adapter, whatever their index. A token out of range is skipped; the rows of a missing one may stay.
        num_tokens_per_lora: the dtype of `indices`, contiguous; the numbers add up to the tokens in `order`.
    """
    adapters = _adapters(indices, num_tokens_per_lora)
    out.zero_()
    for rows, weight in zip(out, given((lora_a, lora_a1, lora_a2, lora_a3)), strict=True):
        found, product = multiplied(x, weight, adapters)
        rows[found] = (product * scale).to(out.dtype)


@lora_shrink.result
def result_lora_shrink(
    x: TensorArg,
    lora_a: TensorArg,
    lora_a1: TensorArg | None,
    lora_a2: TensorArg | None,
    lora_a3: TensorArg | None,
) -> Result:
    check.sizes(x, num_tokens=None, hidden_size=None)
    check.sizes(lora_a, num_loras=None, rank=None, hidden_size=x.shape[1])
    slices = given((lora_a, lora_a1, lora_a2, lora_a3))
    for arg in slices:
        check.same_shape(arg, lora_a)
    return Result((len(slices), x.shape[0], lora_a.shape[1]), float32)


@lora_shrink.plan
def plan_lora_shrink(
    out: TensorArg,
    x: TensorArg,
    lora_a: TensorArg,
    indices: TensorArg,
    lora_a1: TensorArg | None,
    lora_a2: TensorArg | None,
    lora_a3: TensorArg | None,
    order: TensorArg | None,
    num_tokens_per_lora: TensorArg | None,
) -> Launch:
    num_slices, num_tokens, rank = result_lora_shrink(x, lora_a, lora_a1, lora_a2, lora_a3).shape
    check.sizes(out, num_slices=num_slices, num_tokens=num_tokens, rank=rank)
    weights = lora_a, lora_a1, lora_a2, lora_a3
    return _plan(out, x, weights, indices, order, num_tokens_per_lora, is_shrink=True, adds=False)


def _plan(
    out: TensorArg,
    x: TensorArg,
    weights: Sequence[TensorArg | None],
    indices: TensorArg,
    order: TensorArg | None,
    num_tokens_per_lora: TensorArg | None,
    *,
    is_shrink: bool,
    adds: bool,
    **scale: Any,
) -> Launch:
    """Checks what the ops have in common, and launches a kernel."""
    check_operands(out, x, weights)
    num_tokens = x.shape[-2]
    check.index(indices, num_tokens=num_tokens)
    check.contiguous(indices)
    if (order is None) != (num_tokens_per_lora is None):
        raise check.refuse(indices, "order", "expected num_tokens_per_lora with an order, and none without")
    num_counts = 0
    if order is not None and num_tokens_per_lora is not None:
        check.shape(order, indices.dtype, num_tokens=num_tokens)
        check.sizes(num_tokens_per_lora, num_loras=None)
        check.dtype(num_tokens_per_lora, indices.dtype)
        check.contiguous(num_tokens_per_lora)
        num_counts = num_tokens_per_lora.numel
    return launch(
        _mma,
        _simt,
        out,
        x,
        weights,
        num_rows=num_tokens,
        is_shrink=is_shrink,
        is_ordered=order is not None,
        constants={"index_t": indices.dtype, "HAS_ORDER": order is not None, "ADDS": adds, "CLEARS": is_shrink},
        num_tokens=num_tokens,
        num_loras=given(weights)[0].shape[0],
        num_counts=num_counts,
        out_stride=out.strides[-2],
        x_stride=x.strides[-2],
        **scale,
    )


def _order(make: Any, num_tokens: int, num_loras: int, dtype: str, in_order: bool) -> tuple[Any, ...]:
    """The adapters of tokens, their order and their number."""
    indices = make.randint(-1, num_loras, num_tokens, dtype=dtype)
    if not in_order:
        return indices, None, None
    order = make.ordered(make.permutation(num_tokens, num_tokens, dtype=dtype))
    return make.ordered(indices), order, make.values([num_tokens], dtype)


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
    num_slices: Literal[1, 3] = 1,
    in_order: bool = False,
) -> tuple[Any, ...]:
    weights = [
        make.randn(num_loras, rank, hidden_size, dtype=dtype, scale=hidden_size**-0.5) if i < num_slices else None
        for i in range(4)
    ]
    indices, order, num_tokens_per_lora = _order(make, num_tokens, num_loras, index_dtype, in_order)
    return (
        make.empty(num_slices, num_tokens, rank, dtype="float32"),
        make.randn(num_tokens, hidden_size, dtype=dtype),
        weights[0],
        indices,
        2.0,
        *weights[1:],
        order,
        num_tokens_per_lora,
    )


@op(inout="out", atol=2.0**-18)
def lora_expand(
    out: Tensor,
    x: Tensor,
    lora_b: Tensor,
    indices: Tensor,
    add_inputs: bool = True,
    lora_b1: Tensor | None = None,
    lora_b2: Tensor | None = None,
    lora_b3: Tensor | None = None,
    order: Tensor | None = None,
    num_tokens_per_lora: Tensor | None = None,
) -> None:
    """The second product of LoRA: ``out[t] += lora_b[indices[t]] @ x[s, t]``, summed in float32 and rounded once.

    Each slice s of a layer has columns of `out` of its own. Each token has its adapter. The row of a token without one,
    with an index outside of the adapters such as -1, stays as it is. The contract is that of vLLM's `lora_expand`;
    `out` may be a view of columns of a larger tensor, where vLLM takes an offset.

    Args:
        out: [num_tokens, output_size], updated; the dtype of `lora_b` or float32; the last stride is 1. The columns of
            the slices follow each other.
        x: [num_slices, num_tokens, rank], the dtype of `lora_b`, or float32, which is rounded to that of `lora_b`; the
            last stride is 1.
        lora_b: [num_loras, columns of the slice, rank], float32, float16 or bfloat16; contiguous. The first slice.
        indices: [num_tokens] int32 or int64, contiguous; the adapter of each token.
        add_inputs: add to `out`; otherwise overwrite the rows of tokens with an adapter.
        lora_b1, lora_b2, lora_b3: further slices, with columns of their own.
        order, num_tokens_per_lora: see `lora_shrink`.
    """
    adapters = _adapters(indices, num_tokens_per_lora)
    weights = given((lora_b, lora_b1, lora_b2, lora_b3))
    columns = out.split([weight.shape[1] for weight in weights], 1)
    for part, rows, weight in zip(columns, x, weights, strict=True):
        found, product = multiplied(rows, weight, adapters)
        part[found] = (product + part[found].float() if add_inputs else product).to(out.dtype)


@lora_expand.plan
def plan_lora_expand(
    out: TensorArg,
    x: TensorArg,
    lora_b: TensorArg,
    indices: TensorArg,
    add_inputs: bool,
    lora_b1: TensorArg | None,
    lora_b2: TensorArg | None,
    lora_b3: TensorArg | None,
    order: TensorArg | None,
    num_tokens_per_lora: TensorArg | None,
) -> Launch:
    weights = lora_b, lora_b1, lora_b2, lora_b3
    slices = given(weights)
    check.sizes(x, num_slices=len(slices), num_tokens=None, rank=None)
    for arg in slices:
        check.sizes(arg, num_loras=lora_b.shape[0] if lora_b.shape else None, output_size=None, rank=x.shape[2])
    check.sizes(out, num_tokens=x.shape[1], output_size=sum(arg.shape[1] for arg in slices))
    return _plan(out, x, weights, indices, order, num_tokens_per_lora, is_shrink=False, adds=add_inputs, scale=1.0)


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
    num_slices: Literal[1, 3] = 1,
    in_order: bool = False,
) -> tuple[Any, ...]:
    columns = [output_size] + [max(1, output_size // 4)] * (num_slices - 1)
    weights = [make.randn(num_loras, size, rank, dtype=dtype, scale=rank**-0.5) for size in columns]
    indices, order, num_tokens_per_lora = _order(make, num_tokens, num_loras, "int64", in_order)
    return (
        make.randn(num_tokens, sum(columns), dtype=dtype),
        make.randn(num_slices, num_tokens, rank, dtype="float32"),
        weights[0],
        indices,
        add_inputs,
        *weights[1:],
        *[None] * (4 - num_slices),
        order,
        num_tokens_per_lora,
    )


def _bad(
    weight: Tensor, indices: Tensor, order: Tensor | None, num_tokens_per_lora: Tensor | None
) -> dict[str, Tensor]:
    """Indices that are neither an adapter nor -1, and tokens in the order that do not exist."""
    import torch

    found = {"indices": (indices < -1) | (indices >= len(weight))}
    if order is not None and num_tokens_per_lora is not None:
        is_ordered = torch.arange(len(order), dtype=torch.int64, device=order.device) < num_tokens_per_lora.sum()
        found["order"] = is_ordered & ((order < 0) | (order >= len(order)))
    return found


@lora_shrink.bad_indices
def bad_indices_lora_shrink(
    lora_a: Tensor, indices: Tensor, order: Tensor | None, num_tokens_per_lora: Tensor | None
) -> dict[str, Tensor]:
    return _bad(lora_a, indices, order, num_tokens_per_lora)


@lora_expand.bad_indices
def bad_indices_lora_expand(
    lora_b: Tensor, indices: Tensor, order: Tensor | None, num_tokens_per_lora: Tensor | None
) -> dict[str, Tensor]:
    return _bad(lora_b, indices, order, num_tokens_per_lora)
