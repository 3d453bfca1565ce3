"""The router of a mixture of experts for few tokens: norm, logits and the choice of experts in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32, int32
from ..._core.tensors.tensor import TensorArg
from .._shared.expert_choices import choose
from .._shared.expert_scores import sigmoid, softmax
from .._shared.norms import rms
from .skinny_linear import check_normalised, config_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["skinny_router"]

_gemv_router = Kernel("linear/gemv_router.cu")
_SCORES = {"softmax": softmax, "sigmoid": sigmoid}
_ROW_THREADS, _MAX_THREAD_EXPERTS = 32, 16  # lanes that share a token, most experts of a lane
MAX_ROUTED = _ROW_THREADS * _MAX_THREAD_EXPERTS  # most experts
MAX_CHOICES = _ROW_THREADS  # most experts of a token: a lane writes one
_MAX_TOKENS = 65535  # most tokens: blockIdx.y counts them
_PAIR_BYTES = 8  # bytes by which a block passes a logit to another


# A logit's error is the relative error of a weight. It is that of a normalised element which rounds the other way,
# 2^-9 of a product, and of the sum in float32.
@op(out=("normalised", "topk_weights", "topk_ids"), atol=2.0**-11)
def skinny_router(
    normalised: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    input: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    renormalize: bool,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    epsilon: float = 1e-6,
) -> None:
    """The norm of each token, the logits of its router, and the choice of its experts, for small M.

    `rms_norm`, a GEMM and `topk_softmax` or `topk_sigmoid` in one launch, for the decode step of one sequence. Logits
    stay float32. With more tokens a GEMM on tensor cores is faster.

    Args:
        normalised: [num_tokens, K], contiguous, written: the norm of `input`, for the experts.
        topk_weights: [num_tokens, topk] float32, contiguous, written; topk is at most 32 and at most num_experts.
        topk_ids: [num_tokens, topk] int32, contiguous, written: the best expert first; of equal ones the lower id.
        input: [num_tokens, K], float32, float16 or bfloat16; constant row stride; rows of at most 32 KB.
        norm_weight: [K] of the dtype of `input`, contiguous.
        weight: [num_experts, K] of the dtype of `input` or float32, constant row stride; at most 512 experts. The
            kernel reads it while the previous kernel runs: that kernel must not write it.
        renormalize: whether the weights of a token are divided by their sum (unless the sum is 0).
        scoring_func: "softmax" or "sigmoid".
        routed_scaling_factor: multiplies the weights, after they are renormalised.
        epsilon: of the norm.
    """
    x = rms(input.float(), norm_weight, epsilon, input.dtype)
    normalised.copy_(x)
    logits = (x.double() @ weight.double().T).float()
    outputs = topk_weights, topk_ids, torch.empty_like(topk_ids)
    choose(outputs, logits, renormalize, None, _SCORES[scoring_func], None, routed_scaling_factor)


@skinny_router.result
def result_skinny_router(input: TensorArg, *, topk: int) -> tuple[Result, Result, Result]:
    """Experts of each row of `input`.

    Args:
        topk: how many experts a token has, at most num_experts.
    """
    check.sizes(input, num_tokens=None, K=None)
    shape = input.shape[0], topk
    return Result(input.shape, input.dtype), Result(shape, float32), Result(shape, int32)


@skinny_router.plan
def plan_skinny_router(
    normalised: TensorArg,
    topk_weights: TensorArg,
    topk_ids: TensorArg,
    input: TensorArg,
    norm_weight: TensorArg,
    weight: TensorArg,
    scoring_func: str,
) -> Launch | list[Launch]:
    check.floating(input)
    check.sizes(input, num_tokens=None, K=None)
    num_tokens, k = input.shape
    check.row_size(input)
    check_normalised(input)
    if num_tokens > _MAX_TOKENS:
        raise input.error(f"expected at most {_MAX_TOKENS} rows, got shape {input.shape}")
    check.shape(normalised, input.dtype, num_tokens=num_tokens, K=k)
    check.shape(norm_weight, input.dtype, K=k)
    check.dtype(weight, input.dtype, float32)
    check.sizes(weight, num_experts=None, K=k)
    check.row_size(weight)
    num_experts = weight.shape[0]
    if not 1 <= num_experts <= MAX_ROUTED:
        raise weight.error(f"expected 1 to {MAX_ROUTED} experts, got shape {weight.shape}")
    check.sizes(topk_weights, num_tokens=num_tokens, topk=None)
    topk = topk_weights.shape[1]
    if not 1 <= topk <= min(MAX_CHOICES, num_experts):
        most = min(MAX_CHOICES, num_experts)
        raise topk_weights.error(f"expected 1 to {most} columns, got shape {topk_weights.shape}")
    check.shape(topk_weights, float32, num_tokens=num_tokens, topk=topk)
    check.shape(topk_ids, int32, num_tokens=num_tokens, topk=topk)
    if scoring_func not in _SCORES:
        raise check.refuse(input, "scoring_func", f"expected {' or '.join(_SCORES)}, got {scoring_func}")
    if not num_tokens:
        return []
    device = input.device
    vec_size = check.vector_width(k, normalised, input, norm_weight, weight)
    config = config_of(k, vec_size, several=False, warp_size=device.warp_size)
    return _gemv_router(
        scalar_t=weight.dtype,
        input_t=input.dtype,
        HIDDEN_SIZE=k,
        **config.constants,
        SCORING=scoring_func,
        NUM_EXPERTS=num_experts,
        TOP_K=topk,
        ROW_THREADS=_ROW_THREADS,
        THREAD_EXPERTS=-(-num_experts // _ROW_THREADS),
    ).launch(
        grid=(config.num_blocks(num_experts, device, num_tokens), num_tokens),
        block=config.num_threads,
        all_logits=Scratch(num_tokens * num_experts * _PAIR_BYTES, zeroed=True),
        arrived=Scratch(num_tokens * 4, zeroed=True),
        input_stride=check.row_stride(input),
        weight_stride=check.row_stride(weight),
    )


@skinny_router.example
def example_skinny_router(
    make: Any,
    *,
    num_tokens: int = 1,
    input_size: Literal[2048, 769] = 2048,
    num_experts: Literal[128, 60] = 128,
    topk: Literal[8, 6] = 8,
    dtype: str = "bfloat16",
    in_float32: bool = False,
    scoring_func: Literal["softmax", "sigmoid"] = "softmax",
) -> tuple[Any, ...]:
    return (
        make.empty(num_tokens, input_size, dtype=dtype),
        make.empty(num_tokens, topk, dtype="float32"),
        make.empty(num_tokens, topk, dtype="int32"),
        make.randn(num_tokens, input_size, dtype=dtype),
        make.randn(input_size, dtype=dtype),
        make.randn(num_experts, input_size, dtype="float32" if in_float32 else dtype, scale=input_size**-0.5),
        scoring_func == "softmax",
        scoring_func,
        1.0,
        1e-6,
    )
