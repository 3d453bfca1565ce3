"""Time mixtures of experts end to end, by `fused_experts` or `fused_marlin_moe`, after a check of the results.

python -m benchmarks.experts
python -m benchmarks.experts mixtral:16 deepseek:1024

A row is model:tokens. Models: mixtral, bfloat16; mixtral_w4, int4 in groups of 128 rows, in Marlin's layout;
mixtral_codes, int4 packed along K, as in checkpoints; deepseek, DeepSeek-V3, fp8 with block scales; gpt_oss,
gpt-oss-120b, mxfp4 in Marlin's layout; gpt_oss_codes, mxfp4 packed along K; gpt_oss_bf16, dequantized to bfloat16.
deepseek_nvfp4, deepseek_mxfp8 and gpt_oss_mxfp4: the two grouped GEMMs alone, with quantized rows (block_experts.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import pyops
from pyops.ops.linear.marlin_weight import marlin_weight
from pyops.ops.linear.packed_reference import values
from pyops.ops.linear.quantized_experts import MX_BLOCK, dequantized

from . import block_experts
from .installed import reason
from .timing import QUICK, gpu_us

ROWS = (
    *(f"mixtral:{tokens}" for tokens in (1, 16, 256, 4096)),
    *(f"mixtral_w4:{tokens}" for tokens in (1, 16, 256)),
    *(f"mixtral_codes:{tokens}" for tokens in (1, 16, 64, 256, 1024)),
    *(f"deepseek:{tokens}" for tokens in (1, 64, 1024, 4096)),
    *(f"gpt_oss:{tokens}" for tokens in (1, 64, 4096)),
    *(f"gpt_oss_codes:{tokens}" for tokens in (1, 64)),
    *(f"gpt_oss_bf16:{tokens}" for tokens in (1, 64, 4096)),
    *(f"{name}:{tokens}" for name in block_experts.LAYERS for tokens in (16, 64, 256, 1024)),
)
_BLOCK = 128
_MAX_CODE = 240.0  # bound of random fp8 weights, well below the largest value
_MEMORY = 4.3e6  # DRAM bandwidth, bytes per microsecond


@dataclass(frozen=True)
class Model:
    """Sizes of a layer of experts.

    Attributes:
        experts, top_k: experts of the layer, experts per token.
        hidden, channels: hidden size, intermediate size of an expert.
        kind: "fp8" with block scales; "w4", 4 bits with group scales; "mxfp4"; "codes of int4" and "codes of mxfp4",
            packed along K; or "bf16".
        most: tolerance: mean error of the results relative to their mean.
    """

    experts: int
    top_k: int
    hidden: int
    channels: int
    kind: str
    most: float

    @property
    def is_fp8(self) -> bool:
        return self.kind == "fp8"


MODELS = {
    "mixtral": Model(8, 2, 4096, 14336, "bf16", 0.01),
    "mixtral_w4": Model(8, 2, 4096, 14336, "w4", 0.01),
    "mixtral_codes": Model(8, 2, 4096, 14336, "codes of int4", 0.01),
    "deepseek": Model(256, 8, 7168, 2048, "fp8", 0.06),
    "gpt_oss": Model(128, 4, 2880, 2880, "mxfp4", 0.01),
    "gpt_oss_codes": Model(128, 4, 2880, 2880, "codes of mxfp4", 0.01),
    "gpt_oss_bf16": Model(128, 4, 2880, 2880, "bf16", 0.01),
}
# Weights in Marlin's layout: {kind: (id of the quantized type, group size)}.
_MARLIN = {"w4": (pyops.SCALAR_TYPES["uint4b8"].id, _BLOCK), "mxfp4": (pyops.SCALAR_TYPES["float4_e2m1f"].id, 32)}
# Weights packed along K: {kind: (weight_quant_dtype of `fused_experts`, b_type of `grouped_gemm_packed`)}.
_CODES = {"codes of int4": ("int4", "uint4"), "codes of mxfp4": ("mxfp4", "float4_e2m1f")}
_E8M0_BIAS = 127


def weights(model: Model, rows: int, columns: int) -> tuple[Any, Any]:
    """(weights of all experts, their scales or None)."""
    if model.kind in _MARLIN:
        shape, (_, group) = (model.experts, columns // 16, 2 * rows), _MARLIN[model.kind]
        codes = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda")
        scales = torch.rand(model.experts, columns // group, rows, device="cuda") + 0.5
        if model.kind == "mxfp4":  # powers of two around 1 / sqrt(K)
            exponents = (scales * 2 * columns**-0.5 / 4).log2().round() + _E8M0_BIAS
            return codes, exponents.to(torch.uint8)
        return codes, (scales * columns**-0.5 / 5).to(torch.bfloat16)
    if model.kind in _CODES:
        codes = torch.randint(0, 256, (model.experts, rows, columns // 2), dtype=torch.uint8, device="cuda")
        if model.kind == "codes of mxfp4":  # e2m1 values have a root mean square of about 3
            middle = _E8M0_BIAS - round(math.log2(3 * columns**0.5))
            shape = model.experts, rows, columns // MX_BLOCK
            return codes, torch.randint(middle - 1, middle + 2, shape, dtype=torch.uint8, device="cuda")
        scales = torch.rand(model.experts, rows, columns // _BLOCK, device="cuda") + 0.5
        return codes, (scales * columns**-0.5 / 5).to(torch.bfloat16)
    dtype = torch.float8_e4m3fn if model.is_fp8 else torch.bfloat16
    found = torch.empty(model.experts, rows, columns, dtype=dtype, device="cuda")
    for one in found:
        values = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
        one.copy_((values * _MAX_CODE / 4).clamp_(-_MAX_CODE, _MAX_CODE) if model.is_fp8 else values * columns**-0.5)
    if not model.is_fp8:
        return found, None
    scales = torch.rand(model.experts, -(-rows // _BLOCK), -(-columns // _BLOCK), device="cuda") + 0.5
    return found, scales * (columns**-0.5 * 4 / _MAX_CODE)


def wide(model: Model, weight: Any, scales: Any) -> Any:
    """The weights of an expert, dequantized to float32."""
    if scales is None:
        return weight.float()
    if model.kind in _CODES:
        return dequantized(weight[None], scales[None], None, _CODES[model.kind][1], torch.bfloat16)[0].float()
    if weight.dtype == torch.int32:
        n, k = scales.shape[1], weight.shape[0] * 16
        kind = _MARLIN["mxfp4" if scales.dtype == torch.uint8 else "w4"][0]
        a = torch.empty(1, dtype=torch.bfloat16)  # only its dtype matters
        given: Any = (a, weight, scales, None, None, None, None, kind, n, k, True, False)
        return values(marlin_weight(*given)[0]).float().T
    return weight.float() * scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)


def error(model: Model, out: Any, x: Any, chances: Any, ids: Any, w1: Any, w2: Any) -> float:
    """The mean error of `out` relative to the mean of the expected result."""
    exact = torch.zeros(x.shape, device="cuda")
    for e in ids.unique().tolist():
        tokens, slots = (ids == e).nonzero(as_tuple=True)
        first, second = (wide(model, weight[e], None if scales is None else scales[e]) for weight, scales in (w1, w2))
        gate, up = (x[tokens].float() @ first.T).chunk(2, -1)
        result = (torch.nn.functional.silu(gate) * up) @ second.T
        exact.index_add_(0, tokens, result * chances[tokens, slots, None])
    return float((out - exact).abs().mean() / exact.abs().mean())


def measure(model: Model, num_tokens: int, w1: Any, w2: Any) -> str:
    """(microseconds of a call, microseconds of DRAM for the weights that it reads)."""
    x = torch.randn(num_tokens, model.hidden, dtype=torch.bfloat16, device="cuda")
    logits = torch.randn(num_tokens, model.experts, device="cuda")
    chances, ids, _ = pyops.fused_topk(x, logits, model.top_k, renormalize=True)
    blocks = [_BLOCK, _BLOCK]
    config = pyops.FusedMoEQuantConfig("float8_e4m3fn", False, blocks, w1[1], w2[1]) if model.is_fp8 else None
    if model.kind in _CODES:
        dtype = _CODES[model.kind][0]
        group = None if dtype == "mxfp4" else [0, _BLOCK]
        of_weights = {"w1_scale": w1[1], "w2_scale": w2[1], "weight_quant_dtype": dtype}
        config = pyops.FusedMoEQuantConfig(block_shape=group, **of_weights)
    call: Any = partial(pyops.fused_experts, x, w1[0], w2[0], chances, ids, quant_config=config)
    if model.kind in _MARLIN:
        kind = _MARLIN[model.kind][0]
        call = partial(pyops.fused_marlin_moe, x, w1[0], w2[0], None, None, w1[1], w2[1], chances, ids, kind)
    found = error(model, call(), x, chances, ids, w1, w2)
    if not found <= model.most:
        return f"WRONG: mean error {found:.4f}"
    read = len(ids.unique()) * sum(one[0].nbytes + (one[1].nbytes if one[1] is not None else 0) for one in (w1, w2))
    read //= model.experts
    return f"{gpu_us([call], QUICK).median:.1f} us, weights {read / _MEMORY:.1f} us, mean error {found:.4f}"


def report(rows: Sequence[str], models: dict[str, Any], made: Any, timed: Any) -> None:
    """Print the rows of `models`: `made` makes the weights of a GEMM, `timed` measures a call."""
    for name, model in models.items():
        tokens = [int(row.partition(":")[2]) for row in rows if row.partition(":")[0] == name]
        if not tokens:
            continue
        sizes = (2 * model.channels, model.hidden), (model.hidden, model.channels)
        both = [made(model, *one) for one in sizes]
        for count in tokens:
            try:
                print(f"{name}:{count}: {timed(model, count, *both)}", flush=True)
            except Exception as failure:
                print(f"{name}:{count}: {reason(failure)}", file=sys.stderr, flush=True)
        del both
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    rows = arguments or ROWS
    report(rows, MODELS, weights, measure)
    report(rows, block_experts.LAYERS, block_experts.weights, block_experts.measure)


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1:])
