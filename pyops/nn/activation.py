"""Activations as modules: gated ones, on the two halves of a row, and elementwise ones.

The input x is float32, float16 or bfloat16, [..., 2 * hidden_size] for gated activations and [..., hidden_size] for
others. The result is a new tensor [..., hidden_size] of the dtype of x. The formulas are those of the ops.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..ops.activation import (
    fatrelu_and_mul,
    gelu,
    gelu_and_mul,
    gelu_and_mul_sparse,
    gelu_fast,
    gelu_new,
    gelu_quick,
    gelu_tanh_and_mul,
    mul_and_silu,
    relu2,
    silu_and_mul,
    silu_and_mul_with_clamp,
    swigluoai_and_mul,
    swiglustep_and_mul,
    xielu,
)
from ..ops.activation.sparse import gelu_and_mul_above
from .base import OpLayer, rows
from .custom_op import CustomOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "GELU",
    "XIELU",
    "FastGELU",
    "FatreluAndMul",
    "GeluAndMul",
    "GeluAndMulSparse",
    "MulAndSilu",
    "NewGELU",
    "QuickGELU",
    "ReLUSquaredActivation",
    "SiluAndMul",
    "SiluAndMulWithClamp",
    "SwigluOAIAndMul",
    "SwigluStepAndMul",
]


class _Activation(OpLayer):
    gated = False

    def arguments(self, x: Tensor) -> tuple[Any, ...]:
        """The arguments of the op that follow its input."""
        return ()

    def compute(self, op: Callable[..., None], x: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2 if self.gated else x.shape[-1])
        op(out, rows(x), *self.arguments(x))
        return out


class _Gated(_Activation):
    gated = True


@CustomOp.register("silu_and_mul")
class SiluAndMul(_Gated, op=silu_and_mul):
    """SwiGLU: silu of the first half times the second half, see `pyops.silu_and_mul`.

    Args:
        compile_native: see `CustomOp`.

    Examples:
        >>> SiluAndMul()(torch.tensor([[1.0, -1.0, 2.0, 3.0]]))  # gates, then ups
        tensor([[ 1.4621, -0.8068]])
    """

    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__(compile_native=compile_native)


@CustomOp.register("mul_and_silu")
class MulAndSilu(_Gated, op=mul_and_silu):
    """The first half times silu of the second half, see `pyops.mul_and_silu`.

    Examples:
        >>> MulAndSilu()(torch.tensor([[2.0, 3.0, 1.0, -1.0]]))  # ups, then gates
        tensor([[ 1.4621, -0.8068]])
    """


@CustomOp.register("gelu_and_mul")
class GeluAndMul(_Gated, op=gelu_and_mul):
    """GEGLU: gelu of the first half times the second, see `pyops.gelu_and_mul` and `pyops.gelu_tanh_and_mul`.

    Args:
        approximate: "none" for the error function, "tanh" for the hyperbolic tangent.

    Examples:
        >>> GeluAndMul(approximate="tanh")(torch.tensor([[1.0, -1.0, 2.0, 3.0]]))  # gates, then ups
        tensor([[ 1.6824, -0.4764]])
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = _approximate(type(self).__name__, approximate)
        if approximate == "tanh":
            self._use(gelu_tanh_and_mul)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


@CustomOp.register("gelu_and_mul_sparse")
class GeluAndMulSparse(_Gated, op=gelu_and_mul_sparse):
    """GEGLU of the gates above a quantile of their row, see `pyops.gelu_and_mul_sparse`.

    Args:
        activation_sparsity: the fraction of a normally distributed row that becomes zero, above 0 and below 1.
        approximate: "none" or "tanh", as in `GeluAndMul`.

    Examples:
        >>> out = GeluAndMulSparse(0.95, approximate="tanh")(torch.randn(16, 2 * 1000))
        >>> f"{(out == 0.0).float().mean():.2f}"  # the share of zeros
        '0.95'
    """

    def __init__(self, activation_sparsity: float, approximate: str = "none") -> None:
        super().__init__()
        if not 0.0 < activation_sparsity < 1.0:
            raise ValueError(
                f"GeluAndMulSparse: activation_sparsity: expected above 0 and below 1, got {activation_sparsity}"
            )
        self.activation_sparsity = activation_sparsity
        self.approximate = _approximate("GeluAndMulSparse", approximate)
        # Computed once here, because torch.compile cannot trace `statistics`.
        self._multiplier = NormalDist().inv_cdf(activation_sparsity)

    def arguments(self, x: Tensor) -> tuple[Any, ...]:
        return self.activation_sparsity, self.approximate

    def forward_native(self, x: Tensor) -> Tensor:
        def above(out: Tensor, x: Tensor, activation_sparsity: float, approximate: str) -> None:
            gelu_and_mul_above(out, x, self._multiplier, approximate)

        return self.compute(above, x)


@CustomOp.register("fatrelu_and_mul")
class FatreluAndMul(_Gated, op=fatrelu_and_mul):
    """The first half where it exceeds a threshold, else 0, times the second, see `pyops.fatrelu_and_mul`.

    Args:
        threshold: a gate must exceed it to pass.

    Examples:
        >>> FatreluAndMul(threshold=0.5)(torch.tensor([[0.2, 0.8, 3.0, 4.0]]))  # gates, then ups
        tensor([[0.0000, 3.2000]])
    """

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__()
        self.threshold = threshold

    def arguments(self, x: Tensor) -> tuple[Any, ...]:
        return (self.threshold,)


@CustomOp.register("swigluoai_and_mul")
class SwigluOAIAndMul(_Gated, op=swigluoai_and_mul):
    """Clamped SwiGLU of interleaved gate and up elements, see `pyops.swigluoai_and_mul`.

    Args:
        alpha: slope of the sigmoid.
        limit: largest gate and largest magnitude of the other factor.

    Examples:
        >>> SwigluOAIAndMul()(torch.tensor([[1.0, 2.0, 9.0, -9.0]]))  # gate, up, gate, up
        tensor([[  2.5374, -41.9997]])
    """

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def arguments(self, x: Tensor) -> tuple[Any, ...]:
        return self.alpha, self.limit


@CustomOp.register("silu_and_mul_with_clamp")
class SiluAndMulWithClamp(_Gated, op=silu_and_mul_with_clamp):
    """SwiGLU of clamped halves, see `pyops.silu_and_mul_with_clamp`.

    Args:
        swiglu_limit: upper bound of the gate, and of the magnitude of the up projection.
        compile_native: see `CustomOp`.

    Examples:
        >>> SiluAndMulWithClamp(swiglu_limit=7.0)(torch.tensor([[1.0, 9.0, 2.0, -9.0]]))  # gates, then ups
        tensor([[  1.4621, -48.9554]])
    """

    def __init__(self, swiglu_limit: float, *, compile_native: bool = True) -> None:
        super().__init__(compile_native=compile_native)
        self.swiglu_limit = float(swiglu_limit)

    def arguments(self, x: Tensor) -> tuple[Any, ...]:
        return (self.swiglu_limit,)


@CustomOp.register("swiglustep_and_mul")
class SwigluStepAndMul(_Gated, op=swiglustep_and_mul):
    """SwiGLU with both factors clamped, see `pyops.swiglustep_and_mul`.

    Args:
        limit: upper bound of the activated gate, and of the magnitude of the up projection.

    Examples:
        >>> SwigluStepAndMul(limit=7.0)(torch.tensor([[1.0, 9.0, 2.0, -9.0]]))  # gates, then ups
        tensor([[  1.4621, -49.0000]])
    """

    def __init__(self, limit: float = 7.0) -> None:
        super().__init__()
        if limit is None:
            raise ValueError("SwigluStepAndMul: limit: expected a number, got None")
        self.limit = limit

    def arguments(self, x: Tensor) -> tuple[Any, ...]:
        return (self.limit,)


@CustomOp.register("gelu")
class GELU(_Activation, op=gelu):
    """GELU by the error function, see `pyops.gelu`.

    Examples:
        >>> x = torch.randn(5, 64)
        >>> torch.testing.assert_close(GELU()(x), torch.nn.GELU()(x))
    """

    def __init__(self) -> None:
        super().__init__()


@CustomOp.register("gelu_new")
class NewGELU(_Activation, op=gelu_new):
    """GELU by the hyperbolic tangent as GPT-2 writes it, see `pyops.gelu_new`.

    Examples:
        >>> x = torch.randn(5, 64)
        >>> torch.testing.assert_close(NewGELU()(x), torch.nn.GELU(approximate="tanh")(x))
    """


@CustomOp.register("gelu_fast")
class FastGELU(_Activation, op=gelu_fast):
    """GELU by the hyperbolic tangent with the cube factored out, see `pyops.gelu_fast`.

    Examples:
        >>> x = torch.randn(5, 64)
        >>> torch.testing.assert_close(FastGELU()(x), torch.nn.GELU(approximate="tanh")(x))
    """


@CustomOp.register("quick_gelu")
class QuickGELU(_Activation, op=gelu_quick):
    """GELU by the logistic function, see `pyops.gelu_quick`.

    Examples:
        >>> x = torch.randn(5, 64)
        >>> torch.testing.assert_close(QuickGELU()(x), x * torch.sigmoid(1.702 * x))
    """


@CustomOp.register("relu2")
class ReLUSquaredActivation(_Activation, op=relu2):
    """Squared ReLU, see `pyops.relu2`.

    Examples:
        >>> ReLUSquaredActivation()(torch.tensor([-1.0, 2.0, 3.0]))
        tensor([0., 4., 9.])
    """


@CustomOp.register("xielu")
class XIELU(_Activation, op=xielu):
    """xIELU with learned strengths, see `pyops.xielu`.

    Args:
        alpha_p_init, alpha_n_init: initial strengths of the positive and of the negative side. They initialise the
            parameters `alpha_p` and `alpha_n`, [1] each: ``softplus(alpha_p)`` and ``beta + softplus(alpha_n)``.
        beta: slope at zero; eps: where the exponential side starts. Both are buffers, so a checkpoint may set them.
        dtype: dtype of the parameters. A call rounds them to the dtype of its input.
        with_vector_loads: accepted because vLLM has it; accesses are always as wide as alignment allows.

    Examples:
        >>> act = XIELU(dtype=torch.float32).requires_grad_(False)  # its parameters come from a checkpoint
        >>> act(torch.tensor([-1.0, 0.0, 1.0])).shape
        torch.Size([3])
    """

    def __init__(
        self,
        alpha_p_init: float = 0.8,
        alpha_n_init: float = 0.8,
        beta: float = 0.5,
        eps: float = -1e-6,
        dtype: torch.dtype = torch.bfloat16,
        with_vector_loads: bool = False,
    ) -> None:
        super().__init__()
        if alpha_p_init <= 0 or alpha_n_init <= beta:
            raise ValueError(
                f"XIELU: expected alpha_p_init above 0 and alpha_n_init above beta={beta}, "
                f"got {alpha_p_init} and {alpha_n_init}"
            )
        for name, strength in (("alpha_p", alpha_p_init), ("alpha_n", alpha_n_init - beta)):
            alpha = torch.tensor([strength], dtype=torch.float64).expm1().log()  # the inverse of softplus
            self.register_parameter(name, nn.Parameter(alpha.to(dtype)))
        self.register_buffer("beta", torch.tensor(beta, dtype=dtype))
        self.register_buffer("eps", torch.tensor(eps, dtype=dtype))
        self.with_vector_loads = with_vector_loads
        # The op takes Python numbers; reading the buffers at every call would synchronise with the device.
        self._numbers = beta, eps
        self.register_load_state_dict_post_hook(lambda module, _: module._read_numbers())

    def _read_numbers(self) -> None:
        self._numbers = float(self.beta), float(self.eps)

    def arguments(self, x: Tensor) -> tuple[Any, ...]:
        return self.alpha_p.to(x.dtype), self.alpha_n.to(x.dtype), *self._numbers


def _approximate(layer: str, approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise ValueError(f'{layer}: approximate: expected "none" or "tanh", got {approximate!r}')
    return approximate
