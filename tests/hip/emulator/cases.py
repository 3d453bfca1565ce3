"""One small case of every op, run by the emulator and held to the op's reference."""

from __future__ import annotations

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
from pyops._core import device
from pyops._core.example import TorchMaker
from pyops._core.kernel import Specialisation
from pyops._core.op import Op
from pyops.testing import cpu
from pyops.testing.calls import assert_results, clones, expected, run
from pyops.testing.rounded import FUNCTIONS
from tests import axes

from ..compile import code_object
from ..packages import Folder
from . import checkout, repairs
from .code_object import CodeObject, Size

FAMILIES = {"gfx942": "cdna", "gfx950": "cdna", "gfx1100": "rdna3", "gfx1201": "rdna4"}  # as the emulator names them
# The emulator runs some ten thousand instructions of a wave in a second: small rows, few tokens.
_SMALL = axes.RUN | {"hidden_size": (64,), "vocab_size": (17,)}
_TOKENS = 2


@dataclass(frozen=True)
class Outcome:
    """Of one op. `wrong` says how the result differs, `missing` why the emulator could not run the op."""

    op: str
    case: str = ""
    seconds: float = 0.0
    wrong: str = ""
    missing: str = ""

    @property
    def trouble(self) -> str:
        """Empty where the result is right."""
        return f"WRONG: {self.wrong}" if self.wrong else f"not emulated: {self.missing}" if self.missing else ""


def outcomes(tinygrad: Path, folder: Folder, arch: str, names: Sequence[str]) -> Iterator[Outcome]:
    """The outcome of each op. Ops run in another process, because a kernel with a wrong address ends its process.

    Raises checkout.Unavailable.
    """
    waiting = list(names)
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
            name, *waiting = waiting
            yield Outcome(name, wrong=f"the process ended with status {child.exitcode}")
        child.join()


def _serve(answers: Connection, tinygrad: Path, folder: Folder, arch: str, names: Sequence[str]) -> None:
    """Run the ops in this process, whose kernels on CPU tensors are those of `arch` from here on."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            emulator = checkout.emulator(tinygrad, Path(scratch))
        except checkout.Unavailable as error:
            answers.send(error)
            return
        repairs.apply(emulator, arch)
        _install(emulator, folder, arch)
        for name in names:
            answers.send(_outcome(pyops.registry[name]))


class _Function:
    """Takes the place of the host backend's function."""

    def __init__(self, emulator: Any, family: str, code: bytes) -> None:
        self.emulator, self.family, self.code = emulator, family, CodeObject(code)

    def launch(self, grid: Size, block: Size, shared: int, parameters: int, *_: Any) -> None:
        self.code.launch(self.emulator, self.family, grid, block, shared, parameters)


def _install(emulator: Any, folder: Folder, arch: str) -> None:
    @cache
    def function(text: str, one: Specialisation) -> _Function:
        return _Function(emulator, FAMILIES[arch], code_object(folder, arch, one))

    device._HOST = dict.fromkeys(device._HOST, device.model(arch))
    Specialisation.load_on_host = lambda self: function(self.text, self)


def _outcome(op: Op) -> Outcome:
    case = random.Random(op.name).choice(list(axes.combinations(op, _SMALL)))
    started = time.monotonic()
    wrong = missing = ""
    try:
        _compare(op, case)
    except AssertionError as error:
        wrong = str(error)
    except Exception as error:
        missing = f"{type(error).__name__}: {error}"
    return Outcome(op.name, axes.name(case), time.monotonic() - started, wrong, missing)


def _compare(op: Op, case: axes.Axes) -> None:
    assert op.example is not None
    args, ulps = op.example(TorchMaker("cpu", 0), num_tokens=_TOKENS, **case), op.declaration.ulps
    with cpu("kernels"):
        right, actual = expected(op, args), run(op, args)
    assert_results(op, right, actual, max(ulps, 1) if _calls_functions(op, args) else ulps)


def _calls_functions(op: Op, args: Sequence[Any]) -> bool:
    """Whether the reference calls functions that HIP does not round correctly."""
    called = []

    class Calls(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(function in FUNCTIONS)
            return function(*args, **(kwargs or {}))

    with Calls():
        op.applied(op.reference, clones(args))()
    return any(called)
