"""Decode attention where a warp takes several steps: loads of the next step while this one is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pyops import offline, tuning
from pyops._core import config
from pyops._core.system import device
from pyops.example import ArgMaker
from pyops.ops.attention.decode_choose import DecodeConfig
from pyops.testing import SCHEDULES, same_bits, scheduled
from tests.every_op.test_nvrtc import MISSING
from tests.ops.attention.test_attention import V1, paged_call, truth
from tests.ops.attention.test_choose import MODEL, chosen
from tests.ops.attention.test_hopper import _in_codes as over_fp8
from tests.support.profiles import few

LENGTHS = [0, 1, 71, 150]
HOLE = 2, 3  # sequence and entry of the block table without a block
AHEAD = DecodeConfig(1, 8, 1, 2, one_at_a_time=False, cluster_size=1, max_splits=1, min_split=64, combine=None)
# (config, heads, head size, block size, fp8 cache, packed cache, window)
STEPS = [
    (replace(AHEAD, heads_per_block=16), (12, 1), 128, 16, False, False, 0),
    (replace(AHEAD, heads_per_block=16, tiles_per_step=2), (16, 1), 64, 16, True, False, 40),
    (AHEAD, (4, 1), 64, 8, False, False, 50),
    (AHEAD, (4, 1), 32, 4, False, False, 0),
    (AHEAD, (4, 1), 64, 16, False, True, 0),
    (replace(AHEAD, num_warps=4, slices=4), (8, 1), 512, 16, False, False, 0),
    (replace(AHEAD, num_warps=4, slices=2, tiles_per_step=2), (3, 1), 256, 8, True, False, 40),
    (replace(AHEAD, num_warps=4, slices=2), (2, 1), 168, 16, False, True, 0),
    (replace(AHEAD, num_warps=8, slices=2), (6, 1), 136, 16, False, False, 0),
    (replace(AHEAD, num_warps=7, min_blocks=3), (9, 1), 64, 16, False, False, 0),
]


@pytest.mark.parametrize(
    ("one", "heads", "head_size", "block_size", "is_fp8", "packed", "window"), few(STEPS, 2), ids=str
)
def test_steps_of_a_warp(
    one: DecodeConfig,
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    is_fp8: bool,
    packed: bool,
    window: int,
) -> None:
    """Against float64 attention; the order of loads, warps and schedules change no bit of a sequence's one split."""
    call = paged_call(LENGTHS, heads, head_size, block_size, torch.bfloat16, packed)
    call = over_fp8(call) if is_fp8 else call
    plain, (s, entry) = call.pop("plain"), HOLE
    call["block_tables"] = call["block_tables"].long()
    call["block_tables"][s, entry] = 2**40
    results = []
    for ahead in (True,) if is_fp8 or packed or block_size < 8 else (True, False):
        for schedule in SCHEDULES:
            V1.forget()
            with config.cpu("kernels"), tuning.forced(V1.name, replace(one, ahead=ahead)), scheduled(schedule):
                V1.wrapper(**call, sliding_window=window)
            results.append(call["out"].clone())
    V1.forget()
    assert all(same_bits(results[0], other) for other in results)
    for i, (keys, values) in enumerate(plain):
        kept = torch.arange(max(0, len(keys) - window) if window else 0, len(keys))
        if i == s:
            kept = kept[kept // block_size != entry]
        zeros = torch.zeros_like(call["out"][i]).double()
        right = truth(call["query"][i], keys[kept], values[kept]) if len(kept) else zeros
        torch.testing.assert_close(results[0][i].double(), right, rtol=1.6e-2, atol=8e-3)


def test_values_of_two_steps_where_registers_suffice() -> None:
    """Registers hold two steps of small heads, of slices of large ones, and of 16 heads of 128."""

    def ahead(**axes: Any) -> bool:
        found: bool = chosen(V1, num_tokens=64, **MODEL | axes).ahead
        return found

    assert ahead(num_heads=96)
    assert ahead(num_heads=96, kv_cache_dtype="fp8")
    assert ahead(head_size=64)
    assert not ahead()
    assert ahead(head_size=256)
    assert not chosen(V1, "gfx942", num_tokens=64, **MODEL | {"num_heads": 96}).ahead


@pytest.mark.parametrize(("head_size", "slices"), [(128, 1), (136, 2), (256, 2), (264, 4), (512, 4)])
def test_slices_of_large_heads(head_size: int, slices: int) -> None:
    """A warp has at most 128 elements of a head, so that a CTA has 16 columns for any."""
    for num_seqs in (1, 64, 4096):
        found = chosen(V1, num_tokens=num_seqs, **MODEL | {"head_size": head_size, "num_heads": 96})
        assert (found.slices, found.num_warps % slices, found.heads_per_block) == (slices, 0, 16)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("arch", "axes"),
    few(
        [
            ("sm_90", {"num_heads": 96}),
            ("sm_90", {"num_heads": 96, "kv_cache_dtype": "fp8", "options": True}),
            ("sm_100", {"head_size": 512}),
            ("sm_80", {"num_heads": 96, "head_size": 64, "kv_cache_dtype": "fp8"}),
            ("sm_90", {"num_heads": 8, "head_size": 64, "options": True}),
            ("sm_90", {"num_heads": 64, "head_size": 64}),
            ("sm_89", {"head_size": 64, "block_size": 8, "options": True}),
            ("sm_100", {"num_heads": 64, "head_size": 48, "packed": True, "dtype": "float16"}),
        ],
        1,
    ),
    ids=str,
)
def test_registers_suffice(arch: str, axes: dict[str, Any]) -> None:
    assert V1.example is not None
    one = V1.launches(*V1.example(ArgMaker(device.model(arch)), num_tokens=64, **MODEL | axes))[0].specialisation
    assert one.kernel.file == "attention/attention_decode.cu"
    report = offline.compile(one.kernel.file, str(one), one.text, arch, one.kernel.options)
    assert (report.spill_bytes, report.stack_bytes) == (0, 0)
