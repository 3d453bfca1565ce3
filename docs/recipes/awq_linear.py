import torch

import pyops

device = "cuda" if torch.cuda.is_available() else "cpu"
in_features, out_features, group_size = 512, 256, 128
bound, words, groups = 2**31, out_features // 8, in_features // group_size
layer = {  # as a checkpoint of AWQ has it; any words are 4-bit values and zero points
    "qweight": torch.randint(-bound, bound, (in_features, words), dtype=torch.int32, device=device),
    "qzeros": torch.randint(-bound, bound, (groups, words), dtype=torch.int32, device=device),
    "scales": torch.rand(groups, out_features, device=device).half() * 0.01,
}
x = torch.randn(16, in_features, device=device).half()

out = pyops.awq_gemm(x, layer["qweight"], layer["scales"], layer["qzeros"], 1)


def unpacked(words):
    shifts = 4 * torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=device)  # of eight columns of a word
    return (words[..., None] >> shifts & 15).flatten(-2)


quant, zero, scale = unpacked(layer["qweight"]), unpacked(layer["qzeros"]), layer["scales"].float()
weight = (quant.view(groups, group_size, -1) - zero[:, None]) * scale[:, None]
torch.testing.assert_close(out.float(), x.float() @ weight.flatten(0, 1), rtol=2**-9, atol=2**-9)
stored = sum(tensor.nbytes for tensor in layer.values())
print(f"{device}: {weight.numel()} weights in {stored} bytes, the product matches that of the dequantized ones")
