"""The part `sampler`: draws tokens without a sort and computes log-probabilities in one pass.

One launch of `top_k_top_p_sampling_from_logits` reads the model's 16-bit logits and replaces up to ten launches of
vLLM: conversion to float32, temperature, min-p, top-k, top-p, softmax, the draw, and argmax for greedy requests. vLLM's
own code runs for a batch that needs intermediate logits: requests with their own seed, which must get vLLM's tokens,
logprobs of processed logits, and custom logits processors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.sampler import Sampler

import pyops

from ..choice import keeps

_GREEDY = 1e-5  # vLLM samples greedily at temperatures below this
# {logits processor of vLLM: the attribute that is falsy if no request of the batch uses it}
_USERS = {LogitBiasLogitsProcessor: "biases", MinPLogitsProcessor: "min_p_count", MinTokensLogitsProcessor: "min_toks"}

_originals: dict[str, Any] = {}  # {attribute of `Sampler`: vLLM's}


def install() -> str:
    """Let vLLM's `Sampler` draw tokens and compute log-probabilities with this library, on GPUs.

    Returns:
        One line for the log with what is replaced; "" if nothing is.
    """
    if _originals or not current_platform.is_cuda_alike():
        return ""
    methods: dict[str, Any] = {}
    if keeps("sampler", "draw"):
        methods |= {"sample": _sample(Sampler.sample), "forward": _forward(Sampler.forward)}
    if keeps("sampler", "logprobs"):
        methods["compute_logprobs"] = staticmethod(_compute_logprobs(Sampler.compute_logprobs))
    for name, method in methods.items():
        _originals[name] = vars(Sampler)[name]
        setattr(Sampler, name, method)
    return ", ".join(methods)


def uninstall() -> None:
    """Restore the methods of vLLM's `Sampler`."""
    for name, method in _originals.items():
        setattr(Sampler, name, method)
    _originals.clear()


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Sampler.forward`, which keeps logits in 16 bits if the batch asks only for tokens."""

    def forward(
        self: Any,
        logits: Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> Any:
        if not _only_draws(self, sampling_metadata):
            return original(self, logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)
        tokens, _ = self.sample(logits, sampling_metadata)
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32).unsqueeze(-1), logprobs_tensors=None)

    return forward


def _sample(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Sampler.sample`, which draws the tokens of all rows in one launch."""

    def sample(
        self: Any, logits: Tensor, sampling_metadata: Any, logprobs_mode_override: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if sampling_metadata.all_greedy or not _can_draw(self, sampling_metadata):
            result: tuple[Tensor, Tensor | None] = original(self, logits, sampling_metadata, logprobs_mode_override)
            return result
        return _draw(logits, sampling_metadata), None

    return sample


def _draw(logits: Tensor, metadata: Any) -> Tensor:
    """Draw a token for each row, [num_rows] int32, from logits before temperature."""
    rows, device = logits.shape[0], logits.device
    temperature = metadata.temperature
    if not metadata.all_random:
        temperature = temperature.masked_fill(temperature < _GREEDY, 0.0)
    # Seeds from torch's generator make draws reproducible, and equal on all ranks.
    seeds = torch.empty(rows, dtype=torch.int64, device=device).random_()
    top_k = None if metadata.top_k is None else metadata.top_k.to(torch.int32)  # vLLM's warm-up passes int64
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    pyops.top_k_top_p_sampling_from_logits(
        tokens, logits, seeds, None, top_k, metadata.top_p, _min_p(metadata), temperature
    )
    return tokens.clamp_(min=0)  # A row of NaN gives -1, which vLLM would take for a rejected token.


def _only_draws(sampler: Any, metadata: Any) -> bool:
    """Whether a batch asks only for tokens, and nothing edits its logits in float32 first."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and metadata.no_penalties
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and (holder is None or not holder.has_tracked_requests())
        and not any(map(_is_used, metadata.logitsprocs.non_argmax_invariant))
        and (metadata.all_greedy or _can_draw(sampler, metadata))
    )


def _can_draw(sampler: Any, metadata: Any) -> bool:
    """Whether nothing reads the logits between temperature and draw."""
    return (
        not metadata.generators
        and not sampler.topk_topp_sampler.logprobs_mode.startswith("processed")
        and not any(
            type(one) is not MinPLogitsProcessor and _is_used(one) for one in metadata.logitsprocs.argmax_invariant
        )
    )


def _is_used(processor: Any) -> bool:
    """Whether a logits processor may edit logits. A custom one always may."""
    users = _USERS.get(type(processor))
    return users is None or bool(getattr(processor, users))


def _min_p(metadata: Any) -> Tensor | None:
    """min_p of each row, [num_rows]; None if no request sets it."""
    for processor in metadata.logitsprocs.argmax_invariant:
        if type(processor) is MinPLogitsProcessor and processor.min_p_count:
            min_p: Tensor = processor.min_p.view(-1)
            return min_p
    return None


def _compute_logprobs(original: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`Sampler.compute_logprobs`; vLLM's own if results must not depend on the batch size."""

    def compute_logprobs(logits: Tensor) -> Tensor:
        if envs.VLLM_BATCH_INVARIANT:
            return original(logits)
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        pyops.log_softmax(out, logits)
        return out

    return compute_logprobs
