"""The Python function of an op: straight-line code, generated from the declaration as dataclasses generate `__init__`.

The function reads addresses, finds the plan, packs and launches. Everything else happens after a miss.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from ..tensors import tensor
from .declaration import Declaration, Parameter
from .plan import Plan

_MAX_TENSORS = 24  # most tensor parameters of an op
# Up to this number of pairs of tensors, comparing all address ranges at every call costs less than remembering
# addresses.
_FEW_PAIRS = 4
# What a tensor contributes to the key of a plan.
# Planning refuses a call that autograd would have to record, or with a lazily negated tensor. So the key of such a call
# never finds a plan.
_TORCH_KEY = (
    "{0}.get_device(), {0}.dtype, {0}.shape, {0}.stride(), {0}.requires_grad and is_grad_enabled(), {0}.is_neg()"
)
_CUPY_KEY = "{0}.data.device_id, {0}.dtype, {0}.shape, {0}._c_contiguous or {0}.strides"

# Globals of every wrapper. `torch_library.bind_torch` and `bind_cupy` complete them once their library is imported.
NAMESPACE: dict[str, Any] = {
    "cupy_ndarray": type(None),
    "NUMBERS": frozenset((int, float)),
    "held_number": tensor.held_number,
    "dispatch_modes": bool,
    **{f"absent{i}": None for i in range(_MAX_TENSORS)},
}


class Callbacks(NamedTuple):
    """The functions and data of a wrapper, by the names in its generated text.

    Attributes:
        plans: {key: plan}.
        recent: [the plan of the last call with torch tensors].
        prepare: (key, *arguments) -> the plan of a new signature.
        call_unkept: (error, *arguments): a call without a key.
        overlap: (plan, *addresses): address ranges meet; refuse the call if bytes are shared.
        recover: (error, plan, stream, *words): a launch that failed.
        remember: (plan, *tensors): the next call may find this plan by its guard.
        defaults: default values of the op's parameters.
    """

    plans: dict[Any, Plan]
    recent: list[Plan]
    prepare: Callable[..., Plan]
    call_unkept: Callable[..., Any]
    overlap: Callable[..., None]
    recover: Callable[..., None]
    remember: Callable[..., None]
    defaults: dict[str, Any]


def make(declaration: Declaration, callbacks: Callbacks) -> tuple[Callable[..., Any], Callable[[], None]]:
    """The wrapper of an op, and a function that compiles its text, which the first call does otherwise.

    A text takes a millisecond to compile. The wrapper therefore begins as a stub: the stub compiles the text, takes
    over the code of the function that it finds there, and calls itself again.
    """
    name = declaration.name
    text = render(declaration)
    filename = f"<pyops {name}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    names = (*callbacks._fields, "load", name, f"{name}_cupy")

    def functions(text: str) -> tuple[Any, Any]:
        namespace: dict[str, Any] = {}
        exec(compile(text, filename, "exec"), NAMESPACE, namespace)
        made: tuple[Any, Any] = namespace["make"](*callbacks, load)
        return made

    def load() -> None:
        if wrappers[0].__code__ is stub:
            for function, whole in zip(wrappers, functions(text), strict=True):
                function.__code__ = whole.__code__

    # Functions may exchange their code only if they close over the same variables: the stub names all of them.
    called = forwarded(declaration, lambda p: p.name)
    body = [f"load(); return {name}({called})", f"{', '.join(names)}"]
    wrappers = functions(_module(declaration, body, body))
    stub = wrappers[0].__code__
    wrapper: Callable[..., Any] = wrappers[0]
    wrapper.__doc__ = declaration.reference.__doc__
    wrapper.__annotations__ = declaration.reference.__annotations__
    wrapper.__module__, wrapper.__qualname__ = declaration.reference.__module__, declaration.reference.__qualname__
    return wrapper, load


def listed(declaration: Declaration, parts: Sequence[str]) -> str:
    """A parameter list, to which `parts` contribute one declaration each."""
    given, by_name = parts[: declaration.positional], parts[declaration.positional :]
    return ", ".join([*given, *(("*", *by_name) if by_name else ())])


def forwarded(declaration: Declaration, value: Callable[[Parameter], str]) -> str:
    """The arguments of a call that forwards every parameter."""
    return ", ".join(f"{p.name}={value(p)}" if p.by_name else value(p) for p in declaration.parameters)


def _module(declaration: Declaration, torch_lines: Sequence[str], cupy_lines: Sequence[str]) -> str:
    """The source of `make(...)`, which returns the wrapper and its twin for CuPy arrays."""
    name = declaration.name
    signature = listed(
        declaration,
        [f"{p.name}=defaults[{p.name!r}]" if p.has_default else p.name for p in declaration.parameters],
    )
    leader, indent = declaration.leader, "\n        "
    # torch.compile must be able to trace the conversion of a number to a tensor.
    traced = forwarded(declaration, lambda p: f"number({p.name}, {leader})" if p.number else p.name)
    return f"""def make({", ".join(Callbacks._fields)}, load):
    def {name}({signature}):
        if is_compiling(): return torch_ops.{name}({traced})
        {indent.join(torch_lines)}

    def {name}_cupy({", ".join(p.name for p in declaration.parameters)}):
        {indent.join(cupy_lines)}

    return {name}, {name}_cupy
"""


def render(declaration: Declaration) -> str:
    """The source of the wrapper.

    A call with torch tensors first asks the guard of the last call's plan whether the tensors look as they did then:
    one call into torch instead of reading a dozen attributes. If they do not, or for CuPy arrays, those attributes make
    the key by which the plan is found. (`_key`, because attention has an argument `key`.)
    """
    text = _Text(declaration)
    name, leader = declaration.name, declaration.leader
    arguments = ", ".join(p.name for p in declaration.parameters)
    same_arguments = forwarded(declaration, lambda p: p.name)
    names = (*Callbacks._fields, "load", name, f"{name}_cupy")
    torch_lines = [
        f"if {leader}.__class__ is cupy_ndarray: return {name}_cupy({arguments})",
        *text.numbers(),
        *text.guarded(),
        "if not found:",
        # A guard fails under a dispatch mode other than its own: such a mode must see the op, not its launches.
        f"    if dispatch_modes() and hasattr({leader}, 'data_ptr'): return torch_ops.{name}({same_arguments})",
        *(f"    {line}" for line in text.keyed("{}.data_ptr()", _TORCH_KEY)),
        f"    remember(plan, {text.guard_arguments})",
        *text.separate(),
        *text.written(),
        *text.launched("torch_stream"),
        "return",
        ", ".join(names),
    ]
    cupy_lines = [
        *text.numbers(),
        *text.keyed("{}.data.ptr", _CUPY_KEY),
        *text.separate(),
        *text.launched("cupy_stream"),
        "return",
        ", ".join(names),
    ]
    return _module(declaration, torch_lines, cupy_lines)


class _Text:
    """Pieces of a wrapper's text. Tensor i of the op has the address `p{i}` and its part of the key in `k{i}`."""

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.tensors = list(enumerate(declaration.tensors))
        self.arguments = ", ".join(p.name for p in declaration.parameters)
        self.pointers = [f"p{i}" for i, _ in self.tensors]
        self.addresses = f"({', '.join(self.pointers)},)"
        # Pairs of tensors that may not overlap.
        self.pairs = [(i, j) for (i, p), (j, q) in combinations(self.tensors, 2) if p.written or q.written]
        self.remembers = len(self.pairs) > _FEW_PAIRS
        masked = ", ".join(f"{p} & 15" for p in self.pointers)
        self.alignments = f"({' | '.join(self.pointers)}) & 15 and ({masked},)"
        # The address is 0 for an empty tensor and for one without storage.
        self.required = " and ".join(f"(p{i} or {p.name} is None)" if p.optional else f"p{i}" for i, p in self.tensors)
        keyed = [p.name for p in declaration.parameters if p.keyed]
        self.scalars = f"({', '.join(keyed)},)" if keyed else ""
        self.guard_arguments = ", ".join(
            f"absent{i} if {p.name} is None else {p.name}" if p.optional else p.name for i, p in self.tensors
        )

    def numbers(self) -> list[str]:
        """A Python number given for a tensor becomes a cached tensor."""
        leader = self.declaration.leader
        return [
            f"if {p.name}.__class__ in NUMBERS: {p.name} = held_number({p.name}, {leader})"
            for _, p in self.tensors
            if p.number
        ]

    def guarded(self) -> list[str]:
        """`found`: the last call's plan serves this call, too. Addresses that passed before are not checked again."""
        found = f"{self.required} and ({self.alignments}) == plan.alignments"
        if self.remembers:
            found = f"{self.addresses} == plan.addresses or ({found})"
        lines = [
            "plan = recent[0]",
            f"found = plan.guard({self.guard_arguments}) and not (plan.requires_grad and is_grad_enabled())",
            "if found:",
            *(
                f"    p{i} = 0 if {p.name} is None else {p.name}.data_ptr()"
                if p.optional
                else f"    p{i} = {p.name}.data_ptr()"
                for i, p in self.tensors
            ),
        ]
        if not self.scalars:
            return [*lines, f"    found = {found}"]
        # An array in place of a number may have no truth value.
        return [
            *lines,
            f"    try: found = ({found}) and {self.scalars} == plan.scalars",
            "    except Exception: found = False",
        ]

    def keyed(self, pointer: str, described: str) -> list[str]:
        """`plan` by the key, or a new one. Calls without a key, and plans without launches, return from here."""
        lines, parts = ["try:"], []
        for i, p in self.tensors:
            words = described.format(p.name)
            if p.optional:
                lines += [
                    f"    if {p.name} is None: p{i} = 0; k{i} = None",
                    f"    else: p{i} = {pointer.format(p.name)}; k{i} = ({words})",
                ]
                parts.append(f"k{i}")
            else:
                lines.append(f"    p{i} = {pointer.format(p.name)}")
                parts.append(words)
        parts += [p.name for p in self.declaration.parameters if p.keyed]
        return [
            *lines,
            f"    if not ({self.required}): return call_unkept(None, {self.arguments})",
            f"    _key = ({self.alignments}, {', '.join(parts)})",
            "    plan = plans.get(_key)",
            "except Exception as error:",
            f"    return call_unkept(error, {self.arguments})",
            f"if plan is None: plan = prepare(_key, {self.arguments})",
            f"if plan.lock is None: return plan.run({self.arguments})",
        ]

    def separate(self) -> list[str]:
        """Test new addresses for overlaps."""
        if not self.pairs:
            return []
        meets = " or ".join(f"p{i} < p{j} + e{j} and p{j} < p{i} + e{i}" for i, j in self.pairs)
        lines = [
            f"{', '.join(f'e{i}' for i, _ in self.tensors)}, = plan.extents",
            f"if {meets}: overlap(plan, {', '.join(self.pointers)})",
        ]
        if not self.remembers:
            return lines
        return [
            f"if {self.addresses} != plan.addresses:",
            *(f"    {line}" for line in lines),
            f"    plan.addresses = {self.addresses}",
        ]

    def written(self) -> list[str]:
        """Raise the version of each written tensor for autograd, as torch's own in-place ops do."""
        names = [f"absent{i} if {p.name} is None else {p.name}" for i, p in self.tensors if p.written and p.optional]
        names += [p.name for _, p in self.tensors if p.written and not p.optional]
        return [
            "if not found or plan.versioned:",
            f"    try: increment_version(({', '.join(names)},))",
            "    except RuntimeError: pass",  # a tensor that was made in inference mode has no version
        ]

    def launched(self, stream: str) -> list[str]:
        """Pack the call's words and launch."""
        words = ", ".join([*self.pointers, *(name for name, _ in self.declaration.runtime)])
        return [
            "try:",
            "    with plan.lock:",
            f"        plan.pack(plan.buffer, 0, {words})",
            f"        error = plan.fire[{stream}(plan.device)]()",
            "except Exception as raised:",
            "    error = raised",
            f"if error: recover(error, plan, {stream}(plan.device), {words})",
        ]
