import torch

import pyops

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(16, 512, device=device).bfloat16()
weight = torch.randn(256, 512, device=device).bfloat16() * 512**-0.5

blocks = weight.view(2, 128, 4, 128)  # of 128 x 128 elements
weight_scale_inv = blocks.abs().amax((1, 3)).float() / 448  # [2, 4], its name in DeepSeek's checkpoints
weight8, _ = pyops.scaled_fp8_quant(weight, weight_scale_inv, group_shape=(128, 128))
x8, x_scales = pyops.per_token_group_quant_fp8(x, 128)  # a scale for each 128 elements of a token
out = torch.empty(16, 256, dtype=torch.bfloat16, device=device)
pyops.cutlass_scaled_mm(out, x8, weight8.T, x_scales, weight_scale_inv.T)

dequantized = (weight8.float().view(2, 128, 4, 128) * weight_scale_inv[:, None, :, None]).view(256, 512)
exact = (x8.float().view(16, 4, 128) * x_scales[..., None]).view(16, 512) @ dequantized.T
torch.testing.assert_close(out.float(), exact, rtol=2**-7, atol=2**-7)
unquantized = x.float() @ weight.float().T
error = ((out.float() - unquantized).norm() / unquantized.norm()).item()
assert error < 0.05
print(f"{device}: {weight_scale_inv.numel()} scales for the weight, quantization error {error:.0%}")
