"""Tests of ops and kernels, for pyops and its users: see docs/testing.md.

`assert_matches_reference` runs all checks in one call; the other functions are its parts. Strategies for hypothesis are
in `pyops.testing.strategies`, the only module here that needs hypothesis.
"""

from __future__ import annotations

from .._core.config import cpu
from ..host.ranks import Ranks as ranks
from ..host.run import SCHEDULES, Schedule, scheduled
from .calls import assert_matches_reference
from .compare import assert_close, same_bits
from .contents import CONTENTS, filled
from .memory import Canaries, Layout, canaries

__all__ = [
    "CONTENTS",
    "SCHEDULES",
    "Canaries",
    "Layout",
    "Schedule",
    "assert_close",
    "assert_matches_reference",
    "canaries",
    "cpu",
    "filled",
    "ranks",
    "same_bits",
    "scheduled",
]
