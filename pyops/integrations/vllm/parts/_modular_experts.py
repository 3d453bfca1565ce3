"""vLLM's modular experts on this library's grouped GEMMs, with weights in the checkpoint's layout."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.utils import quant_utils as keys
from vllm.platforms import current_platform

from ....fused.expert_products import ExpertSizes, SortedRows, block_size_of, clamp_limit_of, multiply_experts
from ....ops.linear.gemm_problem import SCALE_BLOCK
from ....ops.linear.grouped_problem import ACTIVATIONS
from ....ops.linear.quantized_experts import MX_BLOCK
from ....ops.moe.rows import moe_sum_experts
from ..choice import keeps

# {(quantization of weights, of activations): the case of `keeps`}
_CASES: dict[tuple[Any, Any], str] = {
    (None, None): "bf16",
    (keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym): "fp8_block",
    (keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym): "fp8_tensor",
    (keys.kFp8StaticTensorSym, keys.kFp8DynamicTokenSym): "fp8_tensor",
    (keys.kFp8StaticTensorSym, keys.kFp8StaticTensorSym): "fp8_tensor",
    (keys.kFp8StaticTensorSym, keys.kFp8DynamicTensorSym): "fp8_tensor",
    (keys.kInt8StaticChannelSym, keys.kInt8DynamicTokenSym): "int8",
    (keys.kMxfp4Static, None): "mxfp4",
}


class PyopsExperts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """The experts of a layer: a sort, a grouped GEMM with its activation, a grouped GEMM, and vLLM's finalization.

    `apply` writes one row per (token, expert) pair; the object from `finalize_weight_and_reduce_impl` reduces them into
    the layer's output, without a copy. Unquantized weights, fp8 weights with per-tensor, per-channel or 128 x 128 block
    scales, int8 weights, and mxfp4 weights with 16-bit activations are read as vLLM has loaded them.
    """

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        # The first two raise for configurations that `is_supported_config` cannot see.
        self._of_one_token = _places_of_one_token(moe_config, quant_config)
        self._has_limit = clamp_limit_of(quant_config, moe_config.activation.value) is not None
        self._sum = _SumOfChoices()

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: Any,
        weight_key: Any,
        activation_key: Any,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        """(whether the kernels support the layer, the reason if not), by vLLM's common checks and by sizes."""
        asked = cls, moe_config, weight_key, activation_key, activation_format
        supported, reason = mk.FusedMoEExperts.is_supported_config(*asked)
        if not supported:
            return False, reason
        case = _CASES[weight_key, activation_key]
        reason = _unsupported(case, moe_config)
        if reason is None and not keeps("experts", case):
            reason = f"vLLM's own experts are kept for {case}"
        return reason is None, reason

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        # From sm_100 on this library would use its sm_80 GEMMs, whereas vLLM has kernels for tcgen05.
        supported = current_platform.has_device_capability((8, 0)) and not current_platform.has_device_capability(
            (10, 0)
        )
        return bool(current_platform.is_cuda() and supported)

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        case = _CASES.get((weight_key, activation_key))
        return case is not None and (not case.startswith("fp8") or bool(current_platform.supports_fp8()))

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation.value in ACTIVATIONS and activation.value != "none"

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not (
            moe_parallel_config.use_fi_nvl_two_sided_kernels or moe_parallel_config.use_fi_nvl_one_sided_kernels
        )

    def supports_expert_map(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return self._sum

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of workspace 1 (gate and up, then the output), workspace 2 (the activation's result) and output."""
        output = (M, topk, K)
        first = (M, topk, N) if self._has_limit else output
        return first, (M * topk, self.adjust_N_for_activation(N, activation)), output

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the row of each (token, expert) pair to output, [num_tokens, topk, hidden_size].

        With `apply_router_weight_on_input`, hidden_states are already multiplied by the router weights.
        """
        multiply_experts(
            output.view(-1, output.shape[2]),
            workspace2,
            workspace13.view(len(workspace2), -1) if self._has_limit else workspace2,
            hidden_states,
            w1,
            w2,
            topk_ids,
            (None, None if apply_router_weight_on_input else topk_weights),
            activation.value,
            global_num_experts if expert_map is None else expert_map.shape[0],
            expert_map,
            self.quant_config,
            a1q_scale,
            self._lists(topk_ids, expert_map),
        )
        self._sum.of = topk_ids, w1.shape[0], expert_map

    def _lists(self, topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> SortedRows | None:
        """The expert lists of a single token, which need no sort: one block per expert. None for more tokens."""
        places, total, block_size = self._of_one_token
        if topk_ids.shape != (1, self.moe_config.experts_per_token):
            return None
        if expert_map is not None or topk_ids.dtype != torch.int32:
            return None
        return SortedRows(places, topk_ids.view(-1), total, block_size)


class _SumOfChoices(mk.TopKWeightAndReduce):  # type: ignore[misc]
    """The reduction over each token's experts, for the last call of `PyopsExperts.apply`.

    Attributes:
        of: (topk_ids, number of experts on this device, expert_map) of that call.
    """

    of: tuple[torch.Tensor, int, torch.Tensor | None]

    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        """Reduce into output, or into a new tensor. The rows are already multiplied by the router weights."""
        ids, num_experts, expert_map = self.of
        if output is None:
            output = fused_expert_output.new_empty(len(fused_expert_output), fused_expert_output.shape[2])
        moe_sum_experts(fused_expert_output, ids, output, num_experts, expert_map)
        return output


def _places_of_one_token(moe_config: Any, quant_config: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(sorted_token_ids, num_tokens_post_pad, block size) of blocks with one (token, expert) pair each.

    They are made with the layer: a tensor first written during CUDA graph capture has no contents before the replay.
    """
    topk, device, experts = moe_config.experts_per_token, moe_config.device, moe_config.num_local_experts
    like = torch.empty(0, dtype=moe_config.in_dtype, device=device)
    widths = moe_config.hidden_dim, moe_config.intermediate_size_per_partition
    sizes = ExpertSizes(experts, experts, topk, *widths)
    block_size = block_size_of(quant_config, sizes, moe_config.activation.value, like, topk)
    places = torch.full((topk, block_size), topk, dtype=torch.int32, device=device)
    places[:, 0] = torch.arange(topk, dtype=torch.int64, device=device)
    return places.view(-1), torch.full((1,), topk * block_size, dtype=torch.int32, device=device), block_size


def _unsupported(case: str, moe_config: Any) -> str | None:
    """Why the kernels do not support the dtypes or sizes of a layer; None if they do."""
    dtypes = (torch.bfloat16,) if case == "mxfp4" else (torch.bfloat16, torch.float16)
    if moe_config.in_dtype not in dtypes:
        return f"kernel does not support {case} experts with activations of {moe_config.in_dtype}"
    if moe_config.swiglu_limit is not None and moe_config.activation is not MoEActivation.SILU:
        return f"kernel does not support a clamp limit of {moe_config.swiglu_limit} with {moe_config.activation}"
    hidden_size, intermediate_size = moe_config.hidden_dim, moe_config.intermediate_size_per_partition
    if case == "fp8_block" and (hidden_size % SCALE_BLOCK or intermediate_size % SCALE_BLOCK):
        return f"kernel does not support experts of {hidden_size} x {intermediate_size} in blocks of {SCALE_BLOCK}"
    if case == "mxfp4" and hidden_size % MX_BLOCK:  # vLLM pads intermediate_size
        return f"kernel does not support a hidden size of {hidden_size} in blocks of {MX_BLOCK}"
    return None
