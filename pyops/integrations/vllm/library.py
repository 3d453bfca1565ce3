"""This library in vLLM's namespaces of torch.ops: where nothing is yet, and in the place of what is."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from inspect import signature
from types import TracebackType
from typing import Any

from ..._core import torch_library
from ..._core.errors import OpError
from ..._core.lazy import torch
from .adapters import FAKES
from .table import VERSIONS, Entry, table

_KEYS = ("CUDA", "CPU")  # torch calls ROCm's devices CUDA, too


class Registration:
    """Ops of torch that this library serves. `undo`, or the end of a ``with`` block, takes it back.

    Attributes:
        names: of those ops, ``("_C::rms_norm", ...)``; empty once it is undone.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self._libraries: list[Any] = []
        self._shortened: list[tuple[Any, Any]] = []

    def undo(self) -> None:
        """Leave torch as it was before."""
        self.names = ()
        for packet, dispatch in self._shortened:
            packet._op = dispatch
        self._shortened.clear()
        for library in self._libraries:
            torch_library.destroy(library)
        self._libraries.clear()
        _alive.discard(self)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()

    def _add(self, kind: str, entries: Sequence[Entry]) -> None:
        libraries: dict[str, Any] = {}
        for entry in entries:
            if (library := libraries.get(entry.namespace)) is None:
                library = libraries[entry.namespace] = torch.library.Library(entry.namespace, kind)
            if kind == "FRAGMENT":
                _define(library, entry)
            # A call without tensors among its arguments has no device to dispatch by.
            for key in _KEYS if "Tensor" in entry.schema.partition("->")[0] else ("CompositeExplicitAutograd",):
                library.impl(entry.name, entry.kernel, key, **_over(library))
            self._shorten(entry)
        self.names += tuple(map(_qualified, entries))
        self._libraries += libraries.values()
        _alive.add(self)

    def _shorten(self, entry: Entry) -> None:
        """Where torch.ops is called with plain tensors and nothing watches, call the op's wrapper: torch's dispatcher
        would come to the same, but takes half as long as the whole call to reach a kernel in Python."""
        if "." in entry.name:
            return
        packet = getattr(getattr(torch.ops, entry.namespace), entry.name)
        kernel, dispatch = entry.kernel, getattr(packet, "_op", None)
        op = getattr(kernel, "op", None)
        if kernel is None or op is None or dispatch is None:
            return
        first, plain = op.declaration.leader_position, frozenset((torch.Tensor, torch.nn.Parameter))
        modes, functions = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack

        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > first and args[first].__class__ in plain and not modes() and not functions():
                return kernel(*args, **kwargs)
            return dispatch(*args, **kwargs)

        packet._op = call
        self._shortened.append((packet, dispatch))


_registered = Registration()
_alive: set[Registration] = set()  # whoever asked for an op need not hold its library


def register(vllm: str = VERSIONS[0]) -> Registration:
    """Have torch know the ops of vLLM that this library serves, wherever it does not know them already.

    Each is defined in vLLM's namespace (``torch.ops._C``, ``_C_cache_ops``, ``_moe_C``, ``_C_cuda_utils``, ...) by
    vLLM's schema, for tensors on GPUs and on the CPU, with a fake for tracing. What an imported vLLM has defined is
    left alone, see `override`; vLLM cannot define it any more once it is defined here, so it is imported first.

    Args:
        vllm: the version whose schemas are meant, ``"0.16"`` or ``"0.22"``.

    Returns:
        What all calls of this function have registered, which a second call finds done.

    Raises:
        OpError: another version; nothing is registered then.
    """
    every = table(vllm).values()
    _registered._add("FRAGMENT", [one for one in every if one.kernel is not None and _known(one) is None])
    return _registered


def override(*names: str) -> Registration:
    """Have this library serve ops that an imported vLLM has registered, in the place of its kernels.

    Args:
        names: of ops, as ``"rms_norm"``; none at all for every op that torch knows from vLLM by the schema of a
            version that is known here.

    Returns:
        What was replaced. It lasts until it is undone, whether or not it is held. Ops that `register` defined are this
        library's already, and not among them.

    Raises:
        OpError: a name that is none of vLLM's, that this library lacks, that torch does not know, or whose schema is
            another one in the vLLM that is imported; nothing is replaced then. Without names: nothing to replace.
    """
    versions = [table(vllm) for vllm in VERSIONS]
    entries = [_replaceable(versions, name) for name in names] or [
        entry
        for name in dict.fromkeys(name for found in versions for name in found)
        if (entry := _agreeing(versions, name)) is not None
    ]
    if not entries:
        raise OpError("override", "names", "torch knows no op of vLLM: import vLLM first, or call register()")
    replaced = Registration()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        replaced._add("IMPL", [one for one in entries if _qualified(one) not in _registered.names])
    return replaced


def _over(library: Any) -> dict[str, bool]:
    """What lets a library replace a kernel in Python, where torch would not otherwise (2.11) and can be asked to."""
    return {"allow_override": True} if "allow_override" in signature(library.impl).parameters else {}


def _agreeing(versions: Sequence[dict[str, Entry]], name: str) -> Entry | None:
    """What serves the op by the schema that torch knows: the entry of the first version that has it so."""
    for found in versions:
        entry = found.get(name)
        if entry and entry.kernel is not None and (known := _known(entry)) is not None and _agree(entry, known):
            return entry
    return None


def _replaceable(versions: Sequence[dict[str, Entry]], name: str) -> Entry:
    """The entry that serves the op `name`, or an OpError that says why none does."""
    if (agreeing := _agreeing(versions, name)) is not None:
        return agreeing
    named = [found[name] for found in versions if name in found]
    if not named:
        raise OpError("override", name, "is no op of vLLM")
    served = {entry.schema: entry for entry in named if entry.kernel is not None}
    if not served:
        raise OpError("override", name, "is an op of vLLM that pyops lacks: see python -m pyops coverage")
    known = _known(named[0])
    if known is None:
        raise OpError("override", name, "is unknown to torch: import vLLM first, or call register()")
    raise OpError("override", name, f"expected the schema {' or '.join(served)}, but torch has {known}")


def _qualified(entry: Entry) -> str:
    return f"{entry.namespace}::{entry.name}"


def _known(entry: Entry) -> Any:
    """The schema by which torch knows the op, or None."""
    name, _, overload = entry.name.partition(".")
    packet = getattr(getattr(torch.ops, entry.namespace), name, None)
    found = getattr(packet, overload or "default", None)
    return None if found is None else found._schema


def _agree(entry: Entry, known: Any) -> bool:
    """Whether the schemas are the same but for names: arguments come by position."""

    def is_written(argument: Any) -> bool:
        return argument.alias_info is not None and argument.alias_info.is_write

    def face(schema: Any) -> Any:
        arguments = [
            (str(one.type), is_written(one), one.has_default_value(), one.default_value) for one in schema.arguments
        ]
        return arguments, [str(one.type) for one in schema.returns]

    return bool(face(_parsed(entry)) == face(known))


def _parsed(entry: Entry) -> Any:
    """torch's FunctionSchema of an op."""
    return torch._C.parse_schema(entry.schema)


def _define(library: Any, entry: Entry) -> None:
    library.define(entry.schema)
    returns = [str(one.type) for one in _parsed(entry).returns]
    if not returns:
        torch.library.register_fake(_qualified(entry), lambda *args, **kwargs: None, lib=library)
    elif {"Tensor", "List[Tensor]"} & {
        *returns
    }:  # of tensors without data, what allocates results makes the right ones
        torch.library.register_fake(_qualified(entry), FAKES.get(entry.name, entry.kernel), lib=library)
