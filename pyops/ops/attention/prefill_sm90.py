"""Attention of many query tokens by wgmma on compute capability 9.0: the geometry of prefill_sm90.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..._core import tuning
from ..._core.device import Device
from ..._core.kernel import Kernel, Launch, Scratch
from ..._core.tensor import TensorArg
from ..._core.tensor_map import TensorMap
from .decode_launch import workspace
from .prefill_problem import PrefillProblem

_hopper = Kernel("attention/prefill_sm90.cu")
_join = Kernel("attention/prefill_combine.cu")

ROW_BYTES = 128  # of a panel: the swizzle
_BARRIER_BYTES = 8
_STATIC_BYTES = 1024  # of shared memory, at most, aligned: work items and holes
_MAX_STAGES = 4  # of tiles of keys, and of codes
MIN_CODE_STAGES = 2
_JOIN_WARPS = 8  # of a block of prefill_combine.cu; each has a row
_MAX_SPLITS = 32
_NO_WINDOW = 2**31 - 1  # the sliding_window that kernels take for none
# Keys and values of heads whose items of work run at once: docs/performance/prefill.md, "Sections of heads".
_SECTION_BYTES = 24 << 20
# The cost model, in times of a KV tile: docs/performance/prefill.md, "A work tile costs 3.2 us" and "An empty work slot
# costs 1.5 us".
_ITEM_TILES, _JOIN_TILES, _NUMBER_TILES = 2, 2, 0.75


@dataclass(frozen=True, slots=True)
class PrefillSm90Config:
    """The geometry of prefill_sm90.cu; the attributes are constants of the kernel.

    Attributes:
        tokens: keys of a tile.
        consumers: warpgroups of 64 rows.
        max_splits: splits of the keys of an item of work, at most; a block takes one split.
    """

    tokens: int
    consumers: int
    max_splits: int = 1

    def __post_init__(self) -> None:
        if self.tokens % 16 or not 0 < self.tokens <= 256 or self.consumers not in (2, 3) or self.max_splits < 1:
            raise ValueError(f"no geometry of prefill_sm90.cu: {self}")

    def candidates(self, problem: PrefillProblem, device: Device) -> list[PrefillSm90Config]:
        """Other tiles and numbers of warpgroups, as far as shared memory and registers suffice."""
        found = tuning.varied(self, tokens=(64, 80, 96, 112, 128, 160, 176, 192), consumers=(2, 3))
        return [one for one in found if one.fits(problem, device)]

    def fits(self, problem: PrefillProblem, device: Device) -> bool:
        """Whether two tiles of keys and values fit into shared memory, and logits and sums into registers."""
        registers = -(-problem.value_size // 16) * 8 + self.tokens * 3 // 4
        boxes = self.tokens // problem.box_tokens(self.tokens)
        return (
            self._stages(problem, device)[0] >= 2 and registers <= (192 if self.consumers == 2 else 120) and boxes <= 32
        )

    def launch(self, problem: PrefillProblem, constants: dict[str, Any], arguments: dict[str, Any]) -> list[Launch]:
        """As many blocks as the device has multiprocessors, which take work items from a counter; and the join of
        splits, where an item may have several."""
        device, query, layout = problem.query.device, problem.query, problem.layout
        num_tokens, num_heads, _ = query.shape
        group, item_tokens = problem.group, 64 * self.consumers // problem.group
        stages, query_stages, code_stages, shared = self._stages(problem, device)
        box_tokens = problem.box_tokens(self.tokens)
        caches = problem.keys_and_values
        is_fp8 = problem.is_fp8
        whole_heads = not is_fp8 and not layout.ragged and has_whole_heads(*caches)
        map_cache = _map_of_codes if is_fp8 else map_of_cache
        kernel = _hopper.for_arch(device.arch_feature)
        num_tiles = num_tokens // item_tokens + problem.num_seqs
        num_items = num_tiles * layout.num_kv_heads
        has_splits = self.max_splits > 1
        shared_constants = {
            "HAS_SPLITS": has_splits,
            "TOKENS": self.tokens,
            "CONSUMERS": self.consumers,
        }
        arguments = arguments | {
            **workspace(num_tokens * num_heads * self.max_splits if has_splits else 0, problem.value_size),
            "max_splits": self.max_splits,
            "num_tokens": num_tokens,
            "num_kv_heads": layout.num_kv_heads,
            "section_heads": section_heads(problem, device, num_tiles),
            "sliding_window": window_of(problem),
        }
        attend = kernel(
            **{name: value for name, value in constants.items() if name not in ("PACKED", "X")},
            **shared_constants,
            BOX_TOKENS=box_tokens,
            WHOLE_HEADS=whole_heads,
            STAGES=stages,
            QUERY_STAGES=query_stages,
            CODE_STAGES=code_stages,
        ).launch(
            min(num_items * self.max_splits, device.multiprocessors),
            128 * (self.consumers + 1),
            shared,
            **taken(kernel, arguments),
            query_map=map_of_queries(query, group, item_tokens),
            key_map=map_cache(caches[0], box_tokens, whole_heads=whole_heads),
            value_map=map_cache(caches[1], box_tokens, whole_heads=whole_heads),
            key_head_panels=head_panels(caches[0]),
            value_head_panels=head_panels(caches[1]),
            num_items=num_items * self.max_splits,
            items_taken=Scratch(4, zeroed=True),
        )
        if not has_splits:
            return [attend]
        names = "scalar_t", "length_t", "starts_t", "VALUE_SIZE", "GROUP", "RAGGED", "CAUSAL", "HAS_SINKS", "HAS_LSE"
        join = _join(**{name: constants[name] for name in names}, **shared_constants)
        grid = (num_items, -(-64 * self.consumers // _JOIN_WARPS))
        return [attend, join.launch(grid, 32 * _JOIN_WARPS, **taken(_join, arguments))]

    def _stages(self, problem: PrefillProblem, device: Device) -> tuple[int, int, int, int]:
        """Tiles of keys, work items with queries, tiles of codes, and bytes, of shared memory."""
        head_size = problem.query.shape[2]
        key_bytes, value_bytes = (-(-2 * size // ROW_BYTES) * ROW_BYTES for size in (head_size, problem.value_size))
        return stages_of(
            device,
            64 * self.consumers * key_bytes,
            self.tokens * (key_bytes + value_bytes),
            self.tokens * head_size * problem.is_fp8,
            _MAX_STAGES if problem.is_fp8 else MIN_CODE_STAGES,
        )


def stages_of(
    device: Device, query_bytes: int, tile_bytes: int, code_bytes: int, max_code_stages: int
) -> tuple[int, int, int, int]:
    """Tiles of keys, work items with queries, tiles of codes, and bytes, of shared memory.

    Queries of an item take so many bytes, a tile of keys and one of values together, and one of codes.
    """
    query, stage = query_bytes + 2 * _BARRIER_BYTES, tile_bytes + 4 * _BARRIER_BYTES
    code, fixed = code_bytes + 2 * _BARRIER_BYTES, 3 * _BARRIER_BYTES
    room = device.shared_memory - _STATIC_BYTES - fixed - query - MIN_CODE_STAGES * code
    # Tiles come first: docs/performance/prefill.md, "Three tiles and the queries of one item".
    stages = min(_MAX_STAGES, room // stage)
    room -= stages * stage
    code_stages = min(max_code_stages, MIN_CODE_STAGES + room // code)
    room -= (code_stages - MIN_CODE_STAGES) * code
    query_stages = 2 if query <= room else 1
    return stages, query_stages, code_stages, query_stages * query + stages * stage + code_stages * code + fixed


def taken(kernel: Kernel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the kernel takes."""
    taken = {name for _, name in kernel.signature.parameters}
    return {name: value for name, value in arguments.items() if name in taken}


def _map(arg: TensorArg, sizes: tuple[int, ...], box: tuple[int, ...], swizzle: int = ROW_BYTES) -> TensorMap:
    """Of the whole argument, whose dimensions have these sizes from the fastest one on."""
    itemsize = arg.dtype.itemsize
    strides: list[int] = []
    pitch = -(-sizes[0] * itemsize // 16) * 16
    for size, stride in zip(sizes[1:], reversed(arg.strides[:-1]), strict=True):
        strides.append(stride * itemsize if size > 1 else pitch)  # the stride of a single element says nothing
        pitch = strides[-1] * size
    return TensorMap(arg, arg.dtype, sizes, tuple(strides), box, swizzle)


def _panel_size(arg: TensorArg) -> int:
    """Elements of a panel."""
    return ROW_BYTES // arg.dtype.itemsize


def map_of_queries(query: TensorArg, group: int, item_tokens: int) -> TensorMap:
    """Boxes of a panel of the query heads of an item of work."""
    return _map(query, query.shape[::-1], (_panel_size(query), group, item_tokens))


def map_of_cache(cache: TensorArg, box_tokens: int, *, whole_heads: bool) -> TensorMap:
    """Boxes of some tokens of a head: of all panels, or of one; what a last panel has beyond the head is zeros.

    Of a cache, or of ragged keys or values.
    """
    if whole_heads:
        return _map_of_whole_heads(cache, box_tokens)
    return _map(cache, cache.shape[::-1], (_panel_size(cache), 1, box_tokens, 1)[: len(cache.shape)])


def _map_of_codes(cache: TensorArg, box_tokens: int, *, whole_heads: bool) -> TensorMap:
    """Boxes of some tokens of a head, whose codes are not swizzled."""
    return _map(cache, cache.shape[::-1], (cache.shape[3], 1, box_tokens, 1), swizzle=0)


def has_whole_heads(*caches: TensorArg) -> bool:
    """Whether a box may hold all panels of its tokens: heads have whole panels, and begin whole panels apart."""
    return all(
        size % _panel_size(cache) == 0
        for cache in caches
        for size in (cache.shape[3], cache.strides[2] if cache.shape[2] > 1 else 0)
    )


def head_panels(cache: TensorArg) -> int:
    """Panels from one head of a token to the next."""
    return (cache.strides[-2] if cache.shape[-2] > 1 else cache.shape[-1]) // _panel_size(cache)


def _map_of_whole_heads(cache: TensorArg, box_tokens: int) -> TensorMap:
    """Boxes of all panels of some tokens of a head. Of 8 tokens, one panel after another lies in shared memory."""
    num_blocks, block_size, heads, head_size = cache.shape
    panel_size, itemsize = _panel_size(cache), cache.dtype.itemsize
    panels = head_size // panel_size
    row_panels = (heads - 1) * head_panels(cache) + panels
    row = row_panels * ROW_BYTES
    token = cache.strides[1] * itemsize if block_size > 1 else row
    block = cache.strides[0] * itemsize if num_blocks > 1 else block_size * token
    sizes = (panel_size, 8, row_panels, block_size // 8, num_blocks)
    box = (panel_size, 8, panels, box_tokens // 8, 1)
    return TensorMap(cache, cache.dtype, sizes, (token, ROW_BYTES, 8 * token, block), box, ROW_BYTES)


def choose(problem: PrefillProblem, device: Device) -> PrefillSm90Config:
    """The largest tile of keys that registers and shared memory have room for; splits of the keys where work items are
    fewer than multiprocessors."""
    one = _choose_tile(problem)
    while not one.fits(problem, device):
        one = replace(one, tokens=one.tokens - 16)
    max_splits = choose_splits(problem, 64 * one.consumers, one.tokens, device)
    if max_splits > 1 and problem.value_size > 192:
        # Who finds splits takes registers from the consumers, which spill with one tile more of values of 256.
        one = replace(one, tokens=min(one.tokens, 64 if problem.has_plain_logits else 48))
    return replace(one, max_splits=max_splits)


def _choose_tile(problem: PrefillProblem) -> PrefillSm90Config:
    """The largest tile of keys that registers have room for, beside sums of values; more rows for small heads."""
    head_size, value_size, is_plain = problem.query.shape[2], problem.value_size, problem.has_plain_logits
    if head_size <= 64:
        return PrefillSm90Config(tokens=112 if is_plain else 96, consumers=3)
    if value_size <= 128:
        return PrefillSm90Config(tokens=128, consumers=2)
    if value_size <= 192:
        return PrefillSm90Config(tokens=112 if is_plain else 96, consumers=2)
    if problem.is_fp8 or problem.layout.ragged or not has_whole_heads(*problem.keys_and_values):
        return PrefillSm90Config(tokens=64 if is_plain else 48, consumers=2)
    return PrefillSm90Config(tokens=80 if is_plain else 64, consumers=2)


def window_of(problem: PrefillProblem) -> int:
    """The window as kernels take it."""
    return min(problem.options.sliding_window, _NO_WINDOW) or _NO_WINDOW


def section_heads(problem: PrefillProblem, device: Device, num_tiles: int) -> int:
    """Key-value heads of a section of work items: as many as have room in the L2 cache, if a sequence is as long as
    block tables are, but items for two rounds of multiprocessors, of which long ones come before short ones."""
    layout, elements = problem.layout, problem.query.shape[2] + problem.value_size
    head_bytes = problem.expected_tokens * elements * layout.dtype.itemsize
    heads = max(_SECTION_BYTES // max(1, head_bytes), -(-2 * device.multiprocessors // max(1, num_tiles)))
    return max(1, min(layout.num_kv_heads, heads))


def choose_splits(problem: PrefillProblem, item_rows: int, tile_tokens: int, device: Device) -> int:
    """As many splits of an item as end first by the model of the device.

    Each sequence may leave an item, with all its splits, without work.
    """
    item_tokens, num_tokens = item_rows // problem.group, problem.query.shape[0]
    if problem.single_rows:
        num_tokens = max(0, num_tokens - problem.num_seqs)
    items = -(-num_tokens // item_tokens) * problem.layout.num_kv_heads
    empty_items = problem.num_seqs * problem.layout.num_kv_heads
    if items >= device.multiprocessors:
        return 1
    window, max_tokens = problem.options.sliding_window, problem.expected_tokens
    attended = min(max_tokens, window + item_tokens) if window > 0 else max_tokens
    tiles = -(-attended // tile_tokens)

    def time(splits: int) -> float:
        rounds, empty_rounds = (-(-count * splits // device.multiprocessors) for count in (items, empty_items))
        tile_times = rounds * (-(-tiles // splits) + _ITEM_TILES) + (_JOIN_TILES if splits > 1 else 0)
        return tile_times + empty_rounds * _NUMBER_TILES

    return min(range(1, _MAX_SPLITS + 1), key=time)
