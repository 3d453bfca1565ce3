import torch

import pyops

device = "cuda" if torch.cuda.is_available() else "cpu"
# Rows 0 to 149 are two prompts, of 100 and 50 tokens; rows 150 and 151 are the next token of each.
x = torch.randn(152, 4, 64, device=device).bfloat16()  # 4 heads of 64 elements, with 128 states for each element
B, C = (torch.randn(152, 1, 128, device=device).bfloat16() * 128**-0.25 for _ in range(2))
dt, A, D = torch.rand(152, 4, device=device), -torch.rand(4, device=device), torch.ones(4, device=device)
# Starts of the prompts, starts of their chunks of at most 64 tokens, last chunk of each prompt, prompt of each chunk.
indices = [0, 100, 150], [0, 64, 100, 150], [1, 2], [0, 0, 1]
indices = [torch.tensor(values, dtype=torch.int32, device=device) for values in indices]
out = torch.empty_like(x)
(x1, x2), (dt1, dt2), (B1, B2), (C1, C2), (out1, out2) = (rows.split([150, 2]) for rows in (x, dt, B, C, out))

states = pyops.mamba_chunk_scan_combined_varlen(x1, dt1, A, B1, C1, 64, *indices, out1, D, state_dtype=torch.float32)

cache, slots = torch.zeros(8, 4, 64, 128, device=device), torch.tensor([5, 2], dtype=torch.int32, device=device)
cache[slots] = states
dt2, A2, D2 = dt2[..., None].expand(2, 4, 64), A[:, None, None].expand(4, 64, 128), D[:, None].expand(4, 64)
pyops.selective_state_update(cache, x2, dt2, A2, B2, C2, D2, state_batch_indices=slots, out=out2)

expected = torch.empty_like(x, dtype=torch.float32)
for slot, rows in zip(slots, ([*range(100), 150], [*range(100, 150), 151]), strict=True):
    h = torch.zeros(4, 64, 128, device=device)
    for t in rows:
        h = h * (A * dt[t]).exp()[:, None, None] + (x[t] * dt[t, :, None])[..., None] * B[t].float()
        expected[t] = h @ C[t, 0].float() + x[t]
    assert (cache[slot] - h).abs().max() < 2**-6 * h.abs().max()
assert (out - expected).abs().max() < 2**-6 * expected.abs().max()
print(f"{device}: prompts of 100 and 50 tokens and a step from their states match the recurrence")
