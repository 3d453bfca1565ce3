"""Show one op: its signature, the launches that its example plans, and the source of a specialisation."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

import kernels_cu
import pyops

from .. import _docstring as docstring
from .. import axes, gpus, tuning
from .._core.errors import OpError
from .._core.launch.tensor_map import TensorMap
from .._core.op import torch_library
from .._core.op.declaration import Declaration
from .._core.op.op import Op
from .._core.system import device
from .._core.tensors import dtypes
from .._core.text import source as sources
from ..tuning.engines import Choice
from . import table


def show(name: str, given: Mapping[str, Any], arch: str = "sm_90") -> str:
    """Signature, torch schema, docstring, example with its axes, and the launches that it plans on `arch`."""
    if any(name in names for names in table.functions().values()):
        return _function(name, given)
    op = axes.find(name)
    values = axes.only(op, given)
    schemas = [torch_library.schema(op.declaration)]
    if op.declaration.returned:
        schemas.insert(0, torch_library.returning_schema(op.declaration))
    elif op.form is not None:
        schemas.append(torch_library.returning_schema(op.form.declaration, ".new"))
    lines = [*signatures(op), *(f"torch.ops.pyops.{schema}" for schema in schemas), ""]
    lines += [inspect.getdoc(op.reference) or "", ""]
    if more := of_new(op):
        lines += [docstring.named("Args of new alone", more), ""]
    lines += ["Example:", textwrap.indent(pyops.example_text(name, **values), " " * 4), ""]
    lines.append("axes of its example")
    for axis_name, axis in axes.of(op).items():
        default = values.get(axis_name, axis.default)
        lines.append(
            f"    {axis_name}={default}" + (f"  ({', '.join(map(str, axis.choices))})" if axis.choices else "")
        )
    lines.append(f"launches of its example on {arch}")
    tuning.last.pop(op.name, None)  # left by an earlier plan
    for one in axes.launches(op, values, _model(arch)):
        specialisation = one.specialisation
        grid, threads = (" x ".join(map(str, sizes)) for sizes in (one.grid, [size for size in one.block if size > 1]))
        lines.append(f"    {specialisation.kernel.file}: {grid} blocks of {threads} threads, {one.shared} bytes shared")
        lines.append(f"        {specialisation}")
        lines += [f"        {name}: {value}" for name, value in one.fixed.items() if isinstance(value, TensorMap)]
    if op.name in tuning.last:
        lines.append(f"    chosen: {tuning.last[op.name]}")
        problem, choose = tuning.last_choice[op.name]
        if isinstance(choose, Choice):
            lines += [f"        {line}" for line in choose.explained(problem, problem.device)]
    lines.append(f"held by this process: {len(op.plans)} plans, {len(op.compiled())} kernels")
    lines += [f"    {one.kernel} {one.constants} {one.arch}: {one.registers} registers" for one in op.compiled()]
    return "\n".join(lines)


def _function(name: str, given: Mapping[str, Any]) -> str:
    """Signature and docstring of a public function that is not an op."""
    for axis in given:
        raise OpError(name, axis, "is no axis: a function of Python has no example")
    function = getattr(pyops, name)
    found = inspect.signature(function)
    parameters = [one.replace(annotation=_Unquoted(one.annotation)) for one in found.parameters.values()]
    found = found.replace(parameters=parameters, return_annotation=_Unquoted(found.return_annotation))
    return f"{name}{found}\n\n{inspect.getdoc(function) or ''}\n\na function of Python, with no launch of its own"


class _Unquoted(str):
    """An annotation that inspect prints as it is written."""

    __repr__ = str.__str__


def signatures(op: Op) -> list[str]:
    """``rms_norm(out: Tensor, input: Tensor, ...) -> None`` and ``rms_norm.new(input: Tensor, ...) -> Tensor``."""
    forms = {op.name: op.declaration}
    if op.form is not None and not op.declaration.returned:
        forms[f"{op.name}.new"] = op.form.declaration
    return [f"{name}({', '.join(parameters(form, op))}) -> {results(form)}" for name, form in forms.items()]


def of_new(op: Op) -> dict[str, str]:
    """The texts of the parameters that the form `new` has and the op has not."""
    own = {p.name for p in op.parameters}
    found = docstring.parse(op.form.new).parameters if op.form is not None else {}
    return {name: text for name, text in found.items() if name not in own}


def parameters(form: Declaration, op: Op) -> list[str]:
    """The parameters of a form of the op. Those that `new` returns are its parameters only if the op itself returns."""
    parts = []
    for p in form.parameters:
        if not p.returned or op.declaration.returned:
            kind = "torch.dtype" if p.kind == "dtype" else p.kind
            kind += " | float" if p.number else " | None" if p.optional or p.returned else ""
            parts.append(f"{p.name}: {kind}" + (f" = {p.default!r}" if p.has_default else ""))
    by_name = parts[form.positional :]
    return [*parts[: form.positional], *(("*", *by_name) if by_name else ())]


def results(form: Declaration) -> str:
    """``None``, ``Tensor``, or a tuple of them."""
    tensors = ", ".join("Tensor" for _ in form.returned)
    return f"tuple[{tensors}]" if len(form.returned) > 1 else tensors or "None"


def source(name: str, given: Mapping[str, Any], arch: str = "sm_90") -> str:
    """The source, with includes resolved, of each kernel that the op's example with these axes plans on `arch`."""
    if any(name in names for names in table.functions().values()):
        return _function(name, given)
    op = axes.find(name)
    values = axes.only(op, given)
    texts = (one.specialisation.text for one in axes.launches(op, values, _model(arch)))
    return "\n".join(dict.fromkeys(texts))


def kernel_source(file: str, constants: Mapping[str, str]) -> str:
    """The source of a kernel file, with includes resolved, for constants as a CompileError prints them: `entry` names
    the kernel, if it is not named as the file."""
    if file not in kernels_cu.names():
        raise OpError("pyops", file, "is no kernel file")
    values = {name: _constant(text) for name, text in constants.items() if name != "entry"}
    return sources.flatten(file, values, entry=sources.signature(file, entry=constants.get("entry")).entry)


def _constant(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return dtypes.of(text) or text


def _model(arch: str) -> device.Device:
    try:
        return gpus.model(arch)
    except KeyError:
        raise OpError("pyops", "arch", f"no model of a device {arch}") from None
