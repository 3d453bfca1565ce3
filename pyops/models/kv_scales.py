"""Scales of a model's fp8 caches, from a checkpoint or a caller: checks, then writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from .._core.system.lazy import torch
from ..errors import ModelError
from .decoder import Decoder
from .kv_cache import KvScales

if TYPE_CHECKING:
    from torch import Tensor


def scales_by_module(model: Decoder) -> dict[str, KvScales]:
    """{name of a layer's attention in a checkpoint: its scales}, in the order of layers."""
    names = model.config.names
    found = ((f"{names.layers}.{i}.{names.attention}", layer.mixer.scales) for i, layer in enumerate(model.layers))
    return {module: scales for module, scales in found if scales is not None}


def write_kv_scales(model: Decoder, scales: Mapping[str, Tensor | float]) -> None:
    """Set the scales of a model's fp8 caches, before an `Engine` with such a cache is made.

    Args:
        scales: {name: positive numbers}, for each layer of attention under the names that checkpoints have, such as
            ``model.layers.0.self_attn.k_scale`` and ``.v_scale``, or ``.kv_scale`` for both. One number, or a tensor of
            one or of num_key_value_heads elements. Multi-head latent attention has one ``k_scale``, for its latent KV.

    Raises:
        ModelError: a name is unknown or missing, or a scale is not a positive finite number. Nothing is written.

    Examples:
        >>> names = [f"model.layers.{layer}.self_attn.{part}_scale" for layer in (0, 1) for part in "kv"]
        >>> write_kv_scales(model, dict.fromkeys(names, 0.02))
        >>> engine = Engine(model, kv_cache_dtype="fp8")
    """
    check_names("kv_scales", scales, model)
    by_module = scales_by_module(model)
    places = {name: (by_module[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in scales}
    checked = {
        name: checked_scale("kv_scales", name, scale, places[name][0].num_heads) for name, scale in scales.items()
    }
    for name, scale in checked.items():
        places[name][0].write(places[name][1], scale)


def check_names(where: object, names: Collection[str], model: Decoder) -> None:
    """ModelError unless `names` are scales of the model, for all of its attention layers or for none."""
    by_module = scales_by_module(model)
    for name in names:
        module, _, kind = name.rpartition(".")
        if module not in by_module or kind not in ("k_scale", "v_scale", "kv_scale"):
            raise ModelError(where, f"{name}: is no scale of a cache of this architecture")
    for module, scales in by_module.items() if names else ():
        for kind in scales.kinds:
            if f"{module}.{kind}" not in names and f"{module}.kv_scale" not in names:
                raise ModelError(where, f"{module}.{kind}: is missing, and other scales of the cache are there")


def checked_scale(where: object, name: str, scale: Tensor | float, num_heads: int) -> Tensor:
    """`scale` as [1] or [num_heads] float32. ModelError unless it has 1 or num_heads positive finite numbers."""
    found = torch.as_tensor(scale, dtype=torch.float32).flatten()
    if found.numel() not in (1, num_heads):
        counts = f"1 element or {num_heads}" if num_heads > 1 else "1 element"
        raise ModelError(where, f"{name}: expected {counts}, got {found.numel()}")
    wrong = found[~((found > 0) & found.isfinite())]
    if len(wrong):
        raise ModelError(where, f"{name}: expected a positive finite number, got {wrong[0].item()}")
    return found
