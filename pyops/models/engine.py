"""Many texts at once: requests wait for blocks of the cache, run together, and step back when blocks run out."""

from __future__ import annotations

import random
import reprlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Literal, NamedTuple

from .._core.errors import ModelError
from . import memory
from .config import Config
from .config_values import is_integer
from .llama import Llama
from .params import SamplingParams, sample
from .runner import Part, Runner

Finish = Literal["stop", "length"]


class Output(NamedTuple):
    """A token of a request; with the last, why it is: an end of text ("stop") or ``max_tokens`` ("length")."""

    request: int
    token: int
    finished: Finish | None


@dataclass(eq=False)
class _Request:
    params: SamplingParams
    tokens: list[int]  # the prompt, then what came of it
    most_tokens: int
    random: random.Random
    number: int = -1  # before it waits
    computed: int = 0  # tokens that the cache holds
    blocks: list[int] = field(default_factory=list)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


class Engine:
    """Continuous batching over a paged cache (Kwon et al. 2023, arXiv:2309.06180).

    A step computes prompts, or parts of them, if any wait, and otherwise one token of every running request. When a
    request needs a block and none is free, the youngest gives all of its back and waits to be computed anew.

    Args:
        model: whose weights are set.
        num_blocks: of the cache; None for as many as `max_num_seqs` texts of `max_seq_len` tokens fill, or as fit into
            0.8 of the device's free memory, whichever is less.
        block_size: tokens of a block.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of prompts in one step.
        max_seq_len: tokens of a text with its prompt; None for 4096, or the model's positions if they are fewer.
        graphs: as in `Runner`.

    Attributes:
        preemptions: how often a request gave its blocks back.
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
        """Ask for a text behind `prompt`; the number of the request. One that could never be served is a ModelError."""
        return self._enqueue(self._request(prompt, params))

    def step(self) -> list[Output]:
        """Run the model once; the tokens that came of it. Nothing to do gives none.

        An error ends all requests: what was asked for is forgotten, and the engine can be asked anew.
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
        """Whether any request has not ended."""
        return bool(self._waiting or self._running)

    def run(self) -> Iterator[Output]:
        """Every token of every request, as they come, until all have ended. More may be added meanwhile."""
        while self.busy:
            yield from self.step()

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None) -> list[list[int]]:
        """The texts behind `prompts`, without them. Nothing else may have been asked for; one refused refuses all."""
        if self.busy:
            raise ModelError("Engine.generate", "what was asked for before has not ended")
        requests = [self._request(prompt, params) for prompt in prompts]
        texts: dict[int, list[int]] = {self._enqueue(request): [] for request in requests}
        for output in self.run():
            texts[output.request].append(output.token)
        return list(texts.values())

    def _request(self, prompt: Sequence[int], params: SamplingParams | None) -> _Request:
        """What is asked for, once it is known that it can be served."""
        params = params or SamplingParams()
        tokens = check_request(self.model.config, prompt, params, self.max_seq_len)
        most_tokens = len(tokens) + params.max_tokens
        needed = self._blocks_for(most_tokens - 1)  # the last token is never read again
        if needed > self.num_blocks:
            held = f"the cache has {self.num_blocks}"
            raise ModelError("request", f"prompt and max_tokens: need {needed} blocks, and {held}")
        return _Request(params, tokens, most_tokens, random.Random(int(params.seed)))

    def _enqueue(self, request: _Request) -> int:
        request.number, self._count = self._count, self._count + 1
        self._waiting.append(request)
        return request.number

    def _admit(self) -> None:
        """Let those that wait run, in their order, while there are blocks for them and one more for each that runs."""
        while self._waiting and len(self._running) < self.max_num_seqs:
            needed = self._blocks_for(len(self._waiting[0].tokens))
            if needed + len(self._running) > len(self._free):
                break
            request = self._waiting.popleft()
            request.blocks = [self._free.pop() for _ in range(needed)]
            self._running.append(request)

    def _prompts(self) -> list[tuple[_Request, int]]:
        """Requests with more than one token to compute, and how many of them now."""
        left, found = self.max_num_batched_tokens, []
        for request in self._running:
            count = min(left, request.pending)
            if request.pending > 1 and count:
                found.append((request, count))
                left -= count
        return found

    def _decodes(self) -> list[tuple[_Request, int]]:
        """All that run, with a block for the next token of each; the youngest give way where none is free."""
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
        finished: Finish | None = "length" if len(request.tokens) == request.most_tokens else None
        if token in self.model.config.eos_token_ids and not request.params.ignore_eos:
            finished = "stop"
        if finished:
            self._release(request)
        return Output(request.number, token, finished)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def check_request(config: Config, prompt: Sequence[int], params: SamplingParams, max_seq_len: int) -> list[int]:
    """The tokens of a prompt. A text that no engine for `max_seq_len` tokens could write behind it is a ModelError."""
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
    """Blocks of a cache that the device has room for, beside what the runner holds for so many texts of that length."""
    config = model.config
    token_bytes = 2 * len(model.layers) * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    table = 16 * max_seq_len * config.head_dim  # at most, while it is made of float32, in parts
    rows = 16 * max_num_seqs * -(-max_seq_len // block_size)
    return int((memory.free(model.device) - table - rows) // (token_bytes * block_size))
