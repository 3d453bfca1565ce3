"""The MLA epilogues of Kimi K3, by float64 and complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyops
from pyops.testing import cpu

DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENS, HEADS, BLOCK = 5, 3, 4
FAR = 2**40
SLOTS, POSITIONS = [9, -1, 2, FAR, 3], [4, 1, 0, 2, -FAR]  # an entry for tokens 0 and 2, and for 4 without rotation


class Call:
    """Strided tensors of a call, and what is right."""

    def __init__(self, device: str, rotary: bool) -> None:
        self.device, self.where = device, "cpu" if device == "host" else device
        self.generator = torch.Generator().manual_seed(3)
        self.slots = torch.tensor(SLOTS, device=self.where)
        self.rotation: tuple[Any, Any] = (None, None)
        self.table = torch.randn(5, 64, generator=self.generator).to(self.where)
        if rotary:
            self.rotation = torch.tensor(POSITIONS, device=self.where), self.table
        self.stored = {9: 0, 2: 2} | ({} if rotary else {3: 4})  # {slot: token}

    def heads(self, size: int) -> torch.Tensor:
        wide = torch.randn(TOKENS, HEADS, size + 8, generator=self.generator).to(self.where, torch.bfloat16)
        return wide[..., :size]

    def rows(self, size: int) -> torch.Tensor:
        return self.heads(size)[:, 0]

    def cache(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        kept = torch.full((3, BLOCK, size), 7, dtype=torch.uint8, device=self.where)
        return kept if dtype == torch.uint8 else kept.to(torch.bfloat16).to(dtype)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        x = x.double()
        if self.rotation[0] is None:
            return x
        inside = [0 <= one < 5 for one in POSITIONS]
        angle = self.table.double()[[one if ok else 0 for one, ok in zip(POSITIONS, inside, strict=True)]]
        phase = torch.complex(angle[:, :32], angle[:, 32:])
        phase = phase if x.dim() == 2 else phase[:, None]
        pairs = torch.view_as_complex(x.unflatten(-1, (32, 2)).contiguous()) * phase
        kept = torch.tensor(inside, device=self.where).view(-1, *[1] * (x.dim() - 1))
        return torch.where(kept, torch.view_as_real(pairs).flatten(-2), x)

    def run(self, name: str, *args: Any) -> None:
        op = getattr(pyops, name)
        if self.device == "host":
            with cpu("kernels"):
                op(*args)
        else:
            op(*args)

    def assert_entries(self, cache: torch.Tensor, right: torch.Tensor, scale: float = 1.0) -> None:
        for slot in range(3 * BLOCK):
            entry = cache[slot // BLOCK, slot % BLOCK]
            if slot not in self.stored:
                assert (entry.float() == 7).all()
            elif cache.dtype == torch.uint8:
                assert_ds_entry(entry, right[self.stored[slot]])
            else:
                close(entry, right[self.stored[slot]], scale)


def close(found: torch.Tensor, right: torch.Tensor, scale: float = 1.0) -> None:
    """Within half an ulp of bfloat16, or of float8_e4m3fn times `scale`, and of the roundings to float32 before."""
    if found.dtype == torch.float8_e4m3fn:
        right = (right * scale).clamp(-448, 448)
        step = (right.abs() / 16).clamp(min=2**-10)
    else:
        step = right.abs() / 256
    assert ((found.double() - right).abs() <= step * (1 + 2**-10) + 1e-6).all()


def assert_ds_entry(entry: torch.Tensor, right: torch.Tensor) -> None:
    tiles, scales = right[:512].view(4, 128), entry[512:528].clone().view(torch.float32).double()
    needed = (tiles.abs().amax(-1) / 448).clamp(min=1e-4)
    assert (scales.frexp().mantissa == 0.5).all()  # log2(2**-6) is no integer on a GPU
    assert ((scales >= needed) & (scales < 2 * needed)).all()
    found = entry[:512].view(torch.float8_e4m3fn).double().view(4, 128)
    step = (tiles.abs() / scales[:, None] / 16).clamp(min=2**-10)
    assert ((found - tiles / scales[:, None]).abs() <= step).all()
    close(entry[528:].clone().view(torch.bfloat16), right[512:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("kind", ["bfloat16", "uint8", "float8_e4m3fn"])
def test_prefill(kind: str, rotary: bool, device: str) -> None:
    call = Call(device, rotary)
    q, k_nope, k_pe, kv_c, v = call.heads(192), call.heads(128), call.rows(64), call.rows(512), call.heads(128)
    queries = torch.cat((q[..., :128].double(), call.rotated(q[..., 128:])), -1)
    pe = call.rotated(k_pe)
    keys = torch.cat((k_nope.double(), pe[:, None].expand(-1, HEADS, -1)), -1)
    entries = torch.cat((kv_c.double(), pe), -1)
    cache = call.cache(656 if kind == "uint8" else 576, getattr(torch, kind))
    rest = cache, call.slots
    if kind == "float8_e4m3fn":
        outputs = [torch.empty(TOKENS, HEADS, size, device=call.where).to(cache.dtype) for size in (192, 192, 128)]
        scales = [torch.tensor([one], device=call.where) for one in (3.0, 5.0, 7.0, 11.0)]
        name = "fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert"
        call.run(name, q, k_nope, k_pe, kv_c, v, *outputs, *rest, *scales, BLOCK, *call.rotation)
        for out, right, scale in zip(outputs, (queries, keys, v.double()), (3, 5, 7), strict=True):
            close(out, right, scale)
        call.assert_entries(cache, entries, 11)
        return
    name = "key_concat_ds_mla_insert" if kind == "uint8" else "key_concat_kv_cache_insert"
    k_out = torch.full((TOKENS, HEADS, 200), 7.0, dtype=torch.bfloat16, device=call.where)
    call.run(f"fused_kimi_k3_mla_{name}", q, k_nope, k_pe, kv_c, k_out[..., :192], *rest, BLOCK, *call.rotation)
    close(q, queries)
    close(k_out[..., :192], keys)
    assert (k_out[..., 192:] == 7).all()
    call.assert_entries(cache, entries)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("kind", ["bfloat16", "uint8", "float8_e4m3fn"])
def test_decode(kind: str, rotary: bool, device: str) -> None:
    call = Call(device, rotary)
    ql_nope, q_pe, kv_c, k_pe = call.heads(512), call.heads(64), call.rows(512), call.rows(64)
    queries = torch.cat((ql_nope.double(), call.rotated(q_pe)), -1)
    entries = torch.cat((kv_c.double(), call.rotated(k_pe)), -1)
    cache = call.cache(656 if kind == "uint8" else 576, getattr(torch, kind))
    name = {"bfloat16": "kv_cache_insert", "uint8": "ds_mla_insert"}.get(kind, "kv_cache_fp8_insert")
    scales = [torch.tensor([one], device=call.where) for one in (3.0, 11.0)] if kind == "float8_e4m3fn" else []
    for query in ("bfloat16", "float8_e4m3fn") if scales else ("bfloat16",):
        mqa_q = torch.zeros(TOKENS, HEADS, 576, device=call.where).to(getattr(torch, query))
        args = ql_nope, q_pe, kv_c, k_pe, mqa_q, cache, call.slots, *scales, BLOCK, *call.rotation
        call.run(f"fused_kimi_k3_mla_decode_q_concat_{name}", *args)
        close(mqa_q, queries, 3)
        call.assert_entries(cache, entries, 11)


@pytest.mark.parametrize("device", DEVICES)
def test_keys_and_values_alone(device: str) -> None:
    """Bits are copied, and an fp8 k_pe, too; others are converted as torch does, as these numbers do not saturate."""
    call = Call(device, rotary=False)
    k_nope, k_pe, v = call.heads(128), call.rows(64), call.heads(128)
    right = torch.cat((k_nope, k_pe[:, None].expand(-1, HEADS, -1)), -1)
    k_out = torch.empty_like(right)
    call.run("fused_kimi_k3_mla_kv_concat", k_nope, k_pe, k_out)
    assert torch.equal(k_out, right)
    for pe in (k_pe, k_pe.to(torch.float8_e4m3fn)):
        k_fp8, v_fp8 = (torch.zeros(one.shape, device=call.where).to(torch.float8_e4m3fn) for one in (right, v))
        call.run("fused_kimi_k3_mla_kv_concat_quant_fp8", k_nope, pe, v, k_fp8, v_fp8)
        for found, expected in ((k_fp8, right), (v_fp8, v)):
            assert torch.equal(found.float(), expected.to(torch.float8_e4m3fn).float())


def test_refusals() -> None:
    call = Call("host", rotary=True)
    tensors = call.heads(512), call.heads(64), call.rows(512), call.rows(64), torch.empty(TOKENS, HEADS, 576).bfloat16()
    name = "fused_kimi_k3_mla_decode_q_concat_kv_cache_insert"
    for wrong, rest in (
        ("cos_sin_cache", (call.cache(576, torch.bfloat16), call.slots, BLOCK, call.slots)),
        ("k_cache", (call.cache(576, torch.uint8), call.slots, BLOCK)),
        ("k_cache", (call.cache(576, torch.bfloat16), call.slots, BLOCK + 1)),
        ("slot_mapping", (call.cache(576, torch.bfloat16), torch.zeros(6).long(), BLOCK)),
    ):
        with pytest.raises(pyops.OpError, match=f"{name}: {wrong}: expected"):
            call.run(name, *tensors, *rest)
