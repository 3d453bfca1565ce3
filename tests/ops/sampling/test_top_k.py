"""Top-k of rows against numpy's sort: every position, also for equal values, NaN and partial segments."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops._core import config
from pyops._core.system import device as devices
from pyops.example import ArgMaker
from pyops.host import toolchain
from pyops.ops.sampling.top_k import LongRows, ShortRows, TopKProblem, choose
from pyops.testing import SCHEDULES, scheduled
from tests.support.calls import DEVICES


def best(row: Any, start: int, end: int, k: int) -> list[int]:
    """By a stable sort of the values' bits."""
    start = min(max(start, 0), len(row))
    values = row[start : max(start, min(end, len(row)))]
    if len(values) <= k:
        return [*range(len(values)), *[-1] * (k - len(values))]
    bits = values.view("int32").astype("int64")
    order = numpy.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
    return sorted(numpy.argsort(-order, kind="stable")[:k].tolist())


def prefill(logits: torch.Tensor, starts: list[int], ends: list[int], k: int) -> torch.Tensor:
    rows = len(starts)
    bounds = [torch.tensor(x, dtype=torch.int32, device=logits.device) for x in (starts, ends)]
    indices = torch.full((rows, k), 77, dtype=torch.int32, device=logits.device)
    pyops.top_k_per_row_prefill(logits, *bounds, indices, rows, *logits.stride(), k)
    right = [best(row, *bound, k) for row, *bound in zip(logits.cpu().numpy(), starts, ends, strict=False)]
    assert indices.tolist() == right
    return indices


def values(kind: str, *shape: int, seed: int = 0) -> torch.Tensor:
    random = numpy.random.default_rng(seed)
    normal = random.standard_normal(shape).astype("float32")
    bits = {
        "normal": normal.view("int32"),
        "low bits": (normal[..., :1].view("int32") & ~0xFFF) | random.integers(0, 4096, shape, dtype="int32"),
        "few values": random.integers(0, 3, shape).astype("float32").view("int32"),
        "equal": numpy.zeros(shape, "int32"),
        "all bits": random.integers(-(2**31), 2**31, shape).astype("int32"),
        "lowest": numpy.full(shape, -1, "int32"),  # -NaN with every bit set
        "highest": numpy.where(random.random(shape) < 0.9, 2**31 - 1, 7).astype("int32"),  # NaN with every bit set
        "-inf": numpy.where(random.random(shape) < 0.9, numpy.float32(-numpy.inf), normal).view("int32"),
    }
    return torch.from_numpy(bits[kind].copy()).view(torch.float32)


KINDS = ["normal", "low bits", "few values", "equal", "all bits", "lowest", "highest", "-inf"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@given(
    columns=st.sampled_from([1, 5, 64, 1000, 2047]),
    k=st.sampled_from([1, 2, 7, 64, 512]),
    bounds=st.lists(st.tuples(st.integers(-3, 700), st.integers(-3, 2100)), min_size=1, max_size=4),
    offset=st.integers(0, 3),
    step=st.sampled_from([1, 1, 2]),
)
def test_segments(
    kind: str, columns: int, k: int, bounds: list[tuple[int, int]], offset: int, step: int, device: str
) -> None:
    """Anywhere in rows of any stride, also beyond the last column."""
    memory = values(kind, len(bounds), offset + columns * step, seed=columns).to(device)
    logits = memory[:, offset::step] if step > 1 else memory[:, offset:]
    prefill(logits, [start for start, _ in bounds], [end for _, end in bounds], k)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [16385, 40003])
def test_long_rows(kind: str, columns: int, device: str) -> None:
    """The CTAs of a cluster share a long row; rows of one piece or less lie next to it."""
    logits = values(kind, 5, columns).to(device)
    ends = [columns, columns - 1, 16384, 300, 20000]
    prefill(logits, [0, 3, 0, 5, 3000], ends, 300)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [2048, 4100, 8189, 12000])
def test_short_rows(kind: str, columns: int, device: str) -> None:
    """Held in registers, in one round or several, with segments that begin and end anywhere in a round."""
    logits = values(kind, 5, columns).to(device)
    prefill(logits, [0, 3, 2047, 0, 1001], [columns, columns - 1, columns, 300, 1700], 290)
    prefill(logits, [0, 0], [columns, columns - 2], columns - 3 if columns < 4096 else 4096)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_short_rows_with_a_large_k(kind: str, device: str) -> None:
    """k is so large that short rows are searched like long ones."""
    prefill(values(kind, 3, 6001).to(device), [0, 3, 900], [6001, 5999, 3000], 4097)


@pytest.mark.parametrize("device", DEVICES)
def test_k_beyond_shared_memory(device: str) -> None:
    """k is so large that pieces would not pay, in rows that shared memory cannot hold; and all elements but one."""
    prefill(values("few values", 2, 70001).to(device), [0, 9], [70001, 69990], 5000)
    prefill(values("normal", 1, 3000).to(device), [0], [3000], 2999)
    apart = values("normal", 1, 140002).to(device)
    prefill(apart[:, ::2], [3], [69990], 5000)
    # The last vector, of one element, is the last of four that a thread loads at a time; after it lie the largest
    # values.
    behind = values("normal", 1, 79547).to(device)
    behind[:, 79537:] = 1e9
    prefill(behind, [0], [79537], 5000)


@pytest.mark.parametrize("device", DEVICES)
def test_threads_with_few_and_many_candidates(device: str) -> None:
    """A thread of the first block has one candidate in the first row and one more in each next row; it has space for
    17.

    Sixteen vectors of the sample, in the last block, decide that ones are candidates and zeros are none.
    """
    logits = torch.zeros(20, 65536)
    logits[:, 49152:].view(20, -1, 32)[:, :16, :4] = 1.0
    vectors = logits.view(20, 32, 512, 4)  # a thread has the same vector of each 512
    for row in range(20):
        vectors[row, : 1 + row // 4, 5, :] = 1.0
        vectors[row, row // 4, 5, row % 4 + 1 :] = 0.0
    prefill(logits.to(device), [0] * 20, [65536] * 20, 33)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("next_n", [1, 3])
def test_decode_rows(next_n: int, device: str) -> None:
    """The last tokens of a sequence see ever longer rows; a row of negative length is empty."""
    lens = [0, 1, 2, 40, 999, 1000, 5000]
    rows = next_n * len(lens) - next_n // 2
    logits = values("normal", rows, 1000).to(device)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    indices = torch.full((rows, 30), 77, dtype=torch.int32, device=device)
    pyops.top_k_per_row_decode(logits, next_n, seq_lens, indices, rows, *logits.stride(), 30)
    ends = [lens[r // next_n] - next_n + r % next_n + 1 for r in range(rows)]
    assert indices.tolist() == [best(row, 0, end, 30) for row, end in zip(logits.cpu().numpy(), ends, strict=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [500, 5000])
def test_decode_with_a_length_for_each_row(columns: int, device: str) -> None:
    """Two-dimensional lengths are those of the rows themselves, for any next_n."""
    lens = [[0, 7], [400, -3], [499, 40], [2, 1]]
    logits = values("normal", 7, columns).to(device)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    indices = torch.full((7, 30), 77, dtype=torch.int32, device=device)
    pyops.top_k_per_row_decode(logits, 2, seq_lens, indices, 7, *logits.stride(), 30)
    ends = [max(0, end) for row in lens for end in row][:7]
    assert indices.tolist() == [best(row, 0, end, 30) for row, end in zip(logits.cpu().numpy(), ends, strict=True)]
    with pytest.raises(pyops.OpError, match="seq_lens: expected a contiguous tensor"):
        pyops.top_k_per_row_decode(logits, 2, seq_lens.t(), indices, 7, *logits.stride(), 30)
    with pytest.raises(pyops.OpError, match="seq_lens: expected at least 7 elements"):
        pyops.top_k_per_row_decode(logits, 2, seq_lens[:3], indices, 7, *logits.stride(), 30)


@pytest.mark.parametrize("device", DEVICES)
def test_empty_and_short_rows(device: str) -> None:
    logits = values("normal", 4, 50).to(device)
    prefill(logits, [], [], 3)
    prefill(logits, [0, 1], [50, 50], 3)
    prefill(logits, [0], [50], 0)


@pytest.mark.skipif(not toolchain.toolchains(), reason="no C++ compiler")
def test_every_schedule() -> None:
    with config.cpu("kernels"):
        for columns in (20000, 6000):
            logits = values("few values", 2, columns)
            for warp_size in (32, 64):
                for schedule in SCHEDULES:
                    with scheduled(schedule, warp_size=warp_size):
                        prefill(logits, [0, 11], [columns, columns - 1000], 100)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"numRows": 5}, "rowStarts: expected at least 5"),
        ({"logits": torch.zeros(3, 50)}, "numRows: expected 0 to 3"),
        ({"stride0": 51}, "logits: expected strides"),
        ({"topK": -1}, "topK: expected 0 or more"),
        ({"topK": 4}, "indices: expected shape"),
        ({"rowEnds": torch.zeros(3, dtype=torch.int32)}, "rowEnds: expected at least 4 elements"),
    ],
)
def test_wrong_sizes_are_refused(wrong: dict[str, Any], message: str) -> None:
    bounds = torch.zeros(4, dtype=torch.int32)
    given = {"logits": torch.zeros(4, 50), "rowStarts": bounds, "rowEnds": bounds}
    given |= {"indices": torch.zeros((4, 3), dtype=torch.int32), "numRows": 4, "stride0": 50, "stride1": 1, "topK": 3}
    with pytest.raises(pyops.OpError, match=message):
        pyops.top_k_per_row_prefill(**given | wrong)


def test_shared_memory_of_every_device() -> None:
    """The plan fits, also where a block has 64 KiB."""
    for arch in ("sm_80", "sm_90", "sm_100", "gfx942"):
        device = devices.model(arch)
        for columns in (8192, 16384, 50000, 300000):
            for k in (1, 2048, 3000, 20000):
                args = pyops.registry["top_k_per_row_decode"].example(ArgMaker(device), topK=k, vocab_size=columns)
                for launch in pyops.registry["top_k_per_row_decode"].launches(*args):
                    assert launch.shared + 10 * 1024 <= device.shared_memory


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (TopKProblem(1, 0, 20), ShortRows(num_threads=512, min_blocks=3)),
        (TopKProblem(64, 8192, 2048), ShortRows(num_threads=512, min_blocks=3)),
        (TopKProblem(64, 8192, 2048, is_aligned=False), ShortRows(num_threads=1024, min_blocks=1)),
        (TopKProblem(64, 16384, 2048), ShortRows(num_threads=1024, min_blocks=1)),
        (TopKProblem(64, 8192, 5000), LongRows(num_threads=512, cluster=1, capacity=9)),
        (TopKProblem(64, 8192, 20, vec_size=1), LongRows(num_threads=512, cluster=1, capacity=9)),
        (TopKProblem(1, 65536, 2048), LongRows(num_threads=512, cluster=8, capacity=9)),
        (TopKProblem(16, 65536, 2048), LongRows(num_threads=512, cluster=4, capacity=17)),
        (TopKProblem(64, 65536, 2048), LongRows(num_threads=1024, cluster=2, capacity=17)),
        (TopKProblem(256, 131072, 2048), LongRows(num_threads=1024, cluster=1, capacity=23)),
    ],
)
def test_geometry(problem: TopKProblem, expected: ShortRows | LongRows) -> None:
    """Registers for short rows; larger clusters for fewer rows, up to the capacity of an H200."""
    assert choose(problem, devices.model()) == expected
