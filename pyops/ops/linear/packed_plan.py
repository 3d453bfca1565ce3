"""The plan of GEMMs with packed quantized weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Launch
from . import dequantize_packed
from .packed_engines import choose
from .packed_hopper import PackedConfig
from .packed_problem import PackedProblem


def plan(problem: PackedProblem) -> list[Launch]:
    """The launches of the kernel that is chosen, or forced by `tuning`."""
    return launches(problem, tuning.config(problem.op, problem, problem.device, choose))


def launches(problem: PackedProblem, config: Any) -> list[Launch]:
    """The launches of a Config, after those that permute or upcast the activations."""
    weight = problem.weight
    in_fours = weight.format.is_of_bytes and isinstance(config, PackedConfig)
    before, a = dequantize_packed.activations(problem, in_fours=in_fours)
    found = config.launches(replace(problem, a=a, weight=replace(weight, perm=None)))
    return [*before, *found] if found else []
