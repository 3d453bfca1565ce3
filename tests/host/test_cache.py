"""Kernels run on the CPU with any state of the cache folder: if it cannot be used, they are compiled per process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyops.host.toolchain import toolchains

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not toolchains(), reason="no C++ compiler")]

PRELUDE = """
import errno, os, shutil, tempfile
import numpy
import pyops
from pyops._core.system import folders
from pyops.host import build

cache = os.path.join(os.environ["CUPY_CACHE_DIR"], "pyops-host")
right = {"relu2": 4.0, "silu": 2 / (1 + numpy.exp(-2.0)), "gelu_quick": 2 / (1 + numpy.exp(-3.404))}

def run(*names):
    for name in names:
        out, x = numpy.empty((1, 8), "float32"), numpy.full((1, 8), 2, "float32")
        getattr(pyops, name)(out, x)
        assert abs(out - right[name]).max() < 1e-6, name

def refuse(module, name, code, place):
    function = getattr(module, name)
    def refusing(*args, **options):
        if place(*args, **options).startswith(cache):
            raise OSError(code, os.strerror(code), cache)
        return function(*args, **options)
    setattr(module, name, refusing)
"""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the runtime and relu2."""
    folder = tmp_path_factory.mktemp("cache")
    assert warnings_of(folder, "run('relu2')") == []
    return folder


def warnings_of(folder: Path, code: str, **environment: str) -> list[str]:
    """Run `code` after the prelude with kernels; returns the printed warnings."""
    environment = {**os.environ, "PYOPS_CPU": "kernels", "CUPY_CACHE_DIR": str(folder), **environment}
    command = [sys.executable, "-W", "always::UserWarning", "-c", PRELUDE + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return re.findall(r"UserWarning: (.*)", done.stderr)


def test_deleted_folder_is_made_again(warm: Path) -> None:
    assert warnings_of(warm, "run('relu2'); shutil.rmtree(cache); run('silu'); assert os.listdir(cache)") == []


def test_folder_that_cannot_be_made_again_warns_once(warm: Path) -> None:
    code = "run('relu2'); shutil.rmtree(cache); open(cache, 'w').close(); run('silu', 'gelu_quick'); os.remove(cache)"
    (warning,) = warnings_of(warm, code)
    assert re.match(rf"kernel cache {re.escape(str(warm))}/pyops-host: .*; kernels are cached in /", warning)


# Every file there can be read, and none can be created.
READ_ONLY = """
refuse(tempfile, "TemporaryFile", errno.EROFS, lambda *, dir: dir)
refuse(folders, "worked_in", errno.EROFS, lambda folder: folder)
"""


def test_read_only_folder_is_read(warm: Path) -> None:
    assert warnings_of(warm, "run('relu2')") == []
    before = sorted(warm.rglob("*"))
    assert warnings_of(warm, READ_ONLY + "run('relu2')") == []
    (warning,) = warnings_of(warm, READ_ONLY + "run('relu2', 'gelu_quick')")
    assert "Read-only file system" in warning
    assert sorted(warm.rglob("*")) == before


FULL = """
refuse(folders, "write_sealed", errno.ENOSPC, lambda path, content: path)
"""
# A compiler that cannot write its output there, with the messages of g++ and clang++.
COMPILER = """#!/bin/sh
case "$*" in *"-o $FULL"*) echo "fatal error: error writing to out.o: No space left on device" >&2; exit 1;; esac
exec "$COMPILER" "$@"
"""


@pytest.mark.parametrize("seen_by", ["us", "the compiler"])
def test_full_folder_warns_once(warm: Path, tmp_path: Path, seen_by: str) -> None:
    warnings_of(warm, "run('relu2')")
    first = next(iter(toolchains().values()))
    if len(first.command) != 1:
        pytest.skip("no compiler that is one program")
    code, environment = FULL, {}
    if seen_by == "the compiler":
        (tmp_path / first.name).write_text(COMPILER)
        (tmp_path / first.name).chmod(0o755)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "COMPILER": first.command[0], "FULL": str(warm)}
        code = 'refuse(build, "probe", errno.ENOSPC, lambda folder: folder)\n'
    (warning,) = warnings_of(warm, code + "run('relu2', 'silu', 'gelu_quick')", **environment)
    assert "No space left on device" in warning
    assert not [entry for entry in (warm / "pyops-host").iterdir() if entry.is_dir()]


def test_process_without_file_descriptors_is_told(warm: Path) -> None:
    code = """
import resource
run("relu2")
resource.setrlimit(resource.RLIMIT_NOFILE, (5, 5))
try:
    run("gelu_quick")
except pyops.CompileError as error:
    assert "the system refuses what this needs: [Errno 24] Too many open files" in str(error), error
else:
    raise AssertionError
"""
    assert warnings_of(warm, code) == []
