"""Logits of hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from .custom_op import CustomOp
from .embedding import ParallelLMHead
from .parallel import tensor_model_parallel_all_gather

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LogitsProcessor"]


@CustomOp.register("logits_processor")
class LogitsProcessor(CustomOp):
    """Logits of hidden states, gathered from all ranks, capped and scaled.

    ``forward(lm_head, hidden_states, embedding_bias=None)`` takes [..., hidden_size] and returns [..., org_vocab_size]
    on every rank: ``l = hidden_states W^T + b`` without the padding of the vocabulary, then ``cap * tanh(l / cap)``,
    then ``l * scale``. The result does not depend on the platform or the configuration of custom ops.

    Args:
        vocab_size: tokens of the vocabulary.
        org_vocab_size: tokens that have logits, the first of the vocabulary; None for all.
        scale: multiplies the logits, after the cap.
        logits_as_input: whether `hidden_states` are already the logits.
        soft_cap: bound of the magnitude of logits; None for no cap.

    Examples:
        >>> head, processor = ParallelLMHead(1000, 64), LogitsProcessor(1000, soft_cap=30.0)
        >>> head.weight.weight_loader(head.weight, torch.randn(1000, 64))
        >>> logits = processor(head, torch.randn(3, 64))
        >>> logits.shape, bool((logits.abs() <= 30.0).all())
        (torch.Size([3, 1000]), True)
    """

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        scale: float = 1.0,
        logits_as_input: bool = False,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size, self.org_vocab_size = vocab_size, org_vocab_size or vocab_size
        self.scale, self.logits_as_input, self.soft_cap = scale, logits_as_input, soft_cap

    def forward(self, lm_head: ParallelLMHead, hidden_states: Tensor, embedding_bias: Tensor | None = None) -> Tensor:
        logits = hidden_states
        if not self.logits_as_input:
            bias = lm_head.bias if embedding_bias is None else embedding_bias
            logits = tensor_model_parallel_all_gather(functional.linear(hidden_states, lm_head.weight, bias))
            if lm_head.token_rows is not None:
                logits = logits[..., lm_head.token_rows]
            logits = logits[..., : self.org_vocab_size]
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits if self.scale == 1.0 else logits * self.scale
