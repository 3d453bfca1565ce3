"""Commands with standard output or error missing or full."""

from __future__ import annotations

import subprocess
import sys

import pytest


def _run(arguments: str, redirections: str) -> tuple[int, bool, str]:
    """(status, whether standard output received anything, the text of standard error)."""
    command = f"{sys.executable} -m pyops {arguments} {redirections}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    return done.returncode, bool(done.stdout), done.stderr.strip()


NO_OP = "pyops: nothing: is no op"


@pytest.mark.parametrize(
    ("redirections", "listed", "refused"),
    [
        (">&-", (0, False, ""), (2, False, NO_OP)),
        ("2>&-", (0, True, ""), (2, False, "")),
        ("<&- >&- 2>&-", (0, False, ""), (2, False, "")),
        (">/dev/full", (2, False, "the output cannot be written: No space left on device"), (2, False, NO_OP)),
        (">/dev/full 2>/dev/full", (2, False, ""), (2, False, "")),
        ("2>/dev/full", (0, True, ""), (2, False, "")),
    ],
)
def test_missing_or_full_stream(
    redirections: str, listed: tuple[int, bool, str], refused: tuple[int, bool, str]
) -> None:
    """No command ends in a traceback, and no error goes to standard output."""
    assert _run("list", redirections) == listed
    assert _run("show nothing", redirections) == refused
