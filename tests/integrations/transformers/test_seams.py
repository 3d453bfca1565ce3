"""Attention functions and merged projections by themselves, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from pyops.integrations.transformers import PagedCache
from pyops.integrations.transformers.joined import Joined
from pyops.integrations.transformers.rotary import Step
from pyops.integrations.transformers.seams import Past, attend
from tests.support.small_models import SIZES


def attention(**options: Any) -> tuple[bool, Any, Any]:
    """(whether the module's own function was called, the result of `attend`, the result of SDPA) for 5 tokens."""
    config = transformers.LlamaConfig(**SIZES)
    config._attn_implementation = "sdpa"
    cache, called = PagedCache(config), []
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, 5, 16, generator=generator) for heads in (4, 2, 2))
    k, v = cache.update(k, v, 0)

    def original(*args: Any, **kwargs: Any) -> str:
        called.append(args)
        return "the module's own"

    found = attend(
        original, SimpleNamespace(config=config), q, k, v, None, pyops_past=Past(cache, None, original), **options
    )
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    return bool(called), found, exact.transpose(1, 2)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.0}, {"is_causal": True}, {"output_attentions": False}])
def test_causal_attention_is_computed_by_the_ops(options: dict[str, Any]) -> None:
    is_original, found, exact = attention(**options)
    assert not is_original
    assert found[1] is None
    assert (found[0].double() - exact).abs().max() <= 2.0**-18 * exact.abs().max()


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"is_causal": False}, {"output_attentions": True}])
def test_unsupported_attention_is_left_alone(options: dict[str, Any]) -> None:
    assert attention(**options)[:2] == (True, "the module's own")


def test_layers_of_one_step_have_their_own_masks() -> None:
    """Lengths derived from a mask and a window are reused only by layers with the same mask and window."""
    config = transformers.LlamaConfig(**SIZES)
    config._attn_implementation = "sdpa"
    cache, generator = PagedCache(config), torch.Generator().manual_seed(1)
    step = Step(torch.zeros(1, 5, 64), torch.zeros(1, 5, 16), torch.zeros(1, 5, 16))
    q, k, v = (torch.randn(1, heads, 5, 16, generator=generator) for heads in (4, 2, 2))
    tokens = torch.arange(5)
    causal = tokens <= tokens[:, None]
    padded = causal & (tokens >= 2)
    windowed = causal & (tokens > tokens[:, None] - 3)
    for given, window, seen in ((None, 0, causal), (padded, 0, padded), (windowed, 3, windowed), (None, 0, causal)):
        cache.reset()
        keys, values = cache.update(k, v, 0)
        mask = None if given is None else given[None, None]
        past = Past(cache, step, attend)
        found = attend(
            attend, SimpleNamespace(config=config), q, keys, values, mask, pyops_past=past, sliding_window=window
        )
        exact = torch.nn.functional.scaled_dot_product_attention(
            *(x.double() for x in (q, k, v)), attn_mask=seen, enable_gqa=True
        )
        real = seen.any(-1)
        error = (found[0].double() - exact.transpose(1, 2))[:, real]
        assert error.abs().max() <= 2.0**-18 * exact[:, :, real].abs().max()


def test_projections_on_two_devices_are_not_merged() -> None:
    """As where a part of the weights is offloaded: every projection keeps its memory."""
    linears = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4, device="meta")
    assert Joined(*linears).weights == {}
    assert [linear.weight.device.type for linear in linears] == ["cpu", "meta"]
