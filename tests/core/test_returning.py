"""Ops that allocate and return their outputs: every library, `out=`, torch's schemas, fakes and torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pyops
from pyops._core import check
from pyops._core.kernel import Kernel, Launch
from pyops._core.planner import Result
from pyops._core.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

TEXT = """
// doubled[i] = 2 * x[i]; half[i] = x[i] / 2
#include "number.cuh"
extern "C" __global__ void halves(float* doubled, half_t* half, const float* x, int64_t size) {
    const int64_t i = int64_t(blockIdx.x) * 64 + threadIdx.x;
    if (i < size) { doubled[i] = 2 * x[i]; half[i] = half_t(x[i] / 2); }
}
"""


@pytest.fixture
def halves() -> Any:
    @pyops.op(returns=("doubled", "half"), ulps=0)
    def halves(x: Tensor, times: int = 1, *, doubled: Tensor, half: Tensor) -> None:
        doubled.copy_(x * 2)
        half.copy_(x / 2)

    @halves.result
    def result_halves(x: Any) -> tuple[Result, Result]:
        return Result(x.shape), Result(x.shape, "float16")

    @halves.plan
    def plan_halves(x: TensorArg, doubled: TensorArg, half: TensorArg) -> Launch:
        check.same_shape(doubled, x)
        check.same_shape(half, x)
        kernel = Kernel("test/halves.cu", text=TEXT)
        return kernel().launch(grid=-(-x.numel // 64), block=64, size=x.numel)

    return halves


@pytest.mark.parametrize("mode", ["reference", "kernels"])
def test_new_outputs_and_given_ones(halves: Any, mode: str) -> None:
    from pyops._core import config

    x = torch.randn(3, 50)
    with config.cpu(mode):
        doubled, half = halves(x)
        assert torch.equal(doubled, x * 2)
        assert half.dtype == torch.float16
        assert torch.equal(half, (x / 2).half())
        given = torch.empty(3, 50)
        results = halves(x, doubled=given)
        assert results[0] is given
        assert torch.equal(given, x * 2)
        array = numpy.arange(6, dtype=numpy.float32)
        doubled, half = halves(array)
        assert isinstance(doubled, numpy.ndarray)
        assert (doubled == array * 2).all()
        assert half.dtype == numpy.float16


def test_signature_and_schemas(halves: Any) -> None:
    import inspect

    halves(torch.ones(2))
    assert str(inspect.signature(halves)) == (
        "(x: 'Tensor', times: 'int' = 1, *, doubled: 'Tensor | None' = None, half: 'Tensor | None' = None)"
        " -> 'tuple[Tensor, Tensor]'"
    )
    packet = torch.ops.pyops.halves
    assert str(packet.default._schema) == "pyops::halves(Tensor x, SymInt times=1) -> (Tensor, Tensor)"
    assert str(packet.out._schema) == (
        "pyops::halves.out(Tensor x, SymInt times=1, *, Tensor(a2!) doubled, Tensor(a3!) half) -> ()"
    )


def test_fakes_and_compile(halves: Any) -> None:
    x = torch.randn(7, 5)
    halves(x)
    with FakeTensorMode() as mode:
        for function in (halves, torch.ops.pyops.halves):
            doubled, half = function(mode.from_tensor(x))
            assert (doubled.shape, half.dtype) == (x.shape, torch.float16)
    compiled = torch.compile(lambda x: halves(x), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (7, 9):
        x = torch.randn(rows, 5)
        doubled, half = compiled(x)
        assert torch.equal(doubled, x * 2)
        assert torch.equal(half, (x / 2).half())
    torch.library.opcheck(torch.ops.pyops.halves.default, (x,))


def test_mistakes_are_named(halves: Any) -> None:
    with pytest.raises(pyops.OpError, match=r"^halves: x: expected a torch tensor or a cupy array, got list$"):
        halves([1.0])
    with pytest.raises(pyops.OpError, match=r"^halves: doubled: expected shape \(4,\) like x, got \(3,\)$"):
        halves(torch.ones(4), doubled=torch.empty(3))


def test_returned_outputs_stand_last() -> None:
    def returned_first(*, out: Tensor, x: Tensor) -> None: ...

    with pytest.raises(TypeError, match=r"returned_first: \['out'\] are returned: expected them last"):
        pyops.op(returns="out")(returned_first)

    def returned_by_position(x: Tensor, out: Tensor) -> None: ...

    with pytest.raises(TypeError, match="returned_by_position: out is returned: expected it behind a"):
        pyops.op(returns="out")(returned_by_position)


def test_what_requires_grad_is_refused(halves: Any) -> None:
    x = torch.randn(2, 8, requires_grad=True)
    calls = (halves, lambda x: torch.ops.pyops.halves(x), lambda x: halves(x.to("meta")))
    for call in calls:
        with pytest.raises(pyops.OpError, match=r"halves: x: requires grad, .* torch.no_grad\(\)"):
            call(x)
        with torch.no_grad():
            call(x)


def test_tensors_without_data_are_checked() -> None:
    x, perm = torch.empty(4, 64, device="meta"), torch.arange(64, dtype=torch.int32, device="meta")
    assert pyops.permute_cols(x, perm).shape == torch.ops.pyops.permute_cols(x, perm).shape == (4, 64)
    for call in (pyops.permute_cols, torch.ops.pyops.permute_cols):
        with pytest.raises(pyops.OpError, match=r"^permute_cols: perm: expected shape \(hidden_size=64,\), got \(5,\)"):
            call(x, perm[:5])
        with pytest.raises(pyops.OpError, match=r"^permute_cols: out: expected shape"):
            call(x, perm, out=x[:2])
