"""The wheel: pure Python, small, with every kernel source in it."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import kernels_cu
import pyops
from pyops._core import errors

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_package_data_covers_every_source() -> None:
    package_data = PROJECT["tool"]["setuptools"]["package-data"]
    folder = ROOT / "kernels_cu"
    packed = {file for pattern in package_data["kernels_cu"] for file in folder.glob(pattern)}
    assert packed == {file for file in folder.glob("*/*") if file.is_file() and file.suffix != ".pyc"}
    kernels = sorted(file.relative_to(folder).as_posix() for file in packed if file.suffix in (".cu", ".cuh"))
    assert kernels == kernels_cu.names()
    assert package_data["pyops"] == ["py.typed", "tuning/*.json"]
    assert (ROOT / "pyops/py.typed").exists()


def test_version() -> None:
    assert PROJECT["project"]["version"] == pyops.__version__


def test_pip_lines_name_the_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PROJECT["project"]["name"] == errors.DISTRIBUTION
    assert errors.pip_line("cuda13") == f'pip install -e "{ROOT}[cuda13]"'
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "pyops/_core/errors.py"))
    assert errors.pip_line("cuda13") == 'pip install "pyops-kernels[cuda13]"'


def test_the_script_runs_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, function = PROJECT["project"]["scripts"]["pyops"].partition(":")
    monkeypatch.setattr(sys, "argv", ["pyops", "list"])
    handled: list[int] = []
    monkeypatch.setattr("signal.signal", lambda number, action: handled.append(number))
    assert getattr(importlib.import_module(module), function)() == 0
    assert handled == [signal.SIGPIPE]
    assert len(capsys.readouterr().out.splitlines()) == len(pyops.registry)


def test_wheel(tmp_path: Path) -> None:
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools is too old to build this project")
    source = tmp_path / "source"  # a build leaves files beside what it builds
    source.mkdir()
    for name in ("pyops", "kernels_cu"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "-w",
        tmp_path,
        ".",
    ]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"pyops_kernels-{pyops.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 2_000_000
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {f"kernels_cu/{name}" for name in kernels_cu.names()} <= held
    assert {f"kernels_cu/host/{file.name}" for file in (ROOT / "kernels_cu/host").iterdir()} <= held
    assert {file.relative_to(ROOT).as_posix() for file in (ROOT / "pyops").rglob("*.py")} <= held
    assert "pyops/py.typed" in held
    info = f"pyops_kernels-{pyops.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(f"{info}/entry_points.txt").decode().split() == [
            "[console_scripts]",
            "pyops",
            "=",
            "pyops.__main__:script",
        ]
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert {name.split("/")[0] for name in held} == {"pyops", "kernels_cu", info}
