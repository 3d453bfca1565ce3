"""Non-owning views of memory, and attributes of devices."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy
import pytest
import torch

import pyops
from pyops._core.system import device as devices
from pyops.ops.memory import device_memory as memory
from pyops.testing import same_bits

VIEWS = {
    "weak_ref_tensor": ("input", pyops.weak_ref_tensor),
    "get_cuda_view_from_cpu_tensor": ("cpu_tensor", pyops.get_cuda_view_from_cpu_tensor),
}
ATTRIBUTES = {
    "get_device_attribute": lambda device: pyops.get_device_attribute(16, device),
    "get_max_shared_memory_per_block_device_attribute": pyops.get_max_shared_memory_per_block_device_attribute,
}
DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.int16,
        torch.float16,
    ),
    *(torch.bfloat16, torch.int32, torch.float32, torch.int64, torch.float64, torch.complex64, torch.complex128),
]


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("value", [None, 3, numpy.ones(3), [torch.ones(3)]], ids=lambda value: type(value).__name__)
def test_other_objects_than_tensors_are_refused(name: str, value: object) -> None:
    argument, view = VIEWS[name]
    with pytest.raises(pyops.OpError) as caught:
        view(value)  # type: ignore[arg-type]
    assert str(caught.value) == f"{name}: {argument}: expected a torch tensor, got {type(value).__name__}"


@pytest.mark.parametrize("shape", [(2, 3), (0,), ()])
def test_tensor_on_another_device_is_refused(shape: tuple[int, ...]) -> None:
    for device in ("cpu", "meta"):
        with pytest.raises(
            pyops.OpError, match=f"weak_ref_tensor: input: expected a tensor on a GPU, got one on {device}"
        ):
            pyops.weak_ref_tensor(torch.empty(shape, device=device))
    expected = "get_cuda_view_from_cpu_tensor: cpu_tensor: expected a tensor in "
    with pytest.raises(pyops.OpError, match=f"{expected}pinned memory"):
        pyops.get_cuda_view_from_cpu_tensor(torch.empty(shape))
    with pytest.raises(pyops.OpError, match=f"{expected}host memory, got one on meta"):
        pyops.get_cuda_view_from_cpu_tensor(torch.empty(shape, device="meta"))


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_missing_device_is_refused(name: str) -> None:
    count = torch.cuda.device_count()
    for device in [count, count + 5] if count else [0, 5, -1]:
        with pytest.raises(pyops.OpError) as caught:
            ATTRIBUTES[name](device)
        message = f"expected one of the {count} GPUs of this process, got {device}"
        assert str(caught.value) == f"{name}: device: {message}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_is_described_with_its_strides(dtype: torch.dtype) -> None:
    """CUDA's array interface has the fields of numpy's, so numpy reads it on the CPU."""
    words = torch.arange(2 * 3 * 64).to(torch.uint8)
    x = (words.bool() if dtype == torch.bool else words.view(dtype)).reshape(2, -1)[:, 1::2].t()

    class OnHost:
        __array_interface__ = memory._Memory(x, x.data_ptr(), None).__cuda_array_interface__

    y = torch.as_tensor(numpy.asarray(OnHost())).view(dtype)
    assert (y.data_ptr(), y.stride()) == (x.data_ptr(), x.stride())
    assert same_bits(y, x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weak_reference_is_the_same_memory(dtype: torch.dtype) -> None:
    words = torch.arange(2 * 3 * 64, device="cuda").to(torch.uint8)
    x = (words.bool() if dtype == torch.bool else words.view(dtype)).reshape(2, -1)[:, 1::2].t()
    y = pyops.weak_ref_tensor(x)
    assert (y.dtype, y.shape, y.stride(), y.device) == (x.dtype, x.shape, x.stride(), x.device)
    assert y.data_ptr() == x.data_ptr()
    assert same_bits(y, x)
    assert _bytes(y).any()
    x.zero_()
    assert not _bytes(y).any()


@pytest.mark.gpu
def test_weak_reference_owns_nothing() -> None:
    gc.collect()  # other tests' garbage must not be freed in between
    x = torch.ones(1 << 20, device="cuda")
    held = torch.cuda.memory_allocated()
    y = pyops.weak_ref_tensor(x)
    assert torch.cuda.memory_allocated() == held
    del x
    gc.collect()
    assert torch.cuda.memory_allocated() == held - (4 << 20)
    del y
    gc.collect()
    assert torch.cuda.memory_allocated() == held - (4 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
def test_weak_reference_to_an_empty_tensor(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, device="cuda")
    y = pyops.weak_ref_tensor(x)
    assert (y.shape, y.stride(), y.device) == (x.shape, x.stride(), x.device)
    assert y.data_ptr() == x.data_ptr()


@pytest.mark.gpu
def test_weak_reference_in_a_graph() -> None:
    """As vLLM makes them: for outputs in the pool of a graph, while the graph is captured."""
    x = torch.ones(100, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        strong = x * 3
        made = torch.cuda.memory_stats()["allocation.all.allocated"]
        weak = pyops.weak_ref_tensor(strong)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == made
        del strong
    graph.replay()
    torch.cuda.synchronize()
    assert bool((weak == 3).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_view_of_pinned_memory(dtype: torch.dtype) -> None:
    x = torch.zeros(10, 10).to(dtype).pin_memory()
    y = pyops.get_cuda_view_from_cpu_tensor(x)
    assert (y.dtype, y.shape, y.stride()) == (x.dtype, x.shape, x.stride())
    assert y.is_cuda
    assert not _bytes(y).any()
    y.copy_(torch.ones(10, 10).to(dtype))
    torch.cuda.synchronize()
    assert same_bits(x, torch.ones(10, 10).to(dtype))
    x[3].zero_()
    assert not _bytes(y[3]).any()


@pytest.mark.gpu
def test_view_keeps_pinned_memory_alive_and_takes_strides() -> None:
    pinned = torch.arange(100, dtype=torch.int32).reshape(10, 10).pin_memory()
    right = pinned[1::2, 2:7].t().clone()
    view = pyops.get_cuda_view_from_cpu_tensor(pinned[1::2, 2:7].t())
    assert view.stride() == (1, 20)
    del pinned
    gc.collect()
    other = torch.zeros(10, 10, dtype=torch.int32).pin_memory()  # would reuse the memory
    assert torch.equal(view.cpu(), right)
    del other


@pytest.mark.gpu
@pytest.mark.parametrize("make", [pyops.weak_ref_tensor, pyops.get_cuda_view_from_cpu_tensor])
def test_views_under_another_default_device(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(4, device="cuda") if make is pyops.weak_ref_tensor else torch.ones(4).pin_memory()
    with torch.device("cpu"):
        y = make(x)
    assert y.is_cuda
    y.fill_(2)
    torch.cuda.synchronize()
    assert bool((x == 2).all())


@pytest.mark.gpu
def test_device_attributes() -> None:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            for device in (index, -1):
                assert pyops.get_device_attribute(10, device) == properties.warp_size
                assert pyops.get_device_attribute(16, device) == properties.multi_processor_count
                largest = pyops.get_max_shared_memory_per_block_device_attribute(device)
                found = devices.get(index)
                assert largest == (found.shared_memory if found.translates else pyops.get_device_attribute(97, device))
    with pytest.raises(pyops.OpError, match=r"get_device_attribute: attribute: .*got 1000000"):
        pyops.get_device_attribute(1000000, 0)
