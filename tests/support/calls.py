"""Helpers for tests of every op: devices, example arguments, calls that may be refused, other array libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import pyops
from pyops._core.op.op import Op
from pyops.example import TorchMaker
from pyops.host.toolchain import toolchains
from pyops.testing import Layout, same_bits
from pyops.testing.calls import clones, named, replaced, run


class Host(str):
    """The device "cpu", with tensors that run kernels on the host backend."""


# Every op on CPU tensors, and on GPU tensors where there is a device. With plain "cpu" the wrapper runs the reference,
# so these tests check references and dispatch as well.
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
HOST = pytest.param(Host("cpu"), id="host", marks=pytest.mark.skipif(not toolchains(), reason="no C++ compiler"))
KERNELS = [HOST, CUDA]
DEVICES = ["cpu", *KERNELS]

# States that grow with every token: infinity times zero occurs earlier in one order than in another.
OF_GROWING_STATES = {"gated_delta_rule", "gated_delta_rule_update", "kda", "kda_update", "mamba_chunk_scan_varlen"}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def example(op: Op, device: str = "cpu", seed: int = 0, **axes: Any) -> list[Any]:
    """The op's example arguments with data."""
    assert op.example is not None
    return list(op.example(TorchMaker(device, seed), **axes))


# {parameter of a form alone: its value, from the outputs of an example}
_FROM_OUTPUTS: dict[str, Callable[[dict[str, Any]], int]] = {
    "topk": lambda outputs: outputs["topk_ids"].shape[-1],
    "max_spec_len": lambda outputs: outputs["output_token_ids"].shape[-1] - 1,
}


def inputs_of_form(op: Op, args: Sequence[Any]) -> dict[str, Any]:
    """The arguments of the op's form that allocates outputs, by name and in order, from those of the op."""
    assert op.form is not None
    values = dict(zip((p.name for p in op.parameters), args, strict=True))
    given = [p for p in op.form.declaration.parameters if not p.returned]
    values |= {p.name: _FROM_OUTPUTS[p.name](values) for p in given if p.name in _FROM_OUTPUTS.keys() - values}
    return {p.name: values.get(p.name, p.default) for p in given}


def run_accepted(op: Op, args: Sequence[Any], layouts: dict[str, Layout]) -> dict[str, torch.Tensor]:
    """The results of a call with these layouts. An op may refuse gaps between rows, by name; it may not refuse an
    offset.
    """
    while True:
        try:
            return run(op, args, layouts)
        except pyops.OpError as refusal:
            layout = layouts.get(refusal.argument)
            if layout is None or not layout.gap:
                raise
            layouts = layouts | {refusal.argument: layout._replace(gap=0)}


def run_in_place(op: Op, args: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The results of in-place calls, one for each pair of output and input that may be the same tensor."""
    results = {}
    for output, source in op.declaration.in_place.items():
        results[output] = named(op, args)[source].clone()
        op(*replaced(op, clones(args), **{output: results[output], source: results[output]}))
    return results


def assert_refused(op: Op, error: pyops.OpError, before: Sequence[Any], args: Sequence[Any]) -> None:
    """The error of a call names an argument of the op, and the call wrote no byte of any argument."""
    assert error.op == op.name
    assert error.argument in {p.name for p in op.parameters}
    assert str(error) == f"{op.name}: {error.argument}: {error.message}"
    for copy, value in zip(before, args, strict=True):
        if isinstance(value, torch.Tensor):
            assert same_bits(value, copy), f"{op.name}: an argument was written before the call was refused"


def refusal(op: Op, args: Sequence[Any], call: Callable[..., None] | None = None) -> pyops.OpError:
    """The OpError that the call raises; see `assert_refused`."""
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    with pytest.raises(pyops.OpError) as caught:
        (call or op)(*args)
    assert_refused(op, caught.value, before, args)
    return caught.value


def as_numpy(value: Any) -> Any:
    """A numpy array over the memory of a host tensor; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.view(_WORDS[value.element_size()]).numpy().view(_element_type(value))


def as_cupy(value: Any) -> Any:
    """A cupy array over the memory of a device tensor; anything else as it is."""
    import cupy

    if not isinstance(value, torch.Tensor):
        return value
    return cupy.from_dlpack(value.view(_WORDS[value.element_size()])).view(_element_type(value))


def _element_type(value: torch.Tensor) -> Any:
    import ml_dtypes
    import numpy

    name = str(value.dtype).removeprefix("torch.")
    return numpy.dtype(getattr(ml_dtypes, name, None) or name)
