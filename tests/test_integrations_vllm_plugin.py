"""The plugin by which vLLM runs on this library's kernels, as vLLM finds it, with a stand-in for vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pyops._core import config

ROOT = Path(__file__).parents[1]
GROUP = "vllm.general_plugins"
# What vLLM does with its ops and its plugins, as far as they matter here. Its kernels write 7.
STAND_IN = """
import torch

library = torch.library.Library("_C", "DEF")
library.define("silu_and_mul(Tensor! result, Tensor input) -> ()")
library.define("rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()")
library.define("gelu_and_mul(Tensor! out, Tensor input, int unknown) -> ()")

def fill(result, *args):
    result.fill_(7)

for name in ("silu_and_mul", "rms_norm", "gelu_and_mul"):
    library.impl(name, fill, "CPU")
"""
CALLS = """
import importlib.metadata, logging, pathlib, sys
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
# The package may be installed, too: that installation is not the one under test.
(info,) = pathlib.Path(sys.argv[1]).glob("*.dist-info")
(found,) = importlib.metadata.PathDistribution(info).entry_points.select(group="vllm.general_plugins")
activate = found.load()
print("torch" in sys.modules)
activate()
activate()
import torch, vllm._custom_ops
out, x = torch.empty(2, 4), torch.ones(2, 8)
torch.ops._C.silu_and_mul(out, x)
print("silu", round(out[0, 0].item(), 4))
torch.ops._C.rms_norm(out, x[:, :4], torch.ones(4), 0.0)
print("norm", out[0, 0].item())
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with what an installation of this package leaves for importlib.metadata, and a stand-in for vLLM."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    info = tmp_path / "pyops_stand_in-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pyops-stand-in\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()))
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("")
    (tmp_path / "vllm/_custom_ops.py").write_text(STAND_IN)
    return tmp_path


def run(site: Path, ops: str | None) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "PYOPS_VLLM"}
    env |= {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"} | ({} if ops is None else {"PYOPS_VLLM": ops})
    return subprocess.run(
        [sys.executable, "-c", CALLS, str(site)], capture_output=True, text=True, check=False, env=env
    )


@pytest.mark.slow
def test_without_the_switch_nothing_happens(site: Path) -> None:
    done = run(site, None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["False", "silu 7.0", "norm 7.0", ""]


@pytest.mark.parametrize(
    ("value", "ops"),
    [("", ()), (" , ", ()), ("all", ("all",)), ("rms_norm, silu_and_mul,", ("rms_norm", "silu_and_mul"))],
)
def test_the_switch(value: str, ops: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_VLLM", value)
    assert config.vllm_ops() == ops


@pytest.mark.parametrize(
    ("ops", "replaced", "norm"),
    [("all", ["silu_and_mul", "rms_norm"], 1.0), ("silu_and_mul", ["silu_and_mul"], 7.0)],
)
@pytest.mark.slow
def test_ops_are_replaced_and_logged(site: Path, ops: str, replaced: list[str], norm: float) -> None:
    """Those of a known schema, each with one line."""
    done = run(site, ops)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert sorted(lines[1:-3]) == sorted(f"vllm.pyops INFO _C::{name} runs on pyops" for name in replaced)
    assert lines[-3:] == ["silu 0.7311", f"norm {norm}", ""]


@pytest.mark.slow
def test_a_name_that_cannot_be_served_is_an_error(site: Path) -> None:
    """Any that `override` refuses: vLLM does not start as if nothing had been asked for."""
    done = run(site, "silu_and_mul,gelu_and_mul")
    assert done.returncode != 0
    assert "override: gelu_and_mul: expected the schema" in done.stderr
