"""The wheel: pure Python, small, with every kernel source in it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import kernels_cu
import pyops
from pyops._core import errors

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_package_data_covers_every_source() -> None:
    package_data = PROJECT["tool"]["setuptools"]["package-data"]
    folder = ROOT / "kernels_cu"
    packed = {file for pattern in package_data["kernels_cu"] for file in folder.glob(pattern)}
    assert packed == {file for file in folder.glob("*/*") if file.is_file() and file.suffix != ".pyc"}
    kernels = sorted(file.relative_to(folder).as_posix() for file in packed if file.suffix in (".cu", ".cuh"))
    assert kernels == kernels_cu.names()
    assert package_data["pyops"] == ["py.typed", "*.pyi", "tuning/*.json"]
    assert (ROOT / "pyops/py.typed").exists()


def test_version() -> None:
    assert PROJECT["project"]["version"] == pyops.__version__


def test_pip_lines_name_the_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PROJECT["project"]["name"] == errors.DISTRIBUTION
    assert errors.pip_line("cuda13") == f'pip install -e "{ROOT}[cuda13]"'
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "pyops/_core/errors.py"))
    assert errors.pip_line("cuda13") == 'pip install "pyops-kernels[cuda13]"'


def test_script_runs_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, function = PROJECT["project"]["scripts"]["pyops"].partition(":")
    monkeypatch.setattr(sys, "argv", ["pyops", "list"])
    handled: list[int] = []
    monkeypatch.setattr("signal.signal", lambda number, action: handled.append(number))
    assert getattr(importlib.import_module(module), function)() == 0
    assert handled == [signal.SIGPIPE]
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} >= set(pyops.registry)


def _source(folder: Path) -> Path:
    """A copy of the packaged sources, because a build writes files next to them."""
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools is too old to build this project")
    source = folder / "source"
    source.mkdir()
    for name in ("pyops", "kernels_cu"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


def _pip(source: Path, *words: str, python: Path = Path(sys.executable)) -> None:
    """Run a pip command on the project in `source`, by any Python, with this Python's packages."""
    command = [python, "-m", "pip", *words, "--no-build-isolation", "--no-deps", "--no-index"]
    packages = {"PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False, env=os.environ | packages)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with an editable install and nothing else."""
    folder = tmp_path_factory.mktemp("editable")
    venv.create(folder / "venv")
    python = folder / "venv/bin/python"
    _pip(_source(folder), "install", "-e", ".", python=python)
    return python


@pytest.mark.skipif(sys.platform == "win32", reason="the environment has another layout")
@pytest.mark.parametrize(
    ("checker", "option", "refusal"),
    [
        ("mypy", "--python-executable", 'has no attribute "no_such_op"'),
        ("pyright", "--pythonpath", '"no_such_op" is not a known attribute'),
    ],
    ids=["mypy", "pyright"],
)
@pytest.mark.slow
def test_type_checkers_find_an_editable_install(
    editable: Path, tmp_path: Path, checker: str, option: str, refusal: str
) -> None:
    """From a user's folder, with the signatures of the ops."""
    try:
        importlib.import_module(checker)
        subprocess.run([sys.executable, "-m", checker, "--version"], check=True, capture_output=True, timeout=60)
    except (ImportError, subprocess.SubprocessError):
        pytest.skip(f"{checker} does not run here")
    script = tmp_path / "script.py"
    script.write_text("import pyops\nreveal_type(pyops.rms_norm.__call__)\npyops.no_such_op\n")
    command = [sys.executable, "-m", checker, option, editable, script.name]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert re.search(r"script.py:2:.*out: .*, input: .*, weight: .*, epsilon: float", printed), printed
    assert re.search(f"script.py:3:.*{refusal}", printed), printed
    assert printed.count("error") == 2, f"one error, and their count: {printed}"


def test_sdist(tmp_path: Path) -> None:
    """It holds what the wheel is built of, and no tests, which setuptools would pick by their names."""
    source = _source(tmp_path)
    (source / "tests").mkdir()
    (source / "tests" / "test_norm.py").touch()
    code = "from setuptools.build_meta import build_sdist; build_sdist('.')"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    root = f"pyops_kernels-{pyops.__version__}"
    with tarfile.open(source / f"{root}.tar.gz") as archive:
        held = {name.removeprefix(f"{root}/") for name in archive.getnames()}
    folders = {name.split("/")[0] for name in held if "/" in name}
    assert folders == {"pyops", "kernels_cu", "pyops_kernels.egg-info"}
    assert {f"kernels_cu/{name}" for name in kernels_cu.names()} | {"LICENSE", "README.md"} <= held


def test_the_page_lists_every_extra() -> None:
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [
        *("cuda13", "cuda12"),
        *(name for name in PROJECT["project"]["optional-dependencies"] if not name.startswith("cuda")),
    ]


def test_pip_may_choose_the_cuda_13_that_torch_asks_for() -> None:
    """It asks for packages that require nothing themselves: pip replaces those, but instead of a toolkit the torch."""
    extras = PROJECT["project"]["optional-dependencies"]
    assert [name for name in extras["cuda13"] if "toolkit" in name] == []
    assert [name.partition("==")[2] for name in extras["cuda13"] if name.startswith("nvidia-")] == ["13.*", "13.*"]
    assert [name.partition("]")[2] for name in extras["cuda12"] if "toolkit" in name] == [">=12.8,<13"]


def test_wheel(tmp_path: Path) -> None:
    _pip(_source(tmp_path), "wheel", "-w", str(tmp_path), ".")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"pyops_kernels-{pyops.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 2_400_000
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
            "[vllm.general_plugins]",
            "pyops",
            "=",
            "pyops.integrations.vllm.plugin:activate",
            "[vllm.platform_plugins]",
            "pyops",
            "=",
            "pyops.integrations.vllm.plugin:stand_in",
        ]
        fields = set(archive.read(f"{info}/METADATA").decode().partition("\n\n")[0].splitlines())
    assert fields >= {"Name: pyops-kernels", "License-Expression: Apache-2.0", "Requires-Python: >=3.11"}
    assert "Description-Content-Type: text/markdown" in fields
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert {name.split("/")[0] for name in held} == {"pyops", "kernels_cu", info}
