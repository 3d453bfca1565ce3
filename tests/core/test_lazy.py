"""Libraries that are imported at first use."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path

import pytest

from pyops._core.system.lazy import loaded


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
