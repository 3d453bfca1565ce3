"""`python -m tests.gpu` without a GPU: shares of time, interrupted commands, summaries of their output."""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kernels_cu
import pyops
from tests import gpu
from tests.gpu import Outcome, Part

PAGE = r"""# Performance

## Owed to a GPU

Some words.

| what | predicted | command |
|---|---|---|
| one | 3 us | `python -m benchmarks rms_norm` |
| two \| three | less | `PYOPS_SYNC=1 python3 -c "print(1 \| 2)"` |

## What to try next

| not | a | row |
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


class Clock:
    """A monotonic clock that a test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: self.now))

    def part(self, name: str, takes: Callable[[float], float], given: dict[str, float]) -> Callable[[float], Part]:
        def run(seconds: float) -> Part:
            given[name] = seconds
            self.now += takes(seconds)
            return Part(name, "passed", takes(seconds), seconds, "")

        return run


def answering(monkeypatch: pytest.MonkeyPatch, text: str, status: str = "passed") -> list[Any]:
    """Every command "runs" and prints `text`. Returns the commands."""
    commands: list[Any] = []

    def run(command: Any, seconds: float, log: Path) -> Outcome:
        commands.append(command)
        return Outcome(status, 1.0, text)

    monkeypatch.setattr(gpu, "run", run)
    return commands


# Commands


@pytest.mark.parametrize(("code", "status"), [("print('fine')", "passed"), ("exit('broken')", "failed")])
def test_command_ends(tmp_path: Path, code: str, status: str) -> None:
    done = gpu.run(python(code), 60, tmp_path / "log")
    assert done.status == status
    assert done.text.strip() in ("fine", "broken")
    assert done.text in (tmp_path / "log").read_text()


def test_interrupted_command_may_print_its_summary(tmp_path: Path) -> None:
    # Background processes may ignore interrupts, and so do their children.
    code = (
        "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n print('begun', flush=True); time.sleep(60)\nexcept KeyboardInterrupt:\n print('ended')"
    )
    done = gpu.run(python(code), 1, tmp_path / "log")
    assert (done.status, done.text.split()) == ("cut", ["begun", "ended"])
    assert done.seconds < 30


def test_command_that_ignores_the_interrupt_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_GRACE_S", 0.2)
    code = (
        "import os, signal, subprocess, sys, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(os.getpgid(child.pid), flush=True)\ntime.sleep(60)"
    )
    done = gpu.run(python(code), 2, tmp_path / "log")
    assert done.status == "cut"
    assert done.seconds < 30
    assert int(done.text) != os.getpgid(0)  # the killed group belongs to the command alone


# The budget


def test_shares_are_of_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, given = Clock(monkeypatch), dict[str, float]()
    parts = {name: clock.part(name, lambda seconds: seconds, given) for name in gpu.SHARES}
    list(gpu.run_all(parts, 10))
    assert given == {name: pytest.approx(600 * share) for name, share in gpu.SHARES.items()}


def test_saved_time_goes_to_later_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, given = Clock(monkeypatch), dict[str, float]()
    parts = {name: clock.part(name, lambda _: 0, given) for name in gpu.SHARES}
    list(gpu.run_all(parts, 10))
    assert given["sanitizer"] == pytest.approx(600)
    assert given["owed"] == pytest.approx(600 * 0.15 / 0.6)


def test_time_of_a_part_is_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, given = Clock(monkeypatch), dict[str, float]()
    list(gpu.run_all({name: clock.part(name, lambda _: 1000, given) for name in gpu.SHARES}, 10))
    assert list(given.values())[1:] == [0, 0, 0]


def test_part_that_raises_has_failed_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def broken(seconds: float) -> Part:
        raise ValueError("no table")

    done = list(gpu.run_all({"suite": broken, "owed": clock.part("owed", lambda _: 1, {})}, 1))
    assert [(part.name, part.status) for part in done] == [("suite", "failed"), ("owed", "passed")]
    assert done[0].summary == "ValueError: no table"


# The parts


def test_suite_names_failed_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "...F\n=== short test summary info ===\nFAILED tests/a.py::test_b - assert 0\n1 failed, 7 passed in 3.20s\n"
    commands = answering(monkeypatch, text, "cut")
    part = gpu.suite(60, tmp_path)
    assert (part.status, part.summary) == ("failed", "1 failed, 7 passed")
    assert part.details == ["- FAILED tests/a.py::test_b - assert 0"]
    assert commands[0][-2:] == ["-n", str(max(1, gpu.cores() - 1))]


@pytest.mark.parametrize(
    ("text", "status", "summary"),
    [
        ("====== 5 passed, 2 skipped in 1s ======\n", "passed", "5 passed, 2 skipped"),
        ("5 passed in 1.00s\n", "cut", "5 passed"),
        ("no tests ran in 66.52s (0:01:06)\n", "cut", "no tests ran"),
        ("Fatal Python error\n", "failed", "no summary"),
    ],
)
def test_suite_counts_its_tests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, status: str, summary: str
) -> None:
    answering(monkeypatch, text, status)
    part = gpu.suite(60, tmp_path)
    assert (part.status, part.summary, part.details) == (status, summary, [])


def test_without_xdist_the_suite_runs_in_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    commands = answering(monkeypatch, "1 passed in 1s")
    gpu.suite(60, tmp_path)
    assert "-n" not in commands[0]


def test_rows_owed_to_a_gpu_are_parsed() -> None:
    assert gpu.owed(PAGE) == [
        ("one", "3 us", "python -m benchmarks rms_norm"),
        ("two | three", "less", 'PYOPS_SYNC=1 python3 -c "print(1 | 2)"'),
    ]
    assert gpu.owed("# No such section\n") == []
    with pytest.raises(ValueError, match="expected what, predicted and command"):
        gpu.owed("\n## Owed to a GPU\n| a | b | c |\n|---|---|---|\n| one | `x` |\n")


def test_rows_of_the_page_are_well_formed() -> None:
    for _, _, command in gpu.owed(gpu.PERFORMANCE.read_text()):
        assert gpu.with_this_python(command) != command, "begin the command with python"


def test_owed_commands_run_and_keep_their_last_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(PAGE.replace("-m benchmarks rms_norm", "-c \"print('x\\n' * 50 + 'the time')\""))
    monkeypatch.setattr(gpu, "PERFORMANCE", page)
    part = gpu.pay(120, tmp_path)
    assert (part.status, part.summary) == ("passed", "2 passed")
    text = "\n".join(part.details)
    assert text.count("x\n") == gpu._LAST_LINES - 1
    assert "the time\n```" in text
    assert "### two | three: passed" in text
    assert "Predicted: less. `PYOPS_SYNC=1" in text
    assert "\n3\n" in text


def test_page_without_owed_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "PERFORMANCE", tmp_path / "performance.md")
    gpu.PERFORMANCE.write_text("# Performance\n")
    part = gpu.pay(10, tmp_path)
    assert (part.status, part.summary) == ("passed", "nothing is owed")


def test_benchmarks_are_summarised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "### Targets: 3 of 4 hold\n- skipped vllm: import vllm._C (rms_norm)\n### Targets: 1 of 1 hold\n"
    commands = answering(monkeypatch, text)
    part = gpu.benchmarks(100, tmp_path)
    assert (part.status, part.summary) == ("passed", "4 of 5 targets hold")
    assert part.details == ["- skipped vllm: import vllm._C (rms_norm)"]
    assert "--minutes" in commands[0]
    assert tarfile.is_tarfile(tmp_path / "benchmarks.tar.gz")
    answering(monkeypatch, text + "- skipped pyops: no time left (rms_norm)\n")
    assert gpu.benchmarks(100, tmp_path).status == "cut"


TOOL = "{0}: 0 findings, {1} processes failed, {2} of 96 tests, 31 s\n"


@pytest.mark.parametrize(
    ("text", "came", "status", "summary"),
    [
        (TOOL.format("memcheck", 0, 96), "passed", "passed", "1 of 4 tools ended, 0 processes failed"),
        (TOOL.format("memcheck", 0, 24), "cut", "cut", "1 of 4 tools ended, 0 processes failed"),
        (
            "memcheck: 24 tests, -1 findings, 9 s, the longest unknown\nmemcheck: 24 tests, no findings, 9 s, the\n",
            "cut",
            "failed",
            "0 of 4 tools ended, 1 processes failed",
        ),
    ],
)
def test_sanitizer_is_summarised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, came: str, status: str, summary: str
) -> None:
    monkeypatch.setattr(gpu.shutil, "which", lambda name: name)
    commands = answering(monkeypatch, text, came)
    part = gpu.sanitize(300, tmp_path, "rms_norm or test_norm")
    assert (part.status, part.summary) == (status, summary)
    assert commands[0][-2:] == ["-k", "rms_norm or test_norm"]
    assert part.details[0] == "- tests of rms_norm or test_norm"


def test_without_a_revision_the_sanitizer_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu.shutil, "which", lambda name: name)
    commands = answering(monkeypatch, TOOL.format("memcheck", 0, 24))
    assert gpu.sanitize(300, tmp_path, None).details[0] == "- a sample of all tests"
    assert "-k" not in commands[0]
    assert gpu.sanitize(300, tmp_path, "").summary == "no kernel has changed"
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    assert gpu.sanitize(300, tmp_path, None).status == "absent"


# Selection by changes


def test_changed_kernel_selects_its_ops() -> None:
    assert gpu.tests_of(["kernels_cu/attention/merge_attn_states.cu"]) == "merge_attn_states or test_attention"
    assert gpu.tests_of(["docs/kernels.md", "pyops/_core/op/op.py"]) == ""


def test_changed_header_selects_its_includers() -> None:
    chosen = gpu.tests_of(["kernels_cu/quantize/fp4.cuh"]).split(" or ")
    assert {"scaled_fp4_quant", "silu_and_mul_scaled_fp4_experts_quant", "test_quantize"} <= set(chosen)
    assert "rms_norm" not in chosen
    indirectly = gpu.tests_of(["kernels_cu/include/platform.cuh"]).split(" or ")
    assert {"rms_norm", "paged_attention_v1", "test_sampling"} <= set(indirectly)


def test_changed_family_selects_its_ops() -> None:
    chosen = gpu.tests_of(["pyops/ops/rotary/tables.py"]).split(" or ")
    family = {name for name, op in pyops.registry.items() if op.reference.__module__.startswith("pyops.ops.rotary.")}
    assert set(chosen) == {*family, "test_rotary"}


def test_kernel_without_an_example_selects_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_launched", lambda: iter([("rms_norm", "norm", "kernels_cu/norm/rms_norm.cu")]))
    assert gpu.tests_of(["kernels_cu/attention/mla_decode.cu"]) == "test_attention"


def test_every_op_has_a_kernel_that_selects_it() -> None:
    every = gpu.tests_of(f"kernels_cu/{name}" for name in kernels_cu.names()).split(" or ")
    assert set(every) > set(pyops.registry)


def test_without_git_all_tests_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(gpu.subprocess, "run", no_git)
    assert gpu.expression_of("v1") is None
    assert gpu.expression_of(None) is None


# The whole run


def test_command_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "device_name", lambda: None)
    assert gpu.main([]) == 2
    assert "torch sees none" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code"), [("passed", 0), ("cut", 0), ("absent", 0), ("failed", 1)])
def test_report_contents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    def part(name: str, seconds: float, *_: Any) -> Part:
        return Part(name, status, 3.0, seconds, "in words", [f"- detail of {name}"])

    monkeypatch.setattr(gpu, "device_name", lambda: "Imagined GPU")
    for function, name in (
        ("suite", "suite"),
        ("pay", "owed"),
        ("benchmarks", "benchmarks"),
        ("sanitize", "sanitizer"),
    ):
        monkeypatch.setattr(gpu, function, partial(part, name))
    out = tmp_path / "new" / "folder"
    assert gpu.main(["--minutes", "2", "--out", str(out), "-k", "rms_norm"]) == code
    text = (out / "report.md").read_text()
    assert text.startswith("# Imagined GPU, 2 minutes\n")
    assert f"| suite | {status} | 3 | 48 | in words |" in text
    assert all(f"## {name}\n\n- detail of {name}" in text for name in gpu.SHARES)
    assert text in capsys.readouterr().out
    assert gpu.main(["--only", "suite", "--out", str(out)]) == code
    assert "## owed" not in (out / "report.md").read_text()


def test_every_part_runs_as_an_older_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYOPS_ARCH", "")
    monkeypatch.setattr(gpu, "device_name", lambda: "Imagined GPU")
    monkeypatch.setattr(gpu, "suite", lambda *_: Part("suite", "passed", 3.0, 4.0, os.environ["PYOPS_ARCH"], []))
    assert gpu.main(["--arch", "sm_80", "--only", "suite", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# Imagined GPU as sm_80, 9 minutes\n")
    assert "| suite | passed | 3 | 4 | sm_80 |" in text


def test_nothing_owed_is_run_as_an_older_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And an architecture that PYOPS_ARCH does not know is refused before anything runs."""
    monkeypatch.setenv("PYOPS_ARCH", "")
    monkeypatch.setattr(gpu, "device_name", lambda: "Imagined GPU")
    ran: list[str] = []
    monkeypatch.setattr(gpu, "run_all", lambda parts, _: ran.extend(parts) or iter(()))
    (tmp_path / "report.md").write_text("")
    assert gpu.main(["--arch", "sm_75", "--out", str(tmp_path)]) == 0
    assert ran == ["suite", "benchmarks", "sanitizer"]
    with pytest.raises(SystemExit):
        gpu.main(["--arch", "sm_70"])


def test_selected_tests_are_printed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--print-tests", "-k", "rms_norm"]) == 0
    assert gpu.main(["--print-tests"]) == 0
    assert capsys.readouterr().out.splitlines() == ["rms_norm", "all tests"]
