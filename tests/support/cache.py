"""Values, fp8 encodings and hostile indices for the tests of cache ops, and the list of these ops."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy
import pytest
import torch

import pyops
from pyops.host.toolchain import toolchains

on_host = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
KINDS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FNUZ = torch.float8_e4m3fnuz
# kv_cache_dtype -> the element types of a cache with it: bytes, except for FNUZ.
CODES = pytest.mark.parametrize(("kind", "code"), [*KINDS.items(), ("fp8", FNUZ), ("fp8_e4m3", FNUZ)])
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
HOSTILE = (-1, -2, -(2**31), -(2**63), INT32_MAX, INT64_MAX, INT64_MAX - 15, 2**62)
packed = import_module("pyops.ops.cache.reshape_and_cache")  # the package has the op under this name
# Ops that return a tensor are tested separately.
FAMILY = [
    name
    for name, op in pyops.registry.items()
    if op.reference.__module__.startswith("pyops.ops.cache.") and not op.declaration.returned
]


def make(*shape: int, dtype: torch.dtype = torch.float32, where: str = "cpu", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(where)


def bytes_of(*shape: int, where: str = "cpu", high: int = 120) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, high, shape, generator=generator, dtype=torch.uint8).to(where)


def ints(values: Any, dtype: torch.dtype = torch.int64, where: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=where)


def quantised(x: torch.Tensor, scale: float, kind: torch.dtype) -> torch.Tensor:
    """fp8 values by torch's own conversion of a float64 quotient. NaN becomes 0x7f, or 0x80 where 0x80 is not a
    zero."""
    quotient = (x.double() / float(numpy.float32(scale))).float()
    largest = torch.finfo(kind).max
    codes = quotient.clamp(-largest, largest).to(kind).view(torch.uint8)
    return codes.masked_fill(quotient.isnan(), 0x80 if kind == FNUZ else 0x7F)


def as_given(cache: torch.Tensor, code: torch.dtype) -> torch.Tensor:
    """A byte cache as a call takes it; for FNUZ its dtype tells the encoding."""
    return cache.view(code) if code == FNUZ else cache


def every_value(dtype: torch.dtype, where: str) -> torch.Tensor:
    """Every bit pattern of a two-byte type."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16, device=where).view(dtype)
