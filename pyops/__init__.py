"""GPU operators for LLM inference, compiled at first use from source strings.

Every op is a function of this module: it takes torch tensors or cupy arrays, writes its outputs in place and returns
None. `ops` maps names to them.
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
    OpError,
)
from ._core.kernel import Kernel
from ._core.op import Op, Wrapper, op, registry
from ._core.op import bind_loaded as _bind_loaded
from .activation import *
from .attention import *
from .cache import *
from .cli.warmup import warmup
from .linear import *
from .memory import *
from .norm import *
from .quantize import *
from .rotary import *
from .sampling import *

__version__ = "0.1.0"

ops: _Mapping[str, Op] = _MappingProxyType(registry)

_bind_loaded()
