"""Kernels on the CPU: a C++ compiler compiles the text that NVRTC takes, against `kernels_cu/host`, and we run it.

A text becomes a shared object that is linked to a runtime of its own library. Both are cached by the digest of all that
goes into them. A launch is deterministic: its schedule says which thread runs when.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .._core import locks, log
from .._core.launch.kernel import Specialisation
from .._core.system import device
from .._core.text import source
from .._core.text.compiler import Compiled, told
from .build import Unit, build, unit
from .faults import KernelFault, called
from .interruptible import interruptible
from .lines import places
from .ranges import Range

ORDERS = ("fifo", "reversed", "greedy", "shuffled")


@dataclass(frozen=True)
class Schedule:
    """Which thread runs when: one order out of all that a device may choose.

    Attributes:
        order: ``"fifo"``; ``"reversed"``, from the last block and thread to the first; ``"greedy"``, one warp as far as
            it gets before the next; ``"shuffled"``, any thread that can run, by `seed`.

    Examples:
        >>> x = torch.randn(3, 100)
        >>> assert_matches_reference(pyops.relu2, torch.empty_like(x), x, schedules=[Schedule("shuffled", seed=7)])
    """

    order: str = "fifo"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f'order: expected one of {", ".join(ORDERS)}, got "{self.order}"')


# A result that does not depend on timing is the same under each of them.
SCHEDULES = (
    Schedule(),
    Schedule("reversed"),
    Schedule("greedy"),
    Schedule("shuffled", 1),
    Schedule("shuffled", 2),
)


@dataclass(frozen=True)
class Conditions:
    """How launches run: by which schedule, how long at most, in warps of how many lanes (32 or 64).

    With `strict_fences`, a fence_proxy_async() makes only the writes of the calling thread visible to TMA and wgmma.
    """

    schedule: Schedule = Schedule()
    seconds: float = 60.0
    warp_size: int = 32
    strict_fences: bool = False


_USUAL = Conditions()
_conditions: ContextVar[Conditions] = ContextVar("conditions", default=_USUAL)


@contextmanager
def scheduled(
    schedule: Schedule, *, seconds: float = 60.0, warp_size: int = 32, strict_fences: bool = False
) -> Iterator[None]:
    """Launches of this thread run by `schedule`, end after `seconds`, and have warps of `warp_size` lanes.

    TMA and wgmma read writes to shared memory only after a fence_proxy_async(). With `strict_fences`, each writing
    thread must call it itself. Otherwise any thread that has seen the writes may call it.

    Examples:
        >>> x = torch.randn(3, 100)
        >>> with cpu("kernels"), scheduled(Schedule("reversed"), seconds=10.0, warp_size=64):
        ...     pyops.relu2(torch.empty_like(x), x)
    """
    token = _conditions.set(Conditions(schedule, seconds, warp_size, strict_fences))
    try:
        yield
    finally:
        _conditions.reset(token)


def warp_size() -> int:
    """Lanes of a warp in this thread's launches."""
    return _conditions.get().warp_size


class _Index(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32))

    def __iter__(self) -> Iterator[int]:
        return iter((self.x, self.y, self.z))


class _Launch(ctypes.Structure):  # state.h
    _fields_ = (
        ("grid", _Index),
        ("block", _Index),
        ("shared_bytes", ctypes.c_uint32),
        ("warp_size", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("time_limit_ms", ctypes.c_uint32),
        ("strict_fences", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("ranges", ctypes.POINTER(ctypes.c_uint64)),
        ("num_ranges", ctypes.c_uint32),
        ("num_ranks", ctypes.c_uint32),
        ("rank_parameters", ctypes.POINTER(ctypes.c_uint64)),
        ("owners", ctypes.POINTER(ctypes.c_uint32)),
    )


class _Fault(ctypes.Structure):  # state.h
    _fields_ = (
        ("kind", ctypes.c_char * 64),
        ("message", ctypes.c_char * 2048),
        ("file", ctypes.c_char * 256),
        ("line", ctypes.c_int32),
        ("has_thread", ctypes.c_int32),
        ("block", _Index),
        ("thread", _Index),
        ("pc", ctypes.c_uint64),
        ("asked_pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("waiting_pcs", ctypes.c_uint64 * 8),
        ("caller_pcs", ctypes.c_uint64 * 8),
    )


@dataclass(frozen=True)
class HostFunction(Compiled):
    """A kernel for the CPU that is loaded into this process."""

    library: str
    lines: Callable[[], str] = field(repr=False)  # gives the path of the same library with lines of the source
    warp_size: int
    cluster: int  # blocks
    run: Any = field(repr=False)

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        parameters: int | Sequence[int],
        ranges: Sequence[Range],
        cluster: tuple[int, int, int] = (1, 1, 1),
        owners: Sequence[int] = (),
    ) -> None:
        """Run every block, by the schedule of the `scheduled` around the call, and return when all have run.

        `parameters` is the address of an array with a pointer to each parameter; `ranges` is all the memory that the
        kernel may access. Raises KernelFault.

        With an array for each of several ranks, the blocks of all ranks run together; `owners` gives the rank of each
        range (`ranks.py`).
        """
        if cluster[0] * cluster[2] != 1:
            raise ValueError(f"{self.kernel}: clusters of blocks run on the CPU along y only, got {cluster}")
        conditions = _conditions.get()
        of_ranks = () if isinstance(parameters, int) else parameters
        bounds = [bound for one in ranges for bound in (one.address, one.end)]
        launch = _Launch(
            _Index(*grid),
            _Index(*block),
            shared,
            self.warp_size,
            len(of_ranks) or max(self.cluster, cluster[1]),
            ORDERS.index(conditions.schedule.order),
            max(1, int(conditions.seconds * 1e3)),
            conditions.strict_fences,
            conditions.schedule.seed,
            (ctypes.c_uint64 * len(bounds))(*bounds),
            len(ranges),
            len(of_ranks),
            (ctypes.c_uint64 * len(of_ranks))(*of_ranks),
            (ctypes.c_uint32 * len(owners))(*owners),
        )
        first = of_ranks[0] if of_ranks else parameters
        with _one_launch:
            raised = interruptible(lambda: self.run(self.function, first, ctypes.byref(launch)))
            fault = _Fault.from_buffer_copy(raised.contents) if raised else None
        if fault is not None:
            raise self._error(fault, ranges)

    def _error(self, fault: _Fault, ranges: Sequence[Range]) -> KernelFault:
        library = self.lines()
        lines = _places(library, fault.pc)
        told = (fault.file.decode(), fault.line)
        if fault.line and told not in lines:
            lines = [told, *lines]
        lines = lines or _places(library, fault.asked_pc)  # the last known line, if the current address has none
        lines += [line for offset in fault.caller_pcs for line in _places(library, offset)]
        message = fault.message.decode(errors="replace")
        if fault.address:
            message += _beside(fault.address, ranges)
        for number, offset in enumerate(fault.waiting_pcs):
            if offset:
                message = message.replace(f"@{number}@", called(_places(library, offset)) or "an unknown line")
        if others := _places(library, fault.other_pc):
            message += f", at {called(others)}"
        thread: Any = tuple(fault.thread) if fault.has_thread else None
        block: Any = tuple(fault.block)
        return KernelFault(fault.kind.decode(), self.kernel, self.constants, message, lines, block, thread)


def _beside(address: int, ranges: Sequence[Range]) -> str:
    """The position of an address relative to the closest tensor or workspace; "" if none is close."""

    def distance(one: Range) -> int:
        return max(one.address - address, address - one.end)

    closest = min(ranges, key=distance, default=None)
    if closest is None or distance(closest) > _CLOSE:
        return ""
    if address < closest.address:
        return f", {distance(closest)} bytes before {closest.name}"
    if address < closest.end:
        return f", across the end of {closest.name}"
    return f", {distance(closest)} bytes past the end of {closest.name}"


def _places(library: str, offset: int) -> list[tuple[str, int]]:
    """Where in the kernels an instruction comes from. The emulation's own lines are left out."""
    # The address is that after the instruction.
    found = places(library, offset - 1) if offset else []
    return [(match[0], line) for file, line in found if (match := re.search(r"kernels_cu/(?!host/).+", file))]


_ASYNCHRONOUS = '"kernels_cu/include/barrier.cuh"'  # in the text of kernels for a clocked runtime
_CLOSE = 1 << 40  # bytes; an address farther away is not a wrong offset into a tensor
_one_launch = locks.waiting()  # the runtime runs one at a time, and a child needs it at rest
_loaded: dict[tuple[str, int], HostFunction] = {}
_locks: dict[tuple[str, int], threading.Lock] = {}


def loaded(specialisation: Specialisation) -> bool:
    """Whether the kernel is loaded, for warps as this thread's launches have them."""
    return (_text(specialisation), warp_size()) in _loaded


def load(specialisation: Specialisation) -> HostFunction:
    """The kernel compiled for the CPU, at most once per process.

    Raises CompileError, and MissingDependencyError where there is no compiler.
    """
    key = (_text(specialisation), warp_size())
    found = _loaded.get(key)
    if found is None:
        with specialisation.needing_files(), _locks.setdefault(key, locks.new()):
            found = _loaded.get(key) or _loaded.setdefault(key, _load(specialisation, *key))
    return found


def _text(specialisation: Specialisation) -> str:
    """The text; where the host stands for a GPU before sm_80, platform.cuh is told so."""
    is_turing = device.host(warp_size()).arch.startswith("sm_7")
    return "#define PYOPS_TURING 1\n" * is_turing + specialisation.text


def _load(specialisation: Specialisation, text: str, warp_size: int) -> HostFunction:
    kernel, constants = specialisation.kernel.file, str(specialisation)
    entry, clocked = specialisation.kernel.signature.entry, _ASYNCHRONOUS in text
    run = _runtime(clocked)
    started = time.perf_counter()
    code, libraries = unit(text, entry, warp_size), (_runtime_path(clocked),)
    path, origin = build("kernel", code, libraries, kernel, constants)
    library = ctypes.CDLL(path)
    address = ctypes.cast(library.pyops_host_entry, ctypes.c_void_p).value
    assert address is not None

    def lines() -> str:
        return build("lines", unit(text, entry, warp_size), (_runtime_path(clocked),), kernel, constants)[0]

    loaded = HostFunction(
        kernel,
        constants,
        -1,
        "host",
        (time.perf_counter() - started) * 1e3,
        origin,
        registers=0,
        shared_bytes=0,
        local_bytes=0,
        function=address,
        keep_alive=library,
        library=path,
        lines=lines,
        warp_size=warp_size,
        cluster=library.pyops_host_cluster(),
        run=run,
    )
    if origin == "disk":  # what has been compiled was logged then
        log.ready(kernel, constants, "host", told(loaded))
    return loaded


@cache
def _runtime(clocked: bool) -> Any:
    """The one function of the library that runs kernels.

    One that is `clocked` runs kernels with mbarriers, TMA and wgmma, and takes longer for every access.
    """
    run = ctypes.CDLL(_runtime_path(clocked)).pyops_host_run
    run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    run.restype = ctypes.POINTER(_Fault)
    return run


def _runtime_path(clocked: bool) -> str:
    """The path of that library, for linking kernels to it. It is compiled again if its folder has been deleted."""
    return build("runtime", _runtime_code(clocked), (), "host/runtime.cpp", "")[0]


@cache
def _runtime_code(clocked: bool) -> Unit:
    return Unit(f"#define PYOPS_HOST_CLOCKED {int(clocked)}\n", source.inline("host/runtime.cpp"))
