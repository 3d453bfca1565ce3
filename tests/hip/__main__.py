"""Every kernel for AMD GPUs, on a machine without one.

python -m tests.hip get FOLDER            fetch hiprtc from Debian's packages
python -m tests.hip compile FOLDER        compile a sample of every kernel: those that depend on the architecture for
                                          five and two of them for three more, others for one of each size of warps
python -m tests.hip compile FOLDER --each compile a sample of every kernel for each of the five
python -m tests.hip compile FOLDER --all  compile every specialisation
    --part 2/3 --save FILE                the second of three parts, without the results in FILE; adds to FILE
python -m tests.hip emulate FOLDER --tinygrad CHECKOUT
                                          run small cases of every op, for four architectures, in the instruction
                                          emulator of tinygrad's tests

`get` exits with 3 where the packages cannot be had, and `emulate` where the emulator cannot run. `compile` exits with 1
if a text does not compile or a kernel uses scratch memory, and `emulate` if a result is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import pyops

from . import packages, saved, specialisations
from .compile import Compiled, Job, compile_all, digest, table
from .emulator import cases
from .emulator.checkout import COMMIT, Unavailable
from .packages import Folder

_PER_KERNEL = 1  # for each architecture; half a second of a CPU each


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    assert __doc__
    parser = argparse.ArgumentParser(
        "python -m tests.hip", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    get = commands.add_parser("get", help="fetch hiprtc")
    get.add_argument("--version", type=int, choices=(6, 7), default=7)
    compile_ = commands.add_parser("compile", help="compile kernels")
    compile_.add_argument("--all", action="store_true", help="every specialisation, not a sample")
    compile_.add_argument("--each", action="store_true", help="every kernel for each architecture")
    compile_.add_argument("--arch", action="append", choices=specialisations.ARCHS, help="only this architecture")
    compile_.add_argument("-k", metavar="TEXT", default="", help="only kernels whose file name holds the text")
    compile_.add_argument("--part", metavar="I/N", type=_part, default=(1, 1), help="only the I-th of N parts")
    compile_.add_argument("--save", metavar="FILE", type=Path, help="results to go on from, in lines of JSON")
    compile_.add_argument("-n", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: all cores)")
    emulate = commands.add_parser("emulate", help="run ops in an emulator")
    emulate.add_argument("--tinygrad", type=Path, required=True, help=f"a checkout of tinygrad's commit {COMMIT}")
    emulate.add_argument("--arch", action="append", choices=cases.FAMILIES, help="only this architecture")
    emulate.add_argument("-k", metavar="TEXT", default="", help="only ops whose name holds the text")
    for command in (get, compile_, emulate):
        command.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "get":
        return _get(options.folder, options.version)
    return {"compile": _compile, "emulate": _emulate}[options.command](Folder(options.folder), options)


def _get(folder: Path, version: int) -> int:
    try:
        packages.get(folder.absolute(), version)
    except packages.Unavailable as error:
        print(error, file=sys.stderr)
        return 3
    return 0


def _part(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError
    return part, parts


def _compile(folder: Folder, options: argparse.Namespace) -> int:
    started = time.monotonic()
    saved_before = {one.digest: one for one in saved.read(options.save)} if options.save else {}
    known = []

    def unknown() -> Iterator[Job]:
        """The requested jobs, found while others compile; results of jobs outside this part go to `known`."""
        for key, job in _jobs(folder, options):
            if key in saved_before:
                known.append(saved_before[key])
            else:
                yield job

    made: Iterable[Compiled] = compile_all(folder, unknown(), options.n)
    found = [*(saved.append(options.save, made) if options.save else made), *known]
    bad = [one for one in found if one.trouble]
    print(table(found))
    for one in bad:
        print(f"{one.kernel} for {one.arch}: {one.trouble}\n    {one.constants}")
    print(f"hiprtc: {len(found) - len(bad)} of {len(found)} compiled in {time.monotonic() - started:.0f} s")
    return int(bool(bad))


def _jobs(folder: Folder, options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """The jobs of the command line with their digests, each once."""
    archs = options.arch or specialisations.ARCHS
    every_arch = options.all or options.each
    chosen = specialisations.of_archs(archs, None if options.all else _PER_KERNEL, every_arch)
    part, parts = options.part
    seen = set()
    for job in chain(chosen, specialisations.of_relatives(archs)):
        if options.k in job[1].kernel.file and (key := digest(folder, job)) not in seen:
            seen.add(key)
            if int(key, 16) % parts == part - 1:
                yield key, job


def _emulate(folder: Folder, options: argparse.Namespace) -> int:
    ops = [op for name, op in pyops.registry.items() if options.k in name]
    wrong = 0
    for arch in options.arch or cases.FAMILIES:
        found = []
        chosen: list[cases.Case] = [(name, {"arch": arch}) for name in cases.CHECKS if options.k in name]
        chosen += cases.cases(arch, ops)
        try:
            for one in cases.outcomes(options.tinygrad, folder, arch, chosen):
                found.append(one)
                if one.trouble:
                    name, axes = one.case
                    print(f"{name} for {arch}: {one.trouble}\n    {axes}", flush=True)
        except Unavailable as error:
            print(error, file=sys.stderr)
            return 3
        right = sum(not one.trouble for one in found)
        wrong += sum(bool(one.wrong) for one in found)
        print(f"{arch}: {right} of {len(found)} cases are right, {sum(one.seconds for one in found):.0f} s", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
