"""Repacking of weights into other layouts: one launch of repack_weight.cu, for one weight or for those of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._core.launch.kernel import Kernel, Launch
from ..._core.tensors.tensor import TensorArg
from .._shared.packed_layouts import LayoutName
from .packed_reference import pack, unpack

if TYPE_CHECKING:
    from torch import Tensor

_repack_weight = Kernel("linear/repack_weight.cu")
# Threads of a block, words of a thread; a tile of any layout is a multiple of these words.
_NUM_THREADS, _WORDS = 256, 4
TILE_COLUMNS = 64  # columns of Marlin's tiles; a row of words holds whole tiles


def repack(
    packed: TensorArg,
    codes: TensorArg,
    layouts: tuple[LayoutName, LayoutName],
    bits: int,
    size: tuple[int, int],
    *,
    perm: TensorArg | None = None,
    experts: int = 1,
    columns: int | None = None,
    strides: tuple[int, int] | None = None,
) -> Launch:
    """The launch that repacks the quants of weights of this size [K, N].

    Args:
        packed: written, contiguous, words or bytes of the second layout.
        codes: quants in words or bytes of the first layout, contiguous unless `strides` are given.
        layouts: layouts of codes, and of packed.
        perm: [experts, K] int32: row k is row perm[k] of codes.
        experts: number of weights.
        columns: columns of the weight in packed, padded to whole tiles; None for N.
        strides: strides of codes in layout gptq: of a row of words, and of a column.
    """
    k, n = size
    columns = n if columns is None else columns
    num_words = k * columns * bits // 32
    kernel = _repack_weight.renamed(
        packed=packed.name, quants=codes.name, **({} if perm is None else {"perm": perm.name})
    )
    word_stride, word_step = strides or (n, 1)
    return kernel(
        SOURCE_LAYOUT=f"layout_{layouts[0]}",
        LAYOUT=f"layout_{layouts[1]}",
        BITS=bits,
        PERMUTED=perm is not None,
        PADDED=columns != n,
        WORDS=_WORDS,
        ACCESS=min(4 * _WORDS, packed.alignment),
        NUM_THREADS=_NUM_THREADS,
    ).launch(
        (-(-num_words // (_NUM_THREADS * _WORDS)), experts),
        _NUM_THREADS,
        k=k,
        n=n,
        columns=columns,
        num_words=num_words,
        expert_words=k * n * bits // 32,
        word_stride=word_stride,
        word_step=word_step,
        **({"perm": 0} if perm is None else {}),
    )


def repacked(
    codes: Tensor,
    layouts: tuple[LayoutName, LayoutName],
    bits: int,
    size: tuple[int, int],
    perm: Any = None,
    columns: int | None = None,
) -> Tensor:
    """int32 words of one weight, as `repack` writes them."""
    k, n = size
    columns = n if columns is None else columns
    found = unpack(codes.contiguous(), layouts[0], bits, size).long()
    if perm is not None:
        inside = (perm >= 0) & (perm < k)
        found = found[perm.where(inside, 0).long()] * inside[:, None]
    return pack(found, layouts[1], bits, (k, columns), k * columns * bits // 32)
