"""Every kernel for AMD GPUs, on a machine without one.

python -m tests.hip get FOLDER            fetch hiprtc from Debian's packages
python -m tests.hip compile FOLDER        compile a sample of every kernel for five architectures
python -m tests.hip compile FOLDER --all  compile every specialisation

`get` exits with 3 where the packages cannot be had. `compile` exits with 1 if a text does not compile or a kernel uses
scratch memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import packages, specialisations
from .compile import compile_all, table
from .packages import Folder

_PER_KERNEL = 2  # of each architecture; 0.3 s each on one core


def main(arguments: Sequence[str] | None = None) -> int:
    """What the command line asks for; its exit status."""
    assert __doc__
    parser = argparse.ArgumentParser(
        "python -m tests.hip", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    get = commands.add_parser("get", help="fetch hiprtc")
    get.add_argument("--version", type=int, choices=(6, 7), default=7)
    compile_ = commands.add_parser("compile", help="compile kernels")
    compile_.add_argument("--all", action="store_true", help="every specialisation, not a sample")
    compile_.add_argument("--arch", action="append", choices=specialisations.ARCHS, help="only this architecture")
    compile_.add_argument("-k", metavar="TEXT", default="", help="only kernels whose file name holds the text")
    compile_.add_argument("-n", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: all cores)")
    for command in (get, compile_):
        command.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "get":
        return _get(options.folder, options.version)
    return _compile(Folder(options.folder), options)


def _get(folder: Path, version: int) -> int:
    try:
        packages.get(folder.absolute(), version)
    except packages.Unavailable as error:
        print(error, file=sys.stderr)
        return 3
    return 0


def _compile(folder: Folder, options: argparse.Namespace) -> int:
    per_kernel = None if options.all else _PER_KERNEL
    archs = options.arch or specialisations.ARCHS
    jobs = [(arch, one) for arch in archs for one in specialisations.sample(arch, per_kernel)]
    jobs = [(arch, one) for arch, one in jobs if options.k in one.kernel.file]
    started = time.monotonic()
    found = compile_all(folder, jobs, options.n)
    bad = [one for one in found if one.trouble]
    print(table(found))
    for one in bad:
        print(f"{one.kernel} for {one.arch}: {one.trouble}\n    {one.constants}")
    print(f"hiprtc: {len(found) - len(bad)} of {len(found)} compiled in {time.monotonic() - started:.0f} s")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
