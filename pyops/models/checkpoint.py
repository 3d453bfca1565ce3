"""Load a model from a Hugging Face folder (``config.json``, safetensors) or a GGUF file; check it before allocating."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from .._core.system.lazy import optional, torch
from ..errors import ModelError
from .config import DTYPES, Config
from .config_values import MAX_JSON, check_file, read_json
from .decoder import Decoder
from .gguf_file import GgufFile, is_gguf
from .kv_cache import KV_SCALES
from .kv_scales import check_names, checked_scale, scales_by_module, write_kv_scales
from .mixture import STACKED
from .packed_format import PackedQuantization
from .quantization import Quantization, QuantizedWeights
from .tensor_parallel import Group, ParallelDecoder

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_OTHER_FORMATS = ("pytorch_model*.bin", "consolidated*", "*.pth", "*.pt", "tf_model.h5", "flax_model.msgpack")
_ZERO_POINTS = (".k_zero_point", ".v_zero_point", ".q_zero_point")  # must be zero: the cache is symmetric
_FLOATS = {"F32", "F16", "BF16"}
# Dtypes of quantised weights: {torch's name: the name in safetensors headers}.
_CODES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
}
# Tensors that are not read: tables that are computed from the config, masks and the shapes of packed weights are
# redundant; scales of queries have no use, because the models keep queries in 16 bits.
_NOT_READ = (".q_scale", "rotary_emb.inv_freq", ".weight_shape", ".attention.bias", ".attention.masked_bias")
# Suffixes of tensor names in some formats: {suffix: the suffix in `Decoder.tensors`}.
_ALIASES = {
    ".weight_scale_inv": ".weight_scale",
    ".activation_scale": ".input_scale",
    "embed_out.weight": "lm_head.weight",
    ".attn.norm.weight": ".attn.kv_norm.weight",  # DeepSeek-V4, as transformers writes it
    # dense MLPs of Kimi Linear, as transformers writes them
    **{f".block_sparse_moe.{part}_proj.weight": f".mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    # scales of an fp8 cache, as ModelOpt, early llm-compressor and vLLM's module names spell them
    **{f".{kind}_proj.{kind}_scale": f".{kind}_scale" for kind in "kv"},
    **{f".{module}.{kind}_scale": f".{kind}_scale" for kind in "kv" for module in ("qkv_proj", "attn")},
    **{f".{kind}_proj.output_scale": f".{kind}_scale" for kind in "kv"},
    **{f".{kind}_cache.scale": f".{kind}_scale" for kind in "kv"},
    ".scale": ".weight_scale",  # DeepSeek-V4, as published
}
# Prefixes of the decoder of a multimodal model, in all versions of transformers: {prefix: the prefix here}.
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    # DeepSeek-V4, as published
    **{name: f"model.{name}" for name in ("layers.", "norm.")},
    "embed.": "model.embed_tokens.",
    "head.": "lm_head.",
    "hc_head_": "model.hc_head.hc_",
}
_Progress = Callable[[int, int], None]


class _Header(NamedTuple):
    """The entry of a tensor in the header of a shard; `name` is its name in the shard."""

    shard: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def load(
    folder: str | Path,
    device: Any = "cpu",
    dtype: str | None = None,
    progress: _Progress | None = None,
    group: Group | None = None,
) -> Decoder:
    """The model in `folder`.

    Args:
        folder: holds ``config.json`` and ``model.safetensors``, or shards and ``model.safetensors.index.json``. Or a
            GGUF file, by its name's end.
        device: device of the weights.
        dtype: "float32", "float16" or "bfloat16"; None for the dtype that ``config.json`` names.
        progress: called with (bytes loaded so far, bytes in all).
        group: the tensor-parallel processes. Each of them calls `load`, reads all tensors, and keeps its shard.

    Raises:
        ModelError: a shard or a tensor is missing, a tensor is not of this architecture, a shape is wrong, a dtype is
            no plain float where ``config.json`` does not say that weights are quantised, a scale of an fp8 cache is no
            positive finite number, or the device has too little memory. ``config.json`` and the headers of the shards
            are checked before memory is allocated.

    Examples:
        >>> import tempfile, transformers
        >>> sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        >>> tiny = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tiny.save_pretrained(folder)
        ...     model = load(folder, device="cpu", dtype="float32")
        >>> [tokens] = Engine(model).generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    """
    folder, device, config = Path(folder), _device(device), Config.read(folder)
    if dtype is not None and dtype not in DTYPES:
        raise ModelError("dtype", f"expected {' or '.join(DTYPES)}, got {dtype!r}")
    headers = {name: header for name, header in _headers(folder).items() if not name.startswith(config.not_read)}
    if "lm_head.weight" in headers:  # the file has an lm_head: use it even if the config ties the embeddings
        config = replace(config, tie_word_embeddings=False)
    config = _with_joined_experts(config, headers)
    least, of_what = _least_tensors(config)
    if len(headers) < least:
        raise ModelError(folder, f"has {of_what}, and {len(headers)} tensors for them")
    whole = Decoder(config, dtype, "meta")
    plan = whole.tensors()
    kv_scales, headers = _kv_scales(folder, headers, whole)
    if isinstance(config.quantization, PackedQuantization):
        headers = _without_zero_biases(headers, plan)
    _check(folder, headers, plan, config.quantization)

    def made(where: Any) -> Decoder:
        return Decoder(config, dtype, where) if group is None else ParallelDecoder(config, group, dtype, where)

    own, free = made("meta").tensors().values(), free_bytes(device)
    total = sum(tensor.nbytes for tensor in own)
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in own}
    needed = sum(storages.values())  # more than `total` if weights are dequantized
    if free < needed:
        raise ModelError(folder, f"its weights take {needed / 1e9:.1f} GB, and {device} has {free / 1e9:.1f} GB")
    model, done = made(device), 0
    places = model.tensors()
    for shard in dict.fromkeys(header.shard for header in headers.values()):
        with _opened(shard) as file:
            for name in (name for name, header in headers.items() if header.shard == shard):
                model.write(name, file.get_tensor(headers[name].name))
                done += places[name].nbytes if name in places else 0
                if progress:
                    progress(done, total)
    _say_what_is_not_finite(folder, places)
    write_kv_scales(model, kv_scales)
    model.prepare()
    return model


def _with_joined_experts(config: Config, headers: dict[str, _Header]) -> Config:
    """`config`, or a copy for a checkpoint that stacks the experts of each layer in two tensors."""
    mixture = config.mixture
    is_named = mixture is not None and not (mixture.is_stacked or mixture.joined or config.quantization)
    if mixture is None or not is_named or not any(name.endswith(STACKED[0]) for name in headers):
        return config
    return replace(config, mixture=replace(mixture, joined=STACKED))


def _least_tensors(config: Config) -> tuple[int, str]:
    """A lower bound of the number of tensors that the config implies, and its reason as text."""
    layers, mixture = config.num_hidden_layers, config.mixture
    if mixture is not None and not (mixture.is_stacked or mixture.joined):
        return sum(mixture.layers) * mixture.num_experts, f"{layers} layers of {mixture.num_experts} experts"
    if config.qk_norm == "heads" and "{}" in config.names.q_norm:
        return layers * config.num_attention_heads, f"{layers} layers of {config.num_attention_heads} norms of heads"
    return layers, f"{layers} layers"


def _say_what_is_not_finite(folder: Path, tensors: dict[str, Any]) -> None:
    """Warn of the first weight with NaN or infinity, including one that overflowed when it was converted."""
    found = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    ends = {name: torch.aminmax(tensor) for name, tensor in found.items() if tensor.dtype.itemsize > 1}  # not fp8
    if ends:
        sums = torch.stack([(low - low + high - high).float() for low, high in ends.values()])  # 0 if finite, else NaN
        bad = [name for name, is_bad in zip(ends, sums.isnan().tolist(), strict=True) if is_bad]
        if bad:
            others = f" and {len(bad) - 1} other tensors" if len(bad) > 1 else ""
            warnings.warn(f"{folder}: NaN or infinity in {bad[0]}{others}", stacklevel=3)


def free_bytes(device: Any) -> int:
    """Free memory of `device`. Memory that torch has reserved and does not use, and the CPU's file cache, are free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    (kilobytes,) = re.findall(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return 1024 * int(kilobytes)


def _device(given: Any) -> Any:
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    count = torch.cuda.device_count()
    if device.type != "cpu" and (device.type != "cuda" or (device.index or 0) >= count):
        raise ModelError("device", f"expected the CPU or one of {count} GPUs, got {str(given)!r}")
    return device


def _headers(folder: Path) -> dict[str, _Header]:
    """{name: header} of every tensor in the shards."""
    found: dict[str, _Header] = {}
    for shard in _shards(folder):
        check_file(shard)
        with _opened(shard) as opened:
            for name in opened.keys():  # noqa: SIM118
                header = opened.get_slice(name)
                if name.endswith(_NOT_READ):
                    continue
                known = _known(name)
                if known in found and found[known].name != name:
                    raise ModelError(shard, f"{name}: is there under the name {found[known].name}, too")
                if known in found:
                    raise ModelError(shard, f"{name}: is in {found[known].shard.name}, too")
                found[known] = _Header(shard, name, tuple(header.get_shape()), header.get_dtype())
    return found


def _known(name: str) -> str:
    """The name in `Decoder.tensors` of a tensor with this name in a file."""
    for start, known in _PREFIXES.items():
        if name.startswith(start):
            name = known + name.removeprefix(start)
    for end, known in _ALIASES.items():
        if name.endswith(end):
            return name.removesuffix(end) + known
    return name


def _shards(folder: Path) -> list[Path]:
    """The single safetensors file if there is one, else the shards that the index names; or the GGUF file itself."""
    index = folder / _INDEX
    if is_gguf(folder):
        return [folder]
    if (folder / _SINGLE).is_file() or not index.exists():
        _refuse_other_formats(folder)
        return [folder / _SINGLE]
    where = read_json(index).get("weight_map")
    files = list(where.values()) if isinstance(where, dict) else []
    if not files or not all(isinstance(file, str) and Path(file).name == file for file in files):
        raise ModelError(index, "weight_map: expected names of tensors and of files beside this one")
    return [folder / file for file in sorted(set(files))]


def _refuse_other_formats(folder: Path) -> None:
    """ModelError if a folder has weights only in formats that are not supported."""
    found = sorted(path.name for pattern in _OTHER_FORMATS for path in folder.glob(pattern))
    if found and not (folder / _SINGLE).exists():
        advice = "save_pretrained of transformers writes model.safetensors"
        raise ModelError(folder, f"has weights in {found[0]}, which is not read; {advice}")


def _kv_scales(folder: Path, headers: dict[str, _Header], model: Decoder) -> tuple[dict[str, Any], dict[str, _Header]]:
    """Read and check the scales of fp8 caches; returns them and the headers of all other tensors."""
    found, others, by_module = {}, {}, scales_by_module(model)
    check_names(folder, [name for name in headers if name.endswith(KV_SCALES)], model)
    for known, header in headers.items():
        shard, name, shape, dtype = header
        if not known.endswith((*KV_SCALES, *_ZERO_POINTS)):
            others[known] = header
            continue
        if prod(shape) > model.config.num_key_value_heads:  # checked first, so that no large tensor is read
            expected = f"at most {model.config.num_key_value_heads} elements"
            raise ModelError(shard, f"{name}: expected {expected}, got shape {shape}")
        with _opened(shard) as file:
            tensor = file.get_tensor(name).float()
        if known.endswith(KV_SCALES):
            if dtype not in _FLOATS:
                raise ModelError(shard, f"{name}: expected {' or '.join(sorted(_FLOATS))}, got {dtype}")
            found[known] = checked_scale(shard, name, tensor, by_module[known.rpartition(".")[0]].num_heads)
        elif tensor.any():
            raise ModelError(shard, f"{name}: expected zeros, as the quantization of a cache is symmetric")
    return found, others


def _without_zero_biases(headers: dict[str, _Header], plan: dict[str, Any]) -> dict[str, _Header]:
    """The headers without all-zero biases, which GPTQ may write even if the architecture has no biases."""
    found = {}
    for name, header in headers.items():
        if name not in plan and name.endswith(".bias") and f"{name.removesuffix('bias')}qweight" in plan:
            with _opened(header.shard) as file:
                if not file.get_tensor(header.name).any():
                    continue
        found[name] = header
    return found


def _check(
    folder: Path, headers: dict[str, _Header], expected: dict[str, Any], quantization: QuantizedWeights | None
) -> None:
    per_tensor = isinstance(quantization, Quantization) and quantization.weights == "tensor"
    of_blocks = isinstance(quantization, Quantization) and quantization.weights == "block"
    scalars = (".input_scale", ".weight_scale") if per_tensor else (".input_scale",)
    for known, (shard, name, shape, dtype) in headers.items():
        if known not in expected:
            raise ModelError(shard, f"{name}: is no tensor of this architecture")
        tensor = expected[known]
        if known.endswith(scalars):
            if prod(shape) != 1:
                raise ModelError(shard, f"{name}: expected one element, got shape {shape}")
        elif shape != tensor.shape:
            raise ModelError(shard, f"{name}: expected shape {tuple(tensor.shape)}, got {shape}")
        code = _CODES.get(str(tensor.dtype).removeprefix("torch."))
        dtypes = _FLOATS if code is None else {code}
        if of_blocks and known.endswith(".weight_scale"):
            dtypes = dtypes | {"F8_E8M0"}
        if dtype not in dtypes:
            raise ModelError(shard, f"{name}: expected {' or '.join(sorted(dtypes))}, got {dtype}")
    missing = sorted(expected.keys() - headers.keys())
    if missing:
        others = f", nor are {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ModelError(folder, f"{missing[0]}: is in no shard{others}")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors or GGUF file. Opening reads only the header and checks it against the size of the file."""
    if is_gguf(file):
        yield GgufFile(file)
        return
    safetensors = optional("safetensors", "reading a model", "models")
    with file.open("rb") as begin:
        size = int.from_bytes(begin.read(8), "little")
    if size > MAX_JSON and size <= file.stat().st_size:
        raise ModelError(file, f"has a header of {size} bytes, and at most {MAX_JSON} are read")
    try:
        opened = safetensors.safe_open(file, framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(file, f"is no whole safetensors file: {error}") from None
    with opened as entered:
        yield entered
