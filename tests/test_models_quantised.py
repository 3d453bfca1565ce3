"""Models of 8-bit weights against transformers with the same weights dequantised: products, tokens, folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from pyops._quantised_linear import QuantisedLinear
from pyops.models import Engine, SamplingParams, load

FP8, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {FP8: 448.0, INT8: 127.0}  # of the codes
COUNT = 64  # tokens that are generated
PROMPT = [(7 * i) % 160 for i in range(21)]


@dataclass(frozen=True)
class Format:
    """A format of checkpoints.

    Attributes:
        config: its ``quantization_config``.
        codes: dtype of weights.
        weights: what has a scale: "tensor", "channel" or "block".
        inputs: under what activations are quantised: "static", "token" or "group".
        scale, input_scale: ends of the names of scales.
        scale_dtype, scalar: dtype of scales of weights, and the shape of a single scale.
    """

    config: dict[str, Any]
    codes: torch.dtype
    weights: str
    inputs: str
    scale: str = "weight_scale"
    input_scale: str = "input_scale"
    scale_dtype: torch.dtype = torch.float32
    scalar: tuple[int, ...] = (1,)


def compressed(kind: str, weights: str, inputs: str, **more: Any) -> dict[str, Any]:
    """What llm-compressor writes."""
    common = {"num_bits": 8, "type": kind, "symmetric": True, "actorder": None, "group_size": None}
    common |= {"block_structure": None, "observer_kwargs": {}}
    own = {"strategy": weights, "dynamic": False, "observer": "minmax"}
    own |= {"block_structure": [128, 128]} if weights == "block" else {}
    act = {"strategy": "tensor" if inputs == "static" else inputs, "dynamic": inputs != "static"}
    act |= {"group_size": 128} if inputs == "group" else {}
    group = {"targets": ["Linear"], "weights": common | own, "input_activations": common | act}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "format": f"{kind}-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    } | more


DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FORMATS = {
    "fp8, blocks": Format(DEEPSEEK, FP8, "block", "group", "weight_scale_inv"),
    "fp8, static": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        *(FP8, "tensor", "static"),
        scalar=(),
    ),
    "fp8, by transformers": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        *(FP8, "tensor", "static", "weight_scale_inv", "activation_scale"),
        scalar=(),
    ),
    "fp8, one scale": Format({"quant_method": "fp8", "activation_scheme": "dynamic"}, FP8, "tensor", "token"),
    "compressed fp8, blocks": Format(
        compressed("float", "block", "group"), FP8, "block", "group", scale_dtype=torch.bfloat16
    ),
    "compressed fp8, channels": Format(
        compressed("float", "channel", "token"), FP8, "channel", "token", scale_dtype=torch.bfloat16
    ),
    "compressed fp8, static": Format(compressed("float", "tensor", "static"), FP8, "tensor", "static"),
    "compressed int8, channels": Format(compressed("int", "channel", "token"), INT8, "channel", "token"),
    "compressed int8, static": Format(compressed("int", "tensor", "static"), INT8, "tensor", "static"),
}
SIZES = {
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Projections of one input.
STACKED = (
    [f"self_attn.{part}" for part in "qkv"],
    ["self_attn.o"],
    ["mlp.gate", "mlp.up"],
    ["mlp.down"],
)
# Queries, keys and values as one product of blocks; with biases, and as two; of rows and columns that fill no blocks.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"hidden_size": 192, "intermediate_size": 320, "num_key_value_heads": 1, "head_dim": 48}),
}
DTYPES = {"llama": "bfloat16", "qwen2": "float16", "qwen3": "bfloat16"}


@cache
def unquantised(name: str) -> Any:
    """A model of transformers with random weights, biases and norms, whose text seldom has two likely next tokens.

    Every token has a likely successor. The projections, which are quantised, decide where another one follows.
    """
    family, options = MODELS[name]
    torch.manual_seed(len(name) + 1)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES | options))
    embedding, successors = model.model.embed_tokens.weight.data, torch.randperm(SIZES["vocab_size"])
    for key, parameter in model.named_parameters():
        columns = parameter.shape[-1]
        if key.endswith("bias"):
            parameter.data.normal_(0.0, 0.3)
        elif "norm" in key:
            parameter.data.normal_(1.0, 0.2)
        elif "embed_tokens" in key:
            parameter.data.normal_()
        elif "lm_head" in key:
            parameter.data.normal_().add_(embedding[successors], alpha=5.0 * columns**-0.5)
        else:
            parameter.data.normal_(0.0, (0.6 if "o_proj" in key or "down_proj" in key else 1.0) * columns**-0.5)
        parameter.data = parameter.data.to(getattr(torch, DTYPES[name])).float()  # what a folder can hold
    return model.eval()


def projections(model: Any) -> dict[str, torch.nn.Linear]:
    return {
        name: part for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and name != "lm_head"
    }


def expanded(scale: Tensor, weight: Tensor, format: Format) -> Tensor:
    """A float32 scale for each element of a weight, or one that broadcasts."""
    if format.weights != "block":
        return scale.float()
    rows, columns = weight.shape
    return scale.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def quantised(weight: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """(codes, scales) of a weight."""
    if format.weights == "block":
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
        largest = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3))
    else:
        largest = weight.abs().amax(1, keepdim=True) if format.weights == "channel" else weight.abs().max()
    scale = (largest / LARGEST[format.codes]).to(format.scale_dtype)
    if format.weights == "tensor":
        scale = scale.reshape(format.scalar)
    x = weight / expanded(scale, weight, format)
    return as_codes(x, format), scale


def as_codes(x: Tensor, format: Format) -> Tensor:
    """Codes of values, which saturate."""
    if format.codes == INT8:
        return x.round().clamp(-128, 127).to(INT8)
    return x.clamp(-LARGEST[FP8], LARGEST[FP8]).to(FP8)


def rounded(x: Tensor, format: Format, input_scale: Tensor | None) -> Tensor:
    """`x` [..., columns] as its codes have it, in the dtype of x. Quotients are those that docstrings of ops give."""
    wide, columns = x.float(), x.shape[-1]
    if format.inputs == "group":
        wide = torch.nn.functional.pad(wide, (0, -columns % 128)).unflatten(-1, (-1, 128))
    largest = wide.abs().amax(-1, keepdim=True)
    most = torch.full_like(largest, LARGEST[format.codes])  # torch divides by a number through its reciprocal
    scale = largest / most if input_scale is None else input_scale.float()
    if format.inputs == "static":
        codes = as_codes(wide / scale if format.codes == INT8 else wide * (1.0 / scale), format)
    else:
        codes = as_codes(wide * (most / largest) if format.codes == INT8 else wide / scale, format)
    back = codes.to(x.dtype) * scale.to(x.dtype)
    return back.flatten(-2)[..., :columns] if format.inputs == "group" else back


@dataclass(frozen=True)
class Case:
    """A quantised model.

    Attributes:
        tensors: what a folder holds.
        dequantised: transformers' model in float32, its weights those of the codes.
        input_scales: {name of a projection: its static scale}.
    """

    format: Format
    tensors: dict[str, Tensor]
    dequantised: Any
    input_scales: dict[str, Tensor]


@cache
def case_of(kind: str, name: str) -> Case:
    format, plain = FORMATS[kind], unquantised(name)
    dtype = getattr(torch, DTYPES[name])
    model = type(plain)(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    tensors = {key: tensor.to(dtype) for key, tensor in plain.state_dict().items()}
    if plain.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    linears = projections(model)
    for key, linear in linears.items():
        codes, scale = quantised(linear.weight.data, format)
        linear.weight.data = codes.float() * expanded(scale, codes, format)
        tensors |= {f"{key}.weight": codes, f"{key}.{format.scale}": scale}
    input_scales: dict[str, Tensor] = {}
    if format.inputs == "static":
        for key, largest in largest_inputs(model, linears).items():
            input_scales[key] = (largest / LARGEST[format.codes]).reshape(format.scalar)
            tensors[f"{key}.{format.input_scale}"] = input_scales[key]
    return Case(format, tensors, model, input_scales)


def largest_inputs(model: Any, linears: dict[str, torch.nn.Linear]) -> dict[str, Tensor]:
    """The largest magnitude that a projection multiplies, of a text."""
    found: dict[str, Tensor] = {}
    hooks = [
        linear.register_forward_pre_hook(lambda _, args, key=key: found.update({key: args[0].abs().max()}))
        for key, linear in linears.items()
    ]
    with torch.no_grad():
        model(torch.arange(96)[None] * 5 % 160)
    for hook in hooks:
        hook.remove()
    return found


def folder_of(case: Case, folder: Path, **config: Any) -> Path:
    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in case.tensors.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    plain = case.dequantised
    values = plain.config.to_dict() | {"architectures": [type(plain).__name__]}
    name = next(name for name in MODELS if unquantised(name).config.model_type == plain.config.model_type)
    values |= {"dtype": DTYPES[name], "quantization_config": case.format.config} | config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def logits_of(case: Case, tokens: list[int], quantising: bool) -> Tensor:
    """float32 logits of the dequantised model behind every token; with activations as their codes have them, or not."""
    hooks = []
    if quantising:
        for key, linear in projections(case.dequantised).items():
            scale = case.input_scales.get(key)
            hooks.append(linear.register_forward_pre_hook(lambda _, args, s=scale: (rounded(args[0], case.format, s),)))
    with torch.no_grad():
        found = case.dequantised(torch.tensor([tokens])).logits[0]
    for hook in hooks:
        hook.remove()
    return found


CASES = [(kind, name) for kind in FORMATS for name in MODELS]


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    return lambda kind, name, **config: folder_of(case_of(kind, name), tmp_path / f"{kind} {name}", **config)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_tokens_are_those_of_the_dequantised_model(kind: str, name: str, folder: Callable[..., Path]) -> None:
    """At least 60 of 64 behind one text, each compared behind the same tokens. The others are near-ties.

    There the model is undecided between both tokens within what quantised activations do to its logits: each of the two
    may be off by the largest change of a logit at that token, and by a quarter of it for the roundings of the dtype.
    """
    case = case_of(kind, name)
    engine = Engine(load(folder(kind, name)), max_seq_len=96, max_num_seqs=1)
    (text,) = engine.generate([PROMPT], SamplingParams(max_tokens=COUNT))
    tokens = PROMPT + text[:-1]
    exact, coded = (logits_of(case, tokens, quantising)[len(PROMPT) - 1 :] for quantising in (False, True))
    errors, others = (coded - exact).abs().amax(-1), [i for i in range(COUNT) if text[i] != exact[i].argmax()]
    for i in others:
        assert exact[i].max() - exact[i, text[i]] <= 2 * 1.25 * errors[i]
    assert len(others) <= COUNT - 60


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """[(input, output)] of every product of quantised weights."""
    found: list[tuple[Tensor, Tensor]] = []
    call = QuantisedLinear.__call__

    def recorded(self: QuantisedLinear, x: Tensor) -> Tensor:
        out = call(self, x)
        found.append((x.clone(), out.clone()))
        return out

    monkeypatch.setattr(QuantisedLinear, "__call__", recorded)
    return found


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_products_are_exact(
    kind: str, name: str, folder: Callable[..., Path], calls: list[tuple[Tensor, Tensor]]
) -> None:
    """Of a prompt and a step, by the tensors in the folder, in float64; a bias behind blocks is rounded by itself."""
    case = case_of(kind, name)
    Engine(load(folder(kind, name)), max_num_seqs=1).generate([PROMPT], SamplingParams(max_tokens=2))
    names = [[f"model.layers.{i}.{each}_proj" for each in together] for i in range(2) for together in STACKED]
    for (x, out), together in zip(calls, names * 2, strict=True):
        parts = out.split([len(case.tensors[f"{key}.weight"]) for key in together], 1)
        for key, ours in zip(together, parts, strict=True):
            check_product(case, key, x, ours)


def check_product(case: Case, key: str, x: Tensor, ours: Tensor) -> None:
    """`ours` is the product of `x` and the projection `key`, but for roundings."""
    codes = case.tensors[f"{key}.weight"]
    weight = codes.double() * expanded(case.tensors[f"{key}.{case.format.scale}"], codes, case.format).double()
    read = rounded(x.double(), case.format, case.input_scales.get(key))
    product = read @ weight.T
    result, bias = product, case.tensors.get(f"{key}.bias")
    steps = torch.zeros_like(product)
    if bias is not None:
        result = product + bias.double()
        steps = product.abs() if case.format.weights == "block" else steps
    allowed = torch.finfo(x.dtype).eps / 2 * (result.abs() + steps) + 2**-18 * (read.abs() @ weight.T.abs())
    assert ((ours - result).abs() <= allowed).all(), key
