"""Rotary position embedding."""

from __future__ import annotations

from . import rotary
from .rotary import *

__all__: list[str] = []
__all__ += rotary.__all__
