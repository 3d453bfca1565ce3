"""Attention over caches of infinities, NaN and the largest numbers, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyops
from pyops import tuning
from pyops._core import config
from pyops._core.system import device as devices
from pyops.ops.attention.prefill_mma import PrefillMmaConfig
from pyops.ops.attention.prefill_sm90 import PrefillSm90Config
from pyops.testing import same_bits
from tests.ops.attention.test_attention import paged_call
from tests.ops.attention.test_mla import _call as mla_call
from tests.support.calls import DEVICES, Host

INF, NAN = float("inf"), float("nan")
BF16 = torch.bfloat16
LATENT = 512
# The largest numbers. A mean in float32 comes from float32 sums, which may round the largest float to infinity.
LARGEST = {
    torch.float32: torch.finfo(torch.float32).max * (1 - 2.0**-16),
    torch.float16: torch.finfo(torch.float16).max,
    BF16: torch.finfo(BF16).max,
}
OPS = ["paged_attention_v1", "paged_attention_v2", "paged_attention_rocm", "paged_attention_varlen"]
# Kernels that plans choose for more rows per sequence than these tests have.
FORCED = {
    "paged_attention_varlen by wgmma": PrefillSm90Config(tokens=64, consumers=2),
    "paged_attention_v1 by wgmma": PrefillSm90Config(tokens=64, consumers=1, max_splits=2),
    "paged_attention_v1 by mma": PrefillMmaConfig(4, 1, 32, 2, max_splits=2),
}
NAMES = [*OPS, *FORCED]


@pytest.fixture(params=DEVICES)
def on(request: pytest.FixtureRequest) -> Any:
    """Each device by name; the host runs the kernels."""
    with config.cpu("kernels" if isinstance(request.param, Host) else "reference"):
        yield str(request.param)


def _skip_what_is_not_served(name: str, dtype: torch.dtype, packed: bool = False) -> None:
    if name.endswith(("rocm", "mma")) and dtype == torch.float32:
        pytest.skip("takes queries of 16 bits")
    if name.endswith("wgmma") and packed:
        pytest.skip("takes caches that are not packed")


def _attend(name: str, call: dict[str, Any], **options: Any) -> torch.Tensor:
    """The result of an op for the arguments of `paged_call`: one query of each sequence."""
    if name in FORCED:
        on, mma = devices.get(0) if call["query"].is_cuda else devices.host(), "mma"
        if call["query"].dtype == torch.bfloat16:
            mma = "bfloat16_products"
        if not on.supports("wgmma" if name.endswith("wgmma") else mma):
            pytest.skip(f"{on.arch} lacks the instruction")
        op = pyops.registry[name.split()[0]]
        op.forget()
        with tuning.forced(op.name, FORCED[name]):
            out = _attend(op.name, call, **options)
        op.forget()
        return out
    call = {key: value for key, value in call.items() if key != "plain"} | options
    num_seqs, num_heads, head_size = call["out"].shape
    out = call["out"] = torch.full_like(call["query"], NAN)
    if name == "paged_attention_varlen":
        call["cu_seqlens_q"] = torch.arange(num_seqs + 1, dtype=torch.int32, device=out.device)
        call = {key: value for key, value in call.items() if key != "max_seq_len"}
    elif name != "paged_attention_v1":
        size = 512 if name.endswith("v2") else 256
        shape = (num_seqs, num_heads, -(-call["max_seq_len"] // size))
        for sums in ("exp_sums", "max_logits"):
            call[sums] = torch.empty(shape, device=out.device)
        call["tmp_out"] = torch.empty(*shape, head_size, dtype=out.dtype, device=out.device)
        if name.endswith("rocm"):
            call["query_start_loc"] = None
    pyops.registry[name].wrapper(**call)
    return out


def _signs(length: int) -> torch.Tensor:
    """[length, 3]: values of one sign, of alternating signs, and three quarters against the last quarter."""
    tokens = torch.arange(length)
    signs = torch.stack((torch.ones(length), 1 - 2.0 * (tokens % 2), 1 - 2.0 * (tokens >= length * 3 // 4)), 1)
    return signs.repeat(1, 64)


def _assert_mean(out: torch.Tensor, right: torch.Tensor) -> None:
    """`out` is `right` up to the rounding of probabilities, times the largest number."""
    largest = LARGEST[out.dtype]
    unit = max(torch.finfo(out.dtype).eps, 2.0**-18)
    assert ((out.double().cpu() - right).abs() <= 2 * unit * largest).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("name", NAMES)
def test_means_of_the_largest_values(on: str, name: str, dtype: torch.dtype, packed: bool) -> None:
    """No accumulator overflows, in one step, several splits or partitions, with equal probabilities or different
    ones."""
    _skip_what_is_not_served(name, dtype, packed)
    lengths = [1, 16, 70, 600]
    call = paged_call(lengths, (2, 1), 48, dtype=dtype, packed=packed, on=on)
    call["query"][:, 0] = 0.0
    values = call["value_cache"]
    flat = values if packed else values.permute(0, 2, 3, 1)  # [num_blocks, heads, head_size, block_size]
    tables = call["block_tables"].long()
    right = torch.empty(4, 2, 48, dtype=torch.float64)
    for s, length in enumerate(lengths):
        largest = _signs(length)[:, :48] * LARGEST[dtype]
        for token in range(length):
            flat[tables[s, token // 16], 0, :, token % 16] = largest[token].to(dtype).to(on)
        logits = call["query"][s].double().cpu() @ call["plain"][s][0][:, 0].double().T * call["scale"]
        right[s] = torch.softmax(logits, -1) @ largest.to(dtype).double()
    _assert_mean(_attend(name, call), right)
    sinks = torch.tensor([0.0, 1.0], device=on)
    sums = torch.stack(
        [
            torch.exp(call["query"][s].double().cpu() @ call["plain"][s][0][:, 0].double().T * call["scale"]).sum(-1)
            for s in range(4)
        ]
    )
    share = sums / (sums + sinks.double().cpu().exp())
    lse = torch.empty(2, 4, device=on)
    _assert_mean(_attend(name, call, sinks=sinks, lse=lse), right * share[..., None])
    torch.testing.assert_close(lse.double().cpu().exp(), (sums / share).T, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_means_of_the_largest_latents(on: str, dtype: torch.dtype) -> None:
    """In one split and in several; queries are zeros, because a latent is a key, too."""
    lengths = [1, 40, 500]
    call = mla_call(lengths, 3, dtype=dtype, device=on)
    cache, tables = call["kv_c_and_k_pe_cache"], call["page_table"].long()
    for queries in (call["q_nope"], call["q_pe"]):
        queries.zero_()
    right = torch.empty(3, 3, LATENT, dtype=torch.float64)
    for s, length in enumerate(lengths):
        largest = (_signs(length).repeat(1, 3)[:, :LATENT] * LARGEST[dtype]).to(dtype)
        for token in range(length):
            cache[tables[s, token // 16], token % 16, :LATENT] = largest[token].to(on)
        right[s] = largest.double().mean(0)
    call.pop("plain")
    for splits in (1, 4):
        pyops.sm100_cutlass_mla_decode(**call | {"num_kv_splits": splits})
        _assert_mean(call["out"], right)


@pytest.mark.parametrize("poison", [INF, -INF, "largest"])
@pytest.mark.parametrize("packed", [False, True], ids=["flash", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", NAMES)
def test_unattended_slots_are_ignored(on: str, name: str, dtype: torch.dtype, packed: bool, poison: Any) -> None:
    """Slots without a token, tokens before the window in its first block, and blocks that do not exist."""
    _skip_what_is_not_served(name, dtype, packed)
    lengths, window = [5, 90, 37], 20
    results = []
    for value in (0.0, LARGEST[dtype] if poison == "largest" else poison):
        call = paged_call(lengths, dtype=dtype, packed=packed, on=on)
        for cache in (call["key_cache"], call["value_cache"]):
            cache[cache.isnan()] = value
            slots = cache.transpose(1, 3) if packed else cache
            for s, length in enumerate(lengths):
                for token in range(max(0, length - window)):
                    slots[call["block_tables"][s, token // 16].long(), token % 16] = value
        call["block_tables"][2, 1:2] = 1000  # the window keeps five tokens of its last block
        results.append(_attend(name, call, sliding_window=window))
    assert same_bits(*results)
    assert results[0].isfinite().all()


@pytest.mark.parametrize("poison", [INF, NAN])
def test_pages_that_a_head_skips_are_ignored(on: str, poison: float) -> None:
    """In block-sparse attention."""
    sparse = {"blocksparse_local_blocks": 1, "blocksparse_vert_stride": 100, "blocksparse_block_size": 16}
    results = []
    for value in (0.0, poison):
        call = paged_call([70], on=on)
        for cache in (call["key_cache"], call["value_cache"]):
            cache[call["block_tables"][0, :4].long()] = value
        results.append(_attend("paged_attention_v1", call, **sparse))
    assert same_bits(*results)
    assert results[0].isfinite().all()


@pytest.mark.parametrize("window", [0, 15])
@pytest.mark.parametrize("poison", [INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", NAMES)
def test_attended_infinity(on: str, name: str, dtype: torch.dtype, poison: float, window: int) -> None:
    """It makes its own dimension infinite or NaN, in the heads that share its key-value head; all else is unchanged."""
    _skip_what_is_not_served(name, dtype)
    call = paged_call([30, 20], dtype=dtype, on=on)
    before = _attend(name, call, sliding_window=window)
    call["value_cache"][call["block_tables"][0, 1].long(), 3, 1, 7] = poison
    after = _attend(name, call, sliding_window=window)
    assert (~after[0, 2:, 7].isfinite()).all()
    if on == "cpu" and not config.kernels_on_cpu():
        torch.testing.assert_close(after[0, 2:, 7], after.new_full((2,), poison), equal_nan=True)
    after[0, 2:, 7] = before[0, 2:, 7]
    assert same_bits(before, after)


@pytest.mark.parametrize("poison", [INF, NAN])
@pytest.mark.parametrize("causal", [True, False])
def test_tokens_before_every_window_are_ignored(on: str, causal: bool, poison: float) -> None:
    """Tokens before the windows of all queries of a sequence."""
    results = []
    for value in (0.0, poison):
        call = paged_call([60, 50], dtype=BF16, on=on)
        for cache in (call["key_cache"], call["value_cache"]):
            cache[cache.isnan()] = value
            for token in range(60 - 8 + 1 - 10):
                cache[call["block_tables"][0, token // 16].long(), token % 16] = value
        query = torch.linspace(-1, 1, 9 * 4 * 64).reshape(9, 4, 64).to(BF16).to(on)
        call |= {"query": query, "out": torch.full_like(query, NAN), "sliding_window": 10, "causal": causal}
        call["cu_seqlens_q"] = torch.tensor([0, 8, 9], dtype=torch.int32, device=on)
        for one in ("plain", "max_seq_len", "alibi_slopes"):
            call.pop(one)
        pyops.paged_attention_varlen(**call)
        results.append(call["out"])
    assert same_bits(*results)
    assert results[0].isfinite().all()


@pytest.mark.parametrize("length", [2, 130])
@pytest.mark.parametrize("name", [*NAMES, "sm100_cutlass_mla_decode", "sm100_cutlass_mla_decode by wgmma"])
def test_logits_with_one_hot_softmax(on: str, name: str, length: int) -> None:
    """Logits of 2^20 to 2^60: the gap between two floats is beyond the range of probabilities."""
    sizes = torch.cat([2.0**exponent * torch.tensor([1.0, 1.1015625, 1.5, 1.796875]) for exponent in range(20, 61, 5)])
    if name in NAMES:
        call = paged_call([length] * len(sizes), (1, 1), 16, dtype=BF16, on=on)
        keys, values, queries = call["key_cache"], call["value_cache"], call["query"]
    else:
        sizes = sizes[::5] if name.endswith("wgmma") else sizes
        num_heads, page_size = (8, 64) if name.endswith("wgmma") else (1, 16)
        call = mla_call([length] * len(sizes), num_heads, page_size, device=on)
        keys = values = call["kv_c_and_k_pe_cache"]
        queries = call["q_nope"]
        call["q_pe"].zero_()
    for cache in (keys, values):
        cache.fill_(1.0)
    queries.zero_()
    for sign in (1, -1):
        queries[..., 0] = sign * sizes.to(BF16).to(on)[:, None]
        values[..., 5] = 3.0
        if name in NAMES:
            lse = torch.empty(1, len(sizes), device=on)
            out = _attend(name, call, scale=1.0, lse=lse)
        else:
            call.pop("plain", None)
            out, lse = call["out"], call["lse"]
            pyops.sm100_cutlass_mla_decode(**call | {"scale": 1.0})
        right = torch.ones_like(out)
        right[..., 5] = 3.0
        torch.testing.assert_close(out, right, rtol=2 * torch.finfo(BF16).eps, atol=0)
        log_sum = sign * sizes.double() + torch.tensor(length).log()
        by_head = lse.T if name in NAMES else lse
        torch.testing.assert_close(by_head[:, -1].cpu().double(), log_sum, rtol=1e-6, atol=1e-2)
