"""`python -m tests.hip` and the run-time path for AMD GPUs, without hiprtc."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyops._core.errors import CompileError
from pyops._core.system import device, folders
from pyops._core.text import hiprtc, modules
from pyops.cli import doctor
from tests.hip import __main__ as command
from tests.hip import packages, saved, specialisations
from tests.hip.compile import Compiled, Job, digest, table
from tests.hip.metadata import Resources

WORKER = Path(__file__).with_name("worker.py")
FAKE_HIPRTC = r"""
#include <stdlib.h>
#include <string.h>
static const char* text;
int hiprtcCreateProgram(void** program, const char* source, ...) {
    *program = (void*)(text = strdup(source));
    return 0;
}
int hiprtcCompileProgram(void*, int, const char**) {
    if (strstr(text, "crash")) abort();
    return !!strstr(text, "wrong");
}
int hiprtcGetProgramLogSize(void*, size_t* size) { *size = 4; return 0; }
int hiprtcGetProgramLog(void*, char* log) { strcpy(log, "log"); return 0; }
int hiprtcGetCodeSize(void*, size_t* size) { *size = strlen(text); return 0; }
int hiprtcGetCode(void*, char* code) { memcpy(code, text, strlen(text)); return 0; }
int hiprtcDestroyProgram(void**) { return 0; }
"""


def listed(name: str, depends: str = "") -> packages.Package:
    fields = {"Package": name, "Version": "1", "Depends": depends, "Filename": f"pool/{name}.deb", "SHA256": "0"}
    return packages._package(fields)


def test_package_needs_the_first_of_alternatives() -> None:
    assert listed("a", "libc6 (>= 2.38), b | c, d:any (>= 1)").depends == ("libc6", "b", "d")


def test_only_rocm_comes_from_experimental(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {
        "experimental": [
            listed("libhiprtc7", "libc6"),
            listed("libhiprtc-builtins7"),
            listed("libamd-comgr3", "libllvm22"),
            listed("libc6", "broken"),
        ],
        "sid": [*map(listed, ("libamdhip64-dev", "libnuma1", "libc6", "libllvm22", "libhiprtc7"))],
    }
    monkeypatch.setattr(packages, "_list", lambda mirror, suite: {one.name: one for one in lists[suite]})
    found = list(packages._needed("mirror", 7))
    assert {one.name for one in found} == {
        *("libamdhip64-dev", "libhiprtc7", "libhiprtc-builtins7", "libamd-comgr3", "libnuma1", "libc6", "libllvm22")
    }
    assert [one.depends for one in found if one.name == "libhiprtc7"] == [("libc6",)]


def test_unreachable_mirror_is_no_error_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(packages, "_mirror", refuse)
    with pytest.raises(packages.Unavailable, match="no network"):
        packages.get(tmp_path)


def test_damaged_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_read", lambda address: b"something else")
    with pytest.raises(OSError, match="a is damaged"):
        packages._fetched("mirror/", listed("a"), tmp_path)


def test_worker_goes_on_after_a_compiler_crash(tmp_path: Path) -> None:
    library = tmp_path / "libhiprtc.so"
    build = ["gcc", "-shared", "-fPIC", "-x", "c", "-std=c2x", "-", "-o", str(library)]
    try:
        subprocess.run(build, input=FAKE_HIPRTC, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler")
    texts = ["good", "wrong", "crash", "good again"]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.cu").write_text(text)
    jobs = "".join(f"gfx942 {tmp_path / f'{i}.cu'} {tmp_path / f'{i}.hsaco'}\n" for i in range(len(texts)))
    command = [sys.executable, str(WORKER), str(library), "/include"]
    done = subprocess.run(command, input=jobs, capture_output=True, text=True, check=True)
    logs = [json.loads(line)[1] for line in done.stdout.splitlines()]
    assert logs == ["log", "log", "error: the compiler died with status 6", "log"]  # SIGABRT
    assert [(tmp_path / f"{i}.hsaco").exists() for i in range(4)] == [True, False, False, True]


def compiled(arch: str, **resources: int) -> Compiled:
    given = {"vgprs": 8, "sgprs": 8, "lds": 0, "scratch": 0, "vgpr_spills": 0, "sgpr_spills": 0} | resources
    return Compiled("5a", "norm/x.cu", "N=1", arch, 0.1, "", Resources(**given))


def test_scratch_memory_is_a_finding_but_sgpr_spills_are_not() -> None:
    assert not compiled("gfx942", sgpr_spills=5).trouble
    assert compiled("gfx942", scratch=16).trouble == "16 bytes of scratch memory, 0 VGPRs spilled"
    assert compiled("gfx942", vgpr_spills=2).trouble == "0 bytes of scratch memory, 2 VGPRs spilled"
    failed = Compiled("5a", "norm/x.cu", "N=1", "gfx942", 0.1, "x.cu:1: warning\nx.cu:2: error: no", None)
    assert failed.trouble == "x.cu:2: error: no"
    lines = table([compiled("gfx942"), compiled("gfx942", scratch=4, vgprs=90), compiled("gfx1100")]).splitlines()
    assert lines[2:] == ["| norm/x.cu | 1/2, VGPR 90 | 1/1, VGPR 8 |", "| all | 1/2 | 1/1 |"]


def test_saved_results_are_read_except_a_truncated_line(tmp_path: Path) -> None:
    file = tmp_path / "saved"
    assert not list(saved.read(file))
    first = [compiled("gfx942", vgprs=90), Compiled("5b", "norm/x.cu", "N=2", "gfx942", 0.1, "a: error", None)]
    assert list(saved.append(file, first)) == list(saved.read(file)) == first
    file.write_text(file.read_text()[:-5])
    assert list(saved.read(file)) == first[:1]
    assert list(saved.append(file, first[1:])) == first[1:]
    assert list(saved.read(file)) == first


@pytest.fixture
def compile_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`compile` with a compiler that produces nothing. Returns the digests of the compiled texts."""
    (tmp_path / "usr/lib/x86_64-linux-gnu").mkdir(parents=True)
    (tmp_path / "usr/lib/x86_64-linux-gnu/libhiprtc.so.7").touch()
    made: list[str] = []

    def compile_all(folder: packages.Folder, jobs: Sequence[Job], processes: int) -> Iterator[Compiled]:
        for arch, one in jobs:
            made.append(digest(folder, (arch, one)))
            yield Compiled(made[-1], one.kernel.file, str(one), arch, 0.1, "", Resources(8, 8, 0, 0, 0, 0))

    def run(*options: str) -> list[str]:
        made.clear()
        assert command.main(["compile", str(tmp_path), "--arch", "gfx942", "-k", "moe_sum", *options]) == 0
        return list(made)

    monkeypatch.setattr(command, "compile_all", compile_all)
    return run


@pytest.mark.rotates
def test_parts_cover_all_specialisations(compile_: Callable[..., list[str]]) -> None:
    every = compile_("--all")
    assert len(every) == len(set(every)) > 20
    parts = [compile_("--all", "--part", f"{i}/3") for i in (1, 2, 3)]
    assert sorted([*parts[0], *parts[1], *parts[2]]) == sorted(every)
    assert all(parts)
    with pytest.raises(SystemExit):
        compile_("--part", "4/3")


def test_run_resumes_where_another_stopped(
    compile_: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "saved"
    half = compile_("--all", "--part", "1/2", "--save", str(file))
    rest = compile_("--all", "--save", str(file))
    assert not set(half) & set(rest)
    assert not compile_("--all", "--save", str(file))
    total = len(half) + len(rest)
    assert capsys.readouterr().out.count(f"{total} of {total} compiled") == 2


@pytest.mark.rotates
def test_every_matrix_core_architecture_is_compiled_for() -> None:
    assert {*specialisations.ARCHS, *specialisations.RELATIVES} == set(device._MATRIX_CORES)
    found = specialisations.of_relatives(["gfx942", "gfx1201"])
    assert [(arch, one.kernel.file) for arch, one in found] == [
        ("gfx1200", "attention/attention_decode.cu"),
        ("gfx1200", "linear/gemm_sm80.cu"),
        ("gfx1200", "linear/gemm_sm80.cu"),  # its entry for experts
    ]


def test_text_without_an_architecture_is_compiled_for_one_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(arch: str, _: int | None) -> list[Any]:
        texts = {"plain.cu": "#ifdef __GFX9__", "fp8.cu": "#ifdef __gfx950__", "wmma.cu": "#ifdef __GFX12__"}
        texts["sum.cu"] = "WARP_SIZE " * 20
        signature = SimpleNamespace(entry="entry")
        return [SimpleNamespace(kernel=SimpleNamespace(file=f, signature=signature), text=t) for f, t in texts.items()]

    monkeypatch.setattr(specialisations, "sample", sample)

    def archs(file: str, **how: bool) -> list[str]:
        found = specialisations.of_archs(specialisations.ARCHS, 1, **how)
        return sorted(arch for arch, one in found if one.kernel.file == file)

    every = sorted(specialisations.ARCHS)
    assert archs("fp8.cu", every_arch=False) == archs("wmma.cu", every_arch=False) == every
    assert archs("plain.cu", every_arch=True) == archs("sum.cu", every_arch=True) == every
    assert len(archs("plain.cu", every_arch=False)) == 1
    assert sorted(device.model(arch).warp_size for arch in archs("sum.cu", every_arch=False)) == [32, 64]


@pytest.mark.rotates
@pytest.mark.parametrize("arch", specialisations.ARCHS)
def test_no_kernel_with_nvidia_mma_is_planned(arch: str) -> None:
    planned = set(specialisations.of_arch(arch))
    cudas = {"linear/ggml_mul_mat_vec.cu", "linear/ggml_mul_mat_row.cu", "mamba/chunk_scan_states.cu"}
    cudas |= {f"mamba/gated_delta_{name}.cu" for name in ("prepare", "sm90", "segments")}
    assert not cudas & planned
    assert {"attention/attention_decode_simt.cu", "attention/mla_decode_simt.cu"} <= planned
    products = {"gemm_sm80.cu", "wq_gemm_cdna.cu", "ggml_mul_mat.cu"}
    on_matrix_cores = {f"linear/{name}" for name in products} | {"attention/attention_decode.cu"}
    on_matrix_cores |= {"mamba/chunk_scan.cu", "mamba/gated_delta_chunk.cu"}
    assert on_matrix_cores | {"attention/prefill_mma.cu", "attention/mla_decode.cu"} <= planned


class FakeRocm:
    """The functions of CuPy that hiprtc.py uses."""

    def __init__(self) -> None:
        self.compiles: list[tuple[str, tuple[str, ...]]] = []
        self.loaded: list[bytes] = []
        self.cuda = SimpleNamespace(
            compiler=SimpleNamespace(compile_using_nvrtc=self.compile, CompileException=RuntimeError),
            function=SimpleNamespace(Module=lambda: SimpleNamespace(load=self.loaded.append)),
            runtime=SimpleNamespace(runtimeGetVersion=lambda: 70200000),
        )

    def compile(self, text: str, options: tuple[str, ...], cache_in_memory: bool) -> tuple[bytes, None]:
        self.compiles.append((text, options))
        if "wrong" in text:
            raise RuntimeError("kernel.cu:1: error: wrong")
        return b"\x7fELF" + text.encode(), None


@pytest.fixture
def rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRocm:
    pytest.importorskip("cupy_backends")
    made = FakeRocm()
    for module in (hiprtc, modules):
        monkeypatch.setattr(module, "cupy", made)
    monkeypatch.setattr(modules, "cache_folder", lambda: str(tmp_path))
    monkeypatch.setattr(device, "get", lambda index: device.model("gfx942"))
    return made


def load(text: str) -> Any:
    return hiprtc.load(0, text, "norm/x.cu", "N=1", ())[1]


def test_text_is_compiled_once_with_subnormals_kept(rocm: FakeRocm) -> None:
    assert [load("a"), load("a"), load("b")] == ["compiled", "disk", "compiled"]
    assert rocm.loaded == [b"\x7fELFa", b"\x7fELFa", b"\x7fELFb"]
    for _, options in rocm.compiles:
        assert options[:2] == ("--offload-arch=gfx942", "-std=c++17")
        assert not any("denormal" in option or "ftz" in option for option in options)


def test_damaged_file_is_compiled_again(rocm: FakeRocm, tmp_path: Path) -> None:
    load("a")
    (file,) = tmp_path.glob("pyops-*.hsaco")
    for damaged in (file.read_bytes()[:-1], b"", b"x" + file.read_bytes()[1:]):
        file.write_bytes(damaged)
        assert folders.read_sealed(str(file)) is None
        assert load("a") == "compiled"
    assert rocm.loaded == [b"\x7fELFa"] * 4


def test_each_architecture_has_its_own_file(rocm: FakeRocm, monkeypatch: pytest.MonkeyPatch) -> None:
    load("a")
    monkeypatch.setattr(device, "get", lambda index: device.model("gfx1100"))
    assert load("a") == "compiled"


def test_text_refused_by_hiprtc_is_a_compile_error(rocm: FakeRocm) -> None:
    with pytest.raises(CompileError, match=r"norm/x\.cu did not compile for N=1\nkernel\.cu:1: error: wrong"):
        load("wrong")


def test_rocm_headers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "include" / "hip").mkdir(parents=True)
    (tmp_path / "include" / "hip" / "hip_fp16.h").touch()
    monkeypatch.setenv("ROCM_HOME", str(tmp_path))
    hiprtc.include_folders.cache_clear()
    try:
        assert hiprtc.include_folders() == (str(tmp_path / "include"),)
    finally:
        hiprtc.include_folders.cache_clear()


def test_doctor_names_the_hip_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "driver_version", lambda: ("HIP", 70253211))  # HIP 7.2.53211
    assert doctor._driver().value == "HIP 7.2"
