"""Many texts at once: requests wait for blocks of the cache, run together, and step back when blocks run out."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .._core.errors import ModelError
from .._core.lazy import torch
from .llama import Llama
from .runner import Part, Runner
from .sampling import SamplingParams, sample

Finish = Literal["stop", "length"]


class Output(NamedTuple):
    """A token of a request; with the last, why it is: an end of text ("stop") or ``max_tokens`` ("length")."""

    request: int
    token: int
    finished: Finish | None


@dataclass(eq=False)
class _Request:
    number: int
    params: SamplingParams
    tokens: list[int]  # the prompt, then what came of it
    most_tokens: int
    random: random.Random
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
        num_blocks: of the cache; None for as many as `max_num_seqs` texts of `max_seq_len` tokens fill, or on a GPU as
            fit into 0.8 of its free memory, whichever is less.
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
        ):
            if value < 1:
                raise ModelError("Engine", f"{name}: expected 1 or more, got {value}")
        if self.max_seq_len > positions:
            raise ModelError("Engine", f"max_seq_len: expected at most {positions} positions, got {max_seq_len}")
        if num_blocks is None:
            num_blocks = _default_num_blocks(model, block_size, max_num_seqs, self.max_seq_len)
        if num_blocks < 1:
            raise ModelError("Engine", f"num_blocks: expected 1 or more, got {num_blocks}")
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
        params = params or SamplingParams()
        vocab_size, most_tokens = self.model.config.vocab_size, len(prompt) + params.max_tokens
        wrong = [token for token in prompt if not 0 <= token < vocab_size]
        if len(prompt) == 0 or wrong:
            got = f"token {wrong[0]}" if wrong else "none"
            raise ModelError("Engine.add", f"prompt: expected tokens from 0 to {vocab_size - 1}, got {got}")
        if most_tokens > self.max_seq_len:
            limit = f"max_seq_len={self.max_seq_len}"
            raise ModelError("Engine.add", f"prompt and max_tokens: expected at most {limit} tokens, got {most_tokens}")
        if self._blocks_for(most_tokens - 1) > self.num_blocks:  # the last token is never read again
            needed, held = self._blocks_for(most_tokens - 1), self.num_blocks
            raise ModelError("Engine.add", f"prompt and max_tokens: need {needed} blocks, and the cache has {held}")
        number, self._count = self._count, self._count + 1
        self._waiting.append(_Request(number, params, list(prompt), most_tokens, random.Random(params.seed)))
        return number

    def step(self) -> list[Output]:
        """Run the model once; the tokens that came of it. Nothing to do gives none."""
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
        """The texts behind `prompts`, without them. Nothing else may have been asked for."""
        texts: dict[int, list[int]] = {self.add(prompt, params): [] for prompt in prompts}
        for output in self.run():
            texts[output.request].append(output.token)
        return list(texts.values())

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


def _default_num_blocks(model: Llama, block_size: int, max_num_seqs: int, max_seq_len: int) -> int:
    wanted = max_num_seqs * -(-max_seq_len // block_size)
    if model.device.type != "cuda":
        return wanted
    config = model.config
    token_bytes = 2 * len(model.layers) * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(model.device)
    return min(wanted, int(0.8 * free / (token_bytes * block_size)))
