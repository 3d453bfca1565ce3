"""Options of requests: cancelling, log-probabilities, hooks on logits, and stop tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pyops import ModelError
from pyops.models import Decoder, Engine, Logprobs, SamplingParams, Text, bias, load, min_p
from pyops.models.drawing import Draw, chosen
from pyops.models.logprobs import edited
from tests.support.small_models import PROMPTS, folders, reference, text, texts

CASE = "llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return folders(tmp_path_factory)


@pytest.fixture(scope="module")
def llama(folder: Callable[[str], Path]) -> Decoder:
    return load(folder(CASE))


def written(engine: Engine) -> dict[int, list[int]]:
    """The tokens of all requests until they have ended."""
    found: dict[int, list[int]] = {}
    for output in engine.run():
        found.setdefault(output.request, []).append(output.token)
    return found


# Cancelling


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["running", "in the middle of a prompt", "waiting"])
def test_cancelled_request_leaves_the_others_alone(victim: int, llama: Decoder) -> None:
    engine = Engine(llama, block_size=4, max_seq_len=96, max_num_seqs=2, max_num_batched_tokens=24)
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[1]]
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=16))
    found: dict[int, list[int]] = {}
    for _ in range(2):
        for output in engine.step():
            found.setdefault(output.request, []).append(output.token)
    first, second = engine._scheduler.running
    assert (first.number, first.is_step, second.number) == (0, True, 1)
    assert 0 < second.computed < len(PROMPTS[2])
    assert [each.number for each in engine._scheduler.waiting] == [2]
    before = len(engine._scheduler.free_blocks)
    held = sum(len(each.blocks) for each in engine._scheduler if each.number == victim)
    engine.cancel(victim)
    assert len(engine._scheduler.free_blocks) == before + held
    found.pop(victim, None)
    for number, tokens in written(engine).items():
        found.setdefault(number, []).extend(tokens)
    assert found == {i: text(CASE, tuple(p), 16) for i, p in enumerate(prompts) if i != victim}
    assert sorted(engine._scheduler.free_blocks) == list(range(engine.num_blocks))
    assert sorted(engine._scheduler.free_slots) == [0, 1]


def test_ended_request_is_not_cancelled(llama: Decoder) -> None:
    engine = Engine(llama, max_seq_len=96)
    engine.generate([[3]], SamplingParams(max_tokens=1))
    for number in (0, 1, "0"):
        with pytest.raises(ModelError, match=r"Engine\.cancel: request: expected one that has not ended"):
            engine.cancel(number)  # type: ignore[arg-type]


# Log-probabilities


def truth(tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities in float64 after each token, by transformers' model."""
    model = reference(CASE)
    with torch.no_grad():
        found: torch.Tensor = model.double()(torch.tensor([tokens])).logits[0].log_softmax(-1)
    model.float()
    return found


def check(found: Logprobs | None, expected: torch.Tensor, token: int, count: int) -> None:
    assert found is not None
    # 160 logits of at most some tens, from dot products of 96 float32 numbers in two layers.
    assert math.isclose(found.token, expected[token], abs_tol=2e-4)
    assert len(found.top) == count
    values, order = expected.topk(count)
    assert list(found.top) == order.tolist()
    for value, one in zip(values.tolist(), found.top.values(), strict=True):
        assert math.isclose(value, one, abs_tol=2e-4)


@pytest.mark.parametrize("budget", [8192, 7], ids=["whole prompts", "prompts in parts"])
def test_logprobs_match_the_model_in_float64(budget: int, llama: Decoder) -> None:
    """For the prompt and for drawn tokens, in a batch with a request without logprobs and one with another number of
    them."""
    engine = Engine(llama, max_seq_len=160, max_num_batched_tokens=budget)
    asked = {"temperature": 1.5, "max_tokens": 8, "seed": 3}
    plain = engine.add(PROMPTS[0], SamplingParams(**asked))
    engine.add(PROMPTS[2], SamplingParams(**asked, logprobs=3, prompt_logprobs=2))
    engine.add(PROMPTS[1], SamplingParams(**asked, logprobs=0, prompt_logprobs=0))
    outputs = list(engine.run())
    assert all(each.logprobs is each.prompt_logprobs is None for each in outputs if each.request == plain)
    for number, prompt, count, of_prompt in ((1, PROMPTS[2], 3, 2), (2, PROMPTS[1], 0, 0)):
        mine = [each for each in outputs if each.request == number]
        tokens = prompt + [each.token for each in mine]
        expected = truth(tokens)
        for i, each in enumerate(mine, len(prompt)):
            check(each.logprobs, expected[i - 1], each.token, count)
        scores = mine[0].prompt_logprobs
        assert scores is not None
        assert (len(scores), scores[0]) == (len(prompt), None)
        for i, one in enumerate(scores[1:], 1):
            check(one, expected[i - 1], tokens[i], of_prompt)
        assert all(each.prompt_logprobs is None for each in mine[1:])


def test_logprobs_are_of_logits_before_hooks(llama: Decoder) -> None:
    engine = Engine(llama, max_seq_len=160)
    engine.add(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, logits_hook=bias({7: 1e4})))
    outputs = list(engine.run())
    expected = truth([*PROMPTS[0], 7, 7, 7])
    for i, each in enumerate(outputs, len(PROMPTS[0])):
        assert each.token == 7
        check(each.logprobs, expected[i - 1], 7, 2)


def test_logprobs_change_no_token_and_survive_preemption(llama: Decoder) -> None:
    engine = Engine(llama, num_blocks=24, block_size=4, max_seq_len=96, max_num_seqs=4)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    params = SamplingParams(max_tokens=50, logprobs=1, prompt_logprobs=1)
    for prompt in prompts:
        engine.add(prompt, params)
    outputs = list(engine.run())
    assert engine.preemptions > 0
    for number, prompt in enumerate(prompts):
        mine = [each for each in outputs if each.request == number]
        assert [each.token for each in mine] == text(CASE, tuple(prompt), 50)
        assert [list(each.logprobs.top) for each in mine if each.logprobs] == [[each.token] for each in mine]
        assert [each.prompt_logprobs is not None for each in mine] == [True] + [False] * 49


# Hooks


def test_engine_hook_sees_every_row_and_sequence(llama: Decoder) -> None:
    """Its logits follow the tokens that it gets, and a token that it masks in place is never drawn."""
    seen: list[Text] = []

    def hook(logits: torch.Tensor, rows: Sequence[Text]) -> None:
        assert logits.dtype == torch.float32
        for row, one in zip(logits, rows, strict=True):
            assert int(row.argmax()) == int(truth(one.tokens)[-1].argmax())
            seen.append(one._replace(tokens=list(one.tokens)))
        logits[:, ::2] = -math.inf

    engine = Engine(llama, max_seq_len=96, max_num_batched_tokens=24, logits_hook=hook)
    found = engine.generate(PROMPTS, SamplingParams(max_tokens=6))
    assert all(token % 2 for tokens in found for token in tokens)
    for number, (prompt, tokens) in enumerate(zip(PROMPTS, found, strict=True)):
        mine = [one for one in seen if one.request == number]
        assert [one.tokens for one in mine] == [prompt + tokens[:i] for i in range(6)]
        assert {one.num_prompt_tokens for one in mine} == {len(prompt)}


def test_request_hook_affects_only_its_request(llama: Decoder) -> None:
    """It may return other logits; the other requests generate the same tokens as without it."""
    params = SamplingParams(max_tokens=8)
    engine = Engine(llama, max_seq_len=96)
    engine.add(PROMPTS[0], params)
    engine.add(PROMPTS[0], replace(params, logits_hook=lambda logits, rows: -logits))
    engine.add(PROMPTS[2], replace(params, logits_hook=bias({7: 1e4})))
    found = written(engine)
    assert found[0] == text(CASE, tuple(PROMPTS[0]), 8)
    tokens = list(PROMPTS[0])
    for token in found[1]:
        assert token == int(truth(tokens)[-1].argmin())
        tokens.append(token)
    assert found[2] == [7] * 8


def test_hook_that_returns_another_shape_is_refused(llama: Decoder) -> None:
    engine = Engine(llama, max_seq_len=96, logits_hook=lambda logits, rows: logits[:, :5])
    with pytest.raises(ModelError, match=r"logits_hook: expected None or logits of shape \(1, 160\), got \(1, 5\)"):
        engine.generate([[3]])
    assert not engine.busy


def test_bias_and_min_p_match_their_formulas() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3
    given = logits.clone()
    assert bias({4: 1.5, 9: -math.inf})(given, []) is None
    expected = logits.clone()
    expected[:, 4] += 1.5
    expected[:, 9] = -math.inf
    assert torch.equal(given, expected)
    for share, temperature in ((0.1, 1.0), (0.3, 2.0), (1.0, 1.0)):
        given = logits.clone()
        min_p(share, temperature)(given, [])
        probabilities = (logits.double() / temperature).softmax(-1)
        kept = probabilities >= share * probabilities.amax(-1, keepdim=True)
        assert torch.equal(given, logits.masked_fill(~kept, -math.inf))
    for share, temperature in ((0.0, 1.0), (1.1, 1.0), (0.5, 0.0)):
        with pytest.raises(ModelError, match="min_p: expected 0 < share <= 1 and temperature > 0"):
            min_p(share, temperature)


def test_logits_without_hooks_are_not_copied(llama: Decoder) -> None:
    engine = Engine(llama, max_seq_len=96)
    engine.add([3], SamplingParams(logprobs=1))
    logits = torch.zeros(1, 160)
    assert edited(logits, list(engine._scheduler), None) is logits
    assert chosen(logits, [Draw(SamplingParams(), 0)]) == [0]


# Stop tokens


def test_stop_tokens_in_addition_to_the_models_own(llama: Decoder) -> None:
    """`ignore_eos` concerns the model's EOS tokens; `min_tokens` forbids both kinds until there are that many
    tokens."""
    expected = text(CASE, tuple(PROMPTS[0]), 24)
    eos, stop = expected[4], expected[7]
    assert expected.index(eos) == 4
    assert expected.index(stop) == 7
    model = Decoder.__new__(Decoder)
    model.__dict__ |= llama.__dict__ | {"config": replace(llama.config, eos_token_ids=(eos, 10**6))}
    params = SamplingParams(max_tokens=24)

    def ends(**options: object) -> tuple[list[int], str | None]:
        engine = Engine(model, max_seq_len=96)
        engine.add(PROMPTS[0], replace(params, **options))  # type: ignore[arg-type]
        outputs = list(engine.run())
        return [output.token for output in outputs], outputs[-1].finished

    assert ends() == (expected[:5], "stop")
    assert ends(ignore_eos=True) == (expected, "length")
    assert ends(ignore_eos=True, stop_token_ids=(159, stop)) == (expected[:8], "stop")
    assert ends(stop_token_ids=(stop,)) == (expected[:5], "stop")
    assert ends(ignore_eos=True, stop_token_ids=(stop,), max_tokens=8) == (expected[:8], "stop")
    later, finished = ends(stop_token_ids=(stop,), min_tokens=12)
    assert later[:4] == expected[:4]
    assert finished in ("stop", "length")
    assert not {eos, stop} & set(later[:12])
    assert later[4] == int(truth(PROMPTS[0] + later[:4])[-1].scatter(0, torch.tensor([eos, stop]), -math.inf).argmax())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": [3]}, "stop_token_ids: expected a tuple of tokens"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids: expected a tuple of tokens"),
        ({"min_tokens": -1}, "min_tokens: expected an integer, 0 or more"),
        ({"logprobs": -1}, "logprobs: expected None or an integer, 0 or more"),
        ({"prompt_logprobs": True}, "prompt_logprobs: expected None or an integer, 0 or more"),
        ({"logits_hook": 3}, "logits_hook: expected None or a function"),
    ],
)
def test_wrong_params_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_stop_token_outside_the_vocabulary_is_refused(llama: Decoder) -> None:
    with pytest.raises(ModelError, match="stop_token_ids: expected tokens from 0 to 159, got"):
        Engine(llama, max_seq_len=96).add([3], SamplingParams(stop_token_ids=(160,)))


def test_the_examples_of_the_page_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    names: dict[str, object] = {}
    for example in page.split("```python\n")[1:3]:
        exec(example.split("```")[0], names)


def test_options_without_effect_change_no_token(llama: Decoder) -> None:
    """Hooks that return their logits, logprobs, and no stop tokens."""
    engine = Engine(llama, max_seq_len=96, logits_hook=lambda logits, rows: None)
    params = SamplingParams(max_tokens=12, logprobs=2, logits_hook=lambda logits, rows: logits, stop_token_ids=())
    assert engine.generate(PROMPTS[:2], params) == texts(CASE, 12)[:2]
