"""vLLM's linear layers that are not quantized: small M by `linear`, others by torch.

The number of tokens selects the kernel when the GEMM runs, or is captured in a CUDA graph: a graph with small M holds
this library's kernels, one with large M those of cuBLAS. For torch.compile the GEMM is one op, of any number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

import pyops
from pyops.tuning import batch_invariant

# Largest M at which the GEMM is at least as fast as cuBLAS for every measured weight on an H200
# (docs/performance/products.md). For one token, cuBLAS is up to 11 % faster if K is not a multiple of 1024.
_MAX_TOKENS = 32
_ONE_TOKEN_MULTIPLE = 1024

_library = torch.library.Library("pyops_vllm", "DEF")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def unquantized_gemm(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, replaces vLLM's `default_unquantized_gemm`."""
    if weight.dtype not in (torch.float16, torch.bfloat16) or x.dtype != weight.dtype:
        return torch_linear(x, weight, bias)
    result: Tensor = torch.ops.pyops_vllm.linear(x, weight, bias)
    return result


def _is_served(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` takes these tensors, and is faster than cuBLAS, or gives a row the same bits in any batch."""
    if x.stride(-1) != 1 or weight.stride(1) != 1 or not (x.ndim == 2 or x.is_contiguous()):
        return False
    num_tokens = x.numel() // max(1, x.shape[-1])
    if batch_invariant():
        return bool(num_tokens > 0)
    if num_tokens == 1:
        return bool(weight.shape[1] % _ONE_TOKEN_MULTIPLE == 0)
    return bool(0 < num_tokens <= _MAX_TOKENS)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The GEMM as one op for torch.compile."""
    if not _is_served(x, weight):
        return torch_linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    pyops.linear(out, x, weight, bias, constant_weight=True)
    return out


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


for _key in ("CUDA", "CPU"):
    _library.impl("linear", _linear, _key)
torch.library.register_fake("pyops_vllm::linear", _fake, lib=_library)
