"""vLLM's namespaces of torch.ops by the schemas of version 0.33, where these differ from 0.22."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pyops
from pyops.integrations.vllm import Entry, override, register, table
from pyops.integrations.vllm import library as library_module
from pyops.integrations.vllm.schemas_0_33 import REMOVED_0_33, SCHEMAS_0_33
from pyops.testing import same_bits
from pyops.testing.calls import assert_same, clones, written
from tests.support import axes, fresh
from tests.support.calls import example

NEWER, OLDER = table("0.33"), table("0.22")
CHANGED = {line.partition("(")[0] for text in SCHEMAS_0_33.values() for line in text.split("\n")[1:-1]} & OLDER.keys()
MISSING = {name for name, entry in NEWER.items() if entry.kernel is None}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with register("0.33"):
        yield


def _torch_op(name: str) -> Any:
    return getattr(getattr(torch.ops, NEWER[name].namespace), name).default


def _args(op: str, **given: Any) -> list[Any]:
    """The positional arguments of the example of `op`."""
    declaration = pyops.registry[op].declaration
    return example(pyops.registry[op], num_tokens=5, **given)[: declaration.positional]


# Tables.


def test_no_op_of_the_older_table_is_lost() -> None:
    """Each op of 0.22 is in the table of 0.33, or is gone there; what both have is served."""
    assert OLDER.keys() - NEWER.keys() == REMOVED_0_33
    assert len(CHANGED) == 21
    assert not MISSING & OLDER.keys()
    assert all(NEWER[name].schema == OLDER[name].schema for name in NEWER.keys() & OLDER.keys() - CHANGED)
    assert all(NEWER[name].schema != OLDER[name].schema for name in CHANGED)


@pytest.mark.parametrize("entry", [pytest.param(NEWER[name], id=name) for name in sorted(CHANGED)])
def test_schema(entry: Entry) -> None:
    """torch has the schema of 0.33 for the op, with its defaults and marks."""
    assert str(_torch_op(entry.name)._schema) == str(torch._C.parse_schema(f"{entry.namespace}::{entry.schema}"))


ALL_REPLACED = """
import logging
import torch
from pyops.integrations.vllm import override, table
from pyops.integrations.vllm.library import registered

class Lines(logging.Handler):
    def emit(self, record):
        print(record.levelname, record.getMessage()[:40])

logging.getLogger("vllm.pyops").addHandler(Lines())
logging.getLogger("vllm.pyops").setLevel(logging.INFO)
libraries = {}
for entry in table("0.33").values():
    library = libraries.setdefault(entry.namespace, torch.library.Library(entry.namespace, "FRAGMENT"))
    library.define(entry.schema)
libraries["_C"].define("not_known(Tensor x) -> Tensor")
with override() as replaced:
    print(sorted(replaced.names))
    print(replaced.left)
libraries["_C"].define("permute_cols(Tensor A, Tensor perm, int more) -> Tensor")
with override() as replaced:
    print(replaced.left["_C::permute_cols"])
"""


def test_override_replaces_every_op_that_is_served(tmp_path: Path) -> None:
    """Every op is replaced or named with the reason; a WARNING tells of a schema that is unknown."""
    done = fresh.run(tmp_path, ALL_REPLACED, os.environ)
    assert done.returncode == 0, done.stderr
    level, names, left, other, reason = (line for line in done.stdout.splitlines() if "ops of vLLM run" not in line)
    qualified = {name: f"{entry.namespace}::{name}" for name, entry in NEWER.items()}
    served = {qualified[name] for name in NEWER.keys() - MISSING}
    assert names == str(sorted(served))
    lacks = "is an op of vLLM that pyops lacks: "
    why = {name: f"it {NEWER[name].ours}" if NEWER[name].ours else "see python -m pyops coverage" for name in MISSING}
    reasons = {qualified[name]: lacks + why[name] for name in MISSING} | {"_C::not_known": "is no op of vLLM"}
    assert left == str(dict(sorted(reasons.items())))
    assert level.startswith("INFO ops left to vLLM: ")
    assert other.startswith("WARNING ops left to vLLM: ")
    assert reason.startswith("expected the schema permute_cols(Tensor A, Tensor perm) -> Tensor, but torch has _C::")


@pytest.mark.parametrize(
    ("vllm", "known", "agrees"),
    [
        # The op takes None as a weight, and schemas of versions to come may pass what it takes.
        ("0.16", "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()", True),
        ("0.33", "rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()", True),
        ("0.33", "rms_norm(Tensor! result, Tensor? input, Tensor weight, float epsilon) -> ()", False),
        ("0.33", "rms_norm(Tensor result, Tensor input, Tensor weight, float epsilon) -> ()", False),
        ("0.33", "rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> Tensor", False),
        ("0.22", "silu_and_mul_with_clamp(Tensor! r, Tensor x, float limit, float alpha=1.0) -> ()", True),
        ("0.22", "silu_and_mul_with_clamp(Tensor! r, Tensor x, float limit, float alpha=2.0) -> ()", False),
        ("0.33", "gptq_shuffle(Tensor! q_weight, Tensor q_perm, int bit) -> ()", False),
        ("0.22", "gptq_shuffle(Tensor! q_weight, int bit) -> ()", False),
    ],
)
def test_op_agrees_with_what_it_takes(vllm: str, known: str, agrees: bool) -> None:
    entry = table(vllm)[known.partition("(")[0]]
    assert library_module._agree(entry, torch._C.parse_schema(f"_C::{known}")) is agrees


def test_named_op_is_replaced() -> None:
    register("0.33").undo()
    library = torch.library.Library("_C", "FRAGMENT")
    try:
        library.define(NEWER["gptq_shuffle"].schema)
        with override("gptq_shuffle") as replaced:
            assert replaced.names == ("_C::gptq_shuffle",)
    finally:
        library._destroy()
        register("0.33")


# Calls, compared with those by the schemas of 0.22.


def test_norms_without_weight() -> None:
    x, residual = torch.randn(3, 64), torch.randn(3, 64)
    out, right = torch.empty_like(x), torch.nn.functional.rms_norm(x, (64,), None, 1e-5)
    _torch_op("rms_norm")(out, x, None, 1e-5)
    torch.testing.assert_close(out, right)
    total, y, kept = x + residual, x.clone(), residual.clone()
    _torch_op("fused_add_rms_norm")(y, kept, None, 1e-5)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(total, (64,), None, 1e-5))
    assert same_bits(kept, total)


# {op: the places of its arguments among those of the op here, without the trailing ones that are new}
_REORDERED: dict[str, list[int]] = {
    "gptq_gemm": [0, 1, 2, 3, 5, 6, 7],
    "gptq_marlin_repack": [0, 2, 3, 4, 5],
    "dsv3_fused_a_gemm": [0, 1, 2],
    "reshape_and_cache": [*range(8)],
    "concat_and_cache_mla": [*range(6)],
    "silu_and_mul_with_clamp": [0, 1, 2],
    "moe_sum": [0, 1],
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": [*range(9)],
}


@pytest.mark.parametrize("name", _REORDERED)
def test_equals_the_older_op(name: str) -> None:
    op, args = pyops.registry[name], _args(name)
    right = clones(args)
    kernel = OLDER[name].kernel
    assert kernel is not None
    expected = kernel(*right[: OLDER[name].schema.count(",") + 1])
    given = clones(args)
    result = _torch_op(name)(*(given[i] for i in _REORDERED[name]))
    assert (result is None) == (expected is None)
    assert result is None or same_bits(result, expected)
    rest = [None] * (len(op.parameters) - len(args))
    assert_same(op, written(op, [*right, *rest]), written(op, [*given, *rest]))


def test_gptq_shuffle_keeps_the_order_of_rows() -> None:
    weight = torch.randint(-(2**31), 2**31 - 1, (16, 64), dtype=torch.int32)
    right, given = weight.clone(), weight.clone()
    pyops.gptq_shuffle(right, torch.arange(128, dtype=torch.int32), 4)
    _torch_op("gptq_shuffle")(given, 4)
    assert same_bits(given, right)
    assert not same_bits(given, weight)


def test_marlin_without_act_order() -> None:
    *args, c = example(pyops.registry["marlin_gemm"])
    a, b_q_weight, b_bias, b_scales, a_scales, global_scale, b_zeros, _, _, _, b_type, m, n, k, _, *flags = args
    weight = b_q_weight, b_bias, b_scales, a_scales, global_scale, b_zeros
    workspace = torch.zeros(1, dtype=torch.int32)
    older, newer = OLDER["marlin_gemm"].kernel, _torch_op("marlin_gemm")
    assert older is not None
    right = older(a, None, *weight, None, None, workspace, b_type, m, n, k, True, *flags)
    assert same_bits(newer(a, None, *weight, workspace, b_type, m, n, k, *flags), right)
    assert newer(a, c, *weight, workspace, b_type, m, n, k, *flags) is c
    assert same_bits(c, right)


def test_marlin_experts_without_act_order() -> None:
    args = example(pyops.registry["moe_wna16_marlin_gemm"])
    args[10] = torch.zeros(1, dtype=torch.int32)
    older, newer = OLDER["moe_wna16_marlin_gemm"].kernel, _torch_op("moe_wna16_marlin_gemm")
    assert older is not None
    a, c, *others = clones(args)
    right = older(a, c, *others)
    a, c, *others = clones(args)
    without = *others[:6], *others[8:20], *others[21:]
    assert newer(a, c, *without) is c
    assert same_bits(c, right)
    assert same_bits(newer(a, None, *without), right)


def test_concat_and_cache_mla_with_a_scale_that_is_skipped() -> None:
    args = _args("concat_and_cache_mla", kv_cache_dtype="fp8")
    ones, other = clones(args), clones(args)
    ones[5] = torch.ones(1)
    pyops.concat_and_cache_mla(*ones)
    _torch_op("concat_and_cache_mla")(*other, True)
    assert same_bits(other[2], ones[2])
    assert not same_bits(other[2], args[2])


def test_clamp_with_slope_and_offset() -> None:
    x, out = torch.randn(3, 64), torch.empty(3, 32)
    _torch_op("silu_and_mul_with_clamp")(out, x, 0.5, 1.702, 1.0)
    g, u = x[:, :32].clamp(max=0.5), x[:, 32:].clamp(-0.5, 0.5)
    torch.testing.assert_close(out, g * torch.sigmoid(1.702 * g) * (u + 1))


@pytest.mark.parametrize("first", [None, [2, 0]])
def test_gather_of_sequences_without_lengths(first: list[int] | None) -> None:
    cache, _, table_, _, _, _, _ = _args("cp_gather_and_upconvert_fp8_kv_cache")
    table_ = torch.zeros(2, 3, dtype=torch.int32) + torch.arange(2, dtype=torch.int32)[:, None] % len(cache)
    starts, lengths = torch.tensor([1, 3], dtype=torch.int32), torch.tensor([2, 4], dtype=torch.int32)
    positions = None if first is None else torch.tensor(first, dtype=torch.int32)
    right, given = (torch.zeros(7, 576, dtype=torch.bfloat16) for _ in range(2))
    if first is None:
        pyops.cp_gather_and_upconvert_fp8_kv_cache(cache, right, table_, lengths, starts, 2)
    else:  # rows of the same cache, that begin later
        longer = torch.zeros(16, 576, dtype=torch.bfloat16)
        ends = torch.tensor([4, 4], dtype=torch.int32)
        pyops.cp_gather_and_upconvert_fp8_kv_cache(cache, longer, table_, ends, torch.tensor([0, 8]).int(), 2)
        right[1:3], right[3:7] = longer[2:4], longer[8:12]
    _torch_op("cp_gather_and_upconvert_fp8_kv_cache")(cache, given, table_, starts, 2, positions)
    assert same_bits(given, right)
    assert right[1:].any()


def _routed(name: str, *middle: Any) -> tuple[Tensor, Tensor, Tensor]:
    outputs = torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int32), torch.empty(4, 2, dtype=torch.int32)
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    _torch_op(name)(*outputs, logits, True, *middle)
    return outputs


@pytest.mark.parametrize(
    ("name", "middle", "trailing"),
    [
        ("topk_softmax", (None,), ()),
        ("topk_sigmoid", (None, 1.0), ()),
        ("topk_softplus_sqrt", (1.5, None, None, None), ()),
        ("topk_softplus_sqrt", (1.5, None, None, None), (torch.zeros(8),)),  # no effect without a sentinel
        ("topk_softplus_sqrt", (1.5, None, None, None), (None, 5)),
    ],
)
def test_routing(name: str, middle: tuple[Any, ...], trailing: tuple[Any, ...]) -> None:
    padding = torch.tensor([False, True, False, False])
    for is_padding in (None, padding):
        weights, ids, places = _routed(name, *middle, is_padding, *trailing)
        right = torch.empty_like(weights), torch.empty_like(ids), torch.empty_like(places)
        logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
        kernel = OLDER[name].kernel
        assert kernel is not None
        kernel(*right, logits, True, *(middle[:1] if name == "topk_sigmoid" else middle))
        kept = torch.ones(4, dtype=torch.bool) if is_padding is None else ~padding
        for one, other in zip((weights, ids, places), right, strict=True):
            assert same_bits(one[kept], other[kept])
        assert (ids[~kept] == -1).all()
        assert not weights[~kept].any()


def test_routing_with_a_scaling_factor() -> None:
    plain, scaled = _routed("topk_sigmoid", None, 1.0, None)[0], _routed("topk_sigmoid", None, 2.0, None)[0]
    assert same_bits(scaled, 2 * plain)


def test_cooperative_topk() -> None:
    """The positions of the largest among the first `lengths` elements; an error has the op's own name."""
    logits, lengths = torch.randn(3, 40), torch.tensor([40, 5, 20], dtype=torch.int32)
    output, workspace = torch.empty(3, 8, dtype=torch.int32), torch.empty(0, dtype=torch.uint8)
    _torch_op("cooperative_topk")(logits, lengths, output, workspace, 8, 40)
    for row, length in enumerate(lengths.tolist()):
        right = logits[row, :length].topk(min(8, length))[1].sort()[0].tolist()
        assert output[row].tolist() == right + [-1] * (8 - len(right))
    with pytest.raises(pyops.OpError, match=r"^cooperative_topk: lengths: expected 3 elements, got 2"):
        _torch_op("cooperative_topk")(logits, lengths[:2], output, workspace, 8, 40)


def test_sum_of_experts_on_this_device() -> None:
    x, ids = torch.randn(3, 4, 32), torch.tensor([[0, 1, 2, 3], [-1, 3, 3, 1], [2, 2, -1, -1]], dtype=torch.int32)
    expert_map = torch.tensor([-1, 0, -1, 7], dtype=torch.int32)
    for given in (None, expert_map):
        out = torch.empty(3, 32)
        _torch_op("moe_sum")(x, out, ids, given)
        is_here = ids >= 0 if given is None else (ids >= 0) & (expert_map[ids.clamp(min=0).long()] >= 0)
        torch.testing.assert_close(out, (x * is_here[:, :, None]).sum(1))
    with pytest.raises(pyops.OpError, match="moe_sum: topk_ids: expected"):
        _torch_op("moe_sum")(x, torch.empty(3, 32), ids[:2], None)


def test_alignment_with_scatter_indices() -> None:
    args = _args("moe_align_block_size", with_map=True)[:7]
    right, given, scatter_idx = clones(args), clones(args), torch.empty(5, 8, dtype=torch.int32)
    pyops.moe_align_block_size(*right)
    _torch_op("moe_align_block_size")(*given, scatter_idx)
    assert all(same_bits(given[i], right[i]) for i in (3, 4, 5))
    is_here = args[6][args[0].long()] >= 0
    assert same_bits(scatter_idx, torch.arange(40, dtype=torch.int32).view(5, 8).where(is_here, -1))


@pytest.mark.parametrize("name", ["marlin_gemm", "gptq_gemm", "gptq_marlin_repack"])
def test_results_on_meta_tensors(name: str) -> None:
    """The adapters trace without data, as torch.compile asks."""
    args = example(pyops.registry[name])[: pyops.registry[name].declaration.positional]
    meta = [one.to("meta") if isinstance(one, Tensor) else one for one in args]
    if name == "marlin_gemm":
        given = [meta[0], None, *meta[1:7], torch.zeros(1, device="meta"), *meta[10:14], *meta[15:]]
    else:
        given = [meta[i] for i in _REORDERED[name]]
    kernel = OLDER[name].kernel
    assert kernel is not None
    right = example(pyops.registry[name])[-1]
    found = _torch_op(name)(*given)
    assert (found.shape, found.dtype) == (right.shape, right.dtype)


def test_fullest_examples_cover_the_new_arguments() -> None:
    for name in ("topk_softmax", "topk_sigmoid", "topk_softplus_sqrt"):
        assert isinstance(example(pyops.registry[name], **axes.fullest(pyops.registry[name]))[-1], Tensor)
