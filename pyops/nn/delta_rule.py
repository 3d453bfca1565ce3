"""The gated delta rule for prefill, and the mixers of Qwen3-Next, Qwen3.5 and OLMo Hybrid."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..ops.mamba import gated_delta_rule
from .base import OpLayer
from .custom_op import CustomOp
from .linear import ColumnParallelLinear, RowParallelLinear, refuse_quant_config
from .merged import MergedColumnParallelLinear
from .mixer import Mixer, Ops, Prompts, depthwise
from .norm_gated import RMSNormGated
from .states import read_slots, write_slots

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ChunkGatedDeltaRule", "OlmoHybridGatedDeltaNetAttention", "QwenGatedDeltaNetAttention"]


@CustomOp.register("chunk_gated_delta_rule")
class ChunkGatedDeltaRule(OpLayer, op=gated_delta_rule):
    """Linear attention by the gated delta rule, for prefill, see `pyops.gated_delta_rule`.

    ``forward(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None, chunk_indices=None,
    chunk_offsets=None, use_qk_l2norm_in_kernel=True, core_attn_out=None)`` returns (o, final_state) for the scale
    ``key_size**-0.5``. States are [num_seqs, value_heads, value_size, key_size]; an initial state is float32, float16,
    bfloat16 or None, the final one float32 and None unless `output_final_state`. The outputs are a new tensor like v,
    or the first elements of `core_attn_out` if that is given, a contiguous tensor of the dtype of v. `chunk_indices`
    and `chunk_offsets` have no effect, because the kernel computes its chunks itself.

    Examples:
        >>> q, k, v = (torch.randn(1, 100, heads, 32) for heads in (2, 2, 4))
        >>> g, beta = -torch.rand(1, 100, 4), torch.rand(1, 100, 4)  # log decays, and how much a key is overwritten
        >>> o, state = ChunkGatedDeltaRule()(q, k, v, g, beta, None, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 4, 32]), torch.Size([1, 4, 32, 32]))
    """

    def __init__(self) -> None:
        super().__init__()

    def compute(
        self,
        op: Callable[..., Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        output_final_state: bool,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        chunk_offsets: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = True,
        core_attn_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        o = v.new_empty(v.shape) if core_attn_out is None else core_attn_out.view(-1)[: v.numel()].view(v.shape)
        final_state = None
        if output_final_state:
            num_seqs = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
            final_state = v.new_empty(num_seqs, v.shape[2], v.shape[3], q.shape[3], dtype=torch.float32)
        if initial_state is not None:
            initial_state = initial_state.contiguous()
        how = cu_seqlens, use_qk_l2norm_in_kernel, True, final_state
        op(q, k, v, g, beta, q.shape[3] ** -0.5, initial_state, *how, o=o)
        return o, final_state


class DeltaMixer(Mixer):
    """The base of mixers with the gated delta rule. `_project` returns (qkv, gate of the norm, b, a)."""

    largest_beta = 1.0

    def _make(self, config: Any, vllm_config: Any, prefix: str) -> None:
        """Set the sizes; create the convolution and the per-head parameters."""
        refuse_quant_config(self, None if vllm_config is None else vllm_config.quant_config)
        self.config, self.hidden_size, self.prefix = config, config.hidden_size, prefix
        self.num_k_heads, self.num_v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.head_k_dim, self.head_v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_dim, self.value_dim = self.head_k_dim * self.num_k_heads, self.head_v_dim * self.num_v_heads
        self.conv_kernel_size, self.activation = config.linear_conv_kernel_dim, config.hidden_act
        sizes = [self.key_dim, self.key_dim, self.value_dim]
        self.conv1d = depthwise(
            MergedColumnParallelLinear(self.conv_kernel_size, sizes, bias=False, prefix=f"{prefix}.conv1d")
        )
        self.A_log = self._per_channel(torch.float32, self.num_v_heads)
        self.dt_bias = self._per_channel(None, self.num_v_heads)
        for parameter in (self.A_log, self.dt_bias):
            nn.init.ones_(parameter)
        self.state_shape = len(self.A_log), self.head_v_dim, self.head_k_dim
        self._widths = [self._local(size) for size in sizes]

    def _heads(self, x: Tensor, rest: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """q, k, v [num_tokens, heads, size]; log decays and beta [num_tokens, heads]."""
        _, b, a = rest
        parts = x.split(self._widths, -1)
        sizes = self.head_k_dim, self.head_k_dim, self.head_v_dim
        decays = -self.A_log.exp() * nn.functional.softplus(a.float() + self.dt_bias.float())
        beta = (self.largest_beta * b.float().sigmoid()).to(b.dtype)
        return *(part.unflatten(-1, (-1, size)) for part, size in zip(parts, sizes, strict=True)), decays, beta

    def _scan(
        self, ops: Ops, x: Tensor, rest: tuple[Tensor, ...], prompts: Prompts, ssm_state: Tensor | None
    ) -> Tensor:
        heads = [each.unsqueeze(0) for each in self._heads(x, rest)]
        num_seqs, initial, states = len(prompts.starts) - 1, None, None
        if ssm_state is not None:
            states = torch.empty(num_seqs, *self.state_shape, dtype=torch.float32, device=x.device)
            if prompts.has_initial is not None:
                initial = read_slots(ssm_state, num_seqs, prompts.slots, prompts.has_initial)
        o = torch.empty_like(heads[2], memory_format=torch.contiguous_format)
        self._rule(ops, heads, initial, prompts.starts, states, o)
        if ssm_state is not None and states is not None:
            write_slots(ssm_state, states, prompts.starts, prompts.slots)
        return o[0].flatten(1)

    def _step(self, ops: Ops, x: Tensor, rest: tuple[Tensor, ...], slots: Tensor | None, ssm_state: Tensor) -> Tensor:
        heads = [each.unsqueeze(1) for each in self._heads(x, rest)]
        o = torch.empty_like(heads[2], memory_format=torch.contiguous_format)
        self._rule_step(ops, ssm_state, heads, slots, o)
        return o[:, 0].flatten(1)

    def _rule(
        self, ops: Ops, heads: list[Tensor], initial: Tensor | None, starts: Tensor, states: Tensor | None, o: Tensor
    ) -> None:
        """The rule for prompts, by the tensors of `_heads`."""
        ops.delta_rule(*heads, self.head_k_dim**-0.5, initial, starts, True, True, states, o=o)

    def _rule_step(self, ops: Ops, state: Tensor, heads: list[Tensor], slots: Tensor | None, o: Tensor) -> None:
        """The rule for one token of each sequence."""
        ops.delta_rule_step(state, *heads, self.head_k_dim**-0.5, None, slots, None, True, True, o=o)

    def _normed(self, norm: nn.Module, y: Tensor, gate: Tensor) -> Tensor:
        """The outputs of the heads, with the gated norm of each head."""
        result: Tensor = norm(*(each.unflatten(-1, (-1, self.head_v_dim)).contiguous() for each in (y, gate)))
        return result.flatten(1)


@CustomOp.register("qwen_gated_delta_net_attention")
class QwenGatedDeltaNetAttention(DeltaMixer):
    """The linear attention of Qwen3-Next and Qwen3.5: ``out_proj(norm(rule(silu(conv(qkv))), z))``.

    For ``[q, k, v, z] = in_proj_qkvz(x)`` and ``[b, a] = in_proj_ba(x)``, beta is ``sigmoid(b)`` and the logarithm of
    the decay is ``-exp(A_log) * softplus(a + dt_bias)``. The rule is `pyops.gated_delta_rule` of normalised q and k
    (Yang et al. 2024, arXiv:2412.06464), the norm is `RMSNormGated` of each head. ``forward(hidden_states,
    conv_state=None, ssm_state=None, query_start_loc=None, state_indices_tensor=None, has_initial_states=None,
    num_decodes=0)`` takes the arguments of `MambaMixer.forward` and returns [num_tokens, hidden_size]. The states have
    other shapes:

    - conv_state: [num_slots, (2 * key_dim + value_dim) / ranks, conv_kernel_size - 1].
    - ssm_state: [num_slots, value_heads / ranks, value_size, key_size], in float32 or the dtype of hidden_states.

    Decodes use `pyops.causal_conv1d_decode` and `pyops.gated_delta_rule_update`, other sequences
    `pyops.causal_conv1d_prefill`. Ranks divide the heads.

    Args:
        config: has hidden_size, hidden_act, rms_norm_eps, linear_num_key_heads, linear_num_value_heads,
            linear_key_head_dim, linear_value_head_dim, linear_conv_kernel_dim, and perhaps output_gate_type ("silu",
            "swish" or "sigmoid").
        vllm_config: its quant_config must be None; or None.
        prefix: the name of the layer in its model.
        gqa_interleaved_layout: whether rows of in_proj_qkvz and in_proj_ba are sorted by key head (q, k, and the v and
            z of the head's value heads), as in checkpoints of Qwen3-Next; otherwise all q come first, then k, v and z.

    Examples:
        >>> from types import SimpleNamespace
        >>> heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
        >>> sizes = {"hidden_size": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
        >>> config = SimpleNamespace(hidden_act="silu", rms_norm_eps=1e-6, **heads, **sizes)  # or Qwen3NextConfig
        >>> QwenGatedDeltaNetAttention(config, vllm_config=None)(torch.randn(5, 64)).shape
        torch.Size([5, 64])
    """

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "", gqa_interleaved_layout: bool = False) -> None:
        super().__init__()
        self._make(config, vllm_config, prefix)
        self.gqa_interleaved_layout = gqa_interleaved_layout
        qkvz, ba = [self.key_dim, self.key_dim, self.value_dim, self.value_dim], [self.num_v_heads] * 2
        if gqa_interleaved_layout:
            qkvz, ba = [sum(qkvz)], [sum(ba)]
        self.in_proj_qkvz, self.in_proj_ba = (
            MergedColumnParallelLinear(self.hidden_size, sizes, bias=False, prefix=f"{prefix}.{name}")
            for sizes, name in ((qkvz, "in_proj_qkvz"), (ba, "in_proj_ba"))
        )
        gate = getattr(config, "output_gate_type", "silu")
        self.norm = RMSNormGated(self.head_v_dim, config.rms_norm_eps, None, True, activation=gate)
        self.out_proj = RowParallelLinear(self.value_dim, self.hidden_size, bias=False, prefix=f"{prefix}.out_proj")

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        qkvz, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
        if not self.gqa_interleaved_layout:
            qkv, z = qkvz.split([sum(self._widths), self._widths[2]], -1)
            b, a = ba.chunk(2, -1)
            return qkv, z, b, a
        key_heads, group = self._widths[0] // self.head_k_dim, self.num_v_heads // self.num_k_heads
        sizes = [self.head_k_dim, self.head_k_dim, group * self.head_v_dim, group * self.head_v_dim]
        *qkv_of_heads, z = (part.flatten(1) for part in qkvz.unflatten(-1, (key_heads, -1)).split(sizes, -1))
        b, a = (part.flatten(1) for part in ba.unflatten(-1, (key_heads, -1)).chunk(2, -1))
        return torch.cat(qkv_of_heads, -1), z, b, a

    def _output(self, y: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        output: Tensor = self.out_proj(self._normed(self.norm, y, rest[0]))[0]
        return output


@CustomOp.register("olmo_hybrid_gated_delta_net_attention")
class OlmoHybridGatedDeltaNetAttention(DeltaMixer):
    """The linear attention of OLMo Hybrid: `QwenGatedDeltaNetAttention` with other projections and a beta of up to 2.

    ``[q, k, v, gate] = in_proj_qkvg(x)``, ``b = b_proj(x)``, ``a = a_proj(x)``; with `linear_allow_neg_eigval` beta is
    ``2 * sigmoid(b)``. The norm is o_norm with an epsilon of 1e-5, the output projection o_proj; prefill uses
    `pyops.gated_delta_rule`, decodes `pyops.gated_delta_rule_update`.

    Args:
        config: as in `QwenGatedDeltaNetAttention`, optionally with linear_allow_neg_eigval; linear_use_gate must not be
            False.
        vllm_config, prefix: as in `QwenGatedDeltaNetAttention`.

    Examples:
        >>> from types import SimpleNamespace
        >>> heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
        >>> sizes = {"hidden_size": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
        >>> config = SimpleNamespace(hidden_act="silu", **heads, **sizes)
        >>> OlmoHybridGatedDeltaNetAttention(config, vllm_config=None)(torch.randn(5, 64)).shape
        torch.Size([5, 64])
    """

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        if not getattr(config, "linear_use_gate", True):
            raise ValueError("OlmoHybridGatedDeltaNetAttention: config: expected linear_use_gate, got False")
        self._make(config, vllm_config, prefix)
        self.largest_beta = 2.0 if getattr(config, "linear_allow_neg_eigval", False) else 1.0
        sizes = [self.key_dim, self.key_dim, self.value_dim, self.value_dim]
        self.in_proj_qkvg = MergedColumnParallelLinear(
            self.hidden_size, sizes, bias=False, prefix=f"{prefix}.in_proj_qkvg"
        )
        self.b_proj, self.a_proj = (
            ColumnParallelLinear(self.hidden_size, self.num_v_heads, bias=False, prefix=f"{prefix}.{name}")
            for name in ("b_proj", "a_proj")
        )
        self.o_norm = RMSNormGated(self.head_v_dim, 1e-5, None, True)
        self.o_proj = RowParallelLinear(self.value_dim, self.hidden_size, bias=False, prefix=f"{prefix}.o_proj")

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        qkv, gate = self.in_proj_qkvg(hidden_states)[0].split([sum(self._widths), self._widths[2]], -1)
        return qkv, gate, self.b_proj(hidden_states)[0], self.a_proj(hidden_states)[0]

    def _output(self, y: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        output: Tensor = self.o_proj(self._normed(self.o_norm, y, rest[0]))[0]
        return output
