"""Rotary embeddings scaled for long sequences with a factor for each frequency: YaRN and LongRoPE."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log, sqrt
from typing import TYPE_CHECKING

import torch

from ..ops.rotary import tables as rope_tables
from .rotary import RotaryEmbedding

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DeepseekScalingRotaryEmbedding",
    "Phi3LongRoPEScaledRotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
]


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    """YaRN (Peng et al. 2023, arXiv:2309.00071), see `pyops.ops.rotary.tables.yarn`.

    The table has ``scaling_factor * max_position_embeddings`` positions.

    Args:
        head_size, rotary_dim, base, is_neox_style, dtype: as in `RotaryEmbeddingBase`.
        max_position_embeddings: original context length, tokens.
        scaling_factor: ratio of the longest sequence to the original context length.
        extrapolation_factor, beta_fast, beta_slow, truncate: see `pyops.ops.rotary.tables.yarn`.
        attn_factor: multiplies cosines and sines.
        apply_yarn_scaling: whether ``0.1 log(scaling_factor) + 1`` also multiplies cosines and sines.

    Examples:
        >>> rope = YaRNScalingRotaryEmbedding(64, 64, 1024, 10000.0, True, scaling_factor=4.0, dtype=torch.float32)
        >>> rope.cos_sin_cache.shape
        torch.Size([4096, 64])
        >>> query, key = rope(torch.arange(5), torch.randn(5, 4 * 64), torch.randn(5, 2 * 64))
    """

    _init_cache = True  # whether the constructor makes the table

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype,
        *,
        extrapolation_factor: float = 1,
        attn_factor: float = 1,
        beta_fast: float = 32,
        beta_slow: float = 1,
        apply_yarn_scaling: bool = True,
        truncate: bool = True,
    ) -> None:
        self.scaling_factor, self.extrapolation_factor, self.attn_factor = (
            scaling_factor,
            extrapolation_factor,
            attn_factor,
        )
        self.beta_fast, self.beta_slow, self.truncate = beta_fast, beta_slow, truncate
        self.mscale = self._mscale() if apply_yarn_scaling else float(attn_factor)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, self._init_cache)

    def _mscale(self) -> float:
        return float(rope_tables.yarn_mscale(self.scaling_factor) * self.attn_factor)

    def _compute_inv_freq(self, base: float) -> Tensor:
        ramp = self.beta_fast, self.beta_slow, self.extrapolation_factor, self.truncate
        return rope_tables.yarn(self.rotary_dim, base, self.scaling_factor, self.max_position_embeddings, *ramp)

    def _compute_cos_sin_cache(self) -> Tensor:
        positions = ceil(self.max_position_embeddings * self.scaling_factor)
        return rope_tables.cos_sin(rope_tables.angles(self._compute_inv_freq(self.base), positions), self.mscale)


class DeepseekScalingRotaryEmbedding(YaRNScalingRotaryEmbedding):
    """YaRN with the scaling of the DeepSeek models: ``m(mscale) / m(mscale_all_dim) * attn_factor``.

    ``m(s) = 0.1 s log(scaling_factor) + 1``.

    Args:
        mscale, mscale_all_dim: as in a model's configuration.
        init_cache: whether the table is made now.
        others: as in `YaRNScalingRotaryEmbedding`.

    Examples:
        >>> mscales = {"mscale": 0.707, "mscale_all_dim": 0.707}  # of DeepSeek-V2-Lite
        >>> rope = DeepseekScalingRotaryEmbedding(64, 64, 1024, 10000.0, False, 40.0, torch.float32, **mscales)
        >>> query, key = rope(torch.arange(5), torch.randn(5, 4 * 64), torch.randn(5, 1 * 64))
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
        *,
        extrapolation_factor: float = 1,
        attn_factor: float = 1,
        beta_fast: float = 32,
        beta_slow: float = 1,
        mscale: float = 1,
        mscale_all_dim: float = 0,
        init_cache: bool = True,
    ) -> None:
        self._mscales, self._init_cache = (mscale, mscale_all_dim), init_cache
        super().__init__(
            head_size,
            rotary_dim,
            max_position_embeddings,
            base,
            is_neox_style,
            scaling_factor,
            dtype,
            extrapolation_factor=extrapolation_factor,
            attn_factor=attn_factor,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
        )

    def _mscale(self) -> float:
        one, all_dim = (rope_tables.yarn_mscale(self.scaling_factor, mscale) for mscale in self._mscales)
        return float(one / all_dim * self.attn_factor)


class Phi3LongRoPEScaledRotaryEmbedding(RotaryEmbedding):
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): each frequency is divided by its own factor.

    There are factors for short sequences and for long ones. `max_model_len` selects one set for the lifetime of the
    layer, because keys in a KV cache are already rotated.

    Args:
        head_size, rotary_dim, base, dtype: as in `RotaryEmbeddingBase`.
        max_position_embeddings: tokens of the longest sequence of the model.
        original_max_position_embeddings: original context length, tokens.
        is_neox_style: True.
        short_factor, long_factor: [rotary_dim / 2] numbers.
        short_mscale, long_mscale: multiply cosines and sines. None for ``sqrt(1 + log(s) / log(o))``, where o is
            original_max_position_embeddings and s is max_position_embeddings / o, or for 1 if s is at most 1.
        max_model_len: tokens of the longest sequence to serve; None for max_position_embeddings.

    Examples:
        >>> factors = torch.linspace(1, 4, 32).tolist(), torch.linspace(1, 40, 32).tolist()
        >>> rope = Phi3LongRoPEScaledRotaryEmbedding(64, 64, 4096, 1024, 10000.0, True, torch.float32, *factors)
        >>> query, key = rope(torch.arange(5), torch.randn(5, 4 * 64), torch.randn(5, 2 * 64))
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        original_max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        short_factor: Sequence[float],
        long_factor: Sequence[float],
        short_mscale: float | None = None,
        long_mscale: float | None = None,
        *,
        max_model_len: int | None = None,
    ) -> None:
        if not is_neox_style:
            raise ValueError("Phi3LongRoPEScaledRotaryEmbedding: is_neox_style: expected True, got False")
        self.original_max_position_embeddings = original_max_position_embeddings
        longest = max_position_embeddings if max_model_len is None else max_model_len
        self.use_long_rope = longest > original_max_position_embeddings
        self.short_factor, self.long_factor = list(short_factor), list(long_factor)
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if len(factors) != rotary_dim // 2:
                raise ValueError(
                    f"Phi3LongRoPEScaledRotaryEmbedding: {name}: expected {rotary_dim // 2} numbers, got {len(factors)}"
                )
        scale = max_position_embeddings / original_max_position_embeddings
        default = 1.0 if scale <= 1 else sqrt(1 + log(scale) / log(original_max_position_embeddings))
        self.short_mscale = default if short_mscale is None else short_mscale
        self.long_mscale = default if long_mscale is None else long_mscale
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_cos_sin_cache(self) -> Tensor:
        long = self.use_long_rope
        plain = self._compute_inv_freq(self.base)
        factors = torch.tensor(self.long_factor if long else self.short_factor, dtype=torch.float32)
        positions = self.max_position_embeddings if long else self.original_max_position_embeddings
        mscale = self.long_mscale if long else self.short_mscale
        return rope_tables.cos_sin(rope_tables.angles(plain / factors, positions), mscale)
