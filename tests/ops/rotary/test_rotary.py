"""The rotary family against torch step by step and against complex numbers: layouts, positions out of range."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyops
from pyops._core import config
from pyops.testing import assert_matches_reference, same_bits
from pyops.testing.calls import assert_results, expected, run
from tests.support.calls import DEVICES

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MAX_POSITION = 97


def draw(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def angles(rows: int, rotary_dim: int, device: str, first: int = 0) -> torch.Tensor:
    """[rows, rotary_dim / 2] float32, those of RoPE."""
    frequencies = 1e4 ** -(torch.arange(0, rotary_dim, 2, device=device).float() / rotary_dim)
    return torch.outer(torch.arange(first, first + rows, device=device).float(), frequencies)


def table(rows: int, rotary_dim: int, dtype: torch.dtype, device: str, first: int = 0) -> torch.Tensor:
    angle = angles(rows, rotary_dim, device, first)
    return torch.cat((angle.cos(), angle.sin()), -1).to(dtype)


def stepwise(x: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotate x [..., heads, head_size] by angles [..., rotary_dim] in float64, with every step rounded to x's dtype."""
    half = cos_sin.shape[-1] // 2
    result = x.clone()
    for j in range(half):
        at = (j, j + half) if is_neox else (2 * j, 2 * j + 1)
        a, b = (x[..., i].double() for i in at)
        cos, sin = (cos_sin[..., i, None].double() for i in (j, half + j))
        products = [(v * w).to(x.dtype).double() for v, w in ((a, cos), (b, sin), (b, cos), (a, sin))]
        result[..., at[0]] = (products[0] - products[1]).to(x.dtype)
        result[..., at[1]] = (products[2] + products[3]).to(x.dtype)
    return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    ("head_size", "rotary_dim", "heads"), [(64, 64, (8, 2)), (120, 120, (3, 3)), (80, 32, (17, 1)), (108, 54, (7, 7))]
)
def test_every_step_rounds(
    head_size: int, rotary_dim: int, heads: tuple[int, int], is_neox: bool, dtype: torch.dtype, device: str
) -> None:
    """A result that was rounded only once would differ in about one element of two hundred."""
    cache = table(MAX_POSITION, rotary_dim, dtype, device)
    positions = torch.randint(0, MAX_POSITION, (9,), device=device)
    query, key = (draw(9, n, head_size, dtype=dtype, device=device, seed=n) for n in heads)
    expected = [stepwise(x, cache[positions], is_neox) for x in (query, key)]
    pyops.rotary_embedding(positions, query, key, head_size, cache, is_neox)
    assert torch.equal(query, expected[0])
    assert torch.equal(key, expected[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rope_dim_offset", [0, 3, 16, 32])
def test_partial_rotation_and_its_inverse(rope_dim_offset: int, is_neox: bool, device: str) -> None:
    """From `rope_dim_offset` on; by the negative angles if asked."""
    dtype, rotary_dim = torch.bfloat16, 32
    cache = table(MAX_POSITION, rotary_dim, dtype, device)
    back = torch.cat((cache[:, : rotary_dim // 2], -cache[:, rotary_dim // 2 :]), -1)
    positions = torch.randint(0, MAX_POSITION, (9,), device=device)
    for inverse, angles_of in ((False, cache), (True, back)):
        query, key = (draw(9, n, 64, dtype=dtype, device=device, seed=n) for n in (4, 2))
        expected = [x.clone() for x in (query, key)]
        for x in expected:
            part = x[..., rope_dim_offset : rope_dim_offset + rotary_dim]
            part.copy_(stepwise(part, angles_of[positions], is_neox))
        pyops.rotary_embedding(positions, query, key, 64, cache, is_neox, rope_dim_offset, inverse)
        assert torch.equal(query, expected[0])
        assert torch.equal(key, expected[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_neox", [True, False])
def test_pairs_rotate_as_complex_numbers(is_neox: bool, device: str) -> None:
    """In float32, by the angles themselves; and the dot product of two rotated vectors depends on the distance of
    positions alone."""
    head_size = 64
    positions = torch.arange(MAX_POSITION, device=device)
    query = draw(MAX_POSITION, 2 * head_size, dtype=torch.float32, device=device)
    before = query.clone().unflatten(-1, (2, head_size)).double()
    pyops.rotary_embedding(
        positions, query, None, head_size, table(MAX_POSITION, head_size, torch.float32, device), is_neox
    )
    pair = before.chunk(2, -1) if is_neox else (before[..., ::2], before[..., 1::2])
    turn = angles(MAX_POSITION, head_size, device).double()
    turned = torch.complex(*pair) * torch.polar(torch.ones_like(turn), turn)[:, None]
    expected = torch.cat((turned.real, turned.imag), -1) if is_neox else torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(query.view_as(expected).double(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_neox", [True, False])
def test_float32_table_rounds_once(is_neox: bool, device: str) -> None:
    """As in FlashInfer: 16-bit elements are rotated in float32. A position without an angle rotates nothing."""
    head_size = 64
    positions = torch.tensor([3, 0, MAX_POSITION, -1, 9], device=device)
    query = draw(5, 2 * head_size, dtype=torch.bfloat16, device=device)
    key = draw(5, head_size, dtype=torch.bfloat16, device=device)
    cache = table(MAX_POSITION, head_size, torch.float32, device)
    cos, sin = (each[:, None] for each in cache[positions.clamp(0, MAX_POSITION - 1)].chunk(2, -1))
    right = []
    for rows in (query, key):
        heads = rows.unflatten(-1, (-1, head_size)).float()
        x, y = heads.chunk(2, -1) if is_neox else (heads[..., ::2], heads[..., 1::2])
        pair = x * cos - y * sin, y * cos + x * sin
        turned = torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)
        turned[2:4] = heads[2:4]
        right.append(turned.flatten(-2).bfloat16())
    for op in (pyops.flashinfer_rotary_embedding, pyops.rotary_embedding):
        turning = query.clone(), key.clone()
        op(positions, *turning, head_size, cache, is_neox)
        assert torch.equal(turning[0], right[0])
        assert torch.equal(turning[1], right[1])


def _placed(x: torch.Tensor, layout: str) -> torch.Tensor:
    """`x` [..., heads, head_size] in another memory layout."""
    *tokens, heads, head_size = x.shape
    if layout == "flat":
        return x.clone().flatten(-2)
    if layout == "fused":  # a slice of a longer row
        rows = torch.full((*tokens, (heads + 3) * head_size), 7.0, dtype=x.dtype, device=x.device)
        placed = rows[..., head_size : (heads + 1) * head_size]
        return placed.copy_(x.flatten(-2))
    if layout == "padded":  # heads with gaps between them
        placed = torch.full((*tokens, heads, head_size + 64), 7.0, dtype=x.dtype, device=x.device)[..., :head_size]
    elif layout == "heads first":
        placed = torch.empty((heads, *tokens, head_size), dtype=x.dtype, device=x.device).movedim(0, -2)
    elif layout == "tokens transposed":
        placed = torch.empty((*tokens[::-1], heads, head_size), dtype=x.dtype, device=x.device).transpose(
            0, len(tokens) - 1
        )
    else:
        assert layout == "odd"  # no two elements have the same alignment
        placed = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    return placed.copy_(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(10,), (2, 5)])
@pytest.mark.parametrize("is_neox", [True, False])
def test_every_layout(shape: tuple[int, ...], is_neox: bool, position_dtype: torch.dtype, device: str) -> None:
    """Query and key each in its own layout and rank, positions of any strides; the bits are those of contiguous
    tensors."""
    head_size, dtype = 32, torch.bfloat16
    cache = table(MAX_POSITION, head_size, dtype, device)
    contiguous = torch.randint(0, MAX_POSITION, shape, dtype=position_dtype, device=device)
    apart = torch.stack((contiguous, contiguous), -1)[..., 0]
    expanded = contiguous[..., :1].expand(shape) if len(shape) == 1 else contiguous[:1].expand(shape)
    for positions in (contiguous, apart, expanded):
        query = draw(*shape, 4, head_size, dtype=dtype, device=device, seed=1)
        key = draw(*shape, 2, head_size, dtype=dtype, device=device, seed=2)
        expected = [stepwise(x, cache[positions.long()], is_neox) for x in (query, key)]
        layouts = ("flat", "fused", "padded", "heads first", "tokens transposed", "odd")
        for i, layout in enumerate(layouts):
            q, k = _placed(query, layout), _placed(key, layouts[(i + 1) % len(layouts)])
            pyops.rotary_embedding(positions, q, k, head_size, cache, is_neox)
            assert torch.equal(q.reshape(expected[0].shape), expected[0]), layout
            assert torch.equal(k.reshape(expected[1].shape), expected[1]), layout
            q = _placed(query, layout)
            pyops.rotary_embedding(positions, q, None, head_size, cache, is_neox)
            assert torch.equal(q.reshape(expected[0].shape), expected[0]), layout


@pytest.mark.parametrize("device", DEVICES)
def test_gaps_are_left_alone(device: str) -> None:
    """The gaps between heads and after slices keep their bits, and so do elements that are not rotated."""
    memory = draw(6, 5, 96, dtype=torch.float16, device=device)
    before = memory.clone()
    positions = torch.arange(6, device=device)
    pyops.rotary_embedding(
        positions, memory[:, :3, :64], memory[:, 3:4, :64], 64, table(6, 32, torch.float16, device), True
    )
    assert not torch.equal(memory[1:, :4, :32], before[1:, :4, :32])
    memory[:, :4, :32] = before[:, :4, :32]
    assert same_bits(memory, before)


HOSTILE = [-1, MAX_POSITION, 2**31 - 1, -(2**31), 5]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_out_of_range_leave_their_tokens(dtype: torch.dtype, device: str) -> None:
    """Unreadable memory surrounds the table, so that a row next to it cannot be taken for an entry."""
    values = [*HOSTILE, *([2**62, -(2**63)] if dtype is torch.int64 else [])]
    inside = torch.tensor([0 <= value < MAX_POSITION for value in values], device=device)
    positions = torch.tensor(values, dtype=dtype, device=device)
    cache = torch.full((MAX_POSITION + 2, 32), torch.nan, device=device)[1:-1]
    cache.copy_(table(MAX_POSITION, 32, torch.float32, device))
    query, key = (draw(len(values), 64, dtype=torch.float32, device=device, seed=i) for i in (0, 1))
    sections = (6, 5, 5)
    tables = [cache, *(table(13, 32, torch.float32, device, first) for first in range(4))]

    def call(name: str, *args: Any) -> list[torch.Tensor]:
        op = getattr(pyops, name)
        if isinstance(device, str) and config.kernels_on_cpu():
            assert_matches_reference(op, *args)
        copies = [arg.clone() if arg is query or arg is key else arg for arg in args]
        op(*copies)
        return [copy for copy, arg in zip(copies, args, strict=True) if arg is query or arg is key]

    for after, before in zip(
        call("rotary_embedding", positions, query, key, 32, cache, True), (query, key), strict=True
    ):
        assert torch.equal((after != before).any(-1), inside)
    for axis in range(3):
        three = torch.full((3, len(values)), 7, dtype=dtype, device=device)
        three[axis] = positions
        results = call("multimodal_rotary_embedding", three, query, key, 32, cache, True, *sections, False)
        for after, before in zip(results, (query, key), strict=True):
            assert torch.equal((after != before).any(-1), inside)
    query_out, key_out = torch.empty(len(values), 5 * 64, device=device), torch.empty_like(key)
    call("dual_chunk_rotary_embedding", query_out, key_out, positions, query, key, 32, *tables, True)
    pyops.dual_chunk_rotary_embedding(query_out, key_out, positions, query, key, 32, *tables, True)
    assert torch.equal((key_out != key).any(-1), inside)
    assert torch.equal((query_out != query.repeat(1, 5)).view(len(values), 5, 64).any(-1).any(-1), inside)


@pytest.mark.parametrize("device", DEVICES)
def test_positions_out_of_range_are_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_CHECK", "1")
    pyops.rotary_embedding.op.forget()
    query = draw(3, 64, dtype=torch.float32, device=device)
    positions = torch.tensor([3, 97, -4], device=device)
    with pytest.raises(pyops.OpError, match=r"^rotary_embedding: positions: 2 of 3 indices .* at \(1,\): 97$"):
        pyops.rotary_embedding(positions, query, None, 32, table(MAX_POSITION, 32, torch.float32, device), True)
    pyops.rotary_embedding.op.forget()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan_stay_in_their_pair(dtype: torch.dtype, device: str) -> None:
    query = draw(2, 64, dtype=dtype, device=device)
    query[0, 3], query[0, 20], query[1, 40] = torch.nan, torch.inf, -torch.inf
    pyops.rotary_embedding(torch.tensor([5, 6], device=device), query, None, 64, table(9, 64, dtype, device), True)
    touched = ~query.isfinite()
    assert touched[0].nonzero().flatten().tolist() == [3, 20, 35, 52]
    assert touched[1].nonzero().flatten().tolist() == [8, 40]
    assert query[0, [3, 35]].isnan().all()
    assert query[0, [20, 52]].isinf().all()


# Few heads and many; few tokens, and so many that a thread has several heads; a head that fills a block.
GEOMETRIES = [(1, (1, 1), 64), (5, (5, 5), 16), (1, (64, 4), 256), (110, (41, 41), 256), (3, (3, 1), 2046)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("count", "heads", "head_size"), GEOMETRIES)
def test_every_geometry(count: int, heads: tuple[int, int], head_size: int, device: str) -> None:
    """Every token is rotated exactly once, for any share of it per thread."""
    dtype = torch.bfloat16
    cache, short = (table(rows, head_size, dtype, device) for rows in (count, 1 + count // 2))
    query, key = (draw(count, n * head_size, dtype=dtype, device=device, seed=n) for n in heads)
    positions = torch.arange(count - 1, -1, -1, device=device)
    cos, sin = cache[:, : head_size // 2], cache[:, head_size // 2 :]
    x = query.unflatten(-1, (-1, head_size))
    tables = (cache, *[short] * 4)
    for wrapper, args in (
        (pyops.rotary_embedding, (positions, query, key, head_size, cache, True, 0, False)),
        (pyops.apply_rotary_emb, (x, x, cos, sin, True, False)),
        (
            pyops.dual_chunk_rotary_embedding,
            (query.repeat(1, 5), key, positions, query, key, head_size, *tables, True),
        ),
    ):
        assert_results(wrapper.op, expected(wrapper.op, args), run(wrapper.op, args))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    ("sections", "interleaved"),
    [((16, 24, 24), False), ((11, 3, 2), False), ((0, 0, 16), False), ((24, 20, 20), True), ((6, 5, 5), True)],
)
def test_mrope_three_axes(
    sections: tuple[int, int, int], interleaved: bool, is_neox: bool, dtype: torch.dtype, device: str
) -> None:
    """Every pair is rotated as by the plain op with the positions of its axis."""
    half = sum(sections)
    if interleaved:  # thw thw ... thw, then the remaining t
        axes = [i % 3 if i < 3 * min(sections[1:]) else 0 for i in range(half)]
        assert [axes.count(axis) for axis in range(3)] == list(sections)
    else:
        axes = [axis for axis in range(3) for _ in range(sections[axis])]
    cache = table(MAX_POSITION, 2 * half, dtype, device)
    positions = torch.randint(0, MAX_POSITION, (3, 11), device=device)
    query, key = (draw(11, n, 2 * half + 8, dtype=dtype, device=device, seed=n) for n in (4, 2))
    angle = cache[positions]
    picked = torch.stack([angle[axes[j % half], :, j] for j in range(2 * half)], -1)
    expected = [stepwise(x, picked, is_neox) for x in (query, key)]
    pyops.multimodal_rotary_embedding(
        positions, query, key, 2 * half + 8, cache, is_neox, *sections, mrope_interleaved=interleaved
    )
    assert torch.equal(query, expected[0])
    assert torch.equal(key, expected[1])
    text = draw(11, 4, 2 * half + 8, dtype=dtype, device=device)
    plain = text.clone()
    pyops.multimodal_rotary_embedding(positions[1], text, None, 2 * half + 8, cache, is_neox, *sections)
    pyops.rotary_embedding(positions[1], plain, None, 2 * half + 8, cache, is_neox)
    assert torch.equal(text, plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("angle_dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
def test_apply_rotary_emb(is_neox: bool, angle_dtype: torch.dtype, dtype: torch.dtype, device: str) -> None:
    """Several sequences of one length with their own strides; angles are rounded first, or everything once at the
    end."""
    batch, seq_len, heads, head_size, rotary_dim = 3, 7, 5, 72, 48
    x = draw(seq_len, batch, heads, head_size, dtype=dtype, device=device).transpose(0, 1)
    cos, sin = table(seq_len, rotary_dim, angle_dtype, device).chunk(2, -1)
    angle = torch.cat((cos, sin), -1).expand(batch, -1, -1)
    sin = sin.contiguous()  # its rows have a smaller stride than those of cos
    out = torch.empty(batch, seq_len, heads, head_size + 8, dtype=dtype, device=device)[..., :head_size]
    pyops.apply_rotary_emb(out, x, cos, sin, is_neox)
    assert torch.equal(out, stepwise(x, angle.to(dtype), is_neox))
    pyops.apply_rotary_emb(out, x, cos, sin, is_neox, enable_fp32_compute=True)
    assert torch.equal(out, stepwise(x.float(), angle.float(), is_neox).to(dtype))
    one = torch.empty(seq_len, heads, head_size, dtype=dtype, device=device)
    pyops.apply_rotary_emb(one, x[1], cos, sin, is_neox)
    assert torch.equal(one, stepwise(x[1], angle[1].to(dtype), is_neox))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotary_dim", [64, 20])
@pytest.mark.parametrize("is_neox", [True, False])
def test_dual_chunk(is_neox: bool, rotary_dim: int, device: str) -> None:
    """With the tables of dual chunk attention, made here from their angles."""
    chunk_size, local_size, head_size, dtype = 48, 16, 64, torch.bfloat16
    chunk_len = chunk_size - local_size

    def rows(positions: torch.Tensor) -> torch.Tensor:
        return table(chunk_size * 2, rotary_dim, dtype, device)[positions]

    at = torch.arange(chunk_len, device=device)
    k = rows(torch.arange(200, device=device) % chunk_len)
    q, qc, no_clamp, inter = (
        rows(p) for p in (at, (at + chunk_len).clamp(max=chunk_size), at + chunk_len, at + chunk_size)
    )
    positions = torch.randint(0, 200, (9,), device=device)
    query, key = (draw(9, n, head_size, dtype=dtype, device=device, seed=n) for n in (4, 2))
    query_out = torch.empty(9, 5 * 4 * head_size, dtype=dtype, device=device)
    key_out = torch.empty_like(key)
    pyops.dual_chunk_rotary_embedding(
        query_out, key_out, positions, query, key, head_size, k, q, qc, no_clamp, inter, is_neox
    )
    here = positions % chunk_len
    last = torch.full_like(here, min(2 * chunk_len - 1, chunk_size))
    behind = [here, (here + chunk_len).clamp(max=chunk_size), last, here + chunk_len, here + chunk_size]
    expected = [stepwise(query, rows(p), is_neox).flatten(1) for p in behind]
    assert torch.equal(query_out, torch.cat(expected, -1))
    assert torch.equal(key_out, stepwise(key, rows(here), is_neox))
    flat = torch.empty(9, 2 * head_size, dtype=dtype, device=device)
    tables = (k, q, qc, no_clamp, inter)
    pyops.dual_chunk_rotary_embedding(
        query_out.zero_(), flat, positions, query.flatten(1), key.flatten(1), head_size, *tables, is_neox
    )
    assert torch.equal(query_out, torch.cat(expected, -1))
    assert torch.equal(flat.view_as(key_out), key_out)


def _refused(match: str, name: str = "rotary_embedding", **changes: Any) -> None:
    args: dict[str, Any] = {
        "positions": torch.arange(4),
        "query": torch.zeros(4, 128),
        "key": torch.zeros(4, 64),
        "head_size": 32,
        "cos_sin_cache": torch.zeros(9, 32),
        "is_neox": True,
    }
    with pytest.raises(pyops.OpError, match=f"^{name}: {match}"):
        getattr(pyops, name)(**(args | changes))


def test_refused() -> None:
    _refused(r"positions: expected shape \(num_tokens,\) or \(batch, seq_len\)", positions=torch.zeros(1, 2, 2).long())
    _refused("positions: expected dtype int32 or int64, got float32", positions=torch.zeros(4))
    _refused("query: expected shape", positions=torch.arange(5))
    _refused("query: expected rows of whole heads of head_size=48", head_size=48)
    _refused("query: expected heads of head_size=32", query=torch.zeros(4, 4, 16))
    _refused("key: expected shape", key=torch.zeros(5, 64))
    _refused("key: expected heads that divide those of query, 4, got 3", key=torch.zeros(4, 96))
    _refused("key: expected dtype float32, got float16", key=torch.zeros(4, 64, dtype=torch.float16))
    _refused("head_size: expected at least 1, got 0", head_size=0)
    _refused("rope_dim_offset: expected 0 to head_size - rotary_dim=0, got 1", rope_dim_offset=1)
    _refused("cos_sin_cache: expected dtype float32, got float16", cos_sin_cache=torch.zeros(9, 32).half())
    _refused("cos_sin_cache: expected an even rotary_dim", cos_sin_cache=torch.zeros(9, 31))
    _refused("cos_sin_cache: expected an even rotary_dim", cos_sin_cache=torch.zeros(9, 34))
    _refused("cos_sin_cache: expected shape .* at least one row", cos_sin_cache=torch.zeros(0, 32))
    _refused("cos_sin_cache: expected a contiguous tensor", cos_sin_cache=torch.zeros(9, 64)[:, :32])
    sections = {"mrope_section_t": 6, "mrope_section_h": 5, "mrope_section_w": 5}
    three = {"name": "multimodal_rotary_embedding", "positions": torch.zeros(3, 4).long(), **sections}
    _refused("mrope_section_t: expected sections of rotary_dim / 2", **(three | {"mrope_section_w": 4}))
    _refused("mrope_section_t: expected sections", **(three | {"mrope_section_t": -1, "mrope_section_w": 12}))
    _refused(r"positions: expected shape \(3, num_tokens\)", **(three | {"positions": torch.zeros(2, 4).long()}))
