"""Mamba-2's chunk scan over prompts, against its quadratic form in float64, and against itself for chunked prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest
import torch
from torch.nn.functional import silu, softplus

import pyops
from pyops._core import config
from pyops._core.system import device as devices
from pyops.example import TorchMaker
from pyops.host.toolchain import toolchains
from pyops.testing import SCHEDULES, scheduled
from pyops.testing.calls import assert_results, expected, run
from tests.hip.host import on_matrix_core
from tests.support.calls import CUDA

pytestmark = pytest.mark.rotates

# For results; the tolerances of vLLM's own tests.
TOLERANCE = {torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@pytest.fixture(
    params=["cpu", pytest.param("host", marks=pytest.mark.skipif(not toolchains(), reason="no C++ compiler")), CUDA]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of the tensors: "cpu" runs the reference, "host" the kernels on the CPU."""
    with config.cpu("kernels" if request.param == "host" else "reference"):
        yield "cpu" if request.param == "host" else request.param


class Prompts:
    """Random prompts of these lengths, and calls on parts of them."""

    def __init__(
        self,
        device: str,
        lengths: list[int],
        *,
        heads: int = 4,
        groups: int = 2,
        head_size: int = 32,
        state_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(len(lengths) + head_size)
        self.lengths, self.device, self.dtype = lengths, device, dtype
        num_tokens = sum(lengths)
        # One tensor, as a projection writes it; the others are views of it.
        sizes = [heads * head_size, groups * state_size, groups * state_size, heads]
        sizes.append(-sum(sizes) % 8)
        parts = torch.randn(num_tokens, sum(sizes), device=device).to(dtype).split(sizes, 1)
        self.x, self.B, self.C = (
            part.unflatten(1, (count, -1)) for part, count in zip(parts, (heads, groups, groups), strict=False)
        )
        self.dt = parts[3]
        self.A = -torch.rand(heads, device=device) - 0.1
        self.D, self.dt_bias = torch.randn(heads, head_size, device=device), torch.randn(heads, device=device) - 2
        self.z = torch.randn(num_tokens, heads, head_size, device=device).to(dtype)
        self.initial = torch.randn(len(lengths), heads, head_size, state_size, device=device)

    def call(
        self, spans: list[tuple[int, int]], initial: torch.Tensor | None, chunk_size: int = 16, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, states) of the tokens begin <= i < end of each prompt, in one call."""
        tokens, starts, bounds, seqs, last = [], [0], [0], list[int](), list[int]()
        for seq, (begin, end) in enumerate(spans):
            base = sum(self.lengths[:seq])
            tokens += range(base + begin, base + end)
            starts.append(len(tokens))
            while bounds[-1] < len(tokens):
                bounds.append(min(bounds[-1] + chunk_size, len(tokens)))
                seqs.append(seq)
            last.append(len(seqs) - 1)

        def taken(value: torch.Tensor) -> torch.Tensor:
            return value if len(tokens) == len(value) else value[tokens]

        out = torch.full_like(taken(self.x), torch.nan, memory_format=torch.contiguous_format)
        indices = [torch.tensor(v, dtype=torch.int32, device=self.device) for v in (starts, bounds, last, seqs)]
        states = pyops.mamba_chunk_scan_combined_varlen(
            taken(self.x),
            taken(self.dt),
            self.A,
            taken(self.B),
            taken(self.C),
            chunk_size,
            *indices,
            out,
            **{
                "D": self.D,
                "z": taken(self.z),
                "dt_bias": self.dt_bias,
                "initial_states": initial,
                "dt_softplus": True,
                "dt_limit": (0.001, inf),
                "state_dtype": torch.float32,
                **more,
            },
        )
        return out, states

    def whole(self, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.call([(0, length) for length in self.lengths], self.initial, **more)

    def truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, states) in float64, from the decay between every two tokens of a prompt."""
        outs, states, repeat = [], [], self.x.shape[1] // self.B.shape[1]
        first = 0
        for seq, length in enumerate(self.lengths):
            rows = slice(first, first + length)
            first += length
            x, z = self.x[rows].double(), self.z[rows].double()
            b, c = (value[rows].double().repeat_interleave(repeat, 1) for value in (self.B, self.C))
            dt = softplus(self.dt[rows].double() + self.dt_bias.double()).clamp(min=0.001)
            total = (self.A.double() * dt).cumsum(0)
            lower = torch.ones(length, length, device=self.device).tril().bool()[..., None]
            decay = (total[:, None] - total[None]).masked_fill(~lower, -torch.inf).exp()  # [to, from, head]
            h = self.initial[seq].double()
            weights = torch.einsum("lhs,mhs->lmh", c, b) * decay * dt
            y = torch.einsum("lmh,mhp->lhp", weights, x) + self.D.double() * x
            y += torch.einsum("lhs,hps,lh->lhp", c, h, total.exp())
            outs.append(y * silu(z))
            left = (total[-1:] - total).exp() * dt if length else dt
            grown = total[-1].exp()[:, None, None] if length else 1.0
            states.append(h * grown + torch.einsum("lh,lhp,lhs->hps", left, x, b))
        return torch.cat(outs), torch.stack(states)


def assert_near(actual: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


SHAPES = [
    (32, 16, 2, torch.float32),
    (32, 16, 2, torch.float16),
    (64, 128, 1, torch.bfloat16),
    (128, 48, 4, torch.bfloat16),
    (128, 256, 4, torch.float16),
    (5, 17, 2, torch.bfloat16),
    (128, 128, 4, torch.float32),
]


@pytest.mark.parametrize(("head_size", "state_size", "groups", "dtype"), SHAPES)
def test_matches_the_quadratic_form(
    device: str, head_size: int, state_size: int, groups: int, dtype: torch.dtype
) -> None:
    prompts = Prompts(device, [45, 1, 0, 37], head_size=head_size, state_size=state_size, groups=groups, dtype=dtype)
    prompts.B = prompts.B * state_size**-0.5
    for actual, wanted in zip(prompts.whole(chunk_size=32), prompts.truth(), strict=True):
        assert_near(actual, wanted, dtype)


@pytest.mark.parametrize("chunk_size", [1, 8, 128])
def test_chunk_size_changes_roundings_only(device: str, chunk_size: int) -> None:
    """From one segment per prompt to the maximum."""
    prompts = Prompts(device, [100, 19], dtype=torch.bfloat16)
    for actual, wanted in zip(prompts.whole(chunk_size=chunk_size), prompts.truth(), strict=True):
        assert_near(actual, wanted, torch.bfloat16)


def test_segments_of_several_tiles(device: str) -> None:
    """Segments of three 64-token tiles, the most that shared memory holds while states are computed."""
    assert_slow_scan(device, [310, 390])


def assert_slow_scan(device: str, lengths: list[int]) -> None:
    """Every tile of these prompts decays slowly, so that a missing one would change all that follows."""
    prompts = Prompts(device, lengths, heads=2, groups=1, head_size=64, state_size=64, dtype=torch.bfloat16)
    prompts.A, prompts.B = prompts.A * 0.02, prompts.B * 64**-0.5
    for actual, wanted in zip(prompts.whole(chunk_size=1024), prompts.truth(), strict=True):
        assert (actual.double() - wanted).norm() <= 0.01 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [[0.5], [0.3, 0.8]])
def test_prompts_may_be_chunked(device: str, dtype: torch.dtype, cuts: list[float]) -> None:
    """Several calls, each with the float32 states of the previous one, give the result of one call."""
    prompts = Prompts(device, [90, 33, 2], dtype=dtype)
    whole, last = prompts.whole()
    states, outs = prompts.initial, []
    for low, high in pairwise([0.0, *cuts, 1.0]):
        spans = [(int(low * length), int(high * length)) for length in prompts.lengths]
        out, states = prompts.call(spans, states)
        outs.append(out.split([end - begin for begin, end in spans]))
    joined = torch.cat([part for parts in zip(*outs, strict=True) for part in parts])
    # The state of a tile is rounded before its product with C: other tiles, other roundings.
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7 * float(whole.double().abs().max())
    torch.testing.assert_close(joined, whole, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        states, last, rtol=2 * torch.finfo(dtype).eps, atol=1e-2 if dtype != torch.float32 else 1e-5
    )


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("core", "head_size", "state_size"), [("MFMA", 64, 64), ("WMMA_11", 32, 48), ("WMMA_12", 32, 16)]
)
def test_on_matrix_cores(core: str, head_size: int, state_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's MMA, in two segments of several tiles each, with one stage in shared memory or two."""
    sizes = {"heads": 2, "groups": 1, "head_size": head_size, "state_size": state_size}
    prompts = Prompts("cpu", [140, 0, 20], **sizes, dtype=torch.bfloat16)
    prompts.B, prompts.A = prompts.B * state_size**-0.5, prompts.A * 0.1
    with on_matrix_core(core, monkeypatch) as lanes, config.cpu("kernels"), monkeypatch.context() as patch:
        patch.setitem(devices._HOST, lanes, replace(devices.host(lanes), num_sms=1))
        for schedule in (SCHEDULES[0], SCHEDULES[3]):
            with scheduled(schedule, warp_size=lanes):
                for actual, wanted in zip(prompts.whole(chunk_size=40), prompts.truth(), strict=True):
                    assert_near(actual, wanted, torch.bfloat16)


def test_states_of_chunks(device: str) -> None:
    """They equal the final states of shorter prompts."""
    prompts = Prompts(device, [40, 24], dtype=torch.bfloat16)
    _, states = prompts.whole(return_intermediate_states=True)
    ends = [(16, 0), (32, 0), (40, 0), (0, 16), (0, 24)]
    assert len(states) == len(ends)
    for state, (a, b) in zip(states, ends, strict=True):
        _, shorter = prompts.call([(0, a), (0, b)], prompts.initial)
        torch.testing.assert_close(state, shorter[0 if a else 1], rtol=1e-4, atol=1e-4)


def test_vanishing_decays(device: str) -> None:
    """Time steps so long that every token forgets the previous ones; no result is NaN or infinite."""
    prompts = Prompts(device, [70], dtype=torch.bfloat16)
    prompts.A, prompts.dt_bias = prompts.A * 1e4, prompts.dt_bias.abs() + 10
    for actual, wanted in zip(prompts.whole(), prompts.truth(), strict=True):
        assert_near(actual / wanted.abs().max(), wanted / wanted.abs().max(), torch.bfloat16)


def test_time_step_limits(device: str) -> None:
    prompts = Prompts(device, [20])
    out, states = prompts.whole(dt_limit=(0.25, 0.25))
    prompts.dt, prompts.dt_bias = torch.full_like(prompts.dt, 0.25), torch.zeros_like(prompts.dt_bias)
    wanted, last = prompts.whole(dt_softplus=False)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(states, last)


HOSTILE = [
    ("seq_idx", 1, -1),
    ("seq_idx", 1, 3),
    ("seq_idx", 2, 2**31 - 1),
    ("seq_idx", 0, -(2**31)),
    ("last_chunk_indices", 0, -1),
    ("last_chunk_indices", 2, 10**6),
    ("last_chunk_indices", 1, 0),
    ("cu_seqlens", 1, -5),
    ("cu_seqlens", 3, 10**6),
    ("cu_seqlens", 0, 2**31 - 1),
    ("cu_chunk_seqlens", 1, -(2**31)),
    ("cu_chunk_seqlens", 1, 2**31 - 1),
    ("cu_chunk_seqlens", 4, 10**6),
]


@pytest.mark.parametrize(("name", "place", "value"), HOSTILE)
@pytest.mark.parametrize(("head_dim", "every_chunk"), [(64, False), (5, True)])
def test_hostile_indices(device: str, name: str, place: int, value: int, head_dim: int, every_chunk: bool) -> None:
    """Nothing outside a tensor is touched, and invalid chunks leave the state alone."""
    op = pyops.registry["mamba_chunk_scan_varlen"]
    assert op.example is not None
    args = list(op.example(TorchMaker(device), num_tokens=200, head_dim=head_dim, options=every_chunk))
    index = [p.name for p in op.parameters].index(name)
    args[index] = args[index].clone()
    args[index][place] = value
    assert_results(op, expected(op, args), run(op, args))


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"chunk_size": 0}, "chunk_size"),
        ({"B": torch.zeros(7, 4, 16)}, "B"),
        ({"B": torch.zeros(7, 3, 257)}, "B"),
        ({"A": torch.zeros(5)}, "A"),
        ({"D": torch.zeros(6, 4)}, "D"),
        ({"last_chunk_indices": torch.zeros(3, dtype=torch.int64)}, "last_chunk_indices"),
        ({"initial_states": torch.zeros(2, 6, 16, 16)}, "initial_states"),
        ({"state_dtype": torch.int32}, "x"),
    ],
)
def test_refused(changes: dict[str, Any], argument: str) -> None:
    op = pyops.registry["mamba_chunk_scan_varlen"]
    assert op.example is not None
    args = dict(zip((p.name for p in op.parameters), op.example(TorchMaker(), num_tokens=7), strict=True))
    args = args | {"x": args["x"].float(), "B": args["B"].float(), "C": args["C"].float(), "out": args["out"].float()}
    del args["states"]
    with pytest.raises(pyops.OpError) as caught:
        pyops.mamba_chunk_scan_varlen(**args | changes)
    assert caught.value.argument == argument
