"""Mixtures of experts end to end: routing, the grouped GEMMs, and the sum over each token's experts.

A call with 16-bit weights is four launches: `moe_align`, which sorts rows by expert; a grouped GEMM with the activation
in its epilogue; a grouped GEMM that multiplies by the router weights; and the sum. Inputs are not permuted, and gate
and up are not written to global memory. A clamped activation takes one more launch. One token takes two: its experts
share no rows, so nothing is sorted, and the second GEMM adds the choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._core.errors import OpError
from .._core.tensors.tensor import new
from ..ops.linear.grouped_problem import ACTIVATIONS
from ..ops.moe.routing_fused import fused_grouped_topk, fused_topk
from ..ops.moe.rows import moe_sum_experts
from ..tuning import batch_invariant
from .expert_products import clamp_limit_of, codes_of, multiply_experts, multiply_experts_of_token

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FusedMoEQuantConfig", "fused_experts", "fused_moe"]


@dataclass(frozen=True)
class FusedMoEQuantConfig:
    """The quantization of experts for `fused_experts`, with vLLM's names. vLLM's class of this name works, too.

    Attributes:
        quant_dtype: dtype of activations and weights: None, float8_e4m3fn or int8, as a dtype or by its name.
        per_act_token_quant: whether activations have per-token scales instead of one per-tensor scale.
        block_shape: [128, 128] for block scales of weights and scales per 128 elements of activations; [0, group size]
            for weight-only quantization with a scale per group of a row; or None.
        w1_scale, w2_scale: scales of the weights, as `b_scales` of `grouped_gemm` or of `grouped_gemm_packed`; or None.
        a1_scale, a2_scale: one float32, the static scale of the activations; None for dynamic scales.
        w1_bias, w2_bias: [num_experts, rows of a weight] of the dtype of hidden_states; or None.
        weight_quant_dtype: weight-only quantisation, by `grouped_gemm_packed`: "int4" and, with a block_shape, "int8"
            for uint4 and uint8 in groups of a row, "int8" for int8 with a scale for each row, "mxfp4" for
            float4_e2m1f; or None.
        w1_zp, w2_zp: zero points of groups, as `b_zeros` of `grouped_gemm_packed`; or None.
        gemm1_alpha, gemm1_beta: None, or the constants of "swigluoai": 1.702 and 1.
        gemm1_clamp_limit: with "silu", the upper bound of the gate and of the magnitude of the up projection, or None;
            with "swigluoai", None or its constant 7.

    Examples:
        >>> w1_scale, w2_scale = torch.full((8, 256, 1), 0.01), torch.full((8, 64, 1), 0.01)
        >>> config = pyops.FusedMoEQuantConfig("float8_e4m3fn", True, w1_scale=w1_scale, w2_scale=w2_scale)
        >>> w1, w2 = torch.randn(8, 256, 64).to(torch.float8_e4m3fn), torch.randn(8, 64, 128).to(torch.float8_e4m3fn)
        >>> weights, ids, _ = pyops.fused_topk(torch.empty(5, 64), torch.randn(5, 8), 2, renormalize=True)
        >>> pyops.fused_experts(torch.randn(5, 64).bfloat16(), w1, w2, weights, ids, quant_config=config).dtype
        torch.bfloat16
    """

    quant_dtype: Any = None
    per_act_token_quant: bool = False
    block_shape: list[int] | None = None
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    a1_scale: Tensor | None = None
    a2_scale: Tensor | None = None
    w1_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    weight_quant_dtype: Any = None
    w1_zp: Tensor | None = None
    w2_zp: Tensor | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None


_PLAIN = FusedMoEQuantConfig()


def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    inplace: bool = False,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
    quant_config: FusedMoEQuantConfig | None = None,
) -> Tensor:
    """The experts of a layer: ``out[t] = sum_j weight[t, j] * (f(x[t] @ w1[e].T) @ w2[e].T)``, e the j-th of token t.

    After vLLM's function of this name. Accumulation is float32; the activation and each expert's result are rounded
    once to the dtype of hidden_states, or quantised. Experts that do not exist, or that another device holds, add
    nothing.

    Args:
        hidden_states: [num_tokens, hidden_size] float32, float16 or bfloat16; rows of one stride.
        w1: [num_experts, 2 * intermediate_size, hidden_size], rows of one stride; [num_experts, intermediate_size,
            hidden_size] for activations without gates. Of the dtype of hidden_states, or quantised; 4-bit quants are
            packed two to a byte along the last dimension.
        w2: [num_experts, hidden_size, intermediate_size], likewise.
        topk_weights: [num_tokens, topk] float32, contiguous.
        topk_ids: [num_tokens, topk] int32 or int64, contiguous.
        inplace: whether the result is written to hidden_states.
        activation: one of those of `grouped_gemm`.
        apply_router_weight_on_input: whether weights multiply ``x[t] @ w1[e].T``; then topk is 1.
        global_num_experts: experts on all devices; -1 for the size of expert_map or else w1.
        expert_map: [global_num_experts] int32, contiguous: the local index of each expert, -1 if another device holds
            it; or None.
        quant_config: scales and biases; None for neither.

    Returns:
        [num_tokens, hidden_size], new unless `inplace`.

    Examples:
        >>> x, logits = torch.randn(5, 64).bfloat16(), torch.randn(5, 8)
        >>> w1, w2 = torch.randn(8, 2 * 128, 64).bfloat16(), torch.randn(8, 64, 128).bfloat16()
        >>> weights, ids, _ = pyops.fused_topk(x, logits, 2, renormalize=True)
        >>> pyops.fused_experts(x, w1, w2, weights, ids).shape
        torch.Size([5, 64])
    """
    out = hidden_states if inplace else new(hidden_states, tuple(hidden_states.shape))
    options = activation, apply_router_weight_on_input, global_num_experts, expert_map, quant_config
    experts_into(out, hidden_states, None, w1, w2, topk_weights, topk_ids, *options)
    return out


def experts_into(
    out: Tensor,
    hidden_states: Tensor,
    a1_scale: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
    quant_config: FusedMoEQuantConfig | None = None,
) -> None:
    """`fused_experts` into `out`, which may share the memory of `hidden_states`.

    Args:
        out: [num_tokens, hidden_size] float32, float16 or bfloat16, written.
        hidden_states, a1_scale: of the dtype of `out`, and None; or quantized, and its scales, as in
            `multiply_experts`.
    """
    config = _PLAIN if quant_config is None else quant_config
    per_byte = 2 if codes_of(config) in ("uint4", "float4_e2m1f") else 1
    sizes = _check(hidden_states, w1, w2, topk_weights, topk_ids, activation, per_byte)
    num_tokens, hidden_size, topk, num_experts = sizes
    if apply_router_weight_on_input and topk != 1:
        raise OpError("fused_experts", "apply_router_weight_on_input", f"expected a topk of 1, got {topk}")
    if expert_map is not None:
        global_num_experts = expert_map.shape[0]
    elif global_num_experts < 0:
        global_num_experts = num_experts
    limited = clamp_limit_of(config, activation) is not None
    if num_tokens == 0:
        return
    num_rows, intermediate_size = num_tokens * topk, w2.shape[2] * per_byte
    between = new(out, (num_rows, intermediate_size))
    is_plain = config.quant_dtype is None and codes_of(config) is None and not limited and a1_scale is None
    if num_tokens == 1 and is_plain and expert_map is None and not (apply_router_weight_on_input or batch_invariant()):
        experts = w1, w2, topk_weights, topk_ids
        multiply_experts_of_token(out, between, hidden_states, *experts, activation, config)
        return
    first = new(out, (num_rows, 2 * intermediate_size)) if limited else between
    of_choices = new(out, (num_rows, hidden_size))
    weights = (topk_weights, None) if apply_router_weight_on_input else (None, topk_weights)
    options = activation, global_num_experts, expert_map, config, a1_scale
    multiply_experts(of_choices, between, first, hidden_states, w1, w2, topk_ids, weights, *options)
    moe_sum_experts(of_choices.reshape(num_tokens, topk, hidden_size), topk_ids, out, num_experts, expert_map)


def _check(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    per_byte: int,
) -> tuple[int, int, int, int]:
    """Check the shapes for weights with `per_byte` quants per byte; (num_tokens, hidden_size, topk, num_experts)."""
    for name, tensor, rank in (
        ("hidden_states", hidden_states, 2),
        ("w1", w1, 3),
        ("w2", w2, 3),
        ("topk_ids", topk_ids, 2),
    ):
        if len(tensor.shape) != rank:
            raise OpError("fused_experts", name, f"expected {rank} dimensions, got shape {tuple(tensor.shape)}")
    if activation not in ACTIVATIONS:
        raise OpError("fused_experts", "activation", f"expected {' or '.join(ACTIVATIONS)}, got {activation}")
    (num_tokens, hidden_size), (num_experts, rows, columns) = hidden_states.shape, w1.shape
    if rows == hidden_size // per_byte != columns:
        rows = columns  # w1 is transposed, and the error says the shape that it should have
    intermediate_size = rows // 2 if ACTIVATIONS[activation] else rows
    for name, tensor, shape in (
        ("w1", w1, (num_experts, rows, hidden_size // per_byte)),
        ("w2", w2, (num_experts, hidden_size, intermediate_size // per_byte)),
        ("topk_ids", topk_ids, (num_tokens, topk_ids.shape[1])),
        ("topk_weights", topk_weights, tuple(topk_ids.shape)),
    ):
        if tuple(tensor.shape) != shape:
            raise OpError("fused_experts", name, f"expected shape {shape}, got {tuple(tensor.shape)}")
    return num_tokens, hidden_size, topk_ids.shape[1], num_experts


def fused_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    inplace: bool = False,
    activation: str = "silu",
    use_grouped_topk: bool = False,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    custom_routing_function: Any = None,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
    quant_config: FusedMoEQuantConfig | None = None,
) -> Tensor:
    """A layer of experts: routes each token to `topk` experts by its logits, then runs `fused_experts`.

    Args:
        hidden_states, w1, w2, inplace, activation, global_num_experts, expert_map, quant_config: as in `fused_experts`.
        gating_output: [num_tokens, global_num_experts], the router logits.
        topk: experts per token.
        renormalize: whether the weights of a token are divided by their sum.
        use_grouped_topk: whether experts are chosen by `fused_grouped_topk`.
        num_expert_group, topk_group: how many groups of experts there are, and from how many of them, the best ones, a
            token's experts are chosen.
        custom_routing_function: ``(hidden_states, gating_output, topk, renormalize)`` returns weights and ids; or None,
            for the softmax of the logits.

    Examples:
        >>> x, logits = torch.randn(5, 64).bfloat16(), torch.randn(5, 8)
        >>> w1, w2 = torch.randn(8, 2 * 128, 64).bfloat16(), torch.randn(8, 64, 128).bfloat16()
        >>> pyops.fused_moe(x, w1, w2, logits, topk=2, renormalize=True).shape
        torch.Size([5, 64])
    """
    choice = hidden_states, gating_output, topk, renormalize
    if use_grouped_topk:
        weights, ids = fused_grouped_topk(*choice, None, num_expert_group or 0, topk_group or 0)
    elif custom_routing_function is not None:
        weights, ids = custom_routing_function(*choice)
    else:
        weights, ids, _ = fused_topk(*choice)
    options = inplace, activation, False, global_num_experts, expert_map, quant_config
    return fused_experts(hidden_states, w1, w2, weights, ids, *options)
