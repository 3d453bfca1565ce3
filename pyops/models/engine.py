"""Continuous batching: requests wait for free cache blocks, run together, and are preempted when blocks run out."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from operator import index
from typing import Literal, NamedTuple

from ..errors import ModelError
from .checkpoint import free_bytes
from .config import Config
from .config_values import is_integer
from .decoder import Decoder
from .hooks import LogitsHook
from .logprobs import Logprobs
from .params import SamplingParams
from .runner import Runner, blocks_for, default_max_seq_len
from .scheduler import Request, Scheduler
from .steps import Chosen, Steps

Finish = Literal["stop", "length"]

_CACHE_SHARE = 0.8  # share of free memory for the default number of blocks; the rest is for activations and workspaces
# Peak bytes that a Runner allocates in addition to its cache. An element of a cos/sin table: angles, cosines and sines
# are float32 before they are concatenated and rounded. An element of a decode row: an int64, and its copy while a
# graph is captured.
_TABLE_BYTES, _ROW_BYTES = 16, 16


class Output(NamedTuple):
    """A token of a request.

    Attributes:
        request: the number that `Engine.add` returned.
        token: the token.
        finished: set with the last token: "stop" at an EOS or a stop token, "length" at ``max_tokens``.
        logprobs: log-probabilities at this token, if `SamplingParams.logprobs` asks for them.
        prompt_logprobs: with the first token of a request, if `SamplingParams.prompt_logprobs` asks for them: one for
            each token of the prompt, None for the first, which has no preceding token.

    Examples:
        >>> engine = Engine(model)
        >>> request = engine.add([1, 2, 3], SamplingParams(max_tokens=2))
        >>> [(output.request == request, output.finished) for output in engine.run()]
        [(True, None), (True, 'length')]
    """

    request: int
    token: int
    finished: Finish | None
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs | None] | None = None


class Engine:
    """Continuous batching over a paged cache (Kwon et al. 2023, arXiv:2309.06180), and states in slots.

    A step decodes one token of every running request that has finished prefill, and prefills other requests, in chunks
    if their prompts are long. When a request needs a block and no block is free, the youngest request is preempted: it
    frees all of its blocks and waits to be recomputed.

    Args:
        model: a model with its weights set.
        num_blocks: blocks of the cache. None: enough for `max_num_seqs` sequences of `max_seq_len` tokens, but no more
            than fit into 0.8 of the device's free memory. A model without attention needs no blocks.
        block_size: tokens of a block.
        max_num_seqs: requests that run at the same time, at most. Each has a slot for the states of state-space layers.
        max_num_batched_tokens: prompt tokens of one step, at most.
        max_seq_len: tokens of a sequence, prompt included, at most; None for 4096, or the model's
            ``max_position_embeddings`` if that is less.
        graphs: as in `Runner`.
        logits_hook: called once a step with the logits of all requests that get a token, before tokens are chosen:
            ``(float32 logits [rows, vocab_size], [Text of each row])``. It changes them in place and returns None, or
            returns logits of the same shape. It runs outside of CUDA graphs, on every rank of a tensor-parallel
            model. `SamplingParams.logits_hook` is the same for one request.
        kv_cache_dtype: "auto" for what ``config.json`` asks for, or the model's dtype if it asks for none; "fp8" or
            "fp8_e4m3", or "fp8_e5m2", for fp8 values with the scales of the checkpoint, or those that
            `calibrate_kv_scales` or `write_kv_scales` has set, else 1; or the name of the model's dtype.
        ahead: whether a decode step may be launched before the host has read the tokens of the previous one, so that
            the device does not wait for the host. None for yes on a GPU. Tokens are the same in either case.

    Examples:
        >>> engine = Engine(model, max_num_seqs=8)
        >>> requests = engine.add([1, 2, 3]), engine.add([4, 5], SamplingParams(temperature=0.8, seed=1))
        >>> tokens = [(output.request, output.token) for output in engine.run()]
    """

    def __init__(
        self,
        model: Decoder,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        max_seq_len: int | None = None,
        graphs: bool | None = None,
        logits_hook: LogitsHook | None = None,
        kv_cache_dtype: str = "auto",
        ahead: bool | None = None,
    ) -> None:
        positions = model.config.max_position_embeddings
        self.max_seq_len = default_max_seq_len(model.config) if max_seq_len is None else max_seq_len
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
        token_bytes = model.token_bytes(kv_cache_dtype)
        max_blocks = model.agreed(_blocks_in_memory(model, block_size, max_num_seqs, self.max_seq_len, token_bytes))
        if not model.config.has_attention:
            num_blocks = min(1, max_blocks)
        elif num_blocks is None:
            num_blocks = min(max_num_seqs * -(-self.max_seq_len // block_size), int(_CACHE_SHARE * max_blocks))
        if not 1 <= num_blocks <= max_blocks:
            limit = f"the memory of {model.device} has room for {max(max_blocks, 0)}"
            raise ModelError("Engine", f"num_blocks: {limit}, with what max_num_seqs and max_seq_len ask for")
        self.model, self.num_blocks = model, num_blocks
        self._runner = Runner(model, num_blocks, block_size, max_num_seqs, self.max_seq_len, graphs, kv_cache_dtype)
        self._scheduler = Scheduler(model.config, num_blocks, block_size, max_num_seqs, max_num_batched_tokens)
        on_gpu = model.device.type == "cuda"
        self._steps = Steps(self._runner, self._scheduler, logits_hook, on_gpu if ahead is None else ahead)
        self._count = 0

    @property
    def preemptions(self) -> int:
        """How often a request was preempted."""
        return self._scheduler.preemptions

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None) -> int:
        """Queue a request to continue `prompt`; returns its number. ModelError if it could never be served."""
        return self._enqueue(self._request(prompt, params))

    def step(self) -> list[Output]:
        """Run the model once; returns the tokens that it generated, none if there was nothing to do.

        If the step fails, the engine drops all requests and can take new ones.
        """
        try:
            with self._runner.model.naming_ranks():
                return [self._accept(one) for one in self._steps.next()]
        except BaseException:
            self._steps.drop()
            self._scheduler.drop_all()
            raise

    def cancel(self, request: int) -> None:
        """End a request between steps: it generates no more tokens, and its blocks and slot are free at once.

        Raises:
            ModelError: the request has ended or does not exist.
        """
        found = self._found("Engine.cancel", request)
        self._steps.forget(found)
        self._scheduler.cancel(found)

    def _found(self, where: str, number: int) -> Request:
        found = next((each for each in self._scheduler if each.number == number), None)
        if found is None:
            raise ModelError(where, f"request: expected one that has not ended, got {number!r}")
        return found

    def step_back(self, request: int, num_tokens: int) -> None:
        """Remove the last tokens of a request, which continues after its first `num_tokens`, the prompt included.

        Tokens that are sampled again get new random draws. If all layers are attention, the cache keeps the entries of
        the remaining tokens. A recurrent state covers its whole sequence, so a model with states recomputes the
        sequence from its first token, in chunks like a prompt.

        Raises:
            ModelError: the request has ended or does not exist, has fewer than `num_tokens` tokens, or has a prompt
                longer than `num_tokens`.
        """
        found = self._found("Engine.step_back", request)
        least, most = found.num_prompt_tokens, len(found.tokens)
        if not is_integer(num_tokens) or not least <= num_tokens <= most:
            raise ModelError("Engine.step_back", f"num_tokens: expected {least} to {most}, got {num_tokens!r}")
        self._steps.forget(found)
        self._scheduler.step_back(found, num_tokens)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return any(self._scheduler)

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

    def _request(self, prompt: Sequence[int], params: SamplingParams | None) -> Request:
        """A checked request. ModelError if it could never be served."""
        params = params or SamplingParams()
        tokens = check_request(self.model.config, prompt, params, self.max_seq_len)
        max_seq_len = len(tokens) + params.max_tokens
        needed = self._scheduler.blocks_for(max_seq_len - 1)  # the last token is never read again
        if needed > self.num_blocks:
            has = f"the cache has {self.num_blocks}"
            raise ModelError("request", f"prompt and max_tokens: need {needed} blocks, and {has}")
        ends = () if params.ignore_eos else self.model.config.eos_token_ids
        stops = frozenset(token for token in (*ends, *params.stop_token_ids) if token < self.model.config.vocab_size)
        return Request(params, tokens, max_seq_len, stops=stops)

    def _enqueue(self, request: Request) -> int:
        request.number, self._count = self._count, self._count + 1
        self._scheduler.waiting.append(request)
        return request.number

    def _accept(self, one: Chosen) -> Output:
        request, token = one.request, one.token
        request.tokens.append(token)
        request.unread -= 1
        finished: Finish | None = "length" if len(request.tokens) == request.max_seq_len else None
        if token in request.stops:
            finished = "stop"
        if finished:
            self._steps.forget(request)
            self._scheduler.end(request)
        return Output(request.number, token, finished, one.logprobs, one.prompt_logprobs)


def check_request(config: Config, prompt: Sequence[int], params: SamplingParams, max_seq_len: int) -> list[int]:
    """The tokens of a prompt. ModelError if prompt and `params.max_tokens` do not fit into `max_seq_len` tokens.

    Examples:
        >>> check_request(config, [1, 2, 3], SamplingParams(max_tokens=8), max_seq_len=128)
        [1, 2, 3]
    """
    try:
        tokens = [index(token) for token in prompt]
    except TypeError:
        expected = "the token ids of each prompt, as [[1, 2, 3]]" if isinstance(prompt, int) else "integers"
        raise ModelError("request", f"prompt: expected {expected}, got {reprlib.repr(prompt)}") from None
    wrong = [token for token in tokens if not 0 <= token < config.vocab_size]
    if wrong or not tokens:
        got = f"token {wrong[0]}" if wrong else "none"
        raise ModelError("request", f"prompt: expected tokens from 0 to {config.vocab_size - 1}, got {got}")
    if any(token >= config.vocab_size for token in params.stop_token_ids):
        expected = f"tokens from 0 to {config.vocab_size - 1}"
        raise ModelError("request", f"stop_token_ids: expected {expected}, got {params.stop_token_ids}")
    if len(tokens) + params.max_tokens > max_seq_len:
        limit, asked = f"max_seq_len={max_seq_len}", len(tokens) + params.max_tokens
        raise ModelError("request", f"prompt and max_tokens: expected at most {limit} tokens, got {asked}")
    return tokens


def _blocks_in_memory(model: Decoder, block_size: int, max_num_seqs: int, max_seq_len: int, token_bytes: int) -> int:
    """Blocks of a cache that fit into the free memory of the device, next to a `Runner` of these sizes."""
    config = model.config
    table_rows = max_seq_len * (2 if max_seq_len > config.max_short_length else 1)
    tables = _TABLE_BYTES * table_rows * config.head_dim * len(config.ropes)
    rows = _ROW_BYTES * max_num_seqs * blocks_for(config, max_seq_len, block_size)
    left = free_bytes(model.device) - tables - rows - max_num_seqs * model.slot_bytes
    # Without attention, token_bytes is 0, and the result is the free memory in bytes, which bounds nothing.
    return int(left // max(1, token_bytes * block_size))
