"""The runtime on a device: parameters of kernels, when kernels are compiled, and the effects of a broken kernel
cache."""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pyops
from pyops._core.launch.kernel import Kernel, Launch
from pyops._core.launch.scratch import Scratch
from pyops._core.system import device, folders
from pyops._core.tensors.tensor import TensorArg
from pyops._core.text import compiler

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
MakeKernel = Callable[[str, str], Kernel]
RMS_NORM = pyops.registry["rms_norm"]


def unload() -> None:
    """Make the process forget all its kernels."""
    import cupy

    for op in pyops.registry.values():
        op.forget()
        for specialisation in op.specialisations.values():
            specialisation.kernel._loaded.clear()
        op.specialisations.clear()
    compiler._loaded.clear()
    cupy.clear_memo()  # CuPy remembers its modules by their text
    gc.collect()


def norm(hidden_size: int = 64) -> None:
    """A call with a checked result."""
    x = torch.randn(3, hidden_size, device="cuda")
    out = torch.full_like(x, float("nan"))
    pyops.rms_norm(out, x, None, 1e-6)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (hidden_size,), None, 1e-6))


# Parameters of kernels

ECHO = """
// What each parameter holds, as bits.
extern "C" __global__ void echo(int64_t* out, float a, int b, int64_t c, bool d, double e, uint32_t f) {
    out[0] = __float_as_uint(a);
    out[1] = b;
    out[2] = c;
    out[3] = d;
    out[4] = __double_as_longlong(e);
    out[5] = f;
}
"""


def test_scalars_are_packed_by_their_c_types(kernel: MakeKernel) -> None:
    @pyops.op(out="out")
    def echo(out: Tensor, a: float, b: int, c: int, d: bool, e: float, f: int) -> None:
        raise NotImplementedError

    made = kernel("echo", ECHO)

    @echo.plan
    def _(out: TensorArg, a: float, b: int, c: int, d: bool, e: float, f: int) -> Launch:
        return made().launch(grid=1, block=1)

    out = torch.zeros(6, dtype=torch.int64, device="cuda")
    for a, b, c, d, e, f in [
        (1.5, 7, 2**40, True, 0.1, 2**32 - 1),
        (-0.1, -7, -(2**63), False, -3e38, 0),
        (float("inf"), 2**31 - 1, 2**63 - 1, True, 5e-324, 1),
    ]:
        echo(out, a, b, c, d, e, f)
        (bits,) = struct.unpack("<I", struct.pack("<f", a))
        (wide,) = struct.unpack("<q", struct.pack("<d", e))
        assert out.tolist() == [bits, b, c, int(d), wide, f]
    for wrong, name in (
        ((1e300, 1, 1, True, 1.0, 1), "a"),
        ((None, 1, 1, True, 1.0, 1), "a"),
        (("x", 1, 1, True, 1.0, 1), "a"),
    ):
        with pytest.raises(pyops.OpError, match=f"^echo: {name}: "):
            echo(out, *wrong)


COUNT = """
#include "memory.cuh"

// The last block to arrive says how many blocks have arrived before it. The counter is 0 again behind it.
extern "C" __global__ void count(int64_t* out, uint32_t* counter) {
    __shared__ uint32_t is_last;
    const uint32_t before = *const_cast<const volatile uint32_t*>(counter);
    if (arrives_last(counter, gridDim.x, &is_last) && threadIdx.x == 0) out[0] += gridDim.x;
    if (before >= gridDim.x) out[1] = before;  // garbage, or a count that an earlier call has left
}
"""


def test_workspaces_are_zero_at_every_call_on_every_stream(kernel: MakeKernel) -> None:
    @pyops.op(inout="out")
    def count(out: Tensor) -> None:
        raise NotImplementedError

    made = kernel("count", COUNT)

    @count.plan
    def _(out: TensorArg) -> Launch:
        return made().launch(grid=257, block=64, counter=Scratch(4, zeroed=True))

    outs = [torch.zeros(2, dtype=torch.int64, device="cuda") for _ in range(3)]
    torch.cuda.synchronize()
    for out in outs:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                count(out)
    captured = [torch.zeros(2, dtype=torch.int64, device="cuda") for _ in range(4)]
    for out, warms_up in zip(captured, (True, False, False, False), strict=True):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        if warms_up:
            with torch.cuda.stream(stream):
                count(out)
        else:
            out[0] += 257
        with torch.cuda.graph(graph, stream=stream):
            count(out)
        for _ in range(3):
            graph.replay()
    torch.cuda.synchronize()
    assert [out.tolist() for out in outs] == [[25700, 0]] * 3
    assert [out.tolist() for out in captured] == [[4 * 257, 0]] * 4


CLUSTERS = """
// The blocks of the cluster along each dimension, and the threads of the block along y and z.
extern "C" __global__ void clusters(int64_t* out) {
    uint32_t x, y, z;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(x));
    asm("mov.u32 %0, %%cluster_nctaid.y;" : "=r"(y));
    asm("mov.u32 %0, %%cluster_nctaid.z;" : "=r"(z));
    if (threadIdx.x + threadIdx.y + threadIdx.z + blockIdx.x + blockIdx.y != 0) return;
    out[0] = x;
    out[1] = y;
    out[2] = z;
    out[3] = blockDim.y;
    out[4] = blockDim.z;
}
"""


def test_launch_passes_clusters_and_3d_blocks(kernel: MakeKernel) -> None:
    @pyops.op(out="out")
    def clusters(out: Tensor) -> None:
        raise NotImplementedError

    made = kernel("clusters", CLUSTERS)

    @clusters.plan
    def _(out: TensorArg) -> Launch:
        return made().launch(grid=(4, 6), block=(32, 2, 3), cluster=(2, 3))

    if not device.get(0).supports("clusters"):
        pytest.skip("no clusters before compute capability 9.0")
    out = torch.zeros(5, dtype=torch.int64, device="cuda")
    clusters(out)
    assert out.tolist() == [2, 3, 1, 2, 3]


TWO = """
extern "C" __global__ void {name}(float* out, const float* input, int64_t size) {{
    const int64_t i = int64_t(blockIdx.x) * 64 + threadIdx.x;
    if (i < size) out[i] = {value};
}}
"""


def test_two_launches_of_one_op(kernel: MakeKernel) -> None:
    """They run in order, and an empty one among them is left out."""

    @pyops.op(out="out")
    def two_steps(out: Tensor, input: Tensor) -> None:
        out.copy_((input + 1) * 2)

    first = kernel("first_step", TWO.format(name="first_step", value="input[i] + 1"))
    second = kernel("second_step", TWO.format(name="second_step", value="out[i] * 2"))

    @two_steps.plan
    def _(out: TensorArg, input: TensorArg) -> list[Launch]:
        grid = -(-input.numel // 64)
        launches = [made().launch(grid=grid, block=64, size=input.numel) for made in (first, second)]
        return [*launches, first().launch(grid=0, block=64, size=0)]

    for size in (1, 64, 1_000_000):
        x = torch.randn(size, device="cuda")
        out = torch.full_like(x, float("nan"))
        for _ in range(3):
            two_steps(out, x)
            assert torch.equal(out, (x + 1) * 2)
    assert {one.kernel for one in two_steps.compiled()} == {"test/first_step.cu", "test/second_step.cu"}


# Programmatic dependent launch

SLOW = """
// Write long after having let the next kernel start.
extern "C" __global__ void {name}(float* out, float value) {{
    {first}
    const int64_t start = clock64();
    while (clock64() - start < 200000) {{}}
    out[blockIdx.x * 64 + threadIdx.x] = value;
}}
"""


@pytest.mark.parametrize("first", ["", "await_previous_kernel();"], ids=["in turn", "early"])
def test_kernel_waits_for_the_writes_of_the_kernel_before(kernel: MakeKernel, first: str) -> None:
    name = "slow_early" if first else "slow"

    def reference(out: Tensor, value: float) -> None:
        raise NotImplementedError

    reference.__name__ = name
    slow = pyops.op(out="out")(reference)
    made = kernel(name, SLOW.format(name=name, first=first))

    @slow.plan
    def _(out: TensorArg, value: float) -> Launch:
        return made().launch(grid=out.numel // 64, block=64)

    x, stale = torch.zeros(64, 4096, device="cuda"), torch.zeros(64, 4096, device="cuda")
    outs = [torch.full_like(x, float("nan")) for _ in range(20)]
    graph = torch.cuda.CUDAGraph()

    def calls() -> None:
        for i, out in enumerate(outs):
            slow(x, float(i))
            pyops.relu2(stale, x)  # two kernels of the library in succession
            pyops.relu2(out, stale)

    for run in (calls, graph.replay):
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        if run is not calls:
            with torch.cuda.graph(graph):
                calls()
        run()
        torch.cuda.synchronize()
        for i, out in enumerate(outs):
            assert (out == float(i) ** 4).all()


def test_early_starts_keep_the_order_of_all_work() -> None:
    """A chain of copies, events and kernels, in which every step reads the result of the previous one, alone and as a
    graph."""
    torch.manual_seed(0)
    first = torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    x, y, z = (torch.empty_like(first) for _ in range(3))
    side = torch.cuda.Stream()

    def chain(pause: Callable[[], None]) -> None:
        x.copy_(first)  # a copy, not a kernel
        for _ in range(10):
            pyops.rms_norm(y, x, weight, 1e-6)
            pause()
            z.zero_()
            pause()
            pyops.gelu_quick(z, y)
            pause()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                pyops.relu2(x, z)
                pause()
            y.add_(z)
            pause()
            torch.cuda.current_stream().wait_stream(side)
            pyops.fused_add_rms_norm(x, y, weight, 1e-6)
            pause()

    chain(torch.cuda.synchronize)
    expected = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(lambda: None)
    for run in (lambda: chain(lambda: None), graph.replay):
        for _ in range(5):
            for buffer in (x, y, z):
                buffer.fill_(float("nan"))
            run()
            torch.cuda.synchronize()
            assert torch.equal(x, expected)


# When kernels are compiled


def test_many_threads_compile_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    unload()
    compiled = []
    load = compiler._load
    monkeypatch.setattr(compiler, "_load", lambda *args: compiled.append(args[1]) or load(*args))
    barrier = threading.Barrier(8)

    def call(_: int) -> None:
        barrier.wait()
        norm(96)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    assert len(compiled) == 1


def test_every_loaded_kernel_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    unload()
    with caplog.at_level("INFO", "pyops"):
        norm()
        norm()
    (record,) = (one for one in caplog.records if one.name == "pyops.compile")
    assert re.fullmatch(
        r"norm/rms_norm\.cu scalar_t=float32 HIDDEN_SIZE=64 .* sm_\d+: .+ in \d+ ms, \d+ registers",
        record.getMessage(),
    )


def test_compile_error_at_a_call(kernel: MakeKernel) -> None:
    """Nothing is written, and the next call raises the same error."""

    @pyops.op(out="out")
    def miscompiled(out: Tensor) -> None:
        out.zero_()

    made = kernel("miscompiled", 'extern "C" __global__ void miscompiled(float* out) {\n    out[0] = undeclared;\n}\n')

    @miscompiled.plan
    def _(out: TensorArg) -> Launch:
        return made(SIZE=3).launch(grid=1, block=1)

    out = torch.ones(1, device="cuda")
    for _ in range(2):
        with pytest.raises(pyops.CompileError) as caught:
            miscompiled(out)
        message = str(caught.value)
        assert message.startswith("test/miscompiled.cu did not compile for SIZE=3\n")
        assert 'kernels_cu/test/miscompiled.cu(2): error: identifier "undeclared" is undefined' in message
    assert out.item() == 1


FAULT = """
import os, sys
os.environ["PYOPS_SYNC"] = "1"
import torch, pyops
TEXT = 'extern "C" __global__ void faulty(float* out) { *reinterpret_cast<float*>(16) = 1.0f; }'
@pyops.op(out="out")
def faulty(out: Tensor) -> None: ...
@faulty.plan
def _(out): return pyops.Kernel("test/faulty.cu", text=TEXT)().launch(grid=1, block=1)
try:
    faulty(torch.zeros(1, device="cuda"))
except pyops.DeviceFault as error:
    assert str(error).startswith("faulty: the device reported"), error
    print("named", flush=True)
os._exit(0)
"""


def _python(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_sync_names_the_op_that_faulted() -> None:
    out, err = _python("from __future__ import annotations\n" + FAULT).communicate(timeout=120)
    assert out.strip() == "named", err


# Effects of a broken kernel cache: one warning, never a failed or wrong call


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """CuPy's kernel cache, empty and in its own folder, in a process without kernels. With PYOPS_ARCH it holds PTX."""
    import cupy.cuda.compiler as backend
    from cupy.cuda._compiler_cache import DiskKernelCacheBackend

    before = backend._kernel_cache_backend
    backend._set_kernel_cache_backend(DiskKernelCacheBackend(str(tmp_path)))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    unload()
    compiler._warned = False
    yield tmp_path
    backend._set_kernel_cache_backend(before)
    unload()
    compiler._warned = False


def _norms_with(max_warnings: int) -> None:
    """Load two kernels from this cache, with right results and at most this many warnings."""
    unload()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        norm(64)
        norm(128)
    messages = [str(one.message) for one in caught if "kernel cache" in str(one.message)]
    assert len(messages) == max_warnings, messages
    assert all("is of no use" in message for message in messages)


def _entries(cache: Path) -> list[Path]:
    entries = sorted(cache.iterdir())
    assert len(entries) == 2
    return entries


def test_intact_cache(cache: Path) -> None:
    _norms_with(0)
    assert {one.origin for one in RMS_NORM.wrapper.compiled()} == {"compiled"}
    _norms_with(0)
    assert {one.origin for one in RMS_NORM.wrapper.compiled()} == {"disk"}
    assert len(_entries(cache)) == 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped"])
def test_corrupt_entries(cache: Path, damage: str) -> None:
    """Their checksum finds them: they are compiled again and replaced, without a warning."""
    _norms_with(0)
    for entry in _entries(cache):
        data = bytearray(entry.read_bytes())
        data[len(data) // 2] ^= 0xFF
        entry.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "flipped": data}[damage])
    _norms_with(0)
    assert {one.origin for one in RMS_NORM.wrapper.compiled()} == {"compiled"}
    _norms_with(0)
    assert {one.origin for one in RMS_NORM.wrapper.compiled()} == {"disk"}


def test_foreign_entries(cache: Path) -> None:
    """Their checksum is right, but they contain no kernel."""
    _norms_with(0)
    for entry in _entries(cache):
        garbage = b"not a kernel" * 100
        if device.get(0).translates:
            folders.write_sealed(str(entry), garbage)
        else:
            entry.write_bytes(sha1(garbage).hexdigest().encode() + garbage)
    _norms_with(1)


def test_folders_instead_of_entries(cache: Path) -> None:
    _norms_with(0)
    for entry in _entries(cache):
        entry.unlink()
        entry.mkdir()
    _norms_with(1)


def test_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda._compiler_cache import DiskKernelCacheBackend

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DiskKernelCacheBackend, "save", full)
    monkeypatch.setattr(folders, "write_sealed", full)
    _norms_with(1)


def test_deleted_folder(cache: Path) -> None:
    shutil.rmtree(cache)
    _norms_with(0 if device.get(0).translates else 1)  # the folder of PTX is made again


UNUSABLE = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, pyops
    for size in (64, 128):
        x = torch.randn(3, size, device="cuda")
        out = torch.empty_like(x)
        pyops.rms_norm(out, x, None, 1e-6)
        torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (size,), None, 1e-6))
print(sum("kernel cache" in str(one.message) for one in caught))
"""


@pytest.mark.parametrize("where", ["a file", "under a file", "not writable"])
def test_unusable_folder(tmp_path: Path, where: str) -> None:
    """Even for root, whom no permission stops: /proc takes no files from anybody."""
    file = tmp_path / "file"
    file.write_text("in the way")
    folder = {"a file": file, "under a file": file / "cache", "not writable": Path("/proc")}[where]
    out, err = _python(UNUSABLE, CUPY_CACHE_DIR=str(folder)).communicate(timeout=120)
    assert out.strip() == "1", err


COLD = """
import cupy, numpy, pyops
rng = numpy.random.default_rng(0)
x = rng.standard_normal((64, 1024), dtype=numpy.float32)
out = cupy.asarray(numpy.full_like(x, numpy.nan))
pyops.rms_norm(out, cupy.asarray(x), None, 1e-6)
wide = x.astype(numpy.float64)
expected = wide / numpy.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
numpy.testing.assert_allclose(out.get(), expected, rtol=1e-5, atol=1e-7)
print("right")
"""


def test_many_cold_processes_at_once(tmp_path: Path) -> None:
    """They share one empty cache folder, and each gets the right result without a warning."""
    processes = [
        _python(COLD, CUPY_CACHE_DIR=str(tmp_path / "cache"), PYTHONWARNINGS="error::UserWarning") for _ in range(32)
    ]
    results = [process.communicate(timeout=300) for process in processes]
    assert [out.strip() for out, _ in results] == ["right"] * 32, next(
        err for out, err in results if "right" not in out
    )
    assert len(list((tmp_path / "cache").iterdir())) == 1
