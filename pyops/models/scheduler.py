"""Which requests run, which wait, and which cache blocks and slots each of them holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .config import Config
from .hooks import Text
from .params import SamplingParams
from .runner import blocks_for


@dataclass(eq=False)
class Request:
    """A sequence to continue. While it runs, it holds blocks and a slot of the cache.

    Attributes:
        tokens: the prompt, then the generated tokens that the host has read.
        unread: tokens of launched steps that the host has not read yet.
        max_seq_len: prompt and generated tokens together, at most.
        number: set when the request is queued.
        computed: the number of first tokens that the cache holds.
        drawn: how many tokens were chosen, also of those that `Engine.step_back` removed.
        slot: slot of the states; -1 while the request waits.
        stops: tokens that end the sequence.
        prompt_logprobs: for each token of the prompt, its `Logprobs`, until they are returned with the first generated
            token; None if they are not requested.
        is_plain: whether the request has no log-probabilities, hooks or `min_tokens`, so that a step can skip them.
    """

    params: SamplingParams
    tokens: list[int]
    max_seq_len: int
    number: int = -1
    unread: int = 0
    computed: int = 0
    drawn: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int = -1
    stops: frozenset[int] = frozenset()
    prompt_logprobs: list[Any] | None = None
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        asked = params.logprobs, params.prompt_logprobs, params.logits_hook
        self.is_plain = asked == (None, None, None) and not params.min_tokens
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return self.max_seq_len - self.params.max_tokens

    @property
    def is_early(self) -> bool:
        """Whether the sequence is still shorter than `min_tokens`, so that it must not end."""
        return len(self.tokens) - self.num_prompt_tokens < self.params.min_tokens

    @property
    def text(self) -> Text:
        """The request as hooks see it."""
        return Text(self.number, self.tokens, self.num_prompt_tokens)

    @property
    def length(self) -> int:
        """Tokens of the sequence, those that the host has not read yet included."""
        return len(self.tokens) + self.unread

    @property
    def pending(self) -> int:
        return self.length - self.computed

    @property
    def is_step(self) -> bool:
        """Whether this is a decode: the cache holds all tokens but the newest."""
        return self.pending == 1 and self.computed > 0


class Scheduler:
    """Assigns blocks and slots to requests, and decides which tokens a step computes.

    A request runs from when it is admitted until it ends or is preempted. When a request needs a block and no block is
    free, the youngest request is preempted: it frees its blocks and its slot, and waits to be recomputed.

    Args:
        config: the model's.
        num_blocks, block_size: blocks of the cache, and tokens of a block.
        max_num_seqs: requests that run at the same time, at most; each has a slot.
        max_num_batched_tokens: prompt tokens of one step, at most.
    """

    def __init__(
        self, config: Config, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self._config, self.block_size = config, block_size
        self._num_blocks, self._max_num_seqs = num_blocks, max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.preemptions = 0
        self.drop_all()

    def drop_all(self) -> None:
        """Forget all requests."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.free_blocks = list(range(self._num_blocks))
        self.free_slots = list(range(self._max_num_seqs))

    def __iter__(self) -> Iterator[Request]:
        """All requests that have not ended."""
        yield from self.running
        yield from self.waiting

    def next_step(self) -> list[tuple[Request, int]]:
        """[(request, tokens to compute)]: decodes first, then prompts or chunks of prompts."""
        self._admit()
        return self._next_tokens() + self._prompts()

    def end(self, request: Request) -> None:
        """Free the blocks and the slot of a running request."""
        self.running.remove(request)
        self.free_blocks += request.blocks
        self.free_slots.append(request.slot)
        request.blocks, request.slot = [], -1

    def cancel(self, request: Request) -> None:
        """Forget a request that waits or runs."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.end(request)

    def step_back(self, request: Request, num_tokens: int) -> None:
        """Truncate a sequence to its first `num_tokens` tokens, at least 1."""
        was_long = self.is_long(request)
        del request.tokens[num_tokens:]
        if was_long != self.is_long(request):
            request.computed = 0
        if request.computed >= num_tokens:
            # A slot holds only the state after the last token, so no earlier state can be restored.
            request.computed = num_tokens - 1 if not self._config.has_states else 0
        kept = self.blocks_for(num_tokens)
        self.free_blocks += request.blocks[kept:]
        del request.blocks[kept:]

    def is_long(self, request: Request) -> bool:
        """Whether the sequence uses the rotary frequencies of long sequences."""
        return request.length > self._config.max_short_length

    def expect(self, request: Request) -> None:
        """Count a token that the running step chooses. If the sequence thereby becomes long, all of it is recomputed
        with the long frequencies."""
        was_long = self.is_long(request)
        request.unread += 1
        request.drawn += 1
        if was_long != self.is_long(request):
            request.computed = 0

    def withdraw(self, request: Request) -> None:
        """Forget the token that a step chose, and which is not read. A state already covers one token more than the
        sequence has, so a model with states recomputes it."""
        request.unread -= 1
        request.drawn -= 1
        request.computed = max(0, request.computed - 1) if not self._config.has_states else 0

    def decodes_ahead(self) -> list[Request]:
        """The requests of the next step, with blocks for their tokens, if they are known before the tokens of the
        running step: where none is in prefill or could be admitted, and blocks suffice. Else none."""
        going = [request for request in self.running if request.length < request.max_seq_len]
        ends = len(going) < len(self.running)
        if (ends and self.waiting) or self._admits() or not all(request.is_step for request in going):
            return []
        missing = [max(0, self.blocks_for(request.length) - len(request.blocks)) for request in going]
        if sum(missing) > len(self.free_blocks):
            return []
        for request, count in zip(going, missing, strict=True):
            request.blocks += [self.free_blocks.pop() for _ in range(count)]
        return going

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of a sequence need."""
        return blocks_for(self._config, num_tokens, self.block_size)

    def _admit(self) -> None:
        """Start waiting requests, in order, while blocks remain for them and one more for each running request."""
        while self._admits():
            request = self.waiting.popleft()
            request.blocks = [self.free_blocks.pop() for _ in range(self.blocks_for(len(request.tokens)))]
            request.slot = self.free_slots.pop()
            self.running.append(request)

    def _admits(self) -> bool:
        """Whether the first waiting request can start."""
        if not self.waiting or not self.free_slots:
            return False
        to_spare = len(self.running) if self._config.has_attention else 0
        return self.blocks_for(len(self.waiting[0].tokens)) + to_spare <= len(self.free_blocks)

    def _next_tokens(self) -> list[tuple[Request, int]]:
        """[(request, 1)] of running requests, after allocating their blocks; preempts the youngest if none is free."""
        for request in list(self.running):
            while request in self.running and len(request.blocks) < self.blocks_for(request.length):
                if self.free_blocks:
                    request.blocks.append(self.free_blocks.pop())
                else:
                    self._preempt(self.running[-1])
        return [(request, 1) for request in self.running if request.is_step]

    def _prompts(self) -> list[tuple[Request, int]]:
        """[(request in prefill, prompt tokens of this step)]."""
        budget, found = self._max_num_batched_tokens, []
        for request in self.running:
            count = min(budget, request.pending)
            if not request.is_step and count:
                found.append((request, count))
                budget -= count
        return found

    def _preempt(self, request: Request) -> None:
        self.end(request)
        request.computed = 0
        self.waiting.appendleft(request)
        self.preemptions += 1
