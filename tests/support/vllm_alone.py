"""vLLM on a machine that seems to have a GPU, run in a separate process by the tests of vLLM without libraries.

    python -m tests.support.vllm_alone

vLLM finds the plugins and one GPU of compute capability 9.0, and prints its findings as one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

# GPU packages that layers import if present, and one that vLLM imports unconditionally. Nothing here calls them.
ABSENT = {"cuda", "cutlass", "deep_ep", "flashinfer", "mori", "nixl_ep"}
HUMMING = ("", ".config", ".dtypes", ".layer", ".schema", ".utils", ".utils.weight")
MODULES = (
    *(f"vllm.model_executor.models.{name}" for name in ("llama", "qwen3_moe", "gpt_oss", "deepseek_v2")),
    *("vllm.entrypoints.llm", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner"),
    *("vllm.v1.attention.backends.flash_attn", "vllm.v1.attention.backends.triton_attn"),
    *("vllm.v1.attention.backends.mla.triton_mla", "vllm.compilation.passes.pass_manager"),
    "vllm.distributed.device_communicators.custom_all_reduce",
)


def see_a_gpu() -> None:
    pynvml = importlib.import_module("vllm.third_party.pynvml")
    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetName": "NVIDIA H100",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 << 30, free=79 << 30, used=1 << 30),
    }
    for name, answer in answers.items():
        setattr(pynvml, name, lambda *args, answer=answer, **kwargs: answer)
    backends = importlib.import_module("triton.backends").backends
    backends["nvidia"].driver.is_active = classmethod(lambda cls: True)
    sys.modules.update({f"humming{name}": MagicMock() for name in HUMMING})


def imports() -> dict[str, str]:
    """{module: error} of vLLM's layers, models, engine and worker, except errors about a package in `ABSENT`.

    Modules for `humming` alone are left out; one of them imports a module that vLLM 0.22.1 lacks.
    """
    layers = importlib.import_module("vllm.model_executor.layers")
    found = pkgutil.walk_packages(layers.__path__, "vllm.model_executor.layers.", onerror=lambda name: None)
    failed = {}
    for name in (*(module.name for module in found if "humming" not in module.name), *MODULES):
        try:
            importlib.import_module(name)
        except ImportError as error:
            if str(error.name).partition(".")[0] not in ABSENT:
                failed[name] = repr(error)
        except Exception as error:
            if "libcuda.so" not in str(error):  # Triton's driver, which these ask for at import
                failed[name] = repr(error)
    return failed


def attention() -> str:
    """The attention backends that vLLM would choose."""
    from torch import bfloat16
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()
    with set_current_vllm_config(VllmConfig()):
        return str(selector.get_attn_backend(128, bfloat16, "auto").get_name())


def quantizations() -> dict[str, str]:
    """{method: error}."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    failed = {}
    for name in QUANTIZATION_METHODS:
        try:
            get_quantization_config(name)
        except Exception as error:
            failed[name] = repr(error)
    return failed


def tries() -> dict[str, Any]:
    import torch

    see_a_gpu()
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    assert current_platform.is_cuda()
    load_general_plugins()
    from pyops.integrations.vllm.library import registered
    from pyops.integrations.vllm.plugin import deactivate

    result = {
        "failed": imports(),
        "quantizations": quantizations(),
        "attention": attention(),
        "absent": [name for name in ("_flashmla_C", "cumem_allocator") if find_spec(f"vllm.{name}") is None],
        "rotary": torch.ops.vllm.flashinfer_rotary_embedding.default._schema.name,
        "theirs": sum(_has_fake(name) for name in registered.names),
    }
    deactivate()
    return result | {"attention of vLLM's own": attention()}


def _has_fake(name: str) -> bool:
    from torch._library.simple_registry import singleton

    return singleton.find(name).fake_impl.kernel is not None


if __name__ == "__main__":
    print(json.dumps(tries()))
