"""The two grouped GEMMs of a mixture of experts with the activation: one output row per (token, expert) pair.

`fused_experts` and vLLM's modular experts share it. Callers allocate the result and reduce it over each token's
experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from .._core.errors import OpError
from .._core.tensors.tensor import library_of, new, on_host
from ..ops.activation.gated import silu_and_mul_with_clamp
from ..ops.linear.gemm_problem import SCALE_BLOCK
from ..ops.linear.grouped import grouped_gemm
from ..ops.linear.grouped_blocks import Quants, limits_of_experts, of_rows
from ..ops.linear.grouped_packed import grouped_gemm_packed
from ..ops.linear.grouped_shape import Scales
from ..ops.linear.quantized_experts import MX_BLOCK
from ..ops.linear.skinny_experts import skinny_experts, skinny_experts_sum
from ..ops.moe.align import moe_align
from ..ops.quantize import per_token_group_quant_fp8, per_token_group_quant_int8, scaled_fp8_quant, scaled_int8_quant
from ..tuning import pinned_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ExpertSizes",
    "SortedRows",
    "block_size_of",
    "clamp_limit_of",
    "codes_of",
    "multiply_experts",
    "multiply_experts_of_token",
    "scale_is_of_all",
    "sorted_choices",
    "within",
]

_FP8 = "float8_e4m3fn"
_LARGEST_INT8 = 127.0
# {argument of the GEMM ops: argument of `fused_experts` for the first GEMM}; "1" becomes "2" for the second GEMM
_NAMES = {"b": "w1", "b_scales": "w1_scale", "b_zeros": "w1_zp", "bias": "w1_bias", "a_scales": "a1_scale"}
_NAMES |= {"weight": "w1", "scale": "a1_scale", "top_k": "topk_ids"}
_NAMES |= dict.fromkeys(("a", "input", "out"), "hidden_states")
_SWIGLUOAI = {"gemm1_alpha": 1.702, "gemm1_beta": 1.0, "gemm1_clamp_limit": 7.0}  # the fixed constants of "swigluoai"


class ExpertSizes(NamedTuple):
    """Sizes of a layer of experts: the experts of this device, of all devices, and those of a token."""

    num_experts: int
    global_num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


class SortedRows(NamedTuple):
    """Rows sorted by expert, as `moe_align` returns them for blocks of `block_size` slots."""

    sorted_token_ids: Tensor
    expert_ids: Tensor
    num_tokens_post_pad: Tensor
    block_size: int


def multiply_experts(
    of_choices: Tensor,
    between: Tensor,
    first: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    weights: tuple[Tensor | None, Tensor | None],
    activation: str,
    global_num_experts: int,
    expert_map: Tensor | None,
    config: Any,
    a1_scale: Tensor | None = None,
    lists: SortedRows | None = None,
) -> None:
    """Sort (token, expert) pairs by expert; run a grouped GEMM with the activation in its epilogue, then a second GEMM.

    Rows of pairs with an expert that does not exist, or that another device holds, are not written.

    Args:
        of_choices: [num_tokens * topk, hidden_size] float16, bfloat16 or float32, written: a row for each (token,
            expert) pair.
        between: [num_tokens * topk, intermediate_size] of the same dtype, written: the activation's result.
        first: the output of the first GEMM: `between`, or, for a clamped activation (`clamp_limit_of`),
            [num_tokens * topk, 2 * intermediate_size].
        hidden_states: [num_tokens, hidden_size] of the dtype of of_choices; or, with `a1_scale`, already quantised.
        w1, w2, topk_ids, activation, global_num_experts, expert_map: as in `fused_experts`.
        weights: (for the first GEMM, for the second GEMM): router weights [num_tokens, topk] float32 that multiply the
            rows of its result; or None.
        config: a `FusedMoEQuantConfig`, this library's or vLLM's.
        a1_scale: scales of quantised hidden_states, as `a_scales` of `grouped_gemm`.
        lists: the rows of each expert, if the caller has them; None to sort here.

    Raises:
        OpError: the GEMM ops refuse the arguments; the error has the argument names of `fused_experts`.
    """
    codes, limit = codes_of(config), clamp_limit_of(config, activation)
    top_k, function = topk_ids.shape[1], activation if limit is None else "none"
    if lists is None:
        sizes = ExpertSizes(w1.shape[0], global_num_experts, top_k, of_choices.shape[1], between.shape[1])
        block_size = block_size_of(config, sizes, activation, of_choices, of_choices.shape[0])
        found = sorted_choices("fused_experts", topk_ids, block_size, global_num_experts, expert_map)
        lists = SortedRows(*found, block_size)
    rows, block_size = lists[:3], lists.block_size
    w1_zp, w2_zp = zeros_of(config)

    def multiply(
        number: int, out: Tensor, x: Tensor, of_weight: tuple[Any, ...], weights: Any, top_k: int, function: str
    ) -> None:
        w, scale, zeros, bias, a_scale = of_weight
        options = top_k, block_size, function
        try:
            if codes is None:
                quantised = number == 1 and a1_scale is not None
                x, x_scales = (x, a1_scale) if quantised else _quantised(x, config, a_scale)
                grouped_gemm(out, x, w, *rows, weights, x_scales, scale, bias, *options)
            else:
                grouped_gemm_packed(out, x, w, scale, zeros, *rows, weights, bias, *options, codes)
        except OpError as error:
            raise within(error, "fused_experts", _NAMES, number) from None

    if scale_is_of_all(config) and config.a2_scale is None:
        first[...] = 0  # rows of experts on other devices are not written, but the per-tensor absmax reads them
    of_w1 = w1, config.w1_scale, w1_zp, config.w1_bias, config.a1_scale
    of_w2 = w2, config.w2_scale, w2_zp, config.w2_bias, config.a2_scale
    multiply(1, first, hidden_states, of_w1, weights[0], top_k, function)
    if limit is not None:
        silu_and_mul_with_clamp(between, first, limit)
    multiply(2, of_choices, between, of_w2, weights[1], 1, "none")


def multiply_experts_of_token(
    out: Tensor,
    between: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    config: Any,
    addend: Tensor | None = None,
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
) -> None:
    """Both GEMMs of one token with weights that are not quantised, and the sum of its choices and of `addend`.

    The experts of one token share no rows, so nothing is sorted. Arguments are those of `multiply_experts`, and the
    weights `shared` of both ops: `between` has a row for each part of the shared MLP, too.

    Raises:
        OpError: the GEMM ops refuse the arguments; the error has the argument names of `fused_experts`.
    """
    number = 1
    try:
        skinny_experts(between, hidden_states, w1, topk_ids, config.w1_bias, activation, shared_w1)
        number = 2
        skinny_experts_sum(out, between, w2, topk_ids, topk_weights, config.w2_bias, addend, shared_w2)
    except OpError as error:
        raise within(error, "fused_experts", _NAMES, number) from None


def within(error: OpError, function: str, names: Mapping[str, str], number: int) -> OpError:
    """The error of a GEMM op for `function`. `names` are {argument of the op: argument for the first GEMM}; "1" becomes
    the number of the GEMM."""
    return error.within(function, {op: name.replace("1", str(number)) for op, name in names.items()})


def sorted_choices(
    function: str, topk_ids: Tensor, block_size: int, global_num_experts: int, expert_map: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The choices of tokens by `moe_align`, without those of experts that are not here. Errors name `function`."""
    try:
        return moe_align(topk_ids, block_size, global_num_experts, expert_map, ignore_invalid_experts=True)
    except OpError as error:
        raise error.within(function, {"num_experts": "global_num_experts"}) from None


def block_size_of(config: Any, sizes: ExpertSizes, activation: str, like: Any, num_rows: int) -> int:
    """The block size with which the products of `multiply_experts` are fastest.

    Args:
        config: a `FusedMoEQuantConfig`, this library's or vLLM's.
        activation: one of those of `grouped_gemm`.
        like: a tensor of the dtype of the result, on its device.
        num_rows: (token, expert) pairs, with the experts of all devices.
    """
    num_rows = -(-num_rows * sizes.num_experts // max(1, sizes.global_num_experts))
    dtype, quantised = _name(like.dtype), _name(config.quant_dtype)
    scales: Scales = "none" if quantised == "None" else "block" if config.block_shape else "row"
    dtypes = dtype, dtype if quantised == "None" else quantised
    # torch.compile may hold sizes of a layer for symbols. An index is a number; the graph is for layers of this size.
    num_experts, top_k = index(sizes.num_experts), index(sizes.top_k)
    of_layer = num_experts, top_k, index(sizes.hidden_size), index(sizes.intermediate_size)
    found = limits_of_experts(of_layer, activation, dtypes, scales, _index_of(like), _quants_of(config))
    return of_rows(pinned_rows(num_rows, num_experts), found)


def _quants_of(config: Any) -> Quants | None:
    """The format of weights for `grouped_gemm_packed`; None for `grouped_gemm`."""
    if (kind := codes_of(config)) is None:
        return None
    in_groups = index(config.block_shape[1]) if config.block_shape else 0
    has_zeros = any(one is not None for one in zeros_of(config))
    return kind, MX_BLOCK if kind == "float4_e2m1f" else max(0, in_groups), has_zeros


def _index_of(value: Any) -> int:
    """The ordinal of a tensor's device; -1 for host memory."""
    if on_host(value):
        return -1
    return int(value.get_device() if library_of(value) == "torch" else value.device.id)


def zeros_of(config: Any) -> tuple[Tensor | None, Tensor | None]:
    """Zero points of w1 and of w2."""
    return getattr(config, "w1_zp", None), getattr(config, "w2_zp", None)


def codes_of(config: Any) -> str | None:
    """The type of the weights for `grouped_gemm_packed` (weight-only quantization); None for `grouped_gemm`.

    vLLM's class also sets weight_quant_dtype if activations are quantised.
    """

    def refuse(expected: str, got: Any) -> OpError:
        return OpError("fused_experts", "quant_config", f"expected {expected}, got {got}")

    dtype, of_activations = _name(getattr(config, "weight_quant_dtype", None)), _name(config.quant_dtype)
    w1_zp, w2_zp = zeros_of(config)
    if of_activations != "None" or dtype == "None":
        if dtype not in ("None", of_activations):
            raise refuse(f"weight_quant_dtype None or {of_activations}, as quant_dtype", dtype)
        if w1_zp is not None or w2_zp is not None:
            raise refuse("no zero points without a weight_quant_dtype", "w1_zp or w2_zp")
        return None
    in_groups = bool(config.block_shape and config.block_shape[1] > 0)
    codes = {"int4": "uint4", "int8": "uint8" if in_groups else "int8", "mxfp4": "float4_e2m1f"}.get(dtype)
    if codes is None:
        raise refuse("weight_quant_dtype None, int4, int8 or mxfp4 without quant_dtype", dtype)
    for name, scale in (("w1_scale", config.w1_scale), ("w2_scale", config.w2_scale)):
        if scale is None:
            raise refuse(f"{name} with weights of {dtype}", None)
    return codes


def clamp_limit_of(config: Any, activation: str) -> float | None:
    """The clamp limit of gate and up with "silu", or None. "swigluoai" always has the same clamp."""
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


def scale_is_of_all(config: Any) -> bool:
    """Whether activations are quantised with one per-tensor scale."""
    return _name(config.quant_dtype) == _FP8 and not config.per_act_token_quant and not config.block_shape


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _quantised(x: Tensor, config: Any, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Activations quantised as `config` says (per block, per token or per tensor), and their scales."""
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
