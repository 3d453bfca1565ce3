"""Tensor parallelism: gloo processes generate the tokens of one process."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import attrgetter
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
    Latent,
    Mixture,
    Multipliers,
    Names,
    Norms,
    PackedQuantization,
    ParallelDecoder,
    Quantization,
    SamplingParams,
    load,
)
from pyops.models.mixture import STACKED
from pyops.models.quantization import GgufTypes
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


def _texts_of_configs(group: Any) -> dict[str, list[list[int]]]:
    return {name: texts(ParallelDecoder(config, group).randomise(0, 4.0)) for name, config in CONFIGS.items()}


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
        found = _texts_of_configs(group)
    results.put((rank, found))
    torch.distributed.barrier()


def run(world_size: int, store: Path, dies: bool = False) -> list[Any]:
    """The answers of all ranks, in order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # the imports take longer than the work of the processes
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


@pytest.mark.slow
def test_processes_generate_the_tokens_of_one(tmp_path: Path) -> None:
    with torch.no_grad():
        expected = {name: texts(Decoder(config).randomise(0, 4.0)) for name, config in CONFIGS.items()}
        whole = Decoder(CONFIGS["llama"]).randomise(0, 4.0).tensors()
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, tmp_path / "model.safetensors")
    llama = {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(SIZES | llama))
    assert all(len(set(text)) > 3 for name in expected for text in expected[name])
    assert run(2, tmp_path / "store") == [(rank, expected) for rank in range(2)]
    assert in_threads(4, _texts_of_configs) == [expected] * 4


@pytest.mark.slow
def test_process_that_dies_is_named(tmp_path: Path) -> None:
    assert run(3, tmp_path / "store", dies=True) == [(0, (1,), True), (2, (1,), True)]


def test_step_on_a_failed_device_names_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that gives up ends with a trap, which the next call to the device's runtime reports."""
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


# Threads as ranks: the collective code of one process, without processes


class Threads:
    """A group with threads as ranks, which add their tensors."""

    custom = None
    device = torch.device("cpu")

    def __init__(self, rank: int, parts: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size, self._parts, self._barrier = rank, len(parts), parts, barrier

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._parts[self.rank] = x.clone()
        self._barrier.wait(60)
        total = sum(part.float() for part in self._parts).to(x.dtype)
        self._barrier.wait(60)
        return total

    def least(self, value: int) -> int:
        return value


def in_threads(world_size: int, run: Callable[[Any], Any]) -> list[Any]:
    """The result of `run` for each rank's group."""
    parts, barrier = [None] * world_size, threading.Barrier(world_size)
    groups = [Threads(rank, parts, barrier) for rank in range(world_size)]

    def run_without_gradients(group: Any) -> Any:
        with torch.no_grad():
            return run(group)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run_without_gradients, groups))


LATENT = Latent(32, 16, 8, 16, q_lora_rank=24)
IN_THREADS = {
    "norms of all heads": Config(intermediate_size=96, **SIZES, qk_norm="row", norms=Norms("rms_once")),
    "head by head, layer norms, without gates": Config(
        intermediate_size=96,
        **SIZES | {"num_key_value_heads": 8},
        qkv_by_head=True,
        qkv_bias=True,
        has_gate=False,
        hidden_act="gelu",
        norms=Norms("layer", has_bias=True),
        parallel_residual=True,
        names=Names(qkv=("qkv",), gate_up=("up",)),
    ),
    "a norm for each head": Config(
        intermediate_size=96,
        **SIZES,
        norms=Norms("layer", has_bias=True),
        qk_norm="heads",
        names=Names(q_norm="q_norms.{}", k_norm="k_norms.{}"),
    ),
    "latent attention, shared experts": Config(
        intermediate_size=96,
        **SIZES | {"num_key_value_heads": 8, "head_dim": 8},
        latent=LATENT,
        mixture=replace(EXPERTS, shared_intermediate_size=64, has_correction_bias=True, layers=(False, True)),
    ),
    "experts in two tensors": Config(intermediate_size=32, **SIZES, mixture=replace(EXPERTS, joined=STACKED)),
    "sinks, stacked experts with biases": Config(
        intermediate_size=32,
        **SIZES,
        sinks=True,
        qkv_bias=True,
        o_bias=True,
        sliding_windows=(5, 0),
        mixture=replace(EXPERTS, is_stacked=True, has_bias=True, activation="swigluoai", router="router"),
    ),
}


def checkpoint(config: Config) -> dict[str, torch.Tensor]:
    """Random tensors of a config, norms near 1."""
    random = torch.Generator().manual_seed(1)
    found = {}
    for name, tensor in Decoder(config, device="meta").tensors().items():
        is_norm = "norm" in name and name.endswith("weight")
        scale = 0.2 if tensor.ndim == 1 else 4.0 * tensor.shape[-1] ** -0.5
        found[name] = float(is_norm) + scale * torch.randn(tensor.shape, generator=random)
    return found


def written(model: Decoder, tensors: dict[str, torch.Tensor]) -> Decoder:
    for name, tensor in tensors.items():
        model.write(name, tensor)
    model.prepare()
    return model


@pytest.mark.parametrize("name", IN_THREADS)
def test_threads_generate_the_tokens_of_one(name: str) -> None:
    config = IN_THREADS[name]
    tensors = checkpoint(config)
    with torch.no_grad():
        expected = texts(written(Decoder(config), tensors))
    assert len({token for text in expected for token in text}) > 5
    found = in_threads(2, lambda group: texts(written(ParallelDecoder(config, group), tensors)))
    assert found == [expected] * 2
    with torch.no_grad():
        made = Decoder(config).randomise(0)
    for part in in_threads(2, lambda group: ParallelDecoder(config, group).randomise(0)):
        assert part.tensors().keys() <= made.tensors().keys()
    assert part.tensors()["model.norm.weight"].equal(made.tensors()["model.norm.weight"])


PROJECTIONS = [*(f"self_attn.{one}" for one in "qkvo"), *(f"mlp.{one}" for one in ("gate", "up", "down"))]
QUANTISED: dict[str, Any] = {
    "fp8 in blocks": Quantization("float8_e4m3fn", "block", "group"),
    "fp8 with one scale": Quantization("float8_e4m3fn", "tensor", "static"),
    "int8 by channels": Quantization("int8", "channel", "token"),
    "awq": PackedQuantization("awq", 4, 32),
    "gptq": PackedQuantization("gptq", 4, 32, lists_groups=True, is_v2=False),
    "gptq, one group": PackedQuantization("gptq", 8, -1, lists_groups=True),
    "pack-quantized": PackedQuantization("pack-quantized", 4, 64, has_zeros=False),
    "GGUF's Q8_0": GgufTypes(tuple((f"model.layers.0.{name}_proj", 8) for name in PROJECTIONS)),
}


def codes_of(config: Config) -> dict[str, torch.Tensor]:
    """A checkpoint of random quants, packed zero points and scales."""
    random, tensors = torch.Generator().manual_seed(1), dict[str, torch.Tensor]()
    for key, tensor in Decoder(config, device="meta").tensors().items():
        if key.endswith("g_idx"):
            group = config.quantization.columns_of_group(len(tensor))
            tensors[key] = torch.arange(len(tensor), dtype=torch.int32) // group
        elif tensor.dtype == torch.int32:
            bounds = torch.iinfo(torch.int32)
            tensors[key] = torch.randint(bounds.min, bounds.max, tensor.shape, generator=random, dtype=torch.int32)
        elif tensor.itemsize == 1:
            codes = torch.randint(-100, 101, tensor.shape, generator=random)
            tensors[key] = (codes.abs() if tensor.dtype == torch.uint8 else codes).to(tensor.dtype)  # finite scales
        else:
            tensors[key] = torch.rand(tensor.shape, generator=random).to(torch.bfloat16)
    return tensors


def weights_of(projections: Any, quantization: Any) -> tuple[torch.Tensor, ...]:
    """The weights of projections of one input."""
    if isinstance(quantization, GgufTypes):
        columns = projections.matrices[0].columns
        weights = projections(torch.eye(columns, dtype=torch.bfloat16)).T
    else:
        weights = projections.dequantised()
    return weights.split(list(projections.sizes.values()))


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_weights_are_sharded(name: str) -> None:
    """Each shard of a projection has the weights of the whole, bit for bit."""
    sizes = SIZES | {"hidden_size": 128, "num_hidden_layers": 1, "head_dim": 64}
    config = Config(intermediate_size=512, **sizes, quantization=QUANTISED[name], dtype="bfloat16")
    tensors = codes_of(config)
    whole = written(Decoder(config), tensors).layers[0]
    parts = in_threads(2, lambda group: written(ParallelDecoder(config, group), tensors).layers[0])
    for path in ("mixer.qkv", "mixer.o", "mlp.gate_up", "mlp.down"):
        one, *those = (attrgetter(path)(layer) for layer in (whole, *parts))
        expected, *found = (weights_of(each, QUANTISED[name]) for each in (one, *those))
        dim = 1 if path in ("mixer.o", "mlp.down") else 0
        for i, weight in enumerate(expected):
            assert torch.equal(torch.cat([part[i] for part in found], dim), weight)


def test_packed_experts_are_sharded() -> None:
    """The shards' results of a layer add up to the whole's, up to the roundings of each."""
    sizes = SIZES | {"hidden_size": 128, "num_hidden_layers": 1, "head_dim": 64}
    mixture = Mixture(4, 2, 128, True, (True,), "w1", "w3", "w2")
    config = Config(intermediate_size=128, **sizes, mixture=mixture, quantization=QUANTISED["awq"], dtype="bfloat16")
    tensors = codes_of(config)
    hidden = torch.randn(5, 128, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    with torch.no_grad():
        expected = written(Decoder(config), tensors).layers[0].mlp(hidden).double()
    parts = in_threads(2, lambda group: written(ParallelDecoder(config, group), tensors).layers[0].mlp(hidden))
    found = sum(part.double() for part in parts)
    # Each is a sum of two experts' results, which are rounded, too; 2^-9 is half an ulp of bfloat16.
    magnitudes = expected.abs() + sum(part.double().abs() for part in parts)
    assert ((found - expected).abs() <= 4 * 2.0**-9 * (magnitudes + magnitudes.amax(-1, keepdim=True))).all()
    assert (found - parts[0].double()).abs().max() > 0.1 * magnitudes.max()


def test_indivisible_models_are_refused() -> None:
    with pytest.raises(ModelError, match="num_key_value_heads"):
        divided(CONFIGS["llama"], 8)
    with pytest.raises(ModelError, match="num_attention_heads"):
        divided(CONFIGS["qwen3"], 3)
    with pytest.raises(
        ModelError, match="experts' shared_intermediate_size: expected a multiple of 2 processes, got 33"
    ):
        divided(replace(CONFIGS["mixtral"], mixture=replace(EXPERTS, shared_intermediate_size=33)), 2)
    packed = PackedQuantization("gptq", 4, 32, lists_groups=True, has_order=True)
    with pytest.raises(ModelError, match="quantization_config: expected groups of neighbours with tensor parallelism"):
        divided(replace(CONFIGS["llama"], quantization=packed), 2)
    joined = replace(CONFIGS["llama"], names=Names(qkv=("qkv",)), quantization=QUANTISED["awq"])
    with pytest.raises(ModelError, match="quantization_config: expected None where projections are joined"):
        divided(joined, 2)
    blocks = replace(CONFIGS["llama"], intermediate_size=192, quantization=QUANTISED["fp8 in blocks"], dtype="bfloat16")
    with pytest.raises(ModelError, match=r"gate_proj.weight_scale: expected whole blocks for each of 2 processes"):
        in_threads(2, lambda group: ParallelDecoder(blocks, group, device="meta"))
