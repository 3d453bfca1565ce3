"""The effects of torch's default dtype and default device: only the dtype and device with which layers are made."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import pyops
from pyops import nn as layers
from pyops._core.op.op import Op
from pyops.models import Config, Decoder, Engine, SamplingParams
from pyops.nn import factory
from pyops.testing import same_bits
from pyops.testing.calls import clones, written
from tests.support import axes
from tests.support.calls import example

PACKAGE = Path(pyops.__file__).parent
OPS = [pytest.param(op, id=name) for name, op in pyops.registry.items()]
# Functions of torch that make a tensor of the default dtype or on the default device, unless told otherwise.
MAKERS = {
    f"torch.{name}"
    for name in (
        *("tensor", "scalar_tensor", "empty", "empty_strided", "zeros", "ones", "full", "eye"),
        *("arange", "linspace", "logspace", "rand", "randn", "randint", "randperm"),
    )
}


@contextmanager
def defaults(dtype: torch.dtype = torch.float32, device: str | None = None) -> Iterator[None]:
    """A context with these defaults of torch."""
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


DEFAULTS: list[Any] = [
    pytest.param({"dtype": torch.float64}, id="float64"),
    pytest.param({"dtype": torch.bfloat16}, id="bfloat16"),
    pytest.param({"device": "meta"}, id="meta"),
]


def _makers() -> Iterator[tuple[str, set[str | None]]]:
    """(position, keywords) of every call in the package that makes a tensor."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS:
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
                yield place, {keyword.arg for keyword in node.keywords}


def test_every_new_tensor_has_a_named_dtype_and_device() -> None:
    """Layers are made on the default device, like torch.nn's, because vLLM and `with torch.device(...)` expect it."""
    found = list(_makers())
    assert len(found) > 100
    assert [place for place, given in found if "dtype" not in given and None not in given] == []
    unplaced = [place for place, given in found if "device" not in given and None not in given]
    assert [place for place in unplaced if not place.startswith("nn/")] == []


def _results(op: Op, args: list[Any]) -> dict[str, torch.Tensor]:
    args = clones(args)
    op(*args)
    return written(op, args)


@pytest.mark.parametrize("op", OPS)
def test_ops_do_not_depend_on_defaults(op: Op) -> None:
    """The example's arguments and the reference's results have the same bits under any defaults."""
    case = axes.covering(op, 1)[0]
    args = example(op, **case)
    right = _results(op, args)
    for default in DEFAULTS:
        with defaults(**default.values[0]):
            made = _results(op, example(op, **case))
        for name, value in right.items():
            assert same_bits(made[name], value), f"{name} under {default.id}"


def _engine() -> Any:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
    model = Decoder(Config(**sizes, **heads), device="cpu").randomise(seed=0)
    return Engine(model, max_num_seqs=2).generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=6))


@pytest.mark.parametrize("default", DEFAULTS)
def test_the_engine_does_not_depend_on_defaults(default: dict[str, Any]) -> None:
    right = _engine()
    with defaults(**default):
        assert _engine() == right


ROPES: list[Any] = [
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    | {"original_max_position_embeddings": 32},
]


@pytest.mark.parametrize("default", DEFAULTS)
def test_layers_compute_in_their_own_dtypes(default: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """RoPE tables have the requested dtype, and a forward runs on the device of its input."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5)
    for rope in ROPES:
        with torch.device("cpu"):
            right: Any = layers.get_rope(16, 64, rope_parameters=rope, dtype=torch.float32)
        expected = right.forward_native(positions, x.clone(), x.clone())
        with defaults(**default):
            if "dtype" in default:
                monkeypatch.setattr(factory, "_made", {})  # equal arguments return the same layer
                made: Any = layers.get_rope(16, 64, rope_parameters=rope, dtype=torch.float32)
                assert same_bits(made.cos_sin_cache, right.cos_sin_cache)
            turned = right.forward_native(positions, x.clone(), x.clone())
        assert all(same_bits(one, other) for one, other in zip(turned, expected, strict=True))
