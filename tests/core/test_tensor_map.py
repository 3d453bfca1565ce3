"""Tensor maps: which tensors can be described, which maps kernels get at every call, and the driver calls for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy
import pytest
import torch

import pyops
from pyops import check, compile_ahead, offline
from pyops._core import config
from pyops._core.errors import OpError
from pyops._core.launch import launch, tensor_map
from pyops._core.launch.kernel import Kernel, Launch
from pyops._core.launch.scratch import Scratch
from pyops._core.launch.tensor_map import TensorMap
from pyops._core.system import device
from pyops._core.system import driver as driver_calls
from pyops._core.tensors import dtypes
from pyops._core.tensors.tensor import TensorArg, describe_new
from pyops.cli import show
from pyops.host import launch as host
from tests.core.conftest import Driver, call, text
from tests.support.calls import KERNELS

if TYPE_CHECKING:
    from torch import Tensor

MakeKernel = Callable[[str, str], Kernel]
PAGE = 4096


def arg(
    *shape: int, name: str = "x", strides: tuple[int, ...] | None = None, dtype: str = "bfloat16", **other: Any
) -> TensorArg:
    kind = dtypes.of(dtype)
    assert kind is not None
    made = describe_new("op", name, shape, kind, device.model(other.pop("arch", "sm_90")))
    made.strides, made.alignment = strides or made.strides, other.pop("alignment", 16)
    return made


# What can be mapped


@pytest.mark.parametrize(
    ("one", "sizes", "strides"),
    [
        (arg(33, 64), (64, 33), (128,)),
        (arg(33, 64, strides=(72, 1)), (64, 33), (144,)),
        (arg(2, 3, 64, strides=(64, 128, 1)), (64, 3, 2), (256, 128)),  # a transposed view
        (arg(1, 60, strides=(7, 1)), (60, 1), (128,)),  # one row: its stride does not matter
        (arg(5, 1, 8, strides=(24, 3, 1)), (8, 1, 5), (16, 48)),
        (arg(7), (7,), ()),
        (arg(4, 16, dtype="float8_e4m3fn"), (16, 4), (16,)),
    ],
)
def test_whole_argument(one: TensorArg, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert check.mappable(one)
    made = TensorMap.of(one, (16, *(1 for _ in sizes[1:])), 32)
    assert (made.sizes, made.strides, made.dtype, made.offset) == (sizes, strides, one.dtype, 0)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (arg(8, 64, alignment=8), "an address that is a multiple of 16, got one of 8"),
        (arg(8, 60), "strides and an offset that are multiples of 16"),
        (arg(8, 64, strides=(0, 1)), "strides and an offset"),  # expanded
        (arg(8, 64, strides=(1, 8)), "a last dimension of stride 1"),
        (arg(0, 64), "sizes from 1 to"),
        (arg(2**32 + 1, 8, dtype="int8", strides=(16, 1)), "sizes from 1 to"),
        (arg(), "1 to 5 dimensions"),
        (arg(2, 2, 2, 2, 2, 8), "1 to 5 dimensions"),
        (arg(8, 64, arch="sm_80"), "compute capability 9.0 and later"),
        (arg(8, 64, arch="gfx942"), "compute capability 9.0 and later"),
    ],
)
def test_unsupported_tensors_take_the_portable_kernel(one: TensorArg, message: str) -> None:
    assert not check.mappable(one)
    assert not check.mappable(arg(8, 64), one)
    with pytest.raises(OpError, match=rf"^op: x: .*{message}"):
        TensorMap.of(one, (8, *(1 for _ in one.shape[1:])))


def test_largest_tensors_that_can_be_mapped() -> None:
    assert check.mappable(arg(2**32, 8), arg(2, 2, 2, 2, 8), arg(8, 64, arch="sm_100"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"box": (257, 1)}, "1 to 256 elements"),
        ({"box": (64, 257)}, "1 to 256 elements"),
        ({"box": (0, 1)}, "1 to 256 elements"),
        ({"box": (12, 1)}, "rows of a multiple of 16 bytes"),
        ({"box": (64,)}, "1 to 5 dimensions"),
        ({"swizzle": 16}, "a swizzle is 0, 32, 64 or 128"),
        ({"swizzle": 64}, "no less than a row of the box"),
        ({"strides": (8,)}, "multiples of 16"),
        ({"strides": (2**40,)}, "multiples of 16"),
        ({"offset": 8}, "multiples of 16"),
        ({"offset": 16}, "reaches over bytes 16 to 2064 of 2048"),
        ({"offset": -16}, "reaches over bytes -16"),
        ({"sizes": (64, 17)}, "reaches over bytes 0 to 2176 of 2048"),
        ({"sizes": (72, 16)}, "reaches over bytes 0 to 2064 of 2048"),
    ],
)
def test_maps_that_the_driver_would_refuse(change: dict[str, Any], message: str) -> None:
    right = {"sizes": (64, 16), "strides": (128,), "box": (64, 16), "swizzle": 128}
    for memory, error in ((arg(16, 64), OpError), (Scratch(2048), ValueError)):
        TensorMap(memory, dtypes.bfloat16, **right)
        with pytest.raises(error, match=message):
            TensorMap(memory, dtypes.bfloat16, **{**right, **change})


def test_no_map_reaches_a_byte_beyond_its_memory() -> None:
    TensorMap(Scratch(2048), dtypes.uint8, (128, 16), (128,), (64, 16))
    with pytest.raises(ValueError, match="reaches over bytes 0 to 2049 of 2048"):
        TensorMap(Scratch(2048), dtypes.uint8, (129, 16), (128,), (64, 16))


def test_map_prints_in_the_order_of_a_tensor() -> None:
    shown = "x [16, 64] bfloat16, boxes of [8, 32], swizzled by 64 bytes"
    assert str(TensorMap.of(arg(16, 64), (32, 8), 64)) == shown
    part = TensorMap(Scratch(256), dtypes.float32, (8, 2), (96,), (4, 2), offset=32)
    assert str(part) == "scratch memory from byte 32 [2, 8] float32, boxes of [2, 4]"


# The maps that a kernel gets

MAPS = "const __grid_constant__ TensorMap"


def test_map_follows_its_tensor(kernel: MakeKernel, driver: Driver) -> None:
    """Encoded once; its address is replaced when it differs from that of the last call."""
    made = kernel("mapped", text("mapped", f"float* out, {MAPS} x_map, int rows, {MAPS} y_map, float epsilon"))
    x, y = arg(16, 64), arg(32, 8, name="y", dtype="float32")
    maps = {"x_map": TensorMap.of(x, (64, 8), 128), "y_map": TensorMap(y, y.dtype, (4, 32), (32,), (4, 2), 0, 16)}
    words = ("out", "y", "x"), (("epsilon", "d"),), {}
    bound = driver.bind([made().launch(1, 64, rows=3, **maps)], *words)
    assert driver.encoded == [
        (1, 2, (64, 16), (128, 0), (64, 8), (1, 1), 0, 3, 3, 0),
        (2, 2, (4, 32), (32, 0), (4, 2), (1, 1), 0, 0, 3, 0),
    ]
    steps = [(1, 2), (1, 2), (3, 2), (3, 4), (1, 2)]
    for x_page, y_page in steps:
        call(bound, 7, PAGE, y_page * PAGE, x_page * PAGE, 0.5)
    assert [values for *_, values in driver.launches] == [
        {"out": PAGE, "x_map": (0, i * PAGE), "rows": 3, "y_map": (1, j * PAGE + 16), "epsilon": 0.5} for i, j in steps
    ]
    assert len(driver.encoded) == 2
    assert sorted(driver.replaced[:2]) == [PAGE, 2 * PAGE + 16]
    assert driver.replaced[2:4] == [3 * PAGE, 4 * PAGE + 16]
    assert len(driver.replaced) == 6


def test_launches_of_a_plan_have_their_own_maps(kernel: MakeKernel, driver: Driver) -> None:
    """In each launch's own parameters, for one tensor or for scratch memory that one launch writes and the next
    reads."""
    first = kernel("first", text("first", f"{MAPS} x_map, {MAPS} to"))
    second = kernel("second", text("second", f"float* out, {MAPS} x_map, float* counts, {MAPS} from_"))
    x, memory, counts = arg(16, 64), Scratch(1000), Scratch(64, zeroed=True)
    x_map, part = TensorMap.of(x, (64, 8)), TensorMap(memory, x.dtype, (64, 2), (128,), (64, 1), 0, 128)
    marks = TensorMap(counts, dtypes.int32, (16,), (), (16,))
    launches = [first().launch(1, 64, x_map=x_map, to=part)]
    launches += [second().launch(1, 64, x_map=x_map, counts=counts, from_=one) for one in (part, marks)]
    lies = [2**20]
    workspace = pytest.MonkeyPatch()
    with workspace.context() as patch:
        patch.setattr("pyops._core.launch.workspace.zeros", lambda *_: 2**21)
        bound = driver.bind(launches, ("out", "x"), (), {}, lambda *_: (None, lies[0]))
        for lies[0], page in ((2**20, 1), (2**20, 1), (2**22, 1), (2**22, 2)):
            call(bound, 0, PAGE, page * PAGE)
    seen = [values for *_, values in driver.launches]
    assert seen == [
        values
        for at, page in ((2**20, 1), (2**20, 1), (2**22, 1), (2**22, 2))
        for values in (
            {"x_map": (0, page * PAGE), "to": (1, at + 128)},
            {"out": PAGE, "x_map": (2, page * PAGE), "counts": 2**21, "from_": (3, at + 128)},
            {"out": PAGE, "x_map": (4, page * PAGE), "counts": 2**21, "from_": (5, 2**21)},
        )
    ]
    assert len(driver.encoded) == 6
    assert len(driver.replaced) == 6 + 0 + 2 + 3


def test_map_with_a_failed_update_is_updated_again(kernel: MakeKernel, driver: Driver) -> None:
    made = kernel("mapped", text("mapped", f"{MAPS} x_map, {MAPS} again"))
    x_map = TensorMap.of(arg(16, 64), (64, 8))
    bound = driver.bind([made().launch(1, 64, x_map=x_map, again=x_map)], ("x",), (), {})
    call(bound, 0, PAGE)
    driver.status = 700
    with pytest.raises(Driver.Error) as caught:
        call(bound, 0, 2 * PAGE)
    assert caught.value.status == 700
    assert len(driver.launches) == 1
    call(bound, 0, PAGE)
    assert driver.launches[1][-1] == {"x_map": (0, PAGE), "again": (1, PAGE)}
    assert len(driver.replaced) == 4


def test_maps_without_driver_or_device_support(
    kernel: MakeKernel, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kernel("mapped", text("mapped", f"{MAPS} x_map"))
    launches = [made().launch(1, 64, x_map=TensorMap.of(arg(16, 64), (64, 8)))]
    driver.status = 1
    with pytest.raises(OpError, match=r"^op: x: the driver refuses a tensor map: 1: x \[16, 64\] bfloat16, boxes"):
        driver.bind(launches, ("x",), (), {})
    monkeypatch.setattr(device, "get", lambda index: device.model("gfx942"))
    with pytest.raises(OpError, match=r"^op: x: tensor maps exist on compute capability 9\.0 and later"):
        driver.bind(launches, ("x",), (), {})
    calls = driver_calls.Driver(driver.launch, None, Driver.Error, lambda: 0)  # too old
    monkeypatch.setattr(driver_calls, "get", lambda: calls)
    monkeypatch.setattr(device, "get", lambda index: device.model())
    with pytest.raises(OpError, match=r"^op: x: tensor maps exist"):
        driver.bind(launches, ("x",), (), {})


def test_thread_without_a_context_gets_one(kernel: MakeKernel, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = mock.MagicMock()
    monkeypatch.setattr(tensor_map, "cupy", cupy)
    made = kernel("mapped", text("mapped", f"{MAPS} x_map"))
    driver.status = driver_calls.INVALID_CONTEXT
    driver.bind([made().launch(1, 64, x_map=TensorMap.of(arg(16, 64), (64, 8)))], ("x",), (), {})
    cupy.cuda.runtime.setDevice.assert_called_once_with(0)
    assert len(driver.encoded) == 1


@pytest.mark.parametrize(
    ("parameters", "fixed", "message"),
    [
        (f"{MAPS} x", {}, "nothing feeds the parameter x"),  # a tensor's address is no map
        (f"{MAPS} x", {"x": 3}, "x takes a TensorMap, got 3"),
        ("const float* x", {"x": TensorMap.of(arg(16, 64), (64, 8))}, r"x takes no TensorMap, got x \[16, 64\]"),
    ],
)
def test_maps_are_fed_to_maps(
    kernel: MakeKernel, driver: Driver, parameters: str, fixed: dict[str, Any], message: str
) -> None:
    made = kernel("mapped", text("mapped", parameters))
    with pytest.raises(TypeError, match=rf"test/mapped\.cu: {message}"):
        driver.bind([made().launch(1, 64, **fixed)], ("x",), (), {})


def test_map_needs_a_tensor_of_the_op(kernel: MakeKernel, driver: Driver) -> None:
    made = kernel("mapped", text("mapped", f"{MAPS} x_map"))
    with pytest.raises(TypeError, match=r"tensor map of x \[16, 64\].*: the op has no such tensor"):
        driver.bind([made().launch(1, 64, x_map=TensorMap.of(arg(16, 64), (64, 8)))], ("y",), (), {})


def test_map_without_grid_constant_is_no_parameter(kernel: MakeKernel) -> None:
    with pytest.raises(ValueError, match="parameter x_map has type 'TensorMap'"):
        assert kernel("mapped", text("mapped", "const TensorMap x_map")).signature


# On the CPU, and for a GPU

TENSOR_MAP = """
#if PYOPS_HOST
#define __grid_constant__
#endif
struct alignas(64) TensorMap {  // the words of a map on a GPU are the driver's own
    uint64_t address, strides[4];
    uint32_t magic, rank, element_bytes, swizzle, sizes[5], box[5], reserved[8];
};
"""
READS = f"""{TENSOR_MAP}
// Every field of a map, and the first 16-bit number of each row behind it.
extern "C" __global__ void reads(int64_t* out, const __grid_constant__ TensorMap x_map, int rows) {{
    if (threadIdx.x) return;
    const uint32_t* words = &x_map.magic;
    for (int i = 0; i < 4; ++i) out[i] = x_map.strides[i];
    for (int i = 0; i < 22; ++i) out[4 + i] = words[i];
    for (int i = 0; i < rows; ++i) {{
        out[26 + i] = *reinterpret_cast<const short*>(x_map.address + x_map.strides[0] * i);
    }}
}}
"""


def test_maps_on_the_host(kernel: MakeKernel) -> None:
    x = numpy.arange(6 * 72, dtype=numpy.int16).reshape(6, 72)
    out = numpy.zeros(26 + 5, numpy.int64)
    described = arg(6, 72)
    one = TensorMap(described, described.dtype, (64, 5), (144,), (32, 3), 64, offset=144 + 16)
    launched = kernel("reads", READS)().launch(1, 64, x_map=one, rows=5)
    for moved in (x, x + 1000):
        words = (out.ctypes.data, moved.ctypes.data)
        host.run_launches([launched], ("out", "x"), (out.nbytes, x.nbytes), (), {}, *words)
        assert out[:4].tolist() == [144, 0, 0, 0]
        assert out[4:26].tolist() == [0x70616D74, 2, 2, 2, 64, 5, 0, 0, 0, 32, 3, *(0,) * 11]
        assert out[26:].tolist() == moved[1:, 8].tolist()


def test_scratch_memory_on_the_host(kernel: MakeKernel) -> None:
    """Reads a workspace: the bytes that the host fills it with."""
    out = numpy.zeros(26 + 5, numpy.int64)
    for memory, expected in ((Scratch(2048), -1), (Scratch(2048, zeroed=True), 0)):
        one = TensorMap(memory, dtypes.bfloat16, (64, 5), (256,), (64, 5), offset=256)
        launched = kernel("reads", READS)().launch(1, 64, x_map=one, rows=5)
        host.run_launches([launched], ("out",), (out.nbytes,), (), {}, out.ctypes.data)
        assert out[26:].tolist() == [expected] * 5


def test_fake_driver_takes_maps(kernel: MakeKernel) -> None:
    from benchmarks.fake_driver import fake_driver

    made = kernel("mapped", text("mapped", f"float* out, {MAPS} x_map"))
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    with fake_driver():
        one = made().launch(1, 64, x_map=TensorMap.of(arg(16, 64), (64, 8)))
        bound = launch.bind("op", 0, [one], [1], ("out", "x"), (), {})
        assert not bound.launch(0, PAGE, x.data_ptr())


DOUBLED = """
// doubled[y, x] = 2 input[y, x], in rows of `pitch`
extern "C" __global__ void doubled(float* doubled, const float* input, int rows, int columns, int pitch, int stride) {
    for (int y = blockIdx.x; y < rows; y += gridDim.x) {
        for (int x = threadIdx.x; x < columns; x += blockDim.x) doubled[y * pitch + x] = 2 * input[y * stride + x];
    }
}
"""
SUMMED = f"""{TENSOR_MAP}
constexpr int ROWS = 8, COLUMNS = 32;

// A box of each of two maps, with zeros outside of the tensors, to shared memory.
DEVICE void load_boxes(float* boxes, const TensorMap* const* maps, uint64_t* barrier, int x, int y) {{
#if PYOPS_HOST
    for (int i = threadIdx.x; i < 2 * ROWS * COLUMNS; i += blockDim.x) {{
        const TensorMap& map = *maps[i / (ROWS * COLUMNS)];
        const unsigned row = y + i / COLUMNS % ROWS, column = x + i % COLUMNS;
        const float* from = reinterpret_cast<const float*>(map.address + row * map.strides[0]) + column;
        boxes[i] = row < map.sizes[1] && column < map.sizes[0] ? *from : 0.0f;
    }}
    __syncthreads();
#elif __CUDA_ARCH__ >= 900
    const uint32_t bar = uint32_t(__cvta_generic_to_shared(barrier)), to = uint32_t(__cvta_generic_to_shared(boxes));
    if (threadIdx.x == 0) {{
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(2 * ROWS * COLUMNS * 4)
                     : "memory");
        for (int i = 0; i < 2; ++i) {{
            asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                         " [%0], [%1, {{%3, %4}}], [%2];"
                         ::"r"(to + i * ROWS * COLUMNS * 4), "l"(maps[i]), "r"(bar), "r"(x), "r"(y) : "memory");
        }}
    }}
    __syncthreads();
    uint32_t done = 0;
    while (!done) {{
        asm volatile("{{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}}"
                     : "=r"(done) : "r"(bar) : "memory");
    }}
#endif
}}

// out[y, x] = doubled[y, x] + input[y, x]
extern "C" __global__ void summed(float* out, const __grid_constant__ TensorMap doubled_map,
                                  const __grid_constant__ TensorMap input_map, int rows, int columns) {{
    __shared__ __align__(128) float boxes[2 * ROWS * COLUMNS];
    __shared__ uint64_t barrier;
    const int x = blockIdx.x * COLUMNS, y = blockIdx.y * ROWS;
    const TensorMap* const maps[] = {{&doubled_map, &input_map}};
    load_boxes(boxes, maps, &barrier, x, y);
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) {{
        const int row = y + i / COLUMNS, column = x + i % COLUMNS;
        if (row < rows && column < columns) out[row * columns + column] = boxes[i] + boxes[ROWS * COLUMNS + i];
    }}
}}
"""
PORTABLE = """
// out[y, x] = 3 input[y, x]
extern "C" __global__ void portable(float* out, const float* input, int rows, int columns, int stride) {
    for (int y = blockIdx.x; y < rows; y += gridDim.x) {
        for (int x = threadIdx.x; x < columns; x += blockDim.x) out[y * columns + x] = 3 * input[y * stride + x];
    }
}
"""


@pytest.fixture
def triple(kernel: MakeKernel) -> Any:
    """An op with maps of an argument and of scratch memory, and with a portable kernel."""
    first, second, plain = kernel("doubled", DOUBLED), kernel("summed", SUMMED), kernel("portable", PORTABLE)
    planned: list[str] = []

    @pyops.op(out="out")
    def triple(out: Tensor, input: Tensor) -> None:
        """``out = 3 * input``."""
        out.copy_(3 * input)

    @triple.plan
    def _(out: TensorArg, input: TensorArg) -> list[Launch]:
        (rows, columns), stride = input.shape, input.strides[0]
        sizes = {"rows": rows, "columns": columns}
        if not check.mappable(input):
            planned.append("portable")
            return [plain().launch(min(rows, 8), 64, stride=stride, **sizes)]
        planned.append("maps")
        pitch = -(-columns // 4) * 4
        memory = Scratch(4 * rows * pitch)
        doubled_map = TensorMap(memory, input.dtype, (columns, rows), (4 * pitch,), (32, 8))
        maps = {"doubled_map": doubled_map, "input_map": TensorMap.of(input, (32, 8))}
        grid = (-(-columns // 32), -(-rows // 8))
        return [
            first().launch(8, 64, doubled=memory, pitch=pitch, stride=stride, **sizes),
            second().launch(grid, 64, **sizes, **maps),
        ]

    @triple.example
    def _(make: Any, *, columns: int = 100) -> tuple[Any, ...]:
        return make.empty(20, columns, dtype="float32"), make.randn(20, columns, dtype="float32")

    triple.planned = planned
    return triple


def test_example_shows_and_warms_up_its_plan(triple: Any) -> None:
    shown = show.show("triple", {})
    assert "input_map: input [20, 100] float32, boxes of [8, 32]" in shown
    assert "doubled_map: scratch memory [20, 100] float32, boxes of [8, 32]" in shown
    wanted = {
        arch: [one.kernel.file for _, one in compile_ahead.specialisations(["triple"], {}, device.model(arch))]
        for arch in ("sm_90", "sm_80", "gfx942")
    }
    assert wanted["sm_90"] == ["test/doubled.cu", "test/summed.cu"]
    assert wanted["sm_80"] == wanted["gfx942"] == ["test/portable.cu"]


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_compiles_for_a_gpu(kernel: MakeKernel, arch: str) -> None:
    for name, source in (("reads", READS), ("summed", SUMMED)):
        report = offline.compile(name, "", kernel(name, source)().text, arch)
        # Nothing copies a map to a stack, where TMA cannot read it.
        assert (report.spill_bytes, report.stack_bytes) == (0, 0)


@pytest.mark.parametrize("where", KERNELS)
def test_boxes_match_their_description(triple: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At addresses that change from call to call, in views, and by the portable kernel where there is no map."""
    monkeypatch.setenv("PYOPS_TRUST", "1")  # else a kernel that no GPU has run is planned once more, as portable
    with config.cpu("kernels"):
        whole = torch.randn(40, 104, device=where)
        views = [whole[:20, :100], whole[20:, :100], whole[:20, 4:104], whole[20:, :100], whole[1:21, 1:101]]
        for x in (one for view in views for one in (view, view, view + 1, view[:, :99])):
            out = torch.full(x.shape, 7.0, device=where)
            triple(out, x)
            assert torch.equal(out, 3 * x)
        triple(torch.empty(0, 100, device=where), whole[:0, :100])
    mapped = (device.host() if where == "cpu" else device.get(0)).supports("tma")
    assert triple.planned == ["maps" if mapped else "portable"] * 3 + ["portable"] * 3


@pytest.mark.gpu
def test_graph_keeps_its_captured_maps(triple: Any) -> None:
    inputs = [torch.randn(20, 100, device="cuda") for _ in range(3)]
    outs = [torch.zeros_like(x) for x in inputs]
    triple(outs[2], inputs[2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triple(outs[0], inputs[0])
        triple(outs[1], inputs[1])
    for _ in range(2):
        triple(outs[2], inputs[2])  # with maps of other addresses
        for x in inputs:
            x.normal_()
        graph.replay()
        for out, x in zip(outs[:2], inputs[:2], strict=True):
            assert torch.equal(out, 3 * x)
