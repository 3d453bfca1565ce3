"""NVRTC without a GPU: compile a text for any architecture and read the report of ptxas."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ._core.text import nvrtc


@dataclass(frozen=True)
class Report:
    """The report of ptxas on one compiled kernel.

    Attributes:
        registers, stack_bytes, spill_bytes: per thread. shared_bytes: static, per block.
        advice: messages about wgmma that is serialised or waited for too early, and setmaxnreg that is ignored (C75..).
        binary: the cubin.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int
    advice: tuple[str, ...]
    binary: bytes


def compile(kernel: str, constants: str, text: str, arch: str, options: tuple[str, ...] = ()) -> Report:
    """Compile as CuPy would on a device of architecture `arch` (``"sm_90"``), with the same options."""
    if options:
        nvrtc.check_version(kernel, constants)
    target = options or (f"--gpu-architecture={arch}",)
    log, binary = nvrtc.compile(kernel, constants, text, (*target, "--ptxas-options=-v"))

    def number(pattern: str) -> int:
        return sum(int(match) for match in re.findall(pattern, log))

    return Report(
        number(r"Used (\d+) registers"),
        number(r"(\d+) bytes smem"),
        number(r"(\d+) bytes stack frame"),
        number(r"(\d+) bytes spill (?:stores|loads)"),
        tuple(re.findall(r"\(C75\d\d\).*", log)),
        binary,
    )
