"""PagedCache against transformers' DynamicCache: the same calls give the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from pyops.integrations.transformers import PagedCache
from tests.support.small_models import SIZES

CONFIG = transformers.LlamaConfig(**SIZES)
Caches = tuple[PagedCache, transformers.DynamicCache]


def states(count: int, batch: int = 3, dtype: torch.dtype = torch.float32, seed: int = 1) -> list[torch.Tensor]:
    """Keys and values of new tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 2, count, 16, generator=generator).to(dtype) for _ in "kv"]


def update(caches: Caches, *given: Any, **options: Any) -> None:
    """Update every layer of both caches with the same tokens; results and contents are the same."""
    new = states(*given, **options)
    for i in range(2):
        found, expected = (cache.update(*new, i) for cache in caches)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def same(caches: Caches) -> None:
    ours, theirs = caches
    assert int(ours.get_seq_length()) == int(theirs.get_seq_length())
    assert ours.get_mask_sizes(2, 0) == theirs.get_mask_sizes(2, 0)
    assert ours.get_max_length() == theirs.get_max_length()
    for name in ("is_compileable", "is_croppable", "is_sliding", "is_initialized", "is_linear"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for kept, expected in zip(ours, theirs, strict=True):
        for a, b in zip(kept, expected, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.fixture
def caches() -> Caches:
    found = PagedCache(CONFIG), transformers.DynamicCache(config=CONFIG)
    same(found)
    update(found, 5)
    update(found, 1, seed=2)
    same(found)
    return found


CALLS: dict[str, tuple[str, tuple[Any, ...], int]] = {  # the last number is the batch size after the call
    "crop": ("crop", (-2,), 3),
    "crop nothing": ("crop", (0,), 3),
    "crop everything": ("crop", (-6,), 3),
    "crop more": ("crop", (-9,), 3),
    "reorder": ("reorder_cache", (torch.tensor([2, 0, 0]),), 3),
    "reorder to one": ("reorder_cache", (torch.tensor([1]),), 1),
    "reorder to more": ("reorder_cache", (torch.tensor([1, 1, 0, 2]),), 4),
    "repeat": ("batch_repeat_interleave", (2,), 6),
    "select": ("batch_select_indices", (torch.tensor([2, 0]),), 2),
    "select by a mask": ("batch_select_indices", (torch.tensor([True, False, True]),), 2),
    "select by a list": ("batch_select_indices", ([1],), 1),
    "reset": ("reset", (), 3),
    "reset, another batch": ("reset", (), 5),
}


@pytest.mark.parametrize("case", CALLS)
def test_each_call(case: str, caches: Caches) -> None:
    name, args, batch = CALLS[case]
    for cache in caches:
        getattr(cache, name)(*args)
    same(caches)
    update(caches, 2, batch, seed=3)
    update(caches, 300, batch, seed=4)
    same(caches)


@pytest.mark.parametrize("case", CALLS)
def test_call_before_any_token(case: str) -> None:
    found = PagedCache(CONFIG), transformers.DynamicCache(config=CONFIG)
    name, args, _ = CALLS[case]
    for cache in found:
        getattr(cache, name)(*args)
    same(found)


def test_bad_calls_are_refused(caches: Caches) -> None:
    for cache in caches:
        with pytest.raises(ValueError, match="crop"):
            cache.crop(4)
        with pytest.raises((ValueError, RuntimeError)):
            cache.update(*states(1, 2), 0)
    same(caches)


def test_another_dtype(caches: Caches) -> None:
    """Keys and values are promoted independently."""
    update(caches, 1, dtype=torch.bfloat16)
    keys, values = states(1)
    for i in range(2):
        found, expected = (cache.update(keys, values.double(), i) for cache in caches)
        assert all(map(torch.equal, found, expected))
    same(caches)


def test_early_initialization() -> None:
    found = PagedCache(CONFIG), transformers.DynamicCache(config=CONFIG)
    for cache in found:
        cache.early_initialization(3, 2, 16, torch.float32, torch.device("cpu"))
    update(found, 4)
    same(found)


def test_cache_of_fixed_size() -> None:
    """Against a StaticCache: crop, reorder and reset; a token that does not fit is refused."""
    caches = PagedCache(CONFIG, 24), transformers.StaticCache(config=CONFIG, max_cache_len=24)

    def same() -> None:
        ours, theirs = caches
        assert int(ours.get_seq_length()) == int(theirs.get_seq_length())
        assert ours.get_mask_sizes(2, 0) == theirs.get_mask_sizes(2, 0)
        assert ours.get_max_length() == theirs.get_max_length()
        assert ours.is_compileable
        length = int(ours.get_seq_length())
        for a, b in zip(ours.layers, theirs.layers, strict=True):
            assert torch.equal(a.keys[:, :, :length], b.keys[:, :, :length])

    for name, args in (("crop", (0,)), ("crop", (-2,)), ("reorder_cache", (torch.tensor([2, 0, 0]),)), ("reset", ())):
        for cache in caches:
            for i in range(2):
                cache.update(*states(4), i)
            getattr(cache, name)(*args)
        same()
    for cache in caches:
        with pytest.raises((ValueError, RuntimeError)):
            cache.crop(4)
        cache.update(*states(2), 0)
        with pytest.raises((ValueError, RuntimeError)):
            cache.update(*states(1, dtype=torch.bfloat16), 0)


def test_gradients_are_not_lost_silently() -> None:
    keys, values = states(2)
    cache = PagedCache(CONFIG)
    with pytest.raises(ValueError, match="would lose their gradients"):
        cache.update(keys.requires_grad_(), values, 0)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        cache.update(keys, values, 0)
    assert cache.get_seq_length() == 2
