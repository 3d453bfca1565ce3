"""GPU operators for LLM inference, compiled at first use from source strings.

Every op is a function of this module: it takes torch tensors or cupy arrays, writes the outputs that it is given and
returns None. Its form `new` takes the other arguments, allocates the outputs and returns them:
`y = rms_norm.new(x, weight, 1e-6)`. Only ops that write in place have no such form. `registry` maps names to ops.
"""

from __future__ import annotations

from collections.abc import Mapping as _Mapping
from types import MappingProxyType as _MappingProxyType

from . import _at_start as _at_start
from . import _docstring as _docstring
from . import check as check
from ._core.errors import CaptureError as CaptureError
from ._core.errors import CompileError as CompileError
from ._core.errors import DeviceFault as DeviceFault
from ._core.errors import MissingDependencyError as MissingDependencyError
from ._core.errors import NotLoadedError as NotLoadedError
from ._core.errors import OpError as OpError
from ._core.errors import RankError as RankError
from ._core.errors import UnsupportedGpuError as UnsupportedGpuError
from ._core.launch.kernel import Kernel as Kernel
from ._core.op.decorator import op as op
from ._core.op.op import Op as Op
from ._core.op.op import registry as _registry
from ._core.op.torch_library import bind_loaded as _bind_loaded
from ._core.op.typed import Wrapper as Wrapper
from ._core.text.compiler import Compiled as Compiled
from .compile_ahead import warmup as warmup
from .errors import ModelError as ModelError
from .fused.experts import FusedMoEQuantConfig as FusedMoEQuantConfig
from .fused.experts import fused_experts as fused_experts
from .fused.experts import fused_moe as fused_moe
from .fused.marlin_experts import fused_marlin_moe as fused_marlin_moe
from .fused.parallel_experts import parallel_fused_experts as parallel_fused_experts
from .host.faults import KernelFault as KernelFault
from .ops._shared.scalar_type import SCALAR_TYPES as SCALAR_TYPES
from .ops._shared.scalar_type import ScalarType as ScalarType
from .ops.activation.elementwise import *
from .ops.activation.gated import *
from .ops.activation.masked import *
from .ops.activation.quant import *
from .ops.activation.soft_cap import *
from .ops.activation.sparse import *
from .ops.attention.decode import *
from .ops.attention.merge import *
from .ops.attention.mla import *
from .ops.attention.mla_sparse import *
from .ops.attention.mqa_logits import *
from .ops.attention.partitioned import *
from .ops.attention.ragged import *
from .ops.attention.sparse import *
from .ops.attention.varlen import *
from .ops.cache import *
from .ops.collective.custom_all_reduce import *
from .ops.collective.custom_gather_scatter import *
from .ops.collective.expert_parallel import *
from .ops.collective.minimax import *
from .ops.collective.process_group import *
from .ops.collective.quick_all_reduce import *
from .ops.collective.shared_memory import *
from .ops.embedding.n_gram import *
from .ops.embedding.vocabulary import *
from .ops.linear.allspark_mm import *
from .ops.linear.awq_gptq_mm import *
from .ops.linear.dense import *
from .ops.linear.dsv3 import *
from .ops.linear.fp4_mm import *
from .ops.linear.ggml import *
from .ops.linear.ggml_moe import *
from .ops.linear.grouped import *
from .ops.linear.grouped_fp4 import *
from .ops.linear.grouped_packed import *
from .ops.linear.grouped_scaled import *
from .ops.linear.grouped_w4a8 import *
from .ops.linear.grouped_wna16 import *
from .ops.linear.lora import *
from .ops.linear.lora_experts import *
from .ops.linear.machete_mm import *
from .ops.linear.marlin_24_mm import *
from .ops.linear.marlin_mm import *
from .ops.linear.marlin_moe import *
from .ops.linear.marlin_preprocess import *
from .ops.linear.marlin_repack import *
from .ops.linear.rocm_skinny import *
from .ops.linear.scaled_mm import *
from .ops.linear.skinny_bmm import *
from .ops.linear.skinny_experts import *
from .ops.linear.skinny_linear import *
from .ops.linear.skinny_qkv import *
from .ops.linear.skinny_router import *
from .ops.linear.sparse_mm import *
from .ops.linear.w4a8_mm import *
from .ops.mamba import *
from .ops.memory.device_memory import *
from .ops.moe.align import *
from .ops.moe.align_lora import *
from .ops.moe.permute import *
from .ops.moe.prepare_scatter import *
from .ops.moe.routing import *
from .ops.moe.routing_fused import *
from .ops.moe.routing_grouped import *
from .ops.moe.rows import *
from .ops.moe.sizes import *
from .ops.moe.sizes_batched import *
from .ops.norm.attention_residual import *
from .ops.norm.dynamic_quant import *
from .ops.norm.hyper_connections import *
from .ops.norm.hyper_connections_post import *
from .ops.norm.layer import *
from .ops.norm.rms import *
from .ops.norm.rope import *
from .ops.norm.static_quant import *
from .ops.quantize import *
from .ops.rotary.apply import *
from .ops.rotary.dual_chunk import *
from .ops.rotary.embedding import *
from .ops.rotary.multimodal import *
from .ops.sampling.draw import *
from .ops.sampling.penalties import *
from .ops.sampling.probabilities import *
from .ops.sampling.rejection import *
from .ops.sampling.top_k import *
from .snippet import example_text as example_text

__version__ = "0.1.0"

registry: _Mapping[str, Op] = _MappingProxyType(_registry)

# Modules that the package is made of, which are no part of its face, and what `from __future__` leaves.
_INTERNAL = frozenset(
    ("annotations", "axes", "cli", "compile_ahead", "example", "gpus", "host", "offline", "ops", "snippet", "tuning")
)


def __dir__() -> list[str]:
    return sorted(name for name in globals() if name not in _INTERNAL and (name[0] != "_" or name.startswith("__")))


_bind_loaded()
