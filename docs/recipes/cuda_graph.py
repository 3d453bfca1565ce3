import torch

import pyops

device = "cuda" if torch.cuda.is_available() else "cpu"
tokens, outs = torch.randn(40, 4, 12, 64, dtype=torch.bfloat16, device=device), []  # of 40 steps of 4 sequences
cache = tokens.new_zeros(2, 16, 16, 2, 64)  # keys and values: [blocks, slots, heads, elements]
tables, seq_lens = torch.randperm(16, device=device).view(4, 4).int(), torch.zeros(4, device=device).int()
static = tokens.new_zeros(4, 20, 64)  # what a graph reads and writes stays where it is
q, k, v, out = static.split([8, 2, 2, 8], 1)


def step():
    slots = tables.gather(1, seq_lens[:, None].long() // 16)[:, 0] * 16 + seq_lens % 16
    pyops.reshape_and_cache_flash(k, v, *cache, slots, "auto", 1.0, 1.0)
    seq_lens.add_(1)
    pyops.paged_attention_v1(out, q, *cache, 2, 64**-0.5, tables, seq_lens, 16, 64, None, "auto", 1.0, 1.0)


if device == "cuda":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()  # is captured and not run; kernels are compiled meanwhile
for token in tokens:
    static[:, :12] = token
    graph.replay() if device == "cuda" else step()
    outs.append(out.float())

qkv = (x.float().permute(1, 2, 0, 3) for x in tokens.split([8, 2, 2], 2))
expected = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
torch.testing.assert_close(torch.stack(outs, 2), expected, rtol=2**-8, atol=2**-8)
print(f"{device}: 40 {'replays of a graph' if device == 'cuda' else 'eager steps (no GPU, no graph)'} match SDPA")
