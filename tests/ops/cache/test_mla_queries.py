"""`concat_mla_q`, DeepSeek-V4's queries and cache insert, and `swap_blocks_batch`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyops
from pyops.testing import cpu, same_bits

DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCK_SIZE = 3


def run(op: Any, device: str, *args: Any, **kwargs: Any) -> Any:
    """Run the op's kernels, on a GPU or on the CPU."""
    if device == "cuda":
        return op(*args, **kwargs)
    with cpu("kernels"):
        return op(*args, **kwargs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("gap", "rope_size"), [(0, 64), (8, 64), (1, 63)])
def test_concat_mla_q(gap: int, rope_size: int, device: str) -> None:
    """Bits are copied, including NaN, and gaps between heads are left alone."""
    where = "cpu" if device == "host" else device
    bits = torch.randint(-(2**15), 2**15, (5, 3, 512 + rope_size + gap), dtype=torch.int16, device=where)
    given = bits.view(torch.bfloat16)
    nope, pe = given[..., :512], given[..., 512 : 512 + rope_size].clone()
    out = torch.full_like(bits, 7)
    run(pyops.concat_mla_q, device, nope, pe, out.view(torch.bfloat16)[..., : 512 + rope_size])
    assert torch.equal(out[..., : 512 + rope_size], bits[..., : 512 + rope_size])
    assert (out[..., 512 + rope_size :] == 7).all()


def insert(device: str, **changed: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of a call for four tokens of two heads, and its q_out of three."""
    where = "cpu" if device == "host" else device
    torch.manual_seed(1)
    args: dict[str, Any] = {
        "q_in": torch.randn(4, 2, 512, dtype=torch.bfloat16),
        "kv": 3 * torch.randn(4, 512, dtype=torch.bfloat16),
        "k_cache": torch.full((3, 584 * BLOCK_SIZE + 16), 99, dtype=torch.uint8),
        "slot_mapping": torch.tensor([4, 0, 8, 5]),
        "position_ids": torch.tensor([5, 0, 2, 3]),
        "cos_sin_cache": torch.randn(6, 64),
        "q_head_padded": 3,
        "eps": 1e-5,
        "cache_block_size": BLOCK_SIZE,
    } | changed
    args = {name: one.to(where) if isinstance(one, torch.Tensor) else one for name, one in args.items()}
    return args, run(pyops.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert, device, **args)


def rotated(x: torch.Tensor, args: dict[str, Any]) -> torch.Tensor:
    """Heads [tokens, heads, 512] in float64, rotated as complex numbers."""
    angles = args["cos_sin_cache"][args["position_ids"]].double()
    pairs = torch.view_as_complex(x[..., 448:].double().unflatten(-1, (32, 2)))
    pairs = pairs * torch.complex(angles[:, :32], angles[:, 32:])[:, None]
    return torch.cat((x[..., :448].double(), torch.view_as_real(pairs).flatten(-2)), -1)


@pytest.mark.parametrize("device", DEVICES)
def test_queries_of_deepseek_v4(device: str) -> None:
    args, q_out = insert(device)
    x = args["q_in"].double()
    right = rotated(x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(), args)
    torch.testing.assert_close(q_out[:, :2].double(), right, rtol=2**-8, atol=1e-6)
    for padding in (q_out, insert(device, eps=0.0)[1]):
        assert (padding[:, 2] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_keys_of_deepseek_v4(device: str) -> None:
    """An fp8 value times its scale is within half an ulp of the key; RoPE elements are bfloat16; no scale is too
    small."""
    args, _ = insert(device)
    key = rotated(args["kv"][:, None], args)[:, 0].cpu()
    blocks = args["k_cache"].cpu()
    for token, slot in enumerate(args["slot_mapping"].tolist()):
        block, offset = blocks[slot // BLOCK_SIZE], slot % BLOCK_SIZE
        data = block[offset * 576 : (offset + 1) * 576]
        scales = block[BLOCK_SIZE * 576 + offset * 8 :][:8]
        assert scales[7] == 0
        scale = torch.exp2(scales[:7].double() - 127)
        groups = key[token, :448].view(7, 64)
        needed = groups.abs().amax(-1) / 448
        assert ((scale >= needed) & (scale < 2 * needed)).all()
        found = data[:448].view(torch.float8_e4m3fn).double().view(7, 64) * scale[:, None]
        step = torch.maximum(groups.abs() / 16, scale[:, None] * 2**-10)
        assert ((found - groups).abs() <= step).all()
        torch.testing.assert_close(data[448:].view(torch.bfloat16).double(), key[token, 448:], rtol=2**-8, atol=1e-6)
    assert (blocks[:, 584 * BLOCK_SIZE :] == 99).all()
    assert (blocks[0, 576 : 2 * 576] == 99).all(), "a slot that nobody names"


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_without_a_slot(device: str) -> None:
    """A slot or a position out of range is neither read nor written; queries are normalised all the same."""
    far = 2**40
    args, q_out = insert(device, slot_mapping=torch.tensor([-1, 9, 1]), position_ids=torch.tensor([0, 1, -far, far]))
    assert (args["k_cache"] == 99).all()
    assert q_out[:, :2].isfinite().all()
    _, plain = insert(device, cos_sin_cache=torch.tensor([[1.0] * 32 + [0.0] * 32]), position_ids=torch.zeros(4).long())
    assert same_bits(q_out[2:], plain[2:])


@pytest.mark.parametrize("device", DEVICES)
def test_options_of_queries(device: str) -> None:
    """Queries are left raw, one step at a time; interleaved ones are the same elements in another order."""
    args, raw = insert(device, apply_q_norm=False, apply_q_rope=False)
    assert same_bits(raw[:, :2], args["q_in"])
    _, found = insert(device, apply_q_norm=False)
    torch.testing.assert_close(found[:, :2].double(), rotated(args["q_in"].double(), args), rtol=2**-8, atol=1e-6)
    interleaved = args["q_in"].view(4, 2, 32, 16).transpose(1, 2).reshape(4, 2, 512)
    _, found = insert(device, q_in=interleaved, is_q_interleaved=True)
    _, plain = insert(device)
    assert same_bits(found.view(4, 32, 3, 16).transpose(1, 2).reshape(4, 3, 512), plain)
    kept = args["k_cache"].clone()
    args, none = insert(device, q_head_padded=0)
    assert none.shape == (0,)
    assert same_bits(args["k_cache"], kept)


@pytest.mark.parametrize("device", DEVICES)
def test_mxfp8_keys(device: str) -> None:
    """A value times its scale is within half an ulp of the key, for all 512; scales follow the values of an entry."""
    args, _ = insert(device, kv_mxfp8=True)
    key = rotated(args["kv"][:, None], args)[:, 0].cpu()
    blocks = args["k_cache"].cpu()
    for token, slot in enumerate(args["slot_mapping"].tolist()):
        entry = blocks[slot // BLOCK_SIZE, slot % BLOCK_SIZE * 528 :][:528]
        groups, scale = key[token].view(16, 32), torch.exp2(entry[512:].double() - 127)
        needed = groups.abs().amax(-1) / 448
        assert ((scale >= needed * (1 - 2**-8)) & (scale < 2 * needed * (1 + 2**-8))).all()
        found = entry[:512].view(torch.float8_e4m3fn).double().view(16, 32) * scale[:, None]
        step = torch.maximum(groups.abs() / 16 * 1.07, scale[:, None] * 2**-10)  # rounded to bfloat16 and to e4m3
        assert ((found - groups).abs() <= step).all()
    assert (blocks[:, 528 * BLOCK_SIZE :] == 99).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("apply_q_norm", [True, False])
def test_rows_of_deepseek_v4(apply_q_norm: bool, device: str) -> None:
    """Caches of whole rows, in bfloat16 and in fp8, and the same keys without queries."""
    args, _ = insert(device)
    q, kv, indices = args["q_in"], args["kv"], [args[one] for one in ("slot_mapping", "position_ids", "cos_sin_cache")]
    x = q.double()
    queries = rotated(x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() if apply_q_norm else x, args)
    key, slots = rotated(kv[:, None], args)[:, 0], args["slot_mapping"]
    rows = torch.full((3, BLOCK_SIZE, 520), 99.0, dtype=torch.bfloat16, device=q.device)
    cache, turned_q = rows[..., :512], q.clone()
    name = "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert"
    run(getattr(pyops, name), device, turned_q, kv, cache, *indices, 1e-5, BLOCK_SIZE, apply_q_norm)
    torch.testing.assert_close(turned_q.double(), queries, rtol=2**-8, atol=1e-6)
    written = cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE]
    torch.testing.assert_close(written.double(), key, rtol=2**-8, atol=1e-6)
    assert (rows == 99).all(-1).sum() == 5
    assert (rows[..., 512:] == 99).all()

    scale, inverse = torch.tensor([0.25]).to(q.device), torch.tensor([3.0]).to(q.device)
    quants, q_fp8 = (
        cache.new_zeros(3, BLOCK_SIZE, 512).to(torch.float8_e4m3fn),
        torch.empty_like(q).to(torch.float8_e4m3fn),
    )
    name = "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert"
    run(getattr(pyops, name), device, q, kv, q_fp8, quants, *indices, scale, inverse, 1e-5, BLOCK_SIZE, apply_q_norm)
    for found, right in ((q_fp8, queries * 3), (quants[slots // BLOCK_SIZE, slots % BLOCK_SIZE], key * 4)):
        step = (right.abs() / 16).clamp(min=2**-10) * (1 + 2**-10)
        assert ((found.double() - right.clamp(-448, 448)).abs() <= step).all()

    for other, given in ((quants, scale), (rows[..., :512], None)):
        alone = torch.zeros_like(other)
        run(pyops.fused_deepseek_v4_kv_rope_insert, device, kv, alone, *indices, BLOCK_SIZE, given)
        at = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        assert same_bits(alone.float()[at], other.float()[at])
    with pytest.raises(pyops.OpError, match="fp8_scale"):
        run(pyops.fused_deepseek_v4_kv_rope_insert, device, kv, quants, *indices, BLOCK_SIZE)


def addresses(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


def test_swap_blocks_batch() -> None:
    source, target = torch.arange(40, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8)
    if torch.cuda.is_available():
        source, target = source.cuda(), target.pin_memory()
    starts = addresses(source[3:], source[20:], source)
    pyops.swap_blocks_batch(starts, addresses(target[10:], target, target[30:]), torch.tensor([5, 2, 0]))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    right = torch.zeros(40, dtype=torch.uint8)
    right[10:15], right[:2] = torch.arange(3, 8), torch.arange(20, 22)
    assert torch.equal(target, right)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"src_ptrs": torch.tensor([1])}, "dst_ptrs: expected 1 elements like src_ptrs, got 2"),
        ({"sizes": torch.tensor([1])}, "sizes: expected 2 elements like src_ptrs, got 1"),
        ({"sizes": torch.tensor([1, -4])}, "sizes: expected 0 or more, got -4"),
        ({"dst_ptrs": torch.tensor([0, 1])}, "dst_ptrs: expected addresses, got a null pointer"),
        ({"src_ptrs": torch.tensor([1, 2], dtype=torch.int32)}, "src_ptrs: expected a contiguous vector of int64"),
        ({"src_ptrs": [1, 2]}, "src_ptrs: expected a torch tensor, got list"),
        ({"sizes": torch.ones(2, 1).long()}, r"sizes: expected a contiguous vector .* shape \(2, 1\)"),
    ],
)
def test_swap_blocks_batch_refused(changed: dict[str, Any], message: str) -> None:
    """Nothing is written before the refusal: the valid addresses belong to no tensor."""
    ones = torch.ones(2, dtype=torch.int64)
    with pytest.raises(pyops.OpError, match=f"swap_blocks_batch: {message}"):
        pyops.swap_blocks_batch(**{"src_ptrs": ones, "dst_ptrs": ones, "sizes": ones} | changed)
