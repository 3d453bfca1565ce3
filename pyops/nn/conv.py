"""2D and 3D convolutions, for images and videos."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn import functional

from .custom_op import CustomOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Conv2dLayer", "Conv3dLayer"]

_Size = int | tuple[int, ...]


class _ConvLayer(CustomOp):
    num_dim: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _Size,
        stride: _Size = 1,
        padding: _Size | Literal["same", "valid"] = 0,
        dilation: _Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if padding_mode != "zeros":
            raise ValueError(f'{name}: padding_mode: expected "zeros", got {padding_mode!r}')
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(f"{name}: groups: expected a divisor of {in_channels} and {out_channels}, got {groups}")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = self._each("kernel_size", kernel_size)
        self.stride, self.dilation = self._each("stride", stride), self._each("dilation", dilation)
        if padding == "same":
            if any(size != 1 for size in (*self.stride, *self.dilation)) or any(
                size % 2 == 0 for size in self.kernel_size
            ):
                raise ValueError(f'{name}: padding: "same" needs odd kernels, and strides and dilations of 1')
            padding = tuple(size // 2 for size in self.kernel_size)
        self.padding = self._each("padding", 0 if padding == "valid" else padding)
        self.padding_mode = padding_mode
        # If the stride equals the kernel size, the convolution is a GEMM over the patches of the image.
        self.enable_linear = self.kernel_size == self.stride and not any(self.padding) and groups == 1
        self.enable_linear &= set(self.dilation) == {1}
        self.input_size = in_channels * prod(self.kernel_size)
        shape = out_channels, in_channels // groups, *self.kernel_size
        self.weight = nn.Parameter(torch.empty(shape, dtype=params_dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels, dtype=params_dtype)) if bias else None)

    def _each(self, name: str, value: Any) -> tuple[int, ...]:
        sizes = tuple(value) if isinstance(value, Sequence) else (value,) * self.num_dim
        if len(sizes) != self.num_dim or not all(isinstance(size, int) for size in sizes):
            raise ValueError(f"{type(self).__name__}: {name}: expected one or {self.num_dim} integers, got {value!r}")
        return sizes

    def forward_native(self, x: Tensor) -> Tensor:
        return self._linear(x) if self.enable_linear else self._conv(x)

    def forward_cuda(self, x: Tensor) -> Tensor:
        return self._conv(x)

    def _conv(self, x: Tensor) -> Tensor:
        self._check(x)
        conv = functional.conv2d if self.num_dim == 2 else functional.conv3d
        return conv(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def _linear(self, x: Tensor) -> Tensor:
        self._check(x)
        for dim, size in enumerate(self.kernel_size, start=2):
            x = x.unfold(dim, size, size)  # [batch, channels, *places, *kernel]
        places = x.shape[2 : 2 + self.num_dim]
        x = x.movedim(1, 1 + self.num_dim).flatten(1 + self.num_dim)
        out = functional.linear(x.flatten(0, -2), self.weight.flatten(1), self.bias)
        return out.view(x.shape[0], *places, self.out_channels).movedim(-1, 1)

    def _check(self, x: Tensor) -> None:
        if x.ndim != self.num_dim + 2 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"{type(self).__name__}: x: expected {self.num_dim + 2} dimensions, the second of "
                f"in_channels={self.in_channels}, got shape {tuple(x.shape)}"
            )

    def extra_repr(self) -> str:
        return (
            f"in_channels={self.in_channels}, out_channels={self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, bias={self.bias is not None}"
        )


@CustomOp.register("conv2d")
class Conv2dLayer(_ConvLayer):
    """2D convolution, as in `torch.nn.Conv2d`.

    ``forward(x)`` takes [batch, in_channels, height, width] of the dtype of the weight. `forward_cuda` is PyTorch's
    convolution. `forward_native` is a GEMM if the stride equals the kernel size, as in patch embeddings.

    Args:
        in_channels, out_channels: channels of the input and of the output.
        kernel_size, stride, dilation: one integer, or one for height and one for width.
        padding: the same, or "valid" for none, or "same" for half an odd kernel.
        groups: number of groups of channels that are convolved separately.
        bias: whether there is a bias.
        padding_mode: "zeros".
        params_dtype: dtype of the parameters `weight` and `bias`; None for torch's default.

    Examples:
        >>> embed = Conv2dLayer(3, 64, kernel_size=16, stride=16)  # patches of a vision encoder
        >>> embed.load_state_dict(torch.nn.Conv2d(3, 64, kernel_size=16, stride=16).state_dict())
        <All keys matched successfully>
        >>> embed(torch.randn(1, 3, 224, 224)).shape
        torch.Size([1, 64, 14, 14])
    """

    num_dim = 2


@CustomOp.register("conv3d")
class Conv3dLayer(_ConvLayer):
    """3D convolution of [batch, in_channels, time, height, width]; otherwise as `Conv2dLayer`.

    Examples:
        >>> embed = Conv3dLayer(3, 64, kernel_size=(2, 14, 14), stride=(2, 14, 14), bias=False)
        >>> embed.load_state_dict({"weight": torch.randn(64, 3, 2, 14, 14)})
        <All keys matched successfully>
        >>> embed(torch.randn(1, 3, 2, 28, 28)).shape
        torch.Size([1, 64, 1, 2, 2])
    """

    num_dim = 3
