"""The tests that could notice a mutant, the most promising first."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

import kernels_cu
from pyops import tuning
from pyops._core.op.op import Op, registry
from pyops._core.system import device
from pyops._core.text import source
from pyops.example import ArgMaker
from pyops.tuning.engines import Choice
from tests.mutation import code, plans
from tests.mutation.mutant import Mutant, in_turn
from tests.support import axes

_EVERY_OP = (
    "tests/every_op/test_every_op.py",
    "tests/every_op/test_host.py",
    "tests/every_op/test_pipelines.py",
    "tests/every_op/test_tokens.py",
)
_REFUSALS = ("tests/every_op/test_refuses.py", "tests/every_op/test_limits.py")
_HEADERS = "tests/core/test_headers.py"
_SITUATIONS: tuple[tuple[device.Device, axes.Axes], ...] = (
    (device.model("sm_90"), {}),
    (device.model("sm_90"), {"num_tokens": 256}),
    (device.model("sm_90"), {"num_tokens": 4096}),
    (replace(device.model("sm_90"), num_sms=1), {}),  # the tiles of any matrix fill one SM
    (device.model("sm_80"), {"num_tokens": 256}),  # without WGMMA
    (device.model("gfx942"), {}),
    (device.model("sm_120"), {}),
)
_HEAD_START = 2  # rounds that tests of an op have before others of their file
_COMMON = {"each", "every", "from", "have", "other", "same", "test", "than", "that", "their", "they", "when", "with"}


@cache
def kernels_of(op: Op) -> frozenset[str]:
    """The files of the kernels that the op's example launches in any case and situation, whichever engine is chosen."""
    assert op.example is not None
    found: set[str] = set()
    for case, (on, more) in product(axes.combinations(op), _SITUATIONS):
        tuning.last_choice.pop(op.name, None)  # left by an earlier plan
        args = op.example(ArgMaker(on, op.name), **case, **more)
        launches = list(op.launches(*args))
        problem, choose = tuning.last_choice.get(op.name, (None, None))
        if isinstance(choose, Choice):
            for one in choose.of_engines(choose.shape_of(problem), on).values():
                with tuning.forced(op.name, one.config):
                    launches += op.launches(*args)
        found |= {one.specialisation.kernel.file for one in launches}
    return frozenset(found)


@cache
def sources_of(kernel: str, text: str | None = None) -> frozenset[str]:
    """A kernel's file and its includes; `text` is the text of a kernel that is in no file."""
    seen: set[str] = set()
    source.inline("include/number.cuh", seen)
    source.inline(kernel, seen, text)
    return frozenset(seen)


@cache
def _declared(file: str) -> list[tuple[str, frozenset[str]]]:
    """(name, words) of everything that a file declares."""
    found = code.tokens(kernels_cu.read(file))
    return [
        (one.name, frozenset(token.text for token in found[one.begin : one.end])) for one in code.declarations(found)
    ]


def kernels_with(file: str, name: str) -> set[str]:
    """The kernels that use the declaration `name` of a file, directly or through others."""
    including = {kernel for op in registry.values() for kernel in kernels_of(op) if file in sources_of(kernel)}
    if file in including or not name:
        return including
    using = set()
    for kernel in including:
        names, count = {name}, 0
        while count < len(names):
            count = len(names)
            for header in sources_of(kernel):
                names |= {own for own, words in _declared(header) if own and words & names}
        if any(own in names for own, _ in _declared(kernel)):
            using.add(kernel)
    return using or including


@cache
def ops_of(mutant: Mutant) -> frozenset[str]:
    """The names of the ops that could show the mutant."""
    if mutant.tests:
        return frozenset(registry)
    if mutant.is_plan:
        return plans.ops_of(mutant)
    kernels = kernels_with(mutant.file, mutant.within)
    return frozenset(name for name, op in registry.items() if kernels & kernels_of(op))


def _of_ranks(file: str) -> list[str]:
    """The kernels of several ranks, which no op launches, that include a file."""
    names = (name for name in kernels_cu.names() if name.startswith("collective/") and name.endswith(".cu"))
    return [name for name in names if file in sources_of(name)]


@cache
def _own_files(mutant: Mutant) -> frozenset[str]:
    """The tests that the mutant names, or those of the families and the header that it breaks."""
    if mutant.tests:
        return frozenset(mutant.tests)
    kernels = {kernel for name in ops_of(mutant) for kernel in kernels_of(registry[name])}
    kernels = kernels if mutant.is_plan else kernels & kernels_with(mutant.file, mutant.within)
    folders = {Path(kernel).parent.name for kernel in (*kernels, *_of_ranks(mutant.file))}
    own = {str(path) for folder in folders for path in Path("tests/ops", folder).glob("test_*.py")}
    return frozenset(own | ({_HEADERS} if mutant.file.startswith("include/") else set()))


def files_of(mutants: Iterable[Mutant]) -> list[str]:
    """The test files that could notice any of the mutants."""
    mutants = list(mutants)
    own = {file for mutant in mutants for file in _own_files(mutant)}
    every = [] if all(mutant.tests for mutant in mutants) else [*_EVERY_OP, *_REFUSALS]
    return [*every, *sorted(own)]


def items_of(mutant: Mutant, items: Sequence[pytest.Item], killers: Sequence[str]) -> list[pytest.Item]:
    """The tests that run the mutant's kernels, plan or function on the CPU.

    First come `killers`, the ids of tests that have killed other mutants of the file, the latest first; then tests with
    names that share words with the `why` of a semantic mutant, or with what its operator breaks; then those of headers
    and tests with code that names the declaration that the mutant changes; then the files that name an op. In these,
    test functions take turns, because the parameters of one are much alike; a function that names an op itself has a
    head start.
    """
    every = {*_EVERY_OP, *(_REFUSALS if mutant.is_plan else ())}
    files, turns = _own_files(mutant) | (set() if mutant.tests else every), defaultdict(list)
    for item in items:
        if str(item.path.relative_to(plans.ROOT)) in files:
            ops = _named(item) & registry.keys()
            if _runs_on_host(item, mutant) and (not ops or ops & ops_of(mutant)):
                turns[min(ops, default="")].append(item)
    family = turns.pop("", [])  # tests that name no op: every second one
    functions = defaultdict(list)
    for item in in_turn(family, in_turn(*turns.values())):
        functions[item.path, getattr(item, "originalname", item.name)].append(item)
    turn_of = {item.nodeid: turn for tests in functions.values() for turn, item in enumerate(tests)}
    latest = {name: i for i, name in enumerate(killers)}
    words, ops = _words(_hints(mutant)), ops_of(mutant)

    def names_an_op(item: pytest.Item) -> bool:
        named = _names_in_code(item)
        return bool((named | _named(item)) & ops or {f"{name}_out" for name in named} & ops)

    near = {item.path for tests in functions.values() for item in tests[:1] if names_an_op(item)}

    def rank(item: pytest.Item) -> tuple[float, ...]:
        is_of_declaration = mutant.within in _names_in_code(item) or item.path.name == Path(_HEADERS).name
        turn = turn_of[item.nodeid] + (0 if names_an_op(item) else _HEAD_START)
        return -latest.get(item.nodeid, -1), -_shared(item, words), not is_of_declaration, item.path not in near, turn

    return sorted(in_turn(*functions.values()), key=rank)


def _hints(mutant: Mutant) -> str:
    """Words in the names of tests that are likely to notice the mutant."""
    if mutant.is_plan:
        is_check = mutant.operator in ("check dropped", "condition", "comparison", "logic")
        return "refuse refuses refused refusal" if is_check else ""
    return {"barrier": "schedule", "exit": "hostile", "predicate": "hostile"}.get(mutant.operator, mutant.why)


def _values(item: pytest.Item) -> list[object]:
    callspec = getattr(item, "callspec", None)
    return list(callspec.params.values()) if callspec else []


def _named(item: pytest.Item) -> set[str]:
    return {str(getattr(value, "name", value)) for value in _values(item)}


def _runs_on_host(item: pytest.Item, mutant: Mutant) -> bool:
    """Tests without a device: on the host, or, where it is cheap, the reference. On "cpu" only a plan is noticed."""
    named = {type(value).__name__ for value in _values(item)} | _named(item)
    if "cuda" in named or item.get_closest_marker("gpu"):
        return False
    if mutant.tests:
        return True
    if str(item.path.relative_to(item.config.rootpath)) in _REFUSALS:
        return mutant.is_plan
    return "Host" in named or (item.path.name != "test_every_op.py" and "cpu" not in named)


def _names_in_code(item: pytest.Item) -> frozenset[str]:
    function = getattr(item, "function", None)
    return frozenset() if function is None else _names_in(inspect.unwrap(function))


@cache
def _names_in(test: Callable[..., None]) -> frozenset[str]:
    """Every name in the code of a test, and in the functions and texts of its module that the code names."""
    found: set[str] = set()
    waiting: list[str] = [inspect.getsource(test)]
    while waiting:
        names = set(re.findall(r"\w+", waiting.pop())) - found
        found |= names
        for value in (vars(inspect.getmodule(test)).get(name) for name in names):
            if isinstance(value, str):
                waiting.append(value)
            elif inspect.isfunction(value) and value.__code__.co_filename == test.__code__.co_filename:
                waiting.append(inspect.getsource(value))
    return frozenset(found)


def _shared(item: pytest.Item, words: set[str]) -> int:
    own = item.path.stem, getattr(item, "originalname", item.name), getattr(getattr(item, "obj", None), "__doc__", "")
    return len(words & _words(" ".join(map(str, own)))) if words else 0


def _words(text: str) -> set[str]:
    """The significant words, in the singular."""
    return {word.removesuffix("s") for word in re.findall("[a-z]{4,}", text.lower())} - _COMMON
