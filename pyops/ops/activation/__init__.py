"""Activations: gated ones, which multiply one half of a row by the activated other half, and elementwise ones."""

from __future__ import annotations

from . import elementwise, gated, masked, quant, soft_cap, sparse
from .elementwise import *
from .gated import *
from .masked import *
from .quant import *
from .soft_cap import *
from .sparse import *

__all__: list[str] = []
__all__ += gated.__all__
__all__ += sparse.__all__
__all__ += quant.__all__
__all__ += masked.__all__
__all__ += elementwise.__all__
__all__ += soft_cap.__all__
