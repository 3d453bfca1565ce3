"""Accelerated models of transformers with fp8 linear weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear
from transformers.integrations.finegrained_fp8 import FP8Linear

from pyops.integrations.transformers import PagedCache, accelerate, report, restore
from pyops.integrations.transformers.cache import CACHE
from tests.models.test_quantized import COUNT, DTYPES, MODELS, PROMPT, case_of, check_product, check_text
from tests.models.test_quantized import projections as linear_modules

BLOCKS, CHANNELS = "fp8, blocks", "compressed fp8, channels"
KINDS = (BLOCKS, "fp8, one scale", "fp8, by transformers", CHANNELS)


def model_of(kind: str, name: str) -> Any:
    """The model as transformers loads it on a GPU with fp8 GEMMs."""
    case = case_of(kind, name)
    model = copy.deepcopy(case.dequantised).to(getattr(torch, DTYPES[name]))
    for key, linear in linear_modules(model).items():
        sizes, has_bias = (linear.in_features, linear.out_features), linear.bias is not None
        scale = case.tensors[f"{key}.{case.format.scale}"].float()
        module: Any
        if kind == CHANNELS:
            module = CompressedTensorsFP8Linear(*sizes, has_bias)
            module.weight_scale.data = scale.T
        else:
            blocks = (128, 128) if kind == BLOCKS else None
            scheme = "static" if case.input_scales else "dynamic"
            module = FP8Linear(*sizes, block_size=blocks, activation_scheme=scheme, has_bias=has_bias)
            module.weight_scale_inv.data = scale if blocks else scale.reshape(())
            if case.input_scales:
                module.activation_scale.data = case.input_scales[key]
        module.weight.data, module.bias = case.tensors[f"{key}.weight"], linear.bias
        model.set_submodule(key, module)
    return model.eval()


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in MODELS])
def test_fp8_projections_are_exact(kind: str, name: str) -> None:
    case, model = case_of(kind, name), accelerate(model_of(kind, name))
    torch.manual_seed(1)
    for key, module in linear_modules(model).items():
        x = torch.randn(2, 3, module.in_features, dtype=getattr(torch, DTYPES[name]))
        with torch.no_grad():
            check_product(case, key, x.flatten(0, 1), module(x).flatten(0, 1))


@pytest.mark.parametrize(("kind", "name"), [(BLOCKS, "llama"), (CHANNELS, "qwen2"), (BLOCKS, "qwen3")])
def test_tokens_are_those_of_the_dequantised_model(kind: str, name: str) -> None:
    """As in tests/models/test_quantized.py."""
    model, case = accelerate(model_of(kind, name)), case_of(kind, name)
    text = model.generate(torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False)[0, len(PROMPT) :].tolist()
    check_text(case, text)


@pytest.mark.slow
def test_decode_step_is_one_graph() -> None:
    """torch.compile traces the quantised projections."""
    torch.compiler.reset()  # other tests may have used up the limit of recompiles
    model = accelerate(model_of(BLOCKS, "qwen3"))
    tokens = torch.tensor([PROMPT])
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    for call in (model, step):
        past = PagedCache(model.config, 40)
        with torch.no_grad():
            model(tokens, **{CACHE: past})
            found.append(call(tokens[:, :1], **{CACHE: past}).logits)
    assert torch.equal(*found)


def test_report_and_restore() -> None:
    model = accelerate(model_of(BLOCKS, "llama"))
    assert report(model).replaced["FP8Linear"] == 14
    assert report(model).ops["FP8Linear"].endswith("cutlass_scaled_mm")
    assert not report(model).left_alone
    restore(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_gradients_are_left_to_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(BLOCKS, "llama")
    module = model.model.layers[0].mlp.down_proj
    monkeypatch.setattr(type(module), "forward", lambda self, input: "its own")
    accelerate(model)
    x = torch.zeros(1, module.in_features, dtype=torch.bfloat16)
    assert module(x) == "its own"
    with torch.no_grad():
        assert torch.equal(module(x), torch.zeros(1, module.out_features))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda module: setattr(module, "block_size", (64, 128)), "its blocks are 64 x 128, not 128 x 128"),
        (lambda module: setattr(module, "activation_scale", module.bias), None),
        (
            lambda module: setattr(module, "activation_scale", torch.nn.Parameter(torch.ones(()))),
            "its blocks have a static scale for activations",
        ),
        (
            lambda module: setattr(module.weight, "data", torch.zeros(128, 128, dtype=torch.int8)),
            "its weights are torch.int8 under scales of torch.float32",
        ),
        (
            lambda module: setattr(module.weight_scale_inv, "data", torch.ones(1, 1).to(torch.float8_e8m0fnu)),
            "its weights are torch.float8_e4m3fn under scales of torch.float8_e8m0fnu",
        ),
    ],
)
def test_unknown_modules_are_left_alone(change: Any, why: str | None) -> None:
    model = model_of(BLOCKS, "llama")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    change(model.model.layers[1].self_attn.o_proj)
    accelerate(model)
    assert report(model).left_alone == ({} if why is None else {"model.layers.1.self_attn.o_proj": why})
    assert report(model).replaced["FP8Linear"] == (14 if why is None else 13)


def test_models_of_float32_are_left_alone() -> None:
    model = model_of("fp8, one scale", "llama")
    for name, parameter in model.named_parameters():
        if "proj" not in name:
            parameter.data = parameter.data.float()
    accelerate(model)
    assert len(report(model).left_alone) == 14
    assert set(report(model).left_alone.values()) == {"its activations are float32, not float16 or bfloat16"}


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "name"), [(BLOCKS, "llama"), (CHANNELS, "qwen2"), (BLOCKS, "qwen3")])
def test_tokens_on_a_gpu(kind: str, name: str) -> None:
    model, tokens = accelerate(model_of(kind, name).cuda()), torch.tensor([PROMPT], device="cuda")
    text = model.generate(tokens, max_new_tokens=COUNT, do_sample=False)[0, len(PROMPT) :].tolist()
    check_text(case_of(kind, name), text)
