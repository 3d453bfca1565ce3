"""Models of 8-bit weights against transformers with the same weights dequantised: GEMMs, tokens, folders."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

import pyops
from pyops import ModelError, testing
from pyops.fused.quantized_linear import QuantisedLinear, _in_groups
from pyops.host.toolchain import toolchains
from pyops.models import Config, Decoder, Engine, Quantization, SamplingParams, checkpoint, load
from pyops.models.linear import ScaledLinear
from pyops.models.runner import Part, Runner
from pyops.ops._shared.fp8_accumulation import absolute_error

FP8, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {FP8: 448.0, INT8: 127.0}  # the largest quantized values
COUNT = 64  # tokens that are generated
PROMPT = [(7 * i) % 160 for i in range(21)]


@dataclass(frozen=True)
class Format:
    """A format of checkpoints.

    Attributes:
        config: its ``quantization_config``.
        codes: dtype of weights.
        weights: granularity of weight scales: "tensor", "channel" or "block".
        inputs: granularity of activation scales: "static", "token" or "group".
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
    """The tensors that llm-compressor writes."""
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
# Projections of one input, which are merged.
STACKED = (
    [f"self_attn.{part}" for part in "qkv"],
    ["self_attn.o"],
    ["mlp.gate", "mlp.up"],
    ["mlp.down"],
)
# QKV as one block-scaled GEMM; with biases, and as two; with rows and columns that fill no block; merged in the
# checkpoint.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"hidden_size": 192, "intermediate_size": 320, "num_key_value_heads": 1, "head_dim": 48}),
    "phi3": ("Phi3", {"pad_token_id": None}),
}
DTYPES = {"llama": "bfloat16", "qwen2": "float16", "qwen3": "bfloat16", "phi3": "bfloat16"}


@cache
def unquantised(name: str) -> Any:
    """A model of transformers with random weights, biases and norms, with few near-ties between next tokens.

    Every token has a likely successor. The quantized projections decide where another one follows.
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
        parameter.data = parameter.data.to(getattr(torch, DTYPES[name])).float()  # representable in a folder
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
    """(quants, scales) of a weight."""
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
    """Values quantised with saturation."""
    if format.codes == INT8:
        return x.round().clamp(-128, 127).to(INT8)
    return x.clamp(-LARGEST[FP8], LARGEST[FP8]).to(FP8)


def rounded(x: Tensor, format: Format, input_scale: Tensor | None) -> Tensor:
    """`x` [..., columns] after quantisation, in the dtype of x. Quotients are computed as the docstrings of the ops
    say."""
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
        tensors: the contents of a folder.
        dequantised: transformers' model in float32 with the dequantised weights.
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
    """The absmax of a projection's input over a text."""
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


def config_of(case: Case) -> dict[str, Any]:
    """The contents of its ``config.json``."""
    model = case.dequantised
    more = {"architectures": [type(model).__name__], "dtype": DTYPES[model.config.model_type]}
    return model.config.to_dict() | more | {"quantization_config": case.format.config}


def folder_of(case: Case, folder: Path) -> Path:
    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in case.tensors.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(case)))
    return folder


def logits_of(case: Case, tokens: list[int], quantising: bool) -> Tensor:
    """float32 logits of the dequantised model after every token; activations are quantised or not."""
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


CASES = [(kind, name) for kind in FORMATS for name in MODELS if name != "phi3"]
JOINED_CASES = [(kind, "phi3") for kind in ("fp8, blocks", "compressed int8, channels")]


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    return lambda kind, name: folder_of(case_of(kind, name), tmp_path / f"{kind} {name}")


@pytest.mark.parametrize(("kind", "name"), CASES + JOINED_CASES)
def test_tokens_match_the_dequantised_model(kind: str, name: str, folder: Callable[..., Path]) -> None:
    """At least 60 of 64 after one text, each compared after the same tokens. The others are near-ties.

    There the model is undecided between both tokens within the effect of quantised activations on its logits: each of
    the two may be off by the largest change of a logit at that token, and by a quarter of it for the roundings of the
    dtype.
    """
    engine = Engine(load(folder(kind, name)), max_seq_len=96, max_num_seqs=1)
    (text,) = engine.generate([PROMPT], SamplingParams(max_tokens=COUNT))
    check_text(case_of(kind, name), text)


def check_text(case: Case, text: list[int]) -> None:
    tokens = PROMPT + text[:-1]
    exact, coded = (logits_of(case, tokens, quantising)[len(PROMPT) - 1 :] for quantising in (False, True))
    errors, others = (coded - exact).abs().amax(-1), [i for i in range(COUNT) if text[i] != exact[i].argmax()]
    for i in others:
        assert exact[i].max() - exact[i, text[i]] <= 2 * 1.25 * errors[i]
    assert len(others) <= COUNT - 60


class Call(NamedTuple):
    product: QuantisedLinear
    x: Tensor
    out: Tensor


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """All calls of quantised projections, in order; of those that activate first, with the activations."""
    found: list[Call] = []
    call, of_silu = QuantisedLinear.__call__, QuantisedLinear.of_silu

    def recorded(self: QuantisedLinear, x: Tensor) -> Tensor:
        out = call(self, x)
        found.append(Call(self, x.clone(), out.clone()))  # the model writes both
        return out

    def activating(self: QuantisedLinear, gate_up: Tensor) -> Tensor:
        count, out = len(found), of_silu(self, gate_up)
        if len(found) == count:  # it has not called `recorded`
            x = gate_up.new_empty(len(gate_up), self.weight.shape[1])
            pyops.silu_and_mul(x, gate_up)
            found.append(Call(self, x, out.clone()))
        return out

    monkeypatch.setattr(QuantisedLinear, "__call__", recorded)
    monkeypatch.setattr(QuantisedLinear, "of_silu", activating)
    return found


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_quantised_gemms_are_exact(kind: str, name: str, folder: Callable[..., Path], calls: list[Call]) -> None:
    """For a prompt and a decode step, against float64 with the tensors in the folder; a bias after block scales is
    rounded separately."""
    case = case_of(kind, name)
    Engine(load(folder(kind, name)), max_num_seqs=1).generate([PROMPT], SamplingParams(max_tokens=2))
    names = [[f"model.layers.{i}.{each}_proj" for each in together] for i in range(2) for together in STACKED]
    for (_, x, out), together in zip(calls, names * 2, strict=True):
        parts = out.split([len(case.tensors[f"{key}.weight"]) for key in together], 1)
        for key, ours in zip(together, parts, strict=True):
            check_product(case, key, x, ours)


def check_product(case: Case, key: str, x: Tensor, ours: Tensor) -> None:
    """`ours` is `x` times the projection `key`, up to roundings."""
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


# Which modules of a checkpoint are quantised


def ignoring(kind: str, name: str, field: str, ignored: list[str], modules: list[str]) -> Case:
    """A case with a checkpoint that lists `ignored` and leaves the projections of `modules` unquantized."""
    case = case_of(kind, name)
    config = {key: value for key, value in case.format.config.items() if key not in ("ignore", "ignored_layers")}
    model = copy.deepcopy(case.dequantised)
    tensors = dict(case.tensors)
    for key in projections(model):
        if key.startswith(tuple(modules)):
            plain = unquantised(name).state_dict()[f"{key}.weight"]
            model.load_state_dict({f"{key}.weight": plain}, strict=False)
            tensors[f"{key}.weight"] = plain.to(getattr(torch, DTYPES[name]))
            for scale in (case.format.scale, case.format.input_scale):
                tensors.pop(f"{key}.{scale}", None)
    return Case(replace(case.format, config=config | {field: ignored}), tensors, model, case.input_scales)


UP = ["model.layers.1.mlp.up"]
FIRST = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]


@pytest.mark.parametrize(
    ("kind", "field", "ignored", "modules"),
    [
        ("fp8, blocks", "modules_to_not_convert", ["lm_head", *FIRST], FIRST),
        ("fp8, blocks", "modules_to_not_convert", ["model.layers.1"], ["model.layers.1."]),
        ("fp8, blocks", "modules_to_not_convert", ["down_proj"], [f"model.layers.{i}.mlp.down_proj" for i in range(2)]),
        ("fp8, static", "ignored_layers", [r"model\.layers\.\d+\.mlp"], [f"model.layers.{i}.mlp." for i in range(2)]),
        ("compressed int8, channels", "ignore", FIRST, FIRST),
        ("compressed fp8, static", "ignore", [r"re:.*\.1\.mlp\.(gate|up)_", "mlp"], ["model.layers.1.mlp.gate", *UP]),
        ("compressed fp8, blocks", "ignore", ["re:.*layers.0"], ["model.layers.0."]),
    ],
)
def test_modules_left_unquantized(
    kind: str, field: str, ignored: list[str], modules: list[str], tmp_path: Path, calls: list[Call]
) -> None:
    case = ignoring(kind, "llama", field, ignored, modules)
    model = load(folder_of(case, tmp_path / "model"))
    (text,) = Engine(model, max_num_seqs=1).generate([PROMPT], SamplingParams(max_tokens=2))
    left = sum(key.startswith(tuple(modules)) for key in projections(case.dequantised))
    names = [[f"model.layers.{i}.{each}_proj" for each in together] for i in range(2) for together in STACKED]
    quantised = [together for together in names if not together[0].startswith(tuple(modules))]
    assert sum(map(len, quantised)) == 14 - left
    assert [call.out.shape[1] for call in calls] == 2 * [
        sum(len(case.tensors[f"{key}.weight"]) for key in together) for together in quantised
    ]
    ours = Runner(model, 2, 16, 1, 32).run([Part(PROMPT, 0, [0, 1])])[0].float()
    coded, exact = (logits_of(case, PROMPT, quantising)[-1] for quantising in (True, False))
    # Other roundings, such as those of the dtype, lead to other quants: the two results may differ by two quantisation
    # errors, each as large as that of `coded`.
    assert (ours - exact).norm() <= 2 * (exact - coded).norm()
    assert text[0] == exact.argmax()


def test_merged_projection_is_quantised_as_a_whole(tmp_path: Path) -> None:
    case = ignoring("fp8, blocks", "llama", "modules_to_not_convert", FIRST[:1], FIRST[:1])
    with pytest.raises(ModelError, match=r"quantization_config: expected all or none of .*q_proj, .*k_proj, .*v_proj"):
        load(folder_of(case, tmp_path / "model"))


def test_merged_projections_share_the_largest_input_scale(tmp_path: Path) -> None:
    """Merged projections have one input. Under the largest of their scales nothing saturates that did not before."""
    case = case_of("fp8, static", "llama")
    gate, up = (f"model.layers.1.mlp.{part}_proj.input_scale" for part in ("gate", "up"))
    tensors = case.tensors | {gate: torch.tensor(0.25), up: torch.tensor(0.5)}
    for first, second in ((0.25, 0.5), (0.5, 0.25)):
        tensors |= {gate: torch.tensor(first), up: torch.tensor(second)}
        model = load(folder_of(replace(case, tensors=tensors), tmp_path / f"{first}"))
        assert model.layers[1].mlp.gate_up.product.input_scale == 0.5


def test_block_scaled_projections_are_merged_where_possible() -> None:
    rows = {}
    for name in MODELS:
        config = Config.parse(config_of(case_of("fp8, blocks", name)))
        parts = parts_of(Decoder(config, device="meta"))[:4]
        rows[name] = [part.product.block_rows for part in parts]
    assert rows == {
        "llama": [(384,), (128,), (512,), (128,)],
        "qwen2": [(192, 64), (128,), (512,), (128,)],
        "qwen3": [(192, 48, 48), (192,), (320, 320), (192,)],
        "phi3": [(384,), (128,), (512,), (128,)],
    }


# Refusals


def within(*path: str, **changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Change an object inside of a ``quantization_config``."""

    def change(config: dict[str, Any]) -> dict[str, Any]:
        config = copy.deepcopy(config)
        place = config
        for name in path:
            place = place[name]
        place.update(changes)
        return config

    return change


GROUP = ("config_groups", "group_0")
WEIGHTS, INPUTS = (*GROUP, "weights"), (*GROUP, "input_activations")
REFUSED = [
    (
        "fp8, blocks",
        within(quant_method="aqlm"),
        "quant_method: expected 'fp8', 'awq', 'gptq', 'mxfp4' or 'compressed-tensors'",
    ),
    ("fp8, blocks", within(quant_method=None), "quant_method: expected .* or 'compressed-tensors', got None"),
    ("fp8, blocks", lambda _: [], r"expected an object, got \[\]"),
    ("fp8, blocks", within(weight_block_size=[64, 128]), r"weight_block_size: expected \[128, 128\] or null"),
    ("fp8, blocks", within(activation_scheme="static"), "activation_scheme: expected 'dynamic', got 'static'"),
    ("fp8, static", within(activation_scheme=["static"]), "activation_scheme: expected 'dynamic' or 'static', got "),
    ("fp8, blocks", within(fmt="e5m2"), "fmt: expected 'e4m3', got 'e5m2'"),
    ("fp8, blocks", within(scale_fmt="e8m0"), "scale_fmt: expected 'float' or 'ue8m0', got 'e8m0'"),
    ("fp8, static", within(scale_fmt="ue8m0"), "scale_fmt: expected 'float', got 'ue8m0'"),
    ("fp8, blocks", within(expert_dtype="fp4"), "expected a mixture of experts with mxfp4"),
    ("fp8, blocks", within(modules_to_convert=["embed"]), "modules_to_convert: expected null"),
    ("fp8, blocks", within(dequantize=True), "dequantize: expected null, got True"),
    ("fp8, static", within(ignored_layers="lm_head"), "ignored_layers: expected a list of names, got 'lm_head'"),
    ("fp8, static", within(ignored_layers=["("]), r"ignored_layers: expected regular expressions \(.*\), got '\('"),
    ("compressed fp8, static", within(ignore=["re:("]), r"ignore: expected regular expressions \(.*\), got 're:\('"),
    ("compressed fp8, static", within(ignore=[3]), r"ignore: expected a list of names, got \[3\]"),
    ("compressed fp8, static", within(format="marlin-24"), "format: expected 'float-quantized' or 'naive-quan"),
    ("compressed fp8, static", within(format="pack-quantized"), "input_activations: expected null, got"),
    ("compressed fp8, static", within(format=None), "format: expected 'float-quantized' or .*, got None"),
    ("compressed fp8, static", within(transform_config={"a": 1}), "transform_config: expected null"),
    ("compressed fp8, static", within(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: expected nu"),
    ("compressed fp8, static", within(config_groups={}), "config_groups: expected one group"),
    ("compressed fp8, static", within(config_groups=[]), "config_groups: expected an object"),
    ("compressed fp8, static", within("config_groups", group_0=3), "config_groups.group_0: expected an object, got 3"),
    ("compressed fp8, static", within("config_groups", group_1={}), "config_groups: expected one group, got .*group_1"),
    ("compressed fp8, static", within(*GROUP, targets=["re:.*"]), r"group_0.targets: expected \['Linear'\], got "),
    ("compressed fp8, static", within(*GROUP, format="dense"), "group_0.format: expected 'float-quantized' or"),
    ("compressed fp8, static", within(*GROUP, input_activations=None), "group_0.input_activations: expected an object"),
    (
        "compressed fp8, static",
        within(*GROUP, output_activations={"a": 1}),
        "group_0.output_activations: expected null",
    ),
    ("compressed fp8, static", within(*WEIGHTS, num_bits=4), "weights.num_bits: expected 8, got 4"),
    ("compressed fp8, static", within(*WEIGHTS, type=["float"]), r"weights.type: expected 'float' or 'int', got \['fl"),
    ("compressed fp8, static", within(*WEIGHTS, symmetric=False), "weights.symmetric: expected true, got False"),
    ("compressed fp8, static", within(*WEIGHTS, dynamic=True), "weights.dynamic: expected false, got True"),
    ("compressed fp8, static", within(*WEIGHTS, actorder="weight"), "weights.actorder: expected null"),
    (
        "compressed fp8, static",
        within(*WEIGHTS, strategy="group"),
        "weights.strategy: expected 'tensor' or 'channel' o",
    ),
    (
        "compressed int8, static",
        within(*WEIGHTS, strategy="block"),
        "weights.strategy: expected 'tensor' or 'channel', ",
    ),
    ("compressed fp8, blocks", within(*WEIGHTS, block_structure=[1, 128]), r"block_structure: expected \[128, 128\], "),
    ("compressed fp8, blocks", within(*INPUTS, strategy="token"), "input_activations.strategy: expected 'group', got"),
    ("compressed fp8, blocks", within(*INPUTS, group_size=64), "input_activations.group_size: expected 128, got 64"),
    ("compressed fp8, blocks", within(*INPUTS, dynamic="local"), "activations.dynamic: expected true, got 'local'"),
    ("compressed fp8, static", within(*INPUTS, dynamic=True), "input_activations.dynamic: expected false, got True"),
    ("compressed fp8, static", within(*INPUTS, type="int"), "input_activations.type: expected 'float', got 'int'"),
    (
        "compressed int8, channels",
        within(*INPUTS, symmetric=False),
        "input_activations.symmetric: expected true, got F",
    ),
    ("compressed int8, channels", within(*INPUTS, num_bits=4), "input_activations.num_bits: expected 8, got 4"),
]


@pytest.mark.parametrize(("kind", "change", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_unsupported_quantization_configs(kind: str, change: Callable[..., Any], message: str) -> None:
    values = config_of(case_of(kind, "llama"))
    with pytest.raises(ModelError, match=rf"^config: quantization_config[:.].*{message}"):
        Config.parse(values | {"quantization_config": change(values["quantization_config"])})


def rename(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


GATE = "model.layers.0.mlp.gate_proj"
DAMAGED = {
    "codes that are none": ("fp8, blocks", put(f"{GATE}.weight", torch.zeros(256, 128)), "expected F8_E4M3, got F32"),
    "int8 for fp8": (
        "fp8, blocks",
        put(f"{GATE}.weight", torch.zeros(256, 128, dtype=INT8)),
        "gate_proj.weight: expected F8_E4M3, got I8",
    ),
    "a scale of codes": (
        "fp8, blocks",
        put(f"{GATE}.weight_scale_inv", torch.zeros(2, 1, dtype=torch.float8_e4m3fn)),
        "gate_proj.weight_scale_inv: expected BF16 or F16 or F32 or F8_E8M0, got F8_E4M3",
    ),
    "scales of other blocks": (
        "fp8, blocks",
        put(f"{GATE}.weight_scale_inv", torch.ones(4, 2)),
        r"gate_proj.weight_scale_inv: expected shape \(2, 1\), got \(4, 2\)",
    ),
    "blocks for one scale": (
        "fp8, static",
        put(f"{GATE}.weight_scale", torch.ones(2, 1)),
        "expected one element, got ",
    ),
    "several input scales": ("fp8, static", put(f"{GATE}.input_scale", torch.ones(2)), "expected one element, got "),
    "one scale for channels": (
        "compressed int8, channels",
        put(f"{GATE}.weight_scale", torch.ones(1)),
        r"expected shape \(256, 1\), got \(1,\)",
    ),
    "no scale": ("fp8, blocks", rename(f"{GATE}.weight_scale_inv", f"{GATE}.s"), "gate_proj.s: is no tensor of this"),
    "a missing input scale": (
        "fp8, static",
        lambda tensors: tensors.pop(f"{GATE}.input_scale"),
        "gate_proj.input_scale: is in no shard",
    ),
    "a scale under two names": (
        "fp8, blocks",
        put(f"{GATE}.weight_scale", torch.ones(2, 1)),
        r"weight_scale\w*: is there under the name .*weight_scale",
    ),
    "a zero point": (
        "compressed int8, channels",
        put(f"{GATE}.weight_zero_point", torch.zeros(256, 1, dtype=INT8)),
        "weight_zero_point: is no tensor of this architecture",
    ),
    "a head of codes": (
        "fp8, blocks",
        put("lm_head.weight", torch.zeros(160, 128).to(FP8)),
        "lm_head.weight: expected BF16 or F16 or F32, got F8_E4M3",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_bad_folder_is_refused_before_allocation(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, damage, message = DAMAGED[what]
    case = case_of(kind, "llama")
    tensors = dict(case.tensors)
    damage(tensors)

    def no_memory(config: Config, dtype: str | None, device: str) -> Decoder:
        assert device == "meta", "memory is taken"
        return Decoder(config, dtype, device)

    monkeypatch.setattr(checkpoint, "Decoder", no_memory)
    with pytest.raises(ModelError, match=message):
        load(folder_of(replace(case, tensors=tensors), tmp_path / "bad"))


def test_quantised_weights_need_16_bit_activations(tmp_path: Path, folder: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"^dtype: expected float16 or bfloat16 with quantised weights, got float32$"):
        load(folder("fp8, blocks", "llama"), dtype="float32")
    assert load(tmp_path / "fp8, blocks llama", dtype="float16").embedding.dtype == torch.float16


def test_state_space_layers_have_no_quantised_weights() -> None:
    values = {"architectures": ["MambaForCausalLM"], "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1}
    with pytest.raises(ModelError, match=r"^config: quantization_config: expected None with state-space layers, got "):
        Config.parse(values | {"quantization_config": DEEPSEEK})


# Kernels

TINY = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "dtype": "bfloat16",
}


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize(
    "quantization",
    [
        Quantization("float8_e4m3fn", "block", "group", (r".*\.0\.mlp\..*",)),
        pytest.param(Quantization("int8", "channel", "token"), marks=pytest.mark.slow),
        pytest.param(Quantization("float8_e4m3fn", "tensor", "static"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_match_and_warmup_compiles_them(
    quantization: Quantization, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host backend, which checks every access: prompts and decode steps of all layers, with kernels that
    `warmup` compiled."""
    config = Config(**TINY, quantization=quantization)
    model = Decoder(config).randomise(3)
    limits = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8}
    with testing.cpu("kernels"):
        assert pyops.warmup(model=config, max_model_len=16, **limits)
        calls.clear()
        monkeypatch.setenv("PYOPS_JIT", "error")
        engine = Engine(model, max_seq_len=16, **limits)
        engine.generate([[1, 2, 3, 4, 5, 6], [7, 8]], SamplingParams(max_tokens=3))
    assert len(calls) == 3 * sum(isinstance(part, ScaledLinear) for part in parts_of(model))
    for product, x, out in list(calls):
        assert out.abs().max() > 0.0
        codes, _ = _in_groups(x) if product.block_rows else product._quantised(x)
        # fp8 tensor core accumulators are that far from exact sums, and may round to the next bfloat16.
        atol = absolute_error(codes, product.weight.T) * float(out.abs().max())
        torch.testing.assert_close(out, product(x), rtol=2**-7, atol=2**-16 + atol)


def parts_of(model: Decoder) -> list[Any]:
    return [part for each in model.layers for part in (each.mixer.qkv, each.mixer.o, each.mlp.gate_up, each.mlp.down)]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_tokens_on_a_gpu(kind: str, name: str, folder: Callable[..., Path]) -> None:
    """The tokens of the CPU; decode steps replay graphs."""
    engine = Engine(load(folder(kind, name), "cuda"), max_seq_len=96, max_num_seqs=2)
    for text in engine.generate([PROMPT, PROMPT], SamplingParams(max_tokens=COUNT)):
        check_text(case_of(kind, name), text)
