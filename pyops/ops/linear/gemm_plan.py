"""The plan of dense GEMMs."""

from __future__ import annotations

from ... import tuning
from ..._core.launch.kernel import Launch
from .gemm_engines import choose
from .gemm_problem import GemmProblem

MIN_CAPABILITY = 80  # least compute capability (major * 10 + minor) with `device.supports("mma")`


def plan(problem: GemmProblem) -> Launch:
    """The launch of the kernel that is chosen, or forced by `tuning`."""
    launch: Launch = tuning.config(problem.op, problem, problem.device, choose).launch(problem)
    return launch
