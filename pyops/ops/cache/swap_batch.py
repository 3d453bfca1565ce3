"""Batched copies between device and host memory by address, for offloading a cache to the host."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy

from ..._core.errors import OpError
from ..._core.system import device as devices
from ..._core.system.lazy import CUDA_LIBRARY, torch
from ..._core.tensors import tensor

if TYPE_CHECKING:
    from torch import Tensor


def swap_blocks_batch(src_ptrs: Tensor, dst_ptrs: Tensor, sizes: Tensor, is_src_access_order_any: bool = False) -> None:
    """Copy ``sizes[i]`` bytes from address ``src_ptrs[i]`` to address ``dst_ptrs[i]``, on torch's current stream.

    From CUDA 12.8 on, one driver call does all copies, unless the stream is the default one. Addresses are not
    validated, because nothing says which memory they belong to: only null is refused. On a machine without a GPU the
    copies are done when the call returns.

    Args:
        src_ptrs, dst_ptrs: [n] int64 in host memory, contiguous: addresses of device memory or of pinned host memory.
            Destinations may not overlap each other or a source.
        sizes: [n] int64 in host memory, contiguous: bytes, 0 or more.
        is_src_access_order_any: whether sources may be read before earlier work on the stream is done; earlier work
            may then not write them.

    Raises:
        OpError: tensors of other types or lengths, a null address, a negative size. Nothing has been written then.
    """
    sources, targets, counts = (
        _numbers(name, value) for name, value in (("src_ptrs", src_ptrs), ("dst_ptrs", dst_ptrs), ("sizes", sizes))
    )
    for name, values in (("dst_ptrs", targets), ("sizes", counts)):
        if len(values) != len(sources):
            raise OpError(
                "swap_blocks_batch", name, f"expected {len(sources)} elements like src_ptrs, got {len(values)}"
            )
    if (counts < 0).any():
        raise OpError("swap_blocks_batch", "sizes", f"expected 0 or more, got {counts.min()}")
    used = counts != 0
    for name, values in (("src_ptrs", sources), ("dst_ptrs", targets)):
        if (values[used] == 0).any():
            raise OpError("swap_blocks_batch", name, "expected addresses, got a null pointer")
    if not used.any():
        return
    if not used.all():
        targets, sources, counts = targets[used], sources[used], counts[used]
    if devices.count():
        stream = torch.cuda.current_stream().cuda_stream
        _copy_batch(targets, sources, counts, stream, bool(is_src_access_order_any))
        return
    for target, source, size in zip(targets.tolist(), sources.tolist(), counts.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def _numbers(name: str, value: Any) -> Any:
    """A numpy array over an int64 vector in host memory."""
    if tensor.library_of(value) != "torch":
        raise OpError("swap_blocks_batch", name, f"expected a torch tensor, got {type(value).__name__}")
    if value.device.type != "cpu" or value.dtype != torch.int64 or value.ndim != 1 or not value.is_contiguous():
        got = f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
        raise OpError("swap_blocks_batch", name, f"expected a contiguous vector of int64 in host memory, got {got}")
    return numpy.asarray(value)


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: in which order sources may be read, hints of where source and target lie, flags."""

    _fields_ = (("source_order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_SOURCE_ORDER_STREAM, _SOURCE_ORDER_ANY = 1, 3
_DEFAULT_STREAMS = (0, 1)  # the legacy ones, on which the driver takes no batch of copies


@cache
def _batch_call() -> Any:
    """cuMemcpyBatchAsync, which CuPy does not have; None on HIP and in drivers before CUDA 12.8."""
    from cupy_backends.cuda.api import runtime

    if runtime.is_hip:
        return None
    try:
        call = ctypes.CDLL(CUDA_LIBRARY).cuMemcpyBatchAsync
    except (OSError, AttributeError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    call.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    return call


def _copy_batch(targets: Any, sources: Any, sizes: Any, stream: int, any_order: bool) -> None:
    """Copy memory by addresses, on a stream, between device and pinned host memory, in either direction.

    One call of the driver, where it has such a call and the stream is no legacy default stream; else a call a copy.

    Args:
        targets, sources, sizes: int64 arrays of numpy without gaps, addresses and bytes; sizes are not 0.
        stream: its handle.
        any_order: whether sources may be read before earlier work on the stream is done.
    """
    from cupy_backends.cuda.api import driver, runtime

    call = _batch_call()
    if call is None or stream in _DEFAULT_STREAMS:
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            runtime.memcpyAsync(target, source, size, runtime.memcpyDefault, stream)
        return
    order = _SOURCE_ORDER_ANY if any_order else _SOURCE_ORDER_STREAM
    attributes, first, failed = _CopyAttributes(order), ctypes.c_size_t(0), ctypes.c_size_t(0)
    addresses = (array.ctypes.data for array in (targets, sources, sizes))
    numbers = len(targets), ctypes.byref(attributes), ctypes.byref(first), 1
    status = call(*addresses, *numbers, ctypes.byref(failed), stream)
    if status:
        raise driver.CUDADriverError(status)
