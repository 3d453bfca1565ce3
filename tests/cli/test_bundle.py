"""`pyops bundle`: a model's kernels compiled without a GPU, and loaded without a compiler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from pyops import OpError, models
from pyops.__main__ import main
from pyops._core.launch.kernel import Specialisation
from pyops._core.system import device
from pyops._core.text import compiler, modules
from pyops.cli import bundle
from tests.every_op.test_nvrtc import MISSING
from tests.support.small_models import SIZES

SMALL = {"max_num_seqs": 1, "max_model_len": 16, "max_num_batched_tokens": 1}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model of one layer, without weights."""
    config = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]})
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_bundled_kernels_are_loaded_without_a_compiler(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other machine is played by a device of the architecture, and by modules that keep their binary."""
    out, options = tmp_path / "out", [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    assert main(["bundle", f"--model={model}", "--arch=sm_120", f"--out={out}", *options]) == 0
    wanted = models.serving_kernels(model, device.model("sm_120"), **SMALL)  # type: ignore[arg-type]
    assert capsys.readouterr().out == f"sm_120: {len(wanted)} kernels in {out}\n"
    assert len({*out.iterdir()}) == len(wanted)

    def no_compiler(*_: Any, **__: Any) -> Any:
        raise AssertionError("a kernel is compiled")

    def told(entry: str) -> Any:
        return SimpleNamespace(ptr=7, entry=entry)

    loaded: list[bytes] = []
    monkeypatch.setenv("CUPY_CACHE_DIR", str(out))
    monkeypatch.setattr(device, "get", lambda index: replace(device.model("sm_120"), index=index))
    monkeypatch.setattr(modules, "of", lambda binary: loaded.append(binary) or SimpleNamespace(get_function=told))
    monkeypatch.setattr(compiler, "_attributes", lambda _: (32, 0, 0))
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(
        compiler,
        "cupy",
        SimpleNamespace(
            RawModule=no_compiler,
            cuda=SimpleNamespace(
                Device=lambda _: pytest.MonkeyPatch.context(),
                runtime=SimpleNamespace(is_hip=False),
                driver=SimpleNamespace(CUDADriverError=OSError),
            ),
        ),
    )

    def load(one: Specialisation) -> compiler.Compiled:
        return compiler.load(0, one.text, one.kernel.signature.entry, one.kernel.file, str(one), one.kernel.options)

    found = [load(one) for _, one in wanted]
    assert {one.origin for one in found} == {"disk"}
    assert len(loaded) == len(wanted)
    assert all(binary.startswith(b"\x7fELF") for binary in loaded)

    # A damaged file is not loaded: the kernel would be compiled.
    for path in out.iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    monkeypatch.setattr(compiler, "_loaded", {})
    with pytest.raises(AssertionError, match="a kernel is compiled"):
        load(wanted[0][1])


def test_files_of_a_bundle_are_compiled_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[str, ...]]] = []

    def compile(kernel: str, constants: str, text: str, arch: str, options: tuple[str, ...]) -> Any:
        calls.append((arch, options))
        return SimpleNamespace(binary=text.encode())

    monkeypatch.setattr(bundle.offline, "compile", compile)
    monkeypatch.setattr(bundle.compile_ahead, "open_nvrtc", lambda: None)
    counts = bundle.bundle(str(model), ["sm_90", "l4"], tmp_path / "out", **SMALL)
    assert counts.keys() == {"sm_90", "l4"}
    assert len(calls) == sum(counts.values()) == len([*(tmp_path / "out").iterdir()])
    assert {arch for arch, _ in calls} == {"sm_90", "sm_89"}
    assert {options for arch, options in calls if arch == "sm_90"} <= {(), ("--gpu-architecture=sm_90a",)}
    assert bundle.bundle(str(model), ["sm_90"], tmp_path / "out", **SMALL) == {"sm_90": counts["sm_90"]}
    assert len(calls) == sum(counts.values())


@pytest.mark.parametrize("arch", ["sm_33", "gfx942", "h9000", ""])
def test_an_unknown_architecture_is_an_error(arch: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(OpError, match=f"^bundle: arch: .*{arch}"):
        bundle.bundle(str(model), [arch], tmp_path / "out")
    assert not (tmp_path / "out").exists()
