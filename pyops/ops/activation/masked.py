"""Activations of padded batches of experts, computed for the rows that exist."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg
from .elementwise import gelu, relu2, silu
from .gated import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul, situ, swigluoai_and_mul, swiglustep_and_mul

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["masked_moe_activation"]

_masked_moe_activation = Kernel("activation/masked_moe_activation.cu")
_NUM_THREADS, _MIN_BLOCKS = 256, 4  # threads of a block; resident blocks per SM, which leave a thread 64 registers


class _Form(NamedTuple):
    """Constants of the kernel for an activation, and elements of an input row for each element of an output row."""

    form: str
    act: str = "silu"
    width: int = 2


_FORMS = {
    "silu": _Form("gated", "silu"),
    "gelu": _Form("gated", "gelu"),
    "gelu_tanh": _Form("gated", "gelu_tanh"),
    "silu_with_clamp": _Form("clamped"),
    "swigluoai_uninterleave": _Form("clamped"),
    "swigluoai": _Form("interleaved"),
    "swiglustep": _Form("step"),
    "situ": _Form("situ"),
    "silu_no_mul": _Form("plain", "silu", 1),
    "gelu_no_mul": _Form("plain", "gelu", 1),
    "gelu_tanh_no_mul": _Form("plain", "gelu_tanh", 1),
    "relu2_no_mul": _Form("plain", "relu2", 1),
}
Activation = Literal[
    "silu",
    "gelu",
    "gelu_tanh",
    "silu_with_clamp",
    "swigluoai_uninterleave",
    "swigluoai",
    "swiglustep",
    "situ",
    "silu_no_mul",
    "gelu_no_mul",
    "gelu_tanh_no_mul",
    "relu2_no_mul",
]


# `silu_with_clamp` with an alpha rounds the activated gate before the product: where the kernel rounds it the other
# way, the product may be two ulps away.
@op(partial="out", ulps=2)
def masked_moe_activation(
    out: Tensor,
    input: Tensor,
    valid_token_counts: Tensor,
    activation: str,
    clamp_limit: float = 0.0,
    alpha: float = 1.0,
    beta: float = 0.0,
    situ_beta: float = 1.0,
    situ_linear_beta: float = -1.0,
) -> None:
    """An activation of the first ``valid_token_counts[e]`` rows of each expert e; other rows are left unchanged.

    ``"silu"``, ``"gelu"`` and ``"gelu_tanh"`` equal `silu_and_mul`, `gelu_and_mul` and `gelu_tanh_and_mul`;
    ``"swigluoai"`` equals `swigluoai_and_mul` with `alpha` and `clamp_limit`, ``"swiglustep"`` `swiglustep_and_mul`
    with `clamp_limit`, and ``"situ"`` `situ_and_mul` with `situ_beta` and `situ_linear_beta`. ``"silu_with_clamp"`` and
    ``"swigluoai_uninterleave"`` are ``T(T(g / (1 + exp(-alpha * g))) * (u + beta))`` for the halves ``input = [g, u]``,
    with g at most l and u clamped to +-l, where l is `clamp_limit` rounded to the element type; NaN stays NaN. With the
    suffix ``"_no_mul"``, the activation is not gated: `silu`, `gelu`, its approximation by tanh, or `relu2` of every
    element. Modelled on vLLM's op of this name.

    Args:
        out: [num_experts, num_tokens, hidden_size] or [num_tokens, hidden_size], written; the last stride is 1.
        input: of the same dtype, float32, float16 or bfloat16, with rows of hidden_size elements for an activation that
            is not gated, else of twice as many; the last stride is 1.
        valid_token_counts: [num_experts] int32, contiguous, or of one element if there is no dimension of experts;
            clamped to 0 ... num_tokens.
        activation: one of the names above; others are refused.
        clamp_limit, alpha, beta, situ_beta, situ_linear_beta: parameters of some activations; the others ignore them.
    """
    result = torch.empty_like(out)
    if activation in _FORMS and _FORMS[activation].form == "clamped":
        gate, up = input.chunk(2, dim=-1)
        bound = gate.new_full((), clamp_limit, dtype=torch.float32).to(gate.dtype)
        gate, up = torch.where(gate > bound, bound, gate).float(), torch.where(up > bound, bound, up)
        up = torch.where(up < -bound, -bound, up).float()
        result.copy_((gate / (1.0 + torch.exp(-alpha * gate))).to(input.dtype).float() * (up + beta))
    elif activation == "situ":
        result.copy_(situ(input, situ_beta, situ_linear_beta))
    elif activation == "gelu_tanh_no_mul":
        result.copy_(torch.nn.functional.gelu(input.float(), approximate="tanh"))
    else:
        args: dict[str, tuple[float, ...]] = {"swigluoai": (alpha, clamp_limit), "swiglustep": (clamp_limit,)}
        _SAME[activation].reference(result, input, *args.get(activation, ()))
    tokens = torch.arange(input.shape[-2], dtype=torch.int64, device=input.device)
    valid = (tokens < valid_token_counts.clamp(min=0)[:, None]).reshape(out.shape[:-1])
    out.copy_(torch.where(valid[..., None], result, out))


# Ops that compute the same for every row.
_SAME = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
    "swigluoai": swigluoai_and_mul,
    "swiglustep": swiglustep_and_mul,
    "silu_no_mul": silu,
    "gelu_no_mul": gelu,
    "relu2_no_mul": relu2,
}


def _form(input: TensorArg, activation: str) -> _Form:
    """The `_Form` of an activation. Checks `input`."""
    if activation not in _FORMS:
        raise check.refuse(input, "activation", f"expected one of {', '.join(_FORMS)}, got {activation}")
    form = _FORMS[activation]
    check.floating(input)
    if len(input.shape) not in (2, 3) or check.row_size(input) % form.width:
        raise input.error(
            f"expected [num_experts, num_tokens, {form.width} * hidden_size], with experts or without, got shape "
            f"{input.shape}"
        )
    return form


@masked_moe_activation.result
def result_masked_moe_activation(input: TensorArg, activation: str) -> Result:
    width = _form(input, activation).width
    return Result((*input.shape[:-1], input.shape[-1] // width), input.dtype)


def _of_experts(arg: TensorArg) -> TensorArg:
    """`arg` with a dimension of experts."""
    return replace(arg, shape=(1, *arg.shape), strides=(0, *arg.strides)) if len(arg.shape) == 2 else arg


@masked_moe_activation.plan
def plan_masked_moe_activation(
    out: TensorArg, input: TensorArg, valid_token_counts: TensorArg, activation: str
) -> Launch:
    form, expected = _form(input, activation), result_masked_moe_activation(input, activation).shape
    if out.shape != expected:
        raise out.error(f"expected shape {expected} for an input of shape {input.shape}, got {out.shape}")
    check.dtype(out, input.dtype)
    check.row_size(out)
    check.narrow(input)
    rows, results = _of_experts(input), _of_experts(out)
    num_experts, num_tokens, hidden_size = results.shape
    check.shape(valid_token_counts, int32, num_experts=num_experts)
    if max(num_experts, num_tokens) > 2**30:
        raise input.error(f"expected at most 2^30 experts and 2^30 tokens, got shape {input.shape}")
    vec_size = check.vector_width(hidden_size, out, input)
    warp_size = input.device.warp_size
    max_items = num_experts * num_tokens * -(-hidden_size // (vec_size * warp_size))  # an item is the work of one warp
    return _masked_moe_activation(
        scalar_t=input.dtype,
        FORM=form.form,
        ACT=form.act,
        VEC_SIZE=vec_size,
        NUM_THREADS=_NUM_THREADS,
        MIN_BLOCKS=_MIN_BLOCKS,
    ).launch(
        grid=min(_MIN_BLOCKS * input.device.num_sms, -(-max_items // (_NUM_THREADS // warp_size))),
        block=_NUM_THREADS,
        num_experts=num_experts,
        num_tokens=num_tokens,
        hidden_size=hidden_size,
        out_expert_stride=results.strides[0],
        out_stride=results.strides[1],
        input_expert_stride=rows.strides[0],
        input_stride=rows.strides[1],
    )


@masked_moe_activation.bad_indices
def bad_indices_masked_moe_activation(input: Tensor, valid_token_counts: Tensor) -> dict[str, Tensor]:
    return {"valid_token_counts": (valid_token_counts < 0) | (valid_token_counts > input.shape[-2])}


@masked_moe_activation.traffic
def traffic_masked_moe_activation(out: TensorArg, input: TensorArg, valid_token_counts: TensorArg) -> int:
    """The bytes if `valid_token_counts` is num_tokens for every expert."""
    return out.nbytes + input.nbytes + valid_token_counts.nbytes


@masked_moe_activation.example
def example_masked_moe_activation(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[2048, 96] = 2048,
    dtype: str = "bfloat16",
    activation: Activation = "silu",
    num_experts: Literal[8, 1] = 8,
) -> tuple[Any, ...]:
    """`num_experts` 1: tensors without a dimension of experts."""
    experts = (num_experts,) if num_experts > 1 else ()
    return (
        make.empty(*experts, num_tokens, hidden_size, dtype=dtype),
        make.randn(*experts, num_tokens, _FORMS[activation].width * hidden_size, dtype=dtype),
        make.randint(0, num_tokens + 1, num_experts, dtype="int32"),
        *(activation, 1.5, 1.702, 1.0, 4.0, 25.0),
    )
