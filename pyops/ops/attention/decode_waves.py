"""Decode attention: in how many waves of CTAs the splits of a call take the least time.

Lengths are on the device, so the plan gives Balance of splits.cuh the lengths from which two waves, and three, are
fastest. "A model of these times" and "Waves of mixed lengths" of docs/performance/decode.md have the measurements.
"""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple

MOST_WAVES = 3  # most waves of splits, if all sequences have at most one CTA in a wave
# What an SM, and a CTA, load at most, as multiples of an SM's share of DRAM: 41, 24 and 33.7 KB per us.
_SM_RATE, _CTA_RATE = 41.0 / 33.7, 24.0 / 33.7
_START_BYTES = 26.7e6  # bytes that DRAM gives in the 6 us that a CTA takes without its loads, at 4.45 TB/s
_NORM = 8.0  # loads that DRAM and SMs bound alike take the norm of both times: 9 % longer than either
_ROUNDED_UP = 0.5  # splits that a sequence has on top of its part of all splits, on average: they are rounded up


class Time(NamedTuple):
    """A time in tokens of a CTA of a full wave, for sequences of `tokens` tokens on average: fixed + slope * tokens."""

    fixed: float
    slope: float

    def fastest_from(self, other: Time) -> float:
        """Tokens from which this time is less than one with a smaller fixed part."""
        if self.slope >= other.slope:
            return inf
        return 0.0 if other.slope == inf else (self.fixed - other.fixed) / (other.slope - self.slope)


class From(NamedTuple):
    """Mean tokens of a sequence from which two waves, and three, are fastest."""

    two: float
    three: float

    @classmethod
    def of(cls, times: list[Time]) -> From:
        """By the times of one wave, of two and of three."""
        one, two, three = times
        from_three = max(three.fastest_from(one), three.fastest_from(two))
        return cls(min(two.fastest_from(one), from_three), from_three)

    def waves(self, tokens: float) -> int:
        """The waves of sequences of so many tokens, as Balance of splits.cuh has them."""
        return 1 if tokens < self.two else 2 if tokens < self.three else MOST_WAVES


class Waves(NamedTuple):
    """Waves of splits.

    Attributes:
        num_seqs: sequences.
        splits: splits of all sequences that run at once.
        ctas_of_sm: CTAs of an SM that run at once.
        start_tokens: tokens that a CTA of a full wave loads in the time that it takes without its loads.
    """

    num_seqs: int
    splits: float
    ctas_of_sm: float
    start_tokens: float

    def equal_splits(self, waves: int) -> int:
        """Splits of each sequence that fill so many waves, where all have one length."""
        return max(1, int(waves * self.splits / self.num_seqs + 1e-4))

    def most_of(self, tokens: int) -> int:
        """The most waves of sequences of at most so many tokens."""
        return max(self.equal_from.waves(tokens), self.mixed_from.waves(tokens))

    @classmethod
    def of(cls, num_seqs: int, splits: float, ctas_at_once: int, num_sms: int, token_bytes: int) -> Waves:
        """The waves of this many CTAs at once, with tokens of so many bytes."""
        return cls(num_seqs, splits, ctas_at_once / num_sms, _START_BYTES / ctas_at_once / token_bytes)

    @property
    def equal_from(self) -> From:
        """For sequences of one length."""
        if self.num_seqs > self.splits:
            return From(inf, inf)
        return From.of([self._equal_time(waves) for waves in range(1, MOST_WAVES + 1)])

    @property
    def mixed_from(self) -> From:
        """For sequences of mixed lengths."""
        return From.of([self._mixed_time(waves) for waves in range(1, MOST_WAVES + 1)])

    def _equal_time(self, waves: int) -> Time:
        splits = self.equal_splits(waves)
        full, part = divmod(self.num_seqs * splits / self.splits, 1.0)
        if part < 1e-3:  # a rounding error
            return Time(full * self.start_tokens, full / splits)
        return Time((full + 1) * self.start_tokens, (full + self._part_time(part, is_first=full == 0)) / splits)

    def _part_time(self, part: float, is_first: bool) -> float:
        """The part of the time of a full wave that the loads of `part` of its CTAs take.

        The CTAs of the first wave fill one SM after the other. Later ones start on the SM with the fewest.
        """
        if is_first:
            return float((part**_NORM + _SM_RATE**-_NORM) ** (1 / _NORM))
        on_sm = ceil(part * self.ctas_of_sm)
        return max(part, on_sm / self.ctas_of_sm / min(_SM_RATE, _CTA_RATE * on_sm))

    def _mixed_time(self, waves: int) -> Time:
        """All splits are about as long as the longest one."""
        if waves * self.splits < self.num_seqs:
            return Time(waves * self.start_tokens, inf)
        splits = waves * self.splits - _ROUNDED_UP * self.num_seqs
        return Time(waves * self.start_tokens, waves * self.num_seqs / splits)


def wave_arguments(waves: Waves | None) -> dict[str, float]:
    """The arguments of kernels with Balance of splits.cuh; zeros if splits have equal sizes in all sequences."""
    names = "wave_splits", "two_waves", "three_waves", "two_mixed_waves", "three_mixed_waves"
    return dict(zip(names, (waves.splits, *waves.equal_from, *waves.mixed_from) if waves else (0.0,) * 5, strict=True))
