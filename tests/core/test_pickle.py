"""Errors and ops can be pickled, for other processes and for files."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pyops
from pyops._core.errors import SwitchError

PLACES = [("kernels_cu/a.cu", 3), ("kernels_cu/b.cuh", 5)]
ERRORS = [
    pyops.OpError("rms_norm", "out", "is no good"),
    pyops.MissingDependencyError("this call", "torch", "torch"),
    pyops.ModelError(Path("folder"), "is missing"),
    pyops.CompileError("norm/rms_norm.cu", "VEC_SIZE=8", "error: no"),
    pyops.CaptureError("rms_norm", "load norm/rms_norm.cu"),
    pyops.NotLoadedError("rms_norm", "norm/rms_norm.cu", "VEC_SIZE=8"),
    pyops.UnsupportedGpuError(0, "Tesla V100", "sm_70"),
    pyops.DeviceFault("rms_norm: the device reported an error"),
    pyops.KernelFault("trap", "a.cu", "X=1", "stopped", PLACES, (1, 2, 3), (4, 5, 6)),
    pyops.KernelFault("trap", "a.cu", "X=1", "stopped", [], (1, 2, 3), None),
    pyops.RankError("ranks wait for 1", (1,)),
    SwitchError("PYOPS_CPU: no"),
]
TWICE: list[Callable[[Any], Any]] = [lambda value: pickle.loads(pickle.dumps(value)), copy.copy, copy.deepcopy]


@pytest.mark.parametrize("twice", TWICE, ids=["pickle", "copy", "deepcopy"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors(error: Exception, twice: Callable[[Any], Any]) -> None:
    found = twice(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


def test_every_error_is_tried() -> None:
    public = {value for value in vars(pyops).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert public <= {type(error) for error in ERRORS}


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.slow
def test_error_comes_back_from_another_process() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for error in ERRORS:
            with pytest.raises(type(error)) as caught:
                pool.apply_async(_raise, (error,)).get(timeout=60)
            assert str(caught.value) == str(error)


@pytest.mark.parametrize("name", pyops.registry)
def test_ops(name: str) -> None:
    op = getattr(pyops, name)
    assert op.__name__ == op.__qualname__ == name
    for twice in TWICE:
        assert twice(op) is op
        assert twice(op.op) is op.op


class Holds(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.op, self.reference = pyops.rms_norm, pyops.registry["rms_norm"]


def test_module_that_holds_an_op_is_saved() -> None:
    file = io.BytesIO()
    torch.save(Holds(), file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    assert found.op is pyops.rms_norm
    assert found.reference is pyops.registry["rms_norm"]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_layers(approximate: str) -> None:
    layer = pyops.nn.GeluAndMul(approximate)
    x = torch.randn(3, 8)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
