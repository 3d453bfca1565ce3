"""Quantisation: fp8 and int8 codes under given scales, and under scales found from tensors, rows and groups; NVFP4.

A scale multiplies a code to give its value. All arithmetic is in float32, correctly rounded; conversions round to
nearest even (the group int8 op: toward zero) and saturate. NaN is left out of extremes. An infinity makes the scale it
enters infinite, and the finite values under it 0. `result` of an fp8 op may be float8_e4m3fn, uint8 for its bits, or on
any platform float8_e4m3fnuz, the e4m3 of gfx942: what is said of 448 is then said of 224, and -0 becomes 0.

Beside it, weights as checkpoints pack them: those of AWQ and GGUF in floating point, those of GPTQ made ready.
"""

from __future__ import annotations

from . import awq, columns, dynamic, fp4, ggml, gptq, groups, hadamard, masked, scaled, static
from .awq import *
from .columns import *
from .dynamic import *
from .fp4 import *
from .ggml import *
from .gptq import *
from .groups import *
from .hadamard import *
from .masked import *
from .scaled import *
from .static import *

__all__: list[str] = []
__all__ += static.__all__
__all__ += dynamic.__all__
__all__ += groups.__all__
__all__ += fp4.__all__
__all__ += masked.__all__
__all__ += columns.__all__
__all__ += hadamard.__all__
__all__ += scaled.__all__
__all__ += awq.__all__
__all__ += ggml.__all__
__all__ += gptq.__all__
