"""Mixers of state-space models, against transformers and against a float64 loop."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import FalconMambaConfig, Mamba2Config, MambaConfig
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from pyops import nn as layers
from pyops import testing
from pyops.host.toolchain import toolchains
from tests.support.transformers_mamba import GroupedNorm, heed_groups

Tensor = torch.Tensor
NEEDS_COMPILER = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
METHODS = ["forward_native", "forward_cuda"]


def _fill(module: torch.nn.Module) -> None:
    """Random weights, with steps and decays of the magnitude of a trained model."""
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 and "bias" not in name else 0.0, 0.5)


def _load(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Load by the loaders of parameters, as from a checkpoint."""
    weights = {name.replace("A_log", "A"): weight for name, weight in theirs.state_dict().items()}
    assert weights.keys() == ours.state_dict().keys()
    for name, parameter in ours.named_parameters():
        if loader := getattr(parameter, "weight_loader", None):
            loader(parameter, weights[name])
        else:
            parameter.data.copy_(weights[name])


def _mamba(bias: bool = False) -> tuple[layers.MambaMixer, Any]:
    torch.manual_seed(0)
    config = MambaConfig(
        hidden_size=8, state_size=4, conv_kernel=3, expand=2, time_step_rank=3, use_bias=bias, use_conv_bias=not bias
    )
    theirs = MambaMixer(config, 0).eval()
    ours = layers.MambaMixer(8, 4, 3, 16, 3, not bias, bias, use_rms_norm=False)
    _fill(theirs)
    _load(ours, theirs)
    return ours, theirs


def _mamba2(bias: bool = False, n_groups: int = 2) -> tuple[layers.MambaMixer2, Any]:
    torch.manual_seed(0)
    config = Mamba2Config(
        hidden_size=8,
        num_heads=4,
        head_dim=4,
        expand=2,
        state_size=5,
        conv_kernel=3,
        n_groups=n_groups,
        chunk_size=4,
        use_bias=bias,
        use_conv_bias=not bias,
    )
    theirs = Mamba2Mixer(config, 0).eval()
    heed_groups(theirs)
    ours = layers.MambaMixer2(8, 5, 3, 16, not bias, bias, n_groups, 4, 4)
    ours.chunk_size = 4
    _fill(theirs)
    _load(ours, theirs)
    return ours, theirs


PLAMO = {
    "hidden_size": 8,
    "mamba_d_state": 4,
    "mamba_d_conv": 3,
    "mamba_num_heads": 4,
    "hidden_size_per_head": 4,
    "rms_norm_eps": 1e-6,
    "mamba_chunk_size": 4,
}


def _plamo2() -> tuple[layers.Plamo2MambaMixer, Any]:
    torch.manual_seed(0)
    model = SimpleNamespace(hf_config=SimpleNamespace(**PLAMO))
    ours = layers.Plamo2MambaMixer(SimpleNamespace(model_config=model, cache_config=None, quant_config=None))
    _fill(ours)
    with torch.no_grad():
        ours.A.copy_(-torch.exp(ours.A))
    return ours, lambda x: _plamo2_by_loop(ours, x[0].double())[None].float()


def _plamo2_by_loop(layer: layers.Plamo2MambaMixer, hidden: Tensor) -> Tensor:
    """The mixer of PLaMo-2 token by token in float64."""
    weight = {name: value.double() for name, value in layer.state_dict().items()}
    silu, softplus = torch.nn.functional.silu, torch.nn.functional.softplus

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean() + 1e-6) * weight[f"{name}_norm.weight"]

    state, inputs, results = torch.zeros(4, 4, 4, dtype=torch.float64), [torch.zeros(16).double()] * 2, []
    for token in hidden:
        projected = weight["in_proj.weight"] @ token
        inputs.append(projected[16:])
        x = silu((torch.stack(inputs[-3:], 1) * weight["conv1d.weight"][:, 0]).sum(1))
        B, C, dt = (weight["bcdt_proj.weight"] @ x).split([4, 4, 64])
        step = softplus(weight["dt_proj.weight"] @ norm(dt, "dt") + weight["dt_bias"])
        x = x.view(4, 4)
        state = torch.exp(weight["A"] * step)[:, None, None] * state
        state = state + step[:, None, None] * x[..., None] * norm(B, "B")
        y = (state @ norm(C, "C") + weight["D"][:, None] * x).flatten()
        results.append(weight["out_proj.weight"] @ (y * silu(projected[:16])))
    return torch.stack(results)


MIXERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "mamba": _mamba,
    "mamba, biases": lambda: _mamba(True),
    "mamba2": _mamba2,
    "mamba2, biases": lambda: _mamba2(True, 1),
    "plamo2": _plamo2,
}


def _states(ours: Any, num_slots: int) -> tuple[Tensor, Tensor]:
    channels, _, taps = ours.conv1d.weight.shape
    return torch.randn(num_slots, channels, taps - 1), torch.randn(num_slots, *ours.state_shape)


def test_grouped_norm_matches_transformers() -> None:
    """Other tests replace transformers' norm in versions that ignore groups; in the others, the replacement gives
    transformers' result."""
    norm = _mamba2()[1].norm
    if isinstance(norm, GroupedNorm):
        pytest.skip("this version of transformers norms all groups as one")
    x, gate = torch.randn(2, 1, 5, 16)
    ours = GroupedNorm(norm.weight, 2, norm.variance_epsilon)
    torch.testing.assert_close(ours(x, gate), norm(x, gate))
    assert not torch.allclose(ours(x, gate), GroupedNorm(norm.weight, 1, norm.variance_epsilon)(x, gate), rtol=0.01)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MIXERS)
def test_one_prompt(name: str, method: str) -> None:
    ours, theirs = MIXERS[name]()
    for length in (1, 7):
        x = torch.randn(length, 8)
        with torch.no_grad():
            result, expected = getattr(ours, method)(x), theirs(x[None])[0]
            assert expected.abs().max() > 0.1
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
            given = getattr(ours, method)(x, *_states(ours, 1))
            torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MIXERS)
def test_sequences_in_pieces(name: str, method: str) -> None:
    """Sequences in chunks and decode steps, together with others, in any slots: each as if alone in one piece."""
    ours, theirs = MIXERS[name]()
    sequences = [torch.randn(length, 8) for length in (4, 5, 9, 3)]
    slots = torch.tensor([3, 0, 5, 1])
    states = _states(ours, 6)
    untouched = [state[[2, 4]].clone() for state in states]
    done, results = [0] * 4, [[] for _ in sequences]
    with torch.no_grad():
        for num_decodes, step in ((0, [3, 3, 2, 1]), (2, [1, 1, 4, 0]), (0, [0, 1, 1, 1]), (0, [0, 0, 2, 1])):
            parts = [s[at : at + n] for s, at, n in zip(sequences, done, step, strict=True)]
            starts = torch.tensor([0, *step]).cumsum(0)
            initial = torch.tensor([at > 0 for at in done])
            out = getattr(ours, method)(torch.cat(parts), *states, starts, slots, initial, num_decodes)
            for result, part in zip(results, out.split(step), strict=True):
                result.append(part)
            done = [at + n for at, n in zip(done, step, strict=True)]
        assert done == [len(sequence) for sequence in sequences]
        for result, sequence in zip(results, sequences, strict=True):
            torch.testing.assert_close(torch.cat(result), theirs(sequence[None])[0], rtol=1e-5, atol=1e-5)
    for state, before in zip(states, untouched, strict=True):
        assert testing.same_bits(state[[2, 4]], before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MIXERS)
def test_sequence_without_a_slot_writes_no_state(name: str, method: str) -> None:
    ours, _ = MIXERS[name]()
    states = _states(ours, 3)
    before = [state.clone() for state in states]
    none, initial = torch.tensor([-1, -1]), torch.tensor([True, True])
    with torch.no_grad():
        for starts, num_decodes in (([0, 1, 5], 0), ([0, 1, 5], 1), ([0, 1, 2], 2), ([0, 0, 0], 0)):
            x = torch.randn(starts[-1], 8)
            result = getattr(ours, method)(x, *states, torch.tensor(starts), none, initial, num_decodes)
            assert result.shape == x.shape
    for state, kept in zip(states, before, strict=True):
        assert testing.same_bits(state, kept)


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in MIXERS if "biases" not in name])
def test_kernels_compute_the_same(name: str, dtype: torch.dtype) -> None:
    """Prompts and decode steps in one batch, with float32 states."""
    ours = MIXERS[name]()[0].to(dtype)
    ours.A.data = ours.A.data.float()
    conv_state, ssm_state = _states(ours, 4)
    conv_state = conv_state.to(dtype)
    x, starts = torch.randn(9, 8).to(dtype), torch.tensor([0, 1, 2, 9])
    slots, initial = torch.tensor([2, 0, 3]), torch.tensor([True, True, True])
    kernels = conv_state.clone(), ssm_state.clone()
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    with torch.no_grad():
        expected = ours.forward_native(x, conv_state, ssm_state, starts, slots, initial, 2)
        with testing.cpu("kernels"):
            result = ours.forward_cuda(x, *kernels, starts, slots, initial, 2)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(kernels[0], conv_state, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(kernels[1], ssm_state, rtol=tolerance, atol=tolerance)


def test_mamba_with_norms_matches_falcon_mamba() -> None:
    """Norms of time steps, B and C, without weights."""
    torch.manual_seed(0)
    config = FalconMambaConfig(hidden_size=8, state_size=4, conv_kernel=4, expand=2, time_step_rank=3)
    theirs = FalconMambaMixer(config, 0, initialize_mixer_weights=False).eval()
    ours = layers.MambaMixer(
        8, 4, 4, 16, 3, True, False, use_rms_norm=True, rms_norm_has_weight=False, rms_norm_eps=config.mixer_rms_eps
    )
    _fill(theirs)
    _load(ours, theirs)
    x = torch.randn(6, 8)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x[None])[0], rtol=1e-5, atol=1e-5)
    weighted = layers.MambaMixer(8, 4, 4, 16, 3, True, False, use_rms_norm=True).state_dict()
    assert weighted.keys() - ours.state_dict().keys() == {f"{x}_layernorm.weight" for x in ("dt", "b", "c")}


def test_mamba2_without_a_norm() -> None:
    """The gated norm without normalisation: results times weight-free silu of their gates."""
    ours, _ = _mamba2()
    plain = layers.MambaMixer2(8, 5, 3, 16, True, False, 2, 4, 4, use_rms_norm=False)
    plain.load_state_dict({name: value for name, value in ours.state_dict().items() if name != "norm.weight"})
    x = torch.randn(6, 8)
    with torch.no_grad():
        plain.out_proj.weight.copy_(torch.eye(16)[:8])
        ours.out_proj.weight.copy_(torch.eye(16)[:8])
        gated = plain(x)
        ours.norm.weight.fill_(1.0)
        normed = ours(x)
    # A norm scales the first eight elements, one group, by one factor per token.
    factor = normed / gated
    torch.testing.assert_close(factor, factor[:, :1].expand_as(factor), rtol=1e-4, atol=1e-4)


def _call(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: _mamba()[0](*args, **kwargs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layers.MambaMixer(8, 4, 9, 16, 3, True, False, False), "conv_kernel_size: expected 2 to 8, got 9"),
        (
            _call(torch.zeros(2, 8), torch.zeros(1, 16, 3)),
            r"MambaMixer: conv_state: expected shape \(num_slots, 16, 2\)",
        ),
        (
            _call(torch.zeros(2, 8), None, torch.zeros(1, 16, 4).half()),
            r"MambaMixer: ssm_state: expected shape \(num_slots, 16, 4\) of torch.float32, got .* of torch.float16",
        ),
        (
            lambda: layers.MambaMixer2(8, 4, 3, 16, True, False, 1, 4, 8),
            r"MambaMixer2: intermediate_size: expected num_heads \* head_dim = 32, got 16",
        ),
        (
            lambda: layers.MambaMixer2(8, 4, 3, 16, True, False, 3, 4, 4),
            "MambaMixer2: num_heads: expected a multiple of 3, got 4",
        ),
        (_call(torch.zeros(1, 8), num_decodes=1), "MambaMixer: conv_state: expected a tensor where num_decodes"),
        (_call(torch.zeros(2, 8), num_decodes=1), "MambaMixer: num_decodes: expected 0 to 1 sequences of one token"),
        (_call(torch.zeros(0, 8), query_start_loc=torch.tensor([0])), "MambaMixer: query_start_loc: expected at least"),
    ],
)
def test_refused(call: Callable[[], Any], message: str) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        call()


def test_decays_of_a_16_bit_checkpoint_are_exact() -> None:
    """``-exp(A_log)`` is rounded to float32, for any dtype of ``A_log``."""
    layer = layers.MambaMixer(8, 4, 3, 16, 3, True, True, use_rms_norm=False)
    logarithms = torch.linspace(-2.0, 3.0, 64).view(16, 4).bfloat16()
    layer.A.weight_loader(layer.A, logarithms)
    torch.testing.assert_close(layer.A.detach().double(), -logarithms.double().exp(), rtol=2.0**-22, atol=0.0)
