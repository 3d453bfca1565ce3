"""Weights of experts in mxfp4, which are decoded where they are loaded to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

MX_BLOCK = 32  # elements under one scale (OCP Microscaling Formats 1.0)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of the exponents that scales are


def mxfp4_views(weight: Tensor) -> dict[str, Tensor]:
    """Where a checkpoint's codes and scales of a weight go: to the first bytes of each row of the weight itself.

    Args:
        weight: [num_experts, rows, columns], contiguous, of at least 16 bits.

    Returns:
        "blocks": [num_experts, rows, columns / 32, 16] uint8, the earlier of two codes in the lower half of a byte.
        "scales": [num_experts, rows, columns / 32] uint8.
    """
    columns = weight.shape[-1]
    num_blocks, num_bytes = columns // MX_BLOCK, columns // 2
    row = weight.view(torch.uint8)
    blocks = row[..., :num_bytes].unflatten(-1, (num_blocks, MX_BLOCK // 2))
    return {"blocks": blocks, "scales": row[..., num_bytes : num_bytes + num_blocks]}


def decode_mxfp4(weight: Tensor) -> None:
    """Write to a weight the elements whose codes and scales `mxfp4_views` of it hold: ``e2m1 * 2^(scale - 127)``."""
    values = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=weight.device)
    for expert in weight:  # one by one: codes as indices take 16 times their memory
        views = mxfp4_views(expert)
        codes = torch.stack((views["blocks"] & 15, views["blocks"] >> 4), -1).flatten(-2)
        scaled = torch.ldexp(values[codes.int()], views["scales"].int()[..., None] - _BIAS)
        expert.copy_(scaled.flatten(-2))
