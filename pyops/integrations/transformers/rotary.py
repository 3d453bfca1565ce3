"""RoPE: the cosines and sines of a forward pass, and the functions that rotate queries and keys by them."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.rotary import apply_rotary_emb, flashinfer_rotary_embedding, rotary_embedding
from .cache import Sequences
from .replacement import Replacement
from .trial import Unknown, agree, forward_of, randn, tried, twin

_LAYOUTS = ("halves", "pairs", "single")
_PARAMETERS = ("q", "k", "cos", "sin")
_BATCH, _HEADS, _TOKENS, _HEAD_DIM = 2, 2, 3, 16  # sizes of a trial
POSITIONS = 40_000  # positions of a trial: far enough to detect a forward that changes past its training length
_turns: dict[Any, Turn | None] = {}


class Left(NamedTuple):
    """The result of a layer for the next: its hidden states, and `normalised`, their norm by the module `norm`."""

    hidden_states: Tensor
    normalised: Tensor
    norm: Any


class Step(tuple[Tensor, Tensor]):
    """The (cosines, sines) of a forward pass, and further state that its layers share.

    Attributes:
        slots: [batch * count] slots of the new tokens in a PagedCache, or None before a layer has found them.
        sequences: (mask, sliding window, the sequences in a PagedCache) for each combination that a layer has; the
            sequences are None for a mask that the ops do not support.
        left: set by a layer for the next one.
    """

    def __new__(cls, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Step:
        return super().__new__(cls, (cos, sin))

    def __init__(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> None:
        self._shape = hidden_states.shape[:2]
        self._tables: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]] = {}
        self.slots: Tensor | None = None
        self.sequences: list[tuple[Tensor | None, int, Sequences | None]] = []
        self.left: Left | None = None

    def table(self, turn: Turn, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The cos/sin table for the ops: (row of each token [batch, count], table [rows, rotary_dim]).

        Args:
            turn: the rotation; its layout says which elements of cosines and sines belong to the pairs.
            dtype: dtype of the table.
        """
        key = turn.layout, dtype
        if key not in self._tables:
            cos, sin = (turn.angles(x).to(dtype) for x in self)
            cos_sin_cache = torch.cat((cos, sin), -1).flatten(0, 1)
            positions = torch.arange(len(cos_sin_cache), dtype=torch.int64, device=cos.device).view(cos.shape[:2])
            self._tables[key] = positions.expand(self._shape), cos_sin_cache
        return self._tables[key]


class RotaryEmbedding(Replacement):
    """A rotary module that returns its cosines and sines as a `Step`. Without a `Step`, replaced modules fall back.

    Raises:
        Unknown: the module does not return a pair of cosines and sines.
    """

    op = "its angles, shared by all layers"

    def __init__(self, module: Any, config: Any, dtype: torch.dtype) -> None:
        super().__init__(module, dtype)
        angles_of(module, config, torch.float32)

    def watch(self) -> None:
        """Nothing to watch: the module's current forward always runs."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        angles = self.original(x, *args, **kwargs)
        return Step(x, *angles) if self.serves(x) else angles


def is_rotary(module: Any) -> bool:
    """Whether a module has buffers, no weights, and a forward with position_ids."""
    names = list(inspect.signature(forward_of(module)).parameters)
    return (
        "position_ids" in names and next(module.parameters(), None) is None and next(module.buffers(), None) is not None
    )


def angles_of(
    module: Any, config: Any, dtype: torch.dtype, layer_idx: int = 0, count: int = _TOKENS
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1, count, .] of a rotary module for tokens at far positions.

    Raises:
        Unknown: the module returns something else.
    """
    positions = POSITIONS + torch.arange(count, dtype=torch.int64, device="cpu")[None]
    types = getattr(config, "layer_types", None)
    names = inspect.signature(forward_of(module)).parameters
    options = {"layer_type": types[layer_idx]} if types and "layer_type" in names else {}
    hidden = randn(1, count, 8, dtype=dtype)
    found = tried(lambda: twin(module).forward(hidden, position_ids=positions, **options))
    is_pair = isinstance(found, tuple) and len(found) == 2 and all(isinstance(part, Tensor) for part in found)
    if not is_pair or found[0].ndim != 3 or found[0].shape != found[1].shape:
        raise Unknown("it gives no pair of cosines and sines")
    cos, sin = found
    return cos, sin


class Turn(NamedTuple):
    """The way in which a function of transformers rotates queries and keys, so that `apply_rotary_emb` can replace it.

    Attributes:
        function: transformers' function.
        layout: which elements of the last dimension of cosines and sines are those of the pairs: "halves" (the first
            half), "pairs" (every other element) or "single" (all).
        is_neox: whether a pair is the elements j and j + rotary_dim / 2, and not 2j and 2j + 1.
        in_float32: whether 16-bit queries are rotated in float32: for 16-bit angles, and for float32 angles; None if
            no op agrees.
    """

    function: Any
    layout: str
    is_neox: bool
    in_float32: tuple[bool | None, bool | None]

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The function's result, by the op if possible."""
        in_float32 = self._in_float32(q, cos)
        known = not args and kwargs.keys() <= {"unsqueeze_dim"} and q.ndim == k.ndim == 4 and cos.ndim == 3
        if not known or in_float32 is None or q.dtype != k.dtype:
            result: tuple[Tensor, Tensor] = self.function(q, k, cos, sin, *args, **kwargs)
            return result
        heads_first = kwargs.get("unsqueeze_dim", 1) == 1
        angles = self.angles(cos), self.angles(sin)
        return self._turned(q, angles, heads_first, in_float32), self._turned(k, angles, heads_first, in_float32)

    def angles(self, x: Tensor) -> Tensor:
        """The cosines or sines of the pairs, from `x` [.., tokens, width]; rows are contiguous."""
        found = x
        if self.layout != "single":
            found = x[..., : x.shape[-1] // 2] if self.layout == "halves" else x[..., ::2]
        return found if found.stride(-1) == 1 else found.contiguous()

    def in_place(self, step: Step, query: Tensor, key: Tensor) -> bool:
        """Rotate heads [batch, count, num_heads, head_dim] in place by the angles of a step; False if no op does."""
        angles, in_float32 = step[0].dtype, self._in_float32(query, step[0])
        if in_float32 is None or (not in_float32 and angles != query.dtype):
            return False
        positions, cos_sin_cache = step.table(self, torch.float32 if in_float32 else angles)
        head_size = query.shape[-1]
        if in_float32:
            rows = [x.view(-1, *x.shape[2:]) for x in (query, key)]
            flashinfer_rotary_embedding(positions.flatten(), rows[0], rows[1], head_size, cos_sin_cache, self.is_neox)
        else:
            rotary_embedding(positions, query, key, head_size, cos_sin_cache, self.is_neox)
        return True

    def _in_float32(self, heads: Tensor, angles: Tensor) -> bool | None:
        """`in_float32` for these dtypes."""
        # Unpacked, because torch.compile of torch 2.11 cannot index a tuple by a bool.
        angles_alike, angles_in_float32 = self.in_float32
        return angles_alike if angles.dtype == heads.dtype else angles_in_float32

    def _turned(self, x: Tensor, angles: tuple[Tensor, Tensor], heads_first: bool, in_float32: bool) -> Tensor:
        rows = x.transpose(1, 2) if heads_first else x
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        cos, sin = angles
        if cos.shape[0] == 1:
            apply_rotary_emb(out, rows, cos[0], sin[0], self.is_neox, in_float32)
        else:
            tokens = cos.flatten(0, 1), sin.flatten(0, 1)
            apply_rotary_emb(out.flatten(0, 1), rows.flatten(0, 1), *tokens, self.is_neox, in_float32)
        return out.transpose(1, 2) if heads_first else out


def turn_of(function: Any) -> Turn | None:
    """How a function rotates queries and keys; None for a function that does something else."""
    if not inspect.isfunction(function) or tuple(inspect.signature(function).parameters)[:4] != _PARAMETERS:
        return None
    if function not in _turns:
        _turns[function] = _tried(function)
    return _turns[function]


def _tried(function: Any) -> Turn | None:
    """The first kind of rotation that agrees with a function; None if none does."""
    for layout, is_neox in product(_LAYOUTS, (True, False)):
        if not _computes(Turn(function, layout, is_neox, (False, False)), torch.float32, torch.float32):
            continue
        rounding = []
        for angles in (torch.bfloat16, torch.float32):
            ways = [Turn(function, layout, is_neox, (way, way)) for way in (False, True)]
            rounding.append(next((way.in_float32[0] for way in ways if _computes(way, torch.bfloat16, angles)), None))
        return Turn(function, layout, is_neox, (rounding[0], rounding[1]))
    return None


def _computes(turn: Turn, dtype: torch.dtype, angle_dtype: torch.dtype) -> bool:
    """Whether function and op agree: exactly in 16 bits; partial rotation only if the function supports it."""
    exact = 0.0 if dtype == torch.bfloat16 else 1e-6
    q, k = (randn(_BATCH, heads, _TOKENS, _HEAD_DIM, seed=heads, dtype=dtype) for heads in (2 * _HEADS, _HEADS))
    found = 0
    for pairs, batch in product((_HEAD_DIM // 2, _HEAD_DIM // 4), (1, _BATCH)):
        freqs = 10.0 * randn(batch, _TOKENS, pairs, seed=3)
        doubled = {"halves": torch.cat((freqs, freqs), -1), "pairs": freqs.repeat_interleave(2, -1), "single": freqs}
        cos, sin = (f(doubled[turn.layout]).to(angle_dtype) for f in (torch.cos, torch.sin))
        try:
            theirs = turn.function(q, k, cos, sin)
        except (RuntimeError, TypeError, ValueError, IndexError):  # the function does not support these shapes
            if pairs == _HEAD_DIM // 2:
                return False
            continue
        if any(x.dtype != dtype for x in theirs) or not agree(turn(q, k, cos, sin), theirs, exact):
            return False
        found += 1
    return found > 0
