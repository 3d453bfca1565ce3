"""The command line: output, refusals, exit status."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import pyops
from pyops import axes, compile_ahead, tuning
from pyops.__main__ import main, parser
from pyops._core import log
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops._core.text import compiler
from pyops._core.text.compiler import Compiled
from pyops.cli import demo, doctor, progress, show, table
from pyops.host.toolchain import toolchains
from pyops.integrations import vllm
from pyops.models import attention

ROOT = Path(__file__).parents[2]
RMS_NORM = pyops.registry["rms_norm"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"pyops {pyops.__version__}\n"


@pytest.mark.parametrize(
    ("program", "name"), [("/somewhere/bin/pyops", "pyops"), ("pyops/__main__.py", "python -m pyops")]
)
def test_usage_names_the_program(program: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [program])
    assert parser().format_usage().startswith(f"usage: {name} [")


FUNCTIONS = [name for names in table.functions().values() for name in names]


def test_page_of_ops_lists_each_op_and_function_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--markdown"]) == 0
    page = capsys.readouterr().out
    assert sorted(re.findall(r"^\| \[`(\w+)`\]", page, flags=re.MULTILINE)) == sorted([*pyops.registry, *FUNCTIONS])
    for target in re.findall(r"\]\(([^)]+)\)", page):
        assert (ROOT / "docs" / target).is_file(), target


@pytest.mark.parametrize(
    ("module", "family"),
    [("pyops.activation", "activation"), ("pyops.norm.rms", "norm"), ("pyops.ops.norm.rms", "norm"), ("mine", None)],
)
def test_family_is_the_package_that_declares_an_op(
    module: str, family: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RMS_NORM.reference, "__module__", module)
    monkeypatch.setattr(table, "registry", {"rms_norm": RMS_NORM})
    assert table.families() == ({family: [RMS_NORM]} if family else {})


def test_listed_functions_are_public_and_no_ops() -> None:
    of_pyops = {name for name in dir(pyops) if inspect.isfunction(getattr(pyops, name)) and name[0] != "_"}
    assert {*FUNCTIONS} == of_pyops - {*pyops.registry} - {"op", "warmup", "example_text"}
    assert {"fused_experts", "fused_marlin_moe", "fused_moe"} < {*table.functions()["moe"]}
    assert {"gptq_marlin_gemm", "machete_gemm", "machete_supported_schedules"} < {*table.functions()["linear"]}


def test_list_names_every_op_and_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*pyops.registry, *FUNCTIONS]
    (line,) = (line for line in lines if line.startswith("rms_norm "))
    assert " float32, float16, bfloat16 " in line
    assert line.endswith(table.summary(RMS_NORM))


@pytest.mark.parametrize("name", pyops.registry)
def test_show_and_source_of_every_op(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", name]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{name}(")
    assert f"torch.ops.pyops.{name}(" in shown
    assert "\nExample:\n" + textwrap.indent(pyops.example_text(name), " " * 4) in shown
    for one in axes.launches(pyops.registry[name], {}, device.model()):
        assert str(one.specialisation) in shown
        assert main(["source", name]) == 0
        assert one.specialisation.text in capsys.readouterr().out


def test_source_takes_the_axes_of_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["source", "rms_norm", "hidden_size=1000", "dtype=float16", "num_tokens=5", "arch=sm_80"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("// norm/rms_norm.cu scalar_t=float16 HIDDEN_SIZE=1000 ")
    assert "constexpr int HIDDEN_SIZE = 1000;" in rest


@pytest.mark.parametrize("name", ["fused_experts", "all_reduce", "lost_ranks"])
def test_show_knows_the_functions_that_list_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{name}(")
    assert inspect.getdoc(getattr(pyops, name)) in out
    assert main(["show", name, "hidden_size=3"]) == 2
    assert capsys.readouterr().err.startswith(f"{name}: hidden_size: is no axis")


def test_show_prints_the_signature_of_a_function_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "all_reduce"]) == 0
    expected = "all_reduce(fa: int, inp: Tensor, out: Tensor, reg_buffer: int, reg_buffer_sz_bytes: int) -> None"
    assert capsys.readouterr().out.splitlines()[0] == expected


@pytest.mark.parametrize(
    ("name", "refused", "timed"),
    [
        ("linear", "gemm_simt.cu: ", "gemm_sm90.cu: "),
        (
            "grouped_gemm_packed",
            "wq_grouped_gemm_cdna: no, it is for AMD's matrix cores",
            "wq_grouped_gemm_sm80.cu: ",
        ),
        ("cutlass_mxfp4_group_mm", "wq_grouped_gemm_cdna: no, ", "dequantize, then a grouped GEMM: "),
        ("ggml_mul_mat_a8", "ggml_mul_mat_row.cu: no, it multiplies one row of X", "ggml_mul_mat.cu: "),
        ("ggml_moe_a8_vec", "ggml_dequantize.cu: no, rows have weights of different experts", "ggml_mul_mat_vec.cu: "),
    ],
)
def test_show_prints_every_engine(name: str, refused: str, timed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its time, or the reason why it is not in question."""
    assert main(["show", name]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith(refused) for line in lines)
    (found,) = (line for line in lines if line.startswith(timed))
    assert " us by the model, " in found


@pytest.mark.parametrize("command", ["show", "source"])
def test_only_the_op_is_required(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command])
    assert capsys.readouterr().err.endswith(f" {command}: error: the following arguments are required: op\n")


def test_show_prints_the_config_that_was_chosen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For this example, on one line; nothing for an op without a choice."""
    for num_tokens, cluster_size in ((1, 8), (4096, 1)):
        assert main(["show", "paged_attention_v1", f"num_tokens={num_tokens}", "max_seq_len=1024"]) == 0
        (line,) = (
            line for line in capsys.readouterr().out.splitlines() if line.startswith("    chosen: DecodeConfig(")
        )
        assert f"cluster_size={cluster_size}," in line
    assert main(["show", "relu2"]) == 0
    assert "    chosen: ChunkConfig(vec_size=8, num_threads=256, " in capsys.readouterr().out
    monkeypatch.setitem(tuning.last, "softmax", "the Config of an earlier plan")
    assert main(["show", "softmax"]) == 0
    assert "chosen: " not in capsys.readouterr().out


@pytest.mark.parametrize("op", pyops.registry)
def test_command_in_a_compile_error_prints_the_source(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    for one in axes.launches(pyops.registry[op], {}, device.model()):
        specialisation = one.specialisation
        error = pyops.CompileError(specialisation.kernel.file, str(specialisation), "log")
        _, _, command = str(error).rpartition("python -m pyops ")
        assert main(command.split()) == 0
        # A flag is printed as 0 or 1 and parsed as an integer.
        expected = specialisation.text
        for name, value in specialisation.constants.items():
            if isinstance(value, bool):
                expected = expected.replace(
                    f"constexpr bool {name} = {str(value).lower()};", f"constexpr int {name} = {int(value)};"
                )
        assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "rms_nrm"], "pyops: rms_nrm: is no op; did you mean rms_norm?"),
        (["show", "quux"], "pyops: quux: is no op"),
        (
            ["show", "rms_norm", "hiden_size=1"],
            "rms_norm: hiden_size: is no axis of its example, which has num_tokens,",
        ),
        (["show", "rms_norm", "dtype=int8"], "rms_norm: dtype: expected float32 or float16 or bfloat16, got int8"),
        (["show", "rms_norm", "hidden_size=big"], "rms_norm: hidden_size: expected int, got 'big'"),
        (["show", "rms_norm", "hidden_size=1,2"], "rms_norm: axes: expected one value for each"),
        (["show", "rms_norm", "arch=sm_1"], "pyops: arch: no model of a device sm_1"),
        (["source", "rms_norm", "arch=[1]"], "pyops: arch: no model of a device [1]"),
        (["show", "rms_norm", "arch=sm_80,sm_90"], "pyops: arch: expected one, got sm_80, sm_90"),
        (["show", "paged_attention_v1", "block_size=0"], "paged_attention_v1: block_size=0: has no example (ZeroDiv"),
        (["show", "ggml_dequantize", "quant_type=0"], "ggml_dequantize: quant_type=0: has no example (KeyErr"),
        (["source", "rotary_embedding", "rotary_dim='x'"], "rotary_embedding: rotary_dim=x: has no example (TypeErr"),
        (["warmup", "rms_nrm"], "pyops: rms_nrm: is no op; did you mean rms_norm?"),
        (["warmup", "rms_norm", "hiden=3"], "rms_norm: hiden: is no axis of an example"),
        (["source", "norm/rms_norm.cu", "HIDDEN_SIZE"], "pyops: HIDDEN_SIZE: expected key=value"),
        (["source", "norm/none.cu"], "pyops: norm/none.cu: is no kernel file"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.slow
def test_no_axis_ends_in_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """For any op and any value."""
    for name, op in pyops.registry.items():
        for axis in axes.of(op):
            for value in ("0", "'x'"):
                assert main(["show", name, f"{axis}={value}"]) in (0, 2)
                assert len(capsys.readouterr().err.splitlines()) <= 1


def test_fault_of_an_example_is_not_blamed_on_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RMS_NORM, "example", lambda make: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        axes.launches(RMS_NORM, {}, device.model())


def test_wrong_switch_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_CPU", "bogus")
    monkeypatch.setattr(demo, "usable_device", lambda: "cpu")
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == 'PYOPS_CPU: expected "kernels" or "reference", got "bogus"\n'
    assert doctor._caught("switches", doctor._switches).ok is False


def test_constants_are_parsed() -> None:
    text = show.kernel_source("norm/rms_norm.cu", {"scalar_t": "bfloat16", "SIZE": "-3", "NAME": "silu"})
    assert 'constants"\nusing scalar_t = bf16_t;\nconstexpr int SIZE = -3;\n#define NAME silu\n' in text


def test_specialisations_are_every_element_type_once() -> None:
    found = compile_ahead.specialisations(["rms_norm"], {}, device.model())
    assert len(found) == 3
    assert {str(one.constants["scalar_t"]) for _, one in found} == {"float32", "float16", "bfloat16"}
    given: dict[str, Any] = {"hidden_size": [64, 4096], "dtype": "float16", "num_tokens": (16, 16)}
    found = compile_ahead.specialisations(["rms_norm"], given, device.model())
    assert [one.constants["HIDDEN_SIZE"] for _, one in found] == [64, 4096]


def test_specialisations_of_all_ops() -> None:
    found = compile_ahead.specialisations([], {"hidden_size": 1024}, device.model())
    assert {op.name for op, _ in found} == set(pyops.registry)
    with pytest.raises(pyops.OpError, match="hiden_size: is no axis"):
        compile_ahead.specialisations([], {"hiden_size": 1024}, device.model())
    with pytest.raises(pyops.OpError, match="rms_norm: hiden_size: is no axis"):
        pyops.warmup("rms_norm", hiden_size=1024)
    with pytest.raises(pyops.OpError, match="rms_norm: group_size: is no axis"):
        compile_ahead.specialisations(["rms_norm"], {"group_size": 64}, device.model())


def test_load_is_parallel_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2, timeout=30)

    def compile_slowly(index: int, text: str, entry: str, kernel: str, constants: str, *_: Any) -> Compiled:
        together.wait()  # the barrier breaks unless two run at a time
        return Compiled(kernel, constants, index, "sm_90", 1.0, "compiled", 1, 0, 0, 0, None)

    monkeypatch.setattr(compiler, "load", compile_slowly)
    monkeypatch.setattr(compile_ahead.os, "cpu_count", lambda: 2)
    wanted = compile_ahead.specialisations(
        ["rms_norm"], {"hidden_size": [96, 160], "dtype": ["float16", "float32"]}, device.model()
    )
    counts: list[int] = []
    no_device = 1000
    try:
        held = compile_ahead.load(wanted, no_device, counts.append)
        assert [one.constants for one in held] == [str(one) for _, one in wanted]
        assert counts == [1, 2, 3, 4]
        assert held[0] in pyops.rms_norm.compiled()
    finally:
        for op, one in wanted:
            one.kernel._loaded.clear()
            del op.specialisations[no_device, one.kernel, one.key]


def test_load_raises_the_compiler_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int, text: str, entry: str, kernel: str, constants: str, *_: Any) -> Compiled:
        raise pyops.CompileError(kernel, constants, "no")

    monkeypatch.setattr(compiler, "load", refuse)
    wanted = compile_ahead.specialisations(["rms_norm"], {"hidden_size": 96}, device.model())
    with pytest.raises(pyops.CompileError, match=r"norm/rms_norm\.cu did not compile"):
        compile_ahead.load(wanted, 1000)


@pytest.mark.gpu
def test_warmup_loads_all_that_a_first_call_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a captured first call, in a process in which compiling is disabled."""
    sizes = {"num_tokens": 16, "hidden_size": 1232}
    held = pyops.warmup("rms_norm", dtype="bfloat16", **sizes)
    assert [one.kernel for one in held] == ["norm/rms_norm.cu"]
    assert held[0] in pyops.rms_norm.compiled()
    x, weight = torch.randn(16, 1232, device="cuda").bfloat16(), torch.ones(1232, device="cuda").bfloat16()
    out = torch.empty_like(x)
    monkeypatch.setenv("PYOPS_JIT", "error")
    pyops.registry["rms_norm"].forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pyops.rms_norm(out, x, weight, 1e-6)
    graph.replay()
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (1232,), weight, 1e-6))


def test_warmup_without_a_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if device.count():
        pytest.skip("a device")
    assert main(["warmup", "relu2", "dtype=float16"]) == 0
    assert capsys.readouterr().err.startswith("no device: ops run by their reference")
    held = Compiled("relu2.cu", "scalar_t=float16", -1, "host", 1.0, "disk", 0, 0, 0, 0, None)
    monkeypatch.setattr(Op, "load_on_host", lambda *_: held)
    monkeypatch.setenv("PYOPS_CPU", "kernels")
    assert main(["warmup", "relu2", "dtype=float16"]) == 0
    assert capsys.readouterr().out == "     1 ms  disk        0 registers  relu2.cu scalar_t=float16\n"


@pytest.mark.gpu
def test_warmup_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["warmup", "rms_norm", "fused_add_rms_norm", "hidden_size=1232,1240"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2 * 2 * 3
    assert printed.err.endswith("12/12\n")


def test_doctor_reports_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert report["runs"] in ("gpu", "reference")
    assert findings["torch"] == {"name": "torch", "ok": True, "value": torch.__version__, "mend": ""}
    assert findings["reference"]["ok"] is True
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Ops run ")


def test_doctor_names_an_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    finding = doctor._caught("cache", doctor._cache)
    assert finding.ok is False
    assert str(tmp_path) in finding.value
    assert "CUPY_CACHE_DIR" in finding.mend
    assert f"CUPY_CACHE_DIR={tmp_path}" in doctor._switches().value


def _with_the_other_project(folder: Path) -> Path:
    """A folder of packages where the distribution pyops is installed."""
    (folder / "pyops-0.0.2.dist-info").mkdir(parents=True)
    (folder / "pyops-0.0.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: pyops\nVersion: 0.0.2\n")
    return folder


def test_doctor_names_the_other_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._pyops() == doctor.Finding("pyops", True, pyops.__version__)
    monkeypatch.syspath_prepend(_with_the_other_project(tmp_path))
    finding = doctor._pyops()
    assert finding.ok is False
    assert "the distribution pyops 0.0.2 is installed, another project's" in finding.value
    assert finding.mend.startswith("pip uninstall pyops pyops-kernels, then pip install ")


@pytest.mark.slow
def test_doctor_runs_where_the_other_project_was_installed_on_top(tmp_path: Path) -> None:
    """Its ``__init__.py`` is where ours was, and every other file of ours is left."""
    (_with_the_other_project(tmp_path) / "pyops").mkdir()
    for path in (ROOT / "pyops").iterdir():
        if path.name != "__init__.py":
            (tmp_path / "pyops" / path.name).symlink_to(path)
    (tmp_path / "pyops" / "__init__.py").touch()
    (tmp_path / "pyops" / "__version__.py").touch()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "pyops", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert re.search(r"^pyops +no +the distribution pyops 0\.0\.2 is installed", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("Ops cannot run here.\n")


def test_doctor_survives_failures_of_every_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def burst() -> doctor.Finding:
        raise RuntimeError("burst")

    monkeypatch.setattr(doctor, "_PROBES", dict.fromkeys(doctor._PROBES, burst))
    report = doctor.doctor()
    assert report.runs is None
    assert {finding.value for finding in report.findings} == {"RuntimeError: burst"}
    assert str(report).endswith("Ops cannot run here.")


@pytest.mark.parametrize(
    ("good", "runs"),
    [(("kernel", "reference", "host"), "gpu"), (("reference", "host"), "reference"), (("host",), "host"), ((), None)],
)
def test_doctor_says_how_ops_run(good: tuple[str, ...], runs: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    probes = {name: lambda name=name: doctor.Finding(name, name in good, "") for name in doctor._PROBES}
    monkeypatch.setattr(doctor, "_PROBES", probes)
    report = doctor.doctor()
    assert report.runs == runs
    assert ("PYOPS_CPU=kernels" in str(report)) == (runs == "host")


def test_doctor_finds_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TOLERANCE", 0.0)
    assert doctor._reference().ok is False


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo on the CPU that takes seconds."""
    one_layer = {"num_hidden_layers": 1, "layer_types": (), "sliding_windows": ()}
    monkeypatch.setattr(demo, "_SMALL", dataclasses.replace(demo._SMALL, **one_layer))
    monkeypatch.setitem(demo._MAX_TOKENS, "cpu", 4)


def demonstrated(capsys: pytest.CaptureFixture[str]) -> str:
    """What the demo prints, on one line."""
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("brief")
def test_demo_checks_its_tokens(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["demo"]) == 0
    printed = demonstrated(capsys)
    assert "The quick brown fox | " in printed
    assert re.search(r" (12|144) tokens, the first after ", printed)
    assert printed.endswith(": a match")
    monkeypatch.setattr(demo, "usable_device", lambda: "cpu")
    monkeypatch.setitem(attention._GATED, "silu", lambda out, input: out.copy_(input.chunk(2, -1)[1]))
    assert main(["demo"]) == 1
    assert demonstrated(capsys).endswith(": NO MATCH")


@pytest.mark.usefixtures("brief")
@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
def test_demo_runs_kernels_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "usable_device", lambda: "cpu")
    RMS_NORM.specialisations.clear()
    assert main(["demo"]) == 0
    printed = demonstrated(capsys)
    assert "on the CPU, by the kernels (torch" in printed
    assert re.search(r"- \d+ kernels have run on the CPU: .*norm/rms_norm\.cu", printed)
    assert [one.arch for one in RMS_NORM.compiled()] == ["host"]


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("switch", [{"PYOPS_CPU": "reference"}, {"PYOPS_REFERENCE": "1"}, {}])
def test_demo_by_references_says_so(
    switch: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a switch, or without a C++ compiler."""
    monkeypatch.setattr(demo, "usable_device", lambda: "cpu")
    for name, value in switch.items():
        monkeypatch.setenv(name, value)
    if not switch:
        monkeypatch.setattr(demo, "toolchains", dict)
    assert main(["demo"]) == 0
    printed = demonstrated(capsys)
    assert "on the CPU, by the PyTorch references (torch" in printed
    assert "- No kernel has run, only the ops' references in PyTorch. " in printed
    assert ("[cpu]" in printed) == (not switch)


@pytest.mark.usefixtures("brief")
def test_demo_says_what_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    @contextmanager
    def status(text: str) -> Iterator[Callable[[str], None]]:
        said.append(text)
        yield said.append

    monkeypatch.setattr(demo, "usable_device", lambda: "cpu")
    monkeypatch.setenv("PYOPS_CPU", "reference")
    monkeypatch.setattr(progress, "status", status)
    assert main(["demo"]) == 0
    assert said[:2] == ["importing torch", "drawing the weights"]
    assert said[2].startswith("the first of 12 tokens")
    *tokens, last = said[3:]
    assert tokens == [f"{count} of 12 tokens" for count in range(1, 13)]
    assert last.startswith("comparing")


def test_a_status_moves_while_a_call_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a terminal. A compile that takes long is not logged in the middle of it."""
    assert progress._PERIOD < 2
    monkeypatch.setattr(progress, "_PERIOD", 1e-3)
    monkeypatch.setattr(log, "PATIENCE", 1e-3)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    def work() -> None:
        with progress.status("one") as say, log.waiting("compiling"):
            for text in ("one", "two"):
                say(text)
                drawn = ""
                while drawn.count(f"{progress._ERASE}{text}, ") < 3:
                    drawn += capsys.readouterr().err
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert capsys.readouterr().err.endswith(progress._ERASE)
    assert not [thread for thread in threading.enumerate() if thread.name == "pyops status"]
    assert not caplog.records
    with log.waiting("compiling"):  # what takes long is logged again
        while not caplog.records:
            pass


def test_a_pipe_sees_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.status("one") as say:
        say("two")
        progress.show(1, 1, "1/1")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("version", vllm.VERSIONS)
def test_coverage_names_every_op_of_vllm_and_counts(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage", "--vllm", version]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    entries = vllm.table(version)
    states = dict(line.split()[:2] for line in lines)
    assert states == {f"{one.namespace}::{name}": one.state for name, one in entries.items()}
    assert all(line.endswith(f"  {one.schema}") for line, one in zip(lines, entries.values(), strict=True))
    (line,) = (line for line in lines if line.startswith("_C::merge_attn_states "))
    assert line.split()[1] == ("adapted" if version == "0.16" else entries["merge_attn_states"].state)
    counts = [list(states.values()).count(state) for state in ("served", "adapted", "refused", "missing")]
    assert last == "{} ops: {} served, {} adapted, {} refused, {} missing".format(sum(counts), *counts)
    assert min(counts[:2]) > 0
    missing = {one.name for one in entries.values() if one.kernel is None}
    before = {one.name for older in vllm.VERSIONS if older != "0.33" for one in vllm.table(older).values()}
    assert missing.isdisjoint(before), "only ops that are new in 0.33 may have nothing that serves them"


def test_axis_may_not_shadow_the_architecture() -> None:
    assert not any("arch" in axes.of(op) for op in pyops.registry.values())
