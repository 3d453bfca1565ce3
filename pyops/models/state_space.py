"""State-space layers as ``config.json`` describes them: Mamba, Mamba-2, the gated delta rule, Kimi Delta Attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..ops.mamba._common import MAX_STATES
from ..ops.mamba._convolution import MAX_WIDTH
from .config_values import first, flag, number, refuse, size

_NO_LIMIT = 0.0, float("inf")
# {kind of layer: the sizes that only this kind has}
_HEAD_SIZES = "num_heads", "head_dim", "n_groups"
_SIZES = {"mamba": ("time_step_rank",), "mamba2": _HEAD_SIZES, "delta_rule": _HEAD_SIZES, "kda": _HEAD_SIZES}


@dataclass(frozen=True)
class StateSpace:
    """Sizes and options that all state-space layers of a decoder share.

    Attributes:
        kind: "mamba" (Gu and Dao 2023, arXiv:2312.00752), "mamba2" (Dao and Gu 2024, arXiv:2405.21060), "delta_rule",
            the gated delta rule (Yang et al. 2024, arXiv:2412.06464), or "kda", Kimi Delta Attention (Kimi Team 2025,
            arXiv:2510.26692).
        intermediate_size: channels.
        state_size: state elements per channel; for "delta_rule" and "kda", elements of a key.
        conv_kernel: taps of the convolution.
        conv_bias, proj_bias: whether the convolution, and the projections in and out, have a bias.
        time_step_rank: rank of the projection to time steps; of "mamba".
        num_heads, head_dim: heads and their channels; of "mamba2", "delta_rule" and "kda".
        n_groups: groups of heads that share B and C, and groups of the gated norm, of "mamba2"; groups of heads that
            share a query and a key, of "delta_rule"; `num_heads` of "kda".
        is_by_group: whether a "delta_rule" checkpoint has one projection with rows sorted by group, and not separate
            tensors for all queries, keys, values and gates.
        has_norm: whether "mamba2" normalises its gated output.

    Examples:
        >>> from dataclasses import replace
        >>> mamba2 = StateSpace("mamba2", 128, state_size=16, conv_kernel=4, num_heads=8, head_dim=16, n_groups=1)
        >>> hybrid = replace(config, layer_types=("mamba2", "attention"), state_space=mamba2)
        >>> [tokens] = Engine(Decoder(hybrid).randomise(seed=0)).generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    """

    kind: str
    intermediate_size: int
    state_size: int
    conv_kernel: int
    conv_bias: bool = True
    proj_bias: bool = False
    time_step_rank: int = 0
    num_heads: int = 0
    head_dim: int = 0
    n_groups: int = 0
    is_by_group: bool = False
    has_norm: bool = True

    def __post_init__(self) -> None:
        if self.kind not in _SIZES:
            raise refuse("kind", " or ".join(_SIZES), self.kind)
        for name in ("intermediate_size", "state_size", "conv_kernel", *_SIZES[self.kind]):
            size(name, getattr(self, name))
        if not 2 <= self.conv_kernel <= MAX_WIDTH:
            raise refuse("conv_kernel", f"2 to {MAX_WIDTH} taps", self.conv_kernel)
        if self.state_size > MAX_STATES:
            raise refuse("state_size", f"at most {MAX_STATES} states", self.state_size)
        if self.kind != "mamba" and self.num_heads * self.head_dim != self.intermediate_size:
            expected = f"num_heads * head_dim = {self.num_heads * self.head_dim} channels"
            raise refuse("expand * hidden_size", expected, self.intermediate_size)
        if self.kind != "mamba" and self.num_heads % self.n_groups:
            raise refuse("n_groups", f"a divisor of num_heads={self.num_heads}", self.n_groups)

    @property
    def has_decays(self) -> bool:
        """Whether the layers hold the decays ``A = -exp(A_log)`` and not ``A_log``."""
        return self.kind not in ("delta_rule", "kda")


def parse_mamba(values: dict[str, Any]) -> StateSpace:
    """The layers of a ``MambaForCausalLM``, with the defaults of transformers."""
    hidden_size = size("hidden_size", values.get("hidden_size"))
    rank = first(values.get("time_step_rank"), "auto")
    return StateSpace(
        kind="mamba",
        intermediate_size=_channels(hidden_size, values.get("expand", 2)),
        state_size=size("state_size", values.get("state_size", 16)),
        conv_kernel=size("conv_kernel", values.get("conv_kernel", 4)),
        conv_bias=flag(values, "use_conv_bias", True),
        proj_bias=flag(values, "use_bias"),
        time_step_rank=size("time_step_rank", -(-hidden_size // 16) if rank == "auto" else rank),
    )


def parse_mamba2(values: dict[str, Any]) -> StateSpace:
    """The layers of a ``Mamba2ForCausalLM``, with the defaults of transformers."""
    _refuse_time_step_limit(values)
    return StateSpace(
        kind="mamba2",
        intermediate_size=_channels(size("hidden_size", values.get("hidden_size")), values.get("expand", 2)),
        state_size=size("state_size", values.get("state_size", 128)),
        conv_kernel=size("conv_kernel", values.get("conv_kernel", 4)),
        conv_bias=flag(values, "use_conv_bias", True),
        proj_bias=flag(values, "use_bias"),
        num_heads=size("num_heads", values.get("num_heads", 128)),
        head_dim=size("head_dim", values.get("head_dim", 64)),
        n_groups=size("n_groups", values.get("n_groups", 8)),
    )


def parse_bamba(values: dict[str, Any], channels: int | None = None) -> StateSpace:
    """The state-space layers of a ``BambaForCausalLM``, with the defaults of transformers.

    Args:
        channels: of a layer; None for ``expand * hidden_size``.
    """
    _refuse_time_step_limit(values)
    if channels is None:
        channels = _channels(size("hidden_size", values.get("hidden_size")), values.get("mamba_expand", 2))
    num_heads = size("mamba_n_heads", values.get("mamba_n_heads", 128))
    head_dim = first(values.get("mamba_d_head"), "auto")
    return StateSpace(
        kind="mamba2",
        intermediate_size=channels,
        state_size=size("mamba_d_state", values.get("mamba_d_state", 256)),
        conv_kernel=size("mamba_d_conv", values.get("mamba_d_conv", 4)),
        conv_bias=flag(values, "mamba_conv_bias", True),
        proj_bias=flag(values, "mamba_proj_bias"),
        num_heads=num_heads,
        head_dim=size("mamba_d_head", channels // num_heads if head_dim == "auto" else head_dim),
        n_groups=size("mamba_n_groups", values.get("mamba_n_groups", 1)),
    )


def parse_falcon_h1(values: dict[str, Any]) -> StateSpace:
    """The state-space layers of a ``FalconH1ForCausalLM``: Bamba's, with optional sizes and an optional norm."""
    given, expand = values.get("mamba_d_ssm", 1024), values.get("mamba_expand", 2)
    hidden_size = size("hidden_size", values.get("hidden_size"))
    channels = _channels(hidden_size, expand) if given is None else size("mamba_d_ssm", given)
    has_norm, is_before = flag(values, "mamba_rms_norm"), flag(values, "mamba_norm_before_gate", True)
    if has_norm and is_before:
        raise refuse("mamba_norm_before_gate", "false with mamba_rms_norm", True)
    has_bias = flag(values, "projectors_bias")
    if has_bias != flag(values, "mamba_proj_bias"):
        raise refuse("projectors_bias", "what mamba_proj_bias is", has_bias)
    return replace(parse_bamba(values, channels), has_norm=has_norm)


def parse_nemotron_h(values: dict[str, Any]) -> StateSpace:
    """The state-space layers of a ``NemotronHForCausalLM``, with the defaults of transformers."""
    _refuse_time_step_limit(values)
    num_heads = size("mamba_num_heads", first(values.get("mamba_num_heads"), 128))
    head_dim = size("mamba_head_dim", first(values.get("mamba_head_dim"), 64))
    return StateSpace(
        kind="mamba2",
        intermediate_size=num_heads * head_dim,
        state_size=size("ssm_state_size", first(values.get("ssm_state_size"), 128)),
        conv_kernel=size("conv_kernel", first(values.get("conv_kernel"), 4)),
        conv_bias=flag(values, "use_conv_bias", True),
        proj_bias=flag(values, "use_bias"),
        num_heads=num_heads,
        head_dim=head_dim,
        n_groups=size("n_groups", first(values.get("n_groups"), 8)),
    )


def parse_delta_rule(values: dict[str, Any], is_by_group: bool) -> StateSpace:
    """The linear attention of a Qwen3-Next or Qwen3.5, with the defaults of transformers."""
    sizes = {
        name: size(name, first(values.get(name), default))
        for name, default in (
            ("linear_num_value_heads", 32),
            ("linear_value_head_dim", 128),
            ("linear_num_key_heads", 16),
            ("linear_key_head_dim", 128),
            ("linear_conv_kernel_dim", 4),
        )
    }
    num_heads, head_dim, n_groups, state_size, conv_kernel = sizes.values()
    return StateSpace(
        kind="delta_rule",
        intermediate_size=num_heads * head_dim,
        state_size=state_size,
        conv_kernel=conv_kernel,
        conv_bias=False,
        num_heads=num_heads,
        head_dim=head_dim,
        n_groups=n_groups,
        is_by_group=is_by_group,
    )


def parse_kimi_delta(values: dict[str, Any]) -> StateSpace:
    """The linear attention of a Kimi Linear, with the defaults of transformers.

    The sizes in ``linear_attn_config`` precede those that transformers writes.
    """
    given = kimi_attention(values)
    num_heads, head_dim, conv_kernel = (
        size(name, first(given.get(published), values.get(name), default))
        for name, published, default in (
            ("linear_num_heads", "num_heads", 32),
            ("linear_head_dim", "head_dim", 128),
            ("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
        )
    )
    return StateSpace(
        kind="kda",
        intermediate_size=num_heads * head_dim,
        state_size=head_dim,
        conv_kernel=conv_kernel,
        conv_bias=False,
        num_heads=num_heads,
        head_dim=head_dim,
        n_groups=num_heads,
    )


def kimi_attention(values: dict[str, Any]) -> dict[str, Any]:
    """The object ``linear_attn_config`` of a Kimi Linear; {} if absent."""
    found = first(values.get("linear_attn_config"), {})
    if not isinstance(found, dict):
        raise refuse("linear_attn_config", "an object", found)
    return found


def _channels(hidden_size: int, expand: Any) -> int:
    return size("expand * hidden_size", int(number("expand", expand) * hidden_size))


def _refuse_time_step_limit(values: dict[str, Any]) -> None:
    """ModelError for a time step limit, because transformers applies it in prefill and not in decode."""
    found = first(values.get("time_step_limit"), _NO_LIMIT)
    numbers = [
        float("inf") if each == {"__float__": "Infinity"} else each
        for each in (found if isinstance(found, list | tuple) else [found])
    ]
    if tuple(numbers) != _NO_LIMIT:
        raise refuse("time_step_limit", "0.0 and Infinity", found)
