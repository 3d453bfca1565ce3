"""How the weights of a checkpoint are packed, and which projections are not quantised."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from .config_values import refuse


class Ignoring:
    """The base of formats with `ignored`: regular expressions of projections that are not quantised."""

    ignored: tuple[str, ...]

    def covers(self, name: str) -> bool:
        """Whether the projection that a checkpoint calls `name` is quantised."""
        return not any(pattern.fullmatch(name) for pattern in self._patterns)

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        return [re.compile(pattern) for pattern in self.ignored]


@dataclass(frozen=True)
class PackedQuantization(Ignoring):
    """How the projections of a decoder are packed, those of attention and of MLPs; activations are not quantised.

    Attributes:
        format: "awq", "gptq" or "pack-quantized".
        bits: bits of a quantized weight.
        group_size: columns that share a scale; -1 for all.
        has_zeros: the checkpoint has zero points; otherwise the quantization is symmetric.
        lists_groups: the checkpoint has a ``g_idx``: the group of each column.
        has_order: act-order: groups are not consecutive columns.
        is_v2: zero points of GPTQ are used as they are stored; otherwise 1 is added.
        is_symmetric: a GPTQ checkpoint has zero points, but all of them are the symmetric ones.
        ignored: regular expressions. A projection is not quantised if one of them matches its whole name.
        listed: ends of the names of all projections that are quantised; () where only `ignored` says which are not.

    Examples:
        >>> awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
        >>> packed = Quantization.parse(awq)  # Config.parse reads it from a config.json
        >>> packed == PackedQuantization("awq", bits=4, group_size=128), packed.covers("model.layers.0.mlp.down_proj")
        (True, True)
    """

    format: str
    bits: int
    group_size: int
    has_zeros: bool = True
    lists_groups: bool = False
    has_order: bool = False
    is_v2: bool = True
    is_symmetric: bool = False
    ignored: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()

    def covers(self, name: str) -> bool:
        """Whether the projection that a checkpoint calls `name` is quantised."""
        return super().covers(name) and (not self.listed or name.endswith(self.listed))

    def columns_of_group(self, columns: int) -> int:
        """Columns that share a scale in a weight with `columns`; ModelError if groups do not divide them."""
        size = columns if self.group_size == -1 else self.group_size
        if columns % size:
            raise refuse("quantization_config.group_size", f"a number that divides {columns}", size)
        return size
