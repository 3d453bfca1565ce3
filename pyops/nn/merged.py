"""Linear layers with stacked weights; see the module `linear` for common arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .linear import ColumnParallelLinear, copy_weight, ranks
from .parallel import divide

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["MergedColumnParallelLinear", "QKVParallelLinear"]


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several `ColumnParallelLinear` of the same input, with stacked weights.

    `weight_loader` takes the index of a matrix as `loaded_shard_id`, or None for all matrices, stacked.

    Args:
        input_size: columns of each weight.
        output_sizes: rows of each weight.
        others: as in `ColumnParallelLinear`.

    Examples:
        >>> gate_up = MergedColumnParallelLinear(64, [256, 256], bias=False)
        >>> for shard in (0, 1):  # gate_proj and up_proj of a checkpoint
        ...     gate_up.weight.weight_loader(gate_up.weight, torch.randn(256, 64), shard)
        >>> SiluAndMul()(gate_up(torch.randn(5, 64))[0]).shape
        torch.Size([5, 256])
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
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
        self.output_sizes = output_sizes
        super().__init__(
            input_size,
            sum(output_sizes),
            bias,
            gather_output,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )

    def _merged_sizes(self, output_size: int) -> list[int]:
        return self.output_sizes

    def _shard(self, index: int) -> tuple[int, int, int]:
        """(first row in this rank's weight, number of rows, index of the shard of the whole matrix)."""
        return sum(self.output_partition_sizes[:index]), self.output_partition_sizes[index], self.tp_rank

    def _indices(self) -> dict[Any, int]:
        """{loaded_shard_id: index of the matrix}."""
        return {index: index for index in range(len(self.output_partition_sizes))}

    def weight_loader(self, param: Tensor, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
        """Copy this rank's shard of one of the matrices, or of all of them."""
        indices = self._indices()
        if loaded_shard_id is None:
            whole = sum(self.output_sizes)
            if loaded_weight.shape[0] != whole:
                raise ValueError(
                    f"{type(self).__name__}: weight_loader: expected {whole} rows, got {loaded_weight.shape[0]}"
                )
            parts = loaded_weight.split(self.output_sizes)
            for shard_id, part in zip(indices, parts, strict=True):
                self.weight_loader(param, part, shard_id)
            return
        if loaded_shard_id not in indices:
            raise ValueError(
                f"{type(self).__name__}: loaded_shard_id: expected one of {list(indices)}, got {loaded_shard_id!r}"
            )
        index = indices[loaded_shard_id]
        first, rows, rank = self._shard(index)
        copy_weight(self, param[first : first + rows], loaded_weight, 0, rank * rows, self.output_sizes[index])


class QKVParallelLinear(MergedColumnParallelLinear):
    """The QKV projection. Ranks divide the heads; if there are fewer KV heads than ranks, ranks share a KV head.

    `weight_loader` takes "q", "k" or "v" as `loaded_shard_id`, or None for all three, stacked. The output of a rank is
    [..., (num_heads + num_kv_heads) * head_size + num_kv_heads * v_head_size].

    Args:
        hidden_size: columns of each weight.
        head_size: elements of a query or key head.
        total_num_heads: query heads on all ranks.
        total_num_kv_heads: key heads, and value heads, on all ranks; None for total_num_heads.
        v_head_size: elements of a value head; None for head_size.
        others: as in `ColumnParallelLinear`.

    Examples:
        >>> qkv_proj = QKVParallelLinear(64, head_size=16, total_num_heads=4, total_num_kv_heads=2, bias=False)
        >>> for shard, heads in (("q", 4), ("k", 2), ("v", 2)):  # q_proj, k_proj and v_proj of a checkpoint
        ...     qkv_proj.weight.weight_loader(qkv_proj.weight, torch.randn(heads * 16, 64), shard)
        >>> q, k, v = qkv_proj(torch.randn(5, 64))[0].split([64, 32, 32], -1)
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        v_head_size: int | None = None,
    ) -> None:
        name, size = type(self).__name__, ranks(disable_tp)
        kv_heads = total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        value_size = head_size if v_head_size is None else v_head_size
        num_heads = divide(name, "total_num_heads", total_num_heads, size)
        if size >= kv_heads:
            replicas = divide(name, "ranks of total_num_kv_heads", size, kv_heads)
            num_kv_heads = 1
        else:
            num_kv_heads, replicas = divide(name, "total_num_kv_heads", kv_heads, size), 1
        # The base class counts a head that several ranks share once for each of these ranks.
        sizes = [num_heads * head_size, num_kv_heads * head_size, num_kv_heads * value_size]
        super().__init__(
            hidden_size,
            [size * part for part in sizes],
            bias,
            False,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )
        self.output_sizes = [total_num_heads * head_size, kv_heads * head_size, kv_heads * value_size]
        self.hidden_size, self.head_size, self.v_head_size = hidden_size, head_size, value_size
        self.total_num_heads, self.total_num_kv_heads = total_num_heads, kv_heads
        self.num_heads, self.num_kv_heads, self.num_kv_head_replicas = num_heads, num_kv_heads, replicas

    def _indices(self) -> dict[Any, int]:
        return {"q": 0, "k": 1, "v": 2}

    def _shard(self, index: int) -> tuple[int, int, int]:
        first, rows, rank = super()._shard(index)
        return first, rows, rank if index == 0 else rank // self.num_kv_head_replicas
