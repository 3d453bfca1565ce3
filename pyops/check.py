"""Checks and choices on the cold path of a call. Each raises OpError naming op and argument; none reads tensor data."""

from __future__ import annotations

from typing import Any

from ._core.errors import OpError
from ._core.launch.tensor_map import TensorMap
from ._core.tensors import dtypes
from ._core.tensors.dtypes import DType
from ._core.tensors.tensor import TensorArg


def dtype(arg: TensorArg | None, *allowed: DType) -> None:
    """`arg` has one of these element types."""
    if arg is not None and arg.dtype not in allowed:
        expected = " or ".join(d.name for d in allowed)
        raise arg.error(f"expected dtype {expected}, got {arg.dtype}")


def floating(arg: TensorArg) -> None:
    """`arg` is float32, float16 or bfloat16."""
    dtype(arg, *dtypes.FLOATS)


def like(arg: TensorArg | None, other: TensorArg) -> None:
    """`arg` has the shape and dtype of `other`."""
    same_shape(arg, other)
    dtype(arg, other.dtype)


def same_shape(arg: TensorArg | None, other: TensorArg) -> None:
    """`arg` has the shape of `other`."""
    if arg is not None and arg.shape != other.shape:
        raise arg.error(f"expected shape {other.shape} like {other.name}, got {arg.shape}")


def refuse(arg: TensorArg, argument: str, message: str) -> OpError:
    """The error for a scalar argument of the call that `arg` belongs to."""
    return OpError(arg.op, argument, message)


def chosen(arg: TensorArg, argument: str, name: Any, default: DType) -> DType:
    """The element type that `argument` of the call names, which `arg` belongs to; the default where it is None."""
    found = default if name is None else dtypes.of(name)
    if found is None:
        raise refuse(arg, argument, dtypes.unsupported(name))
    return found


def shape(arg: TensorArg | None, dtype_: DType | None = None, /, **sizes_: int) -> None:
    """`arg` has exactly these named sizes (and this dtype), and is contiguous."""
    if arg is None:
        return
    sizes(arg, **sizes_)
    if dtype_ is not None:
        dtype(arg, dtype_)
    contiguous(arg)


def sizes(arg: TensorArg, **sizes: int | None) -> None:
    """`arg` has exactly these named sizes; a size of None, and the strides, may be anything."""
    expected = [size if wanted is None else wanted for size, wanted in zip(arg.shape, sizes.values())]  # noqa: B905
    if len(arg.shape) != len(sizes) or list(arg.shape) != expected:
        named = ", ".join(name if size is None else f"{name}={size}" for name, size in sizes.items())
        raise arg.error(f"expected shape ({named}{',' if len(sizes) == 1 else ''}), got {arg.shape}")


def index(arg: TensorArg | None, **named: int | None) -> None:
    """`arg` holds int32 or int64 and has these named sizes; a size of None, and the strides, may be anything."""
    if arg is not None:
        sizes(arg, **named)
        dtype(arg, dtypes.int32, dtypes.int64)


def contiguous(arg: TensorArg) -> None:
    """`arg` is contiguous."""
    step = 1
    for size, stride in zip(reversed(arg.shape), reversed(arg.strides), strict=True):
        if size != 1 and stride != step and arg.numel:
            raise arg.error(f"expected a contiguous tensor, got shape {arg.shape} with strides {arg.strides}")
        step *= size


def scalar(arg: TensorArg | None, dtype_: DType = dtypes.float32) -> None:
    """`arg` holds one element of this type, of any rank."""
    if arg is not None:
        if arg.numel != 1:
            raise arg.error(f"expected one element, got shape {arg.shape}")
        dtype(arg, dtype_)


def at_least(arg: TensorArg, dtype_: DType, count: int) -> None:
    """`arg` is contiguous and holds at least `count` elements of this type; kernels do not touch the rest."""
    if arg.numel < count:
        raise arg.error(f"expected at least {count} element{'s' * (count != 1)}, got shape {arg.shape}")
    dtype(arg, dtype_)
    contiguous(arg)


def per_row(arg: TensorArg | None, dtype_: DType, num_rows: int) -> None:
    """`arg` is contiguous and holds one element of this type per row."""
    if arg is not None:
        if arg.numel != num_rows:
            raise arg.error(f"expected one element per row, {num_rows}, got shape {arg.shape}")
        dtype(arg, dtype_)
        contiguous(arg)


def elements(arg: TensorArg | None, dtype_: DType, count: int) -> None:
    """`arg` is contiguous and holds `count` elements of this type, in any shape."""
    if arg is not None:
        if arg.numel != count:
            raise arg.error(f"expected {count} element{'s' * (count != 1)}, got shape {arg.shape}")
        dtype(arg, dtype_)
        contiguous(arg)


def row_size(arg: TensorArg) -> int:
    """Size of the last dimension; OpError unless its stride is 1."""
    if not arg.shape:
        raise arg.error("expected at least one dimension, got a scalar")
    if arg.shape[-1] > 1 and arg.strides[-1] != 1 and arg.numel:
        raise arg.error(f"expected a last dimension of stride 1, got strides {arg.strides}")
    return arg.shape[-1]


def narrow(arg: TensorArg) -> None:
    """The row size of `arg` fits in 32 bits, as kernels count elements of a row."""
    if arg.shape[-1] > 2**30:
        raise arg.error(f"expected rows of at most 2^30 elements, got shape {arg.shape}")


def num_rows(arg: TensorArg) -> int:
    """Product of all sizes but the last."""
    count = 1
    for size in arg.shape[:-1]:
        count *= size
    return count


def row_stride(arg: TensorArg) -> int:
    """Elements from one row to the next; OpError when the leading dimensions have no common stride."""
    ((_, (stride,)),) = leading(arg, max_dims=1)
    return stride


def leading(*args: TensorArg, max_dims: int) -> list[tuple[int, tuple[int, ...]]]:
    """The leading dimensions of tensors of one shape, merged where all of them allow it, outermost first.

    Returns [(size, (stride in each tensor, ...)), ...] with at least one and at most `max_dims` entries.
    """
    merged: list[tuple[int, tuple[int, ...]]] = []
    dims = zip(args[0].shape[:-1], *(arg.strides[:-1] for arg in args), strict=True)
    for size, *strides in dims:
        if size == 1:
            continue
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1], strides, strict=True)):
            merged[-1] = (merged[-1][0] * size, tuple(strides))
        else:
            merged.append((size, tuple(strides)))
    if len(merged) > max_dims and all(arg.numel for arg in args):
        worst = max(
            args, key=lambda arg: len(arg.shape) if args == (arg,) else len(leading(arg, max_dims=len(arg.shape)))
        )
        raise worst.error(
            f"expected leading dimensions that merge into {max_dims}, got shape {worst.shape} "
            f"with strides {worst.strides}"
        )
    return merged[:max_dims] or [(1, tuple(arg.shape[-1] for arg in args))]


def vector_width(size: int, *args: TensorArg, widest: int = 16) -> int:
    """Elements per memory access: the most for which every tensor's rows of `size` elements split into aligned vectors.

    `widest` bounds the bytes of an access of the widest element type.
    """
    # The greatest common divisor of powers of two is the lowest bit that any of them sets.
    bits = size | widest // max([arg.dtype.itemsize for arg in args])
    for arg in args:
        bits |= arg.alignment // arg.dtype.itemsize or 1
        for extent, stride in zip(arg.shape[:-1], arg.strides[:-1], strict=True):
            if extent > 1:
                bits |= stride
    return bits & -bits


def threads(needed: int, *, max_threads: int = 1024) -> int:
    """Threads of a block for `needed` work items: a multiple of 64 (whole warps everywhere), at most `max_threads`."""
    return min(max_threads, max(64, -(-needed // 64) * 64))


def mappable(*args: TensorArg) -> bool:
    """Whether a tensor map can describe each of these arguments as a whole. If not, a plan takes a portable kernel.

    An empty tensor cannot.
    """
    try:
        for arg in args:
            TensorMap.of(arg, (16 // arg.dtype.itemsize, *(1 for _ in arg.shape[1:])))
    except OpError:
        return False
    return True
