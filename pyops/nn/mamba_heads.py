"""The mixers of Mamba-2 and PLaMo-2 models. Their scans have one decay per head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from .custom_op import CustomOp
from .linear import ColumnParallelLinear, RowParallelLinear, ranks, refuse_quant_config
from .merged import MergedColumnParallelLinear
from .mixer import Mixer, Ops, Prompts, depthwise
from .norm import RMSNorm
from .norm_gated import Mixer2RMSNormGated
from .parallel import divide
from .states import read_slots, write_slots

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MambaMixer2", "Plamo2MambaMixer"]

_CHUNK_SIZE = 256  # tokens per chunk of the scan, as in Mamba-2's training; it affects only rounding


class _Heads(NamedTuple):
    """The per-token arguments of a scan with heads."""

    x: Tensor
    """[num_tokens, heads, head_dim]"""
    dt: Tensor
    """[num_tokens, heads]"""
    B: Tensor
    """[num_tokens, groups, ssm_state_size]"""
    C: Tensor
    z: Tensor | None
    """As x: the gate of the scan."""


class _HeadMixer(Mixer):
    """The base of mixers with one decay per head. A subclass defines `_heads`."""

    chunk_size = _CHUNK_SIZE

    def _make_heads(self, num_heads: int, head_dim: int, ssm_state_size: int) -> None:
        """Create the per-head parameters."""
        self.A = self._decay(num_heads)
        self.D, self.dt_bias = (self._per_channel(None, num_heads) for _ in range(2))
        for parameter in (self.D, self.dt_bias):
            nn.init.ones_(parameter)
        self.state_shape = len(self.A), head_dim, ssm_state_size

    def _heads(self, x: Tensor, rest: tuple[Tensor, ...]) -> _Heads:
        """The arguments of the scan, from the result `x` of the convolution."""
        raise NotImplementedError

    def _scan(
        self, ops: Ops, x: Tensor, rest: tuple[Tensor, ...], prompts: Prompts, ssm_state: Tensor | None
    ) -> Tensor:
        heads = self._heads(x, rest)
        num_seqs = len(prompts.starts) - 1
        initial = None
        if ssm_state is not None and prompts.has_initial is not None:
            initial = read_slots(ssm_state, num_seqs, prompts.slots, prompts.has_initial)
        dtype = torch.float32 if ssm_state is None else ssm_state.dtype
        states = torch.empty(num_seqs, *self.state_shape, dtype=dtype, device=x.device)
        out = torch.empty_like(heads.x, memory_format=torch.contiguous_format)
        bounds, last, sequence = _chunks(prompts.starts, len(x), self.chunk_size)
        ops.scan_chunks(
            *(heads.x, heads.dt, self.A, heads.B, heads.C),
            *(self.chunk_size, prompts.starts, bounds, last, sequence, out, self.D, heads.z, self.dt_bias, initial),
            dt_softplus=True,
            states=states,
        )
        if ssm_state is not None:
            write_slots(ssm_state, states, prompts.starts, prompts.slots)
        return out.flatten(1)

    def _step(self, ops: Ops, x: Tensor, rest: tuple[Tensor, ...], slots: Tensor | None, ssm_state: Tensor) -> Tensor:
        heads = self._heads(x, rest)
        out = torch.empty_like(heads.x, memory_format=torch.contiguous_format)
        dt = heads.dt[..., None].expand_as(heads.x)
        A = self.A[:, None, None].expand(self.state_shape)
        D, bias = (row[:, None].expand(self.state_shape[:2]) for row in (self.D, self.dt_bias))
        ops.step(ssm_state, heads.x, dt, A, heads.B, heads.C, D, heads.z, bias, True, slots, out=out)
        return out.flatten(1)


@CustomOp.register("mamba_mixer2")
class MambaMixer2(_HeadMixer):
    """The mixer of Mamba-2: ``out_proj(norm(scan(conv(xBC)), gate))`` for ``[gate, xBC, dt] = in_proj(hidden_states)``.

    The convolution is causal, depthwise and followed by silu; its results are x, B and C of the scan, which is
    `pyops.mamba_chunk_scan_varlen` (Dao and Gu 2024, arXiv:2405.21060). The norm is `Mixer2RMSNormGated`.
    ``forward(hidden_states, conv_state=None, ssm_state=None, query_start_loc=None, state_indices_tensor=None,
    has_initial_states=None, num_decodes=0)`` takes the arguments of `MambaMixer.forward` and returns
    [num_tokens, hidden_size]. The states have other shapes:

    - conv_state: [num_slots, channels, conv_kernel_size - 1] for ``channels = intermediate_size / ranks + 2 * groups *
      ssm_state_size``, where groups are those of this rank.
    - ssm_state: [num_slots, num_heads / ranks, head_dim, ssm_state_size].

    Decodes use `pyops.causal_conv1d_decode` and `pyops.selective_state_update`, other sequences
    `pyops.causal_conv1d_prefill`. Ranks divide the heads and their groups; where there are more ranks than groups,
    ranks share a group.

    Args:
        hidden_size: elements of a hidden state.
        ssm_state_size: states of an element of a head.
        conv_kernel_size: taps of the convolution, 2 to 8.
        intermediate_size: ``num_heads * head_dim``.
        use_conv_bias, use_bias: whether the convolution, and in_proj and out_proj, have a bias.
        n_groups: groups of heads that share B and C, and groups of the norm.
        num_heads, head_dim: heads and their elements.
        rms_norm_eps, use_rms_norm: of the norm; without it, results are gated only.
        activation: of the convolution, "silu".
        model_config, cache_config: accepted because vLLM has them; caches are arguments of `forward`.
        quant_config: None; weights are not quantised here.
        prefix: the name of the layer in its model.

    Examples:
        >>> mixer = MambaMixer2(64, 16, 4, 128, use_conv_bias=True, use_bias=False, num_heads=8, head_dim=16)
        >>> states = torch.zeros(4, 128 + 2 * 16, 3), torch.zeros(4, 8, 16, 16)  # in four slots
        >>> prompt = mixer(torch.randn(5, 64), *states)
        >>> mixer(torch.randn(1, 64), *states, num_decodes=1).shape
        torch.Size([1, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        ssm_state_size: int,
        conv_kernel_size: int,
        intermediate_size: int,
        use_conv_bias: bool,
        use_bias: bool,
        n_groups: int = 1,
        num_heads: int = 128,
        head_dim: int = 64,
        rms_norm_eps: float = 1e-5,
        activation: str = "silu",
        use_rms_norm: bool = True,
        model_config: Any = None,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        refuse_quant_config(self, quant_config)
        if intermediate_size != num_heads * head_dim:
            raise ValueError(
                f"MambaMixer2: intermediate_size: expected num_heads * head_dim = {num_heads * head_dim}, got "
                f"{intermediate_size}"
            )
        divide("MambaMixer2", "num_heads", num_heads, n_groups)
        self.hidden_size, self.intermediate_size, self.ssm_state_size = hidden_size, intermediate_size, ssm_state_size
        self.conv_kernel_size, self.activation, self.use_rms_norm = conv_kernel_size, activation, use_rms_norm
        self.num_heads, self.head_dim, self.n_groups = num_heads, head_dim, n_groups
        self.model_config, self.cache_config, self.prefix = model_config, cache_config, prefix
        groups = n_groups * ssm_state_size
        conv_sizes = [intermediate_size, groups, groups]
        self.conv1d = depthwise(
            _GroupedColumns(conv_kernel_size, conv_sizes, (1, 2), n_groups, use_conv_bias, f"{prefix}.conv1d")
        )
        sizes = [intermediate_size, *conv_sizes, num_heads]
        self.in_proj = _GroupedColumns(hidden_size, sizes, (2, 3), n_groups, use_bias, f"{prefix}.in_proj")
        self._make_heads(num_heads, head_dim, ssm_state_size)
        self.norm = Mixer2RMSNormGated(intermediate_size, n_groups, use_rms_norm, rms_norm_eps)
        if use_rms_norm:
            self.norm.weight.weight_loader = self._load_part
        self.out_proj = RowParallelLinear(intermediate_size, hidden_size, bias=use_bias, prefix=f"{prefix}.out_proj")

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        gate, *inputs, dt = self.in_proj.output_partition_sizes
        gates, x, steps = self.in_proj(hidden_states)[0].split([gate, sum(inputs), dt], -1)
        return x, steps, gates

    def _heads(self, x: Tensor, rest: tuple[Tensor, ...]) -> _Heads:
        values, B, C = x.split(self.conv1d.output_partition_sizes, -1)
        B, C = (each.unflatten(-1, (-1, self.ssm_state_size)) for each in (B, C))
        return _Heads(values.unflatten(-1, (-1, self.head_dim)), rest[0], B, C, None)

    def _output(self, y: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        output: Tensor = self.out_proj(self.norm(y, rest[1]))[0]
        return output


@CustomOp.register("plamo2_mamba_mixer")
class Plamo2MambaMixer(_HeadMixer):
    """The mixer of PLaMo-2: ``out_proj(scan(conv(x)) * silu(gate))`` for ``[gate, x] = in_proj(hidden_states)``.

    The convolution is causal, depthwise and followed by silu. The scan is `pyops.mamba_chunk_scan_varlen`, with one
    group; its B, C and time steps are projections of its input, each after an RMS norm. ``forward(hidden_states,
    conv_state=None, ssm_state=None, query_start_loc=None, state_indices_tensor=None, has_initial_states=None,
    num_decodes=0)`` takes the arguments of `MambaMixer.forward` and returns [num_tokens, hidden_size]. The states have
    other shapes; channels are ``mamba_num_heads * hidden_size_per_head``:

    - conv_state: [num_slots, channels / ranks, mamba_d_conv - 1].
    - ssm_state: [num_slots, mamba_num_heads / ranks, hidden_size_per_head, mamba_d_state].

    Decodes use `pyops.causal_conv1d_decode` and `pyops.selective_state_update`, other sequences
    `pyops.causal_conv1d_prefill`. The rows of in_proj are all gates, then all x; checkpoints have them head by head.

    Args:
        vllm_config: `model_config.hf_config` has `hidden_size`, `mamba_d_state`, `mamba_d_conv`, `mamba_num_heads`,
            `hidden_size_per_head`, `rms_norm_eps` and `mamba_chunk_size`; `quant_config` is None. `cache_config` is
            not read.
        prefix: the name of the layer in its model.
        kwargs: accepted because vLLM has them.

    Examples:
        >>> from types import SimpleNamespace as Some
        >>> heads = {"mamba_num_heads": 8, "hidden_size_per_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4}
        >>> config = Some(hidden_size=64, rms_norm_eps=1e-6, mamba_chunk_size=256, **heads)
        >>> vllm_config = Some(model_config=Some(hf_config=config), cache_config=None, quant_config=None)
        >>> Plamo2MambaMixer(vllm_config)(torch.randn(5, 64)).shape
        torch.Size([5, 64])
    """

    def __init__(self, vllm_config: Any, *, prefix: str = "", **kwargs: Any) -> None:
        super().__init__()
        self.model_config, self.cache_config = vllm_config.model_config, vllm_config.cache_config
        refuse_quant_config(self, vllm_config.quant_config)
        self.config = config = self.model_config.hf_config
        self.hidden_size, self.ssm_state_size = config.hidden_size, config.mamba_d_state
        self.num_heads, self.head_dim = config.mamba_num_heads, config.hidden_size_per_head
        self.conv_kernel_size, self.chunk_size = config.mamba_d_conv, config.mamba_chunk_size
        self.intermediate_size = channels = self.num_heads * self.head_dim
        self.time_step_rank = max(64, self.hidden_size // 16)
        self.activation, self.prefix = "silu", prefix
        options = {"bias": False, "return_bias": False}
        self.conv1d = depthwise(
            ColumnParallelLinear(self.conv_kernel_size, channels, prefix=f"{prefix}.conv1d", **options)
        )
        self.in_proj = MergedColumnParallelLinear(
            self.hidden_size, [channels] * 2, prefix=f"{prefix}.in_proj", **options
        )
        self.bcdt_proj = RowParallelLinear(
            channels, self.time_step_rank + 2 * self.ssm_state_size, prefix=f"{prefix}.bcdt_proj", **options
        )
        self.dt_proj = ColumnParallelLinear(self.time_step_rank, self.num_heads, prefix=f"{prefix}.dt_proj", **options)
        self._make_heads(self.num_heads, self.head_dim, self.ssm_state_size)
        self.out_proj = RowParallelLinear(channels, self.hidden_size, prefix=f"{prefix}.out_proj", **options)
        self.dt_norm = RMSNorm(self.time_step_rank, config.rms_norm_eps)
        self.B_norm, self.C_norm = (RMSNorm(self.ssm_state_size, config.rms_norm_eps) for _ in range(2))

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        gate, x = self.in_proj(hidden_states).chunk(2, -1)
        return x, gate

    def _heads(self, x: Tensor, rest: tuple[Tensor, ...]) -> _Heads:
        sizes = [self.ssm_state_size, self.ssm_state_size, self.time_step_rank]
        B, C, time_step = self.bcdt_proj(x).split(sizes, -1)
        B, C = (norm(each).unsqueeze(1) for norm, each in ((self.B_norm, B), (self.C_norm, C)))
        values, gate = (each.unflatten(-1, (-1, self.head_dim)) for each in (x, rest[0]))
        return _Heads(values, self.dt_proj(self.dt_norm(time_step)), B, C, gate)

    def _output(self, y: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        output: Tensor = self.out_proj(y)
        return output


class _GroupedColumns(MergedColumnParallelLinear):
    """Merged projections. Some of them have one output per group of heads; ranks share a group if groups are fewer.

    Args:
        input_size: columns of each weight.
        output_sizes: rows of each weight.
        grouped: the indices of projections to groups.
        n_groups: groups of such a projection.
    """

    def __init__(
        self, input_size: int, output_sizes: list[int], grouped: tuple[int, ...], n_groups: int, bias: bool, prefix: str
    ) -> None:
        size = ranks(disable_tp=False)
        self.grouped = grouped
        if n_groups < size:
            self.replicas = divide("MambaMixer2", "ranks of n_groups", size, n_groups)
        else:
            divide("MambaMixer2", "n_groups", n_groups, size)
            self.replicas = 1
        # The base class counts a group that several ranks share once for each of these ranks.
        sizes = [rows * self.replicas if index in grouped else rows for index, rows in enumerate(output_sizes)]
        super().__init__(input_size, sizes, bias, prefix=prefix)
        self.output_sizes = output_sizes

    def _shard(self, index: int) -> tuple[int, int, int]:
        first, rows, rank = super()._shard(index)
        return first, rows, rank // self.replicas if index in self.grouped else rank


def _chunks(starts: Tensor, num_tokens: int, chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(start of each chunk and end of the last, last chunk of each sequence, sequence of each chunk).

    A sequence has at least one chunk. The number of chunks depends only on shapes, so the last sequence ends with some
    empty chunks.
    """
    num_seqs = len(starts) - 1
    counts = ((starts.diff() + chunk_size - 1) // chunk_size).clamp(min=1)
    ends = counts.cumsum(0, dtype=torch.int32)
    chunk = torch.arange(num_tokens // chunk_size + num_seqs, dtype=torch.int32, device=starts.device)
    sequence = torch.searchsorted(ends, chunk, right=True, out_int32=True).clamp(max=num_seqs - 1)
    first = starts[sequence] + (chunk - (ends - counts)[sequence]) * chunk_size
    return torch.cat((torch.minimum(first, starts[sequence + 1]), starts[-1:])).int(), ends - 1, sequence
