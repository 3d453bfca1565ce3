"""Sampling parameters: how the next token is chosen, and when a sequence ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ..errors import ModelError
from .config_values import is_integer
from .hooks import LogitsHook

_COUNT = Integral | None
# {field of SamplingParams: (its type, a test of its range, type and range in words)}
_FIELDS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "max_tokens": (Integral, lambda value: value >= 1, "an integer, 1 or more"),
    "temperature": (Real, lambda value: 0 <= value <= sys.float_info.max, "a number, 0 or more"),
    "top_k": (Integral, lambda value: value >= 0, "an integer, 0 or more"),
    "top_p": (Real, lambda value: 0 < value <= 1, "a number, more than 0 and at most 1"),
    "min_p": (Real, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "seed": (Integral, lambda value: value >= 0, "an integer, 0 or more"),
    "ignore_eos": (bool, lambda value: True, "True or False"),
    "stop_token_ids": (tuple, lambda value: all(is_integer(one) and one >= 0 for one in value), "a tuple of tokens"),
    "min_tokens": (Integral, lambda value: value >= 0, "an integer, 0 or more"),
    "logprobs": (_COUNT, lambda value: value is None or value >= 0, "None or an integer, 0 or more"),
    "prompt_logprobs": (_COUNT, lambda value: value is None or value >= 0, "None or an integer, 0 or more"),
    "logits_hook": (object, lambda value: value is None or callable(value), "None or a function"),
}


@dataclass(frozen=True)
class SamplingParams:
    """How the next token of a sequence is chosen, and when the sequence ends.

    Attributes:
        max_tokens: tokens to generate at most.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: sample from the `top_k` likeliest tokens; 0 for all.
        top_p: sample from the smallest set of likeliest tokens with at least this total probability (Holtzman et al.
            2019, arXiv:1904.09751).
        seed: seed of the draws, modulo 2^64. The same seed gives the same tokens, whatever other requests run at the
            same time.
        ignore_eos: continue after an EOS token of the model.
        stop_token_ids: tokens that also end the sequence, whatever `ignore_eos` says. The stop token is its last token.
        min_tokens: tokens to generate before an EOS or a stop token can be chosen.
        logprobs: how many of the likeliest tokens get log-probabilities with each generated token
            (`Output.logprobs`), in addition to the token itself. None for no log-probabilities.
        prompt_logprobs: the same for the tokens of the prompt (`Output.prompt_logprobs`).
        logits_hook: a `LogitsHook` of this request, called with its row of logits alone after the engine's hook.
        min_p: sample from tokens at least `min_p` times as likely as the likeliest (Nguyen et al. 2024,
            arXiv:2407.01082). Filters apply in the order top_k, min_p, top_p.

    Examples:
        >>> params = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=1)
        >>> [first], [again] = (Engine(model).generate([[1, 2, 3]], params) for _ in range(2))
        >>> first == again
        True
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_hook: LogitsHook | None = None
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, (kind, in_range, expected) in _FIELDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool) or not in_range(value):
                raise ModelError("SamplingParams", f"{name}: expected {expected}, got {value!r}")
