"""vLLM's MoE layers on this library: vLLM's own classes and its choice of a backend, with results against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyops.host.run import HostFunction
from pyops.testing import cpu
from tests.ops.linear.test_grouped import needs_compiler
from tests.ops.linear.test_products import draw
from tests.ops.moe.test_experts import coded, experts_in_float64, quantised
from tests.support.vllm_experts import (
    ANY_DEVICE,
    BF16,
    CHANNELS,
    EXPERTS,
    HIDDEN,
    TOP_K,
    Vllm,
    apply,
    call_with,
    error,
    installed,
    layer,
    moved,
    routed,
    vllm,
)

__all__ = ["installed", "vllm"]  # fixtures
FP8 = torch.float8_e4m3fn


UNQUANTIZED = [
    # activation, with_map, on_input, with_bias, dtype
    ("silu", False, False, False, BF16),
    ("silu", True, False, False, torch.float16),
    ("swigluoai", False, True, True, BF16),
    ("relu2_no_mul", True, False, True, BF16),
]


@ANY_DEVICE
@pytest.mark.parametrize(("activation", "with_map", "on_input", "with_bias", "dtype"), UNQUANTIZED)
def test_unquantized(
    installed: Vllm, activation: str, with_map: bool, on_input: bool, with_bias: bool, dtype: torch.dtype, device: str
) -> None:
    rows = CHANNELS * (1 if activation.endswith("_no_mul") else 2)
    x, weights, ids = routed(top_k=1 if on_input else TOP_K, experts=6 if with_map else EXPERTS)
    x = x.to(dtype)
    w1 = (draw(EXPERTS, rows, HIDDEN, dtype=dtype, seed=1) * HIDDEN**-0.5).to(dtype)
    w2 = (draw(EXPERTS, HIDDEN, CHANNELS, dtype=dtype, seed=2) * CHANNELS**-0.5).to(dtype)
    biases = [draw(EXPERTS, n, dtype=dtype, seed=n) for n in (rows, HIDDEN)]
    expert_map = torch.tensor([3, -1, 0, 2, 1, -1], dtype=torch.int32) if with_map else None
    scaled, exact_weights = (x * weights.to(dtype), torch.ones_like(weights)) if on_input else (x, weights)
    exact = experts_in_float64(
        scaled, w1, w2, exact_weights, ids, activation, expert_map, biases=tuple(biases) if with_bias else None
    )
    w1, w2, *biases = moved(device, w1, w2, *biases)
    config = layer(installed, activation, device, in_dtype=dtype, has_bias=with_bias)
    backend, experts = installed.unquantized.select_unquantized_moe_backend(config)
    assert experts is installed._modular_experts.PyopsExperts
    prepared = installed.unquantized.convert_to_unquantized_kernel_format(backend, None, w1, w2)
    assert [one.data_ptr() for one in prepared] == [w1.data_ptr(), w2.data_ptr()]
    quant_config = installed.config.biased_moe_quant_config(*biases if with_bias else (None, None))
    kernel = installed.unquantized.make_unquantized_moe_kernel(quant_config, config, backend, experts)
    out = apply(installed, kernel, x, w1, w2, weights, ids, expert_map, apply_router_weight_on_input=on_input)
    assert error(out, exact) <= 2.0**-7
    assert not out[2].any()


FP8_KINDS = [
    # weights, activations, static scales of activations
    ("fp8 block", "kFp8Static128BlockSym", "kFp8Dynamic128Sym"),
    ("fp8 row", "kFp8StaticChannelSym", "kFp8DynamicTokenSym"),
    ("fp8 tensor", "kFp8StaticTensorSym", "kFp8DynamicTokenSym"),
    ("fp8 tensor", "kFp8StaticTensorSym", "kFp8DynamicTensorSym"),
    ("fp8 tensor", "kFp8StaticTensorSym", "kFp8StaticTensorSym"),
]


@ANY_DEVICE
@pytest.mark.parametrize(("kind", "weight_key", "activation_key"), FP8_KINDS)
@pytest.mark.parametrize("limit", [None, 0.5])
def test_fp8(
    installed: Vllm, kind: str, weight_key: str, activation_key: str, limit: float | None, device: str
) -> None:
    """Activations are rounded to fp8 by vLLM's scheme, also where gate and up are clamped."""
    x, weights, ids = routed()
    (c1, s1, w1), (c2, s2, w2) = (
        quantised(torch.randn(EXPERTS, *size, generator=torch.Generator().manual_seed(2)) * size[1] ** -0.5, kind)
        for size in ((2 * CHANNELS, HIDDEN), (HIDDEN, CHANNELS))
    )
    static = torch.tensor(4.0 / 448) if activation_key == "kFp8StaticTensorSym" else None
    exact = experts_of_codes(x, w1, w2, weights, ids, limit, (activation_key, static))
    c1, c2, s1, s2, static = moved(device, c1, c2, s1, s2, static)
    oracle, config = installed.fp8, layer(installed, device=device, swiglu_limit=limit)
    asked = [getattr(installed.quant_utils, name) for name in (weight_key, activation_key)]
    backend, experts = oracle.select_fp8_moe_backend(config, *asked)
    assert experts is installed._modular_experts.PyopsExperts
    prepared = oracle.convert_to_fp8_moe_kernel_format(backend, SimpleNamespace(), c1, c2, s1, s2, static, static)
    assert all(one is other for one, other in zip(prepared, (c1, c2, s1, s2), strict=True))
    quant_config = oracle.make_fp8_moe_quant_config(
        backend,
        s1,
        s2,
        static,
        static,
        block_shape=[128, 128] if kind.endswith("block") else None,
        per_act_token_quant=activation_key == "kFp8DynamicTokenSym",
        per_out_ch_quant=kind.endswith("row"),
        swiglu_limit=limit,
    )
    kernel = oracle.make_fp8_moe_kernel(quant_config, config, experts, backend)
    out = apply(installed, kernel, x, c1, c2, weights, ids)
    errors = (out.double() - exact).abs().mean(1) / exact.abs().mean()
    if device == "cpu":
        assert errors.mean() <= 2.0**-8
    else:
        # fp8 WGMMA keeps 13 bits below the largest term of its accumulator. A hidden activation may round to the next
        # bfloat16; if it is the absmax of its group, all fp8 values of that group are rounded under another scale. The
        # same accumulation on the CPU, truncated in the same way, gives the same rows these errors: up to 1/27, half of
        # them below 2^-8.
        assert errors.median() <= 2.0**-8
        assert errors.max() <= 2.0**-4
    assert not out[2].any()


def rounded(x: torch.Tensor, scheme: tuple[str, Any]) -> torch.Tensor:
    """Rows rounded to fp8 under the scales of a scheme of vLLM."""
    name, static = scheme
    x = x.to(BF16).float()
    if name == "kFp8Dynamic128Sym":
        scales = (x.unflatten(1, (-1, 128)).abs().amax(2) / 448).repeat_interleave(128, 1)
    elif name == "kFp8DynamicTokenSym":
        scales = x.abs().amax(1, keepdim=True) / 448
    else:
        scales = x.abs().max() / 448 if static is None else static
    return ((x / scales).clamp(-448, 448).to(FP8).float() * scales).double()


def experts_of_codes(
    x: Any, w1: Any, w2: Any, weights: Any, ids: Any, limit: float | None, scheme: Any
) -> torch.Tensor:
    """Experts with "silu"; activations are rounded to fp8, gate and up clamped."""
    choices = [(t, j) for t in range(len(x)) for j in range(ids.shape[1]) if ids[t, j] < len(w1)]
    x, hidden = rounded(x, scheme), []
    for t, j in choices:
        gate, up = (w1[ids[t, j]].double() @ x[t]).chunk(2)
        if limit is None:
            hidden.append(torch.nn.functional.silu(gate) * up)
        else:  # in the steps of eager PyTorch, each in bfloat16
            gate, up = gate.to(BF16).clamp(max=limit), up.to(BF16).clamp(-limit, limit)
            hidden.append((torch.nn.functional.silu(gate) * up).double())
    out = torch.zeros(len(x), w2.shape[1], dtype=torch.float64)
    for (t, j), row in zip(choices, rounded(torch.stack(hidden), scheme), strict=True):
        out[t] += weights[t, j].double() * (w2[ids[t, j]].double() @ row)
    return out


@ANY_DEVICE
def test_int8(installed: Vllm, device: str) -> None:
    """vLLM quantises the weights itself; activations stay as they are."""
    x, weights, ids = routed()
    (c1, s1, _, w1), (c2, s2, _, w2) = (
        coded("int8", sizes, seed)
        for seed, sizes in enumerate([(EXPERTS, 2 * CHANNELS, HIDDEN), (EXPERTS, HIDDEN, CHANNELS)])
    )
    exact = experts_in_float64(x, w1, w2, weights, ids)
    c1, c2, s1, s2 = moved(device, c1, c2, s1, s2)
    oracle, config = installed.int8, layer(installed, device=device)
    backend, experts = oracle.select_int8_moe_backend(config)
    assert experts is installed._modular_experts.PyopsExperts
    named = {"w1_scale": s1, "w2_scale": s2, "per_act_token_quant": True, "int8_backend": backend}
    quant_config = call_with(oracle.make_int8_moe_quant_config, named)
    named = {"moe_quant_config": quant_config, "moe_config": config, "experts_cls": experts, "int8_backend": backend}
    kernel = call_with(oracle.make_int8_moe_kernel, named)
    if device == "cpu" and not hasattr(installed, "awq_marlin"):
        pytest.skip("vLLM 0.33 quantizes activations to int8 by Triton, for GPUs")
    assert error(apply(installed, kernel, x, c1, c2, weights, ids), exact) <= 2.0**-7


@ANY_DEVICE
def test_mxfp4_of_gpt_oss(installed: Vllm, device: str) -> None:
    """mxfp4 weights, biases and clamped swiglu as gpt-oss has them; no weight is repacked."""
    x, weights, ids = routed()
    (c1, s1, _, w1), (c2, s2, _, w2) = (
        coded("mxfp4", sizes, seed)
        for seed, sizes in enumerate([(EXPERTS, 2 * CHANNELS, HIDDEN), (EXPERTS, HIDDEN, CHANNELS)])
    )
    biases = [draw(EXPERTS, n, dtype=BF16, seed=n) for n in (2 * CHANNELS, HIDDEN)]
    exact = experts_in_float64(x, w1, w2, weights, ids, "swigluoai", biases=tuple(biases))
    c1, c2, s1, s2, *biases = moved(device, c1, c2, s1, s2, *biases)
    oracle, config = installed.mxfp4, layer(installed, "swigluoai", device, has_bias=True)
    backend, experts = oracle.select_mxfp4_moe_backend(config)
    assert experts is installed._modular_experts.PyopsExperts
    assert oracle.mxfp4_round_up_hidden_size_and_intermediate_size(backend, 2880, 2880) == (2880, 2880)
    given = c1, c2, s1, s2, *biases
    prepared = oracle.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format(backend, None, *given)
    assert all(one is other for one, other in zip(prepared, given, strict=True))
    quant_config = oracle.make_mxfp4_moe_quant_config(
        mxfp4_backend=backend,
        w1_scale=s1,
        w2_scale=s2,
        gemm1_alpha=1.702,
        gemm1_beta=1.0,
        swiglu_limit=7.0,
        w1_bias=biases[0],
        w2_bias=biases[1],
    )
    kernel = oracle.make_mxfp4_moe_kernel(quant_config, config, experts, backend)
    out = apply(installed, kernel, x, c1, c2, weights, ids)
    assert error(out, exact) <= 2.0**-7
    assert not out[2].any()


@needs_compiler
@pytest.mark.parametrize(("tokens", "sorts"), [(1, []), (3, ["moe_align.cu"])])
def test_launches(installed: Vllm, tokens: int, sorts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both GEMMs and the sum that writes the output; one token is not sorted."""
    names: list[str] = []
    launch = HostFunction.launch

    def noted(function: HostFunction, *args: Any) -> None:
        names.append(function.kernel.rpartition("/")[2])
        launch(function, *args)

    x, weights, ids = (one[:tokens] for one in routed())
    w1 = (draw(EXPERTS, 2 * CHANNELS, HIDDEN, dtype=BF16, seed=1) * HIDDEN**-0.5).to(BF16)
    w2 = (draw(EXPERTS, HIDDEN, CHANNELS, dtype=BF16, seed=2) * CHANNELS**-0.5).to(BF16)
    config = layer(installed)
    backend, experts = installed.unquantized.select_unquantized_moe_backend(config)
    quant_config = installed.config.FUSED_MOE_UNQUANTIZED_CONFIG
    kernel = installed.unquantized.make_unquantized_moe_kernel(quant_config, config, backend, experts)
    monkeypatch.setattr(HostFunction, "launch", noted)
    with cpu("kernels"):
        out = apply(installed, kernel, x, w1, w2, weights, ids)
    assert names == [*sorts, "grouped_gemm_sm90.cu", "grouped_gemm_sm90.cu", "moe_sum.cu"]
    assert error(out, experts_in_float64(x, w1, w2, weights, ids)) <= 2.0**-7


def test_unsupported_cases_stay_with_vllm(installed: Vllm) -> None:
    unquantized, fp8, theirs = installed.unquantized, installed.fp8, installed.triton_moe.TritonExperts
    supported = installed._modular_experts.PyopsExperts.is_supported_config
    standard = installed.modular_kernel.FusedMoEActivationFormat.Standard
    for config, said in (
        (layer(installed, "gelu_tanh"), "activation"),
        (layer(installed, in_dtype=torch.float32), "float32"),
        (layer(installed, "gelu", swiglu_limit=7.0), "clamp limit"),
        (layer(installed, is_lora_enabled=True), "LoRA"),
    ):
        assert unquantized.select_unquantized_moe_backend(config)[1] is theirs
        taken, reason = supported(installed._modular_experts.PyopsExperts, config, None, None, standard)
        assert not taken
        assert said in str(reason)
    blocks = installed.quant_utils.kFp8Static128BlockSym, installed.quant_utils.kFp8Dynamic128Sym
    config = layer(installed, channels=192)
    assert fp8.select_fp8_moe_backend(config, *blocks)[1] is theirs
    # A backend that the user names is taken, too.
    config = layer(installed, moe_backend="triton")
    assert fp8.select_fp8_moe_backend(config, *blocks) == (fp8.Fp8MoeBackend.TRITON, theirs)


def test_choice_names_the_experts_that_are_kept(installed: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed._modular_experts, "keeps", lambda part, case: (part, case) != ("experts", "bf16"))
    theirs = installed.triton_moe.TritonExperts
    assert installed.unquantized.select_unquantized_moe_backend(layer(installed))[1] is theirs


def test_uninstall(vllm: Vllm) -> None:
    """Every name is vLLM's own again, and vLLM chooses as before; a second call of either changes nothing."""
    functions = vllm.fp8.backend_to_kernel_cls, vllm.marlin_moe.fused_marlin_moe, vllm.mxfp4.make_mxfp4_moe_quant_config
    assert vllm.experts.install()
    assert vllm.experts.install() == ""
    vllm.experts.uninstall()
    vllm.experts.uninstall()
    now = vllm.fp8.backend_to_kernel_cls, vllm.marlin_moe.fused_marlin_moe, vllm.mxfp4.make_mxfp4_moe_quant_config
    assert now == functions
    backend, experts = vllm.unquantized.select_unquantized_moe_backend(layer(vllm))
    assert (backend, experts) == (vllm.unquantized.UnquantizedMoeBackend.TRITON, vllm.triton_moe.TritonExperts)


def test_vllm_without_a_function_is_left_alone(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    before = vllm.fp8.backend_to_kernel_cls
    monkeypatch.delattr(vllm.mxfp4, "make_mxfp4_moe_quant_config")
    with pytest.raises(AttributeError, match="make_mxfp4_moe_quant_config"):
        vllm.experts.install()
    assert vllm.fp8.backend_to_kernel_cls is before
