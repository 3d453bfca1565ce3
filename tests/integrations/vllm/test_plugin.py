"""The plugins by which vLLM runs on this library, as vLLM finds them, with a stand-in for vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pyops import tuning
from pyops._core import config
from pyops._core.errors import SwitchError
from pyops._core.system import device
from pyops.integrations.vllm import choice, parts, plugin, stand_ins
from pyops.integrations.vllm.choice import Choice
from tests.support import fresh

ROOT = Path(__file__).parents[3]
GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
# The relevant part of vLLM's ops and plugins. Its kernels write 7.
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
PLATFORMS = "from types import SimpleNamespace\ncurrent_platform = SimpleNamespace(is_cuda=lambda: False)\n"
ROTARY = """
import torch

library = torch.library.Library("vllm", "FRAGMENT")
library.define("flashinfer_rotary_embedding(Tensor positions, Tensor(a1!) query, Tensor(a2!) key, SymInt head_size,"
               " Tensor cos_sin_cache, bool is_neox) -> ()")
"""
FIND = """
import importlib.metadata, logging, pathlib, sys
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
# The package may be installed, too: that installation is not the one under test.
(info,) = pathlib.Path(sys.argv[1]).glob("pyops*.dist-info")
points = importlib.metadata.PathDistribution(info).entry_points
((stand_in,), (activate,)) = ([one.load() for one in points.select(group="vllm." + group)]
                              for group in ("platform_plugins", "general_plugins"))
print("torch" in sys.modules, stand_in())
"""
CALLS = """
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
    """A folder with the metadata of an installation of this package, and a stand-in for vLLM."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "pyops_stand_in-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pyops-stand-in\nVersion: 1\n")
    lines = [line for group in GROUPS for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points[group].items()))]
    (info / "entry_points.txt").write_text("\n".join(lines))
    vllm = tmp_path / "vllm"
    rotary = vllm / "model_executor/layers/rotary_embedding"
    rotary.mkdir(parents=True)
    (rotary / "common.py").write_text(ROTARY)
    (vllm / "__init__.py").write_text("")
    (vllm / "platforms.py").write_text(PLATFORMS)
    (vllm / "_custom_ops.py").write_text(STAND_IN)
    return tmp_path


def without_libraries(site: Path, version: str = "0.22.1") -> None:
    """The stand-in for vLLM expects its ops in libraries that it imports, and that are absent."""
    (site / "vllm/_custom_ops.py").write_text(
        "import vllm._C, vllm._C_stable_libtorch, vllm._moe_C, vllm._moe_C_stable_libtorch\n"
    )
    info = site / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def run(site: Path, words: str | None, code: str = CALLS, has_torch: bool = True) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "PYOPS_VLLM"}
    env |= {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"} | ({} if words is None else {"PYOPS_VLLM": words})
    if has_torch:
        return fresh.run(site, FIND + code, env, [str(site)])
    return subprocess.run(
        [sys.executable, "-c", FIND + code, str(site)], capture_output=True, text=True, check=False, env=env
    )


@pytest.mark.slow
@pytest.mark.parametrize(("given", "found"), [("1", "1"), ("0", "None")])
def test_batch_invariance_of_vllm_is_that_of_the_ops(
    site: Path, given: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", given)
    monkeypatch.delenv("PYOPS_BATCH_INVARIANT", raising=False)
    code = "activate()\nimport os\nprint('invariant', os.environ.get('PYOPS_BATCH_INVARIANT'))\n"
    done = run(site, "ops", code)
    assert done.returncode == 0, done.stderr
    assert f"invariant {found}\n" in done.stdout


@pytest.mark.slow
def test_a_part_with_another_interface_is_left_to_vllm(site: Path) -> None:
    """The stand-in for vLLM has no samplers."""
    done = run(site, "sampler,silu_and_mul", "activate()\n")
    assert done.returncode == 0, done.stderr
    assert "vllm.pyops WARNING sampler is left to vLLM, which has another interface: " in done.stdout


@pytest.mark.slow
def test_without_the_switch_nothing_happens(site: Path) -> None:
    done = run(site, None, has_torch=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["False None", "silu 7.0", "norm 7.0", ""]


@pytest.mark.parametrize(
    ("value", "words"),
    [("", ()), (" , ", ()), ("all", ("all",)), ("rms_norm, -silu_and_mul,", ("rms_norm", "-silu_and_mul"))],
)
def test_switch_selects_parts(value: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_VLLM", value)
    assert config.vllm() == words


OPS, PARTS = ("rms_norm", "silu_and_mul"), ("attention", "sampler")


@pytest.mark.parametrize(
    ("words", "every_op", "ops", "without", "chosen"),
    [
        ("all", True, (), (), PARTS),
        ("ops", True, (), (), ()),
        ("ops,sampler", True, (), (), ("sampler",)),
        ("rms_norm", False, ("rms_norm",), (), ()),
        ("rms_norm,silu_and_mul,-rms_norm", False, ("silu_and_mul",), ("rms_norm",), ()),
        ("attention", False, (), (), ("attention",)),
        ("all,-attention", True, (), (), ("sampler",)),
        ("-rms_norm,all", True, (), ("rms_norm",), PARTS),
        ("all,-ops", False, (), (), PARTS),
        ("all,-ops,rms_norm", False, ("rms_norm",), (), PARTS),
    ],
)
def test_choice_of_parts(
    words: str, every_op: bool, ops: tuple[str, ...], without: tuple[str, ...], chosen: tuple[str, ...]
) -> None:
    assert Choice.read(words.split(","), OPS, PARTS) == Choice(every_op, ops, frozenset(without), chosen)


@pytest.mark.parametrize("word", ["rms_nrm", "-attn", "--all", "-"])
def test_unknown_word_lists_the_choices(word: str) -> None:
    message = f"PYOPS_VLLM: {word.removeprefix('-')} is no op of vLLM and no part; there are all; ops; the parts"
    message += " attention, sampler; the ops rms_norm, silu_and_mul"
    with pytest.raises(SwitchError) as raised:
        Choice.read(["all", word], OPS, PARTS)
    assert str(raised.value) == message


def test_excluding_from_nothing_changes_nothing() -> None:
    with pytest.raises(SwitchError, match="nothing is chosen of which to leave something out"):
        Choice.read(["-attention"], OPS, PARTS)


def test_slower_ops_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm.json").write_text('{"imagined": {"attention": {"decode": 1.01, "prefill": 1.0}}}')
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    choice._measured.cache_clear()
    try:
        monkeypatch.setattr(choice, "_device_name", lambda: "imagined")
        assert not choice.keeps("attention", "decode")
        assert choice.keeps("attention", "prefill")
        assert choice.keeps("attention", "decode of another kind")
        assert choice.keeps("sampler", "decode")
        monkeypatch.setattr(choice, "_device_name", lambda: "another")
        assert choice.keeps("attention", "decode")
    finally:
        choice._measured.cache_clear()


@pytest.mark.parametrize(
    ("is_gpu", "name"), [(True, "nvidia-h100-80gb-hbm3"), (False, "")], ids=["gpu", "another platform"]
)
def test_vllm_names_the_device(is_gpu: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is not asked, because a process that is forked later could not use what it initialises."""
    platform = SimpleNamespace(is_cuda_alike=lambda: is_gpu, get_device_name=lambda: "NVIDIA H100 80GB HBM3")
    module = ModuleType("vllm.platforms")
    module.current_platform = platform  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", module)
    monkeypatch.setattr(device, "count", lambda: pytest.fail("the driver was asked"))
    assert choice._device_name.__wrapped__() == name


def test_table_of_slower_ops_names_existing_parts() -> None:
    """Every entry is of an existing device table and part, with a positive ratio."""
    for name, of_device in choice._measured().items():
        assert name == device.table_name(name)
        for part, cases in of_device.items():
            assert part in parts.NAMES
            assert all(ratio > 0 for ratio in cases.values())


def imagined(monkeypatch: pytest.MonkeyPatch, *names: str, fails: str = "") -> list[str]:
    """Give `activate` parts of these names, and empty modules of vLLM; returns the list of calls of the parts."""
    told: list[str] = []

    def load(name: str) -> SimpleNamespace:
        def install() -> str:
            told.append(f"install {name}")
            if name == fails:
                raise RuntimeError(f"{name} cannot be taken over")
            return "" if name == "silent" else f"took over {name}"

        return SimpleNamespace(install=install, uninstall=lambda: told.append(f"uninstall {name}"))

    monkeypatch.setattr(plugin, "parts", SimpleNamespace(NAMES=names, load=load))
    for module in ("vllm", "vllm._custom_ops", *plugin.DEFINED_IN_PYTHON.values()):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setattr(stand_ins, "refuse_flash_attention", lambda: None)
    return told


def test_parts_are_installed_and_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    told = imagined(monkeypatch, "attention", "sampler", "silent")
    monkeypatch.setenv("PYOPS_VLLM", "all,-ops,-sampler")
    with caplog.at_level("INFO", "vllm.pyops"):
        plugin.activate()
        plugin.activate()
    assert told == ["install attention", "install silent"]
    assert caplog.messages == ["attention: took over attention"]
    plugin.deactivate()
    plugin.deactivate()
    assert told[2:] == ["uninstall silent", "uninstall attention"]


def test_error_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = imagined(monkeypatch, "attention", "sampler", fails="sampler")
    monkeypatch.setenv("PYOPS_VLLM", "attention,sampler")
    with pytest.raises(RuntimeError, match="sampler cannot be taken over"):
        plugin.activate()
    assert told == ["install attention", "install sampler", "uninstall attention"]


@pytest.mark.parametrize(
    ("words", "count", "left", "norm"),
    [
        ("ops", 3, "_C::gelu_and_mul (expected the schema", 1.0),
        ("ops,-rms_norm", 2, "_C::rms_norm (was left out)", 7.0),
        ("silu_and_mul", 1, "", 7.0),
    ],
)
@pytest.mark.slow
def test_ops_are_replaced_and_logged(site: Path, words: str, count: int, left: str, norm: float) -> None:
    """One line has the number of replaced ops, another the ops that are not, with reasons."""
    done = run(site, words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert lines[1] == f"vllm.pyops INFO {count} ops of vLLM run on pyops"
    assert len(lines) == (6 if left else 5)
    assert left in lines[2]
    assert lines[-3:] == ["silu 0.7311", f"norm {norm}", ""]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("silu_and_mul,gelu_and_mul", "override: gelu_and_mul: expected the schema"),
        ("all,silu_and_nul", "PYOPS_VLLM: silu_and_nul is no op of vLLM and no part"),
    ],
)
@pytest.mark.slow
def test_name_that_cannot_be_served_is_an_error(site: Path, words: str, message: str) -> None:
    """vLLM must not start as if nothing had been asked for."""
    done = run(site, words)
    assert done.returncode != 0
    assert message in done.stderr


# A vLLM without its compiled libraries.


@pytest.mark.slow
def test_ops_of_absent_libraries_are_defined(site: Path) -> None:
    without_libraries(site)
    done = run(site, "ops")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert lines[1].startswith("vllm.pyops INFO compiled libraries of vLLM are absent: pyops defines ")
    assert lines[2].endswith("ops of vLLM run on pyops")
    assert lines[3:] == ["silu 0.7311", "norm 1.0", ""]


@pytest.mark.slow
def test_without_the_switch_libraries_are_missing(site: Path) -> None:
    without_libraries(site)
    done = run(site, None)
    assert "ModuleNotFoundError: No module named 'vllm._C'" in done.stderr


@pytest.mark.slow
def test_unknown_vllm_version_is_an_error(site: Path) -> None:
    """Raised where vLLM would load its libraries, because vLLM would drop an error of `stand_in`."""
    without_libraries(site, "0.99.0")
    done = run(site, "all")
    assert done.stdout == "True None\n"
    assert "OpError: register: vllm: expected 0.16 or 0.22 or 0.33, got 0.99" in done.stderr


@pytest.mark.slow
def test_library_that_fails_to_load_is_replaced(site: Path) -> None:
    """The others are loaded first, because a library cannot define ops that exist. A reason is logged."""
    without_libraries(site)
    (site / "vllm/_C.abi3.so").write_bytes(b"no library")
    (site / "vllm/_moe_C.py").write_text(
        "import torch\nlibrary = torch.library.Library('_moe_C', 'DEF')\n"
        "library.define('moe_sum(Tensor input, Tensor! output) -> ()')\n"
        "library.impl('moe_sum', lambda input, output: print(output.fill_(7)[0].item()), 'CPU')\n"
    )
    done = run(
        site,
        "rms_norm",
        """
import vllm._custom_ops, torch
out = torch.empty(4)
torch.ops._moe_C.moe_sum(out, out)
print(torch.ops._C.rms_norm.default._schema.name, vllm._moe_C.__file__)
from pyops.integrations.vllm import register
register().undo()
print("vllm._C" in sys.modules, "vllm._moe_C" in sys.modules)
""",
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert lines[1].startswith(f"vllm.pyops WARNING {site}/vllm/_C.abi3.so cannot be loaded: ")
    assert "pyops defines" in lines[2]
    assert lines[3:] == ["7.0", f"_C::rms_norm {site}/vllm/_moe_C.py", "False True", ""]


@pytest.mark.slow
def test_library_loaded_after_register_is_skipped(site: Path) -> None:
    """Defining an existing op in C++ ends the process, so the file stays unread, and a log line says so."""
    without_libraries(site)
    (site / "vllm/_C.py").write_text("import os\nos._exit(3)\n")
    code = """
import torch
from pyops.integrations.vllm import register
register("0.22")
import vllm._C
print(vllm._C.__file__ if hasattr(vllm._C, "__file__") else "a stand-in", torch.ops._C.rms_norm.default._schema.name)
"""
    done = run(site, None, code)
    assert done.returncode == 0, done.stderr
    assert f"{site}/vllm/_C.py is not loaded: pyops has defined its ops" in done.stdout
    assert done.stdout.endswith("a stand-in _C::rms_norm\n")


def test_flash_attention_package_without_libraries(site: Path) -> None:
    """It can be imported, with the names that it had when it raised; another ImportError is raised as ever."""
    package = site / "vllm/vllm_flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("from .interface import supported\nraise ImportError('no libraries')\n")
    (package / "interface.py").write_text("supported = False\n")
    done = run(
        site,
        "all",
        """
from vllm.vllm_flash_attn import supported
import vllm.vllm_flash_attn.interface
print(supported)
try:
    import vllm.cumem_allocator
except ImportError as error:
    print(error)
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[1:] == ["False", "No module named 'vllm.cumem_allocator'", ""]
