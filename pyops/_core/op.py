"""Op: a reference function that is also a declaration, with a plan for the GPU. The registry of all of them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import prod
from numbers import Real
from struct import error as StructError
from typing import Any, Protocol, TypeVar

from . import binding, check, config, device, driver, launch, tensor
from .binding import Parameter
from .compiler import Compiled
from .errors import CaptureError, OpError
from .host import run as host
from .kernel import Launch, Specialisation
from .lazy import cupy, loaded, torch
from .tensor import TensorArg

F = TypeVar("F", bound=Callable[..., Any])
_KINDS = ("Tensor", "float", "int", "bool", "str", "tuple[int, int]")
_SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "bool": (bool, int), "str": (str,)}
_MAX_PLANS = 8192
_NO_LOCK = False  # in the place of a plan's lock: the reference runs instead

registry: dict[str, Op] = {}


class Wrapper(Protocol):
    """What `@op` leaves in place of the reference: the wrapper, and the op's face as attributes."""

    op: Op
    reference: Callable[..., None]
    compiled: Callable[[], list[Compiled]]

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...
    def plan(self, function: F) -> F: ...
    def example(self, function: F) -> F: ...
    def traffic(self, function: F) -> F: ...
    def bad_indices(self, function: F) -> F: ...


def op(
    *,
    out: str | tuple[str, ...] = (),
    inout: str | tuple[str, ...] = (),
    in_place: dict[str, str] | None = None,
    keyed: str | tuple[str, ...] = (),
    passed: str | tuple[str, ...] = (),
    ulps: int = 1,
    atol: float | Callable[..., float] = 2.0**-22,
) -> Callable[[Callable[..., None]], Wrapper]:
    """Declare an op by its reference, a plain PyTorch function that writes its outputs in place.

    Its parameters are annotated ``Tensor``, ``float``, ``int``, ``bool``, ``str`` or ``tuple[int, int]``, alone or with
    ``| None``, or ``Tensor | float``: plan, kernels and reference then see a tensor of one float32, for which a caller
    may also give a number, or a scalar in host memory. Those behind a ``*`` are keyword-only, in the torch schema, too.
    A module that declares an op again, as a notebook does whose cell is run twice, replaces it.

    Args:
        out: tensors that are written and never read; inout: tensors that are read and written.
        in_place: {output: input} pairs that may be one and the same tensor.
        keyed: floats that the plan may choose by, each value of which is another plan. Integers, bools, strings and
            pairs are keyed anyway; other floats are passed at every call.
        passed: integers that are passed at every call like floats, because they change with it.
        ulps: how far results may lie from the reference, in units of the last place of the output type; 0 means equal.
        cancelled: beside it, what is left of the largest result where terms of its size cancel; not with 0 ulps. Where
            it depends on what a call holds, a function of those parameters that it names.
    """

    def declare(reference: Callable[..., None]) -> Wrapper:
        roles = dict.fromkeys((out,) if isinstance(out, str) else out, "out")
        roles |= dict.fromkeys((inout,) if isinstance(inout, str) else inout, "inout")
        is_keyed = dict.fromkeys({keyed} if isinstance(keyed, str) else keyed, True)
        is_keyed |= dict.fromkeys({passed} if isinstance(passed, str) else passed, False)
        wrapper: Wrapper = Op(reference, roles, in_place or {}, is_keyed, ulps, atol).wrapper
        return wrapper

    return declare


class Op:
    """An operator: reference, parameters, plan, example, and the plans made so far."""

    def __init__(
        self,
        reference: Callable[..., None],
        roles: dict[str, str],
        in_place: dict[str, str],
        keyed: dict[str, bool],
        ulps: int,
        atol: float | Callable[..., float],
    ) -> None:
        self.name = reference.__name__
        self.reference: Callable[..., None] = reference
        if (held := registry.get(self.name)) and held.reference.__module__ != reference.__module__:
            raise TypeError(f"{self.name}: {held.reference.__module__} has declared an op of this name")
        self.in_place = in_place
        self.parameters = _parameters(reference, roles, keyed)
        self.positional = sum(not p.by_name for p in self.parameters)
        self.ulps = ulps
        self.atol: Callable[..., float] = self._by_name(atol if callable(atol) else lambda: atol)
        self.tensors = [p for p in self.parameters if p.kind == "Tensor"]
        passed = [p for p in self.parameters if p.kind != "Tensor" and not p.keyed]
        self.passed = tuple((p.name, "q" if p.kind == "int" else "d") for p in passed)
        self._tensor_names = tuple(p.name for p in self.tensors)
        self._tensor_positions = [i for i, p in enumerate(self.parameters) if p.kind == "Tensor"]
        self.first_position = [p.name for p in self.parameters].index(binding.first_required(self))
        self._convertible = [(i, p) for i, p in enumerate(self.parameters) if p.number or p.keyed]
        self.plans: dict[Any, tuple[Any, ...]] = {}
        self.specialisations: dict[tuple[Any, ...], Specialisation] = {}
        self._plan: Callable[..., Any] | None = None
        self._traffic: Callable[..., int] | None = None
        self.bad_indices: Callable[..., dict[str, Any]] | None = None
        self.example: Callable[..., tuple[Any, ...]] | None = None
        self._described: dict[Any, Sequence[TensorArg | None]] = {}
        self._separate: set[Any] = set()
        self._guards: dict[Any, tuple[Any, ...]] = {}
        # The plan that the last call used: (guard, alignment, keyed scalars, key, *the plan's entry).
        self.recent: list[tuple[Any, ...]] = [self._no_plan()]
        self.call, self.load = binding.write(self)
        binding.add(self)
        self.wrapper: Any = self.call
        self.wrapper.__dict__.update(
            op=self,
            reference=reference,
            compiled=self.compiled,
            plan=self._set_plan,
            example=self._set_example,
            traffic=self._set_traffic,
            bad_indices=self._set_bad_indices,
        )
        registry[self.name] = self

    def _set_plan(self, function: F) -> F:
        self._plan = self._by_name(function)
        return function

    def _set_example(self, function: F) -> F:
        self.example = function
        return function

    def _set_traffic(self, function: F) -> F:
        self._traffic = self._by_name(function)
        return function

    def _set_bad_indices(self, function: F) -> F:
        self.bad_indices = self._by_name(function)
        return function

    def _by_name(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, called with values for the op's parameters, of which it gets those that it names."""
        own = inspect.signature(function).parameters.values()
        named = {p.name for p in own if p.kind is not p.VAR_KEYWORD}
        takes_all = len(named) < len(own)
        wanted = [(i, p.name, p.default) for i, p in enumerate(self.parameters) if takes_all or p.name in named]
        if unknown := named - {p.name for p in self.parameters}:
            raise TypeError(f"{self.name}: {sorted(unknown)} are no parameters of the op")

        def call(*args: Any) -> Any:
            return function(**{name: args[i] if i < len(args) else default for i, name, default in wanted})

        return call

    def bound(self, function: Callable[..., Any], values: Sequence[Any]) -> partial[Any]:
        """`function`, which has the op's parameters, given a value for each of them."""
        names = (p.name for p in self.parameters[self.positional :])
        return partial(function, *values[: self.positional], **dict(zip(names, values[self.positional :], strict=True)))

    def __call__(self, *values: Any) -> None:
        """The wrapper, given a value for each parameter."""
        self.bound(self.call, values)()

    def hold(self, index: int, specialisation: Specialisation) -> Compiled:
        """Load a specialisation on the device `index` and list it in `compiled`."""
        self.specialisations[index, specialisation.kernel, specialisation.key] = specialisation
        return specialisation.load(index)

    def compiled(self) -> list[Compiled]:
        """Every specialisation this op has used in this process, on every device."""
        found = (s.loaded(index) for (index, *_), s in self.specialisations.items())
        return [compiled for compiled in found if compiled is not None]

    def launches(self, *args: Any) -> list[Launch]:
        """The launches planned for tensors given as Args: checks them, chooses, touches no device."""
        if self._plan is None:
            raise TypeError(f"{self.name} has no plan")
        planned = self._plan(*args)
        launches = [planned] if isinstance(planned, Launch) else list(planned)
        return [one for one in launches if not one.empty]

    def check(self, *args: Any) -> tuple[Sequence[TensorArg | None], list[Launch]]:
        """What a plan sees of `args`, and the launches it makes. Raises OpError for a call that the op refuses."""
        _, described = self._describe(args)
        return described, self.launches(*described)

    def traffic(self, *args: Any) -> int:
        """Bytes that a call with these Args must move: inputs read once, outputs written once."""
        if self._traffic is not None:
            return self._traffic(*args)
        weights = {"in": 1, "out": 1, "inout": 2}
        return sum(
            arg.nbytes * weights[p.role]
            for p, arg in zip(self.parameters, args, strict=True)
            if p.kind == "Tensor" and arg is not None
        )

    # The cold path: what the wrapper calls when there is no plan.

    def _tensors_of(self, values: Sequence[Any]) -> list[Any]:
        """Of values in the order of the parameters, those of the tensors."""
        return [values[position] for position in self._tensor_positions]

    def prepare(self, key: Any, *args: Any) -> tuple[Any, ...]:
        """Make and keep the plan for the signature of `args`: what to run, the device, and each tensor's extent."""
        entry: tuple[Any, ...]
        if self._converted(args) is not None:
            entry = (_NO_LOCK, None, None, self._call_converted, -1, *(0 for _ in self.tensors))
            if not any(p.keyed and tensor.dialect(value) for p, value in zip(self.parameters, args, strict=True)):
                self.plans[key] = entry  # a tensor would be a key by which one it is, whatever it holds later
            return entry
        kind, described = self._describe(args)
        tensors = self._tensors_of(described)
        index = next(arg.device.index for arg in tensors if arg is not None)
        launches = self.launches(*described)
        if kind == "cupy":
            binding.bind_cupy()
        extents = [arg.extent if arg else 0 for arg in tensors]
        if index < 0 or config.reference():
            entry = (_NO_LOCK, None, None, self._cpu_plan(tensors, kind, launches), -1, *extents)
        else:
            bound = self._bind(kind, index, launches, args)
            entry = (*bound, index, *extents)
        if self.bad_indices is not None and config.check_indices():
            run = entry[3] if index < 0 or config.reference() else self._gpu_plan(tensors, kind, bound, index)
            entry = (_NO_LOCK, None, None, self._checked(run, kind, index), -1, *extents)
        if len(self.plans) >= _MAX_PLANS:
            self.forget()
        self._described[key] = tensors
        self.plans[key] = entry
        return entry

    def _bind(self, kind: str, index: int, launches: Sequence[Launch], args: Sequence[Any]) -> launch.Bound:
        """What fires the launches on the device `index`, their kernels loaded."""
        functions = []
        for one in launches:
            if one.specialisation.loaded(index) is None and _capturing(kind, index):
                raise CaptureError(self.name, one.specialisation.kernel.file)
            functions.append(self.hold(index, one.specialisation).function)
            driver.allow_shared(functions[-1], one.shared)
        scalars = {p.name: value for p, value in zip(self.parameters, args, strict=True) if p.keyed}
        allocate = launch.allocate_torch if kind == "torch" else launch.allocate_cupy
        return launch.bind(self.name, index, launches, functions, self._tensor_names, self.passed, scalars, allocate)

    def recover(self, error: Exception | int, key: Any, stream: int, *words: Any) -> None:
        """A launch that failed, by an exception or with a status of the driver."""
        *bound, index = self.plans[key][:5]
        self._recover(error, launch.Bound(*bound), index, stream, *words)

    def _recover(self, error: Exception | int, bound: launch.Bound, index: int, stream: int, *words: Any) -> None:
        named = (*((name, "Q") for name in self._tensor_names), *self.passed)
        launch.recover(error, self.name, index, bound, named, stream, *words)

    def remember(self, key: Any, scalars: tuple[Any, ...], *tensors: Any) -> None:
        """Let the next call with tensors like these find its plan by one guard."""
        found = self._guards.get(key)
        entry = self.plans.get(key)
        if entry is None:  # another thread has just dropped every plan
            return
        if found is None:  # the first call of a plan makes no guard: there may be no second
            found = self._guards[key] = (binding.never, key[0], scalars, key, *entry)
        elif found[0] is binding.never or (found is self.recent[0] and found[0] is not binding.unguarded):
            # The second call, or a guard that was just asked and failed on its own key: torch is in another mode now.
            found = self._guards[key] = (binding.guard(tensors), *found[1:])
        self.recent[0] = found

    def forget(self) -> None:
        """Drop every plan; kernels stay loaded. Needed after an environment switch has changed."""
        self.recent[0] = self._no_plan()
        for cache in (self.plans, self._guards, self._described, self._separate):
            cache.clear()

    def _no_plan(self) -> tuple[Any, ...]:
        return (binding.never, None, (), None, None, None, None, None, -1, *(0 for _ in self.tensors))

    def _describe(self, args: Sequence[Any]) -> tuple[str, list[Any]]:
        """(dialect, args with every tensor replaced by its Arg). Raises OpError for what the signature rules out."""
        described: list[Any] = []
        family, family_type, family_name, where = None, None, "", None
        for p, value in zip(self.parameters, args, strict=True):
            if p.kind != "Tensor":
                self._check_scalar(p, value)
            elif value is not None:
                kind = family if type(value) is family_type else tensor.dialect(value)
                if kind is None:
                    came = type(value).__name__
                    raise OpError(self.name, p.name, f"expected a torch tensor or a cupy array, got {came}")
                if family is None:
                    family, family_type, family_name = kind, type(value), p.name
                if kind != family:
                    raise OpError(self.name, p.name, f"expected a {family} tensor like {family_name}, got a {kind} one")
                value = tensor.describe(self.name, p.name, value, kind, p.written)
                if where is None:
                    where = value.device.index
                if value.device.index != where:
                    came = _place(value.device.index)
                    raise value.error(f"expected device {_place(where)} like {family_name}, got {came}")
            elif not p.optional:
                raise OpError(self.name, p.name, "expected a tensor, got None")
            described.append(value)
        if family == "torch":
            binding.bind_torch()
        return family or "", described

    def _check_scalar(self, p: Parameter, value: Any) -> None:
        if value is None and p.optional:
            return
        if p.kind == "float":
            try:
                float(value)
                return
            except (TypeError, ValueError, OverflowError):
                pass
        elif p.kind == "tuple[int, int]":
            if isinstance(value, tuple) and [type(one) for one in value] == [int, int]:
                return
        elif isinstance(value, _SCALARS[p.kind]) or (p.kind != "str" and hasattr(value, "__index__")):
            return
        raise OpError(self.name, p.name, f"expected {p.kind}, got {type(value).__name__}")

    def _cpu_plan(
        self, tensors: Sequence[TensorArg | None], kind: str, launches: Sequence[Launch]
    ) -> Callable[..., None]:
        """What runs a call without a GPU: the reference, or the kernels on the host."""
        on_host = kind != "cupy" and not config.reference()

        def in_wide_warps(args: Sequence[Any]) -> list[Launch]:
            """What is planned for a device whose warps have 64 lanes."""
            given = iter(tensors)
            described = [
                next(given) if p.kind == "Tensor" else arg for p, arg in zip(self.parameters, args, strict=True)
            ]
            wide = replace(device.model("gfx942"), arch="gfx90a")  # bytes of a cache are codes of the host's own fp8
            return self.launches(
                *(replace(arg, device=wide) if isinstance(arg, TensorArg) else arg for arg in described)
            )

        def run(*args: Any) -> None:
            for p, value in zip(self.parameters, args, strict=True):
                if p.kind != "Tensor":
                    self._check_scalar(p, value)
            addresses = [0 if value is None else tensor.address(value) for value in self._tensors_of(args)]
            self._check_separate(tensors, addresses)
            if on_host and config.kernels_on_cpu():
                self._run_kernels(launches if host.warp_size() == 32 else in_wide_warps(args), addresses, args)
            else:
                self._run_reference(kind, args)

        return run

    def _run_reference(self, kind: str, args: Sequence[Any]) -> None:
        args = args if kind == "torch" else _as_torch(args)
        with torch.no_grad(), _torch_stream() if kind == "cupy" else nullcontext():
            self.bound(self.reference, args)()

    def _run_kernels(self, launches: Sequence[Launch], addresses: Sequence[int], args: Sequence[Any]) -> None:
        values = {p.name: value for p, value in zip(self.parameters, args, strict=True)}
        scalars = {p.name: values[p.name] for p in self.parameters if p.keyed}
        passed = [values[name] for name, _ in self.passed]
        try:
            launch.run_on_host(launches, self._tensor_names, self.passed, scalars, *addresses, *passed)
        except (StructError, OverflowError, TypeError) as error:
            launch.explain(error, self.name, self.passed, passed)

    def _converted(self, args: Sequence[Any]) -> list[Any] | None:
        """`args` as plans take them, None if they are: tensors for numbers and for scalars in host memory that a kernel
        reads by address, and numbers for tensors in the place of keyed ones."""
        like = args[self.first_position]
        made: dict[int, Any] = {}
        for i, p in self._convertible:
            value = args[i]
            kind = tensor.dialect(value)
            if p.number:
                is_number = isinstance(value, Real) and not isinstance(value, bool)
                if is_number or (
                    kind and tensor.on_host(value) and not tensor.on_host(like) and prod(value.shape) == 1
                ):
                    made[i] = tensor.held_number(value, like)
            elif kind:
                self._check_scalar(p, value)
                try:
                    made[i] = float(value) if p.kind == "float" else operator.index(value)
                except (TypeError, ValueError) as error:
                    raise OpError(self.name, p.name, f"expected {p.kind}: {error}") from None
        changed = any(new is not args[i] for i, new in made.items())
        return [made.get(i, arg) for i, arg in enumerate(args)] if changed else None

    def _call_converted(self, *args: Any) -> None:
        self(*(self._converted(args) or args))

    def _gpu_plan(
        self, tensors: Sequence[TensorArg | None], kind: str, bound: launch.Bound, index: int
    ) -> Callable[..., None]:
        """What runs a call on the device `index`, for a plan that is not run by the wrapper."""

        def run(*args: Any) -> None:
            addresses = [0 if value is None else tensor.address(value) for value in self._tensors_of(args)]
            self._check_separate(tensors, addresses)
            values = {p.name: value for p, value in zip(self.parameters, args, strict=True)}
            words = (*addresses, *(values[name] for name, _ in self.passed))
            stream = binding.NAMESPACE[f"{kind}_stream"](index)
            error: Any
            try:
                with bound.lock:
                    bound.pack(bound.buffer, 0, *words)
                    error = bound.fire[stream]()
            except Exception as raised:
                error = raised
            if error:
                self._recover(error, bound, index, stream, *words)

        return run

    def _checked(self, run: Callable[..., None], kind: str, index: int) -> Callable[..., None]:
        """`run`, after which an index out of range is an OpError. (A graph under capture holds nothing to look at.)"""

        def run_and_check(*args: Any) -> None:
            run(*args)
            if index < 0 or not _capturing(kind, index):
                with torch.no_grad(), _torch_stream() if kind == "cupy" else nullcontext():
                    self._check_indices(args if kind == "torch" else _as_torch(args))

        return run_and_check

    def _check_indices(self, args: Sequence[Any]) -> None:
        assert self.bad_indices is not None
        values = {p.name: value for p, value in zip(self.parameters, args, strict=True)}
        found = []
        for name, wrong in self.bad_indices(*args).items():
            if count := int(wrong.sum()):
                at = tuple(wrong.nonzero()[0].tolist())
                held = values[name][at].item()
                found.append((name, f"{count} of {wrong.numel()} indices are out of range, the first at {at}: {held}"))
        if found:
            (name, message), *others = found
            raise OpError(self.name, name, "; ".join([message, *(f"{also}: {what}" for also, what in others)]))

    def collision(self, key: Any, *addresses: int) -> None:
        """The address ranges of a call overlap: refuse it unless no byte is shared, or the op may work in place."""
        relative = (key, *(address - addresses[0] for address in addresses))
        if relative not in self._separate:
            self._check_separate(self._described[key], addresses)
            if len(self._separate) >= _MAX_PLANS:
                self._separate.clear()
            self._separate.add(relative)

    def _check_separate(self, tensors: Sequence[TensorArg | None], addresses: Sequence[int]) -> None:
        present = [
            (p, arg, pointer)
            for p, arg, pointer in zip(self.tensors, tensors, addresses, strict=True)
            if arg is not None and arg.numel
        ]
        for (p, a, at_a), (q, b, at_b) in combinations(present, 2):
            if not (p.written or q.written):
                continue
            may_be_one = self.in_place.get(p.name) == q.name or self.in_place.get(q.name) == p.name
            if may_be_one and at_a == at_b and a.strides == b.strides and a.dtype is b.dtype:
                continue
            if tensor.shares_memory(a, at_a, b, at_b):
                written, other = (p, q) if p.written else (q, p)
                raise OpError(self.name, written.name, f"is written, but shares memory with {other.name}")

    def irregular(self, error: Exception | None, *args: Any) -> Any:
        """A call without addresses to key it by: numpy arrays, empty tensors, tensors without storage, or a mistake."""
        if (converted := self._converted(args)) is not None:
            return self(*converted)
        values = [value for value in self._tensors_of(args) if value is not None]
        kinds = {tensor.dialect(v) for v in values}
        if kinds == {"torch"}:
            plain = all(type(v) in (torch.Tensor, torch.nn.Parameter) for v in values)
            if not plain or all(v.is_meta for v in values):
                binding.bind_torch()
                return self.bound(getattr(torch.ops.pyops, self.name), args)()
        if kinds == {"cupy"} and "cupy_stream" not in binding.NAMESPACE:
            binding.bind_cupy()
            return self(*args)
        try:
            described, planned = self.check(*args)
        except OpError as refusal:
            raise refusal from None
        tensors = self._tensors_of(described)
        if kinds != {"numpy"}:
            if not planned:
                return None
            for value, arg in zip(self._tensors_of(args), tensors, strict=True):
                if arg is not None and arg.numel and not tensor.address(value):
                    raise arg.error("has no memory")
            if error:
                raise error
        kind, index = str(kinds.pop()), next(arg.device.index for arg in tensors if arg is not None)
        if index < 0 or config.reference():
            run = self._cpu_plan(tensors, kind, planned)
        else:
            run = self._gpu_plan(tensors, kind, self._bind(kind, index, planned, args), index)
        if self.bad_indices is not None and config.check_indices():
            run = self._checked(run, kind, index)
        return run(*args)


def _as_torch(args: Sequence[Any]) -> Sequence[Any]:
    return [tensor.to_torch(value) if tensor.dialect(value) else value for value in args]


def _torch_stream() -> Any:
    """CuPy's current stream, made torch's while the context lasts."""
    pointer = cupy.cuda.get_current_stream().ptr
    return torch.cuda.stream(torch.cuda.ExternalStream(pointer) if pointer else torch.cuda.default_stream())


def _place(index: int) -> str:
    return "cpu" if index < 0 else f"cuda:{index}"


def _capturing(kind: str, index: int) -> bool:
    if kind == "torch":
        return bool(torch.cuda.is_current_stream_capturing())
    return bool(cupy.cuda.get_current_stream(index).is_capturing())


def _parameters(reference: Callable[..., None], roles: dict[str, str], keyed: dict[str, bool]) -> list[Parameter]:
    """The parameters of a reference, from its annotations (``Tensor``, ``Tensor | None``, ``float``, ...).

    `keyed` says of floats that they are and of integers that they are not.
    """
    result = []
    for p in inspect.signature(reference).parameters.values():
        kind, _, rest = _annotation(p.annotation).partition(" | ")
        is_number = (kind, rest) == ("Tensor", "float")
        if kind not in _KINDS or (rest not in ("", "None") and not is_number):
            came = "not annotated" if p.annotation is p.empty else f"annotated {p.annotation!r}"
            expected = f"expected one of {', '.join(_KINDS)}, or one of them | None, or Tensor | float"
            raise TypeError(f"{reference.__name__}: {p.name} is {came}, {expected}")
        has_default = p.default is not inspect.Parameter.empty
        role = roles.get(p.name, "in")
        is_keyed = keyed.get(p.name, kind not in ("Tensor", "float"))
        default = p.default if has_default else None
        by_name = p.kind is p.KEYWORD_ONLY
        result.append(Parameter(p.name, kind, rest == "None", role, is_keyed, has_default, default, is_number, by_name))
    unknown = roles.keys() - {p.name for p in result if p.kind == "Tensor"}
    if unknown:
        raise TypeError(f"{reference.__name__}: {sorted(unknown)} are written but are no tensor parameters")
    for kind, what, is_keyed in (("float", "keyed", True), ("int", "passed", False)):
        unknown = {name for name, value in keyed.items() if value is is_keyed} - {
            p.name for p in result if p.kind == kind
        }
        if unknown:
            raise TypeError(f"{reference.__name__}: {sorted(unknown)} are {what} but are no {kind} parameters")
    return result


def _annotation(annotation: Any) -> str:
    """An annotation as it is written in a module that imports ``annotations`` and ``Tensor``."""
    if isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).removeprefix("torch.")


def bind_loaded() -> None:
    """Bind to the libraries this process has already imported; the rest at its first use."""
    if loaded("torch") is not None:
        binding.bind_torch()
    if loaded("cupy") is not None:
        binding.bind_cupy()


__all__ = ["Op", "Wrapper", "bind_loaded", "check", "device", "op", "registry"]
