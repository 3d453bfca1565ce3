"""Time GEMMs of language models against cuBLAS, vLLM and DeepGEMM; contenders alternate within one process.

python -m benchmarks.products
python -m benchmarks.products bf16:16x28672x4096 fp8:256x28672x4096

A row is kind:MxNxK. Kinds: bf16, by `linear`; fp8 and int8 with per-row scales, fp8 to float16 (half) and fp8 with
block scales (blocks), by `cutlass_scaled_mm`; rivals of these are timed if they compute the same. 4-bit weights in
groups of 128 rows: w4 by `marlin_gemm`, awq and gptq by their ops, w4a8 by `cutlass_w4a8_mm`; w8, e4m3 weights with
16-bit activations, by `marlin_gemm`; allspark, 8-bit weights, by `allspark_w8a16_gemm`; w4fp8, by `marlin_gemm` with
e4m3 activations; gptq2 and gptq3, 2 and 3 bits; gidx, GPTQ with act order; sparse, 2:4 weights, by
`gptq_marlin_24_gemm`; hqq, by `marlin_gemm` with float zero points; w4a8half, w4a8 to float16.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import pyops

from . import drawn, packed_products
from .installed import check_gpu, deep_gemm, libraries, load_vllm, reason
from .timing import QUICK, Call, Spread, timer

ROWS = (
    *(f"bf16:{m}x28672x4096" for m in (1, 16, 64, 256, 4096)),
    *("bf16:1x4096x4096", "bf16:64x4096x4096", "bf16:8192x8192x8192"),
    *(f"fp8:{m}x28672x4096" for m in (16, 64, 256, 4096)),
    *("blocks:16x4096x14336", "blocks:4096x28672x4096"),
    *("int8:16x28672x4096", "int8:4096x28672x4096"),
    *packed_products.ROWS,
)
_BLOCK = 128  # side of a scale block, along K and N
_COLD = 200 << 20  # bytes of operands over which calls rotate, several times L2
_MAX_SETS = 256  # most sets of operands
_TURNS = 3
_ALLOWED = 0.02  # largest difference of a rival in the 2-norm: sums of fp8 MMAs are rounded in several ways


def operands(kind: str, m: int, n: int, k: int) -> tuple[Any, ...]:
    """(out, a [m, k], b [k, n], a_scales, b_scales), no scales for bf16; or `packed_products.operands`."""
    if kind in packed_products.KINDS:
        return packed_products.operands(kind, m, n, k)
    out = torch.empty(m, n, dtype=torch.float16 if kind == "half" else torch.bfloat16, device="cuda")
    a, b = (torch.randn(rows, k, dtype=torch.bfloat16, device="cuda") for rows in (m, n))
    if kind == "bf16":
        return out, a, b.t(), None, None
    if kind == "blocks":
        (a, a_scales), (b, b_scales) = _in_blocks(a, 1), _in_blocks(b, _BLOCK)
        return out, a, b.t(), a_scales.t().contiguous().t(), b_scales.t()
    (a, a_scales), (b, b_scales) = (_by_rows(one, kind) for one in (a, b))
    return out, a, b.t(), a_scales, b_scales.t()


def _by_rows(x: Any, kind: str) -> tuple[Any, Any]:
    scales = x.float().abs().amax(1, keepdim=True) / (127 if kind == "int8" else 448)
    codes = x.float() / scales
    return (codes.round().to(torch.int8) if kind == "int8" else codes.to(torch.float8_e4m3fn)), scales


def _in_blocks(x: Any, rows: int) -> tuple[Any, Any]:
    whole = torch.nn.functional.pad(x.float(), (0, 0, 0, -len(x) % rows))
    tiles = whole.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, rows))
    scales = tiles.abs().amax((1, 3)) / 448
    return (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn).flatten(0, 1).flatten(1)[: len(x)], scales


def contenders(kind: str) -> dict[str, Callable[..., Call]]:
    """{name: a function from operands to a call}."""
    if kind == "bf16":
        return {
            "pyops": lambda out, a, b, *_: partial(pyops.linear, out, a, b.t(), None),
            "cuBLAS": lambda out, a, b, *_: partial(torch.matmul, a, b, out=out),
        }
    load_vllm(libraries())
    if kind in packed_products.KINDS:
        return packed_products.contenders(kind, torch.ops._C)
    found: dict[str, Callable[..., Call]] = {
        "pyops": lambda out, a, b, a_scales, b_scales: partial(
            pyops.cutlass_scaled_mm, out, a, b, a_scales, b_scales, None
        )
    }
    if hasattr(torch.ops._C, "cutlass_scaled_mm"):
        found["vLLM"] = lambda *args: partial(torch.ops._C.cutlass_scaled_mm, *args, None)
    if kind == "blocks":
        found["DeepGEMM"] = _deep_gemm
    if kind != "int8":
        found["cuBLAS"] = lambda out, *args: partial(torch._scaled_mm, *args, out_dtype=out.dtype)
    return found


def _deep_gemm(out: Any, a: Any, b: Any, a_scales: Any, b_scales: Any) -> Call:
    """DeepGEMM's product, with the scales of rows in the layout that vLLM's quantization writes for it."""
    library = deep_gemm()
    operands = (a, library.get_mn_major_tma_aligned_tensor(a_scales)), (b.t(), b_scales.t())
    return partial(library.fp8_gemm_nt, *operands, out, disable_ue8m0_cast=True)


def agreeing(row: object, contenders: dict[str, Callable[..., Call]], operands: tuple[Any, ...]) -> drawn.Contenders:
    """pyops, and the contenders that compute the same; the first operand is the result."""
    named: drawn.Contenders = {name: partial(_of_values, build) for name, build in contenders.items()}
    call = {f"operand {i}": value for i, value in enumerate(operands)}
    found = drawn.agreeing(row, named, call, "operand 0", _ALLOWED)
    return {name: contenders[name] for name in found}


def _of_values(build: Callable[..., Call], call: dict[str, Any]) -> Call:
    return build(*call.values())


def measure(row: str) -> dict[str, float]:
    """{contender: median time in microseconds}. A contender that fails is reported and left out."""
    kind, _, sizes = row.partition(":")
    m, n, k = map(int, sizes.split("x"))
    sets = [operands(kind, m, n, k) for _ in range(num_sets(num_bytes(kind, m, n, k)))]
    found = contenders(kind)
    return in_turn(row, found if kind in packed_products.KINDS else agreeing(row, found, sets[0]), sets)


def num_bytes(kind: str, m: int, n: int, k: int) -> int:
    """Bytes of the operands of a row; of packed weights alone."""
    if kind in packed_products.KINDS:
        return n * k // 2
    return (m * k + n * k) * (2 if kind == "bf16" else 1) + 2 * m * n


def num_sets(nbytes: int) -> int:
    """Sets of operands of `nbytes` over which calls rotate."""
    return min(_MAX_SETS, max(2, -(-_COLD // max(1, nbytes))))


def in_turn(row: str, contenders: dict[str, Callable[..., Call]], sets: Sequence[tuple[Any, ...]]) -> dict[str, float]:
    """{contender: median time in microseconds}: these contenders alternately, calls rotating over sets of operands.

    The calls are made and captured once: of small operands there are hundreds, and rivals plan each. A contender that
    fails is reported and left out. Raises Fault if the GPU cannot be used after it.
    """
    timers: dict[str, Callable[[], Spread]] = {}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(_TURNS):
        for name in list(times) if turn % 2 == 0 else list(times)[::-1]:
            try:
                if name not in timers:
                    timers[name] = timer([contenders[name](*one) for one in sets], QUICK)
                times[name].append(timers[name]().median)
            except Exception as error:
                del times[name]
                print(f"{row}: {name}: {reason(error)}", file=sys.stderr, flush=True)
                check_gpu(name)
    return {name: statistics.median(found) for name, found in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    for row in arguments or ROWS:
        found = ", ".join(f"{name} {us:.1f} us" for name, us in measure(row).items())
        print(f"{row}: {found}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1:])
