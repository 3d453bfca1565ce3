"""Objects of any library with `__dlpack__` as arguments: the same memory, without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import pyops
from pyops._core import config


class Foreign:
    """An array of a library that pyops does not know."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __dlpack__(self, **options: Any) -> Any:
        return self.owner.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.owner.__dlpack_device__()


class Refusing(Foreign):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("not now")


X, WEIGHT = torch.randn(5, 64), torch.rand(64)
EXACT = torch.nn.functional.rms_norm(X.double(), (64,), WEIGHT.double(), 1e-6).float()


@pytest.fixture(autouse=True, params=["reference", "kernels"])
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with config.cpu(request.param):
        pyops.rms_norm.op.forget()
        yield
        pyops.rms_norm.op.forget()


@pytest.mark.parametrize("foreign", [(0,), (1,), (2,), (0, 1, 2)])
def test_foreign_arrays_stand_for_tensors(foreign: tuple[int, ...]) -> None:
    """Also after calls with torch tensors, which make a plan and its guard."""
    out = torch.empty_like(X)
    for calls in range(3):
        plain = [out, X, WEIGHT]
        for args in (plain, [Foreign(one) if i in foreign else one for i, one in enumerate(plain)]):
            out.fill_(torch.nan)
            pyops.rms_norm(*args, 1e-6)
            torch.testing.assert_close(out, EXACT, msg=f"call {calls}")


def test_new_outputs_are_of_torch() -> None:
    for x, weight in ((Foreign(X), WEIGHT), (X, Foreign(WEIGHT)), (Foreign(X), Foreign(WEIGHT))):
        found = pyops.rms_norm.new(x, weight, 1e-6)
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found, EXACT)


def test_a_foreign_array_goes_with_numpy() -> None:
    out = np.empty((5, 64), "float32")
    pyops.rms_norm(out, Foreign(X), WEIGHT.numpy(), 1e-6)
    torch.testing.assert_close(torch.from_numpy(out), EXACT)


def test_a_foreign_array_that_cannot_be_taken_is_an_error() -> None:
    out = torch.empty_like(X)
    with pytest.raises(pyops.OpError, match="input: torch takes no Refusing by DLPack: not now"):
        pyops.rms_norm(out, Refusing(X), WEIGHT, 1e-6)
    with pytest.raises(pyops.OpError, match="weight: expected shape"):
        pyops.rms_norm(out, X, Foreign(torch.rand(63)), 1e-6)
    with pytest.raises(pyops.OpError, match="input: expected a torch tensor or a cupy array, got list"):
        pyops.rms_norm(out, [1.0], WEIGHT, 1e-6)
