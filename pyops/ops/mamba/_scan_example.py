"""The example of the selective scan."""

from __future__ import annotations

from typing import Any

from ._common import PAD_SLOT_ID


def example_selective_scan_fwd(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    with_options: bool = False,
    with_starts: bool = False,
    with_blocks: bool = False,
    with_chunks: bool = False,
) -> tuple[Any, ...]:
    dim, groups, state_size, block_size = 24, 2, 16, 5
    batch = 3 if with_starts else 2
    leading, columns = () if with_starts else (batch,), -(-num_tokens // block_size)
    num_slots = batch * max(columns, 1) + 1
    slots = make.permutation(num_slots, batch, max(columns, 1), dtype="int32")
    ends = [0, num_tokens // 3, num_tokens // 3, num_tokens]
    lengths = [ends[i + 1] - ends[i] if with_starts else num_tokens for i in range(batch)]
    last = [max(0, -(-length // block_size) - 1) for length in lengths]
    cu_chunks, last_chunks = [0], []
    for length in lengths:  # the first chunk of a sequence completes a block that an earlier call began
        chunks = [min(length, 2)] + [min(block_size, length - i) for i in range(2, length, block_size)]
        cu_chunks += [cu_chunks[-1] + sum(chunks[: i + 1]) for i in range(len(chunks))]
        last_chunks.append(len(cu_chunks) - 2)

    def rows(*shape: int, **how: float) -> Any:
        return make.randn(*leading, *shape, num_tokens, dtype=dtype, **how)

    return (
        rows(dim),
        rows(dim, scale=0.1, shift=0.5),
        make.randn(dim, state_size, dtype="float32", scale=0.25, shift=-2.0),
        rows(groups, state_size),
        rows(groups, state_size),
        make.randn(dim, dtype="float32") if with_options else None,
        rows(dim) if with_options else None,
        make.randn(dim, dtype="float32") if with_options else None,
        with_options,
        make.values(ends, dtype="int32") if with_starts else None,
        slots if with_blocks or with_starts else None,
        make.values([i % 2 == 0 for i in range(batch)], dtype="bool") if with_options else None,
        make.randn(num_slots, dim, state_size, dtype=dtype if with_blocks else "float32"),
        PAD_SLOT_ID,
        block_size,
        make.values([0] * batch, dtype="int32") if with_blocks else None,
        make.values(last, dtype="int32") if with_blocks else None,
        make.values([0] * batch, dtype="int32") if with_blocks else None,
        make.values(cu_chunks, dtype="int32") if with_blocks and with_chunks else None,
        make.values(last_chunks, dtype="int32") if with_blocks and with_chunks else None,
    )
