"""Values of a JSON file, checked: a value of another type, or out of range, is refused by name."""

from __future__ import annotations

import json
import reprlib
import stat
from numbers import Integral
from pathlib import Path
from typing import Any

from ..errors import ModelError

_MAX_SIZE = 1 << 20  # upper bound of every size: torch can still describe a square matrix of this size on "meta"
MAX_POSITIONS = (1 << 31) - 1
MAX_JSON = 1 << 24  # largest JSON file or header, in bytes: enough for the 100,000 tensors of DeepSeek-V3
# Bounds of counts, by the last word of the field: each unit allocates tensors, and a small file must not ask for much
# memory.
_MAX_COUNTS = {"layers": 1 << 14, "experts": 1 << 14}
_POSITION_COUNTS = ("max_position_embeddings", "original_max_position_embeddings", "sliding_window")


def check_file(path: Path) -> int:
    """The size of a file in bytes. ModelError unless `path` is a regular file: a device or a pipe might never end."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError | ValueError)
        raise ModelError(path, "is missing" if is_missing else f"cannot be read: {error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(path, "is no regular file")
    return found.st_size


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. ModelError if the file cannot be read or holds something else."""
    size = check_file(path)
    if size > MAX_JSON:
        raise ModelError(path, f"has {size} bytes, and at most {MAX_JSON} are read")
    try:
        with path.open("rb") as file:
            values = json.loads(file.read(size))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(path, f"cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(path, f"expected an object, got {type(values).__name__}")
    return values


def refuse(name: str, expected: str, got: object) -> ModelError:
    """The error for a value in a config; the caller raises it."""
    return ModelError("config", f"{name}: expected {expected}, got {reprlib.repr(got)}")


def first(*values: Any) -> Any:
    """The first value that is not None: null in a file counts as absent."""
    return next((value for value in values if value is not None), None)


def is_integer(value: object) -> bool:
    """Whether `value` is an integer and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def size(name: str, value: Any) -> int:
    """`value` if it is a positive integer within bounds. ModelError otherwise."""
    max_value = MAX_POSITIONS if name in _POSITION_COUNTS else _MAX_COUNTS.get(name.split("_")[-1], _MAX_SIZE)
    if not is_integer(value) or not 1 <= value <= max_value:
        raise refuse(name, f"a positive integer up to {max_value}", value)
    return int(value)


def number(name: str, value: Any) -> float:
    """`value` if it is a positive number far enough from the bounds of float32 that nothing overflows."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 <= value <= 1e30:
        raise refuse(name, "a positive number from 1e-30 to 1e30", value)
    return float(value)


def flag(values: dict[str, Any], name: str, default: bool = False) -> bool:
    """The bool `name` of `values`; null is False. ModelError for anything else."""
    value = values.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise refuse(name, "true or false", value)
    return bool(value)
