"""Several projections of one input as one GEMM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .replacement import hooked

_FORWARD = nn.Linear.forward


class Joined:
    """Projections of one input as one GEMM: their weights are views of one stacked tensor."""

    def __init__(self, *linears: Any) -> None:
        self.linears = linears
        self.weights: dict[str, Tensor] = {}
        self.views: dict[str, tuple[Tensor, ...]] = {}
        if len(linears) == 1 or not self._joinable():
            return
        for name in ("weight", "bias") if linears[0].bias is not None else ("weight",):
            parts = [getattr(linear, name) for linear in linears]
            self.weights[name] = whole = torch.cat([part.data for part in parts])
            self.views[name] = views = whole.split([len(part) for part in parts])
            for part, view in zip(parts, views, strict=True):
                part.data = view
            # CUDA graphs may then read the weight at this address instead of copying it at every step.
            torch._dynamo.mark_static_address(whole)

    def __call__(self, x: Tensor) -> Tensor:
        """The projections of `x` [..., in], concatenated: a new tensor [..., sum of outs]."""
        if self.weights and self.obstacle() is None and not hooked(*self.linears):
            return nn.functional.linear(x, self.weights["weight"], self.weights.get("bias"))
        if len(self.linears) == 1:
            result: Tensor = self.linears[0](x)
            return result
        return torch.cat([linear(x) for linear in self.linears], -1)

    def note(self) -> str:
        """The report's note if the projections run as separate GEMMs; "" if they run as one."""
        why = self.obstacle() or ("a projection has hooks" if hooked(*self.linears) else "")
        return f"; separate products: {why}" if self.weights and why else ""

    def part(self) -> None:
        """Give every projection its own memory again."""
        for name in self.weights:
            for linear in self.linears:
                parameter = linear._parameters.get(name)
                if parameter is not None and parameter.untyped_storage().nbytes() > parameter.nbytes:
                    parameter.data = parameter.data.clone()
        self.weights, self.views = {}, {}

    def _joinable(self) -> bool:
        weights = [linear.weight for linear in self.linears if type(linear) is nn.Linear]
        return (
            len(weights) == len(self.linears)
            and not any("forward" in vars(linear) for linear in self.linears)
            and len({(weight.dtype, weight.device, weight.shape[1]) for weight in weights}) == 1
            and len({linear.bias is None for linear in self.linears}) == 1
            and all(type(weight) is nn.Parameter for weight in weights)
        )

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def obstacle(self) -> str | None:
        """Why the projections no longer share the stacked tensor, or have another forward; None if all is unchanged.

        `to`, merging of adapters and pruning replace the weights of projections; other libraries replace forwards.
        """
        for linear in self.linears:
            if type(linear) is not nn.Linear or "forward" in linear.__dict__:
                return "a projection has another forward"
        if nn.Linear.forward is not _FORWARD:
            return "a projection has another forward"
        try:
            for name, views in self.views.items():
                for linear, view in zip(self.linears, views, strict=True):
                    part = linear._parameters.get(name)
                    if part is None or part.dtype is not view.dtype or not part.is_set_to(view):
                        return "a projection has other weights"
        except RuntimeError:  # raised by "meta" tensors
            return "a projection has other weights"
        return None
