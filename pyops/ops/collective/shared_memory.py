"""Memory of one rank that the others map: on a GPU by IPC handles, on the host among the ranks of a process."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

from ..._core.errors import OpError
from ..._core.system import driver
from ..._core.system.lazy import cupy, driver_library, torch
from ...host import ranks

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["allocate_shared_buffer_and_handle", "free_shared_buffer", "meta_size", "open_mem_handle"]

HANDLE_BYTES = 64  # bytes of a cudaIpcMemHandle_t
SIGNAL_BYTES = 1536  # sizeof(Signals), rounded up
PACKET_BYTES = 4 << 20  # bytes of packets of two messages, between the signals and the scratch memory
_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


def meta_size() -> int:
    """Bytes of the signals and packets of a rank, which precede its scratch memory."""
    return SIGNAL_BYTES + PACKET_BYTES


def allocate_shared_buffer_and_handle(size: int) -> tuple[int, Tensor]:
    """Zeroed memory of the current device that other ranks can map, and its handle.

    Args:
        size: bytes, 1 or more.

    Returns:
        The address, and a uint8 tensor [64] on the CPU for `open_mem_handle` in another process. `free_shared_buffer`
        frees the memory; nothing else does. Within `pyops.testing.ranks`, memory of the host.
    """
    if size < 1:
        raise OpError("allocate_shared_buffer_and_handle", "size", f"expected 1 or more bytes, got {size}")
    if (here := ranks.here()) is not None:
        address = here.world.allocate(here.rank, size, lasting=False).address
        handle = address.to_bytes(8, "little").ljust(HANDLE_BYTES, b"\0")
    else:
        with driver.outside_capture("allocate_shared_buffer_and_handle", f"allocate {size} bytes"):
            address = cupy.cuda.runtime.malloc(size)
            driver.clear(address, size)
            handle = cupy.cuda.runtime.ipcGetMemHandle(address)
    return address, torch.tensor([*handle], dtype=torch.uint8, device="cpu")


def open_mem_handle(mem_handle: Tensor) -> int:
    """Map another process's memory by its handle; returns the address in this process.

    Args:
        mem_handle: uint8 [64] on the CPU.
    """
    if mem_handle.device.type != "cpu" or mem_handle.dtype != torch.uint8 or mem_handle.numel() != HANDLE_BYTES:
        got = f"{mem_handle.dtype} {list(mem_handle.shape)} on {mem_handle.device}"
        raise OpError("open_mem_handle", "mem_handle", f"expected uint8 [{HANDLE_BYTES}] on the CPU, got {got}")
    handle = bytes(mem_handle.reshape(-1).tolist())
    if ranks.here() is not None:
        return int.from_bytes(handle[:8], "little")
    return int(cupy.cuda.runtime.ipcOpenMemHandle(handle, _PEER_ACCESS))


def close_mem_handle(address: int) -> None:
    """Unmap memory that `open_mem_handle` mapped."""
    if ranks.here() is None:
        cupy.cuda.runtime.ipcCloseMemHandle(address)


def free_shared_buffer(ptr: int) -> None:
    """Free memory of `allocate_shared_buffer_and_handle`. No rank may use it afterwards.

    Args:
        ptr: the address that `allocate_shared_buffer_and_handle` has returned.
    """
    if (here := ranks.here()) is not None:
        here.world.free(ptr)
    else:
        cupy.cuda.runtime.free(ptr)


class GroupMemory:
    """Zeroed memory of every process of a group, mapped in all of them. On the host, memory of every rank.

    Attributes:
        addresses: the address of each rank's memory in this process.
        rank: the rank of this process.
    """

    def __init__(self, group: Any, size: int) -> None:
        self.group, self._size = group, size
        self._own, handle = allocate_shared_buffer_and_handle(size)
        handles = exchanged(handle.tolist(), group)
        here = ranks.here()
        self.rank = torch.distributed.get_rank(group) if here is None else here.rank
        self.addresses = [
            self._own if rank == self.rank else open_mem_handle(torch.tensor(one, dtype=torch.uint8, device="cpu"))
            for rank, one in enumerate(handles)
        ]

    def own(self, device: Any) -> Tensor:
        """A uint8 tensor on the memory of this rank."""
        if device.type == "cpu":
            return torch.frombuffer((ctypes.c_char * self._size).from_address(self._own), dtype=torch.uint8)
        return torch.as_tensor(_Bytes(self._own, self._size), device=device)

    def close(self) -> None:
        """Free the memory. Every process must call it, after the last use by any process."""
        for rank, address in enumerate(self.addresses):
            if rank != self.rank:
                close_mem_handle(address)
        exchanged(None, self.group)  # all processes have unmapped it
        free_shared_buffer(self._own)


class _Bytes:
    def __init__(self, address: int, size: int) -> None:
        fields = {"shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = fields


def exchanged(mine: Any, group: Any) -> list[Any]:
    """All-gather of Python objects over a group, or over the ranks on the host, in the order of ranks."""
    if (here := ranks.here()) is not None:
        return here.world.meet(here.rank, "exchange", mine, list)
    every: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(every, mine, group=group)
    return every


def allocation(address: int) -> tuple[bytes, int]:
    """The handle of the allocation that an address lies in, and the bytes from its start to the address."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    status = _address_range()(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if status:
        raise OpError("get_graph_buffer_ipc_meta", "fa", f"{address:#x} is no device memory (status {status})")
    return cupy.cuda.runtime.ipcGetMemHandle(base.value), address - base.value


@cache
def _address_range() -> Any:
    is_hip = cupy.cuda.runtime.is_hip
    return getattr(driver_library(is_hip), "hipMemGetAddressRange" if is_hip else "cuMemGetAddressRange_v2")
