"""The kernels for GEMMs with GGUF weights: which shapes each of them serves, and their times.

A time is a launch, and the weights of the busiest SM, which are dequantized and multiplied while the bytes of the
operands come from device memory. Up to 32 rows of X a weight is not rounded, so it stays packed; for more rows it is
rounded to the dtype of X, and dequantized first. That is the definition of the ops, and no choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ... import tuning
from ..._core.launch.kernel import Launch
from ..._core.system.device import Device
from ...tuning import engines
from ...tuning.engines import Choice, Engine, overlapped
from .._shared.products import multiplies
from . import gemm_engines, ggml_configs
from .ggml_configs import (
    MAX_VEC_TOKENS,
    DequantizeGgmlConfig,
    GgmlMulMatConfig,
    GgmlRowConfig,
    GgmlSimtConfig,
    GgmlVecConfig,
)
from .ggml_problem import MAX_FUSED_ROWS, UNIT, GgmlProblem, GgmlShape

FAMILY = "ggml"  # pyops/tuning/ggml.json has the rates
_ROWS = 16  # rows of W of a warp
_MMA_ROWS = 8  # rows of X of an MMA
# {type: the type that was timed and is decoded in nearly the same way}
_ALIKE = {
    "Q4_1": "Q4_0",
    "Q5_1": "Q5_0",
    "IQ1_S": "IQ2_XS",
    "IQ1_M": "IQ2_XS",
    "IQ2_XXS": "IQ2_XS",
    "IQ2_S": "IQ2_XS",
    "IQ3_XXS": "IQ3_S",
}


@dataclass(frozen=True, slots=True)
class GgmlRates:
    """What the times of the kernels are made of, in microseconds. Those of a weight are for a weight of an SM.

    Attributes:
        launch: a launch, with the first loads.
        bytes_per_us: bytes from device memory.
        row: ggml_mul_mat_row.cu: to dequantize and multiply a weight of each type.
        vec: ggml_mul_mat_vec.cu: to dequantize a weight of each type and multiply it by one row of X.
        vec_row: to multiply it by a second row.
        mul_mat: ggml_mul_mat.cu: to dequantize a weight of each type.
        mul_mat_row: to multiply it by a row of X; an MMA has eight of them.
        simt: ggml_mul_mat_simt.cu: factor on dequantization, by the rates of `mul_mat`.
        simt_row: to multiply a weight by a row of X.
        dequantized_bytes_per_us: bytes that ggml_dequantize.cu reads and writes.
    """

    launch: float
    bytes_per_us: float
    row: dict[str, float]
    vec: dict[str, float]
    vec_row: float
    mul_mat: dict[str, float]
    mul_mat_row: float
    simt: float
    simt_row: float
    dequantized_bytes_per_us: float


def rates_of(device: Device) -> GgmlRates:
    """The rates of a device."""
    return engines.rates(GgmlRates, FAMILY, device.name)


def _of_type(rates: dict[str, float], shape: GgmlShape) -> float:
    name = shape.format.name
    return rates[_ALIKE.get(name, name)]


def _rounded(shape: GgmlShape) -> str | None:
    """Why no kernel with fused dequantization serves the shape."""
    many = shape.dense is not None and shape.rows > MAX_FUSED_ROWS and not tuning.batch_invariant()
    return f"with more than {MAX_FUSED_ROWS} rows the weight is rounded to the dtype of X" if many else None


def _unmultiplied(shape: GgmlShape, device: Device) -> str | None:
    """Why no kernel with tensor cores serves the shape."""
    return None if multiplies(shape.dtype, device) else f"no tensor cores for {shape.dtype} on the device"


def _uncopied(device: Device) -> str | None:
    return None if device.supports("async_copies") else "the device has no cp.async"


def _us(shape: GgmlShape, device: Device, rates: GgmlRates, rows: int, weight: float) -> float:
    """Blocks with `rows` rows of W; `weight` for each weight of an SM."""
    blocks = -(-(-(-shape.n // rows) * shape.tiles) // device.num_sms)  # of the busiest SM
    loop = blocks * rows * -(-shape.k // UNIT) * UNIT * weight
    return rates.launch + overlapped(loop, shape.nbytes / rates.bytes_per_us)


# ggml_mul_mat_row.cu


def _row_refusal(shape: GgmlShape, device: Device) -> str | None:
    if shape.tokens > 1:
        return "it multiplies one row of X"
    return _uncopied(device) or _unmultiplied(shape, device)


def _row_us(config: GgmlRowConfig, shape: GgmlShape, device: Device, rates: GgmlRates) -> float:
    return _us(shape, device, rates, _ROWS, _of_type(rates.row, shape))


# ggml_mul_mat_vec.cu


def _vec_refusal(shape: GgmlShape, device: Device) -> str | None:
    if shape.tokens > MAX_VEC_TOKENS:
        return "it multiplies one or two rows of X"
    return _uncopied(device) or _unmultiplied(shape, device)


def _vec_us(config: GgmlVecConfig, shape: GgmlShape, device: Device, rates: GgmlRates) -> float:
    weight = _of_type(rates.vec, shape) + rates.vec_row * (config.tokens - 1)
    return _us(shape, device, rates, _ROWS * config.row_warps, weight)


# ggml_mul_mat.cu


def _mul_mat_refusal(shape: GgmlShape, device: Device) -> str | None:
    # WMMA of gfx11 runs on the vector units: 755 cycles where they take 494 (one row) or 630 (two) without it.
    if device.arch.startswith("gfx11") and shape.tokens <= MAX_VEC_TOKENS:
        return "WMMA of gfx11 is slower than vector instructions for one or two rows of X"
    return _rounded(shape) or _unmultiplied(shape, device)


def _mul_mat_us(config: GgmlMulMatConfig, shape: GgmlShape, device: Device, rates: GgmlRates) -> float:
    weight = _of_type(rates.mul_mat, shape) + rates.mul_mat_row * max(_MMA_ROWS, config.tokens)
    return _us(shape, device, rates, config.rows, weight)


# ggml_mul_mat_simt.cu


def _simt_us(config: GgmlSimtConfig, shape: GgmlShape, device: Device, rates: GgmlRates) -> float:
    code = rates.simt * _of_type(rates.mul_mat, shape)
    weight = -(-shape.tokens // config.tokens) * (code + rates.simt_row * config.tokens)
    return _us(shape, device, rates, config.num_threads // device.warp_size, weight)


# ggml_dequantize.cu, and a dense GEMM


def _dequantize_refusal(shape: GgmlShape, device: Device) -> str | None:
    if shape.dense is None:
        return "rows have weights of different experts"
    if tuning.batch_invariant():
        return "for few rows the weight is not rounded to the dtype of X, and PYOPS_BATCH_INVARIANT is set"
    few = shape.rows <= MAX_FUSED_ROWS
    return f"up to {MAX_FUSED_ROWS} rows the weight is not rounded to the dtype of X" if few else None


def _dequantize_configs(shape: GgmlShape, device: Device) -> Iterator[DequantizeGgmlConfig]:
    assert shape.dense is not None
    yield DequantizeGgmlConfig(gemm_engines.choose.best(shape.dense, device).config)


def _dequantize_us(config: DequantizeGgmlConfig, shape: GgmlShape, device: Device, rates: GgmlRates) -> float:
    assert shape.dense is not None
    nbytes = shape.n * (shape.row_bytes + shape.k * shape.dtype.itemsize)
    gemm = gemm_engines.choose.fastest(shape.dense, device).us
    return rates.launch + nbytes / rates.dequantized_bytes_per_us + gemm


choose: Choice[GgmlShape, GgmlRates] = Choice(
    GgmlShape.of,
    rates_of,
    Engine("ggml_mul_mat_row.cu", _row_refusal, ggml_configs.row_configs, _row_us),
    Engine("ggml_mul_mat_vec.cu", _vec_refusal, ggml_configs.vec_configs, _vec_us),
    Engine("ggml_mul_mat.cu", _mul_mat_refusal, ggml_configs.mul_mat_configs, _mul_mat_us),
    Engine("ggml_mul_mat_simt.cu", lambda shape, device: _rounded(shape), ggml_configs.simt_configs, _simt_us),
    Engine("ggml_dequantize.cu", _dequantize_refusal, _dequantize_configs, _dequantize_us),
)


def plan(problem: GgmlProblem) -> list[Launch]:
    """The launches of the kernel that is chosen, or forced by `tuning`."""
    found: list[Launch] = tuning.config(problem.out.op, problem, problem.device, choose).launches(problem)
    return found
