"""mla_decode_sm100.cu, in CUDA Tile C++, by the host backend; python -m tests.tiles compiles it for Blackwell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import pyops
from pyops._core.system import device
from pyops._core.system.device import Device
from pyops.example import ArgMaker
from pyops.ops.attention import mla_sm100
from pyops.ops.attention.mla_plan import choose
from pyops.ops.attention.mla_problem import MlaProblem
from pyops.ops.attention.mla_sm100 import MlaTileConfig
from tests.ops.attention import test_mla, test_mla_sparse
from tests.ops.attention.test_mla import MLA
from tests.ops.attention.test_mla_sparse import SPARSE
from tests.ops.linear.test_products import needs_compiler
from tests.support.blackwell import BLACKWELL, forget, mistaken, on_blackwell

pytestmark = pytest.mark.rotates

FILE, COMBINE = "attention/mla_decode_sm100.cu", "attention/decode_combine.cu"


@pytest.fixture(autouse=True)
def blackwell(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The host backend in place of a Blackwell GPU, with tiles that fit its stack."""
    monkeypatch.setattr(mla_sm100, "HEADS", 8)
    monkeypatch.setattr(mla_sm100, "TOKENS", 32)
    with on_blackwell(monkeypatch, MLA, SPARSE):
        yield


def kernels_of(op: Any) -> set[str]:
    return {one.kernel.file for one in op.specialisations.values()}


# Heads of a part of a block, and several query tokens; splits of one sequence among whole ones; pages of a part of a
# tile, and of several.
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "page", "splits", "tokens"), [(20, 16, 1, 1), (17, 5, 2, 1), (20, 64, 1, 2)])
def test_matches_float64(heads: int, page: int, splits: int, tokens: int, dtype: torch.dtype) -> None:
    call = test_mla._call([90, 0, 3, 310], heads, page, dtype, num_kv_splits=splits)
    call = test_mla._with_tokens(call, tokens) if tokens > 1 else call
    test_mla._assert_is_attention(call)
    assert kernels_of(MLA) == {FILE, *([COMBINE] if splits > 1 else [])}


@needs_compiler
def test_lists_of_slots() -> None:
    call = test_mla_sparse._call(3, 70, 20)
    test_mla_sparse._assert_is_attention(call)
    assert FILE in kernels_of(SPARSE)


@needs_compiler
def test_hostile_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host backend finds any access outside of the tensors; tokens that do not exist contribute nothing."""
    monkeypatch.setattr(mla_sm100, "_MIN_HEADS", 1)
    test_mla.test_hostile_indices(torch.bfloat16)
    test_mla.test_missing_pages("cpu")
    test_mla_sparse.test_hostile_lists(torch.bfloat16, 5)
    assert FILE in kernels_of(MLA)
    assert FILE in kernels_of(SPARSE)


@needs_compiler
def test_first_use_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYOPS_TRUST")
    for others in {"attention/mla_decode.cu"}, set():
        forget(MLA, SPARSE)
        test_mla._assert_is_attention(test_mla._call([90, 33], 20, num_kv_splits=1))
        assert kernels_of(MLA) == {FILE, *others}


MISTAKES = {
    "scores of one half": ("scores = multiply_nt(other_query,", "multiply_nt(other_query,"),
    "scores without the rotated key": ("scores = multiply_nt(rotated_query,", "multiply_nt(rotated_query,"),
    "the other half's values": ("(weights), own,", "(weights), latent.gather(at, 1 - half),"),
    "results of the other half": ("whole.store(group, half,", "whole.store(group, 1 - half,"),
    "heads of the first group": ("pe.load(group, 0)", "pe.load(0, 0)"),
    "tokens of the next split": ("positions < column_of<TOKENS>(end)", "positions < column_of<TOKENS>(int(length))"),
    "results of the last row max": ("accum * over_values(factor));", "accum);"),
    "row sum by the last row max": ("row_sum * factor +", "row_sum +"),
    "a later token": ("int(length) - QUERY_TOKENS + 1", "int(length) - QUERY_TOKENS + 2"),
    "slots of the first page": ("page * column_of<TOKENS>(int(step)) + slot", "slot"),
    "row max to the base of two": ("row_max * column_of<ROWS>(LN_2)", "row_max"),
    "partial results of the first split": ("* max_splits + split;", "* max_splits;"),
}


def attend() -> None:
    """Calls that take every branch of the kernel together, until one is wrong."""
    for heads, page, splits, tokens in ((20, 16, 1, 1), (17, 5, 2, 1), (20, 64, 1, 2)):
        call = test_mla._call([90, 3, 330], heads, page, num_kv_splits=splits)
        forget(MLA, SPARSE)
        test_mla._assert_is_attention(test_mla._with_tokens(call, tokens) if tokens > 1 else call)


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    monkeypatch.setattr(mla_sm100, "_mla_decode_sm100", mistaken(FILE, *MISTAKES[mistake]))
    with pytest.raises((AssertionError, pyops.KernelFault)):
        attend()


def problem(on: Device = BLACKWELL, heads: int = 128, dtype: str = "bfloat16", gap: int = 0) -> MlaProblem:
    """64 sequences of up to 4096 tokens; a page begins `gap` elements after the last one."""
    make = ArgMaker(on)
    out, nope, pe = (make.empty(64, heads, size, dtype="bfloat16") for size in (512, 512, 64))
    cache = make.empty(4096, 64, 576, dtype=dtype)
    cache = replace(cache, strides=(cache.strides[0] + gap, *cache.strides[1:]))
    lengths, table = make.empty(64, dtype="int32"), make.empty(64, 64, dtype="int32")
    return MlaProblem(out, None, nope, pe, cache, lengths, table, None, 0)


def test_choice() -> None:
    """Blackwell's own kernel takes many heads, and leaves to others what it cannot load."""
    one = problem()
    found = choose(one, BLACKWELL)
    assert isinstance(found, MlaTileConfig)
    launched = found.launch_splits(one, {"max_splits": found.max_splits})
    assert launched.grid == (64 * 128 // mla_sm100.HEADS * 2, found.max_splits, 1)
    for words, other in (
        ("CUDA 13.4", problem(device.model("sm_100"))),
        ("17 heads", problem(heads=16)),
        ("16-bit", problem(dtype="float8_e4m3fn")),
        ("no numbers", problem(gap=8)),
    ):
        assert words in (mla_sm100.refusal(other) or "")
        assert not isinstance(choose(other, other.cache.device), MlaTileConfig)
