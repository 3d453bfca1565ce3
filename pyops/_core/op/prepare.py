"""The cold path: from the arguments of a call to its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from struct import error as StructError
from typing import Any

from .. import config
from ..errors import NotLoadedError, OpError
from ..launch import backend, launch, workspace
from ..launch.kernel import Launch
from ..system import device
from ..system.device import Device
from ..system.lazy import torch
from ..tensors import tensor
from ..tensors.tensor import TensorArg
from . import arguments, index_check, torch_library, trust
from .declaration import Declaration
from .index_check import as_torch, torch_stream
from .plan import Plan, addresses_of, check_separate, device_plan
from .planner import Planner
from .wrapper import NAMESPACE


def prepare(declaration: Declaration, planner: Planner, args: Sequence[Any]) -> Plan:
    """The plan of a call with these arguments. Raises OpError for a call that the op refuses."""
    if (converted := arguments.convert(declaration, args)) is not None:
        # A tensor hashes by identity: a plan kept under it would outlive the tensor's value. A numpy scalar hashes as
        # the Python value that it converts to, but that value has its own plan.
        pairs = zip(declaration.parameters, args, converted, strict=True)
        keep = not any(p.keyed and new is not value for p, value, new in pairs)
        return Plan(_call_converted(declaration, planner), keep=keep)
    library, described = arguments.describe(declaration, args)
    tensors = declaration.tensors_of(described)
    index = next(arg.device.index for arg in tensors if arg is not None)
    launches = planner.launches(*described)
    if library == "cupy":
        torch_library.bind_cupy()

    def plan_of(launches: Sequence[Launch] | None) -> Plan:
        """The plan that runs these launches; without any, the reference."""
        if index < 0 or launches is None:
            return Plan(_cpu_call(declaration, planner, tensors, library, launches), tensors=tensors)
        bound = _bound(declaration, planner, library, index, launches, args)
        return device_plan(declaration, tensors, index, bound, NAMESPACE[f"{library}_stream"])

    on = next(arg.device for arg in tensors if arg is not None)
    if config.reference():
        plan = plan_of(None)
    elif (index >= 0 or config.kernels_on_cpu()) and trust.unproven(index, on, launches):
        try:
            portable = _launches_on(on.as_portable, declaration, planner, tensors, described)
        except OpError:  # no portable kernel serves the call
            portable = None
        plan = trust.settled(declaration, library, index, on, args, launches, portable, plan_of)
    else:
        plan = plan_of(launches)
    plan.empty = not launches
    if planner.bad_indices is not None and config.check_indices():
        run = index_check.checked(declaration, planner, plan.run, library, index)
        plan = Plan(run, tensors=tensors, empty=plan.empty, keep=plan.keep)
    return plan


def call_unkept(declaration: Declaration, planner: Planner, error: Exception | None, *args: Any) -> Any:
    """A call without a key: numpy arrays, empty tensors, tensors without storage, special torch tensors, or a mistake.

    `error` is the exception, if any, that was raised while the wrapper built the key.
    """
    values = [value for value in declaration.tensors_of(args) if value is not None]
    libraries = {tensor.library_of(value) for value in values}
    if None in libraries:
        known, pairs = sorted(filter(None, libraries))[:1], zip(declaration.parameters, args, strict=True)
        found = [tensor.taken(declaration.name, p.name, x, *known) if p.is_tensor else x for p, x in pairs]
        if any(new is not x for new, x in zip(found, args, strict=True)):
            return declaration.applied(planner.call, found)()
    if libraries == {"torch"}:
        plain = all(type(value) in (torch.Tensor, torch.nn.Parameter) for value in values)
        if any(value.is_nested for value in values):  # NestedTensor does not dispatch to our ops: refuse it here
            arguments.describe(declaration, args)
        without_data = all(tensor.is_meta(value) for value in values)
        if without_data:
            arguments.describe(declaration, args)  # before torch refuses a wrong scalar with its own message
        if not plain or without_data:
            torch_library.bind_torch()
            return declaration.applied(getattr(torch.ops.pyops, declaration.name), args)()
    if libraries == {"cupy"} and "cupy_stream" not in NAMESPACE:
        torch_library.bind_cupy()
        return declaration.applied(planner.call, args)()
    try:
        plan = prepare(declaration, planner, args)
    except OpError as refusal:
        raise refusal from None
    if plan.tensors and libraries != {"numpy"}:
        if plan.empty:
            return None
        for value, arg in zip(declaration.tensors_of(args), plan.tensors, strict=True):
            if arg is not None and arg.numel and not tensor.address(value):
                raise arg.error("has no memory")
        if error:
            raise error
    return plan.run(*args)


def _call_converted(declaration: Declaration, planner: Planner) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return declaration.applied(planner.call, arguments.convert(declaration, args) or args)()

    return run


# What runs a call: launches bound to a device, the reference, or kernels on the host.


def _bound(
    declaration: Declaration,
    planner: Planner,
    library: str,
    index: int,
    launches: Sequence[Launch],
    args: Sequence[Any],
) -> launch.Bound:
    """The launches, bound to the device `index`, their kernels loaded."""
    functions = []
    for one in launches:
        _may_load(declaration, one, one.specialisation.loaded(index) is not None)
        functions.append(planner.load(index, one.specialisation, one.shared).function)
    scalars = {p.name: value for p, value in zip(declaration.parameters, args, strict=True) if p.keyed}
    allocate = workspace.allocate_torch if library == "torch" else workspace.allocate_cupy
    names = declaration.tensor_names, declaration.runtime
    try:
        return launch.bind(declaration.name, index, launches, functions, *names, scalars, allocate)
    except (StructError, OverflowError) as error:
        _explain(declaration, error, args)
        raise


def _launches_on(
    on: Device, declaration: Declaration, planner: Planner, tensors: Sequence[TensorArg | None], values: Sequence[Any]
) -> list[Launch]:
    """The launches for a call with these `tensors` on another device; `values` has the scalars."""
    described = list(values)
    for position, arg in zip(declaration.tensor_positions, tensors, strict=True):
        described[position] = replace(arg, device=on) if arg is not None else None
    return planner.launches(*described)


def _may_load(declaration: Declaration, one: Launch, loaded: bool) -> None:
    """Raises NotLoadedError where PYOPS_JIT=error, unless the kernel is `loaded` already."""
    if not loaded and config.jit_forbidden():
        raise NotLoadedError(declaration.name, one.specialisation.kernel.file, str(one.specialisation))


def _cpu_call(
    declaration: Declaration,
    planner: Planner,
    tensors: Sequence[TensorArg | None],
    library: str,
    launches: Sequence[Launch] | None,
) -> Callable[..., None]:
    """The function that runs a call without bound launches: the reference, or the kernels on the host backend."""

    def run(*args: Any) -> None:
        # The values equal those that the plan was made for, but may be numpy scalars.
        args = tuple(arguments.numbers(declaration, arguments.convert(declaration, args) or args))
        addresses = addresses_of(declaration, args)
        check_separate(declaration, tensors, addresses)
        if launches is not None and config.kernels_on_cpu():
            tensor.increment_versions(declaration.written_of(args))
            planned = launches
            if backend.get().warp_size() == 64:
                planned = _launches_on(device.host(64), declaration, planner, tensors, args)
            _run_on_host(declaration, planner, planned, tensors, addresses, args)
        else:
            _run_reference(declaration, library, args)

    return run


def _run_reference(declaration: Declaration, library: str, args: Sequence[Any]) -> None:
    args, scope = args if library == "torch" else as_torch(args), torch_stream() if library == "cupy" else nullcontext()
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), scope:
        declaration.applied(declaration.reference, args)()


def _run_on_host(
    declaration: Declaration,
    planner: Planner,
    launches: Sequence[Launch],
    tensors: Sequence[TensorArg | None],
    addresses: Sequence[int],
    args: Sequence[Any],
) -> None:
    values = {p.name: value for p, value in zip(declaration.parameters, args, strict=True)}
    scalars = {p.name: values[p.name] for p in declaration.parameters if p.keyed}
    runtime = [values[name] for name, _ in declaration.runtime]
    for one in launches:
        _may_load(declaration, one, backend.get().loaded(one.specialisation))
        planner.load_on_host(one.specialisation)
    extents = [arg.extent if arg else 0 for arg in tensors]
    named = declaration.tensor_names, extents, declaration.runtime, scalars
    try:
        backend.get().run_launches(launches, *named, *addresses, *runtime)
    except (StructError, OverflowError, TypeError) as error:
        _explain(declaration, error, args)


def _explain(declaration: Declaration, error: Exception, args: Sequence[Any]) -> None:
    """Raise `error`, or the OpError that names a scalar that kernels cannot take."""
    formats = {"float": "d", "int": "i"}  # kernels may take keyed integers in 32 bits
    runtime = dict(declaration.runtime)
    pairs = [(p, value) for p, value in zip(declaration.parameters, args, strict=True) if p.kind in formats]
    named = tuple((p.name, runtime.get(p.name, formats[p.kind])) for p, value in pairs if value is not None)
    launch.explain(error, declaration.name, named, [value for _, value in pairs if value is not None])
