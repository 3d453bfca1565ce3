"""Blocks of a paged cache: copied within it, moved between devices, converted to fp8 and back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, Literal

import numpy

from ..._core import check, tensor
from ..._core.dtypes import E4M3, FLOATS, DType, uint8
from ..._core.errors import OpError
from ..._core.kernel import Kernel, Launch
from ..._core.lazy import cupy, torch
from ..._core.op import op
from ..._core.tensor import TensorArg
from .._shared import fp8
from ._common import bits, codes

if TYPE_CHECKING:
    from torch import Tensor

_copy_blocks = Kernel("cache/copy_blocks.cu")
_convert_fp8 = Kernel("cache/convert_fp8.cu")

_NOWHERE = 2**63 - 1
_HOST = -1  # where a device would have its index
_MAX_ROWS = 32768  # of a grid of convert_fp8


@op(inout=("key_cache", "value_cache"), ulps=0)
def copy_cache_blocks(key_cache: Tensor, value_cache: Tensor | None, block_mapping: Tensor) -> None:
    """Copy whole blocks of the caches of one layer: ``cache[block_mapping[i, 1]] = cache[block_mapping[i, 0]]``.

    A pair of which either block does not exist is skipped. All pairs are copied at once: a block may be a source many
    times; what a destination holds that comes twice, or is a source as well, is not specified.

    Args:
        key_cache: [num_blocks, ...] of any dtype that ops know, read and written; the elements of a block lie together,
            in any order.
        value_cache: likewise, with as many blocks of as many bytes; or None.
        block_mapping: [num_pairs, 2] int64 or int32, (source, destination), any strides.
    """
    source, target = block_mapping.long().unbind(1)
    num_blocks = len(key_cache)
    exists = (source >= 0) & (source < num_blocks) & (target >= 0) & (target < num_blocks)
    for cache in (key_cache, value_cache):
        if cache is not None:
            bits(cache)[target[exists]] = bits(cache)[source[exists]]


def _block_bytes(cache: TensorArg) -> int:
    """Bytes of a block, whose elements must lie together."""
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
    batch, num_threads = 4, 128
    chunks = -(-block_bytes // (vec_size * batch * num_threads))
    return _copy_blocks(map_t=block_mapping.dtype, VEC_SIZE=vec_size, BATCH=batch, NUM_THREADS=num_threads).launch(
        grid=(block_mapping.shape[0] * chunks if key_cache.numel else 0, len(given)),
        block=num_threads,
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
        key_caches, value_caches: as many of each as there are layers, read and written; none at all does nothing.
        block_mapping: [num_pairs, 2] int64 or int32, on the device of the caches.

    Raises:
        OpError: lists of different lengths, or what `copy_cache_blocks` refuses; no layer has been written then.
    """
    if len(key_caches) != len(value_caches):
        message = f"expected {len(key_caches)} tensors like key_caches, got {len(value_caches)}"
        raise OpError("copy_blocks", "value_caches", message)
    _copy_layers(list(zip(key_caches, value_caches, strict=True)), block_mapping)


def copy_blocks_mla(kv_caches: Sequence[Any], block_mapping: Any) -> None:
    """Copy blocks in the joint caches of every layer: `copy_blocks` for caches that hold keys and values in one."""
    _copy_layers([(kv_cache, None) for kv_cache in kv_caches], block_mapping)


def _copy_layers(layers: Sequence[tuple[Any, Any]], block_mapping: Any) -> None:
    looks = [[_looks(cache) for cache in layer] for layer in layers]
    for layer, look in zip(layers, looks, strict=True):
        if look != looks[0]:  # the call for the first one checks what looks the same
            copy_cache_blocks.op.check(*layer, block_mapping)
    for layer in layers:
        copy_cache_blocks(*layer, block_mapping)


def _looks(cache: Any) -> Any:
    """What a plan sees of a cache."""
    kind = tensor.library_of(cache)
    if kind is None:
        return cache
    strides = cache.stride() if kind == "torch" else cache.strides
    return type(cache), cache.dtype, cache.shape, getattr(cache, "device", None), strides


def swap_blocks(src: Any, dst: Any, block_size_in_bytes: int, block_mapping: Any) -> None:
    """Copy blocks from one tensor to another, of the same device or of the host: block ``m[i, 1]`` of `dst` becomes
    block ``m[i, 0]`` of `src`.

    Both are taken for consecutive blocks of `block_size_in_bytes` bytes. Blocks that follow each other on both sides
    are one copy. Copies are asynchronous on the current stream wherever the library has them so (for the host: in
    pinned memory). A pair of which either block does not exist is skipped.

    Args:
        src, dst: torch tensors, or numpy and cupy arrays, of any dtype and shape without gaps; both on one GPU, or one
            or both in host memory.
        block_size_in_bytes: of a block.
        block_mapping: [n, 2] integers, (source, destination), in host memory: a torch tensor, a numpy array or a list.
            No destination is a source as well.

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
    if len({source_arg.device.index, target_arg.device.index} - {_HOST}) > 1:
        raise target_arg.error("expected host memory or the device of src")
    blocks = [arg.nbytes // size for arg in (source_arg, target_arg)]
    mapping = mapping[((mapping >= 0) & (mapping < numpy.array(blocks))).all(1)]
    sources, targets = (tensor.address(value) + mapping[:, i] * size for i, value in enumerate((src, dst)))
    sources.sort()
    # Of each target, the first source that does not end before it begins; behind the last one lies nothing.
    following = numpy.searchsorted(sources, targets - size, side="right")
    if (numpy.append(sources, _NOWHERE)[following] < targets + size).any():
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
    """The Arg of a tensor without gaps."""
    kind = tensor.library_of(value)
    if kind is None:
        raise OpError("swap_blocks", name, f"expected a tensor, got {type(value).__name__}")
    dtype = DType(str(value.dtype), "", value.dtype.itemsize)
    arg = tensor.describe("swap_blocks", name, value, kind, name == "dst", dtype)
    if arg.extent != arg.nbytes:
        raise arg.error(f"expected no gaps, got shape {arg.shape} with strides {arg.strides}")
    return arg


def _runs(mapping: Any) -> Any:
    """(source, destination, number of blocks) of the longest runs in which both count up."""
    if not len(mapping):
        return []
    breaks = numpy.flatnonzero((numpy.diff(mapping, axis=0) != 1).any(1)) + 1
    starts = numpy.concatenate(([0], breaks))
    counts = numpy.diff(numpy.concatenate((starts, [len(mapping)])))
    return [(*map(int, mapping[start]), int(count)) for start, count in zip(starts, counts, strict=True)]


def _copier(src: Any, dst: Any) -> Any:
    """copy(byte of src, byte of dst, bytes)."""
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


@op(out="output", ulps=0)
def convert_fp8(output: Tensor, input: Tensor, scale: float = 1.0, kv_dtype: str = "fp8") -> None:
    """Convert a cache to e4m3 codes, ``e4m3(input / scale)``, or codes to floats, ``T(input * scale)``.

    The quotient is a true division in float32, rounded to the nearest code; it saturates, and NaN stays NaN.

    Args:
        output, input: of one shape, in one order in memory; one of them float32, float16 or bfloat16, the other uint8,
            float8_e4m3fn or float8_e4m3fnuz. `output` is written.
        scale: of the codes.
        kv_dtype: "fp8" or "fp8_e4m3".
    """
    divisor = torch.full((), scale, dtype=torch.float32, device=input.device)
    if output.element_size() == 1:
        bits(output).copy_(codes(input, divisor, fp8.cache_codes(output, kv_dtype)))
    else:
        output.copy_(input.view(fp8.cache_codes(input, kv_dtype)).float() * divisor)


@convert_fp8.plan
def plan_convert_fp8(output: TensorArg, input: TensorArg, kv_dtype: str) -> Launch:
    if kv_dtype not in ("fp8", "fp8_e4m3"):
        raise check.refuse(input, "kv_dtype", f'expected "fp8" or "fp8_e4m3", got "{kv_dtype}"')
    to_codes = input.dtype in FLOATS
    check.dtype(input, *FLOATS, uint8, *E4M3)
    check.dtype(output, *((uint8, *E4M3) if to_codes else FLOATS))
    kind = fp8.cache_dtype(output if to_codes else input, kv_dtype, input.dtype)
    check.same_shape(output, input)
    # The order of the dimensions in memory, in which both are rows of one size.
    order = sorted(range(len(input.shape)), key=lambda dim: (-input.strides[dim], -input.shape[dim]))
    rows = [
        replace(arg, shape=(*(arg.shape[dim] for dim in order), 1), strides=(*(arg.strides[dim] for dim in order), 1))
        for arg in (output, input)
    ]
    dims = check.leading(*rows, max_dims=2)
    if dims[-1][1] != (1, 1):  # single elements
        dims.append((1, (1, 1)))
    if len(dims) > 2:
        raise output.error(f"expected strides {input.strides} like input, got {output.strides}")
    (num_rows, strides), (row_size, _) = ((1, (0, 0)), *dims)[-2:]
    matrices = [
        replace(arg, shape=(num_rows, row_size), strides=(row_stride, 1))
        for arg, row_stride in zip((output, input), strides, strict=True)
    ]
    vec_size, num_threads = check.vector_width(row_size, *matrices), 256
    return _convert_fp8(
        out_t=kind if to_codes else output.dtype,
        in_t=input.dtype if to_codes else kind,
        VEC_SIZE=vec_size,
        NUM_THREADS=num_threads,
    ).launch(
        grid=(-(-row_size // (vec_size * num_threads)) if input.numel else 0, min(num_rows, _MAX_ROWS)),
        block=num_threads,
        num_rows=num_rows,
        row_size=row_size,
        output_stride=strides[0],
        input_stride=strides[1],
    )


@convert_fp8.example
def example_convert_fp8(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 4096,
    dtype: str = "bfloat16",
    to_codes: Literal[True, False] = True,
) -> tuple[Any, ...]:
    if to_codes:
        output, input = (
            make.empty(num_tokens, hidden_size, dtype="uint8"),
            make.randn(num_tokens, hidden_size, dtype=dtype),
        )
    else:
        output = make.empty(num_tokens, hidden_size, dtype=dtype)
        input = make.randint(0, 120, num_tokens, hidden_size, dtype="uint8")
    return output, input, 0.03, "fp8"
