"""vLLM's namespaces of torch.ops and its module `_custom_ops`, implemented by this library."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import pyops
from pyops._core.op import torch_library
from pyops._core.op.op import Op
from pyops._core.system import device as devices
from pyops._core.system.device import Device
from pyops.integrations.vllm import VERSIONS, Entry, custom_ops, override, register, table
from pyops.integrations.vllm.schemas import SCHEMAS, SIGNATURES
from pyops.integrations.vllm.signature import Argument, Signature
from pyops.integrations.vllm.table import DEFINED_IN_PYTHON, declared
from pyops.testing import same_bits
from pyops.testing.calls import assert_same, clones, expected, written
from tests.every_op.test_torch import float8_allclose  # noqa: F401
from tests.support import axes, fresh
from tests.support.calls import example

ROOT = Path(__file__).parents[3]
TABLE = table()
# The entries that `register` defines.
SERVED = [
    pytest.param(entry, id=name)
    for name, entry in TABLE.items()
    if entry.kernel is not None and name not in DEFINED_IN_PYTHON
]
# The entries that an op serves directly, with that op.
OPS = [
    pytest.param(entry, pyops.registry[entry.ours], id=name)
    for entry, name in ((param.values[0], param.id) for param in SERVED)
    if entry.state == "served" and entry.ours in pyops.registry and not pyops.registry[entry.ours].declaration.returned
]


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with register():
        yield


def _torch_op(entry: Entry) -> Any:
    return getattr(getattr(torch.ops, entry.namespace), entry.name).default


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """run(code): the output of a separate process, because the namespaces belong to the whole process."""

    def run(code: str, strict: bool = False) -> str:
        done = fresh.run(tmp_path, code, os.environ, strict=strict)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    return run


# Schemas.


def test_table_is_complete() -> None:
    assert {entry.state for entry in TABLE.values()} == {"served", "adapted"}
    assert {entry.state for entry in table("0.22").values()} == {"served", "adapted"}
    assert {"_C", "_C_cache_ops", "_moe_C", "_C_cuda_utils"} <= {entry.namespace for entry in TABLE.values()}
    for entry in TABLE.values():
        assert (entry.kernel is None) == (entry.state == "missing") == (entry.ours == "")
    assert TABLE["rms_norm"].kernel is pyops.rms_norm, "no Python is between torch and the wrapper"


@pytest.mark.parametrize("entry", SERVED)
def test_schema(entry: Entry) -> None:
    """Its name, and for arguments and results: name, order, type, default and whether it is written."""
    theirs = torch._C.parse_schema(f"{entry.namespace}::{entry.schema}")
    ours = _torch_op(entry)._schema
    assert ours.name == theirs.name == f"{entry.namespace}::{entry.name}"
    assert ours.overload_name == ""

    def face(one: Any) -> tuple[Any, ...]:
        mark = one.alias_info
        written = mark is not None and mark.is_write
        return one.name, str(one.type), one.has_default_value(), one.default_value, one.kwarg_only, written

    assert [face(one) for one in ours.arguments] == [face(one) for one in theirs.arguments]
    assert [face(one) for one in ours.returns] == [face(one) for one in theirs.returns]


def test_schemas_are_parsed_as_torch_parses_them() -> None:
    """Those of vLLM and of every op here, because `coverage` parses them without torch."""
    texts = [entry.schema for vllm in VERSIONS for entry in table(vllm).values()]
    for op in pyops.registry.values():
        texts += [torch_library.schema(op.declaration)]
        texts += [torch_library.returning_schema(op.declaration)] * bool(op.declaration.returned)

    def of_torch(one: Any) -> Argument:
        full, mark = str(one.type).replace("Tuple[int, int]", "(int, int)"), one.alias_info
        is_optional = full.startswith("Optional[")
        name = re.sub(r"Optional\[|List\[|\]", "", full) + "[]" * full.count("List[")
        is_written = mark is not None and mark.is_write
        return Argument(name, is_optional, is_written, one.has_default_value(), one.default_value)

    for text in texts:
        right = torch._C.parse_schema(text)
        signature = Signature.read(text)
        assert signature.arguments == tuple(map(of_torch, right.arguments)), text
        assert signature.results == tuple(of_torch(one).type for one in right.returns), text
        assert Signature.read(str(right)) == signature, "as torch prints it"
    with pytest.raises(ValueError, match="cannot read the argument 'Tensor' of a schema"):
        Signature.read("op(Tensor) -> ()")


@pytest.mark.parametrize(
    ("ours", "theirs", "takes"),
    [
        ("Tensor x", "Tensor y", True),
        ("Tensor? x", "Tensor x", True),
        ("Tensor x", "Tensor? x", False),
        ("int x", "SymInt x", True),
        ("int x", "float x", False),
        ("Tensor[] x", "Tensor x", False),
    ],
)
def test_values_that_arguments_take(ours: str, theirs: str, takes: bool) -> None:
    assert Argument.read(ours).takes(Argument.read(theirs)) is takes


@pytest.mark.parametrize(
    ("name", "mutable"),
    [
        ("rotary_embedding", ["query", "key"]),
        ("fused_add_rms_norm", ["input", "residual"]),
        ("rms_norm", ["result"]),
        ("rms_norm_static_fp8_quant", ["result"]),
        ("fused_add_rms_norm_static_fp8_quant", ["result", "residual"]),
        ("rms_norm_dynamic_per_token_quant", ["result", "scale", "residual"]),
        ("silu_and_mul", ["result"]),
        ("silu_and_mul_quant", ["result"]),
        ("silu_and_mul_nvfp4_quant", ["result", "result_block_scale"]),
        ("fused_qk_norm_rope", ["qkv"]),
        ("merge_attn_states", ["output", "output_lse"]),
        ("reshape_and_cache_flash", ["key_cache", "value_cache"]),
    ],
)
def test_positions_of_written_arguments_match_vllm(name: str, mutable: list[str]) -> None:
    """vLLM's graph passes find results by the position of an argument among the written ones."""
    arguments = _torch_op(TABLE[name])._schema.arguments
    assert [one.name for one in arguments if one.alias_info and one.alias_info.is_write] == mutable


def test_op_with_vllms_name_and_order_is_served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import Tensor

    name = "a_new_op"

    def a_new_op(positions: Tensor, query: Tensor, key: Tensor, head_size: int, is_neox: bool) -> None:
        query.copy_(key)

    schema = "a_new_op(Tensor positions, Tensor! query, Tensor! key, int head_size, bool is_neox) -> ()"
    monkeypatch.setitem(SCHEMAS, "_C", f"{SCHEMAS['_C']}{schema}\n")
    assert table()[name].state == "missing"
    op = pyops.op(inout=("query", "key"))(a_new_op).op
    entry = table()[name]
    assert (entry.state, entry.ours, entry.kernel) == ("served", name, op.call)

    def all_reduce(input: Tensor, output: Tensor) -> None:
        output.copy_(input)

    pyops.op(out="output")(all_reduce)
    assert table()["all_reduce"].state == "missing", "it takes other arguments"


@pytest.mark.parametrize(
    ("arguments", "is_taken"),
    [
        ("Tensor! query, Tensor key, float scale=1.5", True),
        ("Tensor! query, Tensor key, float scale", True),
        ("Tensor! query, Tensor key", True),
        ("Tensor! query, Tensor key, float scale=2.0", False),
        ("Tensor query, Tensor key, float scale=1.5", False),
        ("Tensor! query, Tensor! key, float scale=1.5", False),
        ("Tensor! query", False),
    ],
)
def test_op_has_vllms_arguments_writes_and_defaults(arguments: str, is_taken: bool) -> None:
    from torch import Tensor

    def a_scaled_op(query: Tensor, key: Tensor, scale: float = 1.5) -> None:
        query.copy_(key * scale)

    op = pyops.op(inout=("query",))(a_scaled_op).op
    assert declared(op).takes(Signature.read(f"a_scaled_op({arguments}) -> ()")) is is_taken


def test_function_with_vllms_name_and_arity_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    name, schema = "meta_size", "meta_size() -> int"
    monkeypatch.delattr(pyops, name)
    assert (table()[name].state, table()[name].schema) == ("missing", schema)

    def nothing() -> int:
        return 7

    monkeypatch.setattr(pyops, name, nothing, raising=False)
    entry = table()[name]
    assert (entry.state, entry.ours, entry.kernel) == ("served", name, nothing)
    for other in (lambda one: one, 7):
        monkeypatch.setattr(pyops, name, other)
        assert table()[name].state == "missing"
    assert TABLE["hadacore_transform"].kernel is pyops.hadacore_transform
    assert TABLE["copy_blocks"].kernel is pyops.copy_blocks


def test_no_name_of_vllm_is_left_out() -> None:
    """A name of an op here with other arguments needs an adapter: integrations/vllm/adapters.py."""
    for entry in TABLE.values():
        assert entry.kernel is not None or not callable(getattr(pyops, entry.name, None)), entry.name


# Calls.


def _args(entry: Entry, op: Op, device: str = "cpu") -> tuple[list[Any], list[Any]]:
    """The op's example, as arguments of vLLM's op and of ours."""
    args = example(op, device, num_tokens=5, **axes.fullest(op))
    count = len(_torch_op(entry)._schema.arguments)
    return args[:count], args[:count] + [p.default for p in op.parameters[count:]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("entry", "op"), OPS)
def test_call_by_vllms_name_is_a_call_of_the_op(entry: Entry, op: Op, device: str) -> None:
    theirs, ours = _args(entry, op, device)
    args = clones(theirs)
    assert _torch_op(entry)(*args) is None
    direct = clones(ours)
    op(*direct)
    given = args + ours[len(args) :]
    assert_same(op, written(op, direct), written(op, given))
    if device == "cpu":
        assert_same(op, expected(op, ours), written(op, given))


@pytest.mark.usefixtures("float8_allclose")
@pytest.mark.parametrize(("entry", "op"), OPS)
def test_opcheck(entry: Entry, op: Op) -> None:
    torch.library.opcheck(_torch_op(entry), tuple(_args(entry, op)[0]))


@pytest.mark.parametrize(("entry", "op"), OPS)
def test_meta_tensors(entry: Entry, op: Op) -> None:
    args = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in _args(entry, op)[0]]
    assert _torch_op(entry)(*args) is None


def _example(name: str, **given: Any) -> list[Any]:
    """The arguments that may be positional."""
    return example(pyops.registry[name], num_tokens=5, **given)[: pyops.registry[name].declaration.positional]


def _result(op: Any, args: Sequence[Any], *positions: int) -> list[torch.Tensor]:
    """The tensors that an op of a library writes, by position."""
    args = clones(args)
    op(*args)
    return [args[i] for i in positions]


# For entries that are no op: arguments, positions of written arguments, and all results including the returned one.
Case = tuple[list[Any], list[int], list[torch.Tensor]]


def _merge_attn_states() -> Case:
    output, *parts, output_lse, _, _ = _example("merge_attn_states")
    assert output_lse is not None
    right = _result(pyops.merge_attn_states, [output, *parts, output_lse], 0, 5)
    return [output, output_lse, *parts], [0, 1], right


def _convert_vertical_slash_indexes() -> Case:
    *inputs, block_count, block_offset, column_count, column_index = example(
        pyops.registry["convert_vertical_slash_indexes_mergehead"], num_tokens=5, with_counts=False
    )
    given = [*inputs[:4], *inputs[6:]]
    right = pyops.convert_vertical_slash_indexes(*given)
    return [block_count, block_offset, column_count, column_index, *given], [0, 1, 2, 3], list(right)


def _convert_vertical_slash_indexes_mergehead() -> Case:
    *inputs, block_count, block_offset, column_count, column_index = example(
        pyops.registry["convert_vertical_slash_indexes_mergehead"], num_tokens=5
    )
    right = pyops.convert_vertical_slash_indexes_mergehead(*inputs)
    return [block_count, block_offset, column_count, column_index, *inputs], [0, 1, 2, 3], list(right)


def _paged_attention() -> Case:
    args = _example("paged_attention_rocm")
    return args, [0], _result(pyops.paged_attention_rocm, args, 0)


def _sm100_cutlass_mla_decode() -> Case:
    args = _example("sm100_cutlass_mla_decode")
    return args, [0, 1], _result(pyops.sm100_cutlass_mla_decode, args, 0, 1)


def _selective_scan_fwd() -> Case:
    args = _example("selective_scan_fwd", with_options=True, with_starts=True, with_blocks=True)[:18]
    return args, [1, 6, 12], _result(pyops.selective_scan_fwd, args, 1, 6, 12)


def _awq_dequantize() -> Case:
    args = _example("awq_dequantize")
    return args, [], [pyops.awq_dequantize(*args)]


def _ggml_dequantize() -> Case:
    *args, _ = _example("ggml_dequantize")
    return [*args, torch.bfloat16], [], [pyops.ggml_dequantize(*args, torch.bfloat16)]


def _grouped_topk() -> Case:
    args = _example("grouped_topk")
    return args, [], list(pyops.grouped_topk(*args))


def _hadacore_transform() -> Case:
    _, x = _example("hadacore_transform_out", hidden_size=4, dtype="float32")
    ones = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2.0
    x = x.round()  # sums and halves of these numbers are exact
    return [x, False], [], [x @ ones]


def _get_cutlass_moe_mm_data() -> Case:
    args = _example("get_cutlass_moe_mm_data")[:10]
    places = [1, 2, 3, 4, 5]
    return args, places, _result(pyops.get_cutlass_moe_mm_data, args, *places)


def _moe_lora_align_block_size() -> Case:
    args = _example("moe_lora_align_block_size", with_map=True)
    return args, [7, 8, 9], _result(pyops.moe_lora_align_block_size, args, 7, 8, 9)


def _moe_wna16_gemm() -> Case:
    args = _example("moe_wna16_gemm")
    (right,) = _result(pyops.moe_wna16_gemm, args, 1)
    return args, [1], [right, right.new_empty(0)]


def _permute_cols() -> Case:
    a, perm = _example("permute_cols")
    return [a, perm], [], [a[:, perm.long()]]


def _returned(name: str, **given: Any) -> Case:
    """An op that takes vLLM's arguments and returns a result."""
    args = _example(name, **given)
    returned = getattr(pyops, name)(*args)
    return args, [], list(returned) if isinstance(returned, tuple) else [returned]


def _marlin_gemm() -> Case:
    """c comes second, and is written or allocated."""
    a, *others = _example("marlin_gemm", with_bias=True)
    return [a, None, *others], [], [pyops.marlin_gemm(a, *others)]


def _moe_wna16_marlin_gemm() -> Case:
    """c comes second, and is written or allocated."""
    args = _example("moe_wna16_marlin_gemm", with_bias=True)
    right = _result(pyops.moe_wna16_marlin_gemm, args, 1)
    return [args[0], None, *args[2:]], [], right


def _machete_prepack_B() -> Case:
    weight, _, kind, _ = _example("machete_prepack_B")
    args = [weight, torch.bfloat16, kind, torch.bfloat16]
    return args, [], [pyops.machete_prepack_B(*args)]


def _marlin_int4_fp8_preprocess() -> Case:
    _, weight, zeros = _example("marlin_int4_fp8_preprocess_out", with_zeros=True)
    return [weight, zeros, False], [], [pyops.marlin_int4_fp8_preprocess_out.new(weight, zeros)]


def _cutlass_encode_and_reorder_int4b_grouped() -> Case:
    (weights,) = _example("cutlass_encode_and_reorder_int4b_experts")
    return [weights], [], list(pyops.cutlass_encode_and_reorder_int4b_grouped(weights))


def _copied(cache: torch.Tensor, mapping: torch.Tensor) -> torch.Tensor:
    cache = cache.clone()
    cache[mapping[:, 1]] = cache[mapping[:, 0]]
    return cache


def _copy_blocks() -> Case:
    key, value, mapping = _example("copy_cache_blocks", with_values=True)
    caches = [[key, key + 1], [value, value + 1]]
    return [*caches, mapping], [0, 1], [_copied(cache, mapping) for several in caches for cache in several]


def _copy_blocks_mla() -> Case:
    key, _, mapping = _example("copy_cache_blocks")
    return [[key, key + 1], mapping], [0], [_copied(cache, mapping) for cache in (key, key + 1)]


def _swap_blocks() -> Case:
    source, target = torch.randn(4, 6), torch.zeros(4, 6)
    right = target.clone()
    right[[0, 3]] = source[[2, 1]]
    return [source, target, 24, torch.tensor([[2, 0], [1, 3], [7, 0]])], [1], [right]


CASES: dict[str, Callable[[], Case]] = {
    "LLMM1": partial(_returned, "LLMM1"),
    "cutlass_sparse_compress": partial(_returned, "cutlass_sparse_compress"),
    "wvSplitK": partial(_returned, "wvSplitK", with_bias=True),
    "wvSplitKrc": partial(_returned, "wvSplitKrc"),
    "allspark_w8a16_gemm": partial(_returned, "allspark_w8a16_gemm"),
    "awq_dequantize": _awq_dequantize,
    "awq_gemm": partial(_returned, "awq_gemm"),
    "awq_marlin_repack": partial(_returned, "awq_marlin_repack"),
    "cutlass_encode_and_reorder_int4b": partial(_returned, "cutlass_encode_and_reorder_int4b"),
    "cutlass_encode_and_reorder_int4b_grouped": _cutlass_encode_and_reorder_int4b_grouped,
    "cutlass_pack_scale_fp8": partial(_returned, "cutlass_pack_scale_fp8"),
    "cutlass_w4a8_mm": partial(_returned, "cutlass_w4a8_mm"),
    "convert_vertical_slash_indexes": _convert_vertical_slash_indexes,
    "convert_vertical_slash_indexes_mergehead": _convert_vertical_slash_indexes_mergehead,
    "copy_blocks": _copy_blocks,
    "copy_blocks_mla": _copy_blocks_mla,
    "get_cutlass_moe_mm_data": _get_cutlass_moe_mm_data,
    "ggml_dequantize": _ggml_dequantize,
    "ggml_moe_a8": partial(_returned, "ggml_moe_a8"),
    "ggml_moe_a8_vec": partial(_returned, "ggml_moe_a8_vec"),
    "ggml_mul_mat_a8": partial(_returned, "ggml_mul_mat_a8"),
    "ggml_mul_mat_vec_a8": partial(_returned, "ggml_mul_mat_vec_a8"),
    "gptq_gemm": partial(_returned, "gptq_gemm", order="permuted"),
    "gptq_marlin_24_gemm": partial(_returned, "gptq_marlin_24_gemm"),
    "gptq_marlin_gemm": _marlin_gemm,
    "gptq_marlin_repack": partial(_returned, "gptq_marlin_repack", order="permuted"),
    "grouped_topk": _grouped_topk,
    "hadacore_transform": _hadacore_transform,
    "machete_mm": partial(_returned, "machete_mm"),
    "machete_prepack_B": _machete_prepack_B,
    "marlin_gemm": _marlin_gemm,
    "marlin_int4_fp8_preprocess": _marlin_int4_fp8_preprocess,
    "merge_attn_states": _merge_attn_states,
    "moe_lora_align_block_size": _moe_lora_align_block_size,
    "paged_attention": _paged_attention,
    "moe_wna16_gemm": _moe_wna16_gemm,
    "moe_wna16_marlin_gemm": _moe_wna16_marlin_gemm,
    "permute_cols": _permute_cols,
    "selective_scan_fwd": _selective_scan_fwd,
    "sm100_cutlass_mla_decode": _sm100_cutlass_mla_decode,
    "swap_blocks": _swap_blocks,
}
# What takes no tensors, or none on the CPU: tested below, and in tests/core/test_memory.py.
PREDICATES = {
    "cutlass_group_gemm_supported",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_sparse_scaled_mm_supported",
}
WITHOUT_TENSORS = PREDICATES | {
    "get_device_attribute",
    "get_max_shared_memory_per_block_device_attribute",
    "ggml_moe_get_block_size",
    "machete_supported_schedules",
    "moe_permute_unpermute_supported",
    "sm100_cutlass_mla_get_workspace_size",
}
ON_GPU = {"get_cuda_view_from_cpu_tensor", "weak_ref_tensor"}


def test_every_entry_is_called() -> None:
    tested = {param.id for param in OPS} | CASES.keys() | WITHOUT_TENSORS | ON_GPU
    of_ranks = {entry.name for entry in TABLE.values() if entry.namespace == "_C_custom_ar"}  # tests/ops/collective
    assert {param.id for param in SERVED} == tested | of_ranks


@pytest.mark.parametrize("name", sorted(PREDICATES))
def test_predicates_describe_kernels_of_this_library(name: str) -> None:
    """vLLM's modules call them at import. Only features with a tensor core kernel are supported."""
    has_kernel = name != "cutlass_group_gemm_supported" or "cutlass_moe_mm" in pyops.registry
    for capability in (75, 80, 89, 90, 100, 120):
        answer = _torch_op(TABLE[name])(capability)
        feature = "bfloat16_products" if name == "cutlass_scaled_mm_supports_fp4" else "mma"
        assert answer is (has_kernel and Device(0, f"sm_{capability}", 1, 32, 0).supports(feature))
        assert answer is getattr(custom_ops, name)(cuda_device_capability=capability)


def _flat(values: Sequence[Any]) -> list[torch.Tensor]:
    return [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]


@pytest.mark.parametrize("name", CASES)
def test_call_of_an_adapter(name: str) -> None:
    """By its overload, and by its name, which takes a shorter path to the kernel."""
    for op in (_torch_op(TABLE[name]), getattr(getattr(torch.ops, TABLE[name].namespace), name)):
        args, positions, right = CASES[name]()
        returned = op(*args)
        results = _flat([*(args[i] for i in positions), *([] if returned is None else [returned])])
        assert len(results) == len(right)
        for result, value in zip(results, right, strict=True):
            assert same_bits(result, value)


# torch's check multiplies the tensors that it compares, which it cannot for fp8.
FP8_CASES = {"cutlass_pack_scale_fp8", "cutlass_w4a8_mm"}


@pytest.mark.parametrize("name", sorted(CASES.keys() - FP8_CASES))
def test_opcheck_of_adapters(name: str) -> None:
    torch.library.opcheck(_torch_op(TABLE[name]), tuple(CASES[name]()[0]))


def test_hadacore_transform_in_place() -> None:
    (x, _), _, (right,) = _hadacore_transform()
    assert torch.ops._C.hadacore_transform(x, True).data_ptr() == x.data_ptr()
    assert same_bits(x, right)


def test_partial_results_of_rocm_are_not_written() -> None:
    """The schema does not mark them as written."""
    args = _example("paged_attention_rocm")
    before = clones(args)
    torch.ops._rocm_C.paged_attention(*args)
    assert all(same_bits(a, b) for a, b in zip(args[1:4], before[1:4], strict=True))


def test_entries_without_tensors() -> None:
    size = torch.ops._C.sm100_cutlass_mla_get_workspace_size(4096, 2, 132, 3)
    assert size == pyops.sm100_cutlass_mla_get_workspace_size(4096, 2, 132, 3) == 513 * 4 * 128 * 3 * 2
    if not torch.cuda.is_available():
        with pytest.raises(pyops.OpError, match="device: expected one of the 0 GPUs"):
            torch.ops._C_cuda_utils.get_device_attribute(1, 0)


@pytest.mark.gpu
def test_attributes_of_a_device() -> None:
    properties = torch.cuda.get_device_properties(0)
    asked = torch.ops._C_cuda_utils
    for device in (0, -1):
        assert asked.get_device_attribute(16, device) == properties.multi_processor_count
        assert asked.get_device_attribute(10, device) == properties.warp_size, "another attribute, another answer"
        largest = asked.get_max_shared_memory_per_block_device_attribute(device)
        assert asked.get_device_attribute(97, device) == properties.shared_memory_per_block_optin
        found = devices.get(0)
        assert largest == (found.shared_memory if found.translates else properties.shared_memory_per_block_optin)


@pytest.mark.gpu
def test_views_of_memory() -> None:
    x = torch.arange(6.0, device="cuda").bfloat16()[::2]
    assert torch.ops._C.weak_ref_tensor(x).data_ptr() == x.data_ptr()
    pinned = torch.zeros(10, 10, dtype=torch.int32).pin_memory()
    torch.ops._C.get_cuda_view_from_cpu_tensor(pinned).fill_(3)
    torch.cuda.synchronize()
    assert (pinned == 3).all()
    x = torch.arange(6.0).reshape(2, 3).t()
    view = torch.ops._C.get_cuda_view_from_cpu_tensor(x)
    assert view.is_cuda
    assert view.stride() == x.stride()
    assert torch.equal(view.cpu(), x), "of a pinned copy, as vLLM makes one"
    view.fill_(3)
    torch.cuda.synchronize()
    assert torch.equal(x, torch.arange(6.0).reshape(2, 3).t())
    empty = torch.ops._C.get_cuda_view_from_cpu_tensor(torch.empty(0, 3))
    assert (empty.shape, empty.device.type) == ((0, 3), "cuda")


def test_refusals_reach_the_caller() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(pyops.OpError, match="weak_ref_tensor: input: expected a tensor on a GPU, got one on cpu"):
        torch.ops._C.weak_ref_tensor(x)
    with pytest.raises(pyops.OpError, match="rms_norm: weight: "):
        torch.ops._C.rms_norm(torch.empty_like(x), x, x[0, :4], 1e-6)


def test_fakes_of_views() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.empty_strided((3, 4), (1, 5), dtype=torch.bfloat16))
        view = torch.ops._C.get_cuda_view_from_cpu_tensor(x)
        assert (view.shape, view.stride(), view.dtype) == ((3, 4), (1, 5), torch.bfloat16)
        assert view.device.type == "cuda"
        weak = torch.ops._C.weak_ref_tensor(view)
        assert (weak.shape, weak.stride(), weak.dtype, weak.device) == (view.shape, (1, 5), view.dtype, view.device)


def test_results_are_allocated_for_compilers() -> None:
    def call(a: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
        return torch.ops._C.permute_cols(a * 2, perm) + 1

    a, perm = torch.randn(3, 8), torch.arange(7, -1, -1, dtype=torch.int32)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(a, perm), a.flip(1) * 2 + 1)


# Registration.


def test_registering_twice() -> None:
    before = [(entry.id, _torch_op(entry.values[0])) for entry in SERVED]
    registration = register()
    assert registration is register()
    assert len(registration.names) == len(set(registration.names)) == len(SERVED)
    assert [(entry.id, _torch_op(entry.values[0])) for entry in SERVED] == before


class Watch(TorchDispatchMode):
    """The functions that pass torch's dispatcher in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_plain_tensors_bypass_the_dispatcher() -> None:
    """Unless a mode wants to see the calls."""
    x, weight, out = torch.randn(2, 64), torch.ones(64), torch.empty(2, 64)

    def dispatches(**named: Any) -> bool:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
            torch.ops._C.rms_norm(out.zero_(), x, *(() if named else (weight, 1e-6)), **named)
        torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))
        return "_C::rms_norm" in {event.key for event in profiled.key_averages()}

    assert not dispatches()
    with Watch() as watch:
        assert dispatches()
    assert "_C.rms_norm.default" in watch.seen
    meta = torch.empty(2, 64, device="meta")
    assert torch.ops._C.rms_norm(meta, meta, weight.to("meta"), 1e-6) is None
    with pytest.raises(RuntimeError, match="rms_norm"):
        torch.ops._C.rms_norm(out=out)


@pytest.mark.slow
def test_unregistering_leaves_nothing(run: Callable[..., str]) -> None:
    code = """
import torch
from torch._decomp import core_aten_decompositions
from pyops.integrations.vllm import register
x, weight, out = torch.full((2, 64), 3.0), torch.ones(64), torch.empty(2, 64)
registration = register()
torch.ops._C.rms_norm(out, x, weight, 1e-6)
registration.undo()
assert not hasattr(torch.ops._C, "rms_norm")
assert len(dict(core_aten_decompositions())) > 100  # goes through all of torch.ops
"""
    assert run(code) == ""


def test_own_definitions_are_not_overridden() -> None:
    with override() as replaced:
        assert replaced.names == ()
    with override("rms_norm") as replaced:
        assert replaced.names == ()


THEIRS = """
import torch
theirs = torch.library.Library("_C", "FRAGMENT")
theirs.define("silu_and_mul(Tensor! result, Tensor input) -> ()")
theirs.define("gelu_and_mul(Tensor! out, Tensor input) -> ()")
theirs.define("gelu_new(Tensor! out, Tensor input, int new) -> ()")
def fill(out, *others):
    out.fill_(7)
for name in ("silu_and_mul", "gelu_and_mul", "gelu_new"):
    theirs.impl(name, fill, "CPU")
theirs.define("sm100_cutlass_mla_get_workspace_size(int a, int b, int c, int d) -> int")
theirs.impl("sm100_cutlass_mla_get_workspace_size", lambda a, b, c, d: 7)  # for all devices

from pyops.integrations.vllm import override, register
import pyops
size_of_workspace = "sm100_cutlass_mla_get_workspace_size"
x, out, right = torch.randn(2, 8), torch.empty(2, 4), torch.empty(2, 4)
pyops.silu_and_mul(right, x)

def state(op=torch.ops._C.silu_and_mul):
    out.zero_()
    op(out, x)
    return "theirs" if (out == 7).all() else "ours" if torch.equal(out, right) else "?"

def refused(*names):
    try:
        override(*names)
    except pyops.OpError as error:
        return str(error)
    raise AssertionError("no error")
"""


@pytest.mark.slow
def test_existing_definitions_are_left_alone(run: Callable[..., str]) -> None:
    run(f"""{THEIRS}
registration = register()
assert state() == "theirs"
assert not {{"_C::silu_and_mul", "_C::gelu_and_mul", "_C::gelu_new"}} & set(registration.names)
assert "_C::mul_and_silu" in registration.names
torch.ops._C.mul_and_silu(out, x)
assert (out != 7).any()
registration.undo()
assert registration.names == ()
assert hasattr(torch.ops._C, "silu_and_mul") and not hasattr(torch.ops._C, "mul_and_silu")
assert state() == "theirs"
assert register() is registration and "_C::mul_and_silu" in registration.names
torch.ops._C.mul_and_silu(out, x)
""")


@pytest.mark.slow
def test_override_and_undo(run: Callable[..., str]) -> None:
    """Without the warning by which torch reports replaced kernels."""
    code = f"""{THEIRS}
replaced = override("silu_and_mul")
assert replaced.names == ("_C::silu_and_mul",)
assert state() == "ours" and state(torch.ops._C.gelu_and_mul) == "theirs"
replaced.undo()
assert replaced.names == () and state() == "theirs"

import logging
logging.getLogger("vllm.pyops").setLevel("ERROR")  # the next call warns
with override() as replaced:  # gelu_new has another schema
    assert set(replaced.names) == {{f"_C::{{name}}" for name in ("silu_and_mul", "gelu_and_mul", size_of_workspace)}}
    assert state() == "ours" and state(torch.ops._C.gelu_and_mul) == "?"
assert state() == state(torch.ops._C.gelu_and_mul) == "theirs"

size = torch.ops._C.sm100_cutlass_mla_get_workspace_size
assert size(1, 1, 1, 1) == 7
with override(size_of_workspace):
    assert size(1, 1, 1, 1) == 513 * 4 * 128
assert size(1, 1, 1, 1) == 7

override("silu_and_mul")  # held by nobody
import gc
gc.collect()
assert state() == "ours"
"""
    assert run(code, strict=True) == ""


@pytest.mark.slow
def test_override_refused(run: Callable[..., str]) -> None:
    printed = run(f"""{THEIRS}
print(refused("silu_and_mul", "silu_and_mull"))
assert state() == "theirs"  # nothing is replaced
from pyops.integrations.vllm.schemas import SCHEMAS
SCHEMAS["_C"] += "one_that_is_lacking(Tensor! out) -> ()\\n"
print(refused("one_that_is_lacking"))
print(refused("mul_and_silu"))
print(refused("gelu_new"))
""")
    nowhere, lacking, unknown, other = printed.splitlines()
    assert nowhere == "override: silu_and_mull: is no op of vLLM"
    assert lacking.startswith("override: one_that_is_lacking: is an op of vLLM that pyops lacks")
    assert unknown.startswith("override: mul_and_silu: is unknown to torch: import vLLM first")
    assert other.startswith("override: gelu_new: expected the schema gelu_new(Tensor! out, Tensor input) -> ()")


# The functions that replace those of vllm._custom_ops.


def _signatures() -> dict[str, inspect.Signature]:
    found: dict[str, Any] = {}
    for line in SIGNATURES.strip().splitlines():
        exec(f"def {line}: ...", {"torch": torch}, found)
    return {name: inspect.signature(function) for name, function in found.items()}


THEIR_FUNCTIONS = _signatures()


@pytest.mark.parametrize("name", sorted(THEIR_FUNCTIONS.keys() & set(custom_ops.__all__)))
def test_signature_matches_vllm(name: str) -> None:
    ours = list(inspect.signature(getattr(custom_ops, name)).parameters.values())
    theirs = list(THEIR_FUNCTIONS[name].parameters.values())
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    for a, b in zip(ours, theirs, strict=False):
        assert b.default is b.empty or a.default == b.default
    assert all(p.default is not p.empty for p in ours[len(theirs) :])


def test_every_op_has_its_function() -> None:
    assert all(name in custom_ops.__all__ for name in THEIR_FUNCTIONS if callable(getattr(pyops, name, None)))
    assert {param.id for param in SERVED} <= set(custom_ops.__all__)
    assert custom_ops.rms_norm is pyops.rms_norm
    assert custom_ops.rotary_embedding is pyops.rotary_embedding


def test_functions_that_allocate_results() -> None:
    """Functions that allocate return what the ops write, with vLLM's order of arguments."""
    for name, given in (
        ("cutlass_scaled_mm", (1, 2, 3, 4, torch.bfloat16, 5)),
        ("cutlass_scaled_mm_azp", (1, 2, 3, 4, torch.bfloat16, 5, 6, 7)),
        ("cutlass_scaled_sparse_mm", (1, 2, 3, 4, 5, torch.bfloat16, 6)),
        ("cutlass_scaled_fp4_mm", (1, 2, 3, 4, 5, torch.bfloat16)),
        ("wvSplitKQ", (0, 1, torch.bfloat16, 4, 5, 6, 2)),
        ("dsv3_router_gemm", (1, 2, torch.float32)),
    ):
        op = pyops.registry[name]
        args = example(op, num_tokens=5, **axes.fullest(op))
        (right,) = _result(op, args, next(i for i, p in enumerate(op.parameters) if p.written))
        theirs = [args[one] if isinstance(one, int) else one for one in given]
        assert same_bits(getattr(custom_ops, name)(*theirs), right), name
    out, a, b, *scales, _ = example(pyops.registry["cutlass_scaled_mm"], num_tokens=6, scales="tensor")
    pyops.cutlass_scaled_mm(out, a, b, *scales)
    assert same_bits(custom_ops.cutlass_scaled_mm(a.view(2, 3, -1), b, *scales, torch.bfloat16), out.view(2, 3, -1))
    weight, tokens, bias, cu_count = _example("wvSplitK", with_bias=True)
    right = pyops.wvSplitK(weight, tokens, bias, cu_count)
    assert same_bits(custom_ops.wvSplitK(weight, tokens, cu_count, bias), right)
    assert same_bits(custom_ops.wvSplitKrc(weight, tokens, cu_count, bias), right)
    assert same_bits(custom_ops.LLMM1(weight, tokens, 4), pyops.LLMM1(weight, tokens, 4))


@pytest.mark.parametrize("quant_dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_dynamic_per_token_quant(quant_dtype: torch.dtype, with_residual: bool) -> None:
    x, weight = torch.randn(2, 3, 64).bfloat16(), torch.randn(64).bfloat16()
    residual = torch.randn_like(x) if with_residual else None
    ours = None if residual is None else residual.clone()
    codes, scales = custom_ops.rms_norm_dynamic_per_token_quant(x, weight, 1e-6, quant_dtype, residual=residual)
    right, right_scales = torch.empty_like(x, dtype=quant_dtype), torch.empty(6, 1)
    pyops.rms_norm_dynamic_per_token_quant(right, x, weight, right_scales, 1e-6, None, ours)
    assert same_bits(codes, right)
    assert same_bits(scales, right_scales)
    assert residual is None or (ours is not None and same_bits(residual, ours))


@pytest.mark.parametrize("is_scale_transposed", [False, True])
def test_rms_norm_per_block_quant(is_scale_transposed: bool) -> None:
    x, weight = torch.randn(5, 256).half(), torch.randn(256).half()
    codes, scales = custom_ops.rms_norm_per_block_quant(
        x, weight, 1e-6, torch.float8_e4m3fn, [1, 128], is_scale_transposed=is_scale_transposed
    )
    assert scales.shape == (5, 2)
    assert scales.stride() == ((1, 5) if is_scale_transposed else (2, 1))
    right, right_scales = torch.empty_like(codes), torch.empty(5, 2)
    pyops.rms_norm_per_block_quant(right, x, weight, right_scales, 1e-6, None, None, 128, False)
    assert same_bits(codes, right)
    assert same_bits(scales.contiguous(), right_scales)
    for wrong in ([128], [1, 0]):
        with pytest.raises(pyops.OpError, match="rms_norm_per_block_quant: group_size: expected"):
            custom_ops.rms_norm_per_block_quant(x, weight, 1e-6, torch.int8, wrong)


def test_per_token_group_quant_int8() -> None:
    x = torch.randn(2, 3, 128).bfloat16()
    codes, scales = custom_ops.per_token_group_quant_int8(x, 64)
    assert scales.shape == (2, 3, 2)
    largest = x.unflatten(-1, (2, 64)).abs().amax(-1).float()
    torch.testing.assert_close(scales, largest / 127)
    error = codes.float().unflatten(-1, (2, 64)) * scales[..., None] - x.unflatten(-1, (2, 64)).float()
    assert (error.abs() <= scales[..., None]).all(), "codes are the quotients without their fractions"
    with pytest.raises(pyops.OpError, match="dtype: expected int8"):
        custom_ops.per_token_group_quant_int8(x, 64, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("with_map", [False, True])
def test_moe_permute_and_unpermute(with_map: bool) -> None:
    """Scales move with their rows, and every token comes back with the weights of its choices on this device."""
    num_tokens, topk, num_experts = 9, 3, 6
    x, ids = torch.randn(num_tokens, 16).bfloat16(), torch.randint(0, num_experts, (num_tokens, topk))
    scale, expert_map = torch.randn(num_tokens, 2), torch.tensor([1, -1, 0, 2, -1, 1]).int() if with_map else None
    num_local = 3 if with_map else -1
    rows, scales, offsets, inverse, order = custom_ops.moe_permute(x, scale, ids, num_experts, num_local, expert_map)
    local = int(offsets[-1])
    numbers = ids if expert_map is None else expert_map[ids]
    assert (offsets.shape, inverse.shape, order.shape) == ((4 if with_map else 7,), (27,), (27,))
    assert local == int((numbers >= 0).sum())
    tokens = order[:local].long() // topk
    assert scales is not None
    assert same_bits(rows[:local], x[tokens])
    assert same_bits(scales[:local], scale[tokens])
    rows[local:] = float("nan")
    weights, out = torch.full((num_tokens, topk), 0.5), torch.empty_like(x)
    custom_ops.moe_unpermute(out, rows, weights, inverse, offsets)
    share = (numbers >= 0).sum(1, keepdim=True) * 0.5
    assert torch.equal(out, (x.float() * share).bfloat16())
    one, given = torch.ones(1), torch.empty_like(rows)
    result = custom_ops.moe_permute(x, one, ids, num_experts, num_local, expert_map, given)
    assert result[0] is given
    assert result[1] is one
    assert same_bits(given[:local], x[tokens])


def test_moe_functions() -> None:
    assert torch.ops._moe_C.moe_permute_unpermute_supported() is True
    assert custom_ops.moe_permute_unpermute_supported()
    assert torch.ops._C.ggml_moe_get_block_size(12) == custom_ops.ggml_moe_get_block_size(12) == 4
    args = _example("get_cutlass_moe_mm_data", with_blockscale=True)[:10]
    (right,) = _result(pyops.get_cutlass_moe_mm_data, args, 9)
    torch.ops._C.get_cutlass_moe_mm_data(*args)
    assert torch.equal(args[9], right), "what is written without a mark"
    x = torch.randn(4, 8)
    assert torch.equal(custom_ops.shuffle_rows(x, torch.tensor([2, 0, 2], dtype=torch.int32)), x[[2, 0, 2]])


def test_sm100_cutlass_mla_decode_returns_its_output() -> None:
    args = _example("sm100_cutlass_mla_decode")
    right = clones(args)
    pyops.sm100_cutlass_mla_decode(*right)
    assert custom_ops.sm100_cutlass_mla_decode(*args) is args[0]
    assert same_bits(args[0], right[0])
    args[0].fill_(torch.nan)
    args[1] = torch.Tensor()  # vLLM's way to ask for no log-sum-exp
    custom_ops.sm100_cutlass_mla_decode(*args)
    assert same_bits(args[0], right[0])


def test_repetition_penalties_of_logits_with_gaps() -> None:
    logits, *others = _example("apply_repetition_penalties_", dtype="float32")
    right = logits.clone()
    pyops.apply_repetition_penalties_(right, *others)
    wide = torch.full((logits.shape[0], logits.shape[1] + 1), torch.nan)
    wide[:, :-1] = logits
    custom_ops.apply_repetition_penalties(wide[:, :-1], *others)
    assert same_bits(wide[:, :-1].contiguous(), right)
    assert wide[:, -1].isnan().all()
    masks = [mask.T.contiguous().T for mask in others[:2]]
    custom_ops.apply_repetition_penalties(logits, *masks, others[2])
    assert same_bits(logits, right)
    wide[:, :-1] = 1.0
    custom_ops.apply_repetition_penalties_torch(wide[:, :-1], *masks, others[2])
    seen = others[0] | others[1]
    assert torch.equal(wide[:, :-1], torch.where(seen, 1.0 / others[2][:, None], 1.0))


@pytest.mark.parametrize("name", ["paged_attention_v2", "paged_attention_rocm"])
def test_parameter_with_another_name(name: str) -> None:
    op = pyops.registry[name]
    args = _example(name)
    right = clones(args)
    op.wrapper(*right)
    by_name = dict(zip(inspect.signature(getattr(custom_ops, name)).parameters, args, strict=False))
    assert "exp_sum" in by_name
    getattr(custom_ops, name)(**by_name)
    assert all(same_bits(a, b) for a, b in zip(args, right, strict=True) if isinstance(a, torch.Tensor))


def test_nvfp4_by_vllms_names() -> None:
    x, scale = torch.randn(3, 64).half(), torch.tensor(2.0)
    for ours, theirs in zip(
        pyops.nvfp4_quant(x, scale, False), custom_ops.scaled_fp4_quant(x, scale, False), strict=True
    ):
        assert same_bits(ours, theirs)
    assert custom_ops.scaled_fp8_quant is pyops.scaled_fp8_quant
    assert custom_ops.scaled_int8_quant is pyops.scaled_int8_quant


def test_compile() -> None:
    def call(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return custom_ops.rms_norm_dynamic_per_token_quant(x * 2, weight, 1e-6, torch.int8)

    x, weight = torch.randn(3, 64), torch.ones(64)
    for ours, right in zip(
        torch.compile(call, fullgraph=True, backend="aot_eager")(x, weight), call(x, weight), strict=True
    ):
        assert same_bits(ours, right)


# Without torch, or without vLLM.


@pytest.mark.slow
def test_without_vllm(run: Callable[..., str]) -> None:
    """There is nothing to override, and registering does not import CuPy."""
    run("""
import sys
import pyops
from pyops.integrations.vllm import override, register
try:
    override()
except pyops.OpError as error:
    assert str(error).startswith("override: names: torch knows no op of vLLM: import vLLM first"), error
else:
    raise AssertionError("no error")
assert register().names
assert "cupy" not in sys.modules
""")


def test_without_torch_the_pip_line_is_named() -> None:
    from tests.repo.test_import import BLOCK

    code = f"""{BLOCK}
import pyops
from pyops.__main__ import main
from pyops.integrations.vllm import override, register
for use in (register, override, lambda: __import__("pyops.integrations.vllm.custom_ops")):
    try:
        use()
    except pyops.MissingDependencyError as error:
        assert "needs torch" in str(error) and "[torch]" in str(error), error
    else:
        raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
