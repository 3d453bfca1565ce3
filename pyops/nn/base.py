"""A layer that is one op of this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .._core.op.torch_library import bind_loaded
from .._core.op.typed import Wrapper
from .custom_op import CustomOp

if TYPE_CHECKING:
    from torch import Tensor

# torch.compile can trace references only once the lazy torch is bound, and it may trace one before any op is called.
bind_loaded()


class OpLayer(CustomOp):
    """A layer with a `compute` method that allocates the outputs of an op and calls the op.

    `forward_cuda` calls the op, which launches its kernel; `forward_native` calls the op's reference. A layer therefore
    computes the same whether it is on or off, and torch.compile can fuse the reference of a layer that is off.

    Class keyword:
        op: the op, as in ``class SiluAndMul(OpLayer, op=silu_and_mul)``. `_use` gives one instance another op.
    """

    op: Wrapper[..., None]

    def __init_subclass__(cls, op: Wrapper[..., None] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if op is not None:
            cls.op = staticmethod(op)  # type: ignore[assignment]

    def _use(self, op: Wrapper[..., None]) -> None:
        self.op = op

    def compute(self, op: Callable[..., None], *args: Any) -> Any:
        """The result of this layer, computed by `op`: the op of the layer or its reference."""
        raise NotImplementedError

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self.op.reference, *args, **kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self.op, *args, **kwargs)


def rows(x: Tensor) -> Tensor:
    """`x` if its rows are contiguous and have one stride, as most ops require; else a contiguous copy."""
    return x if x.is_contiguous() or (x.ndim <= 2 and x.stride(-1) == 1) else x.contiguous()


def empty_like(x: Tensor) -> Tensor:
    """A contiguous tensor of the shape and dtype of `x`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
