"""Causal convolutions: chunked sequences and decode steps against torch's conv1d of whole ones, and hostile indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional

import pyops
from pyops import testing
from pyops.host.toolchain import toolchains

pytestmark = pytest.mark.rotates

Tensor = torch.Tensor

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
SEEDS = range(4)


@pytest.fixture(
    params=[
        "reference",
        pytest.param("kernels", marks=pytest.mark.skipif(not toolchains(), reason="no C++ compiler")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def compute(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test on the references, on the kernels on the CPU, and on the kernels on a GPU."""
    contexts = {"kernels": testing.cpu("kernels"), "cuda": torch.device("cuda")}
    with contexts.get(request.param, nullcontext()):
        yield


def _convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = "silu") -> Tensor:
    """The convolution of one whole sequence [length, dim], in float64."""
    padded = functional.pad(inputs.double().t()[None], (weight.shape[1] - 1, 0))
    wide = None if bias is None else bias.double()
    y = functional.conv1d(padded, weight.double()[:, None], wide, groups=len(weight))[0].t()
    return functional.silu(y) if activation else y


def _window(inputs: Tensor, tokens: int, width: int) -> Tensor:
    """The last width - 1 of the first `tokens` inputs, in the layout of a slot: [dim, width - 1]."""
    return functional.pad(inputs.t(), (width - 1, 0))[:, tokens : tokens + width - 1]


def _assert_near(result: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[result.dtype]
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def _parameters(
    dim: int, width: int, dtype: torch.dtype, with_bias: bool = True, seed: int = 0
) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(seed)
    weight = (torch.randn(dim, width) / width).to(dtype)
    return weight, torch.randn(dim).to(dtype) if with_bias else None


def _indices(values: Any) -> Tensor:
    return torch.tensor(numpy.asarray(values), dtype=torch.int32)


def _laid_out(x: Tensor, channel_last: bool) -> Tensor:
    """[num_tokens, dim] in the shape that models pass: [dim, num_tokens], in either layout."""
    return x.t() if channel_last else x.t().contiguous()


@pytest.mark.parametrize("channel_last", [True, False])
@pytest.mark.parametrize(
    ("dtype", "dim", "width", "with_bias", "activation"),
    [
        (torch.float32, 24, 4, True, "silu"),
        (torch.bfloat16, 64, 4, True, "silu"),
        (torch.float16, 40, 3, False, "swish"),
        (torch.float32, 5, 2, True, None),
        (torch.bfloat16, 16, 8, True, None),
    ],
)
def test_chunked_prompts(
    compute: None, dtype: torch.dtype, dim: int, width: int, with_bias: bool, activation: str | None, channel_last: bool
) -> None:
    """Sequences in random pieces, some of no or one token, together with padding: equal to conv1d of each whole
    sequence."""
    weight, bias = _parameters(dim, width, dtype, with_bias)
    random = numpy.random.default_rng(0)
    lengths, num_slots = [1, 2, 33, 70, 5], 9
    sequences = [torch.randn(length, dim).to(dtype) for length in lengths]
    expected = [_convolved(s, weight, bias, activation) for s in sequences]
    slots = [int(slot) for slot in random.permutation(num_slots)[:5]]
    states = torch.randn(num_slots, dim, width + 1).to(dtype)
    states = states.mT.contiguous().mT if channel_last else states
    before, done = states.clone(), [0] * 5
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        pieces = [min(length - at, int(random.integers(0, 24))) for at, length in zip(done, lengths, strict=True)]
        parts = [s[at : at + n] for s, at, n in zip(sequences, done, pieces, strict=True)]
        padding = torch.randn(3, dim).to(dtype)
        x = _laid_out(torch.cat([*parts, padding, padding[:2]]), channel_last)
        starts = _indices(numpy.cumsum([0, *pieces, 3]))
        out = pyops.causal_conv1d_fn(
            x,
            weight,
            bias,
            states,
            starts,
            _indices([*slots, -1]),
            torch.tensor([at > 0 for at in done] + [True]),
            activation,
        )
        assert out.dtype == dtype
        assert out.stride() == x.stride()
        for b, n in enumerate(pieces):
            _assert_near(out.t()[int(starts[b]) : int(starts[b]) + n], expected[b][done[b] : done[b] + n])
            done[b] += n
            if done[b]:
                assert testing.same_bits(
                    states[slots[b], :, : width - 1], _window(sequences[b], done[b], width).contiguous()
                )
        assert not out.t()[-2:].any(), "tokens of no sequence"
    others = [slot for slot in range(num_slots) if slot not in slots]
    assert testing.same_bits(states[others], before[others])
    assert testing.same_bits(states[:, :, width - 1 :], before[:, :, width - 1 :])


@pytest.mark.parametrize("num_tokens", [1, 8, 257, 300])
def test_one_prompt(compute: None, num_tokens: int) -> None:
    """Without a cache, across the tiles of CUDA blocks, for both index types."""
    weight, bias = _parameters(8, 4, torch.float32)
    x = torch.randn(num_tokens, 8)
    for channel_last in (True, False):
        for kind in (torch.int32, torch.int64):
            starts = torch.tensor([0, num_tokens], dtype=kind)
            out = pyops.causal_conv1d_fn(_laid_out(x, channel_last), weight, bias, None, starts)
            _assert_near(out.t(), _convolved(x, weight, bias))


class Cached:
    """A sequence under prefix caching: its inputs so far, and the slot of each of its blocks."""

    def __init__(self, slots: list[int], dim: int, dtype: torch.dtype) -> None:
        self.slots, self.done, self.inputs = slots, 0, torch.randn(60, dim).to(dtype)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("block_size", [8, 2])
def test_prefix_caching(compute: None, seed: int, block_size: int) -> None:
    """After any pieces, every full block holds the inputs before its end, and the last one the newest inputs."""
    dim, width, dtype = 16, 4, torch.bfloat16
    weight, bias = _parameters(dim, width, dtype, seed=seed)
    random = numpy.random.default_rng(seed)
    max_blocks = 60 // block_size + 1
    order = random.permutation(4 * max_blocks + 3)
    batch = [Cached(list(order[b * max_blocks :][:max_blocks]), dim, dtype) for b in range(3)]
    states = torch.randn(len(order), width - 1, dim).to(dtype).mT
    before, whole = states.clone(), [_convolved(s.inputs, weight, bias) for s in batch]
    touched: set[int] = set()
    for step in range(6):
        pieces = [min(60 - s.done, int(random.choice([0, 1, 2, 3, 9, 17]))) for s in batch]
        done, ends = ([s.done + n for s, n in zip(batch, counts, strict=True)] for counts in ([0] * 3, pieces))
        starts = _indices(numpy.cumsum([0, *pieces]))
        x = torch.cat([s.inputs[at:end] for s, at, end in zip(batch, done, ends, strict=True)])
        out = pyops.causal_conv1d_fn(
            _laid_out(x, step % 2 == 0),
            weight,
            bias,
            states,
            starts,
            _indices([s.slots for s in batch]),
            torch.tensor([at > 0 for at in done]),
            block_idx_first_scheduled_token=_indices([at // block_size for at in done]),
            block_idx_last_scheduled_token=_indices([max(0, end - 1) // block_size for end in ends]),
            initial_state_idx=_indices([max(0, at - 1) // block_size for at in done]),
            num_computed_tokens=_indices(done),
            block_size_to_align=block_size,
        )
        for b, (s, end) in enumerate(zip(batch, ends, strict=True)):
            _assert_near(out.t()[int(starts[b]) : int(starts[b + 1])], whole[b][s.done : end])
            for column in range(-(-end // block_size)):
                tokens = min(end, (column + 1) * block_size)
                touched.add(s.slots[column])
                assert testing.same_bits(states[s.slots[column]], _window(s.inputs, tokens, width).contiguous())
            s.done = end
    others = [slot for slot in range(len(order)) if slot not in touched]
    assert testing.same_bits(states[others], before[others])


@pytest.mark.parametrize("form", ["rows", "steps", "varlen"])
@pytest.mark.parametrize(
    ("dtype", "dim", "width"), [(torch.float32, 6, 4), (torch.bfloat16, 64, 4), (torch.float16, 8, 2)]
)
def test_decoding(compute: None, form: str, dtype: torch.dtype, dim: int, width: int) -> None:
    """Token by token: equal to conv1d of whole sequences. Padding is left alone."""
    weight, bias = _parameters(dim, width, dtype)
    random = numpy.random.default_rng(1)
    sequences = torch.randn(4, 20, dim).to(dtype)
    expected = [_convolved(s, weight, bias) for s in sequences]
    slots = [5, 0, 3, 2]
    states = torch.randn(7, dim, width).to(dtype)
    states[slots] = 0
    before, done = states.clone(), [0] * 4
    while max(done) <= 17:
        pieces = {"rows": [1] * 4, "steps": [3] * 4, "varlen": list(random.integers(0, 4, 4))}[form]
        parts = [s[at : at + n] for s, at, n in zip(sequences, done, pieces, strict=True)]
        padding = torch.randn(1 if form == "rows" else 3, dim).to(dtype)
        if form == "varlen":
            x = torch.cat([*parts, padding])
            by_name = {"query_start_loc": _indices(numpy.cumsum([0, *pieces, 3])), "max_query_len": 3}
        else:
            x, by_name = torch.stack([*parts, padding]), {}
            x = x[:, 0] if form == "rows" else x.mT.contiguous()
        indices = _indices([*slots, -1])
        out = pyops.causal_conv1d_update(x, states, weight, bias, "silu", indices, **by_name)
        assert out is x
        flat = out.mT.flatten(0, 1) if form == "steps" else out
        for b, result in enumerate(flat.split([*map(int, pieces), len(padding)])[:-1]):
            _assert_near(result, expected[b][done[b] : done[b] + pieces[b]])
            done[b] += pieces[b]
            assert testing.same_bits(
                states[slots[b], :, : width - 1].contiguous(), _window(sequences[b], done[b], width).contiguous()
            )
        assert testing.same_bits(flat[-len(padding) :].contiguous(), padding)
    assert testing.same_bits(states[[1, 4, 6]], before[[1, 4, 6]])
    assert testing.same_bits(states[..., width - 1 :], before[..., width - 1 :])


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_speculative_decoding(compute: None, seed: int, varlen: bool) -> None:
    """For any number of accepted drafts, results equal those of the sequence of accepted tokens."""
    dim, width, drafts = 16, 4, 3
    weight, bias = _parameters(dim, width, torch.float32, seed=seed)
    random = numpy.random.default_rng(seed)
    states = torch.zeros(4, width - 2 + drafts, dim).mT
    slots = [2, 0, 3]
    accepted_inputs = [torch.zeros(0, dim) for _ in slots]
    accepted = [1] * 3
    for _ in range(6):
        pieces = [int(n) for n in random.integers(1, drafts + 1, 3)] if varlen else [drafts] * 3
        new = [torch.randn(n, dim) for n in pieces]
        x = torch.cat(new) if varlen else torch.stack(new).mT.contiguous()
        by_name: dict[str, Any] = {"num_accepted_tokens": _indices(accepted), "conv_state_indices": _indices(slots)}
        if varlen:
            by_name |= {"query_start_loc": _indices(numpy.cumsum([0, *pieces])), "max_query_len": drafts}
        out = pyops.causal_conv1d_update(x, states, weight, bias, True, **by_name)
        flat = out if varlen else out.mT.flatten(0, 1)
        for b, result in enumerate(flat.split(pieces)):
            whole = torch.cat([accepted_inputs[b], new[b]])
            _assert_near(result, _convolved(whole, weight, bias)[-pieces[b] :])
            accepted[b] = int(random.integers(1, pieces[b] + 1))
            accepted_inputs[b] = torch.cat([accepted_inputs[b], new[b][: accepted[b]]])
    assert not states[1].any()


def test_decoding_with_prefix_caching(compute: None) -> None:
    """The state is read in one column and written in another; the columns in between do not matter."""
    weight, bias = _parameters(8, 4, torch.float32)
    states = torch.randn(8, 8, 3)
    before = states.clone()
    x = torch.randn(3, 8)
    expected = [
        _convolved(torch.cat([states[slot].t(), x[b : b + 1]]), weight, bias)[-1] for b, slot in enumerate((4, 1, 6))
    ]
    out = pyops.causal_conv1d_update(
        x.clone(),
        states,
        weight,
        bias,
        "silu",
        _indices([[4, 2, 7], [0, 1, -1], [6, 3, 5]]),
        block_idx_last_scheduled_token=_indices([2, 2, 0]),
        initial_state_idx=_indices([0, 1, 0]),
    )
    _assert_near(out, torch.stack(expected))
    for slot, (source, b) in {7: (4, 0), 6: (6, 2)}.items():
        assert testing.same_bits(states[slot], torch.cat([before[source][:, 1:], x[b][:, None]], 1))
    others = [0, 1, 2, 3, 4, 5]
    assert testing.same_bits(states[others], before[others])


def test_without_slot_indices(compute: None) -> None:
    """Slots are then 0, 1, 2, ...; no sequence has a state at first."""
    weight, bias = _parameters(8, 3, torch.float32)
    states = torch.randn(2, 8, 2)
    x = torch.randn(5, 8)
    out = pyops.causal_conv1d_fn(x.t(), weight, bias, states, _indices([0, 4, 5]))
    _assert_near(out.t(), torch.cat([_convolved(part, weight, bias) for part in x.split([4, 1])]))
    step = torch.randn(2, 8)
    out = pyops.causal_conv1d_update(step.clone(), states, weight, bias, "silu")
    whole = [torch.cat([part, step[b : b + 1]]) for b, part in enumerate(x.split([4, 1]))]
    _assert_near(out, torch.stack([_convolved(part, weight, bias)[-1] for part in whole]))


def test_cache_of_another_dtype(compute: None) -> None:
    weight, bias = _parameters(8, 4, torch.bfloat16)
    states = torch.zeros(1, 8, 3)
    x = torch.randn(6, 8).bfloat16()
    kept = x.clone()
    out = pyops.causal_conv1d_fn(x[:5].t(), weight, bias, states, _indices([0, 5]), activation=None)
    last = pyops.causal_conv1d_update(x[5:], states, weight, bias)
    assert out.dtype == last.dtype == torch.bfloat16
    assert testing.same_bits(x, kept)
    _assert_near(torch.cat([out.t(), last]), _convolved(x, weight, bias, None))


def _fault(call: Callable[[], Any]) -> str:
    """The first line of the fault that a call ends with; "" without a fault."""
    try:
        call()
    except pyops.KernelFault as fault:
        return str(fault).splitlines()[0]
    return ""


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize("seed", range(12))
def test_hostile_indices(seed: int) -> None:
    """No index reaches outside of a tensor. Sequences that overlap or share a slot race; no other fault occurs."""
    random = numpy.random.default_rng(seed)
    kind = (torch.int32, torch.int64)[seed % 2]
    limits = torch.iinfo(kind)
    dim, tokens, num_seqs = 8, 40, 5

    def hostile(*shape: int, high: int) -> Tensor:
        wild = random.choice([limits.min, limits.max, -1, high, high + 1, 0], shape)
        mixed = numpy.where(random.random(shape) < 0.4, wild, random.integers(-2, high + 2, shape))
        return torch.tensor(mixed, dtype=kind)

    weight, bias = _parameters(dim, 4, torch.float32)
    states, x = torch.randn(7, dim, 5), torch.randn(tokens, dim)
    starts, columns = hostile(num_seqs + 1, high=tokens), [hostile(num_seqs, high=3) for _ in range(3)]
    slots, computed = hostile(num_seqs, 3, high=7), hostile(num_seqs, high=30)
    initial = torch.tensor(random.random(num_seqs) < 0.5)
    accepted = hostile(num_seqs, high=3)
    calls: list[Callable[[], Any]] = []
    for channel_last in (True, False):
        inputs = _laid_out(x, channel_last)
        calls += [
            lambda inputs=inputs: pyops.causal_conv1d_fn(
                inputs, weight, bias, states, starts, slots[:, 0].contiguous(), initial
            ),
            lambda inputs=inputs: pyops.causal_conv1d_fn(
                inputs, weight, bias, states, starts, slots, initial, "silu", -1, *columns, computed, 4
            ),
        ]
    calls += [
        lambda: pyops.causal_conv1d_update(
            x.clone(), states, weight, bias, "silu", slots[:, 0].contiguous(), accepted, starts, 3
        ),
        lambda: pyops.causal_conv1d_update(
            x.clone(), states, weight, bias, "silu", slots, None, starts, 3, -1, *columns[1:]
        ),
        lambda: pyops.causal_conv1d_update(x[:5].clone(), states, weight, bias, None, slots, accepted),
    ]
    for call in calls:
        call()
        with testing.cpu("kernels"):
            fault = _fault(call)
        assert "race" in fault or not fault, fault


def test_functions_under_torch_compile() -> None:
    weight, bias = _parameters(8, 4, torch.float32)
    x, starts = torch.randn(6, 8), _indices([0, 6])

    def both(x: Tensor, states: Tensor) -> Tensor:
        out = pyops.causal_conv1d_fn(x[:5].t(), weight, bias, states, starts - starts // 6)
        return torch.cat([out.t(), pyops.causal_conv1d_update(x[5:].clone(), states, weight, bias, "silu")])

    states = torch.zeros(1, 8, 3)
    out = torch.compile(both, backend="eager", fullgraph=True)(x, states)
    _assert_near(out, _convolved(x, weight, bias))
    assert testing.same_bits(states[0], x[3:].t().contiguous())


def _call(**changes: Any) -> Any:
    weight, bias = _parameters(8, 4, torch.float32)
    by_name = {
        "x": torch.randn(5, 8).t(),
        "weight": weight,
        "bias": bias,
        "conv_states": torch.zeros(2, 8, 3),
        "query_start_loc": _indices([0, 5]),
        "cache_indices": _indices([1]),
    }
    return pyops.causal_conv1d_fn(**by_name | changes)


_COLUMN = _indices([0])
_COLUMNS = {
    "block_idx_first_scheduled_token": _COLUMN,
    "block_idx_last_scheduled_token": _COLUMN,
    "initial_state_idx": _COLUMN,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(8, 1)}, "weight: expected a width of 2 to 8"),
        ({"conv_states": torch.zeros(2, 8, 2)}, "conv_states: expected a state_len of at least 3"),
        ({"conv_states": torch.zeros(2, 7, 3)}, "conv_states: expected shape"),
        ({"bias": torch.zeros(8).half()}, "bias: expected dtype float32"),
        ({"activation": "gelu"}, 'activation: expected None, "silu" or "swish", got "gelu"'),
        ({"query_start_loc": _indices([])}, "query_start_loc: expected at least one entry"),
        ({"cache_indices": torch.tensor([1])}, "cache_indices: expected dtype int32 like query_start_loc"),
        ({"cache_indices": _indices([1, 0])}, "cache_indices: expected shape"),
        (_COLUMNS, "cache_indices: expected shape"),
        (_COLUMNS | {"cache_indices": _indices([[1]])}, "block_size_to_align: expected 1 to"),
        ({"initial_state_idx": _COLUMN}, "initial_state_idx: expected the slots of blocks and all"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(pyops.OpError, match=message):
        _call(**changes)


def test_bad_decode_steps_are_refused() -> None:
    weight, bias = _parameters(8, 4, torch.float32)
    with pytest.raises(pyops.OpError, match="causal_conv1d_decode: query_start_loc: expected at least one entry"):
        pyops.causal_conv1d_update(torch.zeros(2, 8), torch.zeros(2, 8, 4), weight, bias, query_start_loc=_indices([]))
    with pytest.raises(pyops.OpError, match="causal_conv1d_update: x: expected 2 or 3 dimensions"):
        pyops.causal_conv1d_update(torch.zeros(8), torch.zeros(2, 8, 4), weight, bias)
    with pytest.raises(pyops.OpError, match="causal_conv1d_fn: x: expected 2 dimensions"):
        _call(x=torch.zeros(8))
    with pytest.raises(pyops.OpError, match="conv_state: expected a state_len of at least width - 2 \\+ seq_len = 5"):
        pyops.causal_conv1d_update(
            torch.zeros(2, 8, 3), torch.zeros(2, 8, 4), weight, bias, num_accepted_tokens=_indices([1, 1])
        )


def test_indices_out_of_range_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_CHECK", "1")
    for op in (pyops.causal_conv1d_prefill, pyops.causal_conv1d_decode):
        op.op.forget()
    with pytest.raises(pyops.OpError, match="causal_conv1d_prefill: cache_indices: 1 of 1 indices are out of range"):
        _call(cache_indices=_indices([2]))
    with pytest.raises(pyops.OpError, match="causal_conv1d_prefill: query_start_loc: 1 of 3"):
        _call(query_start_loc=_indices([0, 5, 4]), cache_indices=_indices([-1, 0]))
    weight, _ = _parameters(8, 4, torch.float32)
    with pytest.raises(pyops.OpError, match="causal_conv1d_decode: num_accepted_tokens: 1 of 2"):
        pyops.causal_conv1d_update(
            torch.zeros(2, 8), torch.zeros(2, 8, 4), weight, None, None, _indices([0, 1]), _indices([0, 2])
        )
    for op in (pyops.causal_conv1d_prefill, pyops.causal_conv1d_decode):
        op.op.forget()
