"""First calls during graph capture, on a driver with CUDA's rules about captures."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pyops
from pyops._core import config
from pyops._core.launch import launch, workspace
from pyops._core.launch.kernel import Kernel
from pyops._core.launch.scratch import Scratch
from pyops._core.system import device, driver
from pyops._core.tensors import tensor
from pyops._core.text import compiler
from pyops._core.text.compiler import Compiled
from pyops.ops.collective import communicator, shared_memory
from tests.core.conftest import Driver, call, text

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # cudaStreamCaptureMode
UNSUPPORTED, INVALIDATED = 900, 901  # cudaErrorStreamCapture...
CAPTURED, EAGER, NON_BLOCKING = 7, 8, 1


class Refusal(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Cuda:
    """A device with one stream that this thread captures in the mode "global", and the CuPy runtime calls that ops use.

    A forbidden call raises, and invalidates the capture. Memory holds garbage until it is written.
    """

    is_hip = False
    streamNonBlocking = NON_BLOCKING
    CUDARuntimeError = Refusal

    def __init__(self) -> None:
        self.modes: dict[int, int] = {}
        self.capturing = True
        self.graph: list[Any] = []
        self.streams: dict[int, bool] = {CAPTURED: True, EAGER: True}  # whether a stream is non-blocking
        self.pending: dict[int, list[Any]] = {}  # the unfinished work of a stream
        self.waited: list[int] = []
        self.memory: dict[int, bytearray] = {}
        self.runtime = self
        self.cuda = SimpleNamespace(runtime=self, Memory=self.allocate, Device=lambda index: nullcontext())
        self.cuda.alloc = lambda nbytes: SimpleNamespace(ptr=self.malloc(nbytes))

    # Entry points that ctypes finds in the driver.

    def ThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        thread = threading.get_ident()
        self.modes[thread], mode._obj.value = mode._obj.value, self.mode
        return 0

    def StreamIsCapturing(self, stream: Any, status: Any) -> int:
        status._obj.value = int(self.capturing and stream.value == CAPTURED)
        return 0

    # Entry points of CuPy's runtime.

    @property
    def mode(self) -> int:
        return self.modes.get(threading.get_ident(), GLOBAL)

    def refuse(self) -> None:
        self.capturing = False
        raise Refusal(UNSUPPORTED)

    def unsafe(self) -> None:
        if self.capturing and self.mode != RELAXED:
            self.refuse()

    def malloc(self, nbytes: int) -> int:
        self.unsafe()
        address = (len(self.memory) + 1) << 20
        self.memory[address] = bytearray(b"\xaa" * nbytes)
        return address

    def allocate(self, nbytes: int) -> Any:
        return SimpleNamespace(ptr=self.malloc(nbytes))

    def streamCreateWithFlags(self, flags: int) -> int:
        self.unsafe()
        stream = 100 + len(self.streams)
        self.streams[stream] = flags == NON_BLOCKING
        return stream

    def streamDestroy(self, stream: int) -> None:
        assert not self.pending.get(stream)
        self.streams[stream]  # it exists
        del self.streams[stream]

    def memsetAsync(self, address: int, value: int, nbytes: int, stream: int) -> None:
        if self.capturing and stream == CAPTURED:
            self.graph.append(("memset", address, nbytes))
        elif self.capturing and not self.streams.get(stream):
            self.refuse()  # the default stream, or one that waits for it
        else:
            self.pending.setdefault(stream, []).append((address, value, nbytes))

    def streamSynchronize(self, stream: int) -> None:
        self.unsafe()
        if self.capturing and stream == CAPTURED:
            self.refuse()
        self.waited.append(stream)
        for address, value, nbytes in self.pending.pop(stream, []):
            self.memory[address][:nbytes] = bytes([value]) * nbytes


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    made = Cuda()
    for module in (driver, workspace, launch):
        monkeypatch.setattr(module, "cupy", made)
    monkeypatch.setattr(driver, "_capture_call", lambda name: getattr(made, name))
    monkeypatch.setattr(driver, "raise_limits", lambda *_: made.unsafe())
    monkeypatch.setattr(workspace, "_pieces", {})
    yield made
    assert not made.graph, "what prepares a call has become part of the graph"
    assert set(made.streams) == {CAPTURED, EAGER}


def loading(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> pyops.Op:
    """An op with a kernel that calls `then` when it is loaded."""

    def load(index: int, text: str, entry: str, kernel: str, constants: str, *_: Any) -> Compiled:
        then()
        return Compiled(kernel, constants, index, "sm_90", 0, "fake", 0, 0, 0, 1, None)

    monkeypatch.setattr(compiler, "load", load)
    op = pyops.registry["rms_norm"]
    monkeypatch.setattr(op, "specialisations", {})
    return op


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("failure", [None, pyops.CompileError("k.cu", "N=1", "no"), KeyboardInterrupt(), Refusal(2)])
def test_kernel_is_loaded_in_relaxed_mode(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, mode: int, failure: BaseException | None
) -> None:
    """Afterwards the thread is back in its mode, even after an error. Errors pass through."""
    seen = []

    def then() -> None:
        cuda.unsafe()
        seen.append(cuda.mode)
        if failure is not None:
            raise failure

    op = loading(monkeypatch, then)
    cuda.modes[threading.get_ident()] = mode
    made = Kernel("norm/rms_norm.cu")(SIZE=mode)
    if failure is None:
        assert op.load(0, made, 1000).kernel == "norm/rms_norm.cu"
    else:
        with pytest.raises(type(failure)) as caught:
            op.load(0, made, 1000)
        assert caught.value is failure
    assert (seen, cuda.mode, cuda.capturing) == ([RELAXED], mode, True)


@pytest.mark.parametrize("status", [UNSUPPORTED, INVALIDATED, 906])
def test_driver_refusal_is_a_capture_error(cuda: Cuda, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    refusal = Refusal(status)

    def then() -> None:
        raise refusal

    op = loading(monkeypatch, then)
    with pytest.raises(pyops.CaptureError, match=r"^rms_norm: the driver refuses to load norm/rms_norm\.cu") as caught:
        op.load(0, Kernel("norm/rms_norm.cu")(SIZE=status))
    assert caught.value.__cause__ is refusal
    assert cuda.mode == GLOBAL


def test_driver_without_the_call_refuses(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_capture_call", lambda name: None)
    op = loading(monkeypatch, cuda.unsafe)
    with pytest.raises(pyops.CaptureError):
        op.load(0, Kernel("norm/rms_norm.cu")(SIZE=1))
    cuda.capturing = False
    op.load(0, Kernel("norm/rms_norm.cu")(SIZE=1))


def test_refused_load_is_not_blamed_on_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a warning about the folder, nor a second compile."""
    pytest.importorskip("cupy_backends")
    from cupy_backends.cuda.api.driver import CUDADriverError

    class Refused(CUDADriverError):  # type: ignore[misc]
        def __init__(self) -> None:
            self.status = UNSUPPORTED

    def refuse(*_: Any) -> Any:
        raise Refused

    import cupy

    monkeypatch.setattr(cupy.cuda, "Device", lambda index: nullcontext())
    monkeypatch.setattr(device, "get", lambda index: device.model())
    monkeypatch.setattr(compiler, "_load_module", refuse)
    monkeypatch.setattr(compiler, "_compile_in_memory", lambda *_: pytest.fail("compiled again"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Refused):
            compiler._load(0, "", "f", "k.cu", "", ())


def test_threads_do_not_share_the_mode(cuda: Cuda) -> None:
    """One thread has left the context while another is within it."""
    inside, left = threading.Event(), threading.Event()

    def stay() -> tuple[int, int]:
        with driver.relaxed_capture():
            inside.set()
            assert left.wait(10)
            within = cuda.mode
        return within, cuda.mode

    def go() -> int:
        assert inside.wait(10)
        with driver.relaxed_capture(), driver.relaxed_capture():
            pass
        left.set()
        return cuda.mode

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(stay), pool.submit(go)
        assert (first.result(), second.result()) == ((RELAXED, GLOBAL), GLOBAL)


def test_thread_without_a_context_gets_one(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def exchange(mode: Any) -> int:
        if not calls:
            return driver.INVALID_CONTEXT
        return cuda.ThreadExchangeStreamCaptureMode(mode)

    monkeypatch.setattr(driver, "_capture_call", lambda name: exchange)
    monkeypatch.setattr(cuda, "getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(cuda, "setDevice", calls.append, raising=False)
    with driver.relaxed_capture():
        assert cuda.mode == RELAXED
    assert (calls, cuda.mode) == ([3], GLOBAL)


@pytest.mark.parametrize("stream", [CAPTURED, EAGER])
def test_zeros_are_zero_before_a_captured_call_returns(cuda: Cuda, stream: int) -> None:
    """Whichever stream needs them first. Addresses that a graph may hold stay as they are."""
    first = workspace.zeros("op", 0, stream, 100)
    assert cuda.memory[first] == bytes(workspace._MIN_BYTES)
    assert workspace.zeros("op", 0, stream, workspace._MIN_BYTES) == first
    larger = workspace.zeros("op", 0, stream, workspace._MIN_BYTES + 1)
    assert cuda.memory[larger] == bytes(workspace._MIN_BYTES + 1)
    assert workspace.zeros("op", 0, CAPTURED + EAGER - stream, 100) not in (first, larger)
    assert len(cuda.memory) == 3
    assert not {CAPTURED, EAGER} & set(cuda.waited), "a call waits for work on a stream of the caller"
    assert (cuda.mode, cuda.capturing) == (GLOBAL, True)


def test_memory_that_the_driver_refuses(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "streamCreateWithFlags", lambda flags: cuda.refuse())
    message = r"^op: the driver refuses to allocate a workspace of 100 bytes while a graph is captured"
    with pytest.raises(pyops.CaptureError, match=message):
        workspace.zeros("op", 0, CAPTURED, 100)
    assert not workspace._pieces.get((0, CAPTURED, True)), "what was never cleared is given to the next call"


def test_scratch_of_a_cupy_capture_is_kept(cuda: Cuda) -> None:
    """CuPy would give it to the next array, although each replay writes there."""
    owner, captured = workspace.allocate_cupy("op", 0, CAPTURED, 100)
    assert owner is None
    assert workspace.allocate_cupy("op", 0, CAPTURED, 100) == (None, captured)
    assert workspace.zeros("op", 0, CAPTURED, 100) != captured
    cuda.capturing = False
    owner, eager = workspace.allocate_cupy("op", 0, CAPTURED, 100)
    assert eager == owner.ptr != captured


def test_sync_skips_captured_launches(cuda: Cuda, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYOPS_SYNC=1 waits for eager launches only."""
    monkeypatch.setattr(config, "sync", lambda: True)
    one = Kernel("test/one.cu", text=text("one", "float* out"))
    bound = driver.bind([one().launch(1, 64)], ("out",), (), {})
    for stream in (CAPTURED, EAGER):
        call(bound, stream, 64)
    assert [stream for *_, stream, _ in driver.launches] == [CAPTURED, EAGER]
    assert cuda.waited == [EAGER]
    assert (cuda.mode, cuda.capturing) == (GLOBAL, True)


def test_captured_launch_has_zeros_and_scratch(cuda: Cuda, driver: Driver) -> None:
    made = Kernel("test/two.cu", text=text("two", "float* out, float* counts, float* partial"))
    one = made().launch(1, 64, counts=Scratch(100, zeroed=True), partial=Scratch(100))
    bound = driver.bind([one], ("out",), (), {}, workspace.allocate_cupy)
    for _ in range(2):
        call(bound, CAPTURED, 64)
    first, second = (values for *_, values in driver.launches)
    assert first == second
    assert not any(cuda.memory[first["counts"]])
    assert cuda.capturing


def test_scalars_of_cupy_captures_outlive_the_cache(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made on a stream that is not captured, and a graph's scalars stay when the cache is emptied."""
    streams, destroyed_late = [EAGER], []

    class Stream:
        def __init__(self, non_blocking: bool) -> None:
            assert non_blocking
            cuda.unsafe()

        def __enter__(self) -> None:
            streams.append(99)

        def __exit__(self, *_: Any) -> None:
            streams.pop()

        def synchronize(self) -> None:
            cuda.unsafe()

        def __del__(self) -> None:
            if cuda.mode != RELAXED:
                destroyed_late.append(self)

    def full(shape: tuple[int, ...], value: float, dtype: str) -> Any:
        cuda.unsafe()
        assert streams[-1] == 99
        return SimpleNamespace(shape=shape, value=value)

    cuda.cuda.Stream = Stream
    cuda.cuda.get_current_stream = lambda: SimpleNamespace(ptr=streams[-1])
    monkeypatch.setattr(tensor, "cupy", SimpleNamespace(cuda=cuda.cuda, full=full))
    monkeypatch.setattr(tensor, "library_of", lambda value: "cupy" if hasattr(value, "device") else None)
    for name in ("_numbers", "_in_graphs"):
        monkeypatch.setattr(tensor, name, {})

    class Device(nullcontext[None]):
        """As CuPy's: a context manager with a pointer and without a hash."""

        id = 0
        __hash__ = None  # type: ignore[assignment]

    like = SimpleNamespace(device=Device())
    eager = tensor.held_number(0.5, like)
    streams[0] = CAPTURED
    held = [tensor.held_number(value, like) for value in (0.5, 0.25)]
    assert held[0] is eager
    tensor._numbers.clear()
    again = [tensor.held_number(value, like) for value in (0.5, 0.25)]
    assert [one.value for one in again] == [0.5, 0.25]
    assert all(one is other for one, other in zip(held, again, strict=True))
    streams[0] = EAGER
    tensor._numbers.clear()
    assert tensor.held_number(0.25, like) is not held[1]
    assert not destroyed_late


def test_numbers_of_torch_captures_are_those_of_eager_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph fills only a number that was never seen before, and a graph's numbers stay when the cache is emptied."""
    captured = [False]
    fake = SimpleNamespace(cuda=SimpleNamespace(is_current_stream_capturing=lambda: captured[0]), float32=None)
    fake.tensor = lambda value, dtype, device: SimpleNamespace(value=value, filled_by_graph=captured[0])
    monkeypatch.setattr(tensor, "torch", fake)
    monkeypatch.setattr(tensor, "library_of", lambda value: "torch" if hasattr(value, "device") else None)
    monkeypatch.setattr(tensor, "number", lambda value, like: SimpleNamespace(value=value, filled_by_graph=True))
    for name in ("_numbers", "_in_graphs"):
        monkeypatch.setattr(tensor, name, {})
    like = SimpleNamespace(device="cuda:0", is_meta=False, is_cuda=True)

    eager = tensor.held_number(0.0, like)
    assert not eager.filled_by_graph
    captured[0] = True
    assert tensor.held_number(0.0, like) is eager
    assert tensor.held_number(0.25, like).filled_by_graph
    tensor._numbers.clear()
    assert tensor.held_number(0.0, like) is eager
    captured[0] = False
    assert not tensor.held_number(0.25, like).filled_by_graph


def test_ranks_load_and_allocate_during_a_capture(cuda: Cuda, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Kernel("test/rank.cu", text=text("rank", "float* out, const float* lost"))
    driver.kernels.append(made)
    seen: list[int] = []

    def load(*_: Any) -> Any:
        cuda.unsafe()
        seen.append(cuda.mode)
        return SimpleNamespace(function=driver.kernels.index(made))

    monkeypatch.setattr(compiler, "load", load)
    bound: dict[Any, Any] = {}
    memory = SimpleNamespace(device=SimpleNamespace(type="cuda", index=0), data_ptr=lambda: 64)
    stream = SimpleNamespace(cuda_stream=CAPTURED)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    for _ in range(2):
        communicator.launch_as_rank("all_reduce", made(), 1, 64, {}, {}, {"out": memory}, memory, bound)
    assert (seen, cuda.mode, len(bound), len(driver.launches)) == ([RELAXED], GLOBAL, 1, 2)

    monkeypatch.setattr(shared_memory, "cupy", cuda)
    monkeypatch.setattr(cuda, "ipcGetMemHandle", lambda address: bytes(64), raising=False)
    address, _ = shared_memory.allocate_shared_buffer_and_handle(100)
    assert cuda.memory[address] == bytes(100)
    assert cuda.capturing
