"""The headers for Hopper under NVRTC: which architectures compile them, and which advice the assembler gives."""

from __future__ import annotations

from typing import Any

import pytest

from pyops import offline
from pyops._core.errors import CompileError
from pyops._core.launch.kernel import Kernel
from tests.every_op.test_nvrtc import MISSING
from tests.host import hopper
from tests.support.profiles import few

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def compiled(text: str, arch: str = "sm_90a", **constants: Any) -> offline.Report:
    return offline.compile("test.cu", "", Kernel("test.cu", arch, text=text)(**constants).text, arch)


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("gemm", {"BLOCK_N": 256, "STAGES": 4, "CLUSTER": 1}),
        ("gemm", {"BLOCK_N": 128, "STAGES": 4, "CLUSTER": 2}),
        ("mixed", {}),
    ],
)
def test_no_spills_and_no_advice(name: str, constants: dict[str, Any]) -> None:
    report = compiled(hopper.text_of(name), **constants)
    assert (report.spill_bytes, report.stack_bytes, report.advice) == (0, 0, ())


EVERY_PRODUCT = """#include "wgmma.cuh"
template <typename T, int N>
DEVICE void products(void* out, const uint32_t (&a)[4], uint64_t b) {
    if constexpr (N <= 256) {
        wgmma_sum_t<T> d[N / 2];
        warpgroup_arrive();
        wgmma<T, N>(d, b, b, false);
        wgmma<T, N>(d, a, b);
        if constexpr (sizeof(T) == 2) {
            wgmma<T, N, true, true>(d, b, b);
            wgmma<T, N, true>(d, a, b);
        }
        warpgroup_commit_batch();
        warpgroup_wait<0>();
        warpgroup_fence_operand(d);
        for (int i = 0; i < N / 2; ++i) static_cast<wgmma_sum_t<T>*>(out)[i * 128 + threadIdx.x] = d[i];
    }
}
extern "C" __global__ void LAUNCH_BOUNDS(128, 1) every_product(void* out, const uint32_t* in) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t a[4] = {in[threadIdx.x], in[threadIdx.x + 128], in[threadIdx.x + 256], in[threadIdx.x + 384]};
    const uint64_t b = make_smem_desc(shared);
    products<bf16_t, N>(out, a, b);
    products<half_t, N>(out, a, b);
    products<fp8_e4m3_t, N>(out, a, b);
    products<fp8_e5m2_t, N>(out, a, b);
    products<int8_t, N>(out, a, b);
}
"""


@pytest.mark.parametrize("columns", few((8, *range(16, 257, 16)), 3))
def test_every_wgmma(columns: int) -> None:
    """Wrongly numbered operands do not assemble."""
    assert compiled(EVERY_PRODUCT, N=columns).binary


SERIALISED = """#include "wgmma.cuh"
extern "C" __global__ void LAUNCH_BOUNDS(128, 1) serialised(float* out) {
    extern __shared__ __align__(1024) uint8_t shared[];
    float d[64] = {};
    for (int j = 0; j < 4; ++j) {
        warpgroup_arrive();
        wgmma<bf16_t, 128>(d, make_smem_desc(shared), make_smem_desc(shared + 8192));
        warpgroup_commit_batch();
        d[3] *= 2.0f;
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(d);
    for (int i = 0; i < 64; ++i) out[i * 128 + threadIdx.x] = d[i];
}
"""


def test_assembler_advice() -> None:
    """It is given for accumulators that are touched in flight, and for setmaxnreg in a kernel without bounds."""
    assert any("C7517" in advice for advice in compiled(SERIALISED).advice)
    unbounded = SERIALISED.replace("LAUNCH_BOUNDS(128, 1) ", "").replace(
        "    float d", "    warpgroup_reg_alloc<232>();\n    float d"
    )
    assert any("C7508" in advice for advice in compiled(unbounded).advice)


@pytest.mark.parametrize(
    ("header", "call", "arch", "message"),
    [
        ("barrier", "fence_proxy_async();", "sm_80", "mbarriers that are waited for by phase exist from sm_90 on"),
        ("tma", "tma_store_commit();", "sm_89", "mbarriers that are waited for by phase exist from sm_90 on"),
        ("wgmma", "warpgroup_arrive();", "sm_90", "wgmma exists on sm_90a alone"),
        ("wgmma", "warpgroup_arrive();", "sm_100", "wgmma exists on sm_90a alone"),
        ("mma", "stmatrix<1>(out, {0});", "sm_80", "stmatrix exists from sm_90 on"),
        ("tma", "tma_store_commit(); named_barrier_sync<1>(64);", "sm_100", ""),
        ("mma", "stmatrix<1>(out, {0});", "sm_100", ""),
        ("mma", "", "sm_80", ""),
    ],
)
def test_missing_instruction_is_an_error(header: str, call: str, arch: str, message: str) -> None:
    text = f'#include "{header}.cuh"\nextern "C" __global__ void lacks(float* out) {{\n    {call}\n}}\n'
    if not message:
        assert compiled(text, arch).binary
        return
    with pytest.raises(CompileError, match=message):
        compiled(text, arch)
