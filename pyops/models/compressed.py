"""Compressed attention and hyper-connections as ``config.json`` describes them: those of DeepSeek-V4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..ops.attention.mla_problem import LATENT_SIZE, ROPE_SIZE
from .config_values import first, is_integer, number, refuse, size
from .family import layer_kinds
from .latent import Indexer
from .rope import Rope

_WINDOW, _INDEXED, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_KINDS = {0: _WINDOW, 4: _INDEXED, 128: _HEAVY}  # {entry of ``compress_ratios``: kind of the layer}
_STREAMS = 1, 2, 4  # numbers of streams that `mhc_pre` supports


class Compression(NamedTuple):
    """How a layer compresses keys.

    Attributes:
        ratio: tokens of a window, which become one key.
        is_indexed: whether windows overlap, and an indexer chooses the compressed keys that a token attends to.
    """

    ratio: int
    is_indexed: bool


@dataclass(frozen=True)
class Compressed:
    """Attention to a window of tokens and to compressed keys of all windows before (DeepSeek-AI 2026, DeepSeek-V4).

    A key of 512 elements, 64 of them rotated, is also its value, and all heads share it.

    Attributes:
        q_lora_rank: elements of the vector from which queries are projected.
        groups, o_lora_rank: groups of heads with an output projection of their own, and its rows.
        window: tokens of the sliding window.
        layers: for each layer, how it compresses keys; None where it attends to the window alone.
        indexer: sizes of the indexer of the layers that have one.

    Examples:
        >>> Compressed(64, groups=2, o_lora_rank=32, window=128, layers=(None,), indexer=Indexer(4, 128, 512)).groups
        2
    """

    q_lora_rank: int
    groups: int
    o_lora_rank: int
    window: int
    layers: tuple[Compression | None, ...]
    indexer: Indexer

    def __post_init__(self) -> None:
        for name, value in (("q_lora_rank", self.q_lora_rank), ("o_groups", self.groups)):
            size(name, value)
        size("o_lora_rank", self.o_lora_rank)
        size("sliding_window", self.window)
        if self.indexer.head_dim < ROPE_SIZE:
            raise refuse("index_head_dim", f"at least {ROPE_SIZE}", self.indexer.head_dim)

    @classmethod
    def parse(cls, values: dict[str, Any], layers: int) -> Compressed:
        """Read the sizes from a ``config.json`` object, with the defaults of transformers."""
        for name, served in (("head_dim", LATENT_SIZE), ("num_key_value_heads", 1)):
            if values.get(name) != served:
                raise refuse(name, str(served), values.get(name))
        heads, groups = values["num_attention_heads"], size("o_groups", first(values.get("o_groups"), 8))
        if heads % groups:
            raise refuse("o_groups", f"a divisor of num_attention_heads={heads}", groups)
        ratios, kinds = _ratios(values), _kinds(values, layers)
        compressions = {kind: Compression(ratio, kind == _INDEXED) for kind, ratio in ratios.items()}
        return cls(
            size("q_lora_rank", first(values.get("q_lora_rank"), 1024)),
            groups,
            size("o_lora_rank", first(values.get("o_lora_rank"), 1024)),
            size("sliding_window", first(values.get("sliding_window"), 128)),
            tuple(compressions.get(kind) for kind in kinds),
            Indexer.parse({"index_topk": 512} | values),
        )

    def ropes(self, values: dict[str, Any]) -> tuple[Rope, ...]:
        """The rotary embedding of each layer. Layers that compress keys have one of their own."""
        rotated = size("qk_rope_head_dim", first(values.get("qk_rope_head_dim"), ROPE_SIZE))
        share = first(values.get("partial_rotary_factor"), rotated / LATENT_SIZE)
        given = first(values.get("rope_scaling"), {}) or first(values.get("rope_parameters"), {})
        if not isinstance(given, dict):
            raise refuse("rope_parameters", "an object", given)
        theta = {"rope_theta": first(values.get("rope_theta"), 10000.0)}
        of_keys = {"rope_theta": first(values.get("compress_rope_theta"), 160000.0)}
        if isinstance(given.get("main"), dict) and isinstance(given.get("compress"), dict):
            objects = given["main"], given["compress"]
        else:
            kind = first(given.get("rope_type"), given.get("type"), "default")
            factor = {"attention_factor": 1.0} if kind == "yarn" else {}  # in place of the one that YaRN computes
            objects = theta, factor | given | of_keys
        main, compress = (Rope.parse(values | {"rope_parameters": one, "rope_scaling": None}, share) for one in objects)
        for rope in (main, compress):
            if rope.rotary_dim(LATENT_SIZE) != ROPE_SIZE:
                raise refuse("qk_rope_head_dim", str(ROPE_SIZE), rope.rotary_dim(LATENT_SIZE))
        return tuple(main if layer is None else compress for layer in self.layers)


def _ratios(values: dict[str, Any]) -> dict[str, int]:
    """{kind of layer: tokens of a window}."""
    given = first(values.get("compress_rates"), {})
    if not isinstance(given, dict):
        raise refuse("compress_rates", "an object", given)
    names = {_INDEXED: ("compress_rate_csa", 4), _HEAVY: ("compress_rate_hca", 128)}
    return {
        kind: size(f"compress_rates.{kind}", first(values.get(name), given.get(kind), default))
        for kind, (name, default) in names.items()
    }


def _kinds(values: dict[str, Any], layers: int) -> list[str]:
    """The kind of each layer, by ``layer_types`` or ``compress_ratios``; else two heavily compressed ones first."""
    numbers = values.get("compress_ratios")
    if numbers is not None and values.get("layer_types") is None:
        known = isinstance(numbers, list) and all(is_integer(one) and one in _KINDS for one in numbers)
        if not known or len(numbers) < layers:
            raise refuse("compress_ratios", f"{layers} of {', '.join(map(str, _KINDS))}", numbers)
        return [_KINDS[one] for one in numbers[:layers]]
    kinds = [_HEAVY if i < 2 or i % 2 == 0 else _INDEXED for i in range(layers)]
    return layer_kinds(values, kinds, tuple(_KINDS.values()))


class HyperConnections(NamedTuple):
    """Manifold-constrained hyper-connections: the residual is several streams (Xie et al. 2026).

    Attributes:
        streams: their number.
        iterations: Sinkhorn-Knopp iterations.
        epsilon: added to the coefficients and to their divisors.
    """

    streams: int
    iterations: int
    epsilon: float

    @classmethod
    def parse(cls, values: dict[str, Any]) -> HyperConnections:
        """Read the settings from a ``config.json`` object, with the defaults of transformers."""
        streams = first(values.get("hc_mult"), 4)
        if not is_integer(streams) or streams not in _STREAMS:
            raise refuse("hc_mult", " or ".join(map(str, _STREAMS)), streams)
        iterations = size("hc_sinkhorn_iters", first(values.get("hc_sinkhorn_iters"), 20))
        return cls(streams, iterations, number("hc_eps", first(values.get("hc_eps"), 1e-6)))
