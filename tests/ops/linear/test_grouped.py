"""Grouped GEMM of rows with the weights of their experts: against float64, by every kernel; rows out of range."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, relu, silu

import pyops
from pyops import OpError, tuning
from pyops._core import config
from pyops._core.launch.scratch import Scratch
from pyops._core.launch.tensor_map import TensorMap
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops._core.tensors.tensor import describe_new
from pyops.example import ArgMaker
from pyops.host.toolchain import toolchains
from pyops.ops.linear import grouped_w4a8
from pyops.ops.linear.grouped_blocks import block_size_for
from pyops.ops.linear.grouped_packed import plan_grouped_gemm_packed
from pyops.ops.linear.grouped_problem import ACTIVATIONS
from pyops.ops.linear.grouped_simt import GroupedSimtConfig
from pyops.ops.linear.grouped_sm80 import GroupedMmaConfig
from pyops.ops.linear.grouped_sm80_small_m import GroupedSmallMConfig
from pyops.ops.linear.grouped_sm90 import GroupedConfig
from pyops.ops.linear.packed_hopper import PackedConfig
from pyops.ops.linear.wq_grouped_configs import (
    WqGroupedCdnaConfig,
    WqGroupedLargeConfig,
    WqGroupedSm80Config,
    WqGroupedSm90Config,
)
from pyops.ops.linear.wq_grouped_problem import WqGroupedShape
from pyops.testing import SCHEDULES, canaries, scheduled
from tests.ops.linear.test_products import assert_rounded_once, draw, positive
from tests.support import packed
from tests.support.calls import DEVICES

ANY_DEVICE = pytest.mark.parametrize("device", DEVICES)
needs_compiler = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
HOPPER = device.model("sm_90")
FP8, INT8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16
Config = GroupedConfig | GroupedMmaConfig | GroupedSmallMConfig | GroupedSimtConfig
QuantizedConfig = WqGroupedSm80Config | WqGroupedLargeConfig | WqGroupedCdnaConfig | WqGroupedSm90Config
WIDE, FEW = GroupedConfig(128, 128), GroupedConfig(64, 256)
MMA, SIMT = GroupedMmaConfig(16, 64, 1, 4, 4), GroupedSimtConfig(16, 64)


_SMALL = 32 * 1024  # shared memory per block of a small device


@contextmanager
def forced(
    one: Config | QuantizedConfig | PackedConfig,
    op: str = "grouped_gemm",
) -> Iterator[None]:
    """In this context, `op` runs kernels with this Config on the CPU."""
    pyops.registry[op].forget()
    try:
        with tuning.forced(op, one), config.cpu("kernels"):
            yield
    finally:
        pyops.registry[op].forget()


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The definition of each activation, for a row."""
    gate, up = (x[::2], x[1::2]) if activation == "swigluoai" else x.chunk(2)
    return {
        "none": lambda: x,
        "silu_no_mul": lambda: silu(x),
        "gelu_no_mul": lambda: gelu(x),
        "relu2_no_mul": lambda: relu(x) ** 2,
        "silu": lambda: silu(gate) * up,
        "gelu": lambda: gelu(gate) * up,
        "swiglustep": lambda: silu(gate).clamp(max=7) * up.clamp(-7, 7),
        "swigluoai": lambda: (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)),
    }[activation]()


class Case:
    """A grouped GEMM of random operands, and its result in float64, row by row."""

    def __init__(
        self,
        num_tokens: int,
        n: int,
        k: int,
        activation: str = "none",
        dtype: torch.dtype = BF16,
        scales: str = "none",
        block_size: int = 64,
        top_k: int = 2,
        num_experts: int = 3,
        with_bias: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(num_tokens)
        b_rows = n * (2 if ACTIVATIONS[activation] else 1)
        self.activation, self.top_k, self.block_size = activation, top_k, block_size
        self.ids = torch.randint(0, num_experts, (num_tokens, top_k), generator=generator, dtype=torch.int32)
        self.lists = pyops.moe_align(self.ids, block_size, num_experts)
        self.a, self.b = draw(num_tokens, k, dtype=dtype), draw(num_experts, b_rows, k, dtype=dtype, seed=1)
        if dtype.itemsize > 1:
            self.b *= k**-0.5
        self.weights = positive(num_tokens, top_k, seed=2)
        out = BF16 if dtype.itemsize == 1 else dtype
        self.bias = draw(num_experts, b_rows, dtype=out, seed=3) if with_bias else None
        small = 2.0**-6 if dtype == INT8 else 1.0
        sizes = {
            "none": ((), ()),
            "row": ((num_tokens, 1), (num_experts, b_rows, 1)),
            "tensor": ((1,), (num_experts,)),
            "block": ((num_tokens, -(-k // 128)), (num_experts, -(-b_rows // 128), -(-k // 128))),
        }[scales]
        self.a_scales, self.b_scales = (positive(*size, seed=4) * k**-0.5 * small if size else None for size in sizes)
        self.out = torch.full((num_tokens * top_k, n), 7.0, dtype=out)

    def run(self, out: torch.Tensor | None = None, lists: Any = None) -> torch.Tensor:
        out = self.out.clone() if out is None else out
        terms = self.weights, self.a_scales, self.b_scales, self.bias
        lists = self.lists if lists is None else lists
        pyops.grouped_gemm(out, self.a, self.b, *lists, *terms, self.top_k, self.block_size, self.activation)
        return out

    def exact(self) -> torch.Tensor:
        rows = []
        for t, expert in enumerate(self.ids.flatten().tolist()):
            x, weight = self.a[t // self.top_k].double(), self.b[expert].double()
            if self.a_scales is not None and self.a_scales.ndim == 2 and self.a_scales.shape[1] > 1:
                x = x * self.a_scales[t // self.top_k].double().repeat_interleave(128)[: len(x)]
                blocks = self.b_scales[expert].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
                weight = weight * blocks[: len(weight), : len(x)]
            x = weight @ x
            if self.a_scales is not None and self.a_scales.numel() in (1, len(self.a)):
                scale = self.a_scales.flatten().double()
                x = x * self.b_scales[expert].double().flatten() * scale[t // self.top_k if len(scale) > 1 else 0]
            if self.bias is not None:
                x = x + self.bias[expert].double()
            rows.append(activated(x * self.weights.flatten()[t].double(), self.activation))
        return torch.stack(rows)


HOPPER_CASES = [
    (GroupedConfig(192, 128), (110, 128, 656, "silu", FP8, "block", 192)),  # one or two of three warpgroups have rows
    (GroupedConfig(192, 192), (110, 200, 200, "none", BF16, "none", 192)),
    (WIDE, (90, 72, 328, "silu", BF16, "none", 128)),
    (FEW, (40, 128, 400, "silu", FP8, "block")),
    (GroupedConfig(128, 64), (90, 72, 272, "none", FP8, "block", 128)),
    (GroupedConfig(64, 96), (20, 66, 200, "none", torch.float16)),
    (GroupedConfig(128, 256), (90, 128, 656, "silu", FP8, "block", 128)),  # one set of accumulators
    (GroupedConfig(128, 224), (90, 300, 272, "none", FP8, "block", 128)),  # 112 columns per piece
    (GroupedConfig(64, 160), (20, 296, 272, "none", FP8, "block")),  # 80 columns per part, some under two scales
    (GroupedConfig(64, 64), (20, 40, 136, "swigluoai", BF16)),
    (GroupedConfig(64, 128), (20, 72, 272, "gelu", INT8, "row")),
]


@needs_compiler
@pytest.mark.parametrize(("one", "case"), HOPPER_CASES, ids=str)
def test_hopper_grouped_gemm(one: GroupedConfig, case: tuple[Any, ...]) -> None:
    """All schedules give the same bits, rounded once."""
    made, found = Case(*case, with_bias=True), []
    with forced(one):
        for schedule in SCHEDULES:
            with scheduled(schedule):
                found.append(made.run())
    assert all(torch.equal(out, found[0]) for out in found)
    assert_rounded_once(found[0], made.exact())


@needs_compiler
@pytest.mark.parametrize(("one", "columns"), [(GroupedConfig(64, 64), 328), (GroupedConfig(192, 64), 200)], ids=str)
def test_many_short_tiles(one: GroupedConfig, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One SM has more tiles of one and two k-tiles than are queued at a time, and blocks of padding between them."""
    monkeypatch.setitem(device._HOST, 32, replace(device.host(), num_sms=1))
    for k in (64, 128):
        test_hopper_grouped_gemm(one, (50, columns, k, "none", BF16, "none", 192))


@needs_compiler
@pytest.mark.parametrize("one", [MMA, GroupedMmaConfig(64, 128, 2, 4, 3), SIMT], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        (20, 66, 200, "silu", torch.float16),
        (20, 66, 51, "swigluoai", BF16),
        (20, 66, 272, "swiglustep", FP8, "block"),
        (20, 65, 272, "relu2_no_mul", INT8, "row"),
        (20, 66, 272, "gelu", FP8, "tensor"),
    ],
    ids=str,
)
def test_mma_and_simt_grouped_gemm(one: Config, case: tuple[Any, ...]) -> None:
    made = Case(*case, with_bias=True)
    with forced(one):
        assert_rounded_once(made.run(), made.exact())


@needs_compiler
@pytest.mark.parametrize(
    ("one", "case"),
    [
        (GroupedMmaConfig(48, 64, 1, 4, 3), (50, 66, 136, "silu", BF16, "none", 48)),
        (GroupedMmaConfig(96, 128, 2, 4, 3), (90, 66, 272, "swigluoai", FP8, "block", 96)),
        (GroupedMmaConfig(16, 192, 1, 4, 3, 2), (20, 264, 272, "silu", FP8, "block", 16)),
        (GroupedMmaConfig(128, 128, 2, 4, 3), (120, 66, 200, "none", torch.float16, "none", 128)),
        (GroupedSimtConfig(48, 64), (50, 66, 72, "silu", BF16, "none", 48)),
    ],
    ids=str,
)
def test_row_tiles_between_powers_of_two(one: Config, case: tuple[Any, ...]) -> None:
    made = Case(*case)
    with forced(one):
        assert_rounded_once(made.run(), made.exact())


@needs_compiler
@pytest.mark.parametrize(
    ("one", "arch", "case"),
    [
        # 2 and 5 k-tiles, the last one not whole; two tiles of some experts; a warp without a k-tile
        (GroupedSmallMConfig(8, 2, 2, 1), "sm_75", (17, 96, 656, "silu", FP8, "block", 8)),
        (GroupedSmallMConfig(16, 4, 3, 2), "sm_80", (20, 128, 272, "swigluoai", FP8, "block", 16)),
        (GroupedSmallMConfig(8, 1, 2, 8), "sm_89", (9, 192, 528, "none", FP8, "block", 16)),
        (GroupedSmallMConfig(16, 2, 2, 4), "sm_75", (20, 128, 144, "relu2_no_mul", FP8, "row", 48)),
        (GroupedSmallMConfig(8, 8, 2, 1), "sm_75", (9, 64, 1040, "gelu", torch.float8_e5m2, "tensor", 8)),
    ],
    ids=str,
)
def test_small_m_grouped_gemm(
    one: GroupedSmallMConfig, arch: str, case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By fp8 MMA, which the host has from sm_80 on, and converted to float16 on sm_75: all schedules give the same
    bits, rounded once; nothing is read or written beyond a tensor."""
    monkeypatch.setenv("PYOPS_ARCH", arch)
    made, found = Case(*case, with_bias=True), []
    with forced(one):
        for schedule in SCHEDULES:
            with scheduled(schedule):
                out = canaries(made.out)
                made.run(out.tensor)
                out.check()
                found.append(out.tensor)
    assert all(torch.equal(out, found[0]) for out in found)
    assert_rounded_once(found[0], made.exact())


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
def test_small_m_multiplies_every_fp8_value(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, and NaN of a weight or of a row makes its results NaN, and no others."""
    monkeypatch.setenv("PYOPS_ARCH", arch)
    every = torch.arange(256, dtype=torch.uint8)
    every[[0x7F, 0xFF]] = 0
    made = Case(8, 64, 256, dtype=FP8, block_size=8, top_k=1, num_experts=1)
    for column in range(64):  # weights with all values, each alone
        made.b[0, column] = torch.zeros(256, dtype=FP8)
    made.b.view(torch.uint8)[0, torch.arange(256) % 64, torch.arange(256)] = every
    made.a[:] = torch.ones(8, 256).to(FP8)
    made.weights = torch.ones_like(made.weights)
    with forced(GroupedSmallMConfig(8, 2, 2, 1)):
        assert torch.equal(made.run().double(), made.exact().to(BF16).double())
        for code, at in ((0x7F, 77), (0xFF, 201)):
            made.b.view(torch.uint8)[0, 5, at] = made.a.view(torch.uint8)[3, at + 1] = code
            out = made.run()
            bad = torch.zeros(8, 64, dtype=torch.bool)
            bad[3], bad[:, 5] = True, True
            assert torch.equal(out.isnan(), bad)
            made.b.view(torch.uint8)[0, 5, at] = made.a.view(torch.uint8)[3, at + 1] = 0


@ANY_DEVICE
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, device: str) -> None:
    made = Case(12, 24, 64, activation, torch.float32)
    exact = made.exact()
    for name in ("out", "a", "b", "weights"):
        setattr(made, name, getattr(made, name).to(device))
    out = made.run(lists=[one.to(device) for one in made.lists]).cpu()
    assert (out.double() - exact).abs().max() <= 2.0**-20 * exact.abs().max()


@needs_compiler
@pytest.mark.parametrize("one", [GroupedConfig(64, 64), MMA, SIMT], ids=str)
def test_indices_without_row_or_expert(one: Config) -> None:
    """They are skipped, rows that are not listed are left alone, and nothing is read or written beyond a tensor."""
    made = Case(20, 40, 136)
    rows, experts, total = (part.clone() for part in made.lists)
    gone = rows[3], rows[64 * 1 + 1]
    rows[3], rows[65], rows[66 if rows[66] == 40 else 5] = -5, 2**31 - 1, 10**6
    experts[2] = 99
    out = canaries(made.out)
    with forced(one):
        made.run(out.tensor, (rows, experts, total))
        out.check()
        assert (out.tensor[int(gone[0])] == 7.0).all()
        assert (out.tensor[made.ids.flatten() == 2] == 7.0).all()
        named = rows[:128][(rows[:128] >= 0) & (rows[:128] < 40)].long()
        error = (out.tensor.double() - made.exact())[named].abs().max()
        assert error <= 2.0**-8 * made.exact().abs().max()
        for value in (-1, 2**31 - 1):
            made.run(canaries(made.out).tensor, (rows, experts, torch.full_like(total, value)))


@needs_compiler
@pytest.mark.parametrize("columns", [40, 200])
def test_grouped_row_tiles_of_one_expert(columns: int) -> None:
    """One expert has more row tiles than a group; every tile is computed once."""
    made = Case(90, columns, 72, num_experts=2, top_k=3)
    for group in (1, 2, 3):
        with forced(GroupedConfig(64, 32, group)):
            assert_rounded_once(made.run(), made.exact())


def test_refused() -> None:
    made = Case(4, 16, 256, scales="block")
    with pytest.raises(OpError, match="a: expected operands of 8 bits under scales of blocks, got bfloat16"):
        made.run()
    made = Case(4, 16, 256, dtype=FP8, scales="block")
    made.b_scales = made.b_scales[:, :, :1]
    with pytest.raises(OpError, match=r"b_scales: expected shape \(3,\) or \(3, 16\), or \(3, 1, 2\) for blocks"):
        made.run()
    made.b_scales = None
    with pytest.raises(OpError, match="a: expected scales of blocks for both operands, or for none"):
        made.run()
    made = Case(4, 16, 64)
    made.activation = "tanh"
    with pytest.raises(OpError, match="activation: expected none or silu"):
        made.run()
    made.activation, made.block_size = "none", 20
    with pytest.raises(OpError, match="block_size: expected a multiple of 8"):
        made.run()


# Rows by offsets and sizes


@ANY_DEVICE
@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("is_view", [False, True])
def test_cutlass_moe_mm(is_swapped: bool, is_view: bool, device: str) -> None:
    """Sizes in both orders, weights in both layouts; experts without rows; rows of no expert are left alone."""
    counts, first, n, k = [5, 0, 70, 3], [1, 6, 6, 80], 72, 144
    a, b = draw(90, k, dtype=FP8), draw(4, n, k, dtype=FP8, seed=1)
    a_scales, b_scales = positive(90, 1, seed=2), positive(4, n, seed=3)
    sizes = torch.tensor([[n, m, k] if is_swapped else [m, n, k] for m in counts], dtype=torch.int32)
    offsets = torch.tensor(first)
    exact = torch.full((90, n), 7.0, dtype=torch.float64)
    for e, (count, begin) in enumerate(zip(counts, first, strict=True)):
        rows = slice(begin, begin + count)
        exact[rows] = a_scales[rows].double() * b_scales[e].double() * (a[rows].double() @ b[e].double().T)
    out = torch.full((90, n), 7.0, dtype=BF16, device=device)
    moved = [one.to(device) for one in (a, b, a_scales, b_scales, offsets, sizes)]
    if is_view:
        moved[1] = moved[1].transpose(1, 2)
    strides = torch.full((4,), k, dtype=torch.int64, device=device)
    pyops.cutlass_moe_mm(out, *moved, strides, strides, strides, True, True)
    assert_rounded_once(out.cpu(), exact)


def w4a8_experts(n: int, k: int, size: int, dtype: torch.dtype, device: str) -> tuple[list[Any], torch.Tensor]:
    """(arguments of `cutlass_w4a8_moe_mm`, float64 result): small integers with exact sums."""
    counts, first, experts = [5, 0, 70, 3], [1, 6, 6, 80], 4
    codes = packed.draw(-8, 8, experts, n, k)
    scales = packed.draw(-4, 5, experts, k // size, n, seed=1).float().to(FP8)
    w = (codes * scales.double().transpose(1, 2).repeat_interleave(size, 2)).to(FP8).double()
    a = packed.draw(-2, 3, 90, k, seed=2).float().to(FP8)
    a_scales, b_scales = positive(90, 1, seed=2), positive(experts, n, 1, seed=3)
    raw = torch.stack([packed.gptq(one.T.contiguous() & 15, 4).T for one in codes]).contiguous().to(device)
    exact = torch.full((90, n), 7.0, dtype=torch.float64)
    for e, (count, begin) in enumerate(zip(counts, first, strict=True)):
        rows = slice(begin, begin + count)
        exact[rows] = a_scales[rows].double() * b_scales[e].double().T * (a[rows].double() @ w[e].T)
    out = torch.full((90, n), 7.0, dtype=dtype, device=device)
    weights, _ = pyops.cutlass_encode_and_reorder_int4b_grouped(raw)
    products = pyops.cutlass_pack_scale_fp8(scales.to(device))
    sizes = torch.tensor([[n, m, k] for m in counts], dtype=torch.int32, device=device)
    moved = a_scales.to(device), b_scales.to(device), products, size, torch.tensor(first, device=device), sizes
    return [out, a.to(device), weights, *moved, None, None, None, None, None], exact


@ANY_DEVICE
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k", "size"), [(80, 96, 32), (96, 384, 32), (288, 256, 128), (32, 128, 128)])
def test_cutlass_w4a8_moe_mm(n: int, k: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Every quant in every expert; rows of no expert are left alone. Weights [80, 96] are dequantized first."""
    (out, *given), exact = w4a8_experts(n, k, size, dtype, device)
    pyops.cutlass_w4a8_moe_mm(out, *given)
    assert_rounded_once(out.cpu(), exact)


@needs_compiler
@pytest.mark.parametrize("one", [PackedConfig(16, 256, 2, 1, 1), PackedConfig(32, 128, 2, 1, 1)], ids=str)
def test_w4a8_experts_by_every_schedule(one: PackedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main loop dequantizes; all schedules give the same bits and write only rows of experts."""
    monkeypatch.setattr(grouped_w4a8, "block_size_for", lambda *_: 32)
    (out, *given), exact = w4a8_experts(96, 640, 64, BF16, "cpu")
    found = []
    with forced(one, "cutlass_w4a8_moe_mm"):
        for schedule in SCHEDULES:
            held = canaries(out)
            with scheduled(schedule):
                pyops.cutlass_w4a8_moe_mm(held.tensor, *given)
            held.check()
            found.append(held.tensor)
        assert tuning.last["cutlass_w4a8_moe_mm"] == one
    assert all(torch.equal(each, found[0]) for each in found)
    assert_rounded_once(found[0], exact)


def test_no_workspace_of_w4a8_weights() -> None:
    """On sm_90 no launch has a workspace as large as the packed weights, for few rows and for many."""
    op, (experts, n, k) = pyops.registry["cutlass_w4a8_moe_mm"], (64, 512, 1024)
    for rows, dtype in ((8, "bfloat16"), (640, "bfloat16"), (1600, "float16")):
        make = ArgMaker(device.model("sm_90"))
        axes = {"num_experts": experts, "output_size": n, "input_size": k, "group_size": 128}
        _, *given = op.example(make, num_tokens=rows, **axes)
        launches = op.launches(make.full(rows, n, value=0.0, dtype=dtype), *given)
        fixed = [one.tensor if isinstance(one, TensorMap) else one for each in launches for one in each.fixed.values()]
        sizes_of = [one.nbytes for one in fixed if isinstance(one, Scratch)]
        assert max(sizes_of) < experts * n * k // 2


@ANY_DEVICE
@pytest.mark.parametrize(("bit", "with_zeros", "block"), [(4, False, 16), (4, True, 1), (8, False, 9), (8, True, 32)])
def test_moe_wna16_gemm(bit: int, with_zeros: bool, block: int, device: str) -> None:
    """Quants and zero points in either half of a byte; rows of a missing expert become 0.

    Blocks have as many slots as vLLM's callers ask for: up to 16, the number of tokens. All of them count.
    """
    tokens, n, k, groups, top_k = 9, 22, 96, 3, 2
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 2**bit, (3, n, k), generator=generator)
    zeros = torch.randint(0, 2**bit, (3, n, groups), generator=generator)
    scales = (positive(3, n, groups) / 64).to(BF16)
    x, weights = draw(tokens, k, dtype=BF16), positive(tokens, top_k, seed=2)
    ids = torch.randint(0, 4, (tokens, top_k), generator=generator, dtype=torch.int32)
    shift = zeros.repeat_interleave(32, 2) if with_zeros else 2 ** (bit - 1)
    dense = ((codes - shift).float() * scales.repeat_interleave(32, 2).float()).to(BF16).double()
    exact = torch.zeros(tokens, top_k, n, dtype=torch.float64)
    for t, j in ((ids < 3).nonzero()).tolist():
        exact[t, j] = weights[t, j].double() * (dense[ids[t, j]] @ x[t].double())
    packed, packed_zeros = codes, zeros
    if bit == 4:
        packed, packed_zeros = codes[:, :, ::2] + 16 * codes[:, :, 1::2], zeros[:, ::2] + 16 * zeros[:, 1::2]
    lists = [one.to(device) for one in pyops.moe_align(ids, block, 4)]
    used = int(lists[2]) // block
    lists = [lists[0][: used * block], lists[1][:used], torch.full_like(lists[2], 2**31 - 1)]
    out = torch.full((tokens, top_k, n), 7.0, dtype=BF16, device=device)
    moved = [one.to(device) for one in (packed.byte(), scales, packed_zeros.byte(), weights)]
    points = moved[2] if with_zeros else None
    pyops.moe_wna16_gemm(x.to(device), out, *moved[:2], points, moved[3], *lists, top_k, block, 64, 64, bit)
    assert_rounded_once(out.cpu(), exact)


@needs_compiler
@pytest.mark.parametrize(
    ("one", "activation", "k", "size"),
    [
        (WqGroupedSm80Config(8, 3, 1), "swigluoai", 416, 32),
        (WqGroupedSm80Config(16, 1, 2), "silu", 640, 128),  # a group per k-tile, five k-tiles per warp
        (WqGroupedSm80Config(16, 4, 3), "none", 128, 32),
        (WqGroupedLargeConfig(16, 1, 4, 2), "swigluoai", 192, 32),  # two groups per k-tile, two tiles per block
        (WqGroupedLargeConfig(16, 2, 4, 1), "silu", 320, 64),  # warps without columns
        (WqGroupedLargeConfig(32, 1, 4, 2), "none", 128, 128),
        (WqGroupedCdnaConfig(16, 64, 1, 2, 2), "swigluoai", 416, 32),  # by MFMA; the last k-tile has 32 elements
        (WqGroupedCdnaConfig(16, 128, 1, 2, 4), "silu", 256, 32),
        (WqGroupedSm90Config(32, 256, 64), "none", 192, 32),  # two groups per k-tile
        (WqGroupedSm90Config(48, 256, 128), "silu", 640, 128),  # five k-tiles of one group each
        (WqGroupedSm90Config(32, 128, 64), "swigluoai", 192, 64),
    ],
    ids=str,
)
def test_packed_experts(
    one: QuantizedConfig,
    activation: str,
    k: int,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """4-bit weights with zero points, several tiles per block: all schedules give the same bits, rounded once."""
    monkeypatch.setitem(device._HOST, 32, replace(device.host(), num_sms=1))
    on_tiles, by_wgmma = isinstance(one, WqGroupedCdnaConfig), isinstance(one, WqGroupedSm90Config)
    block_size = one.tile_m if by_wgmma else 32 if isinstance(one, WqGroupedLargeConfig) else 16
    made = Case(11, 70 if by_wgmma else 64, k, activation, block_size=block_size, with_bias=True)
    rows, generator = made.b.shape[1], torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, made.b.shape, generator=generator)
    zeros = torch.randint(0, 16, (3, rows, k // size), generator=generator)
    scales = (positive(3, rows, k // size) / 256).to(BF16)
    shift, wide = (x.repeat_interleave(size, 2) for x in (zeros, scales))
    made.b = ((codes - shift) * wide.float()).to(BF16)
    packed, points = ((x[..., ::2, :] + 16 * x[..., 1::2, :]).byte() for x in (codes.transpose(1, 2), zeros))
    given = made.a, packed.transpose(1, 2).contiguous(), scales, points, *made.lists, made.weights, made.bias
    found = []
    with forced(one, "grouped_gemm_packed"):
        for schedule in SCHEDULES[:2] if on_tiles else SCHEDULES:
            out = canaries(made.out)
            with scheduled(schedule, warp_size=64 if on_tiles else 32):
                pyops.grouped_gemm_packed(out.tensor, *given, made.top_k, block_size, activation, "uint4")
            out.check()
            found.append(out.tensor)
    assert all(torch.equal(out, found[0]) for out in found)
    assert_rounded_once(found[0], made.exact())


@needs_compiler
def test_hostile_lists_for_packed_experts() -> None:
    """Only rows in range are written, by experts in range, whatever the lists hold."""
    generator = torch.Generator().manual_seed(1)
    a, codes = draw(9, 64, dtype=BF16), torch.randint(-128, 128, (3, 64, 64), generator=generator, dtype=INT8)
    scales = positive(3, 64) / 64
    experts = torch.tensor([2, -1, 3, 0, -(2**31), 2**31 - 1, 1], dtype=torch.int32)
    ids = torch.randperm(16 * len(experts), generator=generator).int()
    ids[:4], ids[50:52] = torch.tensor([-1, 18, -(2**31), 2**31 - 1]), torch.tensor([18, -5])
    exact = torch.full((18, 64), 7.0, dtype=torch.float64)
    for place, row in enumerate(ids.tolist()):
        expert = int(experts[place // 16])
        if 0 <= row < 18 and 0 <= expert < 3:
            exact[row] = scales[expert].double() * (codes[expert].double() @ a[row // 2].double())
    out = canaries(torch.full((18, 64), 7.0, dtype=BF16))
    count = torch.tensor([2**31 - 1], dtype=torch.int32)
    with config.cpu("kernels"):
        pyops.grouped_gemm_packed(
            out.tensor, a, codes, scales, None, ids, experts, count, None, None, 2, 16, "none", "int8"
        )
    out.check()
    assert torch.equal((out.tensor == 7.0).all(1), (exact == 7.0).all(1))
    assert_rounded_once(out.tensor, exact)


@pytest.mark.parametrize(
    ("tokens", "activation", "arch", "kernels"),
    [
        (1, "silu", "sm_90", ["TILE_M=8 WARPS=8 "]),
        (1, "none", "sm_90", ["TILE_M=8 WARPS=16 "]),
        (4, "silu", "sm_90", ["TILE_M=8 WARPS=4 "]),
        (64, "silu", "sm_80", ["TILE_M=16 WARPS=4 "]),
        (32, "silu", "sm_90", ["gather_expert_columns.cu", "TILE_M=16 TILE_N=256 TILE_K=128 "]),
        (64, "silu", "sm_90", ["gather_expert_columns.cu", "TILE_M=32 TILE_N=256 TILE_K=128 "]),
        (256, "none", "sm_90", ["gather_expert_columns.cu", "TILE_M=96 TILE_N=256 TILE_K=128 "]),
        (512, "silu", "sm_90", ["gather_expert_columns.cu", "TILE_M=160 TILE_N=128 TILE_K=128 "]),
        (1, "none", "small", ["TILE_M=8 WARPS=2 "]),
        (4096, "silu", "sm_90", ["gather_expert_columns.cu", "TILE_M=96 TILE_N=256 TILE_K=128 "]),
        (65536, "silu", "sm_90", ["wna16_to_dense.cu", "grouped_gemm_sm90.cu"]),
        (32, "silu", "gfx942", ["TILE_M=16 TILE_N=64 WARPS_M=1 WARPS_N=2 PLACES=16 DEPTH=4 "]),
        (1, "none", "gfx1201", ["TILE_M=16 TILE_N=64 WARPS_M=1 WARPS_N=4 PLACES=8 DEPTH=4 "]),
        (65536, "silu", "gfx942", ["wna16_to_dense.cu", "gemm_sm80.cu"]),
    ],
)
def test_choice_for_packed_experts(tokens: int, activation: str, arch: str, kernels: list[str]) -> None:
    """For Mixtral's experts with 4 bits, by the block size that is chosen for the product."""
    on = replace(device.model("sm_80"), shared_memory=_SMALL) if arch == "small" else device.model(arch)
    experts, n, k = 8, *((14336, 4096) if activation == "silu" else (4096, 14336))
    rows, num_rows = n * (2 if activation == "silu" else 1), 2 * tokens
    top_k = 1 if activation == "none" else 2
    int4: Any = {"type": pyops.SCALAR_TYPES["uint4"], "group_size": 128, "scale_dtype": dtypes.bfloat16}
    size = block_size_for(WqGroupedShape(num_rows, experts, rows, k, top_k, gated=top_k - 1, **int4), on)
    blocks = min(num_rows, experts + num_rows // size)
    sizes = {
        "out": ((num_rows, n), dtypes.bfloat16),
        "a": ((num_rows if activation == "none" else tokens, k), dtypes.bfloat16),
        "b": ((experts, rows, k // 2), dtypes.uint8),
        "b_scales": ((experts, rows, k // 128), dtypes.bfloat16),
        "sorted_token_ids": ((blocks * size,), dtypes.int32),
        "expert_ids": ((blocks,), dtypes.int32),
        "num_tokens_post_pad": ((1,), dtypes.int32),
    }
    args = {name: describe_new("grouped_gemm_packed", name, *one, on) for name, one in sizes.items()}
    given: Any = (
        *list(args.values())[:4],
        None,
        *list(args.values())[4:],
        None,
        None,
        top_k,
        size,
        activation,
        "uint4",
    )
    chosen = plan_grouped_gemm_packed(*given)
    found = [f"{one.specialisation.kernel.file} {one.specialisation}" for one in chosen]
    assert all(one.shared <= on.shared_memory for one in chosen)
    assert len(found) == len(kernels)
    assert all(kernel in text for kernel, text in zip(kernels, found, strict=True))


@needs_compiler
def test_hostile_offsets_and_sizes() -> None:
    """Only rows in range are written, whatever the offsets and sizes hold."""
    n, k = 40, 64
    a, b = draw(70, k, dtype=FP8), draw(5, n, k, dtype=FP8, seed=1)
    sizes = torch.tensor([[2**31 - 1, n, k], [-4, n, k], [9, n, k], [9, n, k], [9, n, k]], dtype=torch.int32)
    offsets = torch.tensor([66, 0, -3, 2**62, -(2**63)])
    out = canaries(torch.full((70, n), 7.0, dtype=BF16))
    one = torch.ones(1), torch.ones(5, 1)
    with config.cpu("kernels"):
        pyops.cutlass_moe_mm(out.tensor, a, b, *one, offsets, sizes, None, None, None, False, False)
    out.check()
    assert (out.tensor[:66] == 7.0).all()
    assert_rounded_once(out.tensor[66:], a[66:].double() @ b[0].double().T)
