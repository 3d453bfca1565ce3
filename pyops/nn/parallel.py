"""Tensor parallelism: the ranks among which weights are divided, and their collectives.

`set_tensor_parallel_group` sets the process group of `torch.distributed`. Without a group, a layer has all its
weights. Layers divide their weights at construction, so the group must be set before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "set_tensor_parallel_group",
    "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce",
]

_group: Any = None


def set_tensor_parallel_group(group: Any) -> None:
    """Divide new layers among the ranks of the `ProcessGroup` `group`; None to divide no more.

    Examples:
        >>> set_tensor_parallel_group(None)  # or, in a process of torchrun, torch.distributed.group.WORLD
        >>> ColumnParallelLinear(64, 256).tp_size
        1
    """
    global _group
    _group = group


def get_tensor_model_parallel_world_size() -> int:
    """The number of ranks among which weights are divided; 1 without a group.

    Examples:
        >>> get_tensor_model_parallel_world_size()  # without a group
        1
    """
    return 1 if _group is None else int(dist.get_world_size(_group))


def get_tensor_model_parallel_rank() -> int:
    """The rank of this process in the group; 0 without a group.

    Examples:
        >>> get_tensor_model_parallel_rank()  # without a group
        0
    """
    return 0 if _group is None else int(dist.get_rank(_group))


def tensor_model_parallel_all_reduce(input_: Tensor) -> Tensor:
    """The sum of `input_` over all ranks, a new tensor; `input_` itself if there is one rank.

    Examples:
        >>> partial_sum = torch.randn(5, 64)
        >>> tensor_model_parallel_all_reduce(partial_sum) is partial_sum  # without a group
        True
    """
    if get_tensor_model_parallel_world_size() == 1:
        return input_
    out = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=_group)
    return out


def tensor_model_parallel_all_gather(input_: Tensor, dim: int = -1) -> Tensor:
    """`input_` of all ranks concatenated along `dim`, a new tensor; `input_` itself if there is one rank.

    Examples:
        >>> logits = torch.randn(5, 1000)
        >>> tensor_model_parallel_all_gather(logits) is logits  # without a group
        True
    """
    size = get_tensor_model_parallel_world_size()
    if size == 1:
        return input_
    part = input_.contiguous()
    out = part.new_empty(size * part.shape[0], *part.shape[1:]) if part.ndim else part.new_empty(size)
    dist.all_gather_into_tensor(out, part, group=_group)
    return torch.cat(out.chunk(size), dim) if dim not in (0, -part.ndim) else out


def divide(layer: str, name: str, size: int, parts: int) -> int:
    """``size / parts``. ValueError naming the layer and the argument if `parts` does not divide `size`."""
    if size % parts:
        raise ValueError(f"{layer}: {name}: expected a multiple of {parts}, got {size}")
    return size // parts
