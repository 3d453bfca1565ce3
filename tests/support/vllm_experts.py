"""vLLM's MoE modules on this library's ops, and calls of its layers: shared by the tests of experts."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyops.integrations.vllm import register
from tests.ops.linear.test_products import draw, positive
from tests.support.calls import CUDA

BF16 = torch.bfloat16
EXPERTS, HIDDEN, CHANNELS, TOP_K = 4, 256, 128, 2
Vllm = SimpleNamespace  # modules of vLLM and of the part, by the last word of their names
ANY_DEVICE = pytest.mark.parametrize("device", ["cpu", CUDA])
LAYERS = "vllm.model_executor.layers"
AWQ = f"{LAYERS}.quantization.awq_marlin"  # not in vLLM 0.33
MODULES = (
    f"{LAYERS}.fused_moe.config",
    f"{LAYERS}.fused_moe.activation",
    f"{LAYERS}.fused_moe.modular_kernel",
    f"{LAYERS}.fused_moe.experts.marlin_moe",
    f"{LAYERS}.fused_moe.experts.triton_moe",
    *(f"{LAYERS}.fused_moe.oracle.{name}" for name in ("fp8", "int8", "int_wna16", "mxfp4", "unquantized")),
    f"{LAYERS}.quantization.auto_gptq",
    AWQ,
    f"{LAYERS}.quantization.utils.quant_utils",
    "vllm.platforms.interface",
    "vllm.v1.worker.workspace",
    "pyops.integrations.vllm.parts.experts",
    "pyops.integrations.vllm.parts._modular_experts",
)


@pytest.fixture(scope="module")
def vllm() -> Iterator[Vllm]:
    """vLLM on this library's ops, on a platform that reports a GPU of sm_90."""
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        registered = register("0.33" if importlib.util.find_spec(AWQ) is None else "0.22")
        names = [name for name in MODULES if importlib.util.find_spec(name)]
        found = Vllm(**{name.rpartition(".")[2]: importlib.import_module(name) for name in names})
    interface = found.interface

    class Hopper(interface.Platform):  # type: ignore[misc, name-defined]
        _enum, device_name, device_type = interface.PlatformEnum.CUDA, "cuda", "cuda"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return interface.DeviceCapability(9, 0)

        @classmethod
        def supports_fp8(cls) -> bool:
            return True

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith(("vllm.", "pyops.integrations.")) and "current_platform" in vars(module):
                patch.setattr(module, "current_platform", Hopper())
        if not torch.cuda.is_available():  # vLLM calls this before it grows its workspace
            patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        # This asks the engine's configuration.
        patch.setattr(found.mxfp4, "_user_moe_activation_override", lambda: None)
        with nullcontext() if hasattr(found, "awq_marlin") else configured():
            yield found
    registered.undo()


def configured() -> Any:
    """A context with a current configuration, which oracles of vLLM 0.33 read."""
    config = importlib.import_module("vllm.config")
    return config.set_current_vllm_config(config.VllmConfig(device_config=config.DeviceConfig("cpu")))


@pytest.fixture
def installed(vllm: Vllm) -> Iterator[Vllm]:
    assert vllm.experts.install()
    yield vllm
    vllm.experts.uninstall()


def layer(vllm: Vllm, activation: str = "silu", device: str = "cpu", channels: int = CHANNELS, **others: Any) -> Any:
    """vLLM's configuration of a layer."""
    given = {
        "num_experts": EXPERTS,
        "experts_per_token": TOP_K,
        "hidden_dim": HIDDEN,
        "num_local_experts": EXPERTS,
        "num_logical_experts": EXPERTS,
        "activation": vllm.activation.MoEActivation(activation),
        "device": device,
        "routing_method": vllm.config.RoutingMethodType.Renormalize,
        "moe_parallel_config": vllm.config.FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": BF16,
    }
    if "is_act_and_mul" in vllm.config.FusedMoEConfig.__dataclass_fields__:
        given |= {"intermediate_size_per_partition": channels, "is_act_and_mul": not activation.endswith("_no_mul")}
    else:  # vLLM 0.33
        given["intermediate_size"] = channels
    return vllm.config.FusedMoEConfig(**given | others)


def routed(tokens: int = 20, top_k: int = TOP_K, experts: int = EXPERTS) -> tuple[torch.Tensor, ...]:
    """Rows, weights and expert ids of tokens; one token has only ids out of range."""
    ids = torch.randint(0, experts, (tokens, top_k), generator=torch.Generator().manual_seed(4))
    ids[2] = experts
    return draw(tokens, HIDDEN, dtype=BF16), positive(tokens, top_k, seed=3), ids.int()


def call_with(function: Any, named: dict[str, Any]) -> Any:
    """The result of a function of vLLM, with those of the arguments that its version has."""
    return function(**{name: named[name] for name in inspect.signature(function).parameters if name in named})


def moved(device: str, *tensors: Any) -> list[Any]:
    return [one.to(device) if isinstance(one, torch.Tensor) else one for one in tensors]


def apply(
    vllm: Vllm, kernel: Any, x: Any, w1: Any, w2: Any, weights: Any, ids: Any, expert_map: Any = None, **given: Any
) -> torch.Tensor:
    """Call the functions that vLLM's layers call, on the device of w1; on a GPU once more as a CUDA graph. Returns the
    result."""
    device = w1.device
    x, weights, ids, expert_map = moved(device, x, weights, ids, expert_map)
    vllm.workspace.init_workspace_manager(device)
    call = {"hidden_states": x, "w1": w1, "w2": w2, "topk_weights": weights, "topk_ids": ids, "expert_map": expert_map}
    call |= {"activation": kernel.moe_config.activation, "apply_router_weight_on_input": False}
    call["global_num_experts"] = -1 if expert_map is None else len(expert_map)
    out = kernel.apply(**call | given)
    if device.type == "cuda":
        expected, graph = out.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernel.apply(**call | given)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
    return out.cpu()


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).abs().max() / exact.abs().max())
