"""First calls during CUDA graph capture: kernels are loaded and workspaces made outside of the graph."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import pyops
from pyops import axes
from pyops._core.launch import workspace
from pyops._core.launch.kernel import Kernel, Launch
from pyops._core.launch.scratch import Scratch
from pyops._core.launch.tensor_map import TensorMap
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops.ops.collective import custom_all_reduce
from pyops.testing.calls import assert_same, clones, named, written
from tests.core.test_device import unload
from tests.ops.collective.test_collective import in_order, inputs
from tests.ops.collective.test_gpu import SIZE, Streams
from tests.support.calls import as_cupy, example

ROOT = Path(__file__).parents[2]


class Case(NamedTuple):
    """A call of an op, and the parts of its plan for an H200 besides launches."""

    op: str
    axes: dict[str, Any]
    has: set[str]

    def args(self, seed: int) -> list[Any]:
        return example(pyops.registry[self.op], "cuda", seed, **self.axes)


_DECODE = {"num_heads": 32, "num_kv_heads": 8}
CASES = {
    "one launch": Case("rms_norm", {}, set()),
    "two launches": Case("dynamic_scaled_fp8_quant", {}, {"launches", "scratch"}),
    "split product": Case("linear", {"num_tokens": 40, "input_size": 4090}, {"zeros", "scratch", "shared"}),
    "tensor maps": Case("linear", {"num_tokens": 40, "input_size": 4096}, {"maps", "shared"}),
    "grouped product": Case("cutlass_moe_mm", {"per_row": True}, {"launches", "scratch", "maps", "shared"}),
    "decode with splits": Case(
        "paged_attention_v1",
        _DECODE | {"num_tokens": 4, "min_seq_len": 4096, "max_seq_len": 4096},
        {"launches", "scratch"},
    ),
    "decode joined by its last block": Case(
        "paged_attention_v1", _DECODE | {"num_tokens": 64, "min_seq_len": 1024, "max_seq_len": 1024}, {"zeros"}
    ),
    "prefill": Case("paged_attention_varlen", {}, {"launches", "zeros", "scratch", "maps", "shared"}),
    "chunk scan": Case("mamba_chunk_scan_varlen", {}, {"launches", "scratch"}),
}
MODES = ("global", "thread_local", "relaxed")
SPLIT, DECODE = CASES["split product"], CASES["decode with splits"]
SPLITS = [Case("linear", {"num_tokens": rows, "input_size": 4090}, SPLIT.has) for rows in (24, 48)]


def has(launches: Sequence[Launch]) -> set[str]:
    values = [value for one in launches for value in one.fixed.values()]
    scratch = [value for value in values if isinstance(value, Scratch)]
    found = {
        "launches": len(launches) > 1,
        "zeros": any(one.zeroed for one in scratch),
        "scratch": any(not one.zeroed for one in scratch),
        "maps": any(isinstance(value, TensorMap) for value in values),
        "shared": any(one.shared > 48 << 10 for one in launches),
    }
    return {name for name, is_so in found.items() if is_so}


@pytest.mark.parametrize("case", [*CASES.values(), *SPLITS], ids=[*CASES, "24 rows", "48 rows"])
def test_plan_of_a_case_has_the_expected_parts(case: Case) -> None:
    assert has(axes.launches(pyops.registry[case.op], case.axes, device.model())) == case.has


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is loaded, and no stream has a workspace."""
    monkeypatch.setattr(workspace, "_pieces", {})
    unload()
    yield
    for op in pyops.registry.values():
        op.forget()


@pytest.fixture
def zeros() -> None:
    """The split product takes a workspace of zeros."""
    if "zeros" not in has(axes.launches(pyops.registry[SPLIT.op], SPLIT.axes, device.get(0))):
        pytest.skip(f"no split product of bfloat16 on {device.get(0).arch}")


def on_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.usefixtures("forgotten")(test))


def captured(op: Op, held: Sequence[Any], **how: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **how):
        op(*held)
    return graph


def assert_replays(op: Op, graph: torch.cuda.CUDAGraph, held: Sequence[Any], *contents: Sequence[Any]) -> None:
    """A replay works on the present contents of `held`, and gives the bits of an eager call."""
    for args in contents:
        for name, value in named(op, args).items():
            named(op, held)[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        eager = clones(args)
        op(*eager)
        torch.cuda.synchronize()
        assert_same(op, written(op, eager), written(op, held))


@on_gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_first_call_is_captured(case: Case, mode: str) -> None:
    op = pyops.registry[case.op]
    args, others = case.args(0), case.args(1)
    held = clones(args)
    assert not op.compiled()
    graph = captured(op, held, capture_error_mode=mode)
    assert op.compiled()
    assert_replays(op, graph, held, args, others)


@on_gpu
@pytest.mark.usefixtures("zeros")
def test_two_graphs_on_a_side_stream() -> None:
    """The second graph needs more zeros than the first left on their stream, and the first keeps its own."""
    op, stream, pool = pyops.registry["linear"], torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    contents = [[case.args(seed) for seed in (0, 1)] for case in SPLITS]
    held = [clones(first) for first, _ in contents]
    graphs = []
    for values in held:
        graphs.append(captured(op, values, stream=stream, pool=pool))
        pieces = workspace._pieces[0, stream.cuda_stream, True]
        pieces[-1].nbytes = 0  # too small for the next call
    assert len(pieces) == 2
    for _ in range(2):
        for graph, values, args in zip(graphs, held, contents, strict=True):
            assert_replays(op, graph, values, *args)


@on_gpu
@pytest.mark.usefixtures("zeros")
def test_streams_that_fork_within_a_capture() -> None:
    """Each stream has its own zeros, because its calls run at the same time."""
    op, side = pyops.registry["linear"], torch.cuda.Stream()
    args, others = SPLIT.args(0), SPLIT.args(1)
    held, beside = clones(args), clones(others)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        op(*held)
        with torch.cuda.stream(side):
            op(*beside)
        main.wait_stream(side)
        assert {stream for _, stream, _ in workspace._pieces} == {main.cuda_stream, side.cuda_stream}
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    for values, source in ((held, args), (beside, others)):
        eager = clones(source)
        op(*eager)
        assert_same(op, written(op, eager), written(op, values))


@on_gpu
def test_another_thread_may_call_during_a_capture() -> None:
    """Capture mode "global" forbids loading in every thread. Each call here is a first call, eager and not captured."""
    norm, held = pyops.registry["rms_norm"], CASES["one launch"].args(0)
    quantise = pyops.registry["static_scaled_fp8_quant"]
    inside = example(quantise, "cuda")
    eager, right = clones(held), clones(held)
    inside_right = clones(inside)
    stream, failed = torch.cuda.Stream(), list[BaseException]()
    torch.cuda.synchronize()

    def other() -> None:
        try:
            with torch.cuda.stream(stream):
                norm(*eager)
                workspace.zeros("op", 0, stream.cuda_stream, 100)
        except BaseException as error:
            failed.append(error)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        quantise(*inside)
    graph.replay()
    torch.cuda.synchronize()
    assert not failed
    norm(*right)
    quantise(*inside_right)
    assert_same(norm, written(norm, right), written(norm, eager))
    assert_same(quantise, written(quantise, inside_right), written(quantise, inside))


@on_gpu
def test_warmup_during_a_capture() -> None:
    """Its threads load kernels while this one captures."""
    x = torch.randn(16, 1232, device="cuda")
    out = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert len(pyops.warmup("rms_norm", hidden_size=[1232, 1240])) > 2
        pyops.rms_norm(out, x, None, 1e-6)
    graph.replay()
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (1232,), None, 1e-6))


@on_gpu
def test_kernel_that_fails_to_compile_leaves_the_capture() -> None:
    broken = Kernel("test/broken.cu", text='extern "C" __global__ void broken(float* out) { undeclared; }')

    @pyops.op(out="out")
    def captured_broken(out: torch.Tensor) -> None: ...

    captured_broken.plan(lambda out: broken().launch(grid=1, block=1))
    case, op = CASES["one launch"], pyops.registry["rms_norm"]
    args, others = case.args(0), case.args(1)
    held, out = clones(args), torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(pyops.CompileError, match="undeclared"):
            captured_broken(out)
        op(*held)
    assert_replays(op, graph, held, args, others)


@on_gpu
@pytest.mark.parametrize(("switch", "name"), [("PYOPS_SYNC", "rms_norm"), ("PYOPS_CHECK", "reshape_and_cache_flash")])
def test_switches_that_wait_leave_a_capture_alone(switch: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch, "1")
    op = pyops.registry[name]
    args, others = example(op, "cuda"), example(op, "cuda", seed=1)
    held = clones(args)
    assert_replays(op, captured(op, held), held, args, others)


@on_gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [CASES["one launch"], SPLIT, DECODE], ids=["one launch", "split product", "decode"])
def test_cupy_captures_a_first_call(case: Case, mode: str) -> None:
    """Scratch memory and scalars of the call belong to the graph: later arrays do not overwrite them."""
    import cupy

    op, runtime = pyops.registry[case.op], cupy.cuda.runtime
    args = [0.5 if p.number else value for p, value in zip(op.parameters, case.args(0), strict=True)]
    others = [0.5 if p.number else value for p, value in zip(op.parameters, case.args(1), strict=True)]
    held = clones(args)
    arrays = [as_cupy(value) for value in held]
    stream = cupy.cuda.Stream(non_blocking=True)
    modes = (runtime.streamCaptureModeGlobal, runtime.streamCaptureModeThreadLocal, runtime.streamCaptureModeRelaxed)
    torch.cuda.synchronize()
    with stream:
        stream.begin_capture(modes[MODES.index(mode)])
        op(*arrays)
        graph = stream.end_capture()
        later = [cupy.full(1 << size, 7, cupy.uint8) for size in range(9, 24)]
    for contents in (args, others):
        for name, value in named(op, contents).items():
            named(op, held)[name].copy_(value)
        torch.cuda.synchronize()
        graph.launch(stream)
        stream.synchronize()
        eager = clones(contents)
        op(*eager)
        torch.cuda.synchronize()
        assert_same(op, written(op, eager), written(op, held))
    assert all(bool((one == 7).all()) for one in later)


@on_gpu
def test_ranks_capture_a_first_all_reduce() -> None:
    for kernel in (custom_all_reduce._all_reduce, custom_all_reduce._packets):
        kernel._loaded.clear()
    world = Streams(2)
    try:
        values = inputs(2, 4096, torch.float32)
        held, outs = [value.cuda() for value in values], [torch.empty(4096, device="cuda") for _ in values]
        graphs = []
        for rank, stream in enumerate(world.streams):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], stream=stream):
                pyops.all_reduce(world.handles[rank], held[rank], outs[rank], world.buffers[rank], SIZE)
        for seed in (1, 2):
            for one, value in zip(held, values, strict=True):
                one.copy_(value * seed)
            torch.cuda.synchronize()
            for graph, stream in zip(graphs, world.streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            for out in outs:
                assert torch.equal(out.cpu(), in_order([value * seed for value in values]))
    finally:
        world.close()


FIRST = """
import torch

x = torch.randn(16, 4090, device="cuda").bfloat16()
weight = torch.randn(136, 4090, device="cuda").bfloat16()
norm, product = torch.empty_like(x), torch.empty(16, 136, device="cuda", dtype=torch.bfloat16)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    import pyops

    pyops.rms_norm(norm, x, None, 1e-6)
    pyops.linear(product, x, weight, None)
for _ in range(2):
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    right = torch.nn.functional.rms_norm(x.float(), (4090,), None, 1e-6)
    torch.testing.assert_close(norm.float(), right, rtol=2**-7, atol=0)
    right = x.double() @ weight.double().T
    # One rounding to bfloat16, and as many to float32 as there are terms.
    bound = 2**-8 * right.abs() + 4090 * 2**-24 * (x.double().abs() @ weight.double().abs().T)
    assert bool(((product.double() - right).abs() <= bound).all())
    captured = product.clone()
    pyops.linear(product, x, weight, None)
    assert torch.equal(captured, product)
assert {one.origin for one in (*pyops.rms_norm.compiled(), *pyops.linear.compiled())} == {"compiled"}
print("captured")
"""


@pytest.mark.gpu
def test_first_call_of_a_process_with_an_empty_cache(tmp_path: Path) -> None:
    """CuPy is imported, and kernels are compiled, while the graph is captured."""
    environment = os.environ | {"CUPY_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", FIRST], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "captured", done.stderr


@on_gpu
def test_threads_capture_one_after_the_other() -> None:
    """Each graph is captured by its own thread under a lock, as a server does it."""
    op = pyops.registry["linear"]
    args, others = SPLIT.args(0), SPLIT.args(1)
    both = [clones(args), clones(args)]

    def capture(held: Sequence[Any]) -> torch.cuda.CUDAGraph:
        return captured(op, held, stream=torch.cuda.Stream(), capture_error_mode="thread_local")

    graphs = []
    for held in both:
        with ThreadPoolExecutor(1) as pool:
            graphs.append(pool.submit(capture, held).result())
    for graph, held in zip(graphs, both, strict=True):
        assert_replays(op, graph, held, args, others)
