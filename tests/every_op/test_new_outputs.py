"""The form `new` of ops: what its own parameters choose, the layout of scales, and rows that nothing writes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import pyops
from pyops.testing import same_bits

X = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
ONE = torch.ones(1)


def test_quantized_values_are_those_of_the_functions() -> None:
    for found, right in (
        (pyops.dynamic_scaled_fp8_quant.new(X), pyops.scaled_fp8_quant(X)),
        (
            pyops.dynamic_per_token_scaled_fp8_quant.new(X),
            pyops.scaled_fp8_quant(X, use_per_token_if_dynamic=True),
        ),
        (
            pyops.per_token_group_fp8_quant_packed.new(X, 128, 1e-10, -448.0, 448.0),
            pyops.per_token_group_quant_fp8_packed_for_deepgemm(X, 128),
        ),
    ):
        for one, other in zip(found, right, strict=True):
            assert (one.shape, one.stride()) == (other.shape, other.stride())
            assert same_bits(one, other)


def test_the_dtype_of_quantized_values() -> None:
    quants = pyops.static_scaled_fp8_quant.new(X, ONE)
    assert quants.dtype == torch.float8_e4m3fn
    for name in ("float8_e4m3fnuz", "uint8"):
        dtype = getattr(torch, name)
        assert pyops.static_scaled_fp8_quant.new(X, ONE, quant_dtype=dtype).dtype == dtype
        assert pyops.static_scaled_fp8_quant.new(X, ONE, quant_dtype=name).dtype == dtype
    with pytest.raises(pyops.OpError, match=r"^static_scaled_fp8_quant: result: expected dtype float8_e4m3fn or"):
        pyops.static_scaled_fp8_quant.new(X, ONE, quant_dtype=torch.int8)


def test_the_dtype_of_a_product() -> None:
    a, b, bias = X.to(torch.int8), X.to(torch.int8).T, torch.zeros(6, dtype=torch.float16)
    right = a.double() @ b.double()
    for more, dtype in (
        ({}, torch.bfloat16),
        ({"bias": bias}, torch.float16),
        ({"out_dtype": torch.float16}, torch.float16),
        ({"bias": bias, "out_dtype": torch.float16}, torch.float16),
    ):
        assert torch.equal(pyops.cutlass_scaled_mm.new(a, b, ONE, ONE, **more), right.to(dtype))
    for dtype in (torch.float32, torch.bfloat16):
        router = pyops.dsv3_router_gemm.new(X.bfloat16(), X.bfloat16(), out_dtype=dtype)
        assert router.dtype == dtype
    assert pyops.dsv3_router_gemm.new(X.bfloat16(), X.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("residual", [False, True])
def test_columns_of_scales_are_contiguous(residual: bool) -> None:
    weight, more = torch.ones(256), [X.clone() if residual else None for _ in range(2)]
    rows = pyops.rms_norm_per_block_quant.new(X, weight, 1e-6, None, more[0], 64, False)
    columns = pyops.rms_norm_per_block_quant.new(X, weight, 1e-6, None, more[1], 64, True)
    assert (rows[1].stride(), columns[1].stride()) == ((4, 1), (1, 6))
    assert all(map(same_bits, rows, columns))


def test_the_number_of_experts_of_a_token() -> None:
    weights, ids, _ = pyops.topk_softmax.new(X, topk=3)
    right = torch.softmax(X, -1).topk(3)
    torch.testing.assert_close(weights, right.values)
    assert torch.equal(ids, right.indices.int())
    assert pyops.topk_softmax.new(X, topk=3, indices_type=torch.int64)[1].dtype == torch.int64
    with pytest.raises(pyops.OpError, match=r"^topk_softmax: topk_weights: no tensor has the shape \(6, -1\)$"):
        pyops.topk_softmax.new(X, topk=-1)
    drafts, lengths = torch.zeros(2, dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    probabilities, seeds = torch.full((2, 4), 0.25), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(pyops.OpError, match=r"^rejection_sample: output_token_ids: no tensor has the shape \(2, "):
        pyops.rejection_sample.new(drafts, lengths, None, probabilities, drafts[:, None], seeds, max_spec_len=2**62)


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("new_memory_is_nan")
def test_rows_that_nothing_writes_are_zeros() -> None:
    query, starts = X[:, None, :64].contiguous(), torch.tensor([0, 2, 4], dtype=torch.int32)
    out = pyops.attention_varlen.new(query, query, query, starts, starts, 0.125, causal=False)
    right = [
        torch.nn.functional.scaled_dot_product_attention(*[query[a : a + 2].transpose(0, 1)] * 3, scale=0.125)
        for a in (0, 2)
    ]
    torch.testing.assert_close(out[:4], torch.cat(right, 1).transpose(0, 1))
    assert not out[4:].any()
    lists = torch.tensor([0, 2, *[9] * 14], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.tensor([16])
    product = pyops.grouped_gemm.new(X, X[None], lists[0], lists[1], lists[2].int(), block_size=16)
    torch.testing.assert_close(product[[0, 2]], X[[0, 2]] @ X.T)
    assert not product[[1, 3, 4, 5]].any()


def test_arrays() -> None:
    for op, right in ((pyops.silu_and_mul, X[:, :128]), (pyops.relu2, X)):
        found = op.new(X.numpy())
        assert found.shape == tuple(right.shape)
        assert same_bits(torch.from_numpy(found), op.new(X))
