"""The selective scan against the recurrence in float64, token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch

import pyops
from pyops import tuning
from pyops._core.system import device as devices
from pyops.ops.mamba._scan_geometry import ScanConfig, ScanProblem, TokensConfig, choose
from tests.support.calls import DEVICES, Host

pytestmark = pytest.mark.rotates

NAN = float("nan")


class Layer(NamedTuple):
    """The tensors that the sequences of a call share."""

    A: torch.Tensor
    D: torch.Tensor | None
    bias: torch.Tensor | None
    softplus: bool


class Tokens(NamedTuple):
    """The rows of one call: [dim, num_tokens], and [groups, state_size, num_tokens]."""

    u: torch.Tensor
    delta: torch.Tensor
    z: torch.Tensor | None
    B: torch.Tensor
    C: torch.Tensor

    def cut(self, begin: int, end: int) -> Tokens:
        return Tokens(*(None if row is None else row[..., begin:end].contiguous() for row in self))

    def batched(self) -> Tokens:
        return Tokens(*(None if row is None else row[None] for row in self))


def layer(dim: int, state_size: int, options: bool = True) -> Layer:
    A = -torch.rand(dim, state_size) * 2 - 0.1
    return Layer(A, torch.randn(dim) if options else None, torch.randn(dim) if options else None, options)


def tokens(dim: int, state_size: int, count: int, dtype: torch.dtype, groups: int = 1, gated: bool = True) -> Tokens:
    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, count).to(dtype)

    delta = (torch.rand(dim, count) + 0.1).to(dtype)
    return Tokens(rows(dim), delta, rows(dim) if gated else None, rows(groups, state_size), rows(groups, state_size))


def truth(given: Tokens, by: Layer, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(y, y * silu(z), state after the last token), in float64."""
    u, delta, z, B, C = (None if row is None else row.double() for row in given)
    h, ys = state.double(), []
    share = len(by.A) // len(B)
    for t in range(u.shape[1]):
        d = delta[:, t] + (0 if by.bias is None else by.bias.double())
        if by.softplus:
            d = torch.log1p(torch.exp(d))
        b, c = (row[..., t].repeat_interleave(share, 0) for row in (B, C))
        h = torch.exp(d[:, None] * by.A.double()) * h + (d * u[:, t])[:, None] * b
        ys.append((h * c).sum(1) + (0 if by.D is None else by.D.double() * u[:, t]))
    y = torch.stack(ys, 1) if ys else torch.zeros_like(u)
    return y, None if z is None else y * z / (1 + torch.exp(-z)), h


def scan(given: Tokens, by: Layer, states: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, gated y) of a call on copies; `states` is written."""
    device = states.device
    u, delta, z, B, C = (None if row is None else row.clone().to(device) for row in given)
    A, D, bias, softplus = (x.to(device) if isinstance(x, torch.Tensor) else x for x in by)
    how = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in how.items()}
    result = pyops.selective_scan_fn(u, states, delta, A, B, C, D, z, bias, softplus, **how)
    assert result is (delta if z is None else z)
    return delta, z


def assert_near(actual: torch.Tensor, right: torch.Tensor) -> None:
    """Within a rounding of the result and, in float32, the error of dot products relative to the largest value."""
    unit = torch.finfo(actual.dtype).eps / 2
    allowed = right.abs() * unit * 1.01 + right.abs().max() * 2.0**-19
    assert ((actual.cpu().double() - right).abs() <= allowed).all()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "state_size", "count", "groups"),
    [
        (torch.float32, 8, 65, 2),
        (torch.bfloat16, 16, 64, 1),
        (torch.float16, 3, 37, 2),
        (torch.float32, 40, 9, 1),
        (torch.bfloat16, 256, 8, 1),
        (torch.float32, 1, 5, 3),
    ],
)
def test_matches_the_recurrence(dtype: torch.dtype, state_size: int, count: int, groups: int, device: str) -> None:
    """A batch with states of any number, and without states, with and without options."""
    dim = 6
    for options in (False, True):
        by = layer(dim, state_size, options)
        given = [tokens(dim, state_size, count, dtype, groups, options) for _ in range(2)]
        states = torch.randn(2, dim, state_size).to(device)
        before = states.cpu().clone()
        batch = Tokens(*(None if rows[0] is None else torch.stack(rows) for rows in zip(*given, strict=True)))
        y, gated = scan(batch, by, states, has_initial_state=torch.tensor([True, False]))
        for b in range(2):
            right, right_gated, state = truth(given[b], by, before[b] * (b == 0))
            assert_near(y[b], right)
            assert_near(states[b], state)
            if right_gated is not None:
                assert gated is not None
                assert_near(gated[b], right_gated)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cuts", [(0, 1, 70), (0, 31, 40, 70), (0, 64, 65, 70)])
def test_prompt_may_be_chunked_anywhere(cuts: tuple[int, ...], device: str) -> None:
    """Calls that pass on the float32 state give the bits of one call."""
    dim, state_size = 20, 16
    by, given = layer(dim, state_size), tokens(dim, state_size, cuts[-1], torch.bfloat16)
    # For rows of other strides torch, as the reference, adds in another order: two roundings of bfloat16.
    near = (
        {"rtol": 2.0**-7, "atol": 1e-5} if device == "cpu" and not isinstance(device, Host) else {"rtol": 0, "atol": 0}
    )
    whole_state, state = (torch.zeros(1, dim, state_size, device=device) for _ in range(2))
    whole, whole_gated = scan(given.batched(), by, whole_state)
    assert whole_gated is not None
    for begin, end in pairwise(cuts):
        y, gated = scan(given.cut(begin, end).batched(), by, state, has_initial_state=torch.tensor([begin > 0]))
        torch.testing.assert_close(y, whole[..., begin:end], **near)
        torch.testing.assert_close(gated, whole_gated[..., begin:end], **near)
    torch.testing.assert_close(state, whole_state, **near)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [1, 5, 16, 33, 1000])
def test_states_of_blocks(block_size: int, device: str) -> None:
    """The state after each block goes to the block's own slot, for any block size."""
    dim, state_size, lengths = 7, 4, [33, 0, 12]
    by, given = layer(dim, state_size), tokens(dim, state_size, sum(lengths), torch.float32)
    most = 1 + -(-max(lengths) // block_size)
    slots = torch.randperm(3 * most + 2)[: 3 * most].reshape(3, most).int()
    slots[2, 2:] = -1  # blocks without a slot, the last but one token's among them
    states = torch.randn(3 * most + 2, dim, state_size, device=device)
    before = states.cpu().clone()
    counts = [-(-length // block_size) for length in lengths]
    y, _ = scan(
        given,
        by,
        states,
        query_start_loc=ints(0, 33, 33, 45),
        cache_indices=slots,
        has_initial_state=torch.tensor([True, True, False]),
        block_size=block_size,
        block_idx_first_scheduled_token=ints(1, 1, 1),
        block_idx_last_scheduled_token=ints(*counts),
        initial_state_idx=ints(0, 0, 0),
    )
    right = before.clone()
    for b, (begin, length) in enumerate(zip((0, 33, 33), lengths, strict=True)):
        h = before[slots[b, 0]] * (b != 2)
        for i in range(counts[b]):
            part = given.cut(begin + i * block_size, begin + min((i + 1) * block_size, length))
            part_y, _, h = truth(part, by, h)
            assert_near(y[:, begin + i * block_size :][:, : part_y.shape[1]], part_y)
            if slots[b, 1 + i] >= 0:
                right[slots[b, 1 + i]] = h.float()
    assert_near(states, right.double())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("more", [(), (40,)])
def test_first_chunk_fills_a_block(more: tuple[int, ...], device: str) -> None:
    """Sequences that continue within a block of 8: states are stored at the ends of blocks. A chunk that is missing or
    longer than a block does not count."""
    dim, state_size, lengths = 7, 4, [3 + 8 + 5, 4, 20]
    by, given = layer(dim, state_size), tokens(dim, state_size, sum(lengths), torch.float32)
    chunks = [[3, 8, 5], [4], [8, 8, 4]]  # the last sequence has no chunk, or one of 20 tokens
    slots = torch.arange(12).reshape(3, 4).int()
    states = torch.randn(12, dim, state_size, device=device)
    right = states.cpu().clone()
    y, _ = scan(
        given,
        by,
        states,
        query_start_loc=ints(0, 16, 20, 40),
        cache_indices=slots,
        has_initial_state=torch.ones(3, dtype=torch.bool),
        block_size=8,
        block_idx_first_scheduled_token=ints(1, 1, 1),
        block_idx_last_scheduled_token=ints(3, 1, 3),
        initial_state_idx=ints(0, 0, 0),
        cu_chunk_seqlen=ints(0, 3, 11, 16, 20, *more),
        last_chunk_indices=ints(2, 3, 2**31 - 1),
    )
    begin = 0
    for b, sizes in enumerate(chunks):
        h = right[slots[b, 0]]
        for i, size in enumerate(sizes):
            part_y, _, h = truth(given.cut(begin, begin + size), by, h)
            assert_near(y[:, begin : begin + size], part_y)
            right[slots[b, 1 + i]] = h.float()
            begin += size
    assert_near(states, right.double())


@pytest.mark.parametrize("device", DEVICES)
def test_out_of_range_indices_write_nothing(device: str) -> None:
    """Padding, slots and tokens out of range, and sequences that end before they begin."""
    dim, state_size, count = 5, 4, 24
    by, given = layer(dim, state_size), tokens(dim, state_size, count, torch.float32)
    states = torch.randn(3, dim, state_size, device=device)
    before = states.cpu().clone()
    starts = ints(3, 7, 2, 9, 12, 12, 16, 30, -5, 20)
    slots = ints(2, 0, -1, 1, 0, 3, 0, 1, 1)
    y, gated = scan(
        given,
        by,
        states,
        query_start_loc=starts,
        cache_indices=slots,
        has_initial_state=torch.ones(9, dtype=torch.bool),
    )
    right, right_gated, right_states = given.delta.double(), given.z.double(), before.double()  # type: ignore[union-attr]
    for begin, end, slot in ((3, 7, 2), (9, 12, 1)):
        part_y, part_gated, right_states[slot] = truth(given.cut(begin, end), by, before[slot])
        assert part_gated is not None
        right[:, begin:end], right_gated[:, begin:end] = part_y, part_gated
    for actual, expected in ((y, right), (gated, right_gated), (states, right_states)):
        assert actual is not None
        assert_near(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_missing_slot_columns(device: str) -> None:
    """No column of slots is accessed that a sequence does not have."""
    dim, state_size = 3, 2
    by, given = layer(dim, state_size), tokens(dim, state_size, 12, torch.float32)
    states = torch.randn(4, dim, state_size, device=device)
    before = states.clone()
    where = {
        "query_start_loc": ints(0, 4, 8, 12),
        "cache_indices": ints(0, 1, 2, 3, 0, 1).reshape(3, 2),
        "block_size": 2,
        "has_initial_state": torch.ones(3, dtype=torch.bool),
        "block_idx_last_scheduled_token": ints(2, -(2**31), 2**31 - 1),
    }
    for initial in (ints(-1, 2, -(2**31)), ints(2**31 - 1, 7, 2)):
        y, _ = scan(
            given, by, states, **where, block_idx_first_scheduled_token=ints(0, 0, 0), initial_state_idx=initial
        )
        assert torch.equal(states, before)
        assert torch.equal(y.cpu(), given.delta)
    for first in (ints(-1, 2, 2**31 - 1), ints(-(2**31), 2, 7)):
        y, _ = scan(given, by, states, **where, block_idx_first_scheduled_token=first, initial_state_idx=ints(0, 0, 1))
        assert torch.equal(states, before)
        assert_near(y[:, :4], truth(given.cut(0, 4), by, before[0].cpu())[0])


@pytest.mark.parametrize("device", DEVICES)
def test_nan_stays_with_its_channel(device: str) -> None:
    """And leaves earlier tokens alone."""
    dim, state_size, count = 18, 16, 20
    by, given = layer(dim, state_size), tokens(dim, state_size, count, torch.float32)
    right, _, _ = truth(given, by, torch.zeros(dim, state_size))
    for name in ("u", "delta"):
        getattr(given, name)[3, 7] = NAN
        y, _ = scan(given.batched(), by, torch.zeros(1, dim, state_size, device=device))
        assert y[0, 3, 7:].isnan().all()
        spoilt = torch.zeros(dim, count, dtype=torch.bool)
        spoilt[3, 7:] = True
        assert_near(y[0].cpu().where(~spoilt, 0), right.where(~spoilt, 0))
        getattr(given, name)[3, 7] = 0.5
        right, _, _ = truth(given, by, torch.zeros(dim, state_size))


@pytest.mark.parametrize("device", DEVICES)
def test_time_steps_of_any_size(device: str) -> None:
    """softplus over its whole range."""
    deltas = torch.tensor([-100.0, -87.0, -20.0, -7.3, -1.0, -1e-3, 0.0, 1e-3, 0.7, 5.0, 19.9, 20.1, 90.0])
    ones = torch.ones(1, len(deltas))
    given = Tokens(ones, deltas[None], None, ones[None], ones[None])
    y, _ = scan(
        given.batched(), Layer(torch.full((1, 1), -1e30), None, None, True), torch.zeros(1, 1, 1, device=device)
    )
    right = torch.log1p(torch.exp(deltas.double()))
    assert ((y[0, 0].cpu().double() - right).abs() <= right * 2.0**-21 + 1e-37).all()


@pytest.mark.parametrize("device", DEVICES)
def test_decay_rates_of_any_size(device: str) -> None:
    """With A up to the largest number, a state survives a time step of 0 and vanishes after any other."""
    largest = torch.finfo(torch.float32).max
    A = torch.tensor([[-largest, -1e30, 0.0, 1e-30]])
    deltas, ones = torch.tensor([[0.0, 1e-3, 0.0, 2.0]]), torch.ones(4, 4)
    states = torch.arange(1.0, 5.0, device=device).reshape(1, 1, 4).clone()
    given = Tokens(torch.zeros(1, 4), deltas, None, ones[None], ones[None])
    y, _ = scan(given.batched(), Layer(A, None, None, False), states, has_initial_state=torch.tensor([True]))
    assert y.tolist() == [[[10.0, 7.0, 7.0, 7.0]]]
    assert states.tolist() == [[[0.0, 0.0, 3.0, 4.0]]]


def test_columns_of_any_stride() -> None:
    """The Python function takes rows of any strides, and B and C without groups."""
    dim, state_size = 4, 3
    by, given = layer(dim, state_size), tokens(dim, state_size, 9, torch.float32)
    right, right_gated, _ = truth(given, by, torch.zeros(dim, state_size))
    apart = [row.mT.contiguous().mT for row in given if row is not None]
    states = torch.zeros(1, dim, state_size)
    found = pyops.selective_scan_fn(
        apart[0],
        states,
        apart[1],
        by.A,
        apart[3][0],
        apart[4][0],
        by.D,
        None,
        by.bias,
        True,
        query_start_loc=ints(0, 9),
    )
    assert_near(found, right)
    found = pyops.selective_scan_fn(
        *(apart[0][None], states, apart[1][None], by.A, apart[3], apart[4], by.D), apart[2][None], by.bias, True
    )
    assert_near(found[0], right_gated)


@pytest.mark.parametrize(
    ("problem", "tile"),
    [
        ((1, 8192, 8192), (1, 4, 64)),
        ((1, 4096, 8192), (1, 4, 64)),
        ((1, 2560, 8192), (1, 2, 64)),
        ((64, 8192, 8192), (2, 4, 32)),
        ((8, 8192, 8192), (1, 4, 64)),
        ((64, 8192, 64), (2, 4, 8)),
    ],
)
def test_lanes_fill_the_device(problem: tuple[int, int, int], tile: tuple[int, int, int]) -> None:
    batch, dim, num_tokens = problem
    config = choose(ScanProblem(batch, dim, num_tokens, 16, pyops._core.tensors.dtypes.bfloat16, 8, 4), devices.model())
    assert isinstance(config, ScanConfig)
    assert (config.channels, config.states, config.tile_tokens) == tile


@pytest.mark.parametrize(
    ("problem", "shares_tokens"),
    [((1, 1536, 8192), True), ((1, 1536, 256), False), ((8, 64, 8192), True), ((8, 64, 2048), False)],
)
def test_lanes_share_tokens_at_few_channels(problem: tuple[int, int, int], shares_tokens: bool) -> None:
    batch, dim, num_tokens = problem
    config = choose(ScanProblem(batch, dim, num_tokens, 16, pyops._core.tensors.dtypes.bfloat16, 8, 4), devices.model())
    assert isinstance(config, TokensConfig) == shares_tokens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("lanes", "parts"), [(1, 1), (4, 1), (32, 1), (8, 4), (32, 2)])
@pytest.mark.parametrize(
    ("dtype", "state_size", "count", "groups"),
    [(torch.bfloat16, 16, 280, 2), (torch.float32, 40, 70, 1), (torch.float16, 3, 37, 3)],
)
def test_scan_with_lanes_that_share_tokens(
    dtype: torch.dtype, state_size: int, count: int, groups: int, lanes: int, parts: int, device: str
) -> None:
    """Against the recurrence, with states that pass from call to call and block to block, for few and many lanes."""
    dim, cut = 12, count // 3
    by, given = layer(dim, state_size), tokens(dim, state_size, count, dtype, groups)
    states = torch.zeros(4, dim, state_size, device=device)
    op = pyops.registry["selective_scan_fwd"]
    op.forget()
    with tuning.forced("selective_scan_fwd", TokensConfig(lanes, 4, 64, parts=parts)):
        blocks = {
            "query_start_loc": ints(0, cut),
            "cache_indices": ints(0, 1, 2, 3).reshape(1, 4),
            "block_size": -(-cut // 3),
            "block_idx_first_scheduled_token": ints(1),
            "block_idx_last_scheduled_token": ints(3),
            "initial_state_idx": ints(0),
        }
        first, first_gated = scan(given.cut(0, cut), by, states, **blocks)
        continued = {"cache_indices": ints(3), "has_initial_state": torch.tensor([True])}
        second, second_gated = scan(given.cut(cut, count).batched(), by, states, **continued)
    op.forget()
    right, right_gated, state = truth(given, by, torch.zeros(dim, state_size))
    assert first_gated is not None
    assert second_gated is not None
    assert right_gated is not None
    for found, expected in ((first, right[:, :cut]), (second[0], right[:, cut:])):
        assert_near(found, expected)
    for found, expected in ((first_gated, right_gated[:, :cut]), (second_gated[0], right_gated[:, cut:])):
        assert_near(found, expected)
    assert_near(states[3], state)
    for i in (1, 2):
        part = given.cut(0, min(i * -(-cut // 3), cut))
        assert_near(states[i], truth(part, by, torch.zeros(dim, state_size))[2])


def test_refused() -> None:
    by, given = layer(4, 2), tokens(4, 2, 6, torch.float32).batched()
    states = torch.zeros(1, 4, 2)
    for wrong, where in (
        ("block_size", {"block_size": 0}),
        ("A", {"A": torch.zeros(4, 257)}),
        ("cache_indices", {"initial_state_idx": ints(0)}),
        ("ssm_states", {"ssm_states": states[:0]}),
        ("B", {"B": torch.zeros(1, 3, 2, 6)}),
    ):
        call = {"ssm_states": states, "A": by.A, "B": given.B, **where}
        with pytest.raises(pyops.OpError, match=f"selective_scan_fwd: {wrong}: "):
            pyops.selective_scan_fn(given.u, delta=given.delta, C=given.C, **call)
