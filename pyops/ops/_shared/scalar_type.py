"""Quantized element types of weights, with the integer ids by which vLLM's ops take them."""

from __future__ import annotations

from typing import Any, NamedTuple

# (field of ScalarType, bits of the field in an id), lowest bits first.
_FIELDS = (("exponent", 8), ("mantissa", 8), ("signed", 1), ("bias", 32), ("finite_values_only", 1), ("nan_repr", 8))


class ScalarType(NamedTuple):
    """A low-bit number type: a float, or an integer that is stored with a bias.

    Attributes:
        exponent: bits of the exponent; 0 for integers.
        mantissa: bits of the mantissa, without the sign.
        signed: whether the highest bit is a sign.
        bias: subtracted from the stored number.
        finite_values_only: whether the type has no infinities.
        nan_repr: 0: no NaN; 1: as IEEE 754; 2: all other bits set.
    """

    exponent: int
    mantissa: int
    signed: bool
    bias: int = 0
    finite_values_only: bool = False
    nan_repr: int = 1

    @property
    def size_bits(self) -> int:
        """Bits of a number."""
        return self.exponent + self.mantissa + self.signed

    @property
    def is_integer(self) -> bool:
        return self.exponent == 0

    @property
    def id(self) -> int:
        """The integer by which ops take the type."""
        shift = number = 0
        for name, bits in _FIELDS:
            number |= (int(getattr(self, name)) & (1 << bits) - 1) << shift
            shift += bits
        return number

    @classmethod
    def of(cls, id: int) -> ScalarType:
        """The type with this id."""
        values: dict[str, Any] = {}
        for name, bits in _FIELDS:
            values[name] = id & (1 << bits) - 1
            id >>= bits
        flags = {name: bool(values[name]) for name in ("signed", "finite_values_only")}
        return cls(**values | flags)

    def __str__(self) -> str:
        for name, one in SCALAR_TYPES.items():
            if one == self:
                return name
        return repr(tuple(self))


SCALAR_TYPES = {
    "int4": ScalarType(0, 3, True),
    "uint4": ScalarType(0, 4, False),
    "int8": ScalarType(0, 7, True),
    "uint8": ScalarType(0, 8, False),
    "uint2b2": ScalarType(0, 2, False, 2),
    "uint3b4": ScalarType(0, 3, False, 4),
    "uint4b8": ScalarType(0, 4, False, 8),
    "uint8b128": ScalarType(0, 8, False, 128),
    "float8_e4m3fn": ScalarType(4, 3, True, 0, True, 2),
    "float4_e2m1f": ScalarType(2, 1, True, 0, True, 0),
}
int4, uint4, int8, uint8 = (SCALAR_TYPES[name] for name in ("int4", "uint4", "int8", "uint8"))
uint4b8, uint8b128 = SCALAR_TYPES["uint4b8"], SCALAR_TYPES["uint8b128"]
float8_e4m3fn, float4_e2m1f = SCALAR_TYPES["float8_e4m3fn"], SCALAR_TYPES["float4_e2m1f"]
E2M1_NUMBERS = tuple(sign * x for sign in (1.0, -1.0) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))  # by bits
