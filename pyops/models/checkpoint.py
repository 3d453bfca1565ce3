"""A model from a Hugging Face folder: ``config.json`` and safetensors, checked before any memory is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._core.errors import ModelError
from .._core.lazy import optional, torch
from .config import DTYPES, Config, read_json
from .llama import Llama

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {"F32", "F16", "BF16"}
_Progress = Callable[[int, int], None]


def load(folder: str | Path, device: Any = "cpu", dtype: str | None = None, progress: _Progress | None = None) -> Llama:
    """The model in `folder`.

    Everything is checked first, from ``config.json`` and the headers of the shards: a shard or tensor that is missing
    or not of this architecture, a wrong shape, a dtype that is not a plain float, weights that the device has no room
    for. Each is a ModelError, before memory is taken.

    Args:
        folder: holds ``config.json`` and ``model.safetensors``, or shards and ``model.safetensors.index.json``.
        device: where the weights shall lie.
        dtype: "float32", "float16" or "bfloat16"; None for the one that ``config.json`` names.
        progress: called with the bytes that are loaded and all there are.
    """
    folder = Path(folder)
    config = Config.read(folder)
    if dtype is not None and dtype not in DTYPES:
        raise ModelError("dtype", f"expected {' or '.join(DTYPES)}, got {dtype!r}")
    plan = Llama(config, dtype, "meta").tensors()
    shards = _shards(folder, plan, config)
    total = sum(tensor.nbytes for tensor in plan.values())
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if free < total:
            raise ModelError(folder, f"its weights take {total / 1e9:.1f} GB, and {device} has {free / 1e9:.1f} GB")
    model, done = Llama(config, dtype, device), 0
    places = model.tensors()
    for shard, names in shards.items():
        with _opened(shard) as file:
            for name in names:
                places[name].copy_(file.get_tensor(name))
                done += places[name].nbytes
                if progress:
                    progress(done, total)
    return model


def _shards(folder: Path, expected: dict[str, Any], config: Config) -> dict[Path, list[str]]:
    """{file: names of tensors to read from it}, once every header is as `expected`."""
    if (folder / _INDEX).exists():
        where = read_json(folder / _INDEX).get("weight_map")
        files = set(where.values()) if isinstance(where, dict) else set()
        if not files or not all(isinstance(file, str) and Path(file).name == file for file in files):
            raise ModelError(folder / _INDEX, "weight_map: expected names of tensors and of files beside this one")
    else:
        files = {_SINGLE}
    found: dict[str, Path] = {}
    for file in sorted(files):
        if not (folder / file).is_file():
            raise ModelError(folder / file, "is missing")
        with _opened(folder / file) as opened:
            for name in opened.keys():  # noqa: SIM118
                if not _ignored(name, config):
                    found[name] = folder / file
                    _check(folder / file, name, opened.get_slice(name), expected)
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise ModelError(folder, f"{missing[0]}: is in no shard{_and_others(missing)}")
    return {shard: [name for name in found if found[name] == shard] for shard in dict.fromkeys(found.values())}


def _check(file: Path, name: str, header: Any, expected: dict[str, Any]) -> None:
    if name not in expected:
        raise ModelError(file, f"{name}: is no tensor of this architecture")
    shape, dtype = tuple(header.get_shape()), header.get_dtype()
    if shape != expected[name].shape:
        raise ModelError(file, f"{name}: expected shape {tuple(expected[name].shape)}, got {shape}")
    if dtype not in _DTYPES:
        raise ModelError(file, f"{name}: expected {' or '.join(sorted(_DTYPES))}, got {dtype}")


def _ignored(name: str, config: Config) -> bool:
    """What some files hold although it follows from the rest."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _and_others(names: list[str]) -> str:
    return f", nor are {len(names) - 1} others" if len(names) > 1 else ""


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file; opening reads its header alone and compares it with the size of the file."""
    safetensors = optional("safetensors", "reading a model", "models")
    try:
        opened = safetensors.safe_open(file, framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(file, f"is no whole safetensors file: {error}") from None
    with opened as entered:
        yield entered
