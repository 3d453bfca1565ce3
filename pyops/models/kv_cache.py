"""The dtype of a paged cache, and the scales of its fp8 values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.system.lazy import torch
from ..errors import ModelError
from ..ops._shared import fp8
from .config import Config

if TYPE_CHECKING:
    from torch import Tensor

KV_SCALES = (".k_scale", ".v_scale", ".kv_scale")  # suffixes of the scales' names; ".kv_scale" serves keys and values


def cache_dtype(config: Config, dtype: torch.dtype, kv_cache_dtype: str) -> torch.dtype:
    """The dtype of a cache of a model of `dtype`, by the `kv_cache_dtype` of an `Engine`.

    Raises:
        ModelError: attention of this model does not support such a cache.
    """
    own = str(dtype).removeprefix("torch.")
    asked = config.kv_cache_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    if asked in ("auto", own):
        return dtype
    served = [name for name in fp8.FP8_CACHES if config.latent is None or "e5m2" not in name]
    if config.compressed is not None:
        served = []
    if asked not in served:
        expected = ", ".join(map(repr, ("auto", *served)))
        of_latent = " with latent attention" if config.latent is not None else ""
        raise ModelError("kv_cache_dtype", f"expected {expected} or {own!r}{of_latent}, got {asked!r}")
    found: torch.dtype = getattr(torch, fp8.FP8_CACHES[asked].name)
    return found


class KvScales:
    """The scales of a layer's fp8 cache: ``key = fp8 value * scale``, likewise for values. They are 1 until written.

    Args:
        kinds: the suffixes of their names in a checkpoint, in the order of the layer's caches.
        num_heads: KV heads; 1 for a latent KV cache.
        device: device of the scales.

    Attributes:
        keys, values: [num_heads] float32; all equal if a checkpoint has one scale for the tensor.
        first: ``keys[0]`` as a Python float.
        num_heads: KV heads of all tensor-parallel processes together.
    """

    def __init__(self, kinds: tuple[str, ...], num_heads: int, device: Any) -> None:
        self.kinds, self.first, self.num_heads = kinds, 1.0, num_heads
        self.keys, self.values, self._one = (
            torch.ones(size, dtype=torch.float32, device=device) for size in (num_heads, num_heads, 1)
        )

    def write(self, kind: str, scale: Tensor) -> None:
        """Set the scales of `kind`, the last part of a name in `KV_SCALES`, to [1] or [num_heads] numbers."""
        scale = self.own(scale)
        if kind != "v_scale":
            self.keys.copy_(scale)
            self.first = float(scale.flatten()[0])
        if kind != "k_scale":
            self.values.copy_(scale)

    def own(self, scale: Tensor) -> Tensor:
        """The scales of this process's heads, from `scale` [1] or [num_heads]."""
        return scale

    def whole(self, own: Tensor) -> Tensor:
        """[num_heads] scales of all processes; `own` are those of this process."""
        return own

    def arguments(self, dtype: torch.dtype) -> tuple[str, Tensor, Tensor]:
        """``kv_cache_dtype, k_scale, v_scale`` of the ops, for a cache of `dtype`."""
        name = fp8.name_of_cache(dtype)
        # Ops ignore the scales of a cache that is not fp8. A [1] tensor avoids a specialisation for per-head scales.
        return (name, self._one, self._one) if name == "auto" else (name, self.keys, self.values)
