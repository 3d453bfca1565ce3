"""Blocks of a paged cache: copied within a cache, and moved between devices."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any

import numpy

from ... import check
from ..._core.errors import OpError
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import cupy, torch
from ..._core.tensors import tensor
from ..._core.tensors.dtypes import DType, uint8
from ..._core.tensors.tensor import TensorArg
from ._common import indexable

if TYPE_CHECKING:
    from torch import Tensor

_copy_blocks = Kernel("cache/copy_blocks.cu")

_VECS, _NUM_THREADS = 4, 128  # vectors of a thread, threads of a block; not tuned
_BEYOND_MEMORY = 2**63 - 1  # an address after every block
_HOST_INDEX = -1  # device index of host memory


@op(inout=("key_cache", "value_cache"), ulps=0)
def copy_cache_blocks(key_cache: Tensor, value_cache: Tensor | None, block_mapping: Tensor) -> None:
    """Copy whole blocks of the caches of one layer: ``cache[block_mapping[i, 1]] = cache[block_mapping[i, 0]]``.

    A pair is skipped if either block does not exist. All pairs are copied at once: a block may be the source of many
    pairs. The contents of a block that is the destination of two pairs, or a destination and a source, are unspecified.

    Args:
        key_cache: [num_blocks, ...] of any supported dtype, read and written; blocks without gaps, their elements in
            any order.
        value_cache: a cache with as many blocks of as many bytes; or None.
        block_mapping: [num_pairs, 2] int64 or int32, (source, destination), any strides.
    """
    source, target = block_mapping.long().unbind(1)
    num_blocks = len(key_cache)
    exists = (source >= 0) & (source < num_blocks) & (target >= 0) & (target < num_blocks)
    for cache in (key_cache, value_cache):
        if cache is not None:
            indexable(cache)[target[exists]] = indexable(cache)[source[exists]]


def _block_bytes(cache: TensorArg) -> int:
    """Check that the blocks of a cache have no gaps; returns the bytes of a block."""
    if len(cache.shape) < 2:
        raise cache.error(f"expected at least 2 dimensions, got shape {cache.shape}")
    block = replace(cache, shape=cache.shape[1:], strides=cache.strides[1:])
    if block.extent != block.nbytes:
        raise cache.error(f"expected blocks without gaps, got shape {cache.shape} with strides {cache.strides}")
    return block.nbytes


@copy_cache_blocks.plan
def plan_copy_cache_blocks(key_cache: TensorArg, value_cache: TensorArg | None, block_mapping: TensorArg) -> Launch:
    check.index(block_mapping, num_pairs=None, two=2)
    block_bytes = _block_bytes(key_cache)
    given = [key_cache] if value_cache is None else [key_cache, value_cache]
    for cache in given[1:]:
        check.dtype(cache, key_cache.dtype)
        if cache.shape[:1] != key_cache.shape[:1] or _block_bytes(cache) != block_bytes:
            raise cache.error(f"expected blocks like those of key_cache {key_cache.shape}, got shape {cache.shape}")
    as_bytes = [
        replace(
            cache,
            dtype=uint8,
            shape=(cache.shape[0], block_bytes),
            strides=(cache.strides[0] * cache.dtype.itemsize, 1),
        )
        for cache in given
    ]
    vec_size = check.vector_width(block_bytes, *as_bytes)
    chunks = -(-block_bytes // (vec_size * _VECS * _NUM_THREADS))
    return _copy_blocks(map_t=block_mapping.dtype, VEC_SIZE=vec_size, BATCH=_VECS, NUM_THREADS=_NUM_THREADS).launch(
        grid=(block_mapping.shape[0] * chunks if key_cache.numel else 0, len(given)),
        block=_NUM_THREADS,
        num_blocks=key_cache.shape[0],
        block_bytes=block_bytes,
        key_stride=as_bytes[0].strides[0],
        value_stride=as_bytes[-1].strides[0],
        map_stride=block_mapping.strides[0],
        map_column_stride=block_mapping.strides[1],
        chunks=chunks,
    )


@copy_cache_blocks.bad_indices
def bad_indices_copy_cache_blocks(key_cache: Tensor, block_mapping: Tensor) -> dict[str, Tensor]:
    return {"block_mapping": (block_mapping < 0) | (block_mapping >= len(key_cache))}


@copy_cache_blocks.traffic
def traffic_copy_cache_blocks(key_cache: TensorArg, value_cache: TensorArg | None, block_mapping: TensorArg) -> int:
    block_bytes = _block_bytes(key_cache) * (1 if value_cache is None else 2)
    return block_mapping.nbytes + 2 * block_mapping.shape[0] * block_bytes


@copy_cache_blocks.example
def example_copy_cache_blocks(
    make: Any, *, num_tokens: int = 16, dtype: str = "bfloat16", with_values: bool = False
) -> tuple[Any, ...]:
    """`num_tokens` is the number of pairs."""
    shape = (2 * num_tokens + 1, 2, 16, 64)
    return (
        make.randn(*shape, dtype=dtype),
        make.randn(*shape, dtype=dtype) if with_values else None,
        make.permutation(2 * num_tokens + 1, num_tokens, 2),
    )


def copy_blocks(key_caches: Sequence[Any], value_caches: Sequence[Any], block_mapping: Any) -> None:
    """Copy blocks in the caches of every layer: ``cache[block_mapping[i, 1]] = cache[block_mapping[i, 0]]``.

    Each layer is a call of `copy_cache_blocks`, which says what is copied and what is skipped.

    Args:
        key_caches, value_caches: one of each per layer, read and written; empty lists do nothing.
        block_mapping: [num_pairs, 2] int64 or int32, on the device of the caches.

    Raises:
        OpError: for lists of different lengths, and for what `copy_cache_blocks` refuses; no layer is written.
    """
    if len(key_caches) != len(value_caches):
        message = f"expected {len(key_caches)} tensors like key_caches, got {len(value_caches)}"
        raise OpError("copy_blocks", "value_caches", message)
    _copy_layers(list(zip(key_caches, value_caches, strict=True)), block_mapping)


def copy_blocks_mla(kv_caches: Sequence[Any], block_mapping: Any) -> None:
    """Copy blocks in the caches of every layer: `copy_blocks` for one cache per layer, as of latent KV.

    Args:
        kv_caches: one for each layer, read and written.
    """
    _copy_layers([(kv_cache, None) for kv_cache in kv_caches], block_mapping)


def _copy_layers(layers: Sequence[tuple[Any, Any]], block_mapping: Any) -> None:
    properties = [[_properties(cache) for cache in layer] for layer in layers]
    for layer, own in zip(layers, properties, strict=True):
        if own != properties[0]:  # layers with the properties of the first are checked by its call
            copy_cache_blocks.op.check(*layer, block_mapping)
    for layer in layers:
        copy_cache_blocks(*layer, block_mapping)


def _properties(cache: Any) -> Any:
    """The properties of a cache on which its checks depend; equal for caches that pass the same checks."""
    kind = tensor.library_of(cache)
    if kind is None:
        return cache
    strides, negated = (cache.stride(), cache.is_neg()) if kind == "torch" else (cache.strides, False)
    return type(cache), cache.dtype, cache.shape, getattr(cache, "device", None), strides, negated


def swap_blocks(src: Any, dst: Any, block_size_in_bytes: int, block_mapping: Any) -> None:
    """Copy blocks from one tensor to another, of the same device or of the host: block ``m[i, 1]`` of `dst` becomes
    block ``m[i, 0]`` of `src`.

    Both tensors are read as consecutive blocks of `block_size_in_bytes` bytes. Pairs of blocks that follow each other
    on both sides become one copy. Copies are asynchronous on the current stream where the library supports it (host
    memory must be pinned). A pair is skipped if either block does not exist.

    Args:
        src, dst: torch tensors, or numpy and cupy arrays, of any dtype and shape without gaps; both on one GPU, or one
            or both in host memory.
        block_size_in_bytes: bytes of a block.
        block_mapping: [n, 2] integers, (source, destination), in host memory: a torch tensor, a numpy array or a list.
            No block of memory may be a destination and a source.

    Raises:
        OpError: a mapping that is not [n, 2] integers in host memory, a destination that overlaps a source, a size
            below 1, tensors with gaps, of two libraries or two GPUs. Nothing has been written then.
    """
    mapping = _host_mapping(block_mapping)
    size = block_size_in_bytes if hasattr(block_size_in_bytes, "__index__") else 0
    if isinstance(size, bool) or (size := index(size)) < 1:
        raise OpError(
            "swap_blocks", "block_size_in_bytes", f"expected an int of at least 1, got {block_size_in_bytes!r}"
        )
    source_arg, target_arg = (_dense(name, value) for name, value in (("src", src), ("dst", dst)))
    if (tensor.library_of(src) == "torch") != (tensor.library_of(dst) == "torch"):
        raise target_arg.error("expected a tensor of the library of src")
    if len({source_arg.device.index, target_arg.device.index} - {_HOST_INDEX}) > 1:
        raise target_arg.error("expected host memory or the device of src")
    blocks = [arg.nbytes // size for arg in (source_arg, target_arg)]
    mapping = mapping[((mapping >= 0) & (mapping < numpy.array(blocks))).all(1)]
    sources, targets = (tensor.address(value) + mapping[:, i] * size for i, value in enumerate((src, dst)))
    sources.sort()
    # For each target, the first source that ends after the beginning of the target.
    following = numpy.searchsorted(sources, targets - size, side="right")
    if (numpy.append(sources, _BEYOND_MEMORY)[following] < targets + size).any():
        raise OpError("swap_blocks", "block_mapping", "a destination overlaps a source")
    copy = _copier(src, dst)
    for source, target, count in _runs(mapping):
        copy(source * size, target * size, count * size)


def _host_mapping(block_mapping: Any) -> Any:
    """The pairs as an int64 array."""
    kind = tensor.library_of(block_mapping)
    if kind == "cupy" or (kind == "torch" and block_mapping.device.type != "cpu"):
        raise OpError("swap_blocks", "block_mapping", "expected it in host memory")
    try:
        mapping = numpy.asarray(block_mapping)
    except ValueError:  # rows of different lengths
        raise OpError("swap_blocks", "block_mapping", "expected integers [n, 2], got rows that differ") from None
    if mapping.size and (mapping.ndim != 2 or mapping.shape[1] != 2 or mapping.dtype.kind not in "iu"):
        raise OpError("swap_blocks", "block_mapping", f"expected integers [n, 2], got {mapping.dtype} {mapping.shape}")
    return mapping.astype(numpy.int64).reshape(-1, 2)


def _dense(name: str, value: Any) -> TensorArg:
    """Check that a tensor has no gaps; returns its description."""
    kind = tensor.library_of(value)
    if kind is None:
        raise OpError("swap_blocks", name, f"expected a tensor, got {type(value).__name__}")
    dtype = DType(str(value.dtype), "", value.dtype.itemsize)
    arg = tensor.describe("swap_blocks", name, value, kind, name == "dst", dtype)
    if arg.extent != arg.nbytes:
        raise arg.error(f"expected no gaps, got shape {arg.shape} with strides {arg.strides}")
    return arg


def _runs(mapping: Any) -> Any:
    """(source, destination, number of blocks) of the longest runs of pairs that both count up by 1."""
    if not len(mapping):
        return []
    breaks = numpy.flatnonzero((numpy.diff(mapping, axis=0) != 1).any(1)) + 1
    starts = numpy.concatenate(([0], breaks))
    counts = numpy.diff(numpy.concatenate((starts, [len(mapping)])))
    return [(*map(int, mapping[start]), int(count)) for start, count in zip(starts, counts, strict=True)]


def _copier(src: Any, dst: Any) -> Any:
    """A function copy(first byte in src, first byte in dst, number of bytes)."""
    if tensor.library_of(src) == "torch":
        source, target = (_torch_bytes(value) for value in (src, dst))

        def copy(start: int, to: int, size: int) -> None:
            target[to : to + size].copy_(source[start : start + size], non_blocking=True)

        return copy
    source_address, target_address = tensor.address(src), tensor.address(dst)
    if tensor.on_host(src) and tensor.on_host(dst):
        return lambda start, to, size: ctypes.memmove(target_address + to, source_address + start, size)
    device = (dst if tensor.on_host(src) else src).device

    def copy_on_device(start: int, to: int, size: int) -> None:
        with device:  # a null stream is the current device's
            stream = cupy.cuda.get_current_stream().ptr
            any_direction = cupy.cuda.runtime.memcpyDefault
            cupy.cuda.runtime.memcpyAsync(target_address + to, source_address + start, size, any_direction, stream)

    return copy_on_device


def _torch_bytes(value: Tensor) -> Tensor:
    """The memory of a tensor without gaps, byte by byte."""
    offset = value.storage_offset() * value.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=value.device)
    return flat.set_(value.untyped_storage(), offset, (value.numel() * value.element_size(),))
