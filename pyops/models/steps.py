"""Steps of an engine: the model is run for the scheduled requests, and a token is chosen for each of them.

The host may launch a decode step before it has read the tokens of the one before, which stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .drawing import Draw, chosen
from .hooks import LogitsHook
from .logprobs import Logprobs, edited, generated_logprobs, run_scored
from .runner import Part, Runner
from .scheduler import Request, Scheduler

if TYPE_CHECKING:
    from torch import Tensor


class Chosen(NamedTuple):
    """A token of a request that the host has read, and log-probabilities if the request asks for them."""

    request: Request
    token: int
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs | None] | None = None


class _Launched(NamedTuple):
    """A step with tokens that are still on the device.

    Attributes:
        requests: a request for each row; None for a row with a token that nobody reads.
        read: waits, and returns the token of each row.
    """

    requests: list[Request | None]
    read: Callable[[], list[int]]


class Steps:
    """Runs the steps that `scheduler` plans.

    Args:
        runner: of the model.
        hook: of the engine, or None.
        ahead: whether a step may be launched before the tokens of the previous one are read. It is where both are
            decodes of requests without hooks, log-probabilities and `min_tokens`.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, hook: LogitsHook | None, ahead: bool) -> None:
        self._runner, self._scheduler, self._hook, self._ahead = runner, scheduler, hook, ahead
        self._launched: _Launched | None = None

    def drop(self) -> None:
        """Forget the step that is launched."""
        self._launched = None

    def forget(self, request: Request) -> None:
        """Let nobody read the token of the launched step for `request`."""
        launched = self._launched
        if launched is None or request not in launched.requests:
            return
        launched.requests[launched.requests.index(request)] = None
        self._scheduler.withdraw(request)
        if not any(launched.requests):
            self._launched = None

    def next(self) -> list[Chosen]:
        """The tokens of the next step, none if it chooses none or if there is nothing to do."""
        launched, self._launched = self._launched, None
        if launched is None:
            steps = self._scheduler.next_step()
            is_plain = self._is_plain([request for request, _ in steps])
            if not steps or not is_plain or not all(request.is_step for request, _ in steps):
                return self._run(steps, is_plain) if steps else []
            launched = self._launch([request for request, _ in steps], None)
        if self._ahead:
            following = self._scheduler.decodes_ahead() if self._is_plain(self._scheduler.running) else []
            if following:
                self._launched = self._launch(following, launched)
        rows = zip(launched.requests, launched.read(), strict=True)
        return [Chosen(request, token) for request, token in rows if request is not None]

    def _is_plain(self, requests: Sequence[Request]) -> bool:
        """Whether the tokens of `requests` are chosen by logits and parameters alone."""
        return self._hook is None and all(request.is_plain for request in requests)

    def _launch(self, requests: list[Request], before: _Launched | None) -> _Launched:
        """Launch a step of decodes. The newest tokens of those that `before` has launched are on the device."""
        places: dict[Any, int] = {} if before is None else {one: i for i, one in enumerate(before.requests)}
        is_long, parts = self._scheduler.is_long, []
        for request in requests:
            known = request.tokens[-1:]
            source = places.get(request, -1)
            parts.append(Part(known, request.computed, request.blocks, request.slot, is_long(request), source))
        read = self._runner.choose(parts, [Draw(one.params, one.drawn) for one in requests])
        for request in requests:
            request.computed += 1
            self._scheduler.expect(request)
        return _Launched([*requests], read)

    def _run(self, steps: list[tuple[Request, int]], is_plain: bool) -> list[Chosen]:
        """Run a step and read its tokens at once."""
        is_long = self._scheduler.is_long
        parts = [
            Part(r.tokens[r.computed : r.computed + n], r.computed, r.blocks, r.slot, is_long(r)) for r, n in steps
        ]
        logits = self._runner.run(parts) if is_plain else run_scored(self._runner, parts, [r for r, _ in steps])
        for request, count in steps:
            request.computed += count
        done = [(i, request) for i, (request, _) in enumerate(steps) if not request.pending]
        if not done:
            return []
        if len(done) < len(steps):
            logits = logits[[i for i, _ in done]]
        requests = [request for _, request in done]
        raw, logits = logits, logits if is_plain else edited(logits, requests, self._hook)
        tokens = chosen(logits, [Draw(request.params, request.drawn) for request in requests])
        for request in requests:
            self._scheduler.expect(request)
        if is_plain:
            return [Chosen(request, token) for request, token in zip(requests, tokens, strict=True)]
        return self._with_logprobs(requests, tokens, raw)

    def _with_logprobs(self, requests: list[Request], tokens: list[int], logits: Tensor) -> list[Chosen]:
        found = []
        each = zip(requests, tokens, generated_logprobs(logits, requests, tokens), strict=True)
        for request, token, one in each:
            found.append(Chosen(request, token, one, request.prompt_logprobs))
            request.prompt_logprobs = None
        return found
