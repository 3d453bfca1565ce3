"""Attention by AMD's WMMA on the host backend, under every schedule. Other tests run MFMA with warps of 64 lanes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import pyops
from pyops._core.launch.kernel import Specialisation
from pyops._core.system import device
from pyops.testing import SCHEDULES, assert_matches_reference
from tests.support.calls import example

pytestmark = pytest.mark.rotates

V1, RAGGED = pyops.registry["paged_attention_v1"], pyops.registry["attention_varlen"]
CORES = {"gfx1100": "WMMA_11", "gfx1201": "WMMA_12"}


@pytest.fixture(params=CORES)
def used(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The kernel files that ran: CPU tensors are planned as for this architecture, with its MMA."""
    files: set[str] = set()

    def text_of(self: Specialisation) -> str:
        files.add(self.kernel.file)
        return f"#define PYOPS_HOST_CORE {CORES[request.param]}\n{text(self)}"

    text = Specialisation.text.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Specialisation, "text", property(text_of))
    monkeypatch.setitem(device._HOST, 32, device.model(request.param))
    V1.forget()
    yield files
    V1.forget()


@pytest.mark.parametrize(
    "axes",
    [
        {
            "head_size": 80,
            "min_seq_len": 16,
            "max_seq_len": 70,
            "num_heads": 10,
        },  # a lane without a chunk; pieces on gfx11
        {"head_size": 64, "max_seq_len": 40, "kv_cache_dtype": "fp8", "packed": True, "options": True},
    ],
    ids=["flash", "packed"],
)
def test_decode(used: set[str], axes: dict[str, Any]) -> None:
    names = [parameter.name for parameter in V1.parameters]
    assert_matches_reference(V1, **dict(zip(names, example(V1, num_tokens=2, **axes), strict=True)))
    assert "attention/attention_decode.cu" in used


def test_ragged(used: set[str]) -> None:
    """Head sizes that fill half of the last MMA's K: 8 elements and 8 zeros."""
    RAGGED.forget()
    names = [parameter.name for parameter in RAGGED.parameters]
    call = dict(zip(names, example(RAGGED, num_tokens=80, head_size=72, causal=False), strict=True))
    assert_matches_reference(RAGGED, schedules=SCHEDULES[:2], **call)
    assert "attention/prefill_mma.cu" in used
    RAGGED.forget()
