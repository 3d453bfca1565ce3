import torch

import pyops

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(16, 512, device=device).bfloat16()
weight = torch.randn(256, 512, device=device).bfloat16() * 512**-0.5
bias = torch.randn(256, device=device).bfloat16() / 8

weight8, weight_scales = pyops.scaled_fp8_quant(weight, use_per_token_if_dynamic=True)  # once, a scale for each channel
x8, x_scales = pyops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)  # at every call, a scale for each token
out = torch.empty(16, 256, dtype=torch.bfloat16, device=device)
pyops.cutlass_scaled_mm(out, x8, weight8.T, x_scales, weight_scales, bias)

torch.testing.assert_close(x_scales, x.float().abs().amax(1, keepdim=True) / 448)
exact = (x8.float() * x_scales) @ (weight8.float() * weight_scales).T + bias.float()
torch.testing.assert_close(out.float(), exact, rtol=2**-7, atol=2**-7)
unquantized = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
error = ((out.float() - unquantized).norm() / unquantized.norm()).item()
assert error < 0.05
print(f"{device}: {weight8.dtype}, quantization error {error:.0%}")
