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

from . import lazy, tensor
from .lazy import loaded

if TYPE_CHECKING:
    from .op import Op


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an op. `role` is "in", "out" (written, never read) or "inout"; scalars are "in".

    A `keyed` scalar is part of the plan's key, so that the plan may choose by it; the others are passed at every call.
    A `number` is a tensor of one float32 for which a caller may give a Python number, too. One that is `by_name` comes
    behind a ``*``: callers give it as a keyword.
    """

    name: str
    kind: str  # "Tensor", "float", "int", "bool", "str" or "tuple[int, int]"
    optional: bool
    role: str
    keyed: bool
    has_default: bool
    default: Any
    number: bool = False
    by_name: bool = False

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
_MAX_TENSORS = 24
NAMESPACE: dict[str, Any] = {"is_compiling": _is_compiling, "cupy_ndarray": type(None)}
NAMESPACE |= {f"absent{i}": None for i in range(_MAX_TENSORS)}
NAMESPACE |= {"NUMBERS": frozenset((int, float)), "held_number": tensor.held_number, "dispatch_modes": bool}
_ops: dict[str, Op] = {}
_libraries: dict[str, Any] = {}  # the torch library of each op: an op that is declared again takes another


def write(op: Op) -> tuple[Callable[..., Any], Callable[[], None]]:
    """The wrapper of `op`, and what gives it its code, which its first call does otherwise."""
    text, short = render(op)
    filename = f"<pyops {op.name}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)

    def bind(text: str) -> tuple[Any, Any]:
        namespace: dict[str, Any] = {}
        exec(compile(text, filename, "exec"), NAMESPACE, namespace)
        bound: tuple[Any, Any] = namespace["bind"](
            op.plans,
            op.prepare,
            op.irregular,
            op.collision,
            op.recover,
            op.recent,
            op.remember,
            {p.name: p.default for p in op.parameters},
            load,
        )
        return bound

    def load() -> None:
        if wrappers[0].__code__ is first:
            for function, whole in zip(wrappers, bind(text), strict=True):
                function.__code__ = whole.__code__

    # Compiling the whole text takes milliseconds, which an op that is never called should not cost.
    wrappers = bind(short)
    first = wrappers[0].__code__
    wrapper: Callable[..., Any] = wrappers[0]
    wrapper.__doc__ = op.reference.__doc__
    wrapper.__annotations__ = op.reference.__annotations__
    wrapper.__module__ = op.reference.__module__
    return wrapper, load


def add(op: Op) -> None:
    """Have the op registered with torch: now, or when torch is bound. One of its name that was there goes."""
    remove(op.name)
    _ops[op.name] = op
    if _is_bound():
        _register(op)


def remove(name: str) -> None:
    """Take the op `name` from torch, if it is there."""
    _ops.pop(name, None)
    if (library := _libraries.pop(name, None)) is not None:
        forget(library)


def forget(library: Any) -> None:
    """Take back what a torch library holds, and what torch.ops has kept of it: that would be an error to whoever goes
    through all ops, as torch.export does."""
    library._destroy()


def _is_bound() -> bool:
    return "torch_ops" in NAMESPACE


def render(op: Op) -> tuple[str, str]:
    """Two sources of `bind(...)`, which returns the wrapper of `op` and its part for CuPy: the whole, and a short one.

    The functions of the short one call `load`, which gives them the code of the whole one, and themselves again. For
    that, all of them close over the same names.

    A call with torch tensors first asks the guard of the most recent plan whether the tensors look as they did then,
    one call into torch instead of reading a dozen attributes; else the attributes make the key that finds the plan.
    (It is called `_key`, because `key` is what attention calls a tensor.)
    """

    def passed(value: Callable[[Parameter], str]) -> str:
        return ", ".join(f"{p.name}={value(p)}" if p.by_name else value(p) for p in op.parameters)

    arguments = ", ".join(p.name for p in op.parameters)
    again = passed(lambda p: p.name)
    # Under a compiler, which then sees how the tensor comes about.
    traced = passed(lambda p: f"number({p.name}, {first_required(op)})" if p.number else p.name)
    numbers = [
        f"if {p.name}.__class__ in NUMBERS: {p.name} = held_number({p.name}, {first_required(op)})"
        for p in op.tensors
        if p.number
    ]
    declared = listed(op, [f"{p.name}=defaults[{p.name!r}]" if p.has_default else p.name for p in op.parameters])
    tensors = list(enumerate(op.tensors))
    keyed = [p.name for p in op.parameters if p.keyed]
    first = first_required(op)
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
    collide = [f"if {overlaps}: collision(_key, {', '.join(pointers)})"] if overlaps else []
    same = f"{required} and ({alignment}) == align"
    words = ", ".join([*pointers, *(name for name, _ in op.passed)])
    scalars = f"({', '.join(keyed)},)" if keyed else "()"

    def run(stream: str) -> list[str]:
        return [
            "try:",
            "    with lock:",
            f"        pack(buffer, 0, {words})",
            f"        error = fire[{stream}(device)]()",
            "except Exception as raised:",
            "    error = raised",
            f"if error: recover(error, _key, {stream}(device), {words})",
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
            f"    _key = ({alignment}, {', '.join([*parts, *keyed])})",
            f"    lock, pack, buffer, fire, device, {', '.join(extents)} = plans[_key]",
            "except KeyError:",
            "    lock = None",
            "except Exception as error:",
            f"    return irregular(error, {arguments})",
            "if lock is None:",
            f"    lock, pack, buffer, fire, device, {', '.join(extents)} = prepare(_key, {arguments})",
            f"if device < 0: return fire({arguments})",
            *collide,
        ]

    indent = "\n        "
    quick = [
        f"check, align, scalars, _key, lock, pack, buffer, fire, device, {', '.join(extents)} = recent[0]",
        f"if check({guarded}):",
        *(
            f"    p{i} = 0 if {p.name} is None else {p.name}.data_ptr()"
            if p.optional
            else f"    p{i} = {p.name}.data_ptr()"
            for i, p in tensors
        ),
        *(
            # An array in the place of a number may have no truth.
            (
                f"    try: again = {same} and {scalars} == scalars",
                "    except Exception: again = False",
                "    if again:",
            )
            if keyed
            else (f"    if {same}:",)
        ),
        *(f"        {line}" for line in collide),
        *(f"        {line}" for line in run("torch_stream")),
        "        return",
    ]
    torch_lines = [
        *numbers,
        *quick,
        # The guard knows the mode it was made in. A mode is to see the op, not what the op does.
        f"if dispatch_modes() and hasattr({first}, 'data_ptr'): return torch_ops.{op.name}({again})",
        *plan("{}.data_ptr()", "{0}.get_device(), {0}.dtype, {0}.shape, {0}.stride()"),
        f"remember(_key, {scalars}, {guarded})",
        *run("torch_stream"),
    ]
    cupy_lines = [
        *numbers,
        *plan("{}.data.ptr", "{0}.data.device_id, {0}.dtype, {0}.shape, {0}._c_contiguous or {0}.strides"),
        *run("cupy_stream"),
    ]
    names = f"plans, prepare, irregular, collision, recover, recent, remember, load, {op.name}, {op.name}_cupy"

    def bind(*lines: str, cupy_lines: list[str]) -> str:
        return f"""def bind(plans, prepare, irregular, collision, recover, recent, remember, defaults, load):
    def {op.name}({declared}):
        if is_compiling(): return torch_ops.{op.name}({traced})
        {indent.join(lines)}
        if 0: {names}

    def {op.name}_cupy({arguments}):
        {indent.join(cupy_lines)}
        if 0: {names}

    return {op.name}, {op.name}_cupy
"""

    to_cupy = f"if {first}.__class__ is cupy_ndarray: return {op.name}_cupy({arguments})"
    short = [f"load(); return {op.name}({again})"]
    return bind(to_cupy, *torch_lines, cupy_lines=cupy_lines), bind(*short, cupy_lines=short)


def listed(op: Op, parts: Sequence[str]) -> str:
    """A list of parameters, of which `parts` declares one each."""
    given, by_name = parts[: op.positional], parts[op.positional :]
    return ", ".join([*given, *(("*", *by_name) if by_name else ())])


def first_required(op: Op) -> str:
    """The tensor that says which library and device a call is for."""
    return next(p.name for p in op.tensors if not p.optional and not p.number)


def bind_cupy() -> None:
    """Let wrappers know cupy's array class."""
    cupy = loaded("cupy")
    get_current_stream = cupy.cuda.get_current_stream

    def cupy_stream(device: int) -> int:
        return int(get_current_stream(device).ptr)

    NAMESPACE.update(cupy_stream=cupy_stream, cupy_ndarray=cupy.ndarray)


def bind_torch() -> None:
    """Register every op as ``torch.ops.pyops.<name>`` and let wrappers use torch."""
    if _is_bound():
        return
    import torch

    stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # 0.1 us; the public call takes 4 us
    if stream is None:

        def stream(device: int) -> int:
            return int(torch.cuda.current_stream(device).cuda_stream)

    # Stand for absent tensors in a guard: one for each place, because it also demands that no tensor comes twice.
    absent = {f"absent{i}": torch.empty(0, dtype=torch.complex128) for i in range(_MAX_TENSORS)}
    for op in _ops.values():
        _register(op)

    def number(value: Any, like: Any) -> Any:
        return tensor.torch_number(torch, value, like)

    NAMESPACE.update(is_compiling=torch.compiler.is_compiling, number=number, torch_ops=torch.ops.pyops, **absent)
    NAMESPACE.update(torch_stream=stream, dispatch_modes=torch._C._len_torch_dispatch_stack)


def schema(op: Op) -> str:
    """The op's torch schema, with every written tensor marked."""
    parts = []
    for index, p in enumerate(op.parameters):
        mark = f"(a{index}!)" if p.written else ""
        # A compiler may not take an integer for a constant: it may be a size, which changes with every call.
        kind = {"int": "SymInt", "tuple[int, int]": "(int, int)"}.get(p.kind, p.kind)
        text = f"{kind}{mark}{'?' if p.optional else ''} {p.name}"
        if p.has_default:
            text += f'="{p.default}"' if isinstance(p.default, str) else f"={p.default}"
        parts.append(text)
    return f"{op.name}({listed(op, parts)}) -> ()"


def _register(op: Op) -> None:
    import torch

    library = _libraries[op.name] = torch.library.Library("pyops", "FRAGMENT")
    library.define(schema(op))
    for key in ("CUDA", "CPU"):
        library.impl(op.name, op.call, key)
    # A compiler has traced the wrapper, whose code may not change once it is guarded, and runs this before it guards.
    torch.library.register_fake(f"pyops::{op.name}", lambda *args, **kwargs: op.load(), lib=library)
    # torch.compile traces a reference, as layers that are switched off have it, but not the proxy of torch.
    module = op.reference.__globals__
    if module.get("torch") is lazy.torch:
        module["torch"] = torch
