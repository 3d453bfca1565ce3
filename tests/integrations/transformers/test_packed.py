"""Accelerated models with packed linear weights, in the modules of packages for AWQ and GPTQ."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.integrations.transformers import accelerate, report, restore
from tests.models.test_packed import Case, case_of, check_text
from tests.models.test_quantized import COUNT, DTYPES, PROMPT, projections

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the order of columns in an AWQ word


def fields(words: Tensor, bits: int) -> Tensor:
    """[..., n * 32 / bits] of words [..., n], the lowest bits first; bits that divide 32."""
    return (words[..., None].long() >> torch.arange(0, 32, bits, device=words.device) & (1 << bits) - 1).flatten(-2)


class Packed(nn.Module):
    """A linear module like that of AutoAWQ, AutoGPTQ or GPTQModel: it dequantises the whole weight and multiplies."""

    bias: Tensor | None

    def __init__(self, bits: int, bias: Tensor | None, **tensors: Tensor) -> None:
        super().__init__()
        self.bits, self.adapter = bits, None
        self.register_buffer("bias", bias)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def weight(self) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight().to(x.dtype)
        return out if self.bias is None else out + self.bias


class WQLinearGemm(Packed):
    def weight(self) -> Tensor:
        codes, zeros = (
            fields(words, 4).unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2) for words in (self.qweight, self.qzeros)
        )
        size = len(codes) // len(zeros)
        return (codes - zeros.repeat_interleave(size, 0)) * self.scales.repeat_interleave(size, 0)


class QuantLinear(Packed):
    added = 1

    def weight(self) -> Tensor:
        codes = fields(self.qweight.T, self.bits).T
        groups = self.g_idx.long()
        return (codes - fields(self.qzeros, self.bits)[groups] - self.added) * self.scales[groups]


class QuantLinearV2(QuantLinear):
    added = 0


class Exllama(QuantLinear):
    """Quants in another order under the same name and shape."""

    def weight(self) -> Tensor:
        weight = super().weight()
        return weight.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


CLASSES = {"awq": WQLinearGemm, "gptq": QuantLinear, "gptq, act-order": QuantLinearV2}


def model_of(kind: str, replaced: type[Packed] | None = None) -> tuple[Case, Any]:
    """A model with such projections; one layer's o_proj is of another class."""
    case = case_of(kind)
    model = copy.deepcopy(case.dequantised).to(getattr(torch, DTYPES[case.dequantised.config.model_type]))
    for key, linear in projections(model).items():
        names = ("qweight", "qzeros", "scales", "g_idx")
        tensors = {name: case.tensors[f"{key}.{name}"] for name in names if f"{key}.{name}" in case.tensors}
        is_other = replaced is not None and key == "model.layers.1.self_attn.o_proj"
        made = replaced if is_other and replaced else CLASSES[kind]
        bias = None if linear.bias is None else linear.bias.data
        model.set_submodule(key, made(case.config["bits"], bias, **tensors))
    return case, model.eval()


@pytest.mark.parametrize("kind", CLASSES)
def test_tokens_equal_those_of_the_dequantised_model(kind: str) -> None:
    case, model = model_of(kind)
    made = CLASSES[kind].__name__
    accelerate(model)
    assert report(model).replaced[made] == 14
    assert report(model).ops[made] == ("awq_gemm" if kind == "awq" else "gptq_gemm")
    assert not any("proj" in name for name in report(model).left_alone)
    if kind != "gptq":  # GPTQ's GEMMs are checked below
        text = model.generate(torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False)[0, len(PROMPT) :].tolist()
        check_text(case, text)
    linear = model.model.layers[0].mlp.down_proj
    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(1)).to(linear.scales.dtype)
    with torch.no_grad():
        ours = linear(x)
    assert torch.equal(linear(x), type(linear).forward(linear, x))  # with gradients enabled
    torch.testing.assert_close(ours, linear(x), rtol=2.0**-6, atol=2.0**-6)
    restore(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("kind", CLASSES)
def test_modules_of_the_tests_run_on_their_own_device(kind: str) -> None:
    """`accelerate` tries them on a GPU."""
    _, model = model_of(kind)
    linear = model.model.layers[0].mlp.down_proj.to("meta")
    assert linear(torch.empty(3, 256, dtype=linear.scales.dtype, device="meta")).shape == (3, linear.scales.shape[1])


def with_adapter(module: Any) -> None:
    module.adapter = object()


def in_another_order(module: Any) -> None:
    module.g_idx = module.g_idx.long()


LEFT: dict[str, tuple[str, type[Packed] | None, Callable[[Any], None] | None, str]] = {
    "another order": ("gptq", Exllama, None, "it computes something else than awq_gemm or gptq_gemm of its tensors"),
    "an adapter": ("awq", None, with_adapter, "it has an adapter"),
    "other groups": ("gptq", None, in_another_order, "its tensors are neither AWQ's nor GPTQ's of 4 bits: qweight"),
    "no forward": ("gptq", Packed, None, "its forward cannot be tried: NotImplementedError"),
}


@pytest.mark.parametrize("what", LEFT)
def test_unknown_modules_are_left_alone(what: str) -> None:
    kind, replaced, change, why = LEFT[what]
    _, model = model_of(kind, replaced)
    name = "model.layers.1.self_attn.o_proj"
    if change:
        change(model.get_submodule(name))
    accelerate(model)
    assert report(model).left_alone[name].startswith(why)
    assert report(model).replaced[CLASSES[kind].__name__] == 13


def test_models_of_float32_are_left_alone() -> None:
    _, model = model_of("awq")
    accelerate(model.float())
    assert set(report(model).left_alone.values()) >= {"its activations are float32, not float16 or bfloat16"}


def test_packed_projections_do_not_break_a_graph() -> None:
    torch.compiler.reset()  # other tests may have used up the limit of recompiles
    _, model = model_of("awq")
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        logits = accelerate(model)(tokens, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")(tokens, use_cache=False).logits
    assert torch.equal(compiled, logits)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CLASSES)
def test_tokens_on_a_gpu(kind: str) -> None:
    case, model = model_of(kind)
    tokens = torch.tensor([PROMPT], device="cuda")
    text = accelerate(model.cuda()).generate(tokens, max_new_tokens=COUNT, do_sample=False)[0, len(PROMPT) :].tolist()
    check_text(case, text)
