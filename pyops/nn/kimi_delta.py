"""The mixer of Kimi Linear: the gated delta rule with a decay for each channel of a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .custom_op import CustomOp
from .delta_rule import DeltaMixer
from .linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    copy_weight,
    new_parameter,
    refuse_quant_config,
)
from .merged import MergedColumnParallelLinear
from .mixer import Ops, depthwise
from .norm_gated import RMSNormGated
from .parallel import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KimiGatedDeltaNetAttention"]


@CustomOp.register("kimi_gated_delta_net_attention")
class KimiGatedDeltaNetAttention(DeltaMixer):
    """The linear attention of Kimi Linear: ``o_proj(o_norm(kda(silu(conv(q, k, v))), sigmoid(gate)))``.

    ``q, k, v = q_proj(x), k_proj(x), v_proj(x)``; the logits of decays are ``f_b_proj(f_a_proj(x))``, those of beta
    ``b_proj(x)``, and the gate of the norm is ``g_b_proj(g_a_proj(x))``. Prefill uses `pyops.kda`, decodes
    `pyops.kda_update`. The convolutions of a checkpoint, q_conv1d, k_conv1d and v_conv1d, are the shards 0, 1 and 2 of
    the one `conv1d`; the other parameters have vLLM's names.

    ``forward(hidden_states, conv_state=None, ssm_state=None, query_start_loc=None, slots=None,
    has_initial_states=None, num_decodes=0)`` is that of `QwenGatedDeltaNetAttention`, with states
    [num_slots, 3 * num_heads * head_dim, width - 1] and [num_slots, num_heads, head_dim, head_dim], values before keys.

    Args:
        config: hidden_size and linear_attn_config, a dict with head_dim, num_heads, short_conv_kernel_size and, for a
            bounded gate gate_lower_bound; optionally rms_norm_eps, 1e-5 unless given.
        vllm_config, prefix: as in `QwenGatedDeltaNetAttention`.

    Examples:
        >>> from types import SimpleNamespace
        >>> sizes = {"head_dim": 16, "num_heads": 2, "short_conv_kernel_size": 4}
        >>> config = SimpleNamespace(hidden_size=64, linear_attn_config=sizes)  # or KimiLinearConfig of vLLM
        >>> KimiGatedDeltaNetAttention(config, vllm_config=None)(torch.randn(5, 64)).shape
        torch.Size([5, 64])
    """

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        refuse_quant_config(self, None if vllm_config is None else vllm_config.quant_config)
        self.config, self.hidden_size, self.prefix, self.activation = config, config.hidden_size, prefix, "silu"
        sizes = config.linear_attn_config
        self.num_heads, self.conv_size = sizes["num_heads"], sizes["short_conv_kernel_size"]
        self.head_dim = self.head_k_dim = self.head_v_dim = sizes["head_dim"]
        self.lower_bound = sizes.get("gate_lower_bound")
        whole, local = self.num_heads * self.head_dim, self._local(self.num_heads)
        self._widths = [local * self.head_dim] * 3
        self.state_shape = local, self.head_dim, self.head_dim

        def column(name: str, inputs: int, outputs: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(inputs, outputs, bias=False, prefix=f"{prefix}.{name}")

        def replicated(name: str) -> ReplicatedLinear:
            return ReplicatedLinear(self.hidden_size, self.head_dim, bias=False, prefix=f"{prefix}.{name}")

        self.q_proj, self.k_proj, self.v_proj = (
            column(f"{name}_proj", self.hidden_size, whole) for name in ("q", "k", "v")
        )
        self.conv1d = depthwise(
            MergedColumnParallelLinear(self.conv_size, [whole] * 3, bias=False, prefix=f"{prefix}.conv1d")
        )
        self.f_a_proj, self.g_a_proj = replicated("f_a_proj"), replicated("g_a_proj")
        self.f_b_proj, self.g_b_proj = (column(name, self.head_dim, whole) for name in ("f_b_proj", "g_b_proj"))
        self.b_proj = column("b_proj", self.hidden_size, self.num_heads)
        self.A_log = new_parameter((1, 1, local, 1), torch.float32, self._load_A_log)
        self.dt_bias = self._per_channel(torch.float32, whole)
        for parameter in (self.A_log, self.dt_bias):
            nn.init.ones_(parameter)
        epsilon = getattr(config, "rms_norm_eps", 1e-5)
        self.o_norm = RMSNormGated(self.head_dim, epsilon, None, True, activation="sigmoid")
        self.o_proj = RowParallelLinear(whole, self.hidden_size, bias=False, prefix=f"{prefix}.o_proj")

    def _load_A_log(self, param: Tensor, loaded_weight: Tensor) -> None:
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        copy_weight(self, param, loaded_weight, 2, rank * param.shape[2], ranks * param.shape[2])

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        qkv = [projection(hidden_states)[0] for projection in (self.q_proj, self.k_proj, self.v_proj)]
        gate, decays = (
            second(first(hidden_states)[0])[0]
            for first, second in ((self.g_a_proj, self.g_b_proj), (self.f_a_proj, self.f_b_proj))
        )
        return torch.cat(qkv, -1), gate, decays, self.b_proj(hidden_states)[0]

    def _heads(self, x: Tensor, rest: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """q, k, v and the logits of decays [num_tokens, heads, size]; logits of beta [num_tokens, heads]."""
        _, decays, beta = rest
        heads = (each.unflatten(-1, (-1, self.head_dim)) for each in (*x.split(self._widths, -1), decays))
        return *heads, beta

    def _gates(self) -> tuple[float, Tensor, Tensor, float | None]:
        """The scale and the parameters of the gate, as the ops take them."""
        return self.head_dim**-0.5, self.A_log.flatten(), self.dt_bias, self.lower_bound

    def _rule(
        self, ops: Ops, heads: list[Tensor], initial: Tensor | None, starts: Tensor, states: Tensor | None, o: Tensor
    ) -> None:
        ops.kda(*heads, *self._gates(), initial, starts, True, True, True, states, o=o)

    def _rule_step(self, ops: Ops, state: Tensor, heads: list[Tensor], slots: Tensor | None, o: Tensor) -> None:
        ops.kda_step(state, *heads, *self._gates(), None, slots, None, True, True, True, o=o)

    def _output(self, y: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        output: Tensor = self.o_proj(self._normed(self.o_norm, y, rest[0]))[0]
        return output
