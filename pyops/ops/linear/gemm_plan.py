"""The plan of dense GEMMs."""

from __future__ import annotations

from typing import Any

from ... import tuning
from ..._core.launch.kernel import Launch
from .gemm_converted import ConvertedConfig
from .gemm_engines import choose
from .gemm_problem import GemmProblem

# Least compute capability (major * 10 + minor) with the features "mma" and "bfloat16_products" of a device.
MIN_CAPABILITY, MIN_BFLOAT16_CAPABILITY = 75, 80


def plan(problem: GemmProblem) -> list[Launch]:
    """The launches of the kernel that is chosen, or forced by `tuning`."""
    return launches(problem, tuning.config(problem.op, problem, problem.device, choose))


def launches(problem: GemmProblem, config: Any) -> list[Launch]:
    """The launches of a Config."""
    found = config.launches(problem) if isinstance(config, ConvertedConfig) else [config.launch(problem)]
    return [] if found and found[-1].empty else found
