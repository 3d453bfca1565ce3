"""Small cases of every op, and of every kernel that a small case launches, run by tinygrad's AMD emulator.

The results are compared with those of the op's reference.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.overrides import TorchFunctionMode

import pyops
from pyops._core.launch.kernel import Launch, Specialisation
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops.example import ArgMaker, TorchMaker
from pyops.host import run as run_on_host
from pyops.testing import cpu
from pyops.testing.calls import assert_results, clones, expected, run
from pyops.testing.rounded import FUNCTIONS
from tests.support import axes

from .. import layouts
from ..compile import code_object
from ..packages import Folder
from . import checkout, registers, repairs
from .code_object import CodeObject, Size

FAMILIES = {"gfx942": "cdna", "gfx950": "cdna", "gfx1100": "rdna3", "gfx1201": "rdna4"}  # the emulator's names
# The emulator runs about ten thousand instructions of a wave per second, so cases have small rows and few tokens.
_SMALL = axes.RUN | {"hidden_size": (64,), "vocab_size": (17,)}
_TOKENS = 2
_MAX_THREADS = 16384  # bound on the threads of a case that is added for one more kernel
# Cases without an op: {name: a check that is called with the architecture}.
CHECKS = {"matrix cores": layouts.check_arch, "registers": registers.check_arch}


Case = tuple[str, axes.Axes]  # (op, axes of its example), or (key of CHECKS, arguments of the check)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

    Attributes:
        wrong: how the result differs from the reference, or how the process crashed; "" if the result is right.
        missing: the exception that kept the case from running; "" if it ran.
    """

    case: Case
    seconds: float = 0.0
    wrong: str = ""
    missing: str = ""

    @property
    def trouble(self) -> str:
        """Empty if the result is right."""
        return f"WRONG: {self.wrong}" if self.wrong else f"not emulated: {self.missing}" if self.missing else ""


def cases(arch: str, ops: Sequence[Op]) -> list[Case]:
    """A random small case of each op. For each kernel that none of these launches, the smallest."""
    chosen = [
        (op.name, random.Random(op.name).choice(list(axes.combinations(op, _SMALL))) | {"num_tokens": _TOKENS})
        for op in ops
    ]
    launched = {launch.specialisation.kernel.file for name, case in chosen for launch in _launches(arch, name, case)}
    smallest: dict[str, tuple[int, Case]] = {}
    for op in ops:
        for combination in axes.combinations(op):
            case = combination | {"num_tokens": _TOKENS}
            launches = _launches(arch, op.name, case)
            threads = sum(math.prod((*launch.grid, *launch.block)) for launch in launches)
            for file in {launch.specialisation.kernel.file for launch in launches} - launched:
                if threads < smallest.get(file, (_MAX_THREADS,))[0]:
                    smallest[file] = threads, (op.name, case)
    more = [case for _, case in smallest.values()]
    return chosen + [case for i, case in enumerate(more) if case not in more[:i]]


def _launches(arch: str, name: str, case: axes.Axes) -> list[Launch]:
    op = pyops.registry[name]
    assert op.example is not None
    return op.launches(*op.example(ArgMaker(device.model(arch)), **case))


def outcomes(tinygrad: Path, folder: Folder, arch: str, cases: Sequence[Case]) -> Iterator[Outcome]:
    """The outcome of each case. Cases run in a child process, because a kernel that uses a wrong address crashes it.

    After a crash, another child runs the rest of the cases. Raises checkout.Unavailable without an emulator.
    """
    waiting = list(cases)
    context = multiprocessing.get_context("spawn")
    while waiting:
        reader, writer = context.Pipe(duplex=False)
        child = context.Process(target=_serve, args=(writer, tinygrad, folder, arch, waiting))
        child.start()
        writer.close()
        try:
            while waiting:
                outcome = reader.recv()
                if isinstance(outcome, checkout.Unavailable):
                    raise outcome
                waiting = waiting[1:]
                yield outcome
        except EOFError:
            child.join()
            case, *waiting = waiting
            yield Outcome(case, wrong=f"the process ended with status {child.exitcode}")
        child.join()


def _serve(answers: Connection, tinygrad: Path, folder: Folder, arch: str, cases: Sequence[Case]) -> None:
    """Run the cases in this process, in which CPU tensors use the kernels of `arch` from here on."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            emulator = checkout.emulator(tinygrad, Path(scratch))
        except checkout.Unavailable as error:
            answers.send(error)
            return
        repairs.apply(emulator, arch)
        _install(emulator, folder, arch)
        for case in cases:
            answers.send(_outcome(case))


class _Function:
    """A compiled kernel, in place of the host backend's: `launch` runs the AMD code object in the emulator."""

    def __init__(self, emulator: Any, family: str, code: bytes) -> None:
        self.emulator, self.family, self.code = emulator, family, CodeObject(code)

    def launch(self, grid: Size, block: Size, shared: int, parameters: int, *_: Any) -> None:
        self.code.launch(self.emulator, self.family, grid, block, shared, parameters)


def _install(emulator: Any, folder: Folder, arch: str) -> None:
    """Make this process plan for `arch` on CPU tensors, and launch in the emulator instead of the host backend."""

    @cache
    def function(text: str, one: Specialisation) -> _Function:
        return _Function(emulator, FAMILIES[arch], code_object(folder, arch, one))

    device._HOST = dict.fromkeys(device._HOST, device.model(arch))
    run_on_host.load = lambda one: function(one.text, one)


def _outcome(case: Case) -> Outcome:
    started = time.monotonic()
    wrong = missing = ""
    try:
        _compare(*case)
    except AssertionError as error:
        wrong = str(error)
    except Exception as error:
        missing = f"{type(error).__name__}: {error}"
    return Outcome(case, time.monotonic() - started, wrong, missing)


def _compare(name: str, case: axes.Axes) -> None:
    if check := CHECKS.get(name):
        check(**case)
        return
    op = pyops.registry[name]
    assert op.example is not None
    args, ulps = op.example(TorchMaker("cpu", 0), **case), op.declaration.ulps
    with cpu("kernels"):
        wanted, actual = expected(op, args), run(op, args)
    assert_results(op, wanted, actual, max(ulps, 1) if _calls_functions(op, args) else ulps)


def _calls_functions(op: Op, args: Sequence[Any]) -> bool:
    """Whether the reference calls functions, such as exp, that HIP does not round correctly."""
    called = []

    class Calls(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(function in FUNCTIONS)
            return function(*args, **(kwargs or {}))

    with Calls():
        op.applied(op.reference, clones(args))()
    return any(called)
