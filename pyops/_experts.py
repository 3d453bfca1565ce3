"""Mixtures of experts end to end: routing, products with the weights of experts, and the sum over a token's choices.

A call of 16-bit weights is four launches: rows are sorted by their experts; a product with its activation; a product
under the router's weights; the sum. No input is permuted, and what the activation takes lies in no memory. A clamped
activation is a launch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._core.errors import OpError
from ._core.tensor import new
from .ops.activation.gated import silu_and_mul_with_clamp
from .ops.linear.coded_plan import block_size_of_codes
from .ops.linear.gemm_problem import SCALE_BLOCK
from .ops.linear.grouped import grouped_gemm
from .ops.linear.grouped_packed import grouped_gemm_packed
from .ops.linear.grouped_plan import block_size_for
from .ops.linear.grouped_problem import ACTIVATIONS
from .ops.moe.align import moe_align
from .ops.moe.routing_fused import fused_grouped_topk, fused_topk
from .ops.moe.rows import moe_sum_experts
from .ops.quantize import per_token_group_quant_fp8, per_token_group_quant_int8, scaled_fp8_quant, scaled_int8_quant

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FusedMoEQuantConfig", "fused_experts", "fused_moe"]

_FP8 = "float8_e4m3fn"
_LARGEST_INT8 = 127.0
# {argument of products: of the first, in `fused_experts`}
_NAMES = {"b": "w1", "b_scales": "w1_scale", "b_zeros": "w1_zp", "bias": "w1_bias", "a_scales": "a1_scale"}
_NAMES |= dict.fromkeys(("a", "input", "out"), "hidden_states") | {"scale": "a1_scale", "top_k": "topk_ids"}
_SWIGLUOAI = {"gemm1_alpha": 1.702, "gemm1_beta": 1.0, "gemm1_clamp_limit": 7.0}  # of the activation of this name


@dataclass(frozen=True)
class FusedMoEQuantConfig:
    """How `fused_experts` takes its weights, by vLLM's names; an object of vLLM's class of this name does as well.

    Attributes:
        quant_dtype: of activations, and of weights with them: None, float8_e4m3fn or int8, as a dtype or by its name.
        per_act_token_quant: whether each row of an activation has a scale, and not the whole of it.
        block_shape: [128, 128] where scales are those of blocks of a weight, and of 128 elements of activations; of
            weights alone [0, group size] for scales of groups of a row; or None.
        w1_scale, w2_scale: scales of the weights, as `b_scales` of `grouped_gemm` or of `grouped_gemm_packed`; or None.
        a1_scale, a2_scale: one float32, the scale of all activations; None to find scales.
        w1_bias, w2_bias: [num_experts, rows of a weight] of the dtype of hidden_states; or None.
        weight_quant_dtype: of weights alone, whose codes `grouped_gemm_packed` takes: "int4" and, with a block_shape,
            "int8" for uint4 and uint8 in groups of a row, "int8" for int8 with a scale for each row, "mxfp4" for
            float4_e2m1f; or None.
        w1_zp, w2_zp: zero points of groups, as `b_zeros` of `grouped_gemm_packed`; or None.
        gemm1_alpha, gemm1_beta: None, or what "swigluoai" has: 1.702 and 1.
        gemm1_clamp_limit: of the activation "silu", the largest gate and the largest magnitude of an up, or None; of
            "swigluoai" None, or its 7.
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

    After vLLM's function of this name. Sums are float32; the activation and the result of each choice are rounded once
    to the dtype of hidden_states, or quantised. Choices whose expert does not exist, or is not on this device, add
    nothing.

    Args:
        hidden_states: [num_tokens, hidden_size] float32, float16 or bfloat16; rows of one stride.
        w1: [num_experts, 2 * intermediate_size, hidden_size], rows of one stride; [num_experts, intermediate_size,
            hidden_size] for activations without gates. Of the dtype of hidden_states, or quantised; codes of 4 bits lie
            two to a byte along the last dimension.
        w2: [num_experts, hidden_size, intermediate_size], likewise.
        topk_weights: [num_tokens, topk] float32, contiguous.
        topk_ids: [num_tokens, topk] int32 or int64, contiguous.
        inplace: whether the result is written to hidden_states.
        activation: one of those of `grouped_gemm`.
        apply_router_weight_on_input: whether weights multiply ``x[t] @ w1[e].T``; then topk is 1.
        global_num_experts: experts on all devices; -1 for as many as expert_map, or w1, has.
        expert_map: [global_num_experts] int32, contiguous: the number on this device of each expert, -1 if it is not
            here; or None.
        quant_config: scales and biases; None for neither.

    Returns:
        [num_tokens, hidden_size], new unless `inplace`.
    """
    config = _PLAIN if quant_config is None else quant_config
    codes, w1_zp, w2_zp = _codes(config)
    per_byte = 2 if codes in ("uint4", "float4_e2m1f") else 1
    sizes = _check(hidden_states, w1, w2, topk_weights, topk_ids, activation, per_byte)
    num_tokens, hidden_size, topk, num_experts = sizes
    if apply_router_weight_on_input and topk != 1:
        raise OpError("fused_experts", "apply_router_weight_on_input", f"expected a topk of 1, got {topk}")
    if expert_map is not None:
        global_num_experts = expert_map.shape[0]
    elif global_num_experts < 0:
        global_num_experts = num_experts
    limit = _clamp_limit(config, activation)
    num_rows, intermediate_size = num_tokens * topk, w2.shape[2] * per_byte
    out = hidden_states if inplace else new(hidden_states, (num_tokens, hidden_size))
    if num_tokens == 0:
        return out
    if codes is None:
        block_size = block_size_for(num_rows, num_experts, bool(config.block_shape))
    else:
        block_size = block_size_of_codes(num_rows, num_experts, codes)
    lists = moe_align(topk_ids, block_size, global_num_experts, expert_map, ignore_invalid_experts=True)

    def multiply(
        number: int, out: Tensor, x: Tensor, of_weight: tuple[Any, ...], weights: Any, top_k: int, function: str
    ) -> None:
        w, scale, zeros, bias, a_scale = of_weight
        options = top_k, block_size, function
        try:
            if codes is None:
                x, x_scales = _quantised(x, config, a_scale)
                grouped_gemm(out, x, w, *lists, weights, x_scales, scale, bias, *options)
            else:
                grouped_gemm_packed(out, x, w, scale, zeros, *lists, weights, bias, *options, codes)
        except OpError as error:
            names = {op: name.replace("1", str(number)) for op, name in _NAMES.items()}
            raise error.within("fused_experts", names) from None

    between = new(hidden_states, (num_rows, intermediate_size))
    first = between if limit is None else new(hidden_states, (num_rows, 2 * intermediate_size))
    if _scale_is_of_all(config) and config.a2_scale is None:
        first[...] = 0  # rows of experts that are elsewhere count among those of which the largest value is sought
    of_w1 = w1, config.w1_scale, w1_zp, config.w1_bias, config.a1_scale
    of_w2 = w2, config.w2_scale, w2_zp, config.w2_bias, config.a2_scale
    on_input, on_output = (topk_weights, None) if apply_router_weight_on_input else (None, topk_weights)
    function = activation if limit is None else "none"
    multiply(1, first, hidden_states, of_w1, on_input, topk, function)
    if limit is not None:
        silu_and_mul_with_clamp(between, first, limit)
    of_choices = new(hidden_states, (num_rows, hidden_size))
    multiply(2, of_choices, between, of_w2, on_output, 1, "none")
    moe_sum_experts(of_choices.reshape(num_tokens, topk, hidden_size), topk_ids, out, num_experts, expert_map)
    return out


def _codes(config: FusedMoEQuantConfig) -> tuple[str | None, Tensor | None, Tensor | None]:
    """(type of codes, zero points of w1, of w2) of what `grouped_gemm_packed` takes; no type for `grouped_gemm`.

    Objects of vLLM's class name the weights' dtype where activations are quantised as well.
    """

    def refuse(expected: str, got: Any) -> OpError:
        return OpError("fused_experts", "quant_config", f"expected {expected}, got {got}")

    dtype, of_activations = _name(getattr(config, "weight_quant_dtype", None)), _name(config.quant_dtype)
    w1_zp, w2_zp = (getattr(config, name, None) for name in ("w1_zp", "w2_zp"))
    if of_activations != "None" or dtype == "None":
        if dtype not in ("None", of_activations):
            raise refuse(f"weight_quant_dtype None or {of_activations}, as quant_dtype", dtype)
        if w1_zp is not None or w2_zp is not None:
            raise refuse("no zero points without a weight_quant_dtype", "w1_zp or w2_zp")
        return None, None, None
    in_groups = bool(config.block_shape and config.block_shape[1] > 0)
    codes = {"int4": "uint4", "int8": "uint8" if in_groups else "int8", "mxfp4": "float4_e2m1f"}.get(dtype)
    if codes is None:
        raise refuse("weight_quant_dtype None, int4, int8 or mxfp4 without quant_dtype", dtype)
    for name, scale in (("w1_scale", config.w1_scale), ("w2_scale", config.w2_scale)):
        if scale is None:
            raise refuse(f"{name} with weights of {dtype}", None)
    return codes, w1_zp, w2_zp


def _clamp_limit(config: FusedMoEQuantConfig, activation: str) -> float | None:
    """The bound of gates and ups of "silu"; None for none. The parameters of "swigluoai" are its own."""
    limit: float | None = getattr(config, "gemm1_clamp_limit", None)
    served: dict[str, tuple[float | None, ...]] = {"gemm1_clamp_limit": (None, limit)} if activation == "silu" else {}
    if activation not in ("silu", "swigluoai"):
        served["gemm1_clamp_limit"] = (None,)
    for name, own in _SWIGLUOAI.items():
        given, expected = getattr(config, name, None), served.get(name, (None, own))
        if given not in expected:
            values = " or ".join(map(str, expected))
            raise OpError("fused_experts", "quant_config", f"expected {name} {values} with {activation}, got {given}")
    return limit if activation == "silu" else None


def _check(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    per_byte: int,
) -> tuple[int, int, int, int]:
    """(num_tokens, hidden_size, topk, num_experts), of weights whose bytes hold so many codes."""
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
    (num_tokens, hidden_size), (num_experts, rows, _) = hidden_states.shape, w1.shape
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


def _scale_is_of_all(config: FusedMoEQuantConfig) -> bool:
    """Whether activations are quantised under one scale."""
    return _name(config.quant_dtype) == _FP8 and not config.per_act_token_quant and not config.block_shape


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _quantised(x: Tensor, config: FusedMoEQuantConfig, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows of an activation as the weights' scales want them, and their scales."""
    dtype = _name(config.quant_dtype)
    if dtype == "None":
        return x, None
    if dtype not in (_FP8, "int8"):
        raise OpError("fused_experts", "quant_config", f"expected quant_dtype None, {_FP8} or int8, got {dtype}")
    if config.block_shape:
        if list(config.block_shape) != [SCALE_BLOCK] * 2 or x.shape[1] % SCALE_BLOCK:
            expected = f"expected blocks of {SCALE_BLOCK} x {SCALE_BLOCK} that divide {x.shape[1]} columns"
            raise OpError("fused_experts", "quant_config", f"{expected}, got {config.block_shape}")
        codes = new(x, tuple(x.shape), dtype)
        if dtype == _FP8:
            return per_token_group_quant_fp8(x, SCALE_BLOCK, out_q=codes)
        scales = new(x, (x.shape[0], x.shape[1] // SCALE_BLOCK), "float32")
        per_token_group_quant_int8(x, codes, scales, SCALE_BLOCK, 1e-10, -128.0, _LARGEST_INT8)
        return codes, scales
    if dtype == "int8":
        codes, scales, _ = scaled_int8_quant(x, scale)
        return codes, scales
    codes = new(x, tuple(x.shape), dtype)
    return scaled_fp8_quant(x, scale, use_per_token_if_dynamic=config.per_act_token_quant, output=codes)


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
    """A layer of experts: the `topk` experts of each token by its logits, and `fused_experts` of them.

    Args:
        hidden_states, w1, w2, inplace, activation, global_num_experts, expert_map, quant_config: as in `fused_experts`.
        gating_output: [num_tokens, global_num_experts], logits, torch tensors.
        topk: experts of a token.
        renormalize: whether the weights of a token are divided by their sum.
        use_grouped_topk: whether experts are chosen by `fused_grouped_topk`, from the `topk_group` best of
            `num_expert_group` groups.
        custom_routing_function: ``(hidden_states, gating_output, topk, renormalize)`` returns weights and ids; or None,
            for the softmax of the logits.
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
