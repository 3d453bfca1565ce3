"""Tensor parallelism: processes of gloo generate the tokens of one."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pyops import ModelError, RankError
from pyops.models import (
    Config,
    Decoder,
    Engine,
    Group,
    Mixture,
    Multipliers,
    Names,
    Norms,
    ParallelDecoder,
    SamplingParams,
    load,
)
from pyops.models.tensor_parallel import divided
from pyops.ops.collective.communicator import lost_record, naming_lost_ranks

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
EXPERTS = Mixture(4, 2, 32, True, (True, True), "w1", "w3", "w2")
CONFIGS = {
    "llama": Config(intermediate_size=96, **SIZES, qkv_bias=True, o_bias=True, mlp_bias=True),
    "qwen3": Config(intermediate_size=96, **SIZES, qk_norm="head", tie_word_embeddings=True),
    "joined projections, norms around, caps": Config(
        intermediate_size=96,
        **SIZES,
        norms=Norms("gemma", place="around"),
        qk_norm="head",
        hidden_act="gelu_pytorch_tanh",
        multipliers=Multipliers(embedding=2.0, residual=0.6, attention_soft_cap=5.0, logits_soft_cap=5.0),
        names=Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",), attention_out_norm="norm_a", mlp_out_norm="norm_b"),
    ),
    "in parallel, without gates, layer norms, biases": Config(
        intermediate_size=96,
        **SIZES,
        norms=Norms("layer", has_bias=True),
        qk_norm="heads",
        parallel_residual=True,
        has_gate=False,
        hidden_act="gelu",
        o_bias=True,
        mlp_bias=True,
        names=Names(o="dense", gate_up=("up",), down="down"),
    ),
    "mixtral": Config(intermediate_size=32, **SIZES, mixture=EXPERTS),
}
PROMPTS = [[1, 2, 3, 4, 5], [7, 11, 13]]


def texts(model: Decoder) -> list[list[int]]:
    return Engine(model, max_num_seqs=2, num_blocks=16).generate(PROMPTS, SamplingParams(max_tokens=12))


def _process(rank: int, world_size: int, store: str, dies: bool, results: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    group = Group()
    if dies:
        group.all_reduce(torch.ones(4))
        if rank == 1:
            os._exit(1)
        started = time.monotonic()
        try:
            group.all_reduce(torch.ones(4))
        except RankError as error:
            results.put((rank, error.ranks, time.monotonic() - started < 60))
        return
    with torch.no_grad():
        loaded = load(Path(store).parent, group=group).tensors()
        made = ParallelDecoder(CONFIGS["llama"], group).randomise(0, 4.0).tensors()
        assert loaded.keys() == made.keys()
        assert all(torch.equal(loaded[name], made[name]) for name in made)
        found = {name: texts(ParallelDecoder(config, group).randomise(0, 4.0)) for name, config in CONFIGS.items()}
    results.put((rank, found))
    torch.distributed.barrier()


def run(world_size: int, store: Path, dies: bool = False) -> list[Any]:
    """What each process of a world has to say, in the order of ranks."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = [(rank, world_size, str(store), dies, results) for rank in range(world_size)]
    processes = [context.Process(target=_process, args=one, daemon=True) for one in arguments]
    for process in processes:
        process.start()
    try:
        return sorted(results.get(timeout=100) for _ in range(world_size - dies))
    finally:
        for process in processes:
            process.join(10)
            process.kill()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.slow
def test_processes_generate_the_tokens_of_one(world_size: int, tmp_path: Path) -> None:
    with torch.no_grad():
        expected = {name: texts(Decoder(config).randomise(0, 4.0)) for name, config in CONFIGS.items()}
        whole = Decoder(CONFIGS["llama"]).randomise(0, 4.0).tensors()
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, tmp_path / "model.safetensors")
    llama = {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(SIZES | llama))
    assert all(len(set(text)) > 3 for name in expected for text in expected[name])
    assert run(world_size, tmp_path / "store") == [(rank, expected) for rank in range(world_size)]


@pytest.mark.slow
def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    assert run(3, tmp_path / "store", dies=True) == [(0, (1,), True), (2, (1,), True)]


def test_a_step_whose_device_fails_names_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that gives up ends with a trap, which whatever call of the device's runtime comes next reports."""
    model, lost = Decoder(CONFIGS["llama"]).randomise(0), lost_record(torch.device("cpu"))

    class Custom:
        def naming(self, what: str) -> Any:
            return naming_lost_ranks(what, lost)

    def fails(*_: Any) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure")

    group = SimpleNamespace(custom=Custom())
    monkeypatch.setattr(model, "group", group, raising=False)
    monkeypatch.setattr(model, "naming_ranks", lambda: ParallelDecoder.naming_ranks(model))
    monkeypatch.setattr(model, "forward", fails)
    with pytest.raises(RuntimeError, match="CUDA error"):
        texts(model)
    lost[1] = torch.tensor([1, 9])
    with pytest.raises(
        RankError, match=r"Engine.step: a kernel has given up waiting for rank 1 \(block 0, meeting 9\)"
    ):
        texts(model)
    group.custom = None
    with pytest.raises(RuntimeError, match="CUDA error"):
        texts(model)


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ModelError, match="num_key_value_heads"):
        divided(CONFIGS["llama"], 8)
    with pytest.raises(ModelError, match="architectures"):
        divided(replace(CONFIGS["llama"], sinks=True), 2)
    with pytest.raises(ModelError, match="architectures"):
        divided(replace(CONFIGS["mixtral"], mixture=replace(EXPERTS, shared_intermediate_size=32)), 2)
    with pytest.raises(ModelError, match="architectures: expected norms of heads in one tensor"):
        divided(replace(CONFIGS["llama"], qk_norm="row"), 2)
    with pytest.raises(ModelError, match="architectures: expected projections not joined head by head"):
        divided(replace(CONFIGS["llama"], qkv_by_head=True), 2)
    with pytest.raises(ModelError, match="num_attention_heads"):
        divided(CONFIGS["qwen3"], 3)
