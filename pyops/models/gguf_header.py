"""The header of a GGUF file: metadata and tensor offsets. A count that exceeds the file's size is an error at once.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from .._core.system.lazy import optional
from ..errors import ModelError

_MAGIC, _VERSIONS, _DEFAULT_ALIGNMENT, _MAX_DIMS = b"GGUF", (2, 3), 32, 4
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "?", 10: "<u8", 11: "<i8"}
_SCALARS |= {12: "<f8"}
# Bytes of a length, of the shortest key with its value, and of the shortest description of a tensor.
_LENGTH, _MIN_KEY, _MIN_TENSOR = 8, 13, 24
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufTensor(NamedTuple):
    """A tensor as the header describes it.

    Attributes:
        shape: number of elements by axis; the last axis is contiguous.
        kind: its type, a value of `gguf.GGMLQuantizationType`.
        bytes_shape: `shape`, the last axis in bytes.
        start: offset of its bytes in the file.
    """

    shape: tuple[int, ...]
    kind: Any
    bytes_shape: tuple[int, ...]
    start: int


class _Value(NamedTuple):
    """The location of a value: an array of `length` elements of a type, or one value if `length` is None."""

    kind: int
    start: int
    length: int | None


class GgufHeader:
    """The header of the file at `path`.

    Attributes:
        tensors: {name: what it is}.

    Raises:
        ModelError: the file is no whole GGUF file; its values are read, and refused, only when they are asked for.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        if not path.stat().st_size:
            raise self._broken("is empty")
        self.data: NDArray[numpy.uint8] = numpy.memmap(path, mode="r")
        self._memory = self.data.data
        self._values: dict[str, _Value] = {}
        if bytes(self._take(4)) != _MAGIC:
            raise self._broken("does not begin with GGUF")
        version = self._unsigned(4)
        if version and not version & 0xFFFF:
            raise ModelError(path, "has the byte order of another machine")
        if version not in _VERSIONS:
            raise self._broken(f"has version {version}")
        num_tensors = self._count(self._unsigned(8), _MIN_TENSOR)
        for _ in range(self._count(self._unsigned(8), _MIN_KEY)):
            key = self._string("a key")
            if key in self._values:
                raise self._broken(f"has {key} twice")
            self._values[key] = self._skip(key)
        described = [self._tensor() for _ in range(num_tensors)]
        self.tensors = self._placed(described, self._at)

    def all_keys(self) -> list[str]:
        """Keys of the metadata."""
        return list(self._values)

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata value of `key`: a number, a bool, a string, or a list of these."""
        found = self._values.get(key)
        if found is None:
            return default
        self._at = found.start
        if found.kind == _STRING:
            values = [self._string(key) for _ in range(1 if found.length is None else found.length)]
        else:
            length = 1 if found.length is None else found.length
            values = numpy.frombuffer(self._memory, _SCALARS[found.kind], length, found.start).tolist()
        return values[0] if found.length is None else values

    def _skip(self, key: str) -> _Value:
        """Read the type at the current position and skip the value of `key`; returns the value's location."""
        kind, count = self._unsigned(4), None
        if kind == _ARRAY:
            kind = self._unsigned(4)
            count = self._unsigned(8)
        if kind != _STRING and kind not in _SCALARS:
            what = "an array of arrays" if kind == _ARRAY else f"a value of the unknown type {kind}"
            raise self._broken(f"has {what}: {key}")
        size = _LENGTH if kind == _STRING else numpy.dtype(_SCALARS[kind]).itemsize
        num = self._count(1 if count is None else count, size)
        start = self._at
        if kind == _STRING:
            for _ in range(num):
                self._take(self._unsigned(_LENGTH))
        else:
            self._take(num * size)
        return _Value(kind, start, count)

    def _tensor(self) -> tuple[str, tuple[int, ...], Any, int]:
        """Read the tensor description at the current position: (name, sizes, type, offset)."""
        name, num_dims = self._string("a name of a tensor"), self._unsigned(4)
        if num_dims > _MAX_DIMS:
            raise self._broken(f"has a tensor of {num_dims} dimensions: {name}")
        sizes = tuple(self._unsigned(8) for _ in range(num_dims))
        number, offset = self._unsigned(4), self._unsigned(8)
        kinds = optional("gguf", "reading a GGUF file", "gguf").GGMLQuantizationType
        if number not in set(kinds):
            raise self._broken(f"has a tensor of the unknown type {number}: {name}")
        return name, sizes[::-1], kinds(number), offset

    def _placed(self, described: list[tuple[str, tuple[int, ...], Any, int]], end: int) -> dict[str, GgufTensor]:
        """{name: tensor}. Tensors begin at the first aligned offset after `end`. ModelError if one exceeds the file."""
        alignment = self.value("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._broken(f"has general.alignment {alignment!r}, which is no power of two")
        begin = -(-end // alignment) * alignment
        sizes = optional("gguf", "reading a GGUF file", "gguf").GGML_QUANT_SIZES
        found: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in described:
            length, nbytes = sizes[kind]
            if name in found:
                raise self._broken(f"has {name} twice")
            if not shape or not all(shape) or shape[-1] % length:
                raise self._broken(f"has blocks of {length} elements, and {name} of shape {shape}")
            bytes_shape = (*shape[:-1], shape[-1] // length * nbytes)
            if begin + offset + prod(bytes_shape) > len(self.data):
                raise self._broken(f"ends before {name} does")
            found[name] = GgufTensor(shape, kind, bytes_shape, begin + offset)
        return found

    def _take(self, count: int) -> memoryview:
        """The next `count` bytes."""
        begin = self._at
        if count > len(self.data) - begin:
            raise self._broken("ends within its header")
        self._at += count
        return self._memory[begin : self._at]

    def _unsigned(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _count(self, count: int, size: int) -> int:
        """`count`, checked: ModelError unless the rest of the file can hold `count` elements of `size` bytes."""
        if count > (len(self.data) - self._at) // size:
            raise self._broken(f"ends within {count} elements of its header")
        return count

    def _string(self, what: str) -> str:
        try:
            return str(self._take(self._unsigned(_LENGTH)), "utf-8")
        except UnicodeDecodeError:
            raise self._broken(f"has {what} that is not UTF-8") from None

    def _broken(self, message: str) -> ModelError:
        return ModelError(self._path, f"is no whole GGUF file: {message}")
