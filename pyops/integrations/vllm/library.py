"""This library in vLLM's namespaces of torch.ops: defines missing ops, and replaces defined ones."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Sequence
from inspect import signature
from types import TracebackType
from typing import Any

from ..._core.errors import OpError
from ..._core.op import torch_library
from ..._core.system.lazy import torch
from . import stand_ins
from .adapters import FAKES
from .table import DEFINED_IN_PYTHON, VERSIONS, Entry, check_version, table

_log = logging.getLogger("vllm.pyops")  # below vLLM's own logger, so that its lines are among vLLM's
_KEYS = ("CUDA", "CPU")  # torch calls ROCm's devices CUDA, too


class Registration:
    """Ops of torch that this library serves. `undo`, or the end of a ``with`` block, takes it back.

    Attributes:
        names: of those ops, ``("_C::rms_norm", ...)``; empty once it is undone.
        left: ``{name: reason}`` of the ops that `override` left to vLLM although it was asked for all of them.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.left: dict[str, str] = {}
        self._libraries: list[Any] = []
        self._shortened: list[tuple[Any, Any]] = []

    def undo(self) -> None:
        """Leave torch as it was before."""
        if self is registered:
            stand_ins.remove()
        self.names, self.left = (), {}
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
            for key in _KEYS if _takes_tensors(entry) else ("CompositeExplicitAutograd",):
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


registered = Registration()  # by all calls of `register`
_alive: set[Registration] = set()  # whoever asked for an op need not hold its library


def register(vllm: str = VERSIONS[0]) -> Registration:
    """Have torch know the ops of vLLM that this library serves, wherever it does not know them already.

    Each is defined in vLLM's namespace (``torch.ops._C``, ``_C_cache_ops``, ``_moe_C``, ``_C_cuda_utils``, ...) by
    vLLM's schema, for tensors on GPUs and on the CPU, with a fake for tracing. A fake that vLLM's Python registers
    later replaces that fake. What an imported vLLM has defined is left alone, see `override`; its compiled
    libraries cannot define an op any more once it is defined here, so a vLLM that has them is imported first. Ops that
    vLLM's Python defines (``vllm::flashinfer_rotary_embedding``) are left to it.

    A vLLM without its compiled libraries may be imported before or after: until `undo`, ``import vllm._C`` and the
    like find an empty module where the library is absent or cannot be loaded (`stand_ins`).

    Args:
        vllm: the version of the schemas, ``"0.16"`` or ``"0.22"``.

    Returns:
        What all calls of this function have registered, which a second call finds done.

    Raises:
        OpError: another version; nothing is registered then.
    """
    check_version("register", vllm)
    every = table(vllm).values()
    wanted = [one for one in every if one.kernel is not None and one.name not in DEFINED_IN_PYTHON]
    registered._add("FRAGMENT", [one for one in wanted if _known(one) is None])
    stand_ins.provide(lambda: define_missing(vllm), has_defined)
    return registered


def has_defined() -> bool:
    """Whether `register` has defined any op."""
    return bool(registered.names)


def define_missing(vllm: str) -> None:
    """`register`, instead of a library of vLLM that would define the ops; the log says how many, once."""
    before = registered.names
    if len(register(vllm).names) > len(before):
        _log.info("compiled libraries of vLLM are absent: pyops defines %d ops", len(registered.names))


def override(*names: str, without: Collection[str] = ()) -> Registration:
    """Replace the kernels of ops that an imported vLLM has registered by those of this library.

    Args:
        names: of ops, as ``"rms_norm"``, which stands for the op's overloads as well; none at all for every op that
            torch knows from vLLM by the schema of a version that is known here.
        without: names of ops that are vLLM's still.

    Returns:
        What was replaced. It lasts until it is undone, whether or not it is held. Ops that `register` defined are this
        library's already, and not among them. Without names, `left` says of every op in the namespaces of vLLM's
        compiled libraries that is not replaced why it is not.

    Raises:
        OpError: a name that is not vLLM's, that this library lacks, that torch does not know, or that has another
            schema in the imported vLLM; nothing is replaced then. Without names: nothing to replace.
    """
    versions = [table(vllm) for vllm in VERSIONS]
    for name in names:
        _replaceable(versions, name)
    every = dict.fromkeys(name for found in versions for name in found)
    agreeing = {name: entry for name in every if (entry := _agreeing(versions, name)) is not None}
    if not agreeing:
        raise OpError("override", "names", "torch knows no op of vLLM: import vLLM first, or call register()")
    chosen = {
        name: entry
        for name, entry in agreeing.items()
        if (not names or _among(name, names)) and not _among(name, without)
    }
    replaced = Registration()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        replaced._add("IMPL", [one for one in chosen.values() if _qualified(one) not in registered.names])
    if not names:
        replaced.left = _left(versions, set(map(_qualified, chosen.values())), without)
    return replaced


def _among(name: str, names: Collection[str]) -> bool:
    """Whether an op is named, by the whole name of its overload or by the name that overloads share."""
    return name in names or name.partition(".")[0] in names


def _left(versions: Sequence[dict[str, Entry]], served: set[str], without: Collection[str]) -> dict[str, str]:
    """{name: reason} of the ops in the namespaces of vLLM's compiled libraries that torch knows and that are not
    `served`."""
    namespaces = {entry.namespace for found in versions for entry in found.values()} - {"vllm"}
    reasons = {}
    for qualified in sorted(set(torch._C._dispatch_get_all_op_names()) - served):
        namespace, _, name = qualified.partition("::")
        if namespace not in namespaces:
            continue
        if _among(name, without):
            reasons[qualified] = "was left out"
        else:
            try:
                _replaceable(versions, name)
            except OpError as error:
                reasons[qualified] = str(error).removeprefix(f"override: {name}: ")
    return reasons


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
    """Whether a call by the schema `known` is one by the entry's: arguments come by position, so that names may differ.

    torch leaves out trailing arguments that equal the defaults of its schema, so those must be the entry's. Schemas
    that torch has inferred from a C++ function (``dispose(int _0) -> ()``) have neither names nor defaults.
    """

    def face(argument: Any) -> Any:
        return str(argument.type), argument.alias_info is not None and argument.alias_info.is_write

    ours = _parsed(entry)
    return (
        list(map(face, ours.arguments)) == list(map(face, known.arguments))
        and [str(one.type) for one in ours.returns] == [str(one.type) for one in known.returns]
        and all(
            own.has_default_value() and own.default_value == one.default_value
            for own, one in zip(ours.arguments, known.arguments, strict=True)
            if one.has_default_value()
        )
    )


def _parsed(entry: Entry) -> Any:
    """torch's FunctionSchema of an op."""
    return torch._C.parse_schema(entry.schema)


def _takes_tensors(entry: Entry) -> bool:
    return "Tensor" in entry.schema.partition("->")[0]


def _define(library: Any, entry: Entry) -> None:
    library.define(entry.schema)
    returns = [str(one.type) for one in _parsed(entry).returns]
    if returns and not {"Tensor", "List[Tensor]"} & set(returns):
        return
    # Of tensors without data, what allocates results makes the right ones.
    fake: Callable[..., Any] | None = FAKES.get(entry.name, entry.kernel) if returns else _write_nothing
    if entry.name in FAKES or not _takes_tensors(entry):
        torch.library.register_fake(_qualified(entry), fake, lib=library)
    else:
        # torch's fake tensors and meta tensors come to this kernel as long as there is no registered fake, and vLLM's
        # Python may register its own: `register_fake` refuses a second one, and a kernel for the key "Meta".
        library.impl(entry.name, fake, "CompositeExplicitAutograd")


def _write_nothing(*args: Any, **kwargs: Any) -> None:
    """What an op that only writes does with tensors without data."""
    given = [one for arg in (*args, *kwargs.values()) for one in (arg if isinstance(arg, list) else [arg])]
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    if tensors and not any(tensor.is_meta for tensor in tensors):
        raise NotImplementedError(f"pyops has no kernel for tensors on {tensors[0].device}")
