"""The kernels for GEMMs of block-scaled matrices: tensor cores that apply block scales, where a device has them; or
dequantization of both operands to bfloat16, which serves every shape, and the GEMM that `gemm_engines` chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ... import tuning
from ..._core.launch.kernel import Launch
from ..._core.system.device import Device
from ...tuning.engines import Choice, Engine
from . import gemm_engines, gemm_plan, gemm_rates, gemm_sm120
from .block_scaled_problem import BlockScaledProblem, BlockScaledShape
from .gemm_rates import GemmRates
from .gemm_sm120 import ScaledMmaConfig

# gemm_sm120.cu


def _scaled_refusal(shape: BlockScaledShape, device: Device) -> str | None:
    if 0 in (shape.dense.m, shape.dense.n, shape.dense.k):
        return "an empty operand"
    return gemm_sm120.refusal(device, shape.is_aligned)


def _scaled_configs(shape: BlockScaledShape, device: Device) -> Iterator[ScaledMmaConfig]:
    dense = shape.dense
    return gemm_sm120.configs(dense.m, dense.n, dense.k, shape.bits, shape.block, device)


def _scaled_us(config: ScaledMmaConfig, shape: BlockScaledShape, device: Device, rates: GemmRates) -> float:
    dense = shape.dense
    tiles = -(-dense.m // config.tile_m) * -(-dense.n // config.tile_n)
    loop = gemm_sm120.loop_us(config, tiles, dense.k, shape.bits, device)
    split = rates.reduction(config.splits, tiles, config.tile_m * config.tile_n)
    return rates.mma_launch + rates.overlapped(loop, shape.quantized_bytes + shape.out_bytes) + split


# block_scaled_to_bf16.cu, and a dense GEMM


@dataclass(frozen=True, slots=True)
class DequantizeBothConfig:
    """Both operands are dequantized to workspaces.

    Attributes:
        gemm: the Config of the GEMM that follows.
    """

    gemm: Any

    def candidates(self, problem: BlockScaledProblem, device: Device) -> list[DequantizeBothConfig]:
        """Other GEMMs."""
        return [DequantizeBothConfig(one) for one in self.gemm.candidates(problem.product, device)]

    def launches(self, problem: BlockScaledProblem) -> list[Launch]:
        """The launches that dequantize the operands, and the GEMM."""
        product = gemm_plan.launches(problem.product, self.gemm)
        return [*problem.dequantize(), *product] if product else []


def _dequantize_configs(shape: BlockScaledShape, device: Device) -> Iterator[DequantizeBothConfig]:
    yield DequantizeBothConfig(gemm_engines.choose.best(shape.dense, device).config)


def _dequantize_us(config: DequantizeBothConfig, shape: BlockScaledShape, device: Device, rates: GemmRates) -> float:
    dense = shape.dense
    nbytes = shape.quantized_bytes + (dense.m + dense.n) * dense.k * dense.dtype.itemsize
    return 2 * rates.mma_launch + nbytes / rates.bytes_per_us + gemm_engines.choose.fastest(dense, device).us


choose: Choice[BlockScaledShape, GemmRates] = Choice(
    BlockScaledShape.of,
    gemm_rates.of,
    Engine("gemm_sm120.cu", _scaled_refusal, _scaled_configs, _scaled_us),
    Engine("block_scaled_to_bf16.cu", lambda shape, device: None, _dequantize_configs, _dequantize_us),
)


def plan(problem: BlockScaledProblem) -> list[Launch]:
    """The launches of the kernel that is chosen, or forced by `tuning`."""
    found: list[Launch] = tuning.config(problem.op, problem, problem.device, choose).launches(problem)
    return found
