import torch
from torch.nn.functional import scaled_dot_product_attention

import pyops

device = "cuda" if torch.cuda.is_available() else "cpu"
kv_heads, head_size, block_size, scale = 2, 64, 16, 64**-0.5
prompts = [5, 37, 20]  # lengths
seq_lens, cu_seqlens = (torch.tensor(x, dtype=torch.int32, device=device) for x in (prompts, [0, 5, 42, 62]))
cache = torch.zeros(2, 16, block_size, kv_heads, head_size, dtype=torch.bfloat16, device=device)
tables = torch.randperm(16)[:12].view(3, 4).to(device, torch.int32)  # four blocks for each sequence
auto = "auto", 1.0, 1.0  # the cache has the dtype of the keys, and no scales

# Rows 0 to 61 are the prompts, one after another; rows 62 to 64 are the next token of each sequence.
q, k, v = (torch.randn(65, heads, head_size, device=device).bfloat16() for heads in (8, kv_heads, kv_heads))
rows = [(i, j) for i, n in enumerate(prompts) for j in range(n)] + list(enumerate(prompts))
sequence, position = torch.tensor(rows, device=device).T
slots = tables[sequence, position // block_size] * block_size + position % block_size
out = torch.empty_like(q)

pyops.reshape_and_cache_flash(k[:62], v[:62], *cache, slots[:62], *auto)
pyops.paged_attention_varlen(out[:62], q[:62], *cache, kv_heads, scale, tables, seq_lens, cu_seqlens, block_size, *auto)
pyops.reshape_and_cache_flash(k[62:], v[62:], *cache, slots[62:], *auto)
pyops.paged_attention_v1(out[62:], q[62:], *cache, kv_heads, scale, tables, seq_lens + 1, block_size, 64, None, *auto)

for i in range(3):
    own = [x[sequence == i].float().transpose(0, 1) for x in (q, k, v)]
    expected = scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True).transpose(0, 1)
    torch.testing.assert_close(out[sequence == i].float(), expected, rtol=2**-8, atol=2**-8)
print(f"{device}: 62 tokens of three prompts and the next token of each match SDPA")
