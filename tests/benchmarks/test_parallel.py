"""The benchmark of tensor-parallel models, without GPUs."""

from __future__ import annotations

import pytest
import torch

from benchmarks.parallel import MODELS, fill, main, small, step_floor_us
from pyops.models import Config, Decoder
from pyops.models.tensor_parallel import divided


@pytest.mark.parametrize(("name", "weights"), [("llama", 8.03e9), ("mixtral", 46.7e9), ("deepseek", 15.7e9)])
def test_sizes_are_those_of_published_models(name: str, weights: float) -> None:
    model = Decoder(Config.parse(MODELS[name]), "bfloat16", "meta")
    assert sum(tensor.numel() for tensor in model.tensors().values()) == pytest.approx(weights, rel=5e-3)
    for world_size in (2, 4, 8):
        divided(Config.parse(MODELS[name]), world_size)
        divided(small(MODELS[name]), world_size)


def test_weights_depend_on_names_alone() -> None:
    one, other = (fill(Decoder(small(MODELS["deepseek"]), "float32")).tensors() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert len({float(tensor.flatten()[0]) for tensor in one.values()}) == len(one)


def test_floor_excludes_the_embedding_and_the_cache() -> None:
    config = small(MODELS["llama"])
    model = Decoder(config, "bfloat16")
    weights = sum(tensor.numel() for tensor in model.tensors().values()) - config.vocab_size * config.hidden_size
    cached = 3 * 100 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert step_floor_us(model, 3, 100, 1000.0) == pytest.approx((weights + cached) * 2 / 1e6)


def test_missing_processes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun"):
        main([])
