"""vLLM as on a Hopper GPU, with CPU tensors: for tests of its parts that run on this library."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@contextmanager
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make vLLM's current platform answer like CUDA there. vLLM's custom ops are their PyTorch forms."""
    # vLLM's modules ask for compiled ops during their import on CUDA.
    importlib.import_module("vllm.model_executor.layers.quantization.auto_gptq")
    from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.platforms import PlatformEnum, current_platform

    compilation = CompilationConfig(custom_ops=["none"])
    config = VllmConfig(device_config=DeviceConfig(device="cpu"), compilation_config=compilation)
    answers: dict[str, Any] = {"_enum": PlatformEnum.CUDA, "is_cuda": lambda self: True}
    answers |= {"is_cuda_alike": lambda self: True, "fp8_dtype": lambda self: torch.float8_e4m3fn}
    for name, answer in answers.items():
        monkeypatch.setattr(type(current_platform), name, answer)
    capability(monkeypatch, 9, 0)
    ranks = "vllm.model_executor.parameter.get_tensor_model_parallel_"
    monkeypatch.setattr(f"{ranks}rank", lambda: 0)
    monkeypatch.setattr(f"{ranks}world_size", lambda: 1)
    with set_current_vllm_config(config):
        yield


def capability(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    """Make vLLM's current platform a GPU of this compute capability."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    found = classmethod(lambda cls, device_id=0: DeviceCapability(major, minor))
    monkeypatch.setattr(type(current_platform), "get_device_capability", found)


def keep(monkeypatch: pytest.MonkeyPatch, part: str, *cases: str) -> None:
    """Make the table of faster cases contain these cases of a part, and nothing else."""
    module = importlib.import_module(f"pyops.integrations.vllm.parts.{part}")
    monkeypatch.setattr(module, "keeps", lambda of, case: of == part and case in cases)
