"""The plan of dense GEMMs."""

from __future__ import annotations

from ... import tuning
from ..._core.launch.kernel import Launch
from .gemm_engines import choose
from .gemm_problem import GemmProblem

# Least compute capability (major * 10 + minor) with the features "mma" and "bfloat16_products" of a device.
MIN_CAPABILITY, MIN_BFLOAT16_CAPABILITY = 75, 80


def plan(problem: GemmProblem) -> Launch:
    """The launch of the kernel that is chosen, or forced by `tuning`."""
    launch: Launch = tuning.config(problem.op, problem, problem.device, choose).launch(problem)
    return launch
