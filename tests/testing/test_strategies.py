"""The strategies of pyops.testing: they keep their promises, and their hostile values do occur."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

from pyops.testing import CONTENTS, filled, strategies

FLOATS = (*strategies.DTYPES, "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")


def occurs(strategy: st.SearchStrategy[Any], predicate: Callable[[Any], bool]) -> Any:
    """A value of the strategy that satisfies the predicate, among its first 500; hypothesis.NoSuchExample if none."""
    found = find(strategy, predicate, settings=settings(max_examples=500, database=None), random=random.Random(0))
    assert predicate(found)
    return found


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", CONTENTS)
def test_contents(dtype: str, kind: str) -> None:
    x = torch.randn(8, 300, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    before = x.clone()
    y = filled(x, kind)
    assert torch.equal(x.float(), before.float())
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert y.is_contiguous()
    limits = torch.finfo(x.dtype)
    values, size = y.double(), y.double().abs()
    if kind == "nan":
        assert 0 < values.isnan().sum() < values.numel() / 10
    elif kind == "inf" and not dtype.startswith("float8_e4m3"):  # these have no infinity
        assert (values == float("inf")).any()
        assert (values == -float("inf")).any()
    elif kind == "subnormal":
        assert ((size > 0) & (size < limits.tiny)).sum() > values.numel() / 4
    elif kind == "small":
        assert 0 < size.median() < 0.1
    elif kind == "large":
        assert size.isfinite().all()
        assert size.max() > limits.max**0.5
    elif kind == "extreme":
        assert size.isfinite().all()
        assert size.max() > limits.max / 4
        assert 0 < size.min() < limits.tiny * 4
        assert (values[:, 1:].abs() / values[:, :-1].abs()).max() > (limits.max / limits.tiny) ** 0.5
    elif kind == "zero":
        assert (values == 0).all()
        assert values.signbit().any() == (dtype != "float8_e4m3fnuz")
        assert not values.signbit().all()
    elif kind == "equal":
        assert (values == values[:, :1]).all()
        assert len(values[:, 0].unique()) > 1
        assert (values.sum(-1) / 300 == values[:, 0]).all()
    elif kind == "normal":
        assert torch.equal(values, x.double())


def test_contents_of_integers() -> None:
    with pytest.raises(ValueError, match="got 'nan' and int32"):
        filled(torch.zeros(2, dtype=torch.int32), "nan")
    with pytest.raises(ValueError, match="got 'strange' and float32"):
        filled(torch.zeros(2), "strange")


@given(layout=strategies.layouts(), shape=strategies.shapes(3), dtype=st.sampled_from(FLOATS))
def test_layout_keeps_the_values(layout: Any, shape: tuple[int, ...], dtype: str) -> None:
    x = torch.randn(shape).to(getattr(torch, dtype))
    y = layout.place(x)
    assert torch.equal(x.float(), y.float())
    assert y.data_ptr() % 64 == layout.offset * y.element_size()
    if shape[1] > 1:
        assert y.stride(1) == shape[2] + layout.gap
    if shape[2] > 1:
        assert y.stride(2) == 1
    if layout.lone is not None:
        assert all(stride == layout.lone for size, stride in zip(y.shape, y.stride(), strict=True) if size == 1)
    around = y.as_strided((layout.offset,), (1,), 0)
    assert around.float().isnan().all()


def test_tensors_have_the_requested_shape_and_dtype() -> None:
    @given(x=strategies.tensors((3, 5), "bfloat16"), y=strategies.tensors(strategies.shapes(1), st.just("float16")))
    def check(x: torch.Tensor, y: torch.Tensor) -> None:
        assert (x.shape, x.dtype) == ((3, 5), torch.bfloat16)
        assert x.stride(0) >= 5
        assert (y.ndim, y.dtype) == (1, torch.float16)

    check()


@pytest.mark.parametrize(
    "predicate",
    [
        lambda x: x.data_ptr() % 16 != 0,
        lambda x: x.data_ptr() % 16 == 0 and x.is_contiguous(),
        lambda x: x.shape[0] > 1 and x.stride(0) > x.shape[1],
        lambda x: x.shape[0] > 1 and x.stride(0) == 0,
        lambda x: x.shape[0] == 1 and x.stride(0) not in (0, x.shape[1]),
        lambda x: x.shape[1] > 1024,
        lambda x: x.shape[1] % 2 == 1 and x.shape[1] > 1,
        lambda x: bool(x.isnan().any()),
        lambda x: bool((x == -float("inf")).any()),
        lambda x: bool(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).any()),
        lambda x: x.dtype == torch.float16,
        lambda x: x.dtype == torch.float32,
    ],
)
def test_hostile_tensors_occur(predicate: Callable[[torch.Tensor], bool]) -> None:
    occurs(strategies.tensors(expanded=True), predicate)


@given(batch=strategies.ragged_batches(6, 200))
def test_ragged_batches(batch: strategies.RaggedBatch) -> None:
    assert batch.seq_lens.dtype == batch.offsets.dtype == torch.int32
    assert 1 <= len(batch.seq_lens) <= 6
    assert len(batch.offsets) == len(batch.seq_lens) + 1
    assert batch.offsets[0] == 0
    assert torch.equal(batch.offsets.diff(), batch.seq_lens)
    assert batch.num_tokens == batch.seq_lens.sum()
    assert 0 <= batch.seq_lens.min() <= batch.seq_lens.max() == batch.max_seq_len <= 200


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200])
def test_interesting_lengths_occur(length: int) -> None:
    occurs(strategies.ragged_batches(6, 200), lambda batch: length in batch.seq_lens.tolist()[1:])


def used_slots(cache: strategies.PagedCache) -> torch.Tensor:
    used = torch.cat([cache.slots(i) for i in range(len(cache.seq_lens))])
    return used[used >= 0].unique()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"])
@given(data=st.data())
def test_paged_caches(dtype: str, data: st.DataObject) -> None:
    cache = data.draw(strategies.paged_caches(dtype, num_heads=3, head_size=32, broken=True))
    blocks, size = cache.num_blocks, cache.block_size
    if cache.layout == "packed":
        x = 16 // getattr(torch, dtype).itemsize
        assert cache.key_cache.shape == (blocks, 3, 32 // x, size, x)
        assert cache.value_cache.shape == (blocks, 3, 32, size)
        assert cache.key_cache.is_contiguous()
        assert cache.value_cache.is_contiguous()
    else:
        assert cache.key_cache.shape == cache.value_cache.shape == (blocks, size, 3, 32)
        assert cache.key_cache.stride() == cache.value_cache.stride()
        assert cache.key_cache.stride(3) == 1
    assert cache.seq_lens.dtype == torch.int32
    assert cache.block_tables.shape[0] == len(cache.seq_lens)
    assert cache.block_tables.shape[1] * size >= cache.seq_lens.max()

    # Element by element, by the definition of each layout.
    used = used_slots(cache)
    filled_slots = 0
    for block in range(blocks):
        for offset in range(size):
            if cache.layout == "packed":
                keys, values = cache.key_cache[block, :, :, offset], cache.value_cache[block, :, :, offset]
            else:
                keys, values = cache.key_cache[block, offset], cache.value_cache[block, offset]
            in_use = bool((used == block * size + offset).any())
            filled_slots += in_use
            for held in (keys, values):
                assert held.float().isnan().all() != in_use
                assert not in_use or not held.float().isnan().any()
    assert filled_slots == len(used)
    for sequence, length in enumerate(cache.seq_lens.tolist()):
        keys, values = cache.tokens(sequence)
        slots = cache.slots(sequence)
        assert len(slots) == length
        assert keys.shape == values.shape == (int((slots >= 0).sum()), 3, 32)
        for row, slot in enumerate(slots[slots >= 0].tolist()):
            block, offset = divmod(slot, size)
            if cache.layout == "packed":
                key = cache.key_cache[block, 2, 5 // x, offset, 5 % x]
                value = cache.value_cache[block, 2, 5, offset]
            else:
                key, value = cache.key_cache[block, offset, 2, 5], cache.value_cache[block, offset, 2, 5]
            assert keys[row, 2, 5].float() == key.float()
            assert values[row, 2, 5].float() == value.float()


def entries(cache: strategies.PagedCache, in_use: bool) -> list[int]:
    """The table entries that sequences need, or the others."""
    found = []
    for row, length in zip(cache.block_tables.tolist(), cache.seq_lens.tolist(), strict=True):
        needed = -(-length // cache.block_size)
        found += row[:needed] if in_use else row[needed:]
    return found


HOSTILE: list[Callable[[strategies.PagedCache, list[int]], bool]] = [
    lambda cache, found: -1 in found,
    lambda cache, found: -(2**31) in found,
    lambda cache, found: cache.num_blocks in found,
    lambda cache, found: 2**31 - 1 in found,
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_entries_occur(hostile: Callable[[strategies.PagedCache, list[int]], bool]) -> None:
    """After the used entries always, and among them only where asked for."""
    small = {"head_size": 16, "max_seqs": 3, "max_seq_len": 40}
    occurs(strategies.paged_caches(**small), lambda cache: hostile(cache, entries(cache, in_use=False)))
    occurs(strategies.paged_caches(broken=True, **small), lambda cache: hostile(cache, entries(cache, in_use=True)))

    @given(cache=strategies.paged_caches(**small))
    def check(cache: strategies.PagedCache) -> None:
        assert all(0 <= block < cache.num_blocks for block in entries(cache, in_use=True))

    check()


@pytest.mark.parametrize(
    "predicate",
    [
        lambda cache: cache.layout == "packed",
        lambda cache: cache.layout == "flash" and cache.key_cache.is_contiguous(),
        lambda cache: cache.layout == "flash" and cache.key_cache.stride(2) > cache.key_cache.stride(1),
        lambda cache: cache.layout == "flash" and cache.key_cache.stride(0) > cache.key_cache[0].numel(),
        lambda cache: cache.block_tables.dtype == torch.int64,
        lambda cache: cache.block_tables.dtype == torch.int32,
        lambda cache: 0 in cache.seq_lens.tolist() and len(cache.seq_lens) > 1,
        lambda cache: any(length % cache.block_size for length in cache.seq_lens.tolist()),
        lambda cache: any(length and length % cache.block_size == 0 for length in cache.seq_lens.tolist()),
        lambda cache: len(set(entries(cache, True))) < len(entries(cache, True)),  # shared
        lambda cache: entries(cache, True) != sorted(entries(cache, True)),  # shuffled
        lambda cache: set(entries(cache, True)) & set(entries(cache, False)),  # a block of other sequences
    ],
)
def test_hostile_caches_occur(predicate: Callable[[strategies.PagedCache], bool]) -> None:
    occurs(strategies.paged_caches(head_size=16, max_seqs=3, max_seq_len=40), lambda cache: bool(predicate(cache)))


def test_impossible_caches() -> None:
    with pytest.raises(ValueError, match='expected "flash" or "packed", got "sparse"'):
        occurs(strategies.paged_caches(layout="sparse"), bool)
    with pytest.raises(ValueError, match="expected a multiple of 8 for packed keys"):
        occurs(strategies.paged_caches(layout="packed", head_size=12), bool)


def code_of(weight: strategies.QuantisedWeight, k: int, n: int) -> float:
    """One quant, by the definition of the format."""
    if weight.format == "awq":
        nibble = (0, 4, 1, 5, 2, 6, 3, 7)[n % 8]
        return (int(weight.weight[k, n // 8]) >> 4 * nibble) & 15
    if weight.format in ("gptq", "gptq_v1"):
        return (int(weight.weight[k // 8, n]) >> 4 * (k % 8)) & 15
    if weight.format == "gptq_8bit":
        return (int(weight.weight[k // 4, n]) >> 8 * (k % 4)) & 255
    return float(weight.weight[k, n].float())


def zero_of(weight: strategies.QuantisedWeight, group: int, n: int) -> int:
    """One zero point, by the definition of the format."""
    if weight.zeros is None:
        return 0
    if weight.format == "awq":
        return (int(weight.zeros[group, n // 8]) >> 4 * (0, 4, 1, 5, 2, 6, 3, 7)[n % 8]) & 15
    if weight.format in ("gptq", "gptq_v1"):
        return ((int(weight.zeros[group, n // 8]) >> 4 * (n % 8)) & 15) + (weight.format == "gptq_v1")
    if weight.format == "gptq_8bit":
        return (int(weight.zeros[group, n // 4]) >> 8 * (n % 4)) & 255
    return int(weight.zeros[group, n])


@pytest.mark.parametrize("name", strategies.FORMATS)
@given(data=st.data())
def test_quantised_weights(name: str, data: st.DataObject) -> None:
    weight = data.draw(strategies.quantised_weights([name], max_k=256, max_n=64))
    k, n = weight.values.shape
    assert k % weight.group_size == n % 32 == 0
    assert k <= 256
    assert n <= 64
    assert weight.scales.shape == (k // weight.group_size, n)
    assert weight.scales.dtype == (torch.float32 if name in ("int8", "fp8") else torch.float16)
    assert weight.weight.is_contiguous()
    assert weight.values.isfinite().all()
    for _ in range(20):
        i, j = data.draw(st.integers(0, k - 1)), data.draw(st.integers(0, n - 1))
        group = i // weight.group_size
        shifted = torch.tensor(code_of(weight, i, j) - zero_of(weight, group, j), dtype=torch.float32)
        assert weight.values[i, j] == shifted * weight.scales[group, j].float()


@pytest.mark.parametrize(
    "predicate",
    [
        lambda weight: weight.group_size < len(weight.values),
        lambda weight: weight.group_size == len(weight.values) > 128,
        lambda weight: bool((weight.scales == 0).any()),
        lambda weight: weight.format == "int8" and weight.zeros is None,
        lambda weight: weight.format == "int8" and weight.zeros is not None,
        lambda weight: weight.format == "gptq_v1" and any(zero_of(weight, 0, n) == 16 for n in range(32)),
        lambda weight: weight.format == "awq" and bool((weight.weight < 0).any()),  # the highest bit of a word
        lambda weight: weight.format == "fp8" and bool((weight.weight.float() == -448).any()),
    ],
)
def test_kinds_of_weights_occur(predicate: Callable[[strategies.QuantisedWeight], bool]) -> None:
    occurs(strategies.quantised_weights(), predicate)


def test_unknown_format() -> None:
    with pytest.raises(ValueError, match="got 'gguf'"):
        occurs(strategies.quantised_weights(["gguf"]), bool)


WITHOUT_HYPOTHESIS = """
import sys
sys.modules["hypothesis"] = None
try:
    from pyops.testing import strategies
except ImportError as error:
    print(type(error).__name__, error)
"""


def test_missing_packages_are_named() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_HYPOTHESIS], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("MissingDependencyError pyops.testing.strategies needs hypothesis, which is not")
    assert "[test]" in done.stdout
