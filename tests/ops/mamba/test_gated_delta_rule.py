"""The gated delta rule, against transformers' own function, chunked prompts and hostile slots."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

import pyops
from pyops import axes, offline, tuning
from pyops._core import config
from pyops._core.system import device as device_of
from pyops.host.toolchain import toolchains
from pyops.ops.mamba._gated_delta_plan import GatedDeltaConfig
from pyops.ops.mamba._gated_delta_sm90_plan import GatedDeltaSm90Config
from pyops.testing import SCHEDULES, scheduled
from pyops.testing.calls import assert_results, expected, run
from tests.hip.host import on_matrix_core
from tests.support.calls import CUDA, example

pytestmark = pytest.mark.rotates

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(
    params=["cpu", pytest.param("host", marks=pytest.mark.skipif(not toolchains(), reason="no C++ compiler")), CUDA]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of the tensors: "cpu" runs the reference, "host" the kernels on the CPU."""
    with config.cpu("kernels" if request.param == "host" else "reference"):
        yield "cpu" if request.param == "host" else request.param


@cache
def transformers_rule() -> Any:
    """The recurrence of Qwen3-Next in transformers, by torch. Where FLA is installed, the name is its kernel."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    return inspect.unwrap(modeling.torch_recurrent_gated_delta_rule)


def tokens(
    device: str, batch: int, count: int, key_heads: int, value_heads: int, sizes: tuple[int, int], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """q, k, v, g and beta; q, k and v are views of one tensor, as a projection writes them."""
    torch.manual_seed(count + sum(sizes))
    widths = [key_heads * sizes[0], key_heads * sizes[0], value_heads * sizes[1]]
    parts = torch.randn(batch, count, sum(widths), device=device).to(dtype).split(widths, 2)
    heads = (key_heads, key_heads, value_heads)
    found = {
        name: part.unflatten(2, (many, -1)) for name, part, many in zip(("q", "k", "v"), parts, heads, strict=True)
    }
    found["g"] = -torch.rand(batch, count, value_heads, device=device)
    found["beta"] = torch.rand(batch, count, value_heads, device=device).to(dtype)
    return found


def truth(
    call: dict[str, torch.Tensor], initial: torch.Tensor | None, norm: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, final state) of transformers' function in float32.

    It gets a key head for each value head, because only newer versions of transformers repeat them.
    """
    heads = call["v"].shape[2]
    q, k = (call[name].float().repeat_interleave(heads // call[name].shape[2], 2) for name in ("q", "k"))
    o, last = transformers_rule()(
        *(q, k, call["v"].float(), call["g"].float(), call["beta"].float()),
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=norm,
    )
    return o.double(), last.double()


def assert_near(actual: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


SHAPES = [
    (1, 100, 2, 2, (16, 32), torch.bfloat16, False),
    (2, 20, 2, 4, (16, 16), torch.float32, True),
    (1, 70, 1, 2, (128, 128), torch.bfloat16, True),
    (1, 40, 2, 2, (64, 32), torch.float16, True),
    (3, 9, 1, 3, (7, 5), torch.bfloat16, True),
    (1, 33, 1, 1, (256, 24), torch.bfloat16, True),
]


@pytest.mark.parametrize(("batch", "count", "key_heads", "value_heads", "sizes", "dtype", "norm"), SHAPES)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_matches_transformers(
    device: str,
    batch: int,
    count: int,
    key_heads: int,
    value_heads: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    norm: bool,
    state_v_first: bool,
) -> None:
    call = tokens(device, batch, count, key_heads, value_heads, sizes, dtype)
    if not norm:
        call["k"] = call["k"] / 4  # a long key overshoots
    initial = torch.randn(batch, value_heads, *sizes, device=device)
    given = initial.transpose(2, 3).contiguous() if state_v_first else initial
    more = {"use_qk_l2norm_in_kernel": norm, "state_v_first": state_v_first}
    o, last = pyops.chunk_gated_delta_rule(**call, initial_state=given, output_final_state=True, **more)
    wanted, wanted_last = truth(call, initial, norm)
    assert_near(o, wanted, dtype)
    assert_near(last.transpose(2, 3) if state_v_first else last, wanted_last, dtype)
    without, none = pyops.chunk_gated_delta_rule(**call, **more)
    assert none is None
    assert_near(without, truth(call, None, norm)[0], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_of_any_length_and_chunking(device: str, dtype: torch.dtype) -> None:
    """One call on several prompts, and two calls on their parts, give the result of each prompt by itself."""
    lengths, cut = [37, 0, 1, 66], [20, 0, 1, 32]
    call = tokens(device, 1, sum(lengths), 1, 2, (32, 16), dtype)
    parts = {name: value.split(lengths, 1) for name, value in call.items()}
    initial = torch.randn(len(lengths), 2, 32, 16, device=device)

    def together(spans: list[tuple[int, int]], states: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        taken = {
            name: torch.cat([part[:, a:b] for part, (a, b) in zip(several, spans, strict=True)], 1)
            for name, several in parts.items()
        }
        sizes = [b - a for a, b in spans]
        starts = torch.tensor([0, *sizes], device=device).cumsum(0)
        o, last = pyops.chunk_gated_delta_rule(
            **taken, initial_state=states, output_final_state=True, cu_seqlens=starts, use_qk_l2norm_in_kernel=True
        )
        return list(o.split(sizes, 1)), last

    whole, last = together([(0, length) for length in lengths], initial)
    first, middle = together([(0, c) for c in cut], initial)
    second, end = together(list(zip(cut, lengths, strict=True)), middle)
    for seq in range(len(lengths)):
        if lengths[seq]:
            own = {name: several[seq] for name, several in parts.items()}
            wanted, wanted_last = truth(own, initial[seq : seq + 1])
            assert_near(whole[seq], wanted, dtype)
            assert_near(torch.cat((first[seq], second[seq]), 1), wanted, dtype)
            assert_near(last[seq], wanted_last[0], dtype)
            assert_near(end[seq], wanted_last[0], dtype)
        else:
            assert torch.equal(last[seq], initial[seq])


@pytest.mark.parametrize(("dtype", "sizes"), [(torch.float32, (16, 24)), (torch.bfloat16, (20, 128))])
@pytest.mark.parametrize("rows", [32, 64])
def test_token_by_token_equals_prefill(device: str, dtype: torch.dtype, sizes: tuple[int, int], rows: int) -> None:
    """Decoding token by token, with the state in a slot, gives the result of the prompt, by blocks of any rows."""
    call = tokens(device, 3, 12, 2, 4, sizes, dtype)
    slots = torch.tensor([4, 0, 2], device=device)
    state = torch.randn(5, 4, *sizes, device=device)
    wanted, wanted_last = truth(call, state[slots])
    untouched = state[[1, 3]].clone()
    op = pyops.registry["gated_delta_rule_update"]
    op.forget()
    with tuning.forced(op.name, GatedDeltaConfig(4, 1, rows)):
        for i in range(12):
            one = {name: value[:, i : i + 1] for name, value in call.items()}
            o, same = pyops.fused_recurrent_gated_delta_rule(
                **one, initial_state=state, ssm_state_indices=slots, use_qk_l2norm_in_kernel=True
            )
            assert same is state
            assert_near(o, wanted[:, i : i + 1], dtype)
    op.forget()
    assert_near(state[slots], wanted_last, dtype)
    assert torch.equal(state[[1, 3]], untouched)


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "rows", "min_blocks", "spilled"),
    [
        (2, 8, 32, 5, 0),
        (12, 8, 32, 6, 48),  # a second launch finds space next to the first
        (10, 16, 32, 5, 0),  # five blocks of 32 rows on an SM are fewer rows than three of 64
        (33, 2, 64, 3, 0),
        (30, 4, 64, 4, 48),  # a second launch finds space next to the first
        (50, 4, 64, 3, 0),  # a second wave has blocks for four SMs
        (256, 32, 64, 3, 0),
    ],
)
def test_rows_and_residency_of_steps(num_tokens: int, num_heads: int, rows: int, min_blocks: int, spilled: int) -> None:
    """Blocks have 64 rows where these have work for every SM; they spill only where that makes one wave."""
    values = {"num_tokens": num_tokens, "num_heads": num_heads, "head_dim": 128}
    (one,) = axes.launches(pyops.registry["gated_delta_rule_update"], values, device_of.model("sm_90"))
    made = one.specialisation
    assert (made.constants["ROWS"], made.constants["MIN_BLOCKS"]) == (rows, min_blocks)
    report = offline.compile(made.kernel.file, str(made), made.text, "sm_90", made.kernel.options)
    assert report.spill_bytes <= spilled


def test_speculative_decoding(device: str) -> None:
    """Each draft token has its own state, and a step starts from that of the last accepted token."""
    call = tokens(device, 1, 9, 1, 2, (16, 8), torch.float32)
    starts = torch.tensor([0, 3, 3, 5, 9], device=device)
    slots = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [8, -1, 10, 11], [12, 13, 99, 15]], device=device)
    accepted = torch.tensor([2, 1, 1, 4], device=device)
    state = torch.randn(16, 2, 16, 8, device=device)
    before = state.clone()
    o, _ = pyops.fused_recurrent_gated_delta_rule(
        **call,
        initial_state=state,
        cu_seqlens=starts,
        ssm_state_indices=slots,
        num_accepted_tokens=accepted,
        use_qk_l2norm_in_kernel=True,
    )
    held = before.double()
    for seq, (begin, end) in enumerate([(0, 3), (3, 3), (3, 5), (5, 9)]):
        for token in range(begin, end):
            own = {name: value[:, begin : token + 1] for name, value in call.items()}
            wanted, last = truth(own, before[slots[seq, accepted[seq] - 1]][None])
            assert_near(o[:, begin : token + 1], wanted, torch.float32)
            if 0 <= slots[seq, token - begin] < 16:
                held[slots[seq, token - begin]] = last[0]
    assert_near(state, held, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_newest_value_of_a_key_replaces_the_old(device: str, dtype: torch.dtype) -> None:
    """Every token has the same key and beta = 1, so that each value replaces the previous one."""
    call = tokens(device, 1, 70, 1, 1, (128, 32), dtype)
    call["k"] = call["q"] = call["k"][:, :1].expand(1, 70, 1, 128).contiguous()
    call["g"], call["beta"] = torch.zeros_like(call["g"]), torch.ones_like(call["beta"])
    call["v"] = torch.where(call["v"] < 0, -1.0, 1.0).to(dtype)  # changes of 0 and 2, which are exact
    o, _ = pyops.chunk_gated_delta_rule(**call, scale=1.0, use_qk_l2norm_in_kernel=True)
    assert_near(o, call["v"].double(), dtype)


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize(("core", "sizes"), [("MFMA", (64, 32)), ("WMMA_11", (16, 32)), ("WMMA_12", (64, 32))])
def test_on_matrix_cores(core: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's MMA, in tiles of 16 tokens or, for small heads, of 32; the last tile is partial."""
    call = tokens("cpu", 1, 60, 1, 2, sizes, torch.bfloat16)
    initial = torch.randn(1, 2, *sizes)
    wanted = truth(call, initial)
    with on_matrix_core(core, monkeypatch) as lanes, config.cpu("kernels"):
        for schedule in (SCHEDULES[0], SCHEDULES[3]):
            with scheduled(schedule, warp_size=lanes):
                results = pyops.chunk_gated_delta_rule(
                    **call, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True
                )
            for actual, right in zip(results, wanted, strict=True):
                assert_near(actual, right, torch.bfloat16)


@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("geometry", "sizes", "dtype", "schedules"),
    [
        (GatedDeltaSm90Config(64, 5), (64, 64), torch.float16, SCHEDULES),
        (GatedDeltaSm90Config(128, heads=2), (64, 128), torch.bfloat16, SCHEDULES[1:3]),
        (GatedDeltaSm90Config(128, 3), (128, 128), torch.bfloat16, SCHEDULES[3:4]),
    ],
)
def test_on_hopper(geometry: GatedDeltaSm90Config, sizes: tuple[int, int], dtype: torch.dtype, schedules: Any) -> None:
    """Prompts of lengths around a tile of 64 tokens, with a decay of zero, and keys and queries of bfloat16 near its
    maximum; some segments have a tile, others none."""
    lengths = [130, 0, 1, 64]
    call = tokens("cpu", 1, sum(lengths), 1, 2, sizes, dtype)
    call["g"][:, [5, 40, 150]] = -torch.inf
    ones, largest = ({name: x.clone() for name, x in call.items()} for _ in range(2))
    if dtype == torch.bfloat16:  # next to 1024, the epsilon of a norm is negligible
        for name, some in ("k", slice(3, None, 7)), ("q", slice(2, None, 5)):
            signs = call[name][:, some].sign()
            ones[name][:, some], largest[name][:, some] = signs * 1024.0, signs * torch.finfo(dtype).max
    initial = torch.randn(len(lengths), 2, *sizes)
    more = {
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        "initial_state": initial,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    with config.cpu("reference"):
        wanted = pyops.chunk_gated_delta_rule(**{name: x.float() for name, x in ones.items()}, **more)
    op = pyops.registry["gated_delta_rule"]
    with config.cpu("kernels"), tuning.forced("gated_delta_rule", geometry):
        op.forget()
        for schedule in schedules:
            with scheduled(schedule, strict_fences=True):
                results = pyops.chunk_gated_delta_rule(**largest, **more)
            for actual, right in zip(results, wanted, strict=True):
                assert_near(actual, right.double(), dtype)
    op.forget()


@pytest.mark.parametrize(("heads", "segments"), [(4, 2), (64, 1)])
def test_segments_where_heads_leave_sms_idle(heads: int, segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    op, values = pyops.registry["gated_delta_rule"], {"num_tokens": 8192, "num_heads": heads, "head_dim": 128}

    def walks() -> int:
        launches = axes.launches(op, values | {"options": True}, device_of.model("sm_90"))
        return [one.specialisation.kernel.file for one in launches].count("mamba/gated_delta_sm90.cu")

    assert walks() == min(segments, 2)
    monkeypatch.setenv("PYOPS_BATCH_INVARIANT", "1")
    assert walks() == 1


def test_returned_states_without_slots(device: str) -> None:
    call = tokens(device, 2, 5, 1, 2, (16, 8), torch.float32)
    initial = torch.randn(2, 2, 16, 8, device=device)
    o, last = pyops.fused_recurrent_gated_delta_rule(
        **call, initial_state=initial, inplace_final_state=False, use_qk_l2norm_in_kernel=True
    )
    wanted, wanted_last = truth(call, initial)
    assert_near(o, wanted, torch.float32)
    assert_near(last, wanted_last, torch.float32)


HOSTILE = [
    ("gated_delta_rule", "cu_seqlens", 1, -7),
    ("gated_delta_rule", "cu_seqlens", 3, 2**31 - 1),
    ("gated_delta_rule", "cu_seqlens", 0, -(2**31)),
    ("gated_delta_rule", "cu_seqlens", 2, 2**31 - 1),
    ("gated_delta_rule_update", "ssm_state_indices", 1, -1),
    ("gated_delta_rule_update", "ssm_state_indices", 0, 2**31 - 1),
    ("gated_delta_rule_update", "ssm_state_indices", 2, -(2**31)),
    ("gated_delta_rule_update", "num_accepted_tokens", 1, -(2**31)),
    ("gated_delta_rule_update", "num_accepted_tokens", 0, 2**31 - 1),
]


@pytest.mark.parametrize(("name", "argument", "place", "value"), HOSTILE)
@pytest.mark.parametrize("head_dim", [128, 7])
def test_hostile_indices(device: str, name: str, argument: str, place: int, value: int, head_dim: int) -> None:
    """Nothing outside a tensor is touched, and invalid indices are skipped."""
    op = pyops.registry[name]
    args = example(op, device, num_tokens=20, head_dim=head_dim, options=argument != "cu_seqlens")
    index = [p.name for p in op.parameters].index(argument)
    args[index] = args[index].clone()
    args[index].view(-1)[place] = value
    assert_results(op, expected(op, args), run(op, args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [3, 40])
def test_norms_of_keys_and_queries_near_the_float_maximum(device: str, dtype: torch.dtype, count: int) -> None:
    """Their squares overflow, but only the directions count: those of the same rows times a power of two."""
    call = tokens(device, 1, count, 2, 4, (64, 32), dtype)
    for name in ("q", "k"):
        signs = call[name][:, 1::5].sign()
        of_ones = {**call, name: call[name].clone()}
        of_ones[name][:, 1::5] = signs * 1024.0  # next to this, epsilon = 1e-6 is negligible
        of_largest = {**call, name: call[name].clone()}
        of_largest[name][:, 1::5] = signs * torch.finfo(dtype).max
        wanted, _ = truth({key: value.cpu() for key, value in of_ones.items()}, None)
        actual = pyops.gated_delta_rule(**of_largest, scale=64**-0.5, use_qk_l2norm_in_kernel=True)
        assert_near(actual.cpu(), wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_decay_resets_the_state(device: str, dtype: torch.dtype) -> None:
    """The tokens from there on are a sequence of their own; those before it are unaffected."""
    call = tokens(device, 1, 48, 2, 4, (64, 32), dtype)
    begin = 19
    call["g"][:, begin] = -torch.inf
    actual = pyops.gated_delta_rule(**call, scale=64**-0.5, use_qk_l2norm_in_kernel=True).cpu()
    spans = [slice(0, begin), slice(begin, 48)]
    parts = [{name: value.cpu()[:, span].clone() for name, value in call.items()} for span in spans]
    parts[1]["g"][:, 0] = 0.0  # the state is zero
    wanted = torch.cat([truth(part, None)[0] for part in parts], 1)
    assert_near(actual, wanted, dtype)


def test_refused() -> None:
    call = tokens("cpu", 2, 5, 2, 4, (16, 8), torch.float32)
    with pytest.raises(ValueError, match="head_first"):
        pyops.chunk_gated_delta_rule(**call, head_first=True)
    for changes, argument in [
        ({"v": call["v"][:, :, :3]}, "v"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "q"),
        ({"g": call["g"].int()}, "g"),
        ({"initial_state": torch.zeros(1, 4, 16, 8)}, "initial_state"),
        ({"initial_state": torch.zeros(2, 4, 8, 16)}, "initial_state"),
    ]:
        with pytest.raises(pyops.OpError) as caught:
            pyops.chunk_gated_delta_rule(**call | changes)
        assert caught.value.argument == argument
    one = {name: value[:1] for name, value in call.items()}
    with pytest.raises(pyops.OpError, match="cu_seqlens: expected at least one entry, got none"):
        pyops.chunk_gated_delta_rule(**one, cu_seqlens=torch.zeros(0, dtype=torch.int32))
    with pytest.raises(pyops.OpError) as caught:
        pyops.fused_recurrent_gated_delta_rule(
            **call, initial_state=torch.zeros(2, 4, 16, 8), num_accepted_tokens=torch.tensor([1, 1])
        )
    assert caught.value.argument == "num_accepted_tokens"
