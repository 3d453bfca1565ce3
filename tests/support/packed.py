"""Packed weights, written from the definitions of their formats independently of pyops: numpy and loops over tiles."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor

PERM_64 = [i + 8 * j for i in range(8) for j in range(8)]
PERM_32 = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
ORDER_24 = [0, 4, 1, 5, 2, 6, 3, 7]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def draw(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    """int64 in [low, high)."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def words_of_bits(bits: Any) -> Tensor:
    """int32 words [...] of bits [..., 32], the lowest first."""
    packed = numpy.packbits(bits.astype("uint8"), axis=-1, bitorder="little")
    return torch.from_numpy(numpy.ascontiguousarray(packed).view("int32")[..., 0].copy())


def words_of_fields(fields: Any, bits: int) -> Tensor:
    """int32 words [...] of fields [..., 32 / bits], the lowest first."""
    each = numpy.asarray(fields)[..., None] >> numpy.arange(bits) & 1
    return words_of_bits(each.reshape(*each.shape[:-2], 32))


def gptq(codes: Tensor, bits: int) -> Tensor:
    """[K bits / 32, N]: a column is one string of bits."""
    each = (codes.numpy()[..., None] >> numpy.arange(bits) & 1).transpose(0, 2, 1)  # [K, bits, N]
    return words_of_bits(each.reshape(-1, 32, codes.shape[1]).transpose(0, 2, 1))


def gptq_zeros(zeros: Tensor, bits: int) -> Tensor:
    """[groups, N bits / 32]: a row is one string of zero points."""
    return gptq(zeros.T.contiguous(), bits).T.contiguous()


def awq(codes: Tensor, bits: int = 4) -> Tensor:
    """[K, N bits / 32]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    return words_of_fields(codes.view(len(codes), -1, len(order)).numpy()[..., order], bits)


def marlin(codes: Tensor, bits: int, is_a_8bit: bool = False, sparse: bool = False) -> Tensor:
    """[K / 16, N bits / 2]: tiles in lane order."""
    (rows, columns), q = codes.shape, codes.numpy()
    tile_k, tile_n = (32, 32) if is_a_8bit else (16, 64)
    found: list[Any] = []
    for kt in range(0, rows, tile_k):
        for nt in range(0, columns, tile_n):
            for lane in range(32):
                for w in range(4):
                    if is_a_8bit:
                        k, n = kt + 4 * (lane % 4), nt + 16 * (w // 2) + 8 * (w % 2) + lane // 4
                        fields = [q[k + i // 2 + 16 * (i % 2), n] for i in range(8)]
                        if bits == 8:
                            fields = [q[k + i + 16 * h, n] for h in range(2) for i in range(4)]
                    else:
                        k = kt + 2 * (lane % 4)
                        n, step = (nt + 8 * (lane // 4) + w, 4) if sparse else (nt + 16 * w + lane // 4, 8)
                        fields = [q[k + i % 2 * 8 + i // 4, n + i // 2 % 2 * step] for i in range(8)]
                        if bits == 8:
                            fields = [q[k + i % 2 * 8 + i // 2, n + h * step] for h in range(2) for i in range(4)]
                    found.append(fields)
    return words_of_fields(numpy.array(found).reshape(-1, 32 // bits), bits).view(rows // 16, -1)


def blocks(rows: Tensor, order: list[int]) -> Tensor:
    """The columns of each block of len(order), permuted by `order`."""
    return rows.view(*rows.shape[:-1], -1, len(order))[..., order].reshape(rows.shape)


def marlin_zeros(zeros: Tensor, bits: int, is_a_8bit: bool = False) -> Tensor:
    """[groups, N bits / 32]."""
    zeros = blocks(zeros, PERM_64)
    if not is_a_8bit:
        zeros = blocks(zeros, [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3])
    return words_of_fields(zeros.view(len(zeros), -1, 32 // bits).numpy(), bits)


def marlin_scales(scales: Tensor, is_a_8bit: bool = False) -> Tensor:
    return blocks(scales, PERM_32 if is_a_8bit or len(scales) == 1 else PERM_64)


def n32k16(codes: Tensor) -> Tensor:
    """[N rounded up to 32, K] uint8."""
    rows, columns = codes.shape
    found = numpy.zeros(-(-columns // 32) * 32 * rows, "uint8")
    for k in range(rows):
        for n in range(columns):
            line = n // 32 * 8 + n % 8
            at = k // 16 * 64 + k % 8 // 2 * 16 + n % 32 // 8 * 4 + k % 16 // 8 * 2 + k % 2
            found[line * 4 * rows + at] = codes[k, n]
    return torch.from_numpy(found).view(-1, rows)


def n32k16_columns(entries: Tensor) -> Tensor:
    """[1, N rounded up to 32]."""
    found = torch.zeros(1, -(-entries.shape[1] // 32) * 32, dtype=entries.dtype)
    for n in range(entries.shape[1]):
        found[0, 32 * (n // 32) + 4 * (n % 8) + n % 32 // 8] = entries[0, n]
    return found


def places_24(kept: Tensor) -> Tensor:
    """[K / 32, 2 N] int16 metadata of four bits for each quad of rows, from [K / 4, N]."""
    quads, columns = kept.shape
    words = (kept.view(quads // 4, 4, columns).numpy() << numpy.array([0, 4, 8, 12])[:, None]).sum(1)  # [K / 16, N]
    found = numpy.zeros(words.size, "uint16")
    for c in range(quads // 4):
        for r in range(columns):
            line = 64 * (r // 64) + 2 * (r % 2) + r % 8 // 4 + 32 * (r % 4 // 2) + 4 * (r % 64 // 8)
            word = c
            if line % 2 == 0 and c % 2 == 1:
                line, word = line + 1, c - 1
            elif line % 2 == 1 and c % 2 == 0:
                line, word = line - 1, c + 1
            found[word // 2 * 2 * columns + 2 * line + word % 2] = words[c, r]
    return torch.from_numpy(found.view("int16")).view(-1, 2 * columns)
