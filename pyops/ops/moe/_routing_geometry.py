"""The geometry of top-k routing: how many threads share the logits of a token."""

from __future__ import annotations

from typing import NamedTuple

from ... import check
from ..._core.tensors.tensor import TensorArg

_WARP_SIZE = 32  # threads that share a token, unless it has few or very many experts
_MAX_THREAD_EXPERTS = 16  # most experts per thread, which sorts them in registers
_MAX_THREADS = 512  # most threads of a block: with 1024 a thread has too few registers for its experts
# Threads of a block with at most a warp per token: the smaller number if there is an SM for each of these blocks. Not
# yet measured: docs/performance.md, "Owed to a GPU".
_FEW_THREADS, _MANY_THREADS = 64, 128
_MAX_WIDER = 1.25  # wider loads may raise the experts per thread by at most this factor


class Geometry(NamedTuple):
    """Constants of a kernel with contiguous experts per thread.

    Attributes:
        vec_size: elements of one memory access.
        thread_experts: experts of a thread, a multiple of vec_size.
        row_threads: threads that share a token.
        group_threads: threads that share a group of experts.
        num_threads: threads of a block.
    """

    vec_size: int
    thread_experts: int
    row_threads: int
    group_threads: int
    num_threads: int

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's compile-time constants by name."""
        return {
            "VEC_SIZE": self.vec_size,
            "THREAD_EXPERTS": self.thread_experts,
            "ROW_THREADS": self.row_threads,
            "NUM_THREADS": self.num_threads,
        }

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks for `num_tokens` tokens."""
        return -(-num_tokens // (self.num_threads // self.row_threads))


def choose_geometry(experts: TensorArg, num_groups: int, *aligned: TensorArg | None) -> Geometry:
    """The geometry for logits `experts` [num_tokens, num_experts]; no thread has experts of two groups.

    The rows of the tensors in `aligned` are loaded with the same vector width.
    """
    num_tokens, num_experts = experts.shape
    group_size = num_experts // num_groups
    # Every group has the same number of threads, a power of two, so that its shuffles stay inside the group.
    parts = 1 << (num_groups - 1).bit_length()
    row_threads = _WARP_SIZE
    if num_groups == 1 and num_experts < _WARP_SIZE:
        row_threads = 1 << (num_experts - 1).bit_length()
    while group_size > row_threads // parts * _MAX_THREAD_EXPERTS:
        row_threads *= 2
    if row_threads > _MAX_THREADS:
        max_size = _MAX_THREADS // parts * _MAX_THREAD_EXPERTS
        each = "" if num_groups == 1 else " in a group"
        raise experts.error(f"expected at most {max_size} experts{each}, got {group_size} in shape {experts.shape}")
    group_threads = row_threads // parts

    def share(vec_size: int) -> int:
        """Experts of a thread that loads `vec_size` at once."""
        return -(-group_size // (group_threads * vec_size)) * vec_size

    vec_size = check.vector_width(group_size, *(arg for arg in (experts, *aligned) if arg))
    while share(vec_size) > _MAX_WIDER * share(1):
        vec_size //= 2
    many = num_tokens * row_threads > _FEW_THREADS * experts.device.num_sms
    num_threads = max(row_threads, _MANY_THREADS if many else _FEW_THREADS)
    return Geometry(vec_size, share(vec_size), row_threads, group_threads, num_threads)
