"""Type checking of a user's calls: correct ones pass, and each wrong one is an error in its line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pyops

ROOT = Path(__file__).parents[2]
RIGHT = """
from collections.abc import Mapping

import torch

import pyops
from pyops import CompileError, Op, OpError, rms_norm, warmup
from torch import Tensor


def normed(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    pyops.rms_norm(out, x, None, 1e-6)
    rms_norm(out, x, weight=x[0], epsilon=1e-6)
    pyops.silu_and_mul(out=out, input=x)
    return out


def returned(x: Tensor) -> tuple[Tensor, Tensor]:
    y: Tensor = pyops.rms_norm.new(x, x[0], epsilon=1e-6)
    weights, ids, _ = pyops.topk_softmax.new(y, renormalize=True, topk=2)
    quants, scale = pyops.dynamic_scaled_fp8_quant.new(weights, quant_dtype=torch.float8_e4m3fn)
    pyops.static_scaled_fp8_quant(quants, x, scale)
    columns: Tensor = pyops.permute_cols(x, ids, out=x)
    return pyops.scaled_fp8_quant(columns, scale)


ops: Mapping[str, Op] = pyops.registry
held: Op = pyops.rms_norm.op
names: list[str] = [one.kernel for one in warmup("rms_norm")]


@pyops.op(out="out", ulps=0)
def doubled(out: Tensor, x: Tensor, times: int = 2) -> None:
    out.copy_(x * times)


doubled(normed(torch.ones(2, 2)), torch.ones(2, 2), times=3)
try:
    doubled.reference(None, None)
except (OpError, CompileError) as error:
    print(error)
"""
WRONG = """
import torch

import pyops

x = torch.ones(2, 2)
pyops.rms_norm(x, x, None)
pyops.rms_norm(x, x, None, "1e-6")
pyops.rms_norm(x, x, None, 1e-6, 3)
pyops.rms_norm(x, x, None, eps=1e-6)
pyops.rms_nrom(x, x, None, 1e-6)
pyops.softcap(x, x)
pyops.rms_norm.new(x, None)
pyops.rms_norm.new(x, x, None, 1e-6)
pyops.fused_add_rms_norm.new(x, x, None, 1e-6)
pyops.topk_softmax.new(x)
pyops.topk_softmax.new(x, topk=2)[3]
pyops.scaled_fp8_quant(x)[2]
pyops.permute_cols(x)
pyops.registry["rms_norm"] = pyops.rms_norm.op
pyops.warmup(3)
pyops.op(output="out")
"""
COMMANDS = {
    "mypy": [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=mypy.ini"],
    "pyright": [sys.executable, "-m", "pyright", "--pythonpath", sys.executable],
    "basedpyright": [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable],
}


def errors(checker: str, text: str, folder: Path) -> set[int]:
    """The lines of the text in which the checker finds errors."""
    (folder / "user.py").write_text(text)
    # torch alone takes a minute to check.
    (folder / "mypy.ini").write_text("[mypy]\nmypy_path = " + str(ROOT) + "\n[mypy-torch.*]\nfollow_imports = skip\n")
    (folder / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}"], "typeCheckingMode": "standard"}}')
    command = [*COMMANDS[checker], "user.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = {int(line) for line in re.findall(r"user\.py:(\d+)(?::\d+)?(?: -)?:? error:", done.stdout)}
    assert bool(found) == bool(done.returncode), done.stdout + done.stderr
    return found


@pytest.mark.parametrize("checker", COMMANDS)
@pytest.mark.slow
def test_users_script_is_checked(checker: str, tmp_path: Path) -> None:
    pytest.importorskip(checker)
    if checker == "pyright" and not shutil.which("node"):
        pytest.skip("pyright needs node")
    assert errors(checker, RIGHT, tmp_path) == set()
    calls = [number for number, line in enumerate(WRONG.splitlines(), start=1) if line.startswith("pyops.")]
    assert errors(checker, WRONG, tmp_path) == set(calls)


@pytest.mark.slow
def test_every_name_is_seen(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    names = [name for name in dir(pyops) if name[0] != "_" and type(getattr(pyops, name)) is not type(pyops)]
    assert set(names) > set(pyops.registry)
    lines = ["import pyops", *(f"pyops.{name}" for name in names)]
    assert errors("mypy", "\n".join(lines) + "\n", tmp_path) == set()


def test_package_has_no_undeclared_names() -> None:
    names = {name for name in dir(pyops) if not name.startswith("_")}
    assert names >= {*pyops.registry, "OpError", "op", "registry", "warmup", "check"}
    assert not names & {"annotations", "axes", "compile_ahead", "example", "host", "ops", "cli", "tuning"}
    modules = {name for name in names if type(getattr(pyops, name)) is type(pyops)}
    assert modules <= {"check", "errors", "fused", "integrations", "models", "nn", "testing"}
