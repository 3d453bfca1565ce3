"""Matrix products."""

from __future__ import annotations

from . import linear as _linear
from . import skinny_linear as _skinny_linear
from .linear import *
from .skinny_linear import *

__all__: list[str] = []
__all__ += _linear.__all__
__all__ += _skinny_linear.__all__
