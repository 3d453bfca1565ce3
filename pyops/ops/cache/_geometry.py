"""The geometry of the cache kernels: tokens (or gathered rows) per block, and vectors per thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ... import check, tuning
from ..._core.system.device import Device
from ..._core.tensors.dtypes import DType
from ..._core.tensors.tensor import TensorArg

# docs/performance/cache.md: 128 to 512 threads with 1 to 8 vectors per thread differ by less than 4 %; one vector per
# thread is faster where four would leave SMs idle.
_NUM_THREADS = 256  # threads of a block
_MAX_BATCH = 4  # most vectors in flight per thread
_MIN_WAVES = 2  # blocks per SM below which a block takes fewer tokens
_MAX_TOKENS = 64  # most tokens of a block
_MIN_BLOCK_VECS = 64  # vectors of a block when there are few tokens (at least one whole token)
# With programmatic dependent launch the first blocks read their block-table entries while the previous kernel still
# runs: blocks per SM that do so. Smaller blocks read more entries early: 160 threads take 4 rows of 1152 bytes.
_EARLY_BLOCKS, _EARLY_THREADS, _EARLY_BATCH = 4, 160, 2
_CANDIDATE_THREADS = 64, 128, 256, 512  # threads of a block that tuning tries


class CacheProblem(NamedTuple):
    """The input of `choose`: tokens, vectors of a token, dtype, and whether the kernel takes `early_blocks`."""

    num_tokens: int
    token_vecs: int
    dtype: DType
    early: bool = False

    def bucket(self) -> str:
        return f"tokens={tuning.power_of_two(self.num_tokens)} vectors={self.token_vecs} {self.dtype.name}"


@dataclass(frozen=True)
class CacheConfig:
    """Constants of a kernel with whole tokens per block.

    Attributes:
        tokens: tokens of a block.
        batch: vectors that a thread loads before it stores one.
        num_threads: threads of a block.
    """

    tokens: int
    batch: int
    num_threads: int

    @property
    def constants(self) -> dict[str, int]:
        return {"TOKENS": self.tokens, "BATCH": self.batch, "NUM_THREADS": self.num_threads}

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.tokens)

    def candidates(self, problem: CacheProblem, device: Device) -> list[CacheConfig]:
        """Other tokens and threads per block, and other numbers of vectors in flight."""
        return tuning.varied(
            self,
            tokens=tuning.beside(self.tokens, 1, _MAX_TOKENS),
            batch=tuning.beside(self.batch, 1, 2 * _MAX_BATCH),
            num_threads=_CANDIDATE_THREADS,
        )


def config(arg: TensorArg, num_tokens: int, token_vecs: int, early: bool = False) -> CacheConfig:
    """The Config of a plan for `num_tokens` tokens of `token_vecs` vectors; `arg` gives op, dtype and device.

    `early`: the kernel takes `early_blocks`.
    """
    return tuning.config(arg.op, CacheProblem(num_tokens, token_vecs, arg.dtype, early), arg.device, choose)


def choose(problem: CacheProblem, device: Device) -> CacheConfig:
    """Tokens per block, and vectors per thread.

    With many tokens every thread has four vectors, so that enough bytes are in flight. With fewer it has one, if the
    blocks then fill the device. Otherwise a block takes as few tokens as possible, because the latency of one block is
    the bound. A kernel that takes `early_blocks` has smaller blocks, if there are many.
    """
    num_tokens, token_vecs, _, early = problem
    tokens = min(_MAX_TOKENS, max(1, _EARLY_BATCH * _EARLY_THREADS // token_vecs))
    if early and early_blocks(num_tokens // tokens, device):
        return _config(tokens, token_vecs, _EARLY_THREADS)
    for batch in (_MAX_BATCH, 1):
        tokens = min(_MAX_TOKENS, max(1, batch * _NUM_THREADS // token_vecs))
        if num_tokens >= tokens * _MIN_WAVES * device.num_sms:
            return _config(tokens, token_vecs, _NUM_THREADS)
    tokens = max(1, _MIN_BLOCK_VECS // token_vecs)
    return _config(tokens, token_vecs, check.threads(tokens * token_vecs, max_threads=_NUM_THREADS))


def _config(tokens: int, token_vecs: int, num_threads: int) -> CacheConfig:
    return CacheConfig(tokens, min(_MAX_BATCH, -(-tokens * token_vecs // num_threads)), num_threads)


def early_blocks(num_blocks: int, device: Device) -> int:
    """Number of first blocks that read their block-table entries while the previous kernel runs; 0 for small grids."""
    early = _EARLY_BLOCKS * device.num_sms
    return early if device.overlaps and num_blocks > early else 0
