"""A report on this machine's hardware and libraries, and how it can run ops. All probes run, even if some fail."""

from __future__ import annotations

import importlib
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy

import kernels_cu

from .. import __version__, axes, offline
from .._core import config
from .._core.errors import DISTRIBUTION, MissingDependencyError, pip_line
from .._core.op import trust
from .._core.op.op import registry
from .._core.system import device
from .._core.system.device import Device
from .._core.system.lazy import cache_folder, cupy, driver_version, gpu_extra
from .._core.text import hiprtc, nvrtc, source
from ..host import toolchain

_VARIABLES = ("CUPY_CACHE_DIR", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "ROCM_HOME", "HIP_VISIBLE_DEVICES")
_TOLERANCE = 1e-5  # tolerance of float32 results of magnitude 1


@dataclass(frozen=True)
class Finding:
    """One line of the report. `ok` is None for plain information; `mend` says how to fix a problem."""

    name: str
    ok: bool | None
    value: str
    mend: str = ""


@dataclass(frozen=True)
class Report:
    """All findings, and how ops run on this machine: ``"gpu"``, ``"reference"``, ``"host"`` or None."""

    findings: list[Finding]
    runs: str | None

    def __str__(self) -> str:
        marks = {True: "ok", False: "no", None: "--"}
        width = max(len(finding.name) for finding in self.findings)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.name:{width}}  {marks[finding.ok]}  {finding.value}")
            if finding.mend:
                lines.append(f"{'':{width}}      {finding.mend}")
        how = {"gpu": "on the GPU", "reference": "by their PyTorch reference"}
        how["host"] = "on the CPU by their kernels, where PYOPS_CPU=kernels is set"
        return "\n".join([*lines, "", f"Ops run {how[self.runs]}." if self.runs else "Ops cannot run here."])


def doctor() -> Report:
    """Probe this machine."""
    findings = [_caught(name, probe) for name, probe in _PROBES.items()]
    good = {finding.name for finding in findings if finding.ok}
    ways = {"kernel": "gpu", "reference": "reference", "host": "host"}
    return Report(findings, next((way for probe, way in ways.items() if probe in good), None))


def _caught(name: str, probe: Callable[[], Finding]) -> Finding:
    try:
        return probe()
    except MissingDependencyError as error:
        return Finding(name, False, str(error).partition(",")[0])
    except Exception as error:
        return Finding(name, False, f"{type(error).__name__}: {error}")


def _python() -> Finding:
    return Finding("python", True, f"{platform.python_version()} on {platform.platform()}")


def _package(name: str, extra: Callable[[], str]) -> Callable[[], Finding]:
    def probe() -> Finding:
        try:
            # Imported through the lazy proxy, which creates CuPy's cache folder or chooses another one.
            module = cupy if name == "cupy" else importlib.import_module(name)
            return Finding(name, True, module.__version__)
        except (MissingDependencyError, ModuleNotFoundError):
            return Finding(name, False, "not installed", pip_line(extra()))

    return probe


def _pyops() -> Finding:
    """This package, or what the distribution pyops, another project's, has left of it: both have a folder pyops."""
    try:
        other = metadata.version("pyops")
    except metadata.PackageNotFoundError:
        return Finding("pyops", True, __version__)
    value = f"the distribution pyops {other} is installed, another project's, which overwrites or hides this module"
    return Finding("pyops", False, value, f"pip uninstall pyops {DISTRIBUTION}, then {pip_line('torch')}")


def _driver() -> Finding:
    kind, version = driver_version()
    if not kind:
        return Finding("driver", None, "none")
    if kind == "HIP":
        return Finding("driver", True, f"HIP {version // 10**7}.{version // 10**5 % 100}")
    return Finding("driver", True, f"CUDA {version // 1000}.{version % 1000 // 10}")


def _nvrtc() -> Finding:
    found = nvrtc.version()
    value = "{}.{}".format(*found)
    if cupy.cuda.runtime.is_hip:
        return Finding("hiprtc", True, value)
    if found < nvrtc.OLDEST:
        return Finding("nvrtc", False, f"{value}: kernels with wgmma need a newer one", pip_line(gpu_extra()))
    return Finding("nvrtc", True, value)


def _headers() -> Finding:
    if cupy.cuda.runtime.is_hip:
        folders, header, mend = hiprtc.include_folders(), "hip/hip_fp16.h", "set ROCM_HOME to the folder of ROCm"
    else:
        folders, header, mend = nvrtc.include_folders(), "cuda_fp16.h", pip_line(gpu_extra())
    if not folders:
        return Finding("headers", False, f"{header} not found", mend)
    return Finding("headers", True, ", ".join(folders))


def _devices() -> Finding:
    count = device.count()
    if count == 0:
        return Finding("devices", None, "none")
    names = []
    for index in range(count):
        at = device.get(index)
        name = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
        names.append(f"{index}: {name} {at.arch}, {at.num_sms} SMs" + ", by PYOPS_ARCH" * at.translates)
    return Finding("devices", True, "; ".join(names))


def _gets() -> Finding:
    """The instructions of matrix products on each device, or on the model that CPU tensors are planned for."""
    planned = [device.get(index) for index in range(device.count())] or [device.host()]
    return Finding("plans", None, "; ".join(dict.fromkeys(f"for {one.arch}: {kernels_of(one)}" for one in planned)))


def kernels_of(on: Device) -> str:
    """What the matrix products of a device are made of."""
    if on.supports("wgmma"):
        return "wgmma, TMA, clusters"
    if on.supports("matrix_cores"):
        return "matrix cores"
    if not on.supports("mma"):
        return "no matrix instructions"
    if not on.supports("async_copies"):
        return "mma.sync of float16 and int8; bfloat16 without tensor cores"
    scaled = ", block scales (never run on a GPU)" * on.supports("block_scaled_products")
    return "mma.sync, cp.async" + ", clusters" * on.supports("clusters") + scaled


def _proven() -> Finding:
    """Which kernels GPUs of each device's architecture have run; others are compared at their first use."""
    planned = [device.get(index) for index in range(device.count())] or [device.host()]
    return Finding("proven", None, "; ".join(dict.fromkeys(f"on {one.arch}: {proven_on(one)}" for one in planned)))


def proven_on(on: Device) -> str:
    """The kernels that GPUs of an architecture have run, as a phrase."""
    if trust.is_proven("*", on.arch):
        return "every kernel"
    own = [name for name in kernels_cu.names() if name.endswith(".cu") and _needs_proof(name, on)]
    if missing := [name for name in own if not trust.is_proven(name, on.arch)]:
        how = "used unchecked, by PYOPS_TRUST" if config.trust() else "compared with portable ones at first use"
        return f"not {', '.join(missing)}: {how}"
    return "portable kernels have run on sm_90 alone" + ("; those with instructions of its own here" if own else "")


def _needs_proof(name: str, on: Device) -> bool:
    """Whether a kernel has instructions that portable kernels of a device lack."""
    if source.is_tile(name):
        return on.supports("tcgen05")
    headers: set[str] = set()
    source.inline(name, headers)
    if "linear/mma_block_scaled.cuh" in headers:
        return on.supports("block_scaled_products")
    return on.supports("matrix_cores") and "include/matrix_core.cuh" in headers


def _cache() -> Finding:
    folder = cache_folder()
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Finding("cache", True, f"{folder}, {len(os.listdir(folder))} files")
    except OSError as error:
        mend = "set CUPY_CACHE_DIR to a folder that can be written; until then every process compiles anew"
        return Finding("cache", False, str(error), mend)


def _switches() -> Finding:
    config.kernels_on_cpu()  # raises an error for an unknown value of PYOPS_CPU
    names = sorted(name for name in os.environ if name.startswith("PYOPS_") or name in _VARIABLES)
    return Finding("switches", None, " ".join(f"{name}={os.environ[name]}" for name in names) or "none set")


def _compile() -> Finding:
    """Compile a kernel with NVRTC or hiprtc, which needs no GPU."""
    is_hip = cupy.cuda.runtime.is_hip
    arch = "gfx942" if is_hip else "sm_90"
    (one,) = axes.launches(registry["rms_norm"], {}, device.model(arch))
    specialisation = one.specialisation
    started = time.perf_counter()
    if is_hip:
        hiprtc.compile(specialisation.kernel.file, str(specialisation), specialisation.text, arch)
        found = ""
    else:
        report = offline.compile(specialisation.kernel.file, str(specialisation), specialisation.text, arch)
        found = f", {report.registers} registers"
    milliseconds = (time.perf_counter() - started) * 1e3
    return Finding("compile", True, f"rms_norm for {arch} in {milliseconds:.0f} ms{found}")


def _kernel() -> Finding:
    if device.count() == 0:
        return Finding("kernel", None, "no device to run one on")
    if config.reference():
        return Finding("kernel", None, "PYOPS_REFERENCE is set")
    return _run("kernel", cupy)


def _host() -> Finding:
    if not toolchain.toolchains():
        return Finding("host", None, "no C++ compiler to run kernels on the CPU", pip_line("cpu"))
    with config.cpu("kernels"):
        return _run("host", numpy)


def _reference() -> Finding:
    with config.cpu("reference"):
        return _run("reference", numpy)


def _run(name: str, module: Any) -> Finding:
    """Run rms_norm on arrays of `module` (numpy or cupy) and compare with float64."""
    x = numpy.random.default_rng(0).standard_normal((16, 4096)).astype(numpy.float32)
    out = module.empty((16, 4096), numpy.float32)
    started = time.perf_counter()
    registry["rms_norm"].call(out, module.asarray(x), None, 1e-6)
    result = out if module is numpy else out.get()
    milliseconds = (time.perf_counter() - started) * 1e3
    exact = x / numpy.sqrt((x.astype(numpy.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    error = float(abs(result - exact).max())
    return Finding(name, error < _TOLERANCE, f"rms_norm, first call {milliseconds:.0f} ms, error {error:.1e}")


# The probes in the order of the report. The cache folder comes before CuPy, because CuPy's import may change it.
_PROBES: dict[str, Callable[[], Finding]] = {
    "python": _python,
    "pyops": _pyops,
    "numpy": _package("numpy", lambda: "torch"),
    "torch": _package("torch", lambda: "torch"),
    "cache": _cache,
    "cupy": _package("cupy", gpu_extra),
    "ml_dtypes": _package("ml_dtypes", gpu_extra),
    "driver": _driver,
    "nvrtc": _nvrtc,
    "headers": _headers,
    "devices": _devices,
    "plans": _gets,
    "proven": _proven,
    "switches": _switches,
    "compile": _compile,
    "kernel": _kernel,
    "host": _host,
    "reference": _reference,
}
