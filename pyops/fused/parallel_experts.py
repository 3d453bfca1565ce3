"""Expert parallelism: a mixture with its experts divided among the GPUs of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.errors import OpError
from ..ops.collective.expert_parallel import ExpertParallel
from ..ops.linear.gemm_problem import SCALE_BLOCK
from .expert_products import scale_is_of_all
from .experts import FusedMoEQuantConfig, experts_into

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["parallel_fused_experts"]


def parallel_fused_experts(
    parallel: ExpertParallel,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    quant_config: FusedMoEQuantConfig | None = None,
    most_tokens: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`fused_experts` for this rank's tokens with the experts of all ranks. Every rank must call it.

    Each rank's result for a token is rounded to the dtype of hidden_states; the sum over ranks is float32, in rank
    order, and rounded once.

    Args:
        parallel: created for the total number of experts, and the dtype and row size of hidden_states. If it has a
            quant_dtype, quant_config must have the same, and blocks of 128 x 128.
        hidden_states: [num_tokens, hidden_size], contiguous; the tokens of this rank, possibly none.
        w1, w2, activation, quant_config: as in `fused_experts`, for the experts of this rank. A per-tensor activation
            scale must be static (`a1_scale`), because a dynamic one would include rows without a token.
        topk_weights: [num_tokens, top_k] float32, contiguous.
        topk_ids: [num_tokens, top_k] int32 or int64, contiguous, indices among the experts of all ranks. Other ids add
            nothing.
        most_tokens: as in `ExpertParallel.dispatch`.
        out: [num_tokens, hidden_size], contiguous, written; None for a new tensor. It may be hidden_states.

    Returns:
        `out`.

    Examples:
        >>> from pyops.testing import ranks
        >>> def layer(rank):  # of two, each with 4 of the 8 experts
        ...     parallel = pyops.ExpertParallel(None, "cpu", num_experts=8, max_tokens=16, hidden_size=64, top_k=2)
        ...     w1, w2 = torch.randn(4, 2 * 64, 64).bfloat16(), torch.randn(4, 64, 64).bfloat16()
        ...     weights, ids = torch.randn(5, 8).softmax(-1).topk(2)
        ...     return pyops.parallel_fused_experts(parallel, torch.randn(5, 64).bfloat16(), w1, w2, weights, ids).shape
        >>> ranks(2).run(layer)  # on GPUs, a process calls it for each, with a group of torch.distributed
        [torch.Size([5, 64]), torch.Size([5, 64])]
    """
    if len(w1) != len(parallel.experts):
        expected = f"expected the {len(parallel.experts)} experts of this rank"
        raise OpError("parallel_fused_experts", "w1", f"{expected}, got {len(w1)}")
    if quant_config is not None and scale_is_of_all(quant_config) and quant_config.a1_scale is None:
        raise OpError(
            "parallel_fused_experts", "quant_config", "expected an a1_scale with one scale of all activations"
        )
    if parallel.quant_dtype is not None and not (quant_config and quant_config.block_shape == [SCALE_BLOCK] * 2):
        expected = f"expected blocks of {SCALE_BLOCK} x {SCALE_BLOCK} for rows of {parallel.quant_dtype}"
        raise OpError("parallel_fused_experts", "quant_config", f"{expected}, got {quant_config}")
    with parallel.naming("parallel_fused_experts"):
        sent = parallel.dispatch(hidden_states, topk_ids, topk_weights, most_tokens)
        call = sent.rows, sent.scales, w1, w2, sent.topk_weights, sent.topk_ids, activation
        experts_into(sent.results, *call, quant_config=quant_config)
        return parallel.combine(sent.results, out)
