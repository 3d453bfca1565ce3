"""Mixtures of experts: the choice of experts for each token."""

from __future__ import annotations

from . import routing, routing_fused, routing_grouped
from .routing import *
from .routing_fused import *
from .routing_grouped import *

__all__: list[str] = []
__all__ += routing.__all__
__all__ += routing_grouped.__all__
__all__ += routing_fused.__all__
