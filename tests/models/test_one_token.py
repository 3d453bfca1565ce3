"""Decode steps of one token as a GPU takes them: projections normalise their input and add to the residual."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops._core.system import device
from pyops.models import (
    Config,
    Decoder,
    Engine,
    SamplingParams,
    attention,
    decoder,
    experts,
    linear,
    load,
    one_token,
    serving_kernels,
)
from pyops.models.batch import Batch
from pyops.ops.linear import gemm_rates
from tests.support.small_models import PROMPTS, folders, texts

COUNT = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return folders(tmp_path_factory)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Decoders take the CPU for a GPU; references of ops compute the steps. The list gets an entry for each of them."""
    for module in (attention, decoder, experts, linear, one_token):
        monkeypatch.setattr(module, "gpu_of", lambda x: device.model())
    found: list[int] = []
    inner = one_token.residual

    def counted(*args: Any) -> Any:
        found.append(1)
        return inner(*args)

    monkeypatch.setattr(one_token, "residual", counted)
    return found


@pytest.mark.parametrize(
    "case",
    ["llama", "qwen2, tied", "qwen3 moe in every second layer", "deepseek v2 with entries of the op", "deepseek v3"],
)
def test_the_same_tokens(case: str, folder: Callable[[str], Path], steps: list[int]) -> None:
    """As transformers', for each prompt alone; prompts of several tokens take the other path."""
    model, params = load(folder(case)), SamplingParams(max_tokens=COUNT)
    found = [Engine(model, max_num_seqs=1).generate([prompt], params)[0] for prompt in PROMPTS]
    assert found == texts(case, COUNT)
    assert len(steps) >= (COUNT - 1) * len(PROMPTS)


def test_one_kernel_up_to_the_cache(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, values and the result are those of the kernels that it replaces, which round queries and keys twice."""
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    sizes |= {"max_position_embeddings": 32, "architectures": ["Qwen2ForCausalLM"]}
    model = Decoder(Config.parse(sizes), "bfloat16", "cpu")
    model.randomise(0).prepare()
    numbers = (torch.tensor(one) for one in ([3], [20], [20], [[0, 1]], [21], [0, 1], [-1]))
    batch, empty, results = Batch(*numbers, None, 1), model.new_cache(2, 16, 1), []
    for kept in empty:
        for tensor in kept:
            tensor.normal_(generator=torch.Generator().manual_seed(1))
    for replaced in ("fused_qk_rope_cache", "skinny_qkv_rope_cache"):
        cache = [tuple(tensor.clone() for tensor in kept) for kept in empty]
        with monkeypatch.context() as changed, torch.no_grad():
            changed.setattr(attention, replaced, None)
            if replaced == "skinny_qkv_rope_cache":
                changed.setattr(attention.Attention, "_is_projected_at_once", lambda *_: False)
            results.append((model.forward(batch, cache, model.new_tables(32)), *chain(*cache)))
    assert len(steps) == 2
    for at_once, one_by_one, before in zip(*results, (None, *chain(*empty)), strict=True):
        torch.testing.assert_close(at_once, one_by_one, rtol=2.0**-5, atol=2.0**-5)
        assert before is None or (at_once != before).flatten(0, 1).any(-1).any(-1).nonzero().tolist() == [[20]]


@pytest.mark.parametrize("case", ["llama", "qwen3 moe in every second layer", "deepseek v3"])
@pytest.mark.usefixtures("steps")
def test_weights_that_are_prefetched(case: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first columns of what follows: a dense MLP's or a shared expert's first weight, else the projection's own."""
    monkeypatch.setattr(one_token, "_AHEAD_US", (64 * 8 * 4 + 2) / gemm_rates.of(device.model()).bytes_per_us)
    for layer in load(folder(case)).layers:
        mixer, mlp = layer.mixer, getattr(layer.mlp, "shared", layer.mlp)
        is_latent = hasattr(mixer, "prefetched")
        found = mixer.prefetched if is_latent else mixer.o.prefetched
        weight = mixer.o.weight if mlp is None else mlp.gate_up.weight
        assert found.data_ptr() == weight.data_ptr()
        assert found.shape == (len(weight), 64 if is_latent else 64 * 8 // len(weight))
        assert found.stride() == weight.stride()
        assert not is_latent or mixer.o.prefetched is None


def test_biases_of_outputs(folder: Callable[[str], Path], steps: list[int]) -> None:
    """A projection adds one vector, so these decoders take the other path."""
    case, params = "deepseek v2, no rank of queries, the best experts, biases", SamplingParams(max_tokens=COUNT)
    assert Engine(load(folder(case)), max_num_seqs=1).generate(PROMPTS[:1], params) == texts(case, COUNT)[:1]
    assert not steps


def test_rows_that_no_kernel_normalises() -> None:
    """A projection has its normalised token in shared memory; longer ones have norms of their own."""
    sizes = {"vocab_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    limits = {"max_num_seqs": 1, "max_model_len": 16, "max_num_batched_tokens": 16}
    for hidden_size, has_norms in ((8192, False), (8200, True)):
        config = Config(
            **sizes, num_key_value_heads=1, head_dim=64, hidden_size=hidden_size, max_position_embeddings=16
        )
        found = serving_kernels(config, device.model(), dtype="float32", **limits)
        assert any(one.constants["NORMALISED"] for op, one in found if op.name == "skinny_linear") != has_norms


def test_batch_invariance(folder: Callable[[str], Path], steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPS_BATCH_INVARIANT", "1")
    assert Engine(load(folder("llama")), max_num_seqs=1).generate(PROMPTS[1:2], SamplingParams(max_tokens=3))
    assert not steps
