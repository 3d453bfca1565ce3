"""Tensors that alias memory of another tensor, and attributes of a device. Nothing here launches a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._core.errors import OpError
from ..._core.system import device as devices
from ..._core.system.lazy import cupy, torch
from ..._core.tensors import tensor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "get_cuda_view_from_cpu_tensor",
    "get_device_attribute",
    "get_max_shared_memory_per_block_device_attribute",
    "weak_ref_tensor",
]

# {bytes of an element: a type of that size}, because CUDA's array interface has neither bfloat16 nor fp8.
_WORDS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}


class _Memory:
    """Device memory at `address`, laid out as `like`, for CUDA's array interface. Keeps `owner` alive."""

    def __init__(self, like: Tensor, address: int, owner: Any) -> None:
        itemsize = like.element_size()
        self.owner = owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": _WORDS[itemsize],
            "shape": tuple(like.shape),
            "strides": tuple(stride * itemsize for stride in like.stride()),
        }


def _view(like: Tensor, address: int, device: Any, owner: Any) -> Tensor:
    # `device` is explicit, because under torch.set_default_device torch would copy the memory to the default device.
    words = torch.as_tensor(_Memory(like, address, owner), device=device)
    view: Tensor = words.view(like.dtype)
    return view


def _torch_tensor(op: str, name: str, value: Any) -> None:
    if tensor.library_of(value) != "torch":
        raise OpError(op, name, f"expected a torch tensor, got {type(value).__name__}")


def weak_ref_tensor(input: Tensor) -> Tensor:
    """A tensor over the memory of `input` that does not keep the memory alive, with its shape, strides and dtype.

    For buffers of a CUDA graph: its pool keeps their memory. Once `input` is freed, its memory may be given to
    another tensor; the result then shows the elements of that tensor.

    Args:
        input: a torch tensor on a GPU, of any dtype and strides. An empty tensor gives a new empty tensor.

    Raises:
        OpError: `input` is no torch tensor, or is not on a GPU.
    """
    _torch_tensor("weak_ref_tensor", "input", input)
    if not input.is_cuda:
        raise OpError("weak_ref_tensor", "input", f"expected a tensor on a GPU, got one on {input.device}")
    if not input.numel():
        return torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device=input.device)
    return _view(input, input.data_ptr(), input.device, None)


def get_cuda_view_from_cpu_tensor(cpu_tensor: Tensor) -> Tensor:
    """The memory of a pinned tensor as a tensor of a GPU, with the shape, strides and dtype of `cpu_tensor`.

    CPU and GPU share the memory: each reads what the other wrote, once streams are synchronised. The result keeps
    `cpu_tensor` alive. The GPU is the one for which the memory was pinned.

    Args:
        cpu_tensor: a torch tensor in pinned host memory, of any dtype and strides, and not empty.

    Raises:
        OpError: `cpu_tensor` is no torch tensor, is not in host memory, or is not pinned.
    """
    name = "get_cuda_view_from_cpu_tensor"
    _torch_tensor(name, "cpu_tensor", cpu_tensor)
    if cpu_tensor.device.type != "cpu":
        raise OpError(name, "cpu_tensor", f"expected a tensor in host memory, got one on {cpu_tensor.device}")
    if not cpu_tensor.is_pinned():
        raise OpError(name, "cpu_tensor", "expected a tensor in pinned memory")
    memory = cupy.cuda.runtime.pointerGetAttributes(cpu_tensor.data_ptr())
    return _view(cpu_tensor, memory.devicePointer, torch.device("cuda", memory.device), cpu_tensor)


def get_device_attribute(attribute: int, device: int) -> int:
    """The value of an attribute of a device. The driver is asked at every call.

    Args:
        attribute: number of the attribute in the runtime's enumeration (``cudaDeviceAttr``, ``hipDeviceAttribute_t``).
        device: ordinal of the device in this process; the current device if negative.

    Raises:
        OpError: there is no such device, or no such attribute.
    """
    index = _index("get_device_attribute", device)
    try:
        return int(cupy.cuda.runtime.deviceGetAttribute(attribute, index))
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise OpError("get_device_attribute", "attribute", f"{error}, got {attribute}") from None


def get_max_shared_memory_per_block_device_attribute(device: int) -> int:
    """Bytes of shared memory that one block can ask for, opt-in included.

    Args:
        device: ordinal of the device in this process; the current device if negative.

    Raises:
        OpError: there is no such device.
    """
    return devices.get(_index("get_max_shared_memory_per_block_device_attribute", device)).shared_memory


def _index(op: str, device: int) -> int:
    """The ordinal of `device`, resolved if negative. OpError if there is no such device."""
    count = devices.count()
    if device >= count or not count:
        raise OpError(op, "device", f"expected one of the {count} GPUs of this process, got {device}")
    return device if device >= 0 else int(cupy.cuda.runtime.getDevice())
