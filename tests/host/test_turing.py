"""Turing (sm_75) on the host backend: its MMAs against numpy, and ops with kernels that have another text there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest

import pyops
from pyops._core import config
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops.example import ArgMaker
from pyops.host.toolchain import toolchains
from pyops.testing import SCHEDULES, scheduled
from pyops.testing.calls import assert_results, assert_same, expected, run
from tests.host.test_host import MMA, WORDS, matrices
from tests.support.calls import example
from tests.support.kernels import Run

pytestmark = pytest.mark.skipif(not toolchains(), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def turing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors are planned for sm_75, and kernels run as there."""
    monkeypatch.setenv("PYOPS_ARCH", "sm_75")
    for op in pyops.registry.values():
        op.forget()
    yield
    for op in pyops.registry.values():
        op.forget()


def test_mma_of_float16(run_on_host: Run) -> None:
    """Two m16n8k8, which round twice."""
    start, a, b, right = matrices(dtypes.float16)
    for schedule in SCHEDULES:
        d = start.copy()
        with scheduled(schedule):
            run_on_host(MMA, grid=1, block=32, scalar_t=dtypes.float16, d=d, a=a, b=b)
        assert numpy.abs(d - right).max() <= 2 * 2**-24 * numpy.abs(right).max() + 1e-12


def test_mma_of_bfloat16_does_not_compile(run_on_host: Run) -> None:
    operands = {"d": numpy.zeros(128, "f"), "a": numpy.zeros(256, "u2"), "b": numpy.zeros(128, "u2")}
    with pytest.raises(pyops.CompileError):
        run_on_host(MMA, grid=1, block=32, scalar_t=dtypes.bfloat16, **operands)


@pytest.mark.parametrize("unsigned", [False, True])
def test_mma_of_int8(run_on_host: Run, unsigned: bool) -> None:
    """Four m8n8k16, exactly; b is given by its columns."""
    rng = numpy.random.default_rng(5)
    a = rng.integers(0, 256, (16, 32)).astype(numpy.uint8) if unsigned else rng.integers(-128, 128, (16, 32))
    b, start = rng.integers(-128, 128, (8, 32)), rng.integers(-1000, 1000, (16, 8)).astype(numpy.int32)
    words = {name: one.astype(numpy.int8).view(numpy.uint32) for name, one in (("a", a), ("b", b))}
    call = f"mma_m16n8k32<int8_t, {'uint8_t' if unsigned else 'int8_t'}>"
    for schedule in SCHEDULES:
        d = start.copy()
        with scheduled(schedule):
            run_on_host(WORDS.replace("PRODUCT", f"({call})"), grid=1, block=32, sum_t=dtypes.int32, d=d, **words)
        assert numpy.array_equal(d, start + a.astype(int) @ b.astype(int).T)


# (op, axes of its example, a kernel that it launches)
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("linear", {"dtype": "float16", "input_size": 51, "activation": "silu_and_mul", "num_tokens": 40}, "gemm_sm80.cu"),
    ("linear", {"dtype": "bfloat16", "activation": "gelu", "with_bias": True, "num_tokens": 40}, "linear/gemm_simt.cu"),
    ("cutlass_scaled_mm_azp", {"with_azp": True, "with_bias": True, "num_tokens": 40}, "linear/gemm_sm80.cu"),
    ("cutlass_scaled_mm", {"quant_dtype": "float8_e4m3fn", "scales": "block"}, "linear/gemm_sm80.cu"),
    ("cutlass_moe_mm", {"per_row": True}, "linear/gemm_sm80.cu"),
    ("awq_gemm", {"dtype": "float16", "num_groups": 2, "is_tiled": True}, "linear/wq_gemm_sm80.cu"),
    ("marlin_gemm", {"quant_dtype": "float16", "with_bias": True}, "linear/wq_gemm_sm80.cu"),
    ("ggml_mul_mat_a8", {"dtype": "float16", "quant_type": 12, "num_tokens": 3}, "linear/ggml_mul_mat.cu"),  # Q4_K
    ("ggml_moe_a8", {"dtype": "float16", "quant_type": 14}, "linear/ggml_mul_mat.cu"),  # Q6_K
    ("ggml_mul_mat_a8", {"dtype": "float32", "quant_type": 12, "num_tokens": 3}, "linear/ggml_mul_mat_simt.cu"),
    ("ggml_dequantize", {"dtype": "float16", "quant_type": 12}, "quantize/ggml_dequantize.cu"),
    ("paged_attention_v1", {"dtype": "float16", "head_size": 64, "options": True}, "attention/attention_decode.cu"),
    ("paged_attention_v1", {"dtype": "float16", "kv_cache_dtype": "fp8", "packed": True}, "attention_decode.cu"),
    ("attention_varlen", {"dtype": "float16", "num_tokens": 80, "head_size": 72}, "attention/prefill_mma.cu"),
    ("paged_attention_varlen", {"dtype": "float16", "kv_cache_dtype": "fp8", "num_tokens": 80}, "prefill_mma.cu"),
    ("paged_attention_varlen", {"dtype": "float16", "packed": True, "num_tokens": 80}, "attention/prefill_mma.cu"),
    ("sm100_cutlass_mla_decode", {"dtype": "float16", "num_heads": 20}, "attention/mla_decode.cu"),
    ("mamba_chunk_scan_varlen", {"dtype": "float16", "num_tokens": 70, "options": True}, "mamba/chunk_scan.cu"),
    ("gated_delta_rule", {"dtype": "float16", "num_tokens": 120, "head_dim": 32}, "mamba/gated_delta_chunk.cu"),
    ("reshape_and_cache", {"dtype": "float16"}, "cache/reshape_and_cache.cu"),
    ("top_k_top_p_sampling_from_logits", {"vocab_size": 4000, "with_top_p": True}, "sampling/sampling_row.cu"),
]


@pytest.mark.parametrize(("name", "axes", "kernel"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_op_matches_its_reference(name: str, axes: dict[str, Any], kernel: str) -> None:
    op, axes = pyops.registry[name], {"num_tokens": 9} | axes
    assert op.example is not None
    planned = op.launches(*op.example(ArgMaker(device.model("sm_75")), **axes))
    assert any(launch.specialisation.kernel.file.endswith(kernel) for launch in planned), planned
    args = example(op, **axes)
    right, first = expected(op, args), None
    with config.cpu("kernels"):
        for schedule in (SCHEDULES[0], SCHEDULES[3]):
            with scheduled(schedule):
                results = run(op, args)
            first = first or results
            assert_results(op, right, results)
            assert_same(op, first, results)
