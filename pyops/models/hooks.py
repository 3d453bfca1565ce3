"""Hooks that change logits before a token is chosen; two are ready-made, `bias` and `min_p`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .._core.system.lazy import torch
from ..errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor


class Text(NamedTuple):
    """A sequence before its next token is chosen.

    Attributes:
        request: the number that `Engine.add` returned.
        tokens: the tokens of the prompt, then those generated so far. Hooks must not change them.
        num_prompt_tokens: how many of the tokens belong to the prompt.

    Examples:
        >>> def no_repeats(logits, texts):
        ...     for row, text in zip(logits, texts):
        ...         row[list(text.tokens)] = float("-inf")
        >>> [tokens] = Engine(model, logits_hook=no_repeats).generate([[1, 2, 3]], SamplingParams(max_tokens=16))
        >>> len({1, 2, 3, *tokens})
        19
    """

    request: int
    tokens: Sequence[int]
    num_prompt_tokens: int


# (float32 logits [rows, vocab_size], the text of each row) -> logits of the same shape, or None if changed in place.
LogitsHook = Callable[["Tensor", Sequence[Text]], "Tensor | None"]


def bias(values: Mapping[int, float]) -> LogitsHook:
    """A hook that adds ``values[token]`` to the logit of each token; ``-inf`` forbids a token.

    Examples:
        >>> only_7_or_8 = bias({token: float("-inf") for token in range(256) if token not in (7, 8)})
        >>> [tokens] = Engine(model).generate([[1, 2, 3]], SamplingParams(max_tokens=4, logits_hook=only_7_or_8))
        >>> set(tokens) <= {7, 8}
        True
    """
    tokens, added = list(values), list(values.values())

    def hook(logits: Tensor, texts: Sequence[Text]) -> None:
        logits[:, tokens] += torch.tensor(added, dtype=logits.dtype, device=logits.device)

    return hook


def min_p(share: float, temperature: float = 1.0) -> LogitsHook:
    """A hook that forbids tokens less likely than `share` times the likeliest (Nguyen et al. 2024, arXiv:2407.01082).

    Args:
        share: more than 0, at most 1.
        temperature: the temperature of the compared probabilities. Hooks see logits before
            `SamplingParams.temperature` divides them; pass the same value to compare the sampled probabilities.

    Examples:
        >>> params = SamplingParams(max_tokens=4, temperature=1.2, logits_hook=min_p(0.05, temperature=1.2))
        >>> [tokens] = Engine(model).generate([[1, 2, 3]], params)
    """
    if not 0 < share <= 1 or not temperature > 0:
        raise ModelError("min_p", f"expected 0 < share <= 1 and temperature > 0, got {share!r} and {temperature!r}")
    distance = -temperature * math.log(share)

    def hook(logits: Tensor, texts: Sequence[Text]) -> None:
        logits.masked_fill_(logits < logits.amax(-1, keepdim=True) - distance, -math.inf)

    return hook


def apply_hook(hook: LogitsHook, logits: Tensor, texts: Sequence[Text]) -> Tensor:
    """The logits after `hook`. ModelError if it returns another shape."""
    changed = hook(logits, texts)
    if changed is None:
        return logits
    if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape:
        got = tuple(changed.shape) if isinstance(changed, torch.Tensor) else repr(changed)
        raise ModelError("logits_hook", f"expected None or logits of shape {tuple(logits.shape)}, got {got}")
    return changed
