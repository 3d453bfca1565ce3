"""Manifold-constrained hyper-connections as modules: a residual of several streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..ops.norm import hc_head, mhc_fused_post_pre, mhc_post, mhc_pre
from .base import OpLayer, empty_like
from .custom_op import CustomOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HCHeadOp", "MHCFusedPostPreOp", "MHCPostOp", "MHCPreOp"]


def _flat(x: Tensor, dims: int) -> Tensor:
    """`x` with one leading dimension before its last `dims`, the last stride 1."""
    return (x if x.stride(-1) == 1 else x.contiguous()).flatten(0, -dims - 1)


def _coefficients(residual: Tensor, suffix: str = "") -> dict[str, Tensor]:
    """New outputs of `mhc_pre` for streams [num_tokens, n, hidden_size]."""
    num_tokens, n, hidden_size = residual.shape
    return {
        "post_mix" + suffix: residual.new_empty(num_tokens, n, 1, dtype=torch.float32),
        "comb_mix" + suffix: residual.new_empty(num_tokens, n, n, dtype=torch.float32),
        "layer_input" + suffix: residual.new_empty(num_tokens, hidden_size),
    }


def _views(outputs: dict[str, Tensor], leading: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(each.view(*leading, *each.shape[1:]) for each in outputs.values())


@CustomOp.register("mhc_pre")
class MHCPreOp(OpLayer, op=mhc_pre):
    """The coefficients of hyper-connections and the input of a layer, see `pyops.mhc_pre`.

    ``forward`` has the arguments of the op and `n_splits`, which has no effect. It takes residual [..., n, hidden_size]
    and returns (post_mix [..., n, 1], comb_mix [..., n, n], layer_input [..., hidden_size]).

    Examples:
        >>> fn, scale, base = torch.zeros(24, 64), torch.ones(3), torch.zeros(24)
        >>> post, comb, x = MHCPreOp()(torch.ones(5, 4, 16), fn, scale, base, 1e-6, 0.0, 0.0, 2.0, 20)
        >>> post.shape, comb.shape, x.shape
        (torch.Size([5, 4, 1]), torch.Size([5, 4, 4]), torch.Size([5, 16]))
    """

    def compute(
        self,
        op: Callable[..., None],
        residual: Tensor,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float,
        sinkhorn_repeat: int,
        n_splits: int = 1,
        norm_weight: Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> Any:
        streams = _flat(residual, 2)
        outputs = _coefficients(streams)
        numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
        op(streams, fn, hc_scale, hc_base, *numbers, norm_weight, norm_eps, **outputs)
        return _views(outputs, residual.shape[:-2])


@CustomOp.register("mhc_post")
class MHCPostOp(OpLayer, op=mhc_post):
    """The streams of hyper-connections after a layer, see `pyops.mhc_post`.

    ``forward(x, residual, post_layer_mix, comb_res_mix)`` takes x [..., hidden_size] and residual [..., n, hidden_size]
    and returns new streams.

    Examples:
        >>> post, comb = torch.ones(5, 4, 1), torch.eye(4).expand(5, 4, 4)
        >>> streams = MHCPostOp()(torch.ones(5, 16), torch.zeros(5, 4, 16), post, comb)
        >>> assert torch.equal(streams, torch.ones(5, 4, 16))
    """

    def compute(
        self, op: Callable[..., None], x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor
    ) -> Any:
        out = empty_like(residual)
        mixes = _flat(post_layer_mix, 2).contiguous(), _flat(comb_res_mix, 2)
        op(_flat(x, 1), _flat(residual, 2), *mixes, out=out.flatten(0, -3))
        return out


@CustomOp.register("mhc_fused_post_pre")
class MHCFusedPostPreOp(OpLayer, op=mhc_fused_post_pre):
    """`MHCPostOp` and the next `MHCPreOp`, see `pyops.mhc_fused_post_pre`.

    ``forward`` has the arguments of the op, and `n_splits` and `tile_n`, which have no effect. It returns the streams
    and what `MHCPreOp` returns for them.

    Examples:
        >>> layer = torch.ones(5, 16), torch.zeros(5, 4, 16), torch.ones(5, 4, 1), torch.eye(4).expand(5, 4, 4)
        >>> fn, scale, base = torch.zeros(24, 64), torch.ones(3), torch.zeros(24)
        >>> streams, post, comb, x = MHCFusedPostPreOp()(*layer, fn, scale, base, 1e-6, 0.0, 0.0, 2.0, 20)
        >>> assert torch.equal(streams, torch.ones(5, 4, 16))
    """

    def compute(
        self,
        op: Callable[..., None],
        x: Tensor,
        residual: Tensor,
        post_layer_mix: Tensor,
        comb_res_mix: Tensor,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float,
        sinkhorn_repeat: int,
        n_splits: int = 1,
        tile_n: int = 1,
        norm_weight: Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> Any:
        streams = _flat(residual, 2)
        outputs = {"residual_cur": empty_like(streams), **_coefficients(streams, "_cur")}
        numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
        mixes = _flat(post_layer_mix, 2).contiguous(), _flat(comb_res_mix, 2)
        op(_flat(x, 1), streams, *mixes, fn, hc_scale, hc_base, *numbers, norm_weight, norm_eps, **outputs)
        return _views(outputs, residual.shape[:-2])


@CustomOp.register("hc_head")
class HCHeadOp(OpLayer, op=hc_head):
    """The streams of hyper-connections after the last layer as one, see `pyops.hc_head`.

    ``forward(hidden_states, hc_fn, hc_scale, hc_base, rms_norm_eps, hc_eps)`` takes hidden_states [..., n, hidden_size]
    and returns [..., hidden_size].

    Examples:
        >>> fn, scale, base = torch.zeros(4, 64), torch.ones(1), torch.zeros(4)
        >>> x = HCHeadOp()(torch.ones(5, 4, 16), fn, scale, base, 1e-6, 0.0)
        >>> assert torch.equal(x, torch.full((5, 16), 2.0))
    """

    def compute(
        self,
        op: Callable[..., None],
        hidden_states: Tensor,
        hc_fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_norm_eps: float,
        hc_eps: float,
    ) -> Any:
        streams = _flat(hidden_states, 2)
        out = streams.new_empty(streams.shape[0], streams.shape[2])
        op(streams, hc_fn, hc_scale, hc_base, rms_norm_eps, hc_eps, out=out)
        return out.view(*hidden_states.shape[:-2], -1)
