"""GGUF's quantized types: the sizes of their blocks and the values of their elements, as the format defines them.

`of_rows` checks a weight in one of them, `dequantised` is the launch that makes it floating-point. Each decoder takes
the bytes of blocks, [num_blocks, bytes] int32, and the indices of the elements of a block; it returns float32
[num_blocks, elements]. All multiplications are exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import kernels_cu

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import DType, uint8
from ..._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

Decoder = Callable[["Tensor", "Tensor"], "Tensor"]

_ggml_dequantize = Kernel("quantize/ggml_dequantize.cu")
# docs/performance/gguf.md has times of the op; these numbers were not tuned.
_NUM_THREADS, _MIN_BLOCKS = 256, 6  # threads per block, resident blocks per SM
_TILE_VECS, _TILE_VECS_OF_GRID = 4, 8  # vectors per thread; more for types with a grid, which each block copies first


class Format(NamedTuple):
    """A quantized type.

    Attributes:
        name: its name in ggml.cuh.
        length, nbytes: elements of a block and its bytes.
        exponents: the bytes of a block that hold sign and exponent of a scale.
        grid_size: entries of the grid (codebook) that its quants index; 0 for types without a grid.
    """

    name: str
    length: int
    nbytes: int
    exponents: tuple[int, ...]
    grid_size: int
    decode: Decoder


FORMATS: dict[int, Format] = {}


def _type(
    number: int, length: int, nbytes: int, exponents: tuple[int, ...] = (1,), grid_size: int = 0
) -> Callable[[Decoder], Decoder]:
    def declare(decode: Decoder) -> Decoder:
        FORMATS[number] = Format(decode.__name__[1:].upper(), length, nbytes, exponents, grid_size, decode)
        return decode

    return declare


def decode(quant_type: int, weight: Tensor) -> Tensor:
    """float32 of the elements of a contiguous tensor of bytes, in order."""
    format = FORMATS[quant_type]
    blocks = weight.reshape(-1, format.nbytes).int()
    return format.decode(blocks, torch.arange(format.length, dtype=torch.int64, device=weight.device)).reshape(-1)


def of_rows(W: TensorArg, quant_type: int, m: int, n: int) -> Format:
    """The format of a weight of m rows of n elements, if `W` holds its bytes, one after another."""
    check.dtype(W, uint8)
    check.contiguous(W)
    format = FORMATS.get(quant_type)
    if format is None:
        raise check.refuse(W, "quant_type", f"expected one of {sorted(FORMATS)}, got {quant_type}")
    if n % format.length == 0 and W.numel != m * (n // format.length) * format.nbytes:
        expected = f"{m * (n // format.length)} blocks of {format.nbytes} bytes of {format.name}"
        raise W.error(f"expected {expected} for shape ({m}, {n}), got shape {W.shape}")
    return format


def dequantised(
    W: TensorArg, format: Format, out: TensorArg | Scratch, dtype: DType, numel: int, access: int
) -> Launch:
    """The launch that writes the `numel` elements of a weight to `out`, of this dtype, `access` at a time."""
    vecs = _TILE_VECS_OF_GRID if format.grid_size else _TILE_VECS
    num_vecs, fixed = numel // 8, dict[str, Any]()
    if isinstance(out, Scratch):
        fixed["out"] = out
    return _ggml_dequantize.renamed(W=W.name)(
        scalar_t=dtype,
        FORMAT=format.name,
        TILE_VECS=vecs,
        ACCESS=access_of(W, W.numel),
        OUT_ACCESS=access,
        NUM_THREADS=_NUM_THREADS,
        MIN_BLOCKS=_MIN_BLOCKS,
    ).launch(
        grid=-(-num_vecs // (_NUM_THREADS * vecs)),
        block=_NUM_THREADS,
        num_vecs=num_vecs,
        **fixed,
    )


def access_of(W: TensorArg, size: int) -> int:
    """Bytes of the widest aligned access to contiguous pieces of `size` bytes of `W`."""
    bits = size | 16 | W.alignment
    return bits & -bits


# Fields of blocks.


def _short(b: Tensor, at: Any) -> Tensor:
    return b[:, at] | b[:, at + 1] << 8


def _half_of(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.float16).float()


def _half(b: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, [num_blocks, 1]."""
    return _half_of(_short(b, at)).unsqueeze(1)


def _nibble(b: Tensor, at: int, i: Tensor) -> Tensor:
    """Nibble i of 16 bytes: the low nibbles hold elements 0 to 15, the high ones 16 to 31."""
    return b[:, at + i % 16] >> i // 16 * 4 & 15


def _bit(b: Tensor, at: int, i: Tensor) -> Tensor:
    return b[:, at + i // 8] >> i % 8 & 1


# Blocks of 32 elements.


@_type(2, 32, 18)
def _q4_0(b: Tensor, i: Tensor) -> Tensor:
    return _half(b, 0) * (_nibble(b, 2, i) - 8)


@_type(3, 32, 20, (1, 3))
def _q4_1(b: Tensor, i: Tensor) -> Tensor:
    return _half(b, 0) * _nibble(b, 4, i) + _half(b, 2)


@_type(6, 32, 22)
def _q5_0(b: Tensor, i: Tensor) -> Tensor:
    return _half(b, 0) * ((_nibble(b, 6, i) | _bit(b, 2, i) << 4) - 16)


@_type(7, 32, 24, (1, 3))
def _q5_1(b: Tensor, i: Tensor) -> Tensor:
    return _half(b, 0) * (_nibble(b, 8, i) | _bit(b, 4, i) << 4) + _half(b, 2)


@_type(8, 32, 34)
def _q8_0(b: Tensor, i: Tensor) -> Tensor:
    return _half(b, 0) * b[:, 2:].to(torch.int8)


# Blocks of 256 elements: two halves of 128, each of four parts of 32. Element i is element l of part j of half h.


@_type(10, 256, 84, (81, 83))
def _q2_k(b: Tensor, i: Tensor) -> Tensor:
    h, j, l = i // 128, i % 128 // 32, i % 32  # noqa: E741
    code = b[:, 16 + 32 * h + l] >> 2 * j & 3
    scale = b[:, 8 * h + 2 * j + l // 16]
    return _half(b, 80) * (scale & 15) * code - _half(b, 82) * (scale >> 4)


@_type(11, 256, 110, (109,))
def _q3_k(b: Tensor, i: Tensor) -> Tensor:
    h, j, l = i // 128, i % 128 // 32, i % 32  # noqa: E741
    high = b[:, l] >> 4 * h + j & 1
    code = (b[:, 32 + 32 * h + l] >> 2 * j & 3) - 4 * (1 - high)
    s = 8 * h + 2 * j + l // 16
    scale = (b[:, 96 + s % 8] >> s // 8 * 4 & 15) | (b[:, 104 + s % 4] >> s // 4 * 2 & 3) << 4
    return _half(b, 108) * (scale - 32) * code


def _scales_k(b: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of part j of eight: 6 bits each, in bytes 4 to 15."""
    low, same, high = b[:, 4 + (j - 4) % 8], b[:, 4 + j], b[:, 4 + (j + 4).clamp(max=11)]
    is_low = j < 4
    scale = torch.where(is_low, same & 63, high & 15 | low >> 6 << 4)
    minimum = torch.where(is_low, high & 63, high >> 4 | same >> 6 << 4)
    return _half(b, 0) * scale, _half(b, 2) * minimum


@_type(12, 256, 144, (1, 3))
def _q4_k(b: Tensor, i: Tensor) -> Tensor:
    scale, minimum = _scales_k(b, i // 32)
    return scale * (b[:, 16 + i // 64 * 32 + i % 32] >> i % 64 // 32 * 4 & 15) - minimum


@_type(13, 256, 176, (1, 3))
def _q5_k(b: Tensor, i: Tensor) -> Tensor:
    scale, minimum = _scales_k(b, i // 32)
    code = b[:, 48 + i // 64 * 32 + i % 32] >> i % 64 // 32 * 4 & 15
    return scale * (code + 16 * (b[:, 16 + i % 32] >> i // 32 & 1)) - minimum


@_type(14, 256, 210, (209,))
def _q6_k(b: Tensor, i: Tensor) -> Tensor:
    h, j, l = i // 128, i % 128 // 32, i % 32  # noqa: E741
    low = b[:, 64 * h + j % 2 * 32 + l] >> j // 2 * 4 & 15
    high = b[:, 128 + 32 * h + l] >> 2 * j & 3
    return _half(b, 208) * b[:, 192 + i // 16].to(torch.int8) * ((low | high << 4) - 32)


# Types with quants that are indices into a grid or a table.

_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # values of IQ4_NL and IQ4_XS


def _iq4(nibbles: Tensor) -> Tensor:
    return torch.tensor(_TABLE, dtype=torch.int64, device=nibbles.device)[nibbles]


@cache
def _grids() -> dict[str, list[int]]:
    """The grids of the kernels, {name: entries}."""
    found = re.findall(r"GRID (\w+)\[\d+\] = \{([^}]*)\}", kernels_cu.read("include/ggml_grids.cuh"))
    return {name: [int(entry, 16) for entry in re.findall(r"\w+", entries)] for name, entries in found}


def _grid(name: str, index: Tensor, e: Tensor, bits: int, values: tuple[int, ...]) -> Tensor:
    """Element `e` of the entries at `index` of a grid: its fields of `bits` bits are indices into `values`."""
    entries = torch.tensor(_grids()[name], dtype=torch.int64, device=index.device)
    levels = entries[index] >> bits * e & 2**bits - 1
    return torch.tensor(values, dtype=torch.int64, device=index.device)[levels]


# Magnitudes (for IQ1 values) of the elements of a grid, by field.
_IQ2 = 8, 25, 43
_IQ3_XXS = 4, 12, 20, 28, 36, 44, 52, 62
_IQ3_S = 1, 3, 5, 7, 9, 11, 13, 15
_IQ1 = -1, 0, 1


def _signs(bits: Tensor, e: Tensor) -> Tensor:
    return 1 - 2 * (bits >> e & 1)


def _even_signs(seven: Tensor, e: Tensor) -> Tensor:
    """Signs of eight elements: the eighth is negative if an odd number of the first seven is."""
    seven = seven & 127
    odd = seven ^ seven >> 4
    odd = odd ^ odd >> 2
    return _signs(seven | (odd ^ odd >> 1) << 7 & 128, e)


# Element i is element e of group g of part p; v numbers the groups of a block.


@_type(16, 256, 66, grid_size=256)
def _iq2_xxs(b: Tensor, i: Tensor) -> Tensor:
    e, g, p = i % 8, i % 32 // 8, i // 32
    aux = _short(b, 6 + 8 * p).long() | _short(b, 8 + 8 * p).long() << 16
    value = _grid("GRID_IQ2_XXS", b[:, 2 + 8 * p + g], e, 2, _IQ2)
    return _half(b, 0) * (0.5 + (aux >> 28)) * 0.25 * value * _even_signs(aux >> 7 * g, e)


@_type(17, 256, 74, grid_size=512)
def _iq2_xs(b: Tensor, i: Tensor) -> Tensor:
    e, g, p = i % 8, i % 32 // 8, i // 32
    code = _short(b, 2 + i // 8 * 2)
    scale = b[:, 66 + p] >> g // 2 * 4 & 15
    return _half(b, 0) * (0.5 + scale) * 0.25 * _grid("GRID_IQ2_XS", code & 511, e, 2, _IQ2) * _even_signs(code >> 9, e)


@_type(22, 256, 82, grid_size=1024)
def _iq2_s(b: Tensor, i: Tensor) -> Tensor:
    e, g, p, v = i % 8, i % 32 // 8, i // 32, i // 8
    index = b[:, 2 + v] | (b[:, 66 + p] >> 2 * g & 3) << 8
    scale = b[:, 74 + p] >> g // 2 * 4 & 15
    return _half(b, 0) * (0.5 + scale) * 0.25 * _grid("GRID_IQ2_S", index, e, 2, _IQ2) * _signs(b[:, 34 + v], e)


@_type(18, 256, 98, grid_size=256)
def _iq3_xxs(b: Tensor, i: Tensor) -> Tensor:
    e, g, p = i % 8, i % 32 // 8, i // 32
    aux = _short(b, 66 + 4 * p).long() | _short(b, 68 + 4 * p).long() << 16
    value = _grid("GRID_IQ3_XXS", b[:, 2 + i // 4], i % 4, 4, _IQ3_XXS)
    return _half(b, 0) * (0.5 + (aux >> 28)) * 0.5 * value * _even_signs(aux >> 7 * g, e)


@_type(21, 256, 110, grid_size=512)
def _iq3_s(b: Tensor, i: Tensor) -> Tensor:
    p = i // 32
    index = b[:, 2 + i // 4] | (b[:, 66 + p] >> i % 32 // 4 & 1) << 8
    scale = b[:, 106 + p // 2] >> p % 2 * 4 & 15
    value = _grid("GRID_IQ3_S", index, i % 4, 4, _IQ3_S)
    return _half(b, 0) * (1 + 2 * scale) * value * _signs(b[:, 74 + i // 8], i % 8)


@_type(19, 256, 50, grid_size=2048)
def _iq1_s(b: Tensor, i: Tensor) -> Tensor:
    high = _short(b, 34 + i // 32 * 2)
    index = b[:, 2 + i // 8] | (high >> i % 32 // 8 * 3 & 7) << 8
    delta = 0.125 - 0.25 * (high >> 15)
    return _half(b, 0) * (2 * (high >> 12 & 7) + 1) * (_grid("GRID_IQ1", index, i % 8, 2, _IQ1) + delta)


@_type(29, 256, 56, (55,), grid_size=2048)
def _iq1_m(b: Tensor, i: Tensor) -> Tensor:
    """The scale of a block lies in four pieces, in the upper bits of four words."""
    d = sum((_short(b, 48 + 2 * k) >> 12) << 4 * k for k in range(4))
    scale = _short(b, 48 + i // 64 * 2) >> i % 64 // 16 * 3 & 7
    high = b[:, 32 + i // 16] >> i % 16 // 8 * 4
    delta = 0.125 - 0.25 * (high >> 3 & 1)
    value = _grid("GRID_IQ1", b[:, i // 8] | (high & 7) << 8, i % 8, 2, _IQ1) + delta
    return _half_of(d).unsqueeze(1) * (2 * scale + 1) * value


@_type(20, 32, 18)
def _iq4_nl(b: Tensor, i: Tensor) -> Tensor:
    return _half(b, 0) * _iq4(_nibble(b, 2, i))


@_type(23, 256, 136)
def _iq4_xs(b: Tensor, i: Tensor) -> Tensor:
    p = i // 32
    scale = (b[:, 4 + p // 2] >> p % 2 * 4 & 15) | (_short(b, torch.full_like(i, 2)) >> 2 * p & 3) << 4
    nibble = b[:, 8 + 16 * p + i % 16] >> i % 32 // 16 * 4 & 15
    return _half(b, 0) * (scale - 32) * _iq4(nibble)
