"""The cache that `generate` makes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.generation import GenerationMode

from .cache import CACHE, PagedCache
from .replacement import Replacement
from .seams import IMPLEMENTATIONS

_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


class Generation(Replacement):
    """Replaces the method by which `generate` makes its DynamicCache or StaticCache; it makes a PagedCache."""

    op = "a PagedCache"

    def original(self, *args: Any, **kwargs: Any) -> None:
        type(self.module)._prepare_cache_for_generation(self.module, *args, **kwargs)

    def install(self) -> None:
        self.module._prepare_cache_for_generation = self.forward

    def watch(self) -> None:
        """Nothing to watch: a PagedCache works with any forward."""

    def remove(self) -> None:
        if vars(self.module).get("_prepare_cache_for_generation") == self.forward:
            del self.module._prepare_cache_for_generation

    def forward(
        self, generation_config: Any, model_kwargs: Any, generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        given = model_kwargs.get(CACHE)
        self.original(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        cache = model_kwargs.get(CACHE)
        if (
            given is None
            and type(cache) in (DynamicCache, StaticCache)
            and all(type(layer) in _LAYERS for layer in cache.layers)
            and not cache.offloading
            and generation_mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
            and not generation_config.is_assistant
            and generation_config.prefill_chunk_size is None
            # attention weights would have the width of the cache
            and not generation_config.output_attentions
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled(self.module.device.type)
            and self.module.config._attn_implementation in IMPLEMENTATIONS
            and _padded_on_the_left(model_kwargs.get("attention_mask"))
        ):
            longest = None
            if type(cache) is StaticCache:
                # At least as long as in the previous call, so that a compiled step is not compiled again.
                longest = max(max_cache_length, getattr(self.module, "_previous_max_cache_length", 0))
            model_kwargs[CACHE] = PagedCache(self.module.config, longest)


def _padded_on_the_left(mask: Any) -> bool:
    """Whether a mask [batch, length] is None, or its ones are the last of each row, and at least one."""
    if mask is None:
        return True
    return mask.ndim == 2 and bool((mask[:, 1:] >= mask[:, :-1]).all() & (mask[:, -1] == 1).all())
