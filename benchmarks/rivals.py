"""Rivals: kernels of other libraries that compute the same as an op.

A rival is a function from an op to a builder. A builder is a function from the op's arguments to a call without
arguments. A call may return tensors, which are then the op's first outputs, instead of writing them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from pyops._core.op.op import Op

from . import attention_rivals, installed
from .installed import Unavailable, fitted, libraries, load_vllm, module, reason
from .timing import Call

Builder = Callable[..., Call]


def ours(op: Op) -> Builder:
    """pyops itself, called through its Python wrapper."""
    return _with_all(op, op.call)


def _with_all(op: Op, function: Callable[..., Any]) -> Builder:
    return lambda *args: op.applied(function, args)


def builders(op: Op, names: Sequence[str]) -> tuple[dict[str, Builder], list[dict[str, str]]]:
    """({rival: builder}, [skipped rivals with reasons]) for the rivals `names`."""
    found, skips = {}, []
    for name in (one for one in names if one not in installed.left_out):
        try:
            found[name] = RIVALS[name](op)
        except Exception as error:
            skips.append(skip(name, op, error))
    return found, skips


def skip(rival: str, op: Op, error: Exception) -> dict[str, str]:
    """The report's record of a rival skipped for `op`."""
    return {"rival": rival, "op": op.name, "reason": reason(error)}


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


def _of_logits(function: Callable[..., Any]) -> Callable[[Any], Call]:
    """A function over the vocabulary."""

    def build(a: Any) -> Call:
        if a.temperature is not None:
            raise Unavailable("has no temperature")
        return partial(function, a.logits, -1)

    return build


def _gelu_tanh(x: Any) -> Any:
    return F.gelu(x, approximate="tanh")


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
    "paged_attention_v1": lambda a: attention_rivals.of_one_token(vars(a)),
    "softmax": _of_logits(torch.softmax),
    "log_softmax": _of_logits(torch.log_softmax),
    "moe_sum": lambda a: partial(torch.sum, a.input, 1),
    "shuffle_rows": lambda a: partial(torch.index_select, a.input_tensor, 0, a.dst2src_map),
}


def _vllm(op: Op) -> Builder:
    """``torch.ops._C.<name>``, with the op's arguments in the op's order."""
    if trouble := load_vllm(libraries()):
        raise Unavailable(trouble)
    found = (getattr(getattr(torch.ops, name), op.name, None) for name in ("_C", "_C_cache_ops", "_moe_C"))
    packet = next((one for one in found if one is not None), None)
    if packet is None:
        raise Unavailable("has no such op")
    return partial(fitted, packet)


def _flashinfer(op: Op) -> Builder:
    norm, activation = module("flashinfer.norm"), module("flashinfer.activation")

    def layernorm(a: Any) -> Call:  # FlashInfer takes weight and bias in float32 only
        return partial(norm.layernorm, a.input, a.weight.float(), a.bias.float(), a.epsilon)

    def rope(a: Any) -> Call:  # FlashInfer takes the table of cosines and sines in float32 only
        turn = module("flashinfer.rope").apply_rope_with_cos_sin_cache_inplace
        if a.key is None:
            raise Unavailable("turns queries and keys together")
        return partial(turn, a.positions, a.query, a.key, a.head_size, a.cos_sin_cache.float(), a.is_neox)

    def sample(a: Any) -> Call:
        if a.min_p is not None or a.temperature is not None or a.top_k is None or a.top_p is None:
            raise Unavailable("filters by top-k and top-p together, without a temperature")
        draw = module("flashinfer.sampling").top_k_top_p_sampling_from_logits
        # Newer versions sort the tokens that top-k keeps, which is faster, if they are told the largest one.
        largest = {"top_k_max": int(a.top_k.max())} if "top_k_max" in inspect.signature(draw).parameters else {}
        return partial(draw, a.logits, a.top_k, a.top_p, seed=1, offset=0, **largest)

    return _named(
        op,
        {
            "softmax": lambda a: partial(module("flashinfer.sampling").softmax, a.logits, a.temperature),
            "top_k_top_p_sampling_from_logits": sample,
            "paged_attention_v1": lambda a: attention_rivals.flash_infer(vars(a)),
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
