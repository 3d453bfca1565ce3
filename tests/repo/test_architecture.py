"""The rules of the house, held by reading the tree."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import kernels_cu
import pyops
import pyops._core
import pyops.fused
import pyops.host
import pyops.integrations.transformers
import pyops.integrations.vllm
import pyops.models
import pyops.nn
from pyops._core.system import device
from pyops._core.text import source
from pyops.example import ArgMaker
from tests.mutation.choose import kernels_of, sources_of

ROOT = Path(__file__).parents[2]
CORE = ROOT / "pyops" / "_core"
# What of the root belongs to the project, besides the files that lie in it.
FOLDERS = ("pyops", "kernels_cu", "tests", "benchmarks", "docs", ".ci")
KERNELS = [name for name in kernels_cu.names() if name.endswith(".cu")]
HEADERS = [name for name in kernels_cu.names() if name.endswith(".cuh")]


def _order(package: ModuleType) -> list[str]:
    """The modules that the docstring of a package lists, each after all that it may import."""
    lines = [line for line in str(package.__doc__).splitlines() if re.match(r"[a-z_0-9]+( [a-z_0-9]+)*   +\S", line)]
    return [module for line in lines for module in re.split("   +", line)[0].split()]


# The files and folders of the core, and the files of each folder, as `folder/module`.
ORDER = _order(pyops._core)
FOLDERS_OF_CORE = [name for name in ORDER if (CORE / name).is_dir()]
CORE_MODULES = [
    f"{folder}/{module}"
    for folder in FOLDERS_OF_CORE
    for module in _order(importlib.import_module(f"pyops._core.{folder}"))
] + [name for name in ORDER if name not in FOLDERS_OF_CORE]
HOST = _order(pyops.host)
# What stands on the ops: {package: modules in the order in which they may import each other}.
ABOVE = {
    package.__name__: _order(package)
    for package in (pyops.fused, pyops.models, pyops.nn, pyops.integrations.vllm, pyops.integrations.transformers)
}
# `import pyops` loads `pyops.fused`: its functions are names of pyops.
ABOVE_FOLDERS = {name.split(".")[1] for name in ABOVE} - {"fused"}
# What plans and tools use next to the core.
BESIDE = ("check", "tuning", "example", "offline", "gpus", "_docstring")
# What stands on `_core`: a package for each family of ops, and the test harness.
FAMILIES = sorted((ROOT / "pyops" / "ops").glob("*/*.py"))
HARNESS = sorted((ROOT / "pyops" / "testing").rglob("*.py"))


def _code(name: str) -> str:
    """A kernel source without its comments."""
    return re.sub(r"//.*", "", kernels_cu.read(name))


def _imports(path: Path) -> set[str]:
    """Modules and names that a file imports, wherever in it and be it for types alone, as absolute dotted names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = path.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def _modules(folder: Path) -> list[str]:
    """The modules and packages of a folder."""
    packages = [path.parent.name for path in folder.glob("*/__init__.py")]
    return sorted([*packages, *(path.stem for path in folder.glob("*.py") if path.stem != "__init__")])


def test_every_core_module_has_its_place() -> None:
    assert sorted(ORDER) == _modules(CORE)
    found = [f"{folder}/{module}" for folder in FOLDERS_OF_CORE for module in _modules(CORE / folder)]
    assert sorted(name for name in CORE_MODULES if "/" in name) == sorted(found)


@pytest.mark.parametrize("module", CORE_MODULES)
def test_core_imports_only_what_comes_before(module: str) -> None:
    """Within its folder, and of the folders, those that come before its own."""
    folder, _, name = module.rpartition("/")
    found = {name for name in _imports(CORE / f"{module}.py") if name.startswith("pyops")}
    assert all(name.startswith("pyops._core.") for name in found), "the core imports what stands on it"
    imported = {tuple(name.split(".")[2:4]) for name in found}
    assert {one[0] for one in imported} - {folder} <= set(ORDER[: ORDER.index(folder or name)])
    beside = [one.rpartition("/")[2] for one in CORE_MODULES if folder and one.startswith(f"{folder}/")]
    assert {one[1] for one in imported if one[0] == folder} <= set(beside[: beside.index(name)] if folder else [])


@pytest.mark.parametrize("module", HOST)
def test_the_host_backend_imports_only_the_core_and_what_comes_before(module: str) -> None:
    found = {name for name in _imports(ROOT / "pyops" / "host" / f"{module}.py") if name.startswith("pyops")}
    own = {name.split(".")[2] for name in found if name.startswith("pyops.host.")}
    assert own <= set(HOST[: HOST.index(module)])
    assert all(name.startswith(("pyops._core.", "pyops.host.")) for name in found), found


def test_every_module_of_the_host_backend_has_its_place() -> None:
    assert sorted(HOST) == _modules(ROOT / "pyops" / "host")


def test_import_does_without_the_host_backend() -> None:
    """Only its error is loaded, and the world of ranks, by which collective ops ask whether they run on the host."""
    listed = "sorted(name for name in sys.modules if name.startswith('pyops.host.'))"
    done = f"import sys, pyops; assert {listed} == ['pyops.host.faults', 'pyops.host.ranges', 'pyops.host.ranks']"
    subprocess.run([sys.executable, "-c", done], cwd=ROOT, check=True)


@pytest.mark.parametrize("module", BESIDE)
def test_what_lies_beside_the_core_imports_only_the_core(module: str) -> None:
    path = ROOT / "pyops" / module
    found = _imports(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    assert all(name.startswith("pyops._core.") for name in found if name.startswith("pyops")), found


def test_the_core_stays_small() -> None:
    assert sum(_lines(path) for path in CORE.rglob("*.py")) <= 5050


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.relative_to(ROOT / "pyops").as_posix())
def test_families_import_only_the_core(path: Path) -> None:
    """And checks and tuning, what families share, and their own package; those of several ranks, ranks of the host."""
    own = {name for name in _imports(path) if name.startswith("pyops")}
    allowed = ("pyops._core.", "pyops.check", "pyops.tuning", "pyops.ops._shared.", f"pyops.ops.{path.parent.name}.")
    if path.parent.name == "collective":
        allowed += ("pyops.host.ranks", "pyops.host.ranges")
    assert all(name.startswith(allowed) for name in own), own


def test_no_modules_import_each_other() -> None:
    """Not even in a circle of several, and not for types alone."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "pyops").rglob("*.py")}
    graph = {
        module: {name if name in modules else name.rpartition(".")[0] for name in _imports(path)} & set(modules)
        for module, path in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules of a circle


CALL_PATH = ("op/wrapper", "op/op", "op/prepare", "op/plan", "launch/layout", "launch/launch")


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "pyops").rglob("*.py")), ids=lambda path: path.relative_to(ROOT / "pyops").as_posix()
)
def test_files_and_classes_fit_in_a_head(path: Path) -> None:
    assert _lines(path) <= 350
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 200, node.name


def test_a_call_is_read_in_six_files() -> None:
    assert sum(_lines(CORE / f"{name}.py") for name in CALL_PATH) <= 1200
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `_core/([\w/]+)\.py` \|", page, re.MULTILINE) == list(CALL_PATH)


@pytest.mark.parametrize("path", HARNESS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_harness_knows_no_op(path: Path) -> None:
    """It imports the core, the host backend and itself; hypothesis only where the strategies are."""
    imported = _imports(path)
    own = {name for name in imported if name.startswith("pyops")}
    assert all(name.startswith(("pyops._core.", "pyops.example", "pyops.host.", "pyops.testing.")) for name in own), own
    assert "strategies" in path.parts or not any(re.match("hypothesis|.*strategies", name) for name in imported)
    assert len(path.read_text(encoding="utf-8").splitlines()) < 250


@pytest.mark.parametrize(("package", "module"), [(name, module) for name, order in ABOVE.items() for module in order])
def test_what_stands_on_the_ops_imports_what_comes_before(package: str, module: str) -> None:
    """And the core and the ops; integrations and layers no models."""
    path = ROOT.joinpath(*package.split("."), module)
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    own = {name for file in files for name in _imports(file) if name.startswith("pyops")}
    beside = {name.removeprefix(f"{package}.").split(".")[0] for name in own if name.startswith(f"{package}.")}
    assert beside - {module} <= set(ABOVE[package][: ABOVE[package].index(module)])
    others = {name for name in own if not name.startswith(f"{package}.")}
    assert not any(re.match(r"pyops\.(cli|integrations|models|testing)\b", name) for name in others)


@pytest.mark.parametrize("package", ABOVE)
def test_every_module_that_stands_on_the_ops_has_its_place(package: str) -> None:
    assert sorted(ABOVE[package]) == _modules(ROOT.joinpath(*package.split(".")))


def test_only_models_stand_on_the_layers() -> None:
    for path in (ROOT / "pyops").rglob("*.py"):
        if path.parent.name not in ("nn", "models"):
            assert not any(re.match(r"pyops\.nn\b", name) for name in _imports(path)), path


def test_ops_do_without_what_stands_on_them() -> None:
    """`import pyops` does not load it."""
    above = tuple(f"pyops.{name}" for name in sorted(ABOVE_FOLDERS))
    done = f"import sys, pyops; assert not [name for name in sys.modules if name.startswith({above})]"
    subprocess.run([sys.executable, "-c", done], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_has_one_entry_named_as_its_file(name: str) -> None:
    """And at most one more. A compiled text has one of them, and as many lines as the file."""
    entries = source.entries(name)
    assert Path(name).stem in entries
    assert len(entries) == len(re.findall(r'extern\s+"C"', _code(name))) <= 2
    whole = source.flatten(name, {})
    for entry in entries:
        flat = source.flatten(name, {}, None, entry)
        assert len(re.findall(r'^extern "C"', flat, re.MULTILINE)) == 1
        assert flat.count("\n") == whole.count("\n")


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_may_be_started_early(name: str) -> None:
    """It waits for the kernel before it ahead of any access to global memory, so launches overlap."""
    starts = (source.signature(name, None, entry).overlaps for entry in source.entries(name))
    assert source.is_tile(name) or all(starts)  # CUDA Tile C++ has no programmatic dependent launch


@pytest.mark.rotates
def test_every_kernel_is_launched() -> None:
    """By an op's example; other tests launch those of several ranks, and those in CUDA Tile C++."""
    launched = {kernel for op in pyops.registry.values() if op.example for kernel in kernels_of(op)}
    assert launched == {name for name in KERNELS if not name.startswith("collective/") and not source.is_tile(name)}


def test_every_header_is_included() -> None:
    """By a kernel or a header, or at least by a kernel that a test holds."""
    texts = {name: _code(name) for name in kernels_cu.names()}
    texts |= {
        str(path): path.read_text(encoding="utf-8")
        for path in [*(ROOT / "tests" / "core").glob("*.py"), *(ROOT / "tests" / "host").glob("*.py")]
    }
    included = {
        found
        for name, text in texts.items()
        for header in re.findall(r'#include "([\w/]+\.cuh)"', text)
        for found in source.headers_of(name.rpartition("/")[0], header)
    }
    assert included == set(HEADERS)


def test_headers_lie_with_their_family() -> None:
    """`include/` holds what kernels of two families or more use, and a family's folder what its kernels alone use."""
    families: dict[str, set[str]] = {name: set() for name in HEADERS}
    for kernel in KERNELS:
        for name in sources_of(kernel) & set(HEADERS):
            families[name].add(kernel.partition("/")[0])
    assert {name: used for name, used in families.items() if name.startswith("include/") and len(used) < 2} == {}
    others = [name for name in HEADERS if not name.startswith("include/")]
    assert {name: families[name] for name in others if families[name] != {name.partition("/")[0]}} == {}


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_uses_only_portable_names(name: str) -> None:
    """What one architecture or compiler calls its own has a name in the headers."""
    portable = {"__global__", "__tile_global__", "__shared__", "__restrict__", "__syncthreads", "__constant__"}
    portable |= {"__grid_constant__", "__align__"}  # of tensor maps, and of the shared memory that they fill
    assert not re.search(r"\b(asm|warpSize)\b", _code(name))
    assert set(re.findall(r"\b__\w+", _code(name))) <= portable


def _shared_constants() -> set[str]:
    """The constants that have one meaning in all kernels, from their table in docs/kernels.md."""
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    section = page.split("### Constants with one meaning\n", 1)[1].split("\n#", 1)[0]
    return set(re.findall(r"^\| `(\w+)` \| .", section, re.MULTILINE))


@pytest.mark.parametrize("name", KERNELS)
def test_every_constant_is_explained(name: str) -> None:
    """Where the kernel begins, or in the table of the constants that have one meaning in all kernels."""
    comment = kernels_cu.read(name).split("\n\n#include", 1)[0]
    shared = _shared_constants()
    for op in pyops.registry.values():
        assert op.example is not None
        few, many = (op.launches(*op.example(ArgMaker(device.model()), **more)) for more in ({}, {"num_tokens": 4096}))
        for launch in (*few, *many):
            if launch.specialisation.kernel.file == name:
                for constant in launch.specialisation.constants:
                    explained = re.search(rf"^//     .*\b{constant}\b", comment, re.MULTILINE)
                    assert explained or constant in shared, f"{constant} is not explained"


@pytest.mark.parametrize("path", sorted((ROOT / "kernels_cu" / "host").iterdir()), ids=lambda path: path.name)
def test_emulation_is_plain(path: Path) -> None:
    """ASCII, in files that fit in a head; each is described, and includes are of its own folder or the system's."""
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    assert len(text.splitlines()) < 300
    assert text.startswith(f"// {path.name}: ")
    assert f"`{path.name}`" in (ROOT / "docs/host.md").read_text()
    assert all((path.parent / header).exists() for header in re.findall(r'#include "(.*)"', text))


@pytest.mark.parametrize("name", kernels_cu.names())
def test_source_is_plain(name: str) -> None:
    """ASCII, and no system header but the number formats' in number.cuh, and that of CUDA Tile C++."""
    assert kernels_cu.read(name).isascii()
    assert name in ("include/number.cuh", "include/tile.cuh") or "#include <" not in _code(name)


def test_nothing_names_a_machine() -> None:
    """No absolute path of somebody's machine in anything that is committed."""
    files = [path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".git")]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    path_of_a_machine = re.compile(r"(?<![\w.])/(home|root|Users|work|workspace)/\w")
    for path in files:
        if path.suffix not in (".pyc", ".png", ".svg", ".whl") and "__pycache__" not in path.parts:
            found = path_of_a_machine.search(path.read_text(encoding="utf-8"))
            assert not found, f"{path.relative_to(ROOT)}: {found}"


@pytest.mark.parametrize("name", HEADERS)
def test_constants_of_a_struct_stand_before_what_instantiates_its_templates(name: str) -> None:
    """NVRTC 12.4 makes a member template where it is called, and does not know constexpr functions that come later."""
    for struct in re.findall(
        r"^(?:template <.*>\s*)?struct \w+[^;{]*\{\n.*?^\};", _code(name), re.MULTILINE | re.DOTALL
    ):
        calls = [match.start() for match in re.finditer(r"\b\w+<\d+>\(", struct)]
        constants = [match.start() for match in re.finditer(r"static constexpr DEVICE \w+ \w+\(", struct)]
        assert not calls or not constants or max(constants) < min(calls)
