"""What the cache ops share: the kinds of a cache, where slots and positions lie, how rows are spread over threads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._core import check
from ..._core.dtypes import float8_e4m3fn, float8_e5m2, uint8
from ..._core.lazy import torch
from ..._core.tensor import TensorArg
from .._shared import fp8

if TYPE_CHECKING:
    from torch import Tensor

    from ..._core.device import Device

_BLOCK_VECS = (1024, 256)  # vectors of a block's tokens, where there are many or fewer
CODES = (uint8, float8_e4m3fn, float8_e5m2)  # as which a cache of codes may be given


def codes(x: Tensor, scale: Tensor, kind: Any) -> Tensor:
    """uint8 codes of ``x / scale`` in a float8 of torch: to the nearest, saturating; NaN is the positive one."""
    quotient = x.float() / scale
    largest = torch.finfo(kind).max
    rounded = quotient.clamp(-largest, largest).to(kind).view(torch.uint8)
    return torch.where(quotient.isnan(), 0x80 if kind == torch.float8_e4m3fnuz else 0x7F, rounded)


def kept(x: Tensor, scale: Tensor, cache: Tensor, kv_cache_dtype: str) -> Tensor:
    """What `cache`, of this kind, keeps of `x`. `scale` is one number, or one for each row of the last dimension."""
    if kv_cache_dtype == "auto":
        return x
    scale = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())
    return codes(x, scale, fp8.cache_codes(cache, kv_cache_dtype))


def held(cache: Tensor, block: Tensor, offset: Tensor, scale: Tensor, kv_cache_dtype: str, dtype: Any) -> Tensor:
    """What those entries of `cache`, of this kind, stand for in `dtype`."""
    x = bits(cache)[block, offset]
    if kv_cache_dtype == "auto":
        return x
    return (x.view(fp8.cache_codes(cache, kv_cache_dtype)).float() * scale.reshape(())).to(dtype)


def bits(x: Tensor) -> Tensor:
    """`x`, of float8 as its bytes, which torch can index."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def slots(slot_mapping: Tensor, num_blocks: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, blocks, offsets) of the tokens whose slot exists."""
    slot = slot_mapping.long()
    tokens = ((slot >= 0) & (slot < num_blocks * block_size)).nonzero().squeeze(1)
    return tokens, slot[tokens] // block_size, slot[tokens] % block_size


def positions(
    block_table: Tensor, sequence: Tensor, position: Tensor, num_blocks: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, blocks, offsets) of those positions of sequences that lie in a block of the cache."""
    num_seqs, max_blocks = block_table.shape
    inside = (sequence >= 0) & (sequence < num_seqs) & (position >= 0) & (position < max_blocks * block_size)
    rows = inside.nonzero().squeeze(1)
    block = block_table[sequence[rows], position[rows] // block_size].long()
    exists = (block >= 0) & (block < num_blocks)
    return rows[exists], block[exists], position[rows[exists]] % block_size


def slots_beyond(slot_mapping: Tensor, num_blocks: int, block_size: int) -> dict[str, Tensor]:
    """For PYOPS_CHECK: the slots behind the last; negative ones say that nothing is to be written."""
    return {"slot_mapping": slot_mapping >= num_blocks * block_size}


def entries_outside(
    block_table: Tensor, starts: Tensor, lengths: Tensor, num_blocks: int, block_size: int
) -> dict[str, Tensor]:
    """For PYOPS_CHECK: the entries that name no block, of those that `lengths` positions from `starts` on need, one of
    each for every sequence."""
    num_seqs, table = len(lengths), block_table[: len(lengths)]
    first = torch.arange(block_table.shape[1], device=block_table.device) * block_size
    starts, ends = starts[:, None], (starts + lengths)[:, None]
    used = (first < ends) & (first + block_size > starts) & (starts < ends)
    wrong = torch.zeros_like(block_table, dtype=torch.bool)
    wrong[:num_seqs] = used & ((table < 0) | (table >= num_blocks))
    return {"block_table": wrong}


class Entries(NamedTuple):
    """A cache of entries: [num_blocks, block_size, ...], the elements of an entry one after another."""

    num_blocks: int
    block_size: int
    size: int  # elements of an entry
    block_stride: int
    slot_stride: int

    @property
    def strides(self) -> dict[str, int]:
        return {"num_blocks": self.num_blocks, "block_stride": self.block_stride, "slot_stride": self.slot_stride}


def entries(cache: TensorArg) -> Entries:
    """The sizes and strides of a cache of entries."""
    if len(cache.shape) < 3:
        raise cache.error(f"expected at least 3 dimensions, got shape {cache.shape}")
    num_blocks, block_size, *sizes = cache.shape
    one = replace(cache, shape=tuple(sizes), strides=cache.strides[2:])
    check.contiguous(one)
    return Entries(num_blocks, block_size, one.numel, *cache.strides[:2])


def flat(cache: TensorArg, entry: Entries) -> TensorArg:
    """The cache as [num_blocks, block_size, elements of an entry]."""
    return replace(cache, shape=(*cache.shape[:2], entry.size), strides=(*cache.strides[:2], 1))


def stride(arg: TensorArg | None) -> int:
    """Elements from one to the next of the first dimension; 0 where there is none."""
    return arg.strides[0] if arg and arg.shape else 0


def spread(num_tokens: int, row_vecs: int, device: Device) -> tuple[int, dict[str, Any]]:
    """(blocks, constants) for tokens of `row_vecs` vectors each.

    Many tokens: blocks of four vectors to a thread, so that enough bytes are in flight. Where that leaves
    multiprocessors without work, one vector to a thread. Few: as many blocks as there are tokens, because what counts
    is the way through one.
    """
    num_threads = 256
    for block_vecs in _BLOCK_VECS:
        tokens = min(64, max(1, block_vecs // row_vecs))
        if num_tokens >= tokens * 2 * device.multiprocessors:
            break
    else:
        tokens = max(1, 64 // row_vecs)
        num_threads = check.threads(tokens * row_vecs, max_threads=256)
    batch = min(4, -(-tokens * row_vecs // num_threads))
    return -(-num_tokens // tokens), {"TOKENS": tokens, "BATCH": batch, "NUM_THREADS": num_threads}


def example_cache(make: Any, *shape: int, dtype: str) -> Any:
    """A cache with something in every slot; of codes, nothing infinite and no NaN."""
    return make.randint(0, 120, *shape, dtype=dtype) if dtype == "uint8" else make.randn(*shape, dtype=dtype)


def check_tokens(slot_mapping: TensorArg, *sources: TensorArg) -> int:
    """The length of `slot_mapping`, which no source falls short of."""
    check.index(slot_mapping, num_tokens=None)
    (num_tokens,) = slot_mapping.shape
    for source in sources:
        if not source.shape or source.shape[0] < num_tokens:
            raise source.error(f"expected at least num_tokens={num_tokens} rows like slot_mapping, got {source.shape}")
    return num_tokens


def check_rows(arg: TensorArg | None, num_seqs: int, what: str = "num_seqs") -> None:
    """`arg` has a row for each of `num_seqs`, which is the size `what`."""
    if arg is not None and arg.shape[0] < num_seqs:
        raise arg.error(f"expected at least {what}={num_seqs} rows, got shape {arg.shape}")


def token_bytes(*rows: tuple[TensorArg, int]) -> int:
    """Bytes of one row of each tensor, so many elements of it."""
    return sum(arg.dtype.itemsize * size for arg, size in rows)


def example_slots(make: Any, num_tokens: int, block_size: int) -> tuple[int, Any]:
    """(num_blocks, slots all over them) for an example."""
    num_blocks = -(-num_tokens // block_size) + 2
    return num_blocks, make.permutation(num_blocks * block_size, num_tokens)
