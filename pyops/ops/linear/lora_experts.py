"""Products with the LoRA adapters of experts: for each pair of a token and an expert, to the rank and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import float32
from ..._core.tensors.tensor import TensorArg
from .lora import multiplied
from .lora_pairs import PairArgs, adapters_of_pairs, bad_pairs, example_pairs, pairs_traffic, plan_pairs
from .lora_plan import given

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["fused_moe_lora_expand", "fused_moe_lora_shrink"]


@op(partial="out", atol=2.0**-18)
def fused_moe_lora_shrink(
    out: Tensor,
    x: Tensor,
    lora_a: Tensor,
    expert_ids: Tensor,
    adapter_enabled: Tensor,
    token_lora_mapping: Tensor | None = None,
    sorted_token_ids: Tensor | None = None,
    num_tokens_post_padded: Tensor | None = None,
    lora_ids: Tensor | None = None,
    block_size: int = 0,
    lora_a1: Tensor | None = None,
    lora_a2: Tensor | None = None,
    lora_a3: Tensor | None = None,
) -> None:
    """The first product of LoRA for experts: ``out[s, t, k] = lora_a[l, e] @ x[t, k]``, summed in float32.

    Choice k of token t is the pair t * top_k + k; e is its expert, and l the adapter of its token. A layer has a slice
    s for gates and ups. The row of a pair without an adapter stays as it is. The contract is that of the first half of
    vLLM's `fused_moe_lora`.

    Pairs come in one of two forms. Without `sorted_token_ids`, each pair has its expert in `expert_ids`, and each token
    its adapter in `token_lora_mapping`. With it, each adapter has a list of its pairs in blocks of one expert, as
    `moe_lora_align_block_size` makes it. An adapter outside of 0 to max_loras - 1, one that is not enabled, and an
    expert outside of 0 to num_experts - 1, such as -1, are none.

    Args:
        out: [num_slices, num_tokens, top_k, rank], written in part; the dtype of `lora_a` or float32; the last stride
            is 1, and pairs follow each other.
        x: [num_tokens, top_k, hidden_size], or [num_tokens, 1, hidden_size] for one row that all choices of a token
            share; the dtype of `lora_a`, or float32, which is rounded to that of `lora_a`; strides as for `out`.
        lora_a: [max_loras, num_experts, rank, hidden_size], float32, float16 or bfloat16; contiguous. The first slice.
            One expert stands for any number that share the adapter.
        expert_ids: int32 or int64, contiguous; [num_tokens * top_k], or the expert of each block of the lists,
            [max_loras, num_blocks].
        adapter_enabled: [max_loras or more] int32, contiguous; 0 for an adapter without weights for experts.
        token_lora_mapping: [num_tokens or more] int32, contiguous; required without `sorted_token_ids`, else not read.
        sorted_token_ids: [max_loras, num_slots] int32, contiguous: pairs, each once; numbers that are no pair are
            padding.
        num_tokens_post_padded: [max_loras] int32, contiguous: the slots of each list that are in use.
        lora_ids: [any] int32, contiguous: the adapters in use. The list of an adapter that is not named is not read.
        block_size: slots of a block of the lists.
        lora_a1, lora_a2, lora_a3: further slices, like `lora_a`.
    """
    num_tokens, top_k = out.shape[1:3]
    lists = sorted_token_ids, num_tokens_post_padded, lora_ids
    pairs = PairArgs(expert_ids, adapter_enabled, token_lora_mapping, *lists, block_size)
    groups = adapters_of_pairs(num_tokens * top_k, top_k, lora_a, pairs)
    inputs = x.expand(-1, top_k, -1).flatten(0, 1)
    for rows, weight in zip(out, given((lora_a, lora_a1, lora_a2, lora_a3)), strict=True):
        found, product = multiplied(inputs, weight.flatten(0, 1), groups)
        rows[found // top_k, found % top_k] = product.to(out.dtype)


@fused_moe_lora_shrink.result
def result_fused_moe_lora_shrink(
    x: TensorArg,
    lora_a: TensorArg,
    expert_ids: TensorArg,
    lora_a1: TensorArg | None,
    lora_a2: TensorArg | None,
    lora_a3: TensorArg | None,
    *,
    top_k: int | None,
) -> Result:
    """The rank of each pair.

    Args:
        top_k: choices of a token. Without it, as many as `expert_ids` has for each, or those of `x` if there are lists.
    """
    shape = _check_shrink(x, (lora_a, lora_a1, lora_a2, lora_a3))
    if top_k is None:
        top_k = expert_ids.shape[0] // max(1, x.shape[0]) if len(expert_ids.shape) == 1 else x.shape[1]
    return Result((*shape[:2], top_k, shape[2]), float32)


def _check_shrink(x: TensorArg, weights: Sequence[TensorArg | None]) -> tuple[int, int, int]:
    """Slices, tokens and rank."""
    slices = given(weights)
    check.sizes(x, num_tokens=None, top_k=None, hidden_size=None)
    check.sizes(slices[0], max_loras=None, num_experts=None, rank=None, hidden_size=x.shape[2])
    for arg in slices[1:]:
        check.same_shape(arg, slices[0])
    return len(slices), x.shape[0], slices[0].shape[2]


@fused_moe_lora_shrink.plan
def plan_fused_moe_lora_shrink(
    out: TensorArg,
    x: TensorArg,
    lora_a: TensorArg,
    expert_ids: TensorArg,
    adapter_enabled: TensorArg,
    token_lora_mapping: TensorArg | None,
    sorted_token_ids: TensorArg | None,
    num_tokens_post_padded: TensorArg | None,
    lora_ids: TensorArg | None,
    block_size: int,
    lora_a1: TensorArg | None,
    lora_a2: TensorArg | None,
    lora_a3: TensorArg | None,
) -> Launch:
    weights = lora_a, lora_a1, lora_a2, lora_a3
    num_slices, num_tokens, rank = _check_shrink(x, weights)
    check.sizes(out, num_slices=num_slices, num_tokens=num_tokens, top_k=None, rank=rank)
    if x.shape[1] != 1:
        check.sizes(x, num_tokens=num_tokens, top_k=out.shape[2], hidden_size=x.shape[2])
    lists = sorted_token_ids, num_tokens_post_padded, lora_ids
    pairs = PairArgs(expert_ids, adapter_enabled, token_lora_mapping, *lists, block_size)
    return plan_pairs(out, x, weights, None, pairs, is_shrink=True, adds=False)


@op(inout="out", atol=2.0**-18)
def fused_moe_lora_expand(
    out: Tensor,
    x: Tensor,
    lora_b: Tensor,
    expert_ids: Tensor,
    adapter_enabled: Tensor,
    token_lora_mapping: Tensor | None = None,
    sorted_token_ids: Tensor | None = None,
    num_tokens_post_padded: Tensor | None = None,
    lora_ids: Tensor | None = None,
    block_size: int = 0,
    topk_weights: Tensor | None = None,
    add_inputs: bool = True,
    lora_b1: Tensor | None = None,
    lora_b2: Tensor | None = None,
    lora_b3: Tensor | None = None,
) -> None:
    """The second product of LoRA for experts: ``out[t, k] += topk_weights[t, k] * lora_b[l, e] @ x[s, t, k]``.

    Choice k of token t is the pair t * top_k + k; e is its expert, and l the adapter of its token. Each slice s of a
    layer has columns of `out` of its own. The row of a pair without an adapter stays as it is. Products are summed in
    float32, and a result is rounded once. The contract is that of the second half of vLLM's `fused_moe_lora`; `out` may
    be a view of columns of a larger tensor, where vLLM takes an offset.

    Args:
        out: [num_tokens, top_k, output_size], updated; the dtype of `lora_b` or float32; the last stride is 1, and
            pairs follow each other, as do the columns of the slices.
        x: [num_slices, num_tokens, top_k, rank], the dtype of `lora_b`, or float32, which is rounded to that of
            `lora_b`; strides as for `out`.
        lora_b: [max_loras, num_experts, columns of the slice, rank], float32, float16 or bfloat16; contiguous. The
            first slice. One expert stands for any number that share the adapter.
        expert_ids, adapter_enabled, token_lora_mapping: see `fused_moe_lora_shrink`.
        sorted_token_ids, num_tokens_post_padded, lora_ids, block_size: see there.
        topk_weights: [num_tokens, top_k], float32, float16 or bfloat16, contiguous: a factor of each pair.
        add_inputs: add to `out`; otherwise overwrite the rows of pairs with an adapter.
        lora_b1, lora_b2, lora_b3: further slices, with columns of their own.
    """
    num_tokens, top_k = out.shape[:2]
    lists = sorted_token_ids, num_tokens_post_padded, lora_ids
    pairs = PairArgs(expert_ids, adapter_enabled, token_lora_mapping, *lists, block_size)
    groups = adapters_of_pairs(num_tokens * top_k, top_k, lora_b, pairs)
    weights = given((lora_b, lora_b1, lora_b2, lora_b3))
    columns = out.split([weight.shape[2] for weight in weights], 2)
    for part, rows, weight in zip(columns, x, weights, strict=True):
        found, product = multiplied(rows.flatten(0, 1), weight.flatten(0, 1), groups)
        if topk_weights is not None:
            product *= topk_weights.flatten()[found].float()[:, None]
        at = found // top_k, found % top_k
        part[at] = (product + part[at].float() if add_inputs else product).to(out.dtype)


@fused_moe_lora_expand.plan
def plan_fused_moe_lora_expand(
    out: TensorArg,
    x: TensorArg,
    lora_b: TensorArg,
    expert_ids: TensorArg,
    adapter_enabled: TensorArg,
    token_lora_mapping: TensorArg | None,
    sorted_token_ids: TensorArg | None,
    num_tokens_post_padded: TensorArg | None,
    lora_ids: TensorArg | None,
    block_size: int,
    topk_weights: TensorArg | None,
    add_inputs: bool,
    lora_b1: TensorArg | None,
    lora_b2: TensorArg | None,
    lora_b3: TensorArg | None,
) -> Launch:
    weights = lora_b, lora_b1, lora_b2, lora_b3
    slices = given(weights)
    check.sizes(x, num_slices=len(slices), num_tokens=None, top_k=None, rank=None)
    num_tokens, top_k, rank = x.shape[1:]
    check.sizes(lora_b, max_loras=None, num_experts=None, output_size=None, rank=rank)
    for arg in slices[1:]:
        check.sizes(arg, max_loras=lora_b.shape[0], num_experts=lora_b.shape[1], output_size=None, rank=rank)
    check.sizes(out, num_tokens=num_tokens, top_k=top_k, output_size=sum(arg.shape[2] for arg in slices))
    if topk_weights is not None:
        check.floating(topk_weights)
        check.shape(topk_weights, num_tokens=num_tokens, top_k=top_k)
    lists = sorted_token_ids, num_tokens_post_padded, lora_ids
    pairs = PairArgs(expert_ids, adapter_enabled, token_lora_mapping, *lists, block_size)
    return plan_pairs(out, x, weights, topk_weights, pairs, is_shrink=False, adds=add_inputs)


@fused_moe_lora_shrink.traffic
def traffic_fused_moe_lora_shrink(
    out: TensorArg,
    x: TensorArg,
    lora_a: TensorArg,
    lora_a1: TensorArg | None,
    lora_a2: TensorArg | None,
    lora_a3: TensorArg | None,
) -> int:
    return pairs_traffic(out, x, (lora_a, lora_a1, lora_a2, lora_a3), 1)


@fused_moe_lora_expand.traffic
def traffic_fused_moe_lora_expand(
    out: TensorArg,
    x: TensorArg,
    lora_b: TensorArg,
    add_inputs: bool,
    lora_b1: TensorArg | None,
    lora_b2: TensorArg | None,
    lora_b3: TensorArg | None,
) -> int:
    return pairs_traffic(out, x, (lora_b, lora_b1, lora_b2, lora_b3), 1 + add_inputs)


@fused_moe_lora_shrink.example
def example_fused_moe_lora_shrink(
    make: Any,
    *,
    num_tokens: int = 24,
    top_k: Literal[4, 1] = 4,
    num_loras: Literal[3, 1] = 3,
    num_experts: Literal[8, 1] = 8,
    rank: Literal[16, 13] = 16,
    hidden_size: Literal[512, 77] = 512,
    dtype: str = "bfloat16",
    index_dtype: Literal["int32", "int64"] = "int32",
    num_slices: Literal[2, 1] = 2,
    is_sorted: bool = True,
    is_shared: bool = True,
) -> tuple[Any, ...]:
    shape = num_loras, num_experts, rank, hidden_size
    weights = [make.randn(*shape, dtype=dtype, scale=hidden_size**-0.5) if i < num_slices else None for i in range(4)]
    return (
        make.empty(num_slices, num_tokens, top_k, rank, dtype="float32"),
        make.randn(num_tokens, 1 if is_shared else top_k, hidden_size, dtype=dtype),
        weights[0],
        *example_pairs(make, num_tokens, top_k, num_loras, num_experts, index_dtype, is_sorted),
        *weights[1:],
    )


@fused_moe_lora_expand.example
def example_fused_moe_lora_expand(
    make: Any,
    *,
    num_tokens: int = 24,
    top_k: Literal[4, 1] = 4,
    num_loras: Literal[3, 1] = 3,
    num_experts: Literal[8, 1] = 8,
    rank: Literal[16, 13] = 16,
    output_size: Literal[256, 77] = 256,
    dtype: str = "bfloat16",
    num_slices: Literal[2, 1] = 2,
    is_sorted: bool = True,
    is_weighted: bool = True,
    add_inputs: bool = True,
) -> tuple[Any, ...]:
    shape = num_loras, num_experts, output_size, rank
    weights = [make.randn(*shape, dtype=dtype, scale=rank**-0.5) if i < num_slices else None for i in range(4)]
    return (
        make.randn(num_tokens, top_k, num_slices * output_size, dtype=dtype),
        make.randn(num_slices, num_tokens, top_k, rank, dtype="float32"),
        weights[0],
        *example_pairs(make, num_tokens, top_k, num_loras, num_experts, "int32", is_sorted),
        make.randn(num_tokens, top_k, dtype="float32") if is_weighted else None,
        add_inputs,
        *weights[1:],
    )


@fused_moe_lora_shrink.bad_indices
def bad_indices_fused_moe_lora_shrink(
    lora_a: Tensor,
    expert_ids: Tensor,
    adapter_enabled: Tensor,
    token_lora_mapping: Tensor | None,
    sorted_token_ids: Tensor | None,
    num_tokens_post_padded: Tensor | None,
    lora_ids: Tensor | None,
    block_size: int,
) -> dict[str, Tensor]:
    lists = sorted_token_ids, num_tokens_post_padded, lora_ids
    pairs = PairArgs(expert_ids, adapter_enabled, token_lora_mapping, *lists, block_size)
    return bad_pairs(lora_a, pairs)


@fused_moe_lora_expand.bad_indices
def bad_indices_fused_moe_lora_expand(
    lora_b: Tensor,
    expert_ids: Tensor,
    adapter_enabled: Tensor,
    token_lora_mapping: Tensor | None,
    sorted_token_ids: Tensor | None,
    num_tokens_post_padded: Tensor | None,
    lora_ids: Tensor | None,
    block_size: int,
) -> dict[str, Tensor]:
    lists = sorted_token_ids, num_tokens_post_padded, lora_ids
    pairs = PairArgs(expert_ids, adapter_enabled, token_lora_mapping, *lists, block_size)
    return bad_pairs(lora_b, pairs)
