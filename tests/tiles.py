"""The kernels in CUDA Tile C++ (tile.cuh), compiled for Blackwell by a newer CUDA than the one that tests run with.

    python -m tests.tiles FOLDER        fetch NVRTC and the Tile IR assembler into the folder, and compile

Exits with 1 if a kernel does not compile, spills or does not use the tensor cores of its architecture, and with 3 where
the packages cannot be had.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyops
from pyops._core.launch.kernel import Specialisation
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops._core.tensors.dtypes import DType
from pyops._core.text import nvrtc
from pyops.axes import launches
from pyops.ops.attention import mla_plan, prefill_plan, prefill_sm100
from pyops.ops.linear import grouped_sm100
from pyops.ops.linear.gemm_shape import GemmShape
from pyops.ops.linear.gemm_sm100 import TileConfig, refusal
from pyops.ops.linear.grouped_problem import ACTIVATIONS
from pyops.ops.linear.grouped_shape import GroupedShape, Scales
from pyops.ops.linear.grouped_sm100 import GroupedTileConfig
from tests.ops.attention import test_mla_sm100, test_prefill_sm100
from tests.ops.linear import test_grouped_choice
from tests.ops.linear.test_products import problem

# The assembler, tileiras, calls ptxas, which is in nvcc's package, and NVVM.
_PACKAGES = "cuda-nvrtc", "cuda-tileiras", "cuda-nvcc", "nvvm", "cuda-runtime", "cuda-nvdisasm"
_VERSION = "13.5.*"
_ARCHS = "sm_100", "sm_103"
# {dtype: the MMA of tensor memory that multiplies it}
_MMA = {
    dtypes.bfloat16: "UTCHMMA",
    dtypes.float16: "UTCHMMA",
    dtypes.float8_e4m3fn: "UTCQMMA",
    dtypes.float8_e5m2: "UTCQMMA",
    dtypes.int8: "UTCIMMA",
}
_NVFP4 = r"UTCOMMA\.(4X|BLOCK16)"  # on sm_100, and on sm_103
# (op, rows, the MMA of block-scaled operands)
_SCALED = (
    ("cutlass_scaled_fp4_mm", 16, _NVFP4),
    ("cutlass_scaled_fp4_mm", 4096, _NVFP4),
    ("cutlass_fp4_group_mm", 16, _NVFP4),
    ("cutlass_fp4_group_mm", 4096, _NVFP4),
    ("cutlass_mxfp4_group_mm", 4096, "UTCOMMA"),
    ("cutlass_mxfp8_grouped_mm", 4096, "UTCQMMA"),
)

# (dtype, scales, activation, tile) of grouped GEMMs
_GROUPED: tuple[tuple[DType, Scales, str, tuple[int, int]], ...] = (
    (dtypes.bfloat16, "none", "silu", (128, 64)),
    (dtypes.bfloat16, "none", "none", (32, 128)),
    (dtypes.float16, "row", "relu2_no_mul", (64, 64)),
    (dtypes.float8_e4m3fn, "row", "swiglustep", (16, 128)),
    (dtypes.float8_e4m3fn, "block", "none", (128, 128)),
    (dtypes.float8_e4m3fn, "block", "silu", (128, 64)),
    (dtypes.float8_e4m3fn, "block", "silu", (16, 128)),
    (dtypes.float8_e4m3fn, "block", "swigluoai", (64, 64)),
    (dtypes.int8, "row", "silu_no_mul", (128, 128)),
)


class Case(NamedTuple):
    """A specialisation for an architecture, and the pattern of an instruction that its machine code must have."""

    arch: str
    specialisation: Specialisation
    mma: str


def cases() -> Iterator[Case]:
    """Every kind of operands and epilogue, with tiles of few and of many rows, and pages of parts of a KV tile and of
    whole ones."""
    wide, few = TileConfig(128, 128, wide=True), TileConfig(16, 64)
    chosen: list[tuple[DType, TileConfig, bool]] = [(dtype, TileConfig(128, 128), False) for dtype in _MMA]
    chosen += [(dtypes.bfloat16, wide, False), (dtypes.bfloat16, TileConfig(64, 128, wide=True), False)]
    chosen += [(dtypes.bfloat16, TileConfig(32, 128), False), (dtypes.float8_e4m3fn, few, False)]
    chosen += [(dtypes.float8_e4m3fn, one, True) for one in (TileConfig(128, 128), few)]
    for arch in _ARCHS:
        on = replace(device.model("sm_100"), arch=arch, tiles=True)
        for dtype, one, blocks in chosen:
            given = problem(4096, 4096, 4096, dtype, on, blocks)
            if refusal(GemmShape.of(given), on) is None:
                yield Case(arch, one.launch(given).specialisation, _MMA[dtype])
        for dtype, scales, activation, tile in _GROUPED:
            gated = ACTIVATIONS[activation]
            shape = GroupedShape(4096, 8, 4096, 4096, 2, dtype, scales=scales, gated=gated, block_size=128)
            product = test_grouped_choice.problem(shape, activation, on)
            if grouped_sm100.refusal(shape, on) is None:
                yield Case(arch, GroupedTileConfig(*tile).launch(product).specialisation, _MMA[dtype])
        for page, head_size in (16, 128), (64, 128), (64, 256):
            prompt = test_prefill_sm100.problem(head_size=head_size, page=page, on=on)
            (launch,) = prefill_plan.launch(prompt, prefill_sm100.choose(prompt))
            yield Case(arch, launch.specialisation, "UTCHMMA")
        latent = test_mla_sm100.problem(on)
        launch = mla_plan.launch(latent, mla_plan.choose(latent, on))[0]
        yield Case(arch, launch.specialisation, "UTCHMMA")
        for op, rows, mma in _SCALED:
            axes = {"num_tokens": rows, "input_size": 4096, "output_size": 4096}
            yield Case(arch, launches(pyops.registry[op], axes, on)[-1].specialisation, mma)


def get(folder: Path) -> bool:
    """Install the packages into the folder; False where they cannot be had."""
    names = [f"nvidia-{name}=={_VERSION}" for name in _PACKAGES]
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-compile", "--target", str(folder)]
    return subprocess.run([*command, *names], check=False).returncode == 0


def tile_ir(root: Path, arch: str, text: str) -> bytes:
    """The Tile IR of a text, by the NVRTC in the folder. Raises ValueError with its messages."""
    library, program, size = ctypes.CDLL(str(root / "lib/libnvrtc.so.13")), ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture={arch}", *nvrtc.TILE_OPTIONS, "--device-as-default-execution-space"]
    options.append(f"-I{root / 'include'}")
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    failed = library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options))
    )
    what = "ProgramLog" if failed else "TileIR"
    library[f"nvrtcGet{what}Size"](program, ctypes.byref(size))
    made = ctypes.create_string_buffer(size.value)
    library[f"nvrtcGet{what}"](program, made)
    if failed:
        raise ValueError(made.value.decode())
    return made.raw


def trouble(root: Path, number: int, case: Case) -> str | None:
    """What is wrong with the machine code of a case."""
    code, assembled = root / f"{number}.tile", root / f"{number}.cubin"
    try:
        code.write_bytes(tile_ir(root, case.arch, case.specialisation.text))
    except ValueError as error:
        return str(error)
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    done = run([root / "bin/tileiras", f"--gpu-name={case.arch}", code, "-o", assembled])
    if done.returncode:
        return done.stderr
    listing = run([root / "bin/nvdisasm", "-c", assembled]).stdout
    # The assembler may keep its own address of tensor memory in a word, which a warp reads once (.LU), before its loop.
    if re.search(r"\bLDL\b(?!\.LU)", listing):
        return "spills"
    return None if re.search(case.mma, listing) and "UTMALDG" in listing else f"no {case.mma}, or no loads by TMA"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1]).absolute()
    if not get(folder):
        return 3
    chosen = list(cases())
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(partial(trouble, folder / "nvidia/cu13"), range(len(chosen)), chosen))
    for case, wrong in zip(chosen, found, strict=True):
        if wrong:
            print(f"{case.arch} {case.specialisation}: {wrong}")
    print(f"CUDA Tile C++: {found.count(None)} of {len(found)} compiled")
    return int(any(found))


if __name__ == "__main__":
    sys.exit(main())
