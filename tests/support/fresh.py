"""Code in a process of its own that has imported torch and nothing of this project.

The process is forked from one that has imported torch, because the import takes two seconds.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Each line of the input is a job: code, arguments, environment, whether warnings are errors, and the files of the
# output. Its answer is the exit status.
_SERVER = """
import json, os, sys, warnings
import torch

def become(code, arguments, environment, strict, *outputs):
    for number, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if strict:
        warnings.simplefilter("error")
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})

for line in sys.stdin:
    child = os.fork()
    if not child:
        sys.stdin.close()
        become(*json.loads(line))
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _server() -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", _SERVER], cwd=ROOT, text=True, **pipes)
    atexit.register(process.kill)
    return process


def run(
    folder: Path, code: str, environment: Mapping[str, str], arguments: Sequence[str] = (), *, strict: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the code as ``python -c`` would, as ``python -W error`` if `strict`. The folder takes its output."""
    outputs = [folder / "stdout", folder / "stderr"]
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([code, list(arguments), dict(environment), strict, *map(str, outputs)]) + "\n")
    server.stdin.flush()
    status = int(server.stdout.readline())
    return subprocess.CompletedProcess(code, status, *(output.read_text() for output in outputs))
