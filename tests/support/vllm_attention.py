"""A CUDA device for vLLM's choices, and batches of its scheduler, for tests of attention on a machine without a GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

BLOCK_SIZE = 16
COMPILED = ("vllm._C", "vllm._moe_C", "vllm._C_stable_libtorch")
FLASH_ATTN = "vllm.vllm_flash_attn"
# The last of them is of vLLM 0.33.
FLASH_ATTN_FUNCTIONS = (
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "compile_flash_attn_varlen_func_from_specs",
)


@contextmanager
def cuda_platform(capability: tuple[int, int] = (9, 0)) -> Iterator[Any]:
    """vLLM's platform for CUDA, with a device of this capability, in place of the detected one.

    Its tensors are on the CPU.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in COMPILED:
            if name not in sys.modules:
                patch.setitem(sys.modules, name, ModuleType(name))
        import vllm.platforms
        from vllm.platforms.cuda import CudaPlatformBase
        from vllm.platforms.interface import DeviceCapability

        class Device(CudaPlatformBase):
            device_name = "stand-in"
            device_type = "cpu"
            dispatch_key = "CPU"

            @classmethod
            def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
                return DeviceCapability(*capability)

            @classmethod
            def num_compute_units(cls, device_id: int = 0) -> int:
                return 132

        patch.setattr(vllm.platforms, "_current_platform", Device(), raising=False)
        _do_without_flash_attn()
        yield Device


def _do_without_flash_attn() -> None:
    """Without its libraries FlashAttention cannot be imported, and on CUDA no attention layer without it.

    So the module of vLLM that imports two functions of it is imported together with an empty package, and then loses
    both: a backend that imports them from there fails to import, which vLLM accepts as an answer.
    """
    absent = ModuleType(FLASH_ATTN)
    vars(absent).update(dict.fromkeys(FLASH_ATTN_FUNCTIONS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, FLASH_ATTN, absent)
        helper = importlib.import_module("vllm.v1.attention.backends.fa_utils")
    for name in FLASH_ATTN_FUNCTIONS:
        vars(helper).pop(name, None)


def block_tables(lengths: list[int], width: int, num_blocks: int) -> torch.Tensor:
    """[num_seqs, width] int32: different cache blocks in random order for the tokens of each sequence; then 0, as in
    vLLM."""
    used = [-(-length // BLOCK_SIZE) for length in lengths]
    order = 1 + torch.randperm(num_blocks - 1)[: sum(used)]
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
    for row, blocks in zip(tables, order.split(used), strict=True):
        row[: len(blocks)] = blocks
    return tables


def common_metadata(counts: list[int], lengths: list[int], tables: torch.Tensor, *, rows: int = 0) -> Any:
    """vLLM's metadata of a step with `counts` new tokens at the end of sequences of these lengths.

    Args:
        rows: rows of the queries, if more than the new tokens: padding rows of a CUDA graph, with slots of -1.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *counts]).cumsum(0).int()
    slots = torch.full((max(rows, sum(counts)),), -1, dtype=torch.int64)
    for s, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        at = torch.arange(length - count, length)
        slots[starts[s] : starts[s + 1]] = tables[s, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(counts),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        block_table_tensor=tables,
        slot_mapping=slots,
    )


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, **options: Any
) -> torch.Tensor:
    """[count, num_heads, value_size] float64 of the newest tokens of one sequence, by torch's own attention.

    Args:
        query: [count, num_heads, size]; keys, values: [length, num_kv_heads, size].
        options: window, cap, slopes [num_heads], sinks [num_heads].
    """
    count, length, group = len(query), len(keys), query.shape[1] // keys.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (query, keys, values))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    at, j = length - count + torch.arange(count)[:, None], torch.arange(length)
    seen = (j <= at) & (j > at - options.get("window", length))
    bias = torch.zeros(len(q), count, length, dtype=torch.float64)
    if cap := options.get("cap"):
        logits = q @ k.transpose(1, 2) * scale
        q, bias = torch.zeros_like(q), cap * torch.tanh(logits / cap)
    if (slopes := options.get("slopes")) is not None:
        bias = bias + slopes.double()[:, None, None] * (j - at)
    bias = bias.masked_fill(~seen, -torch.inf)
    if (sinks := options.get("sinks")) is not None:  # one more key of zeros, with a value of zeros
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        bias = torch.cat((bias, sinks.double()[:, None, None].expand(-1, count, 1)), -1)
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return found.transpose(0, 1)
