"""A process that forks while its other threads are at work."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pyops._core import locks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")

LOAD = """
import os, signal, threading, time
import numpy
import pyops

big, small = (numpy.linspace(-4, 4, size, dtype=numpy.float32).reshape(-1, 128) for size in (128 * 64, 128))
expected, out = numpy.empty((1, 64), "float32"), numpy.empty((1, 64), "float32")
pyops.silu_and_mul(expected, small)
done = threading.Event()

def launch():
    own = numpy.empty((64, 64), "float32")
    while not done.is_set():
        pyops.silu_and_mul(own, big)

threads = [threading.Thread(target=launch) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(20):
    time.sleep(0.01)
    child = os.fork()
    if not child:
        signal.alarm(20)
        pyops.silu_and_mul(out, small)
        pyops.relu2(out[0, :8].copy(), small[0, :8])  # a kernel that the parent may have loaded or not
        try:
            pyops.silu_and_mul(out, small[:, :6])
        except pyops.OpError:
            os._exit(0 if (out == expected).all() else 1)
        os._exit(2)
    status = os.waitpid(child, 0)[1]
    assert status == 0, status
done.set()
for thread in threads:
    thread.join()
print("all ended")
"""


@pytest.mark.slow
def test_children_of_a_process_that_launches() -> None:
    environment = {**os.environ, "PYOPS_CPU": "kernels"}
    command = [sys.executable, "-W", "ignore", "-c", LOAD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "all ended\n", done.stderr


def in_a_fork(lock: threading.Lock) -> bool:
    """Whether a child can take the lock that a thread of the parent holds while it forks."""
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        os._exit(0 if lock.acquire(timeout=5) else 1)
    forked.set()
    thread.join()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_child_finds_locks_open() -> None:
    assert in_a_fork(locks.new())
    assert not in_a_fork(threading.Lock())


def test_every_lock_of_the_package_is_listed() -> None:
    files = Path(locks.__file__).parents[1].rglob("*.py")
    assert [file.name for file in files if "Lock()" in file.read_text(encoding="utf-8")] == ["locks.py"]
