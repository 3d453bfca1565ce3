"""Batched copies between device and host memory by address, for offloading a cache to the host."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy

from ..._core import device as devices
from ..._core import driver, tensor
from ..._core.errors import OpError
from ..._core.lazy import torch

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
        driver.copy_batch(targets, sources, counts, stream, bool(is_src_access_order_any))
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
