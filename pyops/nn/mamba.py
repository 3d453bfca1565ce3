"""The mixer of Mamba models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .custom_op import CustomOp
from .linear import ColumnParallelLinear, RowParallelLinear
from .merged import MergedColumnParallelLinear
from .mixer import Mixer, Ops, Prompts, depthwise
from .norm import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MambaMixer"]


@CustomOp.register("mamba_mixer")
class MambaMixer(Mixer):
    """The mixer of Mamba: ``out_proj(scan(conv(x)) * silu(gate))`` for ``[x, gate] = in_proj(hidden_states)``.

    The convolution is causal, depthwise and followed by silu. The scan is `pyops.selective_scan_fwd`; its time steps, B
    and C are projections of its input (Gu and Dao 2023, arXiv:2312.00752). ``forward(hidden_states,
    conv_state=None, ssm_state=None, query_start_loc=None, state_indices_tensor=None, has_initial_states=None,
    num_decodes=0)`` takes:

    - hidden_states: [num_tokens, hidden_size], one sequence after another.
    - conv_state: [num_slots, intermediate_size / ranks, conv_kernel_size - 1] of the dtype of hidden_states, read and
      written: the last inputs of the convolution of each sequence, the newest last; None to keep none.
    - ssm_state: [num_slots, intermediate_size / ranks, ssm_state_size], of that dtype or float32, read and written; or
      None to keep none.
    - query_start_loc: [num_seqs + 1] integers, the first token of each sequence and num_tokens; None for one sequence.
    - state_indices_tensor: [num_seqs] integers, the slot of each sequence; None for slots 0, 1, 2, ... A sequence with
      a negative slot is padding: its states are not written, and its results are undefined.
    - has_initial_states: [num_seqs] bool, whether a sequence continues from its slot; None if none does.
    - num_decodes: the first num_decodes sequences have one token each and continue from their slots. They are computed
      by `pyops.causal_conv1d_decode` and `pyops.selective_state_update`, the others by `pyops.causal_conv1d_prefill`
      and the scan.

    It returns [num_tokens, hidden_size]. Both methods write the states. `forward_cuda` reads no lengths on the host.
    `forward_native` computes with the references of the ops, which read lengths.

    Args:
        hidden_size: elements of a hidden state.
        ssm_state_size: state elements per channel.
        conv_kernel_size: taps of the convolution, 2 to 8.
        intermediate_size: channels.
        time_step_rank: rank of the projection to time steps.
        use_conv_bias, use_bias: whether the convolution, and in_proj and out_proj, have a bias.
        use_rms_norm: whether time steps, B and C are normalised before use, as in Jamba and FalconMamba.
        rms_norm_has_weight, rms_norm_eps: whether these norms have weights, and their epsilon.
        activation: of the convolution, "silu".
        is_lora_enabled, model_config, cache_config: accepted because vLLM has them; caches are arguments of `forward`.
        prefix: the name of the layer in its model.

    Examples:
        >>> mixer = MambaMixer(64, 16, 4, 128, time_step_rank=4, use_conv_bias=True, use_bias=False, use_rms_norm=False)
        >>> states = torch.zeros(4, 128, 3), torch.zeros(4, 128, 16)  # in four slots
        >>> slots = torch.tensor([2], dtype=torch.int32)  # of one sequence
        >>> prompt = mixer(torch.randn(5, 64), *states, state_indices_tensor=slots)
        >>> mixer(torch.randn(1, 64), *states, state_indices_tensor=slots, num_decodes=1).shape
        torch.Size([1, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        ssm_state_size: int,
        conv_kernel_size: int,
        intermediate_size: int,
        time_step_rank: int,
        use_conv_bias: bool,
        use_bias: bool,
        use_rms_norm: bool,
        rms_norm_has_weight: bool = True,
        rms_norm_eps: float = 1e-5,
        activation: str = "silu",
        is_lora_enabled: bool = False,
        model_config: Any = None,
        cache_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size, self.ssm_state_size = hidden_size, intermediate_size, ssm_state_size
        self.conv_kernel_size, self.time_step_rank, self.activation = conv_kernel_size, time_step_rank, activation
        self.use_rms_norm, self.is_lora_enabled = use_rms_norm, is_lora_enabled
        self.model_config, self.cache_config, self.prefix = model_config, cache_config, prefix
        self.conv1d = depthwise(
            ColumnParallelLinear(conv_kernel_size, intermediate_size, bias=use_conv_bias, prefix=f"{prefix}.conv1d")
        )
        self.in_proj = MergedColumnParallelLinear(
            hidden_size, [intermediate_size] * 2, bias=use_bias, prefix=f"{prefix}.in_proj"
        )
        self.x_proj = RowParallelLinear(
            intermediate_size, time_step_rank + 2 * ssm_state_size, bias=False, prefix=f"{prefix}.x_proj"
        )
        # The scan adds the bias in float32.
        self.dt_proj = ColumnParallelLinear(
            time_step_rank, intermediate_size, bias=True, skip_bias_add=True, prefix=f"{prefix}.dt_proj"
        )
        self.A = self._decay(intermediate_size, ssm_state_size)
        self.D = self._per_channel(None, intermediate_size)
        nn.init.ones_(self.D)
        self.out_proj = RowParallelLinear(intermediate_size, hidden_size, bias=use_bias, prefix=f"{prefix}.out_proj")
        for name, size in (("dt", time_step_rank), ("b", ssm_state_size), ("c", ssm_state_size)):
            norm = RMSNorm(size, rms_norm_eps, has_weight=rms_norm_has_weight) if use_rms_norm else None
            setattr(self, f"{name}_layernorm", norm)
        self.state_shape = tuple(self.A.shape)

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return self.in_proj(hidden_states)[0].chunk(2, -1)  # type: ignore[no-any-return]

    def _parameters_of(self, x: Tensor) -> list[Tensor]:
        """Time steps before their bias is added, B and C."""
        sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
        time_step, B, C = self.x_proj(x)[0].split(sizes, -1)
        if self.use_rms_norm:
            time_step, B, C = self.dt_layernorm(time_step), self.b_layernorm(B), self.c_layernorm(C)
        return [self.dt_proj(time_step)[0], B, C]

    def _scan(
        self, ops: Ops, x: Tensor, rest: tuple[Tensor, ...], prompts: Prompts, ssm_state: Tensor | None
    ) -> Tensor:
        if ssm_state is None:
            num_seqs = len(prompts.starts) - 1
            ssm_state = torch.zeros(num_seqs, *self.state_shape, dtype=torch.float32, device=x.device)
            prompts = prompts._replace(slots=None, has_initial=None)
        # The scan op takes [channels, num_tokens].
        u, delta, B, C, gate = (rows.t().contiguous() for rows in (x, *self._parameters_of(x), *rest))
        bias = self.dt_proj.bias.float()
        sequences = prompts.starts, prompts.slots, prompts.has_initial
        ops.scan(u, delta, self.A, B[None], C[None], self.D.float(), gate, bias, True, *sequences, ssm_state, -1)
        return gate.t()

    def _step(self, ops: Ops, x: Tensor, rest: tuple[Tensor, ...], slots: Tensor | None, ssm_state: Tensor) -> Tensor:
        dt, B, C = self._parameters_of(x)
        out = torch.empty_like(x)
        ops.step(ssm_state, x, dt, self.A, B, C, self.D, *rest, self.dt_proj.bias, True, slots, out=out)
        return out

    def _output(self, y: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        output: Tensor = self.out_proj(y)[0]
        return output
