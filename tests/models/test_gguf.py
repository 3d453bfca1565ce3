"""Models from GGUF files against transformers with the same weights dequantised: tokens, metadata, damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
import transformers
from numpy.typing import NDArray

import pyops
from pyops import ModelError, testing
from pyops.__main__ import main
from pyops.host.toolchain import toolchains
from pyops.models import Config, Decoder, Engine, SamplingParams, checkpoint, load
from pyops.models.gguf_file import GgufFile
from pyops.models.gguf_linear import BlockMatrix
from pyops.models.gguf_tokenizer import _PATTERNS, tokenizer_of

Type = gguf.GGMLQuantizationType
COUNT = 64  # tokens that are generated
PROMPT = [(7 * i) % 160 for i in range(21)]
SIZES = {
    "vocab_size": 640,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
# {name: (family, options, types of weights by the ends of their names; the last is for all others)}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": (  # like Q4_K_M: value and down projections in more bits
        "Llama",
        {"rope_parameters": LLAMA3},
        {"attn_v": Type.Q6_K, "ffn_down": Type.Q6_K, "output": Type.Q6_K, "": Type.Q4_K},
    ),
    "qwen2": ("Qwen2", {"rope_parameters": YARN}, {"ffn_up": Type.Q5_1, "": Type.Q8_0}),
    "qwen3": (  # some weights are floating-point
        "Qwen3",
        {"head_dim": 32, "num_key_value_heads": 1},
        {"attn_k": Type.F16, "token_embd": Type.BF16, "output": Type.F32, "": Type.Q4_0},
    ),
}


def q4_k(x: NDArray[Any]) -> NDArray[Any]:
    """Bytes of Q4_K for values near `x`."""
    groups = x.reshape(-1, 8, 32)
    low = numpy.minimum(groups.min(-1), 0.0)
    wide = (groups.max(-1) - low) / 15
    d, dmin = (numpy.float16(numpy.maximum(each.max(-1), 1e-6) / 63) for each in (wide, -low))
    scales = numpy.clip(numpy.rint(wide / d[:, None]), 1, 63).astype(numpy.uint8)
    minima = numpy.clip(numpy.rint(-low / dmin[:, None]), 0, 63).astype(numpy.uint8)
    steps, offsets = d[:, None, None] * scales[..., None], dmin[:, None, None] * minima[..., None]
    codes = numpy.clip(numpy.rint((groups + offsets) / steps), 0, 15).astype(numpy.uint8)
    first, last = [scales[:, :4], minima[:, :4]], [scales[:, 4:], minima[:, 4:]]
    packed = [a | b >> 4 << 6 for a, b in zip(first, last, strict=True)] + [last[0] & 15 | (last[1] & 15) << 4]
    nibbles = codes[:, 0::2] | codes[:, 1::2] << 4
    halves = [each.view(numpy.uint8).reshape(-1, 2) for each in (d, dmin)]
    return numpy.concatenate([*halves, *packed, nibbles.reshape(len(x.reshape(-1, 256)), -1)], 1)


def q6_k(x: NDArray[Any]) -> NDArray[Any]:
    """Bytes of Q6_K for values near `x`."""
    groups = x.reshape(-1, 16, 16)
    wide = numpy.maximum(numpy.abs(groups).max(-1), 1e-6) / 31
    d = numpy.float16(wide.max(-1) / 127)
    scales = numpy.clip(numpy.rint(wide / d[:, None]), 1, 127).astype(numpy.int8)
    steps = d[:, None, None] * scales[..., None]
    codes = (numpy.clip(numpy.rint(groups / steps), -32, 31) + 32).astype(numpy.uint8).reshape(-1, 2, 4, 32)
    low = (codes[:, :, :2] & 15) | (codes[:, :, 2:] & 15) << 4
    high = sum(codes[:, :, j] >> 4 << 2 * j for j in range(4))
    parts = (low, high, scales.view(numpy.uint8), d.view(numpy.uint8))
    return numpy.concatenate([part.reshape(len(groups), -1) for part in parts], 1)


OWN = {Type.Q4_K: q4_k, Type.Q6_K: q6_k}


def quantised(x: torch.Tensor, kind: Any) -> NDArray[Any]:
    """The contents of a file for a matrix: bytes [rows, bytes of a row], or floating-point numbers."""
    rows = x.numpy()
    return OWN[kind](rows).reshape(len(rows), -1) if kind in OWN else gguf.quants.quantize(rows, kind)


def own_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, SIZES["num_hidden_layers"])
    return str(table.get_name(name, try_suffixes=(".weight", ".bias")))


def turned(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys in the order of llama.cpp, in which RoPE rotates adjacent pairs for Llamas."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(x.shape)


@cache
def case_of(name: str) -> tuple[Any, dict[str, tuple[NDArray[Any], Any]]]:
    """(transformers' model with the weights of a file, {name in the file: (data, type)}).

    Every token has a likely successor; the quantized projections decide where another one follows.
    """
    family, options, types = MODELS[name]
    torch.manual_seed(len(name) + 3)
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    embedding, successors = torch.empty(0), torch.randperm(SIZES["vocab_size"])
    tensors = {}
    for key, parameter in model.named_parameters():
        scale = parameter.shape[-1] ** -0.5
        if key.endswith("bias"):
            parameter.data.normal_(0.0, 0.3)
        elif "norm" in key:
            parameter.data.normal_(1.0, 0.2)
        elif "embed_tokens" in key:
            embedding = parameter.data.normal_()
        elif "lm_head" in key:
            parameter.data.normal_().add_(embedding[successors], alpha=5.0 * scale)
        else:
            parameter.data.normal_(0.0, (0.6 if "o_proj" in key or "down_proj" in key else 1.0) * scale)
        own, x = own_name(key), parameter.data
        part = next((part for part in ("q_proj", "k_proj") if part in key), None)
        heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
        order = turned(torch.arange(len(x)), heads) if part and family == "Llama" else torch.arange(len(x))
        if x.ndim == 1:
            tensors[own] = (x[order].numpy(), Type.F32)
            continue
        kind = next(kind for end, kind in types.items() if own.removesuffix(".weight").endswith(end))
        data = quantised(x[order], kind)
        tensors[own] = (data, kind)
        parameter.data[order] = torch.from_numpy(gguf.quants.dequantize(data, kind).astype("float32"))
    return model, tensors


def write(path: Path, name: str, edit: Callable[[dict[str, Any], dict[str, Any]], Any] | None = None) -> Path:
    """The file of a model; `edit` may change its metadata and tensors."""
    model, tensors = case_of(name)
    config, family = model.config, MODELS[name][0].lower()
    rope = config.rope_parameters
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    tensors = dict(tensors)
    if getattr(config, "head_dim", None) and family == "qwen3":
        values["attention.key_length"] = config.head_dim
    if rope["rope_type"] == "yarn":
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(0, 64, 2).float() / 64)
        tensors["rope_freqs.weight"] = ((plain / model.model.rotary_emb.inv_freq).numpy(), Type.F32)
    values = {f"{family}.{key}": value for key, value in values.items()}
    if edit:
        edit(values, tensors)
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", family))
    for key, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    for key, (data, kind) in tensors.items():
        plain_types = (Type.F32, Type.F16)
        writer.add_tensor(key, data, raw_dtype=None if kind in plain_types else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_match_the_dequantised_model(name: str, tmp_path: Path) -> None:
    """In float32, all 64."""
    engine = Engine(load(write(tmp_path / "model.gguf", name), dtype="float32"), max_seq_len=96, max_num_seqs=1)
    (text,) = engine.generate([PROMPT], SamplingParams(max_tokens=COUNT))
    logits = logits_of(case_of(name)[0], PROMPT + text[:-1])[len(PROMPT) - 1 :]
    assert text == logits.argmax(-1).tolist()
    assert len(set(text)) >= COUNT // 8


def check_text(name: str, text: list[int]) -> None:
    """At least 60 of 64 tokens in bfloat16, each compared after the same tokens. The others are near-ties."""
    model, tokens = case_of(name)[0], PROMPT + text[:-1]
    exact, rounded = (logits_of(each, tokens)[len(PROMPT) - 1 :] for each in (model, in_bfloat16(name)))
    errors, others = (rounded - exact).abs().amax(-1), [i for i in range(COUNT) if text[i] != exact[i].argmax()]
    for i in others:
        assert exact[i].max() - exact[i, text[i]] <= 2 * 1.25 * errors[i]
    assert len(others) <= COUNT - 60


@cache
def in_bfloat16(name: str) -> Any:
    model = case_of(name)[0]
    rounded = type(model)(model.config).eval()
    rounded.load_state_dict(model.state_dict())
    return rounded.bfloat16()


def test_tokens_in_bfloat16(tmp_path: Path) -> None:
    """bfloat16 is the default dtype. On a GPU, for all models."""
    name = "qwen3"
    model = load(write(tmp_path / "model.gguf", name))
    assert model.dtype == torch.bfloat16
    (text,) = Engine(model, max_seq_len=96, max_num_seqs=1).generate([PROMPT], SamplingParams(max_tokens=COUNT))
    check_text(name, text)


# Tokenizers

TEXT = "Hello world, it's 12345 o'clock.\n\n  Äpfel and über-naïve café, 東京!  So?\tYes: <|end|> x" * 3


def trained(byte_level: bool) -> Any:
    """A tokenizer of a few hundred tokens, and its special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    if byte_level:
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        cut = tokenizers.pre_tokenizers
        words = cut.Split(tokenizers.Regex(r"\p{N}|\p{L}+|[^\s\p{L}\p{N}]+|\s+"), "isolated")
        made.pre_tokenizer = cut.Sequence([words, cut.ByteLevel(add_prefix_space=False, use_regex=False)])
        alphabet = cut.ByteLevel.alphabet()
        specials = ["<|end|>"]
    else:
        made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        made.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
        alphabet, specials = [], ["<unk>", "<s>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT.replace("京", "")], trainer)
    return made


def vocabulary(tokenizer: Any) -> tuple[list[str], list[str]]:
    """(tokens in order, merges in order)."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(merge) for merge in model["merges"]]


def with_tokenizer(byte_level: bool, **more: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    tokens, merges = vocabulary(trained(byte_level))
    types = [3 if t in ("<|end|>", "<s>") else 2 if t == "<unk>" else 6 if t.startswith("<0x") else 1 for t in tokens]
    values: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if byte_level:
        values |= {"model": "gpt2", "pre": "qwen2", "merges": merges}
    else:
        ranks = {merge.replace(" ", ""): rank for rank, merge in reversed(list(enumerate(merges)))}
        scores = [-float(ranks.get(token, len(merges))) for token in tokens]
        values |= {"model": "llama", "scores": scores, "bos_token_id": 1, "unknown_token_id": 0, "eos_token_id": 2}
    values |= more
    return lambda metadata, _: metadata.update(
        {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
    )


def test_tokenizer(tmp_path: Path) -> None:
    """As transformers reads the same metadata; decoding gives the text back."""
    path = write(tmp_path / "model.gguf", "qwen2", with_tokenizer(True))
    ours = tokenizer_of(GgufFile(path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in (TEXT, "a", " a", "  ", "東京", "", "it's <|end|>", "12345"):
        tokens = ours.encode(text).ids
        assert tokens == theirs.encode(text), text
        assert ours.decode(tokens, skip_special_tokens=False) == text


# The pre-tokenizers of GPT-2 with single digits and of o200k, by the packages that define them.
CUTS = {
    "starcoder": [("Digits", {"individual_digits": True}), ("ByteLevel", {"add_prefix_space": False})],
    "olmo": [("ByteLevel", {"add_prefix_space": False})],
}


@pytest.mark.parametrize("pre", CUTS)
def test_words_are_split_as_by_the_families_tokenizers(pre: str, tmp_path: Path) -> None:
    cut = pytest.importorskip("tokenizers").pre_tokenizers
    path = write(tmp_path / "model.gguf", "qwen2", with_tokenizer(True, pre=pre))
    theirs = cut.Sequence([getattr(cut, name)(**options) for name, options in CUTS[pre]])
    text = TEXT.replace("<|end|>", "")
    assert tokenizer_of(GgufFile(path)).pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_words_of_o200k() -> None:
    """A change from lower to upper case ends a word; combining marks belong to it; digits come in threes."""
    tokenizers = pytest.importorskip("tokenizers")
    cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(*_PATTERNS["gpt-4o"]), "isolated")
    words = [word for word, _ in cut.pre_tokenize_str("HelloWorld it's 12345 (x) a/b\n\n  e\u0301a")]
    assert words == ["Hello", "World", " it's", " ", "123", "45", " (", "x", ")", " a", "/b", "\n\n", " ", " e\u0301a"]


def test_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "model.gguf", "llama", with_tokenizer(False))
    assert main(["generate", "--model", str(path), "--prompt", "it's", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("it's")


# Refusals


def put(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda values, _: values.update({key: value})


def drop(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _, tensors: tensors.pop(name)


def tensor(name: str, data: NDArray[Any], kind: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _, tensors: tensors.update({name: (data, kind)})


ZEROS = numpy.zeros((256, 256), "float32")
REFUSED: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], None], str]] = {
    "an architecture": (put("general.architecture", "gpt2"), "general.architecture: expected 'llama' or 'qwen2' or"),
    "a part": (put("split.count", 2), "is a part of a model"),
    "heads by layer": (put("llama.attention.head_count", [4, 4]), r"head_count: expected an integer, got \[4, 4\]"),
    "turned in part": (put("llama.rope.dimension_count", 32), "dimension_count: expected all 64 elements .*, got 32"),
    "a window": (put("llama.attention.sliding_window", 64), "sliding_window: expected none, got 64"),
    "no size": (put("llama.context_length", 0), "max_position_embeddings: expected a positive integer"),
    "a scaling": (
        lambda values, tensors: (values.update({"llama.rope.scaling.type": "su"}), tensors.pop("rope_freqs.weight")),
        "rope.scaling.type: expected 'none' or 'linear' or 'yarn' or 'longrope', got 'su'",
    ),
    "frequencies": (tensor("rope_freqs.weight", ZEROS[0, :31] + 1, Type.F32), "divisors: expected 32 numbers"),
    "no embedding": (drop("token_embd.weight"), "token_embd.weight: is missing"),
    "no weight": (drop("blk.1.ffn_up.weight"), "model.layers.1.mlp.up_proj.weight: is in no shard"),
    "a tensor too many": (tensor("blk.0.ffn_gate_inp.weight", ZEROS, Type.F32), "mlp.gate.weight: is no tensor of"),
    "another shape": (
        tensor("blk.0.ffn_up.weight", quantised(torch.zeros(128, 256), Type.Q8_0), Type.Q8_0),
        r"up_proj.weight: expected shape \(256, 272\), got \(128, 272\)",
    ),
    "a type": (
        tensor("blk.0.ffn_up.weight", ZEROS.astype("float64"), Type.F32),
        "blk.0.ffn_up.weight: expected F32 or .* or Q4_K or .*, got F64",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_file_is_refused_before_allocation(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, message = REFUSED[what]

    def no_memory(config: Config, dtype: str | None, device: str) -> Decoder:
        assert device == "meta", "memory is taken"
        return Decoder(config, dtype, device)

    monkeypatch.setattr(checkpoint, "Decoder", no_memory)
    with pytest.raises(ModelError, match=message):
        load(write(tmp_path / "bad.gguf", "llama", edit))


def test_truncated_file(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", "llama").read_bytes()
    for size in (0, 3, 20, 100, 1000, len(whole) - 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf: is no whole GGUF file"):
            load(tmp_path / "cut.gguf")
    with pytest.raises(ModelError, match=r"absent\.gguf: is missing"):
        load(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("byte_level", "more", "message"),
    [
        (True, {"model": "t5"}, "tokenizer.ggml.model: expected 'gpt2' or 'llama' and its tokens, got 't5'"),
        (True, {"pre": "exaone"}, "tokenizer.ggml.pre: expected 'llama-bpe' or .*, got 'exaone'"),
        (True, {"merges": ["no such"]}, "has no whole tokenizer"),
        (False, {"scores": None}, "tokenizer.ggml.scores: expected a number for each of"),
        (False, {"bos_token_id": 10**6}, "has no whole tokenizer"),
    ],
)
def test_bad_tokenizer_is_refused(byte_level: bool, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_of(GgufFile(write(tmp_path / "model.gguf", "llama", with_tokenizer(byte_level, **more))))


def test_config(tmp_path: Path) -> None:
    """EOS tokens, tied embeddings, biases; quantized weights have the file's bytes."""
    edit = with_tokenizer(False, eot_token_id=5)
    config = Config.read(write(tmp_path / "llama.gguf", "llama", edit))
    assert config.eos_token_ids == (2, 5)
    assert not config.tie_word_embeddings
    model = load(write(tmp_path / "tied.gguf", "qwen2", drop("output.weight")))
    assert model.config.tie_word_embeddings
    assert model.config.qkv_bias
    assert isinstance(model.embedding, BlockMatrix)
    assert model.head.matrices == (model.embedding,)
    assert numpy.array_equal(model.embedding.weight.numpy(), case_of("qwen2")[1]["token_embd.weight"][0])
    assert torch.equal(
        model.embedding[torch.tensor([3, 0])],
        case_of("qwen2")[0].model.embed_tokens.weight[[3, 0]].bfloat16(),
    )
    with pytest.raises(ModelError, match=r"^randomise: expected weights that are neither packed nor of mxfp4"):
        model.randomise(0)


# Kernels


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.slow
def test_warmup_compiles_all_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host backend, which checks every access: a prompt and decode steps launch only kernels that `warmup`
    compiled."""
    path = write(tmp_path / "model.gguf", "llama")
    limits = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 4}
    with testing.cpu("kernels"):
        assert pyops.warmup(model=path, max_model_len=16, **limits)
        monkeypatch.setenv("PYOPS_JIT", "error")
        (text,) = Engine(load(path), max_seq_len=16, **limits).generate([PROMPT[:3]], SamplingParams(max_tokens=2))
    assert text[0] == logits_of(case_of("llama")[0], PROMPT[:3])[-1].argmax()


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_tokens_on_a_gpu(name: str, tmp_path: Path) -> None:
    """The tokens of the CPU; decode steps replay graphs."""
    engine = Engine(load(write(tmp_path / "model.gguf", name), "cuda"), max_seq_len=96, max_num_seqs=2)
    for text in engine.generate([PROMPT, PROMPT], SamplingParams(max_tokens=COUNT)):
        check_text(name, text)
