"""Every op in the registry within torch: schema, fakes, opcheck, torch.compile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import pyops
from pyops._core.op.op import Op
from pyops._core.op.torch_library import Form
from pyops.testing import same_bits
from pyops.testing.calls import assert_same, clones, expected, named, written
from tests.support import axes
from tests.support.calls import DEVICES, KERNELS, example, inputs_of_form
from tests.support.profiles import PROFILE, covering

OPS = [pytest.param(op, id=name) for name, op in pyops.registry.items()]
# The opcheck tests of ops that only write. opcheck's last test compiles for dynamic sizes, which the fake of such an
# op, a no-op, cannot distinguish; test_compile_without_graph_break compiles these ops.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
COMPILING_CHECKS = (*CHECKS, "test_aot_dispatch_dynamic")


def _args(op: Op, device: str = "cpu") -> list[Any]:
    return example(op, device, num_tokens=5, **axes.fullest(op))


FORMS = [param for param in OPS if pyops.registry[param.id].form]


@cache
def _compiled(form: bool) -> set[str]:
    """Ops that are compiled, or those with compiled forms: torch compiles by the schema, and these have every kind of
    argument and result, in every family. The profile "nightly" compiles all."""

    def parts(name: str) -> set[Any]:
        op = pyops.registry[name]
        schema = (_packet_of_form(op) if form else _torch_op(op))._schema
        written = (str(one.type) + "!" * bool(one.alias_info and one.alias_info.is_write) for one in schema.arguments)
        arguments = {
            (kind, one.kwarg_only, one.has_default_value()) for kind, one in zip(written, schema.arguments, strict=True)
        }
        family = op.reference.__module__.split(".")[2]
        return arguments | {family, ("results", len(schema.returns)), ("returned", len(op.declaration.returned))}

    names = [param.id for param in (FORMS if form else OPS)]
    return set(names if PROFILE.variants is None else covering(names, parts))


def _packet_of_form(op: Op) -> Any:
    """The torch op of the form that allocates outputs."""
    packet = getattr(torch.ops.pyops, op.name)
    return packet.default if op.declaration.returned else packet.new


def _form(op: Op, device: str = "cpu") -> tuple[Form, tuple[Any, ...]]:
    """The form that allocates outputs, and its arguments."""
    assert op.form is not None
    return op.form, tuple(inputs_of_form(op, _args(op, device)).values())


def _call(form: Form, function: Callable[..., Any], inputs: Sequence[Any]) -> partial[Any]:
    """A call of a function with the parameters of `new`, given a value for each of them."""
    positional = form.declaration.positional
    names = (p.name for p in form.declaration.parameters[positional:])
    return partial(function, *inputs[:positional], **dict(zip(names, inputs[positional:], strict=False)))


def _new(form: Form, inputs: Sequence[Any], function: Callable[..., Any] | None = None) -> Sequence[Any]:
    """What `new`, or another function with its parameters, returns for a value of each parameter."""
    return _listed(_call(form, function or form.new, inputs)())


def _listed(results: Any) -> Sequence[Any]:
    return results if isinstance(results, tuple) else (results,)


def _torch_op(op: Op) -> Any:
    """The form that writes given outputs."""
    packet = getattr(torch.ops.pyops, op.name)
    return packet.out if op.declaration.returned else packet.default


def _returned(op: Op, result: Any) -> list[int]:
    """Identities of the tensors that a call returned."""
    if not op.declaration.returned:
        assert result is None
        return []
    return [id(one) for one in (result if isinstance(result, tuple) else (result,))]


def _outputs(op: Op, args: Any) -> list[int]:
    """Identities of the tensors that a call with all outputs given must return."""
    return [id(named(op, args)[p.name]) for p in op.declaration.returned]


@pytest.fixture(autouse=True)
def _registered() -> None:
    """Ops register with torch at the first call with a tensor, if pyops was imported before torch."""
    pyops._bind_loaded()


@pytest.fixture
def float8_allclose(monkeypatch: pytest.MonkeyPatch) -> None:
    """opcheck compares with torch.allclose, which does not take float8, nor NaN as equal to NaN."""
    allclose = torch.allclose

    def wider(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        if a.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2):
            a, b = a.float(), b.float()
        return allclose(a, b, *args, **kwargs)

    monkeypatch.setattr(torch, "allclose", wider)


@pytest.mark.parametrize("op", OPS)
def test_schema_marks_written_arguments(op: Op) -> None:
    arguments = _torch_op(op)._schema.arguments
    assert [argument.name for argument in arguments] == [p.name for p in op.parameters]
    for argument, p in zip(arguments, op.parameters, strict=True):
        assert (argument.alias_info is not None and argument.alias_info.is_write) == p.written
        assert argument.has_default_value() == (p.has_default and not p.returned)
        assert not argument.has_default_value() or argument.default_value == p.default


@pytest.mark.parametrize("op", OPS)
def test_reference_writes_marked_arguments(op: Op) -> None:
    args = _args(op)
    results = expected(op, args)
    copies = clones(args)
    op.applied(op.reference, copies)()
    for p in op.tensors:
        value = named(op, args).get(p.name)
        if value is None:
            continue
        assert same_bits(value, named(op, copies)[p.name]) != p.written, f"{p.name} was written or not, unlike its mark"
        assert not p.written or same_bits(results[p.name], named(op, copies)[p.name])


@pytest.mark.parametrize("op", OPS)
def test_fake_and_meta_tensors(op: Op) -> None:
    """Tensors without data go through the wrapper as through torch.ops, and nothing runs."""
    args = _args(op)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        assert _returned(op, op.applied(op.wrapper, fakes)()) == _outputs(op, fakes)
        assert op.applied(_torch_op(op), fakes)() is None
    metas = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
    assert _returned(op, op.applied(op.wrapper, metas)()) == _outputs(op, metas)
    assert op.applied(_torch_op(op), metas)() is None


@pytest.mark.usefixtures("float8_allclose")
@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("op", [param for param in OPS if param.id in _compiled(form=False)])
def test_opcheck(op: Op, device: str) -> None:
    call = op.applied(_torch_op(op), _args(op, device))
    torch.library.opcheck(call.func, call.args, call.keywords, test_utils=CHECKS)


@pytest.fixture
def filled_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors always hold the same garbage, so that elements which an op leaves alone can be compared."""
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.testing, "assert_close", partial(torch.testing.assert_close, equal_nan=True))
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.rotates
@pytest.mark.usefixtures("float8_allclose", "filled_memory")
@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("op", FORMS)
def test_opcheck_of_returned_tensors(op: Op, device: str) -> None:
    """And `new` returns the results of the writing form, compiled or not."""
    form, inputs = _form(op, device)
    call = _call(form, _packet_of_form(op), inputs)
    is_compiled = op.name in _compiled(form=True)
    # A result's size and strides are the op's own; what the other checks see is the same code for every op.
    checks = COMPILING_CHECKS if is_compiled else "test_faketensor"
    torch.library.opcheck(call.func, call.args, call.keywords, test_utils=checks)
    copies, compiled = clones(inputs), clones(inputs)
    results = _new(form, copies)
    function = form.new
    if is_compiled:
        torch._dynamo.reset()
        function = torch.compile(form.new, fullgraph=True, backend="aot_eager")
    found = _new(form, compiled, function)
    assert all(map(same_bits, results, found))
    outputs = {p.name: torch.empty_like(one) for p, one in zip(form.declaration.returned, results, strict=True)}
    for p in form.declaration.returned:
        if p.partial:
            outputs[p.name].zero_()
    given = dict(zip((p.name for p in form.declaration.parameters), clones(inputs), strict=False))
    op(*({**given, **outputs}[p.name] for p in op.parameters))
    assert all(map(same_bits, results, outputs.values()))
    for p, one, other, right in zip(form.declaration.parameters, copies, compiled, given.values(), strict=False):
        assert not p.written or one is None or (same_bits(one, right) and same_bits(other, right))


@pytest.mark.parametrize("op", FORMS)
def test_returned_sizes_without_data(op: Op) -> None:
    form, inputs = _form(op)
    right = _new(form, inputs, form.allocate)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in inputs]
        for found in (_new(form, fakes), _new(form, fakes, form.allocate)):
            for one, other in zip(found, right, strict=True):
                assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    metas = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in inputs]
    assert [one.shape for one in _new(form, metas)] == [one.shape for one in right]


@pytest.mark.parametrize("op", [param for param in OPS if param not in FORMS])
def test_only_what_is_in_place_has_no_form(op: Op) -> None:
    """And says so."""
    assert not [p.name for p in op.tensors if p.role == "out" or p.partial]
    with pytest.raises(pyops.OpError, match=f"^{op.name}: new: there is no such form: the op writes .* in place$"):
        op.wrapper.new()


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("op", [param for param in OPS if param.id in _compiled(form=False)])
def test_compile_without_graph_break(op: Op, device: str) -> None:
    _assert_compiles(op, device, "aot_eager")


@pytest.mark.gpu
@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="inductor needs a C compiler")
@pytest.mark.parametrize("op", OPS[:2])
def test_compile_with_inductor(op: Op) -> None:
    _assert_compiles(op, "cuda", "inductor")


def _assert_compiles(op: Op, device: str, backend: str) -> None:
    args = _args(op, device)
    eager, compiled = clones(args), clones(args)
    op(*eager)
    torch._dynamo.reset()

    def call(*args: Any, **by_name: Any) -> None:
        op.wrapper(*args, **by_name)

    op.applied(torch.compile(call, fullgraph=True, backend=backend), compiled)()
    assert_same(op, written(op, eager), written(op, compiled))
    for name, value in named(op, args).items():
        assert name in written(op, args) or same_bits(value, named(op, compiled)[name])


def test_one_graph_for_dynamic_sizes() -> None:
    """Integer arguments may be sizes, so a compiler must not specialise on them."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(dynamic=True, fullgraph=True, backend=backend)
    def largest(logits: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        indices = logits.new_empty(logits.shape[0], 4, dtype=torch.int32)
        starts, sizes = torch.zeros_like(ends), (logits.shape[0], logits.stride(0), logits.stride(1))
        pyops.top_k_per_row_prefill(logits, starts, ends, indices, *sizes, 4)
        return indices

    torch._dynamo.reset()
    for rows, columns in ((3, 20), (5, 33), (7, 50)):
        logits = torch.arange(float(rows * columns)).reshape(rows, columns)
        found = largest(logits, torch.full((rows,), columns, dtype=torch.int32))
        assert found.sort(-1).values.tolist() == [list(range(columns - 4, columns))] * rows
    assert len(graphs) == 1


class _Seen(TorchDispatchMode):
    """Record the functions that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
def test_modes_see_the_op(device: str) -> None:
    """A mode sees the op but none of its parts, also for a cached plan with a guard."""
    x = torch.randn(3, 8, device=device)
    out = torch.empty_like(x)
    for _ in range(3):
        pyops.relu2(out, x)
    with _Seen() as seen:
        pyops.relu2(out, x)
        pyops.relu2(out[:2], x[:2])
        pyops.relu2(numpy.empty((1, 8), "float32"), numpy.ones((1, 8), "float32"))
    assert [name for name in seen.names if name.startswith("pyops")] == ["pyops.relu2.default"] * 2
    graph = make_fx(lambda x: pyops.relu2(out, x))(x)
    assert torch.ops.pyops.relu2.default in [node.target for node in graph.graph.nodes]


@pytest.mark.parametrize("op", OPS)
def test_parameters_and_inference_tensors(op: Op) -> None:
    """Inputs may be nn.Parameters, and every tensor may be made under inference_mode."""
    args = _args(op)
    results = expected(op, args)
    parameters = [
        torch.nn.Parameter(arg) if isinstance(arg, torch.Tensor) and arg.is_floating_point() and not p.written else arg
        for p, arg in zip(op.parameters, clones(args), strict=True)
    ]
    with torch.no_grad():
        op(*parameters)
    assert_same(op, results, written(op, parameters))
    with torch.inference_mode():
        values = clones(args)
        op(*values)
        assert_same(op, results, written(op, values))
