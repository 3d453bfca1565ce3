"""Compares the machine code of the specialisations that CI compiles, in this tree and at a revision.

    python -m tests.same_code main                                # all of it
    python -m tests.same_code main --per-kernel 1 --arch sm_90    # one specialisation of each kernel, of a random part

Prints every specialisation that is not byte-equal, with its instructions, registers and spilled bytes before and after,
and fails if there is one. The specialisations of an op are compared in the order in which its plan gives them, so that
files, kernels and constants may have other names. Compiled code is cached in a temporary folder, under the hash of its
text without comments.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tests.every_op.test_nvrtc import ARCHS

ROOT = Path(__file__).parents[1]
_CACHE = Path(tempfile.gettempdir()) / f"pyops-same-code-{os.getuid()}"
_INSTRUCTION_BYTES = 16
# {op: its specialisations}, from the plans of the tree in which this runs, which may name kernels differently.
_LIST = """
import json, sys
import pyops
from tests.every_op import test_nvrtc

test_nvrtc.varied = lambda found, *rest: found
arch, max_texts = sys.argv[1], int(sys.argv[2]) or None

def fields(one):
    return one.kernel.signature.entry, str(one), one.text, one.kernel.options

found = {
    name: [fields(one) for one in test_nvrtc._specialisations(op, arch, max_texts)]
    for name, op in pyops.registry.items()
}
json.dump(found, sys.stdout)
"""


class Source(NamedTuple):
    """A specialisation: its kernel and constants, and the text that compiles into its machine code."""

    kernel: str
    constants: str
    text: str
    options: list[str]


class Code(NamedTuple):
    """The machine code of a specialisation, and its instructions, registers and spills."""

    digest: str
    instructions: int
    registers: int
    spilled_bytes: int


def sources(tree: Path, arch: str, per_kernel: int | None) -> dict[str, list[Source]]:
    """The specialisations of each op that a tree's plans compile for an architecture: all, or a random part of each
    kernel.
    """
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", _LIST, arch, str(per_kernel or 0)]
    text = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, check=True).stdout
    return {op: [Source(*fields) for fields in found] for op, found in json.loads(text).items()}


def compiled(source: Source, arch: str) -> Code:
    """The machine code of a specialisation, from the cache if it was compiled before."""
    from elftools.elf.elffile import ELFFile

    from pyops import offline

    bare = re.sub(r"\s*//.*|^#line .*", "", source.text, flags=re.MULTILINE)
    path = _CACHE / hashlib.sha256("\0".join((bare, arch, *source.options)).encode()).hexdigest()
    if not path.exists():
        report = offline.compile(source.kernel, source.constants, source.text, arch, tuple(source.options))
        parts = {part.name: part.data() for part in ELFFile(io.BytesIO(report.binary)).iter_sections()}
        code = b"".join(data for name, data in parts.items() if name.startswith(".text"))
        tables = b"".join(data for name, data in parts.items() if name.startswith((".nv.constant", ".nv.global.init")))
        digest = hashlib.sha256(code + tables).hexdigest()
        _CACHE.mkdir(exist_ok=True)
        path.write_text(json.dumps((digest, len(code) // _INSTRUCTION_BYTES, report.registers, report.spill_bytes)))
    return Code(*json.loads(path.read_text()))


def verdict(before: Code, after: Code) -> str:
    """The comparison of one specialisation's machine code."""
    if before.digest == after.digest:
        return "equal"
    return "as many instructions" if before.instructions == after.instructions else "differs"


def sampled(pairs: list[tuple[Source, Source]], per_kernel: int | None) -> list[tuple[Source, Source]]:
    """Each text once, and at most `per_kernel` specialisations of each kernel, the same ones at each call."""
    distinct = {after.text: (before, after) for before, after in pairs}
    ordered = sorted(distinct.values(), key=lambda pair: pair[0][:2])
    chosen = []
    for kernel, group in groupby(ordered, key=lambda pair: pair[0].kernel):
        every = list(group)
        few = per_kernel is not None and len(every) > per_kernel
        chosen += random.Random(kernel).sample(every, per_kernel or 0) if few else every
    return chosen


def compared(base: Path, arch: str, per_kernel: int | None) -> Counter[str]:
    """The verdicts for an architecture; prints each one that is not "equal"."""
    old, new = sources(base, arch, per_kernel), sources(ROOT, arch, per_kernel)
    verdicts: Counter[str] = Counter()
    pairs = []
    for op in sorted(old.keys() | new.keys()):
        counts = len(old.get(op, [])), len(new.get(op, []))
        if counts[0] == counts[1]:
            pairs += list(zip(old[op], new[op], strict=True))
        else:
            verdicts["other specialisations"] += 1
            print(f"{arch} {op}: {counts[0]} specialisations, now {counts[1]}")
    for before, after in sampled(pairs, per_kernel):
        codes = compiled(before, arch), compiled(after, arch)
        found = verdict(*codes)
        verdicts[found] += 1
        if found != "equal":
            numbers = (
                f"{a} -> {b} {what}" for what, a, b in zip(Code._fields[1:], *(code[1:] for code in codes), strict=True)
            )
            print(f"{arch} {found}: {after.kernel} {after.constants}: {', '.join(numbers)}", flush=True)
    print(f"{arch}: {', '.join(f'{count} {name}' for name, count in verdicts.items())}", flush=True)
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the revision to compare with")
    parser.add_argument("--per-kernel", type=int, help="how many specialisations of each kernel; all by default")
    parser.add_argument("--arch", nargs="+", default=ARCHS, help="architectures; those of CI by default")
    options = parser.parse_args()
    archive = subprocess.run(["git", "archive", options.base], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        for arch in options.arch:
            verdicts += compared(Path(folder), arch, options.per_kernel)
    return int(verdicts.keys() != {"equal"})


if __name__ == "__main__":
    sys.exit(main())
