"""Caches that several processes share: one process compiles; killed processes and damaged files do no harm."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyops._core.system import folders

LAUNCH = """
import numpy, sys
import pyops
print(flush=True)
sys.stdin.readline()
out, x = numpy.zeros((1, 4), "float32"), numpy.ones((1, 8), "float32")
pyops.silu_and_mul(out, x)
print(abs(out - 0.7310586).max() < 1e-6)
"""


def started(folder: Path) -> subprocess.Popen[str]:
    """A process that is ready to launch its first kernel."""
    environment = {**os.environ, "PYOPS_CPU": "kernels", "PYOPS_LOG": "1", "CUPY_CACHE_DIR": str(folder)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-W", "error::UserWarning", "-c", LAUNCH]
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def compiles(*processes: subprocess.Popen[str]) -> int:
    """The number of compilations of the processes together; each must have the right result."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    count = 0
    for process in processes:
        out, log = process.communicate(timeout=300)
        assert (out, process.returncode) == ("True\n", 0), log
        count += log.count("host: compiled in")
    return count


@pytest.mark.slow
def test_one_of_many_processes_compiles(tmp_path: Path) -> None:
    assert compiles(*(started(tmp_path) for _ in range(4))) == 2  # the runtime and the kernel
    files = list((tmp_path / "pyops-host").iterdir())
    assert sorted(file.suffix for file in files) in ([".so", ".so"], [".gch", ".so", ".so"])


def damaged(content: bytes, how: str) -> bytes:
    middle = len(content) // 2
    if how == "flipped":
        flipped = bytes(byte ^ 0xFF for byte in content[middle : middle + 512])
        return content[:middle] + flipped + content[middle + len(flipped) :]
    return {"half": content[:middle], "empty": b"", "zeros": bytes(len(content))}[how]


@pytest.mark.parametrize("how", ["half", "flipped", "empty", "zeros"])
def test_damage_is_detected(tmp_path: Path, how: str) -> None:
    path = str(tmp_path / "file")
    content = bytes(range(256)) * 8
    folders.write_sealed(path, content)
    assert folders.read_sealed(path) == content
    Path(path).write_bytes(damaged(Path(path).read_bytes(), how))
    assert folders.read_sealed(path) is None


@pytest.mark.slow
def test_damaged_libraries_are_rebuilt(tmp_path: Path) -> None:
    """Loading one would kill the process."""
    compiles(started(tmp_path))
    for file in (tmp_path / "pyops-host").iterdir():
        file.write_bytes(damaged(file.read_bytes(), "flipped"))
    assert compiles(started(tmp_path)) == 2
    assert compiles(started(tmp_path)) == 0


@pytest.mark.slow
def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    process = started(tmp_path)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    host = tmp_path / "pyops-host"
    end = time.monotonic() + 60
    while not (host.is_dir() and any(entry.name.endswith(folders.SUFFIX) for entry in host.iterdir())):
        assert time.monotonic() < end
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (host / f"another{folders.SUFFIX}").mkdir()
    assert compiles(started(tmp_path)) > 0
    assert {entry.suffix for entry in host.iterdir()} <= {".so", ".gch"}


def test_unfinished_work_of_a_killed_process_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / f"folder{folders.SUFFIX}"
    folder.mkdir()
    (folder / "half.so").write_bytes(b"half")
    with folders.worked_in(str(folder)):
        assert list(folder.iterdir()) == []


def test_lock_on_a_deleted_folder_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its previous holder removes the folder between the moments when this process opens and locks it."""
    folder, flock, calls = tmp_path / f"folder{folders.SUFFIX}", fcntl.flock, list[int]()

    def late(descriptor: int, operation: int) -> None:
        if not calls:
            folder.rmdir()
        calls.append(operation)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with folders.worked_in(str(folder)):
        assert folder.is_dir()


def test_lock_is_released_though_a_child_has_its_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a folder that cannot be removed; a duplicated descriptor, such as a child's, shares the lock."""
    folder = str(tmp_path / f"folder{folders.SUFFIX}")
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    lock = folders._taken(folder, 0.0)
    assert lock is not None
    of_child = os.dup(lock)
    assert folders._taken(folder, 0.0) is None
    folders._remove(folder, lock)
    again = folders._taken(folder, 0.0)
    os.close(of_child)
    assert again is not None
    os.close(again)


def test_waiting_for_a_folder_ends_with_its_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path / f"folder{folders.SUFFIX}")
    monkeypatch.setattr(folders, "PATIENCE", 0.1)
    with folders.worked_in(folder) as first:
        assert first == folder
        folders.sweep(str(tmp_path))
        assert os.path.isdir(folder)
        with folders.worked_in(folder) as second:
            assert second != folder
    with folders.worked_in(folder) as again:
        assert again == folder
    assert list(tmp_path.iterdir()) == []


class FakeMsvcrt:
    """Windows's locks of bytes of a file: they belong to a descriptor, and exclude those of the same process, too."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], int] = {}  # (file, byte) -> descriptor

    def locking(self, descriptor: int, mode: int, count: int) -> None:
        byte = os.fstat(descriptor).st_ino, os.lseek(descriptor, 0, os.SEEK_CUR)
        assert count == 1
        assert byte[1] < 2**31
        if mode == self.LK_UNLCK:
            assert self.held.pop(byte) == descriptor
        elif byte in self.held:
            raise OSError(errno.EACCES, "locked")
        else:
            self.held[byte] = descriptor


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> FakeMsvcrt:
    """A platform with the locks of Windows, which cannot open folders.

    Only the module sees it: this process's other threads and finalizers open and remove folders, too.
    """
    made = FakeMsvcrt()

    def open_file(path: str, *more: Any, **named: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "a folder", path)
        return os.open(path, *more, **named)

    monkeypatch.setattr(folders, "fcntl", None)
    monkeypatch.setattr(folders, "msvcrt", made)
    monkeypatch.setattr(folders, "os", SimpleNamespace(**vars(os) | {"open": open_file}))
    monkeypatch.setattr(folders, "shutil", SimpleNamespace(rmtree=rmtree_by_path))
    return made


def test_locks_of_windows(windows: FakeMsvcrt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One holder of a folder at a time, others at the same time, and what a killed process has left is removed."""
    folder, other = (str(tmp_path / f"{name}{folders.SUFFIX}") for name in ("folder", "other"))
    os.mkdir(folder)
    Path(folder, "left").touch()
    monkeypatch.setattr(folders, "PATIENCE", 0.05)
    with folders.worked_in(folder) as first, folders.worked_in(other) as second:
        assert (first, second) == (folder, other)
        assert os.listdir(folder) == []
        assert len(windows.held) == 2
        folders.sweep(str(tmp_path))
        assert os.path.isdir(folder)
        with folders.worked_in(folder) as instead:
            assert instead != folder
    assert not windows.held
    with folders.worked_in(folder) as again:
        assert again == folder
    assert os.listdir(tmp_path) == ["pyops.lock"]


def test_lock_of_windows_on_a_removed_folder_does_not_count(
    windows: FakeMsvcrt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its previous holder removes the folder before this process locks it."""
    folder, locking, calls = tmp_path / f"folder{folders.SUFFIX}", windows.locking, list[int]()

    def late(descriptor: int, mode: int, count: int) -> None:
        if not calls:
            folder.rmdir()
        calls.append(mode)
        locking(descriptor, mode, count)

    monkeypatch.setattr(windows, "locking", late)
    with folders.worked_in(str(folder)):
        assert folder.is_dir()
        assert len(windows.held) == 1
    assert not windows.held


def rmtree_by_path(folder: str, ignore_errors: bool) -> None:
    """As shutil.rmtree does on Windows, without opening folders."""
    assert ignore_errors
    with suppress(OSError):
        for entry in os.scandir(folder):
            os.remove(entry)
        os.rmdir(folder)


FORKED = (
    "import os, tempfile, warnings; warnings.simplefilter('ignore')\n"
    "from pyops.host import build; from pyops._core.system import lazy\n"
    "assert os.path.isdir(build.folder()) and lazy.cupy.__name__\n"
    "if not (child := os.fork()): raise SystemExit\n"
    "os.waitpid(child, 0); assert os.path.isdir(build.folder())"
)
WORKER = (
    "import multiprocessing, os, warnings; warnings.simplefilter('ignore')\n"
    "from pyops.host import build; from pyops._core.system import lazy\n"
    "work = lambda: os.path.isdir(build.folder()) and lazy.cupy.__name__ or os._exit(1)\n"
    "worker = multiprocessing.get_context('fork').Process(target=work)\n"
    "worker.start(); worker.join(); assert worker.exitcode == 0"
)


@pytest.mark.parametrize("code", [FORKED, WORKER], ids=["forked", "worker"])
def test_substitute_of_an_unwritable_cache_is_removed_at_exit(tmp_path: Path, code: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "CUPY_CACHE_DIR": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "temporary")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert list((tmp_path / "temporary").iterdir()) == []
