"""RoPE as modules: angles against transformers, rotations against complex numbers in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import log, sqrt
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2_vl import modeling_qwen2_vl

from pyops import nn as layers
from pyops import testing
from pyops.host.toolchain import toolchains
from pyops.nn.custom_op import set_custom_ops
from pyops.ops.rotary import tables as rope_tables
from tests.support.layers import DTYPES, of_all_methods

Tensor = torch.Tensor
MAX = 64


def turned(x: Tensor, angles: Tensor, is_neox: bool) -> Tensor:
    """Rotate the first pairs of x [..., heads, head_size] by angles [..., pairs], as complex numbers in float64."""
    x, pairs = x.double(), angles.shape[-1]
    part, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    real, imaginary = part.chunk(2, -1) if is_neox else (part[..., ::2], part[..., 1::2])
    number = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[..., None, :]
    parts = number.real, number.imag
    part = torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)
    return torch.cat((part, rest), -1)


def angles_of(positions: Tensor, rotary_dim: int, base: float = 10000.0) -> Tensor:
    return positions.double()[..., None] * base ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)


TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # for angles and numbers of a few units


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [16, 6])
def test_rotary_embedding(dtype: torch.dtype, is_neox: bool, rotary_dim: int) -> None:
    """In all shapes of queries and keys: slices of a projection, padded heads, one head of many, none."""
    layer = layers.RotaryEmbedding(16, rotary_dim, MAX, 10000.0, is_neox, dtype)
    assert layer.cos_sin_cache.shape == (MAX, rotary_dim)
    assert layer.cos_sin_cache.dtype == dtype
    assert not layer.state_dict()
    projected = torch.randn(2, 5, 3 * 4 * 16).to(dtype)
    query, key, _ = projected.split(4 * 16, -1)
    padded = torch.randn(2, 5, 3, 24).to(dtype)[..., :16]
    positions = torch.randint(MAX, (2, 5))
    for q, k in (
        (query, key),
        (query.unflatten(-1, (-1, 16)), key[..., :32].unflatten(-1, (-1, 16))),
        (padded, key[..., :48]),
        (query[..., :16], None),
    ):
        for p in (positions, positions.flatten(), positions[:, :1].expand(2, 5), positions.int()):
            pair = [None if x is None else x.flatten(0, 1) if p.ndim == 1 else x for x in (q, k)]
            results = of_all_methods(layer, p, *pair)
            for x, result in zip(pair, results, strict=True):
                if x is None:
                    assert result is None
                    continue
                assert result.shape == x.shape
                heads = x.reshape(*p.shape, -1, 16)
                expected = turned(heads, angles_of(p, rotary_dim), is_neox).view(x.shape)
                torch.testing.assert_close(result.double(), expected, rtol=0.0, atol=TOLERANCE[dtype])


def test_kernels_rotate_in_place() -> None:
    layer = layers.RotaryEmbedding(8, 8, MAX, 1e4, True, torch.float32)
    positions, query, key = torch.arange(3), torch.randn(3, 16), torch.randn(3, 8)
    q, k = layer.forward_cuda(positions, query, key)
    assert q is query
    assert k is key
    assert layer.forward_cuda(positions, query[:, :8])[1] is None


def test_offsets_no_tokens_and_dtypes() -> None:
    layer = layers.RotaryEmbedding(8, 8, MAX, 1e4, True, torch.bfloat16)
    positions, query, key = torch.arange(3), torch.randn(3, 16), torch.randn(3, 8)
    moved = of_all_methods(layer, positions, query, key, torch.tensor([4, 0, 9]))
    plain = of_all_methods(layer, torch.tensor([4, 1, 11]), query, key)
    assert all(testing.same_bits(*pair) for pair in zip(moved, plain, strict=True))
    # The table was cast to the dtype of the queries.
    assert layer.cos_sin_cache.dtype == torch.float32
    empty = of_all_methods(layer, positions[:0], query[:0], key[:0])
    assert [x.shape for x in empty] == [(0, 16), (0, 8)]


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
FACTORS = [1.0 + j / 4 for j in range(8)]
SCALED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0, "max_trained_positions": 128},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn of few turns": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8,
        "beta_slow": 2,
        "truncate": False,
    },
    "deepseek_yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
    },
    "longrope": {
        "short_factor": FACTORS,
        "long_factor": [2 * factor for factor in FACTORS],
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_angles_match_transformers(name: str) -> None:
    """At all positions of the table, which are those that the model may use."""
    kind = name.split()[0]
    parameters = {"rope_type": kind, "rope_theta": 500000.0} | SCALED[name]
    layer: Any = layers.get_rope(16, SIZES["max_position_embeddings"], rope_parameters=parameters)
    theirs = "yarn" if kind == "deepseek_yarn" else kind
    config = transformers.LlamaConfig(**SIZES, rope_parameters=parameters | {"rope_type": theirs})
    if kind == "default":
        inv_freq = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
        mscale = 1.0
    else:
        # transformers takes max_position_embeddings of the configuration as the trained length.
        config.max_position_embeddings = SCALED[name].get("max_trained_positions", 256)
        inv_freq, mscale = ROPE_INIT_FUNCTIONS[theirs](config, "cpu", seq_len=256)
    table = layer.cos_sin_cache
    rows = {"linear": 1024}.get(kind, 256)
    assert table.shape == (rows, 16)
    angles = torch.arange(rows).double()[:, None] * inv_freq.double()
    expected = torch.cat((angles.cos(), angles.sin()), -1) * mscale
    # An angle of a thousand radians is rounded by 2^-15.
    torch.testing.assert_close(table.double(), expected, rtol=0.0, atol=rows * 2**-24 * 4)
    positions, query = torch.randint(rows, (5,)), torch.randn(5, 32)
    of_all_methods(layer, positions, query, query[:, :16])


def test_longrope_of_short_sequences() -> None:
    sizes = (16, 16, 256, 64, 1e4, True, torch.float32)
    layer = layers.Phi3LongRoPEScaledRotaryEmbedding(*sizes, FACTORS, [9.0] * 8, 1.5, 2.5, max_model_len=64)
    assert not layer.use_long_rope
    angles = angles_of(torch.arange(64), 16) / torch.tensor(FACTORS).double()
    torch.testing.assert_close(
        layer.cos_sin_cache.double(), torch.cat((angles.cos(), angles.sin()), -1) * 1.5, rtol=0.0, atol=1e-5
    )
    layer = layers.Phi3LongRoPEScaledRotaryEmbedding(*sizes, FACTORS, [9.0] * 8)
    assert layer.short_mscale == layer.long_mscale == pytest.approx(sqrt(1 + 1 / 3))
    assert layer.cos_sin_cache.shape == (256, 16)


def test_dynamic_scaling_begins_after_the_trained_length() -> None:
    plain: Any = layers.get_rope(16, 64)
    same: Any = layers.get_rope(16, 64, rope_parameters={"rope_type": "dynamic", "factor": 4.0})
    assert torch.equal(same.cos_sin_cache, plain.cos_sin_cache)


def test_absent_table() -> None:
    sizes = 16, 16, 64, 1e4, True, 2.0, torch.float32
    assert layers.DeepseekScalingRotaryEmbedding(*sizes).cos_sin_cache.shape == (128, 16)
    assert not hasattr(layers.DeepseekScalingRotaryEmbedding(*sizes, init_cache=False), "cos_sin_cache")


def test_other_scalings() -> None:
    alpha: Any = layers.get_rope(16, 64, rope_parameters={"rope_type": "dynamic", "alpha": 3.0})
    base = 10000 * 3.0 ** (16 / 14)
    expected = angles_of(torch.arange(64), 16, base).cos()
    torch.testing.assert_close(alpha.cos_sin_cache[:, :8].double(), expected, rtol=0.0, atol=1e-5)
    # As in the author's definition: the base is multiplied, and then all frequencies are divided by the remaining
    # factor.
    fixed: Any = layers.get_rope(16, 64, rope_parameters={"rope_type": "ntk", "factor": 8.0})
    expected = (angles_of(torch.arange(64), 16, 80000.0) / 8.0 ** (1 / 8)).cos()
    torch.testing.assert_close(fixed.cos_sin_cache[:, :8].double(), expected, rtol=0.0, atol=1e-5)
    mixed: Any = layers.get_rope(16, 64, rope_parameters={"rope_type": "ntk", "factor": 8.0, "mixed_b": 0.625})
    shrunk = torch.exp(log(8.0) / 8**0.625 * torch.arange(1, 9).double() ** 0.625)
    torch.testing.assert_close(
        mixed.cos_sin_cache[:, 8:].double(), (angles_of(torch.arange(64), 16) / shrunk).sin(), rtol=0.0, atol=1e-5
    )
    several = layers.LinearScalingRotaryEmbedding(16, 16, 64, 1e4, True, [1.0, 2.0], torch.float32)
    assert several.scaling_factor_to_offset == {1.0: 0, 2.0: 64}
    assert several.cos_sin_cache.shape == (192, 16)
    assert testing.same_bits(several.cos_sin_cache[64::2], several.cos_sin_cache[:64])
    unscaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "apply_yarn_scaling": False}
    layer: Any = layers.get_rope(16, 256, rope_parameters=unscaled | {"attn_factor": 0.5})
    assert layer.cos_sin_cache[0, 0] == 0.5
    partial: Any = layers.get_rope(16, 64, rope_parameters={"partial_rotary_factor": 0.5})
    assert partial.rotary_dim == 8


def _sectioned(positions: Tensor, section: list[int], interleaved: bool) -> Tensor:
    """Angles [num_tokens, pairs], pair by pair, from the rule in words."""
    frequencies = angles_of(torch.ones(()), 2 * sum(section))
    columns = []
    for j in range(sum(section)):
        axis = 0 if j < section[0] else 1 if j < section[0] + section[1] else 2
        if interleaved:
            axis = 1 if j % 3 == 1 and j < 3 * section[1] else 2 if j % 3 == 2 and j < 3 * section[2] else 0
        columns.append(positions[axis].double() * frequencies[j])
    return torch.stack(columns, -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("section", "interleaved"), [([3, 3, 2], False), ([4, 2, 2], True), ([2, 3, 3], True)])
def test_mrope(dtype: torch.dtype, section: list[int], interleaved: bool) -> None:
    for is_neox in (True, False):
        layer = layers.MRotaryEmbedding(16, 16, MAX, 1e4, is_neox, dtype, section, interleaved)
        assert len(layer.cos_sin_cache) == 4 * MAX
        query, key = torch.randn(5, 64).to(dtype), torch.randn(5, 32).to(dtype)
        for positions in (torch.randint(MAX, (3, 5)), torch.randint(MAX, (5,))):
            results = of_all_methods(layer, positions, query, key)
            angles = _sectioned(positions.expand(3, 5), section, interleaved)
            for x, result in zip((query, key), results, strict=True):
                expected = turned(x.unflatten(-1, (-1, 16)), angles, is_neox).flatten(-2)
                torch.testing.assert_close(result.double(), expected, rtol=0.0, atol=TOLERANCE[dtype])


def test_mrope_matches_qwen2_vl() -> None:
    section = [2, 3, 3]
    parameters = {"rope_type": "default", "mrope_section": section, "rope_theta": 1e4}
    config = transformers.Qwen2VLTextConfig(hidden_size=32, num_attention_heads=2, rope_parameters=parameters)
    query, key = torch.randn(1, 2, 5, 16), torch.randn(1, 1, 5, 16)
    positions = torch.randint(MAX, (3, 5))
    cos, sin = modeling_qwen2_vl.Qwen2VLRotaryEmbedding(config)(query, positions[:, None])
    sectioning = getattr(modeling_qwen2_vl, "apply_multimodal_rotary_pos_emb", None)  # in older versions
    if sectioning:
        expected = sectioning(query, key, cos, sin, section)
    else:
        expected = modeling_qwen2_vl.apply_rotary_pos_emb(query, key, cos, sin)
    layer: Any = layers.get_rope(16, MAX, rope_parameters=parameters)
    flat = [x[0].transpose(0, 1).flatten(1) for x in (query, key)]
    for result, other in zip(of_all_methods(layer, positions, *flat), expected, strict=True):
        torch.testing.assert_close(result, other[0].transpose(0, 1).flatten(1), rtol=0.0, atol=1e-5)


def test_mrope_with_yarn() -> None:
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    plain: Any = layers.get_rope(16, 256, rope_parameters=parameters)
    layer: Any = layers.get_rope(16, 256, rope_parameters=parameters | {"mrope_section": [3, 3, 2]})
    assert testing.same_bits(layer.cos_sin_cache, plain.cos_sin_cache)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [16, 6])
def test_dual_chunk(dtype: torch.dtype, is_neox: bool, rotary_dim: int) -> None:
    chunk_size, local_size = 12, 4
    layer = layers.DualChunkRotaryEmbedding(16, rotary_dim, MAX, 1e4, is_neox, dtype, chunk_size, local_size)
    positions, offsets = torch.randint(MAX - 3, (5,)), torch.tensor([0, 1, 2, 3, 0])
    query, key = torch.randn(5, 64).to(dtype), torch.randn(5, 32).to(dtype)
    queries, keys = of_all_methods(layer, positions, query, key, offsets)
    position, length = positions + offsets, chunk_size - local_size
    row = position % length
    ways = [
        row,
        (row + length).clamp(max=chunk_size),
        (torch.full_like(row, length - 1) + length).clamp(max=chunk_size),
    ]
    ways += [row + length, row + chunk_size]
    expected = [turned(query.unflatten(-1, (-1, 16)), angles_of(way, rotary_dim), is_neox).flatten(1) for way in ways]
    torch.testing.assert_close(queries.double(), torch.cat(expected, -1), rtol=0.0, atol=TOLERANCE[dtype])
    expected_keys = turned(key.unflatten(-1, (-1, 16)), angles_of(row, rotary_dim), is_neox).flatten(1)
    torch.testing.assert_close(keys.double(), expected_keys, rtol=0.0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("is_neox", "fp32"), list(product([True, False], repeat=2)))
def test_apply_rotary_emb(dtype: torch.dtype, is_neox: bool, fp32: bool) -> None:
    layer = layers.ApplyRotaryEmb(is_neox_style=is_neox, enable_fp32_compute=fp32)
    angles = torch.rand(5, 4).double() * 6
    cos, sin = angles.cos().float(), angles.sin().float()
    for shape in ((2, 5, 3, 8), (5, 3, 8), (5, 3, 12)):
        x = torch.randn(shape).to(dtype)
        result = of_all_methods(layer, x, cos, sin)
        assert testing.same_bits(result, layers.ApplyRotaryEmb.forward_static(x, cos, sin, is_neox, fp32))
        torch.testing.assert_close(result.double(), turned(x, angles, is_neox), rtol=0.0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("cls", [layers.RotaryEmbedding, layers.MRotaryEmbedding, layers.Llama3RotaryEmbedding])
def test_native_method_stays_native(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any configuration of the op that it consists of."""
    extra = (2.0, 1.0, 4.0, 32) if cls is layers.Llama3RotaryEmbedding else ()
    with set_custom_ops(["all", "+apply_rotary_emb"], platform="cuda"):
        layer = cls(8, 8, MAX, 1e4, True, torch.float32, *extra)
    called = []
    for method in ("forward_native", "forward_cuda"):
        kept = getattr(layers.ApplyRotaryEmb, method)
        monkeypatch.setattr(
            layers.ApplyRotaryEmb,
            method,
            lambda self, *args, kept=kept, method=method: called.append(method) or kept(self, *args),
        )
    layer.forward_native(torch.arange(3), torch.randn(3, 8), torch.randn(3, 8))
    assert called == ["forward_native"] * 2


def test_get_rope_returns_the_same_module() -> None:
    arguments = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "dtype": torch.bfloat16}
    first: Any = layers.get_rope(8, 32, **arguments)
    assert layers.get_rope(8, 32, **arguments) is first
    assert first.cos_sin_cache.dtype == torch.bfloat16
    for other in ({"is_neox_style": False}, {"dtype": torch.float32}, {"rope_parameters": None}):
        assert layers.get_rope(8, 32, **arguments | other) is not first
    config = {"chunk_size": 8, "local_size": 2, "sparse_attention_config": {"a": 1}}
    assert isinstance(layers.get_rope(8, 32, dual_chunk_attention_config=config), layers.DualChunkRotaryEmbedding)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers.get_rope(8, 8, rope_parameters={"rope_type": "new"}), "get_rope: rope_type: new"),
        (lambda: layers.get_rope(8, 8, rope_parameters={"rope_type": "linear"}), "linear needs factor"),
        (lambda: layers.get_rope(8, 8, rope_parameters={"rope_type": "dynamic"}), "dynamic needs factor"),
        (lambda: layers.get_rope(8, 8, rope_parameters={"partial_rotary_factor": 0.0}), "partial_rotary_factor: expec"),
        (lambda: layers.get_rope(8, 8, rope_parameters={"partial_rotary_factor": 1.5}), "partial_rotary_factor: expec"),
        (lambda: layers.get_rope(8, 8, rope_parameters={"use_fope": True}), "use_fope"),
        (lambda: layers.RotaryEmbedding(8, 7, 8, 1e4, True, torch.float32), "RotaryEmbedding: rotary_dim: expected"),
        (lambda: layers.RotaryEmbedding(8, 10, 8, 1e4, True, torch.float32), "RotaryEmbedding: rotary_dim: expected"),
        (
            lambda: layers.MRotaryEmbedding(8, 8, 8, 1e4, True, torch.float32, [1, 1, 1]),
            "MRotaryEmbedding: mrope_section: expected three",
        ),
        (
            lambda: layers.MRotaryEmbedding(8, 8, 8, 1e4, True, torch.float32)(
                torch.zeros(3, 1).long(), torch.zeros(1, 8)
            ),
            "MRotaryEmbedding: positions: expected",
        ),
        (
            lambda: layers.DualChunkRotaryEmbedding(8, 8, 8, 1e4, True, torch.float32, 4, 4),
            "DualChunkRotaryEmbedding: local_size: expected",
        ),
        (
            lambda: layers.Phi3LongRoPEScaledRotaryEmbedding(
                8, 8, 8, 4, 1e4, True, torch.float32, [1.0] * 4, [1.0] * 3
            ),
            "Phi3LongRoPEScaledRotaryEmbedding: long_factor: expected 4 numbers, got 3",
        ),
    ],
)
def test_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_frequencies_of_large_bases() -> None:
    """As exact as float32 allows."""
    exact = 1e7 ** -(torch.arange(0, 128, 2).double() / 128)
    torch.testing.assert_close(rope_tables.frequencies(128, 1e7).double(), exact, rtol=2**-20, atol=0.0)


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
def test_kernels_compute_the_same() -> None:
    positions, query, key = torch.randint(MAX, (3, 5)), torch.randn(5, 32), torch.randn(5, 16)
    for layer, where in (
        (layers.RotaryEmbedding(16, 16, MAX, 1e4, True, torch.float32), positions[0]),
        (layers.MRotaryEmbedding(16, 16, MAX, 1e4, True, torch.float32, [3, 3, 2]), positions),
        (layers.DualChunkRotaryEmbedding(16, 16, MAX, 1e4, True, torch.float32, 12, 4), positions[0]),
    ):
        expected = layer.forward_native(where, query, key)
        with testing.cpu("kernels"):
            result = layer.forward_cuda(where, query.clone(), key.clone())
        torch.testing.assert_close(result, expected, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("axes", [1, 3])
def test_tokens_outside_the_table_are_left_alone(axes: int, dtype: torch.dtype) -> None:
    """Bit for bit, NaN too, for any method, also traced by torch.compile."""
    torch.compiler.reset()
    layer: Any = layers.get_rope(16, MAX, dtype=torch.float32)
    if axes == 3:
        layer = layers.MRotaryEmbedding(16, 16, MAX // 4, 1e4, True, torch.float32, [3, 3, 2])
    assert layer.cos_sin_cache.shape[0] == MAX
    bounds = torch.iinfo(dtype)
    positions = torch.tensor([-1, MAX, bounds.min, bounds.max, 3, MAX - 1, 0], dtype=dtype)
    if axes == 3:  # one position of three is out of range
        positions = torch.stack((positions, torch.full_like(positions, 5), positions.clamp(0, MAX - 1)))
    query, key = torch.randn(7, 32), torch.randn(7, 16)
    query[0, 3], key[1, 5] = torch.nan, -0.0
    compiled = torch.compile(layer.forward_native, fullgraph=True, dynamic=True, backend="aot_eager")
    results = [
        layer.forward_native(positions, query, key),
        layer.forward_cuda(positions, query.clone(), key.clone()),
        compiled(positions, query, key),
    ]
    for result in results:
        for x, turned_x, first in zip((query, key), result, results[0], strict=True):
            assert testing.same_bits(turned_x[:4], x[:4])
            assert not torch.equal(turned_x[4:6], x[4:6])
            assert testing.same_bits(turned_x, first)
