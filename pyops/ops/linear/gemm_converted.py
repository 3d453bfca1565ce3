"""A GEMM of fp8 operands without fp8 MMA: both are converted to float16 in a workspace, and then multiplied."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..._core.launch.kernel import Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import float16
from . import gemm_sm80
from .gather_columns import gathered
from .gemm_problem import GemmProblem, Operand
from .gemm_shape import GemmShape
from .gemm_sm80 import MmaConfig


@dataclass(frozen=True, slots=True)
class ConvertedConfig:
    """Both operands are converted to a workspace. gemm_sm80.cu converts a weight once for every tile of rows.

    Attributes:
        gemm: the Config of the GEMM that follows.
    """

    gemm: MmaConfig

    def candidates(self, problem: GemmProblem, device: Device) -> list[ConvertedConfig]:
        """Other GEMMs."""
        return [ConvertedConfig(one) for one in self.gemm.candidates(_product(problem), device)]

    def launches(self, problem: GemmProblem) -> list[Launch]:
        """The launches that convert the operands, and the GEMM."""
        product = _product(problem)
        launch = self.gemm.launch(product)
        pairs = (product.a, problem.a), (product.b, problem.b)
        return [] if launch.empty else [*(gathered(to, one, problem.k) for to, one in pairs), launch]


def _product(problem: GemmProblem) -> GemmProblem:
    """The GEMM of the converted operands."""
    a, b = (
        Operand.of_scratch(Scratch(one.rows * problem.k * float16.itemsize), float16, one.rows, problem.k)
        for one in (problem.a, problem.b)
    )
    return replace(problem, a=a, b=b)


def converted(shape: GemmShape) -> GemmShape:
    """The shape of the GEMM that follows."""
    return replace(shape, dtype=float16, vec_size=math.gcd(shape.k, 8), rows_are_dense=True)


def refusal(shape: GemmShape, device: Device) -> str | None:
    """Why the operands are not converted first."""
    if not gemm_sm80.converts(shape.dtype, device) or not device.supports("mma"):
        return "it is for fp8 operands on GPUs without fp8 MMA"
    if shape.block_scaled or not shape.rows_are_dense:
        return "block scales, or elements of a row with a stride"
    return "an empty operand" if 0 in (shape.m, shape.n, shape.k) else None


def configs(shape: GemmShape, device: Device) -> Iterator[ConvertedConfig]:
    """Those of gemm_sm80.cu for float16."""
    yield from map(ConvertedConfig, gemm_sm80.configs(converted(shape), device))
