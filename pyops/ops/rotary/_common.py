"""Code shared by the rotary ops: checks of heads and tables, and the geometry of the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

from ... import check, tuning
from ..._core.tensors.dtypes import DType, int32, int64
from ..._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..._core.system.device import Device

MAX_ROTARY_DIM = 2048  # most rotated elements of a head
EXAMPLE_POSITIONS = 4096  # rows of the cos/sin tables in examples

# The geometry, measured at 16384 tokens on an H200 (docs/performance/cache.md).
# Bytes of the first elements of the pairs of a thread: without is_neox, where one access loads both elements of a pair,
# and with it.
_PAIR_BYTES = 8, 16
_FEW_THREADS = 1024  # threads per SM, with one head to a thread, up to which tokens are few


class Share(NamedTuple):
    """The size of the work of a thread and of a block.

    Attributes:
        thread_heads: most heads per thread.
        block_threads: approximate threads of a block that takes at most one token.
        min_threads: fewest threads of a block.
        max_threads: most threads of a block that takes several tokens so that fewer threads are idle.
    """

    thread_heads: int
    block_threads: int
    min_threads: int
    max_threads: int


_FEW = Share(1, 128, 64, 64)  # one head per thread, to use all SMs
_MANY = Share(4, 512, 128, 512)  # several heads, for bytes in flight
# What tuning tries in addition to _FEW and _MANY.
_OTHERS = Share(1, 256, 64, 256), Share(2, 128, 64, 64), Share(2, 256, 128, 256), Share(4, 256, 128, 256)


class RotaryProblem(NamedTuple):
    """The input of `choose`.

    Attributes:
        num_tokens: tokens of the launch.
        dtype: element type of the heads.
        num_heads: heads of a token.
        rotary_dim: elements of a head that are rotated.
        is_neox: whether pairs are (j, j + rotary_dim / 2), or else (2j, 2j + 1).
        pairs: adjacent pairs of a head that a thread rotates.
        access_size: elements that one access to a head moves.
        cache_access: elements that one access to a table of angles moves.
    """

    num_tokens: int
    dtype: DType
    num_heads: int
    rotary_dim: int
    is_neox: bool
    pairs: int
    access_size: int
    cache_access: int

    def bucket(self) -> str:
        words = [
            f"tokens={tuning.power_of_two(self.num_tokens)}",
            f"heads={self.num_heads}x{self.rotary_dim}",
            self.dtype.name,
            f"access={self.access_size}/{self.cache_access}",
        ]
        return " ".join(words + ["neox"] * self.is_neox)


@dataclass(frozen=True)
class RotaryConfig:
    """The geometry of a rotary kernel (Pairs and HeadIndex in rotary.cuh); all but the last two are its constants.

    Attributes:
        rotary_dim: elements of a head that are rotated.
        is_neox: whether pairs are (j, j + rotary_dim / 2), or else (2j, 2j + 1).
        pairs: adjacent pairs of a head that a thread rotates.
        access_size: elements that one access to a head moves.
        cache_access: elements that one access to a table of angles moves.
        thread_heads: heads of a token per thread.
        block_groups: groups of threads of a block; the threads of a group share `thread_heads` heads.
        num_threads: threads of a block.
        block_tokens: tokens of a block.
        token_blocks: blocks that share the heads of a token.
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
        """The kernel's compile-time constants by name."""
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
        """Blocks (groups of tokens, parts of a token) for `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens), self.token_blocks

    def candidates(self, problem: RotaryProblem, device: Device) -> list[RotaryConfig]:
        """Other numbers of heads per thread, and other blocks."""
        return [_config(share, *problem[2:]) for share in (_FEW, *_OTHERS, _MANY)]


def choose(
    num_tokens: int,
    num_heads: int,
    rotary_dim: int,
    is_neox: bool,
    tables: Sequence[TensorArg],
    heads: Sequence[TensorArg],
    max_pairs: int = 16,
) -> RotaryConfig:
    """The geometry for `num_tokens` tokens of `num_heads` heads.

    Args:
        tables: tables with rows of a multiple of rotary_dim / 2 angles.
        heads: tensors [..., heads, head_size] that the kernel reads or writes.
        max_pairs: most pairs per thread, a power of two.
    """
    pairs = gcd(rotary_dim // 2, _PAIR_BYTES[bool(is_neox)] // heads[0].dtype.itemsize, max_pairs)
    problem = RotaryProblem(
        num_tokens,
        heads[0].dtype,
        num_heads,
        rotary_dim,
        bool(is_neox),
        pairs,
        check.vector_width(pairs if is_neox else 2 * pairs, *heads),
        check.vector_width(pairs, *tables),
    )
    return tuning.config(heads[0].op, problem, heads[0].device, _choose)


def _choose(problem: RotaryProblem, device: Device) -> RotaryConfig:
    """Small blocks for few tokens, blocks of whole tokens for many."""
    threads = problem.num_tokens * problem.num_heads * (problem.rotary_dim // 2 // problem.pairs)  # one head per thread
    many = threads > _FEW_THREADS * device.num_sms
    return _config(_MANY if many else _FEW, *problem[2:])


@cache  # a plan miss must not pay for it
def _config(
    share: Share, num_heads: int, rotary_dim: int, is_neox: bool, pairs: int, access_size: int, cache_access: int
) -> RotaryConfig:
    """The geometry with this share. A group of lanes shares the pairs of its heads."""
    lanes = rotary_dim // 2 // pairs
    groups = -(-num_heads // share.thread_heads)  # groups of a token
    block_groups = -(-groups // -(-groups * lanes // share.block_threads))
    needed = block_groups * lanes  # threads for a token, or for the block's part of a token
    min_threads = max(-(-needed // 64) * 64, share.min_threads)
    sizes = range(min_threads, max(min_threads, share.max_threads) + 1, 64)
    num_threads = min(sizes, key=lambda threads: threads % needed / threads)
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


def rotary_dim_of(cache: TensorArg, query: TensorArg, head_size: int, dtype: DType | None = None) -> int:
    """Check the table `cache`, [max_position, rotary_dim], of `dtype`, or of the dtype of `query`.

    Returns rotary_dim, the elements of a head that are rotated.
    """
    check.dtype(cache, dtype or query.dtype)
    if len(cache.shape) != 2 or not cache.shape[0]:
        raise cache.error(f"expected shape (max_position, rotary_dim) with at least one row, got {cache.shape}")
    rotary_dim = cache.shape[1]
    if rotary_dim % 2 or not 0 < rotary_dim <= min(head_size, MAX_ROTARY_DIM):
        raise cache.error(
            f"expected an even rotary_dim of at most min(head_size={head_size}, {MAX_ROTARY_DIM}), got {rotary_dim}"
        )
    check.contiguous(cache)
    return rotary_dim
