"""Libraries that are imported at first use."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from pathlib import Path

import pytest

from pyops._core.system import lazy
from pyops._core.system.lazy import loaded

ROOT = Path(__file__).parents[2]


def test_module_being_imported_by_another_thread_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-imported module does not have all of its names yet."""
    (tmp_path / "imported_slowly.py").write_text("import threading\nthreading.begun.set()\nthreading.go_on.wait(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "begun", begun, raising=False)
    monkeypatch.setattr(threading, "go_on", go_on, raising=False)
    assert loaded("imported_slowly") is None
    thread = threading.Thread(target=importlib.import_module, args=("imported_slowly",))
    thread.start()
    assert begun.wait(60)
    assert "imported_slowly" in sys.modules
    assert loaded("imported_slowly") is None
    go_on.set()
    thread.join()
    assert loaded("imported_slowly") is sys.modules.pop("imported_slowly")


def test_drivers_libraries_have_their_names_in_one_file() -> None:
    """Where each platform has its own."""
    hard = re.compile(r"libcuda\.so|nvcuda|libamdhip64")
    found = [path.name for path in (ROOT / "pyops").rglob("*.py") if hard.search(path.read_text(encoding="utf-8"))]
    assert found == ["lazy.py"]


@pytest.mark.parametrize(("is_hip", "present"), [(False, lazy.CUDA_LIBRARY), *((True, n) for n in lazy.HIP_LIBRARIES)])
def test_first_library_of_the_driver_that_loads(is_hip: bool, present: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> str:
        if name != present:
            raise OSError(name)
        return name

    monkeypatch.setattr(lazy.ctypes, "CDLL", load)
    assert lazy.driver_library(is_hip) == present
    with pytest.raises(OSError, match="cannot be loaded"):
        lazy.driver_library(not is_hip)
