"""Models of packed weights (AWQ, GPTQ, pack-quantized) against transformers with the same weights dequantised."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

import pyops
from pyops import ModelError, testing
from pyops.host.toolchain import toolchains
from pyops.models import Config, Decoder, Engine, PackedQuantization, Quantization, SamplingParams, checkpoint, load
from pyops.models.packed_linear import PackedLinear
from tests.models.test_quantized import COUNT, DTYPES, PROMPT, TINY, projections, unquantised, within
from tests.support import packed

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}


def compressed(**weights: Any) -> dict[str, Any]:
    """The packed tensors that llm-compressor writes."""
    common = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}
    group = {"targets": ["Linear"], "weights": common | weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


FORMATS: dict[str, dict[str, Any]] = {
    "awq": AWQ,
    "gptq": GPTQ,
    "gptq, act-order": GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"},
    "gptq, 3 bits, one group": GPTQ | {"bits": 3, "group_size": -1},
    "packed": compressed(),
    "packed, zero points, order": compressed(symmetric=False, actorder="group"),
    "packed, 8 bits, channels": compressed(num_bits=8, strategy="channel", group_size=None),
}
NAMES = {"awq": "llama", "gptq": "qwen2"}  # with biases, and fewer heads of keys; otherwise llama


@dataclass(frozen=True)
class Case:
    """A packed model: its ``quantization_config``, the tensors of its folder, and transformers' model in float32."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    dequantised: Any


@dataclass(frozen=True)
class Packed:
    """A weight [in, out] as quants, zero points and scales of groups, and the group of each row."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    g_idx: Tensor

    @property
    def values(self) -> Tensor:
        return (self.codes - self.zeros[self.g_idx]) * self.scales.float()[self.g_idx]


def packed_weight(weight: Tensor, bits: int, size: int, dtype: torch.dtype, symmetric: bool, order: bool) -> Packed:
    """Quantise a weight [out, in]."""
    w, most = weight.T, (1 << bits) - 1
    g_idx = torch.arange(len(w)) // size
    if order:
        g_idx = g_idx[torch.randperm(len(w), generator=torch.Generator().manual_seed(len(w)))]
    rows = torch.stack([w[g_idx == g] for g in range(len(w) // size)])
    low, high = rows.amin(1), rows.amax(1)
    if symmetric:
        scales = (torch.maximum(-low, high) / (most // 2)).to(dtype)
        zeros = torch.full(scales.shape, 1 << (bits - 1))
    else:
        scales = ((high - low) / most).to(dtype)
        zeros = (-low / scales.float()).round().clamp(1, most).long()
    codes = ((w / scales.float()[g_idx]).round() + zeros[g_idx]).clamp(0, most).long()
    return Packed(codes, zeros, scales, g_idx)


def tensors_of(key: str, one: Packed, config: dict[str, Any]) -> dict[str, Tensor]:
    """The checkpoint tensors of a weight."""
    method = config["quant_method"]
    if method == "awq":
        found = {"qweight": packed.awq(one.codes), "qzeros": packed.awq(one.zeros), "scales": one.scales}
    elif method == "gptq":
        stored = one.zeros - (0 if config.get("checkpoint_format") == "gptq_v2" else 1)
        found = {"qweight": packed.gptq(one.codes, config["bits"]), "scales": one.scales, "g_idx": one.g_idx.int()}
        found["qzeros"] = packed.gptq_zeros(stored, config["bits"])
    else:
        weights = config["config_groups"]["group_0"]["weights"]
        found = {"weight_packed": packed.gptq(one.codes, weights["num_bits"]).T, "weight_scale": one.scales.T}
        found["weight_shape"] = torch.tensor(one.codes.T.shape)
        if not weights["symmetric"]:
            found["weight_zero_point"] = packed.gptq_zeros(one.zeros, weights["num_bits"]).T
        if weights["actorder"]:
            found["weight_g_idx"] = one.g_idx.int()
    return {f"{key}.{name}": tensor for name, tensor in found.items()}


@cache
def case_of(kind: str) -> Case:
    config, name = FORMATS[kind], NAMES.get(kind, "llama")
    plain, dtype = unquantised(name), getattr(torch, DTYPES[name])
    model = type(plain)(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    tensors = {key: tensor.to(dtype) for key, tensor in plain.state_dict().items()}
    weights = config.get("config_groups", {"group_0": {"weights": {}}})["group_0"]["weights"]
    bits = weights.get("num_bits", config.get("bits"))
    given = weights.get("group_size", config.get("group_size"))
    symmetric, order = weights.get("symmetric", False), config.get("desc_act") or weights.get("actorder") == "group"
    for key, linear in projections(model).items():
        size = linear.in_features if given in (None, -1) else given
        one = packed_weight(linear.weight.data, bits, size, dtype, symmetric, order)
        linear.weight.data = one.values.T.contiguous()
        del tensors[f"{key}.weight"]
        tensors |= tensors_of(key, one, config)
    return Case(config, tensors, model)


def folder_of(case: Case, folder: Path) -> Path:
    folder.mkdir()
    model = case.dequantised
    more = {"architectures": [type(model).__name__], "dtype": DTYPES[model.config.model_type]}
    config = model.config.to_dict() | more | {"quantization_config": case.config}
    safetensors.torch.save_file({k: t.contiguous() for k, t in case.tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def check_text(case: Case, text: list[int], dtype: torch.dtype | None = None) -> None:
    """Tokens are those of the dequantised model in float32, each compared after the same tokens.

    Where one differs, the model is undecided between both within the effect of the dtype on its logits. At most four
    more tokens differ than for the dequantised model itself in that dtype.
    """
    tokens = torch.tensor([PROMPT + text[:-1]])
    with torch.no_grad():
        exact = case.dequantised(tokens).logits[0, len(PROMPT) - 1 :]
        narrow = type(case.dequantised)(case.dequantised.config).eval()
        narrow.load_state_dict(case.dequantised.state_dict())
        narrow = narrow.to(dtype or getattr(torch, DTYPES[narrow.config.model_type]))
        rounded = narrow(tokens).logits[0, len(PROMPT) - 1 :].float()
    errors = (rounded - exact).abs().amax(-1)
    others = [i for i in range(COUNT) if text[i] != exact[i].argmax()]
    for i in others:
        assert exact[i].max() - exact[i, text[i]] <= 2 * 1.25 * errors[i]
    assert len(others) <= COUNT - 60 + int((rounded.argmax(-1) != exact.argmax(-1)).sum())


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    return lambda kind: folder_of(case_of(kind), tmp_path / kind)


@pytest.mark.parametrize("kind", FORMATS)
def test_tokens_match_the_dequantised_model(kind: str, folder: Callable[..., Path]) -> None:
    engine = Engine(load(folder(kind)), max_seq_len=96, max_num_seqs=1)
    (text,) = engine.generate([PROMPT], SamplingParams(max_tokens=COUNT))
    check_text(case_of(kind), text)


@pytest.mark.parametrize("kind", FORMATS)
def test_packed_gemms_are_exact(kind: str, folder: Callable[..., Path]) -> None:
    """Against float64 with the dequantised weights, up to roundings of weights and results."""
    case = case_of(kind)
    model, linears = load(folder(kind)), projections(case.dequantised)
    parts = [part for layer in model.layers for part in (layer.mixer.qkv, layer.mixer.o, layer.mlp.gate_up)]
    names = [f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn", "self_attn", "mlp")]
    for part, module in zip(parts, names, strict=True):
        assert isinstance(part, PackedLinear)
        together = [linears[f"{module}.{name}"] for name in part.sizes]
        x = torch.randn(5, together[0].in_features, generator=torch.Generator().manual_seed(1)).to(model.dtype)
        ours = part(x).double()
        for linear, out in zip(together, ours.split(list(part.sizes.values()), 1), strict=True):
            w = linear.weight.double()
            bias = 0.0 if linear.bias is None else linear.bias.double()
            product, eps = x.double() @ w.T, torch.finfo(model.dtype).eps
            allowed = eps / 2 * (product.abs() + (product + bias).abs() + x.double().abs() @ w.T.abs())
            assert ((out - product - bias).abs() <= allowed).all(), module


AWQ_FORMATS = ("gemv", "gemv_fast", "llm-awq")
REFUSED = [
    ("awq", within(bits=3), "bits: expected 4, got 3"),
    ("awq", within(version="gemv"), "version: expected 'gemm' or 'GEMM', got 'gemv'"),
    *(("awq", within(format=name), f"format: expected 'gemm' or 'GEMM', got '{name}'") for name in AWQ_FORMATS),
    ("awq", within(backend="llm-awq"), "backend: expected a backend of the format 'gemm', got 'llm-awq'"),
    ("awq", within(zero_point=False), "zero_point: expected True, got False"),
    ("awq", within(group_size=0), "group_size: expected -1, or 1 or more, got 0"),
    ("gptq", within(bits=5), "bits: expected 2 or 3 or 4 or 8, got 5"),
    ("gptq", within(checkpoint_format="marlin"), "checkpoint_format: expected 'gptq' or 'gptq_v2', got 'marlin'"),
    ("gptq", within(format="marlin"), "format: expected 'gptq' or 'gptq_v2', got 'marlin'"),
    ("gptq", within(lm_head=True), "lm_head: expected null, got True"),
    ("gptq", within(dynamic={"+:a": {}}), r"dynamic: expected rules that leave modules as they are \('-:...'\)"),
    ("gptq", within(dynamic={"-:a(": {}}), "dynamic: expected regular expressions"),
    ("gptq", within(modules_in_block_to_quantize=[[1]]), "modules_in_block_to_quantize: expected a list of names"),
    ("packed", within("config_groups", "group_0", input_activations={"num_bits": 8}), "input_activations: expected nu"),
    ("packed", within("config_groups", "group_0", "weights", num_bits=5), "weights.num_bits: expected 4 or 8, got 5"),
    (
        "packed",
        within("config_groups", "group_0", "weights", type="float"),
        "weights.type: expected 'int', got 'float'",
    ),
    ("packed", within("config_groups", "group_0", "weights", strategy="tensor"), "strategy: expected 'group' or 'chan"),
]


@pytest.mark.parametrize(("kind", "change", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_unsupported_quantization_configs(kind: str, change: Callable[..., Any], message: str) -> None:
    case = case_of(kind)
    values = case.dequantised.config.to_dict() | {"architectures": [type(case.dequantised).__name__]}
    with pytest.raises(ModelError, match=rf"^config: quantization_config[:.].*{message}"):
        Config.parse(values | {"quantization_config": change(case.config)})


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_fields_that_transformers_writes(method: str) -> None:
    """All fields of its classes. GPTQ's ``format`` says how zero points are stored if no older field does."""
    kind = {"awq": transformers.AwqConfig, "gptq": transformers.GPTQConfig}[method]
    written = kind(bits=4).to_dict()
    assert isinstance(Quantization.parse(written), PackedQuantization)
    v2 = {key: value for key, value in written.items() if key != "checkpoint_format"} | {"format": "gptq_v2"}
    if method == "gptq":
        found = [Quantization.parse(each) for each in (written, v2, v2 | {"checkpoint_format": "gptq"})]
        assert [each.is_v2 for each in found if isinstance(each, PackedQuantization)] == [False, True, False]


def test_modules_left_unquantized(tmp_path: Path) -> None:
    """AWQ's list of modules; a name includes everything inside it."""
    case = case_of("awq")
    name, plain = "model.layers.1.mlp", unquantised("llama").state_dict()
    tensors = {key: tensor for key, tensor in case.tensors.items() if not key.startswith(f"{name}.")}
    tensors |= {key: tensor.to(torch.bfloat16) for key, tensor in plain.items() if key.startswith(f"{name}.")}
    config = case.config | {"modules_to_not_convert": [name]}
    model = load(folder_of(replace(case, config=config, tensors=tensors), tmp_path / "model"))
    kinds = [isinstance(layer.mlp.down, PackedLinear) for layer in model.layers]
    assert kinds == [True, False]
    assert isinstance(model.layers[1].mixer.o, PackedLinear)


@pytest.mark.parametrize(
    "change",
    [
        {"dynamic": {"-:.*layers.1.mlp": {}}},
        {"modules_in_block_to_quantize": [[f"self_attn.{part}_proj" for part in "qkvo"], ["0.mlp.gate_proj"]]},
    ],
    ids=str,
)
def test_gptq_lists_its_quantised_modules(change: dict[str, Any]) -> None:
    case = case_of("gptq")
    values = case.dequantised.config.to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    found = Config.parse(values | {"quantization_config": case.config | change}).quantization
    assert isinstance(found, PackedQuantization)
    names = ("0.self_attn.q_proj", "0.mlp.gate_proj", "1.self_attn.o_proj", "1.mlp.gate_proj")
    assert [found.covers(f"model.layers.{name}") for name in names] == [True, True, True, False]


GATE = "model.layers.0.mlp.gate_proj"
DAMAGED = {
    "codes of another size": ("awq", {f"{GATE}.qweight": torch.zeros(128, 31).int()}, r"expected shape \(128, 32\)"),
    "codes that are none": ("gptq", {f"{GATE}.qweight": torch.zeros(16, 256)}, "qweight: expected I32, got F32"),
    "scales of other groups": ("packed", {f"{GATE}.weight_scale": torch.zeros(256, 1)}, r"expected shape \(256, 4\)"),
    "zero points": ("packed", {f"{GATE}.weight_zero_point": torch.zeros(32, 4).int()}, "is no tensor of this arch"),
    "an order that is not said": (
        "gptq",
        {f"{GATE}.g_idx": torch.arange(128).flip(0).int() // 32},
        "g_idx: expected groups of 32 neighbours, as without desc_act",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_bad_folder_is_refused(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before memory is allocated, except for a g_idx, which is data."""
    kind, change, message = DAMAGED[what]
    case = case_of(kind)

    def no_memory(config: Config, dtype: str | None, device: str) -> Decoder:
        assert device == "meta" or "order" in what, "memory is taken"
        return Decoder(config, dtype, device)

    monkeypatch.setattr(checkpoint, "Decoder", no_memory)
    with pytest.raises(ModelError, match=message):
        load(folder_of(replace(case, tensors=case.tensors | change), tmp_path / "bad"))


def test_sizes_that_words_or_groups_do_not_divide() -> None:
    for quantization, message in (
        (PackedQuantization("awq", 4, 24), "group_size: expected a number that divides 32, got 24"),
        (PackedQuantization("gptq", 3, 32), "gate_proj: expected a multiple of 32 for 3 bits, got 144"),
    ):
        with pytest.raises(ModelError, match=message):
            Decoder(Config(**TINY, quantization=quantization))
    with pytest.raises(
        ModelError, match=r"^randomise: expected weights that are neither packed nor of mxfp4 nor of GGUF's types$"
    ):
        Decoder(Config(**TINY, quantization=PackedQuantization("awq", 4, 16))).randomise(0)


def test_packed_weights_need_16_bit_activations(folder: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"^dtype: expected float16 or bfloat16 with quantised weights, got float32$"):
        load(folder("awq"), dtype="float32")


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize(
    "quantization",
    [
        PackedQuantization("awq", 4, 16),
        pytest.param(PackedQuantization("gptq", 4, 16, True, True, True), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.slow
def test_warmup_compiles_all_kernels(quantization: PackedQuantization, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host: prompts and decode steps launch only kernels that `warmup` compiled, and results are finite."""
    config = Config(**TINY, quantization=quantization)
    plain = Decoder(Config(**TINY)).randomise(3)
    model = Decoder(config)
    for name, tensor in model.tensors().items():
        if tensor.dtype == torch.int32:
            tensor.copy_(torch.arange(len(tensor)) // 16 if name.endswith("g_idx") else tensor.new_tensor(0x12345678))
        elif name in plain.tensors():
            tensor.copy_(plain.tensors()[name])
        else:
            tensor.fill_(0.02)
    limits = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8}
    with testing.cpu("kernels"):
        assert pyops.warmup(model=config, max_model_len=16, **limits)
        monkeypatch.setenv("PYOPS_JIT", "error")
        texts = Engine(model, max_seq_len=16, **limits).generate(
            [[1, 2, 3, 4, 5, 6], [7, 8]], SamplingParams(max_tokens=3)
        )
    monkeypatch.delenv("PYOPS_JIT")
    assert texts == Engine(model, max_seq_len=16, **limits).generate(
        [[1, 2, 3, 4, 5, 6], [7, 8]], SamplingParams(max_tokens=3)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_tokens_on_a_gpu(kind: str, folder: Callable[..., Path]) -> None:
    """The tokens of the CPU; decode steps replay graphs."""
    engine = Engine(load(folder(kind), "cuda"), max_seq_len=96, max_num_seqs=2)
    for text in engine.generate([PROMPT, PROMPT], SamplingParams(max_tokens=COUNT)):
        check_text(case_of(kind), text)
