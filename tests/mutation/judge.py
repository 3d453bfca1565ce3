"""Runs the tests that could notice a mutant, in a fork of the process in which the mutant is applied.

`Judge` is a plugin of pytest: once the tests are collected, it judges mutant after mutant instead of running the tests.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest

import kernels_cu
from pyops._core.errors import CompileError
from pyops._core.launch.kernel import Specialisation
from pyops._core.text import source
from pyops.host import run
from pyops.host.run import Schedule, scheduled
from tests.mutation import choose, python
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.mutant import Mutant

OUTCOMES = ("killed", "survived", "timeout", "equivalent", "invalid")
# Seconds of the process's own work, without the compiler's, after which a test is ended: a kernel may loop forever.
_ENDLESS = 20.0
_ENDED = f" (did not end in {_ENDLESS:.0f} s)"
_PYTEST = ["-q", "-s", "--no-header", "--no-summary", "-o", "timeout=0"]
_PYTEST += [word for plugin in ("cacheprovider", "faulthandler", "xdist") for word in ("-p", f"no:{plugin}")]
_PYTEST += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # this process has imported hypothesis already
_PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent ends


class Verdict(NamedTuple):
    """The verdict on a mutant: one of OUTCOMES, and the evidence."""

    outcome: str
    by: str
    seconds: float
    tests: int


@dataclass
class _Job:
    """A fork: a mutant with its tests, or, without a mutant, one test that must pass."""

    mutant: Mutant | None
    items: list[pytest.Item]
    log: Path
    process: Any = None
    started: float = field(default_factory=time.monotonic)


class Judge:
    """Judges `mutants`, `max_jobs` at a time, each for at most `seconds`; starts none after `deadline`.

    `report` is called with each mutant and its verdict. A test that fails without one kills none, and is `unsound`.
    """

    def __init__(
        self,
        mutants: Sequence[Mutant],
        max_jobs: int,
        seconds: float,
        deadline: float,
        report: Callable[[Mutant, Verdict], None],
    ) -> None:
        self.waiting, self.max_jobs, self.seconds = deque(mutants), max_jobs, seconds
        self.deadline, self.report = deadline, report
        self.sound: dict[str, float] = {}  # test -> seconds of the process's own work without a mutant
        self.unsound: set[str] = set()
        self._killers: dict[str, list[str]] = defaultdict(list)
        self._doubted: dict[str, list[tuple[Mutant, Verdict]]] = defaultdict(list)  # test -> what it seems to kill
        self._uncollected: list[str] = []  # why tests could not be collected
        self._failed = ""
        self._numbers = itertools.count()

    def run(self, files: Sequence[str]) -> None:
        """Judge the mutants by the tests of these files, or of these ids."""
        status = pytest.main([*_PYTEST, *files], plugins=[self])
        if self._uncollected:
            raise RuntimeError("\n".join(["no mutant is judged without all tests", *self._uncollected]))
        if status:
            raise RuntimeError(f"pytest ended with {status}")

    def pytest_sessionstart(self) -> None:
        """Failing examples need not be shrunk."""
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        settings = hypothesis.settings()
        hypothesis.settings.register_profile("mutation", settings, phases=phases, report_multiple_bugs=False)
        hypothesis.settings.load_profile("mutation")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note files that cannot be collected: mutants that their tests kill would seem to survive."""
        if report.failed:
            self._uncollected.append(f"{report.nodeid}: {report.longreprtext}")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Judge every mutant, in place of running every test."""
        if self._uncollected:
            return True
        running: dict[Any, _Job] = {}
        checks: deque[_Job] = deque()
        items = {item.nodeid: item for item in session.items}
        with tempfile.TemporaryDirectory() as folder:
            os.environ["CUPY_CACHE_DIR"] = folder
            while self.waiting or running or checks:
                if time.monotonic() > self.deadline:
                    self.waiting.clear()
                while len(running) < self.max_jobs and (checks or self.waiting):
                    job = checks.popleft() if checks else self._next(session.items, folder)
                    if job is not None:
                        self._start(job)
                        running[job.process.sentinel] = job
                ended = multiprocessing.connection.wait(running, timeout=0.5)
                for sentinel, job in list(running.items()):
                    seconds = time.monotonic() - job.started
                    if sentinel in ended or seconds > self.seconds:
                        del running[sentinel]
                        doubted = self._end(job, seconds, late=sentinel not in ended)
                        if doubted:
                            checks.append(_Job(None, [items[doubted]], self._new_log(folder)))
        return True

    def _next(self, items: Sequence[pytest.Item], folder: str) -> _Job | None:
        mutant = self.waiting.popleft()
        if mutant.name in EQUIVALENT:
            self.report(mutant, Verdict("equivalent", EQUIVALENT[mutant.name], 0.0, 0))
            return None
        chosen = choose.items_of(mutant, items, self._killers[mutant.file])
        chosen = [item for item in chosen if item.nodeid not in self.unsound]
        return _Job(mutant, chosen, self._new_log(folder))

    def _new_log(self, folder: str) -> Path:
        return Path(folder, f"{next(self._numbers)}.log")

    def _start(self, job: _Job) -> None:
        job.started = time.monotonic()
        job.log.write_text("")
        job.process = multiprocessing.get_context("fork").Process(target=self._run, args=(job,))
        job.process.start()

    def _end(self, job: _Job, seconds: float, late: bool) -> str:
        """Record the result of a fork. Returns a test that must be run without a mutant, or ''."""
        if late:
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.join()
        lines = [line.partition(" ") for line in job.log.read_text(errors="replace").splitlines()]
        begun = [name for word, _, name in lines if word == "begun"]
        last = begun[-1] if begun else ""
        told = next(((word, rest) for word, _, rest in lines if word in ("failed", *OUTCOMES)), None)
        if job.mutant is None:
            if told == ("survived", "") and not late:
                self.sound[last] = next(float(rest) for word, _, rest in lines if word == "took")
            else:
                self.unsound.add(last)
            self._settle(last)
        elif told is None and not late and not begun:
            printed = job.log.with_suffix(".out").read_text(errors="replace")
            raise RuntimeError(f"{job.mutant.name}: the fork ended with {job.process.exitcode}\n{printed}")
        elif late:
            self.report(job.mutant, Verdict("timeout", f"{len(begun) - 1} tests passed", seconds, len(begun) - 1))
        elif told is None or told[0] == "failed":
            signalled = -job.process.exitcode
            ended = last + (_ENDED if signalled == signal.SIGPROF else f" (ended by signal {signalled})")
            verdict = Verdict("killed", ended if told is None else last, seconds, len(begun))
            self._doubted[last].append((job.mutant, verdict))
            if last not in self.sound:
                return last if len(self._doubted[last]) == 1 else ""
            self._settle(last)
        else:
            self.report(job.mutant, Verdict(told[0], told[1], seconds, len(begun)))
        return ""

    def _settle(self, test: str) -> None:
        """The test has now passed or failed without a mutant, in much less time than an endless one takes."""
        for mutant, verdict in self._doubted.pop(test, []):
            if verdict.by.endswith(_ENDED) and self.sound.get(test, 0.0) > _ENDLESS / 4:
                self.unsound.add(test)
            if test not in self.unsound:
                self._killers[mutant.file].append(test)
                self.report(mutant, verdict)
            else:
                self.waiting.appendleft(mutant)

    # The functions below run in a fork.

    def _run(self, job: _Job) -> None:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with job.log.with_suffix(".out").open("w") as printed:
            for descriptor in (1, 2):
                os.dup2(printed.fileno(), descriptor)
        self._log = job.log.open("a", buffering=1)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        loaded = _apply(job.mutant, job.log.with_suffix(".site")) if job.mutant else []
        for item, following in itertools.zip_longest(job.items, job.items[1:]):
            print("begun", item.nodeid, file=self._log)
            signal.setitimer(signal.ITIMER_PROF, _ENDLESS)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                print("failed", item.nodeid, file=self._log)
                os._exit(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(f"took {time.process_time():.1f}", file=self._log)
        if loaded and _same_code(loaded):
            print(f"equivalent the same machine code in all {len(loaded)} specialisations that ran", file=self._log)
        else:
            print("survived ", file=self._log)
        os._exit(0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note that a test has failed."""
        if report.failed:
            self._failed = report.nodeid

    def pytest_exception_interact(self, call: pytest.CallInfo[Any]) -> None:
        """A text that does not compile is no mutant."""
        if call.excinfo is not None and call.excinfo.errisinstance(CompileError):
            print("invalid does not compile", file=self._log)
            os._exit(0)


def _apply(mutant: Mutant, folder: Path) -> list[tuple[Specialisation, int, str]]:
    """Break the kernel or the function in this process. Returns the texts of the broken kernel that will be loaded."""
    loaded: list[tuple[Specialisation, int, str]] = []
    if mutant.is_python:
        python.apply(mutant)
        python.apply_in_children(mutant, folder)
        return loaded
    read, load = kernels_cu.read, run.load
    broken = mutant.apply(read(mutant.file))
    _read_with(lambda name: broken if name == mutant.file else read(name))

    def load_and_note(one: Specialisation) -> Any:
        function = load(one)
        if mutant.file in choose.sources_of(one.kernel.file, one.kernel.text):
            loaded.append((one, function.warp_size, function.library))
        return function

    run.load = load_and_note
    _restore.append(lambda: _read_with(read))
    _restore.append(lambda: setattr(run, "load", load))
    return loaded


_restore: list[Callable[[], None]] = []


def _read_with(read: Callable[[str], str]) -> None:
    kernels_cu.read = read
    for cached in vars(source).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


def _same_code(loaded: Sequence[tuple[Specialisation, int, str]]) -> bool:
    """Whether the compiled code equals that of the unbroken kernels."""
    for undo in _restore:
        undo()
    for specialisation, warp_size, library in loaded:
        with scheduled(Schedule(), warp_size=warp_size):
            if machine_code(run.load(specialisation).library) != machine_code(library):
                return False
    return True


def machine_code(library: str) -> dict[str, bytes]:
    """The instructions and constants of a shared object."""
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(Path(library).read_bytes()))
    return {part.name: part.data() for part in elf.iter_sections() if part.name.startswith((".text", ".rodata"))}
