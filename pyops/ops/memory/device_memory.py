"""Memory of one tensor as another, and what a device says of itself. Nothing here is a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._core import device as devices
from ..._core import tensor
from ..._core.errors import OpError
from ..._core.lazy import cupy, torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "get_cuda_view_from_cpu_tensor",
    "get_device_attribute",
    "get_max_shared_memory_per_block_device_attribute",
    "weak_ref_tensor",
]

# Elements by their bytes: the interface knows neither bfloat16 nor fp8.
_WORDS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}


class _Memory:
    """Memory at a device's `address`, laid out like a tensor, in CUDA's array interface. It keeps `owner` alive."""

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
    # A device that is named: under torch.set_default_device the tensor would be copied to another.
    words = torch.as_tensor(_Memory(like, address, owner), device=device)
    view: Tensor = words.view(like.dtype)
    return view


def _torch_tensor(op: str, name: str, value: Any) -> None:
    if tensor.library_of(value) != "torch":
        raise OpError(op, name, f"expected a torch tensor, got {type(value).__name__}")


def weak_ref_tensor(input: Tensor) -> Tensor:
    """A tensor over the memory of `input` that does not keep it: shape, strides and dtype are those of `input`.

    For buffers of a CUDA graph, which its pool holds: once `input` is gone its memory is given to others, and what the
    result then shows is theirs.

    Args:
        input: a torch tensor on a GPU, of any dtype and strides. If it is empty, so is the result, and shares nothing.

    Raises:
        OpError: what is no torch tensor, or does not lie on a GPU.
    """
    _torch_tensor("weak_ref_tensor", "input", input)
    if not input.is_cuda:
        raise OpError("weak_ref_tensor", "input", f"expected a tensor on a GPU, got one on {input.device}")
    if not input.numel():
        return torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device=input.device)
    return _view(input, input.data_ptr(), input.device, None)


def get_cuda_view_from_cpu_tensor(cpu_tensor: Tensor) -> Tensor:
    """The memory of a pinned tensor as a GPU sees it: what either writes, the other reads, once streams are in order.

    Shape, strides and dtype are those of `cpu_tensor`, which the result keeps alive. The GPU is the one for which the
    memory was pinned.

    Args:
        cpu_tensor: a torch tensor in pinned host memory, of any dtype and strides, and not empty.

    Raises:
        OpError: what is no torch tensor, lies elsewhere, or is not pinned.
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
    """What the driver says of an attribute of a device, asked anew at every call.

    Args:
        attribute: its number in the runtime's enumeration (``cudaDeviceAttr``, ``hipDeviceAttribute_t``).
        device: ordinal among the process's devices; the current one if negative.

    Raises:
        OpError: no such device, or no such attribute.
    """
    index = _index("get_device_attribute", device)
    try:
        return int(cupy.cuda.runtime.deviceGetAttribute(attribute, index))
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise OpError("get_device_attribute", "attribute", f"{error}, got {attribute}") from None


def get_max_shared_memory_per_block_device_attribute(device: int) -> int:
    """Bytes of shared memory that one block can ask for, opt-in included, on a device as above."""
    return devices.get(_index("get_max_shared_memory_per_block_device_attribute", device)).shared_memory


def _index(op: str, device: int) -> int:
    """The ordinal of a device, which must exist."""
    count = devices.count()
    if device >= count or not count:
        raise OpError(op, "device", f"expected one of the {count} GPUs of this process, got {device}")
    return device if device >= 0 else int(cupy.cuda.runtime.getDevice())
