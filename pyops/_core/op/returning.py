"""The form of an op that allocates its outputs and returns them: `new`, and the op itself if @op names `returns`."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..errors import OpError
from ..system import device
from ..system.lazy import loaded
from ..tensors import dtypes, tensor
from ..tensors.tensor import TensorArg
from . import arguments
from .declaration import Declaration
from .planner import Planner
from .torch_library import Form
from .wrapper import NAMESPACE, forwarded, listed

_MAX_KNOWN = 8192

Sizes = list[tuple[tuple[int, ...], str]]  # of each output: its shape, the name of its dtype


def make(planner: Planner, call: Callable[..., Any]) -> Form:
    """The form `new` of the op that `planner` plans; `call` is its wrapper, which writes the outputs.

    An output that may be None is not allocated: it stays a parameter. Where @op names what is `returned`, each of these
    outputs may also be given.
    """
    form, known = _form(planner.declaration), dict[Any, Sizes]()

    def sizes(key: Any, *values: Any) -> Sizes:
        """Sizes of the outputs, for a `key` that is not known. Raises OpError for a call that the op refuses."""
        found, keep = _sizes(planner, form, values)
        if keep and key is not None:
            if len(known) >= _MAX_KNOWN:
                known.clear()
            known[key] = found
        return found

    text = _render(planner.declaration, form)
    filename = f"<pyops {form.name} new>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {}
    exec(compile(text, filename, "exec"), NAMESPACE, namespace)
    defaults = {p.name: p.default for p in form.parameters}
    new, allocate = namespace["make"](call, known.get, sizes, tensor.new, defaults)
    reference, outputs = form.reference, [p.name for p in form.returned]
    new.__doc__, new.__module__, new.__qualname__ = reference.__doc__, reference.__module__, reference.__qualname__
    annotations = {name: kind for name, kind in reference.__annotations__.items() if name not in outputs}
    if planner.declaration.returned:
        annotations |= dict.fromkeys(outputs, "Tensor | None")
    else:
        new.__name__, new.__qualname__ = "new", f"{reference.__qualname__}.new"
    results = "Tensor" if len(outputs) == 1 else f"tuple[{', '.join('Tensor' for _ in outputs)}]"
    new.__annotations__ = {**annotations, "return": results}
    return Form(form, new, allocate)


def _form(declaration: Declaration) -> Declaration:
    """`declaration` with the outputs that `new` allocates after all other parameters, keyword-only and optional."""
    outputs = declaration.returned or [p for p in declaration.tensors if p.role == "out" and not p.optional]
    given = (p for p in declaration.parameters if p not in outputs)
    behind = (replace(p, optional=True, has_default=True, by_name=True, returned=True) for p in outputs)
    return replace(declaration, parameters=(*given, *behind))


def _render(declaration: Declaration, form: Declaration) -> str:
    """The source of `make(...)`, which returns `new` and `allocate` of an op.

    `allocate` looks sizes up by what they follow from: shapes, dtypes, and the scalars that a plan may choose by.
    """
    name, outputs = form.name, [p.name for p in form.returned]
    given = [p for p in form.parameters if not p.returned]
    defaults = [f"{p.name}=defaults[{p.name!r}]" if p.has_default else p.name for p in form.parameters]
    inputs = ", ".join(f"{p.name}={p.name}" if p.by_name else p.name for p in given)
    looks = (
        f"None if {p.name} is None else ({p.name}.dtype, {p.name}.shape)"
        if p.optional
        else f"{p.name}.dtype, {p.name}.shape"
        for p in given
        if p.is_tensor
    )
    key = ", ".join([*looks, *(p.name for p in given if p.keyed)])
    results = ", ".join(outputs)
    if declaration.returned:
        signature, torch_op = listed(form, defaults), f"torch_ops.{name}"
        absent = [f"{output} is None" for output in outputs]
        pairs = [f"{output} if {output} is not None else _new[{i}]" for i, output in enumerate(outputs)]
        allocation = f"""
        if {" or ".join(absent)}:
            if is_compiling():
                _new = {torch_op}({inputs})
                if {" and ".join(absent)}: return _new
            else:
                _new = allocate({inputs})
            {results} = {", ".join(pairs) if len(pairs) > 1 else "_new"}"""
    else:
        signature, torch_op = listed(form, defaults[: len(given)]), f"torch_ops.{name}.new"
        allocation = f"""
        if is_compiling(): return {torch_op}({inputs})
        {results} = allocate({inputs})"""
    return f"""def make(call, known, sizes, empty, defaults):
    def allocate({listed(form, defaults[: len(given)])}):
        try:
            _key = ({key},)
            _found = known(_key)
        except (AttributeError, TypeError):
            _key = _found = None
        if _found is None: _found = sizes(_key, {", ".join(p.name for p in given)})
        return {", ".join(f"empty({form.leader}, *_found[{i}])" for i in range(len(outputs)))}

    def {name}({signature}):{allocation}
        call({forwarded(declaration, lambda p: p.name)})
        return {results}
    return {name}, allocate
"""


def _sizes(planner: Planner, form: Declaration, values: Sequence[Any]) -> tuple[Sizes, bool]:
    """(sizes of the outputs, whether other calls with arguments that look the same may take them over).

    The plan function checks the call, with descriptors of its outputs, before anything is allocated. Tensors without
    data may have symbolic sizes, so for them only the result function runs.
    """
    values = (*values, *(None for _ in form.returned))
    symbolic = any(map(_has_no_data, form.tensors_of(values)))
    converted = None if symbolic else arguments.convert(form, values)
    _, described = arguments.describe(form, converted or values, _describe_symbols if symbolic else tensor.describe)
    found = dict(zip((p.name for p in form.parameters), described, strict=True))
    order, leader = [p.name for p in planner.declaration.parameters], found[form.leader]
    results = planner.results(*(found[name] for name in order))
    for p, (shape, dtype) in zip(form.returned, results, strict=True):
        found[p.name] = tensor.describe_new(form.name, p.name, shape, dtype, leader.device)
    if not symbolic:
        planner.launches(*(found[name] for name in order))
    sizes = [(found[p.name].shape, found[p.name].dtype.name) for p in form.returned]
    return sizes, converted is None and not symbolic


def _has_no_data(value: Any) -> bool:
    """Whether a tensor is on torch's device "meta" or of a torch subclass, such as FakeTensor."""
    if tensor.library_of(value) != "torch":
        return False
    torch = loaded("torch")
    return value.is_meta or type(value) not in (torch.Tensor, torch.nn.Parameter)


def _describe_symbols(op: str, name: str, value: Any, kind: str, written: bool) -> TensorArg:
    """The descriptor of a tensor without data."""
    tensor.check_needs_no_grad(op, name, value)
    dtype = dtypes.of(value.dtype)
    if dtype is None:
        raise OpError(op, name, dtypes.unsupported(value.dtype))
    return TensorArg(op, name, dtype, tuple(value.shape), tuple(value.stride()), 16, device.host())
