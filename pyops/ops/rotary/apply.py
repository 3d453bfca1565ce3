"""Rotary embedding into another tensor, by angles that are given for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32
from ..._core.tensors.tensor import TensorArg
from ._common import MAX_ROTARY_DIM, choose
from .embedding import turned

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["apply_rotary_emb"]

_apply_rotary_emb = Kernel("rotary/apply_rotary_emb.cu")


@op(out="out", in_place={"out": "x"}, ulps=0)
def apply_rotary_emb(
    out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool = True, enable_fp32_compute: bool = False
) -> None:
    """Rotary embedding by given angles: ``x' = T(T(x cos) - T(y sin)), y' = T(T(y cos) + T(x sin))``.

    The first rotary_dim elements of a head are rotated in pairs (x, y): elements (j, j + rotary_dim / 2) if `is_neox`,
    else (2j, 2j + 1) (Su et al. 2021, arXiv:2104.09864); the others are copied. Cosines and sines are rounded to the
    element type T, and so is every result, as in eager PyTorch; with `enable_fp32_compute` only the last one is.

    Args:
        out: the shape and dtype of `x`, written; may be `x` itself; any strides but the last.
        x: [batch, seq_len, num_heads, head_size] or without batch, float32, float16 or bfloat16; any strides but the
            last.
        cos, sin: [seq_len, rotary_dim / 2], both float32, float16 or bfloat16; constant row stride; rotary_dim is at
            most head_size and 2048.
        is_neox: which elements form a pair.
        enable_fp32_compute: whether to compute in float32.
    """
    dtype = torch.float32 if enable_fp32_compute else x.dtype
    out.copy_(turned(x.to(dtype), cos.to(dtype), sin.to(dtype), is_neox))


@apply_rotary_emb.plan
def plan_apply_rotary_emb(
    out: TensorArg, x: TensorArg, cos: TensorArg, sin: TensorArg, is_neox: bool, enable_fp32_compute: bool
) -> Launch:
    check.floating(x)
    if len(x.shape) not in (3, 4):
        raise x.error(f"expected shape ([batch,] seq_len, num_heads, head_size), got {x.shape}")
    check.row_size(x)
    check.like(out, x)
    check.row_size(out)
    seq_len, num_heads, head_size = x.shape[-3:]
    check.floating(cos)
    if len(cos.shape) != 2 or cos.shape[0] != seq_len or not 0 < 2 * cos.shape[1] <= min(head_size, MAX_ROTARY_DIM):
        raise cos.error(
            f"expected shape (seq_len={seq_len}, rotary_dim / 2) with a rotary_dim of at most "
            f"min(head_size={head_size}, {MAX_ROTARY_DIM}), got {cos.shape}"
        )
    check.like(sin, cos)
    check.row_size(cos)
    check.row_size(sin)
    rotary_dim = 2 * cos.shape[1]
    batch = x.shape[0] if len(x.shape) == 4 else 1
    config = choose(batch * seq_len, max(1, num_heads), rotary_dim, is_neox, [cos, sin], [x, out])
    return _apply_rotary_emb(
        scalar_t=x.dtype,
        angle_t=cos.dtype,
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        FP32_COMPUTE=bool(enable_fp32_compute) and x.dtype is not float32,
        LEADING=1 if batch == 1 else 2,
        REST_ACCESS=check.vector_width(rotary_dim | head_size, x, out),
        **config.constants,
    ).launch(
        grid=config.grid(batch * seq_len) if num_heads else 0,
        block=config.num_threads,
        num_tokens=batch * seq_len,
        seq_len=seq_len,
        cos_stride=cos.strides[0],
        sin_stride=sin.strides[0],
        **_token_strides("out", out),
        **_token_strides("x", x),
    )


def _token_strides(name: str, arg: TensorArg) -> dict[str, int]:
    """The strides of [batch, seq_len, heads, head_size], or without batch."""
    *outer, token, head, _ = arg.strides
    first = outer[0] if outer and arg.shape[0] > 1 else token
    return {f"{name}_stride0": first, f"{name}_stride1": token, f"{name}_head_stride": head}


@apply_rotary_emb.example
def example_apply_rotary_emb(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    head_size: Literal[128, 72] = 128,
    angle_dtype: Literal["float32", "bfloat16"] = "float32",
    is_neox: bool = True,
    enable_fp32_compute: bool = False,
) -> tuple[Any, ...]:
    out = make.empty(num_tokens, 16, head_size, dtype=dtype)
    x = make.randn(num_tokens, 16, head_size, dtype=dtype)
    cos, sin = (make.randn(num_tokens, 64 if head_size == 128 else 36, dtype=angle_dtype) for _ in range(2))
    return out, x, cos, sin, is_neox, enable_fp32_compute
