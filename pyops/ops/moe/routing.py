"""Top-k routing: the best experts of each token among all experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import boolean, float32, int32, int64, uint32
from ..._core.tensors.tensor import TensorArg
from .._shared.expert_choices import choose, write
from .._shared.expert_scores import as_logits, sigmoid, softmax, softplus_sqrt
from ._routing_geometry import choose_geometry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["topk_sigmoid", "topk_softmax", "topk_softplus_sqrt"]

_topk_gating = Kernel("moe/topk_gating.cu")


@op(out=("topk_weights", "topk_ids", "token_expert_indices"), ulps=8)
def topk_softmax(
    topk_weights: Tensor,
    topk_ids: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    e_score_correction_bias: Tensor | None = None,
    is_padding: Tensor | None = None,
) -> None:
    """The topk experts of each token by ``softmax(gating_output)``, and their scores as weights.

    The score of an expert is the softmax of the logits, in float32. Experts are ranked by logit, or by
    ``score + e_score_correction_bias``. The best expert comes first; of equal experts, the one with the lower id. The
    weight of an expert is its score, without the bias. An expert with a NaN logit ranks as -inf and weighs 0. An
    infinite logit scores as the largest float. If all logits of a token are NaN or -inf, its weights are 0.

    Args:
        topk_weights: [num_tokens, topk] float32, contiguous, written; topk is at most num_experts.
        topk_ids: [num_tokens, topk] int32, uint32 or int64, contiguous, written.
        token_expert_indices: [num_tokens, topk] int32, contiguous, written: ``[t, j] = j * num_tokens + t``.
        gating_output: [num_tokens, num_experts] float32, float16 or bfloat16; any row stride; at most 8192
            experts.
        renormalize: whether the weights of a token are divided by their sum (unless the sum is 0).
        e_score_correction_bias: [num_experts] float32, contiguous, or None (DeepSeek-V3, arXiv:2412.19437).
        is_padding: [num_tokens] bool, contiguous: the rows of no token, with ids -1 and weights 0. None: no row.
    """
    outputs = topk_weights, topk_ids, token_expert_indices
    choose(outputs, gating_output, renormalize, e_score_correction_bias, softmax, is_padding)


@op(out=("topk_weights", "topk_ids", "token_expert_indices"), ulps=8)
def topk_sigmoid(
    topk_weights: Tensor,
    topk_ids: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    e_score_correction_bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    is_padding: Tensor | None = None,
) -> None:
    """`topk_softmax`, where the score of an expert is ``1 / (1 + exp(-logit))``.

    A score below 2^-126, the smallest normal float, is 0.

    Args:
        topk_weights: [num_tokens, topk] float32, contiguous, written; topk is at most num_experts.
        topk_ids: [num_tokens, topk] int32, uint32 or int64, contiguous, written.
        token_expert_indices: [num_tokens, topk] int32, contiguous, written: ``[t, j] = j * num_tokens + t``.
        gating_output: [num_tokens, num_experts] float32, float16 or bfloat16; any row stride; at most 8192
            experts.
        renormalize: whether the weights of a token are divided by their sum (unless the sum is 0).
        e_score_correction_bias: [num_experts] float32, contiguous, or None.
        routed_scaling_factor: multiplies the weights, after they are renormalised.
        is_padding: [num_tokens] bool, contiguous: the rows of no token, with ids -1 and weights 0. None: no row.
    """
    outputs = topk_weights, topk_ids, token_expert_indices
    bias, scale = e_score_correction_bias, routed_scaling_factor
    choose(outputs, gating_output, renormalize, bias, sigmoid, is_padding, scale)


@op(out=("topk_weights", "topk_ids", "token_expert_indices"), ulps=8)
def topk_softplus_sqrt(
    topk_weights: Tensor,
    topk_ids: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
    input_tokens: Tensor | None = None,
    hash_indices_table: Tensor | None = None,
    is_padding: Tensor | None = None,
) -> None:
    """`topk_softmax`, where the score of an expert is ``sqrt(softplus(logit)) = sqrt(log(1 + exp(logit)))``.

    A softplus below 2^-126, the smallest normal float, is 0. With a table, experts are not chosen: those of token t are
    ``hash_indices_table[input_tokens[t]]``, in that order. If the table has no such row, or the entry is not a valid
    expert, the id is -1 and the weight 0.

    Args:
        topk_weights: [num_tokens, topk] float32, contiguous, written; topk is at most num_experts.
        topk_ids: [num_tokens, topk] int32, uint32 or int64, contiguous, written.
        token_expert_indices: [num_tokens, topk] int32, contiguous, written: ``[t, j] = j * num_tokens + t``.
        gating_output: [num_tokens, num_experts] float32, float16 or bfloat16; any row stride; at most 8192
            experts.
        renormalize: whether the weights of a token are divided by their sum (unless the sum is 0).
        routed_scaling_factor: multiplies the weights, after they are renormalised.
        e_score_correction_bias: [num_experts] float32, contiguous, or None. Without effect if there is a table.
        input_tokens: [num_tokens] int32 or int64, contiguous: rows of the table; given if and only if the table is.
        hash_indices_table: [vocab_size, topk] int32 or int64, contiguous, or None.
        is_padding: [num_tokens] bool, contiguous: the rows of no token, with ids -1 and weights 0. None: no row.
    """
    outputs = topk_weights, topk_ids, token_expert_indices
    bias, scale = e_score_correction_bias, routed_scaling_factor
    if hash_indices_table is None or input_tokens is None:
        choose(outputs, gating_output, renormalize, bias, softplus_sqrt, is_padding, scale)
        return
    rows, tokens = hash_indices_table.shape[0], input_tokens.long()
    known = (tokens >= 0) & (tokens < rows)
    experts = hash_indices_table.long()[tokens.where(known, 0)].where(known[:, None], -1) if rows else None
    if experts is None:
        experts = torch.full(topk_ids.shape, -1, dtype=torch.int64, device=topk_ids.device)
    exists = (experts >= 0) & (experts < gating_output.shape[1])
    scores = softplus_sqrt(as_logits(gating_output.float()))
    weights = scores.gather(1, experts.where(exists, 0)).where(exists, 0.0)
    write(outputs, weights, experts.where(exists, -1), renormalize, is_padding, scale)


def _launches(
    scoring: str,
    topk_weights: TensorArg,
    topk_ids: TensorArg,
    token_expert_indices: TensorArg,
    gating_output: TensorArg,
    bias: TensorArg | None,
    is_padding: TensorArg | None,
    tokens: TensorArg | None = None,
    table: TensorArg | None = None,
    **absent: Any,
) -> list[Launch]:
    """The launch of topk_gating.cu; `absent` feeds the parameters that the op does not have."""
    check.floating(gating_output)
    check.sizes(gating_output, num_tokens=None, num_experts=None)
    check.row_size(gating_output)
    num_tokens, num_experts = gating_output.shape
    check.sizes(topk_weights, num_tokens=num_tokens, topk=None)
    topk = topk_weights.shape[1]
    if topk > num_experts:
        raise topk_weights.error(f"expected at most {num_experts} columns, as many as experts, got {topk}")
    if num_tokens * topk >= 2**31:
        raise topk_weights.error(f"expected fewer than 2^31 elements, got shape {topk_weights.shape}")
    check.shape(topk_weights, float32, num_tokens=num_tokens, topk=topk)
    check.dtype(topk_ids, int32, uint32, int64)
    check.shape(topk_ids, num_tokens=num_tokens, topk=topk)
    check.shape(token_expert_indices, int32, num_tokens=num_tokens, topk=topk)
    check.shape(bias, float32, num_experts=num_experts)
    check.shape(is_padding, boolean, num_tokens=num_tokens)
    if table is not None and tokens is not None:
        check.index(table, vocab_size=None, topk=topk)
        check.contiguous(table)
        check.index(tokens, num_tokens=num_tokens)
        check.contiguous(tokens)
    if not topk_weights.numel:
        return []
    geometry = choose_geometry(gating_output, 1, bias)
    return [
        _topk_gating(
            scalar_t=gating_output.dtype,
            expert_t=topk_ids.dtype,
            token_t=tokens.dtype if tokens else int32,
            table_t=table.dtype if table else int32,
            SCORING=scoring,
            NUM_EXPERTS=num_experts,
            TOP_K=topk,
            HAS_BIAS=bias is not None,
            HAS_TABLE=table is not None,
            HAS_PADDING=is_padding is not None,
            **geometry.constants,
        ).launch(
            grid=geometry.num_blocks(num_tokens),
            block=geometry.num_threads,
            num_tokens=num_tokens,
            gating_stride=gating_output.strides[0],
            table_size=table.shape[0] if table else 0,
            **absent,
        )
    ]


# Parameters that only topk_softplus_sqrt has: null pointers for the other ops.
_ABSENT: dict[str, Any] = {"input_tokens": 0, "hash_indices_table": 0}


@topk_softmax.result
@topk_sigmoid.result
@topk_softplus_sqrt.result
def result_topk(
    gating_output: TensorArg, *, topk: int, indices_type: torch.dtype | None = None
) -> tuple[Result, Result, Result]:
    """Experts of each row of `gating_output`.

    Args:
        topk: how many experts a token has, at most num_experts.
        indices_type: of topk_ids, int32, uint32 or int64; None for int32.
    """
    check.sizes(gating_output, num_tokens=None, num_experts=None)
    shape = gating_output.shape[0], topk
    ids = check.chosen(gating_output, "indices_type", indices_type, int32)
    return Result(shape, float32), Result(shape, ids), Result(shape, int32)


@topk_softmax.plan
def plan_topk_softmax(
    topk_weights: TensorArg,
    topk_ids: TensorArg,
    token_expert_indices: TensorArg,
    gating_output: TensorArg,
    e_score_correction_bias: TensorArg | None,
    is_padding: TensorArg | None,
) -> list[Launch]:
    outputs = topk_weights, topk_ids, token_expert_indices
    return _launches(
        "softmax", *outputs, gating_output, e_score_correction_bias, is_padding, **_ABSENT, routed_scaling_factor=1.0
    )


@topk_sigmoid.plan
def plan_topk_sigmoid(
    topk_weights: TensorArg,
    topk_ids: TensorArg,
    token_expert_indices: TensorArg,
    gating_output: TensorArg,
    e_score_correction_bias: TensorArg | None,
    is_padding: TensorArg | None,
) -> list[Launch]:
    outputs = topk_weights, topk_ids, token_expert_indices
    return _launches("sigmoid", *outputs, gating_output, e_score_correction_bias, is_padding, **_ABSENT)


@topk_softplus_sqrt.plan
def plan_topk_softplus_sqrt(
    topk_weights: TensorArg,
    topk_ids: TensorArg,
    token_expert_indices: TensorArg,
    gating_output: TensorArg,
    e_score_correction_bias: TensorArg | None,
    input_tokens: TensorArg | None,
    hash_indices_table: TensorArg | None,
    is_padding: TensorArg | None,
) -> list[Launch]:
    if (input_tokens is None) != (hash_indices_table is None):
        name = "input_tokens" if input_tokens is None else "hash_indices_table"
        raise check.refuse(gating_output, name, "expected input_tokens and hash_indices_table, or neither, got None")
    outputs = topk_weights, topk_ids, token_expert_indices
    bias, table = e_score_correction_bias, hash_indices_table
    return _launches("softplus_sqrt", *outputs, gating_output, bias, is_padding, input_tokens, table)


@topk_softplus_sqrt.bad_indices
def bad_indices_topk_softplus_sqrt(
    gating_output: Tensor, input_tokens: Tensor | None, hash_indices_table: Tensor | None, is_padding: Tensor | None
) -> dict[str, Tensor]:
    if input_tokens is None or hash_indices_table is None:
        return {}
    unknown = (input_tokens < 0) | (input_tokens >= hash_indices_table.shape[0])
    return {
        "input_tokens": unknown if is_padding is None else unknown & ~is_padding,
        "hash_indices_table": (hash_indices_table < 0) | (hash_indices_table >= gating_output.shape[1]),
    }


@topk_softmax.example
def example_topk_softmax(
    make: Any,
    *,
    num_tokens: int = 16,
    num_experts: Literal[128, 60] = 128,
    topk: Literal[8, 40] = 8,
    dtype: str = "bfloat16",
    indices_dtype: Literal["int32", "int64"] = "int32",
    with_bias: bool = False,
    renormalize: bool = True,
    with_padding: bool = False,
) -> tuple[Any, ...]:
    logits = make.randn(num_tokens, num_experts, dtype=dtype)
    bias = make.randn(num_experts, dtype="float32", scale=0.1) if with_bias else None
    padding = _padding(make, num_tokens, with_padding)
    return *_outputs(make, num_tokens, topk, indices_dtype), logits, renormalize, bias, padding


def _padding(make: Any, num_tokens: int, with_padding: bool) -> Any:
    """Padding for every third row, or None."""
    return make.values([t % 3 == 2 for t in range(num_tokens)], dtype="bool") if with_padding else None


def _outputs(make: Any, num_tokens: int, topk: int, indices_dtype: str) -> tuple[Any, ...]:
    return tuple(make.empty(num_tokens, topk, dtype=dtype) for dtype in ("float32", indices_dtype, "int32"))


@topk_sigmoid.example
def example_topk_sigmoid(
    make: Any,
    *,
    num_tokens: int = 16,
    num_experts: Literal[128, 60] = 128,
    topk: Literal[8, 40] = 8,
    dtype: str = "bfloat16",
    indices_dtype: Literal["int32", "int64"] = "int32",
    with_bias: bool = False,
    renormalize: bool = True,
    with_padding: bool = False,
) -> tuple[Any, ...]:
    sizes: dict[str, Any] = {"num_tokens": num_tokens, "num_experts": num_experts, "topk": topk}
    options: dict[str, Any] = {"with_bias": with_bias, "renormalize": renormalize, "with_padding": with_padding}
    *args, padding = example_topk_softmax(make, dtype=dtype, indices_dtype=indices_dtype, **sizes, **options)
    return *args, 1.0, padding


@topk_softplus_sqrt.example
def example_topk_softplus_sqrt(
    make: Any,
    *,
    num_tokens: int = 16,
    num_experts: Literal[256, 60] = 256,
    dtype: str = "float32",
    indices_dtype: Literal["int32", "int64"] = "int32",
    with_table: bool = False,
    with_bias: bool = True,
    with_padding: bool = False,
) -> tuple[Any, ...]:
    topk, vocab_size = 6, 100
    logits = make.randn(num_tokens, num_experts, dtype=dtype)
    bias = make.randn(num_experts, dtype="float32", scale=0.1) if with_bias else None
    tokens = make.randint(0, vocab_size, num_tokens, dtype=indices_dtype) if with_table else None
    table = make.randint(0, num_experts, vocab_size, topk, dtype="int32") if with_table else None
    padding = _padding(make, num_tokens, with_padding)
    return *_outputs(make, num_tokens, topk, indices_dtype), logits, True, 1.5, bias, tokens, table, padding
