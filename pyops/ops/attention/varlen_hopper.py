"""Attention of many query tokens by wgmma on compute capability 9.0: the geometry of attention_varlen_hopper.cu."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from ..._core import tuning
from ..._core.device import Device
from ..._core.kernel import Kernel, Launch, Scratch
from ..._core.tensor import TensorArg
from ..._core.tensor_map import TensorMap
from .varlen_problem import Problem

_hopper = Kernel("attention/attention_varlen_hopper.cu")

_ROW_BYTES = 128  # of a panel: the swizzle
_PANEL_SIZE = _ROW_BYTES // 2  # elements
_BARRIER_BYTES = 8
_CODE_STAGES = 2  # tiles of codes
_STATIC_BYTES = 1024  # of shared memory, at most, aligned: work items and holes
_MAX_STAGES = 4


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """The geometry of attention_varlen_hopper.cu; the attributes are constants of the kernel.

    Attributes:
        tokens: keys of a tile.
        consumers: warpgroups of 64 rows.
    """

    tokens: int
    consumers: int

    def __post_init__(self) -> None:
        if self.tokens % 16 or not 0 < self.tokens <= 256 or self.consumers not in (2, 3):
            raise ValueError(f"no geometry of attention_varlen_hopper.cu: {self}")

    def candidates(self, problem: Problem, device: Device) -> list[HopperConfig]:
        """Other tiles and numbers of warpgroups, as far as shared memory and registers suffice."""
        found = tuning.varied(self, tokens=(64, 80, 96, 112, 128, 160, 176, 192), consumers=(2, 3))
        return [one for one in found if one.fits(problem, device)]

    def fits(self, problem: Problem, device: Device) -> bool:
        """Whether two tiles of keys and values fit into shared memory, and logits and sums into registers."""
        head_size = problem.query.shape[2]
        registers = head_size // 2 + self.tokens * 3 // 4
        boxes = self.tokens // gcd(problem.layout.block_size, self.tokens)
        return (
            self._stages(problem, device)[0] >= 2 and registers <= (192 if self.consumers == 2 else 120) and boxes <= 32
        )

    def launch(self, problem: Problem, constants: dict[str, Any], arguments: dict[str, Any]) -> Launch:
        """As many blocks as the device has multiprocessors, which take work items from a counter."""
        device, query, layout = problem.query.device, problem.query, problem.layout
        num_tokens, num_heads, head_size = query.shape
        group, item_tokens = problem.group, 64 * self.consumers // problem.group
        stages, query_stages, shared = self._stages(problem, device)
        box_tokens = gcd(layout.block_size, self.tokens)
        caches = problem.kv.key_cache, problem.kv.value_cache
        is_fp8 = problem.is_fp8
        whole_heads = _has_whole_heads(problem)
        map_cache = _map_of_codes if is_fp8 else _map_of_whole_heads if whole_heads else _map_of_panels
        kernel = _hopper.for_arch(device.arch_feature)
        num_items = (num_tokens // item_tokens + problem.num_seqs) * layout.num_kv_heads
        taken = {name for _, name in kernel.signature.parameters}
        return kernel(
            **{name: value for name, value in constants.items() if name not in ("PACKED", "X")},
            BOX_TOKENS=box_tokens,
            WHOLE_HEADS=whole_heads,
            TOKENS=self.tokens,
            STAGES=stages,
            QUERY_STAGES=query_stages,
            CONSUMERS=self.consumers,
        ).launch(
            min(num_items, device.multiprocessors),
            128 * (self.consumers + 1),
            shared,
            **{name: value for name, value in arguments.items() if name in taken},
            query_map=_map(query, (head_size, num_heads, num_tokens), (_PANEL_SIZE, group, item_tokens)),
            key_map=map_cache(caches[0], box_tokens),
            value_map=map_cache(caches[1], box_tokens),
            num_tokens=num_tokens,
            num_kv_heads=layout.num_kv_heads,
            num_items=num_items,
            items_taken=Scratch(4, zeroed=True),
        )

    def _stages(self, problem: Problem, device: Device) -> tuple[int, int, int]:
        """Tiles of keys, work items with queries, and bytes, of shared memory."""
        head_size = problem.query.shape[2]
        row_bytes = -(-head_size // _PANEL_SIZE) * _ROW_BYTES
        query = 64 * self.consumers * row_bytes + 2 * _BARRIER_BYTES
        stage = 2 * (self.tokens * row_bytes + 2 * _BARRIER_BYTES)
        fixed = _BARRIER_BYTES + _CODE_STAGES * (self.tokens * head_size * problem.is_fp8 + 2 * _BARRIER_BYTES)
        room = device.shared_memory - _STATIC_BYTES - fixed
        # Tiles come first: docs/performance.md, "Three tiles and the queries of one item".
        stages = min(_MAX_STAGES, (room - query) // stage)
        query_stages = 2 if 2 * query + stages * stage <= room else 1
        return stages, query_stages, query_stages * query + stages * stage + fixed


def _map(arg: TensorArg, sizes: tuple[int, ...], box: tuple[int, ...], swizzle: int = _ROW_BYTES) -> TensorMap:
    """Of the whole argument, whose dimensions have these sizes from the fastest one on."""
    itemsize = arg.dtype.itemsize
    strides: list[int] = []
    pitch = -(-sizes[0] * itemsize // 16) * 16
    for size, stride in zip(sizes[1:], reversed(arg.strides[:-1]), strict=True):
        strides.append(stride * itemsize if size > 1 else pitch)  # the stride of a single element says nothing
        pitch = strides[-1] * size
    return TensorMap(arg, arg.dtype, sizes, tuple(strides), box, swizzle)


def _map_of_panels(cache: TensorArg, box_tokens: int) -> TensorMap:
    """Boxes of a panel of some tokens of a head; what a last panel has beyond the head is zeros."""
    return _map(cache, cache.shape[::-1], (_PANEL_SIZE, 1, box_tokens, 1))


def _map_of_codes(cache: TensorArg, box_tokens: int) -> TensorMap:
    """Boxes of some tokens of a head, whose codes are not swizzled."""
    return _map(cache, cache.shape[::-1], (cache.shape[3], 1, box_tokens, 1), swizzle=0)


def _has_whole_heads(problem: Problem) -> bool:
    """Whether a box may hold all panels of its tokens: panels follow each other through all heads of a token."""
    head_size = problem.query.shape[2]
    caches = problem.kv.key_cache, problem.kv.value_cache
    follow = all(cache.shape[2] == 1 or cache.strides[2] == head_size for cache in caches)
    return not problem.is_fp8 and head_size % _PANEL_SIZE == 0 and follow


def _map_of_whole_heads(cache: TensorArg, box_tokens: int) -> TensorMap:
    """Boxes of all panels of some tokens of a head. Of 8 tokens, one panel after another lies in shared memory."""
    num_blocks, block_size, heads, head_size = cache.shape
    panels, itemsize = head_size // _PANEL_SIZE, cache.dtype.itemsize
    row = heads * panels * _ROW_BYTES
    token = cache.strides[1] * itemsize if block_size > 1 else row
    block = cache.strides[0] * itemsize if num_blocks > 1 else block_size * token
    sizes = (_PANEL_SIZE, 8, heads * panels, block_size // 8, num_blocks)
    box = (_PANEL_SIZE, 8, panels, box_tokens // 8, 1)
    return TensorMap(cache, cache.dtype, sizes, (token, _ROW_BYTES, 8 * token, block), box, _ROW_BYTES)


def choose(problem: Problem) -> HopperConfig:
    """The largest tile of keys that registers and shared memory have room for; more rows for small heads."""
    head_size, is_plain = problem.query.shape[2], problem.has_plain_logits
    if head_size <= 64 and is_plain:
        return HopperConfig(tokens=112, consumers=3)
    if head_size <= 128:
        return HopperConfig(tokens=128, consumers=2)
    if head_size <= 192:
        return HopperConfig(tokens=80 if problem.is_fp8 else 112, consumers=2)
    return HopperConfig(tokens=48 if not is_plain else 80 if _has_whole_heads(problem) else 64, consumers=2)
