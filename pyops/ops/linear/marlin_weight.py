"""Weights in Marlin's layout: the checks of ops that multiply them, and how callers prepare scales for Marlin."""

from __future__ import annotations

from typing import Any

from ... import check
from ..._core.tensors import dtypes
from ..._core.tensors.dtypes import DType, bfloat16, float8_e4m3fn, float8_e8m0fnu, float16, float32, int8, int32, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared.packed_layouts import ColumnOrder
from .._shared.scalar_type import ScalarType, float4_e2m1f, uint4, uint4b8, uint8b128
from .._shared.scalar_type import float8_e4m3fn as fp8
from .._shared.scalar_type import uint8 as uint8_codes
from .packed_problem import PackedWeight, ScaleKind

# {dtype of activations: types of weights}
TYPES: dict[DType, tuple[ScalarType, ...]] = {
    **dict.fromkeys((float16, bfloat16), (uint4b8, uint8b128, uint4, uint8_codes, fp8, float4_e2m1f)),
    int8: (uint4b8, uint4, uint8b128),
    float8_e4m3fn: (uint4b8, uint4, float4_e2m1f),
}
# Marlin moves the bits of e4m3 and e2m1 to the bits of a 16-bit float. This divides the numbers by two to the
# difference of the exponent biases, and callers multiply the scales by the inverse.
_FP8_EXPONENTS: dict[DType | None, int] = {float16: 8, bfloat16: 120}
_FP4_EXPONENTS: dict[DType | None, int] = {float16: 14, bfloat16: 126}
_NVFP4_EXPONENT = 7  # NVFP4: exponent that callers add to block scales and take from the global scale
_INT4_AS_FP8_EXPONENT = 9  # exponent of scales for int4 weights that become subnormal e4m3 numbers
_MXFP4_AS_FP8_EXPONENT = 6  # exponent of scales for e2m1 weights moved to the bits of e4m3
_INT16_EXPONENT = 12  # int8 activations: exponent of the largest scale, where scales are integers
E8M0 = (float8_e8m0fnu, uint8)


def marlin_weight(
    a: Any,
    b_q_weight: Any,
    b_scales: Any,
    global_scale: Any,
    b_zeros: Any,
    g_idx: Any,
    perm: Any,
    b_type_id: int,
    n: int,
    k: int,
    is_k_full: bool,
    is_zp_float: bool,
) -> tuple[PackedWeight, dict[str, Any]]:
    """The weight, of tensors or their descriptors, and the epilogue arguments for its scales."""
    kind, dtype, groups = ScalarType.of(b_type_id), dtypes.of(a.dtype), b_scales.shape[0]
    is_a_8bit, is_mxfp8 = dtype is not None and dtype.itemsize == 1, kind == fp8 and dtypes.of(b_scales.dtype) in E8M0
    grouped = groups > 1 or is_zp_float or kind == float4_e2m1f
    order: ColumnOrder = "marlin_fp4" if is_mxfp8 else scale_order(kind, groups, is_a_8bit)
    form: ScaleKind = "float"
    exponent = 0
    scales: dict[str, Any] = {}
    if is_mxfp8:  # Marlin multiplies the e4m3 values themselves: scales of this range could not make up for the shift
        form = "e8m0"
    elif kind == fp8:
        exponent = -_FP8_EXPONENTS[dtype]
    elif kind == float4_e2m1f:
        form, exponent = "e8m0", -_MXFP4_AS_FP8_EXPONENT if is_a_8bit else 0
        if global_scale is not None:
            form, exponent = "e5m3", -_NVFP4_EXPONENT
            scales = {"a_scales": global_scale, "scale_exponent": _NVFP4_EXPONENT - _FP4_EXPONENTS[dtype]}
    elif dtype is float8_e4m3fn:
        exponent = -_INT4_AS_FP8_EXPONENT
    elif dtype is int8 and grouped:  # integer scales; their products with quants fit into float16
        form, exponent, scales = "int16", -_INT16_EXPONENT, {"scale_exponent": _INT16_EXPONENT}
    if not grouped:
        scales = {"b_scales": b_scales, "scale_exponent": exponent}
    permuted, b_zeros = given(perm) is not None, given(b_zeros)
    weight = PackedWeight(
        b_q_weight,
        "marlin_8" if is_a_8bit else "marlin",
        kind,
        k,
        n,
        groups,
        k // max(1, groups),
        b_scales if grouped else None,
        order,
        form,
        exponent if grouped else 0,
        zeros=b_zeros,
        zero_kind="none" if b_zeros is None else "floats" if is_zp_float else "codes",
        zero_layout="marlin_8" if is_a_8bit else "marlin",
        g_idx=g_idx if permuted and not is_k_full and groups > 1 else None,
        perm=perm if permuted else None,
        recoding="marlin_fp8" if dtype is float8_e4m3fn and kind.is_integer else "none",
    )
    return weight, scales


def given(tensor: Any) -> Any:
    """None for a tensor of shape (0,), which vLLM's layers pass for an absent tensor."""
    return None if tensor is None or tuple(tensor.shape) == (0,) else tensor


def scale_order(kind: ScalarType, groups: int, is_a_8bit: bool = False) -> ColumnOrder:
    """The column order of the scales of a weight of this type with `groups` groups."""
    if is_a_8bit:
        return "marlin_32"
    if kind == float4_e2m1f:
        return "marlin_fp4"
    return "marlin_32" if groups == 1 else "marlin_64"


def check_types(a: TensorArg, b_type_id: int) -> ScalarType:
    """Check that weights of this type can have activations of the dtype of a; returns the type."""
    check.dtype(a, *TYPES)
    kind = next((one for one in TYPES[a.dtype] if one.id == b_type_id), None)
    if kind is None:
        names = " or ".join(f"{one} ({one.id})" for one in TYPES[a.dtype])
        raise check.refuse(a, "b_type_id", f"expected {names} with {a.dtype} activations, got {b_type_id}")
    return kind


def check_sizes(a: TensorArg, size_m: int, size_n: int, size_k: int) -> None:
    """Check that a is [size_m, size_k], and that Marlin's tiles divide the weight's sizes."""
    check.sizes(a, size_m=size_m, size_k=size_k)
    for name, size, multiple in (("size_k", size_k, 16 if a.dtype.itemsize > 1 else 32), ("size_n", size_n, 64)):
        if size % multiple or size < 0:
            raise check.refuse(a, name, f"expected a multiple of {multiple}, got {size}")


def check_out(c: TensorArg, a: TensorArg, b_scales: TensorArg, num_rows: int, n: int) -> None:
    """Check c. Its dtype is that of a; with 8-bit activations that of the scales; with e8m0 scales any 16-bit float."""
    any_dtype = b_scales.dtype in E8M0 and a.dtype is float8_e4m3fn
    check.dtype(c, *((float16, bfloat16) if any_dtype else (out_dtype(a, b_scales),)))
    check.sizes(c, num_rows=num_rows, N=n)
    check.row_size(c)


def out_dtype(a: TensorArg, b_scales: TensorArg) -> DType:
    """The dtype of a new result."""
    return a.dtype if a.dtype.itemsize > 1 else bfloat16 if b_scales.dtype in E8M0 else b_scales.dtype


def check_scales(
    a: TensorArg,
    b_scales: TensorArg,
    a_scales: TensorArg | None,
    global_scale: TensorArg | None,
    kind: ScalarType,
    n: int,
    k: int,
) -> None:
    """Check scales of groups, of the whole weight, and of activations."""
    is_a_8bit, is_fp4 = a.dtype.itemsize == 1, kind == float4_e2m1f
    is_mx = is_fp4 or (kind == fp8 and b_scales.dtype in E8M0)
    allowed: tuple[DType, ...] = (float16, bfloat16) if is_a_8bit else (a.dtype,)
    if is_fp4:
        allowed = E8M0 if is_a_8bit or global_scale is None else (float8_e4m3fn,)
    elif kind == fp8:
        allowed = (a.dtype, *E8M0)
    check.dtype(b_scales, *allowed)
    check.sizes(b_scales, num_groups=None, N=n)
    check.contiguous(b_scales)
    groups = b_scales.shape[0]
    if groups == 0 or k % groups or (is_mx and groups == 1):
        expected = "several groups that divide" if is_mx else "groups that divide"
        raise b_scales.error(f"expected {expected} K, {k}, got {groups}")
    for scale, wanted in ((a_scales, is_a_8bit), (global_scale, is_fp4 and b_scales.dtype is float8_e4m3fn)):
        if scale is not None and not wanted:
            raise scale.error(f"expected None with {a.dtype} activations and {kind} codes")
    if is_a_8bit:
        if a_scales is None:
            raise check.refuse(a, "a_scales", f"expected scales of the rows with {a.dtype} activations, got None")
        check.dtype(a_scales, float32)
        if a_scales.numel not in (1, a.shape[0]):
            raise a_scales.error(f"expected 1 or {a.shape[0]} elements, got shape {a_scales.shape}")
        check.contiguous(a_scales)
    if global_scale is not None:
        check.dtype(global_scale, a.dtype, float32)
        check.scalar(global_scale, global_scale.dtype)


def check_zeros(
    a: TensorArg, b_scales: TensorArg, b_zeros: TensorArg | None, kind: ScalarType, n: int, is_zp_float: bool
) -> None:
    """Check zero points, which unsigned integers without a bias have."""
    wanted, b_zeros = kind in (uint4, uint8_codes), given(b_zeros)
    if (b_zeros is not None) != wanted:
        expected = "zero points" if wanted else "None"
        raise check.refuse(a, "b_zeros", f"expected {expected} with {kind} codes")
    if is_zp_float and (not wanted or a.dtype.itemsize == 1):
        raise check.refuse(a, "is_zp_float", f"expected False with {a.dtype} activations and {kind} codes")
    if is_zp_float:
        check.shape(b_zeros, b_scales.dtype, num_groups=b_scales.shape[0], N=n)
    else:
        check.shape(b_zeros, int32, num_groups=b_scales.shape[0], words=n * kind.size_bits // 32)


def check_order(g_idx: TensorArg | None, perm: TensorArg | None, k: int) -> None:
    """Check the order of rows: both tensors are given, or none."""
    check.dtype(g_idx, int32)
    check.dtype(perm, int32)
    both = [one for one in map(given, (g_idx, perm)) if one is not None]
    if len(both) == 1:
        raise both[0].error("expected both g_idx and perm, or none of them")
    for one in both:
        check.shape(one, int32, K=k)
