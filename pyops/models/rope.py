"""The rotary embedding of a model, as ``config.json`` describes it, and the table that kernels read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log, sqrt
from typing import TYPE_CHECKING, Any

from .._core.system.lazy import torch
from ..ops.rotary import tables as rope_tables
from .config_values import MAX_POSITIONS, first, flag, number, refuse, size

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "divided")
_LONGROPE_NAMES = ("longrope", "su", "yarn")  # names of LongRoPE in Phi-3 checkpoints
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864), with frequencies scaled for long sequences.

    Attributes:
        theta: base of the frequencies.
        kind: "default"; "linear", all frequencies divided by `factor` (Chen et al. 2023, arXiv:2306.15595); "llama3",
            low frequencies divided by `factor` (Llama 3 herd of models, arXiv:2407.21783); "yarn", the same with
            another ramp (Peng et al. 2023, arXiv:2309.00071); "divided", each frequency divided by its own divisor, as
            GGUF files describe "llama3"; "dynamic", which scales only sequences longer than
            ``max_position_embeddings`` and so never scales here; or "longrope", each frequency divided by one of two
            divisors: one for sequences of up to `original_max_position_embeddings` tokens, another for longer ones
            (Ding et al. 2024, arXiv:2402.13753).
        attention_factor: multiplies cosines and sines.
        divisors: for "divided", and for short sequences of "longrope": one divisor for each pair of elements.
        long_divisors: for long sequences of "longrope".
        interleaved: whether adjacent elements rotate as a pair (GPT-J style), and not elements i and i + rotary_dim / 2
            (NeoX style).
        partial_rotary_factor: the fraction of a head that is rotated; the remaining elements stay as they are.
        query_beta: beta of ``1 + beta * log(1 + floor(position / original_max_position_embeddings))``, which multiplies
            queries; 0 for none.
        factor, low_freq_factor, high_freq_factor, original_max_position_embeddings, beta_fast, beta_slow, truncate: as
            in ``config.json``.

    Examples:
        >>> rope = Rope.parse({"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}})
        >>> rope.kind, rope.factor, rope.cos_sin(head_dim=64, num_positions=128).shape
        ('linear', 4.0, torch.Size([128, 64]))
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    partial_rotary_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    interleaved: bool = False
    query_beta: float = 0.0

    @classmethod
    def parse(
        cls, values: dict[str, Any], partial_rotary_factor: float | None = None, has_longrope: bool = False
    ) -> Rope:
        """Read the rotary embedding from a ``config.json`` object, as transformers does.

        New files have ``rope_parameters``. Older files have ``rope_theta`` and ``rope_scaling``; if a file has both
        objects, ``rope_scaling`` counts. `partial_rotary_factor` is the architecture's, where the file gives no other;
        None for an architecture that rotates whole heads. `has_longrope` says that the architecture scales by
        "longrope" or not at all.
        """
        found = _object(values)
        kind = first(found.get("rope_type"), found.get("type"), "default")
        kinds = ("default", *_LONGROPE_NAMES) if has_longrope else _KINDS
        if kind not in kinds:
            raise refuse("rope_type", " or ".join(kinds), kind)
        partial = found.get("partial_rotary_factor", partial_rotary_factor or 1.0)
        if partial_rotary_factor is None and partial != 1.0:
            raise refuse("partial_rotary_factor", "1.0", partial)
        partial = number("partial_rotary_factor", partial)
        if partial > 1:
            raise refuse("partial_rotary_factor", "at most 1", partial)
        theta = number("rope_theta", first(found.get("rope_theta"), values.get("rope_theta"), 10000.0))
        if theta <= 1.0:
            raise refuse("rope_theta", "more than 1", theta)
        if kind == "default":
            return cls(theta, partial_rotary_factor=partial)
        if has_longrope:
            return _longrope(cls(theta, "longrope", partial_rotary_factor=partial), values, found)
        if kind == "divided":
            return cls(theta, kind, partial_rotary_factor=partial, divisors=_numbers(found, "divisors"))
        rope = cls(theta, kind, _number(found, "factor"), partial_rotary_factor=partial)
        if kind in ("llama3", "yarn"):
            original = first(values.get(_ORIGINAL), found.get(_ORIGINAL), values.get("max_position_embeddings"))
            rope = replace(rope, original_max_position_embeddings=size(_ORIGINAL, original))
        return _llama3(rope, found) if kind == "llama3" else _yarn(rope, found) if kind == "yarn" else rope

    @classmethod
    def parse_mistral(cls, values: dict[str, Any], partial_rotary_factor: float | None = None) -> Rope:
        """As `parse`, with the position-dependent query scaling of Ministral 3 and Mistral 4."""
        rope, found = cls.parse(values, partial_rotary_factor), _object(values)
        beta = found.get("llama_4_scaling_beta")
        if beta is None or beta == 0:
            return rope
        original = size(_ORIGINAL, first(values.get(_ORIGINAL), found.get(_ORIGINAL)))
        return replace(
            rope, query_beta=_number(found, "llama_4_scaling_beta"), original_max_position_embeddings=original
        )

    def check(self, head_dim: int) -> None:
        """ModelError if heads of `head_dim` elements cannot be rotated this way."""
        rotary_dim = self.rotary_dim(head_dim)
        if not rotary_dim or rotary_dim % 2:
            raise refuse("partial_rotary_factor", f"an even number of {head_dim} elements", self.partial_rotary_factor)
        names = {"divided": ("divisors",), "longrope": ("short_factor", "long_factor")}.get(self.kind, ())
        for name, numbers in zip(names, (self.divisors, self.long_divisors), strict=False):
            if len(numbers) != rotary_dim // 2:
                raise refuse(f"rope_parameters.{name}", f"{rotary_dim // 2} numbers", numbers)

    def rotary_dim(self, head_dim: int) -> int:
        """How many elements of a head are rotated: the first `rotary_dim`."""
        return int(head_dim * self.partial_rotary_factor)

    @property
    def max_short_length(self) -> int:
        """The longest short sequence, in tokens. A longer one uses the long frequencies from its first token on."""
        return self.original_max_position_embeddings if self.kind == "longrope" else MAX_POSITIONS

    def scale_queries(self, query: Tensor, positions: Tensor) -> None:
        """Multiply queries [num_tokens, ...] in place by the factor of their positions, see `query_beta`."""
        if self.query_beta:
            steps = torch.floor(positions / self.original_max_position_embeddings)
            scale = 1 + self.query_beta * torch.log(1 + steps)
            query *= scale.to(query.dtype).view(-1, *[1] * (query.ndim - 1))

    def frequencies(self, head_dim: int, device: Any = "cpu", is_long: bool = False) -> Tensor:
        """The rotation angle of each pair per position: [rotary_dim / 2] float32, in radians."""
        rotary_dim = self.rotary_dim(head_dim)
        if self.kind == "yarn":
            ramp = self.original_max_position_embeddings, self.beta_fast, self.beta_slow
            return rope_tables.yarn(rotary_dim, self.theta, self.factor, *ramp, truncate=self.truncate, device=device)
        plain = rope_tables.frequencies(rotary_dim, self.theta, device)
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "longrope":  # one division, so that rounding equals transformers'
            base = self.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=device).float() / rotary_dim)
            divisors = self.long_divisors if is_long else self.divisors
            return 1.0 / (torch.tensor(divisors, dtype=torch.float32, device=device) * base)
        if self.kind == "divided":
            return plain / torch.tensor(self.divisors, dtype=torch.float32, device=device)
        if self.kind == "llama3":
            edges = self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
            return rope_tables.llama3(plain, self.factor, *edges)
        return plain

    def cos_sin(self, head_dim: int, num_positions: int, device: Any = "cpu") -> Tensor:
        """The cos/sin table that ops take: [num_positions, rotary_dim] float32; a row is cosines, then sines.

        If sequences of num_positions tokens are long, the shape is [2 * num_positions, rotary_dim]: the rows for long
        sequences follow those for short ones.
        """
        kinds = (False, True) if num_positions > self.max_short_length else (False,)
        angles = torch.cat(
            [rope_tables.angles(self.frequencies(head_dim, device, is_long), num_positions) for is_long in kinds]
        )
        return rope_tables.cos_sin(angles, self.attention_factor)


def _object(values: dict[str, Any]) -> dict[str, Any]:
    """The object that describes RoPE scaling in a file: ``rope_scaling``, or ``rope_parameters``."""
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        found = first(values.get(name), {})
        if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
            raise refuse(name, "one object for all layers", found)
        if found:
            break
    return found


def _llama3(rope: Rope, found: dict[str, Any]) -> Rope:
    low, high = (_number(found, name) for name in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise refuse("rope_parameters.high_freq_factor", "more than low_freq_factor", high)
    return replace(rope, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: Rope, found: dict[str, Any]) -> Rope:
    def given(name: str, default: float) -> float:
        return _number(found, name) if found.get(name) else default  # 0 counts as absent

    one, all_dim = given("mscale", 0.0), given("mscale_all_dim", 0.0)
    if not (one and all_dim):
        one, all_dim = 1.0, 0.0
    attention_factor = rope_tables.yarn_mscale(rope.factor, one) / rope_tables.yarn_mscale(rope.factor, all_dim)
    if found.get("attention_factor") is not None:
        attention_factor = _number(found, "attention_factor")
    return replace(
        rope,
        attention_factor=attention_factor,
        beta_fast=given("beta_fast", 32.0),
        beta_slow=given("beta_slow", 1.0),
        truncate=flag(found, "truncate", True),
    )


def _longrope(rope: Rope, values: dict[str, Any], found: dict[str, Any]) -> Rope:
    original = size(_ORIGINAL, first(values.get(_ORIGINAL), 4096))
    positions = size("max_position_embeddings", first(values.get("max_position_embeddings"), 4096))
    factor = positions / original if found.get("factor") is None else _number(found, "factor")
    attention_factor = 1.0 if factor <= 1 or original == 1 else sqrt(1 + log(factor) / log(original))
    if found.get("attention_factor") is not None:
        attention_factor = _number(found, "attention_factor")
    return replace(
        rope,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        divisors=_numbers(found, "short_factor"),
        long_divisors=_numbers(found, "long_factor"),
    )


def _numbers(found: dict[str, Any], name: str) -> tuple[float, ...]:
    if not isinstance(found.get(name), list):
        raise refuse(f"rope_parameters.{name}", "a list of numbers", found.get(name))
    return tuple(number(f"rope_parameters.{name}", one) for one in found[name])


def _number(found: dict[str, Any], name: str) -> float:
    return number(f"rope_parameters.{name}", found.get(name))
