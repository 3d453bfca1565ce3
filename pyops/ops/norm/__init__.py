"""Normalisation: root-mean-square and layer norms, alone and fused with residual, quantisation and rotary embedding."""

from __future__ import annotations

from . import layer, quant, rms, rope
from .layer import *
from .quant import *
from .rms import *
from .rope import *

__all__: list[str] = []
__all__ += rms.__all__
__all__ += quant.__all__
__all__ += layer.__all__
__all__ += rope.__all__
