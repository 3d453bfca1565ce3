"""GGUF files: metadata converted to a ``config.json``, and tensors under their names in Hugging Face folders.

`gguf_header.py` reads the header; the package `gguf` defines the types and decodes the tensors that are not kept
quantised.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from .._core.system.lazy import optional, torch
from ..errors import ModelError
from ..ops._shared.ggml_formats import FORMATS
from .config_values import check_file
from .gguf_families import (
    GGUF_FAMILIES,
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    GgufFamily,
    config_values,
    family_of,
)
from .gguf_header import PLAIN, GgufHeader
from .gguf_keys import TYPES, check_unread, is_of
from .gguf_names import KV_B, MXFP4_PARTS, Source, sources
from .mixture import STACKED

if TYPE_CHECKING:
    from torch import Tensor

_FACTORS = ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS  # tensors that hold fields of config.json
_OF_MXFP4 = tuple(f"_{kind}" for kind in MXFP4_PARTS)
SPECIAL = CONTROL, USER_DEFINED = 3, 4  # token types that are matched before pre-tokenization
# Tokens that end a sequence: those with a metadata key {name}_token_id, and those with one of these texts, which end a
# text, a message, a document or a file.
END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
END_TEXTS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"}
END_TEXTS |= {"<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|endoftext|>", "<|end_of_text|>"}
END_TEXTS |= {"<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>"}
END_TEXTS |= {"<fim-repo>", "<|repo_name|>", "<reponame>", "<|file_sep|>"}
_HALF = 16  # an MXFP4 block is one byte of scale, then 16 bytes of e2m1 values


def is_gguf(path: str | Path) -> bool:
    return Path(path).suffix == ".gguf"


class _Slice(NamedTuple):
    """The header of a tensor in the form of safetensors: quantized blocks are ``U8`` [rows, bytes of a row]."""

    shape: tuple[int, ...]
    dtype: str

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


class GgufFile:
    """An open file with the reading interface of a safetensors file. Opening reads only the header.

    Raises:
        ModelError: the file is no whole GGUF file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        check_file(self.path)
        stat = self.path.stat()
        self._header = _header(self.path, stat.st_mtime_ns, stat.st_size)
        self._tensors = self._header.tensors
        self._asked: set[str] = set()
        self._architecture = ""  # set below; `value` already reads it in messages
        self._architecture = self.value("general.architecture")
        family = family_of(self._architecture, self)
        if family is None:
            raise self.refuse("architecture", " or ".join(map(repr, GGUF_FAMILIES)), self._architecture, of="general")
        self._family: GgufFamily = family
        shapes = {name: self._shape(name) for name in self._tensors if name not in _FACTORS}
        mxfp4 = {name for name, tensor in self._tensors.items() if tensor.kind.name == "MXFP4"}
        self._sources = sources(shapes, mxfp4, family)

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata value of `key`."""
        self._asked.add(key)
        found, own = self._header.value(key), key.removeprefix(f"{self._architecture}.")
        if found is not None and own in TYPES and not is_of(TYPES[own], found):
            raise ModelError(self.path, f"{key}: expected {TYPES[own]}, got {reprlib.repr(found)}")
        return default if found is None else found

    def own_value(self, key: str, default: Any = None) -> Any:
        """The metadata value of the key ``<architecture>.<key>``."""
        return self.value(f"{self._architecture}.{key}", default)

    def has(self, name: str) -> bool:
        """Whether the file has a tensor `name`."""
        return name in self._tensors

    def numbers(self, name: str) -> list[float]:
        """The elements of a floating-point tensor; empty if the tensor is missing or quantised."""
        is_plain = name in self._tensors and self._tensors[name].kind.name in PLAIN
        return self._read(name).flatten().tolist() if is_plain else []

    def keys(self) -> list[str]:
        """Names of tensors, as a Hugging Face folder has them."""
        return list(self._sources)

    def get_slice(self, name: str) -> _Slice:
        source = self._sources[name]
        if source.made:
            kind = "U8" if source.made.endswith(_OF_MXFP4) else "F32"
            return _Slice(tuple(self._made(source, "meta").shape), kind)
        shape, kind = self._shape(source.own[0]), self._tensors[source.own[0]].kind.name
        return _Slice(shape if source.part is None else shape[1:], kind if kind in PLAIN else "U8")

    def get_tensor(self, name: str) -> Tensor:
        """The tensor: floating-point, or uint8 [rows, bytes of a row].

        llama.cpp rotates adjacent elements as pairs, Hugging Face elements i and i + head_dim / 2. GGUF files of Llamas
        therefore have permuted rows of queries and keys; reading them undoes the permutation.
        """
        source = self._sources[name]
        if source.made:
            return self._made(source)
        (own,) = source.own
        data = self._read(own)
        part = re.search(r"\.attn_([qk])\.", own)
        if part and self._family.neighbours:
            heads = self._count("attention.head_count" if part[1] == "q" else "attention.head_count_kv")
            data = data.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        if self._family.one_added and own.endswith("norm.weight"):
            data = data - 1
        return data if source.part is None else data[source.part]

    def config(self) -> dict[str, Any]:
        """The metadata converted to a ``config.json`` object. ModelError for values that are not supported."""
        if self.value("split.count", 1) > 1:
            raise ModelError(self.path, "is a part of a model; gguf-split --merge makes one file of all parts")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelError(self.path, "token_embd.weight: is missing")
        found = config_values(self._family, self) | {
            "vocab_size": embedding.shape[0] if len(embedding.shape) == 2 else 0,
            "eos_token_id": self._ends(),
            "dtype": "bfloat16",
            "quantization_config": {"quant_method": "gguf", "types": self._types()},
        }
        unread = [key for key in self._header.all_keys() if key not in self._asked]
        check_unread(self.path, self._architecture, unread, self._header.value)
        return found

    def refuse(self, key: str, expected: str, got: object, of: str | None = None) -> ModelError:
        """The error for a value of the metadata; the caller raises it."""
        return ModelError(self.path, f"{of or self._architecture}.{key}: expected {expected}, got {reprlib.repr(got)}")

    def _ends(self) -> list[int]:
        """Tokens that end a sequence: those that metadata keys name, and those that llama.cpp recognises by their text.

        The keys of a chat model may name only the end of a document, and not that of a chat message.
        """
        tokens, types = (self.value(f"tokenizer.ggml.{name}") or [] for name in ("tokens", "token_type"))
        found = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind in SPECIAL}
        texts = END_TEXTS - ({"<|end|>"} if {"<|return|>", "<|call|>"} <= found.keys() else set())
        named = {self.value(f"tokenizer.ggml.{name}_token_id") for name in END_KEYS} - {None}
        return sorted(named | {i for token, i in found.items() if token in texts})

    def _count(self, key: str) -> int:
        return int(self.own_value(key, self.own_value("attention.head_count")))

    def _types(self) -> dict[str, int]:
        """{name of a module: GGUF type number} of all weights that are kept quantised."""
        found = {}
        for name, source in self._sources.items():
            kind = self._tensors[source.own[0]].kind
            if source.made.endswith("_blocks"):
                found[name.removesuffix("_blocks")] = int(kind)
            elif kind.name not in PLAIN and name.endswith(".weight") and not source.made:
                if kind not in FORMATS:
                    served = " or ".join((*PLAIN, *(format.name for format in FORMATS.values())))
                    raise ModelError(self.path, f"{source.own[0]}: expected {served}, got {kind.name}")
                found[name.removesuffix(".weight")] = int(kind)
        return found

    def _shape(self, own: str) -> tuple[int, ...]:
        """The shape of a tensor, in elements, or in bytes if it stays quantised."""
        tensor = self._tensors[own]
        return tensor.shape if tensor.kind.name in PLAIN else tensor.bytes_shape

    def _read(self, own: str) -> Tensor:
        """The elements of a tensor, or its bytes if it stays quantised."""
        tensor = self._tensors[own]
        data = torch.from_numpy(self._bytes(own).copy())
        return data.view(getattr(torch, PLAIN[tensor.kind.name])) if tensor.kind.name in PLAIN else data

    def _bytes(self, own: str) -> NDArray[Any]:
        """The bytes of a tensor, still in the file."""
        tensor = self._tensors[own]
        return self._header.data[tensor.start :][: prod(tensor.bytes_shape)].reshape(tensor.bytes_shape)

    def _made(self, source: Source, device: str = "cpu") -> Tensor:
        """A tensor that is composed of others; on the device "meta", without data."""
        is_mxfp4 = source.made.endswith(_OF_MXFP4)
        if device == "cpu":
            parts = [self._read(own) if is_mxfp4 else self._dequantised(own) for own in source.own]
        else:
            shapes = [self._shape(own) if is_mxfp4 else self._tensors[own].shape for own in source.own]
            kind = torch.uint8 if is_mxfp4 else torch.float32
            parts = [torch.empty(shape, dtype=kind, device=device) for shape in shapes]
        return _mxfp4(source.made, *parts) if is_mxfp4 else _MADE[source.made](*parts)

    def _dequantised(self, own: str) -> Tensor:
        """The elements of a tensor of any type, dequantised."""
        kind = self._tensors[own].kind
        if kind.name in PLAIN:
            return self._read(own)
        gguf = optional("gguf", "reading a GGUF file", "gguf")
        return torch.from_numpy(gguf.quants.dequantize(self._bytes(own), kind))


@lru_cache(maxsize=1)
def _header(path: Path, _mtime_ns: int, _size: int) -> GgufHeader:
    """The header of a file, cached until the file changes."""
    return GgufHeader(path)


def _kv_b(key: Tensor, value: Tensor) -> Tensor:
    """``kv_b_proj`` [.., rank], head by head, from keys [heads, rank, elements] and values [heads, elements, rank]."""
    return torch.cat((key.mT, value), 1).flatten(0, 1)


def _gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Interleave the rows of gate and up, each [num_experts, channels, ...]."""
    return torch.stack((gate, up), 2).flatten(1, 2)


def _mxfp4(made: str, *weights: Tensor) -> Tensor:
    """Convert MXFP4 blocks [.., rows, blocks, 16] or scales [.., rows, blocks] to Hugging Face's layout.

    The low nibbles hold the first half of a block's values in GGUF, and the even ones in Hugging Face's layout.
    """
    rows = _gate_up(*weights) if len(weights) == 2 else weights[0]
    blocks = rows.unflatten(-1, (-1, 1 + _HALF))
    if made.endswith("_scales"):
        return blocks[..., 0]
    codes = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1).unflatten(-1, (_HALF, 2))
    return codes[..., 0] | codes[..., 1] << 4


_MADE: dict[str, Callable[..., Tensor]] = {
    KV_B: _kv_b,
    STACKED[0]: lambda gate, up: _gate_up(gate, up).mT,
    STACKED[1]: lambda down: down.mT,
    f"{STACKED[0]}_bias": _gate_up,
    f"{STACKED[1]}_bias": lambda bias: bias,
}
