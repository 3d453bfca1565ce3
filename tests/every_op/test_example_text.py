"""The program that an op's example is printed as: it runs, and calls the op with what the example declares."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

import pyops
from pyops._core.op.declaration import Parameter
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops._core.tensors.tensor import TensorArg
from pyops.example import ArgMaker
from pyops.testing import same_bits
from tests.support import axes


def check(op: Op, text: str, **values: Any) -> int:
    """Run the program of the example with these axes; return the number of its calls of the op.

    Every argument is a variable that looks as the example declares it, or the example's value. Each call leaves what a
    call of the op with a value for every parameter leaves.
    """
    assert op.example is not None
    declared = op.example(ArgMaker(device.model()), **values)
    space: dict[str, Any] = {}
    calls = 0
    torch.manual_seed(0)
    for statement in ast.parse(text).body:
        code = compile(ast.Module([statement], []), f"<example of {op.name}>", "exec")
        if f"pyops.{op.name}" not in [ast.unparse(n.func).removesuffix(".new") for n in calls_in(statement)]:
            exec(code, space)
            continue
        args = [argument(p, one, space) for p, one in zip(op.parameters, declared, strict=True)]
        exec(code, space)
        op(*args)
        for p, one in zip(op.parameters, args, strict=True):
            if p.is_tensor and one is not None:
                assert same_bits(space[p.name], one), f"{op.name}: {p.name}"
        calls += 1
    return calls


def calls_in(statement: ast.stmt) -> list[ast.Call]:
    return [node for node in ast.walk(statement) if isinstance(node, ast.Call)]


def argument(p: Parameter, declared: Any, space: Mapping[str, Any]) -> Any:
    """The value of a parameter for a call of our own: a copy of the program's variable, or a new output.

    New outputs that the op writes in part begin as zeros.
    """
    name = p.name
    if not isinstance(declared, TensorArg):
        assert name not in space
        return declared
    dtype = getattr(torch, declared.dtype.name)
    if name not in space:
        return (torch.zeros if p.partial else torch.empty)(declared.shape, dtype=dtype)
    value = space[name]
    assert (value.dtype, value.shape, value.stride()) == (dtype, declared.shape, declared.strides), name
    copy = torch.empty_strided(value.shape, value.stride(), dtype=dtype)
    return copy.copy_(value)


@pytest.fixture(autouse=True)
def _same_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On the CPU, and torch.empty fills new memory, so that what an op leaves unwritten compares as equal, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.set_deterministic_debug_mode("warn")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize("name", [name for name, op in pyops.registry.items() if axes.fullest(op)])
def test_example_text_with_all_options_calls_the_op(name: str) -> None:
    op = pyops.registry[name]
    values = {"num_tokens": 3} | axes.fullest(op)
    assert check(op, pyops.example_text(name, **values), **values)


@pytest.mark.parametrize("name", pyops.registry)
def test_example_text_calls_the_op_as_its_example_does(name: str) -> None:
    op = pyops.registry[name]
    text = pyops.example_text(name)
    both_forms = f"pyops.{name}.new(" in text
    assert check(op, text) == 1 + both_forms
    assert not both_forms or hasattr(op.wrapper, "new")
    forms = [form.splitlines() for form in text.partition('"cpu"\n')[2].split("\n\n")]
    assert max(map(len, forms)) <= 16, "improve the example"
    assert max(len(line) for form in forms for line in form) <= 125, "improve the example"


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("rms_norm", "weight, 1e-6", "weight, 1e-1"),
        ("rms_norm", "(4096, dtype=torch.bfloat16", "(4096, dtype=torch.float16"),
        ("fused_add_rms_norm", "(input, residual,", "(residual, input,"),
        ("per_token_group_quant_int8", "-128.0, 127.0", "-128.0, 126.0"),
        ("grouped_topk", "topk_weights, topk_ids = ", "topk_ids, topk_weights = "),
        ("cutlass_scaled_mm", ".mT", ".mT.contiguous()"),
        ("gptq_gemm", "bit=4", "bit=8"),
    ],
)
def test_wrong_text_fails(name: str, right: str, wrong: str) -> None:
    text = pyops.example_text(name)
    assert right in text
    with pytest.raises((AssertionError, pyops.OpError)):
        check(pyops.registry[name], text.replace(right, wrong))


def test_example_text_takes_axes_and_the_op_itself() -> None:
    text = pyops.example_text(pyops.rms_norm, hidden_size=[64], dtype="float16")
    assert "input = torch.randn(16, 64, dtype=torch.float16, device=device)" in text.splitlines()
    assert text == pyops.example_text("rms_norm", hidden_size=64, dtype="float16")
    with pytest.raises(pyops.OpError, match="rms_norm: size: is no axis"):
        pyops.example_text("rms_norm", size=64)
    with pytest.raises(pyops.OpError, match="did you mean rms_norm"):
        pyops.example_text("rms_nrm")
