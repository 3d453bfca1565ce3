"""Sampling parameters, and the choice of the next token: greedy, or by temperature, top-k and top-p."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from .._core.system.lazy import torch
from ..errors import ModelError
from .config_values import is_integer
from .hooks import LogitsHook

if TYPE_CHECKING:
    from torch import Tensor

_COUNT = Integral | None
# {field of SamplingParams: (its type, a test of its range, type and range in words)}
_FIELDS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "max_tokens": (Integral, lambda value: value >= 1, "an integer, 1 or more"),
    "temperature": (Real, lambda value: 0 <= value <= sys.float_info.max, "a number, 0 or more"),
    "top_k": (Integral, lambda value: value >= 0, "an integer, 0 or more"),
    "top_p": (Real, lambda value: 0 < value <= 1, "a number, more than 0 and at most 1"),
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
        seed: seed of the draws. The same seed gives the same tokens, whatever other requests run at the same time.
        ignore_eos: continue after an EOS token of the model.
        stop_token_ids: tokens that also end the sequence, whatever `ignore_eos` says. The stop token is its last token.
        min_tokens: tokens to generate before an EOS or a stop token can be chosen.
        logprobs: how many of the likeliest tokens get log-probabilities with each generated token
            (`Output.logprobs`), in addition to the token itself. None for no log-probabilities.
        prompt_logprobs: the same for the tokens of the prompt (`Output.prompt_logprobs`).
        logits_hook: a `LogitsHook` of this request, called with its row of logits alone after the engine's hook.

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

    def __post_init__(self) -> None:
        for name, (kind, in_range, expected) in _FIELDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool) or not in_range(value):
                raise ModelError("SamplingParams", f"{name}: expected {expected}, got {value!r}")


def sample(logits: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> list[int]:
    """A token for each row of logits.

    Top-k comes before top-p: top-p sums the renormalised probabilities of the tokens that top-k keeps. Tokens are
    sorted by descending probability. The first token with a cumulative probability above the draw is taken.

    Args:
        logits: [num_seqs, vocab_size], any float dtype, on any device.
        params: one for each row.
        draws: a uniform number in [0, 1) for each row; not used if the temperature of the row is 0.
    """
    tokens = logits.argmax(-1).tolist()
    drawn = [i for i, one in enumerate(params) if one.temperature > 0]
    if drawn:

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

        temperature = column([float(params[i].temperature) for i in drawn])
        scores, order = logits[drawn].float().sort(-1, descending=True)
        scores = (scores - scores[:, :1]) / temperature
        ranks = torch.arange(scores.shape[-1], dtype=torch.int64, device=logits.device)
        top_k = column([min(params[i].top_k or len(ranks), len(ranks)) for i in drawn])
        # Infinite and NaN logits give NaN probabilities, which become 0; the first token keeps a positive weight.
        scores = scores.masked_fill((ranks >= top_k) | scores.isnan(), -torch.inf)
        scores[:, 0] = 0.0
        weights = scores.softmax(-1)
        sum_before = weights.cumsum(-1) - weights
        weights = weights.masked_fill(
            (ranks > 0) & (sum_before >= column([float(params[i].top_p) for i in drawn])), 0.0
        )
        sums = weights.cumsum(-1)
        places = torch.searchsorted(sums, column([draws[i] for i in drawn]) * sums[:, -1:], right=True)
        # Rounding may put a draw beyond the cumulative probability of the last token with a positive weight.
        places = places.minimum((weights > 0).sum(-1, keepdim=True) - 1)
        for i, token in zip(drawn, order.gather(-1, places)[:, 0].tolist(), strict=True):
            tokens[i] = token
    return list(tokens)
