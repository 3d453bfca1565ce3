"""Rotary embeddings as modules with cos/sin tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..ops.rotary import apply_rotary_emb, multimodal_rotary_embedding, rotary_embedding
from ..ops.rotary import tables as rope_tables
from ..ops.rotary.embedding import inside
from .base import OpLayer
from .custom_op import CustomOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ApplyRotaryEmb",
    "MRotaryEmbedding",
    "RotaryEmbedding",
    "RotaryEmbeddingBase",
]


@CustomOp.register("apply_rotary_emb")
class ApplyRotaryEmb(OpLayer, op=apply_rotary_emb):
    """Rotary embedding with given cosines and sines, see `pyops.apply_rotary_emb`.

    ``forward(x, cos, sin)`` takes x [batch, seq_len, num_heads, head_size] or without batch, float32, float16 or
    bfloat16, and cos and sin [seq_len, rotary_dim / 2]; the first rotary_dim elements of a head are rotated. It returns
    a new tensor.

    Args:
        enforce_enable: see `CustomOp`.
        is_neox_style: pairs are elements (j, j + rotary_dim / 2); else (2 j, 2 j + 1).
        enable_fp32_compute: compute in float32 and round once; else every operation rounds to the dtype of x.

    Examples:
        >>> angles = torch.arange(5)[:, None] * 10000.0 ** -torch.linspace(0, 1, 8)
        >>> q = torch.randn(2, 5, 4, 16)  # batch, seq_len, num_heads, head_size
        >>> ApplyRotaryEmb(is_neox_style=True)(q, angles.cos(), angles.sin()).shape
        torch.Size([2, 5, 4, 16])
    """

    def __init__(
        self, enforce_enable: bool = False, is_neox_style: bool = True, enable_fp32_compute: bool = False
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.is_neox_style, self.enable_fp32_compute = is_neox_style, enable_fp32_compute

    @staticmethod
    def forward_static(
        x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool = True, enable_fp32_compute: bool = False
    ) -> Tensor:
        """`forward_native` without an instance."""
        return _applied(apply_rotary_emb.reference, x, cos, sin, is_neox_style, enable_fp32_compute)

    def compute(self, op: Callable[..., None], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _applied(op, x, cos, sin, self.is_neox_style, self.enable_fp32_compute)


def _applied(op: Callable[..., None], x: Tensor, *arguments: Any) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    op(out, x, *arguments)
    return out


def table_like(module: torch.nn.Module, name: str, x: Tensor) -> Tensor:
    """The table `name` of `module` in the dtype and on the device of x. The module keeps the converted table."""
    table: Tensor = getattr(module, name)
    if table.dtype != x.dtype or table.device != x.device:
        table = table.to(x.device, x.dtype)
        if not torch.compiler.is_compiling():
            setattr(module, name, table)
    return table


@CustomOp.register("rotary_embedding")
class RotaryEmbeddingBase(CustomOp):
    """The base of rotary embeddings, with the cos/sin table of `pyops.rotary_embedding`.

    The table is the buffer `cos_sin_cache` [positions, rotary_dim], cosines, then sines, and not part of the state. A
    subclass may override `_compute_inv_freq` and `_compute_cos_sin_cache`.

    Args:
        head_size: elements of a head.
        rotary_dim: elements of a head that are rotated, even.
        max_position_embeddings: positions in the table.
        base: base of the frequencies.
        is_neox_style: pairs are elements (j, j + rotary_dim / 2); else (2 j, 2 j + 1).
        dtype: dtype of the table. Calls convert the table to the dtype of the query.
        init_cache: whether the table is made now.

    Examples:
        >>> class Slower(RotaryEmbedding):
        ...     def _compute_inv_freq(self, base):
        ...         return super()._compute_inv_freq(base) / 2
        >>> Slower(64, 64, 4096, 10000.0, True, torch.float32).cos_sin_cache.shape
        torch.Size([4096, 64])
    """

    cos_sin_cache: Tensor
    mscale = 1.0  # multiplies cosines and sines

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        init_cache: bool = True,
    ) -> None:
        super().__init__()
        if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
            raise ValueError(
                f"{type(self).__name__}: rotary_dim: expected an even number up to head_size={head_size}, got "
                f"{rotary_dim}"
            )
        self.head_size, self.rotary_dim, self.base = head_size, rotary_dim, base
        self.max_position_embeddings = max_position_embeddings
        self.is_neox_style, self.dtype = is_neox_style, dtype
        if init_cache:
            self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache().to(dtype), persistent=False)
        self.apply_rotary_emb = ApplyRotaryEmb(is_neox_style=is_neox_style)

    def _compute_inv_freq(self, base: float) -> Tensor:
        """The frequencies, [rotary_dim / 2] float32, see `pyops.ops.rotary.tables`."""
        return rope_tables.frequencies(self.rotary_dim, base)

    def _compute_cos_sin_cache(self) -> Tensor:
        """The table, [positions, rotary_dim] float32."""
        return rope_tables.cos_sin(
            rope_tables.angles(self._compute_inv_freq(self.base), self.max_position_embeddings), self.mscale
        )

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, base={self.base}, "
            f"max_position_embeddings={self.max_position_embeddings}, is_neox_style={self.is_neox_style}"
        )


class RotaryEmbedding(RotaryEmbeddingBase):
    """Rotary embedding of queries and keys, see `pyops.rotary_embedding`.

    ``forward(positions, query, key=None, offsets=None)`` takes positions [num_tokens] or [batch, seq_len], int32 or
    int64; query of that shape and [num_heads * head_size] or [num_heads, head_size], float32, float16
    or bfloat16; key the same with num_kv_heads. offsets are added to the positions. It returns (query, key):
    `forward_cuda` rotates the given tensors in place, `forward_native` returns new ones. Tokens with a position outside
    the table stay as they are.

    Arguments are those of `RotaryEmbeddingBase`.

    Examples:
        >>> rope = RotaryEmbedding(64, 64, 4096, 10000.0, is_neox_style=True, dtype=torch.float32)
        >>> query, key = torch.randn(5, 4 * 64), torch.randn(5, 2 * 64)
        >>> query, key = rope(torch.arange(5), query, key)  # use what it returns: the arguments may be overwritten
    """

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        positions = positions if offsets is None else positions + offsets
        table = table_like(self, "cos_sin_cache", query)
        in_table = inside(positions, table)
        cos, sin = self._angles(positions.where(in_table, 0).long(), table)
        turns = self._by_token(in_table)[:, None, None]
        turned = []
        for x in (query, key):
            if x is not None:
                num_heads = x.shape[self._token_dims(positions) :].numel() // self.head_size
                heads = x.reshape(cos.shape[0], num_heads, self.head_size)
                each = self.apply_rotary_emb.forward_native(heads, cos, sin)
                turned.append(each.where(turns, heads).reshape(x.shape))
        return turned[0], turned[1] if key is not None else None

    def forward_cuda(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        positions = positions if offsets is None else positions + offsets
        self._turn(positions, query, key, table_like(self, "cos_sin_cache", query))
        return query, key

    def _token_dims(self, positions: Tensor) -> int:
        return int(positions.ndim)

    def _by_token(self, in_table: Tensor) -> Tensor:
        """[num_tokens] bool: whether all positions of a token are in the table, from `in_table` for each position."""
        return in_table.flatten()

    def _angles(self, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all tokens, [num_tokens, rotary_dim / 2]; all positions must be in the table."""
        cos, sin = table[positions.flatten()].chunk(2, -1)
        return cos, sin

    def _turn(self, positions: Tensor, query: Tensor, key: Tensor | None, table: Tensor) -> None:
        rotary_embedding(positions, query, key, self.head_size, table, self.is_neox_style)


class MRotaryEmbedding(RotaryEmbedding):
    """M-RoPE: rotary embedding by time, height and width positions, see `pyops.multimodal_rotary_embedding`.

    As `RotaryEmbedding`, but positions are [3, num_tokens], or [num_tokens] if the three are equal, as for text.

    Args:
        head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype: as in `RotaryEmbeddingBase`. The
            table has `scaling_factor` times max_position_embeddings positions, or 4 times if that is None.
        mrope_section: number of pairs for each axis, rotary_dim / 2 in total; None for text only.
        mrope_interleaved: whether the pairs of the axes alternate.
        scaling_factor: the factor of YaRN; None for no YaRN.
        extrapolation_factor, attn_factor, beta_fast, beta_slow, truncate: see `YaRNScalingRotaryEmbedding`.

    Examples:
        >>> rope = MRotaryEmbedding(64, 64, 4096, 1e6, True, torch.float32, mrope_section=[16, 8, 8])
        >>> positions = torch.randint(100, (3, 5))  # time, height and width of five tokens
        >>> query, key = rope(positions, torch.randn(5, 4 * 64), torch.randn(5, 2 * 64))
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        mrope_section: Sequence[int] | None = None,
        mrope_interleaved: bool = False,
        *,
        scaling_factor: float | None = None,
        extrapolation_factor: float = 1.0,
        attn_factor: float = 1.0,
        beta_fast: float = 32,
        beta_slow: float = 1,
        truncate: bool = True,
    ) -> None:
        self.scaling_factor, self.original_max_position = scaling_factor, max_position_embeddings
        self.mscale = 1.0 if scaling_factor is None else rope_tables.yarn_mscale(scaling_factor) * attn_factor
        self._ramp = beta_fast, beta_slow, extrapolation_factor, truncate
        positions = int((scaling_factor or 4) * max_position_embeddings)
        super().__init__(head_size, rotary_dim, positions, base, is_neox_style, dtype)
        self.mrope_section = None if mrope_section is None else list(mrope_section)
        self.mrope_interleaved = mrope_interleaved
        if self.mrope_section is not None and (
            len(self.mrope_section) != 3 or sum(self.mrope_section) != rotary_dim // 2
        ):
            raise ValueError(
                f"MRotaryEmbedding: mrope_section: expected three numbers of rotary_dim / 2 = {rotary_dim // 2} pairs "
                f"in all, got {mrope_section}"
            )

    def _compute_inv_freq(self, base: float) -> Tensor:
        if self.scaling_factor is None:
            return super()._compute_inv_freq(base)
        return rope_tables.yarn(self.rotary_dim, base, self.scaling_factor, self.original_max_position, *self._ramp)

    def _token_dims(self, positions: Tensor) -> int:
        return 1

    def _by_token(self, in_table: Tensor) -> Tensor:
        return in_table if in_table.ndim == 1 else in_table.all(0)

    def _sections(self, positions: Tensor) -> list[int]:
        if positions.ndim == 1:
            return [self.rotary_dim // 2, 0, 0]
        if self.mrope_section is None:
            raise ValueError(f"MRotaryEmbedding: positions: expected [num_tokens], got shape {tuple(positions.shape)}")
        return self.mrope_section

    def _angles(self, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        time, height, width = self._sections(positions)
        if positions.ndim == 1:
            return super()._angles(positions, table)
        axis = [0] * time + [1] * height + [2] * width
        if self.mrope_interleaved:
            axis = [j % 3 if j < 3 * (0, height, width)[j % 3] else 0 for j in range(len(axis))]
        cos, sin = table[positions].chunk(2, -1)  # [3, num_tokens, pairs]
        which = torch.tensor(axis, dtype=torch.int64, device=table.device).expand(1, cos.shape[1], -1)
        return cos.gather(0, which)[0], sin.gather(0, which)[0]

    def _turn(self, positions: Tensor, query: Tensor, key: Tensor | None, table: Tensor) -> None:
        time, height, width = self._sections(positions)
        style, interleaved = self.is_neox_style, self.mrope_interleaved
        multimodal_rotary_embedding(
            positions, query, key, self.head_size, table, style, time, height, width, interleaved
        )
