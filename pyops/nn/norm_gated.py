"""RMS norms with gates, or of rows divided among ranks, as modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..ops.norm import rms_norm_gated
from .base import OpLayer, empty_like, rows
from .custom_op import CustomOp
from .parallel import (
    divide,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FusedRMSNormGated", "MiniMaxText01RMSNormTP", "Mixer2RMSNormGated", "RMSNormGated"]


@CustomOp.register("rms_norm_gated")
class RMSNormGated(OpLayer, op=rms_norm_gated):
    """RMS norm of rows or groups with an optional gate, in float32 and rounded once, see `pyops.rms_norm_gated`.

    ``forward(x, z=None)`` takes x [..., hidden_size] in float32, float16 or bfloat16 and a gate of its shape and dtype,
    and returns a new tensor.

    Args:
        hidden_size: elements of a row. The parameter `weight` [hidden_size] is initialised with ones.
        eps: added to the mean of squares.
        group_size: elements normalised together, a divisor of hidden_size; None for the whole row.
        norm_before_gate: gate the normalised row, not the input.
        device, dtype: device and dtype of the weight.
        activation: of the gate, "swish", "silu" or "sigmoid".

    Examples:
        >>> norm = RMSNormGated(64, eps=1e-6, norm_before_gate=True)
        >>> x, z = torch.randn(2, 5, 64)
        >>> expected = torch.nn.RMSNorm(64, eps=1e-6)(x) * torch.nn.functional.silu(z)
        >>> torch.testing.assert_close(norm(x, z), expected)
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        activation: str = "swish",
    ) -> None:
        super().__init__()
        if activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(f'RMSNormGated: activation: expected "swish", "silu" or "sigmoid", got {activation!r}')
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.activation = activation
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def compute(self, op: Callable[..., None], x: Tensor, z: Tensor | None = None) -> Tensor:
        out = empty_like(x)
        z = None if z is None else rows(z)
        how = self.group_size, self.norm_before_gate, self.activation
        op(out, rows(x), self.weight, self.eps, z, None, None, *how)
        return out


@CustomOp.register("mixer2_gated_rms_norm")
class Mixer2RMSNormGated(OpLayer, op=rms_norm_gated):
    """The gated norm of Mamba-2 mixers: RMS norm by groups of ``x * silu(gate)``, divided among ranks.

    ``forward(x, gate)`` takes both as [..., full_hidden_size / ranks], float32, float16 or bfloat16, and returns a new
    tensor. If no group is split among ranks, `pyops.rms_norm_gated` computes it in float32 and rounds once. A single
    group on several ranks all-reduces its sum of squares. Otherwise the groups are gathered.

    Args:
        full_hidden_size: elements of a row on all ranks together.
        full_n_groups: groups of such a row.
        use_rms_norm: whether there is a norm, with the parameter `weight` [full_hidden_size / ranks], initially ones.
        eps: added to the mean of squares.

    Examples:
        >>> norm = Mixer2RMSNormGated(64, 2, eps=1e-5)  # two groups of 32
        >>> x, gate = torch.randn(2, 5, 64)
        >>> norm(x, gate).shape
        torch.Size([5, 64])
    """

    def __init__(self, full_hidden_size: int, full_n_groups: int, use_rms_norm: bool = True, eps: float = 1e-6) -> None:
        super().__init__()
        self.tp_size, self.tp_rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        name = type(self).__name__
        self.full_hidden_size, self.n_groups = full_hidden_size, full_n_groups
        self.group_size = divide(name, "full_hidden_size", full_hidden_size, full_n_groups)
        self.per_rank_hidden_size = divide(name, "full_hidden_size", full_hidden_size, self.tp_size)
        self.variance_epsilon, self.use_rms_norm = eps, use_rms_norm
        weight = torch.ones(self.per_rank_hidden_size, dtype=torch.get_default_dtype())
        self.register_parameter("weight", nn.Parameter(weight) if use_rms_norm else None)

    def compute(self, op: Callable[..., None], x: Tensor, gate: Tensor) -> Tensor:
        if not self.use_rms_norm:
            return (x.float() * nn.functional.silu(gate.float())).to(x.dtype)
        if self.n_groups % self.tp_size:
            return self._across_ranks(x, gate)
        out = empty_like(x)
        op(out, rows(x), self.weight, self.variance_epsilon, rows(gate), None, None, self.group_size, False)
        return out

    def _across_ranks(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x.float() * nn.functional.silu(gate.float())
        if self.n_groups == 1:
            squares = tensor_model_parallel_all_reduce(y.square().sum(-1, keepdim=True))
            y = y * torch.rsqrt(squares / self.full_hidden_size + self.variance_epsilon)
        else:
            groups = tensor_model_parallel_all_gather(y).unflatten(-1, (self.n_groups, self.group_size))
            groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.variance_epsilon)
            y = groups.flatten(-2).chunk(self.tp_size, -1)[self.tp_rank]
        return (y * self.weight.float()).to(x.dtype)


def _rounded_once(
    op: Callable[..., None], x: Tensor, weight: Tensor | None, eps: float, z: Tensor | None = None, *how: Any
) -> Tensor:
    """`pyops.rms_norm_gated` as a new tensor of the dtype of x; the weight and the gate may have other dtypes."""
    if any(tensor is not None and tensor.dtype != x.dtype for tensor in (weight, z)):
        wide = (None if tensor is None else tensor.float() for tensor in (weight, z))
        weight, z = wide
        return _rounded_once(op, x.float(), weight, eps, z, *how).to(x.dtype)
    out = empty_like(x)
    op(out, rows(x), weight, eps, None if z is None else rows(z), None, None, *how)
    return out


@CustomOp.register("fused_rms_norm_gated")
class FusedRMSNormGated(OpLayer, op=rms_norm_gated):
    """RMS norm of rows times an activated gate, optionally of their sum with a residual, see `pyops.rms_norm_gated`.

    ``forward(x, g, residual=None, prenorm=False, residual_in_fp32=False)`` takes x and the gate g as [...,
    hidden_size], float32, float16 or bfloat16, and returns a new tensor of the dtype of x, computed in float32 and
    rounded once. A residual of the shape of x is added to it first. With `prenorm` the result is (norm, what was
    normalised), with the latter in the dtype of the residual; without a residual it is x, or x in float32 if
    `residual_in_fp32` is set.

    Args:
        hidden_size: elements of a row.
        elementwise_affine: whether there is the parameter `weight` [hidden_size], initially ones.
        eps: added to the mean of squares.
        activation: of the gate, "swish", "silu" or "sigmoid".
        device, dtype: device and dtype of the weight.

    Examples:
        >>> norm = FusedRMSNormGated(64, activation="sigmoid")
        >>> x, g, residual = torch.randn(3, 5, 64)
        >>> torch.testing.assert_close(norm(x, g), torch.nn.RMSNorm(64, eps=1e-5)(x) * torch.sigmoid(g))
        >>> x, residual = norm(x, g, residual, prenorm=True)
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(
                f'FusedRMSNormGated: activation: expected "swish", "silu" or "sigmoid", got {activation!r}'
            )
        self.hidden_size, self.elementwise_affine = hidden_size, elementwise_affine
        self.eps, self.activation = eps, activation
        weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", None)

    def compute(
        self,
        op: Callable[..., None],
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        total = x if residual is None else x.float() + residual.float()
        y = _rounded_once(op, total, self.weight, self.eps, g, None, True, self.activation).to(x.dtype)
        if not prenorm:
            return y
        if residual is not None:
            return y, total.to(residual.dtype)
        return y, x.float() if residual_in_fp32 else x


@CustomOp.register("minimax_text01_rmsnorm_tp")
class MiniMaxText01RMSNormTP(OpLayer, op=rms_norm_gated):
    """RMS norm of rows that are divided among ranks, in float32 and rounded once, see `pyops.rms_norm_gated`.

    ``forward(x)`` takes this rank's columns, [..., hidden_size / ranks], float32, float16 or bfloat16, and returns a
    new tensor. With several ranks, the mean squares are all-reduced over the tensor-parallel group.
    ``forward_qk(q_norm, k_norm, q, k)`` returns (q_norm(q), k_norm(k)) with one all-reduce for both.

    Args:
        hidden_size: elements of a row on all ranks together.
        eps: added to the mean of squares.
        weight_shard_world_size, weight_shard_rank: number of shards of the parameter `weight`, initially ones, and
            the index of this rank's shard, if several ranks hold the same heads. None for the world size and the
            rank.

    Examples:
        >>> q_norm, k_norm = MiniMaxText01RMSNormTP(64), MiniMaxText01RMSNormTP(32)
        >>> q, k = MiniMaxText01RMSNormTP.forward_qk(q_norm, k_norm, torch.randn(5, 64), torch.randn(5, 32))
        >>> q.shape, k.shape
        (torch.Size([5, 64]), torch.Size([5, 32]))
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        weight_shard_world_size: int | None = None,
        weight_shard_rank: int | None = None,
    ) -> None:
        super().__init__()
        self.tp_world, self.tp_rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.weight_shard_world = weight_shard_world_size or self.tp_world
        self.weight_shard_rank = self.tp_rank if weight_shard_rank is None else weight_shard_rank
        self.weight = nn.Parameter(
            torch.ones(
                divide(type(self).__name__, "hidden_size", hidden_size, self.weight_shard_world),
                dtype=torch.get_default_dtype(),
            )
        )
        shard = {"shard_world_size": self.weight_shard_world, "shard_rank": self.weight_shard_rank}
        self.weight.weight_loader = partial(self.weight_loader, **shard)
        self.variance_epsilon = eps

    @staticmethod
    def weight_loader(
        param: nn.Parameter,
        loaded_weight: Tensor,
        shard_world_size: int | None = None,
        shard_rank: int | None = None,
    ) -> None:
        """Copy this rank's shard of `loaded_weight` [hidden_size] to `param`."""
        ranks = get_tensor_model_parallel_world_size() if shard_world_size is None else shard_world_size
        rank = get_tensor_model_parallel_rank() if shard_rank is None else shard_rank
        param.data.copy_(loaded_weight.chunk(ranks)[rank])

    def compute(self, op: Callable[..., None], x: Tensor) -> Tensor:
        if self.tp_world == 1:
            return _rounded_once(op, x, self.weight, self.variance_epsilon)
        return self._scaled(x, self._mean_squares(x))

    @staticmethod
    def forward_qk(
        q_norm: MiniMaxText01RMSNormTP, k_norm: MiniMaxText01RMSNormTP, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(q_norm(q), k_norm(k)), with one all-reduce for both."""
        if q_norm.tp_world == 1:
            return q_norm(q), k_norm(k)
        means = q_norm._mean_squares(q, k)
        return q_norm._scaled(q, means[..., :1]), k_norm._scaled(k, means[..., 1:])

    def _mean_squares(self, *parts: Tensor) -> Tensor:
        """[..., parts]: the mean square, over all ranks, of each row of each part."""
        own = torch.cat([part.float().square().mean(-1, keepdim=True) for part in parts], -1)
        return tensor_model_parallel_all_reduce(own) / self.tp_world

    def _scaled(self, x: Tensor, mean_square: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(mean_square + self.variance_epsilon)
        return (y * self.weight.float()).to(x.dtype)
