"""GPU operators for LLM inference, compiled at first use from source strings.

Every op is a function of this module: it takes torch tensors or cupy arrays, writes its outputs in place and returns
None. `registry` maps names to them.
"""

from __future__ import annotations

from collections.abc import Mapping as _Mapping
from types import MappingProxyType as _MappingProxyType

from ._core import check
from ._core.compiler import Compiled
from ._core.errors import (
    CaptureError,
    CompileError,
    DeviceFault,
    KernelFault,
    MissingDependencyError,
    ModelError,
    NotLoadedError,
    OpError,
)
from ._core.kernel import Kernel
from ._core.op import Op, Wrapper, op
from ._core.op import registry as _registry
from ._core.torch_library import bind_loaded as _bind_loaded
from .compile_ahead import warmup
from .ops.activation import *
from .ops.attention import *
from .ops.cache import *
from .ops.linear import *
from .ops.memory import *
from .ops.norm import *
from .ops.quantize import *
from .ops.rotary import *
from .ops.sampling import *

__version__ = "0.1.0"

registry: _Mapping[str, Op] = _MappingProxyType(_registry)

_bind_loaded()
