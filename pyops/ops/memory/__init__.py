"""Tensors that alias memory of other tensors, and attributes of a device."""

from __future__ import annotations

from . import device_memory
from .device_memory import *

__all__: list[str] = []
__all__ += device_memory.__all__
