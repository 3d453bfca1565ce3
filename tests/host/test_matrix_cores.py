"""MMA of a warp: fragments of mma.sync, and of AMD's matrix cores against AMD's tables, lane by lane."""

from __future__ import annotations

import pytest

from pyops._core.tensors import dtypes
from pyops._core.tensors.dtypes import DType
from pyops.testing import SCHEDULES, scheduled
from tests.hip.layouts import MFMA, WMMA_11, WMMA_12, Instruction, check_registers, check_tiles

CORES = {"MFMA": (MFMA, 64, (2, 4)), "WMMA_11": (WMMA_11, 32, (8,)), "WMMA_12": (WMMA_12, 32, (4,))}
DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.int8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("core", CORES)
def test_lanes_match_amds_tables(core: str, dtype: DType) -> None:
    """Registers of any content, exactly: operands and accumulators as in AMD's tables."""
    table, lanes, widths = CORES[core]
    instruction: Instruction = table[dtype.itemsize]
    with scheduled(SCHEDULES[0], warp_size=lanes):
        for words in widths:
            check_registers(instruction, dtype, words, core)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("core", ["NO_MATRIX_CORE", *CORES])
def test_mma_of_tiles(core: str, dtype: DType) -> None:
    """Operands from shared memory, and accumulators by row and column, by every form of product.cuh."""
    lanes = 64 if core == "MFMA" else 32
    with scheduled(SCHEDULES[0], warp_size=lanes):
        for short in (False, True):
            check_tiles(dtype, lanes, short, core)
