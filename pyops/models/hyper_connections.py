"""Hyper-connections of a decoder: a residual of several streams (DeepSeek-V4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.system.lazy import torch
from ..ops.norm import hc_head, mhc_fused_post_pre, mhc_post, mhc_pre
from .compressed import HyperConnections
from .config import Config
from .norm import Norm

if TYPE_CHECKING:
    from torch import Tensor

_POST_FACTOR = 2.0  # largest coefficient of an output in a stream


class HyperConnection:
    """The weights by which the streams become the input of a part of a layer, and its output changes them.

    Args:
        config: sizes; `streams` is given.
        name: of the weights in a checkpoint, before their kinds.
        columns, scales: coefficients, and their factors.
        device: of the weights, which are float32.
    """

    def __init__(self, config: Config, name: str, columns: int, scales: int, device: Any) -> None:
        assert config.streams is not None
        sizes = {"fn": (columns, config.streams.streams * config.hidden_size), "base": (columns,), "scale": (scales,)}
        self.weights = {kind: torch.empty(shape, dtype=torch.float32, device=device) for kind, shape in sizes.items()}
        self.name = name

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: the weights}."""
        return {f"{self.name}_{kind}": tensor for kind, tensor in self.weights.items()}

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """The projection, the factors and the biases, as the ops take them."""
        return self.weights["fn"], self.weights["scale"], self.weights["base"]

    @classmethod
    def of_layer(cls, config: Config, device: Any) -> tuple[HyperConnection, ...]:
        """Those of attention and of the MLP; none if the residual is one stream."""
        if config.streams is None:
            return ()
        columns = config.streams.streams * (config.streams.streams + 2)
        return tuple(cls(config, name, columns, 3, device) for name in ("hc_attn", "hc_ffn"))


class Streams:
    """The streams of the tokens of a forward pass.

    Args:
        embedded: [num_tokens, hidden_size], which all streams begin with.
        settings: of the hyper-connections.
        epsilon: of the norms.
    """

    def __init__(self, embedded: Tensor, settings: HyperConnections, epsilon: float) -> None:
        self.settings, self.epsilon = settings, epsilon
        self.residual = embedded.unsqueeze(1).repeat(1, settings.streams, 1)
        self._changes: tuple[Tensor, ...] = ()  # the coefficients of the part that has begun

    def input(self, connection: HyperConnection, norm: Norm | None, output: Tensor | None) -> Tensor:
        """The input of the next part, normalised; `output` is that of the part before, None for the first."""
        assert norm is not None
        epsilon = self.settings.epsilon
        how = self.epsilon, epsilon, epsilon, _POST_FACTOR, self.settings.iterations, norm.weight, norm.epsilon
        if output is None:
            *changes, hidden = mhc_pre(self.residual, *connection.arguments, *how)
        else:
            found = mhc_fused_post_pre(output, self.residual, *self._changes, *connection.arguments, *how)
            self.residual, *changes, hidden = found
        self._changes = tuple(changes)
        return hidden

    def collapsed(self, output: Tensor, connection: HyperConnection) -> Tensor:
        """The streams after the last part as one: [num_tokens, hidden_size]."""
        streams = mhc_post(output, self.residual, *self._changes)
        found: Tensor = hc_head(streams, *connection.arguments, self.epsilon, self.settings.epsilon)
        return found
