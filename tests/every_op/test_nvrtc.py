"""The specialisations of the axes table compile for every architecture, on a machine with or without a device.

No kernel here declares local memory, so none may spill or keep an array on the stack. Nor may the assembler serialise
wgmma, or ignore setmaxnreg. The profile "nightly" compiles every specialisation for every architecture, the others a
fixed sample of each op's. Ops share kernels: of the samples of all ops, as many are compiled as have every kernel for
sm_90 and another architecture, for each of its architectures if it asks which one it is, and every value of each
constant of a kernel for sm_90, or for another architecture if sm_90 has another kernel.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

import pyops
from pyops import offline
from pyops._core.launch.kernel import Specialisation
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops._core.tensors.tensor import TensorArg
from pyops._core.text import source
from pyops._core.text.nvrtc import include_folders
from pyops.example import ArgMaker
from tests.support import axes
from tests.support.profiles import PROFILE, covering, sample, varied

ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100")
# Choices of a plan besides the axes: few or many rows, and addresses that allow only one element per access. (The last
# changes the same few instructions everywhere, so one architecture and many rows suffice.)
SITUATIONS = ((16, True), (4096, True))
UNALIGNED = {"sm_90": ((4096, False),)}


def _has_nvrtc() -> str | None:
    """The reason why nothing can be compiled here; None if it can."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as error:
        return f"NVRTC is not installed: {error}"
    if not include_folders():
        return "the CUDA headers are not installed"
    return None


MISSING = _has_nvrtc()


def _specialisations(op: Op, arch: str, max_texts: int | None) -> list[Specialisation]:
    """At most `count` of the specialisations of all axes and situations, the same ones at each call; all of them for
    None.

    They are chosen from the first cases in a random order, from as many kernels as possible.
    """
    assert op.example is not None
    model = device.model(arch)
    situations = [(model, *situation) for situation in (*SITUATIONS, *UNALIGNED.get(arch, ()))]
    if arch == "sm_90":  # its many GEMM kernels also depend on whether tiles fill the device: any matrix fills one SM
        situations += [(replace(model, num_sms=1), *SITUATIONS[0])]
    cases = list(product(axes.combinations(op), situations))
    if max_texts is not None:
        random.Random(f"{op.name} {arch}").shuffle(cases)
    found: dict[str, Specialisation] = {}
    for case, (on, num_tokens, aligned) in cases:
        if max_texts is not None and len(found) >= 6 * max_texts:
            break
        args = op.example(ArgMaker(on), num_tokens=num_tokens, **case)
        for launch in op.launches(*(_placed(arg, aligned) for arg in args)):
            found.setdefault(launch.specialisation.text, launch.specialisation)
    return varied(list(found.values()), max_texts, op.name, lambda one: [one.kernel.file, *one.constants.items()])


@cache
def _sampled(op: Op, arch: str) -> list[Specialisation]:
    """The sample that a profile other than "nightly" takes."""
    return _specialisations(op, arch, PROFILE.compiles[arch])


def _placed(arg: Any, aligned: bool) -> Any:
    return replace(arg, alignment=arg.dtype.itemsize) if isinstance(arg, TensorArg) and not aligned else arg


def _archs(name: str) -> list[str]:
    """The architectures that an op is compiled for: sm_90, with most kernels, and a profile's number of others."""
    return ["sm_90", *sample((arch for arch in ARCHS if arch != "sm_90"), PROFILE.others, name)]


# Ops share kernels, and some of these launch the same specialisation.
_compile = cache(offline.compile)


@cache
def _names_arch(file: str) -> bool:
    """Whether a kernel chooses by the architecture's number, and not just by what every kernel's header does."""
    return "ARCHITECTURE" in source.inline(file)


def _parts(case: tuple[Op, str, list[Specialisation]]) -> set[tuple[str, ...]]:
    """Each kernel with the architecture, and with each value of its constants on sm_90, or on another architecture for
    kernels that sm_90 does not take. Where a kernel does not ask for the architecture, one of the others stands for all
    besides sm_90.
    """
    _, arch, sampled = case
    files = {one.kernel.file for one in sampled}
    of_values = [one for one in sampled if arch == "sm_90" or one.kernel.file not in _of_sm90()]
    values = {(one.kernel.file, name, str(value)) for one in of_values for name, value in one.constants.items()}
    return values | {(file, arch if arch == "sm_90" or _names_arch(file) else "another") for file in files}


@cache
def _of_sm90() -> set[str]:
    """The kernels that are compiled for sm_90."""
    return {one.kernel.file for op in pyops.registry.values() for one in _sampled(op, "sm_90")}


def _cases() -> list[Any]:
    """(op, architecture) of the tests; all of them in the profile "nightly"."""
    every = [(op, arch) for op in pyops.registry.values() for arch in _archs(op.name)]
    if PROFILE.compiles:
        sampled = [(op, arch, _sampled(op, arch)) for op, arch in every]
        every = [(op, arch) for op, arch, _ in covering(sampled, _parts)]
    return [pytest.param(op, arch, id=f"{op.name}-{arch}") for op, arch in every]


@pytest.mark.rotates
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(("op", "arch"), _cases())
def test_compiles_without_local_memory(op: Op, arch: str, record_property: Any) -> None:
    refused = []
    for specialisation in _sampled(op, arch) if PROFILE.compiles else _specialisations(op, arch, None):
        kernel, constants = specialisation.kernel, str(specialisation)
        started = time.perf_counter()
        report = _compile(kernel.file, constants, specialisation.text, arch, kernel.options)
        record_property("offline_compile", (time.perf_counter() - started, arch, kernel.file, constants))
        if report.spill_bytes or report.stack_bytes:
            refused.append(f"{report.spill_bytes} bytes spilled, {report.stack_bytes} on the stack: {constants}")
        refused += [f"{advice}: {constants}" for advice in report.advice]
    assert not refused, "\n".join(refused)
