"""Dequantisation of GGUF weights against the decoders of the `gguf` package."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops.testing import Layout, same_bits
from tests.ops.quantize.test_weights import DTYPES, _quietly, poisoned, same  # noqa: F401
from tests.support.calls import DEVICES

gguf = pytest.importorskip("gguf")
pytest.importorskip("gguf.quants")

TYPES = [t for t in gguf.GGMLQuantizationType if t in (2, 3, 6, 7, 8, *range(10, 15), *range(16, 24), 29)]
# {type: offsets of half-precision numbers in a block}.
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
_HALVES |= {"Q6_K": (208,), "IQ1_M": ()}
_NUMBERS = [0.0, -0.0, numpy.inf, -numpy.inf, numpy.nan, 65504.0, 2.0**-24, -(2.0**-15)]


def ggml_case(kind: Any, m: int, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(random bytes with special scales among them, their values by the format's own decoder)."""
    length, nbytes = gguf.GGML_QUANT_SIZES[kind]
    random = numpy.random.default_rng(seed)
    blocks = random.integers(0, 256, (m * n // length, nbytes), dtype="uint8")
    for at in _HALVES.get(kind.name, (0,)):
        for block, number in enumerate(_NUMBERS):
            blocks[(at + 3 * block + seed) % len(blocks), at : at + 2] = numpy.frombuffer(
                numpy.float16(number), "uint8"
            )
    weight = blocks.reshape(m, -1)
    return torch.from_numpy(weight), torch.from_numpy(gguf.quants.dequantize(weight, kind))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_ggml(kind: Any, device: str) -> None:
    """The bits of the format's own decoder; enough blocks to use every entry of a grid."""
    m, n = 40, 4096
    weight, truth = ggml_case(kind, m, n, seed=kind)
    for dtype in DTYPES:
        same(pyops.ggml_dequantize(weight.to(device), int(kind), m, n, dtype), truth.to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@given(
    kind=st.sampled_from(TYPES),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 70)),
    dtype=st.sampled_from(DTYPES),
    offsets=st.tuples(st.integers(0, 17), st.integers(0, 8)),
    seed=st.integers(0, 99),
)
def test_ggml_of_any_shape(
    kind: Any, shape: tuple[int, int], dtype: torch.dtype, offsets: tuple[int, int], seed: int, device: str
) -> None:
    """Few blocks or many, with any address of input and output."""
    m, n = shape[0], shape[1] * gguf.GGML_QUANT_SIZES[kind][0]
    weight, truth = ggml_case(kind, m, n, seed)
    out = Layout(offset=offsets[1]).place(poisoned((m, n), dtype).to(device))
    assert pyops.ggml_dequantize(Layout(offset=offsets[0]).place(weight.to(device)), int(kind), m, n, out=out) is out
    same(out, truth.to(dtype))


def test_ggml_dtype() -> None:
    """float16 is the default dtype; the bytes may have any shape, and may be a numpy array."""
    weight, truth = ggml_case(gguf.GGMLQuantizationType.Q4_K, 3, 512, seed=0)
    same(pyops.ggml_dequantize(weight, 12, 3, 512, None), truth.half())
    same(pyops.ggml_dequantize(weight.reshape(2, 3, -1), 12, 3, 512, torch.bfloat16), truth.bfloat16())
    same(torch.from_numpy(pyops.ggml_dequantize(weight.numpy(), 12, 3, 512, None)), truth.half())
    same(torch.from_numpy(pyops.ggml_dequantize(weight.numpy(), 12, 3, 512, "float32")), truth)


@pytest.mark.parametrize(
    ("quant_type", "n", "nbytes", "argument"),
    [(t, 256, 144, "quant_type") for t in (-1, 0, 1, 4, 5, 9, 15, 24, 28, 30, 999)]
    + [(12, 128, 72, "out"), (2, 48, 27, "out"), (12, 256, 143, "W"), (12, 512, 144, "W"), (2, 32, 36, "W")],
)
def test_ggml_refused(quant_type: int, n: int, nbytes: int, argument: str) -> None:
    out = poisoned((1, n), torch.float16)
    before = out.clone()
    with pytest.raises(pyops.OpError) as caught:
        pyops.ggml_dequantize(torch.zeros(1, nbytes, dtype=torch.uint8), quant_type, 1, n, out=out)
    assert caught.value.argument == argument
    assert same_bits(out, before)


def test_impossible_sizes_are_refused() -> None:
    for size in ({"m": -1, "n": 256}, {"m": 1, "n": -256}):
        with pytest.raises(pyops.OpError, match=r"^ggml_dequantize: [mn]: expected 0 or more, got -"):
            pyops.ggml_dequantize(torch.zeros(144, dtype=torch.uint8), 12, **size)
    words, scales = torch.zeros(8, 1, dtype=torch.int32), torch.ones(1, 8)
    for wrong in ((words[0, 0], scales, words[:1]), (words, scales[0, 0], words[:1])):
        with pytest.raises(pyops.OpError, match=r"^awq_dequantize: (qweight|scales): expected shape"):
            pyops.awq_dequantize(*wrong, 0, 0, 0)
