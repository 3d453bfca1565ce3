"""Routers of mixtures of experts, recognised by what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._core.errors import OpError
from ...ops.moe import grouped_topk, topk_sigmoid, topk_softmax
from .replacement import Replacement
from .trial import Trials, Unknown, agree, forward_of, randn, refuse_tensors, tried, twin

_HIDDEN, _TOKENS = 16, 64  # sizes of a trial: enough tokens that groups of experts change some choices
# Tolerances of logits relative to the largest, in float32 and in bfloat16.
_EXACT, _ROUNDING = 2.0**-18, 2.0**-7
_SCORINGS = {"sigmoid": 1, "softmax": 2}  # scoring functions of grouped_topk
_GROUPS = ("num_group", "n_group", "num_expert_group")  # attributes that hold the number of expert groups


class _Choice(NamedTuple):
    """The options of a router. It is computed by `grouped_topk` if it has groups or a correction bias.

    Attributes:
        scoring_func: the function from logits to scores: "softmax" or "sigmoid".
        renormalize: whether the weights of a token are divided by their sum.
        groups, groups_taken: groups of experts, and groups from which experts are chosen; 1 for no groups.
        factor: multiplies the weights.
        in_float32: whether the GEMM runs in float32, whatever the dtype of hidden states.
        logits_in_float32, weights_in_float32: whether these results are returned in float32.
    """

    scoring_func: str
    renormalize: bool
    groups: int = 1
    groups_taken: int = 1
    factor: float = 1.0
    in_float32: bool = True
    logits_in_float32: bool = True
    weights_in_float32: bool = True


class Router(Replacement):
    """A router: logits, and the experts of each token with their weights.

    Raises:
        Unknown: the ops do not agree with the module.
    """

    def __init__(self, module: Any, dtype: torch.dtype, trials: Trials) -> None:
        super().__init__(module, dtype)
        if module.weight.dtype is not dtype:
            _refuse_mixed(module, dtype)
        self._choice: _Choice = trials.outcome(module, _choice_of)
        self.op = "grouped_topk" if _is_grouped(module, self._choice) else f"topk_{self._choice.scoring_func}"

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.serves(hidden_states):
            result: tuple[Tensor, Tensor, Tensor] = self.original(hidden_states)
            return result
        return _chosen(self.module, hidden_states, self._choice)


def _refuse_mixed(module: Any, dtype: torch.dtype) -> None:
    """Raise Unknown if the router's forward does not accept hidden states of another dtype than its weights."""
    weights = {name: randn(*each.shape, dtype=each.dtype) for name, each in module.named_parameters(recurse=False)}
    made, x = twin(module, **weights), randn(_TOKENS, module.weight.shape[1], dtype=dtype)
    tried(lambda: forward_of(module)(made, x))


def is_router(module: Any) -> bool:
    """Whether a module has the attributes of a router: a weight matrix, and the number of experts per token."""
    weight = getattr(module, "weight", None)
    has_weight = isinstance(weight, nn.Parameter) and weight.ndim == 2
    return has_weight and isinstance(getattr(module, "top_k", None), int) and next(module.children(), None) is None


def _chosen(module: Any, hidden_states: Tensor, choice: _Choice) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [num_tokens, num_experts], and weights and int64 ids of the experts, both [num_tokens, top_k]."""
    rows, bias = hidden_states.reshape(-1, hidden_states.shape[-1]), getattr(module, "bias", None)
    if choice.in_float32:
        rows, bias = rows.float(), None if bias is None else bias.float()
    logits = nn.functional.linear(rows, module.weight.to(rows.dtype), bias)
    if _is_grouped(module, choice):
        correction, number = getattr(module, "e_score_correction_bias", None), _SCORINGS[choice.scoring_func]
        groups = choice.groups, choice.groups_taken, module.top_k, choice.renormalize
        weights, ids = grouped_topk(logits, *groups, choice.factor, correction, number)
        ids = ids.long()
    else:
        weights = logits.new_empty(len(logits), module.top_k, dtype=torch.float32)
        ids, places = (weights.new_empty(weights.shape, dtype=dtype) for dtype in (torch.int64, torch.int32))
        score = topk_softmax if choice.scoring_func == "softmax" else topk_sigmoid
        score(weights, ids, places, logits, choice.renormalize)
        weights = weights if choice.factor == 1.0 else weights * choice.factor
    dtypes = [torch.float32 if wide else hidden_states.dtype for wide in choice[-2:]]
    return logits.to(dtypes[0]), weights.to(dtypes[1]), ids


def _is_grouped(module: Any, choice: _Choice) -> bool:
    return choice.groups > 1 or getattr(module, "e_score_correction_bias", None) is not None


def _candidates(module: Any) -> Iterator[_Choice]:
    """The options that a router may have, by its settings."""
    groups = next((value for name in _GROUPS if isinstance(value := getattr(module, name, None), int)), 1)
    taken = getattr(module, "topk_group", None)
    factors = {1.0, float(getattr(module, "routed_scaling_factor", 1.0))}
    for among in dict.fromkeys(((groups, taken if isinstance(taken, int) else 1), (1, 1))):
        for scoring_func in ("softmax", "sigmoid"):
            for renormalize in (False, True):
                yield from (_Choice(scoring_func, renormalize, *among, factor) for factor in sorted(factors))


def _choice_of(module: Any) -> _Choice:
    """The options of a router, found with a small twin in float32, and its rounding, with a twin in bfloat16."""
    refuse_tensors(module, read={"e_score_correction_bias"})
    weights = {"weight": randn(module.weight.shape[0], _HIDDEN, seed=1)}
    bias = getattr(module, "bias", None)
    weights |= {} if bias is None else {"bias": randn(*bias.shape, seed=2)}
    x = randn(_TOKENS, _HIDDEN, seed=3)

    def made(dtype: torch.dtype) -> Any:
        small = twin(module, **{name: weight.to(dtype) for name, weight in weights.items()})
        for name, value in vars(module).items():  # attributes that hold hidden_size
            if value == module.weight.shape[1] and name.startswith("hidden"):
                setattr(small, name, _HIDDEN)
        return small

    small = made(torch.float32)
    theirs = tried(lambda: forward_of(module)(small, x))
    kinds = [one.dtype.is_floating_point for one in theirs] if _is_triple(theirs) else []
    if kinds != [True, True, False]:
        raise Unknown("it does not return logits, weights and numbers of experts")
    for candidate in _candidates(module):
        try:
            agrees = _agree(_chosen(small, x, candidate), theirs)
        except OpError:  # the op does not support these groups
            continue
        if agrees:
            return _rounded_alike(candidate, made(torch.bfloat16), x.bfloat16())
    raise Unknown("it chooses experts in another way")


def _rounded_alike(choice: _Choice, narrow: Any, x: Tensor) -> _Choice:
    """`choice` with the dtypes of its GEMM and results for a bfloat16 router.

    Raises:
        Unknown: the router rounds logits elsewhere than in the GEMM, so it could choose other experts.
    """
    theirs = tried(lambda: forward_of(narrow)(narrow, x))
    of_logits, of_weights = (one.dtype == torch.float32 for one in theirs[:2])
    for in_float32 in (True, False) if of_logits else (False,):
        found = choice._replace(in_float32=in_float32, logits_in_float32=of_logits, weights_in_float32=of_weights)
        logits = _chosen(narrow, x, found)[0]
        if agree([logits], theirs[:1], _EXACT if in_float32 else _ROUNDING):
            return found
    raise Unknown("it rounds logits in another way")


def _is_triple(found: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 3 and all(isinstance(one, Tensor) for one in found)


def _agree(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    """Whether logits, and the weights scattered to all experts, agree up to rounding."""
    spread = [torch.zeros_like(logits).scatter(1, ids, weights) for logits, weights, ids in (ours, theirs)]
    return agree([ours[0], spread[0]], [theirs[0], spread[1]])
