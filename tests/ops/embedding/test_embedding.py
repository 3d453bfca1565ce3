"""Embeddings of a divided vocabulary against a lookup in the whole table, and n-gram ids against Python's integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops.testing import same_bits
from tests.support.calls import DEVICES

RANGES = st.tuples(st.integers(0, 60), st.integers(0, 40), st.integers(0, 5), st.integers(90, 120), st.integers(0, 20))


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8])
def test_ranks_add_up_to_the_table(dtype: torch.dtype, index_dtype: torch.dtype, where: str) -> None:
    """Four ranks: each token of both vocabularies has its row on one rank, and zeros on the others."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randint(1, 100, (110, 24), generator=generator).to(dtype).to(where)  # 100 tokens and 10 added ones
    ids = torch.randint(0, 110, (57,), generator=generator).to(index_dtype).to(where)
    total = torch.zeros(57, 24, device=where)
    for rank in range(4):
        org = table[25 * rank : 25 * rank + 25]
        first, end = min(100 + 3 * rank, 110), min(103 + 3 * rank, 110)
        padding = torch.full((7, 24), 77).to(dtype).to(where)
        weight = torch.cat([x.view(torch.uint8) for x in (org, padding, table[first:end])]).view(dtype)
        out = torch.full((57, 24), 55).to(dtype).to(where)
        pyops.vocab_parallel_embedding(out, ids, weight, 25 * rank, 25 * rank + 25, 7, first, end)
        own = (ids >= 25 * rank) & (ids < 25 * rank + 25) | (ids >= first) & (ids < end)
        assert (out.float()[~own] == 0).all()
        total += out.float()
    assert torch.equal(total, table.float()[ids.long()])


@pytest.mark.parametrize("where", DEVICES)
@given(ranges=RANGES, seed=st.integers(0, 99))
def test_any_ranges_and_ids(where: str, ranges: tuple[int, ...], seed: int) -> None:
    """Tokens far outside, the largest integers among them, give zeros; ranges may overlap the others' padding."""
    start, num_org, padding, added, num_added = ranges
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_org + padding + num_added + 1, 8, generator=generator).to(where)
    extreme = torch.tensor(
        [-1, 2**63 - 1, -(2**63), 2**31, start - 1, start, start + num_org, added, added + num_added]
    )
    ids = torch.cat((torch.randint(-5, 150, (40,), generator=generator), extreme)).to(where)
    out = torch.full((len(ids), 8), 9.0, device=where)
    pyops.vocab_parallel_embedding(out, ids, weight, start, start + num_org, padding, added, added + num_added)
    for token, row in zip(ids.tolist(), out, strict=True):
        right = torch.zeros(8, device=where)
        if start <= token < start + num_org:
            right = weight[token - start]
        elif added <= token < added + num_added:
            right = weight[num_org + padding + token - added]
        assert same_bits(row, right)


@pytest.mark.parametrize(
    ("ranges", "named"),
    [
        ((0, 9, 0, 9, 9), "weight: expected at least 9 rows"),
        ((0, 5, 2, 9, 11), "weight: expected at least 9 rows"),
        ((4, 3, 0, 9, 9), "org_vocab_end_index: expected at least 0"),
        ((0, 4, -1, 9, 9), "num_org_vocab_padding: expected at least 0"),
        ((0, 4, 0, 9, 8), "added_vocab_end_index: expected at least 0"),
    ],
)
def test_ranges_without_rows_are_refused(ranges: tuple[int, ...], named: str) -> None:
    out = torch.full((2, 8), 5.0)
    with pytest.raises(pyops.OpError, match=f"vocab_parallel_embedding: {named}"):
        pyops.vocab_parallel_embedding(out, torch.tensor([0, 1]), torch.ones(8, 8), *ranges)
    assert (out == 5).all()


# N-grams


def n_gram_id(row: list[int], column: int, weights: list[int], mod: int, first: int) -> int:
    """The definition, in Python's integers."""
    total = 0
    for j, weight in enumerate(weights):
        if column - j < 0 or row[column - j] < 0:
            break
        total += row[column - j] * weight % mod
    return first + total % mod


@pytest.mark.parametrize("where", DEVICES)
@given(
    n=st.integers(2, 5),
    k=st.integers(1, 3),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    seed=st.integers(0, 999),
    largest=st.sampled_from([3, 200_000, 2**31 - 1]),
)
def test_n_gram_ids(where: str, n: int, k: int, lengths: list[int], seed: int, largest: int) -> None:
    """Products of the largest integers, requests without tokens, tokens to ignore, n-grams that begin before a row."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(dtype).to(where)

    configs, requests = (n - 1) * k, len(lengths)
    weights, mods = integers(-largest, largest, n - 1, k, n), integers(1, min(largest, 2**30) + 1, n - 1, k)
    sums = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=where)
    table = integers(0, largest, 6, 12)
    table[torch.rand(6, 12, generator=generator).to(where) < 0.2] = -1
    rows, starts = integers(0, 6, requests, dtype=torch.int64), integers(0, 6, requests)
    sizes = torch.arange(configs + 1, dtype=torch.int32, device=where) * 2**20
    out = torch.full((sum(lengths) + 2, configs), -7, dtype=torch.int32, device=where)
    pyops.ngram_compute_n_gram_ids(n, k, weights, mods, sizes, sums, table, rows, starts, out)
    for r, length in enumerate(lengths):
        for i in range(length):
            column = int(starts[r]) + i
            for c in range(configs):
                found = out[int(sums[r]) + i, c]
                if column >= 12:
                    assert found == -7
                    continue
                weight = weights.reshape(configs, n)[c, : c // k + 2].tolist()
                row = table[int(rows[r])].tolist()
                right = n_gram_id(row, column, weight, int(mods.reshape(-1)[c]), int(sizes[c]))
                assert int(found) == (right + 2**31) % 2**32 - 2**31
    assert (out[sum(lengths) :] == -7).all()


@pytest.mark.parametrize("where", DEVICES)
@given(data=st.data())
def test_hostile_tables_touch_nothing_else(where: str, data: st.DataObject) -> None:
    """Any integers as sums, rows, columns, moduli and weights: ids of no token are written outside the tensor."""
    wild = st.one_of(st.integers(-3, 20), st.sampled_from([-(2**31), 2**31 - 1]))

    def drawn(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        count = int(torch.tensor(shape).prod())
        values = data.draw(st.lists(wild, min_size=count, max_size=count))
        return torch.tensor(values, dtype=dtype, device=where).reshape(shape)

    memory = torch.full((4 * 4 + 64,), -9, dtype=torch.int32, device=where)
    out = memory[32:48].view(4, 4)
    pyops.ngram_compute_n_gram_ids(
        *(3, 2, drawn(2, 2, 3), drawn(2, 2), drawn(5), drawn(3), drawn(2, 5)),
        *(drawn(2, dtype=torch.int64), drawn(2), out),
    )
    assert (memory[:32] == -9).all()
    assert (memory[48:] == -9).all()


@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 1), (2, 0), (2, 1025)])
def test_lengths_of_n_grams_are_refused(n: int, k: int) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    configs = (n - 1) * k
    with pytest.raises(pyops.OpError, match=r"ngram_compute_n_gram_ids: ne_[nk]: expected"):
        pyops.ngram_compute_n_gram_ids(
            *(n, k, empty(n - 1, k, n), empty(n - 1, k), empty(configs + 1), empty(2), empty(1, 1)),
            *(empty(1, dtype=torch.int64), empty(1), empty(0, configs)),
        )
