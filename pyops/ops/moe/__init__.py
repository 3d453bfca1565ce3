"""Mixtures of experts: routing of tokens to experts, permutation of rows by expert, and the reverse."""

from __future__ import annotations

from . import (
    align,
    align_lora,
    permute,
    prepare_scatter,
    routing,
    routing_fused,
    routing_grouped,
    rows,
    sizes,
    sizes_batched,
)
from .align import *
from .align_lora import *
from .permute import *
from .prepare_scatter import *
from .routing import *
from .routing_fused import *
from .routing_grouped import *
from .rows import *
from .sizes import *
from .sizes_batched import *

__all__: list[str] = []
__all__ += align.__all__
__all__ += align_lora.__all__
__all__ += permute.__all__
__all__ += prepare_scatter.__all__
__all__ += routing.__all__
__all__ += routing_fused.__all__
__all__ += routing_grouped.__all__
__all__ += rows.__all__
__all__ += sizes.__all__
__all__ += sizes_batched.__all__
