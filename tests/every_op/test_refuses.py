"""Bad calls of every op in the registry.

Each is an OpError that names op and argument, and writes nothing. A good call precedes it, so that its plan is cached
and must not be mistaken for a match.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import pyops
from pyops._core.op.declaration import Parameter
from pyops._core.op.op import Op
from pyops.testing.calls import assert_results, clones, expected, named, replaced, written
from tests.support import axes
from tests.support.calls import CUDA, KERNELS, Host, as_cupy, as_numpy, assert_refused, example, inputs_of_form, refusal

NUM_TOKENS = 7
# A call that is always refused is planned in the same way whether a reference or a kernel would run.
OF_REFUSALS = ["cpu", CUDA]


def _args(op: Op, device: str = "cpu") -> list[Any]:
    return example(op, device, num_tokens=NUM_TOKENS, **axes.fullest(op))


def _value(op: Op, args: list[Any], p: Parameter) -> Any:
    return args[op.parameters.index(p)]


# Every tensor and every scalar of the ops' examples.
TENSORS = {op: named(op, _args(op)) for op in pyops.registry.values()}
CASES = [(op, p, tensors) for op, tensors in TENSORS.items() for p in op.tensors if p.name in tensors]
SCALARS = [(op, p, {}) for op in pyops.registry.values() for p in op.parameters if p.kind != "Tensor"]


def _each(cases: list[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test of (op, p): one test per op tries all parameters p of the op that are in `cases`.

    A test per parameter would be thousands, which take pytest longer to collect than to run. A note on the exception
    names the parameter.
    """
    parameters: dict[str, list[Parameter]] = {}
    for op, p, _ in cases:
        parameters.setdefault(op.name, []).append(p)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def tries_all(op: Op, p: list[Parameter], **others: Any) -> None:
            for one in p:
                try:
                    test(op, one, **others)
                except BaseException as error:
                    error.add_note(f"{op.name}: the parameter was {one.name}")
                    raise

        each_op = [pytest.param(pyops.registry[name], few, id=name) for name, few in parameters.items()]
        return pytest.mark.parametrize(("op", "p"), each_op)(tries_all)

    return decorate


@cache
def _called(op: Op, device: str, on_host: bool) -> tuple[list[Any], Any]:
    """The arguments of a good call, with its plan. The second call with a plan sets its guard."""
    args = _args(op, device)
    for _ in range(2):
        op(*clones(args))
    return args, op.recent[0]


def _right_call(op: Op, device: str) -> list[Any]:
    """The arguments of a good call; its plan is the most recent one."""
    args, op.recent[0] = _called(op, device, isinstance(device, Host))
    return clones(args)


def _refused_or_right(op: Op, args: list[Any], p: Parameter, value: torch.Tensor) -> None:
    args = replaced(op, args, **{p.name: value})
    copies = clones(args)
    try:
        op(*args)
    except pyops.OpError as error:
        assert_refused(op, error, copies, args)
    else:
        assert_results(op, expected(op, copies), written(op, args))


@_each([case for case in CASES if not case[1].optional])
def test_none(op: Op, p: Parameter) -> None:
    error = refusal(op, replaced(op, _right_call(op, "cpu"), **{p.name: None}))
    assert (error.argument, error.message) == (p.name, "expected a tensor, got None")


@pytest.mark.parametrize("device", OF_REFUSALS)
@_each(CASES)
def test_no_tensor(op: Op, p: Parameter, device: str) -> None:
    args = _right_call(op, device)
    for wrong in ([1.0, 2.0], "x", *([] if p.number else [3.0])):
        assert refusal(op, replaced(op, args, **{p.name: wrong})).argument == p.name


@pytest.mark.parametrize("device", OF_REFUSALS)
@_each(CASES)
def test_wrong_dtype(op: Op, p: Parameter, device: str) -> None:
    args = _right_call(op, device)
    value = _value(op, args, p)
    for dtype in (
        torch.float64,
        torch.complex64,
        torch.bool,
        torch.float32 if value.dtype in (torch.int32, torch.int64) else torch.int64,
    ):
        if dtype == value.dtype:
            continue
        error = refusal(op, replaced(op, args, **{p.name: value.to(torch.float32).to(dtype)}))
        assert error.argument == p.name or "dtype" in error.message


@pytest.mark.parametrize("op", [pytest.param(op, id=name) for name, op in pyops.registry.items()])
def test_wrong_dtype_everywhere(op: Op) -> None:
    """All tensors have the same dtype, which no kernel takes."""
    args = _args(op)
    for dtype in (torch.float64, torch.bool):
        refusal(op, replaced(op, args, **{name: x.float().to(dtype) for name, x in named(op, args).items()}))


@pytest.mark.rotates
@pytest.mark.parametrize("device", KERNELS)
@_each(CASES)
def test_longer_rows(op: Op, p: Parameter, device: str) -> None:
    """They are refused, or the extra elements make no difference."""
    args = _right_call(op, device)
    value = _value(op, args, p)
    _refused_or_right(op, args, p, torch.cat((value, value[..., :1]), -1))


def _counts_tokens(tensors: dict[str, torch.Tensor]) -> int:
    return sum(x.shape[0] == NUM_TOKENS for x in tensors.values())


@pytest.mark.rotates
@pytest.mark.parametrize("device", KERNELS)
@_each([case for case in CASES if case[2][case[1].name].shape[0] == NUM_TOKENS and _counts_tokens(case[2]) > 1])
def test_more_rows(op: Op, p: Parameter, device: str) -> None:
    """They are refused, or one more row makes no difference."""
    args = _right_call(op, device)
    value = _value(op, args, p)
    _refused_or_right(op, args, p, torch.cat((value, value[:1])))


@pytest.mark.rotates
@pytest.mark.parametrize("device", KERNELS)
@_each(CASES)
def test_extra_dimension(op: Op, p: Parameter, device: str) -> None:
    """One more dimension of size 1 is refused, or changes nothing."""
    args = _right_call(op, device)
    _refused_or_right(op, args, p, _value(op, args, p).unsqueeze(-1))


@pytest.mark.rotates
@pytest.mark.parametrize("device", KERNELS)
@_each(CASES)
def test_strided_elements(op: Op, p: Parameter, device: str) -> None:
    """A last dimension of stride 2 is refused, or makes no difference."""
    args = _right_call(op, device)
    value = _value(op, args, p)
    _refused_or_right(op, args, p, torch.stack((value, value), -1)[..., 0])


@pytest.mark.parametrize("device", OF_REFUSALS)
@_each([case for case in CASES if case[1].written and case[2][case[1].name].numel() > 1])
def test_overlapping_elements(op: Op, p: Parameter, device: str) -> None:
    args = _right_call(op, device)
    value = _value(op, args, p)
    rows = value[:1] if value.shape[0] > 1 else value[..., :1]
    assert refusal(op, replaced(op, args, **{p.name: rows.clone().expand(value.shape)})).argument == p.name


@pytest.mark.parametrize("device", OF_REFUSALS)
@_each([case for case in CASES if case[1].written])
def test_overlapping_tensors(op: Op, p: Parameter, device: str) -> None:
    """A written tensor may share no byte with any other, except with its own input in place."""
    args = _right_call(op, device)
    value = _value(op, args, p)
    for name, other in named(op, args).items():
        if name != p.name:
            size = max(value.element_size(), other.element_size())
            memory = torch.zeros(other.nbytes + value.nbytes + 16, dtype=torch.uint8, device=device)
            start = max(0, other.nbytes - size) // value.element_size() * value.element_size()
            theirs = memory[: other.nbytes].view(other.dtype).view(other.shape)
            own = memory[start : start + value.nbytes].view(value.dtype).view(value.shape)
            refusal(op, replaced(op, args, **{name: theirs.copy_(other), p.name: own}))


@pytest.mark.parametrize("device", OF_REFUSALS)
@_each([case for case in CASES if len(case[2]) > 1 and not case[1].number])
def test_another_library(op: Op, p: Parameter, device: str) -> None:
    args = _right_call(op, device)
    value = _value(op, args, p)
    refusal(op, replaced(op, args, **{p.name: as_numpy(value.cpu())}))
    if device == "cuda":
        refusal(op, replaced(op, args, **{p.name: as_cupy(value)}))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@_each([case for case in CASES if len(case[2]) > 1])
def test_another_device(op: Op, p: Parameter, device: str) -> None:
    if p.number and device == "cuda":
        return  # a scalar may lie in host memory
    args = _right_call(op, device)
    value = _value(op, args, p)
    other = value.cpu() if device == "cuda" else value.cuda()
    assert "device" in refusal(op, replaced(op, args, **{p.name: other})).message


@_each(CASES)
def test_read_only(op: Op, p: Parameter) -> None:
    args = _right_call(op, "cpu")
    arrays = {name: as_numpy(x) for name, x in named(op, args).items()}
    arrays[p.name].flags.writeable = False
    if p.written:
        assert refusal(op, args, call=lambda *_: op(*replaced(op, args, **arrays))).argument == p.name
    else:
        op(*replaced(op, args, **arrays))


@pytest.mark.parametrize("device", OF_REFUSALS)
@_each([case for case in CASES if case[1].number])
def test_numbers_out_of_float32_range(op: Op, p: Parameter, device: str) -> None:
    args = _right_call(op, device)
    for value in (1e300, -(10**400)):
        assert refusal(op, replaced(op, args, **{p.name: value})).argument == p.name


@pytest.mark.parametrize("device", OF_REFUSALS)
@_each(SCALARS)
def test_wrong_scalar(op: Op, p: Parameter, device: str) -> None:
    args = _right_call(op, device)
    wrong: list[Any] = [[1], object(), 5 if p.kind == "str" else "x"]
    wrong += [1.5] if p.kind in ("int", "bool") else []
    wrong += [2**70] if p.kind == "int" else [1e300, -(10**400)] if p.kind == "float" else []
    wrong += [2, -1, 2**70, numpy.int64(2), torch.tensor(2)] if p.kind == "bool" else []
    wrong += [] if p.optional else [None]
    for value in wrong:
        assert refusal(op, replaced(op, args, **{p.name: value})).argument == p.name


@_each([case for case in SCALARS if case[1].kind == "bool"])
def test_zero_and_one_are_false_and_true(op: Op, p: Parameter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the caller's type, the plan and the reference get a bool, because it may be part of the kernel text."""
    args = _right_call(op, "cpu")
    seen: list[Any] = []
    launches = op.launches
    position = [one.name for one in op.parameters].index(p.name)

    def see(*described: Any) -> Any:
        seen.append(described[position])
        return launches(*described)

    monkeypatch.setattr(op, "launches", see)
    for value in (0, 1, numpy.int64(1), torch.tensor(0)):
        op.forget()
        with suppress(pyops.OpError):  # the value may not fit the other arguments
            op(*replaced(op, args, **{p.name: value}))
    assert seen
    assert {type(value) for value in seen} == {bool}


# Negative integers that have a meaning, or that an op takes for compatibility with vLLM and never reads.
_ANY_INTEGER = {"pad_slot_id", "max_seq_len", "max_query_len", "num_kv_splits", "rows_per_block", "CuCount"}
_ANY_INTEGER |= {
    "block_write_idx",
    "tp_rank",
    "blocksparse_local_blocks",
    "blocksparse_vert_stride",
    "blocksparse_block_size",
}
_ANY_INTEGER |= {"blocksparse_head_sliding_step", "split_k_iters", "thx", "thy", "sm_count", "sm_version"}
_ANY_INTEGER |= {"CUBLAS_M_THRESHOLD", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "thread_k", "thread_n", "blocks_per_sm"}


@_each([case for case in SCALARS if case[1].kind == "int" and case[1].name not in _ANY_INTEGER])
def test_negative_integers(op: Op, p: Parameter) -> None:
    """Sizes, counts and type numbers, which may contradict the shapes as well."""
    args = _right_call(op, "cpu")
    for value in (-1, -(2**31)):
        if (op.name, p.name, value) == ("allspark_w8a16_gemm", "group_size", -1):
            continue  # the only right value
        refusal(op, replaced(op, args, **{p.name: value}))


# Each parameter of each form that allocates outputs.
FORMS = [
    (op, p, {}) for op in pyops.registry.values() if op.form for p in op.form.declaration.parameters if not p.returned
]


class _Allocated(TorchDispatchMode):
    """Count the tensors that torch allocates."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "empty" in str(function)
        return function(*args, **(kwargs or {}))


def _of_another_look(value: Any) -> list[Any]:
    """Replacements for an argument."""
    wrong: list[Any] = [None, "x", [1.0], 1.5, -1, 0, 3]
    if not isinstance(value, torch.Tensor):
        return wrong
    shapes = [value.reshape(-1)[0], value[None], value[..., None], value.reshape(-1), value[:0], value[..., :0]]
    longer = torch.cat((value, value[..., :1]), -1)
    kinds = [torch.float32, torch.float16, torch.int32, torch.float64, torch.uint8]
    return [*wrong, *shapes, longer, longer[..., 1:], *(value.to(torch.float32).to(kind) for kind in kinds)]


def _allocates(op: Op, call: dict[str, Any]) -> bool:
    """Whether this form of the op accepts a call; if not, nothing was allocated before the OpError."""
    assert op.form is not None
    refused = None
    with _Allocated() as allocated:
        try:
            op.form.allocate(**call)
        except pyops.OpError as error:
            refused = error
    if refused is None:
        assert allocated.count == len(op.form.declaration.returned)
        with suppress(pyops.OpError):
            op.form.new(**call)
        return True
    assert refused.argument in {p.name for p in (*op.parameters, *op.form.declaration.parameters)}
    assert not allocated.count, refused
    with pytest.raises(pyops.OpError):
        op.form.new(**call)
    return False


@pytest.mark.rotates
@_each(FORMS)
def test_refused_call_allocates_nothing(op: Op, p: Parameter) -> None:
    """With any replacement for an argument."""
    assert op.form is not None
    inputs = inputs_of_form(op, _args(op))
    calls = [inputs | {p.name: value} for value in _of_another_look(inputs[p.name])]
    assert _allocates(op, inputs)
    taken = [_allocates(op, call) for call in calls]
    # Arguments that affect neither output sizes nor plans may be refused later.
    assert not all(taken) or not (p.is_tensor or p.keyed)
    with FakeTensorMode() as mode:  # only sizes are computed

        def fake(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

        fakes = {name: fake(value) for name, value in inputs.items()}  # once: each takes as long as a call
        for call in calls:
            with suppress(pyops.OpError):
                op.form.allocate(**fakes | {p.name: fake(call[p.name])})


def _error(call: Callable[..., None], *args: Any) -> str | None:
    try:
        call(*args)
    except pyops.OpError as error:
        return str(error)
    return None


@_each(CASES)
def test_tensors_without_data(op: Op, p: Parameter) -> None:
    """On the device "meta" exactly the calls are refused that are refused with data, also through torch.ops."""
    args = _args(op)
    value = _value(op, args, p)
    errors = []
    for wrong in (torch.cat((value, value[..., :1]), -1), value[:-1], value[None], value.float().to(torch.complex64)):
        given = replaced(op, args, **{p.name: wrong})
        metas = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in given]
        errors.append(_error(op.check, *given))
        assert _error(op, *metas) == errors[-1]
        assert _error(op.applied(getattr(torch.ops.pyops, op.name), metas)) == errors[-1]
    assert any(errors), "nothing wrong was tried"
