"""A product of rows with the coded weights of their experts."""

from __future__ import annotations

from dataclasses import dataclass

from ..._core.device import Device
from .coded_experts import CodedExperts
from .grouped_problem import GroupedProblem


@dataclass(frozen=True, slots=True, eq=False)
class CodedProblem:
    """A grouped product whose weights are codes. `product` is that with the weights in full, in memory of the call."""

    product: GroupedProblem
    weight: CodedExperts

    @property
    def device(self) -> Device:
        return self.product.device

    def bucket(self) -> str:
        return f"{self.product.bucket()} {self.weight.type} of {self.weight.group_size}"
