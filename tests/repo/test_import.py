"""`import pyops` needs only numpy; a call says which package is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyops.cli import coverage
from pyops.host.toolchain import toolchains

ROOT = Path(__file__).parents[2]

# Python code that makes imports of the packages in BLOCKED fail, as if they were not installed.
BLOCK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

BLOCKED = {"torch", "cupy", "cupy_backends", "ml_dtypes", "hypothesis"}
sys.meta_path.insert(0, Blocker())
"""


def run(code: str, **environment: str) -> str:
    """What `code` prints in another process, after `BLOCK`. Warnings are errors."""
    command = [sys.executable, "-W", "error", "-c", BLOCK + code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_without_torch_and_cupy() -> None:
    run("""
import pyops
assert not BLOCKED & set(sys.modules)
assert pyops.registry["rms_norm"].call is pyops.rms_norm
""")


def test_harness_without_torch_and_hypothesis() -> None:
    printed = run("""
import numpy, pyops.testing
assert not BLOCKED & set(sys.modules)
x = numpy.ones((2, 3), numpy.float32)
with pyops.testing.cpu("kernels"), pyops.testing.scheduled(pyops.testing.SCHEDULES[1]):
    pyops.relu2(numpy.empty_like(x), x)
try:
    from pyops.testing import strategies
except pyops.MissingDependencyError:
    print("strategies need hypothesis")
""")
    assert printed == "strategies need hypothesis\n"


def test_models_without_their_packages() -> None:
    run("""
BLOCKED |= {"safetensors", "tokenizers", "transformers"}
import pyops.models
from pyops.__main__ import main
from pyops.models import checkpoint
assert not BLOCKED & set(sys.modules)
assert main(["generate", "--model", "folder", "--prompt", "text"]) == 2
try:
    with checkpoint._opened("model.safetensors"):
        raise AssertionError("no error")
except pyops.MissingDependencyError as error:
    assert "reading a model needs safetensors" in str(error) and "[models]" in str(error), error
""")


def test_coverage_without_torch() -> None:
    assert run("from pyops.__main__ import main; assert main(['coverage']) == 0") == f"{coverage.text('0.16')}\n"


def test_layers_without_torch_name_the_pip_line() -> None:
    run("""
import pyops
for name in ("nn.custom_op", "nn"):
    try:
        __import__(f"pyops.{name}")
    except pyops.MissingDependencyError as error:
        assert "pyops.nn.custom_op needs torch" in str(error) and "[torch]" in str(error), error
    else:
        raise AssertionError("no error")
""")


def test_transformers_is_named_where_it_is_needed() -> None:
    run("""
BLOCKED.clear()
BLOCKED |= {"transformers"}
import pyops
import sys, types
def message():
    try:
        import pyops.integrations.transformers
    except ImportError as error:
        return str(error)
assert "pyops.integrations.transformers needs transformers, which is not installed" in message()
sys.modules["transformers"] = types.SimpleNamespace(__version__="5.15.1")
assert message() == "pyops.integrations.transformers needs transformers 5.16 or later, found 5.15.1"
""")


def test_import_opens_only_modules() -> None:
    run("""
import numpy

opened = []
def hook(event, args):
    if event == "open":
        opened.append(args)
    elif event in ("os.mkdir", "os.rename", "os.remove", "subprocess.Popen", "socket.connect", "ctypes.dlopen"):
        opened.append((event, args))
sys.addaudithook(hook)
import pyops

import os
for path, mode, flags in opened:
    assert str(path).endswith((".py", ".pyc", ".so")) or ".pyc." in str(path), path
    # Python writes the byte code of modules; no other file may be opened for writing.
    assert ".pyc" in str(path) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT), (path, mode, flags)
assert opened
""")


# Prints the time of importing pyops after numpy, relative to the time of importing numpy.
TIMES = """
import time
times = [time.thread_time()]
import numpy
times.append(time.thread_time())
import pyops
times.append(time.thread_time())
print((times[2] - times[1]) / (times[1] - times[0]))
"""


def test_import_is_fast(tmp_path: Path) -> None:
    """With byte code, which pip writes at installation, importing pyops takes some four times as long as numpy.

    The unit is the import of numpy in the same process, in processor time of one thread, because a busy machine slows
    both imports.
    """
    byte_code = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert min(float(run(TIMES, **byte_code)) for _ in range(5)) < 6


def test_numpy_call_without_torch_names_the_pip_line() -> None:
    run("""
import numpy, pyops
x = numpy.ones((2, 8), numpy.float32)
out = numpy.empty_like(x)
try:
    pyops.rms_norm(out, x, None, 1e-6)
except pyops.MissingDependencyError as error:
    assert "needs torch" in str(error) and "pip install" in str(error) and "[torch]" in str(error), error
else:
    raise AssertionError("no error")
try:  # a wrong argument is reported before the missing package
    pyops.rms_norm(out[:1], x, None, 1e-6)
except pyops.OpError as error:
    assert error.argument == "out"
else:
    raise AssertionError("no error")
""")


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
def test_kernels_on_the_cpu_need_only_numpy() -> None:
    run("""
import os
os.environ["PYOPS_CPU"] = "kernels"
import numpy, pyops
x = numpy.random.default_rng(0).standard_normal((3, 100)).astype("float32")
out = numpy.empty_like(x)
pyops.rms_norm(out, x, None, 1e-6)
assert abs(out - x / numpy.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)).max() < 1e-6
codes, scale, _ = pyops.scaled_int8_quant(x)
assert abs(codes * scale - x).max() <= scale.max() / 2
try:
    pyops.scaled_fp8_quant(x)
except pyops.MissingDependencyError as error:
    assert "a new array of float8_e4m3fn needs ml_dtypes" in str(error) and "[cpu]" in str(error), error
else:
    raise AssertionError("no error")
try:
    pyops.permute_cols(x, numpy.arange(99, dtype="int32"))
except pyops.OpError as error:
    assert error.argument == "perm", error
else:
    raise AssertionError("no error")
os.environ["PYOPS_CPU"] = "gpu"
try:
    pyops.rms_norm(out, x, None, 1e-6)
except ValueError as error:
    assert str(error) == 'PYOPS_CPU: expected "kernels" or "reference", got "gpu"', error
else:
    raise AssertionError("no error")
""")


def test_device_without_cupy_names_the_pip_line() -> None:
    run("""
import pyops
from pyops._core.system import device, lazy
for ask in (lambda: lazy.cupy.__version__, lambda: device.get(0), device.count, pyops.warmup):
    try:
        ask()
    except pyops.MissingDependencyError as error:
        assert isinstance(error, ImportError)
        assert "needs cupy" in str(error) and "pip install" in str(error) and "[cuda13]" in str(error), error
    else:
        raise AssertionError("no error")
""")


def test_error_of_a_broken_torch_is_not_hidden() -> None:
    run("""
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'typing_extensions'", name="typing_extensions")
sys.meta_path.insert(0, Broken())
from pyops._core.system import lazy
try:
    lazy.torch.__version__
except ModuleNotFoundError as error:
    assert error.name == "typing_extensions"
""")


def test_doctor_without_any_package_reports_and_fails() -> None:
    run("""
from pyops.__main__ import main
from pyops.host import toolchain
toolchain.toolchains = dict
assert main(["doctor"]) == 1
assert main(["doctor", "--json"]) == 1
assert main(["demo"]) == 2
assert main(["list"]) == 0 and main(["show", "rms_norm"]) == 0 and main(["source", "rms_norm"]) == 0
""")


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
def test_doctor_passes_with_numpy_and_a_compiler() -> None:
    printed = run("""
from pyops.__main__ import main
assert main(["doctor"]) == 0
""")
    assert printed.endswith("Ops run on the CPU by their kernels, where PYOPS_CPU=kernels is set.\n")
