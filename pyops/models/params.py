"""Which token comes next: the likeliest, or one drawn by temperature, top-k and top-p."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from .._core.errors import ModelError
from .._core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# {field of SamplingParams: its type, what else holds of it, both in words}
_FIELDS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "max_tokens": (Integral, lambda value: value >= 1, "an integer, 1 or more"),
    "temperature": (Real, lambda value: 0 <= value <= sys.float_info.max, "a number, 0 or more"),
    "top_k": (Integral, lambda value: value >= 0, "an integer, 0 or more"),
    "top_p": (Real, lambda value: 0 < value <= 1, "a number, more than 0 and at most 1"),
    "seed": (Integral, lambda value: value >= 0, "an integer, 0 or more"),
    "ignore_eos": (bool, lambda value: True, "True or False"),
}


@dataclass(frozen=True)
class SamplingParams:
    """How a text goes on, and when it ends.

    Attributes:
        max_tokens: tokens to generate at most.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only so many of the likeliest tokens are drawn from; 0 for all.
        top_p: only the likeliest tokens whose probabilities reach this sum (Holtzman et al. 2019, arXiv:1904.09751).
        seed: of the draws; the same seed gives the same text, whatever else is generated beside it.
        ignore_eos: go on behind an end of text.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, (kind, holds, expected) in _FIELDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool) or not holds(value):
                raise ModelError("SamplingParams", f"{name}: expected {expected}, got {value!r}")


def sample(logits: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> list[int]:
    """A token for each row.

    Top-k comes before top-p, whose sum is that of what top-k left. The token is the first at which the running sum of
    probabilities, the likeliest first, exceeds the draw.

    Args:
        logits: [num_seqs, vocab_size], any float dtype, on any device.
        params: of each row.
        draws: a number in [0, 1) for each row; not used where the temperature is 0.
    """
    tokens = logits.argmax(-1).tolist()
    drawn = [i for i, one in enumerate(params) if one.temperature > 0]
    if drawn:

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

        temperature = column([float(params[i].temperature) for i in drawn])
        scores, order = logits[drawn].float().sort(-1, descending=True)
        scores = (scores - scores[:, :1]) / temperature
        ranks = torch.arange(scores.shape[-1], device=logits.device)
        top_k = column([min(params[i].top_k or len(ranks), len(ranks)) for i in drawn])
        # No number is what infinite logits leave, and what is no number itself: only the likeliest has a weight then.
        scores = scores.masked_fill((ranks >= top_k) | scores.isnan(), -torch.inf)
        scores[:, 0] = 0.0
        weights = scores.softmax(-1)
        before = weights.cumsum(-1) - weights
        weights = weights.masked_fill((ranks > 0) & (before >= column([float(params[i].top_p) for i in drawn])), 0.0)
        sums = weights.cumsum(-1)
        places = torch.searchsorted(sums, column([draws[i] for i in drawn]) * sums[:, -1:], right=True)
        # The last token with any weight, should rounding carry a draw to the very end.
        places = places.minimum((weights > 0).sum(-1, keepdim=True) - 1)
        for i, token in zip(drawn, order.gather(-1, places)[:, 0].tolist(), strict=True):
            tokens[i] = token
    return list(tokens)
