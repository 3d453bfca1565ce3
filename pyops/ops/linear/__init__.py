"""Matrix products."""

from __future__ import annotations

from . import dense as _dense
from . import few_tokens as _few_tokens
from . import fp4_mm as _fp4_mm
from . import grouped as _grouped
from . import grouped_fp4 as _grouped_fp4
from . import grouped_scaled as _grouped_scaled
from . import grouped_wna16 as _grouped_wna16
from . import scaled_mm as _scaled_mm
from . import skinny_linear as _skinny_linear
from . import sparse_mm as _sparse_mm
from .dense import *
from .few_tokens import *
from .fp4_mm import *
from .grouped import *
from .grouped_fp4 import *
from .grouped_scaled import *
from .grouped_wna16 import *
from .scaled_mm import *
from .skinny_linear import *
from .sparse_mm import *

__all__: list[str] = []
__all__ += _dense.__all__
__all__ += _few_tokens.__all__
__all__ += _fp4_mm.__all__
__all__ += _grouped.__all__
__all__ += _grouped_fp4.__all__
__all__ += _grouped_scaled.__all__
__all__ += _grouped_wna16.__all__
__all__ += _scaled_mm.__all__
__all__ += _skinny_linear.__all__
__all__ += _sparse_mm.__all__
