import os

import torch
from torch.nn.functional import silu

import pyops
from pyops.testing import ranks

torch.manual_seed(0)  # every process draws the same weights
w1, w2 = torch.randn(8, 128, 64).bfloat16() / 8, torch.randn(8, 64, 64).bfloat16() / 8


def layer(rank, device="cpu", group=None):
    parallel = pyops.ExpertParallel(group, device, num_experts=8, max_tokens=16, hidden_size=64, top_k=2)
    generator = torch.Generator().manual_seed(rank)  # every rank has tokens of its own
    x, logits = torch.randn(16, 64, generator=generator).bfloat16(), torch.randn(16, 8, generator=generator)
    weights, ids = logits.softmax(-1).topk(2)
    local = (tensor.to(device) for tensor in (x, *(w[parallel.experts] for w in (w1, w2)), weights, ids))
    out = pyops.parallel_fused_experts(parallel, *local)
    parallel.close()

    gate, up = torch.einsum("th,tkih->tki", x.float(), w1[ids].float()).chunk(2, -1)
    expected = torch.einsum("tk,tki,tkhi->th", weights, silu(gate) * up, w2[ids].float())
    torch.testing.assert_close(out.cpu().float(), expected, rtol=2**-6, atol=2**-6)
    return f"rank {rank} of {parallel.world_size}: experts {[*parallel.experts]} match einsum"


if "LOCAL_RANK" in os.environ:  # a process of torchrun for each GPU
    torch.cuda.set_device(rank := int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("gloo")
    print(layer(rank, f"cuda:{rank}", torch.distributed.group.WORLD))
else:  # two ranks of this process, their kernels on the CPU
    print(*ranks(2).run(layer), sep="\n")
