"""Whether two sets of outputs agree, and by how much they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .installed import Unavailable
from .rivals import Builder
from .shapes import Case


def written(case: Case, args: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The tensors among `args` that the op writes, by name."""
    pairs = zip(case.op.parameters, args, strict=True)
    return {p.name: arg for p, arg in pairs if p.written and arg is not None}


def outputs(case: Case, build: Builder, device: str) -> dict[str, torch.Tensor]:
    """The outputs of a contender for the case's arguments."""
    args = case.arguments(device=device)
    result = build(*args)()
    found = written(case, args)
    returned = result if isinstance(result, tuple) else (result,)
    return found | {name: x for name, x in zip(found, returned, strict=False) if isinstance(x, torch.Tensor)}


def difference(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """(largest absolute difference, ||difference||_2 / ||expected||_2).

    Equal infinities, and two NaN, count as equal; the difference of NaN and a number is infinite.
    """
    wide = torch.float64 if {actual.dtype, expected.dtype} & _NEED_DOUBLE else torch.float32
    a, b = (x.to(wide) for x in (actual, expected))
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    apart = apart.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    largest = apart.max().item() if apart.numel() else 0.0
    if largest == 0:
        return 0.0, 0.0
    norm, off = (torch.linalg.vector_norm(x, dtype=torch.float64).item() for x in (b.nan_to_num(0.0, 0.0, 0.0), apart))
    return largest, off / norm if norm else torch.inf


_NEED_DOUBLE = {torch.float64, torch.int32, torch.int64}


# {op: {output: dimension along which other libraries do not guarantee an order}}
_ANY_ORDER = {
    "moe_align_block_size": {"sorted_token_ids": -1},
    "moe_lora_align_block_size": {"sorted_token_ids": -1},
    "moe_permute": {"permuted_input": 0, "inv_permuted_idx": 0, "permuted_idx": 0},
    "get_cutlass_moe_mm_data": {"input_permutation": 0, "output_permutation": 0},
    "top_k_per_row_prefill": {"indices": -1},
    "top_k_per_row_decode": {"indices": -1},
}


# Ops with random results: other libraries draw other tokens of the same distribution.
_DRAWN = {"top_k_top_p_sampling_from_logits"}


def _check_drawn(args: Mapping[str, Any], tokens: torch.Tensor) -> None:
    """Unavailable unless each row's token is among its most likely ones that top-k keeps."""
    logits, place = args["logits"].float(), tokens.long()[:, None]
    if not bool(((place >= 0) & (place < logits.shape[1])).all()):
        raise Unavailable("draws tokens beyond the vocabulary")
    likelier = (logits > logits.gather(1, place)).sum(1)
    if bool((likelier >= args["top_k"]).any()):
        raise Unavailable("draws tokens that top-k does not keep")


class Check:
    """Compares a contender's outputs with those of the op's reference for the same arguments.

    The check only guards against timing a kernel that computes something else; accuracy is up to the tests. The 2-norm
    of the difference may therefore be a few roundings of the coarsest type among the arguments. Outputs without a
    guaranteed order are sorted first.
    """

    def __init__(self, case: Case, device: str = "cuda") -> None:
        self.case, self.device = case, device
        args = case.arguments(device=device)
        with torch.no_grad():
            case.op.applied(case.op.reference, args)()
        self.expected = written(case, args)
        self.rounding = max(
            (_epsilon(arg) for arg in args if isinstance(arg, torch.Tensor) and _is_wide(arg)), default=0.0
        )

    def __call__(self, build: Builder, any_order: bool = False) -> float:
        """The largest absolute difference. Unavailable for a contender that disagrees."""
        actual, largest = outputs(self.case, build, self.device), 0.0
        if any_order and self.case.op.name in _DRAWN:
            names = (p.name for p in self.case.op.parameters)
            args = dict(zip(names, self.case.arguments(device=self.device), strict=True))
            _check_drawn(args, actual["samples"])
            return 0.0
        unordered = _ANY_ORDER.get(self.case.op.name, {}) if any_order else {}
        for name, expected in self.expected.items():
            pair = actual[name], expected
            if name in unordered:
                pair = pair[0].sort(unordered[name]).values, pair[1].sort(unordered[name]).values
            error, relative = difference(*pair)
            allowed = 4 * max(self.rounding, _epsilon(expected))
            if relative > allowed:
                raise Unavailable(
                    f"disagrees with the reference: {name} by {relative:.2g} in the 2-norm, allowed {allowed:.2g}"
                )
            largest = max(largest, error)
        return largest


def _epsilon(x: torch.Tensor) -> float:
    """The relative rounding error of a type. For 8-bit integers it is one step, relative to the largest integer."""
    if x.dtype.is_floating_point:
        return float(torch.finfo(x.dtype).eps)
    return 1 / 127 if x.dtype.itemsize == 1 else 0.0


def _is_wide(x: torch.Tensor) -> bool:
    return bool(x.dtype.is_floating_point and x.dtype.itemsize >= 2)
