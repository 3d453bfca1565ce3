"""A projection with packed weights in the layout of AWQ or GPTQ checkpoints.

torch.compile can trace it, because it uses no lazy proxy of `_core/system/lazy.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..ops.linear.awq_gptq_mm import awq_gemm, gptq_gemm

if TYPE_CHECKING:
    from torch import Tensor


class PackedProduct(NamedTuple):
    """``x @ ((quant - zero) * scale)``, by `awq_gemm` or `gptq_gemm`.

    Attributes:
        qweight: int32 words of packed weights: AWQ [in, out / 8], GPTQ [in * bits / 32, out].
        qzeros: int32 words of zero points, [groups, out * bits / 32].
        scales: [groups, out] of the dtype of x.
        g_idx: GPTQ: [in] int32, the group of each row, if groups are not consecutive.
        bits: bits of a GPTQ weight; 0 for AWQ.
        is_v2: GPTQ: zero points are used as they are stored; otherwise 1 is added.
    """

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor | None = None
    bits: int = 0
    is_v2: bool = True

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write the projection of `x` [num_tokens, in], float16 or bfloat16, to `out`; rows of both have one stride."""
        if self.bits:
            weight = self.qweight, self.qzeros, self.scales, self.g_idx
            gptq_gemm(x, *weight, False, self.is_v2, self.bits, out=out)
        else:
            awq_gemm(x, self.qweight, self.scales, self.qzeros, 1, out=out)
