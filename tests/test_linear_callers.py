"""What vLLM's callers give products: tensors in another shape than the usual one, scales of another dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pyops
from pyops import SCALAR_TYPES
from tests import packed
from tests.calls import DEVICES
from tests.test_linear_packed import FP8, each
from tests.test_linear_products import columns, draw, positive

ANY_DEVICE = pytest.mark.parametrize("device", DEVICES)
M, N, K = 3, 64, 128


def _scaled(of: str, device: str) -> Callable[[Tensor], Tensor]:
    """A product of int8 by its bias, which is of float16."""
    a, b = draw(M, K, dtype=torch.int8, device=device), columns(draw(K, N, dtype=torch.int8, device=device, seed=1))
    scales = 0.001 * positive(M, device=device), positive(N, device=device)
    adj = torch.zeros(N, dtype=torch.int32, device=device)

    def call(bias: Tensor) -> Tensor:
        out = torch.empty(M, N, dtype=torch.float16, device=device)
        if of == "sparse":
            meta = torch.full((N, K // 8), 0x44, dtype=torch.uint8, device=device)
            pyops.cutlass_scaled_sparse_mm(out, a, b[: K // 2].t().contiguous(), meta, *scales, bias)
        elif of == "azp":
            pyops.cutlass_scaled_mm_azp(out, a, b, *scales, adj, None, bias)
        else:
            pyops.cutlass_scaled_mm(out, a, b, *scales, bias)
        return out

    return call


def _dense(of: str, device: str) -> Callable[[Tensor], Tensor]:
    """A product of float16 by its bias."""
    a, b = (draw(rows, K, dtype=torch.float16, device=device, seed=rows) for rows in (M, N))
    codes = packed.marlin(packed.draw(0, 16, K, N), 4).to(device)
    scales = torch.full((1, N), 0.01, dtype=torch.float16, device=device)
    none = (None,) * 6

    def call(bias: Tensor) -> Tensor:
        if of == "marlin":
            kind = SCALAR_TYPES["uint4b8"].id
            product: Tensor = pyops.marlin_gemm(a, codes, bias, scales, *none, kind, M, N, K)
            return product
        out = torch.empty(M, N, dtype=torch.float16, device=device)
        (pyops.skinny_linear if of == "skinny" else pyops.linear)(out, a, b, bias)
        return out

    return call


@ANY_DEVICE
@pytest.mark.parametrize("of", ["scaled", "azp", "sparse", "marlin", "linear", "skinny"])
def test_a_bias_has_any_shape(of: str, device: str) -> None:
    """The bias of a row, of a column and of a matrix is the same one."""
    call = (_scaled if of in ("scaled", "azp", "sparse") else _dense)(of, device)
    bias = draw(N, dtype=torch.float16, device=device, seed=3)
    right = call(bias)
    assert not torch.equal(right, call(torch.zeros_like(bias)))
    for shape in ((1, N), (N, 1), (1, 1, N), (2, N // 2)):
        assert torch.equal(call(bias.view(shape)), right)
    with pytest.raises(pyops.OpError, match="bias: expected 64 elements, got shape"):
        call(bias[1:])


@ANY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_scale_wide", [False, True])
def test_marlin_experts_of_nvfp4(dtype: torch.dtype, is_scale_wide: bool, device: str) -> None:
    """Each expert has a scale of its own, in the dtype of activations, as of vLLM 0.16, or in float32, as of 0.22."""
    experts, top_k, block = 3, 2, 16
    codes = packed.draw(0, 16, experts, K, N)
    scales = packed.draw(0x28, 0x48, experts, K // 16, N, seed=1).to(torch.uint8).view(FP8)
    halves = packed.blocks(packed.blocks(scales.half(), packed.PERM_64), [0, 2, 1, 3]) * 2.0**7
    stored = (halves.view(torch.int16) << 1 >> 8).to(torch.uint8).view(FP8)
    scale = torch.tensor([0.3, 0.7, 0.11], dtype=torch.float32 if is_scale_wide else dtype)
    given = scale * 2.0 ** (7 if dtype == torch.float16 else 119)
    a = draw(M, K, dtype=dtype)
    ids = torch.tensor([[0, 1], [2, 0], [1, 2]], dtype=torch.int32)
    w = [packed.E2M1.double()[codes[e]] * each(scales[e].double(), K) * scale[e].double() for e in range(experts)]
    exact = torch.stack([a[row // top_k].double() @ w[int(ids.view(-1)[row])] for row in range(M * top_k)])
    c = torch.empty(M * top_k, N, dtype=dtype, device=device)
    weight = torch.stack([packed.marlin(codes[e], 4) for e in range(experts)]), None, stored, None, given
    lists = *pyops.moe_align(ids, block, experts), None, block, top_k, False
    moved = [one.to(device) if isinstance(one, Tensor) else one for one in (*weight, None, None, None, None, *lists)]
    pyops.moe_wna16_marlin_gemm(a.to(device), c, *moved, SCALAR_TYPES["float4_e2m1f"].id, M, N, K)
    assert (c.cpu().double() - exact).abs().max() <= 1.5 * torch.finfo(dtype).eps * exact.abs().max()
