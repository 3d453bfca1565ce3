"""A call for each refusal of `pyops.integrations.vllm.refusals.products`: an op's example with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pyops
from tests.support.calls import example


def _call(name: str, **changes: Any) -> Callable[[], object]:
    """A call of the op with its example; `changes` are other arguments, or functions that make them from the
    example's."""

    def call() -> object:
        op = pyops.registry[name]
        names = [parameter.name for parameter in op.declaration.parameters]
        given = dict(zip(names, example(op), strict=True))
        given |= {argument: to(given[argument]) if callable(to) else to for argument, to in changes.items()}
        result: object = op.wrapper(**given)
        return result

    return call


def _flat(x: Tensor) -> Tensor:
    return x.view(-1)


def _column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def _without_a_column(x: Tensor) -> Tensor:
    return x[:, :-1].contiguous()


def _twice(x: Tensor) -> Tensor:
    return torch.cat([x, x])


def _bytes(x: Tensor) -> Tensor:
    return x.to(torch.uint8)


ORDER = torch.zeros(128, dtype=torch.int32)
ORDERS = torch.zeros(3, 128, dtype=torch.int32)
ONE = torch.zeros(1, dtype=torch.bfloat16)

CALLS: dict[tuple[str, str], tuple[Callable[[], object], ...]] = {
    ("allspark_w8a16_gemm", "b_scales"): (_call("allspark_w8a16_gemm", b_scales=_flat),),
    ("allspark_w8a16_gemm", "b_qzeros"): (
        _call("allspark_w8a16_gemm", b_qzeros=torch.zeros(1, 96).bfloat16(), has_zp=False),
    ),
    ("allspark_w8a16_gemm", "n32k16_reorder"): (_call("allspark_w8a16_gemm", n32k16_reorder=False),),
    ("cutlass_encode_and_reorder_int4b", "B"): (
        _call("cutlass_encode_and_reorder_int4b", B=torch.zeros(2, 16, dtype=torch.int32)),
        _call("cutlass_encode_and_reorder_int4b", B=torch.zeros(4, 8, dtype=torch.int32)),
    ),
    ("cutlass_w4a8_mm", "B"): (_call("cutlass_w4a8_mm", B=_column_major),),
    ("get_cutlass_batched_moe_mm_data", "expert_offsets"): (
        _call("get_cutlass_batched_moe_mm_data", expert_offsets=_twice),
    ),
    ("ggml_moe_a8", "W"): (_call("ggml_moe_a8", row=39),),
    ("ggml_moe_a8", "X"): (_call("ggml_moe_a8", tokens=15), _call("ggml_moe_a8", X=_without_a_column)),
    ("ggml_moe_a8_vec", "X"): (_call("ggml_moe_a8_vec", tokens=3), _call("ggml_moe_a8_vec", X=_without_a_column)),
    ("ggml_mul_mat_a8", "X"): (_call("ggml_mul_mat_a8", X=_without_a_column),),
    ("ggml_mul_mat_a8", "W"): (_call("ggml_mul_mat_a8", row=39),),
    ("ggml_mul_mat_vec_a8", "X"): (_call("ggml_mul_mat_vec_a8", X=_without_a_column),),
    ("ggml_mul_mat_vec_a8", "W"): (_call("ggml_mul_mat_vec_a8", row=39),),
    ("machete_mm", "B"): (_call("machete_mm", B=_column_major),),
    ("marlin_gemm", "g_idx"): (_call("marlin_gemm", g_idx=ORDER, perm=None),),
    ("marlin_gemm", "perm"): (_call("marlin_gemm", g_idx=None, perm=ORDER),),
    ("moe_align_block_size", "topk_ids"): (_call("moe_align_block_size", topk_ids=_bytes),),
    ("moe_lora_align_block_size", "topk_ids"): (_call("moe_lora_align_block_size", topk_ids=_bytes),),
    ("moe_permute", "topk_ids"): (_call("moe_permute", topk=1025, topk_ids=torch.zeros(16, 1025, dtype=torch.int32)),),
    ("moe_permute", "permuted_input"): (_call("moe_permute", permuted_input=_twice),),
    ("moe_sum", "input"): (_call("moe_sum", input=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),),
    ("moe_unpermute", "topk_weights"): (_call("moe_unpermute", topk=1025, topk_weights=torch.zeros(16, 1025)),),
    ("moe_wna16_gemm", "top_k"): (_call("moe_wna16_gemm", top_k=1025),),
    ("moe_wna16_marlin_gemm", "g_idx"): (_call("moe_wna16_marlin_gemm", g_idx=ORDERS, perm=None),),
    ("moe_wna16_marlin_gemm", "perm"): (_call("moe_wna16_marlin_gemm", g_idx=None, perm=ORDERS),),
    ("moe_wna16_marlin_gemm", "top_k"): (_call("moe_wna16_marlin_gemm", top_k=1025),),
    ("rearrange_kn_weight_as_n32k16_order", "b_scales"): (
        _call("rearrange_kn_weight_as_n32k16_order", b_scales=_flat),
    ),
    ("topk_sigmoid", "gating_output"): (
        _call("topk_sigmoid", gating_output=lambda x: x[None]),
        _call("topk_sigmoid", gating_output=torch.zeros(16, 8193)),
    ),
    ("topk_softmax", "gating_output"): (
        _call("topk_softmax", gating_output=lambda x: x[None]),
        _call("topk_softmax", gating_output=torch.zeros(16, 8193)),
    ),
    ("topk_softplus_sqrt", "gating_output"): (_call("topk_softplus_sqrt", gating_output=lambda x: x[None]),),
    ("wvSplitK", "in_bias"): (_call("wvSplitK", in_bias=ONE),),
    ("wvSplitKQ", "in_bias"): (_call("wvSplitKQ", in_bias=ONE),),
    ("wvSplitKrc", "in_bias"): (_call("wvSplitKrc", in_bias=ONE),),
}
