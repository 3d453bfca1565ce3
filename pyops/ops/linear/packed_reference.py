"""A GEMM with a packed quantized weight in PyTorch: the reference of the ops that plan with `packed_problem`.

The arguments `weight` and `w` are a `PackedWeight` with tensors; plans have one with descriptors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._core.system.lazy import torch
from .._shared.fp8_accumulation import FLOAT32_ERROR
from .._shared.packed_layouts import LayoutName, code_bit, column_place, zero_bit
from .._shared.scalar_type import E2M1_NUMBERS
from .scaled_mm import scaled

if TYPE_CHECKING:
    from torch import Tensor


def rounding_of_weights(a: Tensor, weight: Any, dtype: torch.dtype) -> float:
    """The error of results when weights are rounded to `dtype`, as a fraction of the largest result that `dtype` holds.

    Some kernels round weights with group scales and some do not: the difference is computed here, by rounding them. The
    tolerance is at least half an ulp of the largest result. In long dot products, rounding the weights gives a typical
    result an error of 0.41 of half its ulp, and the worst of ten thousand results four times that, but the largest
    result is then at least twice a typical one. Results with cancellation have larger errors.
    """
    x, w = (one.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for one in (_activations(a, weight), values(weight)))
    rounded = w.float().to(dtype).double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    limits: Any = torch.finfo(dtype)
    sums = x @ w
    largest, difference = (float(one.abs().amax()) if one.numel() else 0.0 for one in (sums, x @ rounded - sums))
    if largest == 0.0:
        return float(limits.eps) / 2
    error: float = max(limits.eps / 2 * largest, FLOAT32_ERROR * largest + difference)
    return error / min(largest, float(limits.max))


def unpack(packed: Tensor, layout: LayoutName, bits: int, size: tuple[int, int]) -> Tensor:
    """int64 quants [K, N] of a weight in words or bytes."""
    k, n = (
        torch.arange(size[0], dtype=torch.int64, device=packed.device)[:, None],
        torch.arange(size[1], dtype=torch.int64, device=packed.device)[None],
    )
    return _codes(packed, bits, lambda j: code_bit(layout, bits, size, k, n, j))


def pack(codes: Tensor, layout: LayoutName, bits: int, size: tuple[int, int], num_words: int) -> Tensor:
    """Pack int64 quants, the first columns of a weight of this size, into int32 words."""
    k, n = (torch.arange(count, dtype=torch.int64, device=codes.device) for count in codes.shape)
    words = torch.zeros(num_words, dtype=torch.int64, device=codes.device)
    for j in range(bits):
        place = code_bit(layout, bits, size, k[:, None], n[None], j)
        words.index_add_(0, (place // 32).flatten(), ((codes >> j & 1) << place % 32).flatten())
    return words.to(torch.int32)


def _codes(packed: Tensor, bits: int, place_of: Any) -> Tensor:
    """Quants with bit j at `place_of(j)`."""
    flat, width = packed.reshape(-1), packed.element_size() * 8
    first = place_of(0)
    if bits != 3:  # a word holds whole quants
        return flat[first // width] >> first % width & (1 << bits) - 1
    found = torch.zeros_like(first)
    for j in range(bits):
        place = place_of(j)
        found |= (flat[place // width].long() >> place % width & 1) << j
    return found


def multiply(
    out: Tensor,
    a: Tensor,
    weight: Any,
    a_scales: Tensor | None = None,
    b_scales: Tensor | None = None,
    bias: Tensor | None = None,
    column_order: Any = "natural",
    scale_exponent: int = 0,
    rounds: bool = False,
) -> None:
    """Write the product; the arguments after `weight` are those of `Epilogue`.

    If `rounds`, weights are rounded to the dtype of `out`, as by every kernel that dequantizes the weight first.
    """
    w = values(weight)
    sums = _activations(a, weight) @ (w.float().to(out.dtype).double() if rounds else w)
    one = torch.ones(1, dtype=torch.float32, device=out.device)
    factor = one.double() * 2.0**scale_exponent
    place = column_place(column_order, torch.arange(weight.n, dtype=torch.int64, device=out.device))
    if b_scales is not None:
        b_scales = b_scales.reshape(-1) if b_scales.numel() == 1 else b_scales.reshape(-1)[place]
        b_scales = (b_scales.double() * factor).float()
    elif a_scales is not None:
        a_scales = (a_scales.double() * factor).float()
    x = scaled(sums, one if a_scales is None else a_scales.float(), one if b_scales is None else b_scales, None)
    out.copy_(x if bias is None else x + bias.reshape(-1)[place].float())


def _activations(a: Tensor, weight: Any) -> Tensor:
    """a' in float64."""
    if weight.perm is None:
        return a.double()
    inside = (weight.perm >= 0) & (weight.perm < weight.k)
    return a[:, weight.perm.where(inside, 0).long()].double() * inside


def values(weight: Any) -> Tensor:
    """w [K, N] in float64, which holds it exactly."""
    w, device = weight, weight.codes.device
    rows, columns = (
        torch.arange(w.k, dtype=torch.int64, device=device),
        torch.arange(w.n, dtype=torch.int64, device=device),
    )
    groups = rows // max(1, w.group_size) if w.g_idx is None else w.g_idx.long()
    exists = (groups >= 0) & (groups < w.groups)
    g = groups.where(exists, 0)
    place = column_place(w.scale_order, columns)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    if w.zero_kind == "codes":
        at = torch.arange(w.groups, dtype=torch.int64, device=device)[:, None], columns[None]
        zero = _codes(w.zeros, w.bits, lambda j: zero_bit(w.zero_layout, w.bits, w.n, *at, j))[g] + w.zero_offset
    elif w.zero_kind == "floats":
        zero = w.zeros[g][:, place].double()
    x = _numbers(w, zero)
    if w.scale_kind == "products":
        # Entries 0 ... 7 are the products with -8 ... -1.
        entries = torch.where(x < 0, x + 8, 8 - x.clamp(min=1)).long()
        products = w.scales.reshape(w.groups, w.n, 8).double()[g].gather(2, entries[..., None])[..., 0]
        x = products * x.sign() * -1.0
    elif w.scales is not None:
        x = x * (_entries(w)[g][:, place].double() * 2.0**w.scale_exponent)
    if w.zero_kind == "added":
        x = x + w.zeros[g][:, place].double()
    return x.where(exists[:, None], 0.0)


def _numbers(w: Any, zero: Tensor) -> Tensor:
    """The quants less their zero points, in float64."""
    kept_rows = w.k if w.places is None else w.k // 2
    codes = unpack(w.codes, w.layout, w.bits, (kept_rows, w.n)).long()
    kind = w.type
    if w.places is not None:
        codes, kept = _spread(codes, w.places, w.k)
    if kind.exponent == 4:
        x = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
        x = x.where(codes & 127 != 127, torch.where(codes < 128, 480.0, -480.0))
    elif kind.exponent == 2:
        x = torch.tensor(E2M1_NUMBERS, dtype=torch.float64, device=codes.device)[codes]
    else:
        half = 1 << (kind.size_bits - 1)
        integers = (codes ^ half) - half if kind.signed else codes
        shift = zero + kind.bias
        if w.recoding == "marlin_fp8":
            integers = torch.where(integers + shift < 16, integers, 15 - shift - integers) + shift
        x = integers.double() - shift
    return x if w.places is None else x * kept


def _spread(codes: Tensor, places: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """2:4 sparsity: the stored quants (two of every four rows) at the positions of all rows, and whether a row is
    stored."""
    columns = codes.shape[1]
    quad, n = (
        torch.arange(rows // 4, dtype=torch.int64, device=codes.device)[:, None],
        torch.arange(columns, dtype=torch.int64, device=codes.device)[None],
    )
    kept = places.reshape(-1)[places_word(columns, quad, n)].long() >> quad % 4 * 4 & 15
    each = torch.arange(4, dtype=torch.int64, device=codes.device)[None, :, None]
    first, second = (kept & 3)[:, None] == each, (kept >> 2)[:, None] == each
    pairs = codes.view(rows // 4, 2, columns)
    spread = torch.where(second, pairs[:, 1:], pairs[:, :1])
    return spread.reshape(rows, columns), (first | second).reshape(rows, columns)


def places_word(columns: int, quad: Any, n: Any) -> Any:
    """The word of `PackedWeight.places` with the metadata of four rows: four bits, starting at bit ``quad % 4 * 4``."""
    line = n // 64 * 64 + n % 2 * 2 + n % 8 // 4 + n % 4 // 2 * 32 + n % 64 // 8 * 4
    word = quad // 4
    moved = (line + word) % 2  # two words of each 2 x 2 square of words are swapped
    line, word = line ^ moved, word ^ moved
    return word // 2 * 2 * columns + 2 * line + word % 2


def _entries(w: Any) -> Tensor:
    """Scales as numbers, [groups, columns]."""
    scales = w.scales
    if w.scale_kind == "e5m3":
        return (scales.view(torch.uint8).to(torch.int16) << 7).view(torch.float16)
    if w.scale_kind == "e8m0":
        exponent = scales.view(torch.uint8).double()
        return torch.where(exponent == 255, torch.nan, torch.exp2(exponent - 127.0))
    return scales.view(torch.int16) if w.scale_kind == "int16" else scales
