"""How many tokens, or gathered rows, a block of the cache kernels takes, and how its threads share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..._core import check

if TYPE_CHECKING:
    from ..._core.device import Device

# docs/performance.md, "Attention, cache and rotary": 128 to 512 threads and 1 to 8 vectors to a thread differ by less
# than 4 %; one vector to a thread gains where four would leave multiprocessors idle.
_NUM_THREADS = 256
_MAX_BATCH = 4
_MIN_WAVES = 2  # blocks to a multiprocessor below which a block takes fewer tokens
_MAX_TOKENS = 64
_SMALLEST_BLOCK_VECS = 64  # vectors of a block when tokens are few: at least one token


@dataclass(frozen=True)
class Config:
    """Constants of a kernel whose blocks take whole tokens.

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


def choose(num_tokens: int, token_vecs: int, device: Device) -> Config:
    """The geometry for `num_tokens` tokens of `token_vecs` vectors each.

    Many tokens: every thread of a block has four vectors, so that enough bytes are in flight. Fewer: one vector to a
    thread, if the blocks then fill the device. Else the fewest tokens to a block, because the latency of one block is
    what counts.
    """
    for batch in (_MAX_BATCH, 1):
        tokens = min(_MAX_TOKENS, max(1, batch * _NUM_THREADS // token_vecs))
        if num_tokens >= tokens * _MIN_WAVES * device.multiprocessors:
            return _config(tokens, token_vecs, _NUM_THREADS)
    tokens = max(1, _SMALLEST_BLOCK_VECS // token_vecs)
    return _config(tokens, token_vecs, check.threads(tokens * token_vecs, max_threads=_NUM_THREADS))


def _config(tokens: int, token_vecs: int, num_threads: int) -> Config:
    return Config(tokens, min(_MAX_BATCH, -(-tokens * token_vecs // num_threads)), num_threads)
