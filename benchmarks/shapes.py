"""The measured arguments of an op: its example at every combination of the swept axes."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from pyops import axes
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops._core.tensors.tensor import TensorArg
from pyops.example import ArgMaker, TorchMaker

SWEEP: dict[str, Sequence[Any]] = {
    "num_tokens": (1, 16, 256, 4096, 16384),
    "hidden_size": (4096, 14336),
    "vocab_size": (128256,),
    "dim": (8192,),
}
SMALL: dict[str, Sequence[Any]] = {"num_tokens": (16,), "hidden_size": (4096,), "vocab_size": (4096,)}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Case:
    """An op and the keywords of its example."""

    op: Op
    axes: dict[str, Any]

    def arguments(self, seed: int = 0, device: str = "cuda") -> tuple[Any, ...]:
        """The op's arguments with data generated from the seed. Outputs hold NaN."""
        assert self.op.example is not None
        return self.op.example(TorchMaker(device, seed), **self.axes)

    @cached_property
    def described(self) -> tuple[Any, ...]:
        """The op's arguments as descriptors without data."""
        assert self.op.example is not None
        return self.op.example(ArgMaker(device.model(), self.op.name), **self.axes)

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors of one set of arguments occupy."""
        return sum(arg.nbytes for arg in self.described if isinstance(arg, TensorArg))

    @property
    def traffic(self) -> int:
        """Bytes that one call must move."""
        if self.op.traffic is not None:
            return self.op.traffic(*self.described)
        weights = {"in": 1, "out": 1, "inout": 2}
        return sum(
            arg.nbytes * weights[p.role]
            for p, arg in zip(self.op.parameters, self.described, strict=True)
            if p.is_tensor and arg is not None
        )

    @property
    def family(self) -> str:
        """Name of the package that declares the op."""
        return family(self.op)

    @property
    def labels(self) -> dict[str, Any]:
        """The labels of the case in a row of results."""
        shape = {axis: value for axis, value in self.axes.items() if axis != "dtype"}
        return {"op": self.op.name, "family": self.family, "dtype": self.axes.get("dtype", ""), "shape": shape}

    def __str__(self) -> str:
        axes = " ".join(str(value) if axis == "dtype" else f"{axis}={value}" for axis, value in self.axes.items())
        return f"{self.op.name} {axes}"


def family(op: Op) -> str:
    """Name of the package of `pyops.registry` that declares `op`: norm, activation, ..."""
    return op.reference.__module__.removeprefix("pyops.ops.").partition(".")[0]


def parse(text: str) -> tuple[str, tuple[Any, ...]]:
    """``"hidden_size=4096,5120"`` to ``("hidden_size", (4096, 5120))``."""
    axis, _, values = text.partition("=")

    def value(word: str) -> Any:
        try:
            return ast.literal_eval(word)
        except (ValueError, SyntaxError):
            return word

    return axis, tuple(value(word) for word in values.split(","))


def cases(op: Op, chosen: Mapping[str, Sequence[Any]], sweep: Mapping[str, Sequence[Any]] = SWEEP) -> list[Case]:
    """The op at every combination of the `chosen` axes, and of the axes of `sweep` that are not chosen.

    Axes that the example lacks are dropped, and so are chosen words that it rules out, so the list may be empty. A
    swept value is dropped, too, if the example names others; without any, the axis keeps its default.
    """
    values = {}
    for name, axis in axes.of(op).items():
        if name in chosen:
            values[name] = [value for value in chosen[name] if axis.takes(value)]
        elif found := [value for value in sweep.get(name, ()) if not axis.choices or value in axis.choices]:
            values[name] = found
    return [Case(op, dict(zip(values, combination, strict=True))) for combination in product(*values.values())]


def needed(op: Op, chosen: Mapping[str, Sequence[Any]], sweep: Mapping[str, Sequence[Any]] = SWEEP) -> list[Case]:
    """`cases` of an op that a command line names. ValueError if there are none."""
    found = cases(op, chosen, sweep)
    if not found:
        raise ValueError(f"the example of {op.name} rules out one of {dict(chosen)}")
    return found
