"""vLLM's linear layers with this library's GEMMs: CPU tensors with exact data against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pyops
from tests.support import packed
from tests.support.packed import draw
from tests.support.vllm_layers import capability, keep, on_hopper

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")

CASES = "fp8_channel", "fp8_block", "int8", "w4a16", "w8a16", "bf16"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, installed as on Hopper."""
    keep(monkeypatch, "linear", *CASES)
    # vLLM compiles the PyTorch form of its quantisers, which takes seconds.
    with on_hopper(monkeypatch), torch._dynamo.config.patch(disable=True):
        from pyops.integrations.vllm.parts import linear

        assert linear.install() == ", ".join(CASES)
        yield linear
        linear.uninstall()


def powers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Scales that keep results exact."""
    return 2.0 ** draw(-3, 2, *shape, seed=seed).float()


# Packed weights


class Weight:
    """Random quants with scales and zero points of groups; `order` gives the group of each row."""

    def __init__(self, bits: int, group: int, has_zeros: bool, in_order: bool, k: int = 256, n: int = 128) -> None:
        groups = 1 if group == -1 else k // group
        self.codes, self.scales = draw(0, 2**bits, k, n), powers(groups, n, seed=1)
        self.zeros = draw(0, 2**bits, groups, n, seed=2) if has_zeros else torch.full((groups, n), 2 ** (bits - 1))
        rows = torch.arange(k) // (k // groups)
        self.order = rows if in_order else rows[torch.randperm(k, generator=torch.Generator().manual_seed(3))]
        self.bits = bits

    def values(self) -> torch.Tensor:
        """float64 [K, N]."""
        return (self.codes - self.zeros[self.order]).double() * self.scales[self.order].double()


def gptq(weight: Weight, group: int, method: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """vLLM's method, and a checkpoint's tensors by their names in the layer."""
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, AutoGPTQLinearMethod

    config = AutoGPTQConfig(weight.bits, group, method == "gptq act order", True, False, {}, {})
    found = {"qweight": packed.gptq(weight.codes, weight.bits), "scales": weight.scales, "g_idx": weight.order}
    return AutoGPTQLinearMethod(config), found


def awq(weight: Weight, group: int, method: str) -> tuple[Any, dict[str, torch.Tensor]]:
    from vllm.model_executor.layers.quantization.awq_marlin import AWQMarlinConfig, AWQMarlinLinearMethod

    config = AWQMarlinConfig(weight.bits, group, True, False, [], {})
    found = {"qweight": packed.awq(weight.codes), "qzeros": packed.awq(weight.zeros), "scales": weight.scales}
    return AWQMarlinLinearMethod(config), found


def compressed(weight: Weight, group: int, method: str) -> tuple[Any, dict[str, torch.Tensor]]:
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

    strategy = "channel" if group == -1 else "group"
    symmetric = method == "compressed"
    scheme = CompressedTensorsWNA16(strategy, weight.bits, None if group == -1 else group, symmetric)
    words = packed.gptq(weight.codes, weight.bits).T
    found = {"weight_packed": words, "weight_scale": weight.scales.T}
    if not symmetric:
        found["weight_zero_point"] = packed.gptq_zeros(weight.zeros, weight.bits).T
    return scheme, found


METHODS = {"gptq": gptq, "gptq act order": gptq, "awq": awq, "compressed": compressed, "compressed zeros": compressed}


def made(method: Any, tensors: dict[str, torch.Tensor], k: int, n: int, dtype: torch.dtype, bias: Any = None) -> Any:
    """A layer of vLLM's method, loaded and processed."""
    layer = torch.nn.Module()
    sizes: dict[str, Any] = {"input_size_per_partition": k, "output_partition_sizes": [n // 2, n - n // 2]}
    sizes |= {"input_size": k, "output_size": n, "params_dtype": dtype}
    method.create_weights(layer, **sizes, weight_loader=lambda *args: None)
    for name, value in tensors.items():
        if name == "g_idx" and not hasattr(layer, name):  # vLLM 0.33 has no act-order
            continue
        parameter = getattr(layer, name)
        assert parameter.shape == value.shape
        parameter.data.copy_(value)
    layer.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias, requires_grad=False))
    method.process_weights_after_loading(layer)
    return layer


def apply(method: Any, layer: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = getattr(method, "apply", None or getattr(method, "apply_weights", None))(
        layer, x, layer.bias
    )
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("method", "bits", "group"),
    [
        ("gptq", 4, 128),
        ("gptq", 8, -1),
        ("gptq act order", 4, 32),
        ("awq", 4, 64),
        ("compressed", 4, -1),
        ("compressed", 8, 128),
        ("compressed zeros", 4, 64),
        ("compressed zeros", 8, 32),
    ],
)
def test_packed_weights(part: Any, method: str, bits: int, group: int, dtype: torch.dtype) -> None:
    """A checkpoint's tensors through vLLM's layer with our kernel; equal to float64's results, rounded once."""
    weight = Weight(bits, group, method in ("awq", "compressed zeros"), method != "gptq act order")
    linear, tensors = METHODS[method](weight, group, method)
    (k, n), bias = weight.codes.shape, powers(128, seed=5).to(dtype)
    layer = made(linear, tensors, k, n, dtype, bias)
    assert type(linear.kernel).__name__ == "PyopsMarlinLinearKernel"
    x = draw(-4, 5, 2, 3, k, seed=4).to(dtype)
    right = x.double() @ weight.values() + bias.double()
    assert torch.equal(apply(linear, layer, x), right.to(dtype))
    layer.bias = None
    assert torch.equal(apply(linear, layer, x[0]), (right - bias.double())[0].to(dtype))


def test_groups_of_another_rank(part: Any) -> None:
    """If several ranks share the rows of a weight, g_idx gives a row's group among all groups."""
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.model_executor.parameter import ChannelQuantScaleParameter, PackedvLLMParameter, RowvLLMParameter
    from vllm.scalar_type import scalar_types

    from pyops.integrations.vllm.parts._packed_linear import PyopsMarlinLinearKernel

    whole = Weight(4, 64, False, in_order=False, k=256, n=64)
    config = MPLinearLayerConfig((256, 64), (128, 64), scalar_types.uint4b8, torch.float16, 64, False, True)
    kernel = PyopsMarlinLinearKernel(config, "q", "s", "z", "g")
    layer, loader = torch.nn.Module(), {"weight_loader": lambda *args: None}
    codes = packed.gptq(whole.codes[128:], 4)
    layer.q = PackedvLLMParameter(data=codes, input_dim=0, output_dim=1, packed_dim=0, packed_factor=8, **loader)
    layer.s = ChannelQuantScaleParameter(data=whole.scales.half(), output_dim=1, **loader)
    layer.g = RowvLLMParameter(data=whole.order[128:].int(), input_dim=0, **loader)
    kernel.process_weights_after_loading(layer)
    x = draw(-4, 5, 5, 128, seed=4).half()
    assert torch.equal(kernel.apply_weights(layer, x), (x.double() @ whole.values()[128:]).half())


# 8-bit weights and activations


def of_fp8(rows: int, k: int, group: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 rows that fp8 holds exactly under the computed scales, powers of two; and these scales."""
    codes = draw(-8, 9, rows, k // group, group, seed=seed).float()
    codes[..., 0] = 448.0
    scales = powers(rows, k // group, seed=seed + 1)
    return (codes * scales[..., None]).reshape(rows, k).bfloat16(), scales


def fp8_kernel(key: Any, weight_key: Any, k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    from vllm.model_executor.kernels.linear import init_fp8_linear_kernel

    return init_fp8_linear_kernel(key, weight_key, dtype, dtype, (n, k))


def keys() -> Any:
    from vllm.model_executor.layers.quantization.utils import quant_utils

    return quant_utils


@pytest.mark.parametrize("activation", ["kFp8DynamicTokenSym", "kFp8StaticTensorSym"])
@pytest.mark.parametrize("channels", [False, True])
def test_fp8(part: Any, activation: str, channels: bool) -> None:
    """Activation scales per token or per tensor, weight scales per column or one; N not divisible by 16."""
    m, n, k = 5, 40, 64
    weight_key = keys().kFp8StaticChannelSym if channels else keys().kFp8StaticTensorSym
    kernel = fp8_kernel(getattr(keys(), activation), weight_key, k, n)
    assert type(kernel).__name__ == "PyopsFP8ScaledMMLinearKernel"
    layer = torch.nn.Module()
    layer.weight = draw(-8, 9, n, k).to(torch.float8_e4m3fn).T
    layer.weight_scale = powers(n, 1, seed=1) if channels else powers(1, seed=1)
    x, _ = of_fp8(m, k, k, seed=2)
    if "Static" in activation:
        layer.input_scale = torch.tensor(2.0)
        x = draw(-8, 9, m, k).bfloat16() * 2
    kernel.process_weights_after_loading(layer)
    bias = powers(n, seed=7).bfloat16()
    right = x.double() @ (layer.weight.double() * layer.weight_scale.double().view(1, -1)) + bias.double()
    assert torch.equal(kernel.apply_weights(layer, x[None], bias), right.bfloat16()[None])


def test_fp8_in_blocks(part: Any) -> None:
    m, n, k = 6, 256, 384
    kernel = fp8_kernel(keys().kFp8Dynamic128Sym, keys().kFp8Static128BlockSym, k, n)
    assert type(kernel).__name__ == "PyopsFp8BlockScaledMMLinearKernel"
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(draw(-8, 9, n, k).to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(powers(2, 3, seed=1), requires_grad=False)
    kernel.process_weights_after_loading(layer)
    x, _ = of_fp8(m, k, 128, seed=2)
    scales = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    right = x.double() @ (layer.weight.double() * scales.double()).T
    assert torch.equal(kernel.apply_weights(layer, x), right.bfloat16())
    bias = powers(n, seed=7).bfloat16()
    assert torch.equal(kernel.apply_weights(layer, x, bias), right.bfloat16() + bias)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("static", [True, False])
def test_int8(part: Any, static: bool, symmetric: bool) -> None:
    """Dynamic and static, with and without zero points; a layer of two shards with one scale each."""
    from vllm.model_executor.kernels.linear import init_int8_linear_kernel

    m, n, k = 4, 48, 32
    kernel = init_int8_linear_kernel(False, static, symmetric, "test")
    assert type(kernel).__name__ == "PyopsInt8ScaledMMLinearKernel"
    lowest = -127 if symmetric else -128
    codes = draw(lowest, 128, m, k, seed=3).float()
    codes[:, 0], codes[:, 1] = 127, lowest
    scales = torch.tensor([[0.5]]).expand(m, 1) if static else powers(m, 1, seed=4)
    zeros = torch.zeros(m, 1) if symmetric else draw(-20, 21, 1 if static else m, 1, seed=5).expand(m, 1)
    layer = torch.nn.Module()
    layer.logical_widths = [16, 32]
    layer.weight = torch.nn.Parameter(draw(-127, 128, n, k).to(torch.int8), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(torch.tensor([0.25, 2.0]), requires_grad=False)
    layer.input_scale = torch.nn.Parameter(scales[0, 0].clone(), requires_grad=False) if static else None
    layer.input_zero_point = layer.azp_adj = None
    if static and not symmetric:
        layer.input_zero_point = torch.nn.Parameter(zeros[0, 0].to(torch.int8), requires_grad=False)
    values = layer.weight.double().T * torch.tensor([0.25] * 16 + [2.0] * 32).double()
    kernel.process_weights_after_loading(layer)
    x = ((codes - zeros) * scales).bfloat16()
    assert torch.equal(x.float(), (codes - zeros) * scales)
    bias = powers(n, seed=7).bfloat16()
    assert torch.equal(kernel.apply_weights(layer, x, bias), (x.double() @ values + bias.double()).bfloat16())


# Unquantized


@pytest.mark.parametrize(
    ("tokens", "k", "ours"),
    [(1, 1024, True), (1, 520, False), (2, 520, True), (32, 520, True), (33, 520, False), (0, 520, False)],
)
def test_unquantized_layers(part: Any, monkeypatch: pytest.MonkeyPatch, tokens: int, k: int, ours: bool) -> None:
    """vLLM's method of such layers: small M by this library, large M by torch, whichever comes first."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    calls: list[int] = []
    linear = pyops.linear
    monkeypatch.setattr(pyops, "linear", lambda *args, **options: (calls.append(1), linear(*args, **options)))
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(draw(-4, 5, 24, k).bfloat16(), requires_grad=False)
    x, bias = draw(-4, 5, tokens, k, seed=1).bfloat16(), draw(-4, 5, 24, seed=2).bfloat16()
    for given, b in [(x, bias), (x[None], None)]:
        right = given.double() @ layer.weight.double().T + (0 if b is None else b.double())
        assert torch.equal(UnquantizedLinearMethod().apply(layer, given, b), right.bfloat16())
    assert len(calls) == 2 * ours
    calls.clear()
    wide = torch.stack([x, x], -1)[..., 0]  # strided elements, which `linear` does not take
    assert torch.equal(UnquantizedLinearMethod().apply(layer, wide, None), right.bfloat16()[0])
    assert not calls
    part.uninstall()
    UnquantizedLinearMethod().apply(layer, x, None)
    assert not calls


# Under torch.compile


def compiled(run: Any, *sizes: torch.Tensor) -> None:
    """A compiled function gives the same result, as one graph for any number of rows."""
    right = [run(x) for x in sizes]
    torch._dynamo.reset()
    for x in sizes:
        torch._dynamo.mark_dynamic(x, 0)
    with torch._dynamo.config.patch(disable=False, error_on_recompile=True):
        graph = torch.compile(run, backend="aot_eager", fullgraph=True)
        assert all(torch.equal(graph(x), one) for x, one in zip(sizes, right, strict=True))


@pytest.mark.parametrize("kind", ["packed", "fp8", "blocks", "int8", "bf16"])
def test_one_graph(part: Any, kind: str) -> None:
    from vllm.model_executor.kernels.linear import init_int8_linear_kernel
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    k, n = 256, 128
    layer = torch.nn.Module()
    if kind == "packed":
        kernel, tensors = gptq(Weight(4, 128, False, True), 128, "gptq")
        layer = made(kernel, tensors, k, n, torch.bfloat16, powers(n).bfloat16())
        run = kernel.apply
    elif kind == "bf16":
        layer.weight = draw(-4, 5, n, k).bfloat16()
        run = UnquantizedLinearMethod().apply
    elif kind == "int8":
        kernel = init_int8_linear_kernel(True, False, True, "test")
        layer.logical_widths = [n]
        layer.weight = torch.nn.Parameter(draw(-127, 128, n, k).to(torch.int8), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(powers(n, 1), requires_grad=False)
        layer.input_scale = layer.input_zero_point = layer.azp_adj = None
        kernel.process_weights_after_loading(layer)
        run = kernel.apply_weights
    else:
        blocks = kind == "blocks"
        names = (
            ("kFp8Dynamic128Sym", "kFp8Static128BlockSym")
            if blocks
            else ("kFp8DynamicTokenSym", "kFp8StaticChannelSym")
        )
        kernel = fp8_kernel(*(getattr(keys(), name) for name in names), k, n)
        weight = draw(-8, 9, n, k).to(torch.float8_e4m3fn)
        layer.weight, layer.weight_scale = (weight, powers(1, 2)) if blocks else (weight.T, powers(n, 1))
        run = kernel.apply_weights
    compiled(lambda x: run(layer, x, None), *(torch.randn(rows, k).bfloat16() for rows in (3, 40)))


# The choice


def packed_config(**changed: Any) -> Any:
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    values: dict[str, Any] = {"full_weight_shape": (256, 128), "partition_weight_shape": (256, 128), "group_size": 128}
    values |= {
        "weight_type": scalar_types.uint4b8,
        "act_type": torch.bfloat16,
        "zero_points": False,
        **({"has_g_idx": False} if "has_g_idx" in MPLinearLayerConfig.__dataclass_fields__ else {}),
    }
    return MPLinearLayerConfig(**values | changed)


def chosen(**changed: Any) -> str:
    from vllm.model_executor.kernels.linear import choose_mp_linear_kernel

    return choose_mp_linear_kernel(packed_config(**changed)).__name__


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"act_type": torch.float8_e4m3fn}, "not torch.float8_e4m3fn"),
        ({"zero_points": True}, "does not support uint4b8 with zero_points=True"),
        ({"partition_weight_shape": (256, 96)}, "16 x 64, which do not divide a weight of 256 x 96"),
        ({"partition_weight_shape": (192, 128)}, "groups of 128 of 192 rows"),
        ({"group_size": 16}, "groups of 16"),
    ],
)
def test_packed_weights_refused(part: Any, changed: dict[str, Any], reason: str) -> None:
    """And similar ones that are not refused."""
    from pyops.integrations.vllm.parts._packed_linear import PyopsMarlinLinearKernel

    can, why = PyopsMarlinLinearKernel.can_implement(packed_config(**changed))
    assert not can
    assert reason in str(why)
    for served in ({}, {"group_size": -1}, {"group_size": 256}, {"has_g_idx": True}, {"act_type": torch.float16}):
        assert PyopsMarlinLinearKernel.can_implement(packed_config(**served)) == (True, None)


def test_layers_that_stay_with_vllm(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases that this library does not support, or at which it was not measured to be faster, get vLLM's choice."""
    odd = {"full_weight_shape": (256, 96), "partition_weight_shape": (256, 96)}
    assert chosen() == "PyopsMarlinLinearKernel"
    assert chosen(**odd, act_type=torch.float16) == "ExllamaLinearKernel"
    channel = keys().kFp8DynamicTokenSym, keys().kFp8StaticChannelSym, 64, 64
    block = keys().kFp8Dynamic128Sym, keys().kFp8Static128BlockSym, 128, 128
    assert type(fp8_kernel(*channel, torch.float16)).__name__ == "CutlassFP8ScaledMMLinearKernel"
    for major, minor in [(8, 9), (10, 0)]:
        capability(monkeypatch, major, minor)
        assert chosen() == "MarlinLinearKernel"
        assert type(fp8_kernel(*channel)).__name__ == "CutlassFP8ScaledMMLinearKernel"
        assert type(fp8_kernel(*block)).__name__ == "TritonFp8BlockScaledMMKernel"
    capability(monkeypatch, 9, 0)
    for switch, value in [("VLLM_BATCH_INVARIANT", "1"), ("VLLM_DISABLED_KERNELS", "PyopsMarlinLinearKernel")]:
        with monkeypatch.context() as changed:
            changed.setenv(switch, value)
            assert chosen() == "MacheteLinearKernel"
    assert chosen() == "PyopsMarlinLinearKernel"


def test_uninstall_and_the_table(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the part, and for cases that are not faster, vLLM chooses as before; its lists are restored."""
    from vllm.model_executor.kernels import linear as kernels
    from vllm.platforms import PlatformEnum, current_platform
    from vllm.scalar_type import scalar_types

    def lists() -> list[list[str]]:
        names = "_POSSIBLE_KERNELS", "_POSSIBLE_FP8_KERNELS", "_POSSIBLE_FP8_BLOCK_KERNELS", "_POSSIBLE_INT8_KERNELS"
        return [[one.__name__ for one in getattr(kernels, name)[PlatformEnum.CUDA]] for name in names]

    installed = lists()
    assert part.install() == ""
    assert lists() == installed
    part.uninstall()
    before = lists()
    assert not any("Pyops" in name for names in before for name in names)
    assert chosen() == "MacheteLinearKernel"
    keep(monkeypatch, "linear", "w8a16")
    assert part.install() == "w8a16"
    assert chosen() == "MacheteLinearKernel"
    assert chosen(weight_type=scalar_types.uint8b128) == "PyopsMarlinLinearKernel"
    part.uninstall()
    keep(monkeypatch, "linear")
    assert part.install() == ""
    keep(monkeypatch, "linear", *CASES)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: False)
    assert part.install() == ""
    assert lists() == before


def test_compiled_code_has_a_separate_cache_key(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's key of compiled code on disk names the served layers, because other kernels use other weight layouts."""
    from vllm.compilation.caching import aot_compile_hash_factors
    from vllm.config import get_current_vllm_config

    def key() -> str:
        return str(aot_compile_hash_factors(get_current_vllm_config()))

    found = {key()}
    part.uninstall()
    found.add(key())
    keep(monkeypatch, "linear", "w4a16")
    part.install()
    found.add(key())
    assert len(found) == 3
    part.uninstall()
    assert key() in found
