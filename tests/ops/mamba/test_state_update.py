"""The decode step of a state-space model against the recurrence in float64, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyops
from pyops._core.system import device as devices
from pyops._core.tensors import dtypes
from pyops.ops.mamba._step_geometry import StepProblem, choose
from tests.support.calls import DEVICES

Call = dict[str, Any]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def example(
    count: int, slots: int, *rows: int, state_size: int = 16, groups: int = 2, dtype: torch.dtype = torch.float32
) -> Call:
    """Arguments of a call with every option for `count` tokens; `rows` is (heads, head_size) or (head_size,)."""
    of_groups = (count, *((groups,) if len(rows) == 2 else ()), state_size)
    return {
        "state": torch.randn(slots, *rows, state_size),
        "x": torch.randn(count, *rows).to(dtype),
        "dt": torch.randn(count, *rows).to(dtype),
        "A": -torch.rand(*rows, state_size) - 0.1,
        "B": torch.randn(of_groups).to(dtype),
        "C": torch.randn(of_groups).to(dtype),
        "D": torch.randn(rows),
        "z": torch.randn(count, *rows).to(dtype),
        "dt_bias": torch.randn(rows),
        "dt_softplus": True,
        "out": torch.full((count, *rows), 77.0, dtype=dtype),
    }


def step(call: Call, token: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, state) of one token, in float64."""

    def of(name: str) -> Any:
        value = call.get(name)
        return None if value is None else value.double()

    def heads(name: str) -> torch.Tensor:
        vector = of(name)[token]
        return vector if vector.ndim == 1 else vector.repeat_interleave(len(call["A"]) // len(vector), 0)[:, None]

    d = of("dt")[token] + (0 if of("dt_bias") is None else of("dt_bias"))
    if call.get("dt_softplus"):
        d = torch.log1p(torch.exp(d))
    x = of("x")[token]
    h = torch.exp(d[..., None] * of("A")) * state.double() + (d * x)[..., None] * heads("B")
    y = (h * heads("C")).sum(-1) + (0 if of("D") is None else of("D") * x)
    return (y if of("z") is None else y * of("z")[token] / (1 + torch.exp(-of("z")[token]))), h


def run(call: Call, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, state) of the op, on copies with the strides of `call`."""

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # An expanded tensor stays expanded: only its memory is moved.
        whole = value.untyped_storage().nbytes() // value.element_size()
        memory = value.as_strided((whole,), (1,), 0).clone().to(device)
        return memory.as_strided(value.shape, value.stride(), value.storage_offset())

    call = {name: placed(value) for name, value in call.items()}
    pyops.selective_state_update(**call)
    return call["out"].cpu(), call["state"].cpu()


def assert_near(actual: torch.Tensor, right: torch.Tensor) -> None:
    unit = torch.finfo(actual.dtype).eps / 2
    allowed = right.abs() * unit * 1.01 + right.abs().max() * 2.0**-19
    assert ((actual.double() - right).abs() <= allowed).all()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "state_size", "dtype"),
    [
        ((37,), 16, torch.float32),
        ((5,), 7, torch.bfloat16),
        ((3,), 256, torch.float16),
        ((4, 6), 128, torch.bfloat16),
        ((2, 9), 1, torch.float32),
    ],
)
def test_one_token(rows: tuple[int, ...], state_size: int, dtype: torch.dtype, device: str) -> None:
    """With every option, and with none of them; states in float32 and in the dtype of tokens."""
    call = example(3, 3, *rows, state_size=state_size, dtype=dtype)
    bare = {name: value for name, value in call.items() if name not in ("D", "z", "dt_bias", "dt_softplus")}
    bare["dt"] = bare["dt"].abs()
    for given in (call, bare, {**call, "state": call["state"].to(dtype)}):
        out, state = run(given, device)
        for i in range(3):
            right, right_state = step(given, i, given["state"][i])
            assert_near(out[i], right)
            assert_near(state[i], right_state)


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_tied_per_head(device: str) -> None:
    """Per-head parameters, expanded over rows and states; and A with one number per row."""
    heads, head_size, state_size = 4, 5, 32
    call = example(2, 2, heads, head_size, state_size=state_size)
    tied = call | {
        "A": (-torch.rand(heads) - 0.1)[:, None, None].expand(heads, head_size, state_size),
        "dt": torch.randn(2, heads)[..., None].expand(2, heads, head_size),
        "dt_bias": torch.randn(heads)[:, None].expand(heads, head_size),
        "D": torch.randn(heads)[:, None].expand(heads, head_size),
    }
    of_rows = call | {"A": (-torch.rand(heads, head_size, 1) - 0.1).expand(heads, head_size, state_size)}
    for given in (tied, of_rows):
        out, state = run(given, device)
        for i in range(2):
            right, right_state = step(given, i, call["state"][i])
            assert_near(out[i], right)
            assert_near(state[i], right_state)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [None, 1, 3])
def test_state_slots(columns: int | None, device: str) -> None:
    """Sources and destinations, of one dimension or two; padding and slots out of range in both."""
    call = example(6, 8, 5, state_size=4)
    source, target = ints(7, -1, 2, 8, 4, 5), ints(6, 1, -1, 7, 2**31 - 1, 5)
    if columns:
        source, target = (
            torch.cat((each[:, None], torch.full((6, columns - 1), 6)), 1).int() for each in (source, target)
        )
    for given, to in (
        (call | {"state_batch_indices": source}, (7, None, 2, None, 4, 5)),
        (call | {"state_batch_indices": source, "dst_state_batch_indices": target}, (6, None, None, None, None, 5)),
        (call | {"dst_state_batch_indices": target}, (6, 1, None, 7, None, 5)),
    ):
        read = (7, None, 2, None, 4, 5) if "state_batch_indices" in given else range(6)
        out, state = run(given, device)
        right_out, right_state = call["out"].double(), call["state"].double()
        for i, (slot, goal) in enumerate(zip(read, to, strict=True)):
            if slot is None:
                continue
            right_out[i], new = step(given, i, call["state"][slot])
            if goal is not None:
                right_state[goal] = new
        assert_near(out, right_out)
        assert_near(state, right_state)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [(9,), (2, 5)])
def test_sequences_of_several_tokens(rows: tuple[int, ...], device: str) -> None:
    """One after another, from states and into states of other slots; empty sequences, and sequences out of range."""
    call = example(9, 5, *rows, state_size=8) | {
        "cu_seqlens": ints(0, 4, 4, 5, 8, 20, -3, 1),
        "state_batch_indices": ints(2, 0, 1, 3, 4, 0, 4),
    }
    out, state = run(call, device)
    right_out, right_state = call["out"].double(), call["state"].double()
    for begin, end, slot in ((0, 4, 2), (4, 5, 1), (5, 8, 3)):
        for token in range(begin, end):
            right_out[token], right_state[slot] = step(call, token, right_state[slot])
    assert_near(out, right_out)
    assert_near(state, right_state)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_targets", [False, True])
def test_draft_tokens(with_targets: bool, device: str) -> None:
    """A sequence begins with the state of its accepted token, and every token's state is stored."""
    call = example(8, 20, 6, state_size=4)
    sources = torch.arange(12).reshape(4, 3).int()
    sources[1, 2] = -1
    targets = torch.arange(8, 20).reshape(4, 3).flip(0).int() if with_targets else sources
    starts, accepted = (0, 3, 6, 7, 8), (2, 0, 3, 2**31 - 1)
    call |= {"cu_seqlens": ints(*starts), "state_batch_indices": sources, "num_accepted_tokens": ints(*accepted)}
    if with_targets:
        call["dst_state_batch_indices"] = targets
    out, state = run(call, device)
    right_out, right_state = call["out"].double(), call["state"].double()
    for i in range(3):
        h = call["state"][sources[i, max(accepted[i] - 1, 0)]]
        for t, token in enumerate(range(starts[i], starts[i + 1])):
            right_out[token], h = step(call, token, h)
            if targets[i, t] >= 0:
                right_state[targets[i, t]] = h
    assert_near(out, right_out)
    assert_near(state, right_state)


@pytest.mark.parametrize("device", DEVICES)
def test_more_draft_tokens_than_slots(device: str) -> None:
    """The states of tokens without a slot are dropped, and nothing else is."""
    call = example(4, 3, 6, state_size=4) | {
        "cu_seqlens": ints(0, 4),
        "state_batch_indices": ints(2, 0)[None],
        "num_accepted_tokens": ints(-5),
    }
    out, state = run(call, device)
    h, right = call["state"][2], call["state"].double()
    for token in range(4):
        right_out, h = step(call, token, h)
        assert_near(out[token], right_out)
        if token < 2:
            right[(2, 0)[token]] = h
    assert_near(state, right)


@pytest.mark.parametrize("device", DEVICES)
def test_continues_a_selective_scan(device: str) -> None:
    """Token by token, states and results equal those of the selective scan."""
    call = example(1, 1, 12, state_size=16)
    count = 5
    xs, dts, zs = (torch.randn(count, 12) for _ in range(3))
    Bs, Cs = (torch.randn(count, 16) for _ in range(2))
    whole = call["state"].clone().to(device)
    outs = []
    for t in range(count):
        now = call | {
            name: each[t : t + 1] for name, each in zip(("x", "dt", "z", "B", "C"), (xs, dts, zs, Bs, Cs), strict=True)
        }
        out, call["state"] = run(now, device)
        outs.append(out[0])
    rows = [each.mT[None].contiguous().to(device) for each in (xs, dts, zs)]
    vectors = [each.mT[None, None].contiguous().to(device) for each in (Bs, Cs)]
    A, D, bias = (call[name].to(device) for name in ("A", "D", "dt_bias"))
    found = pyops.selective_scan_fn(
        *(rows[0], whole, rows[1], A, *vectors, D, rows[2], bias, True),
        has_initial_state=torch.ones(1, dtype=torch.bool, device=device),
    )
    torch.testing.assert_close(found[0].mT.cpu(), torch.stack(outs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.cpu(), call["state"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_decay_rates_of_any_size(device: str) -> None:
    """With A up to the largest number, a state survives a time step of 0 and vanishes after any other."""
    call = {
        "state": torch.arange(1.0, 9.0).reshape(2, 1, 4),
        "x": torch.zeros(2, 1),
        "dt": torch.tensor([[0.0], [1e-3]]),
        "A": torch.tensor([[-torch.finfo(torch.float32).max, -1e30, 0.0, 1e-30]]),
        "B": torch.ones(2, 4),
        "C": torch.ones(2, 4),
        "out": torch.zeros(2, 1),
    }
    out, state = run(call, device)
    assert out.tolist() == [[10.0], [15.0]]
    assert state.tolist() == [[[1.0, 2.0, 3.0, 4.0]], [[0.0, 0.0, 7.0, 8.0]]]


def test_nan_stays_with_its_row() -> None:
    call = example(2, 2, 6, state_size=4)
    call["x"][1, 3] = float("nan")
    out, state = run(call, "cpu")
    assert out.isnan().nonzero().tolist() == [[1, 3]]
    assert state.isnan().all(-1).nonzero().tolist() == [[1, 3]]


@pytest.mark.parametrize(
    ("problem", "rows"),
    [
        ((1, 1, 8192, 16), 2),
        ((256, 1, 8192, 16), 4),
        ((1, 10, 64, 128), 2),
        ((1, 80, 64, 128), 4),
        ((256, 80, 64, 128), 4),
    ],
)
def test_threads_take_more_rows_when_the_device_is_full(problem: tuple[int, int, int, int], rows: int) -> None:
    tied = problem[1] > 1
    config = choose(StepProblem(*problem, dtypes.float32, 4, tied, has_starts=False), devices.model())
    assert (config.rows, config.sequences) == (rows, 1)


def test_refused() -> None:
    call = example(2, 2, 4, 6, state_size=4)
    for wrong, changes in (
        ("out", {"out": None}),
        ("state", {"state": call["state"][:1]}),
        ("B", {"B": torch.randn(2, 3, 4)}),
        ("A", {"A": call["A"].double()}),
        ("state_batch_indices", {"num_accepted_tokens": ints(1, 1)}),
        ("state_batch_indices", {"num_accepted_tokens": ints(1, 1), "state_batch_indices": ints(0, 1)}),
        ("dst_state_batch_indices", {"dst_state_batch_indices": ints(0, 1, 2)}),
        ("C", {"C": call["C"].mT.contiguous().mT}),
    ):
        with pytest.raises(pyops.OpError, match=f"selective_state_update: {wrong}: "):
            pyops.selective_state_update(**call | changes)
