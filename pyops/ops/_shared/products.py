"""Tensor cores and AMD's matrix cores: the dtypes of their operands."""

from __future__ import annotations

from ..._core.system.device import Device
from ..._core.tensors.dtypes import DType, bfloat16, float32


def multiplies(dtype: DType, device: Device) -> bool:
    """Whether product.cuh multiplies elements of a dtype on a device: not float32, and bfloat16 from sm_80 on."""
    return dtype is not float32 and device.supports("bfloat16_products" if dtype is bfloat16 else "products")
