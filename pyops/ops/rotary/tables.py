"""The angles of rotary embedding (Su et al. 2021, arXiv:2104.09864), scaled for long texts in several ways.

Frequencies are [rotary_dim / 2] float32, by which the pairs of a head turn from one position to the next, in radians.
"""

from __future__ import annotations

from math import ceil, floor, log, pi
from typing import TYPE_CHECKING, Any

from ..._core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def frequencies(rotary_dim: int, base: float, device: Any = None) -> Tensor:
    """``base ** -(2 j / rotary_dim)`` for pair j."""
    exponents = torch.arange(0, rotary_dim, 2, device=device).float() / rotary_dim
    return 1.0 / base**exponents


def llama3(
    plain: Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Tensor:
    """The low ones of frequencies divided by `factor`, the high ones kept (Llama 3 herd of models, arXiv:2407.21783).

    How often a pair turns within the texts of the first training decides how much of its frequency it keeps: all from
    `high_freq_factor` times on, nothing up to `low_freq_factor` times.
    """
    turns = original_max_position_embeddings * plain / (2 * pi)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / factor


def dynamic_ntk_base(base: float, rotary_dim: int, factor: float, growth: float) -> float:
    """The base for texts `growth` times as long as those of the first training ("NTK-aware" scaling, dynamic)."""
    return float(base * (factor * growth - (factor - 1.0)) ** (rotary_dim / (rotary_dim - 2)))


def ntk(plain: Tensor, factor: float, mixed_b: float = 1.0) -> Tensor:
    """Frequencies divided by ``factor ** (m / pairs) ** mixed_b`` for the m-th of them, m = 1, 2, ...

    So the last one by `factor`, of which a base that is as many times as large leaves it short ("NTK-RoPE-fixed", and
    for a mixed_b other than 1 "-mixed": https://kexue.fm/archives/9706).
    """
    pair = torch.arange(1, len(plain) + 1, device=plain.device).float()
    return plain / factor ** (pair / len(plain)) ** mixed_b


def yarn(
    rotary_dim: int,
    base: float,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    extrapolation_factor: float = 1.0,
    truncate: bool = True,
    device: Any = None,
) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): frequencies divided by `factor`, the higher the less.

    Pairs that turn more than `beta_fast` times within the texts of the first training keep theirs, pairs that turn less
    than `beta_slow` times do not, with a ramp between them; `truncate` widens it to whole pairs, and
    `extrapolation_factor` says how much of what is kept is kept.
    """

    def pair_that_turns(times: float) -> float:
        return rotary_dim * log(original_max_position_embeddings / (times * 2 * pi)) / (2 * log(base))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    pair = torch.arange(rotary_dim // 2, device=device).float()
    kept = 1.0 - ((pair - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    kept = kept * extrapolation_factor
    plain = frequencies(rotary_dim, base, device)
    return plain / factor * (1.0 - kept) + plain * kept


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies cosines and sines by: ``0.1 mscale log(factor) + 1``, and 1 where `factor` is at most 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


def angles(frequencies: Tensor, num_positions: int) -> Tensor:
    """[num_positions, rotary_dim / 2] float32: what the pairs have turned at each position."""
    return torch.arange(num_positions, device=frequencies.device).float()[:, None] * frequencies


def cos_sin(angles: Tensor, mscale: float = 1.0) -> Tensor:
    """[num_positions, rotary_dim] float32, the table that ops take: cosines, then sines, of angles."""
    return torch.cat((angles.cos() * mscale, angles.sin() * mscale), -1)
