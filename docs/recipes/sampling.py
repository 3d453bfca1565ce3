import torch

import pyops

device = "cuda" if torch.cuda.is_available() else "cpu"
vocab_size, num_draws, k, p, temperature = 1000, 10_000, 50, 0.8, 0.7
logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0)).to(device)

tokens = torch.empty(num_draws, dtype=torch.int32, device=device)
pyops.top_k_top_p_sampling_from_logits(
    tokens,
    logits.expand(num_draws, -1),  # a row for each draw; here they are the same one
    torch.full((num_draws,), 42, device=device),  # seeds
    torch.arange(num_draws, device=device),  # offsets: other random numbers for each row, and for each step
    top_k=torch.full((num_draws,), k, dtype=torch.int32, device=device),
    top_p=torch.full((num_draws,), p, device=device),
    temperature=torch.full((num_draws,), temperature, device=device),
)

best, ids = logits[0].div(temperature).topk(k)
probs = best.softmax(0)
probs[probs.cumsum(0) - probs >= p] = 0
probs /= probs.sum()
drawn = tokens.bincount(minlength=vocab_size)
assert drawn[ids[probs > 0]].sum() == num_draws
torch.testing.assert_close(drawn[ids] / num_draws, probs, rtol=0, atol=0.015)
print(f"{device}: {num_draws} draws, all among the {(probs > 0).sum()} tokens that top-k and top-p keep")
