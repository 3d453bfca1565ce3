"""Groups of rows, one per expert: errors for groups that share rows, which two blocks would both write."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops.ops._shared.groups import sharing
from pyops.testing.calls import named, replaced
from tests.support.calls import example

# Each op with groups given by offsets, and the offsets of its output.
PRODUCTS = (
    *("cutlass_moe_mm", "cutlass_w4a8_moe_mm", "cutlass_blockwise_scaled_grouped_mm"),
    *("cutlass_fp4_group_mm", "cutlass_mxfp4_group_mm", "cutlass_mxfp8_grouped_mm"),
)
QUANTS = (
    *("scaled_fp4_experts_quant", "silu_and_mul_scaled_fp4_experts_quant"),
    *("mxfp4_experts_quant", "silu_and_mul_mxfp4_experts_quant"),
)
OFFSETS = [
    *((name, "expert_offsets") for name in PRODUCTS),
    *((name, "output_scale_offset_by_experts") for name in QUANTS),
    ("mxfp8_experts_quant", "expert_offsets"),
    ("mxfp8_experts_quant", "blockscale_offsets"),
]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=6))
def test_ranges_that_share_a_row_are_named(ranges: list[tuple[int, int]]) -> None:
    first, count = torch.tensor(ranges, dtype=torch.int64).reshape(-1, 2).unbind(1)
    owners = [sum(begin <= row < begin + size for begin, size in ranges) for row in range(20)]
    found = sharing(first, count)
    assert bool(found.any()) == (max(owners) > 1)
    for is_sharing, (begin, size) in zip(found.tolist(), ranges, strict=True):
        assert not is_sharing or (size > 0 and owners[begin] > 1)


@pytest.mark.parametrize(("name", "offsets"), OFFSETS)
def test_experts_that_write_the_same_rows_are_named(name: str, offsets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows out of range are named, too, as the docstring says. Groups of the example do not overlap."""
    op = pyops.registry[name]
    monkeypatch.setenv("PYOPS_CHECK", "1")
    op.forget()
    try:
        args = example(op, num_tokens=40)
        op(*args)
        shared = torch.zeros_like(named(op, args)[offsets])
        with pytest.raises(pyops.OpError, match=rf"^{name}: {offsets}: [123] of \d indices begin in rows of another"):
            op(*replaced(op, args, **{offsets: shared}))
        beyond = torch.full_like(shared, 10_000)
        with pytest.raises(pyops.OpError, match=rf"^{name}: {offsets}: \d of \d indices are out of range"):
            op(*replaced(op, args, **{offsets: beyond}))
    finally:
        op.forget()
    assert "experts must not share" in " ".join(str(op.reference.__doc__).split()).lower()
