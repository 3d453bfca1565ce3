"""The plan of grouped GEMMs."""

from __future__ import annotations

from ... import tuning
from ..._core.launch.kernel import Launch
from .grouped_engines import choose
from .grouped_problem import GroupedProblem


def plan(problem: GroupedProblem) -> Launch:
    """The launch of the kernel that is chosen, or forced by `tuning`."""
    launch: Launch = tuning.config(problem.out.op, problem, problem.device, choose).launch(problem)
    return launch
