"""The replacement of ``vllm._custom_ops``, called as vLLM 0.22, 0.16 and older versions call it."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch

import pyops
from pyops.integrations.vllm import adapters, custom_ops
from pyops.integrations.vllm.newer import KEYWORDS
from pyops.testing import same_bits
from pyops.testing.calls import assert_same, clones, written
from tests.support import vllm_signatures
from tests.support.calls import example

THEIRS: dict[str, str] = json.loads(vllm_signatures.TABLE.read_text())["functions"]
# {parameter: value} of defaults that are no literals: their values with no switch of vLLM set
_DEFAULTS = {"envs.VLLM_ROCM_FP8_MFMA_PAGE_ATTN": "False"}


def _parameters(name: str) -> list[inspect.Parameter]:
    text = THEIRS[name]
    for switch, value in _DEFAULTS.items():
        text = text.replace(switch, value)
    return list(inspect.signature(eval(f"lambda {text}: None", {"torch": torch})).parameters.values())


@pytest.mark.parametrize("name", sorted(THEIRS.keys() & set(custom_ops.__all__)))
def test_takes_the_arguments_of_0_22(name: str) -> None:
    """By position and by keyword, with its defaults."""
    ours = list(inspect.signature(getattr(custom_ops, name)).parameters.values())
    theirs = _parameters(name)
    keywords = KEYWORDS.get(name, {})
    assert [p.name for p in ours[: len(theirs)]] == [keywords.get(p.name, p.name) for p in theirs]
    for own, other in zip(ours, theirs, strict=False):
        assert other.default is other.empty or own.default == other.default, other.name
    assert all(p.default is not p.empty for p in ours[len(theirs) :])


@pytest.mark.parametrize("name", sorted(KEYWORDS))
def test_keywords_of_other_versions(name: str) -> None:
    """A call with them equals a call with this library's names."""
    op = pyops.registry[name]
    given = dict(zip((p.name for p in op.parameters), example(op, num_tokens=5), strict=True))
    theirs = {ours: other for other, ours in KEYWORDS[name].items()}
    results = []
    for call, names in ((getattr(pyops, name), {}), (getattr(custom_ops, name), theirs)):
        args = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in given.items()}
        call(**{names.get(key, key): value for key, value in args.items()})
        results.append([value for value in args.values() if isinstance(value, torch.Tensor)])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def _int8_codes(y: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (y / scales.repeat_interleave(64, 1)).round()


@pytest.mark.parametrize("transposed", [False, True])
def test_functions_that_allocate_results(transposed: bool) -> None:
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    codes, scales = custom_ops.silu_and_mul_per_block_quant(x, 64, torch.int8, None, transposed)
    assert scales.stride() == ((1, 5) if transposed else (2, 1))
    y = (torch.nn.functional.silu(x[:, :128]) * x[:, 128:]).float()
    torch.testing.assert_close(scales, y.unflatten(1, (2, 64)).abs().amax(-1) / 127)
    assert (codes - _int8_codes(y, scales)).abs().max() <= 1  # a GEMM times the reciprocal rounds differently

    weight = torch.ones(256, dtype=torch.bfloat16)
    how = {"is_scale_transposed": transposed, "tma_alignment": 4}
    codes, scales = custom_ops.rms_norm_per_block_quant(x, weight, 1e-6, torch.int8, [1, 64], **how)
    plain, right = custom_ops.rms_norm_per_block_quant(x, weight, 1e-6, torch.int8, [1, 64])
    assert scales.stride() == ((1, 8) if transposed else (4, 1))
    assert torch.equal(codes, plain)
    assert torch.equal(scales, right)


def test_padding_rows_are_zeros() -> None:
    x, scale = torch.randn(3, 32, dtype=torch.bfloat16), torch.tensor([20.0])
    wide = torch.zeros(3, 64, dtype=torch.bfloat16)
    wide[:, :32] = x
    for own, right in zip(
        custom_ops.scaled_fp4_quant(x, scale, padded_n=64), custom_ops.scaled_fp4_quant(wide, scale), strict=True
    ):
        assert same_bits(own, right)
    with pytest.raises(pyops.OpError, match="scaled_fp4_quant: padded_n: expected at least 32, got 16"):
        custom_ops.scaled_fp4_quant(x, scale, padded_n=16)


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [("uint4b8", torch.float16, torch.float16), ("float4_e2m1f", torch.uint8, torch.bfloat16)],
)
def test_new_int8_and_fp8_gemms(kind: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    """A row for each choice of an expert; the dtype of the scales, or bfloat16 with power-of-two scales."""
    lists = pyops.moe_align(torch.zeros(2, 3, dtype=torch.int32), 16, 1)
    a, weight = torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.zeros(1, 4, 128, dtype=torch.int32)
    args = (
        a,
        None,
        weight,
        None,
        torch.ones(1, 2, 64).to(dtype),
        torch.ones(2, 1),
        *[None] * 5,
        *lists,
        torch.ones(2, 3),
    )
    options = 16, 3, False, pyops.SCALAR_TYPES[kind], 2, 64, 64, True, False, True, False
    product = custom_ops.moe_wna16_marlin_gemm(*args, *options)
    adapted = adapters.moe_wna16_marlin_gemm(*args, *options[:3], options[3].id, *options[4:], -1, -1, -1)
    for found in (product, adapted):
        assert (found.shape, found.dtype) == ((6, 64), expected)


def test_repacking_of_experts() -> None:
    weight, perm, *sizes = example(pyops.registry["gptq_marlin_repack"], order="permuted")[:5]
    weights = torch.stack([weight, weight.flip(0)])
    perms: Any = torch.stack([perm, perm])
    right = [pyops.gptq_marlin_repack(one, perm, *sizes) for one in weights]
    assert torch.equal(custom_ops.gptq_marlin_moe_repack(weights, perms, *sizes), torch.stack(right))
    weight, *sizes = example(pyops.registry["awq_marlin_repack"])[:4]
    found = custom_ops.awq_marlin_moe_repack(weight[None], perms, *sizes)
    assert torch.equal(found[0], pyops.awq_marlin_repack(weight, *sizes))


@pytest.mark.parametrize("name", ["mxfp4_experts_quant", "silu_and_mul_mxfp4_experts_quant"])
def test_mxfp4_of_experts(name: str) -> None:
    """Allocated fp4 values and scale tiles, with enough rows for any distribution."""
    codes, scales, x, offsets, tiles, experts = example(pyops.registry[name], num_tokens=9, hidden_size=96)
    getattr(pyops, name)(codes, scales, x, offsets, tiles, experts)
    found, found_scales = getattr(custom_ops, name)(x, offsets, tiles, experts, 3)
    assert same_bits(found, codes)
    assert found_scales.shape == (128 + 128 * experts, 4)
    assert same_bits(found_scales[: len(scales)], scales.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("cutlass_fp4_moe_mm", "cutlass_fp4_group_mm"),
        ("cutlass_mxfp4_moe_mm", "cutlass_mxfp4_group_mm"),
        ("cutlass_mxfp8_grouped_mm", "cutlass_mxfp8_grouped_mm"),
        ("mxfp8_experts_quant", "mxfp8_experts_quant"),
    ],
)
def test_functions_of_other_keywords(name: str, op: str) -> None:
    args = example(pyops.registry[op], num_tokens=5)
    right = clones(args)
    pyops.registry[op](*right)
    getattr(custom_ops, name)(**dict(zip((p.name for p in _parameters(name)), args, strict=True)))
    assert_same(pyops.registry[op], written(pyops.registry[op], right), written(pyops.registry[op], args))
