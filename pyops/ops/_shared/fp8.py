"""fp8: the e4m3 format of a device, the dtypes of fp8 caches, and the quantization that references use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.op.planner import Result
from ..._core.system import device as devices
from ..._core.system.device import Device
from ..._core.system.lazy import torch
from ..._core.tensors import dtypes
from ..._core.tensors.dtypes import DType, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float32, int8, uint8
from ..._core.tensors.tensor import TensorArg, device_of, on_host

if TYPE_CHECKING:
    from torch import Tensor

# {kv_cache_dtype: element type of an fp8 cache}. `of_codes` replaces float8_e4m3fn by float8_e4m3fnuz where needed.
FP8_CACHES = {"fp8": float8_e4m3fn, "fp8_e4m3": float8_e4m3fn, "fp8_e5m2": float8_e5m2}

_CACHE_NAMES = {kind.name: name for name, kind in FP8_CACHES.items()}

# The largest magnitude that quantization writes. float8_e4m3fnuz reaches 240, but quantization saturates at 224 by
# convention.
_LARGEST_CODES = {"float8_e4m3fn": 448.0, "float8_e4m3fnuz": 224.0}


def native_fp8(device: Device) -> DType:
    """The e4m3 format of a device, in which fp8 checkpoints for it are stored."""
    return native_fp8_of(device.arch)


def native_fp8_of(arch: str) -> DType:
    """The e4m3 format of an architecture: float8_e4m3fnuz on MI300, float8_e4m3fn elsewhere."""
    return float8_e4m3fnuz if arch in ("gfx940", "gfx941", "gfx942") else float8_e4m3fn


def chosen(input: TensorArg, quant_dtype: Any) -> DType:
    """The element type of new quantized values of `input`: `quant_dtype` of the call, or the e4m3 of the device."""
    return check.chosen(input, "quant_dtype", quant_dtype, native_fp8(input.device))


def own_fp8(x: Any) -> str:
    """Name of the `native_fp8` of the device of `x`, a tensor or an array. torch.compile can trace this function."""
    if hasattr(x, "new_empty"):
        import torch  # the module itself: torch.compile does not trace the proxy

        if torch.version.hip is None or not x.is_cuda:
            return float8_e4m3fn.name
        return native_fp8_of(torch.cuda.get_device_properties(x.device).gcnArchName.split(":")[0]).name
    return (float8_e4m3fn if on_host(x) else native_fp8(devices.get(x.device.id))).name


def converts_fp8(device: Device) -> bool:
    """Whether a device has instructions that convert to and from float8_e4m3fn. Others emulate it."""
    if device.arch.startswith("sm_"):
        return int(device.arch[3:]) >= 89
    return device.arch.startswith(("gfx95", "gfx12"))


def converts_to(out: TensorArg) -> bool:
    """Whether the device has instructions that convert to the dtype of `out`, int8 or an e4m3."""
    if out.dtype is float8_e4m3fnuz:
        return native_fp8(out.device) is float8_e4m3fnuz
    return out.dtype is int8 or converts_fp8(out.device)


def e4m3_name(dtype: Any) -> str | None:
    """Name of an e4m3 dtype, given as a dtype of any library or by name; None for any other dtype."""
    name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    return name if name in _LARGEST_CODES else None


def largest_code(e4m3: Any) -> float:
    """The largest magnitude that quantization to an e4m3 dtype writes; the dtype is one of any library, or a name."""
    return _LARGEST_CODES[str(e4m3).removeprefix("torch.")]


def of_codes(kv_cache_dtype: str, given: DType, native: DType) -> DType:
    """Element type of an fp8 cache given as a tensor of dtype `given`. uint8 means `native`, the e4m3 of the device."""
    kind = FP8_CACHES[kv_cache_dtype]
    if kind is float8_e4m3fn and (native if given is uint8 else given) is float8_e4m3fnuz:
        return float8_e4m3fnuz
    return kind


def cache_dtype(cache: TensorArg, kv_cache_dtype: str, model: DType) -> DType:
    """Check `cache` and `kv_cache_dtype`; returns the element type of the cache.

    "auto" means `model`, the dtype of the other tensors. An fp8 cache has its fp8 dtype or uint8.
    """
    if kv_cache_dtype == "auto":
        check.dtype(cache, model)
        return model
    if kv_cache_dtype not in FP8_CACHES:
        expected = " or ".join(("auto", *FP8_CACHES))
        raise check.refuse(cache, "kv_cache_dtype", f"expected {expected}, got {kv_cache_dtype}")
    kind = of_codes(kv_cache_dtype, cache.dtype, native_fp8(cache.device))
    check.dtype(cache, uint8, kind)
    return kind


def name_of_cache(dtype: Any) -> str:
    """The kv_cache_dtype of a cache of this torch dtype: "auto", unless it is float8."""
    return _CACHE_NAMES.get(str(dtype).removeprefix("torch."), "auto")


def cache_codes(cache: Tensor, kv_cache_dtype: str) -> Any:
    """The torch fp8 dtype of an fp8 cache. The tensor itself may be uint8."""
    given = dtypes.of(cache.dtype)
    assert given is not None
    return getattr(torch, of_codes(kv_cache_dtype, given, native_fp8(device_of(cache))).name)


def saturate(x: Tensor, dtype: Any) -> Tensor:
    """Saturating conversion of float32 to fp8; NaN becomes the largest value."""
    largest = largest_code(dtype)
    return x.nan_to_num(nan=largest, posinf=largest, neginf=-largest).clamp(-largest, largest).to(dtype)


def static_codes(x: Tensor, scale: Tensor, dtype: Any) -> Tensor:
    """fp8 of `x` times the reciprocal of `scale`. A reciprocal that is infinite counts as 0."""
    reciprocal = 1.0 / scale
    return saturate(x * reciprocal.masked_fill(reciprocal.isinf(), 0.0), dtype)


def absmax(x: Tensor) -> Tensor:
    """The largest magnitude of each row, NaN ignored; the last dimension is kept."""
    return x.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1, keepdim=True)


def group_scales(input: TensorArg, hidden_size: int, group_size: int, transposed: bool) -> Result:
    """The new scales of the groups of each row of `input`, with columns contiguous if `transposed`."""
    num_rows = check.num_rows(input)
    return Result((num_rows, hidden_size // max(1, group_size)), float32, num_rows if transposed else 0)


def has_group_rows(shape: Sequence[int], strides: Sequence[int], num_tokens: int, groups: int) -> bool:
    """Whether transposed scales are [groups, num_tokens] and contiguous, not [num_tokens, groups] with other strides.

    vLLM's kernels write transposed scales in this order of memory without looking at their shape.
    """
    if tuple(shape) != (groups, num_tokens):
        return False
    return (groups == 1 or strides[0] == num_tokens) and (num_tokens == 1 or strides[1] == 1)


def dynamic_codes(y: Tensor, absmax: Tensor, scale_ub: Tensor | None, dtype: Any) -> tuple[Tensor, Tensor]:
    """(quantized values, scales) of float32 rows `y` with these `absmax`, rounded as specified.

    Divisors are tensors: on a GPU, torch divides by a Python number through the number's reciprocal.
    """
    if scale_ub is not None:
        absmax = torch.fmin(absmax, scale_ub.reshape(()))
    if dtype == torch.int8:
        scale = torch.fmax(absmax / torch.full_like(absmax, 127.0), torch.full_like(absmax, 2.0**-23))
        return (y * (1.0 / scale)).nan_to_num(nan=0.0).round().clamp(-128, 127).to(dtype), scale
    largest = torch.full_like(absmax, largest_code(dtype))
    scale = torch.fmax(absmax / largest, 1.0 / (largest * 512.0))
    return saturate(y / scale, dtype), scale
