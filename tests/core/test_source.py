"""Kernel texts: inlined includes, line numbers for the compiler, and parsed signatures."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import kernels_cu
from pyops._core.launch.kernel import Kernel
from pyops._core.tensors import dtypes
from pyops._core.text import source

KERNELS = [name for name in kernels_cu.names() if name.endswith(".cu")]
MakeKernel = Callable[[str, str], Kernel]


@pytest.mark.parametrize("name", KERNELS)
def test_every_line_keeps_its_number(name: str) -> None:
    """Line n of a file is line n in the compiler's messages."""
    file, number = "", 0
    checked = set()
    for line in source.flatten(name, {"VEC_SIZE": 8}).splitlines()[1:]:
        if mark := re.fullmatch(r'#line (\d+) "(.*)"', line):
            file, number = mark[2], int(mark[1])
        elif file != "constants":
            original = kernels_cu.read(file.removeprefix("kernels_cu/")).splitlines()[number - 1]
            directive = original.startswith(('#include "', "#pragma once"))
            assert line == ("" if directive else original), f"{file}:{number}"
            checked.add((file, number))
            number += 1
    total = len(kernels_cu.read(name).splitlines())
    # An include is replaced by the header it names, so its own line has no counterpart.
    missing = set(range(1, total + 1)) - {n for f, n in checked if f == f"kernels_cu/{name}"}
    lines = kernels_cu.read(name).splitlines()
    assert all(lines[number - 1].startswith('#include "') for number in missing)


@pytest.mark.parametrize("name", KERNELS)
def test_each_header_comes_once_and_types_come_first(name: str) -> None:
    text = source.flatten(name, {"scalar_t": dtypes.bfloat16, "HIDDEN_SIZE": 4096})
    assert '#include "' not in text
    files = re.findall(r'#line 1 "(.*)"', text)
    assert len(files) == len(set(files))
    assert files.index("kernels_cu/include/number.cuh") < files.index("constants") < files.index(f"kernels_cu/{name}")
    assert text.splitlines()[0] == f"// {name} scalar_t=bfloat16 HIDDEN_SIZE=4096"


@pytest.mark.parametrize(
    ("value", "declaration"),
    [
        (dtypes.bfloat16, "using X = bf16_t;"),
        (dtypes.float8_e4m3fn, "using X = fp8_e4m3_t;"),
        (dtypes.float8_e4m3fnuz, "using X = fp8_e4m3fnuz_t;"),
        (True, "constexpr bool X = true;"),
        (False, "constexpr bool X = false;"),
        (0, "constexpr int X = 0;"),
        (-7, "constexpr int X = -7;"),
        (2**31 - 1, "constexpr int X = 2147483647;"),
        (2**31, "constexpr int64_t X = 2147483648;"),
        ("gelu", "#define X gelu"),
    ],
)
def test_constants(value: object, declaration: str) -> None:
    assert f'#line 1 "constants"\n{declaration}\n' in source.flatten(KERNELS[0], {"X": value})


def test_description_is_a_command_line() -> None:
    constants = {"scalar_t": dtypes.float16, "HIDDEN_SIZE": 64, "HAS_WEIGHT": True}
    assert source.describe(constants) == "scalar_t=float16 HIDDEN_SIZE=64 HAS_WEIGHT=1"


def test_texts_differ_when_constants_do() -> None:
    texts = {
        source.flatten(KERNELS[0], constants)
        for constants in ({"A": 1}, {"A": 2}, {"B": 1}, {"A": True}, {"A": dtypes.float16}, {"A": dtypes.bfloat16})
    }
    assert len(texts) == 6


SIGNATURE = """
// A comment with extern "C" __global__ void other(int a) in it.
extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
signature(scalar_t* __restrict__ out,   // [rows, (columns)], written
          const float *input,           // [rows]
          const int64_t* const ids,
          int64_t rows, int columns, float epsilon, bool flag, double limit, uint32_t seed) {
}
"""


def test_signature(kernel: MakeKernel) -> None:
    made = kernel("signature", SIGNATURE)
    assert made.signature == (
        "signature",
        (
            ("Q", "out"),
            ("Q", "input"),
            ("Q", "ids"),
            ("q", "rows"),
            ("i4x", "columns"),
            ("f4x", "epsilon"),
            ("?7x", "flag"),
            ("d", "limit"),
            ("I4x", "seed"),
        ),
        False,
    )


@pytest.mark.parametrize(
    ("body", "overlaps"),
    [
        ("{\n    // first of all\n    await_previous_kernel();\n    *out = 1;", True),
        ("{ await_previous_kernel(); ", True),
        ("{ *out = 1; await_previous_kernel(); ", False),
        ("{ // await_previous_kernel();\n", False),
        ("{ if (threadIdx.x == 0) { setup(); } await_previous_kernel(); ", True),
        ("{ prefetch_line(out); await_previous_kernel(); ", True),
        ("{ if (*out) prefetch_line(out); await_previous_kernel(); ", False),
        ("{ if (threadIdx.x == 0) { await_previous_kernel(); } ", False),
        ("{ *out = 1; await_previous_of_call(); ", True),
    ],
)
def test_kernel_that_waits_first_may_be_started_early(kernel: MakeKernel, body: str, overlaps: bool) -> None:
    made = kernel("early", f'extern "C" __global__ void early(int* out) {body} }}')
    assert made.signature.overlaps is overlaps


ENTRIES = """
extern "C" __global__ void
several(float* out) {
    await_previous_kernel();
}
constexpr int BETWEEN = 0;
extern "C" __global__ void LAUNCH_BOUNDS(32, 1)
more_several(float* out, int size) {
    *out = size;  // "several(" is another entry
    await_previous_kernel();
}
"""


def test_an_entry_of_several() -> None:
    """A kernel names its entry; the text of a specialisation is without the others, on the same lines."""
    kernels = {name: Kernel("test/several.cu", text=ENTRIES, entry=name) for name in ("several", "more_several")}
    assert {name: [p for _, p in one.signature.parameters] for name, one in kernels.items()} == {
        "several": ["out"],
        "more_several": ["out", "size"],
    }
    assert [one.signature.overlaps for one in kernels.values()] == [True, False]
    assert Kernel("test/several.cu", text=ENTRIES).signature == kernels["several"].signature
    assert kernels["more_several"].renamed(out="other").for_arch("sm_90a").signature.entry == "more_several"
    whole = source.flatten("test/several.cu", {"N": 1}, ENTRIES)
    for name, one in kernels.items():
        text = one(N=1).text
        assert [name for name in kernels if re.search(rf"\b{name}\(float", text)] == [name]
        assert "BETWEEN" in text
        assert text.count("\n") == whole.count("\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__global__ void f(int a) {}", "found none"),
        ('extern "C" __global__ void f(int a) {}\nextern "C" __global__ void g(int a) {}', "found f, g"),
        ('extern "C" __global__ void f(half a) {}', "parameter a has type 'half'"),
        ('extern "C" __global__ void f(unsigned char a) {}', "parameter a has type 'unsigned char'"),
    ],
)
def test_signatures_that_cannot_be_fed(kernel: MakeKernel, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assert kernel("refused", text).signature
