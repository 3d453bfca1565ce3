"""vLLM's sampler with this library's draws: real batches of vLLM on CPU tensors, against float64 and statistics."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import pyops
from tests.support.vllm_layers import keep

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")

INF, NAN = float("inf"), float("nan")


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, installed as on a GPU."""
    from vllm import platforms

    monkeypatch.setattr(type(platforms.current_platform), "is_cuda_alike", lambda self: True)
    keep(monkeypatch, "sampler", "draw", "logprobs")
    from pyops.integrations.vllm.parts import sampler

    with torch._dynamo.config.patch(disable=True):  # compiled, ranks of tokens would take 20 s
        yield sampler
    sampler.uninstall()


def sampler_of(mode: str = "raw_logprobs") -> Any:
    from vllm.v1.sample.sampler import Sampler

    return Sampler(mode)


def metadata(rows: int, **changed: Any) -> Any:
    """A batch of random requests at temperature 1 without other options."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    ones = torch.ones(rows)
    values: dict[str, Any] = {
        "temperature": ones,
        "all_greedy": False,
        "all_random": True,
        "generators": {},
    }
    values |= {"top_p": None, "top_k": None, "max_num_logprobs": None, "no_penalties": True, "prompt_token_ids": None}
    values |= {"frequency_penalties": ones * 0, "presence_penalties": ones * 0, "repetition_penalties": ones}
    values |= {"output_token_ids": [[] for _ in range(rows)], "allowed_token_ids_mask": None, "bad_words_token_ids": {}}
    return SamplingMetadata(**values | {"logitsprocs": LogitsProcessors()} | changed)


def min_p_processor(values: list[float]) -> Any:
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor

    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(values)))
    processor = MinPLogitsProcessor(config, torch.device("cpu"), False)
    added = [(i, SamplingParams(min_p=p), None, []) for i, p in enumerate(values)]
    processor.update_state(BatchUpdate(len(values), removed=[], added=added, moved=[]))
    return processor


def processors(*found: Any) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors

    return LogitsProcessors(found)


def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """A list that gets the dtype of the logits of every draw by this library."""
    drawn: list[torch.dtype] = []
    draw = pyops.top_k_top_p_sampling_from_logits

    def noting(samples: Any, logits: torch.Tensor, *rest: Any) -> None:
        drawn.append(logits.dtype)
        draw(samples, logits, *rest)

    monkeypatch.setattr(pyops, "top_k_top_p_sampling_from_logits", noting)
    return drawn


def kept(logits: torch.Tensor, t: float, min_p: float, top_k: int, top_p: float) -> torch.Tensor:
    """float64 probabilities of one row after vLLM's filters, in their order: min-p, top-k, top-p."""
    x = logits.double() / t
    x[x.softmax(-1) < min_p * x.softmax(-1).max()] = -INF
    x[x < x.sort(descending=True)[0][min(top_k, x.numel()) - 1]] = -INF
    probabilities, order = x.softmax(-1).sort(descending=True)
    before = probabilities.cumsum(0) - probabilities
    x[order[before >= top_p]] = -INF
    return x.softmax(-1)


@pytest.mark.parametrize(
    ("t", "min_p", "top_k", "top_p"),
    [(1.0, 0.0, 40, 1.0), (0.6, 0.0, 40, 0.85), (1.4, 0.1, 8, 0.9), (0.8, 0.05, 5, 1.0)],
)
def test_tokens_have_the_probabilities_of_the_filters(
    part: Any, t: float, min_p: float, top_k: int, top_p: float
) -> None:
    """Chi-square at 1e-6 over 4000 rows of one distribution, and no token that a filter removes."""
    part.install()
    rows, row = 4000, torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    asked: dict[str, Any] = {
        "temperature": torch.full((rows,), t),
        "logitsprocs": processors(min_p_processor([min_p] * rows)),
    }
    asked |= {"top_k": torch.full((rows,), top_k, dtype=torch.int32)} if top_k < 40 else {}
    asked |= {"top_p": torch.full((rows,), top_p)} if top_p < 1 else {}
    torch.manual_seed(7)
    tokens = sampler_of()(row.expand(rows, -1), metadata(rows, **asked)).sampled_token_ids
    assert tokens.shape == (rows, 1)
    assert tokens.dtype == torch.int32
    counts = numpy.bincount(tokens[:, 0].numpy(), minlength=40)
    expected = kept(row, t, min_p, top_k, top_p).numpy() * rows
    assert not counts[expected == 0].any()
    likely = expected > 5
    rest, expected_rest = counts[~likely].sum(), expected[~likely].sum()
    squares = [*((counts - expected) ** 2 / numpy.maximum(expected, 1e-9))[likely]]
    squares += [(rest - expected_rest) ** 2 / expected_rest] if expected_rest else []
    degrees = len(squares) - 1
    # Wilson and Hilferty's approximation of the quantile of 1 - 1e-6.
    assert sum(squares) < degrees * (1 - 2 / (9 * degrees) + 4.753 * (2 / (9 * degrees)) ** 0.5) ** 3


def test_top_k_and_top_p_with_ties(part: Any) -> None:
    """All tokens with the probability of the last kept token are drawn, and only those."""
    part.install()
    row = torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0, 0.0])  # probabilities 0.44, three of 0.16, 0.06, 0.02
    for limits, right in [
        ({"top_k": torch.full((600,), 2, dtype=torch.int32)}, {0, 1, 2, 3}),
        ({"top_k": torch.full((600,), 1, dtype=torch.int32)}, {0}),
        ({"top_p": torch.full((600,), 0.45)}, {0, 1, 2, 3}),
        ({"top_p": torch.full((600,), 0.4)}, {0}),
        ({"top_p": torch.full((600,), 0.0)}, {0}),
    ]:
        torch.manual_seed(3)
        tokens = sampler_of()(row.expand(600, -1), metadata(600, **limits)).sampled_token_ids
        assert set(tokens.flatten().tolist()) == right


def test_vllms_values_for_no_filter(part: Any) -> None:
    """vLLM writes top_k = vocabulary and top_p = 1 in rows without a filter next to rows with one."""
    part.install()
    limits = {"top_k": torch.tensor([64, 1], dtype=torch.int32).repeat(500), "top_p": torch.ones(1000)}
    torch.manual_seed(3)
    tokens = sampler_of()(torch.zeros(1000, 64), metadata(1000, **limits)).sampled_token_ids
    assert len(set(tokens[::2].flatten().tolist())) == 64


def test_one_seed_gives_one_result(part: Any) -> None:
    part.install()
    logits = torch.randn(16, 300)

    def tokens(seed: int) -> list[int]:
        torch.manual_seed(seed)
        first: torch.Tensor = sampler_of()(logits, metadata(16)).sampled_token_ids
        second: torch.Tensor = sampler_of()(logits, metadata(16)).sampled_token_ids
        assert not torch.equal(first, second)
        result: list[int] = torch.cat([first, second]).flatten().tolist()
        return result

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_greedy_rows_of_a_mixed_batch(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get the first of the most likely tokens, by vLLM's limit of temperatures; the others are drawn."""
    part.install()
    drawn = calls(monkeypatch)
    logits = torch.zeros(400, 50)
    logits[:, 20:30] = 0.001
    temperature = torch.tensor([0.0, 1.0, 0.9e-5, 1.0]).repeat(100)
    tokens = sampler_of()(logits, metadata(400, temperature=temperature, all_random=False)).sampled_token_ids[:, 0]
    assert set(tokens[::2].tolist()) == {20}
    assert len(set(tokens[1::2].tolist())) > 40
    assert drawn == [torch.float32]


def test_logits_stay_in_16_bits(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If only tokens are asked for; all-greedy batches are vLLM's argmax of the same bits."""
    part.install()
    drawn = calls(monkeypatch)
    logits = torch.randn(8, 1000).bfloat16()
    before = logits.clone()
    sampler_of()(logits, metadata(8))
    assert drawn == [torch.bfloat16]
    greedy = sampler_of()(logits, metadata(8, temperature=None, all_greedy=True, all_random=False))
    assert torch.equal(greedy.sampled_token_ids[:, 0].long(), logits.float().argmax(-1))
    assert greedy.sampled_token_ids.dtype == torch.int32
    assert len(drawn) == 1
    assert torch.equal(logits, before)


def test_row_without_a_possible_token(part: Any) -> None:
    """It gives a valid token, as vLLM's own sampler does: -1 would mean a rejected one."""
    part.install()
    logits = torch.zeros(3, 10)
    logits[0], logits[1] = NAN, -INF
    tokens = sampler_of()(logits, metadata(3)).sampled_token_ids
    assert ((tokens >= 0) & (tokens < 10)).all()


def test_warm_up_of_vllms_runner(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its top_k is int64."""
    part.install()
    drawn = calls(monkeypatch)
    warm = metadata(
        4, temperature=torch.full((4,), 0.5), all_random=False, top_k=torch.full((4,), 99), top_p=torch.full((4,), 0.9)
    )
    sampler_of()(torch.randn(4, 100), warm)
    assert drawn == [torch.float32]


def seeded() -> dict[str, Any]:
    return {"generators": {1: torch.Generator().manual_seed(5)}}


class Foreign:
    """A custom logits processor that leaves only token 3."""

    def __init__(self, is_argmax_invariant: bool) -> None:
        self._invariant = is_argmax_invariant

    def is_argmax_invariant(self) -> bool:
        return self._invariant

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(logits.shape[-1], dtype=torch.bool)
        mask[3] = False
        return logits.masked_fill(mask, -INF)


@pytest.mark.parametrize(
    ("mode", "changed"),
    [
        ("raw_logprobs", seeded),
        ("processed_logits", dict),
        ("processed_logprobs", lambda: {"max_num_logprobs": 2}),
        ("raw_logprobs", lambda: {"logitsprocs": processors(Foreign(True))}),
    ],
)
def test_cases_left_to_vllm(part: Any, monkeypatch: pytest.MonkeyPatch, mode: str, changed: Any) -> None:
    """vLLM's results bit for bit, also for requests with a seed among others."""
    logits = torch.randn(4, 100)
    limits = {"top_k": torch.tensor([5, 100, 7, 3], dtype=torch.int32), "top_p": torch.full((4,), 0.9)}
    results = []
    drawn = calls(monkeypatch)
    for installed in (False, True):
        if installed:
            part.install()
        torch.manual_seed(1)
        results.append(sampler_of(mode)(logits.clone(), metadata(4, **limits | changed())))
    vllms, ours = results
    assert not drawn
    assert torch.equal(vllms.sampled_token_ids, ours.sampled_token_ids)
    if vllms.logprobs_tensors is not None:
        for right, got in zip(vllms.logprobs_tensors, ours.logprobs_tensors, strict=True):
            assert right is got or torch.equal(right, got)


@pytest.mark.parametrize(
    "changed",
    [
        lambda: {"logitsprocs": processors(Foreign(False))},
        lambda: {"allowed_token_ids_mask": (torch.arange(50) != 3).expand(6, -1)},
        lambda: {"bad_words_token_ids": {row: [[t] for t in range(50) if t != 3] for row in range(6)}},
    ],
)
def test_edits_before_the_temperature_count(part: Any, monkeypatch: pytest.MonkeyPatch, changed: Any) -> None:
    """vLLM makes them, in float32, and the draw uses them."""
    part.install()
    drawn = calls(monkeypatch)
    tokens = sampler_of()(torch.randn(6, 50).bfloat16(), metadata(6, **changed())).sampled_token_ids
    assert tokens.flatten().tolist() == [3] * 6
    assert drawn == [torch.float32]


def test_empty_batch(part: Any) -> None:
    part.install()
    assert sampler_of()(torch.zeros(0, 10), metadata(0)).sampled_token_ids.shape == (0, 1)
    assert sampler_of().compute_logprobs(torch.zeros(0, 10)).shape == (0, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_of_drawn_tokens(part: Any, dtype: torch.dtype) -> None:
    """Raw logprobs are those of the logits before every filter, by float64, and the token is the one drawn."""
    part.install()
    logits = (torch.randn(5, 200, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    right = logits.double().log_softmax(-1)
    limits = {"top_k": torch.full((5,), 4, dtype=torch.int32), "max_num_logprobs": 3}
    output = sampler_of()(logits.clone(), metadata(5, **limits))
    found = output.logprobs_tensors
    tokens = output.sampled_token_ids.long()
    assert torch.equal(found.logprob_token_ids[:, :1].long(), tokens)
    torch.testing.assert_close(
        found.logprobs.double(), right.gather(1, found.logprob_token_ids.long()), rtol=1e-6, atol=2e-6
    )
    assert torch.equal(found.selected_token_ranks, (right >= right.gather(1, tokens)).sum(-1))


def test_install_and_uninstall(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the table's entries are replaced, on GPUs, and all are restored."""
    from vllm import platforms
    from vllm.v1.sample.sampler import Sampler

    before = dict(vars(Sampler))
    assert part.install() == "sample, forward, compute_logprobs"
    assert part.install() == ""
    part.uninstall()
    assert dict(vars(Sampler)) == before
    keep(monkeypatch, "sampler", "logprobs")
    assert part.install() == "compute_logprobs"
    assert Sampler.sample is before["sample"]
    part.uninstall()
    keep(monkeypatch, "sampler")
    assert part.install() == ""
    keep(monkeypatch, "sampler", "draw", "logprobs")
    monkeypatch.setattr(type(platforms.current_platform), "is_cuda_alike", lambda self: False)
    assert part.install() == ""
    assert dict(vars(Sampler)) == before
