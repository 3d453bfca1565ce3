"""Rotary embedding (Su et al. 2021, arXiv:2104.09864) rotates pairs of elements of a head by position-dependent
angles."""

from __future__ import annotations

from . import apply, dual_chunk, embedding, multimodal
from .apply import *
from .dual_chunk import *
from .embedding import *
from .multimodal import *

__all__: list[str] = []
__all__ += embedding.__all__
__all__ += multimodal.__all__
__all__ += apply.__all__
__all__ += dual_chunk.__all__
