"""A transformer's MLP block on real tensors: norm, matmul, gated activation, matmul, residual norm."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._core import config
from .._core.errors import MissingDependencyError
from .._core.lazy import cupy, torch
from . import axes

_EPSILON = 1e-6
# Largest error of a stage, relative to its norm. Each rounding to bfloat16 is off by at most 2^-9 of its value.
_TOLERANCE = 2.0**-7


@dataclass(frozen=True)
class Stage:
    """One step of the block: what it computes, in place, and where."""

    name: str
    run: Callable[[], Any]
    out: Any


def demo() -> bool:
    """Run the block, print how far each stage is from float64 and how long it takes; False if one is too far."""
    where = _device()
    num_tokens, hidden_size, intermediate_size = (64, 4096, 14336) if where == "cuda" else (64, 1024, 2816)
    kernels = where == "cuda" and not config.reference()
    name = torch.cuda.get_device_name() if where == "cuda" else "CPU"
    print(f"MLP block of {num_tokens} tokens, {hidden_size} -> {intermediate_size} -> {hidden_size}, bfloat16")
    print(f"on {name}, {'by the kernels' if kernels else 'by the PyTorch references'} (torch {torch.__version__})\n")

    stages, exact = _block(where, num_tokens, hidden_size, intermediate_size)
    first, errors = [], []
    for stage, truth in zip(stages, exact, strict=True):
        first.append(_seconds(stage, where))
        errors.append(_relative_error(stage.out, truth))

    on_gpu = where == "cuda"
    print(f"{'stage':20} {'error':>8} {'first call':>11} {'host':>9}" + (f" {'device':>9}" if on_gpu else ""))
    for stage, error, started in zip(stages, errors, first, strict=True):
        times = [started, statistics.median(_seconds(stage, where, wait=False) for _ in range(50 if on_gpu else 10))]
        if on_gpu:
            times.append(_device_seconds(stage))
        columns = " ".join(f"{_time(seconds):>{width}}" for seconds, width in zip(times, (11, 9, 9), strict=False))
        print(f"{stage.name:20} {error:8.1e} {columns}")
    good = all(error < _TOLERANCE for error in errors)
    print(f"\nrelative error against float64: {'below' if good else 'NOT below'} {_TOLERANCE:.1e} at every stage")
    return good


def _device() -> str:
    """Where there is a GPU, the GPU; without cupy its kernels cannot be compiled."""
    if not torch.cuda.is_available():
        return "cpu"
    try:
        assert cupy.__version__
    except MissingDependencyError as missing:
        print(f"the GPU is not used: {missing}")
        return "cpu"
    return "cuda"


def _block(where: str, num_tokens: int, hidden_size: int, intermediate_size: int) -> tuple[list[Stage], list[Any]]:
    """The stages over fresh random tensors, and what each should give, computed in float64 from the same inputs."""
    rms_norm, silu_and_mul, fused_add_rms_norm = (
        axes.find(name).call for name in ("rms_norm", "silu_and_mul", "fused_add_rms_norm")
    )
    generator = torch.Generator(where).manual_seed(0)

    def randn(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Any:
        values = torch.randn(shape, device=where, generator=generator)
        return (values * scale + shift).bfloat16()

    def empty(*shape: int) -> Any:
        return torch.empty(shape, device=where, dtype=torch.bfloat16)

    x = randn(num_tokens, hidden_size)
    norm_weight, next_norm_weight = (randn(hidden_size, scale=0.1, shift=1.0) for _ in range(2))
    gate_up_weight = randn(hidden_size, 2 * intermediate_size, scale=hidden_size**-0.5)
    down_weight = randn(intermediate_size, hidden_size, scale=intermediate_size**-0.5)
    residual = x.clone()
    normed, gate_up = empty(num_tokens, hidden_size), empty(num_tokens, 2 * intermediate_size)
    activated, down = empty(num_tokens, intermediate_size), empty(num_tokens, hidden_size)
    stages = [
        Stage("rms_norm", lambda: rms_norm(normed, x, norm_weight, _EPSILON), normed),
        Stage("matmul up (torch)", lambda: torch.mm(normed, gate_up_weight, out=gate_up), gate_up),
        Stage("silu_and_mul", lambda: silu_and_mul(activated, gate_up), activated),
        Stage("matmul down (torch)", lambda: torch.mm(activated, down_weight, out=down), down),
        Stage("fused_add_rms_norm", lambda: fused_add_rms_norm(down, residual, next_norm_weight, _EPSILON), down),
    ]

    def norm(values: Any, weight: Any) -> Any:
        return values / (values.square().mean(-1, keepdim=True) + _EPSILON).sqrt() * weight.double()

    exact_normed = norm(x.double(), norm_weight)
    exact_gate_up = exact_normed @ gate_up_weight.double()
    gate, up = exact_gate_up.chunk(2, dim=-1)
    exact_activated = gate / (1 + (-gate).exp()) * up
    exact_down = exact_activated @ down_weight.double()
    exact = [exact_normed, exact_gate_up, exact_activated, exact_down, norm(exact_down + x.double(), next_norm_weight)]
    return stages, exact


def _relative_error(values: Any, exact: Any) -> float:
    return float((values.double() - exact).norm() / exact.norm())


def _seconds(stage: Stage, where: str, wait: bool = True) -> float:
    """Time of one call from an idle device: until its result is there, or (without `wait`) until it returns."""
    started = time.perf_counter()
    stage.run()
    returned = time.perf_counter()
    if where == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() if wait else returned) - started


def _device_seconds(stage: Stage, calls: int = 20, replays: int = 10) -> float:
    """Time on the device of one call, from replays of a graph of many; inputs stay in the cache between them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            stage.run()
    times: list[float] = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e-3 / calls)
    return statistics.median(times)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
