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
from .signature import Signature
from .table import DEFINED_IN_PYTHON, VERSIONS, Entry, check_version, table, taken

_log = logging.getLogger("vllm.pyops")  # below vLLM's own logger, so that its lines are among vLLM's
_OTHER_SCHEMA = "expected the schema"
_KEYS = ("CUDA", "CPU")  # torch calls ROCm's devices CUDA, too


class Registration:
    """A set of torch ops that this library serves. `undo`, or the end of a ``with`` block, unregisters them.

    Attributes:
        names: the names of these ops, ``("_C::rms_norm", ...)``; empty after `undo`.
        left: ``{name: reason}`` of the ops that `override`, asked for all ops, left to vLLM.

    Examples:
        >>> registration = register("0.22")
        >>> "_C::rms_norm" in registration.names
        True
        >>> registration.undo()  # or use it as a context
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.left: dict[str, str] = {}
        self._libraries: list[Any] = []
        self._shortened: list[tuple[Any, Any]] = []

    def undo(self) -> None:
        """Restore torch's registrations to what they were before."""
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
            # An op without tensor arguments has no device to dispatch by.
            for key in _KEYS if _takes_tensors(entry) else ("CompositeExplicitAutograd",):
                library.impl(entry.name, entry.kernel, key, **_over(library))
            self._shorten(entry)
        self.names += tuple(map(_qualified, entries))
        self._libraries += libraries.values()
        _alive.add(self)

    def _shorten(self, entry: Entry) -> None:
        """Let a call of torch.ops bypass torch's dispatcher if its arguments are plain tensors and no mode is active.

        The dispatcher would call the same wrapper, but reaching a Python kernel takes it half of the call's time.
        """
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


registered = Registration()  # all ops that `register` has defined
_alive: set[Registration] = set()  # keeps the libraries alive for callers that drop a Registration


def register(vllm: str = VERSIONS[0]) -> Registration:
    """Define the ops of vLLM that this library serves in torch, except those that torch already has.

    An op is defined in vLLM's namespace (``torch.ops._C``, ``_C_cache_ops``, ``_moe_C``, ``_C_cuda_utils``, ...) with
    vLLM's schema, for GPU and CPU tensors, and with a fake for tracing, which vLLM's Python code may replace later.
    Ops that an imported vLLM has defined stay as they are, see `override`. Its compiled libraries cannot define an op
    that is already defined, so import a vLLM that has them before calling this. Ops that vLLM's Python code defines
    (``vllm::flashinfer_rotary_embedding``) are left to it.

    A vLLM without its compiled libraries may be imported before or after this call: until `undo`, ``import vllm._C``
    and its siblings import an empty module if the library is absent or cannot be loaded (`stand_ins`).

    Args:
        vllm: the version of the schemas, ``"0.16"``, ``"0.22"`` or ``"0.33"``.

    Returns:
        The ops that all calls of this function have registered. A second call registers nothing.

        Raises:
            OpError: the version is unknown. Nothing is registered.

    Examples:
        >>> x, weight = torch.randn(5, 64), torch.rand(64)
        >>> with register("0.22"):  # without `with`, the ops stay defined
        ...     torch.ops._C.rms_norm(out := torch.empty_like(x), x, weight, 1e-6)
        >>> torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))
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
    """Call `register` instead of a compiled library of vLLM; log the number of ops once."""
    before = registered.names
    if len(register(vllm).names) > len(before):
        _log.info("compiled libraries of vLLM are absent: pyops defines %d ops", len(registered.names))


def override(*names: str, without: Collection[str] = ()) -> Registration:
    """Replace kernels that an imported vLLM has registered by those of this library.

    Args:
        names: names of ops, such as ``"rms_norm"``, which includes the op's overloads. Without names: every op of vLLM
            that torch has with a schema that this library serves: that of a version of `VERSIONS`, or another one if
            the op takes every call by it.
        without: names of ops that are left to vLLM.

    Returns:
        The replaced ops, without those that `register` defined. They stay replaced until `undo`, even if the result
        is dropped. Without names, `left` gives the reason for every op in the namespaces of vLLM's compiled
        libraries that is not replaced. The logger ``vllm.pyops`` reports how many ops are replaced and what is left,
        as a warning if one of them is an op of this library with a schema that it does not know.

    Raises:
        OpError: a name is not an op of vLLM, this library or torch lacks it, or the imported vLLM has another
            schema. Nothing is replaced. Without names: there is nothing to replace.

    Examples:
        >>> x, weight = torch.randn(5, 64), torch.rand(64)
        >>> with register("0.22"), override("rms_norm"):  # with vLLM, import vllm._custom_ops and leave out register
        ...     torch.ops._C.rms_norm(out := torch.empty_like(x), x, weight, 1e-6)
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
    _report(replaced)
    return replaced


def _report(replaced: Registration) -> None:
    """Log which ops run here, and which are left to vLLM."""
    names = {*replaced.names, *registered.names}
    _log.info("%d ops of vLLM run on pyops", len(names))
    _log.debug("ops on pyops: %s", ", ".join(sorted(names)))
    if replaced.left:
        is_changed = any(why.startswith(_OTHER_SCHEMA) for why in replaced.left.values())
        left = "; ".join(f"{name} ({why})" for name, why in replaced.left.items())
        _log.log(logging.WARNING if is_changed else logging.INFO, "ops left to vLLM: %s", left)


def _among(name: str, names: Collection[str]) -> bool:
    """Whether `names` has an op: the full name of its overload, or the name without the overload."""
    return name in names or name.partition(".")[0] in names


def _left(versions: Sequence[dict[str, Entry]], served: set[str], without: Collection[str]) -> dict[str, str]:
    """{name: reason} of the ops that torch has in the namespaces of vLLM's compiled libraries, except `served`."""
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
    """Keyword arguments of `Library.impl` that allow it to replace a kernel; {} for versions of torch without them."""
    return {"allow_override": True} if "allow_override" in signature(library.impl).parameters else {}


def _agreeing(versions: Sequence[dict[str, Entry]], name: str) -> Entry | None:
    """The entry for an op with the schema that torch has; of the first version of vLLM that has it so."""
    for found in versions:
        entry = found.get(name)
        if entry and entry.kernel is not None and (known := _known(entry)) is not None and _agree(entry, known):
            return entry
    return None


def _replaceable(versions: Sequence[dict[str, Entry]], name: str) -> Entry:
    """The entry that serves the op `name`. OpError with the reason if none does."""
    if (agreeing := _agreeing(versions, name)) is not None:
        return agreeing
    named = [found[name] for found in versions if name in found]
    if not named:
        raise OpError("override", name, "is no op of vLLM")
    served = {entry.schema: entry for entry in named if entry.kernel is not None}
    if not served:
        refused = next((entry.ours for entry in named if entry.state == "refused"), "")
        reason = f"it {refused}" if refused else "see python -m pyops coverage"
        raise OpError("override", name, f"is an op of vLLM that pyops lacks: {reason}")
    known = _known(named[0])
    if known is None:
        raise OpError("override", name, "is unknown to torch: import vLLM first, or call register()")
    raise OpError("override", name, f"{_OTHER_SCHEMA} {' or '.join(served)}, but torch has {known}")


def _qualified(entry: Entry) -> str:
    return f"{entry.namespace}::{entry.name}"


def _known(entry: Entry) -> Any:
    """The op's schema in torch; None if torch does not have the op."""
    name, _, overload = entry.name.partition(".")
    packet = getattr(getattr(torch.ops, entry.namespace), name, None)
    found = getattr(packet, overload or "default", None)
    return None if found is None else found._schema


def _agree(entry: Entry, known: Any) -> bool:
    """Whether the entry's kernel takes every call by the schema `known` of torch.

    Schemas that torch infers from a C++ function (``dispose(int _0) -> ()``) have neither names nor defaults.
    """
    return taken(entry).takes(Signature.read(str(known)))


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
    # On tensors without data, an op that allocates its results returns the right shapes and dtypes.
    fake: Callable[..., Any] | None = FAKES.get(entry.name, entry.kernel) if returns else _write_nothing
    if entry.name in FAKES or not _takes_tensors(entry):
        torch.library.register_fake(_qualified(entry), fake, lib=library)
    else:
        # Fake and meta tensors dispatch to this kernel until vLLM's Python code registers its own fake. With
        # `register_fake`, or a kernel for the key "Meta", that registration would be an error.
        library.impl(entry.name, fake, "CompositeExplicitAutograd")


def _write_nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of an op that only writes."""
    given = [one for arg in (*args, *kwargs.values()) for one in (arg if isinstance(arg, list) else [arg])]
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    if tensors and not any(tensor.is_meta for tensor in tensors):
        raise NotImplementedError(f"pyops has no kernel for tensors on {tensors[0].device}")
