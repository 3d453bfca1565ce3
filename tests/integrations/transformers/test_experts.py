"""Mixtures of experts in transformers' models, served by this library."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pyops.integrations.transformers import accelerate, experts, report, restore
from pyops.integrations.transformers.routers import Router
from pyops.integrations.transformers.trial import Trials

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {"n_routed_experts": 6, "moe_intermediate_size": 32, "num_key_value_heads": 4, "kv_lora_rank": 24}
LATENT |= {"q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral with a window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "qwen3 moe with an MLP": (
        "Qwen3Moe",
        {"num_experts": 6, "moe_intermediate_size": 32, "mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    "deepseek v3 with an MLP": ("DeepseekV3", LATENT | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}),
    "deepseek v2, the best of groups": (
        "DeepseekV2",
        LATENT
        | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.0}
        | {"q_lora_rank": None, "first_k_dense_replace": 0},
    ),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "head_dim": 32, "sliding_window": 9}),
}
CHOICES = {"Mixtral": "topk_softmax", "Qwen3Moe": "topk_softmax", "GptOss": "topk_softmax"}  # else grouped_topk


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one prompt, and for three with left padding; by the op, until the model is restored."""
    family, options = CASES[case]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            parameter.data.normal_(0.0, 0.3)
    calls: list[int] = []

    def counted(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(len(hidden_states))
        return fused(hidden_states, *args, **kwargs)

    fused = experts.fused_experts
    monkeypatch.setattr(experts, "fused_experts", counted)
    tokens = torch.randint(0, 160, (3, 13), generator=torch.Generator().manual_seed(5))
    mask = (torch.arange(13) >= torch.tensor([6, 0, 12])[:, None]).long()
    steps: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}

    def generated() -> list[list[int]]:
        alone = model.generate(tokens[1:2], **steps)
        return alone.tolist() + model.generate(tokens, attention_mask=mask, **steps).tolist()

    before = generated()
    assert not calls
    accelerate(model)
    calls.clear()
    assert generated() == before
    layers = sum(hasattr(layer.mlp, "experts") for layer in model.model.layers)
    assert calls == [13] * layers + [1] * 23 * layers + [39] * layers + [3] * 23 * layers
    assert report(model).replaced[f"{family}Experts"] == layers
    routers = {kind: op for kind, op in report(model).ops.items() if kind.lower() == f"{family}topkrouter".lower()}
    assert list(routers.values()) == [CHOICES.get(family, "grouped_topk")]
    latent = [name for name in report(model).left_alone if name.endswith("self_attn")]
    assert len(latent) == (2 if "deepseek" in case else 0)
    if "v3" in case:
        why = report(model).left_alone[latent[0]]
        assert "PagedCache: expected keys and values of one shape, got (1, 1, 5, 24) and (1, 1, 5, 8)" in why
    if "window" in case:  # the experts do not break a graph
        torch.compiler.reset()  # other tests may have used up the limit of recompiles
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad():
            logits = compiled(tokens, use_cache=False).logits
            torch.testing.assert_close(logits, model(tokens, use_cache=False).logits)
    with torch.enable_grad():
        model(tokens).logits.sum().backward()  # the ops have no gradients
    assert model.model.layers[1].mlp.experts.gate_up_proj.grad.any()
    restore(model)
    calls.clear()
    assert generated() == before
    assert not calls


class ScaledRouter(torch.nn.Module):
    """Logits in the dtype of hidden states; float32 weights: the softmax over all experts times a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.routed_scaling_factor = 2, 2.5
        self.weight = torch.nn.Parameter(torch.randn(6, 32, generator=torch.Generator().manual_seed(1)))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = torch.nn.functional.linear(hidden_states, self.weight)
        weights, ids = torch.softmax(logits.float(), -1).topk(self.top_k)
        return logits, weights * self.routed_scaling_factor, ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_with_a_factor(dtype: torch.dtype) -> None:
    """Without groups of experts: the factor is applied once, and weights are float32 for bfloat16 logits."""
    module = ScaledRouter().to(dtype)
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.no_grad():
        router = Router(module, dtype, Trials())
        logits, weights, ids = router.forward(x)
    assert router.op == "topk_softmax"
    assert (logits.dtype, weights.dtype, ids.dtype) == (dtype, torch.float32, torch.int64)
    exact, places = torch.softmax(logits.double(), -1).topk(2)
    assert torch.equal(ids, places)
    torch.testing.assert_close(weights.double(), 2.5 * exact, rtol=1e-6, atol=0.0)
    weight = module.weight.detach().double()
    product, terms = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    # torch rounds the result, and accumulates 32 products in an order of its own.
    allowed = torch.finfo(dtype).eps * product.abs() + 32 * 2.0**-24 * terms
    assert ((logits.double() - product).abs() <= allowed).all()


def gpt_oss(**options: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.GptOssConfig(**SIZES | {"num_local_experts": 4, "head_dim": 32} | options)
    return transformers.GptOssForCausalLM(config).eval()


def test_transposed_weights_keep_their_shape(tmp_path: Path) -> None:
    """The state dict has the original weights, and so has the model after `restore`; new memory is the module's own."""
    model = gpt_oss()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelerate(model)
    experts_of_one = model.model.layers[0].mlp.experts
    assert experts_of_one.gate_up_proj.mT.is_contiguous()
    model.save_pretrained(tmp_path)
    saved = transformers.GptOssForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
    experts_of_one.down_proj.data = experts_of_one.down_proj.data.contiguous()
    x, ids, weights = torch.randn(5, 64), torch.tensor([[0, 3]] * 5), torch.full((5, 2), 0.5)
    with torch.no_grad():
        assert torch.equal(
            experts_of_one(x, ids, weights), type(experts_of_one).forward(experts_of_one, x, ids, weights)
        )
    restore(model)
    assert all(tensor.is_contiguous() for tensor in model.state_dict().values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_other_formulas_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another limit of gpt-oss's activation; weights that are square roots; another number of results."""
    model, at = gpt_oss(swiglu_limit=3.0), "model.layers.1.mlp"
    router = type(model.model.layers[1].mlp.router)
    original = router.forward
    accelerate(model)
    assert report(model).left_alone[f"{at}.experts"] == "its experts compute something else"
    assert f"{at}.router" not in report(model).left_alone
    for change, why in (
        (lambda logits, weights, ids: (logits, weights.sqrt(), ids), "it chooses experts in another way"),
        (lambda logits, weights, ids: (weights, ids), "it does not return logits, weights and numbers of experts"),
    ):
        restore(model)
        monkeypatch.setattr(router, "forward", lambda self, x, change=change: change(*original(self, x)))
        accelerate(model)
        assert report(model).left_alone[f"{at}.router"] == why


def test_approximate_activation() -> None:
    """It is not taken for the exact one; nor are other shapes of weights, as LongCat's identity experts have."""
    config = transformers.MixtralConfig(**SIZES | {"num_local_experts": 4, "hidden_act": "gelu_pytorch_tanh"})
    model = transformers.MixtralForCausalLM(config).eval()
    accelerate(model)
    at = "model.layers.0.mlp.experts"
    assert report(model).left_alone[at] == "its experts compute something else"
    config.hidden_act = "gelu"
    model = transformers.MixtralForCausalLM(config).eval()
    assert at not in report(accelerate(model)).left_alone
    of_one = model.model.layers[0].mlp.experts
    of_one.gate_up_proj = torch.nn.Parameter(torch.cat((of_one.gate_up_proj, of_one.gate_up_proj[:2])))
    assert report(accelerate(model)).left_alone[at] == "its weights are (6, 192, 64) and (4, 64, 96)"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_logits_on_a_gpu(case: str) -> None:
    """At most twice as far from float32 as the model in bfloat16 was; every token takes all experts."""
    family, options = CASES[case]
    torch.manual_seed(1)
    whole = options | {"num_experts_per_tok": 4, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4}
    groups = {"n_group": 2, "topk_group": 2} if "n_group" in options else {}
    config = getattr(transformers, f"{family}Config")(**SIZES | whole | groups)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().bfloat16().cuda()
    tokens = torch.randint(0, 160, (2, 13), generator=torch.Generator().manual_seed(5)).cuda()
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(tokens).logits
        before = model(tokens).logits.float()
        after = accelerate(model)(tokens).logits.float()
    assert report(model).replaced[f"{family}Experts"]
    assert (after - exact).norm() <= 2 * (before - exact).norm()
