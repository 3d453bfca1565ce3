"""Every op with hostile indices, in calls large enough for the kernels of many tokens.

The op's own `bad_indices` says which values are out of range. The first value that it refuses is the capacity of a
table, cache or list, or the capacity plus one. Kernel and reference both skip or clamp it, and touch nothing outside.
Where the reference leaves an output alone, so do the kernels, bit for bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache, reduce
from typing import Any

import pytest
import torch

import pyops
from pyops import tuning
from pyops._core import config
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops.example import ArgMaker
from pyops.host.run import SCHEDULES, scheduled
from pyops.host.toolchain import toolchains
from pyops.ops.linear import grouped_block_scaled
from pyops.ops.linear.wq_grouped_configs import WqGroupedSm90Config
from pyops.testing.calls import Expected, assert_results, expected, named, replaced, run
from tests.every_op.test_pipelines import watch
from tests.support import axes
from tests.support.calls import example
from tests.support.profiles import PROFILE

pytestmark = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")

# Tokens of a call. Fewer reach the same kernel where a token is a sequence, or a millisecond of work.
TOKENS = 260
FEWER = {"attention": 20, "cache": 40, "linear": 80, "moe": 80, "quantize": 80, "rotary": 40, "sampling": 40}
TOKENS_OF = {
    "attention_varlen": 100,
    "causal_conv1d_decode": 20,
    "convert_vertical_slash_indexes_mergehead": 512,
    "fused_kda_decode": 20,
    "gated_delta_rule": 100,
    "gated_delta_rule_update": 20,
    "kda": 100,
    "kda_update": 20,
    "paged_attention_varlen": 100,
    "selective_state_update": 20,
    "skinny_qkv_rope_cache": 6,
    "sm100_cutlass_mla_decode": 6,
}
SIZES = {"hidden_size": 256, "vocab_size": 1000}
# `axes.fullest` leaves out the wanted index for these ops.
AXES: dict[str, axes.Axes] = {
    "gated_delta_rule": {"options": False},
    "gptq_gemm": {"order": "permuted"},
    "gptq_marlin_repack": {"order": "permuted"},
}
# Ops with separate kernels for few and many tokens -> the kernel for many.
LARGE = {
    "gated_delta_rule": "mamba/gated_delta_chunk.cu",
    "gptq_gemm": "linear/gemm_sm90_swap_ab.cu",
    "kda": "mamba/kda_chunk.cu",
    "lora_expand": "linear/lora_mma.cu",
    "mamba_chunk_scan_varlen": "mamba/chunk_scan_pass.cu",
    "marlin_gemm": "linear/gemm_sm90.cu",
}
# Ops that run one kernel in this module, because the choice takes others for such small weights.
FORCED = dict.fromkeys(
    ("cutlass_fp4_group_mm", "cutlass_mxfp4_group_mm", "cutlass_mxfp8_grouped_mm", "grouped_gemm_packed"),
    WqGroupedSm90Config(16, 256, 64),
)
# Offsets at which sequences or experts begin. A wrong offset within range makes two of them overlap, so only values out
# of range are hostile here.
STARTS = ("cu_chunk_seqlens", "cu_num_draft_tokens", "cu_seq_lens", "cu_seqlens", "cu_seqlens_k", "cu_seqlens_q")
STARTS += ("input_offset_by_experts", "query_start_loc")
# Sequences and experts that overlap by such values: their documentation leaves open which results win.
SHARED = {("causal_conv1d_decode", "query_start_loc"), ("causal_conv1d_prefill", "query_start_loc")}
SHARED |= {(name, "problem_sizes") for name in pyops.registry if name.endswith(("group_mm", "grouped_mm", "moe_mm"))}
# By their documentation, unsorted starts may leave rows of other sequences alone.
LEFT = {(name, "cu_seqlens_q") for name in ("attention_varlen", "paged_attention_varlen")}
LEFT |= {("compress_kv", "query_start_loc"), ("lora_expand", "order"), ("lora_shrink", "order")}
# Tokens read states that have decayed until they change no bit of the reference's results, though bits of the kernels'.
FADING = ("mamba_chunk_scan_varlen",)
# A tile of tokens ends where a state is wanted, and other tiles round differently.
TILED = {("kda", "checkpoint_offsets")}
LEAST, MOST = -(2**31), 2**31 - 1


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(grouped_block_scaled, "block_size_for", lambda *_: 16)
    with ExitStack() as stack:
        for name, one in FORCED.items():
            pyops.registry[name].forget()
            stack.callback(pyops.registry[name].forget)
            stack.enter_context(tuning.forced(name, one))
        stack.enter_context(config.cpu("kernels"))
        stack.enter_context(scheduled(SCHEDULES[1], seconds=30.0))
        yield


def case_of(op: Op, **more: Any) -> axes.Axes:
    """Every option switched on, and many tokens of few elements."""
    family = op.reference.__module__.split(".")[2]
    assert op.example is not None
    sizes = {axis: SIZES[axis] for axis in SIZES if axis in inspect.signature(op.example).parameters}
    tokens = TOKENS_OF.get(op.name, FEWER.get(family, TOKENS))
    return {"num_tokens": tokens, **axes.fullest(op), **sizes, **AXES.get(op.name, {}), **more}


def bad(op: Op, args: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The entries that are out of range or clamped."""
    assert op.bad_indices is not None
    found = op.bad_indices(*args)
    return {n: reduce(torch.logical_or, x.values()) if isinstance(x, dict) else x for n, x in found.items()}


def with_values(op: Op, args: Sequence[Any], name: str, values: dict[int, int]) -> list[Any]:
    """An index tensor with other values at these positions."""
    index = named(op, args)[name].clone()
    for place, value in values.items():
        index.view(-1)[place] = value
    return list(replaced(op, args, **{name: index}))


def is_bad(op: Op, args: Sequence[Any], name: str, place: int, value: int) -> bool:
    return bool(bad(op, with_values(op, args, name, {place: value}))[name].reshape(-1)[place])


def first_refused(op: Op, args: Sequence[Any], name: str, place: int) -> int | None:
    """The smallest larger value that is out of range at this position; None if no 31-bit value is."""
    low, high = int(named(op, args)[name].reshape(-1)[place]), MOST
    if not is_bad(op, args, name, place, high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(op, args, name, place, middle) else (middle, high)
    return high


def tries(op: Op, args: Sequence[Any], name: str) -> list[dict[int, int]]:
    """Hostile values by position, for one call each. The first two calls together have values of every kind."""
    size = named(op, args)[name].numel()
    if name in STARTS:
        middle, last = size // 2, size - 1
        end = first_refused(op, args, name, last)
        assert end is not None
        ends = [{0: LEAST, last: end}, {middle: -1, last: end + 1}]
        return [*ends, {0: -1, last: MOST}, {middle: end}, {middle: MOST}, {middle: LEAST}]
    # Ten used positions; at most half of them are out of range at a time. Positions take the values in turn.
    spread = sorted({i * size // 10 for i in range(10)} | {size - 1})
    *others, last = [at for at in spread if any(is_bad(op, args, name, at, value) for value in (MOST, LEAST))]
    end = first_refused(op, args, name, last)
    found = [{}, {}, {last: MOST}] if end is None else [{last: end}, {last: end + 1}, {last: MOST}]
    if not others:
        return [*filter(None, found), {last: -1}, {last: LEAST}]
    for i, at in enumerate(others[: max(1, size // 2 - 1)]):
        for turn, values in enumerate(found):
            values[at] = (MOST, -1, LEAST)[(i + turn) % 3]
    return found


CASES = [
    pytest.param(op, index, id=f"{name}-{index}")
    for name, op in pyops.registry.items()
    if op.bad_indices is not None
    for index in bad(op, example(op, **case_of(op)))
]


@cache
def within_range(op: Op) -> tuple[list[Any], Expected, dict[str, torch.Tensor]]:
    """The arguments of a call, with the results of its reference and of its kernels: the same for every index."""
    args = example(op, **case_of(op))
    op.forget()
    with pytest.MonkeyPatch.context() as patch:
        seen = watch(patch)
        clean, left = expected(op, args), run(op, args)
    assert LARGE.get(op.name) in {None, *seen}, "another kernel was launched"
    assert op.name not in FORCED or "linear/wq_grouped_gemm_sm90.cu" in seen
    return args, clean, left


@pytest.mark.rotates
@pytest.mark.parametrize(("op", "index"), CASES)
def test_hostile_indices_among_many_tokens(op: Op, index: str) -> None:
    args, clean, left = within_range(op)
    for values in tries(op, args, index)[: PROFILE.hostile]:
        call = with_values(op, args, index, values)
        right = expected(op, call)
        try:
            results = run(op, call)
        except pyops.KernelFault as fault:
            if fault.kind != "global memory race" or (op.name, index) not in SHARED:
                raise
            continue
        if (op.name, index) in LEFT:
            right |= {name: kept(right[name], results[name], named(op, call)[name]) for name in right}
        assert_results(op, right, results)
        if op.name in FADING or (op.name, index) in TILED:
            continue
        for output, value in right.items():
            same = rows(value) == rows(clean[output])
            at = same.flatten(1).all(1)
            assert torch.equal(rows(results[output])[at], rows(left[output])[at]), f"{output}, {index}: {values}"


def rows(value: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, with a last dimension of one element."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.contiguous().view(words[value.element_size()])[..., None]


def kept(right: torch.Tensor, result: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """`right`, with the values of `before` where the result has them."""
    return torch.where((rows(result) == rows(before))[..., 0], result, right)


def test_kernels_for_few_tokens_are_listed() -> None:
    """An op that launches other kernels for one token has an entry in LARGE."""
    make = ArgMaker(device.host())
    for op in {case.values[0] for case in CASES}:
        assert isinstance(op, Op)
        assert op.example is not None
        many, one = (
            {launch.specialisation.kernel.file for launch in op.launches(*op.example(make, **case_of(op, **few)))}
            for few in ({}, {"num_tokens": 1})
        )
        assert op.name in LARGE or one == many, op.name
        assert op.name not in LARGE or LARGE[op.name] in many - one, op.name
