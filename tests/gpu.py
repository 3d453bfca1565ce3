"""All that needs a GPU, in one command: ``python -m tests.gpu --minutes 9 --out FOLDER [--since REV] [--arch sm_80]``.

Four parts share the minutes: the GPU suite, the commands in docs/performance.md under "Owed to a GPU", benchmarks
against the installed rivals, and the suite under compute-sanitizer. Time that one part saves goes to the next parts. A
part that runs out of time is interrupted, and its results so far count. FOLDER then holds ``report.md``, the output of
each part, and the results of the benchmarks. With --arch nothing owed is run: its predictions are of the GPU itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PERFORMANCE = ROOT / "docs" / "performance.md"
_GRACE_S = 15  # time for a summary after the interrupt
_LAST_LINES = 12  # of a command's output, in the report
# Without pytest-timeout, pytest warns of its setting in pyproject.toml, and warnings are errors.
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-W", "ignore:Unknown config option:pytest.PytestConfigWarning")
_COUNTS = re.compile(
    r"^=*\s*(no tests ran|(?:\d+ (?:failed|passed|skipped|errors?|xfailed|xpassed|deselected|warnings?)(?:, )?)+)"
)


@dataclass
class Outcome:
    """The outcome of a command: `status` is "passed", "failed", "cut" (out of time) or "absent" (cannot run)."""

    status: str
    seconds: float
    text: str  # printed output


@dataclass
class Part:
    """A line of the report, and the text below it."""

    name: str
    status: str
    seconds: float
    limit: float
    summary: str
    details: list[str] = field(default_factory=list)


def run(command: Sequence[str] | str, seconds: float, log: Path) -> Outcome:
    """Run a command or shell line for at most `seconds`, and append its output to `log`.

    When the time is up the process group is interrupted, as by Ctrl-C, and killed if it does not end.
    """
    started, status = time.monotonic(), "cut"
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            command,
            shell=isinstance(command, str),
            cwd=ROOT,
            env={"PYOPS_TEST_PROFILE": "gpu"} | os.environ,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(max(0.0, seconds))
            status = "failed" if process.returncode else "passed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed.seek(0)
        text = printed.read()
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {command if isinstance(command, str) else shlex.join(command)}\n{text}\n")
    return Outcome(status, time.monotonic() - started, text)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


# The suite


def suite(seconds: float, out: Path) -> Part:
    """Every test that needs a device."""
    parallel = ["-n", str(max(1, cores() - 1))] if importlib.util.find_spec("xdist") else []
    done = run([*_PYTEST, "-m", "gpu", *parallel], seconds - _GRACE_S, out / "suite.log")
    counts = [match[1] for line in done.text.splitlines() if (match := _COUNTS.match(line))]
    bad = [f"- {line}" for line in done.text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    status = "failed" if bad else done.status
    return Part("suite", status, done.seconds, seconds, counts[-1] if counts else "no summary", bad)


# Measurements owed to a GPU


def owed(page: str) -> list[tuple[str, str, str]]:
    """(what, predicted, command) of each row of the page's table "Owed to a GPU"."""
    _, _, after = page.partition("\n## Owed to a GPU\n")
    section = after.partition("\n## ")[0]
    lines = [line.strip() for line in section.splitlines() if line.strip().startswith("|")]
    rows = [[cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]
    if wrong := [row for row in rows if len(row) != 3]:
        raise ValueError(f"Owed to a GPU: expected what, predicted and command, got {wrong[0]}")
    return [(what, predicted, command.strip("`")) for what, predicted, command in rows]


def with_this_python(command: str) -> str:
    """The command with this interpreter in place of ``python``, after assignments of variables."""
    return re.sub(
        r"^((?:\w+=\S+ )*)python3?(?= )", lambda match: match[1] + shlex.quote(sys.executable), command.strip()
    )


def pay(seconds: float, out: Path) -> Part:
    """Run every owed command and keep the last lines of its output."""
    rows, started, details, statuses = owed(PERFORMANCE.read_text()), time.monotonic(), [], []
    for i, (what, predicted, command) in enumerate(rows):
        left = seconds - (time.monotonic() - started)
        done = run(with_this_python(command), left / (len(rows) - i) - _GRACE_S, out / "owed.log")
        statuses.append(done.status)
        last = done.text.rstrip().splitlines()[-_LAST_LINES:]
        details += [
            f"### {what}: {done.status} in {done.seconds:.0f} s",
            "",
            f"Predicted: {predicted}. `{command}`",
            "",
        ]
        details += ["```", *last, "```", ""]
    summary = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)) or "nothing is owed"
    return Part("owed", worst(statuses), time.monotonic() - started, seconds, summary, details)


def worst(statuses: Iterable[str]) -> str:
    """The common status of several commands."""
    found = set(statuses)
    return next((status for status in ("failed", "cut", "absent") if status in found), "passed")


# Benchmarks


def benchmarks(seconds: float, out: Path) -> Part:
    """Times of every op at few and many tokens, next to the installed rivals."""
    with tempfile.TemporaryDirectory() as folder:
        axes = ["num_tokens=16,4096", "hidden_size=4096"]
        effort = ["--quick", "--minutes", f"{(seconds - 3 * _GRACE_S) / 60:.2f}"]
        command = [sys.executable, "-m", "benchmarks", "--all", *axes, *effort, "--gpu", "--host", "--save"]
        done = run([*command, "--results", folder], seconds - _GRACE_S, out / "benchmarks.log")
        shutil.make_archive(str(out / "benchmarks"), "gztar", folder)
    lines = done.text.splitlines()
    held = [tuple(map(int, found)) for found in re.findall(r"Targets: (\d+) of (\d+) hold", done.text)]
    details = [f"- {line.lstrip('- ')}" for line in lines if line.startswith(("- **failed**", "- skipped"))]
    summary = f"{sum(one for one, _ in held)} of {sum(every for _, every in held)} targets hold"
    status = "cut" if done.status == "passed" and "no time left" in done.text else done.status
    return Part("benchmarks", status, done.seconds, seconds, summary, details)


# The sanitizer


def changed_files(since: str) -> list[str] | None:
    """Files that differ from the revision; None without git or the revision."""
    try:
        command = ["git", "diff", "--name-only", since, "--"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.splitlines()


def _includers(changed: set[str]) -> set[str]:
    """The kernels that consist of or include one of the files."""
    import kernels_cu
    from pyops._core.text import source

    kernels = [name for name in kernels_cu.names() if name.endswith(".cu")]
    holds = {name: set(re.findall(r'#line \d+ "(kernels_cu/\S+)"', source.inline(name))) for name in kernels}
    return {f"kernels_cu/{name}" for name in kernels if holds[name] & changed}


def _launched() -> Iterator[tuple[str, str, str]]:
    """(op, its family, a kernel that it launches), for few and many tokens and every value of an axis that has few."""
    import pyops
    from benchmarks import shapes
    from pyops import axes

    for op in pyops.registry.values():
        choices = {name: axis.choices for name, axis in axes.of(op).items()}
        for axis, values in {"num_tokens": (1, 256, 16384), **choices}.items():
            for case in shapes.cases(op, {axis: values} if values else {}, {}):
                for launch in op.launches(*case.described):
                    yield op.name, case.family, f"kernels_cu/{launch.specialisation.kernel.file}"


def tests_of(changed: Iterable[str]) -> str:
    """The pytest expression that selects tests of changed kernels, headers and families of ops."""
    files = set(changed)
    kernels = _includers(files)
    families = {match[1] for name in files if (match := re.match(r"pyops/ops/([a-z]\w*)/", name))}
    chosen, launched = set(), set()
    for op, family, kernel in _launched():
        launched.add(kernel)
        if kernel in kernels or family in families:
            chosen |= {op, f"test_{family}"}
    # Kernels that no example launches. Their folder has the name of their family.
    chosen |= {f"test_{Path(kernel).parent.name}" for kernel in kernels - launched}
    return " or ".join(sorted(chosen))


def expression_of(since: str | None) -> str | None:
    """The pytest expression that selects tests of the changes since a revision; None if it cannot be determined."""
    changed = changed_files(since) if since else None
    return None if changed is None else tests_of(changed)


def sanitize(seconds: float, out: Path, expression: str | None) -> Part:
    """Run the selected tests, or with None a sample of all, under compute-sanitizer."""
    if shutil.which("compute-sanitizer") is None:
        return Part("sanitizer", "absent", 0, seconds, "compute-sanitizer is not installed")
    if expression == "":
        return Part("sanitizer", "passed", 0, seconds, "no kernel has changed")
    from tests.sanitize import TOOLS

    chosen = f"tests of {expression}" if expression else "a sample of all tests"
    minutes = max(0.1, (seconds / len(TOOLS) - _GRACE_S) / 60)  # a tool finishes its last tests after its time
    command = [sys.executable, "-m", "tests.sanitize", "-n", str(max(1, cores() - 2)), "--minutes", f"{minutes:.2f}"]
    done = run([*command, "-k", expression] if expression else command, seconds - _GRACE_S, out / "sanitize.log")
    # The line of a process is "memcheck: 24 tests, no findings, 9 s, ...". The line of a tool is "memcheck: 0 findings,
    # 0 processes failed, 120 of 7000 tests, 31 s".
    tools = re.findall(r"^\w+: \d+ findings, \d+ processes failed, .*$", done.text, re.MULTILINE)
    bad = re.findall(r"^\w+: \d+ tests, (?!no )\S+ findings, .*$", done.text, re.MULTILINE)
    status = "failed" if bad else done.status
    summary = f"{len(tools)} of {len(TOOLS)} tools ended, {len(bad)} processes failed"
    details = [f"- {line}" for line in (chosen, *tools, *bad)]
    return Part("sanitizer", status, done.seconds, seconds, summary, details)


# All four parts

SHARES = {"suite": 0.4, "owed": 0.15, "benchmarks": 0.2, "sanitizer": 0.25}


def run_all(parts: dict[str, Callable[[float], Part]], minutes: float) -> Iterator[Part]:
    """Run the parts in order, each with its share of the remaining time. A part that raises has failed."""
    end = time.monotonic() + 60 * minutes
    for i, (name, part) in enumerate(parts.items()):
        started = time.monotonic()
        left = sum(SHARES[other] for other in list(parts)[i:])
        seconds = max(0.0, end - started) * SHARES[name] / left
        try:
            yield part(seconds)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            yield Part(name, "failed", time.monotonic() - started, seconds, text)


def render(device: str, minutes: float, parts: Sequence[Part]) -> str:
    """The report as Markdown."""
    lines = [f"# {device}, {minutes:g} minutes", "", "| part | status | seconds | of | |", "|---|---|---:|---:|---|"]
    lines += [f"| {one.name} | {one.status} | {one.seconds:.0f} | {one.limit:.0f} | {one.summary} |" for one in parts]
    for part in parts:
        if part.details:
            lines += ["", f"## {part.name}", "", *part.details]
    return "\n".join([*lines, ""])


def device_name() -> str | None:
    """The name of torch's first GPU, asked in another process, so that this process holds no device."""
    code = "import torch; print(torch.cuda.get_device_name(0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout.strip()


def _archs() -> list[str]:
    """The architectures that PYOPS_ARCH knows."""
    from pyops import gpus

    return list(dict.fromkeys(one.model.arch for one in gpus.GPUS.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and write the report. Returns 1 if a part failed and 2 without a GPU."""
    assert __doc__
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything together (default 9)")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-report"), help="folder of the report (default gpu-report)"
    )
    parser.add_argument("--since", metavar="REV", help="sanitize the tests of kernels that changed since this revision")
    parser.add_argument("-k", metavar="EXPRESSION", help="sanitize the tests that pytest selects by it")
    parser.add_argument("--print-tests", action="store_true", help="only print what --since makes of -k; needs no GPU")
    parser.add_argument("--arch", choices=_archs(), help="run as an older GPU: PYOPS_ARCH of every part")
    parser.add_argument("--only", choices=SHARES, action="append", help="this part (may be given several times)")
    options = parser.parse_args(arguments)
    expression = options.k or expression_of(options.since)
    if options.print_tests:
        print(expression if expression is not None else "all tests")
        return 0
    device = device_name()
    if device is None:
        print("python -m tests.gpu needs a GPU, and torch sees none", file=sys.stderr)
        return 2
    if options.arch:
        os.environ["PYOPS_ARCH"], device = options.arch, f"{device} as {options.arch}"
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    every: dict[str, Callable[[float], Part]] = {
        "suite": lambda seconds: suite(seconds, out),
        "owed": lambda seconds: pay(seconds, out),
        "benchmarks": lambda seconds: benchmarks(seconds, out),
        "sanitizer": lambda seconds: sanitize(seconds, out, expression),
    }
    done: list[Part] = []
    chosen = options.only or [name for name in SHARES if not (options.arch and name == "owed")]
    for part in run_all({name: every[name] for name in chosen}, options.minutes):
        done.append(part)
        print(f"{part.name}: {part.status}, {part.seconds:.0f} of {part.limit:.0f} s, {part.summary}", flush=True)
        # The report is rewritten after every part, so that an interrupted run leaves its findings.
        (out / "report.md").write_text(render(device, options.minutes, done))
    print((out / "report.md").read_text())
    return int(any(part.status == "failed" for part in done))


if __name__ == "__main__":
    sys.exit(main())
