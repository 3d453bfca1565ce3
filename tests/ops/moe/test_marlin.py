"""Experts in Marlin's layout against float64: kernels that read packed weights, and weights dequantised first."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import pyops
from pyops import SCALAR_TYPES, OpError, tuning
from pyops._core.system import device
from pyops.example import ArgMaker
from pyops.ops.linear.packed_grouped_engines import choose as choose_experts
from pyops.ops.linear.packed_hopper import PackedConfig
from pyops.ops.linear.packed_large import PackedLargeConfig
from pyops.ops.linear.packed_mma import PackedMmaConfig
from pyops.ops.linear.packed_tile import PackedTileConfig
from pyops.testing import SCHEDULES, scheduled
from tests.ops.linear.test_packed import each
from tests.ops.linear.test_packed_kernels import needs_compiler
from tests.ops.linear.test_products import draw, forced, positive
from tests.ops.moe.test_experts import experts_in_float64
from tests.support import packed
from tests.support.calls import DEVICES

pytestmark = pytest.mark.rotates

ANY_DEVICE = pytest.mark.parametrize("device", DEVICES)
EXPERTS, HIDDEN, CHANNELS, GROUP = 4, 128, 64, 32


def weight(k: int, n: int, seed: int, permuted: bool, with_zeros: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
    """(w [experts, n, k] in float64, its tensors in Marlin's layout)."""
    numbers, parts = [], []
    for e in range(EXPERTS):
        codes, zeros = packed.draw(0, 16, k, n, seed=seed + e), packed.draw(0, 16, k // GROUP, n, seed=seed + 9 + e)
        if not with_zeros:
            zeros.fill_(8)
        scales = ((positive(k // GROUP, n, seed=seed + e) + 0.5) * k**-0.5 / 8).to(torch.bfloat16)
        order = torch.randperm(k, generator=torch.Generator().manual_seed(e)) if permuted else torch.arange(k)
        w = torch.empty(k, n, dtype=torch.float64)
        w[order] = (codes - each(zeros, k)) * each(scales.double(), k)
        numbers.append(w.T)
        part = {"codes": packed.marlin(codes, 4), "scales": packed.marlin_scales(scales), "order": order.int()}
        parts.append({**part, "zeros": packed.marlin_zeros(zeros, 4), "groups": (torch.arange(k) // GROUP).int()})
    found: dict[str, Tensor | None] = {name: torch.stack([one[name] for one in parts]) for name in parts[0]}
    found |= {} if permuted else {"order": None, "groups": None}
    return torch.stack(numbers), found if with_zeros else found | {"zeros": None}


CASES = [
    # tokens, activation, with_map, permuted, with_zeros
    (3, "silu", False, False, False),
    (3, "swigluoai", True, False, True),
    (20, "silu", True, True, False),
    (300, "gelu", False, False, True),  # more rows per expert than the packed kernel takes
    *((3, f"{name}_no_mul", False, False, False) for name in ("silu", "gelu", "relu2")),
]


@ANY_DEVICE
@pytest.mark.parametrize(("tokens", "activation", "with_map", "permuted", "with_zeros"), CASES)
def test_fused_marlin_moe(
    tokens: int, activation: str, with_map: bool, permuted: bool, with_zeros: bool, device: str
) -> None:
    """With expert ids out of range, which add nothing."""
    top_k, in_all = 2, 2 * EXPERTS if with_map else EXPERTS
    columns = CHANNELS if activation.endswith("_no_mul") else 2 * CHANNELS
    x = draw(tokens, HIDDEN, dtype=torch.bfloat16)
    w1, of_w1 = weight(HIDDEN, columns, 1, permuted, with_zeros)
    w2, of_w2 = weight(CHANNELS, HIDDEN, 50, permuted, with_zeros)
    weights = positive(tokens, top_k, seed=3)
    ids = torch.randint(0, in_all, (tokens, top_k), generator=torch.Generator().manual_seed(4))
    ids[0, 0], ids[1, 0], ids[2] = -3, 10**7, in_all
    expert_map = torch.tensor([3, -1, 0, 9, 1, -7, 2, -1], dtype=torch.int32) if with_map else None
    biases = tuple(draw(EXPERTS, n, dtype=torch.bfloat16, seed=n) for n in (columns, HIDDEN))
    exact = experts_in_float64(x, w1, w2, weights, ids, activation, expert_map, biases=biases)

    def moved(one: Any) -> Any:
        return None if one is None else one.to(device)

    ordered = [moved(packed.blocks(bias, packed.PERM_32)) for bias in biases]
    parts = {
        name: moved(of[part])
        for i, of in ((1, of_w1), (2, of_w2))
        for name, part in ((f"g_idx{i}", "groups"), (f"sort_indices{i}", "order"), (f"w{i}_zeros", "zeros"))
    }
    out = pyops.fused_marlin_moe(
        moved(x),
        moved(of_w1["codes"]),
        moved(of_w2["codes"]),
        *ordered,
        moved(of_w1["scales"]),
        moved(of_w2["scales"]),
        moved(weights),
        moved(ids),
        SCALAR_TYPES["uint4" if with_zeros else "uint4b8"].id,
        activation=activation,
        expert_map=moved(expert_map),
        **parts,
    )
    error = (out.cpu().double() - exact).abs().max() / exact.abs().max()
    assert error <= 2.0**-6  # two GEMMs, an activation and a sum, each rounded to bfloat16
    assert not out[2].any()


EIGHT_BITS = [
    # dtype of activations, type of quants, groups, dtype of the result
    (torch.int8, "uint4b8", 4, torch.float16),
    (torch.int8, "uint4", 1, torch.bfloat16),
    (torch.float8_e4m3fn, "uint4", 4, torch.bfloat16),
    (torch.float8_e4m3fn, "uint4b8", 1, torch.float16),
    (torch.float8_e4m3fn, "float4_e2m1f", 4, torch.bfloat16),
]


def weight_for_8_bits(case: tuple[Any, ...], k: int, n: int, seed: int) -> tuple[Tensor, list[Tensor | None]]:
    """(w [experts, n, k] in float64, quants, scales, zero points and the factor of activation scales)."""
    a_dtype, kind, groups, dtype = case
    numbers, parts = [], []
    largest = 2.0**-4 * k**-0.5  # the largest scale
    for e in range(EXPERTS):
        codes, points = packed.draw(0, 16, k, n, seed=seed + e), packed.draw(0, 16, groups, n, seed=seed + 9 + e)
        points = points if kind == "uint4" else torch.full_like(points, 8)
        values, given = (codes - each(points, k)).double(), codes
        scales = ((positive(groups, n, seed=seed + e) + 0.5) * largest / 2).to(dtype)
        stored = scales
        if kind == "float4_e2m1f":
            values, exponents = packed.E2M1[codes].double(), packed.draw(115, 120, groups, n, seed=seed + e)
            scales, stored = torch.exp2(exponents - 127.0), (exponents + 6).byte()
        elif a_dtype == torch.float8_e4m3fn:  # fp8: quants are stored in another encoding, with scales times 2^9
            stored = scales * 2.0**9
            given = torch.where(codes >= each(points, k), codes - each(points, k), 15 - codes)
        elif groups > 1:  # integer scales in the bits of floats, under a factor in the activation scales
            whole = packed.draw(1, 4097, groups, n, seed=seed + e)
            scales, stored = whole * 2.0**-16, whole.to(torch.int16).view(dtype)
        numbers.append((values * each(scales.double(), k)).T)
        zeros = packed.marlin_zeros(points, 4, True) if kind == "uint4" else None
        parts.append((packed.marlin(given, 4, True), packed.blocks(stored, packed.PERM_32), zeros))
    found = [None if one[0] is None else torch.stack(one) for one in zip(*parts, strict=True)]
    is_whole = a_dtype == torch.int8 and groups > 1
    return torch.stack(numbers), [*found, torch.tensor([2.0**-16]) if is_whole else None]


@ANY_DEVICE
@pytest.mark.parametrize("case", EIGHT_BITS)
def test_8_bit_activations(case: tuple[Any, ...], device: str) -> None:
    """One GEMM is as exact as its dtype; two are as exact as 8 bits: vLLM's bound for the mean error is 0.05."""
    a_dtype, kind, _, dtype = case
    tokens, top_k, id = 20, 2, SCALAR_TYPES[kind].id
    w1, (codes1, scales1, zeros1, factor1) = weight_for_8_bits(case, HIDDEN, 2 * CHANNELS, 1)
    w2, (codes2, scales2, zeros2, factor2) = weight_for_8_bits(case, CHANNELS, HIDDEN, 50)
    ids = torch.randint(0, EXPERTS, (tokens, top_k), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    weights, bias = positive(tokens, top_k, seed=3), draw(EXPERTS, 2 * CHANNELS, dtype=dtype)

    def moved(*given: Tensor | None) -> list[Any]:
        return [None if one is None else one.to(device) for one in given]

    x, a_scales = draw(tokens, HIDDEN, dtype=dtype), positive(tokens, 1, seed=7)
    a = (x.float() * (40 if a_dtype == torch.int8 else 1)).to(a_dtype)
    exact = torch.stack([w1[ids[t, j]] @ a[t].double() for t in range(tokens) for j in range(top_k)])
    exact *= a_scales.double().repeat_interleave(top_k, 0)
    a_scales *= 1.0 if factor1 is None else float(factor1)
    exact = (exact + bias.double()[ids.flatten().long()]) * weights.double().view(-1, 1)
    c = torch.empty(tokens * top_k, 2 * CHANNELS, dtype=dtype, device=device)
    of_weight = moved(codes1, packed.blocks(bias, packed.PERM_32), scales1, a_scales, None, zeros1, None, None, None)
    routing = *moved(*pyops.moe_align(ids, 16, EXPERTS), weights), 16, top_k, True
    pyops.moe_wna16_marlin_gemm(*moved(a), c, *of_weight, *routing, id, tokens, 2 * CHANNELS, HIDDEN)
    assert (c.cpu().double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()

    exact = experts_in_float64(x, w1, w2, weights, ids)
    out = pyops.fused_marlin_moe(
        *moved(x, codes1, codes2, None, None, scales1, scales2, weights, ids),
        id,
        input_dtype=a_dtype,
        **dict(zip(("input_global_scale1", "input_global_scale2"), moved(factor1, factor2), strict=True)),
        **dict(zip(("w1_zeros", "w2_zeros"), moved(zeros1, zeros2), strict=True)),
    )
    assert (out.cpu().double() - exact).abs().mean() <= 0.05 * exact.abs().mean()


@needs_compiler
@pytest.mark.parametrize(
    ("permuted", "config"),
    [
        (False, PackedConfig(16, 256, 2, 1, 1)),
        (True, PackedConfig(16, 256, 2, 1, 1)),
        (False, PackedConfig(160, 128, 2, 1, 1, boxes=2)),
        (False, PackedMmaConfig(16, 64, 2, 1, 1)),
        (False, PackedLargeConfig(16, 1, 4, 2)),
        (True, PackedLargeConfig(16, 2, 4, 1)),  # blocks with two tiles of slots
        (False, PackedTileConfig(16, 128, 1, 2, 4, 2)),  # by MFMA
    ],
    ids=str,
)
def test_large_m(permuted: bool, config: Any) -> None:
    """By kernels that read quants, under every schedule: blocks of all experts and of none, padding rows."""
    block_size = {PackedTileConfig: 8, PackedLargeConfig: 32}.get(type(config), config.tile_m)
    m, k, n, top_k = 4 * block_size, 128, 192, 2
    w, of_w = weight(k, n, 1, permuted, True)
    a, weights = draw(m, k, dtype=torch.bfloat16), positive(m, top_k, seed=3)
    experts = torch.tensor([2, 0, 0, -1, 3, 1, 9, 1], dtype=torch.int32)
    ids = torch.randperm(m * top_k + 60, generator=torch.Generator().manual_seed(1))[: len(experts) * block_size].int()
    ids[5], ids[37] = -4, 2**31 - 1
    count = torch.tensor([7 * block_size], dtype=torch.int32)
    exact = torch.full((m * top_k, n), 7.0, dtype=torch.float64)
    bias = draw(EXPERTS, n, dtype=torch.bfloat16, seed=6)
    for slot in range(7 * block_size):
        row, expert = int(ids[slot]), int(experts[slot // block_size])
        if 0 <= row < m * top_k and 0 <= expert < EXPERTS:
            sums = w[expert] @ a[row // top_k].double() + bias[expert].double()
            exact[row] = weights.flatten()[row].double() * sums
    kind, first = SCALAR_TYPES["uint4"].id, None
    of_weight = (
        of_w["codes"],
        packed.blocks(bias, packed.PERM_32),
        of_w["scales"],
        None,
        None,
        of_w["zeros"],
        of_w["groups"],
        of_w["order"],
        None,
    )
    routing = ids, experts, count, weights, block_size, top_k, True, kind, m, n, k
    with forced("moe_wna16_marlin_gemm", config):
        for schedule in SCHEDULES[:2] if isinstance(config, PackedTileConfig) else SCHEDULES:
            c = torch.full((m * top_k, n), 7.0, dtype=torch.bfloat16)
            with scheduled(schedule, warp_size=64 if isinstance(config, PackedTileConfig) else 32):
                pyops.moe_wna16_marlin_gemm(a, c, *of_weight, *routing)
            first = c if first is None else first
            assert torch.equal(c, first)
    assert ((c.double() - exact).abs() <= 2.0**-6 * exact.abs().amax(1, keepdim=True)).all()
    assert (c == 7.0).all(1).equal((exact == 7.0).all(1))


_DENSE = ["dequantize_packed", "grouped_gemm_sm80"]


@pytest.mark.parametrize(
    ("arch", "given", "kernels"),
    [
        ("sm_90", {}, [["wq_gemm_sm80"], ["gather_expert_columns", "wq_gemm_sm90"], _DENSE]),
        ("sm_90", {"codes": "float4_e2m1f"}, [["wq_gemm_sm80"], ["gather_expert_columns", "wq_gemm_sm90"], _DENSE]),
        ("sm_90", {"permuted": True}, [["gather_expert_columns", *_DENSE]]),
        ("sm_90", {"moe_block_size": 8}, [["wq_gemm_sm80"], ["dequantize_packed", "grouped_gemm_simt"]]),
        ("sm_80", {}, [["wq_gemm_sm80"], ["wq_gemm_sm80_large_m"], _DENSE]),
        ("gfx942", {}, [["wq_gemm_cdna"], _DENSE]),
        ("gfx942", {"moe_block_size": 8}, [["wq_gemm_cdna"], ["dequantize_packed", "grouped_gemm_simt"]]),
        ("gfx1100", {"permuted": True}, [["gather_expert_columns", *_DENSE]]),
    ],
)
def test_supported_experts(arch: str, given: dict[str, Any], kernels: list[list[str]]) -> None:
    """The launches of every engine that serves the example. With act order, g_idx gives the groups."""
    op = pyops.registry["moe_wna16_marlin_gemm"]
    args = op.example(ArgMaker(device.model(arch), op.name), **given)
    op.launches(*args)
    problem, choose = tuning.last_choice[op.name]
    found = []
    for one in choose.of_engines(choose.shape_of(problem), problem.device).values():
        with tuning.forced(op.name, one.config):
            found.append([launch.specialisation.kernel.signature.entry for launch in op.launches(*args)])
    assert found == kernels


def mixtral(tokens: int, number: int, block_size: int, kind: str = "uint4b8", on: str = "sm_90") -> Any:
    """The shape of a product of Mixtral with 4 bits."""
    make, experts = ArgMaker(device.model(on), "moe_wna16_marlin_gemm"), 8
    k, n, top_k, rows = (4096, 28672, 2, tokens) if number == 1 else (14336, 4096, 1, 2 * tokens)
    blocks, empty = min(2 * tokens, experts + 2 * tokens // block_size), make.empty
    lists = (empty(blocks * block_size, dtype="int32"), empty(blocks, dtype="int32"), empty(1, dtype="int32"))
    a, c = empty(rows, k, dtype="bfloat16"), empty(2 * tokens, n, dtype="bfloat16")
    of_weight = empty(experts, k // 16, 2 * n, dtype="int32"), None, empty(experts, k // 128, n, dtype="bfloat16")
    routing = *lists, None, block_size, top_k, False, SCALAR_TYPES[kind].id, rows, n, k
    pyops.registry["moe_wna16_marlin_gemm"].launches(a, c, *of_weight, *[None] * 6, *routing)
    problem, choose = tuning.last_choice["moe_wna16_marlin_gemm"]
    return choose.shape_of(problem)


def test_times_of_the_model_for_experts() -> None:
    """docs/performance/experts.md, "Marlin's experts", us: within 22 %, half of them within 6 %."""
    sm80, _, sm90, *_ = choose_experts.engines
    measured = [(sm80, 1, 8, 38.5, 20.6), (sm80, 16, 8, 131, 66), (sm80, 32, 8, 210, 106), (sm80, 64, 16, 309, 160)]
    measured += [(sm90, 32, 16, 164, 83), (sm90, 64, 32, 194, 90), (sm90, 256, 96, 349, 162)]
    on, off = device.model("sm_90"), []
    for engine, tokens, tile, *both in measured:
        for number, us in zip((1, 2), both, strict=True):
            shape = mixtral(tokens, number, tile)
            (found,) = (one for one in engine.configs(shape, on) if one.tile_m == tile)
            rates = choose_experts.rates_of(on)
            off.append(abs(math.log(engine.time_us(found, shape, on, rates) / us)))
    assert max(off) < math.log(1.22)
    assert sorted(off)[len(off) // 2] < 0.06


def test_refusals_for_experts() -> None:
    """Those that GEMMs without experts do not have; the choice has the least time of the engines that serve a shape."""
    sm80, large, sm90, cdna, dense = choose_experts.engines
    on, amd, served = device.model("sm_90"), device.model("gfx942"), mixtral(64, 1, 32)
    for engine, device_ in ((sm80, on), (large, device.model("sm_86")), (sm90, on), (cdna, amd), (dense, on)):
        assert engine.refusal(served, device_) is None
    awq = replace(served, weight=replace(served.weight, layout="awq"))
    short = replace(served, k=4112, weight=replace(served.weight, dense=replace(served.weight.dense, k=4112)))
    for engine, shape, device_, words in (
        (sm80, served, amd, "no mma.sync"),
        (large, served, on, "WGMMA multiplies faster"),
        (large, served, device.model("sm_75"), "no cp.async"),
        (large, replace(served, block_size=24), device.model("sm_80"), "do not divide 24 slots"),
        (sm90, served, device.model("sm_80"), "no WGMMA"),
        (sm90, awq, on, "experts in layout awq"),
        (sm90, replace(served, block_size=8), on, "do not divide 8 slots"),
        (sm90, short, on, "K = 4112 is no multiple of a k-tile of 64 rows"),
        (cdna, served, on, "AMD's matrix cores"),
        (cdna, replace(served, block_size=12), amd, "do not divide 12 slots"),
    ):
        assert words in (engine.refusal(shape, device_) or ""), words
    for tokens, block_size in ((1, 8), (64, 32), (4096, 128)):
        shape = mixtral(tokens, 2, block_size)
        found = choose_experts.candidates(shape, on)
        assert choose_experts.fastest(shape, on) == min(found, key=lambda one: one.us)


@pytest.mark.parametrize(
    ("tokens", "block_size", "number", "expected"),
    [
        (1, 8, 1, PackedMmaConfig(8, 64, 4, 1, 4)),
        (1, 8, 2, PackedMmaConfig(8, 64, 16, 1, 1)),
        (2, 8, 1, PackedMmaConfig(8, 64, 4, 1, 4)),
        (16, 8, 2, PackedMmaConfig(8, 64, 4, 1, 4)),
        (32, 16, 1, PackedConfig(16, 256, 2, 1, 1, boxes=2)),
        (64, 32, 1, PackedConfig(32, 256, 2, 1, 1, boxes=2)),
        (256, 96, 2, PackedConfig(96, 256, 2, 1, 1, boxes=2)),
    ],
)
def test_choice_for_experts(tokens: int, block_size: int, number: int, expected: Any) -> None:
    """For Mixtral's experts with 4 bits."""
    mixtral(tokens, number, block_size)
    assert tuning.last["moe_wna16_marlin_gemm"] == expected


def test_given_workspaces() -> None:
    """They hold the results of both GEMMs and of the activation; the output may overlap the last one."""
    x, ids = draw(3, HIDDEN, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, 3], [1, 3]], dtype=torch.int32)
    (_, of_w1), (_, of_w2) = weight(HIDDEN, 2 * CHANNELS, 1, False, False), weight(CHANNELS, HIDDEN, 50, False, False)
    call = x, of_w1["codes"], of_w2["codes"], None, None, of_w1["scales"], of_w2["scales"], positive(3, 2), ids
    expected = pyops.fused_marlin_moe(*call, SCALAR_TYPES["uint4b8"].id)
    products, activated = (torch.full((size,), torch.nan, dtype=x.dtype) for size in (6 * HIDDEN + 5, 6 * HIDDEN))
    output = activated[: 3 * HIDDEN].view(3, HIDDEN)
    given = {"intermediate_cache13": products, "intermediate_cache2": activated, "output": output}
    assert pyops.fused_marlin_moe(*call, SCALAR_TYPES["uint4b8"].id, **given) is output
    assert torch.equal(output, expected)
    choices = products[: 6 * HIDDEN].view(3, 2, HIDDEN)
    assert torch.equal(choices.float().sum(1).to(x.dtype), expected)
    assert products[6 * HIDDEN :].isnan().all()


def test_refused() -> None:
    x, ids = torch.zeros(2, HIDDEN, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.int32)
    _, of_w1 = weight(HIDDEN, 2 * CHANNELS, 1, False, False)
    _, of_w2 = weight(CHANNELS, HIDDEN, 50, False, False)
    call = x, of_w1["codes"], of_w2["codes"], None, None, of_w1["scales"], of_w2["scales"], torch.ones(2, 2), ids
    kind = SCALAR_TYPES["uint4b8"].id
    for given, argument in (
        ({"activation": "tanh"}, "activation"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input"),
        ({"input_dtype": torch.int16}, "input_dtype"),
        ({"input_global_scale1": torch.ones(1)}, "input_global_scale1"),
        ({"intermediate_cache13": torch.empty(4 * HIDDEN - 1, dtype=torch.bfloat16)}, "intermediate_cache13"),
        ({"intermediate_cache2": torch.empty(4 * HIDDEN)}, "intermediate_cache2"),
    ):
        with pytest.raises(OpError) as caught:
            pyops.fused_marlin_moe(*call, kind, **given)
        assert caught.value.argument == argument
    for slot, given, argument in (
        (0, x.float(), "hidden_states"),
        (1, of_w1["codes"][:, :, :64], "w1"),
        (2, of_w2["codes"][:, :, :64], "w2"),
        (4, torch.ones(EXPERTS, HIDDEN), "bias2"),
        (6, of_w2["scales"][:, :, :-1], "w2_scale"),
        (8, ids.float(), "topk_ids"),
        (9, 7, "quant_type_id"),
    ):
        with pytest.raises(OpError) as caught:
            pyops.fused_marlin_moe(*(*call, kind)[:slot], given, *(*call, kind)[slot + 1 :])
        assert (caught.value.op, caught.value.argument) == ("fused_marlin_moe", argument)
