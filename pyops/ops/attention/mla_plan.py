"""Multi-head latent attention: the problem, the choice of a Config, and the launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import float32
from . import mla_schedule, mla_sm80, mla_sm90, mla_sm90_fp8, mla_sm100, mla_small_h, mla_small_h_fp8
from .arguments import Options
from .combine import TILE_TOKENS, CombineConfig, choose_combine, lanes_of, launch_combine
from .decode_choose import PINNED_SPLIT
from .decode_launch import NO_STARTS, workspace
from .decode_waves import wave_arguments
from .layout import absent, heads_stride
from .mla_problem import (
    ENTRY_SIZE,
    LATENT_SIZE,
    ROPE_SIZE,
    MlaProblem,
    arguments_of,
    constants_of,
    lengths_of,
    query_strides,
)
from .mla_sm80 import MlaSm80Config
from .mla_sm90 import MlaSm90Config
from .mla_sm90_fp8 import MlaSm90Fp8Config
from .mla_sm100 import MlaTileConfig
from .mla_small_h import FewHeadsConfig
from .mla_small_h_fp8 import CodesConfig

_decode = Kernel("attention/mla_decode.cu")
_decode_simt = Kernel("attention/mla_decode_simt.cu")

_SIMT_WARPS = 4  # warps of a block of mla_decode_simt.cu
_MAX_SPLITS = 128  # most splits of a sequence
# Fewest tokens of a split, per 16 heads of a block: fewer do not pay for the split's reads of queries and its partial
# results.
_MIN_SPLIT = 64
_MAX_CANDIDATE_SPLIT = 512  # largest min_split that tuning tries, in tokens
_MAX_WAVES = 2  # most waves of splits; docs/performance/decode.md: "A partial wave costs at least half a wave"
# The cost model of mla_decode.cu: us of a block of 32 heads per token of a 16-bit cache, by 64 x 4096 as sm_80.
_TIMED_HEADS, _TOKEN_US = 32, 7.9 / 128
# mla_decode.cu: (query heads of a block, tokens of a KV tile, warps).
BLOCKS = ((64, 32, 8), (32, 32, 8), (16, 32, 8), (16, 16, 4))
WIDE_BLOCKS = ((64, 32, 8), (32, 32, 4), (16, 32, 4), (16, 16, 4))  # the blocks for warps of 64 lanes
STATIC_SHARED = 512  # bytes of static shared memory: an upper bound for mla_decode.cu
_RESERVED_SHARED = 1024  # bytes of shared memory that the device reserves in every block


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """The geometry and the splits of mla_decode.cu or mla_decode_simt.cu.

    Attributes:
        num_warps: warps of a block.
        heads_per_block: query heads of a block; 1, with `step_tokens` of 0, for mla_decode_simt.cu.
        step_tokens: tokens of a KV tile: their latent KV is in shared memory at once.
        min_blocks: blocks per SM; bounds the registers.
        max_splits: most splits of a sequence; a block takes one split.
        min_split: fewest tokens of a split.
        combine: the kernel that combines the splits.
    """

    num_warps: int
    heads_per_block: int
    step_tokens: int
    min_blocks: int
    max_splits: int
    min_split: int
    combine: CombineConfig

    def candidates(self, problem: MlaProblem, device: Device) -> list[MlaConfig]:
        """Other blocks, registers and splits. The combine kernel stays: a tuning table cannot hold it."""
        found = []
        if self.step_tokens:
            for heads, tokens, num_warps in _blocks_that_fit(problem, device):
                found.append(replace(self, heads_per_block=heads, step_tokens=tokens, num_warps=num_warps))
            block_shared = (
                shared_memory(self.heads_per_block, self.step_tokens, _code_bytes(problem)) + _RESERVED_SHARED
            )
            found += tuning.varied(self, min_blocks=range(1, device.shared_memory // block_shared + 1))
        else:
            found += tuning.varied(self, num_warps=tuning.beside(self.num_warps, 2, 8))
        if problem.num_kv_splits <= 0:
            found += tuning.varied(self, max_splits=tuning.beside(self.max_splits, 1, _MAX_SPLITS))
        if self.max_splits > 1:
            found += tuning.varied(self, min_split=tuning.beside(self.min_split, 16, _MAX_CANDIDATE_SPLIT))
        return found


SharesConfig = MlaSm90Config | MlaSm90Fp8Config | CodesConfig | FewHeadsConfig
AnyConfig = MlaConfig | MlaTileConfig | MlaSm80Config | SharesConfig


def choose(problem: MlaProblem, device: Device) -> AnyConfig:
    """The Config for this problem."""
    is_pinned = tuning.batch_invariant()  # the other kernels cut all sequences into equal shares
    uses_wgmma = problem.uses_wgmma and (not problem.has_fp8_queries or mla_sm90_fp8.serves(problem))
    if uses_wgmma and not is_pinned and (problem.has_fp8_queries or not problem.has_few_heads):
        return _choose_for_wgmma(problem, device)
    if problem.has_few_heads and not is_pinned:
        return _choose_for_few_heads(problem, device)
    if mla_sm100.refusal(problem) is None:
        heads, tokens = mla_sm100.HEADS, mla_sm100.TOKENS
        return MlaTileConfig(heads, tokens, *_choose_splits(problem, device, heads, mla_sm100.HALVES))
    heads, step_tokens, num_warps = _choose_block(problem, device) or (1, 0, _SIMT_WARPS)
    block_shared = shared_memory(heads, step_tokens, _code_bytes(problem)) + _RESERVED_SHARED
    min_blocks = 2 if heads == 16 and 2 * block_shared <= device.shared_memory else 1
    splits = _choose_splits(problem, device, heads, 1, min_blocks)
    config = MlaConfig(num_warps, heads, step_tokens, min_blocks, *splits)
    if mla_sm80.serves(problem, device) and not is_pinned:
        many = mla_sm80.choose(problem, device)
        if _splits_us(problem, config, device) > mla_schedule.call_us(problem, many, device):
            return many
    return config


def _splits_us(problem: MlaProblem, config: MlaConfig, device: Device) -> float:
    """The time of a call by mla_decode.cu, in us, as mla_schedule.call_us has it; infinite where nothing was timed."""
    if problem.is_fp8 or config.heads_per_block != _TIMED_HEADS:
        return float("inf")
    blocks = problem.num_seqs * -(-problem.num_heads // config.heads_per_block) * config.max_splits
    tokens = max(config.min_split, -(-problem.max_tokens // config.max_splits))
    waves = -(-blocks // (config.min_blocks * device.num_sms))
    combine_us = mla_schedule.kernel_us(problem, problem.num_seqs * config.max_splits) if config.max_splits > 1 else 0.0
    return mla_schedule.BLOCK_US + waves * tokens * _TOKEN_US + combine_us


def _choose_for_few_heads(problem: MlaProblem, device: Device) -> CodesConfig | FewHeadsConfig:
    if problem.is_plain_fp8:
        return mla_small_h_fp8.choose(problem, device)
    return mla_small_h.choose(problem, device)


def _choose_for_wgmma(problem: MlaProblem, device: Device) -> SharesConfig:
    """A kernel with WGMMA, or several blocks or clusters of a kernel for few heads where the model says that they take
    less time: WGMMA computes a pair of KV tiles of 64 heads for the shortest sequence."""
    serving: list[SharesConfig] = [mla_sm90_fp8.choose(problem, device)] if mla_sm90_fp8.serves(problem) else []
    if not problem.has_fp8_queries:
        serving.append(mla_sm90.choose(problem, device))
    config = min(serving, key=lambda one: mla_schedule.call_us(problem, one, device))
    if not problem.allows_few_heads:
        return config
    few_heads: SharesConfig = _choose_for_few_heads(problem, device)
    if few_heads.split_ctas > 1:
        return mla_schedule.or_clusters(problem, config, [few_heads], device)
    return few_heads if mla_schedule.is_faster(problem, few_heads, config, device) else config


def _choose_splits(
    problem: MlaProblem, device: Device, heads: int, parts: int, min_blocks: int = 1
) -> tuple[int, int, CombineConfig]:
    """(most splits of a sequence, fewest tokens of a split, how they are combined) for blocks of so many heads, and as
    many parts of their values."""
    num_seqs, num_heads, is_pinned = problem.num_seqs, problem.num_heads, tuning.batch_invariant()
    blocks = num_seqs * -(-num_heads // heads) * parts
    wanted, min_split = problem.num_kv_splits, _MIN_SPLIT * max(1, heads // 16)
    if wanted <= 0:
        wanted = _MAX_SPLITS if is_pinned else _MAX_WAVES * min_blocks * device.num_sms // max(1, blocks)
        min_split = PINNED_SPLIT if is_pinned else min_split
    max_splits = max(1, min(wanted, -(-problem.max_tokens // min_split), _MAX_SPLITS))
    lanes = lanes_of(LATENT_SIZE, problem.combine_width, device)
    return max_splits, min_split, choose_combine(num_seqs, num_heads, max_splits, lanes, device)


def _choose_block(problem: MlaProblem, device: Device) -> tuple[int, int, int] | None:
    """The largest of BLOCKS that is at least half full and fits into shared memory; None if no block does."""
    if problem.may_use_mma:
        for block in _blocks_that_fit(problem, device):
            if problem.num_heads > block[0] // 2 or block[0] == 16:
                return block
    return None


def _blocks_that_fit(problem: MlaProblem, device: Device) -> list[tuple[int, int, int]]:
    """The entries of BLOCKS that fit into shared memory."""
    room = device.shared_memory - STATIC_SHARED
    if problem.is_fp8 and device.arch.startswith("gfx11"):
        return []  # 24 registers of a thread would spill
    blocks = BLOCKS if device.warp_size == 32 else WIDE_BLOCKS
    return [block for block in blocks if shared_memory(block[0], block[1], _code_bytes(problem)) <= room]


def _code_bytes(problem: MlaProblem) -> int:
    """Bytes of a token's fp8 latent KV; 0 for a 16-bit cache."""
    return problem.cache.shape[2] if problem.is_fp8 else 0


def shared_memory(heads: int, step_tokens: int, code_bytes: int) -> int:
    """Bytes of dynamic shared memory of a block, as mla_decode.cu counts them; 0 for mla_decode_simt.cu."""
    if not step_tokens:
        return 0
    row, padded_tokens = (ENTRY_SIZE + 8) * 2, step_tokens + 8
    tiles = step_tokens * (row + (code_bytes or row))
    return heads * row + tiles + heads * padded_tokens * (4 * 4 + 2)


def launch(problem: MlaProblem, config: AnyConfig) -> list[Launch]:
    """The kernel that computes the splits, and the kernel that combines them where a sequence may have several."""
    if not isinstance(config, MlaConfig | MlaTileConfig):
        return mla_schedule.launch(problem, config)
    is_combined = config.max_splits > 1
    rows = problem.num_seqs * problem.num_heads * config.max_splits if is_combined else 0
    arguments = {
        **absent(lse=problem.lse),
        **workspace(rows, LATENT_SIZE),
        **lengths_of(problem),
        "max_splits": config.max_splits,
        "min_split": config.min_split,
        "out_stride": heads_stride(problem.out),
    }
    if isinstance(config, MlaTileConfig):
        launches = [config.launch_splits(problem, arguments)]
    else:
        launches = [_launch_splits(problem, config, arguments)]
    if is_combined:
        constants = {
            "out_t": problem.out.dtype,
            "length_t": problem.length_dtype,
            "HAS_LENGTHS": problem.seq_lens is not None,
            "partial_t": float32,
            "PARTITION": 0,
            "DIRECT": True,
            "LSE_BY_ROW": True,
            "SPLIT_UNIT": TILE_TOKENS,
            "HAS_OUT_SCALE": False,
            **NO_STARTS,
        }
        arguments |= dict.fromkeys(
            ("query_start_loc", "sinks", "fp8_out_scale", "num_seqs", "sliding_window"), 0
        ) | wave_arguments(None)
        arguments["num_rows"] = problem.num_seqs
        options = Options(lse=problem.lse)
        launches.append(
            launch_combine(
                config.combine, problem.num_seqs, problem.out, problem.combine_width, options, constants, arguments
            )
        )
    return launches


def _launch_splits(problem: MlaProblem, config: MlaConfig, arguments: dict[str, Any]) -> Launch:
    constants = constants_of(problem) | {"NUM_WARPS": config.num_warps}
    arguments = arguments | arguments_of(problem) | query_strides(problem) | {"num_heads": problem.num_heads}
    heads, tokens = config.heads_per_block, config.step_tokens
    if tokens:
        kernel = _decode(
            **constants,
            product_t=problem.product_dtype,
            HEADS=heads,
            TOKENS=tokens,
            MIN_BLOCKS=config.min_blocks,
            QUERY_ACCESS=min(8, check.vector_width(ROPE_SIZE, problem.q_nope, problem.q_pe)),
            OUT_ACCESS=min(2, check.vector_width(LATENT_SIZE, problem.out)),
        )
    else:
        kernel = _decode_simt(**constants)
    grid = (problem.num_seqs * -(-problem.num_heads // heads), config.max_splits)
    num_threads = config.num_warps * (problem.cache.device.warp_size if tokens else 32)
    return kernel.launch(grid, num_threads, shared_memory(heads, tokens, _code_bytes(problem)), **arguments)
