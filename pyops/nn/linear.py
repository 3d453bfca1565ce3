"""Linear layers, whole or divided among ranks.

Parameters are `weight` [output_size, input_size] and `bias` [output_size], or this rank's shard of them. Each
parameter has a `weight_loader`, which takes the whole tensor of a checkpoint and copies this rank's shard. A layer
takes [..., input_size] and returns (output, bias). The bias is None unless `skip_bias_add` leaves it to the caller to
add. With `return_bias` False, a layer returns the output alone.

Arguments of all layers:
    bias: whether the layer has a bias.
    skip_bias_add: return the bias instead of adding it.
    params_dtype: dtype of the parameters; None for torch's default.
    quant_config: None; weights are not quantised here.
    prefix: the name of the layer in its model.
    return_bias: whether to return (output, bias).
    disable_tp: whether every rank has all weights of this layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear

from ..ops.linear import dsv3_router_gemm
from .custom_op import PluggableLayer
from .parallel import (
    divide,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = [
    "ColumnParallelLinear",
    "GateLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
]

_MAX_FEW_TOKENS = 16  # largest M for which `dsv3_router_gemm` reads the weight once


def new_parameter(shape: Sequence[int], dtype: torch.dtype | None, loader: Callable[..., None]) -> nn.Parameter:
    """An uninitialised parameter that `loader` fills."""
    parameter = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
    parameter.weight_loader = loader
    return parameter


def refuse_quant_config(layer: nn.Module, quant_config: Any) -> None:
    """Raise a ValueError for a quant_config, because these layers do not quantise weights."""
    if quant_config is not None:
        raise ValueError(f"{type(layer).__name__}: quant_config: expected None, got {quant_config!r}")


def copy_weight(layer: nn.Module, place: Tensor, loaded: Tensor, dim: int = 0, first: int = 0, whole: int = 0) -> None:
    """Copy a loaded tensor to `place`: all of it, or the slice from `first` on along `dim`, which has size `whole`.

    Raises:
        ValueError: the loaded tensor, or its slice, does not have the shape of `place`.
    """
    part = loaded
    if whole and loaded.ndim > dim and loaded.shape[dim] == whole:
        part = loaded.narrow(dim, first, place.shape[dim])
    if part.shape != place.shape or (whole and part is loaded):
        raise ValueError(
            f"{type(layer).__name__}: weight_loader: expected {f'{whole} along dimension {dim}' if whole else 'all'} "
            f"for a place of shape {tuple(place.shape)}, got shape {tuple(loaded.shape)}"
        )
    with torch.no_grad():
        place.copy_(part)


def ranks(disable_tp: bool) -> int:
    """The number of ranks among which the weights of a layer are divided."""
    return 1 if disable_tp else get_tensor_model_parallel_world_size()


class _Linear(PluggableLayer):
    """The base of linear layers. `own` is (output_size, input_size) of this rank's weight."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        own: tuple[int, int],
        bias: bool,
        skip_bias_add: bool,
        params_dtype: torch.dtype | None,
        quant_config: Any,
        prefix: str,
        return_bias: bool,
        disable_tp: bool,
    ) -> None:
        super().__init__()
        refuse_quant_config(self, quant_config)
        self.input_size, self.output_size, self.skip_bias_add = input_size, output_size, skip_bias_add
        self.output_size_per_partition, self.input_size_per_partition = own
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.quant_config, self.prefix, self.return_bias = quant_config, prefix, return_bias
        self.disable_tp, self.tp_size = disable_tp, ranks(disable_tp)
        self.tp_rank = 0 if disable_tp else get_tensor_model_parallel_rank()
        self.weight = new_parameter(own, self.params_dtype, self.weight_loader)
        self.register_parameter("bias", new_parameter(own[:1], self.params_dtype, self.weight_loader) if bias else None)

    def weight_loader(self, param: Tensor, loaded_weight: Tensor) -> None:
        """Copy this rank's shard of a weight or a bias into `param`."""
        copy_weight(self, param, loaded_weight)

    def _result(self, output: Tensor) -> Any:
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        return f"input_size={self.input_size}, output_size={self.output_size}, tp_size={self.tp_size}"


@PluggableLayer.register("replicated_linear")
class ReplicatedLinear(_Linear):
    """``y = x W^T + b``, the same on every rank.

    Args:
        input_size, output_size: columns and rows of the weight.
        others: see the module.

    Examples:
        >>> layer = ReplicatedLinear(64, 32, bias=False, return_bias=False)
        >>> layer.load_state_dict(torch.nn.Linear(64, 32, bias=False).state_dict())
        <All keys matched successfully>
        >>> layer(torch.randn(5, 64)).shape
        torch.Size([5, 32])
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            (output_size, input_size),
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias,
            disable_tp=True,
        )

    def forward(self, x: Tensor) -> Any:
        return self._result(linear(x, self.weight, None if self.skip_bias_add else self.bias))


@PluggableLayer.register("column_parallel_linear")
class ColumnParallelLinear(_Linear):
    """``y_i = x W_i^T + b_i``: each rank has a slice of the weight's rows and computes this slice of the output.

    Args:
        input_size, output_size: columns and rows of the whole weight.
        gather_output: whether the outputs are all-gathered.
        others: see the module.

    Examples:
        >>> up = ColumnParallelLinear(64, 256, bias=False)
        >>> up.weight.weight_loader(up.weight, torch.randn(256, 64))  # the whole tensor of a checkpoint
        >>> output, bias = up(torch.randn(5, 64))
        >>> output.shape, bias
        (torch.Size([5, 256]), None)
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        sizes = self._merged_sizes(output_size)
        parts = [divide(type(self).__name__, "output_size", size, ranks(disable_tp)) for size in sizes]
        super().__init__(
            input_size,
            output_size,
            (sum(parts), input_size),
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias,
            disable_tp,
        )
        self.gather_output, self.output_partition_sizes = gather_output, parts

    def _merged_sizes(self, output_size: int) -> list[int]:
        """The rows of each stacked matrix; each matrix is divided among the ranks."""
        return [output_size]

    def weight_loader(self, param: Tensor, loaded_weight: Tensor) -> None:
        copy_weight(self, param, loaded_weight, 0, self.tp_rank * param.shape[0], self.output_size)

    def forward(self, input_: Tensor) -> Any:
        output = linear(input_, self.weight, None if self.skip_bias_add else self.bias)
        if self.gather_output and self.tp_size > 1:
            parts = output.split(self.output_partition_sizes, -1)
            output = torch.cat([tensor_model_parallel_all_gather(part) for part in parts], -1)
        return self._result(output)


@PluggableLayer.register("row_parallel_linear")
class RowParallelLinear(_Linear):
    """``y = sum_i x_i W_i^T + b``: each rank has a slice of the weight's columns and this slice of the input.

    Args:
        input_size, output_size: columns and rows of the whole weight.
        input_is_parallel: whether a rank gets only its slice of the input. If not, it gets the whole input and slices
            it.
        reduce_results: whether the results are all-reduced. If not, each rank returns its partial sum without the bias.
        others: see the module.

    Examples:
        >>> down = RowParallelLinear(256, 64, bias=False)
        >>> down.weight.weight_loader(down.weight, torch.randn(64, 256))  # the whole tensor of a checkpoint
        >>> output, bias = down(torch.randn(5, 256))
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        if bias and not reduce_results and not skip_bias_add:
            raise ValueError("RowParallelLinear: bias: cannot be added where reduce_results is False")
        super().__init__(
            input_size,
            output_size,
            (output_size, divide(type(self).__name__, "input_size", input_size, ranks(disable_tp))),
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias,
            disable_tp,
        )
        self.input_is_parallel, self.reduce_results = input_is_parallel, reduce_results

    def weight_loader(self, param: Tensor, loaded_weight: Tensor) -> None:
        if param.ndim == 1:
            copy_weight(self, param, loaded_weight)
        else:
            copy_weight(self, param, loaded_weight, 1, self.tp_rank * param.shape[1], self.input_size)

    def forward(self, input_: Tensor) -> Any:
        if not self.input_is_parallel:
            input_ = input_.chunk(self.tp_size, -1)[self.tp_rank]
        # The outputs are all-reduced, so only one rank may add the bias.
        bias = None if self.skip_bias_add or self.tp_rank else self.bias
        output = linear(input_, self.weight, bias)
        if self.reduce_results and self.tp_size > 1:
            output = tensor_model_parallel_all_reduce(output)
        return self._result(output)


@PluggableLayer.register("gate_linear")
class GateLinear(ReplicatedLinear):
    """Router logits, ``y = x W^T + b``, optionally in another dtype than the weight.

    ``forward(x)`` takes [num_tokens, input_size] and returns (logits [num_tokens, output_size], None). In bfloat16 and
    without a bias, up to 16 tokens use `pyops.dsv3_router_gemm`, which returns float32 accumulators unrounded.

    Args:
        input_size, output_size: hidden size and number of experts.
        bias: whether there is a bias.
        out_dtype: dtype of the logits; None for the dtype of the weight. `set_out_dtype` can set it later.
        params_dtype: dtype of the parameters; None for torch's default.
        force_fp32_compute: whether parameters are float32 and inputs are converted to float32.
        prefix: the name of the layer in its model.

    Examples:
        >>> gate = GateLinear(64, 8, out_dtype=torch.float32, params_dtype=torch.bfloat16)
        >>> logits, _ = gate(torch.randn(5, 64).bfloat16())
        >>> logits.shape, logits.dtype
        (torch.Size([5, 8]), torch.float32)
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        out_dtype: torch.dtype | None = None,
        params_dtype: torch.dtype | None = None,
        force_fp32_compute: bool = False,
        prefix: str = "",
    ) -> None:
        params_dtype = torch.float32 if force_fp32_compute else params_dtype
        super().__init__(input_size, output_size, bias=bias, params_dtype=params_dtype, prefix=prefix)
        self.out_dtype = out_dtype

    def set_out_dtype(self, out_dtype: torch.dtype) -> None:
        """Set the dtype of the logits. It can be set once."""
        if self.out_dtype is not None:
            raise ValueError(f"GateLinear: out_dtype: is {self.out_dtype} already, got {out_dtype}")
        self.out_dtype = out_dtype

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        dtype = self.out_dtype or self.weight.dtype
        narrow = x.dtype == self.weight.dtype == torch.bfloat16 and dtype in (torch.bfloat16, torch.float32)
        if narrow and self.bias is None and x.ndim == 2 and len(x) <= _MAX_FEW_TOKENS:
            logits = x.new_empty(len(x), self.output_size, dtype=dtype)
            dsv3_router_gemm(logits, x, self.weight)
            return logits, None
        return linear(x.to(self.weight.dtype), self.weight, self.bias).to(dtype), None
