"""Conversions between float32 and fp8. The emulator's own flush subnormal fp8 values and lack FNUZ, gfx942's
formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Format:
    """Formats of OCP's specification of 8-bit floats, and the FNUZ formats, which have no infinity and use the encoding
    of -0 for NaN."""

    exponent: int  # bits
    mantissa: int
    bias: int
    fnuz: bool
    largest: int  # bits of the largest finite number
    overflow: int  # bits of larger numbers
    nan: int

    def encode(self, value: Any) -> Any:
        """fp8 encodings of floats, rounded to nearest even."""
        from tinygrad.dtype import dtypes

        bits = value.bitcast(dtypes.uint32).bitcast(dtypes.int32)
        sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
        exponent = (magnitude >> 23) - 127 + self.bias
        scale = exponent.maximum(1)  # subnormal values have the exponent of the smallest normal ones
        shift = (scale - exponent + 23 - self.mantissa).minimum(31)
        significand = (magnitude & 0x7FFFFF) | (magnitude >> 23).ne(0).where(0x800000, 0)
        whole = significand >> shift
        rest, half = significand - (whole << shift), (shift * 0 + 1) << (shift - 1)
        up = (half < rest) | (rest.eq(half) & (whole & 1).ne(0))
        code = whole + up.where(1, 0) + ((scale - 1) << self.mantissa)
        code = (code > self.largest).where(self.overflow, code)
        code = (magnitude > 0x7F800000).where(self.nan, code)
        signed = (code.eq(0) | code.eq(self.nan)).where(code, code | sign) if self.fnuz else code | sign
        return signed.cast(dtypes.uint8)

    def decode(self, value: Any) -> Any:
        """Floats of fp8 encodings."""
        from tinygrad.dtype import dtypes

        code = value.cast(dtypes.int32) & 0xFF
        magnitude, sign = code & 0x7F, (code & 0x80) << 24
        mantissa = magnitude & ((1 << self.mantissa) - 1)
        small = mantissa.cast(dtypes.float32) * 2.0 ** (1 - self.bias - self.mantissa)
        normal = (magnitude << (23 - self.mantissa)) + ((127 - self.bias) << 23)
        bits = (magnitude >> self.mantissa).eq(0).where(small.bitcast(dtypes.int32), normal)
        if self.fnuz:
            bits = code.eq(self.nan).where(0x7FC00000, bits)
        else:
            bits = (magnitude > self.largest).where(0x7FC00000, bits)
            bits = magnitude.eq(self.overflow).where(0x7FC00000 if self.overflow == self.nan else 0x7F800000, bits)
        return (bits | sign).bitcast(dtypes.float32)


_OCP = {"fp8": Format(4, 3, 7, False, 0x7E, 0x7F, 0x7F), "bf8": Format(5, 2, 15, False, 0x7B, 0x7C, 0x7F)}
_FNUZ = {"fp8": Format(4, 3, 8, True, 0x7F, 0x80, 0x80), "bf8": Format(5, 2, 16, True, 0x7F, 0x80, 0x80)}


def apply(emu: Any, arch: str) -> None:
    """Fix the emulator's conversions."""
    for name, one in (_FNUZ if arch == "gfx942" else _OCP).items():
        emu._FUNCS[f"{name}_to_f32"], emu._FUNCS[f"f32_to_{name}"] = one.decode, one.encode
