"""Compile specialisations by hiprtc and report the resources of the results."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pyops._core.launch.kernel import Specialisation

from .metadata import Resources, resources
from .packages import Folder
from .specialisations import ARCHS, RELATIVES

Job = tuple[str, Specialisation]  # (architecture, specialisation)
_WORKER = Path(__file__).with_name("worker.py")
_BATCH = 10  # jobs of a worker, which returns all results at once


@dataclass(frozen=True)
class Compiled:
    """One specialisation for one architecture. `resources` is None if it did not compile; `log` then has the reason."""

    digest: str  # of the job
    kernel: str
    constants: str
    arch: str
    seconds: float
    log: str
    resources: Resources | None

    @property
    def trouble(self) -> str:
        """The reason why a kernel fails: it does not compile, or uses scratch memory."""
        if self.resources is None:
            lines = self.log.splitlines()
            return next((line for line in lines if "error" in line), lines[-1] if lines else "no log")
        if self.resources.scratch or self.resources.vgpr_spills:
            return f"{self.resources.scratch} bytes of scratch memory, {self.resources.vgpr_spills} VGPRs spilled"
        return ""


def digest(folder: Folder, job: Job) -> str:
    """A digest of everything that a result depends on: the text, the architecture, the version of hiprtc."""
    arch, one = job
    return hashlib.sha256(f"{folder.library.resolve().name} {arch}\n{one.text}".encode()).hexdigest()


def compile_all(folder: Folder, jobs: Iterable[Job], processes: int) -> Iterator[Compiled]:
    """Compile each (architecture, specialisation) in this many processes. Results come in any order.

    The first jobs compile while `jobs` finds the next ones.
    """
    waiting = iter(jobs)
    with ThreadPoolExecutor(processes) as pool:
        try:
            batches = iter(lambda: list(islice(waiting, _BATCH)), [])
            for done in as_completed([pool.submit(_compile_batch, folder, batch) for batch in batches]):
                yield from done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _compile_batch(folder: Folder, jobs: Sequence[Job]) -> list[Compiled]:
    found = []
    for job, (seconds, log, code) in zip(jobs, _built(folder, jobs), strict=True):
        arch, one = job
        made = resources(code) if code else None
        found.append(Compiled(digest(folder, job), one.kernel.file, str(one), arch, seconds, log, made))
    return found


def code_object(folder: Folder, arch: str, one: Specialisation) -> bytes:
    """The specialisation, compiled. Raises ValueError with hiprtc's log."""
    ((_, log, code),) = _built(folder, [(arch, one)])
    if code is None:
        raise ValueError(f"{one.kernel.file} did not compile for {arch} with {one}\n{log}")
    return code


def _built(folder: Folder, jobs: Sequence[Job]) -> Iterator[tuple[float, str, bytes | None]]:
    """(seconds, log, code object) of each job, by one worker."""
    with tempfile.TemporaryDirectory() as scratch:
        lines = []
        for i, (arch, one) in enumerate(jobs):
            text = Path(scratch, f"{i}.cu")
            text.write_text(one.text)
            lines.append(f"{arch} {text} {text.with_suffix('.hsaco')}\n")
        command = folder.command(str(_WORKER), str(folder.library), str(folder.include))
        done = subprocess.run(command, input="".join(lines), stdout=subprocess.PIPE, text=True, check=True)
        for i, (_, answer) in enumerate(zip(jobs, done.stdout.splitlines(), strict=True)):
            seconds, log = json.loads(answer)
            code = Path(scratch, f"{i}.hsaco")
            yield seconds, log, code.read_bytes() if code.exists() else None


def table(found: Sequence[Compiled]) -> str:
    """Markdown: for each kernel and architecture the number that compiled, and the maximum of each resource."""
    archs = [arch for arch in (*ARCHS, *RELATIVES) if any(one.arch == arch for one in found)]
    lines = [f"| kernel | {' | '.join(archs)} |", "|---" * (len(archs) + 1) + "|"]
    for kernel in sorted({one.kernel for one in found}):
        cells = [_cell([one for one in found if (one.kernel, one.arch) == (kernel, arch)]) for arch in archs]
        lines.append(f"| {kernel} | {' | '.join(cells)} |")
    totals = [[one for one in found if one.arch == arch] for arch in archs]
    lines.append(f"| all | {' | '.join(f'{sum(not one.trouble for one in every)}/{len(every)}' for every in totals)} |")
    return "\n".join(lines)


def _cell(tried: Sequence[Compiled]) -> str:
    good = [one.resources for one in tried if one.resources]
    if not tried:
        return "-"
    words = [f"{sum(not one.trouble for one in tried)}/{len(tried)}"]
    for name, field in (("VGPR", "vgprs"), ("LDS", "lds"), ("SGPR spills", "sgpr_spills")):
        if largest := max((getattr(one, field) for one in good), default=0):
            words.append(f"{name} {largest}")
    return ", ".join(words)
