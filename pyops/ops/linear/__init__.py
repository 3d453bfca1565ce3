"""GEMMs."""

from __future__ import annotations

from . import allspark_mm as _allspark_mm
from . import awq_gptq_mm as _awq_gptq_mm
from . import dense as _dense
from . import dsv3 as _dsv3
from . import fp4_mm as _fp4_mm
from . import ggml as _ggml
from . import ggml_moe as _ggml_moe
from . import grouped as _grouped
from . import grouped_fp4 as _grouped_fp4
from . import grouped_packed as _grouped_packed
from . import grouped_scaled as _grouped_scaled
from . import grouped_w4a8 as _grouped_w4a8
from . import grouped_wna16 as _grouped_wna16
from . import lora as _lora
from . import lora_experts as _lora_experts
from . import machete_mm as _machete_mm
from . import marlin_24_mm as _marlin_24_mm
from . import marlin_mm as _marlin_mm
from . import marlin_moe as _marlin_moe
from . import marlin_preprocess as _marlin_preprocess
from . import marlin_repack as _marlin_repack
from . import rocm_skinny as _rocm_skinny
from . import scaled_mm as _scaled_mm
from . import skinny_bmm as _skinny_bmm
from . import skinny_experts as _skinny_experts
from . import skinny_linear as _skinny_linear
from . import skinny_qkv as _skinny_qkv
from . import skinny_router as _skinny_router
from . import sparse_mm as _sparse_mm
from . import w4a8_mm as _w4a8_mm
from .allspark_mm import *
from .awq_gptq_mm import *
from .dense import *
from .dsv3 import *
from .fp4_mm import *
from .ggml import *
from .ggml_moe import *
from .grouped import *
from .grouped_fp4 import *
from .grouped_packed import *
from .grouped_scaled import *
from .grouped_w4a8 import *
from .grouped_wna16 import *
from .lora import *
from .lora_experts import *
from .machete_mm import *
from .marlin_24_mm import *
from .marlin_mm import *
from .marlin_moe import *
from .marlin_preprocess import *
from .marlin_repack import *
from .rocm_skinny import *
from .scaled_mm import *
from .skinny_bmm import *
from .skinny_experts import *
from .skinny_linear import *
from .skinny_qkv import *
from .skinny_router import *
from .sparse_mm import *
from .w4a8_mm import *

__all__: list[str] = []
__all__ += _allspark_mm.__all__
__all__ += _awq_gptq_mm.__all__
__all__ += _dense.__all__
__all__ += _rocm_skinny.__all__
__all__ += _dsv3.__all__
__all__ += _fp4_mm.__all__
__all__ += _ggml.__all__
__all__ += _ggml_moe.__all__
__all__ += _lora.__all__
__all__ += _lora_experts.__all__
__all__ += _machete_mm.__all__
__all__ += _marlin_24_mm.__all__
__all__ += _marlin_mm.__all__
__all__ += _marlin_moe.__all__
__all__ += _marlin_preprocess.__all__
__all__ += _marlin_repack.__all__
__all__ += _grouped.__all__
__all__ += _grouped_fp4.__all__
__all__ += _grouped_packed.__all__
__all__ += _grouped_scaled.__all__
__all__ += _grouped_w4a8.__all__
__all__ += _grouped_wna16.__all__
__all__ += _scaled_mm.__all__
__all__ += _skinny_bmm.__all__
__all__ += _skinny_experts.__all__
__all__ += _skinny_linear.__all__
__all__ += _skinny_qkv.__all__
__all__ += _skinny_router.__all__
__all__ += _sparse_mm.__all__
__all__ += _w4a8_mm.__all__
