"""fp8 quantization of activations, as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch.nn import functional

from ..ops._shared.fp8 import largest_code, own_fp8
from ..ops.quantize import per_token_group_quant_fp8, scaled_fp8_quant
from .custom_op import CustomOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GroupShape", "QuantFP8"]


class _Shape(NamedTuple):
    row: int
    col: int


class GroupShape(_Shape):
    """The rows and columns of a block that shares a scale; -1 means all.

    Examples:
        >>> GroupShape.PER_TOKEN, GroupShape(1, 128).is_per_group()
        (GroupShape(row=1, col=-1), True)
    """

    PER_TENSOR: ClassVar[GroupShape]
    PER_TOKEN: ClassVar[GroupShape]
    PER_CHANNEL: ClassVar[GroupShape]

    def is_per_tensor(self) -> bool:
        """Whether there is one scale."""
        return self == (-1, -1)

    def is_per_token(self) -> bool:
        """Whether every row has a scale."""
        return self == (1, -1)

    def is_per_channel(self) -> bool:
        """Whether every column has a scale."""
        return self == (-1, 1)

    def is_per_group(self) -> bool:
        """Whether every group of contiguous elements of a row has a scale."""
        return self.row == 1 and self.col >= 1


GroupShape.PER_TENSOR, GroupShape.PER_TOKEN = GroupShape(-1, -1), GroupShape(1, -1)
GroupShape.PER_CHANNEL = GroupShape(-1, 1)


@CustomOp.register("quant_fp8")
class QuantFP8(CustomOp):
    """fp8 quantization of an activation: ``x`` is approximately the fp8 value times its scale.

    ``forward(x, scale=None, scale_ub=None)`` takes x [num_tokens, hidden_size], or of any rank for group scales, in
    float32, float16 or bfloat16. It returns (fp8 values, scale). The fp8 dtype is float8_e4m3fnuz on gfx942,
    float8_e4m3fn elsewhere. A given scale is returned: by `forward_cuda` as it is, by `forward_native` in a shape that
    broadcasts.

    `forward_cuda` calls `pyops.scaled_fp8_quant` or `pyops.per_token_group_quant_fp8`. `forward_native` differs from
    them: it multiplies by the reciprocal of a token's scale, uses a minimum scale of 1 / (512 * the largest fp8 value),
    allows an incomplete last group, and pads with rows of zeros.

    Args:
        static: whether `forward` gets scales: float32, one element, [num_tokens], [hidden_size], or [rows, columns] of
            groups. If not, scales are dynamic.
        group_shape: the elements that share a scale. Dynamic scales are per tensor, per token or per group of a row.
        num_token_padding: minimum number of rows of the fp8 values, and of per-token scales.
        column_major_scales, tma_aligned_scales, use_ue8m0: for group scales, see
            `pyops.per_token_group_quant_fp8`; None means False.
        compile_native: see `CustomOp`.

    Raises:
        ValueError: a scale is given though `static` is False, or missing though it is True; `scale_ub` is given for
            scales other than dynamic per-token ones, or has more than one element; `group_shape` does not support
            dynamic scales.

    Examples:
        >>> quant = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)
        >>> x = torch.randn(5, 64)
        >>> values, scale = quant(x)
        >>> scale.shape
        torch.Size([5, 1])
        >>> torch.testing.assert_close(values.float() * scale, x, rtol=2**-4, atol=1e-3)
    """

    def __init__(
        self,
        static: bool,
        group_shape: tuple[int, int],
        num_token_padding: int | None = None,
        column_major_scales: bool = False,
        tma_aligned_scales: bool = False,
        use_ue8m0: bool | None = None,
        compile_native: bool = True,
    ) -> None:
        super().__init__(compile_native=compile_native)
        self.static, self.group_shape = static, GroupShape(*group_shape)
        self.is_group_quant = self.group_shape.is_per_group() and not static
        self.use_per_token_if_dynamic = self.group_shape.is_per_token()
        self.num_token_padding = num_token_padding
        self.column_major_scales, self.tma_aligned_scales = column_major_scales, tma_aligned_scales
        self.use_ue8m0 = bool(use_ue8m0)
        if not (static or self.is_group_quant or self.use_per_token_if_dynamic or self.group_shape.is_per_tensor()):
            raise ValueError(
                f"QuantFP8: group_shape: scales are found for a tensor, a token or a group of a row, got {group_shape}"
            )
        if self.is_group_quant and num_token_padding is not None:
            raise ValueError("QuantFP8: num_token_padding: is not for scales of groups")

    def _check(self, scale: Tensor | None, scale_ub: Tensor | None) -> None:
        if (scale is not None) != self.static:
            raise ValueError(f"QuantFP8: scale: expected {'one' if self.static else 'None'} with static={self.static}")
        if scale_ub is not None and (self.static or not self.use_per_token_if_dynamic or scale_ub.numel() != 1):
            raise ValueError("QuantFP8: scale_ub: expected None, or one element for scales found for tokens")

    def forward_cuda(self, x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None) -> Any:
        self._check(scale, scale_ub)
        if self.is_group_quant:
            return per_token_group_quant_fp8(
                x,
                self.group_shape.col,
                column_major_scales=self.column_major_scales,
                tma_aligned_scales=self.tma_aligned_scales,
                use_ue8m0=self.use_ue8m0,
            )
        return scaled_fp8_quant(
            x,
            scale,
            num_token_padding=self.num_token_padding,
            scale_ub=scale_ub,
            use_per_token_if_dynamic=self.use_per_token_if_dynamic,
            group_shape=(self.group_shape.row, self.group_shape.col) if self.static else None,
        )

    def forward_native(self, x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None) -> Any:
        self._check(scale, scale_ub)
        if self.is_group_quant:
            return self._groups(x)
        kind, wide = getattr(torch, own_fp8(x)), x.float()
        largest = largest_code(kind)
        if scale is None:
            absmax = wide.abs().amax(-1, keepdim=True) if self.use_per_token_if_dynamic else wide.abs().max().reshape(1)
            if scale_ub is not None:
                absmax = absmax.clamp(max=scale_ub.reshape(()))
            scale = (absmax / largest).clamp(min=1.0 / (largest * 512.0))
            factors = scale
        else:
            scale = self._broadcast(x, scale)
            factors = scale
            for dim in (0, 1) if scale.ndim == 2 else ():
                factors = factors.repeat_interleave(x.shape[dim] // scale.shape[dim], dim)
        codes = (wide * factors.reciprocal()).clamp(-largest, largest).to(kind)
        missing = (self.num_token_padding or 0) - x.shape[0]
        if missing > 0:
            codes = functional.pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(kind)
            if scale.ndim == 2 and not self.static:
                scale = functional.pad(scale, (0, 0, 0, missing))
        return codes, scale

    def _broadcast(self, x: Tensor, scale: Tensor) -> Tensor:
        """A given scale in a shape that broadcasts: one element, or a matrix of group scales."""
        if scale.numel() == 1:
            return scale if self.group_shape.is_per_tensor() else scale.reshape(1, 1)
        if scale.ndim == 2:
            return scale
        row, col = (size if part < 0 else part for part, size in zip(self.group_shape, x.shape, strict=True))
        return scale.reshape(x.shape[0] // row, x.shape[1] // col)

    def _groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size, hidden_size = self.group_shape.col, x.shape[-1]
        groups = functional.pad(x.float(), (0, -hidden_size % size)).unflatten(-1, (-1, size))
        kind = getattr(torch, own_fp8(x))
        largest = largest_code(kind)
        scale = groups.abs().amax(-1, keepdim=True) / largest
        if self.use_ue8m0:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        scale = scale.clamp(min=1.0 / (largest * 512.0))
        codes = (groups / scale).clamp(-largest, largest).to(kind).flatten(-2)[..., :hidden_size]
        scale = scale.squeeze(-1)
        if self.column_major_scales:
            scale = scale.mT.contiguous().mT
        return codes.contiguous(), scale


@CustomOp.register("mla_decode_concat_quant_fp8")
class _DecodeConcatQuantFP8(QuantFP8):
    """fp8 quantization of the queries of multi-head latent attention; concatenates the two parts of a query.

    ``forward(decode_ql_nope, decode_q_pe, scale)`` takes [num_tokens, num_heads, kv_lora_rank], [num_tokens, num_heads,
    rope_dim] and the static scale; returns fp8 values [num_tokens, num_heads, kv_lora_rank + rope_dim].
    """

    def forward_native(self, decode_ql_nope: Tensor, decode_q_pe: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return _joined(super().forward_native, decode_ql_nope, decode_q_pe, scale)

    def forward_cuda(self, decode_ql_nope: Tensor, decode_q_pe: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return _joined(super().forward_cuda, decode_ql_nope, decode_q_pe, scale)


def _joined(quant: Any, decode_ql_nope: Tensor, decode_q_pe: Tensor, scale: Tensor) -> Tensor:
    query = torch.cat((decode_ql_nope, decode_q_pe), -1)
    codes, _ = quant(query.flatten(1), scale)
    return codes.view(query.shape)
