"""Rivals: kernels of other libraries that compute the same as an op.

A rival is a function from an op to a builder. A builder is a function from the op's arguments to a call without
arguments. A call may return tensors, which are then the op's first outputs, instead of writing them.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from pyops._core.op.op import Op

from .timing import Call

Builder = Callable[..., Call]


class Unavailable(Exception):
    """The reason why a rival cannot be measured."""


def ours(op: Op) -> Builder:
    """pyops itself, called through its Python wrapper."""
    return _with_all(op, op.call)


def _with_all(op: Op, function: Callable[..., Any]) -> Builder:
    return lambda *args: op.applied(function, args)


def builders(op: Op, names: Sequence[str]) -> tuple[dict[str, Builder], list[dict[str, str]]]:
    """({rival: builder}, [skipped rivals with reasons]) for the rivals `names`."""
    found, skips = {}, []
    for name in names:
        try:
            found[name] = RIVALS[name](op)
        except Exception as error:
            skips.append(skip(name, op, error))
    return found, skips


def skip(rival: str, op: Op, error: Exception) -> dict[str, str]:
    """The report's record of a rival skipped for `op`."""
    return {"rival": rival, "op": op.name, "reason": reason(error)}


def reason(error: Exception) -> str:
    """An error as one line without folder names; without its type if it is an `Unavailable`."""
    text = re.sub(r"(?<!\S)/\S*/", "", (str(error).strip().splitlines() or [""])[0])
    return text if isinstance(error, Unavailable) else f"{type(error).__name__}: {text}"


def _reference(op: Op) -> Builder:
    return _with_all(op, op.reference)


def _compile(op: Op) -> Builder:
    # Dynamo cannot trace through the proxy that imports torch on demand.
    op.reference.__globals__["torch"] = torch
    # Reset for every shape, because Dynamo runs functions uncompiled after its limit of recompilations.
    torch._dynamo.reset()
    return _with_all(op, torch.compile(op.reference, dynamic=False, fullgraph=True))


def _named(op: Op, table: dict[str, Callable[[Any], Call]]) -> Builder:
    """A rival from `table`, {name of an op: function from arguments to a call}.

    The function gets the arguments as a namespace, with `out` for the first written tensor.
    """
    if op.name not in table:
        raise Unavailable("has no such op")
    build = table[op.name]
    written = next(p.name for p in op.parameters if p.written)

    def builder(*args: Any) -> Call:
        named = dict(zip((p.name for p in op.parameters), args, strict=True))
        return build(SimpleNamespace(**{**named, "out": named[written]}))

    return builder


def _torch(op: Op) -> Builder:
    return _named(op, _TORCH)


def _gated(activation: Callable[[Any, Any], Any]) -> Callable[[Any], Call]:
    """activation(first half, arguments) * second half."""

    def build(a: Any) -> Call:
        gate, up = a.input.chunk(2, -1)
        return lambda: activation(gate, a) * up

    return build


def _plain(activation: Callable[[Any], Any]) -> Callable[[Any], Call]:
    return lambda a: partial(activation, a.input)


def _mul_and_silu(a: Any) -> Call:
    up, gate = a.input.chunk(2, -1)
    return lambda: up * F.silu(gate)


def _gelu_tanh(x: Any) -> Any:
    return F.gelu(x, approximate="tanh")


def _sdpa(a: Any) -> Call:
    """torch's attention on contiguous keys and values, which are copied out of the cache beforehand.

    Query heads that share a KV head become query rows of one head.
    """
    if a.kv_cache_dtype != "auto" or a.alibi_slopes is not None or getattr(a, "logits_soft_cap", 0.0):
        raise Unavailable("attends without options to a cache of floats")
    tables, longest = a.block_tables.long(), int(a.seq_lens.max())
    if a.key_cache.ndim == 5:  # [num_blocks, num_kv_heads, head_size / x, block_size, x]
        keys = a.key_cache[tables].permute(0, 2, 1, 4, 3, 5).flatten(4).flatten(2, 3)
        values = a.value_cache[tables].permute(0, 2, 1, 4, 3).flatten(2, 3)
    else:
        keys, values = (cache[tables].flatten(1, 2).transpose(1, 2) for cache in (a.key_cache, a.value_cache))
    keys, values = (x[:, :, :longest].contiguous() for x in (keys, values))
    query = a.query.unflatten(1, (a.num_kv_heads, -1))
    mask = None
    if int(a.seq_lens.min()) < longest:
        mask = (torch.arange(longest, device=query.device) < a.seq_lens[:, None])[:, None, None]

    def call() -> Any:
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=a.scale).flatten(1, 2)

    return call


def _conv1d(a: Any) -> Call:
    """torch's convolution of each sequence, with its state concatenated in front beforehand."""
    if not a.channel_last or a.initial_state_idx is not None:
        raise Unavailable("convolves rows of tokens without blocks here")
    pieces, slots = [], []
    for b, (begin, end) in enumerate(pairwise(a.query_start_loc.tolist())):
        if begin < end:
            history = a.conv_states[a.cache_indices[b]] * a.has_initial_state[b]
            pieces.append(torch.cat((history, a.x[begin:end])).t()[None].contiguous())
            slots.append(int(a.cache_indices[b]))
    weight, kept = a.weight[:, None], a.weight.shape[1] - 1

    def call() -> Any:
        for piece, slot in zip(pieces, slots, strict=True):
            a.conv_states[slot] = piece[0, :, -kept:].t()
        results = [F.conv1d(piece, weight, a.bias, groups=len(weight))[0] for piece in pieces]
        return F.silu(torch.cat(results, 1)).t()

    return call


_TORCH: dict[str, Callable[[Any], Call]] = {
    "causal_conv1d_prefill": _conv1d,
    "rms_norm": lambda a: partial(F.rms_norm, a.input, a.input.shape[-1:], a.weight, a.epsilon),
    "fused_add_rms_norm": lambda a: (
        lambda: F.rms_norm(a.residual.add_(a.input), a.input.shape[-1:], a.weight, a.epsilon)
    ),
    "layer_norm": lambda a: partial(F.layer_norm, a.input, a.input.shape[-1:], a.weight, a.bias, a.epsilon),
    "silu_and_mul": _gated(lambda gate, a: F.silu(gate)),
    "mul_and_silu": _mul_and_silu,
    "gelu_and_mul": _gated(lambda gate, a: F.gelu(gate)),
    "gelu_tanh_and_mul": _gated(lambda gate, a: _gelu_tanh(gate)),
    "fatrelu_and_mul": _gated(lambda gate, a: F.threshold(gate, a.threshold, 0.0)),
    "gelu_new": _plain(_gelu_tanh),
    "gelu_fast": _plain(_gelu_tanh),
    "gelu_quick": _plain(lambda x: x * torch.sigmoid(1.702 * x)),
    "relu2": _plain(lambda x: F.relu(x).square()),
    "paged_attention_v1": _sdpa,
    "moe_sum": lambda a: partial(torch.sum, a.input, 1),
    "shuffle_rows": lambda a: partial(torch.index_select, a.input_tensor, 0, a.dst2src_map),
}


@cache
def _import(name: str) -> Any:
    """The module, or the exception of its import, cached so that a failing import is tried only once."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        return error


def _module(name: str) -> Any:
    module = _import(name)
    if isinstance(module, Exception):
        raise Unavailable(f"import {name}: {reason(module)}")
    return module


def libraries() -> str:
    """vLLM's shared objects in load order, for machines where the package cannot be imported."""
    return os.environ.get("PYOPS_VLLM_LIBRARIES", "")


@cache
def load_vllm(paths: str) -> str:
    """Load vLLM's ops from its package, or else from its shared objects. Returns "" or the reason of the failure."""
    imported = _import("vllm._C")
    if not isinstance(imported, Exception):
        _import("vllm._moe_C")
        return ""
    if not paths:
        return f"import vllm._C: {reason(imported)}; PYOPS_VLLM_LIBRARIES is not set"
    try:
        for path in paths.split(os.pathsep):
            torch.ops.load_library(path)
    except Exception as error:
        return f"import vllm._C: {reason(imported)}; PYOPS_VLLM_LIBRARIES: {reason(error)}"
    return ""


def _vllm(op: Op) -> Builder:
    """``torch.ops._C.<name>``, with the op's arguments in the op's order.

    Older schemas lack the last arguments; newer ones have further optional arguments.
    """
    if trouble := load_vllm(libraries()):
        raise Unavailable(trouble)
    found = (getattr(getattr(torch.ops, name), op.name, None) for name in ("_C", "_C_cache_ops", "_moe_C"))
    packet = next((one for one in found if one is not None), None)
    if packet is None:
        raise Unavailable("has no such op")
    return partial(_fitted, packet, packet.default._schema.arguments)


def _fitted(function: Callable[..., Any], schema: Sequence[Any], *args: Any) -> Call:
    """`args` cut to the schema's length, or extended by None for further arguments without a default."""
    more = [None for argument in schema[len(args) :] if not argument.has_default_value()]
    return partial(function, *args[: len(schema)], *more)


def _flashinfer(op: Op) -> Builder:
    norm, activation = _module("flashinfer.norm"), _module("flashinfer.activation")

    def layernorm(a: Any) -> Call:  # FlashInfer takes weight and bias in float32 only
        return partial(norm.layernorm, a.input, a.weight.float(), a.bias.float(), a.epsilon)

    def decode(a: Any) -> Call:
        if a.key_cache.ndim == 5 or a.kv_cache_dtype != "auto":
            raise Unavailable("takes a flash cache of floats here")
        used = -(-a.seq_lens.int() // a.block_size)
        ends = F.pad(used.cumsum(0), (1, 0)).int()
        blocks = torch.cat([row[:count] for row, count in zip(a.block_tables, used.tolist(), strict=True)])
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=a.query.device)
        wrapper = _module("flashinfer.decode").BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        _, num_heads, head_size = a.query.shape
        last = a.seq_lens.int() - (used - 1) * a.block_size
        sizes = (num_heads, a.num_kv_heads, head_size, a.block_size)
        wrapper.plan(
            ends, blocks, last, *sizes, q_data_type=a.query.dtype, kv_data_type=a.query.dtype, sm_scale=a.scale
        )
        return partial(wrapper.run, a.query, (a.key_cache, a.value_cache), out=a.out)

    def rope(a: Any) -> Call:  # FlashInfer takes the table of cosines and sines in float32 only
        turn = _module("flashinfer.rope").apply_rope_with_cos_sin_cache_inplace
        if a.key is None:
            raise Unavailable("turns queries and keys together")
        return partial(turn, a.positions, a.query, a.key, a.head_size, a.cos_sin_cache.float(), a.is_neox)

    return _named(
        op,
        {
            "paged_attention_v1": decode,
            "rotary_embedding": rope,
            "rms_norm": lambda a: partial(norm.rmsnorm, a.input, a.weight, a.epsilon, out=a.out),
            "fused_add_rms_norm": lambda a: partial(norm.fused_add_rmsnorm, a.input, a.residual, a.weight, a.epsilon),
            "rms_norm_static_fp8_quant": lambda a: partial(
                norm.rmsnorm_quant, a.out, a.input, a.weight, a.scale.view(1), a.epsilon
            ),
            "fused_add_rms_norm_static_fp8_quant": lambda a: partial(
                norm.fused_add_rmsnorm_quant, a.out, a.input, a.residual, a.weight, a.scale.view(1), a.epsilon
            ),
            "gemma_rms_norm": lambda a: partial(norm.gemma_rmsnorm, a.input, a.weight, a.epsilon, out=a.out),
            "layer_norm": layernorm,
            "silu_and_mul": lambda a: partial(activation.silu_and_mul, a.input, out=a.out),
            "gelu_and_mul": lambda a: partial(activation.gelu_and_mul, a.input, out=a.out),
            "gelu_tanh_and_mul": lambda a: partial(activation.gelu_tanh_and_mul, a.input, out=a.out),
        },
    )


RIVALS: dict[str, Callable[[Op], Builder]] = {
    "reference": _reference,
    "torch": _torch,
    "compile": _compile,
    "vllm": _vllm,
    "flashinfer": _flashinfer,
}
