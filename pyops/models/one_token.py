"""A decode step of one token: projections normalise their input, and add their output to the residual.

Such a step is short kernels that wait for each other, so fewer kernels are faster: a Llama layer has five, not nine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..ops.linear import gemm_rates
from ..ops.linear.skinny_linear import MAX_NORMALISED_BYTES
from ..tuning import batch_invariant
from .attention import Attention
from .batch import Batch
from .experts import Experts
from .latent_attention import LatentAttention
from .layers import Layer
from .linear import Linear, gpu_of
from .parts import Norms
from .rope import Rope

if TYPE_CHECKING:
    from torch import Tensor

    from .._core.system.device import Device

# The bytes of a weight that are prefetched, in us at the memory's rate: by the product with W_v, which starts while MLA
# decode runs, and by the output projection. Measured on an H200: docs/performance/products.md, "prefetches a part".
_LATENT_AHEAD_US, _AHEAD_US = 3.0, 2.0


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


def set_prefetches(layers: Sequence[Layer], gpu: Device | None) -> None:
    """Has a kernel that starts while attention runs prefetch a part of the weight that the layer's MLP reads first.

    This is the product with W_v of latent attention, else the output projection. Where only the router says which
    weights are first, the output projection prefetches its own.
    """
    if gpu is None or not gpu.overlaps:
        return
    rate = gemm_rates.of(gpu).bytes_per_us
    for layer in filter(_adds, layers):
        mixer, first = layer.mixer, _first_weight(layer.mlp)
        if isinstance(mixer, LatentAttention):
            mixer.prefetched = None if first is None else _part(first, _LATENT_AHEAD_US * rate)
        elif isinstance(mixer, Attention) and isinstance(mixer.o, Linear):
            weight = mixer.o.weight if first is None else first
            mixer.o = mixer.o._replace(prefetched=_part(weight, _AHEAD_US * rate))


def _first_weight(mlp: Any) -> Tensor | None:
    """The weight that an MLP or the shared expert of a layer of experts reads first; None where there is none."""
    mlp = mlp.shared if isinstance(mlp, Experts) else mlp
    return mlp.gate_up.weight if mlp is not None and isinstance(mlp.gate_up, Linear) else None


def _part(weight: Tensor, nbytes: float) -> Tensor:
    """The first columns of a weight, about this many bytes: loads of a row then wait for memory and for L2 alike."""
    return weight[:, : int(nbytes / (weight.shape[0] * weight.element_size()))]


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
