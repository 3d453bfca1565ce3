"""Writes the straight-line wrapper of an op, as dataclasses do for `__init__`, and registers the op with torch.

The wrapper reads addresses, builds the key of the plan, and calls the plan. Everything else happens behind a miss.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from .lazy import loaded

if TYPE_CHECKING:
    from .op import Op


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an op. `role` is "in", "out" (written, never read) or "inout"; scalars are "in".

    A `keyed` scalar is part of the plan's key, so that the plan may choose by it; the others are passed at every call.
    """

    name: str
    kind: str  # "Tensor", "float", "int", "bool" or "str"
    optional: bool
    role: str
    keyed: bool
    has_default: bool
    default: Any

    @property
    def written(self) -> bool:
        return self.role != "in"


def _is_compiling() -> bool:
    # Until torch is bound. A compiler that traces a first call lands here and must find the op registered.
    return "torch" in sys.modules and _bind_torch_while_tracing()


def never(*_: Any) -> bool:
    """The guard of a plan that has none yet."""
    return False


def unguarded(*_: Any) -> bool:
    """The guard of a plan that can have none."""
    return False


def guard(tensors: Sequence[Any]) -> Callable[..., bool]:
    """check(*tensors): whether they have these types, dtypes, devices, sizes and strides.

    It is the C++ guard of torch.compile, which torch does not document: without it every call takes the longer way.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        check: Callable[..., bool] = TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(t.shape) for t in tensors],
            dynamic_dims_strides=[list(t.stride()) for t in tensors],
        ).check
        return check if check(*tensors) else unguarded
    except Exception:
        return unguarded


def _bind_torch_while_tracing() -> bool:
    bind_torch()
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


_bind_torch_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]

# What every wrapper shares. `bind_torch` and `bind_cupy` fill it in once their library is there.
_MOST_TENSORS = 24
NAMESPACE: dict[str, Any] = {"is_compiling": _is_compiling, "cupy_ndarray": type(None)}
NAMESPACE |= {f"absent{i}": None for i in range(_MOST_TENSORS)}
_ops: list[Op] = []
_library: Any = None


def write(op: Op) -> Callable[..., Any]:
    """The wrapper of `op`."""
    text = render(op)
    filename = f"<pyops {op.name}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {}
    exec(compile(text, filename, "exec"), NAMESPACE, namespace)
    wrapper: Callable[..., Any] = namespace["bind"](
        op.plans,
        op.prepare,
        op.irregular,
        op.collision,
        op.recover,
        op.recent,
        op.remember,
        {p.name: p.default for p in op.parameters},
    )
    wrapper.__doc__ = op.reference.__doc__
    wrapper.__annotations__ = op.reference.__annotations__
    wrapper.__module__ = op.reference.__module__
    return wrapper


def add(op: Op) -> None:
    """Have the op registered with torch: now, or when torch is bound."""
    _ops.append(op)
    if _library is not None:
        _register(op, _library)


def render(op: Op) -> str:
    """Source of `bind(...)`, which returns the wrapper of `op`.

    A call with torch tensors first asks the guard of the most recent plan whether the tensors look as they did then,
    one call into torch instead of reading a dozen attributes; else the attributes make the key that finds the plan.
    """
    arguments = ", ".join(p.name for p in op.parameters)
    declared = ", ".join(f"{p.name}=defaults[{p.name!r}]" if p.has_default else p.name for p in op.parameters)
    tensors = list(enumerate(op.tensors))
    keyed = [p.name for p in op.parameters if p.keyed]
    first = next(p.name for p in op.tensors if not p.optional)
    pointers, extents = ([f"{letter}{i}" for i, _ in tensors] for letter in "pe")
    guarded = ", ".join(f"absent{i} if {p.name} is None else {p.name}" if p.optional else p.name for i, p in tensors)
    alignment = f"({' | '.join(pointers)}) & 15 and ({', '.join(f'{p} & 15' for p in pointers)},)"
    overlaps = " or ".join(
        f"p{i} < p{j} + e{j} and p{j} < p{i} + e{i}"
        for (i, p), (j, q) in combinations(tensors, 2)
        if p.written or q.written
    )
    # An address of 0: an empty tensor, or one whose storage was taken away.
    required = " and ".join(f"p{i}" for i, p in tensors if not p.optional)
    collide = [f"if {overlaps}: collision(key, {', '.join(pointers)})"] if overlaps else []
    words = ", ".join([*pointers, *op.floats])
    scalars = f"({', '.join(keyed)},)" if keyed else "()"

    def run(stream: str) -> list[str]:
        return [
            "try:",
            "    with lock:",
            f"        pack(buffer, 0, {words})",
            f"        fire({stream}(device), parameters, 0)",
            "except Exception as error:",
            f"    recover(error, key, {stream}(device), {words})",
        ]

    def plan(pointer: str, values: str) -> list[str]:
        lines, parts = ["try:"], []
        for i, p in tensors:
            described = values.format(p.name)
            if p.optional:
                lines += [
                    f"    if {p.name} is None: p{i} = 0; k{i} = None",
                    f"    else: p{i} = {pointer.format(p.name)}; k{i} = ({described})",
                ]
                parts.append(f"k{i}")
            else:
                lines.append(f"    p{i} = {pointer.format(p.name)}")
                parts.append(described)
        return [
            *lines,
            f"    if not ({required}): return irregular(None, {arguments})",
            f"    key = ({alignment}, {', '.join([*parts, *keyed])})",
            f"    lock, pack, buffer, fire, parameters, device, {', '.join(extents)} = plans[key]",
            "except KeyError:",
            "    lock = None",
            "except Exception as error:",
            f"    return irregular(error, {arguments})",
            "if lock is None:",
            f"    lock, pack, buffer, fire, parameters, device, {', '.join(extents)} = prepare(key, {arguments})",
            f"if device < 0: return fire({arguments})",
            *collide,
        ]

    indent = "\n        "
    quick = [
        f"check, align, scalars, key, lock, pack, buffer, fire, parameters, device, {', '.join(extents)} = recent[0]",
        f"if check({guarded}):",
        *(
            f"    p{i} = 0 if {p.name} is None else {p.name}.data_ptr()"
            if p.optional
            else f"    p{i} = {p.name}.data_ptr()"
            for i, p in tensors
        ),
        f"    if {required} and ({alignment}) == align{f' and {scalars} == scalars' if keyed else ''}:",
        *(f"        {line}" for line in collide),
        *(f"        {line}" for line in run("torch_stream")),
        "        return",
    ]
    torch_lines = [
        *quick,
        *plan("{}.data_ptr()", "{0}.get_device(), {0}.dtype, {0}.shape, {0}.stride()"),
        f"remember(key, {scalars}, {guarded})",
        *run("torch_stream"),
    ]
    cupy_lines = [
        *plan("{}.data.ptr", "{0}.data.device_id, {0}.dtype, {0}.shape, {0}._c_contiguous or {0}.strides"),
        *run("cupy_stream"),
    ]
    return f"""def bind(plans, prepare, irregular, collision, recover, recent, remember, defaults):
    def {op.name}({declared}):
        if is_compiling(): return torch_ops.{op.name}({arguments})
        if {first}.__class__ is cupy_ndarray: return {op.name}_cupy({arguments})
        {indent.join(torch_lines)}

    def {op.name}_cupy({arguments}):
        {indent.join(cupy_lines)}

    return {op.name}
"""


def bind_cupy() -> None:
    """Let wrappers know cupy's array class."""
    cupy = loaded("cupy")
    get_current_stream = cupy.cuda.get_current_stream

    def cupy_stream(device: int) -> int:
        return int(get_current_stream(device).ptr)

    NAMESPACE.update(cupy_stream=cupy_stream, cupy_ndarray=cupy.ndarray)


def bind_torch() -> None:
    """Register every op as ``torch.ops.pyops.<name>`` and let wrappers use torch."""
    global _library
    if _library is not None:
        return
    import torch

    stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # 0.1 us; the public call takes 4 us
    if stream is None:

        def stream(device: int) -> int:
            return int(torch.cuda.current_stream(device).cuda_stream)

    # Stand for absent tensors in a guard: one for each place, because it also demands that no tensor comes twice.
    absent = {f"absent{i}": torch.empty(0, dtype=torch.complex128) for i in range(_MOST_TENSORS)}
    _library = torch.library.Library("pyops", "DEF")
    for op in _ops:
        _register(op, _library)
    NAMESPACE.update(is_compiling=torch.compiler.is_compiling, torch_ops=torch.ops.pyops, torch_stream=stream, **absent)


def schema(op: Op) -> str:
    """The op's torch schema, with every written tensor marked."""
    parts = []
    for index, p in enumerate(op.parameters):
        mark = f"(a{index}!)" if p.written else ""
        text = f"{p.kind}{mark}{'?' if p.optional else ''} {p.name}"
        if p.has_default:
            text += f'="{p.default}"' if isinstance(p.default, str) else f"={p.default}"
        parts.append(text)
    return f"{op.name}({', '.join(parts)}) -> ()"


def _register(op: Op, library: Any) -> None:
    import torch

    library.define(schema(op))
    for key in ("CUDA", "CPU"):
        library.impl(op.name, op.call, key)
    torch.library.register_fake(f"pyops::{op.name}", lambda *args, **kwargs: None, lib=library)
