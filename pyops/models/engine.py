"""Continuous batching: requests wait for cache blocks, run together, and are preempted when blocks run out."""

from __future__ import annotations

import random
import reprlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Literal, NamedTuple

from .._model_error import ModelError
from .checkpoint import free_bytes
from .config import Config
from .config_values import is_integer
from .llama import Llama
from .params import SamplingParams, sample
from .runner import Part, Runner

Finish = Literal["stop", "length"]


class Output(NamedTuple):
    """A token of a request. `finished` is set with the last: "stop" at an end of text, "length" at ``max_tokens``."""

    request: int
    token: int
    finished: Finish | None


@dataclass(eq=False)
class _Request:
    params: SamplingParams
    tokens: list[int]  # the prompt, then the generated tokens
    max_seq_len: int  # tokens of the prompt and the generated text together
    random: random.Random
    number: int = -1  # set when the request is queued
    computed: int = 0  # tokens that the cache holds
    blocks: list[int] = field(default_factory=list)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


class Engine:
    """Continuous batching over a paged cache (Kwon et al. 2023, arXiv:2309.06180).

    A step computes prompts, or parts of prompts, if there are any to compute, and otherwise one token of every running
    request. When a request needs a block and none is free, the youngest request is preempted: it gives back all of its
    blocks and waits to be computed again.

    Args:
        model: a model whose weights are set.
        num_blocks: blocks of the cache. None for as many as `max_num_seqs` texts of `max_seq_len` tokens fill, or as
            fit into 0.8 of the device's free memory, whichever is less.
        block_size: tokens of a block.
        max_num_seqs: requests that run at the same time, at most.
        max_num_batched_tokens: prompt tokens of one step, at most.
        max_seq_len: tokens of a text with its prompt, at most; None for 4096, or the model's positions if these are
            fewer.
        graphs: as in `Runner`.

    Attributes:
        preemptions: how often a request was preempted.
    """

    def __init__(
        self,
        model: Llama,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        max_seq_len: int | None = None,
        graphs: bool | None = None,
    ) -> None:
        positions = model.config.max_position_embeddings
        self.max_seq_len = min(4096, positions) if max_seq_len is None else max_seq_len
        for name, value in (
            ("block_size", block_size),
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_seq_len", self.max_seq_len),
            ("num_blocks", 1 if num_blocks is None else num_blocks),
        ):
            if not is_integer(value) or value < 1:
                raise ModelError("Engine", f"{name}: expected an integer, 1 or more, got {value!r}")
        if self.max_seq_len > positions:
            raise ModelError("Engine", f"max_seq_len: expected at most {positions} positions, got {max_seq_len}")
        max_blocks = _blocks_in_memory(model, block_size, max_num_seqs, self.max_seq_len)
        if num_blocks is None:
            num_blocks = min(max_num_seqs * -(-self.max_seq_len // block_size), int(0.8 * max_blocks))
        if not 1 <= num_blocks <= max_blocks:
            limit = f"the memory of {model.device} has room for {max(max_blocks, 0)}"
            raise ModelError("Engine", f"num_blocks: {limit}, with what max_num_seqs and max_seq_len ask for")
        self.model, self.block_size, self.num_blocks = model, block_size, num_blocks
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.preemptions = 0
        self._runner = Runner(model, num_blocks, block_size, max_num_seqs, self.max_seq_len, graphs)
        self._free = list(range(num_blocks))
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []  # the oldest first
        self._count = 0

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None) -> int:
        """Queue a request to continue `prompt`; returns its number. ModelError if it could never be served."""
        return self._enqueue(self._request(prompt, params))

    def step(self) -> list[Output]:
        """Run the model once; returns the tokens that it generated, none if there was nothing to do.

        An error drops all requests, and the engine can take new ones.
        """
        try:
            return self._step()
        except BaseException:
            self._waiting.clear()
            self._running.clear()
            self._free = list(range(self.num_blocks))
            raise

    def _step(self) -> list[Output]:
        self._admit()
        steps = self._prompts() or self._decodes()
        if not steps:
            return []
        parts = [Part(r.tokens[r.computed : r.computed + n], r.computed, r.blocks) for r, n in steps]
        logits = self._runner.run(parts)
        for request, count in steps:
            request.computed += count
        done = [(i, request) for i, (request, _) in enumerate(steps) if not request.pending]
        if not done:
            return []
        if len(done) < len(steps):
            logits = logits[[i for i, _ in done]]
        requests = [request for _, request in done]
        tokens = sample(logits, [r.params for r in requests], [r.random.random() for r in requests])
        return [self._accept(request, token) for request, token in zip(requests, tokens, strict=True)]

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    def run(self) -> Iterator[Output]:
        """Yield every token of every request, as they are generated, until all have ended. Requests may be added."""
        while self.busy:
            yield from self.step()

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None) -> list[list[int]]:
        """The continuations of `prompts`. No other request may be pending. If one prompt is refused, none is served."""
        if self.busy:
            raise ModelError("Engine.generate", "what was asked for before has not ended")
        requests = [self._request(prompt, params) for prompt in prompts]
        texts: dict[int, list[int]] = {self._enqueue(request): [] for request in requests}
        for output in self.run():
            texts[output.request].append(output.token)
        return list(texts.values())

    def _request(self, prompt: Sequence[int], params: SamplingParams | None) -> _Request:
        """A checked request. ModelError if it could never be served."""
        params = params or SamplingParams()
        tokens = check_request(self.model.config, prompt, params, self.max_seq_len)
        max_seq_len = len(tokens) + params.max_tokens
        needed = self._blocks_for(max_seq_len - 1)  # the last token is never read again
        if needed > self.num_blocks:
            has = f"the cache has {self.num_blocks}"
            raise ModelError("request", f"prompt and max_tokens: need {needed} blocks, and {has}")
        return _Request(params, tokens, max_seq_len, random.Random(int(params.seed)))

    def _enqueue(self, request: _Request) -> int:
        request.number, self._count = self._count, self._count + 1
        self._waiting.append(request)
        return request.number

    def _admit(self) -> None:
        """Start waiting requests, in order, while blocks remain for them and one more for each running request."""
        while self._waiting and len(self._running) < self.max_num_seqs:
            needed = self._blocks_for(len(self._waiting[0].tokens))
            if needed + len(self._running) > len(self._free):
                break
            request = self._waiting.popleft()
            request.blocks = [self._free.pop() for _ in range(needed)]
            self._running.append(request)

    def _prompts(self) -> list[tuple[_Request, int]]:
        """[(request with more than one token to compute, tokens of this step)]."""
        budget, found = self.max_num_batched_tokens, []
        for request in self._running:
            count = min(budget, request.pending)
            if request.pending > 1 and count:
                found.append((request, count))
                budget -= count
        return found

    def _decodes(self) -> list[tuple[_Request, int]]:
        """[(running request, 1)], each with a block for its next token. The youngest are preempted if none is free."""
        for request in list(self._running):
            while request in self._running and len(request.blocks) < self._blocks_for(len(request.tokens)):
                if self._free:
                    request.blocks.append(self._free.pop())
                else:
                    self._preempt(self._running[-1])
        return [(request, 1) for request in self._running]

    def _preempt(self, request: _Request) -> None:
        self._release(request)
        request.computed = 0
        self._waiting.appendleft(request)
        self.preemptions += 1

    def _release(self, request: _Request) -> None:
        self._running.remove(request)
        self._free += request.blocks
        request.blocks = []

    def _accept(self, request: _Request, token: int) -> Output:
        request.tokens.append(token)
        finished: Finish | None = "length" if len(request.tokens) == request.max_seq_len else None
        if token in self.model.config.eos_token_ids and not request.params.ignore_eos:
            finished = "stop"
        if finished:
            self._release(request)
        return Output(request.number, token, finished)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def check_request(config: Config, prompt: Sequence[int], params: SamplingParams, max_seq_len: int) -> list[int]:
    """The tokens of a prompt. ModelError if prompt and `params.max_tokens` do not fit into `max_seq_len` tokens."""
    try:
        tokens = [index(token) for token in prompt]
    except TypeError:
        raise ModelError("request", f"prompt: expected integers, got {reprlib.repr(prompt)}") from None
    wrong = [token for token in tokens if not 0 <= token < config.vocab_size]
    if wrong or not tokens:
        got = f"token {wrong[0]}" if wrong else "none"
        raise ModelError("request", f"prompt: expected tokens from 0 to {config.vocab_size - 1}, got {got}")
    if len(tokens) + params.max_tokens > max_seq_len:
        limit, asked = f"max_seq_len={max_seq_len}", len(tokens) + params.max_tokens
        raise ModelError("request", f"prompt and max_tokens: expected at most {limit} tokens, got {asked}")
    return tokens


def _blocks_in_memory(model: Llama, block_size: int, max_num_seqs: int, max_seq_len: int) -> int:
    """Blocks of a cache that fit into the free memory of the device, beside what a `Runner` of these sizes takes."""
    config = model.config
    token_bytes = 2 * len(model.layers) * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    table = 16 * max_seq_len * config.head_dim  # peak of the table of cosines and sines, while it is made in float32
    rows = 16 * max_num_seqs * -(-max_seq_len // block_size)
    return int((free_bytes(model.device) - table - rows) // (token_bytes * block_size))
