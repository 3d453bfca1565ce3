"""The configs that plans of attention choose: for many batch sizes, for whole models, and under overrides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pyops
from pyops import offline, tuning
from pyops._core import config
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops.example import ArgMaker
from pyops.ops.attention import decode_plan
from pyops.ops.attention.combine import CombineConfig
from pyops.ops.attention.decode_blocks import choose_cluster, choose_num_warps
from pyops.ops.attention.decode_choose import DecodeConfig
from tests.ops.attention.test_attention import paged_call, truth

V1, V2 = pyops.registry["paged_attention_v1"], pyops.registry["paged_attention_v2"]
VARLEN, MLA = pyops.registry["paged_attention_varlen"], pyops.registry["sm100_cutlass_mla_decode"]


def example_of(op: Op, on: device.Device, **axes: Any) -> tuple[Any, ...]:
    assert op.example is not None
    return op.example(ArgMaker(on), **axes)


def chosen(op: Op, arch: str | device.Device = "sm_90", **axes: Any) -> Any:
    """The Config of the example with these axes."""
    op.launches(*example_of(op, device.model(arch) if isinstance(arch, str) else arch, **axes))
    return tuning.last[op.name]


# The model of docs/performance/decode.md: 32 query heads, 8 key-value heads of 128, bfloat16, blocks of 16.
MODEL = {"num_heads": 32, "num_kv_heads": 8}
# (sequences, tokens of a table) -> (warps, cluster size, splits at most, groups of the combine kernel; 0: the last
# block combines)
CHOICES = [
    (1, 1024, (8, 8, 1, 0)),
    (1, 2048, (8, 8, 1, 0)),
    (1, 8192, (4, 1, 33, 8)),
    (1, 131072, (4, 1, 33, 8)),
    (2, 2048, (4, 8, 1, 0)),
    (4, 2048, (4, 8, 1, 0)),
    (4, 131072, (4, 1, 128, 8)),
    (5, 1024, (4, 4, 1, 0)),
    (5, 2048, (4, 1, 32, 0)),
    (16, 4096, (4, 1, 32, 0)),
    (17, 2048, (4, 1, 32, 0)),
    (32, 2048, (4, 1, 32, 0)),
    (49, 2048, (4, 1, 32, 0)),
    (50, 2048, (3, 1, 16, 0)),
    (64, 2048, (3, 1, 16, 0)),
    (64, 8192, (3, 1, 48, 0)),
    (67, 2048, (2, 1, 32, 0)),
    (75, 2048, (4, 1, 32, 0)),
    (100, 2048, (3, 1, 16, 0)),
    (128, 2048, (4, 1, 32, 0)),
    (199, 2048, (4, 1, 1, 0)),
    (256, 1024, (3, 1, 16, 0)),
    (512, 2048, (3, 1, 1, 0)),
    (1024, 2048, (4, 1, 1, 0)),
    (16384, 2048, (4, 1, 1, 0)),
    (16384, 131072, (4, 1, 1, 0)),
]


# (heads of a group, head size, cache) -> (warps, tiles, blocks per compute unit, K and V loaded in turn, pieces).
MATRIX_CORE_CHOICES = [
    ("gfx942", 4, 128, "auto", (4, 1, 2, False, 1)),
    ("gfx942", 4, 128, "fp8", (4, 2, 2, False, 1)),
    ("gfx942", 16, 128, "auto", (4, 1, 1, False, 1)),
    ("gfx942", 16, 256, "auto", (3, 1, 1, False, 1)),
    ("gfx950", 16, 256, "auto", (4, 1, 2, False, 1)),
    ("gfx1100", 4, 64, "auto", (4, 1, 2, False, 1)),
    ("gfx1100", 4, 128, "auto", (4, 1, 2, True, 4)),
    ("gfx1100", 4, 128, "fp8", (4, 1, 2, True, 2)),
    ("gfx1201", 4, 128, "auto", (4, 1, 2, False, 1)),
    ("gfx1201", 4, 256, "auto", (4, 1, 2, True, 4)),
]


@pytest.mark.parametrize(("arch", "group", "head_size", "cache", "expected"), MATRIX_CORE_CHOICES)
def test_decode_on_matrix_cores(
    arch: str, group: int, head_size: int, cache: str, expected: tuple[int, int, int, bool, int]
) -> None:
    """A config fits the registers, and the shared memory in which a block's warps combine each head."""
    axes = {"num_heads": 2 * group, "num_kv_heads": 2, "head_size": head_size, "kv_cache_dtype": cache}
    found = chosen(V1, arch, num_tokens=64, max_seq_len=2048, **axes)
    of_registers = found.num_warps, found.tiles_per_step, found.min_blocks, found.one_at_a_time, found.pieces
    assert (*of_registers, found.heads_per_block) == (*expected, 16)


# (head size, cache) -> (warps, row tiles, tokens of a step); None: attention_decode_simt.cu serves.
MATRIX_CORE_PROMPTS = [
    ("gfx942", 64, "auto", (4, 2, 64)),
    ("gfx942", 128, "fp8", (4, 1, 64)),
    ("gfx942", 256, "auto", (2, 1, 32)),
    ("gfx950", 256, "auto", (4, 1, 32)),
    ("gfx1100", 64, "auto", (4, 1, 32)),
    ("gfx1100", 128, "fp8", (4, 1, 16)),
    ("gfx1201", 128, "auto", (4, 1, 32)),
    ("gfx1201", 256, "auto", None),
]


@pytest.mark.parametrize(("arch", "head_size", "cache", "expected"), MATRIX_CORE_PROMPTS)
def test_prefill_on_matrix_cores(arch: str, head_size: int, cache: str, expected: tuple[int, int, int] | None) -> None:
    on = device.model(arch)
    args = example_of(VARLEN, on, num_tokens=4096, head_size=head_size, kv_cache_dtype=cache)
    (launch,) = VARLEN.launches(*args)
    if expected is None:
        assert launch.specialisation.kernel.file == "attention/attention_decode_simt.cu"
        return
    found = tuning.last[VARLEN.name]
    assert (found.num_warps, found.row_tiles, found.step_tokens) == expected
    assert launch.shared <= on.shared_memory - 2176  # the rest is static shared memory


@pytest.mark.parametrize(
    ("dtype", "head_size", "cache", "expected"),
    [
        ("float16", 64, "auto", (4, 1, 64)),
        ("float16", 128, "fp8", (4, 1, 32)),
        ("float16", 256, "auto", (4, 1, 32)),  # two slices of the values
        ("bfloat16", 64, "auto", None),  # no such mma.sync
    ],
)
def test_prefill_on_turing(dtype: str, head_size: int, cache: str, expected: tuple[int, int, int] | None) -> None:
    """A config fits the registers, which also hold the next keys and values, and 64 KiB of shared memory."""
    on = device.model("sm_75")
    args = example_of(VARLEN, on, num_tokens=4096, head_size=head_size, kv_cache_dtype=cache, dtype=dtype)
    launch, found = VARLEN.launches(*args)[0], tuning.last[VARLEN.name]
    assert (launch.specialisation.kernel.file == "attention/prefill_mma.cu") == (expected is not None)
    if expected is not None:
        assert (found.num_warps, found.row_tiles, found.step_tokens) == expected
        assert launch.shared <= on.shared_memory - 2176  # the rest is static shared memory


@pytest.mark.parametrize(("num_seqs", "max_tokens", "expected"), CHOICES)
def test_decode_configs(num_seqs: int, max_tokens: int, expected: tuple[int, ...]) -> None:
    found = chosen(V1, num_tokens=num_seqs, max_seq_len=max_tokens, **MODEL)
    num_warps, cluster_size, max_splits, groups = expected
    combine = CombineConfig(groups, 1) if groups else None
    assert found == DecodeConfig(num_warps, 8, 1, 3, False, cluster_size, max_splits, 64, combine)


@pytest.mark.parametrize(
    ("num_seqs", "max_tokens", "warps"),
    [(16, 16, 4), (200, 16, 1), (200, 48, 1), (60, 64, 3), (90, 88, 2), (90, 256, 4)],
)
def test_few_waves_of_short_sequences(num_seqs: int, max_tokens: int, warps: int) -> None:
    """Every warp has a step, and where CTAs are more than one wave, rather several steps than another wave."""
    assert chosen(V1, num_tokens=num_seqs, max_seq_len=max_tokens, **MODEL).num_warps == warps


@pytest.mark.parametrize(
    ("num_seqs", "max_tokens", "num_warps", "max_splits"), [(64, 1024, 4, 1), (64, 2048, 4, 32), (200, 48, 1, 1)]
)
def test_four_blocks_of_small_heads(num_seqs: int, max_tokens: int, num_warps: int, max_splits: int) -> None:
    """They take whole sequences, and splits fill three of them: 396 CTAs on 132 SMs, for eight KV heads."""
    assert V1.example is not None
    args = V1.example(ArgMaker(device.model()), num_tokens=num_seqs, max_seq_len=max_tokens, head_size=64, **MODEL)
    launch, found = V1.launches(*args)[0], tuning.last[V1.name]
    assert (found.min_blocks, found.num_warps, found.max_splits) == (4, num_warps, max_splits)
    assert launch.fixed["wave_splits"] == (49.5 if max_splits > 1 else 0)
    assert chosen(V1, num_tokens=num_seqs, max_seq_len=max_tokens, head_size=72, **MODEL).min_blocks == 3
    assert chosen(V1, num_tokens=1, max_seq_len=32768, head_size=64, **MODEL).min_blocks == 3


@pytest.mark.parametrize(
    ("num_seqs", "max_tokens", "axes", "expected"),
    [
        (16, 256, {}, (4, 8, 2, 1)),  # four steps: no splits, two CTAs on an SM
        (33, 256, {}, (4, 8, 2, 1)),
        (34, 256, {}, (4, 8, 3, 1)),  # more CTAs
        (16, 1024, {}, (8, 8, 2, 1)),  # eight steps of a CTA alone on an SM
        (16, 2048, {}, (4, 8, 3, 32)),
        (17, 1024, {}, (4, 8, 3, 16)),
        (32, 512, {}, (4, 8, 2, 1)),
        (16, 1024, {"num_heads": 128}, (8, 16, 2, 1)),
        (
            44,
            1398,
            {"num_heads": 24, "num_kv_heads": 1, "kv_cache_dtype": "fp8"},
            (8, 8, 2, 1),
        ),  # three CTAs for 24 heads
        (64, 256, {"num_heads": 16, "num_kv_heads": 2, "head_size": 256}, (8, 8, 2, 1)),
    ],
)
def test_few_ctas_take_whole_sequences(
    num_seqs: int, max_tokens: int, axes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """They have the registers of all CTAs of an SM, unless splits of mixed lengths would take less time."""
    found = chosen(V1, num_tokens=num_seqs, max_seq_len=max_tokens, **MODEL | axes)
    assert (found.num_warps, found.heads_per_block, found.min_blocks, found.max_splits) == expected


@pytest.mark.parametrize(
    ("axes", "heads", "tiles", "min_blocks"),
    [
        ({"head_size": 64}, 8, 1, 4),
        ({"head_size": 256}, 8, 1, 2),
        ({"num_heads": 96}, 16, 1, 2),
        ({"block_size": 12}, 8, 1, 2),
        ({"kv_cache_dtype": "fp8"}, 8, 2, 3),
        ({"kv_cache_dtype": "fp8", "head_size": 64}, 8, 4, 2),
        ({"kv_cache_dtype": "fp8", "head_size": 64, "packed": True}, 8, 4, 3),
        ({"kv_cache_dtype": "fp8", "head_size": 64, "block_size": 8}, 8, 2, 3),
        ({"kv_cache_dtype": "fp8", "head_size": 256}, 8, 2, 2),
    ],
)
def test_decode_configs_of_other_models(axes: dict[str, Any], heads: int, tiles: int, min_blocks: int) -> None:
    """The bytes in flight fill the available registers."""
    found = chosen(V1, num_tokens=64, **MODEL | axes)
    assert (found.heads_per_block, found.tiles_per_step, found.min_blocks) == (heads, tiles, min_blocks)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["paged_attention_v1", "paged_attention_varlen", "attention_varlen"])
def test_heads_of_512_spill_nothing(name: str, arch: str) -> None:
    """In decode warps have slices of a head. In prefill they share rows: the accumulators of 16 such rows are all
    registers of a warp.
    """
    op = pyops.registry[name]
    launches = op.launches(*example_of(op, device.model(arch), head_size=512))
    one = launches[0].specialisation
    kernel = "attention_decode" if name == "paged_attention_v1" else "prefill_mma"
    assert one.kernel.file == f"attention/{kernel}.cu"
    report = offline.compile(one.kernel.file, str(one), one.text, arch, one.kernel.options)
    assert (report.spill_bytes, report.stack_bytes) == (0, 0)


def test_partition_count_is_not_tuned() -> None:
    """The caller's buffers fix their number, even if a tuning table has another number."""
    assert chosen(V2, num_tokens=1, max_seq_len=1024).max_splits == 3
    found = chosen(V2, num_tokens=64, max_seq_len=131072, **MODEL)
    assert (found.num_warps, found.cluster_size, found.max_splits) == (4, 1, 257)
    args = V2.example(ArgMaker(device.model()), num_tokens=2, max_seq_len=1024, **MODEL)  # type: ignore[misc]
    with tuning.forced(V2.name, replace(found, max_splits=100)):
        assert V2.launches(*args)[0].grid[1] == V2.launches(*args)[0].fixed["max_splits"] == 3


BATCHES = sorted({*range(1, 130), *(2**i + j for i in range(7, 14) for j in (0, 1, 70)), 16384})


@pytest.mark.parametrize("max_tokens", [2048, 131072])
def test_few_kernels_serve_a_model(max_tokens: int) -> None:
    """For every batch size, so that a server compiles nothing more under load."""
    assert V1.example is not None
    texts = {}
    for num_seqs in BATCHES:
        args = V1.example(ArgMaker(device.model()), num_tokens=num_seqs, max_seq_len=max_tokens, **MODEL)
        for launch in V1.launches(*args):
            texts[launch.specialisation.text] = launch.specialisation.kernel.file.split("/")[1]
    clusters = ["attention_decode.cu"] * (max_tokens == 2048)
    combines = ["decode_combine.cu"] * (max_tokens > 2048)  # many splits
    assert sorted(texts.values()) == sorted([*combines, "attention_decode.cu", *clusters])


@pytest.mark.parametrize(
    ("blocks", "max_tokens", "wide", "expected"),
    [
        (8, 1024, True, (8, 8)),
        (8, 1024, False, (8, 4)),
        (8, 512, True, (8, 4)),  # eight blocks of four warps have a step each
        (8, 128, True, (2, 4)),
        (8, 160, True, (4, 4)),
        (8, 300, True, (8, 4)),  # five blocks have a step
        (8, 64, True, (1, 4)),  # one block has one step
        (8, 0, True, (1, 4)),
        (8, 4096, True, (8, 8)),
        (8, 4097, True, (1, 8)),
        (1, 2049, True, (1, 8)),  # eight blocks are too few
        (32, 1024, True, (8, 4)),
        (66, 1024, True, (4, 4)),
        (67, 1024, True, (1, 4)),
        (512, 64, True, (1, 4)),
    ],
)
def test_choose_cluster(blocks: int, max_tokens: int, wide: bool, expected: tuple[int, int]) -> None:
    """As many blocks as are resident at once and have work, unless the longest sequence is long."""
    assert choose_cluster(blocks, max_tokens, 16, wide, device.model()) == expected
    assert choose_cluster(blocks, max_tokens, 16, wide, device.model("sm_80"))[0] == 1


def test_clusters_of_many_heads() -> None:
    """A warp of the last block would combine four heads one after the other, so that a cluster may have more steps."""
    axes = {"num_tokens": 16, "num_kv_heads": 1, "head_size": 64, "block_size": 64}
    for num_heads, tokens, expected in ((35, 1071, 4), (12, 3072, 8), (4, 3072, 1), (12, 16384, 1)):
        assert chosen(V1, num_heads=num_heads, max_seq_len=tokens, **axes).cluster_size == expected


@pytest.mark.parametrize(
    ("num_seqs", "heads", "tokens", "warps"),
    [
        (207, (64, 4), 3111, 4),  # 16 columns: splits fill the last wave
        (45, (128, 8), 700, 2),  # one wave of two warps
        (45, (128, 8), 2000, 4),  # one wave, too, but of long steps
        (80, (128, 8), 1500, 4),
        (207, (32, 4), 3111, 3),
        (207, (64, 4), 200, 2),  # too short to split
        (350, (64, 4), 3111, 2),  # too many sequences to split
    ],
)
def test_warps_of_16_columns(num_seqs: int, heads: tuple[int, int], tokens: int, warps: int) -> None:
    axes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_size": 128}
    assert chosen(V1, num_tokens=num_seqs, max_seq_len=tokens, **axes).num_warps == warps


@pytest.mark.parametrize(
    ("blocks", "min_blocks", "warps"),
    [
        *((8, 3, 4), (396, 3, 4), (397, 3, 3), (528, 3, 3), (529, 3, 2), (600, 3, 4), (2048, 3, 3)),
        *((264, 2, 4), (265, 2, 2), (350, 2, 2), (600, 2, 1), (828, 2, 2)),
    ],
)
def test_choose_num_warps(blocks: int, min_blocks: int, warps: int) -> None:
    """All blocks in one wave, if blocks of three warps fit; else whole waves. Eight warps are two blocks of three."""
    assert choose_num_warps(blocks, min_blocks, device.model()) == warps


@pytest.mark.parametrize(
    ("num_tokens", "axes", "expected"),
    [
        (255, {}, (4, 1, 64, 2)),
        (256, {}, (4, 2, 32, 2)),  # three sequences, and three heads per key-value head
        (256, {"options": True}, (4, 1, 64, 2)),
        (256, {"options": True, "head_size": 64}, (4, 2, 64, 2)),
        (256, {"kv_cache_dtype": "fp8"}, (4, 2, 32, 2)),
        (256, {"arch": "sm_80"}, (4, 2, 32, 2)),
        (4096, {"head_size": 256}, (4, 1, 32, 2)),
    ],
)
def test_varlen_configs(
    num_tokens: int, axes: dict[str, Any], expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warp takes two row tiles where sequences have enough rows and accumulators fit in registers. Packed caches
    only, because the Hopper kernel serves the others.
    """
    monkeypatch.setattr(decode_plan, "_columns_are_faster", lambda *_: False)  # a short window would take it
    found = chosen(VARLEN, num_tokens=num_tokens, packed=True, **axes)
    assert (found.num_warps, found.row_tiles, found.step_tokens, found.min_blocks) == expected


@pytest.mark.parametrize(
    ("arch", "head_size", "expected"),
    [
        ("sm_80", 128, (2, 48, 1)),  # 56 KB of each of two CTAs; 80 KB with two stages
        ("sm_80", 64, (2, 64, 2)),
        ("sm_80", 256, (1, 32, 1)),
        ("sm_89", 128, (2, 48, 2)),  # one CTA per SM in any case
    ],
)
def test_varlen_stages(arch: str, head_size: int, expected: tuple[int, ...]) -> None:
    """One stage where an SM holds two CTAs with one, but not with two."""
    found = chosen(VARLEN, num_tokens=4096, head_size=head_size, arch=arch)
    assert (found.row_tiles, found.step_tokens, found.stages) == expected


def test_mla_configs() -> None:
    found = chosen(MLA, "sm_100", num_tokens=16, num_heads=12)
    assert (found.num_warps, found.heads_per_block, found.step_tokens, found.min_blocks) == (8, 16, 32, 2)
    assert (found.max_splits, found.min_split, found.combine) == (2, 64, CombineConfig(1, 1))
    assert chosen(MLA, dtype="float32").step_tokens == 0
    assert chosen(MLA, replace(device.model(), shared_memory=48 * 1024)).step_tokens == 0


def test_oversized_config_is_refused() -> None:
    """More warps or groups than a kernel has memory for are refused before it is compiled."""
    found = chosen(V1, num_tokens=64, max_seq_len=2048, **MODEL)
    for changes in ({"num_warps": 13}, {"num_warps": 0}, {"cluster_size": 8, "num_warps": 3}):
        with pytest.raises(ValueError, match="expected num_warps from"):
            replace(found, **changes)
    args = V1.example(ArgMaker(device.model()), num_tokens=64, max_seq_len=2048, **MODEL)  # type: ignore[misc]
    for combine in (CombineConfig(8, 2), CombineConfig(1, 3)):
        with (
            tuning.forced(V1.name, replace(found, combine=combine)),
            pytest.raises(ValueError, match="expected at most 8"),
        ):
            V1.launches(*args)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file name of a tuning table for a device of this name."""
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    tuning.table.cache_clear()
    yield tmp_path / "nvidia-h200.json"
    tuning.table.cache_clear()


def test_tuning_table_overrides_the_choice(table: Path) -> None:
    """A table is keyed by sizes rounded up to powers of two; it leaves other kernels, models and kinds alone."""
    bucket = "DecodeConfig mma bfloat16 cache=bfloat16 heads=32/8x128 block=16 seqs=64 tokens=2048"
    table.write_text(json.dumps({V1.name: {bucket: {"num_warps": 2, "max_splits": 5}}}))
    h200 = replace(device.model(), name="nvidia-h200")

    def num_warps(on: device.Device = h200, **axes: Any) -> int:
        result: int = chosen(V1, on, **{"num_tokens": 64, "max_seq_len": 2048, **MODEL} | axes).num_warps
        return result

    assert num_warps() == num_warps(num_tokens=60) == num_warps(max_seq_len=1040) == 2
    assert num_warps(device.model()) == 3
    for other in ({"num_tokens": 65}, {"head_size": 96}, {"packed": True}, {"options": True}, {"max_seq_len": 4096}):
        assert num_warps(**other) == 3


@pytest.mark.parametrize("num_warps", [1, 2, 3, 4])
@pytest.mark.parametrize("combine", [None, CombineConfig(1, 1), CombineConfig(2, 4), CombineConfig(8, 1)], ids=str)
def test_any_config_gives_the_same_result(combine: CombineConfig | None, num_warps: int) -> None:
    """Warps, groups and heads of a block change nothing but the time."""
    call = paged_call([300, 1, 65], (4, 2), 64, dtype=torch.bfloat16)
    plain = call.pop("plain")
    forced = DecodeConfig(num_warps, 8, 1, 3, False, 1, 5, 64, combine)
    V1.forget()
    with config.cpu("kernels"), tuning.forced(V1.name, forced):
        V1.wrapper(**call)
    V1.forget()
    for s, (keys, values) in enumerate(plain):
        right = truth(call["query"][s], keys, values)
        torch.testing.assert_close(call["out"][s].double(), right, rtol=1.6e-2, atol=8e-3)
