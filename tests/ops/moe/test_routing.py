"""The choice of experts against float64 loops: every id, also for equal logits, NaN and infinities."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import pyops
import pyops.nn as layers
from pyops._core.system import device as devices
from pyops.example import ArgMaker
from pyops.ops.moe._routing_geometry import choose_geometry
from pyops.testing import same_bits
from tests.support.calls import DEVICES

NAN, INF = math.nan, math.inf
LARGEST = 3.4028234663852886e38  # the float32 maximum
CLOSE = 1e-5  # keys that float32 may order differently


def softmax(logits: list[float]) -> list[float]:
    logits = [min(x, LARGEST) if x == x else -INF for x in logits]
    top = max(logits)
    powers = [math.exp(x - top) if x > -INF else 0.0 for x in logits]
    total = math.fsum(powers) or 1.0
    return [power / total for power in powers]


def sigmoid(logits: list[float]) -> list[float]:
    return [0.0 if not x > -700 else 1 / (1 + math.exp(-x)) for x in logits]


def softplus_sqrt(logits: list[float]) -> list[float]:
    finite = [min(x, LARGEST) if x > -700 else -700.0 for x in logits]
    return [math.sqrt(max(x, 0.0) + math.log1p(math.exp(-abs(x)))) for x in finite]


SCORES = {"topk_softmax": softmax, "topk_sigmoid": sigmoid, "topk_softplus_sqrt": softplus_sqrt}


def logits_of(kind: str, *shape: int, seed: int = 0) -> Tensor:
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2
    if kind == "few values":
        return normal.round() * 0.5  # many equal values, and zeros of both signs
    if kind == "special":
        flat = normal.flatten()
        flat[::3], flat[1::7], flat[4::11], flat[2::13] = NAN, INF, -INF, -0.0
        return flat.view(shape)
    return normal


def outputs(num_tokens: int, topk: int, device: str, ids: torch.dtype = torch.int32) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.empty(num_tokens, topk, dtype=t, device=device) for t in (torch.float32, ids, torch.int32))  # type: ignore[return-value]


def assert_best(ids: list[int], keys: list[float], ties: list[Any]) -> None:
    """`ids` are the best by `keys`, in order; `ties` tells which experts are exactly equal."""
    assert len(set(ids)) == len(ids)
    for a, b in pairwise(ids):
        assert keys[a] >= keys[b] - CLOSE
        assert a < b or ties[a] != ties[b]
    last = ids[-1]
    others = set(range(len(keys))) - set(ids)
    assert not [e for e in others if keys[e] > keys[last] + CLOSE or (ties[e] == ties[last] and e < last)]


def assert_routed(
    name: str, logits: Tensor, bias: Tensor | None, results: tuple[Tensor, ...], renormalize: bool, scale: float = 1.0
) -> None:
    weights, ids, indices = (x.cpu().tolist() for x in results)
    shifts = [0.0] * logits.shape[1] if bias is None else bias.cpu().tolist()
    for token, row in enumerate(logits.double().cpu().tolist()):
        scores = SCORES[name](row)
        keys = [
            -INF if x != x else x if bias is None else s + shift
            for x, s, shift in zip(row, scores, shifts, strict=True)
        ]
        ties = [(-INF if x != x and bias is None else x + 0.0, b) if x == x or bias is None else "nan"
                for x, b in zip(row, shifts, strict=True)]  # fmt: skip
        chosen = ids[token]
        assert_best(chosen, keys, ties)
        right = [scores[e] for e in chosen]
        total = math.fsum(right) if renormalize else 1.0
        right = [scale * s / (total if total > 0 else 1.0) for s in right]
        assert weights[token] == pytest.approx(right, rel=2e-6, abs=1e-12)
        assert indices[token] == [j * len(ids) + token for j in range(len(chosen))]


CASES = [
    # experts, topk
    (1, 1),
    (8, 2),
    (33, 33),  # more choices than lanes
    (60, 4),
    (160, 6),
    (384, 8),
    (600, 70),  # two warps to a token
    (4096, 8),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("experts", "topk"), CASES)
@pytest.mark.parametrize(("dtype", "with_bias"), [("float32", True), ("bfloat16", False), ("float16", False)])
def test_experts_and_weights(experts: int, topk: int, dtype: str, with_bias: bool, device: str) -> None:
    for seed, kind in enumerate(("normal", "few values", "special")):
        logits = logits_of(kind, 5, experts, seed=seed).to(device, getattr(torch, dtype))
        bias = logits_of("few values", experts, seed=9).to(device) * 0.25 if with_bias else None
        for renormalize in (True, False):
            results = outputs(5, topk, device)
            pyops.topk_softmax(*results, logits, renormalize, bias)
            assert_routed("topk_softmax", logits, bias, results, renormalize)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["topk_sigmoid", "topk_softplus_sqrt"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_other_scores(name: str, with_bias: bool, device: str) -> None:
    for kind in ("normal", "few values", "special"):
        logits = logits_of(kind, 5, 60).to(device)
        bias = logits_of("few values", 60, seed=9).to(device) if with_bias else None
        results = outputs(5, 7, device)
        arguments = (2.5, bias) if name == "topk_softplus_sqrt" else (bias, 2.5)
        getattr(pyops, name)(*results, logits, True, *arguments)
        assert_routed(name, logits, bias, results, True, 2.5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("experts", [8, 600])  # a token by a part of a warp, and by two warps
@pytest.mark.parametrize("name", [*SCORES, "table"])
def test_rows_of_padding(name: str, experts: int, device: str) -> None:
    """Ids of -1 and weights of 0; the other rows are those of a call without padding."""
    logits = logits_of("normal", 7, experts).to(device)
    logits[5] = NAN
    is_padding = torch.tensor([False, True, False, False, True, True, False], device=device)
    more: tuple[Any, ...] = (None,) if name == "topk_softmax" else (None, 2.5)
    op = pyops.topk_softplus_sqrt if name == "table" else getattr(pyops, name)
    if op is pyops.topk_softplus_sqrt:
        table = torch.arange(experts, device=device).view(-1, 4) if name == "table" else None
        tokens = None if table is None else torch.tensor([1, 10**6, 0, 1, -1, 0, 1], device=device)
        more = (2.5, None, tokens, table)
    for renormalize in (True, False):
        results, unpadded = outputs(7, 4, device), outputs(7, 4, device)
        op(*unpadded, logits, renormalize, *more)
        op(*results, logits, renormalize, *more, is_padding)
        assert results[1][is_padding].unique().tolist() == [-1]
        assert results[0][is_padding].unique().tolist() == [0.0]
        for one, other in zip(results, unpadded, strict=True):
            assert same_bits(one[~is_padding], other[~is_padding])
        assert same_bits(results[2], unpadded[2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_tokens_without_a_number(with_bias: bool, device: str) -> None:
    """Only NaN, or only -inf: the first experts, with weights of 0. A single number comes first and weighs 1."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.full((3, 60), NAN, dtype=dtype, device=device)
        logits[1] = -INF
        logits[2, 17] = -3.0
        bias = torch.full((60,), -1e30 if with_bias else 0.0, device=device)
        weights, ids, _ = results = outputs(3, 8, device)
        pyops.topk_softmax(*results, logits, True, bias if with_bias else None)
        assert ids[:2].tolist() == [[*range(8)]] * 2
        assert ids[2].tolist() == [17, *range(7)]
        assert weights.tolist() == [[0.0] * 8, [0.0] * 8, [1.0, *[0.0] * 7]]


@pytest.mark.parametrize("device", DEVICES)
def test_very_negative_bias_and_nan_bias(device: str) -> None:
    """An expert with a key far below 0 may be chosen; one with a NaN key comes last, and keeps its score."""
    logits = logits_of("normal", 4, 60).to(device)
    bias = torch.full((60,), -1e6, device=device)
    bias[5] = NAN
    weights, ids, _ = results = outputs(4, 60, device)
    pyops.topk_sigmoid(*results, logits, False, bias)
    assert ids[:, -1].tolist() == [5] * 4
    torch.testing.assert_close(weights[:, -1], logits[:, 5].sigmoid())
    assert [sorted(row) for row in ids.tolist()] == [[*range(60)]] * 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.int32, torch.uint32, torch.int64], ids=str)
def test_types_of_ids_and_strided_rows(kind: torch.dtype, device: str) -> None:
    wide = logits_of("few values", 6, 100).to(device)
    logits = wide[:, 3:63]
    results = outputs(6, 5, device, kind)
    pyops.topk_softmax(*results, logits)
    assert_routed("topk_softmax", logits, None, results, False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kinds", [("int32", "int64"), ("int64", "int32")], ids=str)
def test_expert_table(kinds: tuple[str, str], device: str) -> None:
    """Ids by token, in the order of the table; an entry out of range gives -1 and weighs 0."""
    logits = logits_of("normal", 6, 60).to(device)
    table = torch.randint(0, 60, (20, 4), generator=torch.Generator().manual_seed(1))
    table[3], table[4, 2], table[4, 3] = torch.tensor([59, 0, 60, -1]), 2**31 - 1, -(2**31)
    tokens = torch.tensor([3, 19, 20, -1, 4, -(2**31)])
    table, tokens = table.to(getattr(torch, kinds[0])), tokens.to(getattr(torch, kinds[1]))
    for renormalize in (False, True):
        weights, ids, indices = results = outputs(6, 4, device)
        bias = torch.full((60,), NAN, device=device)
        pyops.topk_softplus_sqrt(*results, logits, renormalize, 1.5, bias, tokens.to(device), table.to(device))
        for token, number in enumerate(tokens.tolist()):
            entries = table[number].tolist() if 0 <= number < 20 else [-1] * 4
            right = [e if 0 <= e < 60 else -1 for e in entries]
            scores = softplus_sqrt(logits[token].double().tolist())
            chosen = [scores[e] if e >= 0 else 0.0 for e in right]
            total = (math.fsum(chosen) or 1.0) if renormalize else 1.0
            assert ids[token].tolist() == right
            assert weights[token].tolist() == pytest.approx([1.5 * s / total for s in chosen], rel=2e-6)
        assert indices.T.flatten().tolist() == [*range(24)]


def grouped(
    row: list[float], bias: list[float] | None, groups: int, top_groups: int, topk: int, function: int
) -> tuple[list[int], list[float], bool]:
    """(experts, scores of all experts, whether it falls back) of a token."""
    finite = [math.isfinite(x) for x in row]
    masked = [x if ok else -INF for x, ok in zip(row, finite, strict=True)]
    scores = [masked, sigmoid(masked), softmax(masked)][function]
    scores = [s if ok else 0.0 for s, ok in zip(scores, finite, strict=True)]
    keys = [
        (s if bias is None else s + bias[e]) if ok else -INF
        for e, (s, ok) in enumerate(zip(scores, finite, strict=True))
    ]
    size, counted = len(row) // groups, 1 if bias is None else 2
    ranked = [sum(sorted(keys[g * size : (g + 1) * size], reverse=True)[:counted]) for g in range(groups)]
    best = sorted(range(groups), key=lambda g: (-ranked[g], g))[:top_groups]
    if ranked[best[-1]] == -INF:
        return [*range(topk)], scores, True
    allowed = [key if e // size in best else -INF for e, key in enumerate(keys)]
    return sorted(range(len(row)), key=lambda e: (-allowed[e], e))[:topk], scores, False


GROUPED = [
    # experts, groups, top groups, topk
    (256, 8, 4, 8),
    (16, 16, 3, 3),  # groups of one expert
    (48, 12, 3, 6),  # two threads per group
    (60, 3, 2, 6),
    (96, 32, 5, 9),
    (20, 1, 1, 7),
    (1200, 6, 2, 32),  # several warps per token
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("experts", "groups", "top_groups", "topk"), GROUPED)
@pytest.mark.parametrize(("function", "with_bias"), [(0, True), (1, True), (2, False)])
def test_grouped_topk(
    experts: int, groups: int, top_groups: int, topk: int, function: int, with_bias: bool, device: str
) -> None:
    """Sixteenths and eighths, with exact sums, so that groups and experts tie; and values that are not finite."""
    for kind in ("few values", "special", "nan"):
        scores = (logits_of("few values", 7, experts) + (0 if function else 8)).to(device)
        if kind == "special":
            flat = scores.view(-1)
            flat[::5], flat[1::7], flat[4::11] = NAN, INF, -INF
        elif kind == "nan":
            scores[:, experts // 3 :] = NAN
        bias = logits_of("few values", experts, seed=9).to(device) if with_bias else None
        for renormalize in (True, False):
            sizes = groups, top_groups, topk
            weights, ids = pyops.grouped_topk(scores, *sizes, renormalize, 2.5, bias, function)
            shifts = None if bias is None else bias.tolist()
            for token, row in enumerate(scores.double().cpu().tolist()):
                right, all_scores, falls_back = grouped(row, shifts, *sizes, function)
                assert ids[token].tolist() == right
                chosen = [all_scores[e] for e in right]
                total = math.fsum(chosen) + 1e-20 if renormalize else 1.0
                expected = [1 / topk] * topk if falls_back else [2.5 * s / total for s in chosen]
                assert weights[token].tolist() == pytest.approx(expected, rel=3e-6, abs=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_grouped_topk_bias_of_any_shape(device: str) -> None:
    scores, bias = (logits_of("few values", *shape, seed=9).to(device) for shape in ((5, 24), (24,)))
    right = pyops.grouped_topk(scores, 4, 2, 3, True, 1.0, bias, 1)
    for shape in ((1, 24), (24, 1), (4, 6)):
        found = pyops.grouped_topk(scores, 4, 2, 3, True, 1.0, bias.view(shape), 1)
        assert all(map(torch.equal, found, right))


@pytest.mark.parametrize("device", DEVICES)
def test_grouped_topk_dtypes(device: str) -> None:
    """Scores and biases of any float type; weights are those of float32."""
    for dtype, kind in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float16),
    ):
        logits, bias = logits_of("normal", 5, 64).to(device, dtype), logits_of("normal", 64, seed=1).to(device, kind)
        sizes = 8, 3, 5
        weights, ids = pyops.fused_grouped_topk(torch.zeros(5, 1), logits, 5, True, bias, 8, 3, "sigmoid", 2.0)
        for token, row in enumerate(logits.double().cpu().tolist()):
            right, scores, _ = grouped(row, bias.double().cpu().tolist(), *sizes, 1)
            assert ids[token].tolist() == right
            chosen = [scores[e] for e in right]
            assert weights[token].tolist() == pytest.approx([2 * s / math.fsum(chosen) for s in chosen], rel=2e-6)


def test_routing_functions() -> None:
    """They allocate the tensors that the ops write."""
    hidden, logits, bias = torch.zeros(5, 3), logits_of("normal", 5, 60), logits_of("normal", 60, seed=1)
    for scoring in ("softmax", "sigmoid"):
        weights, ids, indices = pyops.fused_topk(hidden, logits, 4, True, torch.int64, scoring)
        assert (ids.dtype, indices.dtype) == (torch.int64, torch.int32)
        assert_routed(f"topk_{scoring}", logits, None, (weights, ids, indices), True)
    for scoring, name in (
        ("softmax", "topk_softmax"),
        ("sigmoid", "topk_sigmoid"),
        ("sqrtsoftplus", "topk_softplus_sqrt"),
    ):
        weights, ids = pyops.fused_topk_bias(hidden, logits, bias, 4, True, scoring, routed_scaling_factor=2.0)
        assert ids.dtype == torch.int32
        assert_routed(name, logits, bias, (weights, ids, indices), True, 2.0)
    tokens, table = torch.zeros(5, dtype=torch.int32), torch.full((1, 4), 7)
    by_table = pyops.fused_topk_bias(hidden, logits, None, 4, True, "sqrtsoftplus", None, tokens, table)
    assert by_table[1].tolist() == [[7] * 4] * 5
    weights, ids = pyops.fused_grouped_topk(hidden, logits, 4, False, None, 6, 2)
    assert [grouped(row, None, 6, 2, 4, 2)[0] for row in logits.double().tolist()] == ids.tolist()
    for one, same in zip(layers.grouped_topk(hidden, logits, 4, False, 6, 2), (weights, ids), strict=True):
        assert same_bits(one, same)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, h: pyops.topk_softmax(*outputs(5, 61, "cpu"), x), "topk_softmax: topk_weights: expected at most 60"),
        (
            lambda x, h: pyops.topk_softmax(*outputs(4, 6, "cpu"), x),
            "topk_weights: expected shape (num_tokens=5, topk)",
        ),
        (lambda x, h: pyops.topk_sigmoid(*outputs(5, 6, "cpu", torch.int8), x), "topk_ids: expected dtype int32"),
        (
            lambda x, h: pyops.topk_softplus_sqrt(*outputs(5, 6, "cpu"), x, True, 1.0, None, torch.zeros(5).int()),
            "hash_indices_table: expected input_tokens and hash_indices_table, or neither",
        ),
        (lambda x, h: pyops.topk_softmax(*outputs(1, 6, "cpu"), torch.zeros(1, 8193)), "at most 8192 experts"),
        (
            lambda x, h: pyops.topk_sigmoid(*outputs(5, 6, "cpu"), x, False, None, 1.0, torch.zeros(4) > 0),
            "is_padding: expected shape (num_tokens=5,)",
        ),
        (
            lambda x, h: pyops.topk_softmax(*outputs(5, 6, "cpu"), x, False, None, torch.zeros(5)),
            "is_padding: expected dtype bool",
        ),
        (lambda x, h: pyops.grouped_topk(x, 33, 1, 1, True, 1.0, None), "num_expert_group: expected 1 to 32, got 33"),
        (lambda x, h: pyops.grouped_topk(x, 7, 1, 1, True, 1.0, None), "scores: expected experts in 7 groups"),
        (lambda x, h: pyops.grouped_topk(x, 6, 7, 1, True, 1.0, None), "topk_group: expected 1 to 6, got 7"),
        (lambda x, h: pyops.grouped_topk(x, 6, 1, 11, True, 1.0, None), "topk: expected 1 to 10, got 11"),
        (lambda x, h: pyops.grouped_topk(x, 2, 2, 33, True, 1.0, None), "topk: expected 1 to 32, got 33"),
        (lambda x, h: pyops.grouped_topk(x, 6, 2, 2, True, 1.0, None, 3), "scoring_func: expected 0 to 2, got 3"),
        (lambda x, h: pyops.fused_topk(h, x, 61, True), "fused_topk: topk: expected 0 to 60"),
        (
            lambda x, h: pyops.fused_topk(h[:4], x, 6, True),
            "fused_topk: gating_output: expected shape (4, num_experts)",
        ),
        (lambda x, h: pyops.fused_topk(h, x, 6, True, None, "relu"), "scoring_func: expected softmax or sigmoid"),
        (
            lambda x, h: pyops.fused_topk_bias(h, x, None, 6, True, "softmax", None, h, h),
            "hash_indices_table: expected None",
        ),
    ],
)
def test_refused(call: Any, message: str) -> None:
    with pytest.raises(pyops.OpError) as caught:
        call(torch.zeros(5, 60), torch.zeros(5, 1))
    assert message in str(caught.value)


def test_geometry() -> None:
    """Every expert has a thread, no thread has more than it can sort, and vectors stay in their group."""
    make = ArgMaker(devices.model())
    for groups in (1, 2, 3, 8, 31, 32):
        for size in [*range(1, 70), 96, 127, 128, 160, 255, 256]:
            for dtype in ("float32", "bfloat16"):
                for num_tokens in (1, 16384):
                    g = choose_geometry(make.empty(num_tokens, groups * size, dtype=dtype), groups)
                    assert g.thread_experts * g.group_threads >= size
                    assert g.thread_experts % g.vec_size == 0 == size % g.vec_size
                    assert 1 <= g.thread_experts <= 16
                    assert groups * g.group_threads <= g.row_threads <= 512
                    assert g.num_threads % g.row_threads == 0 == g.num_threads % 64
