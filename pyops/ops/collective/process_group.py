"""The custom all-reduce among the processes of a `torch.distributed` group."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..._core.system.lazy import torch
from . import custom_all_reduce as custom
from .communicator import VEC_BYTES, by_packets, naming_lost_ranks
from .shared_memory import GroupMemory, exchanged, meta_size

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CustomAllReduce"]

_TABLE_BYTES = 64 * 1024  # bytes of the table of registered buffers, 64 per buffer
_MAX_SIZE = 8 << 20  # bytes of a message; for larger ones NCCL's ring is as fast (docs/many_gpus.md)


class CustomAllReduce:
    """All-reduce by kernels that read the memory of the other processes. `close` frees the shared memory.

    Args:
        group: a `ProcessGroup` that can exchange objects between CPUs, such as one with gloo: 2, 4, 6 or 8 processes of
            one node.
        device: the GPU of this process; all GPUs need peer access to each other (`reach_each_other`), or are the same.
        max_size: bytes of the largest message.
    """

    def __init__(self, group: Any, device: Any, max_size: int = _MAX_SIZE) -> None:
        self.group, self.device, self.max_size = group, torch.device(device), max_size
        with torch.cuda.device(self.device):
            self._signals, self._buffers = (GroupMemory(group, size) for size in (meta_size() + max_size, max_size))
            table = torch.zeros(_TABLE_BYTES, dtype=torch.uint8, device=self.device)
            rank, buffers = self._buffers.rank, self._buffers.addresses
            self.world_size, self.buffer = len(buffers), buffers[rank]
            self.fa = custom.init_custom_ar(self._signals.addresses, table, rank, True)
            custom.register_buffer(self.fa, buffers)

    def serves(self, x: Tensor) -> bool:
        """Whether `x` is of a size and layout that the kernels take."""
        return bool(x.nbytes <= self.max_size and x.nbytes % VEC_BYTES == 0 and x.is_contiguous())

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over the processes, a new tensor."""
        with self.naming("all_reduce"):
            out = torch.empty_like(x)
            custom.all_reduce(self.fa, x, out, self.buffer, self.max_size)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> bool:
        """`all_reduce_add_rms_norm` into `x` if `x` is small enough for packets; returns whether it was done."""
        if (
            not by_packets(self.world_size, x.nbytes)
            or x.shape[-1] * x.itemsize % VEC_BYTES
            or not residual.is_contiguous()
        ):
            return False
        with self.naming("all_reduce_add_rms_norm"):
            custom.all_reduce_add_rms_norm(self.fa, x, x, residual, weight, epsilon)
        return True

    def naming(self, what: str) -> AbstractContextManager[None]:
        """Within the context, a device error caused by ranks that did not arrive becomes a `RankError` naming them."""
        return naming_lost_ranks(what, custom.communicator(what, self.fa).lost)

    def close(self) -> None:
        """Free the memory. Every process must call it, after all kernels have ended."""
        torch.cuda.synchronize(self.device)
        torch.distributed.barrier(group=self.group)
        custom.dispose(self.fa)
        self._signals.close()
        self._buffers.close()


def reach_each_other(group: Any, device: Any) -> bool:
    """Whether the processes are on one node, and each GPU can access the memory of every other."""
    index = torch.device(device).index or 0
    found = exchanged((socket.gethostname(), index), group)
    ours = all(host == found[0][0] for host, _ in found) and len(found) in (2, 4, 6, 8)
    ours = ours and all(i == index or torch.cuda.can_device_access_peer(index, i) for _, i in found)
    return all(exchanged(ours, group))
