"""vLLM's linear layers of 4-bit and 8-bit weights and 16-bit activations (GPTQ, AWQ, compressed-tensors).

Weights are repacked into Marlin's layout at load time, because its kernels are the fastest of the supported layouts
(docs/performance/packed.md). `marlin_gemm` computes the layer.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import MPLinearKernel
from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_zero_points
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.model_executor.parameter import permute_param_layout_
from vllm.model_executor.utils import replace_parameter
from vllm.scalar_type import scalar_types

import pyops

from ....ops._shared.packed_layouts import ColumnOrder, column_place
from . import _hopper

_TYPES = {False: (scalar_types.uint4b8, scalar_types.uint8b128), True: (scalar_types.uint4, scalar_types.uint8)}
_GROUP_SIZES = 32, 64, 128
_TILE = 16, 64  # rows and columns of Marlin's tiles


class PyopsMarlinLinearKernel(MPLinearKernel):  # type: ignore[misc]
    """Integer weights in Marlin's layout, optionally with zero points or act-order (``desc_act``)."""

    served_bits: ClassVar[tuple[int, ...]] = ()  # weight bits for which the kernel is offered to vLLM

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        reason = _hopper.refusal() or _refusal(c)
        if reason is None and c.weight_type.size_bits not in cls.served_bits:
            reason = f"is slower than vLLM's kernels for {c.weight_type}"
        return reason is None, reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        c = self.config
        (k, n), bits = c.partition_weight_shape, c.weight_type.size_bits
        weight, scales, zeros, *g_idx = self._get_weight_params(layer)
        permute_param_layout_(weight, input_dim=0, output_dim=1, packed_dim=0)
        permute_param_layout_(scales, input_dim=0, output_dim=1)
        groups = scales.shape[0]

        layer.row_order = None  # rows of the weight in the order of their groups
        if _has_g_idx(c):
            layer.row_order = torch.argsort(g_idx[0]).to(torch.int32)
            replace_parameter(layer, self.w_gidx_name, g_idx[0][layer.row_order])
        packed = pyops.gptq_marlin_repack(weight.data.contiguous(), layer.row_order, k, n, bits)
        replace_parameter(layer, self.w_q_name, packed)
        replace_parameter(layer, self.w_s_name, _placed(scales.data, "marlin_32" if groups == 1 else "marlin_64"))
        if c.zero_points:
            permute_param_layout_(zeros, input_dim=0, output_dim=1, packed_dim=1)
            codes = unpack_quantized_values_into_int32(zeros.data, c.weight_type, packed_dim=1)
            replace_parameter(layer, self.w_zp_name, marlin_zero_points(codes, groups, n, bits))
        bias = getattr(layer, "bias", None)
        layer.placed_bias = None if bias is None else _placed(bias.data, "marlin_32")

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        c = self.config
        k, n = c.partition_weight_shape
        weight, scales, zeros, *g_idx = self._get_weight_params(layer)
        rows = x.reshape(-1, k)
        out = pyops.marlin_gemm(
            rows,
            weight,
            None if bias is None else layer.placed_bias,
            scales,
            None,
            None,
            zeros if c.zero_points else None,
            g_idx[0] if _has_g_idx(c) else None,
            layer.row_order,
            None,
            c.weight_type.id,
            rows.shape[0],
            n,
            k,
            not _has_g_idx(c) or k == c.full_weight_shape[0],
        )
        return out.view(*x.shape[:-1], n)


def _has_g_idx(c: Any) -> bool:
    """Whether rows are in the order of their groups by act-order, which vLLM 0.33 no longer has."""
    return bool(getattr(c, "has_g_idx", False))


def _refusal(c: Any) -> str | None:
    """Why a layer is left to vLLM; None if it is not."""
    k, n = c.partition_weight_shape
    if c.act_type not in (torch.float16, torch.bfloat16):
        return f"supports float16 and bfloat16 activations, not {c.act_type}"
    if c.weight_type not in _TYPES[c.zero_points]:
        return f"does not support {c.weight_type} with zero_points={c.zero_points}"
    if k % _TILE[0] or n % _TILE[1]:
        return f"has tiles of {_TILE[0]} x {_TILE[1]}, which do not divide a weight of {k} x {n}"
    if c.group_size not in (-1, k, *_GROUP_SIZES) or (c.group_size > 0 and k % c.group_size):
        return f"does not support groups of {c.group_size} of {k} rows"
    return None


def _placed(columns: Tensor, order: ColumnOrder) -> Tensor:
    """Scales [groups, N] or a bias [N] with columns permuted to one of Marlin's orders."""
    placed = torch.empty_like(columns, memory_format=torch.contiguous_format)
    placed[..., column_place(order, torch.arange(columns.shape[-1], dtype=torch.int64, device=columns.device))] = (
        columns
    )
    return placed
