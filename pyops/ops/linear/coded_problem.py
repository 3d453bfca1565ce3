"""A grouped GEMM with K-major quantized weights."""

from __future__ import annotations

from dataclasses import dataclass

from ..._core.system.device import Device
from .coded_experts import CodedExperts
from .grouped_problem import GroupedProblem


@dataclass(frozen=True, slots=True, eq=False)
class CodedProblem:
    """A grouped GEMM with quantized weights. `product` is the same GEMM with dequantized weights in a workspace."""

    product: GroupedProblem
    weight: CodedExperts

    @property
    def device(self) -> Device:
        return self.product.device

    def bucket(self) -> str:
        return f"{self.product.bucket()} {self.weight.type} of {self.weight.group_size}"
