"""Ops and autograd: tensors that require grad are refused, and written tensors get a new version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyops
from benchmarks.fake_driver import fake_driver
from pyops._core import config
from pyops.nn import RMSNorm

REFUSED = r"rms_norm: {}: requires grad, but the op has no derivative: call it under torch.no_grad\(\)"


def norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None = None) -> None:
    pyops.rms_norm(out, x, weight, 1e-6)


def by_torch_ops(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None = None) -> None:
    torch.ops.pyops.rms_norm(out, x, weight, 1e-6)


@pytest.mark.parametrize("call", [norm, by_torch_ops])
@pytest.mark.parametrize("name", ["out", "input", "weight"])
def test_tensors_that_require_grad_are_refused(call: Callable[..., None], name: str) -> None:
    tensors = {"out": torch.zeros(2, 8), "input": torch.randn(2, 8), "weight": torch.ones(8)}
    tensors[name].requires_grad_()
    with torch.no_grad():
        call(*tensors.values())  # this plan must not serve the next call
    tensors["out"].detach().zero_()
    for _ in range(3):
        with pytest.raises(pyops.OpError, match=REFUSED.format(name)):
            call(*tensors.values())
    assert not tensors["out"].any()
    with torch.no_grad():
        call(*tensors.values())
    assert tensors["out"].all()


def test_guarded_plan_refuses_tensors_that_require_grad() -> None:
    out, x = torch.zeros(2, 8), torch.randn(2, 8, requires_grad=True)
    with fake_driver():
        for _ in range(3):
            with torch.no_grad():
                norm(out, x)
        assert pyops.registry["rms_norm"].recent[0].bound is not None
        with pytest.raises(pyops.OpError, match=REFUSED.format("input")):
            norm(out, x)
        with torch.no_grad():
            norm(out, x)
        norm(out, x.detach())


def test_compiled_call_refuses_tensors_that_require_grad() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    out, x = torch.zeros(2, 8), torch.randn(2, 8, requires_grad=True)
    with pytest.raises(Exception, match=r"'rms_norm', 'input', 'requires grad, .* torch.no_grad\(\)'"):
        compiled(out, x)
    with torch.no_grad():
        compiled(out, x)
    assert out.all()


@pytest.mark.parametrize("mode", ["reference", "kernels"])
@pytest.mark.parametrize("call", [norm, by_torch_ops])
def test_autograd_notices_written_tensors(call: Callable[..., None], mode: str) -> None:
    x = torch.randn(2, 8, requires_grad=True)
    y = x.exp()
    with torch.no_grad(), config.cpu(mode):
        call(y, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def versions(*tensors: torch.Tensor) -> list[int]:
    return [tensor._version for tensor in tensors]


@pytest.mark.parametrize("check_indices", ["", "1"])
def test_every_call_on_a_device_bumps_the_version(check_indices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_CHECK", check_indices)
    out, scale, x = torch.empty(2, 8, dtype=torch.float8_e4m3fn), torch.ones(2, 1), torch.randn(2, 8)
    with fake_driver():
        for count in range(1, 5):
            pyops.dynamic_per_token_scaled_fp8_quant(out, x, scale, None)
            assert versions(out, scale, x) == [count, count, 0]
        with torch.inference_mode():  # the tensors have versions in this mode, too
            for count in range(5, 9):
                pyops.dynamic_per_token_scaled_fp8_quant(out, x, scale, None)
                assert versions(out, scale, x) == [count, count, 0]


def test_written_optional_tensor_bumps_its_version() -> None:
    x, residual = torch.randn(2, 8), torch.randn(2, 8)
    with fake_driver():
        for count in range(1, 5):
            pyops.rms_norm_dynamic_per_token_quant(
                torch.empty(2, 8, dtype=torch.int8), x, torch.ones(8), torch.empty(2, 1), 1e-6, None, residual
            )
            assert versions(x, residual) == [0, count]
            pyops.rms_norm_dynamic_per_token_quant(
                torch.empty(2, 8, dtype=torch.int8), x, torch.ones(8), torch.empty(2, 1), 1e-6, None, None
            )


def test_tensors_of_inference_mode_have_no_versions() -> None:
    with fake_driver():
        with torch.inference_mode():
            out, x = torch.zeros(2, 8), torch.randn(2, 8)
            for _ in range(4):
                norm(out, x)
            assert not pyops.registry["rms_norm"].recent[0].versioned
        for _ in range(2):
            norm(out, x)
            norm(out[:1], x[:1])
        kept = torch.zeros(2, 8)
        for count in range(1, 5):
            norm(kept, x.clone())
            assert versions(kept) == [count]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
@pytest.mark.parametrize("compiled", [False, True])
def test_trained_layers_take_their_native_path(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with pyops.nn.set_custom_ops("all", platform="cuda"):
        layer, native = RMSNorm(8), RMSNorm(8)
    native._forward_method = native.forward_native
    x = torch.randn(2, 8)
    torch._dynamo.reset()

    def gradients(layer: Any, x: torch.Tensor, requires_grad: bool) -> list[Any]:
        x = x.clone().requires_grad_(requires_grad)
        y = x * 3
        call = torch.compile(layer, backend="aot_eager") if compiled else layer
        (call(y) + y).square().sum().backward()
        return [x.grad, layer.weight.grad]

    for requires_grad in (True, False):  # the weight alone
        for found, expected in zip(
            gradients(layer, x, requires_grad), gradients(native, x, requires_grad), strict=True
        ):
            assert (found is None) == (expected is None)
            assert found is None or torch.equal(found, expected)


def test_layers_without_gradients_take_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pyops.nn.set_custom_ops("all", platform="cuda"):
        layer = RMSNorm(8)
    monkeypatch.setattr(layer, "forward_native", None)
    x = torch.randn(2, 8)
    with torch.no_grad():
        layer(x)
    layer.requires_grad_(False)
    layer(x)


def test_layer_may_be_differentiable_itself() -> None:
    class Doubled(pyops.nn.CustomOp):
        differentiable = True

        def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    with pyops.nn.set_custom_ops("all", platform="cuda"), pytest.warns(UserWarning, match="not registered"):
        layer = Doubled()
    assert layer(torch.ones(1, requires_grad=True)).requires_grad
