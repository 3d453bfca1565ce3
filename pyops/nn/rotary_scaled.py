"""Rotary embeddings scaled for sequences longer than the original context length, by one factor or base."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING

import torch

from ..ops.rotary import tables as rope_tables
from .rotary import RotaryEmbedding

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DynamicNTKAlphaRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "NTKScalingRotaryEmbedding",
]


class LinearScalingRotaryEmbedding(RotaryEmbedding):
    """Frequencies divided by a factor (Chen et al. 2023, arXiv:2306.15595); the table is longer by the same factor.

    Args:
        head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype: as in `RotaryEmbeddingBase`.
        scaling_factors: a factor or several. The tables of several factors are concatenated;
            `scaling_factor_to_offset` gives the first row of each.

    Examples:
        >>> rope = LinearScalingRotaryEmbedding(64, 64, 2048, 10000.0, True, 4.0, torch.float32)
        >>> rope.cos_sin_cache.shape
        torch.Size([8192, 64])
        >>> query, key = rope(torch.arange(5), torch.randn(5, 4 * 64), torch.randn(5, 2 * 64))
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factors: float | Sequence[float],
        dtype: torch.dtype,
    ) -> None:
        factors = [scaling_factors] if isinstance(scaling_factors, int | float) else list(scaling_factors)
        self.scaling_factors = factors
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_cos_sin_cache(self) -> Tensor:
        plain = self._compute_inv_freq(self.base)
        lengths = [ceil(self.max_position_embeddings * factor) for factor in self.scaling_factors]
        offsets = accumulate(lengths, initial=0)
        self.scaling_factor_to_offset = dict(zip(self.scaling_factors, offsets, strict=False))
        pairs = zip(self.scaling_factors, lengths, strict=True)
        return torch.cat([rope_tables.cos_sin(rope_tables.angles(plain / factor, length)) for factor, length in pairs])


class DynamicNTKScalingRotaryEmbedding(RotaryEmbedding):
    """Dynamic NTK: a larger base for sequences longer than in training, see `pyops.ops.rotary.tables.dynamic_ntk_base`.

    Args:
        head_size, rotary_dim, base, is_neox_style, dtype: as in `RotaryEmbeddingBase`.
        max_position_embeddings: positions in the table, tokens of the longest sequence.
        max_trained_positions: original context length, tokens. If it equals max_position_embeddings, the base stays.
        scaling_factor: factor of the sequence length in the formula of the base.

    Examples:
        >>> rope = DynamicNTKScalingRotaryEmbedding(64, 64, 8192, 2048, 10000.0, True, 1.0, torch.float32)
        >>> query, key = rope(torch.arange(5), torch.randn(5, 4 * 64), torch.randn(5, 2 * 64))
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        max_trained_positions: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype,
    ) -> None:
        self.scaling_factor, self.max_trained_positions = scaling_factor, max_trained_positions
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> Tensor:
        growth = self.max_position_embeddings / self.max_trained_positions
        return super()._compute_inv_freq(
            rope_tables.dynamic_ntk_base(base, self.rotary_dim, self.scaling_factor, growth)
        )


class DynamicNTKAlphaRotaryEmbedding(RotaryEmbedding):
    """A larger base, ``base * alpha ** (rotary_dim / (rotary_dim - 2))``, as in the Hunyuan models.

    Args:
        head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype: as in `RotaryEmbeddingBase`.
        scaling_alpha: alpha in the formula.

    Examples:
        >>> rope = DynamicNTKAlphaRotaryEmbedding(64, 64, 4096, 10000.0, True, 1000.0, torch.float32)
        >>> query, key = rope(torch.arange(5), torch.randn(5, 4 * 64), torch.randn(5, 2 * 64))
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_alpha: float,
        dtype: torch.dtype,
    ) -> None:
        self.scaling_alpha = scaling_alpha
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> Tensor:
        # With a factor of 1, `growth` alone scales the base.
        return super()._compute_inv_freq(rope_tables.dynamic_ntk_base(base, self.rotary_dim, 1.0, self.scaling_alpha))


class NTKScalingRotaryEmbedding(RotaryEmbedding):
    """NTK scaling: low frequencies are divided by up to a factor, see `pyops.ops.rotary.tables.ntk`.

    Args:
        head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype: as in `RotaryEmbeddingBase`.
        scaling_factor: divisor of the lowest frequency.
        mixed_b: exponent in the formula; None for 1.

    Examples:
        >>> rope = NTKScalingRotaryEmbedding(64, 64, 4096, 10000.0, True, 4.0, torch.float32)
        >>> query, key = rope(torch.arange(5), torch.randn(5, 4 * 64), torch.randn(5, 2 * 64))
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype,
        mixed_b: float | None = None,
    ) -> None:
        self.scaling_factor, self.mixed_b = scaling_factor, mixed_b
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> Tensor:
        power = 1.0 if self.mixed_b is None else self.mixed_b
        return rope_tables.ntk(super()._compute_inv_freq(base), self.scaling_factor, power)


class Llama3RotaryEmbedding(RotaryEmbedding):
    """Low frequencies divided by a factor, see `pyops.ops.rotary.tables.llama3`.

    Args:
        head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype: as in `RotaryEmbeddingBase`.
        scaling_factor, low_freq_factor, high_freq_factor: as in a model's configuration.
        orig_max_position: original context length, tokens.

    Examples:
        >>> rope = Llama3RotaryEmbedding(64, 64, 4096, 5e5, True, torch.float32, 8.0, 1.0, 4.0, 1024)
        >>> query, key = rope(torch.arange(5), torch.randn(5, 4 * 64), torch.randn(5, 2 * 64))
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        scaling_factor: float,
        low_freq_factor: float,
        high_freq_factor: float,
        orig_max_position: int,
    ) -> None:
        self.scaling_factor, self.orig_max_position = scaling_factor, orig_max_position
        self.low_freq_factor, self.high_freq_factor = low_freq_factor, high_freq_factor
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> Tensor:
        plain = super()._compute_inv_freq(base)
        limits = self.low_freq_factor, self.high_freq_factor
        return rope_tables.llama3(plain, self.scaling_factor, *limits, self.orig_max_position)
