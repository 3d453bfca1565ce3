"""The kinds of `benchmarks.products` with packed weights: 4 bits in groups of 128 rows, or 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import pyops

from .timing import Call

# The ops of these kinds, in order: marlin_gemm, awq_gemm, gptq_gemm, marlin_gemm (e4m3 weights, per-column scales),
# cutlass_w4a8_mm, allspark_w8a16_gemm (which vLLM does not compile for Hopper), marlin_gemm (4-bit weights, e4m3
# activations), gptq_gemm (2 bits, 3 bits, act-order), gptq_marlin_24_gemm, marlin_gemm (HQQ: float zero points,
# float16), cutlass_w4a8_mm (float16 output).
KINDS = "w4", "awq", "gptq", "w8", "w4a8", "allspark", "w4fp8", "gptq2", "gptq3", "gidx", "sparse", "hqq", "w4a8half"
ROWS = (
    *(f"w4:{m}x28672x4096" for m in (1, 16, 64, 256, 1024, 4096)),
    *("w4:1x4096x4096", "w4:16x4096x4096"),
    *(f"awq:{m}x28672x4096" for m in (1, 16, 256)),
    *(f"gptq:{m}x28672x4096" for m in (1, 64, 256)),
    *(f"{kind}:{m}x28672x4096" for kind in KINDS[3:] for m in (1, 16, 256)),
)
_GROUP_SIZE = 128
_KIND, _E4M3, _HQQ = (pyops.SCALAR_TYPES[name].id for name in ("uint4b8", "float8_e4m3fn", "uint4"))
_MARLIN = {"w4": _KIND, "w8": _E4M3, "w4fp8": _KIND, "hqq": _HQQ}  # quantized types of Marlin weights
_W4A8 = "w4a8", "w4a8half"
_RAW = {"awq": 4, "gptq": 4, "gptq2": 2, "gptq3": 3, "gidx": 4}  # bits of AWQ and GPTQ weights
_Build = Callable[..., Call]


def operands(kind: str, m: int, n: int, k: int) -> tuple[Any, ...]:
    """(out, a [m, k], quants, scales [groups, n], zero points); w8 and allspark: one group; w4a8: e4m3 scales."""
    dtype = torch.float16 if kind in (*_RAW, "sparse", "hqq", "w4a8half") else torch.bfloat16
    groups = 1 if kind in ("w8", "allspark") else k // _GROUP_SIZE
    tiles = k // 16, 2 * n
    shapes = {
        "w4": tiles,
        "w4fp8": tiles,
        "hqq": tiles,
        "w8": (k // 16, 4 * n),
        "awq": (k, n // 8),
        "gptq": (k // 8, n),
        "gptq2": (k // 16, n),
        "gptq3": (k // 32 * 3, n),
        "gidx": (k // 8, n),
        "sparse": (k // 32, 2 * n),
        "w4a8": (n, k // 8),
        "w4a8half": (n, k // 8),
    }
    shape, words = shapes.get(kind, (n, k // 4)), n * _RAW.get(kind, 4) // 32
    codes, zeros = (
        torch.randint(-(2**31), 2**31 - 1, s, dtype=torch.int32, device="cuda") for s in (shape, (groups, words))
    )
    a, scales = torch.randn(m, k, device="cuda").to(dtype), (torch.rand(groups, n, device="cuda") * 0.01).to(dtype)
    if kind == "w8":
        codes &= 0x77777777  # no NaN
    if kind == "w4fp8":
        a = a.to(torch.float8_e4m3fn)
    if kind == "sparse":  # 2:4 metadata: the positions of two of four rows, ascending
        places = torch.tensor([0x4, 0x8, 0xC, 0x9, 0xD, 0xE], device="cuda")
        quads = places[torch.randint(0, 6, (k // 32, 2 * n, 4), device="cuda")] << torch.arange(0, 16, 4, device="cuda")
        zeros = quads.sum(2).to(torch.int16)
    if kind == "hqq":
        zeros = (torch.rand(groups, n, device="cuda") * 15).to(dtype)
    if kind in _W4A8:
        a, codes, scales = a.to(torch.float8_e4m3fn), codes.t(), (scales.float() + 1).to(torch.float8_e4m3fn)
    return torch.empty(m, n, dtype=dtype, device="cuda"), a, codes, scales, zeros


def contenders(kind: str, theirs: Any) -> dict[str, _Build]:
    """{name: a function from operands to a call}; `theirs` are vLLM's ops."""
    found: dict[str, _Build] = {}
    if kind in _W4A8:
        found["pyops"] = lambda out, a, codes, scales, _: _w4a8(pyops, a, codes, scales, out.dtype)
        if hasattr(theirs, "cutlass_w4a8_mm"):
            found["vLLM"] = lambda out, a, codes, scales, _: _w4a8(theirs, a, codes, scales, out.dtype)
        return found
    if kind == "sparse":
        found["pyops"] = lambda out, *given: partial(_sparse(pyops, *given), out=out)
        if hasattr(theirs, "gptq_marlin_24_gemm"):
            found["vLLM"] = lambda out, *given: _sparse(theirs, *given)
        return found
    if kind == "allspark":
        found["pyops"] = lambda out, a, codes, scales, _: _allspark(out, a, codes, scales)
        return found
    if kind in _MARLIN:

        def ours(out: Any, *given: Any) -> Call:
            return partial(_marlin(pyops.marlin_gemm, kind, *given), c=out)

        found["pyops"] = ours
        if hasattr(theirs, "marlin_gemm"):
            found["vLLM"] = lambda out, *given: _marlin(theirs.marlin_gemm, kind, *given, None)
        if kind == "w4" and hasattr(theirs, "machete_mm"):
            found["Machete"] = lambda out, a, codes, scales, _: _machete(theirs, a, codes, scales)
        return found
    name = "awq_gemm" if kind == "awq" else "gptq_gemm"
    found["pyops"] = lambda out, *given: partial(getattr(pyops, name), *_raw(kind, *given), out=out)
    if hasattr(theirs, name):
        found["vLLM"] = lambda out, *given: partial(getattr(theirs, name), *_raw(kind, *given))
    return found


def _marlin(op: Any, kind: str, a: Any, codes: Any, scales: Any, zeros: Any, *c: Any) -> Any:
    """A call of `marlin_gemm`; vLLM's op has another argument order."""
    workspace, points = torch.zeros(2048, dtype=torch.int32, device="cuda"), zeros if kind == "hqq" else None
    a_scales = torch.ones(a.shape[0], 1, device="cuda") if a.dtype.itemsize == 1 else None
    given = a, *c, codes, None, scales, a_scales, None, points, None, None, workspace, _MARLIN[kind]
    return partial(op, *given, a.shape[0], scales.shape[1], a.shape[1], True, False, True, kind == "hqq")


def _allspark(out: Any, a: Any, codes: Any, scales: Any) -> Call:
    rest = len(codes), -1, 132, 90, 1024, False, True
    return partial(pyops.allspark_w8a16_gemm, a, codes.view(torch.uint8), scales, None, *rest, out=out)


def _machete(theirs: Any, a: Any, codes: Any, scales: Any) -> Call:
    weight = theirs.machete_prepack_B(codes.view(scales.shape[1], -1).t(), a.dtype, _KIND, a.dtype)
    return partial(theirs.machete_mm, a, weight, _KIND, a.dtype, scales, None, _GROUP_SIZE, None, None, None)


def _w4a8(ops: Any, a: Any, codes: Any, scales: Any, dtype: torch.dtype) -> Call:
    weight, packed = ops.cutlass_encode_and_reorder_int4b(codes), ops.cutlass_pack_scale_fp8(scales)
    of_columns, of_rows = (torch.ones(size, 1, device="cuda") for size in (scales.shape[1], a.shape[0]))
    return partial(ops.cutlass_w4a8_mm, a, weight, packed, _GROUP_SIZE, of_columns, of_rows, dtype, None)


def _sparse(ops: Any, a: Any, codes: Any, scales: Any, places: Any) -> Any:
    """A call of `gptq_marlin_24_gemm`."""
    workspace, sizes = torch.zeros(4096, dtype=torch.int32, device="cuda"), (a.shape[0], scales.shape[1], a.shape[1])
    return partial(ops.gptq_marlin_24_gemm, a, codes, places, scales, workspace, _KIND, *sizes)


def _raw(kind: str, a: Any, codes: Any, scales: Any, zeros: Any) -> tuple[Any, ...]:
    """The arguments of `awq_gemm` or `gptq_gemm`."""
    if kind == "awq":
        return a, codes, scales, zeros, 8
    order = torch.empty(0, dtype=torch.int32, device="cuda")
    if kind == "gidx":
        order = (torch.randperm(a.shape[1], device="cuda") // _GROUP_SIZE).to(torch.int32)
    return a, codes, zeros, scales, order, kind != "gidx", True, _RAW[kind]
