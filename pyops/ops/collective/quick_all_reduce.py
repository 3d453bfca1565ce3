"""Quick all-reduce: messages are quantized to 8, 6 or 4 bits. Functions have vLLM's names and run on NVIDIA, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from ..._core.errors import OpError
from ..._core.launch.kernel import Kernel
from ..._core.system.lazy import torch
from ..._core.tensors import dtypes
from ...host import ranks
from .communicator import Communicator, geometry
from .custom_all_reduce import keep
from .shared_memory import (
    HANDLE_BYTES,
    SIGNAL_BYTES,
    allocate_shared_buffer_and_handle,
    close_mem_handle,
    free_shared_buffer,
    open_mem_handle,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["init_custom_qr", "qr_all_reduce", "qr_destroy", "qr_get_handle", "qr_max_size", "qr_open_handles"]

_kernel = Kernel("collective/quick_all_reduce.cu")
_WORLD_SIZES = (2, 4, 8)
_BITS = (16, 8, 6, 4)  # bits of an element, by quant_level
_MAX_SIZE = 2 << 30  # default size of the largest message, in bytes
_VEC, _TILE = 8, 8  # elements of a vector; vectors of a tile
_handles = count(1)


@dataclass(eq=False)
class _Quick:
    rank: int
    world_size: int
    max_size: int
    own: int
    handle: Tensor
    opened: list[int] = field(default_factory=list)
    communicator: Communicator | None = None


_states: dict[int, _Quick] = {}


def init_custom_qr(rank: int, world_size: int, qr_max_size: int | None = None) -> int:
    """Allocate memory for messages of up to `qr_max_size` bytes; returns a handle.

    Args:
        rank: the rank of this process.
        world_size: 2, 4 or 8 ranks.
        qr_max_size: bytes of the largest message; None for `qr_max_size()`.
    """
    if world_size not in _WORLD_SIZES:
        raise OpError("init_custom_qr", "world_size", f"expected 2, 4 or 8, got {world_size}")
    if not 0 <= rank < world_size:
        raise OpError("init_custom_qr", "rank", f"expected 0 to {world_size - 1}, got {rank}")
    max_size = _MAX_SIZE if qr_max_size is None else qr_max_size
    if max_size < 1:
        raise OpError("init_custom_qr", "qr_max_size", f"expected 1 or more bytes, got {max_size}")
    # One section for the slice of each rank and one for the sum, each a whole number of tiles.
    section = _slice(-(-max_size // 16), world_size) * 16
    own, handle = allocate_shared_buffer_and_handle(SIGNAL_BYTES + (world_size + 1) * section)
    keep(own)
    fa = next(_handles)
    _states[fa] = _Quick(rank, world_size, max_size, own, handle)
    return fa


def qr_max_size() -> int:
    """Bytes of the largest message for which `init_custom_qr` allocates memory by default."""
    return _MAX_SIZE


def qr_get_handle(fa: int) -> Tensor:
    """The handle of this rank's memory for `qr_open_handles` of the others: uint8 [64] on the CPU.

    Args:
        fa: the handle that `init_custom_qr` returns.
    """
    return _state("qr_get_handle", fa).handle


def qr_open_handles(_fa: int, handles: Sequence[Tensor]) -> None:
    """Map the memory of all ranks; `handles` are in the order of ranks. Call it before the first `qr_all_reduce`.

    Args:
        _fa: the handle that `init_custom_qr` returns.
        handles: of `qr_get_handle` of each rank.
    """
    state = _state("qr_open_handles", _fa)
    if len(handles) != state.world_size or any(handle.numel() != HANDLE_BYTES for handle in handles):
        expected = f"expected {state.world_size} of {HANDLE_BYTES} bytes, got {[h.numel() for h in handles]}"
        raise OpError("qr_open_handles", "handles", expected)
    signals = []
    for rank, handle in enumerate(handles):
        if rank != state.rank:
            state.opened.append(open_mem_handle(handle))
        signals.append(state.own if rank == state.rank else state.opened[-1])
    device = "cuda" if ranks.here() is None else "cpu"
    state.communicator = Communicator(signals, torch.zeros(64, dtype=torch.uint8, device=device), state.rank, True)


def qr_all_reduce(fa: int, inp: Tensor, out: Tensor, quant_level: int, cast_bf2half: bool = False) -> None:
    """``out = sum of inp over ranks``, with each input and each sum quantized in blocks of 32 elements.

    Args:
        fa: the handle that `init_custom_qr` returns.
        inp: float16 or bfloat16, contiguous, a multiple of 8 elements, at most the bytes given to `init_custom_qr`.
        out: as `inp`, written; may be `inp`.
        quant_level: 0 for 16 bits, not quantized; 1, 2, 3 for 8, 6 and 4 bits.
        cast_bf2half: compute bfloat16 in float16, which overflows beyond 65504.

    A quantized block with an element that is not finite becomes NaN.
    """
    op, state = "qr_all_reduce", _state("qr_all_reduce", fa)
    if state.communicator is None:
        raise OpError(op, "fa", "expected qr_open_handles before")
    if inp.dtype not in (torch.float16, torch.bfloat16):
        raise OpError(op, "inp", f"expected float16 or bfloat16, got {inp.dtype}")
    if (out.dtype, out.shape, out.device) != (inp.dtype, inp.shape, inp.device):
        raise OpError(op, "out", f"expected {inp.dtype} {list(inp.shape)}, got {out.dtype} {list(out.shape)}")
    for name, tensor in (("inp", inp), ("out", out)):
        if not tensor.is_contiguous() or (tensor.numel() and tensor.data_ptr() % 16):
            raise OpError(op, name, "expected a contiguous tensor at an address that 16 divides")
    if inp.numel() % _VEC or inp.nbytes > state.max_size:
        expected = f"a multiple of {_VEC} elements, at most {state.max_size} bytes"
        raise OpError(op, "inp", f"expected {expected}, got {inp.numel()} elements")
    if not 0 <= quant_level < len(_BITS):
        raise OpError(op, "quant_level", f"expected 0 to {len(_BITS) - 1}, got {quant_level}")
    if out.data_ptr() != inp.data_ptr() and abs(out.data_ptr() - inp.data_ptr()) < inp.nbytes:
        raise OpError(op, "out", "overlaps inp")
    if not inp.numel():
        return
    num_vecs = inp.numel() // _VEC
    part = _slice(num_vecs, state.world_size)
    grid, num_threads = geometry(part)
    own = dtypes.of(inp.dtype)
    constants = {"scalar_t": own, "compute_t": dtypes.float16 if cast_bf2half else own, "BITS": _BITS[quant_level]}
    fixed = {"num_vecs": num_vecs, "slice": part}
    state.communicator.launch(op, _kernel, constants, grid, num_threads, fixed, None, out=out, input=inp)


def qr_destroy(fa: int) -> None:
    """Free the memory of this rank. No rank may use it afterwards.

    Args:
        fa: the handle that `init_custom_qr` returns.
    """
    state = _state("qr_destroy", fa)
    for address in state.opened:
        close_mem_handle(address)
    free_shared_buffer(state.own)
    del _states[fa]


def _state(op: str, fa: int) -> _Quick:
    if fa not in _states:
        raise OpError(op, "fa", f"expected a handle of init_custom_qr, got {fa}")
    return _states[fa]


def _slice(num_vecs: int, world_size: int) -> int:
    """Vectors of the slice of a rank, rounded up to whole tiles."""
    return -(-num_vecs // (_TILE * world_size)) * _TILE
