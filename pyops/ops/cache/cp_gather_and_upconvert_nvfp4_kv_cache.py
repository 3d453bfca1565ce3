"""Gathering the 352-byte NVFP4 entries of multi-head latent attention from a paged cache as bfloat16 rows."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.tensor import TensorArg
from ._sequences import example_sequences
from .cp_gather_and_upconvert_fp8_kv_cache import (
    bad_indices_cp_gather_and_upconvert_fp8_kv_cache,
    existing_rows,
    launch,
)

if TYPE_CHECKING:
    from torch import Tensor

_ENTRY_BYTES = 352
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # values by code


@op(inout="dst", ulps=0)
def cp_gather_and_upconvert_nvfp4_kv_cache(
    src_cache: Tensor, dst: Tensor, block_table: Tensor, workspace_starts: Tensor, batch_size: int
) -> None:
    """Gather the 352-byte entries "nvfp4_ds_mla" of sequences from a paged cache as bfloat16 rows.

    An entry has 512 e2m1 values, two in a byte, the first in the lower bits; 64 float8_e4m3fn, the rotary key; and 32
    scales, float8_e4m3fn, that of the 16 values of group g at byte ``8 * (g % 4) + g // 4``. ``dst[workspace_starts[b]
    + j] = [value * scale, rotary key]``, exactly, from the entry ``src_cache[block_table[b, j // block_size], j %
    block_size]``, for every b below batch_size. A sequence ends where the next begins, the last with `dst`. A row of no
    sequence, or without an existing entry, is left unchanged.

    Args:
        src_cache: [num_blocks, block_size, 352] uint8; any strides but the last.
        dst: [num_rows, 576] bfloat16, written row by row; any row stride.
        block_table: [at least batch_size, max_blocks] int32 or int64, any strides.
        workspace_starts: [at least batch_size] int32 or int64: the row of `dst` at which each sequence begins.
        batch_size: sequences to gather.
    """
    rows, block, offset = existing_rows(src_cache, dst, block_table, None, workspace_starts, batch_size, None)
    nibbles, rope, scales = src_cache[block, offset].split((256, 64, 32), -1)
    table = torch.tensor(_E2M1, dtype=torch.float32, device=dst.device)
    values = table[torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(1).long()].unflatten(-1, (32, 16))
    factors = scales.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (4, 8)).transpose(1, 2).flatten(1)
    keys = rope.contiguous().view(torch.float8_e4m3fn).float()
    dst[rows] = torch.cat(((values * factors[..., None]).flatten(1), keys), -1).to(dst.dtype)


@cp_gather_and_upconvert_nvfp4_kv_cache.plan
def plan_cp_gather_and_upconvert_nvfp4_kv_cache(
    src_cache: TensorArg, dst: TensorArg, block_table: TensorArg, workspace_starts: TensorArg, batch_size: int
) -> Launch:
    return launch(src_cache, dst, block_table, None, workspace_starts, batch_size, None, _ENTRY_BYTES)


@cp_gather_and_upconvert_nvfp4_kv_cache.bad_indices
def bad_indices_cp_gather_and_upconvert_nvfp4_kv_cache(
    src_cache: Tensor, dst: Tensor, block_table: Tensor, workspace_starts: Tensor, batch_size: int
) -> dict[str, Tensor]:
    tensors = src_cache, dst, block_table, None, workspace_starts, batch_size, None
    return bad_indices_cp_gather_and_upconvert_fp8_kv_cache(*tensors)


@cp_gather_and_upconvert_nvfp4_kv_cache.traffic
def traffic_cp_gather_and_upconvert_nvfp4_kv_cache(dst: TensorArg, block_table: TensorArg) -> int:
    return dst.nbytes + dst.shape[0] * _ENTRY_BYTES + block_table.nbytes


@cp_gather_and_upconvert_nvfp4_kv_cache.example
def example_cp_gather_and_upconvert_nvfp4_kv_cache(make: Any, *, num_tokens: int = 16) -> tuple[Any, ...]:
    block_size = 64
    num_blocks, num_seqs, offsets, block_table = example_sequences(make, num_tokens, block_size)
    starts = [begin for begin, _ in pairwise(offsets)]
    return (
        make.randint(0, 120, num_blocks, block_size, _ENTRY_BYTES, dtype="uint8"),
        make.empty(num_tokens, 576, dtype="bfloat16"),
        block_table,
        make.values(starts, dtype="int32"),
        num_seqs,
    )
