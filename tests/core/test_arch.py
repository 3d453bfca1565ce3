"""GPUs as plans see them: their models, GPUs that run as older ones (PYOPS_ARCH), and GPUs that are too old."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pyops
from pyops import gpus, offline
from pyops._core.errors import SwitchError
from pyops._core.system import device, folders
from pyops._core.text import compiler, modules, nvrtc
from pyops.cli import doctor
from pyops.example import ArgMaker
from pyops.host.toolchain import toolchains
from tests.every_op.test_nvrtc import MISSING

SCALE = 'extern "C" __global__ void scale(float* out) { out[0] = __CUDA_ARCH__; }'
H200 = {"name": b"NVIDIA H200", "major": 9, "minor": 0, "multiProcessorCount": 132, "sharedMemPerBlockOptin": 232448}
B200 = H200 | {"name": b"NVIDIA B200", "major": 10, "multiProcessorCount": 148}
RTX_5090 = H200 | {"name": b"NVIDIA GeForce RTX 5090", "major": 12, "sharedMemPerBlockOptin": 101376}
V100 = H200 | {"name": b"Tesla V100-SXM2-16GB", "major": 7}
T4 = H200 | {"name": b"Tesla T4", "major": 7, "minor": 5, "multiProcessorCount": 40, "sharedMemPerBlockOptin": 65536}


class DriverError(Exception):
    pass


class FakeCuda:
    """A CUDA runtime with one GPU, and CuPy's modules, which keep what they load."""

    def __init__(self) -> None:
        self.properties: dict[str, Any] = H200
        self.loaded: list[bytes] = []
        self.refused = 0  # how many loads the driver refuses from now on
        self.cuda = SimpleNamespace(
            Device=lambda index: nullcontext(),
            driver=SimpleNamespace(CUDADriverError=DriverError),
            function=SimpleNamespace(Module=self._module),
            runtime=SimpleNamespace(is_hip=False, getDeviceProperties=self._properties),
        )

    def _properties(self, index: int) -> dict[str, Any]:
        return self.properties | {"warpSize": 32, "sharedMemPerBlock": 48 << 10}

    def _module(self) -> Any:
        def load(binary: bytes) -> None:
            if self.refused:
                self.refused -= 1
                raise DriverError("no image for the device")
            self.loaded.append(binary)

        return SimpleNamespace(load=load, get_function=lambda entry: SimpleNamespace(ptr=0))


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    made = FakeCuda()
    for module in (device, compiler, modules):
        monkeypatch.setattr(module, "cupy", made)
    monkeypatch.setattr(modules, "cache_folder", lambda: str(tmp_path))
    monkeypatch.setattr(compiler, "_attributes", lambda function: (32, 0, 0))
    monkeypatch.setattr(compiler, "_warned", False)
    device.get.cache_clear()
    yield made
    device.get.cache_clear()


@pytest.fixture
def load() -> Iterator[Callable[[], str]]:
    """Loads SCALE as a new process does; returns the kernel's origin."""

    def run() -> str:
        compiler._loaded.clear()
        device.get.cache_clear()
        return compiler.load(0, SCALE, "scale", "test/scale.cu", "N=1").origin

    before = dict(compiler._loaded)
    yield run
    compiler._loaded.clear()
    compiler._loaded.update(before)


@pytest.mark.parametrize("name", gpus.GPUS)
def test_models_have_the_figures_of_the_table(name: str) -> None:
    model = gpus.model(name)
    assert model is gpus.GPUS[name].model
    assert model.shared_memory <= gpus.GPUS[name].sm_kib << 10
    assert model.cluster == (8 if int(model.arch[3:]) >= 90 else 1)
    assert (model.index, model.warp_size) == (-1, 32)


def test_the_model_of_an_architecture_is_its_first_gpu() -> None:
    first = {gpu.model.arch: gpu.model for gpu in reversed(gpus.GPUS.values())}
    assert {arch: gpus.model(arch) for arch in first} == first
    assert set(first) == {arch for arch in device._MODELS if arch.startswith("sm_")}
    with pytest.raises(KeyError):
        gpus.model("h100")


def test_page_has_the_table() -> None:
    rows = [
        f"| {name} | {model.arch} | {model.num_sms} | {model.shared_memory >> 10}; {sm_kib} | {l2_mib} | {gbs} |"
        for name, (model, sm_kib, l2_mib, gbs) in gpus.GPUS.items()
    ]
    page = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if re.match(r"\| [a-z0-9-]+ \| sm_\d+ \| ", line)] == rows


def test_architecture_is_that_of_the_gpu(cuda: FakeCuda) -> None:
    found = device.get(0)
    assert (found.arch, found.num_sms, found.name, found.translates) == ("sm_90", 132, "nvidia-h200", False)
    assert found.supports("wgmma")


@pytest.mark.parametrize(
    ("gpu", "arch", "kib", "lacks", "has"),
    [
        (H200, "sm_80", 163, "clusters", "async_copies"),
        (H200, "sm_89", 99, "clusters", "bfloat16_products"),
        (H200, "sm_75", 64, "async_copies", "products"),
        (B200, "sm_90", 227, "wgmma", "tma"),  # PTX of sm_90a runs on nothing else
        (RTX_5090, "sm_80", 99, "tma", "mma"),  # what the real GPU has
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_gpu_runs_as_an_older_one(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, gpu: dict[str, Any], arch: str, kib: int, lacks: str, has: str
) -> None:
    monkeypatch.setenv("PYOPS_ARCH", arch)
    cuda.properties = gpu
    found = device.get(0)
    assert (found.arch, found.num_sms, found.shared_memory) == (arch, gpu["multiProcessorCount"], kib << 10)
    assert found.supports(has)
    assert not found.supports(lacks)
    assert found.translates
    assert found.name == ""  # tuning tables are of the GPU itself


def test_its_own_architecture_changes_nothing(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = device.get(0)
    for value in ("sm_90", "SM_90", "", "off"):
        monkeypatch.setenv("PYOPS_ARCH", value)
        device.get.cache_clear()
        assert device.get(0) == plain


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("sm_100", "^PYOPS_ARCH: NVIDIA H200 is sm_90 and cannot run code for sm_100$"),
        ("sm_70", '^PYOPS_ARCH: expected one of sm_75, sm_80, .*, got "sm_70"$'),
        ("hopper", '^PYOPS_ARCH: expected one of sm_75, sm_80, .*, got "hopper"$'),
        ("gfx942", '^PYOPS_ARCH: expected one of sm_75, sm_80, .*, got "gfx942"$'),
    ],
)
def test_wrong_architectures_are_refused(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, arch: str, message: str
) -> None:
    monkeypatch.setenv("PYOPS_ARCH", arch)
    with pytest.raises(SwitchError, match=message):
        device.get(0)


def test_gpu_before_turing_is_refused_before_anything_is_compiled(cuda: FakeCuda) -> None:
    cuda.properties = V100
    with pytest.raises(pyops.UnsupportedGpuError) as caught:
        device.get(0)
    told = "GPU 0, Tesla V100-SXM2-16GB, is sm_70: the kernels need sm_75 (Turing, such as a T4) or later"
    assert str(caught.value) == told
    assert not cuda.loaded
    cuda.properties = T4
    assert device.get(0).arch == "sm_75"


def test_plans_are_those_of_the_older_gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of bfloat16: wgmma on the GPU itself, mma.sync as sm_80, no tensor cores as sm_75."""
    op, files = pyops.registry["attention_varlen"], []
    for arch in ("", "sm_80", "sm_75"):
        monkeypatch.setenv("PYOPS_ARCH", arch)
        device.get.cache_clear()
        assert op.example is not None
        args = op.example(ArgMaker(device.get(0)), num_tokens=64, dtype="bfloat16")
        files += [launch.specialisation.kernel.file for launch in op.launches(*args)]
    assert files == [f"attention/{name}.cu" for name in ("prefill_sm90", "prefill_mma", "attention_decode_simt")]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_ptx_of_the_older_architecture_is_loaded(
    cuda: FakeCuda, load: Callable[[], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each architecture has its own file in the cache folder, and a damaged one is compiled again."""
    monkeypatch.setenv("PYOPS_ARCH", "sm_80")
    assert [load(), load()] == ["compiled", "disk"]
    monkeypatch.setenv("PYOPS_ARCH", "sm_86")
    assert [load(), load()] == ["compiled", "disk"]
    assert len(set(cuda.loaded)) == 2
    for binary, target in zip(cuda.loaded, (b"sm_80", b"sm_80", b"sm_86", b"sm_86"), strict=True):
        assert b".target " + target in binary
    kept = sorted(tmp_path.glob("pyops-*.ptx"))
    assert len(kept) == 2
    for file in kept:
        file.write_bytes(file.read_bytes()[:-1])
        assert folders.read_sealed(str(file)) is None
    assert [load(), load()] == ["compiled", "disk"]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_ptx_that_the_driver_refuses_is_compiled_in_memory(
    cuda: FakeCuda, load: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYOPS_ARCH", "sm_80")
    cuda.refused = 1
    with pytest.warns(UserWarning, match="is of no use"):
        assert load() == "compiled"
    assert b".target sm_80" in cuda.loaded[0]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_text_that_does_not_compile_names_its_kernel(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_ARCH", "sm_80")
    with pytest.raises(pyops.CompileError, match=r"^test/wrong\.cu did not compile for N=1\n"):
        compiler._load(0, "wrong", "wrong", "test/wrong.cu", "N=1", ())


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
def test_cpu_tensors_are_planned_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the host backend runs the text that sm_75 gets, which differs from that of later GPUs."""
    monkeypatch.setenv("PYOPS_ARCH", "sm_75")
    monkeypatch.setenv("PYOPS_CPU", "kernels")
    assert device.host() == device.model("sm_75")
    assert device.host(64).warp_size == 64  # no NVIDIA GPU has such warps
    x, weight = torch.randn(20, 64, dtype=torch.float16), torch.randn(16, 64, dtype=torch.float16)
    linear = pyops.registry["linear"]
    linear.forget()
    try:
        out = pyops.linear.new(x, weight)
        assert "linear/gemm_sm80.cu" in {one.kernel for one in linear.wrapper.compiled()}
    finally:
        linear.forget()
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=2**-10, atol=2**-8)


def test_old_nvrtc_is_refused_for_kernels_with_wgmma(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it compiles one, because its assembler would end the process."""
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 4))
    wanted = r"N=1\nthis kernel needs NVRTC 12\.8 or newer, and 12\.4 is installed: pip install "
    options = ("--gpu-architecture=sm_90a",)
    with pytest.raises(pyops.CompileError, match=wanted):
        compiler._load(0, SCALE, "scale", "test/scale.cu", "N=1", options)
    with pytest.raises(pyops.CompileError, match=wanted):
        offline.compile("test/scale.cu", "N=1", SCALE, "sm_90", options)
    finding = doctor._caught("nvrtc", doctor._nvrtc)
    assert (finding.ok, finding.value) == (False, "12.4: kernels with wgmma need a newer one")
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 8))
    assert doctor._nvrtc() == doctor.Finding("nvrtc", True, "12.8")


@pytest.mark.parametrize(
    ("arch", "told"),
    [
        ("sm_75", "for sm_75: mma.sync of float16 and int8; bfloat16 without tensor cores"),
        ("sm_89", "for sm_89: mma.sync, cp.async"),
        ("sm_90", "for sm_90: wgmma, TMA, clusters"),
        ("sm_120", "for sm_120: mma.sync, cp.async, clusters, block scales (never run on a GPU)"),
    ],
)
def test_doctor_says_what_a_gpu_gets(arch: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "count", lambda: 0)
    monkeypatch.setenv("PYOPS_ARCH", arch)
    assert doctor._gets() == doctor.Finding("plans", None, told)


def test_doctor_lists_gpus_and_those_that_are_too_old(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cupy", cuda)
    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setenv("PYOPS_ARCH", "sm_80")
    assert doctor._devices().value == "0: NVIDIA H200 sm_80, 132 SMs, by PYOPS_ARCH"
    device.get.cache_clear()
    cuda.properties = V100
    finding = doctor._caught("devices", doctor._devices)
    assert finding.ok is False
    assert "is sm_70: the kernels need sm_75" in finding.value
