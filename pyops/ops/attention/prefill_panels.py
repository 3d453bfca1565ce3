"""The tiles of prefill_sm90.cu in shared memory, and the tensor maps that load them: prefill_panels.cuh."""

from __future__ import annotations

from dataclasses import dataclass

from ..._core.launch.tensor_map import PROMOTIONS, TensorMap
from ..._core.tensors.tensor import TensorArg


@dataclass(frozen=True, slots=True)
class Panels:
    """How queries, keys and values lie in shared memory: in panels, columns of rows that one swizzle spans.

    Attributes:
        whole_heads: a TMA box has all panels of its tokens, else one panel.
        row_bytes: bytes of a row of a panel.
    """

    whole_heads: bool = False
    row_bytes: int = 128

    @classmethod
    def of(cls, *caches: TensorArg) -> Panels:
        """The panels of paged keys and values; with whole heads if the panels of a head need no padding."""
        itemsize, sizes = caches[0].dtype.itemsize, [cache.shape[3] for cache in caches]
        has_short_rows = itemsize == 2 and any(size % 64 for size in sizes) and not any(size % 32 for size in sizes)
        panels = cls(True, 64 if has_short_rows else 128)
        return panels if all(panels._hold(cache) for cache in caches) else cls()

    def _hold(self, cache: TensorArg) -> bool:
        """Whether the panels of a head need no padding."""
        if self._overlap(cache):
            return cache.dtype.itemsize == 2 and self.size(cache) < cache.shape[3] < 128 and cache.shape[3] % 16 == 0
        return cache.shape[2] == 1 or cache.strides[2] % self.size(cache) == 0

    def _overlap(self, cache: TensorArg) -> bool:
        """Whether a head is not a number of whole panels. With `whole_heads` its two panels overlap."""
        return cache.shape[-1] % self.size(cache) != 0

    def size(self, arg: TensorArg) -> int:
        """Elements in a row of a panel."""
        return self.row_bytes // arg.dtype.itemsize

    def token_bytes(self, size: int) -> int:
        """Bytes of a key, or of a value, of `size` 16-bit elements in shared memory."""
        return -(-2 * size // self.row_bytes) * self.row_bytes

    def value_columns(self, size: int) -> int:
        """Columns of the accumulators of 16-bit values of `size` elements."""
        has_overlap = self.whole_heads and 2 * size % self.row_bytes
        return self.token_bytes(size) // 2 if has_overlap else -(-size // 16) * 16

    def head_pitch(self, cache: TensorArg) -> int:
        """Distance of the heads of a token: elements if panels overlap, else panels."""
        elements = cache.strides[-2] if cache.shape[-2] > 1 else cache.shape[-1]
        return elements if self._overlap(cache) else elements // self.size(cache)

    def map_of_queries(self, query: TensorArg, heads: int, item_tokens: int) -> TensorMap:
        """The tensor map of queries; a box is one panel of the query heads of a work item."""
        return _map(query, (self.size(query), heads, item_tokens), self.row_bytes)

    def map_of_cache(self, cache: TensorArg, box_tokens: int) -> TensorMap:
        """The tensor map of a cache, or of ragged keys or values.

        A box holds some tokens of a head, with all panels or one. TMA fills a last panel past the head size with zeros.
        """
        if self.whole_heads:
            return self._map_of_whole_heads(cache, box_tokens)
        box = (self.size(cache), 1, box_tokens, 1)[: len(cache.shape)]
        return _map(cache, box, self.row_bytes, _promotion(cache))

    def _map_of_whole_heads(self, cache: TensorArg, box_tokens: int) -> TensorMap:
        """The tensor map with boxes of all panels of some tokens of a head. A box in shared memory is [tokens / 8,
        panels, 8 tokens, elements of a panel].

        The stride of panels that overlap does not divide that of heads, so the elements of all heads are one dimension.
        """
        num_blocks, block_size, heads, head_size = cache.shape
        size, itemsize = self.size(cache), cache.dtype.itemsize
        panels, last_head = -(-head_size // size), (heads - 1) * self.head_pitch(cache)
        if self._overlap(cache):
            elements, row_panels, panel_bytes = last_head + size, panels, (head_size - size) * itemsize
        else:
            elements, row_panels, panel_bytes = size, last_head + panels, self.row_bytes
        token = cache.strides[1] * itemsize
        block = cache.strides[0] * itemsize if num_blocks > 1 else block_size * token
        sizes = (elements, 8, row_panels, block_size // 8, num_blocks)
        strides = (token, panel_bytes, 8 * token, block)
        box = (size, 8, panels, box_tokens // 8, 1)
        return TensorMap(cache, cache.dtype, sizes, strides, box, self.row_bytes, promotion=_promotion(cache))


def map_of_codes(cache: TensorArg, box_tokens: int) -> TensorMap:
    """The tensor map of an fp8 cache; a box holds some tokens of a head, without swizzle."""
    return _map(cache, (cache.shape[3], 1, box_tokens, 1), 0, _promotion(cache))


def _promotion(cache: TensorArg) -> int:
    """Bytes that L2 fetches from DRAM at once: as many as a head of a token has in one piece.

    More are of the next head. Its CTA reads them at another time, when L2 may have dropped them ("A head in one piece"
    in docs/performance/prefill.md).
    """
    head_bytes = cache.strides[-2] * cache.dtype.itemsize if cache.shape[-2] > 1 else max(PROMOTIONS)
    return max(min(PROMOTIONS), min(max(PROMOTIONS), head_bytes & -head_bytes))


def _map(arg: TensorArg, box: tuple[int, ...], swizzle: int, promotion: int = 256) -> TensorMap:
    """The tensor map of the whole argument; `box` has the innermost dimension first."""
    sizes, itemsize = arg.shape[::-1], arg.dtype.itemsize
    strides: list[int] = []
    pitch = -(-sizes[0] * itemsize // 16) * 16
    for size, stride in zip(sizes[1:], reversed(arg.strides[:-1]), strict=True):
        strides.append(stride * itemsize if size > 1 else pitch)  # a dimension of size 1 may have any stride
        pitch = strides[-1] * size
    return TensorMap(arg, arg.dtype, sizes, tuple(strides), box, swizzle, promotion=promotion)
