"""The scheduler of requests, without a model: blocks and slots have one owner, and all requests end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyops.models import Config, SamplingParams, StateSpace
from pyops.models.scheduler import Request, Scheduler

ATTENTION = Config(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
)
STATES = StateSpace("mamba", 16, state_size=4, conv_kernel=4, time_step_rank=2)
CONFIGS = {
    "attention": ATTENTION,
    "both": replace(ATTENTION, layer_types=("mamba", "attention"), state_space=STATES),
    "states": replace(ATTENTION, layer_types=("mamba", "mamba"), state_space=STATES),
}
BLOCK_SIZE = 4


def request(number: int, prompt: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(params, [0] * prompt, prompt + max_tokens, number)


def check(scheduler: Scheduler, num_blocks: int, num_slots: int) -> None:
    """Every block and slot is free or has one owner; a running request has blocks for its computed tokens."""
    blocks = [block for each in scheduler.running for block in each.blocks]
    assert sorted(blocks + scheduler.free_blocks) == list(range(num_blocks))
    slots = [each.slot for each in scheduler.running]
    assert sorted(slots + scheduler.free_slots) == list(range(num_slots))
    assert all(len(each.blocks) >= scheduler.blocks_for(each.computed) for each in scheduler.running)
    assert all((each.blocks, each.slot, each.computed) == ([], -1, 0) for each in scheduler.waiting)


@pytest.mark.parametrize("kind", CONFIGS)
@given(data=st.data())
def test_blocks_and_slots_have_one_owner(kind: str, data: st.DataObject) -> None:
    """Through chunked prompts, decode steps, preemptions, rollbacks and cancelled requests.

    The oldest request always makes progress, and no request is overtaken by a later one.
    """
    config = CONFIGS[kind]
    num_slots = data.draw(st.integers(1, 4), label="max_num_seqs")
    budget = data.draw(st.integers(1, 12), label="max_num_batched_tokens")
    num_blocks = data.draw(st.integers(6, 12), label="num_blocks")
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6))
    scheduler = Scheduler(config, num_blocks, BLOCK_SIZE, num_slots, budget)
    requests = [request(i, *size) for i, size in enumerate(sizes)]
    scheduler.waiting.extend(requests)
    held: dict[Request, tuple[int, int]] = {}  # the cached part of a request: its slot and its number of tokens
    backs, cancelled = 4, set()
    for _ in range(1000):
        steps = scheduler.next_step()
        check(scheduler, num_blocks, num_slots)
        if not steps:
            break
        assert len({each.number for each, _ in steps}) == len(steps)
        assert sum(count for each, count in steps if not each.is_step) <= budget
        singles = [each.is_step for each, _ in steps]
        assert singles == sorted(singles, reverse=True), "steps come first"
        assert scheduler.running[0] in [each for each, _ in steps], "the oldest waits"
        order = [each.number for each in scheduler]
        assert order == sorted(order), "a request that was preempted is behind one that came later"
        for each, count in steps:
            if each.computed:
                slot, tokens = held[each]
                assert slot == each.slot
                assert tokens == each.computed or (kind == "attention" and tokens > each.computed)
            assert 0 < count <= each.pending
            assert len(each.blocks) >= scheduler.blocks_for(each.computed + count)
            each.computed += count
            held[each] = each.slot, each.computed
            if not each.pending:
                each.tokens.append(0)
                if len(each.tokens) == each.max_seq_len:
                    scheduler.end(each)
        left = [each for each in scheduler if len(each.tokens) > sizes[each.number][0]]
        if left and backs and data.draw(st.booleans(), label="step back"):
            backs -= 1
            chosen = data.draw(st.sampled_from(left), label="request")
            least = sizes[chosen.number][0]
            scheduler.step_back(chosen, data.draw(st.integers(least, len(chosen.tokens)), label="num_tokens"))
            check(scheduler, num_blocks, num_slots)
            assert len(chosen.blocks) <= scheduler.blocks_for(len(chosen.tokens)), "blocks of tokens that are gone"
        others = [each for each in scheduler if len(cancelled) < 2]
        if others and data.draw(st.integers(0, 7), label="cancel") == 7:
            chosen = data.draw(st.sampled_from(others), label="cancelled request")
            scheduler.cancel(chosen)
            cancelled.add(chosen.number)
            assert (chosen.blocks, chosen.slot) == ([], -1)
            check(scheduler, num_blocks, num_slots)
    left = [each for each in requests if each.number not in cancelled]
    assert [len(each.tokens) for each in left] == [sum(sizes[each.number]) for each in left]
    assert not list(scheduler)
    assert kind != "states" or not scheduler.preemptions


def test_step_mixes_prompts_and_decode_tokens() -> None:
    """A computed prompt goes on decoding while the next prompt is chunked."""
    scheduler = Scheduler(CONFIGS["both"], 8, BLOCK_SIZE, 2, 3)
    first, second = request(0, 2, 9), request(1, 7, 2)
    scheduler.waiting.extend([first, second])
    found = []
    for _ in range(4):
        steps = scheduler.next_step()
        found.append([(each.number, count) for each, count in steps])
        for each, count in steps:
            each.computed += count
            if not each.pending:
                each.tokens.append(0)
    assert found == [[(0, 2), (1, 1)], [(0, 1), (1, 3)], [(0, 1), (1, 3)], [(0, 1), (1, 1)]]


def test_request_waits_for_a_slot() -> None:
    """Though there are enough blocks for both."""
    scheduler = Scheduler(CONFIGS["attention"], 8, BLOCK_SIZE, 1, 8)
    first, second = request(0, 2, 1), request(1, 2, 1)
    scheduler.waiting.extend([first, second])
    assert scheduler.next_step() == [(first, 2)]
    assert list(scheduler.waiting) == [second]
    scheduler.end(first)
    assert scheduler.next_step() == [(second, 2)]


def test_preempted_request_stays_before_newcomers() -> None:
    """Two run in 5 blocks and one waits. The second is preempted, and is admitted again before the third."""
    scheduler = Scheduler(CONFIGS["attention"], 5, BLOCK_SIZE, 3, 8)
    requests = [request(0, 4, 10), request(1, 4, 10), request(2, 12, 1)]
    scheduler.waiting.extend(requests)
    admitted: list[int] = []
    for _ in range(40):
        before = set(scheduler.running)
        steps = scheduler.next_step()
        admitted += [each.number for each in scheduler.running if each not in before]
        assert [each.number for each in scheduler] == sorted(each.number for each in scheduler)
        for each, count in steps:
            each.computed += count
            if not each.pending:
                each.tokens.append(0)
                if len(each.tokens) == each.max_seq_len:
                    scheduler.end(each)
    assert scheduler.preemptions == 1
    assert admitted == [0, 1, 1, 2]
