"""A decode step of one token: projections normalise their input, and add their output to the residual.

Such a step is short kernels that wait for each other, so fewer kernels are faster: a Llama layer has five, not nine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..ops.linear.skinny_linear import MAX_NORMALISED_BYTES
from ..tuning import batch_invariant
from .attention import Attention
from .batch import Batch
from .latent_attention import LatentAttention
from .layers import Layer
from .linear import gpu_of
from .parts import Norms
from .rope import Rope

if TYPE_CHECKING:
    from torch import Tensor


def serves(decoder: Any, batch: Batch) -> bool:
    """Whether `residual` serves the layers of a `Decoder` and this batch."""
    config = decoder.config
    if len(batch.tokens) > 1 or gpu_of(batch.tokens) is None or batch_invariant() or not decoder.adds_at_once:
        return False
    if (
        config.norms != Norms()
        or config.multipliers.residual != 1
        or config.parallel_residual
        or config.residual_in_float32
    ):
        return False
    fits = config.hidden_size * decoder.dtype.itemsize <= MAX_NORMALISED_BYTES
    return fits and all(_adds(layer) for layer in decoder.layers)


def _adds(layer: Layer) -> bool:
    is_attention = isinstance(layer.mixer, Attention | LatentAttention) and layer.mixer.adds
    return is_attention and layer.mlp is not None and layer.mlp.adds


def residual(
    layers: Sequence[Layer],
    residual: Tensor,
    batch: Batch,
    cache: Sequence[tuple[Tensor, ...]],
    tables: dict[Rope, Tensor],
) -> Tensor:
    """The residual after all layers: [1, hidden_size]. Writes `cache`.

    Args:
        residual: the embedded token.
    """
    for layer, kept in zip(layers, cache, strict=True):
        assert isinstance(layer.mixer, Attention | LatentAttention)
        assert layer.mlp is not None
        assert layer.input_norm is not None
        assert layer.mlp_norm is not None
        residual = layer.mixer.add_to(residual, layer.input_norm, batch, kept, tables)
        residual = layer.mlp.add_norm_to(residual, layer.mlp_norm)
    return residual
