"""Several ranks in one process, one Python thread per rank; their collective kernels run as one launch on the host."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from typing import Any, NamedTuple, TypeVar

from .._core.errors import RankError
from .._core.launch.kernel import Launch
from .._core.launch.layout import buffer
from .ranges import Range

T = TypeVar("T")

MAX_RANKS = 8
_PRIVATE, _LASTING, _EARLY = 0x100, 0x200, 0x400  # bits of ranks.h


class Shared(NamedTuple):
    """Memory of a rank that the kernels of every rank may access.

    Attributes:
        lasting: its rank keeps it after its kernel has ended, so other ranks' kernels may still access it then.
        early: its rank no longer needs the contents when it launches a kernel, so other ranks may write at once.
    """

    memory: Any
    address: int
    nbytes: int
    rank: int
    lasting: bool = False
    early: bool = False

    def holds(self, address: int, nbytes: int = 1) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes


class Call(NamedTuple):
    """One rank's part of a collective launch: its `Launch`, and the rank's own tensors that the kernel may access."""

    launch: Launch
    tensors: Sequence[Range]


class Ranks:
    """A world of ranks. `run` calls a function as each of them, in a thread each; `here` finds rank and world.

    Args:
        world_size: 1 to 8.
        seconds: how long a rank waits for others before the wait is an error that names them.

    Examples:
        >>> def tokens(rank):
        ...     parallel = pyops.ExpertParallel(None, "cpu", num_experts=8, max_tokens=16, hidden_size=64, top_k=2)
        ...     return [*parallel.experts]
        >>> ranks(2).run(tokens)
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    def __init__(self, world_size: int, seconds: float = 60.0) -> None:
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size: expected 1 to {MAX_RANKS}, got {world_size}")
        self.world_size, self.seconds = world_size, seconds
        self.shared: list[Shared] = []
        self._met = threading.Condition()
        self._meetings: dict[int, dict[int, tuple[str, Any]]] = {}
        self._results: dict[int, tuple[Any, BaseException | None]] = {}
        self._count = [0] * world_size
        self._at: list[str] = ["is at its beginning"] * world_size
        self._ended: set[int] = set()

    def run(self, function: Callable[[int], T]) -> list[T]:
        """``function(rank)`` of every rank, once. Raises what the first rank to fail raised."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            _here.set(Here(self, rank))
            try:
                results[rank] = function(rank)
                self._end(rank, "has returned")
            except BaseException as error:
                errors.append(error)
                self._end(rank, f"has ended with {type(error).__name__}: {error}")

        threads = [
            threading.Thread(target=copy_context().run, args=(body, rank), name=f"rank {rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.world_size)]

    def meet(self, rank: int, what: str, item: Any, act: Callable[[list[Any]], T]) -> T:
        """The result of `act` on the items of all ranks, in the order of ranks. The last rank to arrive calls `act`.

        Raises:
            RankError: a rank has ended, does not arrive in time, or arrived at another call. It names the rank.
        """
        with self._met:
            number = self._count[rank]
            self._count[rank] += 1
            self._at[rank] = f"waits in {what}"
            meeting = self._meetings.setdefault(number, {})
            meeting[rank] = what, item
            if len(meeting) == self.world_size:
                self._results[number] = _acted(meeting, act)
                self._met.notify_all()
            end = time.monotonic() + self.seconds
            while number not in self._results:
                absent = [other for other in range(self.world_size) if other not in meeting]
                ended = [other for other in absent if other in self._ended]
                left = end - time.monotonic()
                if ended or left <= 0:
                    raise self._error(what, sorted(meeting), ended or absent, "" if ended else self._limit())
                self._met.wait(left)
            self._at[rank] = f"has left {what}"
            result, error = self._results[number]
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def _limit(self) -> str:
        return f" after {self.seconds:g} s"

    def _error(self, what: str, waiting: Sequence[int], awaited: Sequence[int], limit: str) -> RankError:
        states = "; ".join(f"rank {rank} {self._at[rank]}" for rank in awaited)
        return RankError(f"{what}: {_named(waiting)} for {_numbers(awaited)}{limit}: {states}", awaited)

    def _end(self, rank: int, how: str) -> None:
        with self._met:
            self._ended.add(rank)
            self._at[rank] = how
            self._met.notify_all()

    def allocate(self, rank: int, nbytes: int, lasting: bool) -> Shared:
        """Zeroed memory of `rank` that all ranks may access, aligned to 256 bytes."""
        memory = (ctypes.c_char * (nbytes + 256))()
        made = Shared(memory, -(-ctypes.addressof(memory) // 256) * 256, nbytes, rank, lasting)
        with self._met:
            self.shared.append(made)
        return made

    def keep(self, address: int, early: bool = False) -> None:
        """Make the memory at an address `lasting`, and `early` or not."""
        with self._met:
            kept = {"lasting": True, "early": early}
            self.shared = [one._replace(**kept) if one.holds(address) else one for one in self.shared]

    def free(self, address: int) -> None:
        """Forget the memory that begins at `address`."""
        with self._met:
            self.shared = [one for one in self.shared if one.address != address]

    def launch(self, rank: int, call: Call) -> None:
        """Run the kernel that every rank brings, as one launch. Raises KernelFault, in every rank."""
        what = call.launch.specialisation.kernel.file
        self.meet(rank, what, call, lambda calls: self._launch(calls))

    def _launch(self, calls: list[Call]) -> None:
        from . import run  # here, because a compiler's driver is no part of `import pyops`

        first = calls[0].launch
        geometry = first.grid, first.block, first.shared, first.specialisation.text
        for rank, call in enumerate(calls):
            launch = call.launch
            if (launch.grid, launch.block, launch.shared, launch.specialisation.text) != geometry:
                raise RankError(f"rank {rank} launches another kernel or grid than rank 0", (rank,))
        buffers = [buffer(call.launch, tuple(one.name for one in call.tensors), (), {}) for call in calls]
        for one_buffer, call in zip(buffers, calls, strict=True):
            one_buffer.pack(one_buffer.memory, 0, *[one.address for one in call.tensors])
        ranges = [Range(f"memory of rank {one.rank}", one.address, one.nbytes) for one in self.shared]
        owners = [one.rank | _LASTING * one.lasting | _EARLY * one.early for one in self.shared]
        for rank, call in enumerate(calls):
            ranges += [one._replace(name=f"{one.name} of rank {rank}") for one in call.tensors]
            owners += [rank | _PRIVATE] * len(call.tensors)
        function = run.load(first.specialisation)
        parameters = [one.parameters for one in buffers]
        function.launch(first.grid, first.block, first.shared, parameters, ranges, owners=owners)


class Here(NamedTuple):
    """The world and the rank of the running thread."""

    world: Ranks
    rank: int


_here: ContextVar[Here | None] = ContextVar("rank", default=None)


def here() -> Here | None:
    """The world and the rank of this thread; None outside of `Ranks.run`."""
    return _here.get()


def _acted(meeting: dict[int, tuple[str, Any]], act: Callable[[list[Any]], T]) -> tuple[T | None, BaseException | None]:
    first, _ = meeting[0]
    for rank in range(1, len(meeting)):
        if (other := meeting[rank][0]) != first:
            return None, RankError(f"rank 0 is in {first}, rank {rank} in {other}", (rank,))
    try:
        return act([meeting[rank][1] for rank in range(len(meeting))]), None
    except Exception as error:
        return None, error


def _numbers(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _named(ranks: Sequence[int]) -> str:
    return f"{_numbers(ranks)} wait{'s' * (len(ranks) == 1)}"
