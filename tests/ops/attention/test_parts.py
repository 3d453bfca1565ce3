"""merge_attn_states and convert_vertical_slash_indexes, against float64 and brute force."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

import pyops
from pyops._core import config
from pyops.testing import SCHEDULES, assert_matches_reference, same_bits
from pyops.testing.calls import named
from tests.support import axes
from tests.support.calls import DEVICES, example

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


# merge_attn_states


def _parts(tokens: int, heads: int, size: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """(prefix_output, prefix_lse, suffix_output, suffix_lse)."""
    outputs = (draw(tokens, heads, size, dtype=dtype, device=device, seed=i) for i in (0, 1))
    lses = (3 * draw(heads, tokens, dtype=torch.float32, device=device, seed=i) for i in (2, 3))
    prefix, suffix = outputs
    prefix_lse, suffix_lse = lses
    return prefix, prefix_lse, suffix, suffix_lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_is_attention_over_all_keys(dtype: torch.dtype, device: str) -> None:
    """Two halves of one softmax's keys, merged in float64."""
    tokens, heads, size, keys = 6, 3, 40, 9
    logits = 4 * draw(heads, tokens, 2 * keys, dtype=torch.float64, device=device)
    values = draw(heads, 2 * keys, size, dtype=torch.float64, device=device, seed=1)
    halves = [
        (part.softmax(-1) @ v, part.logsumexp(-1))
        for part, v in zip(logits.chunk(2, -1), values.chunk(2, 1), strict=True)
    ]
    (prefix, prefix_lse), (suffix, suffix_lse) = ((x.transpose(0, 1).to(dtype), lse.float()) for x, lse in halves)
    output, lse = torch.empty_like(prefix), torch.empty_like(prefix_lse)
    pyops.merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, lse)
    unit = torch.finfo(dtype).eps
    expected = (logits.softmax(-1) @ values).transpose(0, 1)
    torch.testing.assert_close(output.double(), expected, rtol=2 * unit, atol=2 * unit)
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf])
def test_merge_with_an_empty_part(infinity: float, device: str) -> None:
    """A part with an lse of -inf is not read, whatever it holds; if both parts are empty, the prefix is copied."""
    prefix, prefix_lse, suffix, suffix_lse = _parts(4, 2, 24, torch.bfloat16, device)
    prefix[0], prefix_lse[:, 0] = torch.nan, infinity
    suffix[1], suffix_lse[:, 1] = torch.inf, infinity
    prefix_lse[:, 2], suffix_lse[:, 2] = infinity, -infinity
    prefix[2, 0] = torch.nan
    inputs = prefix, prefix_lse, suffix, suffix_lse
    before = [x.clone() for x in inputs]
    output, lse = torch.empty_like(prefix), torch.empty_like(prefix_lse)
    pyops.merge_attn_states(output, *inputs, lse)
    assert same_bits(output[:3], torch.stack((suffix[0], prefix[1], prefix[2])))
    assert same_bits(lse[:, :2], torch.stack((suffix_lse[:, 0], prefix_lse[:, 1]), -1))
    assert (lse[:, 2] == -torch.inf).all()
    assert output[3].isfinite().all()
    assert lse[:, 3].isfinite().all()
    assert all(same_bits(x, copy) for x, copy in zip(inputs, before, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("other", [0.5, torch.inf, -torch.inf])
@pytest.mark.parametrize("in_prefix", [True, False])
def test_merge_keeps_nan(in_prefix: bool, other: float, device: str) -> None:
    """A NaN lse makes the row NaN, also if the other part is empty."""
    prefix, prefix_lse, suffix, suffix_lse = _parts(2, 1, 16, torch.float32, device)
    (prefix_lse if in_prefix else suffix_lse)[0, 0] = torch.nan
    (suffix_lse if in_prefix else prefix_lse)[0, 0] = other
    output, lse = torch.empty_like(prefix), torch.empty_like(prefix_lse)
    pyops.merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, lse)
    assert output[0].isnan().all()
    assert lse[0, 0].isnan()
    assert output[1].isfinite().all()
    assert lse[0, 1].isfinite()


@pytest.mark.parametrize("device", DEVICES)
def test_merge_where_one_part_outweighs_the_other(device: str) -> None:
    prefix, prefix_lse, suffix, suffix_lse = _parts(2, 2, 16, torch.float32, device)
    prefix_lse[:, 0], suffix_lse[:, 0] = 3e38, -3e38
    prefix_lse[:, 1], suffix_lse[:, 1] = -1e4, 1e4
    output, lse = torch.empty_like(prefix), torch.empty_like(prefix_lse)
    pyops.merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, lse)
    assert torch.equal(output, torch.stack((prefix[0], suffix[1])))
    assert torch.equal(lse, torch.stack((prefix_lse[:, 0], suffix_lse[:, 1]), -1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("heads", "size"), [(3, 40), (2, 576), (1, 1), (5, 2500)])
def test_merge_of_any_layout(heads: int, size: int, device: str) -> None:
    """Each tensor has its own strides: padded heads, strided tokens, heads before tokens, strided rows of lse."""
    inputs = _parts(5, heads, size, torch.bfloat16, device)
    expected, expected_lse = torch.empty_like(inputs[0]), torch.empty_like(inputs[1])
    pyops.merge_attn_states(expected, *inputs, expected_lse)

    def memory(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.full(shape, 7.0, dtype=dtype, device=device)

    placed = (
        memory(5, heads, size + 8)[..., :size],
        memory(5, heads, 2, dtype=torch.float32)[..., 0].T,
        memory(heads, 5, size).transpose(0, 1),
        memory(heads, 9, dtype=torch.float32)[:, 2:7],
    )
    for tensor, value in zip(placed, inputs, strict=True):
        tensor.copy_(value)
    output, lse = (
        memory(5, heads * size + 1)[:, 1:].unflatten(1, (heads, size)),
        memory(5, heads, dtype=torch.float32).T,
    )
    pyops.merge_attn_states(output, *placed, lse)
    assert torch.equal(output, expected)
    assert torch.equal(lse, expected_lse)
    pyops.merge_attn_states(placed[0], *placed)
    assert torch.equal(placed[0], expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_of_tokens_without_a_prefix(dtype: torch.dtype, device: str) -> None:
    """From a given token on the suffix is copied, whatever the prefix holds; fp8 output is the quantized float32
    result.
    """
    prefix, prefix_lse, suffix, suffix_lse = _parts(6, 2, 40, dtype, device)
    output, lse = torch.empty_like(prefix), torch.empty_like(prefix_lse)
    pyops.merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, lse)
    prefix[4:], prefix_lse[:, 4:] = torch.nan, torch.nan
    suffix_lse[0, 5], suffix_lse[1, 4] = -torch.inf, torch.inf  # copied unchanged
    suffix_lse[0, 4] = torch.nan
    found, found_lse = torch.empty_like(prefix), torch.empty_like(prefix_lse)
    pyops.merge_attn_states(found, prefix, prefix_lse, suffix, suffix_lse, found_lse, 4)
    assert torch.equal(found, torch.cat((output[:4], suffix[4:])))
    assert same_bits(found_lse, torch.cat((lse[:, :4], suffix_lse[:, 4:]), 1))
    codes = torch.empty(6, 2, 40, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.tensor([0.017], device=device)
    pyops.merge_attn_states(codes, prefix, prefix_lse, suffix, suffix_lse, None, 4, scale)
    right = torch.empty_like(codes)
    floats = torch.empty(6, 2, 40, device=device)
    pyops.merge_attn_states(floats, prefix.float(), prefix_lse, suffix.float(), suffix_lse, None, 4)
    pyops.static_scaled_fp8_quant(right.view(12, 40), floats.view(12, 40), scale)
    assert same_bits(codes, right)


def test_merge_refused() -> None:
    def refused(match: str, **changes: Any) -> None:
        prefix, prefix_lse, suffix, suffix_lse = _parts(3, 2, 8, torch.float32, "cpu")
        args = {
            "output": torch.empty_like(prefix),
            "prefix_output": prefix,
            "prefix_lse": prefix_lse,
            "suffix_output": suffix,
            "suffix_lse": suffix_lse,
            "output_lse": torch.empty_like(prefix_lse),
        }
        with pytest.raises(pyops.OpError, match=f"^merge_attn_states: {match}"):
            pyops.merge_attn_states(**(args | changes))

    refused(r"output: expected shape \(num_tokens, num_heads, head_size\)", output=torch.empty(3, 16))
    refused("suffix_output: expected dtype float32, got float16", suffix_output=torch.zeros(3, 2, 8).half())
    refused("prefix_output: expected shape", prefix_output=torch.zeros(3, 2, 9))
    refused(r"suffix_lse: expected shape \(num_heads=2, num_tokens=3\), got \(3, 2\)", suffix_lse=torch.zeros(3, 2))
    refused("output_lse: expected dtype float32, got float16", output_lse=torch.zeros(2, 3).half())
    refused("output: expected a last dimension of stride 1", output=torch.empty(3, 8, 2).transpose(1, 2))


# convert_vertical_slash_indexes


def _by_definition(
    verticals: list[int], slashes: list[int], row: int, q_len: int, kv_len: int, size_m: int, size_n: int, causal: bool
) -> tuple[list[int], list[int]]:
    """(blocks, columns) of a row: all ranges first, then the columns in no range. Indices are in range and sorted."""
    start, end = row * size_m, (row + 1) * size_m
    base = end + kv_len - (q_len if causal else 0)
    before = [s for s in slashes if s < base]
    if before:
        rest = [s for s in before[1:] if causal or s >= start]
        ends = [max(base - s, size_m) for s in (before[0], *rest)]
        ranges = [[ends[0] - size_m, ends[0]]]
    else:
        at_base = slashes[-1] == base
        low, size = (0, size_m) if at_base else (base if causal else kv_len, size_n)
        ends, ranges = [], [[low, low + size]]
    for e in ends[1:]:
        if e - size_m > ranges[-1][1]:
            ranges.append([e - size_m, e])
        elif e > ranges[-1][1]:
            ranges[-1][1] += size_m
    blocks = [key for low, high in ranges for key in range(low, min(high, kv_len), size_n)]
    free = [v for v in verticals if not any(low <= v < high for low, high in ranges)]
    return blocks, [v for v in free if not causal or v < ranges[-1][0]]


def _assert_by_definition(
    results: Any, inputs: Any, counts: list[list[int]], sizes: tuple[int, int], causal: bool
) -> None:
    block_count, block_offset, column_count, column_index = (x.cpu() for x in results)
    q_lens, kv_lens, verticals, slashes = inputs
    for b, h, row in numpy.ndindex(*block_count.shape):
        kept = verticals[b][h][: counts[0][h]], slashes[b][h][: counts[1][h]]
        blocks, columns = [], []
        if row * sizes[0] < q_lens[b]:
            blocks, columns = _by_definition(*kept, row, q_lens[b], kv_lens[b], *sizes, causal)
        assert block_count[b, h, row] == len(blocks)
        assert column_count[b, h, row] == len(columns)
        assert block_offset[b, h, row].tolist() == blocks + [0] * (block_offset.shape[-1] - len(blocks))
        assert column_index[b, h, row].tolist() == columns + [0] * (column_index.shape[-1] - len(columns))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [(64, 64), (16, 16), (16, 64), (5, 7), (1, 1)])
def test_rows_match_the_definition(sizes: tuple[int, int], causal: bool, device: str) -> None:
    """Random patterns of every density, ragged batches, with and without counts."""
    size_m, size_n = sizes
    heads, max_vertical, max_slash = 4, 9, 7
    rng = random.Random(size_m)

    def drawn(high: int, count: int) -> list[list[int]]:
        return [sorted(rng.choices(range(high), k=count)) for _ in range(heads)]

    for _ in range(12):
        kv_lens = [rng.choice((1, size_m, 3 * size_n + 1, 40 * size_m)) for _ in range(3)]
        q_lens = [rng.randint(1, kv) if causal else rng.randint(1, 8 * size_m) for kv in kv_lens]
        verticals = [drawn(kv, max_vertical) for kv in kv_lens]
        slashes = [
            [head[::-1] for head in drawn(rng.choice((1, kv, kv + q, 2 * (kv + q))), max_slash)]
            for kv, q in zip(kv_lens, q_lens, strict=True)
        ]
        lists = q_lens, kv_lens, verticals, slashes
        inputs = [torch.tensor(x, dtype=torch.int32, device=device) for x in lists]
        scalars = max(q_lens) + 2 * size_m, size_m, size_n, causal
        results = pyops.convert_vertical_slash_indexes(*inputs, *scalars)
        _assert_by_definition(results, lists, [[max_vertical] * heads, [max_slash] * heads], sizes, causal)
        counts = [
            [rng.randint(low, max_logit) for _ in range(heads)]
            for low, max_logit in ((0, max_vertical), (1, max_slash))
        ]
        count_tensors = [torch.tensor(x, dtype=torch.int32, device=device) for x in counts]
        results = pyops.convert_vertical_slash_indexes_mergehead(*inputs, *count_tensors, *scalars)
        _assert_by_definition(results, lists, counts, sizes, causal)


@pytest.mark.parametrize("device", DEVICES)
def test_row_computed_by_hand(device: str) -> None:
    """Causal, blocks of 4: the diagonal, and one 9 keys back; verticals inside, between and after their ranges."""
    inputs = ([8], [16], [[[0, 3, 5, 8, 15]]], [[[9, 0]]])
    tensors = [torch.tensor(x, dtype=torch.int32, device=device) for x in inputs]
    # Row 0 ends at key 12: keys -1 to 3, which are 0 to 4, and 8 to 12. Row 1 at key 16: keys 3 to 7 and 12 to 16.
    block_count, block_offset, column_count, column_index = pyops.convert_vertical_slash_indexes(*tensors, 8, 4, 4)
    assert block_count.tolist() == [[[2, 2]]]
    assert block_offset.tolist() == [[[[0, 8], [3, 12]]]]
    assert column_count.tolist() == [[[1, 2]]]
    assert column_index.tolist() == [[[[5, 0, 0, 0, 0], [0, 8, 0, 0, 0]]]]


_EXTREME = (-(2**31), -1, 0, 1, 63, 64, 65, 700, 2**31 - 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
def test_hostile_indices_write_nothing_outside(causal: bool, device: str) -> None:
    """Lengths, indices and counts of any value and in any order, in range or not: the result is the reference's."""
    op = pyops.convert_vertical_slash_indexes_mergehead
    rng = random.Random(causal)
    for _ in range(25):

        def values(*shape: int) -> torch.Tensor:
            flat = [rng.choice((*_EXTREME, rng.randint(-20, 900))) for _ in range(int(numpy.prod(shape)))]
            return torch.tensor(flat, dtype=torch.int32, device=device).reshape(shape)

        batch, heads, num_v, num_s, rows = 2, 3, rng.randint(1, 9), rng.randint(1, 6), 11
        outputs = [
            torch.empty(batch, heads, rows, *last, dtype=torch.int32, device=device)
            for last in ((), (num_s,), (), (num_v,))
        ]
        inputs = (values(batch), values(batch), values(batch, heads, num_v), values(batch, heads, num_s))
        args = (*inputs, values(heads), values(heads), rows * 64, 64, 64, causal)
        given = dict(zip(("block_count", "block_offset", "column_count", "column_index"), outputs, strict=True))
        if device == "cuda" or config.kernels_on_cpu():
            assert_matches_reference(op, *args, **given, schedules=SCHEDULES[:1])
        else:
            op(*args, **given)
            assert all((output >= 0).all() for output in outputs)


def test_vertical_slash_indexes_of_numpy() -> None:
    inputs = ([8], [16], [[[0, 3, 5, 8, 15]]], [[[9, 0]]])
    arrays = [numpy.array(x, numpy.int32) for x in inputs]
    results = pyops.convert_vertical_slash_indexes(*arrays, 8, 4, 4)
    assert all(isinstance(result, numpy.ndarray) for result in results)
    assert results[1].tolist() == [[[[0, 8], [3, 12]]]]


def test_vertical_slash_indexes_refused() -> None:
    def refused(match: str, *changes: tuple[int, Any]) -> None:
        args: list[Any] = [torch.zeros(shape, dtype=torch.int32) for shape in ((2,), (2,), (2, 3, 5), (2, 3, 4))]
        args += [128, 64, 64, True]
        for index, value in changes:
            args[index] = value
        with pytest.raises(pyops.OpError, match=f"^convert_vertical_slash_indexes_mergehead: {match}"):
            pyops.convert_vertical_slash_indexes(*args)

    refused("block_size_M: expected 1 to block_size_N=64, got 65", (5, 65))
    refused("block_size_M: expected 1 to block_size_N=64, got 0", (5, 0))
    refused("context_size: expected at least 0, got -1", (4, -1))
    refused("q_seqlens: expected shape", (0, torch.zeros(3, dtype=torch.int32)))
    refused("kv_seqlens: expected dtype int32, got int64", (1, torch.zeros(2, dtype=torch.int64)))
    refused("vertical_indexes: expected shape", (2, torch.zeros(2, 3, 0, dtype=torch.int32)))
    refused("slash_indexes: expected shape", (3, torch.zeros(2, 2, 4, dtype=torch.int32)))


@pytest.mark.parametrize(
    ("name", "tensor", "at", "value"),
    [
        ("convert_vertical_slash_indexes_mergehead", "q_seqlens", 1, 10**6),
        ("convert_vertical_slash_indexes_mergehead", "kv_seqlens", 0, -1),
        ("convert_vertical_slash_indexes_mergehead", "vertical_indices_count", 2, 1000),
        ("convert_vertical_slash_indexes_mergehead", "slash_indices_count", 1, -1),
        ("paged_attention_varlen", "cu_seqlens_q", -1, 10**6),
        ("paged_attention_rocm", "query_start_loc", 0, -1),
        ("paged_attention_v2", "seq_lens", 3, 1025),
    ],
)
def test_values_out_of_range_are_named(
    name: str, tensor: str, at: int, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = pyops.registry[name]
    args = example(op, num_tokens=6, **axes.fullest(op))
    op.forget()
    with monkeypatch.context() as patch:
        patch.setenv("PYOPS_CHECK", "1")
        op(*args)
        named(op, args)[tensor][at] = value
        place = at % len(named(op, args)[tensor])
        with pytest.raises(pyops.OpError, match=rf"{tensor}: 1 of \d+ indices .* \({place},\): {value}"):
            op(*args)
    op.forget()
