"""Normalisation: root-mean-square and layer norms, alone and fused with residual, quantization and rotary embedding."""

from __future__ import annotations

from . import (
    attention_residual,
    dynamic_quant,
    hyper_connections,
    hyper_connections_post,
    layer,
    rms,
    rope,
    static_quant,
)
from .attention_residual import *
from .dynamic_quant import *
from .hyper_connections import *
from .hyper_connections_post import *
from .layer import *
from .rms import *
from .rope import *
from .static_quant import *

__all__: list[str] = []
__all__ += rms.__all__
__all__ += static_quant.__all__
__all__ += dynamic_quant.__all__
__all__ += layer.__all__
__all__ += rope.__all__
__all__ += attention_residual.__all__
__all__ += hyper_connections.__all__
__all__ += hyper_connections_post.__all__
