"""Sparse MLA of many query tokens on Hopper: a cache of 656 bytes per token is converted to 16 bits once."""

from __future__ import annotations

from dataclasses import replace

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from .mla_problem import ENTRY_SIZE, SparseMlaProblem
from .mla_sm90 import MlaSm90Config

_upconvert = Kernel("attention/mla_upconvert.cu")

_NUM_THREADS = 256  # threads of a block
_SLOT_THREADS = 32  # threads of a slot
_MAX_BYTES = 512 << 20  # most bytes of converted latent KV
# The cost model: us that conversion in mla_decode_sm90.cu adds to a pair of KV tiles; us of another kernel; bytes that
# it reads and writes per us. docs/performance/mla.md, "Prompts over 656 bytes".
_PAIR_US, _LAUNCH_US, _BYTES_PER_US = 0.8, 3.0, 3.5e6


def upconverted(problem: SparseMlaProblem) -> tuple[list[Launch], SparseMlaProblem]:
    """The launch that converts the cache, if that pays, and the problem over the converted cache."""
    if not pays(problem):
        return [], problem
    cache, (num_pages, page_size, _) = problem.cache, problem.cache.shape
    kernel = _upconvert(
        query_t=problem.q_nope.dtype,
        cache_t=problem.cache_dtype,
        PAGE_SIZE=page_size,
        IS_DS_MLA=True,
        NUM_THREADS=_NUM_THREADS,
    )
    entries, num_slots = Scratch(_nbytes(problem)), num_pages * page_size
    launch = kernel.launch(
        -(-num_slots * _SLOT_THREADS // _NUM_THREADS),
        _NUM_THREADS,
        entries=entries,
        num_slots=num_slots,
        page_stride=cache.strides[0],
        slot_stride=cache.strides[1],
    )
    shape, strides = (num_pages, page_size, ENTRY_SIZE), (page_size * ENTRY_SIZE, ENTRY_SIZE, 1)
    converted = replace(cache, dtype=problem.q_nope.dtype, shape=shape, strides=strides, alignment=16)
    return [launch], replace(problem, kv_c_and_k_pe_cache=converted, converted=entries)


def pays(problem: SparseMlaProblem) -> bool:
    """Whether converting the whole cache takes less time than the lists would, and no more than _MAX_BYTES."""
    if not (problem.is_ds_mla and problem.uses_wgmma) or problem.has_few_heads or tuning.batch_invariant():
        return False
    units, nbytes = -(-problem.max_tokens // MlaSm90Config.UNIT), _nbytes(problem)
    groups = -(-problem.num_heads // MlaSm90Config.HEADS)
    pairs = problem.num_seqs * units * groups / problem.cache.device.num_sms
    cost = _LAUNCH_US + (problem.cache.nbytes + nbytes) / _BYTES_PER_US
    return nbytes <= _MAX_BYTES and cost < pairs * _PAIR_US


def _nbytes(problem: SparseMlaProblem) -> int:
    """Bytes of the converted cache."""
    num_pages, page_size, _ = problem.cache.shape
    return num_pages * page_size * ENTRY_SIZE * problem.q_nope.dtype.itemsize
