"""Communicator: a rank's view of the other ranks, and its launches. A handle of `init_custom_ar` refers to one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..._core.errors import OpError, RankError
from ..._core.launch.kernel import Kernel, Specialisation
from ..._core.launch.launch import Bound, bind
from ..._core.system import driver
from ..._core.system.lazy import torch
from ...host import ranks
from ...host.ranges import Range
from .shared_memory import HANDLE_BYTES, PACKET_BYTES, SIGNAL_BYTES, allocation, close_mem_handle, open_mem_handle

if TYPE_CHECKING:
    from torch import Tensor

MAX_RANKS = ranks.MAX_RANKS
ROW_BYTES = 8 * MAX_RANKS  # of the table of registered buffers: an address for each rank
MAX_BLOCKS = 36  # as rank_barrier.cuh; enough to fill NVLink, and few enough that all blocks of a launch run together
VEC_BYTES = 16
_NUM_THREADS, _WARPS = 512, 64  # most threads of a block, and the number that divides them
# {ranks: bytes from which the two-shot all-reduce is faster than the one-shot}: vLLM's thresholds, not measured here.
_TWO_SHOT_BYTES = {4: 512 * 1024, 6: 256 * 1024, 8: 256 * 1024}
_SWITCH = "VLLM_CUSTOM_ALLREDUCE_ALGO"
_SHOTS = {"1stage": False, "oneshot": False, "2stage": True, "twoshot": True}  # {value of the switch: two-shot}


def by_packets(world_size: int, nbytes: int) -> bool:
    """Whether ranks send a message as packets (data with flags), unless the switch names another algorithm.

    Packets double the bytes: 1 to 4 us of a link for 1 MiB over all ranks. Barriers would cost 3 us more.
    """
    return world_size * nbytes <= PACKET_BYTES // 4 and not os.environ.get(_SWITCH)


def two_shot(world_size: int, nbytes: int, fully_connected: bool) -> bool:
    """Whether to use the two-shot algorithm: reduce-scatter, then all-gather. OpError for an invalid switch value."""
    if name := os.environ.get(_SWITCH):
        if name not in _SHOTS:
            raise OpError("all_reduce", _SWITCH, f"expected {', '.join(_SHOTS)}, got {name}")
        return _SHOTS[name]
    if world_size == 2:
        return False
    return not fully_connected or nbytes >= _TWO_SHOT_BYTES.get(world_size, 256 * 1024)


def unroll(world_size: int) -> int:
    """Vectors that a thread loads from every rank at a time: 32 registers in all, but at least one vector per rank."""
    return max(1, 8 // world_size)


def geometry(num_vecs: int) -> tuple[int, int]:
    """(blocks, threads of a block) for `num_vecs` vectors."""
    num_threads = min(_NUM_THREADS, -(-num_vecs // _WARPS) * _WARPS)
    return max(1, min(MAX_BLOCKS, -(-num_vecs // num_threads))), num_threads


def spread(num_vecs: int) -> tuple[int, int]:
    """As `geometry`, but with as many blocks as possible, because each block stores its vectors to every rank."""
    num_threads = min(_NUM_THREADS, -(-num_vecs // (MAX_BLOCKS * _WARPS)) * _WARPS)
    return min(MAX_BLOCKS, -(-num_vecs // num_threads)), num_threads


@dataclass(eq=False)
class Communicator:
    """One rank of up to eight of a node.

    Attributes:
        signals: address of each rank's signals, as mapped in this process.
        table: uint8 memory on the device for rows of addresses: one row for `signals`, one for each registered buffer.
        rows: {address of a registered buffer of this rank: address of its row}.
        captured: buffers of calls captured into a graph, not yet registered with the other ranks, and their rows.
        lost: see `lost_record`.
    """

    signals: Sequence[int]
    table: Tensor
    rank: int
    fully_connected: bool
    rows: dict[int, int] = field(default_factory=dict)
    captured: list[tuple[int, int]] = field(default_factory=list)
    opened: dict[bytes, int] = field(default_factory=dict)
    _used: int = 0
    bound: dict[Any, Bound] = field(default_factory=dict)
    lost: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.lost = lost_record(self.table.device)
        self._write(self._row("init_custom_ar"), self.signals)

    @property
    def world_size(self) -> int:
        return len(self.signals)

    def _row(self, op: str) -> int:
        """Allocates a row of the table; returns its offset."""
        if self._used + ROW_BYTES > self.table.numel():
            raise OpError(op, "fa", f"rank_data of {self.table.numel()} bytes has no row left")
        self._used += ROW_BYTES
        return self._used - ROW_BYTES

    def _write(self, offset: int, addresses: Sequence[int]) -> None:
        row = torch.tensor([*addresses, *[0] * (MAX_RANKS - len(addresses))], dtype=torch.int64, device="cpu")
        self.table[offset : offset + ROW_BYTES].copy_(row.view(torch.uint8))

    def register(self, addresses: Sequence[int]) -> None:
        """Register a buffer by its address on each rank."""
        if len(addresses) != self.world_size:
            expected = f"expected an address for each of {self.world_size} ranks, got {len(addresses)}"
            raise OpError("register_buffer", "ipc_tensors", expected)
        offset = self._row("register_buffer")
        self._write(offset, addresses)
        self.rows[addresses[self.rank]] = self.table.data_ptr() + offset

    def peers_of(self, op: str, address: int, is_capturing: bool) -> int:
        """The address of a buffer's row. In a capture, a new row that `register_captured` fills before the replay."""
        if (row := self.rows.get(address)) is not None:
            return row
        if not is_capturing:
            raise OpError(op, "inp", f"{address:#x} is not registered, and reg_buffer is 0")
        offset = self._row(op)
        self.captured.append((address, offset))
        return int(self.table.data_ptr()) + offset

    def captured_handles(self) -> tuple[list[int], list[int]]:
        """Concatenated handles of the allocations of captured buffers, and each buffer's offset in its allocation."""
        found = [allocation(address) for address, _ in self.captured]
        return list(b"".join(handle for handle, _ in found)), [offset for _, offset in found]

    def register_captured(self, handles: Sequence[Sequence[int]], offsets: Sequence[Sequence[int]]) -> None:
        """Map captured buffers of all ranks: `captured_handles` of each rank, in the order of ranks."""
        count = len(self.captured)
        for name, values, size in (("handles", handles, HANDLE_BYTES * count), ("offsets", offsets, count)):
            if len(values) != self.world_size or any(len(value) != size for value in values):
                expected = f"expected {size} values of each of {self.world_size} ranks, got {[len(v) for v in values]}"
                raise OpError("register_graph_buffers", name, expected)
        for i, (address, row) in enumerate(self.captured):
            addresses = []
            for rank in range(self.world_size):
                handle = bytes(handles[rank][HANDLE_BYTES * i : HANDLE_BYTES * (i + 1)])
                own = rank == self.rank
                addresses.append(address if own else self._open(handle) + offsets[rank][i])
            self._write(row, addresses)
        self.captured.clear()

    def _open(self, handle: bytes) -> int:
        if handle not in self.opened:
            self.opened[handle] = open_mem_handle(torch.tensor([*handle], dtype=torch.uint8, device="cpu"))
        return self.opened[handle]

    def close(self) -> None:
        for address in self.opened.values():
            close_mem_handle(address)
        self.opened.clear()

    def launch(
        self,
        op: str,
        kernel: Kernel,
        constants: dict[str, Any],
        grid: int,
        num_threads: int,
        fixed: dict[str, Any],
        peers: int | None,
        **tensors: Tensor,
    ) -> None:
        """Launch a kernel on the current stream: with the ranks' signals, a row of addresses if any, and `tensors`.

        On the host, all ranks launch together.
        """
        constants = {
            "WORLD_SIZE": self.world_size,
            "SIGNAL_BYTES": SIGNAL_BYTES,
            "NUM_THREADS": num_threads,
        } | constants
        fixed = fixed | {"rank": self.rank, "own_signals": self.signals[self.rank]}
        tables = {"signals": int(self.table.data_ptr())} | ({} if peers is None else {"peers": peers})
        launch_as_rank(op, kernel(**constants), grid, num_threads, fixed, tables, tensors, self.lost, self.bound)


def launch_as_rank(
    op: str,
    specialisation: Specialisation,
    grid: int,
    num_threads: int,
    fixed: dict[str, Any],
    tables: dict[str, int],
    tensors: dict[str, Tensor],
    lost: Tensor,
    bound: dict[Any, Bound],
) -> None:
    """Launch a kernel on the current stream, or on the host together with those of the other ranks.

    `tables` are addresses of rows of addresses; `bound` caches the bound launch for calls with the same arguments.

    Raises:
        RankError: the device has failed because an earlier kernel gave up waiting for a rank; `lost` names it.
    """
    tables = tables | {"lost": lost.data_ptr()}
    names = (*tables, *tensors)
    words = (*tables.values(), *(tensor.data_ptr() for tensor in tensors.values()))
    device = next(iter(tensors.values())).device
    if device.type == "cpu":
        here = ranks.here()
        if here is None:
            raise OpError(op, "inp", "expected tensors on a GPU, or ranks of pyops.testing.ranks, got the CPU")
        found = [Range(name, address, ROW_BYTES) for name, address in tables.items()]
        found += [Range(name, one.data_ptr(), nbytes_of(one)) for name, one in tensors.items()]
        launch = specialisation.launch(grid=grid, block=num_threads, **fixed)
        here.world.launch(here.rank, ranks.Call(launch, found))
        return
    key = specialisation.kernel.file, specialisation.key, grid, num_threads, names, tuple(fixed.items()), device.index
    if key not in bound:
        launch = specialisation.launch(grid=grid, block=num_threads, **fixed)
        with driver.outside_capture(op, f"load {specialisation.kernel.file}"):
            functions = [specialisation.load(device.index).function]
        bound[key] = bind(op, device.index, [launch], functions, names, (), {})
    with naming_lost_ranks(op, lost):
        if status := bound[key].launch(torch.cuda.current_stream(device).cuda_stream, *words):
            raise RuntimeError(f"{op}: the driver's status is {status}")


def lost_record(device: Any) -> Tensor:
    """Memory of the host in which kernels on `device` say which ranks they give up waiting for.

    int32 [MAX_RANKS, 2], `LostRank` of rank_barrier.cuh: of each rank, 1 + the block that has waited, and the number of
    the meeting; 0 of a rank that was not given up. It can be read when the device has failed.
    """
    return torch.zeros(MAX_RANKS, 2, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")


def read_lost(lost: Tensor) -> dict[int, tuple[int, int]]:
    """{rank that a kernel gave up waiting for: (block that waited, number of the barrier)}."""
    return {rank: (block - 1, meeting) for rank, (block, meeting) in enumerate(lost.tolist()) if block}


@contextlib.contextmanager
def naming_lost_ranks(op: str, lost: Tensor) -> Iterator[None]:
    """Within the context, a device error caused by a kernel that gave up waiting becomes a RankError naming the
    ranks."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankError) or not (found := read_lost(lost)):
            raise
        waits = (f"rank {rank} (block {block}, meeting {meeting})" for rank, (block, meeting) in found.items())
        raise RankError(f"{op}: a kernel has given up waiting for {', '.join(waits)}", tuple(found)) from error


def nbytes_of(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.itemsize)
