"""Mixtures of experts end to end against float64; missing and remote experts; quantised weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pyops
from pyops import FusedMoEQuantConfig, OpError, tuning
from pyops._core import config
from pyops.fused import expert_products
from pyops.host.run import HostFunction
from pyops.ops.linear.wq_grouped_configs import WqGroupedSm90Config
from pyops.testing import cpu
from tests.ops.linear.test_grouped import activated, needs_compiler
from tests.ops.linear.test_products import draw, positive
from tests.support.calls import DEVICES

pytestmark = pytest.mark.rotates

ANY_DEVICE = pytest.mark.parametrize("device", DEVICES)
FP8, INT8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16


def experts_in_float64(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str = "silu",
    expert_map: torch.Tensor | None = None,
    on_input: bool = False,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    out = torch.zeros(len(x), w2.shape[1], dtype=torch.float64)
    for t in range(len(x)):
        for j, chosen in enumerate(ids[t].tolist()):
            e = chosen
            if expert_map is not None:
                e = int(expert_map[chosen]) if 0 <= chosen < len(expert_map) else -1
            if not 0 <= e < len(w1):
                continue
            weight = weights[t, j].double()
            hidden = w1[e].double() @ x[t].double() + (biases[0][e].double() if biases else 0)
            hidden = activated(hidden * weight if on_input else hidden, activation)
            result = w2[e].double() @ hidden + (biases[1][e].double() if biases else 0)
            out[t] += result if on_input else result * weight
    return out


@ANY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    ("activation", "with_map", "on_input", "with_bias"),
    [("silu", False, False, False), ("silu", True, False, True), ("swigluoai", False, True, True)],
)
def test_fused_experts(
    activation: str, with_map: bool, on_input: bool, with_bias: bool, dtype: torch.dtype, device: str
) -> None:
    """With expert ids out of range, which add nothing."""
    tokens, experts, hidden, channels, top_k = 20, 4, 128, 64, 1 if on_input else 3
    x = draw(tokens, hidden, dtype=dtype)
    w1 = draw(experts, 2 * channels, hidden, dtype=dtype, seed=1) * hidden**-0.5
    w2 = draw(experts, hidden, channels, dtype=dtype, seed=2) * channels**-0.5
    weights = positive(tokens, top_k, seed=3)
    in_all = 2 * experts if with_map else experts
    ids = torch.randint(0, in_all, (tokens, top_k), generator=torch.Generator().manual_seed(4))
    ids[0, 0], ids[1, 0], ids[2] = -3, 10**7, in_all
    expert_map = torch.tensor([3, -1, 0, 9, 1, -7, 2, -1], dtype=torch.int32) if with_map else None
    biases = (draw(experts, 2 * channels, dtype=dtype, seed=5), draw(experts, hidden, dtype=dtype, seed=6))
    options = {"activation": activation, "expert_map": expert_map, "on_input": on_input}
    exact = experts_in_float64(x, w1, w2, weights, ids, **options, biases=biases if with_bias else None)
    moved = [None if one is None else one.to(device) for one in (x, w1, w2, weights, ids, expert_map, *biases)]
    quant_config = FusedMoEQuantConfig(w1_bias=moved[6], w2_bias=moved[7]) if with_bias else None
    call = {"expert_map": moved[5], "quant_config": quant_config, "apply_router_weight_on_input": on_input}
    out = pyops.fused_experts(*moved[:5], activation=activation, **call)
    error = (out.cpu().double() - exact).abs().max() / exact.abs().max()
    assert error <= (2.0**-20 if dtype == torch.float32 else 2.0**-7)
    assert not out[2].any()
    inplace = moved[0].clone()
    assert pyops.fused_experts(inplace, *moved[1:5], True, activation, **call) is inplace
    assert torch.equal(inplace, out)


@needs_compiler
def test_16_bit_call_is_four_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort, a GEMM with the activation, a GEMM, a sum: no copies of inputs, no memory for the activation's inputs."""
    names: list[str] = []
    launch = HostFunction.launch

    def noted(function: HostFunction, *args: Any) -> None:
        names.append(function.kernel.rpartition("/")[2])
        launch(function, *args)

    monkeypatch.setattr(HostFunction, "launch", noted)
    x, ids = draw(5, 64, dtype=BF16), torch.zeros(5, 2, dtype=torch.int32)
    with cpu("kernels"):
        pyops.fused_experts(x, draw(3, 64, 64, dtype=BF16), draw(3, 64, 32, dtype=BF16), positive(5, 2), ids)
    kernels = [name.removeprefix("grouped_").partition("_sm")[0] for name in names]
    assert kernels == ["moe_align.cu", "gemm", "gemm", "moe_sum.cu"]


def test_symbolic_number_of_tokens() -> None:
    """One graph without breaks serves numbers of tokens with different block sizes, also with quantized weights."""
    w1, w2 = (draw(4, *sizes, dtype=BF16, seed=1) * 0.1 for sizes in ((64, 64), (64, 32)))
    (q1, s1, z1, _), (q2, s2, z2, _) = coded("int4", (4, 64, 64), 0), coded("int4", (4, 64, 32), 1)
    scales = {"w1_scale": s1, "w2_scale": s2, "w1_zp": z1, "w2_zp": z2}
    int4 = FusedMoEQuantConfig(weight_quant_dtype="int4", block_shape=[0, 32], **scales)

    def layer(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dense = pyops.fused_experts(x, w1, w2, weights, ids)
        return dense + pyops.fused_experts(x, q1, q2, weights, ids, quant_config=int4)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", dynamic=True, fullgraph=True)
    for tokens in (5, 90, 700):
        x, ids = draw(tokens, 64, dtype=BF16), torch.arange(2 * tokens).reshape(tokens, 2) % 4
        args = x, positive(tokens, 2), ids
        assert torch.equal(compiled(*args), layer(*args))


def quantised(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(quants, scales, values) of weights [experts, rows, columns]."""
    most = 127 if kind.startswith("int8") else 448
    if kind.endswith("block"):
        scales = weight.unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).abs().amax((2, 4)) / most
        wide = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    elif kind.endswith("tensor"):
        scales = weight.abs().amax((1, 2)) / most
        wide = scales[:, None, None]
    else:
        scales = wide = weight.abs().amax(2, keepdim=True) / most
    codes = (weight / wide).round().to(INT8) if most == 127 else (weight / wide).to(FP8)
    return codes, scales, codes.float() * wide


@ANY_DEVICE
@pytest.mark.parametrize("kind", ["fp8 tensor", "fp8 row", "fp8 block", "int8 row", "int8 block"])
def test_quantised_experts(kind: str, device: str) -> None:
    """As exact as 8 bits in two activations: vLLM's bound for the mean error is 0.05."""
    x, ids = draw(20, 256, dtype=BF16), torch.randint(0, 4, (20, 2), generator=torch.Generator().manual_seed(1))
    ids[0, 0] = 9  # out of range: its rows must not affect scales
    weights = positive(20, 2)
    (c1, s1, w1), (c2, s2, w2) = (
        quantised(torch.randn(4, *size, generator=torch.Generator().manual_seed(2)) * size[1] ** -0.5, kind)
        for size in ((256, 256), (256, 128))
    )
    exact = experts_in_float64(x, w1, w2, weights, ids)
    dtype, blocks = (INT8 if kind.startswith("int8") else FP8), [128, 128] if kind.endswith("block") else None
    quant_config = FusedMoEQuantConfig(dtype, kind.endswith("row"), blocks, s1.to(device), s2.to(device))
    moved = [one.to(device) for one in (x, c1, c2, weights, ids)]
    out = pyops.fused_experts(*moved, quant_config=quant_config).cpu()
    assert (out.double() - exact).abs().mean() <= 0.05 * exact.abs().mean()


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def coded(kind: str, sizes: tuple[int, int, int], seed: int) -> tuple[torch.Tensor, Any, Any, torch.Tensor]:
    """(quants, scales, zero points, values in bfloat16) of random weights of a kind."""
    generator = torch.Generator().manual_seed(seed)
    experts, rows, k = sizes
    if kind == "int8":
        codes = torch.randint(-128, 128, sizes, generator=generator)
        scales = (torch.rand(experts, rows, generator=generator) + 0.5) / (74 * k**0.5)
        return codes.to(INT8), scales, None, codes * scales[:, :, None]
    bits, group = (8, 64) if kind.startswith("int8") else (4, 32)
    codes = torch.randint(0, 2**bits, sizes, generator=generator)
    if kind == "mxfp4":
        exponents = torch.randint(121, 124, (experts, rows, k // 32), generator=generator)
        numbers, zeros = torch.cat((E2M1, -E2M1))[codes], None
        scales, factors = exponents.byte(), torch.exp2(exponents - 127.0)
    else:
        zeros = torch.randint(0, 2**bits, (experts, rows, k // group), generator=generator)
        middle = zeros.repeat_interleave(group, 2) if kind.endswith("zeros") else 2 ** (bits - 1)
        numbers = (codes - middle).float()
        scales = ((torch.rand(experts, rows, k // group, generator=generator) + 0.5) / (2**bits * k**0.5)).to(BF16)
        factors = scales.float()
        zeros = (zeros[:, ::2] + 16 * zeros[:, 1::2] if bits == 4 else zeros).byte() if kind.endswith("zeros") else None
    values = (numbers * factors.repeat_interleave(group, 2)).to(BF16)
    packed = codes[:, :, ::2] + 16 * codes[:, :, 1::2] if bits == 4 else codes
    return packed.byte(), scales, zeros, values


@ANY_DEVICE
@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize("kind", ["int4", "int4 zeros", "int8 groups", "int8 groups zeros", "int8", "mxfp4"])
def test_packed_experts(kind: str, tokens: int, device: str) -> None:
    """Small M, with a kernel that reads packed weights, and large M, with weights dequantised first."""
    experts, hidden, channels = 3, 128, 64
    x, weights = draw(tokens, hidden, dtype=BF16), positive(tokens, 2)
    ids = torch.randint(0, experts + 1, (tokens, 2), generator=torch.Generator().manual_seed(1))
    (c1, s1, z1, w1), (c2, s2, z2, w2) = (
        coded(kind, sizes, seed)
        for seed, sizes in enumerate([(experts, 2 * channels, hidden), (experts, hidden, channels)])
    )
    biases = draw(experts, 2 * channels, dtype=BF16, seed=5), draw(experts, hidden, dtype=BF16, seed=6)
    exact = experts_in_float64(x, w1, w2, weights, ids, "swigluoai", biases=biases)
    given = {
        "weight_quant_dtype": kind.split()[0] if kind != "int8" else INT8,
        "block_shape": None if kind in ("int8", "mxfp4") else [0, 64 if kind.startswith("int8") else 32],
    }
    of_weights = {"w1_scale": s1, "w2_scale": s2, "w1_bias": biases[0], "w2_bias": biases[1], "w1_zp": z1, "w2_zp": z2}
    given |= {name: None if one is None else one.to(device) for name, one in of_weights.items()}
    moved = [one.to(device) for one in (x, c1, c2, weights, ids)]
    out = pyops.fused_experts(*moved, activation="swigluoai", quant_config=FusedMoEQuantConfig(**given)).cpu()
    assert (out.double() - exact).abs().max() <= 2.0**-7 * exact.abs().max()


@needs_compiler
def test_mxfp4_by_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both products by wq_grouped_gemm_sm90.cu."""
    sizes, tokens = (3, 128, 128), 100
    x, weights = draw(tokens, 128, dtype=BF16), positive(tokens, 2)
    ids = torch.randint(0, 3, (tokens, 2), generator=torch.Generator().manual_seed(1))
    (c1, s1, _, w1), (c2, s2, _, w2) = coded("mxfp4", sizes, 0), coded("mxfp4", (3, 128, 64), 1)
    exact = experts_in_float64(x, w1, w2, weights, ids, "swigluoai")
    given = FusedMoEQuantConfig(weight_quant_dtype="mxfp4", w1_scale=s1, w2_scale=s2)
    chosen = WqGroupedSm90Config(96, 256, 64)
    monkeypatch.setattr(expert_products, "of_rows", lambda *_: chosen.tile_m)
    with config.cpu("kernels"), tuning.forced("grouped_gemm_packed", chosen):
        pyops.registry["grouped_gemm_packed"].forget()
        out = pyops.fused_experts(x, c1, c2, weights, ids, activation="swigluoai", quant_config=given)
        pyops.registry["grouped_gemm_packed"].forget()
    assert tuning.last["grouped_gemm_packed"] == chosen
    assert (out.double() - exact).abs().max() <= 2.0**-7 * exact.abs().max()


def test_config_object_of_vllm() -> None:
    """Its properties say which tensors are quantised; the dtype of an unquantized weight is None."""
    codes, scales, _, _ = coded("int8", (2, 64, 64), 1)
    x, ids = draw(3, 64, dtype=BF16), torch.zeros(3, 1, dtype=torch.int32)
    absent = dict.fromkeys(
        ("quant_dtype", "block_shape", "a1_scale", "a2_scale", "w1_bias", "w2_bias", "w1_zp", "w2_zp")
    )
    given = {"per_act_token_quant": False, "w1_scale": scales, "w2_scale": scales}
    config = SimpleNamespace(**absent, **given, weight_quant_dtype=INT8)
    call = x, codes, codes, torch.ones(3, 1), ids, False, "silu_no_mul"
    out = pyops.fused_experts(*call, quant_config=config)
    own = FusedMoEQuantConfig(weight_quant_dtype="int8", w1_scale=scales, w2_scale=scales)
    assert torch.equal(out, pyops.fused_experts(*call, quant_config=own))
    plain = SimpleNamespace(**absent | given | {"w1_scale": None, "w2_scale": None}, weight_quant_dtype=None)
    weights = codes.to(BF16)
    call = x, weights, weights, *call[3:]
    assert torch.equal(pyops.fused_experts(*call, quant_config=plain), pyops.fused_experts(*call))


@ANY_DEVICE
@pytest.mark.parametrize("grouped", [False, True])
def test_fused_moe(grouped: bool, device: str) -> None:
    """A token takes the best experts by its logits, from the best groups if there are groups."""
    x, logits = draw(9, 64, dtype=torch.float32), draw(9, 8, dtype=torch.float32, seed=1)
    w1 = draw(8, 32, 64, dtype=torch.float32, seed=2) / 8
    w2 = draw(8, 64, 16, dtype=torch.float32, seed=3) / 4
    ranks = logits.softmax(-1)
    if grouped:
        kept = ranks.view(9, 4, 2).amax(2).topk(2, 1)[1]
        mask = torch.zeros(9, 4).scatter(1, kept, 1.0).repeat_interleave(2, 1)
        ranks = ranks.masked_fill(mask == 0, -1.0)
    best, ids = ranks.topk(3, 1)
    exact = experts_in_float64(x, w1, w2, best / best.sum(1, keepdim=True), ids)
    moved = [one.to(device) for one in (x, w1, w2, logits)]
    options = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2} if grouped else {}
    out = pyops.fused_moe(*moved, 3, True, **options).cpu()
    assert (out.double() - exact).abs().max() <= 2.0**-20 * exact.abs().max()


def test_no_tokens() -> None:
    w1, w2 = torch.ones(2, 8, 4), torch.ones(2, 4, 4)
    empty, ids = torch.empty(0, 4), torch.empty(0, 2, dtype=torch.int32)
    assert pyops.fused_experts(empty, w1, w2, torch.empty(0, 2), ids).shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "tanh"}, "activation: expected none or silu"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input: expected a topk of 1, got 2"),
        ({"w1": torch.ones(2, 8, 5)}, r"w1: expected shape \(2, 8, 4\), got \(2, 8, 5\)"),
        ({"w1": torch.ones(2, 4, 8)}, r"w1: expected shape \(2, 8, 4\), got \(2, 4, 8\)"),
        ({"topk_ids": torch.zeros(3, 2)}, "^fused_experts: topk_ids: expected dtype int32 or int64, got float32"),
        ({"expert_map": torch.zeros(2).long()}, "^fused_experts: expert_map: expected dtype int32, got int64"),
        ({"global_num_experts": 0}, "^fused_experts: global_num_experts: expected 1 to"),
        ({"w2": torch.ones(3, 4, 4)}, r"w2: expected shape \(2, 4, 4\), got \(3, 4, 4\)"),
        ({"topk_weights": torch.ones(3, 1)}, r"topk_weights: expected shape \(3, 2\), got \(3, 1\)"),
        ({"hidden_states": torch.ones(3)}, "hidden_states: expected 2 dimensions"),
        ({"hidden_states": torch.ones(3, 4).double()}, "fused_experts: hidden_states: dtype torch.float64"),
        ({"w1": torch.ones(2, 8, 4).half()}, "fused_experts: w1: expected dtype float32, got float16"),
        ({"w2": torch.ones(2, 4, 4).half()}, "fused_experts: w2: expected dtype float32, got float16"),
        (
            {"quant_config": FusedMoEQuantConfig(w2_bias=torch.ones(2, 5))},
            r"fused_experts: w2_bias: expected shape \(num_experts=2, rows=4\), got \(2, 5\)",
        ),
        ({"quant_config": FusedMoEQuantConfig("int4")}, "quant_config: expected quant_dtype None"),
        ({"quant_config": FusedMoEQuantConfig(FP8, block_shape=[64, 64])}, "expected blocks of 128 x 128"),
        ({"quant_config": FusedMoEQuantConfig(weight_quant_dtype="nvfp4")}, "expected weight_quant_dtype None, int4"),
        ({"quant_config": FusedMoEQuantConfig(weight_quant_dtype="mxfp4")}, "expected w1_scale with weights of mxfp4"),
        ({"quant_config": FusedMoEQuantConfig(FP8, weight_quant_dtype="mxfp4")}, "expected weight_quant_dtype None or"),
        ({"quant_config": FusedMoEQuantConfig(w1_zp=torch.ones(1))}, "expected no zero points"),
        (
            {"quant_config": FusedMoEQuantConfig(gemm1_alpha=1.5)},
            "expected gemm1_alpha None or 1.702 with silu, got 1.5",
        ),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    given = {
        "hidden_states": torch.ones(3, 4),
        "w1": torch.ones(2, 8, 4),
        "w2": torch.ones(2, 4, 4),
        "topk_weights": torch.ones(3, 2),
        "topk_ids": torch.zeros(3, 2, dtype=torch.int32),
    }
    with pytest.raises(OpError, match=message):
        pyops.fused_experts(**given | change)
