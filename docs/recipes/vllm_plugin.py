import contextlib
import importlib

import torch
from torch.nn.functional import rms_norm, silu

from pyops.integrations.vllm import override, register

device = "cuda" if torch.cuda.is_available() else "cpu"
x, weight = torch.randn(16, 512, device=device), torch.rand(512, device=device)
normed, gated = torch.empty_like(x), torch.empty_like(x[:, :256])
where = "without vLLM (pip install vllm==0.22.1)"
with contextlib.suppress(ImportError):
    importlib.import_module("vllm._custom_ops")  # which defines vLLM's ops
    where = "in vLLM " + importlib.import_module("vllm").__version__
registered = register("0.22")  # the ops that vLLM has not defined
with override() as replaced:  # the ops that it has
    torch.ops._C.rms_norm(normed, x, weight, 1e-6)
    torch.ops._C.silu_and_mul(gated, x)
    print(f"{device}: {len({*registered.names, *replaced.names})} of vLLM's ops run on pyops, {where}")

torch.testing.assert_close(normed, rms_norm(x, (512,), weight, 1e-6))
torch.testing.assert_close(gated, silu(x[:, :256]) * x[:, 256:])
