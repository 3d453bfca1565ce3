"""Results of compiles in a file, a line of JSON each, so that a run resumes where another one was stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from .compile import Compiled
from .metadata import Resources


def read(file: Path) -> Iterator[Compiled]:
    """The contents of the file, without a line that is truncated because a run was stopped."""
    for line in file.read_text().splitlines() if file.exists() else ():
        with suppress(ValueError):
            fields = json.loads(line)
            resources = fields.pop("resources")
            yield Compiled(**fields, resources=resources and Resources(**resources))


def append(file: Path, found: Iterable[Compiled]) -> Iterator[Compiled]:
    """The same results, each of them written before it is yielded."""
    with file.open("a") as lines:
        lines.write("\n")  # ends a truncated line
        for one in found:
            print(json.dumps(asdict(one)), file=lines, flush=True)
            yield one
