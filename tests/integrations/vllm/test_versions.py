"""vLLM's namespaces of torch.ops by the schemas of version 0.22, where these differ from 0.16."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._library.simple_registry import singleton
from torch._subclasses import FakeTensorMode

import pyops
from pyops.integrations.vllm import Entry, override, register, table
from pyops.integrations.vllm import library as library_module
from pyops.integrations.vllm.schemas import SCHEMAS_0_22
from pyops.integrations.vllm.table import DEFINED_IN_PYTHON
from pyops.testing import same_bits
from pyops.testing.calls import assert_same, clones, written
from tests.support import axes, fresh
from tests.support.calls import example

CHANGED = {line.partition("(")[0] for text in SCHEMAS_0_22.values() for line in text.split("\n")[1:-1]}
TABLE = table("0.22")
DEFINED = sorted(name for name in CHANGED - DEFINED_IN_PYTHON.keys() if TABLE[name].kernel is not None)
SERVED = [pytest.param(TABLE[name], id=name) for name in DEFINED]


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with register("0.22"):
        yield


def _torch_op(name: str) -> Any:
    name, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, TABLE[name].namespace), name), overload or "default")


def test_unknown_version() -> None:
    for call in (table, register):
        with pytest.raises(pyops.OpError, match=rf"{call.__name__}: vllm: expected 0.16 or 0.22 or 0.33, got 0.17"):
            call("0.17")


def test_newer_table_contains_the_older() -> None:
    older = table()
    assert older.keys() < TABLE.keys()
    assert all(TABLE[name].schema == entry.schema for name, entry in older.items() if name not in CHANGED)
    assert all(TABLE[name].schema != older[name].schema for name in CHANGED & older.keys())


@pytest.mark.parametrize("entry", SERVED)
def test_schema(entry: Entry) -> None:
    """torch has the schema of 0.22 for the op."""
    theirs, ours = torch._C.parse_schema(f"{entry.namespace}::{entry.schema}"), _torch_op(entry.name)._schema
    assert (ours.name, ours.overload_name) == (theirs.name, theirs.overload_name)

    def face(one: Any) -> tuple[Any, ...]:
        return one.name, str(one.type), one.has_default_value(), one.default_value, one.kwarg_only

    for one, other in ((ours.arguments, theirs.arguments), (ours.returns, theirs.returns)):
        assert [face(argument) for argument in one] == [face(argument) for argument in other]


def _args(name: str, **given: Any) -> list[Any]:
    op = pyops.registry[name]
    return example(op, num_tokens=5, **axes.fullest(op) | given)[: op.declaration.positional]


@pytest.mark.parametrize(
    ("name", "more"),
    [("fused_qk_norm_rope", [2]), ("per_token_group_fp8_quant", [False, True]), ("static_scaled_fp8_quant", [])],
)
def test_arguments_without_effect(name: str, more: list[Any]) -> None:
    op, args = pyops.registry[name], _args(name)
    theirs = clones(args)
    right = clones(args)
    op(*right)
    given = [list(one) if isinstance(one, tuple) else one for one in theirs]
    assert _torch_op(name)(*given, *more) is None
    assert_same(op, written(op, right), written(op, theirs))


@pytest.mark.parametrize("is_swizzled", [True, False])
def test_scaled_fp4_quant_in_both_forms(is_swizzled: bool) -> None:
    codes, x, scales, scale, _ = _args("scaled_fp4_quant", is_sf_swizzled_layout=is_swizzled)
    pyops.scaled_fp4_quant(codes, x, scales, scale, is_swizzled)
    found, found_scales = _torch_op("scaled_fp4_quant")(x, scale, is_swizzled)
    assert found_scales.dtype is (torch.int32 if is_swizzled else torch.uint8)
    assert same_bits(found, codes)
    assert same_bits(found_scales.view(torch.uint8), scales.view(torch.uint8))
    output, output_scale = torch.zeros_like(found), torch.zeros_like(found_scales)
    _torch_op("scaled_fp4_quant.out")(x, scale, is_swizzled, output=output, output_scale=output_scale)
    assert same_bits(output, found)
    assert same_bits(output_scale, found_scales)


def test_merge_attn_states() -> None:
    output, *parts, lse, count, scale = _args("merge_attn_states")
    right, right_lse = torch.empty_like(output), torch.empty_like(lse)
    pyops.merge_attn_states(right, *parts, right_lse, count, scale)
    for more in ((count, scale), (count,)):
        given = torch.empty_like(output if len(more) == 2 else parts[0])
        _torch_op("merge_attn_states")(given, lse, *parts, *more)
        assert same_bits(lse, right_lse)
        assert len(more) == 1 or same_bits(given, right)


def test_get_cutlass_moe_mm_data_of_plain_layers() -> None:
    args = _args("get_cutlass_moe_mm_data")[:10]
    right = clones(args)
    pyops.get_cutlass_moe_mm_data(*right, False)
    _torch_op("get_cutlass_moe_mm_data")(*args, False)
    assert all(same_bits(one, other) for one, other in zip(args[1:6], right[1:6], strict=True))


def test_op_is_replaced_by_the_schema_that_torch_has() -> None:
    library = torch.library.Library("_C", "FRAGMENT")
    theirs = TABLE["silu_and_mul"].schema.replace("silu_and_mul", "gelu_quick")
    register("0.22").undo()
    try:
        library.define(TABLE["fused_qk_norm_rope"].schema)
        library.define(theirs.replace("Tensor input", "Tensor input, int more"))
        with override("fused_qk_norm_rope") as replaced:
            assert replaced.names == ("_C::fused_qk_norm_rope",)
        with pytest.raises(pyops.OpError, match="gelu_quick: expected the schema"):
            override("gelu_quick")
    finally:
        library._destroy()
        register("0.22")


def test_selective_scan_fwd_in_chunks() -> None:
    """A first chunk that fills a block is the first block: a continued sequence keeps its states in that block."""
    args = _args("selective_scan_fwd", with_options=True, with_starts=True, with_blocks=True, with_chunks=True)
    right = clones(args)
    pyops.selective_scan_fwd(*right)
    _torch_op("selective_scan_fwd")(*args)
    assert all(same_bits(args[i], right[i]) for i in (1, 6, 12))


@pytest.mark.parametrize("rank", [1, 2])
def test_persistent_topk(rank: int) -> None:
    """The positions of the largest among the first `lengths` elements; -1 after the end of a short row."""
    logits, k = torch.randn(3, 40), 8
    lengths = torch.tensor([40, 5, 20], dtype=torch.int32)
    output, workspace = torch.empty(3, k, dtype=torch.int32), torch.empty(0, dtype=torch.uint8)
    _torch_op("persistent_topk")(logits, lengths.view(-1, 1) if rank == 2 else lengths, output, workspace, k, 40)
    for row, length in enumerate(lengths.tolist()):
        right = logits[row, :length].topk(min(k, length))[1].sort()[0].tolist()
        assert output[row].tolist() == right + [-1] * (k - len(right))
    with pytest.raises(pyops.OpError, match="logits: expected"):
        _torch_op("persistent_topk")(logits[0], lengths, output, workspace, k, 40)
    with pytest.raises(pyops.OpError, match="lengths: expected 3 elements, got 2"):
        _torch_op("persistent_topk")(logits, lengths[:2], output, workspace, k, 40)


def test_insert_op_returns_queries() -> None:
    name = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
    args = example(pyops.registry[name])[:9]  # the flags are those of 0.33
    right = clones(args)
    queries = getattr(pyops, name)(*right)
    assert same_bits(_torch_op(name)(*args), queries)
    assert same_bits(args[2], right[2])
    meta = [one.to("meta") if isinstance(one, torch.Tensor) else one for one in args]
    assert _torch_op(name)(*meta).shape == queries.shape


# Together with vLLM's own definitions.


def test_fake_of_vllms_python_replaces_ours() -> None:
    """torch 2.11 refuses to register a second fake, so ours must not be registered."""
    x, scale = torch.randn(3, 64), torch.ones(1)
    with FakeTensorMode() as mode:
        fakes = mode.from_tensor(x), mode.from_tensor(scale)
        codes, scales = _torch_op("scaled_fp4_quant")(*fakes, False)
        assert (codes.shape, codes.dtype, codes.device.type) == ((3, 32), torch.uint8, "cpu")
        assert (scales.shape, scales.dtype) == ((3, 4), torch.uint8)
        assert _torch_op("gelu_quick")(torch.empty_like(fakes[0]), fakes[0]) is None
    for name in ("scaled_fp4_quant", "gelu_quick"):
        assert singleton.find(f"_C::{name}").fake_impl.kernel is None
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"_C::{name}", "Meta")
    library = torch.library.Library("_C", "FRAGMENT")
    try:
        torch.library.register_fake("_C::scaled_fp4_quant", lambda x, *others: (x, x), lib=library)
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x)
            assert _torch_op("scaled_fp4_quant")(fake, mode.from_tensor(scale), False)[1] is fake
    finally:
        library._destroy()


def test_device_without_kernels_is_refused() -> None:
    """It is not taken for the meta device, on which an op that only writes does nothing."""
    with pytest.raises(NotImplementedError, match="pyops has no kernel for tensors on cpu"):
        library_module._write_nothing(torch.ones(1), [torch.ones(1)])
    library_module._write_nothing(torch.ones(1), other=torch.ones(1, device="meta"))


ALL_REPLACED = """
import torch
from pyops.integrations.vllm import override, table
from pyops.integrations.vllm.library import registered

libraries = {}
inferred = {
    "dispose(int _0) -> ()", "meta_size() -> int _0", "register_buffer(int _0, int[] _1) -> ()",
    "get_graph_buffer_ipc_meta(int _0) -> (int[] _0, int[] _1)", "free_shared_buffer(int _0) -> ()",
    "register_graph_buffers(int _0, int[][] _1, int[][] _2) -> ()", "qr_max_size() -> int _0",
    "allocate_shared_buffer_and_handle(int _0) -> (int _0, Tensor _1)", "qr_destroy(int _0) -> ()",
    "init_custom_qr(int _0, int _1, int? _2) -> int _0", "qr_get_handle(int _0) -> Tensor _0",
}
named = {schema.partition("(")[0]: schema for schema in inferred}
for entry in table("0.22").values():
    library = libraries.setdefault(entry.namespace, torch.library.Library(entry.namespace, "FRAGMENT"))
    library.define(named.get(entry.name, entry.schema))
    if entry.name in named:  # as C++ functions are registered that are given without a schema
        library.impl(entry.name, lambda *args: None, "CompositeImplicitAutograd")
libraries["_C"].define("not_known(Tensor x) -> Tensor")
with override(without=["rms_norm", "scaled_fp4_quant"]) as replaced:
    print(len(table("0.22")) - len(replaced.names), sorted(replaced.left.items()))
    print(torch.ops._C_custom_ar.meta_size() > 0, torch.ops._C_custom_ar.meta_size.default() > 0)
    assert registered.names == ()
with override("scaled_fp4_quant") as replaced:
    print(replaced.names, replaced.left)
"""


@pytest.mark.slow
def test_override_replaces_every_op_that_is_served(tmp_path: Path) -> None:
    """Those of libraries with inferred schemas, too; and it reports the ops of vLLM that it leaves, with reasons."""
    done = fresh.run(tmp_path, ALL_REPLACED, os.environ)
    assert done.returncode == 0, done.stderr
    left = [("_C::not_known", "is no op of vLLM"), ("_C::rms_norm", "was left out")]
    left += [("_C::scaled_fp4_quant", "was left out"), ("_C::scaled_fp4_quant.out", "was left out")]
    assert done.stdout.splitlines() == [
        f"3 {left}",
        "True True",
        "('_C::scaled_fp4_quant', '_C::scaled_fp4_quant.out') {}",
    ]


@pytest.mark.parametrize(
    ("known", "agrees"),
    [
        ("init_custom_qr(int _0, int _1, int? _2) -> int _0", True),
        ("init_custom_qr(int rank, int world_size, int? qr_max_size=None) -> int", True),
        ("init_custom_qr(int rank, int world_size, int? qr_max_size=7) -> int", False),
        ("init_custom_qr(int rank, int world_size) -> int", True),
        ("init_custom_qr(int rank) -> int", False),
        ("init_custom_qr(int rank, int world_size, int? qr_max_size) -> ()", False),
        ("init_custom_qr(int rank, Tensor world_size, int? qr_max_size) -> int", False),
    ],
)
def test_schemas_agree(known: str, agrees: bool) -> None:
    """Every call by the known schema is one by ours: torch leaves out arguments that equal the known defaults."""
    assert library_module._agree(TABLE["init_custom_qr"], torch._C.parse_schema(known)) is agrees
