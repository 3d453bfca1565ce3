"""permute_cols: any order of columns, and columns out of range."""

from __future__ import annotations

import pytest
import torch

import pyops
from tests.support.calls import DEVICES
from tests.support.quantize_truth import draw


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 512), (5, 1000), (300, 64), (271, 33), (2, 3, 8), (2, 120000)])
def test_permute_cols(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """A random order, one with repetitions, and NaN bit patterns. (The last shape does not fit in shared memory.)"""
    a = torch.randint(-(2**15), 2**15, (*shape, dtype.itemsize // 2), dtype=torch.int16, device=device).view(dtype)[
        ..., 0
    ]
    a = a.contiguous()
    generator = torch.Generator().manual_seed(0)
    for perm in (
        torch.randperm(shape[-1], generator=generator),
        torch.randint(0, shape[-1], shape[-1:], generator=generator),
    ):
        words = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        result = pyops.permute_cols(a, perm.int().to(device))
        assert torch.equal(result.view(words), a.view(words)[..., perm.to(device)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [3, 300])
def test_columns_out_of_range_are_zero(rows: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = draw(rows, 24, device=device) + 100
    perm = torch.arange(24, dtype=torch.int32, device=device)
    perm[[0, 5, 8, 23]] = torch.tensor([-1, 24, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    result = pyops.permute_cols(a, perm)
    wanted = a.clone()
    wanted[:, [0, 5, 8, 23]] = 0.0
    assert torch.equal(result, wanted)
    monkeypatch.setenv("PYOPS_CHECK", "1")
    pyops.registry["permute_cols"].forget()
    try:
        with pytest.raises(pyops.OpError, match=r"^permute_cols: perm: 4 of 24 indices are out of range, the first"):
            pyops.permute_cols(a, perm)
    finally:
        pyops.registry["permute_cols"].forget()
