"""Tables of rotary embedding (Su et al. 2021, arXiv:2104.09864), scaled for long sequences in several ways.

Frequencies are [rotary_dim / 2] float32: the angles, in radians, by which the pairs of a head rotate per position. The
context length is the number of tokens in the sequences of pre-training.
"""

from __future__ import annotations

from math import ceil, floor, log, pi
from typing import TYPE_CHECKING, Any

from ..._core.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def frequencies(rotary_dim: int, base: float, device: Any = None) -> Tensor:
    """Frequencies without scaling: ``base ** -(2 j / rotary_dim)`` for pair j."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=device).float() / rotary_dim
    return 1.0 / base**exponents


def llama3(
    plain: Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Tensor:
    """Low frequencies divided by `factor`, high frequencies unchanged (Llama 3 herd of models, arXiv:2407.21783).

    A pair with at least `high_freq_factor` rotations within the original context length keeps its frequency `plain`;
    with at most `low_freq_factor` rotations the frequency is divided; between the two it is interpolated.
    """
    turns = original_max_position_embeddings * plain / (2 * pi)
    unchanged = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return unchanged * plain + (1.0 - unchanged) * plain / factor


def dynamic_ntk_base(base: float, rotary_dim: int, factor: float, growth: float) -> float:
    """The base for sequences `growth` times as long as the original context length (dynamic "NTK-aware" scaling)."""
    return float(base * (factor * growth - (factor - 1.0)) ** (rotary_dim / (rotary_dim - 2)))


def ntk(plain: Tensor, factor: float, mixed_b: float = 1.0) -> Tensor:
    """The m-th frequency of `plain` divided by ``factor ** (m / pairs) ** mixed_b``, for m = 1, 2, ..., pairs.

    The last frequency is thus divided by `factor`; a base that is `factor` times as large divides it by less
    ("NTK-RoPE-fixed", or "NTK-RoPE-mixed" for a mixed_b other than 1: https://kexue.fm/archives/9706).
    """
    pair = torch.arange(1, len(plain) + 1, dtype=torch.int64, device=plain.device).float()
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
    """YaRN (Peng et al. 2023, arXiv:2309.00071): low frequencies divided by `factor`, high frequencies unchanged.

    Pairs with more than `beta_fast` rotations within the original context length keep their frequency; for pairs with
    fewer than `beta_slow` rotations it is divided by `factor`; between the two, a linear ramp blends both.

    Args:
        rotary_dim: elements of a head that are rotated.
        base: base of the frequencies.
        factor: ratio of the longest sequence to the original context length.
        original_max_position_embeddings: original context length, tokens.
        beta_fast, beta_slow: rotations at the ends of the ramp.
        extrapolation_factor: weight of the unchanged frequencies, 1 for all of the above.
        truncate: extend the ramp to whole pairs.
        device: device of the result.
    """

    def pair_with_turns(times: float) -> float:
        return rotary_dim * log(original_max_position_embeddings / (times * 2 * pi)) / (2 * log(base))

    low, high = pair_with_turns(beta_fast), pair_with_turns(beta_slow)
    if truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    pair = torch.arange(rotary_dim // 2, dtype=torch.int64, device=device).float()
    unchanged = 1.0 - ((pair - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    unchanged = unchanged * extrapolation_factor
    plain = frequencies(rotary_dim, base, device)
    return plain / factor * (1.0 - unchanged) + plain * unchanged


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """The scale of cosines and sines under YaRN: ``0.1 mscale log(factor) + 1``, or 1 if `factor` is at most 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


def angles(frequencies: Tensor, num_positions: int) -> Tensor:
    """The angle of each pair at each position: [num_positions, rotary_dim / 2] float32, in radians."""
    return torch.arange(num_positions, dtype=torch.int64, device=frequencies.device).float()[:, None] * frequencies


def cos_sin(angles: Tensor, mscale: float = 1.0) -> Tensor:
    """The table that ops take, [num_positions, rotary_dim] float32: cosines of `angles`, then sines, times `mscale`."""
    return torch.cat((angles.cos() * mscale, angles.sin() * mscale), -1)
