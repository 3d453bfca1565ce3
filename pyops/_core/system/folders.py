"""Locked cache folders, each used by one process at a time; files that end with a digest of their content."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


def _module(name: str) -> Any:
    """A module of one operating system; None on others."""
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


fcntl, msvcrt = _module("fcntl"), _module("msvcrt")  # the second on Windows

SUFFIX = ".pyops.tmp"
PATIENCE = 120.0  # seconds to wait for another process: several times what the slowest kernel takes to compile
_PAUSE = 0.02  # seconds between two attempts to lock a folder that another process holds


@contextmanager
def worked_in(folder: str) -> Iterator[str]:
    """Make and lock `folder` and yield it; it is removed at the end.

    The operating system releases the lock when the process ends, so the next process removes the files of a killed one.
    After `PATIENCE` seconds, and on file systems without locks, a new folder of another name is yielded instead.
    """
    lock = _taken(folder, PATIENCE)
    if lock is None:
        with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as another:
            yield another
        return
    try:
        for entry in os.scandir(folder):  # files of a process that was killed
            os.remove(entry)
        yield folder
    finally:
        _remove(folder, lock)


def sweep(parent: str) -> None:
    """Remove the folders that killed processes have left in `parent`."""
    for entry in os.scandir(parent):
        if entry.is_dir() and entry.name.endswith(SUFFIX) and (lock := _taken(entry.path, 0.0)) is not None:
            _remove(entry.path, lock)


def _taken(folder: str, seconds: float) -> int | None:
    """Make and lock the folder, and return the lock's descriptor; None if another process holds it for `seconds`."""
    end = time.monotonic() + seconds
    while True:
        with suppress(FileExistsError):  # another process removed it between mkdir and isdir
            os.makedirs(folder, exist_ok=True)
        try:
            return _locked(folder) if fcntl else _locked_byte(folder)
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError:  # a file system without locks
            return None
        if time.monotonic() >= end:
            return None
        time.sleep(_PAUSE)


def _locked(folder: str) -> int:
    """Lock the folder itself. Raises BlockingIOError if another process holds it, FileNotFoundError if it is gone."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous owner may have removed the folder: this may be the lock of a deleted folder.
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(folder)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _locked_byte(folder: str) -> int:
    """Windows, which opens no folders: lock a byte of a file next to the folder, chosen by the folder's name.

    Raises as `_locked` does.
    """
    descriptor = os.open(os.path.join(os.path.dirname(folder), "pyops.lock"), os.O_RDWR | os.O_CREAT)
    try:
        os.lseek(descriptor, zlib.crc32(os.path.basename(folder).encode()) % 2**31, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        os.close(descriptor)
        raise BlockingIOError(folder) from error
    if not os.path.isdir(folder):  # the previous owner has removed it
        _remove(folder, descriptor)
        raise FileNotFoundError(folder)
    return descriptor


def _remove(folder: str, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if fcntl:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile holds the descriptor, too
    else:
        msvcrt.locking(lock, msvcrt.LK_UNLCK, 1)
    os.close(lock)


def write_sealed(path: str, content: bytes) -> None:
    """Write `content` and, after it, its digest."""
    with open(path, "wb") as opened:
        opened.write(content + hashlib.sha256(content).digest())


def read_sealed(path: str) -> bytes | None:
    """The content of a file of `write_sealed`, without the digest; None if it is damaged or cannot be read."""
    try:
        with open(path, "rb") as opened:
            whole = opened.read()
    except OSError:
        return None
    content = whole[: -hashlib.sha256().digest_size]
    return content if whole == content + hashlib.sha256(content).digest() else None


def of_process(prefix: str) -> str:
    """A new temporary folder that is removed when this process ends, but not when a fork of it ends."""
    from multiprocessing.util import Finalize  # forked multiprocessing workers skip `atexit`

    made = tempfile.mkdtemp(prefix=prefix)
    Finalize(None, shutil.rmtree, (made,), {"ignore_errors": True}, exitpriority=-100)
    return made
