"""A projection with 8-bit weights and activations, for this library's models and for transformers'.

torch.compile can trace it, because it uses no lazy proxy of `_core/system/lazy.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._core.tensors.tensor import new
from ..ops.activation import silu_and_mul, silu_and_mul_per_block_quant
from ..ops.linear.gemm_problem import SCALE_BLOCK
from ..ops.linear.scaled_mm import cutlass_scaled_mm
from ..ops.quantize import per_token_group_quant_fp8, scaled_fp8_quant, scaled_int8_quant

if TYPE_CHECKING:
    from torch import Tensor


class QuantisedLinear(NamedTuple):
    """``x @ (weight * weight_scale).T + bias``, with x quantised to the weight's dtype, by `cutlass_scaled_mm`.

    The activation is quantised with `input_scale` if given, else with dynamic scales: one per group of 128 elements of
    a row if the weight has block scales, else one per row.

    Attributes:
        weight: [out, in] float8_e4m3fn or int8.
        weight_scale: float32, contiguous: [out, 1] or one element, or scales of 128 x 128 blocks.
        input_scale: one float32, or None.
        bias: [out] of the dtype of x, or None.
        block_rows: with block scales, the rows of each merged weight, in order; () without. Each merged weight has its
            own GEMM, and its blocks start at its first row: `weight_scale` is [sum of ceil(rows / 128), ceil(in /
                128)].
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None = None
    bias: Tensor | None = None
    block_rows: tuple[int, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """The projection of `x` [num_tokens, in], float16 or bfloat16; rows of one stride."""
        codes, scales = _in_groups(x) if self.block_rows else self._quantised(x)
        return self._product(codes, scales, x.new_empty(x.shape[0], self.weight.shape[0]))

    def of_silu(self, gate_up: Tensor) -> Tensor:
        """The projection of ``silu(gate) * up`` for `gate_up` [num_tokens, 2 * in], float16 or bfloat16.

        One kernel activates and quantises if whole groups have scales.
        """
        num_tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
        if not self.block_rows or columns % SCALE_BLOCK:
            activated = gate_up.new_empty(num_tokens, columns)
            silu_and_mul(activated, gate_up)
            return self(activated)
        quants = new(gate_up, (num_tokens, columns), "float8_e4m3fn")
        scales = new(gate_up, (num_tokens, columns // SCALE_BLOCK), "float32")
        silu_and_mul_per_block_quant(quants, gate_up, scales, SCALE_BLOCK)
        return self._product(quants, scales, gate_up.new_empty(num_tokens, self.weight.shape[0]))

    def _product(self, quants: Tensor, scales: Tensor, out: Tensor) -> Tensor:
        """Write the projection of quantised activations to `out`, and return it."""
        if not self.block_rows:
            cutlass_scaled_mm(out, quants, self.weight.T, scales, self.weight_scale, self.bias)
            return out
        rows = list(self.block_rows)
        parts = out.split(rows, 1), self.weight.split(rows), self.weight_scale.split([num_blocks(n) for n in rows])
        for part, weight, weight_scale in zip(*parts, strict=True):
            cutlass_scaled_mm(part, quants, weight.T, scales, weight_scale.T)
        if self.bias is not None:
            out += self.bias
        return out

    def _quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` quantised, and its scales: `input_scale`, or dynamic ones."""
        if self.weight.is_floating_point():
            codes = new(x, tuple(x.shape), "float8_e4m3fn")
            codes, scales = scaled_fp8_quant(x, self.input_scale, use_per_token_if_dynamic=True, output=codes)
        else:
            codes, scales, _ = scaled_int8_quant(x, self.input_scale)
        return codes, scales


def num_blocks(size: int) -> int:
    """The number of scale blocks along `size` rows or columns of a weight."""
    return -(-size // SCALE_BLOCK)


def _in_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` as fp8 values and their scales, one per group of 128 elements of a row; the last group may be shorter."""
    num_tokens, columns = x.shape
    if columns % SCALE_BLOCK:
        padded = x.new_zeros(num_tokens, num_blocks(columns) * SCALE_BLOCK)
        padded[:, :columns] = x
        x = padded
    codes, scales = per_token_group_quant_fp8(x, SCALE_BLOCK, out_q=new(x, tuple(x.shape), "float8_e4m3fn"))
    return codes[:, :columns], scales
