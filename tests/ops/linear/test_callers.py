"""GEMM arguments as vLLM's callers pass them: unusual shapes, scales of another dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pyops
from pyops import SCALAR_TYPES
from pyops.ops._shared.ggml_formats import FORMATS
from pyops.ops.linear.packed_hopper import PackedConfig
from pyops.ops.linear.packed_mma import PackedMmaConfig
from tests.ops.linear.test_ggml import check as ggml_check
from tests.ops.linear.test_ggml import draw as ggml_draw
from tests.ops.linear.test_packed import FP8, each
from tests.ops.linear.test_products import columns, draw, forced, needs_compiler, positive
from tests.ops.moe.test_experts import experts_in_float64
from tests.support import packed
from tests.support.calls import DEVICES, example

ANY_DEVICE = pytest.mark.parametrize("device", DEVICES)
M, N, K = 3, 64, 128


def _scaled(of: str, device: str) -> Callable[[Tensor], Tensor]:
    """An int8 GEMM as a function of its float16 bias."""
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
    """A float16 GEMM as a function of its bias."""
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
def test_bias_of_any_shape(of: str, device: str) -> None:
    """A bias as a row, a column and a matrix gives the same result."""
    call = (_scaled if of in ("scaled", "azp", "sparse") else _dense)(of, device)
    bias = draw(N, dtype=torch.float16, device=device, seed=3)
    right = call(bias)
    assert not torch.equal(right, call(torch.zeros_like(bias)))
    for shape in ((1, N), (N, 1), (1, 1, N), (2, N // 2)):
        assert torch.equal(call(bias.view(shape)), right)
    with pytest.raises(pyops.OpError, match="bias: expected 64 elements, got shape"):
        call(bias[1:])


def _nvfp4(k: int, n: int, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(w [experts, n, k] in float64, quants, block scales, and expert scales for activations of `dtype`)."""
    experts = len(scale)
    codes = packed.draw(0, 16, experts, k, n, seed=k)
    scales = packed.draw(0x20, 0x30, experts, k // 16, n, seed=1).to(torch.uint8).view(FP8)
    halves = packed.blocks(packed.blocks(scales.half(), packed.PERM_64), [0, 2, 1, 3]) * 2.0**7
    stored = (halves.view(torch.int16) << 1 >> 8).to(torch.uint8).view(FP8)
    each_w = [packed.E2M1.double()[codes[e]] * each(scales[e].double(), k) * scale[e].double() for e in range(experts)]
    given = scale * 2.0 ** (7 if dtype == torch.float16 else 119)
    return torch.stack(each_w).mT, torch.stack([packed.marlin(one, 4) for one in codes]), stored, given


@ANY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_scale_wide", [False, True])
def test_marlin_experts_of_nvfp4(dtype: torch.dtype, is_scale_wide: bool, device: str) -> None:
    """Each expert has its own scale, in the dtype of activations, as in vLLM 0.16, or in float32, as in 0.22."""
    scale = torch.tensor([0.3, 0.7, 0.11], dtype=torch.float32 if is_scale_wide else dtype)
    w1, codes1, scales1, given1 = _nvfp4(K, 2 * N, scale, dtype)
    w2, codes2, scales2, given2 = _nvfp4(N, K, scale.flip(0) / 4, dtype)
    a, weights, kind = draw(M, K, dtype=dtype), positive(M, 2), SCALAR_TYPES["float4_e2m1f"].id
    ids = torch.tensor([[0, 1], [2, 0], [1, 2]], dtype=torch.int32)
    exact = torch.stack([w1[int(expert)] @ a[row // 2].double() for row, expert in enumerate(ids.view(-1))])

    def moved(*given: Tensor | None) -> list[Tensor | None]:
        return [None if one is None else one.to(device) for one in given]

    c = torch.empty(2 * M, 2 * N, dtype=dtype, device=device)
    given = a, codes1, None, scales1, None, given1, None, None, None, None, *pyops.moe_align(ids, 16, 3), None
    x, *rest = moved(*given)
    pyops.moe_wna16_marlin_gemm(x, c, *rest, 16, 2, False, kind, M, 2 * N, K)
    assert (c.cpu().double() - exact).abs().max() <= 1.5 * torch.finfo(dtype).eps * exact.abs().max()

    exact = experts_in_float64(a, w1, w2, weights, ids)
    scales = dict(zip(("global_scale1", "global_scale2"), moved(given1, given2), strict=True))
    out = pyops.fused_marlin_moe(*moved(a, codes1, codes2, None, None, scales1, scales2, weights, ids), kind, **scales)
    # Two GEMMs, an activation and a sum, each rounded.
    assert (out.cpu().double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()


LONGER = [
    # type, blocks of a row of W, columns of X
    (12, 4, 512),
    (8, 27, 544),  # the last unit of 256 elements extends beyond the columns
    (8, 19, 320),
]


@ANY_DEVICE
@pytest.mark.parametrize("m", [1, 2, 5, 40])
@pytest.mark.parametrize(("quant_type", "blocks", "k"), LONGER)
def test_gguf_activations_with_longer_rows(quant_type: int, blocks: int, k: int, m: int, device: str) -> None:
    """Elements of a row after the columns of X, here NaN, are not multiplied."""
    n, length, nbytes = 20, FORMATS[quant_type].length, FORMATS[quant_type].nbytes
    weight, truth = ggml_draw(quant_type, n, blocks * length)
    x = draw(m, k, dtype=torch.bfloat16)
    exact = x.double() @ (truth.bfloat16().double() if m > 32 else truth)[:, :k].T
    weight.view(n, blocks, nbytes)[:, k // length :, : 2 if quant_type == 8 else 4] = 0xFF
    for op in (pyops.ggml_mul_mat_a8, pyops.ggml_mul_mat_vec_a8):
        ggml_check(op(weight.to(device), x.to(device), quant_type, n), exact)
    with pytest.raises(pyops.OpError, match="W: expected"):
        op(weight.view(-1)[:-nbytes].to(device), x.to(device), quant_type, n)
    with pytest.raises(pyops.OpError, match="W: expected"):
        op(weight[:, : nbytes * (k // length) - nbytes].contiguous().to(device), x.to(device), quant_type, n)


@ANY_DEVICE
@pytest.mark.parametrize("longer", [0, 1])
def test_gguf_expert_ids_of_any_shape(longer: int, device: str) -> None:
    """The second GEMM of a layer gets its expert ids as [tokens, top_k] with a top_k of 1; rows may be longer."""
    tokens, top_k, experts, n, k = 7, 4, 3, 20, 256
    weight, truth = ggml_draw(12, experts * n, k * (1 + longer))
    weight, truth = weight.view(experts, n, -1), truth.view(experts, n, -1)[..., :k]
    ids = torch.randint(0, experts, (tokens, top_k), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    x = draw(tokens * top_k, k, dtype=torch.bfloat16)
    exact = torch.stack([truth[int(expert)] @ row.double() for expert, row in zip(ids.view(-1), x, strict=True)])
    for given in (ids, ids.view(-1), ids.view(-1, 1), ids.view(1, -1)):
        args = x.to(device), weight.to(device), given.to(device), 1, 12, n, tokens * top_k
        ggml_check(pyops.ggml_moe_a8_vec(*args), exact)
    order = pyops.moe_align_block_size.new(ids.view(-1, 1).to(device), experts, pyops.ggml_moe_get_block_size(12))
    ggml_check(pyops.ggml_moe_a8(x.to(device), weight.to(device), *order, 12, n, 1, tokens * top_k), exact)


def _mxfp8(columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(w [K, columns] in float64, e4m3 values, and the exponents of groups of 32 rows, in Marlin's layout)."""
    codes, exponents = packed.draw(0, 256, K, columns), packed.draw(110, 132, K // 32, columns, seed=1)
    codes[codes % 128 == 127] = 0  # NaN
    w = codes.to(torch.uint8).view(FP8).double() * torch.exp2(each(exponents, K).double() - 127.0)
    stored = packed.blocks(packed.blocks(exponents, packed.PERM_64), [0, 2, 1, 3]).to(torch.uint8)
    return w, packed.marlin(codes, 8), stored


@ANY_DEVICE
def test_marlin_gemms_of_mxfp8(device: str) -> None:
    """One weight, and weights of experts; exponents as e8m0 and as uint8."""
    (w, codes, stored), a = _mxfp8(N), draw(M, K, dtype=torch.bfloat16)
    exact, kind = a.double() @ w, SCALAR_TYPES["float8_e4m3fn"].id
    lists = *pyops.moe_align(torch.tensor([[1], [0], [1]], dtype=torch.int32), 16, 2), None, 16, 1, False
    moved = [one.to(device) if isinstance(one, Tensor) else one for one in lists]
    for scales in (stored.to(device), stored.view(torch.float8_e8m0fnu).to(device)):
        x, weight, none = a.to(device), codes.to(device), (None,) * 6
        out = pyops.marlin_gemm(x, weight, None, scales, *none, kind, M, N, K)
        assert (out.cpu().double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()
        c, two = torch.empty_like(out), (torch.stack([weight, weight]), None, torch.stack([scales, scales]))
        pyops.moe_wna16_marlin_gemm(x, c, *two, *none, *moved, kind, M, N, K)
        assert (c.cpu().double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()


@needs_compiler
@pytest.mark.parametrize("config", [PackedMmaConfig(16, 64, 2, 1, 1), PackedConfig(16, 128, 2, 1, 1)], ids=str)
def test_kernels_that_read_packed_mxfp8(config: PackedMmaConfig | PackedConfig) -> None:
    (w, codes, stored), a = _mxfp8(2 * N), draw(M, K, dtype=torch.bfloat16)
    with forced("marlin_gemm", config):
        rest = SCALAR_TYPES["float8_e4m3fn"].id, M, 2 * N, K
        out = pyops.marlin_gemm(a, codes, None, stored, None, None, None, None, None, None, *rest)
    exact = a.double() @ w
    assert (out.double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()


@ANY_DEVICE
def test_expert_and_w4a8_scales_of_any_shape(device: str) -> None:
    """The w4a8 lookup tables, and the factors of NVFP4 experts."""
    raw = packed.gptq(packed.draw(0, 16, K, N), 4).t().contiguous().t().to(device)
    weight = pyops.cutlass_encode_and_reorder_int4b(raw)
    products = pyops.cutlass_pack_scale_fp8(torch.ones(K // 32, N).to(FP8).to(device))
    one, a = torch.ones(1, device=device), draw(M, K, dtype=FP8, device=device)
    right = pyops.cutlass_w4a8_mm(a, weight, products, 32, one, one)
    assert torch.equal(pyops.cutlass_w4a8_mm(a, weight, products.view(K // 32, N, 8), 32, one, one), right)

    op = pyops.registry["cutlass_fp4_group_mm"]
    names = [parameter.name for parameter in op.declaration.parameters]
    results = []
    for shape in ((-1,), (-1, 1), (1, -1)):
        args = example(op, device)
        alphas = torch.arange(1.0, 1.0 + args[names.index("alphas")].numel(), device=device)
        args[names.index("alphas")] = alphas.view(shape)
        op.wrapper(*args)
        results.append(args[0])
    assert all(torch.equal(one, results[0]) for one in results)


@ANY_DEVICE
def test_row_scale_repeated_for_each_expert(device: str) -> None:
    """vLLM's batched format repeats one scale for all rows of experts; the first one counts."""
    op = pyops.registry["cutlass_moe_mm"]
    names = [parameter.name for parameter in op.declaration.parameters]
    results = []
    for scales in ([0.5], [0.5, 7.0, 9.0]):
        args = example(op, device, per_row=False)
        args[names.index("a_scales")] = torch.tensor(scales, device=device).view(-1, 1)
        op.wrapper(*args)
        results.append(args[0])
    assert torch.equal(*results)
    assert results[0].any()
