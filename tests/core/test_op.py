"""Declaring ops, and the path of a call: keys, plans, refusals, switches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch

import pyops
from benchmarks.fake_driver import fake_driver
from pyops import check
from pyops._core.launch.kernel import Kernel
from pyops._core.op import op as core
from pyops._core.system import device
from pyops._core.tensors.tensor import TensorArg
from pyops._core.text import compiler
from pyops.example import ArgMaker, TorchMaker

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).parents[2]
MakeKernel = Callable[[str, str], Kernel]

SCALE = """
// out[i] = input[i] * factor
#include "number.cuh"
extern "C" __global__ void scale(float* out, const float* input, int64_t size, float factor, int times) {
    const int64_t i = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (i < size) out[i] = input[i] * factor * times;
}
"""


def test_declaration_is_read_from_the_reference() -> None:
    @pyops.op(out="out", inout=("state",), keyed="slope", ulps=3)
    def declared(out: Tensor, state: Tensor | None, slope: float, epsilon: float, causal: bool = True) -> None:
        """Documented."""

    op = declared.op
    assert pyops.registry["declared"] is op
    assert [(p.name, p.kind, p.role, p.optional, p.keyed) for p in op.parameters] == [
        ("out", "Tensor", "out", False, False),
        ("state", "Tensor", "inout", True, False),
        ("slope", "float", "in", False, True),
        ("epsilon", "float", "in", False, False),
        ("causal", "bool", "in", False, True),
    ]
    assert op.declaration.runtime == (("epsilon", "d"),)
    assert op.declaration.ulps == 3
    assert (declared.__name__, declared.__doc__) == ("declared", "Documented.")


def _unknown_kind(out: Tensor, sizes: list[int]) -> None: ...


def _not_annotated(out: Tensor, factor) -> None: ...  # type: ignore[no-untyped-def]


def _good(out: Tensor, factor: float) -> None: ...


@pytest.mark.parametrize(
    ("reference", "declaration", "message"),
    [
        (_unknown_kind, {"out": "out"}, "sizes is annotated 'list"),
        (
            _not_annotated,
            {"out": "out"},
            "factor is not annotated, expected one of Tensor, float, int, bool, str, tuple",
        ),
        (_good, {"out": "output"}, r"\['output'\] are written but are no tensor parameters"),
        (_good, {"out": ("out", "factor")}, r"\['factor'\] are written but are no tensor parameters"),
        (_good, {"out": "out", "keyed": "out"}, r"\['out'\] are keyed but are no float parameters"),
    ],
)
def test_wrong_declarations(reference: Any, declaration: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pyops.op(**declaration)(reference)
    assert reference.__name__ not in pyops.registry


def test_annotations_may_be_types_or_text() -> None:
    """With and without ``from __future__ import annotations``."""

    def reference(out, state, slope, steps, causal, kind, pair) -> None: ...  # type: ignore[no-untyped-def]

    names = ("out", "state", "slope", "steps", "causal", "kind", "pair")
    written = ("Tensor", "Tensor | None", "float", "int | None", "bool", "str", "tuple[int, int] | None")
    types = (torch.Tensor, torch.Tensor | None, float, int | None, bool, str, tuple[int, int] | None)
    long = ("torch.Tensor", "torch.Tensor | None", "float", "int | None", "bool", "str", "tuple[int, int] | None")
    parsed = []
    for kinds in (written, types, long):
        reference.__annotations__ = dict(zip(names, kinds))  # noqa: B905
        parsed.append([(p.kind, p.optional) for p in pyops.op(out="out")(reference).op.parameters])
    assert parsed[0] == parsed[1] == parsed[2]
    assert parsed[0] == [
        ("Tensor", False), ("Tensor", True), ("float", False), ("int", True), ("bool", False), ("str", False),
        ("tuple[int, int]", True),
    ]  # fmt: skip


def test_module_may_declare_an_op_again() -> None:
    """As a notebook cell does that is run twice. torch's registry gets the later op too, with its own schema."""

    def declare(factor: int) -> Any:
        def declared_again(out: Tensor, input: Tensor) -> None:
            out.copy_(input * factor)

        wrapper = pyops.op(out="out")(declared_again)
        wrapper.plan(lambda out, input: [])
        return wrapper

    x, out = torch.ones(3), torch.empty(3)
    for factor in (2, 3):
        wrapper = declare(factor)
        for call in (wrapper, torch.ops.pyops.declared_again):
            call(out, x)
            assert (out == factor).all()
    assert pyops.registry["declared_again"] is wrapper.op


def test_op_of_another_module_is_not_replaced() -> None:
    def rms_norm(out: Tensor, input: Tensor) -> None: ...

    before = pyops.registry["rms_norm"]
    with pytest.raises(TypeError, match=r"^rms_norm: pyops\.ops\.norm\.rms has declared an op of this name$"):
        pyops.op(out="out")(rms_norm)
    assert pyops.registry["rms_norm"] is before


def test_plan_is_made_once_per_signature() -> None:
    planned = []

    @pyops.op(out="out", keyed="slope")
    def planned_once(out: Tensor, input: Tensor, slope: float, epsilon: float, steps: int = 1) -> None:
        out.copy_(input * slope + epsilon * steps)

    @planned_once.plan
    def _(out: TensorArg, input: TensorArg, slope: float, epsilon: float, steps: int) -> list[Any]:
        check.like(out, input)
        planned.append((input.shape, slope, steps))
        return []

    def call(rows: int, slope: float, epsilon: float, steps: int = 1) -> torch.Tensor:
        out = torch.empty(rows, 4)
        planned_once(out, torch.ones(rows, 4), slope, epsilon, steps)
        return out

    for _ in range(2):
        for epsilon in (0.25, 0.5):  # passed, not keyed
            assert torch.equal(call(2, 2.0, epsilon), torch.full((2, 4), 2.0 + epsilon))
        call(3, 2.0, 0.5)
        call(2, 3.0, 0.5)
        call(2, 2.0, 0.5, steps=2)
    assert planned == [((2, 4), 2.0, 1), ((3, 4), 2.0, 1), ((2, 4), 3.0, 1), ((2, 4), 2.0, 2)]


@dataclass
class _Rows:
    input: TensorArg
    weight: TensorArg | None


def test_a_plan_takes_arguments_in_groups() -> None:
    planned = []

    @pyops.op(out="out")
    def planned_by_groups(out: Tensor, input: Tensor, steps: int, weight: Tensor | None = None) -> None: ...

    @planned_by_groups.plan
    def plan_planned_by_groups(steps: int, rows: _Rows) -> list[Any]:
        planned.append((steps, rows.input.name, rows.weight))
        return []

    planned_by_groups(torch.empty(2), torch.ones(2), 3)
    assert planned == [(3, "input", None)]
    with pytest.raises(TypeError, match="planned_by_groups: call is no parameter of the op"):
        planned_by_groups.plan(lambda **call: [])


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_MAX_PLANS", 4)
    op = pyops.registry["rms_norm"]
    for rows in range(1, 20):
        args = op.example(TorchMaker(), num_tokens=rows, hidden_size=8, dtype="float32")
        op(*args)
        assert len(op.plans) <= 4
        expected = torch.nn.functional.rms_norm(args[1], (8,), args[2], 1e-6)
        torch.testing.assert_close(args[0], expected)


def test_forgotten_plans_are_made_again() -> None:
    """Also the one that torch's own guard finds from its third call on."""
    op = pyops.registry["rms_norm"]
    x, out = torch.ones(2, 8), torch.empty(2, 8)
    with fake_driver():
        op.forget()
        for _ in range(4):
            pyops.rms_norm(out, x, None, 1e-6)
        assert len(op.plans) == 1
        op.forget()
        assert not op.plans
        pyops.rms_norm(out, x, None, 1e-6)
        assert len(op.plans) == 1


def test_new_number_of_tokens_is_the_same_specialisation() -> None:
    op = pyops.registry["rms_norm"]
    texts = {
        launch.specialisation.text
        for rows in (1, 2, 17, 100)
        for launch in op.launches(*op.example(ArgMaker(device.model()), num_tokens=rows))
    }
    assert len(texts) == 1


def test_specialisations_differ_by_names_of_constants(kernel: MakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process finds its kernels again by names and values, not by values alone."""
    monkeypatch.setattr(compiler, "load", lambda device, text, *_: (device, text))
    scale = kernel("told_apart", SCALE.replace("scale", "told_apart"))
    made = [scale(A=1, B=2), scale(A=1, C=2), scale(A=2, B=1)]
    assert [one.load(device) for one in made for device in (0, 1)] == [
        (device, one.text) for one in made for device in (0, 1)
    ]


def test_wrapper_source_can_be_read() -> None:
    """The generated wrapper is Python that `inspect` and a debugger can show."""
    import inspect

    assert "def rms_norm(" in inspect.getsource(pyops.rms_norm)


LATE_TORCH = """
import pyops, sys
assert "torch" not in sys.modules
import torch
x = torch.ones(2, 8)
def call(out, x):
    pyops.rms_norm(out, x, None, 1e-6)
out = torch.empty_like(x)
{first}
assert torch.equal(out, x / (1 + 1e-6) ** 0.5), out
torch.ops.pyops.rms_norm(out.zero_(), x, None, 1e-6)
assert torch.equal(out, x / (1 + 1e-6) ** 0.5), out
"""


@pytest.mark.parametrize("first", ["call(out, x)", "torch.compile(call, fullgraph=True, backend='aot_eager')(out, x)"])
@pytest.mark.slow
def test_torch_imported_after_pyops(first: str) -> None:
    """Ops register with torch at the first call, even if that call is traced."""
    run = subprocess.run(
        [sys.executable, "-c", LATE_TORCH.format(first=first)], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert run.returncode == 0, run.stderr


TRACED = """
import torch, pyops
x, out = torch.ones(4, 8), torch.empty(4, 8)
def call(out, x): pyops.relu2(out, x)
compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
with torch._dynamo.config.patch(error_on_recompile=True):
    for function in (compiled, compiled, call, compiled):
        function(out, x)
"""


@pytest.mark.slow
def test_call_that_is_traced_first_is_compiled_once() -> None:
    """Though the wrapper gets its source at the first call."""
    subprocess.run([sys.executable, "-c", TRACED], cwd=ROOT, check=True)


def test_mixed_libraries_are_refused() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(pyops.OpError, match=r"^rms_norm: input: expected a torch tensor like out, got a numpy one$"):
        pyops.rms_norm(torch.empty_like(x), numpy.ones((2, 8), numpy.float32), None, 1e-6)


@pytest.mark.parametrize("where", ["torch", "numpy"])
def test_in_place_tensor_has_one_layout(where: str) -> None:
    """A row of `out` at another address would overwrite rows of `input` that are still to be read."""
    memory: Any = torch.arange(32.0) if where == "torch" else numpy.arange(32, dtype=numpy.float32)
    x, out = memory[:16].reshape(2, 8), memory.reshape(2, 16)[:, :8]
    pyops.rms_norm(x, x, None, 1e-6)
    before = memory + 0
    with pytest.raises(pyops.OpError, match=r"^rms_norm: out: is written, but shares memory with input$"):
        pyops.rms_norm(out, x, None, 1e-6)
    assert (memory == before).all()


def test_interleaved_tensors_are_compared_exactly() -> None:
    """With a row stride of 3 pages, `out` begins 1 page after `input`, between its rows; then 3 pages, on its rows."""
    page = 4096 // 4
    memory = torch.ones(4, 3 * page)
    x, between = memory[:3, :8], memory[:3, page : page + 8]
    on_rows = memory.as_strided((3, 8), (3 * page, 1), 3 * page)
    with fake_driver():
        for _ in range(4):
            pyops.rms_norm(between, x, None, 1e-6)
        with pytest.raises(pyops.OpError, match=r"^rms_norm: out: is written, but shares memory with input$"):
            pyops.rms_norm(on_rows, x, None, 1e-6)


def test_errors_are_value_errors_with_parts() -> None:
    error = pyops.OpError("rms_norm", "weight", "expected shape (hidden_size=4096,), got (4095,)")
    assert isinstance(error, ValueError)
    assert str(error) == "rms_norm: weight: expected shape (hidden_size=4096,), got (4095,)"
    assert type(error).__module__ == "pyops"


def test_message_of_an_error() -> None:
    x = torch.empty(2, 4096, dtype=torch.bfloat16)
    with pytest.raises(pyops.OpError) as caught:
        pyops.rms_norm(x.clone(), x, torch.empty(4095, dtype=torch.bfloat16), 1e-6)
    assert str(caught.value) == "rms_norm: weight: expected shape (hidden_size=4096,), got (4095,)"


@pytest.mark.parametrize(("value", "on"), [("", False), ("0", False), ("1", True), ("yes", True)])
def test_switches(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    from pyops._core import config

    switches = (
        ("REFERENCE", config.reference),
        ("SYNC", config.sync),
        ("LOG", config.log),
        ("CHECK", config.check_indices),
    )
    for name, switch in switches:
        monkeypatch.setenv(f"PYOPS_{name}", value)
        assert switch() is on
        monkeypatch.delenv(f"PYOPS_{name}")
        assert switch() is False


def test_forbidden_compiles_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyops._core import config

    monkeypatch.setenv("PYOPS_JIT", "error")
    x, out = torch.ones(2, 24), torch.empty(2, 24)
    with config.cpu("kernels"):
        with pytest.raises(
            pyops.NotLoadedError, match=r"(?s)^rms_norm: kernel norm/rms_norm.cu is not loaded.*HIDDEN_SIZE"
        ):
            pyops.rms_norm(out, x, None, 0.0)
        monkeypatch.delenv("PYOPS_JIT")
        pyops.rms_norm(out, x, None, 0.0)
        monkeypatch.setenv("PYOPS_JIT", "error")
        pyops.rms_norm(out.zero_(), x, None, 0.0)
        assert torch.equal(out, x)
        monkeypatch.setenv("PYOPS_JIT", "maybe")
        with pytest.raises(ValueError, match=r'^PYOPS_JIT: expected "compile" or "error", got "maybe"$'):
            pyops.rms_norm(torch.empty(2, 40), torch.ones(2, 40), None, 0.0)


def test_tensor_with_a_freed_storage_is_refused() -> None:
    x = torch.ones(2, 8)
    x.untyped_storage().resize_(0)
    with pytest.raises(pyops.OpError, match=r"^rms_norm: input: has no memory$"):
        pyops.rms_norm(torch.empty(2, 8), x, None, 1e-6)
