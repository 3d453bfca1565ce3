"""Folders of caches, in each of which one process works at a time; files that end with a digest of what they hold."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SUFFIX = ".pyops.tmp"
PATIENCE = 120.0  # seconds to wait for another process: several times what the slowest kernel takes to compile
_PROBE_BYTES = 4 << 20
_PAUSE = 0.02  # seconds between two looks at a folder that another process works in


@contextmanager
def worked_in(folder: str) -> Iterator[str]:
    """Make `folder` and yield it when no other process works in it; it is removed at the end.

    The system releases the lock on the folder when its process ends: files of a killed process are removed by the next
    one. After `PATIENCE` seconds, and on file systems without locks, another new folder is yielded instead.
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
    """Make and lock the folder, and return its descriptor; None if another process holds it for `seconds`."""
    try:
        import fcntl
    except ImportError:
        return None
    end = time.monotonic() + seconds
    while True:
        with suppress(FileExistsError):  # it was removed while this process looked whether it is a folder
            os.makedirs(folder, exist_ok=True)
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The previous owner may have removed the folder: this may be the lock of a deleted folder.
                if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                    return descriptor
            except (BlockingIOError, FileNotFoundError):
                pass
            except OSError:  # a file system without locks
                os.close(descriptor)
                return None
            os.close(descriptor)
        if time.monotonic() >= end:
            return None
        time.sleep(_PAUSE)


def _remove(folder: str, lock: int) -> None:
    import fcntl

    shutil.rmtree(folder, ignore_errors=True)
    fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile holds the descriptor, too
    os.close(lock)


def write_sealed(path: str, content: bytes) -> None:
    """Write a file that ends with the digest of all before."""
    with open(path, "wb") as opened:
        opened.write(content + hashlib.sha256(content).digest())


def read_sealed(path: str) -> bytes | None:
    """What `write_sealed` wrote to the file, without the digest; None where it is damaged or cannot be read."""
    try:
        with open(path, "rb") as opened:
            whole = opened.read()
    except OSError:
        return None
    content = whole[: -hashlib.sha256().digest_size]
    return content if whole == content + hashlib.sha256(content).digest() else None


def probe(folder: str) -> None:
    """Raises OSError where the folder is gone, or cannot hold a file of several times what a kernel takes."""
    with tempfile.TemporaryFile(dir=folder) as opened:
        opened.write(bytes(_PROBE_BYTES))
        opened.flush()


def of_process(prefix: str) -> str:
    """A new folder among the temporary ones, which is removed when the process ends, and not when a fork of it does."""
    from multiprocessing.util import Finalize  # a worker of multiprocessing that was forked ends without `atexit`

    made = tempfile.mkdtemp(prefix=prefix)
    Finalize(None, shutil.rmtree, (made,), {"ignore_errors": True}, exitpriority=-100)
    return made
