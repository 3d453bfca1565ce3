"""What the rotary ops share: the checks of heads and tables, and the geometry of their kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import gcd
from typing import TYPE_CHECKING

from ..._core import check
from ..._core.dtypes import int32, int64
from ..._core.tensor import TensorArg

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_ROTARY_DIM = 2048
EXAMPLE_POSITIONS = 4096  # rows of the tables of examples

# The geometry, measured at 16384 tokens on an H200 (docs/performance.md, "Attention, cache and rotary").
# Bytes of the first elements of a thread's pairs: without is_neox (an access has both elements of a pair), and with it.
_PAIR_BYTES = 8, 16
_FEW_THREADS = 1024  # threads per multiprocessor, with one head to a thread: up to here, tokens are few
# Pairs (few tokens, many tokens):
_THREAD_HEADS = 1, 4  # max heads per thread: one, to use the whole device; several, for bytes in flight
_BLOCK_THREADS = 128, 512  # threads that a block with a part of a token, or a whole one, has about
_MIN_THREADS = 64, 128  # min threads of a block


@dataclass(frozen=True)
class RotaryConfig:
    """The geometry of a rotary kernel (Pairs and HeadIndex in rotary.cuh); all but the last two are its constants.

    Attributes:
        rotary_dim: elements of a head that turn.
        is_neox: whether pairs are (j, j + rotary_dim / 2), or else (2j, 2j + 1).
        pairs: neighbouring pairs of a head that a thread turns.
        access_size: elements that one access to a head moves.
        cache_access: elements that one access to a table of angles moves.
        thread_heads: heads of a token per thread.
        block_groups: groups of threads of a block, each of which shares its heads.
        num_threads: threads of a block.
        block_tokens: tokens of a block.
        token_blocks: blocks that the heads of a token are cut into.
    """

    rotary_dim: int
    is_neox: bool
    pairs: int
    access_size: int
    cache_access: int
    thread_heads: int
    block_groups: int
    num_threads: int
    block_tokens: int
    token_blocks: int

    @cached_property
    def constants(self) -> dict[str, int]:
        """The constants of the kernel, by its names for them."""
        return {
            "ROTARY_DIM": self.rotary_dim,
            "IS_NEOX": self.is_neox,
            "PAIRS": self.pairs,
            "ACCESS_SIZE": self.access_size,
            "CACHE_ACCESS": self.cache_access,
            "THREAD_HEADS": self.thread_heads,
            "BLOCK_GROUPS": self.block_groups,
            "NUM_THREADS": self.num_threads,
        }

    def grid(self, num_tokens: int) -> tuple[int, int]:
        """Blocks (groups of tokens, parts of a token) for so many tokens."""
        return -(-num_tokens // self.block_tokens), self.token_blocks


def choose(
    num_tokens: int,
    num_heads: int,
    rotary_dim: int,
    is_neox: bool,
    tables: Sequence[TensorArg],
    heads: Sequence[TensorArg],
) -> RotaryConfig:
    """The geometry for `num_tokens` tokens of `num_heads` heads.

    Args:
        tables: have rows of a multiple of rotary_dim / 2 angles.
        heads: [..., heads, head_size], all that a thread reads or writes.
    """
    pairs = gcd(rotary_dim // 2, _PAIR_BYTES[bool(is_neox)] // heads[0].dtype.itemsize)
    threads = num_tokens * num_heads * (rotary_dim // 2 // pairs)  # with one head to a thread
    return _choose(
        rotary_dim,
        bool(is_neox),
        pairs,
        check.vector_width(pairs if is_neox else 2 * pairs, *heads),
        check.vector_width(pairs, *tables),
        num_heads,
        threads > _FEW_THREADS * heads[0].device.multiprocessors,
    )


@cache  # a plan miss must not pay for it
def _choose(
    rotary_dim: int,
    is_neox: bool,
    pairs: int,
    access_size: int,
    cache_access: int,
    num_heads: int,
    many: bool,
) -> RotaryConfig:
    """`choose` for many tokens or few.

    A group of lanes shares the pairs of its heads. Few tokens get small blocks. Many tokens get blocks of whole tokens,
    of the size that leaves the fewest threads idle.
    """
    lanes = rotary_dim // 2 // pairs
    groups = -(-num_heads // _THREAD_HEADS[many])  # of a token
    block_groups = -(-groups // -(-groups * lanes // _BLOCK_THREADS[many]))
    needed = block_groups * lanes  # threads for a token, or for the part of a token that a block has
    min_threads = max(-(-needed // 64) * 64, _MIN_THREADS[many])
    max_threads = max(min_threads, _BLOCK_THREADS[True]) if many else min_threads
    num_threads = min(range(min_threads, max_threads + 1, 64), key=lambda threads: threads % needed / threads)
    return RotaryConfig(
        rotary_dim=rotary_dim,
        is_neox=is_neox,
        pairs=pairs,
        access_size=access_size,
        cache_access=cache_access,
        thread_heads=-(-num_heads // groups),
        block_groups=block_groups,
        num_threads=num_threads,
        block_tokens=num_threads // needed,
        token_blocks=-(-groups // block_groups),
    )


def split_heads(arg: TensorArg, tokens: Sequence[int], head_size: int) -> TensorArg:
    """`arg`, [*tokens, heads, head_size] or [*tokens, heads * head_size], as [*tokens, heads, head_size]."""
    rank = len(tokens)
    if len(arg.shape) not in (rank + 1, rank + 2) or arg.shape[:rank] != tuple(tokens):
        sizes = ", ".join([*map(str, tokens), "[heads,] head_size"])
        raise arg.error(f"expected shape ({sizes}) for these positions, got {arg.shape}")
    size = check.row_size(arg)
    if len(arg.shape) == rank + 1:
        if size % head_size or not size:
            raise arg.error(f"expected rows of whole heads of head_size={head_size}, got shape {arg.shape}")
        return replace(
            arg,
            shape=(*tokens, size // head_size, head_size),
            strides=(*arg.strides[:rank], head_size, 1),
        )
    if size != head_size or not arg.shape[-2]:
        raise arg.error(f"expected heads of head_size={head_size}, got shape {arg.shape}")
    return arg


def query_and_key(
    positions: TensorArg, query: TensorArg, key: TensorArg | None, tokens: Sequence[int], head_size: int
) -> list[TensorArg]:
    """Check positions, query and key; returns query and, if given, key as [*tokens, heads, head_size]."""
    check.floating(query)
    check.dtype(key, query.dtype)
    check.dtype(positions, int32, int64)
    if head_size < 1:
        raise check.refuse(query, "head_size", f"expected at least 1, got {head_size}")
    heads = [split_heads(arg, tokens, head_size) for arg in (query, key) if arg]
    if key and heads[0].shape[-2] % heads[1].shape[-2]:
        raise key.error(f"expected heads that divide those of query, {heads[0].shape[-2]}, got {heads[1].shape[-2]}")
    return heads


def rotary_dim_of(cache: TensorArg, query: TensorArg, head_size: int) -> int:
    """Check the table `cache`, [max_position, rotary_dim]; returns rotary_dim, the elements of a head that turn."""
    check.dtype(cache, query.dtype)
    if len(cache.shape) != 2 or not cache.shape[0]:
        raise cache.error(f"expected shape (max_position, rotary_dim) with at least one row, got {cache.shape}")
    rotary_dim = cache.shape[1]
    if rotary_dim % 2 or not 0 < rotary_dim <= min(head_size, MAX_ROTARY_DIM):
        raise cache.error(
            f"expected an even rotary_dim of at most min(head_size={head_size}, {MAX_ROTARY_DIM}), got {rotary_dim}"
        )
    check.contiguous(cache)
    return rotary_dim
