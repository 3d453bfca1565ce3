import torch

from pyops import Kernel, KernelFault, check, op
from pyops.testing import assert_matches_reference

TEXT = """
#include "number.cuh"
extern "C" __global__ void row_max(scalar_t* out, const scalar_t* input) {
    __shared__ float largest[256];
    const int i = threadIdx.x;
    largest[i] = to_float(input[int64_t(blockIdx.x) * 256 + i]);
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (i < half) largest[i] = fmaxf(largest[i], largest[i + half]);
    }
    if (i == 0) out[blockIdx.x] = from_float<scalar_t>(largest[0]);
}"""


def declare(kernel):
    @op(out="out", ulps=0)
    def row_max(out: torch.Tensor, input: torch.Tensor) -> None:
        """The largest element of each row of `input` [num_rows, 256]."""
        out.copy_(input.amax(1))

    @row_max.plan
    def plan(out, input):
        check.floating(input), check.sizes(input, num_rows=None, row_size=256), check.contiguous(input)
        check.elements(out, input.dtype, input.shape[0])
        return kernel(scalar_t=input.dtype).launch(grid=input.shape[0], block=256)

    return row_max


device = "cuda" if torch.cuda.is_available() else "cpu"
x, out = torch.randn(4, 256, device=device), torch.empty(4, device=device)
assert_matches_reference(declare(Kernel("row_max.cu", text=TEXT)), out, x)  # on the GPU if there is one, and on the CPU
print(f"{device}: row_max matches its reference")
# Without barriers where the threads that are left are those of one warp.
racy = declare(Kernel("row_max.cu", text=TEXT.replace("__syncthreads", "if (half >= 32) __syncthreads")))
try:
    assert_matches_reference(racy, out.cpu(), x.cpu())
except KernelFault as fault:
    print(fault)
