"""Results of every op in the registry. No line here knows an op by name.

On the device "cpu" the wrapper runs the reference, so the references are tested as well: every element is written,
inputs are unchanged, and a second call gives the same result.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from struct import Struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops._core.launch.kernel import Launch
from pyops._core.launch.layout import layout
from pyops._core.launch.scratch import Scratch
from pyops._core.launch.tensor_map import TensorMap
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops._core.tensors.tensor import TensorArg
from pyops._core.text import source
from pyops.example import ArgMaker
from pyops.testing import CONTENTS, Layout, filled, same_bits, strategies
from pyops.testing.calls import assert_results, assert_same, clones, expected, named, replaced, run, written
from tests.support import axes
from tests.support.calls import DEVICES, KERNELS, OF_GROWING_STATES, as_numpy, example, run_accepted, run_in_place
from tests.support.profiles import PROFILE, covering, sample

OPS = [pytest.param(op, id=name) for name, op in pyops.registry.items()]


def _launches(op: Op, case: axes.Axes) -> list[Launch]:
    assert op.example is not None
    return op.launches(*op.example(ArgMaker(device.host()), num_tokens=7, **case))


def _parts(one: tuple[Op, axes.Axes]) -> set[Any]:
    """The op, its options, and the values of its kernels' constants, with the dtype and sizes."""
    op, case = one
    options = {axis: value for axis, value in case.items() if axis != "dtype" and type(value) is not int}
    made = [launch.specialisation for launch in _launches(op, case)]
    values = {(one.kernel.file, name, str(value)) for one in made for name, value in one.constants.items()}
    return {op.name, *((op.name, *item) for item in options.items())} | values


def _cases() -> list[tuple[Op, axes.Axes]]:
    """The combinations that are run one by one; hypothesis draws from all of them."""
    pick = axes.covering if PROFILE.covers else axes.sample
    every = [(op, case) for op in pyops.registry.values() for case in pick(op, PROFILE.combinations)]
    return every if PROFILE.variants is None else covering(every, _parts)


CASES = [pytest.param(op, case, id=f"{op.name}-{axes.name(case)}") for op, case in _cases()]
OF_ANY_SIZE = [pytest.param(op, id=name) for name, op in pyops.registry.items() if axes.takes_any_size(op)]


def _shared(op: Op) -> set[Any]:
    """What calls of an op share with those of others: its family, and the kinds of its launches and their values."""
    launches = _launches(op, axes.fullest(op))
    kinds: set[Any] = {op.reference.__module__.split(".")[2], len(launches), bool(op.declaration.in_place)}
    for one in launches:
        kinds |= {("cluster", one.cluster), ("shared", bool(one.shared))}
        kinds |= {(type(value), getattr(value, "zeroed", None)) for value in one.fixed.values()}
    return kinds | {fmt for _, fmt in op.declaration.runtime}


# Ops that together have all that threads share. The profile "nightly" tests all.
_THREADED = list(pyops.registry.values())
if PROFILE.variants is not None:
    _THREADED = covering(_THREADED, _shared)
THREADED = [pytest.param(op, id=op.name) for op in _THREADED]
# Sums of extreme values may overflow in one order and not in another.
KINDS = [kind for kind in CONTENTS if kind != "extreme"]
# Quantized values of a group are summed before their scales and zero points apply: infinities cancel where single
# products do not.
_OF_GROUPS = {"ggml_mul_mat_a8", "ggml_mul_mat_vec_a8", "ggml_moe_a8", "ggml_moe_a8_vec"}
# Norms, and ops that quantise or activate rows of tokens. The other ops of these families unpack weights.
_OF_WEIGHTS = {"awq_dequantize", "ggml_dequantize", "gptq_shuffle"}
OF_ROWS = [
    pytest.param(op, id=name)
    for name, op in pyops.registry.items()
    if re.match(r"pyops\.ops\.(norm|quantize|activation)\b", op.reference.__module__) and name not in _OF_WEIGHTS
]
# Round sizes, sizes next to them and between them. An op takes a sample: each size is a kernel of its own.
SIZES = (1, 2, 3, 31, 33, 127, 129, 1000, 1025, 4095, 4097, 5137, 8191, 8192, 16384, 20001, 32767, 32768)


def _with_contents(op: Op, args: list[Any], num_tokens: int | None, kind: str) -> list[Any]:
    """`args` with new data in the token tensors that the op reads, but not in a cache with equally many blocks."""
    read = {p.name for p in op.tensors if p.role != "out"}
    return replaced(
        op,
        args,
        **{
            name: filled(x, kind)
            for name, x in named(op, args).items()
            if name in read
            and not name.endswith("_cache")
            and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
            if x.ndim > 1 and x.shape[0] == num_tokens
        },
    )


@pytest.mark.parametrize("op", OPS)
def test_declaration_is_complete(op: Op) -> None:
    """Every op has a docstring with a one-line summary, a plan and an example, and writes something."""
    assert str(op.reference.__doc__).splitlines()[0].endswith(".")
    assert op._plan is not None
    assert axes.compiled(op) is not None
    assert any(p.written for p in op.tensors)


@cache
def _words(file: str) -> frozenset[str]:
    """Every identifier in a kernel and its headers, without comments: a constant has to be among them."""
    return frozenset(re.findall(r"\w+", re.sub(r"//.*", "", source.inline(file))))


@pytest.mark.parametrize("op", OPS)
def test_kernels_take_all_given_values(op: Op) -> None:
    """The contract between plan and C signature: every parameter gets a value, and every value and constant is used.

    Every tensor is used by the kernels of some case; a keyword may leave it unread in others.
    """
    taken, given = set(), set()
    tensors = tuple(p.name for p in op.tensors)
    scalars = tuple(p.name for p in op.parameters if p.keyed)
    assert op.example is not None
    for case in axes.combinations(op):
        args = op.example(ArgMaker(device.model()), **case)
        launches = op.launches(*args)
        for one in launches:
            kernel = one.specialisation.kernel
            names, fixed = one.names(tensors)
            layout(kernel, names, op.declaration.runtime, scalars, fixed)  # TypeError on a mismatch
            for fmt, name in kernel.signature.parameters:
                value = one.fixed.get(name, 0)
                if isinstance(value, TensorMap | TensorArg):
                    taken.add(value.name)
                else:
                    Struct(fmt).pack(0 if isinstance(value, Scratch) else value)
            for constant in one.specialisation.constants:
                assert constant in _words(kernel.file), f"{kernel.file} uses no {constant}"
        taken |= {name for one in launches for _, name in one.specialisation.kernel.signature.parameters}
        given |= {p.name for p, arg in zip(op.parameters, args, strict=True) if p.kind == "Tensor" and arg is not None}
    assert given <= taken, f"no kernel of {op.name} takes {given - taken}"


@pytest.mark.parametrize("op", OPS)
def test_launches_hold_no_scalar_of_a_call(op: Op) -> None:
    """A plan serves calls with any value of a scalar that is read at every call, so no launch depends on one."""

    def launches(args: list[Any]) -> list[Any]:
        found = []
        for one in op.launches(*args):
            numbers = {name: value for name, value in one.fixed.items() if isinstance(value, int | float)}
            kernel, key = one.specialisation.kernel.file, one.specialisation.key
            found.append((kernel, key, one.grid, one.block, one.shared, one.cluster, numbers))
        return found

    assert op.example is not None
    for case in axes.sample(op, 2):
        args = list(op.example(ArgMaker(device.model()), **case))
        for name, fmt in op.declaration.runtime:
            for value in (0.0, 0.7, -3.0) if fmt == "d" else (3, 1000):
                assert launches(replaced(op, args, **{name: value})) == launches(args), name


@pytest.mark.rotates("cases")
@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_equals_reference(op: Op, case: axes.Axes, device: str) -> None:
    args = example(op, device, num_tokens=axes.bounded_tokens(op, case, 7), **case)
    assert_results(op, expected(op, args), run(op, args))


@pytest.mark.rotates
@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("op", OPS)
@given(data=st.data())
def test_equals_reference_for_any_layout_and_contents(op: Op, device: str, data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(axes.sample(op, PROFILE.varied)), label="axes")
    draws = {axis: data.draw(strategy, label=axis) for axis, strategy in axes.drawn(op, case).items()}
    kinds = [kind for kind in KINDS if kind != "large" or op.name not in OF_GROWING_STATES]
    kinds = [kind for kind in kinds if kind != "inf" or op.name not in _OF_GROUPS]
    kind = data.draw(st.sampled_from(kinds), label="contents")
    args = example(op, device, seed=data.draw(st.integers(0, 99), label="seed"), **draws, **case)
    args = _with_contents(op, args, draws.get("num_tokens"), kind)
    layouts = {name: data.draw(strategies.layouts(), label=f"{name} layout") for name in named(op, args)}
    assert_results(op, expected(op, args), run_accepted(op, args, layouts))


def _rows_of_tokens(op: Op, args: list[Any], num_tokens: int) -> dict[str, Any]:
    """The tensors or descriptors with a row of several elements per token, by name; not scales."""
    pairs = zip(op.parameters, args, strict=True)
    shaped = {p.name: arg for p, arg in pairs if len(getattr(arg, "shape", ())) > 1 and "scale" not in p.name}
    return {name: arg for name, arg in shaped.items() if num_tokens in arg.shape[:-1] and arg.shape[-1] > 1}


@pytest.mark.rotates
@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("op", OF_ROWS)
def test_rows_of_any_stride(op: Op, device: str) -> None:
    """No op refuses gaps between rows. Gaps that keep the alignment change no bit of the results."""
    num_tokens = 7
    for case in [*([] if PROFILE.varied == 1 else axes.sample(op, 2)), axes.fullest(op)]:
        args = example(op, device, num_tokens=num_tokens, **case)
        packed, right = run(op, args), expected(op, args)
        tensors = list(_rows_of_tokens(op, args, num_tokens))
        assert tensors or case["hidden_size"] == 1
        for name in tensors:
            assert_same(op, packed, run(op, args, {name: Layout(gap=64)}))
        every = {name: Layout(gap=64 * i) for i, name in enumerate(tensors, start=1)}
        assert_same(op, packed, run(op, args, every))
        for odd in ({name: Layout(gap=3) for name in tensors}, {name: Layout(gap=i) for i, name in enumerate(tensors)}):
            assert_results(op, right, run(op, args, odd))


@pytest.mark.parametrize("op", OF_ROWS)
def test_strides_of_rows_compile_no_kernel(op: Op) -> None:
    """Rows with a larger stride run the kernels of rows with the same alignment."""
    assert op.example is not None
    num_tokens = 7
    args = list(op.example(ArgMaker(device.model()), num_tokens=num_tokens, **axes.fullest(op)))

    def texts(gap: int) -> list[str]:
        apart = {}
        for name, arg in _rows_of_tokens(op, args, num_tokens).items():
            outer = [stride // arg.shape[-1] * (arg.shape[-1] + gap) for stride in arg.strides[:-1]]
            apart[name] = replace(arg, strides=(*outer, 1))
        return [launch.specialisation.text for launch in op.launches(*replaced(op, args, **apart))]

    assert texts(64) == texts(128) == texts(4096)


@pytest.mark.rotates
@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("op", OF_ANY_SIZE)
def test_any_size(op: Op, device: str) -> None:
    """Any row size, round or not, with one row and with enough rows to fill a device."""
    for size in sample(SIZES, PROFILE.sizes, op.name):
        for num_tokens in (1, 140) if size < 2000 else (2,):
            args = example(op, device, num_tokens=num_tokens, **axes.fullest(op) | {"hidden_size": size})
            assert_results(op, expected(op, args), run(op, args))


@pytest.mark.rotates
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_writes_every_element_and_reads_no_output(op: Op, device: str) -> None:
    """The previous contents of outputs do not matter, in two calls."""
    args = example(op, device, num_tokens=5, **axes.fullest(op))
    first = run(op, args, poison=0xFF)
    assert_same(op, first, run(op, args, poison=0x5A))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_empty_input_writes_nothing(op: Op, device: str) -> None:
    args = example(op, device, num_tokens=0, **axes.fullest(op))
    run(op, args)
    before = clones(args)
    op(*args)
    for name, value in named(op, args).items():
        assert same_bits(value, named(op, before)[name])
    if device == "cpu":
        op(*as_numpy(args))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", [param for param in OPS if pyops.registry[param.id].declaration.in_place])
def test_in_place(op: Op, device: str) -> None:
    """An output that may be an input gives the same result as a separate one."""
    args = example(op, device, num_tokens=7)
    assert_same(op, run_in_place(op, args), run(op, args))


@pytest.mark.rotates
@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("transposed", [False, True])
def test_higher_ranks(op: Op, device: str, transposed: bool) -> None:
    """Token tensors of rank 3, with rows in either order: refused, or the result of rank 2."""
    num_tokens, shape = 6, (2, 3)
    args = example(op, device, num_tokens=num_tokens, **axes.fullest(op))

    def raised(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().unflatten(0, shape)
        return x.transpose(0, 1).contiguous().transpose(0, 1) if transposed else x

    higher = {name: raised(x) for name, x in named(op, args).items() if x.ndim > 1 and x.shape[0] == num_tokens}
    raised_args = replaced(op, clones(args), **higher)
    before = clones(raised_args)
    try:
        op(*raised_args)
    except pyops.OpError:
        for name, value in named(op, raised_args).items():
            assert same_bits(value, named(op, before)[name]), f"{name} was written before the call was refused"
        return
    results = {
        name: x.reshape(-1, *x.shape[2:]) if name in higher else x for name, x in written(op, raised_args).items()
    }
    assert_results(op, expected(op, args), results)


@pytest.mark.parametrize("op", OPS)
def test_numpy_equals_torch_bit_for_bit(op: Op) -> None:
    for case in axes.sample(op, max_cases=2):
        args = example(op, num_tokens=5, **case)
        assert_same(op, run(op, args), run(op, args, call=lambda *values: op(*map(as_numpy, values))))


@pytest.mark.parametrize("op", OPS)
def test_autocast_of_the_caller_changes_nothing(op: Op) -> None:
    def under_autocast(*values: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            op(*values)

    args = example(op, num_tokens=5)
    assert_same(op, run(op, args), run(op, args, call=under_autocast))


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("op", THREADED)
def test_threads(op: Op, device: str) -> None:
    """Four threads at once, each with its own shape and two calls, give the results of sequential calls."""
    calls = [example(op, device, seed=i, num_tokens=1 + i, **axes.fullest(op)) for i in range(4)]
    one_by_one = [run(op, args) for args in calls]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            for alone, together in zip(one_by_one, pool.map(lambda args: run(op, args), calls), strict=True):
                assert_same(op, alone, together)
