"""Steps that are launched before the tokens of the previous one are read: they change no token."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from pyops.models import Config, Decoder, Engine, SamplingParams, StateSpace, bias

ATTENTION = Config(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
)
STATES = StateSpace("mamba", 64, state_size=4, conv_kernel=4, time_step_rank=2)
CONFIGS = {
    "attention": ATTENTION,
    "with states": replace(ATTENTION, layer_types=("mamba", "attention"), state_space=STATES),
}


def params_of(draw: random.Random) -> SamplingParams:
    options: dict[str, Any] = draw.choice(
        [{}, {"temperature": 1.5}, {"temperature": 1.5, "top_k": 9, "top_p": 0.9}, {"temperature": 2.0, "min_p": 0.1}]
    )
    if draw.random() < 0.3:
        options = options | {"stop_token_ids": tuple(draw.sample(range(48), 4))}
    if draw.random() < 0.15:
        options = options | draw.choice([{"logprobs": 2}, {"logits_hook": bias({3: 2.0})}, {"min_tokens": 3}])
    return SamplingParams(max_tokens=draw.randint(1, 14), seed=draw.randint(0, 3), **options)


def played(model: Decoder, seed: int, ahead: bool) -> tuple[dict[int, list[tuple[int, str | None]]], int]:
    """The tokens of random requests; some are cancelled or stepped back at a number of tokens that the seed
    says; and how many steps were launched ahead."""
    draw = random.Random(seed)
    options: dict[str, Any] = {"max_num_seqs": draw.randint(2, 4), "num_blocks": draw.randint(10, 24), "block_size": 4}
    engine = Engine(model, max_seq_len=40, max_num_batched_tokens=draw.randint(3, 16), ahead=ahead, **options)
    texts = [[draw.randrange(48) for _ in range(draw.randint(1, 12))] for _ in range(6)]
    requests = [engine.add(prompt, params_of(draw)) for prompt in texts[:4]]
    later = [(prompt, params_of(draw)) for prompt in texts[4:]]
    # {request: (its number of tokens, those that it keeps, or None to cancel it)}
    edits = {i: (draw.randint(1, 6), draw.choice([None, 0, 1, 2])) for i in range(6) if draw.random() < 0.4}
    found: dict[int, list[tuple[int, str | None]]] = {i: [] for i in range(6)}
    count, launched = 0, 0
    while engine.busy or later:
        if later and count >= 3:
            requests.append(engine.add(*later.pop()))
        for output in engine.step():
            found[output.request].append((output.token, output.finished))
            assert output.finished is None or output.request not in edits or edits.pop(output.request)
        launched += engine._steps._launched is not None
        count += 1
        for request, (at, kept) in list(edits.items()):
            if len(found[request]) >= at:
                del edits[request]
                if kept is None:
                    engine.cancel(request)
                else:
                    left = max(0, len(found[request]) - kept)
                    engine.step_back(request, len(texts_of(engine, request)) - len(found[request]) + left)
                    del found[request][left:]
    assert engine.step() == []
    assert sorted(engine._scheduler.free_blocks) == list(range(engine.num_blocks))
    return found, launched


def texts_of(engine: Engine, request: int) -> list[int]:
    return next(each for each in engine._scheduler if each.number == request).tokens


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_are_those_of_single_steps(kind: str) -> None:
    """Through preemptions, stop tokens, chunked prompts, cancelled requests and removed tokens."""
    model = Decoder(CONFIGS[kind], "float32").randomise(0, 2.0)
    most = 0
    with torch.no_grad():
        for seed in range(6):
            expected, none = played(model, seed, False)
            found, launched = played(model, seed, True)
            assert found == expected, seed
            assert none == 0
            most = max(most, launched)
    assert most > 8


def test_a_step_is_launched_before_the_tokens_of_the_last_are_read() -> None:
    model = Decoder(ATTENTION, "float32").randomise(0, 2.0)
    engine = Engine(model, ahead=True)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=4))
    events: list[str] = []
    choose = engine._runner.choose

    def noted(*args: Any) -> Any:
        events.append("launch")
        read = choose(*args)

        def tokens() -> list[int]:
            events.append("read")
            return read()

        return tokens

    engine._runner.choose = noted  # type: ignore[method-assign]
    assert [output.request for output in engine.run()] == [request] * 4
    assert events == ["launch", "launch", "read", "launch", "read", "read"]
