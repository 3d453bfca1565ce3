"""`python -m tests.hip emulate`, without hiprtc and tinygrad."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy
import pytest

import pyops
from pyops.example import TorchMaker
from tests.hip import __main__ as command
from tests.hip import specialisations
from tests.hip.emulator import cases, checkout, code_object, fp8
from tests.hip.emulator.cases import Outcome

# A kernel descriptor with a dispatch packet and arguments in scalar registers, and 100 bytes of shared memory.
DESCRIPTOR = """
struct { unsigned lds, scratch, arguments, reserved; long entry; char unused[24]; unsigned rsrc1, rsrc2;
         unsigned short properties, preloaded; }
descriptor __asm__("k.kd") = {100, 8, 0, 0, 0x40, {0}, RSRC1, 9 << 1, 2 | 8, 0};
"""
RELU2 = ("relu2", {"num_tokens": 2})
EXPLICIT = [
    {".offset": 0, ".size": 8, ".value_kind": "global_buffer"},
    {".offset": 8, ".size": 4, ".value_kind": "by_value"},
]
HIDDEN = [
    {".offset": 16, ".size": 4, ".value_kind": "hidden_block_count_y"},
    {".offset": 20, ".size": 2, ".value_kind": "hidden_group_size_x"},
    {".offset": 24, ".size": 8, ".value_kind": "hidden_global_offset_x"},
]


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, rsrc1: str = "3 << 16") -> code_object.CodeObject:
    command = ["gcc", "-shared", "-nostdlib", "-fPIC", "-w", f"-DRSRC1={rsrc1}", "-x", "c", "-", "-o", folder / "k.so"]
    try:
        subprocess.run(command, input=DESCRIPTOR, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler")
    kernel = {".symbol": "k.kd", ".kernarg_segment_size": 32, ".args": EXPLICIT + HIDDEN}
    monkeypatch.setattr(code_object, "metadata", lambda code: kernel)
    return code_object.CodeObject((folder / "k.so").read_bytes())


def test_launch_follows_the_kernel_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = ctypes.c_uint64(0x123456789ABC), ctypes.c_uint32(7)
    given = (ctypes.c_void_p * 2)(*map(ctypes.addressof, values))
    ran = []

    def run_asm(entry: int, size: int, *rest: Any) -> None:
        (*sizes, arguments, rsrc2, scratch, family, registers) = rest
        assert sizes == [3, 5, 1, 64, 1, 1]
        assert (family, scratch) == ("cdna", 8)
        assert rsrc2 >> 15 & 0x1FF == 2  # 100 bytes and 500 more, in granules of 512
        low, high, *words = registers
        packet = ctypes.string_at(low | high << 32, 64)
        assert struct.unpack_from("<HHHHIIIII", packet, 4) == (64, 1, 1, 0, 192, 5, 1, 8, 600)
        assert words == [arguments & 0xFFFFFFFF, arguments >> 32, 0, 0, 0, 0, 0]  # nine in all
        found = ctypes.string_at(arguments, 32)
        assert struct.unpack_from("<QIxxxxIHxxQ", found) == (0x123456789ABC, 7, 5, 64, 0)
        ran.append(entry)

    code = loaded(tmp_path, monkeypatch)
    code.launch(SimpleNamespace(run_asm=run_asm), "cdna", (3, 5, 1), (64, 1, 1), 500, ctypes.addressof(given))
    assert len(ran) == 1


def test_kernel_that_flushes_subnormals_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="subnormal"):
        loaded(tmp_path, monkeypatch, rsrc1="0")


class Word(numpy.ndarray):  # type: ignore[type-arg]
    """The operations of tinygrad's UOp that conversions use, evaluated at once."""

    def bitcast(self, dtype: Any) -> Word:
        return self.view(dtype)

    def cast(self, dtype: Any) -> Word:
        return self.astype(dtype)

    def where(self, yes: Any, no: Any) -> Word:
        return numpy.where(self, yes, no).astype(numpy.int32).view(Word)

    def maximum(self, other: int) -> Word:
        return numpy.maximum(self, other)

    def minimum(self, other: int) -> Word:
        return numpy.minimum(self, other)

    def eq(self, other: Any) -> Word:
        return self == other

    def ne(self, other: Any) -> Word:
        return self != other


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "tinygrad", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "tinygrad.dtype", SimpleNamespace(dtypes=numpy))

    def of(arch: str) -> dict[str, Any]:
        functions: dict[str, Any] = {}
        fp8.apply(SimpleNamespace(_FUNCS=functions), arch)
        return functions

    return of


@pytest.mark.parametrize(
    ("arch", "name", "dtype"),
    [
        ("gfx950", "fp8", ml_dtypes.float8_e4m3fn),
        ("gfx950", "bf8", ml_dtypes.float8_e5m2),
        ("gfx942", "fp8", ml_dtypes.float8_e4m3fnuz),
        ("gfx942", "bf8", ml_dtypes.float8_e5m2fnuz),
    ],
)
def test_conversions_of_fp8(conversions: Any, arch: str, name: str, dtype: Any) -> None:
    functions = conversions(arch)
    codes = numpy.arange(256, dtype=numpy.uint8)
    floats = codes.view(dtype).astype(numpy.float32)
    numpy.testing.assert_array_equal(functions[f"{name}_to_f32"](codes.view(Word)), floats)
    finite = numpy.unique(floats[numpy.isfinite(floats)]).astype(numpy.float64)
    ties = ((finite[1:] + finite[:-1]) / 2).astype(numpy.float32)
    beside = [numpy.nextafter(ties, numpy.float32(to)) for to in (-numpy.inf, numpy.inf)]
    special = numpy.array([0.0, -0.0, 1e-45, -1e-30, 3e38, numpy.inf, -numpy.inf, numpy.nan], numpy.float32)
    every = numpy.concatenate([floats, ties, *beside, special])
    found = functions[f"f32_to_{name}"](every.view(Word)).view(numpy.ndarray)
    right = every.astype(dtype).view(numpy.uint8)
    nan = numpy.isnan(right.view(dtype).astype(numpy.float32))
    numpy.testing.assert_array_equal(found[~nan], right[~nan])
    assert numpy.isnan(found[nan].view(dtype).astype(numpy.float32)).all()


def test_other_checkout_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "test" / "mockgpu" / "amd"
    folder.mkdir(parents=True)
    (folder / "emu.py").write_text("another version")
    with pytest.raises(checkout.Unavailable, match=r"emu\.py is not that of tinygrad's commit"):
        checkout.emulator(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("outcome", "status", "said"),
    [
        (Outcome(RELU2), 0, "gfx942: 1 of 1 cases are right"),
        (Outcome(RELU2, wrong="out: 1 of 2"), 1, "relu2 for gfx942: WRONG: out: 1 of 2"),
        (Outcome(RELU2, missing="KeyError: V_X"), 0, "relu2 for gfx942: not emulated: KeyError: V_X"),
        (checkout.Unavailable("no clang"), 3, ""),
    ],
)
def test_only_a_wrong_result_fails(
    outcome: Any, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcomes(tinygrad: Path, folder: Any, arch: str, found: list[cases.Case]) -> Iterator[Outcome]:
        assert [name for name, _ in found] == ["relu2"]
        if isinstance(outcome, Exception):
            raise outcome
        yield outcome

    monkeypatch.setattr(cases, "outcomes", outcomes)
    assert command.main(["emulate", "folder", "--tinygrad", "checkout", "--arch", "gfx942", "-k", "relu2"]) == status
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("name", "calls"), [("gelu_new", True), ("relu2", False), ("permute_cols", False)])
def test_functions_of_a_reference_are_noticed(name: str, calls: bool) -> None:
    op = pyops.registry[name]
    assert op.example is not None
    assert cases._calls_functions(op, op.example(TorchMaker("cpu", 0), num_tokens=2)) is calls


@pytest.mark.rotates
@pytest.mark.parametrize("arch", cases.FAMILIES)
def test_cases_reach_every_kernel_of_few_blocks(arch: str) -> None:
    chosen = cases.cases(arch, list(pyops.registry.values()))
    assert [name for name, _ in chosen][: len(pyops.registry)] == list(pyops.registry)
    reached = {one.specialisation.kernel.file for case in chosen for one in cases._launches(arch, *case)}
    # These kernels serve only long rows, many tokens or a projection; kernels of several ranks need several devices.
    large = {"sampling/sampling_filter.cu", "cache/group_slots.cu", "cache/reshape_and_cache_groups.cu"}
    large |= {"mamba/chunk_scan_pass.cu", "mamba/selective_scan_tokens.cu", "mamba/gated_delta_chunk.cu"}
    large |= {"linear/wna16_to_dense.cu", "linear/lora_mma.cu", "cache/mla_absorb_rope_insert.cu"}
    one_rank = {file for file in specialisations.of_arch(arch) if not file.startswith("collective/")}
    assert one_rank - reached <= large
