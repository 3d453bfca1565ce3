"""Dummy batches after the warm-up of vLLM 0.33, with stand-ins for vLLM's modules, worker and runner."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pyops.integrations.vllm.parts import jit_warmup

MODULE = "vllm.model_executor.warmup.kernel_warmup"


@dataclass
class KernelConfig:
    enable_jit_warmup: bool = True


class Runner:
    """A model runner: the batches that it ran as (sequences, tokens, whether each has one step of decoding)."""

    decode_query_len = 2

    def __init__(self) -> None:
        self.max_num_reqs = 9
        self.ran: list[tuple[int, int, bool]] = []

    def _dummy_run(self, num_tokens: int, *, skip_eplb: bool, uniform_decode: bool = False) -> None:
        seqs = num_tokens // self.decode_query_len if uniform_decode else min(num_tokens, self.max_num_reqs)
        self.ran.append((seqs, num_tokens, uniform_decode))


def worker(is_new: bool = True, **options: Any) -> Any:
    config = SimpleNamespace(
        kernel_config=KernelConfig(**options),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=100, max_num_seqs=9),
        model_config=SimpleNamespace(max_model_len=64),
    )
    return SimpleNamespace(vllm_config=config, use_v2_model_runner=is_new, model_runner=Runner())


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Modules of vLLM; the workers that its own warm-up got."""
    warmed: list[Any] = []
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.config.kernel", MODULE, "vllm.v1.worker.gpu_worker")}
    modules["vllm.config.kernel"].KernelConfig = KernelConfig  # type: ignore[attr-defined]
    modules[MODULE].kernel_warmup = modules["vllm.v1.worker.gpu_worker"].kernel_warmup = (  # type: ignore[attr-defined]
        lambda worker: warmed.append(worker)
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield warmed
    jit_warmup.uninstall()


def warm_up(worker: Any) -> list[tuple[int, int, bool]]:
    """What vLLM's worker does, which has imported the function by name."""
    sys.modules["vllm.v1.worker.gpu_worker"].kernel_warmup(worker)
    ran: list[tuple[int, int, bool]] = worker.model_runner.ran
    return ran


def test_batches_of_many_sizes_run_after_vllms_own_warm_up(vllm: list[Any]) -> None:
    assert jit_warmup.install()
    assert not jit_warmup.install()  # a second call changes nothing
    one = worker()
    ran = warm_up(one)
    assert vllm == [one]
    assert one.model_runner.max_num_reqs == 9
    steps = [tokens for _, tokens, is_decode in ran if is_decode]
    assert (steps[0], steps[-1]) == (18, 2)
    of_many = sorted({tokens for seqs, tokens, is_decode in ran if not is_decode and seqs == min(tokens, 9)})
    assert of_many[-1] == 100
    assert all(b <= max(a + 1, 1.25 * a) for a, b in pairwise(of_many))
    assert {(3, 100, False), (3, 50, False), (3, 49, False)} <= set(ran)  # of equal lengths or not
    for seqs, longest in (1, 64), (3, 100):
        assert max(tokens for some, tokens, is_decode in ran if not is_decode and some == seqs) == longest


def test_without_vllms_warm_up_there_is_none(vllm: list[Any]) -> None:
    jit_warmup.install()
    assert not warm_up(worker(enable_jit_warmup=False))


def test_the_older_runner_has_batches_without_attention(vllm: list[Any]) -> None:
    jit_warmup.install()
    ran = warm_up(worker(is_new=False))
    assert {seqs for seqs, tokens, _ in ran if tokens > 9} == {9}


def test_uninstalled_and_older_versions_are_left_alone(vllm: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    jit_warmup.install()
    jit_warmup.uninstall()
    assert not warm_up(worker())
    monkeypatch.setattr(KernelConfig, "__dataclass_fields__", {})
    assert jit_warmup.install() == ""
    monkeypatch.setitem(sys.modules, "vllm.config.kernel", None)
    assert jit_warmup.install() == ""
