"""Scales of fp8 caches from prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._core.system.lazy import torch
from ..errors import ModelError
from .decoder import Decoder
from .engine import Engine
from .kv_scales import scales_by_module, write_kv_scales
from .params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


def calibrate_kv_scales(
    model: Decoder, prompts: Sequence[Sequence[int]], *, per_head: bool = False
) -> dict[str, Tensor]:
    """Set the scales of a model's fp8 caches so that the keys and values of the prompts fill the range of e4m3.

    The prompts run one after the other, over a cache of the model's own dtype. A scale is the absmax of the keys, or of
    the values, divided by 448, the largest e4m3 value; it is 1 if all of them are 0. Call this function before you make
    an `Engine` with an fp8 cache. With tensor parallelism, call it in every process with the same prompts.

    Args:
        prompts: token sequences like those that the model will serve.
        per_head: whether there is a scale for each head of keys and values, instead of one for each layer.

    Returns:
        {name in a checkpoint: [1] or [num_key_value_heads] float32 on the CPU}, which `write_kv_scales` takes and a
        safetensors file next to the weights may hold.

    Raises:
        ModelError: a prompt is refused, or a key or value is not finite.

    Examples:
        >>> scales = calibrate_kv_scales(model, [[1, 2, 3, 4], [5, 6]])
        >>> sorted(scales)[:2]
        ['model.layers.0.self_attn.k_scale', 'model.layers.0.self_attn.v_scale']
        >>> engine = Engine(model, kv_cache_dtype="fp8")
    """
    if not prompts:
        raise ModelError("calibrate_kv_scales", "prompts: expected one or more, got none")
    own, longest = str(model.dtype).removeprefix("torch."), max(map(len, prompts))
    engine = Engine(model, max_num_seqs=1, max_seq_len=longest + 1, graphs=False, kv_cache_dtype=own)
    kept = [cache for layer, cache in zip(model.layers, engine._runner.cache, strict=True) if layer.mixer.scales]
    for cache in kept:
        for tensor in cache:
            tensor.zero_()
    largest: dict[str, Tensor] = {}
    for prompt in prompts:
        engine.generate([prompt], SamplingParams(max_tokens=1))
        for (module, scales), cache in zip(scales_by_module(model).items(), kept, strict=True):
            for kind, written in zip(scales.kinds, cache, strict=False):  # states follow keys and values
                name, found = f"{module}.{kind}", scales.whole(_largest_of_heads(written))
                largest[name] = torch.maximum(largest.get(name, found), found)
    scales_of_prompts = {name: _scale(by_head, per_head) for name, by_head in largest.items()}
    write_kv_scales(model, scales_of_prompts)
    return scales_of_prompts


def _largest_of_heads(written: Tensor) -> Tensor:
    """[num_heads] float32: the largest magnitude of keys or values [num_blocks, block_size, num_heads, head_dim]."""
    by_head = written.flatten(0, 1) if written.ndim == 4 else written.flatten(0, 1).unsqueeze(1)  # latent KV
    return torch.maximum(by_head.amax((0, 2)), -by_head.amin((0, 2))).float()


def _scale(largest: Tensor, per_head: bool) -> Tensor:
    kept = (largest if per_head else largest.amax(0, keepdim=True)).cpu()
    return torch.where(kept == 0, 1.0, kept / torch.finfo(torch.float8_e4m3fn).max)
