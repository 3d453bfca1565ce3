"""Models that are changed before and after `accelerate` compute the same as in transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import cache
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize, prune

from pyops.integrations.transformers import PagedCache, accelerate, report, restore
from pyops.integrations.transformers.cache import CACHE
from tests.support.profiles import PROFILE
from tests.support.small_models import SIZES

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_dropout": 0.5},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 32},
    "GPT2": {},
    "Phi3": {"pad_token_id": 0},
    "SeedOss": {"head_dim": 16, "residual_dropout": 0.5},
    "Mixtral": {"num_local_experts": 4},
}
IMAGE = {"image_size": 16, "patch_size": 8, "qkv_bias": True}
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.0},
    "ViT": {"attention_probs_dropout_prob": 0.5} | IMAGE,
}


def model_of(family: str, **sizes: int) -> Any:
    torch.manual_seed(1)
    names = [f"{family}Model"] if family in ENCODERS else [f"{family}ForCausalLM", f"{family}LMHeadModel"]
    kind = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    options = SIZES | (FAMILIES | ENCODERS)[family] | sizes
    model = kind(getattr(transformers, f"{family}Config")(**options)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture
def model() -> Any:
    return model_of("Llama")


TOKENS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 4]])


PADDING = torch.tensor([[1] * 5, [0, 1, 1, 1, 0]])
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def logits(model: Any, past: Any) -> torch.Tensor:
    """Results for two prompts and one more token each; for encoders: hidden states of padded texts or of images."""
    torch.manual_seed(7)
    with torch.no_grad():
        if not model.can_generate():
            is_text = model.main_input_name == "input_ids"
            given = {"input_ids": TOKENS, "attention_mask": PADDING} if is_text else {"pixel_values": PIXELS}
            hidden: torch.Tensor = model(**given).last_hidden_state
            return hidden
        first = model(TOKENS, **{CACHE: past}).logits
        return torch.cat((first, model(TOKENS[:, :1], **{CACHE: past}).logits), 1)


def agree(ours: Any, theirs: Any) -> None:
    """Both compute the same up to roundings, in bfloat16 if either rounds to it; or both fail."""
    expected, found = None, None
    with suppress(Exception):
        expected = logits(theirs, transformers.DynamicCache(config=theirs.config))
    with suppress(Exception) if expected is None else nullcontext():
        found = logits(ours, PagedCache(ours.config))
    if expected is None or found is None:
        assert found is None
        assert expected is None
        return
    assert found.dtype == expected.dtype
    close = 1e-4 if expected.dtype == torch.float32 else 0.06
    scale = expected.norm().clamp(min=1e-3)
    assert not expected.isfinite().all() or (found - expected).norm() <= close * scale


# Changes of a module. Each takes a model and the name of a module, and returns the function that undoes it, if it
# outlives both.


class Adapter(nn.Module):  # type: ignore[misc]
    """Replace a module by one that contains it, as adapters do."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.inner(*args, **kwargs)
        return (1.3 * found[0], *found[1:]) if isinstance(found, tuple) else 1.3 * found


def adapt(model: Any, name: str) -> None:
    model.set_submodule(name, Adapter(model.get_submodule(name)))


def unadapt(model: Any, name: str) -> None:
    for each, module in list(model.named_modules()):
        if isinstance(module, Adapter):
            model.set_submodule(each, module.inner)


def replace(model: Any, name: str) -> None:
    """Replace it by a copy with other weights."""
    module = copy.deepcopy(model.get_submodule(name))
    vars(module).pop("forward", None)
    for part in module.modules():
        vars(part).pop("forward", None)
    for parameter in module.parameters():
        parameter.data = 1.2 * parameter.data.flip(0)
    model.set_submodule(name, module)


def duplicate(model: Any, name: str) -> None:
    """Replace it by a copy with other weights and all attributes, as adapters do for modules that are trained."""
    module = copy.deepcopy(model.get_submodule(name))
    for parameter in module.parameters():
        parameter.data = 1.2 * parameter.data.flip(0)
    model.set_submodule(name, module)


def other_activation(model: Any, name: str) -> None:
    for module in list(model.modules()):
        for each in ("act_fn", "activation_fn", "act"):
            if each in module._modules:
                setattr(module, each, nn.Softplus())


def scaled(found: Any) -> Any:
    return (1.2 * found[0], *found[1:]) if isinstance(found, tuple) else 1.2 * found


def hook(model: Any, name: str) -> None:
    model.get_submodule(name).register_forward_hook(lambda module, args, output: scaled(output))


def hook_before(model: Any, name: str) -> None:
    model.get_submodule(name).register_forward_pre_hook(lambda module, args: scaled(args) if args else None)


def hook_all(model: Any, name: str) -> Callable[[], None]:
    kind = type(model.get_submodule(name))
    hooks = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: scaled(output) if type(module) is kind else None
    )
    return hooks.remove


def wrap_forward(model: Any, name: str) -> None:
    module = model.get_submodule(name)
    forward = module.forward
    module.forward = lambda *args, **kwargs: scaled(forward(*args, **kwargs))


def set_forward(model: Any, name: str) -> None:
    """Set a kernel of another package on a module."""
    module = model.get_submodule(name)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return scaled(type(self).forward(self, *args, **kwargs))

    module.forward = MethodType(forward, module)


def patch_class(model: Any, name: str) -> Callable[[], None]:
    kind = type(model.get_submodule(name))
    own, forward = vars(kind).get("forward"), kind.forward
    kind.forward = lambda self, *args, **kwargs: scaled(forward(self, *args, **kwargs))
    return lambda: delattr(kind, "forward") if own is None else setattr(kind, "forward", own)


@cache
def scaled_class(kind: type) -> type:
    forward = {"forward": lambda self, *args, **kwargs: scaled(kind.forward(self, *args, **kwargs))}
    return type(f"Scaled{kind.__name__}", (kind,), forward)


def change_class(model: Any, name: str) -> None:
    module = model.get_submodule(name)
    module.__class__ = scaled_class(type(module))


def retype(model: Any, name: str) -> None:
    model.to(torch.bfloat16)


def retype_part(model: Any, name: str) -> None:
    model.get_submodule(name).to(torch.bfloat16)


def train(model: Any, name: str) -> None:
    model.get_submodule(name).train()


def train_all(model: Any, name: str) -> None:
    model.train()


def move(model: Any, name: str) -> None:
    for parameter in model.get_submodule(name).parameters():
        parameter.data = parameter.data.flip(0).contiguous()


def assign(model: Any, name: str) -> None:
    """Replace parameters, not only their data."""
    for part in model.get_submodule(name).modules():
        for each, parameter in list(part._parameters.items()):
            if parameter is not None:
                setattr(part, each, nn.Parameter(0.8 * parameter.detach().flip(0)))


def write(model: Any, name: str) -> None:
    for parameter in model.get_submodule(name).parameters():
        parameter.data.mul_(0.7)


def turn_square(model: Any, name: str) -> None:
    """Square weights in column-major order: the same memory."""
    for parameter in model.get_submodule(name).parameters():
        if parameter.ndim == 2 and parameter.shape[0] == parameter.shape[1]:
            parameter.data = parameter.data.T


def prune_part(model: Any, name: str) -> None:
    for part in model.get_submodule(name).modules():
        if type(part._parameters.get("weight")) is nn.Parameter and part.weight.ndim == 2:
            prune.l1_unstructured(part, "weight", 0.5)


def prune_for_good(model: Any, name: str) -> None:
    prune_part(model, name)
    for part in model.get_submodule(name).modules():
        if hasattr(part, "weight_orig"):
            prune.remove(part, "weight")


class Rounded(nn.Module):  # type: ignore[misc]
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return (8 * weight).round() / 8


def quantise(model: Any, name: str) -> None:
    for part in list(model.get_submodule(name).modules()):
        if type(part._parameters.get("weight")) is nn.Parameter and part.weight.ndim == 2:
            parametrize.register_parametrization(part, "weight", Rounded())


def set_numbers(model: Any, name: str) -> None:
    """Change settings that modules read when they run."""
    for part in model.get_submodule(name).modules():
        for each, value in list(vars(part).items()):
            if type(value) is float and 0 < value < 1:
                setattr(part, each, 1.5 * value)


def set_configuration(model: Any, name: str) -> None:
    for each in ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"):
        if getattr(model.config, each, None) is not None:
            setattr(model.config, each, type(getattr(model.config, each))(3))


def use_eager(model: Any, name: str) -> None:
    model.set_attn_implementation("eager")


def accelerated(model: Any, name: str) -> None:
    accelerate(model)


def restored(model: Any, name: str) -> None:
    restore(model)


Change = Callable[[Any, str], Callable[[], None] | None]
CHANGES: list[Change] = [
    *(
        adapt,
        unadapt,
        replace,
        duplicate,
        other_activation,
        hook,
        hook_before,
        hook_all,
        wrap_forward,
        set_forward,
        patch_class,
    ),
    *(change_class, retype, retype_part, train, train_all, move, assign, write, turn_square, prune_part),
    *(prune_for_good, quantise, set_numbers, set_configuration, use_eager),
]


def places(model: Any) -> list[str]:
    """Names of modules inside layers and next to them."""
    return [name for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleList)]


def compared(family: str, changes: Iterable[tuple[Change, int]]) -> None:
    """One model gets all changes, another all except `accelerate` and `restore`."""
    theirs = model_of(family)
    ours, undo = copy.deepcopy(theirs), []
    try:
        for change, place in changes:
            names = places(theirs)
            name = names[place % len(names)]
            after = change(ours, name)
            if after is not None:  # all models get this change
                undo.append(after)
            elif change not in (accelerated, restored):
                change(theirs, name)
            agree(ours, theirs)
    finally:
        for each in reversed(undo):
            each()


PLACES = st.integers(0, 10_000)
SOME = st.lists(st.tuples(st.sampled_from(CHANGES), PLACES), max_size=2)


@given(st.sampled_from(sorted(FAMILIES | ENCODERS)), SOME, SOME, st.booleans(), SOME)
@settings(max_examples=8 * PROFILE.examples)
def test_changes_in_any_order(
    family: str, before: list[Any], after: list[Any], is_restored: bool, last: list[Any]
) -> None:
    """Before and after `accelerate`, and after a second `accelerate` or a `restore`."""
    compared(family, [*before, (accelerated, 0), *after, (restored if is_restored else accelerated, 0), *last])


# Reports of changes


@pytest.mark.parametrize(
    ("change", "name", "left"),
    [
        (adapt, "model.layers.0.mlp.up_proj", {"model.layers.0.mlp": "its parts are others since"}),
        (hook, "model.layers.1.mlp.act_fn", {"model.layers.1.mlp": "act_fn: it has hooks"}),
        (train, "model.layers.1.mlp.act_fn", {"model.layers.1.mlp": "act_fn: it is in training"}),
        (set_forward, "model.norm", {"model.norm": "its forward is another since"}),
        (retype_part, "model.norm", {"model.norm": "its weight is of another dtype since"}),
        (change_class, "model.norm", {"model.norm": "its class has another forward since"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_report_names_modules_changed_since(change: Change, name: str, left: dict[str, str], model: Any) -> None:
    accelerate(model)
    assert not report(model).left_alone
    change(model, name)
    assert report(model).left_alone == left


@pytest.mark.parametrize(
    ("change", "why"),
    [(hook, "a projection has hooks"), (move, "a projection has other weights"), (set_forward, "another forward")],
)
def test_report_says_where_projections_are_separate(change: Change, why: str, model: Any) -> None:
    accelerate(model)
    change(model, "model.layers.0.mlp.up_proj")
    change(model, "model.layers.0.self_attn.v_proj")
    ops = {entry.name: entry.op for entry in report(model).entries}
    assert {name for name, op in ops.items() if why in op} == {"model.layers.0.mlp", "model.layers.0.self_attn"}


def test_undone_changes_are_served_again(model: Any) -> None:
    """Training, a hook, a wrapper around a forward; attributes set on a module stay after `restore`."""
    accelerate(model)
    before = report(model)
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    for change, undo in (
        (mlp.train, mlp.eval),
        (lambda: setattr(mlp, "forward", lambda *args: own(*args)), lambda: setattr(mlp, "forward", own)),
    ):
        change()
        assert "model.layers.0.mlp" in report(model).left_alone
        undo()
        assert report(model) == before
    mine = mlp.forward = lambda *args: own(*args)
    assert vars(restore(model).model.layers[0].mlp)["forward"] is mine


def test_function_of_the_file_replaced_since(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As other packages replace functions in the files of transformers."""
    theirs = copy.deepcopy(model)
    accelerate(model)
    turn = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        transformers.models.llama.modeling_llama, "apply_rotary_pos_emb", lambda q, k, *more: turn(2.0 * q, k, *more)
    )
    agree(model, theirs)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_attention_function_changed_since(name: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.set_attn_implementation(name)
    theirs = copy.deepcopy(model)
    accelerate(model)
    modeling = transformers.models.llama.modeling_llama
    attend = modeling.ALL_ATTENTION_FUNCTIONS.get_interface(name, modeling.eager_attention_forward)

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out, weights = attend(*args, **kwargs)
        return 2 * out, weights

    if name == "sdpa":
        monkeypatch.setitem(modeling.ALL_ATTENTION_FUNCTIONS, "sdpa", doubled)
    else:
        monkeypatch.setattr(modeling, "eager_attention_forward", doubled)
    agree(model, theirs)


# Cached results of a trial


class OfLayer(transformers.models.llama.modeling_llama.LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) / (self.layer_idx + 1) ** 0.5


class Listed(transformers.models.llama.modeling_llama.LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * self.factors[0]


class Private(transformers.models.llama.modeling_llama.LlamaMLP):  # type: ignore[misc]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self._factor


class Buffered(transformers.models.llama.modeling_llama.LlamaMLP):  # type: ignore[misc]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


DIFFERENCES: dict[str, tuple[type, str, Callable[[Any, int], Any]]] = {
    "layer_idx": (OfLayer, "input_layernorm", lambda part, i: setattr(part, "layer_idx", i)),
    "list": (Listed, "input_layernorm", lambda part, i: setattr(part, "factors", [1.0 + i])),
    "private": (Private, "mlp", lambda part, i: setattr(part, "_factor", 1.0 + i)),
    "buffer": (Buffered, "mlp", lambda part, i: part.register_buffer("factor", torch.tensor(1.0 + i))),
    "tensor": (Buffered, "mlp", lambda part, i: setattr(part, "factor", torch.tensor(1.0 + i))),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_modules_that_differ_in_more_than_weights(difference: str, model: Any) -> None:
    """The first layer computes what the op does and the second does not; changed, the first does not either."""
    kind, name, change = DIFFERENCES[difference]
    for i, layer in enumerate(model.model.layers):
        getattr(layer, name).__class__ = kind
        change(getattr(layer, name), i)
    theirs = copy.deepcopy(model)
    agree(accelerate(model), theirs)
    for each in (model, theirs):
        part = getattr(each.model.layers[0], name)
        if difference == "list":
            part.factors[0] = 3.0
        elif difference in ("buffer", "tensor"):
            part.factor.data.fill_(3.0)
        else:
            change(part, 8)
    agree(model, theirs)


# Dtypes and training


def test_generation_under_autocast(model: Any) -> None:
    """transformers serves it with its own cache; a given PagedCache keeps keys and values of two dtypes."""
    theirs = copy.deepcopy(model)
    accelerate(model)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = theirs.generate(TOKENS, **options), model.generate(TOKENS, **options)
        assert torch.equal(found.sequences, expected.sequences)
        assert type(found[CACHE]) is transformers.DynamicCache
        given = model.generate(TOKENS, **{CACHE: PagedCache(model.config)}, **options)
        assert torch.equal(given.sequences, expected.sequences)


def test_dtypes_that_change_after_a_prompt(model: Any) -> None:
    """A prompt under autocast, a step without; the cache is promoted as transformers' cache would be."""
    theirs = copy.deepcopy(model)
    accelerate(model)
    found = []
    for each, past in ((theirs, transformers.DynamicCache(config=theirs.config)), (model, PagedCache(model.config))):
        with torch.no_grad():
            with torch.autocast("cpu", torch.bfloat16):
                each(TOKENS, **{CACHE: past})
            found.append(each(TOKENS[:, :1], **{CACHE: past}).logits)
            found.append(past.layers[0].values[:, :, :6])
    assert found[1].dtype == found[3].dtype == torch.float32
    torch.testing.assert_close(found[2], found[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[3], found[1], rtol=1e-4, atol=1e-4)


def test_dropout_of_an_mlp() -> None:
    """In training mode without gradients, as for Monte Carlo dropout."""
    model = model_of("SeedOss")
    accelerate(model).train()
    x = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert 0.3 < (model.model.layers[0].mlp(x) == 0).float().mean() < 0.7


# Adapters


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("targets", [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"], ["o_proj", "down_proj"]])
def test_adapters_of_peft(targets: list[str], model: Any) -> None:
    """Attached before and afterwards, disabled, removed, merged."""
    peft = pytest.importorskip("peft")

    def adapted(model: Any) -> Any:
        torch.manual_seed(5)
        settings = peft.LoraConfig(r=8, lora_alpha=32, target_modules=targets, init_lora_weights=False)
        return peft.get_peft_model(model, settings).eval()

    plain = copy.deepcopy(model)
    theirs, ours, before = adapted(copy.deepcopy(model)), adapted(accelerate(copy.deepcopy(model))), adapted(model)
    accelerate(before.base_model.model)
    for each in (ours, before):
        agree(each, theirs)
        with each.disable_adapter():
            agree(each, plain)
    merged = theirs.merge_and_unload()
    agree(copy.deepcopy(ours).merge_and_unload(), merged)
    for each in (ours, before):
        agree(each.unload(), plain)


# Compiled


@pytest.mark.slow
def test_compiled_step_notices_changes() -> None:
    """A projection, a forward and a number change after the step is compiled."""
    torch.compiler.reset()
    model = model_of("Llama", num_hidden_layers=1)
    theirs = copy.deepcopy(model)
    compiled = torch.compile(accelerate(model), fullgraph=True, backend="aot_eager")
    for changes in ((), ((replace, "mlp.gate_proj"), (set_forward, "input_layernorm"), (set_numbers, "self_attn"))):
        for change, name in changes:
            for each in (model, theirs):
                change(each, f"model.layers.0.{name}")
        expected = logits(theirs, transformers.DynamicCache(config=theirs.config))
        torch.testing.assert_close(logits(compiled, PagedCache(model.config, 16)), expected, rtol=1e-4, atol=1e-4)
