"""Packed GPTQ weights: fields of 2, 3, 4 or 8 bits, with consecutive rows in a word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.op.decorator import op
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg
from .._shared import chunks
from .._shared.chunks import ChunkProblem

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gptq_shuffle"]

_gptq_shuffle = Kernel("quantize/gptq_shuffle.cu")
_BITS = (2, 3, 4, 8)


def _unit(bit: int) -> tuple[int, int]:
    """(words, fields) of a unit: the fewest words that hold whole fields."""
    return (3, 32) if bit == 3 else (1, 32 // bit)


def _destination(bit: int, field: int, j: int) -> int:
    """The bit of a shuffled unit to which bit `j` of this field moves."""
    if bit == 8:
        return 8 * field + j
    if bit == 3 and field >= 30:
        return 32 * j + (15 if field == 30 else 31)
    word, field = divmod(field, 10) if bit == 3 else (0, field)
    return 32 * word + 16 * (field % 2) + field // 2 * bit + j


@op(inout="q_weight", ulps=0)
def gptq_shuffle(q_weight: Tensor, q_perm: Tensor | None, bit: int) -> None:
    """Prepare a GPTQ weight for GEMMs, in place: permute rows, interleave the fields of words.

    Row r becomes row ``q_perm[r]`` of the given weight, or 0 if that row does not exist. A word then holds its even
    fields in the low half, from the lowest bits, and its odd fields in the high half. Fields of 8 bits keep their
    positions. A unit of 32 fields of 3 bits has three words of ten fields each, in this order; bit j of the last two
    fields is bit 15 and bit 31 of word j. (This is ExLlama's layout.)

    Args:
        q_weight: [K * bit / 32, N] int32, contiguous, read and written. Row k is field ``k % (32 / bit)``, from the
            lowest bits, of word ``k // (32 / bit)``; for 3 bits, three words are one string of 32 fields.
        q_perm: [K] int32, contiguous; empty or None: rows keep their order.
        bit: 2, 3, 4 or 8.
    """
    if not q_weight.numel():
        return
    words, fields = _unit(bit)
    columns = q_weight.shape[1]
    places = torch.arange(32, dtype=torch.int64, device=q_weight.device).unsqueeze(1)
    rows = ((q_weight.unsqueeze(1) >> places) & 1).to(torch.uint8).reshape(-1, bit, columns)
    if q_perm is not None and q_perm.numel():
        inside = (q_perm >= 0) & (q_perm < len(rows))
        rows = rows[q_perm.where(inside, 0).long()] * inside.view(-1, 1, 1)
    order = [_destination(bit, field, j) for field in range(fields) for j in range(bit)]
    rows = rows.reshape(-1, 32 * words, columns)
    bits = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    bits[:, order] = rows
    bits = bits.view(-1, 32, columns)
    q_weight.zero_()
    for place in range(32):
        q_weight |= bits[:, place].int() << place


@gptq_shuffle.plan
def plan_gptq_shuffle(q_weight: TensorArg, q_perm: TensorArg | None, bit: int) -> list[Launch]:
    if bit not in _BITS:
        raise check.refuse(q_weight, "bit", f"expected one of {_BITS}, got {bit}")
    words, fields = _unit(bit)
    check.dtype(q_weight, int32)
    check.sizes(q_weight, words=None, N=None)
    check.contiguous(q_weight)
    num_rows, num_columns = q_weight.shape
    if num_rows % words:
        raise q_weight.error(f"expected three rows for every 32 of {bit} bits, got shape {q_weight.shape}")
    num_units = num_rows // words
    permuted = q_perm is not None and q_perm.shape != (0,)
    check.dtype(q_perm, int32)
    if permuted:
        check.shape(q_perm, K=num_units * fields)
    problem = ChunkProblem(num_columns, num_units, int32)
    config = tuning.config(q_weight.op, problem, q_weight.device, chunks.choose)
    grid = config.grid(problem)
    saved = Scratch(q_weight.nbytes if permuted else 0)

    def launch(saving: bool) -> Launch:
        return _gptq_shuffle(BITS=bit, SAVING=saving, PERMUTED=permuted, **config.constants(grid)).launch(
            grid=grid,
            block=config.num_threads,
            num_units=num_units,
            num_columns=num_columns,
            saved=saved if permuted else 0,
        )

    if permuted:
        return [launch(True), launch(False)]
    return [] if bit == 8 else [launch(False)]


@gptq_shuffle.bad_indices
def bad_indices_gptq_shuffle(q_weight: Tensor, q_perm: Tensor | None, bit: int) -> dict[str, Tensor]:
    words, fields = _unit(bit)
    return {} if q_perm is None else {"q_perm": (q_perm < 0) | (q_perm >= q_weight.shape[0] // words * fields)}


@gptq_shuffle.example
def example_gptq_shuffle(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 100] = 4096,
    bit: Literal[2, 3, 4, 8] = 4,
    permuted: bool = True,
) -> tuple[Any, ...]:
    """A weight of `num_tokens` units of rows."""
    words, fields = _unit(bit)
    return (
        make.randint(-(2**31), 2**31, num_tokens * words, hidden_size, dtype="int32"),
        make.permutation(num_tokens * fields, num_tokens * fields, dtype="int32") if permuted else None,
        bit,
    )
