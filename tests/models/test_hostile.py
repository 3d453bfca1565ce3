"""Malicious model files are refused by `ModelError`, in little time and memory."""

from __future__ import annotations

import json
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import safetensors.torch

from pyops import ModelError
from pyops.models import Config, Decoder, load
from pyops.models.config import ARCHITECTURES
from pyops.models.gguf_file import GgufFile
from pyops.models.gguf_header import GgufHeader
from pyops.models.gguf_tokenizer import tokenizer_of
from tests.models.test_fields import PUBLISHED, QUANTIZED, full
from tests.models.test_gguf_metadata import PUBLISHED as GGUF_PUBLISHED
from tests.models.test_gguf_metadata import SIZES as GGUF_SIZES
from tests.models.test_gguf_metadata import written
from tests.support.profiles import NAME

MEGABYTE = 1 << 20
MAX_SECONDS, MAX_BYTES = 1.0, 16 * MEGABYTE


@contextmanager
def bounded(max_seconds: float = MAX_SECONDS, max_bytes: int = MAX_BYTES) -> Iterator[None]:
    """Fails if the body takes longer, or at any time more memory of Python or numpy."""
    tracemalloc.start()
    begin = time.process_time()
    try:
        yield
        took, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert took < max_seconds
    assert peak < max_bytes


# GGUF

UINT8, UINT32, BOOL, STRING, ARRAY = 0, 4, 7, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, elements: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + elements


def header(*keys: bytes, tensors: bytes = b"", count: int = 0, version: int = 3, keys_said: int | None = None) -> bytes:
    said = len(keys) if keys_said is None else keys_said
    return b"GGUF" + struct.pack("<IQQ", version, count, said) + b"".join(keys) + tensors


def tensor(name: bytes, sizes: list[int], kind: int = 0, offset: int = 0, dims: int | None = None) -> bytes:
    dims = len(sizes) if dims is None else dims
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", dims, *sizes, kind, offset)


LLAMA = key(b"general.architecture", STRING, text(b"llama"))
nested = array(ARRAY, 1) * 5000
GGUFS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "an array of 2^63 numbers": (
        header(LLAMA, key(b"x", ARRAY, array(UINT32, 1 << 63))),
        "ends within 9223372036854775808",
    ),
    "an array of 2^32 bytes": (header(LLAMA, key(b"x", ARRAY, array(UINT8, 1 << 32))), "ends within 4294967296"),
    "an array of 10^8 bools": (header(LLAMA, key(b"x", ARRAY, array(BOOL, 10**8))), "ends within 100000000"),
    "3 million strings": (header(LLAMA, key(b"x", ARRAY, array(STRING, 3 * 10**6, bytes(800)))), "ends within 3000000"),
    "a string of 2^64 - 1 bytes": (header(key(b"x", STRING, b"\xff" * 8 + b"abc")), "ends within its header"),
    "1000 arrays of 1000": (
        header(LLAMA, key(b"x", ARRAY, array(ARRAY, 1000, array(UINT8, 1000, bytes(1000)) * 1000))),
        "an array of arrays: x",
    ),
    "a depth of 5000": (header(LLAMA, key(b"x", ARRAY, nested + array(UINT8, 1, b"\1"))), "an array of arrays: x"),
    "2^60 keys": (header(LLAMA, keys_said=1 << 60), "ends within 1152921504606846976 elements"),
    "2^60 tensors": (header(LLAMA, count=1 << 60), "ends within 1152921504606846976 elements"),
    "a type of 13": (header(LLAMA, key(b"x", 13, b"")), "a value of the unknown type 13: x"),
    "a key twice": (header(LLAMA, LLAMA), "has general.architecture twice"),
    "a key that is no text": (header(key(b"\xff\xfe", UINT8, b"\0")), "a key that is not UTF-8"),
    "an architecture that is no text": (
        header(key(b"general.architecture", STRING, text(b"\xff\xfe"))),
        "has general.architecture that is not UTF-8",
    ),
    "no architecture": (header(), r"general\.architecture: expected 'llama' or .*, got None"),
    "an architecture of numbers": (
        header(key(b"general.architecture", ARRAY, array(UINT8, 10**5, bytes(10**5)))),
        r"general\.architecture: expected a string, got \[0, 0, 0, 0, 0, 0, \.\.\.\]",
    ),
    "version 1": (header(LLAMA, version=1), "has version 1"),
    "another byte order": (header(LLAMA, version=3 << 24), "has the byte order of another machine"),
    "no alignment": (header(key(b"general.alignment", UINT32, struct.pack("<I", 0))), "general.alignment 0"),
    "an alignment of 48": (
        header(key(b"general.alignment", UINT32, struct.pack("<I", 48))),
        "general.alignment 48, which is no power of two",
    ),
    "a tensor that ends one byte behind": (
        (one := header(LLAMA, count=1, tensors=tensor(b"x", [1]))) + bytes(-len(one) % 32 + 3),
        "ends before x does",
    ),
    "a tensor of 2^32 - 1 dimensions": (
        header(LLAMA, count=1, tensors=tensor(b"x", [1] * 4, dims=2**32 - 1)),
        "a tensor of 4294967295 dimensions: x",
    ),
    "a tensor beyond the end": (header(LLAMA, count=1, tensors=tensor(b"x", [1 << 62, 1 << 62])), "ends before x does"),
    "an offset beyond the end": (
        header(LLAMA, count=1, tensors=tensor(b"x", [1], offset=2**64 - 1)),
        "ends before x does",
    ),
    "a tensor of nothing": (
        header(LLAMA, count=1, tensors=tensor(b"x", [0, 1 << 62])),
        r"x of shape \(461168601842738",
    ),
    "a block in part": (header(LLAMA, count=1, tensors=tensor(b"x", [33], 8)), "has blocks of 32 elements, and x of"),
    "a tensor of type 99": (header(LLAMA, count=1, tensors=tensor(b"x", [1], 99)), "of the unknown type 99: x"),
    "a name that is no text": (
        header(LLAMA, count=1, tensors=tensor(b"\xff", [1])),
        "a name of a tensor that is not UTF",
    ),
}


@pytest.mark.parametrize("what", GGUFS)
def test_hostile_gguf_file_is_refused_at_once(what: str, tmp_path: Path) -> None:
    content, message = GGUFS[what]
    (tmp_path / "model.gguf").write_bytes(content)
    with bounded(), pytest.raises(ModelError, match=message):
        load(tmp_path / "model.gguf")


def test_large_metadata_takes_no_more_memory_than_the_file(tmp_path: Path) -> None:
    """Nor time: values that nobody asks for are not read."""
    strings, flags = array(STRING, 100_000, bytes(8 * 100_000)), array(BOOL, 10**7, bytes(10**7))
    path = tmp_path / "model.gguf"
    path.write_bytes(header(LLAMA, key(b"x", ARRAY, strings), key(b"y", ARRAY, flags)) + bytes(32))
    with bounded(max_seconds=3.0, max_bytes=MEGABYTE):
        GgufHeader(path)
    assert GgufHeader(path).value("x") == [""] * 100_000


def test_unsupported_types_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    name, kind = "blk.0.ffn_up.weight", gguf.GGMLQuantizationType.TQ1_0
    written(path, {}, {name: gguf.quants.quantize(numpy.zeros((256, 256), "float32"), kind)}, kinds={name: kind})
    with pytest.raises(ModelError, match=rf"{name}: expected F32 or F16 or .* or Q4_K or .*, got TQ1_0$"):
        load(path)


# Folders

SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def model_folder(folder: Path, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = Decoder(Config.parse(SIZES)).randomise(0).tensors()
    safetensors.torch.save_file({name: one.clone() for name, one in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SIZES | more))
    return folder


def replaced(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return edit


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 33)


def many_names(path: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    names = json.dumps({f"model.layers.{i}.self_attn.q_proj.weight": entry for i in range(200_000)}).encode()
    path.write_bytes(struct.pack("<Q", len(names)) + names)


def index(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))

    return edit


def configured(**more: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(SIZES | more)) and None


MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 1 << 14, "moe_intermediate_size": 16}
HEADS = {"architectures": ["StableLmForCausalLM"], "qk_layernorm": True, "num_attention_heads": 1 << 18, "head_dim": 4}
HEADS |= {"partial_rotary_factor": 0.5}
FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "config.json is /dev/zero": (
        replaced("config.json", lambda path: path.symlink_to("/dev/zero")),
        r"config\.json: is no regular file",
    ),
    "config.json is a pipe": (replaced("config.json", os.mkfifo), r"config\.json: is no regular file"),
    "config.json is a folder": (replaced("config.json", os.mkdir), r"config\.json: is no regular file"),
    "config.json has 8 GiB": (
        replaced("config.json", sparse),
        r"config\.json: has 8589934592 bytes, and at most 16777216 are read",
    ),
    "config.json is deep": (
        replaced("config.json", lambda path: path.write_text('{"a":' * 10**5)),
        r"config\.json: cannot be read",
    ),
    "a shard is a pipe": (
        replaced("model.safetensors", os.mkfifo),
        r"model\.safetensors: is (missing|no regular file)",
    ),
    "a header of 2^24 names": (
        replaced("model.safetensors", many_names),
        r"has a header of \d+ bytes, and at most 16777216",
    ),
    "a name of 5000 characters": (index("x" * 5000), "cannot be read: .*File name too long"),
    "a name without letters": (index("x\0y"), "is missing"),
    "half a character": (index("\ud800"), "cannot be read|is missing"),
    "2^14 layers": (configured(num_hidden_layers=1 << 14), "has 16384 layers, and 12 tensors for them"),
    "2^20 layers": (
        configured(num_hidden_layers=1 << 20),
        "num_hidden_layers: expected a positive integer up to 16384",
    ),
    "2^14 experts": (configured(**MOE), "has 1 layers of 16384 experts, and 12 tensors for them"),
    "2^20 experts": (
        configured(**MOE | {"num_experts": 1 << 20}),
        "num_experts: expected a positive integer up to 16384",
    ),
    "2^19 norms": (configured(**HEADS), "has 1 layers of 262144 norms of heads, and 12 tensors for them"),
    "weights of torch alone": (
        replaced("model.safetensors", lambda path: (path.parent / "pytorch_model.bin").write_bytes(b"PK")),
        r"has weights in pytorch_model\.bin, which is not read; save_pretrained .* writes model\.safetensors",
    ),
    "an early file of ModelOpt": (
        lambda folder: (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}') and None,
        r"hf_quant_config\.json: quantization\.quant_algo: expected a quantization_config in config\.json, got 'FP8'",
    ),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_hostile_folder_is_refused_at_once(what: str, tmp_path: Path) -> None:
    edit, message = FOLDERS[what]
    edit(model_folder(tmp_path / "model"))
    with bounded(), pytest.raises(ModelError, match=message):
        load(tmp_path / "model")


@pytest.mark.parametrize(("value", "dtype"), [("nan", None), ("inf", None), ("-inf", "bfloat16"), ("1e6", "float16")])
def test_non_finite_weights_warn_once(value: str, dtype: str | None, tmp_path: Path) -> None:
    """Also where only the cast to the model's dtype makes them infinite."""
    folder = model_folder(tmp_path / "model")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float(value)
    tensors["model.norm.weight"][7] = float(value)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.warns(UserWarning, match=r"NaN or infinity in model\.\S+ and 1 other tensors$") as found:
        load(folder, dtype=dtype)
    assert len(found) == 1
    load(model_folder(tmp_path / "whole"))  # a warning would be an error


# Mutations


def mutated(data: bytes, draw: random.Random, begin: int, end: int) -> bytes:
    """`data` with a few changes between two offsets: bytes, lengths, and pieces that are cut, duplicated or moved."""
    content = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(begin, max(begin + 1, min(end, len(content))))
        match draw.randrange(6):
            case 0:
                content[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                extreme = draw.choice((0, 1, 255, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, len(data)))
                content[at : at + 8] = struct.pack("<Q", extreme)
            case 2:
                content[at : at + 4] = struct.pack("<I", draw.choice((0, 4, 7, 8, 9, 12, 13, 39, 2**31, 2**32 - 1)))
            case 3:
                del content[at : at + draw.randrange(1, 40)]
            case 4:
                content[at:at] = content[at : at + draw.randrange(1, 200)] * draw.choice((1, 1, 50))
            case 5:
                del content[at:]
    return bytes(content)


def read_all(path: Path) -> None:
    """Read everything in a file."""
    Config.read(path)
    if path.suffix == ".gguf":
        with suppress(ModelError):
            tokenizer_of(GgufFile(path))
    load(path)


# Seconds for each of the tests below, and the cases that are tried in that time if the machine is fast enough.
BUDGET, CASES = {"dev": (0.5, 300), "ci": (2.0, 1000)}.get(NAME, (30.0, 100_000))


def try_cases(make: Callable[[random.Random], Any], read: Callable[[], Any]) -> None:
    """Each case has a time limit and a number: ``random.Random(number)``."""
    started = time.monotonic()
    for number in range(CASES):
        if time.monotonic() - started > BUDGET:
            break
        what = make(random.Random(number))
        try:
            with bounded(), suppress(ModelError):
                read()
        except Exception as error:
            raise AssertionError(f"case {number}, {what!r:.200}: {error!r}") from error
    assert number > 20


def try_mutations(data: bytes, file: Path, model: Path, end: int, begin: int = 0) -> None:
    try_cases(lambda draw: file.write_bytes(mutated(data, draw, begin, end)), lambda: read_all(model))


@pytest.mark.filterwarnings("ignore:.*(not read|NaN or infinity)")
@pytest.mark.parametrize("arch", ["llama", "gemma2", "deepseek2"])
def test_mutations_of_gguf_files(arch: str, tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "\u2581"]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * len(tokens),
        "token_type": [2, 3, 3, 1, 1, 1, 1],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    more: dict[str, Any] = {".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0, ".attention.key_length": 16}
    metadata = more | {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    path = written(tmp_path / "model.gguf", metadata, arch=arch)
    data = path.read_bytes()
    try_mutations(data, path, path, len(data) - 7 * 32 * 4)


@pytest.mark.filterwarnings("ignore:.*(not read|NaN or infinity)")
def test_mutations_of_safetensors(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    try_mutations(data, file, folder, 8 + struct.unpack("<Q", data[:8])[0])


@pytest.mark.filterwarnings("ignore:.*(not read|NaN or infinity)")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_mutations_of_json(name: str, tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    folder = model_folder(tmp_path / "model", rope_scaling=rope, eos_token_id=[1, 2], sliding_window=None)
    contents = {
        "config.json": (folder / "config.json").read_bytes(),
        "generation_config.json": json.dumps({"eos_token_id": [1, 2], "do_sample": False}).encode(),
        "model.safetensors.index.json": json.dumps({"weight_map": {"lm_head.weight": "a", "b": "c"}}).encode(),
    }
    if "index" in name:
        (folder / "model.safetensors").unlink()
    data = contents[name]
    try_mutations(data, folder / name, folder, len(data))


HOSTILE = [
    None,
    True,
    False,
    "",
    "x",
    "\ud800",
    [],
    [None],
    {},
    {"a": {"b": []}},
    [[]],
    0,
    -1,
    1,
    3,
    2**31,
    2**63,
    10**400,
]
HOSTILE += [
    0.0,
    -0.5,
    1e-300,
    1e300,
    float("nan"),
    float("inf"),
    [1, 2, 3],
    ["full_attention"],
    [10**6] * 10,
    "x" * 10**5,
]


def replace_values(values: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """`values` with a few replaced, also in nested objects."""
    found = dict(values)
    for name in draw.sample(sorted(found), min(len(found), draw.choice((1, 1, 2, 5)))):
        inner = found[name]
        is_inner = (
            isinstance(inner, dict) and inner and all(isinstance(one, str) for one in inner) and draw.random() < 0.8
        )
        found[name] = replace_values(inner, draw) if is_inner else draw.choice(HOSTILE)
    return found


@pytest.mark.filterwarnings("ignore:.*not read")
def test_hostile_values_of_config_json(tmp_path: Path) -> None:
    """Configs of the families' classes in transformers and of published files, some of them quantised."""
    classes = [full(architecture) for architecture in ARCHITECTURES]
    published = [values | {"quantization_config": one} for values in PUBLISHED.values() for one in QUANTIZED.values()]
    case: dict[str, Any] = {}

    def make(draw: random.Random) -> dict[str, Any]:
        values = draw.choice((draw.choice(classes), draw.choice(published)))
        keep = {"architectures": values["architectures"]} if draw.random() < 0.95 else {}
        case["values"] = replace_values(values, draw) | keep
        return dict(case["values"])

    try_cases(make, lambda: Config.parse(case["values"]))


@pytest.mark.filterwarnings("ignore:.*not read")
def test_hostile_values_of_gguf_metadata(tmp_path: Path) -> None:
    """Metadata of published files. The package writes only numbers, bools, strings and lists of one of these."""
    path = tmp_path / "model.gguf"
    values_of: list[Any] = [True, False, "", "x", [1, 2, 3], ["full_attention"], 0.0, -0.5, float("nan"), float("inf")]
    values_of += [0, 1, 3, 2**20, 2**31, 2**32 - 1]

    def make(draw: random.Random) -> dict[str, Any]:
        values = dict(GGUF_PUBLISHED[draw.choice(sorted(GGUF_PUBLISHED))])
        arch = values.pop("general.architecture")
        values |= {f".{name}": value for name, value in GGUF_SIZES.items() if f".{name}" not in values}
        for name in draw.sample(sorted(values), draw.choice((1, 1, 2, 5))):
            values[name] = draw.choice(values_of)
        written(path, values, arch=arch)
        return values

    try_cases(make, lambda: read_all(path))
