"""Activation functions, alone, gated, and fused with quantisation."""

from __future__ import annotations

from . import activation
from .activation import *

__all__: list[str] = []
__all__ += activation.__all__
