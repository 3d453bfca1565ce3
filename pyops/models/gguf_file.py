"""GGUF files: their metadata as ``config.json`` would have it, their tensors under the names of Hugging Face folders.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package `gguf` reads it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .._core.lazy import optional, torch
from .._model_error import ModelError

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# What ``config.json`` calls what metadata have under ``<architecture>.``.
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ROPE_FACTORS = "rope_freqs.weight"


def is_gguf(path: str | Path) -> bool:
    return Path(path).suffix == ".gguf"


class _Slice(NamedTuple):
    """What the header of a tensor says, as safetensors has it: bytes of blocks are ``U8`` [rows, bytes of a row]."""

    shape: tuple[int, ...]
    dtype: str

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


class GgufFile:
    """An open file, whose tensors are read as those of a safetensors file. Opening reads only the header.

    Raises:
        ModelError: the file is no whole GGUF file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ModelError(self.path, "is missing")
        stat = self.path.stat()
        reader = _reader(self.path, stat.st_mtime_ns, stat.st_size)
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._by_name = {_name(name): name for name in self._tensors if name != _ROPE_FACTORS}

    def value(self, key: str, default: Any = None) -> Any:
        """What the metadata have under `key`."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def keys(self) -> list[str]:
        """Names of tensors, as a Hugging Face folder has them."""
        return list(self._by_name)

    def get_slice(self, name: str) -> _Slice:
        tensor = self._tensors[self._by_name[name]]
        plain = tensor.tensor_type.name in _PLAIN
        shape = tuple(int(size) for size in (reversed(tensor.shape) if plain else tensor.data.shape))
        return _Slice(shape, tensor.tensor_type.name if plain else "U8")

    def get_tensor(self, name: str) -> Tensor:
        """The tensor: floating-point, or uint8 [rows, bytes of a row].

        llama.cpp turns pairs of neighbouring elements where Hugging Face turns elements of both halves of a head: in
        files of the architecture llama, rows of queries and keys lie in another order, which is undone.
        """
        own = self._by_name[name]
        tensor = self._tensors[own]
        data = torch.from_numpy(tensor.data.copy())
        if tensor.tensor_type.name in _PLAIN:
            data = data.view(getattr(torch, _PLAIN[tensor.tensor_type.name])).view(self.get_slice(name).shape)
        part = re.search(r"\.attn_([qk])\.", own)
        if part and self._architecture == "llama":
            heads = self._count("attention.head_count" if part[1] == "q" else "attention.head_count_kv")
            data = data.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return data

    def config(self) -> dict[str, Any]:
        """The metadata as an object of ``config.json``; ModelError for what no architecture here has."""
        architecture = self._architecture
        if self.value("split.count", 1) > 1:
            raise ModelError(self.path, "is a part of a model; gguf-split --merge makes one file of all parts")
        found = {name: self.value(f"{architecture}.{key}") for name, key in _SIZES.items()}
        found["num_key_value_heads"] = found["num_key_value_heads"] or found["num_attention_heads"]
        heads, hidden_size = found["num_attention_heads"], found["hidden_size"]
        if not isinstance(heads, int) or not isinstance(hidden_size, int) or heads < 1:
            raise self._refuse("attention.head_count", "one number for all layers", heads)
        found["head_dim"] = found["head_dim"] or hidden_size // heads
        turned = self.value(f"{architecture}.rope.dimension_count", found["head_dim"])
        if turned != found["head_dim"]:
            raise self._refuse("rope.dimension_count", f"all {found['head_dim']} elements of a head", turned)
        window = self.value(f"{architecture}.attention.sliding_window", 0)
        if window and window < (found["max_position_embeddings"] or 0):
            raise self._refuse("attention.sliding_window", "none", window)
        embedding, tensors = self._tensors.get("token_embd.weight"), self._tensors
        if embedding is None:
            raise ModelError(self.path, "token_embd.weight: is missing")
        ends = {self.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
        return found | {
            "architectures": [ARCHITECTURES[architecture]],
            "vocab_size": int(embedding.shape[1]) if len(embedding.shape) == 2 else 0,
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_output.bias" in tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in tensors,
            "rope_parameters": self._rope(),
            "eos_token_id": sorted(ends),
            "dtype": "bfloat16",
            "quantization_config": {"quant_method": "gguf", "types": self._types()},
        }

    @property
    def _architecture(self) -> str:
        found = self.value("general.architecture")
        if found not in ARCHITECTURES:
            raise self._refuse("architecture", " or ".join(map(repr, ARCHITECTURES)), found, of="general")
        return str(found)

    def _count(self, key: str) -> int:
        return int(self.value(f"{self._architecture}.{key}"))

    def _types(self) -> dict[str, int]:
        """{name of a tensor without ``.weight``: number of the type} of all tensors that are quantised."""
        types = {name: self._tensors[own].tensor_type for name, own in self._by_name.items()}
        return {
            name.removesuffix(".weight"): int(kind)
            for name, kind in types.items()
            if kind.name not in _PLAIN and name.endswith(".weight")
        }

    def _rope(self) -> dict[str, Any]:
        """The object ``rope_parameters``. A tensor has what divides each frequency, where Llama 3 scales them."""
        at = f"{self._architecture}.rope"
        found = {"rope_theta": self.value(f"{at}.freq_base", 10000.0)}
        kind = self.value(f"{at}.scaling.type", "none")
        if _ROPE_FACTORS in self._tensors:
            found |= {"rope_type": "divided", "divisors": self._tensors[_ROPE_FACTORS].data.ravel().tolist()}
        elif kind != "none":
            found |= {"rope_type": kind, "factor": self.value(f"{at}.scaling.factor")}
            if kind == "yarn":
                found["original_max_position_embeddings"] = self.value(f"{at}.scaling.original_context_length")
        return found

    def _refuse(self, key: str, expected: str, got: object, of: str | None = None) -> ModelError:
        return ModelError(self.path, f"{of or self._architecture}.{key}: expected {expected}, got {got!r}")


@lru_cache(maxsize=1)  # reading the vocabulary takes seconds
def _reader(path: Path, _mtime_ns: int, _size: int) -> Any:
    """The reader of the package `gguf`, for a file as it is now."""
    gguf = optional("gguf", "reading a GGUF file", "gguf")
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError, OSError, OverflowError, MemoryError) as error:
        raise ModelError(path, f"is no whole GGUF file: {error}") from None
    if reader.byte_order != "I":
        raise ModelError(path, "has the byte order of another machine")
    return reader


def _name(own: str) -> str:
    """The name in a Hugging Face folder of a tensor; an unknown one keeps its own."""
    base, _, end = own.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{end}"
    return f"{_NAMES[base]}.{end}" if base in _NAMES else own
