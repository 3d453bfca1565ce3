"""Hooks, `min_tokens` and log-probabilities: the parts of a step that only some requests ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from .._core.system.lazy import torch
from .hooks import LogitsHook, apply_hook
from .runner import Part, Runner
from .scheduler import Request

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 256  # prompt positions per chunk of logits, which bounds their memory


class Logprobs(NamedTuple):
    """Natural log-probabilities at one position of a sequence: the log-softmax of the model's logits, in float32.

    They are computed before hooks, `min_tokens` and temperature.

    Attributes:
        token: log-probability of the token at this position.
        top: {token: log-probability} of the likeliest tokens, the likeliest first; the request sets how many.

    Examples:
        >>> engine = Engine(model)
        >>> request = engine.add([1, 2, 3], SamplingParams(max_tokens=1, logprobs=2))
        >>> [output] = engine.run()
        >>> output.logprobs.top[output.token] == output.logprobs.token  # the likeliest of two
        True
    """

    token: float
    top: dict[int, float]


def logprobs_of(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """For each row of logits, the log-probabilities of its token and of its ``counts[i]`` likeliest tokens."""
    scores = logits.float().log_softmax(-1)
    chosen = scores.gather(-1, torch.tensor(tokens, dtype=torch.int64, device=scores.device)[:, None])[:, 0].tolist()
    values, order = scores.topk(min(max(counts), scores.shape[-1]), -1)
    rows = zip(chosen, order.tolist(), values.tolist(), counts, strict=True)
    return [Logprobs(one, dict(zip(ids[:count], found[:count], strict=True))) for one, ids, found, count in rows]


def generated_logprobs(logits: Tensor, requests: Sequence[Request], tokens: Sequence[int]) -> list[Logprobs | None]:
    """`Logprobs` of the token chosen for each row of logits; None for requests that do not ask for them."""
    found: list[Logprobs | None] = [None] * len(requests)
    asked = {i: count for i, one in enumerate(requests) if (count := one.params.logprobs) is not None}
    if asked:
        given = logprobs_of(logits[list(asked)], [tokens[i] for i in asked], list(asked.values()))
        for i, one in zip(asked, given, strict=True):
            found[i] = one
    return found


def run_scored(runner: Runner, parts: Sequence[Part], requests: Sequence[Request]) -> Tensor:
    """`Runner.run`, which also sets `Request.prompt_logprobs` of the prompts that are scored."""
    if all(request.prompt_logprobs is None for request in requests):
        return runner.run(parts)
    hidden = runner.hidden(parts)
    ends = list(accumulate(len(part.tokens) for part in parts))
    for request, part, end in zip(requests, parts, ends, strict=True):
        if request.prompt_logprobs is not None:
            _score(runner, request, part, hidden[end - len(part.tokens) : end])
    return runner.model.logits(hidden[torch.tensor(ends, dtype=torch.int64, device=hidden.device) - 1])


def _score(runner: Runner, request: Request, part: Part, hidden: Tensor) -> None:
    """Score the prompt tokens that follow those of `part`, from the hidden states of `part`."""
    count, scores = request.params.prompt_logprobs, request.prompt_logprobs
    assert count is not None
    assert scores is not None
    last = min(len(hidden), request.num_prompt_tokens - 1 - part.start)
    for first in range(0, last, _ROWS):
        rows = hidden[first : min(first + _ROWS, last)]
        begin = part.start + first + 1
        tokens = request.tokens[begin : begin + len(rows)]
        scores[begin : begin + len(rows)] = logprobs_of(runner.model.logits(rows), tokens, [count] * len(rows))


def edited(logits: Tensor, requests: Sequence[Request], hook: LogitsHook | None) -> Tensor:
    """The logits after `hook`, the hooks of requests and `min_tokens`. Rows without these stay as they are."""
    own = [i for i, request in enumerate(requests) if request.params.logits_hook is not None]
    early = [i for i, request in enumerate(requests) if request.is_early]
    if hook is None and not own and not early:
        return logits
    logits = logits.to(torch.float32, copy=True)
    if hook is not None:
        logits = apply_hook(hook, logits, [request.text for request in requests])
    for i in own:
        of_request = requests[i].params.logits_hook
        assert of_request is not None
        logits[i] = apply_hook(of_request, logits[i : i + 1], [requests[i].text])[0]
    for i in early:
        logits[i, list(requests[i].stops)] = -math.inf
    return logits
