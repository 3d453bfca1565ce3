"""TensorArg, the descriptor that plans see of a torch tensor, a cupy array or a numpy array."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import numpy

from ..errors import OpError
from ..system import device as devices
from ..system import driver
from ..system.device import Device
from ..system.lazy import cupy, loaded, optional, torch
from . import dtypes
from .dtypes import DType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class TensorArg:
    """One tensor argument of one call, without its data.

    Attributes:
        op, name: for error messages.
        dtype: element type.
        shape, strides: in elements.
        alignment: bytes, the largest power of two up to 16 that divides the address.
        device: where it lives; a model of a GPU for host memory.
    """

    op: str
    name: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int
    device: Device

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, holes between them not counted."""
        return self.numel * self.dtype.itemsize

    @property
    def extent(self) -> int:
        """Bytes from its first element to the end of its last; 0 when empty."""
        last = 1
        for size, stride in zip(self.shape, self.strides):  # noqa: B905
            if size == 0:
                return 0
            last += (size - 1) * stride
        return last * self.dtype.itemsize

    def error(self, message: str) -> OpError:
        return OpError(self.op, self.name, message)


def library_of(value: Any) -> str | None:
    """``"torch"``, ``"cupy"`` or ``"numpy"``; None for a value that is not a tensor."""
    if (module := loaded("torch")) and isinstance(value, module.Tensor):
        return "torch"
    if (module := loaded("cupy")) and isinstance(value, module.ndarray):
        return "cupy"
    return "numpy" if isinstance(value, numpy.ndarray) else None


def taken(op: str, name: str, value: Any, kind: str | None = None) -> Any:
    """An array over the memory of an object with `__dlpack__`, of the library `kind`; any other value itself."""
    if library_of(value) or not hasattr(value, "__dlpack_device__"):
        return value
    try:
        kind = kind or ("torch" if loaded("torch") else "numpy" if value.__dlpack_device__()[0] == 1 else "cupy")
        return {"torch": torch, "cupy": cupy, "numpy": numpy}[kind].from_dlpack(value)
    except (BufferError, RuntimeError, TypeError) as error:
        raise OpError(op, name, f"{kind} takes no {type(value).__name__} by DLPack: {error}") from error


def number(value: Any, like: Any) -> Any:
    """`value` as a tensor of one float32 in the library and on the device of `like`; a tensor is returned unchanged.

    `value` may also be a scalar tensor in host memory while `like` is on a device.
    """
    kind = library_of(like)
    if kind == "torch":
        return torch_number(loaded("torch"), value, like)
    if kind is None or library_of(value) == kind:
        return value
    return (cupy if kind == "cupy" else numpy).full((), value, "float32")


def torch_number(torch: Any, value: Any, like: Any) -> Any:
    """`number` for torch tensors, in a form that torch.compile can trace: it cannot trace the lookup of modules."""
    if not isinstance(value, torch.Tensor):
        return torch.full((), value, dtype=torch.float32, device=like.device)
    return value.to(like.device) if value.device.type == "cpu" and like.device.type != "cpu" else value


def is_meta(value: Any) -> bool:
    """Whether `value` is a torch.Tensor itself on the device "meta", not of a subclass such as FakeTensor."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.is_meta


def is_symbol(value: Any) -> bool:
    """Whether `value` is a SymInt of torch's compiler: reading its value would specialise the graph on it."""
    found = loaded("torch")
    return found is not None and isinstance(value, found.SymInt)


def on_host(value: Any) -> bool:
    """Whether a tensor lies in host memory."""
    return value.device.type == "cpu" if library_of(value) == "torch" else library_of(value) == "numpy"


MAX_FLOAT = (2 - 2.0**-24) * 2.0**127  # magnitudes from this one on round to infinity in float32
_MAX_NUMBERS = 4096  # most cached tensors of numbers
_numbers: dict[Any, Any] = {}
_in_graphs: dict[Any, Any] = {}  # numbers that captured calls read: graphs do not keep them alive


def held_number(value: Any, like: Any) -> Any:
    """`number` with a cache by value: the tensor is kept, and ready for use on any stream.

    A graph reads the cached tensor. It fills only a number that torch first meets during the capture.
    """
    kind = library_of(like)
    if kind is None or (kind == "torch" and like.is_meta):
        return number(value, like)
    try:
        value = float(value)
    except OverflowError:
        return value  # `arguments.convert` will refuse the value by the name of its argument
    where = None if kind == "numpy" else like.device.id if kind == "cupy" else like.device  # CuPy's have no hash
    key = (value, kind, where)
    if kind == "torch":
        is_captured = like.is_cuda and torch.cuda.is_current_stream_capturing()
    else:
        is_captured = kind == "cupy" and driver.is_capturing(cupy.cuda.get_current_stream().ptr)
    found = _numbers.get(key)
    if found is None and is_captured:
        found = _in_graphs.get(key)
    if found is None:
        if MAX_FLOAT <= abs(value) < inf:
            return value  # `arguments.convert` will refuse this one, too
        if kind == "torch" and is_captured:
            return number(value, like)
        if kind == "torch":
            found = torch.tensor(value, dtype=torch.float32, device=like.device)
        elif kind == "cupy":
            found = _cupy_number(value, like)
        else:
            found = number(value, like)
        if len(_numbers) >= _MAX_NUMBERS:
            _numbers.clear()
        _numbers[key] = found
    return _in_graphs.setdefault(key, found) if is_captured else found


def _cupy_number(value: float, like: Any) -> Any:
    """A CuPy array of one float32 on the device of `like`, ready for any stream, also while a stream is captured."""
    with like.device, driver.relaxed_capture():
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            found = cupy.full((), value, "float32")
        stream.synchronize()
        del stream  # destroys the stream while the relaxed mode lasts
    return found


def new(like: Any, shape: tuple[int, ...], dtype: Any = None, column_stride: int = 0) -> Any:
    """A tensor of the library and on the device of `like`, with garbage for elements.

    The dtype is that of `like` unless one is given: the library's own, or the name of an element type. The tensor is
    contiguous; with a `column_stride`, columns of its last two dimensions are, and have that stride. torch.compile can
    trace this function.
    """
    if column_stride:
        *leading, rows, columns = shape
        return new(like, (*leading, columns, column_stride), dtype)[..., :rows].swapaxes(-1, -2)
    if hasattr(like, "new_empty"):
        dtype = getattr(loaded("torch"), dtype) if isinstance(dtype, str) else dtype
        # Sizes one by one take torch 0.5 us less than a tuple of them.
        return like.new_empty(*shape, dtype=dtype) if shape else like.new_empty(shape, dtype=dtype)
    if library_of(like) is None and hasattr(like, "__dlpack_device__"):
        return new(taken("new", "like", like), shape, dtype)
    if isinstance(dtype, str) and not hasattr(numpy, dtype):
        dtype = getattr(optional("ml_dtypes", f"a new array of {dtype}", "cpu"), dtype)
    kind = numpy.dtype(like.dtype if dtype is None else dtype)
    # CuPy has views of the types of ml_dtypes, but makes no new array of one.
    made = numpy.empty_like(like, kind if hasattr(numpy, kind.name) else f"u{kind.itemsize}", "C", shape=shape)
    return made.view(kind)


def zeros(like: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """`new`, with zeros for elements."""
    made = new(like, shape, dtype)
    made.fill_(0) if hasattr(made, "fill_") else made.fill(0)
    return made


def contiguous(value: Any) -> Any:
    """`value`, or a contiguous copy of it."""
    if hasattr(value, "contiguous"):
        return value.contiguous()
    return value if value.flags.c_contiguous else value.copy(order="C")


def device_of(value: Tensor) -> Device:
    """The `Device` that a torch tensor is planned for."""
    return devices.get(value.get_device()) if value.is_cuda else devices.host()


def address(value: Any) -> int:
    """Address of the first element."""
    kind = library_of(value)
    if kind == "torch":
        return int(value.data_ptr())
    return int(value.data.ptr if kind == "cupy" else value.ctypes.data)


def describe(op: str, name: str, value: Any, kind: str, written: bool, dtype: DType | None = None) -> TensorArg:
    """The descriptor of a tensor of the library `kind`; OpError for one that no kernel can take.

    `dtype` replaces an element type that kernels do not know, for ops that only move elements.
    """
    dtype = dtype or dtype_of(op, name, value)
    if kind == "torch":
        check_needs_no_grad(op, name, value)
        _check_plain(op, name, value)
        pointer, shape, strides = value.data_ptr(), tuple(value.shape), value.stride()
        device = device_of(value)
    else:
        shape = value.shape
        strides = tuple(stride // dtype.itemsize for stride in value.strides)
        if any(stride % dtype.itemsize or stride < 0 for stride in value.strides):
            raise OpError(op, name, f"expected strides in whole elements and not negative, got {value.strides} bytes")
        if kind == "cupy":
            pointer, device = value.data.ptr, devices.get(value.data.device_id)
        else:
            pointer, device = value.ctypes.data, devices.host()
            if written and not value.flags.writeable:
                raise OpError(op, name, "is written, but the array is read-only")
    arg = TensorArg(op, name, dtype, shape, strides, (pointer | 16) & -(pointer | 16), device)
    if arg.alignment < dtype.itemsize:
        raise arg.error(f"expected an address that is a multiple of {dtype.itemsize} bytes, got {pointer:#x}")
    if written and arg.numel:
        _check_no_self_overlap(arg)
    return arg


def dtype_of(op: str, name: str, value: Any) -> DType:
    """The element type of a tensor. Raises OpError for one that no op takes."""
    if (dtype := dtypes.of(value.dtype)) is None:
        raise OpError(op, name, dtypes.unsupported(value.dtype))
    return dtype


def check_needs_no_grad(op: str, name: str, value: Tensor) -> None:
    """Raises OpError for a torch tensor that needs a gradient, which the op would not compute."""
    if value.requires_grad and torch.is_grad_enabled():
        raise OpError(op, name, "requires grad, but the op has no derivative: call it under torch.no_grad()")


def _check_plain(op: str, name: str, value: Tensor) -> None:
    """Raises OpError for a torch tensor that is not plain strided memory (nested, sparse, lazily negated ...)."""
    known = loaded("torch")
    if known._C._functorch.is_functorch_wrapped_tensor(value):
        raise OpError(op, name, "is transformed by torch.func, and the op has no rule for that")
    if value.is_nested or value.layout is not known.strided:
        found = "a nested one" if value.is_nested else f"one of layout {value.layout}"
        raise OpError(op, name, f"expected a dense tensor, got {found}")
    for lazy, resolve in ((value.is_neg(), "resolve_neg"), (value.is_conj(), "resolve_conj")):
        if lazy:
            raise OpError(op, name, f"its elements in memory are not its values yet: call {resolve}() first")


def increment_versions(values: Sequence[Any]) -> None:
    """Tell autograd that these tensors are about to be written. Arrays of other libraries have no autograd."""
    if values and library_of(values[0]) == "torch":
        with suppress(RuntimeError):  # a tensor that was made in inference mode has no version
            torch.autograd.graph.increment_version(values)


def describe_new(
    op: str, name: str, shape: tuple[int, ...], dtype: DType, device: Device, column_stride: int = 0
) -> TensorArg:
    """The descriptor of a tensor that begins at a multiple of 16 bytes, as `new` allocates it."""
    order = (*shape[:-2], shape[-1], column_stride) if column_stride else shape
    strides, step = [], 1
    for size in reversed(order):
        strides.append(step)
        step *= size
    if column_stride:
        strides[:2] = reversed(strides[:2])
    return TensorArg(op, name, dtype, shape, tuple(reversed(strides)), 16, device)


def _check_no_self_overlap(arg: TensorArg) -> None:
    reach = 1
    for stride, size in sorted(zip(arg.strides, arg.shape, strict=True)):
        if size > 1:
            if stride < reach:
                raise arg.error(f"is written, but its elements overlap: shape {arg.shape}, strides {arg.strides}")
            reach += (size - 1) * stride


def shares_memory(a: TensorArg, a_address: int, b: TensorArg, b_address: int) -> bool:
    """Whether two tensors share a byte of an element; True if numpy's search exceeds its work limit."""
    first, second = (numpy.asarray(_Interface(arg, pointer)) for arg, pointer in ((a, a_address), (b, b_address)))
    try:
        return bool(numpy.shares_memory(first, second, max_work=100_000))  # type: ignore[arg-type]
    except numpy.exceptions.TooHardError:
        return True


class _Interface:
    """An address range as numpy sees it. Only the addresses are used, never what lies there."""

    def __init__(self, arg: TensorArg, pointer: int) -> None:
        itemsize = arg.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, True),
            "typestr": f"|V{itemsize}",
            "shape": arg.shape,
            "strides": tuple(stride * itemsize for stride in arg.strides),
        }


def to_torch(value: Any) -> Any:
    """A torch tensor over the memory of a numpy or cupy array (a read-only numpy array is copied)."""
    dtype = dtypes.of(value.dtype)
    if dtype is not None and not hasattr(numpy, dtype.name):  # ml_dtypes: reinterpret the bits as integers
        bits = value.view(numpy.uint8 if dtype.itemsize == 1 else numpy.int16)
        return to_torch(bits).view(getattr(torch, dtype.name))
    if isinstance(value, numpy.ndarray):
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    return torch.from_dlpack(value)
