"""Results of compiles in a file, a line of JSON each, so that a run goes on where another one was stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from .compile import Compiled
from .metadata import Resources


def read(file: Path) -> Iterator[Compiled]:
    """What the file holds. A line that is cut off, because a run was stopped, does not count."""
    for line in file.read_text().splitlines() if file.exists() else ():
        with suppress(ValueError):
            fields = json.loads(line)
            resources = fields.pop("resources")
            yield Compiled(**fields, resources=resources and Resources(**resources))


def append(file: Path, found: Iterable[Compiled]) -> Iterator[Compiled]:
    """The same results, each of them written before it is handed on."""
    with file.open("a") as lines:
        lines.write("\n")  # ends a line that is cut off
        for one in found:
            print(json.dumps(asdict(one)), file=lines, flush=True)
            yield one
