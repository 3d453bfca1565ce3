import torch
from torch.nn.functional import normalize

import pyops

device = "cuda" if torch.cuda.is_available() else "cpu"
# Tokens 0 to 149 are two prompts, of 100 and 50 tokens; tokens 150 and 151 are the next token of each.
q, k = (normalize(torch.randn(1, 152, 2, 64, device=device), dim=-1).bfloat16() for _ in range(2))
v = torch.randn(1, 152, 4, 64, device=device).bfloat16()  # two heads of v share a head of q and k
g, beta = -torch.rand(1, 152, 4, device=device), torch.rand(1, 152, 4, device=device)  # g: logarithms of decays
prompts, steps = zip(*(rows.split([150, 2], 1) for rows in (q, k, v, g, beta)), strict=True)

starts, ones, slots = (torch.tensor(i, dtype=torch.int32, device=device) for i in ([0, 100, 150], [0, 1, 2], [5, 2]))
prefill, states = pyops.chunk_gated_delta_rule(*prompts, output_final_state=True, cu_seqlens=starts)

cache = torch.zeros(8, 4, 64, 64, device=device)
cache[slots] = states
last, _ = pyops.fused_recurrent_gated_delta_rule(*steps, initial_state=cache, cu_seqlens=ones, ssm_state_indices=slots)

out, expected = torch.cat([prefill, last], 1)[0], torch.empty_like(v[0], dtype=torch.float32)
query, key = (rows[0].float().repeat_interleave(2, 1) for rows in (q, k))
for slot, rows in zip(slots, ([*range(100), 150], [*range(100, 150), 151]), strict=True):
    S = torch.zeros(4, 64, 64, device=device)
    for t in rows:
        S = S * g[0, t].exp()[:, None, None]
        S = S + torch.einsum("hk,hv,h->hkv", key[t], v[0, t] - torch.einsum("hkv,hk->hv", S, key[t]), beta[0, t])
        expected[t] = torch.einsum("hkv,hk->hv", S, query[t]) * 64**-0.5
    assert (cache[slot] - S).abs().max() < 2**-6 * S.abs().max()
assert (out - expected).abs().max() < 2**-6 * expected.abs().max()
print(f"{device}: prompts of 100 and 50 tokens and a step from their states match the recurrence")
