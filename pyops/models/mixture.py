"""Mixtures of experts as ``config.json`` describes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .config_values import first, flag, is_integer, number, refuse, size
from .family import layer_kinds

STACKED = "experts.gate_up_proj", "experts.down_proj"  # names of tensors that hold all experts


@dataclass(frozen=True)
class Mixture:
    """Mixture-of-experts layers: each token is routed to the top-k experts by router score.

    Attributes:
        num_experts, top_k: experts of a layer, and experts per token.
        intermediate_size: channels of an expert.
        renormalize: whether the weights of a token's experts are divided by their sum.
        layers: for each layer, whether it has experts.
        scoring_func: the function from logits to scores: "softmax", "sigmoid" or "sqrtsoftplus".
        num_groups, top_k_groups: groups of experts, and groups from which a token's experts come; 1 for no groups.
        ranks_by_two: whether groups are ranked by the sum of their two best scores, and not by their best score. With
            `has_correction_bias` they always are.
        has_correction_bias: whether experts are ranked by score plus a bias; the bias does not enter their weights.
        routed_scaling_factor: multiplies the weights of experts.
        shared_intermediate_size: channels of the shared expert, which processes every token; 0 for none.
        shared: name of the shared expert in a checkpoint.
        shared_gate: name of the projection to one logit, its gate: ``sigmoid(logit)`` multiplies the output of the
            shared expert; "" for none.
        activation: of an expert, one of those of `pyops.grouped_gemm`.
        limit: the largest gate, and the largest magnitude of the up projection, with "silu"; 0 for none.
        by_token: for each layer, whether a table names the experts of a token by its id; () for none.
        has_bias: whether router and experts have biases.
        router, correction_bias: names of the router and of the bias that ranks experts in a checkpoint.
        is_stacked: whether a checkpoint has the weights of all experts in one tensor, input channels before output.
        joined: names of the tensors in which a checkpoint has gates and ups of all experts, [num_experts, 2 *
            intermediate_size, hidden_size], and their downs; () where experts have tensors of their own, or is_stacked.
        router_in_float32: whether logits are float32, whatever the dtype.
        gate, up, down: names of the projections of an expert in a checkpoint; gate is "" where the activation has none.

    Examples:
        >>> from dataclasses import replace
        >>> mixture = Mixture(8, 2, intermediate_size=32, renormalize=True, layers=(False, True))
        >>> model = Decoder(replace(config, mixture=mixture)).randomise(seed=0)  # the first layer is dense
        >>> sum("experts" in name for name in model.tensors())
        24
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    layers: tuple[bool, ...]
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    scoring_func: str = "softmax"
    num_groups: int = 1
    top_k_groups: int = 1
    ranks_by_two: bool = False
    has_correction_bias: bool = False
    routed_scaling_factor: float = 1.0
    shared_intermediate_size: int = 0
    shared: str = "shared_experts"
    shared_gate: str = ""
    activation: str = "silu"
    has_bias: bool = False
    router: str = "gate"
    correction_bias: str = "gate.e_score_correction_bias"
    is_stacked: bool = False
    joined: tuple[str, ...] = ()
    router_in_float32: bool = False
    limit: float = 0.0
    by_token: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "intermediate_size", "num_groups", "top_k_groups"):
            size(name, getattr(self, name))
        if self.top_k > self.num_experts:
            raise refuse("num_experts_per_tok", f"at most num_experts={self.num_experts}", self.top_k)
        if self.num_experts % self.num_groups or self.top_k_groups > self.num_groups:
            raise refuse("n_group", f"a divisor of {self.num_experts} experts, at least topk_group", self.num_groups)
        if self.top_k > self.top_k_groups * (self.num_experts // self.num_groups):
            raise refuse("topk_group", f"groups with {self.top_k} experts", self.top_k_groups)
        if (self.has_correction_bias or self.ranks_by_two) and self.num_experts < 2 * self.num_groups:
            raise refuse("n_group", f"at most {self.num_experts // 2}, groups of two experts", self.num_groups)

    def of_layer(self, layer: int) -> Mixture:
        """The mixture of a layer: where a table names the experts, none are ranked by a bias."""
        if not self.by_token:
            return self
        by_token = self.by_token[layer]
        return replace(self, by_token=(by_token,), has_correction_bias=self.has_correction_bias and not by_token)


def parse_mixtral(values: dict[str, Any], layers: int) -> Mixture:
    """Mixtral: every layer has experts, of ``intermediate_size`` channels."""
    return Mixture(
        num_experts=first(values.get("num_local_experts"), values.get("num_experts"), 8),
        top_k=first(values.get("num_experts_per_tok"), 2),
        intermediate_size=size("intermediate_size", values.get("intermediate_size")),
        renormalize=True,
        layers=(True,) * layers,
        gate="w1",
        up="w3",
        down="w2",
    )


def parse_minimax_m2(values: dict[str, Any], layers: int) -> Mixture:
    """MiniMax-M2: Mixtral's experts, ranked by sigmoid score plus bias."""
    values = {"num_local_experts": 256, "num_experts_per_tok": 8} | values
    return replace(
        parse_mixtral(values, layers),
        scoring_func="sigmoid",
        has_correction_bias=True,
        correction_bias="e_score_correction_bias",
    )


def parse_qwen3_moe(values: dict[str, Any], layers: int) -> Mixture:
    """Qwen3-MoE: every ``decoder_sparse_step``-th layer has experts, unless ``mlp_only_layers`` lists its index."""
    plain, step = first(values.get("mlp_only_layers"), []), first(values.get("decoder_sparse_step"), 1)
    if not isinstance(plain, list) or not all(is_integer(i) for i in plain):
        raise refuse("mlp_only_layers", "numbers of layers", plain)
    size("decoder_sparse_step", step)
    return Mixture(
        num_experts=first(values.get("num_local_experts"), values.get("num_experts"), 128),
        top_k=first(values.get("num_experts_per_tok"), 8),
        intermediate_size=first(values.get("moe_intermediate_size"), 768),
        renormalize=flag(values, "norm_topk_prob"),
        layers=tuple(i not in plain and (i + 1) % step == 0 for i in range(layers)),
    )


def parse_deepseek_v2(values: dict[str, Any], layers: int) -> Mixture:
    """DeepSeek-V2: softmax scores; experts are chosen from all, or from the best groups."""
    method = first(values.get("topk_method"), "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise refuse("topk_method", "greedy or group_limited_greedy", method)
    if flag(values, "norm_topk_prob"):
        raise refuse("norm_topk_prob", "false", True)
    given = values.get("n_group"), values.get("topk_group")
    groups = given if method == "group_limited_greedy" else (1, 1)
    return Mixture(
        top_k=size("num_experts_per_tok", values.get("num_experts_per_tok")),
        renormalize=False,
        num_groups=size("n_group", groups[0]),
        top_k_groups=size("topk_group", groups[1]),
        **_deepseek(
            values, layers, 1407, {"n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 0}, 1.0
        ),
    )


def parse_deepseek_v3(values: dict[str, Any], layers: int) -> Mixture:
    """DeepSeek-V3: sigmoid scores plus bias; experts of the best groups (arXiv:2412.19437, section 2.1.2)."""
    for name, expected in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if values.get(name) not in (expected, None):
            raise refuse(name, repr(expected), values[name])
    return Mixture(
        top_k=first(values.get("num_experts_per_tok"), 8),
        renormalize=flag(values, "norm_topk_prob", True),
        scoring_func="sigmoid",
        num_groups=first(values.get("n_group"), 8),
        top_k_groups=first(values.get("topk_group"), 4),
        has_correction_bias=True,
        **_deepseek(
            values, layers, 2048, {"n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3}, 2.5
        ),
    )


def parse_mistral4(values: dict[str, Any], layers: int) -> Mixture:
    """Mistral 4: softmax scores; experts of the best groups, which are ranked by the sum of their two best scores."""
    counts = {"n_routed_experts": 128, "n_shared_experts": 1, "first_k_dense_replace": 0}
    return Mixture(
        top_k=first(values.get("num_experts_per_tok"), 4),
        renormalize=flag(values, "norm_topk_prob", True),
        num_groups=size("n_group", first(values.get("n_group"), 1)),
        top_k_groups=size("topk_group", first(values.get("topk_group"), 1)),
        ranks_by_two=True,
        **_deepseek(values, layers, 2048, counts, 1.0) | {"router_in_float32": False},
    )


def parse_deepseek_v4(values: dict[str, Any], layers: int) -> Mixture:
    """DeepSeek-V4: experts ranked by score plus bias, or named by a table of tokens; clamped gates."""
    for name, expected in (("topk_method", "noaux_tc"), ("scoring_func", "sqrtsoftplus"), ("n_shared_experts", 1)):
        if values.get(name) not in (expected, None):
            raise refuse(name, repr(expected), values[name])
    if not flag(values, "norm_topk_prob", True):
        raise refuse("norm_topk_prob", "true", False)
    if values.get("expert_dtype") not in ("fp4", "fp8", None):
        raise refuse("expert_dtype", "'fp4', 'fp8' or null", values["expert_dtype"])
    first_moe = first(values.get("num_hash_layers"), 3)
    if not is_integer(first_moe) or first_moe < 0:
        raise refuse("num_hash_layers", "a number of layers", first_moe)
    kinds = ["hash_moe" if i < first_moe else "moe" for i in range(layers)]
    kinds = layer_kinds(values, kinds, ("hash_moe", "moe"), "mlp_layer_types")
    counts = {"n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 0}
    return Mixture(
        top_k=first(values.get("num_experts_per_tok"), 6),
        renormalize=True,
        scoring_func="sqrtsoftplus",
        has_correction_bias=True,
        correction_bias="gate.bias",
        gate="w1",
        up="w3",
        down="w2",
        limit=number("swiglu_limit", first(values.get("swiglu_limit"), 10.0)),
        by_token=tuple(kind == "hash_moe" for kind in kinds),
        **_deepseek(values, layers, 2048, counts, 1.5),
    )


def _deepseek(
    values: dict[str, Any], layers: int, default_channels: int, defaults: dict[str, int], factor: float
) -> dict[str, Any]:
    """Fields common to DeepSeek-V2, V3 and Mistral 4: the first layer with experts, shared experts, scaling factor."""
    experts, shared, begin = (first(values.get(name), default) for name, default in defaults.items())
    if not is_integer(begin) or begin < 0:
        raise refuse("first_k_dense_replace", "a number of layers", begin)
    if first(values.get("moe_layer_freq"), 1) != 1:
        raise refuse("moe_layer_freq", "1", values["moe_layer_freq"])
    channels = size("moe_intermediate_size", first(values.get("moe_intermediate_size"), default_channels))
    return {
        "num_experts": size("n_routed_experts", experts),
        "intermediate_size": channels,
        "layers": tuple(i >= begin for i in range(layers)),
        "routed_scaling_factor": number("routed_scaling_factor", first(values.get("routed_scaling_factor"), factor)),
        "shared_intermediate_size": channels * size("n_shared_experts", shared),
        "router_in_float32": True,
    }


def parse_gpt_oss(values: dict[str, Any], layers: int) -> Mixture:
    """gpt-oss: biases, a clamped activation, and a softmax over the logits of the chosen experts."""
    for name, expected in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if values.get(name) not in (expected, None):
            raise refuse(name, str(expected), values[name])
    return Mixture(
        num_experts=first(values.get("num_local_experts"), values.get("num_experts"), 128),
        top_k=first(values.get("num_experts_per_tok"), 4),
        intermediate_size=size("intermediate_size", values.get("intermediate_size")),
        renormalize=True,
        layers=(True,) * layers,
        activation="swigluoai",
        has_bias=True,
        router="router",
        is_stacked=True,
    )
