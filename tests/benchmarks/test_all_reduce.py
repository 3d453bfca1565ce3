"""The all-reduce benchmark without GPUs: predictions, gloo processes, a fake device."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pyops
from benchmarks import all_reduce


def test_the_page_has_the_predictions() -> None:
    page = (Path(__file__).parents[2] / "docs" / "many_gpus.md").read_text()
    assert page.split("<!-- predicted -->\n")[1].split("<!-- /predicted -->")[0] == f"{all_reduce.table()}\n"


def test_predictions_of_all_reduce_by_hand() -> None:
    """Packets of 8 KiB: a launch, a latency, and 16 KiB over a link. Two-shot of 8 MiB: flags, a copy, twice 7 MiB."""
    assert all_reduce.predicted(2, 8192) == pytest.approx(1.3e-6 + 1e-6 + 16384 / 300e9)
    copy = 1.55e-6 + (8 << 20) / 4.5e12
    assert all_reduce.predicted(8, 8 << 20) == pytest.approx(
        1.5e-6 + copy + 0.45e-6 + 1.5e-6 + 2 * (1e-6 + 7 * (1 << 20) / 318e9), rel=0.01
    )
    less = copy - (1.5e-6 - 0.65e-6 - 0.45e-6)  # for the copy; vLLM's first flag takes longer
    assert all_reduce.predicted(8, 8 << 20) - all_reduce.predicted(8, 8 << 20, by_vllm=True) == pytest.approx(less)
    for nbytes, measured in ((1 << 20, 8.5e-6), (2 << 20, 11.8e-6), (4 << 20, 18.9e-6), (8 << 20, 33.2e-6)):
        assert all_reduce.predicted(2, nbytes) == pytest.approx(measured, rel=0.03)  # on two H200s


def test_gloo_process_measures_sums_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The work of each process of `torchrun --nproc-per-node 2 -m benchmarks.all_reduce` without a GPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"LOCAL_RANK": 0, "RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    all_reduce.main(["8192"])
    title, columns, line = capsys.readouterr().out.splitlines()
    assert (title, columns.split()) == ("CPU x 1", ["bytes", "predicted", "pyops", "gloo"])
    nbytes, _, *times = line.split()
    assert nbytes == "8192"
    assert all(float(one) > 0 for one in times)
    assert not torch.distributed.is_initialized()


def test_missing_processes_or_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="expected processes of torchrun"):
        all_reduce.main([])
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="expected a GPU for each process, got 1"):
        all_reduce.main([])
    monkeypatch.setattr(all_reduce, "reach_each_other", lambda *_: False)
    with pytest.raises(SystemExit, match="each of which reaches the memory of every other"):
        all_reduce._of_gpus(None, torch.device("cuda", 0))


class _Device:
    """Fakes of torch.cuda, pyops and torch.distributed for one rank, in which a sum is its input."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.capturing, self.calls = False, list[Any]()
        for name in ("synchronize", "CUDAGraph", "Event", "graph", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        for name in ("all_reduce", "get_graph_buffer_ipc_meta", "register_graph_buffers"):
            monkeypatch.setattr(pyops, name, getattr(self, name))
        custom = SimpleNamespace(fa=7, buffer=8, max_size=9, close=lambda: None)
        monkeypatch.setattr(pyops, "CustomAllReduce", lambda *_: custom)
        monkeypatch.setattr(all_reduce, "reach_each_other", lambda *_: True)

    def synchronize(self) -> None: ...

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: 4.0)

    @contextmanager
    def graph(self, graph: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.capturing = True
        yield
        self.capturing = False
        self.log.append("captured")

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def all_reduce(self, fa: int, x: torch.Tensor, out: torch.Tensor, buffer: int, size: int) -> None:
        assert (fa, buffer, size) in ((7, 8, 9), (7, 0, 0))
        assert buffer or self.capturing, "only a captured call may leave its input where it is"
        self.calls.append(buffer)
        out.copy_(x)

    def get_graph_buffer_ipc_meta(self, fa: int) -> Any:
        return [fa], [0]

    def register_graph_buffers(self, fa: int, handles: Any, offsets: Any) -> None:
        assert (handles, offsets) == ([[fa]], [[0]])
        self.log.append("registered")


def test_gpu_contenders_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are registered after the capture and before the first replay, and 400 calls are timed."""
    device = _Device(monkeypatch)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ways, _ = all_reduce._of_gpus(torch.distributed.group.WORLD, torch.device("cuda", 0))
        assert [way.name for way in ways][:3] == ["pyops", "in place", "nccl"]
        monkeypatch.setattr(all_reduce, "_on_cpu", all_reduce._on_gpu)
        x = torch.arange(8).bfloat16()
        for way, order in zip(ways, (["captured"], ["captured", "registered"], ["captured"]), strict=False):
            device.log.clear()
            assert all_reduce.measure(way, x, x.clone()) == pytest.approx(10.0)
            assert device.log == [*order, *["replay"] * 21]
        assert device.calls == [8] * 21 + [8] + [0] * 20
        with pytest.raises(AssertionError, match="pyops, 16 bytes: the sum is wrong"):
            all_reduce.measure(ways[0], x, x + 1)
    finally:
        torch.distributed.destroy_process_group()
