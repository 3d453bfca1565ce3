"""The form of an op that allocates its outputs and returns them: `new`, and the op itself if @op names `returns`."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from ..errors import OpError
from ..system import device
from ..system.lazy import loaded
from ..tensors import tensor
from ..tensors.tensor import TensorArg
from . import arguments
from .declaration import Declaration, Parameter, parameter
from .planner import Planner, Result
from .torch_library import Form
from .wrapper import NAMESPACE, forwarded, listed

_MAX_KNOWN = 8192
_MAX_BYTES = 2**63

Sizes = list[tuple[Any, ...]]  # of each output: what `tensor.new` takes of its `Result`

# (reference, result function, parameters of `new`, {output: whether it is partial}) -> the docstring of `new`
Document = Callable[[Callable[..., Any], Callable[..., Any], Sequence[str], Mapping[str, bool]], str]
_document: Document


def document_by(write: Document) -> None:
    """Have `write` say what the docstring of each form `new` is."""
    global _document
    _document = write


def _allocated(declaration: Declaration) -> list[Parameter]:
    """The outputs that a form `new` of the op allocates: those that may not be None; or all, if all may be None."""
    outputs = [p for p in declaration.tensors if p.role == "out" or p.partial]
    return list(declaration.returned) or [p for p in outputs if not p.optional] or outputs


def like_inputs(declaration: Declaration) -> Callable[..., Any] | None:
    """The result function of an op with outputs that may each be an input itself; None of another op."""
    outputs = _allocated(declaration)
    names = [declaration.in_place[p.name] for p in outputs if p.name in declaration.in_place]
    if not outputs or len(names) < len(outputs):
        return None

    def like_inputs(**call: Any) -> tuple[Result, ...]:
        return tuple(Result(call[name].shape, call[name].dtype) for name in names)

    inputs = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in dict.fromkeys(names)]
    like_inputs.__signature__ = inspect.Signature(inputs)  # type: ignore[attr-defined]
    return like_inputs


def refusing(declaration: Declaration) -> Callable[..., NoReturn]:
    """What stands for the form `new` of an op without one: it says why."""
    outputs = [p.name for p in _allocated(declaration)]
    if outputs:
        why = f"there is no such form: what {_joined(outputs)} would be does not follow from the other arguments"
    else:
        written = [p for p in declaration.tensors if p.written]
        why = f"there is no such form: the op writes {_joined([p.name for p in written])} in place"

    def new(*args: Any, **kwargs: Any) -> NoReturn:
        raise OpError(declaration.name, "new", why)

    new.__doc__ = f"{why[0].upper()}{why[1:]}."
    return new


def _joined(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``"""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def make(planner: Planner, call: Callable[..., Any], result: Callable[..., Any] | None = None) -> Form:
    """The form `new` of the op that `planner` plans; `call` is its wrapper, which writes the outputs.

    Keyword-only parameters of the function `result` are parameters of `new` alone. Where @op names what is `returned`,
    each of these outputs may also be given.
    """
    form, known = _form(planner.declaration, result), dict[Any, Sizes]()

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
    new, allocate = namespace["make"](call, known.get, sizes, tensor.new, tensor.zeros, defaults)
    reference, outputs = form.reference, [p.name for p in form.returned]
    given = [p.name for p in form.parameters if not p.returned or planner.declaration.returned]
    new.__module__, new.__qualname__ = reference.__module__, reference.__qualname__
    new.__doc__ = _document(reference, result or reference, given, {p.name: p.partial for p in form.returned})
    known_kinds = {**(result.__annotations__ if result else {}), **reference.__annotations__}
    annotations = {name: known_kinds[name] for name in given}
    if planner.declaration.returned:
        annotations |= dict.fromkeys(outputs, "Tensor | None")
    else:
        new.__name__, new.__qualname__ = "new", f"{reference.__qualname__}.new"
    results = "Tensor" if len(outputs) == 1 else f"tuple[{', '.join('Tensor' for _ in outputs)}]"
    new.__annotations__ = {**annotations, "return": results}
    return Form(form, new, allocate)


def _form(declaration: Declaration, result: Callable[..., Any] | None) -> Declaration:
    """`declaration` with the outputs that `new` allocates after all other parameters, keyword-only and optional."""
    outputs = _allocated(declaration)
    given = (p for p in declaration.parameters if p not in outputs)
    of_result = inspect.signature(result).parameters.values() if result else ()
    own = (parameter(declaration.name, p) for p in of_result if p.kind is p.KEYWORD_ONLY)
    behind = (replace(p, optional=True, has_default=True, by_name=True, returned=True) for p in outputs)
    return replace(declaration, parameters=(*given, *own, *behind))


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
    keyed = [p.name for p in given if p.keyed]
    if any(p.kind == "dtype" for p in given):  # by default, a dtype may be that of the device
        keyed += [f"{form.leader}.__class__", f"getattr({form.leader}, 'is_cuda', False)"]
    key = ", ".join([*looks, *keyed])
    results = ", ".join(outputs)
    made = [f"{'zeros' if p.partial else 'empty'}({form.leader}, *_found[{i}])" for i, p in enumerate(form.returned)]
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
    return f"""def make(call, known, sizes, empty, zeros, defaults):
    def allocate({listed(form, defaults[: len(given)])}):
        try:
            _key = ({key},)
            _found = known(_key)
        except (AttributeError, TypeError):
            _key = _found = None
        if _found is None: _found = sizes(_key, {", ".join(p.name for p in given)})
        return {", ".join(made)}

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
    results = planner.results(*described)
    for p, (shape, dtype, *column_stride) in zip(form.returned, results, strict=True):
        device_of_all = found[form.leader].device
        found[p.name] = tensor.describe_new(form.name, p.name, shape, dtype, device_of_all, *column_stride)
    if not symbolic:
        planner.launches(*(found[p.name] for p in planner.declaration.parameters))
    for new in (found[p.name] for p in form.returned):
        if any(type(size) is int and size < 0 for size in new.shape) or not (symbolic or new.extent < _MAX_BYTES):
            raise new.error(f"no tensor has the shape {new.shape}")
    sizes = [
        (shape, dtype.name, column_stride) if column_stride else (shape, dtype.name)
        for shape, dtype, column_stride in results
    ]
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
    on = tensor.device_of(value) if value.is_cuda and loaded("torch").cuda.is_available() else device.host()
    return TensorArg(op, name, tensor.dtype_of(op, name, value), tuple(value.shape), tuple(value.stride()), 16, on)
