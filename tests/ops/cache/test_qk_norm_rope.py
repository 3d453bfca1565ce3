"""Ops that norm and rotate heads and insert them into caches, by float64 and complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyops
from pyops.testing import cpu

DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENS, Q, KV, BLOCK = 5, 5, 2, 4
FAR = 2**40
SLOTS, POSITIONS = [9, -1, 2, FAR, 3], [4, 1, 0, 2, -FAR]
STORED = {9: 0, 2: 2}  # {slot: token}; token 4 has no position
EPS = 1e-5


def run(device: str, name: str, *args: Any, **options: Any) -> None:
    op = getattr(pyops, name)
    if device == "host":
        with cpu("kernels"):
            op(*args, **options)
    else:
        op(*args, **options)


def where(device: str) -> str:
    return "cpu" if device == "host" else device


def right(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    table: torch.Tensor | None,
    is_neox: bool,
    is_normed: bool = True,
) -> torch.Tensor:
    """Heads in float64, normed and rotated; `table` has the cosines and then the sines of pairs."""
    x = x.double()
    x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() if is_normed else x
    x = x if weight is None else x * weight.double()
    if table is None:
        return x
    pairs = table.shape[1] // 2
    angles = table.double()[[at if 0 <= at < len(table) else 0 for at in POSITIONS]]
    phase = torch.complex(angles[:, :pairs], angles[:, pairs:])[:, None]
    if is_neox:
        rotated = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) * phase
        rotated = torch.cat((rotated.real, rotated.imag), -1)
    else:
        rotated = torch.view_as_real(torch.complex(x[..., : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]) * phase).flatten(
            -2
        )
    known = torch.tensor([0 <= at < len(table) for at in POSITIONS], device=x.device)[:, None, None]
    return torch.where(known, torch.cat((rotated, x[..., 2 * pairs :]), -1), x)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double().reshape(expected.shape), expected, rtol=2**-8 * 1.01, atol=2e-6)


def assert_inserted(cache: torch.Tensor, x: torch.Tensor, scale: float, kept: float, stored: dict[int, int]) -> None:
    """`cache` [blocks, block_size, heads, head_size] has the heads x of tokens, and `kept` in all other slots."""
    for slot in range(cache.shape[0] * cache.shape[1]):
        entry = cache[slot // cache.shape[1], slot % cache.shape[1]].double()
        if slot not in stored:
            assert (entry == kept).all()
            continue
        quotient = x[stored[slot]].double() / scale
        step = quotient.abs() / 16 if cache.dtype == torch.float8_e4m3fn else torch.zeros_like(quotient)
        assert ((entry - quotient.clamp(-448, 448)).abs() <= step.clamp(min=2**-10)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("head_dim", "pairs", "kind"), [(64, 12, "auto"), (192, 96, "fp8"), (128, 0, "auto")])
def test_step(head_dim: int, pairs: int, kind: str, device: str) -> None:
    at, width = where(device), (Q + 2 * KV) * head_dim
    torch.manual_seed(2)
    qkv = torch.randn(TOKENS, width + 8, dtype=torch.bfloat16, device=at)[:, :width]
    weights = [torch.randn(head_dim, device=at) for _ in range(2)]
    table = torch.randn(5, 2 * pairs + 6, device=at)
    cos, sin = table[:, :pairs], table[:, pairs : 2 * pairs]
    outputs = [torch.zeros(TOKENS, heads * head_dim, dtype=torch.bfloat16, device=at) for heads in (Q, KV, KV)]
    dtype = torch.bfloat16 if kind == "auto" else torch.float8_e4m3fn
    caches = [torch.full((3, BLOCK, KV, head_dim), 7.0, device=at).to(dtype) for _ in range(2)]
    scales = [torch.tensor([one], device=at) for one in (0.5, 0.25)]
    positions, slots = torch.tensor(POSITIONS, device=at), torch.tensor(SLOTS, device=at)
    kinds = head_dim, Q, KV, pairs, EPS, 0.75, kind, *scales
    run(device, "fused_qknorm_rope_cache", *outputs, qkv, *weights, cos, sin, positions, slots, *caches, *kinds)
    heads = qkv.unflatten(-1, (-1, head_dim))
    rotation = table[:, : 2 * pairs] if pairs else None
    close(outputs[0], right(heads[:, :Q], weights[0] + 0.75, rotation, True))
    close(outputs[1], right(heads[:, Q : Q + KV], weights[1] + 0.75, rotation, True))
    assert torch.equal(outputs[2].view(TOKENS, KV, -1), heads[:, Q + KV :])
    stored = STORED if pairs else STORED | {3: 4}
    for cache, out, scale in zip(caches, outputs[1:], (0.5, 0.25), strict=True):
        factor = 1.0 if kind == "auto" else scale
        assert_inserted(cache, out.view(TOKENS, KV, head_dim), factor, 7.0, stored)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "is_neox", "has_norms", "kind"),
    [
        *((128, 128, True, False, "auto"), (64, 24, False, True, "auto")),
        *((256, 192, True, True, "fp8"), (256, 256, False, False, "fp8")),
    ],
)
def test_heads_with_or_without_norms(
    head_dim: int, rotary_dim: int, is_neox: bool, has_norms: bool, kind: str, device: str
) -> None:
    """`fused_qk_rope_cache`: a row of qkv has more elements than heads, and both caches are views of one tensor."""
    at = where(device)
    torch.manual_seed(5)
    qkv = torch.randn(TOKENS, (Q + 2 * KV) * head_dim + 8, dtype=torch.bfloat16, device=at)
    before, width = qkv.clone(), (Q + 2 * KV) * head_dim
    table = torch.randn(5, rotary_dim, dtype=torch.bfloat16, device=at)
    weights = [torch.randn(head_dim, device=at).bfloat16() for _ in range(2)] if has_norms else [None, None]
    dtype = torch.bfloat16 if kind == "auto" else torch.float8_e4m3fn
    caches = torch.full((3, 2, BLOCK, KV, head_dim), 7.0, device=at).to(dtype).unbind(1)
    scales = [torch.tensor([one], device=at) for one in (0.5, 0.25)]
    positions, slots = torch.tensor(POSITIONS, device=at), torch.tensor(SLOTS, device=at)
    rest = table, is_neox, positions, slots, *caches, kind, *scales, *weights, EPS, kind == "fp8"
    run(device, "fused_qk_rope_cache", qkv, Q, KV, head_dim, *rest)
    heads, given = (one[:, :width].unflatten(-1, (-1, head_dim)) for one in (qkv, before))
    for part, weight in ((slice(0, Q), weights[0]), (slice(Q, Q + KV), weights[1])):
        close(heads[:, part], right(given[:, part], weight, table, is_neox, has_norms))
    assert torch.equal(heads[:, Q + KV :], given[:, Q + KV :])
    assert torch.equal(qkv[:, width:], before[:, width:])
    keys, values = heads[:, Q : Q + KV], heads[:, Q + KV :]
    for cache, x, scale in zip(caches, (keys, values), (0.5, 0.25), strict=True):
        assert_inserted(cache, x, 1.0 if kind == "auto" else scale, 7.0, STORED)


@pytest.mark.parametrize("device", DEVICES)
def test_decode_steps_that_load_before_the_wait(device: str) -> None:
    """Steps of a model with `constant_positions` and `constant_past`: lengths, positions and slots change in place
    between them, and the kernel before each insert, and each attention, writes what these must not load early.

    Keys are zeros, so that attention is the mean of the values.
    """
    at, size, steps, capacity, lengths = where(device), 128, 20, 192, [53, 101]
    torch.manual_seed(7)
    rows = torch.randn(steps, len(lengths), (Q + 2) * size, dtype=torch.bfloat16, device=at)
    rows[..., Q * size : (Q + 1) * size] = 0
    past = torch.randn(len(lengths), capacity, size, dtype=torch.bfloat16, device=at)
    weight, angles = torch.ones((Q + 2) * size, dtype=torch.bfloat16, device=at), torch.randn(capacity, size, device=at)
    table = torch.arange(len(lengths) * capacity // 16, dtype=torch.int32, device=at).view(len(lengths), -1)
    caches = torch.zeros(2, len(lengths) * capacity // 16, 16, 1, size, dtype=torch.bfloat16, device=at)
    qkv, out = torch.empty_like(rows[0]), rows.new_zeros(steps, len(lengths), Q, size)
    seq_lens = torch.tensor(lengths, device=at)
    positions, slots = torch.empty_like(seq_lens), torch.empty_like(seq_lens)

    def start() -> None:
        seq_lens.copy_(torch.tensor(lengths))
        positions.copy_(seq_lens - 1)
        slots.copy_(positions + torch.arange(len(lengths), device=at) * capacity)
        caches[1].view(past.shape).copy_(past)
        for s, length in enumerate(lengths):
            caches[1].view(past.shape)[s, length:] = 0
        out.zero_()

    def decode() -> None:
        for step in range(steps):
            for one in (seq_lens, positions, slots):
                one.add_(1)
            run(device, "rms_norm", qkv, rows[step], weight, EPS)
            run(
                device,
                "fused_qk_rope_cache",
                qkv,
                Q,
                1,
                size,
                angles,
                True,
                positions,
                slots,
                *caches,
                constant_positions=True,
            )
            queries = qkv[:, : Q * size].unflatten(-1, (Q, size))
            run(
                device,
                "paged_attention_v1",
                out[step],
                queries,
                *caches,
                1,
                1.0,
                table,
                seq_lens,
                16,
                capacity,
                None,
                "auto",
                1.0,
                1.0,
                constant_past=True,
            )

    def assert_means() -> None:
        x = rows.double()
        values = (x / (x.square().mean(-1, keepdim=True) + EPS).sqrt())[..., -size:]
        for s, length in enumerate(lengths):
            total = past[s, :length].double().sum(0)
            for step in range(steps):
                total = total + values[step, s]
                mean = (total / (length + step + 1)).expand(Q, size)
                torch.testing.assert_close(out[step, s].double(), mean, rtol=2**-8, atol=1e-3)

    start()
    decode()
    assert_means()
    if device == "cuda":  # kernels of a graph follow each other closely
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode()
        for _ in range(3):
            start()
            graph.replay()
            assert_means()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotary_dim", [0, 32, 64])
@pytest.mark.parametrize("kind", ["auto", "fp8", "none"])
def test_muse_spark(kind: str, rotary_dim: int, device: str) -> None:
    at, size = where(device), 64
    torch.manual_seed(3)
    qkv = torch.randn(TOKENS, (2 * Q + 2 * KV) * size, dtype=torch.bfloat16, device=at)
    before = qkv.clone().unflatten(-1, (-1, size))
    table = torch.randn(5, rotary_dim, device=at) if rotary_dim else None
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16
    cache = None if kind == "none" else torch.full((3, BLOCK, KV, 2 * size), 7.0, device=at).to(dtype).transpose(1, 2)
    slots = None if kind == "none" else torch.tensor(SLOTS, device=at)
    scales = [torch.tensor([one], device=at) for one in (0.5, 0.25)]
    quants = torch.zeros(TOKENS, Q * size, device=at).to(torch.float8_e4m3fn) if kind == "fp8" else None
    q_scale = torch.tensor([0.125], device=at) if kind == "fp8" else None
    positions = torch.tensor(POSITIONS, device=at)
    rest = slots, cache, BLOCK, kind.replace("none", "auto"), *scales, quants, q_scale
    name = "fused_muse_spark_qknorm_rope_kv_insert"
    run(device, name, qkv, positions, Q, KV, size, EPS, table, rotary_dim, *rest)
    heads = qkv.unflatten(-1, (-1, size))
    queries, keys = right(before[:, :Q], None, table, False), right(before[:, Q : Q + KV], None, table, False)
    assert torch.equal(heads[:, Q + KV :], before[:, Q + KV :])
    close(heads[:, Q : Q + KV], keys)
    if quants is None:
        close(heads[:, :Q], queries)
    else:
        assert torch.equal(heads[:, :Q], before[:, :Q])
        step = (queries * 8).abs() / 16 * 1.08 + 2**-10  # rounded to bfloat16 before
        assert ((quants.view(TOKENS, Q, size).double() - queries * 8).abs() <= step).all()
    if cache is not None:
        stored = STORED if rotary_dim else STORED | {3: 4}
        for start, x, scale in ((0, heads[:, Q : Q + KV], 0.5), (size, heads[:, Q + KV : Q + 2 * KV], 0.25)):
            part = cache.transpose(1, 2)[..., start : start + size]
            assert_inserted(part, x, scale if kind == "fp8" else 1.0, 7.0, stored)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotary_dim", [24, 64])
@pytest.mark.parametrize("outputs", [False, True])
def test_minimax(outputs: bool, rotary_dim: int, device: str) -> None:
    """With `outputs`, index tensors are fp8 and queries go elsewhere, in both dtypes."""
    at, size, index_heads = where(device), 128, 3
    torch.manual_seed(4)
    qkv = torch.randn(TOKENS, (Q + 2 * KV + index_heads + 1) * size, dtype=torch.bfloat16, device=at)
    before = qkv.clone().unflatten(-1, (-1, size))
    weights = [torch.randn(size, dtype=torch.bfloat16, device=at) for _ in range(4)]
    table = torch.randn(5, rotary_dim, dtype=torch.bfloat16, device=at)
    positions, slots = torch.tensor(POSITIONS, device=at), torch.tensor(SLOTS, device=at)
    cache = torch.full((3, KV, BLOCK, 2 * size), 7.0, dtype=torch.bfloat16, device=at)
    fp8 = torch.float8_e4m3fn
    index_cache = torch.full((3 * BLOCK, size), 7.0, device=at).to(fp8 if outputs else torch.bfloat16)
    index_slots = torch.tensor([5, 12, -1, 6, 7], device=at)
    q_out, q_fp8, index_q = (
        torch.zeros(TOKENS, heads * size, device=at).to(dtype) if outputs else None
        for heads, dtype in ((Q, torch.bfloat16), (Q, fp8), (index_heads, fp8))
    )
    mapped = slots, index_slots if outputs else None, cache, index_cache, BLOCK
    kinds = q_out, index_q, "bfloat16", False, q_fp8, 0.125, None, None
    args = qkv, *weights[:2], table, positions, Q, KV, rotary_dim, EPS, *weights[2:], index_heads, *mapped, *kinds
    run(device, "fused_minimax_m3_qknorm_rope_kv_insert", *args)
    heads = qkv.unflatten(-1, (-1, size))
    groups = (0, Q), (Q, Q + KV), (Q + 2 * KV, Q + 2 * KV + index_heads), (Q + 2 * KV + index_heads, heads.shape[1])
    expected = [
        right(before[:, first:end], weight + 1.0, table, True)
        for (first, end), weight in zip(groups, (one.double() for one in weights), strict=True)
    ]
    assert torch.equal(heads[:, Q + KV : Q + 2 * KV], before[:, Q + KV : Q + 2 * KV])
    for part in (1, 3):
        close(heads[:, groups[part][0] : groups[part][1]], expected[part])
    if q_out is not None and q_fp8 is not None and index_q is not None:
        assert torch.equal(heads[:, :Q], before[:, :Q])
        close(q_out, expected[0])
        for quants, x in ((q_fp8, q_out * 8), (index_q, expected[2].view(TOKENS, -1))):
            step = x.double().abs() / 16 * 1.08 + 2**-10
            assert ((quants.double() - x.double().clamp(-448, 448)).abs() <= step).all()
    else:
        close(heads[:, :Q], expected[0])
        close(heads[:, groups[2][0] : groups[2][1]], expected[2])
    both = cache.transpose(1, 2)
    assert_inserted(both[..., :size], heads[:, Q : Q + KV], 1.0, 7.0, STORED)
    assert_inserted(both[..., size:], heads[:, Q + KV : Q + 2 * KV], 1.0, 7.0, STORED)
    stored = {5: 0, 6: 3} if outputs else STORED
    assert_inserted(index_cache.view(3 * BLOCK, 1, 1, size), heads[:, -1:], 1.0, 7.0, stored)


def test_refusals_of_weights_tables_and_sizes() -> None:
    qkv, indices = torch.randn(2, 6 * 64).bfloat16(), torch.zeros(2).long()
    caches = [torch.zeros(2, 4, 1, 64).bfloat16() for _ in range(2)]
    for wrong, columns, size, weights in (
        ("k_weight", 64, 64, (torch.ones(64), None)),
        ("q_weight", 64, 64, (None, torch.ones(64))),
        ("cos_sin_cache", 63, 64, (None, None)),
        ("cos_sin_cache", 66, 64, (None, None)),
        ("cos_sin_cache", 0, 64, (None, None)),
        ("head_dim", 64, 192, (None, None)),
    ):
        rest = torch.randn(3, columns), True, indices, indices, *caches, "auto", None, None, *weights
        with pytest.raises(pyops.OpError, match=f"fused_qk_rope_cache: {wrong}: expected"):
            run("host", "fused_qk_rope_cache", qkv, 4, 1, size, *rest)


def test_refusals() -> None:
    qkv, positions = torch.randn(2, 6 * 64).bfloat16(), torch.zeros(2).long()
    name = "fused_muse_spark_qknorm_rope_kv_insert"
    cache, table = torch.zeros(2, 1, 4, 128).bfloat16(), torch.randn(3, 64)
    for wrong, size, rest in (
        ("head_dim", 32, (None, 64, None, None, 4, "auto")),
        ("slot_mapping", 64, (None, 64, None, cache, 4, "auto")),
        ("q_scale", 64, (None, 64, None, None, 4, "auto", None, None, torch.zeros(2, 256).to(torch.float8_e4m3fn))),
        ("rotary_dim", 64, (table, 63, None, None, 4, "auto")),
        ("kv_cache_dtype", 64, (None, 64, positions, cache, 4, "nvfp4")),
        ("k_scale", 64, (None, 64, positions, cache.to(torch.uint8), 4, "fp8")),
    ):
        with pytest.raises(pyops.OpError, match=f"{name}: {wrong}: expected"):
            run("host", name, qkv, positions, 4, 1, size, EPS, *rest)
