"""splits.cuh and decode_waves.py: how many splits the sequences of decode attention have."""

from __future__ import annotations

from math import inf

import numpy
import pytest

from pyops.ops.attention.decode_waves import From, Time, Waves, wave_arguments
from tests.support.kernels import launched

SPLITS = """
#include "attention/splits.cuh"
extern "C" __global__ void LAUNCH_BOUNDS(32, 1)
count_splits(int* found,               // [num_seqs]
             const int64_t* seq_lens,  // [num_seqs]
             int64_t num_seqs, int64_t max_tokens, float wave_splits, float two_waves, float three_waves,
             float two_mixed_waves, float three_mixed_waves, int head_size) {
    const Balance<int64_t> balance(seq_lens, 1, num_seqs, max_tokens, 0,
                                   {wave_splits, {two_waves, three_waves}, {two_mixed_waves, three_mixed_waves}}, 50,
                                   head_size);
    for (int seq = threadIdx.x; seq < num_seqs; seq += WARP_SIZE) found[seq] = balance.splits_of(seq);
}
"""


def splits_of(lengths: list[int], waves: Waves, head_size: int = 128) -> list[int]:
    """The splits of each sequence, by Balance of splits.cuh."""
    found = numpy.zeros(len(lengths), numpy.int32)
    launched(
        SPLITS,
        1,
        32,
        found=found,
        seq_lens=numpy.array(lengths, numpy.int64),
        num_seqs=len(lengths),
        max_tokens=max(lengths),
        head_size=head_size,
        **wave_arguments(waves),
    )
    return list(map(int, found))


def waves_of_h200(num_seqs: int, ctas_of_sm: int, kv_heads: int, token_bytes: int) -> Waves:
    """The waves of the 132 SMs of an H200."""
    ctas = 132 * ctas_of_sm
    return Waves.of(num_seqs, ctas / kv_heads, ctas, 132, token_bytes)


@pytest.mark.parametrize(
    ("num_seqs", "head_size", "late", "splits"),
    [
        (60, 128, 0, 1),  # one wave
        (66, 128, 7, 8),  # a tenth of a wave is left: 54 more splits fill it
        (84, 128, 36, 2),  # two fifths are left, for two splits of a sequence
        (100, 128, 0, 1),  # two thirds are left
        (66, 64, 0, 1),
    ],
)
def test_splits_of_alike_sequences_fill_the_last_wave(num_seqs: int, head_size: int, late: int, splits: int) -> None:
    """60 splits run at once. Each sequence has one, but the last ones share what is left of the last wave."""
    found = splits_of([700] + [900] * (num_seqs - 1), Waves(num_seqs, 60.0, 1.0, 100.0), head_size)
    assert found == [1] * (num_seqs - late) + [splits] * late
    assert sum(found) <= -(-num_seqs // 60) * 60


# {(sequences, tokens, CTAs of an SM, bytes of a token, KV heads): {splits of a sequence: us}} on an H200:
# docs/performance/decode.md, "Three waves of equal splits".
MEASURED = {
    (24, 8192, 2, 1024, 8): {1: 444, 2: 459, 4: 394.8, 5: 421},
    (24, 8192, 2, 512, 8): {1: 226, 2: 227, 4: 201.5, 5: 212.9},
    (18, 8192, 2, 512, 8): {1: 212, 2: 216, 3: 162.5, 4: 185, 5: 165},
    (29, 8192, 2, 512, 8): {1: 243, 2: 253, 3: 256, 4: 260, 5: 267},
    (33, 8192, 2, 512, 8): {1: 251, 2: 260.6, 3: 268.2},
    (34, 8192, 3, 512, 8): {1: 331, 2: 292, 3: 300, 4: 265},
    (28, 8192, 3, 512, 8): {1: 325, 2: 284, 3: 223, 4: 241, 5: 223},
    (26, 3000, 3, 512, 8): {1: 114, 2: 106, 3: 84.8, 4: 95.7},
    (34, 3000, 3, 512, 8): {1: 124, 2: 115, 3: 121, 4: 107.5},
    (41, 3000, 3, 512, 8): {1: 128, 2: 126, 3: 130, 4: 134},
    (18, 3000, 2, 512, 8): {1: 81, 2: 89, 3: 69.7, 4: 81, 5: 77},
    (24, 3000, 2, 512, 8): {1: 87, 2: 94, 3: 101, 4: 90, 5: 99},
    (24, 3000, 2, 1024, 8): {1: 176, 2: 182, 3: 192, 4: 167, 5: 178},
    (64, 8192, 4, 512, 8): {1: 483.6, 2: 481.4},
    (16, 16384, 3, 512, 8): {3: 245.2, 6: 245.3},
    (8, 8192, 2, 512, 8): {4: 70.7, 8: 84.3},
    (4, 4252, 3, 512, 8): {12: 24.9, 23: 27.5},
    (30, 20000, 3, 512, 8): {1: 778.5, 2: 672.5, 3: 557.2, 4: 580.6},
    (40, 20000, 3, 512, 8): {1: 817.1, 2: 751.0, 3: 768.6, 4: 777.1},
    (64, 2048, 3, 512, 2): {2: 48.2, 3: 37.4, 6: 44.9},
    (64, 8192, 3, 512, 2): {2: 172.4, 3: 129.2, 6: 134.2, 9: 135.9},
    (35, 45179, 3, 512, 2): {5: 392.5, 7: 441.7, 11: 365.4, 16: 367.3, 22: 368.8},
    (50, 20000, 3, 512, 1): {5: 140.3, 7: 132.8, 15: 127.5},
}


@pytest.mark.parametrize("call", MEASURED)
def test_splits_of_equal_lengths_are_fast(call: tuple[int, int, int, int, int]) -> None:
    """The kernel and the plan take the same number of splits, which is within 2 % of the fastest measured one."""
    num_seqs, tokens, ctas_of_sm, token_bytes, kv_heads = call
    waves, times = waves_of_h200(num_seqs, ctas_of_sm, kv_heads, token_bytes), MEASURED[call]
    planned = waves.equal_splits(waves.equal_from.waves(tokens))
    assert splits_of([tokens] * num_seqs, waves) == [planned] * num_seqs
    assert times[planned] <= 1.02 * min(times.values())


@pytest.mark.parametrize(
    ("num_seqs", "lengths", "ctas_of_sm", "kv_heads", "fastest"),
    [
        (16, (1, 8192), 3, 8, (2,)),  # 75.9 us in one wave, 73.6, 76.2, and 82.8 in four
        (32, (1, 4096), 3, 8, (2,)),  # 75.8, 73.6, 75.6, 82.2
        (64, (1, 2048), 4, 8, (2, 3)),  # 85.3, 78.0, 78.9, 87.6
        (100, (1, 2048), 4, 8, (2, 3)),  # 133.2, 114.0, 114.3, 121.9
        (8, (1, 8192), 3, 8, (1,)),  # 40.0, 44.9, 48.7, 52.5
        (64, (1, 16384), 4, 8, (3,)),  # 604.6, 510.1, 501.6, 508.0
        (64, (4096, 8192), 4, 8, (3,)),  # 395.3, 393.2, 381.0, 385.6
    ],
)
def test_waves_of_mixed_lengths(
    num_seqs: int, lengths: tuple[int, int], ctas_of_sm: int, kv_heads: int, fastest: tuple[int, ...]
) -> None:
    """Evenly spread lengths are in the number of waves that was measured to be the fastest, and fit in these."""
    waves = waves_of_h200(num_seqs, ctas_of_sm, kv_heads, 512)
    tokens = numpy.linspace(*lengths, num_seqs).round().astype(int).tolist()
    planned = waves.mixed_from.waves(sum(tokens) / num_seqs)
    assert planned in fastest
    found = splits_of(tokens, waves)
    assert (planned - 1) * waves.splits < sum(found) + num_seqs / 2
    assert sum(found) <= planned * waves.splits
    assert planned <= waves.most_of(max(tokens))


def test_most_waves_grow_with_the_lengths() -> None:
    """Shorter sequences have no more waves, so that the grid has a block for each split."""
    for num_seqs in range(2, 120, 7):
        for ctas_of_sm, kv_heads in ((2, 8), (3, 8), (3, 1)):
            waves = waves_of_h200(num_seqs, ctas_of_sm, kv_heads, 512)
            for of in (waves.equal_from, waves.mixed_from):
                assert of.two <= of.three
                counts = [of.waves(tokens) for tokens in range(1, 100000, 97)]
                assert counts == sorted(counts)


def test_fewest_time_of_three() -> None:
    """The lengths from which two waves and three are fastest are where their times are equal."""
    times = [Time(1.0, 3.0), Time(2.0, 2.0), Time(4.0, 1.5)]
    assert From.of(times) == (1.0, 4.0)
    assert From.of([Time(1.0, 3.0), Time(2.0, 3.0), Time(3.0, 2.0)]) == (2.0, 2.0)  # two are never fastest
    assert From.of([Time(1.0, 1.0), Time(2.0, 1.0), Time(3.0, 1.0)]) == (inf, inf)
    assert From.of([Time(1.0, inf), Time(2.0, 2.0), Time(3.0, 1.0)]) == (0.0, 1.0)
