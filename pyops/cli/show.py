"""Show one op: its signature, the launches that its example plans, and the source of a specialisation."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

import kernels_cu
import pyops

from .. import axes, tuning
from .._core.errors import OpError
from .._core.launch.tensor_map import TensorMap
from .._core.op import torch_library, wrapper
from .._core.op.op import Op
from .._core.system import device
from .._core.tensors import dtypes
from .._core.text import source as sources
from . import table


def show(name: str, given: Mapping[str, Any], arch: str = "sm_90") -> str:
    """Signature, torch schema, docstring, example with its axes, and the launches that it plans on `arch`."""
    if any(name in names for names in table.functions().values()):
        return _function(name)
    op = axes.find(name)
    values = axes.only(op, given)
    schemas = [torch_library.schema(op.declaration)]
    if op.declaration.returned:
        schemas.insert(0, torch_library.returning_schema(op.declaration))
    lines = [signature(op), *(f"torch.ops.pyops.{schema}" for schema in schemas), ""]
    lines += [inspect.getdoc(op.reference) or "", ""]
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
    lines.append(f"held by this process: {len(op.plans)} plans, {len(op.compiled())} kernels")
    lines += [f"    {one.kernel} {one.constants} {one.arch}: {one.registers} registers" for one in op.compiled()]
    return "\n".join(lines)


def _function(name: str) -> str:
    """Signature and docstring of a public function that is not an op."""
    function = getattr(pyops, name)
    parameters = ", ".join(map(str, inspect.signature(function).parameters.values()))
    return (
        f"{name}({parameters})\n\n{inspect.getdoc(function) or ''}\n\na function of Python, with no launch of its own"
    )


def signature(op: Op) -> str:
    """``rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None``"""
    parts = [
        f"{p.name}: {p.kind}{' | None' if p.optional or p.returned else ''}"
        + (f" = {p.default!r}" if p.has_default else "")
        for p in op.parameters
    ]
    returns = ", ".join("Tensor" for _ in op.declaration.returned)
    returns = f"tuple[{returns}]" if len(op.declaration.returned) > 1 else returns or "None"
    return f"{op.name}({wrapper.listed(op.declaration, parts)}) -> {returns}"


def source(name: str, given: Mapping[str, Any], arch: str = "sm_90") -> str:
    """The source, with includes resolved, of each kernel that the op's example with these axes plans on `arch`."""
    if any(name in names for names in table.functions().values()):
        return _function(name)
    op = axes.find(name)
    values = axes.only(op, given)
    texts = (one.specialisation.text for one in axes.launches(op, values, _model(arch)))
    return "\n".join(dict.fromkeys(texts))


def kernel_source(file: str, constants: Mapping[str, str]) -> str:
    """The source of a kernel file, with includes resolved, for constants as a CompileError prints them."""
    if file not in kernels_cu.names():
        raise OpError("pyops", file, "is no kernel file")
    return sources.flatten(file, {name: _constant(text) for name, text in constants.items()})


def _constant(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return dtypes.of(text) or text


def _model(arch: str) -> device.Device:
    try:
        return device.model(arch)
    except KeyError:
        raise OpError("pyops", "arch", f"no model of a device {arch}") from None
