"""Mixtures of experts: rows of tokens in the order of their experts, and back."""

from __future__ import annotations

from . import align, align_lora, permute, rows, sizes, sizes_batched
from .align import *
from .align_lora import *
from .permute import *
from .rows import *
from .sizes import *
from .sizes_batched import *

__all__: list[str] = []
__all__ += align.__all__
__all__ += align_lora.__all__
__all__ += permute.__all__
__all__ += rows.__all__
__all__ += sizes.__all__
__all__ += sizes_batched.__all__
