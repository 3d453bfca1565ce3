"""A mixture of experts with weights in Marlin's layout, end to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._core.errors import OpError
from .._core.tensors.tensor import new
from ..ops.activation.elementwise import gelu, relu2, silu
from ..ops.activation.gated import gelu_and_mul, silu_and_mul, swigluoai_and_mul, swiglustep_and_mul
from ..ops.linear.marlin_moe import moe_wna16_marlin_gemm
from ..ops.linear.packed_grouped_engines import block_size_of_packed
from ..ops.moe.rows import moe_sum_experts
from ..ops.quantize import scaled_fp8_quant, scaled_int8_quant
from .expert_products import sorted_choices, within

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["fused_marlin_moe"]

ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "swigluoai": swigluoai_and_mul,
    "swiglustep": swiglustep_and_mul,
    "silu_no_mul": silu,
    "gelu_no_mul": gelu,
    "relu2_no_mul": relu2,
}
# {argument of the GEMM op: argument of `fused_marlin_moe` for the first GEMM}; "1" becomes "2" for the second GEMM
_NAMES = {
    "a": "hidden_states",
    "c": "hidden_states",
    "b_q_weight": "w1",
    "b_bias": "bias1",
    "b_scales": "w1_scale",
    "g_idx": "g_idx1",
}
_NAMES |= {"global_scale": "global_scale1", "b_zeros": "w1_zeros", "perm": "sort_indices1", "top_k": "topk_ids"}
_NAMES |= {"b_type_id": "quant_type_id", "size_n": "w1", "size_k": "w1"}
_MOST_IN_FULL = 64  # largest block size of GEMMs with dequantised weights: M of WGMMA


def fused_marlin_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    w1_scale: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    quant_type_id: int,
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    activation: str = "silu",
    activation_func: Callable[[str, Tensor, Tensor], None] | None = None,
    moe_sum: Callable[[Tensor, Tensor], None] | None = None,
    expert_map: Tensor | None = None,
    input_global_scale1: Tensor | None = None,
    input_global_scale2: Tensor | None = None,
    global_scale1: Tensor | None = None,
    global_scale2: Tensor | None = None,
    g_idx1: Tensor | None = None,
    g_idx2: Tensor | None = None,
    sort_indices1: Tensor | None = None,
    sort_indices2: Tensor | None = None,
    w1_zeros: Tensor | None = None,
    w2_zeros: Tensor | None = None,
    workspace: Tensor | None = None,
    intermediate_cache13: Tensor | None = None,
    intermediate_cache2: Tensor | None = None,
    is_k_full: bool = True,
    output: Tensor | None = None,
    input_dtype: Any = None,
    inplace: bool = False,
) -> Tensor:
    """The experts of a layer: `fused_experts` with weights in Marlin's layout, by `moe_wna16_marlin_gemm`.

    After vLLM's function of this name. Experts that do not exist, or that another device holds, add nothing.

    Args:
        hidden_states: [num_tokens, hidden_size] float16 or bfloat16; rows of one stride.
        w1: [num_experts, hidden_size / 16, intermediate_size * bits] int32: gates, then ups (interleaved for
            "swigluoai"); half the columns for activations without gates.
        w2: [num_experts, intermediate_size / 16, hidden_size * bits / 2] int32.
        bias1, bias2, w1_scale, w2_scale, w1_zeros, w2_zeros, global_scale1, global_scale2, g_idx1, g_idx2: the
            arguments of `moe_wna16_marlin_gemm` for w1 and w2.
        sort_indices1, sort_indices2: perm of `moe_wna16_marlin_gemm`.
        topk_weights: [num_tokens, topk] float32, contiguous; topk_ids: likewise, int32 or int64.
        quant_type_id: the type of the quantized weights, a number of `pyops.SCALAR_TYPES`.
        apply_router_weight_on_input: whether router weights scale the first GEMM; then topk is 1.
        global_num_experts: experts on all devices; -1 for the size of expert_map or else w1.
        activation: gated: "silu", "gelu", "swigluoai" or "swiglustep"; without gates: "silu_no_mul", "gelu_no_mul" or
            "relu2_no_mul".
        activation_func: a function ``(activation, out, input)`` that replaces the activation; it has no gate if the
            name ends in "_no_mul".
        moe_sum: a function ``(input, out)`` that replaces the sum over each token's experts.
        expert_map: [global_num_experts] int32, contiguous: the local index of each expert, -1 if another device holds
            it; or None.
        input_dtype: int8 or float8_e4m3fn to quantise the inputs of both GEMMs per row, with weights for 8-bit
            activations, see `moe_wna16_marlin_gemm`; or None for 16-bit inputs.
        input_global_scale1, input_global_scale2: one float32 each, multiplies the row scales of int8; or None.
        workspace: accepted because vLLM has it; it has no effect.
        intermediate_cache13, intermediate_cache2: workspaces of the dtype of hidden_states: num_tokens * topk rows of
            the wider of both GEMMs' results, and num_tokens * topk rows of intermediate_size; or None. `output` may
            share the memory of the second.
        is_k_full: as in `moe_wna16_marlin_gemm`.
        output: [num_tokens, hidden_size], written; None for a new tensor, or hidden_states if `inplace`.

    Returns:
        [num_tokens, hidden_size].

    Examples:
        >>> w1 = torch.randint(-(2**31), 2**31 - 1, (8, 64 // 16, 128 * 4), dtype=torch.int32)  # of 8 experts
        >>> w2 = torch.randint(-(2**31), 2**31 - 1, (8, 128 // 16, 64 * 4 // 2), dtype=torch.int32)
        >>> scales = torch.full((8, 1, 256), 0.01).bfloat16(), torch.full((8, 1, 64), 0.01).bfloat16()
        >>> x, logits = torch.randn(5, 64).bfloat16(), torch.randn(5, 8)
        >>> weights, ids, _ = pyops.fused_topk(x, logits, 2, renormalize=True)
        >>> uint4b8 = pyops.SCALAR_TYPES["uint4b8"].id
        >>> pyops.fused_marlin_moe(x, w1, w2, None, None, *scales, weights, ids, uint4b8).shape
        torch.Size([5, 64])
    """
    num_tokens, hidden_size, topk, num_experts = _check(hidden_states, w1, w2, topk_weights, topk_ids)
    quantised = None if input_dtype in (None, hidden_states.dtype) else str(input_dtype).removeprefix("torch.")
    if quantised not in (None, "int8", "float8_e4m3fn"):
        expected = f"expected None, {hidden_states.dtype}, int8 or float8_e4m3fn"
        raise OpError("fused_marlin_moe", "input_dtype", f"{expected}, got {input_dtype}")
    for name, given in (("input_global_scale1", input_global_scale1), ("input_global_scale2", input_global_scale2)):
        if given is not None and quantised != "int8":
            raise OpError("fused_marlin_moe", name, f"expected None with an input_dtype of {input_dtype}")
    if apply_router_weight_on_input and topk != 1:
        raise OpError("fused_marlin_moe", "apply_router_weight_on_input", f"expected a topk of 1, got {topk}")
    if activation_func is None and activation not in ACTIVATIONS:
        expected = " or ".join(ACTIVATIONS)
        raise OpError("fused_marlin_moe", "activation", f"expected {expected}, got {activation}")
    if expert_map is not None:
        global_num_experts = expert_map.shape[0]
    elif global_num_experts < 0:
        global_num_experts = num_experts
    if output is None:
        output = hidden_states if inplace else new(hidden_states, (num_tokens, hidden_size))
    if num_tokens == 0:
        return output
    num_rows, intermediate_size = num_tokens * topk, w2.shape[1] * 16
    block_size = _MOST_IN_FULL
    if quantised is None:
        block_size = block_size_of_packed(num_rows, num_experts, *([] if is_k_full else [_MOST_IN_FULL]))
    lists = sorted_choices("fused_marlin_moe", topk_ids, block_size, global_num_experts, expert_map)

    def multiply(
        number: int, a: Tensor, weight: Tensor, of_weight: tuple[Any, ...], top_k: int, weighted: bool, n: int
    ) -> Tensor:
        sizes = a.shape[0], n, a.shape[1]
        routing = *lists, topk_weights if weighted else None, block_size, top_k, weighted
        c = _room(intermediate_cache13, "intermediate_cache13", hidden_states, (num_rows, n))
        if expert_map is not None and moe_sum is not None:
            c[...] = 0  # the sum over a token's experts reads rows of absent experts, too
        bias, scales, factor, *others = of_weight
        try:
            x, a_scales = (a, None) if quantised is None else _quantised(a, quantised, factor)
            given: list[Any] = [bias, scales, a_scales, *others, workspace, *routing, quant_type_id, *sizes, is_k_full]
            moe_wna16_marlin_gemm(x, c, weight, *given)
        except OpError as error:
            raise within(error, "fused_marlin_moe", _NAMES, number) from None
        return c

    of_w1 = bias1, w1_scale, input_global_scale1, global_scale1, w1_zeros, g_idx1, sort_indices1
    of_w2 = bias2, w2_scale, input_global_scale2, global_scale2, w2_zeros, g_idx2, sort_indices2
    columns = intermediate_size * (1 if activation.endswith("_no_mul") else 2)
    between = multiply(1, hidden_states, w1, of_w1, topk, apply_router_weight_on_input, columns)
    activated = _room(intermediate_cache2, "intermediate_cache2", hidden_states, (num_rows, intermediate_size))
    if activation_func is None:
        ACTIVATIONS[activation](activated, between)
    else:
        activation_func(activation, activated, between)
    of_choices = multiply(2, activated, w2, of_w2, 1, not apply_router_weight_on_input, hidden_size)
    choices = of_choices.reshape(num_tokens, topk, hidden_size)
    if moe_sum is None:
        moe_sum_experts(choices, topk_ids, output, num_experts, expert_map)
    else:
        moe_sum(choices, output)
    return output


def _room(cache: Tensor | None, name: str, like: Tensor, shape: tuple[int, int]) -> Tensor:
    """A matrix of `shape` at the start of the caller's workspace, or a new one."""
    if cache is None:
        return new(like, shape)
    flat, count = cache.reshape(-1), shape[0] * shape[1]
    if cache.dtype != like.dtype or flat.shape[0] < count:
        expected = f"expected {count} elements of {like.dtype}"
        raise OpError("fused_marlin_moe", name, f"{expected}, got shape {tuple(cache.shape)} of {cache.dtype}")
    return flat[:count].reshape(shape)


def _quantised(x: Tensor, dtype: str, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """(quantized values, per-row scales times the factor)."""
    if dtype == "int8":
        codes, scales, _ = scaled_int8_quant(x)
        return codes, scales if factor is None else scales * factor
    codes = new(x, tuple(x.shape), dtype)
    return scaled_fp8_quant(x, None, use_per_token_if_dynamic=True, output=codes)


def _check(
    hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor
) -> tuple[int, int, int, int]:
    """(num_tokens, hidden_size, topk, num_experts)."""
    for name, tensor, rank in (
        ("hidden_states", hidden_states, 2),
        ("w1", w1, 3),
        ("w2", w2, 3),
        ("topk_ids", topk_ids, 2),
    ):
        if len(tensor.shape) != rank:
            raise OpError("fused_marlin_moe", name, f"expected {rank} dimensions, got shape {tuple(tensor.shape)}")
    (num_tokens, hidden_size), topk = hidden_states.shape, topk_ids.shape[1]
    for name, tensor, shape in (
        ("topk_ids", topk_ids, (num_tokens, topk)),
        ("topk_weights", topk_weights, (num_tokens, topk)),
    ):
        if tuple(tensor.shape) != shape:
            raise OpError("fused_marlin_moe", name, f"expected shape {shape}, got {tuple(tensor.shape)}")
    return num_tokens, hidden_size, topk, w1.shape[0]
