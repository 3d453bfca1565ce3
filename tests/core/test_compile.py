"""Compile errors, read on a machine without a device."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import pyops
from pyops import offline
from pyops._core.launch.kernel import Kernel
from pyops._core.system import device
from pyops._core.text import nvrtc
from pyops.example import ArgMaker
from tests.every_op.test_nvrtc import MISSING

MakeKernel = Callable[[str, str], Kernel]

BROKEN = """// broken: does not compile.

#include "vec.cuh"

extern "C" __global__ void broken(float* out) {
    out[threadIdx.x] = SIZE + undeclared;
}
"""


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_error_shows_the_kernels_own_file_and_line(kernel: MakeKernel) -> None:
    specialisation = kernel("broken", BROKEN)(SIZE=4)
    with pytest.raises(pyops.CompileError) as caught:
        offline.compile("test/broken.cu", str(specialisation), specialisation.text, "sm_90")
    message = str(caught.value)
    assert message.startswith("test/broken.cu did not compile for SIZE=4\n")
    line = BROKEN.splitlines().index("    out[threadIdx.x] = SIZE + undeclared;") + 1
    assert f'kernels_cu/test/broken.cu({line}): error: identifier "undeclared" is undefined' in message
    assert "python -m pyops source" not in message  # no file has this text


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_error_in_a_header_names_the_header(kernel: MakeKernel) -> None:
    specialisation = kernel(
        "wide", BROKEN.replace("broken", "wide").replace("SIZE + undeclared", "Vec<int, 8>().data[0]")
    )()
    with pytest.raises(pyops.CompileError, match=r"kernels_cu/include/vec\.cuh\(\d+\): error: static assertion failed"):
        offline.compile("test/wide.cu", "", specialisation.text, "sm_90")


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_report_has_spills_and_shared_memory(kernel: MakeKernel) -> None:
    """The figures that fail a kernel: an array with run-time indices is in local memory."""
    text = """
extern "C" __global__ void local(int* out, int at) {
    __shared__ int shared[96];
    int stack[64];
    for (int i = 0; i < 64; ++i) stack[out[i] & 63] = i;
    shared[threadIdx.x] = stack[at];
    __syncthreads();
    out[threadIdx.x] = shared[95 - threadIdx.x];
}
"""
    specialisation = kernel("local", text)()
    report = offline.compile("test/local.cu", "", specialisation.text, "sm_90")
    assert report.stack_bytes == 256
    assert report.shared_bytes == 384
    assert 0 < report.registers < 64
    assert report.binary.startswith(b"\x7fELF")


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_architecture_is_the_requested_one(kernel: MakeKernel, arch: str) -> None:
    text = f"""
#if __CUDA_ARCH__ != {arch.removeprefix("sm_")}0
#error another architecture
#endif
extern "C" __global__ void target(int* out) {{ out[0] = __CUDA_ARCH__; }}
"""
    specialisation = kernel("target", text)()
    assert offline.compile("test/target.cu", "", specialisation.text, arch).registers > 0


def test_specialisation_prints_as_a_command_line() -> None:
    op = pyops.registry["rms_norm"]
    (launch,) = op.launches(*op.example(ArgMaker(device.model())))
    assert re.fullmatch(r"scalar_t=bfloat16 HIDDEN_SIZE=4096( [A-Z_]+=\d+)+", str(launch.specialisation))


def test_headers_of_the_version_of_nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels of two versions of CUDA, and no toolkit."""
    for name, text in (("cu13", "#define CUDART_VERSION  13000"), ("cuda_runtime", "#define CUDART_VERSION  12090")):
        folder = tmp_path / "nvidia" / name / "include"
        folder.mkdir(parents=True)
        (folder / "cuda_fp16.h").touch()
        (folder / "cuda_runtime_api.h").write_text(f"// of CUDA\n{text}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "absent"))
    for version, expected in (((13, 0), ["cu13", "cuda_runtime"]), ((12, 9), ["cuda_runtime", "cu13"])):
        monkeypatch.setattr(nvrtc, "version", partial(tuple, version))
        nvrtc.include_folders.cache_clear()
        try:
            assert [Path(folder).parent.name for folder in nvrtc.include_folders()] == expected
        finally:
            nvrtc.include_folders.cache_clear()
