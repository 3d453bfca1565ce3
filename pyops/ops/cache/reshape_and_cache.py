"""Writing the keys and values of tokens into the slots of a packed cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any, Literal

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.op.decorator import op
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8
from ._common import (
    bad_slots,
    check_keys_and_values,
    check_tokens,
    encoded,
    example_cache,
    example_slots,
    existing_slots,
    first_stride,
    indexable,
    token_bytes,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..._core.system.device import Device

_reshape_and_cache = Kernel("cache/reshape_and_cache.cu")
_group_slots = Kernel("cache/group_slots.cu")
_reshape_and_cache_groups = Kernel("cache/reshape_and_cache_groups.cu")

# docs/performance/cache.md: writing by groups of slots is faster from 16 tokens per SM on. 512 columns, or six blocks
# per SM, are up to 5 % slower.
_MAX_UNGROUPED_TOKENS = 16  # tokens per SM
_MAX_GROUPED_SLOTS = 1 << 24  # slots of the cache: each takes 4 bytes of scratch memory
_MIN_GROUP, _MAX_GROUP = 8, 32  # contiguous slots of a group
_GROUP_COLUMNS = 256  # elements of a token that a block takes at a time
_GROUP_BLOCKS = 12  # blocks per SM
_GROUP_THREADS = 256  # threads of a block
_MAX_BATCH = 4  # vectors that a thread loads before it stores one
# Bounds of what tuning tries.
_MAX_TILE = 8192  # elements of a tile in shared memory, which is at most 48 KB per block
_MIN_COLUMNS = 16  # fewest columns of a tile
_CANDIDATE_THREADS = 128, 256, 512  # threads of a block


@dataclass(frozen=True)
class ReshapeProblem:
    """The input of `choose`: sizes of tokens and cache, and elements of one load.

    Attributes:
        many: whether there are more than _MAX_UNGROUPED_TOKENS tokens per SM.
    """

    num_tokens: int
    num_slots: int
    block_size: int
    row_size: int
    load_vec: int
    many: bool

    @property
    def max_group(self) -> int:
        """Most adjacent slots of a group; 0 where reshape_and_cache.cu runs instead."""
        group = max(size for size in range(1, _MAX_GROUP + 1) if self.block_size % size == 0)
        return group if self.many and group >= _MIN_GROUP and self.num_slots <= _MAX_GROUPED_SLOTS else 0

    def blocks(self, tiles: Tiles) -> int:
        """Blocks of reshape_and_cache.cu, half of them for values."""
        return 2 * -(-self.num_tokens // tiles.tokens) * -(-self.row_size // tiles.columns)

    def bucket(self) -> str:
        kind = f"groups={self.max_group}" if self.max_group else "tiles"
        tokens, load_vec = tuning.power_of_two(self.num_tokens), self.load_vec
        return f"{kind} tokens={tokens} elements={self.row_size} load_vec={load_vec}"


@dataclass(frozen=True)
class Tiles:
    """Blocks of reshape_and_cache.cu take tiles of `tokens` x `columns` elements."""

    tokens: int
    columns: int
    num_threads: int

    def candidates(self, problem: ReshapeProblem, device: Device) -> list[Tiles]:
        """Other tiles and blocks."""
        return tuning.varied(
            self,
            tokens=tuning.beside(self.tokens, 1, min(self.num_threads, _MAX_TILE // self.columns)),
            columns=tuning.beside(self.columns, _MIN_COLUMNS, _MAX_TILE // self.tokens),
            num_threads=_CANDIDATE_THREADS,
        )


# Tiles for few, more and many tokens; not tuned.
_FEW, _MEDIUM, _MANY = Tiles(4, 128, 128), Tiles(16, 64, 128), Tiles(32, 128, 256)
_FEW_BLOCKS = 8  # blocks of _FEW that an SM runs at once
_MAX_MEDIUM_TOKENS = 16  # tokens per SM


@dataclass(frozen=True)
class Groups:
    """Two launches find the tokens of each `group` of slots; the third writes `columns` of their elements at a time."""

    group: int
    columns: int
    batch: int
    num_threads: int
    max_blocks: int

    def candidates(self, problem: ReshapeProblem, device: Device) -> list[Groups]:
        """Other group sizes, blocks, and numbers of vectors in flight."""
        groups = tuning.beside(self.group, _MIN_GROUP, min(problem.max_group, _MAX_TILE // self.columns))
        return tuning.varied(
            self,
            group=[group for group in groups if problem.max_group % group == 0],
            columns=tuning.beside(self.columns, _MIN_COLUMNS, _MAX_TILE // self.group),
            batch=tuning.beside(self.batch, 1, 2 * _MAX_BATCH),
            num_threads=_CANDIDATE_THREADS,
            max_blocks=tuning.beside(self.max_blocks, device.num_sms, 4 * _GROUP_BLOCKS * device.num_sms),
        )


def choose(problem: ReshapeProblem, device: Device) -> Tiles | Groups:
    """Groups for many tokens, so that whole sectors are written, else tiles of tokens."""
    if group := problem.max_group:
        columns = min(_GROUP_COLUMNS, 16 * -(-problem.row_size // 16))
        batch = min(_MAX_BATCH, -(-group * columns // (problem.load_vec * _GROUP_THREADS)))
        return Groups(group, columns, batch, _GROUP_THREADS, _GROUP_BLOCKS * device.num_sms)
    if problem.blocks(_FEW) <= _FEW_BLOCKS * device.num_sms:
        return _FEW
    return _MEDIUM if problem.num_tokens <= _MAX_MEDIUM_TOKENS * device.num_sms else _MANY


@op(inout=("key_cache", "value_cache"), ulps=0)
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
) -> None:
    """Write keys and values of tokens into the slots of a packed cache.

    ``key_cache[b, h, d // x, o, d % x] = key[t, h, d]; value_cache[b, h, d, o] = value[t, h, d]`` with
    ``b, o = divmod(slot_mapping[t], block_size)``, or quantized to fp8. Nothing is written for a slot that is negative
    or after the last. Among tokens with the same slot, it is unspecified which one is kept.

    Args:
        key, value: [at least num_tokens, num_heads, head_size], float32, float16 or bfloat16; any token stride.
        key_cache: [num_blocks, num_heads, head_size / x, block_size, x], contiguous, written where slots say; of the
            dtype of `key`, or uint8 or float8.
        value_cache: [num_blocks, num_heads, head_size, block_size], likewise.
        slot_mapping: [num_tokens] int64 or int32, any stride.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
        k_scale, v_scale: one float32 each, or a number; not read for "auto".
    """
    num_blocks, num_heads, chunks, block_size, x = key_cache.shape
    tokens, block, offset = existing_slots(slot_mapping, num_blocks, block_size)
    keys = encoded(key[tokens], k_scale, key_cache, kv_cache_dtype).reshape(len(tokens), num_heads, chunks, x)
    indexable(key_cache)[block, :, :, offset] = keys
    indexable(value_cache)[block, :, :, offset] = encoded(value[tokens], v_scale, value_cache, kv_cache_dtype)


@reshape_and_cache.plan
def plan_reshape_and_cache(
    key: TensorArg,
    value: TensorArg,
    key_cache: TensorArg,
    value_cache: TensorArg,
    slot_mapping: TensorArg,
    kv_cache_dtype: str,
    k_scale: TensorArg,
    v_scale: TensorArg,
) -> list[Launch]:
    num_heads, head_size = check_keys_and_values(key, value)
    num_tokens = check_tokens(slot_mapping, key, value)
    kind = fp8.cache_dtype(key_cache, kv_cache_dtype, key.dtype)
    fp8.cache_dtype(value_cache, kv_cache_dtype, key.dtype)
    check.dtype(value_cache, key_cache.dtype)
    check.sizes(key_cache, num_blocks=None, num_heads=num_heads, chunks=None, block_size=None, x=None)
    num_blocks, _, chunks, block_size, x = key_cache.shape
    if chunks * x != head_size:
        raise key_cache.error(f"expected dimensions 2 and 4 to make head_size={head_size}, got shape {key_cache.shape}")
    sizes = {"num_blocks": num_blocks, "num_heads": num_heads, "head_size": head_size, "block_size": block_size}
    check.sizes(value_cache, **sizes)
    for arg in (key_cache, value_cache):
        check.contiguous(arg)
    row_size = num_heads * head_size
    rows = [replace(arg, shape=(arg.shape[0], row_size), strides=(arg.strides[0], 1)) for arg in (key, value)]
    for arg in (key, value):
        check.contiguous(replace(arg, shape=arg.shape[1:], strides=arg.strides[1:]))
    for scale in (k_scale, v_scale):
        check.scalar(scale)
    if not key_cache.numel or not num_tokens:
        return []
    load_vec = check.vector_width(row_size, *rows)
    constants: dict[str, Any] = {
        "scalar_t": key.dtype,
        "cache_t": kind,
        "ROW_SIZE": row_size,
        "BLOCK_SIZE": block_size,
        "X": x,
        "LOAD_VEC": load_vec,
        "KEY_VEC": check.vector_width(gcd(x, 16), replace(key_cache, shape=(), strides=())),
    }
    strides = {"key_stride": first_stride(key), "value_stride": first_stride(value)}
    values = replace(value_cache, shape=(), strides=())
    many = num_tokens > _MAX_UNGROUPED_TOKENS * key.device.num_sms
    problem = ReshapeProblem(num_tokens, num_blocks * block_size, block_size, row_size, load_vec, many)
    config = tuning.config(key.op, problem, key.device, choose)
    if isinstance(config, Groups):
        constants |= {"GROUP": config.group, "RUN": check.vector_width(config.group, values)}
        return _launch_groups(config, slot_mapping, num_blocks * block_size, constants, strides)
    return [
        _reshape_and_cache(
            **constants,
            slot_t=slot_mapping.dtype,
            RUN=check.vector_width(block_size, values),
            TOKENS=config.tokens,
            COLUMNS=config.columns,
            NUM_THREADS=config.num_threads,
        ).launch(
            grid=(-(-num_tokens // config.tokens), -(-row_size // config.columns), 2),
            block=config.num_threads,
            num_tokens=num_tokens,
            num_blocks=num_blocks,
            slot_mapping_stride=first_stride(slot_mapping),
            **strides,
        )
    ]


def _launch_groups(
    config: Groups, slot_mapping: TensorArg, num_slots: int, constants: dict[str, Any], strides: dict[str, int]
) -> list[Launch]:
    """The launches of group_slots.cu and reshape_and_cache_groups.cu."""
    (num_tokens,), num_threads = slot_mapping.shape, config.num_threads
    max_groups = min(num_tokens, num_slots // config.group)
    parts = -(-constants["ROW_SIZE"] // config.columns)
    scratch: dict[str, Any] = {
        "marks": Scratch(4 * num_slots // config.group),
        "tokens": Scratch(4 * num_slots),
        "groups": Scratch(4 * max_groups),
        "count": Scratch(4),
    }
    finding = [
        _group_slots(slot_t=slot_mapping.dtype, GROUP=config.group, CLEAR=clear, NUM_THREADS=num_threads).launch(
            grid=-(-num_tokens // num_threads),
            block=num_threads,
            num_tokens=num_tokens,
            num_slots=num_slots,
            slot_mapping_stride=first_stride(slot_mapping),
            **scratch,
        )
        for clear in (True, False)
    ]
    writing = _reshape_and_cache_groups(
        **constants, COLUMNS=config.columns, BATCH=config.batch, NUM_THREADS=num_threads
    ).launch(
        grid=min(2 * parts * max_groups, config.max_blocks),
        block=num_threads,
        **scratch,
        **strides,
    )
    return [*finding, writing]


@reshape_and_cache.bad_indices
def bad_indices_reshape_and_cache(value_cache: Tensor, slot_mapping: Tensor) -> dict[str, Tensor]:
    return bad_slots(slot_mapping, value_cache.shape[0], value_cache.shape[3])


@reshape_and_cache.traffic
def traffic_reshape_and_cache(key: TensorArg, key_cache: TensorArg, slot_mapping: TensorArg) -> int:
    row_size = key.shape[1] * key.shape[2]
    return slot_mapping.nbytes + slot_mapping.numel * 2 * token_bytes((key, row_size), (key_cache, row_size))


@reshape_and_cache.example
def example_reshape_and_cache(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e5m2"] = "auto",
    head_size: Literal[128, 80] = 128,
    num_heads: Literal[8] = 8,
) -> tuple[Any, ...]:
    block_size = 16
    num_blocks, slot_mapping = example_slots(make, num_tokens, block_size)
    x = 16 // (4 if dtype == "float32" else 2) if kv_cache_dtype == "auto" else 16
    cache_element = dtype if kv_cache_dtype == "auto" else "uint8"
    return (
        make.randn(num_tokens, num_heads, head_size, dtype=dtype),
        make.randn(num_tokens, num_heads, head_size, dtype=dtype),
        example_cache(make, num_blocks, num_heads, head_size // x, block_size, x, dtype=cache_element),
        example_cache(make, num_blocks, num_heads, head_size, block_size, dtype=cache_element),
        slot_mapping,
        kv_cache_dtype,
        make.full(1, value=0.03, dtype="float32"),
        make.full(1, value=0.05, dtype="float32"),
    )
