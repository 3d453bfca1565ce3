"""Quantised weights in the formats that checkpoints have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from .tensors import generator, seeds

# The column of each nibble of a word, from the lowest nibble on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FORMATS = ("awq", "gptq", "gptq_v1", "gptq_8bit", "int8", "fp8")


@dataclass(frozen=True)
class QuantisedWeight:
    """A quantized matrix [K, N] with a scale, and optionally a zero point, for each group of rows of each column.

    Attributes:
        weight: as stored. ``"awq"``: int32 [K, N / 8], eight columns to a word, from the lowest nibble 0 2 4 6 1 3 5 7;
            ``"gptq"``, ``"gptq_v1"``: int32 [K / 8, N], eight rows to a word, the lowest nibble first;
            ``"gptq_8bit"``: int32 [K / 4, N], likewise in bytes; ``"int8"``: int8 [K, N];
            ``"fp8"``: float8_e4m3fn [K, N].
        scales: [K / group_size, N]: float16 where integers are packed, else float32.
        zeros: as stored, or None. ``"awq"``: int32 [K / group_size, N / 8], packed as the weight; ``"gptq"``,
            ``"gptq_8bit"``: int32, packed along N, the lowest bits first; ``"gptq_v1"``: likewise, each less by one;
            ``"int8"``: int32 [K / group_size, N], or None; ``"fp8"``: None.
        format: one of those names.
        group_size: rows of K that share a scale.
        values: float32 [K, N]: ``(quant - zero point) * scale``.

    Examples:
        >>> @given(quantised=quantised_weights(["fp8"], max_k=64, max_n=64))
        ... def test(quantised):
        ...     scales = quantised.scales.repeat_interleave(quantised.group_size, 0)
        ...     torch.testing.assert_close(quantised.values, quantised.weight.float() * scales)
        >>> test()
    """

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    format: str
    group_size: int
    values: Tensor


def _packed(codes: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Pack unsigned quants into int32 words along `dim`; field f of a word, from the lowest bits, holds order[f]."""
    fields = 32 // bits
    split = codes.long().movedim(dim, -1).unflatten(-1, (-1, fields))
    split = split[..., list(order or range(fields))]
    words = (split << torch.arange(0, 32, bits, dtype=torch.int64, device="cpu")).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).movedim(-1, dim).contiguous()


@st.composite
def quantised_weights(
    draw: st.DrawFn,
    formats: Sequence[str] = FORMATS,
    *,
    group_sizes: Sequence[int] = (32, 64, 128, -1),
    max_k: int = 512,
    max_n: int = 256,
) -> QuantisedWeight:
    """Weights in one of `formats` with groups of one of `group_sizes` rows; -1 is a single group.

    K is a multiple of the group size (of 32 for a single group), N of 32; both are at least 32 and bounded by the
    arguments. Quants and zero points cover their whole range; scales are 1e-4 to 1e2, and 0 for some columns.

    Examples:
        >>> @given(quantised=quantised_weights(["awq"], group_sizes=(32,), max_k=64, max_n=64))
        ... def test(quantised):
        ...     assert quantised.weight.shape[1] * 8 == quantised.values.shape[1]  # eight columns to a word
        >>> test()
    """
    name = draw(st.sampled_from(formats), label="format")
    if name not in FORMATS:
        raise ValueError(f"formats: expected some of {FORMATS}, got {name!r}")
    wanted = draw(st.sampled_from([size for size in group_sizes if size <= max_k]), label="group_size")
    unit = 32 if wanted == -1 else wanted
    k = unit * draw(st.integers(1, max_k // unit), label="K in groups")
    n = 32 * draw(st.integers(1, max_n // 32), label="N / 32")
    group_size = k if wanted == -1 else wanted
    groups = k // group_size
    random = generator(draw(seeds(), label="seed"))

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=random, dtype=torch.int64, device="cpu")

    exponents = torch.rand(groups, n, generator=random, dtype=torch.float32, device="cpu") * 6 - 4
    scales = (10**exponents).float()
    if draw(st.booleans(), label="columns of scale 0"):
        scales[:, ::7] = 0.0
    zero_points: Tensor | None = None
    zeros: Tensor | None = None
    if name == "fp8":
        # Every fp8 bit pattern except the two NaN.
        raw = integers(0, 253, k, n)
        weight = (raw + (raw >= 127)).to(torch.uint8).view(torch.float8_e4m3fn)
        codes = weight.float()
    elif name == "int8":
        codes = integers(-128, 127, k, n)
        weight = codes.to(torch.int8)
        if draw(st.booleans(), label="zero points"):
            zero_points = integers(-128, 127, groups, n)
            zeros = zero_points.to(torch.int32)
    else:
        bits = 8 if name == "gptq_8bit" else 4
        order = _AWQ_ORDER if name == "awq" else None
        less = 1 if name == "gptq_v1" else 0
        codes = integers(0, 2**bits - 1, k, n)
        stored = integers(0, 2**bits - 1, groups, n)
        zero_points, scales = stored + less, scales.half()
        weight = _packed(codes, bits, 1 if name == "awq" else 0, order)
        zeros = _packed(stored, bits, 1, order)
    shifted = codes.float()
    if zero_points is not None:
        shifted = shifted - zero_points.repeat_interleave(group_size, 0).float()
    values = shifted * scales.float().repeat_interleave(group_size, 0)
    return QuantisedWeight(weight, scales, zeros, name, group_size, values)
