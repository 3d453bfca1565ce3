"""All-gather and reduce-scatter over the ranks of a node, by kernels that read peers' memory, with vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._core.errors import OpError
from ..._core.launch.kernel import Kernel
from ..._core.system.lazy import torch
from .communicator import VEC_BYTES, Communicator, geometry, unroll
from .custom_all_reduce import _all_reduce, _constants, _is_dense, _staged, communicator

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["custom_all_gather", "custom_reduce_scatter"]

_all_gather = Kernel("collective/all_gather.cu")


def custom_all_gather(fa: int, inp: Tensor, out: Tensor, reg_buffer: int, reg_buffer_sz_bytes: int) -> None:
    """``out = the tensors inp of all ranks, in the order of ranks``.

    Args:
        fa: handle of `init_custom_ar`. Every rank must call, with tensors of the same dtype and size.
        inp: of any dtype, as in `all_reduce`: dense, and a multiple of 16 bytes.
        out: of the dtype of `inp`, with as many elements as those of all ranks, written.
        reg_buffer: address of a registered buffer, into which `inp` is copied; or 0, if `inp` is registered or the
            stream is being captured.
        reg_buffer_sz_bytes: size of that buffer.
    """
    op = "custom_all_gather"
    found = communicator(op, fa)
    nbytes = _check(op, found, whole=out, part=inp, names=("out", "inp"))
    _check_apart(op, inp, out)
    peers = _staged(found, op, inp, nbytes, reg_buffer, reg_buffer_sz_bytes)
    if num_vecs := nbytes // VEC_BYTES:
        found.launch(op, _all_gather, {}, *geometry(num_vecs), {"num_vecs": num_vecs}, peers, out=out)


def custom_reduce_scatter(fa: int, inp: Tensor, out: Tensor, reg_buffer: int, reg_buffer_sz_bytes: int) -> None:
    """``out = slice r of the sum of inp over ranks`` on rank r: in float32, in the order of ranks, rounded once.

    Args:
        fa: handle of `init_custom_ar`. Every rank must call, with tensors of the same dtype and size.
        inp: float32, float16 or bfloat16, as in `all_reduce`; a multiple of 16 bytes for each rank.
        out: of the dtype of `inp`, with its elements divided by the number of ranks, written.
        reg_buffer, reg_buffer_sz_bytes: as in `custom_all_gather`.
    """
    op = "custom_reduce_scatter"
    found = communicator(op, fa)
    if inp.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise OpError(op, "inp", f"expected float32, float16 or bfloat16, got {inp.dtype}")
    nbytes = _check(op, found, whole=inp, part=out, names=("inp", "out"))
    _check_apart(op, inp, out)
    peers = _staged(found, op, inp, int(inp.nbytes), reg_buffer, reg_buffer_sz_bytes)
    if num_vecs := nbytes // VEC_BYTES:
        constants = _constants(inp) | {"TWO_SHOT": False, "SCATTER": True, "UNROLL": unroll(found.world_size)}
        fixed = {"num_vecs": num_vecs * found.world_size}
        found.launch(op, _all_reduce, constants, *geometry(num_vecs), fixed, peers, out=out)


def _check(op: str, found: Communicator, whole: Tensor, part: Tensor, names: tuple[str, str]) -> int:
    """Check the tensor of all ranks and that of one; returns the bytes of the latter."""
    count = part.numel() * found.world_size
    if (whole.dtype, whole.numel(), whole.device) != (part.dtype, count, part.device):
        expected = f"{part.dtype} of {count} elements on {part.device}"
        got = f"{whole.dtype} of {whole.numel()} on {whole.device}"
        raise OpError(op, names[0], f"expected {expected}, got {got}")
    nbytes = int(part.nbytes)
    if nbytes % VEC_BYTES:
        raise OpError(op, names[1], f"expected a multiple of {VEC_BYTES} bytes, got {nbytes}")
    for name, tensor in zip(names, (whole, part), strict=True):
        if not _is_dense(tensor, int(tensor.nbytes)):
            raise OpError(op, name, f"expected a contiguous tensor, got strides {tensor.stride()}")
        if nbytes and tensor.data_ptr() % VEC_BYTES:
            raise OpError(op, name, f"expected an address that {VEC_BYTES} divides, got {tensor.data_ptr():#x}")
    return nbytes


def _check_apart(op: str, inp: Tensor, out: Tensor) -> None:
    first, second = inp.data_ptr(), out.data_ptr()
    if first < second + out.nbytes and second < first + inp.nbytes:
        raise OpError(op, "out", "overlaps another tensor of the call")
