"""The hook `.githooks/commit-msg`, in a repository of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOOK = Path(__file__).parents[2] / ".githooks" / "commit-msg"
KERNEL = {"kernels_cu/norm/rms_norm.cu": "// text\n"}
CONSTANT = {"pyops/ops/norm/rms_norm.py": "_MAX_ROWS = 16  # measured\n"}
OTHER = {"pyops/ops/norm/rms_norm.py": "rows = 16\n", "pyops/nn/norm.py": "SIZE = 4\n"}


def run(folder: Path, files: dict[str, str], message: str) -> str:
    """What the hook says about a commit that adds `files`: nothing if it passes."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True, env=clean)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "add", "."], cwd=folder, check=True, env=clean)
    path = folder / ".git" / "COMMIT_EDITMSG"
    path.write_text(message)
    words = [sys.executable, str(HOOK), str(path)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, env=clean)
    assert done.returncode == bool(done.stderr)
    return done.stderr


def test_hook_is_executable() -> None:
    assert os.access(HOOK, os.X_OK)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (OTHER, f"{'x' * 72}\n# {'y' * 80}\n"),
        (KERNEL, "rms_norm: keep the row in registers\n\n1.2 us instead of 1.4.\n"),
        (CONSTANT, "rms_norm: 16 rows\n\n1.2 us instead of 1.4.\n"),
        (KERNEL, f"Merge {'x' * 80}\n"),
        (KERNEL, "fixup! rms_norm: keep the row in registers\n"),
    ],
)
def test_good_message_passes(tmp_path: Path, files: dict[str, str], message: str) -> None:
    assert run(tmp_path, files, message) == ""


@pytest.mark.parametrize(
    ("files", "message", "fault"),
    [
        (OTHER, "x" * 73, "the subject has 73 characters, at most 72 are allowed"),
        (OTHER, "subject\nbody\n", "a blank line must separate subject and body"),
        (KERNEL, "rms_norm: faster\n\n# a comment is no body\n", "a kernel changes"),
        (CONSTANT, "rms_norm: 16 rows\n", "a constant in pyops/ops changes"),
    ],
)
def test_bad_message_is_refused(tmp_path: Path, files: dict[str, str], message: str, fault: str) -> None:
    assert run(tmp_path, files, message).startswith(f"commit-msg: {fault}")
