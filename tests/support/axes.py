"""The axes along which an op's example varies.

An axis is a keyword-only parameter of an op's example. Tests are parametrised over values that compile into a kernel,
because each value is another specialisation; hypothesis draws the other values. Annotations `Literal[...]` and `bool`
list their own values; the values of any other axis are listed here once, for every op.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from functools import cache, partial
from itertools import combinations as pairs_of
from itertools import product
from typing import Any, Literal, get_args, get_origin

from hypothesis import strategies as st

from pyops._core.op.op import Op
from pyops._core.system import device
from pyops._core.tensors.tensor import TensorArg
from pyops.example import ArgMaker
from tests.support.profiles import PROFILE

Axes = dict[str, Any]

# Axis -> every value that is compiled without a device.
COMPILED: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "float16", "bfloat16"),
    "hidden_size": (4096, 14336, 64, 769, 1, 32768, 4095, 8191),
    "quant_dtype": ("float8_e4m3fn", "float8_e4m3fnuz", "int8"),
    "group_size": (64, 128),
    "head_dim": (64, 128, 256),
    "head_size": (128, 64, 256),
    "vocab_size": (4000, 128256, 17, 2**20),
    # Values for the tests of one family; they are here because benchmarks use them, too.
    "num_heads": (6,),
    "num_kv_heads": (2,),
    "block_size": (16,),
    "dim": (64,),
    "num_experts": (3,),
    "output_size": (136, 64),  # the small-M kernel of packed weights takes a multiple of 64
    "input_size": (160,),
    "num_pages": (37,),
    "topk": (96,),
    "num_keys": (300,),
    "num_blocks": (7,),
    "max_blocks": (5,),
}

# Axis -> the values that are run, where not all of them are.
RUN: dict[str, tuple[Any, ...]] = COMPILED | {
    "hidden_size": (64, 769, 4096),
    "head_size": (64,),
    "vocab_size": (4000, 17),
    "output_size": (136,),
}

# (axis, the example's value) -> the value with every option, where the op has it: fewer steps of the same kernel.
_SHORT = {("hidden_size", 7168): 1000, ("input_size", 3072): 160, ("num_heads", 64): 20, ("head_size", 128): 40}
# Elements of a row where an op takes any size: 129 vectors of 16 bytes, the shortest row that a block's threads share.
_ROW = 1032

# Axis -> the strategy that hypothesis draws from.
DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "num_tokens": st.integers(1, 40) | st.sampled_from([131, 132, 133, 257]),
    "min_seq_len": st.just(0),
    "max_seq_len": st.sampled_from([128, 1, 77, 200]),
}
# Few tokens where rows are long or the op has no hidden_size: more tokens would test nothing new.
_FEWER: dict[str, st.SearchStrategy[Any]] = {"num_tokens": st.integers(1, 12) | st.just(33)}
_LONG = 1024  # elements
_OF_PRODUCTS = "attention", "linear"  # families in which a token meets more elements than its own
_MAX_ELEMENTS = 1 << 21  # of a call: the number of tokens times the elements of a call with one token
_FEWEST = 3  # tokens that any call may have


def compiled(op: Op, table: dict[str, tuple[Any, ...]] = COMPILED) -> dict[str, tuple[Any, ...]]:
    """The axes of `op` that compile into its kernels, each with its values."""
    assert op.example is not None, f"{op.name} has no example"
    found = {}
    for axis, p in inspect.signature(op.example, eval_str=True).parameters.items():
        if p.kind is not p.KEYWORD_ONLY or axis in DRAWN:
            continue
        if get_origin(p.annotation) is Literal:
            found[axis] = get_args(p.annotation)
        elif p.annotation is bool:
            found[axis] = (False, True)
        elif axis in table:
            found[axis] = table[axis]
        else:
            raise LookupError(f"{op.name}: the axis {axis!r} of its example is unknown: add it to {__name__}")
    return found


def drawn(op: Op, case: Axes) -> dict[str, st.SearchStrategy[Any]]:
    """The axes of `op` that do not compile into its kernels, each with its strategy, and those of `case`."""
    assert op.example is not None, f"{op.name} has no example"
    strategies = DRAWN if case.get("hidden_size", _LONG) < _LONG else DRAWN | _FEWER
    strategies = strategies | {"num_tokens": strategies["num_tokens"].map(partial(bounded_tokens, op, case))}
    return {axis: strategies[axis] for axis in inspect.signature(op.example).parameters if axis in DRAWN}


def bounded_tokens(op: Op, case: Axes, num_tokens: int) -> int:
    """That many tokens, or fewer where the host would multiply for seconds, because a token meets many elements.

    A token of a linear layer meets the whole weight, one of attention its keys. The profile "nightly" bounds nothing.
    """
    if PROFILE.variants is None or op.reference.__module__.split(".")[2] not in _OF_PRODUCTS:
        return num_tokens
    return min(num_tokens, max(_FEWEST, _MAX_ELEMENTS // _elements_of_one(op, tuple(case.items()))))


@cache
def _elements_of_one(op: Op, case: tuple[tuple[str, Any], ...]) -> int:
    """Elements of all the tensors in a call with one token."""
    assert op.example is not None
    args = op.example(ArgMaker(device.host()), num_tokens=1, **dict(case))
    return sum(arg.numel for arg in args if isinstance(arg, TensorArg))


def combinations(op: Op, table: dict[str, tuple[Any, ...]] = COMPILED) -> Iterator[Axes]:
    """Every combination of the compiled axes of `op`."""
    axes = compiled(op, table)
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def sample(op: Op, max_cases: int | None) -> list[Axes]:
    """`max_cases` of the combinations that are run, the same ones at each call; all of them for None.

    All the cases together cover every pair of values of two axes; `max_cases` keeps the first ones.
    """
    if max_cases is None:
        return list(combinations(op, RUN))
    return list(_pairwise(op))[:max_cases]


def covering(op: Op, max_cases: int | None) -> list[Axes]:
    """`sample`, and more combinations until every value of every axis occurs."""
    chosen = sample(op, max_cases)
    seen = {item for case in chosen for item in case.items()}
    for case in _pairwise(op):
        if not case.items() <= seen:
            chosen.append(case)
            seen |= case.items()
    return chosen


@cache
def _pairwise(op: Op) -> tuple[Axes, ...]:
    """Combinations that cover every pair of values, chosen greedily by the number of new pairs."""

    def pairs(case: Axes) -> set[Any]:
        return set(pairs_of(case.items(), 2)) or {tuple(case.items())}

    left = [(case, pairs(case)) for case in combinations(op, RUN)]
    random.Random(op.name).shuffle(left)
    chosen, seen = [], set[Any]()
    while left:
        case, new = max(left, key=lambda one: len(one[1] - seen))
        if new <= seen:
            break
        chosen.append(case)
        seen |= new
    return tuple(chosen)


def fullest(op: Op) -> Axes:
    """The bool axes, all on, so that the example gives every optional tensor, and short rows."""
    every = compiled(op)
    chosen = {axis: values[-1] for axis, values in every.items() if values == (False, True)}
    for (axis, size), short in _SHORT.items():
        if size in every.get(axis, ())[:1] and short in every[axis]:
            chosen[axis] = short
    return chosen | ({"hidden_size": _ROW} if takes_any_size(op) else {})


def takes_any_size(op: Op) -> bool:
    """Whether the op takes rows of any size."""
    return compiled(op).get("hidden_size") == COMPILED["hidden_size"]


def name(axes: Axes) -> str:
    """The combination as a test id."""
    return "-".join(f"{axis}={value}" for axis, value in axes.items())
