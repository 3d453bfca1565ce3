"""The element types: one table for Python, torch, numpy, cupy and C."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, eq=False)
class DType:
    """An element type. `name` is its name in torch, numpy and ml_dtypes; `c_name` the one in number.cuh."""

    name: str
    c_name: str
    itemsize: int

    def __repr__(self) -> str:
        return self.name


float32 = DType("float32", "float", 4)
float16 = DType("float16", "half_t", 2)
bfloat16 = DType("bfloat16", "bf16_t", 2)
float8_e4m3fn = DType("float8_e4m3fn", "fp8_e4m3_t", 1)
float8_e4m3fnuz = DType("float8_e4m3fnuz", "fp8_e4m3fnuz_t", 1)
float8_e5m2 = DType("float8_e5m2", "fp8_e5m2_t", 1)
float8_e8m0fnu = DType("float8_e8m0fnu", "uint8_t", 1)  # block scales only; kernels read it as bytes
int8 = DType("int8", "int8_t", 1)
uint8 = DType("uint8", "uint8_t", 1)
boolean = DType("bool", "bool", 1)
int16 = DType("int16", "int16_t", 2)
int32 = DType("int32", "int32_t", 4)
uint32 = DType("uint32", "uint32_t", 4)
int64 = DType("int64", "int64_t", 8)

FLOATS = (float32, float16, bfloat16)
E4M3 = (float8_e4m3fn, float8_e4m3fnuz)  # the fp8 types that the quantizing ops write
_CODES = (*E4M3, float8_e5m2, float8_e8m0fnu, int8, uint8)
_TABLE = {d.name: d for d in (*FLOATS, *_CODES, boolean, int16, int32, uint32, int64)}


@cache
def of(native: Any) -> DType | None:
    """DType of a torch, numpy, cupy or ml_dtypes dtype, or of a name; None for one that no op takes."""
    name = getattr(native, "__name__", native)  # the name of a class such as numpy.float16
    return _TABLE.get(str(name).removeprefix("torch."))


def unsupported(native: Any) -> str:
    """The error message for a dtype that no op takes."""
    return f"dtype {native} is not supported: expected {', '.join(_TABLE)}"
