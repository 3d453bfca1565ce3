"""Op: a reference function that is also a declaration, with a plan for the GPU. The registry of all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import combinations
from typing import Any, Protocol, TypeVar

from . import binding, check, config, device, launch, tensor
from .binding import Parameter
from .compiler import Compiled
from .errors import CaptureError, OpError
from .kernel import Launch, Specialisation
from .lazy import cupy, loaded, torch
from .tensor import Arg

F = TypeVar("F", bound=Callable[..., Any])
_KINDS = ("Tensor", "float", "int", "bool", "str")
_SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "bool": (bool, int), "str": (str,)}
_MOST_PLANS = 8192
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


def op(
    *,
    out: str | tuple[str, ...] = (),
    inout: str | tuple[str, ...] = (),
    in_place: dict[str, str] | None = None,
    keyed: str | tuple[str, ...] = (),
    ulps: int = 1,
) -> Callable[[Callable[..., None]], Wrapper]:
    """Declare an op by its reference, a plain PyTorch function that writes its outputs in place.

    Args:
        out: tensors that are written and never read; inout: tensors that are read and written.
        in_place: {output: input} pairs that may be one and the same tensor.
        keyed: floats that the plan may choose by, each value of which is another plan. Integers, bools and strings are
            keyed anyway; other floats are passed at every call.
        ulps: how far results may lie from the reference, in units of the last place of the output type; 0 means equal.
    """

    def declare(reference: Callable[..., None]) -> Wrapper:
        roles = dict.fromkeys((out,) if isinstance(out, str) else out, "out")
        roles |= dict.fromkeys((inout,) if isinstance(inout, str) else inout, "inout")
        names = {keyed} if isinstance(keyed, str) else set(keyed)
        wrapper: Wrapper = Op(reference, roles, in_place or {}, names, ulps).wrapper
        return wrapper

    return declare


class Op:
    """An operator: reference, parameters, plan, example, and the plans made so far."""

    def __init__(
        self,
        reference: Callable[..., None],
        roles: dict[str, str],
        in_place: dict[str, str],
        keyed: set[str],
        ulps: int,
    ) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.in_place = in_place
        self.ulps = ulps
        self.parameters = _parameters(reference, roles, keyed)
        self.tensors = [p for p in self.parameters if p.kind == "Tensor"]
        self.floats = [p.name for p in self.parameters if p.kind == "float" and not p.keyed]
        self._tensor_names = tuple(p.name for p in self.tensors)
        self._tensor_positions = [i for i, p in enumerate(self.parameters) if p.kind == "Tensor"]
        self._float_names = tuple(self.floats)
        self.plans: dict[Any, tuple[Any, ...]] = {}
        self.specialisations: dict[tuple[Any, ...], Specialisation] = {}
        self._plan: Callable[..., Any] | None = None
        self._traffic: Callable[..., int] | None = None
        self.example: Callable[..., tuple[Any, ...]] | None = None
        self._described: dict[Any, Sequence[Arg | None]] = {}
        self._separate: set[Any] = set()
        self._guards: dict[Any, tuple[Any, ...]] = {}
        # The plan that the last call used: (guard, alignment, keyed scalars, key, *the plan's entry).
        self.recent: list[tuple[Any, ...]] = [self._no_plan()]
        self.call = binding.write(self)
        binding.add(self)
        self.wrapper: Any = self.call
        self.wrapper.__dict__.update(
            op=self,
            reference=reference,
            compiled=self.compiled,
            plan=self._set_plan,
            example=self._set_example,
            traffic=self._set_traffic,
        )
        registry[self.name] = self

    def _set_plan(self, function: F) -> F:
        self._plan = function
        return function

    def _set_example(self, function: F) -> F:
        self.example = function
        return function

    def _set_traffic(self, function: F) -> F:
        self._traffic = function
        return function

    def hold(self, index: int, specialisation: Specialisation) -> Compiled:
        """Load a specialisation on the device `index` and list it in `compiled`."""
        self.specialisations[index, specialisation.kernel, *specialisation.constants.values()] = specialisation
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
        kind, described = self._describe(args)
        tensors = self._tensors_of(described)
        index = next(arg.device.index for arg in tensors if arg is not None)
        launches = self.launches(*described)
        if kind == "cupy":
            binding.bind_cupy()
        entry: tuple[Any, ...]
        if index < 0 or config.reference():
            entry = (_NO_LOCK, None, None, self._reference_plan(tensors, kind), 0, -1, *(0 for _ in tensors))
        else:
            for one in launches:
                if one.specialisation.loaded(index) is None and _capturing(kind, index):
                    raise CaptureError(self.name, one.specialisation.kernel.file)
                self.hold(index, one.specialisation)
            scalars = {p.name: value for p, value in zip(self.parameters, args, strict=True) if p.keyed}
            bound = launch.bind(self.name, index, launches, self._tensor_names, self._float_names, scalars)
            entry = (*bound, index, *[arg.extent if arg else 0 for arg in tensors])
        if len(self.plans) >= _MOST_PLANS:
            self.forget()
        self._described[key] = tensors
        self.plans[key] = entry
        return entry

    def recover(self, error: Exception, key: Any, stream: int, *words: Any) -> None:
        """A launch that failed."""
        lock, pack, buffer, fire, parameters, index, *_ = self.plans[key]
        bound = launch.Bound(lock, pack, buffer, fire, parameters)
        launch.recover(error, self.name, index, bound, self._tensor_names + self._float_names, stream, *words)

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
        return (binding.never, None, (), None, None, None, None, None, 0, -1, *(0 for _ in self.tensors))

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
        elif isinstance(value, _SCALARS[p.kind]) or (p.kind != "str" and hasattr(value, "__index__")):
            return
        raise OpError(self.name, p.name, f"expected {p.kind}, got {type(value).__name__}")

    def _reference_plan(self, tensors: Sequence[Arg | None], kind: str) -> Callable[..., None]:
        def run(*args: Any) -> None:
            for p, value in zip(self.parameters, args, strict=True):
                if p.kind != "Tensor":
                    self._check_scalar(p, value)
            addresses = [0 if value is None else tensor.address(value) for value in self._tensors_of(args)]
            self._check_separate(tensors, addresses)
            if kind != "torch":
                args = tuple(tensor.to_torch(value) if tensor.dialect(value) else value for value in args)
            with torch.no_grad(), _torch_stream() if kind == "cupy" else nullcontext():
                self.reference(*args)

        return run

    def collision(self, key: Any, *addresses: int) -> None:
        """The address ranges of a call overlap: refuse it unless no byte is shared, or the op may work in place."""
        relative = (key, *(address - addresses[0] for address in addresses))
        if relative not in self._separate:
            self._check_separate(self._described[key], addresses)
            if len(self._separate) >= _MOST_PLANS:
                self._separate.clear()
            self._separate.add(relative)

    def _check_separate(self, tensors: Sequence[Arg | None], addresses: Sequence[int]) -> None:
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
        values = [value for value in self._tensors_of(args) if value is not None]
        kinds = {tensor.dialect(v) for v in values}
        if kinds == {"torch"}:
            plain = all(type(v) in (torch.Tensor, torch.nn.Parameter) for v in values)
            if not plain or all(v.is_meta for v in values):
                binding.bind_torch()
                return getattr(torch.ops.pyops, self.name)(*args)
        if kinds == {"cupy"} and "cupy_stream" not in binding.NAMESPACE:
            binding.bind_cupy()
            return self.call(*args)
        try:
            _, described = self._describe(args)
            planned = self.launches(*described)
        except OpError as refusal:
            raise refusal from None
        if kinds == {"numpy"}:
            return self._reference_plan(self._tensors_of(described), "numpy")(*args)
        if planned:
            named = zip(self._tensor_names, self._tensors_of(args), strict=True)
            raise error or OpError(
                self.name, next(name for name, v in named if v is not None and not tensor.address(v)), "has no memory"
            )
        return None


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


def _parameters(reference: Callable[..., None], roles: dict[str, str], keyed: set[str]) -> list[Parameter]:
    """The parameters of a reference, from its annotations (``Tensor``, ``Tensor | None``, ``float``, ...)."""
    result = []
    for p in inspect.signature(reference).parameters.values():
        kind, _, rest = str(p.annotation).partition(" | ")
        if kind not in _KINDS or rest not in ("", "None"):
            raise TypeError(f"{reference.__name__}: {p.name} is annotated {p.annotation!r}, expected one of {_KINDS}")
        has_default = p.default is not inspect.Parameter.empty
        role = roles.get(p.name, "in")
        is_keyed = kind not in ("Tensor", "float") or p.name in keyed
        default = p.default if has_default else None
        result.append(Parameter(p.name, kind, rest == "None", role, is_keyed, has_default, default))
    unknown = roles.keys() - {p.name for p in result if p.kind == "Tensor"}
    if unknown:
        raise TypeError(f"{reference.__name__}: {sorted(unknown)} are written but are no tensor parameters")
    unknown = keyed - {p.name for p in result if p.kind == "float"}
    if unknown:
        raise TypeError(f"{reference.__name__}: {sorted(unknown)} are keyed but are no float parameters")
    return result


def bind_loaded() -> None:
    """Bind to the libraries this process has already imported; the rest at its first use."""
    if loaded("torch") is not None:
        binding.bind_torch()
    if loaded("cupy") is not None:
        binding.bind_cupy()


__all__ = ["Op", "Wrapper", "bind_loaded", "check", "device", "op", "registry"]
