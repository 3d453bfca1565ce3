"""grouped_gemm_sm100.cu, in CUDA Tile C++, by the host backend; python -m tests.tiles compiles it for Blackwell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import pyops
from pyops._core import config
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops.ops.linear import grouped_sm100
from pyops.ops.linear.grouped_engines import choose
from pyops.ops.linear.grouped_sm100 import GroupedTileConfig
from pyops.testing import canaries
from tests.ops.linear.test_grouped import BF16, FP8, INT8, Case, forced
from tests.ops.linear.test_grouped_choice import deepseek, mixtral, problem
from tests.ops.linear.test_products import assert_rounded_once, draw, needs_compiler, positive
from tests.support.blackwell import BLACKWELL, mistaken

FILE = "linear/grouped_gemm_sm100.cu"
SWAPPED, PLAIN = GroupedTileConfig(16, 32), GroupedTileConfig(64, 16)
# Partial tiles in M, N and K; tiles of padding alone; scales that change along K and N.
CASES: list[tuple[GroupedTileConfig, tuple[Any, ...]]] = [
    (PLAIN, (40, 40, 136, "silu", BF16, "none", 64)),
    (SWAPPED, (20, 72, 136, "none", torch.float16, "row", 32)),
    (PLAIN, (20, 72, 144, "swigluoai", FP8, "row", 64)),
    (SWAPPED, (20, 136, 272, "swiglustep", FP8, "tensor", 16)),
    (PLAIN, (20, 144, 272, "none", FP8, "block", 128)),
    (SWAPPED, (20, 128, 272, "silu", FP8, "block", 64)),
    (GroupedTileConfig(32, 32), (20, 136, 272, "swigluoai", FP8, "block", 32)),
    (PLAIN, (20, 40, 144, "relu2_no_mul", INT8, "row", 64)),
    (SWAPPED, (20, 72, 144, "silu_no_mul", INT8, "row", 64)),
]


@needs_compiler
@pytest.mark.parametrize(("one", "case"), CASES, ids=str)
def test_grouped_gemm(one: GroupedTileConfig, case: tuple[Any, ...]) -> None:
    made = Case(*case, with_bias=True)
    with forced(one):
        assert_rounded_once(made.run(), made.exact())


@needs_compiler
@pytest.mark.parametrize("one", [SWAPPED, PLAIN], ids=str)
def test_indices_without_row_or_expert(one: GroupedTileConfig) -> None:
    """They are skipped, rows that are not listed are left alone, and nothing is read or written beyond a tensor."""
    made = Case(20, 40, 136)
    rows, experts, total = (part.clone() for part in made.lists)
    rows[3], rows[65], rows[5] = -5, 2**31 - 1, 10**6
    experts[2] = 99
    out = canaries(made.out)
    with forced(one):
        made.run(out.tensor, (rows, experts, total))
        out.check()
        named = rows[:128][(rows[:128] >= 0) & (rows[:128] < 40)].long()
        assert_rounded_once(out.tensor[named], made.exact()[named])
        others = torch.ones(40, dtype=torch.bool)
        others[named] = False
        assert (out.tensor[others] == 7.0).all()
        for value in (-1, 2**31 - 1):
            made.run(canaries(made.out).tensor, (rows, experts, torch.full_like(total, value)))


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host backend in place of a Blackwell GPU that has compared nothing, with tiles that fit its stack."""
    monkeypatch.setitem(device._HOST, 32, BLACKWELL)
    monkeypatch.setattr(grouped_sm100, "_TILES_M", (32,))
    monkeypatch.setattr(grouped_sm100, "_TILES_N", (16,))
    monkeypatch.delenv("PYOPS_TRUST", raising=False)
    ours = [replace(one, time_us=lambda *_: 0.0) if one.name in FILE else one for one in choose.engines]
    monkeypatch.setattr(choose, "engines", ours)
    choose._fastest.cache_clear()
    pyops.registry["cutlass_moe_mm"].forget()
    with config.cpu("kernels"):
        yield
    choose._fastest.cache_clear()
    pyops.registry["cutlass_moe_mm"].forget()


@needs_compiler
def test_first_use_is_compared(blackwell: None) -> None:
    """Rows by offsets and sizes: the lists are those of the plan."""
    counts, first, n, k = [5, 0, 70, 3], [1, 6, 6, 80], 72, 144
    a, b = draw(90, k, dtype=FP8), draw(4, n, k, dtype=FP8, seed=1)
    a_scales, b_scales = positive(90, 1, seed=2), positive(4, n, seed=3)
    exact = torch.full((90, n), 7.0, dtype=torch.float64)
    for e, (count, begin) in enumerate(zip(counts, first, strict=True)):
        rows = slice(begin, begin + count)
        exact[rows] = a_scales[rows].double() * b_scales[e].double() * (a[rows].double() @ b[e].double().T)
    out, op = torch.full((90, n), 7.0, dtype=BF16), pyops.registry["cutlass_moe_mm"]
    sizes = torch.tensor([[m, n, k] for m in counts], dtype=torch.int32)
    for others in {"linear/gemm_sm80.cu"}, set():
        op.forget()
        op.specialisations.clear()
        pyops.cutlass_moe_mm(out, a, b, a_scales, b_scales, torch.tensor(first), sizes, None, None, None, True, True)
        assert_rounded_once(out, exact)
        assert {one.kernel.file for one in op.specialisations.values()} == {"linear/group_rows.cu", FILE, *others}


MISTAKES = {
    "missed tail of K": ("i * TILE_K < depth", "(i + 1) * TILE_K <= depth"),
    "k-tile of b taken twice": ("b_view.load(column, i), i, 0", "b_view.load(column, i ^ (i == 1)), i, 0"),
    "gates for ups": ("up_view.load(column, i), i, 1", "b_view.load(column, i), i, 1"),
    "rows of out for those of a": ("a_view.gather(a_slots, i)", "a_view.gather(slots, i)"),
    "rows in the order of the lists": (
        "out_view.scatter(slots, column, cast<out_t>(ACTIVATION(first, value(second, 1)",
        "out_view.scatter(a_slots, column, cast<out_t>(ACTIVATION(first, value(second, 1)",
    ),
    "weights of the first expert": ("b + expert * b_rows", "b + 0 * expert"),
    "scales of the first expert": ("b_scales + expert *", "b_scales + 0 * expert *"),
    "scales of the first k-tile": ("k_tile * a_scale_block_step", "0 * a_scale_block_step"),
    "scales of the first columns": ("int64_t(column) * TILE_N * B_STEP) / SCALE_BLOCK", "0) / SCALE_BLOCK"),
    "scales of gates for ups": ("half * up_row + int64_t", "0 * up_row + int64_t"),
    "scales of rows of out": ("scales.gather(a_slots, 0), b_scale", "scales.gather(slots, 0), b_scale"),
    "bias of gates for ups": ("expert * b_rows + half * up_row", "expert * b_rows + 0 * up_row"),
    "weights of rows of a": ("weights.gather(slots, 0)", "weights.gather(a_slots, 0)"),
    "expert of another block": ("tile.row / uint32_t(block_tiles)", "tile.row"),
    "tiles beyond the lists": ("> *num_tokens_post_pad", "> 1 << 30"),
}


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    monkeypatch.setattr(grouped_sm100, "_grouped_gemm_sm100", mistaken(FILE, *MISTAKES[mistake]))
    made = Case(20, 256, 144, "silu", FP8, "block", 32, with_bias=True)
    used = int(made.lists[2])  # of slots after them nothing may be written
    made.lists[0][used:], made.lists[1][used // 32 :] = 0, (made.ids[0, 0] + 1) % 3
    with forced(SWAPPED), pytest.raises((AssertionError, pyops.KernelFault)):
        assert_rounded_once(made.run(), made.exact())


def test_blackwell_prefers_tcgen05() -> None:
    """But not for what it cannot load, or where no kernel has the epilogue."""
    for shape, activation in ((mixtral(4096, 1), "silu"), (mixtral(16, 2), "none"), (deepseek(4096, 1), "silu")):
        for block_size in (16, 64, 128):
            one = problem(replace(shape, block_size=block_size), activation, BLACKWELL)
            found = choose(one, BLACKWELL)
            assert isinstance(found, GroupedTileConfig)
            launch = found.launch(one)
            assert launch.block == (1, 1, 1)
            assert launch.fixed["block_tiles"] * found.tile_m == block_size
    served, blocked = mixtral(16, 1), deepseek(16, 1)
    assert grouped_sm100.refusal(served, BLACKWELL) is None
    for shape, on, words in (
        (served, device.model("sm_100"), "CUDA 13.4"),
        (replace(served, dtype=dtypes.int8), replace(BLACKWELL, arch="sm_103"), "no integers"),
        (replace(served, dtype=dtypes.float32), BLACKWELL, "no tcgen05 MMA"),
        (replace(served, k=0), BLACKWELL, "empty"),
        (replace(served, has_tiles=False), BLACKWELL, "gelu"),
        (replace(served, access=8), BLACKWELL, "16 bytes"),
        (replace(served, out_is_aligned=False), BLACKWELL, "16 bytes"),
        (replace(served, n=2 * 1001), BLACKWELL, "16 bytes"),
        (replace(blocked, dtype=dtypes.bfloat16), BLACKWELL, "fp8"),
        (replace(blocked, n=2 * 1000), BLACKWELL, "inside a block"),
        (replace(served, block_size=24), BLACKWELL, "24 slots"),
    ):
        assert words in (grouped_sm100.refusal(shape, on) or "")
    gelu = problem(served, "gelu", BLACKWELL)
    assert not isinstance(choose(gelu, BLACKWELL), GroupedTileConfig)
