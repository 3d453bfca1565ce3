"""Which function of this library serves which op of vLLM."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pyops

from ..._core.errors import OpError
from ..._core.op import torch_library
from ..._core.op.op import Op, registry
from .adapters import ADAPTERS
from .adapters_0_33 import ADAPTERS_0_33
from .refusals import REFUSED_OPS
from .schemas import SCHEMAS, SCHEMAS_0_22
from .schemas_0_33 import REMOVED_0_33, SCHEMAS_0_33
from .signature import Signature

# {version of vLLM: {namespace: its new and changed schemas}}; a later version has the others of earlier ones, too.
_SCHEMAS = {"0.16": SCHEMAS, "0.22": SCHEMAS_0_22, "0.33": SCHEMAS_0_33}
_ADAPTERS = {**ADAPTERS, "0.33": ADAPTERS_0_33}
VERSIONS = tuple(_SCHEMAS)  # versions of vLLM with known schemas
# {op that vLLM defines in Python, not in its compiled libraries: the module that defines it at import}
DEFINED_IN_PYTHON = {
    "flashinfer_rotary_embedding": "vllm.model_executor.layers.rotary_embedding.common",
    "fused_moe_lora": "vllm.lora.ops.triton_ops.fused_moe_lora_op",
    "lora_expand": "vllm.lora.ops.triton_ops.lora_expand_op",
    "lora_shrink": "vllm.lora.ops.triton_ops.lora_shrink_op",
}


@dataclass(frozen=True)
class Entry:
    """An op of vLLM.

    Attributes:
        namespace: its namespace in torch.ops: ``"_C"``, ``"_C_cache_ops"``, ...
        name: its name in the namespace; ``"name.overload"`` for an overload.
        schema: the schema that vLLM registers.
        state: ``"served"`` if a function of this library takes its arguments as they are, ``"adapted"`` if an adapter
            passes them to such a function, ``"refused"`` if this library does not have it for a reason, or
            ``"missing"``.
        kernel: the function or adapter; it takes the arguments of the schema by position. None if refused or missing.
        ours: the function's name, the adapter's docstring, or the reason of a refusal; "" if missing.

    Examples:
        >>> entry = table("0.22")["rms_norm"]
        >>> entry.namespace, entry.state, entry.ours
        ('_C', 'served', 'rms_norm')
    """

    namespace: str
    name: str
    schema: str
    state: Literal["served", "adapted", "refused", "missing"]
    kernel: Callable[..., Any] | None = None
    ours: str = ""


def check_version(function: str, vllm: str) -> None:
    """Raise an OpError of `function` for a version without a table."""
    if vllm not in VERSIONS:
        raise OpError(function, "vllm", f"expected {' or '.join(VERSIONS)}, got {vllm}")


def table(vllm: str = VERSIONS[0]) -> dict[str, Entry]:
    """{name: entry} of every op of a version of vLLM, by the ops that are declared now.

    Args:
        vllm: ``"0.16"``; ``"0.22"`` for its changed and new ops, and the other ops of 0.16; or ``"0.33"``, without the
            ops that this version no longer has.

    Raises:
        OpError: another version.

    Examples:
        >>> {entry.state for entry in table("0.22").values()} <= {"served", "adapted"}
        True
        >>> entry = table("0.22")["silu_and_mul"]
        >>> entry.schema
        'silu_and_mul(Tensor! result, Tensor input) -> ()'
    """
    check_version("table", vllm)
    found: dict[str, Entry] = {}
    for version in VERSIONS[: VERSIONS.index(vllm) + 1]:
        found |= _entries(_SCHEMAS[version], version)
    return {name: entry for name, entry in found.items() if vllm != "0.33" or name not in REMOVED_0_33}


def _entries(schemas: dict[str, str], vllm: str) -> dict[str, Entry]:
    every = (_entry(namespace, line, vllm) for namespace, text in schemas.items() for line in text.split("\n")[1:-1])
    return {entry.name: entry for entry in every}


def _entry(namespace: str, schema: str, vllm: str) -> Entry:
    name = schema.partition("(")[0]
    if (adapter := _ADAPTERS[vllm].get(name)) is not None:
        return Entry(namespace, name, schema, "adapted", adapter, adapter.__doc__ or "")
    op, function = registry.get(name), getattr(pyops, name, None)
    if op is not None and declared(op).takes(Signature.read(schema)):
        return Entry(namespace, name, schema, "served", op.wrapper, op.name)
    if op is None and function is not None and takes_as_many(function, Signature.read(schema)):
        return Entry(namespace, name, schema, "served", function, name)
    if name in REFUSED_OPS:
        return Entry(namespace, name, schema, "refused", None, REFUSED_OPS[name])
    return Entry(namespace, name, schema, "missing")


def declared(op: Op) -> Signature:
    """The signature that `op` has by its declaration."""
    text = torch_library.returning_schema if op.declaration.returned else torch_library.schema
    return Signature.read(text(op.declaration))


def taken(entry: Entry) -> Signature:
    """The signature of the calls that the kernel of an entry takes: that of the op, which may be wider than vLLM's."""
    op = getattr(entry.kernel, "op", None)
    return Signature.read(entry.schema) if op is None else declared(op)


def takes_as_many(function: Callable[..., Any], theirs: Signature) -> bool:
    """Whether a plain function of this library takes the number of positional arguments of a signature."""
    try:
        inspect.signature(function).bind(*theirs.arguments)
    except TypeError:
        return False
    return True
