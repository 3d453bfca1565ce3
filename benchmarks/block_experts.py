"""Grouped GEMMs with NVFP4, MXFP4 and MXFP8 weights for `benchmarks.experts`.

Both of a layer are timed, with quantized and sorted rows: by the kernels with fused dequantization, and with weights
that are dequantized to memory first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import pyops
from pyops.ops._shared.fp4_tiles import TILE_ROWS, rounded_up
from pyops.ops.linear.block_scaled import MXFP4, MXFP8, NVFP4, BlockFormat

from .timing import QUICK, gpu_us

_MEMORY = 4.3e6  # DRAM bandwidth, bytes per microsecond
_GAP = 16  # bytes between rows of weights, for which no kernel fuses the dequantization
MOST = 0.004  # tolerance: rounding to bfloat16
# {e8m0 and e4m3 bytes of scales: the first, and one after the last}
_SCALES = {False: (120, 126), True: (0x28, 0x38)}

# Names of arguments that differ between the ops.
_SYNONYMS = ("sf_offsets", "blockscale_offsets"), ("a_blockscale", "sfa"), ("b_blockscales", "sfb")


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer of experts with block scales; `channels` is the intermediate size of an expert."""

    experts: int
    top_k: int
    hidden: int
    channels: int
    format: BlockFormat
    function: Callable[..., None]


LAYERS = {
    "deepseek_nvfp4": Layer(256, 8, 7168, 2048, NVFP4, pyops.cutlass_fp4_group_mm),
    "deepseek_mxfp8": Layer(256, 8, 7168, 2048, MXFP8, pyops.cutlass_mxfp8_grouped_mm),
    "gpt_oss_mxfp4": Layer(128, 4, 2880, 2880, MXFP4, pyops.cutlass_mxfp4_group_mm),
}


def _codes(layer: Layer, device: str, *sizes: int) -> Any:
    if layer.format.code_bits == 4:
        return torch.randint(0, 256, (*sizes[:-1], sizes[-1] // 2), dtype=torch.uint8, device=device)
    return torch.randn(sizes, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn)


def weights(layer: Layer, n: int, k: int, device: str = "cuda") -> tuple[Any, Any]:
    """Weights of all experts, and their scales in tiles."""
    first, end = _SCALES[layer.format is NVFP4]
    rows, columns = layer.format.scale_sizes(n, k)
    scales = torch.randint(first, end, (layer.experts, rows, columns), dtype=torch.uint8, device=device)
    return _codes(layer, device, layer.experts, n, k), scales


def arguments(layer: Layer, counts: Any, weight: tuple[Any, Any]) -> dict[str, Any]:
    """Arguments of the op for `counts` rows of each expert, by its names."""
    b, b_scales = weight
    device, n, k = b.device.type, b.shape[1], b.shape[2] * 8 // layer.format.code_bits
    padded = (counts + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    num_rows, first, end = int(counts.sum()), *_SCALES[layer.format is NVFP4]
    columns = b_scales.shape[2]
    a_scales = torch.randint(first, end, (int(padded.sum()), columns), dtype=torch.uint8, device=device)
    names = [parameter.name for parameter in pyops.registry[layer.function.__name__].parameters]
    found = {
        "out": torch.empty(num_rows, n, dtype=torch.bfloat16, device=device),
        "a": _codes(layer, device, num_rows, k),
        "b": b,
        "problem_sizes": torch.stack((counts, counts * 0 + n, counts * 0 + k), 1).int(),
        "expert_offsets": (counts.cumsum(0) - counts).int(),
        "alphas": torch.full((layer.experts,), 0.5, device=device),
    }
    for same, value in zip(_SYNONYMS, ((padded.cumsum(0) - padded).int(), a_scales, b_scales), strict=True):
        found |= dict.fromkeys(same, value)
    return {name: found[name] for name in names}


def error(layer: Layer, given: dict[str, Any]) -> float:
    """The mean error of the rows of one expert, relative to the mean of the expected result."""
    counts = given["problem_sizes"][:, 0]
    e, (offsets, a_scales, b_scales) = (
        int(counts.argmax()),
        (next(given[name] for name in names if name in given) for names in _SYNONYMS),
    )
    first, count, scale_row = int(given["expert_offsets"][e]), int(counts[e]), int(offsets[e])
    a_scales = a_scales[scale_row : scale_row + rounded_up(count, TILE_ROWS)]
    a = layer.format.values(given["a"][first : first + count], a_scales)
    b = layer.format.values(given["b"][e], b_scales[e])[: given["out"].shape[1]]
    exact = a @ b.T * (0.5 if "alphas" in given else 1.0)
    return float((given["out"][first : first + count].double() - exact).abs().mean() / exact.abs().mean())


def with_gaps(b: Any) -> Any:
    """A copy of weights with a gap after each row: they are dequantized to memory first."""
    wide = torch.empty(*b.shape[:2], b.shape[2] + _GAP, dtype=b.dtype, device=b.device)
    wide[..., : b.shape[2]] = b
    return wide[..., : b.shape[2]]


def measure(layer: Layer, num_tokens: int, *both: tuple[Any, Any]) -> str:
    """Microseconds of both GEMMs, fused and not, and of DRAM for the weights that they read."""
    logits = torch.randn(num_tokens, layer.experts, device="cuda")
    counts = logits.topk(layer.top_k).indices.flatten().bincount(minlength=layer.experts)
    given = [arguments(layer, counts, weight) for weight in both]
    times = []
    for gaps in (False, True):
        if gaps:
            given = [one | {"b": with_gaps(one["b"])} for one in given]
        calls = [partial(layer.function, **one) for one in given]
        for call, one in zip(calls, given, strict=True):
            call()
            if not (found := error(layer, one)) <= MOST:
                return f"WRONG: mean error {found:.4f}"
        times.append(sum(gpu_us([call], QUICK).median for call in calls))
    read = int((counts > 0).sum()) * sum(one.nbytes for weight in both for one in weight) / layer.experts
    return f"{times[0]:.1f} us, dequantized first {times[1]:.1f} us, weights {read / _MEMORY:.1f} us"
