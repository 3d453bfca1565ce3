import torch
from torch.nn.functional import silu

import pyops

device = "cuda" if torch.cuda.is_available() else "cpu"
num_tokens, hidden_size, intermediate_size, num_experts, topk = 33, 256, 128, 8, 2
x = torch.randn(num_tokens, hidden_size, device=device).bfloat16()
router = torch.randn(num_experts, hidden_size, device=device) * hidden_size**-0.5
w1 = (torch.randn(num_experts, 2 * intermediate_size, hidden_size, device=device) * hidden_size**-0.5).bfloat16()
w2 = (torch.randn(num_experts, hidden_size, intermediate_size, device=device) * intermediate_size**-0.5).bfloat16()

logits = pyops.linear.new(x.float(), router)
weights, ids, _ = pyops.fused_topk(x, logits, topk, renormalize=True)
out = pyops.fused_experts(x, w1, w2, weights, ids)

best, chosen = logits.softmax(-1).topk(topk)
assert torch.equal(ids.long(), chosen)
torch.testing.assert_close(weights, best / best.sum(-1, keepdim=True))
gate, up = torch.einsum("th,tkih->tki", x.float(), w1[chosen].float()).chunk(2, -1)
expected = torch.einsum("tk,tki,tkhi->th", weights, silu(gate) * up, w2[chosen].float())
torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)
print(f"{device}: {topk} of {num_experts} experts for each of {num_tokens} tokens match einsum")
