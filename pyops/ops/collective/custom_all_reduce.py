"""All-reduce over the ranks of a node, by kernels that read peers' memory. Functions have vLLM's names."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from ..._core.errors import OpError
from ..._core.launch.kernel import Kernel
from ..._core.system.lazy import cupy, torch
from ..._core.tensors import dtypes
from ...host import ranks
from .communicator import (
    MAX_BLOCKS,
    MAX_RANKS,
    VEC_BYTES,
    Communicator,
    by_packets,
    geometry,
    naming_lost_ranks,
    read_lost,
    spread,
    two_shot,
    unroll,
)
from .shared_memory import PACKET_BYTES

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "all_reduce",
    "all_reduce_add_rms_norm",
    "dispose",
    "get_graph_buffer_ipc_meta",
    "init_custom_ar",
    "lost_ranks",
    "register_buffer",
    "register_graph_buffers",
]

_all_reduce = Kernel("collective/all_reduce.cu")
_packets = Kernel("collective/all_reduce_packets.cu")
_add_rms_norm = Kernel("collective/all_reduce_add_rms_norm.cu")
_communicators: dict[int, Communicator] = {}
_handles = count(1)
_ROW_THREADS = 512  # most threads per row of the fused norm: packets of eight ranks take 64 registers of a thread


def init_custom_ar(ipc_tensors: Sequence[int], rank_data: Tensor, rank: int, fully_connected: bool) -> int:
    """Create a communicator; returns the handle that the other functions take.

    Args:
        ipc_tensors: for each rank, the address in this process of `meta_size()` zeroed bytes of signals, followed by
            scratch memory of the size of the largest message.
        rank_data: uint8 on the device, for the addresses of registered buffers, 64 bytes per buffer.
        rank: the number of this rank.
        fully_connected: whether every pair of GPUs has a direct link; if not, more than two ranks use the two-shot
            algorithm.
    """
    world_size = len(ipc_tensors)
    if not 1 <= world_size <= MAX_RANKS or (world_size % 2 and world_size > 1 and ranks.here() is None):
        raise OpError("init_custom_ar", "ipc_tensors", f"expected 2, 4, 6 or 8 ranks, got {world_size}")
    if not 0 <= rank < world_size:
        raise OpError("init_custom_ar", "rank", f"expected 0 to {world_size - 1}, got {rank}")
    if rank_data.dtype != torch.uint8 or not rank_data.is_contiguous():
        raise OpError("init_custom_ar", "rank_data", f"expected contiguous uint8, got {rank_data.dtype}")
    keep(ipc_tensors[rank])
    handle = next(_handles)
    _communicators[handle] = Communicator(tuple(ipc_tensors), rank_data, rank, fully_connected)
    return handle


def keep(signals: int, early: bool = False) -> None:
    """On the host backend: other ranks may read the scratch memory after `signals` when this rank's kernel has ended.

    With `early`, they may also write it before this rank's kernel begins.
    """
    if (here := ranks.here()) is not None:
        here.world.keep(signals, early)


def communicator(op: str, fa: int) -> Communicator:
    if fa not in _communicators:
        raise OpError(op, "fa", f"expected a handle of init_custom_ar, got {fa}")
    return _communicators[fa]


def dispose(fa: int) -> None:
    """Destroy a communicator, and unmap the peers' graph buffers that it mapped.

    Args:
        fa: the communicator, as `init_custom_ar` returns it.
    """
    communicator("dispose", fa).close()
    del _communicators[fa]


def lost_ranks(fa: int) -> dict[int, tuple[int, int]]:
    """{rank that a kernel gave up waiting for: (block that waited, number of the barrier)}.

    A kernel gives up after 30 seconds and ends with a trap. Every later CUDA call in this process then fails; calls of
    this library raise a `RankError`. This function still works then.

    Args:
        fa: the communicator, as `init_custom_ar` returns it.
    """
    return read_lost(communicator("lost_ranks", fa).lost)


def register_buffer(fa: int, ipc_tensors: Sequence[int]) -> None:
    """Register a buffer for `all_reduce` by its addresses in this process, one per rank, in the order of ranks.

    Args:
        fa: the communicator, as `init_custom_ar` returns it.
        ipc_tensors: addresses in this process.
    """
    communicator("register_buffer", fa).register(ipc_tensors)


def get_graph_buffer_ipc_meta(fa: int) -> tuple[list[int], list[int]]:
    """For the buffers of captured calls: IPC handles of their allocations, as bytes, and the offsets in these.

    Args:
        fa: the communicator, as `init_custom_ar` returns it.
    """
    return communicator("get_graph_buffer_ipc_meta", fa).captured_handles()


def register_graph_buffers(fa: int, handles: Sequence[Sequence[int]], offsets: Sequence[Sequence[int]]) -> None:
    """Map the graph buffers of all ranks (results of `get_graph_buffer_ipc_meta`), before the first replay.

    Args:
        fa: the communicator, as `init_custom_ar` returns it.
        handles, offsets: of each rank, in the order of ranks.
    """
    communicator("register_graph_buffers", fa).register_captured(handles, offsets)


def all_reduce(fa: int, inp: Tensor, out: Tensor, reg_buffer: int, reg_buffer_sz_bytes: int) -> None:
    """``out = sum of inp over ranks``: in float32, in the order of ranks, rounded once; the same bits on every rank.

    Args:
        fa: handle of `init_custom_ar`. Every rank must call, with tensors of the same dtype and size.
        inp: float32, float16 or bfloat16; contiguous, or a dense tensor that fills its storage to the end; a multiple
            of 16 bytes.
        out: as `inp`, written; may be `inp` unless `inp` itself is a registered buffer that peers read.
        reg_buffer: address of a registered buffer, into which `inp` is copied; or 0, if `inp` is registered or the
            stream is being captured. Not used if `inp` is at most 1 MiB over all ranks: it is then sent as packets.
        reg_buffer_sz_bytes: size of that buffer.
    """
    found = communicator("all_reduce", fa)
    nbytes = _check("all_reduce", inp, out)
    num_vecs, constants = nbytes // VEC_BYTES, _constants(inp)
    if by_packets(found.world_size, nbytes):
        _check_overlap("all_reduce", inp, out, may_be_one=True)
        if num_vecs:
            tensors = {"input": inp, "out": out}
            found.launch("all_reduce", _packets, constants, *spread(num_vecs), {"num_vecs": num_vecs}, None, **tensors)
        return
    if not reg_buffer:
        _check_overlap("all_reduce", inp, out, may_be_one=False)
    two = two_shot(found.world_size, nbytes, found.fully_connected)
    peers = _staged(found, "all_reduce", inp, nbytes, reg_buffer, reg_buffer_sz_bytes)
    if not num_vecs:
        return
    part = num_vecs - (found.world_size - 1) * (num_vecs // found.world_size) if two else num_vecs
    constants |= {"TWO_SHOT": two, "SCATTER": False, "UNROLL": unroll(found.world_size)}
    found.launch("all_reduce", _all_reduce, constants, *geometry(part), {"num_vecs": num_vecs}, peers, out=out)


def all_reduce_add_rms_norm(
    fa: int, inp: Tensor, out: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> None:
    """`all_reduce` into `out`, then `fused_add_rms_norm` of `out` and `residual`, as one kernel, for short tensors.

    Args:
        fa: as in `all_reduce`.
        inp: [..., hidden_size], as in `all_reduce`; at most 1 MiB over all ranks.
        out: as `inp`, written; may be `inp`.
        residual: as `out`, read and written: it gets the sum of the all-reduce and the residual.
        weight: [hidden_size].
        epsilon: added to the mean of squares.
    """
    op = "all_reduce_add_rms_norm"
    found = communicator(op, fa)
    nbytes, hidden_size = _check(op, inp, out), inp.shape[-1]
    if found.world_size * nbytes > PACKET_BYTES // 4:
        raise OpError(op, "inp", f"expected {PACKET_BYTES // 4} bytes of all ranks, got {found.world_size * nbytes}")
    _check_overlap(op, inp, out, may_be_one=True)
    for tensor in (inp, out):
        _check(op, tensor, residual, "residual")
        _check_overlap(op, tensor, residual, "residual")
    if weight.shape != (hidden_size,) or weight.dtype != inp.dtype or weight.data_ptr() % VEC_BYTES:
        raise OpError(op, "weight", f"expected aligned {inp.dtype} [{hidden_size}], got {list(weight.shape)}")
    vec_size = VEC_BYTES // inp.itemsize
    if hidden_size % vec_size:
        raise OpError(op, "inp", f"expected a multiple of {vec_size} columns, got {hidden_size}")
    num_rows = inp.numel() // hidden_size
    if not num_rows:
        return
    num_threads = min(_ROW_THREADS, -(-hidden_size // vec_size // 64) * 64)
    fixed = {"num_rows": num_rows, "epsilon": float(epsilon)}
    tensors = {"input": inp, "out": out, "residual": residual, "weight": weight}
    constants = _constants(inp) | {"HIDDEN_SIZE": hidden_size}
    found.launch(op, _add_rms_norm, constants, min(MAX_BLOCKS, num_rows), num_threads, fixed, None, **tensors)


def _constants(inp: Tensor) -> dict[str, Any]:
    return {"scalar_t": dtypes.of(inp.dtype), "VEC_SIZE": VEC_BYTES // inp.itemsize, "PACKET_BYTES": PACKET_BYTES}


def _staged(found: Communicator, op: str, inp: Tensor, nbytes: int, reg_buffer: int, reg_buffer_sz_bytes: int) -> int:
    """The row of addresses of the buffer to reduce: `inp`, or the registered buffer to which it is copied."""
    if not reg_buffer:
        with naming_lost_ranks(op, found.lost):
            capturing = inp.is_cuda and torch.cuda.is_current_stream_capturing()
        return found.peers_of(op, inp.data_ptr(), capturing)
    if nbytes > reg_buffer_sz_bytes:
        raise OpError(op, "reg_buffer_sz_bytes", f"expected {nbytes} or more, got {reg_buffer_sz_bytes}")
    row = found.peers_of(op, reg_buffer, False)
    if inp.is_cuda:
        stream = torch.cuda.current_stream(inp.device).cuda_stream
        with naming_lost_ranks(op, found.lost):
            cupy.cuda.runtime.memcpyAsync(reg_buffer, inp.data_ptr(), nbytes, 3, stream)
    else:
        ctypes.memmove(reg_buffer, inp.data_ptr(), nbytes)
    return row


def _check(op: str, inp: Tensor, out: Tensor, name: str = "out") -> int:
    """Check `inp` and `out`; returns the bytes of `inp`."""
    if inp.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise OpError(op, "inp", f"expected float32, float16 or bfloat16, got {inp.dtype}")
    if (out.dtype, out.numel(), out.device) != (inp.dtype, inp.numel(), inp.device):
        expected = f"{inp.dtype} of {inp.numel()} elements on {inp.device}"
        raise OpError(op, name, f"expected {expected}, got {out.dtype} of {out.numel()} on {out.device}")
    nbytes = int(inp.nbytes)
    for which, tensor in (("inp", inp), (name, out)):
        if not _is_dense(tensor, nbytes):
            raise OpError(op, which, f"expected a contiguous tensor, got strides {tensor.stride()}")
        if nbytes and tensor.data_ptr() % VEC_BYTES:
            raise OpError(op, which, f"expected an address that {VEC_BYTES} divides, got {tensor.data_ptr():#x}")
    if nbytes % VEC_BYTES:
        raise OpError(op, "inp", f"expected a multiple of {VEC_BYTES} bytes, got {nbytes}")
    return nbytes


def _check_overlap(op: str, inp: Tensor, out: Tensor, name: str = "out", may_be_one: bool = False) -> None:
    distance = abs(inp.data_ptr() - out.data_ptr())
    if distance < inp.nbytes and not (may_be_one and distance == 0):
        raise OpError(op, name, "overlaps another tensor of the call")


def _is_dense(tensor: Tensor, nbytes: int) -> bool:
    """Whether the tensor is contiguous, or fills its storage densely from its first element to the end."""
    left = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
    return bool(tensor.is_contiguous() or left == nbytes)
