"""Mixtures of experts: the choice of experts for each token."""

from __future__ import annotations

from . import routing
from .routing import *

__all__: list[str] = []
__all__ += routing.__all__
